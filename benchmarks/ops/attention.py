"""Attention in training (forward, forward + backward) and in paged decode, against the stock SDPA."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape

PAGE = 16
CONTEXT = 512


def _with_backward(fn):
    def run(q, k, v, cu_seqlens):
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        return torch.autograd.grad(fn(q, k, v, cu_seqlens).float().sum(), (q, k, v))

    return run


def _training(shape: Shape, length: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    def make():
        q = random(length, shape.Hq, shape.D, dtype=dtype, device=device, seed=1)
        k, v = (random(length, shape.Hk, shape.D, dtype=dtype, device=device, seed=s) for s in (2, 3))
        return q, k, v, torch.tensor([0, length], dtype=torch.int32, device=device)

    def ours(q, k, v, cu_seqlens):
        return vx.attention_varlen(q, k, v, cu_seqlens, length)

    def stock(q, k, v, cu_seqlens):
        q, k, v = (t.transpose(0, 1)[None] for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)

    def bits(q, k, v, cu_seqlens):  # a sequence alone and after another one
        cut = length // 3 + 1
        packed = torch.tensor([0, cut, length + cut], dtype=torch.int32, device=device)
        both = vx.attention_varlen(*(torch.cat([t[:cut], t]) for t in (q, k, v)), packed, length)
        return ours(q, k, v, cu_seqlens), both[cut:]

    values = length * shape.D * 2 * (shape.Hq + shape.Hk)
    flops = 2 * length * length * shape.D * shape.Hq  # two products, half of each masked
    name = f"{shape.name} T={length} {str(dtype)[6:]}"
    for label, wrap, times in (("training fwd", lambda f: f, 1.0), ("training fwd+bwd", _with_backward, 3.5)):
        yield Case(
            "attention",
            f"{label} {name}",
            make,
            {"vexact": wrap(ours), "torch": wrap(stock)},
            bits,
            bytes=values * dtype.itemsize,
            flops=times * flops,
        )


def _decode(shape: Shape, count: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    per = CONTEXT // PAGE

    def make():
        q = random(count, shape.Hq, shape.D, dtype=dtype, device=device, seed=1)
        caches = (random(count * per, PAGE, shape.Hk, shape.D, dtype=dtype, device=device, seed=s) for s in (2, 3))
        g = torch.Generator().manual_seed(0)
        table = torch.randperm(count * per, generator=g).view(count, per).int().to(device)
        lens = torch.full((count,), CONTEXT, dtype=torch.int32, device=device)
        return q, *caches, table, lens, torch.arange(count + 1, dtype=torch.int32, device=device)

    def ours(q, k_cache, v_cache, table, lens, cu_seqlens):
        return vx.attention_paged(q, k_cache, v_cache, table, lens, cu_seqlens, 1)

    def stock(q, k_cache, v_cache, table, lens, cu_seqlens):  # its cache is contiguous already: no gather is counted
        k, v = (c.view(count, CONTEXT, shape.Hk, shape.D).transpose(1, 2) for c in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    def bits(q, k_cache, v_cache, table, lens, cu_seqlens):
        alone = ours(q[-1:], k_cache, v_cache, table[-1:], lens[-1:], cu_seqlens[:2])
        return alone, ours(q, k_cache, v_cache, table, lens, cu_seqlens)[-1:]

    yield Case(
        "attention",
        f"decode {count} x {CONTEXT} {shape.name} {str(dtype)[6:]}",
        make,
        {"vexact": ours, "torch": stock},
        bits,
        bytes=2 * count * CONTEXT * shape.Hk * shape.D * dtype.itemsize,
        flops=4 * count * CONTEXT * shape.Hq * shape.D,
    )


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for count in rows:
        if count >= 128:
            yield from _training(shape, count, dtype, device)
        if count <= 256:
            yield from _decode(shape, count, dtype, device)
