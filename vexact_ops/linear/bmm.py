"""Products of matrices that are no weights, a batch of them at a time, in the order of linear."""

import torch
from torch import Tensor

from .._core import check
from .._core.operator import Operator
from .op import ROOM


def bmm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None, backend: str | None = None) -> Tensor:
    """a @ b for every pair of a batch, accumulated in fp32 and rounded once.

    a          (B, M, K) bf16 | fp32, on a GPU also fp16; any strides
    b          (B, K, N) in a.dtype, any strides
    out_dtype  a.dtype (default), or torch.float32 for the accumulators themselves
    returns    (B, M, N) in out_dtype, contiguous
    bits       an output element has the order of linear: it depends on its row of a and its column of b alone, and is
               what linear gives for that row and that column as a row of a weight
    grad       da = dy @ b.T and db = a.T @ dy, in the same order
    raises     TypeError on dtype, ValueError on shape or device, BackendUnavailable
    example
    >>> a, b = torch.randn(2, 5, 16), torch.randn(2, 16, 3)
    >>> vx.same_bits(vx.bmm(a, b)[1], vx.linear(a[1], b[1].T.contiguous()))
    True
    """
    check.tensor("bmm", "a", a, check.FLOATS, 3)
    check.tensor("bmm", "b", b, ndim=3)
    check.same_dtype("bmm", "b", b, "a", a)
    check.shape("bmm", "b", b, (a.shape[0], a.shape[2], "N"))
    check.same_device("bmm", a=a, b=b)
    if out_dtype is None:
        out_dtype = a.dtype
    elif out_dtype not in (a.dtype, torch.float32):
        raise TypeError(f"bmm: out_dtype: got {out_dtype}, expected {a.dtype} or torch.float32")
    backend = ROOM.resolve(a.device, backend)
    check.served("bmm", "a", a.dtype, backend)
    return _bmm(a, b, out_dtype, backend)


def _fwd(a: Tensor, b: Tensor, out_dtype: torch.dtype, backend: str) -> Tensor:
    return ROOM.module(backend).bmm(a, b, out_dtype)


def _setup(ctx, inputs, output):
    a, b, _, ctx.backend = inputs
    ctx.save_for_backward(a, b)


def _backward(ctx, dy):
    a, b = ctx.saved_tensors
    da = _bmm(dy, b.mT, a.dtype, ctx.backend) if ctx.needs_input_grad[0] else None
    db = _bmm(a.mT, dy, b.dtype, ctx.backend) if ctx.needs_input_grad[1] else None
    return da, db, None, None


_bmm = Operator(
    "bmm(Tensor a, Tensor b, ScalarType out_dtype, str backend) -> Tensor",
    _fwd,
    lambda a, b, out_dtype, backend: a.new_empty(a.shape[0], a.shape[1], b.shape[2], dtype=out_dtype),
    _setup,
    _backward,
)
