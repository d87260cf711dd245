"""A request, its samples, and what the caller gets back.

A request is one prompt and its SamplingParams. Each of its n samples is a `Sequence`, the unit that is scheduled:
tokens, the pages that hold their keys and values, and how far it has come.
"""

import operator
import os
import struct
import time
from collections.abc import Iterable, Mapping, Set
from collections.abc import Sequence as Several
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from .config import SamplingParams, is_unicode

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, made odd: the step of SplitMix64


def _mix(z: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit integers that scatters them."""
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


class _Fresh:
    """Random words of 64 bits, which the system is asked for in blocks: whoever asks lets other threads run meanwhile,
    and an engine's own gave the interpreter back 0.2 ms later, at each request. In a fork there are others."""

    def __init__(self):
        self._of, self._words = 0, []

    def __call__(self) -> int:
        while True:
            words = self._words
            if self._of == os.getpid() and words:
                try:
                    return words.pop()
                except IndexError:  # another thread has had the last one
                    continue
            self._words = list(struct.unpack("=512Q", os.urandom(4096)))
            self._of = os.getpid()


fresh = _Fresh()


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` of a request: mix(mix(seed) + (index + 1) * golden), as a signed 64-bit integer.

    The samples of one request never share a seed, for at a fixed `seed` this is a bijection. The random number of a
    draw is a function of (this seed, the position of the drawn token) and of nothing else.
    """
    z = _mix((_mix(seed & _MASK) + (index + 1) * _GOLDEN) & _MASK)
    return z - 2**64 if z >= 2**63 else z


class State(Enum):
    WAITING = "waiting"  # holds no pages
    RUNNING = "running"
    FINISHED = "finished"  # holds no pages


@dataclass
class Metrics:
    """When what happened to one sample, in seconds of time.monotonic(), and what it cost.

    arrived         the request was made of its prompt's token ids
    started         it was let in to be computed, for the first time; None: never
    token_times     its tokens were there, one for each: those of one step at once
    finished        it had its last token, or was aborted
    cached_tokens   of its prompt, not computed, because the prefix cache had them when it started
    preemptions     times it had to give back its pages
    drafted_tokens  that steps have verified beside those they were to draw, of which `accepted_tokens` were right
    """

    arrived: float
    started: float | None
    token_times: list[float]
    finished: float
    cached_tokens: int = 0
    preemptions: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds since it arrived; None without a token."""
        return self.token_times[0] - self.arrived if self.token_times else None

    @property
    def time_per_token(self) -> float | None:
        """Mean of the seconds between two tokens; None with fewer."""
        times = self.token_times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else None


OF_PICTURES = (
    "pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts", "position_ids"
)  # fmt: skip


@dataclass
class Completion:
    """One sample of one prompt.

    token_ids         the generated ids, with the stop token that ended them, if one did
    logprobs          fp32 log-probability of each at the sampling temperature (greedy: at temperature 1)
    raw_logprobs      the same at temperature 1
    finish_reason     "stop" | "length" | "abort" | "error"
    text              the generated text, "" where there is no tokenizer
    weight_version    version of the weights that gave the last token; `weight_versions` has it for every token
    top_logprobs      for each token {id: log-probability} of the likeliest ids, if `num_top_logprobs` asked for them
    prompt_logprobs   of each of the prompt's tokens at temperature 1, if `prompt_logprobs` asked for them: None for the
                      first, which follows nothing, and for those not yet computed. Of one version of the weights,
                      that of the first token where there is one
    prompt_top_logprobs   at the same places {id: log-probability} of the likeliest ids, if `num_prompt_top_logprobs`
                      asked for them
    error             why, where finish_reason is "error", or "length" for want of cache
    request_id, index the request, and which of its samples this is
    seed              the request's seed, drawn where none was given: with it the same tokens come again
    stop_reason       the token id or the string that ended it, where finish_reason is "stop"
    metrics           times and costs; None for a request that was refused before it was one
    pixel_values, image_grid_thw   of a prompt with images the very ones that were encoded, as a trainer's forward
                      takes them, and position_ids (3, tokens) int64, the places of prompt and answer on three axes; on
                      the CPU. Of one with videos likewise pixel_values_videos, video_grid_thw, second_per_grid_ts
    """

    prompt_ids: list[int]
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str
    text: str
    weight_version: int
    top_logprobs: list[dict[int, float]] | None = None
    error: str | None = None
    request_id: str | None = None
    index: int = 0
    seed: int | None = None
    stop_reason: int | str | None = None
    weight_versions: list[int] = field(default_factory=list)
    metrics: Metrics | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    pixel_values: Any = None
    image_grid_thw: Any = None
    pixel_values_videos: Any = None
    video_grid_thw: Any = None
    second_per_grid_ts: Any = None
    position_ids: Any = None

    def __repr__(self) -> str:
        """One line: the lists are as long as the text."""
        why = f": {_short(self.error)}" if self.error else ""
        said = f"{_short(self.text)}, " if self.text else ""
        counts = f"{len(self.token_ids)} tokens after {len(self.prompt_ids)}"
        return f"<Completion {said}{counts}, {self.finish_reason}{why}>"


@dataclass
class PartialOutput:
    """What one sample of a request got elsewhere: it goes on from there, and what comes has the bits that it would have
    had there.

    sent_text   characters of its text that were handed on already
    done        whether it is finished: nothing of it comes any more
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)
    weight_versions: list[int] = field(default_factory=list)
    top_logprobs: list[dict[int, float]] | None = None
    sent_text: int = 0
    done: bool = False
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None


class Request:
    """One prompt and what is wanted of it. TypeError if the prompt is not token ids, ValueError if it is empty.

    earlier     for each sample what it has already, where some of this was computed elsewhere
    pictures    the images of the prompt (media.images.Pictures); None: it has none
    id          for people, and for `abort`; everything else knows a request by the object. Drawn where none is given
    unfinished  how many of its samples still run or wait
    pages       what the scheduler knows of its prompt in the prefix cache, for all its samples
    """

    def __init__(
        self,
        prompt_ids: Iterable[int],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        earlier: "list[PartialOutput] | None" = None,
        pictures: Any = None,
    ):
        self.pictures = pictures
        self.prompt_ids = token_ids(prompt_ids)
        if not self.prompt_ids:
            raise ValueError("Request: prompt_ids is empty, expected at least one token id")
        if (least := min(self.prompt_ids)) < 0:
            raise ValueError(f"Request: prompt_ids has {least}, expected token ids of 0 or more")
        self.params = SamplingParams() if params is None else params
        self.id = f"request-{fresh():016x}" if request_id is None else request_id
        self.seed = fresh() if self.params.seed is None else self.params.seed
        self.arrived = time.monotonic()
        self.sequences = [Sequence(self, index) for index in range(self.params.n)]
        self.unfinished = len(self.sequences)
        self.pages = None
        if earlier is not None and len(earlier) != self.params.n:
            raise ValueError(f"Request: earlier: got {len(earlier)}, expected {self.params.n}, one for each sample")
        for sequence, partial in zip(self.sequences, earlier or ()):
            sequence.resume(partial)
        if not self.unfinished:
            raise ValueError("Request: earlier: every sample is done, expected one to go on with")

    @property
    def keys(self) -> list:
        """What the prefix cache knows the prompt's tokens by."""
        return self.prompt_ids if self.pictures is None else self.pictures.keys

    @property
    def finished(self) -> bool:
        return not self.unfinished

    def reject(self, error: str, reason: str = "error") -> None:
        """Finish a request that no scheduler has taken, so that its completions say why."""
        for sequence in self.sequences:
            if not sequence.finished:
                sequence.finish(reason, error=error)

    def __repr__(self):
        return f"Request({self.id!r}, prompt of {len(self.prompt_ids)}, {self.sequences})"


class Sequence:
    """One sample of a request. The scheduler owns everything here; the engine reads it.

    tokens          prompt and generated ids; `generated` is the second part
    pages           its pages in order, the keys and values of token t in pages[t // page_size]. Grows at the end only,
                    until the sequence lets go of its pages: then this becomes a new, empty list, and a plan that
                    still holds the old one keeps it unchanged
    slot            its row in the runner's buffers while it runs, None otherwise
    epoch           how often it has let go of its pages
    num_computed    tokens whose keys and values are in those pages
    num_planned     the same, once all plans in flight have run
    in_flight       samples in plans in flight
    last_step       the step that its latest token was to be drawn in
    stop_ids        tokens that end it, the model's own among them where it minds those
    limit           tokens it may reach, and `limit_note` says which limit that is if it is the cache's
    drafts          what its Drafter knows of it (core/drafts.py); None without one
    known_as        what `keys` has given so far, where the prompt has images
    started_at, token_times, finished_at, cached_tokens, preemptions, drafted, accepted   as in Metrics
    """

    __slots__ = (
        "accepted",
        "arrival",
        "cached_tokens",
        "drafted",
        "drafts",
        "epoch",
        "error",
        "finish_reason",
        "finished_at",
        "in_flight",
        "index",
        "known_as",
        "last_step",
        "limit",
        "limit_note",
        "logprobs",
        "node",
        "num_computed",
        "num_known",
        "num_planned",
        "num_prompt",
        "pages",
        "params",
        "preemptions",
        "prompt_logprobs",
        "prompt_top_logprobs",
        "raw_logprobs",
        "request",
        "seed",
        "slot",
        "started_at",
        "state",
        "stop_ids",
        "stop_reason",
        "token_times",
        "tokens",
        "top_logprobs",
        "weight_versions",
        "windowed",
    )

    def __init__(self, request: Request, index: int):
        self.request, self.index, self.params = request, index, request.params
        self.seed = derive_seed(request.seed, index)
        self.tokens = list(request.prompt_ids)
        self.num_prompt = len(self.tokens)
        self.logprobs, self.raw_logprobs, self.weight_versions = [], [], []
        self.top_logprobs = [] if self.params.num_top_logprobs else None
        self.prompt_logprobs = [None] * self.num_prompt if self.params.prompt_logprobs else None
        self.prompt_top_logprobs = [None] * self.num_prompt if self.params.num_prompt_top_logprobs else None
        self.state = State.WAITING
        self.slot = None
        self.last_step = -(1 << 62)
        self.stop_ids: frozenset[int] = frozenset()
        self.arrival = -1  # its place in the order of fairness, once added
        self.limit, self.limit_note = self.num_prompt + self.params.max_new_tokens, None
        self.finish_reason = self.stop_reason = self.error = None
        self.started_at, self.finished_at, self.token_times = None, None, []
        self.cached_tokens = self.preemptions = self.drafted = self.accepted = 0
        self.drafts = self.known_as = None
        self.epoch = self.in_flight = 0
        self.forget_pages()

    def resume(self, partial: PartialOutput) -> None:
        """Go on from tokens that were drawn elsewhere, just now as far as anybody here knows. ValueError where what
        there is of them, or of the prompt, is not as long."""
        self._check(partial)
        self.tokens += partial.token_ids
        self.logprobs += partial.logprobs
        self.raw_logprobs += partial.raw_logprobs
        self.weight_versions += partial.weight_versions
        self.token_times += [self.request.arrived] * len(partial.token_ids)
        if self.top_logprobs is not None:
            self.top_logprobs += partial.top_logprobs or []
        if self.prompt_logprobs is not None and partial.prompt_logprobs is not None:
            self.prompt_logprobs = list(partial.prompt_logprobs)
        if self.prompt_top_logprobs is not None and partial.prompt_top_logprobs is not None:
            self.prompt_top_logprobs = list(partial.prompt_top_logprobs)
        if partial.done:
            self.finish("abort")

    def _check(self, partial: PartialOutput) -> None:
        drawn = ["logprobs", "raw_logprobs", "weight_versions"] + ["top_logprobs"] * bool(self.params.num_top_logprobs)
        counts = {name: (len(getattr(partial, name) or ()), len(partial.token_ids)) for name in drawn}
        for name in ("prompt_logprobs", "prompt_top_logprobs"):
            if (given := getattr(partial, name)) is not None:
                counts[name] = len(given), self.num_prompt
        for name, (count, expected) in counts.items():
            if count != expected:
                raise ValueError(f"Request: earlier[{self.index}].{name} has {count}, expected {expected}")

    def forget_pages(self) -> list[int]:
        """Start over: nothing is computed. Returns the pages held until now, for the pool."""
        pages = getattr(self, "pages", [])
        self.pages = []
        self.windowed = range(0)  # of its pages, those that it holds one beside, for layers with a window
        self.num_computed = self.num_planned = 0
        self.num_known = 0  # of its pages, from the first on, that the prefix cache knows the content of ...
        self.node = None  # ... and the id of the last of them there
        self.epoch += 1
        return pages

    @property
    def finished(self) -> bool:
        return self.state is State.FINISHED

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def keys(self) -> list:
        """What the prefix cache knows its tokens by. Like tokens it grows at the end alone."""
        if self.request.pictures is None:
            return self.tokens
        if self.known_as is None:
            self.known_as = list(self.request.pictures.keys)
        self.known_as += self.tokens[len(self.known_as) :]
        return self.known_as

    def finish(self, reason: str, stop_reason=None, error: str | None = None) -> None:
        """For the scheduler, which knows what the sequence holds."""
        self.request.unfinished -= not self.finished
        self.state = State.FINISHED
        self.finished_at = self.token_times[-1] if self.token_times and reason != "abort" else time.monotonic()
        self.finish_reason, self.stop_reason, self.error = reason, stop_reason, error

    def completion(self, text: str = "", weight_version: int = 0) -> Completion:
        """What the caller gets. `weight_version` is for a sequence that has no token."""
        return Completion(
            prompt_ids=list(self.request.prompt_ids),
            token_ids=self.generated,
            logprobs=list(self.logprobs),
            raw_logprobs=list(self.raw_logprobs),
            finish_reason=self.finish_reason,
            text=text,
            weight_version=self.weight_versions[-1] if self.weight_versions else weight_version,
            top_logprobs=None if self.top_logprobs is None else list(self.top_logprobs),
            prompt_logprobs=None if self.prompt_logprobs is None else list(self.prompt_logprobs),
            prompt_top_logprobs=None if self.prompt_top_logprobs is None else list(self.prompt_top_logprobs),
            error=self.error,
            **({} if self.request.pictures is None else self.request.pictures.for_trainers(len(self.tokens))),
            request_id=self.request.id,
            index=self.index,
            seed=self.request.seed,
            stop_reason=self.stop_reason,
            weight_versions=list(self.weight_versions),
            metrics=Metrics(
                arrived=self.request.arrived,
                started=self.started_at,
                token_times=list(self.token_times),
                finished=self.finished_at,
                cached_tokens=self.cached_tokens,
                preemptions=self.preemptions,
                drafted_tokens=self.drafted,
                accepted_tokens=self.accepted,
            ),
        )

    def __repr__(self):
        where = f"{self.request.id}[{self.index}]"
        return f"Sequence({where}, {self.state.value}, {self.num_prompt}+{len(self.tokens) - self.num_prompt} tokens)"


def as_requests(prompts, params, request_ids) -> list[tuple]:
    """What `generate` is called with, as (prompt, params, request id or None) for each prompt. TypeError or ValueError
    for what is wrong with the call, not with one of its requests."""
    if isinstance(prompts, str):
        prompts = [prompts]
    if isinstance(prompts, Mapping | bytes | bytearray | set | frozenset) or not isinstance(prompts, Iterable):
        raise TypeError(f"generate: prompts: got a {type(prompts).__name__}, expected a list of prompts")
    prompts = list(prompts)
    if prompts and all(isinstance(prompt, int) for prompt in prompts):
        raise TypeError("generate: prompts: got one list of token ids, expected a list of prompts")
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(prompts)
    for name, values in (("params", params), ("request_ids", request_ids)):
        if values is not None and (isinstance(values, str | dict) or not isinstance(values, Several)):
            raise TypeError(f"generate: {name}: got a {type(values).__name__}, expected a list, one for each prompt")
        if values is not None and len(values) != len(prompts):
            raise ValueError(f"generate: {name}: got {len(values)}, expected {len(prompts)}, one for each prompt")
    for name in request_ids or ():
        if not isinstance(name, str):
            raise TypeError(f"generate: request_ids: got a {type(name).__name__} ({name!r}), expected strings")
        check_name("generate", name)
    return list(zip(prompts, params, request_ids or [None] * len(prompts)))


_REFUSED = SamplingParams(max_new_tokens=1)


def start_order(each: list[tuple], at_once: int) -> list[int]:
    """In which order what `as_requests` returns begins, where so many samples run at once: as it is given, but once no
    more than twice that are left those first that may go on for longest. Who begins last would else be left
    alone at the end, and a step of one takes hardly less time than one of many. Where two have one name all begin as
    they are given, for the second is refused."""
    names = [name for *_, name in each if name is not None]
    if len(set(names)) < len(names):
        return list(range(len(each)))
    sound = [params if isinstance(params, SamplingParams) else _REFUSED for _, params, _ in each]
    first, left = len(each), 2 * at_once
    while first and left >= sound[first - 1].n:
        first -= 1
        left -= sound[first].n
    return [*range(first), *sorted(range(first, len(each)), key=lambda index: -sound[index].max_new_tokens)]


def check_name(method: str, request_id: str) -> None:
    if not isinstance(request_id, str):
        raise TypeError(f"{method}: request_id: got a {type(request_id).__name__}, expected a string")
    if not is_unicode(request_id):
        raise ValueError(f"{method}: request_id: got {request_id!a}, expected Unicode")


def check_ids(prompt_ids: list[int], vocab_size: int) -> None:
    """Check that a model takes these as a prompt. ValueError where it does not."""
    if not prompt_ids:
        raise ValueError("prompt_ids is empty, expected at least one token id")
    if (least := min(prompt_ids)) < 0:
        raise ValueError(f"prompt_ids has {least}, expected token ids of 0 or more")
    if (most := max(prompt_ids)) >= vocab_size:
        raise ValueError(f"prompt_ids has {most}, expected ids below {vocab_size}")


def check_params(params, vocab_size: int) -> None:
    if not isinstance(params, SamplingParams):
        raise TypeError(f"params is a {type(params).__name__}, expected SamplingParams")
    for name in ("num_top_logprobs", "num_prompt_top_logprobs"):
        if getattr(params, name) > vocab_size:
            raise ValueError(f"{name} is {getattr(params, name)}, expected at most {vocab_size}")
    if (most := max(map(max, params.draft), default=0)) >= vocab_size:
        raise ValueError(f"draft has {most}, expected ids below {vocab_size}")
    if (most := max(params.stop_token_ids, default=0)) >= vocab_size:
        raise ValueError(f"stop_token_ids has {most}, expected ids below {vocab_size}: no other is ever drawn")


def encoded(prompt, text):
    """Token ids of a prompt that is a text, and others as they are. ValueError without a tokenizer (`text`)."""
    if not isinstance(prompt, str):
        return prompt
    if text is None:
        raise ValueError("prompt is a text, expected token ids: there is no tokenizer")
    return text.encode(prompt)


def refused(ids: list[int], params, name: str | None, error: Exception, weight_version: int) -> list[Completion]:
    """The completions of a request that is itself at fault."""
    count = params.n if isinstance(params, SamplingParams) else 1
    return [
        Completion(ids, [], [], [], "error", "", weight_version, error=str(error), request_id=name, index=i)
        for i in range(count)
    ]


def token_ids(given) -> list[int]:
    """A list of our own, of Python's integers. What merely iterates over integers (bytes, the keys of a dictionary) and
    what merely counts as one (True) is a mistake."""
    try:
        if isinstance(given, bytes | bytearray | memoryview | str | Mapping | Set):
            raise TypeError
        values = list(given.tolist() if hasattr(given, "tolist") else given)
        kinds = set(map(type, values))
        if kinds == {int}:
            return values
        if bool in kinds:
            raise TypeError
        return [operator.index(token) for token in values]
    except TypeError:
        raise TypeError(f"Request: prompt_ids is {_short(given)}, expected a list of token ids") from None


def _short(value, width=60):
    text = repr(value)
    return text if len(text) <= width else text[: width - 3] + "..."
