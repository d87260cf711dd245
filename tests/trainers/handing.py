"""A hand-over through verl's own methods, but without Ray: our adapter on one side, an engine in this process on the
other."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from typing import Any

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


def hand_over(
    engine, weights: Iterable, model_config, dtype: str = "bfloat16", adapters=None, step: int | None = 1,
    named: Callable[[int | None], None] = lambda step: None,
) -> None:  # fmt: skip
    """What a hybrid worker of verl's does with what its trainer's get_per_tensor_param has returned. `named` is called
    with what the server is told of the step."""
    from verl.workers.config import RolloutConfig

    from vexact_engine.handover.receiver import WeightReceiver
    from vexact_engine.verl.adapter import ServerAdapter

    receiver = WeightReceiver(engine)
    methods = {"get_weights_address": lambda node: receiver.address, "receive_weights": receiver.receive}
    server = _Actor(**methods, set_global_steps=named)

    class Adapter(ServerAdapter):
        def _server(self):
            return server

    os.environ["RANK"] = "0"
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


class Watched:
    """What verl's trainer gives. If it is `faulty`, its shards break off in the middle.

    taken   how many whole tensors this rank was asked for
    """

    def __init__(self, trainer, faulty: bool):
        self.weights, _ = trainer.get_per_tensor_param()
        self.taken, self._shards = 0, self.weights.shards
        items, whole = self.weights._items, self.weights.whole
        self.weights._items = self._counted(items)
        if self.weights._held is not None:  # else it is those items
            self.weights.whole = lambda device: self._counted(whole(device))
        if faulty:
            self.weights.shards = self._broken_off

    def _counted(self, items: Iterable) -> Iterator:
        for item in items:
            self.taken += 1
            yield item

    def _broken_off(self, *given) -> Iterator:
        for number, item in enumerate(self._shards(*given)):
            if number == 5:
                raise RuntimeError("no more memory")
            yield item


def of_a_replica(trainer, job, model_config, rank: int) -> dict[str, Any]:
    """Seven updates of rollouts that `job.replica` ranks share each, of which the first rank has the engine. Of each
    group of ranks: the second with a fault in what the last holds, the third with a server that is not to be had, of
    the last replica, the fifth to successors of all, the sixth to one that refuses, of the last replica; of the
    seventh's all have a base of adapters. -> what this rank saw of each, and on a replica's first rank what the engine
    has then."""
    from verl.workers.config import RolloutConfig

    from vexact_engine import Engine, EngineConfig
    from vexact_engine.handover.receiver import WeightReceiver
    from vexact_engine.verl import adapter as module

    leads, steps, there, group = rank % job.replica == 0, [], [True], job.group or job.replica
    alone: list[bool] = []
    last = rank % group == group - job.replica  # leads the group's last replica
    module.LARGEST_BUCKET = 4096  # so that a small model has many
    with contextlib.ExitStack() as stack:
        if leads:
            config = EngineConfig(num_pages=64, show_progress=False, **job.rollout)
            engine = stack.enter_context(Engine.from_pretrained(job.model, config=config))
            receiver = stack.enter_context(WeightReceiver(engine))

        def address(node):
            if not there[0]:
                raise RuntimeError("no server")
            return receiver.address

        class Adapter(module.ServerAdapter):
            async def _have_base(self):
                alone.append(await super()._have_base())
                return alone[-1]

            def _server(self):
                assert leads
                return _Actor(
                    has_base=lambda: step == 7,
                    get_weights_address=address,
                    receive_weights=receiver.receive,
                    set_global_steps=lambda step: steps.append((step, engine.weight_version)),
                )

        os.environ["RANK"] = str(rank)
        told = {"tensor_model_parallel_size": job.replica, "dtype": "bfloat16", "n_gpus_per_node": job.node}
        if job.shards:
            told["engine_kwargs"] = {"vexact": {"shards": job.shards}}
        adapter = Adapter(RolloutConfig(name="vexact", **told), model_config, None)
        seen, before = [], None
        for step in range(1, 8):
            there[0], error = step != 3 or not last, ""
            if step == 5 and leads:  # the server has a successor
                receiver.close()
                receiver = stack.enter_context(WeightReceiver(engine))
                refuses = receiver._refusal
            if step >= 6 and last:
                receiver._refusal = (lambda hello: "weights: refused: so") if step == 6 else refuses
            alone.clear()
            given = Watched(trainer, faulty=step == 2 and rank % group == group - 1)
            with _gathers() as gathers:
                try:
                    asyncio.run(adapter.update_weights(given.weights, global_steps=step))
                except Exception as raised:
                    error = f"{type(raised).__name__}: {raised}"
            sender, counts = adapter._sender, {"taken": given.taken, "gathers": len(gathers)}
            saw = {"sender": type(sender).__name__, "kept": sender is before, "alone": any(alone)}
            seen.append({"error": error, **saw, **counts})
            before = sender
            torch.distributed.barrier()
        found: dict[str, Any] = {"seen": seen}
        if leads:
            rows = [prompt + response for prompt, response in job.rows]
            found |= {"scored": scored(engine, rows), "steps": steps}
            if not job.rollout:
                found["has"] = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
        adapter._close()
        return found


@contextlib.contextmanager
def _gathers() -> Iterator[list]:
    """The shapes of what is made whole meanwhile."""
    from torch.distributed.tensor import DTensor

    found, full = [], DTensor.full_tensor

    def counted(self, *args, **options):
        found.append(self.shape)
        return full(self, *args, **options)

    DTensor.full_tensor = counted
    try:
        yield found
    finally:
        DTensor.full_tensor = full
