"""Verify, then trust: which fast kernels may stand in for a room's canonical one, proven byte for byte on this machine.

A candidate is a kernel for one (op, dtype, static sizes) and a bucket of row counts. It is admitted once its output
has the bytes of the canonical kernel's on inputs that cancel to almost nothing, at several row counts of the bucket.
Among the admitted ones the fastest is kept. Verdicts live in memory, and on disk keyed by everything that could
change them: GPU, driver, torch, Triton and the extension's own bytes. A candidate that fails is never used.
"""

import contextlib
import functools
import hashlib
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from ..testing.bitwise import count_different
from . import native


@dataclass(frozen=True)
class Candidate:
    """A kernel that may be admitted. `run` computes the op on the room's arguments; its name tells it from others."""

    name: str
    run: Callable[..., Tensor]


@dataclass
class Verdict:
    """What the check of one candidate gave: `different` elements (None: it raised, `error` says what), its time."""

    candidate: str
    different: int | None
    us: float | None = None
    error: str | None = None

    @property
    def admitted(self) -> bool:
        return self.different == 0


def folder() -> Path:
    """Where verdicts are kept: $VEXACT_CACHE, or the user's cache directory."""
    if os.environ.get("VEXACT_CACHE"):
        return Path(os.environ["VEXACT_CACHE"]) / "admissions"
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "vexact" / "admissions"


@functools.cache
def machine(device_index: int) -> str:
    """A digest of all that could change a third party's bits or ours."""
    properties = torch.cuda.get_device_properties(device_index)
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None
    parts = [
        properties.name,
        torch.cuda.get_device_capability(device_index),
        torch.__version__,
        torch.version.cuda,
        torch._C._cuda_getDriverVersion() if hasattr(torch._C, "_cuda_getDriverVersion") else None,
        triton_version,
        native.fingerprint(),
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def fastest(verdicts: Sequence[Verdict]) -> str | None:
    """The name of the fastest admitted candidate (the first one where none was timed), None where none is admitted."""
    admitted = [v for v in verdicts if v.admitted]
    return min(admitted, key=lambda v: v.us if v.us is not None else 0.0).candidate if admitted else None


def _count(actual: Tensor, expected: Tensor) -> int:
    """count_different, at a fraction of its time and memory where nothing differs."""
    bits = torch.int16 if actual.element_size() == 2 else torch.int32
    alike = actual.shape == expected.shape and actual.dtype == expected.dtype and actual.element_size() in (2, 4)
    if alike and torch.equal(actual.contiguous().view(bits), expected.contiguous().view(bits)):
        return 0
    return count_different(actual, expected)


class Admissions:
    """The verdicts of one machine, in memory and in one JSON file. Safe for threads and for several processes."""

    def __init__(self, name: str, path: Path | None = None):
        self.path = path or folder() / f"{name}.json"
        self._lock = threading.RLock()
        self._verdicts: dict[str, list[Verdict]] | None = None

    def _load(self) -> dict[str, list[Verdict]]:
        if self._verdicts is None:
            try:
                stored = json.loads(self.path.read_text())
                self._verdicts = {key: [Verdict(**v) for v in verdicts] for key, verdicts in stored.items()}
            except OSError:  # none yet, or none to be had
                self._verdicts = {}
            except (ValueError, TypeError, AttributeError):  # not ours, or of another version: verify anew
                self._verdicts = {}
        return self._verdicts

    def report(self) -> dict[str, list[Verdict]]:
        """Everything verified so far, by key; refused candidates included."""
        with self._lock:
            return dict(self._load())

    def verdicts(self, key: str) -> list[Verdict] | None:
        """What was found for this key, or None where nothing has been verified."""
        with self._lock:
            return self._load().get(key)

    def choose(
        self,
        key: str,
        candidates: Sequence[Candidate],
        canonical: Callable[..., Tensor],
        cases: Callable[[], Sequence[tuple]],
        timed: Callable[[Callable[..., Tensor], tuple], float] | None = None,
        race: Callable[[Sequence[Candidate], tuple], Sequence[float]] | None = None,
    ) -> Candidate | None:
        """The fastest admitted candidate for this key, or None where the canonical kernel has to do it.

        cases   the arguments to verify on, several row counts of the bucket; the last one is what is timed
        timed   (function, arguments) -> microseconds; without it the first admitted candidate wins
        race    (admitted candidates, arguments) -> microseconds of each, timed turn about; instead of `timed`
        """
        with self._lock:
            verdicts = self._load().get(key)
            known = {c.name: c for c in candidates}
            if verdicts is None or {v.candidate for v in verdicts} != set(known):
                verdicts = self._verify(candidates, canonical, list(cases()) if candidates else [], timed, race)
                self._verdicts[key] = verdicts
                self._save()
            name = fastest(verdicts)
            return None if name is None else known[name]

    def _verify(self, candidates, canonical, cases, timed, race) -> list[Verdict]:
        expected = [canonical(*case) for case in cases]
        verdicts = []
        for candidate in candidates:
            try:
                different = sum(_count(candidate.run(*c), e) for c, e in zip(cases, expected))
            except torch.OutOfMemoryError:  # says nothing about the candidate
                raise
            except RuntimeError as error:  # a launch that this machine refuses is a verdict, not a crash
                verdicts.append(Verdict(candidate.name, None, error=str(error).splitlines()[0]))
                continue
            us = timed(candidate.run, cases[-1]) if timed and different == 0 else None
            verdicts.append(Verdict(candidate.name, different, us))
        if race:
            del expected
            admitted = [(c, v) for c, v in zip(candidates, verdicts) if v.admitted]
            times = race([c for c, _ in admitted], cases[-1]) if admitted else []
            for (_, verdict), us in zip(admitted, times):
                verdict.us = us
        return verdicts

    def _save(self) -> None:
        """Atomic; keys that another process has added meanwhile are kept. A read-only cache is no obstacle."""
        try:
            stored = json.loads(self.path.read_text()) if self.path.exists() else {}
        except (OSError, ValueError):
            stored = {}
        stored = stored if isinstance(stored, dict) else {}
        stored |= {key: [asdict(v) for v in verdicts] for key, verdicts in self._verdicts.items()}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self.path.parent, suffix=".tmp")
            with os.fdopen(handle, "w") as file:
                file.write(json.dumps(stored))  # not indented: that is ten times slower
            os.replace(temporary, self.path)
        except OSError:
            return


def time_on_gpu(run: Callable[..., Tensor], args: tuple, repeats: int = 7, calls: int = 10) -> float:
    """Median microseconds of one call in a CUDA graph."""
    run(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may go on using the GPU
        for _ in range(calls):
            run(*args)
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times)


def race_on_gpu(
    calls: Sequence[Sequence[Callable]], rounds: int = 5, finalists: int = 4, final: int = 10
) -> list[float]:
    """Median microseconds of a call for each competitor: a list of calls each, in a CUDA graph, replayed turn about.

    The few fastest of the first rounds run the final ones too, so that the choice between them is not left to chance.
    """
    graphs, stream = [], torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch.cuda.graph would hand all cached memory back to the driver first
        for competitor in calls:
            competitor[0]()  # what loads or sets up on its first call does it now
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                for call in competitor:
                    call()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # or this thread stays in a capture that forbids it to copy
                    graph.capture_end()
                raise
            graph.capture_end()
            graphs.append(graph)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def replay(which: int) -> float:
            start.record()
            graphs[which].replay()
            end.record()
            end.synchronize()
            return start.elapsed_time(end) * 1e3 / len(calls[which])

        everyone = range(len(calls))
        for which in everyone:
            replay(which)  # the first replay uploads the graph
        times = [[] for _ in everyone]
        for _ in range(rounds):
            for which in everyone:
                times[which].append(replay(which))
        for which in sorted(everyone, key=lambda i: statistics.median(times[i]))[:finalists] * final:
            times[which].append(replay(which))
    torch.cuda.current_stream().wait_stream(stream)
    return [statistics.median(found) for found in times]


@functools.cache
def admissions(device_index: int) -> Admissions:
    """The verdicts of this GPU with these libraries."""
    return Admissions(machine(device_index))
