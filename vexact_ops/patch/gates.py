"""Sigmoid gates in a module's own forward: the forward stays, and its sigmoids are the aligned ones."""

import functools
import inspect
import types
from collections.abc import Callable

import torch
from torch import Tensor, nn

import vexact_ops as vx


def calls_sigmoid(module: nn.Module) -> bool:
    return "sigmoid" in inspect.unwrap(type(module).forward).__code__.co_names


def with_sigmoid(original: Callable, scope: dict) -> dict:
    """The globals of a forward, in which `torch.sigmoid` and `F.sigmoid` are the aligned one."""
    names = original.__code__.co_names
    if "sigmoid" not in names:
        return scope
    found = {name: scope[name] for name in names if isinstance(scope.get(name), types.ModuleType)}
    for name, module in found.items():
        if hasattr(module, "sigmoid"):
            seen = {part: getattr(module, part) for part in names if hasattr(module, part)}
            scope = scope | {name: types.SimpleNamespace(**{**seen, "sigmoid": sigmoid})}
    return scope


def sigmoid(x: Tensor) -> Tensor:
    return vx.sigmoid_mul(torch.ones_like(x), x)


@functools.cache
def sigmoid_forward(cls: type) -> Callable:
    """A class's own forward with aligned sigmoids."""
    original = inspect.unwrap(cls.forward)
    scope = with_sigmoid(original, dict(original.__globals__))
    scope.pop("__name__", None)  # as for attention (pieces.py)
    forward = types.FunctionType(
        original.__code__, scope, original.__name__, original.__defaults__, original.__closure__
    )
    forward.__kwdefaults__ = original.__kwdefaults__
    forward.__qualname__, forward.__module__ = original.__qualname__, "vexact_ops.patch"
    return forward
