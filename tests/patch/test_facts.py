"""What a fingerprint says of a model: every number of its configuration, and no name of a weight."""

import json

import pytest
import torch
from families import family, tiny, world
from test_covered import small
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import vexact_ops as vx

DTYPE = torch.bfloat16

NUMBERS = {
    "qwen3_moe": {"num_experts_per_tok": 2, "norm_topk_prob": False, "rms_norm_eps": 1e-3},
    "deepseek_v3": {"routed_scaling_factor": 1.5, "topk_group": 3, "n_group": 2, "num_experts_per_tok": 2},
    "gemma2": {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 5, "rope_local_base_freq": 5e3, "query_pre_attn_scalar": 16},
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 2.0, "attention_multiplier": 0.1,
                "logits_scaling": 4.0},
    "smollm3": {"no_rope_layers": [0, 1]},
    "mistral": {"sliding_window": 5},
    "llama": {"hidden_act": "gelu_pytorch_tanh"},
    "bitnet": {"rms_norm_eps": 1e-3},
    "glm": {"partial_rotary_factor": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("name,number", [(name, number) for name, numbers in NUMBERS.items() for number in numbers])
def test_every_number_of_a_configuration_shows(name, number):
    base = {"rope_parameters": None} if number == "rope_local_base_freq" else {}
    with vx.patch.hf(tiny(name, DTYPE)) as one:
        expected = one.numerics()["model"]
    changed = {**base, number: NUMBERS[name][number]}
    if name == "deepseek_v3" and number == "n_group":
        changed["topk_group"] = 2
    with vx.patch.hf(tiny(name, DTYPE, **changed)) as other:
        found = other.numerics()["model"]
    assert vx.numerics_difference(expected, found), f"{number} does not show"


@pytest.mark.parametrize("name", [family(n) for n in vx.patch.COVERED])
def test_two_models_of_one_configuration_have_the_same_facts(name):
    model, other = small(name), small(name)
    other.load_state_dict({k: torch.randn_like(v) for k, v in other.state_dict().items()})
    if other.get_output_embeddings() is not None:  # untied
        other.get_output_embeddings().weight = torch.nn.Parameter(other.get_input_embeddings().weight.detach().clone())
    with vx.patch.hf(model) as one, vx.patch.hf(other) as two:
        found = one.numerics("cpu")
        assert found == two.numerics("cpu")
        assert json.loads(json.dumps(found)) == found


FLOAT = torch.float32
SHARDED = [family(name) for name in ("llama", "gemma3_text", "deepseek_v3")]


@pytest.mark.parametrize("order", ["patched", "sharded"])
@pytest.mark.parametrize("name", SHARDED)
def test_masters_in_fp32_say_what_fsdp2_computes_in(name, order):
    """Those of an engine that has the weights in bf16; with another policy, not those."""
    with vx.patch.hf(tiny(name, DTYPE)) as engine:
        expected = engine.numerics("cpu")
    master = tiny(name, FLOAT)
    for dtype in (DTYPE, FLOAT):
        model = tiny(name, FLOAT)
        kept = {path.rpartition(".")[0] for path in vx.patch.kept_in_fp32(model)}
        with world("cpu") as mesh:
            handle = vx.patch.hf(model) if order == "patched" else None
            for path in kept:
                alone = MixedPrecisionPolicy(param_dtype=FLOAT)
                fully_shard(model.get_submodule(path), mesh=mesh, mp_policy=alone)
            for part in (*model.model.layers, model):
                fully_shard(part, mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
            handle = handle or vx.patch.hf(model)
            found = handle.numerics("cpu")
            handle.undo()
        differ = vx.numerics_difference(found, expected)
        assert (differ == {}) == (dtype == DTYPE)
        assert dtype == DTYPE or differ["model.dtype.linear"] == ("float32", "bfloat16")
    with vx.patch.hf(master) as handle:
        assert "model.dtype.linear" in vx.numerics_difference(handle.numerics("cpu"), expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_model_that_is_cast_later_says_what_it_computes_in(name):
    """float() changes no module, no number and no buffer, so that nothing said that a description is old."""
    with vx.patch.hf(tiny(name, DTYPE).float()) as handle:
        expected = handle.numerics()["model"]
    with vx.patch.hf(model := tiny(name, DTYPE)) as handle:
        assert handle.numerics()["model"] != expected
        model.float()
        assert handle.numerics()["model"] == expected
        assert handle.describe().rotary[0].dtype == torch.float32


LINEARS = "down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"
OTHERS = {"adapters": dict.fromkeys(LINEARS, "2.0")}


def test_adapters_are_no_numbers_of_a_model_without():
    """What an engine gets once they are merged; between two that have some, what they are multiplied by counts."""
    peft = pytest.importorskip("peft")
    with vx.patch.hf(tiny("llama", DTYPE)) as engine:
        expected = engine.numerics("cpu")
    config = peft.LoraConfig(r=4, target_modules="all-linear")
    wrapped = peft.get_peft_model(tiny("llama", DTYPE), config)
    with vx.patch.hf(wrapped) as handle:
        flags = [m._disable_adapters for m in wrapped.modules() if hasattr(m, "_disable_adapters")]
        numerics = handle.numerics("cpu")
        assert numerics["model"].pop("adapters") == dict.fromkeys(LINEARS, "2.0") and numerics == expected
        assert not vx.numerics_difference(handle.numerics("cpu"), expected)
        wrapped.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] = 0.5
        differ = vx.numerics_difference(handle.numerics("cpu"), numerics | {"model": numerics["model"] | OTHERS})
        assert differ == {"model.adapters.up_proj": ("0.5, 2.0", "2.0")}
        wrapped.base_model.model.model.layers[0].mlp.up_proj.scaling["default"] = 2.0
        with wrapped.disable_adapter():
            assert handle.numerics("cpu") == expected
        assert flags == [m._disable_adapters for m in wrapped.modules() if hasattr(m, "_disable_adapters")]
        wrapped.merge_adapter()
        weight = wrapped.base_model.model.model.layers[0].mlp.up_proj.base_layer.weight
        before = weight.clone()
        assert handle.numerics("cpu") == expected
        assert torch.equal(weight, before)


def test_a_model_without_a_description_says_its_operations(monkeypatch):
    """In order, with their numbers; a change of one shows."""

    def nothing(*given):
        raise vx.patch.NotDescribed("no words")

    monkeypatch.setattr("vexact_ops.patch.facts.read", nothing)
    monkeypatch.setattr("vexact_ops.patch.state.describe", nothing)
    found = []
    for changes in ({}, {}, {"rms_norm_eps": 1e-3}, {"rope_parameters": {"rope_type": "default", "rope_theta": 1e3}}):
        with vx.patch.hf(tiny("llama", DTYPE, **changes)) as handle:
            found.append(handle.numerics()["model"])
    assert found[0] == found[1]
    assert set(vx.numerics_difference(found[0], found[2])) == {"operations.rmsnorm"}
    assert set(vx.numerics_difference(found[0], found[3])) == {"buffers.0"}


def test_a_patch_that_was_undone_has_no_numerics():
    handle = vx.patch.hf(tiny("llama"))
    handle.undo()
    with pytest.raises(RuntimeError, match="undone"):
        handle.numerics()


def test_the_model_that_a_tensor_is_of():
    model, other = tiny("llama"), tiny("llama")
    weight = model.model.layers[0].mlp.up_proj.weight
    assert vx.patch.model_of(weight) is None
    with vx.patch.hf(model) as handle:
        expected = handle.numerics()["model"]
        for tensor in (weight, weight.detach(), weight[1:], next(iter(model.state_dict().values()))):
            assert vx.patch.model_of(tensor) == expected
        for tensor in (weight.clone(), other.model.norm.weight, weight.to("meta"), "weight"):
            assert vx.patch.model_of(tensor) is None
    assert vx.patch.model_of(weight) is None
