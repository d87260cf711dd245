"""A socket, signals, and an end that loses nobody's answer."""

import asyncio
import contextlib
import functools
import logging
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn

from ..engine import Engine
from .app import Service, make_app
from .connections import Connection, Connections, most_connections
from .settings import Settings

log = logging.getLogger("vexact_engine.serve")

_BACKLOG = 2048  # connections that nobody has accepted yet
_AT_ONCE = 16  # that are accepted before those too many are seen to end
_LAST_SECONDS = 5  # to send what aborted requests have


class Server:
    """One HTTP server. The socket listens from when it is made, before a model is loaded: a port that is taken is no
    surprise after minutes, and nobody else can have it meanwhile. Clients that come early wait.

    `run` serves in this thread until SIGTERM, SIGINT (where this is the main thread) or `stop`; `start` in a thread of
    its own. At the end requests under way may go on for drain_seconds while new ones get 503; what is left then is
    aborted, and answered with what there is. A second signal does not wait.

    raises   OSError where host and port cannot be had
    """

    def __init__(self, settings: Settings):
        self.settings = settings
        self.signal: int | None = None
        self._socket = _bind(settings.host, settings.port)
        host, port = self._socket.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        self._ready, self._thread = threading.Event(), None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._service: Service | None = None
        self._error: BaseException | None = None

    def run(self, engine: Engine, ready: Callable[[], None] = lambda: None) -> None:
        """`ready` is called once requests are taken. The engine stays open."""
        try:
            asyncio.run(self._main(engine, ready))
        finally:
            self._socket.close()

    def start(self, engine: Engine) -> "Server":
        def serve() -> None:
            try:
                self.run(engine, self._ready.set)
            except BaseException as error:
                self._error = error
            finally:
                self._ready.set()

        self._thread = threading.Thread(target=serve, name="vexact-serve", daemon=True)
        self._thread.start()
        self._ready.wait()
        if self._error is not None:
            raise self._error
        return self

    def stop(self, timeout: float | None = None) -> None:
        """From another thread: as SIGTERM does. Returns once it has ended, where `start` began it."""
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(self._stop)
        if self._thread is not None:
            self._thread.join(timeout)

    def hold(self) -> None:
        """From another thread, until `go_on`: new requests get 503, and those under way end with what there is."""
        self._held(True)

    def go_on(self) -> None:
        self._held(False)

    def _held(self, held: bool) -> None:
        def change() -> None:
            self._service.draining = held
            if held:
                self._service.stop_all()

        if self._service is not None and not self._stopping.is_set():
            with contextlib.suppress(RuntimeError):  # it has ended by itself
                self._loop.call_soon_threadsafe(change)

    @property
    def active(self) -> int:
        """Requests that are being answered."""
        return 0 if self._service is None else len(self._service.active)

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *exception) -> None:
        self.stop()
        self._socket.close()

    # In its event loop

    def _stop(self) -> None:
        (self._hurry if self._stopping.is_set() else self._stopping).set()

    async def _main(self, engine: Engine, ready: Callable[[], None]) -> None:
        self._stopping, self._hurry = asyncio.Event(), asyncio.Event()
        app = make_app(engine, self.settings)
        service = self._service = app.state.service
        connections = Connections(most_connections(self.settings.max_connections), self.settings.header_timeout)
        config = uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", ws="none", server_header=False, proxy_headers=False,
            timeout_graceful_shutdown=_LAST_SECONDS, backlog=_AT_ONCE,
            http=functools.partial(Connection, connections),  # type: ignore[arg-type]
        )  # fmt: skip
        server = _Uvicorn(config)
        loop = self._loop = asyncio.get_running_loop()
        loop.set_exception_handler(connections.on_error)
        with self._signals(loop), _filtered("uvicorn.error", connections):
            serving = asyncio.ensure_future(server.serve(sockets=[self._socket]))
            while not (server.started or serving.done()):
                await asyncio.sleep(0.01)
            if not serving.done():
                self._socket.listen(_BACKLOG)  # which is asyncio's number of both
                ready()
            stopping = asyncio.ensure_future(self._stopping.wait())
            await asyncio.wait({serving, stopping}, return_when=asyncio.FIRST_COMPLETED)
            service.draining = True
            log.info("ending: %d requests under way", len(service.active))
            await self._drain(service)
            server.should_exit = True
            await serving
            stopping.cancel()
        service.close()

    async def _drain(self, service) -> None:
        deadline = asyncio.get_running_loop().time() + self.settings.drain_seconds
        while service.active and not self._hurry.is_set() and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)
        if service.active:
            log.warning("ending: %d requests are aborted", len(service.active))
            service.stop_all()
        deadline = asyncio.get_running_loop().time() + _LAST_SECONDS
        while service.active and asyncio.get_running_loop().time() < deadline:
            await asyncio.sleep(0.02)

    @contextlib.contextmanager
    def _signals(self, loop: asyncio.AbstractEventLoop) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def caught(number: int, frame) -> None:
            self.signal = number
            loop.call_soon_threadsafe(self._stop)

        before = {number: signal.signal(number, caught) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextlib.contextmanager
def _filtered(name: str, by: Connections) -> Iterator[None]:
    logger = logging.getLogger(name)
    logger.addFilter(by)
    try:
        yield
    finally:
        logger.removeFilter(by)


class _Uvicorn(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:  # they are the Server's
        yield


def _bind(host: str, port: int) -> socket.socket:
    try:
        (family, kind, protocol, _, address), *_ = socket.getaddrinfo(
            host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
        # asyncio sends at once (TCP_NODELAY) where a socket says that it is TCP's: else an answer's second part, or a
        # stream's next token, waits up to 40 ms for the client's word on the first.
        found = socket.socket(family, kind, protocol)
        try:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(_BACKLOG)  # bound alone, another socket could be too
        except BaseException:
            found.close()
            raise
    except OSError as error:
        raise OSError(f"--host {host} --port {port}: cannot listen there: {error.strerror or error}") from None
    return found
