"""The Triton kernels. A program holds whole rows; rows wider than WIDEST are read twice, block by block.

Of rmsnorm's backward those of triton_backward.py are proposed in the place of the two here, and verified byte for byte
against them (contract: verify, then trust), once for each dtype, width and style, with a residual and without.
"""

import functools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core import digest, gpu
from .._core.admit import Candidate, Decision, Proposal, canonical_by_rule, decided, race_on_gpu
from .._core.proof.inputs import SMALL, special_rows, tricky
from .._core.triton import OPTIONS, begin_beside, cdiv, chunk, early, on, sum_rows, tree_sum
from ..silu_mul.triton import gate_slope, sigmoid, silu
from . import triton_backward
from .triton_backward import tile_of

WIDEST = 16384
TWO = "dx, then dweight"
ONE = {f"in one pass, {rows} rows": rows for rows in (64, 16)}  # rows whose products a program sums
NARROW = 256  # of so many elements a program sums 64 in one step or a few
WALKED = 1 << 23  # elements of rmsnorm_gated's x from which on a program walks its rows
TIMED = 1 << 24  # elements of x where they are raced: a batch's


@functools.cache
def _tile(n: int) -> dict:
    """Rows and columns of a program, from n alone."""
    columns = chunk(n, WIDEST)
    return {"ROWS": max(1, 2048 // columns), "BLOCK": columns, "num_warps": min(max(columns // 512, 4), 16), **OPTIONS}


@triton.jit
def _load(x, row, stride, start, live, N: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)[None, :]
    return tl.load(x + row[:, None] * stride + column, mask=live & (column < N), other=0.0).to(tl.float32)


@triton.jit
def _store(y, value, row, start, live, N: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)[None, :]
    tl.store(y + row[:, None] * N + column, value.to(y.dtype.element_ty), mask=live & (column < N))


@triton.jit
def _weight(weight, start, GEMMA: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    w = tl.load(weight + column, mask=column < N, other=0.0).to(tl.float32)[None, :]
    if GEMMA:
        w = 1.0 + w
    return w


@triton.jit
def _mean(total, N: tl.constexpr):
    if N & (N - 1) == 0:  # times the reciprocal, which is exact: the same bits
        mean = total * (1.0 / N)
    else:
        mean = tl.div_rn(total, float(N))
    return mean


@triton.jit
def _scale(lanes, eps, N: tl.constexpr):
    return tl.div_rn(1.0, tl.sqrt_rn(_mean(tree_sum(lanes), N) + eps))


@triton.jit(do_not_specialize=["rows"])
def _fwd_kernel(
    x, weight, residual, y, new_residual, rstd, rows, x_stride, residual_stride, eps,
    RESIDUAL: tl.constexpr, GEMMA: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin_beside(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    w = _weight(weight, 0, GEMMA, N, BLOCK)  # asked for with the row: behind the sum it would be waited for again
    for start in tl.static_range(0, N, BLOCK):
        h = _load(x, row, x_stride, start, live, N, BLOCK)
        if RESIDUAL:
            h += _load(residual, row, residual_stride, start, live, N, BLOCK)
            h = h.to(x.dtype.element_ty).to(tl.float32)
            _store(new_residual, h, row, start, live, N, BLOCK)
        lanes += h * h  # order: blocks of columns are added lane by lane, ascending; the lanes in a tree
    scale = _scale(lanes, eps, N)
    tl.store(rstd + row[:, None], scale, mask=live)
    for start in tl.static_range(0, N, BLOCK):
        if N > BLOCK:
            h = _load(x, row, x_stride, start, live, N, BLOCK)
            if RESIDUAL:
                h += _load(residual, row, residual_stride, start, live, N, BLOCK)
                h = h.to(x.dtype.element_ty).to(tl.float32)
            w = _weight(weight, start, GEMMA, N, BLOCK)
        normed = h * scale
        if not GEMMA:
            normed = normed.to(x.dtype.element_ty).to(tl.float32)
        _store(y, normed * w, row, start, live, N, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _dx_kernel(
    dy, dnew_residual, x, weight, rstd, dx, rows,
    RESIDUAL: tl.constexpr, GEMMA: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    scale = tl.load(rstd + row[:, None], mask=live, other=0.0)
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        g = _load(dy, row, N, start, live, N, BLOCK) * _weight(weight, start, GEMMA, N, BLOCK)
        normed = _load(x, row, N, start, live, N, BLOCK) * scale
        lanes = tl.fma(g, normed, lanes)  # order: blocks of columns lane by lane, ascending; the lanes in a tree
    mean = _mean(tree_sum(lanes), N)
    for start in tl.static_range(0, N, BLOCK):
        if N > BLOCK:
            g = _load(dy, row, N, start, live, N, BLOCK) * _weight(weight, start, GEMMA, N, BLOCK)
            normed = _load(x, row, N, start, live, N, BLOCK) * scale
        out = scale * (g - normed * mean)
        if RESIDUAL:
            out += _load(dnew_residual, row, N, start, live, N, BLOCK)
        _store(dx, out, row, start, live, N, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _dweight_kernel(
    dy, x, rstd, parts, rows, GEMMA: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)[None, :]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    inside = (row < rows) & (column < N)
    normed = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    normed = normed * tl.load(rstd + row, mask=row < rows, other=0.0)
    if not GEMMA:
        normed = normed.to(x.dtype.element_ty).to(tl.float32)
    g = tl.load(dy + row * N + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(parts + part * N + column, tree_sum(g * normed), mask=column < N)  # order: sum_rows says the rest


def rmsnorm_fwd(x: Tensor, weight: Tensor, residual: Tensor | None, eps: float, gemma: bool):
    rows, n = x.shape
    y, rstd = x.new_empty(rows, n), x.new_empty(rows, dtype=torch.float32)
    new_residual = x.new_empty(0) if residual is None else x.new_empty(rows, n)
    tile = _tile(n)
    if rows:
        with on(x):
            _fwd_kernel[(cdiv(rows, tile["ROWS"]),)](
                x, weight, x if residual is None else residual, y, new_residual, rstd, rows, x.stride(0),
                0 if residual is None else residual.stride(0), eps,
                RESIDUAL=residual is not None, GEMMA=gemma, N=n, **tile, **early(x),
            )  # fmt: skip
    return y, new_residual, rstd


def rmsnorm_bwd(dy: Tensor, dnew_residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, gemma: bool):
    if x.shape[0] == 0:
        return torch.empty_like(x), torch.zeros_like(weight)
    name = route(x, gemma, dnew_residual is not None, dy, dnew_residual, weight).chosen.name
    return _backward(name, gemma, dy, dnew_residual, x, weight, rstd)


def _backward(
    name: str, gemma: bool, dy: Tensor, dnew_residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor
):
    if name == TWO:
        return _dx_then_dweight(dy, dnew_residual, x, weight, rstd, gemma)
    tile = tile_of(x.shape[1], ONE[name])
    return triton_backward.rmsnorm_bwd(dy, dnew_residual, x, weight, rstd, gemma, tile)


def _dx_then_dweight(dy: Tensor, dnew_residual: Tensor | None, x: Tensor, weight: Tensor, rstd: Tensor, gemma: bool):
    (rows, n), dx = x.shape, torch.empty_like(x)
    tile = _tile(n)
    parts = torch.empty(cdiv(rows, 64), n, dtype=torch.float32, device=x.device)
    with on(x):
        _dx_kernel[(cdiv(rows, tile["ROWS"]),)](
            dy, dy if dnew_residual is None else dnew_residual, x, weight, rstd, dx, rows,
            RESIDUAL=dnew_residual is not None, GEMMA=gemma, N=n, **tile,
        )  # fmt: skip
        _dweight_kernel[(parts.shape[0], cdiv(n, 64))](
            dy, x, rstd, parts, rows, GEMMA=gemma, N=n, ROWS=64, COLUMNS=64, num_warps=4, **OPTIONS
        )
    return dx, sum_rows(parts, weight.dtype)


@triton.jit
def _gated(h, g, w, scale, ROUNDED: tl.constexpr):
    normed = (h * scale).to(ROUNDED).to(tl.float32) * w
    return normed.to(ROUNDED).to(tl.float32) * silu(g)


@triton.jit(do_not_specialize=["rows"])
def _gated_fwd_kernel(
    x, gate, weight, y, rstd, rows, x_stride, gate_stride, eps,
    HEADS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """HEADS: rows that stand side by side in one of gate's."""
    begin_beside(PDL)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    gate_row = row // HEADS * gate_stride + row % HEADS * N
    for start in tl.static_range(0, N, BLOCK):
        h = _load(x, row, x_stride, start, live, N, BLOCK)
        lanes += h * h  # order: blocks of columns are added lane by lane, ascending; the lanes in a tree
    if N <= BLOCK:  # on its way while the squares are summed: behind the sum's barriers it would be waited for again
        g = _load(gate, gate_row, 1, 0, live, N, BLOCK)
        w = _weight(weight, 0, False, N, BLOCK)
    scale = _scale(lanes, eps, N)
    tl.store(rstd + row[:, None], scale, mask=live)
    for start in tl.static_range(0, N, BLOCK):
        if N > BLOCK:
            h = _load(x, row, x_stride, start, live, N, BLOCK)
            g = _load(gate, gate_row, 1, start, live, N, BLOCK)
            w = _weight(weight, start, False, N, BLOCK)
        _store(y, _gated(h, g, w, scale, x.dtype.element_ty), row, start, live, N, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _gated_walk_kernel(
    x, gate, weight, y, rstd, rows, x_stride, gate_stride, eps,
    HEADS: tl.constexpr, N: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """_gated_fwd_kernel where there are many rows: a program takes BLOCKS blocks of them, one after another, and asks
    for the next one before it is needed."""
    row = tl.program_id(0).to(tl.int64) * (ROWS * BLOCKS) + tl.arange(0, ROWS)
    limit = tl.minimum((tl.program_id(0).to(tl.int64) + 1) * (ROWS * BLOCKS), rows)
    column = tl.arange(0, BLOCK)[None, :]
    live, there = (row < limit)[:, None], column < N
    held = tl.load(x + row[:, None] * x_stride + column, mask=live & there, other=0.0)
    gate_row = row // HEADS * gate_stride + row % HEADS * N
    gates = tl.load(gate + gate_row[:, None] + column, mask=live & there, other=0.0)
    w = _weight(weight, 0, False, N, BLOCK)
    for _ in range(BLOCKS):
        following = row + ROWS
        next_live = (following < limit)[:, None]
        next_held = tl.load(x + following[:, None] * x_stride + column, mask=next_live & there, other=0.0)
        gate_row = following // HEADS * gate_stride + following % HEADS * N
        next_gates = tl.load(gate + gate_row[:, None] + column, mask=next_live & there, other=0.0)
        h = held.to(tl.float32)
        scale = _scale(tl.zeros([ROWS, BLOCK], tl.float32) + h * h, eps, N)  # order: _gated_fwd_kernel's
        tl.store(rstd + row[:, None], scale, mask=live)
        _store(y, _gated(h, gates.to(tl.float32), w, scale, x.dtype.element_ty), row, 0, live, N, BLOCK)
        row, live, held, gates = following, next_live, next_held, next_gates


@triton.jit(do_not_specialize=["rows"])
def _gated_bwd_kernel(
    dy, x, gate, weight, rstd, dx, dgate, rows, N: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = (row < rows)[:, None]
    scale = tl.load(rstd + row[:, None], mask=live, other=0.0)
    lanes = tl.zeros([ROWS, BLOCK], tl.float32)
    for start in tl.static_range(0, N, BLOCK):
        d = _load(dy, row, N, start, live, N, BLOCK) * silu(_load(gate, row, N, start, live, N, BLOCK))
        d = d * _weight(weight, start, False, N, BLOCK)
        lanes = tl.fma(d, _load(x, row, N, start, live, N, BLOCK) * scale, lanes)  # order: as in _dx_kernel
    mean = _mean(tree_sum(lanes), N)
    for start in tl.static_range(0, N, BLOCK):
        up, g = _load(dy, row, N, start, live, N, BLOCK), _load(gate, row, N, start, live, N, BLOCK)
        normed, w = _load(x, row, N, start, live, N, BLOCK) * scale, _weight(weight, start, False, N, BLOCK)
        s, rest = sigmoid(g, False)
        weighted = (normed.to(x.dtype.element_ty).to(tl.float32) * w).to(x.dtype.element_ty).to(tl.float32)
        _store(dgate, (up * weighted) * gate_slope(g, s, rest, False), row, start, live, N, BLOCK)
        _store(dx, scale * ((up * (g * s)) * w - normed * mean), row, start, live, N, BLOCK)


@triton.jit(do_not_specialize=["rows"])
def _gated_dweight_kernel(dy, x, gate, rstd, parts, rows, N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)[None, :]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    inside = (row < rows) & (column < N)
    normed = tl.load(x + row * N + column, mask=inside, other=0.0).to(tl.float32)
    normed = normed * tl.load(rstd + row, mask=row < rows, other=0.0)
    normed = normed.to(x.dtype.element_ty).to(tl.float32)
    g = silu(tl.load(gate + row * N + column, mask=inside, other=0.0).to(tl.float32))
    d = tl.load(dy + row * N + column, mask=inside, other=0.0).to(tl.float32) * g
    tl.store(parts + part * N + column, tree_sum(d * normed), mask=column < N)  # order: sum_rows says the rest


def _gated_tile(rows: int, n: int) -> dict:
    """_tile, or one with BLOCKS, of few rows each: the order of a row's sum is the same, so it may look at the rows."""
    columns = chunk(n, WIDEST)
    if columns > 1024 or rows * columns < WALKED:
        return _tile(n)
    return {"ROWS": 1024 // columns, "BLOCKS": 8, "BLOCK": columns, "num_warps": 4, **OPTIONS}


def rmsnorm_gated_fwd(x: Tensor, gate: Tensor, weight: Tensor, eps: float, y: Tensor, rstd: Tensor) -> None:
    rows, n = x.shape
    if rows == 0:
        return
    tile = {"HEADS": gate.shape[1] // n, "N": n, **_gated_tile(rows, n)}
    args = x, gate, weight, y, rstd, rows, x.stride(0), gate.stride(0), eps
    with on(x):
        if "BLOCKS" in tile:
            _gated_walk_kernel[(cdiv(rows, tile["ROWS"] * tile["BLOCKS"]),)](*args, **tile)
        else:
            _gated_fwd_kernel[(cdiv(rows, tile["ROWS"]),)](*args, **tile, **early(x))


def rmsnorm_gated_bwd(dy: Tensor, x: Tensor, gate: Tensor, weight: Tensor, rstd: Tensor):
    (rows, n), dx, dgate = x.shape, torch.empty_like(x), torch.empty_like(gate)
    if rows == 0:
        return dx, dgate, torch.zeros_like(weight)
    tile = _tile(n)
    parts = torch.empty(cdiv(rows, 64), n, dtype=torch.float32, device=x.device)
    with on(x):
        _gated_bwd_kernel[(cdiv(rows, tile["ROWS"]),)](dy, x, gate, weight, rstd, dx, dgate, rows, N=n, **tile)
        _gated_dweight_kernel[(parts.shape[0], cdiv(n, 64))](
            dy, x, gate, rstd, parts, rows, N=n, ROWS=64, COLUMNS=64, num_warps=4, **OPTIONS
        )
    return dx, dgate, sum_rows(parts, weight.dtype)


# ---- admission of rmsnorm's backward


def route(x: Tensor, gemma: bool, residual: bool, *others: Tensor | None) -> Decision:
    """Which kernels compute it: dispatch takes it, `explain` shows it, `admit` asks for it ahead of time.

    others   what is read beside x
    """
    if x.device.type != "cuda":
        return canonical_by_rule(TWO, "others are verified on a GPU")
    if x.shape[1] > triton_backward.WIDEST:
        return canonical_by_rule(TWO, f"others hold rows of up to {triton_backward.WIDEST} elements")
    if any(t.data_ptr() % 16 for t in (x, *others) if t is not None):
        return canonical_by_rule(TWO, "a tensor does not begin on a 16-byte boundary")
    return _backwards(x.device, x.dtype, x.shape[1], gemma, residual)


@decided
def _backwards(device: torch.device, dtype: torch.dtype, n: int, gemma: bool, residual: bool) -> Proposal:
    def of(name: str, source: str) -> Candidate:
        return Candidate(name, functools.partial(_backward, name, gemma), source)

    canonical = of(TWO, digest.canonical("rmsnorm"))
    source = digest.of_files(triton_backward.__file__, triton=digest.version("triton"))
    return Proposal(
        f"rmsnorm_bwd {str(dtype).removeprefix('torch.')} N={n} {'gemma' if gemma else 'llama'}"
        f"{' residual' if residual else ''}",
        [*(of(name, source) for name, rows in ONE.items() if rows == 64 or n > NARROW), canonical],
        canonical,
        lambda: [*_cases(device, dtype, n, residual), _timed(device, dtype, n, residual)],
        _race,
    )


def _cases(device: torch.device, dtype: torch.dtype, n: int, residual: bool) -> list[tuple]:
    """dy, dnew_residual, x, weight, rstd. Rows whose shares of dweight cancel, and elements whose shares of dx do; one
    row, as many as a program's and one more, blocks of blocks; special rows, of gradients and of x; and nothing but -0,
    whose sum is -0 as long as nothing is filled up with 0."""

    def new(rows: int, seed: int, *kinds: str) -> Tensor:
        x = tricky(rows, n, seed=seed, dtype=dtype, device=device)
        return special_rows(x, seed=seed, kinds=kinds) if kinds else x

    weight, half = tricky(n, seed=4, dtype=dtype, device=device), n // 2
    weight[half : 2 * half] = weight[:half]

    def case(dy: Tensor, x: Tensor, added: bool) -> tuple:
        scale = 1.0 / (x.float().square().mean(1) + 1e-6).sqrt()
        more = new(x.shape[0], 3) if added else torch.zeros_like(x)
        return dy, more if residual else None, x, weight, scale

    def cancelling_rows(pairs: int) -> tuple[Tensor, Tensor]:
        order = torch.randperm(2 * pairs, generator=torch.Generator().manual_seed(pairs)).to(device)
        x, dy = new(pairs, pairs), new(pairs, pairs + 1)
        return torch.cat([dy, -dy])[order], torch.cat([x, x])[order]

    def cancelling_columns(rows: int) -> tuple[Tensor, Tensor]:
        dy, x = new(rows, 5), new(rows, 6)  # where dy is 0, dx is nothing but their sum
        dy[:, half : 2 * half], x[:, half : 2 * half] = -dy[:, :half], x[:, :half]
        return dy, x

    none = torch.zeros(4096, n, dtype=dtype, device=device)
    return [
        *(case(new(rows, rows), new(rows, rows + 1), rows == 65) for rows in (1, 16, 17, 64, 65)),
        case(*cancelling_rows(450), True),
        case(*cancelling_rows(2055), False),
        case(*cancelling_columns(130), False),
        case(new(150, 7, *SMALL), new(150, 8), True),
        case(new(150, 7), new(150, 8, *SMALL), False),
        case(special_rows(new(53, 9), seed=9), new(53, 10), True),
        case(new(53, 9), special_rows(new(53, 10), seed=10, first=3), False),
        case(-none, none + 1, False),
    ]


def _timed(device: torch.device, dtype: torch.dtype, n: int, residual: bool) -> tuple:
    x = torch.randn(max(TIMED // n, 64), n, dtype=torch.float32, device=device).to(dtype)
    scale = torch.ones(x.shape[0], dtype=torch.float32, device=device)
    return x.flip(0), x if residual else None, x, x[0].clone(), scale


def _race(candidates: Sequence[Candidate], case: tuple) -> list[float | Exception]:
    return race_on_gpu([[functools.partial(one.run, *case)] * 4 for one in candidates])


def explain(op: str, **given) -> list[tuple[str, Decision]]:
    """Which kernels compute a call, of the operator's arguments by name."""
    if op != "rmsnorm_bwd":
        return []
    dy, dnew_residual, weight = (given[name] for name in ("dy", "dnew_residual", "weight"))
    decision = route(given["x"], given["gemma"], dnew_residual is not None, dy, dnew_residual, weight)
    return [("gradients", decision)]


def admit(
    n: int, dtype: torch.dtype, device: torch.device | str = "cuda", gemma: bool = False, residual: bool = False
) -> Decision:
    """Verify ahead of time what the gradients of rows of this width need."""
    return route(torch.empty(1, n, dtype=dtype, device=gpu.with_index(device)), gemma, residual)
