"""Draws charts as small SVG files, the same bytes for the same numbers and the same matplotlib."""

import math
import textwrap
from pathlib import Path

from ..peers import PEERS, about
from .charts import Chart

STYLE = {
    "svg.hashsalt": "vexact",  # names inside the file, which would be drawn at random
    "svg.fonttype": "none",
    "path.simplify": True,
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.alpha": 0.3,
    "legend.frameon": False,
}


def draw(charts: list[Chart], folder: Path) -> list[Path]:
    """Write each chart below the folder."""
    from matplotlib import rc_context

    written = []
    with rc_context(STYLE):
        for chart in charts:
            path = folder / chart.path
            path.parent.mkdir(parents=True, exist_ok=True)
            figure = {"bars": _bars, "lines": _lines, "summary": _summary}[chart.sort](chart)
            named = {"Title": chart.title, "Description": f"numbers {chart.digest()}"}
            figure.savefig(path, format="svg", metadata=named | {"Date": None, "Creator": "vexact bench report"})
            path.write_text("\n".join(line.rstrip() for line in path.read_text().splitlines()) + "\n")
            written.append(path)
    return written


def _figure(width: float, height: float):
    from matplotlib.figure import Figure  # not pyplot: it holds global state and may open a window

    return Figure(figsize=(width, height), layout="constrained")


def _legend(figure, names: list[str], extra: tuple = ()) -> None:
    """One for all panels, below them: a peer has the same colour in every chart."""
    from matplotlib.patches import Patch

    order = list(PEERS)
    names = sorted(names, key=lambda n: (n != "vexact", order.index(n) if n in order else len(order), n))
    handles = [Patch(color=about(name).color, label=about(name).label) for name in names] + list(extra)
    figure.legend(handles=handles, loc="outside lower center", ncols=min(5, len(handles)))


def _bars(chart: Chart):
    bars = chart.data["bars"]
    groups = list(dict.fromkeys(bar["group"] for bar in bars))
    peers = list(dict.fromkeys(bar["peer"] for bar in bars))
    figure = _figure(max(6.0, 0.36 * len(bars) + 0.4 * len(groups) + 1.2), 3.2)
    axes = figure.subplots()
    at, ticks = 0.0, []
    for group in groups:
        members = [bar for bar in bars if bar["group"] == group]
        for place, bar in enumerate(members):
            x = at + place
            axes.bar(x, bar["ratio"], 0.9, color=about(bar["peer"]).color)
            axes.plot([x, x], [bar["least"], bar["most"]], color="black", linewidth=0.6)
            axes.plot([x, x], [bar["p10"], bar["p90"]], color="black", linewidth=2.2)
            axes.text(x, max(bar["most"], bar["p90"]), f"{bar['ratio']:.2f}", ha="center", va="bottom", fontsize=6)
        ticks.append((at + (len(members) - 1) / 2, textwrap.fill(group, 14)))
        at += len(members) + 0.7
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="dashed")
    axes.set_xticks(*zip(*ticks))
    axes.tick_params(axis="x", length=0)
    axes.set_ylim(0, 1.12 * max(1.0, *(max(bar["most"], bar["p90"]) for bar in bars)))
    axes.set_ylabel("vexact's time / the peer's\n(below 1: vexact is faster)")
    axes.grid(axis="y")
    rounds = f"thick: p10 to p90 of {chart.data['rounds']} rounds; " if chart.data["rounds"] else ""
    axes.set_title(f"{chart.title}\nmean over cases; {rounds}thin: the cases' range")
    _legend(figure, peers)
    return figure


def _lines(chart: Chart):
    from matplotlib.lines import Line2D

    panels = chart.data["panels"]
    across = min(4, len(panels))
    down = -(-len(panels) // across)
    figure = _figure(max(4.6, 2.9 * across), 2.5 * down + 0.7)
    grid = figure.subplots(down, across, squeeze=False)
    for axes in grid.flat[len(panels) :]:
        axes.axis("off")
    y = chart.data["y"]
    for axes, panel in zip(grid.flat, panels):
        for backend, line in panel["lines"].items():
            xs, middle, low, high = zip(*line)
            color, front = about(backend).color, 3 if backend == "vexact" else 2
            axes.plot(xs, middle, color=color, linewidth=1.3, marker="o", markersize=2, zorder=front)
            if low != high:
                axes.fill_between(xs, low, high, color=color, alpha=0.25, linewidth=0)
        if panel["roof"]:
            axes.plot(*zip(*panel["roof"]), color="black", linewidth=0.8, linestyle="dotted")
        if y == "x roof":
            axes.axhline(1.0, color="black", linewidth=0.8, linestyle="dotted")
        _log_axis(axes.xaxis, [point[0] for line in panel["lines"].values() for point in line], _count)
        if y != "x roof":
            values = [v for line in panel["lines"].values() for point in line for v in point[1:]]
            _log_axis(axes.yaxis, values, UNITS[y], base=10)
            axes.set_ylim(min(values) / 3, max(values) * 2)  # the roof of one row lies far below
        axes.set_title(panel["title"], fontsize=7)
        axes.set_xlabel(chart.data["x"], fontsize=7)
        axes.tick_params(labelsize=6, which="both")
        axes.grid()
    figure.suptitle(chart.title, fontsize=9)
    roof = Line2D([], [], color="black", linewidth=0.8, linestyle="dotted", label="roof")
    roofed = y == "x roof" or any(panel["roof"] for panel in panels)
    _legend(figure, sorted({b for panel in panels for b in panel["lines"]}), (roof,) if roofed else ())
    return figure


def _log_axis(axis, values: list[float], text, base: int = 2) -> None:
    """Logarithmic, with a handful of ticks written plainly."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    axis.axes.set(**{f"{axis.axis_name}scale": "log"})
    if base == 2:
        ticks = sorted(set(values))
        ticks = ticks[:: -max(1, math.ceil(len(ticks) / 5))]  # the last one always
    else:
        low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        step = max(1, math.ceil((high - low) / 5))
        ticks = [10.0**power for power in range(low, high + 1, step)]
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(value)))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _time(us: float) -> str:
    for size, unit in ((1e6, "s"), (1e3, "ms"), (1.0, "µs")):
        if us >= size:
            return f"{us / size:g} {unit}"
    return f"{us * 1e3:g} ns"


def _mib(value: float) -> str:
    return f"{value:,.0f} MiB" if value >= 1 else f"{value:g} MiB"


UNITS = {"us": _time, "MiB": _mib, "tokens/s": _count}


def _summary(chart: Chart):
    figure = _figure(11.5, 4.2)
    bits, steps, kernels = figure.subplots(1, 3, width_ratios=(0.8, 1.5, 1.7))
    _bits(bits, chart.data["bits"])
    _steps(steps, chart.data["steps"])
    _kernels(kernels, chart.data["kernels"])
    seen = {who for step in chart.data["steps"] for who in step["ms"]}
    seen |= {peer for room in chart.data["kernels"] for peer in room["over"]}
    _legend(figure, sorted(seen | {"vexact"}))
    return figure


def _bits(axes, counts: dict[str, list[int]]) -> None:
    for place, (who, color) in enumerate((("vexact", about("vexact").color), ("stock", about("torch").color))):
        wrong, of = counts[who]
        share = 100 * wrong / of if of else 0.0
        axes.bar(place, share, 0.6, color=color)
        axes.text(place, share + 2, f"{wrong:,}\nof {of:,}", ha="center", va="bottom", fontsize=7)
    axes.set_xticks([0, 1], ["vexact", "Hugging Face,\nas it is"])
    axes.set_ylim(0, 125)
    axes.set_yticks([0, 50, 100], ["0 %", "50 %", "100 %"])
    axes.set_title("log-probabilities that differ\nbetween rollout and trainer")


def _steps(axes, steps: list[dict]) -> None:
    at, ticks = 0.0, []
    for step in steps:
        order = sorted(step["ms"], key=lambda who: (who != "vexact", who))
        for i, who in enumerate(order):
            axes.barh(at - i, step["ms"][who], 0.9, color=about(who).color)
            axes.text(step["ms"][who], at - i, f" {step['ms'][who]:.3g}", va="center", fontsize=5)
        ticks.append((at - (len(order) - 1) / 2, step["label"].replace(", ", "\nsequences: ")))
        at -= len(order) + 0.8
    axes.set_yticks(*zip(*ticks))
    axes.set_ylim(at + 1, 1)
    axes.tick_params(axis="y", length=0, labelsize=6)
    axes.set_xlabel("ms")
    axes.grid(axis="x")
    axes.set_title("a decode step of the engine\n(vLLM measured apart)")


def _kernels(axes, kernels: list[dict]) -> None:
    at, ticks = 0.0, []
    for room in kernels:
        for place, (peer, ratio) in enumerate(room["over"].items()):
            axes.bar(at + place, ratio, 0.9, color=about(peer).color)
            axes.text(at + place, ratio, f"{ratio:.2f}", ha="center", va="bottom", fontsize=5)
        ticks.append((at + (len(room["over"]) - 1) / 2, room["room"]))
        at += len(room["over"]) + 0.8
    axes.axhline(1.0, color="black", linewidth=0.8, linestyle="dashed")
    axes.set_xticks(*zip(*ticks), rotation=40, ha="right", rotation_mode="anchor")
    axes.tick_params(axis="x", length=0, labelsize=7)
    axes.grid(axis="y")
    axes.set_title("time of vexact's kernels over the peer's\n(below 1: vexact is faster; mean over cases)")
