"""Mixtures of experts and latent attention in the engine: the same promise; expert weights under either name."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import test_engine_bits
import torch
from conftest import devices
from engine_models import bits, build, check_idle
from safetensors.torch import load_file, save_file
from test_engine_bits import PARAMS, PROMPTS, ROOMY, alone, check_together

import vexact_ops as vx
from vexact_engine import Engine
from vexact_engine.runner.memory import bytes_per_token
from vexact_engine.weights.experts import expert_views, per_expert
from vexact_engine.weights.load import load
from vexact_engine.weights.update import apply_update, plan_update
from vexact_ops.patch.description import Pages
from vexact_ops.testing import assert_bitwise

FAMILIES = ["Qwen3Moe", "Mixtral", "Olmoe", "DeepseekV3"]
each_family = pytest.mark.parametrize("family", FAMILIES)
each_device = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))


@each_device
@each_family
def test_chunks_batches_and_a_warm_prefix_cache(device, dtype, family):
    stats = check_together(
        device, family, dtype, max_num_batched_tokens=7, rounds=2, enable_prefix_cache=True, page_size=3
    )
    assert stats.chunks > stats.steps and stats.prefix_tokens > sum(map(len, PROMPTS)) // 2


@each_device
@each_family
def test_preemption(device, dtype, family):
    assert check_together(device, family, dtype, num_pages=22, page_size=3).preemptions > 0


@each_device
@each_family
def test_the_trainer_computes_the_same_logprobs(device, dtype, family):
    test_engine_bits.test_the_trainer_computes_the_same_logprobs(device, family, dtype, 0.7)


LOST = 7  # a token that something is wrong with


def lose_in_the_embedding(model):
    model.model.embed_tokens.weight.data[LOST] = torch.nan


def lose_in_the_router(model):
    """Its hidden states stay finite; in the first layer the logits of two experts overflow, and their difference is no
    number."""
    model.model.embed_tokens.weight.data[LOST] = torch.nn.functional.one_hot(torch.tensor(5), 48) * 40
    layer = model.model.layers[0]
    layer.post_attention_layernorm.weight.data[5] = 0.2  # 1.4 times the weight below overflows; others have under 1
    layer.mlp.gate.weight.data[:2, 5] = 3e38


@pytest.mark.parametrize("lose", [lose_in_the_embedding, lose_in_the_router])
@each_device
@each_family
def test_a_token_that_the_router_cannot_place_fails_its_request_alone(device, dtype, family, lose):
    if family == "DeepseekV3" and lose is lose_in_the_router:
        pytest.skip("the sigmoid of an infinite logit is a number")
    model = build(family, dtype, device=device)
    with torch.no_grad():
        lose(model)
    lost = [[9, LOST, 11], [LOST], [*PROMPTS[0][:20], LOST]]
    all_prompts = [prompt for pair in zip(PROMPTS, lost) for prompt in pair] + PROMPTS[3:]
    all_params = [replace(PARAMS[i % 6], max_new_tokens=4) for i in range(len(all_prompts))]
    with Engine.from_pretrained(model, device=device, config=ROOMY) as engine:

        def outcomes(prompts, params):
            done = engine.generate(prompts, params)
            return [c.error or bits(c) for c in done]

        expected = [outcomes([prompt], [params])[0] for prompt, params in zip(all_prompts, all_params)]
        for prompt, outcome in zip(all_prompts, expected):
            if LOST in prompt:
                assert f"the model's logits after {len(prompt)} tokens are not finite numbers" in outcome
        assert sum(isinstance(outcome, tuple) for outcome in expected) >= 4, "hardly anything to compare"
        assert outcomes(all_prompts, all_params) == expected
        check_idle(engine)


def test_a_cache_of_expanded_heads():
    model = build("DeepseekV3")
    with vx.patch.hf(model) as handle:
        assert handle.memories() == (Pages(4, 24, 12),) * 3
        assert bytes_per_token(handle.memories(), torch.bfloat16) == 2 * 3 * 4 * 36
    with Engine.from_pretrained(model, config=ROOMY) as engine:
        caches = engine._worker._runner.buffers.caches
        assert [tuple(c[0].shape) for c in caches[:2]] == [(64, 16, 4, 24), (64, 16, 4, 12)]
        assert engine.generate(PROMPTS[:1], PARAMS[:1])[0].token_ids == alone("cpu", "DeepseekV3", torch.bfloat16)[0][0]


@each_device
def test_a_latent_cache(device, dtype):
    """Compressed keys alone are stored; batches, chunks, a warm prefix cache and the trainer have the same bits."""
    config = replace(ROOMY, latent_attention=True, page_size=3, num_pages=40, max_num_batched_tokens=11)
    with Engine.from_pretrained(build("DeepseekV3", dtype, device=device), device=device, config=config) as engine:
        assert engine._worker._runner.memories == (Pages(1, 32, 24, shared=True),) * 3
        keys, values = (part[0] for part in engine._worker._runner.buffers.caches[:2])
        assert keys.shape == (40, 3, 1, 32) and values.shape == (40, 3, 1, 24)
        assert values.untyped_storage().data_ptr() == keys.untyped_storage().data_ptr()
        alone = [bits(engine.generate([p], q)[0]) for p, q in zip(PROMPTS, PARAMS)]
        assert engine.numerics()["options"] == {"latent_attention": True}
    with Engine.from_pretrained(
        build("DeepseekV3", dtype, device=device), device=device, config=replace(config, enable_prefix_cache=True)
    ) as engine:
        for _ in range(2):
            done = engine.generate(PROMPTS, PARAMS)
            assert [bits(c) for c in done] == alone
        assert engine.stats.prefix_tokens > sum(map(len, PROMPTS)) // 2
    model = build("DeepseekV3", dtype, device=device).train()
    with vx.patch.hf(model, latent=True) as handle:
        for completion in done:
            row = torch.tensor(completion.prompt_ids + completion.token_ids, device=device)
            raw = handle.logprobs(row)[len(completion.prompt_ids) - 1 : -1]
            assert_bitwise(torch.tensor(completion.raw_logprobs), raw.detach().cpu())


# the names of expert weights


def same(model, other):
    a, b = model.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    for name in a:
        assert_bitwise(a[name], b[name], name)


@each_family
def test_one_by_one_and_back(family):
    model, other = build(family, seed=1), build(family, seed=2)
    named = {name: value.clone() for name, value in per_expert(model)}
    assert not any(name.endswith(("gate_up_proj", "experts.down_proj")) for name in named)
    assert any(re.search(r"experts\.7\.(down_proj|w2)\.weight$", name) for name in named)
    apply_update(plan_update(other, named))
    same(other, model)
    apply_update(plan_update(other, build(family, seed=3).state_dict()))
    same(other, build(family, seed=3))


def any_bytes(family):
    """A model whose weights take every bit pattern: NaNs of all payloads, both zeros, denormals."""
    model = build(family, seed=1)
    for i, parameter in enumerate(model.parameters()):
        bits_of, end = (torch.int16, 2**15) if parameter.dtype == torch.bfloat16 else (torch.int32, 2**31)
        noise = torch.randint(-end, end, parameter.shape, generator=torch.Generator().manual_seed(i))
        parameter.data = noise.to(bits_of).view(parameter.dtype)
    return model


def check_bytes(model, other):
    a, b = model.state_dict(), other.state_dict()
    assert a.keys() == b.keys()
    different = [name for name in a if not torch.equal(a[name].view(torch.uint8), b[name].view(torch.uint8))]
    assert not different


@each_family
def test_the_round_trip_keeps_every_byte(family, tmp_path):
    """Stacked to one by one and back: in memory, through our files, and through the files of transformers itself."""
    model, other = any_bytes(family), build(family, seed=2)
    apply_update(plan_update(other, {name: value.clone() for name, value in per_expert(model)}))
    check_bytes(other, model)
    with pytest.raises(AssertionError):
        check_bytes(build(family, seed=1), model)

    model.save_pretrained(tmp_path / "theirs", max_shard_size="50KB")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 3
    save_per_expert(model, tmp_path / "ours")
    for folder in ("theirs", "ours"):
        check_bytes(load(tmp_path / folder, device="cpu").model, model)

    named, saved = dict(per_expert(model)), {}
    for file in (tmp_path / "theirs").glob("*.safetensors"):
        saved |= load_file(file)
    if any(name.endswith("gate_up_proj") for name in saved):
        pytest.skip("this transformers writes experts stacked")
    assert named.keys() == saved.keys()
    assert all(torch.equal(named[name].view(torch.int16), saved[name].view(torch.int16)) for name in saved)


def save_per_expert(model, folder, files=3, leave_out=()):
    """As trainers of the time before write a mixture: an expert's tensors may lie in different files."""
    model.config.save_pretrained(folder)
    shards, places = [{} for _ in range(files)], {}
    for i, (name, value) in enumerate(per_expert(model)):
        if name not in leave_out:
            shards[i % files][name] = value.clone()
            places[name] = f"model-{i % files}.safetensors"
    for i, shard in enumerate(shards):
        save_file(shard, folder / f"model-{i}.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


MEASURE = """
import glob, json, re, sys, threading, torch, transformers
from safetensors.torch import load_file
from vexact_engine.weights.load import load

def now():  # this process's own memory, not pages of files
    return int(re.search(r"RssAnon:\\s*(\\d+) kB", open("/proc/self/status").read())[1]) << 10

def rise(function):
    before, most, done = now(), 0, threading.Event()
    def watch():
        nonlocal most
        while not done.wait(0.001):
            most = max(most, now() - before)
    watcher = threading.Thread(target=watch)
    watcher.start()
    held = function()
    done.set()
    watcher.join()
    return held, max(most, now() - before)

def read_all_then_stack():
    files = [load_file(file) for file in sorted(glob.glob(sys.argv[1] + "/*.safetensors"))]
    copies = {name: value.clone() for file in files for name, value in file.items()}
    return copies, torch.cat([value.flatten() for value in copies.values()])

first = load(sys.argv[1], device="cpu").model  # imports
model, taken = rise(lambda: load(sys.argv[1], device="cpu").model)
size = sum(p.nbytes for p in model.parameters())
print(json.dumps([size, taken, rise(read_all_then_stack)[1]]))
"""


def test_loading_stacks_experts_without_a_second_copy(tmp_path):
    """What loading takes beyond the model is a layer or so, though every tensor of the files is one expert's third."""
    model = build("Qwen3Moe", num_hidden_layers=8, num_experts=32, moe_intermediate_size=512)
    save_per_expert(model, tmp_path)
    # what is freed goes back at once, so that memory in use is memory that is needed
    exact = {"MALLOC_MMAP_THRESHOLD_": "32768", "MALLOC_MMAP_MAX_": "1000000"}
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True, env={**os.environ, **exact})
    size, loading, twice = json.loads(run.stdout)
    assert size > 30 << 20
    assert loading < 1.3 * size, f"{loading >> 20} MiB for {size >> 20} MiB of weights"
    assert twice > 1.9 * size, "the measure does not see a second copy"


WRONG = {
    "more in the checkpoint": (4, None, r"experts.gate_up_proj is \(8, 80, 48\), expected \(4, 80, 48\)"),
    "fewer in the checkpoint": (12, None, r"experts.gate_up_proj is \(8, 80, 48\), expected \(12, 80, 48\)"),
    "the last is gone": (8, r"\.experts\.7\.", r"experts.gate_up_proj is \(7, 80, 48\), expected \(8, 80, 48\)"),
    "one is gone": (8, r"1\..*\.experts\.3\.", r"missing model.layers.1.\w+.experts.3"),
    "half of one is gone": (
        8,
        r"1\..*\.experts\.3\.(up_proj|w3)",
        r"missing model.layers.1.\w+.experts.3.(up_proj|w3).weight",
    ),
}


@each_family
@pytest.mark.parametrize("count,gone,message", WRONG.values(), ids=WRONG)
def test_expert_counts_that_do_not_match(family, count, gone, message, tmp_path):
    model = build(family, seed=1)
    save_per_expert(model, tmp_path, leave_out=[n for n, _ in per_expert(model) if gone and re.search(gone, n)])
    config = json.loads((tmp_path / "config.json").read_text())
    keys = config.keys() & {"num_experts", "num_local_experts", "n_routed_experts"}
    (tmp_path / "config.json").write_text(json.dumps(config | dict.fromkeys(keys, count)))
    with pytest.raises(ValueError, match=rf"weights: {re.escape(str(tmp_path))}: .*{message}"):
        load(tmp_path)


def test_halves_are_gate_then_up():
    model = build("Qwen3Moe", seed=1)
    experts, views = model.model.layers[1].mlp.experts, expert_views(model)
    stacked, up = views["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert stacked == "model.layers.1.mlp.experts.gate_up_proj"
    assert_bitwise(up, experts.gate_up_proj.detach()[3, 40:])
    up.fill_(7)
    assert (experts.gate_up_proj[3, 40:] == 7).all() and not (experts.gate_up_proj[3, :40] == 7).any()


def test_a_running_engine_takes_either_naming():
    new = build("Qwen3Moe", seed=1)
    with Engine.from_pretrained(new, config=ROOMY) as engine:
        expected = [c.token_ids for c in engine.generate(PROMPTS, PARAMS)]
    with Engine.from_pretrained(build("Qwen3Moe", seed=2), config=ROOMY) as engine:
        assert [c.token_ids for c in engine.generate(PROMPTS, PARAMS)] != expected
        engine.update_weights(list(per_expert(build("Qwen3Moe", seed=1))), numerics=engine.numerics())
        assert [c.token_ids for c in engine.generate(PROMPTS, PARAMS)] == expected


def test_an_update_that_does_not_fit_changes_nothing():
    model = build("Qwen3Moe", seed=1)
    good = dict(per_expert(build("Qwen3Moe", seed=2)))
    one = "model.layers.0.mlp.experts.5.up_proj.weight"
    with pytest.raises(ValueError, match=rf"update_weights: missing: {one}$"):
        plan_update(model, {name: value for name, value in good.items() if name != one})
    with pytest.raises(ValueError, match=rf"repeated: {one}, beside the stacked model.layers.0.mlp.experts.gate_up_"):
        plan_update(model, {**model.state_dict(), one: good[one]})
    with pytest.raises(ValueError, match=r"unknown: model.layers.0.mlp.experts.8.up_proj.weight"):
        plan_update(model, {**good, one.replace("5", "8"): good[one]})
    with pytest.raises(ValueError, match=rf"{one} is \(40, 47\), expected \(40, 48\)"):
        plan_update(model, {**good, one: good[one][:, 1:]})
    with pytest.raises(TypeError, match=f"{one} is torch.float32"):
        plan_update(model, {**good, one: good[one].float()})
    same(model, build("Qwen3Moe", seed=1))
