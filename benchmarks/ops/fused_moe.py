"""A mixture's layer behind its router, against Hugging Face's loop over experts (CPU) or torch's grouped products."""

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx

from ..harness import Case, random
from ..shapes import Shape


def loop(x, gate_up, down, weights, ids):
    """As the experts modules of transformers have it, experts ascending."""
    out = torch.zeros_like(x)
    for expert in ids.unique().tolist():
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, down[expert]) * weights[token, slot, None]
        out = out.index_add(0, token, y.to(out.dtype))
    return out


def torch_grouped(x, gate_up, down, weights, ids):
    """As transformers' "grouped_mm" experts have it: sort, gather, two grouped products, scatter back, add."""
    flat, top_k = ids.flatten(), ids.shape[1]
    flat, order = flat.sort()
    ends = torch.searchsorted(flat, torch.arange(gate_up.shape[0], device=x.device, dtype=flat.dtype), right=True)
    ends = ends.to(torch.int32)
    gate, up = torch._grouped_mm(x[order // top_k], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends) * weights.flatten()[order][:, None]
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=x.device))
    return y[back].view(*ids.shape, -1).sum(1).to(x.dtype)


def _with_backward(fn):
    def run(*inputs):
        *args, ids = inputs
        args = [t.detach().requires_grad_() for t in args]
        return torch.autograd.grad(fn(*args, ids).float().sum(), args)

    return run


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    stock = torch_grouped if device == "cuda" else loop
    for tokens in rows if shape.E else ():

        def make(tokens=tokens):
            x = random(tokens, shape.H, dtype=dtype, device=device, seed=1)
            width = 2 * shape.expert_I
            gate_up = random(shape.E, width, shape.H, dtype=dtype, device=device, seed=2, scale=shape.H**-0.5)
            down = random(shape.E, shape.H, width // 2, dtype=dtype, device=device, seed=3, scale=shape.expert_I**-0.5)
            logits = random(tokens, shape.E, dtype=torch.float32, device=device, seed=4)
            return x, gate_up, down, *vx.moe_route(logits, shape.top_k)

        def bits(x, gate_up, down, weights, ids):
            one = vx.fused_moe(x[-1:], gate_up, down, weights[-1:], ids[-1:])
            return one, vx.fused_moe(x, gate_up, down, weights, ids)[-1:]

        touched = int(make()[4].unique().numel())
        matrices = touched * 3 * shape.expert_I * shape.H
        product = 6 * tokens * shape.top_k * shape.expert_I * shape.H
        for label, wrap, times in (("fwd", lambda f: f, 1), ("fwd+bwd", _with_backward, 3)):
            if times == 3 and tokens < 64:
                continue  # nobody trains on so few
            providers = {"vexact": wrap(vx.fused_moe)}
            if device != "cuda" or dtype == torch.bfloat16:
                providers["torch"] = wrap(stock)
            yield Case(
                "fused_moe",
                f"{label} {shape.name} T={tokens} {str(dtype)[6:]}",
                make,
                providers,
                bits,
                bytes=times * (2 * tokens * shape.H + matrices) * dtype.itemsize,
                flops=times * product,
            )
