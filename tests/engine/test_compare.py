"""The comparison's figures: bits first, NaN never right, the KL estimate as defined."""

import json
import math

import pytest
import torch

from vexact_engine.proof.compare import Sample, Side, compare, differences, finite


def test_equal_lists_differ_nowhere():
    x = torch.tensor([-0.5, -3.25, float("-inf"), 0.0])
    c = compare(x, x.clone())
    assert (c.tokens, c.mismatched_tokens, c.max_abs_diff, c.k3_kl) == (4, 0, 0.0, 0.0) and c.equal
    assert c.verdict() == "0 of 4 log-probabilities differ (max |diff| 0.0, KL 0.0)"


def test_one_ulp_is_seen():
    x = torch.linspace(-9, -0.1, 1000)
    y = x.clone()
    y[123] = torch.nextafter(y[123], torch.tensor(0.0))
    c = compare(x, y)
    assert c.mismatched_tokens == 1 and not c.equal
    assert c.max_abs_diff == (y[123].double() - x[123].double()).abs().item() > 0
    assert c.verdict().startswith("1 of 1000 log-probabilities differ (max |diff| 4.77e-07, KL ")


def test_a_negative_zero_is_another_number():
    c = compare(torch.tensor([0.0]), torch.tensor([-0.0]))
    assert c.mismatched_tokens == 1 and c.max_abs_diff == 0 and not c.equal


def test_k3_is_its_definition():
    g = torch.Generator().manual_seed(0)
    x = -torch.rand(500, generator=g) * 5
    y = x + torch.randn(500, generator=g) * 0.1
    d = y.double() - x.double()
    expected = (d.exp() - 1 - d).mean().item()
    assert compare(x, y).k3_kl == pytest.approx(expected, rel=1e-12) and expected > 0


@pytest.mark.parametrize("rollout,trainer", [(math.nan, math.nan), (math.nan, -1.0), (-1.0, math.nan)])
def test_a_nan_is_never_right(rollout, trainer):
    c = compare(torch.tensor([-1.0, rollout]), torch.tensor([-1.0, trainer]))
    assert c.mismatched_tokens == 1 and math.isnan(c.max_abs_diff) and not c.equal


def test_an_infinite_difference_is_one():
    c = compare(torch.tensor([-1.0]), torch.tensor([-math.inf]))
    assert c.mismatched_tokens == 1 and c.max_abs_diff == math.inf and c.k3_kl == math.inf


def test_nothing_compared_is_not_equal():
    assert not compare(torch.empty(0), torch.empty(0)).equal


def test_arguments_are_checked():
    with pytest.raises(TypeError, match=r"trainer: got torch.bfloat16, expected torch.float32"):
        differences(torch.zeros(3), torch.zeros(3).bfloat16())
    with pytest.raises(ValueError, match=r"trainer: got shape \(4,\), expected \(3,\)"):
        differences(torch.zeros(3), torch.zeros(4))


def test_a_side_counts_what_was_scored_alone():
    scored = Sample("a", "p", [1], [2, 3], torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5]))
    failed = Sample("b", "p", [1], [], torch.empty(0), error="too long")
    side = Side("aligned", "bfloat16", [failed, scored])
    assert side.comparison.tokens == 2 and side.comparison.mismatched_tokens == 1
    assert Side("aligned", "bfloat16", [failed]).comparison.tokens == 0


def test_json_reads_back_as_the_same_floats():
    x = torch.log_softmax(torch.randn(50, generator=torch.Generator().manual_seed(1)), 0)
    sample = Sample("a", "p", [1], list(range(50)), x, x * math.nan)
    record = json.loads(json.dumps(sample.to_json(), allow_nan=False))
    assert torch.equal(torch.tensor(record["rollout_logprobs"], dtype=torch.float32), x)
    assert record["trainer_logprobs"] == ["nan"] * 50
    assert finite({"a": [math.inf, (1.5, -math.inf)], "b": "text"}) == {"a": ["inf", [1.5, "-inf"]], "b": "text"}
