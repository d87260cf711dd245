"""A trainer without training, for the tests of the rollout: its workers hold weights that are a function of a number,
and give them away as verl's do."""

import os

import torch
from transformers import AutoModelForCausalLM
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_device_name
from verl.utils.import_utils import import_external_libs
from verl.workers.rollout.base import get_rollout_class

from vexact_engine.verl import adapter


def weights(path, seed, dtype=torch.float32):
    """A model with weights that nobody else has, as a trainer holds them."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * 0.15 if parameter.dim() > 1 else 1 + noise * 0.1)
    return model


class Trainer(Worker):
    """What of verl's ActorRolloutRefWorker has to do with weights."""

    def __init__(self, rollout_config, model_config):
        super().__init__()
        adapter.LARGEST_BUCKET = 8192  # so that a small model has many, as large ones have
        self.config, self.path = omega_conf_to_dataclass(rollout_config), model_config.path
        engine = self.config.checkpoint_engine
        self.rollout = get_rollout_class("vexact", "async")(
            config=self.config, model_config=model_config, device_mesh=None
        )
        import_external_libs(engine.custom_backend_module or None)
        self.checkpoint_engine = CheckpointEngineRegistry.new(
            engine.backend,
            is_master=int(os.environ["RANK"]) == 0,
            bucket_size=engine.update_weights_bucket_megabytes << 20,
            **engine.engine_kwargs.get(engine.backend, {}),
        )
        self.taken = 0
        self.spoil = None

    def _weights(self, seed):
        for name, tensor in weights(self.path, seed).state_dict().items():
            self.taken += 1
            tensor = tensor.to(get_device_name())
            if self.spoil == "die" and self.taken == 12:
                os._exit(1)
            if self.spoil == "raise" and self.taken == 4:
                raise RuntimeError("a rank has failed")
            yield name, tensor[:1] if self.spoil == "shape" and self.taken == 4 else tensor

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_spoil(self, how):
        self.spoil = how

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def get_taken(self):
        return self.taken

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps=None, mode="auto"):
        self.taken = 0
        seed = global_steps or 0
        if mode != "naive":
            return await self.checkpoint_engine.send_weights(self._weights(seed), global_steps=global_steps) or {}
        if self.config.free_cache_engine:
            await self.rollout.resume(tags=["weights"])
        await self.rollout.update_weights(
            self._weights(seed), peft_config=None, base_sync_done=True, global_steps=global_steps
        )
        if self.config.free_cache_engine:
            await self.rollout.resume(tags=["kv_cache"])

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method, *args, **kwargs):
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)


def rollout_config(path, *overrides):
    """verl's whole config, with our rollout of small sizes."""
    import verl
    from hydra import compose, initialize_config_dir

    rollout = {
        "name": "vexact",
        "tensor_model_parallel_size": 1,
        "n_gpus_per_node": 2,
        "prompt_length": 32,
        "response_length": 16,
        "max_num_seqs": 64,
        "checkpoint_engine.update_weights_bucket_megabytes": 1,
    }
    given = [f"actor_rollout_ref.rollout.{name}={value}" for name, value in rollout.items()]
    given += [
        f"actor_rollout_ref.model.path={path}",
        "+actor_rollout_ref.model.override_config.attn_implementation=sdpa",
        "+actor_rollout_ref.rollout.engine_kwargs.vexact.num_pages=256",
    ]
    if os.environ.get("VERL_ENGINE_VENDOR"):
        given += ["actor_rollout_ref.model.external_lib=vexact_engine.verl.actor"]
    with initialize_config_dir(os.path.join(os.path.dirname(verl.__file__), "trainer/config"), version_base=None):
        return compose("ppo_trainer", overrides=[*given, *overrides])


class Lone:
    """An adapter in a process of its own, where a trainer's rank would be."""

    def __init__(self, rollout_config, model_config, replica_rank):
        os.environ.update(RANK="0", RAY_LOCAL_WORLD_SIZE="1")
        self.path = model_config.path
        self.rollout = get_rollout_class("vexact", "async")(
            config=omega_conf_to_dataclass(rollout_config),
            model_config=model_config,
            device_mesh=None,
            replica_rank=replica_rank,
        )

    async def update(self, seed):
        async def items():
            for item in weights(self.path, seed).state_dict().items():
                yield item

        await self.rollout.update_weights(items(), global_steps=seed)
