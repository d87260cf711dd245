"""An operation is passed by what it does to each dtype: whatever the audit passes has the same bits wherever in a row a
number stands."""

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from vexact_ops.patch import audit

DTYPES = [
    torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.complex128, torch.int32,
    torch.int64, torch.bool,
]  # fmt: skip
UNARY = ["neg", "abs", "relu", "square", "sqrt", "isnan", "isinf", "clone", "exp", "sigmoid", "reciprocal", "sgn"]
BINARY = ["add", "sub", "mul", "div", "maximum", "minimum", "eq", "ne", "lt", "ge", "atan2", "pow", "fmod"]
CALLS = {name: lambda x, y, name=name: getattr(torch, name)(x) for name in UNARY}
CALLS |= {name: lambda x, y, name=name: getattr(torch, name)(x, y) for name in BINARY}
CALLS |= {
    "mul by a number": lambda x, y: x * 0.3,
    "div by a number": lambda x, y: x / 0.3,
    "mul by a complex number": lambda x, y: x * (0.3 + 0.7j),
    "add scaled": lambda x, y: torch.add(x, y, alpha=3),
    "div floor": lambda x, y: torch.div(x, y, rounding_mode="floor"),
    "div trunc": lambda x, y: torch.div(x, y, rounding_mode="trunc"),
    "square by pow": lambda x, y: x**2,
    "cube by pow": lambda x, y: x**3,
    "where": lambda x, y: torch.where(x == y, x, y),
    "cat": lambda x, y: torch.cat((x, y))[: len(x)],
    "to float": lambda x, y: x.float() if not x.is_complex() else x.to(torch.complex64),
    "to bfloat16": lambda x, y: x.bfloat16() if not x.is_complex() else x,
    "mul in place": lambda x, y: x.clone().mul_(y),
    "div in place": lambda x, y: x.clone().div_(y),
    "clamp": lambda x, y: x.clamp(-1, 1),
    "masked fill": lambda x, y: x.masked_fill(x == y, 1),
    "rotation as complex": lambda x, y: torch.view_as_real(torch.view_as_complex(x.view(-1, 2)) * (0.6 + 1j)).flatten(),
}  # fmt: skip


class Passed(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.all, self.calls = True, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.calls += 1
        self.all = self.all and audit.exact(func, args, kwargs or {}, out)
        return out


def numbers(dtype, seed, n=74):
    g = torch.Generator().manual_seed(seed)
    if dtype.is_complex:
        wide = torch.randn(n, 2, generator=g, dtype=torch.float64) * torch.exp2(torch.randn(n, 1, generator=g) * 8)
        return torch.view_as_complex(wide.contiguous()).to(dtype)
    if dtype.is_floating_point:
        return (torch.randn(n, generator=g, dtype=torch.float64) * torch.exp2(torch.randn(n, generator=g) * 8)).to(
            dtype
        )
    return torch.randint(1, 2 if dtype == torch.bool else 90, (n,), generator=g).to(dtype)


def same(a, b) -> bool:
    if a.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    return bool(((a == b) | (a.isnan() & b.isnan() if a.is_floating_point() else a == b)).all())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_passed_does_not_depend_on_the_place(name, dtype):
    call, x, y = CALLS[name], numbers(dtype, 1), numbers(dtype, 2)
    with Passed() as passed:
        try:
            whole = call(x, y)
        except (RuntimeError, NotImplementedError, TypeError):
            return  # torch has no such operation of this dtype
    if not passed.all:
        return
    step = 2 if name == "rotation as complex" else 1
    for first in range(0, len(x), step):
        for length in (step, 6, 16):
            part = slice(first, first + length)
            assert same(call(x[part].clone(), y[part].clone()), whole[part]), (name, dtype, first, length)


@pytest.mark.parametrize("name", ["mul", "div", "square", "mul by a complex number", "rotation as complex"])
def test_complex_products_are_not_passed(name):
    x, y = numbers(torch.complex64, 1), numbers(torch.complex64, 2)
    if name == "rotation as complex":
        x = numbers(torch.float32, 1)
    with Passed() as passed:
        CALLS[name](x, y)
    assert not passed.all


@pytest.mark.parametrize("name", ["add", "mul", "div", "clone", "where", "mul by a number", "square by pow"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_real_ones_are(name, dtype):
    x, y = numbers(dtype, 1), numbers(dtype, 2)
    with Passed() as passed:
        out = CALLS[name](x, y)
    assert passed.all and pytree.tree_leaves(out)
