"""The Triton kernels: the CPU kernels' arithmetic, operation for operation, so that both classes have the same bits."""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin, begin_beside, block, cdiv, chunk, early, on, tree_sum

TWO_OVER_PI = tl.constexpr(float.fromhex("0x1.45f306dc9c883p-1"))
HALF_PI = tl.constexpr(float.fromhex("0x1.921fb54442d18p+0"))
HALF_PI_REST = tl.constexpr(float.fromhex("0x1.1a62633145c07p-54"))
MANY = 1024  # tokens of which a program each keeps a GPU busy


class Strides(NamedTuple):
    q_token: int
    q_head: int
    k_token: int
    k_head: int
    cos: int
    sin: int


class StoreStrides(NamedTuple):
    """Of what is rotated and stored."""

    q_token: int
    q_head: int
    k_token: int
    k_head: int
    v_token: int
    v_head: int
    cos: int
    sin: int


class CacheStrides(NamedTuple):
    k_page: int
    k_row: int
    k_head: int
    v_page: int
    v_row: int
    v_head: int


class Norm(NamedTuple):
    """What heads are normalised with before they are rotated; weights are None where they are not."""

    q_weight: Tensor | None
    k_weight: Tensor | None
    eps: float


class Heads(NamedTuple):
    """The heads of all tokens in x, and those of one token in y."""

    x: Any
    x_token: Any
    x_head: Any
    y: Any
    y_head: Any
    count: Any


@triton.jit
def _angles(cos, sin, token, cos_stride, sin_stride, HALF: tl.constexpr, PAIRS: tl.constexpr):
    """Cosines and sines of a token: those of the first half of a head, those of the second."""
    i = tl.arange(0, PAIRS)
    cos += token * cos_stride + i
    sin += token * sin_stride + i
    c1 = tl.load(cos, mask=i < HALF, other=0.0).to(tl.float32)
    c2 = tl.load(cos + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    s1 = tl.load(sin, mask=i < HALF, other=0.0).to(tl.float32)
    s2 = tl.load(sin + HALF, mask=i < HALF, other=0.0).to(tl.float32)
    return c1[None, :], c2[None, :], s1[None, :], s2[None, :]


@triton.jit
def _normed(h, scale, weight, GEMMA: tl.constexpr, DTYPE: tl.constexpr):
    """As rmsnorm's kernel has it, to the fp32 value of what that stores."""
    w = weight.to(tl.float32)
    if GEMMA:
        w = 1.0 + w
    h = h * scale
    if not GEMMA:
        h = h.to(DTYPE).to(tl.float32)
    return (h * w).to(DTYPE).to(tl.float32)


@triton.jit
def _pair(HALF: tl.constexpr, INTERLEAVED: tl.constexpr, PAIRS: tl.constexpr):
    """(1, PAIRS) where in a head the two elements lie that are rotated together."""
    i = tl.arange(0, PAIRS)[None, :]
    return (2 * i, 2 * i + 1) if INTERLEAVED else (i, i + HALF)


@triton.jit
def _rotate(
    heads, first, wanted, token, angles, weight, eps,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSE: tl.constexpr,
    HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, NORM: tl.constexpr, GEMMA: tl.constexpr,
    WHOLE_HEAD: tl.constexpr,
):  # fmt: skip
    """HEADS heads of a token from `first` on, if wanted; normalised before, with NORM."""
    c1, c2, s1, s2 = angles
    x, y = heads.x, heads.y
    head = first + tl.arange(0, HEADS)
    live = (head < heads.count)[:, None] & wanted
    x_at = x + token * heads.x_token + head.to(tl.int64)[:, None] * heads.x_head
    y_at = y + head.to(tl.int64)[:, None] * heads.y_head
    if NORM:
        if HALF > 0:  # asked for with the head: behind its sum it would be waited for again
            a, b = _pair(HALF, INTERLEAVED, PAIRS)
            w1 = tl.load(weight + a, mask=tl.arange(0, PAIRS)[None, :] < HALF, other=0.0)
            w2 = tl.load(weight + b, mask=tl.arange(0, PAIRS)[None, :] < HALF, other=0.0)
        column = tl.arange(0, WHOLE_HEAD)[None, :]
        h = tl.load(x_at + column, mask=live & (column < D), other=0.0).to(tl.float32)
        # order: that of rmsnorm's kernel, where a row is a head: the squares in a tree
        scale = tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(tree_sum(h * h), float(D)) + eps))
    if HALF > 0:
        inside = live & (tl.arange(0, PAIRS) < HALF)[None, :]
        a, b = _pair(HALF, INTERLEAVED, PAIRS)
        x1 = tl.load(x_at + a, mask=inside, other=0.0).to(tl.float32)
        x2 = tl.load(x_at + b, mask=inside, other=0.0).to(tl.float32)
        if NORM:
            x1 = _normed(x1, scale, w1, GEMMA, x.dtype.element_ty)
            x2 = _normed(x2, scale, w2, GEMMA, x.dtype.element_ty)
        # order: fma(own, cos, other * sin): the second product is rounded to fp32, the sum once more
        if TRANSPOSE:
            y1 = tl.fma(x1, tl.broadcast_to(c1, x1.shape), x2 * s2)
            y2 = tl.fma(x2, tl.broadcast_to(c2, x2.shape), x1 * s1 * -1.0)
        else:
            y1 = tl.fma(x1, tl.broadcast_to(c1, x1.shape), x2 * s1 * -1.0)
            y2 = tl.fma(x2, tl.broadcast_to(c2, x2.shape), x1 * s2)
        tl.store(y_at + a, y1.to(y.dtype.element_ty), mask=inside)
        tl.store(y_at + b, y2.to(y.dtype.element_ty), mask=inside)
    if 2 * HALF < D:
        rest = 2 * HALF + tl.arange(0, REST)[None, :]
        inside = live & (rest < D)
        value = tl.load(x_at + rest, mask=inside)
        if NORM:
            w = tl.load(weight + rest, mask=rest < D, other=0.0)
            value = _normed(value.to(tl.float32), scale, w, GEMMA, x.dtype.element_ty).to(y.dtype.element_ty)
        tl.store(y_at + rest, value, mask=inside)


@triton.jit(do_not_specialize=["q_heads", "k_heads"])
def _rope_kernel(
    q, k, cos, sin, q_out, k_out, q_heads, k_heads, q_blocks, k_blocks, strides,
    D: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, TRANSPOSE: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = _angles(cos, sin, token, strides.cos, strides.sin, HALF, PAIRS)
    queries = Heads(q, strides.q_token, strides.q_head, q_out + token * q_heads * D, D, q_heads)
    keys = Heads(k, strides.k_token, strides.k_head, k_out + token * k_heads * D, D, k_heads)
    if WHOLE:
        for i in range(0, k_blocks):
            _rotate(
                keys, i * K_HEADS, True, token, angles, None, 0.0,
                D, HALF, INTERLEAVED, TRANSPOSE, K_HEADS, PAIRS, REST, False, False, 1,
            )  # fmt: skip
        for i in range(0, q_blocks):
            _rotate(
                queries, i * Q_HEADS, True, token, angles, None, 0.0,
                D, HALF, INTERLEAVED, TRANSPOSE, Q_HEADS, PAIRS, REST, False, False, 1,
            )  # fmt: skip
    elif part < q_blocks:
        _rotate(
            queries, part * Q_HEADS, True, token, angles, None, 0.0,
            D, HALF, INTERLEAVED, TRANSPOSE, Q_HEADS, PAIRS, REST, False, False, 1,
        )  # fmt: skip
    else:
        _rotate(
            keys, (part - q_blocks) * K_HEADS, True, token, angles, None, 0.0,
            D, HALF, INTERLEAVED, TRANSPOSE, K_HEADS, PAIRS, REST, False, False, 1,
        )  # fmt: skip


@triton.jit
def _copy(heads, first, wanted, token, DV: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr):
    """HEADS heads of a token from `first` on, if wanted."""
    head = first + tl.arange(0, HEADS)
    column = tl.arange(0, WIDTH)[None, :]
    live = (head < heads.count)[:, None] & wanted & (column < DV)
    head = head.to(tl.int64)[:, None]
    value = tl.load(heads.x + token * heads.x_token + head * heads.x_head + column, mask=live)
    tl.store(heads.y + head * heads.y_head + column, value, mask=live)


@triton.jit(do_not_specialize=["size", "page_size", "q_heads", "k_heads"], do_not_specialize_on_alignment=["slots"])
def _rope_kv_store_kernel(
    q, k, v, cos, sin, q_out, k_cache, v_cache, slots, size, page_size, q_heads, k_heads, q_blocks, k_blocks,
    strides, cache_strides, norm,
    D: tl.constexpr, DV: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, Q_HEADS: tl.constexpr,
    K_HEADS: tl.constexpr, PAIRS: tl.constexpr, REST: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    NORM: tl.constexpr, GEMMA: tl.constexpr, WHOLE_HEAD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin_beside(PDL)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    angles = _angles(cos, sin, token, strides.cos, strides.sin, HALF, PAIRS)
    slot = tl.load(slots + token)
    wanted = (slot >= 0) & (slot < size)
    slot = tl.where(wanted, slot, 0)
    page = slot // page_size
    row = slot - page * page_size
    q_out += token * q_heads * D
    k_cache += page * cache_strides.k_page + row * cache_strides.k_row
    v_cache += page * cache_strides.v_page + row * cache_strides.v_row
    queries = Heads(q, strides.q_token, strides.q_head, q_out, D, q_heads)
    keys = Heads(k, strides.k_token, strides.k_head, k_cache, cache_strides.k_head, k_heads)
    values = Heads(v, strides.v_token, strides.v_head, v_cache, cache_strides.v_head, k_heads)
    if WHOLE:
        for i in range(0, k_blocks):
            _copy(values, i * K_HEADS, wanted, token, DV, K_HEADS, WIDTH)
            _rotate(
                keys, i * K_HEADS, wanted, token, angles, norm.k_weight, norm.eps,
                D, HALF, INTERLEAVED, False, K_HEADS, PAIRS, REST, NORM, GEMMA, WHOLE_HEAD,
            )  # fmt: skip
        for i in range(0, q_blocks):
            _rotate(
                queries, i * Q_HEADS, True, token, angles, norm.q_weight, norm.eps,
                D, HALF, INTERLEAVED, False, Q_HEADS, PAIRS, REST, NORM, GEMMA, WHOLE_HEAD,
            )  # fmt: skip
    elif part < q_blocks:
        _rotate(
            queries, part * Q_HEADS, True, token, angles, norm.q_weight, norm.eps,
            D, HALF, INTERLEAVED, False, Q_HEADS, PAIRS, REST, NORM, GEMMA, WHOLE_HEAD,
        )  # fmt: skip
    elif part < q_blocks + k_blocks:
        _rotate(
            keys, (part - q_blocks) * K_HEADS, wanted, token, angles, norm.k_weight, norm.eps,
            D, HALF, INTERLEAVED, False, K_HEADS, PAIRS, REST, NORM, GEMMA, WHOLE_HEAD,
        )  # fmt: skip
    else:
        _copy(values, (part - q_blocks - k_blocks) * K_HEADS, wanted, token, DV, K_HEADS, WIDTH)


@triton.jit
def _double(value: tl.constexpr, BLOCK: tl.constexpr):
    return tl.full([BLOCK], value, tl.float64)


@triton.jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=["positions"])
def _cos_sin_kernel(
    positions,
    axes,
    inv_freq,
    cos,
    sin,
    scaling,
    tokens,
    F: tl.constexpr,
    BLOCK: tl.constexpr,
    AXES: tl.constexpr,
    PDL: tl.constexpr,
):  # sine and cosine as csrc/rope/cpu_kernels.cpp has them, step by step in double
    begin_beside(PDL)
    token = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    if AXES:
        axis = tl.load(axes + i, mask=i < F, other=0).to(tl.int64)
        position = tl.load(positions + axis * tokens + token)
    else:
        position = tl.load(positions + token)
    frequency = tl.load(inv_freq + i, mask=i < F, other=0.0)
    x = (position.to(tl.float32) * frequency).to(tl.float64)
    magic = _double(6755399441055744.0, BLOCK)
    shifted = tl.fma(x, _double(TWO_OVER_PI, BLOCK), magic)
    n = shifted - magic
    r = tl.fma(n, _double(-HALF_PI, BLOCK), x)
    r = tl.fma(n, _double(-HALF_PI_REST, BLOCK), r)
    z = r * r
    s = _double(-1.0 / 1307674368000, BLOCK)
    s = tl.fma(s, z, _double(1.0 / 6227020800, BLOCK))
    s = tl.fma(s, z, _double(-1.0 / 39916800, BLOCK))
    s = tl.fma(s, z, _double(1.0 / 362880, BLOCK))
    s = tl.fma(s, z, _double(-1.0 / 5040, BLOCK))
    s = tl.fma(s, z, _double(1.0 / 120, BLOCK))
    s = tl.fma(s, z, _double(-1.0 / 6, BLOCK))
    s = tl.fma(r * z, s, r)
    c = _double(1.0 / 20922789888000, BLOCK)
    c = tl.fma(c, z, _double(-1.0 / 87178291200, BLOCK))
    c = tl.fma(c, z, _double(1.0 / 479001600, BLOCK))
    c = tl.fma(c, z, _double(-1.0 / 3628800, BLOCK))
    c = tl.fma(c, z, _double(1.0 / 40320, BLOCK))
    c = tl.fma(c, z, _double(-1.0 / 720, BLOCK))
    c = tl.fma(c, z, _double(1.0 / 24, BLOCK))
    c = tl.fma(c, z, _double(-0.5, BLOCK))
    c = tl.fma(c, z, _double(1.0, BLOCK))
    quadrant = shifted.to(tl.int64, bitcast=True)
    swap = (quadrant & 1) != 0
    sine, cosine = tl.where(swap, c, s), tl.where(swap, s, c)
    sine = tl.where((quadrant & 2) != 0, sine * -1.0, sine).to(tl.float32) * scaling
    cosine = tl.where(((quadrant + 1) & 2) != 0, cosine * -1.0, cosine).to(tl.float32) * scaling
    known = (position > -16777216) & (position < 16777216) & (tl.abs(frequency) <= 64.0)
    sine = tl.where(known, sine, float("nan")).to(sin.dtype.element_ty)
    cosine = tl.where(known, cosine, float("nan")).to(cos.dtype.element_ty)
    at = token * (2 * F) + i
    for half in tl.static_range(2):
        tl.store(cos + at + half * F, cosine, mask=i < F)
        tl.store(sin + at + half * F, sine, mask=i < F)


def _tile(tokens: int, q_heads: int, k_heads: int, half: int, blocks_of_k: int) -> tuple[dict, tuple]:
    """Heads of a block of q and of k, and the grid. Heads know nothing of each other, so both may look at the tokens:
    where there are many, a program does best with as much as it can hold."""
    pairs, many = block(half, "rope: half of a rotary dimension"), tokens >= MANY
    most = max(1, (1024 if many else 512) // pairs)
    q, k = (chunk(heads, most, least=1) for heads in (q_heads, k_heads))
    programs = 1 if many else cdiv(q_heads, q) + blocks_of_k * cdiv(k_heads, k)
    tile = {"Q_HEADS": q, "K_HEADS": k, "PAIRS": pairs, "WHOLE": many, "num_warps": 4, **OPTIONS}
    return tile, (tokens, max(1, programs))


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transpose: bool):
    tokens, q_heads, dim = q.shape
    k_heads, half = k.shape[1], cos.shape[1] // 2
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    tile, grid = _tile(tokens, q_heads, k_heads, half, 1)
    if tokens * (q_heads + k_heads) * dim:
        with on(q):
            _rope_kernel[grid](
                q, k, cos, sin, q_out, k_out, q_heads, k_heads, cdiv(q_heads, tile["Q_HEADS"]),
                cdiv(k_heads, tile["K_HEADS"]),
                Strides(*q.stride()[:2], *k.stride()[:2], cos.stride(0), sin.stride(0)),
                D=dim, HALF=half, INTERLEAVED=interleaved, TRANSPOSE=transpose,
                REST=block(dim - 2 * half, "rope: head dim beyond the rotary one"), **tile, **early(q),
            )  # fmt: skip
    return q_out, k_out


def rope_kv_store(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor,
    interleaved: bool, q_weight: Tensor | None, k_weight: Tensor | None, eps: float, gemma: bool,
) -> Tensor:  # fmt: skip
    tokens, q_heads, dim = q.shape
    (_, k_heads, width), half = v.shape, cos.shape[1] // 2
    q_out = q.new_empty(*q.shape)
    pages, page_size = k_cache.shape[:2]
    tile, grid = _tile(tokens, q_heads, k_heads, half, 2)
    if tokens:
        with on(q):
            _rope_kv_store_kernel[grid](
                q, k, v, cos, sin, q_out, k_cache, v_cache, slots, pages * page_size, page_size, q_heads, k_heads,
                cdiv(q_heads, tile["Q_HEADS"]), cdiv(k_heads, tile["K_HEADS"]),
                StoreStrides(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], cos.stride(0), sin.stride(0)),
                CacheStrides(*k_cache.stride()[:3], *v_cache.stride()[:3]), Norm(q_weight, k_weight, eps),
                D=dim, DV=width, HALF=half, INTERLEAVED=interleaved, NORM=q_weight is not None, GEMMA=gemma,
                WHOLE_HEAD=block(dim, "rope_kv_store: head dim"),
                REST=block(dim - 2 * half, "rope_kv_store: head dim beyond the rotary one"),
                WIDTH=block(width, "rope_kv_store: head dim of v"), **tile, **early(q),
            )  # fmt: skip
    return q_out


@functools.lru_cache(maxsize=64)
def _axes_on(device: torch.device, axes: tuple[int, ...]) -> Tensor:
    return torch.tensor(axes, dtype=torch.int32, device=device)


def rope_cos_sin(positions: Tensor, axes: tuple[int, ...] | None, inv_freq: Tensor, scaling: float, dtype: torch.dtype):
    tokens, frequencies = positions.shape[-1], inv_freq.shape[0]
    cos = torch.empty(tokens, 2 * frequencies, dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    if cos.numel():
        with on(cos):
            _cos_sin_kernel[(tokens,)](
                positions.contiguous(), cos if axes is None else _axes_on(cos.device, axes), inv_freq.contiguous(),
                cos, sin, scaling, tokens, F=frequencies, BLOCK=block(frequencies, "rope_cos_sin: frequencies"),
                AXES=axes is not None, num_warps=1, **OPTIONS,
                **early(cos),
            )  # fmt: skip
    return cos, sin
