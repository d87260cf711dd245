"""An update of the weights of an engine in stages, as the engine's process has it."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from ..handover.messages import Bucket, dtype_of
from ..handover.session import Reading
from ..weights.update import Piece, Spec, Update

if TYPE_CHECKING:
    from .pipeline import PipelineWorker


class Staging(NamedTuple):
    """A second copy of the weights' memory, in the stages: where it lies, None for their own devices."""

    device: str | None


class TakenOn:
    """A bucket in memory of a node, that its stages take. done: whether they have; failure: why not."""

    def __init__(self, node: int, bucket: Bucket):
        self.node, self.bucket = node, bucket
        self.done, self.failure = False, None


class UpdateOfStages(Update):
    """All is checked here, against a model without weights, and written there. Where each node has a sender, what they
    bring is checked node by node: the first one's here, of each other by an Update of its own.

    whole   nothing may be left out
    """

    def __init__(self, worker: "PipelineWorker", specs: Mapping | None, staging: Staging | None, whole: bool = False):
        super().__init__(worker.places, specs)
        if whole:
            self.expect_whole()
        self._worker, self._staged, self._specs = worker, staging is not None, specs
        self._others: dict[int, Update] = {}
        if staging is not None:
            worker.ask("copy", device=staging.device)  # some may have been made anew
        worker.ask("begin", staged=self._staged)

    @property
    def begun(self) -> bool:
        return super().begun or any(update.begun for update in self._others.values())

    def on(self, node: int) -> Update:
        """What has come there."""
        if node and node not in self._others:
            self._others[node] = Update(self.places, self._specs)
        return self._others[node] if node else self

    def note_bucket(self, bucket: Bucket, node: int = 0) -> None:
        update = self.on(node)
        for part in bucket.parts:
            dtype = dtype_of(part.dtype)
            whole = part.start == 0 and part.count == math.prod(part.shape)
            update.note(part.name, Spec(part.shape, dtype) if whole else Piece(part.start, Spec((part.count,), dtype)))
        if not self._staged:
            self._worker.touched()

    def take(self, bucket: Bucket) -> Reading:
        self.note_bucket(bucket)
        return self._worker.take_bucket(bucket)

    def write(self, bucket: Iterable[tuple[str, Tensor | Piece]], foreign: bool = False) -> None:
        bucket = [pair for pair in bucket if not pair[0].startswith(self.places.passed)]
        for given, value in bucket:
            self.note(given, value)  # of tied ones, each stage that has them compares the second
        if not self._staged:
            self._worker.touched()
        self._worker.write(bucket)

    def finish(self) -> None:
        super().finish()
        if not self._staged:
            self._worker.whole()
