"""rmsnorm: rows stand alone, every path has the same bits, gradients are right, bad arguments are named."""

import pytest
import torch
from conftest import interpreted, room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.rmsnorm.reference import rmsnorm_gated_ref, rmsnorm_ref
from vexact_ops.testing import assert_bitwise, cancelling, check_repeatable, check_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("rmsnorm"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
SIZES = st.sampled_from([1, 7, 16, 64, 100, 576, 1031])


def make(rows, n, dtype, device, seed):
    return tricky(rows, n, seed=seed, dtype=dtype, device=device), tricky(n, seed=seed + 1, dtype=dtype, device=device)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("style", ["llama", "gemma"])
@given(n=SIZES, rows=st.integers(1, 9), residual=st.booleans(), seed=st.integers(0, 2**16))
def test_rows_stand_alone(device, backend, dtype, style, n, rows, residual, seed):
    x, w = make(rows, n, dtype, device, seed)
    extra = (tricky(rows, n, seed=seed + 2, dtype=dtype, device=device),) if residual else ()
    check_rows(lambda x, r=None: vx.rmsnorm(x, w, 1e-6, r, style=style, backend=backend), x, *extra, seed=seed)


@BACKENDS
@DTYPES
@given(n=SIZES, rows=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_gradient_rows_stand_alone(device, backend, dtype, n, rows, seed):
    x, w = make(rows, n, dtype, device, seed)
    dy = tricky(rows, n, seed=seed + 2, dtype=dtype, device=device)

    def dx(x, dy):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(vx.rmsnorm(x, w, backend=backend), x, dy)

    check_rows(dx, x, dy, seed=seed)


@BACKENDS
@DTYPES
def test_repeatable(device, backend, dtype):
    x, w = make(33, 577, dtype, device, 0)
    x.requires_grad_()
    w.requires_grad_()

    def run():
        y, h = vx.rmsnorm(x, w, residual=x * 0.5, backend=backend)
        return y, h, *torch.autograd.grad((y.float().square().sum() + h.float().sum()), (x, w))

    check_repeatable(run)


@pytest.mark.parametrize("device,backend", room_backends("rmsnorm", "triton"))
@DTYPES
@pytest.mark.parametrize("n", [1, 33, 576, 1031, 20000])
def test_the_order_on_a_gpu_is_a_tree_of_pairs(device, backend, dtype, n):
    from vexact_ops._core.triton import tree_sum_ref

    x, _ = cancelling(3, n, 1, seed=n, dtype=dtype)
    w = torch.ones(n, dtype=dtype)
    squares = tree_sum_ref(x.float() * x.float(), min(max(1 << (n - 1).bit_length(), 16), 16384))
    scale = 1.0 / (squares / n + 1e-6).double().sqrt().float()  # torch.sqrt is an ulp off at times
    y = vx.rmsnorm(x.to(device), w.to(device), backend=backend)
    assert_bitwise(y.cpu(), (x.float() * scale[:, None]).to(dtype))


ONE_PASS = [(64, 128, 70, "llama"), (64, 300, 40, "gemma"), (16, 577, 17, "llama")]
ONE_PASS += [(16, 1024, 9000, "gemma"), (64, 2049, 300, "llama"), (64, 4096, 4097, "llama")]


@pytest.mark.parametrize("device,backend", room_backends("rmsnorm", "triton"))
@DTYPES
@pytest.mark.parametrize("rows, n, count, style", ONE_PASS)
def test_gradients_in_one_pass_are_those_of_two_on_a_gpu(device, backend, dtype, rows, n, count, style):
    """Of rows that cancel each other, so that dweight shows their order; and of one, which is a sum alone."""
    if interpreted(device, backend) and n > 600:
        pytest.skip("seconds in the interpreter")
    from vexact_ops.rmsnorm import triton

    x, weight = make(count, n, dtype, device, n)
    dy, half = tricky(count, n, seed=n + 2, dtype=dtype, device=device), count // 2
    dy[half : 2 * half], x[half : 2 * half] = -dy[:half].flip(0), x[:half].flip(0)
    scale = 1.0 / (x.float().square().mean(1) + 1e-6).sqrt()
    name = next(name for name, of in triton.ONE.items() if of == rows)
    for case in ((dy, None, x, weight, scale), (dy[:1], dy[1:2], x[:1], weight, scale[:1])):
        one, two = (triton._backward(kernel, style == "gemma", *case) for kernel in (name, triton.TWO))
        assert_bitwise(one, two)


@pytest.mark.parametrize("device,backend", room_backends("rmsnorm", "triton"))
def test_shares_of_few_rows_join_on_a_gpu_as_those_of_a_whole_tile_do(device, backend):
    """A sum that nothing fills up is -0 where all its terms are; one with a place left over is +0."""
    from vexact_ops._core.triton import sum_rows, tree_sum_ref
    from vexact_ops.rmsnorm.triton_backward import _join

    for rows in (64, 16):
        each = 64 // rows
        for count in (64, 65):
            parts = -torch.zeros(count * each, 3, device=device)
            negative = torch.signbit(_join(parts, rows, torch.float32))
            if not interpreted(device, backend):  # whose sum begins with +0
                assert negative.all() == negative.any() == (count == 64)
        parts = tricky(130 * each, 40, seed=rows, device=device)
        whole = tree_sum_ref(parts.view(130, each, 40).transpose(1, 2), each)
        assert_bitwise(_join(parts, rows, torch.bfloat16), sum_rows(whole.contiguous(), torch.bfloat16))


def test_a_batch_dependent_norm_is_caught():
    def batch_dependent(x):  # sums in an order that the row count picks
        parts = 1 if x.shape[0] < 4 else 4
        squares = sum(p.square().sum(-1, keepdim=True) for p in x.chunk(parts, dim=-1))
        return x * torch.rsqrt(squares / x.shape[-1] + 1e-6)

    with pytest.raises(AssertionError, match="differ"):
        check_rows(batch_dependent, torch.randn(8, 576, generator=torch.Generator().manual_seed(0)))


@BACKENDS
@DTYPES
@pytest.mark.parametrize("style", ["llama", "gemma"])
def test_accuracy(device, backend, dtype, style):
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(64, 1000, generator=g).to(device, dtype), torch.randn(1000, generator=g).to(device, dtype)
    dy = torch.randn(64, 1000, generator=g).to(device, dtype)

    def stock(x, w):  # the Hugging Face module's arithmetic
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * normed.to(x.dtype) if style == "llama" else (normed * (1 + w.float())).to(x.dtype)

    def run(fn, x, w, dy):
        x, w = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
        y = fn(x, w)
        return y.detach(), *torch.autograd.grad(y, (x, w), dy)

    exact = run(lambda x, w: rmsnorm_ref(x, w, style=style), x.double(), w.double(), dy.double())
    ours = run(lambda x, w: vx.rmsnorm(x, w, style=style, backend=backend), x, w, dy)
    theirs = run(stock, x, w, dy)
    for name, o, t, e in zip(("y", "dx", "dw"), ours, theirs, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"


@BACKENDS
def test_opcheck(device, backend):
    x, w = torch.randn(3, 32, device=device, requires_grad=True), torch.randn(32, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.vexact.rmsnorm.default, (x, w, x.detach(), 1e-6, True, backend))


def test_bad_arguments_are_named():
    x, w = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(TypeError, match=r"rmsnorm: x: got dtype float64"):
        vx.rmsnorm(x.double(), w)
    with pytest.raises(TypeError, match=r"rmsnorm: x: got dtype float16, which a GPU serves"):
        vx.rmsnorm(x.half(), w.half(), backend="cpu")
    with pytest.raises(TypeError, match=r"rmsnorm: weight: got dtype bfloat16"):
        vx.rmsnorm(x, w.bfloat16())
    with pytest.raises(ValueError, match=r"rmsnorm: weight: got shape \(7,\), expected \(8,\)"):
        vx.rmsnorm(x, w[:7])
    with pytest.raises(ValueError, match=r"rmsnorm: residual: got shape"):
        vx.rmsnorm(x, w, residual=x[:1])
    with pytest.raises(ValueError, match="rmsnorm: eps: got nan"):
        vx.rmsnorm(x, w, float("nan"))
    with pytest.raises(ValueError, match="rmsnorm: style"):
        vx.rmsnorm(x, w, style="layer")
    with pytest.raises(ValueError, match="rmsnorm: backend: got 'fast'"):
        vx.rmsnorm(x, w, backend="fast")
    with pytest.raises(vx.BackendUnavailable, match="does not serve cpu"):
        vx.rmsnorm(x, w, backend="cuda")


def test_zero_rows_give_zero_rows():
    x, w = torch.empty(0, 8, requires_grad=True), torch.ones(8, requires_grad=True)
    y = vx.rmsnorm(x, w)
    assert y.shape == (0, 8)
    y.sum().backward()
    assert x.grad.shape == (0, 8)
    assert torch.equal(w.grad, torch.zeros(8))


# rmsnorm_gated


def gated(x, gate, dy, weight, backend):
    x, gate = x.clone().requires_grad_(), gate.clone().requires_grad_()
    y = vx.rmsnorm_gated(x, gate, weight, backend=backend)
    return y.detach(), *torch.autograd.grad(y, (x, gate), dy)


@BACKENDS
@DTYPES
@given(n=SIZES, rows=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_gated_rows_stand_alone(device, backend, dtype, n, rows, seed):
    x, w = make(rows, n, dtype, device, seed)
    gate, dy = (tricky(rows, n, seed=seed + i, dtype=dtype, device=device) for i in (2, 3))
    check_rows(lambda *t: gated(*t, w, backend), x, gate, dy, seed=seed)


@BACKENDS
@DTYPES
@given(n=SIZES, seed=st.integers(0, 2**16))
def test_a_gated_norm_is_rounded_where_it_says_alone(device, backend, dtype, n, seed):
    """The norm with its weight is rmsnorm, rounded twice; silu of the gate is not rounded before the last product."""
    (x, w), gate = make(5, n, dtype, device, seed), tricky(5, n, seed=seed + 2, dtype=dtype, device=device)
    normed = vx.rmsnorm(x, w, backend=backend)
    expected = vx.silu_mul(gate, normed, backend=backend)
    assert_bitwise(vx.rmsnorm_gated(x, gate, w, backend=backend), expected)


@BACKENDS
@DTYPES
@given(n=SIZES, heads=st.integers(1, 3), rows=st.integers(1, 5), seed=st.integers(0, 2**16))
def test_a_gate_may_stand_in_wider_rows_alone(device, backend, dtype, n, heads, rows, seed):
    """As a projection leaves it, beside what else it made."""
    (x, w), sizes = make(rows * heads, n, dtype, device, seed), (heads * n, 8)
    x = x.view(rows, heads, n)
    wide = tricky(rows, sum(sizes), seed=seed + 2, dtype=dtype, device=device).requires_grad_()
    gate = wide.split_with_sizes(sizes, 1)[0].unflatten(1, (heads, n))
    dy = tricky(rows * heads, n, seed=seed + 3, dtype=dtype, device=device).view_as(x)
    expected, _, dgate = gated(x, gate.detach(), dy, w, backend)  # of a copy
    y = vx.rmsnorm_gated(x, gate, w, backend=backend)
    (dwide,) = torch.autograd.grad(y, wide, dy)
    assert_bitwise(y.detach(), expected)
    assert_bitwise(dwide[:, : heads * n].unflatten(1, (heads, n)), dgate)
    assert not dwide[:, heads * n :].any()


@pytest.mark.parametrize("device,backend", room_backends("rmsnorm", "triton"))
@DTYPES
@pytest.mark.parametrize("n", [16, 100, 128, 1000])
def test_gated_rows_walked_have_the_bits_of_rows_alone(device, backend, dtype, n, monkeypatch):
    """Outputs and, by way of what is kept for them, gradients; of a gate in wider rows too."""
    import importlib

    kernels, heads = importlib.import_module("vexact_ops.rmsnorm.triton"), 3
    rows = 2 * (1024 // n) * heads  # and a program's last ones are missing
    (x, w), wide = make(rows, n, dtype, device, 4), tricky(rows // heads, heads * n + 8, seed=6, dtype=dtype)
    gate = wide.to(device)[:, : heads * n].unflatten(1, (heads, n))
    dy = tricky(rows, n, seed=7, dtype=dtype, device=device).view(-1, heads, n)

    def run(walked):
        monkeypatch.setattr(kernels, "WALKED", walked)
        return gated(x.view(-1, heads, n), gate, dy, w, backend)

    assert "BLOCKS" in (run(0) and kernels._gated_tile(rows, n))
    assert_bitwise(run(0), run(1 << 40))


@BACKENDS
@DTYPES
def test_gated_accuracy(device, backend, dtype):
    """At most twice the error of the module's own operations, gradients too."""
    draw = torch.Generator().manual_seed(1)
    x, gate, dy = (torch.randn(200, 128, generator=draw).to(device, dtype) for _ in range(3))
    w = torch.randn(128, generator=draw).to(device, dtype)

    def stock(x, gate, w):
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return ((w * h.to(x.dtype)) * torch.nn.functional.silu(gate.float())).to(x.dtype)

    def run(fn, *tensors, dy=dy):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = fn(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    exact = run(rmsnorm_gated_ref, x.double(), gate.double(), w.double(), dy=dy.double())
    ours = run(lambda *t: vx.rmsnorm_gated(*t, backend=backend), x, gate, w)
    theirs = run(stock, x, gate, w)
    for name, o, t, e in zip(("y", "dx", "dgate", "dweight"), ours, theirs, exact, strict=True):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 2e-7, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"


@BACKENDS
def test_gated_repeats_and_opchecks(device, backend):
    (x, w), gate = make(133, 577, torch.bfloat16, device, 0), tricky(133, 577, seed=2, device=device).bfloat16()

    def run():
        leaves = [t.clone().requires_grad_() for t in (x, gate, w)]
        y = vx.rmsnorm_gated(*leaves, backend=backend)
        return y, *torch.autograd.grad(y, leaves, torch.ones_like(y))

    check_repeatable(run)
    args = [t.float().requires_grad_() for t in (x[:3], gate[:3], w)]
    torch.library.opcheck(torch.ops.vexact.rmsnorm_gated.default, (*args, 1e-6, backend))


def test_bad_arguments_of_the_gated_norm_are_named():
    x, gate, w = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    with pytest.raises(TypeError, match="rmsnorm_gated: x: got dtype int64"):
        vx.rmsnorm_gated(x.long(), gate, w)
    with pytest.raises(TypeError, match="rmsnorm_gated: gate: got dtype bfloat16, expected float32 as x has"):
        vx.rmsnorm_gated(x, gate.bfloat16(), w)
    with pytest.raises(ValueError, match=r"rmsnorm_gated: gate: got shape \(3, 4\), expected \(3, 8\)"):
        vx.rmsnorm_gated(x, gate[:, :4], w)
    with pytest.raises(ValueError, match=r"rmsnorm_gated: weight: got shape \(4,\), expected \(8,\)"):
        vx.rmsnorm_gated(x, gate, w[:4])
    with pytest.raises(ValueError, match="rmsnorm_gated: eps: got -1"):
        vx.rmsnorm_gated(x, gate, w, -1)
    assert vx.rmsnorm_gated(x[:0], gate[:0], w).shape == (0, 8)
