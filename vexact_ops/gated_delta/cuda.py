"""The GPU's own class on SM90: 16-bit inputs by the kernels of csrc/gated_delta, the rest by the Triton kernels.

Single rows of sequences (decode.cuh, and small_decode.cuh where they are few), chunks of a paged call (chunks.cuh, and
wide.cuh for sequences that go on from a chunk's start), whole sequences (whole.cuh or wide.cuh) and the backward
(scan.cuh or wide_scan.cuh, grads.cuh) are proposed each for itself, and verified byte for byte against the Triton
kernels, and what they leave in slots (contract: verify, then trust). How many columns of a head a block of chunks takes
is raced, and which kernel goes through sequences, forward and backward, once for few blocks and once for more than the
GPU runs at once, and of chunks once more for those beside many single rows; the kernel of chunks is a candidate for
whole sequences too. Few single rows are raced by how many they are. Single rows are verified once more with the
convolution and the gates before them (`conv_gated_delta_paged`), which the same kernel computes on the way; of a call
of chunks too, if single rows come first.

A block of chunks takes most of a multiprocessor's shared memory, whether it has work or not. So those of a paged call
are of the sequences behind `singles` alone; blocks of single rows, which are small, are of all sequences.
"""

import functools
import itertools
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

from .._core import digest, gpu, native
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided, race_on_gpu
from .._core.proof.inputs import special_rows
from ..causal_conv import triton as causal_conv
from . import triton, triton_backward
from .op import CHUNK, WIDEST
from .triton_gates import delta_gates_bwd as delta_gates_bwd
from .triton_gates import delta_gates_fwd as delta_gates_fwd

DECODE, STEP, CHUNKS, WHOLE, BACKWARD = "decode", "step", "chunks", "whole", "backward"
SINGLE = DECODE, STEP
# columns of a head in a block; wide: by the warpgroup instruction; small: of few rows, an item a block; early: it has
# memory fetched while the kernel before still runs
TILES = {
    DECODE: ("64", "64 small", "64 small early"),
    STEP: ("64", "64 small", "64 small early"),
    CHUNKS: ("32", "64", "32 wide"),
    WHOLE: ("32", "32 wide"),
    BACKWARD: ("32", "32 wide"),
}
SPARSE = 24  # rows of a sequence, of a step of chunks and many single rows: fewer on average
SMALL_DEPTH = 128  # of keys and values, in the kernel of few single rows
PREPARED = 6532  # fp32 values of a chunk and a value head that do not wait for a state


class Call(NamedTuple):
    """What decides which kernel computes a part of a call.

    part     DECODE or STEP, single rows of sequences, CHUNKS of a paged call, WHOLE sequences, or their BACKWARD
    heads    sequences times value heads, which says how many blocks there are
    aligned  whether all that is copied lies on 16-byte boundaries
    sparse   of CHUNKS: whether most sequences have a single row, and blocks nothing to do
    """

    part: str
    device: torch.device
    dtype: torch.dtype
    hk: int
    hv: int
    dk: int
    dv: int
    l2norm: bool
    heads: int = 1
    aligned: bool = True
    sparse: bool = False

    @classmethod
    def of(cls, part: str, q: Tensor, k: Tensor, v: Tensor, l2norm: bool, sequences: int, *slots: Tensor) -> "Call":
        aligned = (part == DECODE or _aligned(2, q, k, v)) and _aligned(1, *slots)
        (_, hk, dk), (_, hv, dv) = q.shape, v.shape
        return cls._of(part, q.device, q.dtype, (hk, dk), (hv, dv), l2norm, q.shape[0], sequences, aligned)

    @classmethod
    def behind(cls, x: Tensor, memory, l2norm: bool, sequences: int) -> "Call":
        """Of chunks, which so many sequences may have, behind single rows that the kernel of STEP takes: that takes
        nothing which is not aligned."""
        key, value = memory[1].shape[2:], memory[2].shape[2:]
        return cls._of(CHUNKS, x.device, x.dtype, key, value, l2norm, x.shape[0], sequences, True)

    @classmethod
    def _of(cls, part, device, dtype, key, value, l2norm, rows, sequences, aligned) -> "Call":
        (hk, dk), (hv, dv) = key, value
        sparse = part == CHUNKS and rows < SPARSE * sequences
        return cls(part, device, dtype, hk, hv, dk, dv, l2norm, sequences * hv, aligned, sparse)


def _aligned(leading: int, *tensors: Tensor) -> bool:
    """Whether they begin on 16-byte boundaries, and so do their parts along the leading dimensions."""
    for t in tensors:  # loops: asked at every layer, and all() over a generator takes twice as long
        if t.data_ptr() % 16:
            return False
        size = t.element_size()
        for stride in t.stride()[:leading]:
            if stride * size % 16:
                return False
    return True


def route(call: Call) -> Decision:
    """Which kernel computes a part of a call: dispatch takes it, `explain` shows it, `admit` asks for it early."""
    rule = _rule(call)
    if rule:
        return canonical_by_rule("triton", rule)
    if call.part in SINGLE:
        classes = _few_rows(gpu.multiprocessors(call.device), call.hv, call.dk, call.dv)
        few = next((n for n in classes if n * call.hv >= call.heads), 0)
        return _decision(call.device, *call[:1], *call[2:8], few, False, False)
    crowded = call.heads * call.dv >= 128 * gpu.multiprocessors(call.device)
    return _decision(call.device, *call[:1], *call[2:8], 0, crowded, crowded and call.sparse)


@functools.cache
def _few_rows(many: int, hv: int, dk: int, dv: int) -> list[int]:
    """Numbers of single rows up to which kernels are raced apart: those of half a block of 64 columns a multiprocessor,
    of one, and of two."""
    if (dk, dv) != (SMALL_DEPTH, SMALL_DEPTH):
        return []
    blocks = hv * dv // 64
    return sorted({n for n in (many // 2 // blocks, many // blocks, 2 * many // blocks) if n})


def _rule(call: Call) -> str | None:
    if call.dtype not in (torch.bfloat16, torch.float16):
        return "other kernels take bf16 and fp16"
    if call.dk not in (DEPTHS if call.part in SINGLE else (128,)) or call.dv % 64 or call.dv > WIDEST:
        return "other kernels take heads of other sizes"
    if call.part == STEP and call.hv % 2:
        return "other kernels take value heads by twos"
    if not call.aligned:
        return "rows or slots do not begin on 16-byte boundaries"
    return gpu.not_sm90(call.device)


DEPTHS = 64, 128, 256  # of keys, in the kernel for single rows


@functools.cache
def _native():
    ops = native.ops()
    names = "decode", "step", "chunks", "whole", "backward"
    return SimpleNamespace(**{name: getattr(ops, f"gated_delta_{name}").default for name in names})


def varlen_fwd(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, final):
    name = route(Call.of(WHOLE, q, k, v, l2norm, cu_seqlens.shape[0] - 1)).chosen.name
    return _whole(name, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, final)


def varlen_bwd(dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm):
    sequences = cu_seqlens.shape[0] - 1
    forward = route(Call.of(WHOLE, q, k, v, l2norm, sequences)).chosen.name
    backward = route(Call.of(BACKWARD, q, k, v, l2norm, sequences, dout)).chosen.name
    kept = _kept(forward, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm)
    return _gradients(backward, dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, kept)


def paged_fwd(
    q, k, v, g, beta, state, open_k, open_u, open_g, slots, context_lens, cu_seqlens_q, max_seqlen_q, singles, scale,
    l2norm,
):  # fmt: skip
    out = v.new_empty(*v.shape)
    if not (q.shape[0] and slots.shape[0]):
        return out
    g, beta = (x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous() for x in (g, beta))
    memory, sequences = (state, open_k, open_u, open_g), slots.shape[0]
    step = slots, context_lens, cu_seqlens_q, singles
    for part, count in _parts(max_seqlen_q, sequences, singles):
        name = route(Call.of(part, q, k, v, l2norm, count, *memory)).chosen.name
        _paged(part, name, q, k, v, g, beta, memory, step, scale, l2norm, out)
    return out


def _parts(longest: int, sequences: int, singles: int) -> list[tuple[str, int]]:
    """Of a paged call, and of how many sequences each is. A single row may stand behind the first ones too."""
    parts = (DECODE, sequences, 1), (CHUNKS, sequences - singles, 2)
    return [(part, count) for part, count, least in parts if longest >= least and count]


def step_fwd(x, weight, bias, taps, a, b, a_log, dt_bias, *rest) -> Tensor | None:
    """None where no kernel for all of it was admitted, or sequences may have more rows and none is known to have one.
    Where some are, it takes all single rows, and sequences of more rows, which can only be behind, are `_behind`'s."""
    *memory, slots, context_lens, offsets, longest, singles, scale, l2norm, doubled = rest
    if not (longest == 1 or singles) or not (x.shape[0] and slots.shape[0]):
        return None
    vectors = (None if t is None else t.contiguous() for t in (weight, bias, a_log, dt_bias))
    weight, bias, a_log, dt_bias = vectors
    given = x, weight, bias, taps, a, b, a_log, dt_bias
    name = _route_step(given, memory, l2norm, slots.shape[0]).chosen.name
    if name == "triton":
        return None
    out = torch.empty(x.shape[0], *memory[2].shape[2:], dtype=x.dtype, device=x.device)
    step = slots.contiguous(), context_lens.contiguous(), offsets.contiguous()
    _step(name, given, memory, step, scale, l2norm, doubled, out)
    if _any_behind(longest, slots.shape[0], singles):
        _behind(given, memory, (*step, singles), scale, l2norm, doubled, out)
    return out


def _any_behind(longest: int, sequences: int, singles: int) -> bool:
    return longest > 1 and singles < sequences


def _route_step(given, memory, l2norm: bool, sequences: int) -> Decision:
    x, weight, _, taps, a, b, a_log, dt_bias = given
    (hk, dk), (hv, dv) = memory[1].shape[2:], memory[2].shape[2:]
    if weight.shape[1] != 4 or any(t.dtype not in (x.dtype, torch.float32) for t in (a_log, dt_bias)):
        return canonical_by_rule("triton", "other kernels take four taps, and gates' vectors in fp32 or as x")
    aligned = _aligned(1, x, taps, *memory) and _aligned(0, weight)
    pairs = all(t.stride(0) % 2 == 0 and t.stride(1) == 1 for t in (a, b))
    aligned = aligned and pairs and all(t.data_ptr() % 4 == 0 for t in (a, b, a_log, dt_bias))
    return route(Call(STEP, x.device, x.dtype, hk, hv, dk, dv, l2norm, sequences * hv, aligned))


def _step(name, given, memory, step, scale, l2norm, doubled, out) -> None:
    by = gpu.multiprocessors(out.device), *_small(name)
    _native().step(*given, *memory, *step[:3], scale, l2norm, doubled, *by, out)


def _behind(given, memory, step, scale, l2norm, doubled, out) -> None:
    """Sequences of more than one row, which are none of the first `singles`, as the three ops compute them. Of a single
    row between them, which `_step` has computed, the convolution is computed once more, and its ring given the same
    bytes: they are few. Gates are of all rows: Triton compiles anew for slices of odd alignment."""
    x, weight, bias, taps = given[:4]
    *of, singles = step
    qkv = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    causal_conv.behind(x, weight, bias, taps, *step, True, qkv)
    rows = _net_rows(qkv, given, memory, doubled)
    name = route(Call.behind(x, memory, l2norm, of[0].shape[0] - singles)).chosen.name
    _paged(CHUNKS, name, *rows, memory, step, scale, l2norm, out)


def _net_rows(qkv, given, memory, doubled: bool):
    """q, k, v, g and beta, of what the convolution gave."""
    (hk, dk), (hv, dv) = memory[1].shape[2:], memory[2].shape[2:]
    q, k, v = (t.unflatten(1, (-1, d)) for t, d in zip(qkv.split((hk * dk, hk * dk, hv * dv), 1), (dk, dk, dv)))
    a, b, a_log, dt_bias = given[4:]
    g, beta = (a.new_empty(*a.shape, dtype=torch.float32) for _ in "gb")
    delta_gates_fwd(a, b, a_log, dt_bias, g, beta)
    return q, k, v, g, beta * 2.0 if doubled else beta


def _tile(name: str) -> list[int]:
    """Numbers that a kernel's name ends in: TILES."""
    return [int(word) for word in name.split() if word.isdecimal()]


def _small(name: str) -> tuple[bool, bool]:
    """Whether it is the kernel of few single rows, and whether that asks early."""
    return "small" in name, name.endswith("early")


def _wide(name: str) -> bool:
    """By the warpgroup instruction. Of a paged call it takes sequences that go on from a chunk's start."""
    return name.endswith("wide")


def _prepared(v: Tensor, offsets: Tensor) -> Tensor:
    chunks = v.shape[0] // CHUNK + offsets.shape[0] - 1
    return torch.empty(chunks * v.shape[1] * PREPARED, dtype=torch.float32, device=v.device)


def _whole(name, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, final):
    rows = q, k, v, g, beta, cu_seqlens
    if name == "triton":
        return triton.varlen_fwd(*rows, initial_state, scale, l2norm, final)
    shape = cu_seqlens.shape[0] - 1, v.shape[1], q.shape[2], v.shape[2]
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    state = torch.empty(shape, dtype=torch.float32, device=v.device) if final else None
    _sequences(name, *rows, initial_state, state, None, None, scale, l2norm, out)
    return out, state


def _sequences(name, q, k, v, g, beta, cu_seqlens, initial_state, state, states, us, scale, l2norm, out):
    """By the kernels of whole sequences, or by the one of chunks, which whole ones are for it. What was prepared."""
    tensors = q, k, v, g, beta, cu_seqlens, initial_state, state, states, us
    if CHUNKS in name:
        _native().chunks(*tensors, *[None] * 7, scale, l2norm, *_tile(name), out)
        return None
    prepared = _prepared(v, cu_seqlens)
    _native().whole(*tensors, prepared, scale, l2norm, _wide(name), out)
    return prepared


def _kept(name, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm):
    """The states at chunk starts and u, for the backward, as triton.chunks gives them; and what was prepared."""
    rows = q, k, v, g, beta, cu_seqlens
    if name == "triton" or q.shape[0] == 0:
        return *triton.chunks(*rows, initial_state, scale, l2norm, keep=True), None
    shape = q.shape[0] // CHUNK + cu_seqlens.shape[0], v.shape[1], q.shape[2], v.shape[2]
    states, us = (torch.empty(s, dtype=torch.float32, device=q.device) for s in (shape, v.shape))
    return states, us, _sequences(name, *rows, initial_state, None, states, us, scale, l2norm, None)


def _gradients(name, dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, kept):
    rows = q, k, v, g, beta, cu_seqlens
    states, us, prepared = kept
    if name == "triton" or q.shape[0] == 0:
        return triton_backward.backward(dout, dfinal, *rows, initial_state, scale, l2norm, (states, us))
    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v, g, beta)]
    dinitial = None if initial_state is None else torch.empty_like(initial_state)
    own = torch.empty_like(states), torch.empty_like(us)
    between = _prepared(v, cu_seqlens) if prepared is None else prepared
    options = prepared is not None, scale, l2norm, _wide(name)
    _native().backward(dout, dfinal, *rows, states, us, between, *options, *own, *grads, dinitial)
    return *grads, dinitial


def _paged(part, name, q, k, v, g, beta, memory, step, scale, l2norm, out) -> None:
    slots, context_lens, offsets, singles = step
    if name == "triton":
        where, gates = triton.slots_of(*memory, slots, context_lens), (g.contiguous(), beta.float().contiguous())
        given = q, k, v, *gates, where, memory[0].shape[0], offsets, scale, l2norm, out
        triton.paged_tokens(*given) if part == DECODE else triton.paged_chunks(*given, singles)
    elif part == DECODE:
        by = gpu.multiprocessors(v.device), *_small(name)
        _native().decode(q, k, v, g, beta, *memory, slots, context_lens, offsets, scale, l2norm, *by, out)
    else:
        behind, gates, prepared = offsets[singles:], (g, beta), None
        if _wide(name):
            gates, prepared = (g.contiguous(), beta.float().contiguous()), _prepared(v, behind)
        of = *memory, slots[singles:], context_lens[singles:], prepared
        _native().chunks(q, k, v, *gates, behind, *[None] * 4, *of, scale, l2norm, *_tile(name), out)
        where = triton.slots_of(*memory, slots, context_lens)  # whole: Triton compiles anew for slices of odd alignment
        triton.append(q, k, v, g.contiguous(), offsets, where, memory[0].shape[0], singles)


# ---- admission


@decided
def _decision(
    device: torch.device, part: str, dtype: torch.dtype, hk: int, hv: int, dk: int, dv: int, l2norm: bool,
    few: int, crowded: bool, sparse: bool,
) -> Proposal:  # fmt: skip
    """few: of so many single rows at most; 0: of any number."""
    source = digest.of_files(__file__, native=digest.of_extension("gated_delta", "cuda"))
    canonical = digest.canonical("gated_delta")
    if part == STEP:
        canonical += digest.canonical("causal_conv")
    kinds = (WHOLE, CHUNKS) if part == WHOLE else (part,)
    names = [f"sm90 {kind} {tile}" for kind in kinds for tile in TILES[kind]]
    if part == WHOLE:  # which has its own wide one
        names = [name for name in names if WHOLE in name or not _wide(name)]
    if not few:
        names = [name for name in names if not any(_small(name))]
    sizes = f"Hk={hk} Hv={hv} dk={dk} dv={dv} {'norm' if l2norm else 'no norm'}"
    sizes += f" T<={few}" if few else " sparse" if sparse else " crowded" if crowded else ""
    return Proposal(
        f"gated_delta {part} {str(dtype).removeprefix('torch.')} {sizes}",
        [Candidate(name, functools.partial(_verified, part, name), source) for name in names],
        Candidate("triton", functools.partial(_verified, part, "triton"), canonical),
        lambda: _cases(device, part, dtype, hk, hv, dk, dv, l2norm, crowded, sparse, few),
        functools.partial(_race, part),
    )


def _verified(part: str, name: str, rows, memory, step, initial, l2norm):
    """All that a kernel of this name computes of a case, and leaves behind."""
    if part == BACKWARD:
        return [x for x in _gradients_of(name, rows, step[2], initial, l2norm) if x is not None]
    if part == WHOLE:
        whole = *rows[:4], rows[4].float(), step[2], initial, 0.3, l2norm
        return [*_whole(name, *whole, True), *_used(*_kept(name, *whole)[:2], step[2])]
    memory = [t.clone() for t in memory]
    if part == STEP:
        return [_stepped(name, rows, memory, step, l2norm), *memory]
    out = torch.zeros_like(rows[2])
    _paged(part, name, *rows, memory, step, 0.3, l2norm, out)
    return [out, *memory]


def _stepped(name: str, given, memory, step, l2norm: bool, out: Tensor | None = None) -> Tensor:
    """memory: the ring of the convolution's inputs, and what the net remembers."""
    x, weight, bias, *gates, doubled = given
    taps, *memory = memory
    given = x, weight, bias, taps, *gates
    out = x.new_zeros(x.shape[0], *memory[2].shape[2:]) if out is None else out
    if name != "triton":
        _step(name, given, memory, step, 0.3, l2norm, doubled, out)
        return out
    qkv = causal_conv.paged_fwd(x, weight, bias, taps, *step, True)
    _paged(DECODE, name, *_net_rows(qkv, given, memory, doubled), memory, step, 0.3, l2norm, out)
    return out


def _gradients_of(name: str, rows, offsets, initial, l2norm):
    """From upstream gradients that a case's values stand for: its v, and its states behind the last rows."""
    dout, *rows = rows[2].flip(0).contiguous(), *rows[:4], rows[4].float()
    kept = *triton.chunks(*rows, offsets, initial, 0.3, l2norm, keep=True), None
    dfinal = None if initial is None else initial.flip(0).contiguous()
    return _gradients(name, dout, dfinal, *rows, offsets, initial, 0.3, l2norm, kept)


def _used(states: Tensor, us: Tensor, offsets: Tensor) -> list[Tensor]:
    """Of what is kept for the backward what is written: the states of chunks that there are."""
    ends = enumerate(itertools.pairwise(offsets.tolist()))
    there = [begin // CHUNK + b + n for b, (begin, end) in ends for n in range(-(-(end - begin) // CHUNK))]
    return [states[there], us]


def _cases(device, part, dtype, hk, hv, dk, dv, l2norm, crowded, sparse=False, few=0) -> list[tuple]:
    """Sequences at every kind of place in a chunk, new and old, with a slot and without one; rows whose products with
    the state cancel, special values beside ordinary ones, gates at their ends; what no sequence owns is NaN. Of chunks
    in every other case the first sequence, which has a single row, is left to another call. Of few single rows the last
    case is of so many."""
    draw = torch.Generator(device).manual_seed(dk + dv)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=torch.float32)

    single = part in SINGLE
    places = [0, 1, 2, 15, 16, 17, 31, 40, 48, 62, 63, 0, 0, 0, 0]
    known = [n * CHUNK + place for n in (0, 2) for place in places]
    if few:
        known *= -(-few // 10)  # of which ten go on from a state: _few_of
    elif single:  # so many that each block has several items
        many = gpu.multiprocessors(device) if device.type == "cuda" else 1
        known *= max(2, -(-16 * many // (len(known) * hv * dv // 64)))
    counts = [1] * len(known) if single else [(1, 2, 17, 63, 64, 130, 3)[i % 7] for i in range(len(known))]
    if not single:
        counts[3] = 0
    sequences, tokens = len(known), sum(counts)
    offsets = torch.tensor([0, *counts], dtype=torch.int64, device=device).cumsum(0).int()
    lens = torch.tensor([a + b for a, b in zip(known, counts)], dtype=torch.int32, device=device)
    slots = torch.randperm(sequences + 2, generator=draw, device=device)[:sequences].int()
    slots[5] = -1
    count = sequences + 2

    def memory(k_scale: float, states: Tensor) -> list[Tensor]:
        held = new(count, CHUNK, hk, dk) * k_scale, new(count, CHUNK, hv, dv) * 0.3, -new(count, CHUNK, hv).abs() * 0.1
        place = torch.full((count,), CHUNK, dtype=torch.int64, device=device)
        place[slots[slots >= 0].long()] = torch.tensor(known, dtype=torch.int64, device=device)[slots >= 0] % CHUNK
        beyond = torch.arange(CHUNK, device=device)[None] >= place[:, None]
        open_k, open_u, open_g = (
            t.masked_fill(beyond.view(*beyond.shape, *[1] * (t.dim() - 2)), torch.nan) for t in held
        )
        return [states, open_k.to(dtype), open_u, open_g.cumsum(1)]

    def gates() -> tuple[Tensor, Tensor]:
        g = -new(tokens, hv).abs() * torch.exp2(torch.randint(-9, 2, (tokens, hv), generator=draw, device=device))
        return g, torch.sigmoid(2 * new(tokens, hv))

    found = []
    half, order = new(count, hv, dk // 2, dv), torch.randperm(dk, generator=draw, device=device)
    half *= torch.exp2(torch.randint(-12, 13, half.shape, generator=draw, device=device))
    cancels = torch.cat([half, -half], 2)[:, :, order].contiguous()
    initial = cancels[:sequences].contiguous()
    for kind in range(4):
        q, k, v = new(tokens, hk, dk), new(tokens, hk, dk), new(tokens, hv, dv)
        g, beta = gates()
        states = new(count, hv, dk, dv)
        if kind == 1:  # rows meet the state's halves with equal values: what is left is rounding
            q, k = (torch.cat([x[..., : dk // 2]] * 2, 2)[..., order] for x in (q, k))
            states = cancels
        elif kind == 2:
            q, k, v = (special_rows(x.flatten(1), seed=i).view(x.shape) for i, x in enumerate((q, k, v)))
        elif kind == 3:
            g = (
                g
                * torch.tensor([0.0, 1.0, 300.0, torch.inf], dtype=torch.float32, device=device)[
                    torch.arange(tokens, device=device) % 4
                ][:, None]
            )
            g, beta = g.nan_to_num(nan=0.0, neginf=-torch.inf), beta.round()
        rows = q.to(dtype), k.to(dtype), v.to(dtype), g, beta if kind % 2 else beta.to(dtype)
        given = memory(1.0, states)
        if part == STEP:
            rows = _before(rows, new, kind, a_log_of=torch.float32 if kind % 2 else dtype)
            channels, positions = rows[0].shape[1], torch.arange(4, device=device)[None]
            taps = new(count, 4, channels).to(dtype)
            held = torch.full((count,), 0, dtype=torch.int64, device=device)
            held[slots[slots >= 0].long()] = torch.tensor(known, dtype=torch.int64, device=device)[slots >= 0]
            given = [taps.masked_fill((positions >= held[:, None])[..., None], torch.nan), *given]
        found.append((rows, given, (slots, lens, offsets, kind % 2), None if kind == 0 else initial, l2norm))
    if few:  # what is raced, the last one
        found.append(_few_of(found[0], [i for i, n in enumerate(known) if n > 2 * CHUNK], few))
    if not single:  # likewise: whole sequences, or few of them beside many single rows
        batch, each = (max(2, 256 * gpu.multiprocessors(device) // (hv * dv)), 256) if crowded else (1, 1024)
        counts = [each] * batch + [1] * (each * batch // (SPARSE // 2) if sparse else 0)
        tokens, sequences = sum(counts), len(counts)
        g, beta = gates()
        rows = *(new(tokens, h, d).to(dtype) for h, d in ((hk, dk), (hk, dk), (hv, dv))), g, beta.to(dtype)
        lens = torch.tensor(counts, dtype=torch.int32, device=device)
        offsets = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
        none = torch.full_like(lens, -1)
        found.append((rows, memory(1.0, cancels), (none, lens, offsets, 0), None, l2norm))
    return found


def _few_of(case, going_on: list[int], count: int):
    """A case of so many of a case's single rows, at places in a chunk from its start to its end."""
    rows, memory, (slots, lens, offsets, singles), initial, l2norm = case
    ordered = sorted(going_on, key=lambda i: int(lens[i]))
    these = [ordered[(2 * n + 1) * len(ordered) // (2 * count)] for n in range(count)]
    per_row = (0, 3, 4) if len(rows) > 5 else range(5)  # of x, weight, bias, a, b, ...; or all
    rows = tuple(x[these] if at in per_row else x for at, x in enumerate(rows))
    return rows, memory, (slots[these], lens[these], offsets[: count + 1], singles), initial, l2norm


def _before(rows, new, kind: int, a_log_of: torch.dtype):
    """What a projection may give for such rows, a layer's weights, and whether beta is doubled: as in _stepped."""
    q, k, v, g, _ = rows
    x = torch.cat([t.flatten(1) for t in (q, k, v)], 1)
    (tokens, channels), hv, dtype = x.shape, g.shape[1], x.dtype
    weight, a, b = new(channels, 4), 4 * new(tokens, hv), 4 * new(tokens, hv)
    if kind == 0:  # taps cancel, where inputs are alike, but for rounding
        weight[:, 1::2] = -weight[:, ::2]
    elif kind == 1:  # rows stay what they are but for silu, and meet the state as they did
        weight[:] = torch.tensor([0.0, 0.0, 0.0, 1.0], dtype=torch.float32, device=x.device)
    elif kind == 2:
        a, b = special_rows(a, seed=3), special_rows(b, seed=4)
    elif kind == 3:
        weight, a = weight * 8, a * 16
    bias = new(channels).to(dtype) if kind == 3 else None
    vectors = (new(hv) * (3 if kind == 3 else 1)).to(a_log_of), new(hv).to(dtype if kind < 2 else torch.float32)
    return x, weight.to(dtype), bias, a.to(dtype), b.to(dtype), *vectors, kind == 3


def _race(part: str, candidates, case) -> list[float | Exception]:
    rows, memory, step, initial, l2norm = case
    if part == STEP:
        out = rows[0].new_empty(rows[0].shape[0], *memory[3].shape[2:])
        given = rows, memory, step, l2norm, out
        return race_on_gpu([[functools.partial(_stepped, one.name, *given)] * 16 for one in candidates])
    wide = *rows[:4], rows[4].float()
    whole = *wide, step[2], initial, 0.3, l2norm
    if part in (DECODE, CHUNKS):
        out = torch.empty_like(rows[2])
        run, given = functools.partial(_paged, part), (*rows, memory, step, 0.3, l2norm, out)
    elif part == WHOLE:
        run, given = _whole, (*whole, True)
    else:
        run, given = _gradients, (rows[2], None, *whole, (*triton.chunks(*whole, keep=True), None))
    times = 16 if part == DECODE else 4  # of a few microseconds each
    return race_on_gpu([[functools.partial(run, one.name, *given)] * times for one in candidates])


def explain(op: str, **given) -> list[tuple[str, Decision]]:
    """Which kernels compute a call, of the operator's arguments by name."""
    if op.startswith("delta_gates"):
        return []  # one kernel, Triton's
    if op.startswith("conv_"):
        names = "x", "weight", "bias", "taps", "a", "b", "a_log", "dt_bias"
        memory = [given[name] for name in ("state", "open_k", "open_u", "open_g")]
        longest, singles, sequences = given["max_seqlen_q"], given["singles"], given["slots"].shape[0]
        if not (longest == 1 or singles):
            return [(STEP, canonical_by_rule("apart", "sequences may have more than one row"))]
        step = _route_step([given[name] for name in names], memory, given["l2norm"], sequences)
        if step.chosen.name == "triton" or not _any_behind(longest, sequences, singles):
            return [(STEP, step)]
        behind = Call.behind(given["x"], memory, given["l2norm"], sequences - singles)
        return [(STEP, step), (CHUNKS, route(behind))]
    q, k, v, l2norm = (given[name] for name in ("q", "k", "v", "l2norm"))
    if op.endswith("bwd"):
        return [(BACKWARD, route(Call.of(BACKWARD, q, k, v, l2norm, given["cu_seqlens"].shape[0] - 1, given["dout"])))]
    if "slots" not in given:
        return [(WHOLE, route(Call.of(WHOLE, q, k, v, l2norm, given["cu_seqlens"].shape[0] - 1)))]
    memory = [given[name] for name in ("state", "open_k", "open_u", "open_g")]
    parts = _parts(given["max_seqlen_q"], given["slots"].shape[0], given["singles"])
    return [(part, route(Call.of(part, q, k, v, l2norm, count, *memory))) for part, count in parts]


def admit(
    hk: int, hv: int, dk: int, dv: int, dtype: torch.dtype, device: torch.device | str = "cuda", l2norm: bool = True,
    training: bool = False,
) -> list[Decision]:  # fmt: skip
    """Verify ahead of time what a model of these heads needs, for few sequences and for many, and for chunks beside
    many single rows."""
    sizes = gpu.with_index(device), dtype, hk, hv, dk, dv, l2norm
    parts = (CHUNKS, WHOLE, *((BACKWARD,) if training else ()))
    calls = [Call(part, *sizes, heads=heads) for part in parts for heads in (1, 1 << 20)]
    singles = [Call(part, *sizes, heads=1 << 20) for part in SINGLE]
    if not _rule(singles[0]):
        few = _few_rows(gpu.multiprocessors(sizes[0]), hv, dk, dv)
        singles += [Call(part, *sizes, heads=n * hv) for part in SINGLE for n in few]
    return [route(call) for call in (*singles, *calls, Call(CHUNKS, *sizes, heads=1 << 20, sparse=True))]
