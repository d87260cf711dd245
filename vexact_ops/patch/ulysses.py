"""Ulysses: ranks that hold a packed row's tokens in equal shares exchange them for heads where tokens meet.

Each rank computes whole sequences of some heads, with the bits that one rank would have, forwards and backwards: a
head's numbers depend on no other head. Heads are dealt by whole groups of one key head, so that no sum over the queries
of a key is cut; where there are fewer key heads than ranks, some ranks have none.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Ulysses:
    """
    group   of the ranks, in the order of their shares
    """

    group: dist.ProcessGroup
    rank: int
    size: int

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "Ulysses | None":
        """None: of one rank, which has all."""
        size = dist.get_world_size(group)
        return cls(group, dist.get_rank(group), size) if size > 1 else None

    def shares(self, key_heads: int) -> list[range]:
        """Of each rank; the first ones have one more where they do not divide."""
        least, more = divmod(key_heads, self.size)
        counts = (least + (rank < more) for rank in range(self.size))
        return [range(a, b) for a, b in pairwise(accumulate(counts, initial=0))]

    def own(self, heads: int, key_heads: int) -> slice:
        """This rank's, of `heads` in groups of one key head."""
        share, group = self.shares(key_heads)[self.rank], heads // key_heads
        return slice(share.start * group, share.stop * group)

    def to_heads(self, key_heads: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """(T / size, heads, D) of each as (T, own heads, D): a share of rows of all heads, for all rows of some."""
        return _Swap.apply(self, self._ranges(key_heads, tensors), True, *tensors)

    def to_rows(self, key_heads: int, heads: int, x: Tensor) -> Tensor:
        """The way back: (T, own heads, D) as (T / size, heads, D)."""
        ranges = tuple(_times(share, heads // key_heads) for share in self.shares(key_heads))
        return _Swap.apply(self, (ranges,), False, x)[0]

    def _ranges(self, key_heads: int, tensors: Sequence[Tensor]) -> tuple[tuple[range, ...], ...]:
        shares = self.shares(key_heads)
        return tuple(tuple(_times(share, t.shape[1] // key_heads) for share in shares) for t in tensors)

    def gather(self, x: Tensor) -> Tensor:
        """(1, S) of every rank as (1, size * S); without gradients."""
        parts = x.new_empty(self.size, *x.shape)
        dist.all_gather_into_tensor(parts, x.contiguous()[None], group=self.group)
        return parts.flatten()[None]


def _times(share: range, count: int) -> range:
    return range(share.start * count, share.stop * count)


class _Swap(torch.autograd.Function):
    """One exchange for several tensors of (rows, heads, D), so that all ranks meet in the same order."""

    @staticmethod
    def forward(ctx: Any, ulysses: Ulysses, ranges: tuple, to_heads: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.ulysses, ctx.ranges, ctx.to_heads = ulysses, ranges, to_heads
        return _swap(ulysses, ranges, to_heads, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple:
        return None, None, None, *_swap(ctx.ulysses, ctx.ranges, not ctx.to_heads, grads)


def _swap(ulysses: Ulysses, ranges: tuple, to_heads: bool, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """ranges   of each tensor the heads that each rank has"""
    size, rank = ulysses.size, ulysses.rank
    rows = tensors[0].shape[0] if to_heads else tensors[0].shape[0] // size
    sent, came = [], []  # what goes to each rank, in pieces, and the shapes of what comes from each
    for peer in range(size):
        if to_heads:
            parts = [t[:, r[peer].start : r[peer].stop] for t, r in zip(tensors, ranges)]
        else:
            parts = [t[peer * rows : (peer + 1) * rows] for t in tensors]
        sent.append([part.reshape(-1) for part in parts])
        came.append([(rows, len(r[rank if to_heads else peer]), *t.shape[2:]) for t, r in zip(tensors, ranges)])
    counts = [[math.prod(shape) for shape in shapes] for shapes in came]
    given = torch.cat([part for each in sent for part in each])
    found = given.new_empty(sum(map(sum, counts)))
    width = found.element_size()  # as bytes: no backend of torch.distributed knows every dtype
    dist.all_to_all_single(
        found.view(torch.uint8), given.view(torch.uint8), [width * sum(count) for count in counts],
        [width * sum(part.numel() for part in each) for each in sent], ulysses.group,
    )  # fmt: skip
    pieces = iter(found.split([count for each in counts for count in each]))
    parts = [[next(pieces).view(shape) for shape in shapes] for shapes in came]
    return tuple(torch.cat(each, 0 if to_heads else 1) for each in zip(*parts))
