"""The engine's end of a hand-over of weights from a trainer in another process of this host."""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

import torch

from ..errors import HandoverFailed, PeerLost, UpdateIncomplete
from . import messages as m
from . import protocol
from .intake import MODES, check_mode
from .session import Reading, SetEnded, difference

log = logging.getLogger(__name__)

__all__ = ["MODES", "WeightReceiver"]

_AT_ONCE = 1000  # messages that are heard before anything else is done


class Intake(Protocol):
    """Where a set goes; see intake.py and parallel/intake.py.

    broken   why nothing can go there, whatever still comes; "" otherwise
    """

    @property
    def device(self) -> str: ...
    @property
    def gpu(self) -> str: ...
    @property
    def broken(self) -> str: ...
    def manifest(self) -> dict[str, tuple[tuple[int, ...], str]]: ...
    def begin(self, numerics: Mapping[str, object], version: int | None = None) -> None: ...
    def open(self, offer: m.Offer) -> None: ...
    def take(self, bucket: m.Bucket) -> Reading: ...
    def check(self) -> None: ...
    def finish(self) -> int: ...
    def abandon(self, why: BaseException) -> bool: ...
    def let_go(self) -> None: ...


class Target(Protocol):
    """What of an Engine, or of Replicas, is needed."""

    @property
    def weight_version(self) -> int: ...
    def numerics(self) -> dict: ...
    def intake(self, mode: str, staging: torch.device | str | None) -> Intake: ...


class _NotBegun(Exception):
    """A sender has given up before it heard that it may begin."""


class WeightReceiver:
    """Takes weights for an engine, set by set. One thread at a time calls it. A context manager.

    address   where a WeightSender finds it: a new one by default, in a folder of this user's alone. Of a file
              (ipc://PATH): FileExistsError where that is no socket, OSError where another receiver listens at it
    mode      "in_place": tensors are written as they come, and nothing is computed from the first to the last. After a
              failure in between the engine has no weights: requests end with WeightsTorn until a whole set has come.
              "staged": the set waits in a second copy, and is put in place between two steps once it is whole; whatever
              fails leaves the old weights running
    staging   where that copy lies: the engine's device, or "cpu" (pinned where the engine computes on a GPU). It is
              taken now and kept. On a CPU it is put in place by exchange: parameters have its memory then, and it has
              theirs for the next set; a view of a parameter that somebody took before sees the old values
    timeout   seconds that any one message of a hand-over may take; a sender that has died is noticed at once
    """

    def __init__(
        self,
        engine: Target,
        address: str | None = None,
        *,
        mode: str = "in_place",
        staging: torch.device | str | None = None,
        timeout: float = 60.0,
    ) -> None:
        check_mode(mode, staging)
        if not timeout > 0:
            raise ValueError(f"WeightReceiver: timeout: got {timeout!r}, expected seconds above 0")
        self.engine, self.mode, self.timeout = engine, mode, timeout
        self._me = m.Peer.self("the engine")
        self._listener = protocol.Listener(address)
        self.address, self._socket = self._listener.address, self._listener.socket
        try:
            self._intake = engine.intake(mode, staging)
        except BaseException:
            self._listener.close()
            raise
        self._poller = protocol.zmq.Poller()
        self._poller.register(self._socket, protocol.zmq.POLLIN)
        self._owner: m.Peer | None = None  # whose memory it is that is open here
        self._leaving: list[tuple[bytes, m.Peer]] = []  # who has said that it ends
        self._owner_at = b""  # the socket that it was last heard at
        self._taken: deque[tuple[int, Reading]] = deque()  # buckets that are being read
        self._waiting: dict[bytes, m.Hello] = {}  # who has something to send, by socket
        self._early: deque[tuple[bytes, m.Message]] = deque(maxlen=_AT_ONCE)  # what they said before they were asked
        self._skipped, self._dropped = "", 0  # why the last of them broke off; what was no message
        self._using, self._ending = threading.Lock(), threading.Lock()
        self._closed = False

    def receive(self, timeout: float | None = None) -> int:
        """Wait for a sender and take one whole set.

        timeout   seconds until one must have begun; None: for ever
        returns   the engine's new weight_version. A sender that has not heard of it may send the set again: the
                  weight_version is the same again where it gives one, and one more where it does not
        raises    HandoverFailed: why, and what the engine has now; the set was not taken. PeerLost, likewise: the
                  sender has died or stalls. TimeoutError: nobody came. The receiver can be used again. A set that its
                  sender gave up before it heard of this end is none: it is logged, and the next one waited for
        """
        end = None if timeout is None else time.monotonic() + timeout
        with self._using:
            self._skipped = ""
            while True:
                try:
                    return self._receive(*self._await(end, timeout))
                except _NotBegun as error:
                    self._skip(str(error))

    def _receive(self, sender: bytes, hello: m.Hello) -> int:
        refusal = self._refusal(hello)
        if refusal:
            self._post(sender, m.Refused(refusal))
            raise HandoverFailed(refusal)
        if self._owner != hello.peer:
            self._let_go()
            self._owner = hello.peer
        self._owner_at = sender
        intake = self._intake
        try:
            intake.begin(hello.numerics, hello.weight_version)
            facts = self.mode, intake.device, intake.gpu, self.engine.weight_version
            self._post(sender, m.Welcome(self._me, intake.manifest(), *facts))
            while not isinstance(message := self._next(sender, hello.peer), m.Finish):
                self._take(sender, message)
            while self._taken:
                self._acknowledge(sender)
            version = intake.finish()
        except BaseException as error:
            reason = self._give_up(error)
            if isinstance(error, _NotBegun):  # who has gone is told nothing
                raise
            if not isinstance(error, PeerLost):
                self._post(sender, m.Failed(reason))
            if isinstance(error, UpdateIncomplete):
                raise
            if isinstance(error, PeerLost | HandoverFailed | ValueError | TypeError | OSError):
                kind = PeerLost if isinstance(error, PeerLost) else HandoverFailed
                raise kind(reason) from error
            raise
        else:
            self._post(sender, m.Done(version))
            return version
        finally:
            self._early.clear()
            self._say_goodbye()

    def _give_up(self, error: BaseException) -> str:
        """What to tell: why, and what the engine has now."""
        for _, reading in self._taken:
            with contextlib.suppress(Exception):  # of the device, say: whoever asks it next is told
                reading.wait()
        self._taken.clear()
        begun = self._intake.abandon(error)
        if isinstance(error, UpdateIncomplete):
            return str(error)
        has = "has no weights now: send all of them again" if begun else "goes on with the weights that it had"
        return f"{error}. The engine {has}"

    def close(self) -> None:
        """Ends the socket and lets go of a sender's memory, once a `receive` of another thread has given up, which it
        does between two messages. Again does nothing."""
        with self._ending:
            if self._closed:
                return
            self._closed = True
            # A socket that is closed under the thread that uses it ends the process.
            with self._using, contextlib.closing(self._listener):
                for _ in range(_AT_ONCE):
                    if not self._socket.poll(0):
                        break
                    self._next_message()
                self._say_goodbye()
                self._let_go()

    def __enter__(self) -> "WeightReceiver":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # Messages

    def _post(self, to: bytes, message: m.Message) -> None:
        self._socket.send_multipart([to, m.encode(message)])

    def _await(self, end: float | None, timeout: float | None) -> tuple[bytes, m.Hello]:
        """The first that has something to send, once all has been heard that was said by now: of one process the
        newest, for it may have given up and come again while nobody listened here."""
        while True:
            for _ in range(_AT_ONCE):  # somebody may talk without an end
                if why := self._ended():
                    raise HandoverFailed(why)
                if not self._socket.poll(0 if self._waiting else protocol.POLL):
                    break
                self._note(*self._next_message())
            for hello in [hello for hello in self._waiting.values() if hello.peer.alive]:
                sender = [by for by, other in self._waiting.items() if other.peer == hello.peer][-1]
                return sender, self._waiting.pop(sender)
            self._waiting.clear()
            if end is not None and time.monotonic() > end:
                said = f"weights: no sender came within {timeout:g} s"
                raise TimeoutError(f"{said}, but one that broke off: {self._skipped}" if self._skipped else said)

    def _ended(self) -> str:
        return "weights: the receiver is closed" if self._closed else self._intake.broken

    def _note(self, sender: bytes, message: m.Message | None) -> None:
        """Of somebody whose set is not under way."""
        if isinstance(message, m.Cancel) and self._waiting.pop(sender, None):
            self._skip(message.reason)
        elif isinstance(message, m.Hello):
            self._waiting[sender] = message
        elif sender in self._waiting and message is not None:
            self._early.append((sender, message))
        self._say_goodbye()

    def _skip(self, reason: str) -> None:
        """A set that was broken off before any of it came: the sender knows, and the engine has lost nothing."""
        self._skipped = reason
        log.warning("weights: skipped a set that its sender broke off before it began: %s", reason)

    def _next_message(self, sender: bytes = b"", name: str = "") -> tuple[bytes, m.Message | None]:
        """A message, and who said it. What is none is dropped, but for this sender's: HandoverFailed."""
        by, *parts = self._socket.recv_multipart()
        try:
            message = m.decode(b"".join(parts), name if by == sender else "a stranger")
        except HandoverFailed as error:
            if by == sender:
                raise
            self._dropped += 1
            if self._dropped.bit_count() == 1:  # the first, and then each time that they are twice as many
                log.warning("%s: dropped, %d of them by now", error, self._dropped)
            return by, None
        if isinstance(message, m.Bye):
            self._leaving.append((by, message.peer))
        return by, message

    def _say_goodbye(self) -> None:
        """To those that end; not in the middle of a hand-over, which may be of the same process."""
        while self._leaving:
            by, peer = self._leaving.pop()
            if peer == self._owner:
                self._let_go()
            self._post(by, m.Gone())

    def _next(self, sender: bytes, peer: m.Peer) -> m.Message:
        """Before it, buckets that have been read are acknowledged: who fills them does so while the next one is taken.
        While nothing comes, those that still are; and then others are told to wait, unless this sender has given up."""
        while self._early:
            by, message = self._early.popleft()
            if by == sender:
                return message
        wait = protocol.Wait(peer, self.timeout, "the next message", self._ended)
        while True:
            while self._taken and (self._taken[0][1].done or not self._socket.poll(0)):
                self._acknowledge(sender)
            while self._waiting and not self._socket.poll(0):
                other = self._waiting.popitem()[0]
                self._post(other, m.Refused(f"weights: refused: {peer.name} is sending its own at the moment"))
            wait.until_heard(self._poller)
            by, message = self._next_message(sender, peer.name)
            if by == sender:
                return message
            wait.heard_another(self._poller)
            if isinstance(message, m.Hello):
                self._waiting[by] = message
            elif isinstance(message, m.Cancel):
                self._waiting.pop(by, None)

    def _refusal(self, hello: m.Hello) -> str:
        if hello.version != m.VERSION:
            versions = f"the sender's version is {hello.version}, the receiver's {m.VERSION}"
            return f"weights: refused: protocol: {versions}"
        try:
            differ = difference(hello.numerics, self.engine.numerics())
        except (TypeError, RecursionError) as error:
            return f"weights: refused: numerics: {error}"
        if differ:
            found = "; ".join(f"{w}: the trainer has {a!r}, the engine {b!r}" for w, (a, b) in differ.items())
            return f"weights: refused: numerics: {found}"
        return ""

    # Contents

    def _take(self, sender: bytes, message: m.Message) -> None:
        if isinstance(message, m.Offer):
            try:
                self._intake.open(message)
                self._post(sender, m.Opened())
            except SetEnded:  # which says nothing of the memory
                raise
            except HandoverFailed as error:
                self._post(sender, m.Unopened(str(error)))
        elif isinstance(message, m.Bucket):
            self._taken.append((message.buffer, self._intake.take(message)))
        elif isinstance(message, m.Check):
            while self._taken:
                self._acknowledge(sender)
            self._intake.check()
            self._post(sender, m.Whole())
        elif isinstance(message, m.Cancel) and not message.welcomed:
            raise _NotBegun(message.reason)
        elif isinstance(message, m.Cancel):
            raise HandoverFailed(f"weights: the sender broke off: {message.reason}")
        else:
            raise HandoverFailed(f"weights: the sender said {type(message).__name__} in the middle of a hand-over")

    def _acknowledge(self, sender: bytes) -> None:
        buffer, reading = self._taken.popleft()
        reading.wait()
        self._post(sender, m.Ack(buffer))

    def _let_go(self) -> None:
        """Of the memory of the sender before this one, which is told."""
        if self._owner is not None:
            self._intake.let_go()
            self._post(self._owner_at, m.Gone())
            self._owner = None
