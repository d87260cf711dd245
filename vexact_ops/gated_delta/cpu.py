"""The C++ kernels (csrc/gated_delta/cpu_kernels.cpp)."""

import torch
from torch import Tensor

from .._core import native
from .._core.sequences import explain_offsets, explain_singles, explain_slots, singles_valid


def _explain_gates(op: str, g: Tensor, beta: Tensor) -> None:
    for arg, x, bad, expected in (
        ("g", g, g > 0, "at most 0, the logarithm of a decay"),
        ("beta", beta, (beta < 0) | (beta > 2), "from 0 to 2"),
    ):
        if bad.any():
            row, head = bad.nonzero()[0].tolist()
            raise ValueError(f"{op}: {arg}[{row}, {head}]: got {float(x[row, head])}, expected {expected}")


def varlen_fwd(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, final):
    op, out = "gated_delta_varlen", torch.empty(v.shape, dtype=v.dtype)
    shape = cu_seqlens.shape[0] - 1, v.shape[1], q.shape[2], v.shape[2]
    state = torch.empty(shape, dtype=torch.float32) if final else None
    tensors = q, k, v, g, beta, cu_seqlens, initial_state
    if not native.ops().gated_delta_varlen_fwd(*tensors, scale, l2norm, out, state):
        explain_offsets(op, "cu_seqlens", cu_seqlens, q.shape[0], "q")
        _explain_gates(op, g, beta)
        raise AssertionError(f"{op}: the kernel refused offsets, g and beta that are in order")
    return out, state


def varlen_bwd(dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm):
    parts = [torch.empty((*v.shape[:2], q.shape[2]), dtype=torch.float32) for _ in "qk"]
    dq, dk, dv, dg, dbeta = (torch.empty(x.shape, dtype=x.dtype) for x in (q, k, v, g, beta))
    dinitial = None if initial_state is None else torch.empty_like(initial_state)
    tensors = dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state
    native.ops().gated_delta_varlen_bwd(*tensors, scale, l2norm, *parts, dq, dk, dv, dg, dbeta, dinitial)
    return dq, dk, dv, dg, dbeta, dinitial


def paged_fwd(
    q, k, v, g, beta, state, open_k, open_u, open_g, slots, context_lens, cu_seqlens_q, max_seqlen_q, singles, scale,
    l2norm,
):  # fmt: skip
    op, out = "gated_delta_paged", torch.empty(v.shape, dtype=v.dtype)
    g, beta = g.contiguous(), beta.float().contiguous()
    tensors = q, k, v, g, beta, state, open_k, open_u, open_g, slots, context_lens, cu_seqlens_q
    given = *tensors, max_seqlen_q, scale, l2norm, out
    if not (singles_valid(cu_seqlens_q, singles) and native.ops().gated_delta_paged_fwd(*given)):
        offsets = explain_offsets(op, "cu_seqlens_q", cu_seqlens_q, q.shape[0], "q", max_seqlen_q)
        explain_singles(op, singles, offsets)
        explain_slots(op, slots, context_lens, offsets, state.shape[0])
        _explain_gates(op, g, beta)
        raise AssertionError(f"{op}: the kernel refused offsets, slots, lengths and gates that are in order")
    return out


def step_fwd(*given) -> None:
    """None: the three ops compute it. Of what they would refuse by their own names, what is asked of this op."""
    x, offsets, longest, singles = given[0], *given[14:17]
    if not singles_valid(offsets, singles):
        op = "conv_gated_delta_paged"
        explain_singles(op, singles, explain_offsets(op, "cu_seqlens_q", offsets, x.shape[0], "x", longest))


def delta_gates_fwd(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor, g: Tensor, beta: Tensor) -> None:
    rounded = beta if beta.dtype == b.dtype else b.new_empty(b.shape)
    native.ops().delta_gates_fwd(a, b, a_log.float(), dt_bias.float(), g, rounded)
    if rounded is not beta:
        beta.copy_(rounded)


def delta_gates_bwd(dg: Tensor, dbeta: Tensor, a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor):
    a_log, dt_bias = a_log.float(), dt_bias.float()
    grads = a.new_empty(a.shape), b.new_empty(b.shape), torch.empty_like(a_log), torch.empty_like(dt_bias)
    native.ops().delta_gates_bwd(dg, dbeta, a, b, a_log, dt_bias, *grads)
    return grads
