"""What runs have shown: a line for each step, the last word, and plots; of this process's runs and of records."""

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from . import record
from .grpo import ALIGNED, Run


def lines(stream: TextIO) -> Callable[[str], None]:
    """Prints lines: on a terminal in colours, elsewhere as they are."""
    if not stream.isatty():
        return lambda text: print(text, file=stream, flush=True)
    from rich.console import Console
    from rich.text import Text

    console = Console(file=stream)

    def show(text: str) -> None:
        styled = Text(text)
        styled.highlight_regex(r"KL 0\.0 |differ 0( \+ 0)? |: 0 of \d+ log-probabilities differ", "bold green")
        styled.highlight_regex(
            r"KL (?!0\.0 )\S+|differ (?!0 )\S+( \+ \d+)? |: [1-9]\d* of \d+ log-probabilities differ", "bold red"
        )
        styled.highlight_regex(r"\|.*s$", "dim")
        console.print(styled, soft_wrap=True)

    return show


def heading(options: Mapping[str, Any]) -> str:
    """Of a run with these Options, as a record has them."""
    answers = "{steps} steps of {prompts} prompts x {samples} answers".format(**options)
    return "{model}: {0}, temperature {temperature:g}, {dtype}, {device}".format(answers, **options)


def line(side: str, step: dict[str, Any], steps: int) -> str:
    """Of one step, in columns. "differ a + b of n": so many log-probabilities of the rollout were other bytes in the
    first training forward and in the scoring before it."""
    again = "" if step["differ_recomputed"] is None else f" + {step['differ_recomputed']}"
    drafts = ""
    if step["drafted"]:
        drafts = (
            f"  accepted {step['accepted']} of {step['drafted']} drafted, {tokens_per_step(step):.2f} tokens a step"
        )
    return (
        f"{side:<8} {step['step']:>{len(str(steps))}}/{steps}  reward {step['reward']:.3f}  "
        f"entropy {step['entropy']:.3f}  gradient {step['grad_norm']:<6.3g}  weights moved {step['moved']:6.2%}  "
        f"KL {figure(step['kl']):<8}  differ {step['differ']}{again} of {step['compared']}{drafts}  "
        f"| {_seconds(step['seconds'])} s"
    )


def start(side: str, step: int, seconds: Mapping[str, float]) -> str:
    """What a side's first step has waited for."""
    return f"{side}: step {step} was through after {sum(seconds.values()):.2f} s: {_seconds(seconds)} s"


def _seconds(parts: Mapping[str, float]) -> str:
    return "  ".join(f"{name.replace('_', ' ')} {s:.2f}" for name, s in parts.items())


def tokens_per_step(step: dict[str, Any]) -> float:
    """Tokens that an answer gets in a step of the engine: 1 without drafts."""
    return step["tokens"] / max(1, step["tokens"] - step["accepted"])


def verdict(name: str, run: Run) -> str:
    if not run.steps:
        return f"{name}: no step was left to run"
    compared, worst = sum(s["compared"] for s in run.steps), max(s["max_abs_diff"] for s in run.steps)
    kl = max((s["kl"] for s in run.steps), key=abs)
    return (
        f"{name}: {run.differ} of {compared} log-probabilities differ in bytes between rollout and trainer "
        f"(max |diff| {figure(worst)}, largest KL of a step {figure(kl)})"
    )


def figure(value: float) -> str:
    return "0.0" if value == 0 else f"{value:.3g}"


# Records


@dataclass
class Recorded:
    """One side of a record. `name` is its side, and what else tells it from those that were read with it."""

    name: str
    side: str
    options: dict[str, Any]
    run: Run
    sha256: str | None

    @property
    def differs(self) -> bool:
        """Whether it was to have the same bytes everywhere, and has not."""
        return self.side == ALIGNED and not self.run.equal


def read(paths: Sequence[str]) -> list[Recorded]:
    """Each side of each record, whole or cut off. OSError, ValueError: see record.read; and where none has a step"""
    found = [record.read(path) for path in paths]
    keys = {key for one in found for key in one.options}
    apart = sorted(key for key in keys if len({repr(one.options.get(key)) for one in found}) > 1 and key != "steps")
    result = []
    for one in found:
        own = ", ".join(f"{key.replace('_', ' ')} {one.options.get(key)}" for key in apart)
        for side in dict.fromkeys(side for side, _ in one.steps):
            run = Run([step for (of, _), step in sorted(one.steps.items()) if of == side])
            name = f"{side}, {own}" if own else side
            result.append(Recorded(name, side, one.options, run, one.ends.get(side)))
    if not result:
        raise ValueError(f"recipe: {', '.join(paths)}: no step is recorded there")
    return result


def summary(one: Recorded) -> list[str]:
    """Lines: the last word, where a step's time went, and what processes held once it was going and at its end."""
    steps = one.run.steps
    seconds = {
        name: statistics.fmean(s["seconds"].get(name, 0.0) for s in steps[1:] or steps) for name in _names(steps)
    }
    early, late = steps[10 if len(steps) > 20 else 0], steps[-1]  # the first ten take what they then keep
    held = ", ".join(f"{name} {early['held'][name]:g} -> {late['held'][name]:g}" for name in late["held"])
    tokens, whole = sum(s["tokens"] for s in steps), sum(seconds.values())
    found = [
        verdict(one.name, one.run),
        f"  {len(steps)} steps, {tokens} tokens; a step takes {whole:.2f} s: {_seconds(seconds)}",
        f"  reward {steps[0]['reward']:.3f} -> {late['reward']:.3f}; steps {early['step']} -> {late['step']}: {held}",
    ]
    return found if one.sha256 is None else [*found, f"  parameters have SHA-256 {one.sha256}"]


def _names(steps: Sequence[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for step in steps for name in step["seconds"]))


# Plots


def plot(path: str, title: str, runs: Mapping[str, Run]) -> None:
    """Reward, entropy, gradient norm, KL, log-probabilities that differ, memory and descriptors, and drafts where there
    are any, step by step. Of long runs means over a fiftieth stand before the single steps. What the file's name ends
    with says what kind it is."""
    from matplotlib.figure import Figure

    panels = {
        "reward": "mean reward",
        "entropy": "entropy (nats per token)",
        "grad_norm": "gradient norm",
        "kl": "KL of rollout and trainer (k3, nats per token)",
        "differ": "log-probabilities that differ in bytes (%)",
        "rss_mib": "memory of all processes (MiB)",
        "gpu_mib": "memory of the trainer on the GPU (MiB)",
        "descriptors": "open descriptors of all processes",
        "accepted": "drafted tokens that were accepted (%)",
        "tokens_per_step": "tokens of an answer a step",
    }
    drawn = {name: [[*_values(run, name)] for run in runs.values()] for name in panels}
    drawn = {name: series for name, series in drawn.items() if any(series)}
    columns = -(-(len(drawn) + 1) // 2)
    drawing = Figure(figsize=(5 * columns, 7), layout="constrained")
    drawing.suptitle(title)
    axes = drawing.subplots(2, columns).flat
    for (name, series), axis in zip(drawn.items(), axes):
        for number, ((label, run), values) in enumerate(zip(runs.items(), series)):
            _curve(axis, f"C{number}", label, [s["step"] for s in run.steps], values)
        axis.set_title(panels[name], fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
        if name == "kl" and (seen := [abs(v) for values in series for v in values if v]):
            axis.set_yscale("symlog", linthresh=min(seen))  # exact zeros among powers of ten
    for axis in drawing.axes[len(drawn) :]:
        axis.axis("off")
    words = "\n\n".join(verdict(*item) for item in runs.items())
    said = drawing.axes[len(drawn)].text(0, 1, words, va="top", wrap=True, fontsize=9)
    said.set_in_layout(False)  # a long line would make its column as wide
    drawing.axes[0].legend(fontsize=8)
    drawing.savefig(path)


def _curve(axis, colour: str, label: str, steps: Sequence[int], values: Sequence[float]) -> None:
    if not values:
        return
    window = len(values) // 50
    if window < 2:
        axis.plot(steps, values, ".-", color=colour, label=label)
        return
    axis.plot(steps, values, color=colour, alpha=0.25, linewidth=0.6)
    means = [statistics.fmean(values[max(0, i - window) : i + window + 1]) for i in range(len(values))]
    axis.plot(steps, means, color=colour, label=label)


def _values(run: Run, name: str) -> Iterable[float]:
    """Of each step; none where the run has none of it."""
    drafted = any(step["drafted"] for step in run.steps)
    for step in run.steps:
        if name == "differ":
            differ = step["differ"] + (step["differ_recomputed"] or 0)
            yield 100 * differ / step["compared"]
        elif name in ("rss_mib", "gpu_mib", "descriptors"):
            if name in step["held"]:
                yield step["held"][name]
        elif name == "accepted":
            if drafted:
                yield 100 * step["accepted"] / max(1, step["drafted"])
        elif name == "tokens_per_step":
            if drafted:
                yield tokens_per_step(step)
        else:
            yield step[name]
