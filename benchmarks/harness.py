"""Measures cases: bits first, then interleaved rounds over rotating buffers; prints lines and appends JSON lines.

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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from vexact_engine.proof.machine import commit
from vexact_ops._core import native

from . import checks
from .peers import first_line, say_once, version_of

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
    alone       (fn, *inputs) -> (actual, expected): rows alone and in their batch, of any provider's function; what
                `row_alone` makes, or None where a provider draws at random or gives nothing back
    reference   inputs in float64 -> what a provider should give, for --refcheck; a tuple may be shorter than theirs
    terms       so many products are summed in one accumulator: what --refcheck allows beside twice the stock error
    captured    False: the op looks at values on the host, so it is always launched eagerly
    steps       so many steps a call of a provider makes; times, bytes and flops are those of one
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
    steps: int = 1
    extra: dict = field(default_factory=dict)
    alone: Callable[..., tuple] | None = None
    reference: Callable | None = None
    terms: int = 0


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
    case: Case,
    device: str,
    *,
    repeats: int = 15,
    only: Sequence[str] | None = None,
    eager: bool = False,
    refcheck: bool = False,
) -> list[dict]:
    """Check the bits, time the providers turn about, return one record per provider.

    only      names of the peers to time beside ours; None times all. A peer that raises is left out and said so
    refcheck  also compare each provider's output with the float64 reference
    Raises AssertionError where our bits differ: nothing is timed then.
    """
    checks.assert_same_bits(case, case.make())
    chosen = {n: fn for n, fn in case.providers.items() if n.startswith("vexact") or only is None or n in only}
    rows_alone = {n: checks.rows_alone(case, n, fn) for n, fn in chosen.items()}
    errors = checks.errors(case, chosen) if refcheck else {}
    bandwidth, rate = ceilings(device)
    roof = max(case.bytes / bandwidth, case.flops / rate)
    rounds = _interleaved(_runners(case, chosen, device, roof * case.steps, eager), repeats)
    times = {name: [seconds / case.steps for seconds in samples] for name, samples in rounds.items()}
    ours, stock = times.get("vexact"), times.get(case.stock)
    records = []
    for name, samples in times.items():
        seconds = statistics.median(samples)
        record = {
            "room": case.room,
            "case": case.name + (" eager" if eager else ""),
            "backend": name,
            "us": round(seconds * 1e6, 3),
            "p10_us": round(quantile(samples, 0.1) * 1e6, 3),
            "p90_us": round(quantile(samples, 0.9) * 1e6, 3),
            "rounds": len(samples),
            "gbps": round(case.bytes / seconds * 1e-9, 1),
            "tflops": round(case.flops / seconds * 1e-12, 4),
            "roof_us": float(f"{roof * 1e6:.5g}"),  # of one row it may be far below a nanosecond
            "stock_us": round(statistics.median(stock) * 1e6, 3) if stock else None,
            "ratio_to_stock": round(seconds / statistics.median(stock), 3) if stock else None,
            "bits_equal": checks.verdict(name, rows_alone[name]),
            "rows_alone": rows_alone[name],
            **({"over": over(ours, times)} if name == "vexact" else {"version": version_of(name)}),
            **({"error": errors[name]} if name in errors else {}),
            "copy_gbps": round(bandwidth * 1e-9, 1),
            "device": device,
            **case.extra,
            **environment(device),
        }
        records.append(record)
    return records


def _runners(case: Case, chosen: dict, device: str, roof: float, eager: bool) -> dict[str, Callable[[], float]]:
    """Name -> what times one round, over buffers that together exceed the caches."""
    cache = 60e6 if device == "cuda" else 40e6
    copies = int(min(8 if device == "cuda" else 16, 1 + cache // max(case.bytes, 1)))
    sets = [case.make() for _ in range(copies)]
    runners = {}
    for name, fn in chosen.items():
        try:
            runners[name] = _runner(fn, sets, device, roof, eager or not case.captured)
        except Exception as error:
            if name.startswith("vexact"):
                raise
            say_once(f"{case.room}: peer {name}: {first_line(error)}")
    return runners


def _interleaved(runners: dict[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Name -> seconds of each round; all take turns, so that a slow moment falls on all alike."""
    times: dict[str, list[float]] = {name: [] for name in runners}
    for _ in range(repeats):
        for name, run in runners.items():
            times[name].append(run())
    return times


def over(ours: Sequence[float], times: dict[str, Sequence[float]]) -> dict[str, list[float]]:
    """Peer -> [p10, median, p90] of our time over the peer's in the same round."""
    found = {}
    for name, samples in times.items():
        if not name.startswith("vexact"):
            ratios = [a / b for a, b in zip(ours, samples)]
            found[name] = [float(f"{quantile(ratios, share):.4g}") for share in (0.1, 0.5, 0.9)]
    return found


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which that share of them lies, between neighbours in proportion."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


_COLUMNS = "{:<44} {:<19} {:>10} {:>17} {:>8} {:>8} {:>6} {:>10}  {}"
HEADER = _COLUMNS.format("case", "backend", "us", "p10..p90", "GB/s", "TFLOP/s", "%roof", "x-of-torch", "bits")


def line(record: dict) -> str:
    """One record for a person: case backend us p10..p90 GB/s TFLOP/s %roof x-of-torch bits."""
    cells = [
        record["case"],
        record["backend"],
        f"{record['us']:.1f}",
        f"{record['p10_us']:.1f}..{record['p90_us']:.1f}",
        f"{record['gbps']:.1f}",
        f"{record['tflops']:.3f}",
        f"{100 * record['roof_us'] / record['us']:.1f}",
        f"{record['ratio_to_stock']:.2f}" if record["ratio_to_stock"] else "-",
        {True: "equal", False: "differ", None: "-"}[record["bits_equal"]],
    ]
    return _COLUMNS.format(*cells) + checks.said(record.get("error"))


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
