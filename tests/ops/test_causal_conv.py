"""causal_conv: sequences stand alone, any split has training's bits, gradients, bad arguments are named."""

import pytest
import torch
from conftest import Kinds, interpreted, room_backends
from hypothesis import example, given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.causal_conv.reference import causal_conv_ref
from vexact_ops.testing import assert_bitwise, check_repeatable

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("causal_conv"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
KINDS = Kinds(2, seed=1, channels=[1, 16, 70, 300], width=[2, 3, 4, 8], bias=[True, False], activation=["silu", None])


def ints(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def offsets(device, lengths):
    return ints(device, *torch.tensor([0, *lengths]).cumsum(0).tolist())


def inputs(tokens, kind, dtype, device, seed):
    """Taps that nearly cancel, so that a changed order shows."""
    draw = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, kind.channels, generator=draw).to(dtype)
    weight = torch.randn(kind.channels, kind.width, generator=draw)
    weight[:, 1::2] = -weight[:, : kind.width // 2 * 2 : 2] * (1 + 2**-6)
    bias = torch.randn(kind.channels, generator=draw).to(dtype).to(device) if kind.bias else None
    return x.to(device), weight.to(dtype).to(device), bias


def check_alone(run, x, lengths):
    whole = run(x, lengths)
    begin = 0
    for number, length in enumerate(lengths):
        assert_bitwise(run(x[begin : begin + length], [length]), whole[begin : begin + length], f"sequence {number}")
        begin += length
    beside = x.clone()
    beside[: begin - lengths[-1]] = torch.nan
    assert_bitwise(run(beside, lengths)[begin - lengths[-1] :], whole[begin - lengths[-1] :], "NaN next door")


@BACKENDS
@DTYPES
@given(kind=KINDS.drawn, lengths=st.lists(st.integers(1, 40), min_size=2, max_size=5), seed=st.integers(0, 2**16))
def test_sequences_stand_alone(device, backend, dtype, kind, lengths, seed):
    kind = KINDS.at(kind, device, dtype)
    if interpreted(device, backend):
        lengths = [min(n, 12) for n in lengths[:3]]
    x, weight, bias = inputs(sum(lengths), kind, dtype, device, seed)

    def run(x, lengths):
        cu = offsets(device, lengths)
        return vx.causal_conv(x, weight, bias, cu_seqlens=cu, activation=kind.activation, backend=backend)

    check_alone(run, x, lengths)
    wide = torch.cat([x, x], 1)[:, : kind.channels]  # rows of a wider tensor, as a projection gives them
    assert_bitwise(run(wide, lengths), run(x, lengths))


def test_rows_of_another_sequence_are_caught():
    x = torch.randn(20, 16, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match="differ"):
        check_alone(lambda x, lengths: vx.causal_conv(x, weight), x, [12, 8])


@BACKENDS
@DTYPES
@given(data=st.data(), kind=KINDS.drawn, tokens=st.integers(1, 60), seed=st.integers(0, 2**16))
def test_any_split_of_one_alone_has_trainings_bits(device, backend, dtype, data, kind, tokens, seed):
    """Two sequences in each call, in slots that hold NaN at first; rows that were too many are forgotten."""
    kind = KINDS.at(kind, device, dtype)
    x, weight, bias = inputs(2 * tokens, kind, dtype, device, seed)
    options = {"activation": kind.activation, "backend": backend}
    expected = [vx.causal_conv(t, weight, bias, **options) for t in (x[:tokens], x[tokens:])]
    ring = 16
    room = ring - kind.width + 1
    taps = torch.full((4, ring, kind.channels), torch.nan, dtype=dtype, device=device)
    at, found = 0, ([], [])
    while at < tokens:
        count = min(data.draw(st.sampled_from([1, 1, 2, 3, 5, 17, 40])), tokens - at)
        drafts = min(data.draw(st.integers(0, room)), room) if at else 0
        if drafts:
            wrong = torch.full((drafts, kind.channels), 3.0, dtype=dtype, device=device)
            step = ints(device, 2), ints(device, at + drafts), offsets(device, [drafts])
            vx.causal_conv_paged(wrong, weight, bias, taps, *step, **options)
        both = torch.cat([x[at : at + count], x[tokens + at : tokens + at + count]])
        step = ints(device, 2, 0), ints(device, at + count, at + count), offsets(device, [count, count])
        for outs, y in zip(found, vx.causal_conv_paged(both, weight, bias, taps, *step, **options).split(count)):
            outs.append(y)
        at += count
    for outs, e in zip(found, expected, strict=True):
        assert_bitwise(torch.cat(outs), e)
    for last in range(min(tokens, ring)):
        assert_bitwise(taps[0, (tokens - 1 - last) % ring], x[2 * tokens - 1 - last])
    assert taps[[1, 3]].isnan().all()


@BACKENDS
@DTYPES
@pytest.mark.parametrize("width,aligned", [(4, True), (4, False), (3, True)], ids=["4 taps", "4 off a boundary", "3"])
@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 1), (3, 0, 0, 1, 1)], ids=["a row each", "unevenly"])
def test_as_many_rows_as_sequences_on_a_gpu_have_the_bits_of_more(device, backend, dtype, width, aligned, lengths):
    """Outputs and rings: with another sequence in the call, of two rows, other kernels compute it on a GPU."""
    draw = torch.Generator().manual_seed(5)
    x, bias = (torch.randn(*s, generator=draw).to(device, dtype) for s in ((7, 70), (70,)))
    weight = torch.randn(70 * width + 1, generator=draw).to(device, dtype)
    weight = weight[: 70 * width].view(70, width) if aligned else weight[1:].view(70, width)
    held = torch.randn(8, 8, 70, generator=draw).to(device, dtype)
    slots, before = [4, 7, 0, -1, 3, 2], [64, 2, 0, 5, 1, 2]

    def run(count):
        taps, rows = held.clone(), [*lengths, 2][:count]
        lens = [a + b for a, b in zip(before, rows)]
        step = ints(device, *slots[:count]), ints(device, *lens), offsets(device, rows)
        y = vx.causal_conv_paged(x[: sum(rows)], weight, bias, taps, *step, backend=backend)
        return y[:5], taps[[0, 1, 3, 4, 5, 6, 7]]

    assert_bitwise(run(5), run(6))


def check_singles(run, most):
    """run(singles): the bytes are the same, whatever number is given of sequences that have one row and come first."""
    expected = run(0)
    for singles in range(1, most + 1):
        assert_bitwise(run(singles), expected, f"{singles} sequences of one row come first")


@BACKENDS
@DTYPES
@example(kind=0, ones=2, behind=[2, 3], seed=0)
@given(
    kind=KINDS.drawn,
    ones=st.integers(1, 4),
    behind=st.lists(st.sampled_from([0, 1, 2, 5, 17, 40]), max_size=3),
    seed=st.integers(0, 2**16),
)
def test_single_rows_that_come_first_on_a_gpu_change_nothing(device, backend, dtype, kind, ones, behind, seed):
    """Outputs and rings; behind them single rows may stand too, and sequences without any."""
    kind, lengths = KINDS.at(kind, device, dtype), [*[1] * ones, *behind]
    x, weight, bias = inputs(sum(lengths), kind, dtype, device, seed)
    draw = torch.Generator().manual_seed(seed)
    slots = torch.randperm(len(lengths) + 2, generator=draw)[: len(lengths)]
    slots[torch.randint(len(lengths), (1,), generator=draw)] = -1
    before = torch.tensor([0, 1, 2, 15, 16, 70])[torch.randint(6, slots.shape, generator=draw)]
    held = torch.randn(len(lengths) + 2, 16, kind.channels, generator=draw).to(device, dtype)
    step = ints(device, *slots), ints(device, *(before + torch.tensor(lengths))), offsets(device, lengths)

    def run(singles):
        taps = held.clone()
        options = {"activation": kind.activation, "backend": backend}
        return vx.causal_conv_paged(x, weight, bias, taps, *step, singles=singles, **options), taps

    check_singles(run, next((i for i, length in enumerate(lengths) if length != 1), len(lengths)))


@pytest.mark.parametrize("cut_alike", [True, False])
def test_slots_that_are_not_cut_as_rows_are_are_caught(cut_alike):
    """What a kernel does that trusts the number: the first sequences by one call, the others by another."""
    draw, lengths = torch.Generator().manual_seed(0), [1, 1, 1, 5, 2]
    x, weight, held = (torch.randn(*s, generator=draw) for s in ((10, 16), (16, 4), (7, 4, 16)))
    slots, lens, cu = ints("cpu", 4, 2, 0, 5, 1), ints("cpu", 9, 3, 65, 7, 30), offsets("cpu", lengths)

    def run(singles):
        taps, shift, outs = held.clone(), 0 if cut_alike or not singles else 1, []
        for part, ends in ((slice(0, singles), cu[: singles + 1]), (slice(singles, None), cu[singles:] - singles)):
            own = slots.roll(shift)[part], lens[part], ends
            outs.append(vx.causal_conv_paged(x[part], weight, None, taps, *own))
        return torch.cat(outs), taps

    if cut_alike:
        check_singles(run, 3)
    else:
        with pytest.raises(AssertionError, match="differ"):
            check_singles(run, 3)


class Launches:
    """Stands for a Triton kernel: its grids and what it was given, also in a list that several have."""

    def __init__(self, every: list):
        self.calls, self.every = [], every

    def __getitem__(self, grid):
        def launched(*args, **kwargs):
            self.calls.append((grid, args))
            self.every.append(self)

        return launched


def test_single_rows_that_come_first_do_not_look_for_their_sequences(monkeypatch):
    triton = pytest.importorskip("vexact_ops.causal_conv.triton")
    every = []
    step, fwd = kernels = [Launches(every) for _ in range(2)]
    for name, kernel in zip(("_step_kernel", "_fwd_kernel"), kernels):
        monkeypatch.setattr(triton, name, kernel)
    monkeypatch.setattr(triton, "early", lambda x: {})
    x, weight, taps = torch.randn(300, 512), torch.randn(512, 4), torch.zeros(9, 4, 512)
    lengths = [1, 1, 1, 1, 1, 95, 200]

    def grids(singles, behind=False):
        for calls in (every, *(kernel.calls for kernel in kernels)):
            calls.clear()
        given = x, weight, None, taps, ints("cpu", *range(7)), ints("cpu", *lengths), offsets("cpu", lengths)
        triton.behind(*given, singles, True, x.new_empty(x.shape)) if behind else triton.paged_fwd(
            *given, singles, True
        )
        return [[grid[0] for grid, _ in kernel.calls] for kernel in kernels]

    assert grids(0) == [[7], [-(-300 // triton._tile(300, 512)["ROWS"])]]
    assert grids(5) == [[7], [-(-295 // triton._tile(295, 512)["ROWS"])]]
    assert every == [fwd, step]  # which overwrites what the other reads
    assert grids(5, behind=True) == [[2], grids(5)[1]]
    for kernel in kernels:  # which row is the first, how many sequences are computed
        assert 5 in [value for value in kernel.calls[0][1] if isinstance(value, int)]
    given = [t for kernel in kernels for _, args in kernel.calls for t in args if isinstance(t, torch.Tensor)]
    assert all(t.data_ptr() % 16 == 0 for t in given)  # or Triton would compile them anew


@BACKENDS
@DTYPES
@pytest.mark.parametrize("singles", [0, 1, 3])
def test_sequences_behind_another_kernel_s(device, backend, dtype, singles):
    """Their rows and rings, and nothing of those before them, which another kernel may have written already."""
    if backend != "triton":
        pytest.skip("a GPU's whole steps ask for it")
    from vexact_ops.causal_conv import triton

    kind = KINDS.at(0, device, dtype)
    lengths, known, slots = [1, 1, 1, 5, 0, 1, 7], [0, 2, 9, 3, 4, 2, 0], [3, -1, 0, 2, 5, 1, 6]
    x, weight, bias = inputs(sum(lengths), kind, dtype, device, singles)
    ring = torch.randn(8, 8, kind.channels, generator=torch.Generator().manual_seed(3)).to(dtype).to(device)
    lens = ints(device, *(n + m for n, m in zip(known, lengths)))
    step = ints(device, *slots), lens, offsets(device, lengths), singles
    expected, rings = ring.clone(), ring.clone()
    of_all = triton.paged_fwd(x, weight, bias, expected, *step, True)
    y = torch.full_like(x, torch.nan)
    triton.behind(x, weight, bias, rings, *step, True, y)
    assert_bitwise(y[singles:], of_all[singles:])
    assert y[:singles].isnan().all()
    before = [slot for slot in slots[:singles] if slot >= 0]
    expected[before] = ring[before]
    assert_bitwise(rings, expected)


def test_a_call_that_forgets_its_taps_is_caught():
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(0))
    weight = torch.randn(16, 4, generator=torch.Generator().manual_seed(1))
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(
            torch.cat([vx.causal_conv(x[:5], weight), vx.causal_conv(x[5:], weight)]), vx.causal_conv(x, weight)
        )


@BACKENDS
def test_no_slot_stores_nothing_on_a_gpu(device, backend):
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0)).to(device)
    weight, taps = torch.ones(16, 4, device=device), torch.full((2, 4, 16), torch.nan, device=device)
    step = ints(device, -1, 1), ints(device, 99, 2), ints(device, 0, 3, 5)
    y = vx.causal_conv_paged(x, weight, None, taps, *step, backend=backend)
    assert_bitwise(y, vx.causal_conv(x, weight, cu_seqlens=ints(device, 0, 3, 5), backend=backend))
    assert_bitwise(taps[1, :2], x[3:])
    assert taps[0].isnan().all() and taps[1, 2:].isnan().all()


@BACKENDS
@DTYPES
@given(kind=KINDS.drawn, seed=st.integers(0, 2**16))
def test_gradients_of_a_sequence_stand_alone(device, backend, dtype, kind, seed):
    kind, lengths = KINDS.at(kind, device, dtype), [2, 1, 5] if interpreted(device, backend) else [9, 1, 70]
    x, weight, bias = inputs(sum(lengths), kind, dtype, device, seed)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)

    def dx(x, dy, lengths):
        x = x.detach().requires_grad_()
        cu = offsets(device, lengths)
        y = vx.causal_conv(x, weight, bias, cu_seqlens=cu, activation=kind.activation, backend=backend)
        return torch.autograd.grad(y, x, dy)[0]

    expected, begin = dx(x, dy, lengths), 0
    for length in lengths:
        own = slice(begin, begin + length)
        assert_bitwise(dx(x[own], dy[own], [length]), expected[own])
        begin += length
    before = sum(lengths[:2])
    beside = torch.cat([torch.full_like(x[:before], torch.nan), x[before:]])
    assert_bitwise(dx(beside, dy, lengths)[before:], expected[before:], "NaN next door")


@BACKENDS
@DTYPES
@pytest.mark.parametrize("activation", ["silu", None])
def test_accuracy_on_a_gpu(device, backend, dtype, activation):
    """At most twice the error of torch's convolution and activation in the same dtype, gradients too."""
    draw = torch.Generator().manual_seed(2)
    x, weight, bias = (torch.randn(*s, generator=draw).to(device, dtype) for s in ((300, 48), (48, 4), (48,)))
    dy = torch.randn(300, 48, generator=draw).to(device, dtype)

    def stock(x, weight, bias):
        y = torch.nn.functional.conv1d(x.t()[None], weight[:, None], bias, padding=3, groups=48)[0, :, :300].t()
        return torch.nn.functional.silu(y) if activation else y

    def run(fn, *tensors, dy=dy):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = fn(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    wide = [t.double() for t in (x, weight, bias)]
    exact = run(lambda *t: causal_conv_ref(*t, activation=activation), *wide, dy=dy.double())
    ours = run(lambda *t: vx.causal_conv(*t, activation=activation, backend=backend), x, weight, bias)
    theirs = run(stock, x, weight, bias)
    for name, o, t, e in zip(("y", "dx", "dweight", "dbias"), ours, theirs, exact, strict=True):
        error, stock_error = (float((v.double() - e).norm() / e.norm()) for v in (o, t))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"


@BACKENDS
@DTYPES
def test_repeatable(device, backend, dtype):
    draw = torch.Generator().manual_seed(3)
    leaves = [torch.randn(*s, generator=draw).to(device, dtype).requires_grad_() for s in ((400, 70), (70, 4), (70,))]
    cu = ints(device, 0, 3, 200, 200, 400)

    def run():
        y = vx.causal_conv(*leaves, cu_seqlens=cu, backend=backend)
        return y, *torch.autograd.grad(y.float().sin().sum(), leaves)

    check_repeatable(run)


@BACKENDS
def test_opcheck(device, backend):
    x, weight, bias = (torch.randn(*s, device=device, requires_grad=True) for s in ((5, 16), (16, 4), (16,)))
    cu = ints(device, 0, 2, 5)
    torch.library.opcheck(torch.ops.vexact.causal_conv.default, (x, weight, bias, cu, True, backend))
    taps, step = torch.zeros(3, 4, 16, device=device), (ints(device, 2, 0), ints(device, 2, 3), cu)
    args = x.detach(), weight.detach(), bias.detach(), taps, *step, 0, True, backend
    torch.library.opcheck(torch.ops.vexact.causal_conv_paged.default, args)


@pytest.mark.parametrize("device,backend", room_backends("causal_conv", "triton"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("activation", ["silu", None])
def test_a_gpu_has_the_bits_of_a_cpu(device, backend, dtype, activation):
    draw = torch.Generator().manual_seed(4)
    lengths = [7, 0, 17] if interpreted(device, backend) else [30, 0, 70]
    tensors = [torch.randn(*s, generator=draw).to(dtype) for s in ((sum(lengths), 70), (70, 4), (70,))]
    dy = torch.randn(sum(lengths), 70, generator=draw).to(dtype)

    def run(device, backend):
        leaves = [t.to(device).requires_grad_() for t in tensors]
        options = {"cu_seqlens": offsets(device, lengths), "activation": activation, "backend": backend}
        y = vx.causal_conv(*leaves, **options)
        return [t.detach().cpu() for t in (y, torch.autograd.grad(y, leaves[0], dy.to(device))[0])]

    assert_bitwise(run(device, backend), run("cpu", "cpu"))


TILES = {"a row": (1, 1), "fewer than sequences": (8, 4), "more": (32, 4), "two ahead": (4, 2)}


@pytest.mark.parametrize("device,backend", room_backends("causal_conv", "triton"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("width", [2, 4, 8])
@pytest.mark.parametrize("tile", TILES.values(), ids=TILES)
def test_rows_walked_in_any_tile_have_the_bits_of_a_cpu(device, backend, dtype, width, tile, monkeypatch):
    """Sequences that begin and end anywhere in a tile, some without rows, some that go on; from the middle on too."""
    from vexact_ops.causal_conv import triton as kernels

    given = {"ROWS": tile[0], "AHEAD": tile[1], "BLOCK": 32, "num_warps": 1}
    monkeypatch.setattr(kernels, "_tile", lambda tokens, channels: given)
    draw, lengths = torch.Generator().manual_seed(width), [0, 9, 0, 0, 1, 1, 34, 3, 0, 1, 11, 0]
    x = torch.randn(sum(lengths), 80, generator=draw).to(dtype)[:, :48]
    weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((48, width), (48,)))
    taps = torch.randn(14, 8, 48, generator=draw).to(dtype)
    slots = ints("cpu", 3, 7, 0, -1, 5, 2, 12, 9, 1, 6, -1, 4)
    before = ints("cpu", 0, 2, 5, 1, 3, 0, 100, 1, 7, 40, 2, 0)
    offset = offsets("cpu", lengths)
    lens = before + offset.diff()

    def run(device, backend):
        rows, held, step = x.to(device), taps.clone().to(device), [t.to(device) for t in (slots, lens, offset)]
        weights = weight.to(device), bias.to(device)
        y = vx.causal_conv(rows, *weights, cu_seqlens=step[2], backend=backend)
        paged = vx.causal_conv_paged(rows, *weights, held, *step, backend=backend)
        return [t.cpu() for t in (y, paged, held)]

    expected = run("cpu", "cpu")
    assert_bitwise(run(device, backend), expected)
    last, out = 6, torch.full(x.shape, 7.0, dtype=dtype, device=device)
    step = [t[last:].to(device) for t in (slots, lens)]
    step = offset[last:].to(device), taps.clone().to(device), *step
    begin = int(offset[last])
    kernels._launch(x.to(device), weight.to(device), bias.to(device), out, *step, True, first_row=begin)
    assert_bitwise(out[begin:].cpu(), expected[1][begin:])
    assert (out[:begin] == 7).all()


def test_bad_arguments_are_named():
    x, weight, bias = torch.randn(5, 16), torch.randn(16, 4), torch.randn(16)
    for message, args, kind in (
        ("x: got dtype int64", (x.long(), weight), TypeError),
        ("x: got dtype float16, which a GPU serves", (x.half(), weight.half()), TypeError),
        ("weight: got dtype bfloat16, expected float32 as x has", (x, weight.bfloat16()), TypeError),
        (r"weight: got shape \(8, 4\), expected \(16, W\)", (x, weight[:8]), ValueError),
        ("weight: got 9 taps, expected 2 to 8", (x, torch.randn(16, 9)), ValueError),
        ("weight: got 1 taps, expected 2 to 8", (x, weight[:, :1]), ValueError),
        (r"bias: got shape \(8,\)", (x, weight, bias[:8]), ValueError),
    ):
        with pytest.raises(kind, match=f"causal_conv: {message}"):
            vx.causal_conv(*args)
    with pytest.raises(ValueError, match="causal_conv: activation: got 'gelu', expected one of None, 'silu'"):
        vx.causal_conv(x, weight, activation="gelu")
    with pytest.raises(ValueError, match="causal_conv: cu_seqlens: got 4 as its last value, expected 5"):
        vx.causal_conv(x, weight, cu_seqlens=ints("cpu", 0, 4))
    taps, step = torch.full((3, 4, 16), 7.0), (ints("cpu", 1), ints("cpu", 5), ints("cpu", 0, 5))
    op = "causal_conv_paged"
    for message, ring in (("taps: got a ring of 3, expected a power of two of at least 4", taps[:, :3]),
                          ("taps: got a ring of 2", taps[:, :2])):  # fmt: skip
        with pytest.raises(ValueError, match=f"{op}: {message}"):
            vx.causal_conv_paged(x, weight, None, ring, *step)
    with pytest.raises(TypeError, match=f"{op}: taps: got dtype bfloat16, expected float32 as x has"):
        vx.causal_conv_paged(x, weight, None, taps.bfloat16(), *step)
    with pytest.raises(ValueError, match=rf"{op}: slots\[0\]: got 3, expected -1 \(none\) or one of 3 slots"):
        vx.causal_conv_paged(x, weight, None, taps, ints("cpu", 3), *step[1:])
    with pytest.raises(ValueError, match=rf"{op}: context_lens\[0\]: got 4, expected at least 5"):
        vx.causal_conv_paged(x, weight, None, taps, step[0], ints("cpu", 4), step[2])
    two = ints("cpu", 1, 1), ints("cpu", 2, 3), ints("cpu", 0, 2, 5)
    with pytest.raises(ValueError, match=rf"{op}: slots\[1\]: got 1, which is slots\[0\] too"):
        vx.causal_conv_paged(x, weight, None, taps, *two)
    two = ints("cpu", 1, 2), ints("cpu", 2, 3), ints("cpu", 0, 2, 5)
    for singles, message, kind in (
        (1, "got 1, expected at most 0: sequence 0 has 2 rows", ValueError),
        (3, "got 3, expected 0 to 2, the sequences", ValueError),
        (-1, "got -1, expected 0 to 2", ValueError),
        (True, "got bool, expected an int", TypeError),
        (1.0, "got float, expected an int", TypeError),
    ):
        with pytest.raises(kind, match=f"{op}: singles: {message}"):
            vx.causal_conv_paged(x, weight, None, taps, *two, singles=singles)
    three = ints("cpu", 1, 2, 0), ints("cpu", 1, 0, 4), ints("cpu", 0, 1, 1, 5)
    with pytest.raises(ValueError, match=f"{op}: singles: got 2, expected at most 1: sequence 1 has 0 rows"):
        vx.causal_conv_paged(x, weight, None, taps, *three, singles=2)
    with pytest.raises(RuntimeError, match=f"{op}: weight requires a gradient"):
        vx.causal_conv_paged(x, weight.requires_grad_(), None, taps, *step)
    assert (taps == 7).all()  # nothing was written


def test_empty_inputs():
    weight = torch.randn(16, 4, requires_grad=True)
    assert vx.causal_conv(torch.empty(0, 16), weight).shape == (0, 16)
    x = torch.empty(0, 16, requires_grad=True)
    dx, dweight = torch.autograd.grad(vx.causal_conv(x, weight, cu_seqlens=ints("cpu", 0, 0)).sum(), (x, weight))
    assert dx.shape == (0, 16)
    assert_bitwise(dweight, torch.zeros(16, 4))
