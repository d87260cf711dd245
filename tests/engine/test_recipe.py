"""The GRPO recipe: what it computes, that rollout and trainer have the same bytes at every step, that a run can be had
again, and that whatever dies is named and leaves nothing behind."""

import contextlib
import dataclasses
import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import forks
import pytest
import torch
from children import children_of, is_alive
from engine_models import build, byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("zmq", reason="pyzmq is not installed")

from vexact_engine import Speculation, cli
from vexact_engine.core.answers import Answers
from vexact_engine.errors import ReplicaDied
from vexact_engine.proof.compare import compare
from vexact_engine.recipes import grpo, report, tasks
from vexact_engine.recipes.checkpoint import Saving
from vexact_engine.recipes.launch import ProcessDied, launch
from vexact_engine.recipes.options import Options
from vexact_engine.recipes.trainer import Trainer, cut, policy_loss

ROOT = Path(__file__).parents[2]
SMALL = {"device": "cpu", "prompts": 2, "samples": 4, "steps": 2, "max_new_tokens": 6, "max_prompt_tokens": 20}
SMALL |= {"learning_rate": 1e-2, "micro_batch": 3, "check_every": 1, "check_share": 1.0}


def options(model, **changes):
    return Options(model=str(model), **{**SMALL, **changes})


def argv(model, *more):
    given = {"model": model, **SMALL}
    return ["recipe", "grpo", *(str(a) for k, v in given.items() for a in (f"--{k.replace('_', '-')}", v)), *more]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")

    def make(family):
        path = folder / family
        if not path.exists():
            build(family).save_pretrained(path)
        return path

    return make


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch):
    """No process, no socket, whatever has happened."""
    with tempfile.TemporaryDirectory() as folder:  # a short name: sockets have at most 107 characters
        monkeypatch.setenv("XDG_RUNTIME_DIR", folder)
        yield
        assert not multiprocessing.active_children()
        end = time.monotonic() + 300
        while (left := [*Path(folder).rglob("*.sock"), *descendants(os.getpid())]) and time.monotonic() < end:
            time.sleep(0.05)
        assert not left


def descendants(pid):
    """Processes below one that still run; helpers of multiprocessing and of forks.py, which end with it, are none."""
    found = []
    for child in children_of(pid):
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{child}/cmdline").read_bytes()
            is_helper = b"resource_tracker" in line or child == forks.helper()
            found += [] if is_helper or not line else [child, *descendants(child)]
    return found


def wait_until_dead(pids):
    end = time.monotonic() + 300
    while left := [pid for pid in pids if is_alive(pid)]:
        assert time.monotonic() < end, f"still there: {left}"
        time.sleep(0.05)


def figures(runs):
    """All but times and memory."""
    return {side: [bits(step) for step in run.steps] for side, run in runs.items()}


def bits(step):
    return {k: v for k, v in step.items() if k not in ("seconds", "held")}


# What it computes


def test_advantages():
    assert grpo.advantages([1.0, 1.0, 1.0], "grpo") == [0.0] * 3 == grpo.advantages([1.0, 1.0, 1.0], "rloo")
    assert grpo.advantages([0.1, 0.1, 0.1], "grpo") == [0.0] * 3  # their mean is another float
    assert grpo.advantages([0.0, 3.0], "grpo") == pytest.approx([-(0.5**0.5), 0.5**0.5], rel=1e-5)
    assert grpo.advantages([0.0, 0.0, 3.0], "rloo") == [-1.5, -1.5, 3.0]


def test_the_loss_is_reinforce_on_policy_and_clipped_off_it():
    new = torch.tensor([-1.0, -2.0, -1.0, -2.0], requires_grad=True)
    old = torch.tensor([-1.0, -2.0, -2.0, -1.0])
    advantage = torch.tensor([2.0, -3.0, 1.0, 1.0])
    loss = policy_loss(new, old, advantage, 0.2)
    (gradient,) = torch.autograd.grad(loss.sum(), new)
    assert gradient[:2].tolist() == [-2.0, 3.0]  # the ratio is exactly 1: advantage x gradient of the log-probability
    assert gradient[2] == 0 and loss[2].item() == pytest.approx(-1.2)  # far enough already
    assert gradient[3].item() == pytest.approx(-torch.tensor(-1.0).exp().item())  # the wrong way: not clipped


def test_tokens_of_prompts_are_no_part_of_it(models):
    """The mask: a prompt's tokens, and others' answers, change nothing about an answer's place."""
    trainer = object.__new__(Trainer)
    with torch.no_grad():
        import vexact_ops as vx

        model = build("Qwen3")
        trainer.options, trainer.device = options("x", temperature=0.7), torch.device("cpu")
        samples = [grpo.Sample(p, t, None, 0.0) for p, t in (([5, 6], [7]), ([9], [10, 11, 12]), ([3, 4, 5], [6, 7]))]
        with vx.patch.hf(model) as trainer._handle:
            trainer.model = model
            packed, entropy = trainer._packed(samples, entropy=True)
            again, none = trainer._packed(samples[1:2], entropy=False)
        padded, spread = trainer._padded(samples, entropy=True)
        alone = torch.cat(
            [
                torch.log_softmax(model(torch.tensor([s.prompt_ids + s.token_ids])).logits[0].float() / 0.7, -1)[
                    range(len(s.prompt_ids) - 1, len(s.prompt_ids) + len(s.token_ids) - 1), s.token_ids
                ]
                for s in samples
            ]
        )
    assert packed.shape == padded.shape == entropy.shape == spread.shape == (6,) and none is None
    assert compare(packed[1:4], again).equal
    for values in (packed, padded):
        torch.testing.assert_close(values, alone, rtol=0, atol=0.1)  # stock logits are bf16
    torch.testing.assert_close(entropy, spread, rtol=0, atol=0.1)


@pytest.mark.parametrize(
    "changes,text",
    [
        ({"samples": 1}, "Options: samples is 1, expected an integer of 2 or more"),
        ({"temperature": 0.0}, "Options: temperature is 0.0, expected a number above 0"),
        ({"advantage": "gae"}, "Options: advantage is 'gae', expected one of grpo, rloo"),
        ({"learning_rate": float("nan")}, "Options: learning_rate is nan, expected a number above 0"),
        ({"weight_decay": -1}, "Options: weight_decay is -1, expected a number of 0 or more"),
        ({"speculation": 65}, "Options: speculation is 65, expected an integer from 0 to 64"),
        ({"check_every": -1}, "Options: check_every is -1, expected an integer of 0 or more"),
        ({"check_share": 0.0}, "Options: check_share is 0.0, expected a number above 0, up to 1"),
        ({"epoch_steps": 0}, "Options: epoch_steps is 0, expected an integer of 1 or more or None"),
        ({"ranks": 3}, "expected a multiple of mini_batches x ranks, 3"),
        ({"layers": 2}, "Options: layers is 2, expected a model of "),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_options_are_named(changes, text):
    with pytest.raises(ValueError) as caught:
        options("somewhere", **changes)
    assert text in str(caught.value)


# Tasks


def task(name, given=None, tokenizer=None, seed=0):
    return tasks.make(name, given or {}, tokenizer=tokenizer, vocab_size=160, seed=seed, size=20)


def test_the_commands_defaults_are_those_of_options():
    given = vars(cli._parser()[0].parse_args(["recipe", "grpo"]))
    for field in dataclasses.fields(Options):
        if field.name not in ("device", "task_options"):  # which the command finds for itself
            assert given[field.name] == field.default, field.name


def test_evens():
    asked = task(None).questions(3, 5)
    assert asked == task("evens").questions(3, 5) != task("evens").questions(4, 5)
    assert asked != task("evens", seed=1).questions(3, 5)
    assert all(0 <= token < 160 for q in asked for token in q.prompt_ids)
    assert task("evens").reward(asked[0], [2, 3, 4, 8], "") == 0.75
    with pytest.raises(ValueError, match=r"task_options: got \{'a': 1\}, but evens has none"):
        task("evens", {"a": 1})


def test_without_reasoning_gym_the_error_says_what_to_run(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ModuleNotFoundError, match=r"not installed: reasoning_gym\. Run: pip install .*\[recipe\]"):
        task(None, tokenizer=byte_tokenizer())


@pytest.mark.parametrize("more", [[], ["--task", "chain_sum", "--model", "qwen3-0.6b"]], ids=["smollm2", "named"])
def test_that_it_is_missing_is_said_before_a_model_is_fetched(more, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    monkeypatch.setattr(
        "vexact_engine.recipes.launch.fetch_smollm2", lambda: pytest.fail("the model was fetched first")
    )
    monkeypatch.setattr("vexact_engine.recipes.launch.run", lambda *_: pytest.fail("the run began"))
    assert cli.main(["recipe", "grpo", *more]) != 0
    assert "not installed: reasoning_gym. Run: pip install" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more,said",
    [
        (["--model", "/nowhere"], "--model: '/nowhere': no such file or directory"),
        (["--dtype", "fp16"], "--dtype: got 'float16', expected one of bfloat16, float32 on a CPU"),
    ],
    ids=["model", "dtype"],
)
def test_what_cannot_be_loaded_is_said_before_anything_is_fetched_or_started(more, said, monkeypatch, capsys):
    monkeypatch.setattr("vexact_engine.recipes.launch.launch", lambda *_, **__: pytest.fail("the run began"))
    assert cli.main(["recipe", "grpo", "--device", "cpu", *more]) == 2
    assert capsys.readouterr().err == f"vexact recipe: {said}\n"


def test_a_task_whose_questions_follow_hashes_wants_them_fixed(monkeypatch, capsys):
    monkeypatch.setattr("vexact_engine.recipes.launch.fetch_smollm2", lambda: pytest.fail("the model was fetched"))
    monkeypatch.setitem(sys.modules, "reasoning_gym", object())
    for hashes in (1, 0):
        monkeypatch.setattr(tasks, "sys", SimpleNamespace(flags=SimpleNamespace(hash_randomization=hashes)))
        if hashes:
            assert cli.main(["recipe", "grpo", "--task", "ransom_note"]) == 2
            assert "--task: got 'ransom_note', which follows Python's hashes" in capsys.readouterr().err
        else:
            tasks.reasoning_gym("ransom_note")
        tasks.reasoning_gym("chain_sum")


def test_a_plot_of_no_known_kind_is_refused_at_once(capsys):
    with pytest.raises(SystemExit):
        cli.main(["recipe", "grpo", "--plot", "grpo.txt"])
    assert "--plot: got 'grpo.txt', expected a name that ends in .svg, .png or .pdf" in capsys.readouterr().err


def test_reasoning_gym():
    pytest.importorskip("reasoning_gym", reason="reasoning-gym is not installed (extra recipe)")
    made = task(None, tokenizer=byte_tokenizer())
    asked = made.questions(1, 3)
    assert asked == task("chain_sum", tasks.DEFAULT_OPTIONS, byte_tokenizer()).questions(1, 3) != made.questions(0, 3)
    answer = asked[0].entry["answer"]
    best = [answer, f"<answer>{answer}</answer>", f"Let me see.\nThe answer is {answer}.", f"2 = {answer}"]
    assert [made.reward(asked[0], [], text) for text in best] == [1.0] * 4
    assert made.reward(asked[0], [], f"<answer>77</answer> {answer}") < 1
    assert made.reward(asked[0], [], "") == 0
    with pytest.raises(ValueError, match="task: got 'chain_sums', expected 'evens' or one of ab, "):
        task("chain_sums", tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match="task_options: chain_sum: "):
        task("chain_sum", {"no_such": 1}, byte_tokenizer())
    with pytest.raises(ValueError, match="for a model without a tokenizer"):
        task("chain_sum")


# Whole runs


def test_rollout_and_trainer_have_the_same_bytes_at_every_step(models, tmp_path, capsys):
    """And the stock stack beside it does not: the comparison can fail."""
    files = tmp_path / "run.json", tmp_path / "run.svg"
    code = cli.main(argv(models("Qwen3"), "--unaligned", "--json", str(files[0]), "--plot", str(files[1])))
    out = capsys.readouterr().out.splitlines()
    assert code == 0
    record = json.loads(files[0].read_text())
    aligned, stock = record["aligned"], record["stock"]
    assert record["equal"] is True and len(aligned) == len(stock) == 2
    tokens = sum(s["tokens"] for s in aligned)
    for step in aligned:
        assert (step["kl"], step["max_abs_diff"], step["differ"], step["differ_recomputed"]) == (0.0, 0.0, 0, 0)
        assert step["compared"] == step["expected"] == 2 * step["tokens"] > 0
        assert step["moved"] > 0.5 and step["grad_norm"] > 0 and step["clipped"] == 0
    assert all(s["differ"] > 0 and s["differ_recomputed"] > 0 and s["kl"] > 0 for s in stock)
    assert stock[0]["tokens"] == aligned[0]["tokens"] and stock[0]["reward"] == aligned[0]["reward"]  # the same rollout
    assert f"aligned: 0 of {2 * tokens} log-probabilities differ in bytes" in out[-2] and "stock: " in out[-1]
    assert [line.split()[:2] for line in out[1:5]] == [[s, f"{i}/2"] for s in ("aligned", "stock") for i in (1, 2)]
    assert files[1].read_text().count("<svg") == 1
    # and again: the same numbers, bit for bit
    assert figures(launch(options(models("Qwen3"))))["aligned"] == [*map(bits, aligned)]


@pytest.mark.parametrize(
    "family,changes",
    [
        ("Qwen3Moe", {"mini_batches": 2, "temperature": 0.7, "entropy_coefficient": 0.01, "samples": 2}),
        ("Llama", {"dtype": "float32", "advantage": "rloo", "check_every": 0}),
    ],
    ids=["mixture, two mini-batches", "tied, fp32"],
)
def test_other_models_and_options(models, family, changes):
    runs = launch(options(models(family), **changes))
    assert runs["aligned"].equal
    for step in runs["aligned"].steps:
        assert step["moved"] > 0 and step["entropy"] > 0
        if "mini_batches" in changes:
            assert step["clipped"] > 0  # the second has moved away from the rollout
            assert step["tokens"] < step["compared"] < 2 * step["tokens"]
        else:
            assert step["compared"] == step["tokens"]


def test_answers_of_the_epoch_before_are_drafted(models, tmp_path):
    """Every figure is the one without speculation, but for what was drafted."""
    by_default = [options("any", epoch_steps=steps).engine_config().speculation for steps in (None, 1)]
    assert by_default == [None, Speculation()]
    epochs = {"steps": 5, "epoch_steps": 1, "max_new_tokens": 12, "learning_rate": 1e-6, "check_every": 0}
    folder = tmp_path / "kept"
    runs = [
        launch(options(models("Qwen3"), **epochs, speculation=count), saving=saving)
        for count, saving in ((0, None), (4, Saving(str(folder), every=5)))
    ]
    more = options(models("Qwen3"), **{**epochs, "steps": 6}, speculation=4)
    launch(more, saving=Saving(str(folder), every=1, resume=True))  # with the answers that were kept
    kept = [Answers(1 << 20) for _ in range(2)]
    for answers, step in zip(kept, (5, 6)):
        answers.load(folder / "aligned" / f"step-{step:08d}" / "answers")
    assert len(kept[0]) == len(kept[1]) == more.prompts * more.samples
    assert {(tuple(p), s) for p, s, _ in kept[0]} == {(tuple(p), s) for p, s, _ in kept[1]}
    plain, drafted = (figures(run)["aligned"] for run in runs)
    counts = [(step.pop("drafted"), step.pop("accepted")) for steps in (plain, drafted) for step in steps]
    assert plain == drafted and plain[0]["tokens"] == plain[2]["tokens"]
    assert (
        counts[:5] == [(0, 0)] * 5 and sum(accepted for _, accepted in counts[6:]) > 0
    )  # how many, times of steps say
    report.plot(str(tmp_path / "run.svg"), "drafts", runs[1])
    assert "tokens of an answer a step" in (tmp_path / "run.svg").read_text()


def test_what_a_picture_says_makes_no_column_wider(tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    kept, save = [], Figure.savefig
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args: kept.append(figure) or save(figure, *args))
    (stock,) = report.read([str(ROOT / "benchmarks/results/long_run_spell_backward_stock.jsonl.gz")])
    report.plot(str(tmp_path / "run.png"), "long", {"of a name that makes its line as long as two panels": stock.run})
    lefts = sorted({axis.get_position().x0 for axis in kept[0].axes})
    apart = [b - a for a, b in itertools.pairwise(lefts)]
    assert len(lefts) > 3 and max(apart) < 1.2 * min(apart), lefts


def test_two_ranks_have_the_same_bytes_too(models):
    first, again = (launch(options(models("Qwen3"), ranks=2)) for _ in range(2))
    assert first["aligned"].equal and figures(first) == figures(again)
    alone = launch(options(models("Qwen3"), steps=1))["aligned"].steps[0]
    both = first["aligned"].steps[0]
    assert all(alone[key] == both[key] for key in ("reward", "entropy", "tokens"))
    assert alone["grad_norm"] == pytest.approx(both["grad_norm"], rel=0.05)  # sums in another order


def test_under_torchrun(models, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["-m", "vexact_engine.cli"]
    done = subprocess.run(
        [*command, *argv(models("Qwen3"), "--json", "-")], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["equal"] and len(record["aligned"]) == 2


def test_an_answer_that_differs_ends_in_exit_code_1(models, monkeypatch, capsys):
    """The twin that must fail: the trainer's temperature is not the rollout's."""
    honest = Trainer.__init__

    def warmer(self, chosen, *args, **kwargs):
        from dataclasses import replace

        honest(self, replace(chosen, temperature=1.01), *args, **kwargs)

    monkeypatch.setattr(Trainer, "__init__", warmer)
    assert cli.main(argv(models("Qwen3"), "--steps", "1", "--check-every", "0")) == 1
    assert "aligned: 0 of" not in capsys.readouterr().out


def test_what_was_not_compared_is_not_equal():
    step = {"differ": 0, "differ_recomputed": None, "kl": 0.0, "compared": 5, "expected": 5}
    assert grpo.Run([step]).equal and not grpo.Run().equal
    for wrong in (
        {"compared": 4},
        {"kl": 1e-30},
        {"differ": 1},
        {"differ_recomputed": 1},
        {"expected": 0, "compared": 0},
    ):
        assert not grpo.Run([step, step | wrong]).equal


# Processes that die


def engines(pid):
    return sorted({*descendants(pid)} - {p.pid for p in multiprocessing.active_children()})


def trainers(pid):
    return [p.pid for p in multiprocessing.active_children() if p.name == "vexact-trainer-1"]


def killing(whose, seen):
    def watch(kind, *values):
        if kind == "step":
            seen.update(descendants(os.getpid()))
            (pid,) = whose(os.getpid())
            os.kill(pid, signal.SIGKILL)

    return watch


def test_an_engine_that_dies_is_named(models):
    seen = set()
    with pytest.raises(ReplicaDied, match=r"replica 0 .*was killed by SIGKILL"):
        launch(options(models("Qwen3"), steps=50), report=killing(engines, seen))
    assert len(seen) == 1
    wait_until_dead(seen)


def test_a_trainer_that_dies_is_named_and_takes_all_with_it(models):
    seen = set()
    with pytest.raises(ProcessDied, match=r"trainer 1 \(process \d+\) was killed by SIGKILL"):
        launch(options(models("Qwen3"), ranks=2, steps=50), report=killing(trainers, seen))
    assert len(seen) == 3  # two trainers, and the first one's engine
    wait_until_dead(seen)


@pytest.mark.parametrize(
    "ranks,number,code",
    [(1, signal.SIGINT, 130), (2, signal.SIGINT, 130), (2, signal.SIGKILL, -9)],  # of two ranks one is as an only one
    ids=["1-Ctrl-C", "2-Ctrl-C", "2-SIGKILL"],
)
def test_the_end_of_the_command_is_the_end_of_all(models, number, code, ranks):
    reset = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    command = [sys.executable, "-c", f"{reset}; {forks.KINDS[-1]}", *argv(models("Qwen3"), "--steps", "100000")]
    command += ["--ranks", str(ranks)]
    process = subprocess.Popen(command, env={**os.environ}, stdout=subprocess.PIPE)
    with process.stdout as lines:
        assert b"2 prompts x 4 answers" in lines.readline()
        assert b"aligned" in lines.readline()
        seen = descendants(process.pid)
        assert len(seen) == (1 if ranks == 1 else 3)
        os.kill(process.pid, number)
        assert process.wait(300) == code
    wait_until_dead(seen)


def test_an_engine_that_cannot_be_made_says_why(models):
    with pytest.raises(ValueError, match=r"replica 0 .*: Options: prompts is 0"):
        broken = options(models("Qwen3"))
        object.__setattr__(broken, "prompts", 0)
        launch(broken)
    with pytest.raises(FileNotFoundError, match="no such file or directory"):
        launch(options("/no/such/model"))
    with pytest.raises(ValueError, match="max_prompt_tokens: a question of evens has"):
        launch(options(models("Qwen3"), max_prompt_tokens=3, ranks=2))


@pytest.mark.parametrize("side", ["aligned", "stock"])
def test_a_run_that_diverges_says_so_and_keeps_its_record(models, capsys, tmp_path, side):
    record = tmp_path / "record.jsonl"
    more = ["--learning-rate", "1e30", "--mini-batches", "2", "--sides", side, "--record", str(record)]
    assert cli.main(argv(models("Qwen3"), *more)) == 2
    assert f"recipe: {side}: the gradient's norm is nan: training has diverged" in capsys.readouterr().err
    assert [json.loads(line)["kind"] for line in record.read_text().splitlines()[1:]] == ["parameters"]


def test_lines_on_a_terminal_have_colours():
    import io

    class Terminal(io.StringIO):
        def isatty(self):
            return True

    step = {"step": 1, "reward": 0.5, "entropy": 1.0, "grad_norm": 1.0, "moved": 0.5, "kl": 0.0, "compared": 4}
    step |= {"differ": 0, "differ_recomputed": None, "seconds": {"train": 1.0}, "drafted": 0, "tokens": 4}
    assert "accepted" not in report.line("aligned", step, 10)
    drafted = report.line("aligned", step | {"drafted": 5, "accepted": 3}, 10)
    assert "  accepted 3 of 5 drafted, 4.00 tokens a step  |" in drafted
    for stream in (Terminal(), io.StringIO()):
        report.lines(stream)(report.line("aligned", step, 10))
        assert ("\x1b[" in stream.getvalue()) == stream.isatty()
        assert stream.getvalue().count("\n") == 1


@given(st.lists(st.integers(1, 50), min_size=1, max_size=30), st.data())
def test_batches_are_cut_by_tokens(lengths, data):
    count = data.draw(st.integers(1, len(lengths)))
    parts = cut(range(len(lengths)), lengths, count)
    assert len(parts) == count and all(parts) and [i for part in parts for i in part] == list(range(len(lengths)))
    assert max(sum(lengths[i] for i in part) for part in parts) <= sum(lengths) / count + max(lengths)


def test_a_forward_has_about_as_many_tokens_as_are_named():
    trainer = object.__new__(Trainer)
    trainer._forward_tokens = 40
    trainer.device, trainer.aligned, trainer._tree = torch.device("cpu"), True, None
    trainer._mesh = SimpleNamespace(size=lambda: 1)
    samples = [grpo.Sample([1] * 8, [2] * (1 + i % 3), None, 0.0) for i in range(16)]
    trainer.options = options("x", micro_batch=None)
    assert [len(batch) for batch in trainer._batches(samples)] == [4] * 4
    assert [len(batch) for batch in trainer._batches(samples, 2)] == [2] * 8
    trainer.options = options("x", micro_batch=6)
    assert [len(batch) for batch in trainer._batches(samples)] == [6, 6, 4]
    trainer.aligned, trainer.options = False, options("x", micro_batch=None)
    assert [len(batch) for batch in trainer._batches(samples)] == [8, 8]
