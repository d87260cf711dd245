"""Where the patches of images lie, from their grids alone: on the host, once for each shape of image.

A grid is (t, h, w): frames, rows and columns of patches. Patches come in blocks of merge x merge, which become one
token of the decoder; so do all tables here.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

Grid = tuple[int, int, int]


def real(function: Callable) -> Callable:
    """What it computes is kept, so it is computed outside of whatever watches or fakes tensors, on a CPU."""

    @functools.wraps(function)
    def wrapped(*args, **kwargs):
        with _disable_current_modes(), torch.device("cpu"):
            return function(*args, **kwargs)

    return wrapped


def grids_of(op: str, grid_thw: Tensor | Sequence[Sequence[int]], merge: int, kind: str = "image") -> tuple[Grid, ...]:
    """As tuples. ValueError on what is no grid."""
    if isinstance(grid_thw, Tensor):
        shape = tuple(grid_thw.shape)
        if len(shape) != 2 or shape[1] != 3 or grid_thw.is_floating_point():
            raise ValueError(f"{op}: {kind}_grid_thw: got shape {shape}, expected ({kind}s, 3) whole numbers")
    rows = grid_thw.tolist() if isinstance(grid_thw, Tensor) else grid_thw
    try:
        grids = tuple(tuple(map(operator.index, grid)) for grid in rows)
    except TypeError:
        raise ValueError(f"{op}: {kind}_grid_thw: got {rows!r}, expected ({kind}s, 3) whole numbers") from None
    for grid in grids:
        if len(grid) != 3 or min(grid) < 1 or grid[1] % merge or grid[2] % merge:
            raise ValueError(
                f"{op}: {kind}_grid_thw: got {grid}, expected (t, h, w) of at least 1, h and w in multiples of {merge}"
            )
    return grids


def patches(grid: Grid) -> int:
    return grid[0] * grid[1] * grid[2]


def tokens(grid: Grid, merge: int) -> int:
    """Of the decoder."""
    return patches(grid) // merge**2


class Windows(NamedTuple):
    """Of attention in windows: in which order blocks go, so that those of a window lie together, back again, and
    where windows begin, in patches."""

    order: Tensor
    back: Tensor
    cu_seqlens: Tensor
    longest: int


class Lattice(NamedTuple):
    """What a tower computes with beside the pixels of some images.

    places      (2, N) int64: each patch's row and column
    cu_seqlens  where frames begin: patches see those of their own; longest: the most patches of one
    taps        (N, 4) int64 rows of a table of positions, weights (N, 4) fp32 of them; or None
    """

    places: Tensor
    cu_seqlens: Tensor
    longest: int
    taps: Tensor | None
    weights: Tensor | None
    windows: Windows | None


@real
def lattice(grids: tuple[Grid, ...], merge: int, side: int | None, window: int | None) -> Lattice:
    """side: of the square table of positions; window: blocks in a row of one."""
    places = torch.cat([_places(grid, merge) for grid in grids], 1)
    frames = [h * w for t, h, w in grids for _ in range(t)]
    taps = weights = None
    if side is not None:
        parts = [_taps(grid, merge, side) for grid in grids]
        taps, weights = (torch.cat(part) for part in zip(*parts))
    return Lattice(places, _ends(frames), max(frames), taps, weights, _windows(grids, merge, window))


def _ends(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32)


@functools.lru_cache(maxsize=256)
def _places(grid: Grid, merge: int) -> Tensor:
    t, h, w = grid
    block = h // merge, merge, w // merge, merge
    rows, columns = torch.arange(h)[:, None].expand(h, w), torch.arange(w).expand(h, w)
    one = torch.stack([x.reshape(block).transpose(1, 2).flatten() for x in (rows, columns)])
    return one.repeat(1, t)


@functools.lru_cache(maxsize=256)
def _taps(grid: Grid, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """The corners of the table's cell that a patch lies in, and how near it lies to each: bilinear, with the image's
    corners at the table's. fp32, in the order of transformers' own code from its release 5.24 on."""
    axes = []
    for at, size in zip(_places(grid, merge), grid[1:]):
        source = at.float() * (side - 1) / max(size - 1, 1)
        floor = source.floor()
        near = torch.arange(2)
        weights = (1 - (source[:, None] - floor[:, None] - near).abs()).clamp(min=0)
        axes.append(((floor.long()[:, None] + near).clamp(0, side - 1), weights))
    (rows, down), (columns, across) = axes
    taps = (rows[:, :, None] * side + columns[:, None, :]).flatten(1)
    return taps, (down[:, :, None] * across[:, None, :]).flatten(1)


def _windows(grids: tuple[Grid, ...], merge: int, window: int | None) -> Windows | None:
    if window is None:
        return None
    order, lengths, begin = [], [], 0
    for grid in grids:
        mine, sizes = _windows_of(grid, merge, window)
        order.append(mine + begin)
        lengths += sizes
        begin += len(mine)
    whole = torch.cat(order)
    return Windows(whole, whole.argsort(), _ends(lengths), max(lengths))


@functools.lru_cache(maxsize=256)
def _windows_of(grid: Grid, merge: int, window: int) -> tuple[Tensor, list[int]]:
    t, h, w = grid[0], grid[1] // merge, grid[2] // merge
    cells = torch.arange(t * h * w).view(t, h, w)
    found = [
        frame[row : row + window, column : column + window].flatten()
        for frame in cells
        for row in range(0, h, window)
        for column in range(0, w, window)
    ]
    return torch.cat(found), [len(part) * merge**2 for part in found]


class Clip(NamedTuple):
    """An image, a frame or a video, as its tokens' positions see it. interval: positions from frame to frame."""

    grid: Grid
    interval: float = 1.0


class Waiting(NamedTuple):
    """What tokens of one id will stand for, in their order. kind: "image" or "video"."""

    kind: str
    clips: list[Clip]


def axes_of(ids: Sequence[int], waiting: Mapping[int, Waiting], merge: int, op: str) -> Tensor:
    """Of one sequence's tokens the positions on three axes (frame, row, column), (3, tokens) int64: text counts on on
    all three, an image's tokens have their place in it, and what follows goes on behind the longer side. What they
    stand for is taken from those that wait. ValueError where tokens and grids do not belong together."""
    parts, at, begin = [], 0, 0
    while at < len(ids):
        token = ids[at]
        if token not in waiting:
            end = next((i for i in range(at, len(ids)) if ids[i] in waiting), len(ids))
            parts.append((torch.arange(end - at) + begin).expand(3, -1))
            begin += end - at
        else:
            kind, clips = waiting[token]
            if not clips:
                what = f"{op}: {kind}_grid_thw: token {at}"
                raise ValueError(f"{what} belongs to {_an(kind)}, but there are no more grids")
            (t, h, w), interval = clips.pop(0)
            h, w = h // merge, w // merge
            end = at + t * h * w
            there = sum(1 for _ in _run(ids, at, end, token))
            if there < t * h * w:
                raise ValueError(
                    f"{op}: {kind}_grid_thw: got {there} {kind} tokens from token {at} on, expected the {t * h * w} of "
                    f"{_an(kind)} of {t} x {h} x {w}"
                )
            frames = (torch.arange(t) * torch.tensor(interval, dtype=torch.float32)).long()  # fp32, as transformers has
            axes = torch.meshgrid(frames, torch.arange(h), torch.arange(w), indexing="ij")
            parts.append(torch.stack(axes).flatten(1) + begin)
            begin += max(h, w)
        at = end
    return torch.cat(parts, 1) if parts else torch.zeros(3, 0, dtype=torch.int64)


def _an(kind: str) -> str:
    return "an image" if kind == "image" else f"a {kind}"


def _run(ids: Sequence[int], at: int, end: int, token: int):
    for i in range(at, min(end, len(ids))):
        if ids[i] != token:
            return
        yield i
