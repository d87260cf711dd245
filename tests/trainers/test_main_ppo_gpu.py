"""main_ppo of verl on GPUs as test_main_ppo.py has it on the CPU: layers of true dimensions, ten steps, IPC, graphs.

    pytest tests/trainers/test_main_ppo_gpu.py --junitxml=FILE    # which has the tokens compared and the seconds

On two GPUs where there are two (NCCL between the trainers, a replica on each), else on one; what is selected runs side
by side on them. VEXACT_TRAINERS_SECONDS is what one run may take, its start included.
"""

from pathlib import Path

import pytest
import torch

from .models import FAMILIES, TRUE_LAYERS, make_model
from .ppo import Case, check

RANKS = min(2, max(1, torch.cuda.device_count()))
CORES_PER_RUN = 4
SETTINGS = (
    "data.max_response_length=64",
    "actor_rollout_ref.rollout.ignore_eos=True",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "actor_rollout_ref.rollout.max_num_batched_tokens=512",
    # others are on the same GPU
    "+actor_rollout_ref.rollout.engine_kwargs.vexact.num_pages=128",
)
# VeOmni shards nothing on one rank, where its weights are in bf16 without masters
ONE_RANK = ("actor_rollout_ref.actor.veomni.mixed_precision=False", "actor_rollout_ref.actor.veomni.init_device=cuda")
pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch"),
]


def _case(family: str, engine: str = "fsdp2", **changes) -> Case:
    more = ONE_RANK if engine == "veomni" and RANKS == 1 else ()
    return Case(family, engine, RANKS, steps=10, lr=3e-4, device="cuda", overrides=SETTINGS + more, **changes)


CASES = [_case(family, engine) for engine in ("fsdp2", "veomni") for family in FAMILIES]
STOCK = _case("qwen3", vendor=None)


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """As conftest.py's, of other sizes."""
    folder, made = tmp_path_factory.mktemp("models"), {}

    def model(family: str) -> Path:
        if family not in made:
            made[family] = make_model(family, folder / family, sizes=TRUE_LAYERS[family])
        return made[family]

    return model


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_log_probability_is_the_same_float(case, trained, record_property):
    ran = trained(case)
    record_property("seconds", round(ran.seconds))
    record_property("tokens", check(ran))


@pytest.mark.parametrize("case", [STOCK], ids=str)
def test_verls_own_actor_fails_that(case, trained):
    ran = trained(case)
    assert len(ran.metrics) == case.steps
    with pytest.raises(AssertionError):
        check(ran)
    for metrics, step in zip(ran.metrics, ran.steps):
        assert metrics["training/rollout_probs_diff_max"] > 0
        pairs = [p for s in step["samples"] for p in zip(s["rollout_log_probs"], s["old_log_probs"], strict=True)]
        assert sum(a != b for a, b in pairs) > len(pairs) / 2
