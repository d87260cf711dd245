"""Where a step goes: a Chrome trace of a window of decode steps, the host's phases, the GPU's kernels, its idle time.

The engine is looked at from outside: while a window is open, its methods are wrapped; at any other time nothing is.
Where it computes in several processes each of them keeps a trace of its own, and the first one's is looked at.
"""

import gzip
import json
import re
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from vexact_engine import Engine

from .timing import Hooks

_RANGE = "vexact: "  # a phase's name in the trace
_COMMIT = _RANGE + "commit"
_MANY = ("_deliver", "_flush")  # called for every sequence, or for nothing
GAP = 5e-6  # seconds: between two kernels of one graph it is less; what is longer waits for the host


@dataclass
class Window:
    """Some consecutive decode steps; then some more, with torch's profiler on.

    steps      how many, either time
    host       phase -> seconds of the engine's thread in all; what they leave of `seconds` is "other"
    seconds    from the first commit to the last
    profiled   the same with the profiler on, which costs the host time
    kernels    (name, times, seconds in all), the longest first; on a CPU: torch's operators
    kernel_steps   how many steps those are of
    busy, span  seconds in which the GPU ran something, of how many; 0 on a CPU
    waits      seconds of the gaps longer than GAP
    """

    steps: int
    seconds: float
    host: dict[str, float]
    profiled: float = 0.0
    kernels: list[tuple[str, int, float]] = field(default_factory=list)
    kernel_steps: int = 0
    busy: float = 0.0
    span: float = 0.0
    waits: float = 0.0

    @property
    def idle(self) -> float | None:
        """The share of the time with no kernel running; None without a GPU."""
        return 1 - self.busy / self.span if self.span else None

    def figures(self) -> dict:
        """For a record."""
        per_step = 1e3 / self.steps
        idle = {} if self.idle is None else {"gpu_idle": round(self.idle, 4)}
        if idle:
            idle["gpu_busy_ms"] = round(self.busy * 1e3 / self.kernel_steps, 4)
            idle["gpu_idle_in_long_gaps"] = round(self.waits / self.span, 4)
        return {
            "profiled_steps": self.steps,
            "phases_step_ms": round(self.seconds * per_step, 4),
            "profiled_step_ms": round(self.profiled * per_step, 4),
            "host_ms": {name: round(seconds * per_step, 4) for name, seconds in self.host.items()},
            **idle,
        }

    def table(self, most: int = 40) -> str:
        """For a person: milliseconds a step, of the host's phases and of the kernels."""
        per_step = 1e3 / self.steps
        rows = [f"{self.steps} decode steps of {self.seconds * per_step:.3f} ms"]
        rows[0] += f", then {self.steps} of {self.profiled * per_step:.3f} ms with the profiler on"
        rows += ["", f"{'host phase':<58} {'ms/step':>9} {'share':>7}"]
        for name, seconds in self.host.items():
            rows.append(f"{name:<58} {seconds * per_step:>9.4f} {seconds / self.seconds:>7.1%}")
        if self.idle is not None:
            busy, waits = self.busy * 1e3 / self.kernel_steps, self.waits / self.span
            rows += ["", f"GPU: {busy:.3f} ms/step busy, {self.idle:.2%} of the time idle"]
            rows[-1] += f", {waits:.2%} in gaps longer than {GAP * 1e6:.0f} us"
        total, count_of = sum(seconds for _, _, seconds in self.kernels) or 1.0, self.kernel_steps or self.steps
        per_step = 1e3 / count_of
        what = "operator (self)" if self.idle is None else "kernel"
        rows += ["", f"{what:<58} {'ms/step':>9} {'share':>7} {'a step':>7} {'us each':>9}"]
        for name, count, seconds in self.kernels[:most]:
            rows.append(
                f"{name[:58]:<58} {seconds * per_step:>9.4f} {seconds / total:>7.1%} {count / count_of:>7.1f} "
                f"{seconds / count * 1e6:>9.2f}"
            )
        rest = self.kernels[most:]
        if rest:
            rows.append(f"{f'{len(rest)} more':<58} {sum(s for _, _, s in rest) * per_step:>9.4f}")
        return "\n".join(rows)


def phases(engine: Engine) -> list[tuple[str, object, str]]:
    """The parts of a turn of the engine's loop: (name, whose, which method). One may run inside another: then the time
    is the inner one's."""
    loop, scheduler, worker = engine._loop, engine._scheduler, engine._worker
    parts = [
        ("look for changed weights", loop, "_notice_weights"),
        ("schedule", scheduler, "schedule"),
        ("encode", getattr(worker, "_encoder", None), "encode"),
        ("launch", worker, "launch"),
        ("wait", loop, "_await"),
        ("commit", scheduler, "commit"),
        ("deliver", loop, "_deliver"),
        ("send", loop, "_flush"),
    ]
    return [part for part in parts if callable(getattr(part[1], part[2], None))]


class Profiler:
    """Opens a window in the middle of what an engine does: `with Profiler(engine, ...) as profiler: generate`.

    skip, steps   so many decode steps go by first; so many are looked at, twice
    batch         steps of so many sequences count alone, until the window is open; None: all that decode
    trace         where the Chrome trace goes (.json or .json.gz), and beside it those of an engine's processes; None:
                  nowhere
    window        what was seen; None where there were too few steps
    """

    def __init__(
        self, engine: Engine, *, batch: int | None, skip: int = 16, steps: int = 32, trace: Path | None = None
    ):
        self.engine, self.batch, self.skip, self.steps, self.trace = engine, batch, skip, steps, trace
        self.window: Window | None = None
        self._spent: dict[str, float] = defaultdict(float)
        self._seen, self._hooks, self._profile = 0, Hooks(), None
        self._inner: list[float] = []  # of the calls under way: seconds of those inside each
        self._waits: set[type] = set()
        self._others = engine._worker if engine.config.processes > 1 else None
        self._kinds = [torch.profiler.ProfilerActivity.CPU]
        if engine.device.type == "cuda":
            self._kinds.append(torch.profiler.ProfilerActivity.CUDA)

    def __enter__(self) -> "Profiler":
        scheduler = self.engine._scheduler
        commit = scheduler.commit

        def noted(plan, sampled):
            grown = commit(plan, sampled)
            full = plan.num_tokens == len(plan.chunks) and self.batch in (None, len(grown))
            if self._seen < self.skip + 2 * self.steps and (full or self._seen >= self.skip):
                self._count()
            return grown

        with torch.profiler.profile(activities=self._kinds):
            pass  # the profiler wants its first use in the main thread
        if self._others is not None:  # and takes a second for it, in which no step waits for another rank
            self.engine._loop.call(self._none_of_theirs)
        self._hooks.set(scheduler, "commit", noted)
        return self

    def __exit__(self, *exception) -> None:
        if self._profile is not None:  # the run was over before the window was
            self.engine._loop.call(self._close)
        if self.window is not None and not self.window.profiled:
            self.window = None
        self._hooks.undo()

    def _none_of_theirs(self) -> None:
        self._others.ask("trace")
        self._others.ask("traced", path=None)

    def _count(self) -> None:
        """In the engine's thread, after a commit."""
        self._seen += 1
        if self._seen == self.skip:
            for label, owner, name in phases(self.engine):
                self._hooks.set(owner, name, self._timed(label, getattr(owner, name), name not in _MANY))
            self._spent.clear()
            self._began = time.perf_counter()
        elif self._seen == self.skip + self.steps:
            seconds = time.perf_counter() - self._began
            host = dict(self._spent)
            host["other"] = max(0.0, seconds - sum(host.values()))
            self.window = Window(self.steps, seconds, host)
            self._profile = torch.profiler.profile(activities=self._kinds)
            if self._others is not None:
                self._others.ask("trace")
            self._profile.start()
            self._began = time.perf_counter()
        elif self._seen == self.skip + 2 * self.steps:
            self._close()

    def _timed(self, label: str, method: Callable, shown: bool) -> Callable:
        spent, clock, inner = self._spent, time.perf_counter, self._inner

        def timed(*args, **options):
            began = clock()
            inner.append(0.0)
            try:
                if not shown or self._profile is None:  # a range of a small thing would cost more than it holds
                    result = method(*args, **options)
                else:
                    with torch.profiler.record_function(_RANGE + label):
                        result = method(*args, **options)
            finally:
                took = clock() - began
                spent[label] += took - inner.pop()
                if inner:
                    inner[-1] += took
            if label == "launch":
                self._wait(type(result))
            return result

        return timed

    def _wait(self, pending: type) -> None:
        """What a launch gives is waited for by a method of its class."""
        if pending not in self._waits:
            self._waits.add(pending)
            self._hooks.set(pending, "wait", self._timed("read", pending.wait, True))

    def _close(self) -> None:
        self.window.profiled = time.perf_counter() - self._began
        if self.engine.device.type == "cuda":
            torch.cuda.synchronize(self.engine.device)
        profile, self._profile = self._profile, None
        profile.stop()
        if self._seen < self.skip + 2 * self.steps:
            self.window = None
            if self._others is not None:
                self._others.ask("traced", path=None)
            return
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            text, theirs = path.read_text(), {}
            if self._others is not None:
                self._others.ask("traced", path=str(Path(folder) / "of"))
                theirs = {file.name: file.read_bytes() for file in sorted(Path(folder).glob("of.*"))}
        self._keep(text.encode(), theirs)
        if self.engine.device.type == "cuda":
            of = gzip.decompress(next(iter(theirs.values()))) if theirs else text
            fill(self.window, json.loads(of)["traceEvents"], bool(theirs))
        else:
            named = [(e.key, e.count, e.self_cpu_time_total * 1e-6) for e in profile.key_averages()]
            named = [e for e in named if not e[0].startswith(_RANGE)]
            self.window.kernels = sorted(named, key=lambda e: -e[2])

    def _keep(self, own: bytes, theirs: dict[str, bytes]) -> None:
        """Theirs are packed."""
        if self.trace is None:
            return
        self.trace.parent.mkdir(parents=True, exist_ok=True)
        packed = self.trace.suffix == ".gz"
        stem = self.trace.name.removesuffix(".gz").removesuffix(".json")
        named = {stem + name.removeprefix("of"): data for name, data in theirs.items()}
        self.trace.write_bytes(gzip.compress(own) if packed else own)
        for name, data in named.items():
            name, data = (name, data) if packed else (name.removesuffix(".gz"), gzip.decompress(data))
            self.trace.with_name(name).write_bytes(data)


def fill(window: Window, events: Iterable[dict], apart: bool = False) -> None:
    """The GPU's part of a window, from the events of a Chrome trace: from the second commit to the last, for starting
    and stopping the profiler leaves gaps at both ends.

    apart  commits are in another process: a step begins where the kernels of its graph do
    """
    events = [event for event in events if event.get("ph") == "X"]
    ran = [e for e in events if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    begun = (e["ts"] for e in events if e["name"] == _COMMIT and e.get("cat") == "user_annotation")
    begins = sorted(_graphs(ran) if apart else begun)
    if len(begins) < 3 or not ran:
        return
    first, last = begins[1], begins[-1]
    found: dict[str, list[float]] = defaultdict(list)
    spans = []
    for event in ran:
        begin, end = event["ts"], event["ts"] + event["dur"]
        if first <= begin < last:
            found[_short(event)].append(event["dur"] * 1e-6)
        if end > first and begin < last:
            spans.append((max(begin, first), min(end, last)))
    window.kernels = sorted(((n, len(t), sum(t)) for n, t in found.items()), key=lambda e: -e[2])
    window.kernel_steps, window.span = len(begins) - 2, (last - first) * 1e-6
    at = first
    for begin, end in [*sorted(spans), (last, last)]:
        gap = (begin - at) * 1e-6
        window.waits += gap if gap > GAP else 0.0
        window.busy -= max(gap, 0.0)
        at = max(at, end)
    window.busy += window.span


def _graphs(ran: Iterable[dict]) -> list[float]:
    """When the first kernel of each graph began. All of one have its launch's correlation, and are most of a step."""
    found: dict[int, list[float]] = defaultdict(list)
    for event in ran:
        found[event.get("args", {}).get("correlation")].append(event["ts"])
    most = max(map(len, found.values()), default=0)
    return [min(times) for times in found.values() if len(times) > most / 2]


def _short(event: dict) -> str:
    """A kernel's name without return type, namespaces and arguments, and the grid, which tells Triton's alike apart."""
    if event["cat"] != "kernel":
        return event["name"]
    name = re.sub(r"^void |\(anonymous namespace\)::|<unnamed>::|\b\w+::", "", event["name"])
    name = re.sub(r"\((?!anonymous).*$", "", name)
    grid = event.get("args", {}).get("grid")
    return f"{name[:40]} {'x'.join(map(str, grid))}" if grid else name
