"""Processes of replicas, which may begin before it is known what engines they will make: modules take seconds to
import, in the front as in a replica, and so they do it side by side. This file imports none that takes long.
"""

import contextlib
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

log = logging.getLogger(__name__)


class _Waiting(NamedTuple):
    """A process that nobody has taken, and what it began with."""

    make: str
    environment: dict[str, str]
    path: list[str]
    started: tuple[socket.socket, subprocess.Popen]


_waiting: list[_Waiting] = []


def start(
    make: str, environment: Mapping[str, str], ahead: str = "", *words: str
) -> tuple[socket.socket, subprocess.Popen]:
    """A replica's process and this end of the socket that it listens to: see process.main."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with theirs:
        given = theirs.fileno(), os.getpid(), make, ahead, *words
        code = (  # what a terminal sends to all its processes is the front's, while it imports too
            "import gc, signal, sys; gc.disable(); signal.signal(signal.SIGINT, signal.SIG_IGN); "
            f"sys.path[:] = {sys.path!r}; from vexact_engine.parallel.process import main; "
            f"main({', '.join(map(repr, given))})"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
    return ours, process


@contextlib.contextmanager
def prestarted(make: str, count: int, ahead: str = "", *words: str) -> Iterator[None]:
    """In a with block, so many processes are there for whoever makes replicas by `make`. Those that nobody has taken
    end with it.

    ahead   "module:function" that each calls with `words` until it is taken
    """
    mine = []
    try:
        for _ in range(count):
            mine.append(_Waiting(make, dict(os.environ), [*sys.path], start(make, {}, ahead, *words)))
            _waiting.append(mine[-1])
        yield
    finally:
        for one in mine:
            if one in _waiting:
                _waiting.remove(one)
                _end(one)


def take(make: str, environment: Mapping[str, str]) -> tuple[socket.socket, subprocess.Popen] | None:
    """One that waits, and is what would be started now; of variables, what modules have set here they set there too."""
    now = {**os.environ, **environment}
    for one in [*_waiting]:
        changed = [name for name, value in one.environment.items() if now.get(name) != value]
        if one.make == make and one.path == sys.path and not changed and not environment:
            _waiting.remove(one)
            return one.started
        log.info("process %d began otherwise than %s is to: %s", one.started[1].pid, make, changed or "path, make")
    return None


def _end(one: _Waiting) -> None:
    ours, process = one.started
    ours.close()
    process.kill()
    process.wait()
