"""An engine gives its memory back and takes it again: not a bit of what it generates is another one."""

import contextlib
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from engine_models import bits, build, check_idle, held, prompts, until
from hypothesis import given, settings
from hypothesis import strategies as st
from paused import Recorder, stand_in

from vexact_engine import Engine, EngineAsleep, EngineClosed, EngineConfig, SamplingParams, WeightsMissing
from vexact_engine.runner import graphs
from vexact_engine.runner import sleep as sleep_module
from vexact_engine.runner.sleep import TAGS, Memory, Storages, own

CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
PROMPTS = prompts(3, longest=20)
PARAMS = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)
LONG = replace(PARAMS, max_new_tokens=60)
LONGEST = 300  # seconds, for what a machine that does other things too may be slow at
CACHE = 64 * 4 * 2 * 2 * 2 * 16 * 2  # pages, page size, layers, k and v, heads, head dim, bytes


def ask(engine, params=PARAMS):
    return [bits(c) for c in engine.generate(PROMPTS, params)]


def made(seed=0, family="Llama", **options):
    return Engine.from_pretrained(build(family, seed=seed, **options), config=CONFIG)


@contextlib.contextmanager
def asking(engine):
    """Threads that ask the engine. Where a test fails it is closed, so that none of them waits on."""
    with ThreadPoolExecutor() as pool:
        try:
            yield pool
        except BaseException:
            engine.close()
            raise


@pytest.fixture(scope="module")
def old():
    with made() as engine:
        return ask(engine), ask(engine, LONG)


@pytest.fixture(scope="module")
def new():
    with made(seed=1) as engine:
        return ask(engine), ask(engine, LONG)


KINDS = ["stays", "moves", "paused"]


def made_as(kind, patch):
    """On a CPU weights are in host memory already; "moves" treats it as a GPU, whose weights are moved there, and
    "paused" as one whose memory is paused, by a stand-in for torch_memory_saver; "graphs" has what stands for graphs
    too, which are kept."""
    if kind in ("paused", "graphs"):
        stand_in(patch)
    if kind == "graphs":
        patch.setattr(graphs, "recorder", Recorder)
    engine = made()
    engine._worker._memory._on_host = kind == "stays"
    patch.setattr(Memory, "held", lambda self: None)
    return engine


@pytest.fixture(params=KINDS)
def engine(request, monkeypatch):
    with made_as(request.param, monkeypatch) as engine:
        yield engine
        if not engine.asleep:
            check_idle(engine)


def weights_of(seed=1, family="Llama"):
    return build(family, seed=seed).state_dict()


def sizes(engine):
    regions = engine._worker._runner.regions
    if regions and regions["weights"].paused:
        return 0
    return sum({p.untyped_storage()._cdata: p.untyped_storage().nbytes() for p in engine.model.parameters()}.values())


# What is given back, and that it comes again


def test_level_1_gives_memory_back_and_nothing_changes(engine, old):
    assert ask(engine) == old[0]
    held, moves = sizes(engine), not engine._worker._memory._on_host
    buffers = sum(b.nbytes for b in engine.model.buffers())
    given = engine.sleep()
    assert given == {"weights": (held + buffers) * moves, "kv_cache": CACHE, "graphs": 0}
    assert sizes(engine) == (0 if moves else held)
    assert engine.state == "asleep" and engine.asleep == TAGS
    assert engine.wake_up() == given
    assert engine.state == "running" and engine.asleep == () and sizes(engine) == held
    assert engine.weight_version == 0
    assert ask(engine) == old[0]


def test_level_2_drops_the_weights_until_an_update(engine, new):
    engine.sleep(level=2)
    assert sizes(engine) == 0
    assert engine.wake_up(["weights"])["weights"] > 0
    assert engine.asleep == ("kv_cache", "graphs")
    assert engine.update_weights(weights_of(), numerics=engine.numerics()) == 1
    engine.wake_up()
    assert ask(engine) == new[0]


def test_the_caches_sleep_while_weights_are_updated(engine, new):
    ask(engine)
    assert engine.sleep(tags=["kv_cache"]) == {"kv_cache": CACHE, "graphs": 0}
    engine.update_weights(weights_of(), numerics=engine.numerics())
    engine.wake_up(["kv_cache"])
    assert ask(engine) == new[0]


def test_updates_bucket_by_bucket_too(engine, new):
    state = weights_of()
    engine.sleep(level=2)
    engine.wake_up(["weights"])
    engine.update_weights(iter(state.items()), specs=state, numerics=engine.numerics())
    engine.wake_up(["kv_cache", "graphs"])
    assert ask(engine) == new[0]


def test_weights_alone_leave_the_prefix_cache_as_it_is(engine, old):
    ask(engine)
    before = engine.stats.prefix_tokens
    engine.sleep(tags=["weights"])
    engine.wake_up()
    assert ask(engine) == old[0]
    assert engine.stats.prefix_tokens - before >= 16


def test_joined_weights_are_joined_still(engine, new):
    attention = engine.model.base_model.layers[0].self_attn
    for level in (1, 2):
        engine.sleep(level)
        engine.wake_up(["weights"])
        engine.update_weights(weights_of(), numerics=engine.numerics())
        engine.wake_up()
        q, k = attention.q_proj.weight, attention.k_proj.weight
        assert k.data_ptr() == q.data_ptr() + q.nbytes
        assert ask(engine) == new[0]


def test_buffers_outlive_level_2():
    """DeepSeek's bias of its router, and rotary frequencies, which no state_dict has."""
    model = build("DeepseekV3", seed=1)
    with Engine.from_pretrained(build("DeepseekV3", seed=1), config=CONFIG) as engine:
        expected = ask(engine)
        before = {name: value.clone() for name, value in engine.model.named_buffers()}
        engine.sleep(level=2)
        engine.wake_up(["weights"])
        assert all(torch.equal(value, before[name]) for name, value in engine.model.named_buffers())
        engine.update_weights(model.state_dict(), numerics=engine.numerics())
        engine.wake_up()
        assert all(torch.equal(value, before[name]) for name, value in engine.model.named_buffers())
        assert ask(engine) == expected


def test_a_model_from_files_sleeps_too(tmp_path, old, new):
    """Its tensors show a mapped file at first, and that cannot be given back."""
    build("Llama").save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, config=CONFIG) as engine:
        assert ask(engine) == old[0]
        engine.sleep(level=2)
        assert sizes(engine) == 0
        engine.wake_up(["weights"])
        engine.update_weights(weights_of(), numerics=engine.numerics())
        engine.wake_up()
        assert ask(engine) == new[0] and engine.path == "fused"


def test_a_second_sleep_gives_nothing_but_lets_kept_weights_go(engine, new):
    engine.sleep()
    assert engine.sleep() == dict.fromkeys(TAGS, 0)
    engine.sleep(level=2, tags=["weights"])
    assert sizes(engine) == 0
    engine.wake_up(["weights"])
    assert all(not p.any() for p in engine.model.parameters())
    engine.update_weights(weights_of(), numerics=engine.numerics())
    engine.wake_up()
    assert ask(engine) == new[0]


# Requests


@pytest.mark.parametrize("level", [1, 2])
def test_requests_under_way_go_on_from_their_tokens(engine, old, new, level):
    with asking(engine) as pool, held(engine, 12) as (reached, _):
        running = pool.submit(engine.generate, PROMPTS, LONG)
        assert reached.wait(LONGEST)
        engine.sleep(level)
        late = pool.submit(engine.generate, PROMPTS, PARAMS)
        steps = engine.stats.steps
        with pytest.raises(TimeoutError):
            running.result(0.05)
        assert engine.stats.steps == steps and not late.done()
        if level == 1:
            engine.wake_up()
            assert [bits(c) for c in running.result(LONGEST)] == old[1]
            assert [bits(c) for c in late.result(LONGEST)] == old[0]
            return
        engine.wake_up(["weights"])
        engine.update_weights(weights_of(), numerics=engine.numerics())
        engine.wake_up()
        assert [bits(c) for c in late.result(LONGEST)] == new[0]
        for completion, (tokens, *_) in zip(running.result(LONGEST), old[1]):
            first = completion.weight_versions.count(0)
            assert 0 < first < 60 and completion.token_ids[:first] == tokens[:first]


def test_sleep_waits_for_what_runs_and_holds_what_comes(engine, old):
    with asking(engine) as pool, held(engine, 12) as (reached, _):
        running = pool.submit(engine.generate, PROMPTS, LONG)
        assert reached.wait(LONGEST)
        engine.sleep(mode="wait")
        assert [bits(c) for c in running.result(LONGEST)] == old[1]
        late = pool.submit(engine.generate, PROMPTS, PARAMS)
        engine.wake_up()
        assert [bits(c) for c in late.result(LONGEST)] == old[0]


def test_sleep_ends_what_runs(engine, old):
    with asking(engine) as pool, held(engine, 12) as (reached, _):
        running = pool.submit(engine.generate, PROMPTS, LONG)
        assert reached.wait(LONGEST)
        engine.sleep(mode="abort")
        assert {c.finish_reason for c in running.result(LONGEST)} == {"abort"}
        engine.wake_up()
        assert ask(engine) == old[0]


def test_a_pause_outlives_a_sleep(engine, old):
    with asking(engine) as pool:
        engine.pause("keep")
        engine.sleep()
        assert engine.state == "asleep"
        engine.wake_up()
        assert engine.state == "paused"
        done = pool.submit(engine.generate, PROMPTS, PARAMS)
        with pytest.raises(TimeoutError):
            done.result(0.05)
        engine.resume()
        assert [bits(c) for c in done.result(LONGEST)] == old[0]
    engine.sleep()
    engine.pause("wait")  # nothing is computed: there is nothing to wait for
    engine.resume()
    assert engine.state == "asleep"
    engine.wake_up()


def test_aborts_reach_sleeping_requests(engine):
    with asking(engine) as pool:
        engine.sleep()
        waiting = pool.submit(engine.generate, PROMPTS[:1], PARAMS, request_ids=["x"])
        until(lambda: engine._loop._tickets.named)
        engine.abort("x")
        assert waiting.result(LONGEST)[0].finish_reason == "abort"
        engine.wake_up()


def test_without_weights_a_request_is_refused_and_one_from_before_waits(engine, new):
    with asking(engine) as pool:
        engine.sleep(level=2)
        early = pool.submit(engine.generate, PROMPTS, PARAMS)
        until(lambda: engine._loop._tickets.named)
        engine.wake_up()
        with pytest.raises(WeightsMissing, match=r"sleep\(level=2\) has dropped the weights: update them first"):
            engine.generate(PROMPTS, PARAMS)
        with pytest.raises(ValueError, match="missing"):
            engine.update_weights({}, numerics=engine.numerics())
        assert not early.done()
        engine.update_weights(weights_of(), numerics=engine.numerics())
        assert [bits(c) for c in early.result(LONGEST)] == new[0]
        assert ask(engine) == new[0]


def test_an_update_that_breaks_off_after_level_2_is_healed_by_the_next(engine, new):
    state = weights_of()
    engine.sleep(level=2)
    engine.wake_up()
    half = iter(list(state.items())[:5])
    with pytest.raises(ValueError, match="announced, but did not come"):
        engine.update_weights(half, specs=state, numerics=engine.numerics())
    with pytest.raises(WeightsMissing):
        engine.generate(PROMPTS, PARAMS)
    engine.update_weights(state, numerics=engine.numerics())
    assert ask(engine) == new[0]


# Errors, and the end


def test_sleeping_weights_take_no_update(engine, old):
    engine.sleep(level=2 if engine._worker._memory._on_host else 1)
    for options in ({}, {"specs": weights_of()}):
        with pytest.raises(EngineAsleep, match=r'the weights are asleep: wake_up\(\["weights"\]\) comes first'):
            engine.update_weights(weights_of(), numerics=engine.numerics(), **options)
    engine.wake_up(["weights"])
    engine.update_weights(weights_of(seed=0), numerics=engine.numerics())
    engine.wake_up()
    assert ask(engine) == old[0]


@pytest.mark.parametrize(
    "call,message",
    [
        (lambda e: e.sleep(3), "sleep: level: got 3, expected 1 or 2"),
        (lambda e: e.sleep(True), "sleep: level: got True"),
        (lambda e: e.sleep(mode="now"), "sleep: mode: got 'now', expected one of abort, wait, keep"),
        (lambda e: e.sleep(tags=["weight"]), "sleep: tags: got 'weight', expected some of weights, kv_cache, graphs"),
        (lambda e: e.wake_up(["kv"]), "wake_up: tags: got 'kv', expected some of"),
    ],
)
def test_what_cannot_be_meant_is_refused(engine, call, message):
    with pytest.raises(ValueError) as caught:
        call(engine)
    assert message in str(caught.value) and engine.state == "running"
    with pytest.raises(TypeError, match="tags: got 'weights', expected a list of"):
        engine.sleep(tags="weights")


def test_where_there_is_no_room_it_sleeps_on_and_can_be_woken_later(engine, old, monkeypatch):
    engine.sleep()
    take = Storages.take

    def full(self, zero=True):
        if self.nbytes == CACHE:
            raise torch.OutOfMemoryError("CUDA out of memory")
        take(self, zero)

    monkeypatch.setattr(Storages, "take", full)
    with pytest.raises(MemoryError, match="wake_up: no memory for kv_cache, which takes 0 MiB: CUDA out of memory"):
        engine.wake_up()
    assert engine.asleep == ("kv_cache", "graphs") and engine.state == "asleep"
    monkeypatch.undo()
    monkeypatch.setattr(Memory, "held", lambda self: None)
    engine.wake_up()
    assert ask(engine) == old[0]


def test_without_host_memory_for_the_weights_they_stay(engine, old, monkeypatch):
    """Buffers and weights, whichever of them finds none."""
    moves, real = not engine._worker._memory._on_host, Storages._slabs
    for failing in (1, 2):
        calls = []

        def slabs(self, calls=calls, failing=failing):
            calls.append(self)
            if len(calls) == failing:
                raise RuntimeError("CUDA error: out of host memory")
            return real(self)

        with monkeypatch.context() as patch:
            patch.setattr(Storages, "_slabs", slabs)
            if not moves:
                assert engine.sleep()["weights"] == 0 and not calls
            else:
                with pytest.raises(RuntimeError, match="out of host memory"):
                    engine.sleep()
                assert "weights" not in engine.asleep and sizes(engine) > 0
        engine.wake_up()
        assert ask(engine) == old[0]


def test_graphs_that_find_no_room_sleep_on(engine, old, monkeypatch):
    runner = engine._worker._runner
    engine.sleep()

    def full():
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(runner.graphs, "capture", full)
    with pytest.raises(MemoryError, match="wake_up: no memory for graphs: CUDA out of memory"):
        engine.wake_up()
    assert engine.asleep == ("graphs",) and engine.state == "asleep"
    monkeypatch.undo()
    monkeypatch.setattr(Memory, "held", lambda self: None)
    engine.wake_up()
    assert ask(engine) == old[0]


def test_close_gives_the_model_back_as_it_was(old):
    model = build("Llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        engine._worker._memory._on_host = False
        with pytest.MonkeyPatch.context() as patch, asking(engine) as pool:
            patch.setattr(Memory, "held", lambda self: None)
            engine.sleep()
            waiting = pool.submit(engine.generate, PROMPTS, PARAMS)
            until(lambda: engine._loop._tickets.named)
            engine.close()
            assert {c.finish_reason for c in waiting.result(LONGEST)} == {"abort"}
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert engine.asleep == ()
    for call in (engine.sleep, engine.wake_up):
        with pytest.raises(EngineClosed):
            call()
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert ask(engine) == old[0]


def test_somebody_else_s_write_before_a_sleep_is_not_forgotten(engine, new):
    ask(engine)
    with torch.no_grad():
        for (_, mine), theirs in zip(engine.model.named_parameters(), build("Llama", seed=1).parameters()):
            mine.copy_(theirs)
    engine.sleep(tags=["weights"])
    engine.wake_up()
    assert ask(engine) == new[0] and engine.weight_version == 1


def test_sleeps_of_several_threads_take_their_turns(engine, old):
    def nap(i):
        engine.sleep(tags=[TAGS[i % 2]])
        engine.wake_up()

    stop = threading.Event()

    def work():
        got = []
        while not stop.is_set() or not got:
            got.append(ask(engine))
        return got

    with asking(engine) as pool:
        running = pool.submit(work)
        list(pool.map(nap, range(12)))
        stop.set()
        assert all(found == old[0] for found in running.result(LONGEST))


# Any order


ACTIONS = st.one_of(
    st.tuples(st.just("sleep"), st.sampled_from([1, 2]), st.sets(st.sampled_from(TAGS)), st.sampled_from(["keep"])),
    st.tuples(st.just("wake"), st.sets(st.sampled_from(TAGS))),
    st.tuples(st.just("update"), st.sampled_from([0, 1])),
    st.tuples(st.just("ask")),
    st.tuples(st.just("tokens"), st.integers(1, 6)),
)


@given(st.lists(ACTIONS, max_size=12), st.sampled_from([*KINDS, "graphs"]))
@settings(max_examples=20)
def test_any_order_of_sleeps_wakes_updates_and_requests(old, new, actions, kind):
    """What is asked while everything is there has the bits of its weights; requests that live through all of it have
    those of one set of weights for each of their versions' tokens, and all end."""
    with pytest.MonkeyPatch.context() as patch, made_as(kind, patch) as engine, asking(engine) as pool:
        current, dropped = 0, False
        lives = pool.submit(engine.generate, PROMPTS, LONG)
        until(lambda: engine.stats.steps)
        for action, *rest in actions:
            if action == "sleep":
                level, tags, mode = rest
                dropped |= level == 2 and "weights" in tags
                engine.sleep(level, tags, mode)
            elif action == "wake":
                engine.wake_up(rest[0])
            elif action == "update":
                if "weights" in engine.asleep:
                    with pytest.raises(EngineAsleep):
                        engine.update_weights(weights_of(rest[0]), numerics=engine.numerics())
                else:
                    engine.update_weights(weights_of(rest[0]), numerics=engine.numerics())
                    current, dropped = rest[0], False
            elif action == "tokens":
                most = engine.stats.decode_tokens + rest[0]
                until(lambda: engine.asleep or dropped or lives.done() or engine.stats.decode_tokens >= most)  # noqa: B023
            elif not engine.asleep and not dropped:
                assert ask(engine) == (old, new)[current][0]
        engine.wake_up()
        if dropped:
            engine.update_weights(weights_of(1), numerics=engine.numerics())
            current = 1
        assert ask(engine) == (old, new)[current][0]
        for completion, (tokens, *_) in zip(lives.result(LONGEST), old[1]):
            first = completion.weight_versions.count(0)
            assert len(completion.token_ids) == 60 and completion.token_ids[:first] == tokens[:first]
        check_idle(engine)


# Storages


@given(st.lists(st.integers(1, 700), min_size=1, max_size=8), st.integers(1, 5), st.integers(0, 2**31))
def test_storages_come_back_as_they_were(sizes, slab, seed):
    """Whatever their sizes and that of the pieces of host memory; views and tensors that share one too."""
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randint(0, 255, (n,), dtype=torch.uint8, generator=generator) for n in sizes]
    tensors += [tensors[0][1:], tensors[-1]]
    before = [t.clone() for t in tensors]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sleep_module, "_SLAB", slab * 100)
        storages = Storages(tensors)
        assert storages.nbytes == sum(sizes)
        storages.give_back(keep=True)
        assert all(t.untyped_storage().nbytes() == 0 for t in tensors)
        storages.take()
        storages.take()  # again does nothing
    assert all(torch.equal(t, b) for t, b in zip(tensors, before))
    storages.give_back(keep=False)
    storages.take()
    assert not any(t.any() for t in tensors)


def test_where_one_storage_finds_no_room_none_is_taken():
    class Full:
        def __init__(self, storage):
            self.storage = storage

        def resize_(self, size):
            if size:
                raise RuntimeError("out of memory")

    first, second = torch.ones(4, dtype=torch.float32), torch.ones(5, dtype=torch.float32)
    storages = Storages([first, second])
    storages.give_back(keep=True)
    whole = storages._storages[1]
    storages._storages[1] = Full(whole)
    with pytest.raises(RuntimeError, match="out of memory"):
        storages.take()
    assert first.untyped_storage().nbytes() == 0
    storages._storages[1] = whole
    storages.take()
    assert first.tolist() == [1] * 4 and second.tolist() == [1] * 5


def test_memory_that_is_nobody_s_to_give_is_copied_once():
    import numpy as np

    shared = torch.from_numpy(np.arange(6, dtype=np.float32))
    parts = [shared.view(2, 3), shared[2:], torch.ones(2, dtype=torch.float32)]
    assert own(parts) and not own(parts)
    assert parts[0].untyped_storage()._cdata == parts[1].untyped_storage()._cdata
    assert parts[0].tolist() == [[0, 1, 2], [3, 4, 5]] and parts[1].tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize("paused", ["keep", "wait", "abort"])
@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
def test_who_resumes_while_it_falls_asleep_is_not_forgotten(old, monkeypatch, paused, mode):
    """Sleep pauses for a moment of its own, and must not put back a pause that is over by then."""
    with made() as engine, asking(engine) as pool:
        real, begun = engine._worker.sleep, threading.Event()

        def slow(level, tags):
            begun.set()
            until(lambda: engine._loop._inbox)  # resume() has been called
            return real(level, tags)

        monkeypatch.setattr(engine._worker, "sleep", slow)
        engine.pause(paused)
        sleeping = pool.submit(engine.sleep, 1, None, mode)
        assert begun.wait(LONGEST)
        pool.submit(engine.resume).result(LONGEST)
        sleeping.result(LONGEST)
        engine.wake_up()
        assert engine.state == "running"
        assert pool.submit(ask, engine).result(LONGEST) == old[0]


def test_who_pauses_while_it_falls_asleep_is_not_forgotten(old, monkeypatch):
    with made() as engine, asking(engine) as pool:
        real, begun = engine._worker.sleep, threading.Event()

        def slow(level, tags):
            begun.set()
            until(lambda: engine._loop._inbox)
            return real(level, tags)

        monkeypatch.setattr(engine._worker, "sleep", slow)
        sleeping = pool.submit(engine.sleep)
        assert begun.wait(LONGEST)
        pool.submit(engine.pause, "keep").result(LONGEST)
        sleeping.result(LONGEST)
        engine.wake_up()
        asked = pool.submit(ask, engine)
        assert engine.state == "paused" and not asked.done()
        engine.resume()
        assert asked.result(LONGEST) == old[0]
