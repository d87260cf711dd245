"""A verification as one self-contained HTML file: verdict, figures, plots, texts with every token's log-probabilities,
and the settings and numerics behind them.

Nothing is loaded from anywhere: style, plots and the one script are inside the file. All text is escaped. Without a
script the page says all but the figures of single tokens. Light or dark as the reader's machine is, on a phone too.
"""

import base64
import io
import json
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import page
from .compare import Sample, Side, differences, finite

if TYPE_CHECKING:
    from .verify import Verification

ALIGNED, STOCK, STOCK_OTHER, INK = "#0f8a6d", "#d1495b", "#e39b3b", "#7d8590"  # each to be read on light and on dark
FLOOR = 1e-9  # where zeros are drawn on a logarithmic axis: below anything that fp32 log-probabilities can differ by
DETAILED = 20_000  # tokens whose figures are in the page: about two megabytes

SCRIPT = """
const data = JSON.parse(document.getElementById("data").textContent);
const number = v => typeof v === "number" ? v : v === "inf" ? Infinity : v === "-inf" ? -Infinity : NaN;
const bits = v => new Uint32Array(new Float32Array([v]).buffer)[0].toString(16).padStart(8, "0");
const cell = (row, text, name) => { const c = row.insertCell(); c.textContent = text; if (name) c.className = name; };
function fill(place) {
  if (place.firstChild) return;
  const of = data[place.dataset.index], table = document.createElement("table");
  const head = table.insertRow();
  for (const name of ["", "token", "id", "rollout log p", "trainer log p", "bits"]) {
    const th = document.createElement("th"); th.textContent = name; head.append(th);
  }
  of.ids.forEach((id, i) => {
    const [a, b] = of.logp.map(side => number(side[i])), row = table.insertRow();
    const same = bits(a) === bits(b) && !Number.isNaN(a);
    row.className = same ? "" : "bad";
    cell(row, i, "n"); cell(row, of.text.length ? JSON.stringify(of.text[i]) : "", "code"); cell(row, id, "n");
    for (const v of [a, b]) cell(row, Number.isFinite(v) ? v.toPrecision(9) : String(v), "n");
    cell(row, same ? bits(a) + " equal" : bits(a) + " | " + bits(b), "code");
  });
  place.append(table);
}
const samples = [...document.querySelectorAll("details.sample")];
const search = document.getElementById("search"), only = document.getElementById("differing");
function filter() {
  const wanted = search.value.toLowerCase();
  let shown = 0;
  for (const s of samples) {
    s.hidden = (only.checked && s.dataset.differs === "no") || !s.textContent.toLowerCase().includes(wanted);
    shown += !s.hidden;
  }
  document.getElementById("count").textContent = shown + " of " + samples.length;
}
for (const s of samples) s.addEventListener("toggle", () => {
  const place = s.querySelector(".tokens");
  if (s.open && place) fill(place);
});
search.addEventListener("input", filter); only.addEventListener("change", filter);
document.getElementById("tools").hidden = false;
filter();
"""


def write_report(path: str | Path, verification: "Verification") -> None:
    """`render` into a file. Raises OSError where it cannot be written."""
    Path(path).write_text(render(verification), encoding="utf-8")


def write_plot(path: str | Path, verification: "Verification") -> None:
    """The histogram as a picture of its own: .svg, .png or .pdf, as the file's name says."""
    from matplotlib import rc_context

    figure = plot_histogram([verification.aligned, *verification.stock])
    kind = Path(path).suffix.lower()
    made = {".png": "Software", ".svg": "Date", ".pdf": "CreationDate"}[kind]
    with rc_context({"svg.hashsalt": "vexact"}):  # the same figures, the same bytes
        figure.savefig(path, metadata={made: None}, transparent=True)


def render(verification: "Verification") -> str:
    """The report as HTML text."""
    v = verification
    sides = [v.aligned, *v.stock]
    parts = [
        f"<h1>{escape(v.title)}</h1>",
        f'<p class="lead">{escape(v.model)} · {escape(v.dtype)} on {escape(v.device)} · {len(v.aligned.samples)} '
        f"answers · {v.comparison.tokens} tokens · {escape(v.date)}</p>",
        _verdict(v),
        f'<div class="card scroll">{_checks_table(v)}</div>',
        "<h2>Rollout against training</h2>",
        f'<div class="card scroll">{_figures_table(sides)}</div>',
    ]
    if v.comparison.tokens:
        parts += [
            f'<div class="card">{_image(plot_tokens(sides), "Difference of every token")}</div>',
            f'<div class="card">{_image(plot_histogram(sides), "Histogram of the differences")}</div>',
        ]
    parts += ["<h2>How it ran</h2>", f'<div class="card scroll">{_run_table(v)}</div>']
    parts += ["<h2>Texts</h2>", f'<div class="card">{_texts(v)}</div>']
    parts += ["<h2>Settings, numerics and environment</h2>"]
    for name, value in (("Settings", v.settings), ("Numerics", v.numerics), ("Environment", v.environment)):
        parts.append(f'<div class="card"><h3>{name}</h3><pre>{escape(json.dumps(value, indent=2))}</pre></div>')
    return page.whole(v.title, parts)


def fragment(verification: "Verification") -> str:
    """Verdict, checks and figures for a notebook's cell."""
    v = verification
    return page.cell([_verdict(v), _checks_table(v), _figures_table([v.aligned, *v.stock])])


def _verdict(v: "Verification") -> str:
    return page.verdict(v.equal, v.verdict(), _explain(v))


def _explain(v: "Verification") -> str:
    rollout = (
        "Every token was sampled by the engine and scored again by the patched Hugging Face model in training form"
    )
    if v.equal:
        return f"{rollout}: both report the same 32 bits for each of them."
    if not v.comparison.tokens:
        return "Nothing was generated, so nothing was compared."
    if v.comparison.equal and len(v.failures) == 1 and v.unverified:
        return (
            f"The others' {v.comparison.tokens} log-probabilities are equal. Nothing of that holds for these prompts."
        )
    if v.comparison.equal:
        return f"{rollout}: these {v.comparison.tokens} log-probabilities are equal. What is named above is not."
    return f"{rollout}, and the two do not agree: policy-gradient ratios are not 1 on this machine."


def _label(side: Side) -> str:
    return f"VeXact, {side.dtype}" if side.name == "aligned" else f"stock Hugging Face, {side.dtype}"


def _colours(sides: list[Side]) -> list[str]:
    stock = iter((STOCK, STOCK_OTHER))
    return [ALIGNED if side.name == "aligned" else next(stock) for side in sides]


def _figures_table(sides: list[Side]) -> str:
    head = '<tr><th>stack</th><th class="n">tokens</th><th class="n">differ</th><th class="n">max |diff|</th>'
    head += '<th class="n">KL (k3)</th><th class="n">rollout</th><th class="n">re-score</th></tr>'
    rows = []
    for side, colour in zip(sides, _colours(sides)):
        c = side.comparison
        dot = f'<span class="dot" style="background:{colour}"></span>'
        cells = [f"{c.tokens}", f"{c.mismatched_tokens}", f"{c.max_abs_diff:.3g}", f"{c.k3_kl:.3g}"]
        cells += [f"{side.seconds.get(key, 0):.1f} s" for key in ("rollout", "rescore")]
        figures = "".join(f'<td class="n">{x}</td>' for x in cells)
        rows.append(f"<tr><td>{dot}{escape(_label(side))}</td>{figures}</tr>")
    return f"<table>{head}{''.join(rows)}</table>"


def _run_table(v: "Verification") -> str:
    rows = {"date": v.date}
    rows |= {"command": v.command} if v.command else {}
    rows |= {k.replace("_", " "): x for k, x in v.statistics.items()}
    if v.gradients is not None:
        g = v.gradients
        rows["backward pass"] = (
            f"{g.sequences} packed sequences, {g.tokens} tokens, {g.tensors} gradients, {g.verdict()}, "
            f"norm {g.norm:.4g}"
        )
    rows["seconds"] = f"{v.seconds:.1f}"
    return _pairs(rows)


def _pairs(rows: dict) -> str:
    cells = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(x))}</td></tr>" for k, x in rows.items())
    return f"<table>{cells}</table>"


def _checks_table(v: "Verification") -> str:
    """A row for everything that the verdict rests on."""
    c = v.comparison
    rows = [("rollout against training", c.equal, f"{c.mismatched_tokens} of {c.tokens} log-probabilities differ")]
    if v.unverified:
        rows.append(
            ("every prompt is verified", False, f"{v.unverified} of {v.prompts} are not: {'; '.join(v.errors)}")
        )
    if v.shown is not None:
        c = v.shown.comparison
        rows.append(("greedy answers", c.equal, f"{c.mismatched_tokens} of {c.tokens} log-probabilities differ"))
    for batch in v.batches:
        name = f"{batch.requests} prompts again, {batch.batch_size} at a time"
        rows.append((name, batch.equal, _again(batch)))
    if v.warm is not None:
        known = f", {v.warm.prefix_tokens} of their tokens in the cache"
        rows.append(
            ("again, from a warm prefix cache", v.warm.equal and v.warm.prefix_tokens > 0, _again(v.warm) + known)
        )
    if v.gradients is not None:
        rows.append(("gradients", v.gradients.finite, v.gradients.verdict()))
    cells = "".join(
        f'<tr><td>{escape(name)}</td><td class="{"good" if good else "bad"}">{"holds" if good else "FAILS"}</td>'
        f"<td>{escape(said)}</td></tr>"
        for name, good, said in rows
    )
    return f"<table><tr><th>what</th><th></th><th>found</th></tr>{cells}</table>"


def _again(batch) -> str:
    return f"{batch.mismatched_tokens} of {batch.tokens} tokens differ ({batch.seconds:.1f} s)"


def _texts(v: "Verification") -> str:
    """Every prompt and answer; the figures of single tokens as data that the script shows where a prompt is opened."""
    samples = [*(v.shown.samples if v.shown else ()), *v.aligned.samples]
    room, data = DETAILED, {}
    for index in sorted(range(len(samples)), key=lambda i: not samples[i].mismatched_tokens):  # what differs first
        sample = samples[index]
        if sample.trainer is not None and 0 < len(sample.token_ids) <= room:
            room -= len(sample.token_ids)
            figures = (sample.rollout.tolist(), sample.trainer.tolist())
            data[index] = finite({"ids": sample.token_ids, "text": sample.pieces, "logp": figures})
    greedy = len(v.shown.samples) if v.shown else 0
    items = "".join(_sample(i, s, i in data, "greedy, " if i < greedy else "") for i, s in enumerate(samples))
    told = json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return (
        '<div id="tools" hidden><input id="search" type="search" placeholder="filter prompts and answers" '
        'aria-label="filter prompts and answers"><label><input id="differing" type="checkbox"> only where something '
        f'differs</label><span id="count"></span></div>{items}'
        f'<script type="application/json" id="data">{told}</script><script>{SCRIPT}</script>'
    )


def _sample(index: int, sample: Sample, detailed: bool, kind: str) -> str:
    note = f"{kind}{len(sample.token_ids)} tokens, {sample.finish_reason}"
    if sample.trainer is not None and sample.rollout.numel():
        note += f", {sample.mismatched_tokens} differ"
    shown = sample.prompt_text if len(sample.prompt_text) <= 110 else sample.prompt_text[:109] + "…"
    body = f'<div class="text">{escape(sample.prompt_text)}</div>' if shown != sample.prompt_text else ""
    if sample.error:
        body += f'<p class="error">{escape(sample.error)}</p>'
    answer = sample.text or " ".join(map(str, sample.token_ids))
    body += f'<div class="text">{escape(answer)}</div>'
    if detailed:
        body += f'<div class="tokens scroll" data-index="{index}"></div>'
    elif sample.token_ids and sample.trainer is not None:
        body += '<p class="note">The figures of its tokens are in the file that --json writes.</p>'
    differs = "yes" if sample.mismatched_tokens or sample.error else "no"
    head = f"<summary>{escape(shown)} <span>· {escape(note)}</span></summary>"
    return f'<details class="sample" data-differs="{differs}">{head}{body}</details>'


def _axes(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: it holds global state and may open a window

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="none")  # on light and on dark
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="none")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(INK)
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(True, color=INK, alpha=0.25, linewidth=0.8)
    axes.set_axisbelow(True)
    return figure, axes


def _magnitudes(side: Side) -> Tensor:
    """(T,) |trainer - rollout|; what is not finite is drawn at the top, not left out."""
    d = differences(*side.logprobs())[0].abs()
    return torch.where(d.isfinite(), d, 1e3)


def plot_tokens(sides: list[Side]):
    """A figure: |difference| of every token on a logarithmic axis, with zeros on a line of their own below it."""
    figure, axes = _axes(9, 4.2)
    top = 1e-3
    for side, colour in reversed(list(zip(sides, _colours(sides)))):
        d = _magnitudes(side)
        top = max(top, d.max().item() if d.numel() else 0)
        axes.scatter(
            range(d.numel()), d.clamp(min=FLOOR), s=9, color=colour, alpha=0.75, linewidths=0, label=_label(side)
        )
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 3, top * 4)
    ticks = [10.0**e for e in range(-7, 4) if 10.0**e <= top * 4]
    axes.set_yticks([FLOOR, *ticks], ["0 (equal bits)", *(f"{t:g}" for t in ticks)])
    axes.minorticks_off()
    axes.set_xlabel("generated token", color=INK, fontsize=10)
    axes.set_title("|log p of the trainer − log p of the rollout|, token by token", loc="left", color=INK, fontsize=12)
    handles, labels = axes.get_legend_handles_labels()
    options = dict(ncols=3, loc="upper left", bbox_to_anchor=(0, -0.16), markerscale=2)
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, labelcolor=INK, **options)
    return figure


def plot_histogram(sides: list[Side]):
    """A figure: the share of tokens per decade of |difference|, equal bits in a bin of their own."""
    figure, axes = _axes(9, 3.6)
    edges = list(range(-8, 1))  # decades: <1e-8, 1e-8..1e-7, ..., >= 1
    labels = ["equal\nbits", *(f"{10.0**e:.0e}".replace("e-0", "e-") for e in edges[:-1]), "≥ 1"]
    width = 0.8 / len(sides)
    for index, (side, colour) in enumerate(zip(sides, _colours(sides))):
        d, differs = _magnitudes(side), differences(*side.logprobs())[1]
        decade = d[differs].clamp(min=10.0 ** edges[0]).log10().floor().clamp(max=0).int() - edges[0] + 1
        counts = torch.bincount(decade.long(), minlength=len(labels)).double()
        counts[0] = (~differs).sum()
        share = 100 * counts / max(1, d.numel())
        x = torch.arange(len(labels)) + (index - (len(sides) - 1) / 2) * width
        axes.bar(x.tolist(), share.tolist(), width, color=colour, label=_label(side))
        for position, value in zip(x.tolist(), share.tolist()):
            if value >= 0.5:
                text = f"{value:.0f}"
                axes.annotate(
                    text, (position, value), (0, 2), textcoords="offset points", ha="center", fontsize=7.5, color=INK
                )
    axes.grid(False, axis="x")
    axes.set_ylim(0, 110)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("|difference|, from this on", color=INK, fontsize=10)
    axes.set_ylabel("% of tokens", color=INK, fontsize=10)
    axes.set_title("How many tokens differ, and by how much", loc="left", color=INK, fontsize=12)
    axes.legend(frameon=False, fontsize=9, loc="upper right", labelcolor=INK)
    return figure


def _image(figure, alt: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None}, transparent=True)
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'
