"""The generated parts of README files: between `<!-- KIND NAME -->` and `<!-- end -->` stand tables of
results/NAME.jsonl, charts of it, the summary of all, and the comparison with peers."""

import re
from collections.abc import Callable
from pathlib import Path

from ..harness import ROOT
from . import charts, compare, tables
from .records import kept, over_shapes

READMES = (ROOT / "README.md", ROOT / "benchmarks" / "README.md")
Kept = dict[str, list[dict]]


def update_readmes() -> None:
    for readme in READMES:
        update_readme(readme)


def update_readme(readme: Path) -> None:
    """Rewrite a file's generated parts. Where charts lie is said as seen from the folder of this project's file of that
    name, so that a copy elsewhere comes out the same."""
    text, records = readme.read_text(), kept()
    for marker in re.findall(r"<!-- (benchmarks [\w-]+|charts [\w-]+|summary|libraries) -->", text):
        what, _, name = marker.partition(" ")
        body = f"<!-- {marker} -->\n{PARTS[what](records, name)}\n<!-- end -->"
        text = re.sub(rf"<!-- {marker} -->.*?<!-- end -->", lambda _, body=body: body, text, flags=re.S)
    readme.write_text(text)


def block(records: Kept, name: str) -> str:
    """All tables of one results file, under a line that says what they were measured on."""
    mine = records[name]
    newest = max((r for r in mine if r["torch"]), key=lambda r: r["date"])
    head = f"{newest['gpu'] or newest['cpu']}, torch {newest['torch']}, {_commits(mine)}, {newest['date']}"
    parts = [make(found) for make, found in _sorted_out(mine) if found]
    return f"{head}\n\n" + "\n\n".join(parts)


def _sorted_out(records: list[dict]) -> list[tuple[Callable, list[dict]]]:
    """What makes a table, and the records that it is for; a record that belongs nowhere else is a program's."""
    special = {
        tables.verify_table: lambda r: r["room"] == "verify",
        tables.engine_table: lambda r: r["room"] == "engine" and "workload" in r,
        tables.sleep_table: lambda r: "sleep" in r,
        tables.soak_table: lambda r: r["room"] == "soak",
        tables.handover_table: lambda r: r["room"] == "handover",
        tables.training_table: lambda r: r["room"] == "training",
        tables.rl_step_table: lambda r: r["room"] == "rl_step",
        tables.speculation_table: lambda r: r["room"] == "speculation",
        tables.start_table: lambda r: r["room"] == "start",
        tables.images_table: lambda r: r["room"] == "images",
        tables.spread_table: lambda r: "geomean_to_stock" in r,
    }
    found = {make: [r for r in records if of(r)] for make, of in special.items()}
    kernels = [r for r in records if "us" in r]
    elsewhere = {id(r) for some in (*found.values(), kernels) for r in some}
    programs = [r for r in records if id(r) not in elsewhere]
    spread = found.pop(tables.spread_table)
    last = [(tables.program_table, programs), (tables.spread_table, spread)]
    return [*found.items(), *last, (tables.summary, kernels), (tables.table, kernels)]


def _commits(records: list[dict]) -> str:
    found = list(dict.fromkeys(r["commit"] for r in records if r["commit"]))
    more = f" and {len(found) - 4} more" if len(found) > 4 else ""
    return f"commit{'s' * (len(found) > 1)} {', '.join(found[:4])}{more}"


def pictures(records: Kept, name: str) -> str:
    """One line of Markdown for each chart of a results file."""
    drawn = charts.of({name: records[name]})
    return "\n\n".join(f"![{chart.title}](plots/{chart.path})" for chart in drawn)


def headlines(records: Kept | None = None, _: str = "") -> str:
    """A table of a dozen lines: what was verified, the engine beside vLLM, products beside torch's, memory."""
    records = kept() if records is None else records
    rows = [_verified(records["verify"]), _soaked(records["soak"]), *_steps(records), *_products(records["h200"])]
    return tables.markdown(["what", "vexact", "peers"], rows + _memory(records["h200"]))


def _verified(records: list[dict]) -> list[str]:
    bits = compare.verified(records)
    return [
        f"log-probabilities that differ from the trainer's, {len(records)} models",
        f"**{bits['vexact'][0]:,} of {bits['vexact'][1]:,}**",
        f"stock HF: {bits['stock'][0]:,} of {bits['stock'][1]:,}",
    ]


def _soaked(records: list[dict]) -> list[str]:
    checked, differ = (sum(r[key] for r in records) for key in ("checked", "differ"))
    return ["the engine under random attack: tokens that differ", f"**{differ:,} of {checked:,}**", ""]


def _steps(records: Kept) -> list[list[str]]:
    """A row for each model: its steps at all numbers of sequences, the most first."""
    by_model: dict[str, dict[int, dict[str, dict]]] = {}
    for (model, _, batch), step in compare.steps(records).items():
        if "vexact" in step:
            by_model.setdefault(model, {})[batch] = step
    rows = []
    for model, steps in by_model.items():
        batches = sorted(steps, reverse=True)

        def times(who: str, steps=steps, batches=batches) -> str:
            each = (steps[batch].get(who) for batch in batches)
            return " and ".join(f"{r['step_ms']:.3g}" if r else "-" for r in each) + " ms"

        others = dict.fromkeys(who for batch in batches for who in steps[batch] if who != "vexact")
        tokens = max(step["vexact"]["mean_context"] for step in steps.values())
        count = " and ".join(str(batch) for batch in batches)
        what = f"a step of {model}, {count} sequence{'s' * (batches[0] > 1)} of about {tokens:.0f} tokens"
        rows.append([what, times("vexact"), ", ".join(f"{who}: {times(who)}" for who in others)])
    return rows


def _products(records: list[dict]) -> list[list[str]]:
    rows = []
    for room in ("linear", "grouped_linear"):
        all_of = over_shapes(records, room)
        what = f"{room}, {all_of['case']}: time over torch's, geometric mean of {all_of['cases']} cases"
        most, worst = all_of["p95_to_stock"], all_of["worst_to_stock"]
        spread = f"(95th percentile of a shape at most {most:.2f}, worst {worst:.2f})"
        rows.append([f"{what} {spread}", f"{all_of['geomean_to_stock']:.2f}", "1"])
    return rows


def _memory(records: list[dict]) -> list[list[str]]:
    """At the number of tokens that is the default of `memory`, not at every one that a sweep went over."""
    return [
        [f"peak memory of {r['case']}", f"{r['ours']:,.0f} MiB", f"torch: {r['stock']:,.0f} MiB"]
        for r in records
        if r["room"] == "memory" and r["case"].startswith(("linear_logprobs", "fused_moe")) and "T=8192" in r["case"]
    ]


PARTS: dict[str, Callable[[Kept, str], str]] = {
    "benchmarks": block,
    "charts": pictures,
    "summary": headlines,
    "libraries": lambda records, _: compare.table(records),
}
