"""Bits first, then times: every op beside its peers, and whole programs: the engine, memory, the hand-over of weights.

python -m benchmarks linear --device cpu --shape smollm2-135m --rows 1,16,64
python -m benchmarks linear --n 4096 --k 14336 --rows 1..4096 --refcheck --csv linear.csv
python -m benchmarks rmsnorm --shape qwen3-8b --rows 1,256 --peers torch,quack --plot
python -m benchmarks attention --shape qwen3-8b --rows 1,64 --lengths 512..131072
python -m benchmarks linear --shape all --rows random:64 --peers torch --save
python -m benchmarks memory --shape qwen3-8b --rows 1024..32768
python -m benchmarks engine --shape qwen3-1.7b --batch 1,64,256 --prompt 512 --new 512 --profile traces
python -m benchmarks all --save
python -m benchmarks report --readme
"""

import argparse
import contextlib
import importlib
import json
import logging
import shlex
import sys
from collections.abc import Iterator

import torch

from . import checks, harness, options, output, report, start


class Run:
    """What a run has found so far. Records are appended to the files of lines as they come: what was measured survives
    what comes after it."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.files = args, output.files(args)
        self.records: list[dict] = []
        self.failures: list[str] = []
        self.timed: set[str] = set()
        self.quiet = args.json == "-" or args.csv == "-"  # standard output is a document

    def say(self, text: str) -> None:
        if not self.quiet:
            print(text, flush=True)

    def fail(self, text: str) -> None:
        print(text, file=sys.stderr)
        self.failures.append(text)

    def keep(self, records: list[dict], saved: bool = True) -> None:
        """saved=False: not in benchmarks/results."""
        self.records.extend(records)
        for file in self.files if saved else [file for file in self.files if file == self.args.lines]:
            harness.append(records, file)


def parse(argv: list[str] | None = None, prog: str = "python -m benchmarks") -> argparse.Namespace:
    return options.parse(argv, prog, __doc__)


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks") -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = parse(argv, prog)
    if args.what == "report":
        output.check_report(args)
        return report.main(args)
    output.check(args)
    if args.log:
        logging.basicConfig(level=logging.INFO, format=start.LOG)
    run = Run(args)
    try:
        for name in options.ROOMS if args.what == "all" else [args.what]:
            (_program if name in options.PROGRAMS else _room)(run, name)
        _missing(run)
    finally:
        output.write(args, shlex.join(["vexact", "bench", *argv]), run.records, run.failures)
    if args.plot:
        for path in report.plot(run.records, args.plot):
            run.say(str(path))
    return 1 if run.failures else 0


def _program(run: Run, name: str) -> None:
    for record in importlib.import_module(f"benchmarks.{name}").run(run.args):
        run.say(json.dumps(record))
        run.keep([record])
        for text in checks.failures(record):
            run.fail(text)


def _room(run: Run, name: str) -> None:
    args = run.args
    run.say(f"\n{name}\n{harness.HEADER}")
    only = None if args.peers is None else args.peers.split(",")
    measured = []
    for case, again in _cases(name, args):
        try:
            found = harness.measure(
                case, args.device, repeats=args.repeats, only=only, eager=args.eager, refcheck=args.refcheck
            )
        except AssertionError as error:
            run.fail(str(error))
            continue
        for record in found:
            record["command"] = again
            run.say(harness.line(record))
            if not record.get("error", {}).get("accurate", True):
                run.fail(f"{name} {case.name}: {record['backend']} is farther from float64 than it may be")
        run.timed |= {record["backend"] for record in found}
        measured += found
        run.keep(found, saved=not args.drawn)
    if args.drawn:
        for record in report.spreads(measured, name, args.drawn):
            run.say(report.spread_line(record))
            run.keep([record])


def _cases(name: str, args: argparse.Namespace) -> Iterator[tuple[harness.Case, str]]:
    """Cases, and the command line that measures each anew."""
    cases = options.module(name).cases
    more = {"lengths": args.lengths} if args.lengths else {}
    for shape in options.shapes(args):
        for dtype in args.dtype.split(","):
            for case in cases(shape, args.rows, getattr(torch, dtype), args.device, **more):
                if args.case is None or args.case in case.name:
                    yield case, options.again(args, name, shape, dtype, case.name)


def _missing(run: Run) -> None:
    """What was asked for and came in no case."""
    if run.args.what in options.ROOMS and not run.records and not run.failures:
        run.fail("no case: of these shapes, rows and dtypes none is measured" + " with that name" * bool(run.args.case))
    asked = set() if run.args.peers is None else set(run.args.peers.split(","))
    if run.timed and (missing := sorted(asked - run.timed)):
        run.fail(f"--peers: {', '.join(missing)}: in none of these cases, or not installed")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        try:
            raise SystemExit(main())
        except output.Refused as error:
            print(f"python -m benchmarks: {error}", file=sys.stderr)
            raise SystemExit(2) from None
