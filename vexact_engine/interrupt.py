"""Ctrl-C comes between two states of the engine, never in the middle of a change."""

import signal
import threading
from types import FrameType


class HeldInterrupts:
    """A with block in which SIGINT waits: its handler runs when the block is left, or at once inside `open()`.

    Only where Python delivers signals at all (the main thread) and where SIGINT has a Python handler; anywhere else
    nothing is changed.
    """

    def __init__(self):
        self._old = None
        self._open = False
        self._pending: tuple[int, FrameType | None] | None = None

    def __enter__(self) -> "HeldInterrupts":
        if threading.current_thread() is threading.main_thread() and callable(signal.getsignal(signal.SIGINT)):
            self._old = signal.signal(signal.SIGINT, self._arrived)
        return self

    def __exit__(self, *exception) -> None:
        self._open = False
        if self._old is not None:
            signal.signal(signal.SIGINT, self._old)
            self._deliver()

    def open(self) -> None:
        """From here on the state is whole: let it come, now if it has come before."""
        self._open = True
        if self._pending:
            self._open = False
            self._deliver()

    def shut(self) -> None:
        self._open = False

    def _arrived(self, number: int, frame: FrameType | None) -> None:
        self._pending = number, frame
        if self._open:
            self._open = False  # whoever catches it puts the state in order first
            self._deliver()

    def _deliver(self) -> None:
        if self._pending is not None:
            arguments, self._pending = self._pending, None
            self._old(*arguments)
