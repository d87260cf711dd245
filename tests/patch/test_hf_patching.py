"""patch.hf as an object: what it refuses and how it says so, and that it leaves no trace."""

import copy
import gc
import io
import pickle
import sys
import threading
import weakref

import pytest
import torch
import transformers
from families import alone, config_of, sequences, tiny
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.llama import modeling_llama

import vexact_ops as vx
from vexact_ops.patch import UnsupportedModule
from vexact_ops.testing import assert_bitwise


def traces(model):
    """Everything of a model that a patch could leave behind."""
    return {
        name: (type(m), sorted(m.__dict__), sorted(m._forward_hooks), sorted(m._modules), m.training)
        for name, m in model.named_modules()
    }


def stock_outputs(model):
    model.zero_grad()
    out = model(sequences()[0][None], labels=sequences()[0][None])
    out.loss.backward()
    return out.logits.detach(), out.loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)


# leaving no trace


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_undo_restores_the_stock_model_bit_for_bit(name):
    model = tiny(name)
    expected, before, config = stock_outputs(model), traces(model), copy.deepcopy(model.config)
    random_state = torch.get_rng_state()
    handle = vx.patch.hf(model)
    assert torch.equal(torch.get_rng_state(), random_state), "patching drew from the global random state"
    with pytest.raises(AssertionError):
        assert_bitwise(model(sequences()[0][None]).logits, expected[0])
    assert model.state_dict().keys() == copy.deepcopy(tiny(name)).state_dict().keys()
    handle.undo()
    handle.undo()
    assert traces(model) == before
    assert model.config.to_dict() == config.to_dict()
    assert_bitwise(stock_outputs(model), expected, "after undo")


def test_nothing_else_changes():
    config = config_of("llama")
    model, other = (AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval() for _ in range(2))
    expected = alone(other, sequences())
    classes = {cls: dict(vars(cls)) for cls in {type(m) for m in model.modules()}}
    functions = dict(vars(modeling_llama))
    registries = [dict(ALL_ATTENTION_FUNCTIONS)]
    registries.append(dict(transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS))
    with vx.patch.hf(model):
        assert_bitwise(alone(other, sequences()), expected, "another model with the same config object")
        assert other.loss_function is not model.loss_function
        assert model.config is config and config._attn_implementation == "eager"
        assert classes == {cls: dict(vars(cls)) for cls in classes}
        assert functions == vars(modeling_llama)
        assert registries[0] == dict(ALL_ATTENTION_FUNCTIONS)
        assert registries[1] == dict(transformers.masking_utils.ALL_MASK_ATTENTION_FUNCTIONS)


def test_nested_patches_undo_in_any_order():
    model, seqs = tiny("qwen3"), sequences()
    stock = alone(model, seqs)
    for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
        handles = [vx.patch.hf(model) for _ in range(3)]
        aligned = alone(model, seqs)
        for count, index in enumerate(order):
            assert_bitwise(alone(model, seqs), aligned)
            handles[index].undo()
            handles[index].undo()
            with pytest.raises(RuntimeError, match="has been undone"):
                handles[index].logprobs(seqs[0])
            assert ("forward" in model.__dict__) == (count < 2)
        assert_bitwise(alone(model, seqs), stock)


@pytest.mark.parametrize("share", ["layer", "mlp", "norm"])
def test_a_module_that_stands_in_two_places_keeps_its_weights(share):
    """As in decoders whose layers are run several times. Trying it on fake tensors once left them in the model."""
    model = tiny("llama")
    first, second = model.model.layers[:2]
    if share == "layer":
        model.model.layers[0] = second
    elif share == "mlp":
        first.mlp = second.mlp
    else:
        first.input_layernorm = model.model.norm
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    expected = model(sequences()[0][None], use_cache=False).logits
    with vx.patch.hf(model) as handle:
        handle.describe()
        for name, tensor in model.state_dict(keep_vars=True).items():
            assert tensor is before[name][0], name
            assert_bitwise(tensor, before[name][1], name)
        got = [model(seq[None], use_cache=False).logits for seq in sequences()[:2]]
        assert torch.allclose(got[0], expected, atol=1e-4)
        packed = torch.cat(sequences()[:2])[None]
        places = torch.cat([torch.arange(len(seq)) for seq in sequences()[:2]])[None]
        assert_bitwise(model(packed, position_ids=places, use_cache=False).logits, torch.cat(got, 1))


def test_an_exception_inside_the_block_undoes_the_patch():
    model, before = tiny("llama"), traces(tiny("llama"))
    with pytest.raises(KeyError, match="mine"), vx.patch.hf(model):
        raise KeyError("mine")
    assert traces(model) == before


def test_a_backend_that_is_not_here_is_no_fault_of_the_model_s():
    model = tiny("llama")
    before = {name: module.__dict__.get("forward") for name, module in model.named_modules()}
    with vx.use_backend("cuda"), pytest.raises(vx.BackendUnavailable, match="backend 'cuda'"):
        vx.patch.hf(model)
    assert {name: module.__dict__.get("forward") for name, module in model.named_modules()} == before
    vx.patch.hf(model).undo()


@pytest.mark.parametrize("release,said", [("5.23.1", 0), ("5.24.3", 0), ("5.25.0.dev0", 1), ("6.0", 1), ("local", 0)])
def test_a_transformers_that_no_test_has_seen_is_said_once(monkeypatch, caplog, release, said):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", release)
    for _ in range(2):
        vx.patch.hf(tiny("llama")).undo()
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("vexact")]
    assert lines == [f"patch.hf: {vx.patch.untested(release)}"] * said
    assert bool(vx.patch.untested(release)) == bool(said)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3"])
def test_what_the_caller_has_set_is_no_matter_for_the_trials(name):
    """A default device, autocast, inference mode: the small tensors that pieces are tried on are none of theirs."""
    ids = sequences()[0][None]
    with vx.patch.hf(tiny(name, torch.bfloat16)) as handle, torch.no_grad():
        report, described, expected = handle.report(), handle.describe(), handle.model(ids).logits
    for set_here in (
        lambda: torch.device("meta"),
        lambda: torch.autocast("cpu", dtype=torch.bfloat16),
        torch.inference_mode,
    ):
        model = tiny(name, torch.bfloat16)
        with set_here():
            handle = vx.patch.hf(model)
            assert (handle.report(), handle.describe()) == (report, described)
        with torch.no_grad():
            assert_bitwise(model(ids).logits, expected)


def test_other_options_and_parts_are_refused_while_patched():
    model = tiny("llama")
    with vx.patch.hf(model):
        with pytest.raises(ValueError, match=r"options: got .*64.*, but the model is patched with"):
            vx.patch.hf(model, kv_segment=64)
        with pytest.raises(ValueError, match="a part of a LlamaForCausalLM that is patched as a whole"):
            vx.patch.hf(model.model)
    with vx.patch.hf(model.model), pytest.raises(ValueError, match="its part model is already patched on its own"):
        vx.patch.hf(model)
    with pytest.raises(ValueError, match="kv_segment: got 63, expected None or a multiple of 64"):
        vx.patch.hf(model, kv_segment=63)
    assert traces(model) == traces(tiny("llama"))


def test_two_models_in_two_threads():
    models, seqs = [tiny("llama", seed=1), tiny("qwen3", seed=2)], sequences((5, 2))
    stock = [alone(m, seqs) for m in models]
    with vx.patch.hf(models[0]), vx.patch.hf(models[1]):
        aligned = [alone(m, seqs) for m in models]
    errors, start = [], threading.Barrier(2)

    def work(index):
        try:
            start.wait()
            for _ in range(4):
                with vx.patch.hf(models[index]):
                    assert_bitwise(alone(models[index], seqs), aligned[index], f"patched {index}")
                assert_bitwise(alone(models[index], seqs), stock[index], f"stock {index}")
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_two_threads_may_nest_on_one_model():
    model, before, start, errors = tiny("llama"), traces(tiny("llama")), threading.Barrier(4), []

    def work():
        try:
            start.wait()
            for _ in range(5):
                vx.patch.hf(model, strict=False).undo()
        except BaseException as error:
            errors.append(error)

    with vx.patch.hf(model):  # the patch itself wants the model at rest; what nests only counts
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors and "forward" in model.__dict__
    assert traces(model) == before


def test_copies_and_pickles():
    model, seqs = tiny("llama"), sequences()
    stock = alone(model, seqs)
    with vx.patch.hf(model):
        for copier in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
            with pytest.raises(TypeError, match="undo its patch first"):
                copier(model)
        state = copy.deepcopy(model.state_dict())
    assert_bitwise(alone(copy.deepcopy(model), seqs), stock)
    assert_bitwise(alone(pickle.loads(pickle.dumps(model)), seqs), stock)
    other = tiny("llama", seed=3)
    other.load_state_dict(state)
    assert_bitwise(alone(other, seqs), stock)


def test_a_patched_model_can_be_saved(tmp_path):
    model = tiny("gemma2")
    with vx.patch.hf(model):
        model.save_pretrained(tmp_path)
        expected = alone(model, sequences())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    assert loaded.config.to_dict().keys() == model.config.to_dict().keys()
    assert "vexact" not in (tmp_path / "config.json").read_text()
    with vx.patch.hf(loaded):
        assert_bitwise(alone(loaded, sequences()), expected)


def test_a_forward_replaced_after_the_patch_is_not_lost():
    model = tiny("llama")
    handle = vx.patch.hf(model)
    mine = model.model.norm.forward
    model.model.norm.forward = lambda x: mine(x)
    with pytest.raises(RuntimeError, match="replaced the forward of a LlamaRMSNorm after the patch"):
        handle.undo()
    model.model.norm.forward = mine
    handle.undo()
    assert traces(model) == traces(tiny("llama"))


def test_a_revision_for_tensors_covers_those_that_were_registered_since():
    model = tiny("llama")
    with vx.patch.hf(model) as handle:
        first, before = handle.revision(), handle.describe()
        down = model.model.layers[0].mlp.down_proj
        assert before.layers[0].blocks[1].part.down.bias is None
        assert handle.revision(tensors=True) == first and handle.describe() is before
        down.register_buffer("mine", torch.ones(3))
        assert handle.revision() == first  # what a forward looks for
        assert handle.revision(tensors=True) > first
        del down.mine
        first = handle.revision(tensors=True)
        down.bias = nn.Parameter(torch.ones_like(down.weight[:, 0]))
        second = handle.revision()
        assert second != first and handle.revision(tensors=True) == second
        assert handle.describe().layers[0].blocks[1].part.down.bias == "model.layers.0.mlp.down_proj.bias"
        model.lm_head.bias = nn.Parameter(torch.ones_like(model.lm_head.weight[:, 0]))
        third = handle.revision()
        assert third != second and handle.describe().head.bias == "lm_head.bias"
        model.lm_head.bias = None
        assert handle.revision(tensors=True) != third and handle.describe().head.bias is None
        model(torch.tensor([[3, 1, 4]]))
    assert not any("_vexact" in module.__dict__ for module in model.modules())


def test_a_bias_that_comes_after_the_patch_is_not_passed_over():
    """Without a word from anybody: the next forward covers it."""
    model, ids = tiny("llama"), torch.tensor([[3, 1, 4, 1, 5]])
    with vx.patch.hf(model) as handle:
        before = handle.logprobs(ids)
        up = model.model.layers[1].mlp.up_proj
        up.bias = nn.Parameter(torch.ones_like(up.weight[:, 0]))
        after = handle.logprobs(ids)
        assert not torch.equal(after, before)
        model.lm_head.bias = nn.Parameter(torch.linspace(-3, 3, len(model.lm_head.weight)))
        biased = handle.logprobs(ids)
        assert not torch.isclose(biased, after, atol=0.01)[:, :-1].any()
        fresh = tiny("llama")
        fresh.model.layers[1].mlp.up_proj.bias, fresh.lm_head.bias = up.bias, model.lm_head.bias
        with vx.patch.hf(fresh) as other:
            assert_bitwise(biased, other.logprobs(ids))
        model.lm_head.bias = None
        assert_bitwise(handle.logprobs(ids), after)
        up.bias = None
        assert_bitwise(handle.logprobs(ids), before)


def test_a_dropped_model_is_freed():
    model = tiny("llama")
    vx.patch.hf(model)
    ref = weakref.ref(model)
    del model
    gc.collect()
    assert ref() is None


# the report


def test_report_names_every_module():
    model = tiny("gemma2")
    with vx.patch.hf(model) as handle:
        rows = handle.report()
        assert {r.path for r in rows} == {name for name, _ in model.named_modules()}
        ops = {r.path: r.replacement for r in rows}
        assert ops["model.layers.1.mlp.up_proj"] == "linear"
        assert ops["model.layers.0.self_attn"] == "attention_varlen, attention_paged, rope"
        assert ops["model.layers.0.mlp"] == "silu_mul" and ops["model.rotary_emb"] == "rope_cos_sin"
        assert ops["model.embed_tokens"] == "" and ops["lm_head"] == "linear_logits"
        assert next(r.note for r in rows if r.path == "model.norm") == "gemma"
        text = str(rows)
        assert "model.layers.*.mlp.up_proj x2" in text and "a lookup is exact" in text
        assert len(text.splitlines()) < len(rows)
        assert "<vexact patch of Gemma2ForCausalLM, active" in repr(handle)
    assert "undone" in repr(handle)


def test_report_tells_of_frequencies_that_a_cast_has_rounded():
    model = tiny("llama").to(torch.bfloat16)
    with vx.patch.hf(model) as handle:
        notes = {r.path: r.note for r in handle.report()}
        said = "inv_freq was rounded to bfloat16: computed again from its config"
        assert notes["model.rotary_emb"] == said


# refusals


def refused(model, *patterns, **options):
    """The refusal's message; the model must be as it was."""
    before = traces(model)
    with pytest.raises(UnsupportedModule) as caught:
        vx.patch.hf(model, **options)
    assert isinstance(caught.value, ValueError)
    assert traces(model) == before
    for pattern in patterns:
        assert pattern in str(caught.value), str(caught.value)
    return str(caught.value)


class Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base, self.a, self.b = base, nn.Linear(32, 2, bias=False), nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


class Quantised(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight.round())


class Subclassed(torch.Tensor):
    pass


def test_all_uncovered_modules_are_named_at_once():
    model = tiny("llama", num_hidden_layers=3)
    layers = model.model.layers
    for layer in layers:
        layer.input_layernorm = nn.PReLU()
    layers[0].self_attn.q_proj = Lora(layers[0].self_attn.q_proj)
    layers[1].mlp.up_proj = Quantised(32, 48)
    layers[2].mlp.down_proj.weight = nn.Parameter(torch.zeros(32, 48).as_subclass(Subclassed))
    layers[2].self_attn.o_proj = nn.Conv1d(4, 4, 3)
    layers[1].self_attn.attention_dropout = 0.1
    layers[0].extra = nn.Dropout(0.2)
    message = refused(
        model,
        "model.layers.0.input_layernorm (PReLU) and 2 more: no module of transformers",
        "model.layers.2.input_layernorm",
        "model.layers.0.self_attn.q_proj (Lora)",
        "model.layers.1.mlp.up_proj (Quantised): a linear layer with a forward",
        "model.layers.2.mlp.down_proj (Linear): its weight is a Subclassed",
        "model.layers.2.self_attn.o_proj (Conv1d)",
        "model.layers.1.self_attn (LlamaAttention): attention_dropout is 0.1",
        "model.layers.0.extra (Dropout): p is 0.2",
    )
    assert "model.norm" not in message


@pytest.mark.parametrize("rope", ["dynamic", "longrope"])
def test_frequencies_that_depend_on_the_batch_are_refused(rope):
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 2.0, "original_max_position_embeddings": 64}
    if rope == "longrope":
        parameters |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model = tiny("llama", rope_parameters=parameters)
    refused(model, f"model.rotary_emb (LlamaRotaryEmbedding): rope type '{rope}'", "longest sequence of the batch")


@pytest.mark.parametrize("rope", ["linear", "llama3", "yarn"])
def test_fixed_rope_scalings_are_covered(rope):
    parameters = {"rope_type": rope, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    if rope == "llama3":
        parameters |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    model, seqs = tiny("llama", rope_parameters=parameters), sequences()
    stock = alone(model, seqs)
    with vx.patch.hf(model):
        torch.testing.assert_close(alone(model, seqs), stock, rtol=1e-4, atol=1e-4)


OPT = {"ffn_dim": 48, "word_embed_proj_dim": 32}


@pytest.mark.parametrize(
    "name,changes,names",
    [
        (
            "bloom",
            {"n_head": 4},
            ["transformer (BloomModel): it does not run on a small batch"],
        ),
        ("phimoe", {"num_local_experts": 4}, ["(PhimoeTopKRouter) and 1 more: a linear layer with a forward"]),
        ("mamba", {}, ["backbone.layers.0.mixer.conv1d (Conv1d)", "backbone.layers.0.mixer (MambaMixer)"]),
        (
            "opt",
            OPT,
            ["(root) (OPTForCausalLM): it is more than a decoder", "its forward reads 'decoder' of its OPTModel"],
        ),
        ("gpt_oss", {"swiglu_limit": 6.0}, ["GptOssExperts) and 1 more: experts whose", "and limit 6.0, "]),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 9},
            ["mlp.gate (Qwen3MoeTopKRouter) and 1 more: it chooses 9 of 8 experts"],
        ),
        ("gemma3_text", {"use_bidirectional_attention": True}, ["self_attn (Gemma3Attention)", "not causal"]),
        ("llama", {"hidden_act": "mish"}, ["model.layers.0.mlp", "aten.mish"]),
    ],
)
def test_families_that_are_not_covered(name, changes, names):
    if name not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    message = refused(tiny(name, **changes), *names)
    for leak in ("Hidden", "MoeModelOutputWithPast", "size of tensor", "could not be tried", "positional argument"):
        assert leak not in message


def test_the_exception_of_a_trial_is_the_cause(caplog):
    with caplog.at_level("DEBUG", "vexact_ops.patch"), pytest.raises(UnsupportedModule) as caught:
        vx.patch.hf(tiny("opt", **OPT))
    assert isinstance(caught.value.__cause__, AttributeError)
    assert "(root) (OPTForCausalLM): it is more than a decoder" in caplog.text


def test_heads_that_the_model_cannot_rotate_are_refused():
    """Llama's code rotates whole heads: tables of a part of one raise, and must not begin to work by the patch."""
    model = tiny("llama", rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5})
    tables = model.model.rotary_emb(torch.zeros(1, 3, 32), torch.arange(3)[None])
    if tables[0].shape[-1] == 16:  # a version of transformers that makes whole ones
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq[:4].clone()
    with pytest.raises(RuntimeError, match="size of tensor"):
        alone(model, sequences())
    refused(
        model, "model.layers.0.self_attn (LlamaAttention)", "rotates whole heads alone, but gets tables of 8 for heads"
    )
    with pytest.raises(RuntimeError, match="size of tensor"):
        alone(model, sequences())


def test_encoder_decoders_are_refused_as_such():
    sizes = {"d_model": 32, "d_ff": 48, "num_layers": 2, "num_heads": 4, "d_kv": 8, "vocab_size": 61}
    with pytest.raises(ValueError, match="got T5ForConditionalGeneration, an encoder and a decoder"):
        vx.patch.hf(transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes)))


def test_a_relu_feed_forward_is_exact_and_stays():
    model, seqs = tiny("llama", hidden_act="relu2"), sequences()
    with vx.patch.hf(model) as handle:
        assert {r.replacement for r in handle.report() if r.path.endswith(".mlp")} == {""}
        assert_bitwise(model(seqs[0][None].expand(5, -1)).logits[3], alone(model, seqs)[0])


class Changed(modeling_llama.LlamaDecoderLayer):
    """What another version of transformers might do: the code looks known from outside, but reduces in its forward."""

    def forward(self, hidden_states, **kwargs):
        return super().forward(hidden_states, **kwargs) * hidden_states.softmax(-1).mean()


class ScaledNorm(modeling_llama.LlamaRMSNorm):
    def forward(self, x):
        return 1.01 * super().forward(x)


class ScaledRotary(modeling_llama.LlamaRotaryEmbedding):
    def forward(self, x, position_ids):
        return tuple(0.5 * t for t in super().forward(x, position_ids))


class Biased(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings, attention_mask, cache=None, past_key_values=None, **kwargs):
        attend = ALL_ATTENTION_FUNCTIONS.get_interface("eager", None)
        x = hidden_states[:, None]
        return attend(self, x, x, x, attention_mask, bias=x, **kwargs)[0].flatten(2), None


for cls in (Changed, ScaledNorm, ScaledRotary, Biased):
    cls.__module__ = "transformers.models.another.modeling_another"


def test_code_that_only_looks_known_is_refused():
    model = tiny("llama")
    model.model.layers[1].__class__ = Changed
    refused(model, "model.layers.1 (Changed): runs aten._softmax, aten.mean outside the aligned ops")
    model = tiny("llama")
    model.model.norm.__class__ = ScaledNorm
    refused(model, "model.norm (ScaledNorm): not a root-mean-square norm that an aligned op computes")
    model = tiny("llama")
    model.model.rotary_emb.__class__ = ScaledRotary
    refused(model, "model.rotary_emb (ScaledRotary): a rotary embedding whose tables no aligned op computes")
    model = tiny("llama")
    model.model.layers[0].self_attn.__class__ = Biased
    refused(model, "model.layers.0.self_attn (Biased): it asks attention for bias")


def test_a_window_in_the_mask_alone_is_refused():
    model = tiny("mistral")
    model.model.layers[1].self_attn.config = config_of("mistral", sliding_window=3)
    refused(model, "model.layers.1.self_attn (MistralAttention)", "its mask has a window of")


def test_odd_dtypes_are_refused():
    refused(tiny("llama").to(torch.float64), "it does not run on a small batch (TypeError")
    model = tiny("llama", torch.bfloat16)
    model.model.norm.float()
    refused(
        model,
        "model.norm (LlamaRMSNorm): it does not run on a small batch (TypeError: rmsnorm: weight: got dtype float32",
    )


def test_instances_with_a_forward_of_their_own_are_refused():
    model = tiny("llama")
    model.lm_head.forward = lambda x: x
    refused(model, "lm_head (Linear): its forward has been replaced on this instance")
    model = tiny("llama")
    nn.utils.parametrize.register_parametrization(model.lm_head, "weight", nn.Identity())
    refused(model, "lm_head (ParametrizedLinear): a linear layer with a forward or a parametrization")


def test_not_a_decoder():
    with pytest.raises(TypeError, match="got Linear, expected a transformers PreTrainedModel"):
        vx.patch.hf(nn.Linear(2, 2))
    model = AutoModelForTokenClassification.from_config(config_of("llama"))
    with pytest.raises(ValueError, match=r"LlamaForTokenClassification .* expected a decoder, or a causal"):
        vx.patch.hf(model)


def test_a_loss_of_your_own_is_kept():
    model, seqs = tiny("llama"), sequences()
    model.loss_function = mine = lambda logits, labels, vocab_size, **kwargs: logits.sum() * 0 + 7
    with vx.patch.hf(model) as handle:
        assert model(seqs[0][None], labels=seqs[0][None]).loss.item() == 7
        assert "your own function, not covered" in handle.report()[0].note
    assert model.loss_function is mine
    model.loss_function = lambda logits, labels, vocab_size, weight, **kwargs: logits.sum() * 0 + weight
    with vx.patch.hf(model):
        assert model(seqs[0][None], labels=seqs[0][None], weight=5, num_items_in_batch=3).loss.item() == 5
        with pytest.raises(TypeError, match=r"^LlamaModel: wait: got an argument that"):
            model(seqs[0][None], labels=seqs[0][None], weight=5, wait=6)
