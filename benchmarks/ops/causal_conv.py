"""causal_conv over the channels of a delta net's projections: a training forward, it with its backward, a decode step
and a chunk of a prompt, against torch's grouped convolution and causal-conv1d."""

from collections.abc import Iterator, Sequence

import torch

import vexact_ops as vx

from ..checks import reference
from ..harness import Case, random
from ..peers import installed
from ..shapes import Shape

WIDTH = 4
FREE = {"n": "H"}


def _stock(x, weight):
    y = torch.nn.functional.conv1d(x.t()[None], weight[:, None], padding=WIDTH - 1, groups=x.shape[1])
    return torch.nn.functional.silu(y[0, :, : x.shape[0]].t())


def _stock_step(x, weight, taps, slots, lens, cu):
    """The ring as torch code keeps it: the last inputs side by side, moved by one."""
    held = taps[slots.long()]
    window = torch.cat([held[:, 1:], x[:, None]], 1)
    taps.index_copy_(0, slots.long(), window)
    y = (window[:, -WIDTH:].float() * weight.t().float()).sum(1)
    return torch.nn.functional.silu(y).to(x.dtype)


def _stock_chunk(x, weight, taps, slots, lens, cu):
    """Of one sequence, whose length is a multiple of the ring's before and after."""
    slot = slots.long()
    rows = torch.cat([taps[slot][0, 1 - WIDTH :], x])
    y = torch.nn.functional.conv1d(rows.t()[None], weight[:, None], groups=x.shape[1])
    taps.index_copy_(0, slot, x[None, -taps.shape[1] :])
    return torch.nn.functional.silu(y[0].t())


def _causal_conv1d():
    from causal_conv1d import causal_conv1d_fn

    return lambda x, weight: causal_conv1d_fn(x.t()[None], weight, activation="silu")[0].t()


def _with_backward(fn):
    def run(x, weight):
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        y = fn(x, weight)
        return torch.autograd.grad(y, (x, weight), torch.ones_like(y))

    return run


def channels_of(shape: Shape) -> int:
    """Of q, k and v together; of a free shape its own number."""
    if shape.delta is None:
        return shape.H if not shape.layers else 0
    hk, hv, dk, dv = shape.delta
    return 2 * hk * dk + hv * dv


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    channels, kind = channels_of(shape), str(dtype)[6:]
    if not channels:
        return
    others = installed(**{"causal-conv1d": _causal_conv1d}) if device == "cuda" else {}
    for count in rows:

        def make(count=count):
            x = random(count, channels, dtype=dtype, device=device, seed=1)
            return x, random(channels, WIDTH, dtype=dtype, device=device, seed=2)

        def bits(x, weight):
            half = x.shape[0] // 2 + 1
            return vx.causal_conv(x[:half], weight), vx.causal_conv(x, weight)[:half]

        def step(count=count):
            x, weight = make(count)
            taps = random(count, WIDTH, channels, dtype=dtype, device=device, seed=3)
            slots = torch.arange(count, dtype=torch.int32, device=device)
            return x, weight, taps, slots, slots + 100, torch.arange(count + 1, dtype=torch.int32, device=device)

        def step_bits(x, weight, taps, slots, lens, cu):
            last = x.shape[0] - 1
            whole = ours(x, weight, taps.clone(), slots, lens, cu)
            return ours(x[last:], weight, taps.clone(), slots[last:], lens[last:], cu[:2]), whole[last:]

        def chunk(count=count):
            """Of rows that stand in wider ones, as a projection leaves them."""
            x = random(count, channels + 64, dtype=dtype, device=device, seed=1)[:, :channels]
            weight, taps, slots, _, _ = step(1)[1:]
            numbers = torch.arange(2, dtype=torch.int32, device=device) * count
            return x, weight, taps, slots, numbers[1:] + 100, numbers

        def chunk_bits(x, weight, taps, slots, lens, cu):
            half = x.shape[0] // 2
            gone = x.shape[0] - half
            whole = ours(x, weight, taps.clone(), slots, lens, cu)
            first = ours(x[:half], weight, taps, slots, lens - gone, cu.clamp(max=half))
            return torch.cat([first, ours(x[half:], weight, taps, slots, lens, cu.clamp(max=gone))]), whole

        def ours(x, weight, taps, slots, lens, cu):
            return vx.causal_conv_paged(x, weight, None, taps, slots, lens, cu)

        name, size = f"{shape.name} T={count} {kind}", dtype.itemsize
        once = (2 * count + WIDTH) * channels
        yield Case(
            "causal_conv",
            name,
            make,
            {"vexact": vx.causal_conv, "torch": _stock, **others},
            bits,
            bytes=once * size,
            flops=(2 * WIDTH + 4) * count * channels,
            reference=reference("causal_conv", "causal_conv_ref"),
            terms=WIDTH,
        )
        providers = {name: _with_backward(fn) for name, fn in {"vexact": vx.causal_conv, "torch": _stock}.items()}
        yield Case(
            "causal_conv",
            f"+backward {name}",
            make,
            providers,
            bits,
            bytes=2 * once * size,
            flops=(6 * WIDTH + 12) * count * channels,
        )
        if count % WIDTH == 0:
            yield Case(
                "causal_conv",
                f"chunk {name}",
                chunk,
                {"vexact": ours, "torch": _stock_chunk},
                chunk_bits,
                bytes=(once + 2 * WIDTH * channels) * size,
                flops=(2 * WIDTH + 4) * count * channels,
            )
        if count > 1024:  # sequences
            continue
        yield Case(
            "causal_conv",
            f"decode {name}",
            step,
            {"vexact": ours, "torch": _stock_step},
            step_bits,
            bytes=(count * (WIDTH + 2) + WIDTH) * channels * size,
            flops=(2 * WIDTH + 4) * count * channels,
        )
