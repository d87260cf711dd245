"""verl's rewards from a model that scores sequences: its own worker and router, our reward manager and server."""

import asyncio
import threading
import time

import numpy
import pytest
import torch
import uvicorn
from transformers import AutoTokenizer

from vexact_engine import Engine, EngineConfig
from vexact_engine.serve import Settings
from vexact_engine.serve.server import Server

from . import rewards
from .rewards import MODULE, OURS
from .rollout_trainer import rollout_config

CHAT = [{"role": "user", "content": "1 plus 2?"}]
ANSWERS = ["3", "It is three.", "no idea"]


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    return str(rewards.make_model(tmp_path_factory.mktemp("reward")))


@pytest.fixture(scope="module")
def router(reward_model):
    """verl's router in front of our server, as its RewardModelManager begins both. -> its address"""
    from verl.experimental.reward_loop.router.naive_router import NaiveRouter

    settings = Settings(port=0, model_names=(reward_model,), allow_no_key=True)
    engine = Engine.from_pretrained(reward_model, config=EngineConfig(num_pages=64, show_progress=False))
    with engine, Server(settings).start(engine) as server:
        made = uvicorn.Server(
            uvicorn.Config(NaiveRouter([server.url]).app, host="127.0.0.1", port=0, log_level="warning")
        )
        thread = threading.Thread(target=made.run)
        thread.start()
        try:
            while not made.started:
                assert thread.is_alive()
                time.sleep(0.01)
            yield f"127.0.0.1:{made.servers[0].sockets[0].getsockname()[1]}"
        finally:
            made.should_exit = True
            thread.join()


def worker(reward_model, router, *settings):
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    asked = rollout_config(
        reward_model,
        "reward.reward_model.enable=True",
        f"reward.reward_model.model_path={reward_model}",
        "reward.reward_model.rollout.name=vexact",
        *settings,
    )
    return RewardLoopWorker(asked, router)


def data(words):
    from verl import DataProto

    rows = [words(answer + words.eos_token).input_ids for answer in ANSWERS]
    width = max(map(len, rows))
    responses = torch.tensor([row + [words.pad_token_id] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    chats = numpy.empty(len(rows), dtype=object)
    chats[:] = [CHAT] * len(rows)
    prompts = torch.zeros(len(rows), 1, dtype=torch.int64)
    tensors = {"responses": responses, "prompts": prompts, "attention_mask": torch.cat((prompts + 1, mask), 1)}
    return DataProto.from_dict(tensors, non_tensors={"raw_prompt": chats})


def test_rewards_are_the_patched_model_s_scores(reward_model, router):
    words = AutoTokenizer.from_pretrained(reward_model)
    made = worker(reward_model, router, *OURS)
    got = asyncio.run(made.compute_score_batch(data(words)))
    chats = [[*CHAT, {"role": "assistant", "content": answer}] for answer in ANSWERS]
    assert [one["reward_score"] for one in got] == rewards.scores(reward_model, chats)
    assert len({one["reward_score"] for one in got}) == len(ANSWERS)


def test_of_several_outputs_the_last_answer_is_scored(reward_model, router):
    """verl's agent loop pads each as a whole, so that a short one's mask ends before its columns do."""
    from verl import DataProto

    words, manager = AutoTokenizer.from_pretrained(reward_model), worker(reward_model, router, *OURS).reward_manager
    rows, prompts = [words(answer).input_ids for answer in ("It is three.", "3")], [3, 1]
    width, longest = max(map(len, rows)), max(p + len(row) for p, row in zip(prompts, rows))
    responses = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * n + [0] * (longest - n) for n in (p + len(row) for p, row in zip(prompts, rows))])
    tensors = {"responses": responses, "prompts": torch.zeros(2, 3, dtype=torch.int64), "attention_mask": mask}
    others = {"raw_prompt": numpy.array([CHAT] * 2), "response_len": numpy.array(list(map(len, rows)))}
    item = DataProto.from_dict(tensors, non_tensors=others)[-1:][0]
    chat = [*CHAT, {"role": "assistant", "content": "3"}]
    assert manager.conversation(item) == words.apply_chat_template(chat, tokenize=True, return_dict=False)


def test_without_it_verl_says_that_it_does_not_know_us(reward_model, router):
    """Once it does, reward.py has nothing left to do."""
    words = AutoTokenizer.from_pretrained(reward_model)
    with pytest.raises(NotImplementedError, match="RewardLoopManager does not support vexact"):
        asyncio.run(worker(reward_model, router).compute_score(data(words)))
    half = worker(reward_model, router, f"reward.custom_reward_function.path={MODULE}")
    with pytest.raises(ValueError, match=r"expected reward.reward_manager.source=importlib, .name=ModelReward"):
        asyncio.run(half.reward_manager.compute_score())
    with pytest.raises(ValueError, match=r"reward.reward_model.enable: got False"):
        worker(reward_model, None, *OURS)
