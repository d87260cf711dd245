"""From JSON lines to the tables in the README files and to plots. Figures are generated here, never typed."""

import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from .harness import RESULTS, ROOT


def load(path: Path) -> list[dict]:
    """All records of a results file; of a case measured twice, the newest only."""
    newest = {}
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            record = json.loads(text)
            newest[record["room"], record["case"], record["backend"]] = record
        except (ValueError, KeyError) as error:
            raise ValueError(f"{path}:{number}: not a benchmark record: {error}") from None
    return list(newest.values())


_ROWS = re.compile(r"\b([A-Z])=(\d+)\b ?")


def series(case: str) -> tuple[str, int | None]:
    """A case's name without its row count, and that: "qwen3-8b M=16 bf16" -> ("qwen3-8b bf16", 16)."""
    found = _ROWS.search(case)
    return (_ROWS.sub("", case, count=1).strip(), int(found[2])) if found else (case, None)


def table(records: Iterable[dict]) -> str:
    """A Markdown table: a line per room and case without its row count, a column per row count that occurs; a cell is
    our time in us and, in brackets, that over stock."""
    lines: dict[tuple, dict[int | None, dict]] = defaultdict(dict)
    for record in records:
        if record["backend"] == "vexact":
            name, count = series(record["case"])
            lines[record["room"], name][count] = record
    counts = sorted({count for cells in lines.values() for count in cells}, key=lambda c: -1 if c is None else c)
    heads = ["" if count is None else f"{count} rows" for count in counts]
    rows = [f"| room | case | {' | '.join(heads)} |", f"| --- | --- |{' --- |' * len(counts)}"]
    for (room, name), cells in lines.items():
        rows.append(f"| {room} | {name} | {' | '.join(_cell(cells.get(count)) for count in counts)} |")
    return "\n".join(rows)


def _cell(record: dict | None) -> str:
    if record is None:
        return ""
    ratio = f" ({record['ratio_to_stock']:.2f})" if record["ratio_to_stock"] else ""
    return f"{record['us']:.4g}{ratio}"


def summary(records: Iterable[dict]) -> str:
    """A Markdown table: a line per room and row count, geometric means over its cases of ours / each other backend and
    of the share of the roof."""
    cases: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for record in records:
        cases[record["room"], record["case"]][record["backend"]] = record
    others = list(dict.fromkeys(b for by in cases.values() for b in by if not b.startswith("vexact")))
    groups: dict[tuple, list[dict]] = defaultdict(list)
    for (room, case), by in cases.items():
        if "vexact" in by:
            groups[room, series(case)[1]].append(by)
    rows = [
        f"| room | rows | cases | of roof | {' | '.join(f'ours / {b}' for b in others)} |",
        f"| --- | --- | --- | --- |{' --- |' * len(others)}",
    ]
    for (room, count), members in groups.items():
        share = _geomean(by["vexact"]["roof_us"] / by["vexact"]["us"] for by in members)
        ratios = [_geomean(by["vexact"]["us"] / by[b]["us"] for by in members if b in by) for b in others]
        cells = " | ".join("" if r is None else f"{r:.2f}" for r in ratios)
        rows.append(f"| {room} | {'' if count is None else count} | {len(members)} | {100 * share:.0f} % | {cells} |")
    return "\n".join(rows)


def _geomean(values: Iterable[float]) -> float | None:
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else None


def spreads(records: Iterable[dict], room: str, drawn: str) -> list[dict]:
    """How our time over stock spreads over the cases of one room: a record for each shape, and one for all."""
    ours = [r for r in records if r["room"] == room and r["backend"] == "vexact" and r.get("ratio_to_stock")]
    by_shape: dict[str, list[dict]] = defaultdict(list)
    for record in ours:
        by_shape[record["case"].split()[0]].append(record)
    groups = {**by_shape, "all shapes": ours} if len(by_shape) > 1 else by_shape
    about = ("device", "gpu", "cpu", "torch", "triton", "commit", "date")
    return [
        {
            "room": room,
            "case": f"{name} rows {drawn}",
            "backend": "vexact",
            "cases": len(members),
            "geomean_to_stock": round(_geomean(r["ratio_to_stock"] for r in members), 4),
            "p95_to_stock": percentile([r["ratio_to_stock"] for r in members], 0.95),
            "worst": [[r["case"], r["us"], r["ratio_to_stock"]] for r in _worst(members)],
            **{key: members[0].get(key) for key in about},
        }
        for name, members in groups.items()
    ]


def _worst(members: list[dict]) -> list[dict]:
    return sorted(members, key=lambda r: r["ratio_to_stock"], reverse=True)[:5]


def percentile(values: list[float], share: float) -> float:
    """The smallest of the values that at least this share of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def spread_line(record: dict) -> str:
    case, us, ratio = record["worst"][0]
    return (
        f"{record['room']} {record['case']}: time / stock over {record['cases']} cases: geometric mean "
        f"{record['geomean_to_stock']:.3f}, 95th percentile {record['p95_to_stock']:.3f}, worst {ratio:.3f} ({case}, "
        f"{us:.1f} us)"
    )


def spread_table(records: Iterable[dict]) -> str:
    """A Markdown table: our time over stock at row counts drawn at random."""
    rows = ["| room | shapes, rows | cases | geometric mean | 95th percentile | worst |", "| --- |" + " --- |" * 5]
    for r in records:
        case, _, ratio = r["worst"][0]
        rows.append(
            f"| {r['room']} | {r['case']} | {r['cases']} | {r['geomean_to_stock']:.2f} | {r['p95_to_stock']:.2f} | "
            f"{ratio:.2f} ({case}) |"
        )
    return "\n".join(rows)


def verify_table(records: Iterable[dict]) -> str:
    """A Markdown table: how many log-probabilities of the rollout differ from the trainer's, ours and stock."""
    heads = ["model", "weights", "tokens", "differ", "max diff", "again in batches of", "differ", "warm cache: differ"]
    heads += ["stock: differ", "stock: max diff"]
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for r in records:
        sizes = ", ".join(map(str, r["batch_sizes"]))
        again = f"{r['batch_mismatched']} of {r['batch_tokens']}" if sizes else ""
        warm = f"{r['warm_mismatched']} of {r['warm_tokens']}" if "warm_tokens" in r else ""
        stock = f"{r['stock_mismatched']} of {r['stock_tokens']} | {r['stock_max_abs_diff']:.3g}"
        ours = f"{r['tokens']} | {r['mismatched']} | {r['max_abs_diff']:.3g}"
        rows.append(f"| {r['case']} | {r['weights']} | {ours} | {sizes} | {again} | {warm} | {stock} |")
    return "\n".join(rows)


def engine_table(records: Iterable[dict]) -> str:
    """A Markdown table: what was sent to an engine, how fast it answered, and how many log-probabilities the training
    forward computes otherwise."""
    heads = ["model", "requests", "engine", "step, ms", "roof, ms", "step / roof", "output tokens/s", "requests/s"]
    heads += ["first token p50 / p99, ms", "per token p50 / p99, ms", "GPU idle", "start, s", "differ"]
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for r in sorted(
        records, key=lambda r: (r["model"], bool(r.get("latent")), r["workload"], r["backend"] != "vexact")
    ):
        ours = r["backend"] == "vexact"
        about = " ".join(filter(None, (r["model"], "latent" * bool(r.get("latent")), r["dtype"])))
        least = f" (at most {r['new_at_most']} new)" if r.get("new_at_most", r["new"]) < r["new"] else ""
        backend = " ".join(filter(None, (r["backend"], r.get("version"))))
        cells = [about, r["workload"] + least, backend, _figure(r.get("step_ms")), _figure(r.get("roof_ms"))]
        cells += [f"{r['step_over_roof']:.2f}" if r.get("step_over_roof") else "", f"{r['tokens_per_s']:,.0f}"]
        cells += [_figure(r["requests_per_s"])]
        for name in ("ttft_ms", "tpot_ms"):
            cells.append(f"{_figure(r[name]['p50'])} / {_figure(r[name]['p99'])}" if r.get(name) else "")
        cells.append(f"{r['gpu_idle']:.1%}" if r.get("gpu_idle") is not None else "")
        cells.append(_figure(r["start_s"]) if ours else "")
        cells.append(f"{r['verify_mismatched']} of {r['verify_tokens']}" if "verify_tokens" in r else "")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def soak_table(records: Iterable[dict]) -> str:
    """A Markdown table: what random use of the engine has brought to light."""
    heads = [
        "on",
        "minutes",
        "engines",
        "steps",
        "preemptions",
        "updates",
        "sleeps",
        "aborted",
        "tokens checked",
        "differ",
    ]
    heads += ["pages, slots held", "memory, MiB"]
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for r in records:
        counts, grown = r["counts"], r["growth"] or {}
        cells = [r["gpu"] or r["cpu"], f"{r['minutes']:.0f}"]
        cells += [
            f"{counts.get(name, 0):,}" for name in ("engines", "steps", "preemptions", "updates", "sleeps", "abort")
        ]
        cells += [f"{r['checked']:,}", str(r["differ"]), f"{r['leaked_pages']}, {r['leaked_slots']}"]
        cells.append(", ".join(f"{grown[n]:+.1f} {label}" for n, label in _SOAKED.items() if n in grown))
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


_SOAKED = {"rss_mib": "resident", "cuda_mib": "on the GPU"}


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def handover_table(records: Iterable[dict]) -> str:
    """A Markdown table: how fast weights come to an engine in another process, and how long that stands still."""
    heads = ["weights of a trainer", "GiB", "ms", "GB/s", "of a copy", "engine stands still, ms", "grown"]
    rows = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for r in records:
        grown = ", ".join(f"{name} {count:+}" for name, count in r["grown"].items() if count > 0) or "nothing"
        cells = [r["case"], f"{r['gib']:.1f}", f"{r['ms']:.1f}", f"{r['ours']:.0f}", f"{r['ratio']:.0%}"]
        cells += [f"{max(r['stall_ms']):.0f} (a step: {r['step_ms']:.1f})", f"{grown} in {r['updates']} updates"]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def program_table(records: Iterable[dict]) -> str:
    """A Markdown table of the whole-program records (engine, memory)."""
    rows = ["| program | case | ours | stock | unit | ours / stock |", "| --- | --- | --- | --- | --- | --- |"]
    for r in records:
        rows.append(f"| {r['room']} | {r['case']} | {r['ours']} | {r['stock']} | {r['unit']} | {r['ratio']:.2f} |")
    return "\n".join(rows)


def _commits(records: list[dict]) -> str:
    found = list(dict.fromkeys(r["commit"] for r in records if r["commit"]))
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"commit{'s' * (len(found) > 1)} {', '.join(found[:4])}{more}"


READMES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")


def headlines() -> str:
    """A Markdown table of a dozen lines: what was verified, the engine beside vLLM, products beside torch's, memory."""
    kept = {name: load(RESULTS / f"{name}.jsonl") for name in ("verify", "engine", "h200", "soak")}
    rows = ["| what | vexact | peers |", "| --- | --- | --- |"]
    verified = kept["verify"]
    tokens, wrong = (sum(r[key] + r["batch_" + key] for r in verified) for key in ("tokens", "mismatched"))
    stock, off = (sum(r["stock_" + key] or 0 for r in verified) for key in ("tokens", "mismatched"))
    rows.append(
        f"| log-probabilities that differ from the trainer's, {len(verified)} models | **{wrong:,} of {tokens:,}** | "
        f"stock HF: {off:,} of {stock:,} |"
    )
    soaked = kept["soak"]
    checked, differ = (sum(r[key] for r in soaked) for key in ("checked", "differ"))
    rows.append(f"| the engine under random attack: tokens that differ | **{differ:,} of {checked:,}** | |")
    newest: dict[tuple, dict] = {}
    for record in kept["engine"] + kept["h200"]:
        seen = record["backend"] != "vexact" or record.get("verify_tokens")
        if record["room"] == "engine" and record.get("step_ms") and record.get("batch") in (1, 256) and seen:
            newest[record["model"], record["latent"], record["batch"], record["backend"]] = record
    for (model, latent, batch, backend), record in newest.items():
        if backend == "vexact":
            others = [
                f"{name}: {other['step_ms']:.3g} ms"
                for (*of, name), other in newest.items()
                if of == [model, latent, batch] and name != "vexact"
            ]
            what = (
                f"a step of {model}, {batch} sequence{'s' * (batch > 1)} of about {record['mean_context']:.0f} tokens"
            )
            rows.append(f"| {what} | {record['step_ms']:.3g} ms | {', '.join(others)} |")
    for room in ("linear", "grouped_linear"):
        spread = [r for r in kept["h200"] if r["room"] == room and "geomean_to_stock" in r]
        best = max(spread, key=lambda r: r["cases"])
        rows.append(
            f"| {room}, {best['case']}: time over torch's, geometric mean of {best['cases']} cases | "
            f"{best['geomean_to_stock']:.2f} | 1 |"
        )
    for record in kept["h200"]:
        if record["room"] == "memory" and record["case"].startswith(("linear_logprobs", "fused_moe")):
            rows.append(
                f"| peak memory of {record['case']} | {record['ours']:,.0f} MiB | torch: {record['stock']:,.0f} MiB |"
            )
    return "\n".join(rows)


def update_readmes() -> None:
    for readme in READMES:
        update_readme(readme)


def update_readme(readme: Path) -> None:
    """Rewrite the parts of a file between `<!-- benchmarks NAME -->` and `<!-- end -->` from results/NAME.jsonl, and
    that behind `<!-- summary -->` from all."""
    text = readme.read_text()
    if "<!-- summary -->" in text:
        body = f"<!-- summary -->\n{headlines()}\n<!-- end -->"
        text = re.sub(r"<!-- summary -->.*?<!-- end -->", lambda _, body=body: body, text, flags=re.S)
    for name in re.findall(r"<!-- benchmarks ([\w-]+) -->", text):
        records = load(RESULTS / f"{name}.jsonl")
        kernels = [r for r in records if "us" in r]
        verified = [r for r in records if r["room"] == "verify"]
        spread = [r for r in records if "geomean_to_stock" in r]
        engines = [r for r in records if r["room"] == "engine" and "workload" in r]
        soaks = [r for r in records if r["room"] == "soak"]
        handed = [r for r in records if r["room"] == "handover"]
        others = verified + spread + engines + soaks + handed
        programs = [r for r in records if "us" not in r and r not in others]
        newest = max((r for r in records if r["torch"]), key=lambda r: r["date"])
        about = f"{newest['gpu'] or newest['cpu']}, torch {newest['torch']}, {_commits(records)}, {newest['date']}"
        parts = [
            p
            for p in (
                verified and verify_table(verified),
                engines and engine_table(engines),
                soaks and soak_table(soaks),
                handed and handover_table(handed),
                programs and program_table(programs),
                spread and spread_table(spread),
                kernels and summary(kernels),
                kernels and table(kernels),
            )
            if p
        ]
        body = f"<!-- benchmarks {name} -->\n{about}\n\n" + "\n\n".join(parts) + "\n<!-- end -->"
        text = re.sub(rf"<!-- benchmarks {name} -->.*?<!-- end -->", lambda _, body=body: body, text, flags=re.S)
    readme.write_text(text)


def plot(records: list[dict], folder: Path) -> list[Path]:
    """One PNG per room: a panel per case without its row count; time of every backend over the row count, against the
    roof. Of the engine two: output tokens per second, and a step over its roof, over the sequences that run at once."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    rooms: dict[str, dict[str, list[dict]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        if "us" in record:
            rooms[record["room"]][series(record["case"])[0]].append(record)
    written = []
    for room, panels in rooms.items():
        across = min(4, len(panels))
        down = -(-len(panels) // across)
        figure, axes = plt.subplots(down, across, figsize=(4.2 * across, 3.3 * down), squeeze=False)
        for axis in axes.flat[len(panels) :]:
            axis.axis("off")
        backends = list(dict.fromkeys(r["backend"] for rows in panels.values() for r in rows))
        for axis, (name, rows) in zip(axes.flat, panels.items()):
            roof = sorted({(series(r["case"])[1] or 1, r["roof_us"]) for r in rows})
            axis.plot(*zip(*roof), color="black", linestyle="dotted", label="roof")
            for index, backend in enumerate(backends):
                points = sorted((series(r["case"])[1] or 1, r["us"]) for r in rows if r["backend"] == backend)
                if points:
                    axis.plot(*zip(*points), marker="o", markersize=3, color=f"C{index}", label=backend)
            axis.set_xscale("log", base=2)
            axis.set_yscale("log")
            axis.set_title(name, fontsize=8)
            axis.tick_params(labelsize=7)
            axis.grid(alpha=0.3)
        for axis in axes[:, 0]:
            axis.set_ylabel("microseconds", fontsize=8)
        axes.flat[0].legend(fontsize=7)
        first = next(iter(panels.values()))[0]
        figure.suptitle(f"{room}: time over rows, {first['gpu'] or first['cpu']}", fontsize=10)
        figure.tight_layout()
        path = folder / f"{room}.png"
        figure.savefig(path, dpi=140)
        plt.close(figure)
        written.append(path)
    engines = [r for r in records if r["room"] == "engine" and "workload" in r and r.get("rate") is None]
    return written + [_plot_engine(engines, what, plt, folder) for what in ENGINE_PLOTS if engines]


ENGINE_PLOTS = {
    "throughput": ("output tokens per second", lambda r: r["tokens_per_s"]),
    "step": ("a decode step over its roof", lambda r: r.get("step_over_roof")),
}


def _plot_engine(records: list[dict], what: str, plt, folder: Path) -> Path:
    label, value = ENGINE_PLOTS[what]
    panels: dict[str, dict[str, list]] = defaultdict(lambda: defaultdict(list))
    for r in records:
        kind = re.sub(r"^\d+ x |, \d+ at a time$", "", r["workload"])
        if value(r) is not None:
            panels[f"{r['model']}, {kind}, {r['dtype']}"][r["backend"]].append((r["batch"], value(r)))
    across = min(3, max(1, len(panels)))
    down = -(-len(panels) // across) or 1
    figure, axes = plt.subplots(down, across, figsize=(5 * across, 3.6 * down), squeeze=False)
    for axis in axes.flat[len(panels) :]:
        axis.axis("off")
    names = sorted({backend for lines in panels.values() for backend in lines}, key=lambda b: (b != "vexact", b))
    for axis, (title, lines) in zip(axes.flat, panels.items()):
        for index, backend in enumerate(names):
            if backend in lines:
                axis.plot(*zip(*sorted(lines[backend])), marker="o", markersize=4, color=f"C{index}", label=backend)
        if what == "step":
            axis.axhline(1.0, color="black", linestyle="dotted", label="roof")
        else:
            axis.set_yscale("log")
        axis.set_xscale("log", base=2)
        axis.set_title(title, fontsize=8)
        axis.set_xlabel("sequences at once", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
        axis.legend(fontsize=7)
    axes[0, 0].set_ylabel(label, fontsize=8)
    figure.suptitle(f"engine: {label}, {records[0]['gpu'] or records[0]['cpu']}", fontsize=10)
    figure.tight_layout()
    path = folder / f"engine_{what}.png"
    figure.savefig(path, dpi=140)
    plt.close(figure)
    return path
