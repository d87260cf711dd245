"""What a stack does on some tokens: of every module and op, of every token a digest of the bits that it had there."""

import contextlib
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from .stacks import Forward, Stack

LOGITS = "(logits)"
# Ops that compute nothing, whatever they are given.
_NOT_COMPUTED = re.compile(
    r"aten\.(view|_unsafe_view|reshape|alias|detach|empty|new_empty|zeros|ones|full|arange|lift)"
)
INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Key:
    """What is compared: one tensor of one event. kind: "in", "out" or "op"; number: which of its tensors."""

    module: str
    call: int
    kind: str
    op: str = ""
    count: int = 0
    number: int = 0


@dataclass
class Entry:
    """A tensor as tokens have it: a digest of each one's row, from whichever forward it came in."""

    digests: Tensor  # (N,) int64
    present: Tensor  # (N,) bool
    dtype: torch.dtype
    width: int
    values: Tensor | None = None  # (N, width), where they were asked for


@dataclass
class Trace:
    """What a stack did: entries in the order of execution, and the ops that each module ran itself.

    ops       (module, call) -> [(place in the order of entries, name)], of the first forward
    callers   (module, call) -> the module whose code called it
    """

    entries: dict[Key, Entry] = field(default_factory=dict)
    callers: dict[tuple[str, int], str] = field(default_factory=dict)
    ops: dict[tuple[str, int], list[tuple[int, str]]] = field(default_factory=dict)


class Recorder(TorchDispatchMode):
    """Hooks on every module and a look at every op. `wanted` are the keys whose values are kept, beside digests."""

    def __init__(self, model: nn.Module, tokens: int, wanted: set[Key] | None = None):
        super().__init__()
        self.model, self.tokens, self.wanted = model, tokens, wanted
        self.trace = Trace()
        self.running: list[tuple[str, int]] = []
        self._weights: dict[tuple[int, torch.device], Tensor] = {}
        self._hooks: list = []
        self.forwards = 0

    def record(self, call: Forward) -> Tensor:
        """Run one forward."""
        self.rows, self.shape = call.rows, tuple(call.rows.shape)
        self.flat = call.rows.flatten()
        self.keep = (self.flat >= 0).nonzero()[:, 0]
        self.to = self.flat[self.keep]
        self.calls: dict[str, int] = {}
        self.counts: dict[tuple, int] = {}
        self.running = []
        self.forwards += 1
        with self._hooked(), self:
            logits = call.run()
        self._note(LOGITS, 0, "out", [logits])
        return logits

    @contextlib.contextmanager
    def _hooked(self) -> Iterator[None]:
        patch = self.model.__dict__.get("_vexact")
        idle = frozenset() if patch is None else patch.inner  # modules that never run, and refuse hooks
        for name, module in self.model.named_modules():
            if id(module) in idle:
                continue
            before = module.register_forward_pre_hook(self._enter(name), with_kwargs=True)
            after = module.register_forward_hook(self._leave(name), always_call=True)
            self._hooks += [before, after]
        try:
            yield
        finally:
            for hook in self._hooks:
                hook.remove()
            self._hooks.clear()

    def _enter(self, name: str) -> Callable:
        def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
            call = self.calls[name] = self.calls.get(name, -1) + 1
            self.trace.callers[name, call] = self.running[-1][0] if self.running else ""
            given = {k: v for k, v in kwargs.items() if k != "attention_mask"}
            with _disable_current_modes():
                self._note(name, call, "in", tree_leaves((args, given)))
            self.running.append((name, call))

        return enter

    def _leave(self, name: str) -> Callable:
        def leave(module: nn.Module, args: tuple, output: Any) -> None:
            _, call = self.running.pop()
            with _disable_current_modes():  # what the recorder computes is none of the model's ops
                self._note(name, call, "out", tree_leaves(output))

        return leave

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if self.running and not _NOT_COMPUTED.match(name := _name(func)):
            outs = [t for t in tree_leaves(out) if isinstance(t, Tensor)]
            given = {_memory(t) for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)}
            if outs and not all(_memory(t) in given for t in outs):
                path, call = self.running[-1]
                count = self.counts[path, call, name] = self.counts.get((path, call, name), -1) + 1
                if self.forwards == 1:
                    self.trace.ops.setdefault((path, call), []).append((len(self.trace.entries), name))
                self._note(path, call, "op", outs, name, count)
        return out

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch's guard against it takes as long as the ops

    def _note(self, module: str, call: int, kind: str, tensors: list, op: str = "", count: int = 0) -> None:
        for number, tensor in enumerate(t for t in tensors if isinstance(t, Tensor)):
            rows, scores = self._rows(tensor, kind), self._may_be_scores(tensor, kind)
            if rows is None and not scores:
                continue
            key = Key(module, call, kind, op, count, number)
            entry = self.trace.entries.get(key)
            if entry is None:
                made = torch.zeros(self.tokens, dtype=torch.int64), torch.zeros(self.tokens, dtype=torch.bool)
                width = tensor.shape[1] * tensor.shape[3] if rows is None else rows.shape[1]
                entry = self.trace.entries[key] = Entry(*made, tensor.dtype, width)
            if rows is None:  # its place is kept: another forward's may be none
                continue
            if entry.width != rows.shape[1]:  # such as scores over as many keys as this forward has
                entry.present[self.to] = False
                continue
            entry.digests[self.to] = self._digest(rows).cpu()
            entry.present[self.to] = True
            if self.wanted is not None and key in self.wanted:
                if entry.values is None:
                    entry.values = torch.zeros(self.tokens, rows.shape[1], dtype=tensor.dtype)
                entry.values[self.to] = rows.detach().cpu()

    def _rows(self, tensor: Tensor, kind: str) -> Tensor | None:
        """A tensor as (tokens of this forward, width); None where it has no row for each."""
        batch, length = self.shape
        if tensor.layout != torch.strided or tensor.dim() < 2 or not (tensor.is_floating_point() or kind == "out"):
            return None
        if tensor.dim() == 4 and tensor.shape[0] == batch and tensor.shape[2] == length != tensor.shape[1]:
            if self._may_be_scores(tensor, kind):
                return None
            tensor = tensor.transpose(1, 2)
        if tensor.shape[:2] == (batch, length):
            flat = tensor.reshape(batch * length, -1)
        elif tensor.shape[:2] == (1, length) and kind != "op":  # the same for all of the batch
            flat = tensor.expand(batch, *tensor.shape[1:]).reshape(batch * length, -1)
        elif tensor.shape[0] == batch * length:
            flat = tensor.reshape(batch * length, -1)
        else:
            return None
        return flat[self.keep.to(flat.device)] if flat.shape[1] else None

    def _may_be_scores(self, tensor: Tensor, kind: str) -> bool:
        """Of which a column is a key, wherever that lies. Heads of as many numbers as there are tokens look like it."""
        batch, length = self.shape
        return kind == "op" and tensor.dim() == 4 and tensor.shape == (batch, tensor.shape[1], length, length)

    def _digest(self, rows: Tensor) -> Tensor:
        """(R,) int64 of (R, F): equal for equal bits; all NaN are one. Integers wrap: no order of summation counts."""
        rows = rows.detach()
        bits = rows.contiguous()
        if rows.is_floating_point():
            bits = rows.masked_fill(rows.isnan(), float("nan")).contiguous().view(INTS[rows.element_size()])
        at = rows.shape[1], rows.device
        if at not in self._weights:
            g = torch.Generator().manual_seed(rows.shape[1])
            drawn = torch.randint(-(2**62), 2**62, (rows.shape[1],), generator=g, dtype=torch.int64)
            self._weights[at] = (2 * drawn + 1).to(rows.device)
        return ((bits.to(torch.int64) + 1) * self._weights[at]).sum(1)


@functools.cache
def _name(func: torch._ops.OpOverload) -> str:
    return str(func).removesuffix(".default")


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided else id(tensor)


def trace(stack: Stack, sequences: Sequence[Sequence[int]], wanted: set[Key] | None = None) -> Trace:
    """Run a stack and keep what it did."""
    with torch.no_grad(), stack.calls(sequences) as (model, calls):
        recorder = Recorder(model, sum(map(len, sequences)), wanted)
        for call in calls:
            recorder.record(call)
    return recorder.trace


def differs_at(a: Trace, b: Trace, key: Key) -> Tensor:
    """(N,) the tokens at which two traces have other digests; none where one of them lacks the key."""
    if key not in a.entries or key not in b.entries:
        return torch.zeros(1, dtype=torch.bool)
    return differ(a.entries[key], b.entries[key])


def differ(a: Entry, b: Entry) -> Tensor:
    if a.width != b.width:
        return torch.zeros_like(a.present)
    if a.dtype != b.dtype:
        return a.present & b.present
    return a.present & b.present & (a.digests != b.digests)
