"""The random attack itself: every room withstands a few draws, and an op that sees its neighbours does not."""

import attack
import pytest
import torch
from test_layout import ROOMS

import vexact_ops as vx

DEVICES = ["cpu", pytest.param("cuda", marks=[] if torch.cuda.is_available() else pytest.mark.skip("no CUDA device"))]


def test_every_room_is_attacked():
    assert sorted(attack.ROOMS) == ROOMS


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("room", attack.ROOMS)
def test_nothing_differs(room, device):
    assert [(seed, error) for seed, error in attack.attack(room, device, 4, seed=10_000) if error] == []


def split_in_a_batch(x, weight, bias=None, **_):
    """Products that are split along k where there is more than one row."""
    parts = 1 if x.shape[0] == 1 else 2
    cut = zip(x.float().chunk(parts, 1), weight.float().chunk(parts, 1))
    return sum(a @ b.t() for a, b in cut).to(x.dtype)


def off_in_misaligned_storage(gate, up, **_):
    """A product that reads one element too early where its storage is not aligned."""
    return gate * (up if gate.data_ptr() % 16 == 0 else up.roll(1, -1))


@pytest.mark.parametrize(
    "room,name,broken", [("linear", "linear", split_in_a_batch), ("silu_mul", "silu_mul", off_in_misaligned_storage)]
)
def test_an_op_that_breaks_the_promise_is_caught(room, name, broken, monkeypatch):
    def errors():
        return [error for _, error in attack.attack(room, "cpu", 20, seed=0) if error]

    assert errors() == [], "the op as it is"
    monkeypatch.setattr(vx, name, broken)
    assert any("differ" in error for error in errors())
