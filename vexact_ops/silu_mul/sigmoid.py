"""A sigmoid gate on a tensor: on attention's output (a gate for each element), on a shared expert's (one for a row)."""

from torch import Tensor

from .._core import check
from .._core.operator import Operator
from .op import ROOM


def sigmoid_mul(x: Tensor, gate: Tensor, *, backend: str | None = None) -> Tensor:
    """sigmoid(gate) * x, the sigmoid and the product each rounded, as Hugging Face's Qwen3.5 and Qwen3-Next do.

    x         (..., N) bf16 | fp32, on a GPU also fp16
    gate      (..., N) in x.dtype, or (..., 1): one gate for all of a row; rows may be strided, as part of a projection,
              and heads (T, H, N) within them
    returns   (..., N) in x.dtype
    bits      elementwise: fp32 inside, sigmoid without cancellation
    grad      x and gate as bits; one gate for a row sums its elements in a fixed order (CPU: 16 lanes, GPU: a tree of
              pairs)
    raises    TypeError on dtype, ValueError on shape or device, BackendUnavailable
    example
    >>> x, gate = torch.randn(3, 8), torch.randn(3, 1)
    >>> vx.same_bits(vx.sigmoid_mul(x, gate), vx.sigmoid_mul(x, gate.expand(3, 8)))
    True
    """
    op = "sigmoid_mul"
    check.tensor(op, "x", x, check.FLOATS)
    check.tensor(op, "gate", gate)
    check.same_dtype(op, "gate", gate, "x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x: got shape {tuple(x.shape)}, expected (..., N) with N of at least 1")
    if gate.shape != (*x.shape[:-1], 1):
        check.shape(op, "gate", gate, x.shape)
    check.same_device(op, x=x, gate=gate)
    backend = ROOM.resolve(x.device, backend)
    check.served(op, "x", x.dtype, backend)
    rows, gate = (x.flatten(1), gate) if _by_head(x, gate) else (check.rows(x), check.rows(gate))
    return _sigmoid_mul(rows, gate, backend).view(x.shape)


def _by_head(x: Tensor, gate: Tensor) -> bool:
    """Whether x is (T, H * N) and the gate's heads (T, H, N) can only stay where they are in wider rows."""
    if gate.dim() != 3 or gate.shape != x.shape or not x.is_contiguous():
        return False
    return gate.stride(2) == 1 and gate.stride(0) != gate.shape[1] * gate.stride(1)


def _fwd(x: Tensor, gate: Tensor, backend: str):
    y = x.new_empty(x.shape)
    ROOM.module(backend).sigmoid_mul_fwd(x, gate, y)
    return y


def _bwd(dy: Tensor, x: Tensor, gate: Tensor, backend: str):
    dx, rows = x.new_empty(x.shape), gate if gate.dim() == 2 else gate.reshape(x.shape)
    dgate = gate.new_empty(rows.shape)
    ROOM.module(backend).sigmoid_mul_bwd(dy.contiguous(), x, rows, dx, dgate)
    return dx, dgate.view(gate.shape)


def _setup(ctx, inputs, output):
    x, gate, ctx.backend = inputs
    ctx.save_for_backward(x, gate)


def _backward(ctx, dy):
    return *_sigmoid_mul_bwd(dy, *ctx.saved_tensors, ctx.backend), None


_sigmoid_mul_bwd = Operator(
    "sigmoid_mul_bwd(Tensor dy, Tensor x, Tensor gate, str backend) -> (Tensor, Tensor)",
    _bwd,
    lambda dy, x, gate, backend: (x.new_empty(x.shape), gate.new_empty(gate.shape)),
)
_sigmoid_mul = Operator(
    "sigmoid_mul(Tensor x, Tensor gate, str backend) -> Tensor",
    _fwd,
    lambda x, gate, backend: x.new_empty(x.shape),
    _setup,
    _backward,
)
