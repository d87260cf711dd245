"""The engine owns its weights: whoever else changes them is noticed, refused or waited for, and no bit is of both."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from engine_models import bits, build, check_idle, prompts, until

import vexact_ops as vx
from vexact_engine import Engine, EngineClosed, EngineConfig, ModelInUse, SamplingParams, WeightsTorn
from vexact_engine.runner.projections import join
from vexact_engine.weights import update as update_module
from vexact_ops.testing import assert_bitwise

CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
PROMPTS = prompts(3, longest=20)
PARAMS = SamplingParams(max_new_tokens=5, seed=1, ignore_eos=True)
LONG = replace(PARAMS, max_new_tokens=60)


def fresh(model):
    """What an engine gives that was made for these weights."""
    copied = build("Llama")
    with torch.no_grad():
        for mine, theirs in zip(copied.parameters(), model.parameters()):
            mine.copy_(theirs)
    with Engine.from_pretrained(copied, config=CONFIG) as engine:
        return [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def old():
    return fresh(build("Llama"))


@pytest.fixture(scope="module")
def new():
    return fresh(build("Llama", seed=1))


def specs_of(state):
    return {name: (tuple(value.shape), value.dtype) for name, value in state.items()}


def ask(engine):
    return [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


# Two engines


def test_a_model_has_one_engine(old):
    model = build("Llama")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        with pytest.raises(ModelInUse, match="another engine runs this LlamaForCausalLM and owns its weights"):
            Engine.from_pretrained(model, config=CONFIG)
        assert ask(engine) == old
    places = [p.data_ptr() for p in model.parameters()]
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert ask(engine) == old
    assert [p.data_ptr() for p in model.parameters()] == places  # joined already: nothing moved


def test_a_model_without_layers_or_with_an_embedding_of_another_kind_is_refused():
    model = build("Llama")
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(ValueError, match="the LlamaForCausalLM has no layers, expected at least one"):
        Engine.from_pretrained(model, config=CONFIG)
    model = build("Llama")
    model.model.embed_tokens = torch.nn.Sequential(model.model.embed_tokens)
    with pytest.raises(TypeError, match="the embedding of the LlamaForCausalLM is a Sequential, expected an Embedding"):
        Engine.from_pretrained(model, config=CONFIG)
    assert not hasattr(model, "_vexact")


def test_join_keeps_what_is_joined():
    parts = [torch.nn.Parameter(torch.randn(n, 4, dtype=torch.float32)) for n in (3, 1, 2)]
    before = torch.cat([p.detach() for p in parts])
    joined = join(parts)
    again = join(parts)
    assert joined.data_ptr() == again.data_ptr() == parts[0].data_ptr()
    assert torch.equal(again, before) and again.shape == (6, 4)
    assert join(parts[1:]).data_ptr() == parts[1].data_ptr()
    moved = join([parts[1], parts[0]])  # side by side, but not in this order
    assert moved.data_ptr() != joined.data_ptr() and torch.equal(moved, torch.cat([before[3:4], before[:3]]))


# Somebody else writes


def optimizer_step(model):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float32).to(parameter.dtype)
    optimizer.step()
    optimizer.zero_grad()


def put_data(model):
    for parameter, other in zip(model.parameters(), build("Llama", seed=1).parameters()):
        parameter.data = other.detach().clone()


def put_one(model):
    weight = model.model.layers[0].self_attn.k_proj.weight
    weight.data = weight.detach() * 0.5


def assign(model):
    model.load_state_dict(build("Llama", seed=1).state_dict(), assign=True)


def write(model):
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight.mul_(0.5)


@pytest.mark.parametrize("change", [optimizer_step, put_data, put_one, assign, write])
def test_weights_that_others_change_are_the_weights(change, old, new):
    model = build("Llama")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        assert ask(engine) == old == ask(engine)
        change(model)
        known = engine.stats.prefix_tokens
        done = engine.generate(PROMPTS[:1], PARAMS)
        assert engine.stats.prefix_tokens == known and done[0].weight_version == 1 == engine.weight_version
        expected = fresh(model)
        assert ask(engine) == expected != old
        assert engine.path == "fused"
        # what the trainer computes with the very same model
        ids = torch.tensor([PROMPTS[0] + done[0].token_ids])
        with torch.no_grad(), vx.patch.hf(model) as handle:
            scores = handle.logprobs(ids)[0, len(PROMPTS[0]) - 1 : -1]
        assert scores.tolist() == done[0].logprobs
        engine.update_weights(build("Llama", seed=1).state_dict(), numerics=engine.numerics())
        assert ask(engine) == new
        check_idle(engine)


def after_step(engine, monkeypatch, step, action):
    """Call `action` between the n-th step from now and what follows it, in the engine's thread."""
    run, count = engine._worker.launch, iter(range(1, 1 << 30))

    def hooked(plan):
        sampled = run(plan)
        if next(count) == step:
            action()
        return sampled

    monkeypatch.setattr(engine._worker, "launch", hooked)


def test_weights_that_others_change_under_a_request(monkeypatch):
    model = build("Llama")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        after_step(engine, monkeypatch, 20, lambda: write(model))
        done = engine.generate(PROMPTS[:1], LONG)[0]
        assert set(done.weight_versions) == {0, 1} and done.weight_versions == sorted(done.weight_versions)
        since = done.weight_versions.index(1)
        text = PROMPTS[0] + done.token_ids[:since]
        rest = engine.generate([text], replace(LONG, max_new_tokens=60 - since))[0]
        assert (rest.token_ids, rest.logprobs) == (done.token_ids[since:], done.logprobs[since:])


def test_weights_of_another_kind_are_not_computed_with(old):
    model = build("Llama")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        before = [p.data for p in model.parameters()]
        for parameter in model.parameters():
            parameter.data = parameter.data.float()
        with pytest.raises(WeightsTorn, match=r"has been replaced by a tensor that is torch.float32 on cpu"):
            ask(engine)
        for parameter, data in zip(model.parameters(), before):
            parameter.data = data
        assert ask(engine) == old


# Updates


def test_what_is_no_pair_of_a_name_and_a_tensor_is_said_to_be_none():
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        norm = torch.ones(48)
        for bad in (None, 5, "model.safetensors", norm, ["lm_head"], [("norm",)], [("norm", norm, 1)]):
            with pytest.raises(TypeError, match=r"^update_weights: named_tensors: got"):
                engine.update_weights(bad, numerics=engine.numerics())
        assert engine.weight_version == 0


def test_buffers_of_checkpoints_come_too():
    """A trainer may have changed them, as DeepSeek's does its routers' biases."""
    trainer, model = build("DeepseekV3", seed=1), build("DeepseekV3")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    state = trainer.state_dict()
    state[bias] += 1
    left_out = dict(trainer.named_parameters())
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        before = engine.generate(PROMPTS, PARAMS)
        for specs in (None, left_out):
            with pytest.raises(ValueError, match=rf"missing: {bias}, .* \(buffers .*: give what state_dict"):
                engine.update_weights(left_out, numerics=engine.numerics(), specs=specs)
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == [bits(c) for c in before]
        engine.update_weights(state, numerics=engine.numerics())
        assert_bitwise(model.get_buffer(bias), state[bias])


@pytest.mark.parametrize("streamed", [False, True])
def test_an_update_from_the_model_s_own_memory(streamed, old):
    model = build("Llama")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        state = engine.model.state_dict()
        swapped = {
            name: state[name.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.")] for name in state
        }
        truth = {name: value.clone() for name, value in swapped.items()}
        if streamed:
            with pytest.raises(ValueError, match="is memory of the model that is updated: give a copy"):
                engine.update_weights(swapped, specs=specs_of(swapped), numerics=engine.numerics())
            engine.update_weights(truth, specs=specs_of(truth), numerics=engine.numerics())
        else:
            engine.update_weights(swapped, numerics=engine.numerics())
        assert all(torch.equal(model.state_dict()[name], value) for name, value in truth.items())
        version = engine.weight_version
        assert (
            engine.update_weights(model.state_dict(), specs=specs_of(state), numerics=engine.numerics()) == version + 1
        )


def test_buckets_are_read_as_they_are_written(monkeypatch, new):
    """Tensors of a generator do not live together, and the generator runs in the caller's thread."""
    monkeypatch.setattr(update_module, "_AT_ONCE", 1)
    alive, most, threads = 0, 0, set()
    state = build("Llama", seed=1).state_dict()

    class Counted(torch.Tensor):
        def __del__(self):
            nonlocal alive
            alive -= 1

    def source():
        nonlocal alive, most
        for name, value in state.items():
            threads.add(threading.current_thread())
            alive += 1
            most = max(most, alive)
            yield name, value.clone().as_subclass(Counted)

    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        assert engine.update_weights(source(), specs=specs_of(state), numerics=engine.numerics()) == 1
        assert ask(engine) == new
    assert most <= 4 < len(state) and threads == {threading.current_thread()}


def test_a_source_that_needs_the_engine_does_not_hang_it(old, new):
    state = build("Llama", seed=1).state_dict()
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:

        def source():
            yield from list(state.items())[:3]
            assert ask(engine) == old
            yield from list(state.items())[3:]

        engine.update_weights(source(), numerics=engine.numerics())
        assert ask(engine) == new


@pytest.mark.parametrize("when", ["at once", "later"])
def test_a_stream_of_weights_that_breaks_off(monkeypatch, old, new, when):
    monkeypatch.setattr(update_module, "_AT_ONCE", 1)
    state = build("Llama", seed=1).state_dict()

    def source():
        if when == "later":
            yield from list(state.items())[:3]
        raise OSError("the sender is gone")

    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        with pytest.raises(OSError, match="the sender is gone"):
            engine.update_weights(source(), specs=specs_of(state), numerics=engine.numerics())
        if when == "at once":
            assert ask(engine) == old and engine.weight_version == 0
        else:
            with pytest.raises(WeightsTorn, match="broke off in the middle"):
                ask(engine)
        with pytest.raises(ValueError, match="announced, but did not come"):
            engine.update_weights(list(state.items())[:-1], specs=specs_of(state), numerics=engine.numerics())
        engine.update_weights(iter(state.items()), specs=specs_of(state), numerics=engine.numerics())
        assert ask(engine) == new


def test_a_bucket_that_comes_behind_the_end_of_its_update(old):
    """Another thread gives up while this one's bucket is on its way to the engine's: it must not begin anew what nobody
    ends any more."""
    state = build("Llama", seed=1).state_dict()
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine, ThreadPoolExecutor() as pool:
        update = engine.begin_update(numerics=engine.numerics(), specs=specs_of(state))
        loop, busy, go = engine._loop, threading.Event(), threading.Event()
        held = pool.submit(loop.call, lambda: (busy.set() is None, go.wait(60)))
        assert busy.wait(60)
        for function in (update.abandon, lambda: update.write(list(state.items())[:1])):
            before, late = len(loop._inbox), pool.submit(function)
            until(lambda before=before: len(loop._inbox) > before)
        go.set()
        assert all(held.result())
        with pytest.raises(RuntimeError, match="WeightUpdate: it has ended"):
            late.result(60)
        assert ask(engine) == old and engine.weight_version == 0


def test_an_update_that_is_given_up_while_its_engine_closes_keeps_nobody_waiting(monkeypatch):
    """Whoever waits for its end to begin another is told that the engine is closed."""
    state = build("Llama").state_dict()
    engine = Engine.from_pretrained(build("Llama"), config=CONFIG)
    update = engine.begin_update(numerics=engine.numerics(), specs=specs_of(state))
    with ThreadPoolExecutor() as pool:
        check = engine._loop.check_open
        came = threading.Event()
        monkeypatch.setattr(engine._loop, "check_open", lambda: came.set() if not came.is_set() else check())
        second = pool.submit(engine.begin_update, numerics=engine.numerics(), specs=specs_of(state))
        assert came.wait(60)
        engine.close()
        with monkeypatch.context() as patched:
            patched.setattr(type(engine._loop), "closed", property(lambda self: False))  # asked before it was
            update.abandon()
        with pytest.raises(EngineClosed):
            second.result(60)
    update.abandon()
    assert not engine._updates.locked()


def test_one_end_of_an_update_is_the_end(old):
    """Given up in another thread while it is finished: the lock that is let go of then may be another update's."""
    state = build("Llama", seed=1).state_dict()
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine, ThreadPoolExecutor() as pool:
        update = engine.begin_update(numerics=engine.numerics(), specs=specs_of(state))
        update.write(list(state.items()))
        loop, busy, go = engine._loop, threading.Event(), threading.Event()
        held, late = pool.submit(loop.call, lambda: (busy.set() is None, go.wait(60))), []
        assert busy.wait(60)
        for function in (update.finish, update.abandon):
            before = len(loop._inbox)
            late.append(pool.submit(function))
            until(lambda before=before: len(loop._inbox) > before)
        go.set()
        assert all(held.result())
        with pytest.raises(RuntimeError, match="WeightUpdate: it has ended"):  # it was to wait for a step
            late[0].result(60)
        late[1].result(60)
        assert engine.weight_version == 0
        with engine.begin_update(numerics=engine.numerics(), specs=specs_of(state)) as another:
            another.write(list(state.items())[:1])
            update.abandon()
            assert engine._updates.locked() and loop.updating
        assert not engine._updates.locked()


@pytest.mark.parametrize(
    "spoil, error",
    [
        (lambda s: s.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda s: s.update(more=s["model.norm.weight"]), "unknown: more"),
        (lambda s: s.update({"model.norm.weight": ((3,), torch.bfloat16)}), r"is \(3,\), expected \(48,\)"),
        (
            lambda s: s.update({"model.norm.weight": ((48,), torch.float32)}),
            "is torch.float32, expected torch.bfloat16",
        ),
        (lambda s: s.update({"model.norm.weight": 3}), r"is a int, expected \(shape, dtype\)"),
    ],
)
def test_announcements_are_checked_before_anything_is_read(spoil, error, old):
    state = build("Llama", seed=1).state_dict()
    specs = specs_of(state)
    spoil(specs)

    def source():
        raise AssertionError("nobody should have asked")
        yield

    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        with pytest.raises((ValueError, TypeError), match=error):
            engine.update_weights(source(), specs=specs, numerics=engine.numerics())
        assert ask(engine) == old and engine.weight_version == 0


def test_updates_without_pause_starve_nobody():
    """A prompt of many chunks, and an update after every step: it gets its tokens all the same."""
    state = build("Llama").state_dict()
    prompt, config = [5] * 120, replace(CONFIG, max_num_batched_tokens=4)
    with Engine.from_pretrained(build("Llama"), config=config) as engine:
        expected = bits(engine.generate([prompt], PARAMS)[0])
        stop, loop, launch = threading.Event(), engine._loop, engine._worker.launch

        def update():
            while not stop.is_set():
                engine.update_weights(state, numerics=engine.numerics())

        def behind_an_update(plan):
            until(lambda: loop._inbox or loop._deferred or stop.is_set())
            return launch(plan)

        with ThreadPoolExecutor() as pool:
            updating = pool.submit(update)
            until(lambda: engine.weight_version)
            engine._worker.launch = behind_an_update
            try:
                done = pool.submit(engine.generate, [prompt], PARAMS).result(timeout=300)
            finally:
                stop.set()
            updating.result()
        assert bits(done[0]) == expected and engine.weight_version >= 5


def test_keeping_the_cache_is_declared(new, monkeypatch):
    state = build("Llama", seed=1).state_dict()
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        handed = []
        one = threading.Thread(
            target=lambda: handed.append(engine.update_weights(state, keep_cache=True, numerics=engine.numerics()))
        )

        def hand_over():
            one.start()
            until(lambda: engine._loop._inbox)

        after_step(engine, monkeypatch, 20, hand_over)
        mixed = engine.generate(PROMPTS[:1], LONG)[0]
        one.join(60)
        assert handed == [1]
        assert engine.stats.preemptions == 0 and set(mixed.weight_versions) == {0, 1}
        known = engine.stats.prefix_tokens
        first = engine.generate(PROMPTS[:1], PARAMS)
        assert engine.stats.prefix_tokens == known  # nobody finds what was kept
        assert bits(first[0]) == new[0] and ask(engine) == new
        check_idle(engine)


def test_an_update_during_a_pause_is_at_once(old, new):
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        engine.pause("keep")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(ask, engine)
            until(lambda: engine._loop._tickets.named)
            engine.update_weights(build("Llama", seed=1).state_dict(), numerics=engine.numerics())
            assert not waiting.done()
            engine.resume()
            assert waiting.result() == new
