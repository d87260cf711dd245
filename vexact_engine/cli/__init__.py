"""The command `vexact`: demo, verify, bisect, generate, chat, serve, doctor, bench, recipe.

Exit codes: 0 equal or done, 1 something differs, a check failed or a prompt was not verified, 2 usage or environment,
130 Ctrl-C, 143 SIGTERM. Results go to standard output, or to standard error where `--json -` gives a document to
standard output; progress (a bar on a terminal, plain lines elsewhere) and errors, one line each, go to standard error.
"""

import argparse
import contextlib
import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator

from ..extras import check_installed
from . import bench, bisect, chat, doctor, generate, options, recipe, serve, verify

COMMANDS = (
    verify.add_demo,
    verify.add_verify,
    bisect.add_bisect,
    generate.add_generate,
    chat.add_chat,
    serve.add_serve,
    doctor.add_doctor,
    bench.add_bench,
    recipe.add_recipe,
)


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    argv = sys.argv[1:] if argv is None else argv
    parser, commands = _parser()
    args, unknown = parser.parse_known_args(_words(argv))
    if unknown:
        commands.choices[args.command].error("unrecognized arguments: " + " ".join(unknown))
    args.line, args.flags = (
        shlex.join(["vexact", *argv]),
        options.flags(commands.choices[args.command]),
    )
    args.given = options.given(parser, commands, _words(argv))
    args.stdout = sys.stdout
    try:
        check_installed(args)
        with _until_sigterm(), contextlib.ExitStack() as around:
            if getattr(args, "json", None) == "-":  # the document alone: people read the rest on the other stream
                around.enter_context(contextlib.redirect_stdout(sys.stderr))
            code = args.run(args)
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(f"vexact {args.command}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader has gone (`| head`): nothing more to say, and no traceback at exit either
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if args.debug:
            raise
        text = options.name_option(" ".join(str(error).split()) or type(error).__name__, args.flags)
        text = text.removeprefix(f"{args.command}: ")  # as the Python interface begins, which has no command
        if isinstance(error, OSError) and error.filename and error.strerror:  # without its number
            text = f"{error.filename}: {error.strerror}"
        known = isinstance(error, ValueError | TypeError | OSError | RuntimeError | ImportError)
        print(f"vexact {args.command}: {text if known else f'{type(error).__name__}: {text}'}", file=sys.stderr)
        return 2


@contextlib.contextmanager
def _until_sigterm() -> Iterator[None]:
    """What ends a job ends it as Ctrl-C does: engines are closed, and no folder of theirs is left in /tmp."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return

    def end(number: int, frame) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _words(argv: list[str]) -> list[str]:
    """For the parser: the options of `bench` are its own, and where a command takes a model without a name, one with
    its name, as other commands take it, is understood."""
    if argv[:1] in (["chat"], ["serve"]):
        argv = [part for word in argv if word != "--model" for part in [word.removeprefix("--model=")]]
    return ["bench", "--", *argv[1:]] if argv[:1] == ["bench"] else argv


def _parser():
    """The parser, and its commands by name."""
    parser = argparse.ArgumentParser(
        prog="vexact",
        description="Rollout and trainer log-probabilities, equal bit for bit.",
        epilog="vexact COMMAND --help has every option, its default and examples.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"vexact {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=options.Parser)
    for add in COMMANDS:
        add(commands)
    return parser, commands


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("vexact")
    except metadata.PackageNotFoundError:
        import vexact_ops

        return vexact_ops.__version__
