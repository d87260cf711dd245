"""The trainer's end of a hand-over of weights: to an engine in another process of this host."""

import functools
import logging
import time
from collections.abc import AsyncIterable, Callable, Iterable, Mapping

import torch
from torch import Tensor

import vexact_ops as vx

from ..errors import HandoverFailed, PeerLost
from . import messages as m
from . import protocol
from .buffers import CUDA, HOST, Buckets, gpu_named
from .filling import Expected, Filling
from .packing import ALIGN, check_whole, in_turn
from .session import check_version

log = logging.getLogger(__name__)

_HALVES = 4  # of two buckets: while one is filled and one read, messages of the others are on their way
GOODBYE = 5.0  # seconds that `close` waits for a receiver that does not listen
CACHED = 8 << 20  # bytes of a bucket from CPU to CPU: what was written is read while the cache has it


class WeightSender:
    """Sends all weights of a model, again and again, to the WeightReceiver at `address`. Not for several threads at a
    time. A context manager: close() gives its buckets back.

    address       the receiver's
    numerics      what fixes this trainer's bits: vexact_ops.numerics(device, **options). The receiver refuses another
                  fingerprint than its engine's
    bucket_bytes  of each of the two buckets that tensors travel in, half by half; larger tensors go in pieces.
                  8 MiB at most between CPUs
    transport     "auto": CUDA IPC where both ends compute on a GPU, shared memory otherwise, and with a warning where
                  the receiver cannot open a GPU's memory; "cuda_ipc" or "shared_memory": that alone
    checksum      of every bucket, compared by the receiver
    timeout       seconds that any one answer may take; a receiver that has died is noticed at once. The last one comes
                  when the engine has put the set in place
    """

    def __init__(
        self,
        address: str,
        *,
        numerics: Mapping[str, object],
        bucket_bytes: int = 512 << 20,
        transport: str = "auto",
        checksum: bool = False,
        timeout: float = 60.0,
    ) -> None:
        if transport not in ("auto", "cuda_ipc", "shared_memory"):
            raise ValueError(f"WeightSender: transport: got {transport!r}, expected auto, cuda_ipc or shared_memory")
        if not isinstance(bucket_bytes, int) or bucket_bytes < 4096 or bucket_bytes % ALIGN:
            raise ValueError(
                f"WeightSender: bucket_bytes: got {bucket_bytes!r}, expected a multiple of {ALIGN}, 4096 or more"
            )
        if not timeout > 0:
            raise ValueError(f"WeightSender: timeout: got {timeout!r}, expected seconds above 0")
        vx.numerics_difference(numerics, numerics)  # TypeError where it is none
        self.address, self.numerics = address, dict(numerics)
        self.bucket_bytes, self.transport, self.checksum, self.timeout = bucket_bytes, transport, checksum, timeout
        self._socket: protocol.zmq.Socket | None = None
        self._buffers: dict[str, Buckets] = {}  # by kind: made once, kept
        self._refused: set[tuple[str, str]] = set()  # kinds, and of which GPU, that this receiver could not open
        self._receiver: m.Peer | None = None
        self._doubt = ""  # about the set before, until the receiver answers again

    def send(
        self, named_tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], *, version: int | None = None
    ) -> int:
        """Every parameter once, under its Hugging Face name; experts stacked or one by one. An iterator may make each
        as it is asked for.

        tensors   dense, on any device, of the receiver's shapes. Of another floating type they are rounded to the
                  receiver's, to nearest even, as FSDP2 casts its masters
        version   the weight_version that they will be, 1 to 2^53 - 1; None: one more than the engine's
        returns   the engine's new weight_version, once it computes with them
        raises    HandoverFailed, PeerLost: why, and what the engine has now; ValueError, TypeError: a tensor that
                  does not fit. What the iterator raises goes on to the caller; the receiver is told

        After an error the engine has not taken the set, nor will it (of Replicas some may have: the message says
        which), but for a PeerLost that is `in_doubt`, or an interrupt at the very end: the set was whole and the
        receiver was told so, but its answer did not come within `timeout`. Then it may have taken it, or take it as
        soon as it goes on; the engine's weight_version tells. Send the same again, to a receiver that receives again:
        once that has returned, both ends agree. With `version` the weight_version is the same however often it was
        taken; without, each time that it was counts as one.
        """
        session = Session(self, version)
        try:
            session.begin()
            for name, tensor in in_turn(named_tensors):
                session.put(name, tensor)
            return session.finish()
        except BaseException as error:
            session.cancel(error)
            raise

    async def asend(
        self,
        named_tensors: AsyncIterable[tuple[str, Tensor]] | Iterable[tuple[str, Tensor]],
        *,
        version: int | None = None,
    ) -> int:
        """`send` of what an asynchronous iterator makes. Between two of its tensors other tasks run."""
        if not hasattr(named_tensors, "__aiter__"):
            return self.send(named_tensors, version=version)
        session = Session(self, version)
        try:
            session.begin()
            async for name, tensor in named_tensors:
                session.put(name, tensor)
            return session.finish()
        except BaseException as error:
            session.cancel(error)
            raise

    def close(self) -> None:
        """Gives back the buckets, a GPU's once the receiver has let go of them, which it does while it receives and at
        its own end, or 5 seconds later. Again does nothing."""
        if self._buffers:
            self._say_bye()
            if CUDA in self._buffers:
                self._await_gone()
        self._drop_socket(linger=1000)
        self._free()

    def __enter__(self) -> "WeightSender":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # The socket

    def _connect(self, drain: bool = True) -> None:
        if self._socket is None:
            self._socket = protocol.zmq.Context.instance().socket(protocol.zmq.DEALER)
            self._socket.linger = 0
            self._socket.connect(self.address)
            self._poller = protocol.zmq.Poller()
            self._poller.register(self._socket, protocol.zmq.POLLIN)
        while drain and self._socket.poll(0):  # answers to a hand-over that is over
            self._socket.recv()

    def _drop_socket(self, linger: int = 0) -> None:
        if self._socket is not None:
            self._socket.close(linger)
            self._socket = None

    def _post(self, message: m.Message) -> None:
        self._socket.send(m.encode(message))

    def _answer(self, what: str, *kinds: type):
        peer, message = self._receiver, m.Gone()
        wait = protocol.Wait(peer, self.timeout, what)
        while isinstance(message, m.Gone):  # it let go when another sender came: it opens again what it is offered
            wait.until_heard(self._poller)
            message = m.decode(self._socket.recv(), "the receiver" if peer is None else peer.name)
        if isinstance(message, m.Refused | m.Failed):
            raise HandoverFailed(message.reason)
        if not isinstance(message, kinds):
            raise HandoverFailed(f"weights: the receiver answered {type(message).__name__}, where {what} was due")
        return message

    def _say_bye(self) -> None:
        self._connect(drain=False)
        self._post(m.Bye(m.Peer.self("the trainer")))

    def _await_gone(self, until: float | None = None) -> None:
        peer, gone = self._receiver, False
        seconds = GOODBYE if until is None else until - time.monotonic()
        wait = protocol.Wait(peer, seconds, "that it lets go of the buckets")
        try:
            while not gone:
                wait.until_heard(self._poller)
                gone = isinstance(m.decode(self._socket.recv(), "the receiver"), m.Gone)
        except PeerLost as error:
            if peer is None or peer.alive:
                log.warning("%s: their memory is free once it does", error)

    # Memory

    def _free(self) -> None:
        for buffers in self._buffers.values():
            buffers.close()
        self._buffers.clear()

    def _open(
        self,
        device: torch.device,
        welcome: m.Welcome,
        ask: Callable[[m.Offer], str | None] | None = None,
        keep: bool = False,
    ) -> Buckets:
        """Buckets that the receiver has opened: those of before, or others. On different GPUs, whichever of the two
        both processes see.

        ask    in the place of `ask_to_open`, of several receivers
        keep   those that one could not open are not given back before `close`: others may have opened them
        """
        both = device.type == "cuda" and welcome.device == "cuda"
        if self.transport == "cuda_ipc" and not both:
            raise HandoverFailed(
                f"weights: transport is cuda_ipc, but the tensors are on {device.type} and the engine on "
                f"{welcome.device}"
            )
        kinds = []
        if both and self.transport != "shared_memory":
            kinds += [(CUDA, gpu) for gpu in dict.fromkeys((device, gpu_named(welcome.gpu))) if gpu is not None]
        kinds += [(HOST, device)] if self.transport != "cuda_ipc" else []
        for kind, where in kinds:
            if (kind, str(where)) in self._refused:
                continue
            reason = self._try(kind, where, self.ask_to_open if ask is None else ask, keep)
            if reason is None:
                return self._buffers[kind]
            self._refused.add((kind, str(where)))
            if (kind, where) == kinds[-1]:
                raise HandoverFailed(reason)
            log.warning("%s; going on by %s", reason, kinds[-1][0])
        raise HandoverFailed("weights: no memory that both ends can see")

    def offered(self, kind: str, device: torch.device) -> m.Offer:
        """Of buckets of that kind: those of before, or others. HandoverFailed where there is no room."""
        held = self._buffers.get(kind)
        if held is not None and kind == CUDA and held.device != device:
            held.close()
            held = None
        size = self.bucket_bytes if device.type == "cuda" else min(self.bucket_bytes, CACHED)
        held = held or Buckets(kind, size * 2 // _HALVES // ALIGN * ALIGN, _HALVES, device)
        self._buffers[kind] = held
        return held.offer()

    def ask_to_open(self, offer: m.Offer) -> str | None:
        """None once the receiver has opened it, or why it cannot."""
        self._post(offer)
        answer = self._answer("an answer to the offer of memory", m.Opened, m.Unopened)
        return answer.reason if isinstance(answer, m.Unopened) else None

    def _try(self, kind: str, device: torch.device, ask: Callable[[m.Offer], str | None], keep: bool) -> str | None:
        """None, or why not."""
        try:
            offer = self.offered(kind, device)
        except HandoverFailed as error:
            if kind == HOST:
                raise
            return str(error)
        reason = ask(offer)
        if reason is not None and not keep:
            self._buffers.pop(kind).close()
        return reason


class Session:
    """One set of weights, to one receiver."""

    def __init__(self, sender: WeightSender, version: int | None):
        check_version("WeightSender", version)
        self.sender, self.version = sender, version
        self.ended = self.finished = False
        self.welcome: m.Welcome | None = None
        self.filling: Filling | None = None

    def begin(self) -> None:
        self.say_hello()
        self.hear_welcome()

    def say_hello(self) -> None:
        sender = self.sender
        self._before, sender._receiver = sender._receiver, None
        sender._connect()
        sender._post(m.Hello(m.VERSION, m.Peer.self("the trainer"), sender.numerics, self.version))

    def hear_welcome(self) -> None:
        sender, welcome = self.sender, self._answer_in_doubt("a welcome", m.Welcome)
        sender._doubt = ""
        if welcome.peer != self._before:
            sender._refused.clear()
        sender._receiver, self.welcome = welcome.peer, welcome

    @functools.cached_property
    def expected(self) -> Expected:
        return Expected(self.welcome.manifest)

    def put(self, name: str, tensor: Tensor) -> None:
        if self.expected.passes(name):
            return
        check_whole(name, tensor)
        dtype = self.expected.dtype(name, tensor)
        if self.filling is None:
            sender = self.sender
            freed, waits = self._freed, lambda: bool(sender._socket.poll(0))
            buffers = sender._open(tensor.device, self.welcome)
            self.filling = Filling(buffers, sender._post, freed, waits, checksums=sender.checksum)
        self.filling.put(name, tensor, dtype)
        self.expected.note(name)

    def _freed(self) -> int:
        return self.sender._answer("an acknowledgement", m.Ack).buffer

    def finish(self) -> int:
        if self.filling is not None:  # no Finish follows a bucket that may be read yet
            self.filling.finish()
            self.filling.settle()
        self.say_finish()
        return self.hear_done()

    def say_finish(self) -> None:
        """All has been read."""
        self.sender._post(m.Finish())
        self.finished, had = True, self.welcome.weight_version
        tells = f"above {had}" if self.version is None else f"{self.version}; it was {had}"
        self.sender._doubt = (
            "In doubt: all weights had been sent, and the engine may have taken them, or take them yet (its "
            f"weight_version is {tells}). Sending them again is harmless"
        )

    def hear_done(self) -> int:
        done = self._answer_in_doubt("the new version", m.Done)
        self.sender._doubt, self.ended = "", True
        return done.weight_version

    def _answer_in_doubt(self, what: str, kind: type) -> m.Message:
        """One that tells what became of a set that the receiver may have taken, if there is such."""
        try:
            return self.sender._answer(what, kind)
        except PeerLost as error:
            if not self.sender._doubt:
                raise
            raise PeerLost(f"{error}. {self.sender._doubt}", in_doubt=True) from error
        except HandoverFailed:
            if self.finished:  # it was not taken
                self.sender._doubt = ""
            raise

    def cancel(self, error: BaseException) -> None:
        """The receiver is told, unless it was who ended it, or has been told to take the set; the next hand-over begins
        on a new socket."""
        if self.ended:
            return
        self.ended = True
        if self.sender._socket is not None and not self.finished:
            self.sender._post(m.Cancel(f"{type(error).__name__}: {error}", welcomed=self.welcome is not None))
        self.sender._drop_socket(linger=1000)
