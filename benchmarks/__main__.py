"""The benchmark command line.

python -m benchmarks linear --device cpu --shape smollm2-135m --rows 1,16,64
python -m benchmarks rmsnorm --shape qwen3-8b --rows 1,256 --peers torch,quack --plot
python -m benchmarks linear --shape all --rows random:64 --peers torch --save
python -m benchmarks all --save
python -m benchmarks engine --shape qwen3-1.7b --batch 1,64,256 --prompt 512 --new 512 --profile traces
"""

import argparse
import importlib
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from . import engine, handover, harness, report, rollout, training
from .shapes import SHAPES

ROOMS = sorted(path.stem for path in (Path(__file__).parent / "ops").glob("*.py") if path.stem != "__init__")
PROGRAMS = (
    "admit",
    "engine",
    "handover",
    "memory",
    "rollout",
    "training",
    "verify",
)  # whole programs rather than kernels


DEFAULTS = {
    "cpu": {"shape": "smollm2-135m", "rows": "1,16,64,512", "dtype": "float32,bfloat16"},
    "cuda": {"shape": "qwen3-0.6b,qwen3-1.7b,qwen3-4b,qwen3-8b", "rows": "1,16,256,8192", "dtype": "bfloat16"},
}


def parse(argv: list[str] | None = None, prog: str = "python -m benchmarks") -> argparse.Namespace:
    examples = __doc__.split("\n\n")[1].strip().replace("python -m benchmarks", prog)
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__.split("\n\n")[0],
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("what", choices=[*ROOMS, *PROGRAMS, "all", "report"], help="a room, 'all' rooms, or a program")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", help=f"'all', or comma-separated, of: {', '.join(SHAPES)}")
    parser.add_argument(
        "--model", metavar="DIR", help="verify, engine: a model's own weights instead of a shape's random ones"
    )
    parser.add_argument("--layers", type=int, help="verify, engine: the first so many layers of a shape; default: all")
    parser.add_argument(
        "--latent", action="store_true", help="verify, engine: latent attention (DeepSeek-V3, Moonlight)"
    )
    parser.add_argument(
        "--rows",
        help="comma-separated row counts; or random:64[:seed], so many from 1 to 1,024: how time / stock spreads over "
        "them is said at the end, and is what --save keeps",
    )
    parser.add_argument("--dtype", help="comma-separated, of: float32, bfloat16, float16")
    parser.add_argument("--peers", help="comma-separated, such as torch,quack,liger; default: all that are installed")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs: host time counts (GPU only)")
    parser.add_argument(
        "--json", nargs="?", const="-", metavar="FILE", help="print JSON lines instead of a table, or append to FILE"
    )
    parser.add_argument("--save", action="store_true", help="append records to benchmarks/results/<device>.jsonl")
    parser.add_argument(
        "--plot", nargs="?", const=Path("plots"), type=Path, metavar="FOLDER", help="write PNG plots (default: plots)"
    )
    engine.options(parser)
    handover.options(parser)
    rollout.options(parser)
    training.options(parser)
    args = parser.parse_args(argv)
    args.shape_given = args.shape is not None
    defaults = DEFAULTS[args.device]
    args.shape, args.rows, args.dtype = (getattr(args, k) or defaults[k] for k in ("shape", "rows", "dtype"))
    args.shape = ",".join(SHAPES) if args.shape == "all" else args.shape
    for name in args.shape.split(","):
        if name not in SHAPES:
            parser.error(f"--shape: got {name!r}, expected one of {', '.join(SHAPES)}")
    args.drawn = args.rows if args.rows.startswith("random:") else None
    try:
        args.rows = drawn(args.rows) if args.drawn else [int(r) for r in args.rows.split(",")]
        if min(args.rows) < 1:
            raise ValueError
    except ValueError:
        parser.error(
            f"--rows: got {args.rows!r}, expected positive integers such as 1,16,64, or random:64, random:64:1"
        )
    if args.drawn and args.what not in ROOMS:
        parser.error(f"--rows: got {args.drawn!r}, expected a room to measure with it, not {args.what!r}")
    for name in args.dtype.split(","):
        if name not in ("float32", "bfloat16", "float16"):
            parser.error(f"--dtype: got {name!r}, expected float32, bfloat16 or float16")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if args.what == "engine":
        engine.check(args, parser)
    return args


def drawn(text: str) -> list[int]:
    """The row counts of random:COUNT or random:COUNT:SEED, ascending."""
    _, count, *seed = text.split(":")
    (seed,) = seed or ["0"]
    source = random.Random(int(seed))
    return sorted(source.randint(1, 1024) for _ in range(int(count)))


def main(argv: list[str] | None = None, prog: str = "python -m benchmarks") -> int:
    args = parse(argv, prog)
    if (args.save or args.what == "report") and not (harness.ROOT / "pyproject.toml").exists():
        what = "report" if args.what == "report" else "--save"
        raise ValueError(f"{what}: records are kept in a source tree, expected one: --json FILE writes them anywhere")
    if args.what == "report":
        report.update_readmes()
        for results in sorted(harness.RESULTS.glob("*.jsonl")) if args.plot else ():
            for path in report.plot(report.load(results), args.plot / results.stem):
                print(f"wrote {path}")
        return 0
    names = ROOMS if args.what == "all" else [args.what]
    to_stdout, only = args.json == "-", None if args.peers is None else args.peers.split(",")
    files = [Path(args.json)] if args.json and not to_stdout else []
    saved = [harness.results_file(args.device)] if args.save else []
    records, failed, timed = [], False, set()

    def keep(new: list[dict], to: list[Path]) -> None:  # at once: what was measured survives what comes after it
        records.extend(new)
        for file in to:
            harness.append(new, file)

    for name in names:
        if name in PROGRAMS:
            for record in importlib.import_module(f"benchmarks.{name}").run(args):
                print(json.dumps(record), flush=True)
                keep([record], files + saved)
            continue
        if not to_stdout:
            print(f"\n{name}\n{harness.HEADER}")
        for case in _cases(name, args):
            try:
                measured = harness.measure(case, args.device, repeats=args.repeats, only=only, eager=args.eager)
            except AssertionError as error:
                print(error, file=sys.stderr)
                failed = True
                continue
            for record in measured:
                print(json.dumps(record) if to_stdout else harness.line(record), flush=True)
            timed |= {record["backend"] for record in measured}
            keep(measured, files if args.drawn else files + saved)
        if args.drawn:
            for record in report.spreads(records, name, args.drawn):
                print(json.dumps(record) if to_stdout else report.spread_line(record), flush=True)
                keep([record], files + saved)
    if timed and (missing := sorted(set(only or ()) - timed)):
        print(f"--peers: {', '.join(missing)}: in none of these cases, or not installed", file=sys.stderr)
        failed = True
    if args.plot:
        for path in report.plot(records, args.plot):
            print(path, file=sys.stderr if to_stdout else sys.stdout)
    return 1 if failed else 0


def _cases(name: str, args: argparse.Namespace) -> Iterator[harness.Case]:
    cases = importlib.import_module(f"benchmarks.ops.{name}").cases
    for shape in args.shape.split(","):
        for dtype in args.dtype.split(","):
            yield from cases(SHAPES[shape], args.rows, getattr(torch, dtype), args.device)


if __name__ == "__main__":
    raise SystemExit(main())
