"""SM90's own class: one order of keys (csrc/attention/flash.cuh), in our CUDA kernels and in flash-attn-4's.

A case is served in that order on both sides, training and paged, or by the Triton kernels on both sides; which one is a
function of what a case is (`flash`), never of how many rows or keys a call has, nor of what is installed. Within the
order, kernels are exchanged freely: flash-attn-4's takes the long forwards of training and of prefill, with its keys
in pages or not, where it is installed, of the version this was written for, and equal to our kernel byte for byte on
this machine.

Gradients are the trainer's alone, and have two implementations whose bits differ: flash-attn-4's repeatable backward
where it is admitted, else the Triton kernels'.
"""

import functools
import importlib.util

import torch
from torch import Tensor

from .._core import native
from .._core.admit import Candidate, admissions
from .._core.proof.attention import Pages, attention_inputs, offsets
from .._core.proof.bitwise import count_different
from . import triton

HEAD_DIMS = {(64, 64), (96, 96), (128, 128), (192, 128), (576, 512)}
LATENT = 576  # such keys hold their values: a kernel of their own, blocks of 64 keys (csrc/attention/flash_latent.cuh)
LONG = 256  # queries, of which each may meet LONG_WORK / queries keys: below, our kernel is as fast as a launch
LONG_WORK = 1 << 20
LONG_CHUNK = 16  # queries of the longest chunk of a paged call; shorter ones stand among single queries
MOST_SPLIT = 512  # sequences of a decode step whose segments run in parallel (csrc/attention/flash_decode.cuh)
MOST_PARTIAL = 1 << 26  # fp32 values that the parallel segments of a call may put aside
_LOG2_E = 1.4426950408889634
_admitted: dict[tuple, bool] = {}


@functools.cache
def _sm90(index: int) -> bool:
    return torch.cuda.get_device_capability(index) == (9, 0)


def flash(q: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None) -> bool:
    """Whether a case belongs to the flash order."""
    return (
        q.element_size() == 2
        and (q.shape[-1], v.shape[-1]) in HEAD_DIMS
        and sinks is None
        and softcap is None
        and scale > 0
        and _sm90(q.device.index)
    )


def _aligned(x: Tensor) -> Tensor:
    """Rows on 16-byte boundaries, the last dimension contiguous, nothing broadcast; a copy where they are not."""
    fits = x.stride(-1) == 1 and x.data_ptr() % 16 == 0
    if fits and all(s > 0 and s % 8 == 0 for s in x.stride()[:-1]):
        return x
    return x.clone(memory_format=torch.contiguous_format)


def _plan(cu_seqlens: Tensor, cu_seqlens_k: Tensor | None, tokens: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Offsets that flash-attn-4 can follow without leaving its tensors, unchanged where they are in order; and a 0, for
    it to note in where it meets what is not finite."""
    count = cu_seqlens.shape[0]
    size = 4 + (1 if cu_seqlens_k is None else 2) * count
    plan = torch.empty(size, dtype=torch.int32, device=cu_seqlens.device)
    native.ops().attention_packed_plan(cu_seqlens, cu_seqlens_k, tokens, keys, plan)
    at = plan[4 : 4 + count]
    return at, at if cu_seqlens_k is None else plan[4 + count :], plan[:1]


def _is_long(q: Tensor, keys: int) -> bool:
    return q.shape[0] >= LONG and q.shape[0] * keys >= LONG_WORK


def varlen_fwd(q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, sinks, scale, causal, window, softcap, kv_segment):
    """As in triton.py, but for lse in flash's cases: (Hq, T) in memory, and in natural logarithms."""
    options = scale, causal, window, softcap, kv_segment
    if not flash(q, v, sinks, scale, softcap):
        return triton.varlen_fwd(q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, sinks, *options)
    q, k, v = _aligned(q), _aligned(k), _aligned(v)
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    numbers = scale, causal, window, kv_segment
    if q.shape[2] == LATENT:
        offsets_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        options = scale, window or 0, kv_segment or 0, causal, _room_to_join(q, kv_segment)
        native.ops().attention_latent_varlen(q, k, v, cu_seqlens, offsets_k, *options, out, lse)
    elif _is_long(q, max_seqlen) and k.shape[0] and _fast_forward(q, k, v, causal, window, kv_segment):
        at, at_k, odd = _plan(cu_seqlens, cu_seqlens_k, q.shape[0], k.shape[0])
        with torch.cuda.device(q.device):
            _cute().forward(q, k, v, at, at_k, *numbers, out, lse, odd)
        ours(q, k, v, at, at_k, *numbers, out, lse, odd)  # does nothing but where a value is not finite
    else:
        ours(q, k, v, cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, *numbers, out, lse)
    return out, lse.view(lse.shape[::-1])


@functools.cache
def _multiprocessors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


def _split(q: Tensor, sequences: int, heads_k: int) -> bool:
    """Whether segments should be reduced in parallel. Latent attention has tiles of 64 rows, which are worth splitting
    where whole they would leave multiprocessors idle."""
    if q.shape[2] != LATENT:
        return True
    tiles, count = sequences * heads_k * -(-q.shape[1] // heads_k // 64), _multiprocessors(q.device.index)
    return tiles < 0.85 * count * -(-tiles // count)


def _room_to_join(q: Tensor, segment: int | None) -> Tensor | None:
    """Where a tile of latent attention puts aside what its segments come to: registers do not hold it."""
    if segment is None:
        return None
    return torch.empty(_multiprocessors(q.device.index) * 64 * 512, dtype=torch.float32, device=q.device)


def ours(q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window, segment, out, lse, wanted=None) -> None:
    """Our kernel: writes out (T, Hq, Dv) and lse (Hq, T), unless wanted (1,) int32 holds 0."""
    options = scale, window or 0, segment or 0, causal
    native.ops().attention_flash_varlen(q, k, v, cu_seqlens, cu_seqlens_k, *options, wanted, out, lse)


def varlen_bwd(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, sinks, scale, causal, window, softcap):
    args = cu_seqlens, cu_seqlens_k, sinks, scale, causal, window, softcap
    if not flash(q, v, sinks, scale, softcap):
        return triton.varlen_bwd(dout, q, k, v, out, lse, *args)
    lse = lse.view(lse.shape[::-1])
    if q.shape[2] != LATENT and _fast_backward(q, k, v, causal, window):
        q, k, v, dout, out = (_aligned(x) for x in (q, k, v, dout, out))
        with torch.cuda.device(q.device):
            at, at_k, _ = _plan(cu_seqlens, cu_seqlens_k, q.shape[0], k.shape[0])
            grads = _cute().backward(dout, q, k, v, out, lse, at, at_k, scale, causal, window)
        return *grads, None
    return triton.varlen_bwd(dout, q, k, v, out, (lse * _LOG2_E).t().contiguous(), *args)


def paged_fwd(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, max_seqlen_q, sinks, *options):
    scale, window, softcap, kv_segment = options
    step = block_table, context_lens, cu_seqlens_q, max_seqlen_q
    if not flash(q, v_cache, sinks, scale, softcap):
        return triton.paged_fwd(q, k_cache, v_cache, *step, sinks, *options)
    q, k_cache, v_cache = _aligned(q), _aligned(k_cache), _aligned(v_cache)
    dv, capacity = v_cache.shape[3], block_table.shape[1] * k_cache.shape[1]
    out = torch.empty(*q.shape[:2], dv, dtype=q.dtype, device=q.device)
    partial = odd = None
    if kv_segment is not None and kv_segment < capacity:
        sequences = len(context_lens)
        values = sequences * -(-capacity // kv_segment) * q.shape[1] * (dv + 2)
        if sequences <= MOST_SPLIT and values <= MOST_PARTIAL and _split(q, sequences, k_cache.shape[2]):
            partial = torch.empty(values, dtype=torch.float32, device=q.device)
    if q.shape[2] == LATENT:
        numbers = scale, window or 0, kv_segment or 0, _room_to_join(q, kv_segment)
        native.ops().attention_latent_paged(q, k_cache, v_cache, *step[:3], *numbers, partial, out)
        return out
    long = _is_long(q, capacity) and max_seqlen_q >= LONG_CHUNK and block_table.stride(1) == 1
    if long and _fast_paged(q, k_cache, v_cache, capacity, window, kv_segment):
        odd = _fast_prefill(
            q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, scale, window, kv_segment, out
        )
    # single queries; with odd, the others only where a value is not finite
    ours_paged(q, k_cache, v_cache, *step, scale, window, kv_segment, out, partial, odd)
    return out


def _fast_prefill(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, scale, window, segment, out) -> Tensor:
    """All but single queries, into out; not 0 in what it returns where a value that is not finite may have spread."""
    count, capacity = len(context_lens), block_table.shape[1] * k_cache.shape[1]
    plan = torch.empty(4 + 3 * count, dtype=torch.int32, device=q.device)
    native.ops().attention_paged_plan(cu_seqlens_q, context_lens, q.shape[0], capacity, plan)
    odd, *step = plan[:1], *plan[4:].view(3, count)
    with torch.cuda.device(q.device):
        _cute().paged_forward(q, k_cache, v_cache, *step, block_table, scale, window, segment, out, odd)
    return odd


def ours_paged(
    q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, max_seqlen_q, scale, window, segment, out,
    partial=None, wanted=None,
) -> None:  # fmt: skip
    """Our kernels: write out (T, Hq, Dv); rows of sequences with more queries than one only where wanted (1,) int32, if
    it is there, does not hold 0."""
    step = block_table, context_lens, cu_seqlens_q, max_seqlen_q
    numbers = scale, window or 0, segment or 0
    native.ops().attention_flash_paged(q, k_cache, v_cache, *step, *numbers, wanted, partial, out)


# --- admission ------------------------------------------------------------------------------------------------------


@functools.cache
def _cute():
    """The module of flash-attn-4's kernels, or None where they are not installed or another version is."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from . import cute
    except ImportError:  # an older flash-attn, or one without what it is compiled with
        return None
    return None if cute.unavailable() else cute


def _name(what: str, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> str:
    seen = "window" if window is not None else "causal" if causal else "full"
    dtype = str(q.dtype).removeprefix("torch.")
    return f"attention_{what} {dtype} Hq/Hk={q.shape[1] // k.shape[1]} D={q.shape[2]},{v.shape[2]} {seen}"


def _fast_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, segment: int | None) -> bool:
    key = "fwd", q.device, q.dtype, q.shape[1] // k.shape[1], q.shape[2], v.shape[2], causal, window is None, segment
    if key not in _admitted:
        if torch.cuda.is_current_stream_capturing():
            return False  # nothing can be verified inside a graph; our kernel has the same bits
        cute = _cute()
        _admitted[key] = cute is not None and _admit_forward(cute, q, k, v, causal, window, segment)
    return _admitted[key]


def _cases(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> list[tuple[Tensor, ...]]:
    heads = q.shape[1] // k.shape[1] * 2, 2, q.shape[2], v.shape[2]
    q2, k2, v2 = attention_inputs(lengths, *heads, seed=len(lengths), dtype=torch.float32, device=q.device)
    if q.dtype == torch.float16:
        v2 = v2.clamp(-64, 64)
    return [tuple(x.to(q.dtype) for x in (q2, k2, v2))]


def _admit_forward(cute, q, k, v, causal, window, segment) -> bool:
    window = None if window is None else 300

    def cases():
        found = []
        for lengths in ([1, 700, 130, 1300, 64], [(segment or 512) * 2 + 77]):
            for case in _cases(q, k, v, lengths):
                found.append((*case, offsets(lengths, q.device)))
        return found

    def run(kernel):
        def call(q, k, v, cu):
            out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
            lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
            kernel(q, k, v, cu, cu, q.shape[2] ** -0.5, causal, window, segment, out, lse)
            return torch.cat([out.float().flatten(), lse.flatten()])

        return call

    def theirs(*args):
        cute.forward(*args, torch.zeros(1, dtype=torch.int32, device=q.device))

    name = f"{_name('fwd', q, k, v, causal, window)} segment={segment}"
    with torch.cuda.device(q.device):
        candidate = Candidate(cute.versions(), run(theirs))
        return admissions(q.device.index).choose(name, [candidate], run(ours), cases) is not None


def _fast_paged(q: Tensor, k: Tensor, v: Tensor, capacity: int, window: int | None, segment: int | None) -> bool:
    page, group = k.shape[1], q.shape[1] // k.shape[2]
    boxes = page % 128 == 0 or (128 % page == 0 and page >= 8)  # that fill a block
    whole = (192 if q.shape[2] <= 96 else 128) % group == 0  # tiles of all heads that share keys
    if not (boxes and whole and capacity and k.shape[0]):
        return False
    key = "paged", q.device, q.dtype, group, q.shape[2], v.shape[3], window is None, segment, page
    if key not in _admitted:
        if torch.cuda.is_current_stream_capturing():
            return False  # as in _fast_forward
        cute = _cute()
        _admitted[key] = cute is not None and _admit_paged(cute, q, k, v, window, segment)
    return _admitted[key]


def _admit_paged(cute, q, k, v, window, segment) -> bool:
    """Chunks at the end of what is cached, with a single query between them, as a full table and as a short one."""
    window = None if window is None else 300
    page = k.shape[1]

    def cases():
        found = []
        for lengths, chunk in (([1, 700, 130, 1300, 64], 150), ([(segment or 512) * 2 + 77], 1 << 30)):
            for q2, k2, v2 in _cases(q, k[0], v[0], lengths):
                counts = [1 if length == 130 else min(length, chunk) for length in lengths]
                ends = offsets(lengths, q.device).tolist()[1:]
                rows = [torch.arange(end - count, end, device=q.device) for end, count in zip(ends, counts)]
                pages = Pages.of(k2, v2, lengths, page, seed=1).put(k2, v2)
                lens = torch.tensor(lengths, dtype=torch.int32, device=q.device)
                caches = *(x.nan_to_num(nan=3.0) for x in (pages.k_cache, pages.v_cache)), pages.block_table
                found.append((q2[torch.cat(rows)], *caches, lens, offsets(counts, q.device)))
        return found

    def run(fast):
        def call(q, k, v, table, lens, cu):
            out = torch.empty(*q.shape[:2], v.shape[3], dtype=q.dtype, device=q.device)
            options = q.shape[2] ** -0.5, window, segment
            odd = _fast_prefill(q, k, v, table, lens, cu, *options, out) if fast else None
            if odd is not None and odd.item():
                raise RuntimeError("it met what is not finite where all is")
            ours_paged(q, k, v, table, lens, cu, q.shape[0], *options, out, None, odd)
            return out

        return call

    name = f"{_name('paged', q, k[0], v[0], True, window)} segment={segment} page={page}"
    with torch.cuda.device(q.device):
        candidate = Candidate(cute.versions(), run(True))
        return admissions(q.device.index).choose(name, [candidate], run(False), cases) is not None


def _fast_backward(q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None) -> bool:
    key = "bwd", q.device, q.dtype, q.shape[1] // k.shape[1], q.shape[2], v.shape[2], causal, window is None
    if key not in _admitted:
        cute = _cute()
        if cute is not None and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "attention_varlen: this backward has not been verified yet, and nothing can be inside a CUDA graph: "
                "call it once before"
            )
        _admitted[key] = cute is not None and _admit_backward(cute, q, k, v, causal, window)
    return _admitted[key]


def _admit_backward(cute, q, k, v, causal, window) -> bool:
    """No other kernel has these bits, so what is verified is the promise: a sequence packed with others has the
    gradients that it has alone, and again when it is done again; and they are those of the Triton kernels but for
    rounding."""
    window = None if window is None else 300
    lengths = [700, 1, 130, 1300, 64]

    def inputs(q, k, v, lengths):
        cu = offsets(lengths, q.device)
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        scale = q.shape[2] ** -0.5
        ours(q, k, v, cu, cu, scale, causal, window, None, out, lse)
        weight = torch.cos(torch.arange(out[0].numel(), dtype=torch.float32, device=q.device)).view(out.shape[1:])
        return (weight.to(q.dtype).expand_as(out).contiguous(), q, k, v, out), lse, (cu, cu), (scale, causal, window)

    def whole(q, k, v):
        tensors, lse, cu, options = inputs(q, k, v, lengths)
        return torch.cat([x.flatten() for x in cute.backward(*tensors, lse, *cu, *options)])

    def alone(q, k, v):
        parts = []
        for part in zip(*(x.split(lengths) for x in (q, k, v))):
            tensors, lse, cu, options = inputs(*(x.contiguous() for x in part), [len(part[0])])
            parts.append(cute.backward(*tensors, lse, *cu, *options))
        return torch.cat([torch.cat(x).flatten() for x in zip(*parts)])

    def checked(q, k, v):
        found = whole(q, k, v)
        if count_different(found, whole(q, k, v)):
            raise RuntimeError("not repeatable")
        tensors, lse, cu, (scale, causal, window) = inputs(q, k, v, lengths)
        lse_2 = (lse * _LOG2_E).t().contiguous()
        expected = triton.varlen_bwd(*tensors, lse_2, *cu, None, scale, causal, window, None)[:3]
        expected = torch.cat([x.flatten() for x in expected]).float()
        error = ((found.float() - expected).norm() / expected.norm()).item()
        if not error < 0.02:
            raise RuntimeError(f"far from the Triton kernels: {error:.3g}")
        return found

    with torch.cuda.device(q.device):
        name = _name("bwd", q, k, v, causal, window)
        candidate = Candidate(cute.versions(), checked)
        generator = functools.partial(_plain, q, k, v, lengths)
        return admissions(q.device.index).choose(name, [candidate], alone, generator) is not None


def _plain(q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> list[tuple[Tensor, ...]]:
    g = torch.Generator(q.device).manual_seed(1)
    group, rows = q.shape[1] // k.shape[1], sum(lengths)
    shapes = (rows, 2 * group, q.shape[2]), (rows, 2, q.shape[2]), (rows, 2, v.shape[2])
    return [tuple(torch.randn(s, dtype=torch.float32, generator=g, device=q.device).to(q.dtype) for s in shapes)]
