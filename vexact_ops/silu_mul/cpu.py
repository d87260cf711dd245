"""The C++ kernels (csrc/silu_mul/cpu_kernels.cpp)."""

from torch import Tensor

from .._core import native


def silu_mul_fwd(gate: Tensor, up: Tensor, gelu: bool, y: Tensor) -> None:
    native.ops().silu_mul_fwd(gate, up, gelu, y)


def silu_mul_bwd(dy: Tensor, gate: Tensor, up: Tensor, gelu: bool, dgate: Tensor, dup: Tensor) -> None:
    native.ops().silu_mul_bwd(dy, gate, up, gelu, dgate, dup)


def sigmoid_mul_fwd(x: Tensor, gate: Tensor, y: Tensor) -> None:
    native.ops().sigmoid_mul_fwd(x, gate if gate.dim() == 2 else gate.reshape(x.shape), y)


def sigmoid_mul_bwd(dy: Tensor, x: Tensor, gate: Tensor, dx: Tensor, dgate: Tensor) -> None:
    native.ops().sigmoid_mul_bwd(dy, x, gate, dx, dgate)


def gelu_fwd(x: Tensor, tanh: bool, y: Tensor) -> None:
    native.ops().gelu_fwd(x, tanh, y)


def gelu_bwd(dy: Tensor, x: Tensor, tanh: bool, dx: Tensor) -> None:
    native.ops().gelu_bwd(dy, x, tanh, dx)
