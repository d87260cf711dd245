"""Measures cases: bits first, then interleaved medians over rotating buffers; prints lines and appends JSON lines.

On a GPU a provider's calls are captured in a CUDA graph, as the engine replays them, over buffer sets that together
exceed the L2 cache where the case is large enough to matter; with eager=True they are launched one by one, host time
included.
"""

import datetime
import functools
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vexact_engine.proof.machine import commit
from vexact_ops._core import native
from vexact_ops.testing import count_different

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"


@dataclass
class Case:
    """One thing to measure.

    room, name  what it is: ("linear", "qwen3-8b down M=16 bf16")
    make        () -> a fresh tuple of inputs; called several times so that buffers rotate beyond the caches
    providers   name -> function of those inputs; "vexact" (or "vexact-<backend>") is ours, "torch" is stock, others
                come from `peers`
    bits        inputs -> (actual, expected) tensors of ours that must have the same bits, such as a row alone and in
                its batch; checked before timing
    captured    False: the op looks at values on the host, so it is always launched eagerly
    bytes       least bytes moved, each input and output once
    flops       floating-point operations
    """

    room: str
    name: str
    make: Callable[[], tuple]
    providers: dict[str, Callable]
    bits: Callable[..., tuple]
    bytes: float
    flops: float = 0.0
    stock: str = "torch"
    captured: bool = True
    extra: dict = field(default_factory=dict)


def peers(**loaders: Callable[[], Callable]) -> dict[str, Callable]:
    """Providers of other libraries: name -> a function that imports the library and returns what to time. What is not
    installed, or does not import here, is left out and said so once."""
    found = {}
    for name, load in loaders.items():
        try:
            found[name] = load()
        except Exception as error:  # a peer's import may fail in any way; ours must not be held up by it
            say_once(f"peer {name} is left out: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
    return found


@functools.cache
def say_once(text: str) -> None:
    print(text, file=sys.stderr)


def random(*shape: int, dtype: torch.dtype, device: str, seed: int = 0, scale: float = 1.0) -> Tensor:
    """Gaussian values, the same for the same seed."""
    g = torch.Generator(device).manual_seed(seed)
    return (torch.randn(shape, dtype=torch.float32, generator=g, device=device) * scale).to(dtype)


@functools.cache
def environment(device: str) -> dict:
    """What a figure is worth nothing without: machine, versions, commit."""
    try:
        import triton

        triton_version = triton.__version__
    except ImportError:
        triton_version = None

    gpu = torch.cuda.get_device_name() if device == "cuda" else None
    return {
        "gpu": gpu,
        "cpu": None if gpu else f"{platform.machine()} {native.cpu_isa()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "triton": triton_version,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


@functools.cache
def ceilings(device: str) -> tuple[float, float]:
    """(bytes/s of a large copy counting reads and writes, FLOP/s of a large stock matrix product), measured here."""
    size, edge, dtype = (1 << 30, 8192, torch.bfloat16) if device == "cuda" else (1 << 27, 1536, torch.float32)
    source = torch.randn(size // 4, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    a, b = (random(edge, edge, dtype=dtype, device=device, seed=s) for s in (1, 2))
    copy = time_one(lambda: target.copy_(source), device, repeats=9)
    product = time_one(lambda: a @ b, device, repeats=9)
    return 2 * size / copy, 2 * edge**3 / product


def time_one(fn: Callable[[], object], device: str, repeats: int) -> float:
    """Median seconds of one call."""
    return statistics.median(_samples(fn, device) for _ in range(repeats + 2))


def _samples(fn: Callable[[], object], device: str) -> float:
    if device == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        fn()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e-3
    begin = time.perf_counter()
    fn()
    return time.perf_counter() - begin


def _runner(fn: Callable, sets: Sequence[tuple], device: str, roof: float, eager: bool) -> Callable[[], float]:
    """A function that times rounds over all buffer sets and returns seconds per call."""
    for args in sets:
        fn(*args)
    if device != "cuda":
        rounds = max(1, int(2e-4 / max(_samples(lambda: fn(*sets[0]), device), 1e-7)) // len(sets))
    else:  # 100 us and more, so that the start of a graph does not count
        rounds = max(1, math.ceil(1e-4 / (max(roof, 2e-6) * len(sets))))
    calls = rounds * len(sets)

    def run() -> None:
        for _ in range(rounds):
            for args in sets:
                fn(*args)

    if device != "cuda":
        return lambda: _samples(run, device) / calls
    torch.cuda.synchronize()
    if eager:

        def wall() -> float:
            begin = time.perf_counter()
            run()
            torch.cuda.synchronize()
            return (time.perf_counter() - begin) / calls

        return wall
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return lambda: _samples(graph.replay, device) / calls


def measure(
    case: Case, device: str, *, repeats: int = 15, only: Sequence[str] | None = None, eager: bool = False
) -> list[dict]:
    """Check the bits, time the providers turn about, return one record per provider.

    only    names of the peers to time beside ours; None times all. A peer that raises is left out and said so
    Raises AssertionError where the bits differ: nothing is timed then.
    """
    args = case.make()
    actual, expected = case.bits(*args)
    pairs = list(zip(actual, expected)) if isinstance(actual, tuple) else [(actual, expected)]
    different = sum(count_different(a, e) for a, e in pairs)
    if different:
        raise AssertionError(f"{case.room} {case.name}: {different} elements differ; nothing was timed")
    cache = 60e6 if device == "cuda" else 40e6
    copies = int(min(8 if device == "cuda" else 16, 1 + cache // max(case.bytes, 1)))
    sets = [args, *(case.make() for _ in range(copies - 1))]
    bandwidth, rate = ceilings(device)
    roof = max(case.bytes / bandwidth, case.flops / rate)
    runners = {}
    for name, fn in case.providers.items():
        ours = name.startswith("vexact")
        if not (ours or only is None or name in only):
            continue
        try:
            runners[name] = _runner(fn, sets, device, roof, eager or not case.captured)
        except Exception as error:
            if ours:
                raise
            say_once(f"{case.room}: peer {name}: {type(error).__name__}: {str(error).splitlines()[0][:160]}")
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(repeats):
        for name, run in runners.items():  # interleaved, so that a slow moment falls on all alike
            times[name].append(run())
    medians = {name: statistics.median(values) for name, values in times.items()}
    stock = medians.get(case.stock)
    return [
        {
            "room": case.room,
            "case": case.name + (" eager" if eager else ""),
            "backend": name,
            "us": round(seconds * 1e6, 3),
            "gbps": round(case.bytes / seconds * 1e-9, 1),
            "tflops": round(case.flops / seconds * 1e-12, 4),
            "roof_us": float(f"{roof * 1e6:.5g}"),  # of one row it may be far below a nanosecond
            "stock_us": round(stock * 1e6, 3) if stock else None,
            "ratio_to_stock": round(seconds / stock, 3) if stock else None,
            "bits_equal": True if name.startswith("vexact") else None,
            "copy_gbps": round(bandwidth * 1e-9, 1),
            "device": device,
            **case.extra,
            **environment(device),
        }
        for name, seconds in medians.items()
    ]


HEADER = f"{'case':<44} {'backend':<14} {'us':>10} {'GB/s':>8} {'TFLOP/s':>8} {'%roof':>6} {'x-of-torch':>10}  bits"


def line(record: dict) -> str:
    """One record for a person: case backend us GB/s TFLOP/s %roof x-of-torch bits."""
    roof = 100 * record["roof_us"] / record["us"]
    ratio = f"{record['ratio_to_stock']:.2f}" if record["ratio_to_stock"] else "-"
    bits = {True: "equal", None: "-"}[record["bits_equal"]]
    return (
        f"{record['case']:<44} {record['backend']:<14} {record['us']:>10.1f} {record['gbps']:>8.1f} "
        f"{record['tflops']:>8.3f} {roof:>6.1f} {ratio:>10}  {bits}"
    )


def append(records: Sequence[dict], path: Path) -> None:
    """Add records to a JSON-lines file; what an earlier run measured of the same cases stays as history."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")


def results_file(device: str) -> Path:
    """benchmarks/results/<gpu>.jsonl, such as h200.jsonl or cpu.jsonl."""
    if device != "cuda":
        return RESULTS / "cpu.jsonl"
    name = torch.cuda.get_device_name().lower().replace("nvidia", "").strip().replace(" ", "-")
    return RESULTS / f"{name}.jsonl"
