"""The CUDA kernels (csrc/fused_moe/cuda.cu) of plan, combination and gate; the products are those of grouped_linear.

Admitted byte for byte against the Triton kernels (contract: verify, then trust), once for each dtype and width, outside
of CUDA graphs; what is not admitted takes the Triton kernels: same bits. Nothing waits for the plan's values.
"""

import functools

import torch
from torch import Tensor

from .._core import native
from .._core.admit import Candidate, admissions, race_on_gpu
from .._core.proof.inputs import cancelling, tricky
from ..grouped_linear.cuda import (
    gather_rows,
    grouped_gate_up,
    grouped_linear_dweight,
    grouped_linear_dx,
    grouped_linear_fwd,
)
from . import triton

REVISION = 1  # of the kernels and of how they are verified
EXPERTS = 512  # the most that the plan's kernel counts
FEW = 64  # rows for each expert: up to here the fastest products read rows through the order by themselves


@functools.lru_cache(4096)
def _scratch(slots: int) -> int:
    return native.ops().moe_plan_scratch(slots)


def plan(ids: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    if experts > EXPERTS:
        return triton.plan(ids, experts)
    slots = ids.numel()
    offsets, order, position = (ids.new_empty(size) for size in (experts + 1, slots, slots))
    chunks = _scratch(slots)
    native.ops().moe_plan(ids, offsets, order, position, ids.new_empty(chunks * experts) if chunks else None)
    return offsets, order, position


def _combine_kernel(y: Tensor, position: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    out = y.new_empty(tokens, y.shape[1])
    native.ops().moe_combine(y, position, weights, out)
    return out


def _scatter(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> Tensor:
    """x[order // top_k], every row of x read once; behind the last expert's rows: anything."""
    rows = x.new_empty(position.shape[0], x.shape[1])
    native.ops().moe_scatter(x, position, rows)
    return rows


def _gather(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> Tensor:
    return gather_rows(x, offsets, order, position.shape[0] // x.shape[0])


def _gate_bwd_kernel(
    h: Tensor, da: Tensor, order: Tensor, weights: Tensor, offsets: Tensor, gelu: bool
) -> tuple[Tensor, Tensor]:
    """dh and dweights; da becomes weight * a."""
    dh, dweights = torch.empty_like(h), torch.zeros_like(weights)
    native.ops().moe_gate_bwd(h, da, order, weights, offsets, gelu, dh, da, dweights)
    return dh, dweights


def _combine(y: Tensor, position: Tensor, weights: Tensor | None, tokens: int) -> Tensor:
    top_k = position.shape[0] // tokens if tokens else 1
    run = _combine_kernel if _admitted("combine", y, y.shape[1], top_k) else triton._combine
    return run(y, position, weights, tokens)


def _gate_bwd(
    h: Tensor, da: Tensor, order: Tensor, weights: Tensor, offsets: Tensor, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, weight * a, dweights; da is no more."""
    if not _admitted("gate_bwd", h, da.shape[1], int(gelu)):
        return triton._gate_bwd(h, da, order, weights, offsets, gelu)
    dh, dweights = _gate_bwd_kernel(h, da, order, weights, offsets, gelu)
    return dh, da, dweights


# ---- admission

_known: dict[tuple, bool] = {}


def _admitted(kernel: str, of: Tensor, n: int, option: int) -> bool:
    key = kernel, of.dtype, of.device.index, n, option
    known = _known.get(key)
    if known is None:
        if torch.cuda.is_current_stream_capturing():
            return False
        with torch.cuda.device(of.device), torch.no_grad():
            known = _known[key] = _verify(*key)
    return known


def _verify(kernel: str, dtype: torch.dtype, device: int, n: int, option: int) -> bool:
    name = f"fused_moe r{REVISION} {kernel} {str(dtype)[6:]} N={n} {option}"
    if kernel == "rows":  # a copy has one order: what is asked here is which of two is faster
        cases = functools.partial(_rows_cases, dtype, torch.device("cuda", device), n, option)
        copies = [Candidate("scatter", _scatter), Candidate("gather", _gather)]
        chosen = admissions(device).choose(name, copies, _gathered, cases, race=_race)
        return chosen is not None and chosen.name == "scatter"
    fast, canonical, cases = {
        "combine": (_combine_kernel, triton._combine, _combine_cases),
        "gate_bwd": (_gate_bwd_in_one, _canonical_gate_bwd_in_one, _gate_bwd_cases),
    }[kernel]
    make = functools.partial(cases, dtype, torch.device("cuda", device), n, option)
    return admissions(device).choose(name, [Candidate("cuda", fast)], canonical, make) is not None


def _race(candidates: list[Candidate], case: tuple) -> list[float]:
    return race_on_gpu([[functools.partial(one.run, *case)] * 3 for one in candidates])


def _routed(tokens: int, top_k: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """A plan of eight experts with empty slots."""
    g = torch.Generator().manual_seed(tokens)
    return triton.plan(torch.randint(-1, 9, (tokens, top_k), generator=g, dtype=torch.int32).to(device), 8)


def _gathered(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> Tensor:
    return x[order.long() // (position.shape[0] // x.shape[0])]


def _rows_cases(dtype, device, n, top_k) -> list[tuple]:
    cases = []
    for tokens in (77, 4096):
        g = torch.Generator().manual_seed(tokens)
        ids = torch.randint(128, (tokens, top_k), generator=g, dtype=torch.int32).to(device)
        cases.append((tricky(tokens, n, seed=n, dtype=dtype, device=device), *triton.plan(ids, 128)))
    return cases


def _combine_cases(dtype, device, n, top_k) -> list[tuple]:
    """Rows that cancel within a token: v and -v, times nearly the same weight."""
    cases = []
    for tokens in (1, 77):
        _, order, position = _routed(tokens, top_k, device)
        v = tricky(tokens, n, seed=n, dtype=dtype, device=device).repeat_interleave(top_k, 0)
        sign = 1 - 2 * (torch.arange(tokens * top_k, device=device) % 2)
        y = (v * sign[:, None].to(dtype))[order.long()]
        weights = 1 + 1e-3 * tricky(tokens, top_k, seed=n + 1, device=device).clamp(-4, 4)
        cases += [(y, position, weights, tokens), (y, position, None, tokens)]
    return cases


def _gate_bwd_cases(dtype, device, n, gelu) -> list[tuple]:
    """Gates and gradients whose sum over the width cancels."""
    cases = []
    for tokens in (1, 77):
        offsets, order, _ = _routed(tokens, 4, device)
        up, da = cancelling(4 * tokens, n, 1, n, dtype, device)
        up, da = up.clamp(-64, 64), da.expand(4 * tokens, n).contiguous()
        gate = 4 * tricky(4 * tokens, 1, seed=n, dtype=dtype, device=device).clamp(-4, 4).expand(-1, n)
        weights = tricky(tokens, 4, seed=n + 1, device=device)
        cases.append((torch.cat([gate, up], 1), da, order, weights, offsets, bool(gelu)))
    h, da, order, weights, offsets, gelu = cases[-1]
    h = 4 * tricky(*h.shape, seed=n + 2, dtype=dtype, device=device).clamp(-64, 64)
    return [*cases, (h, da, order, weights, offsets, gelu)]


def _gate_bwd_in_one(h, da, order, weights, offsets, gelu) -> Tensor:
    da = da.clone()
    dh, dweights = _gate_bwd_kernel(h, da, order, weights, offsets, gelu)
    return _in_one(dh, da, dweights, offsets)


def _canonical_gate_bwd_in_one(h, da, order, weights, offsets, gelu) -> Tensor:
    return _in_one(*triton._gate_bwd(h, da, order, weights, offsets, gelu), offsets)


def _in_one(dh, scaled, dweights, offsets) -> Tensor:
    """What is defined of the results: the rows behind the last expert's are not."""
    live = torch.arange(len(dh), device=dh.device)[:, None] < offsets[-1]
    rows = torch.cat([dh, scaled], 1).float()
    return torch.cat([torch.where(live, rows, 0.0).flatten(), dweights.flatten()])


# ---- the layer


def _apart(x: Tensor, offsets: Tensor, order: Tensor, position: Tensor) -> Tensor | None:
    """The rows of x side by side in the plan's order (behind the last expert's: anything), where the products' fastest
    kernels want them so: None where they read few rows through the order, and for what the Triton kernels serve."""
    slots, n = position.shape[0], x.shape[1]
    few = slots <= FEW * (offsets.shape[0] - 1)
    if few or x.dtype != torch.bfloat16 or n % 8 or x.stride(0) % 8 or x.data_ptr() % 16:
        return None
    run = _scatter if _admitted("rows", x, n, slots // x.shape[0]) else _gather
    return run(x, offsets, order, position)


def fused_moe_fwd(x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, gelu: bool, keep: bool):
    offsets, order, position = plan(ids, gate_up.shape[0])
    rows = _apart(x, offsets, order, position)
    through = (order, ids.shape[1]) if rows is None else (None, 1)
    h, a = grouped_gate_up(x if rows is None else rows, gate_up, offsets, *through, gelu, keep)
    del rows
    y = grouped_linear_fwd(a, down, offsets)
    del a
    return _combine(y, position, weights, x.shape[0]), h, offsets, order, position


def fused_moe_bwd(
    dy: Tensor, x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, h: Tensor, offsets: Tensor, order: Tensor,
    position: Tensor, gelu: bool, need_dx: bool, need_dgate_up: bool, need_ddown: bool,
):  # fmt: skip
    ordered = order, weights.shape[1]
    rows = _apart(dy, offsets, order, position)  # two products read them
    of_dy = (dy, ordered, "dy") if rows is None else (rows, (None, 1), "")
    del rows
    da = grouped_linear_dx(of_dy[0], down, offsets, *of_dy[1])
    dh, scaled, dweights = _gate_bwd(h, da, order, weights, offsets, gelu)
    del da
    ddown = None
    if need_ddown:
        ddown = grouped_linear_dweight(of_dy[0], scaled, offsets, *of_dy[1], gathered=of_dy[2])
    del scaled, of_dy
    dx = _combine(grouped_linear_dx(dh, gate_up, offsets), position, None, x.shape[0]) if need_dx else None
    dgate_up = None
    if need_dgate_up:
        rows = _apart(x, offsets, order, position)
        of_x = (x, ordered, "x") if rows is None else (rows, (None, 1), "")
        dgate_up = grouped_linear_dweight(dh, of_x[0], offsets, *of_x[1], gathered=of_x[2])
    return dx, dgate_up, ddown, dweights
