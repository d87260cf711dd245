"""rope on queries and keys, against the stock arithmetic of Hugging Face models, quack and Liger (which rotate in
place, and quack one tensor at a time)."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..checks import reference, row_alone
from ..harness import Case, random
from ..peers import installed
from ..shapes import Shape


def _stock(q, k, cos, sin):
    def rotate(x):
        half = x.shape[-1] // 2
        return x * cos[:, None] + torch.cat((-x[..., half:], x[..., :half]), -1) * sin[:, None]

    return rotate(q), rotate(k)


def _quack():
    from quack.rotary import apply_rotary_emb

    def run(q, k, cos, sin):
        half = cos.shape[-1] // 2
        cos, sin = cos[:, :half].contiguous(), sin[:, :half].contiguous()
        return tuple(apply_rotary_emb(x[None], cos, sin)[0] for x in (q, k))

    return run


def _liger():
    from liger_kernel.ops.rope import LigerRopeFunction

    def run(q, k, cos, sin):  # it takes (batch, heads, tokens, D)
        turned = LigerRopeFunction.apply(q[None].transpose(1, 2), k[None].transpose(1, 2), cos[None], sin[None])
        return tuple(t.transpose(1, 2)[0] for t in turned)

    return run


FREE = {"heads": "Hq", "kv_heads": "Hk", "head_dim": "D"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    others = installed(quack=_quack, liger=_liger) if device == "cuda" else {}
    for count in rows:

        def make(count=count):
            q = random(count, shape.Hq, shape.D, dtype=dtype, device=device, seed=1)
            k = random(count, shape.Hk, shape.D, dtype=dtype, device=device, seed=2)
            inv_freq = 1e6 ** -(torch.arange(0, shape.D, 2, dtype=torch.float32, device=device) / shape.D)
            return q, k, *vx.rope_cos_sin(torch.arange(count, device=device), inv_freq, dtype=dtype)

        def bits(q, k, cos, sin):
            return vx.rope(q[-1:], k[-1:], cos[-1:], sin[-1:]), tuple(t[-1:] for t in vx.rope(q, k, cos, sin))

        values = count * shape.D * (2 * (shape.Hq + shape.Hk) + 2)
        name = f"{shape.name} T={count} {str(dtype)[6:]}"
        providers = {"vexact": vx.rope, "torch": _stock, **others}
        yield Case(
            "rope",
            name,
            make,
            providers,
            bits,
            bytes=values * dtype.itemsize,
            flops=3 * values,
            alone=row_alone(0, 1, 2, 3),
            reference=reference("rope", "rope_ref"),
        )
        if device == "cuda":
            yield _with_store(shape, count, dtype, device, make)


def _with_store(shape: Shape, count: int, dtype: torch.dtype, device: str, make) -> Case:
    """rope and the store of a decode step in one launch, against ours in two and the stock way."""
    pages = count // 16 + 1

    def with_caches():
        q, k, cos, sin = make()
        caches = (torch.zeros(pages, 16, shape.Hk, shape.D, dtype=dtype, device=device) for _ in range(2))
        slots = torch.randperm(pages * 16, generator=torch.Generator().manual_seed(0))[:count].to(device)
        return q, k, k.clone(), cos, sin, *caches, slots

    def two(q, k, v, cos, sin, k_cache, v_cache, slots):
        q, k = vx.rope(q, k, cos, sin)
        vx.kv_cache_store(k, v, k_cache, v_cache, slots)
        return q

    def stock(q, k, v, cos, sin, k_cache, v_cache, slots):
        q, k = _stock(q, k, cos, sin)
        k_cache.flatten(0, 1).index_copy_(0, slots, k)
        v_cache.flatten(0, 1).index_copy_(0, slots, v)
        return q

    def bits(*args):
        one = vx.rope_kv_store(*args), args[5].clone(), args[6].clone()
        return one, (two(*args), args[5], args[6])

    values = count * shape.D * (2 * (shape.Hq + 2 * shape.Hk) + 2)
    providers = {"vexact": vx.rope_kv_store, "vexact-two": two, "torch": stock}
    name = f"+store {shape.name} T={count} {str(dtype)[6:]}"
    return Case("rope", name, with_caches, providers, bits, bytes=values * dtype.itemsize, flops=3 * values)
