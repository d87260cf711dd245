"""What ranks tell each other in a forward: columns, which every rank puts in the same order. Nothing is added up, so
nothing here can change a bit.

`Ranks` is all that the decoder knows of it: kernels of our own may stand in for torch.distributed.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

import vexact_ops as vx
from vexact_ops.patch import description as d

log = logging.getLogger(__name__)

_BLOCK = 64  # rows whose logits are there at once
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # its name from torch 2.13 on


class Ranks(Protocol):
    """One of `size` ranks over which weights are cut.

    by   what brings columns from rank to rank
    """

    rank: int
    size: int
    by: str

    def gather(self, x: Tensor) -> Tensor:
        """(T, C) of each rank -> (T, size * C), the columns in the order of ranks."""

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """vx.linear of this rank's rows of a weight, for this rank alone."""

    def linear(self, x: "Columns | Tensor", weight: Tensor, bias: Tensor | None) -> "Columns | Tensor":
        """vx.linear of this rank's rows of a weight: columns that all ranks are to have."""

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> "Columns | Tensor":
        """vx.linear_silu_mul of this rank's rows of a weight, likewise."""

    def later(self, own: Tensor) -> "Columns | Tensor":
        """gather, once somebody needs it."""

    def land(self, size: int) -> None:
        """Room for what experts of all ranks make of a step, so many bytes. Before anything is computed."""

    def between(self, gate_up: Tensor, top_k: int, activation: str) -> Callable[[Tensor], Tensor]:
        """What vx.fused_moe takes between products whose rows ranks share: gather, or what is verified here to bring
        the same while the first product is computed."""

    def only(self, x: Tensor) -> Tensor:
        """Of rows that one rank has and that are zeros (all bits) on the others, that one's."""

    def why(self) -> str:
        """What a failure of the device is due to, where that is known."""


class Columns:
    """Of each rank (T, C), not yet side by side. They are asked for before any others are computed.

    own  this rank's
    """

    __slots__ = ("_peers", "own")

    def __init__(self, own: "Tensor | vx.Sent", peers: "vx.Peers"):
        self.own, self._peers = own, peers

    def gathered(self) -> Tensor:
        return self._peers.receive(self.own)

    def normed(self, weight: Tensor, eps: float, residual: Tensor, style: str) -> tuple[Tensor, Tensor]:
        """vx.rmsnorm of them, with a residual that was there before they were computed."""
        return vx.rmsnorm_gather(self.own, weight, eps, residual, self._peers, style=style, settled=True)


def gathered(x: Tensor | Columns) -> Tensor:
    return x.gathered() if isinstance(x, Columns) else x


class Alone:
    """One rank has all columns."""

    rank, size, by = 0, 1, ""

    def gather(self, x: Tensor) -> Tensor:
        return x

    only = gather

    def land(self, size: int) -> None:
        pass

    def between(self, gate_up: Tensor, top_k: int, activation: str) -> Callable[[Tensor], Tensor]:
        return self.gather

    def later(self, own: Tensor) -> Tensor:
        return self.gather(own)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return vx.linear(x, weight, bias)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return self.gather(vx.linear(x, weight, bias))

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Tensor:
        return self.gather(vx.linear_silu_mul(x, weight, bias, activation=activation))

    def why(self) -> str:
        return ""


class Group:
    """Ranks by torch.distributed, gloo on CPUs and NCCL on GPUs; where the GPUs reach each other's memory, columns go
    through that (vx.Peers), once every byte of some of each kind was what NCCL's are.

    group    of the ranks, in their order
    by       what columns are gathered with, and why not with `Peers` where they are not
    raises   RuntimeError where the group puts columns in another order: nothing that is computed would be right
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device):
        self._group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._device, self._peers, self._landing = device, None, None
        self._between: dict[tuple, Callable[[Tensor], Tensor]] = {}
        self.by = dist.get_backend(group)
        own = torch.full((2, 1), self.rank, dtype=torch.int64, device=device)  # and all are there
        found = self.gather(own)
        if found.tolist() != [list(range(self.size))] * 2:
            raise RuntimeError(f"ranks: gathered {found.tolist()}, expected each of {self.size} in its place")
        if device.type == "cuda":
            self._peers, why = self._admitted()
            self.by = f"{self.by}: {why}" if why else "memory of peers"
            log.info("ranks gather columns by %s", self.by)

    def gather(self, x: Tensor) -> Tensor:
        if self._peers is not None:
            return self._peers.gather(x)
        x = x.contiguous()
        rows, columns = x.shape
        found = x.new_empty(self.size, rows, columns)
        _all_gather(_bytes(found), _bytes(x), group=self._group)
        return found.transpose(0, 1).reshape(rows, self.size * columns)

    def project(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return vx.linear(x, weight, bias) if self._peers is None else vx.linear_awaited(x, weight, bias)

    def linear(self, x: Columns | Tensor, weight: Tensor, bias: Tensor | None) -> Columns | Tensor:
        if self._peers is None:
            return self.gather(vx.linear(x, weight, bias))
        if isinstance(x, Columns):
            return Columns(vx.linear_gather_send(x.own, weight, bias, self._peers), self._peers)
        return Columns(vx.linear_send(x, weight, bias, self._peers), self._peers)

    def linear_silu_mul(self, x: Tensor, weight: Tensor, bias: Tensor | None, activation: str) -> Columns | Tensor:
        if self._peers is None:
            return self.gather(vx.linear_silu_mul(x, weight, bias, activation=activation))
        return Columns(vx.linear_silu_mul_send(x, weight, bias, self._peers, activation=activation), self._peers)

    def later(self, own: Tensor) -> Columns | Tensor:
        return self.gather(own) if self._peers is None else Columns(own, self._peers)

    def land(self, size: int) -> None:
        if self._peers is None or size == 0:
            return
        try:
            self._landing = self._peers.landing(size)
        except RuntimeError as error:  # on every rank
            self._gathers(str(error))

    # A mixture may be sent once all ranks have read what the one before it sent: there is one landing. They have, for
    # what each makes of it (its product with the experts' downs, and their sums) all gather, every row: the decoder
    # gives `later` of it to a norm, or gathers it, before it computes anything else of these ranks; shared experts,
    # which are gathered themselves, are added before. So in a last layer, where rows are fewer but all that are there,
    # in one before another stage, whose sum is gathered, and in a head that drafts. A kernel that receives has the last
    # rank's last row when it ends, that rank sends it once its product has ended, and the next mixture's kernels start
    # once all before them have ended.
    def between(self, gate_up: Tensor, top_k: int, activation: str) -> Callable[[Tensor], Tensor]:
        if self._landing is None:
            return self.gather
        key = *gate_up.shape, gate_up.dtype, top_k, activation
        if key not in self._between:
            why = vx.fused_moe_send(self._landing, gate_up.detach(), top_k, activation=activation)
            self._between[key] = self.gather if why else self._landing
            self._gathers(why)
        return self._between[key]

    def _gathers(self, why: str) -> None:
        log.info("ranks %s", f"gather what experts compute: {why}" if why else "send what experts compute")
        if why and ":" not in self.by:
            self.by = f"{self.by}: but for what experts compute, {why}"

    def only(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        if self._peers is not None:  # 0 + a whole number is that number
            words = self.gather(x.view(torch.int16)).view(len(x), self.size, -1)
            return words.sum(1, dtype=torch.int16).view(x.dtype)
        dist.all_reduce(_bytes(x), group=self._group)
        return x

    def why(self) -> str:
        missing = None if self._peers is None else self._peers.missing
        return "" if missing is None else f"rank {missing} of {self.size} did not come to a gather"

    def _admitted(self) -> tuple["vx.Peers | None", str]:
        """With the same outcome on every rank."""
        try:
            peers = vx.Peers(self.rank, self.size, self._device, self._exchange)
        except (RuntimeError, ValueError) as error:  # on every rank
            return None, str(error)
        differ = 0
        for turn in range(2):  # both places that a block writes to in turns
            for rows, count in _TRIED:
                seed = torch.Generator().manual_seed(1000 * self.rank + 10 * count + turn)
                x = torch.randint(256, (rows, count), dtype=torch.uint8, generator=seed).to(self._device)
                expected = self.gather(x)
                for packed in (False,) if count % 16 else (False, True):
                    differ += not torch.equal(peers.gather(x, packed=packed), expected)
                differ += not torch.equal(peers.receive(x), expected)
        said = self.gather(torch.tensor([[differ]], dtype=torch.int64, device=self._device))
        if not said.any():
            took = peers.race()
            log.info("us of a gather without and with packed lines, by bytes of a rank: %s", took)
            return peers, ""
        peers.close()
        return None, "other bytes came through memory of peers"

    def _exchange(self, data: bytes) -> list[bytes]:
        found: list = [None] * self.size
        dist.all_gather_object(found, data, group=self._group)
        return found


_TRIED = ((1, 1), (3, 6), (7, 20), (1, 4096), (64, 4096), (300, 2560), (2048, 8192))  # rows and bytes of each


def _bytes(x: Tensor) -> Tensor:
    return x.view(-1).view(torch.uint8)


def landing_bytes(
    described: d.Decoder, layers: range, shapes: Mapping[str, Sequence[int]], tokens: int, dtype: torch.dtype
) -> int:
    """What all ranks' experts compute between their products, of so many tokens, where vx.fused_moe_send may serve."""
    columns = [0]
    for block in (block for i in layers for block in described.layers[i].blocks):
        part = block.part
        if isinstance(part, d.Mixture) and part.experts.gate_up_bias is None and dtype == torch.bfloat16:
            both = shapes[part.experts.gate_up][2 if part.experts.turned else 1]
            columns.append(part.router.top_k * both // 2)
    return tokens * max(columns) * dtype.itemsize


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
