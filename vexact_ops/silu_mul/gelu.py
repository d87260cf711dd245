"""gelu without a gate: the activation of a feed-forward block that has one projection up."""

from torch import Tensor

from .._core import check
from .._core.operator import Operator
from .op import ROOM

FORMS = ("none", "tanh")


def gelu(x: Tensor, *, approximate: str = "none", backend: str | None = None) -> Tensor:
    """x times the normal distribution's Phi(x), fp32 inside, rounded once.

    x            (..., N) bf16 | fp32, on a GPU also fp16; rows may be strided
    approximate  "none": Phi(x) = (1 + erf(x / sqrt(2))) / 2, below 0 without cancellation; "tanh": the tanh form, as
                 silu_mul computes it: x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))
    returns      (..., N) in x.dtype
    bits         elementwise, the same on a CPU and a GPU
    grad         as bits
    raises       TypeError on dtype, ValueError on shape or device, BackendUnavailable
    source       Hendrycks and Gimpel, Gaussian Error Linear Units, arXiv 1606.08415
    example
    >>> x = torch.randn(3, 8)
    >>> vx.same_bits(vx.gelu(x, approximate="tanh"), vx.silu_mul(x, torch.ones_like(x), activation="gelu_tanh"))
    True
    """
    op = "gelu"
    check.tensor(op, "x", x, check.FLOATS)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"{op}: x: got shape {tuple(x.shape)}, expected (..., N) with N of at least 1")
    check.choice(op, "approximate", approximate, FORMS)
    backend = ROOM.resolve(x.device, backend)
    check.served(op, "x", x.dtype, backend)
    return _gelu(check.rows(x), approximate == "tanh", backend).view(x.shape)


def _fwd(x: Tensor, tanh: bool, backend: str) -> Tensor:
    y = x.new_empty(x.shape)
    ROOM.module(backend).gelu_fwd(x, tanh, y)
    return y


def _bwd(dy: Tensor, x: Tensor, tanh: bool, backend: str) -> Tensor:
    dx = x.new_empty(x.shape)
    ROOM.module(backend).gelu_bwd(dy.contiguous(), x, tanh, dx)
    return dx


def _setup(ctx, inputs, output):
    x, ctx.tanh, ctx.backend = inputs
    ctx.save_for_backward(x)


def _backward(ctx, dy):
    return _gelu_bwd(dy, *ctx.saved_tensors, ctx.tanh, ctx.backend), None, None


_gelu_bwd = Operator(
    "gelu_bwd(Tensor dy, Tensor x, bool tanh, str backend) -> Tensor",
    _bwd,
    lambda dy, x, tanh, backend: x.new_empty(x.shape),
)
_gelu = Operator(
    "gelu(Tensor x, bool tanh, str backend) -> Tensor",
    _fwd,
    lambda x, tanh, backend: x.new_empty(x.shape),
    _setup,
    _backward,
)
