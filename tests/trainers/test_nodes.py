"""Stages on two nodes of a Ray cluster, which is one machine's: the bits of one process, weights that travel, verl's
replica over nodes, what is asked over HTTP, and what becomes of a node that goes away."""

import asyncio
import json
import os
import signal
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from vexact_engine import (
    Engine,
    EngineConfig,
    HandoverFailed,
    NodeReceivers,
    PeerLost,
    SamplingParams,
    StageDied,
    WeightSender,
    WeightsTorn,
)
from vexact_engine.parallel import limits
from vexact_engine.parallel.nodes import Nodes
from vexact_engine.parallel.replicas import Replicas

from . import workers
from .pace import slow, slow_server
from .rollout_trainer import rollout_config, weights

CONFIG = EngineConfig(page_size=4, num_pages=200, max_num_seqs=4, max_num_batched_tokens=32, show_progress=False)
SPREAD = EngineConfig(**{**vars(CONFIG), "pipeline_parallel_size": 2, "nodes": 2})
PROMPTS = [[5, 6, 7, 8], [9] * 30, [1, 2, 3], [5, 6, 7, 8, 20, 21, 22]]
PARAMS = [SamplingParams(max_new_tokens=7 + i, seed=i, ignore_eos=True, num_top_logprobs=i % 2) for i in range(4)]
LONG = SamplingParams(max_new_tokens=200, seed=1, ignore_eos=True)


def pids_of(engine):
    return [pid for pid, *_ in engine._loop.call(engine._worker.numbers)]


def gone(pids):
    end = time.monotonic() + 20
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.05)


def ask(engine):
    return [(c.token_ids, c.logprobs, c.raw_logprobs, c.top_logprobs) for c in engine.generate(PROMPTS, PARAMS)]


def handed(engine, given, mode, timeout=60):
    """What comes of weights that a sender for each node brings: for those that receive, and for each that sends."""
    with NodeReceivers(engine, mode=mode, timeout=timeout) as receivers, ThreadPoolExecutor(3) as pool:
        received, numerics = pool.submit(receivers.receive, timeout), engine.numerics()

        def send(address, items):
            with WeightSender(address, numerics=numerics, bucket_bytes=4096, timeout=timeout) as out:
                return out.send(items)

        sent = [pool.submit(send, *each) for each in zip(receivers.addresses.values(), given)]
    return received, sent


@pytest.fixture(scope="module")
def nodes():
    """A cluster of a head, on which this process is, and one node more."""
    import ray
    from ray._private.utils import get_ray_address_file
    from ray.cluster_utils import Cluster

    Path(get_ray_address_file(None)).parent.mkdir(exist_ok=True)  # Cluster writes there, wherever its own folder is
    own = {"num_cpus": 8, "num_gpus": 2, "object_store_memory": 80_000_000}
    with workers.of_ray() as (folder, runtime_env):
        cluster = Cluster(True, head_node_args={**own, "include_dashboard": False, "temp_dir": folder})
        cluster.spare, cluster.second = own, cluster.add_node(**own)
        ray.init(address=cluster.address, log_to_driver=False, runtime_env=runtime_env)
        yield cluster
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(scope="module")
def one(models):
    """What one process gives, of a model's own weights and of other ones."""
    path = models("qwen3")
    with Engine.from_pretrained(path, device="cpu", config=CONFIG) as engine:
        first = ask(engine)
        new = weights(path, 3, torch.bfloat16).state_dict()
        engine.update_weights(new, numerics=engine.numerics())
        return path, first, new, ask(engine)


def test_stages_and_ranks_on_two_nodes_have_the_bits_of_one(nodes, one):
    path, first, new, other = one
    own = AutoModelForCausalLM.from_pretrained(path).state_dict()
    config = EngineConfig(**{**vars(SPREAD), "tensor_parallel_size": 2})
    with Engine.from_pretrained(path, device="cpu", config=config) as engine:
        members = engine._worker._stages
        assert sorted(each.near for each in members) == [False, False, True, True]
        assert members[0].near == members[1].near, "ranks of a stage are on one node"
        assert ask(engine) == first
        for mode, given, expected in (("staged", new, other), ("in_place", own, first)):
            received, sent = handed(engine, [given] * 2, mode)
            assert [each.result() for each in (received, *sent)] == [engine.weight_version] * 3
            assert ask(engine) == expected
        assert engine._worker._here is None, "nothing of them has been carried to another node"
        for given, expected in ((new, other), (own, first)):
            engine.update_weights(given, numerics=engine.numerics())
            assert ask(engine) == expected
        engine.sleep()
        engine.wake_up()
        assert ask(engine) == first
        door = engine._worker._placement._door
        assert not door._expected and door._socket.fileno() < 0, "nobody comes in after the last"
        pids = pids_of(engine)
    gone(pids)


def test_a_replica_of_two_nodes(nodes, one):
    with Replicas.from_pretrained(one[0], replicas=1, config=SPREAD, ray=True, tokenizer=False) as replicas:
        assert ask(replicas) == one[1]
        replicas.update_weights(one[2], numerics=replicas.numerics())
        assert ask(replicas) == one[3]


def test_a_cluster_that_is_too_small(nodes, one, monkeypatch):
    said = (
        r"nodes: each takes 3 nodes with 1 CPUs, and Ray's cluster has room for 0, expected 1: its nodes have 8 CPUs; 8"
    )
    with pytest.raises(ValueError, match=said):
        Nodes.placed(EngineConfig(pipeline_parallel_size=3, nodes=3), "cpu", lambda: None)
    with pytest.raises(ValueError, match=r"replicas: each takes a node with 9 CPUs, .* room for 0, expected 2"):
        config = EngineConfig(pipeline_parallel_size=9)
        Replicas.from_pretrained(one[0], replicas=2, config=config, ray=True, tokenizer=False)
    monkeypatch.setattr(limits, "PLACE", 0.5)
    used = nodes_ray().util.placement_group([{"CPU": 8}], strategy="PACK")
    try:
        nodes_ray().get(used.ready())
        with pytest.raises(TimeoutError, match=r"no 2 nodes with 1 CPUs free within 0 s: others use them"):
            Engine.from_pretrained(one[0], device="cpu", config=SPREAD)
    finally:
        nodes_ray().util.remove_placement_group(used)
    with pytest.raises(ValueError, match=r"nodes: got 2, expected 1, or Replicas with ray=True"):
        Replicas.from_pretrained(one[0], replicas=1, config=SPREAD, tokenizer=False)


def nodes_ray():
    import ray

    return ray


# verl


def post(address, path, body):
    request = urllib.request.Request(f"http://{address}{path}", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    request.add_header("Authorization", "Bearer token-abc123")  # main_generation_server's
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_verls_replica_of_two_nodes_and_what_it_is_asked_over_http(nodes, one):
    import importlib

    import ray
    from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

    from vexact_engine.verl.replica import Replica

    from .rollout_trainer import Trainer

    importlib.import_module("vexact_engine.verl.register")
    path, rollout = one[0], "actor_rollout_ref.rollout"
    config = rollout_config(path, f"{rollout}.pipeline_model_parallel_size=2", f"{rollout}.n_gpus_per_node=1")
    rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
    trainers = RayWorkerGroup(
        RayResourcePool([1, 1], use_gpu=True, max_colocate_count=2),
        RayClassWithInitArgs(ray.remote(Trainer), rollout, model),
        device_name="cpu",
    )
    replica = Replica(0, rollout, model, gpus_per_node=1)
    assert replica.nnodes == 2
    asyncio.run(replica.init_hybrid(trainers))
    server, address = replica.server_handle, replica.server_address
    assert ray.get_actor("vexact_server_0_1") is not None and replica.servers == [server]

    def answer():
        asked = {"temperature": 1.0, "seed": 3, "ignore_eos": True, "logprobs": True, "max_tokens": 9}
        found = ray.get(server.generate.remote(prompt_ids=PROMPTS[0], sampling_params=asked, request_id="one"))
        return found.token_ids, found.log_probs

    asyncio.run(replica.sleep())
    ray.get(trainers.update_weights(3, mode="naive"))
    carried = server.__ray_call__.remote(lambda self: self.engine._worker._here is not None)
    assert not ray.get(carried), "each node's ranks take them from the trainer's rank on their node"
    with Engine.from_pretrained(weights(path, 3, torch.bfloat16), config=CONFIG) as engine:
        (expected,) = engine.generate([PROMPTS[0]], SamplingParams(max_new_tokens=9, seed=3, ignore_eos=True))
    assert answer() == (expected.token_ids, expected.logprobs)
    # What verl asks over HTTP
    chat = {"model": str(path), "messages": [{"role": "user", "content": "1 plus 1"}], "max_tokens": 5, "seed": 1}
    status, found = post(address, "/v1/chat/completions", chat)
    assert status == 200 and found["usage"]["completion_tokens"] > 0
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=60) as metrics:
        assert b"vexact_generated_tokens_total" in metrics.read()
    assert post(address, "/pause", {})[0] == 403, "what controls the engine is not for everybody"

    def decoded():
        return ray.get(server.__ray_call__.remote(lambda self: self.engine.stats.decode_tokens))

    # While verl has ended its requests, nobody else's are begun
    before = decoded()
    ray.get(server.__ray_call__.remote(slow_server))
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(post, address, "/v1/chat/completions", {**chat, "max_tokens": 200, "ignore_eos": True})
        while decoded() == before:  # one that had not begun would be told to come again
            assert not running.done()
            time.sleep(0.02)
        asyncio.run(replica.abort_all_requests())
        status, found = running.result(60)
        assert status == 200 and found["usage"]["completion_tokens"] < 200
    ray.get(server.__ray_call__.remote(slow_server, 0))
    assert post(address, "/v1/chat/completions", chat)[0] == 503
    asyncio.run(replica.resume_generation())
    assert post(address, "/v1/chat/completions", chat)[0] == 200
    # A trainer's rank dies in an update: the other one is told where, and requests that there are no weights
    ray.get(trainers.workers[1].set_spoil.remote("die"))
    told, _ = trainers.update_weights(4, mode="naive")
    with pytest.raises(
        ray.exceptions.RayTaskError, match=r"\(node .*\): the trainer \(process \d+\) has died .* send all"
    ):
        ray.get(told)
    with pytest.raises(ray.exceptions.RayTaskError, match="update them again"):
        answer()
    for handle in (server, *replica._nodes, *trainers.workers):
        ray.kill(handle)
    wrong = rollout_config(path, "actor_rollout_ref.rollout.tensor_model_parallel_size=2").actor_rollout_ref.rollout
    with pytest.raises(ValueError, match=r"pipeline_model_parallel_size: got 1, expected a multiple of 2"):
        asyncio.run(Replica(0, wrong, model, gpus_per_node=1).launch_servers())


# The last: the second node goes away


def test_a_process_or_a_node_that_goes_away_is_named(nodes, one):
    path, first, new, other = one
    with Engine.from_pretrained(path, device="cpu", config=SPREAD) as engine, ThreadPoolExecutor(1) as pool:
        assert ask(engine) == first
        members = engine._worker._stages
        far = next(rank for rank, each in enumerate(members) if not each.near)
        before = engine.stats.decode_tokens
        slow(engine)
        running = pool.submit(engine.generate, PROMPTS[:2], LONG)
        while engine.stats.decode_tokens < before + 4:
            assert not running.done()
            time.sleep(0.01)
        os.kill(pids_of(engine)[far], signal.SIGKILL)
        with pytest.raises(StageDied, match=rf"stage {far} on .* has died \(signal 9\)"):
            running.result(60)
        slow(engine, 0)
        assert ask(engine) == first, "on the same nodes, of the same weights"
        pids = pids_of(engine)

        def killing():
            for count, item in enumerate(new.items()):
                if count == 3:
                    os.kill(pids[far], signal.SIGKILL)
                yield item

        received, sent = handed(engine, [killing(), new], "staged")
        with pytest.raises(StageDied, match=rf"stage {far} on .* has died \(signal 9\)"):
            received.result()
        for each in sent:
            with pytest.raises((PeerLost, HandoverFailed), match=r"has died|is gone"):
                each.result()
        received, sent = handed(engine, [new] * 2, "staged")
        assert [each.result() for each in (received, *sent)] == [engine.weight_version] * 3
        assert ask(engine) == other, "healed"
        pids = pids_of(engine)

        def breaking():
            for count, item in enumerate(new.items()):
                if count == 3:
                    nodes.remove_node(nodes.second, allow_graceful=False)
                    gone(pids[far : far + 1])
                yield item

        begin = time.monotonic()
        specs = {name: (tuple(value.shape), value.dtype) for name, value in new.items()}
        with pytest.raises(StageDied, match=rf"stage {far} on .* has died \(its node, .* is gone|nothing comes from"):
            engine.update_weights(breaking(), specs=specs, numerics=engine.numerics())
        assert time.monotonic() - begin < limits.SILENT + 10
        gone(pids)
        with pytest.raises((ValueError, WeightsTorn), match=r"room for 0, expected 1|update them again"):
            engine.generate(PROMPTS[:1], LONG)
        nodes.second = nodes.add_node(**nodes.spare)
        engine.update_weights(new, numerics=engine.numerics())
        assert ask(engine) == other
