"""The recipe's first step: what is done side by side until it is through, and that nothing of that changes a bit."""

import gc
import os
import sys
from types import SimpleNamespace

import pytest
import torch
from children import children_of, is_alive
from engine_models import build

pytest.importorskip("zmq", reason="pyzmq is not installed")

import vexact_ops as vx
from vexact_engine import cli
from vexact_engine.core import garbage
from vexact_engine.parallel import prestart
from vexact_engine.parallel.replicas import Replicas
from vexact_engine.recipes import grpo, record, report
from vexact_engine.recipes.launch import launch
from vexact_engine.recipes.options import Options
from vexact_engine.recipes.rollout import MAKE, Rollout
from vexact_engine.recipes.trainer import Trainer

pytestmark = pytest.mark.process
SMALL = {"device": "cpu", "prompts": 2, "samples": 4, "steps": 2, "max_new_tokens": 6, "max_prompt_tokens": 20}
SMALL |= {"learning_rate": 1e-2, "micro_batch": 3, "check_every": 1, "check_share": 1.0}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build("Qwen3").save_pretrained(folder)
    return str(folder)


def ended(model, watch=True, **changes):
    """SHA-256 of all parameters at the end, and the figures of all steps; what was reported beside."""
    seen = []
    runs = launch(Options(model=model, **{**SMALL, **changes}), report=lambda *event: seen.append(event), watch=watch)
    digest = next(values[1] for kind, *values in seen if kind == "end")
    free = {"seconds", "held"}
    return digest, [{k: v for k, v in step.items() if k not in free} for step in runs["aligned"].steps], seen


def kept(trainer):
    generators = torch.get_rng_state()
    return (
        [p.detach().clone() for p in trainer.weights.parameters()],
        [b.clone() for b in trainer.model.buffers()],
        generators,
    )


def test_the_trainer_is_made_while_engines_start(model, monkeypatch):
    order, made, waited = [], Trainer.__init__, Replicas.wait_until_ready

    def init(self, *args, **more):
        order.append(("trainer", len(children_of(os.getpid())) > 0))
        made(self, *args, **more)

    def wait(self):
        order.append(("engine", self._front.replicas[0].channel is not None))
        waited(self)

    monkeypatch.setattr(Trainer, "__init__", init)
    monkeypatch.setattr(Replicas, "wait_until_ready", wait)
    ended(model, steps=1)
    assert order == [("trainer", True), ("engine", True)]  # its process was there before


def test_what_a_first_step_waited_for_is_told_once(model):
    *_, seen = ended(model)
    kinds = [event[0] for event in seen if event[0] in ("start", "step")]
    assert kinds == ["start", "step", "step"]
    _, side, step, seconds = next(event for event in seen if event[0] == "start")
    names = "imports", "trainer", "task", "engine", "hand_over", "rollout", "score", "train", "digests"
    assert (side, step) == ("aligned", 1) and (*seconds,) == names and min(seconds.values()) >= 0


@pytest.mark.parametrize("micro_batch", [3, None])
@pytest.mark.parametrize("check_every", [1, 0])
def test_preparing_changes_no_bit(model, monkeypatch, check_every, micro_batch):
    """As where there is a GPU: ahead of the first step one is computed with answers that nobody has given."""
    changes = {"check_every": check_every, "micro_batch": micro_batch}
    expected, honest, left = ended(model, **changes)[:2], grpo._Side._prepare, []

    def prepare(self, task):
        before = kept(self._trainer)
        honest(self, task)
        left.append([torch.equal(a, b) for of, then in zip(kept(self._trainer)[:2], before) for a, b in zip(of, then)])
        left.append([torch.equal(torch.get_rng_state(), before[2])])
        left.append([p.grad is None for p in (*self._trainer.weights.parameters(), *self._trainer.model.parameters())])

    def clock(self, name, said=grpo.Clock.__call__):
        if name == "task":
            side = sys._getframe(1).f_locals["self"]
            prepare(side, sys._getframe(1).f_locals["task"])
        said(self, name)

    monkeypatch.setattr(grpo.Clock, "__call__", clock)
    calls = []
    forward = Trainer._forward
    monkeypatch.setattr(
        Trainer,
        "_forward",
        lambda self, batch, entropy: calls.append((len(batch), entropy)) or forward(self, batch, entropy),
    )
    assert ended(model, **changes)[:2] == expected
    assert len(left) == 3 and all(map(all, left))
    # 8 answers by one in scoring, by three in training: of each the first and the last; else as many as tokens allow
    scored, trained = [(1, False)] * 2, [(3, True), (2, True)]
    if micro_batch is None:
        scored, trained = [(8, False)], [(8, True)]
    expected = [*(scored if check_every else []), *trained]
    assert calls[: len(expected)] == expected


def test_a_gradient_that_is_left_would_change_bits(model, monkeypatch):
    expected = ended(model, steps=1)[0]
    stepped = Trainer.step

    def step(self, samples, tokens):
        zero, self.optimizer.zero_grad = self.optimizer.zero_grad, lambda: None
        self._train(samples, 1)
        try:
            return stepped(self, samples, tokens)
        finally:
            self.optimizer.zero_grad = zero

    monkeypatch.setattr(Trainer, "step", step)
    assert ended(model, steps=1)[0] != expected


def test_too_little_memory_to_prepare_is_no_fault(model, monkeypatch):
    trainer = object.__new__(Trainer)
    done = []
    trainer.options, trainer.device, trainer.aligned = Options(model=model, **SMALL), torch.device("cpu"), False
    trainer._batches = lambda samples, parts=1: [samples]
    trainer.optimizer = SimpleNamespace(zero_grad=lambda: done.append("gradients"))
    trainer.round_masters = lambda: done.append("weights")
    trainer._forward = lambda *_, **more: (_ for _ in ()).throw(torch.OutOfMemoryError("too long"))
    trainer.prepare([None], [None])
    assert done == ["gradients", "weights"]


def test_nothing_is_timed_while_it_prepares(model, monkeypatch):
    from vexact_ops._core import admit

    trainer, seen = object.__new__(Trainer), []
    trainer.options, trainer.device, trainer.aligned = Options(model=model, **SMALL), torch.device("cpu"), False
    trainer._batches, trainer._parameters = lambda samples, parts=1: [samples], []
    trainer.optimizer, trainer.round_masters = SimpleNamespace(zero_grad=lambda: None), lambda: None

    class Seen(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, gradient):
            seen.append((admit._races.get(), admit._must.get()))
            return gradient

    trainer._forward = lambda *_, **more: seen.append((admit._races.get(), admit._must.get()))
    trainer._train = lambda *_: Seen.apply(torch.ones(2, requires_grad=True, dtype=torch.float32)).sum().backward()
    trainer.prepare([None], [None])
    assert seen == [(False, True)] * 2 and admit._races.get() and not admit._must.get()


def test_a_record_keeps_what_a_first_step_waited_for(tmp_path):
    path, step = tmp_path / "run.jsonl", {"step": 1, "reward": 0.5}
    write = record.Recorder(path, {"options": {}})
    write("start", "aligned", 1, {"imports": 1.5, "train": 0.5})
    write("step", "aligned", step)
    assert record.read(path).steps == {("aligned", 1): {"kind": "step", "side": "aligned", **step}}
    for last, lines in ((1, 3), (0, 1)):  # a run that goes on behind that step, or begins anew
        record.Recorder(path, {}, {"aligned": last})
        assert len(path.read_text().splitlines()) == lines
    said = report.start("aligned", 1, {"imports": 1.5, "hand_over": 0.25})
    assert said == "aligned: step 1 was through after 1.75 s: imports 1.50  hand over 0.25 s"


def test_nothing_is_collected_meanwhile():
    for was_on in (True, False):
        (gc.enable if was_on else gc.disable)()
        try:
            with garbage.left():
                assert not gc.isenabled()
            assert gc.isenabled() is was_on
        finally:
            gc.enable()


# Processes that begin before it is known what they make


def test_an_engine_s_process_begins_ahead_and_is_taken(model):
    arguments = {"options": Options(model=model, **SMALL).to_json(), "device": "cpu"}
    with prestart.prestarted(MAKE, 2, "vexact_engine.recipes.rollout:import_ahead", "cpu"):
        first, other = (one.started[1].pid for one in prestart._waiting)
        with Replicas(MAKE, [arguments]) as replicas:
            assert [one.pid for one in replicas.replicas] == [first]
            assert is_alive(other)
    assert not prestart._waiting and not is_alive(other)  # that nobody took


@pytest.mark.parametrize("what", ["make", "variable", "own variable", "path"])
def test_a_process_that_began_as_another_is_left(what, monkeypatch, model):
    arguments = {"options": Options(model=model, **SMALL).to_json(), "device": "cpu"}
    monkeypatch.setenv("VEXACT_FIRST", "1")
    with prestart.prestarted("somewhere:else" if what == "make" else MAKE, 1):
        pid = prestart._waiting[0].started[1].pid
        if what == "variable":
            monkeypatch.setenv("VEXACT_FIRST", "2")
        if what == "path":
            monkeypatch.syspath_prepend("/nowhere")
        own = [{"VEXACT_OTHER": "3"}] if what == "own variable" else None
        with Replicas(MAKE, [arguments], environments=own) as replicas:
            assert replicas.replicas[0].pid != pid


def test_what_fails_ahead_is_met_where_it_is_needed(model):
    arguments = {"options": Options(model=model, **SMALL).to_json(), "device": "cpu"}
    with prestart.prestarted(MAKE, 1, "vexact_engine.nowhere:nothing"), Replicas(MAKE, [arguments]) as replicas:
        assert replicas.config.max_num_seqs == 8


def test_a_command_that_fails_leaves_no_process(capsys):
    before = children_of(os.getpid())
    assert cli.main(["recipe", "grpo", "--model", "/nowhere/at/all", "--device", "cpu"]) == 2
    assert "/nowhere/at/all" in capsys.readouterr().err
    assert not [pid for pid in children_of(os.getpid()) if pid not in before and is_alive(pid)]


def test_a_rollout_may_be_closed_before_it_is_ready(model):
    rollout = Rollout(Options(model=model, **SMALL), torch.device("cpu"))
    (pid,) = rollout.pids()
    rollout.close()
    assert not is_alive(pid)


def test_without_races():
    from vexact_ops._core import admit

    with vx.without_races():
        assert not admit._races.get()
    assert admit._races.get()
