"""The meaning of fused_moe in plain PyTorch, in x's own precision: call it with float64."""

from torch import Tensor

from ..silu_mul.reference import silu_mul_ref


def fused_moe_ref(
    x: Tensor,
    gate_up_weight: Tensor,
    down_weight: Tensor,
    topk_weights: Tensor,
    topk_ids: Tensor,
    *,
    activation: str = "silu",
) -> Tensor:
    out = x * 0
    for expert, (gate_up, down) in enumerate(zip(gate_up_weight, down_weight)):
        token, slot = (topk_ids == expert).nonzero(as_tuple=True)
        y = silu_mul_ref(x[token] @ gate_up.t(), activation=activation) @ down.t()
        out = out.index_add(0, token, (y * topk_weights[token, slot][:, None]).to(x.dtype))
    return out
