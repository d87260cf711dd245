"""Argument checks with messages that name op, argument, got and expected. TypeError: dtype; ValueError: the rest."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float32, torch.float16)  # what an op's arguments may hold; `served` has the last word


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def tensor(op: str, arg: str, value, dtypes: Sequence[torch.dtype] | None = None, ndim: int | None = None) -> Tensor:
    """`value` is a tensor of one of `dtypes`, of `ndim` dimensions."""
    if not isinstance(value, Tensor):
        raise TypeError(f"{op}: {arg}: got {type(value).__name__}, expected a torch.Tensor")
    if dtypes is not None and value.dtype not in dtypes:
        expected = " or ".join(_name(d) for d in dtypes)
        raise TypeError(f"{op}: {arg}: got dtype {_name(value.dtype)}, expected {expected}")
    if ndim is not None and value.dim() != ndim:
        raise ValueError(f"{op}: {arg}: got shape {tuple(value.shape)}, expected {ndim} dimensions")
    return value


def served(op: str, arg: str, dtype: torch.dtype, backend: str) -> None:
    """The backend computes in this dtype: the C++ kernels have no fp16."""
    if backend == "cpu" and dtype == torch.float16:
        raise TypeError(f"{op}: {arg}: got dtype float16, which a GPU serves; expected bfloat16 or float32 on a CPU")


def same_dtype(op: str, arg: str, value: Tensor, other_arg: str, other: Tensor) -> None:
    if value.dtype != other.dtype:
        raise TypeError(
            f"{op}: {arg}: got dtype {_name(value.dtype)}, expected {_name(other.dtype)} as {other_arg} has"
        )


def alike(first, *others) -> bool:
    """Whether all are tensors of the first one's dtype, on its device. For ops of which a step makes hundreds of calls:
    where this and a few shapes are as they should be, nothing else needs to be asked."""
    if not isinstance(first, Tensor):
        return False
    dtype, device = first.dtype, first.device
    for value in others:
        if not (isinstance(value, Tensor) and value.dtype is dtype and value.device == device):
            return False
    return True


def same_device(op: str, **tensors: Tensor | None) -> None:
    """All given tensors live on the first one's device."""
    first_arg = first = None
    for arg, value in tensors.items():
        if value is None:
            continue
        if first is None:
            first_arg, first = arg, value.device
        elif value.device != first:
            raise ValueError(f"{op}: {arg}: got device {value.device}, expected {first} as {first_arg} has")


def shape(op: str, arg: str, value: Tensor, expected: Sequence[int | str]) -> None:
    """`value` has this shape; a string in `expected` stands for any size and is shown in the message."""
    got = value.shape
    if len(got) == len(expected):
        for g, e in zip(got, expected):  # a loop: it takes half as long as any() over a generator, at every call
            if g is not e and isinstance(e, int) and g != e:
                break
        else:
            return
    text = ", ".join(str(e) for e in expected) + ("," if len(expected) == 1 else "")
    raise ValueError(f"{op}: {arg}: got shape {tuple(got)}, expected ({text})")


def contiguous_last(op: str, arg: str, value: Tensor) -> None:
    if value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
        got = f"strides {value.stride()} for shape {tuple(value.shape)}"
        raise ValueError(f"{op}: {arg}: got {got}, expected the last dimension contiguous")


def number(op: str, arg: str, value, *, above: float | None = None, at_least: float | None = None) -> float:
    """A finite real number, optionally > above or >= at_least."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{op}: {arg}: got {type(value).__name__}, expected a number")
    low = (above is not None and value <= above) or (at_least is not None and value < at_least)
    if low or not math.isfinite(value):
        bound = f" above {above}" if above is not None else f" of at least {at_least}" if at_least is not None else ""
        raise ValueError(f"{op}: {arg}: got {value}, expected a finite number{bound}")
    return float(value)


def choice(op: str, arg: str, value, allowed: Sequence) -> None:
    if value not in allowed:
        raise ValueError(f"{op}: {arg}: got {value!r}, expected one of {', '.join(repr(a) for a in allowed)}")


def rows(value: Tensor) -> Tensor:
    """(..., N) as (R, N) with the last dimension contiguous, without a copy where strides allow."""
    flat = value if value.dim() == 2 else value.reshape(-1, value.shape[-1])
    return flat if flat.shape[-1] <= 1 or flat.stride(-1) == 1 else flat.contiguous()


def shaped(rows: Tensor, like: Tensor) -> Tensor:
    """(R, N) in the shape of what check.rows made them of."""
    return rows if rows.dim() == like.dim() else rows.view(like.shape)


def matrices(value: Tensor) -> Tensor:
    """(E, N, K) with the last dimension contiguous, any other strides, without a copy where it is so already."""
    return value if value.shape[-1] <= 1 or value.stride(-1) == 1 else value.contiguous()
