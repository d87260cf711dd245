"""A replica as a Ray actor: the same messages, carried by Ray's calls instead of a socket."""

import contextlib
import functools
import importlib
import logging
import queue
import socket
import threading
from collections import deque
from collections.abc import Mapping
from typing import Any

from ..core import garbage
from . import messages as m

log = logging.getLogger(__name__)


@functools.cache
def _actor_class():
    """Made where Ray is wanted; messages in and out have a thread each, so that they keep their order."""
    import ray

    class Actor:
        def __init__(self, make: str, arguments: dict[str, Any]):
            self._out: queue.Queue[bytes | None] = queue.Queue()
            self._host = None
            try:
                from .host import Host

                module, name = make.split(":")
                engine = getattr(importlib.import_module(module), name)(**arguments)
                garbage.freeze()
                self._host = Host(engine, self._out.put, lambda: self._out.put(None))
            except Exception as error:
                self._out.put(m.encode([m.Failed(m.failure(error))]))
                self._out.put(None)

        @ray.method(concurrency_group="into")
        def send(self, frame: bytes) -> None:
            for message in m.for_replica(frame):
                if isinstance(message, m.Close):
                    self._host.stop()
                    self._out.put(None)
                else:
                    self._host.handle(message)

        @ray.method(concurrency_group="out")
        def receive(self) -> list[bytes | None]:
            """What there is to say, once there is something; None is the end."""
            found = [self._out.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    found.append(self._out.get_nowait())
            return found

    return ray.remote(concurrency_groups={"into": 1, "out": 1}, max_restarts=0)(Actor)


class RayChannel:
    """Starts a replica's actor and talks to it.

    options   Ray's, for the actor: num_cpus, num_gpus, resources, runtime_env, ...
    """

    shares_memory = False  # it may be on another machine
    pid = 0  # its engine says which

    def __init__(self, make: str, arguments: Mapping[str, Any], options: Mapping[str, Any]):
        self._actor = _actor_class().options(**options).remote(make, dict(arguments))
        self._ours, self._bell = socket.socketpair()
        self._frames: deque[bytes] = deque()
        self._reason = "ended"
        self._reader = threading.Thread(target=self._receive, name="vexact-replicas-ray", daemon=True)
        self._reader.start()

    def fileno(self) -> int:
        return self._ours.fileno()

    def send(self, *messages: m.ToReplica) -> None:
        self._actor.send.remote(m.encode(messages))

    def read(self) -> list[bytes] | None:
        rung = self._ours.recv(4096)
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._frames.popleft())
        return found if rung or found else None

    def ended(self) -> str:
        self._reader.join()
        return self._reason

    def kill(self) -> None:
        import ray

        with contextlib.suppress(Exception):  # it is gone, or Ray itself is
            ray.kill(self._actor)

    def close(self) -> None:
        self.kill()
        self._reader.join(10)
        self._ours.close()

    def _receive(self) -> None:
        import ray

        try:
            while True:
                found = ray.get(self._actor.receive.remote())
                self._frames += [frame for frame in found if frame is not None]
                if None in found:
                    break
                self._bell.send(b"n")
        except Exception as error:
            self._reason = f"died: {type(error).__name__}: {' '.join(str(error).split())}"
        finally:
            self._bell.close()
