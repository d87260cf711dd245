"""What a replica's server is started with, without Ray: which GPUs it sees, and which of them it computes on."""

import asyncio
from types import SimpleNamespace

import pytest
import torch
from verl.workers.rollout.replica import RolloutMode

from vexact_engine import EngineConfig
from vexact_engine.parallel.placement import Placement
from vexact_engine.verl import replica as module

from .rollout_trainer import rollout_config

A, B = "a" * 56, "b" * 56  # nodes, as Ray names them


class Worker:
    """A trainer's, on a GPU of a node."""

    def __init__(self, node, device):
        async def call(place):
            return node, device, {}

        self.__ray_call__ = SimpleNamespace(remote=call)


class Fake:
    """Of Ray's actors: what was asked for each."""

    def __init__(self):
        self.asked = []

    def remote(self, kind):
        return SimpleNamespace(options=self._options)

    def _options(self, **options):
        self.asked.append(options)

        async def done(*given):
            return "host:1"

        method = SimpleNamespace(remote=done)
        server = SimpleNamespace(launch_server=method, get_server_address=method)
        return SimpleNamespace(remote=lambda *given: server)


SEVERAL = "+actor_rollout_ref.rollout.engine_kwargs.vexact.shards=replicas"


def started(models, monkeypatch, start, number=0, size=2, workers=(), told=(SEVERAL,)):
    """The environment that the server of a replica has been given."""
    fake = Fake()
    monkeypatch.setattr(module.ray, "remote", fake.remote)
    ranks = f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}"
    config = rollout_config(models("qwen3"), ranks, *told)
    made = module.Replica(number, config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, 4)
    for _ in range(2):  # a successor has the same
        asyncio.run(start(made, SimpleNamespace(workers=list(workers))))
    first, second = fake.asked
    assert first["runtime_env"] == second["runtime_env"]
    assert first["scheduling_strategy"].node_id == workers[number * size].__ray_call__.node
    return first["runtime_env"]["env_vars"]["CUDA_VISIBLE_DEVICES"]


def trainers():
    every = []
    for node in A, B:
        for device in "4567":
            every.append(Worker(node, device))
            every[-1].__ray_call__.node = node
    return every


async def hybrid(replica, group):
    await replica.init_hybrid(group)


async def hybrid_colocated(replica, group):
    await replica.init_hybrid_colocated(group, None)


async def colocated(replica, group):
    replica.rollout_mode, replica.workers = RolloutMode.COLOCATED, group.workers[2:4]
    await replica.launch_servers()


@pytest.mark.parametrize("start", [hybrid, hybrid_colocated], ids=lambda start: start.__name__)
@pytest.mark.parametrize(
    ("number", "size", "sees"),
    [(0, 2, "4,5,6,7"), (1, 2, "6,7,4,5"), (3, 2, "6,7,4,5"), (6, 1, "6,4,5,7"), (1, 4, "4,5,6,7")],
)
def test_a_server_sees_all_trainers_of_its_node_and_its_own_first(start, number, size, sees, models, monkeypatch):
    assert started(models, monkeypatch, start, number, size, trainers()) == sees


def test_one_that_no_trainer_shares_gpus_with_sees_its_own(models, monkeypatch):
    assert started(models, monkeypatch, colocated, 1, 2, trainers()) == "6,7"


def test_it_sees_its_own_where_no_other_s_are_read(models, monkeypatch):
    assert started(models, monkeypatch, hybrid, 1, 2, trainers(), told=()) == "6,7"


def test_it_computes_on_its_own(monkeypatch):
    """Those are the first that it sees, however many there are."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    config = EngineConfig(tensor_parallel_size=2)
    placed = Placement(config, torch.device("cuda"), None, lambda: None)
    assert [placed.device(rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
