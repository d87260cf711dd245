"""Gradients summed in one tree. Ranks of several processes: tests/engine/test_recipe_layouts.py."""

import pytest
import torch
from torch import nn

import vexact_ops as vx
from vexact_ops.patch.gradients import fold
from vexact_ops.testing import assert_bitwise


@pytest.mark.parametrize("size", [0, 1, 2, 3, 5, 8, 127, 129, 1000])
def test_fold_sums_each_row_alone_and_in_pairs_of_halves(size):
    values = torch.randn(7, size)
    found = fold(values)
    torch.testing.assert_close(found, values.double().sum(-1).float())
    assert_bitwise(found, torch.stack([fold(row) for row in values]))
    if size == 5:
        a, b, c, d, e = values.unbind(-1)
        assert_bitwise(found, ((a + e) + c) + (b + d))


def leaves(count):
    return [torch.randn(3, 4) * 10.0**i for i in range(count)]


def gradients(model, inputs):
    """Of each input alone."""
    found = []
    for x in inputs:
        model.zero_grad()
        model(x).square().sum().backward()
        found.append([p.grad.clone() for p in model.parameters()])
    model.zero_grad()
    return found


def test_a_step_s_gradients_are_the_tree_s():
    torch.manual_seed(0)
    model, inputs = nn.Linear(4, 2), leaves(7)
    tree, alone = vx.patch.TreeGradients(model), gradients(model, inputs)
    for x in inputs:
        model(x).square().sum().backward()
        tree.add()
        assert all(p.grad is None for p in model.parameters())
    norm = tree.finish()
    for i, p in enumerate(model.parameters()):
        g = [each[i] for each in alone]
        assert_bitwise(p.grad, ((g[0] + g[1]) + (g[2] + g[3])) + ((g[4] + g[5]) + g[6]))
    whole = torch.cat([p.grad.flatten() for p in model.parameters()])
    in_turn = torch.cat([sum(each[i] for each in alone).flatten() for i in range(2)])
    assert not torch.equal(whole, in_turn)  # another order is another sum
    torch.testing.assert_close(norm, whole.norm())
    with pytest.raises(RuntimeError, match="TreeGradients: finish: no backward pass was added"):
        tree.finish()


def test_longer_gradients_are_cut_to_the_norm_and_shorter_ones_stay():
    model, (x,) = nn.Linear(4, 2), leaves(1)
    tree = vx.patch.TreeGradients(model)
    for most in (1e-3, 1e9):
        (alone,) = gradients(model, [x])
        model(x).square().sum().backward()
        tree.add()
        norm = tree.finish(most)
        scale = torch.clamp(most / (norm + 1e-6), max=1.0)
        for p, g in zip(model.parameters(), alone):
            assert_bitwise(p.grad, g * scale)
        model.zero_grad()


def test_parameters_without_a_gradient_keep_none():
    model = nn.ModuleDict({"used": nn.Linear(4, 2), "idle": nn.Linear(4, 2), "frozen": nn.Linear(4, 2)})
    model["frozen"].requires_grad_(False)
    tree = vx.patch.TreeGradients(model)
    for x in leaves(2):
        model["used"](x).sum().backward()
        tree.add()
    tree.finish(1.0)
    assert model["used"].weight.grad is not None
    assert model["idle"].weight.grad is None and model["frozen"].weight.grad is None
