"""The trainer's end of the rollout: in each rank of a hybrid trainer, or in each of verl's CheckpointEngineWorkers."""

import logging
import os
import sys
from typing import Any

from . import check_versions, declared_options

check_versions()
import ray
import torch.distributed as dist
from verl.utils.device import get_device_id, get_device_name
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

import vexact_ops as vx

from ..errors import HandoverFailed
from ..handover.sender import WeightSender
from ..handover.shards import ShardedWeightSender
from ..weights.load import as_dtype
from .handed import About, Held, Weights, said, taken
from .lora import rollout_adapter
from .server import LARGEST_BUCKET, check_trained, engine_options, server_name

_VENDOR, _ACTOR = "vexact", f"{__package__}.actor"
_LOG = logging.getLogger(__name__)
_OF_STOCK = (
    "vexact: actor_rollout_ref.model.lora_rank: got adapters of verl's own actor, expected 0: it hands them over apart "
    "from the weights, or not at all, and its log-probabilities are not the rollout's. Set VERL_ENGINE_VENDOR=vexact "
    f"and model.external_lib={_ACTOR} for an actor whose are (and rollout.checkpoint_engine.backend=vexact where "
    "replicas are on GPUs of their own), or model.lora.merge=True for one with others"
)


class ServerAdapter(BaseRollout):
    """Tells the server of its replica what verl tells each rank, and sends it the weights.

    replica_rank     the replica's; -1: by the rank in the trainer's world
    is_leader_rank   whether this rank tells the server what to do. Where the replica's ranks, on one node, hold all
                     weights of an aligned trainer together, or by engine_kwargs.vexact.shards those of several replicas
                     do, each sends what it holds, to all of these replicas. Otherwise the first rank on each of the
                     replica's nodes sends whole tensors there, and the others take part in what is collective
    raises           ValueError, TypeError, naming an option of the rollout that it does not have
    """

    def __init__(self, config, model_config, device_mesh=None, replica_rank: int = -1):
        super().__init__(config, model_config, device_mesh)
        options = engine_options(self.config)[1]
        self._timeout, self._to_several = options["timeout"], options["shards"] == "replicas"
        check_trained(self.config)
        self._adapted = rollout_adapter(self.model_config) is not None
        rank = self._rank = int(os.environ["RANK"])
        size = self.config.pipeline_model_parallel_size * self.config.tensor_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % size == 0
        each = min(self.config.n_gpus_per_node, size)  # ranks on a node
        self._node, self._sends = rank % size // each, rank % each == 0
        self._size = size
        self._sender: WeightSender | ShardedWeightSender | None = None

    async def resume(self, tags: list[str]) -> None:
        """Memory is taken again: of "weights" before an update, of "kv_cache" after it."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server().wake_up.remote(tags=list(tags))

    async def release(self) -> None:
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server().sleep.remote()

    async def update_weights(
        self, weights, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs
    ) -> None:
        """All weights, to the replica's part on this node; of LoRA's the adapters alone where all replicas have the
        base still, as they do without rollout.free_cache_engine. Every rank takes every item, whatever fails: each is a
        collective; or, where each sends what it holds, no rank takes any, and what fails on one, or at one of their
        replicas, is raised on all.

        weights   an iterator, asynchronous or not, of (Hugging Face name, whole tensor). An aligned trainer's say what
                  they are of (handed.About), and who holds which; verl's own actor's do not, and are taken for what the
                  options say
        global_steps   their step; None: that of the last ones, which are sent again, as verl does where a reward model
                  has had the GPUs in the middle of a validation
        raises    HandoverFailed, PeerLost, with what the engine has now: the same on all of a replica's nodes, of which
                  the one is named that it failed on; ValueError where the trainer computes in
                  another dtype than rollout.dtype; RuntimeError where VERL_ENGINE_VENDOR asks for the aligned actor,
                  and model.external_lib names none; NotImplementedError, before any item
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(f"vexact: wire_format: got {wire_format!r}, expected named_tensors")
        if kwargs.get("peft_config") is not None:
            raise NotImplementedError(_OF_STOCK)
        if isinstance(weights, Weights) and self._adapted and await self._have_base():
            weights = weights.adapters()
        if isinstance(weights, Weights) and (held := self._held(weights)) is not None:
            await self._update_by_shards(weights, held, global_steps)
            return
        items = ensure_async_iterator(taken(weights, get_device_id()))
        try:
            about = await weights.begin() if hasattr(weights, "begin") else getattr(weights, "about", None)
            if about is not None:
                about.refuse(as_dtype(self.config.dtype, get_device_name()))
            elif self._adapted:
                raise NotImplementedError(_OF_STOCK)
            elif os.environ.get("VERL_ENGINE_VENDOR") == _VENDOR and _ACTOR not in sys.modules:
                raise RuntimeError(
                    f"vexact: actor_rollout_ref.model.external_lib: expected {_ACTOR}, as VERL_ENGINE_VENDOR is "
                    f"{_VENDOR}: without it verl has taken its own actor, whose log-probabilities are not the rollout's"
                )
            if self._sends:
                server = self._server()
                sender = self._sender_to(await server.get_weights_address.remote(self._node), about)
                received = server.receive_weights.remote() if self.is_leader_rank else None
                await sender.asend(items)
                if received is not None:
                    await self._received(server, received, global_steps)
            said(weights, global_steps)
        finally:
            async for _ in items:
                pass

    async def _received(self, server: "ray.actor.ActorHandle", received, global_steps: int | None) -> None:
        await received
        await server.set_global_steps.remote(global_steps)

    async def _have_base(self) -> bool:
        """Whether all replicas have what a trainer's adapters are of, from an update before; the same on all ranks."""
        own = True
        if self.is_leader_rank:
            try:
                own = await self._server().has_base.remote()
            except Exception as error:  # it is raised where something is sent to that server
                _LOG.debug("vexact: replica %d: %s", self.replica_rank, error)
                own = False
        found: list = [None] * dist.get_world_size()
        dist.all_gather_object(found, own)
        return all(found)

    def _held(self, weights: Weights) -> Held | None:
        """What this rank can send of all weights, where the ranks of one replica, or of as few as can be where they may
        be several, hold them together and are on one node; alike on all of the trainer's ranks. None too where this
        rank holds all."""
        world, node = dist.get_world_size(), self.config.n_gpus_per_node
        if world == 1 or weights.held_by(range(self._rank, self._rank + 1)) is not None:
            return None
        for count in range(self._size, (world if self._to_several else self._size) + 1, self._size):
            first = self._rank // count * count
            if world % count or (node % count and world > node):
                continue
            if count > 1 and (held := weights.held_by(range(first, first + count))) is not None:
                return held
        return None

    async def _update_by_shards(self, weights: Weights, held: Held, global_steps: int | None) -> None:
        server, address, wrong = None, None, None
        try:
            weights.about.refuse(as_dtype(self.config.dtype, get_device_name()))
            if self.is_leader_rank:
                server = self._server()
                address = await server.get_weights_address.remote(self._node)
        except BaseException as error:  # the others wait to hear of it
            wrong = error
        addresses, kept = self._agreed(address, weights.about, held.group, wrong)
        received = server.receive_weights.remote() if server is not None else None
        if not kept:  # servers that go on let go of the buckets of before, now that they receive
            self._close()
            told = {"numerics": weights.about.numerics, "group": held.group, **self._sender_options()}
            self._sender = ShardedWeightSender(addresses, **told)
        self._sender.send(weights.shards(held, get_device_id()))
        if received is not None:
            await self._received(server, received, global_steps)
        said(weights, global_steps)

    def _server(self) -> "ray.actor.ActorHandle":
        """Servers start after the trainers, and one that has died may have a successor."""
        return ray.get_actor(server_name(self.replica_rank))

    def _sender_to(self, address: str, about: About | None = None) -> WeightSender:
        if about is None:
            options = declared_options(self.model_config)  # the trainer's; the engine's may be others
            numerics = vx.numerics(get_device_name(), **{name: value or None for name, value in options.items()})
        else:
            numerics = about.numerics
        held = self._sender
        if not isinstance(held, WeightSender) or (held.address, held.numerics) != (address, numerics):
            self._close()
            self._sender = WeightSender(address, numerics=numerics, **self._sender_options())
        return self._sender

    def _agreed(
        self, address: str | None, about: About, group: dist.ProcessGroup | None, wrong: BaseException | None
    ) -> tuple[tuple[str, ...], bool]:
        """By all of the group's ranks together, unless something is wrong with one: the addresses that the replicas'
        first ranks give, and whether all have a sender to these."""
        held = self._sender if isinstance(self._sender, ShardedWeightSender) else None
        why = "" if wrong is None else f"{type(wrong).__name__}: {wrong}"
        own = held.addresses if held is not None and held.numerics == about.numerics else None
        found: list = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, (self._rank, address, own, why), group=group)
        if wrong is not None:
            raise wrong
        for rank, *_, why in found:
            if why:
                raise HandoverFailed(f"weights: rank {rank} of the trainer: {why}")
        addresses = tuple(address for _, address, *_ in found[:: self._size])
        return addresses, all(own == addresses for *_, own, _ in found)

    def _sender_options(self) -> dict[str, Any]:
        size = min(self.config.checkpoint_engine.update_weights_bucket_megabytes << 20, LARGEST_BUCKET)
        return {"bucket_bytes": size, "timeout": self._timeout}

    def _close(self) -> None:
        if self._sender is not None:
            self._sender.close()
            self._sender = None
