"""Attention in training (forward, forward + backward) and in paged decode, against the stock SDPA and flash-attn-4."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

import vexact_ops as vx

from ..harness import Case, peers, random
from ..shapes import Shape

PAGE = 16
CONTEXT = 512
# On a GPU, also what long contexts and full batches take: (sequences, keys, page size, kv_segment)
DECODES = (
    (64, 4096, 128, None),
    (64, 4096, 16, None),
    (256, 4096, 128, None),
    (256, 4096, 128, 2048),
    (1, 32768, 128, 1024),
    (1, 32768, 128, 2048),
    (1, 131072, 128, 2048),
)
TRAININGS = ((8, 4096, None), (1, 32768, None), (1, 32768, 1024), (1, 32768, 2048))


def _with_backward(fn: Callable[..., Tensor]) -> Callable[..., tuple]:
    def run(q, k, v, cu_seqlens):
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        out = fn(q, k, v, cu_seqlens)
        return torch.autograd.grad(out, (q, k, v), q.detach()[..., : out.shape[-1]])

    return run


def _flash_training(length: int, backward: bool) -> Callable[..., object]:
    from flash_attn.cute.interface import _flash_attn_bwd, _flash_attn_fwd

    def run(q, k, v, cu_seqlens):
        sizes = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "max_seqlen_q": length, "max_seqlen_k": length}
        out, lse, *_ = _flash_attn_fwd(q, k, v, causal=True, return_lse=True, **sizes)
        return _flash_attn_bwd(q, k, v, out, q, lse, causal=True, **sizes) if backward else out

    return run


def _training(
    shape: Shape, count: int, length: int, dtype: torch.dtype, device: str, segment: int | None = None
) -> Iterator[Case]:
    tokens = count * length

    def make():
        q = random(tokens, shape.Hq, shape.D, dtype=dtype, device=device, seed=1)
        k, v = (random(tokens, shape.Hk, shape.D, dtype=dtype, device=device, seed=s) for s in (2, 3))
        return q, k, v, torch.arange(count + 1, dtype=torch.int32, device=device) * length

    def ours(q, k, v, cu_seqlens):
        return vx.attention_varlen(q, k, v, cu_seqlens, length, kv_segment=segment)

    def stock(q, k, v, cu_seqlens):
        q, k, v = (t.view(count, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(tokens, *out.shape[1:2], out.shape[3])

    def bits(q, k, v, cu_seqlens):  # a sequence alone and after another one
        q, k, v = (t[:length] for t in (q, k, v))
        cut = length // 3 + 1
        packed = torch.tensor([0, cut, length + cut], dtype=torch.int32, device=device)
        both = vx.attention_varlen(*(torch.cat([t[:cut], t]) for t in (q, k, v)), packed, length, kv_segment=segment)
        return ours(q, k, v, cu_seqlens[:2]), both[cut:]

    values = tokens * shape.D * 2 * (shape.Hq + shape.Hk)
    flops = 2 * count * length * length * shape.D * shape.Hq  # two products, half of each masked
    name = f"{shape.name} {f'{count} x ' if count > 1 else 'T='}{length} {str(dtype)[6:]}"
    name += f" kv_segment={segment}" if segment else ""
    for label, wrap, times in (("training fwd", lambda f: f, 1.0), ("training fwd+bwd", _with_backward, 3.5)):
        others = {"torch": wrap(stock)}
        if device == "cuda" and dtype != torch.float32:
            others |= peers(**{"flash-attn-4": lambda times=times: _flash_training(length, times > 1)})
        yield Case(
            "attention",
            f"{label} {name}",
            make,
            {"vexact": wrap(ours), **others},
            bits,
            bytes=values * dtype.itemsize,
            flops=times * flops,
        )


def _flash_decode() -> Callable[..., Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    def run(q, k_cache, v_cache, table, lens, cu_seqlens):
        sizes = {"cu_seqlens_q": cu_seqlens, "seqused_k": lens, "page_table": table, "max_seqlen_q": 1}
        return _flash_attn_fwd(q, k_cache, v_cache, causal=True, num_splits=1, **sizes)[0]

    return run


def _decode(
    shape: Shape, count: int, context: int, page: int, dtype: torch.dtype, device: str, segment: int | None = None
) -> Iterator[Case]:
    per = context // page

    def make():
        q = random(count, shape.Hq, shape.D, dtype=dtype, device=device, seed=1)
        caches = (random(count * per, page, shape.Hk, shape.D, dtype=dtype, device=device, seed=s) for s in (2, 3))
        g = torch.Generator().manual_seed(0)
        table = torch.randperm(count * per, generator=g).view(count, per).int().to(device)
        lens = torch.full((count,), context, dtype=torch.int32, device=device)
        return q, *caches, table, lens, torch.arange(count + 1, dtype=torch.int32, device=device)

    def ours(q, k_cache, v_cache, table, lens, cu_seqlens):
        return vx.attention_paged(q, k_cache, v_cache, table, lens, cu_seqlens, 1, kv_segment=segment)

    def stock(q, k_cache, v_cache, table, lens, cu_seqlens):  # its cache is contiguous already: no gather is counted
        k, v = (c.view(count, context, shape.Hk, shape.D).transpose(1, 2) for c in (k_cache, v_cache))
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    def bits(q, k_cache, v_cache, table, lens, cu_seqlens):
        """A sequence alone and in its batch, and its last token in training."""
        places = table[-1:].long()
        k, v = (c[places].view(context, shape.Hk, shape.D) for c in (k_cache, v_cache))
        queries = torch.cat([k.new_zeros(context - 1, shape.Hq, shape.D), q[-1:]])
        trained = vx.attention_varlen(queries, k, v, lens.new_tensor([0, context]), context, kv_segment=segment)[-1:]
        alone = ours(q[-1:], k_cache, v_cache, table[-1:], lens[-1:], cu_seqlens[:2])
        together = ours(q, k_cache, v_cache, table, lens, cu_seqlens)[-1:]
        return (alone, trained), (together, together)

    others = {"torch": stock}
    # With other pages it goes another way, which died with an illegal instruction once
    if device == "cuda" and dtype != torch.float32 and segment is None and page == 128:
        others |= peers(**{"flash-attn-4": _flash_decode})
    name = f"decode {count} x {context} page {page} {shape.name} {str(dtype)[6:]}"
    yield Case(
        "attention",
        name + (f" kv_segment={segment}" if segment else ""),
        make,
        {"vexact": ours, **others},
        bits,
        bytes=2 * count * context * shape.Hk * shape.D * dtype.itemsize,
        flops=4 * count * context * shape.Hq * shape.D,
    )


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    for count in rows:
        if count >= 128:
            yield from _training(shape, 1, count, dtype, device)
        if count <= 256:
            yield from _decode(shape, count, CONTEXT, PAGE, dtype, device)
    if device == "cuda" and dtype != torch.float32:
        for count, context, page, segment in DECODES:
            yield from _decode(shape, count, context, page, dtype, device, segment)
        for count, length, segment in TRAININGS:
            yield from _training(shape, count, length, dtype, device, segment)
