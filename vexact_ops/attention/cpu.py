"""The C++ kernels (csrc/attention/cpu_kernels.cpp)."""

import torch
from torch import Tensor

from .._core import native
from . import metadata


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def varlen_fwd(q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, sinks, scale, causal, window, softcap, kv_segment):
    tokens, heads, _ = q.shape
    out = torch.empty((tokens, heads, v.shape[-1]), dtype=q.dtype)
    lse = torch.empty((tokens, heads), dtype=torch.float32)
    k_offsets = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    options = scale, softcap or 0.0, window or 0, kv_segment or 0, causal
    args = _rows(q), _rows(k), _rows(v), cu_seqlens, k_offsets, max_seqlen, sinks, *options, out, lse
    if not native.ops().attention_varlen_fwd(*args):
        metadata.explain_varlen(q.shape[0], k.shape[0], cu_seqlens, cu_seqlens_k, max_seqlen)
    return out, lse


def varlen_bwd(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, sinks, scale, causal, window, softcap):
    delta, dq = torch.empty_like(lse), torch.zeros(q.shape, dtype=torch.float32)
    dk, dv = torch.empty(k.shape, dtype=k.dtype), torch.empty(v.shape, dtype=v.dtype)
    dsinks = None if sinks is None else torch.empty_like(sinks)
    k_offsets = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    tensors = dout, _rows(q), _rows(k), _rows(v), out, lse, cu_seqlens, k_offsets, sinks
    options = scale, softcap or 0.0, window or 0, causal
    native.ops().attention_varlen_bwd(*tensors, *options, delta, dq, dk, dv, dsinks)
    return dq.to(q.dtype), dk, dv, dsinks


def paged_fwd(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, max_seqlen_q, sinks, *options):
    scale, window, softcap, kv_segment, _ = options
    out = torch.empty((q.shape[0], q.shape[1], v_cache.shape[-1]), dtype=q.dtype)
    step = block_table, context_lens, cu_seqlens_q, max_seqlen_q
    numbers = scale, softcap or 0.0, window or 0, kv_segment or 0
    if not native.ops().attention_paged_fwd(_rows(q), k_cache, v_cache, *step, sinks, *numbers, out):
        metadata.explain_paged(q.shape[0], *k_cache.shape[:2], *step)
    return out
