"""TRL's GRPOTrainer with rollouts of this engine: every log-probability that a rollout reported beside the loss's.

python -m benchmarks trl_steps --model smollm2
python -m benchmarks trl_steps --shape qwen3-0.6b,qwen3-1.7b --steps 20
python -m benchmarks trl_steps --device cpu --shape smollm2-135m --layers 2 --steps 2 --prompts 1 --new 4

As a user has it (vexact_engine/recipes/README.md), with TRL's own corrections by importance sampling, which are to be
exactly 1, and a reward of which every token is a part. Weights are random at the true sizes, with a token for each
byte, or SmolLM2-135M-Instruct's own. The time of a step is the median without the first two, in which kernels are
compiled. In a checkout, where TRL 1.16 is installed and verl 0.9.1 is not.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from .harness import environment

ROOT = Path(__file__).parent.parent
SMOLLM2 = "smollm2"
WARM_UP = 2
DEFAULTS = {"steps": 20, "prompts": 8, "samples": 8, "new": 64}  # options that other programs have too


def run(args: argparse.Namespace) -> Iterator[dict]:
    """A record for each model. raises AssertionError where a byte differs, or nothing was compared"""
    for name, value in DEFAULTS.items():
        if name not in args.given:
            setattr(args, name, value)
    if args.steps <= WARM_UP:
        raise ValueError(f"trl_steps: --steps: got {args.steps}, expected more than the {WARM_UP} that are left out")
    for source in [args.model] if args.model else args.shape.split(","):
        yield _measure(args, source)


def _model(args: argparse.Namespace, source: str):
    """(a model, its tokenizer, what it is called)"""
    from vexact_engine.weights.fetch import fetch_smollm2
    from vexact_engine.weights.load import load
    from vexact_engine.weights.random import load_random

    if args.model:
        loaded = load(fetch_smollm2() if source == SMOLLM2 else source, device=args.device, dtype="bfloat16")
        return loaded.model, loaded.tokenizer, "smollm2-135m-instruct" if source == SMOLLM2 else Path(source).name
    if not (ROOT / "tests" / "trainers").is_dir():
        raise ValueError("trl_steps: expected a checkout: the tokenizer of random weights is of tests/trainers")
    sys.path.insert(0, str(ROOT / "tests"))
    from trainers.models import tokenizer

    loaded = load_random(source, device=args.device, layers=args.layers)
    words = tokenizer("qwen3", loaded.model.config.vocab_size)
    for config in (loaded.model.config, loaded.model.generation_config):
        config.pad_token_id, config.eos_token_id = words.pad_token_id, words.eos_token_id
    layers = "" if args.layers is None else f" {args.layers} layers"
    return loaded.model, words, source + layers


def _evens(completion_ids, **_) -> list[float]:
    return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]


def watched(base: type) -> type:
    class Watched(base):
        """Keeps what the engine reported and what the loss had of the same answers, as TRL pads them; and when."""

        def _compute_loss(self, model, inputs):
            self.seen = getattr(self, "seen", [])
            self.seen.append([inputs["sampling_per_token_logps"], None, inputs["completion_mask"] != 0])
            return super()._compute_loss(model, inputs)

        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            found = super()._get_per_token_logps_and_entropies(model, *args, **kwargs)
            if found[0].requires_grad:
                self.seen[-1][1] = found[0].detach()
            return found

        def log(self, logs, *args, **kwargs):
            self.times = [*getattr(self, "times", []), time.perf_counter()]
            return super().log(logs, *args, **kwargs)

        def differ(self) -> tuple[int, int]:
            """(log-probabilities whose bytes differ, how many there were)."""
            pairs = [(a[mask].view(torch.int32), b[mask].view(torch.int32)) for a, b, mask in self.seen]
            return sum((a != b).sum().item() for a, b in pairs), sum(len(a) for a, _ in pairs)

    return Watched


def _measure(args: argparse.Namespace, source: str) -> dict:
    import trl
    from datasets import Dataset

    from vexact_engine.trl import GRPOTrainer

    model, words, name = _model(args, source)
    model.requires_grad_(True)
    data = Dataset.from_dict({"prompt": [f"Count to {n}:" for n in range(args.steps * args.prompts)]})
    with tempfile.TemporaryDirectory() as folder:
        config = trl.GRPOConfig(
            folder,
            per_device_train_batch_size=args.prompts * args.samples,
            num_generations=args.samples,
            max_completion_length=args.new,
            max_steps=args.steps,
            learning_rate=1e-4,  # at which bf16 weights move
            logging_steps=1,
            report_to=[],
            save_strategy="no",
            disable_tqdm=True,
            use_cpu=args.device == "cpu",
        )
        made = watched(GRPOTrainer)(
            model=model, reward_funcs=_evens, args=config, train_dataset=data, processing_class=words
        )
        begin = time.perf_counter()
        made.train()
        made.close()
    differ, count = made.differ()
    logs = [log for log in made.state.log_history if "sampling/importance_sampling_ratio/min" in log]
    ratios = [log[f"sampling/importance_sampling_ratio/{which}"] for log in logs for which in ("min", "max")]
    if not any(log["grad_norm"] > 0 for log in logs):
        raise AssertionError(f"trl_steps: {name}: nothing was trained")
    if differ or not count or len(logs) != args.steps or {*ratios} != {1.0}:
        raise AssertionError(
            f"trl_steps: {name}: {differ} of {count} log-probabilities differ, ratios {ratios[:4]} ..."
        )
    times = [begin, *made.times[: args.steps]]
    seconds = [after - before for before, after in itertools.pairwise(times)]
    return {
        "room": "trl_steps",
        "case": f"{name}, {args.prompts} x {args.samples} answers of {args.new} tokens",
        "backend": "vexact",
        "steps": args.steps,
        "logprobs": count,
        "differ": differ,
        "ratios": [min(ratios), max(ratios)],
        "logp_difference_max": max(log["sampling/sampling_logp_difference/max"] for log in logs),
        "grad_norm": [round(log["grad_norm"], 4) for log in logs],
        "weight_version": made.engine.weight_version,
        "first_s": round(seconds[0], 2),
        "step_s": round(statistics.median(seconds[WARM_UP:]), 3),
        "trl": metadata.version("trl"),
        "transformers": metadata.version("transformers"),
        "device": args.device,
        **environment(args.device),
    }
