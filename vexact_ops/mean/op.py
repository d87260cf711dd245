"""The mean and the sum over any dimensions."""

import math
from collections.abc import Sequence

from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("mean", cpu=("cpu",), cuda=("triton",))


def mean(
    x: Tensor, dim: int | Sequence[int] | None = -1, keepdim: bool = False, *, backend: str | None = None
) -> Tensor:
    """The sum over `dim` divided by the number of elements, fp32 inside, rounded once.

    x        any shape, bf16 | fp32, on a GPU also fp16
    dim      the dimensions to reduce; None or an empty sequence means all of them, as for torch.mean
    keepdim  keep them with size 1
    returns  x's shape without `dim`, in x.dtype; NaN where there is nothing to sum
    bits     an element depends on the elements it averages alone, whatever the others, the strides and the threads:
             blocks over the reduced dimensions (in ascending order of dimension, the last one fastest): on a CPU of
             512, block sums added ascending; on a GPU of up to 8192, blocks and block sums each in a tree of pairs
    grad     dy / n, rounded once, as bits
    raises   TypeError on dtype, ValueError on dim, BackendUnavailable
    example
    >>> x = torch.randn(4, 1000)
    >>> vx.same_bits(vx.mean(x)[2:3], vx.mean(x[2:3]))
    True
    """
    return _reduce("mean", x, dim, keepdim, backend)


def sum(  # the name that torch has for it
    x: Tensor, dim: int | Sequence[int] | None = None, keepdim: bool = False, *, backend: str | None = None
) -> Tensor:
    """The sum over `dim`, in fp32, rounded once. All that mean's contract says holds, but for the division; the sum of
    nothing is 0, and dim is None, all of them, where it is not given: as for torch.sum.

    grad     dy, as bits
    example
    >>> vx.sum(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), dim=0)
    tensor([4., 6.])
    """
    return _reduce("sum", x, dim, keepdim, backend)


def _reduce(op: str, x: Tensor, dim, keepdim: bool, backend: str | None) -> Tensor:
    check.tensor(op, "x", x, check.FLOATS)
    dims = _dims(op, x, dim)
    backend = ROOM.resolve(x.device, backend)
    check.served(op, "x", x.dtype, backend)
    kept = [d for d in range(x.dim()) if d not in dims]
    shape = [x.shape[d] for d in kept]
    flat = x.permute(kept + dims).reshape(math.prod(shape), math.prod([x.shape[d] for d in dims]))
    y = _mean(check.rows(flat), float(flat.shape[1]) if op == "mean" else 1.0, backend)
    return y.view([1 if d in dims else x.shape[d] for d in range(x.dim())] if keepdim else shape)


def _dims(op: str, x: Tensor, dim) -> list[int]:
    if isinstance(dim, bool) or not (dim is None or isinstance(dim, int | list | tuple)):
        raise TypeError(f"{op}: dim: got {type(dim).__name__}, expected int, a sequence of int or None")
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.dim()))
    asked, n = [dim] if isinstance(dim, int) else list(dim), x.dim()
    dims = sorted(d + n if d < 0 else d for d in asked)
    if any(not 0 <= d < n for d in dims) or len(set(dims)) < len(dims):
        raise ValueError(f"{op}: dim: got {dim}, expected distinct dimensions of a {n}-dimensional x")
    return dims


def _fwd(x: Tensor, divisor: float, backend: str):
    return ROOM.module(backend).mean_fwd(x, divisor)


def _setup(ctx, inputs, output):
    x, ctx.divisor, ctx.backend = inputs
    ctx.n = x.shape[1]


def _backward(ctx, dy):
    return _mean_bwd(dy, ctx.divisor, ctx.backend)[:, None].expand(-1, ctx.n), None, None


_mean_bwd = Operator(
    "mean_bwd(Tensor dy, float divisor, str backend) -> Tensor",
    lambda dy, divisor, backend: ROOM.module(backend).mean_bwd(dy.contiguous(), divisor),
    lambda dy, divisor, backend: dy.new_empty(dy.shape),
)
_mean = Operator(
    "mean(Tensor x, float divisor, str backend) -> Tensor",
    _fwd,
    lambda x, divisor, backend: x.new_empty(x.shape[0]),
    _setup,
    _backward,
)
