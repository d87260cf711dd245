"""The command `vexact`: demo, verify, generate, chat, serve, doctor.

Exit codes: 0 equal or done, 1 something differs or a check failed, 2 usage or environment, 130 Ctrl-C. Results go to
standard output; progress (on a terminal only) and errors, one line each, to standard error.
"""

import argparse
import os
import sys

from ..extras import check_installed
from . import chat, doctor, generate, serve, verify


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = _parser().parse_args(argv)
    try:
        check_installed(args)
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
        text = " ".join(str(error).split()) or type(error).__name__
        known = isinstance(error, ValueError | TypeError | OSError | RuntimeError)
        print(f"vexact {args.command}: {text if known else f'{type(error).__name__}: {text}'}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vexact", description="Rollout and trainer log-probabilities, equal bit for bit."
    )
    parser.add_argument("--version", action="version", version=f"vexact {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add in (
        verify.add_demo,
        verify.add_verify,
        generate.add_generate,
        chat.add_chat,
        serve.add_serve,
        doctor.add_doctor,
    ):
        add(commands)
    return parser


def _version() -> str:
    from importlib import metadata

    try:
        return metadata.version("vexact")
    except metadata.PackageNotFoundError:
        import vexact_ops

        return vexact_ops.__version__
