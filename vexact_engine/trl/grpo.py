"""The trainer: TRL's own, on aligned ops, with this engine for its rollouts."""

import contextlib
import copy
import os
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoProcessor, PreTrainedModel

import vexact_ops as vx
from vexact_ops.patch import lora

from ..config import EngineConfig, SamplingParams
from ..engine import Engine
from ..extras import pip_line
from ..request import derive_seed
from .generation import Generation

try:
    import trl
except ModuleNotFoundError as error:
    line = pip_line("trl")
    raise ModuleNotFoundError(f"vexact_engine.trl: not installed: {error.name}. Run: {line}") from error
try:
    import peft
except ModuleNotFoundError:
    peft = None

# What generation_kwargs may name, as SamplingParams does: what leaves an answer's log-probabilities the model's own
_DRAWN = ("top_p", "top_k", "min_p")
_ENDED = ("min_new_tokens", "min_tokens", "stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output")
GENERATION = frozenset((*_DRAWN, *_ENDED))


class GRPOTrainer(trl.GRPOTrainer):
    """TRL's GRPOTrainer: each log-probability that a rollout reports and the one that the loss has are the same bytes.
    So its corrections by importance sampling are exactly 1, and may be left out (`vllm_importance_sampling_correction
    =False`), with the forward that they need.

    model          a name on the Hub or a directory, then loaded in bfloat16 unless `args.model_init_kwargs` names a
                   dtype; or a loaded causal language model, patched here, with LoRA's adapters where it has some. Each
                   process has an engine with a copy of it
    args           a GRPOConfig. `use_vllm` stays False; what it says of memory and length holds for this engine:
                   `vllm_gpu_memory_utilization`, `vllm_max_model_length`, `vllm_enable_sleep_mode`
    engine_config  None: made of those. What of it is part of the numerics (kv_segment, latent_attention, longrope) the
                   trainer's model and its reference have too
    peft_config    a LoraConfig. The engine too computes adapters unmerged; where nothing else is trained, they alone
                   are handed over from the second step on
    raises         ValueError names what would have other bits, or what the engine does not do: adapters but LoRA's,
                   their dropout, Liger, an fp32 head, repetition penalties, noise in embeddings, load balancing losses,
                   DeepSpeed, another generator, quantised weights, fp16 by autocast, an evaluation in another dtype,
                   images, Inductor without its emulate_precision_casts; or a name in `args.generation_kwargs` that is
                   none of GENERATION. TypeError for another model. UnsupportedModule, see vexact_ops.patch.hf

    All else is TRL's, and its own arguments go on to it. Seeds of draws are functions of `args.seed`.
    """

    def __init__(
        self,
        model: "str | os.PathLike | PreTrainedModel",
        reward_funcs: Any,
        args: "trl.GRPOConfig | None" = None,
        *,
        engine_config: EngineConfig | None = None,
        **kwargs: Any,
    ):
        args = trl.GRPOConfig("trainer_output") if args is None else copy.copy(args)
        _refuse(args, kwargs)
        if not isinstance(lora.base_of(model, "vexact_engine.trl: model"), PreTrainedModel):
            if not isinstance(model, str | os.PathLike):
                expected = "a name, a directory or a PreTrainedModel, or one that PEFT has put adapters on"
                raise TypeError(f"vexact_engine.trl: model: got {type(model).__name__}, expected {expected}")
            # TRL makes the reference and reward models of the same, from args
            given = {"trust_remote_code": args.trust_remote_code, **(args.model_init_kwargs or {})}
            if kwargs.get("processing_class") is None:
                options = {name: given[name] for name in ("revision", "trust_remote_code") if name in given}
                sides = {"truncation_side": "left", "padding_side": "left"}
                kwargs["processing_class"] = AutoProcessor.from_pretrained(model, **options, **sides)
            model = AutoModelForCausalLM.from_pretrained(model, **{"dtype": torch.bfloat16, **given})
        if _drops(model) and not args.disable_dropout:
            raise ValueError("vexact_engine.trl: model: its adapters have lora_dropout, expected none")
        config = engine_config or EngineConfig(
            gpu_memory_utilization=args.vllm_gpu_memory_utilization,
            max_model_len=args.vllm_max_model_length,
            show_progress=False,
        )
        whole = copy.deepcopy(model).requires_grad_(False).eval()  # the engine's; a patched model has no copies
        adapted = kwargs.get("peft_config") is not None or lora.base_of(model) is not model
        if not adapted:
            self._handle = vx.patch.hf(model, **config.patch_options)
        super().__init__(model=model, reward_funcs=reward_funcs, args=args, **kwargs)
        if adapted:  # TRL may have put some on
            self._handle = _patched(lora.base_of(self.accelerator.unwrap_model(self.model)), config)
        if self.aux_loss_enabled:
            raise ValueError("vexact_engine.trl: router_aux_loss_coef: expected 0.0: aligned routers have no such loss")
        _refuse_compiler(self.accelerator.state.dynamo_plugin)
        self._patch_reference(config)
        whole = self._adapted(whole, kwargs.get("peft_config"))
        fields = self._sampling(args)
        device, tokenizer = self.accelerator.device, self._tokenizer if fields.get("stop") else False
        self.engine = Engine.from_pretrained(whole, device=device, config=config, tokenizer=tokenizer)
        seed = derive_seed(args.seed, self.accelerator.process_index) % 2**64
        # From here on TRL asks as it would ask vLLM.
        self.use_vllm, self.vllm_mode, self._last_loaded_step = True, "vexact", -1
        sleeps, names = args.vllm_enable_sleep_mode, whole.state_dict().keys()
        self.vllm_generation = Generation(self.engine, self._handle, fields, seed, sleeps, names)

    def _sampling(self, args: "trl.GRPOConfig") -> dict[str, Any]:
        fields = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k or 0}
        fields |= {"min_p": self.min_p or 0.0, "max_new_tokens": self.max_completion_length}
        fields |= args.generation_kwargs or {}
        ids = SamplingParams(**fields).stop_token_ids  # raises here, before anything is computed
        fields["stop_token_ids"] = ids if fields.get("ignore_eos") else (*self.eos_token_ids, *ids)
        return fields

    def _adapted(self, whole: PreTrainedModel, asked: Any) -> PreTrainedModel:
        """The engine's model, with adapters as the trainer's are."""
        if asked is not None:
            whole = peft.get_peft_model(whole, copy.deepcopy(asked))
        return lora.base_of(whole).requires_grad_(False).eval()

    def _patch_reference(self, config: EngineConfig) -> None:
        """The reference's log-probabilities are of the same ops: their difference from an equal policy's is 0."""
        if self.ref_model is None:
            return
        reference = self.accelerator.unwrap_model(self.ref_model, keep_fp32_wrapper=False)
        reference.to(self._handle.model.dtype)
        self._reference, self.ref_model = _patched(reference, config), reference

    def close(self) -> None:
        """Ends the engine; the trainer generates no more. Again does nothing."""
        self.engine.close()

    def _get_per_token_logps_and_entropies(
        self,
        model,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        **more: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """(B, logits_to_keep) fp32 log-probabilities of the last tokens at the rollout's temperature, and entropies."""
        if given := sorted(name for name, value in more.items() if value is not None and value is not False):
            raise ValueError(f"vexact_engine.trl: {', '.join(given)}: the trainer scores token ids alone")
        keep, found = slice(-logits_to_keep - 1, -1), []
        size = batch_size or len(input_ids)
        for ids, mask in zip(input_ids.split(size), attention_mask.split(size)):
            wanted = torch.zeros_like(mask, dtype=torch.bool)
            wanted[:, keep] = mask[:, -logits_to_keep:] != 0
            rows = wanted.flatten().nonzero()[:, 0]
            asked = vx.patch.Score(ids.flatten()[rows + 1], rows, self.temperature, compute_entropy, kept=True)
            with self.accelerator.autocast() if model is not self.ref_model else contextlib.nullcontext():
                values = model(input_ids=ids, attention_mask=mask, use_cache=False, vexact_score=asked)
            values = values if asked.values is None else asked.values  # accelerate has FSDP2 round what is returned
            found.append([v.new_zeros(ids.numel()).index_copy(0, rows, v).view_as(ids)[:, keep] for v in values])
        logprobs, *entropies = (torch.cat(values) for values in zip(*found))
        return logprobs, entropies[0] if compute_entropy else None, None


def _refuse_compiler(plugin: Any) -> None:
    """Whether args.torch_compile or accelerate's own configuration asks for it: what accelerate puts around the model,
    the patch does not see."""
    from torch._inductor import config

    if plugin.backend.value.lower() == "inductor" and not config.emulate_precision_casts:
        raise ValueError(
            "vexact_engine.trl: torch_compile: got the backend inductor, expected another one, or "
            "torch._inductor.config.emulate_precision_casts = True before the trainer is made: it leaves out roundings "
            "between the kernels that it joins"
        )


def _patched(model: PreTrainedModel, config: EngineConfig) -> Any:
    model.__dict__.pop("forward", None)  # TRL's head over it
    return vx.patch.hf(model, **config.patch_options)


def _is_other_than_lora(asked: Any, args: "trl.GRPOConfig") -> bool:
    if asked is None:
        return False
    return (
        peft is None or not isinstance(asked, peft.LoraConfig) or (asked.lora_dropout > 0 and not args.disable_dropout)
    )


def _drops(model: torch.nn.Module) -> bool:
    """Whether an adapter does, in training: no rollout has that."""
    return any(getattr(module, "p", 0) > 0 for name, module in model.named_modules() if ".lora_dropout." in name)


def _refuse(args: "trl.GRPOConfig", kwargs: dict[str, Any]) -> None:
    """ValueError names what is asked for and cannot be had, before anything is loaded."""
    wrong = {
        "peft_config": _is_other_than_lora(kwargs.get("peft_config"), args) and "a LoraConfig without lora_dropout",
        "use_vllm": args.use_vllm and "False: the engine generates",
        "use_transformers_continuous_batching": args.use_transformers_continuous_batching
        and "False: the engine generates",
        "use_liger_kernel": args.use_liger_kernel and "False: aligned ops take its place",
        "use_kernels": getattr(args, "use_kernels", False) and "False: aligned ops take their place",
        "cast_lm_head_to_fp32": args.cast_lm_head_to_fp32 and "False: aligned logits are fp32 sums as they are",
        "temperature": args.temperature <= 0 and "a number above 0: the loss is of the distribution that is drawn from",
        "quantization_config": kwargs.get("quantization_config") is not None
        and "None: weights are computed with as they are",
        "fp16": args.fp16 and "False: the dtype of the weights is computed in, which model_init_kwargs may name",
        "neftune_noise_alpha": args.neftune_noise_alpha is not None and "None: no rollout has such noise",
        "generation_kwargs": not GENERATION.issuperset(args.generation_kwargs or ())
        and f"some of {', '.join(sorted(GENERATION))}, and all else where GRPOConfig has it",
        "cache_implementation": args.cache_implementation is not None and "None: the engine has a cache of its own",
        "repetition_penalty": args.repetition_penalty != 1.0 and "1.0: the trainer's distribution has none",
        "deepspeed": args.deepspeed is not None and "None: FSDP2 shards here",
        "vllm_structured_outputs_regex": args.vllm_structured_outputs_regex is not None
        and "None: draws are of the whole vocabulary",
        "vllm_tensor_parallel_size": args.vllm_tensor_parallel_size != 1
        and "1: each process has an engine, on its own device",
    }
    for name in ("fp16_full_eval", "bf16_full_eval"):  # the model is cast, and stays so
        wrong[name] = getattr(args, name) and "False: evaluation is in the dtype that is trained in"
    for name, expected in wrong.items():
        if expected:
            got = kwargs.get(name, getattr(args, name, None))
            raise ValueError(f"vexact_engine.trl: {name}: got {got!r}, expected {expected}")
