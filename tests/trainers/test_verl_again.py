"""The same weights sent once more. Where a reward model shares the trainers' GPUs, verl's validation puts the rollout
to sleep in the middle, and its next update has no step (PPOTrainer._validate)."""

import asyncio
import inspect

import pytest
import torch

from .handing import hand_over
from .rollout_trainer import weights
from .test_verl_rollout import LONG, PROMPT, VERLS, Running, request_id_of_verls_loop


def test_verl_sends_them_without_a_step():
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.trainer.ppo.v1.trainer_base import PPOTrainer

    assert "self.checkpoint_manager.update_weights()\n" in inspect.getsource(PPOTrainer._validate)
    assert inspect.signature(CheckpointEngineManager.update_weights).parameters["global_steps"].default is None


@pytest.fixture(scope="module")
def path(models):
    return models("qwen3")


def answers(path, again: bool) -> tuple[list, list]:
    """What is drawn with the weights of step 7, come twice or not. -> token ids, and the steps that are said of them"""
    state, name = weights(path, 5, torch.bfloat16).state_dict(), request_id_of_verls_loop()
    with Running(path, "actor_rollout_ref.rollout.full_determinism=true", mode="HYBRID") as running:
        server = running.server
        for step in (7, None) if again else (7,):
            server.engine.update_weights(state, numerics=server.engine.numerics())
            running.call(server.set_global_steps(step))

        async def go():
            calls = [server.generate(PROMPT, {**VERLS, "max_tokens": LONG}, name) for _ in range(2)]
            return await asyncio.gather(*calls)

        found = running.call(go())
    steps = ("global_steps", "min_global_steps", "max_global_steps")
    return [one.token_ids for one in found], [one.extra_fields[name] for one in found for name in steps]


def test_answers_are_those_of_their_step(path):
    once, twice = answers(path, again=False), answers(path, again=True)
    assert once == twice and once[1] == [7] * 6


def test_the_server_is_told(path):
    from verl.workers.config import HFModelConfig

    from vexact_engine import Engine, EngineConfig

    model, said = HFModelConfig(path=str(path)), []
    with Engine.from_pretrained(path, config=EngineConfig(num_pages=64, show_progress=False)) as engine:
        for step in (7, None):
            items = iter(weights(path, 5).state_dict().items())
            hand_over(engine, items, model, step=step, named=lambda step: said.append((engine.weight_version, step)))
    assert said == [(1, 7), (2, None)]


def test_the_check_of_a_step_is_still_due():
    from vexact_engine.verl.check import Check

    for step, is_due in (0, True), (9, False), (10, True):
        check = Check(10, 1.0)
        check.of(step)
        check.of(None)
        if is_due:
            with pytest.raises(ValueError, match="the batch has no rollout_log_probs"):
                check.before({}, None)
        else:
            assert check.before({}, None) == 0
