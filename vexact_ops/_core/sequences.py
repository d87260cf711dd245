"""Checks of packed sequences and of the slots that they keep their memory in.

Kernels on the CPU look at the values of offsets, lengths and slots while they plan their work, and write nothing where
one is out of range; only then do the functions that explain look at them one by one: a good call pays nothing for it.
"""

import itertools

import torch
from torch import Tensor

from . import check

_INT32 = (torch.int32,)


def check_offsets(op: str, arg: str, offsets: Tensor) -> int:
    """`offsets` is (B + 1,) int32; returns B."""
    check.tensor(op, arg, offsets, _INT32, 1)
    if offsets.shape[0] == 0:
        raise ValueError(f"{op}: {arg}: got shape (0,), expected (B + 1,)")
    return offsets.shape[0] - 1


def check_slots(op: str, slots: Tensor, context_lens: Tensor, cu_seqlens_q: Tensor) -> int:
    """(B,), (B,) and (B + 1,) int32; returns B."""
    batch = check_offsets(op, "cu_seqlens_q", cu_seqlens_q)
    for arg, x in (("slots", slots), ("context_lens", context_lens)):
        check.tensor(op, arg, x, _INT32)
        check.shape(op, arg, x, (batch,))
    return batch


def check_singles(op: str, singles: int, batch: int) -> None:
    """An int of at most B. Whether so many sequences have one row each is for those to say who look at values."""
    if isinstance(singles, bool) or not isinstance(singles, int | torch.SymInt):
        raise TypeError(f"{op}: singles: got {type(singles).__name__}, expected an int")
    if isinstance(singles, int) and singles and not 0 < singles <= batch:
        raise ValueError(f"{op}: singles: got {singles}, expected 0 to {batch}, the sequences")


def singles_valid(offsets: Tensor, singles: int) -> bool:
    """On a CPU: the first so many sequences have one row each, if the offsets are in order."""
    return not singles or torch.equal(offsets[: singles + 1], torch.arange(singles + 1, dtype=offsets.dtype))


def contiguous_slots(op: str, arg: str, x: Tensor) -> None:
    """What lies in a slot is contiguous; slots may lie any distance apart."""
    if not x.is_contiguous() and x.shape[0] and not x[0].is_contiguous():
        got = f"strides {x.stride()} for shape {tuple(x.shape)}"
        raise ValueError(f"{op}: {arg}: got {got}, expected each slot contiguous")


def no_gradient(op: str, instead: str, **tensors: Tensor | None) -> None:
    if torch.is_grad_enabled():
        for arg, x in tensors.items():
            if x is not None and x.requires_grad:
                raise RuntimeError(
                    f"{op}: {arg} requires a gradient, and this op has none: call it under torch.no_grad(), or use "
                    f"{instead} to train"
                )


def explain_offsets(op: str, arg: str, offsets: Tensor, rows: int, what: str, longest: int | None = None) -> list[int]:
    """Raises for offsets that do not ascend from 0 to `rows`, or by more than `longest`; else their values."""
    values = offsets.tolist()
    if values[0] != 0:
        raise ValueError(f"{op}: {arg}: got {values[0]} as its first value, expected 0")
    for i, (begin, end) in enumerate(itertools.pairwise(values)):
        if end < begin:
            raise ValueError(f"{op}: {arg}: got {end} after {begin} at index {i + 1}, expected ascending offsets")
    if values[-1] != rows:
        raise ValueError(f"{op}: {arg}: got {values[-1]} as its last value, expected {rows}, the rows of {what}")
    for begin, end in itertools.pairwise(values):
        if longest is not None and end - begin > longest:
            name = "max_seqlen" + arg.removeprefix("cu_seqlens")
            raise ValueError(f"{op}: {name}: got {longest}, expected at least {end - begin}, the longest sequence")
    return values


def explain_singles(op: str, singles: int, offsets: list[int]) -> None:
    """Raises where one of the first so many sequences has no row, or more than one."""
    for i, (begin, end) in enumerate(itertools.pairwise(offsets[: singles + 1])):
        if end - begin != 1:
            raise ValueError(f"{op}: singles: got {singles}, expected at most {i}: sequence {i} has {end - begin} rows")


def explain_slots(op: str, slots: Tensor, context_lens: Tensor, offsets: list[int], count: int) -> None:
    """Raises for a length below its call's rows, and for a slot that is not there or given twice."""
    seen: dict[int, int] = {}
    for i, (slot, length) in enumerate(zip(slots.tolist(), context_lens.tolist())):
        rows = offsets[i + 1] - offsets[i]
        if length < rows:
            expected = f"at least {rows}, the sequence's rows in this call"
            raise ValueError(f"{op}: context_lens[{i}]: got {length}, expected {expected}")
        if not -1 <= slot < count:
            raise ValueError(f"{op}: slots[{i}]: got {slot}, expected -1 (none) or one of {count} slots")
        if slot in seen:
            raise ValueError(f"{op}: slots[{i}]: got {slot}, which is slots[{seen[slot]}] too, expected another one")
        if slot >= 0:
            seen[slot] = i
