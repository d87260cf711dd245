"""Kernels that are chosen again where they stand.

A race sees a product behind one short kernel. In a step it begins while the kernel before it still holds the
multiprocessors, and the one after it while it does itself: kernels that are alike in a race differ there by up to five
per cent of the whole step. So the few best of a race run in the step, one after the other. All of them were admitted,
so nothing of this changes bits.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from . import admit

GAIN = 0.003  # the share of the step's time that a rival has to win


class Call(Protocol):
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
        """That `use` was called, once it is the kernel that was chosen."""


noted: dict[tuple, Call] | None = None  # the calls that are made, while somebody wants to know


def note(call: Call) -> None:
    noted.setdefault((call.key, call.device, call.layout), call)


@contextlib.contextmanager
def noting() -> Iterator[dict[tuple, Call]]:
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


def tune(run: Callable[[], object], seconds: Callable[[], float], about: str = "") -> list[Tuned]:
    """Choose the kernels of `run`'s products by what they make of the time of the whole of it.

    run      a step, as it is captured and replayed later: some layers of a model, on tensors that stay where they are.
             It is called twice, to see what products it has
    seconds  captures `run` again, and gives the time of a replay: of some, the least
    about    what else decides such times (the model's other ops, sizes of rows): choices are kept on disk under it and
             the products' sizes, so that a later process does not time again
    returns  one entry for each class of products that was decided now: not of those that were before

    For the rest of the process every product of such a class takes that kernel, in `run` or not. Graphs that were
    captured before keep theirs. Bits: none change, for every kernel here was admitted. Where products have one kernel
    (on a CPU, in fp32) nothing is done. What `seconds` raises is passed on: classes that were decided before keep what
    was chosen, that one and the others what their races chose.

    >>> vx.tune(lambda: torch.ones(2) + 1, seconds=lambda: 1.0)  # no products
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
        chosen = kept[key] if kept else _fastest(one, names, seconds)
        one.use(chosen)
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


def _fastest(one: _Class, names: list[str], seconds: Callable[[], float]) -> str:
    def with_(name: str) -> float:
        one.use(name)
        return seconds()

    try:
        times = {name: with_(name) for name in names}
        best = min(times, key=times.get)
        if best != names[0]:  # once more, turn about: clocks drift
            first, second = with_(names[0]), with_(best)
            if times[best] + second > (times[names[0]] + first) * (1 - GAIN):
                best = names[0]
        return best
    except BaseException:
        one.use(names[0])
        one.forget()
        raise


def _path(rivals: dict[str, tuple[_Class, list[str]]], about: str) -> Path | None:
    of = [about, [(key, sorted(names), one[0].source()) for key, (one, names) in rivals.items()]]
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
