"""The Triton kernels: the CPU kernels' arithmetic, operation for operation, so that both classes have the same bits."""

import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import INTERPRETED, OPTIONS, begin, cdiv, chunk, early, exp_down, exp_of_number, on, tree_sum

SLOPE = tl.constexpr(1.5957691216)  # 2 sqrt(2 / pi): tanh(u / 2) = 2 sigmoid(u) - 1
CUBIC = tl.constexpr(0.044715)
THREE_CUBIC = tl.constexpr(0.13414499163627625)  # the fp32 product
LEAST = tl.constexpr(0.5 + 2**-24)
# Functions take these by default arguments: at every launch of a kernel Triton looks whether a global that is used
# anywhere in it has changed, which costs the host about a microsecond for each of them.


def _tile(x: Tensor, rows: int) -> dict:
    """An element depends on its inputs alone, so the tile may look at the rows: few want many threads."""
    if rows >= 1024:
        return {"BLOCK": 1024, "num_warps": 1, "PDL": False}
    if rows < 64:
        return {"BLOCK": 512, "num_warps": 8, **early(x)}
    return {"BLOCK": 1024, "num_warps": 4 if x.shape[1] > 8192 else 8, **early(x)}


@triton.jit
def reciprocal(d, LEAST: tl.constexpr = LEAST, INTERPRETED: tl.constexpr = INTERPRETED):
    """1 / d, correctly rounded, of d from 1 to 2, or NaN. tl.div_rn has the same bits and a branch for each
    element, so that none is begun before the one before it is done.

    A step of Newton's from within a unit in the last place (what PTX guarantees of rcp.approx) rounds correctly but for
    d just below 2 (Markstein, IBM Journal of Research and Development 34 (1990)), and there too from LEAST on, the
    reciprocal of that; of all d from 1 to 2 this has been computed, from the nearest number and both next to it."""
    if INTERPRETED:
        y = tl.div_rn(1.0, d)
    else:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [d], tl.float32, True, 1)
    y = tl.maximum(y, LEAST)
    return tl.fma(tl.fma(d * -1.0, y, 1.0), y, y)


@triton.jit
def sigmoid(g, GELU: tl.constexpr, SLOPE: tl.constexpr = SLOPE, CUBIC: tl.constexpr = CUBIC):
    """sigmoid(z) and 1 - sigmoid(z), neither by cancellation; z is g, or gelu_tanh's argument twice."""
    z = g
    if GELU:
        z = (g * SLOPE) * tl.fma(g * g, CUBIC, 1.0)
    q = exp_down(tl.abs(z) * -1.0)
    large = reciprocal(1.0 + q)
    small = q * large
    return tl.where(z > 0.0, large, small), tl.where(z > 0.0, small, large)


@triton.jit
def silu(g):
    """g sigmoid(g). Where g is NaN, so is the product, whatever the other factor is."""
    q = exp_of_number(tl.abs(g) * -1.0)
    large = reciprocal(1.0 + q)
    return g * tl.where(g > 0.0, large, q * large)


@triton.jit
def gate_slope(g, s, rest, GELU: tl.constexpr, SLOPE: tl.constexpr = SLOPE, THREE_CUBIC: tl.constexpr = THREE_CUBIC):
    """d(g sigmoid(z)) / dg, from what sigmoid gave."""
    # beyond 1e4 the slope is exactly 0 or 1; the bound keeps infinity times zero out of it
    c = tl.where(g < 1e4, g, 1e4)
    c = tl.where(c > -1e4, c, -1e4)
    dz = c
    if GELU:
        dz = (c * SLOPE) * tl.fma(c * c, THREE_CUBIC, 1.0)
    return tl.fma(s * rest, dz, s)


@triton.jit
def _place(n, BLOCK: tl.constexpr):
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    return tl.program_id(0).to(tl.int64), column, column < n


@triton.jit
def _fwd_kernel(gate, up, y, n, gate_stride, up_stride, GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row, column, inside = _place(n, BLOCK)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    s, _ = sigmoid(g, GELU)
    tl.store(y + row * n + column, ((g * s) * u).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _bwd_kernel(
    dy, gate, up, dgate, dup, n, dy_stride, gate_stride, up_stride, dgate_stride, dup_stride,
    GELU: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    row, column, inside = _place(n, BLOCK)
    g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * dy_stride + column, mask=inside, other=0.0).to(tl.float32)
    s, rest = sigmoid(g, GELU)
    slope = gate_slope(g, s, rest, GELU)
    tl.store(dgate + row * dgate_stride + column, ((d * u) * slope).to(dgate.dtype.element_ty), mask=inside)
    tl.store(dup + row * dup_stride + column, (d * (g * s)).to(dup.dtype.element_ty), mask=inside)


def silu_mul_fwd(gate: Tensor, up: Tensor, gelu: bool, y: Tensor) -> None:
    rows, n = y.shape
    if y.numel():
        tile = _tile(y, rows)
        with on(y):
            _fwd_kernel[(rows, cdiv(n, tile["BLOCK"]))](
                gate, up, y, n, gate.stride(0), up.stride(0), GELU=gelu, **tile, **OPTIONS
            )


def silu_mul_bwd(dy: Tensor, gate: Tensor, up: Tensor, gelu: bool, dgate: Tensor, dup: Tensor) -> None:
    rows, n = dy.shape
    if dy.numel():
        tile = _tile(dy, rows)
        with on(dy):
            _bwd_kernel[(rows, cdiv(n, tile["BLOCK"]))](
                dy, gate, up, dgate, dup, n, *(t.stride(0) for t in (dy, gate, up, dgate, dup)),
                GELU=gelu, **tile, **OPTIONS,
            )  # fmt: skip


@triton.jit
def _sigmoid_fwd_kernel(
    x, gate, y, n, x_stride, gate_stride, head_stride, HEAD: tl.constexpr, EACH: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """HEAD: columns of gate that lie side by side; 0: all do."""
    begin(PDL)
    row, column, inside = _place(n, BLOCK)
    v = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    at = column if EACH else column * 0
    if HEAD:
        at = column // HEAD * head_stride + column % HEAD
    s, _ = sigmoid(tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32), False)
    s = s.to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * n + column, (s * v).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _sigmoid_bwd_kernel(
    dy, x, gate, dx, dgate, x_stride, gate_stride, EACH: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.zeros([1, BLOCK], tl.float32)
    for start in range(0, N, BLOCK):
        column = start + tl.arange(0, BLOCK)[None, :]
        inside = column < N
        d = tl.load(dy + row * N + column, mask=inside, other=0.0).to(tl.float32)
        v = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        at = column if EACH else column * 0
        s, rest = sigmoid(tl.load(gate + row * gate_stride + at, mask=inside, other=0.0).to(tl.float32), False)
        tl.store(
            dx + row * N + column, (d * s.to(dx.dtype.element_ty).to(tl.float32)).to(dx.dtype.element_ty), mask=inside
        )
        if EACH:
            tl.store(dgate + row * N + column, ((d * v) * (s * rest)).to(dgate.dtype.element_ty), mask=inside)
        else:
            lanes = tl.fma(d, v, lanes)  # order: blocks of columns lane by lane, ascending; the lanes in a tree
    if not EACH:
        s, rest = sigmoid(tl.load(gate + row * gate_stride + tl.zeros([1, 1], tl.int32)).to(tl.float32), False)
        total = tree_sum(lanes) * (s * rest)
        tl.store(dgate + row + tl.zeros([1, 1], tl.int32), total.to(dgate.dtype.element_ty))


def _each(x: Tensor, gate: Tensor) -> bool:
    return gate.shape[1] == x.shape[1] != 1


def sigmoid_mul_fwd(x: Tensor, gate: Tensor, y: Tensor) -> None:
    rows, n = y.shape
    if y.numel():
        tile = _tile(y, rows)
        with on(y):
            _sigmoid_fwd_kernel[(rows, cdiv(n, tile["BLOCK"]))](
                x, gate, y, n, x.stride(0), gate.stride(0), gate.stride(1),
                HEAD=0 if gate.dim() == 2 else gate.shape[2], EACH=_each(x, gate), **tile, **OPTIONS,
            )  # fmt: skip


def sigmoid_mul_bwd(dy: Tensor, x: Tensor, gate: Tensor, dx: Tensor, dgate: Tensor) -> None:
    rows, n = x.shape
    if x.numel():
        with on(x):
            _sigmoid_bwd_kernel[(rows,)](
                dy, x, gate, dx, dgate, x.stride(0), gate.stride(0), EACH=_each(x, gate), N=n, BLOCK=chunk(n, 2048),
                num_warps=4, **OPTIONS,
            )  # fmt: skip


@triton.jit
def normal(x):
    """The normal distribution's Phi(x) and e^(-x^2 / 2), as csrc/silu_mul/cpu_kernels.cpp has them."""
    a = tl.abs(x)
    a = tl.where(a < 15.0, a, 15.0)
    square = a * a
    missed = tl.fma(a, a, -square)
    e = exp_down(square * -0.5)
    density = tl.fma(e, missed * -0.5, e)
    t = tl.div_rn(1.0, a + 2.0)
    near = tl.full(x.shape, -7.654195542272646e-06, tl.float32)
    near = tl.fma(near, square, 0.00011348634143359959)
    near = tl.fma(near, square, -0.001186329871416092)
    near = tl.fma(near, square, 0.009973322972655296)
    near = tl.fma(near, square, -0.06649035960435867)
    near = tl.fma(near, square, 0.3989422917366028)
    tail = tl.full(x.shape, -29.936016082763672, tl.float32)
    tail = tl.fma(tail, t, 43.60438919067383)
    tail = tl.fma(tail, t, -19.038265228271484)
    tail = tl.fma(tail, t, -0.8181650638580322)
    tail = tl.fma(tail, t, 0.8333877325057983)
    tail = tl.fma(tail, t, 1.1760878562927246)
    tail = tl.fma(tail, t, 0.7999822497367859)
    tail = tl.fma(tail, t, 0.39884838461875916)
    tail = tl.fma(tail, t, 1.6172849655049504e-06)
    far = density * tail
    outer = tl.where(x > 0.0, 1.0 - far, far)
    return tl.where(a < 1.0, tl.fma(x, near, 0.5), outer), density


@triton.jit
def _gelu_fwd_kernel(x, y, n, x_stride, TANH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row, column, inside = _place(n, BLOCK)
    v = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        s, _ = sigmoid(v, True)
    else:
        s, _ = normal(v)
    tl.store(y + row * n + column, (v * s).to(y.dtype.element_ty), mask=inside)


@triton.jit
def _gelu_bwd_kernel(dy, x, dx, n, x_stride, TANH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row, column, inside = _place(n, BLOCK)
    v = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * n + column, mask=inside, other=0.0).to(tl.float32)
    if TANH:
        s, rest = sigmoid(v, True)
        slope = gate_slope(v, s, rest, True)
    else:  # beyond 15 the density is 0
        s, density = normal(v)
        c = tl.where(v < 15.0, v, 15.0)
        c = tl.where(c > -15.0, c, -15.0)
        slope = tl.fma(c, density * 0.3989422804, s)
    tl.store(dx + row * n + column, (d * slope).to(dx.dtype.element_ty), mask=inside)


def gelu_fwd(x: Tensor, tanh: bool, y: Tensor) -> None:
    rows, n = y.shape
    if y.numel():
        tile = _tile(y, rows)
        with on(y):
            _gelu_fwd_kernel[(rows, cdiv(n, tile["BLOCK"]))](x, y, n, x.stride(0), TANH=tanh, **tile, **OPTIONS)


def gelu_bwd(dy: Tensor, x: Tensor, tanh: bool, dx: Tensor) -> None:
    rows, n = dy.shape
    if dy.numel():
        tile = _tile(dy, rows)
        with on(dy):
            _gelu_bwd_kernel[(rows, cdiv(n, tile["BLOCK"]))](dy, x, dx, n, x.stride(0), TANH=tanh, **tile, **OPTIONS)
