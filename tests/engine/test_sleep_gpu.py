"""A GPU has its memory back while an engine sleeps."""

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
from vexact_engine.runner.sleep import TAGS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
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


def ask(engine):
    return [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


def sizes(engine):
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in engine.model.parameters()}.values())


@pytest.mark.parametrize("level", [1, 2])
@in_a_process_of_its_own
def test_a_gpu_has_its_memory_back(level):
    options = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4, max_position_embeddings=4096)
    model = build("Qwen3", device="cuda", **options)
    state = {name: value.cpu() for name, value in model.state_dict().items()}
    config = replace(CONFIG, num_pages=16384, page_size=16)
    with Engine.from_pretrained(model, device="cuda", config=config) as engine:
        expected = ask(engine)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()  # by this process: others may use the same GPU
        weights, runner = sizes(engine), engine._worker._runner
        recorded = [list(ladder.sizes) for ladder in (runner._decode, runner._mixed, runner._heads)]
        assert recorded[0]
        given = engine.sleep(level)
        assert not runner._decode.sizes and given["graphs"] > 0
        left = torch.cuda.memory_reserved()
        cache = 16384 * 16 * 2 * 4 * 2 * 16 * 2
        assert given["weights"] > 0.95 * weights and given["kv_cache"] > 0.95 * cache
        assert before - left > 0.9 * (weights + cache)
        engine.wake_up(["weights"])
        if level == 2:
            engine.update_weights(state, numerics=engine.numerics())
        engine.wake_up(["kv_cache"])
        assert [list(ladder.sizes) for ladder in (runner._decode, runner._mixed, runner._heads)] == recorded
        assert ask(engine) == expected
        for _ in range(10):  # and nothing is lost on the way
            engine.sleep()
            engine.wake_up()
        assert torch.cuda.memory_reserved() - before < 64 << 20
        assert ask(engine) == expected
        check_idle(engine)


def test_where_a_gpu_has_no_room_the_engine_sleeps_on():
    """This process may take no more than it has: others on the same GPU go on."""
    options = dict(hidden_size=1024, intermediate_size=4096, num_hidden_layers=4)
    with Engine.from_pretrained(build("Qwen3", device="cuda", **options), device="cuda", config=CONFIG) as engine:
        expected = ask(engine)
        engine.sleep()
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (8 << 20)) / total)
        try:
            with pytest.raises(MemoryError, match="wake_up: no memory for weights"):
                engine.wake_up()
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert engine.asleep == TAGS
        engine.wake_up()
        assert ask(engine) == expected
