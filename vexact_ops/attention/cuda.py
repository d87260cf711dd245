"""SM90's own class: one order of keys (csrc/attention/flash.cuh), in our CUDA kernels and in flash-attn-4's.
One file because what decides about a call and what is called have to know the same of it.

A case is served in that order on both sides, training and paged, or by the Triton kernels on both sides; which one is a
function of what a case is (`flash`), never of how many rows or keys a call has, nor of what is installed. Within the
order, kernels are exchanged freely: flash-attn-4's takes the long forwards of training and of prefill, with its keys
in pages or not, where it is installed, of the version this was written for, and equal to our kernel byte for byte on
this machine.

Gradients are the trainer's alone, and have two implementations whose bits differ: flash-attn-4's backward in a
repeatable order (cute_backward.py) where it is admitted, else the Triton kernels'.
"""

import functools
import importlib.util
import os
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .._core import digest, gpu, native
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided
from .._core.proof.attention import Pages, attention_inputs, offsets
from .._core.proof.bitwise import count_different
from .._core.proof.inputs import SMALL, special_rows
from .._core.triton import compile_calls
from . import triton
from .op import flash_keys

HEAD_DIMS = {(64, 64), (96, 96), (128, 128), (192, 128), (256, 256), (576, 512)}
WIDENED = {72: 96, 80: 96}  # heads of image encoders, with columns of zeros; they are never paged
LATENT = 576  # such keys hold their values: a kernel of their own, blocks of 64 keys (csrc/attention/flash_latent.cuh)
LONG = 256  # queries, of which each may meet LONG_WORK / queries keys: below, our kernel is as fast as a launch
LONG_WORK = 1 << 20
LONG_CHUNK = 16  # queries of the longest chunk of a paged call; shorter ones stand among single queries
FEW_QUERIES = 16  # of each sequence, as where drafts are verified: a kernel whose tiles hold several of them
FEW_HEAD_DIMS = {(64, 64), (128, 128)}  # that there is such a kernel for
FEW_TILES = 1, 2, 3  # of 16 rows, that it takes at a time (csrc/attention/flash_few.cuh)
MOST_SPLIT = 512  # sequences of a decode step whose segments run in parallel (csrc/attention/flash_decode.cuh)
MOST_PARTIAL = 1 << 26  # fp32 values that the parallel segments of a call may put aside
# kernels, as decisions name them
OURS, FEW, FLASH_LATENT, FLASH_ATTN, TRITON = "flash", "flash, few queries", "flash, latent", "flash-attn-4", "triton"
_LOG2_E = 1.4426950408889634


def flash(q: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, causal: bool = True) -> bool:
    """Whether a case belongs to the flash order."""
    return (
        q.element_size() == 2
        and _head_dims(q, v, causal) in HEAD_DIMS
        and (sinks is None or q.shape[-1] != LATENT)
        and softcap is None
        and scale > 0
        and gpu.sm90(q.device)
    )


def _head_dims(q: Tensor, v: Tensor, causal: bool) -> tuple[int, int]:
    """Those that a kernel computes: a zero more in a score's sum, or in a value, changes nothing of the others."""
    d, dv = q.shape[-1], v.shape[-1]
    return (WIDENED[d], WIDENED[d]) if d == dv and d in WIDENED and not causal else (d, dv)


def _widened(width: int, *tensors: Tensor) -> list[Tensor]:
    return [x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1])) for x in tensors]


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
    kernel = route(Call.forward(q, k, v, max_seqlen, sinks, *options)).chosen.name
    if kernel == TRITON:
        return triton.varlen_fwd(q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, sinks, *options)
    width, wide = v.shape[2], _head_dims(q, v, causal)
    q, k, v = (_aligned(x) for x in (*_widened(wide[0], q, k), *_widened(wide[1], v)))
    out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
    numbers = scale, causal, window, kv_segment, sinks
    if kernel == FLASH_LATENT:
        offsets_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
        numbers = scale, window or 0, kv_segment or 0, causal, _room_to_join(q, kv_segment)
        native.ops().attention_latent_varlen(q, k, v, cu_seqlens, offsets_k, *numbers, out, lse)
    elif kernel == FLASH_ATTN:
        _fast_varlen(q, k, v, cu_seqlens, cu_seqlens_k, *numbers, out, lse)
    else:
        ours(q, k, v, cu_seqlens, cu_seqlens if cu_seqlens_k is None else cu_seqlens_k, *numbers, out, lse)
    return out if width == wide[1] else out[..., :width].contiguous(), lse.view(lse.shape[::-1])


def _fast_varlen(q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window, segment, sinks, out, lse) -> Tensor:
    """flash-attn-4's kernel, and ours where it met what is not finite; it is not 0 in what is returned then."""
    at, at_k, nonfinite = _plan(cu_seqlens, cu_seqlens_k, q.shape[0], k.shape[0])
    numbers = scale, causal, window, segment, sinks, out, lse, nonfinite
    with torch.cuda.device(q.device):
        _cute().forward(q, k, v, at, at_k, *numbers)
    ours(q, k, v, at, at_k, *numbers)  # does nothing but where a value is not finite
    return nonfinite


def _split(q: Tensor, sequences: int, heads_k: int) -> bool:
    """Whether segments should be reduced in parallel. Latent attention has tiles of 64 rows, which are worth splitting
    where whole they would leave multiprocessors idle."""
    if q.shape[2] != LATENT:
        return True
    tiles, count = sequences * heads_k * -(-q.shape[1] // heads_k // 64), gpu.multiprocessors(q.device)
    return tiles < 0.85 * count * -(-tiles // count)


def _room_to_join(q: Tensor, segment: int | None) -> Tensor | None:
    """Where a tile of latent attention puts aside what its segments come to: registers do not hold it."""
    if segment is None:
        return None
    return torch.empty(gpu.multiprocessors(q.device) * 64 * 512, dtype=torch.float32, device=q.device)


def ours(q, k, v, cu_seqlens, cu_seqlens_k, scale, causal, window, segment, sinks, out, lse, wanted=None) -> None:
    """Our kernel: writes out (T, Hq, Dv) and lse (Hq, T), unless wanted (1,) int32 holds 0."""
    options = scale, window or 0, segment or 0, causal
    native.ops().attention_flash_varlen(q, k, v, cu_seqlens, cu_seqlens_k, sinks, *options, wanted, out, lse)


def varlen_bwd(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, sinks, scale, causal, window, softcap):
    args = cu_seqlens, cu_seqlens_k, sinks, scale, causal, window, softcap
    call = Call.backward(q, k, v, sinks, scale, causal, window, softcap)
    if not call.flash:
        return triton.varlen_bwd(dout, q, k, v, out, lse, *args)
    lse = lse.view(lse.shape[::-1])
    if _fast_backward(call):
        widths, wide = (q.shape[2], k.shape[2], v.shape[2]), _head_dims(q, v, causal)
        q, k, v, dout, out = (_aligned(x) for x in (*_widened(wide[0], q, k), *_widened(wide[1], v, dout, out)))
        with torch.cuda.device(q.device):
            at, at_k, _ = _plan(cu_seqlens, cu_seqlens_k, q.shape[0], k.shape[0])
            grads = _cute().backward(dout, q, k, v, out, lse, at, at_k, scale, causal, window)
        grads = (x if x.shape[2] == n else x[..., :n].contiguous() for x, n in zip(grads, widths))
        # a sink is in lse, and so in every probability; it has no value, whose gradient would know of it
        return *grads, None if sinks is None else triton.sinks_bwd(dout, out, _base_2(lse), sinks)
    return triton.varlen_bwd(dout, q, k, v, out, _base_2(lse), *args)


def _base_2(lse: Tensor) -> Tensor:
    """(Hq, T) in natural logarithms, as the Triton kernels have it."""
    return (lse * _LOG2_E).t().contiguous()


def paged_fwd(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, max_seqlen_q, sinks, *options):
    scale, window, softcap, kv_segment, settled = options
    step = block_table, context_lens, cu_seqlens_q, max_seqlen_q
    call = Call.paged(q, k_cache, v_cache, block_table, max_seqlen_q, sinks, scale, window, softcap, kv_segment)
    kernel = route(call).chosen.name
    if kernel == TRITON:
        return triton.paged_fwd(q, k_cache, v_cache, *step, sinks, *options)
    q, k_cache, v_cache = _aligned(q), _aligned(k_cache), _aligned(v_cache)
    dv, capacity = v_cache.shape[3], block_table.shape[1] * k_cache.shape[1]
    out = q.new_empty(*q.shape[:2], dv)
    partial = nonfinite = None
    if kv_segment is not None and kv_segment < capacity:
        sequences = len(context_lens)
        values = sequences * -(-capacity // kv_segment) * q.shape[1] * (dv + 3)
        if sequences <= MOST_SPLIT and values <= MOST_PARTIAL and _split(q, sequences, k_cache.shape[2]):
            partial = torch.empty(values, dtype=torch.float32, device=q.device)
    if kernel == FLASH_LATENT:
        numbers = scale, window or 0, kv_segment or 0, _room_to_join(q, kv_segment)
        native.ops().attention_latent_paged(q, k_cache, v_cache, *step[:3], *numbers, partial, out)
        return out
    if kernel == FLASH_ATTN:
        nonfinite = _fast_prefill(
            q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, scale, window, kv_segment, sinks, out
        )
    if kernel == FEW:
        tiles = few_tiles(q, k_cache, len(context_lens), max_seqlen_q)
        few_paged(q, k_cache, v_cache, *step, scale, window, sinks, out, tiles, settled)
        return out
    # single queries; with nonfinite, the others only where a value is not finite
    ours_paged(q, k_cache, v_cache, *step, scale, window, kv_segment, sinks, out, partial, nonfinite, settled)
    return out


def few_tiles(q: Tensor, k_cache: Tensor, sequences: int, most: int) -> int:
    """How many tiles of 16 rows a thread block should take at a time, where a sequence has up to `most` queries: as few
    as let all run at once, for then none waits for another's sums; where they cannot, as many as may be, for keys and
    values to be read as seldom as may be."""
    heads_k = k_cache.shape[2]
    tiles, top = -(-most * (q.shape[1] // heads_k) // 16), FEW_TILES[-1]
    parts = max(gpu.multiprocessors(q.device) // max(sequences * heads_k, 1), -(-tiles // top), 1)
    return -(-tiles // min(parts, tiles))


def _fast_prefill(
    q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, scale, window, segment, sinks, out
) -> Tensor:  # fmt: skip
    """All but single queries, into out; not 0 in what it returns where a value that is not finite may have spread."""
    count, capacity = len(context_lens), block_table.shape[1] * k_cache.shape[1]
    plan = torch.empty(4 + 3 * count, dtype=torch.int32, device=q.device)
    native.ops().attention_paged_plan(cu_seqlens_q, context_lens, q.shape[0], capacity, plan)
    nonfinite, *step = plan[:1], *plan[4:].view(3, count)
    with torch.cuda.device(q.device):
        _cute().paged_forward(q, k_cache, v_cache, *step, block_table, scale, window, segment, sinks, out, nonfinite)
    return nonfinite


def ours_paged(
    q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, max_seqlen_q, scale, window, segment, sinks, out,
    partial=None, wanted=None, settled=False,
) -> None:  # fmt: skip
    """Our kernels: write out (T, Hq, Dv); rows of sequences with more queries than one only where wanted (1,) int32, if
    it is there, does not hold 0. settled: as attention_paged is asked."""
    step = block_table, context_lens, cu_seqlens_q, max_seqlen_q
    numbers = sinks, scale, window or 0, segment or 0, settled
    native.ops().attention_flash_paged(q, k_cache, v_cache, *step, *numbers, wanted, partial, out)


def few_paged(
    q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, max_seqlen_q, scale, window, sinks, out, tiles,
    settled=False,
) -> None:  # fmt: skip
    """Our kernel for few queries of each sequence, `tiles` tiles of 16 rows at a time: writes out (T, Hq, Dv)."""
    step = block_table, context_lens, cu_seqlens_q, max_seqlen_q
    numbers = sinks, scale, window or 0, settled, tiles
    native.ops().attention_flash_few(q, k_cache, v_cache, *step, *numbers, out)


# --- admission ------------------------------------------------------------------------------------------------------


@functools.cache
def _cute():
    """The module of flash-attn-4's kernels, or None where they are not installed or another version is."""
    if importlib.util.find_spec("flash_attn") is None:
        return None
    try:
        from . import cute
    except ImportError:  # no Triton
        return None
    return None if cute.unavailable() else cute


@functools.cache
def _why_not() -> str:
    if importlib.util.find_spec("flash_attn") is None:
        return "flash-attn-4 is not installed"
    try:
        from . import cute
    except ImportError as error:
        return f"flash-attn-4 cannot be used: {error}"
    return cute.unavailable() or "flash-attn-4 can be used"


class Shape(NamedTuple):
    """What a kernel of flash-attn-4 is compiled for, beside the dtype."""

    group: int  # query heads that share a head of keys
    d: int
    dv: int
    seen: str  # "full", "causal" or "window"
    sinks: bool = False

    @classmethod
    def of(cls, q: Tensor, k: Tensor, v: Tensor, causal: bool, window: int | None, sinks: bool) -> "Shape":
        seen = "window" if window is not None else "causal" if causal else "full"
        return cls(q.shape[1] // k.shape[-2], *_head_dims(q, v, causal), seen, sinks)

    @property
    def causal(self) -> bool:
        return self.seen != "full"

    @property
    def window(self) -> int | None:
        """The one that is verified."""
        return 300 if self.seen == "window" else None

    @property
    def scale(self) -> float:
        return self.d**-0.5


class Call(NamedTuple):
    """What decides which kernel computes a call, from what its operator is given (by name, and more than these).

    part     "forward", "paged" or "backward"
    flash    whether it belongs to the flash order; latent: whether its keys hold their values
    shape    of a case that more than one kernel may compute, else None: decodes ask at every layer
    long     whether flash-attn-4's kernel takes it, and is worth its launch
    few      whether the kernel for few queries of each sequence takes it
    segment  kv_segment; page: keys in one
    """

    part: str
    device: torch.device
    dtype: torch.dtype
    flash: bool
    latent: bool
    shape: Shape | None
    long: bool = True
    few: bool = False
    segment: int | None = None
    page: int = 0

    @classmethod
    def forward(cls, q, k, v, max_seqlen, sinks, scale, causal, window, softcap, kv_segment, **_) -> "Call":
        ours, long = flash(q, v, sinks, scale, softcap, causal), _is_long(q, max_seqlen) and k.shape[0] > 0
        shape = Shape.of(q, k, v, causal, window, sinks is not None) if ours and long else None
        return cls("forward", q.device, q.dtype, ours, q.shape[2] == LATENT, shape, long, segment=kv_segment)

    @classmethod
    def paged(
        cls, q, k_cache, v_cache, block_table, max_seqlen_q, sinks, scale, window, softcap, kv_segment, **_
    ) -> "Call":  # fmt: skip
        ours, latent, shape = flash(q, v_cache, sinks, scale, softcap), q.shape[2] == LATENT, None
        pages, page = k_cache.shape[:2]
        long = max_seqlen_q >= LONG_CHUNK and _is_long(q, block_table.shape[1] * page) and pages > 0
        if long and ours:
            shape = Shape.of(q, k_cache, v_cache, True, window, sinks is not None)
            long = block_table.stride(1) == 1 and _pages_fit(shape, page)
        few = 1 < max_seqlen_q <= FEW_QUERIES and not long and ours and pages > 0 and kv_segment is None
        if few and (few := (q.shape[2], v_cache.shape[3]) in FEW_HEAD_DIMS and _boxes_fit(q.shape[2], page)):
            shape = Shape.of(q, k_cache, v_cache, True, window, sinks is not None)
        return cls("paged", q.device, q.dtype, ours, latent, shape, long, few, kv_segment, page)

    @classmethod
    def backward(cls, q, k, v, sinks, scale, causal, window, softcap, **_) -> "Call":
        ours = flash(q, v, sinks, scale, softcap, causal)
        shape = Shape.of(q, k, v, causal, window, sinks is not None)
        return cls("backward", q.device, q.dtype, ours, q.shape[2] == LATENT, shape)


def route(call: Call) -> Decision:
    """Which kernel computes a call: dispatch takes it, `explain` shows it, `admit` asks for it ahead of time."""
    part, device, dtype, ours, latent, shape, long, few, segment, page = call
    if not ours:
        return canonical_by_rule(TRITON, "not a case of the flash order (see attention_varlen)")
    if part == "backward":
        if latent:
            return canonical_by_rule(TRITON, "the one backward of latent attention")
        return canonical_by_rule(TRITON, _why_not()) if _cute() is None else _backward(device, dtype, shape)
    if latent:
        return canonical_by_rule(FLASH_LATENT, "the one kernel of latent attention")
    if few:
        return _few(device, dtype, shape, page)
    if not long:
        return canonical_by_rule(OURS, _SHORT[part])
    if _cute() is None:
        return canonical_by_rule(OURS, _why_not())
    return _forward(device, dtype, shape, segment) if part == "forward" else _paged(device, dtype, shape, segment, page)


_SHORT = {
    "forward": "few queries or keys: as fast as a launch",
    "paged": "single queries, few of them, or pages that fill no block",
}


def _boxes_fit(d: int, page: int) -> bool:
    """Whether pages fill blocks of keys, or blocks pages."""
    keys = flash_keys(d)
    return page % keys == 0 or (keys % page == 0 and page >= 8)


def _pages_fit(shape: Shape, page: int) -> bool:
    rows = 192 if shape.d <= 96 else 128  # of a tile: of all heads that share keys
    return _boxes_fit(shape.d, page) and rows % shape.group == 0


def _fast_backward(call: Call) -> bool:
    decision = route(call)
    proposed = not call.latent and _cute() is not None and os.environ.get("VEXACT_ADMIT") != "0"
    if proposed and not decision.verdicts:  # the Triton kernels' bits are others
        raise RuntimeError(
            f"attention_varlen: this backward has not been verified yet ({decision.why}): call it once before, outside "
            "of a CUDA graph"
        )
    return decision.chosen.name == FLASH_ATTN


def _key(what: str, dtype: torch.dtype, shape: Shape, more: str = "") -> str:
    name = f"attention_{what} {str(dtype).removeprefix('torch.')} Hq/Hk={shape.group} D={shape.d},{shape.dv}"
    return f"{name} {shape.seen}{' sinks' * shape.sinks} {more}".rstrip()


def _source() -> str:
    return digest.of_files(__file__, native=digest.of_extension("attention", "cuda"))


@decided
def _forward(device: torch.device, dtype: torch.dtype, shape: Shape, segment: int | None) -> Proposal:
    def run(kernel):
        def call(q, k, v, cu, sinks, finite):
            out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
            lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
            met = kernel(q, k, v, cu, cu, shape.scale, shape.causal, shape.window, segment, sinks, out, lse)
            if finite and met is not None and met.item():
                raise RuntimeError("it met what is not finite where all is")
            return out, lse

        return call

    return Proposal(
        _key("fwd", dtype, shape, f"segment={segment}"),
        [Candidate(FLASH_ATTN, run(_fast_varlen), f"{_cute().versions()} {_source()}")],
        Candidate(OURS, run(ours), _source()),
        functools.partial(_forward_cases, device, dtype, shape, segment),
        ahead=False,
    )


def _forward_cases(device, dtype, shape: Shape, segment: int | None) -> list[tuple]:
    return [
        (
            *_inputs(device, dtype, shape, lengths, special), offsets(lengths, device),
            _sinks(device, shape, special == "all"), special != "all",
        )
        for lengths, special in _lengths(segment)
    ]  # fmt: skip


def _sinks(device: torch.device, shape: Shape, special: bool) -> Tensor | None:
    """Of two heads of keys: below, about and far above the scores; special: with such as are not finite."""
    if not shape.sinks:
        return None
    sinks = torch.linspace(-3, 40, 2 * shape.group, dtype=torch.float32, device=device)
    if special:
        for i, value in enumerate((-torch.inf, torch.nan, torch.inf)):
            sinks[i % len(sinks)] = value
    return sinks


def _lengths(segment: int | None) -> list[tuple[list[int], str]]:
    """Lengths of sequences, and which special rows are among their queries, keys and values."""
    return [
        ([1, 700, 130, 1300, 64], ""),
        ([(segment or 512) * 2 + 77], ""),
        ([33, 1, 301], "small"),
        ([200, 1, 129], "all"),
    ]


def _inputs(device, dtype, shape: Shape, lengths: list[int], special: str) -> tuple[Tensor, Tensor, Tensor]:
    """Special ones lie in one tensor, as where a product makes queries, keys and values."""
    heads = shape.group * 2, 2, shape.d, shape.dv
    q, k, v = attention_inputs(lengths, *heads, seed=len(lengths), dtype=torch.float32, device=device)
    if dtype == torch.float16:
        v = v.clamp(-64, 64)
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if special == "small":
        q, k, v = (special_rows(x, kinds=SMALL) for x in (q, k, v))
        first = slice(lengths[0])  # a sequence of nothing but small values, whose sums are as small
        v[first] = special_rows(v[first], first=1, kinds=SMALL)
    elif special:
        q, k, v = special_rows(q), _sparsely_special(k, 1), _sparsely_special(v, 2)
    if special:
        sizes = [x[0].numel() for x in (q, k, v)]
        parts = torch.cat([x.flatten(1) for x in (q, k, v)], 1).split(sizes, 1)
        q, k, v = (part.unflatten(1, x.shape[1:]) for part, x in zip(parts, (q, k, v)))
    return q, k, v


def _sparsely_special(x: Tensor, seed: int) -> Tensor:
    """Late ones, for what comes before to stay ordinary: a key that is NaN makes NaN of every row that sees it."""
    x = x.clone()
    x[seed + 60 :: 24] = special_rows(x[seed + 60 :: 24], seed=seed)
    return x


@decided
def _paged(device: torch.device, dtype: torch.dtype, shape: Shape, segment: int | None, page: int) -> Proposal:
    def run(fast):
        def call(q, k, v, table, lens, cu, sinks, finite):
            out = torch.empty(*q.shape[:2], v.shape[3], dtype=q.dtype, device=q.device)
            options = shape.scale, shape.window, segment, sinks
            nonfinite = _fast_prefill(q, k, v, table, lens, cu, *options, out) if fast else None
            if finite and nonfinite is not None and nonfinite.item():
                raise RuntimeError("it met what is not finite where all is")
            ours_paged(q, k, v, table, lens, cu, q.shape[0], *options, out, None, nonfinite)
            return out

        return call

    return Proposal(
        _key("paged", dtype, shape, f"segment={segment} page={page}"),
        [Candidate(FLASH_ATTN, run(True), f"{_cute().versions()} {_source()}")],
        Candidate(OURS, run(False), _source()),
        functools.partial(_paged_cases, device, dtype, shape, segment, page),
        ahead=False,
    )


def _paged_cases(device, dtype, shape: Shape, segment: int | None, page: int) -> list[tuple]:
    """Chunks at the end of what is cached, with a single query between them, as a full table and as a short one."""
    cases = []
    for (lengths, special), chunk in zip(_lengths(segment), (150, 1 << 30, 40, 150)):
        q, k, v = (x.contiguous() for x in _inputs(device, dtype, shape, lengths, special))
        counts = [1 if length == 130 else min(length, chunk) for length in lengths]
        sinks = _sinks(device, shape, special == "all")
        cases.append((*_ends(q, k, v, lengths, counts, page), sinks, special != "all"))
    return cases


def _ends(q: Tensor, k: Tensor, v: Tensor, lengths: list[int], counts: list[int], page: int) -> tuple:
    """The last queries of sequences, and what is cached of these."""
    device, ends = q.device, offsets(lengths, "cpu").tolist()[1:]
    rows = [torch.arange(end - count, end, device=device) for end, count in zip(ends, counts)]
    pages = Pages.of(k, v, lengths, page, seed=1)
    for cache in (pages.k_cache, pages.v_cache):
        cache.fill_(3.0)  # finite, where no key is
    pages.put(k, v)
    lens = torch.tensor(lengths, dtype=torch.int32, device=device)
    return q[torch.cat(rows)], pages.k_cache, pages.v_cache, pages.block_table, lens, offsets(counts, device)


@decided
def _few(device: torch.device, dtype: torch.dtype, shape: Shape, page: int) -> Proposal:
    def canonical(q, k, v, table, lens, cu, sinks):
        out = torch.empty(*q.shape[:2], v.shape[3], dtype=q.dtype, device=q.device)
        ours_paged(q, k, v, table, lens, cu, FEW_QUERIES, shape.scale, shape.window, None, sinks, out)
        return [out] * len(FEW_TILES)

    def few(q, k, v, table, lens, cu, sinks):  # which of them serves a call is a matter of its size
        outs = [torch.empty(*q.shape[:2], v.shape[3], dtype=q.dtype, device=q.device) for _ in FEW_TILES]
        for tiles, out in zip(FEW_TILES, outs):
            few_paged(q, k, v, table, lens, cu, FEW_QUERIES, shape.scale, shape.window, sinks, out, tiles)
        return outs

    return Proposal(
        _key("paged few", dtype, shape, f"page={page}"),
        [Candidate(FEW, few, _source())],
        Candidate(OURS, canonical, _source()),
        functools.partial(_few_cases, device, dtype, shape, page),
        ahead=False,
    )


def _few_cases(device, dtype, shape: Shape, page: int) -> list[tuple]:
    """Ends of sequences, of one query up to as many as there may be: within a block of keys and across two, and with
    values that are not finite between those that all queries see and those that none does."""
    cases = []
    for lengths, special in (
        ([1, 700, 130, 1300, 64, 9], ""),
        ([33, 1, 301, 135], "small"),
        ([90, 1, 120, 260], "all"),
    ):
        q, k, v = (x.contiguous() for x in _inputs(device, dtype, shape, lengths, special))
        for first in range(0, FEW_QUERIES, 5 if special else 3):
            counts = [min(length, (first + 7 * i) % FEW_QUERIES + 1) for i, length in enumerate(lengths)]
            cases.append((*_ends(q, k, v, lengths, counts, page), _sinks(device, shape, special == "all")))
    return cases


@decided
def _backward(device: torch.device, dtype: torch.dtype, shape: Shape) -> Proposal:
    """No other kernel has these bits, so what is verified is the promise: a sequence packed with others has the
    gradients that it has alone, and again when it is done again; and they are those of the Triton kernels but for
    rounding. Refused, the Triton kernels serve."""
    cute = _cute()

    def inputs(q, k, v, lengths):
        cu = offsets(lengths, q.device)
        out = torch.empty(*q.shape[:2], v.shape[2], dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[1], q.shape[0], dtype=torch.float32, device=q.device)
        ours(q, k, v, cu, cu, shape.scale, shape.causal, shape.window, None, _sinks(q.device, shape, False), out, lse)
        weight = torch.cos(torch.arange(out[0].numel(), dtype=torch.float32, device=q.device)).view(out.shape[1:])
        options = shape.scale, shape.causal, shape.window
        return (weight.to(q.dtype).expand_as(out).contiguous(), q, k, v, out), lse, (cu, cu), options

    def whole(q, k, v, lengths):
        tensors, lse, cu, options = inputs(q, k, v, lengths)
        return cute.backward(*tensors, lse, *cu, *options)

    def alone(q, k, v, lengths):
        parts = [
            whole(*(x.contiguous() for x in part), [len(part[0])])
            for part in zip(*(x.split(lengths) for x in (q, k, v)))
        ]
        return [torch.cat(x) for x in zip(*parts)]

    def checked(q, k, v, lengths):
        found = whole(q, k, v, lengths)
        if any(count_different(a, b) for a, b in zip(found, whole(q, k, v, lengths))):
            raise RuntimeError("not repeatable")
        tensors, lse, cu, (scale, causal, window) = inputs(q, k, v, lengths)
        lse_2 = (lse * _LOG2_E).t().contiguous()
        theirs = *tensors, lse_2, *cu, None, scale, causal, window, None
        compile_calls(triton.varlen_bwd, [theirs], q.device)  # side by side: one by one it is seconds
        expected = triton.varlen_bwd(*theirs)[:3]
        got, want = (torch.cat([x.float().flatten() for x in grads]) for grads in (found, expected))
        error = ((got - want).norm() / want.norm()).item()
        if not error < 0.02:
            raise RuntimeError(f"far from the Triton kernels: {error:.3g}")
        return list(found)

    return Proposal(
        _key("bwd", dtype, shape),
        [Candidate(FLASH_ATTN, checked, f"{cute.versions()} {_source()}")],
        Candidate(TRITON, alone, f"{cute.versions()} {_source()} {digest.canonical('attention')}"),
        functools.partial(_backward_cases, device, dtype, shape),
        ahead=False,
    )


def _backward_cases(device, dtype, shape: Shape) -> list[tuple]:
    lengths = [700, 1, 130, 1300, 64]
    g = torch.Generator(device).manual_seed(1)
    rows = sum(lengths)
    shapes = (rows, 2 * shape.group, shape.d), (rows, 2, shape.d), (rows, 2, shape.dv)
    q, k, v = (torch.randn(s, dtype=torch.float32, generator=g, device=device).to(dtype) for s in shapes)
    small = (special_rows(x, first=i, kinds=SMALL) for i, x in enumerate((q, k, v)))
    return [(q, k, v, lengths), (*small, lengths)]


def admit(
    heads: int, heads_k: int, d: int, dv: int, dtype: torch.dtype, device: torch.device, *, causal: bool = True,
    windows: Sequence[int | None] = (None,), segment: int | None = None, page: int | None = 16, training: bool = False,
    sinks: bool = False,
) -> list[Decision]:  # fmt: skip
    """Verify ahead of time what layers of these heads need: training's forward, chunks in pages of this size (None:
    there are none), and gradients."""
    device = gpu.with_index(device)
    q, k, v = (torch.empty(1, *s, dtype=dtype, device=device) for s in ((heads, d), (heads_k, d), (heads_k, dv)))
    found = []
    for window in windows:
        shape = Shape.of(q, k, v, causal, window, sinks)
        ours = flash(q, v, q if sinks else None, d**-0.5, None, causal)
        call = Call("forward", device, dtype, ours, d == LATENT, shape, segment=segment)
        found.append(route(call))
        if page is not None and _pages_fit(shape, page):
            found.append(route(call._replace(part="paged", page=page)))
        if page is not None and ours and segment is None and (d, dv) in FEW_HEAD_DIMS and _boxes_fit(d, page):
            found.append(route(call._replace(part="paged", few=True, page=page)))
        if training:
            found += [decision for _, decision in _parts(call._replace(part="backward"))]
    return found


def explain(op: str, **given) -> list[tuple[str, Decision]]:
    """Which kernel computes a call, of an operator's arguments by name."""
    makers = {
        "attention_varlen": Call.forward,
        "attention_varlen_bwd": Call.backward,
        "attention_paged": Call.paged,
    }
    return _parts(makers[op](**given))


def _parts(call: Call) -> list[tuple[str, Decision]]:
    """A call's kernels; of flash-attn-4's backward also what goes before it."""
    found = [(call.part, route(call))]
    if call.part == "backward" and found[0][1].chosen.name == FLASH_ATTN and call.shape.window is None:
        shape = call.shape
        before = _cute().cute_backward.prepared_by(call.device, call.dtype, shape.d, shape.dv, shape.causal)
        found.append(("sums of rows before it", before))
    return found
