"""grouped_linear: every row has the bits of linear with its expert's weight, however rows are spread over experts."""

import itertools
import time

import pytest
import torch
from conftest import room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops._core import native
from vexact_ops.grouped_linear.reference import grouped_linear_ref
from vexact_ops.testing import (
    assert_bitwise,
    cancelling,
    check_grouped,
    check_repeatable,
    check_rows,
    offsets_of,
    spreads,
    tricky,
)

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("grouped_linear"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
ROWS = st.one_of(st.integers(1, 20), st.sampled_from([33, 70]))
EXPERTS = st.sampled_from([1, 2, 5, 16])
FEATURES = st.one_of(st.integers(1, 40), st.sampled_from([96, 130]))
REDUCTION = st.one_of(st.integers(1, 40), st.sampled_from([64, 200]))
SEED = st.integers(0, 2**16)


def experts_that_cancel(rows, k, n, experts, seed, dtype, device):
    x, w = cancelling(rows, k, n * experts, seed, dtype, device)
    return x, w.view(experts, n, k)


@BACKENDS
@DTYPES
@given(rows=ROWS, experts=EXPERTS, n=FEATURES, k=REDUCTION, seed=SEED)
def test_a_row_has_the_bits_of_linear(device, backend, dtype, rows, experts, n, k, seed):
    x, w = experts_that_cancel(rows, k, n, experts, seed, dtype, device)
    check_grouped(
        lambda x, w, offsets: vx.grouped_linear(x, w, offsets, backend=backend),
        lambda x, w: vx.linear(x, w, backend=backend),
        x,
        w,
        seed=seed,
    )


@BACKENDS
@DTYPES
@given(rows=ROWS, experts=EXPERTS, n=FEATURES, k=REDUCTION, seed=SEED)
def test_gradients_have_the_bits_of_linear(device, backend, dtype, rows, experts, n, k, seed):
    dy, wt = cancelling(rows, n, k * experts, seed, dtype, device)
    w = wt.view(experts, k, n).transpose(1, 2).contiguous()
    x = tricky(rows, k, seed=seed, dtype=dtype, device=device)
    for name, assigned in spreads(rows, experts, seed):
        offsets = offsets_of(assigned, experts, device)
        args = [t.clone().requires_grad_() for t in (x, w)]
        dx, dw = torch.autograd.grad(vx.grouped_linear(*args, offsets, backend=backend), args, dy)
        ends = offsets.tolist()
        for e, (begin, end) in enumerate(itertools.pairwise(ends)):
            part = [t.clone().requires_grad_() for t in (x[begin:end], w[e])]
            y = vx.linear(*part, backend=backend)
            expected = torch.autograd.grad(y, part, dy[begin:end])
            assert_bitwise((dx[begin:end], dw[e]), expected, f"{name}: expert {e}")


@BACKENDS
@DTYPES
@given(rows=ROWS, n=FEATURES, k=REDUCTION, seed=SEED)
def test_rows_of_an_expert_stand_alone(device, backend, dtype, rows, n, k, seed):
    x, w = experts_that_cancel(rows, k, n, 3, seed, dtype, device)

    def middle(x):
        return vx.grouped_linear(x, w, offsets_of([1] * len(x), 3, device), backend=backend)

    check_rows(middle, x, seed=seed)


def test_a_kernel_that_follows_the_spread_is_caught():
    def split_by_count(x, w, offsets):  # a small group takes its sum in two parts
        parts = []
        for e, (begin, end) in enumerate(zip(offsets.tolist(), offsets.tolist()[1:])):
            halves = 2 if end - begin < 8 else 1
            pairs = zip(x[begin:end].chunk(halves, 1), w[e].chunk(halves, 1))
            parts.append(sum(vx.linear(a, b, out_dtype=torch.float32) for a, b in pairs).to(x.dtype))
        return torch.cat(parts)

    x, w = experts_that_cancel(32, 256, 16, 4, 0, torch.bfloat16, "cpu")
    with pytest.raises(AssertionError, match=r"rows of expert .* differ"):
        check_grouped(split_by_count, vx.linear, x, w)


@BACKENDS
@DTYPES
def test_rows_behind_the_last_expert_are_zero_and_touch_nothing(device, backend, dtype):
    x, w = experts_that_cancel(9, 40, 21, 4, 1, dtype, device)
    offsets = torch.tensor([0, 2, 2, 5, 6], dtype=torch.int32, device=device)
    expected = vx.grouped_linear(x[:6], w, offsets, backend=backend)
    x[6:] = float("nan")
    dy = torch.ones(9, 21, dtype=dtype, device=device)
    dy[6:] = float("nan")
    args = [t.requires_grad_() for t in (x, w)]
    y = vx.grouped_linear(*args, offsets, backend=backend)
    dx, dw = torch.autograd.grad(y, args, dy)
    assert_bitwise(y[:6], expected)
    assert_bitwise(y[6:], torch.zeros_like(y[6:]))
    assert_bitwise(dx[6:], torch.zeros_like(dx[6:]))
    assert dw.isfinite().all() and not dw[1].any(), "an expert without rows has the gradient 0"


@BACKENDS
@DTYPES
@pytest.mark.parametrize("rows", [1, 8, 70])
def test_repeatable(device, backend, dtype, rows):
    x, w = experts_that_cancel(rows, 130, 77, 9, 5, dtype, device)
    offsets = offsets_of(next(spreads(rows, 9, 5))[1], 9, device)
    args = [t.requires_grad_() for t in (x, w)]
    dy = tricky(rows, 77, seed=7, dtype=dtype, device=device)

    def run():
        y = vx.grouped_linear(*args, offsets, backend=backend)
        return y, *torch.autograd.grad(y, args, dy)

    check_repeatable(run)


@pytest.mark.parametrize("device,backend", room_backends("grouped_linear", "cpu"))
@pytest.mark.parametrize("rows", [12, 700], ids=["decode", "many rows"])
def test_work_shared_by_threads_is_the_same_work(device, backend, rows):
    x, w = experts_that_cancel(rows, 320, 272, 6, 3, torch.bfloat16, device)  # large enough to be cut
    offsets = offsets_of(next(spreads(rows, 6, 1))[1], 6, device)
    expected = torch.cat([vx.linear(x[a:b], m) for m, a, b in zip(w, offsets.tolist(), offsets.tolist()[1:])])
    check_repeatable(lambda: vx.grouped_linear(x, w, offsets, backend=backend))
    assert_bitwise(vx.grouped_linear(x, w, offsets, backend=backend), expected)


@BACKENDS
@DTYPES
def test_weights_of_any_stride(device, backend, dtype):
    x, w = experts_that_cancel(20, 48, 24, 4, 2, dtype, device)
    offsets = offsets_of(next(spreads(20, 4, 2))[1], 4, device)
    dy = tricky(20, 24, seed=1, dtype=dtype, device=device)

    def run(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = vx.grouped_linear(x, w, offsets, backend=backend)
        return y, *torch.autograd.grad(y, (x, w), dy)

    expected = run(x, w)
    wide = torch.full((4, 30, 50), float("nan"), dtype=dtype, device=device)
    wide[:, 3:27, :48] = w
    assert_bitwise(run(x, wide[:, 3:27, :48]), expected, "a view into a larger weight")
    assert_bitwise(run(x, w.transpose(1, 2).contiguous().transpose(1, 2)), expected, "a transposed weight")
    assert_bitwise(run(x.t().contiguous().t(), w), expected, "transposed rows")


@BACKENDS
@DTYPES
def test_accuracy(device, backend, dtype):
    g = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(*s, generator=g).to(device, dtype) for s in ((60, 200), (5, 90, 200), (60, 90)))
    offsets = offsets_of(next(spreads(60, 5, 0))[1], 5, device)

    def run(fn, *inputs):
        args = [t.detach().clone().requires_grad_() for t in inputs]
        y = fn(*args, offsets)
        return y.detach(), *torch.autograd.grad(y, args, dy.to(y.dtype))

    exact = run(grouped_linear_ref, x.double(), w.double())
    ours = run(lambda *a: vx.grouped_linear(*a, backend=backend), x, w)
    stock = run(grouped_linear_ref, x, w)
    for name, o, t, e in zip(("y", "dx", "dweight"), ours, stock, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock's {stock_error:.3g}"


@BACKENDS
def test_opcheck(device, backend):
    x, w = torch.randn(7, 16, device=device, requires_grad=True), torch.randn(3, 8, 16, device=device)
    offsets = torch.tensor([0, 4, 4, 7], dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.vexact.grouped_linear.default, (x, w.requires_grad_(), offsets, backend))


@BACKENDS
def test_no_rows(device, backend):
    x = torch.empty(0, 16, device=device, requires_grad=True)
    w = torch.randn(3, 8, 16, device=device, requires_grad=True)
    y = vx.grouped_linear(x, w, torch.zeros(4, dtype=torch.int32, device=device), backend=backend)
    assert y.shape == (0, 8)
    y.sum().backward()
    assert x.grad.shape == (0, 16)
    assert_bitwise(w.grad, torch.zeros_like(w))


def test_bad_arguments_are_named():
    x, w, offsets = torch.randn(4, 8), torch.randn(2, 3, 8), torch.tensor([0, 1, 4], dtype=torch.int32)
    with pytest.raises(TypeError, match=r"grouped_linear: x: got dtype float64"):
        vx.grouped_linear(x.double(), w, offsets)
    with pytest.raises(TypeError, match=r"grouped_linear: weight: got dtype bfloat16, expected float32 as x has"):
        vx.grouped_linear(x, w.bfloat16(), offsets)
    with pytest.raises(TypeError, match=r"grouped_linear: offsets: got dtype int64, expected int32"):
        vx.grouped_linear(x, w, offsets.long())
    with pytest.raises(ValueError, match=r"grouped_linear: x: got shape \(2, 2, 8\), expected 2 dimensions"):
        vx.grouped_linear(x.view(2, 2, 8), w, offsets)
    with pytest.raises(ValueError, match=r"grouped_linear: weight: got shape \(2, 3, 7\), expected \(E, N, 8\)"):
        vx.grouped_linear(x, w[..., :7], offsets)
    with pytest.raises(ValueError, match=r"grouped_linear: offsets: got shape \(2,\), expected \(3,\)"):
        vx.grouped_linear(x, w, offsets[:2])
    for bad in ([0, 3, 2], [1, 2, 4], [0, 1, 5]):
        with pytest.raises(ValueError, match="grouped_linear: offsets: got values that do not ascend from 0 to at mos"):
            vx.grouped_linear(x, w, torch.tensor(bad, dtype=torch.int32), backend="cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_graph_serves_any_spread():
    x, w = experts_that_cancel(48, 256, 192, 8, 3, torch.bfloat16, "cuda")
    offsets = torch.zeros(9, dtype=torch.int32, device="cuda")
    vx.grouped_linear(x, w, offsets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = vx.grouped_linear(x, w, offsets)
    for name, assigned in spreads(48, 8, 1):
        offsets.copy_(offsets_of(assigned, 8))
        graph.replay()
        assert_bitwise(y, vx.grouped_linear(x, w, offsets_of(assigned, 8, "cuda")), name)


HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no SM90 device"
)
RINGS = [(16, 3), (12, 4), (3, 8), (1, 8)]  # tiles of 256, 192, 48 and 16 rows


def scaled(*shape, seed):
    return tricky(*shape, seed=seed, dtype=torch.bfloat16, device="cuda")


@HOPPER
@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"tiles of {16 * ring[0]}")
@pytest.mark.parametrize(
    "experts,n,k,rows", [(3, 48, 40, 70), (1, 128, 64, 300), (5, 272, 200, 333), (33, 144, 328, 700)]
)
def test_our_kernels_have_the_canonical_bits(ring, experts, n, k, rows):
    from vexact_ops.grouped_linear import cuda, triton

    x, w = experts_that_cancel(rows, k, n, experts, rows, torch.bfloat16, "cuda")
    dy = scaled(rows, n, seed=rows)
    order = torch.randperm(rows, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).int()
    for name, assigned in spreads(rows, experts, rows):
        offsets = offsets_of(assigned, experts, "cuda")
        offsets[-1] -= rows // 20  # rows that are nobody's
        offsets.clamp_(max=int(offsets[-1]))
        assert_bitwise(cuda._own(cuda.FORWARD, ring, x, w, offsets), triton.grouped_linear_fwd(x, w, offsets), name)
        assert_bitwise(cuda._own(cuda.ACROSS, ring, dy, w, offsets), triton.grouped_linear_dx(dy, w, offsets), name)
        assert_bitwise(
            cuda._own(cuda.FORWARD, ring, x, w, offsets, order, 3),
            triton.grouped_linear_fwd(x, w, offsets, order, 3),
            f"{name}, through an order",
        )
        assert_bitwise(
            cuda._own_dweight((max(8, ring[0]), 3), dy, x, offsets),
            triton.grouped_linear_dweight(dy, x, offsets),
            name,
        )


@HOPPER
@pytest.mark.parametrize("ring", RINGS, ids=lambda ring: f"tiles of {16 * ring[0]}")
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu_tanh"])
def test_a_gated_product_has_the_bits_of_its_parts(ring, gelu):
    from vexact_ops.grouped_linear import cuda

    experts, rows, width, k = 5, 210, 136, 200
    x, w = scaled(rows, k, seed=1) / 64, scaled(experts, 2 * width, k, seed=2)
    x[7] = float("nan")
    order = torch.randperm(rows, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).int()
    for name, assigned in spreads(rows, experts, 3):
        offsets = offsets_of(assigned, experts, "cuda")
        h = vx.grouped_linear(x[(order // 2).long()], w, offsets, backend="triton")
        a = vx.silu_mul(h, activation="gelu_tanh" if gelu else "silu")
        assert_bitwise(cuda._own_gate_up(ring, x, w, offsets, order, 2, gelu, True), (h, a), name)
        assert_bitwise(cuda._own_gate_up(ring, x, w, offsets, order, 2, gelu, False)[1], a, name)
        assert_bitwise(cuda.grouped_gate_up(x, w, offsets, order, 2, gelu, True), (h, a), name)


@HOPPER
def test_rows_are_gathered():
    from vexact_ops.grouped_linear import cuda

    order = torch.randperm(300, device="cuda", generator=torch.Generator("cuda").manual_seed(0)).int()
    offsets = torch.tensor([0, 20, 20, 190, 290], dtype=torch.int32, device="cuda")
    for columns in (8, 520, 2056, 33):
        x = scaled(150, columns, seed=columns)
        rows = cuda.gather_rows(x, offsets, order, 2)
        assert_bitwise(rows[:290], x[(order // 2).long()][:290], f"{columns} columns")


@HOPPER
def test_offsets_and_orders_of_any_values_touch_no_other_memory():
    from vexact_ops.grouped_linear import cuda

    experts, n, k, rows = 7, 96, 72, 130
    x, dy, w = scaled(rows, k, seed=1), scaled(rows, n, seed=2), scaled(experts, n, k, seed=3)
    order = torch.tensor([-7, 2**31 - 1] * (rows // 2), dtype=torch.int32, device="cuda")
    for values in ([-5] * 8, [2**31 - 1] * 8, [(-1) ** i * 10**6 for i in range(8)], [rows - i for i in range(8)]):
        offsets = torch.tensor(values, dtype=torch.int32, device="cuda")
        bounded = cuda._bounded(offsets, rows)
        assert int(bounded[0]) >= 0 and int(bounded[-1]) <= rows and bool((bounded.diff() >= 0).all())
        for ring in RINGS:
            cuda._own(cuda.FORWARD, ring, x, w, offsets)
            cuda._own(cuda.ACROSS, ring, dy, w, offsets, order, 1)
            cuda._own_gate_up(ring, x, w, offsets, order, 2, False, True)
            cuda._own_dweight((12, 3), dy, x, offsets)
    torch.cuda.synchronize()


@HOPPER
@pytest.mark.parametrize(
    "kind,top_k", [("fwd", 0), ("dx", 2), ("dweight x", 2), ("gate_up keep", 2), ("gate_up gelu", 0)]
)
def test_admission_takes_our_kernels(kind, top_k):
    from vexact_ops.grouped_linear import cuda

    verdicts = cuda.admit(kind, 4, 512, 512, 200, top_k=top_k).verdicts
    ours = [v for v in verdicts if v.candidate.startswith("wgmma")]
    assert ours and all(v.admitted for v in ours), [v for v in verdicts if not v.admitted]


@HOPPER
def test_no_rows_after_some_rows():
    """What serves two rows is never asked for none."""
    x, w = experts_that_cancel(2, 512, 520, 4, 0, torch.bfloat16, "cuda")
    for rows in (2, 1, 0):
        args = [t.clone().requires_grad_() for t in (x[:rows], w)]
        offsets = torch.tensor([0, 0, rows // 2, rows, rows], dtype=torch.int32, device="cuda")
        dirt = torch.full((4 * 520 * 512,), float("nan"), dtype=torch.bfloat16, device="cuda")
        del dirt  # what an empty tensor will hold
        y = vx.grouped_linear(*args, offsets)
        dx, dw = torch.autograd.grad(y, args, torch.ones_like(y))
        expected = vx.grouped_linear(*args, offsets, backend="triton")
        assert_bitwise(y, expected)
        assert dx.shape == args[0].shape and dw.isfinite().all()
    assert y.shape == (0, 520)
    assert_bitwise(dw, torch.zeros_like(w))
    native.ops().grouped_sums(*(t.detach() for t in (y, args[0])), offsets, 12, 3, dw)
    assert_bitwise(dw, torch.zeros_like(w))


@HOPPER
def test_counters_of_captured_launches_go_back_with_their_graph():
    x, w = experts_that_cancel(40, 512, 256, 4, 0, torch.bfloat16, "cuda")
    offsets = offsets_of(next(spreads(40, 4, 0))[1], 4, "cuda")
    expected = small_m(x, w, offsets)
    lent = native.ops().grouped_small_m_lent
    before = lent(x)
    for _ in range(2):
        graphs = []
        for _ in range(5):
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1]):
                for _ in range(10):
                    out = torch.empty_like(expected)
                    assert native.ops().grouped_small_m(x, w, offsets, None, 1, -1, *SMALL_M[2], out)
        assert lent(x) == before + 50
        for graph in graphs:
            graph.replay()
        assert_bitwise(out, expected)
        for graph in graphs:
            graph.reset()
        del graphs, graph
        torch.cuda.synchronize()
        end = time.monotonic() + 60  # a thread of the driver's gives them back, when it comes to it
        while lent(x) != before and time.monotonic() < end:
            time.sleep(0.01)
        assert lent(x) == before, "graphs that are gone keep nothing"


@HOPPER
def test_explain_names_the_kernel_that_runs():
    from vexact_ops.grouped_linear import cuda

    x, w = experts_that_cancel(40, 512, 256, 4, 0, torch.bfloat16, "cuda")
    offsets = offsets_of(next(spreads(40, 4, 0))[1], 4, "cuda")
    for op, a, b in (
        ("grouped_linear", {"x": x}, {"weight": w}),
        ("grouped_linear_dx", {"dy": x @ w[0].t()}, {"weight": w}),
        ("grouped_linear_dweight", {"dy": x @ w[0].t()}, {"x": x}),
    ):
        ((part, decision),) = cuda.explain(op, **a, **b, offsets=offsets)
        assert part == "product" and decision.final and "E=4 N=256 K=512 R<=48" in decision.key
        assert decision.chosen.name in {v.candidate for v in decision.verdicts}
    ((_, decision),) = cuda.explain("grouped_linear", x=x[:0], weight=w, offsets=offsets * 0)
    assert decision.chosen.name == cuda.TRITON and "no rows" in decision.why


# warpgroups, boxes of k in a stage, blocks on a multiprocessor, per cent in equal shares, units in a piece of a matrix
SMALL_M = [(1, 2, 2, 80, 1), (1, 4, 1, 100, 2), (2, 2, 1, 50, 2), (2, 2, 2, 20, 1), (4, 2, 1, 0, 8)]
ACTIVATIONS = [-1, 0, 1]  # none, silu, gelu_tanh


def small_m(x, w, offsets, order=None, top_k=1, activation=-1, shape=SMALL_M[2]):
    """The kernel itself, between guards: what it writes outside of its result would show."""
    rows, n = x.shape[0] if order is None else order.shape[0], w.shape[1] // (1 if activation < 0 else 2)
    guarded = torch.full((rows + 2, n), float("nan"), dtype=x.dtype, device=x.device)
    run = native.ops().grouped_small_m
    assert run(x, w, offsets, order, top_k, activation, *shape, guarded[1:-1]), "it does not take these tensors"
    assert guarded[0].isnan().all() and guarded[-1].isnan().all(), "written outside of the rows"
    return guarded[1:-1]


def canonical_small_m(x, w, offsets, order=None, top_k=1, activation=-1):
    from vexact_ops.grouped_linear.triton import grouped_linear_fwd

    y = grouped_linear_fwd(x, w, offsets, order, top_k)
    return y if activation < 0 else vx.silu_mul(y, activation=["silu", "gelu_tanh"][activation], backend="triton")


@HOPPER
@DTYPES
@given(
    rows=st.one_of(st.integers(1, 20), st.sampled_from([70, 300])),
    experts=st.sampled_from([1, 2, 5, 40, 130]),
    n=st.sampled_from([8, 24, 64, 100, 328]),
    k=st.sampled_from([1, 8, 50, 64, 200, 520]),
    activation=st.sampled_from(ACTIVATIONS),
    gathered=st.booleans(),
    seed=SEED,
)
def test_few_rows_have_the_bits_of_the_canonical_kernel(dtype, rows, experts, n, k, activation, gathered, seed):
    if dtype == torch.float32:
        pytest.skip("16-bit inputs alone")
    n = n if activation < 0 else 2 * n // 16 * 16
    x, w = experts_that_cancel(rows, k, n, experts, seed, dtype, "cuda")
    x, w = (torch.nn.functional.pad(t, (0, -k % 8), value=float("nan"))[..., :k] for t in (x, w))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).to("cuda", torch.int32)
    through = (order, 3) if gathered else (None, 1)
    for shape, (name, assigned) in zip(SMALL_M, spreads(rows, experts, seed)):
        offsets = offsets_of(assigned, experts, "cuda")
        expected = canonical_small_m(x, w, offsets, *through, activation)
        assert_bitwise(small_m(x, w, offsets, *through, activation, shape), expected, f"{name}, shape {shape}")


@HOPPER
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_few_rows_of_whole_layers(activation):
    x, w = experts_that_cancel(40, 2048, 1536, 4, 1, torch.bfloat16, "cuda")
    w = w.repeat(32, 1, 1)
    for name, assigned in spreads(40, 128, 1):
        offsets = offsets_of(assigned, 128, "cuda")
        for shape in SMALL_M:
            expected = canonical_small_m(x, w, offsets, activation=activation)
            assert_bitwise(
                small_m(x, w, offsets, activation=activation, shape=shape), expected, f"{name}, shape {shape}"
            )


@HOPPER
@pytest.mark.parametrize("activation", ACTIVATIONS)
@given(values=st.lists(st.integers(-40, 90), min_size=6, max_size=6), seed=SEED)
def test_few_rows_and_offsets_of_any_value(activation, values, seed):
    x, w = experts_that_cancel(50, 64, 48, 5, seed, torch.bfloat16, "cuda")
    g = torch.Generator().manual_seed(seed)
    order = torch.randint(-(2**31), 2**31 - 1, (50,), generator=g).to("cuda", torch.int32)
    offsets = torch.tensor(values, dtype=torch.int32, device="cuda")
    for shape in SMALL_M:
        small_m(x, w, offsets, order, 4, activation, shape)
    if values == sorted(values):
        assert_bitwise(
            small_m(x, w, offsets, None, 1, activation), canonical_small_m(x, w, offsets, None, 1, activation)
        )


@HOPPER
def test_few_rows_behind_the_last_expert_are_zero():
    x, w = experts_that_cancel(50, 64, 48, 5, 0, torch.bfloat16, "cuda")
    offsets = torch.tensor([0, 3, 3, 20, 21, 29], dtype=torch.int32, device="cuda")
    x[29:] = float("nan")
    for activation in ACTIVATIONS:
        y = small_m(x, w, offsets, activation=activation)
        assert_bitwise(y, canonical_small_m(x, w, offsets, activation=activation))
        assert_bitwise(y[29:], torch.zeros_like(y[29:]))


@HOPPER
def test_few_rows_refuse_what_the_kernel_cannot_read():
    run, offsets = native.ops().grouped_small_m, torch.tensor([0, 2, 4], dtype=torch.int32, device="cuda")
    x, w = (torch.zeros(s, dtype=torch.bfloat16, device="cuda") for s in ((4, 64), (2, 48, 64)))
    out = torch.full((4, 48), 7.0, dtype=torch.bfloat16, device="cuda")
    bad = {
        "fp32": (x.float(), w.float(), out.float()),
        "rows off 16 bytes": (x[:, 1:41], w[..., :40], out),
        "a transposed weight": (x, w.transpose(1, 2).contiguous().transpose(1, 2), out),
        "one matrix for all": (x, w[:1].expand(2, -1, -1), out),
    }
    for name, (a, b, y) in bad.items():
        assert not run(a, b, offsets, None, 1, -1, *SMALL_M[0], y), name
        assert (y == 7).all(), f"{name}: something was written"
    with pytest.raises(RuntimeError, match="no kernel of 3 groups"):
        run(x, w, offsets, None, 1, -1, 3, 1, 1, 100, 1, out)


@HOPPER
@pytest.mark.parametrize("gelu", [False, True], ids=["silu", "gelu_tanh"])
@given(
    rows=st.one_of(st.integers(1, 20), st.sampled_from([70, 300])),
    experts=st.sampled_from([1, 5, 130]),
    features=st.sampled_from([8, 24, 64, 200]),
    k=st.sampled_from([8, 64, 200]),
    ranks=st.sampled_from([2, 3, 8]),
    seed=SEED,
)
def test_what_ranks_send_is_the_gated_product_of_all_their_features(rows, experts, features, k, ranks, seed, gelu):
    """The kernel itself, on memory of one GPU in place of all: between guards, where another rank's columns are too."""
    from vexact_ops.grouped_linear import cuda

    x, w = experts_that_cancel(rows, k, 2 * features * ranks, experts, seed, torch.bfloat16, "cuda")
    parts = [part.contiguous() for part in w.view(experts, 2, ranks, features, k).unbind(2)]
    guarded = torch.empty(ranks, rows + 2, ranks * features, dtype=torch.bfloat16, device="cuda")
    places = torch.tensor([each[1:-1].data_ptr() for each in guarded], dtype=torch.int64)
    for (name, assigned), ring in zip(spreads(rows, experts, seed), itertools.cycle(cuda.OWN)):
        offsets = offsets_of(assigned, experts, "cuda")
        offsets[-1] = max(int(offsets[-2]), rows - rows // 10)  # the rest is nobody's
        expected = torch.cat(
            [
                cuda.CANONICAL["gate_up"](x, part.view(experts, -1, k), offsets, None, 1, gelu, False)[1]
                for part in parts
            ],
            1,
        )
        guarded.fill_(float("nan"))
        for rank, part in enumerate(parts):
            before = guarded.clone()
            native.ops().grouped_product(
                x,
                part.view(experts, -1, k),
                offsets,
                cuda.GATE_UP,
                gelu,
                *ring,
                guarded[rank, 1:-1],
                None,
                places,
                rank,
            )
            changed = guarded.view(torch.int16) != before.view(torch.int16)
            changed[:, 1:-1, rank * features : (rank + 1) * features] = False
            assert not changed.any(), "written outside of the rank's columns"
        for at in range(ranks):
            assert_bitwise(guarded[at, 1:-1], expected, f"{name}, ring {ring}, at rank {at}")


@HOPPER
def test_what_is_no_place_of_ranks_is_refused():
    x, w = experts_that_cancel(4, 64, 32, 2, 0, torch.bfloat16, "cuda")
    offsets = torch.tensor([0, 2, 4], dtype=torch.int32, device="cuda")
    out = x.new_empty(4, 32)
    places = torch.tensor([out.data_ptr(), out.data_ptr()], dtype=torch.int64)

    def run(mode=2, out=out, kept=None, places=places, rank=0):
        native.ops().grouped_product(x, w, offsets, mode, False, 4, 8, out, kept, places, rank)

    run()
    for wrong in (
        {"mode": 0},
        {"kept": x.new_empty(4, 32)},
        {"places": places[:1]},
        {"places": places.repeat(5)},
        {"rank": 2},
        {"rank": -1},
        {"places": places.int()},
        {"places": places + 64},
        {"out": out[:, :16].contiguous()},
    ):
        with pytest.raises(RuntimeError, match="expected"):
            run(**wrong)
