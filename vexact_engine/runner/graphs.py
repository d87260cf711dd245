"""CUDA graphs of forwards and draws: which sizes there are graphs of, and how they are made and given back.

A graph is recorded for a number of rows; a step with fewer is padded. Sizes are chosen by what they cost: one is split
where its time is more than a few percent above that of the next smaller one, until padding costs no more than that.
Nothing of this changes bits, for rows do not depend on their number or on their neighbours.
"""

import bisect
import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch

import vexact_ops as vx

from .buffers import Body, Head

if TYPE_CHECKING:
    from .saver import Region

Run = Callable[[], None]
_REPLAYS = 3  # that a time is the least of; the first one is of a graph that is not on the device yet


class Recorder(Protocol):
    """How work is recorded, and how long it takes.

    lasting  whether times are worth keeping for other processes
    """

    lasting: bool

    def record(self, run: Run, if_settled: bool = False) -> Run | None:
        """A function that does the same again, on what the same buffers hold then. if_settled: None where that would
        be by kernels for want of others, which have not been verified yet."""

    def seconds(self, run: Run, replays: int = _REPLAYS) -> float:
        """The least of so many."""

    def session(self, collect: bool = True) -> contextlib.AbstractContextManager:
        """Recording and timing is done in one. collect: what is garbage goes before."""

    def release(self) -> None:
        """The memory of all that was recorded, once nobody holds any of it."""


class CudaRecorder:
    """CUDA graphs on the current stream, which must not be the default one. They share their memory: they are replayed
    one after another, and leave what others need in memory of the buffers.

    region   that this memory is to lie in
    """

    lasting = True

    def __init__(self, device: torch.device, region: "Region | None" = None):
        self.device, self._region = device, region
        self._begin()

    def _begin(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        if self._region is not None:
            self._region.start(self._pool)

    @contextlib.contextmanager
    def session(self, collect: bool = True) -> Iterator[None]:
        was_on = gc.isenabled()
        if collect:
            gc.collect()
        gc.disable()  # what is collected during a capture may be of CUDA, and break it
        try:
            torch.cuda.current_stream(self.device).synchronize()
            yield
        finally:
            if was_on:
                gc.enable()

    def record(self, run: Run, if_settled: bool = False) -> Run | None:
        run = run if self._region is None else self._region.recording(run)
        return vx.cuda_graph(run, pool=self._pool, if_settled=if_settled)

    def seconds(self, run: Run, replays: int = _REPLAYS) -> float:
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return min(times)

    def release(self) -> None:
        torch.cuda.current_stream(self.device).synchronize()
        self._begin()
        torch.cuda.empty_cache()


class HostRecorder:
    """The same on a CPU, where a function is its own recording: for tests of padding and sizes."""

    lasting = False

    def session(self, collect: bool = True) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    def record(self, run: Run, if_settled: bool = False) -> Run | None:
        return run

    def seconds(self, run: Run, replays: int = _REPLAYS) -> float:
        begin = time.perf_counter()
        run()
        return time.perf_counter() - begin

    def release(self) -> None:
        pass


def recorder(device: torch.device, region: "Region | None" = None) -> Recorder | None:
    """What records on this device; None where nothing is."""
    return CudaRecorder(device, region) if device.type == "cuda" else None


class Recorded(NamedTuple):
    """A forward, a draw, or one after the other."""

    body: Body | None
    head: Head | None
    replay: Run


class Ladder:
    """Recordings by their number of rows, some of which may be made only once they are wanted."""

    def __init__(self):
        self.sizes: list[int] = []
        self._recorded: dict[int, Recorded] = {}
        self._later: dict[int, tuple[Body | None, Callable[[], Recorded | None]]] = {}

    def put(self, size: int, recorded: Recorded) -> None:
        self._recorded[size] = recorded
        self._named(size)

    def put_later(self, size: int, body: Body | None, record: Callable[[], Recorded | None]) -> None:
        """record: called when this size is first wanted. None: it could not be, and there is none of this size."""
        self._later[size] = body, record
        self._named(size)

    def _named(self, size: int) -> None:
        if size not in self.sizes:
            bisect.insort(self.sizes, size)

    def size(self, rows: int) -> int | None:
        """The smallest that holds so many rows."""
        at = bisect.bisect_left(self.sizes, rows)
        return self.sizes[at] if at < len(self.sizes) else None

    def fit(self, rows: int) -> Recorded | None:
        """Of that size."""
        size = self.size(rows)
        if size in self._later:
            _, record = self._later.pop(size)
            recorded = record()
            if recorded is None:
                self.sizes.remove(size)
                return None
            self._recorded[size] = recorded
        return None if size is None else self._recorded[size]

    def body(self, size: int) -> Body | None:
        """Of one of the sizes."""
        return self._later[size][0] if size in self._later else self._recorded[size].body

    def keep(self, sizes: set[int]) -> None:
        self.sizes = [size for size in self.sizes if size in sizes]
        self._recorded = {size: self._recorded[size] for size in self.sizes}


def choose(seconds: Callable[[int], float], most: int, tolerance: float) -> list[int]:
    """Sizes from 1 to `most`, ascending: a step that is padded to the next of them costs at most about `tolerance`
    more, its share of the time. `seconds` is asked once for each size that is looked at, the largest first. A step of
    one row, which is the answer that somebody waits for, is padded only where that costs nothing."""
    times: dict[int, float] = {}

    def at(size: int) -> float:
        if size not in times:
            times[size] = seconds(size)
        return times[size]

    def split(low: int, high: int) -> None:
        if high - low <= max(1, high // 16) or at(high) <= at(low) * (1 + tolerance):
            return
        middle = (low + high) // 2
        if high - low >= 32:
            middle -= middle % 8  # where tiles end
        at(middle)
        split(middle, high)
        split(low, middle)

    at(most)
    if most > 1:
        split(1, most)
        at(1)
    kept = [most]
    for size in sorted(times, reverse=True)[1:]:
        if times[kept[-1]] > times[size] * (1 + (tolerance / 2 if size > 1 else 0)):
            kept.append(size)
    return kept[::-1]
