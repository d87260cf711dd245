"""Rotary frequencies are in no checkpoint: a trainer whose model was cast, before the patch or after it, has the bits
of one whose model was loaded as the engine loads it, or is refused by name."""

import copy

import pytest
import torch
from families import alone, family, packed, sequences, tiny

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise

ROPES = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}  # fmt: skip
CASTS = {
    "bfloat16": lambda model: model.bfloat16(),
    "to": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half().float().bfloat16(),
    "back": lambda model: model.bfloat16().float().bfloat16(),
    "double": lambda model: model.double().bfloat16(),
}


def parameters(rope: str) -> dict:
    return {"rope_type": rope, "rope_theta": 1e4, **ROPES[rope]}


def frequencies(model) -> dict[str, torch.Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith("inv_freq")}


def loaded(name: str = "llama", **changes):
    """In bf16 with frequencies in fp32, as from_pretrained(dtype=...) has them."""
    return tiny(name, torch.bfloat16, **changes)


def values(model, seqs) -> list[torch.Tensor]:
    with vx.patch.hf(model):
        return alone(model, seqs)


@pytest.mark.parametrize("cast", CASTS)
@pytest.mark.parametrize("rope", ROPES)
def test_a_cast_model_has_the_bits_of_one_that_was_loaded(rope, cast):
    model, seqs = loaded(rope_parameters=parameters(rope)), sequences((90, 3, 40))
    for parameter in model.parameters():
        parameter.data = parameter.data.half().bfloat16()  # so that no cast here rounds a weight
    other = CASTS[cast](copy.deepcopy(model))
    before = {name: buffer.clone() for name, buffer in frequencies(other).items()}
    assert_bitwise(values(other, seqs), values(model, seqs))
    for name, buffer in frequencies(other).items():
        assert_bitwise(buffer, before[name])  # undone: as it was


@pytest.mark.parametrize("name", [family(n) for n in ("gemma3_text", "glm4", "deepseek_v3", "olmo3")])
def test_in_other_families(name):
    model, seqs = loaded(name), sequences((40, 3))
    other = copy.deepcopy(model)
    for module in other.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and "inv_freq" in key:
                module._buffers[key] = buffer.bfloat16()
    with vx.patch.hf(other) as handle:
        assert "inv_freq was rounded to bfloat16: computed again from its config" in str(handle.report())
        assert_bitwise(alone(other, seqs), values(model, seqs))


@pytest.mark.parametrize("name", [family(n) for n in ("qwen3_5_text", "qwen3_5_moe_text")])
def test_scaled_tables_of_three_axes(name):
    """YaRN multiplies the tables that tell which axis a frequency turns with."""
    rope = {**parameters("yarn"), "partial_rotary_factor": 0.5}
    model, seqs = tiny(name, torch.float64, rope_parameters=rope), sequences((40, 3))
    assert model.model.rotary_emb.attention_scaling > 1.1
    stock = alone(model, seqs)
    with vx.patch.hf(model.float()):
        for got, expected in zip(alone(model, seqs), stock):
            torch.testing.assert_close(got.double(), expected, rtol=0, atol=1e-4)


def test_rounded_frequencies_would_show():
    model, seqs = loaded(), sequences((90,))
    rounded = copy.deepcopy(model)
    for module in rounded.modules():
        for key, buffer in module._buffers.items():
            module._buffers[key] = buffer.bfloat16().float() * (1 + 2**-12)  # no rounding of what the config gives
    with pytest.raises(AssertionError, match="differ"):
        assert_bitwise(values(rounded, seqs), values(model, seqs))


@pytest.mark.parametrize("cast", ["bfloat16", "to", "back"])
def test_a_cast_after_the_patch_is_noticed(cast):
    model, seqs = loaded(), sequences((90, 3))
    expected = values(model, seqs)
    with vx.patch.hf(model) as handle:
        assert_bitwise(alone(model, seqs), expected)
        revision = handle.revision()
        CASTS[cast](model)
        assert handle.revision() > revision
        assert_bitwise(alone(model, seqs), expected)
        assert "computed again" in str(handle.report())


def test_a_move_is_no_cast():
    model, seqs = loaded(), sequences((9, 3))
    expected = values(model, seqs)
    with vx.patch.hf(model) as handle:
        revision = handle.revision()
        for module in model.modules():
            for key, buffer in module._buffers.items():
                module._buffers[key] = buffer.clone()
        assert handle.revision() == revision
        assert_bitwise(alone(model, seqs), expected)


@pytest.mark.parametrize("cast", [False, True])
def test_frequencies_that_lay_on_meta_when_patched(cast):
    """As FSDP2's users materialise a model: what comes is looked at."""
    model, seqs = loaded(), sequences((90, 3))
    expected = values(model, seqs)
    state, there = model.state_dict(), model.model.rotary_emb.inv_freq.clone()
    model = model.to("meta")
    with vx.patch.hf(model) as handle:
        revision = handle.revision()
        model.to_empty(device="cpu")
        model.load_state_dict(state)
        model.model.rotary_emb._buffers["inv_freq"] = there.bfloat16() if cast else there
        assert_bitwise(alone(model, seqs), expected)
        assert (handle.revision() > revision) == cast


def test_another_devices_last_bits_are_no_numbers_of_their_own():
    model, seqs = loaded(), sequences((90, 3))
    other = copy.deepcopy(model)
    buffer = other.model.rotary_emb.inv_freq
    other.model.rotary_emb._buffers["inv_freq"] = torch.nextafter(buffer, torch.zeros(()))
    assert_bitwise(values(other, seqs), values(model, seqs))


def test_frequencies_of_ones_own_are_kept_and_said():
    model = loaded()
    model.model.rotary_emb.inv_freq.mul_(0.5)
    with vx.patch.hf(model) as handle:
        assert "inv_freq is not what its config gives: kept" in str(handle.report())
    model.model.rotary_emb._buffers["inv_freq"] = model.model.rotary_emb.inv_freq.bfloat16()
    with pytest.raises(vx.patch.UnsupportedModule, match="its inv_freq is bfloat16, and frequencies are"):
        vx.patch.hf(model)


LONG = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize("name", [family("llama"), family("phi3")])
@pytest.mark.parametrize("choice,length", [("short", 60), ("long", 90)])
def test_declared_factors_of_longrope(name, choice, length):
    """Those of transformers' own forward for a sequence of that length; of every sequence, whatever ran before."""
    factors = range(2 if name == "phi3" else 8)
    ropes = {"short_factor": [1.0 + 0.1 * i for i in factors], "long_factor": [2.0 + 0.3 * i for i in factors]}
    more = {"partial_rotary_factor": 0.5} if name == "phi3" else {}
    head_dim = 8 if name == "phi3" else 16
    model = tiny(
        name,
        rope_parameters={**LONG, **ropes, **more},
        sliding_window=None,
        head_dim=head_dim,
        original_max_position_embeddings=64,
    )
    seqs = [sequences((n,))[0] for n in (length, 70 if choice == "short" else 3)]
    with torch.no_grad():
        stock = model(input_ids=seqs[0][None]).logits[0]
        model(input_ids=seqs[1][None])  # leaves other frequencies behind
    with vx.patch.hf(model, longrope=choice) as handle:
        first = alone(model, seqs)
        torch.testing.assert_close(first[0], stock, rtol=1e-4, atol=1e-4)
        assert_bitwise(alone(model, seqs[::-1])[::-1], first)
        assert handle.options["longrope"] == choice
        with pytest.raises(ValueError, match="patched with"):
            vx.patch.hf(model, longrope="long" if choice == "short" else "short")
    with torch.no_grad():
        assert_bitwise(model(input_ids=seqs[0][None]).logits[0], stock)


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
EACH_TYPE = {"full_attention": DYNAMIC, "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}


@pytest.mark.parametrize("name,parameters", [("llama", DYNAMIC), ("gemma3_text", EACH_TYPE)])
def test_dynamic_frequencies_of_texts_within_the_length_are_those_of_no_scaling(name, parameters):
    model = tiny(name, rope_parameters=parameters, max_position_embeddings=64)
    seqs = [sequences((n,))[0] for n in (60, 90)]
    with torch.no_grad():
        stock = model(input_ids=seqs[0][None]).logits[0]
        longer = model(input_ids=seqs[1][None]).logits[0]  # leaves other frequencies behind
    with vx.patch.hf(model, longrope="short") as handle:
        first = alone(model, seqs)
        torch.testing.assert_close(first[0], stock, rtol=1e-4, atol=1e-4)
        assert_bitwise(alone(model, seqs[::-1])[::-1], first)
        assert_bitwise(packed(model, seqs, "lengths"), first)
        numbers = handle.numerics()
    assert numbers["options"]["longrope"] == "short"
    assert (first[1] - longer).abs().max() > 0.1
    with torch.no_grad():
        assert_bitwise(model(input_ids=seqs[1][None]).logits[0], longer)
    for choice, words in ((None, "none is longer than max_position_embeddings"), ("long", "frequencies of its own")):
        with pytest.raises(vx.patch.UnsupportedModule, match=rf"rope type 'dynamic': .*{words}: .*longrope='short'"):
            vx.patch.hf(model, longrope=choice)


def test_an_unknown_choice_of_factors():
    with pytest.raises(ValueError, match="longrope: got 'auto', expected None, 'short' or 'long'"):
        vx.patch.hf(loaded(), longrope="auto")
    for choice in ("short", "long"):
        with pytest.raises(ValueError, match=f"longrope: got '{choice}', expected None: the .* has no such rotation"):
            vx.patch.hf(loaded(), longrope=choice)
