"""log_softmax: rows stand alone, every path has the same bits, gradients are right, bad arguments are named."""

import math

import pytest
import torch
from conftest import room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.log_softmax.reference import log_softmax_ref
from vexact_ops.testing import assert_bitwise, check_repeatable, check_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("log_softmax"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
SIZES = st.sampled_from([1, 7, 16, 65, 511, 512, 513, 1024, 2001])


def make(rows, n, dtype, device, seed):
    """Logits of every size in even rows; in odd ones a peak over many small ones, where the log of the sum keeps the
    last bits of the sum. A fifth of them -inf, but never a whole row."""
    x = tricky(rows, n, seed=seed)
    x[1::2] = torch.randn(x[1::2].shape, generator=torch.Generator().manual_seed(seed)) - 8.0
    x[1::2, 0] = 0.0
    x = x.to(dtype)
    g = torch.Generator().manual_seed(seed)
    masked = torch.rand(rows, n, generator=g) < 0.2
    masked[:, 0] = False
    return x.masked_fill(masked, -math.inf).to(device)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["out32", "out16"])
@given(n=SIZES, rows=st.integers(1, 7), seed=st.integers(0, 2**16))
def test_rows_stand_alone(device, backend, dtype, out_dtype, n, rows, seed):
    x = make(rows, n, dtype, device, seed)
    check_rows(lambda x: vx.log_softmax(x, out_dtype=out_dtype, backend=backend), x, seed=seed)


@BACKENDS
@DTYPES
@given(n=SIZES, rows=st.integers(1, 7), seed=st.integers(0, 2**16))
def test_gradient_rows_stand_alone(device, backend, dtype, n, rows, seed):
    x, dy = make(rows, n, dtype, device, seed), tricky(rows, n, seed=seed + 1, dtype=dtype, device=device)

    def dx(x, dy):
        x = x.clone().requires_grad_()
        return torch.autograd.grad(vx.log_softmax(x, backend=backend), x, dy)

    check_rows(dx, x, dy, seed=seed)


@BACKENDS
@DTYPES
def test_repeatable(device, backend, dtype):
    x, dy = make(9, 3001, dtype, device, 0).requires_grad_(), tricky(9, 3001, seed=1, dtype=dtype, device=device)

    def run():
        y = vx.log_softmax(x, backend=backend)
        return y, *torch.autograd.grad(y, x, dy)

    check_repeatable(run)


@BACKENDS
def test_leading_dimensions_and_strides_do_not_show(device, backend):
    x = torch.randn(3, 4, 600, generator=torch.Generator().manual_seed(0)).to(device)
    expected = torch.stack([vx.log_softmax(r, backend=backend) for r in x.view(12, 600)]).view(3, 4, 600)
    assert_bitwise(vx.log_softmax(x, backend=backend), expected)
    assert_bitwise(vx.log_softmax(x.transpose(0, 1), backend=backend), expected.transpose(0, 1).contiguous())
    across = torch.empty(600, 12, device=device).t().copy_(x.view(12, 600)).view(3, 4, 600)
    assert_bitwise(vx.log_softmax(across, backend=backend), expected)


def test_an_order_that_the_row_count_picks_is_caught():
    def batch_dependent(x):
        blocks = 1 if x.shape[0] < 4 else 7
        parts = [p.exp().sum(-1, keepdim=True) for p in (x - x.amax(-1, keepdim=True)).chunk(blocks, -1)]
        return x - x.amax(-1, keepdim=True) - sum(parts).log()

    with pytest.raises(AssertionError, match="differ"):
        check_rows(batch_dependent, make(8, 2001, torch.float32, "cpu", 0))


@BACKENDS
@DTYPES
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_accuracy(device, backend, dtype, scale):
    g = torch.Generator().manual_seed(1)
    x = (torch.randn(16, 5000, generator=g) * scale).to(device, dtype)
    dy = torch.randn(16, 5000, generator=g).to(device, dtype)

    def run(fn, x, dy):
        x = x.clone().requires_grad_()
        y = fn(x)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    exact = run(log_softmax_ref, x.double(), dy.double())
    ours = run(lambda x: vx.log_softmax(x, backend=backend), x, dy)
    theirs = run(lambda x: torch.log_softmax(x, -1), x, dy)
    for name, o, t, e in zip(("y", "dx"), ours, theirs, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"


@BACKENDS
def test_a_probability_near_one_keeps_its_digits(device, backend):
    """Where max and log-sum are one number, log p is a multiple of the logit's last place."""
    x = torch.full((1, 3), 40.0 - 15.0, device=device)
    x[0, 0] = 40.0
    exact = log_softmax_ref(x.double())[0, 0].item()
    assert vx.log_softmax(x, backend=backend)[0, 0].item() == pytest.approx(exact, rel=0.25)
    assert float(x[0, 0] - torch.logsumexp(x, -1)) == 0.0  # what one number would give


@BACKENDS
def test_masked_infinite_and_nan_logits(device, backend):
    inf, nan = math.inf, math.nan
    x = torch.tensor([[0.0, -inf, 0.0], [-inf, -inf, 3.0], [nan, 0, 1], [inf, 0, 1], [-inf] * 3], device=device)
    y = vx.log_softmax(x, backend=backend)
    half = -torch.tensor(2.0).log().item()
    assert_bitwise(y[0].cpu(), torch.tensor([half, -inf, half]))
    assert_bitwise(y[1].cpu(), torch.tensor([-inf, -inf, 0.0]))
    assert y[2:].isnan().all()


@BACKENDS
def test_opcheck(device, backend):
    x = torch.randn(3, 40, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.vexact.log_softmax.default, (x, torch.float32, backend))


def test_bad_arguments_are_named():
    x = torch.randn(2, 8)
    with pytest.raises(TypeError, match="log_softmax: x: got list"):
        vx.log_softmax([1.0])
    with pytest.raises(TypeError, match="log_softmax: x: got dtype float64"):
        vx.log_softmax(x.double())
    with pytest.raises(TypeError, match=r"log_softmax: out_dtype: got torch\.float64"):
        vx.log_softmax(x, out_dtype=torch.float64)
    with pytest.raises(TypeError, match="log_softmax: out_dtype: got dtype float16, which a GPU serves"):
        vx.log_softmax(x, out_dtype=torch.float16, backend="cpu")
    with pytest.raises(ValueError, match=r"log_softmax: x: got shape \(2, 0\)"):
        vx.log_softmax(x[:, :0])
    with pytest.raises(ValueError, match=r"log_softmax: x: got shape \(\)"):
        vx.log_softmax(x[0, 0])
    with pytest.raises(vx.BackendUnavailable, match="does not serve cpu"):
        vx.log_softmax(x, backend="cuda")


def test_zero_rows_give_zero_rows():
    x = torch.empty(0, 8, requires_grad=True)
    y = vx.log_softmax(x)
    assert y.shape == (0, 8)
    y.sum().backward()
    assert x.grad.shape == (0, 8)
