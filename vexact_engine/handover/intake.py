"""Where weights go that come from another process: into one engine, in either of two ways."""

import contextlib
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import EngineClosed
from ..weights.update import Piece, Places, Update
from . import messages as m
from .buffers import gpu_name
from .session import Reading, UpdateLoop, UpdateWorker, WeightUpdate

MODES = ("in_place", "staged")
T = TypeVar("T")


class EngineIntake:
    """Where a WeightReceiver, a replica, or NodeReceivers put what comes for one engine, set by set.

    device, gpu   where it is computed: see messages.Welcome
    """

    broken = ""

    def __init__(
        self,
        loop: UpdateLoop,
        worker: UpdateWorker,
        begin: Callable[..., WeightUpdate],
        places: Places,
        device: torch.device,
        mode: str,
        staging: torch.device | str | None,
    ):
        check_mode(mode, staging)
        self.loop, self.worker, self._begin, self._places = loop, worker, begin, places
        self._device = device
        self._staging = loop.call(lambda: worker.make_copy(staging)) if mode == "staged" else None
        self._update: WeightUpdate | None = None
        self._manifest: dict[str, tuple[tuple[int, ...], str]] = {}

    @property
    def device(self) -> str:
        return self._device.type

    @property
    def gpu(self) -> str:
        return gpu_name(self._device) if self.worker.takes_in_caller else ""

    def manifest(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """(shape, dtype) of all that may come, by name."""
        if not self._manifest:
            every = self._places.every()
            self._manifest = {name: (tuple(t.shape), m.dtype_name(t.dtype)) for name, t in every.items()}
        return self._manifest

    def begin(self, numerics: Mapping[str, object], version: int | None = None) -> None:
        self._update = self._begin(numerics=numerics, version=version, staging=self._staging)

    def open(self, offer: m.Offer) -> None:
        self._update.open(offer)

    def take(self, bucket: m.Bucket) -> Reading:
        """Begins to; the bucket may be filled again once that is done."""
        return self._update.take(bucket)

    def do(self, function: Callable[[Update], T]) -> T:
        """`take` of what a worker has been given in another way: function(the worker's Update), as it takes."""
        return self._update.do(function)

    def write(self, pairs: Iterable[tuple[str, Tensor | Piece]]) -> None:
        """What no memory of another process brings."""
        self._update.write(pairs)

    def check(self) -> None:
        """ValueError unless all has come."""
        self._update.check()

    def finish(self) -> int:
        version = self._update.finish()
        self._update = None
        return version

    def abandon(self, why: BaseException | None = None) -> bool:
        """Nothing more comes. Whether what the engine had before is gone."""
        update, self._update = self._update, None
        if update is None:
            return False
        update.abandon()
        return update.begun

    def let_go(self) -> None:
        """Of the sender's memory."""
        with contextlib.suppress(EngineClosed):  # then it has
            self.loop.call(self.worker.let_go)


def check_mode(mode: str, staging: torch.device | str | None) -> None:
    if mode not in MODES:
        raise ValueError(f"WeightReceiver: mode: got {mode!r}, expected one of {', '.join(MODES)}")
    if staging is not None and mode != "staged":
        raise ValueError(f"WeightReceiver: staging: got {staging!r} in mode {mode!r}, expected it with staged only")
