"""A bisection for people: lines for a terminal, and a page."""

import json
from collections import Counter
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from . import page

if TYPE_CHECKING:
    from .bisect import Bisection


def lines(found: "Bisection") -> list[str]:
    """What a terminal shows."""
    f = found
    said = [
        f"a  {f.a}",
        f"b  {f.b}",
        f"   {f.sequences} sequences of {f.tokens_in_all} tokens, {f.compared} tensors compared",
    ]
    if f.module is None:
        return [*said, "", f.verdict()]
    said += ["", *(f"{name:<11}{value}" for name, value in _facts(f))]
    head = ("sequence", "position", "feature", "a", "b", "bits of a", "bits of b")
    rows = [head, *map(_cells, f.first)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    said.append("")
    for number, row in enumerate(rows):
        said.append("  ".join(cell.rjust(w) for cell, w in zip(row, widths)))
        if number == 0:
            said.append("  ".join("-" * w for w in widths))
    return [*said, "", f.verdict()]


def _facts(f: "Bisection") -> list[tuple[str, str]]:
    part = "its own code" if f.part == "inside" else "its output"
    facts = [
        ("module", f"{f.module} ({f.cls}), {part}; all that it was given is equal"),
        ("ops of a", _ops(f.ops_a)),
        ("ops of b", _ops(f.ops_b)),
        (
            "differs",
            f"{f.elements} of {f.tokens * f.width} elements of {f.tokens} tokens, by {f.max_abs_diff:.3g} at most",
        ),
    ]
    if f.cause is not None:
        facts.append(("cause", f"{f.cause.name}: {f.cause.why}"))
    if f.later:
        more = f" and {len(f.later) - 3} more" if len(f.later) > 3 else ""
        facts.append(("later", f"{', '.join(f.later[:3])}{more} differ too"))
    return facts


def _ops(names: tuple[str, ...]) -> str:
    """Each once, in order, and how often."""
    return ", ".join(f"{n} x{c}" if c > 1 else n for n, c in Counter(names).items()) or "none seen"


def _cells(e) -> tuple[str, ...]:
    return str(e.sequence), str(e.position), str(e.feature), f"{e.a:.9g}", f"{e.b:.9g}", e.a_bits, e.b_bits


def write_report(path: str | Path, found: "Bisection") -> None:
    """`render` into a file. Raises OSError where it cannot be written."""
    Path(path).write_text(render(found), encoding="utf-8")


def render(found: "Bisection") -> str:
    """The report as HTML text."""
    f = found
    about = f"{f.a} against {f.b} · {f.sequences} sequences of {f.tokens_in_all} tokens · {f.date}"
    parts = ["<h1>VeXact bisect</h1>", f'<p class="lead">{escape(about)}</p>', *_body(f)]
    command = {"command": f.command} if f.command else {}
    told = escape(json.dumps(command | f.environment, indent=2))
    parts += ["<h2>Environment</h2>", f'<div class="card"><pre>{told}</pre></div>']
    return page.whole("VeXact bisect", parts)


def fragment(found: "Bisection") -> str:
    """For a notebook's cell."""
    return page.cell(_body(found))


def _body(f: "Bisection") -> list[str]:
    more = f"{f.compared} tensors of modules and ops were compared, each for every token."
    parts = [page.verdict(f.equal, f.verdict(), f.cause.why if f.cause else more)]
    if f.module is None:
        return parts
    facts = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in _facts(f))
    head = "".join(f'<th class="n">{h}</th>' for h in ("sequence", "position", "feature", "a", "b", "bits", ""))
    rows = "".join(
        f"<tr>{''.join(f'<td class={chr(34)}n{chr(34)}>{escape(cell)}</td>' for cell in _cells(e))}</tr>"
        for e in f.first
    )
    parts.append(f'<div class="card scroll"><table>{facts}</table></div>')
    parts.append(f'<div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>')
    return parts
