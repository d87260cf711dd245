"""The recipe's parameters after fifty steps, by their SHA-256: the same ones however the run was had. The one test that
runs so long, some half a minute of a core: what differs in few bits may take many steps to show."""

import argparse

import pytest
import torch
from engine_models import build

pytest.importorskip("zmq", reason="pyzmq is not installed")

from benchmarks import repeats
from vexact_engine.recipes.trainer import Trainer

WAYS = {
    way: changes for way, changes in repeats.WAYS.items() if "ranks" not in changes
}  # test_recipe_layouts has those
SIZES = {"layers": None, "device": "cpu", "prompts": 2, "samples": 2, "answer": 4}


def run(folder, ways, steps):
    build("Qwen3", num_hidden_layers=1).save_pretrained(folder)
    args = argparse.Namespace(shape=str(folder), steps=steps, **SIZES)
    return {found["case"].removeprefix(f"{folder} "): found for found in repeats.run(args, ways)}


@pytest.mark.process
def test_fifty_steps_end_with_the_same_parameters_in_whatever_way_they_are_run(tmp_path):
    found = run(tmp_path / "model", WAYS, 50)
    assert len(found) == len(WAYS) >= 8
    (digest,) = {one["sha256"] for one in found.values()}
    assert len(digest) == 64 and not any(one["differ"] for one in found.values())
    for way, one in found.items():
        # every figure, parameter and end; of a resumed run those of its first half too
        assert (one["compared"] > 500) == (way != "as it is") and one["tokens"] >= 50


@pytest.mark.process
def test_a_way_that_changes_one_bit_is_named(tmp_path, monkeypatch):
    """The twin."""
    train, calls = Trainer.step, []

    def flipping(self, *args):
        figures = train(self, *args)
        calls.append(None)
        if len(calls) == 3:  # the first step of the second way
            next(self.weights.parameters()).detach().view(torch.int32).flatten()[7].bitwise_xor_(1)
        return figures

    monkeypatch.setattr(Trainer, "step", flipping)
    found = run(tmp_path / "model", {"as it is": {}, "again": {}}, 2)
    assert found["as it is"]["differ"] is None
    assert found["again"]["differ"].startswith(
        "recipe: aligned, after step 1: parameter model.embed_tokens.weight: got "
    )
