"""The GPU's own class: where a fast kernel was proven equal to the Triton one for these sizes, it serves few rows.

Everything else (many rows, fp32, rows off 16-byte boundaries, other GPUs than SM90, gradients) takes the Triton
kernel: the bits are the same, so the choice may look at the row count.
"""

import functools
import math

import torch
from torch import Tensor

from .._core import native
from .._core.admit import Candidate, admissions, time_on_gpu
from ..testing.inputs import cancelling
from . import triton
from .triton import bmm, linear_dbias, linear_dweight, linear_dx

__all__ = ["bmm", "linear_dbias", "linear_dweight", "linear_dx", "linear_fwd"]

MOST_ROWS = 64
BUCKETS = (8, 16, 32, 64)
SHARED_BYTES = 226 * 1024  # of one SM90 multiprocessor, for one or several blocks
_chosen: dict[tuple, Candidate | None] = {}


def linear_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    x = x if x.dim() == 2 else x.view(math.prod(x.shape[:-1]), x.shape[-1])
    rows = x.shape[0]
    if 0 < rows <= MOST_ROWS and x.dtype != torch.float32 and _aligned(x) and _aligned(weight) and weight.numel():
        fast = _fast(x.device, x.dtype, out_dtype, weight.shape[0], weight.shape[1], rows)
        if fast is not None:
            return fast.run(x, weight, bias, out_dtype)
    return triton.linear_fwd(x, weight, bias, out_dtype)


def _aligned(t: Tensor) -> bool:
    """Rows begin on 16-byte boundaries, as the copy engine needs."""
    return t.data_ptr() % 16 == 0 and (t.shape[0] <= 1 or t.stride(0) % 8 == 0)


def _fast(device, dtype, out_dtype, n: int, k: int, rows: int) -> Candidate | None:
    bucket = next(b for b in BUCKETS if rows <= b)
    key = device.index, dtype, out_dtype, n, k, bucket
    if key in _chosen:
        return _chosen[key]
    if torch.cuda.is_current_stream_capturing():
        return None  # nothing can be verified inside a graph; the canonical kernel has the same bits
    with torch.cuda.device(device):
        _chosen[key] = _admit(device, dtype, out_dtype, n, k, bucket)
    return _chosen[key]


def _admit(device, dtype, out_dtype, n: int, k: int, bucket: int) -> Candidate | None:
    if torch.cuda.get_device_capability(device) != (9, 0):
        return None

    def cases():
        # a few hundred columns prove the order, full width times it
        x, weight = cancelling(bucket, k, min(n, 320), seed=k, dtype=dtype, device=device)
        if dtype == torch.float16:  # the 25 binades of bf16 overflow here
            x = x.clamp(-64, 64)
        bias = weight[:, 0].contiguous()
        few = max(1, bucket // 2 - 1)
        full = torch.randn(n, k, device=device, dtype=dtype), None, out_dtype
        return [(x, weight, None, out_dtype), (x[:few], weight, bias, out_dtype), (x, *full)]

    name = f"linear_fwd {_short(dtype)}->{_short(out_dtype)} N={n} K={k} M<={bucket}"
    return admissions(device.index).choose(name, candidates(bucket), triton.linear_fwd, cases, time_on_gpu)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def candidates(bucket: int) -> tuple[Candidate, ...]:
    """The kernels that may serve up to `bucket` rows: tokens per block, boxes of 64 k per stage, depth of the ring."""
    found = []
    for tokens in (bucket // 2, bucket) if bucket > 8 else (bucket,):
        for boxes in (2, 4) if tokens < 64 else (2,):
            for blocks in (1, 2, 3):  # how many blocks share a multiprocessor
                stage = boxes * (64 * 128 + max(1024, tokens * 128))
                stages = min(16, (SHARED_BYTES // blocks - 1024) // stage)
                if stages >= 2:
                    run = functools.partial(_skinny, tokens=tokens, boxes=boxes, stages=stages)
                    found.append(Candidate(f"wgmma 64x{tokens}x{64 * boxes} ring {stages}", run))
    return tuple(found)


def _skinny(x: Tensor, weight: Tensor, bias: Tensor | None, out_dtype: torch.dtype, *, tokens, boxes, stages) -> Tensor:
    out = torch.empty(x.shape[0], weight.shape[0], dtype=out_dtype, device=x.device)
    native.ops().linear_skinny(x, weight, bias, out, tokens, boxes, stages)
    return out
