"""A gated delta net's rule: a training forward, it with its backward, and a decode step inside a chunk, against the
stock chunked and recurrent forms in torch and flash-linear-attention's kernels."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..checks import reference
from ..harness import Case, random
from ..peers import installed
from ..shapes import Shape

CHUNK = 64
FREE = {"heads": "Hq", "kv_heads": "Hk", "head_dim": "D"}


def _rows(shape, count, dtype, device):
    hk, hv, dk, dv = shape
    q, k = (random(count, hk, dk, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    v = random(count, hv, dv, dtype=dtype, device=device, seed=3)
    g = -0.1 * random(count, hv, dtype=torch.float32, device=device, seed=4).abs()
    return q, k, v, g, random(count, hv, dtype=torch.float32, device=device, seed=5).sigmoid().to(dtype)


def _normed(x):
    x = x.float()
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + 1e-6)


def _stock(q, k, v, g, beta, cu):
    """The chunked form in torch, fp32 inside, as Hugging Face has it."""
    chunked = reference("gated_delta", "gated_delta_chunks_ref")
    return chunked(*(x.float() for x in (q, k, v, g, beta)))[0].to(v.dtype)


def _recurrent(q, k, v, g, beta, state, *rest):
    group = v.shape[1] // k.shape[1]
    q, k = (_normed(x).repeat_interleave(group, dim=1) for x in (q, k))
    decayed = state * g.exp()[..., None, None]
    u = beta.float()[..., None] * (v.float() - torch.einsum("bhkv,bhk->bhv", decayed, k))
    torch.add(decayed, k[..., None] * u[..., None, :], out=state)
    return (torch.einsum("bhkv,bhk->bhv", state, q) * q.shape[-1] ** -0.5).to(v.dtype)


def _fla():
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def run(q, k, v, g, beta, cu):
        rows = (x[None] for x in (q, k, v, g, beta))
        return chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True, cu_seqlens=cu.long())[0][0]

    return run


def _fla_step():
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def run(q, k, v, g, beta, state, *rest):
        rows = (x[:, None] for x in (q, k, v, g, beta))
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        return fused_recurrent_gated_delta_rule(*rows, **options)[0][:, 0]

    return run


def _ours(q, k, v, g, beta, cu):
    return vx.gated_delta_varlen(q, k, v, g, beta, cu)


def _step(*args):
    return vx.gated_delta_paged(*args, 1)


def _with_backward(fn):
    def run(*args):
        *rows, cu = args
        rows = [x.detach().requires_grad_() for x in rows]
        out = fn(*rows, cu)
        return torch.autograd.grad(out, rows, torch.ones_like(out))

    return run


def sizes_of(shape: Shape) -> tuple[int, int, int, int] | None:
    """Hk, Hv, dk, dv; of a free shape, its heads."""
    if shape.delta is None and not shape.layers:
        return shape.Hk, shape.Hq, shape.D, shape.D
    return shape.delta


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    sizes, kind = sizes_of(shape), str(dtype)[6:]
    if sizes is None:
        return
    hk, hv, dk, dv = sizes
    on_gpu = device == "cuda"
    trained, stepped = (installed(fla=_fla), installed(fla=_fla_step)) if on_gpu else ({}, {})
    for count in rows:

        def train(count=count):
            return *_rows(sizes, count, dtype, device), torch.tensor([0, count], dtype=torch.int32, device=device)

        def train_bits(*args):
            *some, _ = args
            half = len(some[0]) // 2 + 1
            cu = torch.tensor([0, half], dtype=torch.int32, device=device)
            return _ours(*(x[:half] for x in some), cu), _ours(*args)[:half]

        def step(count=count):
            state, open_u = (
                random(count, *s, dtype=torch.float32, device=device, seed=6) for s in ((hv, dk, dv), (CHUNK, hv, dv))
            )
            open_k = random(count, CHUNK, hk, dk, dtype=dtype, device=device, seed=7)
            open_g = -random(count, CHUNK, hv, dtype=torch.float32, device=device, seed=8).abs()
            slots = torch.arange(count, dtype=torch.int32, device=device)
            lens = CHUNK + 1 + slots % (CHUNK - 1)  # all places of a chunk but its last, evenly
            cu = torch.arange(count + 1, dtype=torch.int32, device=device)
            return *_rows(sizes, count, dtype, device), state, open_k, open_u, open_g, slots, lens, cu

        def step_bits(*args):
            *rows_, state, open_k, open_u, open_g, slots, lens, cu = args
            last = len(slots) - 1
            memory = [t.clone() for t in (state, open_k, open_u, open_g)]
            whole = _step(*args)
            alone = _step(*(x[last:] for x in rows_), *memory, slots[last:], lens[last:], cu[:2])
            return alone, whole[last:]

        name, wide = f"{shape.name} T={count} {kind}", count * hv
        once = (2 * count * hk * dk + 2 * wide * dv) * dtype.itemsize + wide * (4 + dtype.itemsize)
        work = 2 * wide * (3 * dk * dv + CHUNK * (dk + dv))
        forward = {"vexact": _ours, "torch": _stock, **trained}
        yield Case("gated_delta", name, train, forward, train_bits, bytes=once, flops=work)
        backward = {provider: _with_backward(fn) for provider, fn in forward.items()}
        yield Case("gated_delta", f"+backward {name}", train, backward, train_bits, bytes=3 * once, flops=3 * work)
        open_rows = count * CHUNK // 2 * (hk * dk * dtype.itemsize + hv * dv * 4 + hv * 4)
        yield Case(
            "gated_delta",
            f"decode {name}",
            step,
            {"vexact": _step, "torch": _recurrent, **stepped},
            step_bits,
            bytes=once + wide * dk * dv * 4 + open_rows,
            flops=2 * wide * (2 * dk * dv + CHUNK * (dk + dv)),
        )
