"""The meaning of gated_delta in plain PyTorch, row by row, in q's own precision: call it with float64."""

import itertools

import torch
from torch import Tensor


def gated_delta_ref(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float | None = None,
    qk_l2norm: bool = True,
    initial_state: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The outputs and the final states."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = v.shape[1] // k.shape[1]
    if qk_l2norm:
        q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (x.repeat_interleave(group, dim=1) for x in (q, k))
    offsets, outputs, finals = cu_seqlens.tolist(), [], []
    for b, (begin, end) in enumerate(itertools.pairwise(offsets)):
        state = q.new_zeros(v.shape[1], q.shape[2], v.shape[2]) if initial_state is None else initial_state[b]
        for t in range(begin, end):
            state = state * g[t].exp()[:, None, None]
            u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
            state = state + torch.einsum("hk,hv->hkv", k[t], u)
            outputs.append(scale * torch.einsum("hkv,hk->hv", state, q[t]))
        finals.append(state)
    out = torch.stack(outputs) if outputs else torch.zeros_like(v)
    return out, torch.stack(finals) if finals else q.new_zeros(0, v.shape[1], q.shape[2], v.shape[2])


def delta_gates_ref(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return -a_log.exp() * torch.nn.functional.softplus(a + dt_bias), torch.sigmoid(b)
