"""A refusal names all that is in the way at once, in words that say what to do."""

import copy
import functools

import pytest
import torch
from families import alone, config_of, sequences, tiny
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import ModelOutput

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise


class Quantised(nn.Linear):
    def forward(self, x):
        return super().forward(x)


def refusal(model, **options) -> str:
    with pytest.raises((vx.patch.UnsupportedModule, TypeError, ValueError)) as caught:
        vx.patch.hf(model, **options)
    return str(caught.value)


def test_what_modules_run_is_said_beside_modules_that_are_refused():
    model = tiny("llama", num_hidden_layers=3)
    layers = model.model.layers
    layers[0].mlp.up_proj = Quantised(32, 48, bias=False)
    layers[1].self_attn.attention_dropout = 0.1
    layers[1].self_attn.is_causal = False
    layers[2].mlp.act_fn = nn.Softmax(-1)
    said = refusal(model)
    for pattern in (
        "layers.0.mlp.up_proj (Quantised): a linear layer with a forward",
        "layers.1.self_attn (LlamaAttention): attention_dropout is 0.1",
        "layers.1.self_attn (LlamaAttention): its attention is not causal",
        "layers.2.mlp.act_fn (Softmax): runs aten._softmax outside the aligned ops",
    ):
        assert pattern in said, said
    assert "layers.1.self_attn.q_proj" not in said and "asks attention for dropout" not in said


def test_dropout_of_a_published_configuration_is_an_engines_no_trainers():
    model, seqs = tiny("llama"), sequences()
    with vx.patch.hf(model):
        expected = alone(model, seqs)
    model.config.attention_dropout = 0.1
    for layer in model.model.layers:
        layer.self_attn.attention_dropout = 0.1
    assert "set it to 0 (from_pretrained(..., attention_dropout=0.0))" in refusal(model)
    with vx.patch.hf(model, training=False):
        assert_bitwise(alone(model, seqs), expected)
        assert "attention_dropout is 0.1" in refusal(model)  # a trainer's, of the same model
        assert_bitwise(alone(model, seqs), expected)
        with pytest.raises(ValueError, match=r"attention_dropout: got 0\.1 in training, expected 0"):
            model.train()(input_ids=seqs[0][None])


@pytest.mark.parametrize(
    "family, name, module",
    [
        ("biogpt", "hidden_dropout_prob", "BioGptModel: dropout"),
        ("biogpt", "activation_dropout", "BioGptDecoderLayer: activation_dropout"),
        ("biogpt", "layerdrop", "BioGptModel: layerdrop"),
        ("starcoder2", "residual_dropout", "Starcoder2Attention: residual_dropout"),
        ("mixtral", "router_jitter_noise", "MixtralSparseMoeBlock: jitter_noise"),
    ],
)
def test_what_an_engine_passes_over_inside_a_forward_is_not_trained(family, name, module):
    """Such a rate is no module's and comes to no attention: the stock forward that runs there would have dropped."""
    config = config_of(family)
    setattr(config, name, 0.3)
    model, ids = AutoModelForCausalLM.from_config(config).eval(), sequences((5,))[0]
    refused = refusal(model)
    assert "0.3: a dropped value is not aligned, set it to 0" in refused or "aten.uniform_" in refused
    with vx.patch.hf(model, training=False) as handle:
        assert_bitwise(handle.logprobs(ids), handle.logprobs(ids))
        model.train()
        for call in (lambda: handle.logprobs(ids), lambda: model(ids[None])):
            with pytest.raises(ValueError, match=rf"{module}: got 0\.3 in training, expected 0"):
                call()


def test_a_module_of_dropout_in_a_model_that_is_trained_after_all():
    model, seqs = tiny("llama"), sequences()
    attention = model.model.layers[0].self_attn
    attention.o_proj = nn.Sequential(attention.o_proj, nn.Dropout(0.2))
    with vx.patch.hf(model, training=False):
        alone(model.eval(), seqs)
        with pytest.raises(ValueError, match=r"Dropout: p: got 0\.2 in training, expected 0"):
            model.train()(input_ids=seqs[0][None])


def test_a_compiled_model_and_other_wrappers():
    model = tiny("llama")
    assert "a compiled model is patched first and compiled then" in refusal(torch.compile(model))
    assert "patch the one inside, its 0" in refusal(nn.Sequential(model))
    assert "expected a transformers PreTrainedModel" in refusal(nn.Linear(2, 2))


def test_a_model_without_an_output_layer():
    model = tiny("llama").model
    with vx.patch.hf(model) as handle:
        hidden = torch.zeros(1, 32)
        for name, given in {
            "logits": (hidden,),
            "score": (hidden, torch.zeros(1, dtype=torch.long)),
            "sample": (hidden, 0, 0),
            "logprobs": (torch.zeros(1, 3, dtype=torch.long),),
        }.items():
            with pytest.raises(ValueError, match=f"{name}: LlamaModel has no output layer, .* AutoModelForCausalLM"):
                getattr(handle, name)(*given)


def test_layers_in_other_places_than_their_kinds_are_refused():
    """The stock model masks by the place, so what stands there has to be of that place's kind."""
    model = tiny("gemma2")
    model.model.layers = nn.ModuleList(reversed(model.model.layers))
    said = refusal(model)
    assert "layers.0.self_attn (Gemma2Attention): its mask has a window of 4, but it asks attention for None" in said
    model.config.layer_types = model.config.layer_types[::-1]
    vx.patch.hf(model).undo()


def test_what_masks_take_from_the_config_is_noticed_later_too():
    """Masks are not built in a patched model: the stock one's, and so its numbers, are others from then on."""
    ids = torch.arange(12)[None]
    for name, change, said in (
        ("gemma2", lambda config: config.layer_types.reverse(), "its mask has a window of None, but it asks"),
        ("llama", lambda config: setattr(config, "is_causal", False), "its attention is not causal"),
    ):
        model = tiny(name)
        with vx.patch.hf(model) as handle:
            change(model.config)
            with pytest.raises(vx.patch.UnsupportedModule, match=said):
                handle.logprobs(ids)
            with pytest.raises(vx.patch.UnsupportedModule, match=said):
                handle.revision()  # which an engine asks for before each step


def test_attention_to_what_follows_is_refused_wherever_it_was_asked_for():
    """Gemma 3 reads this in its masks, which are not built here: attention stayed causal, and nobody said so."""
    said = r"its attention is not causal: use_bidirectional_attention of the config is True"
    model, ids = tiny("gemma3_text"), torch.arange(12)[None]
    with vx.patch.hf(model) as handle:
        before = model(ids, use_cache=False).logits
        model.config.use_bidirectional_attention = True
        with pytest.raises(vx.patch.UnsupportedModule, match=said):
            handle.logprobs(ids)
    assert not torch.allclose(model(ids, use_cache=False).logits, before, atol=0.1)
    with pytest.raises(vx.patch.UnsupportedModule, match=said):
        vx.patch.hf(model)
    for name in ("gemma", "gemma2"):  # of whose masks it is none of the numbers
        model = tiny(name)
        before = model(ids, use_cache=False).logits
        model.config.use_bidirectional_attention = True
        assert_bitwise(model(ids, use_cache=False).logits, before)
        vx.patch.hf(model).undo()


def _quieter(module, query, key, value, mask, scaling=1.0, **kwargs):
    return sdpa_attention_forward(module, query, key, value, mask, scaling=0.3 * scaling, **kwargs)


def _nothing(self, x, ids, weights):
    return 0 * x


@pytest.mark.parametrize("where", ["attention", "experts"])
@pytest.mark.parametrize("when", ["before", "later"])
def test_an_implementation_of_ones_own_is_not_left_out(where, when, monkeypatch):
    """Registered with transformers, it may compute anything: ours stood in its place, and nobody said so."""
    registry, short, own = {
        "attention": (ALL_ATTENTION_FUNCTIONS, "attn", _quieter),
        "experts": (ALL_EXPERTS_FUNCTIONS, "experts", functools.partial(_nothing)),
    }[where]
    monkeypatch.setitem(registry._global_mapping, "own", own)
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS._global_mapping, "own", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model, ids, name = tiny("qwen3_moe"), torch.arange(12)[None], f"_{short}_implementation"
    said = f"its implementation of {where} is test_hf_refusals._.*, registered as 'own': .* set {name} of the config"
    before = model(ids, use_cache=False).logits
    if when == "before":
        setattr(model.config, name, "own")
        assert not torch.allclose(model(ids, use_cache=False).logits, before, atol=0.1)
        with pytest.raises(vx.patch.UnsupportedModule, match=said):
            vx.patch.hf(model)
        setattr(model.config, name, "eager")
    with vx.patch.hf(model) as handle:
        expected = handle.logprobs(ids)
        setattr(model.config, name, {"attention": "sdpa", "experts": "grouped_mm"}[where])
        assert_bitwise(handle.logprobs(ids), expected)
        setattr(model.config, name, "own")
        with pytest.raises(vx.patch.UnsupportedModule, match=said):
            handle.logprobs(ids)


def _other_config(path: str, **numbers):
    def change(model):
        module = model.get_submodule(path)
        module.config = copy.deepcopy(module.config)
        for name, value in numbers.items():
            setattr(module.config, name, value)

    return change


def _set(path: str, **values):
    return lambda model: vars(model.get_submodule(path)).update(values)


@pytest.mark.parametrize(
    "family, change, said",
    [
        ("cohere2", _set("", logit_scale=0.7), "it multiplies the logits by 0.7, which its config does not name"),
        ("cohere2_moe", _set("model.layers.0.mlp.gate", expert_selection_fn="sigmoid"), r"mlp\.gate .*a router that"),
        ("gemma2", _set("model.layers.0.mlp.act_fn", act=torch.tanh), r"mlp\.act_fn .* runs aten\.tanh"),
        ("gpt_neox", _set("gpt_neox.layers.0.mlp.act", act=torch.tanh), r"mlp\.act .* runs aten\.tanh"),
        (
            "gpt_oss",
            _set("model.layers.0.mlp.experts", _apply_gate=lambda x: x[..., ::2]),
            r"mlp\.experts .* activation or form",
        ),
        (
            "mistral",
            _other_config("model", sliding_window=2),
            "its mask has a window of 2, but it asks attention for 4",
        ),
        ("gemma2", _other_config("model", layer_types=["full_attention"] * 2), "its mask has a window of None"),
        ("gemma2", _other_config("", final_logit_softcapping=1.0), None),
        ("granite", _other_config("", logits_scaling=2.0), None),
    ],
)
def test_what_a_forward_chooses_by_is_noticed_later_too(family, change, said):
    """A number of the whole model, a name, a function, a method, another config: the stock forward follows each."""
    stock, model, ids = tiny(family), tiny(family), torch.arange(12)[None]
    with vx.patch.hf(model) as handle:
        before = handle.logprobs(ids)
        change(model)
        if said is None:
            change(stock)
            follows = stock(ids, use_cache=False).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
            now = handle.logprobs(ids)[0, :-1]
            torch.testing.assert_close(now, follows, rtol=1e-4, atol=1e-4)
            assert not torch.allclose(now, before[0, :-1], atol=1e-2)
        else:
            with pytest.raises(vx.patch.UnsupportedModule, match=said):
                handle.logprobs(ids)


def test_a_window_that_the_config_gets_later_is_the_description_s():
    model = tiny("mistral", sliding_window=None)
    with vx.patch.hf(model) as handle:
        before = handle.revision(), handle.describe().layers[0].memory.window
        model.config.sliding_window = 3  # attention itself reads it there, at every call
        after = handle.revision(), handle.describe().layers[0].memory.window
    assert before == (1, None) and after == (2, 3)


def test_configs_of_which_the_stock_model_makes_nothing():
    model = tiny("qwen3", layer_types=["sliding_attention"] * 2)
    assert model.config.sliding_window is None
    assert "its layer type is 'sliding_attention', but sliding_window is None: without the patch it" in refusal(model)
    said = refusal(tiny("llama", return_dict=False))
    assert said.startswith("patch.hf: model: config.return_dict is False in a LlamaForCausalLM") and "to True" in said


def test_a_window_of_a_family_that_has_none_is_named():
    """Its attention is full while it reads a prompt, and its cache would keep so many keys alone."""
    said = refusal(tiny("llama", sliding_window=3))
    assert "its mask has a window of 3, but it asks attention for None: sliding_window and layer_types of" in said


def test_a_window_that_masks_of_the_family_do_not_have_is_named():
    """Attention is asked for one, which flash attention has and the eager form, by the mask alone, has not."""
    said = refusal(tiny("olmoe", sliding_window=3))
    assert "OlmoeAttention) and 1 more: it asks attention for a window of 3, but its mask has none" in said


@pytest.mark.parametrize("cap", [3.0, 2000.0])
def test_a_softcap_that_the_class_does_not_read_is_not_applied(cap):
    """A large one hardly shows in small logits."""
    said = refusal(tiny("llama", final_logit_softcapping=cap))
    assert f"its config has final_logit_softcapping {cap}, which its class does not read: take that out" in said
    vx.patch.hf(tiny("gemma2", final_logit_softcapping=cap)).undo()


def test_a_scaling_of_logits_that_the_class_does_not_read_is_named():
    said = refusal(tiny("llama", logits_scaling=4.0))
    assert "(root) (LlamaForCausalLM): its config has logits_scaling 4.0, which its class does not read" in said


def test_head_sizes_that_no_op_has_are_named():
    assert "heads of one number have no pairs: head_dim (" in refusal(tiny("llama", head_dim=1))
    for family, size in (("glm4", 1), ("gpt_oss", 1), ("qwen3_next", 3), ("qwen3_5_text", 2)):
        said = refusal(tiny(family, head_dim=size))
        assert "rotary_emb" in said and f"it rotates nothing: head_dim is {size}" in said, said
    for kind, size in (("key", 3), ("value", 300)):
        said = refusal(tiny("qwen3_next", **{f"linear_{kind}_head_dim": size}))
        assert f"linear_attn (Qwen3NextGatedDeltaNet): its linear_{kind}_head_dim is {size}, expected 16 to 256" in said


def test_a_hook_that_would_not_run_is_refused_by_name():
    model, seqs = tiny("llama"), sequences((5,))
    activation = model.model.layers[1].mlp.act_fn
    for put_on in (activation.register_forward_hook, activation.register_forward_pre_hook):
        hook = put_on(lambda *args: None)
        assert "layers.1.mlp.act_fn (SiLUActivation): it has a hook that would not run" in refusal(model)
        hook.remove()
    with vx.patch.hf(model):
        expected = alone(model, seqs)
        hook = activation.register_forward_hook(lambda module, args, out: None)
        with pytest.raises(vx.patch.UnsupportedModule, match=r"layers\.1\.mlp\.act_fn .* a hook that would not run"):
            alone(model, seqs)
        hook.remove()
        assert_bitwise(alone(model, seqs), expected)


def test_a_forward_that_would_not_run_is_refused_by_name():
    """Set on a module whose block computes what it would; on others it runs, or is noticed when the patch is undone."""
    model, seqs = tiny("llama"), sequences((5,))
    activation = model.model.layers[1].mlp.act_fn
    with vx.patch.hf(model):
        expected = alone(model, seqs)
        activation.forward = lambda x: x
        with pytest.raises(
            vx.patch.UnsupportedModule, match=r"layers\.1\.mlp\.act_fn .* its forward has been replaced"
        ):
            alone(model, seqs)
        del activation.forward
        assert_bitwise(alone(model, seqs), expected)


@pytest.mark.parametrize("path", ["", "model", "model.norm", "model.layers.1.mlp.up_proj"])
def test_a_class_that_is_set_later_is_noticed(path):
    """The forward that the patch has put there would run on, whatever that of the new class computes."""
    model, seqs = tiny("llama"), sequences((5,))
    module = model.get_submodule(path)
    kind = type(module)
    twice = type("Twice", (kind,), {"forward": lambda self, *args, **options: kind.forward(self, *args, **options)})
    with vx.patch.hf(model):
        expected = alone(model, seqs)
        module.__class__ = twice
        with pytest.raises(
            vx.patch.UnsupportedModule, match=r"\(Twice\): (no module of transformers|a linear layer with)"
        ):
            alone(model, seqs)
        module.__class__ = kind
        assert_bitwise(alone(model, seqs), expected)


def test_a_dropout_of_a_forward_of_its_own_is_refused():
    class Scaled(torch.nn.Dropout):
        def forward(self, input):
            return input * 1.25

    model = tiny("phi3")
    model.model.layers[1].resid_mlp_dropout = Scaled(0.0)
    assert "layers.1.resid_mlp_dropout (Scaled): no module of transformers" in refusal(model)


def _halved(module, args, out):
    if hasattr(out, "logits"):
        out.logits = out.logits * 0.5


def _halved_in_place(module, args, out):
    if hasattr(out, "logits"):
        out.logits.mul_(0.5)


def _other_ids(module, args, kwargs):
    return args, kwargs | {"input_ids": kwargs["input_ids"] + 1}


@pytest.mark.parametrize("hook", [_halved, _halved_in_place, _other_ids])
def test_a_hook_on_the_whole_model_only_looks(hook):
    """Of log-probabilities, formed inside its call, it may make nothing of or another number; an engine calls the
    decoder."""
    model, ids, seen = tiny("llama"), sequences((5,))[0], []
    before = hook is _other_ids
    model.register_forward_hook(lambda module, args, out: seen.append(out))
    with vx.patch.hf(model) as handle:
        expected = handle.logprobs(ids)
    assert seen
    hung = model.register_forward_pre_hook(hook, with_kwargs=True) if before else model.register_forward_hook(hook)
    assert f"it changes what the whole model {'is called with' if before else 'returns'}" in refusal(model)
    hung.remove()
    with vx.patch.hf(model) as handle:
        assert_bitwise(handle.logprobs(ids), expected)


def test_a_hook_on_the_whole_model_that_is_put_on_later():
    """Those that look are shown nothing but what the caller computes."""
    model, ids, seen = tiny("llama"), sequences((5,))[0], []
    with vx.patch.hf(model) as handle:
        expected = handle.logprobs(ids)
        with model.register_forward_hook(lambda module, args, out: seen.append(float(out[0].sum()))):
            assert_bitwise(handle.logprobs(ids), expected)
        assert seen == [float(expected[:-1].sum())]
        with (
            model.register_forward_hook(lambda module, args, out: tuple(x * 2 for x in out)),
            pytest.raises(RuntimeError, match="logprobs: a hook on the whole model changes what it returns"),
        ):
            handle.logprobs(ids)
        for put_on, hook in (
            (model.register_forward_hook, _halved),
            (lambda hook: model.register_forward_pre_hook(hook, with_kwargs=True), _other_ids),
        ):
            with put_on(hook), pytest.raises(vx.patch.UnsupportedModule, match="it changes what the whole model"):
                handle.revision(tensors=True)


@pytest.mark.parametrize(
    "asks",
    [
        lambda out: hasattr(out, "logits"),
        lambda out: isinstance(out, ModelOutput) and out.logits is not None,
        lambda out: getattr(out, "logits", None) is not None,
        lambda out: "logits" in out,
        lambda out: not isinstance(out, ModelOutput) or out["logits"] is not None,
    ],
    ids=["hasattr", "isinstance", "getattr", "in", "by name"],
)
def test_a_hook_on_the_whole_model_that_changes_logits_alone(asks):
    """It would pass log-probabilities by, and a trainer would take others than its model has."""
    model, ids, seen = tiny("llama"), sequences((5,))[0], []

    def halve(module, args, out):
        seen.append(True)
        if asks(out):
            out.logits = out.logits / 2

    with vx.patch.hf(model) as handle:
        expected, logits = handle.logprobs(ids), model(ids[None]).logits
        with model.register_forward_hook(halve):
            assert_bitwise(model(ids[None]).logits, logits / 2)
            with pytest.raises(RuntimeError, match="a hook on the whole model asks for logits of what it returns"):
                handle.logprobs(ids)
        assert len(seen) == 2
        assert_bitwise(handle.logprobs(ids), expected)


class _Halved(torch.Tensor):
    """A weight whose products are its own, as those of quantised ones."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        out = super().__torch_function__(func, types, args, kwargs)
        return out / 2 if func is nn.functional.linear else out


@pytest.mark.parametrize("where", ["model.layers.0.mlp.up_proj", "model.layers.1.input_layernorm", "lm_head"])
def test_a_weight_of_its_own_arithmetic_is_noticed_later(where):
    model, ids = tiny("llama", tie_word_embeddings=False), sequences((5,))[0]
    module = model.get_submodule(where)
    with vx.patch.hf(model) as handle:
        expected, plain = handle.logprobs(ids), module.weight
        module.weight = nn.Parameter(plain.data.as_subclass(_Halved))
        assert type(module.weight) is _Halved
        said = rf"{where} \({type(module).__name__}\): its weight is a _Halved, not a plain tensor"
        for call in (lambda: handle.logprobs(ids), lambda: model(ids[None]), handle.revision):
            with pytest.raises(vx.patch.UnsupportedModule, match=said):
                call()
        module.weight = plain
        assert_bitwise(handle.logprobs(ids), expected)


def test_a_hook_on_the_output_layer_is_for_logits():
    """Log-probabilities are formed in its call, and would be what the hook makes another number of."""
    model, ids = tiny("llama"), sequences((5,))[0]
    seen = []
    with vx.patch.hf(model) as handle:
        expected, hidden = handle.logprobs(ids), model.model(ids[None], use_cache=False)[0][0]
        logits = model(ids[None], use_cache=False).logits
        model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out))
        assert_bitwise(handle.logprobs(ids), expected)
        assert seen
        model.lm_head.register_forward_hook(lambda module, args, out: out * 0.5)
        assert_bitwise(model(ids[None], use_cache=False).logits, logits * 0.5)
        for call in (
            lambda: handle.logprobs(ids),
            lambda: handle.score(hidden, ids),
            lambda: model(ids[None], labels=ids[None], use_cache=False),
        ):
            with pytest.raises(RuntimeError, match=r"a hook on the output layer \(Linear\) changes what it returns"):
                call()


@pytest.mark.parametrize("family, name", [("gpt2", "activation_function"), ("llama", "hidden_act")])
def test_an_activation_that_has_a_bound_is_not_the_one_without(family, name):
    """gelu_10 is gelu up to 10: nothing of what is small tells them apart."""
    assert "(ClippedGELUActivation)" in refusal(tiny(family, **{name: "gelu_10"}))


@pytest.mark.parametrize("eps", [0.0, -1e-6])
@pytest.mark.parametrize("family", ["llama", "cohere"])
def test_an_epsilon_that_is_none_is_named(family, eps):
    model = tiny(family)
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = eps
    with pytest.raises(
        vx.patch.UnsupportedModule, match=rf"Norm\).*: its variance_epsilon is {eps}, expected a number above 0"
    ):
        vx.patch.hf(model)


@pytest.mark.parametrize("theta, found", [(0.0, "inf"), (-5.0, "nan")])
def test_frequencies_that_are_no_numbers_are_named(theta, found):
    rope = {"rope_type": "default", "rope_theta": theta}
    with pytest.raises(
        vx.patch.UnsupportedModule, match=rf"rotary_emb .*: its inv_freq has {found}: rope_theta is {theta}"
    ):
        vx.patch.hf(tiny("llama", rope_parameters=rope))


def test_a_factor_that_makes_frequencies_no_numbers_is_named():
    rope = {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}
    assert "its inv_freq has inf: rope_theta is 10000.0, factor is 0.0" in refusal(tiny("llama", rope_parameters=rope))
