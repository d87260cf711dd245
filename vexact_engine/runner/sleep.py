"""Memory that an engine gives back while it sleeps, and takes again when it wakes.

A tensor's storage is emptied and filled again, so that the tensor and all its views (q, k and v of a joined weight)
stay the objects that they are, whoever holds them. Only their addresses are others afterwards. Where torch_memory_saver
can be used (saver.py) storages stay as they are, and the memory behind their addresses goes and comes: CUDA graphs
outlive that. Reading a tensor whose memory is not there ends the process: nobody may touch the engine's model while its
weights are asleep.
"""

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .runner import Runner
    from .saver import Region

TAGS = ("weights", "kv_cache", "graphs")
ASLEEP = 'update_weights: the weights are asleep: wake_up(["weights"]) comes first'
_SLAB = 256 << 20  # bytes of host memory at once: torch rounds pinned memory up to a power of two


def named_tags(method: str, given: Iterable[str] | None) -> list[str]:
    """In the order of TAGS. TypeError or ValueError for what cannot be meant."""
    if given is None:
        return list(TAGS)
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{method}: tags: got {given!r}, expected a list of {', '.join(TAGS)}")
    given = list(given)
    unknown = [tag for tag in given if tag not in TAGS]
    if unknown:
        raise ValueError(f"{method}: tags: got {unknown[0]!r}, expected some of {', '.join(TAGS)}")
    return [tag for tag in TAGS if tag in given]


def check_level(level: int) -> None:
    if isinstance(level, bool) or level not in (1, 2):
        raise ValueError(f"sleep: level: got {level!r}, expected 1 or 2")


class Storages:
    """The memory of some tensors, each storage once. They lie on one device.

    region   that all of their memory lies in, and nothing else: it is paused, and storages are not emptied
    nbytes   that they have while they are not asleep; without tensors, the region
    """

    def __init__(self, tensors: Iterable[Tensor] = (), region: "Region | None" = None):
        found = {t.untyped_storage()._cdata: t.untyped_storage() for t in tensors}
        self._storages = [storage for storage in found.values() if storage.nbytes()]
        self._sizes = [storage.nbytes() for storage in self._storages]
        self._host: list[Tensor] | None = None  # slabs with the bytes of all of them, one after the other
        self._empty, self._region = False, region
        self.nbytes = sum(self._sizes) if self._sizes or region is None else region.nbytes

    def give_back(self, keep: bool) -> None:
        """Empty them. With `keep` their bytes wait in host memory, pinned where a GPU copies them."""
        if keep and self.nbytes:
            self._host = self._slabs()
            for part, slab in self._parts(self._host):
                slab.copy_(part, non_blocking=True)
            self._wait()
        if self._region is not None:
            self._region.pause()
        else:
            for storage in self._storages:
                storage.resize_(0)
        self._empty = True

    def forget(self) -> None:
        """Of those that are empty: what was kept is not wanted any more."""
        self._host = None

    def take(self, zero: bool = True) -> None:
        """Have memory again, with the bytes that were kept; zeros where none were, or whatever lies there. All of them
        get it, or none where there is not enough, and what was kept stays. Again does nothing."""
        if not self._empty:
            return
        if self._region is not None:
            self._region.resume()
        else:
            self._resize()
        self._empty = False
        if self._host is not None:
            for part, slab in self._parts(self._host):
                part.copy_(slab, non_blocking=True)
            self._wait()
            self._host = None
        elif zero:
            for storage in self._storages:
                _bytes(storage, 0, storage.nbytes()).zero_()

    def _resize(self) -> None:
        try:
            for storage, size in zip(self._storages, self._sizes):
                storage.resize_(size)
        except BaseException:
            for storage in self._storages:
                storage.resize_(0)
            raise

    def _slabs(self) -> list[Tensor]:
        pinned = self._storages[0].device.type == "cuda"
        sizes = [min(_SLAB, self.nbytes - at) for at in range(0, self.nbytes, _SLAB)]
        return [torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=pinned) for size in sizes]

    def _parts(self, slabs: list[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of a storage, and as many of a slab that are theirs."""
        at = 0
        for storage, size in zip(self._storages, self._sizes):
            begin = 0
            while begin < size:
                slab, offset = slabs[at // _SLAB], at % _SLAB
                count = min(size - begin, len(slab) - offset)
                yield _bytes(storage, begin, count), slab[offset : offset + count]
                begin, at = begin + count, at + count

    def _wait(self) -> None:
        if self._storages[0].device.type == "cuda":
            torch.cuda.current_stream(self._storages[0].device).synchronize()


def _bytes(storage: torch.UntypedStorage, begin: int, count: int) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage, begin, (count,), (1,))


@torch.no_grad()
def own(tensors: Iterable[Tensor]) -> bool:
    """Whether some of them lay in memory that cannot be given back (a mapped file, shared memory), and lie in some of
    their own now."""
    moved = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and not storage.resizable():
            copied = moved.get(storage._cdata)
            if copied is None:
                copied = moved[storage._cdata] = storage.clone(), storage  # which is kept, so that none takes its place
            there = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.data = there.set_(copied[0], tensor.storage_offset(), tensor.shape, tensor.stride())
    return bool(moved)


def weights_and_buffers(model: torch.nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters, and what an update need not bring: buffers, with parameters that share their memory."""
    buffers = [b for b in model.buffers() if not b.is_meta]
    kept = {b.untyped_storage()._cdata for b in buffers}
    parameters = [p for p in model.parameters() if not p.is_meta]
    shared = [p for p in parameters if p.untyped_storage()._cdata in kept]
    return [p for p in parameters if p.untyped_storage()._cdata not in kept], buffers + shared


class Memory:
    """The memory of a runner, by tag, and which of it is asleep: its model's, of which a stage has some layers, and its
    caches'. Used in the runner's thread, with nothing under way on the device.

    asleep   tag -> the level that it sleeps at
    """

    def __init__(self, runner: "Runner"):
        self.runner, self._device = runner, runner.device
        # What "host memory" means to a CPU: there is nothing to be moved.
        self._on_host = self._device.type == "cpu"
        self._asleep: dict[str, tuple[int, list[Storages]]] = {}

    @property
    def asleep(self) -> dict[str, int]:
        return {tag: level for tag, (level, _) in self._asleep.items()}

    def will_empty_weights(self, level: int, tags: Iterable[str]) -> bool:
        return "weights" in tags and not self._asleep.get("weights", (0, []))[1] and not (level == 1 and self._on_host)

    def unsettled(self) -> bool:
        """Whether some weights lie in memory that cannot be given back as it is: the forward has to be made again, of
        where they lie then."""
        if self.runner.regions:
            return self.runner.misplaced()
        return own([*self.runner.model.parameters(), *self.runner.model.buffers()])

    def sleep(self, level: int, tags: Iterable[str]) -> dict[str, int]:
        """Bytes given back, by tag. What is asleep already stays so, but for weights that were kept and are dropped.
        Graphs have addresses of the others in them: where those change they go with them, before them."""
        given, chosen = {}, [tag for tag in TAGS if tag in tags and tag != "graphs"]
        if "graphs" in tags or (chosen and not self._graphs_stay):
            chosen = ["graphs", *chosen]
        for tag in chosen:
            before = self.held()
            if tag not in self._asleep:
                parts = getattr(self, f"_sleep_{tag}")(level)
                self._asleep[tag] = level, parts
            elif tag == "weights" and level > self._asleep[tag][0]:
                parts = self._asleep[tag][1] or self._sleep_weights(level)
                parts[0].forget()
                self._asleep[tag] = level, parts
            else:
                parts = []
            known = sum(part.nbytes for part in parts)
            given[tag] = known if before is None else before - self.held()
        return given

    def wake_up(self, tags: Iterable[str]) -> dict[str, int]:
        """Bytes taken again, by tag. MemoryError where there is no room: that tag sleeps on. Graphs come with the last
        of the others, and are made then where they are gone."""
        taken = self.take(tags)
        if taken:
            self.record(taken)
        return taken

    def take(self, tags: Iterable[str]) -> dict[str, int]:
        """`wake_up` but for graphs that are gone."""
        taken = {}
        woken = self._asleep.keys() & tags
        if woken and self._asleep.keys() - woken <= {"graphs"}:
            woken.add("graphs")
        elif self._asleep.keys() - woken:
            woken.discard("graphs")
        for tag in [tag for tag in TAGS if tag in woken]:
            if tag not in self._asleep:
                continue
            before, (_, parts) = self.held(), self._asleep[tag]
            known = sum(part.nbytes for part in parts)
            try:
                for part in parts:
                    part.take(zero=tag == "weights" or not self._on_host)
            except (RuntimeError, MemoryError) as error:  # torch's own is a RuntimeError
                raise MemoryError(f"wake_up: no memory for {tag}, which takes {known >> 20} MiB: {error}") from error
            del self._asleep[tag]
            taken[tag] = known if before is None else self.held() - before
        return taken

    def record(self, taken: dict[str, int]) -> None:
        """Make graphs that are gone, once nothing is asleep any more; their bytes are added."""
        if not self._asleep and not self.runner.graphs.captured:
            before = self.held()
            try:
                self.runner.graphs.capture()
            except torch.OutOfMemoryError as error:
                self.sleep(1, ["graphs"])
                raise MemoryError(f"wake_up: no memory for graphs: {error}") from error
            if before is not None:
                taken["graphs"] = self.held() - before

    def _sleep_weights(self, level: int) -> list[Storages]:
        """At level 2 what an update need not bring, buffers, is kept all the same. All of them go, or none: where the
        host has no memory for what is kept."""
        if not self.will_empty_weights(level, ["weights"]):
            return []
        regions = self.runner.regions
        weights, buffers = weights_and_buffers(self.runner.model)
        parts = [Storages(weights, regions.get("weights")), Storages(buffers, regions.get("buffers"))]
        try:
            parts[1].give_back(keep=True)
            parts[0].give_back(keep=level == 1)
        except BaseException:
            try:
                parts[1].take()
            except BaseException:  # others took the room meanwhile: asleep, so that waking up tries again
                self._asleep["weights"] = level, parts
                raise
            raise
        return parts

    def _sleep_kv_cache(self, level: int) -> list[Storages]:
        part = Storages(self.runner.buffers.caches.tensors(), self.runner.regions.get("kv_cache"))
        part.give_back(keep=False)
        return [part]

    def _sleep_graphs(self, level: int) -> list[Storages]:
        if not self._graphs_stay:
            self.runner.graphs.release()
            return []
        part = Storages(region=self.runner.regions["graphs"])
        part.give_back(keep=False)
        return [part]

    @property
    def _graphs_stay(self) -> bool:
        """Whether graphs stay valid while memory is given back and taken again."""
        return bool(self.runner.regions) and self.runner.graphs.captured

    def held(self) -> int | None:
        """Bytes of the device that this process holds, as torch counts, which knows nothing of regions that are paused;
        nobody does for a CPU."""
        if self._on_host:
            return None
        torch.cuda.empty_cache()
        paused = sum(region.nbytes for region in self.runner.regions.values() if region.paused)
        return torch.cuda.memory_reserved(self._device) - paused


class Both:
    """The memory of a runner, and that of one that drafts beside it. An update need not bring the weights that draft:
    they are kept at every level. Bytes are those of both."""

    def __init__(self, own: Memory, drafts: Memory):
        self._own, self._drafts = own, drafts
        self.will_empty_weights, self.unsettled = own.will_empty_weights, own.unsettled

    @property
    def asleep(self) -> dict[str, int]:
        return {**self._drafts.asleep, **self._own.asleep}

    def sleep(self, level: int, tags: Iterable[str]) -> dict[str, int]:
        if self._drafts.will_empty_weights(1, tags) and self._drafts.unsettled():
            self._drafts.runner.make_forward()
        return _sum(self._own.sleep(level, tags), self._drafts.sleep(1, tags))

    def wake_up(self, tags: Iterable[str]) -> dict[str, int]:
        """A tag of which one half sleeps on is asleep. Graphs of each are made with the memory of both."""
        taken = self._own.take(tags), self._drafts.take(tags)
        for memory, own in zip((self._own, self._drafts), taken):
            if own:
                memory.record(own)
        return _sum(*taken)


def memory_of(runner: "Runner") -> Memory | Both:
    """With that of what drafts beside it."""
    return Memory(runner) if runner.beside is None else Both(Memory(runner), Memory(runner.beside))


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return {tag: one.get(tag, 0) + other.get(tag, 0) for tag in TAGS if tag in one or tag in other}
