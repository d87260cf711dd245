"""Weights of a trainer's two ranks, gathered from FSDP2's shards: to an engine of two ranks, to one of one, and from
each of the two to an engine of its own. All compute the bits of an engine with the same weights."""

import contextlib
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from engine_models import build
from handovers import CONFIG, expected, other, receiving, texts
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import vexact_ops as vx
from vexact_engine import Engine, WeightSender

pytestmark = pytest.mark.process
FAMILY, SEEDS = "Qwen3Moe", (7, 8)


def gathered(model):
    """Every rank takes every tensor, for all of them make it."""
    for name, tensor in model.state_dict().items():
        yield name, tensor.full_tensor()


def trainer(rank: int, path: str, first: list[str], own: list[str]) -> None:
    """first   of receivers that the first rank sends to
    own     of that of each rank"""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    with contextlib.ExitStack() as stack:
        addresses = [None if rank else address for address in first] + [own[rank]]
        options = {"numerics": vx.numerics("cpu"), "bucket_bytes": 4096, "checksum": True, "timeout": 300}
        senders = [a and stack.enter_context(WeightSender(a, **options)) for a in addresses]
        for version, seed in enumerate(SEEDS, 1):
            model = other(build(FAMILY), seed)
            for layer in model.model.layers:
                fully_shard(layer, mesh=mesh)
            fully_shard(model, mesh=mesh)
            for out in senders:
                if out is None:
                    list(gathered(model))
                else:
                    out.send(gathered(model), version=10 * version)
            dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_to_two_to_one_and_each_to_its_own(tmp_path, sockets):
    build(FAMILY).save_pretrained(tmp_path / "model")
    wanted = [expected(FAMILY, other(build(FAMILY), seed)) for seed in SEEDS]
    assert wanted[0] != wanted[1]
    with contextlib.ExitStack() as stack:
        configs = replace(CONFIG, tensor_parallel_size=2), CONFIG, CONFIG
        engines = [
            stack.enter_context(Engine.from_pretrained(tmp_path / "model", device="cpu", config=config))
            for config in configs
        ]
        two, one, another = engines
        places = (two, "in_place"), (two, "staged"), (one, "in_place"), (one, "staged"), (another, "staged")
        receivers = [stack.enter_context(receiving(engine, mode)) for engine, mode in places]
        addresses = [receiver.address for receiver, _ in receivers]
        ranks = torch.multiprocessing.spawn(
            trainer, (str(tmp_path / "store"), addresses[:3], addresses[3:]), nprocs=2, join=False
        )
        for version, texts_then in enumerate(wanted, 1):
            results = [start() for _, start in receivers]
            assert [result() for result in results] == [10 * version] * len(places)
            assert all(texts(engine) == texts_then for engine in engines)
        while not ranks.join():
            pass
