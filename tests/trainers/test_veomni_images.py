"""VeOmni's own classes of models of images: covered, with the bits of transformers' classes, forward and backward."""

import importlib
import sys
from pathlib import Path

import pytest
import torch

import vexact_ops as vx
from vexact_ops.testing import assert_bitwise

sys.path.append(str(Path(__file__).parents[1] / "patch"))
import image_models
from image_models import IMAGE, PIXELS, ROWS

sys.path.pop()
CLASSES = {"qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}


def of_veomni(name):
    where = f"veomni.models.transformers.{name}.generated.patched_modeling_{name}_gpu"
    return getattr(importlib.import_module(where), f"{CLASSES[name]}ForConditionalGeneration")


def rows():
    ids = torch.tensor([[token for row, _ in ROWS for token in row]])
    given = {"pixel_values": torch.cat([x for x in PIXELS if x is not None])}
    given["image_grid_thw"] = torch.tensor([grid for _, grids in ROWS for grid in grids])
    lengths = torch.tensor([len(row) for row, _ in ROWS])
    return ids, given, torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).int()


@pytest.mark.parametrize("name", CLASSES)
def test_its_classes_have_the_bits_of_transformers(name):
    stock = image_models.tiny(name)
    model = of_veomni(name)(image_models.config_of(name)).to(torch.bfloat16)
    model.load_state_dict(stock.state_dict())
    for module in model.modules():  # frequencies are fp32 where a model is loaded
        for key, buffer in module._buffers.items():
            if buffer is not None and key.endswith("inv_freq"):
                module._buffers[key] = buffer.float()
    ids, given, cu = rows()
    found = []
    for one in (stock, model):
        one.train()
        with vx.patch.hf(one) as handle:
            logprobs = handle.logprobs(ids, cu_seqlens=cu, **given)
            named = dict(one.named_parameters())
            grads = torch.autograd.grad(logprobs.sum(), [named[key] for key in sorted(named)], allow_unused=True)
            found.append((logprobs.detach(), *(g for g in grads if g is not None)))
            masks = {"image_mask": ids == IMAGE, "video_mask": ids == IMAGE + 1, "multimodal_metadata": {}}
            numbers = handle.numerics()["model"]
        found[-1] += (numbers,)
    (*expected, first), (*got, second) = found
    assert_bitwise(tuple(got), tuple(expected))
    assert first == second  # an engine's are those of transformers' class
    with vx.patch.hf(model.eval()) as handle, torch.no_grad():
        assert_bitwise(handle.logprobs(ids, cu_seqlens=cu, **given), got[0])
        out = model.model(input_ids=ids, cu_seq_lens_q=cu, use_cache=False, **given, **masks).last_hidden_state
        assert out.shape[:2] == ids.shape
        masks["image_mask"] = ~masks["image_mask"]
        with pytest.raises(ValueError, match="image_mask: got another one than input_ids have"):
            model.model(input_ids=ids, cu_seq_lens_q=cu, use_cache=False, **given, **masks)


def test_of_qwen2_5_vl_its_class_is_refused_by_name():
    from vexact_ops.patch import UnsupportedModule

    name = "patched_modeling_qwen2_5_vl_gpu"
    generated = importlib.import_module(f"veomni.models.transformers.qwen2_5vl.generated.{name}")
    with torch.device("meta"):
        model = generated.Qwen2_5_VLForConditionalGeneration(image_models.config_of("qwen2_5_vl"))
    with (
        vx.patch.veomni() as veomni,
        pytest.raises(UnsupportedModule, match=r"\(qwen2_5_vl\): .* on three axes .* \(verl: strategy=fsdp2\)"),
    ):
        veomni.cover(model)
