"""mean and sum: elements stand alone, any dims, every path has the same bits, gradients, bad arguments are named."""

import pytest
import torch
from conftest import room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.mean.reference import mean_ref
from vexact_ops.testing import assert_bitwise, cancelling, check_repeatable, check_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("mean"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
DIMS = [-1, 0, 1, (0, 2), (2, 1), (-1, -3, 1), None, ()]


@BACKENDS
@DTYPES
@given(n=st.sampled_from([1, 5, 16, 100, 512, 513, 1500]), rows=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_rows_stand_alone(device, backend, dtype, n, rows, seed):
    x = tricky(rows, n, seed=seed, dtype=dtype, device=device)
    check_rows(lambda x: vx.mean(x, backend=backend), x, seed=seed)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("dim", DIMS, ids=str)
@pytest.mark.parametrize("keepdim", [False, True], ids=["drop", "keep"])
def test_every_choice_of_dims(device, backend, dtype, dim, keepdim):
    x = tricky(5, 70, 33, seed=3, dtype=dtype, device=device)
    y = vx.mean(x, dim, keepdim, backend=backend)
    assert y.shape == torch.mean(x, dim, keepdim).shape
    assert y.dtype == dtype
    exact = mean_ref(x.double(), dim, keepdim)
    rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 1e-5)
    torch.testing.assert_close(y.double(), exact, rtol=rtol, atol=1e-5)


@BACKENDS
@DTYPES
def test_a_sum_is_the_mean_undivided(device, backend, dtype):
    """By a power of two the division is exact: n times the mean has the sum's bits."""
    x = tricky(5, 64, 32, seed=3, dtype=dtype, device=device)
    for dim, n in ((1, 64), (2, 32), ((1, 2), 2048)):
        y = vx.sum(x, dim, keepdim=True, backend=backend)
        assert_bitwise(y, vx.mean(x.float(), dim, True, backend=backend).mul(n).to(dtype))
        exact = x.double().sum(dim, keepdim=True)
        rtol = {torch.bfloat16: 2**-7, torch.float16: 2**-10}.get(dtype, 1e-5)
        torch.testing.assert_close(y.double(), exact, rtol=rtol, atol=1e-2)
    assert vx.sum(x, backend=backend).shape == ()
    assert_bitwise(vx.sum(x[:, :0], 1, backend=backend), torch.zeros(5, 32, dtype=dtype, device=device))
    assert vx.mean(x[:, :0], 1, backend=backend).isnan().all()
    x.requires_grad_()
    dy = torch.randn(5, 32, device=device).to(dtype)
    assert_bitwise(torch.autograd.grad(vx.sum(x, 1, backend=backend), x, dy)[0], dy[:, None].expand(5, 64, 32))
    with pytest.raises(ValueError, match="sum: dim: got 3, expected distinct dimensions of a 3-dimensional x"):
        vx.sum(x, 3, backend=backend)


@BACKENDS
def test_layout_does_not_show(device, backend):
    x = cancelling(12, 1400, 1, seed=0, dtype=torch.float32, device=device)[0]
    expected = vx.mean(x, backend=backend)
    assert_bitwise(vx.mean(x.t().contiguous(), 0, backend=backend), expected)
    assert_bitwise(vx.mean(x.t().contiguous().t(), 1, backend=backend), expected)
    assert_bitwise(vx.mean(x.view(3, 4, 20, 70), (2, 3), backend=backend), expected.view(3, 4))
    blocks = x.view(12, 20, 70).permute(1, 0, 2).contiguous()  # dims 0 and 2 are reduced, ascending
    assert_bitwise(vx.mean(blocks, (2, 0), backend=backend), expected)


@BACKENDS
@DTYPES
def test_repeatable(device, backend, dtype):
    x = cancelling(3, 40001, 1, seed=1, dtype=dtype, device=device)[0].requires_grad_()

    def run():
        y, whole = vx.mean(x, backend=backend), vx.mean(x, None, backend=backend)
        return y, whole, *torch.autograd.grad(y.sum() + whole, x)

    check_repeatable(run)


@pytest.mark.parametrize("device,backend", room_backends("mean", "triton"))
@DTYPES
@pytest.mark.parametrize("n", [1, 100, 1031, 8193, 20001])
def test_the_order_on_a_gpu_is_a_tree_of_pairs(device, backend, dtype, n):
    from vexact_ops._core.triton import tree_sum_ref

    x, _ = cancelling(3, n, 1, seed=n, dtype=dtype)
    whole = tree_sum_ref(x.float(), 1 << max(n - 1, 15).bit_length())
    assert_bitwise(vx.mean(x.to(device), backend=backend).cpu(), (whole / n).to(dtype))


def test_an_order_that_the_row_count_picks_is_caught():
    def batch_dependent(x):
        return sum(p.sum(-1) for p in x.chunk(1 if x.shape[0] < 4 else 4, -1)) / x.shape[-1]

    with pytest.raises(AssertionError, match="differ"):
        check_rows(batch_dependent, cancelling(8, 1000, 1, seed=0, dtype=torch.float32)[0])


@BACKENDS
@DTYPES
def test_accuracy(device, backend, dtype):
    g = torch.Generator().manual_seed(1)
    x, dy = torch.randn(64, 5000, generator=g).to(device, dtype), torch.randn(64, generator=g).to(device, dtype)

    def run(fn, x, dy):
        x = x.clone().requires_grad_()
        y = fn(x)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    exact, ours = run(mean_ref, x.double(), dy.double()), run(lambda x: vx.mean(x, backend=backend), x, dy)
    theirs = run(lambda x: torch.mean(x, -1), x, dy)
    for name, o, t, e in zip(("y", "dx"), ours, theirs, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"


@BACKENDS
def test_opcheck(device, backend):
    x = torch.randn(3, 40, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.vexact.mean.default, (x, 40.0, backend))


def test_bad_arguments_are_named():
    x = torch.randn(2, 8)
    with pytest.raises(TypeError, match="mean: x: got dtype int64"):
        vx.mean(x.long())
    with pytest.raises(TypeError, match="mean: dim: got str"):
        vx.mean(x, "rows")
    with pytest.raises(ValueError, match="mean: dim: got 2"):
        vx.mean(x, 2)
    with pytest.raises(ValueError, match=r"mean: dim: got \(1, -1\), expected distinct"):
        vx.mean(x, (1, -1))
    with pytest.raises(vx.BackendUnavailable, match="does not serve cpu"):
        vx.mean(x, backend="cuda")


def test_empty_inputs():
    assert vx.mean(torch.empty(0, 8)).shape == (0,)
    assert vx.mean(torch.empty(3, 0)).isnan().all()
    x = torch.empty(0, 8, requires_grad=True)
    vx.mean(x).sum().backward()
    assert x.grad.shape == (0, 8)
    assert vx.mean(torch.tensor(3.0), None) == 3.0
