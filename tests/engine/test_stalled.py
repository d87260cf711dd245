"""A replica or a stage that stands still: its process is stopped, and nothing comes of it. Nobody who has a limit waits
any longer than that, nothing is lost, and what is closed is gone."""

import contextlib
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import replace

import pytest
import serving
from children import is_alive
from engine_models import bits, build, prompts, until
from handovers import receiving, sender
from serving import httpx

from vexact_engine import Engine, EngineConfig, Replicas, SamplingParams, StageDied, UpdateIncomplete
from vexact_engine.core import loop as core_loop
from vexact_engine.parallel import limits, placement

CONFIG = EngineConfig(num_pages=256, page_size=4, max_num_batched_tokens=64, show_progress=False, max_model_len=250)
STAGED = replace(CONFIG, pipeline_parallel_size=2)
PROMPTS = prompts(8, longest=20)
PARAMS = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)
LONG = replace(PARAMS, max_new_tokens=200)
PATIENCE = 60.0  # of these tests, for what takes a second on a machine that has time


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build("Llama", vocab_size=259).save_pretrained(folder)
    serving.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(path):
    with Engine.from_pretrained(path, config=CONFIG) as engine:
        return [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


@contextlib.contextmanager
def stopped(*pids):
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def within(seconds=PATIENCE):
    begin = time.monotonic()
    yield
    assert time.monotonic() - begin < seconds


def ask(engine):
    return [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


def replicas_of(path, count):
    return Replicas.from_pretrained(path, replicas=count, config=CONFIG)


# Replicas


def test_requests_of_a_replica_that_stands_still(path, wanted):
    with replicas_of(path, 2) as replicas, ThreadPoolExecutor(4) as pool:
        names = [str(i) for i in range(8)]
        first = replicas.replicas[0].pid
        with stopped(first):
            running = pool.submit(replicas.generate, PROMPTS, LONG, request_ids=names)
            until(lambda: replicas.replicas[0].requests and replicas.replicas[1].requests)
            with within():
                for name in names:
                    replicas.abort(name)
                done = running.result(PATIENCE)
            assert {c.finish_reason for c in done} <= {"abort", "length"} and len(done) == 8
            assert any(c.finish_reason == "abort" and not c.token_ids for c in done)
            with within():  # all of them by the other one
                assert ask(replicas) == wanted
                until(lambda: replicas.stats.decode_tokens > 0)
                for _ in range(2):
                    assert replicas.stats.decode_tokens > 0
            assert replicas._front.replicas[0].owes
        until(lambda: not replicas._front.replicas[0].owes)
        assert ask(replicas) == wanted
        until(lambda: not any(r.jobs or r.answers for r in replicas._front.replicas))


def test_what_waits_for_the_only_replica_is_answered_and_goes_on(path, wanted):
    with replicas_of(path, 1) as replicas, ThreadPoolExecutor(4) as pool:
        with stopped(replicas.replicas[0].pid):
            first = pool.submit(replicas.generate, PROMPTS[:1], LONG, request_ids=["a"])
            until(lambda: replicas.replicas[0].requests)
            replicas.abort("a")
            assert first.result(PATIENCE)[0].finish_reason == "abort"
            held = len(replicas._front.replicas[0].channel._outbox)
            for number in range(200):  # they wait here: nothing piles up at a process that takes nothing
                waiting = pool.submit(replicas.generate, PROMPTS[:1], LONG, request_ids=[f"b{number}"])
                until(lambda: replicas._front._waiting)
                replicas.abort(f"b{number}")
                assert waiting.result(PATIENCE)[0].finish_reason == "abort"
            assert len(replicas._front.replicas[0].channel._outbox) == held
            later = pool.submit(ask, replicas)
            until(lambda: len(replicas._front._waiting) == len(PROMPTS))
        assert later.result(PATIENCE) == wanted


def test_a_stream_ends_with_what_it_has(ctrl_c, path):
    import asyncio

    with replicas_of(path, 1) as replicas:

        async def run():
            stream, seen = replicas.stream(PROMPTS[0], LONG, request_id="a"), []
            async for item in stream:
                seen.append(item)
                if len(seen) == 3:
                    os.kill(replicas.replicas[0].pid, signal.SIGSTOP)
                    replicas.abort("a")
            return seen

        seen = asyncio.run(asyncio.wait_for(run(), PATIENCE))
        done = seen[-1].completion
        assert done.finish_reason == "abort" and done.token_ids == [t for i in seen for t in i.token_ids]
        os.kill(replicas.replicas[0].pid, signal.SIGCONT)


def test_a_server_of_replicas_that_stand_still(path, monkeypatch):
    monkeypatch.setattr(limits, "ANSWER", 1.0)
    with replicas_of(path, 1) as replicas:
        server = serving.serve(replicas, request_timeout=1.0, drain_seconds=1.0, api_keys=(serving.KEY,))
        with serving.client(server, serving.KEY) as http, stopped(replicas.replicas[0].pid):
            body = {"prompt": "hello", "max_tokens": 20}
            with within():
                for _ in range(3):
                    answer = http.post("/v1/completions", json=body)
                    assert answer.status_code == 504, answer.text
                assert "vexact_steps" in http.get("/metrics").text
                assert "vexact_steps" in http.get("/metrics").text
                for control in ("/reset_prefix_cache", "/resume"):
                    answer = http.post(control, json={})
                    assert answer.status_code == 504 and answer.json()["error"]["code"] == "no_answer", answer.text
            with ThreadPoolExecutor() as pool, within():
                waiting = pool.submit(lambda: http.post("/v1/completions", json=body | {"stream": True}).status_code)
                until(lambda: replicas._front._waiting)
                server.stop(PATIENCE)
                assert not server._thread.is_alive()
                with contextlib.suppress(httpx.HTTPError):
                    waiting.result(PATIENCE)


def test_a_front_that_is_closed_ends_a_replica_that_stands_still(path, monkeypatch):
    monkeypatch.setattr(limits, "CLOSE", 1.0)
    replicas = replicas_of(path, 2)
    pids = [one.pid for one in replicas.replicas]
    with stopped(pids[1]), within():
        replicas.close()
        assert not any(map(is_alive, pids))


@pytest.mark.parametrize("what", ["update", "handover"])
def test_an_update_goes_on_without_a_replica_that_stands_still(what, path, sockets, monkeypatch):
    new = build("Llama", vocab_size=259, seed=1)
    with Engine.from_pretrained(
        build("Llama", vocab_size=259, seed=1), config=CONFIG, tokenizer=serving.tokenizer()
    ) as engine:
        wanted = ask(engine)
    with contextlib.ExitStack() as stack:
        replicas = stack.enter_context(replicas_of(path, 2))
        receiver, start = stack.enter_context(receiving(replicas))
        out = stack.enter_context(sender(receiver))
        numerics = replicas.numerics()

        def update():
            if what == "update":
                return replicas.update_weights(new.state_dict(), numerics=numerics)
            result = start()
            with contextlib.suppress(Exception):
                out.send(new.state_dict())
            return result()

        update()
        gather = replicas._front.gather

        def patient(answers, seconds):  # the other one has what time it takes
            wait_for([answer for index, answer in answers.items() if index != 1], PATIENCE)
            return gather(answers, seconds)

        monkeypatch.setattr(replicas._front, "gather", patient)
        with stopped(replicas.replicas[1].pid):
            monkeypatch.setattr(limits, "ANSWER", 1.0)
            for _ in range(2):
                with within(), pytest.raises(UpdateIncomplete, match="not on others: replica 1: TimeoutError"):
                    update()
                assert [one.fresh for one in replicas.replicas] == [True, False]
            with within():
                assert ask(replicas) == wanted
            monkeypatch.setattr(limits, "ANSWER", 300.0)
        until(lambda: not replicas._front.replicas[1].owes)
        assert update() == replicas.weight_version == 4
        assert [one.fresh for one in replicas.replicas] == [True, True]
        assert ask(replicas) == wanted


# Stages


def pids_of(engine):
    return [stage.process.pid for stage in engine._worker._stages]


@pytest.mark.parametrize("stage", [0, 1])
def test_requests_of_stages_that_stand_still(stage, path, wanted):
    with Engine.from_pretrained(path, config=STAGED) as engine, ThreadPoolExecutor(4) as pool:
        with stopped(pids_of(engine)[stage]):
            running = pool.submit(engine.generate, PROMPTS[:2], LONG, request_ids=["a", "b"])
            until(lambda: engine._loop._pending)
            forgets = pool.submit(engine.reset_prefix_cache)  # waits until nothing is in flight
            until(lambda: engine._loop._inbox)
            with within():
                engine.abort("a"), engine.abort("b")
                assert {c.finish_reason for c in running.result(PATIENCE)} == {"abort"}
            assert not forgets.done()
        forgets.result(PATIENCE)
        assert ask(engine) == wanted


@pytest.mark.parametrize("when", ["idle", "a step", "an update"])
def test_an_engine_that_is_closed_ends_stages_that_stand_still(when, path, monkeypatch):
    monkeypatch.setattr(core_loop, "GRACE_SECONDS", 1.0)
    engine = Engine.from_pretrained(path, config=STAGED)
    pids = pids_of(engine)
    with ThreadPoolExecutor(4) as pool, stopped(*pids):
        work = None
        if when == "a step":
            work = pool.submit(engine.generate, PROMPTS[:2], LONG)
            until(lambda: engine._loop._pending)
        if when == "an update":
            weights = build("Llama", vocab_size=259).state_dict()
            work = pool.submit(engine.update_weights, weights, numerics=engine.numerics())
            until(lambda: engine._loop.torn)
        with within():
            engine.close()
            assert not any(map(is_alive, pids))
            if work is not None:
                with contextlib.suppress(Exception):
                    work.result(PATIENCE)


def ask_and_take_back(engine, pool):
    """Requests before and behind what waits for its turn. Each ends once it is aborted, by name or by its ticket."""
    first = [pool.submit(engine.generate, PROMPTS[:1], LONG, request_ids=[name]) for name in "ab"]
    until(lambda: len(engine._loop._inbox) + len(engine._loop._tickets.named) >= 2)
    forgets = pool.submit(engine.reset_prefix_cache)  # done once nothing else is
    until(lambda: any(command.alone for command in engine._loop._inbox))
    end = threading.Event()
    ticket = engine.submit(PROMPTS[1], LONG, request_id="c", notify=end.set)
    with within():
        engine.abort("a"), engine.abort("b"), engine.withdraw(ticket)
        done = [each.result(PATIENCE)[0] for each in first]
        assert end.wait(PATIENCE)
    assert {c.finish_reason for c in (*done, *ticket.result())} == {"abort"}
    assert not forgets.done()
    return forgets


def test_requests_while_stages_are_made_anew(path, wanted, monkeypatch):
    """Which takes minutes for a large model."""
    made = []

    class Stopped(placement.Member):
        def __init__(self, *args):
            super().__init__(*args)
            os.kill(self.process.pid, signal.SIGSTOP)
            made.append(self.process.pid)

    with Engine.from_pretrained(path, config=STAGED) as engine, ThreadPoolExecutor(4) as pool:
        monkeypatch.setattr(placement, "Member", Stopped)
        os.kill(pids_of(engine)[0], signal.SIGKILL)
        until(lambda: engine._loop.call(engine._worker.changed))  # it has seen that
        begins = pool.submit(engine.generate, PROMPTS[:1], PARAMS)
        until(lambda: len(made) == 2)
        with stopped(*made):
            forgets = ask_and_take_back(engine, pool)
        forgets.result(PATIENCE)
        assert [bits(c) for c in begins.result(PATIENCE)] == wanted[:1]
        assert ask(engine) == wanted


def test_requests_while_stages_that_stand_still_are_asked(path, wanted):
    weights = build("Llama", vocab_size=259).state_dict()
    with Engine.from_pretrained(path, config=STAGED) as engine, ThreadPoolExecutor(4) as pool:
        with stopped(pids_of(engine)[1]):
            update = pool.submit(engine.update_weights, weights, numerics=engine.numerics())
            until(lambda: engine._loop.torn)
            forgets = ask_and_take_back(engine, pool)
        assert update.result(PATIENCE) == 1
        forgets.result(PATIENCE)
        assert ask(engine) == wanted


def test_a_step_that_never_ends_is_a_failure(path, wanted, monkeypatch):
    with Engine.from_pretrained(path, config=STAGED) as engine:
        assert ask(engine) == wanted
        with monkeypatch.context() as patch, stopped(pids_of(engine)[1]), within():
            patch.setattr(limits, "STEP", 1.0)
            with pytest.raises(StageDied, match="the stages stand still: a step did not come in time"):
                engine.generate(PROMPTS[:1], LONG)
        assert ask(engine) == wanted  # of new ones


def test_an_update_of_stages_that_stand_still_fails_in_time(path, wanted, monkeypatch):
    weights = build("Llama", vocab_size=259).state_dict()
    with Engine.from_pretrained(path, config=STAGED) as engine:
        with monkeypatch.context() as patch, stopped(pids_of(engine)[0]), within():
            patch.setattr(limits, "ANSWER", 1.0)
            with pytest.raises(StageDied, match="the stages stand still: an answer of stage 0 did not come in time"):
                engine.update_weights(weights, numerics=engine.numerics())
        engine.update_weights(weights, numerics=engine.numerics())
        assert ask(engine) == wanted


def test_an_abort_does_not_go_before_its_request(path):
    """Whatever waits for its turn meanwhile, each request is aborted that was handed over before, and no later one."""
    with Engine.from_pretrained(path, config=CONFIG) as engine:
        for _ in range(20):
            inside, go_on = threading.Event(), threading.Event()

            def hold(inside=inside, go_on=go_on):
                inside.set()
                go_on.wait(PATIENCE)

            busy = threading.Thread(target=engine._loop.call, args=(hold,))
            busy.start()
            assert inside.wait(PATIENCE)
            ends = [threading.Event() for _ in range(3)]
            first = engine.submit(PROMPTS[0], LONG, request_id="a", notify=ends[0].set)
            engine.abort("a")
            second = engine.submit(PROMPTS[0], PARAMS, request_id="a", notify=ends[1].set)
            third = engine.submit(PROMPTS[1], LONG, request_id="b", notify=ends[2].set)
            engine.withdraw(third)
            go_on.set()
            busy.join()
            assert all(end.wait(PATIENCE) for end in ends)
            assert first.result()[0].finish_reason == "abort" == third.result()[0].finish_reason
            assert second.result()[0].finish_reason == "length"


def test_clients_that_leave_a_replica_that_stands_still_leave_nothing(path):
    """Each takes its request back: the replica is known to stand still by that, too, and nothing piles up at it."""
    import asyncio

    with replicas_of(path, 1) as replicas:

        async def leave():
            with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(replicas.agenerate(PROMPTS[:1], LONG), 0.01)

        front = replicas._front
        with stopped(replicas.replicas[0].pid):
            asyncio.run(leave())
            until(lambda: front.replicas[0].owes)
            held = len(front.replicas[0].channel._outbox)
            for _ in range(100):
                asyncio.run(leave())
            assert len(front.replicas[0].channel._outbox) == held and not front._waiting and not front._ending
        until(lambda: not front.replicas[0].owes)
        assert len(ask(replicas)) == len(PROMPTS)
