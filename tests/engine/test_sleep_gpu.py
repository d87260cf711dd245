"""A GPU has its memory back while an engine sleeps: by emptying storages, and by torch_memory_saver where it can be."""

import functools
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import bits, build, check_idle, prompts

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.parallel.replicas import Replicas
from vexact_engine.runner import saver
from vexact_engine.runner.sleep import TAGS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
LARGE = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, max_position_embeddings=4096)
PROMPTS = prompts(3, longest=20)
PARAMS = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)


ALONE = "VEXACT_TEST_ALONE"


def in_a_process_of_its_own(test):
    """The allocator returns whole segments, and what ran in this process before may hold a part of one that weights
    would lie in."""

    @functools.wraps(test)
    def run(*args, **options):
        if os.environ.get(ALONE):
            return test(*args, **options)
        node = os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0]
        command = [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "--tb=short", node]
        root = Path(__file__).parents[2]
        env = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")} | {ALONE: "1"}
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-5000:] + done.stderr[-2000:]

    return run


@pytest.fixture(params=["storages", "memory_saver"])
def backend(request):
    why = saver.unusable(torch.device("cuda")) if request.param == "memory_saver" else ""
    if why:
        pytest.skip(why)
    return request.param


@pytest.fixture
def saved():
    if why := saver.unusable(torch.device("cuda")):
        pytest.skip(why)
    return replace(CONFIG, sleep_backend="memory_saver")


def ask(engine):
    return [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


def sizes(engine):
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in engine.model.parameters()}.values())


def held(engine=None):
    """By this process, for others may use the same GPU; of what is paused torch does not know that."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    regions = engine._worker._runner.regions.values() if engine else ()
    return torch.cuda.memory_reserved() - sum(region.nbytes for region in regions if region.paused)


def free():
    return torch.cuda.mem_get_info()[0]


def graphs(engine):
    runner = engine._worker._runner
    ladders = runner.graphs.decode, runner.graphs.mixed, runner.graphs.heads
    return [{size: id(ladder.fit(size).replay) for size in ladder.sizes} for ladder in ladders]


def addresses(engine):
    caches = [cache for part in engine._worker._runner.buffers.caches for cache in part]
    return [t.data_ptr() for t in [*engine.model.parameters(), *engine.model.buffers(), *caches]]


@pytest.mark.parametrize("level", [1, 2])
@in_a_process_of_its_own
def test_a_gpu_has_its_memory_back(level, backend):
    model = build("Qwen3", device="cuda", **LARGE)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    config = replace(CONFIG, num_pages=16384, page_size=16, sleep_backend=backend)
    with Engine.from_pretrained(model, device="cuda", config=config) as engine:
        assert engine.sleep_backend.startswith(backend)
        expected = ask(engine)
        before = held(engine)
        weights, runner = sizes(engine), engine._worker._runner
        recorded, places = graphs(engine), addresses(engine)
        assert recorded[0]
        given = engine.sleep(level)
        assert bool(runner.graphs.decode.sizes) == (backend == "memory_saver") and given["graphs"] > 0
        left = held(engine)
        cache = 16384 * 16 * 2 * 4 * 2 * 16 * 2
        assert given["weights"] > 0.95 * weights and given["kv_cache"] > 0.95 * cache
        assert before - left > 0.9 * (weights + cache)
        engine.wake_up(["weights"])
        if level == 2:
            assert not any(p.any() for p in model.parameters())
            engine.update_weights(state, numerics=engine.numerics())
        engine.wake_up(["kv_cache"])
        if backend == "memory_saver":
            assert graphs(engine) == recorded and addresses(engine) == places
        assert [list(found) for found in graphs(engine)] == [list(found) for found in recorded]
        assert ask(engine) == expected
        gained = []
        for _ in range(10):  # and nothing is lost on the way
            had = free()
            engine.sleep()
            gained.append(free() - had)
            engine.wake_up()
        assert held(engine) - before < 64 << 20
        assert max(gained) > 0.9 * (weights + cache)  # of the device itself, where others may take some in that moment
        assert ask(engine) == expected
        check_idle(engine)


def test_where_a_gpu_has_no_room_the_engine_sleeps_on(backend, monkeypatch):
    """This process may take no more than it has: others on the same GPU go on. The memory saver asks the device before
    its library does, and is told that."""
    model, config = build("Qwen3", device="cuda", **LARGE), replace(CONFIG, sleep_backend=backend)
    with Engine.from_pretrained(model, device="cuda", config=config) as engine:
        expected, total = ask(engine), torch.cuda.get_device_properties(0).total_memory
        engine.sleep()
        if backend == "storages":
            torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
        else:
            monkeypatch.setattr(saver._Cuda, "free", lambda self: 48 << 20)
        try:
            with pytest.raises(MemoryError, match="wake_up: no memory for weights"):
                engine.wake_up()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
            monkeypatch.undo()
        assert engine.asleep == TAGS
        engine.wake_up()
        assert ask(engine) == expected


# What the memory saver can do on top


def test_graphs_stay_awake_while_the_rest_sleeps(saved):
    with Engine.from_pretrained(build("Qwen3", device="cuda"), device="cuda", config=saved) as engine:
        expected, recorded = ask(engine), graphs(engine)
        for tags in (["weights", "kv_cache"], ["kv_cache"], ["weights"], ["graphs"], ["graphs", "kv_cache"]):
            assert engine.sleep(tags=tags).keys() == set(tags) and engine.asleep == tuple(t for t in TAGS if t in tags)
            engine.wake_up()
            assert graphs(engine) == recorded and recorded[0]
            assert ask(engine) == expected
        check_idle(engine)


def test_weights_that_somebody_puts_there_sleep_too(saved):
    options = dict(device="cuda", config=saved)
    with Engine.from_pretrained(build("Qwen3", seed=1, device="cuda"), **options) as engine:
        new = ask(engine)
    with Engine.from_pretrained(build("Qwen3", device="cuda"), **options) as engine:
        assert ask(engine) != new
        for mine, theirs in zip(engine.model.parameters(), build("Qwen3", seed=1, device="cuda").parameters()):
            mine.data = theirs.data
        for level in (1, 1):
            assert ask(engine) == new
            engine.sleep(level)
            engine.wake_up()
        assert ask(engine) == new
        for mine, theirs in zip(engine.model.parameters(), build("Qwen3", device="cuda").parameters()):
            mine.data = theirs.data
        engine.sleep(tags=["kv_cache"])  # before it has looked
        engine.wake_up()
        assert ask(engine) != new


def test_engines_that_are_closed_leave_nothing_behind(saved):
    """Asleep or not; the model comes back with its weights, in memory that goes with it."""
    config, left = replace(saved, num_pages=4096, page_size=16), []
    for asleep in (False, True, False, True):
        model = build("Qwen3", device="cuda", **LARGE)
        before = {name: value.cpu() for name, value in model.state_dict().items()}
        with Engine.from_pretrained(model, device="cuda", config=config) as engine:
            ask(engine)
            if asleep:
                engine.sleep()
        assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
        del engine, model
        left.append(held())
    assert max(left[1:]) - left[0] < 64 << 20


def test_two_engines_sleep_apart(saved):
    models = [build("Qwen3", seed=seed, device="cuda") for seed in (0, 1)]
    with (
        Engine.from_pretrained(models[0], device="cuda", config=saved) as one,
        Engine.from_pretrained(models[1], device="cuda", config=saved) as other,
    ):
        expected = ask(one), ask(other)
        one.sleep()
        assert ask(other) == expected[1]
        other.sleep(level=1)
        one.wake_up()
        assert ask(one) == expected[0]
        other.wake_up()
        assert (ask(one), ask(other)) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_weights_come_from_another_gpu(saved):
    """What they are written into is mapped for the engine's own alone."""
    with Engine.from_pretrained(build("Qwen3", seed=1, device="cuda"), device="cuda", config=saved) as engine:
        new = ask(engine)
    with Engine.from_pretrained(build("Qwen3", device="cuda"), device="cuda", config=saved) as engine:
        state = build("Qwen3", seed=1, device="cuda:1").state_dict()
        assert ask(engine) != new
        engine.sleep(level=2)
        engine.wake_up(["weights"])
        engine.update_weights(state, numerics=engine.numerics())
        engine.wake_up()
        assert ask(engine) == new
        engine.update_weights(iter(state.items()), specs=state, numerics=engine.numerics())
        assert ask(engine) == new
        there = {name: value.to("cuda:1") for name, value in engine.model.state_dict().items()}
        assert all(torch.equal(there[name], value) for name, value in state.items())


@pytest.fixture
def startable():
    """Wherever this process was started, its children can be started with it."""
    if not saver.environment("memory_saver", "cuda") and (why := saver.unusable(torch.device("cuda"))):
        pytest.skip(why)


def test_a_replica_is_started_with_it(tmp_path, startable):
    build("Qwen3").save_pretrained(tmp_path)
    config = replace(CONFIG, sleep_backend="memory_saver")
    with Replicas.from_pretrained(tmp_path, replicas=1, device="cuda", config=config) as replicas:
        assert replicas.sleep_backend.startswith("memory_saver: ")
        expected = ask(replicas)
        assert replicas.sleep()["kv_cache"] > 0
        replicas.wake_up()
        assert ask(replicas) == expected


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_stages_are_started_with_it(tmp_path, startable):
    build("Qwen3", num_hidden_layers=4).save_pretrained(tmp_path)
    state = build("Qwen3", num_hidden_layers=4).state_dict()
    config = replace(CONFIG, sleep_backend="memory_saver", pipeline_parallel_size=2)
    with Engine.from_pretrained(tmp_path, device="cuda", config=config) as engine:
        assert engine.sleep_backend.startswith("memory_saver: ")
        expected = ask(engine)
        for level, tags in ((1, TAGS), (1, ("weights", "kv_cache")), (2, TAGS)):
            given = engine.sleep(level, tags=tags)
            assert given.keys() == set(tags) and all(given.values()) and engine.asleep == tags
            engine.wake_up(["weights"])
            if level == 2:
                engine.update_weights(state, numerics=engine.numerics())
            engine.wake_up()
            assert ask(engine) == expected


def test_all_of_this_where_the_process_is_started_with_it():
    """Those above that this process skips."""
    variables = saver.environment("memory_saver", "cuda")
    if not variables:
        pytest.skip(saver.unusable(torch.device("cuda")) or "this process is one that is started with it")
    command = [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", "-n0", __file__]
    command += ["-k", "not storages and not started"]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and " passed" in done.stdout, f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}"
    assert "memory_saver" not in done.stdout.split("short test summary")[-1], done.stdout[-2000:]
