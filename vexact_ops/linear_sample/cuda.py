"""The GPU's own class on SM90, in bf16: draws where the logits are made, and one small kernel that joins their blocks.

Admitted byte for byte against the Triton kernels (contract: verify, then trust), the blocks' sums too. Everything else
(rows that are cut, fp32, fp16, rows off 16-byte boundaries, other GPUs) takes logits of `linear`'s fastest kernel and
the Triton sampler: same bits.

Up to 8 rows the weight is streamed as `linear` streams it for few rows, and a tile of it is one block of the
log-sum-exp. More take tiles of one or two boxes of 64 rows by such a block, where one warpgroup multiplies while the
other draws.
"""

import functools

import torch
from torch import Tensor

from .._core import check, digest, gpu, native
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided
from .._core.proof.inputs import SMALL, cancelling, special_rows
from ..linear.cuda import linear_fwd
from ..log_softmax.triton import LSE_BLOCK
from ..sampler.triton import blocks_of
from . import triton
from .triton import sampled

# Of the kernels for few rows, by how many they take: boxes of 64 columns of the weight in a stage, stages of the ring,
# stages asked for before the kernel before has ended, stages left to load when the one after may start, and blocks that
# share a multiprocessor.
FEW = {8: (1, 4, 4, 1000, 3)}
# Of those whose warpgroups take turns at drawing: the blocks that share what they read of the weight, and the boxes of
# up to 64 rows that each takes at once. 128 and 256: an odd and an even number of 128 rows.
OVERLAPPED = {64: (1, 1), 128: (1, 2), 256: (2, 2)}
ROWS = {8: (1, 8), 64: (9, 64), 128: (65, 128, 300), 256: (129, 256, 400)}  # the fewest, and what else is verified
TRITON = "triton"


def linear_sample(
    hidden: Tensor,
    weight: Tensor,
    softcap: float,
    seeds: Tensor,
    positions: Tensor,
    temperature: Tensor,
    *cuts: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    if route(hidden, weight, cut=bool(cuts)).chosen.name != TRITON:
        return _join(*_blocks(hidden, weight, softcap, seeds, positions, temperature), temperature)
    logits = linear_fwd(hidden, weight, None, torch.float32)
    return sampled(logits, softcap, seeds, positions, temperature, *cuts)


def class_of(rows: int) -> int:
    """Which of the kernels takes so many."""
    if rows <= 64:
        return 8 if rows <= 8 else 64
    return 128 if (rows + 127) // 128 % 2 else 256


def _blocks(hidden, weight, softcap, seeds, positions, temperature) -> tuple[Tensor, Tensor, Tensor]:
    blocks, ops = _new_blocks(hidden, weight.shape[0]), native.ops()
    args, most = (hidden, weight, seeds, positions, temperature, softcap), class_of(hidden.shape[0])
    if most in FEW:
        ops.draw_few(*args, most, *FEW[most], *blocks)
    else:
        ops.draw_overlapped(*args, *OVERLAPPED[most], *blocks, _known(hidden) if most > 64 else None)
    return blocks


def _new_blocks(hidden: Tensor, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Where B blocks of logits leave what a row's draw needs of them.

    parts    (R, 4, B) fp32: their largest logit and sum of e^(logit - it), raw, and both at the temperature
    entries  (R, 2, B) fp32: the logit of the token that is drawn where a block wins, and the block's number (0 where a
             row is greedy)
    tokens   (R, B) int32: these tokens, 2^31 - 1 where another block is known to be better
    """
    rows, blocks, device = hidden.shape[0], -(-vocabulary // LSE_BLOCK), hidden.device
    parts = torch.empty(rows, 4, blocks, dtype=torch.float32, device=device)
    entries = torch.empty(rows, 2, blocks, dtype=torch.float32, device=device)
    return parts, entries, torch.empty(rows, blocks, dtype=torch.int32, device=device)


def _join(parts: Tensor, entries: Tensor, tokens: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The draws that follow from the blocks."""
    rows, device = len(tokens), tokens.device
    ids = torch.empty(rows, dtype=torch.int64, device=device)
    logprobs, raw_logprobs = (torch.empty(rows, dtype=torch.float32, device=device) for _ in range(2))
    native.ops().draw_join(parts, entries, tokens, temperature, ids, logprobs, raw_logprobs)
    return ids, logprobs, raw_logprobs


def _known(hidden: Tensor) -> Tensor:
    """Where a kernel's blocks of threads tell each other the best draw so far of each row. Up to 64 rows that saves
    nothing: there drawing is hidden."""
    return torch.empty(hidden.shape[0], dtype=torch.int64, device=hidden.device)


# ---- admission


def route(hidden: Tensor, weight: Tensor, cut: bool = False) -> Decision:
    """Which kernels compute a call: dispatch takes it, `explain` shows it, `admit` asks for it ahead of time."""
    rule = "rows may be cut: the draw takes logits of linear's kernel" if cut else _rule(hidden, weight)
    if rule:
        return canonical_by_rule(TRITON, rule)
    return _draws(hidden.device, hidden.shape[1], class_of(hidden.shape[0]))


def _rule(hidden: Tensor, weight: Tensor) -> str | None:
    """Why these kernels do not take the operands."""
    if hidden.dtype != torch.bfloat16:
        return "they take bf16"
    if hidden.shape[0] == 0 or hidden.shape[1] == 0:
        return "there is nothing to compute"
    if hidden.shape[1] % 8 or not (gpu.aligned_rows(hidden) and gpu.aligned_rows(weight)):
        return "rows do not begin on 16-byte boundaries"
    return gpu.not_sm90(hidden.device)


@decided
def _draws(device: torch.device, width: int, rows: int) -> Proposal:
    if rows in FEW:
        boxes, ring, ahead, lead, share = FEW[rows]
        name = f"wgmma 128x{rows}x{64 * boxes} ring {ring} ahead {ahead} lead {lead} persistent {share}"
        which = f"R<={rows}"
    else:
        blocks, boxes = OVERLAPPED[rows]
        name = f"wgmma {64 * boxes}x128x64 in turns, clusters of {blocks}"
        which = "R<=64" if rows == 64 else f"R of an {'even' if rows == 256 else 'odd'} number of 128"
    candidate = digest.of_files(
        __file__, native=" ".join(f"{digest.of_extension(room, 'cuda')}" for room in ("linear_sample", "linear"))
    )
    return Proposal(
        f"linear_sample bfloat16 H={width} {which}",
        [Candidate(name, _ours, candidate)],
        Candidate(TRITON, _theirs, digest.canonical("linear_sample")),
        lambda: _cases(device, width, rows),
    )


def _ours(hidden, weight, softcap, seeds, positions, temperature):
    blocks = _blocks(hidden, weight, softcap, seeds, positions, temperature)
    return blocks[0], *_join(*blocks, temperature)


def _theirs(hidden, weight, softcap, seeds, positions, temperature):
    logits = triton.linear_fwd(hidden, weight, None, torch.float32)
    logits = triton.softcap_fwd(logits, softcap) if softcap else logits
    return blocks_of(logits, temperature), *sampled(logits, 0.0, seeds, positions, temperature)


def explain(op: str, *, hidden: Tensor, weight: Tensor, top_k: Tensor | None, **_) -> list[tuple[str, Decision]]:
    """Which kernels compute a call, of the operator's arguments by name."""
    return [("draw", route(check.rows(hidden), check.rows(weight), cut=top_k is not None))]


def admit(width: int, rows: int, device: torch.device) -> Decision:
    """Verify ahead of time what so many rows need."""
    new = functools.partial(torch.empty, dtype=torch.bfloat16, device=gpu.with_index(device))
    return route(new(rows, width), new(1, width))


def _cases(device: torch.device, width: int, most: int) -> list[tuple]:
    """Rows that cancel beside rows with probabilities of all sizes, at temperatures of all kinds, or all at one of
    each way to divide; as many and as few rows as there may be; a vocabulary that gives a block several tiles; a cap;
    and special rows."""

    def case(rows: int, vocabulary: int, softcap=0.0, special="", scale=1.0, alike: float | None = None) -> tuple:
        g = torch.Generator(device).manual_seed(rows)
        random = functools.partial(torch.rand, generator=g, dtype=torch.float32, device=device)
        columns = min(vocabulary, 1500)
        hidden, weight = cancelling(rows, width, columns, seed=width + rows, device=device)
        hidden = (hidden.float() / hidden.float().abs().amax(-1, keepdim=True)).bfloat16()
        hidden[::2] = (random(hidden[::2].shape) * 2 - 1) * scale  # and some with probabilities of all sizes
        if vocabulary > columns:
            weight = weight[torch.randint(columns, (vocabulary,), generator=g, device=device)]
        if special == "all":
            hidden = special_rows(hidden)
        elif special == "small":
            hidden, weight = special_rows(hidden, kinds=SMALL), special_rows(weight, first=3, kinds=SMALL)
        long = functools.partial(torch.randint, generator=g, dtype=torch.int64, device=device)
        temperatures = torch.tensor([1.0, 0.7, 0.0, 1.3, 1.0, 0.01, 40.0, 1e-5], dtype=torch.float32, device=device)
        t = temperatures[long(len(temperatures), (rows,))]
        if alike is not None:
            t = torch.full_like(t, alike)
        return hidden, weight, softcap, long(-(2**63), 2**63 - 1, (rows,)), long(0, 2**40, (rows,)), t

    least, top, *more = ROWS[most]
    wide = 150 * 256 + 77  # tokens: more tiles than there are blocks
    return [
        case(top, 1300),
        *(case(top, 1024, scale=0.05, alike=t) for t in (1.0, 0.7, 0.9)),
        case(least, 700),
        case(max(least, top - 3), 520, softcap=5.0),
        case(max(least, top - 1), 300, softcap=5.0, special="all"),
        case(min(top, least + 20), 520, special="small"),
        case(top, wide, scale=0.02),
        case(min(top, least + 1), wide, scale=0.3, alike=1.0),
        *(case(rows, 900) for rows in more),
    ]
