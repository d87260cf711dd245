"""What patching found, as data: every covered family has words, and the words are the model's."""

import dataclasses
import re

import pytest
import torch
from families import FAMILIES, NOT_DESCRIBED, family, tiny
from test_covered import small
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import vexact_ops as vx
from vexact_ops.patch import COVERED, NotDescribed
from vexact_ops.patch.description import (
    Adapter,
    Attention,
    Factor,
    Head,
    Latent,
    Linear,
    Mixture,
    Mlp,
    Norm,
    Pages,
    Rope,
    Rotary,
)


def described(name: str, dtype=torch.bfloat16, latent=False, **changes):
    model = tiny(name, dtype, **changes)
    with vx.patch.hf(model, latent=latent) as handle:
        return handle.describe(), model


@pytest.mark.parametrize("name", [family(n) for n in COVERED])
def test_every_covered_family_is_described_and_every_weight_is_in_it(name):
    model = tiny(name, torch.bfloat16) if name in FAMILIES else small(name)
    with vx.patch.hf(model) as handle:
        if name in NOT_DESCRIBED:
            with pytest.raises(NotDescribed, match=re.escape(NOT_DESCRIBED[name])):
                handle.describe()
            return
        found = handle.describe()
    assert len(found.layers) == model.config.num_hidden_layers
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    assert found.names() <= tensors.keys()
    assert found.names() >= dict(model.named_parameters()).keys()
    assert repr(found) == repr(handle._patch.description)


def test_a_dense_decoder():
    found, _ = described("gemma2")
    assert found.embedding.factor == Factor(buffer="model.embed_tokens.embed_scale", dtype=torch.bfloat16)
    assert found.head == Head("model.embed_tokens.weight", 1.0, 3.0)  # tied
    assert found.rotary == (Rotary("model.rotary_emb.inv_freq", 1.0, torch.bfloat16),)
    layer, path = found.layers[0], "model.layers.0"

    def norm(name: str) -> Norm:
        return Norm(f"{path}.{name}.weight", 1e-6, "gemma", 32)

    assert (layer.blocks[0].before, layer.blocks[0].after) == (
        norm("input_layernorm"),
        norm("post_attention_layernorm"),
    )
    assert layer.blocks[1].before == norm("pre_feedforward_layernorm")
    assert layer.blocks[1].after == norm("post_feedforward_layernorm")
    attention = layer.blocks[0].part
    assert isinstance(attention, Attention)
    assert attention.q == Linear(f"{path}.self_attn.q_proj.weight", None, 64, 32)
    assert (attention.heads, attention.kv_heads, attention.dim, attention.v_dim) == (4, 2, 16, 16)
    assert (attention.window, attention.softcap, attention.scale) == (4, 2.0, 12**-0.5)
    assert found.layers[1].blocks[0].part.window is None
    assert attention.rope == Rope(0, 16) and attention.q_norm is None and layer.memory == Pages(2, 16, 16, window=4)
    mlp = layer.blocks[1].part
    assert isinstance(mlp, Mlp) and mlp.activation == "gelu_tanh" and mlp.down.inputs == 48


@pytest.mark.parametrize(
    "name,read",
    [
        ("llama", lambda a: (a.q.bias, "model.layers.0.self_attn.q_proj.bias")),
        ("qwen3", lambda a: (a.q_norm, Norm("model.layers.0.self_attn.q_norm.weight", 1e-6, "llama", 16))),
        ("olmo2", lambda a: (a.q_norm.size, 64)),
        ("hunyuan_v1_dense", lambda a: (a.norms_after_rope, True)),
        ("phi3", lambda a: ([p.rows for p in (a.q, a.k, a.v)], [(0, 64), (64, 96), (96, 128)])),
        ("phi3", lambda a: (a.rope.dim, 8)),
        ("smollm3", lambda a: (a.rope, Rope(0, 16))),
        ("ernie4_5", lambda a: (a.rope.interleaved, True)),
        ("bitnet", lambda a: (a.out_norm.weight, "model.layers.0.self_attn.attn_sub_norm.weight")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_attention_modules_differ_in(name, read):
    got, expected = read(described(name)[0].layers[0].blocks[0].part)
    assert got == expected


def test_where_layers_differ():
    assert [layer.blocks[0].part.rope for layer in described("smollm3")[0].layers] == [Rope(0, 16), None]
    factors = {layer.blocks[0].factor for layer in described("granite")[0].layers}
    assert factors == {Factor(0.22)}
    assert described("granite")[0].embedding.factor == Factor(3.0)
    post = described("olmo2")[0].layers[0]
    assert post.blocks[0].before is None and post.blocks[0].after.weight.endswith("post_attention_layernorm.weight")
    assert described("arcee")[0].layers[0].blocks[1].part.gate is None
    assert described("bitnet")[0].layers[0].blocks[1].part.norm is not None


def test_mixtures():
    found, _ = described("deepseek_v3")
    assert isinstance(found.layers[0].blocks[1].part, Mlp)
    mixture = found.layers[1].blocks[1].part
    assert isinstance(mixture, Mixture)
    router = mixture.router
    assert (router.top_k, router.score, router.normalize, router.groups, router.top_k_groups) == (
        3,
        "sigmoid",
        True,
        4,
        2,
    )
    assert router.bias == "model.layers.1.mlp.gate.e_score_correction_bias" and router.scale == 2.5 and router.wide
    assert mixture.experts.gate_up == "model.layers.1.mlp.experts.gate_up_proj"
    assert mixture.shared.up.weight == "model.layers.1.mlp.shared_experts.up_proj.weight"
    plain = described("qwen3_moe")[0].layers[1].blocks[1].part
    assert plain.shared is None and plain.router.rounded == torch.bfloat16 and plain.router.score == "softmax"


@pytest.mark.parametrize("absorbed", [False, True], ids=["expanded", "absorbed"])
@pytest.mark.parametrize("q_lora_rank", [20, None])
def test_latent_attention(absorbed, q_lora_rank):
    found, _ = described("deepseek_v3", latent=absorbed, q_lora_rank=q_lora_rank)
    for layer in found.layers:
        latent = layer.blocks[0].part
        assert isinstance(latent, Latent) and latent.absorbed == absorbed
        assert (latent.heads, latent.rank, latent.nope, latent.v_dim, latent.rope) == (
            4,
            24,
            16,
            12,
            Rope(0, 8, apart=True),
        )
        assert (latent.q_a is None) == (q_lora_rank is None) and latent.kv_norm.size == 24
        assert layer.memory == (Pages(1, 32, 24, True) if absorbed else Pages(4, 24, 12))


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "deepseek_v3"])
def test_weights_may_be_on_meta(name):
    """All of them, or those of some layers: the description is the same, and says what a stage reads."""
    expected, model = described(name)
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(model.config, dtype=torch.bfloat16, attn_implementation="eager")
    with vx.patch.hf(empty) as handle:
        assert handle.describe() == expected
    stages = [expected.names(range(i, i + 1)) for i in range(len(expected.layers))]
    for i, names in enumerate(stages):
        assert {name for name in names if ".layers." in name} == {
            name for name in expected.names() if f".layers.{i}." in name
        }
        assert (expected.embedding.weight in names) == (
            i == 0 or (i == len(stages) - 1 and expected.head.weight == expected.embedding.weight)
        )
        assert (expected.norm.weight in names) == (i == len(stages) - 1)
        assert {rotary.inv_freq for rotary in expected.rotary} <= names
    stage = stages[1]
    for name in stage:
        owner, _, leaf = name.rpartition(".")
        module = empty.get_submodule(owner)
        if leaf in module._parameters:
            module._parameters[leaf] = torch.nn.Parameter(model.get_parameter(name).data)
    empty.tie_weights()
    with vx.patch.hf(empty) as handle:
        assert handle.describe() == expected


def test_nothing_changes_and_nobody_computes():
    model = tiny("llama").train()
    before = {name: (t.data_ptr(), t._version) for name, t in model.state_dict(keep_vars=True).items()}
    state = torch.random.get_rng_state()
    with vx.patch.hf(model) as handle:
        handle.describe()
    assert {name: (t.data_ptr(), t._version) for name, t in model.state_dict(keep_vars=True).items()} == before
    assert all(module.training for module in model.modules())
    assert torch.equal(torch.random.get_rng_state(), state)


def test_whoever_asks_in_inference_mode_is_told_the_same():
    with vx.patch.hf(tiny("qwen3")) as handle:
        expected = handle.describe()
    with vx.patch.hf(tiny("qwen3")) as handle, torch.inference_mode():
        assert handle.describe() == expected
    with torch.inference_mode(), vx.patch.hf(tiny("qwen3")) as handle:
        assert handle.describe() == expected


def test_described_again_where_modules_changed():
    model = tiny("llama")
    with vx.patch.hf(model) as handle:
        first = handle.describe()
        assert handle.describe() is first
        model.model.layers = model.model.layers[:1]
        model.config.num_hidden_layers = 1
        assert len(handle.describe().layers) == 1 and handle.describe().layers == first.layers[:1]
    with pytest.raises(RuntimeError, match="undone"):
        handle.describe()


def test_a_description_is_data():
    found, _ = described("mixtral")
    assert dataclasses.replace(found) == found and hash(found) == hash(dataclasses.replace(found))
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.kv_segment = 64


def test_a_projection_has_adapters():
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(tiny("llama"), peft.LoraConfig(r=4, lora_alpha=6, target_modules=["v_proj"]))
    with vx.patch.hf(tiny("llama")) as handle:
        plain = handle.describe()
    with vx.patch.hf(model) as handle:
        found = handle.describe()
        with model.disable_adapter():
            assert not handle.describe().layers[0].blocks[0].part.v.adapters
    v, name = found.layers[0].blocks[0].part.v, "model.layers.0.self_attn.v_proj"
    assert v.adapters == (Adapter(f"{name}.lora_A.default.weight", f"{name}.lora_B.default.weight", 1.5),)
    assert v.weight == f"{name}.base_layer.weight" and {of.down for of in v.adapters} < found.names()
    assert found.layers[0].blocks[0].part.q == plain.layers[0].blocks[0].part.q


class Other(modeling_llama.LlamaDecoderLayer):
    """What a layer might do next: exact in every batch, so patched, and nothing that a description knows."""

    __module__ = "transformers.models.llama.modeling_llama"

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        residual, hidden_states = hidden_states, self.input_layernorm(hidden_states)
        attended, _ = self.self_attn(hidden_states, position_embeddings=position_embeddings, **kwargs)
        return self.then(residual, attended, hidden_states)


OTHERS = {
    "side by side": (lambda self, x, a, h: x + (a + self.mlp(h)), "has no words"),
    "one after the other": (lambda self, x, a, h: x + self.mlp(self.post_attention_layernorm(a)), "has no words"),
    "a doubled stream": (lambda self, x, a, h: 2 * x + a, "has no words"),
    "a sum in place": (lambda self, x, a, h: (x + a).add_(self.mlp(h)), "has no words"),
    "an input that was scaled": (lambda self, x, a, h: x + a + self.mlp(h * 2), "has no words"),
}


@pytest.mark.parametrize("then,message", OTHERS.values(), ids=OTHERS)
def test_layers_of_another_form_have_no_words(then, message):
    model = tiny("llama")
    for layer in model.model.layers:
        layer.__class__ = type("Other", (Other,), {"then": then, "__module__": Other.__module__})
    with vx.patch.hf(model) as handle:
        for _ in range(2):
            with pytest.raises(NotDescribed, match=message):
                handle.describe()
