"""A pytest plugin: which tests are for a GPU (the mark `cuda`), how many processes share one, and what ran on it. Where
there are several, each process takes another one as its first, and sees them all.

`pytest -m cuda` runs them all. The line at the end counts those that did use the GPU, by what torch's allocator saw,
not by their names; a test that used it without the mark is named, since `-m cuda` would leave it out.
"""

import os
import re
import time
from collections import Counter
from collections.abc import MutableMapping

import pytest
import torch

PER_PROCESS = 8 << 30  # of GPU memory: the largest tests take half of it
KEEP = 2 << 30  # what a test leaves in torch's cache above this goes back to the driver, for the other processes
CORES_PER_PROCESS = 2  # a test's own processes and threads take the other
FEWEST = 3  # on two cores too: a fourth of the time a test waits for its own processes, or for a limit to pass


def processes() -> int:
    """For pytest's -n auto: as many as the cores feed and, on a GPU, its memory holds; three on a small machine."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if not torch.cuda.is_available():
        return max(FEWEST, min(cores // CORES_PER_PROCESS, 8))
    memory = sum(torch.cuda.get_device_properties(d).total_memory for d in range(torch.cuda.device_count()))
    return max(2, min(cores, memory // PER_PROCESS))


def take_turns(environment: MutableMapping[str, str], gpus: int) -> None:
    """Have the n-th process of pytest-xdist number the GPUs from the n-th on. Before CUDA starts in it."""
    worker = environment.get("PYTEST_XDIST_WORKER", "").removeprefix("gw")
    if not worker.isdecimal() or gpus < 2:
        return
    named = environment.get("CUDA_VISIBLE_DEVICES", "")
    seen = [name.strip() for name in named.split(",")] if named else [str(gpu) for gpu in range(gpus)]
    first = int(worker) % len(seen)
    environment["CUDA_VISIBLE_DEVICES"] = ",".join(seen[first:] + seen[:first])


def is_for_gpu(item: pytest.Item) -> bool:
    """By its mark, by a parameter that names the device, or because it is skipped where there is no GPU."""
    if item.get_closest_marker("cuda"):
        return True
    if "cuda" in item.name.partition("[")[2]:
        return True
    reasons = [mark.kwargs.get("reason", "") for mark in item.iter_markers() if mark.name in ("skip", "skipif")]
    return any(re.search(r"\bCUDA\b|\bGPUs?\b|\bSM90\b", reason) for reason in reasons)


def mark(items: list[pytest.Item]) -> None:
    for item in items:
        if is_for_gpu(item):
            item.add_marker(pytest.mark.cuda)


def spread(items: list[pytest.Item], processes: int) -> None:
    """The long ones to the beginning of the equal parts that processes get of the list: who begins one last makes all
    others wait. (--dist=worksteal gives such parts, and takes from the end of one where another is through.)"""
    long = [item for item in items if item.get_closest_marker("long")]
    others = [item for item in items if not item.get_closest_marker("long")]
    left, items[:] = len(items), []
    for process in range(processes, 0, -1):
        mine = long[processes - process :: processes]
        count = max(left // process - len(mine), 0)
        items += mine + others[:count]
        del others[:count]
        left -= left // process
    items += others


def _allocations() -> int:
    """How often this process has asked torch for GPU memory: 0 before it has touched the GPU."""
    if not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_stats(d).get("allocation.all.allocated", 0) for d in range(torch.cuda.device_count()))


class OnGpu:
    """Notes in every report whether the test used the GPU and how much memory; sums up at the end."""

    def __init__(self):
        self.begin = time.perf_counter()

    @pytest.hookimpl(trylast=True)  # of what -m has left
    def pytest_collection_modifyitems(self, config, items):
        if hasattr(config, "workerinput"):
            spread(items, config.workerinput["workercount"])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item):
        before = _allocations()
        if before:
            torch.cuda.reset_peak_memory_stats()
        try:
            return (yield)
        finally:
            if _allocations() > before:
                item.user_properties.append(("gpu_mib", torch.cuda.max_memory_allocated() >> 20))
                if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > KEEP:
                    torch.cuda.empty_cache()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item, call):
        report = yield
        if item.get_closest_marker("cuda"):
            report.user_properties.append(("for_gpu", True))
        return report

    def pytest_terminal_summary(self, terminalreporter):
        if not torch.cuda.is_available():
            return
        stats, seconds = terminalreporter.stats, time.perf_counter() - self.begin
        reports = [r for kind in ("passed", "failed") for r in stats.get(kind, ()) if r.when == "call"]
        used = {r.nodeid: dict(r.user_properties) for r in reports if "gpu_mib" in dict(r.user_properties)}
        workers = {getattr(r, "worker_id", "main") for r in reports if r.nodeid in used}
        failed = sum(r.nodeid in used for r in stats.get("failed", ()))
        skipped = [r for r in stats.get("skipped", ()) if "for_gpu" in dict(getattr(r, "user_properties", ()))]
        largest = max(used, key=lambda name: used[name]["gpu_mib"], default=None)
        terminalreporter.write_sep("-", "on the GPU")
        terminalreporter.write_line(
            f"{len(used)} tests ran on {torch.cuda.device_count()} x {torch.cuda.get_device_name()} in {len(workers)} "
            f"processes, {seconds:.0f} s: "
            f"{failed} failed, {len(skipped)} for a GPU were skipped"
        )
        why = Counter(
            str(r.longrepr[2] if isinstance(r.longrepr, tuple) else r.longrepr).splitlines()[0] for r in skipped
        )
        for reason, count in why.most_common():
            terminalreporter.write_line(f"  {count} skipped: {reason.removeprefix('Skipped: ')}")
        if largest:
            terminalreporter.write_line(f"  most memory: {used[largest]['gpu_mib']} MiB in {largest}")
        for name in sorted(name for name, found in used.items() if "for_gpu" not in found):
            terminalreporter.write_line(f"  without the mark `cuda`: {name}", yellow=True)
