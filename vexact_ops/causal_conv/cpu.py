"""The C++ kernels (csrc/causal_conv/cpu_kernels.cpp), which take the weight in fp32, channels side by side."""

import torch
from torch import Tensor

from .._core import native
from .._core.sequences import explain_offsets, explain_singles, explain_slots, singles_valid


def _wide(weight: Tensor, bias: Tensor | None):
    weight = weight.detach().t().to(torch.float32, memory_format=torch.contiguous_format)
    return weight.contiguous(), None if bias is None else bias.detach().float().contiguous()


def varlen_fwd(x: Tensor, weight: Tensor, bias: Tensor | None, cu_seqlens: Tensor, silu: bool) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype)
    if not native.ops().causal_conv_fwd(x, *_wide(weight, bias), cu_seqlens, silu, y):
        explain_offsets("causal_conv", "cu_seqlens", cu_seqlens, x.shape[0], "x")
        raise AssertionError("causal_conv: the kernel refused offsets that are in order")
    return y


def paged_fwd(x, weight, bias, taps, slots, context_lens, cu_seqlens_q, singles, silu) -> Tensor:
    op, y = "causal_conv_paged", torch.empty(x.shape, dtype=x.dtype)
    given = x, *_wide(weight, bias), taps, slots, context_lens, cu_seqlens_q, silu, y
    if not (singles_valid(cu_seqlens_q, singles) and native.ops().causal_conv_paged_fwd(*given)):
        offsets = explain_offsets(op, "cu_seqlens_q", cu_seqlens_q, x.shape[0], "x")
        explain_singles(op, singles, offsets)
        explain_slots(op, slots, context_lens, offsets, taps.shape[0])
        raise AssertionError(f"{op}: the kernel refused offsets, slots and lengths that are in order")
    return y


def varlen_bwd(dy, x, weight, bias, cu_seqlens, silu):
    wide, wide_bias = _wide(weight, bias)
    dpre, dx = torch.empty(x.shape, dtype=torch.float32), torch.empty(x.shape, dtype=x.dtype)
    dweight, dbias = torch.empty_like(wide), None if bias is None else torch.empty_like(wide_bias)
    native.ops().causal_conv_bwd(dy, x, wide, wide_bias, cu_seqlens, silu, dpre, dx, dweight, dbias)
    dweight = dweight.t().to(weight.dtype, memory_format=torch.contiguous_format)
    return dx, dweight, None if bias is None else dbias.to(bias.dtype)
