"""Several engines behind one front: the bits of one, whoever computes, whoever dies."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import forks
import msgspec
import pytest
import torch
from children import children_of, is_alive
from engine_models import bits, build, byte_tokenizer, prompts, until

from vexact_engine import (
    Engine,
    EngineClosed,
    EngineConfig,
    ReplicaDied,
    Replicas,
    RequestError,
    SamplingParams,
    UpdateIncomplete,
    WeightsMissing,
)
from vexact_engine.parallel import limits
from vexact_engine.parallel.fleet import FleetUpdate

ROOT = Path(__file__).parent.parent.parent
CONFIG = EngineConfig(num_pages=256, page_size=4, max_num_batched_tokens=64, show_progress=False, max_model_len=250)
PROMPTS = prompts(12, longest=20)
PARAMS = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)
LONG = replace(PARAMS, max_new_tokens=200)
TEXT = {"vocab_size": 259}
until = partial(until, seconds=300)  # a process that is started again takes half a minute where others start too


@pytest.fixture(autouse=True)
def all_have_counted(monkeypatch):
    """Counts are those of all, however late one says its own."""
    monkeypatch.setattr(limits, "STATS", 300.0)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    build("Llama", **TEXT).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def one(path):
    with Engine.from_pretrained(path, config=CONFIG) as engine:
        yield engine


@pytest.fixture(scope="module")
def shared(path):
    with Replicas.from_pretrained(path, replicas=2, config=CONFIG) as replicas:
        yield replicas


@pytest.fixture
def two(shared):
    yield shared
    idle(shared)
    assert [r.starts for r in shared.replicas] == [1, 1]


def idle(replicas):
    front = replicas._front
    loads = lambda: [r.load for r in replicas.replicas if r.alive]  # noqa: E731
    until(lambda: not any(load.running or load.waiting or load.pages_used for load in loads()))
    assert not front._names and not front._waiting and not any(r.jobs or r.answers for r in front.replicas)
    assert not any(front.router.samples(r.index) for r in front.replicas)


def new_weights(seed=1):
    return build("Llama", seed=seed, **TEXT).state_dict()


@pytest.fixture(scope="module")
def new():
    with Engine.from_pretrained(build("Llama", seed=1, **TEXT), config=CONFIG) as engine:
        return [bits(c)[:3] for c in engine.generate(PROMPTS, PARAMS)]


# As one engine


def test_what_one_engine_gives(two, one, monkeypatch):
    params = [replace(PARAMS, n=1 + i % 3, temperature=i % 2, seed=i, num_top_logprobs=i % 3) for i in range(12)]
    expected, got = (engine.generate(PROMPTS, params) for engine in (one, two))
    assert [bits(c) for c in got] == [bits(c) for c in expected]
    assert [c.top_logprobs for c in got] == [c.top_logprobs for c in expected]
    assert [(c.index, c.seed, c.prompt_ids) for c in got] == [(c.index, c.seed, c.prompt_ids) for c in expected]
    assert all(c.metrics.time_to_first_token > 0 for c in got)
    assert all(r.load.pages for r in two.replicas)
    limits, submit, begun = [2, 5, 9], two._front.submit, []
    monkeypatch.setattr(two._front, "submit", lambda jobs: begun.extend(jobs) or submit(jobs))
    done = two.generate(PROMPTS[:3], [replace(PARAMS, max_new_tokens=most) for most in limits])
    assert [len(c.token_ids) for c in done] == limits and [j.params.max_new_tokens for j in begun] == [9, 5, 2]


def test_all_of_them_have_something_to_do(two):
    before = [dict(r.stats) for r in two._front.replicas]
    two.generate(PROMPTS, PARAMS)
    assert two.stats.decode_tokens >= 12 * 5
    steps = [r.stats["steps"] - b.get("steps", 0) for r, b in zip(two._front.replicas, before)]
    assert all(count > 0 for count in steps)


def test_texts_stop_strings_and_streams(two, one):
    params = replace(LONG, max_new_tokens=40, n=2, num_top_logprobs=1)
    stop = one.generate("Hello", params)[0].text[10:12]

    async def main(engine, params):
        news = [i async for i in engine.stream("Hello", params)]
        samples = []
        for index in range(2):
            own = [i for i in news if i.index == index]
            tokens = [t for i in own for t in i.token_ids]
            tops = [t for i in own for t in i.top_logprobs]
            done = own[-1].completion
            assert tokens == done.token_ids and "".join(i.text for i in own) == done.text
            assert tops == done.top_logprobs
            samples.append((bits(done), done.prompt_ids, [i.text for i in own]))
        return samples

    for made in (params, replace(params, stop=stop)):
        assert asyncio.run(main(two, made)) == asyncio.run(main(one, made))


def test_agenerate_and_its_cancelling(two, one):
    async def main():
        first = asyncio.create_task(two.agenerate(PROMPTS, LONG, request_ids=[f"c{i}" for i in range(12)]))
        while not all(r.requests for r in two.replicas):
            await asyncio.sleep(0.001)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        return await two.agenerate(PROMPTS, PARAMS, request_ids=[f"c{i}" for i in range(12)])

    assert [bits(c) for c in asyncio.run(main())] == [bits(c) for c in one.generate(PROMPTS, PARAMS)]


def test_requests_that_are_at_fault_say_so(two):
    given = [PROMPTS[0], [], [3, 999], "fine", [True], list(range(3, 253))]
    done = two.generate(given, PARAMS)
    assert [c.finish_reason == "error" for c in done] == [False, True, True, False, True, True]
    assert "empty" in done[1].error and "expected ids below 259" in done[2].error and "max_model_len" in done[5].error
    with pytest.raises(RequestError):
        two.generate(given, PARAMS, raise_on_error=True)
    with pytest.raises(TypeError, match="request_ids: got a int"):
        two.generate(PROMPTS[:1], PARAMS, request_ids=[3])
    with pytest.raises(ValueError, match="params: got 1, expected 2"):
        two.generate(PROMPTS[:2], [PARAMS])

    async def stream():
        return [i async for i in two.stream([3, 999], PARAMS)]

    (only,) = asyncio.run(stream())
    assert only.completion.finish_reason == "error"


@contextlib.contextmanager
def stopped(replicas):
    """None of their processes runs: who asks meanwhile comes before the last token, however slow."""
    with contextlib.ExitStack() as stack:
        for each in replicas.replicas:
            stack.callback(os.kill, each.pid, signal.SIGCONT)
            os.kill(each.pid, signal.SIGSTOP)
        yield


def test_names(two):
    with ThreadPoolExecutor() as pool:
        with stopped(two):
            running = pool.submit(two.generate, PROMPTS[:2], LONG, request_ids=["a", "b"])
            until(lambda: "b" in two._front._names)
            (again,) = two.generate(PROMPTS[:1], PARAMS, request_ids=["a"])
            assert "another request of this id" in again.error
            two.abort("a")
            two.abort("nobody")
        first, second = running.result()
        assert (first.finish_reason, second.finish_reason) == ("abort", "length")
        assert len(first.token_ids) < 200


def test_a_prompt_that_is_known_goes_where_it_is_known(two):
    front, turns = two._front, []
    two.reset_prefix_cache()
    begin = front.router.begin
    front.router.begin = lambda replica, pages, n: (turns.append(replica), begin(replica, pages, n))
    try:
        for prompt in (PROMPTS[0], PROMPTS[0] + [5] * 4, [7] * 20, PROMPTS[0] + [9] * 4, [7] * 22):
            two.generate([prompt], PARAMS)
    finally:
        front.router.begin = begin
    assert turns[0] == turns[1] == turns[3]
    first = two.generate([[8] * 40], PARAMS)[0]
    conversation = first.prompt_ids + first.token_ids + [4] * 4
    assert two.generate([conversation], PARAMS)[0].metrics.cached_tokens >= 40


# Pauses, sleep and weights


def test_pauses(two, one):
    two.pause("keep")
    assert two.state == "paused" and two.load().paused
    with ThreadPoolExecutor() as pool:
        late = pool.submit(two.generate, PROMPTS, PARAMS)
        with pytest.raises(TimeoutError):
            late.result(0.1)
        two.resume()
        assert [bits(c) for c in late.result()] == [bits(c) for c in one.generate(PROMPTS, PARAMS)]
    with pytest.raises(ValueError, match="pause: mode"):
        two.pause("now")


def test_new_weights_and_sleep_in_the_order_of_rl(path, new, one):
    with Replicas.from_pretrained(path, replicas=2, config=CONFIG) as replicas:
        assert [bits(c) for c in replicas.generate(PROMPTS, PARAMS)] == [bits(c) for c in one.generate(PROMPTS, PARAMS)]
        given = replicas.sleep(level=2)
        assert given["kv_cache"] == 2 * 256 * 4 * 2 * 2 * 2 * 16 * 2 and given["weights"] > 0
        assert replicas.state == "asleep" and replicas.asleep == ("weights", "kv_cache", "graphs")
        with ThreadPoolExecutor() as pool:
            early = pool.submit(replicas.generate, PROMPTS, PARAMS)
            assert replicas.wake_up(["weights"])["weights"] == given["weights"]
            state = new_weights()
            for version, order in ((1, state), (2, dict(reversed(state.items())))):
                assert replicas.update_weights(order, numerics=replicas.numerics()) == version
            replicas.wake_up(["kv_cache"])
            assert replicas.state == "running"
            assert [bits(c)[:3] for c in early.result()] == new
            assert {v for c in early.result() for v in c.weight_versions} == {2}
        # a bucket after the other, from an iterator
        specs = {name: (tuple(value.shape), value.dtype) for name, value in state.items()}
        replicas.update_weights(iter(state.items()), specs=specs, numerics=replicas.numerics())
        assert [bits(c)[:3] for c in replicas.generate(PROMPTS, PARAMS)] == new
        assert replicas.weight_version == 3
        idle(replicas)


def test_buckets_smaller_than_the_model(two, new, one, monkeypatch):
    monkeypatch.setattr("vexact_engine.parallel.replicas._BUCKET", 1 << 14)
    two.update_weights(new_weights(), numerics=two.numerics())
    assert two._buffers.size < 1 << 16
    assert [bits(c)[:3] for c in two.generate(PROMPTS, PARAMS)] == new
    two.update_weights(new_weights(0), numerics=two.numerics())
    assert [bits(c) for c in two.generate(PROMPTS, PARAMS)] == [bits(c) for c in one.generate(PROMPTS, PARAMS)]


def broken(state, change):
    state = dict(state)
    name = next(name for name in state if name.endswith("q_proj.weight"))
    if change == "missing":
        del state[name]
    elif change == "unknown":
        state["model.nothing"] = state[name]
    elif change == "shape":
        state[name] = state[name][1:]
    elif change == "dtype":
        state[name] = state[name].float()
    return state


@pytest.mark.parametrize("change", ["missing", "unknown", "shape", "dtype", "numerics", "none"])
def test_weights_that_are_refused_change_nothing_anywhere(two, one, change):
    before, version = [bits(c) for c in two.generate(PROMPTS, PARAMS)], two.weight_version
    numerics = two.numerics()
    if change == "numerics":
        numerics = numerics | {"contract": 99}
    with pytest.raises((ValueError, TypeError), match="update_weights"):
        two.update_weights(broken(new_weights(), change), numerics=None if change == "none" else numerics)
    assert [bits(c) for c in two.generate(PROMPTS, PARAMS)] == before and two.weight_version == version


def test_an_iterator_that_breaks_off_before_anything_is_written(two):
    before, state = [bits(c) for c in two.generate(PROMPTS, PARAMS)], new_weights()

    def tensors():
        raise KeyError("gone")
        yield

    with pytest.raises(KeyError):
        two.update_weights(tensors(), specs=state, numerics=two.numerics())
    assert [bits(c) for c in two.generate(PROMPTS, PARAMS)] == before


# Deaths


def kill(replicas, index):
    os.kill(replicas.replicas[index].pid, signal.SIGKILL)


def test_one_that_dies_is_named_and_its_requests_go_on_elsewhere(path, one, caplog):
    """Completions, streams that have begun, several samples: to the byte, and no token twice."""
    params = replace(LONG, n=2, num_top_logprobs=1)
    expected = {i: one.generate([PROMPTS[i]], params) for i in range(6)}
    with Replicas.from_pretrained(path, replicas=2, config=CONFIG) as replicas:

        async def stream(i, has_begun):
            found = []
            async for news in replicas.stream(PROMPTS[i], params, request_id=f"{i}"):
                found.append(news)
                if len(found) == 20:
                    has_begun.set()
            return found

        async def main():
            begun = [asyncio.Event() for _ in range(4)]
            streams = [asyncio.create_task(stream(i, each)) for i, each in enumerate(begun)]
            others = asyncio.create_task(replicas.agenerate([PROMPTS[4], PROMPTS[5]], params))
            while not {*"0123"} <= set(replicas._front._names):
                await asyncio.sleep(0)
            names = {job.name for job in replicas._front.replicas[0].jobs.values()}
            mine = [each for i, each in enumerate(begun) if f"{i}" in names]
            assert 0 < len(mine) < 4
            for each in mine:  # of the one that is killed alone: the other may be far ahead by then
                await each.wait()
            assert replicas.replicas[0].requests
            kill(replicas, 0)
            return await asyncio.gather(*streams), await others

        streams, others = asyncio.run(main())
        for i, news in enumerate(streams):
            for index in range(2):
                own, whole = [n for n in news if n.index == index], expected[i][index]
                assert [t for n in own for t in n.token_ids] == whole.token_ids
                assert [p for n in own for p in n.logprobs] == whole.logprobs
                assert "".join(n.text for n in own) == whole.text
                assert bits(own[-1].completion) == bits(whole)
                assert own[-1].completion.top_logprobs == whole.top_logprobs
        assert [bits(c) for c in others] == [bits(c) for i in (4, 5) for c in expected[i]]
        dead, left = replicas.replicas
        assert not dead.alive and "was killed by SIGKILL" in dead.reason and left.alive
        assert any("replica 0 (process" in r.message and "SIGKILL" in r.message for r in caplog.records)
        assert [bits(c) for c in replicas.generate(PROMPTS[:1], PARAMS)] == [
            bits(c) for c in one.generate(PROMPTS[:1], PARAMS)
        ]
        assert replicas.stats.finished["length"] > 0
        idle(replicas)
        # and the last one: every request has an error that says so
        with ThreadPoolExecutor() as pool:
            running = pool.submit(replicas.generate, PROMPTS, LONG)
            until(lambda: replicas.replicas[1].requests)
            kill(replicas, 1)
            with pytest.raises(
                ReplicaDied, match="none is left: replica 0 was killed by SIGKILL; replica 1 was killed"
            ):
                running.result()
        with pytest.raises(ReplicaDied, match="none is left"):
            replicas.generate(PROMPTS, PARAMS)
        with pytest.raises(ReplicaDied, match="none is left"):
            replicas.pause()


def test_replicas_of_stages(path, one):
    """Each in two processes of its own beside its own: the same bits, asleep for a while, and none is left of one that
    is killed."""
    config = replace(CONFIG, pipeline_parallel_size=2)
    expected, long = [[bits(c) for c in one.generate(PROMPTS, params)] for params in (PARAMS, LONG)]
    with Replicas.from_pretrained(path, replicas=2, config=config) as replicas, ThreadPoolExecutor(1) as pool:
        assert [bits(c) for c in replicas.generate(PROMPTS, PARAMS)] == expected
        assert replicas.sleep()["kv_cache"] > 0 and replicas.state == "asleep"
        replicas.wake_up()
        stages = children_of(replicas.replicas[0].pid)
        assert len(stages) == 2
        running = pool.submit(replicas.generate, PROMPTS, LONG)
        until(lambda: replicas.replicas[0].requests)
        kill(replicas, 0)
        assert [bits(c) for c in running.result(300)] == long
        until(lambda: not any(map(is_alive, stages)))


def test_one_is_started_again_in_its_place(path, one, new, caplog):
    with Replicas.from_pretrained(path, replicas=1, config=CONFIG, max_restarts=2) as replicas:
        expected = [bits(c) for c in one.generate(PROMPTS[:3], LONG)]
        with ThreadPoolExecutor() as pool:
            running = pool.submit(replicas.generate, PROMPTS[:3], LONG)
            until(lambda: replicas.replicas[0].requests)
            kill(replicas, 0)
            assert [bits(c) for c in running.result()] == expected  # once it is there again
        until(lambda: replicas.replicas[0].starts == 2 and replicas.replicas[0].alive)
        replicas.update_weights(new_weights(), numerics=replicas.numerics())
        replicas.pause("keep")
        kill(replicas, 0)
        until(lambda: replicas.replicas[0].starts == 3 and replicas.replicas[0].alive)
        assert not replicas.replicas[0].fresh
        with pytest.raises(WeightsMissing, match="started again and have old weights"):
            replicas.generate(PROMPTS, PARAMS)
        assert replicas.update_weights(new_weights(), numerics=replicas.numerics()) == 2
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(replicas.generate, PROMPTS, PARAMS)
            with pytest.raises(TimeoutError):
                waiting.result(0.2)  # paused as it was
            replicas.resume()
            assert [bits(c)[:3] for c in waiting.result()] == new
            assert {c.weight_version for c in waiting.result()} == {2}


def test_one_dies_or_fails_while_weights_come(path, new, monkeypatch):
    monkeypatch.setattr("vexact_engine.parallel.replicas._BUCKET", 1 << 14)
    with Replicas.from_pretrained(path, replicas=3, config=CONFIG) as replicas, ThreadPoolExecutor() as pool:
        state = new_weights()
        running = pool.submit(replicas.generate, PROMPTS, LONG)
        until(lambda: all(r.requests for r in replicas.replicas))
        victims = iter([0])

        def tensors():
            for at, (name, value) in enumerate(state.items()):
                if at == 8:
                    kill(replicas, next(victims))
                yield name, value

        assert replicas.update_weights(tensors(), specs=state, numerics=replicas.numerics()) == 1
        assert [r.fresh for r in replicas.replicas] == [False, True, True]
        assert all(c.finish_reason == "length" for c in running.result())
        assert [bits(c)[:3] for c in replicas.generate(PROMPTS, PARAMS)] == new
        # one that cannot write the second bucket: its requests go on at the other
        front, send = replicas._front, FleetUpdate.send_bucket
        turns = iter(range(100))

        def lose(self, bucket, payload):
            if next(turns) != 1:
                return send(self, bucket, payload)
            bad = [msgspec.structs.replace(part, name=part.name + "x") for part in bucket.parts]
            writing, self.writing = self.writing, {1: self.writing[1]}
            answers = send(self, msgspec.structs.replace(bucket, parts=bad), payload)
            self.writing = {i: r for i, r in writing.items() if i != 1}
            answers |= send(self, bucket, payload)
            self.writing = writing
            return answers

        monkeypatch.setattr(FleetUpdate, "send_bucket", lose)
        running = pool.submit(replicas.generate, PROMPTS, LONG)
        until(lambda: front.replicas[1].jobs and front.replicas[2].jobs)
        with pytest.raises(UpdateIncomplete, match=r"version 2 is in use on replicas 2, not on others: replica 1: Val"):
            replicas.update_weights(state, numerics=replicas.numerics())
        assert [r.fresh for r in replicas.replicas] == [False, False, True]
        assert all(c.finish_reason == "length" for c in running.result())
        monkeypatch.setattr(FleetUpdate, "send_bucket", send)
        assert [bits(c)[:3] for c in replicas.generate(PROMPTS, PARAMS)] == new
        assert replicas.update_weights(state, numerics=replicas.numerics()) == 3
        assert [r.fresh for r in replicas.replicas] == [False, True, True]
        assert [bits(c)[:3] for c in replicas.generate(PROMPTS, PARAMS)] == new
        idle(replicas)


def test_a_request_that_kills_is_given_up():
    """A replica that dies at every request: three of them, and the fourth lives."""
    with Replicas("killers:make", [{}] * 4, environments=[{"PYTHONPATH": _path()}] * 4) as replicas:
        with pytest.raises(ReplicaDied, match="request 'bad': 3 replicas died with it; the last, replica"):
            replicas.generate([[66] * 4], PARAMS, request_ids=["bad"])
        assert [r.alive for r in replicas.replicas].count(True) == 1
        assert replicas.generate([[5] * 4], PARAMS)[0].finish_reason == "length"
        with pytest.raises(ValueError, match=r"\b\d{5,} objects are frozen"):  # no collection holds its engine up
            replicas.generate([[67] * 4], PARAMS)


def _path():
    return os.pathsep.join([str(Path(__file__).parent), str(ROOT)])


# The beginning and the end


def test_what_cannot_be_made_says_why(path, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"replica \d \(process \d+\): weights: .*no such file or directory"):
        Replicas.from_pretrained(tmp_path / "nothing", replicas=2, tokenizer=byte_tokenizer())
    with pytest.raises(ValueError, match=r"replica 0 .*max_model_len is 9999, expected at most 256"):
        Replicas.from_pretrained(path, replicas=1, config=replace(CONFIG, max_model_len=9999))
    with pytest.raises(ReplicaDied, match=r"replica 0 .* ended with exit code 7 before its engine was made"):
        Replicas("os:_exit", [{"status": 7}])
    with pytest.raises(ValueError, match="replicas: got 0, expected 1 or more"):
        Replicas.from_pretrained(path, replicas=0)
    with pytest.raises(TypeError, match="path: got a LlamaForCausalLM"):
        Replicas.from_pretrained(build("Llama"), replicas=1)
    with pytest.raises(ValueError, match='device: got \'tpu\', expected "cpu" or "cuda"'):
        Replicas.from_pretrained(path, replicas=1, device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="replicas: got 2, expected at most 0: there are 0 GPUs"):
            Replicas.from_pretrained(path, replicas=2, device="cuda")


def test_close_ends_what_runs_and_leaves_nothing(path):
    before = len(os.listdir("/proc/self/fd"))
    replicas = Replicas.from_pretrained(path, replicas=2, config=CONFIG)
    replicas.update_weights(new_weights(), numerics=replicas.numerics())
    pids = [r.pid for r in replicas.replicas]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(replicas.generate, PROMPTS, LONG)
        until(lambda: all(r.requests for r in replicas.replicas))
        replicas.close()
        assert "abort" in {c.finish_reason for c in running.result()}
    replicas.close()
    assert not any(map(is_alive, pids)) and replicas.closed
    for call in (lambda: replicas.generate(PROMPTS), replicas.pause, replicas.sleep, replicas.resume):
        with pytest.raises(EngineClosed):
            call()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # the pool's own


ORPHANS = f"""{forks.OWN}
import os, sys, time
from vexact_engine import EngineConfig, Replicas, SamplingParams
replicas = Replicas.from_pretrained(sys.argv[1], replicas=2, config=EngineConfig(num_pages=64, page_size=4))
if (other := os.fork()) == 0:  # has the sockets too, and lives on for longer than the test waits
    time.sleep(900)
    os._exit(0)
print(other, *(r.pid for r in replicas.replicas), flush=True)
replicas.generate([[5] * 8] * 8, SamplingParams(max_new_tokens=200, ignore_eos=True))
time.sleep(60)
"""


def test_no_replica_outlives_its_front(path):
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    front = subprocess.Popen([sys.executable, "-c", ORPHANS, str(path)], stdout=subprocess.PIPE, text=True, env=env)
    with front.stdout, contextlib.ExitStack() as stack:
        other, *pids = map(int, front.stdout.readline().split())
        stack.callback(os.kill, other, signal.SIGKILL)
        assert len(pids) == 2 and all(map(is_alive, pids))
        front.kill()
        until(lambda: not any(map(is_alive, pids)))
        assert is_alive(other)
    front.wait()


def test_one_that_is_dropped_closes_itself(path):
    replicas = Replicas.from_pretrained(path, replicas=1, config=CONFIG)
    pid = replicas.replicas[0].pid
    del replicas
    until(lambda: not is_alive(pid))


def test_as_ray_actors(path, one, new):
    ray = pytest.importorskip("ray", reason="ray is not installed: Replicas(ray=True) is not tested")
    env = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    ray.init(num_cpus=4, include_dashboard=False, configure_logging=False, log_to_driver=False, runtime_env=env)
    try:
        with Replicas.from_pretrained(path, replicas=2, config=CONFIG, ray=True) as replicas:
            expected = [bits(c) for c in one.generate(PROMPTS, PARAMS)]
            assert [bits(c) for c in replicas.generate(PROMPTS, PARAMS)] == expected
            replicas.sleep(level=2)
            replicas.wake_up(["weights"])
            assert replicas.update_weights(new_weights(), numerics=replicas.numerics()) == 1
            replicas.wake_up()
            assert [bits(c)[:3] for c in replicas.generate(PROMPTS, PARAMS)] == new
            with ThreadPoolExecutor() as pool:
                running = pool.submit(replicas.generate, PROMPTS, LONG)
                until(lambda: all(r.requests for r in replicas.replicas))
                kill(replicas, 1)
                assert all(c.finish_reason == "length" for c in running.result())
            assert "died: " in replicas.replicas[1].reason and not replicas.replicas[1].alive
            assert [bits(c)[:3] for c in replicas.generate(PROMPTS, PARAMS)] == new
            idle(replicas)
            pid = replicas.replicas[0].pid
        until(lambda: not is_alive(pid))
        with pytest.raises(FileNotFoundError, match=r"replica 0 .*no such file"):
            Replicas.from_pretrained("/nothing/here", replicas=1, ray=True, tokenizer=byte_tokenizer())
    finally:
        ray.shutdown()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is visible to torch")
def test_each_has_a_gpu_of_its_own(path):
    config = replace(CONFIG, page_size=16, num_pages=16384)  # more than torch keeps in one piece with something else
    with Engine.from_pretrained(path, device="cuda", config=config) as engine:
        expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
        state = {name: value.cpu() for name, value in engine.model.state_dict().items()}
    count = min(torch.cuda.device_count(), 4)
    with Replicas.from_pretrained(path, replicas=count, device="cuda", config=config, max_restarts=1) as replicas:
        assert [bits(c) for c in replicas.generate(PROMPTS, PARAMS)] == expected
        given = replicas.sleep(level=2)
        assert given["weights"] > 0 and given["kv_cache"] > 0
        replicas.wake_up(["weights"])
        replicas.update_weights(state, numerics=replicas.numerics())
        replicas.wake_up(["kv_cache"])
        assert [bits(c) for c in replicas.generate(PROMPTS, PARAMS)] == expected
        on_gpu = {name: value.cuda() for name, value in state.items()}
        replicas.update_weights(on_gpu, numerics=replicas.numerics())
        with ThreadPoolExecutor() as pool:
            running = pool.submit(replicas.generate, PROMPTS, LONG)
            until(lambda: all(r.requests for r in replicas.replicas))
            if count > 1:
                kill(replicas, 0)
            assert all(c.finish_reason == "length" for c in running.result())
        assert [bits(c) for c in replicas.generate(PROMPTS, PARAMS)] == expected
