"""A request that was begun elsewhere goes on: nothing of what comes is another bit, nothing comes twice."""

import threading
from dataclasses import replace

import pytest
from engine_models import bits, build, byte_tokenizer, check_idle, prompts
from hypothesis import given
from hypothesis import strategies as st

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.request import PartialOutput

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
