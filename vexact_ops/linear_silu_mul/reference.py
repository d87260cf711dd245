"""The meaning of linear_silu_mul in plain PyTorch, in the inputs' own precision: call it with float64."""

from torch import Tensor

from ..silu_mul.reference import silu_mul_ref


def linear_silu_mul_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, activation: str = "silu") -> Tensor:
    y = x @ weight.t()
    return silu_mul_ref(y if bias is None else y + bias, activation=activation)
