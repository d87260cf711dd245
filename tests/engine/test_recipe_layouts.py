"""The recipe on any number of ranks: the parameters of one."""

import dataclasses

import pytest
from engine_models import build

pytest.importorskip("zmq", reason="pyzmq is not installed")

from vexact_engine.recipes.checkpoint import Saving
from vexact_engine.recipes.launch import launch
from vexact_engine.recipes.options import Options

SMALL = {"device": "cpu", "prompts": 4, "samples": 4, "steps": 2, "max_new_tokens": 4, "max_prompt_tokens": 20}
SMALL |= {"learning_rate": 1e-2, "micro_batch": 1, "max_grad_norm": 0.5, "weight_decay": 0.01, "check_every": 0}


@pytest.fixture
def chosen(request, tmp_path):
    build(request.param).save_pretrained(tmp_path / "model")
    return Options(model=str(tmp_path / "model"), **SMALL)


def trained(options, saving=None):
    """Digests of all parameters step by step, the SHA-256 at the end, and gradient norms."""
    seen = []

    def note(kind, *values):
        if kind in ("parameters", "end"):
            seen.append(values)

    run = launch(options, report=note, saving=saving, watch=True)["aligned"]
    assert run.equal
    return seen, [step["grad_norm"] for step in run.steps]


@pytest.mark.process
@pytest.mark.parametrize("chosen,ranks", [("Qwen3", 4), ("Qwen3Moe", 2)], indirect=["chosen"])
def test_any_power_of_two_of_ranks_ends_with_the_same_parameters(chosen, ranks):
    one, other = (trained(dataclasses.replace(chosen, any_layout=True, ranks=n, mini_batches=2)) for n in (1, ranks))
    assert len(one[0]) == 4 and one[1][-1] > 0.5  # clipped
    assert other == one
    if ranks == 4:
        sequential = trained(dataclasses.replace(chosen, mini_batches=2))
        assert sequential[0][0] == one[0][0] and sequential[0][-1] != one[0][-1]  # the tree is another sum


@pytest.mark.process
@pytest.mark.parametrize("chosen", ["Qwen3"], indirect=True)
def test_a_run_goes_on_over_other_ranks(chosen, tmp_path):
    """With one more than there were, and with fewer."""
    one = dataclasses.replace(chosen, any_layout=True, steps=3)
    whole = trained(one)
    saving = Saving(str(tmp_path / "run"), every=1)
    for steps, ranks in enumerate((1, 2, 1)):
        part = dataclasses.replace(one, steps=steps + 1, ranks=ranks)
        found = trained(part, saving=dataclasses.replace(saving, resume=steps > 0))
    assert found == ([whole[0][-2], whole[0][-1]], whole[1][-1:])


def test_what_no_tree_can_be_of_is_refused():
    for changes, said in (
        ({"ranks": 3, "prompts": 3}, "ranks is 3, expected a power of two with any_layout"),
        ({"micro_batch": 3}, "micro_batch: got 3 with any_layout, expected prompts x samples, 4 x 4, to be a multiple"),
    ):
        with pytest.raises(ValueError, match=said):
            Options(any_layout=True, **{**SMALL, **changes})


def test_ranks_are_free_where_any_layout_has_the_same_parameters():
    one, two = (Options(any_layout=True, ranks=ranks, **SMALL) for ranks in (1, 2))
    two.check_same(one.to_json(), "another run")
    with pytest.raises(ValueError, match="ranks: got 2, but another run has 1"):
        dataclasses.replace(two, any_layout=False).check_same(
            dataclasses.replace(one, any_layout=False).to_json(), "another run"
        )
