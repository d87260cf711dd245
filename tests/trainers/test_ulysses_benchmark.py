"""benchmarks ulysses: both sides run, and what they compute is compared first."""

import pytest
import torch

from benchmarks import __main__ as bench
from benchmarks import ulysses
from benchmarks.rl import ulysses as rank


def test_both_sides_run(models, tmp_path):
    args = bench.parse(["ulysses", "--device=cpu", "--packed=72", "--repeats=3"])
    ours, stock = (ulysses._side(args, side, models("qwen3"), tmp_path) for side in ulysses.SIDES)
    for found in ours, stock:
        assert found["ms"] > 0 and len(found["steps"]) == 3 and found["kernels"].startswith("flash attention 2")
    assert (ours["bits"], ours["max_diff"]) == (f"{72 - 8} of {72 - 8}", 0)
    assert 0 < stock["max_diff"] < 0.1


def test_other_bytes_are_an_error_of_ours():
    rows = [torch.randn(5), torch.randn(3)]
    wanted = torch.cat([row[:-1] for row in rows])
    assert rank.compare({"side": "vexact"}, wanted, rows) == {"bits": "6 of 6", "max_diff": 0}
    rows[1][0] += 1e-6
    with pytest.raises(AssertionError, match="1 of 6 log-probabilities are not those of one rank"):
        rank.compare({"side": "vexact"}, wanted, rows)
    assert rank.compare({"side": "verl"}, wanted, rows)["bits"] == "5 of 6"
    rows[1][0] += 1
    with pytest.raises(AssertionError, match="1 of 6 log-probabilities"):
        rank.compare({"side": "verl"}, wanted, rows)


def test_a_side_that_fails_is_said_with_what_it_said(tmp_path):
    args = bench.parse(["ulysses", "--device=cpu", "--packed=72"])
    with pytest.raises(RuntimeError, match=r"(?s)ulysses: vexact: \[1, 1\].*nowhere"):
        ulysses._side(args, "vexact", tmp_path / "nowhere", tmp_path)
