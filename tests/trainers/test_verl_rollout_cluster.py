"""The rollout on a local Ray cluster, by verl's own LLMServerManager, clients and CheckpointEngineManager, without a
trainer: hybrid replicas of a group of two ranks, and a standalone one beside them. One story, told in order."""

import asyncio
import gc
import importlib

import pytest
import torch

from vexact_engine import Engine, EngineConfig, SamplingParams

from .pace import drawn_by, slow_server
from .rollout_trainer import rollout_config, weights

PROMPT = [5, 6, 7, 8]
VERLS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
VERLS["ignore_eos"] = True
ENGINE = "actor_rollout_ref.rollout.checkpoint_engine"


def whole_answer(path, seed, length=16, prompt=PROMPT, sampling_seed=3):
    """(token_ids, log_probs) of an engine with the weights that trainers of `seed` have."""
    config = EngineConfig(num_pages=64, show_progress=False)
    with Engine.from_pretrained(weights(path, seed, torch.bfloat16), config=config) as engine:
        params = SamplingParams(max_new_tokens=length, seed=sampling_seed, ignore_eos=True)
        (done,) = engine.generate([prompt], params)
    return done.token_ids, done.logprobs


class Cluster:
    def __init__(self, path):
        import ray
        from verl.checkpoint_engine import CheckpointEngineManager
        from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.rollout.llm_server import LLMServerManager

        importlib.import_module("vexact_engine.verl.register")

        from .rollout_trainer import Trainer

        backend = [f"{ENGINE}.backend=vexact", f"{ENGINE}.custom_backend_module=vexact_engine.verl.checkpoint"]
        backend += [f"+{ENGINE}.engine_kwargs.vexact.timeout=30"]
        self.path, self.ray = path, ray
        self.config = rollout_config(path, *backend)
        self.rollout, self.model = self.config.actor_rollout_ref.rollout, self.config.actor_rollout_ref.model
        trainer = RayClassWithInitArgs(ray.remote(Trainer), self.rollout, self.model)
        pool = RayResourcePool([2], use_gpu=True, max_colocate_count=2)
        self.trainers = RayWorkerGroup(pool, trainer, device_name="cpu")
        self.hybrid = LLMServerManager.create(self.config, worker_group=self.trainers)
        naive = omega_conf_to_dataclass(self.rollout.checkpoint_engine)
        naive.backend = "naive"
        self.weights = CheckpointEngineManager(naive, self.trainers, self.hybrid.get_replicas())

    def generate(self, count=1, client=None, **params):
        client = client or self.hybrid.get_client()

        async def go():
            asked = {**VERLS, **params}
            calls = [client.generate(f"r{i}", prompt_ids=PROMPT, sampling_params=asked) for i in range(count)]
            return await asyncio.gather(*calls)

        return asyncio.run(go())

    def answers(self, server, **params):
        """One call to one server."""
        asked = {**VERLS, "seed": 3, **params}
        found = self.ray.get(server.generate.remote(prompt_ids=PROMPT, sampling_params=asked, request_id="one"))
        return found.token_ids, found.log_probs


@pytest.fixture(scope="module")
def cluster(ray_cluster, models):
    return Cluster(models("qwen3"))


def test_weights_arrive_and_tokens_are_the_engines(cluster):
    cluster.weights.sleep_replicas()
    cluster.weights.update_weights(3)
    servers = [replica.server_handle for replica in cluster.hybrid.get_replicas()]
    expected = whole_answer(cluster.path, 3)
    assert [cluster.answers(server) for server in servers] == [expected] * 2
    outputs = cluster.generate(6)
    assert len({tuple(output.token_ids) for output in outputs}) == 6, "no seed: samples differ"
    for output in outputs:
        assert output.stop_reason == "completed" and output.num_preempted == 0
        assert output.extra_fields["global_steps"] == output.extra_fields["min_global_steps"] == 3
    assert len({tuple(output.token_ids) for output in cluster.generate(3, seed=5)}) == 1
    assert len(set(cluster.hybrid.get_addresses())) == 2
    frozen = [server.__ray_call__.remote(lambda self: gc.get_freeze_count()) for server in servers]
    assert min(cluster.ray.get(frozen)) > 0, "what an engine is made of is looked through in the midst of calls"


def test_a_bad_call_is_an_error_of_that_call(cluster):
    with pytest.raises(cluster.ray.exceptions.RayTaskError, match=r"repetition_penalty: got 1\.5") as error:
        cluster.generate(repetition_penalty=1.5)
    assert isinstance(error.value, ValueError)
    assert cluster.generate()[0].stop_reason == "completed"


def test_calls_in_flight_go_on_after_an_abort(cluster):
    """FullyAsyncLLMServerClient makes one answer of what came before and after, over an update of the weights."""
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient

    client, replicas = cluster.hybrid.get_client(FullyAsyncLLMServerClient), cluster.hybrid.get_replicas()
    length, count, servers = 220, 4, [replica.server_handle for replica in replicas]

    async def go():
        asked = {**VERLS, "max_tokens": length, "seed": 3}
        await asyncio.gather(*(server.__ray_call__.remote(slow_server) for server in servers))
        calls = [
            asyncio.ensure_future(client.generate(f"a{i}", prompt_ids=PROMPT, sampling_params=asked))
            for i in range(count)
        ]
        while not any(await asyncio.gather(*(server.__ray_call__.remote(drawn_by) for server in servers))):
            assert not any(call.done() for call in calls)
        counts = await asyncio.gather(*(replica.abort_all_requests() for replica in replicas))
        assert sum(found["aborted_count"] for found in counts) > 0
        assert all(len(found["request_ids"]) == found["aborted_count"] for found in counts)
        await asyncio.gather(*(server.__ray_call__.remote(slow_server, 0) for server in servers))
        await asyncio.gather(*(replica.sleep() for replica in replicas))
        await asyncio.to_thread(cluster.weights.update_weights, 4)
        assert not any(call.done() for call in calls)
        await asyncio.gather(*(replica.resume_generation() for replica in replicas))
        return await asyncio.gather(*calls)

    outputs = asyncio.run(go())
    before, after = (whole_answer(cluster.path, seed, length)[0] for seed in (3, 4))
    for output in outputs:
        assert len(output.token_ids) == len(output.log_probs) == length
        assert (output.extra_fields["max_global_steps"], output.stop_reason) == (4, "length")
        same = next((i for i, (a, b) in enumerate(zip(output.token_ids, before)) if a != b), length)
        assert same or output.token_ids == after, "what it had is of the old weights, or it had nothing"
    assert any(output.extra_fields["min_global_steps"] == 3 for output in outputs)


def test_late_calls(cluster):
    replicas = cluster.hybrid.get_replicas()
    client = cluster.hybrid.get_client()

    async def go():
        await asyncio.gather(*(replica.abort_all_requests() for replica in replicas))
        late = asyncio.ensure_future(client.generate("late", prompt_ids=PROMPT, sampling_params=VERLS))
        await asyncio.sleep(0.3)
        assert not late.done()
        await asyncio.gather(*(replica.resume_generation() for replica in replicas))
        waited = await late
        await asyncio.gather(*(replica.abort_all_requests(reject_request=True) for replica in replicas))
        away = await client.generate("away", prompt_ids=PROMPT, sampling_params=VERLS)
        await asyncio.gather(*(replica.resume_generation() for replica in replicas))
        return waited, away

    waited, away = asyncio.run(go())
    assert (waited.stop_reason, len(waited.token_ids)) == ("completed", 16)
    assert (away.stop_reason, away.token_ids) == ("aborted", [])


@pytest.mark.parametrize("how, said", [("shape", "expected"), ("raise", "a rank has failed")])
def test_a_failed_update_is_healed_by_the_next(cluster, how, said):
    """Every rank takes every item, lest the others wait in a collective; requests say why there are no weights."""
    cluster.trainers.set_spoil(how)
    cluster.weights.sleep_replicas()
    with pytest.raises(cluster.ray.exceptions.RayTaskError, match=said):
        cluster.weights.update_weights(5)
    whole = len(weights(cluster.path, 5).state_dict())
    assert cluster.trainers.get_taken() == [whole if how == "shape" else 4] * 2
    cluster.weights.wake_up_replicas()
    with pytest.raises(cluster.ray.exceptions.RayTaskError, match="update them"):
        cluster.generate()
    cluster.trainers.set_spoil(None)
    cluster.weights.sleep_replicas()
    cluster.weights.update_weights(5)
    servers = [replica.server_handle for replica in cluster.hybrid.get_replicas()]
    assert [cluster.answers(server) for server in servers] == [whole_answer(cluster.path, 5)] * 2


def test_standalone(cluster):
    """Weights by our checkpoint engine, from rank 0 of the trainers, while calls are in flight."""
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerManager

    config = rollout_config(
        cluster.path,
        "actor_rollout_ref.rollout.nnodes=1",
        "actor_rollout_ref.rollout.n_gpus_per_node=1",
        *(
            f"{ENGINE}.{name}={getattr(cluster.rollout.checkpoint_engine, name)}"
            for name in ("backend", "custom_backend_module")
        ),
    )
    manager = LLMServerManager.create(config, start_rank=2)
    engine = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    updates = CheckpointEngineManager(engine, cluster.trainers, manager.get_replicas())
    (replica,) = manager.get_replicas()
    assert replica.replica_rank == 2 and len(replica.workers) == 1
    with pytest.raises(cluster.ray.exceptions.RayTaskError, match=r"rollout\.load_format=auto"):
        cluster.answers(replica.server_handle)
    for steps in (7, 8):
        updates.update_weights(steps)
        assert cluster.answers(replica.server_handle) == whole_answer(cluster.path, steps)
    client = manager.get_client(FullyAsyncLLMServerClient)

    async def go():
        asked = {**VERLS, "max_tokens": 200, "seed": 3}
        call = asyncio.ensure_future(client.generate("a", prompt_ids=PROMPT, sampling_params=asked))
        await asyncio.sleep(0.2)
        await asyncio.to_thread(updates.update_weights, 9)
        return await call

    output = asyncio.run(go())
    assert len(output.token_ids) == len(output.log_probs) == 200
    cluster.trainers.set_spoil("raise")
    with pytest.raises(cluster.ray.exceptions.RayTaskError, match="a rank has failed"):
        updates.update_weights(10)
    cluster.trainers.set_spoil(None)
    updates.update_weights(11)
    assert cluster.answers(replica.server_handle) == whole_answer(cluster.path, 11)


def test_a_teacher_on_the_trainers_gpus(cluster):
    """Colocated: it sleeps with its weights, and answers what a teacher is asked for."""
    from verl.workers.rollout.replica import RolloutMode

    from vexact_engine.verl.replica import Replica

    config = rollout_config(cluster.path, "actor_rollout_ref.rollout.load_format=auto")
    teacher = Replica(
        0, config.actor_rollout_ref.rollout, config.actor_rollout_ref.model, is_teacher_model=True, name_suffix="math"
    )
    assert teacher.max_concurrency >= 1000 and teacher.get_ray_class_with_init_args() is not None
    teacher.rollout_mode, teacher.workers = RolloutMode.COLOCATED, cluster.trainers.workers[:1]
    asyncio.run(teacher.launch_servers())
    server = cluster.ray.get_actor("vexact_server_teacher_0_0_math")
    before = cluster.answers(server)
    for control in (teacher.release_kv_cache, teacher.resume_kv_cache, teacher.sleep, teacher.wake_up):
        asyncio.run(control())
    assert cluster.answers(server) == before
    asked = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    found = cluster.ray.get(server.generate.remote(prompt_ids=PROMPT, sampling_params=asked, request_id="t"))
    assert found.extra_fields["prompt_ids"] == [[6], [7], [8], [0]]
    cluster.ray.kill(server)


def test_a_server_that_is_killed_and_its_successor(cluster):
    replica = cluster.hybrid.get_replicas()[0]
    cluster.ray.kill(replica.server_handle)
    with pytest.raises(cluster.ray.exceptions.RayActorError):
        cluster.answers(replica.server_handle)
    with pytest.raises((cluster.ray.exceptions.RayTaskError, ValueError), match="vexact_server_0_0"):
        cluster.weights.update_weights(14)
    asyncio.run(replica.launch_servers())
    cluster.weights.update_weights(15)
    servers = [replica.server_handle for replica in cluster.hybrid.get_replicas()]
    assert [cluster.answers(server) for server in servers] == [whole_answer(cluster.path, 15)] * 2


def test_a_trainer_that_is_killed_and_its_successor(cluster):
    """The last of the story: the group of trainers is not whole any more."""
    from .rollout_trainer import Lone

    first = cluster.hybrid.get_replicas()[0]
    cluster.trainers.set_spoil("die")
    with pytest.raises(cluster.ray.exceptions.RayActorError):
        cluster.weights.update_weights(16)
    with pytest.raises(cluster.ray.exceptions.RayTaskError, match="update them"):
        cluster.answers(first.server_handle)
    successor = cluster.ray.remote(Lone).remote(cluster.rollout, cluster.model, 0)
    cluster.ray.get(successor.update.remote(17))
    assert cluster.answers(first.server_handle) == whole_answer(cluster.path, 17)
