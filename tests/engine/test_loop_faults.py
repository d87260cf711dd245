"""What a loop, and an update of weights through it, leave behind where something else fails at that moment."""

import signal
import threading
import time
from types import SimpleNamespace

import pytest
from engine_models import build, prompts, until

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.core.loop import Loop
from vexact_engine.errors import EngineClosed, StepFailed
from vexact_engine.handover.session import WeightUpdate

WAIT = 120  # seconds, for what takes none


class Scheduler:
    """Always has a step to run once `has_unfinished` is set, which is through once `over` is; its `commit` fails at the
    time it is told."""

    weight_version = 0

    def __init__(self, fails: int = 0):
        self.has_unfinished, self.commits, self.fails = False, 0, fails
        self.over = threading.Event()

    def schedule(self, lookahead):
        return SimpleNamespace(num_tokens=1, over=self.over)

    def commit(self, plan, sampled):
        self.commits += 1
        if self.commits == self.fails:
            raise ValueError("a fault of the scheduler")
        return []


class Pending:
    def __init__(self, over):
        self.over = over

    def ready(self):
        return self.over.is_set()

    def wait(self):
        assert self.over.wait(WAIT)
        return SimpleNamespace(token_ids=[])


class Worker:
    depth, takes_in_caller = 2, True

    def changed(self):
        return False

    def launch(self, plan):
        return Pending(plan.over)

    def begin(self, specs, staging):
        return SimpleNamespace(begun=False)

    def take(self, update, bucket, staged):
        return bucket

    def close(self):
        pass


def loop_of(fails=0):
    scheduler = Scheduler(fails)
    return Loop(lambda find_stop: (scheduler, Worker())), scheduler


def computes(loop, scheduler):
    """Returns once two plans are in flight."""
    loop.call(lambda: setattr(scheduler, "has_unfinished", True))
    until(lambda: len(loop._pending) == 2)


def asked_meanwhile(loop, scheduler):
    """The plans are through once somebody has asked for something."""

    def once():
        until(lambda: loop._inbox)
        scheduler.over.set()

    return once


def within(function, once=lambda: None):
    """What it comes to in a thread of its own, which must end; `once` is called meanwhile."""
    found = []

    def run():
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    once()
    thread.join(WAIT)
    assert not thread.is_alive(), "it hangs"
    return found[0]


def test_a_command_is_told_where_what_it_waits_for_fails():
    """The second plan in flight is taken in for the command's sake, and its commit fails."""
    loop, scheduler = loop_of(fails=2)
    computes(loop, scheduler)
    found = within(lambda: loop.call(lambda: 1), once=asked_meanwhile(loop, scheduler))
    assert isinstance(found, ValueError | EngineClosed), found
    assert loop.closed
    loop.close()


def test_an_update_that_is_given_up_while_the_engine_fails_lets_go_of_its_lock():
    loop, scheduler = loop_of(fails=1)
    lock = threading.Lock()
    update = WeightUpdate(loop, loop.worker, lock, lambda: 1, None)
    computes(loop, scheduler)
    assert within(update.abandon, once=asked_meanwhile(loop, scheduler)) is None
    assert loop.closed and not lock.locked()
    loop.close()


def test_a_staged_bucket_that_waited_behind_the_end_of_its_update_is_refused():
    loop, _ = loop_of()
    lock = threading.Lock()
    update = WeightUpdate(loop, loop.worker, lock, lambda: 1, None, staging=object())
    assert update.take("a") == "a"
    held, go = threading.Event(), threading.Event()

    def hold():
        held.set()
        go.wait(WAIT)
        update._end()

    holder = threading.Thread(target=lambda: loop.call(hold), daemon=True)
    holder.start()
    assert held.wait(WAIT)
    look = update._check
    update._check = lambda: (look(), go.set())  # the update ends once the bucket is past its first look
    found = within(lambda: update.take("b"))
    assert isinstance(found, RuntimeError) and "it has ended" in str(found), found
    holder.join(WAIT)
    loop.close()


@pytest.mark.skipif(threading.current_thread() is not threading.main_thread(), reason="signals are for the main thread")
def test_closing_in_a_signal_that_comes_while_a_bucket_is_taken_does_not_wait_for_itself():
    loop, _ = loop_of()
    loop.updating = True
    closed = []

    def handler(number, frame):
        begin = time.monotonic()
        loop.close(timeout=WAIT)
        closed.append(time.monotonic() - begin)

    def slow():
        signal.raise_signal(signal.SIGALRM)
        until(lambda: closed)
        return "taken"

    before = signal.signal(signal.SIGALRM, handler)
    try:
        assert loop.call_here(slow, lambda: True) == "taken"
    finally:
        signal.signal(signal.SIGALRM, before)
    assert closed and closed[0] < WAIT / 2
    loop.close(WAIT)
    assert not loop._thread.is_alive()


def test_a_step_that_fails_gives_its_memory_to_the_next(monkeypatch):
    config = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
    params = SamplingParams(max_new_tokens=3, seed=1, ignore_eos=True)
    with Engine.from_pretrained(build("Llama"), config=config) as engine:
        runner = engine._worker._runner
        expected = engine.generate(prompts(2), params)
        count = len(runner.buffers._hosts)
        receive = runner._receive
        for _ in range(4):
            monkeypatch.setattr(runner, "_receive", lambda step: 1 / 0)
            with pytest.raises(StepFailed, match="division by zero"):
                engine.generate(prompts(2), params)
            monkeypatch.setattr(runner, "_receive", receive)
        assert len(runner.buffers._hosts) == len(runner.buffers._free) <= count
        again = engine.generate(prompts(2), params)
        assert [c.token_ids for c in again] == [c.token_ids for c in expected]
