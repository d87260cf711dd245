"""Connections: how many there are, and how long one may take to say what it wants."""

import asyncio
import errno
import logging
import resource
import time

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

log = logging.getLogger("vexact_engine.serve")

_MOST = 1 << 16
_OURS = 256  # descriptors for a model's files, processes, log files, and connections that just end
_AGAIN = 60.0  # seconds between two lines about the same trouble
_FULL = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def most_connections(wanted: int | None) -> int:
    """The most connections that may be open: those wanted, or those that the limit of open files leaves."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if wanted is not None or files == resource.RLIM_INFINITY:
        return _MOST if wanted is None else wanted
    return min(_MOST, max(files // 2, files - _OURS))


class Trouble:
    """A line in the log, and for a while no more than a count of what is like it."""

    def __init__(self, text: str):
        self._text, self._next, self._left_out = text, 0.0, 0

    def note(self) -> None:
        now = time.monotonic()
        if now < self._next:
            self._left_out += 1
            return
        more = f" ({self._left_out} more since the last time)" if self._left_out else ""
        log.warning("%s%s", self._text, more)
        self._next, self._left_out = now + _AGAIN, 0


class Connections:
    """Of one server. Those that have said nothing whole yet, or nothing more, are silent: where there are too many the
    one that has been so for longest ends, and where none is silent the new one does.

    most             at once
    header_timeout   seconds that a request's header may take
    """

    def __init__(self, most: int, header_timeout: float):
        self.most, self.header_timeout = most, header_timeout
        self.all: set[Connection] = set()
        self.silent: dict[Connection, None] = {}  # for longest first
        self._many = Trouble(
            f"there are {most} connections: the one that has been silent for longest ends for each more"
        )
        self._strangers: dict[str, Trouble] = {}  # by uvicorn's own words, of which there are a few
        self._none = Trouble("there are no files left to open for connections: clients wait")

    def add(self, connection: "Connection") -> bool:
        """False: there is no place for it."""
        if len(self.all) >= self.most:
            self._many.note()
            oldest = next(iter(self.silent), None)
            if oldest is None:
                return False
            oldest.end()
        self.all.add(connection)
        return True

    def remove(self, connection: "Connection") -> None:
        self.all.discard(connection)
        self.silent.pop(connection, None)

    def filter(self, record: logging.LogRecord) -> bool:
        """For uvicorn's log, as a logging.Filter: what strangers bring about has a line once in a while."""
        if record.levelno != logging.WARNING:
            return True
        self._strangers.setdefault(str(record.msg), Trouble(str(record.msg))).note()
        return False

    def on_error(self, loop: asyncio.AbstractEventLoop, context: dict) -> None:
        """The event loop's: one line where it has no file for a connection, of which it would say thousands."""
        error = context.get("exception")
        if isinstance(error, OSError) and error.errno in _FULL:
            self._none.note()
        else:
            loop.default_exception_handler(context)


class Connection(H11Protocol):
    """One of them: uvicorn's, with a limit for a whole header."""

    def __init__(self, connections: Connections, *given, **named):
        super().__init__(*given, **named)
        self._among = connections
        self._timer: asyncio.TimerHandle | None = None
        self._refused = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self._among.add(self):
            self._look()
        else:
            self._refused = True
            self._say(503, "too many connections")

    def connection_lost(self, exc: Exception | None) -> None:
        self._heard()
        self._among.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._look()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._look()

    def end(self) -> None:
        self._among.remove(self)
        self._say(408, "no request came")

    def _look(self) -> None:
        """A time that has begun goes on whatever comes, until it is a whole header."""
        if self.cycle is not None and not self.cycle.response_complete:
            self._heard()
        elif self._timer is None and not self.transport.is_closing():
            self._among.silent[self] = None
            self._timer = self.loop.call_later(self._among.header_timeout, self.end)

    def _heard(self) -> None:
        self._among.silent.pop(self, None)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _say(self, status: int, text: str) -> None:
        """Its last word, where one can be said: in the midst of nothing else."""
        self._heard()
        if self.transport.is_closing():
            return
        if self.cycle is None and self.conn.our_state is h11.IDLE:  # a kept one just ends, as always
            body = f'{{"error":{{"message":"{text}","type":"server_error","param":null,"code":null}}}}'.encode()
            head = f"HTTP/1.1 {status} {text}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(head.encode() + b"connection: close\r\n\r\n" + body)
        self.transport.close()
