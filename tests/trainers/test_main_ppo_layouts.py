"""verl's main_ppo in layouts of four ranks: every log-probability is the same float, and under gradients that are those
of one rank to a row the trained weights are those of fewer ranks, by their SHA-256.

    VEXACT_TRAINERS_RECORDS=FILE pytest tests/trainers/test_main_ppo_layouts.py    # a line of JSON for each run

On four GPUs, or two, where they are: layers of true dimensions and ten steps, all that is selected side by side.
Elsewhere VEXACT_TRAINERS=all runs them on the CPU, tiny, for three steps.
"""

import os
from dataclasses import replace

import pytest
import torch

from vexact_engine.recipes import digests

from .models import tiny_models
from .ppo import Case, check, keep, selected, trained_weights
from .true_models import SETTINGS, true_models

GPUS = torch.cuda.device_count()
MOST = GPUS or 4
CORES_PER_RUN = 4 if GPUS else 2  # of four trainers and four engines, or fewer
ALL = os.environ.get("VEXACT_TRAINERS") == "all"
DENSE, MIXTURE = "qwen3", "qwen3_moe"
# Of each pair the second shares the first's rows among more ranks. Those of few ranks are not all on the same GPUs.
PAIRS = [
    (
        Case(family, whole=True, ranks=ranks, first_gpu=first),
        Case(family, whole=True, ranks=ranks * ulysses, ulysses=ulysses),
    )
    for family in (DENSE, MIXTURE)
    for ranks, ulysses, first in (((1, 4, 3), (2, 2, 0)) if MOST >= 4 else ((1, 2, 1),))
]
OTHERS = [
    Case(DENSE, ranks=4),
    Case(MIXTURE, ranks=4),
    Case(DENSE, "veomni", ranks=4, ulysses=4),
    Case(MIXTURE, "veomni", ranks=4, experts=4),
    # gloo has no sum that divides by anything but its ranks; test_verl_actor.py has this one on a CPU
    *([Case(MIXTURE, "veomni", ranks=4, experts=2, ulysses=2)] if GPUS else []),
]
if GPUS == 2:
    OTHERS += [Case(DENSE, "veomni", ulysses=2), Case(MIXTURE, "veomni", experts=2), Case(MIXTURE, replica=2)]
if GPUS >= 4:
    OTHERS += [Case(DENSE, ranks=4, replica=2), Case(MIXTURE, ranks=4, replica=4)]
CASES = [*dict.fromkeys(case for pair in PAIRS for case in pair), *(case for case in OTHERS if case.ranks <= MOST)]
pytestmark = [
    *([pytest.mark.cuda] if GPUS else []),
    pytest.mark.skipif(GPUS == 1, reason="two GPUs are not here"),
    pytest.mark.skipif(not GPUS and not ALL, reason="VEXACT_TRAINERS=all runs it on a CPU"),
]


@pytest.fixture(scope="module")
def models(request, tmp_path_factory):
    """As conftest.py's; on GPUs of other sizes."""
    folder = tmp_path_factory.mktemp("models")
    if not GPUS:
        yield tiny_models(folder)
        return
    with true_models(selected(request), folder) as model:
        yield model


def prepare(case, folder, models):
    # At 3e-4 four ranks' models said one token alone from the seventh step on: the samples of a prompt were one.
    given = {"steps": 10, "lr": 1e-4, "device": "cuda", "overrides": SETTINGS} if GPUS else {}
    return replace(case, **given), models(case.family)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_log_probability_is_the_same_float(case, trained):
    ran = trained(case)
    check(ran)
    if file := os.environ.get("VEXACT_TRAINERS_RECORDS"):
        keep(ran, file)


@pytest.mark.parametrize(("fewer", "case"), PAIRS, ids=str)
def test_trained_weights_are_those_of_fewer_ranks(fewer, case, trained):
    expected, got = (dict(trained_weights(trained(each))) for each in (fewer, case))
    assert got.keys() == expected.keys()
    differ = [name for name in got if not equal(got[name], expected[name])]
    assert not differ, f"{len(differ)} of {len(got)} parameters differ: {differ[:3]}"
    assert digests.sha256(got.items()) == digests.sha256(expected.items())


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))
