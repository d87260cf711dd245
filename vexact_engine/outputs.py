"""From tokens back to text and to whoever waits: incremental decoding, increments, and the tickets of requests."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from .request import Completion, Request, Sequence

_REPLACEMENT = "\ufffd"  # what an incomplete or invalid sequence of bytes decodes to


@dataclass(slots=True)
class Increment:
    """What `stream` yields: the news of one sample.

    index            which of the request's n samples
    token_ids, logprobs, raw_logprobs   the new tokens and theirs
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

    @property
    def finish_reason(self) -> str | None:
        return None if self.completion is None else self.completion.finish_reason


def decode(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of generated ids; special tokens have none."""
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


class Detokenizer:
    """The text of a growing list of ids, each token decoded a few times at most.

    Decoded is a window that begins at a character's boundary with at least one token that is text already, because
    a tokenizer may treat the very first token of a text differently. A replacement character at the end is kept
    back: the next token may complete it.
    """

    __slots__ = ("_begin", "_count", "_read", "_taken", "text", "tokenizer")

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self.text = ""  # all that is certain
        self._begin = 0  # the window's first token
        self._read = 0  # tokens up to the last clean boundary
        self._count = 0  # tokens seen
        self._taken = 0  # characters of the window that are in `text`

    def update(self, token_ids: list[int], final: bool = False) -> str:
        """New certain text, given all ids so far; with `final`, all that is left."""
        self._count = len(token_ids)
        window = decode(self.tokenizer, token_ids[self._begin :])
        whole = final or not window.endswith(_REPLACEMENT)
        new = (window if whole else window[:-1])[self._taken :]
        self.text += new
        self._taken += len(new)
        if whole and new:
            self._begin, self._read = self._read, self._count
            self._taken = len(decode(self.tokenizer, token_ids[self._begin : self._count]))
        return new


def held_back(text: str, stops: tuple[str, ...]) -> int:
    """How many characters at the end of `text` could be the beginning of a stop string."""
    most = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), most, -1):
            if text.endswith(stop[:size]):
                most = size
                break
    return most


class _Sample:
    """Text and delivery of one sequence."""

    __slots__ = ("detokenizer", "sent_text", "sent_tokens")

    def __init__(self, tokenizer: Any):
        self.detokenizer = None if tokenizer is None else Detokenizer(tokenizer)
        self.sent_text = self.sent_tokens = 0


class Ticket:
    """A request that somebody waits for.

    future      gets the list of its n completions, or the exception that stopped the engine
    on_news     called with each Increment, or None where nobody listens
    """

    def __init__(self, request: Request, tokenizer: Any, on_news: Callable[[Increment], None] | None = None):
        self.request, self.tokenizer, self.on_news = request, tokenizer, on_news
        self.future: Future[list[Completion]] = Future()
        self.completions: list[Completion | None] = [None] * len(request.sequences)
        self.samples = [_Sample(tokenizer) for _ in request.sequences]

    @property
    def done(self) -> bool:
        return self.future.done()

    def tail(self, sequence: Sequence) -> str:
        """What the newest token added, and as much before it as the longest stop string is long."""
        detokenizer = self.samples[sequence.index].detokenizer
        new = detokenizer.update(sequence.generated)
        # A character that is still incomplete shows as a replacement, and no stop string is looked for in that.
        return detokenizer.text[-(len(new) + max(map(len, sequence.params.stop))) :]

    def news(self, sequence: Sequence, weight_version: int) -> None:
        """Tell of tokens that have come, and of the end if this is it."""
        sample = self.samples[sequence.index]
        completion = None
        if sequence.finished:
            if self.completions[sequence.index] is not None:
                return
            completion = sequence.completion(self._whole_text(sequence, sample), weight_version)
            self.completions[sequence.index] = completion
        if self.on_news is not None:
            self.on_news(self._increment(sequence, sample, completion))
        if completion is not None and all(c is not None for c in self.completions) and not self.done:
            self.future.set_result(self.completions)

    def fail(self, error: BaseException) -> None:
        if not self.done:
            self.future.set_exception(error)

    def _whole_text(self, sequence: Sequence, sample: _Sample) -> str:
        if self.tokenizer is None:
            return ""
        try:
            if sequence.params.stop or self.on_news is not None:
                sample.detokenizer.update(sequence.generated, final=True)
                text = sample.detokenizer.text
            else:
                text = decode(self.tokenizer, sequence.generated)
        except Exception as error:
            sequence.error = sequence.error or f"text: the tokens could not be decoded: {error!r}"
            return ""
        if isinstance(sequence.stop_reason, str):
            text = text.split(sequence.stop_reason, 1)[0]
        return text

    def _increment(self, sequence: Sequence, sample: _Sample, completion: Completion | None) -> Increment:
        text, first = "", sample.sent_tokens
        sample.sent_tokens = len(sequence.logprobs)
        if completion is not None:
            text = completion.text[sample.sent_text :]
        elif self.tokenizer is not None:
            if not sequence.params.stop:
                sample.detokenizer.update(sequence.generated)
            certain = sample.detokenizer.text
            text = certain[sample.sent_text : len(certain) - held_back(certain, sequence.params.stop)]
        sample.sent_text += len(text)
        return Increment(
            request_id=self.request.id,
            index=sequence.index,
            token_ids=sequence.tokens[sequence.num_prompt + first :],
            logprobs=sequence.logprobs[first:],
            raw_logprobs=sequence.raw_logprobs[first:],
            text=text,
            completion=completion,
        )
