"""What a run has shown: a line for each step, the last word, and plots."""

from collections.abc import Callable, Iterable
from typing import Any, TextIO

from .grpo import Run
from .options import Options


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


def heading(options: Options) -> str:
    answers = f"{options.steps} steps of {options.prompts} prompts x {options.samples} answers"
    return f"{options.model}: {answers}, temperature {options.temperature:g}, {options.dtype}, {options.device}"


def line(side: str, step: dict[str, Any], steps: int) -> str:
    """Of one step, in columns. "differ a + b of n": so many log-probabilities of the rollout were other bytes in the
    first training forward and in the scoring before it."""
    seconds = "  ".join(f"{name.replace('_', ' ')} {s:.2f}" for name, s in step["seconds"].items())
    again = "" if step["differ_recomputed"] is None else f" + {step['differ_recomputed']}"
    drafts = ""
    if step["drafted"]:
        drafts = (
            f"  accepted {step['accepted']} of {step['drafted']} drafted, {tokens_per_step(step):.2f} tokens a step"
        )
    return (
        f"{side:<8} {step['step']:>{len(str(steps))}}/{steps}  reward {step['reward']:.3f}  "
        f"entropy {step['entropy']:.3f}  gradient {step['grad_norm']:<6.3g}  weights moved {step['moved']:6.2%}  "
        f"KL {figure(step['kl']):<8}  differ {step['differ']}{again} of {step['compared']}{drafts}  | {seconds} s"
    )


def tokens_per_step(step: dict[str, Any]) -> float:
    """Tokens that an answer gets in a step of the engine: 1 without drafts."""
    return step["tokens"] / max(1, step["tokens"] - step["accepted"])


def verdict(side: str, run: Run) -> str:
    if not run.steps:
        return f"{side}: no step was left to run"
    compared, worst = sum(s["compared"] for s in run.steps), max(s["max_abs_diff"] for s in run.steps)
    kl = max((s["kl"] for s in run.steps), key=abs)
    return (
        f"{side}: {run.differ} of {compared} log-probabilities differ in bytes between rollout and trainer "
        f"(max |diff| {figure(worst)}, largest KL of a step {figure(kl)})"
    )


def figure(value: float) -> str:
    return "0.0" if value == 0 else f"{value:.3g}"


def plot(path: str, title: str, runs: dict[str, Run]) -> None:
    """Reward, entropy, gradient norm, KL, log-probabilities that differ, and drafts, step by step. What the file's name
    ends with says what kind it is."""
    from matplotlib.figure import Figure

    panels = {
        "reward": "mean reward",
        "entropy": "entropy (nats per token)",
        "grad_norm": "gradient norm",
        "kl": "KL of rollout and trainer (k3, nats per token)",
        "differ": "log-probabilities that differ in bytes (%)",
    }
    drafted = any(step["drafted"] for run in runs.values() for step in run.steps)
    if drafted:
        panels |= {"accepted": "drafted tokens that were accepted (%)", "tokens_per_step": "tokens of an answer a step"}
    drawing = Figure(figsize=(20 if drafted else 15, 7), layout="constrained")
    drawing.suptitle(title)
    axes = drawing.subplots(2, 4 if drafted else 3).flat
    for (name, label), axis in zip(panels.items(), axes):
        for (side, run), style in zip(runs.items(), ("o-", "x--")):
            axis.plot([s["step"] for s in run.steps], list(_values(run, name)), style, label=side)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("step", fontsize=9)
        axis.grid(alpha=0.3)
    last = drawing.axes[-1]
    last.axis("off")
    last.text(0, 1, "\n\n".join(verdict(*item) for item in runs.items()), va="top", wrap=True, fontsize=9)
    drawing.axes[0].legend()
    drawing.savefig(path)


def _values(run: Run, name: str) -> Iterable[float]:
    for step in run.steps:
        if name == "differ":
            differ = step["differ"] + (step["differ_recomputed"] or 0)
            yield 100 * differ / step["compared"]
        elif name == "accepted":
            yield 100 * step["accepted"] / max(1, step["drafted"])
        elif name == "tokens_per_step":
            yield tokens_per_step(step)
        else:
            yield step[name]
