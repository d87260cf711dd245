"""The C++ kernels (csrc/grouped_linear/cpu_kernels.cpp)."""

from torch import Tensor

from .._core import native


def grouped_linear_fwd(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    y = x.new_empty(x.shape[0], weight.shape[1])
    _ran(native.ops().grouped_linear_fwd(x, weight, offsets, y), x)
    return y


def grouped_linear_dx(dy: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    dx = dy.new_empty(dy.shape[0], weight.shape[2])
    _ran(native.ops().grouped_linear_dx(dy, weight, offsets, dx), dy)
    return dx


def grouped_linear_dweight(dy: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    dweight = dy.new_empty(offsets.shape[0] - 1, dy.shape[1], x.shape[1])
    _ran(native.ops().grouped_linear_dweight(dy, x, offsets, dweight), dy)
    return dweight


def _ran(good: bool, rows: Tensor) -> None:
    if not good:
        raise ValueError(
            f"grouped_linear: offsets: got values that do not ascend from 0 to at most {rows.shape[0]}, the rows"
        )
