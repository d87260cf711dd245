"""A replica as a process of its own, that ends with its front, whichever way that ends.

Both talk over a pair of sockets. The end of one process closes its socket, and the other one is told so by the kernel:
nobody has to ask. A front that was forked may leave its socket open in other processes, so a replica also looks who its
parent is, once a second.
"""

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from ..core import garbage
from . import limits, prestart
from . import messages as m
from .frames import Frames, write_frame

_LOOK = 1.0  # seconds between two looks at who the parent is


def how_ended(code: int) -> str:
    """A process, by what waiting for it gave."""
    if code >= 0:
        return f"ended with exit code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


# In the front


class ProcessChannel:
    """Starts a replica's process and talks to it.

    make, arguments   "module:function" that makes the engine there, and what it is given
    environment       variables beside this process's own
    """

    shares_memory = True

    def __init__(self, make: str, arguments: Mapping[str, Any], environment: Mapping[str, str]):
        self._socket, self._process = prestart.take(make, environment) or prestart.start(make, environment)
        self._frames = Frames(self._socket)
        self._outbox: deque[bytes] = deque()
        self._filled, self._closing = threading.Event(), False
        self._writer = threading.Thread(target=self._write, name="vexact-replicas-out", daemon=True)
        self._writer.start()
        self.send_raw(m.encode(dict(arguments)))

    @property
    def pid(self) -> int:
        return self._process.pid

    def fileno(self) -> int:
        return self._socket.fileno()

    def send(self, *messages: m.ToReplica) -> None:
        """Never waits. What is sent in order comes in order."""
        self.send_raw(m.encode(messages))

    def send_raw(self, frame: bytes) -> None:
        self._outbox.append(frame)
        self._filled.set()

    def read(self) -> list[bytes] | None:
        """Frames that have come; None once the process has ended."""
        return self._frames.read()

    def ended(self) -> str:
        """How the process has ended, now that its socket is closed. It is ended if it has not."""
        for _ in range(2):
            with contextlib.suppress(subprocess.TimeoutExpired):
                return how_ended(self._process.wait(limits.GONE))
            self._process.kill()
        return "was killed, and has not ended: a driver's call in it does not return"

    def kill(self) -> None:
        self._process.kill()

    def close(self) -> None:
        """Let go of the socket; the process ends by that, if it has not."""
        self._closing = True
        self._filled.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._writer.join()
        self._socket.close()

    def _write(self) -> None:
        while not self._closing:
            self._filled.wait()
            self._filled.clear()
            while self._outbox:
                try:
                    write_frame(self._socket, self._outbox.popleft())
                except OSError:  # whoever reads finds the end too
                    return


# In the replica


def main(descriptor: int, parent: int, make: str, ahead: str, *words: str) -> None:
    """The replica's process.

    make    makes the engine, of arguments that come later
    ahead   "module:function" that is called with `words` meanwhile; "": none. What fails there is met again

    Until the arguments are there nothing is collected: see garbage.left.
    """
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a service, to all its processes: the front's
        signal.signal(number, signal.SIG_IGN)
    ours = socket.socket(fileno=descriptor)
    frames, writing = Frames(ours), threading.Lock()

    def send(frame: bytes) -> None:
        with writing:
            write_frame(ours, frame)

    def end(code: int = 0) -> None:
        """At once: engine, model and memory go with the process."""
        with contextlib.suppress(Exception):
            sys.stdout.flush(), sys.stderr.flush()
        os._exit(code)

    def watch() -> None:
        """A front that dies while the engine is made, or that others have forks of."""
        while os.getppid() == parent:
            time.sleep(_LOOK)
        end(1)

    threading.Thread(target=watch, name="vexact-replica-parent", daemon=True).start()
    if ahead:
        with contextlib.suppress(Exception):
            _named(ahead)(*words)
    incoming: deque[bytes] = deque()
    while not incoming:
        found = frames.read()
        if found is None:
            end(1)
        incoming += found
    gc.freeze()
    gc.enable()
    arguments = m.decode_plain(incoming.popleft())
    made = threading.Event()

    def wait_for_the_end() -> None:
        """While the engine is made nobody reads: that the front is gone shows without."""
        poll = select.poll()
        poll.register(ours, select.POLLRDHUP)
        while not made.is_set():
            if poll.poll(_LOOK * 1000):
                end(1)

    threading.Thread(target=wait_for_the_end, name="vexact-replica-start", daemon=True).start()
    try:
        engine = _named(make)(**arguments)
        from .host import Host

        garbage.freeze()
        host = Host(engine, send, lambda: end(1))
    except BaseException as error:
        send(m.encode([m.Failed(m.failure(error))]))
        end(1)
    made.set()
    while True:
        while incoming:
            for message in m.for_replica(incoming.popleft()):
                if isinstance(message, m.Close):
                    host.stop()
                    end()
                host.handle(message)
        found = frames.read()
        if found is None:
            end(1)
        incoming += found


def _named(text: str) -> Any:
    module, name = text.split(":")
    return getattr(importlib.import_module(module), name)


def from_pretrained(
    path: str, device: str, dtype: str | None, config: Mapping[str, Any] | None, threads: int | None,
    tokenizer: str | bool | None = None, trust_remote_code: bool = False,
) -> Any:  # fmt: skip
    """What a replica makes: arguments as Engine.from_pretrained has them, in words."""
    import torch

    from ..config import EngineConfig
    from ..engine import Engine

    if threads is not None:
        torch.set_num_threads(threads)
    config = None if config is None else EngineConfig(**config)
    options = {"tokenizer": tokenizer, "trust_remote_code": trust_remote_code}
    return Engine.from_pretrained(path, device=device, dtype=dtype, config=config, **options)
