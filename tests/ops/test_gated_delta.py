"""gated_delta: training, prefill chunks and decode have one set of bits, sequences stand alone, accuracy, gradients,
what a slot remembers, bad arguments are named."""

import importlib.util

import pytest
import torch
from conftest import Kinds, interpreted, room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.gated_delta.reference import delta_gates_ref, gated_delta_chunks_ref, gated_delta_ref
from vexact_ops.testing import assert_bitwise, check_repeatable, check_rows

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("gated_delta"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
KINDS = Kinds(2, seed=3, heads=[(1, 1), (2, 4), (1, 3)], dims=[(16, 16), (32, 48), (24, 40), (64, 32)])
SLOTS = 5


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(device, lengths):
    return ints(device, *torch.tensor([0, *lengths]).cumsum(0).tolist())


def rows_of(tokens, heads, dims, dtype, device, seed):
    """q, k, v, g, beta: values of unlike magnitudes, so that a changed order shows; decays from none to strong."""
    (hk, hv), (dk, dv) = heads, dims
    draw = torch.Generator().manual_seed(seed)

    def new(*shape):
        x = torch.randn(shape, generator=draw)
        return (x * torch.exp2(torch.randint(-3, 4, (shape[0], *[1] * (len(shape) - 1)), generator=draw))).to(dtype)

    q, k, v = new(tokens, hk, dk), new(tokens, hk, dk), new(tokens, hv, dv)
    g = -torch.rand(tokens, hv, generator=draw) * torch.exp2(torch.randint(-9, 1, (tokens, hv), generator=draw))
    beta = torch.sigmoid(2 * torch.randn(tokens, hv, generator=draw)).to(dtype)
    return tuple(x.to(device) for x in (q, k, v, g, beta))


class Memory:
    """Slots that hold NaN wherever nothing is known, and the sequences that were computed so far."""

    def __init__(self, rows, backend):
        q, k, v = rows[:3]
        self.backend, self.lengths = backend, {}
        shapes = ((v.shape[1], q.shape[2], v.shape[2]), (64, *k.shape[1:]), (64, *v.shape[1:]), (64, v.shape[1]))
        kinds = torch.float32, k.dtype, torch.float32, torch.float32
        self.tensors = [
            torch.full((SLOTS, *s), torch.nan, dtype=t, device=q.device) for s, t in zip(shapes, kinds, strict=True)
        ]

    def append(self, parts, **options):
        """parts: {slot: rows}; several sequences in one call."""
        device, counts = self.tensors[0].device, [len(rows[0]) for rows in parts.values()]
        for slot, count in zip(parts, counts, strict=True):
            self.lengths[slot] = self.lengths.get(slot, 0) + count
        rows = [torch.cat(some) for some in zip(*parts.values(), strict=True)]
        lens = ints(device, *(self.lengths[slot] for slot in parts))
        step = ints(device, *parts), lens, offsets(device, counts), max(counts)
        out = vx.gated_delta_paged(*rows, *self.tensors, *step, **options, backend=self.backend)
        return dict(zip(parts, out.split(counts), strict=True))


def cut(rows, begin, end):
    return tuple(x[begin:end] for x in rows)


def train(rows, lengths, backend, **options):
    cu = offsets(rows[0].device, lengths)
    return vx.gated_delta_varlen(*rows, cu, **options, return_final_state=True, backend=backend)


def check_alone(run, rows, lengths):
    """Each sequence's rows and final state depend on its own rows: alone, in another order, beside NaN."""
    outs, finals = run(rows, lengths)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    places = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    for number, (begin, end) in enumerate(places):
        out, final = run(cut(rows, begin, end), [end - begin])
        assert_bitwise((out, final[0]), (outs[begin:end], finals[number]), f"sequence {number} alone")
    order = list(reversed(range(len(lengths))))
    out, final = run(tuple(torch.cat([x[slice(*places[i])] for i in order]) for x in rows), [lengths[i] for i in order])
    expected = torch.cat([outs[slice(*places[i])] for i in order]), finals[order]
    assert_bitwise((out, final), expected, "another order")
    begin, end = places[-1]
    poisoned = tuple(torch.where(_outside(x, begin, end), torch.nan, x) for x in rows)
    out, final = run(poisoned, lengths)
    assert_bitwise((out[begin:end], final[-1]), (outs[begin:end], finals[-1]), "NaN next door")


def _outside(x, begin, end):
    at = torch.arange(len(x), device=x.device).view(-1, *[1] * (x.dim() - 1))
    return ((at < begin) | (at >= end)).expand(x.shape)


@BACKENDS
@DTYPES
@given(kind=KINDS.drawn, lengths=st.lists(st.integers(1, 140), min_size=2, max_size=4), seed=st.integers(0, 2**16))
def test_sequences_stand_alone(device, backend, dtype, kind, lengths, seed):
    kind = KINDS.at(kind, device, dtype)
    if interpreted(device, backend):
        lengths = [min(n, 20) for n in lengths[:2]]
    rows = rows_of(sum(lengths), kind.heads, kind.dims, dtype, device, seed)
    check_alone(lambda rows, lengths: train(rows, lengths, backend), rows, lengths)


def test_sums_over_the_whole_batch_are_caught():
    """G as one running sum over the packed rows, less its value at the chunk's start: its bits depend on what is
    before."""

    def running(rows, lengths):
        q, k, v, g, beta = rows
        sums = g.cumsum(0)
        g = torch.cat([sums[:1], sums[1:] - sums[:-1]])
        return train((q, k, v, g.clamp(max=0), beta), lengths, None)

    rows = rows_of(150, (1, 2), (16, 16), torch.float32, "cpu", 0)
    with pytest.raises(AssertionError, match="differ"):
        check_alone(running, rows, [80, 70])


@BACKENDS
@DTYPES
@given(data=st.data(), kind=KINDS.drawn, tokens=st.integers(1, 200), seed=st.integers(0, 2**16))
def test_any_split_of_one_alone_has_trainings_bits(device, backend, dtype, data, kind, tokens, seed):
    kind = KINDS.at(kind, device, dtype)
    tokens = min(tokens, 70) if interpreted(device, backend) else tokens
    rows = rows_of(tokens, kind.heads, kind.dims, dtype, device, seed)
    other = rows_of(tokens, kind.heads, kind.dims, dtype, device, seed + 1)
    expected = {slot: train(some, [tokens], backend)[0] for slot, some in ((3, rows), (1, other))}
    memory, at = Memory(rows, backend), {3: 0, 1: 0}
    found = {3: [], 1: []}
    pieces = st.sampled_from([1, 1, 1, 2, 15, 16, 17, 63, 64, 65, 130])
    while any(begin < tokens for begin in at.values()):
        parts = {}
        for slot, some in ((3, rows), (1, other)):
            if at[slot] < tokens and (len(found[slot]) == 0 or data.draw(st.booleans()) or slot == 3):
                count = min(data.draw(pieces), tokens - at[slot])
                if interpreted(device, backend) and at[slot] < 60:
                    count = min(62, tokens - at[slot])
                parts[slot] = cut(some, at[slot], at[slot] + count)
                at[slot] += count
        if not parts:
            parts[1] = cut(other, at[1], tokens)
            at[1] = tokens
        for slot, out in memory.append(parts).items():
            found[slot].append(out)
    for slot, outs in found.items():
        assert_bitwise(torch.cat(outs), expected[slot], f"slot {slot}")


@BACKENDS
@pytest.mark.parametrize("dims", [(128, 128), (96, 192), (256, 64)], ids=["d128", "d96-192", "d256-64"])
def test_wide_heads_a_token_at_a_time_on_a_gpu(device, backend, dims):
    """On a GPU tiles of 64 rows and of 16 meet here; elsewhere one row meets many."""
    if interpreted(device, backend):
        dims = (16, 16)
    rows = rows_of(70, (1, 2), dims, torch.bfloat16, device, 0)
    expected, final = train(cut(rows, 0, 64), [64], backend)
    whole, _ = train(rows, [70], backend)
    memory = Memory(rows, backend)
    start = 62 if interpreted(device, backend) else 1
    outs = [memory.append({2: cut(rows, 0, start)})[2]]
    outs += [memory.append({2: cut(rows, i, i + 1)})[2] for i in range(start, 64)]
    assert_bitwise(torch.cat(outs), expected)
    assert_bitwise(memory.tensors[0][2], final[0])
    outs += [memory.append({2: cut(rows, i, i + 1)})[2] for i in range(64, 70)]
    assert_bitwise(torch.cat(outs), whole)


def test_chunks_cut_from_a_calls_start_are_caught():
    """What the stock class does with a prompt in chunks: states handed on where a call ends, not where a chunk does."""
    rows = rows_of(100, (1, 2), (32, 32), torch.float32, "cpu", 0)
    expected, _ = train(rows, [100], None)
    first, state = train(cut(rows, 0, 50), [50], None)
    second, _ = train(cut(rows, 50, 100), [50], None, initial_state=state)
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(torch.cat([first, second]), expected)


def test_a_recurrent_decode_is_caught():
    """State by state, as the recurrent kernels have it, in fp32."""
    rows = rows_of(40, (1, 1), (32, 32), torch.float32, "cpu", 0)
    recurrent, _ = gated_delta_ref(*rows, ints("cpu", 0, 40))
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(recurrent, train(rows, [40], None)[0])


@BACKENDS
@DTYPES
def test_rows_behind_do_not_reach_a_row_alone(device, backend, dtype):
    tokens, cases = (40, (0, 17, 39)) if interpreted(device, backend) else (130, (0, 15, 16, 40, 63, 64, 129))
    rows = rows_of(tokens, (1, 2), (16, 16), dtype, device, 1)
    expected, _ = train(rows, [tokens], backend)
    for last in cases:
        outs, _ = train(cut(rows, 0, last + 1), [last + 1], backend)
        assert_bitwise(outs, expected[: last + 1], f"without what is behind row {last}")
        for value in (torch.nan, torch.inf):
            poisoned = [x.clone() for x in rows]
            for x in poisoned[: 5 if value != value else 3]:  # g and beta have bounds
                x[last + 1 :] = value
            outs, _ = train(poisoned, [tokens], backend)
            assert_bitwise(outs[: last + 1], expected[: last + 1], f"{value} behind row {last}")


@BACKENDS
def test_a_slot_is_written_where_it_says_on_a_gpu(device, backend):
    """The state where a chunk ends, the open rows' own places, and no other slot; what is behind them has no part."""
    rows = rows_of(140, (1, 2), (16, 16), torch.bfloat16, device, 2)
    memory = Memory(rows, backend)

    def changed(before):
        """[(tensor, slot)] that are not what they were."""
        pairs = zip(before, memory.tensors, strict=True)
        return [(n, s) for n, (a, b) in enumerate(pairs) for s in range(SLOTS) if not vx.same_bits(a[s], b[s])]

    for begin, end, states in ((0, 62, 0), (62, 63, 0), (63, 64, 1), (64, 127, 0), (127, 129, 1), (129, 140, 0)):
        before = [t.clone() for t in memory.tensors]
        memory.append({2: cut(rows, begin, end)})
        found = changed(before)
        assert all(slot == 2 for _, slot in found)
        assert ((0, 2) in found) == bool(states), f"rows {begin} to {end}"
    _, state = train(cut(rows, 0, 128), [128], backend)
    assert_bitwise(memory.tensors[0][2], state[0])
    assert_bitwise(memory.tensors[1][2, :12], rows[1][128:])  # k as it was given
    sums = torch.zeros(2, device=device)
    for place in range(12):
        sums = sums + rows[3][128 + place]
        assert_bitwise(memory.tensors[3][2, place], sums)


@BACKENDS
def test_rows_that_were_too_many_are_forgotten_on_a_gpu(device, backend):
    rows = rows_of(100, (1, 2), (16, 16), torch.bfloat16, device, 3)
    wrong = rows_of(30, (1, 2), (16, 16), torch.bfloat16, device, 4)
    expected, _ = train(rows, [100], backend)
    memory = Memory(rows, backend)
    outs = [memory.append({0: cut(rows, 0, 70)})[0]]
    for drafts in (1, 7, 20):
        memory.append({0: cut(wrong, 0, drafts)})
        memory.lengths[0] -= drafts
    outs.append(memory.append({0: cut(rows, 70, 100)})[0])
    assert_bitwise(torch.cat(outs), expected)


@BACKENDS
def test_no_slot_is_a_sequence_that_nobody_remembers_on_a_gpu(device, backend):
    rows = rows_of(9, (1, 2), (16, 16), torch.bfloat16, device, 5)
    memory = Memory(rows, backend)
    before = [t.clone() for t in memory.tensors]
    for begin, lens in ((0, 9), (8, 77)):
        step = ints(device, -1), ints(device, lens), ints(device, 0, 9 - begin), 9
        out = vx.gated_delta_paged(*cut(rows, begin, 9), *memory.tensors, *step, backend=backend)
        assert_bitwise(out, train(cut(rows, begin, 9), [9 - begin], backend)[0])
    assert_bitwise(memory.tensors, before)


@BACKENDS
@DTYPES
@given(kind=KINDS.drawn, seed=st.integers(0, 2**16))
def test_gradients_of_a_sequence_stand_alone(device, backend, dtype, kind, seed):
    kind = KINDS.at(kind, device, dtype)
    lengths = [5, 18] if interpreted(device, backend) else [70, 1, 130]
    rows = rows_of(sum(lengths), kind.heads, kind.dims, dtype, device, seed)
    plane = kind.heads[1], *kind.dims
    draw = torch.Generator().manual_seed(seed)
    initial, dfinal = (torch.randn(len(lengths), *plane, generator=draw).to(device) for _ in range(2))
    dout = torch.randn(rows[2].shape, generator=draw).to(dtype).to(device)

    def grads(rows, lengths, initial, dout, dfinal):
        leaves = [x.detach().clone().requires_grad_() for x in (*rows, initial)]
        out, final = train(leaves[:5], lengths, backend, initial_state=leaves[5])
        return torch.autograd.grad((out, final), leaves, (dout, dfinal))

    expected = grads(rows, lengths, initial, dout, dfinal)
    assert_bitwise(grads(rows, lengths, initial, dout, dfinal), expected, "a second run")
    begin = 0
    for number, length in enumerate(lengths):
        end, own = begin + length, slice(number, number + 1)
        alone = grads(cut(rows, begin, end), [length], initial[own], dout[begin:end], dfinal[own])
        assert_bitwise(alone[:5], cut(expected[:5], begin, end), f"sequence {number}")
        assert_bitwise(alone[5], expected[5][own], f"sequence {number}: initial_state")
        begin = end
    last, poisoned = lengths[-1], [x.clone() for x in rows]
    for x in poisoned:
        x[:-last] = torch.nan
    beside = grads(poisoned, lengths, initial, dout, dfinal)
    assert_bitwise([x[-last:] for x in beside[:5]], [x[-last:] for x in expected[:5]], "NaN next door")


@BACKENDS
@pytest.mark.parametrize("options", [{}, {"qk_l2norm": False, "scale": 0.3}], ids=["norm", "no-norm"])
def test_gradients_on_a_gpu_against_float64(device, backend, options):
    """fp32 inputs are computed in fp32 throughout, so that a wrong formula shows."""
    lengths = [20, 5] if interpreted(device, backend) else [70, 5, 129]
    rows = rows_of(sum(lengths), (2, 4), (24, 40), torch.float32, device, 6)
    if options:
        rows = rows[0] / 8, rows[1] / 16, *rows[2:]
    draw = torch.Generator().manual_seed(0)
    initial = 0.1 * torch.randn(len(lengths), 4, 24, 40, generator=draw).to(device)
    leaves = [x.clone().requires_grad_() for x in (*rows, initial)]
    out, final = train(leaves[:5], lengths, backend, initial_state=leaves[5], **options)
    upstream = [torch.randn(x.shape, generator=draw).to(device) for x in (out, final)]
    grads = torch.autograd.grad((out, final), leaves, upstream)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    cu = offsets(device, lengths)
    exact = gated_delta_ref(*wide[:5], cu, initial_state=wide[5], **options)
    expected = torch.autograd.grad(exact, wide, [x.double() for x in upstream])
    names = "out", "final", "q", "k", "v", "g", "beta", "initial_state"
    for name, ours, e in zip(names, (out, final, *grads), (*exact, *expected), strict=True):
        error = float((ours.detach().double() - e.detach()).norm() / e.detach().norm())
        assert error < 4e-6, f"{name}: {error:.3g}"


@BACKENDS
@pytest.mark.parametrize("dims", [(128, 128), (256, 128), (64, 256)], ids=["d128", "d256-128", "d64-256"])
def test_gradients_of_wide_heads_on_a_gpu(device, backend, dims):
    """At true sizes: what a kernel holds has to fit into a GPU's shared memory."""
    dims, lengths = ((16, 16), [5, 18]) if interpreted(device, backend) else (dims, [70, 130])
    rows = rows_of(sum(lengths), (1, 2), dims, torch.bfloat16, device, 14)
    dout = torch.randn(rows[2].shape, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)

    def grads(rows, lengths, dout):
        leaves = [x.detach().clone().requires_grad_() for x in rows]
        return torch.autograd.grad(train(leaves, lengths, backend)[0], leaves, dout)

    found = grads(rows, lengths, dout)
    alone = grads(cut(rows, lengths[0], None), lengths[1:], dout[lengths[0] :])
    assert_bitwise(alone, cut(found, lengths[0], None))
    wide = [x.detach().double().cpu().requires_grad_() for x in rows]
    exact = gated_delta_ref(*wide, offsets("cpu", lengths))[0]
    expected = torch.autograd.grad(exact, wide, dout.double().cpu())
    for name, ours, e in zip(("q", "k", "v", "g", "beta"), found, expected, strict=True):
        error = float((ours.cpu().double() - e).norm() / e.norm())
        assert error < 8e-3, f"{name}: {error:.3g}"


@BACKENDS
def test_repeatable(device, backend):
    tokens = 20 if interpreted(device, backend) else 200
    rows = rows_of(tokens, (2, 4), (24, 40), torch.bfloat16, device, 7)
    dout = torch.ones_like(rows[2])

    def run():
        leaves = [x.clone().requires_grad_() for x in rows]
        out, final = train(leaves, [tokens - 7, 7], backend)
        return out, final, *torch.autograd.grad(out, leaves, dout)

    check_repeatable(run)


def test_the_chunked_reference_is_the_recurrent_one():
    rows = [x.double() for x in rows_of(150, (1, 3), (16, 24), torch.float64, "cpu", 13)]
    out, final = gated_delta_chunks_ref(*rows)
    expected, state = gated_delta_ref(*rows, ints("cpu", 0, 150))
    torch.testing.assert_close((out, final[None]), (expected, state), rtol=1e-9, atol=1e-12)


@BACKENDS
@pytest.mark.parametrize(
    "dtype,tokens",
    [(torch.float32, 1000), (torch.bfloat16, 1000), (torch.bfloat16, 32768)],
    ids=["fp32-1000", "bf16-1000", "bf16-32768"],
)
@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
def test_accuracy_against_the_stock_chunked_form(device, backend, dtype, tokens):
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    if interpreted(device, backend):
        tokens = 70
    draw = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(tokens, h, 32, generator=draw).to(device, dtype) for h in (1, 1, 2))
    g = -0.1 * torch.rand(tokens, 2, generator=draw).to(device)
    beta = torch.sigmoid(torch.randn(tokens, 2, generator=draw)).to(device, dtype)
    rows = q, k, v, g, beta
    out, final = train(rows, [tokens], backend)
    exact, exact_final = gated_delta_chunks_ref(*(x.cpu().double() for x in rows))
    options = {"use_qk_l2norm_in_kernel": True, "output_final_state": True}
    wide = (x.repeat_interleave(2, dim=1)[None] for x in (q, k))
    stock, stock_final = torch_chunk_gated_delta_rule(*wide, *(x[None] for x in (v, g, beta)), **options)

    def error(x, e):
        return float((x.cpu().double() - e).norm() / e.norm())

    for name, x, t, e in (("out", out, stock[0], exact), ("final state", final[0], stock_final[0], exact_final)):
        ours, theirs = error(x, e), error(t.to(dtype), e)  # a state too, as the dtype holds it
        assert ours <= 2 * theirs + 1e-7, f"{name}: {ours:.3g} against the stock form's {theirs:.3g}"


@BACKENDS
def test_opcheck(device, backend):
    rows = rows_of(5, (1, 2), (16, 16), torch.float32, device, 9)
    leaves = [x.requires_grad_() for x in rows]
    initial = torch.zeros(1, 2, 16, 16, device=device, requires_grad=True)
    args = *leaves, offsets(device, [5]), initial, 0.25, True, True, backend
    torch.library.opcheck(torch.ops.vexact.gated_delta_varlen.default, args)
    memory = Memory(rows, backend)
    for t in memory.tensors:
        t.zero_()
    step = ints(device, 1), ints(device, 5), offsets(device, [5]), 5
    args = *(x.detach() for x in rows), *memory.tensors, *step, 0, 0.25, True, backend
    torch.library.opcheck(torch.ops.vexact.gated_delta_paged.default, args)


@BACKENDS
def test_sequences_without_rows_on_a_gpu(device, backend):
    rows = rows_of(6, (1, 2), (16, 16), torch.float32, device, 10)
    initial = torch.randn(3, 2, 16, 16, generator=torch.Generator().manual_seed(0)).to(device)
    out, final = train(rows, [0, 6, 0], backend, initial_state=initial)
    expected, last = train(rows, [6], backend, initial_state=initial[1:2])
    assert_bitwise((out, final), (expected, torch.stack([initial[0], last[0], initial[2]])))
    _, final = train(cut(rows, 0, 0), [0, 0], backend)
    assert_bitwise(final, torch.zeros(2, 2, 16, 16, device=device))
    memory = Memory(rows, backend)
    before = [t.clone() for t in memory.tensors]
    out = memory.append({1: cut(rows, 0, 0), 0: rows})
    assert_bitwise(out[0], train(rows, [6], backend)[0])
    assert_bitwise([t[1] for t in memory.tensors], [t[1] for t in before])
    leaves = [x.detach().requires_grad_() for x in cut(rows, 0, 0)]
    initial.requires_grad_()
    _, final = train(leaves, [0, 0, 0], backend, initial_state=initial)
    assert_bitwise(torch.autograd.grad(final, initial, torch.ones_like(final))[0], torch.ones_like(initial))


def test_bad_arguments_are_named():
    rows = rows_of(5, (1, 2), (16, 16), torch.float32, "cpu", 11)
    q, k, v, g, beta = rows
    cu, op = ints("cpu", 0, 5), "gated_delta_varlen"
    heads = *(x.expand(5, 2, 16) for x in (q, k)), v[:, :1].expand(5, 3, 16), g, beta
    at = torch.tensor(2), torch.tensor(1)
    growing = g.index_put(at, torch.tensor(0.5))
    bad = {
        "q: got dtype int64": ((q.long(), k, v, g, beta), TypeError),
        "k: got dtype bfloat16, expected float32 as q has": ((q, k.bfloat16(), v, g, beta), TypeError),
        r"k: got shape \(4, 1, 16\), expected \(5, 1, 16\)": ((q, k[:4], v, g, beta), ValueError),
        r"v: got shape \(4, 2, 16\)": ((q, k, v[:4], g, beta), ValueError),
        "v: got 3 heads for k's 2": (heads, ValueError),
        "q: got heads of 8, expected 16 to 256": ((q[..., :8], k[..., :8], v, g, beta), ValueError),
        "g: got dtype float64, expected float32": ((q, k, v, g.double(), beta), TypeError),
        "beta: got dtype float64, expected float32": ((q, k, v, g, beta.double()), TypeError),
        r"beta: got shape \(5, 1\)": ((q, k, v, g, beta[:, :1]), ValueError),
        r"g\[2, 1\]: got 0.5, expected at most 0": ((q, k, v, growing, beta), ValueError),
        r"beta\[0, 0\]: got 2.5, expected from 0 to 2": ((q, k, v, g, beta.clone().fill_(2.5)), ValueError),
        r"beta\[0, 0\]: got -0.5, expected from 0 to 2": ((q, k, v, g, beta.clone().fill_(-0.5)), ValueError),
    }  # fmt: skip
    for message, (tensors, kind) in bad.items():
        with pytest.raises(kind, match=f"{op}: {message}"):
            vx.gated_delta_varlen(*tensors, cu)
    with pytest.raises(ValueError, match=rf"{op}: cu_seqlens: got 4 as its last value, expected 5"):
        vx.gated_delta_varlen(*rows, ints("cpu", 0, 4))
    with pytest.raises(ValueError, match=rf"{op}: cu_seqlens: got 2 after 3 at index 2"):
        vx.gated_delta_varlen(*rows, ints("cpu", 0, 3, 2, 5))
    with pytest.raises(TypeError, match=rf"{op}: initial_state: got dtype bfloat16, expected float32"):
        vx.gated_delta_varlen(*rows, cu, initial_state=torch.zeros(1, 2, 16, 16).bfloat16())
    with pytest.raises(
        ValueError, match=rf"{op}: initial_state: got shape \(2, 2, 16, 16\), expected \(1, 2, 16, 16\)"
    ):
        vx.gated_delta_varlen(*rows, cu, initial_state=torch.zeros(2, 2, 16, 16))
    with pytest.raises(TypeError, match=f"{op}: q: got dtype float16, which a GPU serves"):
        vx.gated_delta_varlen(*(x.half() for x in rows[:3]), g, beta, cu)
    out = vx.gated_delta_varlen(q, k, v, g * torch.nan, beta, cu)
    assert out.isnan().all()  # no error


def test_bad_arguments_of_slots_are_named():
    rows = rows_of(5, (1, 2), (16, 16), torch.float32, "cpu", 12)
    memory, op = Memory(rows, None), "gated_delta_paged"
    state, open_k, open_u, open_g = memory.tensors
    before = [t.clone() for t in memory.tensors]

    def run(slots=(1, 3), lens=(3, 2), cu=(0, 3, 5), longest=3, tensors=memory.tensors):
        return vx.gated_delta_paged(*rows, *tensors, *(ints("cpu", *x) for x in (slots, lens, cu)), longest)

    for message, options in {
        r"slots\[1\]: got 5, expected -1 \(none\) or one of 5 slots": {"slots": (1, 5)},
        r"slots\[0\]: got -2": {"slots": (-2, 3)},
        r"slots\[1\]: got 1, which is slots\[0\] too": {"slots": (1, 1)},
        r"context_lens\[1\]: got 1, expected at least 2": {"lens": (3, 1)},
        r"cu_seqlens_q: got 6 as its last value, expected 5": {"cu": (0, 3, 6)},
        r"max_seqlen_q: got 2, expected at least 3": {"longest": 2},
        r"slots: got shape \(3,\), expected \(2,\)": {"slots": (1, 2, 3)},
        r"open_u: got shape \(5, 32, 2, 16\), expected \(5, 64, 2, 16\)": {
            "tensors": (state, open_k, open_u[:, :32], open_g)
        },
        r"open_g: got shape \(4, 64, 2\), expected \(5, 64, 2\)": {"tensors": (state, open_k, open_u, open_g[:4])},
        r"state: got strides": {"tensors": (state.transpose(2, 3), open_k, open_u, open_g)},
    }.items():
        with pytest.raises(ValueError, match=f"{op}: {message}"):
            run(**options)
    for arg, at in (("state", 0), ("open_k", 1), ("open_u", 2), ("open_g", 3)):
        tensors = [t.bfloat16() if i == at else t for i, t in enumerate(memory.tensors)]
        with pytest.raises(TypeError, match=f"{op}: {arg}: got dtype bfloat16, expected float32"):
            run(tensors=tensors)
    with pytest.raises(RuntimeError, match=f"{op}: state requires a gradient"):
        run(tensors=[state.clone().requires_grad_(), open_k, open_u, open_g])
    assert_bitwise(memory.tensors, before)  # nothing was written


# delta_gates


def gates(a, b, dg, dbeta, a_log, dt_bias, backend):
    a, b = a.clone().requires_grad_(), b.clone().requires_grad_()
    out = vx.delta_gates(a, b, a_log, dt_bias, backend=backend)
    return *(x.detach() for x in out), *torch.autograd.grad(out, (a, b), (dg, dbeta))


def gate_inputs(rows, heads, dtype, device, seed):
    draw = torch.Generator().manual_seed(seed)
    a, b = (8 * torch.randn(rows, heads, generator=draw).to(dtype) for _ in "ab")
    dg, dbeta = torch.randn(rows, heads, generator=draw), torch.randn(rows, heads, generator=draw).to(dtype)
    a_log, dt_bias = torch.rand(heads, generator=draw).log(), torch.randn(heads, generator=draw)
    return tuple(x.to(device) for x in (a, b, dg, dbeta, a_log, dt_bias))


@BACKENDS
@DTYPES
@given(heads=st.sampled_from([1, 5, 32, 48]), rows=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_gates_stand_alone(device, backend, dtype, heads, rows, seed):
    *rowwise, a_log, dt_bias = gate_inputs(rows, heads, dtype, device, seed)
    check_rows(lambda *t: gates(*t, a_log, dt_bias, backend), *rowwise, seed=seed)


@BACKENDS
def test_gates_of_narrow_weights_alone_are_those_of_wide_ones(device, backend):
    """Which a checkpoint may hold in 16 bits: they are widened, and rounded nowhere."""
    a, b, dg, dbeta, *weights = gate_inputs(9, 5, torch.float32, device, 3)
    narrow = [x.bfloat16().requires_grad_() for x in weights]
    found = []
    for own in (narrow, [x.detach().float().requires_grad_() for x in narrow]):
        out = vx.delta_gates(a, b, *own, backend=backend)
        slopes = torch.autograd.grad(out, own, (dg, dbeta))
        found.append([*(x.detach() for x in out), *(x.bfloat16() for x in slopes)])
    assert_bitwise(*found)


@pytest.mark.parametrize("device,backend", room_backends("gated_delta", "triton"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@given(heads=st.sampled_from([1, 5, 32, 48]), rows=st.sampled_from([1, 3, 9, 1030]), seed=st.integers(0, 2**16))
def test_gates_on_a_gpu_have_the_bits_of_a_cpu(device, backend, dtype, heads, rows, seed):
    inputs = gate_inputs(rows, heads, dtype, "cpu", seed)
    found = gates(*(x.to(device) for x in inputs), backend)
    assert_bitwise([x.cpu() for x in found], gates(*inputs, "cpu"))


@BACKENDS
@DTYPES
def test_accuracy_of_gates_alone(device, backend, dtype):
    a, b, dg, dbeta, a_log, dt_bias = gate_inputs(500, 32, dtype, device, 0)
    assert float(a.max()) > 20  # where softplus is its argument

    def run(fn, *tensors, upstream):
        leaves = [x.detach().clone().requires_grad_() for x in tensors]
        out = fn(*leaves)
        return *(x.detach() for x in out), *torch.autograd.grad(out, leaves, upstream)

    def stock(a, b, a_log, dt_bias):
        return -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias), b.sigmoid()

    exact = run(delta_gates_ref, *(x.double() for x in (a, b, a_log, dt_bias)), upstream=(dg.double(), dbeta.double()))
    ours = run(lambda *t: vx.delta_gates(*t, backend=backend), a, b, a_log, dt_bias, upstream=(dg, dbeta))
    theirs = run(stock, a, b, a_log, dt_bias, upstream=(dg, dbeta))
    for name, o, t, e in zip(("g", "beta", "a", "b", "a_log", "dt_bias"), ours, theirs, exact, strict=True):
        error, stock_error = (float((x.double() - e).norm() / e.norm()) for x in (o, t))
        summed = 0.4 * len(a) ** 0.5 * 2**-24 if name in ("a_log", "dt_bias") else 1e-7  # in one accumulator
        assert error <= 2 * stock_error + summed, f"{name}: {error:.3g} against the stock form's {stock_error:.3g}"


@BACKENDS
def test_gates_repeat_and_opcheck(device, backend):
    a, b, dg, dbeta, a_log, dt_bias = gate_inputs(333, 48, torch.bfloat16, device, 1)

    def run():
        leaves = [x.clone().requires_grad_() for x in (a, b, a_log, dt_bias)]
        out = vx.delta_gates(*leaves, backend=backend)
        return *out, *torch.autograd.grad(out, leaves, (dg, dbeta))

    check_repeatable(run)
    args = [x[:3].float().requires_grad_() for x in (a, b)] + [x.requires_grad_() for x in (a_log, dt_bias)]
    torch.library.opcheck(torch.ops.vexact.delta_gates.default, (*args, torch.float32, backend))


def test_bad_arguments_of_gates_are_named():
    a, b, _, _, a_log, dt_bias = gate_inputs(3, 4, torch.float32, "cpu", 0)
    for message, args, kind in (
        ("a: got dtype int64", (a.long(), b, a_log, dt_bias), TypeError),
        ("b: got dtype bfloat16, expected float32 as a has", (a, b.bfloat16(), a_log, dt_bias), TypeError),
        (r"b: got shape \(3, 2\), expected \(3, 4\)", (a, b[:, :2], a_log, dt_bias), ValueError),
        (r"a_log: got shape \(2,\), expected \(4,\)", (a, b, a_log[:2], dt_bias), ValueError),
        ("dt_bias: got dtype float64", (a, b, a_log, dt_bias.double()), TypeError),
    ):
        with pytest.raises(kind, match=f"delta_gates: {message}"):
            vx.delta_gates(*args)
    g, beta = vx.delta_gates(a[:0], b[:0], a_log, dt_bias)
    assert g.shape == beta.shape == (0, 4)
