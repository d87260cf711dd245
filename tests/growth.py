"""What a process holds, round after round, and what of it goes on growing.

What is met for the first time costs memory once: on an H200 each decision of admission has left 0.8 MiB in the host's
heap, with the kernels that were tried for it, and new sizes of steps go on coming for minutes. A leak costs every time.
So what is judged is what rounds add that have decided nothing new, by the median slope over all pairs of them: a few
late first times of other kinds do not move it, and what each round leaves behind does, or each third one. Our caches of
so many entries at most are emptied before each look: they fill while there is something new, and end.
"""

import ctypes
import functools
import gc
import itertools
import statistics
import threading
from collections import Counter
from pathlib import Path
from types import CellType, FrameType, ModuleType

import numpy as np
import torch

from vexact_ops._core import admit

FEWEST = 6  # rounds that have decided nothing new, and say something
PER_ROUND = {"rss_mib": 0.25, "objects": 50, "cuda_mib": 0.05}  # most that the slope may be
ALTOGETHER = {"rss_mib": 8, "objects": 2000, "cuda_mib": 1}  # and all of these rounds may add
SHOWN = 12


def slope(values: list[float]) -> float:
    """A round: the median over all pairs of rounds (Theil and Sen)."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)


class Growth:
    """Of this process.

    rounds   what was held after each of them
    """

    def __init__(self, device: str):
        self.device, self.rounds = device, []
        self._judged_from: int | None = None
        self._types: Counter = Counter()  # after the last round
        self._mapped: Counter = Counter()  # the same, KiB of memory by what is mapped there
        self._then: tuple = Counter(), Counter()  # both, where judging began
        self._ids = self._lengths = np.empty(0, dtype=np.int64)

    def look(self, judged: bool) -> dict:
        """After a round. judged: from here on nothing new is met."""
        _empty_bounded_caches()
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        found = _resident() | {"objects": len(gc.get_objects())}
        found["decisions"] = len(admit.decisions())
        found["threads"] = sum(thread.name.startswith("vexact") for thread in threading.enumerate())
        if self.device == "cuda":
            torch.cuda.synchronize()
            found["cuda_mib"] = round(torch.cuda.memory_allocated() / 2**20, 2)
            found["pinned_mib"] = round(torch.cuda.host_memory_stats().get("allocated_bytes.current", 0) / 2**20, 2)
        types, mapped = Counter(_name(type(o)) for o in gc.get_objects()), _mapped()
        if self._judged_from is None:  # each time anew, so that all looks take as much themselves
            self._then, (self._ids, self._lengths) = (types, mapped), _containers()
            self._judged_from = len(self.rounds) if judged else None
        new = {"new": types - self._types, "new_kib": mapped - self._mapped} if self._types else {}
        self._types, self._mapped = types, mapped
        self.rounds.append(found | {name: dict(more.most_common(5)) for name, more in new.items()})
        return found

    def added(self, name: str) -> list[float]:
        """By each of the rounds that say something."""
        pairs = itertools.pairwise(self.rounds[self._judged_from :] if self._judged_from is not None else ())
        return [two[name] - one[name] for one, two in pairs if one["decisions"] == two["decisions"]]

    def per_round(self) -> dict[str, float]:
        """The slopes; nothing where the rounds are too few."""
        sums = {name: [0.0, *itertools.accumulate(self.added(name))] for name in PER_ROUND if name in self._last}
        return {name: round(slope(values), 3) for name, values in sums.items() if len(values) > FEWEST}

    def total(self) -> dict[str, float]:
        """What that makes in all of these rounds."""
        return {name: round(value * len(self.added(name)), 2) for name, value in self.per_round().items()}

    @property
    def _last(self) -> dict:
        return self.rounds[-1] if self.rounds else {}

    def failures(self) -> list[str]:
        total, count = self.total(), len(self.added("decisions"))
        return [
            f"{name} grows by {each:g} a round, {total[name]:g} in {count} rounds that decided nothing new, expected "
            f"at most {PER_ROUND[name]} and {ALTOGETHER[name]}"
            for name, each in self.per_round().items()
            if each > PER_ROUND[name] or total[name] > ALTOGETHER[name]
        ]

    def what(self) -> dict:
        """Since judging began: types of objects with how many more there are, containers that hold more, and KiB."""
        if self._judged_from is None:
            return {}
        types, mapped = self._types - self._then[0], self._mapped - self._then[1]
        found = {"types": dict(types.most_common(SHOWN)), "kib": dict(mapped.most_common(SHOWN))}
        return found | {"containers": self._longer()}

    def _longer(self) -> dict[str, int]:
        ids, lengths = _containers()
        known, now, before = np.intersect1d(self._ids, ids, return_indices=True)
        added = lengths[before] - self._lengths[now]
        ours = {id(o) for o in (self._types, self._mapped, self.rounds)}  # new ones where others were
        longest = {int(known[i]): int(added[i]) for i in np.argsort(-added)[:SHOWN] if added[i] > 0}
        objects, found = gc.get_objects(), Counter()
        there = {id(o): o for o in objects if id(o) in longest and id(o) not in ours}
        for i, o in there.items():
            found[_place(o, {id(objects), id(there)})] += longest[i]
        return dict(found.most_common())


def _name(kind: type) -> str:
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _resident() -> dict[str, float]:
    """In all, and what of it are mapped files, a library's code among them."""
    with open("/proc/self/status") as lines:
        held = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("VmRSS", "Rss"))}
    found = {"rss_mib": round(held["VmRSS"], 1)}
    if "RssFile" in held:
        found["files_mib"] = round(held["RssFile"], 1)
    return found


def _mapped() -> Counter:
    """KiB of resident memory, by the file that is mapped there, or the word for what is none."""
    found, name = Counter(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split(maxsplit=5)
        if not words[0].endswith(":"):
            name = Path(words[5]).name if len(words) > 5 else "anonymous"
        elif words[0] == "Rss:":
            found[name] += int(words[1])
    return found


def _empty_bounded_caches() -> None:
    for o in gc.get_objects():
        ours = type(o) is functools._lru_cache_wrapper and (o.__module__ or "").startswith("vexact")
        if ours and o.cache_parameters()["maxsize"] is not None:
            o.cache_clear()


def _containers() -> tuple[np.ndarray, np.ndarray]:
    """Where they are, and how much is in each."""
    kinds = dict, list, set
    sizes = [(id(o), len(o)) for o in gc.get_objects() if issubclass(type(o), kinds) and type(o).__len__ in _LENGTHS]
    found = np.array(sizes, dtype=np.int64).reshape(-1, 2)
    return found[:, 0].copy(), found[:, 1].copy()


_LENGTHS = dict.__len__, list.__len__, set.__len__


def _place(container: object, skipped: set[int]) -> str:
    """Who holds it."""
    for holder in gc.get_referrers(container):
        if id(holder) in skipped or isinstance(holder, FrameType | CellType | list | tuple):
            continue
        if isinstance(holder, functools._lru_cache_wrapper):
            return f"{holder.__module__}.{holder.__qualname__}"
        if not isinstance(holder, dict):
            return f"{_name(type(container))} of {_name(type(holder))}"
        return f"{_owner(holder)}.{_key(holder, container)}"[:120]
    return f"{_name(type(container))} at {id(container):#x}"


def _key(holder: dict, container: object) -> object:
    for key, value in list(holder.items()):
        if value is container:
            return key
    return "?"


def _owner(attributes: dict) -> str:
    for o in gc.get_referrers(attributes):
        if isinstance(o, ModuleType) and vars(o) is attributes:
            return o.__name__
        if type(o).__dictoffset__ and vars(o) is attributes:
            return _name(type(o))
    return "dict"
