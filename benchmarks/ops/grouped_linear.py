"""grouped_linear on a mixture's two products, against torch's grouped product (GPU) or a loop over experts (CPU)."""

import itertools
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx
from vexact_ops.testing import cancelling, offsets_of

from ..harness import Case, random
from ..shapes import Shape


def assigned_to(tokens: int, shape: Shape) -> list[int]:
    """The expert of each row, ascending: every token takes top_k different ones at random."""
    g = torch.Generator().manual_seed(0)
    drawn = torch.rand(tokens, shape.E, generator=g).topk(shape.top_k, 1)[1]
    return drawn.flatten().sort()[0].tolist()


def loop(x, weight, offsets):
    ends = offsets.tolist()
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin < end:
            out[begin:end] = F.linear(x[begin:end], weight[expert])
    return out


def torch_grouped(x, weight, offsets):
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets[1:])


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    on_gpu = device == "cuda"
    providers = {"vexact": vx.grouped_linear}
    if not on_gpu or dtype == torch.bfloat16:
        providers["torch"] = torch_grouped if on_gpu else loop
    products = {"gate_up": (2 * shape.expert_I, shape.H), "down": (shape.H, shape.expert_I)}
    for name, (n, k) in products.items() if shape.E else ():
        for tokens in rows:
            assigned = assigned_to(tokens, shape)
            offsets, count = offsets_of(assigned, shape.E, device), len(assigned)

            def make(offsets=offsets, count=count, n=n, k=k):
                x = random(count, k, dtype=dtype, device=device, seed=1)
                return x, random(shape.E, n, k, dtype=dtype, device=device, seed=2, scale=k**-0.5), offsets

            def bits(x, weight, offsets, count=count, assigned=assigned, k=k):
                x, weight = cancelling(count, k, 64, 0, dtype, device)
                weight = weight.expand(shape.E, 64, k)
                return vx.grouped_linear(x, weight, offsets), vx.linear(x, weight[0])

            touched = len(set(assigned))
            yield Case(
                "grouped_linear",
                f"{shape.name} {name} T={tokens} {str(dtype)[6:]}",
                make,
                providers,
                bits,
                bytes=(count * (k + n) + touched * n * k) * dtype.itemsize,
                flops=2 * count * n * k,
            )
