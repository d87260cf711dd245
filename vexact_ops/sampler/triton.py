"""The Triton kernels: the draws of the CPU kernel, id for id, from the same logits.

Truncation and draw are made of correctly rounded fp32 operations, maxima and sums of integers, so they have no order;
the log-probabilities have that of log_softmax on a GPU. Five launches, no look at a value by the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, block, exp, log, on
from ..log_softmax.triton import LSE_BLOCK, TILE, join_blocks, log_prob, reduce_blocks

GROUPS = 32  # of 64 token ids: what one program of the draw looks at
WIDE = 4096  # token ids that the search for a cut takes at a time

_LSE_BLOCK = tl.constexpr(LSE_BLOCK)
_NOTHING = tl.constexpr(0x00800000 << 31)  # the place that only -inf (and NaN) come after


@triton.jit
def _place(x, token):
    """An int64 that grows with the order (logit descending, id ascending): nonnegative, distinct for each token."""
    b = (x + 0.0).to(tl.int32, bitcast=True)  # -0 sorts as 0
    key = b ^ ((b >> 31) | -2147483648)
    return ((key.to(tl.int64) & 0xFFFFFFFF) << 31) | (2147483647 - token).to(tl.int64)


@triton.jit
def _at_temperature(x, t):
    return tl.div_rn(x, tl.zeros_like(x) + t)


@triton.jit
def _blocks_kernel(logits, temperature, parts, n, blocks, stride, TILE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    column = at * _LSE_BLOCK + tl.arange(0, _LSE_BLOCK)[None, :]
    x = tl.load(logits + row * stride + column, mask=column < n, other=float("-inf"))
    largest, total = reduce_blocks(x)
    parts += row * 4 * blocks
    tl.store(parts + at, largest, mask=at < blocks)
    tl.store(parts + blocks + at, total, mask=at < blocks)
    t = tl.load(temperature + row)
    if (t != 0.0) & (t != 1.0):
        largest, total = reduce_blocks(_at_temperature(x, t))
    tl.store(parts + 2 * blocks + at, largest, mask=at < blocks)
    tl.store(parts + 3 * blocks + at, total, mask=at < blocks)


@triton.jit
def _finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _rows_kernel(logits, parts, lse, greedy, n, blocks, stride, BLOCKS: tl.constexpr):
    """Both log-sum-exps of a row, and the first of its largest logits; -1 for a row without a distribution."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCKS)[None, :]
    parts += row * 4 * blocks
    largest = tl.load(parts + at, mask=at < blocks, other=float("-inf"))
    raw_top, total = join_blocks(largest, tl.load(parts + blocks + at, mask=at < blocks, other=0.0))
    raw_log = log(total)
    first = tl.min(tl.where(largest == raw_top, at, BLOCKS - 1), axis=1, keep_dims=True)
    scaled = tl.load(parts + 2 * blocks + at, mask=at < blocks, other=float("-inf"))
    top, total = join_blocks(scaled, tl.load(parts + 3 * blocks + at, mask=at < blocks, other=0.0))
    log_sum = log(total)
    token = first * _LSE_BLOCK + tl.arange(0, _LSE_BLOCK)[None, :]
    x = tl.load(logits + row * stride + token, mask=token < n, other=float("-inf"))
    token = tl.min(tl.where(x == raw_top, token, 2147483647), axis=1, keep_dims=True)
    known = _finite(raw_top) & _finite(raw_log) & _finite(top) & _finite(log_sum)
    one = tl.arange(0, 1)[None, :]
    tl.store(greedy + row + one, tl.where(known, token, -1))
    tl.store(lse + 4 * row + one, raw_top)
    tl.store(lse + 4 * row + 1 + one, raw_log)
    tl.store(lse + 4 * row + 2 + one, top)
    tl.store(lse + 4 * row + 3 + one, log_sum)


@triton.jit
def _weight(z, top, BY_MASS: tl.constexpr):
    """Probability relative to the largest, in whole units of 2^-40, truncated; or 1 to count tokens."""
    if BY_MASS:
        scaled = exp(z - top) * 1048576.0
        high = scaled.to(tl.int32)
        low = ((scaled - high.to(tl.float32)) * 1048576.0).to(tl.int32)
        weight = (high.to(tl.int64) << 20) + low.to(tl.int64)
    else:
        weight = tl.full(z.shape, 1, tl.int64)
    return weight


@triton.jit
def _mass(logits, maxima, n, blocks, t, top, z_min, place, BY_MASS: tl.constexpr, WIDE: tl.constexpr):
    """The weights of the tokens from `place` up whose z is at least z_min. Whole numbers: their sum has no order."""
    total = tl.zeros([WIDE], tl.int64)
    for start in range(0, n, WIDE):
        at = start // _LSE_BLOCK + tl.arange(0, WIDE // _LSE_BLOCK)
        highest = tl.max(tl.load(maxima + at, mask=at < blocks, other=float("-inf")), axis=0)
        if _place(highest, tl.full([], 0, tl.int32)) >= place:
            token = start + tl.arange(0, WIDE)
            x = tl.load(logits + token, mask=token < n, other=float("-inf"))
            z = _at_temperature(x, t)
            total += tl.where((_place(x, token) >= place) & (z >= z_min), _weight(z, top, BY_MASS), 0)
    return tl.sum(total, axis=0)


@triton.jit
def _cut(logits, maxima, n, blocks, t, top, z_min, place, target, ID_BITS, BY_MASS: tl.constexpr, WIDE: tl.constexpr):
    """The last place of the shortest prefix, from the top, whose weights reach target; `place` if none does."""
    found = tl.zeros([], tl.int64)
    if _mass(logits, maxima, n, blocks, t, top, z_min, place, BY_MASS, WIDE) < target:
        found = place
    else:
        for step in range(0, 32 + ID_BITS):  # bit by bit: first the logit's 32, then the id's
            if step < 32:
                bit = 62 - step
            else:
                bit = ID_BITS - 1 - (step - 32)
                if step == 32:
                    found = found | ((tl.full([], 2147483647, tl.int64) >> ID_BITS) << ID_BITS)  # ids lie below this
            further = found | (tl.full([], 1, tl.int64) << bit)
            if _mass(logits, maxima, n, blocks, t, top, z_min, tl.maximum(further, place), BY_MASS, WIDE) >= target:
                found = further
    return found


@triton.jit
def _cut_kernel(
    logits, parts, lse, greedy, temperature, top_k, top_p, min_p, places, n, blocks, stride, ID_BITS, WIDE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.full([], _NOTHING, tl.int64)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    if (t != 0.0) & (tl.load(greedy + row) >= 0):
        top = tl.load(lse + 4 * row + 2)
        z_min = top + log(tl.load(min_p + row))
        logits += row * stride
        parts += row * 4 * blocks
        if (k > 0) & (k < n):
            place = _cut(logits, parts, n, blocks, t, top, z_min, place, k, ID_BITS, False, WIDE)
        if p < 1.0:
            total = _mass(logits, parts, n, blocks, t, top, z_min, place, True, WIDE)
            target = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            place = _cut(logits, parts, n, blocks, t, top, z_min, place, target, ID_BITS, True, WIDE)
    tl.store(places + row, place)


@triton.jit
def _philox(seed, position, counter):
    """Philox4x32-10: four words for the counter (position, counter, 0) under the key seed."""
    c0 = tl.zeros_like(counter).to(tl.uint32) + (position & 0xFFFFFFFF).to(tl.uint32)
    c1 = tl.zeros_like(counter).to(tl.uint32) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = counter.to(tl.uint32)
    c3 = tl.zeros_like(c2)
    k0 = (seed & 0xFFFFFFFF).to(tl.uint32)
    k1 = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    m0 = tl.full(c0.shape, 0xD2511F53, tl.uint32)
    m1 = tl.full(c0.shape, 0xCD9E8D57, tl.uint32)
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(m0, c0), m0 * c0
        high1, low1 = tl.umulhi(m1, c2), m1 * c2
        c0 = high1 ^ c1 ^ k0
        c1 = low1
        c2 = high0 ^ c3 ^ k1
        c3 = low0
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def _gumbel(word):
    """-log(-log(1 - u)) for u = (word + 1/2) / 2^32, as csrc/sampler/gumbel.h."""
    whole = tl.fma((word >> 16).to(tl.float32), 65536.0, (word & 0xFFFF).to(tl.float32))
    u = tl.fma(whole, 2.0**-32, 2.0**-33)
    u = tl.where(u < 1.0 - 2.0**-24, u, 1.0 - 2.0**-24)
    s = tl.div_rn(u, 2.0 - u)
    q = s * s
    series = tl.fma(q, 1.0 / 9, 1.0 / 7)
    series = tl.fma(series, q, 1.0 / 5)
    series = tl.fma(series, q, 1.0 / 3)
    twice = s + s
    near = tl.fma(twice * q, series, twice)
    far = log(1.0 - u) * -1.0
    return log(tl.where(u > 0.25, far, near)) * -1.0


@triton.jit
def _draw_kernel(
    logits, seeds, positions, parts, lse, greedy, temperature, min_p, places, best, n, blocks, stride, tiles,
    GROUPS: tl.constexpr,
):  # fmt: skip
    """Of a part of a row, the allowed token with the largest (z - top) + Gumbel number, the lower id on a tie."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.load(temperature + row)
    found = tl.full([], -9223372036854775808, tl.int64)
    place = tl.load(places + row)
    at = tile * (GROUPS * 64 // _LSE_BLOCK) + tl.arange(0, GROUPS * 64 // _LSE_BLOCK)
    highest = tl.max(tl.load(parts + row * 4 * blocks + at, mask=at < blocks, other=float("-inf")), axis=0)
    if (t != 0.0) & (tl.load(greedy + row) >= 0) & (_place(highest, tl.full([], 0, tl.int32)) >= place):
        top = tl.load(lse + 4 * row + 2)
        z_min = top + log(tl.load(min_p + row))
        group = tile * GROUPS + tl.arange(0, GROUPS)[:, None]
        lane = tl.arange(0, 16)[None, :]
        words = _philox(tl.load(seeds + row), tl.load(positions + row), group * 16 + lane)
        for j in tl.static_range(4):
            token = group * 64 + 16 * j + lane
            x = tl.load(logits + row * stride + token, mask=token < n, other=float("-inf"))
            z = _at_temperature(x, t)
            key = ((z - top) + _gumbel(words[j])) + 0.0
            b = key.to(tl.int32, bitcast=True)
            rank = ((b ^ ((b >> 31) & 2147483647)).to(tl.int64) << 32) | (2147483647 - token).to(tl.int64)
            rank = tl.where((_place(x, token) >= place) & (z >= z_min), rank, -9223372036854775808)
            found = tl.maximum(found, tl.max(tl.max(rank, axis=1), axis=0))
    tl.store(best + row * tiles + tile, found)


@triton.jit
def _finish_kernel(
    logits, lse, greedy, temperature, best, ids, logprobs, raw_logprobs, stride, tiles, TILES: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, TILES)
    found = tl.max(tl.load(best + row * tiles + at, mask=at < tiles, other=-9223372036854775808), axis=0)
    t = tl.load(temperature + row)
    token = tl.load(greedy + row)
    if (token >= 0) & (t != 0.0):  # a parameter that the host did not look at may have left no token to draw
        token = tl.where(found > -9223372036854775808, 2147483647 - (found & 2147483647), -1)
    known = token >= 0
    x = tl.load(logits + row * stride + tl.maximum(token, 0))
    z = tl.div_rn(x, tl.where(t == 0.0, 1.0, t))
    raw = log_prob(x, tl.load(lse + 4 * row), tl.load(lse + 4 * row + 1))
    own = log_prob(z, tl.load(lse + 4 * row + 2), tl.load(lse + 4 * row + 3))
    tl.store(ids + row, token)
    tl.store(logprobs + row, tl.where(known, own, float("nan")))
    tl.store(raw_logprobs + row, tl.where(known, raw, float("nan")))


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, n), device, stride = logits.shape, logits.device, logits.stride(0)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ids, logprobs, raw_logprobs = new(rows, dtype=torch.int64), new(rows), new(rows)
    if rows == 0:
        return ids, logprobs, raw_logprobs
    blocks, tiles = triton.cdiv(n, LSE_BLOCK), triton.cdiv(n, GROUPS * 64)
    parts, lse = new(rows, 4, blocks), new(rows, 4)
    greedy, places = new(rows, dtype=torch.int64), new(rows, dtype=torch.int64)
    best = new(rows, tiles, dtype=torch.int64)
    id_bits = max(1, (n - 1).bit_length())
    with on(logits):
        _blocks_kernel[(rows, triton.cdiv(blocks, TILE))](
            logits, temperature, parts, n, blocks, stride, TILE=TILE, num_warps=4, **OPTIONS
        )
        _rows_kernel[(rows,)](
            logits, parts, lse, greedy, n, blocks, stride, BLOCKS=block(blocks), num_warps=4, **OPTIONS
        )
        _cut_kernel[(rows,)](
            logits, parts, lse, greedy, temperature, top_k, top_p, min_p, places, n, blocks, stride, id_bits,
            WIDE=WIDE, num_warps=16, **OPTIONS,
        )  # fmt: skip
        _draw_kernel[(rows, tiles)](
            logits, seeds, positions, parts, lse, greedy, temperature, min_p, places, best, n, blocks, stride, tiles,
            GROUPS=GROUPS, num_warps=4, **OPTIONS,
        )  # fmt: skip
        _finish_kernel[(rows,)](
            logits, lse, greedy, temperature, best, ids, logprobs, raw_logprobs, stride, tiles,
            TILES=block(tiles), num_warps=4, **OPTIONS,
        )  # fmt: skip
    return ids, logprobs, raw_logprobs
