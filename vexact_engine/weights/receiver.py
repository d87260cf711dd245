"""The engine's end of a hand-over of weights from a trainer in another process of this host."""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

import vexact_ops as vx

from ..errors import HandoverFailed, PeerLost
from . import protocol
from .buffers import Opened, checksum, gpu_name
from .protocol import (
    Ack,
    Bucket,
    Bye,
    Cancel,
    Done,
    Failed,
    Finish,
    Hello,
    Offer,
    Part,
    Peer,
    Refused,
    Unopened,
    Welcome,
)
from .session import WeightUpdate
from .update import Piece, Places, Update

log = logging.getLogger(__name__)

MODES = ("in_place", "staged")


class Target(Protocol):
    """What of an Engine is needed."""

    model: torch.nn.Module
    device: torch.device

    @property
    def weight_version(self) -> int: ...
    def numerics(self) -> dict: ...
    def begin_update(self, *, numerics: Mapping[str, object]) -> WeightUpdate: ...
    def update_weights(self, named_tensors: Mapping[str, Tensor], *, numerics: Mapping[str, object]) -> int: ...


class WeightReceiver:
    """Takes weights for an engine, set by set. One thread at a time calls it. A context manager.

    address   where a WeightSender finds it: a new one by default, in a folder of this user's alone
    mode      "in_place": tensors are written as they come, and nothing is computed from the first to the last. After a
              failure in between the engine has no weights: requests end with WeightsTorn until a whole set has come.
              "staged": the set waits in a second copy, and is put in place between two steps once it is whole; whatever
              fails leaves the old weights running
    staging   where that copy lies: the engine's device, or "cpu" (pinned where the engine computes on a GPU). It is
              taken now and kept
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
        if mode not in MODES:
            raise ValueError(f"WeightReceiver: mode: got {mode!r}, expected one of {', '.join(MODES)}")
        if staging is not None and mode != "staged":
            raise ValueError(f"WeightReceiver: staging: got {staging!r} in mode {mode!r}, expected it with staged only")
        if not timeout > 0:
            raise ValueError(f"WeightReceiver: timeout: got {timeout!r}, expected seconds above 0")
        self.engine, self.mode, self.timeout = engine, mode, timeout
        self._places = Places.of(engine.model)
        self._staging = self._places.copy(staging or engine.device) if mode == "staged" else None
        self.address = address or protocol.new_address()
        self._me = Peer.self("the engine")
        self._socket = protocol.zmq.Context.instance().socket(protocol.zmq.ROUTER)
        self._socket.linger = 1000
        self._socket.bind(self.address)
        self._poller = protocol.zmq.Poller()
        self._poller.register(self._socket, protocol.zmq.POLLIN)
        self._opened: dict[str, Opened] = {}
        self._owner: Peer | None = None  # whose memory that is
        self._using = threading.Lock()
        self._closed = False

    def receive(self, timeout: float | None = None) -> int:
        """Wait for a sender and take one whole set.

        timeout   seconds until one must have begun; None: for ever
        returns   the engine's new weight_version
        raises    HandoverFailed: why, and what the engine has now. PeerLost: the sender has died or stalls.
                  TimeoutError: nobody came. The receiver can be used again
        """
        with self._using:
            sender, hello = self._await(timeout)
            refusal = self._refusal(hello)
            if refusal:
                self._post(sender, Refused(refusal))
                raise HandoverFailed(refusal)
            if self._owner != hello.peer:
                self._let_go()
                self._owner = hello.peer
            take = _Take(self, hello)
            try:
                device = self.engine.device
                self._post(sender, Welcome(self._me, self._manifest(), self.mode, device.type, gpu_name(device)))
                while not isinstance(message := self._next(sender, hello.peer), Finish):
                    self._take(sender, take, message)
                version = take.finish()
                self._post(sender, Done(version))
                return version
            except BaseException as error:
                reason = take.fail(error)
                if not isinstance(error, PeerLost):
                    self._post(sender, Failed(reason))
                if isinstance(error, PeerLost | HandoverFailed | ValueError | TypeError | OSError):
                    kind = PeerLost if isinstance(error, PeerLost) else HandoverFailed
                    raise kind(reason) from error
                raise

    def close(self) -> None:
        """Ends the socket and lets go of a sender's memory. Again does nothing."""
        if self._closed:
            return
        self._closed = True
        self._let_go()
        self._socket.close()
        if self.address.startswith("ipc://"):
            Path(self.address.removeprefix("ipc://")).unlink(missing_ok=True)

    def __enter__(self) -> "WeightReceiver":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # Messages

    def _post(self, to: bytes, message: protocol.Message) -> None:
        self._socket.send_multipart([to, protocol.encode(message)])

    def _await(self, timeout: float | None) -> tuple[bytes, Hello]:
        end = None if timeout is None else time.monotonic() + timeout
        while True:
            if self._closed:
                raise HandoverFailed("weights: the receiver is closed")
            if self._socket.poll(protocol.POLL):
                sender, data = self._socket.recv_multipart()
                message = protocol.decode(data, "a sender")
                if isinstance(message, Hello) and message.peer.alive:
                    return sender, message
                if isinstance(message, Bye):
                    self._let_go()
            elif end is not None and time.monotonic() > end:
                raise TimeoutError(f"weights: no sender came within {timeout:g} s")

    def _next(self, sender: bytes, peer: Peer) -> protocol.Message:
        while True:
            protocol.wait(self._poller, peer, self.timeout, "the next message")
            by, data = self._socket.recv_multipart()
            message = protocol.decode(data, peer.name if by == sender else "a sender")
            if by == sender:
                return message
            if isinstance(message, Hello):
                self._post(by, Refused(f"weights: refused: {peer.name} is sending its own at the moment"))

    def _refusal(self, hello: Hello) -> str:
        if hello.version != protocol.VERSION:
            versions = f"the sender's version is {hello.version}, the receiver's {protocol.VERSION}"
            return f"weights: refused: protocol: {versions}"
        differ = vx.numerics_difference(hello.numerics, self.engine.numerics(), forward=True)
        if differ:
            found = "; ".join(f"{w}: the trainer has {a!r}, the engine {b!r}" for w, (a, b) in differ.items())
            return f"weights: refused: numerics: {found}"
        return ""

    def _manifest(self) -> dict[str, tuple[tuple[int, ...], str]]:
        every = self._places.targets | {name: view for name, (_, view) in self._places.views.items()}
        every |= {old: every[new] for old, new in self._places.old.items()}
        return {name: (tuple(t.shape), protocol.dtype_name(t.dtype)) for name, t in every.items()}

    # Contents

    def _take(self, sender: bytes, take: "_Take", message: protocol.Message) -> None:
        if isinstance(message, Offer):
            try:
                if message.name not in self._opened:
                    given = message.kind, message.name, message.size, message.handles, message.gpu
                    self._opened[message.name] = Opened(*given, self.engine.device)
                take.memory = self._opened[message.name].tensors
                self._post(sender, protocol.Opened())
            except HandoverFailed as error:
                self._post(sender, Unopened(str(error)))
        elif isinstance(message, Bucket):
            take.bucket(message)
            self._post(sender, Ack(message.buffer))
        elif isinstance(message, Cancel):
            raise HandoverFailed(f"weights: the sender broke off: {message.reason}")
        else:
            raise HandoverFailed(f"weights: the sender said {type(message).__name__} in the middle of a hand-over")

    def _let_go(self) -> None:
        while self._opened:
            self._opened.popitem()[1].close()


class _Take:
    """One set on its way in."""

    def __init__(self, receiver: WeightReceiver, hello: Hello):
        self.engine, self.numerics = receiver.engine, hello.numerics
        self.memory: list[Tensor] = []
        self.staged: Update | None = None
        self.update: WeightUpdate | None = None
        if receiver.mode == "staged":
            self.staged = Update(receiver._staging)
        else:
            self.update = self.engine.begin_update(numerics=self.numerics)

    def bucket(self, bucket: Bucket) -> None:
        if not 0 <= bucket.buffer < len(self.memory):
            raise HandoverFailed(f"weights: the sender filled bucket {bucket.buffer} of {len(self.memory)}")
        memory = self.memory[bucket.buffer]
        pairs, used = [], 0
        for part in bucket.parts:
            value, end = _value(part, memory)
            pairs.append((part.name, value))
            used = max(used, -(-end // 16) * 16)
        if bucket.checksum is not None and checksum(memory[:used]) != bucket.checksum:
            names = ", ".join(sorted({part.name for part in bucket.parts})[:3])
            raise HandoverFailed(f"weights: what arrived is not what was sent (checksum of a bucket with {names})")
        if self.update is not None:
            self.update.write(pairs)
            return
        self.staged.write(pairs)
        if memory.is_cuda:
            torch.cuda.current_stream(memory.device).synchronize()

    def finish(self) -> int:
        if self.update is not None:
            return self.update.finish()
        self.staged.finish()
        return self.engine.update_weights(self.staged.came(), numerics=self.numerics)

    def fail(self, error: BaseException) -> str:
        """What to tell: why, and what the engine has now."""
        begun = self.update is not None and self.update.begun
        if self.update is not None:
            self.update.abandon()
        has = "has no weights now: send all of them again" if begun else "goes on with the weights that it had"
        return f"{error}. The engine {has}"


def _value(part: Part, memory: Tensor) -> tuple[Tensor | Piece, int]:
    """The tensor, or the piece of one, that lies in a bucket, and where it ends there."""
    dtype = protocol.dtype_of(part.dtype)
    end = part.offset + part.count * dtype.itemsize
    whole = 1
    for size in part.shape:
        whole *= size
    if part.offset % 16 or part.offset < 0 or part.count < 1 or end > len(memory):
        raise HandoverFailed(f"weights: {part.name} is said to lie outside of its bucket")
    flat = memory[part.offset : end].view(dtype)
    if part.start == 0 and part.count == whole:
        return flat.view(part.shape), end
    return Piece(part.start, flat), end
