"""What requests may ask, how they end, who suffers from a bad one, and that nothing is lost whatever happens."""

import asyncio
import json
import os
import re
import signal
import threading
from dataclasses import replace

import pytest
import torch
from engine_models import VOCAB, bits, build, byte_tokenizer, check_idle, held, prompts, small_engine

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams, StepFailed
from vexact_engine.runner import worker as worker_module

CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
PROMPTS = prompts(4, longest=20)
PARAMS = SamplingParams(max_new_tokens=6, seed=1, ignore_eos=True)
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
def talking():
    """An engine with a tokenizer whose tokens are bytes."""
    with Engine.from_pretrained(build("Llama", **TEXT), tokenizer=byte_tokenizer(), config=CONFIG) as engine:
        yield engine


@pytest.mark.parametrize("given", ["a/model/dir", build("Llama")], ids=["path", "model"])
def test_what_is_not_loaded_yet_is_sent_to_from_pretrained(given):
    with pytest.raises(TypeError, match=r"Engine: loaded: got .*Engine\.from_pretrained"):
        Engine(given)


def test_chat_is_generate_on_the_model_s_own_template(talking):
    ask = [{"role": "user", "content": "hi"}]
    with pytest.raises(ValueError, match="chat: the model has no chat template"):
        talking.chat(ask)
    talking.tokenizer.chat_template = (
        "{% if loud %}!{% endif %}{% for m in messages %}[{{ m.content }}]{% endfor %}{{'>' * add_generation_prompt}}"
        "{% if messages[0].role == 'nobody' %}{{ raise_exception('who?') }}{% endif %}"
    )
    try:
        params = SamplingParams(max_tokens=5, seed=3)
        (one,) = talking.chat(ask, params)
        assert one.token_ids == talking.generate("[hi]>", params)[0].token_ids
        assert one.prompt_ids == talking.tokenizer("[hi]>")["input_ids"]
        several = talking.chat([ask, ask], params, loud=True)
        assert [c.prompt_ids for c in several] == [talking.tokenizer("![hi]>")["input_ids"]] * 2
        for option, text in (({"add_generation_prompt": False}, "[hi]"), ({"continue_final_message": True}, "[hi")):
            assert talking.chat(ask, params, **option)[0].prompt_ids == talking.tokenizer(text)["input_ids"]
        for bad, message in (([], "got none"), ([{"role": "nobody", "content": ""}], "refuses them: who")):
            with pytest.raises(ValueError, match=message):
                talking.chat(bad)
    finally:
        talking.tokenizer.chat_template = None


def test_engine_and_completion_say_in_a_line_what_they_are(talking):
    (done,) = talking.generate("hello", SamplingParams(max_tokens=60, seed=1, ignore_eos=True))
    assert re.fullmatch(r"<Completion .{1,70}, 60 tokens after 5, length>", repr(done)), repr(done)
    assert repr(talking) == "<Engine of LlamaForCausalLM: bfloat16 on cpu, running, fused, weight_version 0>"
    (bad,) = talking.generate([[10**6]])
    assert repr(bad).startswith("<Completion 0 tokens after 1, error: ")


# What is wrong with one request is its own affair


def refused(engine, prompt, params=PARAMS, **options):
    """The error of a bad request, between two good ones that do not notice it."""
    good = [bits(c) for c in engine.generate(PROMPTS[:2], PARAMS)]
    first, *bad, last = engine.generate([PROMPTS[0], prompt, PROMPTS[1]], [PARAMS, params, PARAMS], **options)
    assert [bits(first), bits(last)] == good
    assert len(bad) == (params.n if isinstance(params, SamplingParams) else 1)
    for index, completion in enumerate(bad):
        assert completion.finish_reason == "error" and completion.index == index
        assert completion.token_ids == completion.logprobs == []
    return bad[0].error


@pytest.mark.parametrize(
    "prompt, message",
    [
        ([], "prompt_ids is empty"),
        ([3, VOCAB], f"prompt_ids has {VOCAB}, expected ids below {VOCAB}"),
        ([-1], "prompt_ids has -1"),
        ([1.5], r"prompt_ids is \[1.5\], expected a list of token ids"),
        (None, "prompt_ids is None"),
        ([3] * 256, r"has 256 tokens, expected at most 255: max_model_len is 256"),
        ("text", "prompt is a text, expected token ids: there is no tokenizer"),
    ],
    ids=["empty", "unknown-id", "negative", "float", "none", "long", "text"],
)
def test_a_bad_prompt(engine, prompt, message):
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(refused(engine, prompt))


@pytest.mark.parametrize(
    "params, message",
    [
        (replace(PARAMS, num_top_logprobs=VOCAB + 1), "num_top_logprobs is 161, expected at most 160"),
        (replace(PARAMS, stop="x", n=2), "stop has strings, expected none: there is no tokenizer"),
        ({"n": 2}, "params is a dict, expected SamplingParams"),
    ],
    ids=["top-logprobs", "stop", "no-params"],
)
def test_bad_parameters(engine, params, message):
    assert message in refused(engine, PROMPTS[2], params)


def test_a_prompt_that_no_cache_can_hold():
    with Engine.from_pretrained(build("Llama"), config=replace(CONFIG, num_pages=5)) as engine:
        long, cut, small = engine.generate([[5] * 21, [5] * 18, [5] * 4], PARAMS)
        assert long.finish_reason == "error" and "at most 20: the KV cache has 5 pages of 4 tokens" in long.error
        assert cut.finish_reason == "length" and len(cut.token_ids) == 3
        assert cut.error == "the KV cache is full: it has 5 pages of 4 tokens"
        assert len(small.token_ids) == 6 and small.error is None
        check_idle(engine)


def test_the_context_ends_a_request(engine):
    done = engine.generate([[5] * 253, [5] * 255], PARAMS)
    assert [(c.finish_reason, len(c.token_ids), c.error) for c in done] == [("length", 3, None), ("length", 1, None)]


def test_logits_that_are_no_numbers():
    model = build("Qwen3")
    model.model.embed_tokens.weight.data[7] = float("nan")
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        params = replace(PARAMS, n=2)
        good = [bits(c) for c in engine.generate([p for p in PROMPTS[:2] if 7 not in p], params)]
        done = engine.generate([PROMPTS[0], [9, 7, 9], PROMPTS[1]], params)
        assert [bits(c) for c in done[:2] + done[4:]] == good and len(good) == 4
        for completion in done[2:4]:
            assert completion.finish_reason == "error" and completion.token_ids == []
            assert "the model's logits after 3 tokens are not finite numbers" in completion.error
        check_idle(engine)


def test_a_call_that_makes_no_sense(engine):
    with pytest.raises(TypeError, match="got one list of token ids, expected a list of prompts"):
        engine.generate([1, 2, 3])
    with pytest.raises(ValueError, match="params: got 1, expected 2"):
        engine.generate(PROMPTS[:2], [PARAMS])
    with pytest.raises(TypeError, match="params: got a dict"):
        engine.generate(PROMPTS[:2], {"n": 1})
    with pytest.raises(ValueError, match="request_ids: got 1, expected 2"):
        engine.generate(PROMPTS[:2], PARAMS, request_ids=["a"])
    assert engine.generate([]) == []


def test_request_ids(engine):
    done = engine.generate(PROMPTS[:3], PARAMS, request_ids=["a", "b", "a"])
    assert [c.request_id for c in done] == ["a", "b", "a"]
    assert [c.finish_reason for c in done] == ["length", "length", "error"]
    assert done[2].error == "request 'a': another request of this id is not done yet"


@pytest.mark.parametrize(
    "config, message",
    [
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size: got a loaded Llama.*, expected a model directory"),
        ({"max_model_len": 257}, "max_model_len is 257, expected at most 256: LlamaForCausalLM's own"),
        ({"kv_segment": 63}, "kv_segment: got 63, expected None or a multiple of 64"),
    ],
)
def test_a_config_that_cannot_be(config, message):
    model = build("Llama")
    with pytest.raises(ValueError, match=message):
        Engine.from_pretrained(model, config=replace(CONFIG, **config))
    assert "forward" not in model.__dict__  # not left patched


def test_extreme_parameters(engine):
    params = [replace(PARAMS, top_p=1e-300), replace(PARAMS, top_k=2**63 - 1), replace(PARAMS, min_p=1e-300)]
    greedy, *rest = engine.generate([PROMPTS[0]] * 3, params)
    assert greedy.token_ids == engine.generate([PROMPTS[0]], replace(PARAMS, temperature=0.0))[0].token_ids
    assert [c.token_ids for c in rest] == [engine.generate([PROMPTS[0]], PARAMS)[0].token_ids] * 2


# Ends


def test_stop_ids_and_several_ends():
    model = build("Llama")
    free = replace(PARAMS, max_new_tokens=30)
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        tokens = engine.generate([PROMPTS[0]], free)[0].token_ids
        first = {token: tokens.index(token) for token in tokens}
        early, late = sorted(first, key=first.get)[2], sorted(first, key=first.get)[5]
        done = engine.generate(
            [PROMPTS[0]] * 2, [replace(free, stop_token_ids=ids) for ids in ((late, early), (late,))]
        )
        assert [(c.finish_reason, c.stop_reason) for c in done] == [("stop", early), ("stop", late)]
        assert [c.token_ids for c in done] == [tokens[: first[early] + 1], tokens[: first[late] + 1]]
        check_idle(engine)
    model.generation_config.eos_token_id = [late, early]
    with Engine.from_pretrained(model, config=CONFIG) as engine:
        done = engine.generate([PROMPTS[0]] * 2, [replace(free, ignore_eos=False), free])
        assert [(c.stop_reason, c.finish_reason) for c in done] == [(early, "stop"), (None, "length")]


def test_text(talking):
    done = talking.generate(["héllo", "wörld"], replace(PARAMS, max_new_tokens=40))
    assert [c.prompt_ids for c in done] == [byte_tokenizer()(text).input_ids for text in ("héllo", "wörld")]
    assert [c.text for c in done] == [byte_tokenizer().decode(c.token_ids, skip_special_tokens=True) for c in done]
    assert talking.generate("héllo", PARAMS)[0].token_ids == done[0].token_ids[:6]
    check_idle(talking)


def test_stop_strings(talking):
    free = replace(PARAMS, max_new_tokens=60)
    whole = talking.generate(["a b"], free)[0]
    stop = whole.text[20:23]
    end = whole.text.index(stop)
    done = talking.generate(["a b"], replace(free, stop=("never found", stop)))[0]
    assert (done.finish_reason, done.stop_reason) == ("stop", stop)
    assert done.text == whole.text[:end]
    assert done.token_ids == whole.token_ids[: len(done.token_ids)]
    seen = byte_tokenizer().decode(done.token_ids, skip_special_tokens=True)
    assert stop in seen and stop not in byte_tokenizer().decode(done.token_ids[:-2], skip_special_tokens=True)
    check_idle(talking)


def test_a_stop_string_before_the_least_tokens_is_text_like_any_other(talking):
    free = replace(PARAMS, max_new_tokens=60)
    whole = talking.generate(["a b"], free)[0]
    text = whole.text
    stop = next(letter for letter in text if letter.isascii() and text.count(letter) > 1)
    first = talking.generate(["a b"], replace(free, stop=stop))[0]
    least = replace(free, stop=stop, min_new_tokens=len(first.token_ids) + 1)
    done = talking.generate(["a b"], least)[0]
    assert first.text == text[: text.index(stop)]
    assert done.text == text[: text.index(stop, text.index(stop) + 1)] and stop in done.text
    news = asyncio.run(collect(talking, "a b", least))
    assert "".join(i.text for i in news) == done.text
    beside = talking.generate(["a b"], replace(least, stop=(stop, "never" * 20)))[0]
    assert beside.text == done.text, "a longer one beside it changes nothing"
    check_idle(talking)


def on_step(engine, monkeypatch, step, action):
    """Call `action` in the middle of the n-th step from now."""
    run, count = engine._worker.launch, iter(range(1, 1 << 30))

    def hooked(plan):
        sampled = run(plan)
        if next(count) == step:
            action()
        return sampled

    monkeypatch.setattr(engine._worker, "launch", hooked)


def out_of_memory():
    raise RuntimeError("out of memory")


def test_abort_in_the_middle(engine, monkeypatch):
    whole = engine.generate(PROMPTS[:3], PARAMS)
    on_step(engine, monkeypatch, 4, lambda: engine.abort("b"))
    done = engine.generate(PROMPTS[:3], replace(PARAMS, n=2), request_ids=["a", "b", "c"])
    assert [c.finish_reason for c in done] == ["length"] * 2 + ["abort"] * 2 + ["length"] * 2
    assert [bits(done[0]), bits(done[4])] == [bits(whole[0]), bits(whole[2])]
    assert 0 < len(done[2].token_ids) < 6
    assert done[2].token_ids == whole[1].token_ids[: len(done[2].token_ids)]
    engine.abort("nobody")


def test_ctrl_c_while_computing(engine, monkeypatch, ctrl_c):
    expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
    on_step(engine, monkeypatch, 3, lambda: os.kill(os.getpid(), signal.SIGINT))
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    assert signal.getsignal(signal.SIGINT) is before
    check_idle(engine)
    assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected


@pytest.mark.parametrize("place", ["schedule", "commit", "add", "cancel"])
def test_ctrl_c_while_the_state_changes(engine, monkeypatch, place, ctrl_c):
    expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
    scheduler, finished = engine._scheduler, []
    change = getattr(scheduler, place)

    def interrupted(*args, **options):
        if not finished:
            os.kill(os.getpid(), signal.SIGINT)  # to the process, as a terminal does
        value = change(*args, **options)
        finished.append(place)
        return value

    monkeypatch.setattr(scheduler, place, interrupted)
    if place == "cancel":
        on_step(engine, monkeypatch, 2, out_of_memory)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(PROMPTS, PARAMS)
    monkeypatch.undo()
    check_idle(engine)  # after what its thread was at: this one did not wait for that
    assert finished  # it came after the change, not in the middle of it
    assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected


def test_ctrl_c_in_another_thread_is_not_ours(engine):
    done = []
    thread = threading.Thread(target=lambda: done.extend(engine.generate(PROMPTS, PARAMS)))
    thread.start()
    thread.join()
    assert [bits(c) for c in done] == [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


def test_a_computation_that_fails(engine, monkeypatch):
    expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
    on_step(engine, monkeypatch, 3, out_of_memory)
    with pytest.raises(RuntimeError, match="out of memory"):
        engine.generate(PROMPTS, PARAMS)
    check_idle(engine)
    assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected


# Weights


def test_new_weights_are_those_of_a_new_engine():
    other = build("Llama", seed=1)
    config = replace(CONFIG, enable_prefix_cache=True)
    with Engine.from_pretrained(build("Llama", seed=1), config=config) as engine:
        expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
    with Engine.from_pretrained(build("Llama"), config=config) as engine:
        old = engine.generate(PROMPTS, PARAMS)
        known = engine.stats.prefix_tokens
        assert engine.path == "fused" and [bits(c) for c in old] != expected
        assert engine.update_weights(other.state_dict(), numerics=vx.numerics("cpu")) == engine.weight_version == 1
        done = engine.generate(PROMPTS[:1], PARAMS)
        assert engine.stats.prefix_tokens == known  # nothing of the old prefix was used
        done += engine.generate(PROMPTS[1:], PARAMS)
        assert [bits(c) for c in done] == expected
        assert {c.weight_version for c in old} == {0} and {c.weight_version for c in done} == {1}
        assert done[0].weight_versions == [1] * 6
        check_idle(engine)


def test_a_refused_update_changes_nothing(engine):
    expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
    version = engine.weight_version
    given = build("Llama", seed=1).state_dict()
    norm = "model.norm.weight"
    for bad, error in (
        ({**given, norm: given[norm][1:]}, ValueError),
        ({**given, norm: given[norm].float()}, TypeError),
        ({**given, "more": given[norm]}, ValueError),
        ({name: given[name] for name in given if name != norm}, ValueError),
    ):
        with pytest.raises(error, match="update_weights"):
            engine.update_weights(bad, numerics=vx.numerics("cpu"))
    trainers = json.loads(json.dumps(vx.numerics("cpu", kv_segment=64))) | {"contract": 0}
    trainers["rooms"]["linear"] = "of other sources"
    with pytest.raises(ValueError, match="numerics: the trainer's are not") as refusal:
        engine.update_weights(given, numerics=trainers)
    for part in (
        "contract: got 0, expected 1;",
        f"rooms.linear: got 'of other sources', expected '{engine.numerics()['rooms']['linear']}';",
        "options.kv_segment: got 64, expected None",
    ):
        assert part in str(refusal.value)
    assert str(refusal.value).count(": got ") == 3, "what is equal is not in it"
    for wrong in ({}, {"numerics": None}, {"numerics": "the same"}):
        with pytest.raises(TypeError, match=r'numerics=vexact_ops.numerics\("cpu"\), called in its process'):
            engine.update_weights(given, **wrong)
    assert engine.weight_version == version
    assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected


def test_an_update_that_breaks_off_is_not_computed_with(monkeypatch):
    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
        good = build("Llama").state_dict()

        def broken(plan):
            raise RuntimeError("the sender is gone")

        with monkeypatch.context() as patch:
            patch.setattr(worker_module, "apply_update", broken)
            with pytest.raises(RuntimeError, match="the sender is gone"):
                engine.update_weights(good, numerics=vx.numerics("cpu"))
        with pytest.raises(RuntimeError, match="broke off in the middle"):
            engine.generate(PROMPTS, PARAMS)
        assert engine.update_weights(good, numerics=vx.numerics("cpu")) == 1
        assert [bits(c) for c in engine.generate(PROMPTS, PARAMS)] == expected
        check_idle(engine)


# asyncio


def test_many_at_once(engine):
    expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]

    async def main():
        calls = [engine.agenerate([prompt], PARAMS) for prompt in PROMPTS]
        return [done for (done,) in await asyncio.gather(*calls)] + await engine.agenerate([[]], PARAMS)

    *done, bad = asyncio.run(main())
    assert [bits(c) for c in done] == expected
    assert bad.finish_reason == "error"


def test_a_thread_and_a_loop_at_once(engine):
    expected = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]

    async def main():
        plain = asyncio.to_thread(engine.generate, PROMPTS, PARAMS)
        return await asyncio.gather(plain, engine.agenerate(PROMPTS, PARAMS))

    for done in asyncio.run(main()):
        assert [bits(c) for c in done] == expected


async def collect(engine, prompt, params, **options):
    return [increment async for increment in engine.stream(prompt, params, **options)]


def test_a_stream_is_the_completion_in_pieces(talking):
    params = replace(PARAMS, max_new_tokens=50, n=2)
    expected = talking.generate(["é"], params)
    params, expected = replace(params, num_top_logprobs=3), talking.generate(["é"], replace(params, num_top_logprobs=3))
    for stop in ((), (expected[0].text[10:13], "\u1234")):
        news = asyncio.run(collect(talking, "é", replace(params, stop=stop), request_id="s"))
        for index in range(2):
            mine = [i for i in news if i.index == index]
            last = mine[-1].completion
            assert mine[-1].finish_reason == last.finish_reason and all(i.completion is None for i in mine[:-1])
            assert "".join(i.text for i in mine) == last.text
            assert [x for i in mine for x in i.token_ids] == last.token_ids
            assert [x for i in mine for x in i.logprobs] == last.logprobs
            assert [x for i in mine for x in i.raw_logprobs] == last.raw_logprobs
            assert [x for i in mine for x in i.top_logprobs] == last.top_logprobs
            assert len(mine) == len(last.token_ids) and {i.request_id for i in mine} == {"s"}
            if not stop:
                assert bits(last) == bits(expected[index])
                assert sum(bool(i.text) for i in mine) > 10
        if stop:
            assert news[-1].completion is not None and all(stop[0] not in i.text for i in news)
    check_idle(talking)


def test_a_stream_of_a_bad_request(engine):
    (only,) = asyncio.run(collect(engine, [VOCAB], PARAMS))
    assert only.finish_reason == "error" and "expected ids below" in only.completion.error
    (only,) = asyncio.run(collect(engine, [], PARAMS))
    assert only.finish_reason == "error" and "empty" in only.completion.error


def test_leaving_a_stream_aborts_it(engine):
    async def main():
        seen = []
        stream = engine.stream(PROMPTS[0], replace(PARAMS, max_new_tokens=200))
        async for increment in stream:
            seen += increment.token_ids
            if len(seen) == 3:
                break
        await stream.aclose()
        return seen

    seen = asyncio.run(main())
    assert seen == engine.generate([PROMPTS[0]], PARAMS)[0].token_ids[:3]
    check_idle(engine)


def test_cancelling_aborts(engine):
    async def main(reached):
        stream = engine.stream(PROMPTS[0], replace(PARAMS, max_new_tokens=200))
        task = asyncio.create_task(engine.agenerate(PROMPTS, replace(PARAMS, max_new_tokens=200)))
        await anext(stream)  # by now the task's requests are in
        assert await asyncio.to_thread(reached.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await stream.aclose()

    with held(engine, 30) as (reached, _):
        asyncio.run(main(reached))
    check_idle(engine)


def test_an_abort_from_elsewhere_ends_a_stream(engine):
    async def main():
        news = []
        async for increment in engine.stream(PROMPTS[0], replace(PARAMS, max_new_tokens=200), request_id="x"):
            news.append(increment)
            if len(news) == 2:
                engine.abort("x")
        return news

    with held(engine, 12):
        last = asyncio.run(main())[-1].completion
    assert last.finish_reason == "abort" and 2 <= len(last.token_ids) < 200


def test_a_failure_reaches_those_who_wait(engine, monkeypatch):
    async def main():
        on_step(engine, monkeypatch, 2, out_of_memory)
        waiting = engine.agenerate(PROMPTS, PARAMS), collect(engine, PROMPTS[0], PARAMS)
        failed = await asyncio.gather(*waiting, return_exceptions=True)
        monkeypatch.undo()
        return failed, await engine.agenerate(PROMPTS, PARAMS)

    failed, done = asyncio.run(main())
    assert [str(error) for error in failed] == ["a step failed: RuntimeError: out of memory"] * 2
    assert all(isinstance(error, StepFailed) and str(error.__cause__) == "out of memory" for error in failed)
    assert [bits(c) for c in done] == [bits(c) for c in engine.generate(PROMPTS, PARAMS)]


def test_new_weights_in_the_middle_of_a_stream():
    """Tokens before are drawn with the old weights, those after with the new ones, and each says with which."""
    other = build("Llama", seed=1).state_dict()
    params = replace(PARAMS, max_new_tokens=40, prompt_logprobs=True, num_prompt_top_logprobs=2)

    async def main(engine, reached):
        news = []
        async for increment in engine.stream(PROMPTS[0], params):
            news.append(increment)
            if len(news) == 3 and await asyncio.to_thread(reached.wait, 60):
                await asyncio.to_thread(engine.update_weights, other, numerics=vx.numerics("cpu"))
        return news[-1].completion

    with Engine.from_pretrained(build("Llama"), config=CONFIG) as engine:
        old = engine.generate([PROMPTS[0]], params)[0]
        with held(engine, 12) as (reached, _):
            mixed = asyncio.run(main(engine, reached))
        known = mixed.weight_versions.index(1)
        assert mixed.weight_versions == [0] * known + [1] * (40 - known) and 3 <= known < 40
        assert mixed.token_ids[:known] == old.token_ids[:known] and mixed.logprobs[:known] == old.logprobs[:known]
        assert mixed.prompt_logprobs == old.prompt_logprobs and mixed.prompt_top_logprobs == old.prompt_top_logprobs
        # A draw is a function of seed and position: the rest is what the new weights say to the same text.
        text = PROMPTS[0] + mixed.token_ids[:known]
        rest = engine.generate([text], replace(params, max_new_tokens=40 - known))[0]
        assert (rest.token_ids, rest.logprobs) == (mixed.token_ids[known:], mixed.logprobs[known:])
        check_idle(engine)


# The end


def test_close_ends_everything():
    model = build("Llama")
    stock = model(torch.tensor([PROMPTS[0]])).logits
    engine = Engine.from_pretrained(model, config=CONFIG)

    async def main(reached):
        waiting = asyncio.create_task(engine.agenerate(PROMPTS, replace(PARAMS, max_new_tokens=200)))
        stream = engine.stream(PROMPTS[0], replace(PARAMS, max_new_tokens=200))
        await anext(stream)
        assert await asyncio.to_thread(reached.wait, 60)
        await asyncio.to_thread(engine.close)
        return await waiting

    with held(engine, 30) as (reached, _):
        done = asyncio.run(main(reached))
    assert {c.finish_reason for c in done} == {"abort"}
    assert not engine._loop._thread.is_alive()
    engine.close()
    for call in (
        lambda: engine.generate(PROMPTS),
        lambda: engine.generate([]),
        lambda: asyncio.run(engine.agenerate(PROMPTS)),
        lambda: engine.update_weights(model.state_dict(), numerics=vx.numerics("cpu")),
    ):
        with pytest.raises(RuntimeError, match="Engine: it is closed"):
            call()
    assert torch.equal(model(torch.tensor([PROMPTS[0]])).logits, stock)  # the caller's model is stock again


# Around it


def test_a_path_works_as_a_model_does(tmp_path, talking):
    build("Llama", **TEXT).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG) as engine:
        assert engine.dtype == torch.bfloat16 and engine.path == "fused"
        assert bits(engine.generate("abc", PARAMS)[0]) == bits(talking.generate("abc", PARAMS)[0])
