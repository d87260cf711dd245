"""A trainer of verl's, as far as its weights go: for rollout.py. Its own methods gather them and hand them over; the
model is made here, random, and not read from files."""

import time
from types import SimpleNamespace

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout.base import get_rollout_class

from vexact_engine.handover.buffers import checksum
from vexact_engine.weights.random import load_random


def digests(named: dict[str, Tensor]) -> dict[str, int]:
    """Of each tensor's bytes."""
    found = {}
    for name, tensor in named.items():
        raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
        found[name] = checksum(torch.cat([raw, raw.new_zeros(-len(raw) % 8)]))
    return found


class Held(FSDPEngine):
    """verl's engine around a model that is there."""

    def __init__(self, module: torch.nn.Module):
        self.module, self.model_config = module, SimpleNamespace(lora={}, hf_config=module.config)
        self._is_offload_param = self._uses_fsdp2_cpu_offload_policy = self._qat_enabled = False


class Trainer(ActorRolloutRefWorker):
    def __init__(self, config, shape: str, layers: int | None):
        Worker.__init__(self)
        device = get_device_name()
        initialize_global_process_group_ray(backend="cpu:gloo" if device == "cpu" else None)
        self.config, self.peft_merge, self.layered_summon, self.base_sync_done = config, False, False, True
        self.rollout = get_rollout_class("vexact", "async")(
            config=omega_conf_to_dataclass(config.rollout), model_config=config.model, device_mesh=None
        )
        model = load_random(shape, dtype=torch.float32, device=device, layers=layers, seed=1).model
        mesh = init_device_mesh(device, (torch.distributed.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        self.actor = SimpleNamespace(engine=Held(model))
        self.seconds, update = [], self.rollout.update_weights

        async def timed(*args, **kwargs) -> None:
            begin = time.perf_counter()
            await update(*args, **kwargs)
            self.seconds.append(time.perf_counter() - begin)

        self.rollout.update_weights = timed

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_seconds(self) -> list[float]:
        """Of each of the rollout's `update_weights`."""
        return self.seconds

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def gather(self) -> float:
        """Seconds of the gathering alone."""
        begin = time.perf_counter()
        for _ in self.actor.engine.get_per_tensor_param()[0]:
            pass
        if get_device_name() == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def digests(self) -> dict[str, int]:
        """Of what the engine should hold."""
        return digests({name: value.bfloat16() for name, value in self.actor.engine.get_per_tensor_param()[0]})
