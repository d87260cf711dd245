"""A node's part in an update of the weights that a sender on each node brings: the receiver that its sender talks to,
in the first of its stages' processes. What the receiver decides alone elsewhere, the engine's process decides here for
all nodes (coordinator.py): that a set begins, that it is whole, that it is given up."""

import contextlib
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from ..errors import EngineClosed, HandoverFailed, PeerLost, StageDied
from ..handover.messages import Bucket, Offer
from ..handover.session import Reading, SetEnded
from .line import Line

if TYPE_CHECKING:
    from ..handover.receiver import WeightReceiver

_END = 2.0  # seconds that a receiver may take to end before its process does


class _Taken(Reading):
    """Of a bucket that stages are told of: done once they have answered."""

    def __init__(self, answer: Future):
        super().__init__()
        self._answer = answer

    @property
    def done(self) -> bool:
        return self._answer.done()

    def wait(self) -> None:
        self._answer.result()


class Participant:
    """To its WeightReceiver it is the engine and the intake of that. What it is asked, by name, is a method `do_`.

    broken   why the set that is under way, or waited for, is none any more, here or on another node
    """

    gpu = ""  # each stage has its own

    def __init__(self, line: Line):
        self._line, self.broken, self.device = line, "", ""
        self._receiver: WeightReceiver | None = None
        self._receives = ThreadPoolExecutor(1, "vexact-weights")
        self._manifest: dict[str, tuple[tuple[int, ...], str]] = {}
        self._numerics: dict[str, Any] = {}
        self._number, self.weight_version = -1, 0
        line.serve(self, self._asked)

    def close(self) -> None:
        with contextlib.suppress(Exception):
            self.do_close().result(_END)

    def _asked(self, what: str, each: Sequence[dict[str, Any]]) -> list[Any]:
        return [getattr(self, f"do_{what}")(**arguments) for arguments in each]

    def do_start(self, mode: str, timeout: float, device: str, manifest: dict[str, tuple[tuple[int, ...], str]]) -> str:
        """Makes a receiver: its address."""
        from ..handover.receiver import WeightReceiver  # it needs ZeroMQ

        self.device, self._manifest = device, manifest
        self._receiver = WeightReceiver(self, mode=mode, timeout=timeout)
        return self._receiver.address

    def do_receive(self, number: int, numerics: dict[str, Any], weight_version: int) -> Future:
        """One set. The one before has come to its end."""
        self._number, self._numerics, self.weight_version = number, numerics, weight_version
        self.broken = ""
        return self._receives.submit(self._receiver.receive)

    def do_stop(self, number: int, why: str) -> None:
        if number == self._number:
            self.broken = why

    def do_ping(self) -> None: ...

    def do_close(self) -> Future:
        self.broken = self.broken or "weights: the receiver is closed"
        receiver, self._receiver = self._receiver, None
        return self._receives.submit(lambda: receiver is None or receiver.close())

    # The receiver's engine

    def numerics(self) -> dict[str, Any]:
        return self._numerics

    def intake(self, mode: str, staging: object) -> "Participant":
        """The mode is said to the sender, and kept by the engine."""
        return self

    # Its intake

    def manifest(self) -> dict[str, tuple[tuple[int, ...], str]]:
        return self._manifest

    def begin(self, numerics: Mapping[str, object], version: int | None = None) -> None:
        self._ask("begin", numerics=dict(numerics), version=version)

    def open(self, offer: Offer) -> None:
        try:
            reason = self._ask("open", offer=offer)
        except HandoverFailed as error:
            raise SetEnded(str(error)) from error
        if reason is not None:
            raise HandoverFailed(reason)

    def take(self, bucket: Bucket) -> Reading:
        return _Taken(self._line.ask("take", bucket=bucket))

    def check(self) -> None:
        self._ask("check")

    def finish(self) -> int:
        return self._ask("finish")

    def abandon(self, why: BaseException) -> bool:
        """Where the engine is gone its weights are, too."""
        with contextlib.suppress(ConnectionError):
            return self._ask("abandon", why=str(why), is_lost=isinstance(why, PeerLost))
        return True

    def let_go(self) -> None:
        with contextlib.suppress(EngineClosed, StageDied, ConnectionError):  # then it has
            self._ask("let_go")

    def _ask(self, what: str, **arguments: Any) -> Any:
        return self._line.ask(what, **arguments).result()
