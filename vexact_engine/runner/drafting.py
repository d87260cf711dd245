"""A model that drafts, beside the one that verifies: a Runner of its own, whose cache has pages of the same numbers and
whose slots are the same sequences'. It is given steps of its own, one for each drafted token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from vexact_ops.patch.description import Pages, State

from ..config import EngineConfig
from ..core.chains import Chain
from ..core.plan import Chunk, Sampled, StepPlan
from ..core.step import Encoder, Step
from ..progress import Progress
from . import memory
from .runner import Runner


class DraftRunner(Runner):
    """Started by the runner that it is beside. It verifies nothing itself, and keeps no snapshots of states; of layers
    with a window it keeps all keys, for its pages are the pool's.

    reads   whether it wants final hidden states of all tokens from that one
    """

    reads = False

    def __init__(self, model: torch.nn.Module, handle, config: EngineConfig, device: torch.device):
        self._forgets = config
        alone = {"speculation": None, "enable_prefix_cache": False}
        alone |= {"num_window_pages": None, "num_snapshots": None}
        super().__init__(model, handle, replace(config, **alone), device)

    def _images(self) -> None:
        """It sees none: tokens that stand for one are tokens to it."""

    def _memories(self) -> tuple[Pages | State, ...]:
        """Drafted tokens that were wrong are forgotten by its states too."""
        return memory.forgetting(super()._memories(), self._forgets)

    def _start(self, progress: Progress) -> None:
        pass

    @property
    def numbers_alone(self) -> bool:
        return False

    def forward_changed(self) -> None:
        """The runner that it is beside has another forward."""

    def keep(self, hidden: Tensor, slots: Tensor) -> None:
        """What that one has computed, and the places of its tokens in the caches."""

    def facts(self) -> dict[str, int | bool | None]:
        """What a DraftModel is to know of it."""
        return {"chunk": memory.chunk_of(self.memories), "final": not self.reads}


class Launched(Protocol):
    def wait(self) -> Sampled: ...


class DraftModel:
    """What asks a DraftRunner for chains of tokens, in this process or in others.

    launch  its method, or what has it called
    chunk   tokens of a chunk of its states; None: it has none
    final   whether drafted tokens that were right need not be computed again
    """

    def __init__(self, launch: Callable[[Step], Launched], chunk: int | None, final: bool):
        self._launched, self._encoder, self.chunk, self.final = launch, Encoder(bare=True), chunk, final

    def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
        """Of each chain what was drafted, waited for; fewer where logits are no numbers.

        A token that is drawn is the next step's, and lies on the device: the host waits once, for the last.
        """
        firsts = [self._chunk(chain, chain.start, chain.end, chain.count > 0) for chain in chains]
        steps, asked = [self._launch(firsts)], [[i for i, chain in enumerate(chains) if chain.count]]
        for done in range(1, max(chain.count for chain in chains)):
            going = [i for i, chain in enumerate(chains) if chain.count > done]
            behind = (chains[i].end + done for i in going)
            steps.append(self._launch([self._chunk(chains[i], end - 1, end, True) for i, end in zip(going, behind)]))
            asked.append(going)
        drafted: list[list[int]] = [[] for _ in chains]
        for done, (pending, who) in enumerate(zip(steps, asked)):
            for i, token in zip(who, pending.wait().token_ids):
                if token >= 0 and len(drafted[i]) == done:
                    drafted[i].append(token)
        return [tuple(tokens) for tokens in drafted]

    def _launch(self, chunks: list[Chunk]) -> Launched:
        return self._launched(self._encoder.encode(StepPlan(chunks, 0)))

    def _chunk(self, chain: Chain, start: int, end: int, draws: bool) -> Chunk:
        chunk = chain.chunk
        return Chunk(chunk.sequence, start, end, draws, chunk.pages, chunk.epoch, chunk.slot)
