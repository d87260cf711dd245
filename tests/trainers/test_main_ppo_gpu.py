"""main_ppo of verl on GPUs as test_main_ppo.py has it on the CPU: layers of true dimensions, ten steps, IPC, graphs.

    VEXACT_TRAINERS_RECORDS=FILE pytest tests/trainers/test_main_ppo_gpu.py    # a line of JSON for each run

On two GPUs where there are two (NCCL between the trainers, a replica on each), else on one; what is selected runs side
by side on them, as many as there are CORES_PER_RUN for. VEXACT_TRAINERS_SECONDS is what one run may take, its start
included.
"""

import os
from dataclasses import replace

import pytest
import torch

from . import pictures
from .models import FAMILIES
from .ppo import Case, Run, check, compared, keep, selected
from .true_models import SETTINGS, true_models
from .warm import PROMPT

RANKS = min(2, max(1, torch.cuda.device_count()))
CORES_PER_RUN = 4
# VeOmni shards nothing on one rank, where its weights are in bf16 without masters
ONE_RANK = ("actor_rollout_ref.actor.veomni.mixed_precision=False", "actor_rollout_ref.actor.veomni.init_device=cuda")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]


def _case(family: str, engine: str = "fsdp2", **changes) -> Case:
    more = ONE_RANK if engine == "veomni" and RANKS == 1 else ()
    given = {"steps": 10, "lr": 3e-4, "device": "cuda", "overrides": SETTINGS + more, **changes}
    return Case(family, engine, RANKS, **given)


CASES = [_case(family, engine) for engine in ("fsdp2", "veomni") for family in FAMILIES]
# Few layers of text, and all of the tower
OF_PICTURES = [_case(family, engine, steps=3) for family in pictures.TRUE for engine in ("fsdp2", "veomni")]
STOCK = _case("qwen3", vendor=None)


@pytest.fixture(scope="module")
def models(request, tmp_path_factory):
    """As conftest.py's, of other sizes."""
    with true_models(selected(request), tmp_path_factory.mktemp("models")) as model:
        yield model


def prepare(case, folder, models):
    """-> the case with what a run of pictures is told, and its model"""
    if case.family not in pictures.TRUE:
        return case, models(case.family)
    prompts = pictures.make_prompts(folder / "data", 4 * case.steps, unit=pictures.TRUE_UNIT)
    told = (*pictures.options(prompts, media=False), f"data.max_prompt_length={PROMPT}")
    return replace(case, overrides=(*case.overrides, *told)), models(case.family)


@pytest.mark.parametrize("case", [*CASES, *OF_PICTURES], ids=str)
def test_every_log_probability_is_the_same_float(case, trained):
    ran = trained(case)
    check(ran)
    _keep(ran)


@pytest.mark.parametrize("case", [STOCK], ids=str)
def test_verls_own_actor_fails_that(case, trained):
    ran = trained(case)
    assert len(ran.metrics) == len(ran.steps) == case.steps
    with pytest.raises(AssertionError):
        check(ran)
    for metrics, step in zip(ran.metrics, ran.steps):
        tokens, mismatched = compared(step["samples"])
        assert metrics["training/rollout_probs_diff_max"] > 0 and mismatched > tokens / 2
    _keep(ran)


def _keep(ran: Run) -> None:
    if file := os.environ.get("VEXACT_TRAINERS_RECORDS"):
        keep(ran, file)
