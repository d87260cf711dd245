"""The meaning of fused_moe in plain PyTorch, in x's own precision: call it with float64."""

import torch
from torch import Tensor

from ..silu_mul.reference import silu_mul_ref
from .swiglu import ACTIVATION, ALPHA, LIMIT


def swiglu_ref(gate_up: Tensor) -> Tensor:
    """Of columns of gates and ups by turns."""
    gate, up = gate_up[..., ::2].clamp(max=LIMIT), gate_up[..., 1::2].clamp(-LIMIT, LIMIT)
    return gate * torch.sigmoid(gate * ALPHA) * (up + 1)


def fused_moe_ref(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    out = x * 0
    for expert, (gate_up, down) in enumerate(zip(gate_up_weight, down_weight)):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        h = x[token] @ gate_up.t()
        h = h if gate_up_bias is None else h + gate_up_bias[expert]
        a = swiglu_ref(h) if activation == ACTIVATION else silu_mul_ref(h, activation=activation)
        y = a @ down.t()
        y = y if down_bias is None else y + down_bias[expert]
        out = out.index_add(0, token, (y * topk_weights[token, slot][:, None]).to(x.dtype))
    return out
