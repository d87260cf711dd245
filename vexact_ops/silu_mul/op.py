"""The gated activation of a feed-forward block: silu(gate) * up, or the tanh form of gelu in silu's place."""

from torch import Tensor

from .._core import check
from .._core.backend import Room
from .._core.operator import Operator

ROOM = Room("silu_mul", cpu=("cpu",), cuda=("triton",))
ACTIVATIONS = ("silu", "gelu_tanh")


def silu_mul(gate: Tensor, up: Tensor | None = None, *, activation: str = "silu", backend: str | None = None) -> Tensor:
    """activation(gate) * up, fp32 inside, rounded once.

    gate        (..., I) bf16 | fp32, on a GPU also fp16; without `up` (..., 2I): the gate's I columns, then up's
    up          like gate; rows may be strided, the last dimension contiguous
    activation  "silu": g sigmoid(g); "gelu_tanh": g sigmoid(2 sqrt(2/pi) (g + 0.044715 g^3)), which is the tanh form
                of gelu without its cancellation
    returns     (..., I) in gate.dtype. Hugging Face rounds the activation to that dtype before the product, this does
                not, so in bf16 the two differ by up to that much
    bits        elementwise, the same on a CPU and a GPU
    grad        of gate and up, as bits
    raises      TypeError on dtype, ValueError on shape, stride or device, BackendUnavailable
    source      Shazeer, GLU Variants Improve Transformer, arXiv 2002.05202
    example
    >>> gate, up = torch.randn(3, 8), torch.randn(3, 8)
    >>> vx.same_bits(vx.silu_mul(gate, up), vx.silu_mul(torch.cat([gate, up], -1)))
    True
    """
    check.tensor("silu_mul", "gate", gate, check.FLOATS)
    if gate.dim() == 0:
        raise ValueError("silu_mul: gate: got shape (), expected (..., I)")
    check.contiguous_last("silu_mul", "gate", gate)
    if up is None:
        if gate.shape[-1] % 2:
            raise ValueError(f"silu_mul: gate: got shape {tuple(gate.shape)}, expected (..., 2I) where up is not given")
        shape = (*gate.shape[:-1], gate.shape[-1] // 2)
    else:
        check.tensor("silu_mul", "up", up)
        check.same_dtype("silu_mul", "up", up, "gate", gate)
        check.shape("silu_mul", "up", up, gate.shape)
        check.contiguous_last("silu_mul", "up", up)
        check.same_device("silu_mul", gate=gate, up=up)
        shape = gate.shape
    check.choice("silu_mul", "activation", activation, ACTIVATIONS)
    backend = ROOM.resolve(gate.device, backend)
    check.served("silu_mul", "gate", gate.dtype, backend)
    y = _silu_mul(_rows(gate), None if up is None else _rows(up), activation == "gelu_tanh", backend)
    return y.view(shape)


def _rows(x: Tensor) -> Tensor:
    return x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _halves(gate: Tensor, up: Tensor | None):
    return gate.chunk(2, -1) if up is None else (gate, up)


def _fwd(gate: Tensor, up: Tensor | None, gelu: bool, backend: str):
    y = gate.new_empty(gate.shape[0], gate.shape[1] // (2 if up is None else 1))
    ROOM.module(backend).silu_mul_fwd(*_halves(gate, up), gelu, y)
    return y


def _bwd(dy: Tensor, gate: Tensor, up: Tensor | None, gelu: bool, backend: str):
    dgate = gate.new_empty(gate.shape)
    dup = gate.new_empty((0,) if up is None else up.shape)
    ROOM.module(backend).silu_mul_bwd(
        check.rows(dy), *_halves(gate, up), gelu, *_halves(dgate, dup if up is not None else None)
    )
    return dgate, dup


def _setup(ctx, inputs, output):
    gate, up, ctx.gelu, ctx.backend = inputs
    ctx.save_for_backward(gate, up)


def _backward(ctx, dy):
    gate, up = ctx.saved_tensors
    dgate, dup = _silu_mul_bwd(dy, gate, up, ctx.gelu, ctx.backend)
    return dgate, None if up is None else dup, None, None


_silu_mul_bwd = Operator(
    "silu_mul_bwd(Tensor dy, Tensor gate, Tensor? up, bool gelu, str backend) -> (Tensor, Tensor)",
    _bwd,
    lambda dy, gate, up, gelu, backend: (gate.new_empty(gate.shape), gate.new_empty((0,) if up is None else up.shape)),
)
_silu_mul = Operator(
    "silu_mul(Tensor gate, Tensor? up, bool gelu, str backend) -> Tensor",
    _fwd,
    lambda gate, up, gelu, backend: gate.new_empty(gate.shape[0], gate.shape[1] // (2 if up is None else 1)),
    _setup,
    _backward,
)
