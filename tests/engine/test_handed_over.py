"""Many requests at once: the engine computes the first of them while the others are made."""

import asyncio
import itertools
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from engine_models import bits, build, check_idle, prompts, small_engine, until

from vexact_engine import Engine, EngineClosed, EngineConfig, Replicas, SamplingParams, StepFailed
from vexact_engine.outputs import Submission
from vexact_engine.parallel import replicas as replicas_module

CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
PROMPTS = prompts(40, longest=6)
PARAMS = SamplingParams(max_new_tokens=3, seed=1, ignore_eos=True)
DEPTHS = pytest.mark.parametrize("overlapped", [False, True], ids=["waiting", "overlapped"])


@pytest.fixture(scope="module", params=[False, True], ids=["waiting", "overlapped"])
def shared(request):
    with small_engine(CONFIG, request.param) as engine:
        yield engine


@pytest.fixture
def engine(shared):
    yield shared
    check_idle(shared)


@pytest.fixture(scope="module")
def expected():
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        return [bits(engine.generate([prompt], PARAMS)[0]) for prompt in PROMPTS]


def note(engine, monkeypatch):
    """How many requests were made, how many each hand-over had, and how many were made when each plan was launched."""
    jobs, given, launched = [], [], []
    job, submit, launch = engine._job, engine._loop.submit, engine._worker.launch

    def making(*args, **options):
        jobs.append(job(*args, **options))
        return jobs[-1]

    def handing(tickets, *rest):
        given.append(len(tickets))
        submit(tickets, *rest)

    def launching(plan):
        launched.append(len(jobs))
        return launch(plan)

    monkeypatch.setattr(engine, "_job", making)
    monkeypatch.setattr(engine._loop, "submit", handing)
    monkeypatch.setattr(engine._worker, "launch", launching)
    return jobs, given, launched


def test_the_first_are_computed_while_the_others_are_made(engine, expected, monkeypatch):
    jobs, given, launched = note(engine, monkeypatch)
    done = engine.generate(PROMPTS, PARAMS)
    assert [bits(c) for c in done] == expected
    assert len(jobs) == sum(given) == len(PROMPTS) and len(given) > 1
    lengths, steps = iter(map(len, PROMPTS)), engine._worker.depth * 16
    sizes = [sum(itertools.islice(lengths, count)) for count in given]
    for share, size in enumerate(sizes[:-1]):
        assert steps << share <= size < (steps << share) + 6
    assert launched[0] == given[0], "the first step waits for nobody, and runs before more are made"


def test_nobody_is_left_alone_at_the_end(monkeypatch):
    """The last request may go on for longest: begun last, it would run by itself when all others are done."""
    limits = [2, 3, 2, 3, 2, 3, 2, 3, 2, 20]
    params = [replace(PARAMS, max_new_tokens=most) for most in limits]
    with Engine.from_pretrained(build("Llama"), config=replace(CONFIG, max_num_seqs=3)) as engine:
        alone = [bits(engine.generate([prompt], one)[0]) for prompt, one in zip(PROMPTS, params)]
        steps = {}

        def count(name, call):
            engine.reset_prefix_cache()
            before = engine.stats.steps
            assert [bits(c) for c in call()] == alone, name
            steps[name] = engine.stats.steps - before

        count("generate", lambda: engine.generate(PROMPTS[:10], params))
        count("agenerate", lambda: asyncio.run(engine.agenerate(PROMPTS[:10], params)))
        monkeypatch.setattr("vexact_engine.frontend.start_order", lambda each, at_once: list(range(len(each))))
        count("as given", lambda: engine.generate(PROMPTS[:10], params))
        assert steps["as given"] - 3 > steps["generate"] == steps["agenerate"] <= 25, steps
        check_idle(engine)


def test_few_requests_go_in_one_piece(engine, expected, monkeypatch):
    _, given, _ = note(engine, monkeypatch)
    assert [bits(c) for c in engine.generate(PROMPTS[:12], PARAMS)] == expected[:12]
    assert given == [12]


def test_samples_fill_the_slots_before_their_tokens_fill_a_step(monkeypatch):
    config = replace(CONFIG, max_num_seqs=4, max_num_batched_tokens=512)
    with Engine.from_pretrained(build("Llama"), config=config) as engine:
        _, given, _ = note(engine, monkeypatch)
        done = engine.generate([[5, 6]] * 30, replace(PARAMS, n=2))
        assert given == [2, 4, 8, 16] and len(done) == 60
        check_idle(engine)


def test_prompts_that_are_the_same_fill_a_step_no_more_than_one_does(engine, monkeypatch):
    _, given, _ = note(engine, monkeypatch)
    full = 2 * engine._worker.depth  # so many of eight tokens fill steps of sixteen
    engine.generate([[5 + i] * 8 for i in range(full) for _ in range(20)], PARAMS)
    assert given[0] == 20 * (full - 1) + 1


def test_what_is_refused_stays_in_its_place(engine, expected):
    asked = list(PROMPTS)
    wrong = {0: [], 3: [-1], 20: ["x"], 21: [10**6], 39: [True]}
    for place, prompt in wrong.items():
        asked[place] = prompt
    done = engine.generate(asked, PARAMS)
    for place, completion in enumerate(done):
        if place in wrong:
            assert completion.finish_reason == "error" and completion.error
        else:
            assert bits(completion) == expected[place]
    assert all(c.finish_reason == "error" for c in engine.generate([[]] * 40, PARAMS))


@pytest.mark.parametrize("mode", ["keep", "wait"])
def test_nobody_waits_for_a_launch_that_does_not_come(engine, expected, mode, monkeypatch):
    jobs, _, launched = note(engine, monkeypatch)
    engine.pause(mode)
    with ThreadPoolExecutor() as pool:
        try:
            asked = pool.submit(engine.generate, PROMPTS, PARAMS)
            until(lambda: len(jobs) == len(PROMPTS))
            assert not launched and not asked.done()
        finally:
            engine.resume()
        assert [bits(c) for c in asked.result(120)] == expected


@pytest.mark.parametrize("failing", ["launch", "wait"])
def test_where_a_step_fails_the_others_are_not_begun(engine, expected, monkeypatch, failing):
    jobs, given, _ = note(engine, monkeypatch)
    job, launch, worker = engine._job, engine._worker.launch, engine._worker

    def making(*args, **options):
        if given:
            until(lambda: jobs[0].error)
        return job(*args, **options)

    def fail(*_):
        raise MemoryError("no room")

    def failed(plan):
        monkeypatch.setattr(worker, "launch", launch)  # the next one would not
        if failing == "launch":
            fail()
        pending = launch(plan)
        pending.wait = fail
        return pending

    monkeypatch.setattr(engine, "_job", making)
    monkeypatch.setattr(worker, "launch", failed)
    with pytest.raises(StepFailed, match="no room"):
        engine.generate(PROMPTS, PARAMS)
    assert len(given) == 1
    monkeypatch.setattr(engine, "_job", job)
    assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected


def test_an_interrupt_in_between_ends_those_that_were_handed_over(engine, expected, monkeypatch, ctrl_c):
    job, count = engine._job, iter(range(1000))

    def making(*args, **options):
        if next(count) == 30:
            signal.raise_signal(signal.SIGINT)
        return job(*args, **options)

    _, given, _ = note(engine, monkeypatch)
    monkeypatch.setattr(engine, "_job", making)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    assert 0 < sum(given) <= 30
    check_idle(engine)
    monkeypatch.undo()
    assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected


def test_an_interrupt_while_a_launch_is_waited_for(engine, expected, monkeypatch, ctrl_c):
    launch = engine._worker.launch

    def interrupting(plan):
        monkeypatch.setattr(engine._worker, "launch", launch)
        os.kill(os.getpid(), signal.SIGINT)  # to the main thread, which waits
        return launch(plan)

    monkeypatch.setattr(engine._worker, "launch", interrupting)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    check_idle(engine)
    assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected


@DEPTHS
def test_an_engine_that_is_closed_in_between_takes_no_more(overlapped, monkeypatch):
    with small_engine(CONFIG, overlapped) as engine:
        job, count = engine._job, iter(range(1000))

        def closing(*args, **options):
            if next(count) == 30:
                engine.close()
            return job(*args, **options)

        monkeypatch.setattr(engine, "_job", closing)
        with pytest.raises(EngineClosed):
            engine.generate(PROMPTS, PARAMS)


def test_who_is_not_taken_in_any_more_waits_for_no_launch():
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine, ThreadPoolExecutor() as pool:
        reached, go = threading.Event(), threading.Event()
        holding = pool.submit(engine._loop.call, lambda: (reached.set(), go.wait(120)))
        assert reached.wait(120)
        asked = pool.submit(engine.generate, PROMPTS, PARAMS)
        until(lambda: engine._loop._inbox)
        closing = pool.submit(engine.close)
        until(lambda: engine.closed)
        go.set()
        with pytest.raises(EngineClosed):
            asked.result(120)
        holding.result(120)
        closing.result(120)


def test_nobody_waits_for_a_launch_of_requests_that_are_all_refused(monkeypatch):
    """They come while the last plan of others is waited for: there is no other after it."""
    with small_engine(CONFIG, overlapped=True) as engine, ThreadPoolExecutor() as pool:
        launch, there = engine._worker.launch, threading.Event()

        def late(plan):
            pending = launch(plan)
            ready = pending.ready
            pending.ready = lambda: there.is_set() and ready()
            return pending

        monkeypatch.setattr(engine._worker, "launch", late)
        other = pool.submit(engine.generate, [[5, 6]], replace(PARAMS, max_new_tokens=1))
        until(lambda: engine._loop._pending)
        asked = pool.submit(engine.generate, [[10**6 + i] for i in range(60)], PARAMS)
        until(lambda: engine._loop._launched)
        there.set()
        assert all("expected ids below" in c.error for c in asked.result(120))
        assert other.result(120)[0].finish_reason == "length"
        check_idle(engine)


def test_who_waits_for_a_launch_is_told_of_the_end():
    """A fault of the loop's own, in the midst of taking requests in."""

    def broken():
        raise KeyError("a fault")

    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        told = threading.Event()
        engine._loop.submit([], broken, told.set)
        assert told.wait(120)
        until(lambda: not engine._loop._thread.is_alive())
        with pytest.raises(EngineClosed):
            engine.generate(PROMPTS, PARAMS)


def test_a_call_is_over_once_and_not_before_all_were_added():
    told = []

    class Ticket:
        pass

    call = Submission(lambda: told.append(threading.current_thread()), whole=False)
    for _ in range(3):
        call.add(Ticket())
        call.one_done()
    assert not told
    call.add(Ticket())
    call.one_done()
    call.one_done()
    assert told == [threading.current_thread()] and len(call.tickets) == 4


def test_an_asyncio_loop_has_its_turns_while_requests_are_made(engine, expected, monkeypatch):
    monkeypatch.setattr("vexact_engine.outputs._PIECE", 0.0)  # after each
    jobs, given, _ = note(engine, monkeypatch)
    seen = []

    async def look():
        while True:
            seen.append((len(jobs), len(given)))
            await asyncio.sleep(0)

    async def main(wait):
        looking = asyncio.create_task(look())
        asked = asyncio.create_task(
            engine.agenerate(PROMPTS, PARAMS, request_ids=[f"a{i}" for i in range(len(PROMPTS))])
        )
        while wait and len(jobs) < len(PROMPTS) // 2:
            await asyncio.sleep(0)
        if wait:
            asked.cancel()
        (done,) = await asyncio.gather(asked, return_exceptions=True)
        looking.cancel()
        return done

    assert isinstance(asyncio.run(main(True)), asyncio.CancelledError)
    assert not given and len(jobs) < len(PROMPTS)  # and nobody has the names
    jobs.clear(), seen.clear()
    done = asyncio.run(main(False))
    assert [bits(one) for one in done] == expected and given == [len(PROMPTS)]
    assert {made for made, handed in seen if not handed} >= {*range(1, len(PROMPTS) - 1)}


# Replicas


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    build("Llama").save_pretrained(path)
    with Replicas.from_pretrained(path, replicas=2, config=CONFIG) as replicas:
        yield replicas


@pytest.fixture
def noted(replicas, monkeypatch):
    """The same; what was made, and of each hand-over how many it had and how many were made by then."""
    made, given, job, submit = [], [], replicas._job, replicas._front.submit

    def making(*args):
        made.append(job(*args))
        return made[-1]

    def handing(jobs):
        given.append((len(jobs), len(made)))
        submit(jobs)

    monkeypatch.setattr(replicas, "_job", making)
    monkeypatch.setattr(replicas._front, "submit", handing)
    yield replicas, made, given
    until(lambda: not any(load.running or load.waiting for load in (r.load for r in replicas.replicas)))
    assert not replicas._front._names and not any(r.jobs for r in replicas._front.replicas)


@pytest.mark.parametrize("awaited", [False, True], ids=["generate", "agenerate"])
def test_replicas_compute_the_first_while_the_others_are_made(awaited, noted, expected, monkeypatch):
    monkeypatch.setattr(replicas_module, "_MOST_STEPS", 2)
    replicas, _, given = noted
    done = asyncio.run(replicas.agenerate(PROMPTS, PARAMS)) if awaited else replicas.generate(PROMPTS, PARAMS)
    assert [bits(c) for c in done] == expected
    assert sum(count for count, _ in given) == len(PROMPTS) and len(given) >= 3
    assert [by for _, by in given] == list(itertools.accumulate(count for count, _ in given)), (
        "as soon as they are made"
    )
    lengths = iter(map(len, PROMPTS))
    for share, (count, _) in enumerate(given[:-1]):
        most = 2 * 16 << min(share, 1)
        assert most <= sum(itertools.islice(lengths, count)) < most + 6, "a step's of both, and twice that from then on"


def test_replicas_end_what_was_handed_over_by_a_call_that_breaks_off(noted, expected, monkeypatch):
    replicas, made, given = noted
    making = replicas._job

    def breaking(*args):
        if len(made) == 20:
            raise KeyboardInterrupt
        return making(*args)

    with monkeypatch.context() as patched:
        patched.setattr(replicas, "_job", breaking)
        for call in (
            lambda: replicas.generate(PROMPTS, PARAMS),
            lambda: asyncio.run(replicas.agenerate(PROMPTS, PARAMS)),
        ):
            made.clear()
            given.clear()
            with pytest.raises(KeyboardInterrupt):
                call()
            assert 0 < sum(count for count, _ in given) < 20
    assert [bits(c) for c in replicas.generate(PROMPTS, PARAMS)] == expected


def test_replicas_that_refuse_every_request_of_a_call_answer_it(noted):
    replicas, *_ = noted
    bad = [[-1]] * 50
    assert {c.finish_reason for c in replicas.generate(bad, PARAMS)} == {"error"}
    assert {c.finish_reason for c in asyncio.run(replicas.agenerate(bad, PARAMS))} == {"error"}
    assert replicas.generate([], PARAMS) == []
