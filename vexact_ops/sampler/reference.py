"""The meaning of sample in plain PyTorch: the same random words, everything after them in float64."""

import math

import torch
from torch import Tensor

_M0, _M1, _W0, _W1, _WORD = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85, 0xFFFFFFFF


def philox_ref(counter: list[int], key: list[int]) -> list[int]:
    """Philox4x32-10 on Python integers."""
    (c0, c1, c2, c3), (k0, k1) = counter, key
    for _ in range(10):
        p0, p1 = _M0 * c0, _M1 * c2
        c0, c1, c2, c3 = (p1 >> 32) ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
    return [c0, c1, c2, c3]


def gumbel_ref(seed: int, position: int, size: int) -> Tensor:
    """The Gumbel numbers of token ids 0 to size - 1."""
    noise = []
    for token in range(size):
        counter = [position & _WORD, position >> 32 & _WORD, (token >> 6) * 16 + (token & 15), 0]
        word = philox_ref(counter, [seed & _WORD, seed >> 32 & _WORD])[token >> 4 & 3]
        noise.append(-math.log(-math.log1p(-(word + 0.5) / 2**32)))
    return torch.tensor(noise, dtype=torch.float64)


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
        keys = scaled[row] + gumbel_ref(seeds[row], positions[row], logits.shape[1])
        ids[row] = keys.masked_fill(~allowed_ref(logits[row], temperature, top_k, top_p, min_p), -math.inf).argmax()
    return ids, scaled.gather(1, ids[:, None])[:, 0], raw.gather(1, ids[:, None])[:, 0]
