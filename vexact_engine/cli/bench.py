"""`vexact bench`: the benchmarks of the source tree, which an installed package carries along."""

import importlib
import sys
from pathlib import Path

from . import options


def add_bench(commands) -> None:
    bench = options.command(
        commands,
        "bench",
        run_bench,
        "bits first, then times: every op, the engine, memory (vexact bench --help)",
        (
            "vexact bench linear --shape qwen3-8b --rows 1,16,256",
            "vexact bench rmsnorm --device cpu --peers torch --json -",
            "vexact bench engine --shape qwen3-1.7b --batch 1,64 --prompt 512 --new 512",
        ),
    )
    bench.add_argument("arguments", nargs="*", metavar="ARGUMENT", help="a room or a program, and its options")


def run_bench(args) -> int:
    folder = str(find())
    sys.path.insert(0, folder)
    try:
        main = importlib.import_module("benchmarks.__main__")
        if Path(main.__file__).parents[1] != Path(folder):
            raise RuntimeError(f"bench: another package is named benchmarks: {main.__file__}, expected one in {folder}")
        return main.main(args.arguments, prog="vexact bench")
    finally:
        sys.path.remove(folder)


def find() -> Path:
    """Where the package `benchmarks` lies: inside an installed package, where it takes nobody's name, or beside ours in
    a source tree."""
    engine = Path(__file__).resolve().parents[1]
    for folder in (engine / "_bench", engine.parent):
        if (folder / "benchmarks" / "__main__.py").exists():
            return folder
    raise RuntimeError(f"bench: there are no benchmarks in {engine / '_bench'} nor in {engine.parent}")
