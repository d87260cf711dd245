"""LoRA as verl's FSDP engine has it: what the rollout has to be told of it, what is refused, and what its tensors are
called."""

import re
from collections.abc import Mapping
from typing import Any, TypeVar

from torch import nn

from vexact_ops.patch.lora import WRAPPED

_ADAPTER = re.compile(r"\.(lora_[AB])\.default\.")  # the one that verl makes
T = TypeVar("T")


def refuse_adapters(model_config: Any, strategy: str) -> None:
    """What verl would leave out in silence, or compute otherwise than the rollout.

    strategy  the trainer's
    raises    NotImplementedError, ValueError, naming a setting of verl's
    """
    lora = model_config.lora or {}
    if rank := lora.get("rank"):
        raise NotImplementedError(
            f"lora.rank: got {rank}, expected 0: that is Megatron's, and nobody reads it here. Set lora_rank"
        )
    rank, path = model_config.lora_rank, model_config.lora_adapter_path
    if rank <= 0:
        if path:
            raise ValueError(
                f"lora_adapter_path: got {path} with lora_rank={rank}, where verl makes no adapter: set lora_rank to "
                "that adapter's r"
            )
        return
    if strategy == "veomni":
        raise NotImplementedError(
            f"lora_rank: got {rank} with strategy=veomni, expected 0: verl's VeOmni engine makes no adapter and trains "
            "the whole model. strategy=fsdp2 trains adapters"
        )
    if lora.get("merge"):
        raise NotImplementedError(
            "lora.merge: got True, expected False: merged weights are rounded once more, so a rollout of those would "
            "have other log-probabilities than the trainer, which computes with adapters apart, as the rollout does "
            "without it"
        )
    if model_config.target_parameters:
        raise NotImplementedError(
            f"target_parameters: got {list(model_config.target_parameters)}, expected null: adapters of linear layers "
            "are what is aligned, those of experts' stacked weights are not"
        )
    _refuse_config(adapter_config(model_config), model_config)


def adapter_config(model_config: Any) -> Any | None:
    """PEFT's LoraConfig as verl's FSDP engine makes it of its settings, or reads it with the adapter that it goes on
    with; None without one."""
    if model_config.lora_rank <= 0:
        return None
    from peft import LoraConfig, PeftConfig, TaskType
    from verl.utils.fs import copy_to_local
    from verl.utils.py_functional import convert_to_regular_types

    if model_config.lora_adapter_path:
        return PeftConfig.from_pretrained(copy_to_local(model_config.lora_adapter_path, use_shm=model_config.use_shm))
    names = "target_modules", "exclude_modules"
    given = {name: convert_to_regular_types(getattr(model_config, name)) for name in names}
    rank, alpha = model_config.lora_rank, model_config.lora_alpha
    return LoraConfig(task_type=TaskType.CAUSAL_LM, r=rank, lora_alpha=alpha, bias="none", **given)


def rollout_adapter(model_config: Any) -> dict[str, Any] | None:
    """EngineConfig.adapter of a rollout, whose tensors come with each hand-over; None where there is none, or verl's
    own actor merges it."""
    config = None if (model_config.lora or {}).get("merge") else adapter_config(model_config)
    return None if config is None else {**config.to_dict(), "init_lora_weights": True}


def _refuse_config(config: Any, model_config: Any) -> None:
    """Of an adapter that was trained elsewhere, what is no plain LoRA, or draws in training."""
    where = f"lora_adapter_path: {model_config.lora_adapter_path}/adapter_config.json"
    if (kind := getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise NotImplementedError(f"{where}: peft_type: got {kind}, expected LORA")
    if config.lora_dropout:
        raise NotImplementedError(
            f"{where}: lora_dropout: got {config.lora_dropout}, expected 0: the training forward would drop what the "
            "rollout has computed with. Set it to 0 there"
        )
    for name in ("modules_to_save", "target_parameters"):
        if given := getattr(config, name, None):
            raise NotImplementedError(f"{where}: {name}: got {given}, expected null: adapters alone are handed over")


def adapted_names(named: Mapping[str, T], model: nn.Module) -> dict[str, T]:
    """Of what verl's PEFT model names: adapters as PEFT saves them, all else as the base model has it."""
    from verl.utils.model import convert_weight_keys

    found = {}
    for name, value in named.items():
        bare = name.removeprefix(WRAPPED).replace(".base_layer.", ".")
        (name,) = convert_weight_keys({bare: None}, model)
        if bare != (own := _ADAPTER.sub(r".\1.", bare)):
            (name,) = convert_weight_keys({own: None}, model)
            name = WRAPPED + name
        found[name] = value
    return found
