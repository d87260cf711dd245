"""The meaning of log_softmax in plain PyTorch, in x's own precision: call it with float64."""

from torch import Tensor


def log_softmax_ref(x: Tensor) -> Tensor:
    shifted = x - x.amax(-1, keepdim=True)
    return shifted - shifted.exp().sum(-1, keepdim=True).log()
