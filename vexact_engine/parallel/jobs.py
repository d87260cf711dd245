"""Requests and replicas, as their front knows them."""

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..config import SamplingParams
from ..outputs import Increment, Load, Submission
from ..request import Completion, PartialOutput
from . import messages as m

NO_LOAD = Load(0, 0, 0, 0, False)


class Answer(Future):
    """What a replica is to answer.

    key   that it answers to; None where it is gone, and the answer is that
    """

    def __init__(self, what: str, replica: "Replica", key: int | None):
        super().__init__()
        self.what, self.replica, self.key = what, replica, key


class Channel(Protocol):
    """To one replica. `read` returns frames, or None once it has ended; all others never wait."""

    shares_memory: bool
    pid: int

    def fileno(self) -> int: ...
    def send(self, *messages: m.ToReplica) -> None: ...
    def read(self) -> list[bytes] | None: ...
    def ended(self) -> str: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class Job:
    """One request, as its front knows it.

    pictures     its images (media.images.Pictures); None: it has none
    listen       given each Increment, and an exception that ends it; None where completions alone are wanted
    earlier      what was handed on of each sample, and `texts` in words
    completions  of the samples that are done
    replica      who computes it; None: nobody yet
    deaths       how many replicas have died with it
    """

    def __init__(
        self,
        prompt_ids: list[int],
        params: SamplingParams,
        name: str,
        call: Submission,
        listen: Callable[[Increment | BaseException], None] | None,
        pictures: Any = None,
    ):
        self.pictures = pictures
        self.prompt_ids, self.params, self.name, self.call, self.listen = prompt_ids, params, name, call, listen
        self.earlier = [PartialOutput() for _ in range(params.n)] if listen is not None else None
        self.texts = [""] * params.n
        self.completions: list[Completion | None] = [None] * params.n
        self.key, self.replica, self.deaths = -1, None, 0
        self.pages: list[int] = []
        self.done, self.error = False, None
        call.add(self)

    @property
    def keys(self) -> list:
        """What a prefix cache knows the prompt's tokens by."""
        return self.prompt_ids if self.pictures is None else self.pictures.keys

    def finish(self, done: Completion) -> None:
        """One of its samples, which has come without the prompt."""
        done.prompt_ids = self.prompt_ids
        if self.pictures is not None:
            for name, value in self.pictures.for_trainers(len(self.prompt_ids) + len(done.token_ids)).items():
                setattr(done, name, value)
        self.completions[done.index] = done

    def result(self) -> list[Completion]:
        if self.error is not None:
            raise self.error
        return self.completions

    def aborted(self, version: int) -> list[Completion]:
        """Of the samples that are not done, with what was handed on of them."""
        found = []
        for index, done in enumerate(self.completions):
            if done is None:
                partial = PartialOutput() if self.earlier is None else self.earlier[index]
                versions = partial.weight_versions
                made = Completion(
                    prompt_ids=self.prompt_ids,
                    token_ids=partial.token_ids,
                    logprobs=partial.logprobs,
                    raw_logprobs=partial.raw_logprobs,
                    finish_reason="abort",
                    text=self.texts[index],
                    weight_version=versions[-1] if versions else version,
                    top_logprobs=partial.top_logprobs,
                    prompt_logprobs=partial.prompt_logprobs,
                    prompt_top_logprobs=partial.prompt_top_logprobs,
                    request_id=self.name,
                    index=index,
                    seed=self.params.seed,
                    weight_versions=versions,
                )
                found.append(made)
        return found


@dataclass
class Replica:
    """One of them, as the front knows it.

    ready    its engine is made, and it takes requests if it is `fresh`
    fresh    it has the weights that all have; one that was started again has its first ones until the next update
    owes     keys of what it has not said in time, and since when: until it has it stands still, and gets no requests
    reason   why it is gone, if it is
    """

    index: int
    channel: Channel | None = None
    ready: bool = False
    fresh: bool = False
    reason: str = ""
    failure: m.Failure | None = None
    facts: dict[str, Any] = field(default_factory=dict)
    load: Load = NO_LOAD
    stats: dict[str, Any] = field(default_factory=dict)  # as last heard of
    past: dict[str, Any] = field(default_factory=dict)  # of those that had its place before
    answers: dict[int, Answer] = field(default_factory=dict)
    stats_answer: Answer | None = None
    owes: dict[int, float] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)
    starts: int = 0
    pid: int = 0

    @property
    def still_for(self) -> float:
        """Seconds that it has stood still by now."""
        return time.monotonic() - min(self.owes.values()) if self.owes else 0.0

    def __str__(self) -> str:
        return f"replica {self.index} (process {self.pid})"


def add_counts(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The sums of what two have counted, of dictionaries of counts too."""
    found = dict(one)
    for name, value in other.items():
        if isinstance(value, Mapping):
            found[name] = add_counts(found.get(name, {}), value)
        else:
            found[name] = found.get(name, 0) + value
    return found
