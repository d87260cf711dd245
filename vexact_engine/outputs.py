"""From tokens to whoever waits for them: increments, tickets of requests, and the calls that they belong to."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Several
from dataclasses import dataclass
from typing import Any, TypeVar

from .errors import RequestError
from .request import Completion, PartialOutput, Request, Sequence
from .text import Detokenizer, Stops, Text

T = TypeVar("T")
_PIECE = 2e-3  # seconds of work that an asyncio loop may wait for


@dataclass(slots=True)
class Increment:
    """What `stream` yields: what one sample has more than at the last time.

    index            which of the request's n samples
    token_ids, logprobs, raw_logprobs   the new tokens and theirs
    top_logprobs     for each new token what Completion.top_logprobs has, if `num_top_logprobs` asked for it
    prompt_logprobs  what Completion.prompt_logprobs has, if that was asked for; with the first increment alone
    prompt_top_logprobs   the same of Completion.prompt_top_logprobs
    text             the new text. It may lag behind the tokens, while a character is incomplete or could be the
                     beginning of a stop string; what is left comes with the last increment
    completion       everything, on the last increment of this sample; None before
    """

    request_id: str
    index: int
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    text: str
    completion: Completion | None = None
    top_logprobs: list[dict[int, float]] | None = None
    prompt_logprobs: list[float | None] | None = None
    prompt_top_logprobs: list[dict[int, float] | None] | None = None

    @property
    def finish_reason(self) -> str | None:
        return None if self.completion is None else self.completion.finish_reason


@dataclass(frozen=True, slots=True)
class Load:
    """What an engine has to do at this moment.

    running, waiting   sequences that are computed, and that wait to be let in
    pages_used         pages of the KV cache that running sequences hold; of `pages` in all. The others may hold what
                       the prefix cache knows. Where all layers have a window, those that have not been given back
    paused             whether it computes nothing until resume()
    window_pages_used  of layers with a window, where others have none, those that have not been given back; of
                       `window_pages` in all
    """

    running: int
    waiting: int
    pages_used: int
    pages: int
    paused: bool
    window_pages_used: int = 0
    window_pages: int = 0


class Submission:
    """The requests of one call to the engine. `notify` is called once, by the engine's thread, when all are done.

    whole   False: some are handed over while others are still to be added. Who adds them calls one_done() after the
            last, and it may be there that `notify` is called
    """

    def __init__(self, notify: Callable[[], None], whole: bool = True):
        self.notify, self.tickets, self.left = notify, [], 0 if whole else 1
        self._lock = threading.Lock()

    def add(self, ticket: "Ticket") -> None:
        self.tickets.append(ticket)
        with self._lock:
            self.left += 1

    def one_done(self) -> None:
        with self._lock:
            self.left -= 1
            over = not self.left
        if over:
            self.notify()


class Outgoing:
    """Calls for asyncio loops, gathered by one thread at a time: `flush` hands each loop its own in one piece."""

    def __init__(self) -> None:
        self._calls: dict[asyncio.AbstractEventLoop, list[tuple[Callable, Any]]] = {}

    def put(self, asyncio_loop: asyncio.AbstractEventLoop, call: Callable, item: Any) -> None:
        self._calls.setdefault(asyncio_loop, []).append((call, item))

    def flush(self) -> None:
        if not self._calls:
            return
        gathered, self._calls = self._calls, {}
        for asyncio_loop, calls in gathered.items():
            with contextlib.suppress(RuntimeError):  # it is closed: nobody listens any more
                asyncio_loop.call_soon_threadsafe(_call_all, calls)


def _call_all(calls: list[tuple[Callable, Any]]) -> None:
    for call, item in calls:
        call(item)


class _Sample:
    """Text and delivery of one sequence."""

    __slots__ = ("detokenizer", "done", "sent_text", "sent_tokens", "stops")

    def __init__(self, text: Text | None, stops: Several[str]):
        self.detokenizer = None if text is None else Detokenizer(text)
        self.sent_text = self.sent_tokens = 0
        self.done = False
        self.stops = Stops(stops)


class Ticket:
    """A request that somebody waits for: the engine's thread fills it in, the front reads it once it is done.

    call         whose request it is
    listen       given each Increment, and at the end an exception if there is one; None where nobody listens
    completions  its n completions; whole once `done`
    error        the exception that ended it instead
    """

    def __init__(
        self,
        request: Request,
        text: Text | None,
        call: Submission,
        listen: Callable[[Increment | BaseException], None] | None = None,
        earlier: Several[PartialOutput] | None = None,
    ):
        self.request, self.call, self.listen = request, call, listen
        self.text = text if text is None or request.params.skip_special_tokens else text.verbatim()
        self.completions: list[Completion | None] = [None] * len(request.sequences)
        self.samples = [_Sample(self.text, request.params.stop) for _ in request.sequences]
        self.left = request.unfinished
        self.done = False
        self.error: BaseException | None = None
        call.add(self)
        for sample, partial in zip(self.samples, earlier or ()):
            sample.sent_text, sample.sent_tokens, sample.done = partial.sent_text, len(partial.token_ids), partial.done
            if sample.detokenizer is not None:  # one by one, as it was: what of it is certain may depend on that
                for count in range(len(partial.token_ids)):
                    sample.detokenizer.update(partial.token_ids[: count + 1])
                sample.stops.update(sample.detokenizer.text)

    def result(self) -> list[Completion]:
        if self.error is not None:
            raise self.error
        return self.completions

    def find_stop(self, sequence: Sequence) -> str | None:
        """After each token of a sequence with stop strings: the one that it made whole."""
        sample = self.samples[sequence.index]
        # A character that is still incomplete is not there yet, and no stop string is looked for in it.
        sample.detokenizer.update(sequence.tokens, sequence.num_prompt)
        sample.stops.update(sample.detokenizer.text)
        return None if sample.stops.found is None else sample.stops.found[0]

    def deliver(self, sequence: Sequence, weight_version: int) -> None:
        """Take what has come of one sample, and its end if this is it."""
        sample = self.samples[sequence.index]
        completion = None
        if sequence.finished:
            if sample.done:
                return
            sample.done = True
            completion = sequence.completion(self._whole_text(sequence, sample), weight_version)
            self.completions[sequence.index] = completion
            self.left -= 1
        if self.listen is not None:
            self.listen(self._increment(sequence, sample, completion))
        if not self.left:
            self._end()

    def fail(self, error: BaseException) -> None:
        if self.done:
            return
        self.error = error
        if self.listen is not None:
            self.listen(error)
        self._end()

    def _end(self) -> None:
        if not self.done:
            self.done = True
            self.call.one_done()

    def _whole_text(self, sequence: Sequence, sample: _Sample) -> str:
        if self.text is None:
            return ""
        params, end = sequence.params, len(sequence.tokens)
        special = isinstance(sequence.stop_reason, int) and sequence.stop_reason in self.text.specials.values()
        if special and not params.include_stop_str_in_output:
            end -= 1
        try:
            if params.stop or self.listen is not None:
                sample.detokenizer.update(sequence.tokens[:end], sequence.num_prompt, final=True)
                text = sample.detokenizer.text
            else:
                text = self.text.whole(sequence.tokens[sequence.num_prompt : end])
        except Exception as error:
            sequence.error = sequence.error or f"text: the tokens could not be decoded: {error!r}"
            return ""
        if isinstance(sequence.stop_reason, str):
            stop, begin = sample.stops.found
            text = text[: begin + len(stop) * params.include_stop_str_in_output]
        return text

    def _increment(self, sequence: Sequence, sample: _Sample, completion: Completion | None) -> Increment:
        text, first = "", sample.sent_tokens
        sample.sent_tokens = len(sequence.logprobs)
        if completion is not None:
            text = completion.text[sample.sent_text :]
        elif self.text is not None:
            if not sequence.params.stop:
                sample.detokenizer.update(sequence.tokens, sequence.num_prompt)
            certain = sample.detokenizer.text
            text = certain[sample.sent_text : len(certain) - sample.stops.held]
        sample.sent_text += len(text)
        scored, tops = sequence.prompt_logprobs, sequence.prompt_top_logprobs
        return Increment(
            request_id=self.request.id,
            index=sequence.index,
            token_ids=sequence.tokens[sequence.num_prompt + first :],
            logprobs=sequence.logprobs[first:],
            raw_logprobs=sequence.raw_logprobs[first:],
            text=text,
            completion=completion,
            top_logprobs=None if sequence.top_logprobs is None else sequence.top_logprobs[first:],
            prompt_logprobs=None if scored is None or first else list(scored),
            prompt_top_logprobs=None if tops is None or first else list(tops),
        )


async def in_pieces(made: Iterable[T]) -> list[T]:
    """All that is made. What else an asyncio loop has to do gets its turn meanwhile."""
    found, end = [], time.thread_time() + _PIECE
    for one in made:
        found.append(one)
        if time.thread_time() >= end:
            await asyncio.sleep(0)
            end = time.thread_time() + _PIECE
    return found


def collected(jobs: list, raise_on_error: bool) -> list[Completion]:
    """The completions of jobs that are done, and of requests that were refused, which are lists of theirs."""
    done = [c for job in jobs for c in (job if isinstance(job, list) else job.result())]
    if raise_on_error and any(c.finish_reason == "error" for c in done):
        raise RequestError(done)
    return done
