"""Some of a model's layers on a device of their own: what a stage of a pipeline runs.

Every stage is given the same steps in the same order. The first embeds tokens; each hands the residual stream on to
the next one; the last draws, and gives the drawn ids back to the first, whose next steps may need them before the host
knows them. The stream is handed on as one tensor, the sum of the two that a fused decoder passes from layer to layer:
adding them is the first thing that the next norm would do, with the same rounding.
"""

from collections import deque

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from vexact_ops.patch.description import Pages, State

from ..config import EngineConfig
from ..core.step import Step
from .batch import Batch
from .buffers import Work, send
from .forward import Forward, forward
from .runner import Runner
from .shapes import decoder_config


class Link:
    """A stage's neighbours. torch.distributed is initialised, with one rank for each stage.

    What comes is waited for on the device's current stream alone, and what goes has a stream of its own; so have the
    ids on their way back, lest they and hidden states wait for each other.
    """

    def __init__(self, device: torch.device):
        self.rank, self.size, self.device = dist.get_rank(), dist.get_world_size(), device
        self._back = dist.new_group([0, self.size - 1])
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        word = torch.zeros(1, dtype=torch.int64, device=device)  # everybody is there: before anything depends on it
        if self.rank:
            self.receive(word)
        if self.rank < self.size - 1:
            self.send(word)
            if not self.rank:
                self.take_back(word)
        else:
            self.give_back(word)
        self.finish()

    def receive(self, x: Tensor) -> None:
        dist.recv(x.view(torch.uint8), self.rank - 1)

    def send(self, x: Tensor) -> None:
        self._keep(dist.isend(x.view(torch.uint8), self.rank + 1), x)

    def take_back(self, ids: Tensor) -> None:
        """Of the first stage, from the last."""
        dist.recv(ids, self.size - 1, group=self._back)

    def give_back(self, ids: Tensor) -> None:
        self._keep(dist.isend(ids, 0, group=self._back), ids)

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
    """

    def __init__(
        self, model, handle, config: EngineConfig, device: torch.device, layers: range, link: Link, ahead: int
    ):
        self.layers, self.link, self._ahead = layers, link, ahead
        self.first, self.draws = link.rank == 0, link.rank == link.size - 1
        self._owed: deque[tuple[int, np.ndarray]] = deque()  # steps whose ids have not come back, and their slots
        first = model.get_input_embeddings().weight
        shape = config.max_num_batched_tokens, decoder_config(model).hidden_size
        self._given = None if self.first else torch.zeros(shape, dtype=first.dtype, device=device)
        self._made = None if self.draws else torch.zeros(shape, dtype=first.dtype, device=device)
        super().__init__(model, handle, config, device)

    def _forward(self) -> tuple[Forward, str]:
        return forward(self.handle, self.layers)

    def _memories(self) -> tuple[Pages | State, ...]:
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
    def settle(self) -> None:
        """All that was launched is through, and nothing is under way between stages: called on all of them."""
        self._take_back(len(self._owed))
        self.link.finish()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _receive(self, step: Step) -> None:
        if self.first:
            self._take_back(self._due(step))
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
        if not work.draws:
            return
        slots = step.chunks["slot"][step.chunks["draws"] > 0]
        if self.draws:
            self.link.give_back(self.buffers.last.index_select(0, send(slots.astype(np.int64), self.device)))
        if self.first:
            self._owed.append((step.number, slots))
