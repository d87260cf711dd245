"""What a patched model is called with: a cache under either of its names, and nothing that it does not know."""

import warnings

import pytest
import torch
from conftest import devices
from families import alone, sequences, tiny
from transformers import DynamicCache
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.llama import modeling_llama

import vexact_ops as vx
from vexact_ops.patch import batch
from vexact_ops.testing import assert_bitwise

NAMES = ("cache", "past_key_values")
NOW = next(name for name in NAMES if name in CausalLMOutputWithPast.__dataclass_fields__)  # what this release calls it
FORMS = [("llama", {}), ("mistral", {}), ("gemma2", {}), ("deepseek_v3", {}), ("deepseek_v3", {"latent": True})]
each_form = pytest.mark.parametrize("name,options", FORMS, ids=["llama", "mistral", "gemma2", "expanded", "latent"])


@pytest.mark.parametrize("called", NAMES)
@each_form
@pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
def test_a_cache_by_either_name_is_the_same_cache(name, options, called, device, dtype):
    model, (ids,) = tiny(name, dtype, device=device), sequences((11,), device=device)
    with vx.patch.hf(model, **options), torch.no_grad():
        whole = alone(model, [ids])[0]
        cache = DynamicCache(config=model.config)
        parts = [model(ids[None, at : at + 4], **{called: cache}).logits[0] for at in (0, 4, 8)]
        assert_bitwise(torch.cat(parts), whole)
        out = model(ids[None, :5], use_cache=True)
        assert_bitwise(model(ids[None, 5:], **{called: getattr(out, NOW)}).logits[0], whole[5:])


@each_form
@pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
def test_generate_hands_a_cache_on_and_nobody_warns(name, options, device, dtype):
    model, (ids,) = tiny(name, dtype, device=device), sequences((7,), device=device)
    with vx.patch.hf(model, **options), warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)  # as of a name that is to go
        how = dict(do_sample=False, output_logits=True, return_dict_in_generate=True, disable_compile=True)
        out = model.generate(ids[None], attention_mask=torch.ones_like(ids[None]), max_new_tokens=5, **how)
        whole = model(out.sequences, use_cache=False).logits
    assert getattr(out, NOW).get_seq_length() == out.sequences.shape[1] - 1
    assert_bitwise(torch.stack(out.logits, 1), whole[:, len(ids) - 1 : -1])


@each_form
def test_a_cache_by_another_name_is_refused(name, options):
    model, (ids,) = tiny(name), sequences((4,))
    cache = DynamicCache(config=model.config)
    with vx.patch.hf(model, **options):
        for part in (model, model.base_model):
            with pytest.raises(TypeError, match=r"Model: kv_cache: got an argument that no patched forward knows"):
                part(ids[None], kv_cache=cache)
            part(ids[None], kv_cache=None)  # not given
    assert not cache.get_seq_length()


def test_what_could_change_a_result_is_refused():
    model, (ids,) = tiny("llama"), sequences((4,))
    one, other = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with vx.patch.hf(model):
        with pytest.raises(TypeError, match=r"^LlamaModel: block_sequence_ids, prefix: got an argument"):
            model(ids[None], block_sequence_ids=ids, prefix=1)
        with pytest.raises(ValueError, match="is_causal: got False, expected True"):
            model(ids[None], is_causal=False)
        with pytest.raises(ValueError, match="cache: got another one as past_key_values, expected one of them"):
            model(ids[None], cache=one, past_key_values=other)
        with pytest.raises(TypeError, match="cache: got a tuple, expected a DynamicCache"):
            model(ids[None], cache=((ids, ids),))
        assert_bitwise(model(ids[None], cache=one, past_key_values=one).logits, model(ids[None], is_causal=True).logits)
        segments = torch.zeros_like(ids[None])  # as some tokenizers give them, and every decoder passes over
        assert_bitwise(model(ids[None], token_type_ids=segments).logits, model(ids[None]).logits)


def test_what_says_nothing_of_hidden_states_goes_by():
    model, (ids,) = tiny("llama"), sequences((4,))
    said = {"num_items_in_batch": 3, "return_dict": True, "output_hidden_states": True, "seq_idx": torch.zeros(1, 4)}
    with vx.patch.hf(model):
        out = model(ids[None], labels=ids[None], **said)
        assert_bitwise(out.logits, model(ids[None]).logits)
    assert len(out.hidden_states) == model.config.num_hidden_layers + 1


class Forgetful(DynamicCache):
    """Says that it holds what it was given, and gives back the last tokens alone."""

    def update(self, key, value, *args, **kwargs):
        keys, values = super().update(key, value, *args, **kwargs)
        return keys[:, :, -key.shape[2] :], values[:, :, -key.shape[2] :]


@each_form
def test_a_cache_that_does_not_reach_a_layer_is_no_shorter_sequence(name, options):
    model, (ids,) = tiny(name), sequences((11,))
    with vx.patch.hf(model, **options):
        cache = Forgetful()
        model(ids[None, :6], **{NOW: cache})
        with pytest.raises(RuntimeError, match=r"got 5 keys for 11 tokens, expected \d+ at least: the cache that"):
            model(ids[None, 6:], **{NOW: cache})


def test_keys_that_a_window_has_passed_are_not_missed():
    layout = batch.plain(1, 2, 9, "cpu")
    q, k = torch.randn(1, 2, 2, 8), torch.randn(1, 2, 11, 8)
    whole = batch.attend(None, q, k, k, sliding_window=4, vexact_layout=layout)[0]
    seen = k[:, :, -5:]  # three before the first of two
    assert_bitwise(batch.attend(None, q, seen, seen, sliding_window=4, vexact_layout=layout)[0], whole)
    for less in (k[:, :, -4:], k[:, :, -2:]):
        with pytest.raises(RuntimeError, match=r"keys for 11 tokens, expected 5 at least"):
            batch.attend(None, q, less, less, sliding_window=4, vexact_layout=layout)


class Renamed(modeling_llama.LlamaModel):
    def forward(self, input_ids=None, kv_cache=None, **kwargs):
        return super().forward(input_ids, **{NOW: kv_cache}, **kwargs)


class RenamedAttention(modeling_llama.LlamaAttention):
    def forward(self, hidden_states, position_embeddings=None, attention_mask=None, kv_cache=None, **kwargs):
        interface = modeling_llama.ALL_ATTENTION_FUNCTIONS  # what an attention module is recognised by
        return super().forward(hidden_states, position_embeddings, attention_mask, kv_cache, **kwargs) and interface


class OtherAttention(modeling_llama.LlamaAttention):
    forward = {
        "cache": lambda self, x, past_key_values=None, **kwargs: modeling_llama.ALL_ATTENTION_FUNCTIONS and x,
        "past_key_values": lambda self, x, cache=None, **kwargs: modeling_llama.ALL_ATTENTION_FUNCTIONS and x,
    }[NOW]


def test_a_model_that_takes_its_cache_by_another_name_is_refused():
    """As transformers 5.24 did to what knew 5.23: then no forward is patched."""
    for cls in (Renamed, RenamedAttention, OtherAttention):
        cls.__module__ = modeling_llama.__name__
    none, model = (
        r"its forward takes a cache by none of the names that are known here: cache, past_key_values",
        tiny("llama"),
    )
    model.model.__class__ = Renamed
    with pytest.raises(vx.patch.UnsupportedModule, match=rf"model \(Renamed\): {none}"):
        vx.patch.hf(model)
    model = tiny("llama")
    model.model.layers[1].self_attn.__class__ = RenamedAttention
    with pytest.raises(vx.patch.UnsupportedModule, match=rf"layers.1.self_attn \(RenamedAttention\): {none}"):
        vx.patch.hf(model)
    model.model.layers[1].self_attn.__class__ = OtherAttention
    with pytest.raises(
        vx.patch.UnsupportedModule, match=rf"it takes a cache as \w+, its decoder as {NOW}: it would not"
    ):
        vx.patch.hf(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
