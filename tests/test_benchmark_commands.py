"""How long the README's two commands take: with others in their place, since the true ones take half an hour."""

import subprocess

import pytest

from benchmarks import __main__, commands, output, report


@pytest.fixture
def strangers_way(tmp_path, monkeypatch):
    """Commands that stand in for the README's, in a repository of their own; an environment that is this one."""
    root = tmp_path / "root"
    root.mkdir()
    build = "\n".join(f"  vexact: {text}" for text in _BUILD)
    (root / "build.txt").write_text(f"pip says\n{build}\n")
    (root / "demo.txt").write_text("texts\n\n" + "\n".join(_DEMO) + "\n76 s in all\n")
    (root / "tests.txt").write_text(
        "....\n3 failed before\n5437 passed, 213 skipped, 2 warnings in 2280.33s (0:38:00)\n"
    )
    for line in ("init -q", "add .", "-c user.name=a -c user.email=a@b commit -qm one"):
        subprocess.run(["git", *line.split()], cwd=root, check=True)
    (root / "demo.txt").write_text("changed since: a clone has the commit's\n")
    monkeypatch.setattr(commands, "ROOT", root)
    monkeypatch.setattr(
        commands, "COMMANDS", {name: ("cat build.txt", f"cat {name}.txt") for name in commands.COMMANDS}
    )
    monkeypatch.setattr(commands, "_ABOUT", 'print(\'{"commit": "abc", "python": "3.11.7"}\')')
    monkeypatch.setattr(commands, "nvcc", lambda env: "13.0")
    return commands


_BUILD = (
    "the extension with its CUDA half: 3 objects are kept in build/objects, 57 are to be compiled",
    "compiling, 2 at a time: about 5 min",
    "compiled in 5 min",
)
_DEMO = ("rollout -> trainer  dtype  tokens", "vexact  bfloat16  864", "", "0 of 864 log-probabilities differ")


def test_the_two_commands_in_a_clean_clone(strangers_way, tmp_path, monkeypatch):
    monkeypatch.setenv("VEXACT_BUILD", "cpu")
    lines = tmp_path / "commands.jsonl"
    assert __main__.main(["commands", "--device", "cpu", "--lines", str(lines)]) == 0
    first, second = report.load(lines)
    assert (
        first["printed"] == list(_DEMO)
        and first["fetched"] > 90e6
        and first["command"] == "cat build.txt && cat demo.txt"
    )
    assert (second["passed"], second["skipped"]) == (5437, 213)
    for record in (first, second):
        assert (record["compiled"], record["cuda"], record["nvcc"], record["commit"]) == (57, True, "13.0", "abc")
        assert record["compile_s"] <= record["install_s"] and record["seconds"] >= 0 and record["others"] >= 0
    env = strangers_way.clean(
        {"VEXACT_BUILD": "cpu", "PYTHONPATH": "x", "PATH": "/bin", "HOME": "/h"}, tmp_path, tmp_path
    )
    assert sorted(env) == ["HOME", "PATH", "XDG_CACHE_HOME"] and env["PATH"] == f"{tmp_path}/bin:/bin"


def test_a_command_that_fails_leaves_no_record(strangers_way, tmp_path, monkeypatch):
    lines = tmp_path / "commands.jsonl"
    monkeypatch.setattr(strangers_way, "COMMANDS", {"tests": ("cat build.txt", "cat tests.txt nowhere.txt")})
    with pytest.raises(RuntimeError, match=r"exit code 1[\s\S]*nowhere.txt"):
        __main__.main(["commands", "--device", "cpu", "--case", "tests", "--lines", str(lines)])
    assert not lines.exists()
    with pytest.raises(ValueError, match="did not say how much"):
        strangers_way.compiled([(0.0, "Successfully installed vexact")])


def test_without_a_checkout_it_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    with pytest.raises(output.Refused, match="expected a checkout"):
        __main__.main(["commands", "--device", "cpu"])
