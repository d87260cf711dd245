"""One set of weights to several receivers at once: a session with each, and one set of buckets that all read."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, TypeVar

import torch

from ..errors import HandoverFailed, PeerLost
from . import messages as m
from . import protocol
from .buffers import CUDA, Buckets
from .sender import GOODBYE, Session, WeightSender

T = TypeVar("T")
Manifest: TypeAlias = Mapping[str, tuple[tuple[int, ...], str]]


class Fanout:
    """What ShardedWeightSender's first rank has in the place of a WeightSender and its Session.

    addresses   of the receivers, each once
    options     a WeightSender's
    raises      what one of several says is HandoverFailed, or PeerLost, with its place among them, its address and its
                process; of one alone it is as it is
    """

    def __init__(self, addresses: Sequence[str], **options):
        self.ends = [WeightSender(address, **options) for address in addresses]
        self._sessions: list[Session] = []
        self._posted = self._given_back = 0  # buckets of this set: told of, and no longer read by any
        self._acknowledged = [0] * len(self.ends)

    @property
    def sockets(self) -> list[protocol.zmq.Socket]:
        return [end._socket for end in self.ends]

    @property
    def peer(self) -> "m.Peer | _Behind":
        """Whom the sender waits for."""
        return self.ends[0]._receiver if len(self.ends) == 1 else _Behind(self)

    @property
    def dead(self) -> list[int]:
        receivers = enumerate(end._receiver for end in self.ends)
        return [number for number, peer in receivers if peer is not None and not peer.alive]

    @property
    def behind(self) -> list[int]:
        """Who has not given back all buckets."""
        return [number for number, count in enumerate(self._acknowledged) if count < self._posted]

    # One set

    def begin(self, version: int | None) -> m.Welcome:
        """What they all take. HandoverFailed where that is not the same."""
        before = [end._receiver for end in self.ends]
        self._posted, self._given_back, self._acknowledged = 0, 0, [0] * len(self.ends)
        self._sessions = [Session(end, version) for end in self.ends]
        for session in self._sessions:
            session.say_hello()
        self._each(Session.hear_welcome)
        if before != [end._receiver for end in self.ends]:
            self.ends[0]._refused.clear()
        return self._agreed([session.welcome for session in self._sessions])

    def _agreed(self, welcomes: list[m.Welcome]) -> m.Welcome:
        first, *others = welcomes
        for number, other in enumerate(others, 1):
            if other.manifest != first.manifest:
                said = _difference(other.manifest, first.manifest)
                raise self._of(number, HandoverFailed(f"it takes other tensors than {self.name(0)}: {said}"))
            if other.device != first.device:
                said = f"it computes on {other.device}, {self.name(0)} on {first.device}"
                raise self._of(number, HandoverFailed(f"{said}: expected the same device of all"))
        gpus = {welcome.gpu for welcome in welcomes}  # buckets may lie there, where there is one
        return m.Welcome(first.peer, first.manifest, first.mode, first.device, gpus.pop() if len(gpus) == 1 else "", 0)

    def open(self, device: torch.device, welcome: m.Welcome) -> Buckets:
        """As WeightSender._open: buckets that all have opened."""
        return self.ends[0]._open(device, welcome, self.ask_to_open, keep=len(self.ends) > 1)

    def ask_to_open(self, offer: m.Offer) -> str | None:
        """None once all have opened it, or why one cannot."""
        self._post(offer)
        kinds = m.Opened, m.Unopened
        answers = self._each(lambda session: session.sender._answer("an answer to the offer of memory", *kinds))
        wrong = ((number, answer) for number, answer in enumerate(answers) if isinstance(answer, m.Unopened))
        return next((str(self._of(number, HandoverFailed(answer.reason))) for number, answer in wrong), None)

    def post(self, bucket: m.Bucket) -> None:
        self._post(bucket)
        self._posted += 1

    def given_back(self, ready: Mapping[object, int]) -> int:
        """Of the oldest buckets that are under way, how many more may be filled again: all have read them.

        ready   whose sockets have something to hear
        """
        for number, end in enumerate(self.ends):
            if end._socket in ready:
                with self._named(number):
                    end._answer("an acknowledgement", m.Ack)  # in the order that it was told of them
                self._acknowledged[number] += 1
        before, self._given_back = self._given_back, min(self._acknowledged)
        return self._given_back - before

    def finish(self) -> int:
        """All has been read by all. Each says that it is whole before any is told to take it.

        returns   the new weight_version; where they had different ones, the highest
        raises    HandoverFailed, PeerLost: saying which have taken it, if some have
        """
        if len(self.ends) > 1:
            self._post(m.Check())
            self._each(lambda session: session.sender._answer("that the set is whole", m.Whole))
        for session in self._sessions:
            session.say_finish()
        versions: dict[int, int] = {}
        failed: dict[int, HandoverFailed] = {}
        for number, session in enumerate(self._sessions):
            try:
                versions[number] = session.hear_done()
            except HandoverFailed as error:
                failed[number] = self._of(number, error)
        if failed:
            raise self._in_part(versions, list(failed.values()))
        return max(versions.values())

    def _in_part(self, took: Iterable[int], failed: list[HandoverFailed]) -> HandoverFailed:
        """Once they had been told to take the set."""
        if len(self.ends) == 1:
            return failed[0]
        those = ", ".join(str(number + 1) for number in took) or "none"
        said = f"{'; '.join(map(str, failed))}. Of {len(self.ends)} receivers these have taken the set: {those}"
        lost = [error for error in failed if isinstance(error, PeerLost)]
        return PeerLost(said, in_doubt=any(error.in_doubt for error in lost)) if lost else HandoverFailed(said)

    def cancel(self, error: BaseException) -> None:
        """As Session.cancel, of all."""
        for session in self._sessions:
            session.cancel(error)

    # All

    def close(self) -> None:
        """As WeightSender.close: buckets are given back once all receivers have let go of them."""
        first = self.ends[0]
        if first._buffers:
            for end in self.ends:
                end._say_bye()
            until = time.monotonic() + GOODBYE
            for end in self.ends:
                if CUDA in first._buffers:
                    end._await_gone(until)
        for end in self.ends:
            end._drop_socket(linger=1000)
        first._free()

    def name(self, number: int) -> str:
        end, many = self.ends[number], len(self.ends)
        process = "" if end._receiver is None else f", {end._receiver.name}"
        return f"receiver {number + 1} of {many} ({end.address}{process})"

    def _post(self, message: m.Message) -> None:
        data = m.encode(message)
        for end in self.ends:
            end._socket.send(data)

    def _each(self, function: Callable[[Session], T]) -> list[T]:
        """Of every session, whatever one says: each has answered then, and can be told that the set is none. The first
        that fails is raised."""
        found, failed = [], []
        for number, session in enumerate(self._sessions):
            try:
                with self._named(number):
                    found.append(function(session))
            except HandoverFailed as error:
                failed.append(error)
        if failed:
            raise failed[0]
        return found

    @contextlib.contextmanager
    def _named(self, number: int) -> Iterator[None]:
        try:
            yield
        except HandoverFailed as error:
            if len(self.ends) == 1:
                raise
            raise self._of(number, error) from error

    def _of(self, number: int, error: HandoverFailed) -> HandoverFailed:
        """What one of several says."""
        if len(self.ends) == 1:
            return error
        said = f"weights: {self.name(number)}: {str(error).removeprefix('weights: ')}"
        if isinstance(error, PeerLost):
            return PeerLost(said, in_doubt=error.in_doubt)
        return HandoverFailed(said)


class _Behind(NamedTuple):
    """Of several receivers those that are waited for, as one: see protocol.Peers."""

    fanout: Fanout

    @property
    def alive(self) -> bool:
        return not self.fanout.dead

    @property
    def name(self) -> str:
        return " and ".join(map(self.fanout.name, self.fanout.dead or self.fanout.behind)) or "the trainer"


def _difference(got: Manifest, expected: Manifest) -> str:
    name = next(name for name in (*expected, *got) if got.get(name) != expected.get(name))
    said = (" ".join(map(str, reversed(of[name]))) if name in of else "none" for of in (got, expected))
    return "{}: got {}, expected {}".format(name, *said)
