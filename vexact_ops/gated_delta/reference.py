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


def gated_delta_chunks_ref(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, *, chunk: int = 64
) -> tuple[Tensor, Tensor]:
    """The same of one sequence in the stock chunked form, (I + A)^-1 by a triangular solve, which is quick for long
    ones: outputs (T, Hv, dv) and the final state (Hv, dk, dv)."""
    tokens, group, dk, dv = q.shape[0], v.shape[1] // k.shape[1], q.shape[2], v.shape[2]
    pad = -tokens % chunk

    def chunks(x: Tensor) -> Tensor:  # (N, H, C, ...)
        x = torch.nn.functional.pad(x, (0, 0) * (x.dim() - 1) + (0, pad))
        return x.view(-1, chunk, *x.shape[1:]).transpose(1, 2)

    q, k = (x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, k = (chunks(x.repeat_interleave(group, dim=1)) for x in (q, k))
    v, sums, beta = chunks(v), chunks(g).cumsum(2), chunks(beta)[..., None]
    decay = (sums[..., :, None] - sums[..., None, :]).tril().exp().tril()
    system = (beta * (k @ k.mT) * decay).tril(-1)
    both = torch.cat([v, k * sums.exp()[..., None]], -1) * beta
    u, w = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split([dv, dk], -1)
    inside, outs = (q @ k.mT) * decay, []
    state = v.new_zeros(v.shape[1], dk, dv)
    for n in range(len(q)):
        new = u[n] - w[n] @ state
        outs.append((q[n] * sums[n].exp()[..., None]) @ state + inside[n] @ new)
        rest = (sums[n][:, -1:] - sums[n]).exp()[..., None]
        state = state * sums[n][:, -1].exp()[:, None, None] + (k[n] * rest).mT @ new
    out = torch.stack(outs).transpose(1, 2).flatten(0, 1)[:tokens] if outs else torch.zeros_like(v)
    return out * dk**-0.5, state


def delta_gates_ref(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    return -a_log.exp() * torch.nn.functional.softplus(a + dt_bias), torch.sigmoid(b)
