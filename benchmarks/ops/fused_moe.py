"""A mixture's layer behind its router, and what of it is not matrix products, against Hugging Face's ways to compute
it, torch's and quack's grouped products, and our stand-in for a fixed Triton tile."""

import importlib.util
from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx
from vexact_ops.fused_moe.op import ROOM

from ..checks import reference, row_alone
from ..harness import Case, random
from ..peers import installed
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


def _sorted(ids, experts):
    """The order of the slots by expert, where each expert's end, and where each slot went."""
    flat, order = ids.flatten().sort()
    ends = torch.searchsorted(flat, torch.arange(experts, device=ids.device, dtype=flat.dtype), right=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=ids.device))
    return order, ends.to(torch.int32), back


def torch_grouped(x, gate_up, down, weights, ids):
    """As transformers' "grouped_mm" experts have it: sort, gather, two grouped products, scatter back, add."""
    order, ends, back = _sorted(ids, gate_up.shape[0])
    gate, up = torch._grouped_mm(x[order // ids.shape[1]], gate_up.transpose(1, 2), offs=ends).chunk(2, -1)
    y = torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends) * weights.flatten()[order][:, None]
    return y[back].view(*ids.shape, -1).sum(1).to(x.dtype)


def _quack():
    if importlib.util.find_spec("quack") is None:
        raise ImportError("quack is not installed")

    def layer(x, gate_up, down, weights, ids):
        from quack.gemm_interface import gemm  # seconds, which runs without this peer are spared

        order, ends, back = _sorted(ids, gate_up.shape[0])
        offsets, rows = F.pad(ends, (1, 0)), (order // ids.shape[1]).int()
        h = gemm(x, gate_up.transpose(1, 2), cu_seqlens_m=offsets, A_idx=rows, tuned=False)
        gate, up = h.chunk(2, -1)
        y = gemm(F.silu(gate) * up, down.transpose(1, 2), cu_seqlens_m=offsets, tuned=False)
        return torch.bmm(weights[:, None].to(y.dtype), y[back].view(*ids.shape, -1))[:, 0]

    return layer


def _fixed_tile():
    from ..fixed_tile import grouped

    def layer(x, gate_up, down, weights, ids):
        order, ends, back = _sorted(ids, gate_up.shape[0])
        offsets = F.pad(ends, (1, 0))
        gate, up = grouped(x[order // ids.shape[1]], gate_up, offsets).chunk(2, -1)
        y = grouped(F.silu(gate) * up, down, offsets) * weights.flatten()[order][:, None]
        return y[back].view(*ids.shape, -1).sum(1).to(x.dtype)

    return layer


def _forward(fn):
    return lambda x, gate_up, down, weights, ids, dy: fn(x, gate_up, down, weights, ids)


def _with_backward(fn):
    def run(*inputs):
        *args, ids, dy = inputs
        args = [t.detach().requires_grad_() for t in args]
        return torch.autograd.grad(fn(*args, ids), args, dy)

    return run


def _around_the_products(module, shape):
    """Routing, plan and combination: all of the layer that is not a product or a gate."""

    def ours(logits, y):
        weights, ids = vx.moe_route(logits, shape.top_k)
        position = module.plan(ids, shape.E)[2]
        return module._combine(y, position, weights, logits.shape[0])

    def stock(logits, y):
        weights, ids = logits.softmax(-1, dtype=torch.float32).topk(shape.top_k, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order, _, back = _sorted(ids, shape.E)
        y = y * weights.flatten()[order][:, None]
        return y[back].view(*ids.shape, -1).sum(1).to(y.dtype)

    return ours, stock


def _products(rows, gate_up, down, offsets):
    """The layer's products and the gate between them on rows that lie sorted already: nothing is routed or permuted."""
    if not rows.is_cuda:
        return vx.grouped_linear(vx.silu_mul(vx.grouped_linear(rows, gate_up, offsets)), down, offsets)
    from vexact_ops.grouped_linear.cuda import grouped_gate_up, grouped_linear_fwd

    return grouped_linear_fwd(grouped_gate_up(rows, gate_up, offsets, None, 1, False, False)[1], down, offsets)


def _torch_products(rows, gate_up, down, offsets):
    gate, up = torch._grouped_mm(rows, gate_up.transpose(1, 2), offs=offsets[1:]).chunk(2, -1)
    return torch._grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=offsets[1:])


def _exact(x, gate_up, down, weights, ids, dy):
    return reference("fused_moe", "fused_moe_ref")(x, gate_up, down, weights, ids)


FREE = {"n": "expert_I", "k": "H", "experts": "E", "top_k": "top_k"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    if not shape.E:
        return
    on_gpu = device == "cuda"
    width, kind = shape.expert_I, str(dtype)[6:]
    canonical = {"backend": "triton"} if on_gpu else {}
    for tokens in rows:

        def make(tokens=tokens):
            x, dy = (random(tokens, shape.H, dtype=dtype, device=device, seed=seed) for seed in (1, 5))
            gate_up = random(shape.E, 2 * width, shape.H, dtype=dtype, device=device, seed=2, scale=shape.H**-0.5)
            down = random(shape.E, shape.H, width, dtype=dtype, device=device, seed=3, scale=width**-0.5)
            logits = random(tokens, shape.E, dtype=torch.float32, device=device, seed=4)
            return x, gate_up, down, *vx.moe_route(logits, shape.top_k), dy

        def bits(x, gate_up, down, weights, ids, dy):
            y = vx.fused_moe(x, gate_up, down, weights, ids)
            one = vx.fused_moe(x[-1:], gate_up, down, weights[-1:], ids[-1:])
            return (one, y), (y[-1:], vx.fused_moe(x, gate_up, down, weights, ids, **canonical))

        def bits_with_backward(x, gate_up, down, weights, ids, dy):
            def gradients(count, **options):
                args = [t[-count:].clone().requires_grad_() for t in (x, weights)]
                y = vx.fused_moe(args[0], gate_up, down, args[1], ids[-count:], **options)
                return torch.autograd.grad(y, args, dy[-count:])

            ours = gradients(len(x))
            return (*gradients(1), *ours), (*(t[-1:] for t in ours), *gradients(len(x), **canonical))

        g = torch.Generator().manual_seed(4)
        random_ids = torch.rand(tokens, shape.E, dtype=torch.float32, generator=g).topk(shape.top_k, 1)[1]
        matrices = int(random_ids.unique().numel()) * 3 * width * shape.H
        product = 6 * tokens * shape.top_k * width * shape.H
        for label, wrap, times, same in (
            ("fwd", _forward, 1, bits),
            ("fwd+bwd", _with_backward, 3, bits_with_backward),
        ):
            if times == 3 and tokens < 64:
                continue  # nobody trains on so few
            cost = {"bytes": times * (2 * tokens * shape.H + matrices) * dtype.itemsize, "flops": times * product}
            alone = row_alone(0, 3, 4, 5, results=1)
            cost |= {"alone": alone, "reference": _exact if times == 1 else None, "terms": 2 * shape.H + width}
            name = f"{label} {shape.name} T={tokens} {kind}"
            providers = {"vexact": vx.fused_moe}
            if not on_gpu:
                providers["torch"] = loop
            elif dtype == torch.bfloat16:
                providers |= {"torch": torch_grouped}
                if times == 1:  # they have no backward
                    providers |= installed(**{"quack": _quack, "fixed-tile": _fixed_tile})
            yield Case("fused_moe", name, make, {who: wrap(fn) for who, fn in providers.items()}, same, **cost)
            if on_gpu and (times == 1 or tokens >= 1024):  # the loop looks at the ids on the host
                pair = {"vexact": wrap(vx.fused_moe), "hf-loop": wrap(loop)}
                yield Case("fused_moe", f"{name} eager", make, pair, same, stock="hf-loop", captured=False, **cost)

        # what routing and permutation cost the layer is the difference between these two
        def from_logits(x, gate_up, down, logits):
            return vx.fused_moe(x, gate_up, down, *vx.moe_route(logits, shape.top_k))

        def torch_from_logits(x, gate_up, down, logits):
            weights, ids = logits.softmax(-1).topk(shape.top_k, dim=-1)
            return torch_grouped(x, gate_up, down, weights / weights.sum(-1, keepdim=True), ids.int())

        def make_whole(make=make, tokens=tokens):
            return *make()[:3], random(tokens, shape.E, dtype=torch.float32, device=device, seed=4)

        def make_sorted(make=make, tokens=tokens):
            _, gate_up, down, _, ids, _ = make()
            ends = torch.bincount(ids.flatten(), minlength=shape.E).cumsum(0).int()
            rows = random(tokens * shape.top_k, shape.H, dtype=dtype, device=device, seed=6)
            return rows, gate_up, down, F.pad(ends, (1, 0))

        def bits_whole(x, gate_up, down, logits, run=from_logits):
            return run(x[-1:], gate_up, down, logits[-1:]), run(x, gate_up, down, logits)[-1:]

        def bits_sorted(rows, gate_up, down, offsets):
            plain = vx.grouped_linear(vx.silu_mul(vx.grouped_linear(rows, gate_up, offsets)), down, offsets)
            return _products(rows, gate_up, down, offsets), plain

        for label, maker, ours, stock, same, moved in (
            ("fwd from logits", make_whole, from_logits, torch_from_logits, bits_whole, 2 * tokens * shape.H),
            (
                "products alone",
                make_sorted,
                _products,
                _torch_products,
                bits_sorted,
                2 * tokens * shape.top_k * shape.H,
            ),
        ):
            providers = {"vexact": ours}
            if on_gpu and dtype == torch.bfloat16:
                providers["torch"] = stock
            least = (moved + matrices) * dtype.itemsize
            name = f"{label} {shape.name} T={tokens} {kind}"
            yield Case("fused_moe", name, maker, providers, same, bytes=least, flops=product)

        def make_around(tokens=tokens):
            logits = random(tokens, shape.E, dtype=torch.float32, device=device, seed=4)
            return logits, random(tokens * shape.top_k, shape.H, dtype=dtype, device=device, seed=6)

        ours, stock = _around_the_products(ROOM.module(ROOM.resolve(torch.device(device), None)), shape)

        def bits_around(logits, y, ours=ours, tokens=tokens):
            if not on_gpu:
                return ours(logits, y), ours(logits, y)
            return ours(logits, y), _around_the_products(ROOM.module("triton"), shape)[0](logits, y)

        around = 8 * tokens * (shape.top_k + shape.E / 2) + (shape.top_k + 1) * tokens * shape.H * dtype.itemsize
        name = f"routing, plan and combination {shape.name} T={tokens} {kind}"
        yield Case("fused_moe", name, make_around, {"vexact": ours, "torch": stock}, bits_around, bytes=around)
