"""What a patched forward computes, as expressions of the model's parameters: recorded on fake tensors, nothing runs.

A Value is one tensor that the forward made. Views, copies and casts to the same dtype are the value that they show:
what is read from a trace is the order of operations and the weights they read, not strides. Whoever computes by what
was read compares with the forward itself.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from . import abstract, audit, lora

_SAME = {
    *("view", "_unsafe_view", "_reshape_alias", "reshape", "transpose", "permute", "t", "unsqueeze", "squeeze"),
    *("expand", "alias", "detach", "clone", "contiguous", "lift_fresh", "lift_fresh_copy"),
}
_TOKENS = 3


class Value:
    """One tensor of a trace.

    op       "parameter" (or buffer; args: its name), "number" (its value), "slice" (of, dimension from the end, first,
             end, step), "cat" (parts...), "to" (of, dtype), "turned" (stacked matrices, each
             transposed), or the name of an operation with its arguments as they were
    out      which of the operation's results
    inputs   the shapes in which it read its arguments (None for what is no tensor)
    call     counts operations: results of one call share it, and what is computed later has a larger one
    """

    __slots__ = ("args", "call", "dtype", "inputs", "op", "out", "shape")

    def __init__(self, op: str, args: tuple, tensor: Tensor, call: int, out: int = 0, inputs: tuple = ()):
        self.op, self.args, self.call, self.out, self.inputs = op, args, call, out, inputs
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype

    def __repr__(self) -> str:
        return self.show()

    @property
    def name(self) -> str | None:
        """Of the parameter that it is, or is a cast of."""
        value = self.args[0] if self.op == "to" else self
        return value.args[0] if value.op == "parameter" else None

    def show(self, depth: int = 3) -> str:
        if self.op in ("parameter", "number"):
            return str(self.args[0])
        if not depth:
            return "..."
        parts = [a.show(depth - 1) if isinstance(a, Value) else str(a) for a in self.args[:2] if a is not None]
        return f"{self.op}({', '.join(parts)})"


class _Recorder:
    def __init__(self, names: dict[str, Tensor]):
        self.count = itertools.count()
        self.values: dict[int, Value] = {}
        self.kept: list = []  # so that an id stays its own
        for name, tensor in names.items():
            self.set(tensor, Value("parameter", (name,), tensor, next(self.count)))

    def set(self, tensor: Tensor, value: Value) -> None:
        self.kept.append(tensor)
        self.values[id(tensor)] = value

    def value(self, x: Any) -> Any:
        if isinstance(x, (list, tuple)):
            return tuple(self.value(item) for item in x)
        if not isinstance(x, Tensor):
            return x
        if id(x) not in self.values:
            number = not isinstance(x, FakeTensor) and x.dim() == 0 and x.device.type == "cpu"
            self.set(x, Value(*(("number", (x.item(),)) if number else ("given", ())), x, next(self.count)))
        return self.values[id(x)]

    def saw(self, func, args, kwargs, out) -> None:
        name, call = func.overloadpacket.__name__, next(self.count)
        if not isinstance(out, (Tensor, tuple, list)):
            return  # a question about a tensor
        if name == "copy_" and self._put(args[0], args[1]):
            return
        given = tuple(self.value(a) for a in args)
        same = name in _SAME or (name == "_to_copy" and out.dtype == args[0].dtype)
        if same and isinstance(given[0], Value):
            turned = name == "transpose" and given[0].op == "parameter" and len(given[0].shape) == args[0].dim() == 3
            self.set(out, Value("turned", (given[0],), out, call) if turned else given[0])
        elif name in ("slice", "narrow", "select") and func.is_view:
            dim = args[1] if len(args) > 1 else 0
            first = args[2] if len(args) > 2 and args[2] is not None else 0
            end = args[3] if len(args) > 3 and args[3] is not None else 1 << 62
            end = first + {"narrow": end, "select": 1}.get(name, end - first)
            self._part(out, args[0], dim, first, end, args[4] if len(args) > 4 else 1)
        elif name in ("split", "split_with_sizes", "chunk", "unbind") and isinstance(out, (tuple, list)):
            dim = args[-1] if len(args) > (1 if name == "unbind" else 2) else 0
            at = 0
            for part in out:
                length = 1 if name == "unbind" else part.shape[dim]
                self._part(part, args[0], dim, at, at + length, 1)
                at += length
        elif name == "cat":
            self.set(out, given[0][0] if len(given[0]) == 1 else Value("cat", given[0], out, call))
        elif name == "_to_copy":
            self.set(out, Value("to", (given[0], out.dtype), out, call))
        elif isinstance(out, Tensor) and any(out is a for a in args):  # in place: what showed it before is stale
            value = self.values[id(out)]
            before = Value(value.op, value.args, out, value.call, value.out, value.inputs)
            value.op, value.args = name, tuple(before if a is value else a for a in given)
        else:
            for i, part in enumerate([out] if isinstance(out, Tensor) else out):
                if isinstance(part, Tensor):
                    inputs = tuple(tuple(a.shape) if isinstance(a, Tensor) else None for a in args)
                    self.set(part, Value(name, given, part, call, i, inputs))

    def _part(self, out: Tensor, of: Tensor, dim: int, first: int, end: int, step: int) -> None:
        size, value = of.shape[dim], self.value(of)
        dim = dim % of.dim() - of.dim()
        first, end = (min(i + size if i < 0 else i, size) for i in (first, end))
        whole = (first, end, step) == (0, size, 1)
        self.set(out, value if whole else Value("slice", (value, dim, first, end, step), out, next(self.count)))

    def _put(self, into: Tensor, source: Tensor) -> bool:
        """A part of a new tensor is written: once all are, it is their concatenation."""
        value = self.value(into)
        if value.op != "slice":
            return False
        whole, dim, first, end, step = value.args
        if whole.op not in ("new_empty", "empty", "empty_like", "puts") or dim != -1 or step != 1:
            return False
        parts = whole.args if whole.op == "puts" else ()
        at = sum(part.shape[-1] for part in parts)
        if first != at:
            return False
        whole.op, whole.args = "puts", (*parts, self.value(source))
        whole.call = next(self.count)
        if end == whole.shape[-1]:
            whole.op = "cat"
        return True


def values_of(*last: Value) -> list[Value]:
    """All that these were computed of, and they: each once, in the order of computing."""
    found, todo = {}, list(last)
    while todo:
        value = todo.pop()
        if id(value) not in found:
            found[id(value)] = value
            for arg in value.args:
                todo += [one for one in (arg if isinstance(arg, tuple) else (arg,)) if isinstance(one, Value)]
    return sorted(found.values(), key=lambda value: value.call)


def hidden_states(
    model: torch.nn.Module, base: torch.nn.Module, dtypes: Mapping[str, torch.dtype] | None = None
) -> Value:
    """The final hidden states of one sequence of a few tokens."""
    (found,) = recorded(model, lambda ids: [base(input_ids=ids, use_cache=False).last_hidden_state], dtypes)
    return found


def recorded(
    model: torch.nn.Module,
    call: Callable[[Tensor], list[Tensor]],
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> list[Value]:
    """What call(ids) of a few tokens returns. The model may lie on meta; nothing of it changes.

    dtypes   by name, of parameters that are cast before the forward
    """
    flags = [(module, module.training) for module in model.modules()]
    patch = model._vexact

    def forward(mode: abstract.Observed) -> list[Value]:
        caller = audit.Caller(model, lambda model, ids: call(ids))
        fakes, device = audit.fake_copies(caller)
        for name, dtype in (dtypes or {}).items():
            fake_name = f"model.{name}"
            if fake_name in fakes and fakes[fake_name].dtype != dtype:
                fakes[fake_name] = fakes[fake_name].to(dtype)
        ids = torch.zeros(1, _TOKENS, dtype=torch.int64, device=device)
        first = {id(tensor): name for name, tensor in reversed(fakes.items())}
        recorder = _Recorder({n.removeprefix("model."): t for n, t in fakes.items() if first[id(t)] == n})
        with audit.unhooked(model), lora.disabled_as_unmerged(model), audit.nothing_kept(model):
            mode.saw = recorder.saw
            out = torch.func.functional_call(caller, fakes, (ids,), tie_weights=False)
            mode.saw = None
        return [recorder.value(x) for x in out]

    ulysses, patch.ulysses = patch.ulysses, None  # the sequence is one rank's own
    try:
        for module, _ in flags:
            module.training = False
        return abstract.run(forward)
    finally:
        patch.ulysses = ulysses
        for module, training in flags:
            module.training = training
