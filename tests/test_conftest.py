"""What tests draw from the global generators is theirs alone."""

import random
from types import SimpleNamespace

import conftest
import pytest
import torch


def draw():
    return torch.rand(3, dtype=torch.float32).tolist(), random.random()


@pytest.fixture
def drawn():
    return draw()


def test_what_is_drawn_is_a_function_of_the_test_and_of_the_fixture(request, drawn):
    """Whatever this process has run before, and whichever test is the first to want a fixture."""
    found = draw()
    torch.manual_seed(1), random.seed(1)
    conftest.pytest_runtest_call(request.node)
    assert draw() == found != drawn
    file = request.node.nodeid.partition("::")[0]
    conftest.pytest_fixture_setup(SimpleNamespace(baseid=file, argname="drawn"), SimpleNamespace(param_index=0))
    assert draw() == drawn
