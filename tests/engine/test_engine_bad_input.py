"""What no caller can mean is refused by name, and what clients of a server do or leave undone is no matter for others:
the engine is as it was."""

import asyncio
import json
import re
import socket
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import serving
import torch
from engine_models import bits, check_idle, held, until

from vexact_engine import SamplingParams
from vexact_engine.serve import generation

PARAMS = SamplingParams(max_new_tokens=3, seed=1)


@pytest.fixture(scope="module")
def engine():
    with serving.engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def expected(engine):
    return bits(engine.generate(["hello"], PARAMS)[0])


@pytest.fixture(autouse=True)
def as_it_was(engine, expected):
    yield
    assert bits(engine.generate(["hello"], PARAMS)[0]) == expected and engine.weight_version == 0
    check_idle(engine)


@pytest.mark.parametrize("messages", [5, None, "hi", b"hi", {"role": "user"}, {1}, np.float64(2)], ids=repr)
def test_conversations(engine, messages):
    got = f'chat: messages: got a {type(messages).__name__}, expected {{"role": ..., "content": ...}} in a list'
    with pytest.raises(TypeError, match=re.escape(got)):
        engine.chat(messages)
    got = f"chat: messages: got a {type(messages).__name__}"
    if not isinstance(messages, dict):
        with pytest.raises(TypeError, match=re.escape(got)):
            engine.chat([messages])
    with pytest.raises(TypeError, match=re.escape("chat: messages: got a int among them")):
        engine.chat([{"role": "user", "content": "hi"}, 5])
    with pytest.raises(ValueError, match="chat: messages: got none"):
        engine.chat([])


@pytest.mark.parametrize("name", ["truncation", "max_length", "tokenize"])
def test_options_of_the_tokenizer_are_none_of_a_template(engine, name):
    """transformers passes over them where the template's text is asked for, not its ids."""
    with pytest.raises(TypeError, match=f"chat: {name}: it is set here"):
        engine.chat([{"role": "user", "content": "hi"}], **{name: 2})


@pytest.mark.parametrize("option", [{"tools": [{"type": "function"}]}, {"enable_thinkin": True}], ids=str)
def test_what_a_template_has_no_word_of_is_not_left_out(engine, option):
    with pytest.raises(ValueError, match=f"chat: {next(iter(option))}: the model's chat template has no word of it"):
        engine.chat([{"role": "user", "content": "hi"}], **option)
    (answer,) = engine.chat([{"role": "user", "content": "hi"}], PARAMS, enable_thinking=False, tools=None)
    assert answer.finish_reason == "length"


def test_half_a_character_is_no_text(engine):
    bad, good = engine.generate(["a\ud83d", "hello"], PARAMS)
    assert (
        bad.error == r"prompt: '\ud83d' at 1 is half a character, expected Unicode" and good.finish_reason == "length"
    )
    with pytest.raises(ValueError, match=r"chat: messages: '\\ud83d' at \d+ is half a character"):
        engine.chat([{"role": "user", "content": "a\ud83d"}])


@pytest.mark.parametrize(
    "specs", [True, 0, "x", [], [("x", 1)], object()], ids=["True", "0", "x", "[]", "pairs", "object"]
)
def test_specs(engine, specs):
    got = f"update_weights: specs: got a {type(specs).__name__}, expected a mapping of names to (shape, dtype)"
    with pytest.raises(TypeError, match=re.escape(got)):
        engine.update_weights({}, specs=specs, numerics=engine.numerics())
    with pytest.raises(TypeError, match="specs: got a int for the name of a tensor"):
        engine.update_weights({}, specs={5: ((1,), torch.float32)}, numerics=engine.numerics())


@pytest.mark.parametrize("name", [None, 5, [], b"lm_head.weight"], ids=repr)
def test_names_of_tensors(engine, name):
    got = f"update_weights: named_tensors: got a {type(name).__name__} for the name of a tensor"
    with pytest.raises(TypeError, match=got):
        engine.update_weights([(name, torch.ones(1))], numerics=engine.numerics())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_takes_nothing_of_its_answer_does_not_keep_its_place(engine, stream, caplog):
    """It is there, and reads nothing: sockets' buffers hold some of an answer, and the rest waits."""
    body = {"prompt": "hi", "max_tokens": 100, "n": 8, "ignore_eos": True, "logprobs": 20, "stream": stream}
    body = json.dumps(body).encode()
    with serving.serve(engine, send_timeout=0.5) as server, serving.client(server) as http:
        server._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # of connections from now on
        host, port = server.url.removeprefix("http://").split(":")
        with socket.socket() as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            raw.connect((host, int(port)))
            head = ["POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json"]
            raw.sendall("\r\n".join([*head, f"content-length: {len(body)}", "", ""]).encode() + body)
            lost = 'vexact_requests_total{endpoint="completions",outcome="disconnected"}'
            until(lambda: serving.metric(http, lost) == 1, 300)
            assert serving.metric(http, "vexact_requests_in_progress") == 0
            assert "its client takes nothing of its answer for 0.5 s" in caplog.text
        assert http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1}).status_code == 200


def test_a_slow_client_has_its_time_for_each_part_of_a_long_answer():
    sent = []

    async def send(message):
        sent.append(message["body"])

    whole = bytes(range(256)) * 1000
    asyncio.run(generation._send_all(send, [b"first", whole]))
    assert sent[0] == b"first" and b"".join(sent[1:]) == whole
    assert max(map(len, sent)) <= 64 << 10 and len(sent) == 5


def test_who_waits_for_a_pause_keeps_nobody_from_resuming(engine):
    """More of them than a pool of threads has; requests stand still, so that their end is not to be seen."""
    with (
        serving.serve(engine, api_keys=(serving.KEY,)) as server,
        serving.client(server, serving.KEY, limits=serving.httpx.Limits(max_connections=None)) as http,
        ThreadPoolExecutor(60) as pool,
    ):
        try:
            with held(engine, 3):
                body = {"prompt": "hi", "max_tokens": 20, "ignore_eos": True}
                running = pool.submit(http.post, "/v1/completions", json=body)
                until(lambda: engine.load().running)
                assert http.post("/pause", json={"mode": "keep"}).json()["state"] == "paused"
            begun, pause, resume = [], engine.pause, engine.resume
            with pytest.MonkeyPatch.context() as patch, held(engine, 1, asked=False) as (reached, _):
                patch.setattr(engine, "pause", lambda mode: (begun.append(mode), pause(mode)))
                patch.setattr(engine, "resume", lambda: (begun.append("resume"), resume()))
                waiting = [pool.submit(http.post, "/pause", json={"mode": "wait"}) for _ in range(50)]
                until(lambda: len(begun) == 50)
                assert reached.wait(120)  # a step that is under way until the block ends: none of them is through
                assert not running.done() and "vexact_requests_in_progress 1.0" in http.get("/metrics").text
                every = running, *waiting, pool.submit(http.post, "/resume", json={})
                until(lambda: begun[50:] == ["resume"])
                assert not any(one.done() for one in every)
            # each of those that waited may pause it anew
            until(lambda: http.post("/resume", json={}).is_success and all(one.done() for one in every), 300)
            assert {one.result(300).status_code for one in every} == {200}
        finally:
            engine.resume()
    until(lambda: engine.state == "running")
