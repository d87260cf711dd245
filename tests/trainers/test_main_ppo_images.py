"""verl's main_ppo on pictures: a log-probability is the same float wherever it is computed."""

from dataclasses import replace

import pytest

from . import pictures
from .ppo import Case, check, run

CASES = [Case("qwen3_vl")]
IMAGE = pictures.VOCABULARY - len(pictures.TOKENS)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_log_probability_is_the_same_float(case, tmp_path):
    """Prompts of one picture, of two and of text alone in each batch; three steps that move the tower too."""
    model = pictures.make_model(case.family, tmp_path / "model")
    prompts = pictures.make_prompts(tmp_path / "data", 4 * case.steps)
    ran = run(replace(case, overrides=pictures.options(prompts)), model, tmp_path / "run")
    check(ran)
    samples = [sample for step in ran.steps for sample in step["samples"]]
    assert {sample["prompts"].count(IMAGE + 2) for sample in samples} == {0, 1, 2}
    assert not {IMAGE, IMAGE + 1} & {token for sample in samples for token in sample["responses"]}
    assert all(0 < metrics["critic/score/mean"] < 1 for metrics in ran.metrics)
