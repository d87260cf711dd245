"""Expert weights by two names: stacked, as transformers 5 holds them, and one by one, as checkpoints and trainers of
the time before name them. Both are the same memory here: a tensor of one expert is a view of the stacked one."""

from collections.abc import Iterator

import torch
from torch import Tensor

from .names import TEXT

# Model types whose checkpoints say block_sparse_moe, and w1, w3, w2 for gate, up and down.
_SHORT = {"mixtral"}
_NAMES = ("gate_proj", "up_proj", "down_proj")
_SHORT_NAMES = ("w1", "w3", "w2")


def expert_views(model: torch.nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Name of one expert's tensor -> the name of the stacked parameter that holds it, and the view of it there.

    "model.layers.0.mlp.experts.3.up_proj.weight" is the lower half of "model.layers.0.mlp.experts.gate_up_proj"[3].
    """
    short = getattr(model.config, "model_type", None) in _SHORT
    found = {}
    for path, module in model.named_modules(remove_duplicate=False):
        weights = module._parameters
        if set(weights) != {"gate_up_proj", "down_proj"} or any(w is None or w.dim() != 3 for w in weights.values()):
            continue
        gate_up, down = (weights[name].detach() for name in ("gate_up_proj", "down_proj"))
        old = path.replace(".mlp.", ".block_sparse_moe.") if short else path
        names = _SHORT_NAMES if short else _NAMES
        for expert, (both, last) in enumerate(zip(gate_up, down)):
            for name, view in zip(names, (*both.chunk(2), last)):
                stacked = f"{path}.{'down_proj' if view is last else 'gate_up_proj'}"
                found[f"{old}.{expert}.{name}.weight"] = stacked, view
    return found


def per_expert(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The model's state with every expert's tensors one by one, under the names of old checkpoints. Views: no copies.

    What `plan_update` takes back, and what a loader of such checkpoints reads.
    """
    views = expert_views(model)
    stacked = {name for name, _ in views.values()}
    short = getattr(model.config, "model_type", None) in _SHORT
    for name, value in model.state_dict().items():
        if name not in stacked:
            yield name.replace(".mlp.", ".block_sparse_moe.") if short else name, value
    for name, (_, view) in views.items():
        yield name, view


def aliases(model: torch.nn.Module) -> dict[str, str]:
    """Other names of whole parameters -> their names here: old ones; those of the text half of a model with vision,
    "model.language_model.layers..." for "model.layers..."; and of a model whose experts have names of their own those
    that verl takes the stacked ones apart by, whatever the model (`mlp.experts.E.gate_proj.weight`)."""
    kind = getattr(model.config, "model_type", None) or ""
    if kind.endswith("_text"):
        every = (*model.state_dict(), *expert_views(model))
        own = (name.removeprefix("model.") for name in every if name.startswith("model."))
        return {f"{TEXT}{name}": f"model.{name}" for name in own}
    if kind not in _SHORT:
        return {}
    names = (name for name in model.state_dict() if ".mlp." in name and ".experts." not in name)
    found = {name.replace(".mlp.", ".block_sparse_moe."): name for name in names}
    for name in expert_views(model):
        path, short, _ = name.rsplit(".", 2)
        other = path.replace(".block_sparse_moe.", ".mlp."), _NAMES[_SHORT_NAMES.index(short)]
        found[f"{other[0]}.{other[1]}.weight"] = name
    return found
