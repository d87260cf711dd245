"""Log-softmax over the last dimension. Its order is that of every log-probability here (csrc/log_softmax/lse.h)."""

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("log_softmax", cpu=("cpu",), cuda=("triton",))


def log_softmax(x: Tensor, *, out_dtype: torch.dtype | None = None, backend: str | None = None) -> Tensor:
    """(x - max x) - log sum e^(x - max x) over the last dimension, fp32 inside, rounded once.

    x          (..., V) bf16 | fp32, on a GPU also fp16. -inf is allowed (probability 0); a row that holds NaN or inf,
               or nothing but -inf, gives NaN in all of it
    out_dtype  bf16 | fp32, on a GPU also fp16; x.dtype where None
    returns    (..., V) in out_dtype
    bits       a row depends on that row alone: on a CPU blocks of 512, merged ascending, on a GPU blocks of 128, each
               and all of them (16,384 at a time, ascending) summed in a tree of pairs; a block's terms are what the
               GPU's special function unit gives, to 2^-22 of each. With fp32 logits these are the bits of
               linear_logprobs and sample: log_softmax(linear_logits(h, w) / t)[target] is
               linear_logprobs(h, w, target, temperature=t)
    grad       dx = dy - e^y sum(dy) as bits, e^y from the unrounded y
    raises     TypeError on dtype, ValueError on shape, BackendUnavailable
    source     Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867
    example
    >>> vx.log_softmax(torch.tensor([[0.0, 0.0, -torch.inf]])).tolist()
    [[-0.6931471824645996, -0.6931471824645996, -inf]]
    """
    check.tensor("log_softmax", "x", x, check.FLOATS)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"log_softmax: x: got shape {tuple(x.shape)}, expected (..., V) with V of at least 1")
    if out_dtype not in (None, *check.FLOATS):
        raise TypeError(
            f"log_softmax: out_dtype: got {out_dtype}, expected torch.bfloat16, torch.float32, on a GPU torch.float16, "
            "or None"
        )
    backend = ROOM.resolve(x.device, backend)
    check.served("log_softmax", "x", x.dtype, backend)
    check.served("log_softmax", "out_dtype", out_dtype, backend)
    return _log_softmax(check.rows(x), out_dtype or x.dtype, backend)[0].view(x.shape)


def _fwd(x: Tensor, out_dtype: torch.dtype, backend: str):
    return ROOM.module(backend).log_softmax_fwd(x, out_dtype)


def _fwd_fake(x, out_dtype, backend):
    return x.new_empty(x.shape, dtype=out_dtype), x.new_empty((x.shape[0], 2), dtype=torch.float32)


def _setup(ctx, inputs, output):
    x, _, ctx.backend = inputs
    _, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(x, lse)


def _backward(ctx, dy, _):
    return _log_softmax_bwd(dy, *ctx.saved_tensors, ctx.backend), None, None


def _bwd(dy: Tensor, x: Tensor, lse: Tensor, backend: str):
    return ROOM.module(backend).log_softmax_bwd(dy.contiguous(), x, lse)


_log_softmax_bwd = Operator(
    "log_softmax_bwd(Tensor dy, Tensor x, Tensor lse, str backend) -> Tensor",
    _bwd,
    lambda dy, x, lse, backend: x.new_empty(x.shape),
)
_log_softmax = Operator(
    "log_softmax(Tensor x, ScalarType out_dtype, str backend) -> (Tensor, Tensor)", _fwd, _fwd_fake, _setup, _backward
)
