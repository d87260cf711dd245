"""What ranks tell each other in a forward: columns, which every rank puts in the same order. Nothing is added up, so
nothing here can change a bit.

`Ranks` is all that the decoder knows of it: kernels of our own may stand in for torch.distributed.
"""

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import vexact_ops as vx
from vexact_ops.patch import description as d

_BLOCK = 64  # rows whose logits are there at once
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on


class Ranks(Protocol):
    """One of `size` ranks over which weights are cut."""

    rank: int
    size: int

    def gather(self, x: Tensor) -> Tensor:
        """(T, C) of each rank -> (T, size * C), the columns in the order of ranks."""

    def only(self, x: Tensor) -> Tensor:
        """Of rows that one rank has and that are zeros (all bits) on the others, that one's."""


class Alone:
    """One rank has all columns."""

    rank, size = 0, 1

    def gather(self, x: Tensor) -> Tensor:
        return x

    only = gather


class Group:
    """Ranks by torch.distributed: gloo on CPUs, NCCL on GPUs, where a CUDA graph may hold all of it.

    group    of the ranks, in their order
    raises   RuntimeError where the group puts columns in another order: nothing that is computed would be right
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        own = torch.full((2, 1), self.rank, dtype=torch.int64, device=device)  # and all are there
        found = self.gather(own)
        if found.tolist() != [list(range(self.size))] * 2:
            raise RuntimeError(f"ranks: gathered {found.tolist()}, expected each of {self.size} in its place")

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, columns = x.shape
        found = x.new_empty(self.size, rows, columns)
        _all_gather(_bytes(found), _bytes(x), group=self._group)
        return found.transpose(0, 1).reshape(rows, self.size * columns)

    def only(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        dist.all_reduce(_bytes(x), group=self._group)  # of whole numbers: 0 + a byte is that byte
        return x


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


class Tokens:
    """An embedding by its rows: each rank has those of some tokens.

    table   (rows, H) this rank's
    share   tokens of each rank but the last
    """

    def __init__(self, table: Tensor, ranks: Ranks, share: int):
        self._table, self._ranks, self._first = table, ranks, ranks.rank * share

    def __call__(self, ids: Tensor) -> Tensor:
        at = ids - self._first
        inside = (at >= 0) & (at < len(self._table))
        return self._ranks.only(self._table[torch.where(inside, at, 0)].masked_fill_(~inside[:, None], 0.0))


class RankedHead:
    """The output layer by its rows: logits, draws and log-probabilities over the whole vocabulary, on every rank.

    weight      (rows, H) this rank's
    vocabulary  tokens of all ranks, and of each but the last
    """

    def __init__(self, weight: Tensor, head: d.Head, ranks: Ranks, vocabulary: tuple[int, int]):
        self._weight, self._head, self._ranks = weight, head, ranks
        self._tokens, self._share = vocabulary

    def logits(self, hidden: Tensor) -> Tensor:
        """(R, H) -> (R, V) fp32."""
        rows = hidden if self._head.scale == 1 else hidden / self._head.scale
        own = vx.linear_logits(rows, self._weight, softcap=self._head.softcap)
        if own.shape[1] < self._share:
            own = torch.nn.functional.pad(own, (0, self._share - own.shape[1]))
        return self._ranks.gather(own)[:, : self._tokens]

    def sample(self, hidden: Tensor, seeds: Tensor, positions: Tensor, **options) -> tuple[Tensor, Tensor, Tensor]:
        return vx.sample(self.logits(hidden), seeds, positions, **options)

    def score(self, hidden: Tensor, target: Tensor) -> Tensor:
        """Log-probabilities at temperature 1, as linear_logprobs has them."""
        found = []
        for rows, ids in zip(hidden.split(_BLOCK), target.split(_BLOCK)):
            found.append(vx.log_softmax(self.logits(rows)).gather(1, ids[:, None])[:, 0])
        return torch.cat(found) if found else hidden.new_empty(0, dtype=torch.float32)
