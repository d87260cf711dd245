"""The meaning of silu_mul in plain PyTorch, in the inputs' own precision: call it with float64."""

import torch
import torch.nn.functional as F
from torch import Tensor


def silu_mul_ref(gate: Tensor, up: Tensor | None = None, *, activation: str = "silu"):
    if up is None:
        gate, up = gate.chunk(2, -1)
    return (F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")) * up


def sigmoid_mul_ref(x: Tensor, gate: Tensor) -> Tensor:
    return gate.sigmoid() * x


def gelu_ref(x: Tensor, *, approximate: str = "none") -> Tensor:
    if approximate == "tanh":
        return F.gelu(x, approximate="tanh")
    return x * torch.erfc(x * -(0.5**0.5)) / 2  # F.gelu adds 1 to an erf near -1
