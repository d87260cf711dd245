"""LoRA on a patched model, whoever came first; and what is put into a model after its patch."""

import contextlib
import gc

import pytest
import torch
from conftest import devices
from families import (
    FORMS,
    alone,
    check_forms,
    family,
    gradients,
    in_padded_batch,
    pack,
    sequences,
    tiny,
)
from test_hf_patching import traces
from torch import nn

import vexact_ops as vx
from vexact_ops.patch import UnsupportedModule
from vexact_ops.testing import assert_bitwise, check_repeatable

peft = pytest.importorskip("peft")

WIDE = {"hidden_size": 256, "intermediate_size": 512}  # wide enough for stock products to see the batch, in fp32
KINDS = pytest.mark.parametrize("device,dtype", devices())
ORDERS = pytest.mark.parametrize("first", ["patch", "PEFT"])


def adapt(model, seed=0, name="default", **options):
    """The model with an adapter that does something, in PEFT's wrapper."""
    config = peft.LoraConfig(**{"r": 4, "lora_alpha": 6, "target_modules": "all-linear", **options})
    if isinstance(model, peft.PeftModel):
        model.add_adapter(name, config)
    else:
        model = peft.get_peft_model(model, config, adapter_name=name)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for path, p in model.named_parameters():
            if f".{name}." in f"{path}." and "lora" in path:
                p.copy_(torch.randn(p.shape, generator=g) * 0.3)
    return model.eval()


@contextlib.contextmanager
def adapted(model, first, **options):
    """The wrapped model and the patch's handle, in either order."""
    if first == "patch":
        with vx.patch.hf(model) as handle:
            yield adapt(model, **options), handle
    else:
        wrapped = adapt(model, **options)
        with vx.patch.hf(wrapped) as handle:
            yield wrapped, handle


# the promise


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3", "gemma2", "qwen3_moe")])
@ORDERS
@KINDS
def test_a_sequence_has_the_same_logits_in_every_form(name, first, device, dtype):
    model = tiny(name, dtype, device=device, **(WIDE if name == "qwen3" else {}))
    layers = ["q_proj", "o_proj"] if name == "qwen3_moe" else "all-linear"  # that would be its router and experts too
    with adapted(model, first, target_modules=layers) as (wrapped, handle):
        forms = FORMS if name == "qwen3" else {n: FORMS[n] for n in ("left padded", "packed by positions", "paged")}
        check_forms(model, sequences(device=device), forms)
        rows = {row.path: row for row in handle.report()}
        assert rows["model.layers.1.self_attn.q_proj.lora_A.default"].replacement == "linear"
        assert rows["model.layers.1.self_attn.q_proj"].note.startswith("LoRA: base + scaling * B(A(x))")
        ids = sequences(device=device)[0][None]
        assert_bitwise(wrapped(ids, use_cache=False).logits[0], alone(model, [ids[0]])[0], "through PEFT")


def test_stock_lora_is_caught():
    model, seqs = tiny("qwen3", **WIDE), sequences((40, 1, 30))
    adapt(model)
    with torch.no_grad():
        with pytest.raises(AssertionError, match="differ"):
            assert_bitwise(in_padded_batch(model, seqs, "right"), alone(model, seqs))
        with vx.patch.hf(model):
            assert_bitwise(in_padded_batch(model, seqs, "right"), alone(model, seqs))


@ORDERS
@pytest.mark.parametrize("options", [{}, {"use_rslora": True, "lora_bias": True}], ids=["plain", "rslora, bias"])
def test_it_is_the_function_that_peft_computes(first, options):
    model, seqs = tiny("qwen3", attention_bias=True), sequences()
    wrapped = adapt(tiny("qwen3", attention_bias=True), **options)
    stock = alone(wrapped, seqs)
    expected = gradients(wrapped, stock[0].sum(), None)
    with adapted(model, first, **options) as (wrapped, _):
        got = alone(wrapped, seqs)
        torch.testing.assert_close(got, stock, rtol=1e-4, atol=1e-4)
        grads = gradients(wrapped, got[0].sum(), None)
        assert grads.keys() == expected.keys() and all("lora_" in name for name in grads)
        for name, gradient in grads.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-3, atol=1e-4)


@ORDERS
@KINDS
def test_training_rows_have_their_own_gradients_and_weights_repeat(first, device, dtype):
    model, seqs = tiny("qwen3", dtype, device=device, **WIDE).train(), sequences(device=device)
    ids, cu, _ = pack(seqs)
    lengths = [len(s) for s in seqs]
    with adapted(model, first) as (wrapped, handle):
        wrapped.train()
        x = model.get_input_embeddings()(ids).detach().requires_grad_()

        def dx(x, **how):
            return torch.autograd.grad(wrapped(inputs_embeds=x, use_cache=False, **how).logits.sum(), x)[0][0]

        whole = dx(x, cu_seq_lens_q=cu)
        single = [dx(part.detach().requires_grad_()) for part in x.split(lengths, 1)]
        assert_bitwise(list(whole.split(lengths)), single)

        def run():
            values = handle.logprobs(ids, cu_seqlens=cu)
            return values, *gradients(wrapped, values.sum(), None).values()

        check_repeatable(run, threads=(1, 2))


# PEFT's switches


@ORDERS
def test_adapters_come_and_go(first):
    model, seqs = tiny("qwen3", **WIDE), sequences((9, 4))
    with vx.patch.hf(tiny("qwen3", **WIDE)) as handle:
        base = alone(handle._patch.model, seqs)
    with adapted(model, first) as (wrapped, _):
        default = alone(model, seqs)
        assert (default[0] != base[0]).any()
        with wrapped.disable_adapter():
            assert_bitwise(alone(model, seqs), base, "disabled")
        adapt(wrapped, seed=1, name="other")
        assert_bitwise(alone(model, seqs), default, "another one is there")
        wrapped.set_adapter("other")
        other = alone(model, seqs)
        assert (other[0] != default[0]).any()
        check_forms(model, seqs, {"left padded": FORMS["left padded"]})
        wrapped.base_model.set_adapter(["default", "other"])
        assert all((alone(model, seqs)[0] != one[0]).any() for one in (base, default, other))
        check_forms(model, seqs, {n: FORMS[n] for n in ("left padded", "paged")})
        wrapped.delete_adapter("other")
        wrapped.set_adapter("default")
        assert_bitwise(alone(model, seqs), default, "deleted")
        assert_bitwise(alone(wrapped.unload(), seqs), base, "unloaded")


@ORDERS
def test_merged_weights_are_dense_ones(first):
    model, seqs = tiny("qwen3", **WIDE), sequences((9, 4))
    with adapted(model, first) as (wrapped, _):
        wrapped.merge_adapter()
        merged = alone(model, seqs)
        state = {n.replace(".base_layer", ""): v.clone() for n, v in model.state_dict().items() if "lora" not in n}
        check_forms(model, seqs, {n: FORMS[n] for n in ("left padded", "paged")})
        wrapped.unmerge_adapter()
        check_forms(model, seqs, {"left padded": FORMS["left padded"]})
        wrapped.merge_adapter()
        assert_bitwise(alone(wrapped.merge_and_unload(), seqs), merged := alone(model, seqs))
        check_forms(model, seqs, {"left padded": FORMS["left padded"]})
    dense = tiny("qwen3", **WIDE)
    dense.load_state_dict(state)
    with vx.patch.hf(dense):
        torch.testing.assert_close(alone(dense, seqs), merged, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("asked", ["patch", "numerics", "describe"])
def test_merged_adapters_that_are_disabled_are_taken_out(asked):
    """PEFT does so in the next forward: in one on fake tensors it noted that it had been done, and it had not."""
    model, seqs = tiny("qwen3"), sequences((9, 4))
    with vx.patch.hf(tiny("qwen3")) as handle:
        base = alone(handle.model, seqs)
    wrapped = adapt(model)
    with contextlib.ExitStack() as stack:
        if asked != "patch":
            handle = stack.enter_context(vx.patch.hf(wrapped))
        wrapped.merge_adapter()
        with wrapped.disable_adapter():
            if asked == "patch":
                stack.enter_context(vx.patch.hf(wrapped))
            elif asked == "numerics":
                handle.numerics()
            else:
                with contextlib.suppress(vx.patch.NotDescribed):
                    handle.describe()
            assert all(m.merged for m in wrapped.modules() if hasattr(m, "merged_adapters"))
            torch.testing.assert_close(alone(model, seqs), base, rtol=1e-4, atol=1e-4)
        assert not any(m.merged for m in wrapped.modules() if hasattr(m, "merged_adapters"))


def test_a_batch_of_several_adapters():
    model, seqs = tiny("qwen3", **WIDE), [s for s in sequences((6, 6, 6))]
    with adapted(model, "patch") as (wrapped, _):
        adapt(wrapped, seed=1, name="other")
        names = ["other", "__base__", "default"]
        got = wrapped(torch.stack(seqs), adapter_names=names, use_cache=False).logits
        expected = []
        for name, s in zip(names, seqs):
            if name == "__base__":
                with wrapped.disable_adapter():
                    expected += alone(model, [s])
            else:
                wrapped.set_adapter(name)
                expected += alone(model, [s])
        assert_bitwise(list(got), expected)


@pytest.mark.parametrize("saved", ["embed_tokens", "lm_head", "norm"])
def test_modules_to_save(saved):
    model, seqs = tiny("llama", tie_word_embeddings=False), sequences((9, 4))
    with vx.patch.hf(model):
        base = alone(model, seqs)
        if saved != "embed_tokens":  # PEFT copies them
            with pytest.raises(TypeError, match="modules_to_save: wrap first, then patch"):
                adapt(model, modules_to_save=[saved])
    model = tiny("llama", tie_word_embeddings=False)
    with adapted(model, "PEFT", modules_to_save=[saved], target_modules=["q_proj"]) as (wrapped, _):
        with torch.no_grad():
            for name, p in wrapped.named_parameters():
                if "modules_to_save" in name:
                    p.mul_(1.25)
        check_forms(model, seqs, {n: FORMS[n] for n in ("left padded", "paged")})
        values = gradients(wrapped, alone(model, seqs)[0].sum(), None)
        assert all(g.abs().sum() > 0 for name, g in values.items() if "modules_to_save" in name)
        assert any("modules_to_save" in name for name in values)
        with wrapped.disable_adapter():
            assert_bitwise(alone(model, seqs), base, "disabled")


# what is not covered is named, in either order


REFUSED = {
    "DoRA": ({"use_dora": True}, r"self_attn\.q_proj \(Linear\).*: its adapter 'default' is of the form Dora"),
    "dropout": ({"lora_dropout": 0.1}, r"q_proj\.lora_dropout\.default \(Dropout\).*: p is 0\.1: a dropped value"),
    "embedding": (
        {"target_modules": ["embed_tokens"]},
        r"embed_tokens \(Embedding\): PEFT's lora on a layer of type Embedding: LoRA of linear layers is what",
    ),
    "output layer": ({"target_modules": ["lm_head"]}, r"lm_head \(Linear\): LoRA of the output layer"),
}


@pytest.mark.parametrize("kind", REFUSED)
@ORDERS
def test_forms_that_are_not_covered(kind, first):
    options, message = REFUSED[kind]
    model, seqs = tiny("llama", tie_word_embeddings=False), sequences((5,))
    if first == "PEFT":
        wrapped = adapt(model, **options)
        before = traces(model)
        with pytest.raises(UnsupportedModule, match=message):
            vx.patch.hf(wrapped)
        assert traces(model) == before
        return
    with vx.patch.hf(model) as handle:
        base = alone(model, seqs)
        wrapped = adapt(model, **options)
        for call in (wrapped, model, model.model):
            with pytest.raises(UnsupportedModule, match=message):
                call(seqs[0][None])
        with pytest.raises(UnsupportedModule, match=message):
            handle.logprobs(seqs[0])
        with pytest.raises(UnsupportedModule, match=message):
            vx.patch.hf(model)
        wrapped.unload()
        assert_bitwise(alone(model, seqs), base, "taken out again")
    assert traces(model) == traces(tiny("llama", tie_word_embeddings=False))


def test_an_adapter_of_another_form_is_noticed_before_it_is_active():
    model = tiny("llama")
    with adapted(model, "patch") as (wrapped, _):
        alone(model, sequences((5,)))
        adapt(wrapped, name="other", use_dora=True)
        with pytest.raises(UnsupportedModule, match="its adapter 'other' is of the form Dora"):
            alone(model, sequences((5,)))


def test_other_methods_of_peft():
    seqs = sequences((5,))
    ia3 = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    with pytest.raises(UnsupportedModule, match=r"k_proj \(Linear\).*PEFT's ia3 on a layer of type Linear"):
        vx.patch.hf(peft.get_peft_model(tiny("llama"), ia3))
    prompt = peft.PromptTuningConfig(num_virtual_tokens=2, task_type="CAUSAL_LM")
    with pytest.raises(ValueError, match="PeftModelForCausalLM with PROMPT_TUNING"):
        vx.patch.hf(peft.get_peft_model(tiny("llama"), prompt))
    model = tiny("qwen3_moe")
    experts = peft.LoraConfig(r=2, target_modules=[], target_parameters=["mlp.experts.gate_up_proj"])
    with vx.patch.hf(model):
        peft.get_peft_model(model, experts)
        with pytest.raises(UnsupportedModule, match=r"mlp\.experts"):
            alone(model, seqs)


PROMPTS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "p-tuning": lambda: peft.PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
    "a prefix": lambda: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"),
}


@pytest.mark.parametrize("kind", PROMPTS)
def test_learned_prompts_are_noticed_later(kind):
    """Log-probabilities are formed in the model's own call, which knows no wrapper."""
    model, ids = tiny("llama"), sequences((5,))[0]
    score = vx.patch.Score(ids[1:4], torch.arange(3))
    with vx.patch.hf(model) as handle:
        expected, numbers = handle.logprobs(ids), handle.numerics()
        wrapped = peft.get_peft_model(model, PROMPTS[kind]())
        said = "the model is in a PeftModelForCausalLM with P[A-Z_]+, which puts states of its own before the prompt"
        for call in (
            lambda: handle.logprobs(ids),
            handle.numerics,
            lambda: wrapped(ids[None], use_cache=False, vexact_score=score),
        ):
            with pytest.raises(RuntimeError, match=said):
                call()
        assert wrapped(ids[None]).logits.shape[1] == 5 + (0 if kind == "a prefix" else 3), "the model runs as it is"
        with wrapped.disable_adapter():
            assert_bitwise(handle.logprobs(ids), expected)
        with pytest.raises(RuntimeError, match=said):
            handle.logprobs(ids)
        wrapped = None
        gc.collect()
        assert_bitwise(handle.logprobs(ids), expected)
        assert handle.numerics() == numbers


# any other child


class Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return 2 * self.inner(x)


def test_a_layer_that_is_put_in_is_covered():
    model, seqs = tiny("qwen3", **WIDE), sequences()
    with vx.patch.hf(model) as handle:
        before = alone(model, seqs)
        mlp = model.model.layers[1].mlp
        new = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features)
        old, mlp.up_proj = mlp.up_proj, new
        assert all((a != b).any() for a, b in zip(alone(model, seqs), before))
        check_forms(model, seqs)
        assert "forward" not in old.__dict__ and "forward" in new.__dict__
        mlp.up_proj = old
        assert_bitwise(alone(model, seqs), before)
        assert "forward" not in new.__dict__
        model.model.layers.append(model.model.layers.pop(0))  # the other way round
        values = handle.logprobs(seqs[0])
        assert (values != 0).any()
    assert all("forward" not in m.__dict__ for m in [new, *model.modules()])


@pytest.mark.parametrize("where", ["model.layers.0.mlp", "model.layers.1.self_attn.o_proj", "model.norm", "model"])
def test_a_module_that_is_put_in_is_refused_by_name(where):
    model, seqs = tiny("llama"), sequences((5,))
    with vx.patch.hf(model) as handle:
        before = alone(model, seqs)
        path, _, name = where.rpartition(".")
        parent = model.get_submodule(path)
        old = getattr(parent, name)
        setattr(parent, name, Doubled(old))
        for call in (lambda: alone(model, seqs), lambda: handle.logprobs(seqs[0])):
            with pytest.raises(ValueError, match=rf"{where} \(Doubled\)|got LlamaForCausalLM"):
                call()
        setattr(parent, name, old)
        assert_bitwise(alone(model, seqs), before)
    assert traces(model) == traces(tiny("llama"))


def test_a_parametrization_is_refused_by_name():
    model, seqs = tiny("llama"), sequences((5,))
    with vx.patch.hf(model):
        before = alone(model, seqs)
        layer = model.model.layers[0].mlp.down_proj
        nn.utils.parametrize.register_parametrization(layer, "weight", nn.Identity())
        with pytest.raises(UnsupportedModule, match=r"layers\.0\.mlp\.down_proj .*a parametrization"):
            alone(model, seqs)
        nn.utils.parametrize.remove_parametrizations(layer, "weight")
        assert_bitwise(alone(model, seqs), before)


def test_what_is_not_strict_says_so_in_the_report():
    model, seqs = tiny("llama"), sequences((5,))
    with vx.patch.hf(model, strict=False) as handle:
        model.model.norm = nn.PReLU()
        alone(model, seqs)
        notes = {row.path: row.note for row in handle.report()}
        assert notes["model.norm"].startswith("NOT COVERED: no module of transformers")


def test_a_compiled_model_notices_too():
    """A whole graph says what to do; a broken one runs the model's own forward uncompiled, which covers it."""
    model, seqs = tiny("llama", num_hidden_layers=1), sequences((5,))
    try:
        with vx.patch.hf(model), torch.no_grad():
            compiled = torch.compile(model, backend="eager", fullgraph=True)
            assert_bitwise(compiled(seqs[0][None], use_cache=False).logits[0], alone(model, seqs)[0])
            mlp = model.model.layers[0].mlp
            mlp.up_proj = nn.Linear(mlp.up_proj.in_features, mlp.up_proj.out_features)
            with pytest.raises(Exception, match=r"call the model once without torch\.compile"):
                compiled(seqs[0][None], use_cache=False)
            expected = alone(model, seqs)
            assert "forward" in mlp.up_proj.__dict__
            assert_bitwise(compiled(seqs[0][None], use_cache=False).logits[0], expected[0])
    finally:
        torch._dynamo.reset()
