"""One update of an engine's weights that comes in pieces: begun, written, and then finished or given up."""

import contextlib
import functools
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor

import vexact_ops as vx

from ..errors import EngineClosed, HandoverFailed
from ..weights.update import Piece, Update

if TYPE_CHECKING:  # it needs msgspec
    from . import messages as m

log = logging.getLogger(__name__)

T = TypeVar("T")
TORN = "an update of the weights broke off in the middle: update them again"


class SetEnded(HandoverFailed):
    """Of a set that comes from several nodes: it is none any more, whatever was to be done for it here."""


class UpdateLoop(Protocol):
    """What of the engine's loop is needed; see core/loop.py."""

    updating: bool
    torn: str | None
    missing: str | None

    def call(self, function: Callable[[], object], when: Callable[[], bool] | None = None) -> Any: ...
    def call_here(self, function: Callable[[], object], when: Callable[[], bool] | None = None) -> Any: ...
    def may_change_weights(self) -> bool: ...


class UpdateWorker(Protocol):
    """What of the engine's worker is needed; see runner/worker.py."""

    takes_in_caller: bool  # what lies in a bucket is taken in the thread that it comes in; to a copy while steps run

    def begin(self, specs: Mapping | None, staging: Any = None) -> Update: ...
    def open(self, offer: "m.Offer") -> None: ...
    def take(self, update: Update, bucket: "m.Bucket", staged: bool) -> "Reading": ...
    def commit(self, update: Update, tear: Callable[[], None]) -> None: ...
    def make_copy(self, device: torch.device | str | None) -> Any: ...
    def let_go(self) -> None: ...
    def fence(self) -> Callable[[], None]: ...
    def wait(self) -> None: ...
    def adopt(self) -> None: ...


class Reading:
    """What `take` returns: of a bucket that may be filled again once it is done.

    events   of devices, that have come by then
    """

    def __init__(self, events: Sequence[torch.cuda.Event] = ()):
        self._events = events

    @property
    def done(self) -> bool:
        return all(event.query() for event in self._events)

    def wait(self) -> None:
        for event in self._events:
            event.synchronize()


READ = Reading()


class _ReadingOfLoop(Reading):
    """One that the engine's thread has to be asked for."""

    def __init__(self, loop: UpdateLoop, reading: Reading):
        self._loop, self._reading = loop, reading

    @property
    def done(self) -> bool:
        return self._loop.call(lambda: self._reading.done)

    def wait(self) -> None:
        self._loop.call(self._reading.wait)


class WeightUpdate:
    """What Engine.begin_update returns. A context manager: an update that was not finished is given up at its end.

    No step runs from the first `write` to the end. Given up after that, the weights are torn: requests end with
    WeightsTorn until the next whole update. The thread that writes need not be the one that began.

    staging   a copy that all goes to first, and is put in place by `finish`: then steps run until that
    """

    def __init__(
        self,
        loop: UpdateLoop,
        worker: UpdateWorker,
        lock: Lock,
        renewed: Callable[[], int],
        specs: Mapping | None,
        staging: Any = None,
    ):
        self._loop, self._worker, self._renewed, self._lock = loop, worker, renewed, lock
        self._staged = staging is not None
        lock.acquire()
        self._over = False  # as the engine's thread sees it: what another thread still has to write comes too late
        try:
            self._update = loop.call(lambda: self._begin(specs, staging))
        except BaseException:
            lock.release()
            raise

    @property
    def begun(self) -> bool:
        """Whether anything has been written: what the engine had before is gone then."""
        return self._update.begun and not self._staged

    def write(self, bucket: Iterable[tuple[str, Tensor | Piece]]) -> None:
        """Copies tensors, on any device, into the parameters of their names; returns when they may be reused.

        bucket   (name, tensor) of whole tensors, or (name, Piece) of a part, each part once
        raises   ValueError, TypeError: one that does not fit; EngineClosed
        """
        self._check()
        bucket = list(bucket)
        if self._staged:
            self._into_copy(lambda: self._update.write(bucket))
        else:
            self._loop.call(functools.partial(self._write, bucket, self._worker.fence()), when=self._may_write)

    def open(self, offer: "m.Offer") -> None:
        """Memory of another process, that the next buckets lie in. HandoverFailed."""
        self._check()
        self._call_here(lambda: self._worker.open(offer))

    def take(self, bucket: "m.Bucket") -> Reading:
        """`write` of what lies there, but that it may be reused once that is done. HandoverFailed where it is not what
        was sent."""
        reading = self.do(lambda update: self._worker.take(update, bucket, staged=self._staged))
        return reading if self._worker.takes_in_caller or reading is READ else _ReadingOfLoop(self._loop, reading)

    def do(self, take: Callable[[Update], T]) -> T:
        """`take`, by whatever function that writes of the worker's update."""
        self._check()
        if self._staged:
            return self._into_copy(lambda: take(self._update))
        call = self._loop.call_here if self._worker.takes_in_caller else self._loop.call
        return call(lambda: self._take(take), self._may_write)

    def check(self) -> None:
        """ValueError where something is missing yet."""
        self._check()
        self._loop.call(self._update.check)

    def finish(self) -> int:
        """All has come. Returns the new weight_version. ValueError where something is missing."""
        self._check()
        return self._loop.call(self._finish, when=self._may_write)

    def abandon(self) -> None:
        """Nothing more will come. Does nothing after finish() or again."""
        if not self._over:
            try:
                self._loop.call(self._end)
            except Exception as error:
                if not (isinstance(error, EngineClosed) or self._loop.closed):
                    raise
                self._end()  # others wait for their turn, and are told so

    def __enter__(self) -> "WeightUpdate":
        return self

    def __exit__(self, *exception) -> None:
        self.abandon()

    def _call_here(self, function: Callable[[], object]) -> Any:
        """In this thread where the worker can, between two steps where it cannot."""
        return self._loop.call_here(function) if self._worker.takes_in_caller else self._loop.call(function)

    def _into_copy(self, function: Callable[[], object]) -> Any:
        """Unless this update has ended while it waited for its turn: the copy may be another one's."""

        def put():
            self._check()
            return function()

        return self._call_here(put)

    def _check(self) -> None:
        if self._over:
            raise RuntimeError("WeightUpdate: it has ended: begin another one")

    def _may_write(self) -> bool:
        return self._loop.updating or self._loop.may_change_weights()

    # In the engine's thread, or while that waits

    def _begin(self, specs: Mapping | None, staging: Any) -> Update:
        update = self._worker.begin(specs, staging)
        if self._loop.torn is not None or self._loop.missing is not None:
            update.expect_whole()
        return update

    def _write(self, bucket, ready: Callable[[], None]) -> None:
        ready()
        with self._writing():
            self._update.write(bucket)
        self._worker.wait()

    def _take(self, take: Callable[[Update], T]) -> T:
        with self._writing():
            return take(self._update)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        self._check()
        self._loop.updating = True
        try:
            yield
        finally:
            self._loop.torn = TORN if self._update.begun else self._loop.torn

    def _finish(self) -> int:
        self._check()
        self._update.finish()
        if self._staged:
            self._worker.commit(self._update, self._tear)
        self._worker.adopt()
        version = self._renewed()
        self._end()
        return version

    def _tear(self) -> None:
        self._loop.torn = TORN

    def _end(self) -> None:
        if not self._over:
            self._loop.updating, self._over = False, True
            self._lock.release()


def check_version(op: str, version: object) -> None:
    """ValueError unless weights can have it: None, or 1 to what a number of JSON can be."""
    whole = isinstance(version, int) and not isinstance(version, bool)
    if version is not None and not (whole and 1 <= version < 2**53):
        raise ValueError(f"{op}: version: got {version!r}, expected None, or 1 to {2**53 - 1}")


def difference(given: Mapping[str, object], own: Mapping[str, object]) -> dict[str, tuple[object, object]]:
    """Where a trainer's numerics and an engine's differ, gradients aside; without its model's numbers where the trainer
    gives none, which is said once, and without those of an image encoder where the engine has none: it refuses images,
    and no text's bits are of it."""
    model, mine = given.get("model"), own.get("model")
    if "model" not in given:
        _say_unknown()
        own = {name: value for name, value in own.items() if name != "model"}
    elif isinstance(model, Mapping) and isinstance(mine, Mapping) and "images" not in mine:
        given = {**given, "model": {name: value for name, value in model.items() if name != "images"}}
    return vx.numerics_difference(given, own, forward=True)


@functools.cache
def _say_unknown() -> None:
    log.warning(
        "weights: the trainer's numerics say nothing of its model, whose epsilons, frequencies, windows and dtypes may "
        "be others than this engine's: give handle.numerics() of its patch (vexact_ops.patch.hf), which has them"
    )


def with_model(
    given: Mapping[str, object] | None, pairs: Iterator[tuple[str, Tensor]]
) -> tuple[Mapping[str, object] | None, Iterator[tuple[str, Tensor]]]:
    """A trainer's numerics, with its model's numbers where it gives none but a patched model of this process holds the
    first of its tensors; and the pairs, that one among them."""
    if not isinstance(given, Mapping) or "model" in given:
        return given, pairs
    first = next(pairs, None)
    if first is None:
        return given, pairs
    found = vx.patch.model_of(first[1])
    return given if found is None else {**given, "model": found}, itertools.chain((first,), pairs)


def check_numerics(given: Mapping[str, object] | None, own: Mapping, device: str) -> None:
    """TypeError or ValueError unless a trainer's numerics are those of an engine on that kind of device, gradients
    aside."""
    if not isinstance(given, Mapping):
        call = ", ".join([f'"{device}"', *(f"{name}={value}" for name, value in own["options"].items())])
        got = "none" if given is None else type(given).__name__
        raise TypeError(
            f"update_weights: numerics: got {got}, expected what fixes the trainer's bits: numerics=handle.numerics() "
            f"of its patch (vexact_ops.patch.hf), or of a trainer that has none numerics=vexact_ops.numerics({call}), "
            "called in its process with its options; for weights that no trainer computes with, "
            "numerics=engine.numerics()"
        )
    differ = difference(given, own)
    if differ:
        found = "; ".join(f"{where}: got {got!r}, expected {mine!r}" for where, (got, mine) in differ.items())
        raise ValueError(
            f"update_weights: numerics: the trainer's are not this engine's, whose bits may be others. {found}"
        )
