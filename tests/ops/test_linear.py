"""linear: every output element is one fp32 accumulator over ascending k, on every path; gradients; bad arguments."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from conftest import room_backends
from hypothesis import given, settings
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.linear.reference import linear_ref
from vexact_ops.testing import (
    assert_bitwise,
    cancelling,
    check_repeatable,
    check_rows,
    count_different,
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


# A GPU's fast kernels

ON_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_SM90 = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="no SM90 device"
)
LAYOUTS = pytest.mark.parametrize("layout", ["fwd", "dx", "dweight"])


def operands(layout, rows, n, k, seed, dtype=torch.bfloat16):
    """a, b of x @ w.T, dy @ w or dy.T @ x for an (n, k) weight and so many rows; they cancel."""
    m, deep, wide = {"fwd": (rows, k, n), "dx": (rows, n, k), "dweight": (n, rows, k)}[layout]
    a, b = cancelling(m, deep, wide, seed, dtype, "cuda")
    a, b = a.clamp(-64, 64), b.t()
    if layout != "fwd":
        b = b.contiguous()
    return a.t().contiguous().t() if layout == "dweight" else a, b


@ON_GPU
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["rounded", "fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("n,k", [(1024, 1024), (520, 1032), (521, 1032), (65, 72), (4096, 12288)])
def test_the_gpu_has_the_triton_kernels_bits(n, k, dtype, out_dtype):
    x, w = cancelling(300, k, n, seed=n, dtype=dtype, device="cuda")
    x = x.clamp(-64, 64)
    bias = w[:, 0].contiguous() * 2.0**-12
    for rows in (1, 3, 8, 9, 31, 64, 65, 130, 300):
        for b in (None, bias):
            ours = vx.linear(x[:rows], w, b, out_dtype=out_dtype, backend="cuda")
            assert_bitwise(ours, vx.linear(x[:rows], w, b, out_dtype=out_dtype, backend="triton"), f"{rows} rows")


@ON_SM90
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "bias,resume", [(False, False), (True, False), (False, True)], ids=["plain", "bias", "resumed"]
)
@pytest.mark.parametrize("rows", [8, 64, 256])
@settings(max_examples=3)
@given(less=st.integers(0, 127), seed=SEED)
def test_every_admitted_kernel_has_the_triton_kernels_bits(layout, dtype, bias, resume, rows, less, seed):
    from vexact_ops.linear import cuda, triton

    n, k = 512, 1040
    out_dtype = torch.float32 if resume else dtype
    _, verdicts = cuda.admit(n, k, rows, dtype, out_dtype, bias=bias, resume=resume, layout=layout)
    assert any(v.admitted for v in verdicts), verdicts
    a, b = operands(layout, max(1, rows - less * rows // 256), n, k, seed, dtype)
    size = a.shape[0], b.shape[1]
    extra = (torch.randn(size[1], device="cuda") * 1e-3).to(dtype) if bias else None
    out = torch.randn(size, device="cuda") * 100 if resume else torch.empty(size, dtype=out_dtype, device="cuda")
    expected = triton.matmul(a, b, out.clone(), extra, resume=resume)
    for verdict in verdicts:
        if verdict.admitted and verdict.candidate != cuda.TRITON:
            ours = cuda.candidate(verdict.candidate, resume).run(a, b, False, extra, out)
            assert_bitwise(ours, expected, verdict.candidate)


@pytest.mark.parametrize("device,backend", room_backends("linear", "triton"))
@LAYOUTS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    "resume,off16", [(False, False), (False, True), (True, False)], ids=["plain", "off16", "resumed"]
)
def test_admission_takes_another_tile_and_refuses_another_order(
    device, backend, layout, dtype, resume, off16, tmp_path
):
    from vexact_ops._core.admit import Admissions, Candidate
    from vexact_ops.linear import cuda, triton

    out_dtype = torch.float32 if resume else dtype
    a_k, b_k = layout != "dweight", layout == "fwd"
    sizes = (24, 40, 264) if a_k else (72, 40, 200)
    product = cuda.Product(
        torch.device(device), dtype, out_dtype, *sizes, a_k, b_k, bias=True, resume=resume, out_aligned=not off16
    )
    assert (product.m, product.k, product.bucket) == ((32, 264, 32) if a_k else (72, 256, 256))

    def same(a, b, b_t, bias, out):  # another tile
        b = b.t() if b_t else b
        tile = {"BM": 16, "BN": 16, "BK": 16, "num_warps": 4, "num_stages": 2}
        return triton.matmul(a, b, out.clone(), bias, resume=resume, tile=tile)

    def halves(a, b, b_t, bias, out):
        b, cut = b.t() if b_t else b, a.shape[1] // 2
        acc = out.clone() if resume else torch.zeros_like(out, dtype=torch.float32)
        for at in (slice(cut), slice(cut, None)):
            acc = acc + triton.matmul(a[:, at], b[at], torch.zeros_like(acc))
        return (acc + bias.float()).to(out.dtype)

    found = Admissions("test", tmp_path / "a.json")
    same, halves = Candidate("same", same), Candidate("halves", halves)
    assert found.choose("k", [halves, same], product.canonical, product.cases) is same
    cases = product.cases()
    for case in cases:
        a, b, b_t, _, out = case
        assert a.shape[1] == b.shape[1 if b_t else 0] and out.shape == (a.shape[0], 40)
        assert cuda.Product.of(*case, resume).out_aligned is not off16
    different = count_different(halves.run(*cases[-1]), product.canonical(*cases[-1]))
    assert different > 0.2 * cases[-1][-1].numel(), f"{different}: a changed order shows in many elements"


@ON_SM90
def test_a_split_reduction_is_refused(tmp_path):
    from vexact_ops._core.admit import Admissions, Candidate, fastest
    from vexact_ops.linear import cuda

    def stock(a, b, b_t, bias, out):  # cuBLAS with its workspace cuts K in parts here
        return torch.nn.functional.linear(a, b)

    def halves(a, b, b_t, bias, out):
        cut = a.shape[1] // 2
        return sum(a[:, at].float() @ b[:, at].float().t() for at in (slice(cut), slice(cut, None))).to(out.dtype)

    product = cuda.Product(torch.device("cuda", 0), torch.bfloat16, torch.bfloat16, 16, 4096, 12288)
    ours = product.candidates()[:1]
    found = Admissions("test", tmp_path / "a.json")
    both = [Candidate("stock", stock), Candidate("halves", halves)]
    assert found.choose("k", [*both, *ours], product.canonical, product.cases).name == ours[0].name
    for verdict in found.verdicts("k")[:2]:
        assert verdict.different > 0, verdict
    assert fastest(found.verdicts("k")) == ours[0].name


@ON_SM90
def test_adding_at_the_end_is_no_resumption(tmp_path):
    from vexact_ops._core.admit import Admissions
    from vexact_ops.linear import cuda

    product = cuda.Product(torch.device("cuda", 0), torch.bfloat16, torch.float32, 256, 512, 1024, resume=True)
    found = Admissions("test", tmp_path / "a.json")
    names = product.cublaslt_names(2)  # it would add the old values to the finished sum
    candidates = [cuda.candidate(name, True) for name in names]
    assert names and found.choose("k", candidates, product.canonical, product.cases) is None
    assert all(verdict.different > 0 for verdict in found.verdicts("k"))


@ON_SM90
@LAYOUTS
@pytest.mark.parametrize("resume", [False, True], ids=["plain", "resumed"])
def test_matmul_reads_any_strides(layout, resume):
    from vexact_ops.linear import cuda, triton

    for rows, n, k in ((300, 520, 776), (48, 777, 513), (1, 1024, 1024)):
        a, b = operands(layout, rows, n, k, seed=rows)
        wide = torch.full((b.shape[0] + 3, b.shape[1] + 24), float("nan"), dtype=b.dtype, device="cuda")
        view = wide[3:, 8:-16]
        view.copy_(b)
        odd = torch.stack([a, a * 0], -1)[..., 0]
        room = torch.randn(a.shape[0], b.shape[1] + 8, device="cuda")
        expected = triton.matmul(a, b, room[:, :-8].clone(), resume=resume)
        for x in (a, a.contiguous(), a.t().contiguous().t(), odd):
            for y in (b, view, b.contiguous(), b.t().contiguous().t()):
                out = room.clone()
                cuda.matmul(x, y, out[:, :-8], resume=resume)
                assert_bitwise(out[:, :-8], expected, f"{x.stride()} {y.stride()}")
                assert_bitwise(out[:, -8:], room[:, -8:], "beside it")


@ON_GPU
@pytest.mark.parametrize("rows", [1, 40, 300])
def test_concatenated_weights_keep_their_bits(rows):
    x, w = cancelling(rows, 1024, 2048, seed=rows, device="cuda")
    parts = w[:1024], w[1024:1536], w[1536:]
    assert_bitwise(vx.linear(x, w), torch.cat([vx.linear(x, part.clone()) for part in parts], 1), "q, k, v")
    wide = torch.cat([x, x], 1)[:, :1024]
    assert_bitwise(vx.linear(wide, parts[1]), vx.linear(x, parts[1].clone()), "a part in place")


@ON_GPU
def test_a_graph_replays_the_eager_bits():
    x, w = cancelling(16, 1024, 512, seed=3, device="cuda")
    expected = vx.linear(x, w)
    static = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = vx.linear(static, w)
    static.copy_(x)
    graph.replay()
    assert_bitwise(y, expected)


@ON_SM90
def test_a_first_call_inside_a_graph_verifies_nothing(monkeypatch):
    from vexact_ops.linear import cuda

    x, w = cancelling(24, 1048, 568, seed=3, device="cuda")
    vx.linear(x, w, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = vx.linear(x, w)
    graph.replay()
    asked = []
    settle = cuda._settle
    monkeypatch.setattr(cuda, "_settle", lambda *args: asked.append(args) or settle(*args))
    assert_bitwise(vx.linear(x, w), y)
    assert_bitwise(vx.linear(x[:17], w), y[:17])
    assert len(asked) == 1, "chosen once for a bucket"


@ON_SM90
def test_rows_beyond_the_largest_bucket(monkeypatch):
    from vexact_ops.linear import cuda

    monkeypatch.setattr(cuda, "LARGEST", 256)
    _, small = cuda.admit(520, 1016, 256, torch.bfloat16)
    _, large = cuda.admit(520, 1016, 700, torch.bfloat16)
    best = min((v for v in small if v.admitted), key=lambda v: v.us)
    assert best.candidate != cuda.TRITON
    assert [(v.candidate, v.different) for v in large] == [(best.candidate, 0)]
