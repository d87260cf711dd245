"""Attention over packed sequences (training) and over a paged cache (prefill chunks and decode): one order of keys."""

import functools

import torch
from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("attention", cpu=("cpu",), cuda=("cuda", "triton"), one_class=False)
KEY_BLOCK = {"cpu": 64, "triton": 64, "cuda": 128}  # keys in a block of a backend's kernels: where a segment may end
_INT32 = (torch.int32,)


def flash_keys(d: int) -> int:
    """Keys in a block of the flash order, as csrc/attention/flash.cuh has it: a multiple of them is in KEY_BLOCK."""
    return 64 if d > 192 else 128


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    *,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_segment: int | None = None,
    backend: str | None = None,
) -> Tensor:
    """softmax(scale * q @ k.T) @ v within each of the packed sequences; the training form, with gradients.

    q             (T, Hq, D) bf16 | fp32
    k, v          (Tk, Hk, D), (Tk, Hk, Dv) in q.dtype; Hq a multiple of Hk: query head h reads head h // (Hq // Hk)
    cu_seqlens    (B + 1,) int32: sequence b has the rows cu_seqlens[b] to cu_seqlens[b + 1]; from 0 to T
    max_seqlen    at least the longest sequence's queries; no effect on bits
    cu_seqlens_k  the same for k and v where a sequence has another number of keys than queries, up to Tk; the last
                  query then stands at the last key
    scale         D ** -0.5 by default
    causal        a query sees no key behind its own place
    window        it sees this many keys, the one at its own place included (needs causal)
    softcap       scores s = softcap * tanh(s / softcap), after scale
    sinks         (Hq,) bf16 | fp32: a logit for each query head that joins the denominator
    kv_segment    cut the keys at multiples of this many, reduce each segment on its own and merge them in order; a
                  multiple of 64, of 128 with backend "cuda". Changes bits: declare it on both sides. None and any
                  kv_segment of at least the number of keys are the same bits
    returns       (T, Hq, Dv) in q.dtype. A query that sees no key (more queries than keys) gives zeros
    bits          a row depends on that query row, the keys and values it sees, its place, its head's sink and the
                  options. A score is one fp32 accumulator over D ascending, then scale, then softcap; keys go in
                  blocks cut from the start of their sequence (online softmax, fp32): blocks of 64 ascending, and
                  segments likewise; with backend "cuda" (the default on a GPU) 16-bit inputs with head dims 64, 96,
                  128, 192/128, 256 or 576/512 (which has no sinks) and no softcap, on SM90, take flash-attn-4's order:
                  blocks of 128 (of 64 with 256 and 576/512) and segments, both descending, a sink last; so do 72 and
                  80 (of image encoders) with causal=False, as 96 with columns of zeros. A key that is not seen has no
                  influence, NaN or not. Equal to attention_paged wherever the same keys are seen. backend="cuda" and
                  "triton" differ in bits
    grad          q, k, v as bits of their own sequence: dq sums keys ascending; dk and dv sum queries ascending, then
                  the heads of the group; sinks sum tokens ascending, repeatable for one fixed batch. kv_segment does
                  not change how gradients are summed. Memory is O(T): scores are recomputed. In the cases of
                  flash-attn-4's order, and where it is installed, gradients are those of its repeatable backward;
                  where an input or dout is not finite, other gradients of that call may then be NaN, but no other
                  value
    raises        TypeError on dtype, ValueError on shape, values or device, BackendUnavailable
    source        Milakov and Gimelshein, Online normalizer calculation for softmax, arXiv 1805.02867; Dao et al.,
                  FlashAttention, arXiv 2205.14135
    example
    >>> q, k, v = torch.randn(7, 4, 16), torch.randn(7, 2, 16), torch.randn(7, 2, 16)
    >>> packed = vx.attention_varlen(q, k, v, torch.tensor([0, 3, 7], dtype=torch.int32), max_seqlen=4)
    >>> second = vx.attention_varlen(q[3:], k[3:], v[3:], torch.tensor([0, 4], dtype=torch.int32), max_seqlen=4)
    >>> vx.same_bits(packed[3:], second)
    True
    """
    op = "attention_varlen"
    check.tensor(op, "q", q, check.FLOATS, 3)
    for arg, x in (("k", k), ("v", v)):
        check.tensor(op, arg, x, ndim=3)
        check.same_dtype(op, arg, x, "q", q)
    check.tensor(op, "cu_seqlens", cu_seqlens, (torch.int32,), 1)
    if cu_seqlens.shape[0] == 0:
        raise ValueError(f"{op}: cu_seqlens: got shape (0,), expected (B + 1,)")
    check.shape(op, "k", k, (q.shape[0] if cu_seqlens_k is None else "Tk", "Hk", q.shape[2]))
    check.shape(op, "v", v, (k.shape[0], k.shape[1], "Dv"))
    if cu_seqlens_k is not None:
        check.tensor(op, "cu_seqlens_k", cu_seqlens_k, (torch.int32,))
        check.shape(op, "cu_seqlens_k", cu_seqlens_k, cu_seqlens.shape)
    _heads(op, "k", q.shape[1], k.shape[1], q.shape[2], v.shape[2])
    _sinks(op, sinks, q.shape[1])
    check.same_device(op, q=q, k=k, v=v, cu_seqlens=cu_seqlens, cu_seqlens_k=cu_seqlens_k, sinks=sinks)
    if window is not None and not causal:
        raise ValueError(f"{op}: window: got {window} with causal=False, expected causal=True")
    max_seqlen = _count(op, "max_seqlen", max_seqlen)
    backend = ROOM.resolve(q.device, backend)
    check.served(op, "q", q.dtype, backend)
    block = KEY_BLOCK[backend]
    scale, window, softcap, kv_segment = _options(op, q.shape[2], block, scale, window, softcap, kv_segment)
    options = scale, bool(causal), window, softcap, kv_segment, backend
    return _attention_varlen(q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, sinks, *options)[0]


def attention_paged(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    context_lens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    *,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    kv_segment: int | None = None,
    settled: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Causal attention of the last queries of each sequence to all its keys in a paged cache; whole prefills, chunks
    and single tokens may share a call. No gradients.

    q             (T, Hq, D) bf16 | fp32, the sequences' queries one sequence after another
    k_cache       (pages, page_size, Hk, D) in q.dtype, last dimension contiguous
    v_cache       (pages, page_size, Hk, Dv) likewise
    block_table   (B, P) int32: page j of sequence b holds its keys j * page_size and on; read only as far as needed
    context_lens  (B,) int32: keys of each sequence, this call's tokens included (they are in the cache already)
    cu_seqlens_q  (B + 1,) int32: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b + 1]; from 0 to T
    max_seqlen_q  at least the most queries of a sequence; no effect on bits
    scale, window, softcap, sinks, kv_segment   as in attention_varlen
    settled       a promise about the stream: since all that is read here, but q and the keys and values of q's tokens,
                  was written, a product (`linear`) has been launched. On SM90 few queries then begin with what is there
                  already while the kernel before, rope_kv_store say, still runs. No effect on bits; where the
                  promise is broken, values may be those of before
    returns       (T, Hq, Dv) in q.dtype
    bits          those of attention_varlen for the same sequence, for any page size, page order, chunking and batch
    speed         with backend "cuda" the segments of a sequence that decodes are reduced in parallel: long contexts
                  want kv_segment=1024 or 2048, which costs training next to nothing. Chunks of hundreds of queries take
                  training's kernel, which reads the pages where they lie (page sizes of 8 to 128 that divide 128, and
                  multiples of 128); what lies in a sequence's last page behind its keys has no influence, but should be
                  finite: otherwise a slower kernel makes that call again. Values of 576/512 that are the first columns
                  of their keys (a view of the same cache) are read once. Values out of range on a GPU are not looked at
                  (that would stall the stream); they touch no memory but the arguments'
    grad          none: a RuntimeError where an input requires one in grad mode
    raises        TypeError on dtype, ValueError on shape, values (on CPU) or device, BackendUnavailable
    example
    >>> q, k, v = torch.randn(6, 4, 16), torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    >>> k_cache, v_cache = torch.zeros(5, 4, 2, 16), torch.zeros(5, 4, 2, 16)  # five pages of four tokens
    >>> table = torch.tensor([[3, 1]], dtype=torch.int32)  # keys 0 to 3 in page 3, 4 and 5 in page 1
    >>> vx.kv_cache_store(k, v, k_cache, v_cache, torch.tensor([12, 13, 14, 15, 4, 5]))
    >>> length, one = torch.tensor([6], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
    >>> decoded = vx.attention_paged(q[5:], k_cache, v_cache, table, length, one, max_seqlen_q=1)
    >>> trained = vx.attention_varlen(q, k, v, torch.tensor([0, 6], dtype=torch.int32), max_seqlen=6)
    >>> vx.same_bits(decoded, trained[5:])  # a decode step has the bits of training
    True
    """
    op = "attention_paged"
    if not _paged_fits(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, sinks):
        _check_paged(op, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, sinks)
    max_seqlen_q = _count(op, "max_seqlen_q", max_seqlen_q)
    backend = ROOM.resolve(q.device, backend)
    check.served(op, "q", q.dtype, backend)
    options = _options(op, q.shape[2], KEY_BLOCK[backend], scale, window, softcap, kv_segment)
    if torch.is_grad_enabled():
        for arg, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache), ("sinks", sinks)):
            if x is not None and x.requires_grad:
                raise RuntimeError(
                    f"{op}: {arg} requires a gradient, and this op has none: call it under torch.no_grad(), or use "
                    "attention_varlen to train"
                )
    metadata = block_table, context_lens, cu_seqlens_q, max_seqlen_q
    return _attention_paged(q, k_cache, v_cache, *metadata, sinks, *options, bool(settled), backend)


def _paged_fits(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, sinks) -> bool:
    """Whether _check_paged would find nothing, without its messages: the engine asks at every layer of every step."""
    for x in (q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q):
        if not isinstance(x, Tensor):
            return False
    device, dtype = q.device, q.dtype
    if not (q.dim() == 3 and k_cache.dim() == v_cache.dim() == 4 and block_table.dim() == 2):
        return False
    _, hq, d = q.shape
    *pages, hk, dk = k_cache.shape
    *v_pages, v_hk, dv = v_cache.shape
    return (
        sinks is None
        and dtype in check.FLOATS
        and k_cache.dtype == v_cache.dtype == dtype
        and block_table.dtype == context_lens.dtype == cu_seqlens_q.dtype == torch.int32
        and pages == v_pages
        and pages[1] > 0
        and hk == v_hk > 0
        and hq > 0 == hq % hk
        and dk == d > 0
        and dv > 0
        and k_cache.stride(3) == v_cache.stride(3) == 1
        and context_lens.dim() == cu_seqlens_q.dim() == 1
        and len(block_table) == len(context_lens) == len(cu_seqlens_q) - 1
        and block_table.stride(1) == 1
        and k_cache.device == v_cache.device == block_table.device == device
        and context_lens.device == cu_seqlens_q.device == device
    )


def _check_paged(op, q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, sinks) -> None:
    check.tensor(op, "q", q, check.FLOATS, 3)
    for arg, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        check.tensor(op, arg, x, ndim=4)
        check.same_dtype(op, arg, x, "q", q)
        check.contiguous_last(op, arg, x)
    for arg, x in (("block_table", block_table), ("context_lens", context_lens), ("cu_seqlens_q", cu_seqlens_q)):
        check.tensor(op, arg, x, _INT32)
    pages, page_size, heads, _ = k_cache.shape
    batch = context_lens.shape[0] if context_lens.dim() == 1 else "B"
    check.shape(op, "k_cache", k_cache, (pages, page_size, heads, q.shape[2]))
    check.shape(op, "v_cache", v_cache, (pages, page_size, heads, "Dv"))
    check.shape(op, "context_lens", context_lens, (batch,))
    check.shape(op, "block_table", block_table, (batch, "P"))
    check.contiguous_last(op, "block_table", block_table)
    check.shape(op, "cu_seqlens_q", cu_seqlens_q, (batch + 1,))
    if page_size == 0:
        raise ValueError(f"{op}: k_cache: got shape {tuple(k_cache.shape)}, expected a page_size of at least 1")
    _heads(op, "k_cache", q.shape[1], heads, q.shape[2], v_cache.shape[3])
    _sinks(op, sinks, q.shape[1])
    tensors = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table}
    check.same_device(op, **tensors, context_lens=context_lens, cu_seqlens_q=cu_seqlens_q, sinks=sinks)


def _heads(op: str, arg: str, hq: int, hk: int, d: int, dv: int) -> None:
    if hk == 0 or hq == 0 or hq % hk:
        raise ValueError(f"{op}: {arg}: got {hk} heads for q's {hq}, expected a divisor of {hq}")
    if d == 0 or dv == 0:
        raise ValueError(f"{op}: {arg}: got head dims {d} and {dv}, expected at least 1")


def _sinks(op: str, sinks: Tensor | None, hq: int) -> None:
    if sinks is not None:
        check.tensor(op, "sinks", sinks, check.FLOATS)
        check.shape(op, "sinks", sinks, (hq,))


def _count(op: str, arg: str, value) -> int:
    if isinstance(value, bool) or not isinstance(value, int | torch.SymInt):
        raise TypeError(f"{op}: {arg}: got {type(value).__name__}, expected an int")
    if isinstance(value, int) and value < 0:
        raise ValueError(f"{op}: {arg}: got {value}, expected at least 0")
    return value


def _whole(op: str, arg: str, value) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise TypeError(f"{op}: {arg}: got {type(value).__name__}, expected an int or None")


def check_segment(op: str, kv_segment: int | None, block: int) -> None:
    """kv_segment is None, or a number of keys at which kernels with `block` keys in a block can end a segment."""
    _whole(op, "kv_segment", kv_segment)
    if kv_segment is not None and (kv_segment < block or kv_segment % block):
        raise ValueError(f"{op}: kv_segment: got {kv_segment}, expected None or a multiple of {block}")


def _options(op: str, d: int, block: int, scale, window, softcap, kv_segment):
    find = _find_options if torch.compiler.is_compiling() else _known_options
    return find(op, d, block, scale, window, softcap, kv_segment)


def _find_options(op: str, d: int, block: int, scale, window, softcap, kv_segment):
    scale = d**-0.5 if scale is None else check.number(op, "scale", scale)
    _whole(op, "window", window)
    if window is not None and window < 1:
        raise ValueError(f"{op}: window: got {window}, expected at least 1")
    check_segment(op, kv_segment, block)
    softcap = None if softcap is None else check.number(op, "softcap", softcap, above=0.0)
    return scale, window, softcap, kv_segment


_known_options = functools.lru_cache(maxsize=256, typed=True)(_find_options)  # the engine's layers repeat a few


def _fp32(sinks: Tensor | None) -> Tensor | None:
    return None if sinks is None else sinks.detach().float().contiguous()


def _fwd(q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, sinks, scale, causal, window, softcap, kv_segment, backend):
    offsets = cu_seqlens.contiguous(), None if cu_seqlens_k is None else cu_seqlens_k.contiguous()
    options = scale, causal, window, softcap, kv_segment
    return ROOM.module(backend).varlen_fwd(q, k, v, *offsets, max_seqlen, _fp32(sinks), *options)


def _fwd_fake(q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, sinks, *options):
    return q.new_empty((*q.shape[:2], v.shape[2])), q.new_empty(q.shape[:2], dtype=torch.float32)


def _setup(ctx, inputs, output):
    q, k, v, cu_seqlens, cu_seqlens_k, _, sinks, *ctx.options, _, ctx.backend = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens, cu_seqlens_k, sinks)


def _backward(ctx, dout, _):
    saved = ctx.saved_tensors  # once: under activation checkpointing they cannot be had twice
    dq, dk, dv, dsinks = _attention_varlen_bwd(dout, *saved, *ctx.options, ctx.backend)
    return dq, dk, dv, None, None, None, None if saved[-1] is None else dsinks, *[None] * 6


def _bwd(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, sinks, scale, causal, window, softcap, backend):
    offsets = cu_seqlens.contiguous(), None if cu_seqlens_k is None else cu_seqlens_k.contiguous()
    tensors = dout.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), *offsets, _fp32(sinks)
    dq, dk, dv, dsinks = ROOM.module(backend).varlen_bwd(*tensors, scale, causal, window, softcap)
    return dq, dk, dv, q.new_empty(0) if sinks is None else dsinks.to(sinks.dtype)


def _bwd_fake(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, sinks, *options):
    dsinks = q.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), dsinks


def _paged(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, max_seqlen_q, sinks, *options):
    *options, backend = options
    lens, offsets = context_lens.contiguous(), cu_seqlens_q.contiguous()
    metadata = block_table, lens, offsets, max_seqlen_q
    return ROOM.module(backend).paged_fwd(q, k_cache, v_cache, *metadata, _fp32(sinks), *options)


def _paged_fake(q, k_cache, v_cache, *rest):
    return q.new_empty((*q.shape[:2], v_cache.shape[3]))


_attention_varlen_bwd = Operator(
    "attention_varlen_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens,"
    " Tensor? cu_seqlens_k, Tensor? sinks, float scale, bool causal, int? window, float? softcap, str backend)"
    " -> (Tensor, Tensor, Tensor, Tensor)",
    _bwd,
    _bwd_fake,
)
_attention_varlen = Operator(
    "attention_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor? cu_seqlens_k, SymInt max_seqlen,"
    " Tensor? sinks, float scale, bool causal, int? window, float? softcap, int? kv_segment, str backend)"
    " -> (Tensor, Tensor)",
    _fwd,
    _fwd_fake,
    _setup,
    _backward,
)
_attention_paged = Operator(
    "attention_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens,"
    " Tensor cu_seqlens_q, SymInt max_seqlen_q, Tensor? sinks, float scale, int? window, float? softcap,"
    " int? kv_segment, bool settled, str backend) -> Tensor",
    _paged,
    _paged_fake,
)
