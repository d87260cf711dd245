"""A hand-over through verl's own methods, but without Ray: our adapter on one side, an engine in this process on the
other."""

import asyncio
import os
from collections.abc import Iterable

import torch

ASKED = {"max_new_tokens": 1, "prompt_logprobs": True}


class _Remote:
    def __init__(self, method):
        self.method = method

    def remote(self, *args, **kwargs):
        return asyncio.get_running_loop().run_in_executor(None, lambda: self.method(*args, **kwargs))


class _Actor:
    """Methods by their names, as a Ray actor has them: with `.remote`."""

    def __init__(self, **methods):
        self.__dict__.update({name: _Remote(method) for name, method in methods.items()})


def hand_over(engine, weights: Iterable, model_config, dtype: str = "bfloat16", adapters=None, step: int = 1) -> None:
    """What a hybrid worker of verl's does with what its trainer's get_per_tensor_param has returned."""
    from verl.workers.config import RolloutConfig

    from vexact_engine.handover.receiver import WeightReceiver
    from vexact_engine.verl.adapter import ServerAdapter

    receiver = WeightReceiver(engine)
    methods = {"get_weights_address": lambda node: receiver.address, "receive_weights": receiver.receive}
    server = _Actor(**methods, set_global_steps=lambda step: None)

    class Adapter(ServerAdapter):
        def _server(self):
            return server

    os.environ.setdefault("RANK", "0")
    config = RolloutConfig(name="vexact", tensor_model_parallel_size=1, dtype=dtype)
    adapter = Adapter(config, model_config, None)
    try:
        asyncio.run(adapter.update_weights(weights, global_steps=step, peft_config=adapters, base_sync_done=True))
    finally:
        if adapter._sender is not None:
            adapter._sender.close()
        receiver.close()


def scored(engine, rows: list[list[int]]) -> list[torch.Tensor]:
    """The engine's log-probability of every token but the first."""
    from vexact_engine import SamplingParams

    done = engine.generate(rows, SamplingParams(**ASKED))
    assert not any(completion.error for completion in done), [completion.error for completion in done]
    return [torch.tensor(completion.prompt_logprobs[1:]) for completion in done]
