"""Weights that come whole to a rank that holds some of their rows."""

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from .cut import Shard
from .update import Piece, Places


class Rows:
    """Which rows of what comes belong into a rank's tensors.

    places   of the whole model, which may be on meta
    shards   rows that are held, by name of parameter
    """

    def __init__(self, places: Places, shards: Mapping[str, Shard]):
        self._old, self._held = places.old, {}
        self._local: dict[str, str | None] = {}  # of one expert's tensors, where each rank has some experts
        held = {id(places.targets[name]): shard for name, shard in shards.items()}
        for name, target in places.targets.items():  # tied ones by all their names
            if id(target) in held:
                self._held[name] = tuple(target.shape), held[id(target)]
        for name, (stacked, view) in places.views.items():
            if stacked in self._held:
                (_, rows, columns), shard = self._held[stacked]
                if shard.dim == 0:
                    path, _, *leaf = name.rsplit(".", 3)
                    begin, end = shard.ranges[0]
                    expert = view.storage_offset() // (rows * columns)
                    self._local[name] = ".".join([path, str(expert - begin), *leaf]) if begin <= expert < end else None
                    continue
                first = view.storage_offset() // columns % rows
                self._held[name] = tuple(view.shape), shard.within(first, view.shape[0])

    def of(self, bucket: Iterable[tuple[str, Tensor | Piece]]) -> Iterator[tuple[str, Tensor | Piece]]:
        """What an Update of the rank's own tensors takes, of whole tensors or runs of their elements."""
        for name, value in bucket:
            known = self._old.get(name, name)
            if known in self._local:
                if (here := self._local[known]) is not None:
                    yield here, value
                continue
            held = self._held.get(known)
            if held is None:
                yield name, value
                continue
            shape, shard = held
            if not isinstance(value, Piece):
                yield name, shard.take(value)
                continue
            for own, at, count in shard.runs(shape, value.start, len(value.values)):
                yield name, Piece(own, value.values[at : at + count])
