"""The Triton kernels: the draws of the CPU kernel, id for id, from the same logits.

Truncation and draw are made of correctly rounded fp32 operations, maxima and sums of integers, so they have no order;
the log-probabilities have that of log_softmax on a GPU. Six launches, no look at a value by the host.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, block, exp_down, log, on
from ..log_softmax.triton import LSE_BLOCK, TILE, join_blocks, log_prob, reduce_blocks

GROUPS = 32  # of 64 token ids: what one program of the draw looks at
TALL = 16  # blocks that the search for a cut takes at a time: as many tokens as a tile of the draw has
ROOM = 4096  # tokens that the search for a cut holds at a time; where more may lie beside it, it reads them again

_LSE_BLOCK = tl.constexpr(LSE_BLOCK)
_NOTHING = tl.constexpr(0x00800000 << 31)  # the place that only -inf (and NaN) come after


@triton.jit
def _key(x):
    """An int64 of 32 bits that grows with x."""
    b = (x + 0.0).to(tl.int32, bitcast=True)  # -0 sorts as 0
    return (b ^ ((b >> 31) | -2147483648)).to(tl.int64) & 0xFFFFFFFF


@triton.jit
def _place(x, token):
    """An int64 that grows with the order (logit descending, id ascending): nonnegative, distinct for each token."""
    return (_key(x) << 31) | (2147483647 - token).to(tl.int64)


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
        scaled = exp_down(z - top) * 1048576.0
        high = scaled.to(tl.int32)
        low = ((scaled - high.to(tl.float32)) * 1048576.0).to(tl.int32)
        weight = (high.to(tl.int64) << 20) + low.to(tl.int64)
    else:
        weight = tl.full(z.shape, 1, tl.int64)
    return weight


@triton.jit
def _list_blocks(maxima, listed, blocks, t, z_min, key, BLOCKS: tl.constexpr):
    """Lists the blocks that hold a token whose z is at least z_min and whose logit's key is at least `key`."""
    at = tl.arange(0, BLOCKS)
    highest = tl.load(maxima + at, mask=at < blocks, other=float("-inf"))
    keep = (at < blocks) & (_key(highest) >= key) & (_at_temperature(highest, t) >= z_min)
    tl.debug_barrier()  # an older list has been read
    tl.store(listed + tl.cumsum(keep.to(tl.int32), 0) - 1, at, mask=keep)
    tl.debug_barrier()
    return tl.sum(keep.to(tl.int32), 0)


@triton.jit
def _bound(maxima, blocks, t, top, z_min, place, target, BY_MASS: tl.constexpr, BLOCKS: tl.constexpr):
    """A key that the cut does not lie below: the blocks' largest tokens alone reach target there. 0 if they do not."""
    at = tl.arange(0, BLOCKS)
    highest = tl.load(maxima + at, mask=at < blocks, other=float("-inf"))
    z, key = _at_temperature(highest, t), _key(highest)
    weight = tl.where((key > (place >> 31)) & (z >= z_min), _weight(z, top, BY_MASS), 0)
    found = tl.zeros([], tl.int64)
    for step in range(0, 32):
        further = found | (tl.full([], 1, tl.int64) << (31 - step))
        if tl.sum(tl.where(key >= further, weight, 0), axis=0) >= target:
            found = further
    return found


@triton.jit
def _listed(logits, listed, first, count, n, t, top, z_min, BY_MASS: tl.constexpr, TALL: tl.constexpr):
    """Places and weights of the tokens of TALL listed blocks; weight 0 for what z_min excludes."""
    at = first + tl.arange(0, TALL)
    number = tl.load(listed + at, mask=at < count, other=0)
    token = number[:, None] * _LSE_BLOCK + tl.arange(0, _LSE_BLOCK)[None, :]
    inside = (at < count)[:, None] & (token < n)
    x = tl.load(logits + token, mask=inside, other=float("-inf"))
    z = _at_temperature(x, t)
    weight = tl.where(inside & (z >= z_min), _weight(z, top, BY_MASS), 0)
    return tl.reshape(_place(x, token), [TALL * _LSE_BLOCK]), tl.reshape(weight, [TALL * _LSE_BLOCK])


@triton.jit
def _mass_kernel(
    logits, parts, lse, greedy, temperature, top_k, top_p, min_p, masses, n, blocks, stride, tiles, TALL: tl.constexpr
):
    """The weights of a part of a row, for rows that top_p cuts and top_k does not. Whole numbers: no order."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    whole = (k <= 0) | (k >= n)
    if (t != 0.0) & (tl.load(greedy + row) >= 0) & (tl.load(top_p + row) < 1.0) & whole:
        top = tl.load(lse + 4 * row + 2)
        z_min = top + log(tl.load(min_p + row))
        token = tile * (TALL * _LSE_BLOCK) + tl.arange(0, TALL * _LSE_BLOCK)
        x = tl.load(logits + row * stride + token, mask=token < n, other=float("-inf"))
        z = _at_temperature(x, t)
        weight = tl.where((_place(x, token) >= _NOTHING) & (z >= z_min), _weight(z, top, True), 0)
        tl.store(masses + row * tiles + tile, tl.sum(weight, axis=0))


@triton.jit
def _gather(logits, listed, count, places, masses, n, t, top, z_min, low, end, ROOM: tl.constexpr, TALL: tl.constexpr):
    """Writes places and masses of the listed tokens of places [low, end), ROOM at most; returns how many there are."""
    found = tl.zeros([], tl.int32)
    for first in range(0, count, TALL):
        at = first + tl.arange(0, TALL)
        number = tl.load(listed + at, mask=at < count, other=0)
        token = number[:, None] * _LSE_BLOCK + tl.arange(0, _LSE_BLOCK)[None, :]
        inside = (at < count)[:, None] & (token < n)
        x = tl.load(logits + token, mask=inside, other=float("-inf"))
        z = _at_temperature(x, t)
        place = _place(x, token)
        keep = tl.reshape(inside & (z >= z_min) & (place >= low) & (place < end), [TALL * _LSE_BLOCK])
        to = found + tl.cumsum(keep.to(tl.int32), 0) - 1
        tl.store(places + to, tl.reshape(place, [TALL * _LSE_BLOCK]), mask=keep & (to < ROOM))
        tl.store(masses + to, tl.reshape(_weight(z, top, True), [TALL * _LSE_BLOCK]), mask=keep & (to < ROOM))
        found += tl.sum(keep.to(tl.int32), 0)
    tl.debug_barrier()
    return found


@triton.jit
def _gathered_mass(places, masses, number, place, ROOM: tl.constexpr):
    at = tl.arange(0, ROOM)
    there = at < number
    mine = tl.load(places + at, mask=there, other=0)
    return tl.sum(tl.where(mine >= place, tl.load(masses + at, mask=there, other=0), 0), axis=0)


@triton.jit
def _cut_gathered(places, masses, number, place, target, ID_BITS, BY_MASS: tl.constexpr, ROOM: tl.constexpr):
    """As _cut, of tokens that were gathered."""
    at = tl.arange(0, ROOM)
    there = at < number
    mine = tl.load(places + at, mask=there, other=0)
    weight = there.to(tl.int64)
    if BY_MASS:
        weight = tl.load(masses + at, mask=there, other=0)
    weight = tl.where(mine >= place, weight, 0)
    found = tl.zeros([], tl.int64)
    for step in range(0, 32 + ID_BITS):  # bit by bit: first the logit's 32, then the id's
        bit = 62 - step
        if step >= 32:
            bit = ID_BITS - 1 - (step - 32)
            if step == 32:
                found = found | ((tl.full([], 2147483647, tl.int64) >> ID_BITS) << ID_BITS)  # ids lie below this
        further = found | (tl.full([], 1, tl.int64) << bit)
        if tl.sum(tl.where(mine >= further, weight, 0), axis=0) >= target:
            found = further
    return tl.maximum(found, place)


@triton.jit
def _mass(logits, listed, count, n, t, top, z_min, place, TALL: tl.constexpr):
    """The weights of the listed tokens from `place` up."""
    total = tl.zeros([TALL * _LSE_BLOCK], tl.int64)
    for first in range(0, count, TALL):
        places, weight = _listed(logits, listed, first, count, n, t, top, z_min, True, TALL)
        total += tl.where(places >= place, weight, 0)
    return tl.sum(total, axis=0)


@triton.jit
def _cut(
    logits, listed, count, places, masses, n, t, top, z_min, low, highest, place, target, ID_BITS,
    BY_MASS: tl.constexpr, ROOM: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """As _cut_gathered, of all listed tokens from `low` to `highest`, more than ROOM: reads them until so few are left
    between two places, which narrow by three bits at a time, that those can be gathered."""
    digit = tl.arange(0, 8).to(tl.int64)
    found = tl.zeros([], tl.int64)
    step = tl.full([], 0, tl.int32)
    steps = 11 + (ID_BITS + 2) // 3  # the logit's 32 bits, then the id's
    shift = tl.full([], 60, tl.int32)
    while (step < 11) & ((low >> shift) == (highest >> shift)):  # digits that all share
        found = (low >> shift) << shift
        step += 1
        shift = tl.maximum(60 - 3 * step, 31)
    end = highest + 1  # what reaches target begins between found and end; `above` has the weights from end up
    above = tl.zeros([], tl.int64)
    inside = tl.full([], ROOM + 1, tl.int32)
    while (step < steps) & (inside > ROOM):
        shift = tl.maximum(60 - 3 * step, 31)
        if step >= 11:
            shift = 3 * (steps - 1 - step)
            if step == 11:
                ones = ((ID_BITS + 2) // 3) * 3
                found = found | ((tl.full([], 2147483647, tl.int64) >> ones) << ones)
        further = found | (digit << shift)
        least = tl.maximum(further, place)
        total = tl.zeros([TALL * _LSE_BLOCK, 8], tl.int64)
        tokens = tl.zeros([TALL * _LSE_BLOCK, 8], tl.int32)
        for first in range(0, count, TALL):
            where, weight = _listed(logits, listed, first, count, n, t, top, z_min, BY_MASS, TALL)
            beyond = where[:, None] >= least[None, :]
            total += tl.where(beyond, weight[:, None], 0)
            tokens += tl.where(beyond & (where < end)[:, None], 1, 0)
        total = tl.sum(total, axis=0)
        tokens = tl.sum(tokens, axis=0)
        found = tl.max(tl.where(total >= target, further, found), axis=0)
        next_tokens = tl.max(tl.where(further > found, tokens, 0), axis=0)
        inside = tl.max(tl.where(further == found, tokens, 0), axis=0) - next_tokens
        above = tl.maximum(above, tl.max(tl.where(further > found, total, 0), axis=0))
        end = tl.minimum(end, tl.min(tl.where(further > found, further, end), axis=0))
        step += 1
    if inside <= ROOM:
        lowest = tl.maximum(found, place)
        number = _gather(logits, listed, count, places, masses, n, t, top, z_min, lowest, end, ROOM, TALL)
        found = _cut_gathered(places, masses, number, lowest, target - above, ID_BITS, BY_MASS, ROOM)
    return tl.maximum(found, place)


@triton.jit
def _search(
    logits, maxima, listed, places, masses, n, blocks, t, top, z_min, highest, place, target, ID_BITS,
    BY_MASS: tl.constexpr, BLOCKS: tl.constexpr, ROOM: tl.constexpr, TALL: tl.constexpr,
):  # fmt: skip
    """The cut, and how many tokens may lie above it: they are gathered where they are ROOM at most."""
    key = _bound(maxima, blocks, t, top, z_min, place, target, BY_MASS, BLOCKS)
    count = _list_blocks(maxima, listed, blocks, t, z_min, tl.maximum(key, place >> 31), BLOCKS)
    low = tl.maximum(key << 31, place)
    number = _gather(logits, listed, count, places, masses, n, t, top, z_min, low, highest + 1, ROOM, TALL)
    if number <= ROOM:
        place = _cut_gathered(places, masses, number, place, target, ID_BITS, BY_MASS, ROOM)
    else:
        place = _cut(
            logits, listed, count, places, masses, n, t, top, z_min, low, highest, place, target, ID_BITS,
            BY_MASS, ROOM, TALL,
        )  # fmt: skip
    return place, number


@triton.jit
def _cut_kernel(
    logits, parts, lse, greedy, temperature, top_k, top_p, min_p, cuts, listed, places, masses, tile_masses,
    n, blocks, stride, tiles, ID_BITS, BLOCKS: tl.constexpr, TILES: tl.constexpr, TALL: tl.constexpr,
    ROOM: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.full([], _NOTHING, tl.int64)
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    if (t != 0.0) & (tl.load(greedy + row) >= 0):
        top = tl.load(lse + 4 * row + 2)
        z_min = top + log(tl.load(min_p + row))
        highest = (_key(tl.load(lse + 4 * row)) << 31) + 2147483647  # no token has a later place
        logits += row * stride
        parts += row * 4 * blocks
        listed += row * blocks
        places += row * ROOM
        masses += row * ROOM
        number = tl.full([], ROOM + 1, tl.int32)
        if (k > 0) & (k < n):
            place, number = _search(
                logits, parts, listed, places, masses, n, blocks, t, top, z_min, highest, place, k, ID_BITS,
                False, BLOCKS, ROOM, TALL,
            )  # fmt: skip
        if p < 1.0:
            if number <= ROOM:
                total = _gathered_mass(places, masses, number, place, ROOM)
            elif (k > 0) & (k < n):
                count = _list_blocks(parts, listed, blocks, t, z_min, place >> 31, BLOCKS)
                total = _mass(logits, listed, count, n, t, top, z_min, place, TALL)
            else:
                at = tl.arange(0, TILES)
                total = tl.sum(tl.load(tile_masses + row * tiles + at, mask=at < tiles, other=0), axis=0)
            target = tl.ceil(p.to(tl.float64) * total.to(tl.float64)).to(tl.int64)
            if number <= ROOM:
                place = _cut_gathered(places, masses, number, place, target, ID_BITS, True, ROOM)
            else:
                place, number = _search(
                    logits, parts, listed, places, masses, n, blocks, t, top, z_min, highest, place, target, ID_BITS,
                    True, BLOCKS, ROOM, TALL,
                )  # fmt: skip
    tl.store(cuts + row, place)


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
    room, listed = block(n, most=ROOM), new(rows, blocks, dtype=torch.int32)
    gathered = new(2, rows, room, dtype=torch.int64)
    with on(logits):
        _blocks_kernel[(rows, triton.cdiv(blocks, TILE))](
            logits, temperature, parts, n, blocks, stride, TILE=TILE, num_warps=4, **OPTIONS
        )
        _rows_kernel[(rows,)](
            logits, parts, lse, greedy, n, blocks, stride, BLOCKS=block(blocks), num_warps=4, **OPTIONS
        )
        _mass_kernel[(rows, tiles)](
            logits, parts, lse, greedy, temperature, top_k, top_p, min_p, best, n, blocks, stride, tiles,
            TALL=TALL, num_warps=4, **OPTIONS,
        )  # fmt: skip
        _cut_kernel[(rows,)](
            logits, parts, lse, greedy, temperature, top_k, top_p, min_p, places, listed, *gathered, best, n, blocks,
            stride, tiles, max(1, (n - 1).bit_length()), BLOCKS=block(blocks), TILES=block(tiles), TALL=TALL,
            ROOM=room, num_warps=16, **OPTIONS,
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
