"""verl's actor and reference policy on aligned ops: their log-probabilities are the rollout's, bit for bit.

    export VERL_ENGINE_VENDOR=vexact    # in every process of the job
    python -m verl.trainer.main_ppo actor_rollout_ref.model.external_lib=vexact_engine.verl.actor \\
        actor_rollout_ref.actor.strategy=fsdp2 actor_rollout_ref.ref.strategy=fsdp2 ...   # or model_engine=veomni

verl imports an external_lib in every process that knows the model: trainers, rollout servers, agent loops. Importing
this one registers two engines under that vendor's name, and does nothing else: no model is touched, nothing of verl is
replaced. verl then builds, shards, steps, offloads, saves and hands over as ever. What differs is that the model is
patched before it is sharded (vexact_ops.patch), and what it is asked for: the log-probabilities of the tokens that are
there, and their entropies, with gradients, formed in the output layer's own call. T x V logits are never held, so
use_fused_kernels, entropy_checkpointing, entropy_from_logits_with_chunking and use_torch_compile change nothing.
actor.freeze_vision_tower, which verl's own engines do not read, keeps the image encoder as it is. Under Ulysses trained
weights are those of no Ulysses with +actor_rollout_ref.model.fused_kernel_options.vexact.whole_gradients=True.

LoRA (model.lora_rank, lora_alpha, target_modules, exclude_modules, lora_adapter_path) is computed unmerged, by the
rollout as by the trainer; its reference policy is the actor without adapters. layered_summon changes nothing.

Refused by name: strategies other than fsdp2 and veomni, LoRA under VeOmni, of Megatron's names, of experts' stacked
weights or merged for the rollout, Liger, quantisation-aware training, router replay, offload of activations,
distillation from top-k, calculate_sum_pi_squared, tiled MLPs, training of MTP's layers, a reference policy that
computes otherwise than its actor, an override_config of what transformers reads elsewhere, and under VeOmni
whole_gradients and an override_config that it would not read.
"""

import copy
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AutoConfig

import vexact_ops as vx
from vexact_ops.patch.facts import compute_dtypes, without_adapters

from . import check_options, check_overrides, check_versions, declared_options, overridden, wants_whole_gradients

check_versions()

from verl.utils import tensordict_utils as tu
from verl.utils.device import get_device_id, get_device_name
from verl.utils.model import convert_weight_keys
from verl.workers import engine as engines
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp import transformer_impl

from .check import Check
from .handed import About, Weights, gathered
from .lora import adapted_names, refuse_adapters

VENDOR = "vexact"
DEVICES = ("cuda", "cpu")
OTHERS = ("fsdp", "fsdp_turbo", "megatron", "mindspeed", "torchtitan", "automodel")
# What stock engines put into a forward for their own fused kernels.
_FUSED = ("temperature", "return_dict", "labels", "shift_labels", "return_log_probs")
# Of images: VeOmni's data path has them beside pixels, grids and positions.
_OF_IMAGES = ("images_seqlens", "image_mask", "video_mask")
_LOG = logging.getLogger(__name__)


class AlignedEngine:
    """What both engines have in common, in front of the stock one in the order of resolution."""

    _reference: "Callable[[], AlignedEngine | None]" = lambda: None  # of this process, with no actor made after it

    def __init__(self, model_config, engine_config, *args, **kwargs):
        refuse(model_config, engine_config)
        self.check = Check(*check_options(model_config))
        self.whole_gradients = wants_whole_gradients(model_config)
        super().__init__(model_config, engine_config, *args, **kwargs)
        self._frozen: list[torch.nn.Parameter] = []

    def initialize(self):
        """verl's, which makes a reference policy just before its actor; ValueError where the two would compute
        otherwise."""
        super().initialize()
        reference, AlignedEngine._reference = AlignedEngine._reference(), lambda: None
        if self.engine_config.forward_only:
            AlignedEngine._reference = weakref.ref(self)
        elif reference is not None and reference.model_config.local_path == self.model_config.local_path:
            self._about().refuse_reference(reference._about())

    def train_batch(self, data, loss_function):
        """verl's; before the first update of a step it is checked that the rollout's log-probabilities are its own. The
        actor's config comes with its loss alone; ValueError where that freezes what is not there."""
        config = getattr(loss_function, "keywords", {}).get("config")
        if getattr(config, "freeze_vision_tower", False):
            if self.aligned.tower is None:
                name = self.aligned.model.config.model_type
                raise ValueError(f"actor.freeze_vision_tower: got True, but {name} has no image encoder")
            self._frozen = list(self.aligned.tower.parameters())
        checked = self.check.before(data, self.infer_batch)
        found = super().train_batch(data, loss_function)
        if self.is_mp_src_rank_with_outputs():
            found["metrics"]["rollout_checked"] = [float(checked)]  # tokens, on average of a rank
        return found

    def optimizer_step(self):
        for parameter in self._frozen:  # neither a step, nor decay, nor a part of the norm
            parameter.grad = None
        return super().optimizer_step()

    def prepare_model_inputs(self, micro_batch):
        for name in ("distillation_use_topk", "calculate_sum_pi_squared"):
            if tu.get_non_tensor_data(data=micro_batch, key=name, default=False):
                raise NotImplementedError(f"{name}: it needs T x V logits, which the vexact actor never holds")
        inputs, kept = super().prepare_model_inputs(micro_batch)
        for name in (*_FUSED, *_OF_IMAGES):
            inputs.pop(name, None)
        _count_time(inputs, kept, micro_batch)
        target, rows = kept["input_ids_rmpad_rolled"], None
        temperature = micro_batch["temperature"]
        if tu.get_non_tensor_data(data=micro_batch, key="use_remove_padding", default=True):
            if isinstance(temperature, Tensor):
                temperature = kept["temperature_rmpad"]
        else:
            mask = inputs["attention_mask"].bool()
            rows = mask.flatten().nonzero()[:, 0]
            if isinstance(temperature, Tensor):
                temperature = kept["temperature"].repeat_interleave(mask.sum(1))
        entropy = bool(tu.get_non_tensor_data(data=micro_batch, key="calculate_entropy", default=False))
        tokens = micro_batch["input_ids"].values().shape[0] if rows is None else None  # what follows is filling
        inputs["vexact_score"] = vx.patch.Score(target, rows, temperature, entropy, tokens)
        return inputs, kept

    def get_per_tensor_param(self, *args, **kwargs):
        """verl's, in the dtypes that this engine's forward computes with: a router that transformers keeps in fp32 is
        rounded for it by FSDP2's mixed precision, and so is what a rollout gets. With what each rank holds of them,
        ungathered, for a rollout that takes that. With LoRA those of the base and of its adapters together: what verl's
        worker hands over in two parts, and in a standalone run the first alone, is one set here."""
        if self.model_config.lora_rank > 0:
            held = adapted_names(self.module.state_dict(), self.module)
            items = ((name, gathered(tensor, get_device_id())) for name, tensor in held.items())
            computes = adapted_names(self._computes(), self.module)
            return Weights(items, computes, self._about(), self.check.of, held), None
        items, adapters = super().get_per_tensor_param(*args, **kwargs)
        computes, held = convert_weight_keys(self._computes(), self.module), None
        if getattr(self.engine_config, "expert_parallel_size", 1) == 1:  # or experts are no DTensors of all ranks
            held = convert_weight_keys(self.module.state_dict(), self.module)
        return Weights(items, computes, self._about(), self.check.of, held), adapters

    def _computes(self) -> dict[str, torch.dtype]:
        buffers = {name: buffer.dtype for name, buffer in self.module.named_buffers(remove_duplicate=False)}
        return compute_dtypes(self.module) | buffers  # FSDP2 casts no buffer

    def _about(self) -> About:
        embedding = self.module.get_input_embeddings().weight
        name = next(name for name, parameter in self.module.named_parameters() if parameter is embedding)
        numerics = self.aligned.numerics(get_device_name(), rounded=True)
        return About(numerics, str(self._computes()[name]).removeprefix("torch."), self.computes_by)

    def prepare_model_outputs(self, output, output_args, micro_batch, logits_processor_func):
        pad, offsets = output_args.get("pad_size", 0), micro_batch["input_ids"].offsets()
        values = (self._gather_and_unpad_packed(value, pad) for value in output)
        return {
            name: torch.nested.nested_tensor_from_jagged(value, offsets)
            for name, value in zip(("log_probs", "entropy"), values)
        }


def clip_by_rows(parameters, max_norm: float, **options) -> Tensor:
    """In the place of clip_grad_norm_, with whole gradients: the norm is that of any number of ranks."""
    kept = list(parameters)
    grads = [p.grad for p in kept]
    norm = vx.patch.norm_by_rows(kept, grads)
    scale = vx.patch.clip(norm, max_norm)
    for grad in grads:
        if grad is not None:
            (grad.to_local() if hasattr(grad, "to_local") else grad).mul_(scale)
    return norm


def _count_time(inputs: dict, kept: dict, micro_batch) -> None:
    """Where videos have their pace, positions follow from it, as a rollout counts them: verl's do not. In a list: FSDP2
    rounds tensors on their way into a module."""
    if (seconds := inputs.get("second_per_grid_ts")) is None:
        return
    inputs["second_per_grid_ts"] = seconds.tolist()
    inputs["position_ids"] = None
    if inputs["attention_mask"] is None and "cu_seq_lens_q" not in inputs:
        ends = micro_batch["input_ids"].offsets()
        if pad := kept.get("pad_size", 0):
            ends = torch.cat((ends, ends[-1:] + pad))
        inputs["cu_seq_lens_q"] = ends.to(inputs["input_ids"].device, torch.int32)


class AlignedFSDPEngine(AlignedEngine, engines.FSDPEngineWithLMHead):
    """verl's FSDP2 engine; `aligned` is the handle of its patch."""

    computes_by = "actor.fsdp_config.mixed_precision.param_dtype"

    def _build_module(self):
        # Whatever attention it is built with is replaced, and eager is the one that each class of transformers has.
        config = copy.deepcopy(self.model_config.hf_config)
        config._attn_implementation = "eager"
        # verl's fused kernels replace the forward of the model's class, for everyone in the process
        with _changed(self, "model_config", hf_config=config, use_fused_kernels=False), _without_patches():
            return super()._build_module()

    def _build_fsdp_module(self, module):
        options = _patch_options(self.model_config)
        options["sequence_parallel"] = self.ulysses_parallel_group
        try:
            self.aligned = vx.patch.hf(module, **options, whole_gradients=self.whole_gradients)
        except vx.patch.UnsupportedModule as error:
            if "LoRA" not in str(error):
                raise
            given = self.model_config.target_modules
            raise vx.patch.UnsupportedModule(f"model.target_modules: got {given}: {error}") from error
        if self.rank == 0:
            _LOG.info("the model on aligned ops:\n%s", self.aligned.report())
        return super()._build_fsdp_module(module)

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """For the reference policy: verl's, but that adapters stay parameters to train. PEFT's own turns that off and
        on again on what a layer has then, of the two of each that FSDP2 has, and where it keeps weights gathered
        (reshard_after_forward=False) the other one is never trained again."""
        with without_adapters(self.module):
            yield

    def optimizer_step(self):
        if not self.whole_gradients:
            return super().optimizer_step()
        with _replaced(transformer_impl, "fsdp2_clip_grad_norm_", clip_by_rows):
            return super().optimizer_step()


@contextmanager
def _replaced(owner, name: str, other) -> Iterator[None]:
    found = getattr(owner, name)
    setattr(owner, name, other)
    try:
        yield
    finally:
        setattr(owner, name, found)


def _without_patches():
    """verl's patches give a model's classes other forwards, for everyone in the process; ours takes their place. Those
    of models of images are of older classes than transformers 5.22 has, or cannot be imported."""
    return _replaced(transformer_impl, "apply_monkey_patch", lambda *args, **kwargs: None)


def _veomni_engine() -> type[BaseEngine]:
    if engines.VeOmniEngineWithLMHead is None:
        return RefusedEngine

    class AlignedVeOmniEngine(AlignedEngine, engines.VeOmniEngineWithLMHead):
        """verl's VeOmni engine, on VeOmni's kernels named vexact whatever its config says; `aligned` as above."""

        computes_by = "actor.veomni.mixed_precision"

        def _build_model_optimizer(self):
            check_versions(veomni=True)
            if torch.distributed.get_world_size() == 1 and self.engine_config.mixed_precision:
                raise ValueError(
                    "veomni.mixed_precision: got True on one rank, where VeOmni shards nothing and leaves weights in "
                    "fp32: set it to False and veomni.init_device to cuda (weights in bf16), or take strategy=fsdp2"
                )
            self.veomni = vx.patch.veomni()
            with _changed(self, "engine_config", **self.veomni.fields):
                super()._build_model_optimizer()

        def _maybe_apply_async_activation_offload(self, module):
            # built, and not sharded yet
            self.aligned = self.veomni.cover(module, **_patch_options(self.model_config))
            super()._maybe_apply_async_activation_offload(module)

    return AlignedVeOmniEngine


class RefusedEngine(BaseEngine):
    """In the place of stock engines that verl would take instead of an aligned one, and of VeOmni's where it is not."""

    def __init__(self, model_config, engine_config, *args, **kwargs):
        refuse(model_config, engine_config)
        check_versions(veomni=True)
        raise RuntimeError("strategy: got veomni, which verl could not import here: its log has the reason")


_STRATEGIES = (
    "but VERL_ENGINE_VENDOR=vexact serves fsdp2 and veomni: set actor_rollout_ref.actor.strategy and "
    "actor_rollout_ref.ref.strategy"
)


def refuse(model_config, engine_config) -> None:
    """raises NotImplementedError naming a setting of verl's under which the actor's bits would not be the rollout's"""
    if engine_config.strategy in OTHERS:
        raise NotImplementedError(f"strategy: got {engine_config.strategy}, {_STRATEGIES}")
    heads = getattr(model_config.hf_config, "num_attention_heads", 0)
    for name in ("ulysses_sequence_parallel_size", "ulysses_parallel_size"):
        if heads % (size := getattr(engine_config, name, 1)):
            raise ValueError(f"{name}: got {size}, expected a divisor of num_attention_heads, {heads}")
    refuse_adapters(model_config, engine_config.strategy)
    if (model_config.tiled_mlp or {}).get("enabled"):
        raise NotImplementedError(
            "tiled_mlp.enabled: got True, expected False: it replaces forwards of the model, which aligned ones are in "
            "the place of"
        )
    if model_config.mtp.enable and model_config.mtp.enable_train:
        raise NotImplementedError("mtp.enable_train: got True, expected False: of a model the layers alone are trained")
    check_overrides(model_config)
    if engine_config.strategy == "veomni":
        _refuse_overrides(model_config)
    if model_config.use_liger:
        raise NotImplementedError("use_liger: got True, expected False: its kernels are not aligned")
    for name, config in (
        ("enable_activation_offload", model_config),
        ("enable_async_activation_offload", engine_config),
    ):
        if getattr(config, name, False):
            raise NotImplementedError(
                f"{name}: got True, expected False: it replaces forwards of the model and was not seen to keep the "
                "bits; parameters and the optimizer may be offloaded"
            )
    if wants_whole_gradients(model_config) and engine_config.strategy != "fsdp2":
        raise NotImplementedError(
            f"whole_gradients: got True with strategy={engine_config.strategy}, expected fsdp2: VeOmni's norms of "
            "gradients, and its experts on several ranks, were not seen to be those of one rank"
        )
    qat = getattr(engine_config, "qat", None)
    if qat is not None and qat.enable:
        raise NotImplementedError("qat.enable: got True, expected False: quantised weights are not aligned")
    if (kind := getattr(engine_config, "qat_implementation", "none")) != "none":
        raise NotImplementedError(f"qat_implementation: got {kind}, expected none: quantised weights are not aligned")
    replay = getattr(engine_config, "router_replay", None)
    if replay is not None and replay.mode != "disabled":
        raise NotImplementedError(
            f"router_replay.mode: got {replay.mode}, expected disabled: the rollout's and the trainer's routers choose "
            "the same experts, bit for bit, and the rollout records none"
        )


def _refuse_overrides(model_config) -> None:
    """VeOmni makes its model of the file, whatever override_config says."""
    if not model_config.override_config:
        return
    path = model_config.local_hf_config_path
    file = AutoConfig.from_pretrained(path, trust_remote_code=model_config.trust_remote_code)
    for name, got, wanted in overridden(model_config, file):
        raise ValueError(
            f"override_config.{name}: got {wanted!r}, but {path}/config.json has {got!r}, which VeOmni reads: write it "
            "there"
        )


def _patch_options(model_config) -> dict:
    options = declared_options(model_config)
    return {"latent": options.pop("latent_attention"), **options}


@contextmanager
def _changed(engine, attribute: str, **values) -> Iterator[None]:
    """A copy of the engine's config with other values in its place; verl's configs are frozen, their owner's stays."""
    own = getattr(engine, attribute)
    other = copy.copy(own)
    other.__dict__.update(values)
    setattr(engine, attribute, other)
    try:
        yield
    finally:
        setattr(engine, attribute, own)


def register() -> None:
    """Our engines in verl's registry, under the vendor's name; a second call changes nothing.

    raises  RuntimeError where VERL_ENGINE_VENDOR does not choose them: verl would take its own, and say nothing
    """
    served = {"fsdp2": AlignedFSDPEngine, "veomni": AlignedVeOmniEngine, **dict.fromkeys(OTHERS, RefusedEngine)}
    known = EngineRegistry._engines.get("language_model", {})
    for backend, cls in served.items():
        devices = [device for device in DEVICES if (device, VENDOR) not in known.get(backend, {})]
        EngineRegistry.register("language_model", backend, devices, vendor=VENDOR)(cls)
    chosen = os.environ.get("VERL_ENGINE_VENDOR")
    if chosen != VENDOR:
        raise RuntimeError(
            f"VERL_ENGINE_VENDOR: got {chosen}, expected {VENDOR}: without it verl takes its own actor. Set it in the "
            "environment of every process of the job"
        )


AlignedVeOmniEngine = _veomni_engine()
register()
