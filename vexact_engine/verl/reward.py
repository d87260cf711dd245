"""verl's rewards from a model that scores sequences (...ForSequenceClassification) on our engine.

verl asks rollouts that it knows by name for such scores, and refuses others ("RewardLoopManager does not support
vexact"). Its own settings take another way past that, a reward manager and a reward function by their place:

    reward.reward_model.enable=True reward.reward_model.model_path=REWARD_MODEL \\
        reward.reward_model.rollout.name=vexact reward.reward_model.rollout.tensor_model_parallel_size=1 \\
        reward.reward_manager.source=importlib reward.reward_manager.name=ModelReward \\
        reward.reward_manager.module.path=pkg://vexact_engine.verl.reward \\
        reward.custom_reward_function.path=pkg://vexact_engine.verl.reward

A reward is the last score of the conversation with the answer, through the reward model's own chat template, as verl's
own is: before any softmax or sigmoid. It is the engine's own fp32 number, whatever else it scores at the time.

The model shares the trainers' GPUs, and answers are scored when all of a batch are there; or it has GPUs of its own,
and they are scored as they come:

    reward.reward_model.enable_resource_pool=True reward.reward_model.nnodes=1 reward.reward_model.n_gpus_per_node=8
"""

import asyncio
import logging
import math
from typing import Any

from . import check_versions

check_versions()
import aiohttp
import ray
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase

from .server import server_name

log = logging.getLogger(__name__)

_TRIES = 5  # of a server that is asleep, or about to end


async def compute_score(*args, **kwargs) -> float:
    """What makes verl ask the reward manager, which does not call it."""
    raise ValueError(
        "vexact: reward.custom_reward_function: got vexact_engine.verl.reward with another reward manager, expected "
        "reward.reward_manager.source=importlib, .name=ModelReward, .module.path=pkg://vexact_engine.verl.reward"
    )


class ModelReward(RewardManagerBase):
    """Of one answer at a time.

    raises  ValueError without a reward model, or where its tokenizer has no chat template; RuntimeError with what the
            server says where it has no score
    """

    def __init__(
        self, config, tokenizer, compute_score=None, reward_router_address=None, reward_model_tokenizer=None
    ) -> None:
        super().__init__(config, tokenizer, compute_score)
        if reward_router_address is None:
            raise ValueError("vexact: reward.reward_model.enable: got False, expected True: ModelReward asks a model")
        if getattr(reward_model_tokenizer, "chat_template", None) is None:
            raise ValueError("vexact: reward.reward_model.model_path: its tokenizer has no chat template")
        self._url, self._template = f"http://{reward_router_address}/classify", reward_model_tokenizer
        model = config.reward.reward_model
        self._model, rollout = str(model.model_path), model.rollout
        self._asleep = 0  # servers on GPUs of their own: verl has them sleep as they begin, and wakes none of those
        if model.enable_resource_pool and rollout.free_cache_engine:
            sizes = (rollout[f"{kind}_parallel_size"] for kind in ("tensor_model", "pipeline_model", "data"))
            self._asleep = model.n_gpus_per_node * model.nnodes // math.prod(sizes)

    async def run_single(self, data) -> dict[str, Any]:
        await self._wake()
        ids = self.conversation(data[-1:][0])
        score = (await self._asked({"model": self._model, "input": ids, "use_activation": False}))["probs"][-1]
        return {"reward_score": score, "reward_extra_info": {"acc": score}}

    def conversation(self, item) -> list[int]:
        """What is scored."""
        responses, there = item.batch["responses"], item.non_tensor_batch.get("response_len")
        if there is None:  # of an agent loop with several outputs the mask is not one of responses at its end
            there = int(item.batch["attention_mask"][-responses.shape[-1] :].sum())
        text = self.tokenizer.decode(responses[:there])
        if self.tokenizer.eos_token:
            text = text.replace(self.tokenizer.eos_token, "")
        messages = [*item.non_tensor_batch["raw_prompt"], {"role": "assistant", "content": text}]
        options = {"add_generation_prompt": False, "tokenize": True, "return_dict": False}
        return list(self._template.apply_chat_template(messages, **options))

    async def _wake(self) -> None:
        servers = [ray.get_actor(server_name(rank, "reward_")) for rank in range(self._asleep)]
        await asyncio.gather(*(server.wake_up.remote() for server in servers))
        self._asleep = 0

    async def _asked(self, body: dict) -> dict:
        said, options = "", {"timeout": aiohttp.ClientTimeout(total=None)}  # a whole batch is asked at once
        for attempt in range(_TRIES):
            if attempt:
                await asyncio.sleep(2**attempt)
            try:
                async with aiohttp.ClientSession(**options) as session, session.post(self._url, json=body) as answer:
                    if answer.status == 200:
                        return (await answer.json())["data"][-1]
                    said = f"{answer.status}: {(await answer.text())[:500]}"
            except aiohttp.ClientError as error:
                said = f"{type(error).__name__}: {error}"
            log.warning("vexact: %s: %s", self._url, said)
        length = len(body["input"])
        raise RuntimeError(
            f"vexact: the reward model at {self._url} gave no score of a conversation of {length} tokens: {said}. "
            "verl's router tells no more: expected no more tokens than the model takes "
            "(reward.reward_model.rollout.max_model_len, or its own positions), and see the log of its server"
        )
