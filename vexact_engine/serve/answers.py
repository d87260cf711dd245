"""The shapes of answers and of their pieces in a stream, for both APIs.

`logprobs` and `top_logprobs` are those at temperature 1, as OpenAI's; "rollout" has the sampling temperature's too.
What is minus infinity is -9999.0, for JSON has no word for it. Beyond OpenAI's fields a choice that has ended says
which `weight_version` gave its last token, and its `stop_reason`: the token id or the string that ended it.
"""

import json
import math
import time
from dataclasses import dataclass
from typing import Any

from ..outputs import Increment
from ..request import Completion
from .tokens import Tokens

LEAST = -9999.0  # as OpenAI and vLLM write what has no chance at all


@dataclass
class Job:
    """One prompt of a request: its ids, and the text to begin answers with."""

    prompt_ids: list[int]
    echo: str = ""


@dataclass
class Wanted:
    """What a request wants to be told. top: of the likeliest tokens at each position; None: no log-probabilities."""

    top: int | None = None
    token_ids: bool = False
    rollout: bool = False
    names_are_ids: bool = False
    usage: bool = False  # in a stream


@dataclass
class _Told:
    """What a stream has said of one choice."""

    begun: bool = False
    offset: int = 0  # where the next token's text begins


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
        self._told = [_Told(offset=len(job.echo)) for job in jobs for _ in range(n)]

    # Whole

    def whole(self, completions: list[Completion]) -> dict:
        choices = [self._choice(index, completion) for index, completion in enumerate(completions)]
        kind = "chat.completion" if self.chat else "text_completion"
        return {**self.head, "object": kind, "choices": choices, "usage": self.usage(completions)}

    def _choice(self, index: int, done: Completion) -> dict:
        wanted, job = self.wanted, self.jobs[index // self.n]
        choice: dict[str, Any] = {"index": index}
        if self.chat:
            choice["message"] = {"role": "assistant", "content": done.text, "refusal": None}
        else:
            choice["text"] = job.echo + done.text
        choice["logprobs"] = None
        if wanted.top is not None:
            choice["logprobs"] = self._logprobs(done.token_ids, done.raw_logprobs, done.top_logprobs, len(job.echo))
        choice |= self._end(done)
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
        prompt = sum(len(job.prompt_ids) for job in self.jobs)
        generated = sum(len(done.token_ids) for done in completions)
        cached = 0
        for at in range(0, len(completions), self.n):
            found = [done.metrics.cached_tokens for done in completions[at : at + self.n] if done.metrics]
            cached += min(found, default=0)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": generated,
            "total_tokens": prompt + generated,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    # In pieces

    def piece(self, index: int, news: Increment) -> bytes | None:
        """An event; None where there is nothing to say yet."""
        wanted, told, done = self.wanted, self._told[index], news.completion
        told_all = wanted.top is not None or wanted.token_ids or wanted.rollout
        if not (news.text or done or told_all):
            return None
        choice: dict[str, Any] = {"index": index}
        text = news.text
        if self.chat:
            choice["delta"] = {"content": text} if text or not done else {}
        else:
            text = text if told.begun else self.jobs[index // self.n].echo + text
            choice["text"] = text
        choice["logprobs"] = None
        if wanted.top is not None and news.token_ids:
            choice["logprobs"] = self._logprobs(news.token_ids, news.raw_logprobs, news.top_logprobs, told.offset)
            told.offset += sum(map(self.tokens.width, news.token_ids))
        choice |= self._end(done) if done else {"finish_reason": None}
        if wanted.token_ids:
            choice["token_ids"] = news.token_ids
            if not told.begun:
                choice["prompt_token_ids"] = self.jobs[index // self.n].prompt_ids
        if wanted.rollout:
            choice["rollout"] = {
                "token_ids": news.token_ids,
                "logprobs": _numbers(news.logprobs),
                "raw_logprobs": _numbers(news.raw_logprobs),
            }
            if done:
                choice["rollout"] |= {"weight_versions": done.weight_versions, "seed": done.seed}
        told.begun = True
        return self._event([choice])

    def beginning(self) -> list[bytes]:
        """What comes before any token."""
        if not self.chat:
            return []
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._event([{"index": index, **first}]) for index in range(len(self._told))]

    def ending(self, completions: list[Completion]) -> list[bytes]:
        events = [self._event([], self.usage(completions))] if self.wanted.usage else []
        return [*events, b"data: [DONE]\n\n"]

    def _event(self, choices: list[dict], usage: dict | None = None) -> bytes:
        piece = {**self.head, "object": "chat.completion.chunk" if self.chat else "text_completion", "choices": choices}
        return event(piece | ({"usage": usage} if self.wanted.usage else {}))

    # Log-probabilities

    def _logprobs(self, ids: list[int], values: list[float], tops: list[dict[int, float]] | None, begin: int) -> dict:
        tops = tops or [{}] * len(ids)
        return self._of_chat(ids, values, tops) if self.chat else self._of_text(ids, values, tops, begin)

    def _of_chat(self, ids, values, tops) -> dict:
        def one(token: int, value: float) -> dict:
            text, raw = self._name(token)
            return {"token": text, "logprob": _number(value), "bytes": raw}

        content = [
            one(token, value) | {"top_logprobs": [one(*pair) for pair in top.items()]}
            for token, value, top in zip(ids, values, tops)
        ]
        return {"content": content, "refusal": None}

    def _of_text(self, ids, values, tops, begin: int) -> dict:
        names = [self._name(token)[0] for token in ids]
        offsets, at = [], begin
        for token in ids:
            offsets.append(at)
            at += self.tokens.width(token)
        found: dict[str, Any] = {
            "tokens": names,
            "token_logprobs": [_number(value) for value in values],
            "top_logprobs": None,
            "text_offset": offsets,
        }
        if self.wanted.top:
            found["top_logprobs"] = []
            for token, value, top in zip(ids, values, tops):
                named: dict[str, float] = {}
                for other, its in (*top.items(), (token, value)):  # the drawn one is always there
                    named.setdefault(self._name(other)[0], _number(its))
                found["top_logprobs"].append(named)
        return found

    def _name(self, token: int) -> tuple[str, list[int] | None]:
        text, raw = self.tokens.token(token)
        return (f"token_id:{token}" if self.wanted.names_are_ids else text), raw


def event(value: dict) -> bytes:
    return b"data: " + as_json(value) + b"\n\n"


def as_json(value: dict) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _number(value: float) -> float:
    return value if math.isfinite(value) else LEAST


def _numbers(values: list[float]) -> list[float]:
    return values if all(map(math.isfinite, values)) else [_number(value) for value in values]
