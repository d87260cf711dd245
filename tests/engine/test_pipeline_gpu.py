"""Stages on GPUs of their own: the bits of one, in graphs; and each has its memory back while the engine sleeps."""

import importlib.util
from dataclasses import replace

import pytest
import torch
from engine_models import bits, build, check_idle, prompts

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.runner.sleep import TAGS

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two CUDA devices")

CONFIG = EngineConfig(num_pages=4096, page_size=16, max_num_batched_tokens=256, max_num_seqs=32, show_progress=False)
PROMPTS = prompts(40, longest=120)
PARAMS = SamplingParams(max_new_tokens=30, seed=1, ignore_eos=True)
MIXED = [
    replace(PARAMS, temperature=i % 3 / 2, top_k=5 * (i % 4 == 1), n=1 + i % 2, num_top_logprobs=i % 3)
    if i % 5
    else replace(PARAMS, prompt_logprobs=True, num_prompt_top_logprobs=3)
    for i in range(40)
]


def ask(engine):
    done = engine.generate(PROMPTS, MIXED, raise_on_error=True)
    return [(bits(c), c.top_logprobs, c.prompt_logprobs, c.prompt_top_logprobs) for c in done]


def free():
    return [torch.cuda.mem_get_info(i)[0] for i in range(2)]


SAVER = pytest.mark.skipif(importlib.util.find_spec("torch_memory_saver") is None, reason="no torch_memory_saver")


@pytest.mark.parametrize("backend", ["storages", pytest.param("memory_saver", marks=SAVER)])
def test_two_gpus_have_the_bits_of_one_and_sleep(backend, tmp_path):
    # Matrices of more than 10 MiB: smaller ones share torch's segments with whatever is next, keys and values too, and
    # a segment is given back as a whole, with the last that lies in it.
    options = dict(hidden_size=1024, intermediate_size=8192, num_hidden_layers=4, max_position_embeddings=4096)
    model = build("Qwen3", torch.bfloat16, **options)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path)
    del model
    with Engine.from_pretrained(tmp_path, device="cuda", config=CONFIG) as engine:
        expected = ask(engine)
    torch.cuda.empty_cache()
    staged = replace(CONFIG, pipeline_parallel_size=2, sleep_backend=backend)
    with Engine.from_pretrained(tmp_path, device="cuda", config=staged) as engine:
        assert ask(engine) == expected
        each = [held + numbers[2] for held, numbers in zip(engine._worker.held, engine._worker.numbers())]
        weights, cache = sum(engine._worker.held), sum(each) - sum(engine._worker.held)
        for level in (1, 2):
            given = engine.sleep(level)
            if backend == "storages":  # else they keep their addresses, and their sizes
                assert not any(held for *_, held in engine._worker.numbers())
            assert engine.asleep == TAGS
            assert given["weights"] > 0.95 * weights and given["kv_cache"] > 0 and given["graphs"] > 0
            assert given["weights"] + given["kv_cache"] > 0.95 * (weights + cache)
            engine.wake_up(["weights"])
            if level == 2:
                engine.update_weights(state, numerics=engine.numerics())
            engine.wake_up()
            assert ask(engine) == expected
        gained = []
        for _ in range(3):  # of the devices themselves, where others may take some in that moment
            before = free()
            engine.sleep()
            gained.append([now - had for now, had in zip(free(), before)])
            engine.wake_up()
        assert all(max(column) > 0.9 * size for column, size in zip(zip(*gained), each)), (gained, each)
        check_idle(engine)
