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
    "rmsnorm_gated": "rmsnorm.gated",
    "layer_norm": "layer_norm.op",
    "rope": "rope.op",
    "rope_cos_sin": "rope.op",
    "rope_kv_store": "rope.op",
    "silu_mul": "silu_mul.op",
    "sigmoid_mul": "silu_mul.sigmoid",
    "gelu": "silu_mul.gelu",
    "log_softmax": "log_softmax.op",
    "mean": "mean.op",
    "sum": "mean.op",
    "linear_logits": "linear_cross_entropy.op",
    "linear_logprobs": "linear_cross_entropy.op",
    "linear_cross_entropy": "linear_cross_entropy.op",
    "linear_sample": "linear_sample.op",
    "linear_silu_mul": "linear_silu_mul.op",
    "attention_varlen": "attention.op",
    "attention_paged": "attention.op",
    "kv_cache_store": "kv_cache.op",
    "causal_conv": "causal_conv.op",
    "causal_conv_paged": "causal_conv.op",
    "gated_delta_varlen": "gated_delta.op",
    "gated_delta_paged": "gated_delta.op",
    "delta_gates": "gated_delta.gates",
    "conv_gated_delta_paged": "gated_delta.step",
    "sample": "sampler.op",
    # about this process
    "admit": "patch.admit",
    "must_admit": "_core.admit",
    "without_races": "_core.admit",
    "explain": "_core.explain",
    "numerics": "_core.numerics",
    "numerics_difference": "_core.numerics",
    "cuda_graph": "_core.graph",
    "cuda_stream": "_core.graph",
    "synchronize": "_core.graph",
    "Peers": "_core.peers",
    "Sent": "_core.peers",
    "linear_send": "linear.send",
    "linear_awaited": "linear.send",
    "linear_gather_send": "linear.send",
    "linear_silu_mul_send": "linear_silu_mul.send",
    "rmsnorm_gather": "rmsnorm.gather",
    "fused_moe_send": "fused_moe.send",
    "tune": "_core.tune",
    "recall": "_core.choices",
    "remember": "_core.choices",
    "backends": "_core.backend",
    "current_backend": "_core.backend",
    "set_backend": "_core.backend",
    "use_backend": "_core.backend",
    "BackendUnavailable": "_core.backend",
    # comparison of bytes
    "same_bits": "_core.proof.bitwise",
    "different": "_core.proof.bitwise",
}
_SUBPACKAGES = ("patch", "testing")

# Of `import *`: it must not put another `sum` in place of Python's.
__all__ = [*(name for name in _WHERE if name != "sum"), *_SUBPACKAGES]


def _load(name: str) -> object:
    if name in _WHERE:
        value = getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if not TYPE_CHECKING:  # type checkers know the names below and no others
    __getattr__ = _load


class _Package(types.ModuleType):
    """Rooms and their public functions share names: `vx.rmsnorm` is the function, `from vexact_ops.rmsnorm import op`
    reaches the room. The import system's binding of a room onto this package would hide the function."""

    def __setattr__(self, name: str, value: object) -> None:
        if not (name in _WHERE and isinstance(value, types.ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package


def __dir__() -> list[str]:
    return sorted({*globals(), *_WHERE, *__all__})


if TYPE_CHECKING:  # `as`: these are public, for type checkers too
    from . import patch as patch
    from . import testing as testing
    from ._core.admit import must_admit as must_admit
    from ._core.admit import without_races as without_races
    from ._core.backend import BackendUnavailable as BackendUnavailable
    from ._core.backend import backends as backends
    from ._core.backend import current_backend as current_backend
    from ._core.backend import set_backend as set_backend
    from ._core.backend import use_backend as use_backend
    from ._core.choices import recall as recall
    from ._core.choices import remember as remember
    from ._core.explain import explain as explain
    from ._core.graph import cuda_graph as cuda_graph
    from ._core.graph import cuda_stream as cuda_stream
    from ._core.graph import synchronize as synchronize
    from ._core.numerics import numerics as numerics
    from ._core.numerics import numerics_difference as numerics_difference
    from ._core.peers import Peers as Peers
    from ._core.peers import Sent as Sent
    from ._core.proof.bitwise import different as different
    from ._core.proof.bitwise import same_bits as same_bits
    from ._core.tune import tune as tune
    from .attention.op import attention_paged as attention_paged
    from .attention.op import attention_varlen as attention_varlen
    from .causal_conv.op import causal_conv as causal_conv
    from .causal_conv.op import causal_conv_paged as causal_conv_paged
    from .fused_moe.op import fused_moe as fused_moe
    from .fused_moe.send import fused_moe_send as fused_moe_send
    from .gated_delta.gates import delta_gates as delta_gates
    from .gated_delta.op import gated_delta_paged as gated_delta_paged
    from .gated_delta.op import gated_delta_varlen as gated_delta_varlen
    from .gated_delta.step import conv_gated_delta_paged as conv_gated_delta_paged
    from .grouped_linear.op import grouped_linear as grouped_linear
    from .kv_cache.op import kv_cache_store as kv_cache_store
    from .layer_norm.op import layer_norm as layer_norm
    from .linear.bmm import bmm as bmm
    from .linear.op import linear as linear
    from .linear.send import linear_awaited as linear_awaited
    from .linear.send import linear_gather_send as linear_gather_send
    from .linear.send import linear_send as linear_send
    from .linear_cross_entropy.op import linear_cross_entropy as linear_cross_entropy
    from .linear_cross_entropy.op import linear_logits as linear_logits
    from .linear_cross_entropy.op import linear_logprobs as linear_logprobs
    from .linear_sample.op import linear_sample as linear_sample
    from .linear_silu_mul.op import linear_silu_mul as linear_silu_mul
    from .linear_silu_mul.send import linear_silu_mul_send as linear_silu_mul_send
    from .log_softmax.op import log_softmax as log_softmax
    from .mean.op import mean as mean
    from .mean.op import sum as sum
    from .moe_route.op import moe_route as moe_route
    from .patch.admit import admit as admit
    from .rmsnorm.gated import rmsnorm_gated as rmsnorm_gated
    from .rmsnorm.gather import rmsnorm_gather as rmsnorm_gather
    from .rmsnorm.op import rmsnorm as rmsnorm
    from .rope.op import rope as rope
    from .rope.op import rope_cos_sin as rope_cos_sin
    from .rope.op import rope_kv_store as rope_kv_store
    from .sampler.op import sample as sample
    from .silu_mul.gelu import gelu as gelu
    from .silu_mul.op import silu_mul as silu_mul
    from .silu_mul.sigmoid import sigmoid_mul as sigmoid_mul
