"""The Triton kernels: the CPU kernel's draws from the same logits, id for id but for the last bits of exponentials.

Truncation and draw are made of correctly rounded fp32 operations, maxima, sums of integers, which have no order, and
blocks' sums in a tree of pairs, which are those of the log-sum-exp where a row is not cut; the log-probabilities have
the order of log_softmax on a GPU. Twelve launches, no look at a value by the host: those that
a row's parameters do not ask for end at once.

More than 600 lines in one file because a draw is all of its launches, and each reads what the one before it wrote.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, Launch, begin, cdiv, chunk, early, exp_term, launch, log, on
from ..log_softmax.triton import LSE_BLOCK, TILE, join_blocks, joined, load_blocks, log_prob, reduce_blocks

DRAWN = 16  # blocks that one program of the draw looks at
SEARCH = 1024  # tokens that the search for a cut takes at a time
PROGRAMS = 128  # that search a row which is alone, fewer where there are more; no bit depends on it
SUMS = 6400  # whole numbers by digit of a row's search: 2048, 2048, 1024, 1024 counts of those, the total
# A number for each row: kernels are not compiled anew for the boundaries that these begin on, nor for how many blocks
# and tiles a row has.
COLUMNS = "seeds", "positions", "temperature", "top_k", "top_p", "min_p"
COUNTS = "blocks", "tiles"

_LSE_BLOCK = tl.constexpr(LSE_BLOCK)
_SUMS = tl.constexpr(SUMS)
_COUNTS = tl.constexpr(5120)
_TOTAL = tl.constexpr(6144)
_NOTHING = tl.constexpr(0x00800000 << 31)  # the place that only -inf (and NaN) come after


class Search(NamedTuple):
    """What a search for rows' cuts knows and finds: where it begins and what it has cut; its sums and its digits."""

    bounds: Tensor
    cuts: Tensor
    sums: Tensor
    states: Tensor


@triton.jit
def _short_key(x):
    """A uint32 that grows with x."""
    b = (x + 0.0).to(tl.int32, bitcast=True)  # -0 sorts as 0
    return (b ^ ((b >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _key(x):
    """An int64 of 32 bits that grows with x."""
    return _short_key(x).to(tl.int64)


@triton.jit
def _place(x, token):
    """An int64 that grows with the order (logit descending, id ascending): nonnegative, distinct for each token."""
    return (_key(x) << 31) | (2147483647 - token).to(tl.int64)


@triton.jit
def _at_temperature(x, t):
    return tl.div_rn(x, tl.zeros_like(x) + t)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=COLUMNS)
def _blocks_kernel(
    logits, temperature, top_k, top_p, parts, sums, n, blocks, stride, TILE: tl.constexpr, PDL: tl.constexpr
):
    """The blocks' largest logits and sums, raw and at the row's temperature; zeros where its search adds up."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    if (tl.load(temperature + row) != 0.0) & ((tl.load(top_k + row) > 0) | (tl.load(top_p + row) < 1.0)):
        for first in range(tl.program_id(1) * 256, 2 * _SUMS, tl.num_programs(1) * 256):
            tl.store(sums + row * (2 * _SUMS) + first + tl.arange(0, 256), tl.zeros([256], tl.int64))
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
def finite(x):
    return tl.abs(x) < float("inf")


@triton.jit
def _first_with(largest, top, start, blocks):
    """The first of these blocks, from `start` on, that holds the row's largest; the last one of all where none does."""
    number = start + tl.arange(0, largest.shape[1])[None, :]
    return tl.min(tl.where(largest == top, number, blocks - 1), axis=1, keep_dims=True)


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=COLUMNS)
def _rows_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    min_p,
    parts,
    lse,
    greedy,
    bounds,
    n,
    blocks,
    stride,
    BLOCKS: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """Both log-sum-exps of a row, and the first of its largest logits; -1 for a row without a distribution. And keys
    that the cuts of top_k and top_p do not lie below, which spare them most tokens where they leave few."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    parts += row * 4 * blocks
    raw_top, total = join_blocks(parts, parts + blocks, blocks, BLOCKS, MANY)
    raw_log = log(total)
    largest = load_blocks(parts, 0, blocks, BLOCKS, float("-inf"))
    first = _first_with(largest, raw_top, 0, blocks)
    if MANY:
        for start in range(BLOCKS, blocks, BLOCKS):
            part = load_blocks(parts, start, blocks, BLOCKS, float("-inf"))
            first = tl.minimum(first, _first_with(part, raw_top, start, blocks))
    top, total = join_blocks(parts + 2 * blocks, parts + 3 * blocks, blocks, BLOCKS, MANY)
    log_sum = log(total)
    token = first * _LSE_BLOCK + tl.arange(0, _LSE_BLOCK)[None, :]
    x = tl.load(logits + row * stride + token, mask=token < n, other=float("-inf"))
    token = tl.min(tl.where(x == raw_top, token, 2147483647), axis=1, keep_dims=True)
    known = finite(raw_top) & finite(raw_log) & finite(top) & finite(log_sum)
    one = tl.arange(0, 1)[None, :]
    tl.store(greedy + row + one, tl.where(known, token, -1))
    tl.store(lse + 4 * row + one, raw_top)
    tl.store(lse + 4 * row + 1 + one, raw_log)
    tl.store(lse + 4 * row + 2 + one, top)
    tl.store(lse + 4 * row + 3 + one, log_sum)
    t, k, p = tl.load(temperature + row), tl.load(top_k + row), tl.load(top_p + row)
    z = _at_temperature(largest, tl.where(t == 0.0, 1.0, t))
    key = _key(largest)
    top, whole = tl.max(tl.max(top, axis=1), axis=0), tl.max(tl.max(total, axis=1), axis=0)
    allowed = (key > (_NOTHING >> 31)) & (z >= top + log(tl.load(min_p + row)))
    whole_row: tl.constexpr = not MANY  # else no key spares them tokens, which is as true
    if whole_row & (t != 0.0) & (k > 0) & (k <= blocks):
        tl.store(bounds + 2 * row, _bound(key, tl.where(allowed, 1, 0).to(tl.int64), k))
    else:
        tl.store(bounds + 2 * row, 0)
    if (
        whole_row & (t != 0.0) & (p < 1.0) & (tl.abs(whole) < 1e30)
    ):  # 1.001: above what rounding can have taken from the sum
        target = (p * whole * 1.001 * 1048576.0).to(tl.int64) * 1048576
        tl.store(bounds + 2 * row + 1, _bound(key, tl.where(allowed, _weight(z, top, True), 0), target))
    else:
        tl.store(bounds + 2 * row + 1, 0)


@triton.jit
def _weight(z, top, BY_MASS: tl.constexpr):
    """Probability relative to the largest, in whole units of 2^-40, truncated; or 1 to count tokens."""
    if BY_MASS:
        scaled = exp_term(z - top) * 1048576.0
        high = scaled.to(tl.int32)
        low = ((scaled - high.to(tl.float32)) * 1048576.0).to(tl.int32)
        weight = (high.to(tl.int64) << 20) + low.to(tl.int64)
    else:
        weight = tl.full(z.shape, 1, tl.int64)
    return weight


@triton.jit
def _bound(key, weight, target):
    """A key that the cut does not lie below: the blocks' largest tokens alone reach target there. 0 if they do not."""
    found = tl.zeros([], tl.int64)
    for step in range(0, 14):  # the bits that are left out make it lower, no less true
        further = found | (tl.full([], 1, tl.int64) << (31 - step))
        if tl.sum(tl.sum(tl.where(key >= further, weight, 0), axis=1), axis=0) >= target:
            found = further
    return found


@triton.jit
def _slot(digit, DIGITS: tl.constexpr):
    """Where the weights of a digit are added up: the largest digit first, neighbours in different sectors of memory,
    because logits of one row share most of their leading bits."""
    place = DIGITS - 1 - digit
    return (place % (DIGITS // 8)) * 8 + place // (DIGITS // 8)


@triton.jit
def _digit(sums, target, DIGITS: tl.constexpr):
    """The digit at which the sums reach target, from the largest on (-1: they do not), and what it has to give."""
    digit = DIGITS - 1 - tl.arange(0, DIGITS)
    above = tl.cumsum(tl.load(sums + _slot(digit, DIGITS)), 0)
    short = above < target
    return DIGITS - 1 - tl.sum(short.to(tl.int64), axis=0), target - tl.max(tl.where(short, above, 0), axis=0)


@triton.jit
def _wanted(temperature, greedy, top_k, top_p, row, n, BY_MASS: tl.constexpr):
    """Whether this search is to be done for a row."""
    drawn = (tl.load(temperature + row) != 0.0) & (tl.load(greedy + row) >= 0)
    if BY_MASS:
        cut = tl.load(top_p + row) < 1.0
    else:
        k = tl.load(top_k + row)
        cut = (k > 0) & (k < n)
    return drawn & cut


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=COLUMNS)
def _digits_kernel(
    logits, parts, lse, greedy, temperature, top_k, top_p, min_p, search, n, blocks, stride, tiles,
    LEVEL: tl.constexpr, BY_MASS: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Adds up the weights of the tokens whose keys begin with the digits found so far, by the next digit: 11, 11 and 10
    bits. The digit before is found from its sums first, by every program. Sums of whole numbers: no order."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    if _wanted(temperature, greedy, top_k, top_p, row, n, BY_MASS):
        kind: tl.constexpr = 1 if BY_MASS else 0
        sums = search.sums + (2 * row + kind) * _SUMS
        states = search.states + (2 * row + kind) * 4
        t = tl.load(temperature + row)
        place = tl.full([], _NOTHING, tl.int64)
        if BY_MASS:
            place = tl.load(search.cuts + 2 * row)
        low = tl.maximum(tl.load(search.bounds + 2 * row + kind), place >> 31)
        prefix = tl.zeros([], tl.int64)
        if LEVEL == 1:
            if BY_MASS:
                total = tl.load(sums + _TOTAL).to(tl.float64)
                target = tl.ceil(tl.load(top_p + row).to(tl.float64) * total).to(tl.int64)
            else:
                target = tl.load(top_k + row)
            prefix, rest = _digit(sums, target, 2048)
        if LEVEL == 2:
            second, rest = _digit(sums + 2048, tl.load(states + 1), 2048)
            prefix = tl.load(states)
            prefix = tl.where((prefix >= 0) & (second >= 0), (prefix << 11) | second, -1)
        if LEVEL > 0:
            mine = tl.program_id(1) == 0
            tl.store(states + 2 * LEVEL - 2, prefix, mask=mine)
            tl.store(states + 2 * LEVEL - 1, rest, mask=mine)
        shift: tl.constexpr = 32 if LEVEL == 0 else 21 if LEVEL == 1 else 10
        next_shift: tl.constexpr = 21 if LEVEL == 0 else 10 if LEVEL == 1 else 0
        DIGITS: tl.constexpr = 1024 if LEVEL == 2 else 2048
        top = tl.load(lse + 4 * row + 2)
        z_min = top + log(tl.load(min_p + row))
        logits += row * stride
        parts += row * 4 * blocks
        sums_at_level = sums + LEVEL * 2048
        least = tl.where(prefix >= 0, tl.maximum(low, prefix << shift), 1 << 32)  # no token below it adds to a sum
        if BY_MASS and LEVEL == 0:
            least = place >> 31  # all that are left add to the total
        lowest, begins = low.to(tl.uint32), prefix.to(tl.uint32)
        cut, cut_token = (place >> 31).to(tl.uint32), (2147483647 - (place & 2147483647)).to(tl.int32)
        total = tl.zeros([], tl.int64)
        programs = tl.num_programs(1)
        for chunk in range(tl.program_id(1), tiles, 32 * programs):  # 32 of this program's tiles
            number = tl.arange(0, 32)
            at = (chunk + number * programs)[:, None] * (TILE // _LSE_BLOCK) + tl.arange(0, TILE // _LSE_BLOCK)[None, :]
            highest = tl.max(tl.load(parts + at, mask=at < blocks, other=float("-inf")), axis=1)
            todo = tl.sum(tl.where(_key(highest) >= least, tl.full([32], 1, tl.int64) << number, 0), axis=0)
            for turn in range(0, tl.minimum(32, tl.cdiv(tiles - chunk, programs))):
                if ((todo >> turn) & 1) != 0:
                    token = (chunk + turn * programs) * TILE + tl.arange(0, TILE)
                    x = tl.load(logits + token, mask=token < n, other=float("-inf"))
                    key = _short_key(x)
                    allowed = (key > cut) | ((key == cut) & (token <= cut_token))
                    live = allowed & (key >= lowest)
                    if LEVEL > 0:
                        live &= (key >> shift) == begins
                    digit = ((key >> next_shift) & (DIGITS - 1)).to(tl.int32)
                    first = tl.min(tl.where(live, digit, DIGITS), axis=0)
                    last = tl.max(tl.where(live, digit, -1), axis=0)
                    if (first <= last) | (BY_MASS and LEVEL == 0):
                        z = x
                        if t != 1.0:
                            z = _at_temperature(x, t)
                        weight = tl.where(z >= z_min, _weight(z, top, BY_MASS), 0)
                        if BY_MASS and LEVEL == 0:
                            total += tl.sum(tl.where(allowed, weight, 0), axis=0)
                        live &= weight != 0
                        if first < last:
                            to = _slot(digit, DIGITS)
                            tl.atomic_add(sums_at_level + to, weight, mask=live, sem="relaxed")
                            if BY_MASS and LEVEL == 2:
                                tl.atomic_add(sums + _COUNTS + to, _weight(z, top, False), mask=live, sem="relaxed")
                        elif first == last:  # as of tied logits, which would wait for each other
                            to = _slot(first, DIGITS)
                            tl.atomic_add(sums_at_level + to, tl.sum(tl.where(live, weight, 0), axis=0), sem="relaxed")
                            if BY_MASS and LEVEL == 2:
                                tl.atomic_add(sums + _COUNTS + to, tl.sum(live.to(tl.int64), axis=0), sem="relaxed")
        if BY_MASS and LEVEL == 0:
            tl.atomic_add(sums + _TOTAL, total, sem="relaxed")


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=COLUMNS)
def _cut_kernel(
    logits,
    greedy,
    temperature,
    top_k,
    top_p,
    cuts,
    sums,
    states,
    n,
    stride,
    BY_MASS: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The place of the last token that is allowed. Of the tied ones, as many as are still needed, from the first on."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = 1 if BY_MASS else 0
    place = tl.full([], _NOTHING, tl.int64)
    if BY_MASS:
        place = tl.load(cuts + 2 * row)
    if _wanted(temperature, greedy, top_k, top_p, row, n, BY_MASS):
        sums += (2 * row + kind) * _SUMS
        states += (2 * row + kind) * 4
        prefix = tl.load(states + 2)
        digit, needed = _digit(sums + 4096, tl.load(states + 3), 1024)
        if (prefix >= 0) & (digit >= 0):
            key = (prefix << 10) | digit
            count = tl.load(sums + 4096 + _slot(digit, 1024))
            if BY_MASS:  # tied tokens weigh the same
                mass = count
                count = tl.load(sums + _COUNTS + _slot(digit, 1024))
                each = tl.maximum(mass // tl.maximum(count, 1), 1)
                needed = (needed + each - 1) // each
            last = tl.zeros([], tl.int64) + 2147483647
            if (needed > 0) & (needed < count):
                logits += row * stride
                first = tl.zeros([], tl.int32)
                while (needed > 0) & (first < n):
                    token = first + tl.arange(0, TILE)
                    tied = (token < n) & (_key(tl.load(logits + token, mask=token < n, other=0.0)) == key)
                    number = tl.cumsum(tied.to(tl.int64), 0)
                    last = tl.minimum(last, tl.min(tl.where(tied & (number == needed), token, 2147483647), axis=0))
                    needed -= tl.sum(tied.to(tl.int64), axis=0)
                    first += TILE
            place = tl.maximum(place, (key << 31) | (2147483647 - last))
    tl.store(cuts + 2 * row + kind, place)


@triton.jit
def _philox(seed, position, counter, last: tl.constexpr):
    """Philox4x32-10: four words for the counter (position, counter, last) under the key seed."""
    c0 = tl.zeros_like(counter).to(tl.uint32) + (position & 0xFFFFFFFF).to(tl.uint32)
    c1 = tl.zeros_like(counter).to(tl.uint32) + ((position >> 32) & 0xFFFFFFFF).to(tl.uint32)
    c2 = counter.to(tl.uint32)
    c3 = tl.zeros_like(c2) + last
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
def _word(seed, position, block):
    """The random words of blocks."""
    w0, w1, w2, w3 = _philox(seed, position, (block >> 6) * 16 + (block & 15), 0)
    j = (block >> 4) & 3
    return tl.where(j < 2, tl.where(j == 0, w0, w1), tl.where(j == 2, w2, w3))


@triton.jit
def _number(word, total):
    """log(total) + a Gumbel number: -log(-log(1 - u) / total) for u = (word + 1/2) / 2^32, as csrc/sampler/draw.h."""
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
    return log(tl.div_rn(tl.where(u > 0.25, far, near), total)) * -1.0


@triton.jit
def _share(seed, position, total):
    """A whole number from 0 to total - 1, total below 2^48: the row's 64 random bits, as a share of it."""
    high, low, _, _ = _philox(seed, position, tl.full([], 0, tl.int32), 1)
    high, low, of = high.to(tl.uint64), low.to(tl.uint64), total.to(tl.uint64)
    of_high, of_low = of >> 32, of & 0xFFFFFFFF
    middle = high * of_low + ((low * of_low) >> 32)
    other = low * of_high + (middle & 0xFFFFFFFF)
    return (high * of_high + (middle >> 32) + (other >> 32)).to(tl.int64)


@triton.jit
def exact_sum(z, number):
    """z + number as a real number: a sum in fp64, and what that leaves over, which fp64 holds too."""
    z, number = z.to(tl.float64), number.to(tl.float64)
    total = z + number
    part = total - z
    return total, (z - (total - part)) + (number - part)


@triton.jit
def best_of(total, rest, token):
    """Of some tokens the one whose sum is the largest, the lowest of equal ones: its sum and its id; 2147483647 where
    every sum is -inf."""
    most = tl.max(total)
    left = tl.where(total == most, tl.where(total > float("-inf"), rest, float("-inf")), float("-inf"))
    most_left = tl.max(left)
    found = tl.where(left == most_left, tl.where(left > float("-inf"), token, 2147483647), 2147483647)
    return most, most_left, tl.min(found)


@triton.jit
def better(total, rest, token, other_total, other_rest, other):
    """The better one of two entries."""
    left = (other_rest > rest) | ((other_rest == rest) & (other < token))
    better = (other_total > total) | ((other_total == total) & left)
    return (
        tl.where(better, other_total, total),
        tl.where(better, other_rest, rest),
        tl.where(better, other, token),
    )


@triton.jit
def _allowed(logits, token, n, t, place, z_min):
    """z = logit / t of tokens, -inf where they are not allowed."""
    x = tl.load(logits + token, mask=token < n, other=float("-inf"))
    z = _at_temperature(x, t)
    return tl.where((_place(x, token) >= place) & (z >= z_min), z, float("-inf"))


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=COLUMNS)
def _draw_kernel(
    logits, seeds, positions, parts, lse, greedy, temperature, min_p, cuts, sums, best, n, blocks, stride, tiles,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a part of a row the block with the largest log-sum-exp of its allowed tokens + Gumbel number, as real numbers,
    the lower block on a tie. What a row that is not cut has in its blocks is known."""
    begin(PDL)
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    t = tl.load(temperature + row)
    total, rest = tl.full([], float("-inf"), tl.float64), tl.full([], 0.0, tl.float64)
    found = tl.full([], 2147483647, tl.int32)
    parts += row * 4 * blocks
    block = tile * TILE + tl.arange(0, TILE)[:, None]
    if (t != 0.0) & (tl.load(greedy + row) >= 0):
        place, least = tl.load(cuts + 2 * row + 1), tl.load(min_p + row)
        largest = tl.load(parts + 2 * blocks + block, mask=block < blocks, other=float("-inf"))
        mass = tl.load(parts + 3 * blocks + block, mask=block < blocks, other=0.0)
        if (place > _NOTHING) | (least > 0.0):
            top = tl.load(lse + 4 * row + 2)
            z_min = top + log(least)
            highest = tl.max(tl.max(tl.load(parts + block, mask=block < blocks, other=float("-inf")), axis=1), axis=0)
            if _place(highest, tl.full([], 0, tl.int32)) >= place:
                token = block * _LSE_BLOCK + tl.arange(0, _LSE_BLOCK)[None, :]
                largest, mass = reduce_blocks(_allowed(logits + row * stride, token, n, t, place, z_min))
            else:
                largest = tl.full(largest.shape, float("-inf"), tl.float32)
        there = largest > float("-inf")
        number = _number(_word(tl.load(seeds + row), tl.load(positions + row), block), tl.where(there, mass, 1.0))
        sums_of, rests = exact_sum(tl.where(there, largest, 0.0), number)
        total, rest, found = best_of(tl.where(there, sums_of, float("-inf")), rests, block)
    tl.store(sums + (row * tiles + tile) * 2, total)
    tl.store(sums + (row * tiles + tile) * 2 + 1, rest)
    tl.store(best + row * tiles + tile, found)


@triton.jit
def _winner(sums, best, tiles, TILES: tl.constexpr):
    """The best of the blocks that a row's parts have found; 2147483647 where there is none."""
    total, rest = tl.full([], float("-inf"), tl.float64), tl.full([], 0.0, tl.float64)
    found = tl.full([], 2147483647, tl.int32)
    for first in range(0, tiles, TILES):
        at = first + tl.arange(0, TILES)
        block = tl.load(best + at, mask=at < tiles, other=2147483647)
        more = tl.load(sums + 2 * at, mask=at < tiles, other=float("-inf"))
        left = tl.load(sums + 2 * at + 1, mask=at < tiles, other=0.0)
        total, rest, found = better(total, rest, found, *best_of(more, left, block))
    return found


@triton.jit(do_not_specialize=COUNTS, do_not_specialize_on_alignment=COLUMNS)
def _finish_kernel(
    logits, seeds, positions, lse, greedy, temperature, min_p, cuts, sums, best, ids, logprobs, raw_logprobs, n, stride,
    tiles, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of the winning block the token that the row's share of its mass falls to; the log-probabilities."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    t = tl.load(temperature + row)
    token = tl.load(greedy + row)
    if (token >= 0) & (t != 0.0):  # a parameter that the host did not look at may have left no token to draw
        block = _winner(sums + row * tiles * 2, best + row * tiles, tiles, TILES)
        token = tl.full([], -1, tl.int64)
        if block < 2147483647:
            of = block * _LSE_BLOCK + tl.arange(0, _LSE_BLOCK)
            z_min = tl.load(lse + 4 * row + 2) + log(tl.load(min_p + row))
            z = _allowed(logits, of, n, t, tl.load(cuts + 2 * row + 1), z_min)
            weight = _weight(z, tl.max(z, axis=0) + 0.0, True)
            up_to = tl.cumsum(weight, 0)
            share = _share(tl.load(seeds + row), tl.load(positions + row), tl.sum(weight, axis=0))
            passed = tl.sum((up_to <= share).to(tl.int64), axis=0)
            token = block.to(tl.int64) * _LSE_BLOCK + tl.minimum(passed, _LSE_BLOCK - 1)
    known = token >= 0
    x = tl.load(logits + tl.maximum(token, 0))
    z = tl.div_rn(x, tl.where(t == 0.0, 1.0, t))
    raw = log_prob(x, tl.load(lse + 4 * row), tl.load(lse + 4 * row + 1))
    logprob = log_prob(z, tl.load(lse + 4 * row + 2), tl.load(lse + 4 * row + 3))
    tl.store(ids + row, token)
    tl.store(logprobs + row, tl.where(known, logprob, float("nan")))
    tl.store(raw_logprobs + row, tl.where(known, raw, float("nan")))


def blocks_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """(R, 4, B) of (R, V) logits: their blocks' largest logit and sum of e^(logit - it), raw, and both at the
    temperature (raw where it is 0)."""
    (rows, n), device = logits.shape, logits.device
    blocks = cdiv(n, LSE_BLOCK)
    parts = torch.empty(rows, 4, blocks, dtype=torch.float32, device=device)
    none, all_of_it = torch.zeros(rows, dtype=torch.int64, device=device), torch.ones_like(temperature)
    if rows:
        with on(logits):
            _blocks_kernel[(rows, cdiv(blocks, TILE))](
                logits, temperature, none, all_of_it, parts, none, n, blocks, logits.stride(0), TILE=TILE, num_warps=4,
                **OPTIONS, **early(logits),
            )  # fmt: skip
    return parts


def sample(
    logits: Tensor, seeds: Tensor, positions: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    (rows, n), device, stride = logits.shape, logits.device, logits.stride(0)

    def new(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    ids, logprobs, raw_logprobs = new(rows, dtype=torch.int64), new(rows), new(rows)
    if rows == 0:
        return ids, logprobs, raw_logprobs
    blocks, searched = cdiv(n, LSE_BLOCK), cdiv(n, SEARCH)
    tiles = cdiv(blocks, DRAWN)
    parts, lse = new(rows, 4, blocks), new(rows, 4)
    greedy, best = new(rows, dtype=torch.int64), new(rows, tiles, dtype=torch.int32)
    scores = new(rows, tiles, 2, dtype=torch.float64)
    bounds, cuts = new(rows, 2, dtype=torch.int64), new(rows, 2, dtype=torch.int64)
    sums, states = new(rows, 2, SUMS, dtype=torch.int64), new(rows, 2, 4, dtype=torch.int64)
    found = Search(bounds, cuts, sums, states)
    search = min(searched, max(1, int(PROGRAMS / rows**0.5)))
    options = {**OPTIONS, **early(logits)}
    launches = [
        Launch(
            _blocks_kernel,
            (rows, cdiv(blocks, TILE)),
            (logits, temperature, top_k, top_p, parts, sums, n, blocks, stride),
            {"TILE": TILE, "num_warps": 4, **options},
        ),
        Launch(
            _rows_kernel,
            (rows,),
            (logits, temperature, top_k, top_p, min_p, parts, lse, greedy, bounds, n, blocks, stride),
            {**joined(blocks), "num_warps": 4, **options},
        ),
    ]
    for by_mass in (False, True):
        taken = {"BY_MASS": by_mass, "num_warps": 4, **options}
        row = logits, parts, lse, greedy, temperature, top_k, top_p, min_p, found, n, blocks, stride, searched
        launches += [
            *(Launch(_digits_kernel, (rows, search), row, {"LEVEL": i, "TILE": SEARCH, **taken}) for i in range(3)),
            Launch(
                _cut_kernel,
                (rows,),
                (logits, greedy, temperature, top_k, top_p, cuts, sums, states, n, stride),
                {"TILE": 2048, **taken},
            ),
        ]
    drawn, scored = (logits, seeds, positions), (lse, greedy, temperature, min_p, cuts, scores, best)
    launches += [
        Launch(
            _draw_kernel,
            (rows, tiles),
            (*drawn, parts, *scored, n, blocks, stride, tiles),
            {"TILE": DRAWN, "num_warps": 4, **options},
        ),
        Launch(
            _finish_kernel,
            (rows,),
            (*drawn, *scored, ids, logprobs, raw_logprobs, n, stride, tiles),
            {"TILES": chunk(tiles, 1024), "num_warps": 1, **options},
        ),
    ]
    with on(logits):
        launch(launches, device, (sample, logits.dtype, n, stride))
    return ids, logprobs, raw_logprobs
