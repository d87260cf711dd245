"""The GPU's own class on SM90: 16-bit inputs by the kernels of csrc/gated_delta, the rest by the Triton kernels.

Single rows of sequences (decode.cuh), chunks of a paged call (chunks.cuh, and wide.cuh for sequences that go on from a
chunk's start), whole sequences (whole.cuh or wide.cuh) and the backward (scan.cuh or wide_scan.cuh, grads.cuh) are
proposed each for itself, and verified byte for byte against the Triton kernels, and what they leave in slots (contract:
verify, then trust). How many columns of a head a block of chunks takes is raced, and which kernel goes through
sequences, forward and backward, once for few blocks and once for more than the GPU runs at once, and of chunks once
more for those beside many single rows; the kernel of chunks is a candidate for whole sequences too. So is whether
blocks of single rows ask the L2 cache for what later ones read.

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
from . import triton, triton_backward
from .op import CHUNK
from .triton_gates import delta_gates_bwd as delta_gates_bwd
from .triton_gates import delta_gates_fwd as delta_gates_fwd

DECODE, CHUNKS, WHOLE, BACKWARD = "decode", "chunks", "whole", "backward"
# columns of a head in a block; ahead: for later sequences the L2 cache is asked; wide: by the warpgroup instruction
TILES = {
    DECODE: ("64", "64 ahead"),
    CHUNKS: ("32", "64", "32 wide"),
    WHOLE: ("32", "32 wide"),
    BACKWARD: ("32", "32 wide"),
}
SPARSE = 24  # rows of a sequence, of a step of chunks and many single rows: fewer on average
PREPARED = 6532  # fp32 values of a chunk and a value head that do not wait for a state


class Call(NamedTuple):
    """What decides which kernel computes a part of a call.

    part     DECODE, single rows of sequences, CHUNKS of a paged call, WHOLE sequences, or their BACKWARD
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
        sparse = part == CHUNKS and q.shape[0] < SPARSE * sequences
        return cls(part, q.device, q.dtype, hk, hv, dk, dv, l2norm, sequences * hv, aligned, sparse)


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
    crowded = call.part != DECODE and call.heads * call.dv >= 128 * gpu.multiprocessors(call.device)
    return _decision(call.device, *call[:1], *call[2:8], crowded, crowded and call.sparse)


def _rule(call: Call) -> str | None:
    if call.dtype not in (torch.bfloat16, torch.float16):
        return "other kernels take bf16 and fp16"
    if call.dk not in (DEPTHS if call.part == DECODE else (128,)) or call.dv % 64:
        return "other kernels take heads of other sizes"
    if not call.aligned:
        return "rows or slots do not begin on 16-byte boundaries"
    return gpu.not_sm90(call.device)


DEPTHS = 64, 128, 256  # of keys, in the kernel for single rows


@functools.cache
def _native():
    ops = native.ops()
    names = "decode", "chunks", "whole", "backward"
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


def _tile(name: str) -> list[int]:
    """Numbers that a kernel's name ends in: TILES."""
    return [int(word) for word in name.split() if word.isdecimal()]


def _wide(name: str) -> bool:
    """By the warpgroup instruction. Of a paged call it takes sequences that go on from a chunk's start."""
    return name.endswith("wide")


def _ahead(v: Tensor) -> int:
    """Sequences between a block and those that it asks the L2 cache for: half of those whose blocks, of 64 columns
    each, run at once. Longer than memory takes, and a third of the cache."""
    return -(-2 * gpu.multiprocessors(v.device) // (v.shape[1] * v.shape[2] // 64))


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
        ahead = _ahead(v) if name.endswith("ahead") else 0
        _native().decode(q, k, v, g, beta, *memory, slots, context_lens, offsets, scale, l2norm, ahead, out)
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
    crowded: bool, sparse: bool,
) -> Proposal:  # fmt: skip
    source = digest.of_files(__file__, native=digest.of_extension("gated_delta", "cuda"))
    kinds = (WHOLE, CHUNKS) if part == WHOLE else (part,)
    names = [f"sm90 {kind} {tile}" for kind in kinds for tile in TILES[kind]]
    if part == WHOLE:  # which has its own wide one
        names = [name for name in names if WHOLE in name or not _wide(name)]
    sizes = f"Hk={hk} Hv={hv} dk={dk} dv={dv} {'norm' if l2norm else 'no norm'}"
    sizes += " sparse" if sparse else " crowded" if crowded else ""
    return Proposal(
        f"gated_delta {part} {str(dtype).removeprefix('torch.')} {sizes}",
        [Candidate(name, functools.partial(_verified, part, name), source) for name in names],
        Candidate("triton", functools.partial(_verified, part, "triton"), digest.canonical("gated_delta")),
        lambda: _cases(device, part, dtype, hk, hv, dk, dv, l2norm, crowded, sparse),
        functools.partial(_race, part),
    )


def _verified(part: str, name: str, rows, memory, step, initial, l2norm):
    """All that a kernel of this name computes of a case, and leaves behind."""
    if part == BACKWARD:
        return [x for x in _gradients_of(name, rows, step[2], initial, l2norm) if x is not None]
    if part == WHOLE:
        whole = *rows[:4], rows[4].float(), step[2], initial, 0.3, l2norm
        return [*_whole(name, *whole, True), *_used(*_kept(name, *whole)[:2], step[2])]
    memory, out = [t.clone() for t in memory], torch.zeros_like(rows[2])
    _paged(part, name, *rows, memory, step, 0.3, l2norm, out)
    return [out, *memory]


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


def _cases(device, part, dtype, hk, hv, dk, dv, l2norm, crowded, sparse=False) -> list[tuple]:
    """Sequences at every kind of place in a chunk, new and old, with a slot and without one; rows whose products with
    the state cancel, special values beside ordinary ones, gates at their ends; what no sequence owns is NaN. Of chunks
    in every other case the first sequence, which has a single row, is left to another call."""
    draw = torch.Generator(device).manual_seed(dk + dv)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, device=device, dtype=torch.float32)

    places = [0, 1, 2, 15, 16, 17, 31, 40, 48, 62, 63, 0, 0, 0, 0]
    known = [n * CHUNK + place for n in (0, 2) for place in places] * (2 if part == DECODE else 1)
    counts = [1] * len(known) if part == DECODE else [(1, 2, 17, 63, 64, 130, 3)[i % 7] for i in range(len(known))]
    if part != DECODE:
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
        found.append((rows, given, (slots, lens, offsets, kind % 2), None if kind == 0 else initial, l2norm))
    if part != DECODE:  # what is raced, the last one: whole sequences, or few of them beside many single rows
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


def _race(part: str, candidates, case) -> list[float | Exception]:
    rows, memory, step, initial, l2norm = case
    wide = *rows[:4], rows[4].float()
    whole = *wide, step[2], initial, 0.3, l2norm
    if part in (DECODE, CHUNKS):
        out = torch.empty_like(rows[2])
        run, given = functools.partial(_paged, part), (*rows, memory, step, 0.3, l2norm, out)
    elif part == WHOLE:
        run, given = _whole, (*whole, True)
    else:
        run, given = _gradients, (rows[2], None, *whole, (*triton.chunks(*whole, keep=True), None))
    return race_on_gpu([[functools.partial(run, one.name, *given)] * 4 for one in candidates])


def explain(op: str, **given) -> list[tuple[str, Decision]]:
    """Which kernels compute a call, of the operator's arguments by name."""
    if op.startswith("delta_gates"):
        return []  # one kernel, Triton's
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
    return [route(call) for call in (Call(DECODE, *sizes), *calls, Call(CHUNKS, *sizes, heads=1 << 20, sparse=True))]
