"""The directory of every covered family is read by a stage as from_pretrained reads it: names, dtypes, bytes, ties."""

import pytest
import torch
from families import family
from test_covered import small
from transformers import AutoModelForCausalLM

import vexact_ops as vx
from vexact_engine.weights.partial import Origin, fill, settled, skeleton


def tensors(model):
    return dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))


REFUSED = {"gpt_bigcode": "transformer: transformers does not say how to make bias"}


@pytest.mark.parametrize("name", [family(n) for n in vx.patch.COVERED if n not in REFUSED])
def test_a_stage_reads_what_transformers_reads(name, tmp_path):
    small(name).save_pretrained(tmp_path)  # in fp32: what is read is rounded, but for routers
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    origin = settled(Origin(str(tmp_path), torch.bfloat16))
    read = skeleton(origin)
    fill(read, tensors(read), origin, torch.device("cpu"))
    want, got = tensors(whole), tensors(read)
    assert want.keys() == got.keys()
    for key, value in want.items():
        assert got[key].dtype == value.dtype and torch.equal(got[key], value), key
    assert {k for k in want if want[k] is whole.get_input_embeddings().weight} == {
        k for k in got if got[k] is read.get_input_embeddings().weight
    }


@pytest.mark.parametrize("name", [family(n) for n in REFUSED])
def test_what_a_stage_cannot_make_is_refused_by_name(name, tmp_path):
    small(name).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=REFUSED[name]):
        skeleton(settled(Origin(str(tmp_path), torch.bfloat16)))
