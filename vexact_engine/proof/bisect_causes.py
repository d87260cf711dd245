"""Which known cause a first difference has: told by experiments, not by names.

Each experiment changes one thing and looks at the very tensor that differs: the weights themselves; a dtype; the same
run again; the same tokens alone, among others of the same length, in one piece; the same module with one rounding at
its end; the same product in so many parts. What no experiment explains is said to be unknown, with the ops of both
sides.
"""

import contextlib
import copy
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional

import vexact_ops as vx

from .recording import Entry, Key, Trace, differs_at, trace
from .stacks import Stack

if TYPE_CHECKING:
    from .bisect import Bisection

WEIGHTS, CAST, REPEAT = "weights", "cast", "not repeatable"
BATCH, PADDING, SPLITS = "batch size", "padding", "attention splits"
SPLIT_K, ROUNDING, ORDER, OTHER = "split-K", "fused rounding", "order of summation", "another computation"
UNKNOWN = "unknown"
PARTS = (1, 2, 3, 4, 6, 8, 12, 16, 32)

_ATTENTION = re.compile(r"attention|softmax|scaled_dot_product")
_REDUCES = re.compile(r"mm\b|matmul|linear|mean|sum|norm|softmax|attention|conv|logsumexp|dot")
_NARROWER = {torch.float32: (torch.bfloat16, torch.float16), torch.float64: (torch.float32, torch.bfloat16)}


@dataclass(frozen=True)
class Cause:
    """Which known cause it is, in a word, and what was seen that says so."""

    name: str
    why: str


def cause(
    a: Stack,
    b: Stack,
    sequences: Sequence[Sequence[int]],
    first: Key,
    module: str,
    found: "Bisection",
    traces: tuple[Trace, Trace],
    pair: tuple[Key, Key],
    stable: bool,
) -> Cause:
    """The first experiment that explains it, in the order of the text above.

    first   what both have and differs first; `pair` is where that was found to begin, in the ops of each
    """
    of_a, of_b = (_module(stack, sequences, module) for stack in (a, b))
    entries = [t.entries[key] for t, key in zip(traces, pair)]
    for said in (
        _weights(of_a, of_b),
        _cast(found, entries),
        None if stable else Cause(REPEAT, "the same stack on the same tokens gives other bits each time"),
        _layout(a, b, sequences, first, found, traces),
        _declared(a, b, found),
        _rounding(of_a, of_b, a.device, first, traces) if pair[0] == first else None,
        _split_k(of_a, of_b, first, found, traces) if pair[0] == first else None,
    ):
        if said is not None:
            return said
    ran = f"a ran {_list(found.ops_a)}; b ran {_list(found.ops_b)}{_only(found)}"
    if far := _too_far(entries):
        return Cause(OTHER, f"they differ by {far}: no order and no place of a rounding makes so much of it: {ran}")
    if found.ops_a != found.ops_b and any(_ATTENTION.search(op) for op in (*found.ops_a, *found.ops_b)):
        return Cause(SPLITS, f"attention cuts and merges its keys otherwise: {ran}")
    reduces = any(_REDUCES.search(op) for op in (*found.ops_a, *found.ops_b))
    if not reduces and found.ops_a and found.ops_b and found.ops_a != found.ops_b:
        return Cause(ROUNDING, f"nothing is summed, and they differ by what other places of a rounding can make: {ran}")
    if reduces and found.ops_a != found.ops_b:
        return Cause(ORDER, f"they differ by what another order of a sum can make: {ran}")
    return Cause(UNKNOWN, f"no experiment gives these bits: {ran}")


def _too_far(entries: Sequence[Entry]) -> str:
    """By how much, where it is more than roundings can be: a few of the dtype's in what was rounded to 16 bits, and in
    float32, whose sums may cancel, a share of their row's largest value; "" otherwise."""
    dtype = entries[0].dtype
    if not dtype.is_floating_point or entries[0].values.shape != entries[1].values.shape:
        return ""
    x, y = (e.values.double() for e in entries)
    x, y = (torch.where(x.isfinite() & y.isfinite(), t, 0.0) for t in (x, y))
    room = torch.finfo(dtype).eps * (8 if dtype.itemsize == 2 else 2**12)
    gap, largest = (x - y).abs(), torch.maximum(x.abs(), y.abs()).amax(1, keepdim=True)
    far = gap - room * largest
    at = int(far.argmax())
    if far.flatten()[at] <= 0:
        return ""
    return f"{gap.flatten()[at]:.3g} in a row of values up to {largest[at // x.shape[1], 0]:.3g}"


def _only(found: "Bisection") -> str:
    """Ops that one side has beside those of the other."""
    a, b = found.ops_a, found.ops_b
    more = ((name, [op for op in mine if op not in theirs]) for name, mine, theirs in (("a", a, b), ("b", b, a)))
    return "".join(f"; {name} alone {_list(ops)}" for name, ops in more if ops and set(a) & set(b))


def _list(ops: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(ops)) or "no op that is seen"


def _module(stack: Stack, sequences, name: str) -> nn.Module | None:
    """A copy of the stack's module as it is while it runs, its own weights and all; None where there is none."""
    with stack.calls(sequences) as (model, _):
        return dict(model.named_modules()).get(name)


def _weights(a: nn.Module | None, b: nn.Module | None) -> Cause | None:
    if a is None or b is None:
        return None
    theirs = dict(b.named_parameters(recurse=False)) | dict(b.named_buffers(recurse=False))
    for name, mine in (*a.named_parameters(recurse=False), *a.named_buffers(recurse=False)):
        other = theirs.get(name)
        if other is None or other.shape != mine.shape:
            continue
        if other.dtype != mine.dtype:
            return Cause(CAST, f"{name} is {_short(mine.dtype)} in a and {_short(other.dtype)} in b")
        count = int(vx.different(mine.detach().cpu(), other.detach().cpu()).sum())
        if count:
            return Cause(WEIGHTS, f"{name} itself differs, in {count} of {mine.numel()} elements")
    return None


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _cast(found: "Bisection", entries) -> Cause | None:
    a, b = entries
    if a.dtype != b.dtype:
        return Cause(CAST, f"the output is {found.dtype_a} in a and {found.dtype_b} in b")
    x, y = a.values, b.values
    for narrow in _NARROWER.get(a.dtype, ()):
        for wide, cut, names in ((x, y, "ba"), (y, x, "ab")):
            if vx.same_bits(wide.to(narrow).to(a.dtype), cut) and not vx.same_bits(wide, cut):
                return Cause(CAST, f"{names[0]} is {names[1]} rounded to {_short(narrow)} and back")
    if a.dtype in (torch.bfloat16, torch.float16):
        other = torch.float16 if a.dtype == torch.bfloat16 else torch.bfloat16
        for wide, cut, names in ((x, y, "ba"), (y, x, "ab")):
            if vx.same_bits(wide.to(other).to(a.dtype), cut):
                return Cause(CAST, f"{names[0]} is {names[1]} rounded to {_short(other)} and back")
    return None


def _layout(
    a: Stack, b: Stack, sequences: Sequence[Sequence[int]], first: Key, found: "Bisection", traces: tuple[Trace, Trace]
) -> Cause | None:
    """Whether the two agree where every sequence is alone and in one piece; and if so, which of them gives a token
    other bits otherwise, and for which reason."""
    sides = [("a", a, traces[0]), ("b", b, traces[1])]
    plain = [_plain(stack, sequences) for _, stack, _ in sides]
    if all(stack is None for stack in plain):
        return None
    apart = [now if stack is None else trace(stack, sequences) for stack, (_, _, now) in zip(plain, sides)]
    if differs_at(*apart, first).any():
        return None
    for (name, stack, now), alone, other in zip(sides, apart, plain):
        at = int(differs_at(now, alone, first).sum())
        if not at or other is None:
            continue
        chunk, size = stack.options.get("chunk"), min(stack.options["batch"] or len(sequences), len(sequences))
        if chunk is not None:
            whole = trace(stack.again(chunk=None), sequences)
            if differs_at(now, whole, first).any():
                what = "one at a time" if chunk == 1 else f"{chunk} at a time"
                told = f"{name} gives other bits to {at} tokens when they come {what} than in one piece"
                attends = any(_ATTENTION.search(op) for op in (*found.ops_a, *found.ops_b))
                return Cause(SPLITS if attends else BATCH, told)
        told = f"{name} gives other bits to {at} tokens in a batch of {size} than alone"
        if _copies(stack, sequences, size, first, alone):
            return Cause(BATCH, f"{told}, and as many copies of one sequence, without padding, do so too")
        return Cause(PADDING, f"{told}, but as many copies of one sequence, without padding, do not")
    return None


def _plain(stack: Stack, sequences: Sequence[Sequence[int]]) -> Stack | None:
    """The stack with every sequence alone and in one piece; None where that is how it runs, or where it makes no
    difference to aligned ops."""
    size = min(stack.options.get("batch") or len(sequences), len(sequences))
    if stack.kind != "stock" or (size == 1 and stack.options.get("chunk") is None):
        return None
    return stack.again(batch=1, chunk=None)


def _copies(stack: Stack, sequences, size: int, first: Key, alone: Trace) -> bool:
    """Whether sequences among copies of themselves, so that nothing is padded, have other bits than alone."""
    offset = 0
    for sequence in sequences:
        entry = trace(stack.again(batch=size, chunk=None), [sequence] * size).entries[first]
        for copy_of in range(size):
            part = slice(copy_of * len(sequence), (copy_of + 1) * len(sequence))
            mine = alone.entries[first].digests[offset : offset + len(sequence)]
            if not bool((entry.digests[part] == mine).all()):
                return True
        offset += len(sequence)
    return False


def _declared(a: Stack, b: Stack, found: "Bisection") -> Cause | None:
    """Options that are part of the numerics, and that the two do not share."""
    ours = a.kind != "stock" and b.kind != "stock"
    for option in ("kv_segment", "latent"):
        mine, theirs = a.options.get(option), b.options.get(option)
        if ours and mine != theirs and any(_ATTENTION.search(op) for op in (*found.ops_a, *found.ops_b)):
            return Cause(SPLITS, f"{option} is {mine} in a and {theirs} in b: it is to be declared on both sides")
    return None


def _rounding(a, b, device: torch.device, first: Key, traces) -> Cause | None:
    """Whether one side is what the module computes with one rounding at its end, and the other what it computes with
    all of its own."""
    x, y = (t.entries[first].values for t in traces)
    if x.dtype not in (torch.bfloat16, torch.float16):
        return None
    for of in (a, b):
        once, own = (_computed(of, device, first, traces[0], x, dtype) for dtype in (torch.float32, x.dtype))
        if once is None or own is None:
            continue
        for names, left, right in (("ab", x, y), ("ba", y, x)):
            if vx.same_bits(left, own) and vx.same_bits(right, once):
                where = f"{names[1]} rounds once, at the end of {type(of).__name__}"
                return Cause(ROUNDING, f"{where}; {names[0]} rounds in between too, as {type(of).__name__} says")
    return None


def _computed(
    of: nn.Module | None, device: torch.device, first: Key, traced: Trace, like: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """What a module's class gives from the inputs that it had, computed in `dtype` and rounded at the end: for norms,
    activations and the like. None where it has no such form."""
    if of is None or first.kind != "out" or any(isinstance(m, nn.Linear | nn.Embedding) for m in of.modules()):
        return None
    given = [
        e for k, e in traced.entries.items() if k.kind == "in" and k.module == first.module and e.values is not None
    ]
    if len(given) != 1 or not given[0].dtype.is_floating_point:
        return None
    whole = copy.copy(of)
    whole.__dict__ = {k: v for k, v in of.__dict__.items() if k not in ("forward", "_vexact")}
    whole._parameters = {k: None if p is None else p.detach().to(device, dtype) for k, p in of._parameters.items()}
    whole._buffers = {k: None if p is None else p.detach().to(device) for k, p in of._buffers.items()}
    sizes = [p.shape[-1] for p in whole._parameters.values() if p is not None and p.dim() == 1][:1]
    size = sizes[0] if sizes and given[0].width % sizes[0] == 0 else given[0].width
    with contextlib.suppress(Exception), torch.no_grad():  # a module that cannot do so tells nothing
        out = type(of).forward(whole, given[0].values.to(device, dtype).view(len(like), -1, size))
        if isinstance(out, Tensor) and out.numel() == like.numel():
            return out.reshape(like.shape).to(like.dtype).cpu()
    return None


def _split_k(a, b, first: Key, found: "Bisection", traces) -> Cause | None:
    """Whether a product is what K in so many parts gives, each part summed on its own."""
    if not isinstance(a, nn.Linear) or not isinstance(b, nn.Linear) or first.kind not in ("out", "op"):
        return None
    given = [e for k, e in traces[0].entries.items() if k.kind == "in" and k.module == first.module]
    x, y = (t.entries[first].values for t in traces)
    if len(given) != 1 or given[0].values is None or given[0].width != a.in_features or x.shape[1] != a.out_features:
        return None
    weight = a.weight.detach()
    inputs = given[0].values.to(weight.device)
    if inputs.dtype != weight.dtype:
        return None
    parts = {}
    for side, values in (("a", x), ("b", y)):
        for count in PARTS:
            if a.in_features % count == 0 and vx.same_bits(_in_parts(inputs, weight, a.bias, count, x.dtype), values):
                parts[side] = count
                break
    if len(parts) == 2:
        return Cause(SPLIT_K, f"K is summed in {parts['a']} part(s) in a and in {parts['b']} in b")
    if max(parts.values(), default=1) > 1:
        ((side, count),) = parts.items()
        return Cause(SPLIT_K, f"K is summed in {count} parts in {side}")
    if found.ops_a != found.ops_b and _close(inputs, weight, a.bias, x) and _close(inputs, weight, a.bias, y):
        rest = f"; {next(iter(parts))} sums K ascending in one accumulator" if parts else ""
        return Cause(ORDER, f"both are right to a rounding, and K is summed in another order or in other tiles{rest}")
    return None


def _in_parts(x: Tensor, weight: Tensor, bias: Tensor | None, parts: int, dtype: torch.dtype) -> Tensor:
    size = x.shape[1] // parts
    whole = None
    for k in range(0, x.shape[1], size):
        part = vx.linear_logits(x[:, k : k + size].contiguous(), weight[:, k : k + size].contiguous())
        whole = part if whole is None else whole + part
    if bias is not None:
        whole = whole + bias.detach().float()
    return whole.to(dtype).cpu()


def _close(x: Tensor, weight: Tensor, bias: Tensor | None, got: Tensor) -> bool:
    """Within the rounding of one product in its dtype, and of sums of K terms in float32."""
    exact = functional.linear(x.double(), weight.double(), None if bias is None else bias.detach().double())
    size = functional.linear(x.double().abs(), weight.double().abs())
    room = torch.finfo(got.dtype).eps * exact.abs() + 2 * x.shape[1] * 2.0**-24 * size
    return bool(((got.to(exact.device).double() - exact).abs() <= room).all())
