"""A stage's process, or that of one of its ranks, as its engine sees it: of this machine, or of another."""

import contextlib
import select
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from . import limits
from . import messages as m
from .frames import Frames, framed
from .line import Line
from .nodes import CODE, RemoteProcess, variables

if TYPE_CHECKING:
    from .wire import Door, Purpose

LOOK = 0.02  # seconds between two looks at what else there is to do


class Member:
    """
    ready    what it has said of itself, once it is made
    answers  that have come and were not taken yet, by their keys
    near     whether it sees the memory of the engine's process
    line     by which it and the engine's process ask each other things; None: it has none
    """

    def __init__(
        self, name: str, process: subprocess.Popen | RemoteProcess, meanwhile: Callable[[], None], near: bool = True
    ):
        self.name, self.process, self.near, self._meanwhile = name, process, near, meanwhile
        self.ready: dict[str, Any] | None = None
        self.answers: dict[int, m.Answer] = {}
        self.failed = ""
        self.socket: socket.socket | None = None
        self.line: Line | None = None

    @classmethod
    def here(cls, name: str, added: Mapping[str, str], meanwhile: Callable[[], None]) -> "Member":
        """On this machine. Its socket's other end has that process alone: when one of both ends, the kernel tells the
        other."""
        ours, theirs = socket.socketpair()
        environment = variables() | added
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all of them are on this machine
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", CODE, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a terminal's Ctrl-C is for the engine's process, which then ends this one
            )
        found = cls(name, process, meanwhile)
        found.reach(ours)
        return found

    def reach(self, ours: socket.socket) -> None:
        """From here on it is told things, by that socket."""
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(limits.MESSAGE), 0))
        self.socket, self.frames = ours, Frames(ours)

    def arrive(self, door: "Door", rank: int, end: float, is_first: bool = False) -> None:
        """Until it has come in. RuntimeError where it ends instead, TimeoutError where it is late."""
        self.reach(self._come(door, rank, "told", end))
        if is_first:
            self.line = Line(self._come(door, rank, "weights", end))

    def _come(self, door: "Door", rank: int, what: "Purpose", end: float) -> socket.socket:
        while (ours := door.take(rank, what)) is None:
            if self.process.poll() is not None:
                raise RuntimeError(f"{self.name} has ended before it was there ({self.how()})")
            if time.monotonic() > end:
                raise TimeoutError(f"{self.name} has not come to {door.address[0]}, port {door.address[1]}, in time")
            self._meanwhile()
            time.sleep(LOOK)
        return ours

    def send(self, frame: bytes) -> None:
        """TimeoutError where it does not take it: it stands still."""
        left, end = memoryview(framed(frame)), time.monotonic() + limits.MESSAGE
        space = select.poll()
        space.register(self.socket, select.POLLOUT)
        while left:
            try:
                left = left[self.socket.send(left, socket.MSG_DONTWAIT) :]
            except BlockingIOError:
                if time.monotonic() > end:
                    raise TimeoutError(f"{self.name} takes no message") from None
                self._meanwhile()
                space.poll(1000 * LOOK)

    def how(self) -> str:
        """It has ended."""
        self.ended(limits.WHY)
        code = self.process.returncode
        if code is None:
            return "it still runs" if self.near else "nothing comes from its node any more"
        if isinstance(self.process, RemoteProcess) and self.process.gone:
            return self.process.gone
        return f"signal {-code}" if code < 0 else f"exit code {code}"

    def interrupt(self) -> None:
        """From any thread: nothing comes of it any more, and whoever waits for that is told by the kernel."""
        self.process.kill()
        if self.socket is not None:
            with contextlib.suppress(OSError):
                self.socket.shutdown(socket.SHUT_RDWR)
        if self.line is not None:
            self.line.close()

    def ended(self, seconds: float) -> bool:
        """Whether it is gone, after so many seconds at most."""
        end = time.monotonic() + seconds
        while self.process.poll() is None:
            if time.monotonic() > end:
                return False
            self._meanwhile()
            time.sleep(LOOK / 4)
        return True

    def end(self, seconds: float) -> None:
        """It is gone once this returns, after so many seconds at most if it does not go by itself."""
        if not self.ended(seconds):
            self.interrupt()
            self.ended(limits.END)  # else it is in the midst of a call of its device's driver
        if self.socket is not None:
            self.socket.close()
        if self.line is not None:
            self.line.close()
