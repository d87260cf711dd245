"""Heads of a checkpoint that draft the token after the next (multi-token prediction), which transformers leaves out.

A head is a layer like the decoder's own, given its final hidden state of a token and the embedding of the next:
layer(fc(norm(embedding), norm(hidden))), a norm, and the decoder's own output head. Of several heads the first is used,
again and again. Two forms are known, by their names: Qwen3-Next's and Qwen3.5's `mtp.*`, and DeepSeek-V3's layer behind
the last one, which GLM-4-MoE has too.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from vexact_ops.patch import lora

from .cut import Shard
from .directory import Directory, read_directory, some
from .partial import Files

_LAYER = re.compile(r"(.*\blayers\.)(\d+)\.self_attn\.")


class Form(NamedTuple):
    """Names of a head's parts. normed: what a head drafts from in place of a hidden state, its output, is that behind
    the norm."""

    layer: str
    fc: str
    embedding_norm: str
    hidden_norm: str
    norm: str
    normed: bool


class Heads(nn.Module):
    """The tensors of the first head, by the names that the checkpoint gives them, experts stacked.

    like    a layer of the decoder that it is like, by the beginning of its names
    """

    def __init__(self, model: nn.Module, form: Form, like: str, tensors: Mapping[str, Tensor]):
        super().__init__()
        self.form, self.like, self.config = form, like, model.config
        self.get_input_embeddings = model.get_input_embeddings  # the decoder's, and no tensor of this module
        for name, tensor in tensors.items():
            *path, leaf = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner._modules[part]
            owner.register_parameter(leaf, nn.Parameter(tensor, requires_grad=False))


def keep_rows(heads: Heads, shards: Mapping[str, Shard]) -> None:
    """Of whole tensors those rows that a rank holds."""
    for name, parameter in heads.named_parameters():
        if name in shards:
            parameter.data = shards[name].take(parameter.data).clone()


def load_heads(source: str, path, model: nn.Module, device: torch.device) -> Heads:
    """Those of a directory, for its model, on a device.

    raises   ValueError where it holds none, or such that are not like a layer of the model
    """
    if lora.adapters(model):
        raise ValueError(f"Speculation: mtp: {source} has LoRA's adapters, which heads have none of: expected False")
    directory = read_directory(path)
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    form = _form(source, directory, count)
    state = model.state_dict()
    layers = [found for name in state if (found := _LAYER.match(name))]
    if not layers:
        raise ValueError(f"Speculation: mtp: {source}: a {type(model).__name__} has no layers with self_attn")
    last = max(layers, key=lambda found: int(found[2]))
    like = f"{last[1]}{last[2]}."
    hidden = model.get_input_embeddings().weight.shape[1]
    norm = torch.empty(hidden, dtype=next(model.parameters()).dtype, device="meta")
    wanted = {form.layer + name.removeprefix(like): tensor for name, tensor in state.items() if name.startswith(like)}
    wanted |= dict.fromkeys((form.embedding_norm, form.hidden_norm, form.norm), norm)
    wanted[form.fc] = norm.new_empty(hidden, 2 * hidden)
    with Files(directory) as files:
        made = {name: _tensor(files, directory, name, tensor.dtype, device) for name, tensor in wanted.items()}
    missing = [name for name, tensor in made.items() if tensor is None]
    if missing:
        raise ValueError(f"Speculation: mtp: {source}: missing: {some(missing)}, as {like} of the model has")
    wrong = [
        f"{name} is {tuple(tensor.shape)}, expected {tuple(wanted[name].shape)}"
        for name, tensor in made.items()
        if tensor.shape != wanted[name].shape
    ]
    if wrong:
        raise ValueError(f"Speculation: mtp: {source}: {some(wrong)}, as {like} of the model has")
    return Heads(model, form, like, {name: tensor.to(device) for name, tensor in made.items()})


def _form(source: str, directory: Directory, layers: int) -> Form:
    if "mtp.fc.weight" in directory.tensors:
        norms = "mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.norm.weight"
        return Form("mtp.layers.0.", "mtp.fc.weight", *norms, normed=True)
    behind = f"model.layers.{layers}."
    if f"{behind}eh_proj.weight" in directory.tensors:
        names = (f"{behind}{name}.weight" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm"))
        return Form(behind, *names, normed=False)
    raise ValueError(
        f"Speculation: mtp: {source} holds no heads: expected mtp.fc.weight (Qwen3.5), or {behind}eh_proj.weight "
        "(DeepSeek-V3, GLM-4-MoE)"
    )


def _tensor(files: Files, directory: Directory, name: str, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Of a file, in this dtype; experts that come one by one are stacked. None where it is not there. For meta nothing
    is read."""

    def read(name: str) -> Tensor:
        if device.type == "meta":
            return torch.empty(directory.tensors[name].shape, dtype=dtype, device=device)
        return files.read(name, dtype)

    if name in directory.tensors:
        return read(name)
    path, _, leaf = name.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(leaf)
    if parts is None or not path.endswith(".experts"):
        return None
    found: list[Tensor] = []
    while f"{path}.{len(found)}.{parts[0]}.weight" in directory.tensors:  # all are there: read_directory has looked
        found.append(torch.cat([read(f"{path}.{len(found)}.{part}.weight") for part in parts]))
    return torch.stack(found) if found else None
