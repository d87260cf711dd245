"""The same run of the GRPO recipe in many ways: whether its parameters end as the same bytes, and where they part.

python -m benchmarks repeats --shape qwen3-0.6b --layers 4 --steps 50
python -m benchmarks repeats --device cpu --shape smollm2-135m --layers 2 --steps 50 --prompts 2 --samples 4

Each way is held, step by step, against the first: every figure of a step, a digest of each fp32 parameter, and the
SHA-256 of all of them at the end. Gradients are summed in one tree, so that ranks are ways too; on GPUs there are as
many as cards.
"""

import argparse
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from .harness import environment

if TYPE_CHECKING:
    from vexact_engine.recipes.options import Options

RESUMED = "stopped half way and resumed"
WAYS: dict[str, dict] = {  # the first is what the others are held against
    "as it is": {},
    "again": {},
    RESUMED: {},
    "three sequences a step": {"max_num_seqs": 3},
    "pages of 4": {"page_size": 4},
    "no prefix cache": {"enable_prefix_cache": False},
    "prompts in chunks": {"max_num_seqs": 4, "max_num_batched_tokens": 8},
    "answers not scored twice": {"check_every": 0},
    "two replicas": {"replicas": 2},
    "drafted tokens": {"speculation": 4},
    "two ranks": {"ranks": 2},
    "four ranks": {"ranks": 4},
}


def options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("repeats")
    for name, default, what in (
        ("steps", 50, "of each run"),
        ("prompts", 4, "questions of a step"),
        ("samples", 4, "answers to each"),
        ("answer", 16, "tokens of an answer, at most"),
    ):
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"{what} ({default})")


def run(args: argparse.Namespace, ways: Mapping[str, dict] = WAYS) -> Iterator[dict]:
    """A record for each way. `differ` is what has other bits first, or None."""
    from vexact_engine.recipes.options import Options

    ranks = max(changes.get("ranks", 1) for changes in ways.values())
    for shape in args.shape.split(","):
        chosen = Options(
            model=shape,
            layers=args.layers,
            device=args.device,
            steps=args.steps,
            prompts=args.prompts,
            samples=args.samples,
            max_new_tokens=args.answer,
            micro_batch=max(1, args.prompts * args.samples // ranks),
            learning_rate=1e-4,
            any_layout=True,
            speculation=0,
            epoch_steps=max(1, args.steps // 2),
        )
        with tempfile.TemporaryDirectory() as folder:
            kept = Path(folder) / "run.jsonl"
            for way, changes in ways.items():
                if args.device == "cuda" and changes.get("ranks", 1) > torch.cuda.device_count():
                    continue
                yield _record(args, chosen, way, _run(replace(chosen, **changes), way, kept, Path(folder) / "saved"))


def _run(chosen: "Options", way: str, kept: Path, folder: Path) -> dict:
    """What a run ended with. The first writes the record that the others are held against."""
    from vexact_engine.recipes import record
    from vexact_engine.recipes.checkpoint import Saving
    from vexact_engine.recipes.launch import launch

    against = record.Against(kept, chosen) if kept.exists() else None
    seen = against or record.Recorder(kept, {"options": chosen.to_json()})
    ends: dict[str, str] = {}

    def report(kind: str, *values) -> None:
        if kind == "end":
            ends[values[0]] = values[1]
        seen(kind, *values)

    begin, differ, tokens = time.perf_counter(), None, 0
    try:
        if way == RESUMED:
            saving, half = Saving(str(folder), every=chosen.steps), replace(chosen, steps=max(1, chosen.steps // 2))
            launch(half, report=_but_the_end(report), saving=saving, watch=True)
            done = launch(chosen, report=report, saving=replace(saving, resume=True), watch=True)
        else:
            done = launch(chosen, report=report, watch=True)
        tokens = sum(step["tokens"] for step in done["aligned"].steps)
        if not done["aligned"].equal:
            differ = "rollout and trainer"
    except record.RunDiffers as error:
        differ = str(error)
    return {
        "sha256": ends.get("aligned"),
        "differ": differ,
        "compared": 0 if against is None else against.compared,
        "tokens": tokens,
        "ours": round(time.perf_counter() - begin, 2),
    }


def _but_the_end(report):
    """Half a run's parameters at its end are those of no record."""
    return lambda kind, *values: kind == "end" or report(kind, *values)


def _record(args: argparse.Namespace, chosen: "Options", way: str, found: dict) -> dict:
    own = {"room": "repeats", "case": f"{chosen.model} {way}", "backend": "vexact", "unit": "s", "steps": chosen.steps}
    return {**own, "layers": chosen.layers, **found, "device": args.device, **environment(args.device)}
