"""LoRA of PEFT on linear layers: base(x) + scaling * B(A(dropout(x))), one adapter after another.

The layer's own forward stays: once its base layer and each adapter's A and B are aligned products, what is left of it
casts, scales and adds, which is exact. So its switches work as ever (several adapters, disable_adapter, merged weights,
adapter_names), and its roundings are PEFT's own: A and B in their own dtype, the sum in the wider of the two, in the
order of the active adapters, rounded once to the base layer's dtype. What it computes is tried on a twin, in every
state, like all pieces.
"""

import contextlib
import sys
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .mixture import kept_in_fp32
from .pieces import NotCovered, agree, random, run_stock, small_linear, twin

WRAPPED = "base_model.model."  # before the names of a model in its wrapper
SWITCHES = "_active_adapter", "_disable_adapters", "merged_adapters", "scaling"  # of PEFT's layers


def is_peft(module: nn.Module) -> bool:
    return type(module).__module__.startswith("peft.")


def base_of(model: nn.Module, asked: str = "patch.hf: model") -> nn.Module:
    """The model inside PEFT's wrapper, or the model itself. ValueError where it is no wrapper of LoRA's."""
    peft = sys.modules.get("peft")
    if peft is None or not isinstance(model, peft.PeftModel):
        return model
    config = model.active_peft_config
    if config.is_prompt_learning:
        raise ValueError(
            f"{asked}: got a {type(model).__name__} with {config.peft_type.value}, which puts states of its "
            "own before the prompt: LoRA is what is covered"
        )
    return model.get_base_model()


def adapters(model: nn.Module) -> set[str]:
    """Names of parameters that are adapters', as the model has them."""
    found = set()
    for path, module in model.named_modules():
        if is_peft(module) and _base_layer(module) is not None:
            own = (name for name, _ in module.named_parameters() if not name.startswith("base_layer."))
            found |= {f"{path}.{name}" for name in own}
    return found


def in_fp32(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> set[str]:
    """Names of what may be fp32 in a model of this dtype: what transformers keeps so, and PEFT's adapters."""
    return kept_in_fp32(model, dtype) | adapters(model)


def switches(model: nn.Module) -> list[str]:
    """Of each layer, which adapters are active, merged or disabled, and their scalings."""
    layers = (vars(module) for module in model.modules() if is_peft(module) and _base_layer(module) is not None)
    return [repr([own.get(name) for name in SWITCHES]) for own in layers]


def scales(model: nn.Module) -> dict[str, str]:
    """What adapters that are added are multiplied by, in their order, by the last word of their layers' names."""
    found: dict[str, set[str]] = {}
    for path, module in model.named_modules():
        if not is_peft(module) or _base_layer(module) is None or module._disable_adapters or module.merged:
            continue
        of = [str(float(module.scaling[name])) for name in module.active_adapters if name in module.lora_A]
        if of:
            found.setdefault(path.rpartition(".")[2], set()).add(" and ".join(of))
    return {name: ", ".join(sorted(found[name])) for name in sorted(found)}


def is_saved(module: nn.Module) -> bool:
    """A wrapper of modules_to_save: one of several copies, each of which is covered, or not, for itself."""
    return is_peft(module) and type(module).__name__ == "ModulesToSaveWrapper"


def copies(module: nn.Module) -> list[nn.Module]:
    return [module.original_module, *module.modules_to_save.values()]


def _base_layer(module: nn.Module) -> nn.Module | None:
    return module._modules.get("base_layer")


@contextlib.contextmanager
def disabled_as_unmerged(model: nn.Module) -> Iterator[None]:
    """Layers whose merged adapters are disabled take them out of their weights in the next forward: in one on fake
    tensors they would note that it was done, and it was not."""
    layers = [m for m in model.modules() if is_peft(m) and _base_layer(m) is not None]
    layers = [m for m in layers if m.__dict__.get("merged_adapters") and m.__dict__.get("_disable_adapters")]
    before = [layer.merged_adapters for layer in layers]
    for layer in layers:
        layer.merged_adapters = []
    try:
        yield
    finally:
        for layer, adapters in zip(layers, before):
            layer.merged_adapters = adapters


def check(module: nn.Module, tried: dict) -> str:
    """What a layer of PEFT computes, in words; `tried` keeps what is known of layers that are alike. Raises
    NotCovered."""
    from peft.tuners.lora.layer import Linear

    if is_saved(module):
        return "one of its copies"
    if type(module) is not Linear:
        if _base_layer(module) is None:
            raise NotCovered(f"a {type(module).__name__} of PEFT: LoRA of linear layers is what is covered")
        kind = type(module).__module__.split(".")[2]
        on = type(_base_layer(module)).__name__
        raise NotCovered(f"PEFT's {kind} on a layer of type {on}: LoRA of linear layers is what is covered")
    if not isinstance(_base_layer(module), nn.Linear):
        raise NotCovered(f"LoRA around a {type(_base_layer(module)).__name__}, not a linear layer alone")
    for name, variant in module.lora_variant.items():
        form = type(variant).__name__.removesuffix("LinearVariant")
        raise NotCovered(f"its adapter {name!r} is of the form {form}: plain LoRA (rank-stabilised too) is covered")
    key = Linear, len(module.lora_A)
    if key not in tried:
        tried[key] = _is_lora(module)
    if not tried[key]:
        raise NotCovered("a LoRA layer that computes something else than base + scaling * B(A(x))")
    return "LoRA: base + scaling * B(A(x)), adapters in their active order"


def _is_lora(module: nn.Module) -> bool:
    """A twin of it, with its adapters all active, each alone, disabled and merged, is the formula."""
    inputs, rank, outputs, x = 6, 3, 5, random(2, 4, 6, seed=1)
    base, names = small_linear(inputs, outputs, 2), list(module.lora_A)
    a = nn.ModuleDict({name: small_linear(inputs, rank, 3 + i) for i, name in enumerate(names)})
    b = nn.ModuleDict({name: small_linear(rank, outputs, 40 + i) for i, name in enumerate(names)})
    dropout = nn.ModuleDict({name: nn.Identity() for name in names})
    scaling = {name: 0.5 + i for i, name in enumerate(names)}

    def adapted(active: list[str]) -> Tensor:
        y = x @ base.weight.detach().t()
        for name in active:
            y = y + scaling[name] * (x @ a[name].weight.detach().t() @ b[name].weight.detach().t())
        return y

    states = [({"_active_adapter": names}, names), *(({"_active_adapter": name}, [name]) for name in names)]
    states += [({"_disable_adapters": True}, []), ({"merged_adapters": names[:1]}, [])]
    for state, active in states:
        tried = twin(module, {"base_layer": base, "lora_A": a, "lora_B": b, "lora_dropout": dropout})
        tried.__dict__.update({"_disable_adapters": False, "merged_adapters": [], "scaling": scaling, **state})
        if not agree(run_stock(tried, x), adapted(active), 1e-9):
            return False
    return True
