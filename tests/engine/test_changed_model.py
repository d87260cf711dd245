"""Somebody else changes the model of an engine: its numbers, hooks, tensors, modules. It is noticed, and what is
computed from then on is what an engine would compute that is made now."""

import copy
import sys
from pathlib import Path

import pytest
import torch
from engine_models import bits, build, prompts

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams, WeightsTorn

sys.path.insert(0, str(Path(__file__).parents[1] / "patch"))
from families import tiny

sys.path.pop(0)

CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
PROMPTS = prompts(3, longest=20)
PARAMS = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)


def ask(engine):
    return [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def old():
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        return ask(engine)


def place(model, path):
    for name in path.split("."):
        model = model[int(name)] if name.isdigit() else getattr(model, name)
    return model


@pytest.mark.parametrize("trains", [False, True], ids=["at-once", "after-a-forward"])
@pytest.mark.parametrize(
    "family, path, name, value",
    [
        ("Qwen3Moe", "model.layers.1.mlp.gate", "top_k", 1),
        ("Gemma2", "config", "final_logit_softcapping", 0.5),
        ("Gemma2", "model.layers.0.self_attn", "attn_logit_softcapping", 0.5),
        ("Llama", "model.norm", "variance_epsilon", 1.0),
        ("Llama", "model.layers.1.self_attn", "scaling", 2.0),
        ("Llama", "model.rotary_emb", "attention_scaling", 1.5),
    ],
)
def test_a_number_that_others_set_is_the_number(family, path, name, value, trains):
    """A trainer's forward through the same model has it from then on; the engine's is made of what was found before."""
    model, other = build(family), build(family)
    setattr(place(other, path), name, value)
    with Engine.from_pretrained(other, config=CONFIG) as engine:
        expected = ask(engine)
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        first, before = ask(engine), getattr(place(model, path), name)
        setattr(place(model, path), name, value)
        if trains:
            with torch.no_grad():
                model(torch.tensor([PROMPTS[0]]))
        assert ask(engine) == expected != first
        assert engine.weight_version == 1
        setattr(place(model, path), name, before)
        assert ask(engine) == first


def test_a_hook_that_others_hang_on_a_module_takes_part(old):
    """As it does in a trainer's forward through the same model; once it is gone all is as before."""
    model, other = build("Llama"), build("Llama")
    hook = other.model.layers[0].register_forward_hook(lambda module, args, out: out * 2)
    with Engine.from_pretrained(other, config=CONFIG) as engine:
        expected = ask(engine)
        hook.remove()
        assert ask(engine) == old
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert ask(engine) == old
        with model.model.layers[0].register_forward_hook(lambda module, args, out: out * 2):
            assert ask(engine) == expected != old and engine.path.startswith("patched: its bits are not those")
        assert ask(engine) == old and engine.path == "fused"
        with model.lm_head.register_forward_hook(lambda module, args, out: None):  # it only looks
            assert ask(engine) == old and engine.weight_version == 3


@pytest.mark.parametrize("before", [False, True])
def test_a_hook_that_others_hang_on_all_modules_takes_part(before, old):
    """The fused forward calls no module: it is noticed that some other forward is wanted, and that this has ended."""

    def halve(module, args, out=None):
        if type(module).__name__ == "LlamaRMSNorm":
            return (args[0] * 0.5 + 1,) if before else out * 0.5
        return None

    every = torch.nn.modules.module
    hang = every.register_module_forward_pre_hook if before else every.register_module_forward_hook
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        assert ask(engine) == old and engine.path == "fused"
        with hang(halve):
            found = ask(engine)
            assert found != old and engine.path.startswith("patched: its bits are not those")
            with Engine.from_pretrained(build("Llama"), config=CONFIG) as other:
                assert ask(other) == found
        assert ask(engine) == old and engine.path == "fused"


def test_a_forward_that_others_set_on_a_module_takes_part(old):
    model = build("Llama")
    layer = model.model.layers[0]
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert ask(engine) == old
        own = layer.forward
        layer.forward = lambda *args, **options: own(*args, **options) * 2
        with layer.register_forward_hook(lambda module, args, out: None):
            expected = ask(engine)
        assert ask(engine) == expected != old and engine.path.startswith("patched: its bits are not those")
        layer.forward = own
        assert ask(engine) == old and engine.path == "fused"


def test_a_hook_on_the_whole_model_that_would_not_run_is_refused(old):
    model = build("Llama")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        with model.register_forward_hook(lambda module, args, out: None):  # it only looks
            assert ask(engine) == old
        with (
            model.register_forward_hook(lambda module, args, out: setattr(out, "logits", out.logits * 2)),
            pytest.raises(vx.patch.UnsupportedModule, match="it changes what the whole model returns"),
        ):
            ask(engine)
        assert ask(engine) == old


def test_a_class_that_others_give_a_module_takes_part(old):
    model = build("Llama")
    layer = model.model.layers[0]
    kind = type(layer)
    twice = type("Twice", (kind,), {"forward": lambda self, *args, **options: kind.forward(self, *args, **options) * 2})
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert ask(engine) == old
        layer.__class__ = twice
        assert ask(engine) != old and engine.path.startswith("patched: its bits are not those")
        layer.__class__ = kind
        assert ask(engine) == old and engine.path == "fused"


def adapted():
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    model = peft.get_peft_model(build("Llama"), config)
    model.add_adapter("other", config)
    g = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=g) * 0.3)
    return model.eval()


SWITCHES = {
    "another": lambda model: model.set_adapter("other"),
    "none": lambda model: model.base_model.disable_adapter_layers(),
    "both": lambda model: model.base_model.set_adapter(["default", "other"]),
    "scaled": lambda model: [m.set_scale("default", 3.0) for m in model.modules() if hasattr(m, "set_scale")],
}


def test_adapters_that_others_switch_are_the_ones_that_count():
    """No tensor changes: what was computed with the others would be found in the prefix cache."""
    expected = {}
    for name, switch in SWITCHES.items():
        switch(model := adapted())
        with Engine.from_pretrained(model.get_base_model(), config=CONFIG) as engine:
            expected[name] = ask(engine)
    for name, switch in SWITCHES.items():
        model = adapted()
        with Engine.from_pretrained(model.get_base_model(), config=CONFIG) as engine:
            first = ask(engine)
            switch(model)
            assert ask(engine) == expected[name] != first and engine.path == "fused", name


def offset(size: int = 48):
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float32).bfloat16()


def add_offset(module, args, out):
    return out + module.offset if hasattr(module, "offset") else out


def register_buffer(model, value):
    model.model.layers[0].register_buffer("offset", value)


def register_in_a_child(model, value):
    model.model.layers[0].mlp.act_fn.register_buffer("offset", value)


def register_bias(model, value):
    model.model.layers[0].mlp.down_proj.bias = torch.nn.Parameter(value)


def register_bias_of_the_head(model, value):
    model.lm_head.bias = torch.nn.Parameter(value)


@pytest.mark.parametrize("when", ["at-once", "written-later"])
@pytest.mark.parametrize(
    "register, path, size",
    [
        (register_buffer, "model.layers.0.offset", 48),
        (register_in_a_child, "model.layers.0.mlp.act_fn.offset", 48),
        (register_bias, "model.layers.0.mlp.down_proj.bias", 48),
        (register_bias_of_the_head, "lm_head.bias", 160),
    ],
)
def test_a_tensor_that_others_register_takes_part(register, path, size, when):
    """On a module that had none, too. As zeros it changes no bit, so that the forward of before would still do."""

    def made():
        model = build("Llama")
        layer = model.model.layers[0]
        layer.register_forward_hook(add_offset)
        layer.register_forward_hook(lambda module, args, out: add_offset(module.mlp.act_fn, args, out))
        return model

    other, model = made(), made()
    register(other, offset(size))
    with Engine.from_pretrained(other, config=CONFIG) as engine:
        expected, forward = ask(engine), engine.path
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        first = ask(engine)
        register(model, offset(size) if when == "at-once" else 0 * offset(size))
        if when == "written-later":
            assert ask(engine) == first and engine.weight_version == 1
            with torch.no_grad():
                place(model, path).copy_(offset(size))
        assert ask(engine) == expected != first
        assert engine.path == forward and engine.weight_version == 1 + (when == "written-later")
        state = model.state_dict()
        assert path in state
        engine.update_weights(state, numerics=engine.numerics())
        assert ask(engine) == expected


@pytest.mark.parametrize(
    "path, name, size, error",
    [
        ("model.layers.0", "offset", 48, r"model\.layers\.0 \(LlamaDecoderLayer\): it holds parameters"),
        ("model.layers.1.mlp", "offset", 48, r"model\.layers\.1\.mlp \(LlamaMLP\): it holds parameters"),
    ],
)
def test_a_parameter_that_nothing_aligned_has_is_refused_until_it_is_gone(path, name, size, error, old):
    model = build("Llama")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert ask(engine) == old
        module = place(model, path)
        had = name in module._parameters
        module.register_parameter(name, torch.nn.Parameter(torch.ones(size, dtype=torch.bfloat16)))
        for _ in range(2):
            with pytest.raises(vx.patch.UnsupportedModule, match=error):
                ask(engine)
        if had:
            setattr(module, name, None)
        else:
            delattr(module, name)
        assert ask(engine) == old and engine.path == "fused"
    assert not hasattr(model, "_vexact")


def test_a_module_that_others_put_in_is_watched_from_then_on(old):
    """Its weights and hooks, as those of the one before were."""

    def put_in(model):
        model.model.layers[0].mlp = build("Llama", seed=1).model.layers[1].mlp

    def scale(model):
        with torch.no_grad():
            model.model.layers[0].mlp.up_proj.weight.mul_(0.5)

    def hang(model):
        model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: out * 2)

    model, changes = build("Llama"), []
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        known = ask(engine)
        for version, change in enumerate([put_in, scale, hang], 1):
            changes.append(change)
            other = build("Llama")
            for each in changes:
                each(other)
            with Engine.from_pretrained(other, config=CONFIG) as fresh_engine:
                expected = ask(fresh_engine)
            change(model)
            assert ask(engine) == expected != known
            assert engine.weight_version == version
            known = expected


def test_a_model_that_needs_another_cache_is_refused_until_it_is_put_back(old):
    model = build("Llama")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert ask(engine) == old
        third = build("Llama").model.layers[1]
        third.self_attn.layer_idx = 2
        model.model.layers.append(third)
        model.config.num_hidden_layers = 3
        for _ in range(2):
            with pytest.raises(WeightsTorn, match=r"cache is 3 x Pages\(.* expected 2 x Pages\("):
                ask(engine)
        del model.model.layers[2]
        model.config.num_hidden_layers = 2
        assert ask(engine) == old


@pytest.mark.parametrize("family, name", [("Llama", "rotary_emb.inv_freq"), ("Gemma2", "embed_tokens.embed_scale")])
def test_a_buffer_that_a_copy_is_computed_with_may_be_written(family, name):
    """One that is kept in another dtype than it is used in: frequencies in float64, Gemma's factor."""

    def made(factor):
        model = build(family)
        model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.double()
        model.get_buffer(f"model.{name}").mul_(factor)
        return model

    with Engine.from_pretrained(made(0.5), config=CONFIG) as engine:
        expected = ask(engine)
    model = made(1.0)
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert engine.path == "fused" and ask(engine) != expected
        model.get_buffer(f"model.{name}").mul_(0.5)
        assert ask(engine) == expected


def test_a_number_that_nothing_aligned_has_is_refused_until_it_is_put_back(old):
    model = build("Llama")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        model.model.layers[0].self_attn.is_causal = False
        for _ in range(2):
            with pytest.raises(vx.patch.UnsupportedModule, match="its attention is not causal"):
                ask(engine)
        model.model.layers[0].self_attn.is_causal = True
        assert ask(engine) == old
        model.model.layers[0].self_attn.is_causal = False
    assert not hasattr(model, "_vexact")


def copied(model):
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.config.num_hidden_layers = 3


def called_twice(model):
    model.model.layers[1] = model.model.layers[0]


def pruned(model):
    del model.model.layers[0]


@pytest.mark.parametrize("family", ["llama", "stablelm"], ids=["fused", "patched"])
@pytest.mark.parametrize("change", [copied, called_twice, pruned])
def test_layers_remember_by_their_place_whatever_number_they_have(family, change):
    """A copy has its original's number, and a layer that is called twice one for both: their keys are not each other's.
    Of what is left of a model that was cut, the numbers are those of before."""
    model, trainer = (tiny(family, torch.bfloat16) for _ in range(2))
    change(model)
    change(trainer)
    with vx.patch.hf(trainer) as handle, Engine.from_pretrained(model, config=CONFIG) as engine:
        assert engine.path.startswith("fused" if family == "llama" else "patched")
        for answer in engine.generate([[5, 6, 7, 8, 9, 10], [9, 8, 7]], PARAMS):
            row = torch.tensor([answer.prompt_ids + answer.token_ids])
            assert handle.logprobs(row)[0, len(answer.prompt_ids) - 1 : -1].tolist() == answer.logprobs
