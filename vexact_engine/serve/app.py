"""The routes, and what every request passes on its way: an id, the key, the limits, the log."""

import asyncio
import functools
import hashlib
import hmac
import json
import logging
import re
import secrets
import threading
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from ..engine import Engine
from ..weights.processors import Processors
from .answers import as_json
from .attend import Gone, Late, attended
from .classify import Classifying
from .errors import APIError, as_api_error
from .generation import Generation
from .metrics import Metrics
from .prompts import Prompts
from .protocol import ChatRequest, ClassifyRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest, parse
from .settings import Settings, is_loopback
from .tokens import Tokens

if TYPE_CHECKING:
    from ..parallel.replicas import Replicas

log = logging.getLogger("vexact_engine.serve")

_OPEN = {"/health"}  # without a key
_METRICS_SECONDS = 10.0
_BODIES = 32  # of the longest that are taken: what the bodies of all requests may have together


class Service:
    """What all requests share.

    active    those that are being answered
    draining  set before the end: no more are taken
    room      tokens that prompt and answer may have together
    body_bytes  of the requests that are being answered
    """

    def __init__(self, engine: "Engine | Replicas", settings: Settings):
        self.engine, self.settings = engine, settings
        self.metrics = Metrics(engine)
        self.active: set[Generation] = set()
        self.draining = False
        self.body_bytes = 0
        config = engine.config
        capacity = config.num_pages * config.page_size + 1  # the last token is never an input
        self.room = min(config.max_model_len or capacity, capacity)
        most = min(self.room - 1, self.settings.max_prompt_tokens or self.room)
        processors = Processors(engine.image_processor, engine.video_processor)
        images = engine.images, processors, self.settings.allow_image_hosts, self.settings.max_images
        self.prompts = Prompts(engine.tokenizer, engine.vocab_size, most, self.settings.max_samples, *images)
        own = engine.name.rstrip("/\\")
        self.models = settings.model_names or tuple(dict.fromkeys((re.split(r"[/\\]", own)[-1], own)))
        self.fingerprint = (
            "fp_" + hashlib.sha256(json.dumps(engine.numerics(), sort_keys=True).encode()).hexdigest()[:16]
        )
        self.started = int(time.time())
        self._keys = [key.encode() for key in settings.api_keys]

    # Who may come in

    def enter(self, generation: Generation) -> None:
        if self.draining:
            raise APIError(503, "the server is about to end", code="shutting_down", retry=5)
        if self.engine.closed:
            raise APIError(503, "the engine is closed", code="engine_closed")
        if len(self.active) >= self.settings.max_requests:
            message = f"{len(self.active)} requests are being answered, and no more are taken"
            raise APIError(429, message, code="too_many_requests", retry=1)
        self.active.add(generation)
        self.metrics.in_progress.set(len(self.active))

    def leave(self, generation: Generation) -> None:
        self.active.discard(generation)
        self.metrics.in_progress.set(len(self.active))

    def stop_all(self) -> None:
        for generation in list(self.active):
            generation.stop()

    def check_model(self, name: str | None) -> str:
        if name is None or name in self.models:
            return name or self.models[0]
        served = ", ".join(self.models)
        raise APIError(404, f"model: got {name!r}, expected {served}", param="model", code="model_not_found")

    def check_key(self, given: str) -> None:
        if not self._keys:
            return
        scheme, _, key = given.partition(" ")
        # All are compared, each in a time that does not depend on where they differ.
        equal = [hmac.compare_digest(key.strip().encode("utf-8", "replace"), own) for own in self._keys]
        if scheme.lower() != "bearer" or not any(equal):
            what = "is none of this server's" if given else "is missing: expected Authorization: Bearer KEY"
            raise APIError(401, f"the API key {what}", code="invalid_api_key")

    def check_control(self) -> None:
        if not self._keys:
            raise APIError(403, "this controls the engine: start the server with an API key", code="no_api_key")

    async def body(self, request: Request) -> bytes:
        """All of it, or 415, 413, 408, 503."""
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # what a page in a browser may send anywhere unasked is anything else
            raise APIError(415, f"content-type: got {kind or 'none'!r}, expected application/json")
        most = self.settings.max_body_bytes
        too_long = APIError(413, f"the body is too long: expected at most {most} bytes", code="body_too_long")
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared) > most:
            raise too_long

        state = request.scope["state"]

        async def read() -> bytes:
            found = bytearray()
            async for chunk in request.stream():
                found += chunk
                if len(found) > most:
                    raise too_long
                state["body_bytes"] = len(found)
                self.body_bytes += len(chunk)
                if self.body_bytes > _BODIES * most:
                    message = "the bodies of all requests are too long together"
                    raise APIError(503, message, code="too_many_bytes", retry=1)
            return bytes(found)

        try:
            return await asyncio.wait_for(read(), self.settings.body_timeout)
        except asyncio.TimeoutError:
            raise APIError(408, "the body did not come in time", code="body_timeout") from None

    async def in_time(self, request: Request, work: Awaitable[Any]) -> Any:
        """What it returns; 504 where it takes longer than a request may."""
        try:
            return await attended(request.receive, work, self.settings.request_timeout)
        except Late:
            message = f"it was not done after {self.settings.request_timeout:g} s"
            raise APIError(504, message, code="request_timeout") from None
        except Gone:
            raise ClientDisconnect from None

    def close(self) -> None:
        self.prompts.close()


def make_app(engine: "Engine | Replicas", settings: Settings | None = None) -> FastAPI:
    """An ASGI application in front of an engine or Replicas, which stay their owner's: they are not closed here.

    `app.state.service` is what it has in common for all requests.
    """
    service = Service(engine, settings or Settings())
    app = FastAPI(title="vexact serve", docs_url=None, redoc_url=None)
    app.state.service = service
    app.router.redirect_slashes = False

    @app.post("/v1/completions", response_class=Response, openapi_extra=_schema(CompletionRequest))
    async def completions(request: Request) -> Response:
        return Generation(service, request, chat=False)

    @app.post("/v1/chat/completions", response_class=Response, openapi_extra=_schema(ChatRequest))
    async def chat(request: Request) -> Response:
        return Generation(service, request, chat=True)

    @app.post("/classify", response_class=Response, openapi_extra=_schema(ClassifyRequest))
    async def classify(request: Request) -> Response:
        return Classifying(service, request)

    def model(name: str) -> dict:
        return {
            "id": name, "object": "model", "created": service.started, "owned_by": "vexact",
            "max_model_len": service.room, "weight_version": engine.weight_version,
        }  # fmt: skip

    @app.get("/v1/models", response_class=Response)
    async def models() -> Response:
        return _answer({"object": "list", "data": [model(name) for name in service.models]})

    @app.get("/v1/models/{name:path}", response_class=Response)
    async def one_model(name: str) -> Response:
        return _answer(model(service.check_model(name)))

    @app.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while requests are taken; what the engine does is in the body."""
        state = "closed" if engine.closed else "draining" if service.draining else engine.state
        return _answer({"status": state}, 503 if state in ("closed", "draining") else 200)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        try:  # replicas are asked for theirs
            text = await asyncio.wait_for(_aside(service.metrics.text), _METRICS_SECONDS)
        except asyncio.TimeoutError:
            raise APIError(504, "the engine does not say what it has done", code="request_timeout") from None
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/numerics", response_class=Response)
    async def numerics() -> Response:
        """What fixes the bits; `system_fingerprint` in answers is its digest."""
        return _answer({"system_fingerprint": service.fingerprint, "numerics": engine.numerics()})

    _add_tokens(app, service)
    _add_control(app, service)
    app.add_exception_handler(APIError, _on_error)
    app.add_exception_handler(HTTPException, _on_error)
    if service.settings.allow_origins:
        from starlette.middleware.cors import CORSMiddleware

        headers = ["authorization", "content-type", "x-request-id"]
        app.add_middleware(
            CORSMiddleware, allow_origins=list(service.settings.allow_origins), allow_methods=["GET", "POST"],
            allow_headers=headers, expose_headers=["x-request-id"],
        )  # fmt: skip
    app.add_middleware(_Passage, service=service)
    return app


def _add_tokens(app: FastAPI, service: Service) -> None:
    """What the tokenizer does, as vLLM's servers have it."""
    prompts = service.prompts

    @app.post("/tokenize", response_class=Response, openapi_extra=_schema(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        asked = parse(TokenizeRequest, await service.body(request))
        service.check_model(asked.model)
        ids, names = await service.in_time(request, prompts.of_tokenize(asked))
        return _answer({"count": len(ids), "max_model_len": service.room, "tokens": ids, "token_strs": names})

    @app.post("/detokenize", response_class=Response, openapi_extra=_schema(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        asked = parse(DetokenizeRequest, await service.body(request))
        service.check_model(asked.model)
        if (asked.tokens is None) == (asked.prompt is None):
            raise APIError(400, "tokens: expected either tokens or prompt", param="tokens")
        given = asked.prompt if asked.tokens is None else asked.tokens
        if isinstance(given, list) and given:
            given = prompts.check_ids(given, "tokens")
        text = await service.in_time(request, prompts.do(len(given), Tokens.round_trip, given))
        return _answer({"prompt": text})


def _add_control(app: FastAPI, service: Service) -> None:
    """What a trainer does with the engine between two batches. All of it wants the key, and answers {"state": ...}."""
    engine = service.engine

    async def options(request: Request, **known: tuple) -> dict[str, Any]:
        """The fields of a body that may be empty. name=(default, what it may be an instance of)."""
        service.check_control()
        raw = await service.body(request)
        try:
            given = json.loads(raw) if raw.strip() else {}
        except (ValueError, RecursionError) as error:
            raise APIError(400, f"the body is not JSON: {error}", code="invalid_json") from None
        if not isinstance(given, dict):
            raise APIError(400, "the body is no object", code="invalid_json")
        for name in given:
            if name not in known:
                raise APIError(400, f"{name}: there is no such field here", param=name, code="unknown_parameter")
        found = {}
        for name, (default, kind) in known.items():
            value = given.get(name, default)
            if value is not default and not isinstance(value, kind):
                message = f"{name}: got a {type(value).__name__}, expected a {kind.__name__}"
                raise APIError(400, message, param=name, code="invalid_value")
            found[name] = value
        return found

    async def do(request: Request, function: Callable, *given, **named) -> Any:
        """What takes longer than a request may goes on, and its client is told so."""
        try:
            return await service.in_time(request, _aside(functools.partial(function, *given, **named)))
        except (ValueError, TypeError) as error:
            raise APIError(400, str(error), code="invalid_value") from None
        except MemoryError as error:
            raise APIError(503, str(error), code="out_of_memory", retry=5) from None

    def state(**more) -> Response:
        return _answer({"state": engine.state, "weight_version": engine.weight_version, **more})

    @app.post("/pause", response_class=Response)
    async def pause(request: Request) -> Response:
        """{"mode": "wait" | "abort" | "keep"}: see Engine.pause."""
        await do(request, engine.pause, (await options(request, mode=("wait", str)))["mode"])
        return state()

    @app.post("/resume", response_class=Response)
    async def resume(request: Request) -> Response:
        await options(request)
        await do(request, engine.resume)
        return state()

    @app.post("/abort", response_class=Response)
    async def abort(request: Request) -> Response:
        """{"request_id": an answer's id, its X-Request-Id or its body's request_id} or {"all": true}. What they have is
        their answer."""
        given = await options(request, request_id=(None, str), all=(False, bool))
        if (given["request_id"] is None) == (not given["all"]):
            raise APIError(400, "expected either request_id or all", param="request_id")
        chosen = [g for g in service.active if given["all"] or given["request_id"] in g.own_names]
        for generation in chosen:
            generation.stop()
        return state(aborted=len(chosen))

    @app.post("/reset_prefix_cache", response_class=Response)
    async def reset(request: Request) -> Response:
        await options(request)
        await do(request, engine.reset_prefix_cache)
        return state()

    @app.post("/sleep", response_class=Response)
    async def sleep(request: Request) -> Response:
        """{"level": 1 | 2, "tags": ["weights", "kv_cache", "graphs"], "mode": ...}: see Engine.sleep."""
        given = await options(request, level=(1, int), tags=(None, list), mode=("keep", str))
        return state(bytes=await do(request, engine.sleep, **given), backend=engine.sleep_backend)

    @app.post("/wake_up", response_class=Response)
    async def wake_up(request: Request) -> Response:
        given = await options(request, tags=(None, list))
        return state(bytes=await do(request, engine.wake_up, given["tags"]))


async def _aside(function: Callable[[], Any]) -> Any:
    """In a thread of its own: a pool would soon be full of those who wait for requests to finish, and whom they wait
    for, a /resume, would have none."""
    done: Future = Future()
    done.set_running_or_notify_cancel()

    def run() -> None:
        try:
            done.set_result(function())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="vexact-serve-control", daemon=True).start()
    return await asyncio.wrap_future(done)


class _Passage:
    """The outermost: every answer has an id and a line in the log, and nobody without a key gets any further."""

    def __init__(self, app, service: Service):
        self.app, self.service = app, service

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name: value for name, value in scope["headers"]}
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        name = given if re.fullmatch(r"[\w.:-]{1,128}", given, re.ASCII) else f"req-{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = name
        begin, status = time.monotonic(), 0

        async def send_with_id(message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", name.encode())]
            await send(message)

        try:
            try:
                self._check(scope, headers)
                await self.app(scope, receive, send_with_id)
            except ClientDisconnect:
                pass
            except Exception as error:
                if status:
                    raise
                await _error(error, name)(scope, receive, send_with_id)
        finally:
            self.service.body_bytes -= scope["state"].get("body_bytes", 0)
            seconds = time.monotonic() - begin
            log.info('%s "%s %s" %s, %.3f s', name, scope["method"], _printable(scope["path"]), status or "-", seconds)

    def _check(self, scope, headers: dict[bytes, bytes]) -> None:
        settings = self.service.settings
        if not settings.api_keys and is_loopback(settings.host):
            # A page that a browser shows may have a name that leads here: only names that mean this machine are it.
            host = headers.get(b"host", b"").decode("latin-1")
            host = re.sub(r":\d+$", "", host)
            if host and not (is_loopback(host) or host == settings.host):
                raise APIError(421, f"host: got {_printable(host)!r}, expected this machine's own name")
        preflight = scope["method"] == "OPTIONS" and settings.allow_origins
        if scope["path"] not in _OPEN and not preflight:
            self.service.check_key(headers.get(b"authorization", b"").decode("latin-1"))


async def _on_error(request: Request, error: Exception) -> Response:
    return _error(error, request.scope["state"]["request_id"])


def _error(error: Exception, name: str) -> Response:
    if isinstance(error, HTTPException):  # no such path or method
        error = APIError(error.status_code, f"{error.detail}".lower(), code="not_found")
    failure = as_api_error(error, name)
    return Response(as_json(failure.body()), failure.status, failure.headers, "application/json")


def _answer(value: dict, status: int = 200) -> Response:
    return Response(as_json(value), status, media_type="application/json")


def _schema(kind: type[BaseModel]) -> dict:
    """For /openapi.json, where a schema's own definitions have no place."""
    schema = kind.model_json_schema()
    text = json.dumps({name: value for name, value in schema.items() if name != "$defs"})
    for name, value in schema.get("$defs", {}).items():
        text = text.replace(json.dumps({"$ref": f"#/$defs/{name}"}), json.dumps(value))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": json.loads(text)}}}}


def _printable(text: str) -> str:
    return "".join(c if c.isprintable() and c != '"' else "?" for c in text)[:200]
