"""The shapes of answers and of their pieces in a stream, for both APIs.

`logprobs` and `top_logprobs` are those at temperature 1, as OpenAI's; "rollout" has the sampling temperature's too.
What is minus infinity is -9999.0, for JSON has no word for it. Beyond OpenAI's fields a choice that has ended says
which `weight_version` gave its last token, and its `stop_reason`: the token id or the string that ended it.
"""

import codecs
import itertools
import json
import math
import time
from dataclasses import dataclass, replace
from typing import Any

from ..media.images import Pictures
from ..outputs import Increment
from ..request import Completion
from .tokens import Tokens

LEAST = -9999.0  # as OpenAI and vLLM write what has no chance at all


@dataclass
class Job:
    """One prompt of a request: its ids, the text to begin answers with if that is wanted, its images and videos."""

    prompt_ids: list[int]
    echo: str | None = None
    pictures: Pictures | None = None

    @property
    def given(self) -> list[int] | dict[str, Any]:
        """What the engine is asked with."""
        if self.pictures is None:
            return self.prompt_ids
        return {"prompt_token_ids": self.prompt_ids, **self.pictures.given()}


@dataclass
class Wanted:
    """What a request wants to be told. top: of the likeliest tokens at each position; None: no log-probabilities. So
    of_prompt, at the prompt's positions."""

    top: int | None = None
    token_ids: bool = False
    rollout: bool = False
    names_are_ids: bool = False
    usage: bool = False  # in a stream
    usage_so_far: bool = False  # in each of its pieces
    special: bool = False  # the text has special tokens
    of_prompt: int | None = None
    prompt_alone: bool = False  # the one token that had to be generated is not told


@dataclass
class _Delivered:
    """What a stream has said of one choice."""

    offsets: "_Offsets"
    begun: bool = False


class _Offsets:
    """Where the texts of a row of tokens begin. One that ends a character begins where that does. What begins a text
    has no blank before it in some tokenizers' (Llama 2's)."""

    def __init__(self, tokens: Tokens, special: bool):
        self._tokens, self._special, self._at = tokens, special, 0
        self._begin()

    def _begin(self) -> None:
        self._decoder, self._first = codecs.getincrementaldecoder("utf-8")("replace"), True

    def of(self, ids: list[int]) -> list[int]:
        """Of an answer's tokens, behind those that were asked about before."""
        found = []
        for token in ids:
            found.append(self._at)
            raw = self._tokens.raw(token, self._special)
            if self._first and raw:
                raw = raw[self._tokens.stripped(token) :]
                self._first = False
            self._at += len(self._decoder.decode(raw))
        return found

    def of_prompt(self, ids: list[int], text: str) -> list[int]:
        """Of a prompt's tokens in its text, which has the special ones that it was given with, and none that a
        tokenizer has put before it."""
        found = []
        for token in ids:
            found.append(self._at)
            piece = self._decoder.decode(self._tokens.raw(token, special=True))
            if not text.startswith(piece, self._at):
                piece = "" if self._tokens.is_silent(token) else piece.removeprefix(" ")
            self._at = min(self._at + len(piece), len(text))
        self._at = len(text)
        self._begin()
        return found


class Answers:
    """Of one request. `chat` is which API's."""

    def __init__(
        self,
        chat: bool,
        name: str,
        model: str,
        fingerprint: str,
        jobs: list[Job],
        n: int,
        wanted: Wanted,
        tokens: Tokens,
    ):
        self.chat, self.jobs, self.n, self.wanted, self.tokens = chat, jobs, n, wanted, tokens
        self.head = {"id": name, "created": int(time.time()), "model": model, "system_fingerprint": fingerprint}
        self._delivered = [_Delivered(_Offsets(tokens, wanted.special)) for _ in range(len(jobs) * n)]
        self._generated = 0

    # Whole

    def whole(self, completions: list[Completion]) -> dict:
        completions = [self._shown(completion) for completion in completions]
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        kind = "chat.completion" if self.chat else "text_completion"
        answer = {**self.head, "object": kind, "choices": choices, "usage": self.usage(completions)}
        if self.chat and self.wanted.of_prompt is not None:  # where vLLM has it
            answer["prompt_logprobs"] = choices[0].pop("prompt_logprobs")
        return answer

    def _shown(self, done: Completion) -> Completion:
        """A prompt that was to be scored and no more comes with no token."""
        if not self.wanted.prompt_alone:
            return done
        nothing: dict[str, Any] = {"token_ids": [], "logprobs": [], "raw_logprobs": [], "weight_versions": []}
        return replace(done, text="", finish_reason="length", stop_reason=None, **nothing)

    def _choice(self, index: int, done: Completion) -> dict:
        wanted, job = self.wanted, self.jobs[index // self.n]
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": done.text, "refusal": None}
        else:
            choice["text"] = (job.echo or "") + done.text
        choice["logprobs"] = None
        if wanted.top is not None:
            choice["logprobs"] = self._logprobs(
                index, done, _Offsets(self.tokens, wanted.special), job.echo is not None
            )
        choice |= self._end(done)
        if wanted.of_prompt is not None:
            choice["prompt_logprobs"] = self._of_prompt(done.prompt_ids, done)
        if wanted.token_ids:
            choice |= {"token_ids": done.token_ids, "prompt_token_ids": done.prompt_ids}
        if wanted.rollout:
            choice["rollout"] = {
                "token_ids": done.token_ids,
                "logprobs": _numbers(done.logprobs),
                "raw_logprobs": _numbers(done.raw_logprobs),
                "weight_versions": done.weight_versions,
                "seed": done.seed,
            }
        return choice

    def _end(self, done: Completion) -> dict:
        return {
            "finish_reason": done.finish_reason,
            "stop_reason": done.stop_reason,
            "weight_version": done.weight_version,
        }

    def usage(self, completions: list[Completion]) -> dict:
        """A prompt counts once, whatever its number of samples."""
        cached = 0
        for at in range(0, len(completions), self.n):
            found = [done.metrics.cached_tokens for done in completions[at : at + self.n] if done.metrics]
            cached += min(found, default=0)
        counts = self._counts(sum(len(done.token_ids) for done in completions))
        return counts | {"prompt_tokens_details": {"cached_tokens": cached}}

    def _counts(self, generated: int) -> dict:
        prompt = sum(len(job.prompt_ids) for job in self.jobs)
        return {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}

    # In pieces

    def piece(self, index: int, increment: Increment) -> bytes | None:
        """An event; None where there is nothing to say yet."""
        wanted, delivered, job = self.wanted, self._delivered[index], self.jobs[index // self.n]
        done = increment.completion and self._shown(increment.completion)
        if wanted.prompt_alone:
            increment = replace(increment, token_ids=[], logprobs=[], raw_logprobs=[], top_logprobs=None, text="")
        self._generated += len(increment.token_ids)
        all_of_it = wanted.top is not None or wanted.token_ids or wanted.rollout or wanted.of_prompt is not None
        if not (increment.text or done or all_of_it):
            return None
        choice: dict[str, Any] = {"index": index}
        text = increment.text
        if self.chat:
            choice["delta"] = {"content": text} if text or not done else {}
        else:
            choice["text"] = text if delivered.begun else (job.echo or "") + text
        choice["logprobs"] = None
        echoed = not delivered.begun and job.echo is not None and increment.prompt_logprobs is not None
        if wanted.top is not None and (increment.token_ids or echoed):
            choice["logprobs"] = self._logprobs(index, increment, delivered.offsets, echoed)
        choice |= self._end(done) if done else {"finish_reason": None}
        if wanted.of_prompt is not None and not delivered.begun:
            choice["prompt_logprobs"] = self._of_prompt(job.prompt_ids, increment)
        if wanted.token_ids:
            choice["token_ids"] = increment.token_ids
            if not delivered.begun:
                choice["prompt_token_ids"] = job.prompt_ids
        if wanted.rollout:
            choice["rollout"] = {
                "token_ids": increment.token_ids,
                "logprobs": _numbers(increment.logprobs),
                "raw_logprobs": _numbers(increment.raw_logprobs),
            }
            if done:
                choice["rollout"] |= {"weight_versions": done.weight_versions, "seed": done.seed}
        delivered.begun = True
        return self._event([choice])

    def beginning(self) -> list[bytes]:
        """What comes before any token."""
        if not self.chat:
            return []
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._event([{"index": index, **first}]) for index in range(len(self._delivered))]

    def ending(self, completions: list[Completion]) -> list[bytes]:
        shown = [self._shown(completion) for completion in completions]
        events = [self._event([], self.usage(shown))] if self.wanted.usage else []
        return [*events, b"data: [DONE]\n\n"]

    def _event(self, choices: list[dict], usage: dict | None = None) -> bytes:
        piece = {**self.head, "object": "chat.completion.chunk" if self.chat else "text_completion", "choices": choices}
        if self.wanted.usage_so_far and usage is None:
            usage = self._counts(self._generated)
        return event(piece | ({"usage": usage} if self.wanted.usage else {}))

    # Log-probabilities

    def _logprobs(self, index: int, of: Completion | Increment, offsets: _Offsets, echoed: bool) -> dict:
        ids, values = of.token_ids, of.raw_logprobs
        tops = of.top_logprobs or [{}] * len(ids)
        if self.chat:
            return self._of_chat(ids, values, tops)
        before, places = [], []
        if echoed:
            job = self.jobs[index // self.n]
            before, places = job.prompt_ids, offsets.of_prompt(job.prompt_ids, job.echo or "")
            values = [*(of.prompt_logprobs or ()), *values]
            tops = [*(of.prompt_top_logprobs or [{}] * len(before)), *tops]
        return self._of_text(before + ids, values, tops, places + offsets.of(ids))

    def _of_prompt(self, ids: list[int], of: Completion | Increment) -> list[dict | None]:
        """As vLLM has it: at each place the prompt's own token, and the likeliest."""

        def one(token: int, value: float) -> dict:
            return {"logprob": _number(value), "decoded_token": self._name(token)[0]}

        values, most = of.prompt_logprobs or [], self.wanted.of_prompt
        tops = of.prompt_top_logprobs or [None] * len(values)
        return [
            None if value is None else {str(t): one(t, v) for t, v in {token: value, **_first(top, most)}.items()}
            for token, value, top in zip(ids, values, tops)
        ]

    def _of_chat(self, ids, values, tops) -> dict:
        def one(token: int, value: float) -> dict:
            text, raw = self._name(token)
            return {"token": text, "logprob": _number(value), "bytes": raw}

        content = [
            one(token, value) | {"top_logprobs": [one(*pair) for pair in top.items()]}
            for token, value, top in zip(ids, values, tops)
        ]
        return {"content": content, "refusal": None}

    def _of_text(self, ids, values, tops, offsets: list[int]) -> dict:
        names = [self._name(token)[0] for token in ids]
        found: dict[str, Any] = {
            "tokens": names,
            "token_logprobs": [_number(value) for value in values],
            "top_logprobs": None,
            "text_offset": offsets,
        }
        if self.wanted.top:
            found["top_logprobs"] = []
            for token, value, top in zip(ids, values, tops):
                named: dict[str, float | None] = {}
                for other, its in _first(top, self.wanted.top).items():
                    named.setdefault(self._name(other)[0], _number(its))
                named[self._name(token)[0]] = _number(value)  # always there, whoever else has that text
                found["top_logprobs"].append(None if value is None else named)
        return found

    def _name(self, token: int) -> tuple[str, list[int] | None]:
        text, raw = self.tokens.token(token)
        return (f"token_id:{token}" if self.wanted.names_are_ids else text), raw


def event(value: dict) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"


def as_json(value: dict) -> bytes:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.encode(errors="replace")  # half a character may stand in the name of a field that is refused


def _first(top: dict[int, float] | None, count: int | None) -> dict[int, float]:
    """The likeliest of the likeliest."""
    return {} if not top else dict(itertools.islice(top.items(), count))


def _number(value: float | None) -> float | None:
    return value if value is None or math.isfinite(value) else LEAST


def _numbers(values: list[float]) -> list[float | None]:
    return values if all(map(math.isfinite, values)) else [_number(value) for value in values]
