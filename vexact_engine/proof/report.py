"""A verification as one self-contained HTML file: verdict, figures, plots, texts and the numerics behind them.

Nothing is loaded from anywhere: style and plots are inside the file. All text is escaped.
"""

import base64
import io
import json
from html import escape
from pathlib import Path

import torch
from torch import Tensor

from .compare import Side, differences
from .verify import Verification

ALIGNED, STOCK, STOCK_OTHER, INK, GRID = "#0f8a6d", "#d1495b", "#e39b3b", "#2b2f36", "#e6e8eb"
FLOOR = 1e-9  # where zeros are drawn on a logarithmic axis: below anything that fp32 log-probabilities can differ by

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f8; color: #2b2f36; font: 16px/1.55 system-ui, "Segoe UI", Roboto, sans-serif; }
main { max-width: 980px; margin: 0 auto; padding: 40px 24px 64px; }
h1 { font-size: 30px; margin: 0 0 4px; letter-spacing: -0.01em; }
h2 { font-size: 20px; margin: 40px 0 12px; }
p { margin: 8px 0; }
.lead { color: #5c6370; margin-bottom: 24px; }
.card { background: #fff; border: 1px solid #e6e8eb; border-radius: 12px; padding: 20px 24px; margin: 16px 0; }
.verdict { border-left: 6px solid; font-size: 18px; font-weight: 600; }
.equal { border-left-color: #0f8a6d; } .differ { border-left-color: #d1495b; }
.verdict small { display: block; font-weight: 400; font-size: 14px; color: #5c6370; margin-top: 4px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 600; color: #5c6370; font-size: 14px; }
th, td { padding: 8px 12px 8px 0; border-bottom: 1px solid #eef0f2; vertical-align: top; }
tr:last-child td { border-bottom: 0; }
td.n, th.n { text-align: right; }
img { width: 100%; height: auto; display: block; }
.dot { display: inline-block; width: 10px; height: 10px; border-radius: 50%; margin-right: 8px; }
details { border-bottom: 1px solid #eef0f2; padding: 10px 0; }
details:last-child { border-bottom: 0; }
summary { cursor: pointer; overflow-wrap: anywhere; }
summary span { color: #5c6370; font-size: 14px; }
.text { white-space: pre-wrap; overflow-wrap: anywhere; background: #f6f7f8; border-radius: 8px; padding: 12px 16px;
  margin: 8px 0; }
.error { color: #b3263a; }
pre { white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.5 ui-monospace, Menlo, Consolas, monospace;
  margin: 0; }
footer { color: #5c6370; font-size: 14px; margin-top: 40px; }
"""


def write_report(path: str | Path, verification: Verification) -> None:
    """`render` into a file. Raises OSError where it cannot be written."""
    Path(path).write_text(render(verification), encoding="utf-8")


def render(verification: Verification) -> str:
    """The report as HTML text."""
    v = verification
    sides = [v.aligned, *v.stock]
    parts = [
        f"<h1>{escape(v.title)}</h1>",
        f'<p class="lead">{escape(v.model)} · {escape(v.dtype)} on {escape(v.device)} · {len(v.aligned.samples)} '
        f"answers · {v.comparison.tokens} tokens · {escape(v.date)}</p>",
        f'<div class="card verdict {"equal" if v.equal else "differ"}">{escape(v.verdict())}'
        f"<small>{escape(_explain(v))}</small></div>",
        "<h2>Rollout against training</h2>",
        f'<div class="card scroll">{_figures_table(sides)}</div>',
    ]
    if v.comparison.tokens:
        parts += [
            f'<div class="card">{_image(plot_tokens(sides), "Difference of every token")}</div>',
            f'<div class="card">{_image(plot_histogram(sides), "Histogram of the differences")}</div>',
        ]
    parts += ["<h2>How it ran</h2>", f'<div class="card scroll">{_run_table(v)}</div>']
    parts += ["<h2>Texts</h2>", f'<div class="card">{"".join(map(_sample, v.aligned.samples))}</div>']
    parts += ["<h2>Settings, numerics and environment</h2>"]
    for name, value in (("Settings", v.settings), ("Numerics", v.numerics), ("Environment", v.environment)):
        parts.append(f'<div class="card"><h3>{name}</h3><pre>{escape(json.dumps(value, indent=2))}</pre></div>')
    parts.append("<footer>Written by vexact. Equal means equal bits: no tolerance is involved.</footer>")
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(v.title)}</title><style>{STYLE}</style>"
    )
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body><main>{"".join(parts)}</main></body></html>\n'


def _explain(v: Verification) -> str:
    rollout = (
        "Every token was sampled by the engine and scored again by the patched Hugging Face model in training form"
    )
    if v.equal:
        return f"{rollout}: both report the same 32 bits for each of them."
    if not v.comparison.tokens:
        return "Nothing was generated, so nothing was compared."
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


def _run_table(v: Verification) -> str:
    rows = {"command": v.command} if v.command else {}
    rows |= {k.replace("_", " "): x for k, x in v.statistics.items()}
    for batch in v.batches:
        rows[f"{batch.requests} prompts again, {batch.batch_size} at a time"] = _again(batch)
    if v.warm is not None:
        known = f"{v.warm.prefix_tokens} of their tokens from the prefix cache"
        rows[f"{v.warm.requests} prompts again, {known}"] = _again(v.warm)
    if v.gradients is not None:
        g = v.gradients
        rows["backward pass"] = (
            f"{g.sequences} packed sequences, {g.tokens} tokens, {g.tensors} gradients, {g.verdict()}, "
            f"norm {g.norm:.4g}"
        )
    rows["seconds"] = f"{v.seconds:.1f}"
    cells = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(x))}</td></tr>" for k, x in rows.items())
    return f"<table>{cells}</table>"


def _again(batch) -> str:
    return f"{batch.mismatched_tokens} of {batch.tokens} tokens differ ({batch.seconds:.1f} s)"


def _sample(sample) -> str:
    rollout = sample.rollout
    note = f"{len(sample.token_ids)} tokens, {sample.finish_reason}"
    if sample.trainer is not None and rollout.numel():
        note += f", {int(differences(rollout, sample.trainer)[1].sum())} differ"
    shown = sample.prompt_text if len(sample.prompt_text) <= 110 else sample.prompt_text[:109] + "…"
    body = f'<div class="text">{escape(sample.prompt_text)}</div>' if shown != sample.prompt_text else ""
    if sample.error:
        body += f'<p class="error">{escape(sample.error)}</p>'
    answer = sample.text or " ".join(map(str, sample.token_ids))
    body += f'<div class="text">{escape(answer)}</div>'
    return f"<details><summary>{escape(shown)} <span>· {escape(note)}</span></summary>{body}</details>"


def _axes(width: float, height: float):
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure  # not pyplot: it holds global state and may open a window

    figure = Figure(figsize=(width, height), dpi=160, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color("#c6cad0")
    axes.tick_params(colors=INK, labelsize=9)
    axes.grid(True, color=GRID, linewidth=0.8)
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
    axes.legend(handles[::-1], labels[::-1], frameon=False, fontsize=9, **options)
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
                axes.annotate(text, (position, value), (0, 2), textcoords="offset points", ha="center", fontsize=7.5)
    axes.grid(False, axis="x")
    axes.set_ylim(0, 110)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlabel("|difference|, from this on", color=INK, fontsize=10)
    axes.set_ylabel("% of tokens", color=INK, fontsize=10)
    axes.set_title("How many tokens differ, and by how much", loc="left", color=INK, fontsize=12)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    return figure


def _image(figure, alt: str) -> str:
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", metadata={"Software": None})
    data = base64.b64encode(buffer.getvalue()).decode()
    return f'<img alt="{escape(alt)}" src="data:image/png;base64,{data}">'
