"""A gated delta net from a layer's projection to its output: the convolution, the gates and the net in one call."""

import torch
from torch import Tensor

from .._core import check, sequences
from .._core.operator import Operator
from ..causal_conv.op import causal_conv_paged, check_paged, paged_fits
from .gates import check_gates, delta_gates, gates_fit
from .op import ROOM, check_heads, check_longest, check_memory, gated_delta_paged, memory_fits


def conv_gated_delta_paged(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    taps: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    open_k: Tensor,
    open_u: Tensor,
    open_g: Tensor,
    slots: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    double_beta: bool = False,
    singles: int = 0,
    backend: str | None = None,
) -> Tensor:
    """gated_delta_paged of what causal_conv_paged and delta_gates give: of single rows, on a GPU, one kernel that reads
    a layer's projection and what slots remember, where they are a whole call or `singles` says so. No gradients.

    x             (T, 2 Hk dk + Hv dv): queries, keys and values side by side, before the convolution; as in
                  causal_conv_paged, with weight, bias and taps. The activation is silu
    a, b          (T, Hv): as in delta_gates, with a_log and dt_bias
    state, open_k, open_u, open_g, slots, context_lens, cu_seqlens_q, max_seqlen_q, scale, qk_l2norm, singles
                  as in gated_delta_paged. taps has as many slots
    double_beta   beta times 2, which lets eigenvalues be negative
    returns       (T, Hv, dv) in x.dtype
    bits          those of the three ops, in what is returned and in slots
    grad          none: a RuntimeError where an input requires one in grad mode
    raises        TypeError on dtype, ValueError on shape, strides, values (on CPU) or device, BackendUnavailable. On a
                  GPU values are not looked at (that would stall the stream); they touch no memory but the arguments'
    example
    >>> x, weight, taps = torch.randn(1, 64), torch.randn(64, 4), torch.zeros(3, 4, 64)
    >>> a, b, a_log, dt_bias = torch.randn(1, 2), torch.randn(1, 2), torch.zeros(2), torch.ones(2)
    >>> slot = torch.zeros(3, 2, 16, 16), torch.zeros(3, 64, 1, 16), torch.zeros(3, 64, 2, 16), torch.zeros(3, 64, 2)
    >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> gates = a, b, a_log, dt_bias
    >>> step = ints(2), ints(1), ints(0, 1), 1
    >>> vx.conv_gated_delta_paged(x, weight, None, taps, *gates, *slot, *step).shape
    torch.Size([1, 2, 16])
    """
    op = "conv_gated_delta_paged"
    step = slots, context_lens, cu_seqlens_q
    given = {"weight": weight, "bias": bias, "taps": taps, "a": a, "b": b, "a_log": a_log, "dt_bias": dt_bias}
    given |= {"state": state, "open_k": open_k, "open_u": open_u, "open_g": open_g}
    if not _fits(x, *given.values(), *step):
        _check(op, x, *given.values(), *step)
        check.same_device(op, x=x, **given, slots=slots, context_lens=context_lens, cu_seqlens_q=cu_seqlens_q)
    sequences.check_singles(op, singles, slots.shape[0])
    if torch.is_grad_enabled():
        sequences.no_gradient(op, "causal_conv, delta_gates and gated_delta_varlen", x=x, **given)
    check_longest(op, max_seqlen_q)
    backend = ROOM.resolve(x.device, backend)
    check.served(op, "x", x.dtype, backend)
    scale = open_k.shape[3] ** -0.5 if scale is None else check.number(op, "scale", scale)
    options = max_seqlen_q, singles, scale, bool(qk_l2norm), bool(double_beta), backend
    return _conv_gated_delta_paged(check.rows(x), *given.values(), *step, *options)


def _fits(x, weight, bias, taps, a, b, a_log, dt_bias, state, open_k, open_u, open_g, *step) -> bool:
    """Whether _check would find nothing, nor another device: the engine asks at every layer of every step."""
    if not (
        paged_fits(x, weight, bias, taps, *step)
        and gates_fit(a, b, a_log, dt_bias)
        and check.alike(x, a, open_k)
        and check.alike(state, open_u, open_g)
        and open_k.dim() == open_u.dim() == 4
    ):
        return False
    key, value = open_k.shape[2:], open_u.shape[2:]
    return (
        state.dtype == torch.float32
        and state.device == x.device
        and memory_fits(key, value, state, open_k, open_u, open_g)
        and taps.shape[0] == state.shape[0]
        and x.shape[1] == 2 * key.numel() + value.numel()
        and a.shape == (x.shape[0], value[0])
    )


def _check(op, x, weight, bias, taps, a, b, a_log, dt_bias, state, open_k, open_u, open_g, *step) -> None:
    check.tensor(op, "open_k", open_k, ndim=4)
    check.tensor(op, "open_u", open_u, ndim=4)
    key, value = open_k.shape[2:], open_u.shape[2:]
    check_heads(op, "open_u", key, value)
    check_paged(op, x, weight, bias, taps)
    check.shape(op, "x", x, ("T", 2 * key.numel() + value.numel()))
    check_gates(op, a, b, a_log, dt_bias)
    check.same_dtype(op, "a", a, "x", x)
    check.shape(op, "a", a, (x.shape[0], value[0]))
    check_memory(op, x.dtype, key, value, state=state, open_k=open_k, open_u=open_u, open_g=open_g)
    check.shape(op, "taps", taps, (state.shape[0], "ring", x.shape[1]))
    sequences.check_slots(op, *step)


def _fwd(*given):
    *args, backend = given
    step_fwd = getattr(ROOM.module(backend), "step_fwd", None)
    out = step_fwd(*args) if step_fwd else None
    return _apart(*given) if out is None else out


def _apart(x, weight, bias, taps, a, b, a_log, dt_bias, state, open_k, open_u, open_g, slots, lens, offsets, *rest):
    """By the three ops, each by its own kernels."""
    longest, singles, scale, l2norm, doubled, backend = rest
    step = slots, lens, offsets
    (hk, dk), (hv, dv) = open_k.shape[2:], open_u.shape[2:]
    conv_backend = None if backend == "cuda" else backend
    qkv = causal_conv_paged(x, weight, bias, taps, *step, singles=singles, backend=conv_backend)
    q, k, v = qkv.split_with_sizes((hk * dk, hk * dk, hv * dv), 1)
    # chunks would have a copy made of a beta that is not wide
    g, beta = delta_gates(a, b, a_log, dt_bias, beta_dtype=torch.float32, backend=backend)
    if doubled:
        beta = beta * 2.0
    rows = q.unflatten(1, (hk, dk)), k.unflatten(1, (hk, dk)), v.unflatten(1, (hv, dv)), g, beta
    memory, options = (state, open_k, open_u, open_g), {"scale": scale, "qk_l2norm": l2norm, "singles": singles}
    return gated_delta_paged(*rows, *memory, *step, longest, **options, backend=backend)


def _fake(x, *args):
    return x.new_empty(x.shape[0], *args[9].shape[2:])  # open_u's heads


_conv_gated_delta_paged = Operator(
    "conv_gated_delta_paged(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) taps, Tensor a, Tensor b, Tensor a_log,"
    " Tensor dt_bias, Tensor(b!) state, Tensor(c!) open_k, Tensor(d!) open_u, Tensor(e!) open_g, Tensor slots,"
    " Tensor context_lens, Tensor cu_seqlens_q, SymInt max_seqlen_q, SymInt singles, float scale, bool l2norm,"
    " bool doubled, str backend) -> Tensor",
    _fwd,
    _fake,
)
