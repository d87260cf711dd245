"""Some of a model's layers on a device of their own, or some rows of their weights: what a stage of a pipeline runs, or
one of its ranks.

Every stage is given the same steps in the same order. The first embeds tokens; each hands the residual stream on to
the next one; the last draws, and gives the drawn ids back to the first, whose next steps may need them before the host
knows them. The stream is handed on as one tensor, the sum of the two that a fused decoder passes from layer to layer:
adding them is the first thing that the next norm would do, with the same rounding.
"""

import functools
from collections import deque
from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vexact_ops.patch.description import Pages, State

from ..config import EngineConfig
from ..core.step import Step
from ..weights.cut import Cut
from .batch import Batch
from .buffers import Work, send
from .decoder import Decoder
from .drafting import DraftRunner
from .forward import Forward, forward
from .projections import Weights
from .ranks import Alone, Group, RankedHead, Ranks
from .runner import Runner
from .whole import check_ranks


class Link:
    """A stage's neighbours, and the ranks beside this one. torch.distributed is initialised, with `width` ranks for
    each stage, one stage's after another's; a rank's neighbours are those of the same number in other stages.

    What comes is waited for on the device's current stream alone, and what goes has a stream of its own; so have the
    ids on their way back, lest they and hidden states wait for each other.
    """

    def __init__(self, device: torch.device, width: int = 1):
        self.width, self.device = width, device
        self.stage, self.stages = dist.get_rank() // width, dist.get_world_size() // width
        self.ranks: Ranks = Alone()
        own, last = dist.get_rank() % width, (self.stages - 1) * width
        if self.stages > 1:
            back = [dist.new_group([rank, last + rank]) for rank in range(width)]  # all are made by all
            self._back, self._ends = back[own], (own, last + own)
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        word = torch.zeros(1, dtype=torch.int64, device=device)  # everybody is there: before anything depends on it
        if self.stage:
            self.receive(word)
        if self.stage < self.stages - 1:
            self.send(word)
            if not self.stage:
                self.take_back(word)
        elif self.stages > 1:
            self.give_back(word)
        self.finish()
        if width > 1:
            firsts = range(0, self.stages * width, width)
            groups = [dist.new_group(list(range(first, first + width))) for first in firsts]
            self.ranks = Group(groups[self.stage], device)

    def receive(self, x: Tensor) -> None:
        dist.recv(x.view(torch.uint8), dist.get_rank() - self.width)

    def send(self, x: Tensor) -> None:
        self._keep(dist.isend(x.view(torch.uint8), dist.get_rank() + self.width), x)

    def take_back(self, ids: Tensor) -> None:
        """Of the first stage, from the last."""
        dist.recv(ids, self._ends[1], group=self._back)

    def give_back(self, ids: Tensor) -> None:
        self._keep(dist.isend(ids, self._ends[0], group=self._back), ids)

    def least(self, count: int) -> int:
        value = torch.tensor([count], dtype=torch.int64, device=self.device)
        dist.all_reduce(value, dist.ReduceOp.MIN)
        return int(value)

    def finish(self) -> None:
        """Until all has gone."""
        while self._sent:
            self._sent.popleft()[0].wait()

    def _keep(self, work: dist.Work, x: Tensor) -> None:
        while self._sent and self._sent[0][0].is_completed():
            self._sent.popleft()
        self._sent.append((work, x))


class StageRunner(Runner):
    """A Runner of some layers. `launch` on all stages computes one step; what the last one's Pending gives is drawn.

    layers   those of this stage; of the model, what `handle.describe().names(layers)` names is materialised
    ahead    how many steps may have been launched and not been waited for
    cuts     what each rank computes of them; the model's weights are this one's rows. (): there is one rank, with all
    shapes   of the whole weights, by name
    beside   what drafts, where draws are made
    """

    def __init__(
        self,
        model,
        handle,
        config: EngineConfig,
        device: torch.device,
        layers: range,
        link: Link,
        ahead: int,
        cuts: Sequence[Cut] = (),
        shapes: Mapping[str, Sequence[int]] | None = None,
        beside: DraftRunner | None = None,
    ):
        self.layers, self.link, self.ranks, self._ahead = layers, link, link.ranks, ahead
        self._cuts, self._shapes, self._checked = cuts, shapes or {}, False
        self.cut = cuts[self.ranks.rank] if cuts else None
        self.first, self.draws = link.stage == 0, link.stage == link.stages - 1
        self._owed: deque[tuple[int, np.ndarray]] = deque()  # steps whose ids have not come back, and their slots
        first = model.get_input_embeddings().weight
        described = self.cut.described if self.cut else handle.describe()
        shape = config.max_num_batched_tokens, described.norm.size
        self._given = None if self.first else torch.zeros(shape, dtype=first.dtype, device=device)
        self._made = None if self.draws else torch.zeros(shape, dtype=first.dtype, device=device)
        super().__init__(model, handle, config, device, beside)

    def _forward(self) -> tuple[Forward, str]:
        if self.cut is None:
            return forward(self.handle, self.layers)
        if not self._checked:
            check_ranks(self.handle, self._cuts, self.layers, self.ranks, self._shapes)
            self._checked = True
        weights, share = Weights(self.model), self.cut.vocabulary[1]
        return Decoder(weights, self.cut.described, self.layers, self.ranks, share), "fused"

    @functools.cached_property
    def head(self):
        if self.cut is None:
            return self.handle
        head = self.cut.described.head
        return RankedHead(self.model.get_parameter(head.weight), head, self.ranks, self.cut.vocabulary)

    @property
    def vocabulary(self) -> int:
        return super().vocabulary if self.cut is None else self.cut.vocabulary[0]

    def _memories(self) -> tuple[Pages | State, ...]:
        if self.cut is not None:
            return tuple(self.cut.described.layers[i].memory for i in self.layers)
        return self.handle.memories()[self.layers.start : self.layers.stop]

    def _agree(self, pages: int) -> int:
        return self.link.least(pages)

    def _forward_of(self, batch: Batch) -> Tensor | None:
        tokens = len(batch.positions)
        out = self.forward(batch) if self.first else self.forward(batch, self._given[:tokens])
        if self.draws:
            return out
        torch.add(*out, out=self._made[:tokens])
        return None

    def draw(self, head, hidden) -> None:
        if self.draws:
            super().draw(head, hidden)

    @torch.inference_mode()
    def drain(self) -> None:
        """All that was launched is through, and nothing is under way between stages: called on all of them."""
        self._take_back(len(self._owed))
        self.link.finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _receive(self, step: Step) -> None:
        if self.first:
            self._take_back(self._due(step))  # none where this stage draws itself
        else:
            self.link.receive(self._given[: len(step.token_ids)])

    def _due(self, step: Step) -> int:
        """How many steps' ids this step needs, or must have come by now."""
        owners = np.repeat(step.chunks["slot"], step.chunks["length"])
        needed, last = owners[step.token_ids < 0], 0
        for count, (number, slots) in enumerate(self._owed, 1):
            if number <= step.number - self._ahead or np.isin(needed, slots).any():
                last = count
        return last

    def _take_back(self, steps: int) -> None:
        for _ in range(steps):
            _, slots = self._owed.popleft()
            ids = torch.empty(len(slots), dtype=torch.int64, device=self.device)
            self.link.take_back(ids)
            self.buffers.last.index_copy_(0, send(slots.astype(np.int64), self.device), ids)

    def _hand_on(self, step: Step, work: Work) -> None:
        if not self.draws:
            self.link.send(self._made[: work.tokens].clone())
        if not work.draws or self.link.stages == 1:
            return
        slots = step.chunks["slot"][step.chunks["draws"] > 0]
        if self.draws:
            self.link.give_back(self.buffers.last.index_select(0, send(slots.astype(np.int64), self.device)))
        if self.first:
            self._owed.append((step.number, slots))
