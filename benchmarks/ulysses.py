"""A step of training under Ulysses: verl's FSDP2 engine on aligned ops beside verl's own, ranks that share every row.

python -m benchmarks ulysses --shape qwen3-8b --layers 3 --packed 32768 --stock-path PEER
python -m benchmarks ulysses --shape qwen3-8b,qwen3-30b-a3b --layers 3 --ranks 2
python -m benchmarks ulysses --device cpu --shape qwen3-0.6b --layers 1 --packed 64

A step is verl's `train_batch`: forward, backward, clipping and AdamW on one packed row of eight sequences, with fp32
masters, bf16 compute, every layer checkpointed, log-probabilities and entropies; its time is that of the slowest rank.
One side after the other, each in processes of its own. verl's own attention is torch's flash attention 2 with verl's
exchange around it. Bits come first: the log-probabilities of all tokens are those of the patched model of one rank, in
bytes, and verl's own are those but for rounding. In a checkout, where verl is installed.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from .harness import environment

ROOT = Path(__file__).parent.parent
SIDES = "vexact", "verl"


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ulysses", "beside --ranks (2)")
    add = group.add_argument
    add("--packed", type=int, default=32768, metavar="N", help="tokens of the row (32768)")
    add(
        "--stock-path",
        metavar="DIRS",
        help="where verl's own side finds flash_attn's Triton ops, ahead of all (nowhere)",
    )
    add("--limit-of-side", type=int, default=240, metavar="S", help="seconds of a side, its start included (240)")


def run(args: argparse.Namespace) -> Iterator[dict]:
    """A record for each shape. raises RuntimeError where a side fails, with the end of what it said"""
    if not (ROOT / "tests" / "trainers").is_dir():
        raise ValueError("ulysses: expected a checkout: its model and settings are those of tests/trainers")
    sys.path.insert(0, str(ROOT / "tests"))
    for shape in args.shape.split(","):
        with tempfile.TemporaryDirectory() as scratch:
            model = Path(scratch, "model")
            command = [sys.executable, "-m", "benchmarks.rl.model", str(model), shape, str(args.layers or 0)]
            subprocess.run([*command, args.device], check=True, cwd=ROOT, stdout=sys.stderr)
            ours, stock = (_side(args, side, model, Path(scratch)) for side in SIDES)
        layers = "" if args.layers is None else f" {args.layers} layers"
        yield {
            "room": "training",
            "case": f"{shape}{layers} verl's fsdp2 rl, Ulysses {args.ranks}, {args.packed} tokens",
            "backend": "vexact",
            "ours": round(ours["ms"], 2),
            "stock": round(stock["ms"], 2),
            "ratio": round(ours["ms"] / stock["ms"], 4),
            "unit": "ms",
            "of_steps": {"ours": ours["steps"], "stock": stock["steps"]},
            "gib": {"ours": ours["gib"], "stock": stock["gib"]} if args.device == "cuda" else {},
            "kernels": stock["kernels"],
            "bits": ours["bits"],
            "stock_max_diff": stock["max_diff"],
            "device": args.device,
            **environment(args.device),
        }


def _side(args: argparse.Namespace, side: str, model: Path, folder: Path) -> dict:
    from trainers.environment import environment as of_trainers

    env = {**os.environ, **of_trainers("vexact" if side == "vexact" else None, args.device)}
    path = [*(args.stock_path or "").split(os.pathsep)] if side == "verl" else []
    path += [*env["PYTHONPATH"].split(os.pathsep), str(ROOT)]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, path)))
    if args.device == "cpu":
        env |= {"VERL_USE_EXTERNAL_MODULES": "trainers.cpu_platform"}
    given = {"side": side, "model": str(model), "packed": args.packed, "repeats": max(3, args.repeats // 3)}
    given |= {"device": args.device, "folder": str(folder), "ranks": args.ranks}
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.rl.ulysses", json.dumps(given)]
    logs = [open(folder / f"{side}{rank}.txt", "w") for rank in range(args.ranks)]  # noqa: SIM115
    numbers = [
        {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(args.ranks)} for rank in range(args.ranks)
    ]
    started = [
        subprocess.Popen([*command, str(rank)], env=env | numbers[rank], stdout=log, stderr=log, cwd=folder)
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(args.limit_of_side) for process in started]
    except subprocess.TimeoutExpired:
        codes = [f"not done after {args.limit_of_side} s"]
    finally:
        for process, log in zip(started, logs):
            process.kill()
            process.wait()
            log.close()
    if any(codes):
        said = "\n".join((folder / f"{side}{rank}.txt").read_text()[-3000:] for rank in range(args.ranks))
        raise RuntimeError(f"ulysses: {side}: {codes}\n{said}")
    return json.loads((folder / f"{side}.json").read_text())
