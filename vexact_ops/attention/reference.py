"""The meaning of attention in plain PyTorch, in q's own precision, with a mask for every pair: call it with float64."""

import torch
from torch import Tensor


def visible(queries: int, keys: int, causal: bool = True, window: int | None = None, device="cpu") -> Tensor:
    """(queries, keys) bool: which keys a query sees, the last query standing at the last key."""
    place = torch.arange(keys - queries, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)[None]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if causal:
        seen = seen & (key <= place)
    if window is not None:
        seen = seen & (key > place - window)
    return seen


def attention_varlen_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    *,
    cu_seqlens_k: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[1] // k.shape[1]
    q_at = cu_seqlens.tolist()
    k_at = q_at if cu_seqlens_k is None else cu_seqlens_k.tolist()
    outputs = []
    for q0, q1, k0, k1 in zip(q_at, q_at[1:], k_at, k_at[1:]):
        keys, values = (x[k0:k1].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[q0:q1], keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        seen = visible(q1 - q0, k1 - k0, causal, window, q.device)
        scores = scores.masked_fill(~seen, -torch.inf)
        sink = q.new_full((q.shape[1],), -torch.inf) if sinks is None else sinks.to(q.dtype)
        column = sink[:, None, None].expand(-1, q1 - q0, 1)
        weights = torch.softmax(torch.cat([scores, column], dim=-1), dim=-1)[..., :-1]
        weights = weights.masked_fill(~seen, 0.0)  # a query that sees nothing: zeros
        outputs.append(torch.einsum("hqk,khd->qhd", weights, values))
    return torch.cat(outputs) if outputs else q.new_zeros((0, q.shape[1], v.shape[-1]))
