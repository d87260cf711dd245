"""linear: every output element is one fp32 accumulator over ascending k, on every path; gradients; bad arguments."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import room_backends
from hypothesis import example, given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.linear.reference import linear_ref
from vexact_ops.testing import (
    assert_bitwise,
    cancelling,
    check_repeatable,
    check_rows,
    cpu_isas,
    on_cpu_isa,
    tricky,
)

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("linear"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
FEATURES = st.one_of(st.integers(1, 70), st.sampled_from([96, 128, 257]))
REDUCTION = st.one_of(st.integers(1, 70), st.sampled_from([128, 385, 576]))
ROWS = st.one_of(st.integers(1, 20), st.sampled_from([31, 33, 48, 65, 100]))
SEED = st.integers(0, 2**16)


def fma(a, b, c):
    """fp32 fused multiply-add on numpy arrays, exact: the product fits float64, the sum is rounded to odd there, and
    rounding an odd-rounded float64 to fp32 equals rounding the exact value (Boldo and Melquiond, 2008)."""
    p, c = a.astype(np.float64) * b.astype(np.float64), c.astype(np.float64)
    s = p + c
    t = s - p
    error = (p - (s - t)) + (c - t)  # exact (Knuth's two-sum)
    even = (s.view(np.int64) & 1) == 0
    s = np.where((error != 0) & even, np.nextafter(s, np.where(error > 0, np.inf, -np.inf)), s)
    return s.astype(np.float32)


def sequential(x, weight, bias=None, out_dtype=None):
    """The contract of linear, spelled out: k ascending, one fp32 accumulator, bias in fp32, one rounding."""
    acc = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    xs, ws = x.detach().float().numpy(), weight.detach().float().numpy()
    for k in range(x.shape[1]):
        acc = fma(xs[:, k : k + 1], ws[None, :, k], acc)
    if bias is not None:
        acc = acc + bias.float().numpy()
    return torch.from_numpy(acc).to(out_dtype or x.dtype)


def is_sequential(device, dtype):
    """A GPU's matrix units take several k of 16-bit inputs at a time and round in their own way."""
    return device == "cpu" or dtype == torch.float32


def test_the_reference_fma_is_exact():
    g = np.random.default_rng(0)
    a, b = (g.standard_normal(3000).astype(np.float32) for _ in range(2))
    exponent = g.integers(-40, 41, 3000).astype(np.float32)
    c = (-(a * b) * (1 + g.integers(-2, 3, 3000) * np.exp2(exponent))).astype(np.float32)
    got = fma(a, b, c)
    for i in range(len(a)):
        exact = Fraction(float(a[i])) * Fraction(float(b[i])) + Fraction(float(c[i]))
        below, above = (np.nextafter(got[i], np.float32(side)) for side in (-np.inf, np.inf))
        distance = abs(Fraction(float(got[i])) - exact)
        assert distance <= min(abs(Fraction(float(v)) - exact) for v in (below, above))
        if 2 * distance == abs(Fraction(float(above)) - Fraction(float(got[i]))):
            assert got[i : i + 1].view(np.int32)[0] % 2 == 0, "a tie goes to the even neighbour"


@BACKENDS
@DTYPES
@given(rows=ROWS, n=FEATURES, k=REDUCTION, bias=st.booleans(), wide=st.booleans(), seed=SEED)
@example(rows=3, n=70, k=1, bias=True, wide=True, seed=0)  # a compiler likes to make one fma of these two roundings
def test_order_is_sequential_fma(device, backend, dtype, rows, n, k, bias, wide, seed):
    if not is_sequential(device, dtype):
        pytest.skip("matrix units have their own rounding inside")
    x, w = cancelling(rows, k, n, seed, dtype)
    b = tricky(n, seed=seed, dtype=dtype) if bias else None
    out_dtype = torch.float32 if wide else dtype
    y = vx.linear(x.to(device), w.to(device), None if b is None else b.to(device), out_dtype=out_dtype, backend=backend)
    assert_bitwise(y.cpu(), sequential(x, w, b, out_dtype))


@pytest.mark.parametrize("device,backend", room_backends("linear", "cpu"))
@DTYPES
@pytest.mark.parametrize(
    "rows,n,k,stride",
    [
        (1, 600, 2300, 2300),
        (1, 70, 1013, 1024),  # weight rows 4 KB apart in fp32, 2 KB in bf16
        (3, 70, 2029, 2048),
        (16, 70, 2048, 2048),
        (130, 160, 2300, 2300),  # k in blocks
        (300, 40, 500, 500),  # rows in tasks
    ],
)
def test_order_survives_blocking(device, backend, dtype, rows, n, k, stride):
    x, w = cancelling(rows, k, n, 3, dtype)
    w = torch.nn.functional.pad(w, (0, stride - k), value=float("nan"))[:, :k]
    expected = sequential(x, w)
    for isa in cpu_isas():
        with on_cpu_isa(isa):
            assert_bitwise(vx.linear(x, w, backend=backend), expected, isa)


@pytest.mark.parametrize("device,backend", room_backends("linear", "triton"))
@DTYPES
@given(rows=ROWS, n=FEATURES, k=REDUCTION, seed=SEED)
def test_the_tile_does_not_matter(device, backend, dtype, rows, n, k, seed):
    from vexact_ops.linear.triton import TILES, matmul

    x, w = cancelling(rows, k, n, seed, dtype, device)
    expected = vx.linear(x, w, out_dtype=torch.float32, backend=backend)
    canonical = TILES[dtype.itemsize]
    for change in ({"BM": 16, "num_warps": 4}, {"BN": 32, "BK": 128}, {"BM": 32, "BN": 256}, {"BK": 16}):
        y = matmul(x, w.t(), torch.empty_like(expected), tile={**canonical, "num_stages": 2, **change})
        assert_bitwise(y, expected, f"a tile of {change}")
    cut = k // 2 // canonical["BK"] * canonical["BK"]
    y = matmul(x[:, :cut], w.t()[:cut], torch.empty_like(expected))
    assert_bitwise(matmul(x[:, cut:], w.t()[cut:], y, resume=True), expected, "in two parts")


@BACKENDS
@DTYPES
@given(rows=ROWS, n=FEATURES, k=REDUCTION, bias=st.booleans(), wide=st.booleans(), seed=SEED)
def test_rows_stand_alone(device, backend, dtype, rows, n, k, bias, wide, seed):
    x, w = cancelling(rows, k, n, seed, dtype, device)
    b = tricky(n, seed=seed, dtype=dtype, device=device) if bias else None
    out_dtype = torch.float32 if wide else None
    check_rows(lambda x: vx.linear(x, w, b, out_dtype=out_dtype, backend=backend), x, seed=seed)


@BACKENDS
@DTYPES
@given(rows=ROWS, n=FEATURES, k=REDUCTION, seed=SEED)
def test_columns_stand_alone(device, backend, dtype, rows, n, k, seed):
    x, w = cancelling(rows, k, n, seed, dtype, device)
    check_rows(lambda w: vx.linear(x, w, backend=backend).t(), w, seed=seed)


@BACKENDS
@DTYPES
@given(rows=ROWS, n=FEATURES, k=REDUCTION, seed=SEED)
def test_gradient_rows_stand_alone(device, backend, dtype, rows, n, k, seed):
    dy, wt = cancelling(rows, n, k, seed, dtype, device)
    x, w = tricky(rows, k, seed=seed, dtype=dtype, device=device), wt.t().contiguous()

    def dx(x, dy):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(vx.linear(x, w, backend=backend), x, dy)

    check_rows(dx, x, dy, seed=seed)


@BACKENDS
@DTYPES
@given(rows=ROWS, n=FEATURES, k=REDUCTION, wide=st.booleans(), seed=SEED)
def test_gradients_are_sequential_fma(device, backend, dtype, rows, n, k, wide, seed):
    dy, x = cancelling(n, rows, k, seed, dtype)  # (n, rows), (k, rows): they cancel over the rows
    dy, x = dy.t().contiguous(), x.t().contiguous()
    w, b = tricky(n, k, seed=seed, dtype=dtype), tricky(n, seed=seed, dtype=dtype)
    if wide:
        dy = dy.float() * 1.0009765625
    args = [t.to(device).requires_grad_() for t in (x, w, b)]
    y = vx.linear(*args, out_dtype=torch.float32 if wide else None, backend=backend)
    dx, dw, db = (t.cpu() for t in torch.autograd.grad(y, args, dy.to(device)))
    if is_sequential(device, dtype) or wide:
        assert_bitwise(dx, sequential(dy, w.t(), out_dtype=dtype), "dx")
        assert_bitwise(dw, sequential(dy.t(), x.t(), out_dtype=dtype), "dweight")
    if backend == "cpu":
        assert_bitwise(db, sequential(dy.t(), torch.ones(1, rows), out_dtype=dtype)[:, 0], "dbias")
    else:
        from vexact_ops._core.triton import tree_sum_ref

        assert_bitwise(db, tree_sum_ref(dy.float().t(), 4096).to(dtype), "dbias")


@BACKENDS
@DTYPES
@pytest.mark.parametrize("rows", [1, 3, 16, 70])
def test_repeatable(device, backend, dtype, rows):
    x, w = cancelling(rows, 390, 157, 5, dtype, device)
    b = tricky(157, seed=6, dtype=dtype, device=device)
    args = [t.requires_grad_() for t in (x, w, b)]
    dy = tricky(rows, 157, seed=7, dtype=dtype, device=device)

    def run():
        y = vx.linear(*args, backend=backend)
        return y, *torch.autograd.grad(y, args, dy)

    check_repeatable(run)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_strides_do_not_matter(device, backend, dtype, rows):
    x, w = cancelling(rows, 70, 50, 9, dtype, device)
    y = vx.linear(x, w, backend=backend)

    def grads(x, w):
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        return torch.autograd.grad(vx.linear(x, w, backend=backend).sum(), (x, w))

    wide = torch.full((3 * 50, 81), float("nan"), dtype=dtype, device=device)
    view = wide[50:100, 5:75]
    view.copy_(w)
    transposed = w.t().contiguous().t()
    every_other = torch.stack([w, w * 0], -1)[..., 0]
    xs = torch.cat([x, x], 1)[:, :70], x.t().contiguous().t(), torch.stack([x, x * 0], -1)[..., 0]
    for other in (view, transposed, every_other):
        assert_bitwise(vx.linear(x, other, backend=backend), y, "a strided weight")
        assert_bitwise(grads(x, other), grads(x, w), "its gradients")
    for other in xs:
        assert_bitwise(vx.linear(other, w, backend=backend), y, "strided rows")
        assert_bitwise(grads(other, w), grads(x, w), "their gradients")
    deep = x.view(1, rows, 1, 70)
    assert_bitwise(vx.linear(deep, w, backend=backend), y.view(1, rows, 1, 50), "four dimensions")
    assert_bitwise(vx.linear(deep.transpose(0, 1), w, backend=backend), y.view(rows, 1, 1, 50), "permuted dimensions")
    assert_bitwise(vx.linear(x[0], w, backend=backend), y[0], "one dimension")


def test_a_split_reduction_is_caught():
    x, w = cancelling(16, 512, 32, seed=1)

    def split_k(x):  # cuts the reduction where there are few rows, as vendor libraries do
        parts = 4 if x.shape[0] < 8 else 1
        return sum(
            sequential(a, b, out_dtype=torch.float32) for a, b in zip(x.chunk(parts, 1), w.chunk(parts, 1))
        ).bfloat16()

    with pytest.raises(AssertionError, match="differ"):
        check_rows(split_k, x)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("rows", [1, 64])
def test_accuracy(device, backend, dtype, rows):
    g = torch.Generator().manual_seed(1)
    x, w, b, dy = (
        torch.randn(s, generator=g).to(device, dtype) for s in ((rows, 1000), (300, 1000), (300,), (rows, 300))
    )

    def run(fn, *args):
        args = [a.detach().clone().requires_grad_() for a in args]
        y = fn(*args)
        return y.detach(), *torch.autograd.grad(y, args, dy.to(y.dtype))

    exact = run(linear_ref, x.double(), w.double(), b.double())
    ours = run(lambda *args: vx.linear(*args, backend=backend), x, w, b)
    theirs = run(torch.nn.functional.linear, x, w, b)
    names = (("y", 1000), ("dx", 300), ("dweight", rows), ("dbias", rows))
    for (name, terms), o, t, e in zip(names, ours, theirs, exact):
        error, stock = ((v.double() - e).norm() / e.norm() for v in (o, t))
        # one accumulator's roundings walk at random: about 0.3 sqrt(K) of them, where a library sums blocks of K apart
        floor = 0.4 * 2.0**-24 * math.sqrt(terms)
        assert error <= max(2 * stock, floor), f"{name}: {error:.3g} against the stock op's {stock:.3g}"


@BACKENDS
@DTYPES
@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 0, 4), (3, 8, 0), (0, 0, 0), (1, 1, 1)], ids=str)
def test_empty_and_tiny_sizes(device, backend, dtype, shape):
    m, k, n = shape
    x, w = torch.ones(m, k, dtype=dtype, device=device), torch.ones(n, k, dtype=dtype, device=device)
    b = torch.full((n,), 0.5, dtype=dtype, device=device)
    args = [t.requires_grad_() for t in (x, w, b)]
    y = vx.linear(*args, backend=backend)
    assert torch.equal(y, torch.full((m, n), k + 0.5, dtype=dtype, device=device))
    dx, dw, db = torch.autograd.grad(y.sum(), args)
    assert torch.equal(dx, torch.full((m, k), float(n), dtype=dtype, device=device))
    assert torch.equal(dw, torch.full((n, k), float(m), dtype=dtype, device=device))
    assert torch.equal(db, torch.full((n,), float(m), dtype=dtype, device=device))


@BACKENDS
def test_special_values_pass_through(device, backend):
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([[1.0, 0.0], [inf, 0.0], [0.0, nan], [3e38, 3e38]], device=device)
    w = torch.tensor([[1.0, 1.0], [0.0, 1.0]], device=device)
    y = vx.linear(x, w, backend=backend)
    assert_bitwise(y.cpu(), torch.tensor([[1.0, 0.0], [inf, nan], [nan, nan], [inf, 3e38]]))


@pytest.mark.parametrize("device,backend", room_backends("linear", "cpu"))
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_no_padding_of_the_reduction(device, backend, rows):  # -0 + 0 * 0 would become +0
    x, w = torch.full((rows, 5), -1e-30, device=device), torch.full((3, 5), 1e-30, device=device)
    y = vx.linear(x, w, backend=backend)
    assert_bitwise(y.cpu(), torch.full((rows, 3), -0.0))


@BACKENDS
@DTYPES
def test_opcheck(device, backend, dtype):
    x = torch.randn(2, 3, 24, device=device).to(dtype).requires_grad_()
    w, b = torch.randn(5, 24, device=device).to(dtype).requires_grad_(), torch.randn(5, device=device).to(dtype)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.vexact.linear.default, (x, w, b, torch.float32, backend), test_utils=tests)
    dy = torch.randn(2, 3, 5, device=device)
    for name, args in (("linear_dx", (dy, w)), ("linear_dweight", (dy, x)), ("linear_dbias", (dy,))):
        args = tuple(a.detach() for a in args)
        torch.library.opcheck(getattr(torch.ops.vexact, name).default, (*args, dtype, backend), test_utils=tests)


@BACKENDS
def test_compiled_has_the_same_bits(device, backend):
    x, w = cancelling(6, 64, 40, seed=2, device=device)
    args = [x.view(2, 3, 64).requires_grad_(), w.requires_grad_()]

    def fn(x, w):
        return vx.linear(x * 2, w, backend=backend) * 0.5

    def run(f):
        y = f(*args)
        return y, *torch.autograd.grad(y.float().sum(), args)

    assert_bitwise(run(torch.compile(fn, backend="aot_eager", fullgraph=True)), run(fn))


@pytest.mark.parametrize("rows,layout", [(5, "nt"), (64, "nt"), (1000, "nt"), (1025, "nt"), (5, "nn"), (5, "tn")])
def test_products_of_a_step_are_raced_behind_a_short_kernel(monkeypatch, rows, layout):
    """As a model has them, over weights that the cache has forgotten. Gradients, and more rows than are decoded, follow
    one another, over less."""
    from vexact_ops.linear import cuda

    ran, raced, decodes = [], [], layout == "nt" and rows <= 1024

    def run(a, b, b_t, bias, out, resume, number):
        ran.append((number, b.data_ptr()))
        return cuda.DONE

    monkeypatch.setattr(cuda, "_ops", lambda: (None, run))
    monkeypatch.setattr(cuda, "_number", lambda kernel: kernel)
    monkeypatch.setattr(cuda, "copy_rows", lambda x, y: ran.append((x.shape, y.data_ptr() != x.data_ptr())))
    monkeypatch.setattr(cuda, "race_on_gpu", lambda calls, **_: raced.extend(calls) or [1.0] * len(calls))
    product = cuda.Product(
        torch.device("cpu"), torch.bfloat16, torch.bfloat16, rows, 48, 40, a_k=layout[0] == "n", b_k=layout[1] == "t"
    )
    two = cuda.RESUMED[:2]
    assert product.race([cuda.candidate(kernel) for kernel in two], product.tensors()) == [1.0, 1.0]
    assert len(raced[0]) == len(raced[1]) > 8
    for kernel, calls in zip(two, raced):
        ran.clear()
        for call in calls:
            call()
        products = [of for of in ran if of[0] == kernel]
        weights = {weight for _, weight in products}
        assert len(products) == len(calls) and len(weights) == (64 if decodes else 8), "in turn"
        between = [((product.m, product.k), True)] if decodes else []
        assert ran == [step for of in products for step in (*between, of)]


@pytest.mark.parametrize("device,backend", room_backends("linear", "triton"))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_short_kernel_of_a_gpu_s_race_copies_rows(device, backend, dtype):
    from vexact_ops._core.triton import copy_rows

    wide = torch.randn(3, 2100, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    for x in (wide[:, 8:2081], wide[:1, :1]):
        y = torch.full(x.shape, 7.0, dtype=dtype, device=device)
        copy_rows(x, y)
        assert_bitwise(y, x.contiguous())


def test_bad_arguments_are_named():
    x, w, b = torch.randn(2, 8), torch.randn(3, 8), torch.randn(3)
    with pytest.raises(TypeError, match=r"linear: x: got list"):
        vx.linear([1.0], w)
    with pytest.raises(TypeError, match=r"linear: x: got dtype float64, expected bfloat16 or float32"):
        vx.linear(x.double(), w)
    with pytest.raises(TypeError, match=r"linear: x: got dtype float16, which a GPU serves"):
        vx.linear(x.half(), w.half(), backend="cpu")
    with pytest.raises(TypeError, match=r"linear: weight: got dtype bfloat16, expected float32"):
        vx.linear(x, w.bfloat16())
    with pytest.raises(TypeError, match=r"linear: bias: got dtype bfloat16"):
        vx.linear(x, w, b.bfloat16())
    with pytest.raises(TypeError, match=r"linear: out_dtype: got torch.bfloat16, expected torch.float32"):
        vx.linear(x, w, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"linear: weight: got shape \(3, 7\), expected \(N, 8\)"):
        vx.linear(x, w[:, :7])
    with pytest.raises(ValueError, match=r"linear: weight: got shape \(8,\), expected 2 dimensions"):
        vx.linear(x, w[0])
    with pytest.raises(ValueError, match=r"linear: bias: got shape \(2,\), expected \(3,\)"):
        vx.linear(x, w, b[:2])
    with pytest.raises(ValueError, match=r"linear: x: got shape \(\), expected \(..., K\)"):
        vx.linear(x[0, 0], w)
    with pytest.raises(ValueError, match=r"linear: weight: got device meta, expected cpu as x has"):
        vx.linear(x, w.to("meta"))
    with pytest.raises(ValueError, match="linear: backend: got 'fast'"):
        vx.linear(x, w, backend="fast")
    with pytest.raises(vx.BackendUnavailable, match="does not serve cpu"):
        vx.linear(x, w, backend="cuda")
