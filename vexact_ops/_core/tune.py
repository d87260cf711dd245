"""Kernels that are chosen again where they stand.

A race sees a product behind one short kernel. In a step it begins while the kernel before it still holds the
multiprocessors, and the one after it while it does itself: kernels that are alike in a race differ there by up to five
per cent of the whole step. So the few best of a race run in the step, in turns: a chip that warms under them slows down
by more than they differ. All of them were admitted, so nothing of this changes bits.
"""

import contextlib
import hashlib
import json
import random
import statistics
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from . import admit, choices

GAIN = 0.002  # the share of the step's time that a rival has to win
LEAST, MOST = 3, 50  # rounds, in each of which everybody has two turns
ALL, LAST = 0.1, 0.3  # seconds after which there are no more rounds: of all kernels, of the last two
METHOD = "in turns"  # choices that were kept by another one are not read

Replay = Callable[[], float]


class NotedCall(Protocol):
    """A call of an op, as its room notes it.

    key, device   of its class: what the room chooses one kernel for
    layout        how its operands lie: of calls that are alike in all three the first one stands for all
    """

    key: str
    device: torch.device
    layout: Hashable

    def names(self) -> list[str]:
        """The kernel that was chosen, then the rivals that are worth trying; none where this was done before."""

    def source(self) -> str:
        """A digest of what these kernels are."""

    def use(self, name: str) -> None:
        """Have the class computed by this kernel from now on."""

    def forget(self) -> None:
        """Forget `use`: the kernel that the race chose serves again."""


noted: dict[tuple, NotedCall] | None = None  # the calls that are made, while somebody wants to know


def note(call: NotedCall) -> None:
    noted.setdefault((call.key, call.device, call.layout), call)


@contextlib.contextmanager
def noting() -> Iterator[dict[tuple, NotedCall]]:
    global noted
    before, noted = noted, {}
    try:
        yield noted
    finally:
        noted = before


@dataclass(frozen=True)
class Tuned:
    """A class of products, the kernel that its race had chosen, and the one that serves it from now on."""

    product: str
    raced: str
    chosen: str


def tune(run: Callable[[], object], capture: Callable[[], Replay], about: str = "") -> list[Tuned]:
    """Choose the kernels of `run`'s products by what they make of the time of the whole of it.

    run      a step, as it is captured and replayed later: some layers of a model, on tensors that stay where they are.
             It is called twice, to see what products it has
    capture  captures `run` again, and returns a function that replays it once and gives the seconds. For a class of
             products there is one of each kernel that is worth trying, all at once, and they are called in turns
    about    what else decides such times (the model's other ops, sizes of rows): choices are kept on disk under it and
             the products' sizes, so that a later process does not time again
    returns  one entry for each class of products that was decided now: not of those that were before

    For the rest of the process every product of such a class takes that kernel, in `run` or not. Graphs that were
    captured before keep theirs. Bits: none change, for every kernel here was admitted. Where products have one kernel
    (on a CPU, in fp32) nothing is done. What `capture` or a replay raises is passed on: classes that were decided
    before keep what was chosen, that one and the others what their races chose.

    >>> vx.tune(lambda: torch.ones(2) + 1, capture=lambda: lambda: 1.0)  # no products
    []
    """
    if not torch.cuda.is_available():
        return []
    run()  # what is verified when it is first met has products of its own
    with noting() as calls:
        run()
    classes: dict[str, _Class] = {}
    for call in calls.values():
        classes.setdefault(f"{call.key} {call.device}", _Class()).append(call)
    rivals = {key: (one, names) for key, one in classes.items() if len(names := one[0].names()) > 1}
    if not rivals:
        return []
    path = _path(rivals, about)
    kept = _read(path, {key: names for key, (_, names) in rivals.items()})
    tuned = []
    for key, (one, names) in rivals.items():
        chosen = kept[key] if kept else _fastest(one, names, capture)
        one.use(chosen)
        choices.record(choices.KERNELS, one[0].key, chosen)
        tuned.append(Tuned(one[0].key, names[0], chosen))
    if kept is None:
        chosen = {key: one.chosen for key, one in zip(rivals, tuned)}
        admit.store(path, json.dumps({"about": about, "chosen": chosen}))
    return tuned


class _Class(list):
    """The calls of one class."""

    def use(self, name: str) -> None:
        for call in self:
            call.use(name)

    def forget(self) -> None:
        for call in self:
            call.forget()


def _fastest(one: _Class, names: list[str], capture: Callable[[], Replay]) -> str:
    raced, replays = names[0], {}
    try:
        for name in names:
            one.use(name)
            replays[name] = capture()
            replays[name]()  # a graph's first replay uploads it
        shares = _shares(replays, ALL)
        best = min(names, key=shares.get)
        if shares[best] < 1 - GAIN / 2:
            shares = _shares({name: replays[name] for name in (raced, best)}, LAST)
        return best if shares[best] < 1 - GAIN else raced
    except BaseException:
        one.use(raced)
        one.forget()
        raise


def _shares(replays: dict[str, Replay], seconds: float) -> dict[str, float]:
    """The time of each as a share of the first one's: the median of rounds.

    In a round all have their turns there and back, so that clocks which rise or fall meanwhile do so for all alike; and
    in an order of its own, for a kernel that takes much power slows down whoever comes after it.
    """
    names, orders, spent = list(replays), random.Random(0), 0.0
    shares = {name: [] for name in names}
    for done in range(MOST):
        if done >= LEAST and spent >= seconds:
            break
        order, took = orders.sample(names, len(names)), dict.fromkeys(names, 0.0)
        for name in order + order[::-1]:
            took[name] += replays[name]()
        for name in names:
            shares[name].append(took[name] / took[names[0]])
        spent += sum(took.values())
    return {name: statistics.median(rounds) for name, rounds in shares.items()}


def _path(rivals: dict[str, tuple[_Class, list[str]]], about: str) -> Path | None:
    of = [METHOD, about, [(key, sorted(names), one[0].source()) for key, (one, names) in rivals.items()]]
    name = hashlib.sha256(json.dumps(of).encode()).hexdigest()[:32]
    base, device = admit.folder("tuned"), next(iter(rivals.values()))[0][0].device
    return base / admit.machine(device) / f"{name}.json" if base else None


def _read(path: Path | None, rivals: dict[str, list[str]]) -> dict[str, str] | None:
    try:
        chosen = json.loads(path.read_text())["chosen"] if path else None
        sound = chosen and all(chosen[key] in names for key, names in rivals.items())
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return chosen if sound else None
