"""Sizes of graphs that an engine like this one has chosen before, on this machine or on another with such a GPU: to
choose them, a graph of each size that is looked at is made and timed, which is much of a start.

Sizes decide what padding costs, and no bits.
"""

import hashlib
import json
from collections.abc import Mapping

import torch

import vexact_ops as vx

from ..config import EngineConfig
from .ranks import Ranks

_KIND, _METHOD = "graphs", "method 1"  # sizes that were chosen by another method are not read

Chosen = dict[str, list[int]]  # of each kind of graphs, ascending


def about(
    model: torch.nn.Module,
    path: str,
    config: EngineConfig,
    most: Mapping[str, int],
    pages: int,
    how: tuple[float | str, ...],
) -> str:
    """All that decides which sizes are worth a graph, but for the machine: the weights' names, shapes and dtypes, how
    hidden states are computed, what steps may hold, and what padding may cost (`how`)."""
    shapes = sorted((name, list(p.shape), str(p.dtype)) for name, p in model.named_parameters())
    weights = hashlib.sha256(json.dumps(shapes).encode()).hexdigest()[:12]
    kind = f"{type(model).__name__} {weights} {path.split(':')[0]} {vx.current_backend() or 'default'}"
    cache = f"{pages} pages of {config.page_size}, segment {config.kv_segment}"
    return f"{kind}, {most['decodes']} sequences, {most['chunks']} tokens, {cache}, {_METHOD} {how}"


class Kept:
    """What is known of them.

    about  all that decides what sizes are worth it
    most   the most rows of a graph, of each kind of graphs that there is
    ranks  that take part in every graph: they have the same sizes, or none
    """

    def __init__(self, about: str, most: Mapping[str, int], device: torch.device, ranks: Ranks):
        self._about, self._most, self._device, self._ranks = about, most, device, ranks
        self._known: Chosen = {}

    def recall(self) -> Chosen:
        """All of them, or none where some are not known, or other ones to another rank: {}."""
        found = vx.recall(_KIND, self._about, self._device)
        sound = isinstance(found, dict) and found.keys() == self._most.keys()
        known = found if sound and all(self._fits(name, sizes) for name, sizes in found.items()) else {}
        self._known = known if self._same(known) else {}
        return self._known

    def _same(self, known: Chosen) -> bool:
        """On all ranks. What it waits for comes from each of them, whatever it knows."""
        if self._ranks.size == 1:
            return True
        digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode()).digest()
        own = torch.tensor([[int.from_bytes(digest[:7], "big")]], dtype=torch.int64, device=self._device)
        return bool((self._ranks.gather(own) == own).all())

    def remember(self, chosen: Chosen) -> None:
        """Of all that was chosen these kinds, where they are not what was recalled."""
        own = {name: chosen[name] for name in self._most}
        if own != self._known:
            self._known = own
            vx.remember(_KIND, self._about, self._device, own)

    def _fits(self, name: str, sizes: object) -> bool:
        """Whether these can be sizes of that kind: a file may be damaged."""
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes) or sizes != sorted({*sizes}):
            return False
        if name.startswith("chunks"):  # a size that no graph is worth is computed call by call
            return not sizes or 1 <= sizes[0] <= sizes[-1] <= self._most[name]
        return bool(sizes) and sizes[0] >= 1 and sizes[-1] == self._most[name]
