"""The rollout without a cluster: verl's registries, options, and the server's own methods on one event loop."""

import asyncio
import importlib
import inspect
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
import torch

from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation, WeightsMissing
from vexact_engine.verl.server import Server, engine_options

from .environment import environment
from .pace import slow
from .rollout_trainer import rollout_config, weights

PROMPT = [5, 6, 7, 8]
VERLS = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
VERLS["ignore_eos"] = True  # so that lengths are known


@pytest.fixture(scope="module")
def path(models):
    return models("qwen3")


def configs(path, *overrides):
    config = rollout_config(path, *overrides).actor_rollout_ref
    return config.rollout, config.model


class Running:
    """A server on an event loop of its own, as an actor has it."""

    def __init__(self, path, *overrides, mode="STANDALONE", load_format="auto"):
        from verl.workers.rollout.replica import RolloutMode

        rollout, model = configs(path, f"actor_rollout_ref.rollout.load_format={load_format}", *overrides)
        self.server = Server(rollout, model, RolloutMode[mode], 0)

    def __enter__(self):
        self.runner = asyncio.Runner()
        self.runner.run(self.server.launch_server())
        return self

    def __exit__(self, *exception):
        self.runner.close()
        self.server.http.stop()
        self.server._receiver.close()
        self.server.engine.close()

    def call(self, coroutine):
        return self.runner.run(coroutine)

    def generate(self, prompt=PROMPT, request_id="r", **params):
        return self.call(self.server.generate(prompt, {**VERLS, **params}, request_id))


@pytest.fixture(scope="module")
def running(path):
    with Running(path) as found:
        yield found


def test_the_registries_know_us(path):
    from verl.workers.rollout.base import get_rollout_class
    from verl.workers.rollout.replica import get_rollout_replica_class

    for _ in range(2):  # verl's plugins, and its external modules
        importlib.reload(importlib.import_module("vexact_engine.verl.register"))
    assert get_rollout_class("vexact", "async").__module__ == "vexact_engine.verl.adapter"
    assert get_rollout_replica_class("vexact").__module__ == "vexact_engine.verl.replica"


def test_as_an_entry_point(tmp_path):
    """Installed, no variable is needed; with the variable too nothing is another."""
    found = tmp_path / "vexact-0.dist-info"
    found.mkdir()
    (found / "METADATA").write_text("Metadata-Version: 2.1\nName: vexact\nVersion: 0\n")
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    if sys.version_info >= (3, 11):
        import tomllib

        points = tomllib.loads(project)["project"]["entry-points"]["verl.plugins"]
        (found / "entry_points.txt").write_text(
            "[verl.plugins]\n" + "".join(f"{name} = {module}\n" for name, module in points.items())
        )
    code = (
        "import verl; from verl.workers.rollout.replica import RolloutReplicaRegistry as r; "
        "from verl.workers.rollout.base import _ROLLOUT_REGISTRY as s; "
        "print('vexact' in r._registry, s['vexact', 'async'])"
    )
    for modules in ("", "vexact_engine.verl.register"):
        env = environment() | {"VERL_USE_EXTERNAL_MODULES": modules, "VERL_PLATFORM": ""}
        env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), env["PYTHONPATH"]])
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | env)
        assert done.stdout.split("\n")[-2] == "True vexact_engine.verl.adapter.ServerAdapter", done.stderr


SEEDS = "+actor_rollout_ref.rollout.engine_kwargs.vexact.seeds=prompt"


def test_options(path):
    from verl.utils.config import omega_conf_to_dataclass

    given = {"kv_segment": 64, "latent_attention": "true", "handover": "staged", "timeout": 3.5}
    given |= {"speculation.max_draft_tokens": 4, "speculation.sources": "[text,answers]"}
    overrides = [f"+actor_rollout_ref.rollout.engine_kwargs.vexact.{name}={value}" for name, value in given.items()]
    rollout, _ = configs(path, *STAGES, *overrides)
    options, handover = engine_options(omega_conf_to_dataclass(rollout))
    assert options == EngineConfig(
        gpu_memory_utilization=0.5,
        max_num_seqs=64,
        max_num_batched_tokens=8192,
        num_pages=256,
        kv_segment=64,
        latent_attention=True,
        pipeline_parallel_size=2,
        speculation=Speculation(max_draft_tokens=4, sources=("answers", "text")),
        show_progress=False,
    )
    assert handover == {"handover": "staged", "timeout": 3.5, "seeds": "step", "shards": "replica"}
    deterministic = "actor_rollout_ref.rollout.full_determinism=true"
    rollout, _ = configs(path, deterministic, SEEDS)
    options, handover = engine_options(omega_conf_to_dataclass(rollout))
    assert options.speculation == Speculation() and handover["seeds"] == "prompt"
    rollout, _ = configs(path, deterministic, SEEDS, "+actor_rollout_ref.rollout.engine_kwargs.vexact.speculation=null")
    assert engine_options(omega_conf_to_dataclass(rollout))[0].speculation is None


def reference(path, params, prompt=PROMPT):
    config = EngineConfig(num_pages=64, max_num_seqs=4, show_progress=False)
    with Engine.from_pretrained(path, config=config) as engine:
        return engine.generate([prompt], params)[0]


def test_tokens_and_log_probs_are_the_engines(running, path):
    given = running.generate(seed=3, temperature=0.7, top_p=0.6, top_k=40)
    asked = SamplingParams(max_new_tokens=16, seed=3, temperature=0.7, top_p=0.6, top_k=40, ignore_eos=True)
    alone = reference(path, asked)
    assert given.token_ids == alone.token_ids
    assert given.log_probs == alone.logprobs  # at 0.7, of the whole distribution
    assert given.stop_reason == "completed" and given.num_preempted == 0
    assert given.extra_fields["weight_versions"] == [0] * 16
    assert running.generate(logprobs=False).log_probs is None


def test_samples_differ_without_a_seed(running):
    assert len({tuple(running.generate().token_ids) for _ in range(6)}) == 6
    assert len({tuple(running.generate(seed=1).token_ids) for _ in range(3)}) == 1
    assert len({tuple(running.generate(temperature=0).token_ids) for _ in range(3)}) == 1


def test_lengths(running):
    long = [5] * 40  # longer than prompt_length: what is left of both
    assert len(running.generate(long).token_ids) == 8
    assert len(running.generate([5] * 60).token_ids) == 1
    assert len(running.generate(max_tokens=3).token_ids) == 3
    assert len(running.generate(max_new_tokens=5).token_ids) == 5
    assert len(running.generate([5] * 250, max_tokens=100).token_ids) == 6  # max_position_embeddings is 256
    with pytest.raises(ValueError, match="got 256 tokens, expected fewer than max_model_len, 256"):
        running.generate([5] * 256)


@pytest.mark.parametrize(
    "params, said",
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty: got 1.1, expected 1.0"),
        ({"n": 2}, "n: got 2, expected 1"),
        ({"best_of": 2}, "got best_of: there is no such parameter"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"prompt_logprobs": 1000, "max_tokens": 1}, "num_prompt_top_logprobs is 1000"),
        ({"prompt_logprobs": -1}, "num_prompt_top_logprobs is -1"),
    ],
)
def test_calls_that_are_refused(running, params, said):
    with pytest.raises(ValueError, match=said):
        running.generate(**params)
    assert len(running.generate().token_ids) == 16


def test_prompts_that_are_refused(running):
    with pytest.raises(ValueError, match="empty"):
        running.generate([])
    with pytest.raises(ValueError, match="100000"):
        running.generate([100000])
    none = "this engine's model takes none"
    for kind, said in {"image": f"images: {none}", "video": f"videos: {none}", "audio": "audio_data: got some"}.items():
        with pytest.raises(ValueError, match=said):
            running.call(running.server.generate(PROMPT, VERLS, "r", **{f"{kind}_data": [object()]}))
    assert running.call(running.server.generate(PROMPT, VERLS, "r", image_data=[])).stop_reason == "completed"
    assert not running.server._running


@pytest.mark.parametrize("k", [0, 40])
def test_what_a_teacher_asks_for(running, path, k):
    ids = list(range(20, 57))
    given = running.generate(ids, max_tokens=1, prompt_logprobs=k, detokenize=False).extra_fields
    assert len(given["prompt_ids"]) == len(given["prompt_logprobs"]) == len(ids)
    assert given["prompt_ids"][-1] == [0] * max(k, 1) and given["prompt_logprobs"][-1] == [0.0] * max(k, 1)
    alone = reference(path, SamplingParams(max_new_tokens=1, prompt_logprobs=True, num_top_logprobs=k), ids)
    if k == 0:
        assert given["prompt_ids"][:-1] == [[token] for token in ids[1:]]
        assert given["prompt_logprobs"][:-1] == [[value] for value in alone.prompt_logprobs[1:]]
        return
    for position, (tokens, values) in enumerate(zip(given["prompt_ids"][:-1], given["prompt_logprobs"][:-1])):
        assert values == sorted(values, reverse=True) and len(tokens) == k
        if ids[position + 1] in tokens:  # the other way that the engine knows it
            assert values[tokens.index(ids[position + 1])] == alone.prompt_logprobs[position + 1]
    assert any(ids[i + 1] in tokens for i, tokens in enumerate(given["prompt_ids"][:-1]))


LONG = 250  # tokens, as many as fit: far from drawn when somebody aborts after the first


async def begun(server, count, name="r{}"):
    """Calls that are being computed, slowly: each has drawn a token, and has most of its tokens before it."""
    slow(server.engine)
    asked, names = {**VERLS, "max_tokens": LONG}, [name.format(i) for i in range(count)]
    calls = [asyncio.ensure_future(server.generate(PROMPT, dict(asked), each)) for each in names]
    drawn = []
    while len(drawn) < count or not all(drawn):
        assert not any(call.done() for call in calls)
        await asyncio.sleep(0.001)
        drawn = [len(sequence.tokens) - sequence.num_prompt for sequence in list(server.engine._scheduler.running)]
    return calls


def test_aborted_calls_return_what_they_have(running):
    server = running.server

    async def go():
        calls = await begun(server, 3)
        counted = await server.abort_all_requests()
        slow(server.engine, 0)
        early = [await call for call in calls]
        late = [asyncio.ensure_future(server.generate(PROMPT, VERLS, "late")) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert not any(call.done() for call in late), "the gate is shut"
        await server.wait_for_requests_to_drain()  # nobody is in
        await server.resume_generation()
        return counted, early, [await call for call in late]

    counted, early, late = running.call(go())
    assert counted["aborted_count"] == 3 and sorted(counted["request_ids"]) == ["r0", "r1", "r2"]
    for output in early:
        assert output.stop_reason == "aborted" and 0 < len(output.token_ids) < LONG
        assert len(output.log_probs) == len(output.token_ids) == len(output.extra_fields["weight_versions"])
    assert all(output.stop_reason == "completed" and len(output.token_ids) == 16 for output in late)


def test_late_calls_are_turned_away(running):
    server = running.server

    async def go():
        await server.abort_all_requests()
        waiting = asyncio.ensure_future(server.generate(PROMPT, VERLS, "waits"))
        await asyncio.sleep(0.02)
        await server.abort_all_requests(reject_request=True)
        found = [await waiting, await server.generate(PROMPT, VERLS, "late")]
        await server.resume_generation()
        return found, await server.generate(PROMPT, VERLS, "later")

    away, later = running.call(go())
    assert [(output.token_ids, output.stop_reason) for output in away] == [([], "aborted")] * 2
    assert all("global_steps" in output.extra_fields for output in away)
    assert later.stop_reason == "completed"


def test_one_call_is_aborted(running):
    server = running.server

    async def go():
        calls = await begun(server, 3)
        said = await server.abort_request("r1"), await server.abort_request("nobody")
        slow(server.engine, 0)
        return said, [await call for call in calls]

    said, outputs = running.call(go())
    assert [answer["aborted"] for answer in said] == [True, False]
    assert [output.stop_reason for output in outputs] == ["completed", "aborted", "completed"]


def request_id_of_verls_loop() -> str:
    """What verl's loops call every request with full_determinism: their priority is 0, for nothing in the trainer's
    batches says another."""
    from verl.experimental.agent_loop.tool_agent_loop import ToolAgentLoop
    from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ

    assert "priority" not in inspect.getsource(inspect.getmodule(AgentLoopManagerTQ))
    priority = inspect.signature(ToolAgentLoop.run).parameters["priority"].default
    return ToolAgentLoop._make_request_id(priority, full_determinism=True)


def test_full_determinism(path):
    """As verl's loop asks: n calls of one id and one prompt have n answers, the same in every run whatever else comes
    between; other steps have others; and what goes on with an aborted call is drawn as if it had not been."""
    on, name, n = "actor_rollout_ref.rollout.full_determinism=true", request_id_of_verls_loop(), 4
    prompts = [PROMPT, [9, 8, 7], PROMPT[:2]]
    orders = [[0, 1, 2] * n, [2] * n + [0] * n + [1] * n, [0, 1, 2] * n]
    found = []
    for seed, order in zip((42, 42, 43), orders):
        with Running(path, on, f"actor_rollout_ref.rollout.seed={seed}") as running:
            server, asked = running.server, {**VERLS, "max_tokens": LONG}

            def answers(order=order, server=server, running=running, asked=asked):
                async def go():
                    calls = [asyncio.ensure_future(server.generate(prompts[i], dict(asked), name)) for i in order]
                    return [(i, tuple((await call).token_ids)) for i, call in zip(order, calls)]

                return sorted(running.call(go()))

            first = answers()
            assert len(set(first)) == len(order)
            running.call(server.set_global_steps(1))
            second = answers()
            assert not set(first) & set(second)
            found.append((first, second))
    assert found[0] == found[1] and not set(found[0][0]) & set(found[2][0])
    with Running(path, on, "actor_rollout_ref.rollout.seed=42") as running:
        server = running.server

        async def broken_off():
            calls = await begun(server, n, name)
            await server.abort_all_requests()
            slow(server.engine, 0)
            had = [(await call).token_ids for call in calls]
            await server.resume_generation()
            rest = [
                server.generate(PROMPT + tokens, {**asked, "max_tokens": LONG - len(tokens)}, name) for tokens in had
            ]
            return [(0, tuple(tokens + (await later).token_ids)) for tokens, later in zip(had, rest)]

        pieces = sorted(running.call(broken_off()))
    assert pieces == [answer for answer in found[0][0] if answer[0] == 0]


def test_seeds_of_prompts_and_the_last_epochs_answers(path):
    """A step later the same calls have the same noise, and what was answered is drafted; other answers have other
    seeds."""
    on, name = "actor_rollout_ref.rollout.full_determinism=true", request_id_of_verls_loop()
    found = []
    for overrides in ((on, SEEDS), (on, SEEDS, "+actor_rollout_ref.rollout.engine_kwargs.vexact.speculation=null")):
        with Running(path, *overrides) as running:
            server = running.server

            def answers(server=server, running=running):
                async def go():
                    calls = [server.generate(PROMPT, {**VERLS, "max_tokens": LONG}, name) for _ in range(3)]
                    return [tuple(done.token_ids) for done in await asyncio.gather(*calls)]

                return sorted(running.call(go()))

            first = answers()
            accepted = server.engine.stats.accepted_tokens
            running.call(server.set_global_steps(1))
            assert answers() == first and len(set(first)) == 3
            found.append((first, server.engine.stats.accepted_tokens - accepted))
    assert found[0][0] == found[1][0] and found[0][1] > 0 == found[1][1]


def test_no_answer_from_weights_that_never_came(path):
    with Running(path, load_format="dummy") as running:
        with pytest.raises(WeightsMissing, match=r"rollout\.load_format=auto"):
            running.generate()
        new = weights(path, 5, torch.bfloat16)
        running.server.engine.update_weights(new.state_dict(), numerics=running.server.engine.numerics())
        running.call(running.server.set_global_steps(9))
        given = running.generate(seed=3)
        assert given.extra_fields["global_steps"] == 9
    with Engine.from_pretrained(new, config=EngineConfig(num_pages=64, show_progress=False)) as engine:
        alone = engine.generate([PROMPT], SamplingParams(max_new_tokens=16, seed=3, ignore_eos=True))[0]
    assert (given.token_ids, given.log_probs) == (alone.token_ids, alone.logprobs)


def test_a_model_with_buffers_is_read_whatever_the_format(models):
    """A router's e_score_correction_bias is the checkpoint's before any update."""
    from transformers import AutoModelForCausalLM

    path = models("deepseek_v3")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    with Running(path, load_format="dummy") as running:
        held = running.server.engine.model.state_dict()[name]
        assert torch.equal(held, AutoModelForCausalLM.from_pretrained(path).state_dict()[name].to(held.dtype))
        assert running.generate().stop_reason == "completed"


def test_a_config_that_the_engine_would_not_see(path):
    other = "+actor_rollout_ref.model.override_config.num_hidden_layers=1"
    said = r"num_hidden_layers: got 1, but .*config\.json has 2"
    for given in other, other.replace("_config.", "_config.model_config."):  # verl reads either
        with pytest.raises(ValueError, match=said), Running(path, given):
            pass
    with Running(path, other, load_format="dummy") as running:
        assert running.server.engine.model.config.num_hidden_layers == 1


@pytest.mark.parametrize("mode", ["HYBRID", "COLOCATED", "STANDALONE"])
def test_memory(path, mode):
    """Who sleeps, how deep, and what requests make of it."""
    with Running(path, mode=mode) as running:
        server, before = running.server, running.generate(seed=3)

        async def go():
            await server.release_kv_cache()
            held = server.engine.asleep
            await server.resume_kv_cache()
            await server.sleep()
            slept = server.engine.asleep
            waits = asyncio.ensure_future(server.generate(PROMPT, {**VERLS, "seed": 3}, "waits"))
            early = bool((await asyncio.wait([waits], timeout=60 if mode == "STANDALONE" else 0.05))[0])
            await server.wait_for_requests_to_drain()  # nothing is computed: there is nothing to wait for
            if mode == "HYBRID":
                await server.wake_up(tags=["weights"])
                new = weights(path, 5, torch.bfloat16).state_dict()
                await asyncio.to_thread(server.engine.update_weights, new, numerics=server.engine.numerics())
                await server.set_global_steps(7)
                await server.wake_up(tags=["kv_cache"])
            else:
                await server.wake_up()
            await server.clear_kv_cache()
            return held, slept, early, await waits

        held, slept, early, after = running.call(go())
        assert ("kv_cache" in held) == (mode != "COLOCATED") and "weights" not in held
        assert slept == (() if mode == "STANDALONE" else ("weights", "kv_cache", "graphs"))
        assert early == (mode == "STANDALONE")
        assert (after.token_ids == before.token_ids) == (mode != "HYBRID")
        assert after.extra_fields["global_steps"] == (7 if mode == "HYBRID" else None)


def test_nobody_sleeps_without_free_cache_engine(path):
    with Running(path, "actor_rollout_ref.rollout.free_cache_engine=false", mode="HYBRID") as running:
        running.call(running.server.sleep())
        running.call(running.server.release_kv_cache())
        assert running.server.engine.asleep == ()


STAGES = ["actor_rollout_ref.rollout.pipeline_model_parallel_size=2"]
RANKS = ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"]


@pytest.mark.parametrize("parallel", [STAGES, RANKS], ids=["stages", "ranks"])
def test_stages_and_ranks(path, parallel):
    """Two processes hold half the layers, or rows, each: the same answers, they sleep, and an update comes to both."""
    from vexact_engine import WeightSender

    params = SamplingParams(max_new_tokens=16, seed=3, ignore_eos=True)
    with Running(path, *parallel, mode="HYBRID", load_format="dummy") as running:
        server = running.server
        first, alone = running.generate(seed=3), reference(path, params)
        assert (first.token_ids, first.log_probs) == (alone.token_ids, alone.logprobs)
        new = weights(path, 5)

        async def go():
            await server.sleep()
            assert server.engine.asleep == ("weights", "kv_cache", "graphs")
            await server.wake_up(tags=["weights"])
            received = asyncio.ensure_future(server.receive_weights())
            address = await server.get_weights_address()
            with WeightSender(address, numerics=server.engine.numerics(), bucket_bytes=1 << 16) as sender:
                await asyncio.to_thread(sender.send, new.state_dict())
                await received
            await server.wake_up(tags=["kv_cache"])

        running.call(go())
        found = running.generate(seed=3)
    config = EngineConfig(num_pages=64, show_progress=False)
    with Engine.from_pretrained(weights(path, 5, torch.bfloat16), config=config) as engine:
        alone = engine.generate([PROMPT], params)[0]
    assert (found.token_ids, found.log_probs) == (alone.token_ids, alone.logprobs)


def test_profiles(path, tmp_path):
    on = {"enable": "true", "tool": "torch", "ranks": "[0]", "save_path": tmp_path}
    with Running(
        path, *(f"actor_rollout_ref.rollout.profiler.{name}={value}" for name, value in on.items())
    ) as running:
        running.call(running.server.start_profile(role="rollout", profile_step="1"))
        running.generate()
        running.call(running.server.stop_profile())
    assert [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size]


def adapter_of(path, monkeypatch, rank, replica_rank=-1, *overrides):
    from verl.utils.config import omega_conf_to_dataclass

    from vexact_engine.verl.adapter import ServerAdapter

    monkeypatch.setenv("RANK", str(rank))
    rollout, model = configs(path, *overrides)
    return ServerAdapter(omega_conf_to_dataclass(rollout), model, None, replica_rank=replica_rank)


def test_an_adapter_knows_its_place(path, monkeypatch):
    for parallel in (STAGES, RANKS):
        found = [adapter_of(path, monkeypatch, rank, -1, *parallel) for rank in range(4)]
        assert [(a.replica_rank, a.is_leader_rank) for a in found] == [(0, True), (0, False), (1, True), (1, False)]
    assert adapter_of(path, monkeypatch, 0, 7).replica_rank == 7  # as CheckpointEngineWorker says


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_what_an_adapter_takes_and_refuses(path, monkeypatch, kind):
    """A rank that does not lead takes every item, of both kinds of iterators; a refusal comes before the first."""
    taken = []

    def items():
        for name in ("a", "b", "c"):
            taken.append(name)
            yield name, torch.zeros(1)

    async def later():
        for item in items():
            yield item

    make = items if kind == "sync" else later
    follower = adapter_of(path, monkeypatch, 1, -1, *STAGES)
    asyncio.run(follower.update_weights(make(), global_steps=3, peft_config=None, base_sync_done=True))
    assert taken == ["a", "b", "c"]
    for told, said in (
        ({"wire_format": "delta_flush"}, "delta_flush"),
        ({"peft_config": {"r": 8}}, "lora_rank: got adapters of verl's own actor, expected 0"),
    ):
        with pytest.raises(NotImplementedError, match=said):
            asyncio.run(follower.update_weights(make(), **told))
    assert taken == ["a", "b", "c"]


def test_an_actor_that_nobody_registered_is_refused(path, monkeypatch):
    """The environment asks for the aligned actor, and no external_lib names it: verl has taken its own."""
    follower = adapter_of(path, monkeypatch, 1, -1, *STAGES)
    monkeypatch.setenv("VERL_ENGINE_VENDOR", "vexact")
    monkeypatch.delitem(sys.modules, "vexact_engine.verl.actor", raising=False)
    left = iter([("a", torch.zeros(1)), ("b", torch.zeros(1))])
    with pytest.raises(RuntimeError, match="external_lib: expected vexact_engine"):
        asyncio.run(follower.update_weights(left, global_steps=3))
    assert next(left, None) is None, "each item is a collective"
    monkeypatch.setitem(sys.modules, "vexact_engine.verl.actor", None)
    asyncio.run(follower.update_weights(iter([("a", torch.zeros(1))]), global_steps=3))


def test_the_trainers_options_are_in_its_fingerprint(path, monkeypatch):
    """As model.fused_kernel_options has them, not as the rollout's own: the server compares them with those."""
    import ray

    override = "+actor_rollout_ref.model.fused_kernel_options.vexact.kv_segment=64"
    monkeypatch.setattr(ray, "get_actor", None)  # nobody asks for a server here
    adapter = adapter_of(path, monkeypatch, 0, -1, override)
    sender = adapter._sender_to("ipc:///tmp/vexact-none.sock")
    assert sender.numerics["options"] == {"kv_segment": 64}
    assert adapter._sender_to("ipc:///tmp/vexact-none.sock") is sender
    assert adapter._sender_to("ipc:///tmp/vexact-other.sock") is not sender


@pytest.mark.parametrize("option, said", [("handover=later", "mode: got 'later'"), ("timeout=0", "timeout: got 0")])
def test_a_handover_that_is_none(path, option, said):
    with (
        pytest.raises(ValueError, match=said),
        Running(path, f"+actor_rollout_ref.rollout.engine_kwargs.vexact.{option}"),
    ):
        pass


@pytest.mark.parametrize("name", ["adapter", "replica", "server", "checkpoint"])
def test_another_verl_is_one_error(name, monkeypatch):
    """Before anything of it is imported, whichever module a Ray worker begins with."""
    module, real = importlib.import_module(f"vexact_engine.verl.{name}"), metadata.version
    monkeypatch.setattr(metadata, "version", lambda name: "0.8.0" if name == "verl" else real(name))
    with pytest.raises(RuntimeError, match=r"verl: got 0.8.0, expected 0.9.1.*pip install --no-deps verl==0.9.1"):
        importlib.reload(module)
    code = module.__loader__.get_source(module.__name__)
    assert code.index("check_versions()\n") < code.index("from verl.")
