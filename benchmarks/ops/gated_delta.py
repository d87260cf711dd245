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
TRAININGS = ((8, 4096), (1, 32768))  # on a GPU also: sequences of so many rows
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


def _stock(count):
    """The chunked form in torch, fp32 inside, as Hugging Face has it, a sequence after another."""
    chunked = reference("gated_delta", "gated_delta_chunks_ref")

    def run(q, k, v, g, beta, cu):
        parts = zip(*(x.float().chunk(count) for x in (q, k, v, g, beta)), strict=True)
        return torch.cat([chunked(*some)[0] for some in parts]).to(v.dtype)

    return run


def _recurrent(q, k, v, g, beta, state, *rest):
    group = v.shape[1] // k.shape[1]
    for _ in rest[-1]:
        y, x = (_normed(t).repeat_interleave(group, dim=1) for t in (q, k))
        decayed = state * g.exp()[..., None, None]
        u = beta.float()[..., None] * (v.float() - torch.einsum("bhkv,bhk->bhv", decayed, x))
        torch.add(decayed, x[..., None] * u[..., None, :], out=state)
        out = (torch.einsum("bhkv,bhk->bhv", state, y) * q.shape[-1] ** -0.5).to(v.dtype)
    return out


def _fla(count):
    """Sequences of a length, as a batch: offsets would have it ask the GPU for them."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def run(q, k, v, g, beta, cu):
        rows = (x.unflatten(0, (count, -1)) for x in (q, k, v, g, beta))
        return chunk_gated_delta_rule(*rows, use_qk_l2norm_in_kernel=True)[0].flatten(0, 1)

    return run


def _fla_step():
    """A step a place, as ours, over the same states."""
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    def run(q, k, v, g, beta, state, *rest):
        q, k, v, g, beta = (x[:, None] for x in (q, k, v, g, beta))
        options = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
        for _ in rest[-1]:  # by name: in other versions beta is not the fifth
            out = fused_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta, **options)[0][:, 0]
        return out

    return run


def _ours(q, k, v, g, beta, cu):
    return vx.gated_delta_varlen(q, k, v, g, beta, cu)


def _step(*args):
    *rows, slots, cu, places = args
    for lens in places:
        out = vx.gated_delta_paged(*rows, slots, lens, cu, 1)
    return out


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


def _training(name, sizes, count, length, dtype, device) -> Iterator[Case]:
    (hk, hv, dk, dv), tokens = sizes, count * length
    others = installed(**{"flash-linear-attention": lambda: _fla(count)}) if device == "cuda" else {}

    def make():
        cu = torch.arange(count + 1, dtype=torch.int32, device=device) * length
        return *_rows(sizes, tokens, dtype, device), cu

    def bits(*args):  # the last sequence's beginning, alone
        *some, cu = args
        begin, half = tokens - length, length // 2 + 1
        alone = _ours(*(x[begin : begin + half] for x in some), cu[:2].clamp(max=half))
        return alone, _ours(*args)[begin : begin + half]

    once = tokens * ((2 * hk * dk + 2 * hv * dv) * dtype.itemsize + hv * (4 + dtype.itemsize))
    work = 2 * tokens * hv * (3 * dk * dv + CHUNK * (dk + dv))
    forward = {"vexact": _ours, "torch": _stock(count), **others}
    for label, wrap, times in (("", lambda f: f, 1), ("+backward ", _with_backward, 3)):
        providers = {provider: wrap(fn) for provider, fn in forward.items()}
        yield Case("gated_delta", f"{label}{name}", make, providers, bits, bytes=times * once, flops=times * work)


def _decode(name, sizes, count, dtype, device) -> Iterator[Case]:
    """The mean over a chunk: sequences at all places of one evenly, in as many steps as that takes."""
    (hk, hv, dk, dv), steps = sizes, -(-CHUNK // count)

    def make():
        state, open_u = (
            random(count, *s, dtype=torch.float32, device=device, seed=6) for s in ((hv, dk, dv), (CHUNK, hv, dv))
        )
        open_k = random(count, CHUNK, hk, dk, dtype=dtype, device=device, seed=7)
        open_g = -random(count, CHUNK, hv, dtype=torch.float32, device=device, seed=8).abs()
        slots = torch.arange(count, dtype=torch.int32, device=device)
        places = [CHUNK + 1 + (slots * steps + n) % CHUNK for n in range(steps)]
        cu = torch.arange(count + 1, dtype=torch.int32, device=device)
        return *_rows(sizes, count, dtype, device), state, open_k, open_u, open_g, slots, cu, places

    def bits(*args):
        *rows, state, open_k, open_u, open_g, slots, cu, places = args
        last = count - 1
        memory = [t.clone() for t in (state, open_k, open_u, open_g)]
        whole = _step(*args)
        alone = _step(*(x[last:] for x in rows), *memory, slots[last:], cu[:2], [lens[last:] for lens in places])
        return alone, whole[last:]

    wide = count * hv
    once = 2 * count * hk * dk * dtype.itemsize + 2 * wide * dv * dtype.itemsize + wide * (4 + dtype.itemsize)
    open_rows = count * (CHUNK - 1) / 2 * (hk * dk * dtype.itemsize + hv * dv * 4 + hv * 4)
    states = wide * dk * dv * 4 * (1 + 1 / CHUNK)  # read at every step, written at the end of a chunk
    others = installed(**{"flash-linear-attention": _fla_step}) if device == "cuda" else {}
    yield Case(
        "gated_delta",
        f"decode {name}",
        make,
        {"vexact": _step, "torch": _recurrent, **others},
        bits,
        bytes=once + states + open_rows,
        flops=2 * wide * (2 * dk * dv + CHUNK * (dk + dv)),
        steps=steps,
    )


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    sizes, kind = sizes_of(shape), str(dtype)[6:]
    if sizes is None:
        return
    for count in rows:
        yield from _training(f"{shape.name} T={count} {kind}", sizes, 1, count, dtype, device)
        if count <= 1024:
            yield from _decode(f"{shape.name} T={count} {kind}", sizes, count, dtype, device)
    if device == "cuda" and dtype != torch.float32:
        for count, length in TRAININGS:
            name = f"{shape.name} {f'{count} x ' if count > 1 else 'T='}{length} {kind}"
            yield from _training(name, sizes, count, length, dtype, device)
