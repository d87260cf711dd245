"""A checkpoint engine for verl's disaggregated runs: from the trainer's first rank to every rollout worker, over a
process group of torch's own, gloo on CPUs and NCCL on GPUs.

    rollout.checkpoint_engine.backend=vexact
    rollout.checkpoint_engine.custom_backend_module=vexact_engine.verl.checkpoint

A store beside the group says what comes next, so that nobody enters a collective that another one does not.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import timedelta
from math import prod
from typing import Any

import msgspec
import ray
import torch
import torch.distributed as dist
from torch import Tensor
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.device import get_device_name

import vexact_ops as vx

from ..errors import HandoverFailed, PeerLost
from ..weights.protocol import Part, dtype_name, dtype_of
from . import check_versions

_LARGEST_BUCKET = 512 << 20
_ALIGN = 16


class Bucket(msgspec.Struct):
    """What lies in the next one. Nothing is sent for one without parts."""

    parts: list[Part] = msgspec.field(default_factory=list)
    used: int = 0
    last: bool = False
    error: str = ""


@CheckpointEngineRegistry.register("vexact")
class Broadcast(CheckpointEngine):
    """
    bucket_size   bytes of each of two buckets, of which at most 512 MiB are used; larger tensors go in pieces
    is_master     whether this is the trainer's first rank
    timeout       seconds that any one message may take; rollout.checkpoint_engine.engine_kwargs.vexact.timeout
    """

    def __init__(self, bucket_size: int, is_master: bool = False, timeout: float = 120.0) -> None:
        check_versions()
        if bucket_size < 4096 or not timeout > 0:
            raise ValueError(
                f"vexact: checkpoint_engine: got bucket_size={bucket_size}, timeout={timeout}, expected 4096 bytes or "
                "more, and seconds above 0"
            )
        self.bucket_size, self.is_master = min(bucket_size, _LARGEST_BUCKET) // _ALIGN * _ALIGN, is_master
        self.timeout = timedelta(seconds=timeout)
        self.device = get_device_name()
        self._master: dist.TCPStore | None = None  # the first rank's
        self._leave()

    def _leave(self) -> None:
        """The group, if any, is no more: who asks for members finds another one here."""
        self._member, self._members, self._group = secrets.token_hex(8), None, None
        self._updates, self._keys = 0, []  # of this group: how many, and what the store has of the last

    # Before an update

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
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list], dict[str, list]]:
        """The trainer's first rank sends. Raises HandoverFailed where a worker's numerics are not the trainer's."""
        first, rollout = metadata[0], metadata[actor_wg_world_size:]
        for rank, worker in enumerate(rollout):
            differ = vx.numerics_difference(first["numerics"], worker["numerics"])
            if differ:
                found = "; ".join(f"{where}: the trainer has {a!r}, it {b!r}" for where, (a, b) in differ.items())
                raise HandoverFailed(f"weights: refused: numerics of rollout worker {rank}: {found}")
        members = [first["member"], *(worker["member"] for worker in rollout)]

        def told(ranks: list[int]) -> dict[str, list]:
            same = {"members": members, "store": first["store"], "name": first["name"]}
            return {"rank": ranks} | {key: [value] * len(ranks) for key, value in same.items()}

        return told([0] + [-1] * (actor_wg_world_size - 1)), told(list(range(1, len(members))))

    def init_process_group(self, rank: int, members: list[str], store: tuple[str, int], name: str) -> None:
        """A new group where the members are not those of the last one."""
        if rank < 0 or members == self._members:
            return
        base = self._master or dist.TCPStore(*store, is_master=False, timeout=self.timeout)
        self._store = dist.PrefixStore(name, base)
        given = dist.PrefixStore("group", self._store), rank, len(members)
        if self.device == "cpu":
            self._group = dist.ProcessGroupGloo(*given, self.timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self.timeout
            self._group = dist.ProcessGroupNCCL(*given, options)
        self._rank, self._members, self._updates, self._keys = rank, members, 0, []

    def finalize(self) -> None:
        """Nothing: what a bucket takes is given back at the end of each update, and the group is kept."""

    # An update

    async def send_weights(self, weights: Iterable[tuple[str, Tensor]], global_steps: int | None = None) -> None:
        """Every rank takes every item, whatever fails: each is a collective of the trainer's."""
        items = iter(weights)
        try:
            if self._group is not None:
                self._send(items)
        except BaseException:
            self._leave()
            raise
        finally:
            for _ in items:
                pass

    @torch.no_grad()
    def _send(self, items: Iterator[tuple[str, Tensor]]) -> None:
        for key in self._keys:
            self._store.delete_key(key)
        self._keys, self._index = [], 0
        memory = [torch.empty(self.bucket_size, dtype=torch.uint8, device=self.device) for _ in range(2)]
        bucket = Bucket()
        under_way: list[dist.Work | None] = [None, None]
        try:
            for name, tensor in items:
                flat, start, size = tensor.detach().reshape(-1), 0, tensor.dtype.itemsize
                while start < len(flat):
                    count = min((self.bucket_size - bucket.used) // size, len(flat) - start)
                    if not count:
                        under_way = [under_way[1], self._post(bucket, memory[0])]
                        bucket, memory = Bucket(), memory[::-1]
                        if under_way[0] is not None:
                            under_way[0].wait()
                        continue
                    room = memory[0][bucket.used : bucket.used + count * size]
                    room.view(flat.dtype).copy_(flat[start : start + count])
                    shape, dtype = tuple(tensor.shape), dtype_name(flat.dtype)
                    bucket.parts.append(Part(name, shape, dtype, start, count, bucket.used))
                    bucket.used += -(-count * size // _ALIGN) * _ALIGN
                    start += count
            bucket.last = True
            self._post(bucket, memory[0]).wait()
        except BaseException as error:
            self._store.set(self._key(), msgspec.msgpack.encode(Bucket(error=f"{type(error).__name__}: {error}")))
            raise
        self._updates += 1

    def _key(self) -> str:
        return f"{self._updates}/{self._index}"

    def _post(self, bucket: Bucket, memory: Tensor) -> dist.Work:
        key = self._key()
        for rank in range(1, len(self._members)):
            self._patiently(
                self._store.wait, [f"{key}/{rank}"], f"rollout worker {rank - 1} of {len(self._members) - 1}"
            )
        self._store.set(key, msgspec.msgpack.encode(bucket))
        self._keys += [key, *(f"{key}/{rank}" for rank in range(1, len(self._members)))]
        self._index += 1
        return self._group.broadcast(memory[: bucket.used], 0)

    def _patiently(self, ask: Callable, what: Any, who: str) -> Any:
        try:
            return ask(what)
        except dist.DistStoreError as error:
            raise PeerLost(f"weights: {who}: nothing came within {self.timeout.total_seconds():g} s") from error

    @torch.no_grad()
    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Tensor]]:
        """(name, tensor): good until the next is asked for."""
        memory, whole, bucket, self._index = None, None, Bucket(), 0
        try:
            while not bucket.last:
                key = self._key()
                self._store.set(f"{key}/{self._rank}", b"")
                found = self._patiently(self._store.get, key, "the trainer")
                bucket, self._index = msgspec.msgpack.decode(found, type=Bucket), self._index + 1
                if bucket.error:
                    raise HandoverFailed(f"weights: the trainer broke off: {bucket.error}")
                if memory is None:
                    memory = torch.empty(self.bucket_size, dtype=torch.uint8, device=self.device)
                self._group.broadcast(memory[: bucket.used], 0).wait()
                for name, shape, dtype, start, count, offset in map(msgspec.structs.astuple, bucket.parts):
                    dtype = dtype_of(dtype)
                    values = memory[offset : offset + count * dtype.itemsize].view(dtype)
                    if start == 0:
                        whole = torch.empty(shape, dtype=dtype, device=self.device) if count < prod(shape) else None
                    if whole is None:
                        yield name, values.view(shape)
                        continue
                    whole.view(-1)[start : start + count] = values
                    if start + count == whole.numel():
                        yield name, whole
        except BaseException:
            self._leave()
            raise
        self._updates += 1
