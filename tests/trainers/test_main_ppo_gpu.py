"""main_ppo of verl on GPUs as test_main_ppo.py has it on the CPU: layers of true dimensions, ten steps, IPC, graphs.

    VEXACT_TRAINERS_RECORDS=FILE pytest tests/trainers/test_main_ppo_gpu.py    # a line of JSON for each run

On two GPUs where there are two (NCCL between the trainers, a replica on each), else on one; what is selected runs side
by side on them, as many as there are CORES_PER_RUN for. VEXACT_TRAINERS_SECONDS is what one run may take, its start
included.
"""

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from .environment import environment
from .models import FAMILIES
from .ppo import Case, Run, check, compared, keep, selected
from .warm import ENGINE, RESPONSE

RANKS = min(2, max(1, torch.cuda.device_count()))
CORES_PER_RUN = 4
SETTINGS = (
    f"data.max_response_length={RESPONSE}",
    "actor_rollout_ref.rollout.ignore_eos=True",
    *(f"+actor_rollout_ref.rollout.engine_kwargs.vexact.{name}={value}" for name, value in ENGINE.items()),
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
def models(request, tmp_path_factory):
    """As conftest.py's, of other sizes; the kernels that they need are compiled and verified while the runs begin."""
    folder, begun = tmp_path_factory.mktemp("models"), {}

    def said(family: str) -> str:
        return f"{family}: {(folder / f'{family}.txt').read_text()[-4000:]}"

    def model(family: str) -> Path:
        while not (folder / family).exists():
            assert begun[family].poll() is None, said(family)
            time.sleep(0.1)
        return folder / family

    with contextlib.ExitStack() as stack:
        for number, family in enumerate(dict.fromkeys(case.family for case in selected(request))):
            command = [sys.executable, "-W", "ignore", "-m", "trainers.warm", folder / family]
            env = {**os.environ, **environment(device="cuda"), "CUDA_VISIBLE_DEVICES": _device(number)}
            log = stack.enter_context(open(folder / f"{family}.txt", "w"))
            begun[family] = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log, env=env))
            stack.callback(begun[family].kill)
        yield model
        for family, process in begun.items():
            assert process.poll() in (None, 0), said(family)


def _device(number: int) -> str:
    """One of those that are visible here."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = given if given != [""] else [str(i) for i in range(torch.cuda.device_count())]
    return names[number % len(names)]


@pytest.mark.parametrize("case", CASES, ids=str)
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
