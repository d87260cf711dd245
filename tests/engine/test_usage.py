"""A command line with a mistake in it, and a machine on which nothing was built: one line says which."""

import pytest

import vexact_ops as vx
from vexact_engine import cli
from vexact_engine.proof import demo


@pytest.mark.parametrize("argv", [[], ["nothing"], ["--verify"]])
def test_without_a_command_the_commands_are_named(capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2 and "usage: vexact" in capsys.readouterr().err


@pytest.mark.parametrize(
    "argv",
    [
        ["verify"],
        ["generate", "x"],
        ["chat"],
        ["recipe"],
        ["demo", "--dtype", "int8"],
        ["verify", "--model", "m", "--samples", "0"],
        ["demo", "--seed", "-1"],
        ["demo", "--seed", str(2**64)],
        ["generate", "--model", "m", "--seed", "-1", "x"],
        ["verify", "--model", "m", "--top-k", "-5"],
        ["verify", "--model", "m", "--plot", "m.txt"],
        ["verify", "--model", "m", "--batch-size", "3"],  # no abbreviations
    ],
)
def test_usage_errors_are_one_line_and_exit_2(capsys, argv):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    said = capsys.readouterr().err
    assert stopped.value.code == 2 and said.startswith(f"vexact {argv[0]}: ") and said.count("\n") == 1
    assert said.endswith(f" (vexact {argv[0]} --help has every option)\n") and "RECORD" not in said


@pytest.mark.parametrize(
    "argv, said",
    [
        (["doctor", "--modle", "m"], "vexact doctor: unrecognized arguments: --modle m: is it --model? ("),
        (["serve", "m", "--prot=1"], "vexact serve: unrecognized arguments: --prot=1: is it --port? ("),
        (["demo", "--frobnicate"], "vexact demo: unrecognized arguments: --frobnicate ("),
        (["chat", "m", "--model", "n"], "vexact chat: unrecognized arguments: n ("),
    ],
)
def test_a_mistyped_option_is_told_by_its_command(capsys, argv, said):
    with pytest.raises(SystemExit) as stopped:
        cli.main(argv)
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith(said)


@pytest.fixture
def uncompiled(monkeypatch):
    """A clone whose extension nobody has compiled."""
    found = {**vx.backends(), "cpu": "the compiled extension is missing"}
    monkeypatch.setattr(vx, "backends", lambda: found)


def test_without_the_extension_nothing_is_fetched_or_loaded(capsys, monkeypatch, uncompiled):
    monkeypatch.setattr(demo, "fetch_smollm2", lambda: pytest.fail("fetched"))
    assert cli.main(["demo", "--quiet", "--device", "cpu"]) == 2
    assert capsys.readouterr() == ("", "vexact demo: the compiled extension is missing\n")


def test_doctor_says_once_that_the_extension_is_missing(capsys, uncompiled):
    code, out = cli.main(["doctor", "--device", "cpu"]), capsys.readouterr().out
    assert code == 1 and out.count("FAILED") == 1 and out.endswith("0 of 1 checks hold\n")
    assert "FAILED  every room" in out and "          the compiled extension is missing" in out
