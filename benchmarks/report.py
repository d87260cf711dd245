"""From JSON lines to the tables in README.md and to plots. Figures are generated here, never typed."""

import json
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


def table(records: Iterable[dict]) -> str:
    """A Markdown table: case, each backend's time, ours over stock."""
    cases: dict[tuple, dict[str, dict]] = defaultdict(dict)
    for record in records:
        cases[record["room"], record["case"]][record["backend"]] = record
    rows = ["| room | case | ours, us | torch, us | ours / torch | of roof |", "| --- | --- | --- | --- | --- | --- |"]
    for (room, case), by_backend in cases.items():
        ours = by_backend.get("vexact")
        if ours is None:
            continue
        stock = f"{ours['stock_us']:.1f}" if ours["stock_us"] else "-"
        ratio = f"{ours['ratio_to_stock']:.2f}" if ours["ratio_to_stock"] else "-"
        roof = f"{100 * ours['roof_us'] / ours['us']:.0f} %"
        rows.append(f"| {room} | {case} | {ours['us']:.1f} | {stock} | {ratio} | {roof} |")
    return "\n".join(rows)


def program_table(records: Iterable[dict]) -> str:
    """A Markdown table of the whole-program records (engine, memory)."""
    rows = ["| program | case | ours | stock | unit | ours / stock |", "| --- | --- | --- | --- | --- | --- |"]
    for r in records:
        rows.append(f"| {r['room']} | {r['case']} | {r['ours']} | {r['stock']} | {r['unit']} | {r['ratio']:.2f} |")
    return "\n".join(rows)


def update_readme(readme: Path = ROOT / "README.md") -> None:
    """Rewrite the parts of README.md between `<!-- benchmarks NAME -->` and `<!-- end -->` from results/NAME.jsonl."""
    text = readme.read_text()
    for name in re.findall(r"<!-- benchmarks ([\w-]+) -->", text):
        records = load(RESULTS / f"{name}.jsonl")
        kernels = [r for r in records if "us" in r]
        programs = [r for r in records if "us" not in r]
        newest = max(records, key=lambda r: r["date"])
        about = (
            f"{newest['gpu'] or newest['cpu']}, torch {newest['torch']}, commit {newest['commit']}, {newest['date']}"
        )
        parts = [p for p in (programs and program_table(programs), kernels and table(kernels)) if p]
        body = f"<!-- benchmarks {name} -->\n{about}\n\n" + "\n\n".join(parts) + "\n<!-- end -->"
        text = re.sub(rf"<!-- benchmarks {name} -->.*?<!-- end -->", lambda _, body=body: body, text, flags=re.S)
    readme.write_text(text)


def plot(records: list[dict], folder: Path) -> list[Path]:
    """One PNG per room: time of every backend against the roof, case by case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder.mkdir(parents=True, exist_ok=True)
    rooms: dict[str, list[dict]] = defaultdict(list)
    for record in records:
        if "us" in record:
            rooms[record["room"]].append(record)
    written = []
    for room, rows in rooms.items():
        cases = list(dict.fromkeys(r["case"] for r in rows))
        backends = list(dict.fromkeys(r["backend"] for r in rows))
        figure, axis = plt.subplots(figsize=(9, 1.5 + 0.28 * len(cases) * len(backends)))
        height = 0.8 / len(backends)
        for index, backend in enumerate(backends):
            times = {r["case"]: r["us"] for r in rows if r["backend"] == backend}
            at = [i + index * height for i, case in enumerate(cases) if case in times]
            axis.barh(at, [times[case] for case in cases if case in times], height, label=backend)
        roofs = {r["case"]: r["roof_us"] for r in rows}
        for i, case in enumerate(cases):
            label = "roof" if i == 0 else None
            axis.vlines(
                roofs[case], i - height / 2, i + 0.8 - height / 2, colors="black", linestyles="dotted", label=label
            )
        axis.set_yticks([i + 0.4 - height / 2 for i in range(len(cases))], cases, fontsize=7)
        axis.set_xscale("log")
        axis.set_xlabel("microseconds (less is better)")
        axis.set_title(f"{room}: {rows[0]['gpu'] or rows[0]['cpu']}")
        axis.invert_yaxis()
        axis.legend(fontsize=8)
        figure.tight_layout()
        path = folder / f"{room}.png"
        figure.savefig(path, dpi=140)
        plt.close(figure)
        written.append(path)
    return written
