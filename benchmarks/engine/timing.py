"""When an engine's tokens come, seen from outside: the clock is read once a step, where its tokens are committed."""

import asyncio
import contextlib
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Union

from vexact_engine import Completion, Engine, SamplingParams

from ..report import percentile
from .workloads import Job, Workload

if TYPE_CHECKING:  # they need msgspec
    from vexact_engine.parallel.replicas import Replicas


@dataclass(slots=True)
class Step:
    """One step's commit.

    at       time.perf_counter()
    grown    the sequences that got a token
    decode   whether every chunk was a single token: nothing was prefilled
    """

    at: float
    grown: list
    decode: bool


class Hooks:
    """Methods of objects replaced for a time."""

    def __init__(self):
        self._before: list[tuple[object, str, Callable | None]] = []

    def set(self, owner: object, name: str, method: Callable) -> None:
        self._before.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, method)

    def undo(self) -> None:
        while self._before:
            owner, name, before = self._before.pop()
            delattr(owner, name) if before is None else setattr(owner, name, before)


class Recorder:
    """While entered, notes every step that an engine commits. The engine is idle on entry and on exit."""

    def __init__(self, engine: Engine):
        self.scheduler, self.steps, self._hooks = engine._scheduler, [], Hooks()

    def __enter__(self) -> "Recorder":
        commit, steps, clock = self.scheduler.commit, self.steps, time.perf_counter

        def noted(plan, sampled):
            grown = commit(plan, sampled)
            steps.append(Step(clock(), grown, plan.num_tokens == len(plan.chunks) == len(grown)))
            return grown

        self._hooks.set(self.scheduler, "commit", noted)
        return self

    def __exit__(self, *exception) -> None:
        self._hooks.undo()


@dataclass
class Run:
    """What came of a workload.

    completions   in the order of its jobs
    sent          request id -> when
    seconds       of the whole
    steps         all that were committed meanwhile
    preemptions   so many
    tokens        sequence -> when each of its tokens came
    """

    completions: list[Completion]
    sent: dict[str, float]
    seconds: float
    steps: list[Step]
    preemptions: int
    tokens: dict = field(init=False)

    def __post_init__(self):
        self.tokens = defaultdict(list)
        for step in self.steps:
            for sequence in step.grown:
                self.tokens[sequence].append(step.at)

    @property
    def generated(self) -> int:
        return sum(len(c.token_ids) for c in self.completions)

    @property
    def prompts(self) -> int:
        return sum(len(c.prompt_ids) for c in self.completions)

    def first_token(self) -> list[float]:
        """Seconds from sending a request to its first token."""
        return [times[0] - self.sent[sequence.request.id] for sequence, times in self.tokens.items()]

    def per_token(self) -> list[float]:
        """Seconds per token after the first, a mean for each request that has more than one."""
        return [(times[-1] - times[0]) / (len(times) - 1) for times in self.tokens.values() if len(times) > 1]

    def between_tokens(self) -> list[float]:
        """Seconds between a token and the one before it, all of them."""
        return [b - a for times in self.tokens.values() for a, b in pairwise(times)]

    def decode_steps(self, batch: int | None = None) -> list[tuple[float, int, int]]:
        """Seconds, sequences, and tokens of their contexts all together, of steps that decoded and nothing else, and
        came after another such step; of `batch` sequences."""
        seen: dict = defaultdict(int)
        found, before = [], None
        for step in self.steps:
            if step.decode and before is not None and (batch is None or len(step.grown) == batch):
                context = sum(sequence.num_prompt + seen[sequence] for sequence in step.grown)
                found.append((step.at - before, len(step.grown), context))
            for sequence in step.grown:
                seen[sequence] += 1
            before = step.at if step.decode else None
        return found

    def probed(self, count: int, batch: int | None = None) -> list[list[tuple[str, int]]]:
        """Of at most `count` decode steps, evenly spread: (request id, position) of the tokens that were computed."""
        wanted = [i for i, s in enumerate(self.steps) if s.decode and (batch is None or len(s.grown) == batch)]
        chosen = {wanted[i * len(wanted) // count] for i in range(count)} if wanted else set()
        seen: dict = defaultdict(int)
        found = []
        for number, step in enumerate(self.steps):
            if number in chosen:
                # the k-th token drawn (from 0) comes of the position before its own
                found.append([(s.request.id, s.num_prompt + seen[s] - 1) for s in step.grown])
            for sequence in step.grown:
                seen[sequence] += 1
        return found


def by_size(steps: Sequence[tuple[float, int, int]]) -> dict[str, list[float]]:
    """Of Run.decode_steps: how many there are of each power of two of sequences (and up to the next), and their median
    in milliseconds."""
    sizes: dict[int, list[float]] = defaultdict(list)
    for seconds, sequences, _ in steps:
        sizes[1 << (sequences.bit_length() - 1)].append(seconds)
    return {str(size): [len(found), median_ms(found)] for size, found in sorted(sizes.items())}


def params(job: Job) -> SamplingParams:
    return SamplingParams(max_new_tokens=job.new, temperature=1.0, seed=job.seed, ignore_eos=True)


def measure(engine: Union[Engine, "Replicas"], workload: Workload, seed: int = 0) -> Run:
    """Send the workload and wait for it. Of replicas no steps are seen, since other processes commit them.

    raises   RuntimeError where a request ends before its time
    """
    names = [f"job-{i}" for i in range(len(workload.jobs))]
    preemptions, sent = engine.stats.preemptions, {}
    recorder = Recorder(engine) if isinstance(engine, Engine) else None
    with recorder or contextlib.nullcontext():
        began = time.perf_counter()
        if workload.concurrency is None and workload.rate is None:
            sent = dict.fromkeys(names, began)
            jobs = workload.jobs
            done = engine.generate([job.prompt_ids for job in jobs], [params(j) for j in jobs], request_ids=names)
        else:
            done = asyncio.run(_send(engine, workload, names, sent, seed))
        seconds = time.perf_counter() - began
    short = [c for c, job in zip(done, workload.jobs) if len(c.token_ids) != job.new]
    if short:
        raise RuntimeError(f"engine: {len(short)} requests ended early: {short[0].finish_reason} {short[0].error}")
    return Run(done, sent, seconds, recorder.steps if recorder else [], engine.stats.preemptions - preemptions)


async def _send(engine: Union[Engine, "Replicas"], workload: Workload, names: list[str], sent: dict, seed: int):
    rng, room = random.Random(seed), asyncio.Semaphore(workload.concurrency or len(names))

    async def one(job: Job, name: str) -> Completion:
        async with room:
            sent[name] = time.perf_counter()
            (completion,) = await engine.agenerate([job.prompt_ids], params(job), request_ids=[name])
            return completion

    tasks = []
    due = time.perf_counter()
    for job, name in zip(workload.jobs, names):
        tasks.append(asyncio.create_task(one(job, name)))
        if workload.rate is not None:
            due += rng.expovariate(workload.rate)
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
    return await asyncio.gather(*tasks)


def spread(seconds: Sequence[float]) -> dict[str, float] | None:
    """Milliseconds: {"p50", "p95", "p99"}; None of nothing."""
    if not seconds:
        return None
    return {f"p{share}": round(1e3 * percentile(list(seconds), share / 100), 3) for share in (50, 95, 99)}


def median_ms(values: Sequence[float]) -> float | None:
    return round(1e3 * statistics.median(values), 4) if values else None
