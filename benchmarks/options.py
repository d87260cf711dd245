"""The options of the command line, and what is made of their texts."""

import argparse
import importlib
import random
import shlex
from pathlib import Path

import torch

from . import engine, handover, peers, rollout, training
from .shapes import SHAPES, Shape, free

ROOMS = sorted(path.stem for path in (Path(__file__).parent / "ops").glob("*.py") if path.stem != "__init__")
# whole ones, not kernels
PROGRAMS = ("admit", "engine", "handover", "imports", "memory", "rollout", "training", "verify")
DTYPES = ("float32", "bfloat16", "float16")
FREE = ("n", "k", "experts", "top_k", "heads", "kv_heads", "head_dim")
DEFAULTS = {
    "cpu": {"shape": "smollm2-135m", "rows": "1,16,64,512", "dtype": "float32,bfloat16"},
    "cuda": {"shape": "qwen3-0.6b,qwen3-1.7b,qwen3-4b,qwen3-8b", "rows": "1,16,256,8192", "dtype": "bfloat16"},
}


def parser_of(prog: str, text: str) -> argparse.ArgumentParser:
    """The parser; text is what the program says of itself, an empty line, and examples."""
    description, examples = text.split("\n\n")[:2]
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=f"examples:\n{examples.strip().replace('python -m benchmarks', prog)}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("what", choices=[*ROOMS, *PROGRAMS, "all", "report"], help="a room, 'all' rooms, a program, or the report")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: the GPU where there is one")
    add("--shape", help=f"'all', or comma-separated, of: {', '.join(SHAPES)}")
    add("--dtype", help=f"comma-separated, of: {', '.join(DTYPES)}")
    add(
        "--rows",
        help="comma-separated row counts; 1..8192 for the powers of two between them; or random:64[:seed], so many "
        "from 1 to 1,024: how time / stock spreads over them is said at the end, and is what --save keeps",
    )
    add("--case", metavar="TEXT", help="only cases whose name has this in it")
    add("--peers", help="comma-separated, such as torch,quack,liger; default: all that are installed")
    add("--peer-path", metavar="DIRS", help=f"where else peers may be imported from; default: ${peers.PATH}")
    add("--repeats", type=int, default=15, help="rounds, of which a record has the median, p10 and p90 (15)")
    add("--eager", action="store_true", help="no CUDA graphs: host time counts (GPU only)")
    add(
        "--refcheck", action="store_true", help="also compare with float64; 1 is returned where ours is too far from it"
    )
    _shapes(parser)
    _outputs(parser)
    group = parser.add_argument_group("verify and engine")
    group.add_argument("--model", metavar="DIR", help="a model's own weights instead of a shape's random ones")
    group.add_argument("--layers", type=int, help="the first so many layers of a shape; default: all")
    group.add_argument("--latent", action="store_true", help="latent attention (DeepSeek-V3, Moonlight)")
    for program in (engine, handover, rollout, training):
        program.options(parser)
    return parser


def _shapes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a shape of no model, instead of --shape")
    group.add_argument("--n", type=int, help="features: of the matrix, the row, the vocabulary, the expert")
    group.add_argument("--k", type=int, help="reduction: of the matrix; the hidden size")
    group.add_argument("--experts", type=int)
    group.add_argument("--top-k", type=int, help="experts of a token")
    group.add_argument("--heads", type=int, help="of queries")
    group.add_argument("--kv-heads", type=int)
    group.add_argument("--head-dim", type=int)
    group.add_argument("--lengths", help="attention: a sweep over these numbers of keys, such as 512..131072")


def _outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is written")
    group.add_argument("--json", metavar="FILE", help="all records as one JSON document; - for standard output")
    group.add_argument("--csv", metavar="FILE", help="a line for each record; - for standard output")
    group.add_argument("--lines", type=Path, metavar="FILE", help="append each record at once, as a line of JSON")
    group.add_argument("--save", action="store_true", help="append to benchmarks/results/<device>.jsonl; of a commit")
    group.add_argument("--plot", nargs="?", const=Path("plots"), type=Path, metavar="FOLDER", help="write SVG charts")
    group.add_argument(
        "--readme", action="store_true", help="report: rewrite the README files and charts from the kept records"
    )


def parse(argv: list[str] | None, prog: str, text: str) -> argparse.Namespace:
    parser = parser_of(prog, text)
    args = parser.parse_args(argv)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if args.readme and args.what != "report":
        parser.error(f"--readme: expected 'report', not {args.what!r}: a run keeps its records with --save")
    if args.what == "report":
        for name in ("json", "csv", "lines", "save"):
            if getattr(args, name):
                parser.error(f"--{name}: expected a run: report measures nothing, and has no records to write")
    if args.json == "-" and args.csv == "-":
        parser.error("--csv: standard output takes one document, and --json - has it")
    args.shape_given, args.rows_given = args.shape is not None, args.rows is not None
    for name, value in DEFAULTS[args.device].items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    args.shape = ",".join(SHAPES) if args.shape == "all" else args.shape
    for name in args.shape.split(","):
        if name not in SHAPES:
            parser.error(f"--shape: got {name!r}, expected one of {', '.join(SHAPES)}")
    for name in args.dtype.split(","):
        if name not in DTYPES:
            parser.error(f"--dtype: got {name!r}, expected {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    _check_rows(args, parser)
    _check_shapes(args, parser)
    try:
        peers.add_paths(args.peer_path)
    except ValueError as error:
        parser.error(str(error))
    if args.what == "engine":
        engine.check(args, parser)
    return args


def _check_rows(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    args.rows_text = args.rows
    args.drawn = args.rows if args.rows.startswith("random:") else None
    for name, given in (("rows", args.rows), ("lengths", args.lengths)):
        try:
            setattr(args, name, numbers(given) if given else [])
        except ValueError:
            also = ", or random:64, random:64:1" if name == "rows" else ""
            parser.error(f"--{name}: got {given!r}, expected positive integers such as 1,16,64, or 1..8192{also}")
    if args.drawn and args.what not in ROOMS:
        parser.error(f"--rows: got {args.drawn!r}, expected a room to measure with it, not {args.what!r}")
    if args.lengths and args.what != "attention":
        parser.error(f"--lengths: expected attention, not {args.what!r}")


def _check_shapes(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """args.free: the one shape that --n, --k and their like make; None where there is none of them."""
    sizes = {name: getattr(args, name) for name in FREE if getattr(args, name) is not None}
    args.free = None
    if not sizes:
        return
    flag = {name: f"--{name.replace('_', '-')}" for name in FREE}
    if args.what not in ROOMS:
        parser.error(f"{flag[next(iter(sizes))]}: expected a room to measure with it, not {args.what!r}")
    if args.shape_given:
        parser.error(f"{flag[next(iter(sizes))]}: --shape says all sizes already")
    takes = module(args.what).FREE
    for name, size in sizes.items():
        if name not in takes:
            parser.error(f"{flag[name]}: {args.what} takes {', '.join(flag[n] for n in takes)}")
        if size < 1:
            parser.error(f"{flag[name]}: got {size}, expected 1 or more")
    for name in takes:
        if name not in sizes:
            parser.error(f"{flag[name]}: {args.what} of a free shape needs it")
    args.free = free(sizes, takes)


def module(room: str):
    return importlib.import_module(f"benchmarks.ops.{room}")


def shapes(args: argparse.Namespace) -> list[Shape]:
    return [args.free] if args.free else [SHAPES[name] for name in args.shape.split(",")]


def numbers(text: str) -> list[int]:
    """1,16,64; powers of two as 1..8192; or random:COUNT[:SEED], ascending."""
    if text.startswith("random:"):
        return drawn(text)
    if ".." in text:
        first, last = (int(t) for t in text.split(".."))
        found = [first << i for i in range(64) if 0 < first << i <= last]
    else:
        found = [int(t) for t in text.split(",")]
    if not found or min(found) < 1:
        raise ValueError(text)
    return found


def drawn(text: str) -> list[int]:
    """The row counts of random:COUNT or random:COUNT:SEED, ascending."""
    _, count, *seed = text.split(":")
    (seed,) = seed or ["0"]
    source = random.Random(int(seed))
    found = sorted(source.randint(1, 1024) for _ in range(int(count)))
    if not found:
        raise ValueError(text)
    return found


def again(args: argparse.Namespace, room: str, shape: Shape, dtype: str, case: str) -> str:
    """The command line that measures one case anew."""
    words = ["vexact", "bench", room, "--device", args.device, "--dtype", dtype]
    if args.free:
        for name in FREE:
            if getattr(args, name) is not None:
                words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    else:
        words += ["--shape", shape.name]
    words += ["--rows", args.rows_text]
    if args.lengths:
        words += ["--lengths", ",".join(map(str, args.lengths))]
    words += ["--repeats", str(args.repeats), *(["--eager"] if args.eager else []), "--case", case]
    return shlex.join(words)
