"""gpt-oss in the engine: the trainer's bits; experts of 4 bits, read as transformers reads them; updates in place."""

import json
from dataclasses import replace

import pytest
import torch
from conftest import devices
from directories import contents, in_stages, whole
from engine_models import bits, build
from safetensors.torch import load_file, save_file
from test_engine_bits import PARAMS, PROMPTS, ROOMY, check_together, launch

import vexact_ops as vx
from vexact_engine import Engine
from vexact_engine.weights.conversion import fit
from vexact_engine.weights.directory import read_directory
from vexact_engine.weights.mxfp4 import dequantised
from vexact_engine.weights.partial import empty_model
from vexact_engine.weights.update import Piece, Update
from vexact_ops.testing import assert_bitwise

each_device = pytest.mark.parametrize("device,dtype", devices(torch.bfloat16))
GATE_UP = "model.layers.0.mlp.experts.gate_up_proj"


@each_device
def test_chunks_batches_preemption_and_a_warm_prefix_cache(device, dtype):
    """The window of half of the layers is passed, and pages before it are given back."""
    stats = check_together(
        device, "GptOss", dtype, max_num_batched_tokens=7, rounds=2, enable_prefix_cache=True, page_size=3, num_pages=22
    )
    assert stats.chunks > stats.steps and stats.prefix_tokens > 0 and stats.preemptions > 0


def check(handle, completions):
    for c in completions:
        ids = torch.tensor([c.prompt_ids + c.token_ids])
        with torch.no_grad():
            expected = handle.logprobs(ids.to(next(handle.model.parameters()).device))
        assert_bitwise(torch.tensor(c.raw_logprobs), expected[0, len(c.prompt_ids) - 1 : -1].cpu())


@each_device
def test_the_trainer_has_the_same_bits_and_updates_keep_them(device, dtype):
    model, params = build("GptOss", dtype, device=device), [replace(p, temperature=1.0) for p in PARAMS]
    with vx.patch.hf(build("GptOss", dtype, device=device)) as handle, launch(device, model=model) as engine:
        assert engine.path == "fused"
        stored = dict(engine.model.named_parameters())[GATE_UP]
        assert stored.transpose(1, 2).is_contiguous() and not stored.is_contiguous()  # no step copies it
        first = engine.generate(PROMPTS, params)
        check(handle, first)
        state = {name: t.clone() for name, t in handle.model.state_dict().items()}
        new = {name: t * 1.25 if "experts" in name else t for name, t in state.items()}
        engine.update_weights(new, numerics=handle.numerics())
        other = engine.generate(PROMPTS, params)
        handle.model.load_state_dict(new)
        check(handle, other)
        assert [c.token_ids for c in other] != [c.token_ids for c in first]
        engine.sleep(1)
        engine.wake_up()
        assert [bits(c) for c in engine.generate(PROMPTS, params)] == [bits(c) for c in other]
        engine.update_weights(iter(state.items()), numerics=handle.numerics())
        assert [bits(c) for c in engine.generate(PROMPTS, params)] == [bits(c) for c in first]


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 10**6])
def test_runs_of_elements_go_where_they_belong_in_matrices_that_are_stored_turned(size):
    """A hand-over's pieces end in the midst of rows and of experts."""
    target = build("GptOss")
    names = dict(target.named_parameters())
    stored = names[GATE_UP]
    stored.data = stored.data.transpose(1, 2).contiguous().transpose(1, 2)
    source = {name: torch.randn_like(p) for name, p in names.items()}
    update = Update(target)
    for name, value in source.items():
        flat, step = value.flatten(), size if name == GATE_UP else value.numel()
        update.write((name, Piece(at, flat[at : at + step])) for at in range(0, len(flat), step))
    update.finish()
    for name, value in source.items():
        assert_bitwise(names[name].detach(), value, name)


# MXFP4


def quantise(path, seed=0):
    """A saved directory's experts as random numbers of 4 bits, under the names that gpt-oss's have."""
    g, file = torch.Generator().manual_seed(seed), path / "model.safetensors"
    state = load_file(file)
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj")) and ".experts." in name]:
        experts, inputs, outputs = state.pop(name).shape
        state[f"{name}_blocks"] = torch.randint(
            256, (experts, outputs, inputs // 32, 16), generator=g, dtype=torch.uint8
        )
        scales = torch.randint(122, 127, (experts, outputs, inputs // 32), generator=g, dtype=torch.uint8)
        scales.view(-1)[:3] = torch.tensor([0, 1, 140])
        state[f"{name}_scales"] = scales
    save_file(state, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (path / "config.json").write_text(json.dumps(config))


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    path = tmp_path_factory.mktemp("packed")
    build("GptOss").save_pretrained(path)
    quantise(path)
    return path


def test_experts_of_four_bits_become_the_numbers_that_transformers_makes_of_them(packed, caplog):
    from transformers import AutoModelForCausalLM, Mxfp4Config

    options = {"dtype": torch.bfloat16, "quantization_config": Mxfp4Config(dequantize=True)}
    expected = AutoModelForCausalLM.from_pretrained(packed, **options)
    found = whole(packed)
    assert "MXFP4" in caplog.text
    assert contents(found)[0] == contents(expected)[0]
    assert contents(in_stages(packed))[0] == contents(expected)[0]
    with vx.patch.hf(expected) as handle, Engine.from_pretrained(packed, device="cpu", config=ROOMY) as engine:
        check(handle, engine.generate(PROMPTS[:2], [replace(p, temperature=1.0) for p in PARAMS[:2]]))


def test_what_is_no_mxfp4_is_refused_before_anything_is_read(packed, tmp_path):
    state = load_file(packed / "model.safetensors")

    def refused(change, match):
        other = dict(state)
        change(other)
        save_file(
            {n: t.contiguous() for n, t in other.items()}, tmp_path / "model.safetensors", metadata={"format": "pt"}
        )
        (tmp_path / "config.json").write_text((packed / "config.json").read_text())
        directory = read_directory(tmp_path)
        with pytest.raises(ValueError, match=match):
            fit(empty_model(directory, torch.bfloat16), directory)

    blocks, scales = f"{GATE_UP}_blocks", f"{GATE_UP}_scales"
    refused(lambda s: s.pop(scales), "cannot become .*gate_up_proj.*blocks alone")
    refused(lambda s: s.update({blocks: s[blocks].float()}), "gate_up_proj_blocks is F32, expected U8")
    refused(lambda s: s.update({scales: s[scales][:, 1:]}), "are not those of one matrix")
    refused(lambda s: s.update({blocks: s[blocks][:, :2], scales: s[scales][:, :2]}), "mismatched keys")
    refused(lambda s: s.pop(blocks) is s.pop(scales), "missing keys: .*gate_up_proj")


def test_the_scale_that_is_no_number_makes_none():
    blocks = torch.full((1, 2, 1, 16), 0x72, dtype=torch.uint8)  # 1 and 6
    made = dequantised(blocks, torch.tensor([[[127], [255]]], dtype=torch.uint8), torch.bfloat16)
    assert made.shape == (1, 32, 2) and made[0, :4, 0].tolist() == [1, 6, 1, 6] and made[0, :, 1].isnan().all()
