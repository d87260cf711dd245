"""GRPO from end to end, and the proof beside it: at every step the rollout's log-probabilities and the trainer's are
the same bytes, and the KL between them is exactly 0.

    torchrun --nproc-per-node 2 -m vexact_engine.cli recipe grpo     or     vexact recipe grpo --ranks 2

One step: the trainer's weights go to the engine; the engine answers a few prompts several times each; a program judges
the answers; each answer's advantage is how much better it is than the others to its prompt; the policy is moved towards
the better ones. Everything is a function of the seed: two runs give the same numbers, bit for bit.

options.py what may be chosen, tasks.py questions, rollout.py the engine's process, trainer.py the model under FSDP2,
launch.py the trainers' processes, report.py lines and plots.
"""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ..config import SamplingParams
from ..errors import HandoverFailed
from ..proof.compare import compare
from ..request import Completion, derive_seed
from . import tasks
from .options import Options
from .rollout import Rollout
from .trainer import Sample, Trainer

ALIGNED, STOCK = "aligned", "stock"
# ("phase", what is done now, step, steps), and after each step ("step", side, its record)
Report = Callable[..., None]


@dataclass
class Run:
    """One side's steps, as recorded by rank 0. Their fields are those of `_record`."""

    steps: list[dict[str, Any]] = field(default_factory=list)

    @property
    def differ(self) -> int:
        """Log-probabilities of the rollout that are other bytes in the trainer."""
        return sum(step["differ"] + (step["differ_recomputed"] or 0) for step in self.steps)

    @property
    def equal(self) -> bool:
        """Every one was compared, none differs, and the KL was exactly 0 at every step."""
        compared = all(step["compared"] == step["expected"] > 0 for step in self.steps)
        return bool(self.steps) and compared and not self.differ and all(step["kl"] == 0 for step in self.steps)


def run(options: Options, sides: Sequence[str], device: torch.device, report: Report) -> dict[str, Run]:
    """Each side from the same weights and questions, on this rank of the process group. Rank 0 has the engine and the
    task; the others follow, and their Runs are empty."""
    with Rollout(options, device) if dist.get_rank() == 0 else contextlib.nullcontext() as rollout:
        return {side: _train(options, side, device, rollout, report) for side in sides}


def _train(options: Options, side: str, device: torch.device, rollout: Rollout | None, report: Report) -> Run:
    def phase(what: str) -> None:
        if rollout is not None:
            report("phase", f"{side}: {what}", len(done.steps), options.steps)

    done = Run()
    phase("load")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    trainer = Trainer(options, mesh, device, aligned=side == ALIGNED)
    try:
        asked = {"seed": options.seed, "size": options.steps * options.prompts}
        known = {"tokenizer": trainer.tokenizer, "vocab_size": trainer.vocab_size}
        task = tasks.make(options.task, options.task_options, **known, **asked)
        for step in range(options.steps):
            record = _step(options, step, trainer, rollout, task, phase)
            if record is not None:
                done.steps.append(record)
                report("step", side, record)
    finally:
        trainer.close()
        gc.collect()  # its memory is the next one's
    return done


def _step(options: Options, step: int, trainer: Trainer, rollout: Rollout | None, task, phase: Callable) -> dict | None:
    clock = Clock()
    phase("weights")
    version = _hand_over(trainer, rollout)
    clock("hand_over")
    phase("rollout")
    samples = _everybody([_answers(options, step, rollout, task, version)] if rollout is not None else None)
    clock("rollout")
    mine = samples[dist.get_rank() :: dist.get_world_size()]
    own = None
    if options.recompute or not trainer.aligned:
        phase("recompute")
        own = trainer.score(mine)
    for i, sample in enumerate(mine):
        sample.old = sample.rollout if trainer.aligned else own[i]
    clock("recompute")
    phase("train")
    size = len(samples) // options.mini_batches  # ranks take turns: these are those of each rank's mini-batch
    counts = [sum(len(s.token_ids) for s in samples[i : i + size]) for i in range(0, len(samples), size)]
    figures = trainer.step(mine, counts)
    clock("train")
    gathered = [None] * dist.get_world_size() if rollout is not None else None
    dist.gather_object((mine, own), gathered)
    if gathered is None:
        return None
    return {
        "step": step + 1,
        "weight_version": version,
        **_record(options, gathered),
        **figures,
        "seconds": clock.seconds,
    }


def _hand_over(trainer: Trainer, rollout: Rollout | None) -> int | None:
    if rollout is None:
        for _ in trainer.named_tensors():  # each is gathered from all ranks
            pass
        return None
    # The stock trainer has no fingerprint that anything could be promised for: the engine is told its own.
    return rollout.update(trainer.named_tensors(), trainer.numerics() if trainer.aligned else rollout.numerics)


def _answers(options: Options, step: int, rollout: Rollout, task, version: int) -> list[Sample]:
    """prompts x samples of them, judged; those to one prompt stand together."""
    questions = task.questions(step, options.prompts)
    for question in questions:
        if len(question.prompt_ids) > options.max_prompt_tokens:
            raise ValueError(
                f"recipe: max_prompt_tokens: a question of {task.name} has {len(question.prompt_ids)} tokens, expected "
                f"at most {options.max_prompt_tokens}"
            )
    fields = {"max_new_tokens": options.max_new_tokens, "temperature": options.temperature, "n": options.samples}
    seeds = [derive_seed(options.seed, step * options.prompts + i) % 2**64 for i in range(options.prompts)]
    params = [SamplingParams(**fields, seed=seed) for seed in seeds]
    completions = rollout.generate([q.prompt_ids for q in questions], params)
    samples = []
    for i, question in enumerate(questions):
        group = completions[i * options.samples : (i + 1) * options.samples]
        rewards = [task.reward(question, c.token_ids, c.text) for c in group]
        for completion, reward, advantage in zip(group, rewards, advantages(rewards, options.advantage)):
            samples.append(_sample(completion, reward, advantage, version))
    return samples


def _sample(completion: Completion, reward: float, advantage: float, version: int) -> Sample:
    if set(completion.weight_versions) != {version}:
        raise HandoverFailed(f"recipe: tokens of weights {set(completion.weight_versions)}, expected {version} alone")
    logprobs = torch.tensor(completion.logprobs, dtype=torch.float32)  # they are floats of fp32: nothing is rounded
    return Sample(completion.prompt_ids, completion.token_ids, logprobs, reward, advantage)


def advantages(rewards: Sequence[float], kind: str) -> list[float]:
    """How much better each of a group is than the group.

    "grpo"   (reward - mean) / (standard deviation + 1e-6), 0 for all where they are equal (Shao et al., 2024)
    "rloo"   reward - mean of the others (Ahmadian et al., 2024)
    """
    mean = statistics.fmean(rewards)
    if kind == "rloo":
        return [(reward - mean) * len(rewards) / (len(rewards) - 1) for reward in rewards]
    deviation = statistics.stdev(rewards)
    return [(reward - mean) / (deviation + 1e-6) if deviation else 0.0 for reward in rewards]


def _record(options: Options, gathered: list[tuple[list[Sample], list[Tensor] | None]]) -> dict[str, Any]:
    """What one step has shown. Compared are all answers that the weights of the rollout have trained on: with several
    mini-batches the first."""
    samples = [s for mine, _ in gathered for s in mine]
    fresh = [s for mine, _ in gathered for s in mine[: len(mine) // options.mini_batches]]
    seen = compare(torch.cat([s.rollout for s in fresh]), torch.cat([s.new for s in fresh]))
    again = None
    if gathered[0][1] is not None:
        own = [value for _, values in gathered for value in values]
        again = compare(torch.cat([s.rollout for s in samples]), torch.cat(own))
    tokens = sum(len(s.token_ids) for s in samples)
    expected = sum(len(s.token_ids) for s in fresh) + (tokens if again else 0)
    ratios = torch.cat([s.new for s in samples]).double().sub(torch.cat([s.old for s in samples]).double()).exp()
    return {
        "reward": statistics.fmean(s.reward for s in samples),
        "entropy": torch.cat([s.entropy for s in samples]).double().mean().item(),
        "tokens": tokens,
        "expected": expected,
        "compared": seen.tokens + (again.tokens if again else 0),
        "kl": seen.k3_kl,
        "max_abs_diff": seen.max_abs_diff,
        "differ": seen.mismatched_tokens,
        "differ_recomputed": again.mismatched_tokens if again else None,
        "clipped": ((ratios - 1).abs() > options.clip).double().mean().item(),
    }


def _everybody(value: list | None):
    """What rank 0 has, on every rank."""
    held = value or [None]
    dist.broadcast_object_list(held, device=torch.device("cpu"))
    return held[0]


class Clock:
    """Seconds between calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.perf_counter()

    def __call__(self, name: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name], self._at = round(now - self._at, 4), now
