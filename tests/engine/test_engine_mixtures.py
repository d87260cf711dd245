"""Mixtures of experts and latent attention in the engine: the same promise; expert weights under either name."""

import re
from dataclasses import replace

import pytest
import test_engine_bits
import torch
from conftest import devices
from engine_models import bits, build
from safetensors.torch import save_file
from test_engine_bits import PARAMS, PROMPTS, ROOMY, alone, check_together
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

import vexact_ops as vx
from vexact_engine import Engine
from vexact_engine.models import CacheShape, cache_shape
from vexact_engine.weights.experts import expert_views, per_expert
from vexact_engine.weights.load import load
from vexact_engine.weights.update import apply_update, plan_update
from vexact_ops.testing import assert_bitwise

CHOICE_IN_BLOCK = pytest.mark.skipif(
    hasattr(deepseek.DeepseekV3MoE, "route_tokens_to_experts"), reason="this transformers routes in the block"
)
FAMILIES = ["Qwen3Moe", "Mixtral", pytest.param("DeepseekV3", marks=CHOICE_IN_BLOCK)]
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


@CHOICE_IN_BLOCK
def test_a_cache_of_expanded_heads():
    model = build("DeepseekV3")
    assert cache_shape(model) == CacheShape(3, 4, 24, 12)
    assert cache_shape(model).per_token == 3 * 4 * 36
    with Engine.from_pretrained(model, config=ROOMY) as engine:
        caches = engine._runner.k_caches, engine._runner.v_caches
        assert [tuple(c[0].shape) for c in caches] == [(64, 16, 4, 24), (64, 16, 4, 12)]
        assert engine.generate(PROMPTS[:1], PARAMS[:1])[0].token_ids == alone("cpu", "DeepseekV3", torch.bfloat16)[0][0]


@CHOICE_IN_BLOCK
@each_device
def test_a_latent_cache(device, dtype):
    """Compressed keys alone are stored; batches, chunks, a warm prefix cache and the trainer have the same bits."""
    config = replace(ROOMY, latent_attention=True, page_size=3, num_pages=40, max_num_batched_tokens=11)
    with Engine.from_pretrained(build("DeepseekV3", dtype, device=device), device=device, config=config) as engine:
        assert engine._runner.shape == (3, 1, 32, 24, True) and engine._runner.shape.per_token == 3 * 32
        keys, values = engine._runner.k_caches[0], engine._runner.v_caches[0]
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


@each_family
def test_checkpoints_of_either_naming(family, tmp_path):
    model = build(family, seed=1)
    model.save_pretrained(tmp_path / "theirs")
    model.config.save_pretrained(tmp_path / "old")
    save_file({name: value.clone() for name, value in per_expert(model)}, tmp_path / "old" / "model.safetensors")
    for folder in ("theirs", "old"):
        same(load(tmp_path / folder).model, model)


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
        engine.update_weights(list(per_expert(build("Qwen3Moe", seed=1))))
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
