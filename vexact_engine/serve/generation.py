"""One request for generated text, from its body to the last byte of its answer."""

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..outputs import Increment
from ..request import Completion
from .answers import Answers, Job, Wanted, as_json, event
from .attend import Gone, Late, attended
from .errors import APIError, as_api_error
from .protocol import ChatRequest, CompletionRequest, parse, sampling

log = logging.getLogger("vexact_engine.serve")
_PART = 64 << 10  # bytes


class Generation(Response):
    """An answer that is made while it is sent. Whatever ends it early, the engine drops its requests.

    Registered in the service from begin to end; `stop` ends it from outside, with what there is.
    """

    def __init__(self, service: Any, request: Request, chat: bool):
        super().__init__()
        self.service, self.request, self.chat = service, request, chat
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{secrets.token_hex(16)}"
        self.endpoint = "chat" if chat else "completions"  # as /metrics calls it
        self.request_id = request.scope["state"]["request_id"]
        self.names: list[str] = []  # of its requests in the engine
        self.given_id: str | None = None  # in its body
        self.stopped = False
        self.outcome = "error"
        self.completions: list[Completion] = []
        self.prompt_tokens = 0
        self._begun, self._sending, self._whole, self._left = time.monotonic(), False, False, False

    def stop(self) -> None:
        """Its samples end with finish_reason "abort" before the engine's next step; before there are any, all of it."""
        self.stopped = True
        for name in self.names:
            self.service.engine.abort(name)

    @property
    def own_names(self) -> set[str]:
        """What it may be called to be aborted."""
        return {self.id, self.request_id} | ({self.given_id} if self.given_id is not None else set())

    async def __call__(self, scope, receive, send) -> None:
        """Ends in a client's name that takes nothing of what is ready for it: it would hold its place for ever."""
        loop, task, most = asyncio.get_running_loop(), asyncio.current_task(), self.service.settings.send_timeout
        began: float | None = None  # to send what is not sent yet
        stuck = False

        async def sending(message: dict) -> None:
            nonlocal began
            began = loop.time()
            try:
                await send(message)
            finally:
                began = None

        def look() -> None:
            nonlocal stuck, timer
            if began is not None and loop.time() - began >= most:
                stuck, self.outcome = True, "disconnected"
                task.cancel()
            else:
                timer = loop.call_later(most / 4, look)

        timer = loop.call_later(most / 4, look)
        try:
            await self._serve(receive, sending)
        except asyncio.CancelledError:
            if not stuck:
                raise
            log.warning("%s: its client takes nothing of its answer for %g s: it ends", self.request_id, most)
        finally:
            timer.cancel()

    async def _serve(self, receive, send) -> None:
        service = self.service
        try:
            service.enter(self)
            work = self._work(await service.body(self.request), send)
            await attended(receive, work, service.settings.request_timeout, self._may_expire)
        except Late:
            await self._fail(self._timeout(), send)
        except (Gone, ClientDisconnect):
            self.outcome = "disconnected"
        except asyncio.CancelledError:
            self.outcome = "disconnected" if self.outcome == "disconnected" else "cancelled"
            raise
        except Exception as error:
            await self._fail(as_api_error(error, self.request_id), send)
        finally:
            self._leave()

    async def _work(self, raw: bytes, send) -> None:
        asked = parse(ChatRequest if self.chat else CompletionRequest, raw)
        del raw
        answers, stream, prompts, params = await self._prepare(asked)
        self.prompt_tokens = sum(len(job.prompt_ids) for job in answers.jobs)
        await (self._stream if stream else self._answer)(answers, prompts, params, send)

    def _may_expire(self) -> bool:
        """Whether its time counts: not that of a client that takes what is whole."""
        return not self._whole

    async def _fail(self, failure: APIError, send) -> None:
        self.outcome = {429: "refused", 503: "unavailable", 504: "timeout"}.get(failure.status, "")
        self.outcome = self.outcome or ("bad_request" if failure.status < 500 else "error")
        await self._send_error(send, failure)

    def _leave(self) -> None:
        """Once, at the end: its place is free, and it is counted by its outcome."""
        if self._left:
            return
        self._left = True
        metrics = self.service.metrics
        self.service.leave(self)
        metrics.requests.labels(self.endpoint, self.outcome).inc()
        metrics.note(self.prompt_tokens if self.completions else 0, self.completions)
        generated = sum(len(done.token_ids) for done in self.completions)
        text = "%s %s: %s, %d prompt tokens, %d generated, %.3f s"
        seconds = time.monotonic() - self._begun
        log.info(text, self.request_id, self.id, self.outcome, self.prompt_tokens, generated, seconds)

    def _outcome_of(self) -> str:
        return "aborted" if any(done.finish_reason == "abort" for done in self.completions) else "ok"

    # What is asked

    async def _prepare(self, asked: Any) -> tuple[Answers, bool, list[list[int]], list]:
        """What makes the answer, whether in a stream, and for each prompt its ids and its parameters."""
        service = self.service
        model = service.check_model(asked.model)
        n = 1 if asked.n is None else asked.n
        self.given_id = asked.request_id
        top = self._top(asked)
        if self.chat:
            service.prompts.check_samples(1, n)
            jobs = [await service.prompts.of_chat(asked)]
        else:
            jobs = await service.prompts.of_text(asked)
        of_prompt = self._of_prompt(asked)
        echoed = bool(not self.chat and asked.echo and top is not None)
        alone = not self.chat and bool(asked.echo) and asked.max_tokens == 0
        tops = max(of_prompt or 0, top if echoed else 0) if of_prompt is not None or echoed else None
        params = [sampling(asked, self._max_tokens(asked, job), top or 0, tops) for job in jobs]
        options = asked.stream_options
        wanted = Wanted(
            top=top,
            token_ids=bool(asked.return_token_ids),
            rollout=bool(asked.return_rollout),
            names_are_ids=bool(asked.return_tokens_as_token_ids),
            usage=bool(options and options.include_usage),
            usage_so_far=bool(options and options.include_usage and options.continuous_usage_stats),
            special=asked.skip_special_tokens is False,
            of_prompt=of_prompt,
            prompt_alone=alone,
        )
        answers = Answers(self.chat, self.id, model, service.fingerprint, jobs, n, wanted, service.prompts.tokens)
        self.names = [f"{self.id}-{index}" for index in range(len(jobs))]
        return answers, bool(asked.stream), [job.given for job in jobs], params

    def _top(self, asked) -> int | None:
        if self.chat:
            if asked.top_logprobs and not asked.logprobs:
                raise APIError(400, "top_logprobs: expected logprobs true with it", param="top_logprobs")
            top, name = ((asked.top_logprobs or 0) if asked.logprobs else None), "top_logprobs"
        else:
            if asked.logprobs is True:
                raise APIError(400, "logprobs: got true, expected an integer", param="logprobs")
            top, name = None if asked.logprobs is False else asked.logprobs, "logprobs"
        most = self.service.settings.max_logprobs
        if top is not None and not 0 <= top <= most:
            raise APIError(400, f"{name}: got {top}, expected 0 to {most}", param=name)
        return top

    def _of_prompt(self, asked) -> int | None:
        """How many of the likeliest tokens at each of the prompt's positions, beside its own; None: not even those."""
        given, most = asked.prompt_logprobs, self.service.settings.max_logprobs
        if given is None or isinstance(given, bool):
            return 0 if given else None
        if not 0 <= given <= most:
            message = f"prompt_logprobs: got {given}, expected true, or 0 to {most}"
            raise APIError(400, message, param="prompt_logprobs")
        return given

    def _max_tokens(self, asked, job: Job) -> int:
        name, given = "max_tokens", asked.max_tokens
        if self.chat and asked.max_completion_tokens is not None:
            if given is not None and given != asked.max_completion_tokens:
                message = "max_tokens and max_completion_tokens differ, expected one of them"
                raise APIError(400, message, param="max_tokens")
            name, given = "max_completion_tokens", asked.max_completion_tokens
        room = self.service.room - len(job.prompt_ids)
        most = self.service.settings.max_tokens
        if given is None:  # OpenAI's: 16 of a text, of a chat as many as there is room for
            return min(room, most or room, room if self.chat else 16)
        if given == 0 and not self.chat and asked.echo:  # the prompt alone is asked for: see Wanted.prompt_alone
            return 1
        if given < 1:
            raise APIError(400, f"{name}: got {given}, expected 1 or more", param=name)
        if most is not None and given > most:
            raise APIError(400, f"{name}: got {given}, expected at most {most}", param=name)
        if given > room:
            message = f"{name}: got {given} after a prompt of {len(job.prompt_ids)} tokens, expected at most {room}"
            raise APIError(400, message, param=name, code="context_length_exceeded")
        return given

    # What is answered

    def _check_begin(self) -> None:
        """Called where nothing comes between this and the engine's having the request."""
        if self.stopped:
            raise APIError(503, "it was aborted before it began", code="aborted", retry=5)

    async def _answer(self, answers: Answers, prompts, params, send) -> None:
        engine = self.service.engine
        self._check_begin()
        self.completions = await engine.agenerate(prompts, params, request_ids=self.names)
        for done in self.completions:
            self._check(done)
        self._whole = True
        body = as_json(answers.whole(self.completions))
        self.outcome = self._outcome_of()
        await self._send(send, 200, body)

    async def _stream(self, answers: Answers, prompts, params, send) -> None:
        completions: list[Completion | None] = [None] * (len(prompts) * answers.n)
        streams = [
            self.service.engine.stream(*each, request_id=name) for *each, name in zip(prompts, params, self.names)
        ]
        async with aclosing(merged(streams, self._check_begin)) as news:
            async for number, item in news:
                index = number * answers.n + item.index
                if item.completion is not None:
                    completions[index] = item.completion
                    self.completions.append(item.completion)
                    self._check(item.completion)
                if not self._sending:
                    await self._begin(send, 200, "text/event-stream")
                    await _send_all(send, answers.beginning())
                if (piece := answers.piece(index, item)) is not None:
                    await _send_all(send, [piece])
        self._whole = True
        await _send_all(send, answers.ending(completions))
        self.outcome = self._outcome_of()
        await self._finish(send)

    def _check(self, done: Completion) -> None:
        if done.finish_reason != "error":
            return
        if done.metrics is None or done.metrics.started is None:  # refused before it was computed
            raise APIError(400, done.error or "refused", code="invalid_value")
        log.error("%s: %s", self.request_id, done.error)
        raise APIError(500, done.error or "failed", code="generation_failed")

    def _timeout(self) -> APIError:
        seconds = self.service.settings.request_timeout
        return APIError(504, f"the answer was not whole after {seconds:g} s", code="request_timeout")

    async def _begin(self, send, status: int, kind: str, headers: dict[str, str] | None = None) -> None:
        self._sending = True
        every = {"content-type": kind, "cache-control": "no-store", **(headers or {})}
        raw = [(name.encode(), value.encode("latin-1")) for name, value in every.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        await self._begin(send, status, "application/json", headers)
        await _send_all(send, [body])
        await self._finish(send)

    async def _finish(self, send) -> None:
        """Who has seen an answer's end finds a free place, and the answer counted: both come before it."""
        self._leave()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_error(self, send, failure: APIError) -> None:
        if not self._sending:
            await self._send(send, failure.status, as_json(failure.body()), failure.headers)
        else:  # a stream's status is out already: the error is its last event
            await _send_all(send, [event(failure.body()), b"data: [DONE]\n\n"])
            await self._finish(send)


async def _send_all(send: Callable[[dict], Awaitable[None]], pieces: list[bytes]) -> None:
    """In parts that a slow client takes one of in time; the server holds no more than that of an answer in buffers."""
    for piece in pieces:
        for begin in range(0, len(piece), _PART):
            await send({"type": "http.response.body", "body": piece[begin : begin + _PART], "more_body": True})


async def merged(
    streams: list[AsyncIterator[Increment]], check: Callable[[], None] = lambda: None
) -> AsyncIterator[tuple[int, Increment]]:
    """What comes of several streams, with each one's number. `check` is called before each begins, and may raise.

    What has come of one sample before anybody took it comes as one: a server that cannot keep up with single tokens
    sends fewer and longer pieces, and so keeps up.
    """
    come: dict[tuple[int, int], Increment] = {}  # by stream and sample, the first to come first
    state: dict[str, Any] = {"left": len(streams), "error": None}
    news = asyncio.Event()

    async def read(number: int, stream: AsyncIterator[Increment]) -> None:
        try:
            check()
            async with aclosing(stream) as items:
                async for item in items:
                    key = number, item.index
                    come[key] = joined(come[key], item) if key in come else item
                    news.set()
        except Exception as error:
            state["error"] = state["error"] or error
        state["left"] -= 1
        news.set()

    tasks = [asyncio.ensure_future(read(*each)) for each in enumerate(streams)]
    try:
        while state["left"] or come:
            await news.wait()
            news.clear()
            taken, come = come, {}
            for (number, _), item in taken.items():
                yield number, item
            if state["error"] is not None:
                raise state["error"]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def joined(one: Increment, next_one: Increment) -> Increment:
    """Two pieces of one sample as one."""
    both = one.top_logprobs is not None and next_one.top_logprobs is not None
    return Increment(
        request_id=one.request_id,
        index=one.index,
        token_ids=one.token_ids + next_one.token_ids,
        logprobs=one.logprobs + next_one.logprobs,
        raw_logprobs=one.raw_logprobs + next_one.raw_logprobs,
        text=one.text + next_one.text,
        completion=next_one.completion,
        top_logprobs=one.top_logprobs + next_one.top_logprobs if both else None,
        prompt_logprobs=one.prompt_logprobs,
        prompt_top_logprobs=one.prompt_top_logprobs,
    )
