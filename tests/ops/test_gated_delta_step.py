"""conv_gated_delta_paged: the bits of the three ops that it is made of, in what it returns and in slots."""

import functools
import itertools

import pytest
import test_gated_delta_singles
import torch
from conftest import Kinds, interpreted, room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops._core.admit import canonical_by_rule
from vexact_ops.testing import assert_bitwise

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("gated_delta"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
KINDS = Kinds(2, seed=4, heads=[(1, 1), (2, 4), (1, 2)], dims=[(16, 16), (24, 40), (64, 64), (128, 128)], taps=[4, 3])
SLOTS = 5


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


class Layer:
    """A layer's weights, and slots whose rings hold NaN where nothing is known."""

    def __init__(self, heads, dims, taps, dtype, device, seed, bias=False):
        (self.hk, self.hv), (self.dk, self.dv), self.dtype, self.device = heads, dims, dtype, device
        self.draw = torch.Generator().manual_seed(seed)
        self.channels = 2 * self.hk * self.dk + self.hv * self.dv
        self.conv = self.new(self.channels, taps).to(dtype), self.new(self.channels).to(dtype) if bias else None
        self.gates = self.new(self.hv), self.new(self.hv).to(dtype)
        hk, hv, dk, dv = self.hk, self.hv, self.dk, self.dv
        sizes = (4, self.channels), (hv, dk, dv), (64, hk, dk), (64, hv, dv), (64, hv)
        kinds = dtype, torch.float32, dtype, torch.float32, torch.float32
        self.memory = [torch.full((SLOTS, *s), torch.nan, dtype=t, device=device) for s, t in zip(sizes, kinds)]

    def new(self, *shape):
        return torch.randn(shape, generator=self.draw).to(self.device)

    def rows(self, tokens):
        """x, a, b: parts of one projection, of unlike magnitudes."""
        whole = self.new(tokens, self.channels + 2 * self.hv) * torch.exp2(self.new(tokens, 1).round())
        return whole.to(self.dtype).split_with_sizes((self.channels, self.hv, self.hv), 1)

    def apart(self, x, a, b, memory, step, doubled, backend, **options):
        taps, *rest = memory
        slots = step[:3]
        qkv = vx.causal_conv_paged(x, *self.conv, taps, *slots, backend=None if backend == "cuda" else backend)
        keys = self.hk * self.dk
        q, k, v = qkv.split_with_sizes((keys, keys, self.hv * self.dv), 1)
        q, k, v = (t.unflatten(1, (-1, d)) for t, d in ((q, self.dk), (k, self.dk), (v, self.dv)))
        g, beta = vx.delta_gates(a, b, *self.gates, backend=backend)
        beta = beta * 2.0 if doubled else beta
        return vx.gated_delta_paged(q, k, v, g, beta, *rest, *step, **options, backend=backend)

    def together(self, x, a, b, memory, step, doubled, backend, **options):
        taps, *rest = memory
        given = *self.conv, taps, a, b, *self.gates, *rest, *step
        return vx.conv_gated_delta_paged(x, *given, **options, double_beta=doubled, backend=backend)


@BACKENDS
@DTYPES
@given(
    kind=KINDS.drawn,
    bias=st.booleans(),
    doubled=st.booleans(),
    first=st.integers(1, 70),
    counts=st.lists(st.sampled_from([1, 1, 1, 2, 5]), min_size=1, max_size=6),
    seed=st.integers(0, 2**16),
)
def test_the_bits_of_the_three_ops(device, backend, dtype, kind, bias, doubled, first, counts, seed):
    """Of two sequences and a row of padding: a prefill, then single rows and chunks."""
    kind = KINDS.at(kind, device, dtype)
    if interpreted(device, backend):
        first, counts = min(first, 5), counts[:2]
    layer = Layer(kind.heads, kind.dims, kind.taps, dtype, device, seed, bias)
    memory, options = [t.clone() for t in layer.memory], {"scale": 0.3, "qk_l2norm": seed % 2 == 0}
    lengths = [0, 0]
    for count in (first, *counts):
        lengths = [lengths[0] + count, lengths[1] + 1]
        x, a, b = layer.rows(count + 2)
        cu = 0, count, count + 1, count + 2
        step = ints(device, 3, 0, -1), ints(device, *lengths, 1), ints(device, *cu), count
        expected = layer.apart(x, a, b, layer.memory, step, doubled, backend, **options)
        got = layer.together(x, a, b, memory, step, doubled, backend, **options)
        assert_bitwise([got, *memory], [expected, *layer.memory], f"{count} rows up to {lengths}")
    assert not layer.memory[0][3].isnan().all(), "the ring was written"


@BACKENDS
@DTYPES
@given(
    kind=KINDS.drawn,
    doubled=st.booleans(),
    ones=st.integers(1, 3),
    behind=st.lists(st.sampled_from([0, 1, 2, 17, 64, 65]), max_size=2),
    seed=st.integers(0, 2**16),
)
def test_single_rows_that_come_first_change_nothing(device, backend, dtype, kind, doubled, ones, behind, seed):
    """Outputs and memory of three steps, which go on from each other; behind them single rows may stand too."""
    kind = KINDS.at(kind, device, dtype)
    if interpreted(device, backend):
        ones, behind = min(ones, 2), [min(n, 3) for n in behind[:1]]
    layer = Layer(kind.heads, kind.dims, kind.taps, dtype, device, seed)
    lengths = [*[1] * ones, *behind]
    steps, lens = [], [seed % 67] * len(lengths)
    for _ in range(3):
        lens = [n + m for n, m in zip(lens, lengths)]
        slots = [seed % 2, 2, -1, 4, 3][: len(lengths)]
        cu = [0, *itertools.accumulate(lengths)]
        steps.append((layer.rows(cu[-1]), (ints(device, *slots), ints(device, *lens), ints(device, *cu), max(lengths))))
    held = [torch.randn(t.shape, generator=layer.draw).to(t) * 0.1 for t in layer.memory]

    def run(singles):
        memory = [t.clone() for t in held]
        given = [(*rows, memory, step, doubled, backend) for rows, step in steps]
        of = layer.together if singles is not None else layer.apart
        options = {} if singles is None else {"singles": singles}
        return [*(of(*x, **options) for x in given), *memory]

    expected = run(None)
    for singles in range(next((i for i, n in enumerate(lengths) if n != 1), len(lengths)) + 1):
        assert_bitwise(run(singles), expected, f"{singles} sequences of one row come first")


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_single_rows_up_to_a_chunk_s_end_and_beyond(device, backend, dtype):
    """As a model decodes: each kernel's ends of blocks and chunks, and rows of NaN beside others."""
    if dtype == torch.float16 and device == "cpu":
        pytest.skip("the C++ kernels have no fp16")
    if interpreted(device, backend):
        pytest.skip("slow, and no other arithmetic than above")
    layer = Layer((2, 4), (128, 128), 4, dtype, device, 5)
    memory, lengths, cu = [t.clone() for t in layer.memory], [0, 7, 62, 130], ints(device, 0, 1, 2, 3, 4)
    for ring in (layer.memory, memory):
        for t in ring:
            t.copy_(torch.randn(t.shape, generator=torch.Generator().manual_seed(t.dim())).to(t) * 0.1)
    for _ in range(67 if device != "cpu" else 6):
        lengths = [n + 1 for n in lengths]
        x, a, b = layer.rows(4)
        x[1] = torch.nan
        step = ints(device, 4, 1, 0, 2), ints(device, *lengths), cu, 1
        expected = layer.apart(x, a, b, layer.memory, step, False, backend)
        got = layer.together(x, a, b, memory, step, False, backend)
        assert_bitwise([got, *memory], [expected, *layer.memory], f"up to {lengths}")


@BACKENDS
def test_opcheck(device, backend):
    layer = Layer((1, 2), (16, 16), 4, torch.float32, device, 6)
    for t in layer.memory:
        t.zero_()
    (x, a, b), (taps, *rest) = layer.rows(2), layer.memory
    step = ints(device, 1, 2), ints(device, 1, 1), ints(device, 0, 1, 2), 1
    args = x, *layer.conv, taps, a, b, *layer.gates, *rest, *step, 1, 0.25, True, False, backend
    torch.library.opcheck(torch.ops.vexact.conv_gated_delta_paged.default, args)


def test_bad_arguments_are_named():
    layer, op = Layer((1, 2), (16, 16), 4, torch.float32, "cpu", 7), "conv_gated_delta_paged"
    x, a, b = layer.rows(2)
    before = [t.clone() for t in layer.memory]
    taps, state, open_k, open_u, open_g = layer.memory

    def run(
        x=x, weight=layer.conv[0], taps=taps, a=a, memory=(state, open_k, open_u, open_g), lens=(1, 1), cu=(0, 1, 2),
        longest=1, singles=0,
    ):  # fmt: skip
        step = ints("cpu", 1, 2), ints("cpu", *lens), ints("cpu", *cu), longest
        return vx.conv_gated_delta_paged(x, weight, None, taps, a, b, *layer.gates, *memory, *step, singles=singles)

    bad = {
        "x: got dtype float64": ({"x": x.double()}, TypeError),
        r"x: got shape \(2, 32\)": (
            {"x": x[:, :32], "weight": layer.conv[0][:32], "taps": taps[..., :32].clone()},
            ValueError,
        ),
        r"weight: got shape \(63, 4\)": ({"weight": layer.conv[0][:63]}, ValueError),
        r"taps: got shape \(3, 4, 64\), expected \(5, ring, 64\)": ({"taps": taps[:3]}, ValueError),
        "taps: got a ring of 2": ({"taps": taps[:, :2].contiguous()}, ValueError),
        r"b: got shape \(2, 2\), expected \(1, 2\)": ({"a": a[:1]}, ValueError),
        "open_u: got 3 heads for k's 2": (
            {"memory": (state, open_k.expand(5, 64, 2, 16), open_u[:, :, :1].expand(5, 64, 3, 16), open_g)},
            ValueError,
        ),
        "state: got dtype bfloat16": ({"memory": (state.bfloat16(), open_k, open_u, open_g)}, TypeError),
        r"context_lens: got shape \(1,\)": ({"lens": (1,)}, ValueError),
        "max_seqlen_q: got float": ({"longest": 1.0}, TypeError),
        "singles: got bool, expected an int": ({"singles": True}, TypeError),
        "singles: got 3, expected 0 to 2, the sequences": ({"singles": 3}, ValueError),
        "singles: got -1, expected 0 to 2": ({"singles": -1}, ValueError),
        "singles: got 1, expected at most 0: sequence 0 has 0 rows": (
            {"singles": 1, "cu": (0, 0, 2), "longest": 2},
            ValueError,
        ),
        "singles: got 2, expected at most 0: sequence 0 has 2 rows": (
            {"singles": 2, "cu": (0, 2, 2), "longest": 2},
            ValueError,
        ),
        "cu_seqlens_q: got 3 as its last value, expected 2, the rows of x": (
            {"singles": 2, "cu": (0, 1, 3)},
            ValueError,
        ),
    }
    for message, (changes, kind) in bad.items():
        with pytest.raises(kind, match=f"{op}: {message}"):
            run(**changes)
    with pytest.raises(RuntimeError, match=f"{op}: weight requires a gradient, and this op has none"):
        run(weight=layer.conv[0].clone().requires_grad_())
    assert_bitwise(layer.memory, before)  # nothing was written


def test_the_three_ops_are_told_of_single_rows_too(monkeypatch):
    from vexact_ops.gated_delta import step

    layer, told = Layer((1, 2), (16, 16), 4, torch.float32, "cpu", 9), []

    def watched(op, *args, **options):
        told.append(options["singles"])
        return op(*args, **options)

    for name in ("causal_conv_paged", "gated_delta_paged"):
        monkeypatch.setattr(step, name, functools.partial(watched, getattr(step, name)))
    of = ints("cpu", 1, 2, 0), ints("cpu", 1, 1, 3), ints("cpu", 0, 1, 2, 5), 3
    layer.together(*layer.rows(5), layer.memory, of, False, "cpu", singles=2)
    assert told == [2, 2]


class Kernels(test_gated_delta_singles.Kernels):
    """And that of single rows with all before it. What one leaves to another stays NaN."""

    def step(self, x, *args):
        *given, slots, lens, cu, scale, l2norm, doubled, _, _, _, out = args
        weight, bias, taps, a, b, *rest = given
        for i, (begin, end) in enumerate(itertools.pairwise(cu.tolist())):
            if end - begin == 1:
                row, step = slice(begin, end), (slots[i : i + 1], lens[i : i + 1], cu.new_tensor([0, 1]), 1)
                of = x[row], weight, bias, taps, a[row], b[row], *rest, *step
                out[row] = vx.conv_gated_delta_paged(*of, scale=scale, qk_l2norm=l2norm, double_beta=doubled)

    @staticmethod
    def conv_behind(x, weight, bias, taps, slots, lens, cu, singles, silu, y):
        assert silu
        first = int(cu[singles])
        step = slots[singles:], lens[singles:], cu[singles:] - first
        y[:first], y[first:] = torch.nan, vx.causal_conv_paged(x[first:], weight, bias, taps, *step)


@pytest.mark.parametrize("behind", [(70, 2), (65, 1, 0, 3, 1), ()], ids=str)
def test_a_mixed_call_s_single_rows_are_one_kernel_s(behind, monkeypatch):
    """With CPU kernels in the places of a GPU's: which of them computes what, and that nothing is left out."""
    from vexact_ops.gated_delta import cpu, cuda, triton

    lengths, kernels, asked, admitted = [1, 1, 1, *behind], Kernels(), [], [True]
    layer = Layer((1, 2), (16, 32), 4, torch.bfloat16, "cpu", 8)
    layer.memory = [torch.randn(8, *t.shape[1:], generator=layer.draw).to(t) * 0.1 for t in layer.memory]
    monkeypatch.setattr(cuda, "_native", lambda: kernels)
    monkeypatch.setattr(cuda, "delta_gates_fwd", cpu.delta_gates_fwd)
    monkeypatch.setattr(cuda.causal_conv, "behind", kernels.conv_behind)
    monkeypatch.setattr(triton, "append", lambda *args: None)  # a CPU's kernel has done that
    monkeypatch.setattr(cuda.gpu, "multiprocessors", lambda device: 132)

    def route(call):
        asked.append(call)
        name = f"sm90 {call.part} 32" if admitted[0] else "triton"
        return canonical_by_rule(name, "for the test")

    monkeypatch.setattr(cuda, "route", route)
    x, a, b = layer.rows(sum(lengths))
    cu = [0, *itertools.accumulate(lengths)]
    lens = [n + m for n, m in zip(lengths, (0, 1, 63, 64, 100, 5, 0, 62))]
    longest, count = max(lengths), len(lengths)
    step = ints("cpu", *[3, -1, 0, 2, 5, 1, 7, 4][:count]), ints("cpu", *lens), ints("cpu", *cu)
    memory = [t.clone() for t in layer.memory]
    expected = layer.apart(x, a, b, memory, (*step, longest), True, "cpu"), *memory
    assert vx.conv_gated_delta_paged  # its operator is known once it is asked for
    names = [argument.name for argument in torch.ops.vexact.conv_gated_delta_paged.default._schema.arguments]
    for singles in (0, 1, 2, 3):
        asked.clear(), kernels.chunked.clear()
        memory = [t.clone() for t in layer.memory]
        taps, *rest = memory
        given = x, *layer.conv, taps, a, b, *layer.gates, *rest, *step, longest, singles, 16**-0.5, True, True
        out, found = cuda.step_fwd(*given), cuda.explain("conv_gated_delta_paged", **dict(zip(names, given)))
        if longest > 1 and singles == 0:
            assert out is None and not asked and [d.chosen.name for _, d in found] == ["apart"]
            continue
        assert_bitwise((out, *memory), expected, f"{singles}")
        left = count - singles if longest > 1 else 0
        assert kernels.chunked == [(left, None)][: left > 0]
        assert [part for part, _ in found] == ["step", "chunks"][: 1 + (left > 0)] and asked[
            : len(asked) // 2
        ] * 2 == asked
        assert asked[0].heads == count * layer.hv, "of all sequences, whatever they have"
        if left:  # asked for as where the three ops are computed one by one
            assert asked[1] == cuda.Call.of("chunks", *heads_of(x, layer), True, left, *rest)
        admitted[0] = False
        assert cuda.step_fwd(*given) is None
        assert len(cuda.explain("conv_gated_delta_paged", **dict(zip(names, given)))) == 1
        admitted[0] = True


def heads_of(x, layer):
    keys = layer.hk * layer.dk
    q, k, v = torch.empty_like(x).split_with_sizes((keys, keys, layer.hv * layer.dv), 1)
    return q.unflatten(1, (-1, layer.dk)), k.unflatten(1, (-1, layer.dk)), v.unflatten(1, (-1, layer.dv))
