"""The Triton kernels of the rooms it is composed of, and the one that joins what blocks of logits left of a row."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, begin, early, log, on
from ..linear.triton import linear_fwd
from ..linear_cross_entropy.triton import softcap_fwd
from ..log_softmax.triton import LSE_BLOCK, join_blocks, joined, log_prob
from ..sampler.triton import best_of, better, exact_sum, finite, sample

NO_TOKEN = 2147483647
_LSE_BLOCK, _NO_TOKEN = tl.constexpr(LSE_BLOCK), tl.constexpr(NO_TOKEN)


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    softcap: float,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    *cuts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """cuts: top_k, top_p and min_p, or none of them."""
    logits = linear_fwd(hidden, weight, None, torch.float32)
    return sampled(logits, softcap, seeds, positions, temperature, *cuts)


def sampled(
    logits: Tensor, softcap: float, seeds: Tensor, positions: Tensor, temperature: Tensor, *cuts: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The draws from uncapped logits."""
    logits = softcap_fwd(logits, softcap) if softcap else logits
    if not cuts:
        cuts = torch.zeros_like(seeds), torch.ones_like(temperature), torch.zeros_like(temperature)
    return sample(logits, seeds, positions, temperature, *cuts)


@triton.jit(do_not_specialize=["blocks"], do_not_specialize_on_alignment=["temperature"])
def _join_kernel(
    parts, entries, tokens, temperature, ids, logprobs, raw_logprobs, blocks,
    BLOCKS: tl.constexpr, MANY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """A row's log-sum-exps and the token of the best of its blocks."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    parts += row * 4 * blocks
    entries += row * 2 * blocks
    raw_top, raw_total = join_blocks(parts, parts + blocks, blocks, BLOCKS, MANY)
    top, total = join_blocks(parts + 2 * blocks, parts + 3 * blocks, blocks, BLOCKS, MANY)
    raw_log, log_sum = log(raw_total), log(total)
    t = tl.load(temperature + row)
    t = tl.where(t == 0.0, 1.0, t)
    most, rest = tl.full([], float("-inf"), tl.float64), tl.full([], 0.0, tl.float64)
    found = tl.full([], _NO_TOKEN, tl.int32)
    for first in range(0, blocks, BLOCKS):
        at = first + tl.arange(0, BLOCKS)
        token = tl.load(tokens + row * blocks + at, mask=at < blocks, other=_NO_TOKEN)
        there = token < _NO_TOKEN
        largest = tl.load(parts + 2 * blocks + at, mask=there, other=0.0)
        number = tl.load(entries + blocks + at, mask=there, other=0.0)
        more, left = exact_sum(largest, number)
        most, rest, found = better(most, rest, found, *best_of(tl.where(there, more, float("-inf")), left, token))
    one = tl.arange(0, 1)[None, :]
    found = found + one
    known = finite(raw_top) & finite(raw_log) & finite(top) & finite(log_sum) & (found < _NO_TOKEN)
    x = tl.load(entries + found // _LSE_BLOCK, mask=known, other=0.0)
    raw = log_prob(x, raw_top, raw_log)
    own = log_prob(tl.div_rn(x, tl.zeros_like(x) + t), top, log_sum)
    tl.store(ids + row + one, tl.where(known, found.to(tl.int64), -1))
    tl.store(logprobs + row + one, tl.where(known, own, float("nan")))
    tl.store(raw_logprobs + row + one, tl.where(known, raw, float("nan")))


def new_blocks(hidden: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where blocks of logits leave what a row's draw needs of them: (R, 4, B) and (R, 2, B) fp32, (R, B) int32."""
    rows, blocks, device = hidden.shape[0], triton.cdiv(vocabulary, LSE_BLOCK), hidden.device
    parts = torch.empty(rows, 4, blocks, dtype=torch.float32, device=device)
    entries = torch.empty(rows, 2, blocks, dtype=torch.float32, device=device)
    return parts, entries, torch.empty(rows, blocks, dtype=torch.int32, device=device)


def join(parts: Tensor, entries: Tensor, tokens: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """parts    the blocks' largest logit and sum of e^(logit - it), raw, and both at the temperature
    entries  the logit of the token that is drawn where a block wins, and the block's number (0 where a row is greedy)
    tokens   these tokens, NO_TOKEN where another block is known to be better
    """
    rows, blocks = tokens.shape
    ids = torch.empty(rows, dtype=torch.int64, device=tokens.device)
    logprobs, raw_logprobs = (torch.empty(rows, dtype=torch.float32, device=tokens.device) for _ in range(2))
    with on(parts):
        _join_kernel[(rows,)](
            parts, entries, tokens, temperature, ids, logprobs, raw_logprobs, blocks, **joined(blocks), num_warps=16,
            **OPTIONS, **early(parts),
        )  # fmt: skip
    return ids, logprobs, raw_logprobs
