"""The Triton kernels: tiles of logits as `linear` makes them, reduced where they are made, in the order of log_softmax.

Backward, logits are made again, a chunk of the vocabulary at a time, and turned into their gradients, which are kept in
the inputs' dtype (fp32 and fp16 inputs: in fp32) for the two products with them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, cdiv, exp, exp_term, log, on, tanh, tree_sum
from ..linear.triton import accumulate, matmul, place
from ..log_softmax.triton import LSE_BLOCK, join_blocks, joined, load_blocks, log_prob, origin, reduce_blocks

# The chunks that logits are made in. They bound the memory beyond the gradients; no bit depends on them.
FWD_TOKENS = 16384  # whose block sums are held at once: 8 or 12 bytes for every 128 logits
BWD_TOKENS, BWD_VOCABULARY = 8192, 16384  # of one chunk of dlogits: 256 MiB in bf16
# A number for each token: kernels are not compiled anew for the boundaries that these begin on.
COLUMNS = "target", "temperature", "dlogprob", "dentropy", "entropy", "lse", "count", "target_logit"

# A tile's columns are one block of the log-sum-exp.
TILES = {
    2: {"BM": 128, "BN": LSE_BLOCK, "BK": 64, "num_warps": 8, "num_stages": 4},
    4: {"BM": 64, "BN": LSE_BLOCK, "BK": 32, "num_warps": 8, "num_stages": 2},
}


class Strides(NamedTuple):
    """Of rows."""

    hidden: int
    weight: int


class GradientStrides(NamedTuple):
    hidden: int
    weight: int
    d: int


@triton.jit
def _capped(x, cap):
    return cap * tanh(tl.div_rn(x, tl.zeros_like(x) + cap))


@triton.jit
def _at(x, t):
    """x / t. Where t is one number, 1, there is nothing to divide."""
    return tl.div_rn(x, tl.broadcast_to(t, x.shape))


@triton.jit(do_not_specialize=["tokens", "V", "blocks"], do_not_specialize_on_alignment=COLUMNS)
def _blocks_kernel(
    hidden, weight, target, temperature, cap, parts, target_logit, tokens, V, K, strides, blocks,
    ONE_T: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """A block's largest z and sums for a tile of tokens, and the logit of every target that lies in it."""
    m, n = place(tokens, V, BM, BN)
    x = tl.zeros([BM, BN], tl.float32)
    x = accumulate(x, hidden, weight, m, n, tokens, V, K, strides.hidden, 1, 1, strides.weight, False, EVEN_K, BK)
    if CAP:
        x = _capped(x, cap)
    live = m < tokens
    target_at = tl.broadcast_to((target_logit + m)[:, None], x.shape)
    wanted = tl.load(target + m, mask=live, other=-1)
    tl.store(target_at, x, mask=(live & (wanted < V))[:, None] & (wanted[:, None] == n[None, :]))
    if ONE_T:
        t = tl.load(temperature)
        if t != 1.0:
            x = _at(x, t)
    else:
        x = _at(x, tl.load(temperature + m, mask=live, other=1.0)[:, None])
    z = tl.where((n < V)[None, :], x, float("-inf"))
    largest, total = reduce_blocks(z)
    number = tl.min(n, axis=0) // BN
    at = parts + (m * (3 if ENTROPY else 2) * blocks + number)[:, None]
    tl.store(at, largest, mask=live[:, None])
    tl.store(at + blocks, total, mask=live[:, None])
    if ENTROPY:
        d = z - origin(largest)
        e = exp_term(d)
        tl.store(at + 2 * blocks, tree_sum(tl.where(e > 0.0, e * d, 0.0)), mask=live[:, None])  # 0 log 0 is 0


@triton.jit
def _moved(parts, top, start, blocks, BLOCKS: tl.constexpr):
    """A token's sum of e^(z - top) (z - top) over its blocks from `start` on."""
    largest = load_blocks(parts, start, blocks, BLOCKS, float("-inf"))
    sums = load_blocks(parts + blocks, start, blocks, BLOCKS, 0.0)
    shifted = load_blocks(parts + 2 * blocks, start, blocks, BLOCKS, 0.0)
    moved = tl.fma(largest - origin(top), sums, shifted) * exp(largest - origin(top))
    return tree_sum(tl.where(largest == float("-inf"), 0.0, moved))  # order: as the blocks' sums in join_blocks


@triton.jit(do_not_specialize=["V", "blocks", "first"], do_not_specialize_on_alignment=COLUMNS)
def _tokens_kernel(
    parts, target_logit, target, temperature, count, logprob, entropy, lse, V, blocks, first,
    ONE_T: tl.constexpr, ENTROPY: tl.constexpr, COUNT: tl.constexpr, BLOCKS: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """Of tokens from `first` on; zeros for those that are not live."""
    token = tl.program_id(0).to(tl.int64)
    counts = True
    if COUNT:
        counts = first + token < tl.load(count)
    parts += token * (3 if ENTROPY else 2) * blocks
    top, total = join_blocks(parts, parts + blocks, blocks, BLOCKS, MANY)
    log_sum = log(total)
    one = tl.arange(0, 1)[None, :]
    tl.store(lse + 2 * token + one, tl.where(counts, top, 0.0))
    tl.store(lse + 2 * token + 1 + one, tl.where(counts, log_sum, 0.0))
    wanted = tl.load(target + token + one)
    x = tl.load(target_logit + token + one, mask=(wanted >= 0) & (wanted < V), other=float("nan"))
    z = tl.div_rn(x, tl.load(temperature + (0 if ONE_T else token)) + one.to(tl.float32))
    tl.store(logprob + token + one, tl.where(counts, log_prob(z, top, log_sum), 0.0))
    if ENTROPY:
        moved = _moved(parts, top, 0, blocks, BLOCKS)
        if MANY:
            for start in range(BLOCKS, blocks, BLOCKS):
                moved += _moved(parts, top, start, blocks, BLOCKS)
        tl.store(entropy + token + one, log_sum - tl.div_rn(moved, total))


@triton.jit(do_not_specialize=["tokens", "first"], do_not_specialize_on_alignment=COLUMNS)
def _dlogits_kernel(
    hidden, weight, target, temperature, cap, lse, dlogprob, dentropy, entropy, d,
    tokens, V, K, strides, first,
    ONE_T: tl.constexpr, CAP: tl.constexpr, ENTROPY: tl.constexpr, EVEN_K: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradients of a tile of logits; V of the vocabulary, from `first` on."""
    m, n = place(tokens, V, BM, BN)
    x = tl.zeros([BM, BN], tl.float32)
    x = accumulate(x, hidden, weight, m, n, tokens, V, K, strides.hidden, 1, 1, strides.weight, False, EVEN_K, BK)
    live = m < tokens
    if CAP:
        th = tanh(tl.div_rn(x, tl.zeros_like(x) + cap))
        x = cap * th
        slope = tl.fma(th * -1.0, th, 1.0)
    if ONE_T:
        t = tl.load(temperature)
        z = x
        if t != 1.0:
            z = _at(x, t)
    else:
        t = tl.load(temperature + m, mask=live, other=1.0)[:, None]
        z = _at(x, t)
    top = tl.load(lse + 2 * m, mask=live, other=0.0)[:, None]
    log_sum = tl.load(lse + 2 * m + 1, mask=live, other=0.0)[:, None]
    lp = log_prob(z, top, log_sum)
    p = exp_term(lp)
    upstream = tl.load(dlogprob + m, mask=live, other=0.0)[:, None]
    pull = tl.broadcast_to(upstream, p.shape)
    if ENTROPY:
        scale = tl.broadcast_to(tl.load(dentropy + m, mask=live, other=0.0)[:, None], p.shape)
        above = lp + tl.load(entropy + m, mask=live, other=0.0)[:, None]
        pull = tl.where(p > 0.0, tl.fma(scale, above, pull), pull)
    wanted = tl.load(target + m, mask=live, other=-1)[:, None] - first
    out = tl.fma(p * -1.0, pull, tl.where(wanted == n[None, :], upstream, 0.0))
    if ONE_T:
        if t != 1.0:
            out = _at(out, t)
    else:
        out = _at(out, t)
    if CAP:
        out *= slope
    inside = live[:, None] & (n < V)[None, :]
    tl.store(d + m[:, None] * strides.d + n[None, :], out.to(d.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["tokens", "first", "first_token"], do_not_specialize_on_alignment=COLUMNS)
def _unit_dlogits_kernel(
    hidden, weight, target, lse, count, d, tokens, V, K, strides, first, first_token,
    COUNT: tl.constexpr, EVEN_K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """The gradients of -log p[target] of a tile of logits, p - [target]: p is e^(z - its block's largest z), rounded to
    d's dtype as a kernel may have kept it, times e^(that largest - lse). Where 1 is taken from p, p was not rounded.
    Zeros for tokens that are not live."""
    m, n = place(tokens, V, BM, BN)
    x = tl.zeros([BM, BN], tl.float32)
    x = accumulate(x, hidden, weight, m, n, tokens, V, K, strides.hidden, 1, 1, strides.weight, False, EVEN_K, BK)
    live = m < tokens
    z = tl.where((n < V)[None, :], x, float("-inf"))
    largest = tl.max(z, axis=1, keep_dims=True) + 0.0  # as reduce_blocks has it
    kept = exp_term(z - origin(largest)).to(d.dtype.element_ty).to(tl.float32)
    top = tl.load(lse + 2 * m, mask=live, other=0.0)[:, None]
    log_sum = tl.load(lse + 2 * m + 1, mask=live, other=0.0)[:, None]
    p = kept * exp(log_prob(largest, top, log_sum))
    wanted = tl.load(target + m, mask=live, other=-1)[:, None] - first
    out = tl.where(wanted == n[None, :], exp(log_prob(z, top, log_sum)) - 1.0, p)
    if COUNT:
        out = tl.where((first_token + m < tl.load(count))[:, None], out, 0.0)
    tl.store(d + m[:, None] * strides.d + n[None, :], out.to(d.dtype.element_ty), mask=live[:, None] & (n < V)[None, :])


@triton.jit
def _scaled_kernel(x, factor, y, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + at, mask=at < n, other=0.0).to(tl.float32) * tl.load(factor)
    tl.store(y + at, v.to(y.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["ignored", "tokens"], do_not_specialize_on_alignment=COLUMNS)
def _count_kernel(target, last, live, share, ignored, tokens, BLOCK: tl.constexpr):
    """How many tokens up to each are not ignored, how many that is in all, and one over that (of none, 1)."""
    one = tl.arange(0, 1)
    total = tl.zeros([1], tl.int64)
    for start in range(0, tokens, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < tokens
        counts = (inside & (tl.load(target + at, mask=inside, other=0) != ignored)).to(tl.int64)
        tl.store(last + at, total + tl.cumsum(counts, 0), mask=inside)
        total += tl.sum(counts, axis=0)
    tl.store(live + one, total)
    tl.store(share + one, (1.0 / tl.maximum(total, 1).to(tl.float64)).to(tl.float32))


@triton.jit(do_not_specialize=["ignored", "tokens"], do_not_specialize_on_alignment=COLUMNS)
def _compact_kernel(
    hidden, target, last, hidden_out, target_out, ignored, tokens, V, K, hidden_row, BLOCK: tl.constexpr
):
    """A token to its place: those that count first, in their order; of the others, zeros and no target."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    wanted, number = tl.load(target + token), tl.load(last + token)
    counts = wanted != ignored
    place = tl.where(counts, number - 1, tl.load(last + tokens - 1) + token - number)
    x = tl.load(hidden + token * hidden_row + column, mask=counts & (column < K), other=0.0)
    tl.store(hidden_out + place * K + column, x, mask=column < K)
    if tl.program_id(1) == 0:
        tl.store(target_out + place, tl.where(counts & (wanted >= 0) & (wanted < V), wanted, -1))


@triton.jit(do_not_specialize=["ignored"], do_not_specialize_on_alignment=COLUMNS)
def _spread_kernel(x, target, last, factor, y, ignored, K, BLOCK: tl.constexpr):
    """The row of every token that counts, times factor, from where _compact_kernel has put it; zeros for the others."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    counts = tl.load(target + token) != ignored
    place = tl.load(last + token) - 1
    v = tl.load(x + place * K + column, mask=counts & (column < K), other=0.0).to(tl.float32)
    v = tl.where(counts, v * tl.load(factor), 0.0)
    tl.store(y + token * K + column, v.to(y.dtype.element_ty), mask=column < K)


@triton.jit
def _softcap_kernel(x, dy, y, n, x_row, dy_row, cap, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    v = tl.load(x + row * x_row + column, mask=column < n, other=0.0)
    if BACKWARD:
        th = tanh(tl.div_rn(v, tl.zeros_like(v) + cap))
        out = tl.load(dy + row * dy_row + column, mask=column < n, other=0.0) * tl.fma(th * -1.0, th, 1.0)
    else:
        out = _capped(v, cap)
    tl.store(y + row * n + column, out, mask=column < n)


@triton.jit(do_not_specialize=["n"])
def _loss_kernel(logprob, count, loss, n, MEAN: tl.constexpr, BLOCK: tl.constexpr):
    lanes = tl.zeros([1, BLOCK], tl.float64)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)[None, :]
        x = tl.load(logprob + at, mask=at < n, other=0.0).to(tl.float64)
        lanes += x  # order: lane by lane, ascending; then a tree
    one = tl.arange(0, 1)[None, :]
    total = tree_sum(lanes) * -1.0
    if MEAN:
        total = total / tl.load(count + one).to(tl.float64)
    tl.store(loss + one, total.to(tl.float32))


def _head(hidden: Tensor, weight: Tensor, temperature: Tensor, softcap: float) -> dict:
    tile = TILES[hidden.element_size()]
    even = hidden.shape[1] % tile["BK"] == 0
    return {"ONE_T": temperature.shape[0] == 1, "CAP": softcap != 0.0, "EVEN_K": even, **tile, **OPTIONS}


def _grid(tokens: int, columns: int, tile: dict) -> tuple[int]:
    return (cdiv(tokens, tile["BM"]) * cdiv(columns, tile["BN"]),)


def reduce_tokens(
    parts, target_logit, target, temperature, vocabulary, logprob, entropy, lse, live=None, first=0
) -> None:
    """Log-probabilities, entropies (or None) and log-sum-exps of tokens, from `first` on, from the sums of their
    blocks; zeros from the live-th token on, where that is given."""
    blocks = cdiv(vocabulary, LSE_BLOCK)
    with on(parts):
        _tokens_kernel[(logprob.shape[0],)](
            parts, target_logit, target, temperature, target if live is None else live, logprob,
            logprob if entropy is None else entropy, lse, vocabulary, blocks, first, ONE_T=temperature.shape[0] == 1,
            ENTROPY=entropy is not None, COUNT=live is not None, **joined(blocks), num_warps=4, **OPTIONS,
        )  # fmt: skip


def linear_logprobs_fwd(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor,
    softcap: float,
    want_entropy: bool,
    live: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Zeros from the live-th token on, where that is given: () int64."""
    (tokens, width), vocabulary = hidden.shape, weight.shape[0]

    def new(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.float32, device=hidden.device)

    logprob, lse = new(tokens), new(tokens, 2)
    entropy = new(tokens) if want_entropy else None
    blocks, tile = cdiv(vocabulary, LSE_BLOCK), _head(hidden, weight, temperature, softcap)
    parts, target_logit = new(min(tokens, FWD_TOKENS), 3 if want_entropy else 2, blocks), new(min(tokens, FWD_TOKENS))
    for first in range(0, tokens, FWD_TOKENS):
        chunk = slice(first, first + FWD_TOKENS)
        rows, ids = hidden[chunk], target[chunk]
        temperatures = temperature if tile["ONE_T"] else temperature[chunk]
        count = rows.shape[0]
        with on(hidden):
            _blocks_kernel[_grid(count, vocabulary, tile)](
                rows, weight, ids, temperatures, softcap, parts, target_logit, count, vocabulary, width,
                Strides(hidden.stride(0), weight.stride(0)), blocks, ENTROPY=want_entropy, **tile,
            )  # fmt: skip
        results = logprob[chunk], None if entropy is None else entropy[chunk], lse[chunk]
        reduce_tokens(parts, target_logit, ids, temperatures, vocabulary, *results, live, first)
    return logprob, entropy, lse


def linear_logprobs_bwd(
    dlogprob: Tensor,
    dentropy: Tensor | None,
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    temperature: Tensor,
    softcap: float,
    entropy: Tensor | None,
    lse: Tensor,
    need_dhidden: bool,
    need_dweight: bool,
    live: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """From the live-th token on, where that is given, hidden, dlogprob and lse hold zeros."""
    tile = _head(hidden, weight, temperature, softcap)

    def dlogits(chunk: slice, low: int, w: Tensor, d: Tensor) -> None:
        rows = hidden[chunk]
        _dlogits_kernel[_grid(*d.shape, tile)](
            rows, w, target[chunk], temperature if tile["ONE_T"] else temperature[chunk], softcap, lse[chunk],
            dlogprob[chunk], dlogprob if dentropy is None else dentropy[chunk],
            dlogprob if dentropy is None else entropy[chunk], d, *d.shape, hidden.shape[1],
            GradientStrides(hidden.stride(0), weight.stride(0), d.stride(0)), low, ENTROPY=dentropy is not None, **tile,
        )  # fmt: skip

    dhidden, dweight = _products(dlogits, hidden, weight, None, need_dhidden, need_dweight)
    return dhidden.to(hidden.dtype) if need_dhidden else None, dweight


def _unit_tile(hidden: Tensor, live: Tensor | None) -> dict:
    return {**TILES[2], **OPTIONS, "EVEN_K": hidden.shape[1] % TILES[2]["BK"] == 0, "COUNT": live is not None}


def _unit_dlogits(hidden, w, target, lse, live, d, low: int, first: int, tile: dict) -> None:
    with on(hidden):
        _unit_dlogits_kernel[_grid(*d.shape, tile)](
            hidden, w, target, lse, target if live is None else live, d, *d.shape, hidden.shape[1],
            GradientStrides(hidden.stride(0), w.stride(0), d.stride(0)), low, first, **tile,
        )  # fmt: skip


def unit_gradients(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    lse: Tensor,
    scale: Tensor | None,
    need_dhidden: bool,
    need_dweight: bool,
    live: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the sum of -scale * log p[target] over the live tokens, before what the loss is multiplied with
    is known: dhidden in fp32, dweight in weight's dtype. bf16, no softcap, a temperature of 1; scale () fp32."""
    tile = _unit_tile(hidden, live)

    def dlogits(chunk: slice, low: int, w: Tensor, d: Tensor) -> None:
        _unit_dlogits(hidden[chunk], w, target[chunk], lse[chunk], live, d, low, chunk.start, tile)

    return _products(dlogits, hidden, weight, scale, need_dhidden, need_dweight)


def unit_dlogits(hidden: Tensor, weight: Tensor, target: Tensor, lse: Tensor, live: Tensor | None, d: Tensor) -> None:
    """unit_gradients' gradients of logits into d (chunks, T, columns of the vocabulary in each) bf16."""
    tile = _unit_tile(hidden, live)
    for number in range(d.shape[0] if hidden.shape[0] else 0):
        low = number * d.shape[2]
        w = weight[low : low + d.shape[2]]
        _unit_dlogits(hidden, w, target, lse, live, d[number, :, : w.shape[0]], low, 0, tile)


def unit_dweight(d: Tensor, hidden: Tensor, weight: Tensor, scale: Tensor | None) -> Tensor:
    """unit_gradients' dweight from what unit_dlogits has made."""
    columns = d.shape[2]
    dweight = (torch.empty if hidden.shape[0] else torch.zeros)(weight.shape, dtype=weight.dtype, device=weight.device)
    sums = torch.empty(min(columns, weight.shape[0]), weight.shape[1], dtype=torch.float32, device=weight.device)
    for number in range(d.shape[0] if hidden.shape[0] else 0):
        out = dweight[number * columns : (number + 1) * columns]
        made = matmul(d[number, :, : out.shape[0]].t(), hidden, sums[: out.shape[0]])  # order: tokens ascending
        out.copy_(made if scale is None else made.mul_(scale))
    return dweight


def _products(dlogits, hidden: Tensor, weight: Tensor, scale: Tensor | None, need_dhidden: bool, need_dweight: bool):
    """The products with dlogits, which come in chunks: (T, H) fp32, (V, H) as weight, each times scale, if any."""
    (tokens, width), vocabulary = hidden.shape, weight.shape[0]
    device = hidden.device
    new = torch.empty if tokens else torch.zeros
    dhidden = new(tokens, width, dtype=torch.float32, device=device) if need_dhidden else None
    dweight = new(weight.shape, dtype=weight.dtype, device=device) if need_dweight else None
    if tokens == 0:
        return dhidden, dweight
    columns = min(vocabulary, BWD_VOCABULARY)
    kept = hidden.dtype if hidden.dtype == torch.bfloat16 else torch.float32  # fp16 would lose small probabilities
    room = torch.empty(min(tokens, BWD_TOKENS), columns, dtype=kept, device=device)
    chunks = need_dweight and (tokens > BWD_TOKENS or scale is not None)
    sums = torch.empty(columns, width, dtype=torch.float32, device=device) if chunks else None
    for low in range(0, vocabulary, columns):
        w = weight[low : low + columns]
        for first in range(0, tokens, BWD_TOKENS):
            chunk = slice(first, first + BWD_TOKENS)
            rows = hidden[chunk]
            d = room[: rows.shape[0], : w.shape[0]]
            with on(hidden):
                dlogits(chunk, low, w, d)
            if need_dhidden:  # order: the vocabulary ascending, continued from chunk to chunk
                matmul(d, w, dhidden[chunk], resume=low > 0)
            if need_dweight:  # order: tokens ascending, continued from chunk to chunk; rounded once
                target_rows = dweight[low : low + columns]
                if not chunks:
                    matmul(d.t(), rows, target_rows)
                else:
                    matmul(d.t(), rows, sums[: w.shape[0]], resume=first > 0)
                    if first + BWD_TOKENS >= tokens:
                        made = sums[: w.shape[0]]
                        target_rows.copy_(made if scale is None else made.mul_(scale))
    return dhidden if not need_dhidden or scale is None else dhidden.mul_(scale), dweight


def scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x times a () fp32, rounded once to dtype."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel():
        with on(x):
            _scaled_kernel[(cdiv(x.numel(), 4096),)](x, factor, y, x.numel(), BLOCK=4096, num_warps=8, **OPTIONS)
    return y


def compact(hidden: Tensor, target: Tensor, ignored: int, last: Tensor, vocabulary: int) -> tuple[Tensor, Tensor]:
    """The tokens whose target is not `ignored` first, in their order, then zeros, in hidden's shape; and their targets,
    -1 where they are outside the vocabulary. last (T,) int64: how many tokens up to each are not ignored."""
    tokens, width = hidden.shape
    hidden_out = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    target_out = torch.empty(target.shape, dtype=target.dtype, device=hidden.device)
    if tokens == 0:
        return hidden_out, target_out
    with on(hidden):
        _compact_kernel[(tokens, max(1, cdiv(width, 1024)))](
            hidden, target, last, hidden_out, target_out, ignored, tokens, vocabulary, width, hidden.stride(0),
            BLOCK=1024, num_warps=4, **OPTIONS,
        )  # fmt: skip
    return hidden_out, target_out


def spread(x: Tensor, target: Tensor, ignored: int, last: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """The rows of what was made of `compact`'s tokens, times a () fp32, rounded once to dtype, each where its token was
    before; zeros for the others."""
    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    if y.numel():
        with on(x):
            _spread_kernel[(x.shape[0], cdiv(x.shape[1], 1024))](
                x, target, last, factor, y, ignored, x.shape[1], BLOCK=1024, num_warps=4, **OPTIONS
            )
    return y


def _softcap(x: Tensor, dy: Tensor | None, cap: float) -> Tensor:
    y = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    if y.numel():
        with on(x):
            _softcap_kernel[(x.shape[0], cdiv(x.shape[1], 1024))](
                x, x if dy is None else dy, y, x.shape[1], x.stride(0), 0 if dy is None else dy.stride(0), cap,
                BACKWARD=dy is not None, BLOCK=1024, num_warps=4, **OPTIONS,
            )  # fmt: skip
    return y


def softcap_fwd(x: Tensor, cap: float) -> Tensor:
    return _softcap(x, None, cap)


def softcap_bwd(dy: Tensor, x: Tensor, cap: float) -> Tensor:
    return _softcap(x, dy, cap)


def count(target: Tensor, ignored: int) -> tuple[Tensor, Tensor, Tensor]:
    """How many of (T,) ids up to each are not `ignored`, (T,) int64; how many that is in all, () int64; and one over
    that, () fp32, 1 of none."""
    last = torch.empty(target.shape, dtype=torch.int64, device=target.device)
    live = torch.empty((), dtype=torch.int64, device=target.device)
    share = torch.empty((), dtype=torch.float32, device=target.device)
    with on(target):
        _count_kernel[(1,)](
            target, last, live, share, ignored, target.shape[0], BLOCK=2048, num_warps=8, **OPTIONS
        )  # fmt: skip
    return last, live, share


def loss_of(logprob: Tensor, count: Tensor | None) -> Tensor:
    """Minus the sum of (T,) fp32, over count () int64 where there is one: in fp64 and in one order, rounded once."""
    loss = torch.empty((), dtype=torch.float32, device=logprob.device)
    with on(logprob):
        _loss_kernel[(1,)](
            logprob, logprob if count is None else count, loss, logprob.shape[0], MEAN=count is not None, BLOCK=2048,
            num_warps=8, **OPTIONS,
        )  # fmt: skip
    return loss
