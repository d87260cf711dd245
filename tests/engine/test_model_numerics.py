"""What a model computes with is compared when weights change hands: numbers of its configuration, buffers that no
checkpoint has, and dtypes; field by field, by update_weights and by a hand-over between processes' ends alike."""

import json

import pytest
import torch
from engine_models import build
from handovers import receiving, sender
from transformers import AutoModelForCausalLM

import vexact_ops as vx
from vexact_engine import Engine, HandoverFailed

DTYPE = torch.bfloat16
ROPE = {"rope_type": "default", "rope_theta": 1e6}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build("Qwen3").to(DTYPE).save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def engine(saved):
    with Engine.from_pretrained(saved, device="cpu") as engine:
        yield engine


def trainer(path, **overrides):
    return AutoModelForCausalLM.from_pretrained(path, dtype=overrides.pop("dtype", DTYPE), **overrides)


OVERRIDES = {
    "rms_norm_eps": ({"rms_norm_eps": 1e-2}, [r"model\.layers\.\S*before\.eps: got 0\.01, expected 1e-06"]),
    "rope": ({"rope_parameters": ROPE}, [r"model\.rotary\.0\.inv_freq: got '1 to 5\.62\S*, 8 numbers, sha256"]),
    "yarn": (
        {"rope_parameters": {**ROPE, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}},
        [r"model\.rotary\.0\.inv_freq: got", r"model\.rotary\.0\.scaling: got 1\.138\d*, expected 1\.0"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OVERRIDES)
@pytest.mark.parametrize("how", ["handle", "parameters", "state_dict"])
def test_a_number_that_a_trainer_overrides_in_code_is_refused_by_name(saved, engine, name, how):
    overrides, patterns = OVERRIDES[name]
    model = trainer(saved, **overrides)
    version = engine.weight_version
    with vx.patch.hf(model) as handle:
        numerics = handle.numerics() if how == "handle" else vx.numerics("cpu")
        given = model.state_dict() if how == "state_dict" else model.named_parameters()
        if how == "handle":
            given = {name: tensor.clone() for name, tensor in given}
        for pattern in patterns:
            with pytest.raises(ValueError, match=pattern):
                engine.update_weights(given if isinstance(given, dict) else model.named_parameters(), numerics=numerics)
    assert engine.weight_version == version


def test_a_trainer_with_the_same_numbers_is_taken(saved, engine):
    model = trainer(saved)
    with vx.patch.hf(model) as handle:
        assert vx.numerics_difference(handle.numerics(), engine.numerics()) == {}
        assert vx.numerics_difference(json.loads(json.dumps(handle.numerics())), engine.numerics()) == {}
        for numerics in (handle.numerics(), vx.numerics("cpu")):
            engine.update_weights(model.named_parameters(), numerics=numerics)


def test_a_trainer_of_another_dtype_is_refused(saved, engine):
    model = trainer(saved, dtype=torch.float32)
    rounded = {name: p.detach().to(DTYPE) for name, p in model.named_parameters()}
    with vx.patch.hf(model) as handle, pytest.raises(ValueError, match=r"model\.dtype\.linear: got 'float32'"):
        engine.update_weights(rounded, numerics=handle.numerics())


def test_numerics_without_a_model_are_taken_and_said_once(saved, engine, caplog):
    from vexact_engine.handover import session

    session._say_unknown.cache_clear()
    model = trainer(saved)
    for _ in range(2):
        engine.update_weights(model.state_dict(), numerics=vx.numerics("cpu"))
    (record,) = [r for r in caplog.records if "say nothing of its model" in r.message]
    assert "handle.numerics()" in record.message


def test_a_hand_over_compares_them(saved, engine, sockets):
    other, same = trainer(saved, rms_norm_eps=1e-2), trainer(saved)
    with receiving(engine) as (receiver, start):
        result = start()
        said = r"model\.norm\.eps: the trainer has 0\.01, the engine 1e-06"
        with vx.patch.hf(other) as handle:
            numerics = handle.numerics()
        with sender(receiver, numerics=numerics) as out, pytest.raises(HandoverFailed, match=said):
            out.send(other.state_dict())
        with pytest.raises(HandoverFailed, match=r"model\.norm\.eps"):
            result()
        result = start()
        with vx.patch.hf(same) as handle, sender(receiver, numerics=handle.numerics()) as out:
            assert out.send(same.state_dict()) == result()
