"""Attention in training (forward, forward + backward), in prefill and in paged decode, against the stock SDPA,
flash-attn-4 and FlashInfer; latent attention with its heads expanded, and kept latent: one compressed key that all
heads share."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right

import vexact_ops as vx

from ..checks import as_tuple, reference
from ..harness import Case, random
from ..peers import flashinfer_paged, installed
from ..shapes import Shape

PAGE = 16
CONTEXT = 512
SWEPT_PAGE, SWEPT_KEYS = 128, 1 << 21  # of --lengths: the page size, and keys of a batch at most
EXACT = 4096  # keys that a float64 reference, which holds every pair, has room for
# On a GPU, also what long contexts and full batches take: (sequences, keys, page size, kv_segment)
DECODES = (
    (64, 4096, 128, None),
    (64, 4096, 16, None),
    (256, 4096, 128, None),
    (256, 4096, 16, None),
    (256, 4096, 128, 2048),
    (16, 1000, 16, None),
    (1, 32768, 16, 2048),
    (1, 32768, 128, 1024),
    (1, 32768, 128, 2048),
    (1, 131072, 128, 2048),
)
# (queries at the end, keys, page size)
PREFILLS = ((8192, 8192, 128), (8192, 32768, 128), (8192, 32768, 16), (512, 8192, 16))
LATENT_DECODES = ((64, 4096, 64, None), (64, 4096, 64, 1024), (256, 4096, 64, None), (256, 4096, 64, 1024))
TRAININGS = ((8, 4096, None), (1, 32768, None), (1, 32768, 1024), (1, 32768, 2048))


@dataclass(frozen=True)
class Heads:
    """What attention sees of a model."""

    name: str
    Hq: int
    Hk: int
    D: int
    Dv: int
    shared: bool = False  # values are the first numbers of their keys

    @staticmethod
    def of(shape: Shape, latent: bool = False) -> "Heads":
        if latent:
            return Heads(f"{shape.name} latent", shape.Hq, 1, *shape.latent, True)
        return Heads(shape.name, shape.Hq, shape.Hk, shape.D, shape.Dv or shape.D)

    def keys(self, *rows: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
        k = random(*rows, self.Hk, self.D, dtype=dtype, device=device, seed=2)
        return k, k[..., : self.Dv] if self.shared else random(
            *rows, self.Hk, self.Dv, dtype=dtype, device=device, seed=3
        )

    def key_values(self) -> int:
        """Numbers of a token's keys and values."""
        return self.Hk * (self.D if self.shared else self.D + self.Dv)


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
    shape: Heads, count: int, length: int, dtype: torch.dtype, device: str, segment: int | None = None
) -> Iterator[Case]:
    tokens = count * length

    def make():
        q = random(tokens, shape.Hq, shape.D, dtype=dtype, device=device, seed=1)
        k, v = shape.keys(tokens, dtype=dtype, device=device)
        return q, k, v, torch.arange(count + 1, dtype=torch.int32, device=device) * length

    def ours(q, k, v, cu_seqlens):
        return vx.attention_varlen(q, k, v, cu_seqlens, length, kv_segment=segment)

    def stock(q, k, v, cu_seqlens):
        q, k, v = (t.view(-1, length, *t.shape[1:]).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).reshape(-1, *out.shape[1:2], out.shape[3])

    def alone(fn, q, k, v, cu_seqlens):  # the last sequence, after the others
        if count == 1:
            return (), ()
        last = fn(*(t[-length:].contiguous() for t in (q, k, v)), cu_seqlens[:2])
        return as_tuple(last), tuple(t[-length:] for t in as_tuple(fn(q, k, v, cu_seqlens)))

    def exact(q, k, v, cu_seqlens):
        return reference("attention", "attention_varlen_ref")(q, k, v, cu_seqlens)

    def bits(q, k, v, cu_seqlens):  # a sequence alone and after another one
        q, k, v = (t[:length] for t in (q, k, v))
        cut = length // 3 + 1
        packed = torch.tensor([0, cut, length + cut], dtype=torch.int32, device=device)
        both = vx.attention_varlen(*(torch.cat([t[:cut], t]) for t in (q, k, v)), packed, length, kv_segment=segment)
        return ours(q, k, v, cu_seqlens[:2]), both[cut:]

    values = tokens * ((shape.D + shape.Dv) * shape.Hq + shape.key_values())
    flops = count * length * length * (shape.D + shape.Dv) * shape.Hq  # two products, half of each masked
    name = f"{shape.name} {f'{count} x ' if count > 1 else 'T='}{length} {str(dtype)[6:]}"
    name += f" kv_segment={segment}" if segment else ""
    for label, wrap, times in (("training fwd", lambda f: f, 1.0), ("training fwd+bwd", _with_backward, 3.5)):
        others = {"torch": wrap(stock)}
        if device == "cuda" and dtype != torch.float32 and not shape.shared:
            others |= installed(**{"flash-attn-4": lambda times=times: _flash_training(length, times > 1)})
        yield Case(
            "attention",
            f"{label} {name}",
            make,
            {"vexact": wrap(ours), **others},
            bits,
            bytes=values * dtype.itemsize,
            flops=times * flops,
            alone=alone,
            reference=exact if times == 1 and length <= EXACT else None,
        )


def _flash_decode() -> Callable[..., Tensor]:
    from flash_attn.cute.interface import _flash_attn_fwd

    def run(q, k_cache, v_cache, table, lens, cu_seqlens):
        sizes = {"cu_seqlens_q": cu_seqlens, "seqused_k": lens, "page_table": table, "max_seqlen_q": 1}
        return _flash_attn_fwd(q, k_cache, v_cache, causal=True, num_splits=1, **sizes)[0]

    return run


def _decode(
    shape: Heads,
    count: int,
    context: int,
    page: int,
    dtype: torch.dtype,
    device: str,
    segment: int | None = None,
    swept: bool = False,
) -> Iterator[Case]:
    per = -(-context // page)

    def make():
        q = random(count, shape.Hq, shape.D, dtype=dtype, device=device, seed=1)
        caches = shape.keys(count * per, page, dtype=dtype, device=device)
        g = torch.Generator().manual_seed(0)
        table = torch.randperm(count * per, generator=g).view(count, per).int().to(device)
        lens = torch.full((count,), context, dtype=torch.int32, device=device)
        return q, *caches, table, lens, torch.arange(count + 1, dtype=torch.int32, device=device)

    def ours(q, k_cache, v_cache, table, lens, cu_seqlens):
        return vx.attention_paged(q, k_cache, v_cache, table, lens, cu_seqlens, 1, kv_segment=segment)

    def stock(q, k_cache, v_cache, table, lens, cu_seqlens):  # its cache is contiguous already: no gather is counted
        k, v = (c.unflatten(0, (-1, per)).flatten(1, 2)[:, :context].transpose(1, 2) for c in (k_cache, v_cache))
        if shape.shared:  # SDPA would repeat the key for every head
            weights = torch.softmax(q @ k[:, 0].transpose(1, 2) * shape.D**-0.5, -1, torch.float32)
            return weights.to(q.dtype) @ v[:, 0]
        return F.scaled_dot_product_attention(q[:, :, None], k, v, enable_gqa=True)

    def bits(q, k_cache, v_cache, table, lens, cu_seqlens):
        """A sequence alone and in its batch, and its last token in training."""
        places = table[-1:].long()
        k, v = (c[places].flatten(0, 2)[:context] for c in (k_cache, v_cache))
        queries = torch.cat([k.new_zeros(context - 1, shape.Hq, shape.D), q[-1:]])
        trained = vx.attention_varlen(queries, k, v, lens.new_tensor([0, context]), context, kv_segment=segment)[-1:]
        alone = ours(q[-1:], k_cache, v_cache, table[-1:], lens[-1:], cu_seqlens[:2])
        together = ours(q, k_cache, v_cache, table, lens, cu_seqlens)[-1:]
        return (alone, trained), (together, together)

    def alone(fn, q, k_cache, v_cache, table, lens, cu_seqlens):  # the last sequence; pages in order, as stock has them
        if count == 1:
            return (), ()
        table = torch.arange(count * per, dtype=torch.int32, device=device).view(count, per)
        caches = (c[-per:].contiguous() for c in (k_cache, v_cache))
        one = fn(q[-1:].contiguous(), *caches, table[:1].contiguous(), lens[-1:].contiguous(), cu_seqlens[:2])
        return one, fn(q, k_cache, v_cache, table, lens, cu_seqlens)[-1:]

    others = {"torch": stock}
    if device == "cuda" and dtype != torch.float32 and segment is None and shape.Dv == shape.D:
        others |= installed(flashinfer=flashinfer_paged)  # its plan of a decode takes one head size
    # With other pages it goes another way, which died with an illegal instruction once
    if device == "cuda" and dtype != torch.float32 and segment is None and page == 128 and not shape.shared:
        others |= installed(**{"flash-attn-4": _flash_decode})
    sizes = f"of {count} S={context}" if swept else f"{count} x {context}"
    name = f"decode {sizes} page {page} {shape.name} {str(dtype)[6:]}"
    yield Case(
        "attention",
        name + (f" kv_segment={segment}" if segment else ""),
        make,
        {"vexact": ours, **others},
        bits,
        bytes=count * context * shape.key_values() * dtype.itemsize,
        flops=2 * count * context * shape.Hq * (shape.D + shape.Dv),
        alone=alone,
    )


def _prefill(shape: Heads, rows: int, context: int, page: int, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """A chunk of queries at the end of a sequence whose keys lie in pages."""

    def make():
        q = random(rows, shape.Hq, shape.D, dtype=dtype, device=device, seed=1)
        caches = shape.keys(context // page, page, dtype=dtype, device=device)
        table = torch.randperm(context // page, generator=torch.Generator().manual_seed(0)).int().to(device)[None]
        return q, *caches, table, *(torch.tensor(n, dtype=torch.int32, device=device) for n in ([context], [0, rows]))

    def ours(q, k_cache, v_cache, table, lens, cu_seqlens):
        return vx.attention_paged(q, k_cache, v_cache, table, lens, cu_seqlens, rows)

    def stock(q, k_cache, v_cache, table, lens, cu_seqlens):  # as in _decode; its mask is aligned to the last key
        k, v = (c.flatten(0, 1).transpose(0, 1)[None] for c in (k_cache, v_cache))
        mask = causal_lower_right(rows, context)
        return F.scaled_dot_product_attention(q.transpose(0, 1)[None], k, v, attn_mask=mask, enable_gqa=True)

    def bits(q, k_cache, v_cache, table, lens, cu_seqlens):  # training on the same keys
        k, v = (c[table[0].long()].flatten(0, 1) for c in (k_cache, v_cache))
        trained = vx.attention_varlen(q, k, v, cu_seqlens, rows, cu_seqlens_k=lens.new_tensor([0, context]))
        return trained, ours(q, k_cache, v_cache, table, lens, cu_seqlens)

    pairs = rows * context - rows * (rows - 1) // 2
    values = rows * shape.Hq * (shape.D + shape.Dv) + context * shape.key_values()
    yield Case(
        "attention",
        f"prefill {rows} of {context} page {page} {shape.name} {str(dtype)[6:]}",
        make,
        {"vexact": ours, "torch": stock, **installed(flashinfer=lambda: flashinfer_paged(prefill=True))},
        bits,
        bytes=values * dtype.itemsize,
        flops=2 * pairs * shape.Hq * (shape.D + shape.Dv),
    )


def _latent_cases(shape: Shape, dtype: torch.dtype, device: str) -> Iterator[Case]:
    """Decode on the cache of expanded heads and on the latent one, training in both forms."""
    few = max(1, 128 // shape.Hq)  # sequences: 128 heads expand a token to 160 kB
    for heads in (Heads.of(shape), Heads.of(shape, latent=True)):
        yield from _training(heads, few, 4096, dtype, device)
    for count in (8 * few, 32 * few):
        yield from _decode(Heads.of(shape), count, 4096, 128, dtype, device)
    for count, context, page, segment in LATENT_DECODES:
        yield from _decode(Heads.of(shape, latent=True), count, context, page, dtype, device, segment)


FREE = {"heads": "Hq", "kv_heads": "Hk", "head_dim": "D"}


def cases(
    shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str, lengths: Sequence[int] = ()
) -> Iterator[Case]:
    """With lengths, a sweep over them: one training sequence of each, and decodes of so many sequences as rows says."""
    heads = Heads.of(shape)
    if lengths:
        for length in lengths:
            yield from _training(heads, 1, length, dtype, device)
            for count in rows:
                if count * length <= SWEPT_KEYS:
                    yield from _decode(heads, count, length, SWEPT_PAGE, dtype, device, swept=True)
        return
    for count in rows:
        if count >= 128:
            yield from _training(heads, 1, count, dtype, device)
        if count <= 256:
            yield from _decode(heads, count, CONTEXT, PAGE, dtype, device)
    if device != "cuda" or dtype == torch.float32:
        return
    if shape.latent:
        yield from _latent_cases(shape, dtype, device)
        return
    for count, context, page, segment in DECODES:
        yield from _decode(heads, count, context, page, dtype, device, segment)
    for count, length, segment in TRAININGS:
        yield from _training(heads, count, length, dtype, device, segment)
    for chunk, context, page in PREFILLS:
        yield from _prefill(heads, chunk, context, page, dtype, device)
