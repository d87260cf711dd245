"""What the README files say: short enough to be read, links that lead somewhere, parts that were generated, code that
runs as it stands there, commands that there are."""

import doctest
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import readme
import torch

import vexact_ops as vx
from benchmarks import __main__ as benchmarks
from benchmarks import commands, report
from vexact_engine import cli

ROOT = readme.ROOT
FILES = readme.files()
sys.path.insert(0, str(ROOT / "tests" / "engine"))
from engine_models import build, byte_tokenizer  # noqa: E402


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


def test_the_first_one_is_read_on_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


def test_the_summary_has_a_dozen_lines_at_most():
    table = re.search(r"<!-- summary -->\n(.*?)<!-- end -->", (ROOT / "README.md").read_text(), re.S)[1]
    assert 3 <= len(table.splitlines()) - 2 <= 12


@each_file
def test_links_lead_somewhere(path):
    words = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.M | re.S)
    for target in re.findall(r"\]\(([^)\s]+)\)", words):
        if target.startswith("#"):
            heading = target[1:].replace("-", "[- ]")
            assert re.search(rf"^#+ {heading}$", path.read_text(), re.M | re.I), target
        elif "://" not in target:
            file, _, part = target.partition("#")
            assert (path.parent / file).exists(), target
            heading = part.replace("-", "[- ]")
            assert not part or re.search(rf"^#+ {heading}$", (path.parent / file).read_text(), re.M | re.I), target


@pytest.mark.parametrize("path", report.READMES, ids=name_of)
def test_its_figures_are_those_of_the_kept_records(path, tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(path.read_text())
    report.update_readme(copy)
    assert copy.read_text() == path.read_text(), "vexact bench report --readme writes them anew"


@each_file
def test_its_generated_parts_are_what_is_generated(path):
    assert readme.generate(path) == path.read_text(), "python tests/readme.py write writes them anew"


def test_its_two_commands_are_those_that_were_measured():
    lines = readme.commands(ROOT / "README.md")
    measured = [part for line in commands.COMMANDS.values() for part in line]
    assert lines[: len(measured)] == measured
    for name, record in readme.newest_commands().items():
        assert record["command"] == " && ".join(commands.COMMANDS[name])
    demo = readme.newest_commands()["demo"]
    assert demo["printed"][-1].startswith("0 of ")
    assert demo["seconds"] * (1 - demo["others"] / demo["cores"]) < 90, "of the share of the machine that it had"


def test_what_its_prose_says_of_versions_and_times():
    text, project = ((ROOT / name).read_text() for name in ("README.md", "pyproject.toml"))
    for needed, said in (
        (r'requires-python = ">=([\d.]+)"', "Python {} or later"),
        (r'\["torch>=([\d.]+)"\]', "torch {} or later"),
    ):
        assert said.format(re.search(needed, project)[1]) in text
    tested = dict(re.findall(r"(verl|veomni)==([\d.]+)", (ROOT / ".ci" / "trainers").read_text()))
    found = re.findall(r"(verl|veomni)(?:==| )(\d+\.[\d.]*\d)", text, re.I)
    assert {(name.lower(), version) for name, version in found} == set(tested.items())
    (ours,) = (r["ours"] for r in report.kept()["cpu"] if r["case"] == "vexact_ops, after torch")
    assert "importing takes about a millisecond" in text and 0.5 < ours < 1.5


def examples(text: str) -> bool:
    """Whether the examples of this docstring give what they say."""
    torch.manual_seed(0)
    test = doctest.DocTestParser().get_doctest(text, {"torch": torch, "vx": vx}, "example", None, 0)
    return doctest.DocTestRunner(verbose=False).run(test).failed == 0


@pytest.mark.parametrize("name,function", [pytest.param(*each, id=each[0]) for each in readme.public()])
def test_a_docstring_s_example_is_true(name, function):
    found = readme.examples(function)
    assert found or name not in [f"vx.{op}" for op in readme.OPS], f"{name}: every op has an example"
    assert examples(function.__doc__ or "")


def test_an_example_that_is_not_true_fails(capsys):
    assert examples(">>> vx.same_bits(torch.zeros(2), torch.zeros(2))\nTrue\n")
    assert not examples(">>> vx.same_bits(torch.zeros(2), -torch.zeros(2))\nTrue\n")


# --- as a reader who copies it ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A folder that has what the README files speak of: a small model, prompts, a file of one's own."""
    folder = tmp_path_factory.mktemp("desk")
    model = build("Qwen3", vocab_size=300, max_position_embeddings=1024)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
    for place in ("DIR", "path/to/model"):
        (folder / place).mkdir(parents=True)
        model.save_pretrained(folder / place)
        tokenizer.save_pretrained(folder / place)
    lines = [{"prompt": "Once upon a time"}, {"messages": [{"role": "user", "content": "Hello"}]}]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    (folder / "mine.py").write_text("def faster(model):\n    return model\n")
    return folder


def run_python(text: str, folder: Path) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, "-W", "error::SyntaxWarning", "-"],
        input=text, capture_output=True, text=True, cwd=folder, env=env, timeout=600,
    )  # fmt: skip


@pytest.mark.parametrize("path", [p for p in FILES if readme.session(p).strip()], ids=name_of)
def test_its_python_runs_from_top_to_bottom(path, desk):
    done = run_python(readme.session(path), desk)
    assert done.returncode == 0, f"{path} is the program; {done.stderr[-3000:]}"
    printed = done.stdout.splitlines()
    for line in readme.shown(path):
        assert line in printed, f"{path} says that this is printed: {line}"


def test_python_that_is_not_right_fails(desk, tmp_path):
    wrong = tmp_path / "README.md"
    wrong.write_text("Words.\n\n```python\nimport vexact_ops as vx\n```\n\n```python\nvx.linaer\n```\n")
    done = run_python(readme.session(wrong), desk)
    assert done.returncode == 1 and "line 8" in done.stderr and "linaer" in done.stderr


def test_the_server_s_client_gets_the_engine_s_numbers(desk):
    pytest.importorskip("openai")
    pytest.importorskip("fastapi")
    blocks = readme.blocks(ROOT / "vexact_engine" / "README.md", "python")
    first, *others = (block.text for block in blocks if block.needs == "server")
    command = [sys.executable, "-m", "vexact_engine.cli", "serve", "DIR", "--port", "0", "--device", "cpu"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=desk, env=env, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = re.search(r" at (http://\S+)/v1$", server.stdout.readline().strip())[1]
            assert "http://127.0.0.1:8000/v1" in first
            text = first.replace("http://127.0.0.1:8000", url) + "print(len(answer.choices[0].rollout['logprobs']))\n"
            done = run_python("\n".join([text, *others]), desk)
        finally:
            server.terminate()
    assert done.returncode == 0 and int(done.stdout) > 0, done.stderr[-3000:]


@each_file
def test_python_that_needs_more_than_that_parses(path):
    for block in readme.blocks(path, "python"):
        compile(block.text, f"{path}:{block.line}", "exec")


ELSEWHERE = {  # commands that are tested by other files: they fetch, take minutes, or do not end by themselves
    "demo": "tests/engine/test_cli.py",
    "recipe": "tests/engine/test_recipe.py",
    "serve": "tests/engine/test_serve_process.py",
}
LINES = [pytest.param(path, line, id=f"{name_of(path)}: {line}") for path in FILES for line in readme.commands(path)]


@pytest.mark.parametrize("path,line", LINES)
def test_its_shell_lines_do_what_they_are_for(path, line, desk, monkeypatch, capsys):
    line = re.sub(r"^(\w+=\S+ )+", "", line)
    command, *argv = shlex.split(line)
    if command == "export":
        return
    if command == "pip":
        extras = {name for part in re.findall(r"\[([\w,]+)\]", line) for name in part.split(",")}
        assert extras <= readme.extras(), line
    elif command in ("python", "bash", "pytest", "torchrun") and argv[:1] != ["-m"]:
        for word in argv:
            assert not word.endswith((".py", ".sh")) or [*ROOT.rglob(word)], f"{line}: there is no {word}"
    elif command == "python":
        assert argv[1].split(".")[0] in ("benchmarks", "verl"), line
        if argv[1] == "benchmarks" and "..." not in argv:
            benchmarks.parse(["cpu" if a == "cuda" and not torch.cuda.is_available() else a for a in argv[2:]])
    else:
        assert command == "vexact", line
        monkeypatch.chdir(desk)
        monkeypatch.setattr(sys, "stdin", io.StringIO("Hello\n/check\n"))
        heavy = "--config" in argv or ("cuda" in argv and not torch.cuda.is_available()) or "--admit" in argv
        if argv[0] == "bench" and "--device" not in argv:
            benchmarks.parse(argv[1:])
        elif heavy or argv[0] in ELSEWHERE:
            assert argv[0] not in ELSEWHERE or (ROOT / ELSEWHERE[argv[0]]).exists()
            cli._parser()[0].parse_args(argv)
        else:
            code = cli.main(argv)
            said = capsys.readouterr()
            assert code == (1 if argv[0] == "bisect" else 0), said.err  # stock stacks differ: that is what it shows


def test_steps_on_several_gpus_are_not_set_beside_those_on_one(monkeypatch):
    """A step of two pipeline stages is faster; what others take on one GPU says nothing of it."""
    read, said = readme._records, readme.peers()
    one = next(r for r in read("engine") if r["backend"] == "vexact" and r["batch"] == 256 and r.get("verify_tokens"))
    faster = {**one, "step_ms": one["step_ms"] / 100}

    def more(extra):
        monkeypatch.setattr(readme, "_records", lambda name: read(name) + [extra] * (name == "engine"))
        return readme.peers()

    assert more({**faster, "pipeline_parallel_size": 2}) == said
    assert more({**faster, "pipeline_parallel_size": 1}) != said
