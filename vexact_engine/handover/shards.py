"""The trainer's end of a hand-over where its weights are sharded: each rank sends what it holds.

Every rank fills buckets of its own; the first of them talks to the receivers, and passes on what the others tell it:

    another rank                    the first                       each receiver
    Here ->                             Hello ->
                                                                 <- Welcome
                                 <- Begin
    Offer ->                            Offer, of each rank ->
                                                                 <- Opened
                                 <- Opened, once all are
    Bucket ->                           Bucket, of each rank ->
                                 <- Ack, once all have given it  <- Ack
    Ended ->
                                 <- Rest, where some are to be made whole
                                    Check, of several ->
                                                                 <- Whole
                                    Finish, once all are ->
                                 <- Done                         <- Done

Failed, from either side, ends the set for all.
"""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import HandoverFailed, PeerLost
from ..weights.update import Piece
from . import messages as m
from . import protocol
from .buffers import HOST, Buckets
from .fanout import Fanout
from .filling import Expected, Filling
from .packing import check_whole, in_turn
from .sender import WeightSender

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

log = logging.getLogger(__name__)

_GOODBYE = 5.0  # seconds that another rank's `close` waits for the first's
_LISTEN = 2e-4  # seconds in which the first rank listens to the others once, while it fills buckets of its own
Pairs = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class ShardedWeightSender:
    """Sends all weights of a model whose ranks hold them in shards (FSDP2's DTensors), again and again, to the
    WeightReceiver at an address, or to several at once. Made, used and closed by all ranks of a group together. A
    context manager.

    addresses   the receiver's, or those of several, each once; of the group's first rank, what others give is not read
    group       of torch.distributed: ranks of this host that hold every tensor together. None: all
    others      as WeightSender has them; buckets are each rank's
    raises      ValueError where the ranks are not on one host, or there are no addresses or one twice; what
                WeightSender raises; OSError where the first rank cannot listen to the others. What is the first rank's
                is HandoverFailed on the others

    What a rank holds of a tensor that is cut by rows (Shard(0), replicated by groups or not) goes from where it lies
    into the engine's memory, and to those of its ranks alone that hold such rows. Tensors that are cut otherwise are
    made whole by all ranks, one by one, at the end of the set. Plain tensors are the first rank's.

    Several receivers are engines that take the same tensors, such as replicas of one model. A bucket is filled once,
    and all of them read it.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] | None,
        *,
        numerics: Mapping[str, object],
        group: dist.ProcessGroup | None = None,
        bucket_bytes: int = 512 << 20,
        transport: str = "auto",
        checksum: bool = False,
        timeout: float = 60.0,
    ) -> None:
        options = {"bucket_bytes": bucket_bytes, "transport": transport, "checksum": checksum, "timeout": timeout}
        self.rank, self._size, self.timeout = dist.get_rank(group), dist.get_world_size(group), timeout
        self._inner = WeightSender("", numerics=numerics, **options)
        self.numerics = self._inner.numerics
        self._receivers: Fanout | None = None  # the first rank's
        self._listener, failed = None, None
        try:
            if self.rank == 0:
                self._receivers = Fanout(_addresses(addresses), numerics=numerics, **options)
                self._inner = self._receivers.ends[0]
            self._listener = protocol.Listener() if self.rank == 0 and self._size > 1 else None
        except Exception as error:  # the others wait to hear of it
            failed = error
        given = () if self._receivers is None else tuple(end.address for end in self._receivers.ends)
        at, why = "" if self._listener is None else self._listener.address, "" if failed is None else str(failed)
        me = m.Peer.self(f"rank {self.rank} of the trainer")
        found: list = [None] * self._size
        dist.all_gather_object(found, (_host(), at, me.pid, me.started, me.name, given, why), group=group)
        if why := found[0][-1]:
            raise failed or HandoverFailed(f"rank 0: {why}")
        hosts = {host for host, *_ in found}
        if len(hosts) > 1:
            self._end()
            raise ValueError(
                f"ShardedWeightSender: group: its ranks are on {len(hosts)} hosts, expected one: memory is shared in "
                "one host alone. Give ranks of one host that hold every tensor together, or whole tensors to a "
                "WeightSender"
            )
        self._early: dict[int, bytes] = {}  # ranks that have begun the next set while the first was at one that failed
        self.known: dict[str, Known] = {}  # of each name, as it came last
        self._first, self.addresses = found[0][1], found[0][-2]  # on all ranks the same
        self._peers = [m.Peer(pid, started, name) for _, _, pid, started, name, *_ in found]

    def send(self, named_tensors: Pairs, *, version: int | None = None) -> int:
        """Every parameter once, under its Hugging Face name; by all ranks, the same names in the same order.

        tensors   DTensors, or dense ones, of the receiver's (whole) shapes, on any device. Of another floating type
                  they are rounded to the receiver's, to nearest even
        version   as WeightSender.send has it
        returns   the engine's new weight_version, once it computes with them: on every rank
        raises    as WeightSender.send, on every rank: what one of them has found is HandoverFailed on the others

        Of several receivers one that refuses, has another fingerprint or other tensors, fails, dies or stalls ends the
        set for all, and the error names it; each of the others has then what it has when a sender breaks off: in place
        its engine has no weights, staged it goes on with those from before. None computes with the new ones before all
        have said that they have all of them. What cannot be ruled out is that one dies, stalls or fails after that,
        while it puts them in place: then the error says which have taken the set. The same set sent to all again, with
        its `version`, heals that. Where they had different versions the highest is returned.
        """
        pairs = in_turn(named_tensors)
        return _First(self, version).send(pairs) if self.rank == 0 else _Other(self).send(pairs)

    def close(self) -> None:
        """Gives back the buckets: see WeightSender.close. Other ranks' once the first has closed, or 5 seconds later.
        Again does nothing."""
        if self._receivers is not None:
            self._receivers.close()
        elif self._inner._buffers:
            first, socket = self._peers[0], Path(self._first.removeprefix("ipc://"))
            try:
                protocol.until(lambda: not (socket.exists() and first.alive), _GOODBYE, f"{first.name}: that it closes")
            except PeerLost as error:
                log.warning("%s: this rank's buckets are freed before", error)
            self._inner._free()
        self._end()

    def _end(self) -> None:
        if self._listener is not None:  # by then the receiver has let go of all memory: other ranks may free theirs
            self._listener.close()
            self._listener = None

    def __enter__(self) -> "ShardedWeightSender":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


class Known(NamedTuple):
    """How a DTensor lies, which is the same set by set: `begin` and `said` are found once.

    begin  of this rank's run of the tensor's elements; see _begin
    said   what the ranks compare
    """

    mesh: "DeviceMesh"
    placements: tuple["Placement", ...]
    shape: torch.Size
    begin: int | None
    said: bytes

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> "Known":
        mesh, placements, shape = tensor.device_mesh, tensor.placements, tensor.shape
        said = repr((name, tuple(shape), tuple(map(str, placements)))).encode()
        return cls(mesh, placements, shape, _begin(mesh, placements, shape), said)

    def still(self, tensor: Tensor) -> bool:
        same = self.placements == tensor.placements and self.shape == tensor.shape
        return same and self.mesh is tensor.device_mesh


class _Sorted:
    """What a rank was given: its own pieces as they come, and the rest for later.

    known   by name: see Known
    """

    def __init__(self, expected: Expected, first: bool, known: dict[str, Known]):
        self._expected, self._first, self._known = expected, first, known
        self.later: list[tuple[str, Tensor, torch.dtype]] = []
        self._digest = hashlib.sha256()

    def put(self, name: str, tensor: Tensor, fill: Callable[[str, Tensor | Piece, torch.dtype], object]) -> None:
        if self._expected.passes(name):
            return
        sharded = hasattr(tensor, "full_tensor")
        if not sharded:
            check_whole(name, tensor)
        dtype = self._expected.dtype(name, tensor)
        self._expected.note(name)
        if not sharded:
            self._digest.update(repr((name, tuple(tensor.shape))).encode())
            if self._first:
                fill(name, tensor, dtype)
            return
        known = self._known.get(name)
        if known is None or not known.still(tensor):
            known = self._known[name] = Known.of(name, tensor)
        self._digest.update(known.said)
        if known.begin is None:
            self.later.append((name, tensor, dtype))
        elif (found := own_piece(tensor, known.begin)) is not None:
            fill(name, found, dtype)

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()


def own_piece(tensor: Tensor, begin: int) -> Piece | None:
    """What this rank holds of a DTensor and is the one to send: a run of the whole tensor's elements, from `begin` on
    (see _begin). None where that is nothing."""
    if begin < 0:
        return None
    with torch.no_grad():  # else it would be one more view for autograd, each time
        local = tensor.to_local()
    return Piece(begin, local.reshape(-1)) if local.numel() else None


def _begin(mesh: "DeviceMesh", placements: Sequence["Placement"], shape: Sequence[int]) -> int | None:
    """Of the run of the whole tensor's elements that this rank holds, the first one's number; negative where another
    rank has the same to send; None where what ranks hold are no runs, or yet to be summed."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    cut = [placement for placement in placements if type(placement) is not Replicate]
    if len(cut) > 1 or any(type(placement) is not Shard or placement.dim != 0 for placement in cut):
        return None
    where = mesh.get_coordinate()
    if where is None or any(at and type(p) is Replicate for at, p in zip(where, placements)):
        return -1
    if not cut:
        return 0
    _, offset = compute_local_shape_and_global_offset(shape, mesh, placements)
    return offset[0] * prod(shape[1:])


class _First:
    """One set, as the first rank has it."""

    def __init__(self, sender: ShardedWeightSender, version: int | None):
        self._sender, self._receivers, self._version = sender, sender._receivers, version
        self._at: dict[int, bytes] = {}  # another rank -> where it hears
        self._ranks: dict[bytes, int] = {}
        self._memory: dict[int, str] = {}
        self._under_way: deque[tuple[int, int]] = deque()  # whose, which: as receivers give them back
        self._free: deque[int] = deque()  # own ones that it has
        self._ended: dict[int, str] = {}
        self._router = sender._listener.socket if sender._listener is not None else None
        self._poller = protocol.zmq.Poller()
        if self._router is not None:
            self._poller.register(self._router, protocol.zmq.POLLIN)

    def send(self, pairs: Iterable[tuple[str, Tensor]]) -> int:
        try:
            self._await_ranks()
            welcome = self._receivers.begin(self._version)
            for socket in self._receivers.sockets:
                self._poller.register(socket, protocol.zmq.POLLIN)
            done = self._send(pairs, welcome)
        except BaseException as error:
            self._receivers.cancel(error)
            self._tell(m.Failed(f"rank 0: {error}" if isinstance(error, Exception) else "rank 0 was interrupted"))
            raise
        self._tell(m.Done(done))
        return done

    def _send(self, pairs: Iterable[tuple[str, Tensor]], welcome: m.Welcome) -> int:
        pairs = iter(pairs)
        head = next(pairs, None)
        if head is None:
            raise ValueError("weights: no tensors were given")
        buffers = self._open_all(head[1].device, welcome)
        filling = self._filling = Filling(
            buffers,
            lambda bucket: self._post(bucket, 0),
            self._freed,
            lambda: bool(self._free or self._poller.poll(0)),
            checksums=self._sender._inner.checksum,
            memory=buffers.name,
        )
        given = _Sorted(Expected(welcome.manifest), True, self._sender.known)
        given.put(*head, filling.put)
        listen = 0.0
        for name, tensor in pairs:
            if (now := time.monotonic()) > listen:
                while self._hear():
                    pass
                listen = now + _LISTEN
            given.put(name, tensor, filling.put)
        filling.finish()
        while len(self._ended) < len(self._at) or self._under_way:
            self._await("the other ranks' shards" if len(self._ended) < len(self._at) else "an acknowledgement")
        wrong = [rank for rank, digest in self._ended.items() if digest != given.digest]
        if wrong:
            raise ValueError(
                f"weights: rank {wrong[0]} gave other tensors than rank 0: expected the same names, shapes and "
                "placements, in the same order"
            )
        if given.later:
            self._tell(m.Rest())
        for name, tensor, dtype in given.later:
            filling.put(name, tensor.full_tensor(), dtype)
        filling.finish()
        while self._under_way:
            self._await("an acknowledgement")
        return self._receivers.finish()

    # The other ranks

    def _await_ranks(self) -> None:
        """All have begun the set, each by a new socket: of a rank that has given up and come again, the newest."""
        others = set(range(1, self._sender._size))
        wait = protocol.Wait(None, self._sender.timeout, "the other ranks of the trainer", self._dead)
        while others - self._sender._early.keys() or (self._router is not None and self._router.poll(0)):
            wait.until_heard(self._poller)
            self._heard()
        self._at, self._sender._early = self._sender._early, {}
        self._ranks = {by: rank for rank, by in self._at.items()}

    def _heard(self) -> tuple[int | None, m.OfRanks]:
        """What a rank has said of this set, and which; None where it is not of this set. Of one that has begun the next
        before its last words of this one are read: it is kept."""
        by, *parts = self._router.recv_multipart()
        message, rank = _read(parts), self._ranks.get(by)
        if rank is None and isinstance(message, m.Here) and message.rank < self._sender._size:
            self._sender._early[message.rank] = by
        elif rank is None and isinstance(message, m.Failed):
            self._sender._early = {rank: at for rank, at in self._sender._early.items() if at != by}
        return rank, message

    def _dead(self) -> str:
        gone = next((peer for peer in self._sender._peers[1:] if not peer.alive), None)
        return f"weights: {gone.name} has died" if gone is not None else ""

    def _tell(self, message: m.OfRanks, rank: int | None = None) -> None:
        for by in self._at.values() if rank is None else (self._at[rank],):
            self._router.send_multipart([by, m.encode(message)])

    def _open_all(self, device: torch.device, welcome: m.Welcome) -> Buckets:
        """This rank's buckets, once the receiver has opened every rank's, all of one kind."""
        buffers = self._receivers.open(device, welcome)
        self._tell(m.Begin(welcome, buffers.kind))
        for _ in self._at:
            self._open()
        self._tell(m.Opened())
        return buffers

    def _open(self) -> None:
        """What the next rank offers. HandoverFailed where that cannot be opened."""
        poller = protocol.zmq.Poller()
        poller.register(self._router, protocol.zmq.POLLIN)
        wait = protocol.Wait(None, self._sender.timeout, "another rank's offer of memory", self._dead)
        rank, message = None, None
        while rank is None:
            wait.until_heard(poller)
            rank, message = self._heard()
        if isinstance(message, m.Failed):
            raise HandoverFailed(message.reason)
        if not isinstance(message, m.Offer):
            raise HandoverFailed(f"weights: rank {rank} said {type(message).__name__}, where an offer was due")
        reason = self._receivers.ask_to_open(message)
        if reason is not None:
            other = "" if message.kind == HOST else '. transport="shared_memory" needs no such right'
            raise HandoverFailed(f"rank {rank}: {reason}{other}")
        self._memory[rank] = message.name

    # Buckets

    def _post(self, bucket: m.Bucket, rank: int) -> None:
        self._receivers.post(bucket)
        self._under_way.append((rank, bucket.buffer))

    def _freed(self) -> int:
        while not self._free:
            if self._poller.poll(0) or not self._filling.post_filled(1):
                self._await("an acknowledgement")
        return self._free.popleft()

    def _await(self, what: str) -> None:
        wait = protocol.Wait(self._receivers.peer, self._sender.timeout, what, self._dead)
        wait.until_heard(self._poller)
        self._hear()

    def _hear(self) -> bool:
        """What has come, if anything has."""
        ready = dict(self._poller.poll(0))
        for _ in range(self._receivers.given_back(ready)):
            rank, buffer = self._under_way.popleft()
            if rank:
                self._tell(m.Ack(buffer), rank)
            else:
                self._free.append(buffer)
        if self._router in ready:
            rank, message = self._heard()
            if rank is None:
                return True
            if isinstance(message, m.Failed):
                raise HandoverFailed(message.reason)
            if isinstance(message, m.Bucket) and rank not in self._ended:
                message.memory = self._memory[rank]
                self._post(message, rank)
            elif isinstance(message, m.Ended):
                self._ended[rank] = message.digest
            else:
                raise HandoverFailed(f"weights: rank {rank} said {type(message).__name__} in the middle of a hand-over")
        return bool(ready)


class _Other:
    """One set, as another rank has it."""

    def __init__(self, sender: ShardedWeightSender):
        self._sender, self._inner = sender, sender._inner
        self._first = sender._peers[0]
        self._socket = protocol.zmq.Context.instance().socket(protocol.zmq.DEALER)
        self._socket.linger = 1000
        self._poller = protocol.zmq.Poller()
        self._poller.register(self._socket, protocol.zmq.POLLIN)
        self._told = False  # by the first rank, that the set has failed, or is done

    def send(self, pairs: Iterable[tuple[str, Tensor]]) -> int:
        try:
            self._socket.connect(self._sender._first)
            self._say(m.Here(self._sender.rank))
            return self._send(pairs)
        except BaseException as error:
            if not self._told:
                why = str(error) if isinstance(error, Exception) else "it was interrupted"
                self._say(m.Failed(f"rank {self._sender.rank}: {why}"))
            raise
        finally:
            self._socket.close()

    def _send(self, pairs: Iterable[tuple[str, Tensor]]) -> int:
        begin = self._answer("that the set begins", m.Begin)
        pairs = iter(pairs)
        head = next(pairs, None)
        if head is None:
            raise ValueError("weights: no tensors were given")
        self._say(self._inner.offered(begin.kind, head[1].device))
        self._answer("that all ranks' buckets are open", m.Opened)
        freed, waits = lambda: self._answer("an acknowledgement", m.Ack).buffer, lambda: bool(self._socket.poll(0))
        filling = Filling(self._inner._buffers[begin.kind], self._say, freed, waits, checksums=self._inner.checksum)
        given = _Sorted(Expected(begin.welcome.manifest), False, self._sender.known)
        given.put(*head, filling.put)
        for name, tensor in pairs:
            given.put(name, tensor, filling.put)
        filling.finish()
        self._say(m.Ended(given.digest))
        filling.settle()
        if given.later:
            self._answer("the other ranks' shards", m.Rest)
        for _, tensor, _ in given.later:
            tensor.full_tensor()
        done = self._answer("the new version", m.Done)
        self._told = True
        return done.weight_version

    def _say(self, message: m.OfRanks) -> None:
        self._socket.send(m.encode(message))

    def _answer(self, what: str, *kinds: type) -> m.OfRanks:
        seconds = 2 * self._sender.timeout  # the first says who is late, where it is not itself
        protocol.Wait(self._first, seconds, what).until_heard(self._poller)
        message = m.decode_of_ranks(self._socket.recv())
        if isinstance(message, m.Failed):
            self._told = True
            raise HandoverFailed(message.reason)
        if not isinstance(message, kinds):
            raise HandoverFailed(f"weights: rank 0 said {type(message).__name__}, where {what} was due")
        return message


def _addresses(given: str | Sequence[str] | None) -> tuple[str, ...]:
    found = (given,) if isinstance(given, str) else tuple(given or ())
    if not found or not all(isinstance(address, str) and address for address in found):
        raise ValueError(f"ShardedWeightSender: addresses: got {given!r}, expected a receiver's, or those of several")
    if len({*found}) < len(found):
        raise ValueError(f"ShardedWeightSender: addresses: got {list(found)}, expected each once")
    return found


def _read(parts: list[bytes]) -> m.OfRanks:
    return m.decode_of_ranks(b"".join(parts))


def _host() -> str:
    """What processes of one host have in common, and those of no other."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        import socket

        return socket.gethostname()
