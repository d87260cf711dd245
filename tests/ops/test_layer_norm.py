"""layer_norm: rows stand alone, every path has the same bits, gradients are right, bad arguments are named."""

import pytest
import torch
from conftest import room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.layer_norm.reference import layer_norm_ref
from vexact_ops.testing import assert_bitwise, cancelling, check_repeatable, check_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("layer_norm"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
SIZES = st.sampled_from([1, 7, 16, 64, 100, 576, 1031])
PARAMETERS = st.sampled_from([(True, True), (True, False), (False, True), (False, False)])


def parameters(n, which, dtype, device, seed):
    made = (tricky(n, seed=seed + i, dtype=dtype, device=device) for i in (1, 2))
    return tuple(p if asked else None for p, asked in zip(made, which))


@BACKENDS
@DTYPES
@given(n=SIZES, rows=st.integers(1, 9), which=PARAMETERS, residual=st.booleans(), seed=st.integers(0, 2**16))
def test_rows_stand_alone(device, backend, dtype, n, rows, which, residual, seed):
    """Forward and the gradient of the input, with a residual and without, with either parameter and without."""
    w, b = parameters(n, which, dtype, device, seed)
    rowwise = [tricky(rows, n, seed=seed + i, dtype=dtype, device=device) for i in (0, 3, 4)[: 2 + residual]]

    def run(x, dy, r=None):
        x = x.clone().requires_grad_()
        out = vx.layer_norm(x, w, b, 1e-5, r, backend=backend)
        out = out if isinstance(out, tuple) else (out,)
        return *(t.detach() for t in out), *torch.autograd.grad(out[0], x, dy)

    check_rows(run, *rowwise, seed=seed)


@BACKENDS
@DTYPES
def test_repeatable(device, backend, dtype):
    x = tricky(33, 577, seed=0, dtype=dtype, device=device).requires_grad_()
    w, b = (p.requires_grad_() for p in parameters(577, (True, True), dtype, device, 0))

    def run():
        y, h = vx.layer_norm(x, w, b, residual=x * 0.5, backend=backend)
        return y, h, *torch.autograd.grad((y.float().square().sum() + h.float().sum()), (x, w, b))

    check_repeatable(run)


@pytest.mark.parametrize("device,backend", room_backends("layer_norm", "triton"))
@DTYPES
@pytest.mark.parametrize("n", [1, 33, 576, 1031, 20000])
def test_the_order_on_a_gpu_is_a_tree_of_pairs(device, backend, dtype, n):
    from vexact_ops._core.triton import tree_sum_ref

    x, _ = cancelling(3, n, 1, seed=n, dtype=dtype)
    width = min(max(1 << (n - 1).bit_length(), 16), 16384)
    off = x.float() - (tree_sum_ref(x.float(), width) / n)[:, None]
    scale = (
        1.0 / (tree_sum_ref(off * off, width) / n + 1e-5).double().sqrt().float()
    )  # torch.sqrt is an ulp off at times
    y = vx.layer_norm(x.to(device), backend=backend)
    assert_bitwise(y.cpu(), (off * scale[:, None]).to(dtype))


def test_a_batch_dependent_norm_is_caught():
    def batch_dependent(x):  # sums in an order that the row count picks
        parts = 1 if x.shape[0] < 4 else 4
        off = x - sum(p.sum(-1, keepdim=True) for p in x.chunk(parts, dim=-1)) / x.shape[-1]
        return off * torch.rsqrt(off.square().mean(-1, keepdim=True) + 1e-5)

    with pytest.raises(AssertionError, match="differ"):
        check_rows(batch_dependent, torch.randn(8, 576, generator=torch.Generator().manual_seed(0)))


@BACKENDS
@DTYPES
@pytest.mark.parametrize("which", [(True, True), (False, False)], ids=["weighted", "plain"])
def test_accuracy(device, backend, dtype, which):
    """At most twice the error of torch's own, far from zero too, gradients too."""
    g = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(64, 1000, generator=g).to(device, dtype) for _ in range(2))
    w, b = (torch.randn(1000, generator=g).to(device, dtype) if asked else None for asked in which)
    x[:8] += 16

    def run(fn, *tensors, dy):
        leaves = [t if t is None else t.detach().clone().requires_grad_() for t in tensors]
        y = fn(*leaves)
        return y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)

    wide = [t if t is None else t.double() for t in (x, w, b)]
    exact = run(layer_norm_ref, *wide, dy=dy.double())
    ours = run(lambda x, w, b: vx.layer_norm(x, w, b, backend=backend), x, w, b, dy=dy)
    theirs = run(lambda x, w, b: torch.nn.functional.layer_norm(x, (1000,), w, b), x, w, b, dy=dy)
    for name, o, t, e in zip(("y", "dx", "dweight", "dbias"), ours, theirs, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"


@BACKENDS
def test_opcheck(device, backend):
    x = torch.randn(3, 32, device=device, requires_grad=True)
    w, b = (torch.randn(32, device=device, requires_grad=True) for _ in range(2))
    for args in ((x, w, b, x.detach()), (x, w, None, None), (x, None, None, None)):
        torch.library.opcheck(torch.ops.vexact.layer_norm.default, (*args, 1e-5, backend))


def test_bad_arguments_are_named():
    x, w = torch.randn(2, 8), torch.randn(8)
    with pytest.raises(TypeError, match=r"layer_norm: x: got dtype float64"):
        vx.layer_norm(x.double())
    with pytest.raises(TypeError, match=r"layer_norm: x: got dtype float16, which a GPU serves"):
        vx.layer_norm(x.half(), backend="cpu")
    with pytest.raises(TypeError, match=r"layer_norm: weight: got dtype bfloat16"):
        vx.layer_norm(x, w.bfloat16())
    with pytest.raises(ValueError, match=r"layer_norm: bias: got shape \(7,\), expected \(8,\)"):
        vx.layer_norm(x, w, w[:7])
    with pytest.raises(ValueError, match=r"layer_norm: residual: got shape"):
        vx.layer_norm(x, w, residual=x[:1])
    with pytest.raises(ValueError, match="layer_norm: eps: got nan"):
        vx.layer_norm(x, w, None, float("nan"))
    with pytest.raises(ValueError, match=r"layer_norm: x: got shape \(2, 0\)"):
        vx.layer_norm(x[:, :0])
    with pytest.raises(vx.BackendUnavailable, match="does not serve cpu"):
        vx.layer_norm(x, backend="cuda")


def test_zero_rows_give_zero_rows():
    x, w, b = torch.empty(0, 8, requires_grad=True), *(torch.ones(8, requires_grad=True) for _ in range(2))
    y = vx.layer_norm(x, w, b)
    assert y.shape == (0, 8)
    y.sum().backward()
    assert x.grad.shape == (0, 8)
    assert torch.equal(w.grad, torch.zeros(8)) and torch.equal(b.grad, torch.zeros(8))
