"""The options of the command line, and what is made of their texts."""

import argparse
import importlib
import random
import shlex
from pathlib import Path

import torch

from . import (
    engine,
    gather,
    handover,
    handover_ranks,
    images,
    peers,
    repeats,
    rl_step,
    rollout,
    speculation,
    start,
    training,
    ulysses,
)
from .shapes import SHAPES, Shape, free

ROOMS = sorted(path.stem for path in (Path(__file__).parent / "ops").glob("*.py") if path.stem != "__init__")
# What the programs beside the rooms read, and their own groups of options.
PROGRAMS = {
    "admit": {"shape", "dtype"},
    "commands": {"case"},
    "engine": {"shape", "dtype", "peers", "peer_path", "model", "layers", "latent", "log"},
    "gather": {"rows"},
    "handover": {"shape", "repeats", "layers"},
    "handover_ranks": {"shape", "repeats", "layers"},
    "images": {"repeats", "layers", "new", "seed"},
    "imports": {"repeats"},
    "memory": {"shape", "dtype", "rows"},
    "repeats": {"shape", "layers"},
    "rl_step": {"shape", "model", "layers", "steps", "prompts", "samples"},
    "rollout": {"shape", "repeats", "layers"},
    "speculation": {"shape", "dtype", "model", "layers", "batch", "prompt", "new", "seed", "log", "case"},
    "start": {"shape", "layers", "log"},
    "training": {"shape", "repeats", "layers"},
    "trl_steps": {"shape", "model", "layers", "steps", "prompts", "samples", "new"},
    "ulysses": {"shape", "repeats", "layers", "ranks"},
    "verify": {"shape", "dtype", "model", "layers", "latent", "log"},
}
OWN = {
    "engine": engine,
    "gather": gather,
    "handover": handover,
    "handover_ranks": handover_ranks,
    "images": images,
    "repeats": repeats,
    "rl_step": rl_step,
    "rollout": rollout,
}
OWN |= {"speculation": speculation, "start": start, "training": training, "ulysses": ulysses}
DTYPES = ("float32", "bfloat16", "float16")
FREE = ("n", "k", "experts", "top_k", "heads", "kv_heads", "head_dim")
OF_A_ROOM = {"shape", "dtype", "rows", "case", "peers", "peer_path", "repeats", "eager", "refcheck", "lengths", *FREE}
OF_ALL = {"what", "device", "json", "csv", "lines", "save", "plot", "readme"}
DEFAULTS = {
    "cpu": {"shape": "smollm2-135m", "rows": "1,16,64,512", "dtype": "float32,bfloat16"},
    "cuda": {"shape": "qwen3-0.6b,qwen3-1.7b,qwen3-4b,qwen3-8b", "rows": "1,16,256,8192", "dtype": "bfloat16"},
}


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a whole number of 1 or more")
    return int(text)


def parser_of(prog: str, text: str) -> tuple[argparse.ArgumentParser, dict[str, set[str]]]:
    """The parser, and program -> the options that it reads. text is what the program says of itself, an empty line, and
    examples."""
    description, examples = text.split("\n\n")[:2]
    examples = examples.strip().replace("python -m benchmarks", prog).replace("\n", "\n  ")
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} WHAT [options]",
        description=description,
        epilog=f"examples:\n  {examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    what = f"a room: {', '.join(ROOMS)}; all: every room; a program: {', '.join(PROGRAMS)}; or report: what was kept"
    add("what", choices=[*ROOMS, *PROGRAMS, "all", "report"], metavar="WHAT", help=what)
    add(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="cpu, cuda, or auto (default): the GPU where there is one",
    )
    add("--shape", metavar="NAME,NAME", help=f"'all', or of: {', '.join(SHAPES)} ({_defaults('shape')})")
    add("--dtype", metavar="TYPE,TYPE", help=f"of: {', '.join(DTYPES)} ({_defaults('dtype')})")
    add(
        "--rows",
        metavar="N,N",
        help="numbers of rows; 1..8192: the powers of two between them; random:64[:seed]: so many drawn from 1 to "
        "1,024, of which the spread of time / stock is printed, and kept by --save; memory: tokens of a step "
        f"({_defaults('rows')}; memory: 4096 on a CPU, 8192 on a GPU)",
    )
    add("--case", metavar="TEXT", help="only cases whose name contains this (all)")
    add(
        "--peers",
        metavar="NAME,NAME",
        help="whom to measure too, such as torch,quack,liger (all that are installed)",
    )
    add("--peer-path", metavar="DIRS", help=f"where else peers may be imported from (${peers.PATH})")
    add("--repeats", type=positive, default=15, metavar="N", help="rounds; a record has their median, p10, p90 (15)")
    add("--eager", action="store_true", help="no CUDA graphs: host time counts (GPU only)")
    add(
        "--refcheck",
        action="store_true",
        help="also compare with float64; exit code 1 where ours is too far from it",
    )
    _shapes(parser)
    _outputs(parser)
    group = parser.add_argument_group("verify, engine, and where weights are random")
    group.add_argument("--model", metavar="DIR", help="a model's own weights (random ones of --shape)")
    group.add_argument("--layers", type=positive, metavar="N", help="the first N layers of a shape alone (all)")
    group.add_argument("--latent", action="store_true", help="latent attention (DeepSeek-V3, Moonlight)")
    group.add_argument("--log", action="store_true", help="what engines say of themselves, on standard error (nothing)")
    reads = dict(PROGRAMS)
    for name, program in OWN.items():
        before = len(parser._actions)
        program.options(parser)
        reads[name] = PROGRAMS[name] | {action.dest for action in parser._actions[before:]}
    return parser, reads


def _defaults(name: str) -> str:
    """What stands for an option that is not given, as help says it."""
    return f"{DEFAULTS['cpu'][name]} on a CPU, {DEFAULTS['cuda'][name]} on a GPU"


def _shapes(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("a shape of no model, instead of --shape: every size that the room has")
    for name, text in {
        "n": "features: of the matrix, the row, the vocabulary, the expert",
        "k": "reduction: of the matrix; the hidden size",
        "experts": "of a mixture",
        "top-k": "experts of a token",
        "heads": "of queries",
        "kv-heads": "of keys and values",
        "head-dim": "of each",
    }.items():
        group.add_argument(f"--{name}", type=positive, metavar="N", help=f"{text} (the shape's)")
    group.add_argument(
        "--lengths", metavar="N,N", help="attention: a sweep over these numbers of keys, such as 512..131072 (none)"
    )


def _outputs(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what is written (nothing)")
    group.add_argument("--json", metavar="FILE", help="all records as one JSON document; - for standard output")
    group.add_argument("--csv", metavar="FILE", help="a line for each record; - for standard output")
    group.add_argument("--lines", type=Path, metavar="FILE", help="append each record at once, as a line of JSON")
    group.add_argument(
        "--save", action="store_true", help="append to benchmarks/results/<device>.jsonl; in a checkout without changes"
    )
    group.add_argument(
        "--plot", nargs="?", const=Path("plots"), type=Path, metavar="FOLDER", help="write SVG charts (into plots)"
    )
    group.add_argument(
        "--readme", action="store_true", help="report: rewrite the README files and charts from the kept records"
    )


def parse(argv: list[str] | None, prog: str, text: str) -> argparse.Namespace:
    parser, reads = parser_of(prog, text)
    args = parser.parse_args(argv)
    args.given = _given(parser, argv)
    _check_read(args, parser, reads)
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch sees no CUDA device")
    if args.eager and args.device == "cpu":
        parser.error("--eager: expected a GPU with it: a CPU has no CUDA graphs to do without")
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


def _given(parser: argparse.ArgumentParser, argv: list[str] | None) -> set[str]:
    """The names of what the command line says itself. Leaves the parser without its defaults."""
    for action in parser._actions:
        action.default = argparse.SUPPRESS
    return set(vars(parser.parse_args(argv)))


def _check_read(args: argparse.Namespace, parser: argparse.ArgumentParser, reads: dict[str, set[str]]) -> None:
    """An option that the room or program does not read is refused, not ignored."""
    known = reads.get(args.what, set() if args.what == "report" else OF_A_ROOM)
    if args.what == "rollout":  # two programs in one
        known = known - ({"calls"} if args.weights else {"shape", "layers"})
    for action in parser._actions:
        if action.dest in args.given - known - OF_ALL:
            with_it = f" with{'' if args.weights else 'out'} --weights" * (args.what == "rollout")
            parser.error(f"{action.option_strings[0]}: {args.what}{with_it} does not read it")


def _check_rows(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    args.rows_text = args.rows
    args.drawn = args.rows if args.rows.startswith("random:") else None
    for name, given in (("rows", args.rows), ("lengths", args.lengths)):
        try:
            setattr(args, name, numbers(given) if given else [])
        except ValueError:
            also = ", or random:64, random:64:1" if name == "rows" else ""
            parser.error(f"--{name}: got {given!r}, expected positive integers such as 1,16,64, or 1..8192{also}")
    if args.drawn and args.what == "memory":
        parser.error(f"--rows: got {args.drawn!r}, expected numbers of tokens such as 1024..32768")
    if args.lengths and args.what != "attention":
        parser.error(f"--lengths: expected attention, not {args.what!r}")


def _check_shapes(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """args.free: the one shape that --n, --k and their like make; None where there is none of them."""
    sizes = {name: getattr(args, name) for name in FREE if getattr(args, name) is not None}
    args.free = None
    if not sizes:
        return
    flag = {name: f"--{name.replace('_', '-')}" for name in FREE}
    if args.what == "all":
        parser.error(f"{flag[next(iter(sizes))]}: expected one room, which takes some of these sizes, not all rooms")
    if args.shape_given:
        parser.error(f"{flag[next(iter(sizes))]}: --shape says all sizes already")
    takes = module(args.what).FREE
    for name in sizes:
        if name not in takes:
            parser.error(f"{flag[name]}: {args.what} takes {', '.join(flag[n] for n in takes)}")
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
