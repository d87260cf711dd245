"""One update of the weights of all replicas: who still takes part in it, and what becomes of those that do not."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ..errors import HandoverFailed, ReplicaDied, UpdateIncomplete
from ..handover.messages import Bucket, Offer
from . import limits
from . import messages as m
from .front import Front
from .jobs import Answer, Replica


class FleetUpdate:
    """Begun on all replicas, or on none, but for those that stand still.

    writing   those that take part; one that fails on the way, or stands still, is left out from there on
    version   what the weights will be; None: one more than now
    raises    what a replica refuses with
    """

    def __init__(self, front: Front, version: int | None = None, **arguments: Any):
        self._front, self.version = front, front.weight_version + 1 if version is None else version
        self._failed: dict[int, BaseException] = {}
        self.remote: set[int] = set()  # who cannot open the memory that was offered
        still = {r.index: TimeoutError(f"{r} stands still") for r in front.alive() if r.still_for > limits.ANSWER}
        asked = [replica for replica in front.alive() if replica.index not in still]
        begun = still | front.ask("begin_update", asked, version=self.version, **arguments)
        self.writing: dict[int, Replica] = {i: front.replicas[i] for i, answer in begun.items() if answer is None}
        refusals = [e for e in begun.values() if e is not None and not isinstance(e, ReplicaDied | TimeoutError)]
        late = {i: e for i, e in begun.items() if isinstance(e, TimeoutError)}
        if refusals or not self.writing:
            self.give_up()
            self._give_up_late(late.keys() - still.keys())
            raise next(iter([*refusals, *late.values()]), front.no_replica())
        self._failed |= late
        front.exclude(late)
        self._give_up_late(late.keys() - still.keys())

    def ask(self, what: str, **arguments: Any) -> dict[int, Any]:
        return self._front.ask(what, list(self.writing.values()), **arguments)

    def send(self, what: str, message: Callable[[Replica], Callable[[int], m.ToReplica]]) -> dict[int, Answer]:
        """To those that take part, what `message` makes for each of them of a key."""
        return {i: self._front.send(replica, what, message(replica)) for i, replica in self.writing.items()}

    def open(self, offer: Offer) -> None:
        """Memory of this machine, in those that can. HandoverFailed where one that should cannot."""
        answers = self._front.gather(self.send("open memory", lambda _: partial(m.Open, offer=offer)), limits.ANSWER)
        far = {i for i in answers if not self._shares_memory(i)}
        failed = [e for i, e in answers.items() if isinstance(e, HandoverFailed) and i not in far]
        if failed:
            raise failed[0]
        self.remote = {i for i in far if isinstance(answers[i], HandoverFailed)}
        self.note({i: answer for i, answer in answers.items() if i not in self.remote})

    def _shares_memory(self, index: int) -> bool:
        channel = self.writing[index].channel
        return channel is None or channel.shares_memory

    def send_bucket(self, bucket: Bucket, payload: Callable[[], bytes]) -> dict[int, Answer]:
        """What lies in that memory, or, to those that cannot see it, its bytes."""
        carried = payload() if self.remote & self.writing.keys() else None
        return self.send(
            "a bucket of weights",
            lambda r: partial(m.Take, bucket=bucket, payload=carried if r.index in self.remote else None),
        )

    def wait_for(self, answers: Mapping[int, Answer]) -> None:
        self.note(self._front.gather(answers, limits.ANSWER))

    def note(self, answers: Mapping[int, Any]) -> None:
        """Those that failed write no more, and get no requests. Where all have failed that is raised, and what each of
        them has then, the requests find out."""
        failed = {i: e for i, e in answers.items() if isinstance(e, BaseException) and i in self.writing}
        if failed and failed.keys() == self.writing.keys():
            raise min(failed.values(), key=lambda e: isinstance(e, ReplicaDied))
        for index, error in failed.items():
            self._failed[index] = error
            self._front.exclude([index])
            replica = self.writing.pop(index)
            if isinstance(error, TimeoutError):
                self._give_up_late([index])
            elif not isinstance(error, ReplicaDied):  # its successor, if it has one, has begun nothing
                self._give_up({index: replica})

    def check(self) -> None:
        """Those to which not all has come are left out."""
        self.note(self.ask("check_update"))

    def finish(self) -> int:
        """All has come. UpdateIncomplete where some have it and others failed, but for those that died."""
        self.note(self.ask("finish_update"))
        self._front.updated(self.version, self.writing)
        if any(not isinstance(e, ReplicaDied) for e in self._failed.values()):
            what = "; ".join(f"replica {i}: {type(e).__name__}: {e}" for i, e in self._failed.items())
            used = ", ".join(map(str, self.writing))
            raise UpdateIncomplete(
                f"update_weights: version {self.version} is in use on replicas {used}, not on others: {what}",
                self._failed,
            )
        return self.version

    def give_up(self) -> bool:
        """Nothing more comes. Whether what some had before is gone."""
        return self._give_up(self.writing)

    def _give_up_late(self, late: Iterable[int]) -> None:
        """They are told, for when they go on."""
        for index in late:
            self._front.send(self._front.replicas[index], "give up", lambda key: m.Do(key, "give_up_update", {}))

    def _give_up(self, replicas: Mapping[int, Replica]) -> bool:
        if not replicas or self._front.closed:
            return False
        answers = self._front.ask("give_up_update", list(replicas.values()))
        return any(answer is True for answer in answers.values())
