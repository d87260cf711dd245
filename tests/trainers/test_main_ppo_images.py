"""verl's main_ppo on pictures and films: a log-probability is the same float wherever it is computed."""

import os
from dataclasses import replace

import pytest

from . import pictures
from .ppo import Case, check, drawn, run

IN_CI = [Case("qwen3_vl"), Case("qwen3_vl", "veomni")]
FAMILIES = {"fsdp2": ("qwen2_5_vl", "qwen3_vl_moe", "qwen3_5"), "veomni": ("qwen3_vl_moe", "qwen3_5")}
CASES = [*IN_CI, *(Case(family, engine) for engine, families in FAMILIES.items() for family in families)]
CORES_PER_RUN = 1
ALL = os.environ.get("VEXACT_TRAINERS") == "all"
IMAGE = pictures.VOCABULARY - len(pictures.TOKENS)


def prepare(case, folder, models=None):
    """-> the case with what a run of pictures is told, and its model"""
    agents = "single_turn_agent", "tool_agent"
    prompts = pictures.make_prompts(folder / "data", 4 * case.steps, agents=agents)
    told = (*pictures.options(prompts, media=case.engine == "veomni"), *pictures.with_tools())
    return replace(case, turns=True, overrides=told), pictures.make_model(case.family, folder / "model")


@pytest.mark.parametrize("case", CASES if ALL else IN_CI, ids=str)
def test_every_log_probability_is_the_same_float(case, trained):
    """Prompts of pictures, of films, of both and of text alone; half of them for verl's tool agent, whose tool shows
    more pictures between what is drawn; three steps that move the tower too."""
    ran = trained(case)
    check(ran)
    samples = [sample for step in ran.steps for sample in step["samples"]]
    there = {tuple(min(sample["prompts"].count(token), 1) for token in (IMAGE, IMAGE + 1)) for sample in samples}
    assert there == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert not {IMAGE, IMAGE + 1} & {token for sample in samples for token in drawn(sample, "responses")}
    turned = [sample for sample in samples if 0 in sample["response_mask"]]
    shown = [sample for sample in turned if IMAGE in sample["responses"]]
    assert len(samples) / 4 <= len(turned) <= len(samples) / 2 and len(shown) > 2
    for token in IMAGE, IMAGE + 1:
        assert any(token in sample["prompts"] for sample in shown)
    assert all(0 < metrics["critic/score/mean"] < 1 for metrics in ran.metrics)


WATCHED = "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=vexact_engine.verl.agents.Manager"


@pytest.mark.skipif(not ALL, reason="VEXACT_TRAINERS=all runs it")
@pytest.mark.skipif(pictures.WITH_TORCHVISION, reason="qwen-vl-utils is installed")
def test_a_run_on_what_verl_cannot_open_ends_by_the_name_of_the_package(tmp_path):
    case, model = prepare(Case("qwen3_vl"), tmp_path / "given")
    told = (option for option in case.overrides if not option.startswith("data.custom_cls"))
    case = replace(case, overrides=(*told, WATCHED))
    with pytest.raises(
        AssertionError, match=r"vexact: data: it has images and videos: qwen-vl-utils, .* is not installed"
    ):
        run(case, model, tmp_path / "run")
