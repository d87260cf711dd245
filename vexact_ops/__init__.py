"""Aligned ops: the same bits in training, prefill and decode. Names load lazily; importing has no side effects."""

import importlib
import sys
import types
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# public name -> module that holds it
_WHERE = {
    # ops
    "linear": "linear.op",
    "bmm": "linear.bmm",
    "grouped_linear": "grouped_linear.op",
    "moe_route": "moe_route.op",
    "fused_moe": "fused_moe.op",
    "rmsnorm": "rmsnorm.op",
    "rope": "rope.op",
    "rope_cos_sin": "rope.op",
    "rope_kv_store": "rope.op",
    "silu_mul": "silu_mul.op",
    "log_softmax": "log_softmax.op",
    "mean": "mean.op",
    "sum": "mean.op",
    "linear_logits": "linear_cross_entropy.op",
    "linear_logprobs": "linear_cross_entropy.op",
    "linear_cross_entropy": "linear_cross_entropy.op",
    "attention_varlen": "attention.op",
    "attention_paged": "attention.op",
    "kv_cache_store": "kv_cache.op",
    "sample": "sampler.op",
    # about this process
    "admit_linear": "linear.op",
    "admit_linear_cross_entropy": "linear_cross_entropy.op",
    "explain": "_core.explain",
    "numerics": "_core.numerics",
    "backends": "_core.backend",
    "set_backend": "_core.backend",
    "use_backend": "_core.backend",
    "BackendUnavailable": "_core.backend",
}
_SUBPACKAGES = ("patch", "testing")

__all__ = [*_WHERE, *_SUBPACKAGES]


def __getattr__(name: str):
    if name in _WHERE:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _Package(types.ModuleType):
    """Rooms and their public functions share names: `vx.rmsnorm` is the function, `from vexact_ops.rmsnorm import op`
    reaches the room. The import system's binding of a room onto this package would hide the function."""

    def __setattr__(self, name, value):
        if not (name in _WHERE and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__():
    return sorted([*globals(), *__all__])


if TYPE_CHECKING:
    from ._core.backend import BackendUnavailable, backends, set_backend, use_backend
    from ._core.explain import explain
    from ._core.numerics import numerics
    from .fused_moe.op import fused_moe
    from .grouped_linear.op import grouped_linear
    from .linear.bmm import bmm
    from .linear.op import admit_linear, linear
    from .linear_cross_entropy.op import (
        admit_linear_cross_entropy,
        linear_cross_entropy,
        linear_logits,
        linear_logprobs,
    )
    from .log_softmax.op import log_softmax
    from .mean.op import mean, sum
    from .moe_route.op import moe_route
    from .rmsnorm.op import rmsnorm
    from .rope.op import rope, rope_cos_sin, rope_kv_store
    from .sampler.op import sample
    from .silu_mul.op import silu_mul
