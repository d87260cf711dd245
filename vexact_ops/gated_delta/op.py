"""Gated delta nets: one chunked definition for training, prefill chunks and decode, with the same bits in all three."""

from collections.abc import Sequence
from typing import Literal, overload

import torch
from torch import Tensor

from .._core import check, sequences
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("gated_delta", cpu=("cpu",), cuda=("cuda", "triton"))
CHUNK = 64  # rows of a chunk, cut from the start of a sequence
WIDEST = 256
GROUP = 64  # value heads of a key head, at most
_FP32 = (torch.float32,)


@overload
def gated_delta_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    return_final_state: Literal[False] = False,
    backend: str | None = None,
) -> Tensor: ...
@overload
def gated_delta_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    return_final_state: Literal[True],
    backend: str | None = None,
) -> tuple[Tensor, Tensor]: ...
def gated_delta_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
    return_final_state: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """The gated delta rule within each of the packed sequences, 64 rows at a time; the training form, with gradients.

    Row by row it is S = exp(g) S; S += k (beta (v - S^T k))^T; o = scale S^T q. In chunks, with S the state at a
    chunk's start and G_i the sum of g from there up to row i:

        u_i = beta_i (v_i - exp(G_i) S^T k_i) - sum over j < i of beta_i exp(G_i - G_j) (k_i . k_j) u_j
        o_i = scale (exp(G_i) S^T q_i + sum over j <= i of exp(G_i - G_j) (q_i . k_j) u_j)
        S'  = exp(G_last) S + sum over j of exp(G_last - G_j) k_j u_j^T

    q, k           (T, Hk, dk) bf16 | fp32, on a GPU also fp16; the sequences' rows one sequence after another
    v              (T, Hv, dv) in q.dtype; Hv a multiple of Hk: value head h reads key head h // (Hv // Hk). dk and dv
                   from 16 to 256
    g              (T, Hv) fp32, at most 0: the logarithm of the decay
    beta           (T, Hv) fp32 or q.dtype, from 0 to 2: a sigmoid, which rounds to its ends, or twice one (OLMo Hybrid)
    cu_seqlens     (B + 1,) int32: sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1]; from 0 to T. A sequence
                   may have no rows: its final state is its initial one
    scale          dk ** -0.5 by default
    qk_l2norm      divide q and k by sqrt(sum of squares + 1e-6) first, in fp32
    initial_state  (B, Hv, dk, dv) fp32 contiguous: the state before each sequence's first row, where its first chunk
                   starts; zeros by default
    returns        (T, Hv, dv) in q.dtype, rounded once; with return_final_state, also (B, Hv, dk, dv) fp32, the state
                   behind each sequence's last row
    bits           a row depends on itself and the rows before it in its sequence, and on the initial state. fp32
                   inside. G is summed ascending. Products over dk, over the rows of earlier blocks of 16 in the chunk
                   and over a whole chunk are one accumulator each, ascending; then the rows of the own block, one fma
                   each, ascending. On a GPU, with 16-bit inputs, operands of such products are rounded to tf32 (to the
                   nearest, ties away from 0). Equal to gated_delta_paged for any split of a sequence into calls
    grad           q, k, v, g, beta, initial_state, as bits of their own sequence. States at chunk starts are made anew
                   in the backward pass: memory is O(T / 64) states; on SM90 the forward takes two fifths of one a chunk
    raises         TypeError on dtype, ValueError on shape, values (on CPU: offsets, g above 0, beta outside [0, 2]) or
                   device, BackendUnavailable. NaN is no error: it stays in its sequence
    source         Yang, Kautz and Hatamizadeh, Gated Delta Networks, arXiv 2412.06464
    example
    >>> q, k, v = torch.randn(70, 2, 16), torch.randn(70, 2, 16), torch.randn(70, 4, 16)
    >>> g, beta = -torch.rand(70, 4), torch.rand(70, 4)
    >>> ends = torch.tensor([0, 3, 70], dtype=torch.int32)
    >>> packed = vx.gated_delta_varlen(q, k, v, g, beta, ends)
    >>> rest = q[3:], k[3:], v[3:], g[3:], beta[3:]
    >>> vx.same_bits(packed[3:], vx.gated_delta_varlen(*rest, torch.tensor([0, 67], dtype=torch.int32)))
    True
    """
    op = "gated_delta_varlen"
    scale = _check(op, q, k, v, g, beta, scale)
    batch = sequences.check_offsets(op, "cu_seqlens", cu_seqlens)
    if initial_state is not None:
        check.tensor(op, "initial_state", initial_state, _FP32)
        check.shape(op, "initial_state", initial_state, (batch, v.shape[1], q.shape[2], v.shape[2]))
    tensors = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "cu_seqlens": cu_seqlens}
    check.same_device(op, **tensors, initial_state=initial_state)
    backend = ROOM.resolve(q.device, backend)
    check.served(op, "q", q.dtype, backend)
    options = scale, bool(qk_l2norm), bool(return_final_state), backend
    out, final = _gated_delta_varlen(q, k, v, g, beta, cu_seqlens, initial_state, *options)
    return (out, final) if return_final_state else out


def gated_delta_paged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
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
    singles: int = 0,
    backend: str | None = None,
) -> Tensor:
    """gated_delta_varlen of the last rows of each sequence, which goes on from what its slot remembers and appends to
    it; whole prefills, chunks and single tokens may share a call. No gradients.

    A slot holds the state at the last chunk boundary and, of the chunk that is open, each row's k, u and G. The step
    that appends a chunk's last row writes the new state; no other touches it.

    q, k, v, g, beta, scale, qk_l2norm   as in gated_delta_varlen
    state         (slots, Hv, dk, dv) fp32; each slot contiguous, as below; written in place, as all four are
    open_k        (slots, 64, Hk, dk) in q.dtype: k as given, before the norm
    open_u        (slots, 64, Hv, dv) fp32: u, on a GPU times the norm's factor of k
    open_g        (slots, 64, Hv) fp32: the running sum G
    slots         (B,) int32: each sequence's slot, no two the same. -1: none; its rows start a sequence, and nothing is
                  stored (padding of a step)
    context_lens  (B,) int32: rows of each sequence so far, this call's included: row i of the call has position
                  context_len - rows + i, and place position % 64 in its chunk. A sequence without rows in the call
                  keeps what it has
    cu_seqlens_q  (B + 1,) int32: sequence b has the rows cu_seqlens_q[b] to cu_seqlens_q[b + 1]; from 0 to T
    max_seqlen_q  at least the most rows of a sequence; no effect on bits
    singles       the first so many sequences have one row each, as where decodes come first; no effect on bits
    returns       (T, Hv, dv) in q.dtype
    bits          those of gated_delta_varlen for the same sequence, for any split into calls, slot and batch. In its
                  first chunk a sequence has a state of zeros, whatever its slot holds. Rows that were appended too many
                  are forgotten by a call with a smaller context_len, unless one of them ended a chunk. What a slot
                  holds beyond its open rows has no influence
    grad          none: a RuntimeError where an input requires one in grad mode
    raises        TypeError on dtype, ValueError on shape, strides, values (on CPU) or device, BackendUnavailable. On a
                  GPU values are not looked at (that would stall the stream); they touch no memory but the arguments'
    example
    >>> q, k, v = torch.randn(70, 2, 16), torch.randn(70, 2, 16), torch.randn(70, 4, 16)
    >>> g, beta = -torch.rand(70, 4), torch.rand(70, 4)
    >>> slot = torch.zeros(3, 4, 16, 16), torch.zeros(3, 64, 2, 16), torch.zeros(3, 64, 4, 16), torch.zeros(3, 64, 4)
    >>> ints = lambda *values: torch.tensor(values, dtype=torch.int32)
    >>> rows = q, k, v, g, beta
    >>> first = vx.gated_delta_paged(*(x[:69] for x in rows), *slot, ints(2), ints(69), ints(0, 69), 69)
    >>> last = vx.gated_delta_paged(*(x[69:] for x in rows), *slot, ints(2), ints(70), ints(0, 1), 1)
    >>> vx.same_bits(torch.cat([first, last]), vx.gated_delta_varlen(*rows, ints(0, 70)))
    True
    """
    op = "gated_delta_paged"
    step, memory = (slots, context_lens, cu_seqlens_q), (state, open_k, open_u, open_g)
    if _paged_fits(q, k, v, g, beta, *memory, *step):
        scale = q.shape[2] ** -0.5 if scale is None else check.number(op, "scale", scale)
    else:
        scale = _check_paged(op, q, k, v, g, beta, *memory, *step, scale)
    sequences.check_singles(op, singles, slots.shape[0])
    if torch.is_grad_enabled():
        rows = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
        tensors = {"state": state, "open_k": open_k, "open_u": open_u, "open_g": open_g}
        sequences.no_gradient(op, "gated_delta_varlen", **rows, **tensors)
    check_longest(op, max_seqlen_q)
    backend = ROOM.resolve(q.device, backend)
    check.served(op, "q", q.dtype, backend)
    options = max_seqlen_q, singles, scale, bool(qk_l2norm), backend
    return _gated_delta_paged(q, k, v, g, beta, *memory, *step, *options)


def _paged_fits(q, k, v, g, beta, state, open_k, open_u, open_g, slots, context_lens, cu_seqlens_q) -> bool:
    """Whether _check_paged would find nothing, without its messages: the engine asks at every layer of every step."""
    if not (
        check.alike(q, k, v, open_k)
        and check.alike(g, state, open_u, open_g)
        and check.alike(slots, context_lens, cu_seqlens_q)
        and isinstance(beta, Tensor)
        and q.dim() == v.dim() == 3
        and cu_seqlens_q.dim() == 1
    ):
        return False
    (tokens, hk, dk), (rows, hv, dv), device = q.shape, v.shape, q.device
    return (
        q.dtype in check.FLOATS
        and g.dtype == torch.float32
        and beta.dtype in (torch.float32, q.dtype)
        and slots.dtype == torch.int32
        and g.device == beta.device == slots.device == device
        and k.shape == q.shape
        and rows == tokens
        and g.shape == beta.shape == (tokens, hv)
        and memory_fits((hk, dk), (hv, dv), state, open_k, open_u, open_g)
        and slots.shape == context_lens.shape == (cu_seqlens_q.shape[0] - 1,)
    )


def memory_fits(key, value, state, open_k, open_u, open_g) -> bool:
    """As _paged_fits, of what check_heads and check_memory look at, but for dtypes."""
    (hk, dk), (hv, dv) = key, value
    count = len(state) if state.dim() else 0
    return (
        0 < hk <= hv <= GROUP * hk
        and hv % hk == 0
        and 16 <= dk <= WIDEST
        and 16 <= dv <= WIDEST
        and state.shape == (count, hv, dk, dv)
        and open_k.shape == (count, CHUNK, hk, dk)
        and open_u.shape == (count, CHUNK, hv, dv)
        and open_g.shape == (count, CHUNK, hv)
        and state.is_contiguous()
        and open_k.is_contiguous()
        and open_u.is_contiguous()
        and open_g.is_contiguous()
    )


def _check_paged(
    op, q, k, v, g, beta, state, open_k, open_u, open_g, slots, context_lens, cu_seqlens_q, scale
) -> float:
    scale = _check(op, q, k, v, g, beta, scale)
    tensors = {"state": state, "open_k": open_k, "open_u": open_u, "open_g": open_g}
    check_memory(op, q.dtype, k.shape[1:], v.shape[1:], **tensors)
    sequences.check_slots(op, slots, context_lens, cu_seqlens_q)
    rows = {"q": q, "k": k, "v": v, "g": g, "beta": beta}
    check.same_device(op, **rows, **tensors, slots=slots, context_lens=context_lens, cu_seqlens_q=cu_seqlens_q)
    return scale


def check_memory(op: str, dtype: torch.dtype, key: Sequence[int], value: Sequence[int], **tensors: Tensor) -> None:
    """state, open_k, open_u and open_g of key and value heads (Hk, dk) and (Hv, dv)."""
    (hk, dk), (hv, dv) = key, value
    sizes = (hv, dk, dv), (CHUNK, hk, dk), (CHUNK, hv, dv), (CHUNK, hv)
    for size, (arg, x) in zip(sizes, tensors.items()):
        check.tensor(op, arg, x, (dtype,) if arg == "open_k" else _FP32)
        check.shape(op, arg, x, ("slots" if arg == "state" else tensors["state"].shape[0], *size))
        sequences.contiguous_slots(op, arg, x)


def check_heads(op: str, arg: str, key: Sequence[int], value: Sequence[int]) -> None:
    (hk, dk), (hv, dv) = key, value
    if hk == 0 or hv == 0 or hv % hk or hv > GROUP * hk:
        raise ValueError(
            f"{op}: {arg}: got {hv} heads for k's {hk}, expected a multiple of {hk}, at most {GROUP} times"
        )
    for name, dim in (("q", dk), (arg, dv)):
        if not 16 <= dim <= WIDEST:
            raise ValueError(f"{op}: {name}: got heads of {dim}, expected 16 to {WIDEST}")


def check_longest(op: str, max_seqlen_q: int) -> None:
    if isinstance(max_seqlen_q, bool) or not isinstance(max_seqlen_q, int | torch.SymInt):
        raise TypeError(f"{op}: max_seqlen_q: got {type(max_seqlen_q).__name__}, expected an int")
    if isinstance(max_seqlen_q, int) and max_seqlen_q < 0:
        raise ValueError(f"{op}: max_seqlen_q: got {max_seqlen_q}, expected at least 0")


def _check(op: str, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float | None) -> float:
    check.tensor(op, "q", q, check.FLOATS, 3)
    for arg, x in (("k", k), ("v", v)):
        check.tensor(op, arg, x, ndim=3)
        check.same_dtype(op, arg, x, "q", q)
    check.shape(op, "k", k, q.shape)
    check.shape(op, "v", v, (q.shape[0], "Hv", "dv"))
    (tokens, hk, dk), (_, hv, dv) = q.shape, v.shape
    check_heads(op, "v", (hk, dk), (hv, dv))
    check.tensor(op, "g", g, _FP32)
    check.tensor(op, "beta", beta, dict.fromkeys((torch.float32, q.dtype)))
    for arg, x in (("g", g), ("beta", beta)):
        check.shape(op, arg, x, (tokens, hv))
    return dk**-0.5 if scale is None else check.number(op, "scale", scale)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor):
    return _rows(q), _rows(k), _rows(v), g.contiguous(), beta.float().contiguous()


def _fwd(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, final, backend):
    initial = None if initial_state is None else initial_state.contiguous()
    tensors = *_inputs(q, k, v, g, beta), cu_seqlens.contiguous(), initial
    out, state = ROOM.module(backend).varlen_fwd(*tensors, scale, l2norm, final)
    return out, state if final else g.new_empty(0)


def _state_shape(q, v, cu_seqlens):
    return cu_seqlens.shape[0] - 1, v.shape[1], q.shape[2], v.shape[2]


def _fwd_fake(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, final, backend):
    return v.new_empty(v.shape), g.new_empty(_state_shape(q, v, cu_seqlens) if final else (0,))


def _setup(ctx, inputs, output):
    *tensors, ctx.scale, ctx.l2norm, ctx.final, ctx.backend = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors)


def _backward(ctx, dout, dfinal):
    q, k, v, g, beta, cu_seqlens, initial_state = ctx.saved_tensors
    dout = torch.zeros_like(v) if dout is None else dout
    dfinal = dfinal if ctx.final else None
    tensors = dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state
    *grads, dinitial = _gated_delta_bwd(*tensors, ctx.scale, ctx.l2norm, ctx.backend)
    return *grads, None, None if initial_state is None else dinitial, *[None] * 4


def _bwd(dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, backend):
    dfinal, initial = (None if x is None else x.contiguous() for x in (dfinal, initial_state))
    tensors = dout.contiguous(), dfinal, *_inputs(q, k, v, g, beta), cu_seqlens.contiguous(), initial
    dq, dk, dv, dg, dbeta, dinitial = ROOM.module(backend).varlen_bwd(*tensors, scale, l2norm)
    return dq, dk, dv, dg, dbeta.to(beta.dtype), g.new_empty(0) if initial is None else dinitial


def _bwd_fake(dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state, *options):
    dinitial = g.new_empty(0 if initial_state is None else initial_state.shape)
    return *(x.new_empty(x.shape) for x in (q, k, v, g, beta)), dinitial


def _paged(q, k, v, g, beta, state, open_k, open_u, open_g, slots, context_lens, cu_seqlens_q, *options):
    *options, backend = options
    step = slots.contiguous(), context_lens.contiguous(), cu_seqlens_q.contiguous()
    tensors = _rows(q), _rows(k), _rows(v), g, beta, state, open_k, open_u, open_g  # g and beta as they come
    return ROOM.module(backend).paged_fwd(*tensors, *step, *options)


def _paged_fake(q, k, v, *rest):
    return v.new_empty(v.shape)


_gated_delta_bwd = Operator(
    "gated_delta_varlen_bwd(Tensor dout, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,"
    " Tensor cu_seqlens, Tensor? initial_state, float scale, bool l2norm, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
_gated_delta_varlen = Operator(
    "gated_delta_varlen(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens, Tensor? initial_state,"
    " float scale, bool l2norm, bool final, str backend) -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    _setup,
    _backward,
)
_gated_delta_paged = Operator(
    "gated_delta_paged(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, Tensor(b!) open_k,"
    " Tensor(c!) open_u, Tensor(d!) open_g, Tensor slots, Tensor context_lens, Tensor cu_seqlens_q,"
    " SymInt max_seqlen_q, SymInt singles, float scale, bool l2norm, str backend) -> Tensor",
    _paged,
    _paged_fake,
)
