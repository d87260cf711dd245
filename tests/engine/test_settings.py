"""Covered families with options that nobody publishes: an engine that reads the files, and a trainer that loads them as
people do, have the same log-probabilities and the same numerics, or both refuse by name."""

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_models import _model, build
from transformers import AutoConfig, AutoModelForCausalLM

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation
from vexact_engine.handover.session import difference
from vexact_engine.proof.bisect import bisect
from vexact_engine.proof.prompts import synthetic_prompts
from vexact_engine.proof.stacks import engine as chunks
from vexact_engine.proof.stacks import patched
from vexact_engine.proof.verify import verify
from vexact_engine.runner.shapes import max_positions
from vexact_ops.testing import assert_bitwise

CONFIG = EngineConfig(page_size=4, num_pages=64, max_num_seqs=4, max_num_batched_tokens=32, show_progress=False)
ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
YARN = {**ROPE, "rope_type": "yarn", "beta_fast": 20.0, "beta_slow": 2.0}
LLAMA3 = {**ROPE, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 2.0}
SETTINGS = {
    "llama-bias-tied": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-untied-one-kv-head": ("Llama", {"tie_word_embeddings": False, "num_key_value_heads": 1}),
    "llama-gelu": ("Llama", {"hidden_act": "gelu_pytorch_tanh"}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-eps": ("Llama", {"rms_norm_eps": 0.3}),
    "llama-wide-heads": ("Llama", {"head_dim": 40}),
    "llama-dropout": ("Llama", {"attention_dropout": 0.1}),
    "qwen2-window-from-layer-1": ("Qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN}),
    "qwen3-yarn-mscale": ("Qwen3", {"rope_parameters": {**YARN, "attention_factor": 0.7}}),
    "qwen3-bias": ("Qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
    "qwen3-linear-rope": ("Qwen3", {"rope_parameters": {**ROPE, "rope_type": "linear"}}),
    "mistral-window-2": ("Mistral", {"sliding_window": 2}),
    "mistral-window-none": ("Mistral", {"sliding_window": None}),
    "gemma2-softcaps": ("Gemma2", {"attn_logit_softcapping": 0.5, "final_logit_softcapping": 1.5}),
    "gemma2-no-softcaps": ("Gemma2", {"attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma2-scale": ("Gemma2", {"query_pre_attn_scalar": 3, "sliding_window": 3}),
    "qwen3moe-top-1": ("Qwen3Moe", {"num_experts_per_tok": 1, "norm_topk_prob": False}),
    "qwen3moe-sparse-step": ("Qwen3Moe", {"decoder_sparse_step": 2}),
    "qwen3moe-mlp-only": ("Qwen3Moe", {"mlp_only_layers": [0]}),
    "mixtral-all-experts": ("Mixtral", {"num_experts_per_tok": 8, "sliding_window": 5}),
    "olmoe-normalised": ("Olmoe", {"norm_topk_prob": True}),
    "deepseek-one-group": ("DeepseekV3", {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 0.37}),
    "deepseek-no-q-lora": ("DeepseekV3", {"q_lora_rank": None, "norm_topk_prob": False}),
    "deepseek-yarn": ("DeepseekV3", {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.6}}),
    "deepseek-halves": ("DeepseekV3", {"rope_interleave": False}),
}  # fmt: skip
TRAINERS = {
    "loaded": lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16),
    "cast": lambda path: AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).bfloat16(),
    "config": lambda path: AutoModelForCausalLM.from_pretrained(
        path, config=AutoConfig.from_pretrained(path), dtype="auto"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SETTINGS)
def test_an_engine_and_its_trainers_agree(name, tmp_path):
    family, options = SETTINGS[name]
    _model.__wrapped__(family, torch.bfloat16, 0, tuple(options.items())).save_pretrained(tmp_path)
    try:
        engine = Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG)
    except vx.patch.UnsupportedModule:
        with pytest.raises(vx.patch.UnsupportedModule):
            vx.patch.hf(TRAINERS["loaded"](tmp_path), training=False)
        return
    with engine:
        params = SamplingParams(max_new_tokens=12, seed=3, ignore_eos=True)
        found = engine.generate([list(range(3, 33)), [9, 8, 7]], params)
        for kind, load in TRAINERS.items():
            routers = {n for n, p in engine.model.named_parameters() if p.dtype == torch.float32}
            model = load(tmp_path)
            if kind == "cast" and routers:
                continue  # a cast rounds routers that are kept in fp32: refused below, by the numerics
            for module in model.modules():
                if getattr(module, "attention_dropout", 0.0):
                    with pytest.raises(vx.patch.UnsupportedModule, match=r"attention_dropout=0\.0"):
                        vx.patch.hf(model)
                    break
            for module in model.modules():
                if hasattr(module, "attention_dropout"):
                    module.attention_dropout = 0.0
            with vx.patch.hf(model) as handle:
                assert vx.numerics_difference(handle.numerics(), engine.numerics()) == {}
                for completion in found:
                    row = torch.tensor([completion.prompt_ids + completion.token_ids])
                    with torch.no_grad():
                        got = handle.logprobs(row)[0, len(completion.prompt_ids) - 1 : -1]
                    assert_bitwise(got, torch.tensor(completion.logprobs), f"{name}, {kind}")
                engine.update_weights(model.state_dict(), numerics=handle.numerics())


def test_a_cast_that_rounds_routers_is_refused_by_their_name(tmp_path):
    build("DeepseekV3").save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG) as engine:
        model = TRAINERS["cast"](tmp_path)
        kept = {n for n, p in engine.model.named_parameters() if p.dtype == torch.float32}
        if not kept:
            pytest.skip("this release of transformers keeps no router in fp32")
        held = engine.manifest()
        given = {name: value.to(held[name][1]) for name, value in copy.deepcopy(model).state_dict().items()}
        with vx.patch.hf(model) as handle, torch.no_grad():
            with pytest.raises(ValueError, match=r"model\.dtype\.router: got 'bfloat16'"):
                engine.update_weights(given, numerics=handle.numerics())
            engine.update_weights(given, numerics=handle.numerics(rounded=True))
            (found,) = engine.generate([list(range(3, 43))], SamplingParams(max_new_tokens=9, seed=3))
            got = handle.logprobs(torch.tensor([found.prompt_ids + found.token_ids]))[0, 39:-1]
            assert_bitwise(got, torch.tensor(found.logprobs))


@pytest.mark.parametrize("family", ["DeepseekV3", "Qwen3Moe"])
def test_which_routers_may_be_of_another_dtype(family):
    """Those that cast to fp32 anyway, of who rounds them first; and never a narrower one than the trainer's."""
    routers = {}
    for dtype in (torch.bfloat16, torch.float32):
        routers[dtype] = model = copy.deepcopy(build(family)).bfloat16()
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight") and family == "DeepseekV3":
                parameter.data = parameter.data.to(dtype)
    with vx.patch.hf(routers[torch.bfloat16]) as narrow, vx.patch.hf(routers[torch.float32]) as wide:
        differ = {
            (trainer, engine, rounded): difference(one.numerics(rounded=rounded), other.numerics())
            for trainer, one in (("narrow", narrow), ("wide", wide))
            for engine, other in (("narrow", narrow), ("wide", wide))
            for rounded in (False, True)
        }
    others = set() if family == "Qwen3Moe" else {"model.dtype.router"}
    kept = any(name.endswith("gate.weight") for name in vx.patch.kept_in_fp32(routers[torch.bfloat16]))
    if others and not kept:  # then it is no cast either that an engine multiplies by
        others.add("model.layers.blocks.1.part.router.cast")
    for (trainer, engine, rounded), found in differ.items():
        may = trainer == engine or (trainer == "narrow" and rounded and kept)
        assert set(found) == (set() if may else others)


FACTORS = {"short_factor": [1.0 + 0.1 * i for i in range(8)], "long_factor": [2.0 + 0.3 * i for i in range(8)]}
LONGROPE = (("rope_parameters", {**ROPE, "rope_type": "longrope", **FACTORS}),)


@pytest.mark.parametrize("choice", ["short", "long"])
def test_declared_factors_of_longrope(choice, tmp_path):
    _model.__wrapped__("Llama", torch.bfloat16, 0, LONGROPE).save_pretrained(tmp_path)
    with pytest.raises(vx.patch.UnsupportedModule, match="longrope='short'"):
        Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG)
    config, params = replace(CONFIG, longrope=choice), SamplingParams(max_new_tokens=40, seed=3, ignore_eos=True)
    with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:
        (found,) = engine.generate([list(range(3, 43))], params)
        model = TRAINERS["cast"](tmp_path)
        other = {"short": "long", "long": "short"}[choice]
        with vx.patch.hf(model, longrope=other) as handle, pytest.raises(ValueError, match=r"options\.longrope: got"):
            engine.update_weights(model.state_dict(), numerics=handle.numerics())
        with vx.patch.hf(model, longrope=choice) as handle, torch.no_grad():
            got = handle.logprobs(torch.tensor([found.prompt_ids + found.token_ids]))[0, 39:-1]
            assert_bitwise(got, torch.tensor(found.logprobs))
            engine.update_weights(model.state_dict(), numerics=handle.numerics())
    verified = verify(tmp_path, synthetic_prompts(2, [40], 61, seed=1), params, config=config)
    assert verified.equal and verified.numerics["options"] == {"longrope": choice}
    stack = patched(model, longrope=choice)
    assert stack.name == f"patched:longrope={choice}"
    assert bisect(stack, chunks(model, longrope=choice), [[5, 6, 7]]).equal


def test_short_factors_are_for_texts_within_the_original_length():
    """Behind it they are not the model's: such a text would have other numbers than anywhere else, in silence."""
    model = _model.__wrapped__("Llama", torch.bfloat16, 0, LONGROPE)
    speculation = Speculation(draft_model=build("Llama"))  # it turns otherwise, and is patched without a choice
    for choice, longest in (("short", 64), ("long", 256)):
        config = replace(CONFIG, longrope=choice)
        said = f"max_model_len is {longest + 1}, expected at most {longest}: .*longrope='{choice}'"
        with pytest.raises(ValueError, match=said):
            Engine.from_pretrained(model, config=replace(config, max_model_len=longest + 1))
        with Engine.from_pretrained(model, config=replace(config, speculation=speculation)) as engine:
            assert engine.config.max_model_len == longest
    with pytest.raises(ValueError, match="longrope: got 'short', expected None"):
        Engine.from_pretrained(build("Llama"), config=replace(CONFIG, longrope="short"))


DYNAMIC = (("max_position_embeddings", 64), ("rope_parameters", {**ROPE, "rope_type": "dynamic", "factor": 6.0}))


def test_dynamic_frequencies_are_for_texts_within_the_length(tmp_path):
    """As InternLM3's: up to there they are those of no scaling, in rollout and trainer."""
    _model.__wrapped__("Llama", torch.bfloat16, 0, DYNAMIC).save_pretrained(tmp_path)
    with pytest.raises(vx.patch.UnsupportedModule, match=r"rope type 'dynamic': .*longrope='short'"):
        Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG)
    config, params = replace(CONFIG, longrope="short"), SamplingParams(max_new_tokens=23, seed=3, ignore_eos=True)
    with pytest.raises(ValueError, match=r"max_model_len is 65, expected at most 64: .*longrope='short'"):
        Engine.from_pretrained(tmp_path, device="cpu", config=replace(config, max_model_len=65))
    with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:
        (found,) = engine.generate([list(range(3, 43))], params)
        model = TRAINERS["cast"](tmp_path)
        with torch.no_grad():
            model(torch.arange(90)[None])  # beyond it, which leaves other frequencies behind
        with vx.patch.hf(model, longrope="short") as handle, torch.no_grad():
            got = handle.logprobs(torch.tensor([found.prompt_ids + found.token_ids]))[0, 39:-1]
            assert_bitwise(got, torch.tensor(found.logprobs))
            engine.update_weights(model.state_dict(), numerics=handle.numerics())


@pytest.mark.parametrize("kind,longest", [("dynamic", 64), ("longrope", 48)])
def test_layers_that_are_stretched_beside_them_make_no_longer_text_of_short_factors(kind, longest):
    yarn = {**ROPE, "rope_type": "yarn", "original_max_position_embeddings": 32}
    other = {**ROPE, "rope_type": kind, "original_max_position_embeddings": 48}
    for ropes in ((yarn, other), (other, yarn)):
        rope = dict(zip(("sliding_attention", "full_attention"), ropes))
        config = SimpleNamespace(max_position_embeddings=64, rope_parameters=rope)
        model = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda config=config, **_: config))
        assert max_positions(model, "short") == longest and max_positions(model, "long") == 128


@pytest.mark.process
def test_declared_factors_of_longrope_in_stages(tmp_path):
    _model.__wrapped__("Llama", torch.bfloat16, 0, LONGROPE).save_pretrained(tmp_path)
    found = []
    for stages in (1, 2):
        config = replace(CONFIG, longrope="long", pipeline_parallel_size=stages)
        with Engine.from_pretrained(tmp_path, device="cpu", config=config) as engine:
            (done,) = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=9, seed=3, ignore_eos=True))
            found.append((done.token_ids, done.logprobs))
    assert found[0] == found[1]
