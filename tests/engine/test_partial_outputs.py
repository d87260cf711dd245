"""A request that was begun elsewhere goes on: nothing of what comes is another bit, nothing comes twice."""

import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
from engine_models import bits, build, byte_tokenizer, check_idle, prompts
from hypothesis import given
from hypothesis import strategies as st

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.outputs import Submission
from vexact_engine.request import PartialOutput

pytest.importorskip("msgspec", reason="msgspec is not installed (extra engine)")
from vexact_engine.parallel.front import Front
from vexact_engine.parallel.jobs import Job

CONFIG = EngineConfig(num_pages=64, page_size=4, max_num_batched_tokens=16, show_progress=False)
PROMPT = prompts(1, longest=11)[0]
PARAMS = SamplingParams(max_new_tokens=24, n=3, seed=5, ignore_eos=True, num_top_logprobs=2)


@pytest.fixture(scope="module")
def engine():
    model = build("Llama", vocab_size=259)
    with Engine.from_pretrained(model, config=CONFIG, tokenizer=byte_tokenizer()) as engine:
        yield engine
        check_idle(engine)


@pytest.fixture(scope="module")
def whole(engine):
    return streamed(engine, PARAMS)


def streamed(engine, params, earlier=None):
    """All increments, in order, and the completions."""
    done, news = threading.Event(), []
    ticket = engine.submit(PROMPT, params, notify=done.set, listen=news.append, earlier=earlier)
    assert done.wait(60)
    return news, ticket.result()


def after(whole, counts):
    """What was handed on of each sample until it had so many tokens; None: all."""
    news, completions = whole
    earlier = []
    for sample, count in enumerate(counts):
        own = [i for i in news if i.index == sample]
        taken = own if count is None else [i for i in own[:count]]
        tokens = sum(len(i.token_ids) for i in taken)
        done = completions[sample]
        earlier.append(
            PartialOutput(
                done.token_ids[:tokens],
                done.logprobs[:tokens],
                done.raw_logprobs[:tokens],
                done.weight_versions[:tokens],
                done.top_logprobs[:tokens],
                sum(len(i.text) for i in taken),
                count is None,
            )
        )
    return earlier


@given(st.lists(st.one_of(st.none(), st.integers(0, 23)), min_size=3, max_size=3))
def test_what_comes_is_what_would_have_come(engine, whole, counts):
    earlier = after(whole, counts)
    if all(partial.done for partial in earlier):
        return
    news, completions = streamed(engine, PARAMS, earlier)
    for sample, partial in enumerate(earlier):
        own, expected = [i for i in news if i.index == sample], whole[1][sample]
        if partial.done:
            assert not own and completions[sample] is None
            continue
        assert bits(completions[sample]) == bits(expected)
        assert completions[sample].top_logprobs == expected.top_logprobs
        assert completions[sample].weight_versions == expected.weight_versions
        assert len(completions[sample].metrics.token_times) == 24
        assert partial.token_ids + [t for i in own for t in i.token_ids] == expected.token_ids
        assert expected.text[: partial.sent_text] + "".join(i.text for i in own) == expected.text
        assert partial.logprobs + [p for i in own for p in i.logprobs] == expected.logprobs


def test_what_the_prompt_scores_is_of_the_weights_that_drew_the_first_token(engine):
    """And so of no weights here, where others had it begun."""
    params = replace(PARAMS, n=1, prompt_logprobs=True, num_prompt_top_logprobs=1)
    whole = streamed(engine, params)
    (partial,) = after(whole, [5])
    partial.prompt_logprobs = [None, *(value - 1 for value in whole[1][0].prompt_logprobs[1:])]
    partial.prompt_top_logprobs = [None, *({7: -9.0} for _ in PROMPT[1:])]
    _, (done,) = streamed(engine, params, [partial])
    assert done.prompt_logprobs == partial.prompt_logprobs and bits(done) == bits(whole[1][0])
    assert done.prompt_top_logprobs == partial.prompt_top_logprobs


def test_a_stop_string_is_looked_for_across_the_break(engine, whole):
    text = whole[1][0].text
    stop = text[9:12]
    assert text.index(stop) == 9
    params = replace(PARAMS, stop=stop, n=1, num_top_logprobs=0)
    expected = streamed(engine, params)
    assert expected[1][0].finish_reason == "stop"
    for count in range(len(expected[0])):
        earlier = after(whole, [count, None, None])[:1]
        earlier[0].sent_text = sum(len(i.text) for i in expected[0][:count])
        _, (again,) = streamed(engine, params, earlier)
        assert bits(again) == bits(expected[1][0])


def test_a_refused_one_says_so_of_what_was_left_alone(engine, whole):
    earlier = after(whole, [None, 3, 4])
    engine.pause("wait")
    first = threading.Event()
    engine.submit(PROMPT, PARAMS, request_id="x", notify=first.set)
    done, news = threading.Event(), []
    ticket = engine.submit(PROMPT, PARAMS, request_id="x", notify=done.set, listen=news.append, earlier=earlier)
    assert done.wait(60)
    assert [i.index for i in news] == [1, 2] and ticket.result()[0] is None
    assert all("another request of this id" in c.error for c in ticket.result()[1:])
    engine.resume()
    assert first.wait(60)


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda earlier: earlier.append(PartialOutput()), "earlier: got 4, expected 3, one for each sample"),
        (lambda earlier: earlier[1].logprobs.pop(), "earlier[1].logprobs has 2, expected 3"),
        (lambda earlier: setattr(earlier[1], "top_logprobs", None), "earlier[1].top_logprobs has 0, expected 3"),
        (lambda earlier: setattr(earlier[2], "prompt_logprobs", [None]), "earlier[2].prompt_logprobs has 1, expected"),
        (lambda earlier: earlier[1].token_ids.__setitem__(1, 259), "earlier[1].token_ids has 259, expected ids below"),
        (lambda earlier: earlier[1].token_ids.__setitem__(1, -1), "earlier[1].token_ids has -1, expected ids below"),
        (lambda earlier: [setattr(one, "done", True) for one in earlier], "every sample is done"),
    ],
)
def test_what_does_not_belong_together_is_refused_and_nobody_else_is_hurt(engine, whole, change, said):
    earlier = after(whole, [None, 3, 4])
    change(earlier)
    done, news = threading.Event(), []
    found = engine.submit(PROMPT, PARAMS, notify=done.set, listen=news.append, earlier=earlier)
    if not isinstance(found, list):
        assert done.wait(60)
        found = found.result()[1:]
    assert found and all(said in c.error for c in found)
    assert [bits(c) for c in engine.generate([PROMPT], PARAMS)] == [bits(c) for c in whole[1]]


@pytest.mark.parametrize("count", [23, 24])
def test_one_that_has_all_its_tokens_does_not_go_on(engine, whole, count):
    """The engine's thread ended: there was nothing to compute, and a request was not done."""
    params = replace(PARAMS, max_new_tokens=23)
    earlier, done = after(whole, [count, 3, 4]), threading.Event()
    ticket = engine.submit(PROMPT, params, notify=done.set, earlier=earlier)
    assert done.wait(60)
    assert all(
        f"earlier[0].token_ids has {count} tokens, expected fewer than the 23" in c.error for c in ticket.result()
    )
    assert [bits(c) for c in engine.generate([PROMPT], PARAMS)] == [bits(c) for c in whole[1]]


def test_what_was_all_said_before_a_replica_died_is_not_begun_again():
    job, ended = Job([5], SamplingParams(n=2), "x", Submission(lambda: None), lambda news: None), []
    for partial in job.earlier:
        partial.done = True
    Front._place(SimpleNamespace(_end=ended.append), job)
    assert ended == [job]
