"""flash-attn-4's kernels in the order of csrc/attention/flash.cuh: the forward of training, and of long chunks in
pages, at full speed, its keys cut into segments on request (cute_forward_kernel.py), and the repeatable backward
(cute_backward.py). Single queries never come here.

Nothing of the CuTe stack is imported until a kernel has to be compiled.
"""

import functools
import hashlib
import importlib
import warnings
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from .._core import digest
from . import cute_backward, cute_objects

VERSION = "4.0.0b36"  # whose source these files were written against
_SOURCES = "cute", "cute_arithmetic", "cute_backward", "cute_backward_kernel", "cute_forward_kernel", "triton_prepare"


@functools.cache
def unavailable() -> str | None:
    """Why this file's kernels cannot be used with what is installed, or None."""
    missing = [name for name in cute_objects.STACK if digest.version(name) is None]
    if missing:
        return f"not installed: {', '.join(missing)}"
    found = digest.version("flash-attn-4")
    return None if found == VERSION else f"flash-attn-4 is {found}, and {VERSION} is what this was written for"


@functools.cache
def versions() -> str:
    """What a verdict on these kernels holds for."""
    parts = [f"{name} {digest.version(name)}" for name in cute_objects.STACK]
    sources = b"".join(Path(__file__).with_name(f"{name}.py").read_bytes() for name in _SOURCES)
    return ", ".join([*parts, "sha256 " + hashlib.sha256(sources).hexdigest()[:12]])


def import_ahead() -> None:
    """What calls will come to, which takes seconds where kernels have to be compiled: where none is kept here."""
    if unavailable():
        return
    compilers = () if cute_objects.kept(versions()) else (".cute_forward_kernel", ".cute_backward_kernel")
    for name in ("tvm_ffi", *compilers):
        importlib.import_module(name, __package__)


class _Aux(NamedTuple):
    """flash-attn-4's AuxData, as a kernel is given it."""

    tensors: tuple[Tensor, ...]
    scalars: tuple | None = None


_SINKS = ("sinks",)  # in a kernel's key


def _aux(nonfinite: Tensor, sinks: Tensor | None) -> tuple[Tensor, ...]:
    return (nonfinite,) if sinks is None else (nonfinite, sinks)


def _reach(window: int | None) -> tuple[int | None, int | None]:
    """A window as the keys seen before a query's place and behind it."""
    return (None, None) if window is None else (min(window - 1, 1 << 30), 0)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, cu_seqlens_k: Tensor, scale: float, causal: bool,
    window: int | None, segment: int | None, sinks: Tensor | None, out: Tensor, lse: Tensor, nonfinite: Tensor,
) -> None:  # fmt: skip
    """Writes out (T, Hq, Dv), lse (Hq, T) and, where some output is NaN, 1 into nonfinite (1,) int32, which holds 0.
    sinks: (Hq,) float32, or None."""
    group, aux = q.shape[1] // k.shape[1], _aux(nonfinite, sinks)
    key = q.dtype, group, q.shape[2], v.shape[2], causal, window is None, segment, *_SINKS[: len(aux) - 1]

    reach, offsets = _reach(window), (cu_seqlens, cu_seqlens_k)

    def make():
        from .cute_forward_kernel import compiled

        return compiled(q, k, v, offsets, out, lse, aux, (causal, window, segment, sinks, reach))

    kernel = cute_objects.kernel("forward", q.device, key, make, versions)
    kernel(
        q, k, v, out, lse, scale, *offsets, None, None, None, *reach, None, None, _Aux(aux), None, None,
    )  # fmt: skip


def paged_forward(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, at: Tensor, used_q: Tensor, used_k: Tensor, block_table: Tensor,
    scale: float, window: int | None, segment: int | None, sinks: Tensor | None, out: Tensor, nonfinite: Tensor,
) -> None:  # fmt: skip
    """Writes the rows of out (T, Hq, Dv) from at[b] to at[b] + used_q[b], the last queries of used_k[b] keys; sinks and
    nonfinite as in `forward`."""
    group, aux = q.shape[1] // k_cache.shape[2], _aux(nonfinite, sinks)
    page = k_cache.shape[1]
    key = q.dtype, group, q.shape[2], v_cache.shape[3], window is None, segment, page, *_SINKS[: len(aux) - 1]
    reach, step = _reach(window), (at, used_q, used_k, block_table)

    def make():
        from .cute_forward_kernel import compiled_paged

        return compiled_paged(q, k_cache, v_cache, step, out, aux, (window, segment, sinks, reach))

    kernel = cute_objects.kernel("paged", q.device, key, make, versions)
    kernel(q, k_cache, v_cache, out, scale, *step, *reach, _Aux(aux))


def backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor,
    cu_seqlens_k: Tensor, scale: float, causal: bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv; lse as `forward` writes it. With a window in flash-attn-4's order, else in cute_backward.py's."""
    if window is None:
        return cute_backward.backward(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, scale, causal, versions)
    from flash_attn.cute.interface import _flash_attn_bwd

    reach = _reach(window)
    with warnings.catch_warnings():  # where it compiles, it warns of an argument of its own that it does not use
        warnings.filterwarnings("ignore", "Argument aux_data")
        return _flash_attn_bwd(
            q, k, v, out, dout, lse, softmax_scale=scale,
            window_size_left=reach[0], window_size_right=reach[1], cu_seqlens_q=cu_seqlens,
            cu_seqlens_k=cu_seqlens_k, max_seqlen_q=q.shape[0], max_seqlen_k=k.shape[0], deterministic=True,
        )  # fmt: skip
