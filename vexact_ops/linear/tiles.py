"""What the kernels of a product are made with, a tuple for each kind, and which of ours for few rows and few tiles are
worth trying. Only as text, by which verdicts know it, is a tuple a name; nothing reads it back.

A file of its own: other rooms' kernels take such tiles too, and verdicts are kept by digests of what computes a kernel.
"""

import functools
from typing import NamedTuple

SMALL_M = 64  # rows that our kernels for few rows take
FEW = (8, 16, 24, 32, 40, 48, 64)  # rows of x that a tile of theirs has
SHARED_BYTES = 226 * 1024  # of one SM90 multiprocessor, for one or several blocks
FROM_THE_START = 1000  # stages left to load when the next kernel may start: more than there are


class Skinny(NamedTuple):
    """A kernel for few rows. Its text is its name in verdicts.

    rows, tokens, boxes  rows of the weight, rows of x, and boxes of 64 k that a stage of the ring holds
    ring                 stages
    ahead                of them that are asked for before the kernel before has ended
    lead                 that are left to load when the kernel after may start
    per_sm               persistent blocks that a multiprocessor gets; 0: a block per tile
    """

    rows: int
    tokens: int
    boxes: int
    ring: int
    ahead: int
    lead: int
    per_sm: int = 0

    def __str__(self) -> str:
        name = f"wgmma {self.rows}x{self.tokens}x{64 * self.boxes} ring {self.ring} ahead {self.ahead} lead {self.lead}"
        return f"{name} persistent {self.per_sm}" if self.per_sm else name


class Tiled(NamedTuple):
    """A kernel for few tiles: rows of the weight and of x in a tile, blocks that share the weight's, stages."""

    rows: int
    tokens: int
    cluster: int
    ring: int

    def __str__(self) -> str:
        return f"wgmma tile {self.rows}x{self.tokens} cluster {self.cluster} ring {self.ring}"


class Fma(NamedTuple):
    """A kernel for fp32: rows of a and columns of b in a tile."""

    rows: int
    columns: int

    def __str__(self) -> str:
        return f"fma {self.rows}x{self.columns}"


class Resumed(NamedTuple):
    """A kernel that goes on from fp32 sums: pairs of tiles of rows that share what lies in the L2 cache."""

    group: int

    def __str__(self) -> str:
        return f"wgmma 128x256x64 resumed group {self.group}"


class CublasLt(NamedTuple):
    """An algorithm of cublasLt's: what the library calls its tile and so on, and its words, which alone decide."""

    tile: int
    stages: int
    cluster: int
    swizzle: int
    words: tuple[int, ...]

    def __str__(self) -> str:
        words = "".join(f"{word % 2**64:016x}" for word in self.words)
        sizes = f"tile {self.tile} stages {self.stages} cluster {self.cluster} swizzle {self.swizzle}"
        return f"cublaslt {sizes} {words}"


Kernel = Skinny | Tiled | Fma | Resumed | CublasLt


@functools.cache
def tiled(m: int, n: int, k: int, processors: int = 132) -> tuple[Tiled, ...]:
    """Our kernels for m rows of x and an (n, k) weight where one tile a multiprocessor is all there is to do: those
    that should be the fastest, by what bounds them. A step of 64 along k takes as many clocks as wgmma needs, or as
    shared memory needs to be written and read once by wgmma, 128 bytes a clock."""
    timed = []
    for groups, most in ((1, 256), (3, 192)):
        for tokens in range(64, most + 1, 16):
            across, down = -(-m // tokens), -(-n // (64 * groups))
            narrowest = tokens == 64 or -(-m // (tokens - 16)) > across
            if narrowest and across * down <= processors:
                step = max(2 * groups * tokens, 128 * groups + tokens + groups * tokens)
                timed.append((step, groups, tokens, across))
    found = []
    for _, groups, tokens, across in sorted(timed)[:3]:
        stage = (64 * groups + tokens) * 128
        rings = [min(16, (SHARED_BYTES - 1024) // stage)]
        if groups == 1 and tokens <= 128 and k <= 1536:  # short sums: the next kernel's blocks find room beside these
            rings.append((SHARED_BYTES // 2 - 2048) // stage)
        for cluster in (1, 2) if across % 2 == 0 else (1,):
            found += [Tiled(64 * groups, tokens, cluster, ring) for ring in rings]
    return tuple(found)


@functools.cache
def skinny(top: int, n: int, k: int, processors: int = 132, unit: int = 8) -> tuple[Skinny, ...]:
    """Our kernels for up to `top` rows of x (at most SMALL_M) and an (n, k) weight: of all that there could be those
    that were the fastest, or within some per cent of it, for some matrix of the models that we have measured. The rows
    of the weight are a multiple of `unit`."""
    tokens = next(t for t in FEW if top <= t)
    found: dict[Skinny, None] = {}
    for place, rows in enumerate(_heights(n, 64 if tokens <= 16 else 128, processors, unit)):
        first = place == 0
        sizes = (2,) if tokens == 64 or rows > 64 else (4, 8) if rows <= 24 and tokens <= 16 else (2, 4)
        for boxes in sizes:
            for blocks in (1, 2, 3, 4):  # how many blocks share a multiprocessor
                ring = ring_of(rows, tokens, boxes, blocks)
                persistent = blocks == 1 and rows * processors < n
                if ring < 3 or (blocks == 1 and not persistent and tokens < 64):
                    continue
                if blocks > 2 and not (first and boxes == sizes[0]):
                    continue
                if k <= 1024:
                    chains = (ring, ring), (ring // 2, ring // 2)
                elif n * k < 45e6:
                    chains = (ring // 2, ring // 2), (ring // 2, ring), (0, ring), (ring // 2, FROM_THE_START)
                else:
                    chains = (ring // 2, FROM_THE_START), (0, ring)
                if boxes != sizes[0] or blocks != 2:  # of the larger stages, and of other blocks, one will do
                    chains = chains[:1] if blocks != 3 else chains[:2]
                for ahead, lead in chains:
                    found[Skinny(rows, tokens, boxes, ring, ahead, lead, int(persistent))] = None
    for rows in _taller(n, processors, unit) if tokens > 8 else ():  # eight rows of x are little to read
        for boxes, blocks in ((2, 1), (2, 2)) if tokens == 64 else ((2, 1), (2, 2), (4, 1)):
            ring = ring_of(rows, tokens, boxes, blocks)
            for lead in (ring // 2, FROM_THE_START) if ring >= 3 else ():
                found[Skinny(rows, tokens, boxes, ring, ring // 2, lead)] = None
    return tuple(found)


def ring_of(rows: int, tokens: int, boxes: int, blocks: int) -> int:
    """Stages that fit into the share of a multiprocessor's shared memory that so many blocks leave each other."""
    room = SHARED_BYTES // blocks - 1024 - -rows % 64 * 128
    return min(32, room // (boxes * (rows * 128 + max(1024, tokens * 128))))


def _taller(n: int, processors: int, unit: int) -> list[int]:
    """Rows of a weight's tile, some more than those of one wave where these are few: x is most of what such tiles read,
    and what the L2 cache gives all multiprocessors together limits them. Fewer tiles ask it for less."""
    one = -(-n // processors // unit) * unit
    return sorted({rows for rows in (-(-3 * one // 2 // unit) * unit, 2 * one) if one < rows <= min(64, n)})


def _heights(n: int, most: int, processors: int, unit: int) -> list[int]:
    """Rows of a weight's tile, at most so many, that give all multiprocessors nearly the same number of tiles."""

    def height(waves: int) -> int:
        return max(unit, -(-n // (processors * waves) // unit) * unit)

    waves = next(w for w in range(1, n + 1) if height(w) <= most)
    found = [height(waves)]
    if waves > 1:
        found.append(height(waves + 1))
    if n >= 4096:
        found.append(64)
    return sorted(set(found))
