"""Storing keys and values into pages, against the stock index_copy."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape

PAGE = 16


def _stock(k, v, k_cache, v_cache, slots):
    k_cache.view(-1, *k.shape[1:]).index_copy_(0, slots, k)
    v_cache.view(-1, *v.shape[1:]).index_copy_(0, slots, v)


FREE = {"kv_heads": "Hk", "head_dim": "D"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for count in rows:
        pages = 2 * (count + PAGE - 1) // PAGE + 1

        def make(count=count, pages=pages):
            k, v = (random(count, shape.Hk, shape.D, dtype=dtype, device=device, seed=s) for s in (1, 2))
            caches = (torch.zeros(pages, PAGE, shape.Hk, shape.D, dtype=dtype, device=device) for _ in range(2))
            g = torch.Generator().manual_seed(0)
            return k, v, *caches, torch.randperm(pages * PAGE, generator=g)[:count].to(device)

        def bits(k, v, k_cache, v_cache, slots):
            vx.kv_cache_store(k, v, k_cache, v_cache, slots)
            return tuple(c.flatten(0, 1)[slots] for c in (k_cache, v_cache)), (k, v)

        values = 4 * count * shape.Hk * shape.D
        name = f"{shape.name} T={count} {str(dtype)[6:]}"
        providers = {"vexact": vx.kv_cache_store, "torch": _stock}
        yield Case("kv_cache", name, make, providers, bits, bytes=values * dtype.itemsize)
