"""GRPO from end to end, and the proof beside it: at every step the rollout's log-probabilities and the trainer's are
the same bytes, and the KL between them is exactly 0.

    torchrun --nproc-per-node 2 -m vexact_engine.cli recipe grpo     or     vexact recipe grpo --ranks 2

One step: the trainer's weights go to the engine; the engine answers a few prompts several times each; a program judges
the answers; each answer's advantage is how much better it is than the others to its prompt; the policy is moved towards
the better ones. Everything is a function of the seed: two runs give the same numbers, bit for bit.

options.py what may be chosen, tasks.py questions, rollout.py the engine's process, trainer.py the model under FSDP2,
launch.py the trainers' processes, check.py what is scored twice, report.py lines and plots, checkpoint.py runs that go
on, record.py runs that are held against each other, digests.py by what.
"""

import contextlib
import gc
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from ..config import SamplingParams
from ..errors import HandoverFailed
from ..proof.compare import compare
from ..request import Completion, derive_seed
from . import check, digests, tasks
from .checkpoint import Saving
from .options import Options
from .rollout import Generate, Rollout
from .trainer import Sample, Trainer

# Trainer and engine aligned; the stock trainer on the same engine; the stock trainer on `generate` of its own model.
SIDES = ALIGNED, STOCK, GENERATE = "aligned", "stock", "generate"
# ("phase", what is done now, step, steps); after each step ("step", side, its record), and before a side's first one
# ("start", side, that step, seconds of all that it had to wait for, by name); with `watch` also
# ("parameters", side, step, digests of them), of step 0 before the first, and ("end", side, SHA-256 of all of them).
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


def run(
    options: Options,
    sides: Sequence[str],
    device: torch.device,
    report: Report,
    *,
    saving: Saving | None = None,
    watch: bool = False,
    begun: float | None = None,
) -> dict[str, Run]:
    """Each side from the same weights and questions, on this rank of the process group. Rank 0 has the engine and the
    task; the others follow, and their Runs are empty.

    saving   where it is kept, and whether it goes on from there: Runs have the steps from there on
    watch    report digests of all parameters after each step, and their SHA-256 at the end
    begun    time.perf_counter() where the command began
    """
    clock = Clock(begun)
    clock("imports")
    runs: dict[str, Run] = {}
    rollouts: dict[type, Rollout | Generate] = {}
    with contextlib.ExitStack() as stack:
        for side in sides:
            kind = Generate if side == GENERATE else Rollout
            if dist.get_rank() == 0 and kind not in rollouts:
                rollouts[kind] = stack.enter_context(kind(options, device))
            runs[side] = _Side(options, side, device, rollouts.get(kind), report, saving, watch, clock).train()
            clock = Clock()
    return runs


class _Side:
    """One trainer's steps."""

    def __init__(
        self,
        options: Options,
        side: str,
        device: torch.device,
        rollout: Rollout | Generate | None,
        report: Report,
        saving: Saving | None,
        watch: bool,
        clock: "Clock",
    ):
        self._clock: Clock | None = clock  # until the first step is through
        self._options, self._side, self._rollout, self._saving, self._watch = options, side, rollout, saving, watch
        self._tell = report if rollout is not None else lambda *_: None
        self._run, self._first, self._version = Run(), 0, None
        self._phase("load")
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        self._trainer = Trainer(options, mesh, device, aligned=side == ALIGNED)  # while the engine starts
        clock("trainer")

    def _phase(self, what: str) -> None:
        self._tell("phase", f"{self._side}: {what}", self._first + len(self._run.steps), self._options.steps)

    def train(self) -> Run:
        options, trainer, saving = self._options, self._trainer, self._saving
        try:
            if saving is not None and saving.resume and (newest := saving.newest(self._side)):
                self._phase("resume")
                facts = saving.load(self._side, newest, trainer, self._rollout)
                self._first, self._version = newest, facts["weight_version"] + 1
            steps = min(options.steps, options.epoch_steps or options.steps)
            asked = {"seed": options.seed, "size": steps * options.prompts}
            known = {"tokenizer": trainer.tokenizer, "vocab_size": trainer.vocab_size}
            task = tasks.make(options.task, options.task_options, **known, **asked)
            if not self._first:
                self._tell_digests(0, self._digests()[0])
            self._clock("task")
            if self._first < options.steps and options.ranks == 1 and trainer.device.type == "cuda":
                self._phase("kernels")
                self._prepare(task)
                self._clock("kernels")
            if self._rollout is not None:
                self._phase("engine")
                self._rollout.wait_until_ready()
                self._clock("engine")
            for step in range(self._first, options.steps):
                self._step(step, task)
            if self._watch:
                self._tell("end", self._side, trainer.sha256())
        finally:
            trainer.close()
            self._trainer = None
            gc.collect()  # its memory is the next one's
        return self._run

    def _prepare(self, task: tasks.Task) -> None:
        """As for a first step whose answers are as long as they may be."""
        options, rank = self._options, dist.get_rank()
        samples = _stand_ins(options, task.questions(_asked(options, self._first), options.prompts), self._trainer)
        mine = [samples[i] for i in options.share(range(len(samples)), rank)]
        scored = [samples[i] for i in _places(options, self._first, self._trainer, [rank])]
        self._trainer.prepare(mine[: len(mine) // options.mini_batches], scored)

    def _step(self, step: int, task) -> None:
        version, record = _step(self._options, step, self._trainer, self._rollout, task, self._phase, self._version)
        self._version = None  # the engine counts on
        digests, seconds = self._digests()
        if record is not None:
            record["seconds"]["digests"] = seconds
            if self._clock is not None:
                self._tell("start", self._side, step + 1, {**self._clock.seconds, **record["seconds"]})
                self._clock = None
            self._run.steps.append(record)
            self._tell("step", self._side, record)
        self._tell_digests(step + 1, digests)
        if self._saving is not None and self._saving.is_due(step + 1, self._options.steps):
            self._phase("save")
            self._saving.save(self._side, step + 1, self._trainer, {"weight_version": version}, self._rollout)

    def _digests(self) -> tuple[dict[str, str] | None, float]:
        """Of all parameters, where they are reported; and the seconds that it took."""
        begin = time.perf_counter()
        found = self._trainer.digests() if self._watch else None
        return found, round(time.perf_counter() - begin, 4)

    def _tell_digests(self, step: int, digests: dict[str, str] | None) -> None:
        if digests is not None:
            self._tell("parameters", self._side, step, digests)


def _step(
    options: Options,
    step: int,
    trainer: Trainer,
    rollout: Rollout | Generate | None,
    task: tasks.Task,
    phase: Callable,
    version: int | None,
) -> tuple[int | None, dict | None]:
    """The version that the weights have in the engine, and the step's record: both of rank 0."""
    clock = Clock()
    phase("weights")
    version = _hand_over(trainer, rollout, version)
    clock("hand_over")
    phase("rollout")
    drafts = {"drafted": 0, "accepted": 0}
    samples = _everybody([_answers(options, step, rollout, task, version, drafts)] if rollout is not None else None)
    clock("rollout")
    mine = options.share(range(len(samples)), dist.get_rank())
    own = _score(options, step, trainer, samples, phase)
    for i in mine:
        samples[i].old = samples[i].rollout if trainer.aligned else own[i]
    clock("score")
    phase("train")
    size = len(samples) // options.mini_batches  # ranks take turns: these are those of each rank's mini-batch
    counts = [sum(len(s.token_ids) for s in samples[i : i + size]) for i in range(0, len(samples), size)]
    figures = trainer.step([samples[i] for i in mine], counts)
    clock("train")
    gathered = _gathered(({i: samples[i] for i in mine}, own))
    if gathered is None:
        return None, None
    return version, {
        "step": step + 1,
        "weight_version": version,
        "answers": digests.of_answers((s.token_ids, s.rollout, s.reward) for s in samples),
        **_record(options, _places(options, step, trainer), gathered),
        **drafts,
        **figures,
        "seconds": clock.seconds,
        "held": held([os.getpid(), *rollout.pids()], trainer.device),
    }


def _places(options: Options, step: int, trainer: Trainer, ranks: Sequence[int] | None = None) -> list[int]:
    """What ranks, or all of them, score before training: the stock trainer all, for its ratios are to its own."""
    ranks = range(options.ranks) if ranks is None else ranks
    if not trainer.aligned:
        everything = range(options.prompts * options.samples)
        return [place for rank in ranks for place in options.share(everything, rank)]
    return [place for rank in ranks for place in check.places(options, step, rank)]


def _score(
    options: Options, step: int, trainer: Trainer, samples: Sequence[Sample], phase: Callable
) -> dict[int, Tensor]:
    """Place -> log-probabilities of that answer, as this rank's trainer scores it before it trains."""
    places = _places(options, step, trainer, [dist.get_rank()])
    if not places:
        return {}
    phase("score")
    own = dict(zip(places, trainer.score([samples[i] for i in places])))
    if trainer.aligned:
        check.expect_equal(options, step, samples, own)
    return own


def held(pids: Sequence[int], device: torch.device) -> dict[str, float]:
    """What processes hold together: MiB of memory and descriptors, where /proc tells; MiB that torch has allocated on
    this process's GPU."""
    found = {}
    if os.path.isdir(f"/proc/{os.getpid()}"):
        pages = sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids)
        found = {"rss_mib": round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1)}
        found["descriptors"] = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
    if device.type == "cuda":
        found["gpu_mib"] = round(torch.cuda.memory_allocated(device) / 2**20, 1)
    return found


def _hand_over(trainer: Trainer, rollout: Rollout | None, version: int | None) -> int | None:
    if rollout is None:
        for _ in trainer.named_tensors():  # each is gathered from all ranks
            pass
        return None
    # The stock trainer has no fingerprint that anything could be promised for: the engine is told its own.
    numerics = trainer.numerics if trainer.aligned else rollout.numerics
    return rollout.update(trainer.named_tensors(), numerics, version=version)


def _answers(options: Options, step: int, rollout: Rollout, task, version: int, drafts: dict[str, int]) -> list[Sample]:
    """prompts x samples of them, judged; those to one prompt stand together. What the engine has drafted is added to
    `drafts`."""
    step = _asked(options, step)
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
    for completion in completions:
        drafts["drafted"] += completion.metrics.drafted_tokens
        drafts["accepted"] += completion.metrics.accepted_tokens
    samples = []
    for i, question in enumerate(questions):
        group = completions[i * options.samples : (i + 1) * options.samples]
        rewards = [task.reward(question, c.token_ids, c.text) for c in group]
        for completion, reward, advantage in zip(group, rewards, advantages(rewards, options.advantage)):
            samples.append(_sample(completion, reward, advantage, version))
    return samples


def _asked(options: Options, step: int) -> int:
    """The step of the first epoch whose questions and seeds this one has."""
    return step % (options.epoch_steps or options.steps)


def _stand_ins(options: Options, questions: Sequence[tasks.Question], trainer: Trainer) -> list[Sample]:
    """Answers that nobody has given, at random: tokens that are alike would all go to the same experts of a mixture."""
    draw, nothing = random.Random(options.seed), torch.zeros(options.max_new_tokens, dtype=torch.float32)
    return [
        Sample(
            question.prompt_ids,
            [draw.randrange(trainer.vocab_size) for _ in range(options.max_new_tokens)],
            nothing,
            0.0,
            old=nothing,
        )
        for question in questions
        for _ in range(options.samples)
    ]


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


def _record(
    options: Options, scored: Sequence[int], gathered: list[tuple[dict[int, Sample], dict[int, Tensor]]]
) -> dict[str, Any]:
    """What one step has shown. Compared are all answers that the weights of the rollout have trained on, with several
    mini-batches the first, and those that were `scored` before."""
    trained = {place: sample for mine, _ in gathered for place, sample in mine.items()}
    own = {place: values for _, mine in gathered for place, values in mine.items()}
    samples = [trained[place] for place in sorted(trained)]  # in the engine's order
    fresh = samples[: len(samples) // options.mini_batches]
    seen = compare(torch.cat([s.rollout for s in fresh]), torch.cat([s.new for s in fresh]))
    again = None
    if own:
        again = compare(torch.cat([trained[i].rollout for i in own]), torch.cat([*own.values()]))
    expected = sum(len(s.token_ids) for s in fresh) + sum(len(trained[i].token_ids) for i in scored)
    ratios = torch.cat([s.new for s in samples]).double().sub(torch.cat([s.old for s in samples]).double()).exp()
    return {
        "reward": statistics.fmean(s.reward for s in samples),
        "entropy": torch.cat([s.entropy for s in samples]).double().mean().item(),
        "tokens": sum(len(s.token_ids) for s in samples),
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
    if dist.get_world_size() == 1:
        return value[0]
    held = value or [None]
    dist.broadcast_object_list(held, device=torch.device("cpu"))
    return held[0]


def _gathered(value) -> list | None:
    """What every rank has, on rank 0."""
    if dist.get_world_size() == 1:
        return [value]
    found = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(value, found)
    return found


class Clock:
    """Seconds between calls, by name; to the first since `begun`, or it was made."""

    def __init__(self, begun: float | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._at = time.perf_counter() if begun is None else begun

    def __call__(self, name: str) -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[name], self._at = round(now - self._at, 4), now
