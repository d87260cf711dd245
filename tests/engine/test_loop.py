"""One thread owns the engine: who a request is, how an engine ends, and whose torch state it computes in."""

import asyncio
import contextlib
import copy
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_models import bits, build, byte_tokenizer, check_idle, held, prompts, small_engine, until
from torch._subclasses.fake_tensor import FakeTensorMode

import vexact_ops as vx
from vexact_engine import (
    Engine,
    EngineClosed,
    EngineConfig,
    EngineForked,
    RequestError,
    SamplingParams,
)

CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
PROMPTS = prompts(4, longest=20)
PARAMS = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)
LONG = replace(PARAMS, max_new_tokens=60)
TEXT = {"vocab_size": 259}


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
        return [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


def first_of(stream):
    return anext(stream)


# A request is known by the object


def test_cancelling_a_refused_duplicate_leaves_the_owner_of_the_name_alone(engine):
    async def main(go):
        owner = engine.stream(PROMPTS[0], LONG, request_id="x")
        await first_of(owner)
        again = asyncio.create_task(engine.agenerate([PROMPTS[1]] * 20, LONG, request_ids=["x"] * 20))
        await asyncio.sleep(0)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again
        refused = asyncio.create_task(engine.agenerate([PROMPTS[1]], LONG, request_ids=["x"]))
        await asyncio.sleep(0)
        go.set()
        (refused,) = await refused
        assert refused.finish_reason == "error" and "another request of this id" in refused.error
        return [i async for i in owner][-1].completion

    with held(engine, 8, asked=False) as (_, go):
        assert asyncio.run(main(go)).finish_reason == "length"


def test_a_name_is_free_again_once_its_request_is_done(engine, expected):
    for _ in range(2):
        assert bits(engine.generate(PROMPTS[:1], PARAMS, request_ids=["x"])[0]) == expected[0]


@pytest.mark.parametrize("name", [7, None, ["x"], b"x"], ids=repr)
def test_a_name_that_is_no_string_is_refused_before_it_meets_others(engine, expected, name):
    with ThreadPoolExecutor() as pool:
        innocent = pool.submit(engine.generate, PROMPTS, PARAMS)
        with pytest.raises(TypeError, match="request_ids: got a"):
            engine.generate(PROMPTS[:1], PARAMS, request_ids=[name])
        with pytest.raises(TypeError, match="request_id: got a"):
            engine.abort(name)
        assert [bits(c) for c in innocent.result()] == expected


def test_a_drawn_name_is_nobody_s_choice(engine, expected):
    taken = [f"request-{i}" for i in range(300)]
    short = replace(PARAMS, max_new_tokens=1)

    async def main():
        first = asyncio.create_task(engine.agenerate(PROMPTS[:1] * 300, short, request_ids=taken))
        other = engine.agenerate(PROMPTS, PARAMS)
        assert all(c.error is None for c in await first)
        return await other

    assert [bits(c) for c in asyncio.run(main())] == expected


def test_a_drawn_name_can_be_aborted(engine):
    async def main():
        stream = engine.stream(PROMPTS[0], LONG)
        engine.abort((await first_of(stream)).request_id)
        return [i async for i in stream][-1].finish_reason

    with held(engine, 8):
        assert asyncio.run(main()) == "abort"


@pytest.mark.parametrize(
    "prompt", [b"abc", [True, 5], {5: 1}, {5}, bytearray(b"a")], ids=["bytes", "bool", "dict", "set", "bytearray"]
)
def test_what_merely_looks_like_token_ids(engine, prompt):
    (done,) = engine.generate([prompt], PARAMS)
    assert done.finish_reason == "error" and "expected a list of token ids" in done.error


@pytest.mark.parametrize("prompts", [{"a": [5]}, b"abc", 5, None, {5}], ids=repr)
def test_what_is_no_list_of_prompts(engine, prompts):
    with pytest.raises(TypeError, match="prompts: got a"):
        engine.generate(prompts, PARAMS)


def test_tensors_and_arrays_are_token_ids(engine, expected):
    given = [torch.tensor(PROMPTS[0]), torch.tensor(PROMPTS[1]).numpy()]
    assert [bits(c) for c in engine.generate(given, PARAMS)] == expected[:2]


def test_errors_can_be_raised(engine, expected):
    with pytest.raises(RequestError, match=r"1 of 3 completions failed; the first: .* is empty") as caught:
        engine.generate([PROMPTS[0], [], PROMPTS[1]], PARAMS, raise_on_error=True)
    first, bad, last = caught.value.completions
    assert [bits(first), bits(last)] == expected[:2] and bad.finish_reason == "error"
    assert [bits(c) for c in engine.generate(PROMPTS, PARAMS, raise_on_error=True)] == expected
    with pytest.raises(RequestError):
        asyncio.run(engine.agenerate([[]], PARAMS, raise_on_error=True))


# The end


def test_close_between_check_and_submit_is_told(monkeypatch):
    engine = Engine.from_pretrained(build("Llama", **TEXT), tokenizer=byte_tokenizer(), config=CONFIG)
    encode = engine._text.encode

    def closing(text):
        engine.close()
        return encode(text)

    monkeypatch.setattr(engine._text, "encode", closing)
    with pytest.raises(EngineClosed):
        asyncio.run(asyncio.wait_for(engine.agenerate(["abc"], PARAMS), 300))


def test_close_twice_at_once_and_under_a_generate():
    for _ in range(5):
        engine = Engine.from_pretrained(build("Llama"), config=CONFIG)
        with ThreadPoolExecutor(4) as pool, held(engine, 8) as (reached, _):
            running = pool.submit(engine.generate, PROMPTS, LONG)
            assert reached.wait(60)
            for closed in [pool.submit(engine.close) for _ in range(3)]:
                closed.result()
            assert {c.finish_reason for c in running.result()} == {"abort"}
        engine.close()
        with pytest.raises(EngineClosed, match="it is closed"):
            engine.generate(PROMPTS)


def test_one_thread_whoever_asks_first():
    before = set(threading.enumerate())
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:

        def ask(_):
            asyncio.run(engine.agenerate(PROMPTS[:1], PARAMS))

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(ask, range(8)))
        assert [thread.name for thread in threading.enumerate() if thread not in before] == ["vexact-engine"]
    assert set(threading.enumerate()) <= before


def run_script(code: str) -> subprocess.CompletedProcess:
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent.parent), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=env)


@pytest.mark.parametrize("front", ["async", "thread"])
def test_a_process_may_end_while_the_engine_computes(front):
    code = f"""
import asyncio, sys, threading, time
from engine_models import build
from vexact_engine import Engine, EngineConfig, SamplingParams
engine = Engine.from_pretrained(build("Llama"), config=EngineConfig(num_pages=64))
params = SamplingParams(max_new_tokens=200, ignore_eos=True)
async def main():
    asyncio.create_task(engine.agenerate([[5] * 9] * 4, params))
    async for _ in engine.stream([5], params):
        raise KeyError("of the script")
if {front == "async"}:
    asyncio.run(main())
else:
    threading.Thread(target=engine.generate, args=([[5] * 9] * 4, params), daemon=True).start()
    while not engine.stats.steps: time.sleep(0.001)
    sys.exit(1)
"""
    done = run_script(code)
    assert done.returncode == 1, (done.returncode, done.stderr)  # SIGABRT would be -6
    assert ("of the script" in done.stderr) == (front == "async")


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "busy"])
def test_an_engine_that_is_dropped_is_gone(busy):
    model = build("Llama")
    engine = Engine.from_pretrained(model, config=CONFIG)
    thread, loop = engine._loop._thread, engine._loop
    engine.generate(PROMPTS, PARAMS)
    if busy:  # nobody waits for it any more
        from vexact_engine.outputs import Submission, Ticket
        from vexact_engine.request import Request

        call = Submission(lambda: None)
        Ticket(Request(PROMPTS[0], LONG), None, call)
        engine._loop.submit(call.tickets)
    del engine
    gc.collect()
    thread.join(60)  # the collector waits for it, but not for ever
    assert not thread.is_alive() and loop.worker is None
    copy.deepcopy(model)  # which a patched model refuses
    Engine.from_pretrained(model, config=CONFIG).close()  # nobody owns it


def _use(engine, answer):
    found = []
    for use in (
        lambda: engine.generate(PROMPTS, PARAMS),
        lambda: asyncio.run(asyncio.wait_for(engine.agenerate(PROMPTS, PARAMS), 300)),
        lambda: engine.update_weights({}, numerics=engine.numerics()),
        lambda: engine.reset_prefix_cache(),
    ):
        try:
            use()
        except Exception as error:
            found.append(type(error).__name__)
    engine.abort("x")
    engine.close()
    answer.put(found)


def test_a_fork_is_told():
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        engine.generate(PROMPTS, PARAMS)
        context = multiprocessing.get_context("fork")
        answer = context.Queue()
        child = context.Process(target=_use, args=(engine, answer))
        child.start()
        found = answer.get(timeout=300)
        child.join(300)
        assert found == [EngineForked.__name__] * 4 and child.exitcode == 0
        assert engine.generate(PROMPTS, PARAMS)[0].error is None


# Torch state is the thread's own


def test_the_caller_s_torch_state_takes_no_part(engine, expected):
    done = []
    with torch.autocast("cpu", dtype=torch.bfloat16):
        done.append(engine.generate(PROMPTS, PARAMS))
    with FakeTensorMode():
        done.append(engine.generate(PROMPTS, PARAMS))
    with torch.device("meta"):
        done.append(engine.generate(PROMPTS, PARAMS))
    with torch.inference_mode():
        done.append(engine.generate(PROMPTS, PARAMS))
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float64)
        done.append(engine.generate(PROMPTS, PARAMS))
    finally:
        torch.set_default_dtype(before)
    for completions in done:
        assert [bits(c) for c in completions] == expected


def test_an_engine_is_made_in_its_own_torch_state(expected, tmp_path):
    model = build("Llama")
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        with torch.device("meta"):
            engine = Engine.from_pretrained(source, config=CONFIG)
            done = engine.generate(PROMPTS, PARAMS)
            engine.close()
        assert engine.path == "fused" and [bits(c) for c in done] == expected


def test_a_backend_that_others_choose_is_theirs(engine, expected):
    """Numerics are pinned when the engine is made: here "triton" serves no CPU tensors, and nobody asks it to."""
    numerics = engine.numerics()
    for choose in (vx.use_backend, _set_backend):
        with choose("triton"):
            assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
            assert engine.numerics() == numerics
            with pytest.raises(vx.BackendUnavailable):
                vx.silu_mul(torch.ones(1, 4, dtype=torch.float32))
            with pytest.raises(vx.BackendUnavailable, match="backend 'triton' does not serve cpu"):  # made here
                Engine.from_pretrained(build("Llama"), config=CONFIG)


@contextlib.contextmanager
def _set_backend(name):
    vx.set_backend(name)
    try:
        yield
    finally:
        vx.set_backend(None)


# Pause


def test_pause_keep_and_go_on(engine, expected):
    async def main(reached):
        stream = engine.stream(PROMPTS[0], LONG)
        await first_of(stream)
        assert await asyncio.to_thread(reached.wait, 60)
        await asyncio.to_thread(engine.pause, "keep")
        steps, later = engine.stats.steps, asyncio.create_task(engine.agenerate(PROMPTS, PARAMS))
        await asyncio.sleep(0.05)
        assert engine.stats.steps == steps and not later.done()
        engine.resume()
        return [i async for i in stream][-1].completion, await later

    before = engine.stats.preemptions
    with held(engine, 8) as (reached, _):
        long, later = asyncio.run(main(reached))
    assert engine.stats.preemptions == before
    assert [bits(c) for c in later] == expected and bits(long) == bits(engine.generate(PROMPTS[:1], LONG)[0])


def test_pause_wait_lets_them_finish_and_holds_the_next(engine, expected):
    async def main(reached):
        running = asyncio.create_task(engine.agenerate(PROMPTS, PARAMS))
        assert await asyncio.to_thread(reached.wait, 60)
        await asyncio.to_thread(engine.pause, "wait")
        await asyncio.sleep(0)
        late = asyncio.create_task(engine.agenerate(PROMPTS, PARAMS))
        gone = asyncio.create_task(engine.agenerate(PROMPTS, PARAMS, request_ids=list("abcd")))
        await asyncio.sleep(0.02)
        gone.cancel()
        await asyncio.sleep(0.02)
        assert not late.done() and not engine._scheduler.has_unfinished
        engine.resume()
        return await running, await late

    with held(engine, 3) as (reached, _):
        for done in asyncio.run(main(reached)):
            assert [bits(c) for c in done] == expected


def test_pause_abort(engine, expected):
    async def main():
        stream = engine.stream(PROMPTS[0], LONG)
        await first_of(stream)
        await asyncio.to_thread(engine.pause, "abort")
        last = [i async for i in stream][-1]
        engine.resume()
        return last.finish_reason

    with held(engine, 8):
        assert asyncio.run(main()) == "abort"
    assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
    with pytest.raises(ValueError, match="pause: mode: got 'later', expected one of abort, wait, keep"):
        engine.pause("later")


def test_close_ends_a_pause():
    engine = Engine.from_pretrained(build("Llama"), config=CONFIG)
    engine.pause("keep")
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(engine.generate, PROMPTS, PARAMS)
        until(lambda: engine._loop._tickets.named)
        engine.close()
        assert {c.finish_reason for c in waiting.result()} == {"abort"}


# What others do costs nobody time


def test_a_step_does_not_look_at_requests_that_are_done(engine):
    """One straggler behind many: what the loop does in a step must not grow with them."""
    looked = []

    class Counting(list):
        def __iter__(self):
            looked.append(len(self))
            return super().__iter__()

    from vexact_engine import outputs

    original = outputs.Submission.add

    def add(call, ticket):
        if not isinstance(call.tickets, Counting):
            call.tickets = Counting()
        original(call, ticket)

    outputs.Submission.add = add
    try:
        params = [replace(PARAMS, max_new_tokens=1)] * 50 + [LONG]
        engine.generate([PROMPTS[0]] * 51, params)
    finally:
        outputs.Submission.add = original
    assert len(looked) <= 2  # handed over once


def test_aborting_thousands_of_samples_does_not_look_at_all_for_each(engine):
    looked = []

    class Counting(list):
        def __iter__(self):
            looked.append(len(self))
            return super().__iter__()

    def count():
        (ticket,) = engine._loop._tickets.running.values()
        ticket.request.sequences = Counting(ticket.request.sequences)
        ticket.samples, ticket.completions = Counting(ticket.samples), Counting(ticket.completions)

    async def main():
        stream = engine.stream([5], replace(LONG, n=4000))
        await first_of(stream)
        await asyncio.to_thread(engine._loop.call, count)
        await stream.aclose()
        await asyncio.to_thread(engine._loop.call, lambda: None)

    asyncio.run(main())
    assert 0 < len(looked) < 100  # once an end, they would be 4000
    with pytest.raises(ValueError, match="n is 4097, expected an integer from 1 to 4096"):
        SamplingParams(n=4097)
