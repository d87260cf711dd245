"""Rotary position embedding: the tables of cosines and sines, and the rotation of query and key heads."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator
from ..kv_cache.op import check_store
from ..rmsnorm.op import STYLES

ROOM = Room("rope", cpu=("cpu",), cuda=("triton",))


def rope(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False, backend: str | None = None
) -> tuple[Tensor, Tensor]:
    """Rotate each pair (a, b) of a head to (a cos - b sin, b cos + a sin), fp32 inside, rounded once.

    q           (T, Hq, D) bf16 | fp32, on a GPU also fp16; tokens and heads may be strided (heads of a fused
                projection), D contiguous
    k           (T, Hk, D) in q.dtype
    cos, sin    (T, Dr) in q.dtype or fp32, Dr even and at most D; elements Dr.. of a head pass through unchanged.
                Both halves of the last dimension hold the pairs' angles, as Hugging Face lays them out
                (`torch.cat((freqs, freqs), -1)`) and rope_cos_sin returns them, interleaved or not
    interleaved pairs are (2i, 2i + 1) instead of (i, i + Dr / 2) (Hugging Face's `rotate_half`)
    returns     q and k rotated, contiguous. Hugging Face rounds both products and the sum to q.dtype; this rounds the
                sum alone, so in bf16 the two differ by up to that much
    bits        elementwise: fma(own, cos, other * sin), the same on a CPU and a GPU
    grad        dq and dk as bits, the transposed rotation; cos and sin are constants
    raises      TypeError on dtype, ValueError on shape, stride or device, BackendUnavailable
    source      Su et al., RoFormer, arXiv 2104.09864
    example
    >>> q, k = torch.randn(3, 4, 16), torch.randn(3, 2, 16)
    >>> inv_freq = 10000.0 ** (-torch.arange(0, 16, 2) / 16)
    >>> cos, sin = vx.rope_cos_sin(torch.tensor([0, 1, 2]), inv_freq)
    >>> q_rotated, k_rotated = vx.rope(q, k, cos, sin)
    >>> vx.same_bits(q_rotated[0], q[0])  # position 0 is not rotated
    True
    """
    backend = _check("rope", q, k, cos, sin, backend)
    return _rope(q, k, cos, sin, bool(interleaved), False, backend)


def rope_kv_store(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping: Tensor,
    *,
    interleaved: bool = False,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 1e-6,
    style: str = "llama",
    backend: str | None = None,
) -> Tensor:
    """rope, then kv_cache_store of the rotated keys and of v: on a GPU one launch instead of two. With weights, rmsnorm
    of each head of q and of k comes first, in the same launch.

    q, k, cos, sin, interleaved                 as for rope
    v, k_cache, v_cache, slot_mapping           as for kv_cache_store; the caches are written in place
    q_weight, k_weight, eps, style              as for rmsnorm, weights (D,) in q.dtype: both or none
    returns                                     q rotated, contiguous; the rotated keys are in the cache alone
    bits                                        those of the ops one after another
    grad                                        none: a RuntimeError where q, k or v requires one in grad mode
    raises                                      as those ops
    example
    >>> q, k, v = torch.randn(2, 4, 16), torch.randn(2, 2, 16), torch.randn(2, 2, 16)
    >>> cos, sin = vx.rope_cos_sin(torch.tensor([7, 3]), torch.ones(8))
    >>> k_cache, v_cache = torch.zeros(5, 4, 2, 16), torch.zeros(5, 4, 2, 16)  # five pages of four tokens
    >>> q_rotated = vx.rope_kv_store(q, k, v, cos, sin, k_cache, v_cache, torch.tensor([7, 17]))
    >>> vx.same_bits(k_cache[1, 3], vx.rope(q, k, cos, sin)[1][0])  # slot 7 is the last one of page 1
    True
    """
    op = "rope_kv_store"
    backend = _check(op, q, k, cos, sin, backend)
    check_store(op, k, v, k_cache, v_cache, slot_mapping)
    gemma = False
    if q_weight is not None or k_weight is not None:
        gemma = _check_norms(op, q, q_weight, k_weight, eps, style)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        raise RuntimeError(f"{op}: q, k or v requires a gradient, and this op has none: call it under torch.no_grad()")
    norms = q_weight, k_weight, float(eps), gemma
    return _rope_kv_store(q, k, v, cos, sin, k_cache, v_cache, slot_mapping, bool(interleaved), *norms, backend)


def _check_norms(op: str, q: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, style: str) -> bool:
    for arg, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None:
            raise ValueError(f"{op}: {arg}: got None next to the other one's weight, expected both or none")
        check.tensor(op, arg, weight, ndim=1)
        check.same_dtype(op, arg, weight, "q", q)
        check.shape(op, arg, weight, q.shape[-1:])
        check.contiguous_last(op, arg, weight)
        if torch.is_grad_enabled() and weight.requires_grad:
            raise RuntimeError(f"{op}: {arg} requires a gradient, and this op has none: call it under torch.no_grad()")
    check.same_device(op, q=q, q_weight=q_weight, k_weight=k_weight)
    check.number(op, "eps", eps, at_least=0.0)
    check.choice(op, "style", style, STYLES)
    return style == "gemma"


def _check(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, backend: str | None) -> str:
    if not _fits(q, k, cos, sin):
        _check_each(op, q, k, cos, sin)
    backend = ROOM.resolve(q.device, backend)
    check.served(op, "q", q.dtype, backend)
    return backend


def _fits(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether _check_each would find nothing, without its messages: the engine asks at every layer of every step."""
    if not (check.alike(q, k) and check.alike(cos, sin) and q.dim() == k.dim() == 3 and cos.dim() == 2):
        return False
    (tokens, _, dim), (rows, rotary) = q.shape, cos.shape
    return (
        q.dtype in check.FLOATS
        and cos.dtype in (q.dtype, torch.float32)
        and cos.device == q.device
        and k.shape[0] == rows == tokens
        and k.shape[2] == dim
        and cos.shape == sin.shape
        and rotary % 2 == 0
        and rotary <= dim
        and q.stride(2) == k.stride(2) == cos.stride(1) == sin.stride(1) == 1
        and not (cos.requires_grad or sin.requires_grad)
    )


def _check_each(op: str, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    for arg, value in (("q", q), ("k", k)):
        check.tensor(op, arg, value, check.FLOATS, ndim=3)
        check.contiguous_last(op, arg, value)
    check.same_dtype(op, "k", k, "q", q)
    tokens, _, dim = q.shape
    check.shape(op, "k", k, (tokens, "Hk", dim))
    for arg, value in (("cos", cos), ("sin", sin)):
        check.tensor(op, arg, value, {q.dtype, torch.float32}, ndim=2)
        check.contiguous_last(op, arg, value)
        if value.requires_grad:
            raise ValueError(f"{op}: {arg}: requires grad, expected a constant")
    rotary = cos.shape[1]
    if rotary % 2 or rotary > dim:
        raise ValueError(f"{op}: cos: got shape {tuple(cos.shape)}, expected an even last dimension of at most {dim}")
    check.shape(op, "cos", cos, (tokens, rotary))
    check.shape(op, "sin", sin, (tokens, rotary))
    check.same_dtype(op, "sin", sin, "cos", cos)
    check.same_device(op, q=q, k=k, cos=cos, sin=sin)


def rope_cos_sin(
    positions: Tensor,
    inv_freq: Tensor,
    *,
    axes: Sequence[int] | None = None,
    scaling: float = 1.0,
    dtype: torch.dtype = torch.float32,
    backend: str | None = None,
) -> tuple[Tensor, Tensor]:
    """cos and sin of position * inv_freq, each times scaling, for `rope`.

    positions  (T,) int64 | int32, below 2^24 in magnitude (what fp32 holds exactly); with axes (A, T): a token has a
               position on each, as patches of an image have a row and a column
    inv_freq   (F,) fp32, at most 64 in magnitude. Values beyond either bound are refused on a CPU; on a GPU, where to
               look at them would stall the stream, they give NaN
    axes       F numbers from 0 to A - 1: on which axis each frequency reads a token's position. Multimodal models'
               sections, interleaved ([0, 1, 2, 0, 1, 2, ...]) or in blocks; 2-D rotation of patches is
               rope_cos_sin(rows_and_columns, inv_freq.repeat(2), axes=[0] * F + [1] * F)
    scaling    attention scaling of the extended-context schemes
    dtype      of the result: float32 or bfloat16, on a GPU also float16
    returns    cos, sin, each (T, 2F): the F values twice, as Hugging Face lays them out
    bits       a value depends on its position (of its axis), frequency and scaling alone, on a CPU as on a GPU: the
               angle is one fp32 product, as in Hugging Face; sine and cosine are our own (not the platform's), right
               to fp32 rounding, rounded to fp32, multiplied by scaling in fp32 and rounded to dtype
    grad       none
    raises     TypeError on dtype, ValueError on shape, device or value, BackendUnavailable
    example
    >>> cos, sin = vx.rope_cos_sin(torch.tensor([0, 1]), torch.tensor([1.0, 0.5]))
    >>> cos.tolist()[0], cos.shape
    ([1.0, 1.0, 1.0, 1.0], torch.Size([2, 4]))
    """
    check.tensor("rope_cos_sin", "positions", positions, (torch.int64, torch.int32), ndim=1 if axes is None else 2)
    check.tensor("rope_cos_sin", "inv_freq", inv_freq, (torch.float32,), ndim=1)
    check.same_device("rope_cos_sin", positions=positions, inv_freq=inv_freq)
    scaling = check.number("rope_cos_sin", "scaling", scaling)
    if dtype not in check.FLOATS:
        raise TypeError(
            f"rope_cos_sin: dtype: got {dtype}, expected torch.float32, torch.bfloat16, or on a GPU torch.float16"
        )
    if axes is not None:
        axes = _axes(axes, *positions.shape, *inv_freq.shape)
    backend = ROOM.resolve(positions.device, backend)
    check.served("rope_cos_sin", "dtype", dtype, backend)
    return _rope_cos_sin(positions, inv_freq.detach(), scaling, dtype, axes, backend)


def _axes(axes: Sequence[int], count: int, tokens: int, frequencies: int) -> tuple[int, ...]:
    if isinstance(axes, str | Tensor) or not all(type(a) is int for a in axes):
        raise TypeError(f"rope_cos_sin: axes: got {axes!r}, expected a sequence of {frequencies} ints")
    axes = tuple(axes)
    if len(axes) != frequencies or not all(0 <= a < count for a in axes):
        raise ValueError(f"rope_cos_sin: axes: got {axes}, expected {frequencies} numbers from 0 to {count - 1}")
    return axes


def _fwd(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transpose: bool, backend: str):
    return ROOM.module(backend).rope(q, k, cos, sin, interleaved, transpose)


def _setup(ctx, inputs, output):
    _, _, cos, sin, ctx.interleaved, ctx.transpose, ctx.backend = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    dq, dk = (d if d.stride(-1) == 1 or d.shape[-1] <= 1 else d.contiguous() for d in (dq, dk))
    dq, dk = _rope(dq, dk, *ctx.saved_tensors, ctx.interleaved, not ctx.transpose, ctx.backend)
    return dq, dk, None, None, None, None, None


def _cos_sin(positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype, axes, backend: str):
    axes = None if axes is None else tuple(axes)
    return ROOM.module(backend).rope_cos_sin(positions, axes, inv_freq, scaling, dtype)


def _cos_sin_fake(positions, inv_freq, scaling, dtype, axes, backend):
    shape = (positions.shape[-1], 2 * inv_freq.shape[0])
    return positions.new_empty(shape, dtype=dtype), positions.new_empty(shape, dtype=dtype)


_rope = Operator(
    "rope(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool transpose, str backend)"
    " -> (Tensor, Tensor)",
    _fwd,
    lambda q, k, cos, sin, interleaved, transpose, backend: (q.new_empty(q.shape), k.new_empty(k.shape)),
    _setup,
    _backward,
)
_rope_cos_sin = Operator(
    "rope_cos_sin(Tensor positions, Tensor inv_freq, float scaling, ScalarType dtype, int[]? axes, str backend)"
    " -> (Tensor, Tensor)",
    _cos_sin,
    _cos_sin_fake,
)
_rope_kv_store = Operator(
    "rope_kv_store(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor slot_mapping, bool interleaved, Tensor? q_weight, Tensor? k_weight, float eps, bool gemma, str backend)"
    " -> Tensor",
    lambda *args: ROOM.module(args[-1]).rope_kv_store(*args[:-1]),
    lambda q, *args: q.new_empty(q.shape),
)
