"""The README files' code and what is generated in them.

    python tests/readme.py write             write the generated parts anew (figures: vexact bench report --readme)
    python -m pytest tests/test_readme.py    compares them, and runs the code as a reader would who copies it

A file's Python blocks are one session, from top to bottom; its shell blocks are lines to be typed one after another.
Words behind a block's language, which no page shows, say what it needs: `python needs=veomni`, `python needs=serve`.
"""

import argparse
import dataclasses
import doctest
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))  # as a script it finds its own folder alone

import vexact_ops as vx
from benchmarks.report import compare, over_shapes
from benchmarks.report.tables import markdown

ROOT = Path(__file__).parent.parent
NOT_OURS = {"build", ".git", "site-packages"}  # a virtual environment may lie in the checkout


def files() -> list[Path]:
    return sorted(p for p in ROOT.rglob("README.md") if not NOT_OURS & set(p.relative_to(ROOT).parts[:-1]))


@dataclasses.dataclass
class Block:
    language: str
    needs: str | None
    text: str
    line: int


def blocks(path: Path, language: str) -> list[Block]:
    found, text = [], path.read_text()
    for match in re.finditer(rf"^```{language}(?: needs=(\w+))?\n(.*?)^```", text, re.M | re.S):
        found.append(Block(language, match[1], match[2], text[: match.start(2)].count("\n") + 1))
    return found


def session(path: Path, needs: str | None = None) -> str:
    """The file's Python blocks as one program, each line where it stands in the file, so that a traceback names it."""
    lines: list[str] = []
    for block in blocks(path, "python"):
        if block.needs in (None, needs):
            lines += [""] * (block.line - 1 - len(lines))
            lines += block.text.splitlines()
    return "\n".join(lines) + "\n"


def commands(path: Path) -> list[str]:
    """The lines of the file's shell blocks, continued ones joined, comments left out."""
    found = []
    for block in blocks(path, "bash"):
        for line in block.text.replace("\\\n", " ").splitlines():
            line = re.sub(r"\s+# .*|^#.*", "", line).strip()
            found += [part.strip() for part in line.split(" && ")] if line else []
    return found


def shown(path: Path) -> list[str]:
    """What the file says that its Python prints: the lines of a text block right behind a Python block."""
    found = re.findall(r"^```\n```text\n(.*?)^```", path.read_text(), re.M | re.S)
    return [line for text in found for line in text.splitlines() if line.strip() != "..."]


def extras() -> set[str]:
    """The extras of the package."""
    table = (ROOT / "pyproject.toml").read_text().split("[project.optional-dependencies]")[1].split("\n[")[0]
    return set(re.findall(r"^([\w-]+) = \[", table, re.M))


# --- what every op is, from its docstring ---------------------------------------------------------------------------

NOT_OPS = {"BackendUnavailable"}  # of the public names: what is no function
PATCHES = ("hf", "aten", "veomni")
# Of several processes: no example shows them.
BETWEEN_RANKS = "linear_send", "linear_gather_send", "linear_silu_mul_send", "rmsnorm_gather", "fused_moe_send"
OPS = [
    name
    for name, module in vx._WHERE.items()
    if not module.startswith(("_core", "patch")) and name not in BETWEEN_RANKS
]


def public() -> Iterator[tuple[str, Callable]]:
    """Every public function, under the name that it is called by."""
    for name in vx._WHERE:
        if name not in NOT_OPS:
            yield f"vx.{name}", getattr(vx, name)
    for name in PATCHES:
        yield f"vx.patch.{name}", getattr(vx.patch, name)


def examples(function: Callable) -> list[doctest.Example]:
    return doctest.DocTestParser().get_examples(inspect.getdoc(function) or "")


def _signature(name: str, function: Callable) -> str:
    """As it is called: defaults, but no types, and no `backend`, which every op takes."""
    made, star = [], False
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "backend":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not star:
            made, star = [*made, "*"], True
        default = "" if parameter.default is parameter.empty else f"={parameter.default!r}"
        prefix = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        made.append(prefix + parameter.name + default)
    return textwrap.fill(f"{name}({', '.join(made)})", 116, subsequent_indent=" " * 4, break_on_hyphens=False)


def _code(example: doctest.Example) -> str:
    """A doctest's lines as a program's, with what it prints as a comment."""
    source = re.sub(r"\s*# doctest: .*", "", example.source.rstrip("\n"))
    want = example.want.rstrip("\n").splitlines()
    if not want or want == ["linear..."]:
        return source
    if len(want) == 1 and "\n" not in source and "  # " not in source:
        return f"{source}  # {want[0]}"
    return "\n".join([source, *(f"# {line}" for line in want)])


def ops() -> str:
    """Every public function: its signature, the first lines of its docstring, its example."""
    parts = []
    for name, function in public():
        first = re.split(r"\n\s*\n", inspect.getdoc(function) or "")[0]
        part = f"### {name.removeprefix('vx.')}\n\n```text\n{_signature(name, function)}\n\n{first}\n```\n"
        if found := examples(function):
            code = "\n".join(map(_code, found))
            code = re.sub(r"^((?:from|import) .*\n)(?!from|import)", r"\1\n", code, flags=re.M)  # as ruff formats it
            part += f"\n```python\n{code}\n```\n"
        parts.append(part)
    return "\n".join(parts)


# --- what was verified where -----------------------------------------------------------------------------------------


def _records(name: str) -> list[dict]:
    path = ROOT / "benchmarks" / "results" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


_NAMES = {
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "deepseek_v3": "DeepSeek-V3",
    "qwen3-vl-2b": "Qwen3-VL-2B",
    "qwen3-vl-8b": "Qwen3-VL-8B",
    "qwen3-vl-30b-a3b": "Qwen3-VL-30B-A3B",
    "fsdp2": "FSDP2",
    "veomni": "VeOmni",
}


def verified() -> str:
    """A table: what was seen to be equal, how, on what, at which commit; from tests and kept records."""
    golden = json.loads((ROOT / "tests" / "golden.json").read_text())
    machines = {"cpu": "any x86-64 with AVX and FMA", "sm90": "H200, H100"}
    rooms = set().union(*golden.values())
    cases = {room: golden["cpu"].get(room, {}).keys() for room in rooms}  # which every machine has, and some more

    def numerics(name: str) -> str:
        missing = ", ".join(f"`{room}`" for room in sorted(rooms) if cases[room] - golden[name].get(room, {}).keys())
        return f"`{name}` ({machines.get(name, name)}{missing and f'; not all of {missing} yet'})"

    held = "held by the tests"
    rows = ["| what | where | at |", "| --- | --- | --- |"]
    rows.append(f"| outputs and gradients of {len(rooms)} rooms | {', '.join(map(numerics, golden))} | {held} |")
    rows.append(
        f"| {len(vx.patch.COVERED)} families of transformers, tiny: Llama, Qwen2 and 3, Qwen3-MoE, Qwen3-Next, "
        "Qwen3.5, gpt-oss, Mistral, Mixtral, Gemma, Phi, OLMo, GLM-4-MoE, DeepSeek-V3, Moonlight, ... "
        f"(`vexact_ops.patch.COVERED`); {len(vx.patch.WITH_IMAGES)} with their image encoders: Qwen3-VL, Qwen3-VL-MoE, "
        f"Qwen2.5-VL, Qwen3.5 (`WITH_IMAGES`) | CPU | {held} |"
    )
    groups: dict[str, dict[str, list[str]]] = {}
    for record in {(r["case"], r["weights"]): r for r in _records("verify")}.values():
        if not (record["mismatched"] or record["batch_mismatched"]):
            machine = (record["gpu"] or record["cpu"]).removeprefix("NVIDIA ")
            own = " (its own weights)" if record["weights"] == "of the model" else ""
            name = record["case"].removesuffix(" bfloat16") + own
            groups.setdefault(machine, {}).setdefault(record["commit"], []).append(name)
    for machine, commits in groups.items():
        names = "; ".join(map(", ".join, commits.values()))
        rows.append(f"| `vexact verify`, true sizes: {names} | {machine} | {', '.join(commits)} |")
    runs: dict[tuple, dict[int, dict[str, list[str]]]] = {}
    newest = {(r["case"], r["backend"], r["ranks"]): r for r in _records("main_ppo")}
    for record in newest.values():
        if record["backend"] == "vexact" and not record["mismatched"]:
            of = tuple(record[name] for name in ("gpu", "steps", "tokens", "commit"))
            family, engine, *layout = record["case"].split()
            name = _NAMES[family] + (f" ({' '.join(layout)})" if layout else "")
            runs.setdefault(of, {}).setdefault(record["ranks"], {}).setdefault(_NAMES[engine], []).append(name)
    for (machine, steps, tokens, commit), sizes in runs.items():
        names = []
        for ranks, engines in sorted(sizes.items()):
            each = "; ".join(f"{engine}: {', '.join(families)}" for engine, families in engines.items())
            names.append(f"{ranks} GPU{'s' * (ranks > 1)}: {each}")
        what = f"verl's `main_ppo`, {steps} steps, layers of true sizes, {tokens:,} tokens each"
        what = f"{what}, on {'; on '.join(names)}{_whole(newest, commit)}"
        rows.append(f"| {what} | {machine.removeprefix('NVIDIA ')} | {commit} |")
    return "\n".join(rows)


def _whole(newest: dict[tuple, dict], commit: str) -> str:
    """What `whole` is, where weights that ranks trained in it are those of fewer ranks."""
    digests: dict[tuple, set[str]] = {}
    for (case, _, ranks), record in newest.items():
        if record["commit"] == commit and "sha256" in record:
            ulysses = re.search(r"Ulysses (\d+)", case)
            rows_at_once = ranks // int(ulysses[1]) if ulysses else ranks
            digests.setdefault((case.split()[0], rows_at_once), set()).add(record["sha256"])
    if not digests or any(len(found) > 1 for found in digests.values()):
        return ""
    return "; whole: with `whole_gradients`, the trained weights have one SHA-256 however many ranks share a row"


def verl_families() -> str:
    """A table: of which families verl's engines compute the rollout's log-probabilities, and what is refused."""
    newest = {(r["case"], r["transformers"]): r for r in _records("verl_families")}
    groups: dict[tuple[str, ...], list[dict]] = {}
    for record in newest.values():
        groups.setdefault((record["case"].split()[1], record["transformers"], record["commit"]), []).append(record)
    rows = ["| engine | families | tokens of each | differ before / after a step |", "| --- | --- | --- | --- |"]
    refused = []
    for (engine, version, commit), records in sorted(groups.items()):
        ran = [r for r in records if not r["refused"]]
        names = ", ".join(f"`{r['case'].split()[0]}`" for r in ran)
        tokens = " to ".join(str(n) for n in sorted({r["tokens"] for r in ran}))
        what = f"{_NAMES[engine]}, transformers {version}, {commit}"
        rows.append(
            f"| {what} | {len(ran)}: {names} | {tokens} | {sum(r['before'] for r in ran)} / "
            f"{sum(r['after'] for r in ran)} |"
        )
        refused += [
            f"- {_NAMES[engine]}, `{r['case'].split()[0]}`: refused, {r['refused'].splitlines()[0]}"
            for r in records
            if r["refused"]
        ]
    return "\n".join([*rows, "", *refused])


def peers() -> str:
    """A table: what others give and what it costs: measured where the records have it (bold), else as published."""
    kernels = {(r["room"], r["case"], r["backend"]): r for r in _records("h200") if "us" in r}
    engines = compare.steps({"engine": _records("engine"), "h200": _records("h200")})
    steps = {(m, n, who): r["step_ms"] for (m, latent, n), by in engines.items() if not latent for who, r in by.items()}

    def span(values: list[float], form: str) -> str:
        low, high = f"{min(values):{form}}", f"{max(values):{form}}"
        return low if low == high else f"{low} to {high}"

    def of_kernels(backend: str, other: str, room: str) -> list[float]:
        pairs = [(r, kernels.get((a, b, other))) for (a, b, c), r in kernels.items() if (a, c) == (room, backend)]
        return [ours["us"] / theirs["us"] for ours, theirs in pairs if theirs]

    def of_steps(backend: str, other: str, batch: int) -> list[float]:
        models = {model for model, size, _ in steps if size == batch}
        found = [(steps.get((m, batch, backend)), steps.get((m, batch, other))) for m in sorted(models)]
        return [a / b for a, b in found if a and b]

    fixed = "batch_invariant_ops" if of_kernels("batch_invariant_ops", "torch", "linear") else "fixed-tile"
    stand_in = "" if fixed != "fixed-tile" else ", by our stand-in of its form"
    invariant = "vllm batch-invariant"
    loss = [span(of_kernels("liger", other, "linear_cross_entropy"), ".2f") for other in ("torch", "vexact")]
    products = span(of_kernels(fixed, "torch", "linear"), ".1f")
    ours = span(of_steps("vexact", "vllm", 256), ".2f")
    many, one = (span(of_steps(invariant, "vllm", n), form) for n, form in ((256, ".2f"), (1, ".1f")))
    product = f"{over_shapes(_records('h200'), 'linear')['geomean_to_stock']:.2f}"
    sizes = [int(re.search(r"T=(\d+)", c)[1]) for r, c, b in kernels if (r, b) == ("linear_cross_entropy", "liger")]
    lengths = span(sizes, ",")
    version = next(r["version"] for by in engines.values() for who, r in by.items() if who == invariant)
    torchtitan = "https://github.com/pytorch/torchtitan/tree/main/torchtitan/experiments/rl"
    megatron = "https://docs.nvidia.com/megatron-core/developer-guide/nightly/mcore-inference-user-guide.html"
    rows = [  # who, where, what it gives, what it costs
        (
            "VeXact",
            "",
            "equal bits in training, prefill and decode, of engine and trainer; what is not covered is refused",
            f"a step at 256 sequences takes **{ours}** of vLLM's time, `linear` **{product}** of torch's",
        ),
        (
            f"vLLM {version}, batch-invariant",
            "https://docs.vllm.ai/en/latest/features/batch_invariance/",
            "the same output in any batch, on GPUs from SM80 on; no trainer",
            f"a step takes **{many}** times its default at 256 sequences, **{one}** at one; tuned since, in releases "
            "that were not measured here",
        ),
        (
            "TitanRL (TorchTitan with vLLM), 2026",
            torchtitan,
            "equal bits in trainer and engine, Qwen3 and Qwen3.5; linear attention by the recurrent form everywhere",
            "Qwen3-8B: between two tokens 22.8 ms instead of 9.6, the trainer 2.9 times slower",
        ),
        (
            "Megatron-LM, August 2026",
            megatron,
            "a batch-invariant mode of its own engine and trainer, with mixtures",
            "25,100 instead of 25,400 tokens/s, Qwen3-30B-A3B, 8 B200",
        ),
        (
            "RL-Kernel 0.1",
            "https://github.com/RL-Align/RL-Kernel/releases/tag/v0.1.0",
            "equal log-probabilities of Qwen3-8B, dense, in vLLM and Megatron: 14 of 14 layouts over ranks, "
            "parameters too after two updates",
            "log-probabilities forward and backward 105 ms instead of 17",
        ),
        (
            "miles and slime, true on-policy",
            "https://github.com/radixark/miles/tree/main/examples/true_on_policy",
            "equal log-probabilities in SGLang and FSDP, Qwen3-4B, dense",
            'an "acceptable slowdown" of the rollout',
        ),
        (
            "SGLang, deterministic",
            "https://docs.sglang.io/advanced_features/deterministic_inference.html",
            "the same output in any batch, with FlashInfer, FA3 or Triton",
            "on average [34 % slower](https://lmsys.org/blog/2025-09-22-sglang-deterministic/)",
        ),
        (
            "batch_invariant_ops",
            "https://github.com/thinking-machines-lab/batch_invariant_ops",
            "torch's mm, addmm, log_softmax and mean with one fixed tile, in any model",
            f"products take **{products}** times torch's{stand_in}",
        ),
        (
            "Liger",
            "https://github.com/linkedin/Liger-Kernel",
            "faster, leaner training kernels; promises no bits",
            f"its loss, {lengths} tokens forward and backward, takes **{loss[0]}** of torch's time, "
            f"**{loss[1]}** of ours",
        ),
    ]
    heads = ["", "gives", "costs (bold: measured here, from the kept records; else as they publish it)"]
    return markdown(heads, [[f"[{who}]({where})" if where else who, gives, costs] for who, where, gives, costs in rows])


# --- the two commands, as they were measured --------------------------------------------------------------------------


def newest_commands() -> dict[str, dict]:
    """Which command -> its newest record."""
    return {r["case"]: r for r in _records("commands")}


def demo() -> str:
    """What `vexact demo` says at its end."""
    return "\n".join(["```", "$ vexact demo", *newest_commands()["demo"]["printed"], "```"])


def _took(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 180 else f"{seconds / 60:.0f} minutes"


def commands_took() -> str:
    """A table: how long each of the two commands took, where, and what they did in that time."""
    found = newest_commands()
    first = found["demo"]
    where = f"{first['cores']} cores, Python {first['python']}, torch {first['torch'].partition('+')[0]}"
    where += (f", nvcc {first['nvcc']}" if first["nvcc"] else "") + ", nothing cached"
    half = "CUDA half included" if first["cuda"] else "for CPUs alone"
    installs = f"{_took(first['install_s'])}, {first['compiled']} objects compiled, {half}"
    fetched = f"with {first['fetched'] / 1e6:.0f} MB that it fetches (SmolLM2-135M-Instruct, from the package index)"
    more = "how to test more, on a GPU too: [tests/README.md](tests/README.md)"
    rows = [
        f"| a clean clone of {first['commit']}, {first['date']}: {where} | installs in | then takes |",
        "| --- | --- | --- |",
        f"| the first | {installs} | {_took(first['seconds'])}{_beside(first)}, {fetched} |",
    ]
    if second := found.get("tests"):
        again = f"{second['compiled']} objects compiled" if second["compiled"] else "nothing is compiled again"
        tests = f"{second['passed']:,} tests pass, {second['skipped']:,} are skipped (for a GPU, or another package)"
        then = f"{_took(second['seconds'])}{_beside(second)}: {tests}; {more}"
        rows.append(f"| the second, of {second['commit']} | {_took(second['install_s'])}, {again} | {then} |")
    else:
        rows.append(f"| the second | nothing is compiled again | {more} |")
    return "\n".join(rows)


def _beside(record: dict) -> str:
    """What is to be said of times that were measured while the machine did other work too."""
    return f" (others had {record['others']:.1f} cores)" if record["others"] > 0.1 * record["cores"] else ""


GENERATED = {
    "ops": ops,
    "verified": verified,
    "verl families": verl_families,
    "peers": peers,
    "demo": demo,
    "commands": commands_took,
}


def generate(path: Path) -> str:
    """The file with its generated parts anew."""
    text = path.read_text()
    for name, make in GENERATED.items():
        if f"<!-- {name} -->" in text:
            body = f"<!-- {name} -->\n{make()}\n<!-- end -->".replace("\n\n<!-- end", "\n<!-- end")
            text = re.sub(rf"<!-- {name} -->.*?<!-- end -->", lambda _, body=body: body, text, flags=re.S)
    return text


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["write"])
    parser.parse_args()
    for path in files():
        path.write_text(generate(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
