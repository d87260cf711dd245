"""Where weights go that come from another process: into all replicas."""

import contextlib
import threading
from collections.abc import Mapping

import torch

from ..errors import EngineClosed
from ..handover.buffers import Memories
from ..handover.intake import check_mode
from ..handover.messages import Bucket, Offer
from ..handover.session import READ, Reading, check_numerics
from .fleet import FleetUpdate
from .front import Front


class FleetIntake:
    """An Intake (handover/receiver.py) of all replicas. Each opens the sender's memory; to an actor that cannot, for it
    is on another machine, the bytes are carried, bucket by bucket.

    updates   held from the beginning of a set to its end
    """

    gpu = ""  # there are several
    broken = ""

    def __init__(
        self, front: Front, updates: threading.Lock, numerics: Mapping, device: str, mode: str, staging: str | None
    ):
        check_mode(mode, staging)
        self._front, self._updates, self._numerics, self.device = front, updates, dict(numerics), device
        self._place = {"mode": mode, "staging": None if staging is None else str(staging)}
        self._update: FleetUpdate | None = None
        self._here: Memories | None = None  # that memory in this process, for those
        self._everybody("make_intake", **self._place)

    def _everybody(self, what: str, **arguments) -> dict:
        answers = self._front.ask(what, **arguments)
        errors = [answer for answer in answers.values() if isinstance(answer, BaseException)]
        if errors and len(errors) == len(answers):
            raise errors[0]
        return answers

    def manifest(self) -> dict[str, tuple[tuple[int, ...], str]]:
        found = next(iter(self._update.writing.values()))
        (answer,) = self._front.ask("manifest", [found]).values()
        if isinstance(answer, BaseException):
            raise answer
        return {name: (tuple(shape), dtype) for name, (shape, dtype) in answer.items()}

    def begin(self, numerics: Mapping[str, object], version: int | None = None) -> None:
        check_numerics(numerics, self._numerics, self.device)
        self._updates.acquire()
        try:
            self._front.check_open()
            self._front.updating(True)
            self._update = FleetUpdate(self._front, version, numerics=dict(numerics), intake=self._place)
        except BaseException:
            self._end()
            raise

    def open(self, offer: Offer) -> None:
        self._update.open(offer)
        if self._update.remote:
            self._here = self._here or Memories(torch.device("cpu"))
            self._here.open(offer)

    def take(self, bucket: Bucket) -> Reading:
        self._update.wait_for(self._update.send_bucket(bucket, lambda: self._here.bytes(bucket)))
        return READ

    def check(self) -> None:
        self._update.check()

    def finish(self) -> int:
        version = self._update.finish()
        self._end()
        return version

    def abandon(self, why: BaseException | None = None) -> bool:
        update, self._update = self._update, None
        if update is None:
            return False
        try:
            return update.give_up()
        except EngineClosed:
            return False
        finally:
            self._end()

    def _end(self) -> None:
        self._update = None
        self._front.updating(False)
        self._updates.release()

    def let_go(self) -> None:
        if self._here is not None:
            self._here.close()
        with contextlib.suppress(EngineClosed):
            self._front.ask("let_go")
