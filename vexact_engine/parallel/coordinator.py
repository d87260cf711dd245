"""The engine's end of a hand-over from a trainer that is on every node that the engine's stages are on: each node takes
the weights from a sender of its own, through memory of that node, and nothing of them goes over the network. A set is
taken on all nodes or on none, which is decided here.

    sender -> receiver (participant.py)  -> here            begun once a sender is there on every node
    bucket -> receiver                   -> here -> that node's stages, all nodes' at once
    Finish -> receiver                   -> here            taken once it is whole on every node

What a node's receiver has to say comes over a connection that its first stage has made to the engine's Door.
"""

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec

from ..errors import EngineClosed, HandoverFailed, PeerLost, StageDied
from ..handover.intake import EngineIntake, check_mode
from ..handover.messages import Bucket, Offer
from . import limits
from .line import Line
from .update import TakenOn, UpdateOfStages

if TYPE_CHECKING:
    from ..engine import Engine

_PATIENCE = 0.9  # of a sender's `timeout`: it is to hear on which node there is none before it gives up
_CLOSED = "weights: the receivers are closed"
_ASKED = {"begin", "open", "check", "finish", "abandon"}  # of a _Set, by receivers
_OF_A_SET = (HandoverFailed, ValueError, TypeError)  # what is wrong with what was sent, and not with the engine


class NodeReceivers:
    """WeightReceivers, one on each node of an engine with EngineConfig(nodes=n): each takes a whole set from a
    WeightSender on its node, and the engine has all of them or none. One thread at a time calls `receive`. A context
    manager.

    mode, staging, timeout   as WeightReceiver has them. A node on which no sender has come in nine tenths of `timeout`
              after the first did is named, and the set refused on all
    raises    ValueError for an engine on one node, one that has some already, or Replicas

    That the senders' weights are the same is the trainer's to see to: all its ranks gather the same ones. What is
    compared is their fingerprints and, where they give one, the set's version.
    """

    def __init__(
        self, engine: "Engine", *, mode: str = "in_place", staging: str | None = None, timeout: float = 60.0
    ) -> None:
        check_mode(mode, staging)
        if not timeout > 0:
            raise ValueError(f"NodeReceivers: timeout: got {timeout!r}, expected seconds above 0")
        if getattr(getattr(engine, "_worker", None), "lines", None) is None or engine.config.nodes == 1:
            got = f"a {type(engine).__name__} of {engine.config.nodes}"
            raise ValueError(
                f"NodeReceivers: got {got}, expected an Engine of 2 nodes or more; WeightReceiver takes others"
            )
        self.engine, self.mode, self.timeout = engine, mode, timeout
        self._using, self._reaching = threading.Lock(), threading.Lock()
        self._lines: list[Line] = []
        self._names: list[str] = []  # what people call the nodes
        self._addresses: dict[str, str] = {}
        self._numbers, self._closed = itertools.count(), False
        self._set: _Set | None = None
        self._intake: EngineIntake = engine.intake(mode, staging)
        try:
            with self._reaching:
                self._reach()
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> dict[str, str]:
        """Of each node, by Ray's id of it and in the order of its stages, where a WeightSender there finds its
        receiver. To be asked before each set: where stages have died they are made anew, with other addresses."""
        with self._reaching:
            self._reach()
            return dict(self._addresses)

    def receive(self, timeout: float | None = None) -> int:
        """Wait for senders and take one whole set, of each of them.

        timeout   seconds until the first must have begun; None: for ever
        returns   the engine's new weight_version, on all nodes
        raises    HandoverFailed: why, on which node, and what the engine has now; the set was taken on none. PeerLost,
                  likewise: that node's sender has died or stalls. StageDied: a node, or a process there; stages are
                  made anew, of the weights that they were made of at first, and the next set heals them. TimeoutError:
                  nobody came. It can be called again
        """
        with self._using:
            with self._reaching:
                lines, names = self._reach(), self._names
            number = next(self._numbers)
            found = self._set = _Set(self._intake, names, _PATIENCE * self.timeout, partial(_stop, lines, number))
            try:
                told = {"numerics": self.engine.numerics(), "weight_version": self.engine.weight_version}
                for node, line in enumerate(lines):
                    line.ask("receive", number=number, **told).add_done_callback(partial(found.over, node))
                if self._closed:
                    found.fail(None, HandoverFailed(_CLOSED))
                found.stop_again()
                found.wait_for_one(timeout)
                while not found.wait(self.timeout):
                    self._check_all(found, lines)
                return found.result()
            finally:
                self._set = None

    def close(self) -> None:
        """A `receive` of another thread gives up first. Again does nothing."""
        self._closed = True
        if (under_way := self._set) is not None:
            under_way.fail(None, HandoverFailed(_CLOSED))
        with self._using, self._reaching:
            lines, self._lines = self._lines, []
            wait_for([line.ask("close") for line in lines], limits.PING)
            for line in lines:
                line.serve(None, _refuse)

    def __enter__(self) -> "NodeReceivers":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    # Nodes

    def _reach(self) -> list[Line]:
        """The lines to all nodes, each with a receiver at its other end."""
        if self._closed:
            raise HandoverFailed(_CLOSED)
        found = self._intake.loop.call(self._intake.worker.lines)
        lines = [line for *_, line in found]
        if lines != self._lines:
            if any(line.owner is not None for line in lines):
                raise ValueError("NodeReceivers: the engine has others, expected none: close those first")
            self._lines, self._names = lines, [where for _, where, _ in found]
            itself = weakref.ref(self)  # the threads of lines, which are the engine's, do not keep it
            for node, line in enumerate(lines):
                line.serve(itself, partial(_asked, itself, node), partial(_gone, itself, line, node))
            told = {"mode": self.mode, "timeout": self.timeout, "device": self._intake.device}
            made = [line.ask("start", manifest=self._intake.manifest(), **told) for line in lines]
            self._addresses = {name: each.result(limits.ANSWER) for (name, *_), each in zip(found, made)}
        return lines

    def _check_all(self, found: "_Set", lines: Sequence[Line]) -> None:
        """That their processes go on: one that stands still keeps no limits, and so does its node's receiver in it."""
        asked = [line.ask("ping") for line in lines]
        late = wait_for(asked, limits.ANSWER).not_done
        for node, each in enumerate(asked):
            if each in late:
                self._end_all(found, node, f"the stages stand still: nothing comes from {self._names[node]}")

    def _end_all(self, found: "_Set", node: int, otherwise: str) -> None:
        worker = self._intake.worker
        try:
            found.fail(node, StageDied(self._intake.loop.call(lambda: worker.why_dead(otherwise))))
        except EngineClosed as error:
            found.fail(None, error)

    def _asked_by(self, node: int, what: str, each: Sequence[dict[str, Any]]) -> Sequence[Any]:
        """In its line's thread."""
        if what == "let_go":
            worker = self._intake.worker
            return [self._intake.loop.call(lambda: worker.let_go_on(node)) for _ in each]
        if self._set is None:
            raise HandoverFailed("weights: no set is under way")
        if what == "take":
            return self._set.take(node, [msgspec.convert(given["bucket"], Bucket) for given in each])
        if what not in _ASKED:
            raise HandoverFailed(f"weights: {what} is no question")
        return [getattr(self._set, what)(node, **given) for given in each]


def _asked(
    of: Callable[[], NodeReceivers | None], node: int, what: str, each: Sequence[dict[str, Any]]
) -> Sequence[Any]:
    receivers = of()
    return _refuse(what, each) if receivers is None else receivers._asked_by(node, what, each)


def _gone(of: Callable[[], NodeReceivers | None], line: Line, node: int) -> None:
    receivers = of()
    if receivers is not None and (under_way := receivers._set) is not None and line in receivers._lines:
        receivers._end_all(under_way, node, f"nothing comes from {receivers._names[node]} any more")


def _refuse(what: str, each: Sequence[dict[str, Any]]) -> Sequence[Any]:
    raise HandoverFailed(_CLOSED)


def _stop(lines: Sequence[Line], number: int, why: str) -> None:
    for line in lines:
        line.ask("stop", number=number, why=why)


class _Set:
    """One set of weights: what is known of it, node by node, and what becomes of it on all.

    seconds   that a node's sender may come after another's
    stop      tells all nodes why there is none any more
    """

    def __init__(self, intake: EngineIntake, names: Sequence[str], seconds: float, stop: Callable[[str], None]):
        self._intake, self._names, self._seconds, self._stop = intake, names, seconds, stop
        self._changed, self._updating = threading.Condition(), threading.Lock()
        self._came: dict[int, int | None] = {}  # node -> the version that its sender gives
        self._whole: set[int] = set()
        self._over: set[int] = set()  # nodes whose receivers have said what came of it
        self._waiting: list[TakenOn] = []
        self._begun = self._deciding = self._given_up = self._torn = False
        self._version: int | None = None
        self._why: tuple[int | None, BaseException] | None = None

    # For whoever receives

    def wait_for_one(self, seconds: float | None) -> None:
        with self._changed:
            if self._changed.wait_for(lambda: self._came or self._why, seconds):
                return
        self.fail(None, TimeoutError(f"weights: no sender came within {seconds:g} s"))

    def wait(self, seconds: float) -> bool:
        """Whether all nodes are through with it."""
        with self._changed:
            return self._changed.wait_for(lambda: len(self._over) == len(self._names), seconds)

    def result(self) -> int:
        if self._version is not None:
            return self._version
        torn = self._give_up()
        node, error = self._why
        if not isinstance(error, _OF_A_SET):
            raise error
        has = "has no weights now: send all of them again" if torn else "goes on with the weights that it had"
        kind = PeerLost if isinstance(error, PeerLost) else HandoverFailed
        raise kind(f"weights: {self._said(node, error)}. The engine {has}") from error

    def fail(self, node: int | None, error: BaseException) -> None:
        """The first that fails is the reason; none is once it is being put in place."""
        with self._changed:
            if self._why is not None or self._deciding:
                return
            self._why = node, error
            self._changed.notify_all()
        self._stop(str(self._refusal()))

    def stop_again(self) -> None:
        """What failed before the nodes had been asked for a set was told to nodes that knew of none."""
        with self._changed:
            failed = self._why is not None
        if failed:
            self._stop(str(self._refusal()))

    def over(self, node: int, said: Future) -> None:
        if (error := said.exception()) is not None:
            self.fail(node, error)
        with self._changed:
            self._over.add(node)
            self._changed.notify_all()

    # What a node's receiver asks; see receiver.Intake

    def begin(self, node: int, numerics: Mapping[str, object], version: int | None) -> None:
        """Returns once there is a sender on every node, and the engine's update has begun."""
        with self._changed:
            self._came[node] = version
            is_last = len(self._came) == len(self._names)
            self._changed.notify_all()
            if not is_last:
                together = self._changed.wait_for(
                    lambda: self._why or len(self._came) == len(self._names), self._seconds
                )
                if together:
                    self._changed.wait_for(lambda: self._why or self._begun)
        if is_last:
            try:
                self._begin(numerics)
            except BaseException as error:
                self.fail(None, error)
        elif not together:
            missing = ", ".join(name for other, name in enumerate(self._names) if other not in self._came)
            first = self._names[node]
            late = f"weights: {missing}: no sender came within {self._seconds:g} s of that on {first}"
            self.fail(None, HandoverFailed(late))
        self._check()

    def _begin(self, numerics: Mapping[str, object]) -> None:
        if len(set(self._came.values())) > 1:
            said = ", ".join(f"{self._came[node]} on {name}" for node, name in enumerate(self._names))
            raise HandoverFailed(f"weights: version: got {said}, expected the same of every sender")
        with self._updating:  # who gives up waits for this
            self._check()
            self._intake.begin(numerics, self._came[0])
        with self._changed:
            self._begun = True
            self._changed.notify_all()

    def open(self, node: int, offer: dict[str, Any]) -> str | None:
        """None, or why memory of that kind cannot be opened there: another may be offered."""
        self._check()
        worker, made = self._intake.worker, msgspec.convert(offer, Offer)
        try:
            self._intake.loop.call(lambda: worker.open_on(node, made))
        except HandoverFailed as error:
            return str(error)
        return None

    def take(self, node: int, buckets: Sequence[Bucket]) -> list[BaseException | None]:
        """What all nodes have by then goes to their stages at once."""
        self._check()
        mine = [TakenOn(node, bucket) for bucket in buckets]
        with self._changed:
            self._waiting += mine
        if not all(each.done for each in mine):
            with self._for_all():
                self._intake.do(self._take_all)
            self._check()
        return [each.failure for each in mine]

    def _take_all(self, update: UpdateOfStages) -> None:
        with self._changed:
            taken, self._waiting = self._waiting, []
        try:
            self._intake.worker.take_each(update, taken)
        except BaseException as error:  # some are another thread's, which finds this out
            self.fail(None, error)
            raise

    def check(self, node: int) -> None:
        self._check()
        with self._for_all():
            self._intake.do(lambda update: update.on(node).check())

    def finish(self, node: int) -> int:
        """Returns the new version, once all nodes have all."""
        self._check()
        with self._for_all():
            self._intake.do(lambda update: update.on(node).finish())
        with self._changed:
            self._whole.add(node)
            is_last = len(self._whole) == len(self._names) and self._why is None
            self._deciding = is_last
            if not is_last:
                self._changed.wait_for(lambda: self._why or self._version is not None)
        if is_last:
            try:
                version = self._intake.finish()
            except BaseException as error:
                self._deciding = False
                self.fail(None, error)
                raise
            with self._changed:
                self._version = version
                self._changed.notify_all()
        if self._version is None:
            self._check()
        return self._version

    def abandon(self, node: int, why: str, is_lost: bool) -> bool:
        """Nothing more comes there, and so nowhere. Whether what the engine had before is gone."""
        self.fail(node, (PeerLost if is_lost else HandoverFailed)(why))
        return self._give_up()

    # Both

    def _give_up(self) -> bool:
        with self._updating:
            if not self._given_up:
                self._given_up = True
                self._torn = self._intake.abandon()
            return self._torn

    def _said(self, node: int | None, error: BaseException) -> str:
        where = "" if node is None else f"{self._names[node]}: "
        return f"{where}{str(error).removeprefix('weights: ')}"

    def _refusal(self) -> HandoverFailed:
        return HandoverFailed(f"weights: refused on every node: {self._said(*self._why)}")

    def _check(self) -> None:
        if self._why is not None:
            raise self._refusal()

    @contextlib.contextmanager
    def _for_all(self) -> Iterator[None]:
        """What goes wrong with the engine ends the set everywhere; what is wrong with what was sent, its node says."""
        try:
            yield
        except BaseException as error:
            if not isinstance(error, _OF_A_SET):
                self.fail(None, error)
            self._check()
            raise
