"""What a model executes outside the aligned ops: listed on fake tensors, without computing anything.

A patched model is covered where every other operation it runs is exact in every batch: it moves data, works on
integers or booleans, or is elementwise and correctly rounded (IEEE addition, multiplication, division), so that no
order of summation and no vector width can show. Anything else is a reason to refuse the module that runs it.
"""

import contextlib
import sys

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from . import abstract, lora

# What has the same bits in every batch, by what it does to each dtype. Of any: what moves data, compares for equality,
# or adds (a complex sum is two real ones).
_ANY = {
    *("add", "sub", "rsub", "neg", "add_", "sub_", "where", "eq", "ne", "masked_fill", "masked_fill_"),
    *("squeeze_", "unsqueeze_", "transpose_", "t_", "resize_"),
    *("_to_copy", "clone", "copy_", "contiguous", "cat", "stack", "constant_pad_nd", "repeat", "repeat_interleave"),
    *(
        "embedding",
        "index",
        "index_select",
        "masked_scatter",
        "index_copy",
        "gather",
        "slice_scatter",
        "select_scatter",
    ),
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "zeros", "zeros_like", "new_zeros"),
    *("ones", "ones_like", "new_ones", "full", "full_like", "new_full", "fill_", "zero_", "scalar_tensor", "arange"),
    *("lift_fresh", "lift_fresh_copy", "_unsafe_view", "roll", "flip", "tril", "triu"),
}
# Of real numbers: elementwise and correctly rounded. A complex product or quotient is made of several roundings, fused
# or not as the place in a row has it.
_REAL = {
    *("mul", "div", "abs", "relu", "square", "sqrt", "clamp", "clamp_min", "clamp_max", "threshold_backward"),
    *("maximum", "minimum", "lt", "le", "gt", "ge", "isnan", "isinf", "mul_", "div_", "clamp_"),
}


def exact(func, args: tuple, kwargs: dict, out) -> bool:
    """This call has the same bits in every batch, whoever computes it."""
    if func.namespace == "vexact" or func.is_view:
        return True
    name = func.overloadpacket.__name__
    if name in ("index_put", "index_put_", "_index_put_impl_"):
        return not (args[3] if len(args) > 3 else kwargs.get("accumulate", False))
    made = [t for t in pytree.tree_leaves(out) if isinstance(t, Tensor)]
    if not made:  # a question about a tensor, not a value
        return True
    if func.namespace not in ("aten", "prims"):
        return False
    tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)] + made
    floats = any(t.is_floating_point() or t.is_complex() for t in tensors)
    if name in _ANY:
        return not floats or kwargs.get("alpha", 1) == 1  # a scaled sum may be one fused operation or two
    real = not any(t.is_complex() for t in tensors) and not any(isinstance(a, complex) for a in args)
    if name in _REAL or (name == "pow" and type(args[1]) in (int, float) and args[1] in (1, 2)):
        return not floats or (real and kwargs.get("rounding_mode") is None)
    return not floats


class Watch:
    """Collects what is not exact, with the module whose forward runs it."""

    def __init__(self, names: dict[int, str]):
        self.names, self.found = names, dict[str, set[str]]()

    def saw(self, func, args, kwargs, out) -> None:
        if not exact(func, args, kwargs, out):
            self.found.setdefault(self._module(), set()).add(func.overloadpacket._qualified_op_name.replace("::", "."))

    def _module(self) -> str:
        frame = sys._getframe(2)
        while frame is not None:
            owner = frame.f_locals.get("self")
            if isinstance(owner, nn.Module) and id(owner) in self.names:
                return self.names[id(owner)]
            frame = frame.f_back
        return ""


def run(model: nn.Module, names: dict[int, str], call, trains: bool = True) -> dict[str, set[str]]:
    """call(model, input_ids) on fake copies of the model's tensors: what each module executed that is not exact.

    Once as for inference and, if it trains, once as for training; the modules' training flags and tensors come back as
    they were.
    """
    flags = [(module, module.training) for module in model.modules()]

    def forward(mode: abstract.Observed) -> dict[str, set[str]]:
        watch, caller = Watch(names), Caller(model, call)
        fakes, device = fake_copies(caller)
        ids = torch.zeros(2, 3, dtype=torch.int64, device=device)
        for training in (False, True) if trains else (False,):
            for module, _ in flags:
                module.training = training
            with unhooked(model), lora.disabled_as_unmerged(model), nothing_kept(model):
                mode.saw = watch.saw
                torch.func.functional_call(caller, fakes, (ids,), tie_weights=False)
                mode.saw = None
        return watch.found

    try:
        return abstract.run(forward)
    finally:
        for module, training in flags:
            module.training = training


def fake_copies(model: nn.Module) -> tuple[dict[str, Tensor], torch.device]:
    """Under abstract.run: a fake one for each parameter and buffer, by name; and where they are, which is one device
    for all: of a model that FSDP2 has put on the CPU the units whose turn it is lie on the GPU. Of a sharded tensor it
    is the whole, of tied tensors the same, of one on meta it is on a real device.

    Each place in a module stands there once, under its first name, for functional_call(..., tie_weights=False): given
    both names of a module that stands in two places (a layer that is run twice), it would put back what it had put in
    itself, and the model would be left with fake weights.
    """
    places = {}
    for path, module in model.named_modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                places[f"{path}.{name}"] = tensor
    real = [t.device for t in places.values() if t.device.type != "meta"]
    device = next((d for d in real if d.type != "cpu"), real[0] if real else torch.device("cpu"))
    made = {id(t): torch.empty(t.shape, dtype=t.dtype, device=device) for t in places.values()}
    return {name: made[id(t)] for name, t in places.items()}, device


@contextlib.contextmanager
def unhooked(model: nn.Module):
    """Without what FSDP2 and PEFT hang on modules: it gathers real weights, and is for the batch of one call."""
    tables = [t for m in model.modules() if _hooked(m) for t in (m._forward_pre_hooks, m._forward_hooks) if t]
    kept = [dict(table) for table in tables]
    for table in tables:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in zip(tables, kept):
            table.update(hooks)


@contextlib.contextmanager
def nothing_kept(model: nn.Module):
    """Fake tensors that a stock forward has kept as attributes, as LongRoPE's does its long frequencies, are no longer
    there behind it."""
    before = [(vars(module), dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for now, then in before:
            for name in [name for name, value in now.items() if isinstance(value, FakeTensor)]:
                now.pop(name)
                now.update({name: then[name]} if name in then else {})


def _hooked(module: nn.Module) -> bool:
    return isinstance(module, FSDPModule) or type(module).__module__.startswith("peft.")


class Caller(nn.Module):
    """functional_call wants a module: one that calls the model in our way."""

    def __init__(self, model: nn.Module, call):
        super().__init__()
        self.model, self.call = model, call

    def forward(self, ids: Tensor):
        return self.call(self.model, ids)
