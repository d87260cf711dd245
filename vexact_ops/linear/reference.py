"""The meaning of linear in plain PyTorch, in x's own precision: call it with float64."""

from torch import Tensor


def linear_ref(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    y = x @ weight.t()
    return y if bias is None else y + bias
