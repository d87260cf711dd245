"""The benchmark command line.

python -m benchmarks linear --device cpu --shape smollm2-135m --rows 1,16,64
python -m benchmarks all --device cpu --save
python -m benchmarks engine --device cpu
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import torch

from . import harness, report
from .shapes import SHAPES

ROOMS = sorted(path.stem for path in (Path(__file__).parent / "ops").glob("*.py") if path.stem != "__init__")
PROGRAMS = ("engine", "memory")  # whole programs rather than kernels


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n\n")[0])
    parser.add_argument("what", choices=[*ROOMS, *PROGRAMS, "all", "report"], help="a room, 'all' rooms, or a program")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", default="smollm2-135m", help=f"comma-separated, of: {', '.join(SHAPES)}")
    parser.add_argument("--rows", default="1,16,64,512", help="comma-separated row counts")
    parser.add_argument("--dtype", default="float32,bfloat16", help="comma-separated")
    parser.add_argument("--peers", help="comma-separated; default: all that are installed")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path, metavar="FILE", help="append records to FILE")
    parser.add_argument("--save", action="store_true", help="append records to benchmarks/results/<device>.jsonl")
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="write PNG plots of this run")
    args = parser.parse_args(argv)
    for name in args.shape.split(","):
        if name not in SHAPES:
            parser.error(f"--shape: got {name!r}, expected one of {', '.join(SHAPES)}")
    try:
        args.rows = [int(r) for r in args.rows.split(",")]
        if min(args.rows) < 1:
            raise ValueError
    except ValueError:
        parser.error(f"--rows: got {args.rows!r}, expected positive integers such as 1,16,64")
    for name in args.dtype.split(","):
        if name not in ("float32", "bfloat16", "float16"):
            parser.error(f"--dtype: got {name!r}, expected float32, bfloat16 or float16")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.what == "report":
        report.update_readme()
        return 0
    names = ROOMS if args.what == "all" else [args.what]
    records, failed = [], False
    for name in names:
        if name in PROGRAMS:
            for record in importlib.import_module(f"benchmarks.{name}").run(args):
                print(json.dumps(record), flush=True)
                records.append(record)
            continue
        print(f"\n{name}\n{harness.HEADER}")
        for shape in (SHAPES[s] for s in args.shape.split(",")):
            for dtype in (getattr(torch, d) for d in args.dtype.split(",")):
                for case in importlib.import_module(f"benchmarks.ops.{name}").cases(
                    shape, args.rows, dtype, args.device
                ):
                    try:
                        measured = harness.measure(
                            case, args.device, repeats=args.repeats, peers=args.peers and args.peers.split(",")
                        )
                    except AssertionError as error:
                        print(error, file=sys.stderr)
                        failed = True
                        continue
                    for record in measured:
                        print(harness.line(record), flush=True)
                    records += measured
    if args.json:
        harness.append(records, args.json)
    if args.save:
        harness.append(records, harness.results_file(args.device))
    if args.plot:
        for path in report.plot(records, args.plot):
            print(path)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
