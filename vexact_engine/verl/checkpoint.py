"""rollout.checkpoint_engine.backend=vexact, with custom_backend_module=vexact_engine.verl.checkpoint: for disaggregated
runs, from the trainer's first rank to every rollout worker, over gloo on CPUs and NCCL on GPUs. A store beside the
process group says what comes next, so that nobody enters a collective that another one does not."""

import itertools
import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

from . import check_versions

check_versions()
import msgspec
import ray
import torch
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

import vexact_ops as vx

from ..errors import HandoverFailed, PeerLost
from ..handover.messages import Part
from ..handover.packing import ALIGN, pack, unpack
from ..handover.protocol import until
from .handed import About, said, taken
from .server import LARGEST_BUCKET


class Bucket(msgspec.Struct):
    """What lies in the next bytes. Without parts there are none: that was all, or why it was not; the first has none
    either, but what the trainer's weights are of, where that is known."""

    parts: tuple[Part, ...] = ()
    used: int = 0
    error: str = ""
    about: About | None = None


class Arriving:
    """What a rollout worker receives, (name, tensor) by (name, tensor): each good until the next is asked for.

    about   what they are of, once `begin` has returned; None where the trainer has not said it
    """

    def __init__(self, engine: "Broadcast") -> None:
        self._engine, self._begun, self.about = engine, False, None

    async def begin(self) -> About | None:
        if not self._begun:
            self._begun = True
            self.about = self._engine._guarded(self._engine._next_bucket).about
        return self.about

    async def __aiter__(self) -> AsyncIterator[tuple[str, Tensor]]:
        await self.begin()
        try:
            for item in unpack(self._engine._received()):
                yield item
        except BaseException:
            self._engine._leave()
            raise


@CheckpointEngineRegistry.register("vexact")
class Broadcast(CheckpointEngine):
    """
    bucket_size   bytes of each of the sender's two buckets, at most 512 MiB; larger tensors go in pieces
    is_master     whether this is the trainer's first rank
    timeout       seconds that any one message may take; rollout.checkpoint_engine.engine_kwargs.vexact.timeout
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = 120.0) -> None:
        if bucket_size < 4096 or not timeout > 0:
            got = f"bucket_size: got {bucket_size}, timeout: got {timeout}"
            raise ValueError(f"vexact: checkpoint_engine: {got}, expected 4096 bytes or more, and seconds above 0")
        self.bucket_size, self.is_master = min(bucket_size, LARGEST_BUCKET) // ALIGN * ALIGN, is_master
        self.timeout, self.device = timedelta(seconds=timeout), get_device_name()
        self._master = self._group = None  # a store, the first rank's; a process group
        self._leave()

    def _leave(self) -> None:
        """The group, if any, is no more: at the next update it is made anew, for this is another member."""
        if self._group is not None and self.device != "cpu":
            self._group.abort()  # what waits on a GPU for a peer that has died
        self._member, self._members, self._group = secrets.token_hex(8), None, None

    def prepare(self) -> dict[str, Any]:
        """Who this is, for build_topology."""
        found = {"member": self._member, "numerics": vx.numerics(self.device)}
        if self.is_master:
            host = ray.util.get_node_ip_address().strip("[]")
            if self._master is None:
                self._master = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=self.timeout)
            found |= {"store": (host, self._master.port), "name": secrets.token_hex(8)}
        return found

    @classmethod
    def build_topology(cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]):
        """The trainer's first rank sends. Raises HandoverFailed where a worker's numerics are not the trainer's."""
        first, *workers = metadata[0], *metadata[actor_wg_world_size:]
        for rank, worker in enumerate(workers):
            if differ := vx.numerics_difference(first["numerics"], worker["numerics"], forward=True):
                found = "; ".join(f"{where}: the trainer has {a!r}, it {b!r}" for where, (a, b) in differ.items())
                raise HandoverFailed(f"weights: refused: numerics of rollout worker {rank}: {found}")
        same = {"members": [w["member"] for w in (first, *workers)], "store": first["store"], "name": first["name"]}
        ranks = [0] + [-1] * (actor_wg_world_size - 1), list(range(1, rollout_world_size + 1))
        return tuple({"rank": of, **{key: [value] * len(of) for key, value in same.items()}} for of in ranks)

    def init_process_group(self, rank: int, members: list[str], store: tuple[str, int], name: str) -> None:
        """A new group where the members are not those of the last one."""
        if rank < 0 or members == self._members:
            return
        self._store = self._master or dist.TCPStore(*store, is_master=False, timeout=self.timeout)
        self._store = dist.PrefixStore(name, self._store)
        kind = dist.ProcessGroupGloo if self.device == "cpu" else dist.ProcessGroupNCCL  # its limit ends the process
        self._group = kind(dist.PrefixStore("group", self._store), rank, len(members), timeout=2 * self.timeout)
        self._rank, self._members, self._index, self._announced = rank, members, 0, []

    def finalize(self) -> None: ...  # the group is kept

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Every rank takes every item, whatever fails: each is a collective of the trainer's."""
        items = iter(taken(weights, self.device))
        try:
            if self._group is not None:
                self._announce(Bucket(about=getattr(weights, "about", None)))
                self._send(items)
            said(weights, global_steps)
        except BaseException as e:
            self._store.set(str(self._index), msgspec.msgpack.encode(Bucket(error=f"{type(e).__name__}: {e}")))
            self._leave()
            raise
        finally:
            for _ in items:
                pass

    def _send(self, items: Iterator[tuple[str, Tensor]]) -> None:
        buffers = [torch.empty(self.bucket_size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        works: list[dist.Work] = []
        for memory, parts in pack(items, itertools.cycle(buffers)):
            self._announce(Bucket(tuple(parts), len(memory)))
            works.append(self._group.broadcast(memory, 0))
            if len(works) > 1:
                works[-2].wait()  # what is filled next is what it reads
        if works:
            works[-1].wait()
        self._announce(Bucket())

    def _announce(self, bucket: Bucket) -> None:
        """Once all are there. What was announced before is forgotten then."""
        others = [f"{self._index}/{rank}" for rank in range(1, len(self._members))]
        for rank, key in enumerate(others):
            self._patiently(self._store.wait, [key], f"rollout worker {rank} of {len(others)}")
        for key in self._announced:
            self._store.delete_key(key)
        self._store.set(str(self._index), msgspec.msgpack.encode(bucket))
        self._announced, self._index = [str(self._index), *others], self._index + 1

    def _patiently(self, ask: Callable, what: Any, who: str) -> Any:
        try:
            return ask(what)
        except dist.DistStoreError as error:
            raise PeerLost(f"weights: {who}: nothing came within {self.timeout.total_seconds():g} s") from error

    def receive_weights(self, global_steps: int | None = None) -> Arriving:
        return Arriving(self)

    def _guarded(self, do: Callable) -> Any:
        try:
            return do()
        except BaseException:
            self._leave()
            raise

    def _next_bucket(self) -> Bucket:
        self._store.set(f"{self._index}/{self._rank}", b"")
        said = self._patiently(self._store.get, str(self._index), "the trainer")
        bucket, self._index = msgspec.msgpack.decode(said, type=Bucket), self._index + 1
        if bucket.error:
            raise HandoverFailed(f"weights: the trainer broke off: {bucket.error}")
        return bucket

    def _received(self) -> Iterator[tuple[Tensor, list[Part]]]:
        memory = torch.empty(self.bucket_size, dtype=torch.uint8, device=self.device)
        while (bucket := self._next_bucket()).parts:
            work = self._group.broadcast(memory[: bucket.used], 0)
            until(work.is_completed, self.timeout.total_seconds(), "the trainer: bytes")  # NCCL's `wait` knows no end
            work.wait()
            yield memory, bucket.parts
