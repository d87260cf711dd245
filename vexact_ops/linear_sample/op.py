"""The head and the sampler of a step in one: draws from hidden states, with no R x V logits where no row is cut."""

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator
from ..sampler.op import check_columns, columns

ROOM = Room("linear_sample", cpu=("cpu",), cuda=("cuda", "triton"))


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    seeds: Tensor | int,
    positions: Tensor | int,
    *,
    temperature: Tensor | float = 1.0,
    top_k: Tensor | int = 0,
    top_p: Tensor | float = 1.0,
    min_p: Tensor | float = 0.0,
    softcap: float | None = None,
    backend: str | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """sample(linear_logits(hidden, weight, softcap=softcap), seeds, positions, ...), byte for byte.

    hidden     (R, H) bf16 | fp32, on a GPU also fp16
    weight     (V, H) in hidden.dtype
    softcap    above 0, or None
    the others as sample's. Where top_k, top_p and min_p are the numbers 0, 1 and 0, no row is cut, and on a GPU no
               logits are stored: every block of them leaves its sums where it was made, and its token if it may win.
               As tensors they may cut any row, whatever they hold (nobody looks): then logits are made and `sample`
               draws. So a CUDA graph of the one kind and one of the other serve all steps
    returns    ids (R,) int64, -1 for a row without a finite log-sum-exp; logprobs and raw logprobs (R,) fp32
    bits       those of linear_logits and sample, so of linear_logprobs and log_softmax: a row's depend on its hidden,
               its seed, position and parameters, on weight and softcap alone
    raises     as linear_logits and sample
    example
    >>> hidden, weight, seeds = torch.randn(3, 16), torch.randn(50, 16), torch.tensor([1, 2, 3])
    >>> fused = vx.linear_sample(hidden, weight, seeds, 10, temperature=0.7)
    >>> apart = vx.sample(vx.linear_logits(hidden, weight), seeds, 10, temperature=0.7)
    >>> [vx.same_bits(a, b) for a, b in zip(fused, apart)]
    [True, True, True]
    """
    op = "linear_sample"
    check.tensor(op, "hidden", hidden, check.FLOATS, 2)
    check.tensor(op, "weight", weight, ndim=2)
    check.same_dtype(op, "weight", weight, "hidden", hidden)
    check.shape(op, "weight", weight, ("V", hidden.shape[1]))
    if weight.shape[0] == 0:
        raise ValueError(f"{op}: weight: got shape {tuple(weight.shape)}, expected (V, H) with V of at least 1")
    check.same_device(op, hidden=hidden, weight=weight)
    cap = 0.0 if softcap is None else check.number(op, "softcap", softcap, above=0.0)
    backend = ROOM.resolve(hidden.device, backend)
    check.served(op, "hidden", hidden.dtype, backend)
    cuts = top_k, top_p, min_p
    if type(top_k) is int and all(type(cut) in (int, float) for cut in cuts) and cuts == (0, 1.0, 0.0):
        params = *columns(op, hidden, seeds, positions, temperature), None, None, None
    else:
        params = columns(op, hidden, seeds, positions, temperature, *cuts)
    return _linear_sample(hidden.detach(), weight.detach(), *params, cap, backend)


def _fwd(hidden, weight, seeds, positions, temperature, top_k, top_p, min_p, softcap, backend):
    params = tuple(p.contiguous() for p in (seeds, positions, temperature, top_k, top_p, min_p) if p is not None)
    check_columns("linear_sample", *params)
    return ROOM.module(backend).linear_sample(check.rows(hidden), check.rows(weight), softcap, *params)


def _fwd_fake(hidden, *args):
    rows = hidden.shape[0]
    return (
        hidden.new_empty(rows, dtype=torch.int64),
        hidden.new_empty(rows, dtype=torch.float32),
        hidden.new_empty(rows, dtype=torch.float32),
    )


_linear_sample = Operator(
    "linear_sample(Tensor hidden, Tensor weight, Tensor seeds, Tensor positions, Tensor temperature, Tensor? top_k, "
    "Tensor? top_p, Tensor? min_p, float softcap, str backend) -> (Tensor, Tensor, Tensor)",
    _fwd,
    _fwd_fake,
)
