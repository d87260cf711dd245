"""Which charts there are, and the numbers in each; `draw` draws them. A chart's file holds a digest of its numbers, so
that one which no longer is what the records say is noticed without drawing it."""

import hashlib
import json
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from ..harness import ROOT
from . import compare
from .records import axis, by_case, geomean, kept, kind, natural, peers_of, ratios, series, with_spread

PLOTS = ROOT / "benchmarks" / "plots"
PANELS = 4  # of a sweep, at most
GROUPS = 7  # of bars, at most
SWEPT = 4  # points, at least, that make a line
BY_KIND = {"attention", "fused_moe", "linear_cross_entropy"}  # whose cases differ more by what they do than by rows


@dataclass(frozen=True)
class Chart:
    """path    below benchmarks/plots
    sort    "bars", "lines" or "summary": how it is drawn
    data    all that is drawn, as JSON has it
    """

    path: str
    sort: str
    title: str
    data: dict

    def digest(self) -> str:
        text = json.dumps([self.sort, self.title, self.data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def everything() -> list[Chart]:
    """All charts of the kept records, the summary for the first README too."""
    records = kept()
    return [*of(records), summary(records)]


def of(records: dict[str, list[dict]]) -> list[Chart]:
    """The charts of some results files: a bar chart a room, sweeps, memory, engines."""
    found = []
    for name, mine in records.items():
        machine = next((r.get("gpu") or r.get("cpu") for r in reversed(mine) if r.get("gpu") or r.get("cpu")), name)
        cases = by_case(mine)
        for room in dict.fromkeys(room for room, _ in cases):
            found += _bars(name, machine, room, cases)
            found += _sweeps(name, machine, room, cases)
        found += _memory(name, machine, mine)
        found += _engine(name, machine, mine)
    return found


def _bars(name: str, machine: str, room: str, cases: dict) -> list[Chart]:
    """Our time over each peer's: geometric means over the cases of a group, and how they spread."""
    mine = {case: by for (r, case), by in with_spread(cases).items() if r == room and "vexact" in by}
    groups: dict[str, list[dict]] = defaultdict(list)
    for case, by in mine.items():
        groups[_group(room, case)].append(by)
    bars = []
    for group in _few(sorted(groups, key=lambda label: natural(label.replace(",", "")))):
        for peer in peers_of(groups[group]):
            found = [r for r in (ratios(by, peer) for by in groups[group]) if r is not None]
            low, middle, high = (float(f"{geomean(r[i] for r in found):.4g}") for i in range(3))
            every = sorted(r[1] for r in found)
            bar = {"group": group, "peer": peer, "ratio": middle, "p10": low, "p90": high, "cases": len(found)}
            bars.append(bar | {"least": float(f"{every[0]:.4g}"), "most": float(f"{every[-1]:.4g}")})
    if not bars:
        return []
    first = next(iter(mine.values()))["vexact"]
    title = f"{room}: time of vexact over that of its peers, {machine}"
    return [Chart(f"{name}/{room}.svg", "bars", title, {"bars": bars, "rounds": first.get("rounds")})]


def _few(groups: list[str]) -> list[str]:
    """The first, the last, and some between: a sweep has more row counts than a bar chart shows."""
    if len(groups) <= GROUPS:
        return groups
    return [groups[round(i * (len(groups) - 1) / (GROUPS - 1))] for i in range(GROUPS)]


def _group(room: str, case: str) -> str:
    if room in BY_KIND:
        return kind(case) or case
    count = series(case)[1]
    return kind(case) if count is None else f"{count:,} row{'s' * (count > 1)}"


def _sweeps(name: str, machine: str, room: str, cases: dict) -> list[Chart]:
    """Time over rows, and over the number of keys, of the few series with the most points."""
    found: dict[str, dict[str, dict[int, dict]]] = {"rows": defaultdict(dict), "keys": defaultdict(dict)}
    for (r, case), by in cases.items():
        if r == room and axis(case) and "vexact" in by:
            label, count = series(case)
            found[axis(case)][label][count] = by
    made = []
    for unit, lines in found.items():
        best = sorted(lines, key=lambda label: (-len(lines[label]), "qwen3-8b" not in label, natural(label)))[:PANELS]
        panels = [_panel(label, lines[label]) for label in best if len(lines[label]) >= SWEPT]
        if panels:
            title = f"{room}: time over {unit}, {machine}"
            data = {"panels": panels, "x": unit, "y": "us"}
            made.append(Chart(f"{name}/{room}-{unit}.svg", "lines", title, data))
    return made


def _panel(label: str, points: dict[int, dict]) -> dict:
    lines: dict[str, list] = defaultdict(list)
    for count, by in sorted(points.items()):
        for backend, record in by.items():
            if backend == "vexact" or not backend.startswith("vexact"):
                spread = [record.get(key, record["us"]) for key in ("p10_us", "p90_us")]
                lines[backend].append([count, record["us"], *spread])
    roof = [[count, by["vexact"]["roof_us"]] for count, by in sorted(points.items())]
    return {"title": label, "lines": dict(lines), "roof": roof}


def _memory(name: str, machine: str, records: list[dict]) -> list[Chart]:
    """Peak memory of a step over its tokens."""
    panels: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        label, tokens = series(record["case"])
        if record["room"] == "memory" and tokens is not None:
            for who, peak in record.get("peaks", {"vexact": record["ours"], "torch": record["stock"]}).items():
                panels[label][who].append([tokens, peak, peak, peak])
    swept = [
        {"title": re.sub(r" V=\d+", "", label), "lines": {who: sorted(line) for who, line in lines.items()}, "roof": []}
        for label, lines in sorted(panels.items())
        if len(lines["vexact"]) >= SWEPT
    ]
    title = f"peak memory of a training step beyond its inputs, {machine}"
    data = {"panels": swept, "x": "tokens", "y": "MiB"}
    return [Chart(f"{name}/memory.svg", "lines", title, data)] if swept else []


ENGINE = {
    "throughput": ("output tokens per second", "tokens/s", lambda r: [r["tokens_per_s"]] * 3),
    "step": ("a decode step over its roof", "x roof", lambda r: _over_roof(r)),
}


def _over_roof(record: dict) -> list[float] | None:
    """Median, p10 and p90."""
    if not record.get("step_over_roof"):
        return None
    spread = [record.get(key, record["step_ms"]) for key in ("step_p10_ms", "step_p90_ms")]
    least = record["step_ms"] / record["step_over_roof"]
    return [record["step_over_roof"], *(float(f"{step / least:.4g}") for step in spread)]


def _engine(name: str, machine: str, records: list[dict]) -> list[Chart]:
    engines = [r for r in records if r["room"] == "engine" and "workload" in r and r.get("rate") is None]
    made = []
    for what, (label, unit, value) in ENGINE.items():
        panels: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
        for r in engines:
            sent = re.sub(r"^\d+ x |, \d+ at a time$", "", r["workload"])
            if value(r) is not None:
                latent = " latent" * bool(r.get("latent"))
                panels[f"{r['model']}{latent}, {sent}, {r['dtype']}"][r["backend"]].append([r["batch"], *value(r)])
        shown = [
            {"title": title, "lines": {who: sorted(line) for who, line in lines.items()}, "roof": []}
            for title, lines in sorted(panels.items())
            if len({point[0] for line in lines.values() for point in line}) > 1
        ]
        if shown:
            data = {"panels": shown, "x": "sequences at once", "y": unit}
            made.append(Chart(f"{name}/engine-{what}.svg", "lines", f"engine: {label}, {machine}", data))
    return made


def summary(records: dict[str, list[dict]]) -> Chart:
    """Bits first: log-probabilities that differ; then the engine's steps beside vLLM's; then our kernels' times over
    PyTorch's and over those of peers that promise bits as well."""
    bits = compare.verified(records["verify"])
    steps = []
    for (model, latent, batch), by in sorted(compare.steps(records).items()):
        if "vexact" in by and len(by) > 1:
            label = f"{model}{' latent' * bool(latent)}, {batch}"
            steps.append({"label": label, "ms": {who: r["step_ms"] for who, r in sorted(by.items())}})
    kernels = []
    cases = by_case(records["h200"])
    for room in dict.fromkeys(room for room, _ in cases):
        mine = [by for (r, _), by in with_spread(cases).items() if r == room and "vexact" in by]
        means = {p: geomean(r[1] for r in (ratios(by, p) for by in mine) if r) for p in ("torch", *INVARIANT)}
        kernels.append({"room": room, "over": {p: float(f"{m:.4g}") for p, m in means.items() if m is not None}})
    data = {"bits": {who: list(counts) for who, counts in bits.items()}, "steps": steps, "kernels": kernels}
    return Chart("summary.svg", "summary", "vexact on one H200: bits, then times", data)


INVARIANT = ("batch_invariant_ops", "fixed-tile")


def drawn() -> list[Path]:
    """The charts that lie there: files of ours in folders, and the summary; what others draw lies beside it."""
    return sorted([*PLOTS.glob("*/*.svg"), *PLOTS.glob("summary.svg")])


def digest_in(path: Path) -> str | None:
    """What an SVG file of ours says that it was drawn from."""
    found = re.search(r"numbers ([0-9a-f]{16})", path.read_text()) if path.exists() else None
    return found and found[1]


def stale() -> list[str]:
    """Charts of the kept records that are not there, or not of these numbers, and files that are no chart of theirs."""
    wanted = {chart.path: chart.digest() for chart in everything()}
    there = {path.relative_to(PLOTS).as_posix() for path in drawn()}
    other = [path for path, digest in wanted.items() if digest_in(PLOTS / path) != digest]
    return sorted({*other, *(there - set(wanted))})
