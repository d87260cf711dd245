"""What the README files say: short enough to be read, links that lead somewhere, figures that were generated, code that
parses, commands that there are."""

import ast
import re
import textwrap
from pathlib import Path

import pytest

from benchmarks import report
from vexact_engine.cli import main

ROOT = Path(__file__).parent.parent
FILES = sorted(
    path for path in ROOT.rglob("README.md") if not {"build", ".git"} & set(path.relative_to(ROOT).parts[:-1])
)
each_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def code(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


def test_the_first_one_is_read_on_two_screens():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180


@each_file
def test_links_lead_somewhere(path):
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if target.startswith("#"):
            heading = target[1:].replace("-", "[- ]")
            assert re.search(rf"^#+ {heading}$", path.read_text(), re.M | re.I), target
        elif "://" not in target:
            assert (path.parent / target).exists(), target


@each_file
def test_python_in_it_parses(path):
    for text in code(path, "python"):
        ast.parse(textwrap.dedent(text.replace("...)", ")")))


@pytest.mark.parametrize("path", report.READMES, ids=lambda path: str(path.relative_to(ROOT)))
def test_its_figures_are_those_of_the_kept_records(path, tmp_path):
    copy = tmp_path / "README.md"
    copy.write_text(path.read_text())
    report.update_readme(copy)
    assert copy.read_text() == path.read_text(), "python -m benchmarks report writes them anew"


def test_commands_it_names_are_there(capsys):
    named = {name for path in FILES for text in code(path, "bash") for name in re.findall(r"^vexact (\w+)", text, re.M)}
    assert {"verify", "bench", "serve", "chat"} <= named
    for name in sorted(named):
        with pytest.raises(SystemExit) as done:
            main([name, "--help"])
        assert done.value.code == 0 and "usage" in capsys.readouterr().out.lower(), name
