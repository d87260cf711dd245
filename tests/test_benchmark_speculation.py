"""Of what drafts are worth, the cases that are asked for."""

import pytest

from benchmarks import __main__, output, report

SMALL = ["speculation", "--device", "cpu", "--layers", "1", "--dtype", "float32", "--batch", "1,2"]
SMALL += ["--prompt", "8", "--new", "6"]


def test_one_case_alone_and_all_its_draws(tmp_path):
    lines = tmp_path / "drafts.jsonl"
    assert __main__.main([*SMALL, "--case", "2 given, 70%", "--draws", "3", "--lines", str(lines)]) == 0
    (record,) = report.load(lines)
    assert record["case"] == "smollm2-135m 1 layer 2 given, 70% right"
    assert record["differ"] == 0 and record["numbers"] == 2 * 6 * 2 * 3
    assert len(record["ratios"]) == 3 and record["ratio"] == pytest.approx(sum(record["ratios"]) / 3, abs=2e-4)


def test_a_case_that_is_not_there_is_refused_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("benchmarks.speculation.load", lambda *args: pytest.fail("loaded"))
    with pytest.raises(output.Refused, match="'3 given', which no case has in its name"):
        __main__.main([*SMALL, "--case", "3 given"])
