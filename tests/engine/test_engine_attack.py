"""Threads, asyncio loops, aborts, cancelled and bad requests, pauses and new weights, all at once on a cache that is
too small, with drafts and without: every token and every log-probability is the one that its request gets alone."""

import asyncio
import contextlib
import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from engine_models import bits, build, check_idle, make_late, prompts
from hypothesis import given, settings
from hypothesis import strategies as st

from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation

FAMILIES = [
    ("Llama", torch.bfloat16),
    ("Qwen3", torch.float32),
    ("Gemma2", torch.bfloat16),
    ("Mixtral", torch.bfloat16),
]
PROMPTS = prompts(5, longest=14)
PARAMS = [
    SamplingParams(max_new_tokens=7, seed=3, ignore_eos=True),
    SamplingParams(max_new_tokens=11, temperature=0.7, top_k=20, seed=4),
    SamplingParams(max_new_tokens=4, temperature=0.0, n=3, seed=5),
]
ROOMY = EngineConfig(num_pages=64, page_size=16, enable_prefix_cache=False, show_progress=False)


@functools.cache
def alone(family, dtype):
    """(prompt, params) -> what each of its samples gets with nothing around it."""
    with Engine.from_pretrained(build(family, dtype), config=ROOMY) as engine:
        return {
            (i, j): engine.generate([prompt], params)
            for i, prompt in enumerate(PROMPTS)
            for j, params in enumerate(PARAMS)
        }


def check(completion, expected):
    """All of what it gets alone, or, aborted, the beginning of it."""
    if completion.finish_reason != "abort":
        assert bits(completion) == bits(expected)
        return
    count = len(completion.token_ids)
    assert completion.token_ids == expected.token_ids[:count]
    assert completion.logprobs == expected.logprobs[:count]
    assert completion.raw_logprobs == expected.raw_logprobs[:count]


class Attack:
    """What one thread does with the engine, one thing after the other."""

    def __init__(self, engine, expected, state):
        self.engine, self.expected, self.state = engine, expected, state
        self.numerics = engine.numerics()

    def params(self, key):
        """Where there are drafts: two tokens in three are right."""
        params = PARAMS[key[1]]
        if self.engine.config.speculation is None:
            return params
        answers = [[t ^ (at % 3 == 2) for at, t in enumerate(one.token_ids)] for one in self.expected[key]]
        return replace(params, draft=answers)

    def check_all(self, asked, done):
        samples = [(key, index) for key in asked for index in range(PARAMS[key[1]].n)]
        assert len(done) == len(samples)
        for (key, index), completion in zip(samples, done):
            check(completion, self.expected[key][index])

    def generate(self, asked, name):
        ids, params = [PROMPTS[i] for i, _ in asked], [self.params(key) for key in asked]
        names = None if name is None else [f"{name}-{k}-{threading.get_ident()}" for k in range(len(asked))]
        bad = [[], [999], [-1], None][len(asked) % 4]
        *done, refused = self.engine.generate([*ids, bad], [*params, PARAMS[0]], request_ids=names and [*names, "bad!"])
        assert refused.finish_reason == "error"
        self.check_all(asked, done)

    def stream(self, key, leave):
        async def main():
            seen = []
            async for increment in self.engine.stream(PROMPTS[key[0]], self.params(key), request_id=None):
                seen.append(increment)
                if len(seen) == leave:
                    break
            return seen

        for increment in (news := asyncio.run(main())):
            if increment.completion is not None:
                check(increment.completion, self.expected[key][increment.index])
        for index in range(PARAMS[key[1]].n):
            tokens = [t for i in news if i.index == index for t in i.token_ids]
            assert tokens == self.expected[key][index].token_ids[: len(tokens)]

    def cancelled(self, asked, turns):
        async def main():
            ids, params = [PROMPTS[i] for i, _ in asked], [self.params(key) for key in asked]
            task = asyncio.create_task(self.engine.agenerate(ids, params, request_ids=["same"] * len(ids)))
            for _ in range(turns):
                await asyncio.sleep(0.001)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

        asyncio.run(main())

    def abort(self, name):
        for k in range(3):
            for thread in threading.enumerate():
                self.engine.abort(f"{name}-{k}-{thread.ident}")

    def update(self, streamed, keep):
        specs = {name: (value.shape, value.dtype) for name, value in self.state.items()} if streamed else None
        self.engine.update_weights(
            iter(self.state.items()), specs=specs, keep_cache=keep, numerics=self.engine.numerics()
        )

    def bad_update(self):
        try:
            self.engine.update_weights(
                {"nothing": torch.zeros(1, dtype=torch.float32)}, numerics=self.engine.numerics()
            )
        except ValueError:
            return
        raise AssertionError("it was taken")

    def reset(self):
        self.engine.reset_prefix_cache()

    def pause(self, mode):
        self.engine.pause(mode)
        self.engine.resume()


keys = st.tuples(st.integers(0, len(PROMPTS) - 1), st.integers(0, len(PARAMS) - 1))
several = st.lists(keys, min_size=1, max_size=3)
names = st.sampled_from([None, "a", "b"])
actions = st.one_of(
    st.tuples(st.just("generate"), several, names),
    st.tuples(st.just("generate"), several, names),
    st.tuples(st.just("stream"), keys, st.integers(1, 12)),
    st.tuples(st.just("cancelled"), several, st.integers(0, 20)),
    st.tuples(st.just("abort"), st.sampled_from(["a", "b"])),
    st.tuples(st.just("update"), st.booleans(), st.booleans()),
    st.tuples(st.just("bad_update")),
    st.tuples(st.just("reset")),
    st.tuples(st.just("pause"), st.sampled_from(["keep", "wait", "abort"])),
)
configs = st.builds(
    replace,
    st.just(ROOMY),
    page_size=st.sampled_from([1, 3, 4]),
    num_pages=st.sampled_from([26, 30, 60]),
    max_num_seqs=st.sampled_from([2, 4, 256]),
    max_num_batched_tokens=st.sampled_from([1, 5, 16]),
    enable_prefix_cache=st.booleans(),
    reserve=st.sampled_from([None, 0.0, 1.0]),
)
drafting = st.builds(
    replace,
    configs,
    speculation=st.builds(Speculation, st.integers(1, 6), sources=st.just(("given",)), always=st.just(True)),
    async_scheduling=st.just(True),
)


@settings(max_examples=settings.default.max_examples // 2)
@given(st.sampled_from(FAMILIES), configs, st.lists(st.lists(actions, min_size=1, max_size=4), min_size=2, max_size=4))
def test_whatever_is_done_to_an_engine(family, config, threads):
    _attack(family, config, threads)


@settings(max_examples=settings.default.max_examples // 2)
@given(
    st.sampled_from(FAMILIES[:2]), drafting, st.lists(st.lists(actions, min_size=1, max_size=4), min_size=1, max_size=3)
)
def test_whatever_is_done_to_an_engine_with_drafts(family, config, threads):
    """With plans ahead: steps behind drafts are launched while these are verified."""
    _attack(family, config, threads)


def _attack(family, config, threads):
    model = build(*family)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    expected = alone(*family)
    with Engine.from_pretrained(model, config=config) as engine:
        if config.async_scheduling:
            make_late(engine, 0.0005)

        def run(script):
            attack = Attack(engine, expected, state)
            for name, *arguments in script:
                getattr(attack, name)(*arguments)

        with ThreadPoolExecutor(len(threads)) as pool:
            for running in [pool.submit(run, script) for script in threads]:
                running.result(timeout=600)
        check_idle(engine)
        attack = Attack(engine, expected, state)
        attack.generate([(0, 0), (1, 1), (2, 2)], None)


@settings(max_examples=4)
@given(st.sampled_from(FAMILIES[:2]), st.floats(0, 0.05), st.integers(1, 3))
def test_close_in_the_middle_of_everything(family, delay, callers):
    """Everybody gets an answer: what was asked for, what there was of it, or that the engine is closed."""
    from vexact_engine import EngineClosed

    expected, model = alone(*family), build(*family)
    engine = Engine.from_pretrained(model, config=replace(ROOMY, num_pages=12, page_size=4))
    attack = Attack(engine, expected, dict(model.state_dict()))

    def run(action, *arguments):
        end = time.monotonic() + 300
        try:
            while time.monotonic() < end:
                action(*arguments)
        except EngineClosed:
            return True

    with ThreadPoolExecutor(16) as pool:
        running = [pool.submit(run, attack.generate, [(i, 0), (i, 2)], None) for i in range(callers)]
        running += [pool.submit(run, attack.stream, (i, 1), 100) for i in range(callers)]
        running += [pool.submit(run, attack.update, True, False), pool.submit(run, attack.pause, "keep")]
        threading.Event().wait(delay)
        engine.close()
        for one in running:
            assert one.result(timeout=600)
    assert all("forward" not in module.__dict__ for module in model.modules())
