"""What `vexact recipe report` says of records: whole, cut off, packed, of several sides and of runs side by side."""

import gzip
import json

import pytest

pytest.importorskip("zmq", reason="pyzmq is not installed")

from vexact_engine import cli
from vexact_engine.recipes import record, report
from vexact_engine.recipes.options import Options

STEP = {"weight_version": 1, "answers": "a", "reward": 0.5, "entropy": 1.0, "grad_norm": 2.0, "moved": 0.1, "tokens": 9}
STEP |= {"expected": 9, "compared": 9, "kl": 0.0, "max_abs_diff": 0.0, "differ": 0, "differ_recomputed": None}
STEP |= {"drafted": 0, "accepted": 0, "seconds": {"rollout": 0.25, "train": 0.5}}


def write(path, steps, side="aligned", changes=None, **options):
    """A record of a run; `changes` of each step by its number."""
    recorder = record.Recorder(path, {"options": Options(**options).to_json()})
    for step in range(1, steps + 1):
        held = {"rss_mib": 100.0 + step, "descriptors": 7, "gpu_mib": 5.5}
        recorder("step", side, {**STEP, "step": step, "held": held, **(changes or (lambda _: {}))(step)})
        recorder("parameters", side, step, {"w": f"{step:016x}"})
    recorder("end", side, "ff" * 32)
    return str(path)


def differing(step):
    return {"differ": 4, "kl": 1e-6 * step, "max_abs_diff": 0.5}


def run(*words):
    return cli.main(["recipe", "report", *words])


def test_a_run_is_summed_up_and_drawn(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", 120)
    files = str(tmp_path / "run.svg"), str(tmp_path / "run.json")
    assert run(path, "--plot", files[0], "--json", files[1]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0].startswith("aligned: 0 of 1080 log-probabilities differ in bytes")
    assert "120 steps, 1080 tokens; a step takes 0.75 s: rollout 0.25  train 0.50" in out[1]
    assert "steps 11 -> 120: rss_mib 111 -> 220, descriptors 7 -> 7, gpu_mib 5.5 -> 5.5" in out[2]
    assert out[3].endswith("ff" * 32) and len(out) == 4
    text = (tmp_path / "run.svg").read_text()
    for title in ("mean reward", "gradient norm", "memory of all processes (MiB)", "open descriptors", "on the GPU"):
        assert title in text
    assert "drafted" not in text
    (found,) = json.loads((tmp_path / "run.json").read_text())["runs"]
    assert len(found["steps"]) == 120 and found["steps"][41]["step"] == 42


def test_a_run_that_was_cut_off_is_what_it_has_and_a_packed_one_is_read(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", 3)
    whole = (tmp_path / "run.jsonl").read_bytes()
    for last, steps in ((b'"kind": "end"', 3), (b'"step": 3', 2)):
        (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(whole[: whole.index(last)]))
        assert run(str(tmp_path / "cut.jsonl.gz")) == 0
        out = capsys.readouterr().out
        assert f"  {steps} steps, " in out and "SHA-256" not in out
    assert [*record.read(path).steps] == [("aligned", n) for n in (1, 2, 3)]


def test_runs_side_by_side_are_told_apart(tmp_path, capsys):
    paths = [write(tmp_path / "a.jsonl", 4), write(tmp_path / "b.jsonl", 6, "stock", differing)]
    paths.append(write(tmp_path / "c.jsonl", 5, "stock", differing, learning_rate=1e-4))
    assert run(*paths, "--plot", str(tmp_path / "all.svg")) == 0  # stock may differ
    names = [one.name for one in report.read(paths)]
    assert names == ["aligned, learning rate 2e-05", "stock, learning rate 2e-05", "stock, learning rate 0.0001"]
    assert [one.name for one in report.read(paths[:2])] == ["aligned", "stock"]
    assert "stock, learning rate 0.0001: 20 of 45 log-probabilities differ" in capsys.readouterr().out


def test_an_aligned_run_that_differs_ends_in_exit_code_1(tmp_path):
    assert run(write(tmp_path / "run.jsonl", 2, changes=differing)) == 1
    assert run(write(tmp_path / "run.jsonl", 2, changes=lambda _: {"compared": 8})) == 1


def test_what_is_no_report_is_refused(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", 0)
    for words, said in (
        (["report"], "RECORD: expected one or more after report"),
        (["report", path], "no step is recorded there"),
        (["report", path, "--steps", "3"], "--steps: not together with report"),
        (["grpo", path], f"RECORD: got {path}, expected none after grpo"),
        (["report", str(tmp_path / "none.jsonl")], "none.jsonl"),
    ):
        assert cli.main(["recipe", *words]) == 2
        assert said in capsys.readouterr().err
