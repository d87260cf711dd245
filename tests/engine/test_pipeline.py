"""Layers in stages: the bits of one process, each stage with its layers alone, and nothing left of them at the end."""

import itertools
import os
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import forks
import pytest
import torch
from children import is_alive
from engine_models import bits, build, check_idle, held, prompts, until
from transformers import AutoModelForCausalLM

import vexact_ops as vx
from vexact_engine import Engine, EngineAsleep, EngineConfig, SamplingParams, StageDied, WeightsMissing, WeightsTorn
from vexact_engine.parallel import member
from vexact_engine.parallel.balance import cut
from vexact_engine.runner.sleep import TAGS
from vexact_engine.weights.load import load_in_stages
from vexact_engine.weights.partial import Origin, fill, skeleton
from vexact_engine.weights.random import load_random

CONFIG = EngineConfig(
    num_pages=40, page_size=4, max_num_batched_tokens=24, max_num_seqs=6, reserve=0.0, show_progress=False
)
STAGED = replace(CONFIG, pipeline_parallel_size=2)
PROMPTS = prompts(9, longest=40)
PARAMS = SamplingParams(max_new_tokens=14, seed=1, ignore_eos=True)
MIXED = [
    PARAMS,
    replace(PARAMS, temperature=0.0),
    replace(PARAMS, temperature=0.7, top_k=5, n=3),
    replace(PARAMS, top_p=0.8, min_p=0.01, seed=9),
    replace(PARAMS, num_top_logprobs=3, n=2),
    replace(PARAMS, prompt_logprobs=True, num_prompt_top_logprobs=2),
    replace(PARAMS, max_new_tokens=1),
    replace(PARAMS, max_new_tokens=40, stop_token_ids=(7, 8, 9, 10)),
    replace(PARAMS, ignore_eos=False),
]
LAYERS = {"Qwen3": 3, "Qwen3Moe": 2}


def outcome(completion):
    c = completion
    return bits(c), c.top_logprobs, c.prompt_logprobs, c.prompt_top_logprobs


def ask(engine):
    return [outcome(c) for c in engine.generate(PROMPTS, MIXED)]


@pytest.fixture(scope="module", params=list(LAYERS))
def saved(request, tmp_path_factory):
    """A model's directory, and what one process makes of it."""
    path = tmp_path_factory.mktemp(request.param)
    build(request.param, num_hidden_layers=LAYERS[request.param]).save_pretrained(path)
    with Engine.from_pretrained(path, device="cpu", config=CONFIG) as engine:
        return path, ask(engine)


@pytest.fixture(scope="module")
def staged(saved):
    with Engine.from_pretrained(saved[0], device="cpu", config=STAGED) as engine:
        yield engine


def pids(engine):
    return [stage.process.pid for stage in engine._worker._stages]


# The same bits


def test_two_stages_have_the_bits_of_one(saved, staged):
    numerics = staged.numerics()
    with vx.patch.hf(AutoModelForCausalLM.from_pretrained(saved[0], dtype="auto")) as handle:
        assert staged.path == "fused" and numerics == handle.numerics("cpu")
    for _ in range(2):  # cold and warm
        assert ask(staged) == saved[1]
    assert staged.stats.preemptions > 0 and staged.stats.prefix_tokens > 0
    check_idle(staged)


def test_plans_are_in_flight_while_callers_come_and_go(saved, staged):
    alone = [outcome(staged.generate([prompt], params)[0]) for prompt, params in zip(PROMPTS, MIXED)]
    whole = iter(saved[1])
    for one, params in zip(alone, MIXED):
        assert one == next(whole)
        for _ in range(params.n - 1):
            next(whole)
    with ThreadPoolExecutor(2) as pool:
        for done in pool.map(lambda _: ask(staged), range(2)):
            assert done == saved[1]
    check_idle(staged)


def test_each_stage_has_its_layers_alone(saved, staged):
    worker, numbers = staged._worker, staged._worker.numbers()
    count = LAYERS["Qwen3Moe" if "Moe" in type(staged.model).__name__ else "Qwen3"]
    assert [layers for _, layers, _ in numbers] == [len(layers) for layers in worker.layers]
    assert [*itertools.chain(*worker.layers)] == list(range(count))
    assert [pid for pid, *_ in numbers] == pids(staged) and os.getpid() not in pids(staged)
    shape = staged.model.config
    page = 2 * 2 * 4 * shape.num_key_value_heads * shape.head_dim
    assert [held for *_, held in numbers] == [40 * page * len(layers) for layers in worker.layers]
    every = {id(p): p.nbytes for p in staged.model.parameters()}
    assert sum(worker.held) == sum(every.values())  # tied ones aside, nothing is there twice
    assert all(p.is_meta for p in staged.model.parameters()) and max(worker.held) < sum(worker.held)


def test_three_stages(tmp_path):
    model = build("Llama", num_hidden_layers=3, tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        expected = ask(engine)
    with Engine.from_pretrained(tmp_path, device="cpu", config=replace(STAGED, pipeline_parallel_size=3)) as engine:
        assert engine._worker.layers == (range(1), range(1, 2), range(2, 3)) and engine._worker.depth == 4
        assert ask(engine) == expected


# Weights


def test_new_weights_reach_every_stage(saved, staged):
    old, family = saved[1], "Qwen3Moe" if "Moe" in type(staged.model).__name__ else "Qwen3"
    other = build(family, seed=1, num_hidden_layers=LAYERS[family])
    state = {name: value.clone() for name, value in other.state_dict().items()}
    first = {
        name: value.clone() for name, value in build(family, num_hidden_layers=LAYERS[family]).state_dict().items()
    }
    with Engine.from_pretrained(other, config=CONFIG) as engine:
        new = ask(engine)
    version = staged.weight_version
    assert staged.update_weights(state, numerics=staged.numerics()) == version + 1
    assert ask(staged) == new != old
    with pytest.raises(ValueError, match="missing: "):
        staged.update_weights(dict(list(first.items())[1:]), numerics=staged.numerics())
    assert ask(staged) == new
    specs = {name: (tuple(value.shape), value.dtype) for name, value in first.items()}
    staged.update_weights(iter(first.items()), numerics=staged.numerics(), specs=specs)
    assert ask(staged) == old
    check_idle(staged)


def test_random_weights_are_those_of_the_whole():
    source = "smollm2-135m"
    with torch.device("cpu"):
        whole = load_random(source, seed=3, layers=2, dtype="bfloat16").model
    cut_up = load_random(source, seed=3, layers=2, dtype="bfloat16", whole=False)
    assert all(p.is_meta for p in cut_up.model.parameters()) and cut_up.device == torch.device("cpu")
    names = {"model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.rotary_emb.inv_freq"}
    fill(cut_up.model, names, cut_up.origin, torch.device("cpu"))
    tensors = dict(whole.named_parameters()) | dict(whole.named_buffers())
    found = dict(cut_up.model.named_parameters()) | dict(cut_up.model.named_buffers())
    assert all(torch.equal(found[name], tensors[name]) for name in names)
    assert sum(not p.is_meta for p in cut_up.model.parameters()) == 2


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "Mixtral", "DeepseekV3", "Gemma2"])
def test_what_is_read_is_what_from_pretrained_reads(family, tmp_path):
    """Values, dtypes and buffers; stacked experts, and old names of them."""
    build(family).save_pretrained(tmp_path)
    whole = Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG)
    tensors = dict(whole.model.named_parameters()) | dict(whole.model.named_buffers())
    tensors = {name: value.detach().clone() for name, value in tensors.items()}
    whole.close()
    origin = Origin(str(tmp_path), torch.bfloat16)
    found = skeleton(origin)
    handle = vx.patch.hf(found)
    names = handle.describe().names()
    handle.undo()
    fill(found, names, origin, torch.device("cpu"))
    held = dict(found.named_parameters()) | dict(found.named_buffers())
    for name in names:
        assert held[name].dtype == tensors[name].dtype and torch.equal(held[name], tensors[name]), name


def test_a_tensor_that_is_not_there(tmp_path):
    from safetensors.torch import load_file, save_file

    build("Qwen3").save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    del state["model.layers.1.mlp.up_proj.weight"]
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"missing keys: model\.layers\.1\.mlp\.up_proj\.weight"):
        Engine.from_pretrained(tmp_path, device="cpu", config=STAGED)


# A stage that dies


ONE = pytest.mark.parametrize("saved", ["Qwen3"], indirect=True)


@ONE
@pytest.mark.parametrize("rank", [0, 1])
def test_a_stage_that_dies_is_named_and_made_anew(saved, staged, rank):
    staged.update_weights(state_of(saved[0]), numerics=staged.numerics())  # and so: weights that came later
    long = replace(PARAMS, max_new_tokens=110)
    with ThreadPoolExecutor(1) as pool, held(staged, 8) as (reached, go):
        running = pool.submit(staged.generate, PROMPTS[:2], long)
        assert reached.wait(120)
        before = pids(staged)
        os.kill(before[rank], signal.SIGKILL)
        go.set()
        with pytest.raises(StageDied, match=r"stage \d has died \(signal 9\)|stage \d has failed"):
            running.result(300)
    with pytest.raises(WeightsTorn, match="weights that came by an update: update them again"):
        staged.generate(PROMPTS[:1], PARAMS)
    staged.update_weights(state_of(saved[0]), numerics=staged.numerics())
    assert ask(staged) == saved[1]
    assert not set(before) & set(pids(staged)) and not any(map(is_alive, before))
    check_idle(staged)


def state_of(path):
    from safetensors.torch import load_file

    return load_file(path / "model.safetensors")


@ONE
def test_weights_as_they_were_made_come_back_by_themselves(saved):
    with Engine.from_pretrained(saved[0], device="cpu", config=STAGED) as engine:
        assert ask(engine) == saved[1]
        before, first = pids(engine), engine._worker._stages[0].process
        first.kill()
        until(lambda: first.poll() is not None)
        assert ask(engine) == saved[1] and engine.weight_version == 0
        before = [*before, *pids(engine)]
    assert not any(map(is_alive, before))


@ONE
def test_stages_that_cannot_be_made_anew_are_tried_again_with_the_next_request(saved, tmp_path):
    path = shutil.copytree(saved[0], tmp_path / "model")
    with Engine.from_pretrained(path, device="cpu", config=STAGED) as engine:
        engine._worker._stages[0].process.kill()
        weights = path / "model.safetensors"
        weights.rename(tmp_path / "away")
        for _ in range(2):
            with pytest.raises((StageDied, RuntimeError), match=r"stage \d has (died|failed)"):
                engine.generate(PROMPTS[:1], PARAMS)
        (tmp_path / "away").rename(weights)
        assert ask(engine) == saved[1]
        check_idle(engine)


@ONE
def test_nothing_is_left_of_a_process_that_is_killed(saved):
    code = f"""{forks.OWN}
import sys, threading, time
from vexact_engine import Engine, EngineConfig, SamplingParams
config = EngineConfig(num_pages=64, pipeline_parallel_size=2, show_progress=False)
engine = Engine.from_pretrained({str(saved[0])!r}, device='cpu', config=config)
params = SamplingParams(max_new_tokens=200, ignore_eos=True)
threading.Thread(target=engine.generate, args=([[5] * 9] * 4, params), daemon=True).start()
while engine.stats.steps < 5: time.sleep(0.001)
print(*(stage.process.pid for stage in engine._worker._stages), flush=True)
time.sleep(600)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    children = [int(word) for word in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.kill()
    parent.wait()
    until(lambda: not any(map(is_alive, children)))


# Where layers are cut


@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@pytest.mark.parametrize("costs, head", [([3] * 8, 0), ([3] * 8, 7), ([1, 9, 1, 1, 1, 9, 2], 4), ([5, 1, 1, 1], 2)])
def test_the_most_that_a_stage_costs_is_least(costs, head, stages):
    def most(layers):
        return max(sum(costs[i] for i in part) + (head if part.stop == len(costs) else 0) for part in layers)

    found = cut(costs, head, stages)
    assert [*itertools.chain(*found)] == list(range(len(costs))) and len(found) == stages and all(found)
    every = []
    for inner in itertools.combinations(range(1, len(costs)), stages - 1):
        ends = (0, *inner, len(costs))
        every.append([range(a, b) for a, b in itertools.pairwise(ends)])
    assert most(found) == min(map(most, every))


def test_stages_whose_numerics_are_others_are_refused_at_the_start(tmp_path, monkeypatch):
    """As those of a machine with another build."""
    twin = """
from vexact_engine.parallel import stage
send = stage.Stage.send
def other(self, message):
    if isinstance(message, stage.m.Ready) and self.name == "stage 1":
        message.facts["numerics"]["rooms"]["linear"] = "another build"
    send(self, message)
stage.Stage.send = other
"""
    build("Qwen3").save_pretrained(tmp_path)
    monkeypatch.setattr(member, "CODE", twin + member.CODE)
    with pytest.raises(RuntimeError, match=r"stage 1 has other numerics than stage 0: rooms\.linear: 'another build'"):
        Engine.from_pretrained(tmp_path, device="cpu", config=STAGED)


def test_what_cannot_be_cut(tmp_path):
    with pytest.raises(ValueError, match="pipeline_parallel_size: got 3, expected at most 2, one a layer"):
        cut([1, 1], 0, 3)
    with pytest.raises(ValueError, match=r"pipeline_parallel_size: got a loaded \w+, expected a model directory"):
        Engine.from_pretrained(build("Qwen3"), config=STAGED)
    with pytest.raises(FileNotFoundError, match=r"no config\.json, expected a Hugging Face model directory"):
        load_in_stages(tmp_path)


# Sleep


def test_stages_give_their_memory_back_and_nothing_changes(saved, staged):
    """All of them, while requests are under way; and what a stage has not cannot be given back by it."""
    staged.update_weights(state_of(saved[0]), numerics=staged.numerics())
    cache = sum(held for *_, held in staged._worker.numbers())
    with ThreadPoolExecutor(1) as pool, held(staged, 8) as (reached, _):
        running = pool.submit(ask, staged)
        assert reached.wait(120)
        try:
            given = staged.sleep()
            assert given == {"weights": 0, "kv_cache": cache, "graphs": 0}  # a CPU's weights stay where they are
            assert staged.state == "asleep" and staged.asleep == TAGS
            assert sum(held for *_, held in staged._worker.numbers()) == 0
            assert staged.sleep() == dict.fromkeys(TAGS, 0) and not running.done()
            with pytest.raises(EngineAsleep, match=r'wake_up\(\["weights"\]\) comes first'):
                staged.update_weights(state_of(saved[0]), numerics=staged.numerics())
            assert staged.wake_up(["weights"]) == {"weights": 0} and staged.asleep == ("kv_cache", "graphs")
        finally:
            taken = staged.wake_up()
        assert taken["kv_cache"] == cache and staged.state == "running"
        assert running.result(300) == saved[1]
    assert sum(held for *_, held in staged._worker.numbers()) == cache
    check_idle(staged)


def test_weights_that_stages_have_dropped_come_by_an_update(saved, staged):
    held = sum(tensor.nbytes for tensor in {id(p): p for p in staged.model.parameters()}.values())
    assert staged.sleep(level=2)["weights"] >= held
    staged.wake_up()
    with pytest.raises(WeightsMissing, match=r"sleep\(level=2\) has dropped the weights"):
        staged.generate(PROMPTS[:1], PARAMS)
    state = state_of(saved[0])
    staged.update_weights(iter(state.items()), numerics=staged.numerics(), specs=state)
    assert ask(staged) == saved[1]
    staged.sleep(tags=["kv_cache"])
    staged.update_weights(state, numerics=staged.numerics())
    staged.wake_up(["kv_cache"])
    assert ask(staged) == saved[1]
    check_idle(staged)


@ONE
@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_a_stage_that_dies_asleep_is_made_anew_and_sleeps(saved, when):
    with Engine.from_pretrained(saved[0], device="cpu", config=STAGED) as engine:
        assert ask(engine) == saved[1]
        last = engine._worker._stages[1].process
        if when == "meanwhile":
            engine.sleep()
        last.kill()
        until(lambda: last.poll() is not None)
        if when == "before":
            with pytest.raises(StageDied):
                engine.sleep()  # the engine has not heard of it yet
            assert engine.state == "running"
            engine.sleep()
            assert engine.asleep == TAGS
        else:
            with pytest.raises(StageDied):
                engine.wake_up(["weights"])
            assert engine.state == "asleep"
            engine.wake_up(["weights"])
            assert engine.asleep == ("kv_cache", "graphs")
        assert sum(held for *_, held in engine._worker.numbers()) == 0
        engine.wake_up()
        assert ask(engine) == saved[1] and engine.weight_version == 0
        check_idle(engine)
