"""The trainer's end of the rollout: in each rank of a hybrid trainer, or in each of verl's CheckpointEngineWorkers."""

import os
from collections.abc import AsyncIterator

import ray
from torch import Tensor
from verl.utils.device import get_device_name
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.utils import ensure_async_iterator

import vexact_ops as vx

from ..weights.sender import WeightSender
from . import attention_options, check_versions
from .server import Options, server_name

_LARGEST_BUCKET = 512 << 20  # bytes; there are two of them, and larger ones are no faster


class ServerAdapter(BaseRollout):
    """Tells the server of its replica what verl tells each rank, and sends it the weights.

    replica_rank     the replica's; -1: by the rank in the trainer's world
    is_leader_rank   whether this rank is the one that talks to the server; the others take part in what is collective
    raises           ValueError, TypeError on options of the rollout that it does not have, or that are no options
    """

    def __init__(self, config, model_config, device_mesh=None, replica_rank: int = -1):
        check_versions()
        super().__init__(config, model_config, device_mesh)
        self._options = Options.of(self.config)
        rank, size = int(os.environ["RANK"]), self.config.pipeline_model_parallel_size
        self.replica_rank = rank // size if replica_rank == -1 else replica_rank
        self.rollout_rank = rank % size
        self.is_leader_rank = self.rollout_rank == 0
        self.sleep_level = 2  # verl sets 1 for LoRA adapters, which are refused
        self._sender: WeightSender | None = None

    async def resume(self, tags: list[str]) -> None:
        """Memory is taken again: of "weights" before an update, of "kv_cache" after it."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server().wake_up.remote(tags=list(tags))

    async def release(self) -> None:
        """Memory of weights and caches is given back."""
        if self.is_leader_rank and self.config.free_cache_engine:
            await self._server().sleep.remote()

    async def update_weights(
        self, weights, global_steps: int | None = None, wire_format: str = "named_tensors", **kwargs
    ) -> None:
        """All weights, to the server. Every rank takes every item, whatever fails: each is a collective.

        weights       an iterator, asynchronous or not, of (Hugging Face name, whole tensor) in the trainer's dtype
        global_steps  what the server calls these weights once it computes with them
        raises        HandoverFailed, PeerLost, with what the engine has now; NotImplementedError, before any item
        """
        if wire_format != "named_tensors":
            raise NotImplementedError(f"vexact: wire_format: got {wire_format!r}, expected named_tensors")
        if kwargs.get("peft_config") is not None:
            raise NotImplementedError(
                "vexact: LoRA adapters that are not merged: set actor_rollout_ref.model.lora.merge=True"
            )
        items = ensure_async_iterator(weights)
        try:
            if self.is_leader_rank:
                await self._send(items, global_steps)
        finally:
            async for _ in items:
                pass

    async def _send(self, items: AsyncIterator[tuple[str, Tensor]], global_steps: int | None) -> None:
        server = self._server()
        sender = self._sender_to(await server.get_weights_address.remote())
        received = server.receive_weights.remote()
        await sender.asend(items)
        await received
        if global_steps is not None:
            await server.set_global_steps.remote(global_steps)

    def _server(self) -> "ray.actor.ActorHandle":
        """Servers start after the trainers, and one that has died may have a successor."""
        return ray.get_actor(server_name(self.replica_rank))

    def _sender_to(self, address: str) -> WeightSender:
        if self._sender is not None and self._sender.address != address:
            self._sender.close()
            self._sender = None
        if self._sender is None:
            bucket = self.config.checkpoint_engine.update_weights_bucket_megabytes << 20
            self._sender = WeightSender(
                address,
                numerics=trainer_numerics(self.model_config),
                bucket_bytes=min(bucket, _LARGEST_BUCKET),
                timeout=self._options.timeout,
            )
        return self._sender

    def generate_sequences(self, prompts):
        raise NotImplementedError("vexact: generate_sequences: requests go through verl's LLMServerClient")


def trainer_numerics(model_config) -> dict:
    """What fixes the bits of a trainer in this process."""
    options = attention_options(model_config)
    options["latent_attention"] = options["latent_attention"] or None
    return vx.numerics(get_device_name(), **options)
