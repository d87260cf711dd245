"""The meaning of rope and rope_cos_sin in plain PyTorch, in the inputs' own precision: call them with float64."""

from collections.abc import Sequence

import torch
from torch import Tensor


def rope_ref(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False):
    half = cos.shape[-1] // 2
    c, s = cos[:, None, :half], sin[:, None, :half]

    def rotate(x):
        x, rest = x[..., : 2 * half], x[..., 2 * half :]
        a, b = (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
        pair = (a * c - b * s, b * c + a * s)
        turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
        return torch.cat((turned, rest), -1)

    return rotate(q), rotate(k)


def rope_cos_sin_ref(positions: Tensor, inv_freq: Tensor, *, axes: Sequence[int] | None = None, scaling: float = 1.0):
    """The angle is an fp32 product by definition; its cosine and sine are float64's."""
    of = positions[:, None] if axes is None else positions[list(axes)].t()
    angle = (of.float() * inv_freq.float()).double()
    angle = torch.cat((angle, angle), -1)
    return angle.cos() * scaling, angle.sin() * scaling
