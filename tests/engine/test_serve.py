"""The server gives what the engine gives: through the real `openai` client, whole and in streams, to the last bit."""

import asyncio
import contextlib
import json
import os
import random
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import serving
from engine_models import check_idle, until

from vexact_engine import Increment, SamplingParams
from vexact_engine.serve import Settings
from vexact_engine.serve.answers import Answers, Wanted
from vexact_engine.serve.app import make_app
from vexact_engine.serve.generation import merged

openai = pytest.importorskip("openai", reason="openai is not installed (extra test)")

TEXTS = ["hello", "a longer prompt, of some words", "é"]


@pytest.fixture(scope="module")
def engine():
    with serving.engine() as made:
        yield made
        check_idle(made)


@pytest.fixture(scope="module")
def server(engine):
    with serving.serve(engine) as made:
        yield made


@pytest.fixture(scope="module")
def ask(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def same(choice, done):
    """A choice with `rollout`, against the engine's own completion."""
    got = choice.rollout
    assert (got["token_ids"], got["logprobs"], got["raw_logprobs"]) == (
        done.token_ids,
        done.logprobs,
        done.raw_logprobs,
    )
    assert (got["seed"], got["weight_versions"]) == (done.seed, done.weight_versions)
    assert (choice.finish_reason, choice.weight_version) == (done.finish_reason, done.weight_version)
    assert choice.stop_reason == done.stop_reason


ROLLOUT = {"return_rollout": True}
PARAMETERS = [
    ({}, {}),
    ({"temperature": 0}, {"temperature": 0.0}),
    ({"temperature": 0.7, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.9}),
    ({"extra_body": {"top_k": 5, "min_p": 0.01}}, {"top_k": 5, "min_p": 0.01}),
    ({"extra_body": {"top_k": -1, "ignore_eos": True}}, {"ignore_eos": True}),
    ({"extra_body": {"stop_token_ids": list(range(60, 130)), "min_tokens": 4}}, {"stop_token_ids": range(60, 130)}),
    ({"stop": ["e", "t"]}, {"stop": ("e", "t")}),
    ({"n": 3}, {"n": 3}),
]


@pytest.mark.parametrize("asked, params", PARAMETERS, ids=lambda value: " ".join(value) or "defaults")
def test_completions_are_the_engine_s(engine, ask, asked, params):
    least = asked.get("extra_body", {}).get("min_tokens", 0)
    params = SamplingParams(**params, seed=7, max_new_tokens=24, min_new_tokens=least)
    expected = engine.generate(TEXTS, params)
    body = {**asked, "extra_body": {**asked.get("extra_body", {}), **ROLLOUT}}
    got = ask.completions.create(model="tiny", prompt=TEXTS, max_tokens=24, seed=7, **body)
    assert [choice.index for choice in got.choices] == list(range(len(expected)))
    for choice, done in zip(got.choices, expected):
        assert choice.text == done.text
        same(choice, done)
    generated = sum(len(done.token_ids) for done in expected)
    prompt = sum(len(engine.tokenizer(text).input_ids) for text in TEXTS)
    assert (got.usage.prompt_tokens, got.usage.completion_tokens) == (prompt, generated)
    assert got.usage.total_tokens == prompt + generated and got.object == "text_completion"


def test_defaults_are_those_of_openai(engine, ask):
    got = ask.completions.create(model="tiny", prompt="x", extra_body={**ROLLOUT, "ignore_eos": True})
    (choice,) = got.choices
    assert len(choice.rollout["token_ids"]) == 16 and choice.logprobs is None
    again = engine.generate("x", SamplingParams(max_new_tokens=16, seed=choice.rollout["seed"], ignore_eos=True))[0]
    assert (
        again.token_ids == choice.rollout["token_ids"] and choice.rollout["logprobs"] == choice.rollout["raw_logprobs"]
    )
    chat = ask.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "x"}], extra_body={"ignore_eos": True}
    )
    assert chat.usage.total_tokens == 200 and chat.choices[0].finish_reason == "length", "as many as there is room for"


def test_token_ids_are_a_prompt_and_are_told(engine, ask):
    ids = engine.tokenizer("hello").input_ids
    for prompt in (ids, [ids]):
        (choice,) = ask.completions.create(
            model="tiny", prompt=prompt, seed=1, extra_body={"return_token_ids": True}
        ).choices
        done = engine.generate("hello", SamplingParams(max_new_tokens=16, seed=1))[0]
        assert (choice.token_ids, choice.prompt_token_ids, choice.text) == (done.token_ids, ids, done.text)


def test_negative_seeds_are_the_same_64_bits(engine, ask):
    (choice,) = ask.completions.create(model="tiny", prompt="a", seed=-1, extra_body=ROLLOUT).choices
    same(choice, engine.generate("a", SamplingParams(max_new_tokens=16, seed=2**64 - 1))[0])


CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]},
    {"role": "assistant", "content": "yes?", "refusal": None, "tool_calls": None},
    {"role": "user", "content": "go on", "name": "ann"},
]
TEMPLATED = "[system:be brief][user:hello\nthere][assistant:yes?][user:go on]>"


def test_a_chat_goes_through_the_tokenizer_s_template(engine, ask):
    params = SamplingParams(max_new_tokens=20, seed=3, n=2)
    expected = engine.generate([engine.tokenizer(TEMPLATED).input_ids], params)
    got = ask.chat.completions.create(
        model="tiny", messages=CHAT, max_completion_tokens=20, seed=3, n=2, extra_body=ROLLOUT
    )
    assert got.object == "chat.completion" and got.system_fingerprint.startswith("fp_")
    for choice, done in zip(got.choices, expected, strict=True):
        assert (choice.message.role, choice.message.content) == ("assistant", done.text)
        same(choice, done)
    developer = [{**CHAT[0], "role": "developer"}, *CHAT[1:]]
    again = ask.chat.completions.create(model="tiny", messages=developer, max_tokens=20, seed=3, n=2)
    assert [c.message.content for c in again.choices] == [c.message.content for c in got.choices], "as system"


def test_a_chat_may_continue_its_last_message(engine, ask):
    options = {"continue_final_message": True, **ROLLOUT}
    got = ask.chat.completions.create(model="tiny", messages=CHAT[:3], max_tokens=5, seed=3, extra_body=options)
    ids = engine.tokenizer(TEMPLATED[: TEMPLATED.index("yes?") + 4]).input_ids
    same(got.choices[0], engine.generate([ids], SamplingParams(max_new_tokens=5, seed=3))[0])
    options = {"add_generation_prompt": False, **ROLLOUT}
    got = ask.chat.completions.create(model="tiny", messages=CHAT, max_tokens=5, seed=3, extra_body=options)
    ids = engine.tokenizer(TEMPLATED[:-1]).input_ids
    same(got.choices[0], engine.generate([ids], SamplingParams(max_new_tokens=5, seed=3))[0])


def test_a_stream_of_text_is_the_completion_in_pieces(engine, ask):
    params = SamplingParams(max_new_tokens=24, seed=5, n=2, stop=("q",))
    expected = engine.generate(TEXTS, params)
    options = {"include_usage": True}
    stream = ask.completions.create(
        model="tiny", prompt=TEXTS, max_tokens=24, seed=5, n=2, stop="q", stream=True, logprobs=2,
        stream_options=options, extra_body=ROLLOUT,
    )  # fmt: skip
    pieces = list(stream)
    whole = ask.completions.create(
        model="tiny", prompt=TEXTS, max_tokens=24, seed=5, n=2, stop="q", logprobs=2, extra_body=ROLLOUT
    )
    assert len({piece.id for piece in pieces}) == 1 and all(p.usage is None for p in pieces[:-1])
    assert pieces[-1].choices == [] and pieces[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert pieces[-1].usage.prompt_tokens == whole.usage.prompt_tokens
    for index, done in enumerate(expected):
        mine = [piece.choices[0] for piece in pieces[:-1] if piece.choices[0].index == index]
        assert "".join(choice.text for choice in mine) == done.text == whole.choices[index].text
        assert [c.finish_reason for c in mine] == [None] * (len(mine) - 1) + [done.finish_reason]
        for name in ("token_ids", "logprobs", "raw_logprobs"):
            assert [x for c in mine for x in c.rollout[name]] == getattr(done, name)
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [x for c in mine for x in getattr(c.logprobs, name)] == getattr(whole.choices[index].logprobs, name)
        assert mine[-1].rollout["seed"] == 5 and mine[-1].weight_version == 0


def test_a_stream_of_a_chat_is_its_answer_in_pieces(engine, ask):
    options = dict(model="tiny", messages=CHAT, max_tokens=30, seed=5, n=2, logprobs=True, top_logprobs=3)
    whole = ask.chat.completions.create(**options)
    pieces = list(ask.chat.completions.create(**options, stream=True))
    assert all(piece.usage is None and piece.object == "chat.completion.chunk" for piece in pieces)
    for index in range(2):
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == index]
        assert mine[0].delta.role == "assistant" and all(c.delta.role is None for c in mine[1:])
        assert "".join(c.delta.content or "" for c in mine) == whole.choices[index].message.content
        told = [token for c in mine if c.logprobs for token in c.logprobs.content]
        assert told == whole.choices[index].logprobs.content
        assert mine[-1].finish_reason == whole.choices[index].finish_reason


def test_log_probabilities_in_both_forms(engine, ask):
    params = SamplingParams(max_new_tokens=12, seed=2, temperature=0.5, num_top_logprobs=4)
    done = engine.generate("hello", params)[0]
    options = dict(model="tiny", max_tokens=12, seed=2, temperature=0.5)
    told = ask.completions.create(prompt="hello", logprobs=4, **options).choices[0].logprobs
    assert told.token_logprobs == done.raw_logprobs != done.logprobs, "at temperature 1, as OpenAI's"
    for at, (token, top) in enumerate(zip(done.token_ids, done.top_logprobs)):
        assert sorted(told.top_logprobs[at].values())[-4:] == sorted(top.values())
        assert told.top_logprobs[at][told.tokens[at]] == done.raw_logprobs[at], "the drawn one is there"
        assert len(told.top_logprobs[at]) == 4 + (token not in top)
    bare = ask.completions.create(prompt="hello", logprobs=0, **options).choices[0].logprobs
    assert bare.tokens == told.tokens and bare.top_logprobs is None
    ids = (
        ask.completions.create(prompt="hello", logprobs=1, extra_body={"return_tokens_as_token_ids": True}, **options)
        .choices[0]
        .logprobs
    )
    assert ids.tokens == [f"token_id:{token}" for token in done.token_ids]

    prompt = engine.tokenizer("[user:hello]>").input_ids
    done = engine.generate([prompt], params)[0]
    messages = [{"role": "user", "content": "hello"}]
    content = ask.chat.completions.create(messages=messages, logprobs=True, top_logprobs=4, **options)
    content = content.choices[0].logprobs.content
    assert [token.logprob for token in content] == done.raw_logprobs
    for token, top in zip(content, done.top_logprobs):
        assert [one.logprob for one in token.top_logprobs] == list(top.values())
    raw = b"".join(bytes(token.bytes) for token, id in zip(content, done.token_ids) if id > 2)
    assert raw.decode(errors="replace") == done.text, "a token that is no whole character has its bytes"
    plain = ask.chat.completions.create(messages=messages, logprobs=True, **options).choices[0].logprobs.content
    assert all(token.top_logprobs == [] for token in plain)


def test_echo_begins_with_the_prompt(engine, ask):
    ids = engine.tokenizer("from ids").input_ids
    for prompt, text in (("hello", "hello"), (ids, "from ids")):
        whole = ask.completions.create(model="tiny", prompt=prompt, seed=1, echo=True).choices[0].text
        done = engine.generate([ids] if prompt is ids else [prompt], SamplingParams(max_new_tokens=16, seed=1))[0]
        assert whole == text + done.text
        pieces = ask.completions.create(model="tiny", prompt=prompt, seed=1, echo=True, stream=True)
        assert "".join(piece.choices[0].text for piece in pieces) == whole


def test_models(ask):
    (model,) = ask.models.list().data
    assert (model.id, model.max_model_len, model.weight_version) == ("tiny", 200, 0)
    assert ask.models.retrieve("tiny") == model
    with pytest.raises(openai.NotFoundError, match="got 'gpt-4', expected tiny"):
        ask.models.retrieve("gpt-4")
    with pytest.raises(openai.NotFoundError, match="got 'gpt-4', expected tiny"):
        ask.completions.create(model="gpt-4", prompt="x")


def test_cached_tokens_are_told(ask):
    prompt = "".join(random.Random(1).choices("abcdef ", k=60))
    for cached in (0, 56):
        usage = ask.completions.create(model="tiny", prompt=prompt, n=2, max_tokens=1).usage
        assert (usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens) == (60, cached)


def test_fifty_streams_at_once_are_the_engine_s_to_the_last_bit(engine, server):
    rng = random.Random(0)
    texts = ["".join(rng.choices("abcdefgh ", k=rng.randint(1, 60))) for _ in range(50)]
    each = [
        SamplingParams(max_new_tokens=rng.randint(1, 30), seed=seed, temperature=rng.choice([0.0, 0.6, 1.0, 1.3]))
        for seed in range(50)
    ]
    expected = engine.generate(texts, each)

    async def one(ask, text, params):
        tokens, logprobs, raw, said, reason = [], [], [], "", None
        stream = await ask.completions.create(
            model="tiny", prompt=text, max_tokens=params.max_new_tokens, seed=params.seed,
            temperature=params.temperature, stream=True, extra_body=ROLLOUT,
        )  # fmt: skip
        async for piece in stream:
            choice = piece.choices[0]
            said += choice.text
            tokens += choice.rollout["token_ids"]
            logprobs += choice.rollout["logprobs"]
            raw += choice.rollout["raw_logprobs"]
            reason = choice.finish_reason
        return tokens, logprobs, raw, said, reason

    async def main():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as ask:
            return await asyncio.gather(*(one(ask, *pair) for pair in zip(texts, each)))

    got = asyncio.run(main())
    assert got == [(c.token_ids, c.logprobs, c.raw_logprobs, c.text, c.finish_reason) for c in expected]


def test_log_probabilities_of_the_prompt(engine, ask):
    params = SamplingParams(max_new_tokens=6, seed=1, prompt_logprobs=True, n=2, ignore_eos=True)
    texts = ["hello there", "é!"]
    expected = engine.generate(texts, params)
    options = dict(model="tiny", prompt=texts, max_tokens=6, seed=1, n=2, echo=True, logprobs=0)
    options["extra_body"] = {"ignore_eos": True}
    pieces = list(ask.completions.create(**options, stream=True))
    for choice, done in zip(ask.completions.create(**options).choices, expected, strict=True):
        told = choice.logprobs
        assert told.token_logprobs == done.prompt_logprobs + done.raw_logprobs
        assert told.token_logprobs[0] is None and told.text_offset[0] == 0 and told.top_logprobs is None
        assert len(told.tokens) == len(told.text_offset) == len(done.prompt_ids) + 6
        assert told.text_offset[len(done.prompt_ids)] == len(texts[choice.index // 2])
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        assert "".join(one.text for one in mine) == choice.text
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert [x for one in mine if one.logprobs for x in getattr(one.logprobs, name)] == getattr(told, name)

    options |= {"max_tokens": 0, "n": 1}
    alone = ask.completions.create(**options)
    pieces = list(ask.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert alone.usage.completion_tokens == pieces[-1].usage.completion_tokens == 0
    for at, choice in enumerate(alone.choices):
        assert (choice.text, choice.finish_reason) == (texts[at], "length")
        assert choice.logprobs.token_logprobs == expected[2 * at].prompt_logprobs
        (mine,) = (piece.choices[0] for piece in pieces[:-1] if piece.choices[0].index == at)
        assert (mine.text, mine.logprobs, mine.finish_reason) == (choice.text, choice.logprobs, "length")


def test_a_drawn_token_has_its_own_number_among_the_likeliest_of_its_text():
    """Of two tokens of one text, a letter and its byte say, the mapping of texts has room for one."""
    tokens = SimpleNamespace(token=lambda token: ("o" if token in (5, 7) else str(token), None))
    answers = Answers(False, "", "", "", [], 1, Wanted(top=2), tokens)
    for top in ({5: -0.5, 6: -1.0}, {5: -0.5, 7: -2.0}):
        told = answers._of_text([7, 6], [-2.0, -1.0], [top, top], [0, 1])
        assert [top[name] for name, top in zip(told["tokens"], told["top_logprobs"])] == told["token_logprobs"]
        assert told["top_logprobs"][1]["o"] == -0.5


def test_the_likeliest_tokens_of_the_prompt(engine, ask):
    """In both forms at once, each as many as it asks for; the prompt's own token is always there."""
    params = SamplingParams(max_new_tokens=2, seed=1, ignore_eos=True, prompt_logprobs=True, num_prompt_top_logprobs=3)
    (done,) = engine.generate(["hello"], replace(params, num_top_logprobs=3))
    options = dict(model="tiny", prompt="hello", max_tokens=2, seed=1, echo=True, logprobs=3)
    options["extra_body"] = {"ignore_eos": True, "prompt_logprobs": 1, "return_tokens_as_token_ids": True}
    (choice,) = ask.completions.create(**options).choices
    assert choice.prompt_logprobs[0] is None and choice.logprobs.top_logprobs[0] is None
    for at in range(1, 5):
        own, top = done.prompt_ids[at], done.prompt_top_logprobs[at]
        first = next(iter(top))
        told = {int(token): one["logprob"] for token, one in choice.prompt_logprobs[at].items()}
        assert told == {own: done.prompt_logprobs[at], first: top[first]} and next(iter(told)) == own
        named = {f"token_id:{token}": value for token, value in (top | {own: done.prompt_logprobs[at]}).items()}
        assert choice.logprobs.top_logprobs[at] == named
    assert len(choice.logprobs.top_logprobs) == 5 + 2
    pieces = [piece.choices[0] for piece in ask.completions.create(**options, stream=True)]
    assert pieces[0].prompt_logprobs == choice.prompt_logprobs
    told = [top for one in pieces if one.logprobs for top in one.logprobs.top_logprobs]
    assert told == choice.logprobs.top_logprobs


@pytest.mark.parametrize("asked", [True, 0])
def test_prompt_logprobs_as_vllm_has_them(engine, ask, asked):
    options = dict(model="tiny", max_tokens=3, seed=1, extra_body={"prompt_logprobs": asked})
    (choice,) = ask.completions.create(prompt="hello", **options).choices
    done = engine.generate("hello", SamplingParams(max_new_tokens=3, seed=1, prompt_logprobs=True))[0]
    assert [one and one[str(id)]["logprob"] for one, id in zip(choice.prompt_logprobs, done.prompt_ids)] == (
        done.prompt_logprobs
    )
    assert [one[str(id)]["decoded_token"] for one, id in zip(choice.prompt_logprobs[1:], done.prompt_ids[1:])] == (
        list("ello")
    )
    first = next(iter(ask.completions.create(prompt="hello", stream=True, **options))).choices[0]
    assert first.prompt_logprobs == choice.prompt_logprobs
    messages = [{"role": "user", "content": "hello"}]
    chat = ask.chat.completions.create(messages=messages, **options)
    ids = engine.tokenizer("[user:hello]>").input_ids
    done = engine.generate([ids], SamplingParams(max_new_tokens=3, seed=1, prompt_logprobs=True))[0]
    assert [one and one[str(id)]["logprob"] for one, id in zip(chat.prompt_logprobs, ids)] == done.prompt_logprobs


def test_what_has_come_meanwhile_is_sent_as_one_piece():
    """A slow reader gets fewer and longer pieces, with every token in them, in order."""

    def increment(at):
        return Increment("r", 0, [at], [-at / 7], [-at / 3], chr(97 + at), top_logprobs=[{at: -1.0}])

    async def stream(ready):
        for at in range(20):
            if at in (1, 9):
                await ready.wait()
                ready.clear()
            yield increment(at)

    async def main():
        ready, got = [asyncio.Event() for _ in range(2)], []
        news = merged([stream(ready[0]), stream(ready[1])])
        async for number, item in news:
            got.append((number, item))
            if len(item.token_ids) + sum(len(i.token_ids) for n, i in got[:-1] if n == number) < 20:
                ready[number].set()
        return got

    got = asyncio.run(main())
    for number in range(2):
        mine = [item for n, item in got if n == number]
        assert [len(item.token_ids) for item in mine] == [1, 8, 11]
        assert [x for item in mine for x in item.token_ids] == list(range(20))
        assert [x for item in mine for x in item.logprobs] == [-at / 7 for at in range(20)]
        assert [x for item in mine for x in item.top_logprobs] == [{at: -1.0} for at in range(20)]
        assert "".join(item.text for item in mine) == "abcdefghijklmnopqrst"


def test_a_client_that_leaves_in_the_middle_of_its_body_is_no_error(server, caplog):
    name = 'vexact_requests_total{endpoint="chat",outcome="disconnected"}'
    with serving.client(server) as http:
        before = serving.metric(http, name)
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            head = ["POST /v1/chat/completions HTTP/1.1", "host: localhost", "content-type: application/json"]
            raw.sendall("\r\n".join([*head, "content-length: 99", "", "{"]).encode())
            until(lambda: serving.metric(http, "vexact_requests_in_progress"))
        until(lambda: serving.metric(http, name) != before)
        assert serving.metric(http, name) == before + 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


ENDS = [
    ("completions", {"prompt": "a", "max_tokens": 3}, 200, "ok"),
    ("completions", {"prompt": "a", "max_tokens": 3, "stream": True}, 200, "ok"),
    ("chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 3}, 200, "ok"),
    ("completions", {"prompt": "a", "max_tokens": -1}, 400, "bad_request"),
    ("completions", {"prompt": "a", "logit_bias": {"5": 1}}, 400, "bad_request"),
]


@pytest.mark.parametrize("path, body, status, outcome", ENDS)
def test_a_place_is_free_and_an_answer_counted_before_its_end_is_seen(engine, path, body, status, outcome):
    """As long as an answer has not ended, its client waits; from then on the next of a client's requests may come."""
    app = make_app(engine, Settings(max_requests=1))
    service = app.state.service
    raw, seen, left = json.dumps(body).encode(), [], asyncio.Event()
    headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": f"/v1/{path}", "raw_path": f"/v1/{path}".encode(), "root_path": "", "query_string": b"",
        "headers": headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 80), "state": {},
    }  # fmt: skip
    bodies = [{"type": "http.request", "body": raw, "more_body": False}]

    async def receive():
        if bodies:
            return bodies.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        ends = message["type"] == "http.response.body" and not message.get("more_body", False)
        endpoint = "chat" if path.startswith("chat") else "completions"
        counted = service.metrics.requests.labels(endpoint, outcome)._value.get()
        seen.append((message, ends, len(service.active), counted))

    asyncio.run(app(scope, receive, send))
    service.close()
    assert seen[0][0]["status"] == status
    assert [ends for _, ends, *_ in seen] == [False] * (len(seen) - 1) + [True]
    assert all(active == 1 and not counted for _, _, active, counted in seen[:-1])
    assert seen[-1][2:] == (0, 1) and not seen[-1][0]["body"]


def test_an_answer_does_not_wait_for_the_client_s_word_on_its_first_part(server):
    """Each is more than one write, a stream's tokens are many: with Nagle's algorithm they came after up to 40 ms."""
    port = int(server.url.rpartition(":")[2])
    with serving.client(server) as http:
        assert http.get("/health").status_code == 200  # and the connection is kept

        def connections():
            for path in Path("/proc/self/fd").iterdir():
                with contextlib.suppress(OSError):  # closed by now
                    if not os.readlink(path).startswith("socket:"):
                        continue
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(path.name))) as found:
                    if found.family == socket.AF_INET and found.getsockname()[1] == port and found.getpeername():
                        yield bool(found.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))

        found = list(connections())
        assert found and all(found)
