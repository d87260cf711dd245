"""bmm: every element has linear's order, whatever the batch, the shape around it and the strides; gradients; errors."""

import pytest
import torch
from conftest import room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise, cancelling, check_repeatable, check_rows

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("linear"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])


def pairs(batch, m, k, n, seed, dtype, device):
    """(batch, m, k) and (batch, k, n) whose products cancel."""
    made = [cancelling(m, k, n, seed + i, dtype, device) for i in range(batch)]
    return torch.stack([x for x, _ in made]), torch.stack([w.t() for _, w in made])


@BACKENDS
@DTYPES
@given(
    batch=st.integers(1, 5),
    m=st.integers(1, 20),
    k=st.sampled_from([1, 16, 65, 200]),
    n=st.integers(1, 40),
    seed=st.integers(0, 2**16),
)
def test_every_product_is_linear_s(device, backend, dtype, batch, m, k, n, seed):
    a, b = pairs(batch, m, k, n, seed, dtype, device)
    expected = torch.stack([vx.linear(x, w.t().contiguous(), backend=backend) for x, w in zip(a, b)])
    assert_bitwise(vx.bmm(a, b, backend=backend), expected)
    wide = vx.bmm(a, b, out_dtype=torch.float32, backend=backend)
    assert wide.dtype == torch.float32
    assert_bitwise(wide.to(dtype), expected)


@BACKENDS
@DTYPES
def test_batches_and_rows_stand_alone(device, backend, dtype):
    a, b = pairs(6, 9, 130, 17, 0, dtype, device)
    check_rows(lambda x, y: vx.bmm(x, y, backend=backend), a, b)
    check_rows(lambda x: vx.bmm(x[None], b[:1], backend=backend)[0], a[0])


@BACKENDS
@DTYPES
def test_strides_do_not_show(device, backend, dtype):
    a, b = pairs(3, 10, 70, 24, 1, dtype, device)
    expected = vx.bmm(a, b, backend=backend)
    columns = [a.mT.contiguous().mT, b.mT.contiguous().mT]
    inside = [torch.cat([t[:, None], t[:, None]], 1).flatten(0, 1)[::2][..., : t.shape[2]] for t in (a, b)]
    for x in (a, columns[0], inside[0]):
        for y in (b, columns[1], inside[1]):
            assert_bitwise(vx.bmm(x, y, backend=backend), expected)
    one = vx.bmm(a[:1].expand(3, -1, -1), b, backend=backend)
    assert_bitwise(one, vx.bmm(a[:1].repeat(3, 1, 1), b, backend=backend))
    assert_bitwise(vx.bmm(a[..., :0], b[:, :0], backend=backend), torch.zeros_like(expected))
    assert vx.bmm(a[:0], b[:0], backend=backend).shape == (0, 10, 24)


@BACKENDS
@DTYPES
def test_gradients(device, backend, dtype):
    a, b = (t.requires_grad_() for t in pairs(4, 6, 40, 12, 2, dtype, device))
    dy = torch.randn(4, 6, 12, generator=torch.Generator().manual_seed(3)).to(device, dtype)

    def run():
        return torch.autograd.grad(vx.bmm(a, b, backend=backend), (a, b), dy)

    da, db = run()
    assert_bitwise(da, vx.bmm(dy, b.detach().mT, backend=backend))
    assert_bitwise(db, vx.bmm(a.detach().mT, dy, backend=backend))
    check_repeatable(run)
    wide = torch.autograd.grad(vx.bmm(a, b, out_dtype=torch.float32, backend=backend), (a, b), dy.float())
    assert_bitwise(wide, (da, db))
    exact = torch.autograd.grad(torch.bmm(a.double(), b.double()), (a, b), dy.double())
    for got, want in zip((da, db), exact):
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2 * want.abs().max().item())
    if device == "cpu":
        torch.library.opcheck(torch.ops.vexact.bmm.default, (a, b, dtype, backend))


def test_bad_arguments():
    a, b = torch.zeros(2, 3, 4), torch.zeros(2, 4, 5)
    with pytest.raises(ValueError, match=r"bmm: a: got shape \(3, 4\), expected 3 dimensions"):
        vx.bmm(a[0], b)
    with pytest.raises(ValueError, match=r"bmm: b: got shape \(2, 4, 5\), expected \(2, 3, N\)"):
        vx.bmm(a.mT, b)
    with pytest.raises(ValueError, match=r"bmm: b: got shape \(1, 4, 5\)"):
        vx.bmm(a, b[:1])
    with pytest.raises(TypeError, match="bmm: b: got dtype bfloat16, expected float32 as a has"):
        vx.bmm(a, b.bfloat16())
    with pytest.raises(TypeError, match="bmm: a: got dtype float64"):
        vx.bmm(a.double(), b.double())
    with pytest.raises(TypeError, match=r"bmm: out_dtype: got torch\.bfloat16"):
        vx.bmm(a, b, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="bmm: b: got device meta, expected cpu as a has"):
        vx.bmm(a, b.to("meta"))
