"""What the recipe checks of a rollout by sampling: which answers are scored twice, and that one other bit of one of
them ends the run, by its name, before anything is trained on."""

import json

import pytest
import torch
from engine_models import build

pytest.importorskip("zmq", reason="pyzmq is not installed")

from vexact_engine import cli
from vexact_engine.proof.compare import LogprobsDiffer
from vexact_engine.recipes import check, grpo
from vexact_engine.recipes.checkpoint import Saving
from vexact_engine.recipes.launch import launch
from vexact_engine.recipes.options import Options
from vexact_engine.recipes.trainer import Sample, Trainer

SMALL = {"device": "cpu", "prompts": 2, "samples": 4, "steps": 4, "max_new_tokens": 6, "max_prompt_tokens": 20}
SMALL |= {"learning_rate": 1e-2, "micro_batch": 3}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "Qwen3"
    build("Qwen3").save_pretrained(folder)
    return str(folder)


def argv(model, *more):
    given = {"model": model, **SMALL}
    return ["recipe", "grpo", *(str(a) for k, v in given.items() for a in (f"--{k.replace('_', '-')}", v)), *more]


@pytest.mark.parametrize("ranks,any_layout", [(1, False), (2, False), (4, True)], ids=["1", "2", "4 of any layout"])
def test_each_rank_scores_as_many_of_its_own_in_every_so_many_steps(ranks, any_layout):
    chosen = Options(prompts=4, samples=8, ranks=ranks, micro_batch=2, any_layout=any_layout, check_every=3)
    every = list(range(32))
    for step in (0, 3, 300):
        found = [check.places(chosen, step, rank) for rank in range(ranks)]
        for rank, places in enumerate(found):
            assert len(places) == len(set(places)) == 8 // ranks and {*places} <= {*chosen.share(every, rank)}
        assert found == [check.places(chosen, step, rank) for rank in range(ranks)]
    assert check.places(chosen, 0, 0) != check.places(chosen, 3, 0)
    assert not any(check.places(chosen, step, 0) for step in (1, 2, 4, 5, 301))
    whole, none = (Options(check_every=n, check_share=share) for n, share in ((1, 1.0), (0, 0.5)))
    assert check.places(whole, 7, 0) == every and check.places(none, 0, 0) == []
    assert len(check.places(Options(check_share=1e-9), 0, 0)) == 1


def test_the_first_token_that_differs_is_named():
    chosen = Options(prompts=2, samples=4)
    rollout = torch.tensor([-0.5, -1.0, -0.0])
    good, bad = (Sample([1], [7, 8, 9], rollout, 1.0) for _ in range(2))
    other = rollout.clone()
    other[1:].view(torch.int32)[:] += torch.tensor([1, 0], dtype=torch.int32)
    other[2] = 0.0  # not the bytes of -0.0
    samples = [good] * 5 + [bad]
    check.expect_equal(chosen, 4, samples, {0: rollout.clone(), 5: rollout.clone()})
    with pytest.raises(LogprobsDiffer) as caught:
        check.expect_equal(chosen, 4, samples, {0: rollout.clone(), 5: other})
    assert str(caught.value) == (
        "recipe: step 5, prompt 2 of 2, answer 2 of 4, token 2 of 3 (id 8): the rollout's log-probability is "
        "-1 (bf800000), the trainer's -1.00000012 (bf800001); of 6 that were scored again 2 differ"
    )
    with pytest.raises(LogprobsDiffer, match=r"token 1 of 3 .* nan .* the trainer's nan .* 3 .* 1 differ"):
        broken = torch.tensor([torch.nan, -1.0, 2.0])
        check.expect_equal(chosen, 0, [Sample([1], [7, 8, 9], broken, 0.0)], {0: broken.clone()})


@pytest.mark.process
def test_every_so_many_steps_a_part_is_compared_twice(model, tmp_path):
    file = tmp_path / "run.json"
    assert cli.main(argv(model, "--check-every", "3", "--check-share", "0.5", "--json", str(file))) == 0
    steps = json.loads(file.read_text())["aligned"]
    assert [step["differ_recomputed"] for step in steps] == [0, None, None, 0]
    for step in steps:
        assert step["compared"] == step["expected"]
        assert (step["tokens"] < step["compared"] < 2 * step["tokens"]) == (step["differ_recomputed"] == 0)


@pytest.mark.process
def test_one_bit_of_one_log_probability_ends_the_run_before_it_is_trained_on(model, monkeypatch, capsys):
    honest, calls, trained = Trainer.score, [], []

    def flipped(self, samples):
        found = honest(self, samples)
        calls.append(len(samples))
        if len(calls) == 2:  # of step 3
            found[-1][2:3].view(torch.int32)[:] ^= 1
        return found

    def step(self, *args):
        trained.append(args)
        return train(self, *args)

    train = Trainer.step
    monkeypatch.setattr(Trainer, "score", flipped)
    monkeypatch.setattr(Trainer, "step", step)
    assert cli.main(argv(model, "--check-every", "2")) == 1
    out = capsys.readouterr().out
    assert calls == [2, 2] and len(trained) == 2
    assert "recipe: step 3, prompt " in out and "token 3 of " in out and "scored again 1 differ" in out


def test_generate_of_the_stock_model_has_other_bytes(model, tmp_path):
    """The side for contrast with nothing of ours in it; and the same run again, which is kept, has the same figures."""
    ways = None, Saving(str(tmp_path / "run"), every=2)
    launched = (launch(Options(model=model, **SMALL), sides=[grpo.GENERATE], saving=saving) for saving in ways)
    runs = [run[grpo.GENERATE] for run in launched]
    assert ways[1].newest(grpo.GENERATE) == 4
    resumed = Saving(str(tmp_path / "run"), every=2, resume=True)
    more = launch(Options(model=model, **{**SMALL, "steps": 5}), sides=[grpo.GENERATE], saving=resumed)
    assert [step["step"] for step in more[grpo.GENERATE].steps] == [5]
    first, again = ([{k: v for k, v in s.items() if k not in ("seconds", "held")} for s in r.steps] for r in runs)
    assert first == again and [step["weight_version"] for step in first] == [1, 2, 3, 4]
    for name in ("differ", "differ_recomputed", "kl"):
        assert sum(step[name] for step in first) > 0
    for step in first:
        assert step["moved"] > 0 and step["max_abs_diff"] < 0.2  # of the same weights
        assert step["compared"] == step["expected"] == 2 * step["tokens"]


@pytest.mark.parametrize("given", ["stocks", "aligned,aligned", ""])
def test_sides_that_are_none_are_refused(given, capsys):
    with pytest.raises(SystemExit):
        cli.main(["recipe", "grpo", "--sides", given])
    assert f"--sides: got {given!r}, expected some of aligned, stock, generate, each once" in capsys.readouterr().err
