"""The meaning of sample in plain PyTorch: the same random words, everything after them in float64."""

import math

import torch
from torch import Tensor

_M0, _M1, _W0, _W1, _WORD = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF
DRAW_BLOCK = 128  # tokens that share one Gumbel number


def philox_ref(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return [c0, c1, c2, c3]


def _words(seed: int, position: int, *counter: int) -> list[int]:
    return philox_ref([position & _WORD, position >> 32 & _WORD, *counter], [seed & _WORD, seed >> 32 & _WORD])


def gumbel_ref(seed: int, position: int, blocks: int) -> Tensor:
    """The Gumbel numbers of a row's blocks."""
    noise = []
    for block in range(blocks):
        word = _words(seed, position, (block >> 6) * 16 + (block & 15), 0)[block >> 4 & 3]
        noise.append(-math.log(-math.log1p(-(word + 0.5) / 2**32)))
    return torch.tensor(noise, dtype=torch.float64)


def place_ref(seed: int, position: int) -> float:
    """Where the draw falls among the tokens of a row's winning block: from 0 up to 1."""
    high, low, *_ = _words(seed, position, 0, 1)
    return (high << 32 | low) / 2**64


def draw_ref(z: Tensor, seed: int, position: int) -> int:
    """A token of one row of logits, -inf for those that are not allowed."""
    blocks = torch.nn.functional.pad(z, (0, -len(z) % DRAW_BLOCK), value=-math.inf).view(-1, DRAW_BLOCK)
    block = int((blocks.logsumexp(-1) + gumbel_ref(seed, position, len(blocks))).argmax())
    before = torch.softmax(blocks[block], -1).cumsum(-1) <= place_ref(seed, position)
    return block * DRAW_BLOCK + int(before.sum())


def allowed_ref(logits: Tensor, temperature: float, top_k: int, top_p: float, min_p: float) -> Tensor:
    """Which tokens of one row may be drawn: (V,) bool."""
    p = torch.softmax(logits.double() / temperature, -1)
    order = torch.sort(logits, descending=True, stable=True).indices
    keep = p[order] >= min_p * p.max()
    if top_k:
        keep[top_k:] = False
    p = torch.where(keep, p[order], 0.0)
    before = (p / p.sum()).cumsum(-1) - p / p.sum()
    keep &= before < top_p - 1e-9  # a prefix that reaches top_p exactly is enough, however its sum was rounded
    allowed = torch.zeros_like(keep)
    allowed[order] = keep
    return allowed & (logits > -math.inf)


def sample_ref(
    logits: Tensor,
    seeds: list[int],
    positions: list[int],
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    raw = torch.log_softmax(logits.double(), -1)
    scaled = torch.log_softmax(logits.double() / temperature, -1) if temperature else raw
    ids = logits.argmax(-1)
    for row in range(len(logits)) if temperature else ():
        z = scaled[row].masked_fill(~allowed_ref(logits[row], temperature, top_k, top_p, min_p), -math.inf)
        ids[row] = draw_ref(z, seeds[row], positions[row])
    return ids, scaled.gather(1, ids[:, None])[:, 0], raw.gather(1, ids[:, None])[:, 0]
