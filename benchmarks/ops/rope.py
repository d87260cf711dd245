"""rope on queries and keys, against the stock arithmetic of Hugging Face models."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape


def _stock(q, k, cos, sin):
    def rotate(x):
        half = x.shape[-1] // 2
        return x * cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, None]

    return rotate(q), rotate(k)


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for count in rows:

        def make(count=count):
            q = random(count, shape.Hq, shape.D, dtype=dtype, device=device, seed=1)
            k = random(count, shape.Hk, shape.D, dtype=dtype, device=device, seed=2)
            inv_freq = 1e6 ** -(torch.arange(0, shape.D, 2, device=device) / shape.D)
            return q, k, *vx.rope_cos_sin(torch.arange(count, device=device), inv_freq, dtype=dtype)

        def bits(q, k, cos, sin):
            return vx.rope(q[-1:], k[-1:], cos[-1:], sin[-1:]), tuple(t[-1:] for t in vx.rope(q, k, cos, sin))

        values = count * shape.D * (2 * (shape.Hq + shape.Hk) + 2)
        name = f"{shape.name} T={count} {str(dtype)[6:]}"
        providers = {"vexact": vx.rope, "torch": _stock}
        yield Case("rope", name, make, providers, bits, bytes=values * dtype.itemsize, flops=3 * values)
