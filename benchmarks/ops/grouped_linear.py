"""grouped_linear on a mixture's two products and their gradients, against torch's grouped product, quack and our
stand-in for a fixed Triton tile (GPU) or a loop over experts (CPU)."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F

import vexact_ops as vx
from vexact_ops.grouped_linear import op
from vexact_ops.testing import cancelling, offsets_of

from ..checks import reference
from ..harness import Case, random
from ..peers import installed
from ..shapes import Shape


def assigned_to(tokens: int, shape: Shape) -> list[int]:
    """The expert of each row, ascending: every token takes top_k different ones at random."""
    g = torch.Generator().manual_seed(0)
    drawn = torch.rand(tokens, shape.E, dtype=torch.float32, generator=g).topk(shape.top_k, 1)[1]
    return drawn.flatten().sort()[0].tolist()


def loop(x, weight, offsets):
    ends = offsets.tolist()
    out = x.new_empty(x.shape[0], weight.shape[1])
    for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
        if begin < end:
            out[begin:end] = F.linear(x[begin:end], weight[expert])
    return out


def torch_grouped(x, weight, offsets):
    return torch._grouped_mm(x, weight.transpose(1, 2), offs=offsets[1:])


def torch_dx(dy, weight, offsets):
    return torch._grouped_mm(dy, weight, offs=offsets[1:])


def torch_dweight(dy, x, offsets):
    return torch._grouped_mm(dy.t(), x, offs=offsets[1:])


def _quack(across: bool) -> Callable:
    from quack.gemm_interface import gemm

    def run(x, weight, offsets):
        return gemm(x, weight if across else weight.transpose(1, 2), cu_seqlens_m=offsets, tuned=False)

    return run


def _fixed_tile(across: bool) -> Callable:
    from ..fixed_tile import grouped

    return lambda x, weight, offsets: grouped(x, weight.transpose(1, 2) if across else weight, offsets)


def ours_dx(dy, weight, offsets):
    return op._grouped_linear_dx(dy, weight, offsets, op.ROOM.resolve(dy.device, None))


def ours_dweight(dy, x, offsets):
    return op._grouped_linear_dweight(dy, x, offsets, op.ROOM.resolve(dy.device, None))


def canonical(kind: str, x, other, offsets):
    """What was timed and the Triton kernel, on operands of the same sizes that cancel along the reduction."""
    triton = op.ROOM.module("triton")
    half = x.shape[1] // 2
    v = x[:, :half] * torch.exp2(torch.arange(half, dtype=torch.float32, device=x.device) % 25 - 12).to(x.dtype)
    x = torch.cat((v, -v), 1)
    if kind == " dW":  # its reduction are the rows
        power = torch.arange(x.shape[0], dtype=torch.float32, device=x.device) % 25 - 12
        x = x * torch.exp2(power).to(x.dtype)[:, None]
        return ours_dweight(x, other, offsets), triton.grouped_linear_dweight(x, other, offsets)
    if kind == " dX":
        other = torch.cat((other[:, :half], other[:, :half]), 1)
        return ours_dx(x, other, offsets), triton.grouped_linear_dx(x, other, offsets)
    other = torch.cat((other[..., :half], other[..., :half]), 2)
    return vx.grouped_linear(x, other, offsets), triton.grouped_linear_fwd(x, other, offsets)


def rows_alone(assigned: list[int], experts: int) -> Callable[..., tuple]:
    """Case.alone of rows that belong to these experts, ascending."""

    def alone(fn, x, weight, offsets):
        rows = sorted({0, len(assigned) // 2, len(assigned) - 1}) if len(assigned) > 1 else []
        whole = fn(x, weight, offsets) if rows else x
        ones = (fn(x[r : r + 1], weight, offsets_of([assigned[r]], experts, x.device)) for r in rows)
        return tuple(ones), tuple(whole[r : r + 1] for r in rows)

    return alone


FREE = {"n": "N", "k": "K", "experts": "E", "top_k": "top_k"}


def cases(shape: Shape, rows: Sequence[int], dtype: torch.dtype, device: str) -> Iterator[Case]:
    on_gpu = device == "cuda"
    has_torch = not on_gpu or dtype == torch.bfloat16
    products = {"gate_up": (2 * shape.expert_I, shape.H), "down": (shape.H, shape.expert_I)}
    if shape.N:
        products = {"matrix": (shape.N, shape.K)}
    for name, (n, k) in products.items() if shape.E else ():
        for tokens in rows:
            assigned = assigned_to(tokens, shape)
            offsets, count = offsets_of(assigned, shape.E, device), len(assigned)
            touched = len(set(assigned))

            def make(offsets=offsets, count=count, n=n, k=k):
                x = random(count, k, dtype=dtype, device=device, seed=1)
                return x, random(shape.E, n, k, dtype=dtype, device=device, seed=2, scale=k**-0.5), offsets

            def make_dx(offsets=offsets, count=count, n=n, k=k):
                dy = random(count, n, dtype=dtype, device=device, seed=1)
                return dy, random(shape.E, n, k, dtype=dtype, device=device, seed=2, scale=n**-0.5), offsets

            def make_dweight(offsets=offsets, count=count, n=n, k=k):
                dy = random(count, n, dtype=dtype, device=device, seed=1)
                return dy, random(count, k, dtype=dtype, device=device, seed=2), offsets

            def bits(x, weight, offsets, count=count, assigned=assigned, k=k):
                x, weight = cancelling(count, k, 64, 0, dtype, device)
                weight = weight.expand(shape.E, 64, k)
                return vx.grouped_linear(x, weight, offsets), vx.linear(x, weight[0])

            kinds = {
                "": (make, {"vexact": vx.grouped_linear}, torch_grouped if on_gpu else loop, False),
                " dX": (make_dx, {"vexact": ours_dx}, torch_dx, True),
                " dW": (make_dweight, {"vexact": ours_dweight}, torch_dweight, None),
            }
            for kind, (inputs, providers, stock, across) in kinds.items():
                if kind and (not on_gpu or tokens < 1024):  # training's sizes
                    continue
                providers = dict(providers)
                if has_torch:
                    providers["torch"] = stock
                if on_gpu and across is not None and dtype == torch.bfloat16:
                    others = {"quack": lambda a=across: _quack(a), "fixed-tile": lambda a=across: _fixed_tile(a)}
                    providers |= installed(**others)
                matrices = touched * n * k if across is not None else shape.E * n * k
                yield Case(
                    "grouped_linear",
                    f"{shape.name} {name}{kind} T={tokens} {str(dtype)[6:]}",
                    inputs,
                    providers,
                    functools.partial(canonical, kind) if on_gpu else bits,
                    bytes=(count * (k + n) + matrices) * dtype.itemsize,
                    flops=2 * count * n * k,
                    alone=None if across is None else rows_alone(assigned, shape.E),
                    reference=None if kind else reference("grouped_linear", "grouped_linear_ref"),
                    terms=k,
                )
