"""silu_mul: rows stand alone, every path has the same bits, gradients are right, bad arguments are named."""

import pytest
import torch
from conftest import interpreted, room_backends
from hypothesis import given
from hypothesis import strategies as st

import vexact_ops as vx
from vexact_ops.silu_mul.reference import gelu_ref, sigmoid_mul_ref, silu_mul_ref
from vexact_ops.testing import assert_bitwise, check_repeatable, check_rows, tricky

BACKENDS = pytest.mark.parametrize("device,backend", room_backends("silu_mul"))
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
ACTIVATIONS = pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
SIZES = st.sampled_from([1, 7, 16, 50, 576, 1031])


@BACKENDS
@DTYPES
@ACTIVATIONS
@given(n=SIZES, rows=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_rows_stand_alone(device, backend, dtype, activation, n, rows, seed):
    gate, up, dy = (tricky(rows, n, seed=seed + i, dtype=dtype, device=device) for i in range(3))

    def run(gate, up, dy):
        gate, up = gate.clone().requires_grad_(), up.clone().requires_grad_()
        y = vx.silu_mul(gate, up, activation=activation, backend=backend)
        return y.detach(), *torch.autograd.grad(y, (gate, up), dy)

    check_rows(run, gate, up, dy, seed=seed)
    check_rows(lambda g: vx.silu_mul(g, activation=activation, backend=backend), torch.cat((gate, up), -1), seed=seed)


@pytest.mark.parametrize("device,backend", room_backends("silu_mul", "triton"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@ACTIVATIONS
@given(n=SIZES, rows=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_a_gpu_has_the_bits_of_a_cpu(device, backend, dtype, activation, n, rows, seed):
    inputs = [tricky(rows, n, seed=seed + i, dtype=dtype) for i in range(3)]

    def run(device, backend):
        gate, up, dy = (t.to(device) for t in inputs)
        gate, up = gate.requires_grad_(), up.requires_grad_()
        y = vx.silu_mul(gate, up, activation=activation, backend=backend)
        return [t.cpu() for t in (y, *torch.autograd.grad(y, (gate, up), dy))]

    assert_bitwise(run(device, backend), run("cpu", "cpu"))


@pytest.mark.parametrize("device,backend", room_backends("silu_mul", "triton"))
def test_a_reciprocal_is_the_nearest_there_is(device, backend):
    from reciprocals import reciprocals

    bits = torch.arange(0x3F800000, 0x40000001, dtype=torch.int32)  # of all numbers from 1 to 2
    d = bits.view(torch.float32)
    y, block = torch.empty_like(d, device=device), 1024 if device == "cuda" else 1 << 20
    reciprocals[(-(-len(d) // block),)](d.to(device), y, len(d), BLOCK=block)
    assert_bitwise(y.cpu(), 1 / d)


@BACKENDS
@DTYPES
@ACTIVATIONS
def test_one_tensor_or_two_or_views(device, backend, dtype, activation):
    both = tricky(2, 5, 200, seed=0, dtype=dtype, device=device).requires_grad_()
    dy = tricky(2, 5, 100, seed=1, dtype=dtype, device=device)

    def run(*args):
        y = vx.silu_mul(*args, activation=activation, backend=backend)
        return y, *torch.autograd.grad(y, args if len(args) == 1 or args[0].is_leaf else both, dy)

    y, dboth = run(both)
    assert_bitwise(run(*both.chunk(2, -1)), (y, dboth), "two strided views")
    halves = [h.detach().clone().requires_grad_() for h in both.chunk(2, -1)]
    y2, *dhalves = run(*halves)
    assert_bitwise((y2, torch.cat(dhalves, -1)), (y, dboth), "two tensors")


@BACKENDS
@DTYPES
@ACTIVATIONS
def test_repeatable(device, backend, dtype, activation):
    gate, up = (tricky(65, 577, seed=i, dtype=dtype, device=device).requires_grad_() for i in range(2))

    def run():
        y = vx.silu_mul(gate, up, activation=activation, backend=backend)
        return y, *torch.autograd.grad(y.float().sum(), (gate, up))

    check_repeatable(run)


def test_a_batch_dependent_activation_is_caught():
    def two_forms(g):  # another formula for large batches
        return g * torch.sigmoid(g) if g.shape[0] < 4 else g / (1 + torch.exp(-g))

    with pytest.raises(AssertionError, match="differ"):
        check_rows(two_forms, torch.randn(8, 500, generator=torch.Generator().manual_seed(0)))


@BACKENDS
@DTYPES
@ACTIVATIONS
def test_accuracy(device, backend, dtype, activation):
    g = torch.Generator().manual_seed(1)
    gate, up, dy = (torch.randn(64, 500, generator=g).mul(3).to(device, dtype) for _ in range(3))

    def run(fn, gate, up, dy):
        gate, up = gate.detach().clone().requires_grad_(), up.detach().clone().requires_grad_()
        y = fn(gate, up, activation=activation)
        return y.detach(), *torch.autograd.grad(y, (gate, up), dy)

    exact = run(silu_mul_ref, gate.double(), up.double(), dy.double())
    ours = run(lambda *a, **k: vx.silu_mul(*a, backend=backend, **k), gate, up, dy)
    stock = run(silu_mul_ref, gate, up, dy)  # rounds the activation, as Hugging Face does
    for name, o, t, e in zip(("y", "dgate", "dup"), ours, stock, exact):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock's {stock_error:.3g}"


@BACKENDS
@ACTIVATIONS
def test_the_ends_of_the_range(device, backend, activation):
    gate = torch.tensor([-3e38, -1e20, -1e5, -200.0, -0.0, 0.0, 200.0, 1e5, 1e20, 3e38], device=device).requires_grad_()
    up = torch.ones_like(gate)
    y = vx.silu_mul(gate, up, activation=activation, backend=backend)
    (slope,) = torch.autograd.grad(y.sum(), gate)
    assert y.tolist() == [0, 0, 0, 0, 0, 0, *gate[6:].tolist()]
    assert slope.tolist() == [0, 0, 0, 0, 0.5, 0.5, 1, 1, 1, 1]
    assert vx.silu_mul(torch.tensor([float("nan")]), torch.ones(1), activation=activation).isnan().all()


@BACKENDS
def test_opcheck(device, backend):
    gate, up = (torch.randn(3, 32, device=device, requires_grad=True) for _ in range(2))
    torch.library.opcheck(torch.ops.vexact.silu_mul.default, (gate, up, True, backend))
    torch.library.opcheck(torch.ops.vexact.silu_mul.default, (gate, None, False, backend))


def test_bad_arguments_are_named():
    x = torch.randn(2, 8)
    with pytest.raises(TypeError, match=r"silu_mul: gate: got dtype float64"):
        vx.silu_mul(x.double())
    with pytest.raises(TypeError, match=r"silu_mul: gate: got dtype float16, which a GPU serves"):
        vx.silu_mul(x.half(), backend="cpu")
    with pytest.raises(TypeError, match=r"silu_mul: up: got dtype bfloat16"):
        vx.silu_mul(x, x.bfloat16())
    with pytest.raises(ValueError, match=r"silu_mul: up: got shape \(2, 7\), expected \(2, 8\)"):
        vx.silu_mul(x, x[:, :7])
    with pytest.raises(ValueError, match=r"silu_mul: gate: got shape \(2, 7\), expected \(..., 2I\)"):
        vx.silu_mul(x[:, :7])
    with pytest.raises(ValueError, match=r"silu_mul: up: got stride"):
        vx.silu_mul(x, torch.randn(8, 2).t())
    with pytest.raises(ValueError, match="silu_mul: activation: got 'relu'"):
        vx.silu_mul(x, activation="relu")


def test_zero_rows_give_zero_rows():
    x = torch.empty(0, 8, requires_grad=True)
    y = vx.silu_mul(x)
    assert y.shape == (0, 4)
    y.sum().backward()
    assert x.grad.shape == (0, 8)


# sigmoid_mul

GATES = pytest.mark.parametrize("width", ["each", "one"])


def gated(x, gate, dy, backend):
    x, gate = x.clone().requires_grad_(), gate.clone().requires_grad_()
    y = vx.sigmoid_mul(x, gate, backend=backend)
    return y.detach(), *torch.autograd.grad(y, (x, gate), dy)


@BACKENDS
@DTYPES
@GATES
@given(n=SIZES, rows=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_sigmoid_gated_rows_stand_alone(device, backend, dtype, width, n, rows, seed):
    x, gate, dy = (tricky(rows, n, seed=seed + i, dtype=dtype, device=device) for i in range(3))
    gate = gate if width == "each" else gate[:, :1]
    check_rows(lambda *t: gated(*t, backend), x, gate, dy, seed=seed)


@pytest.mark.parametrize("device,backend", room_backends("silu_mul", "triton"))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@given(n=SIZES, rows=st.integers(1, 9), seed=st.integers(0, 2**16))
def test_a_gpu_has_the_bits_of_a_cpu_with_a_sigmoid(device, backend, dtype, n, rows, seed):
    inputs = [tricky(rows, n, seed=seed + i, dtype=dtype) for i in range(3)]
    found = gated(*(t.to(device) for t in inputs), backend)
    assert_bitwise([t.cpu() for t in found], gated(*inputs, "cpu"))


@BACKENDS
@DTYPES
def test_a_sigmoid_gate_is_rounded_before_the_product(device, backend, dtype):
    """As the modules have it: torch's own operations, wherever its sigmoid rounds to the nearest."""
    x = torch.randn(2, 5, 6, 64, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    wide = torch.randn(2, 5, 6, 128, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    gate = wide[..., 64:]  # part of a projection, head by head
    y = vx.sigmoid_mul(x, gate, backend=backend)
    exact = gate.double().sigmoid().to(dtype)
    agree = (vx.sigmoid_mul(torch.ones_like(x), gate, backend=backend) == exact) | (dtype == torch.float32)
    assert float(agree.float().mean()) > 0.995
    assert_bitwise(y[agree], (vx.sigmoid_mul(torch.ones_like(x), gate, backend=backend) * x)[agree])


@BACKENDS
@DTYPES
@pytest.mark.parametrize("heads,width", [(3, 16), (1, 5), (4, 300)])
def test_a_gpu_reads_a_gate_of_heads_in_wider_rows_where_it_lies(device, backend, dtype, heads, width):
    """As attention's: every other head's width of a part of a projection. Outputs and gradients are those of a copy."""
    projection = tricky(7, 2 * heads * width + 8, seed=3, dtype=dtype, device=device)
    gate = projection[:, 8:].unflatten(1, (heads, 2 * width))[..., width:]
    x, dy = (tricky(7, heads * width, seed=i, dtype=dtype, device=device).view(gate.shape) for i in (4, 5))

    def run(gate):
        gate = gate.detach().requires_grad_()
        y = vx.sigmoid_mul(x, gate, backend=backend)
        return y.detach(), torch.autograd.grad(y, gate, dy)[0]

    assert_bitwise(run(gate), run(gate.contiguous()))


@BACKENDS
@DTYPES
@GATES
def test_sigmoid_mul_accuracy(device, backend, dtype, width):
    draw = torch.Generator().manual_seed(1)
    x, gate, dy = (2 * torch.randn(64, n, generator=draw).to(device, dtype) for n in (500, 500, 500))
    gate = gate if width == "each" else gate[:, :1]

    def run(fn, *tensors, dy=dy):
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y = fn(*leaves)
        return y.detach(), *torch.autograd.grad(y, leaves, dy)

    exact = run(sigmoid_mul_ref, x.double(), gate.double(), dy=dy.double())
    ours = run(lambda *t: vx.sigmoid_mul(*t, backend=backend), x, gate)
    theirs = run(lambda x, g: torch.sigmoid(g) * x, x, gate)
    for name, o, t, e in zip(("y", "dx", "dgate"), ours, theirs, exact, strict=True):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error + 1e-7, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"


@BACKENDS
@GATES
def test_sigmoid_mul_repeats_and_opchecks(device, backend, width):
    x, gate = (tricky(33, 577, seed=i, dtype=torch.bfloat16, device=device) for i in (0, 1))
    gate = gate if width == "each" else gate[:, :1]
    check_repeatable(lambda: gated(x, gate, torch.ones_like(x), backend))
    args = x[:3].float().requires_grad_(), gate[:3].float().requires_grad_()
    torch.library.opcheck(torch.ops.vexact.sigmoid_mul.default, (*args, backend))


def test_a_gate_that_forgets_its_row_is_caught():
    x, gate = torch.randn(8, 16), torch.randn(8, 16)
    with pytest.raises(AssertionError, match="differ"):
        check_rows(lambda x, g: vx.sigmoid_mul(x, g.roll(1, 0)), x, gate)


def test_bad_arguments_of_sigmoid_mul_are_named():
    x, gate = torch.randn(3, 8), torch.randn(3, 8)
    with pytest.raises(TypeError, match="sigmoid_mul: x: got dtype int64"):
        vx.sigmoid_mul(x.long(), gate)
    with pytest.raises(TypeError, match="sigmoid_mul: gate: got dtype bfloat16, expected float32 as x has"):
        vx.sigmoid_mul(x, gate.bfloat16())
    with pytest.raises(ValueError, match=r"sigmoid_mul: gate: got shape \(3, 4\), expected \(3, 8\)"):
        vx.sigmoid_mul(x, gate[:, :4])
    with pytest.raises(ValueError, match=r"sigmoid_mul: x: got shape \(3, 0\)"):
        vx.sigmoid_mul(x[:, :0], gate[:, :0])
    assert vx.sigmoid_mul(x[:0], gate[:0]).shape == (0, 8)


# gelu

FORMS = pytest.mark.parametrize("form", ["none", "tanh"])


def with_slope(x, dy, form, backend):
    x = x.clone().requires_grad_()
    y = vx.gelu(x, approximate=form, backend=backend)
    return y.detach(), *torch.autograd.grad(y, x, dy)


@BACKENDS
@DTYPES
@FORMS
def test_gelu_rows_stand_alone(device, backend, dtype, form):
    sizes = (1, 1), (5, 7), (9, 600), (70, 33)
    for rows, n in sizes[:3] if interpreted(device, backend) else sizes:  # a program has one row
        x, dy = (tricky(rows, n, seed=rows + i, dtype=dtype, device=device) for i in range(2))
        check_rows(lambda x, dy: with_slope(x, dy, form, backend), x, dy)


@BACKENDS
@DTYPES
@FORMS
def test_gelu_accuracy(device, backend, dtype, form):
    """At most twice the error of torch's own over the whole range; at infinities and NaN what torch gives."""
    x = torch.linspace(-14, 14, 40000).view(40, 1000).to(device, dtype)
    dy = torch.randn(40, 1000, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def run(fn, x, dy):
        x = x.clone().requires_grad_()
        y = fn(x)
        return y.detach(), *torch.autograd.grad(y, x, dy)

    exact = run(lambda x: gelu_ref(x, approximate=form), x.double(), dy.double())
    ours = with_slope(x, dy, form, backend)
    theirs = run(lambda x: torch.nn.functional.gelu(x, approximate=form), x, dy)
    for name, o, t, e in zip(("y", "dx"), ours, theirs, exact, strict=True):
        error, stock_error = ((v.double() - e).norm() / e.norm() for v in (o, t))
        assert error <= 2 * stock_error, f"{name}: {error:.3g} against the stock op's {stock_error:.3g}"
    ends = torch.tensor([[0.0, -0.0, float("inf"), float("nan"), -20.0, 20.0, 1.0, -1.0]], device=device, dtype=dtype)
    got = vx.gelu(ends, approximate=form, backend=backend)
    assert_bitwise(got[:, :4], torch.tensor([[0.0, -0.0, float("inf"), float("nan")]], device=device, dtype=dtype))
    assert got[0, 4] == 0 and got[0, 5] == 20


def test_gelu_of_small_negative_numbers_does_not_cancel():
    x = -torch.linspace(1, 8, 400).view(4, 100)
    exact = gelu_ref(x.double())
    assert ((vx.gelu(x).double() / exact - 1).abs() < 2e-6).all()
    assert ((torch.nn.functional.gelu(x).double() / exact - 1).abs() > 1e-3).any()


@BACKENDS
def test_gelu_opchecks(device, backend):
    torch.library.opcheck(
        torch.ops.vexact.gelu.default, (torch.randn(3, 32, device=device, requires_grad=True), False, backend)
    )


def test_bad_arguments_of_gelu_are_named():
    x = torch.randn(3, 8)
    with pytest.raises(TypeError, match="gelu: x: got dtype int64"):
        vx.gelu(x.long())
    with pytest.raises(ValueError, match="gelu: approximate: got 'erf'"):
        vx.gelu(x, approximate="erf")
    with pytest.raises(ValueError, match=r"gelu: x: got shape \(3, 0\)"):
        vx.gelu(x[:, :0])
    assert vx.gelu(x[:0]).shape == (0, 8)
