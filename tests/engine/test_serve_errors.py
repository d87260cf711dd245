"""What is wrong over HTTP: a status, OpenAI's form of an error, the name of the field, never a trace of the inside; and
limits, keys, clients that leave, a server that ends."""

import asyncio
import json
import socket
import threading
import time

import pytest
import serving
from engine_models import check_idle, held
from serving import KEY, httpx

from vexact_engine import SamplingParams
from vexact_engine.serve import Settings
from vexact_engine.serve import app as app_module

TEXT, CHAT, JSON = "/v1/completions", "/v1/chat/completions", {"content-type": "application/json"}
USER = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def engine():
    with serving.engine() as made:
        yield made


@pytest.fixture(scope="module")
def server(engine):
    with serving.serve(engine, max_samples=64, max_logprobs=5, max_body_bytes=20_000, max_tokens=150) as made:
        yield made


@pytest.fixture
def http(server, engine):
    with serving.client(server) as made:
        yield made
    check_idle(engine)


def check_error(answer, status, message="", param=None, code=None):
    """OpenAI's form, and nothing that a client has no use for."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json" and answer.headers["x-request-id"]
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and message in error["message"], error
    assert "Traceback" not in answer.text and ".py" not in answer.text
    assert param is None or error["param"] == param
    assert code is None or error["code"] == code


BAD_BOTH = [
    ({"temperature": "hot"}, "temperature", "valid number"),
    ({"temperature": -1}, "temperature", "expected 0 (greedy)"),
    ({"temperature": 1e9}, "temperature", "expected 0 (greedy)"),
    ({"temperature": True}, "temperature", "valid number"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"top_p": 1.5}, "top_p", "above 0"),
    ({"top_k": -2}, "top_k", "0 or more"),
    ({"top_k": 2**64}, "top_k", "below 2**63"),
    ({"min_p": 2}, "min_p", "0 to 1"),
    ({"n": 0}, "n", "1 to 4096"),
    ({"n": 65}, "n", "at most 64 samples"),
    ({"n": 10**30}, "n", ""),
    ({"n": 1.5}, "n", "integer"),
    ({"seed": "7"}, "seed", "integer"),
    ({"seed": 2**64}, "seed", ""),
    ({"seed": -(2**63) - 1}, "seed", ""),
    ({"max_tokens": 0}, "max_tokens", "1 or more"),
    ({"max_tokens": 151}, "max_tokens", "at most 150"),
    ({"max_tokens": "5"}, "max_tokens", "integer"),
    ({"max_tokens": 2.5}, "max_tokens", "integer"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "at most max_new_tokens, 8"),
    ({"stop": [1]}, "stop", "string"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"stop_token_ids": [-1]}, "stop_token_ids", "0 or more"),
    ({"stop_token_ids": ["x"]}, "stop_token_ids", "integer"),
    ({"stop_token_ids": [1] * 4097}, "stop_token_ids", "got 4097, expected at most 4096"),
    ({"stream": "yes"}, "stream", "boolean"),
    ({"stream": True, "stream_options": {"usage": True}}, "stream_options", "Extra"),
    ({"frequency_penalty": 0.5}, "frequency_penalty", "not served: expected 0 or null"),
    ({"presence_penalty": -1}, "presence_penalty", "not served"),
    ({"repetition_penalty": 1.1}, "repetition_penalty", "not served: expected 1"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not served"),
    ({"best_of": 2}, "best_of", "not served: expected 1"),
    ({"best_of": 1, "n": 2}, "best_of", "not served: expected 2"),
    ({"early_stopping": True}, "early_stopping", "not served"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not served"),
    ({"tool_choice": "required"}, "tool_choice", "not served"),
    ({"guided_json": {}}, "guided_json", "not served"),
    ({"suffix": "end"}, "suffix", "not served"),
    ({"store": True}, "store", "not served"),
    ({"prompt_logprobs": 6}, "prompt_logprobs", "got 6, expected true, or 0 to 5"),
    ({"prompt_logprobs": -1}, "prompt_logprobs", "got -1, expected true, or 0 to 5"),
    ({"prompt_logprobs": "yes"}, "prompt_logprobs", "boolean"),
    ({"temprature": 1}, "temprature", "no such field"),
    ({"model": "gpt-4"}, "model", "expected tiny"),
    ({"model": 5}, "model", "string"),
]
BAD_TEXT = [
    ({"prompt": None}, "prompt", "expected a text"),
    ({"prompt": ""}, "prompt", "no tokens"),
    ({"prompt": []}, "prompt", "expected a text"),
    ({"prompt": [[]]}, "prompt", "no tokens"),
    ({"prompt": ["a", 5]}, "prompt", "in the list"),
    ({"prompt": [[1, "a"]]}, "prompt", "in the list"),
    ({"prompt": [True, 5]}, "prompt", "in the list"),
    ({"prompt": [5, 259]}, "prompt", "token id 259, expected 0 to 258"),
    ({"prompt": [-1]}, "prompt", "token id -1"),
    ({"prompt": [2**70], "echo": True}, "prompt", "token id"),
    ({"prompt": {"text": "a"}}, "prompt", "expected a text"),
    ({"prompt": ["a"] * 65}, "prompt", "at most 64"),
    ({"prompt": "x" * 200}, "prompt", "got 200 tokens, expected at most 199"),
    ({"prompt": "x" * 100, "max_tokens": 101}, "max_tokens", "after a prompt of 100 tokens, expected at most 100"),
    ({"logprobs": 6}, "logprobs", "expected 0 to 5"),
    ({"logprobs": -1}, "logprobs", "expected 0 to 5"),
    ({"logprobs": True}, "logprobs", "integer"),
    ({"tools": [{"type": "function"}]}, "tools", "not served"),
]
BAD_CHAT = [
    ({"messages": []}, "messages", "there are none"),
    ({"messages": "hi"}, "messages", "list"),
    ({"messages": ["hi"]}, "messages", "dict"),
    ({"messages": [{"content": "hi"}]}, "messages", ".role: got None"),
    ({"messages": [{"role": "robot", "content": "hi"}]}, "messages", ".role: got 'robot'"),
    ({"messages": [{"role": "user"}]}, "messages", ".content: got None"),
    ({"messages": [{"role": "user", "content": 5}]}, "messages", ".content: got 5"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "got 'image_url'"),
    ({"messages": [{"role": "user", "content": "hi", "mood": "good"}]}, "messages", ".mood: there is no such field"),
    ({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}]}, "messages", "calls[0]: got"),
    ({"messages": [{"role": "tool", "content": "", "tool_call_id": 5}]}, "messages", "got 5, expected a text"),
    ({"messages": USER, "tools": ["x"]}, "tools", "dictionary"),
    ({"messages": USER, "reasoning_effort": "high"}, "reasoning_effort", "not served"),
    ({"messages": [{**USER[0], "token_ids": [5]}]}, "messages", "an assistant's message alone"),
    ({"messages": [{"role": "assistant", "prompt_token_ids": [5]}]}, "messages", "[0].token_ids: got None"),
    ({"messages": [{"role": "assistant", "token_ids": [5]}]}, "messages", "[0].prompt_token_ids: got None"),
    ({"messages": [{"role": "assistant", "prompt_token_ids": [5], "token_ids": [999]}]}, "messages", "token id 999"),
    ({"messages": USER, "prompt_token_ids": [5]}, "prompt_token_ids", "expected no messages"),
    ({"messages": [], "prompt_token_ids": [259]}, "prompt_token_ids", "token id 259"),
    ({"messages": [], "prompt_token_ids": []}, "prompt_token_ids", "no tokens"),
    ({"messages": USER, "echo": True}, "echo", "not served"),
    ({"messages": USER, "top_logprobs": 2}, "top_logprobs", "logprobs true"),
    ({"messages": USER, "logprobs": True, "top_logprobs": 6}, "top_logprobs", "expected 0 to 5"),
    ({"messages": USER, "logprobs": 1}, "logprobs", "boolean"),
    ({"messages": USER, "max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
    ({"messages": USER, "chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", "tokenize"),
    ({"messages": USER, "tools": [{"type": "function"}]}, "tools", "has no word of it"),
    ({"messages": USER, "continue_final_message": True}, "continue_final_message", "assistant"),
    ({"messages": [{"role": "user", "content": "x" * 300}]}, "messages", "expected at most 199"),
]


@pytest.mark.parametrize(
    "path, body, param, message",
    [(TEXT, {"prompt": "hi", **b}, p, m) for b, p, m in (*BAD_BOTH, *BAD_TEXT)]
    + [(CHAT, {"messages": USER, **b}, p, m) for b, p, m in (*BAD_BOTH, *BAD_CHAT)],
)
def test_a_bad_request_is_a_400_that_names_the_field(http, path, body, param, message):
    answer = http.post(path, json=body)
    check_error(answer, 404 if body.get("model") == "gpt-4" else 400, message, param)


@pytest.mark.parametrize(
    "raw",
    [b"", b"{", b"[]", b'"x"', b"\xff\xfe", b'{"prompt": "x", "temperature": NaN}', b'{"prompt": "\\ud800"}',
     b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", b"null", b'{"prompt": "x" "y"}',
     b'{"a": 1' + b"0" * 5000 + b"}"],
    ids=["empty", "open", "list", "text", "bytes", "nan", "surrogate", "deep", "null", "comma", "digits"],
)  # fmt: skip
def test_a_body_that_is_no_json_object(http, raw):
    check_error(http.post(TEXT, content=raw, headers=JSON), 400)


def test_no_such_path_method_or_type(http):
    check_error(http.get("/v1/nothing"), 404, "not found")
    check_error(http.get(TEXT), 405, "not allowed")
    check_error(http.post(TEXT, content="prompt=hi"), 415, "expected application/json")
    check_error(http.post(TEXT, content=b"{}", headers={"content-type": "text/plain"}), 415, "text/plain")


def test_a_long_body_is_refused_before_it_is_read(http, server):
    check_error(http.post(TEXT, json={"prompt": "x" * 20_000}), 413, "at most 20000 bytes")

    def chunks():
        yield b'{"prompt": "'
        for _ in range(30):
            yield b"x" * 1000

    check_error(http.post(TEXT, content=chunks(), headers=JSON), 413)


def test_no_template_is_a_clear_400():
    with serving.engine(template=None) as engine, serving.serve(engine) as server, serving.client(server) as http:
        check_error(http.post(CHAT, json={"messages": USER}), 400, "no chat template", code="no_chat_template")
        assert http.post(TEXT, json={"prompt": "hi"}).status_code == 200


def test_a_template_that_refuses_says_why():
    template = "{{ raise_exception('roles must alternate') }}"
    with serving.engine(template=template) as engine, serving.serve(engine) as server, serving.client(server) as http:
        check_error(http.post(CHAT, json={"messages": USER}), 400, "roles must alternate")


def test_without_a_tokenizer_ids_are_served():
    from engine_models import build

    from vexact_engine import Engine

    plain = Engine.from_pretrained(build("Llama"), config=serving.CONFIG)
    with plain as engine, serving.serve(engine) as server, serving.client(server) as http:
        check_error(http.post(TEXT, json={"prompt": "hi"}), 400, "no tokenizer")
        check_error(http.post(CHAT, json={"messages": USER}), 400, "no tokenizer")
        check_error(http.post(TEXT, json={"prompt": [5], "stop": "x"}), 400, "there is no tokenizer")
        body = {"prompt": [5, 6], "seed": 1, "logprobs": 1, "return_token_ids": True, "max_tokens": 4}
        (choice,) = http.post(TEXT, json=body).json()["choices"]
        done = engine.generate([[5, 6]], SamplingParams(max_new_tokens=4, seed=1))[0]
        assert choice["token_ids"] == done.token_ids and choice["text"] == ""
        assert choice["logprobs"]["tokens"] == [f"token_id:{token}" for token in done.token_ids]


# Who may come in


def test_the_key(engine):
    with serving.serve(engine, api_keys=("other key", KEY)) as server:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": KEY},
            {"authorization": "Basic " + KEY},
        ):
            for method, path in (("GET", "/v1/models"), ("POST", TEXT), ("GET", "/metrics"), ("POST", "/pause")):
                answer = httpx.request(method, server.url + path, headers=headers)
                check_error(answer, 401, "API key", code="invalid_api_key")
                assert KEY not in answer.text and answer.headers["www-authenticate"] == "Bearer"
        assert httpx.get(server.url + "/health").status_code == 200
        for key in ("other key", KEY):
            with serving.client(server, key) as http:
                assert http.get("/v1/models").status_code == 200
                assert http.post(TEXT, json={"prompt": "a"}).status_code == 200


def test_a_public_host_wants_a_key():
    with pytest.raises(ValueError, match="which others can reach, and there is no API key"):
        Settings(host="0.0.0.0")
    assert Settings(host="0.0.0.0", api_keys=("k",)).api_keys == ("k",)
    assert Settings(host="0.0.0.0", allow_no_key=True).host == "0.0.0.0"
    for host in ("localhost", "127.0.0.1", "127.3.2.1", "::1", "[::1]", "LOCALHOST", "localhost."):
        Settings(host=host)


@pytest.mark.parametrize(
    "options, kind",
    [
        ({"port": -1}, ValueError), ({"port": 70000}, ValueError), ({"port": "80"}, TypeError),
        ({"max_requests": 0}, ValueError), ({"max_tokens": True}, TypeError), ({"request_timeout": 0}, ValueError),
        ({"request_timeout": float("nan")}, ValueError), ({"drain_seconds": "x"}, TypeError),
        ({"api_keys": "secret"}, TypeError), ({"api_keys": ("",)}, TypeError), ({"api_keys": (" k",)}, ValueError),
        ({"model_names": ()}, ValueError), ({"send_timeout": 0}, ValueError), ({"header_timeout": 0}, ValueError),
        ({"max_connections": 0}, ValueError),
    ],
    ids=str,
)  # fmt: skip
def test_bad_settings(options, kind):
    with pytest.raises(kind, match=r"^Settings: ") as caught:
        Settings(**options)
    assert "secret" not in str(caught.value)


def test_cors_where_it_is_asked_for(engine):
    with serving.serve(engine, allow_origins=("http://page.example",), api_keys=(KEY,)) as server:
        ask = {"access-control-request-method": "POST", "access-control-request-headers": "authorization"}
        answer = httpx.options(server.url + TEXT, headers={"origin": "http://page.example", **ask})
        assert answer.headers["access-control-allow-origin"] == "http://page.example"
        answer = httpx.options(server.url + TEXT, headers={"origin": "http://evil.example", **ask})
        assert "access-control-allow-origin" not in answer.headers


def test_the_fields_are_described(http):
    paths = http.get("/openapi.json").json()["paths"]
    for path, own in ((TEXT, "prompt"), (CHAT, "messages")):
        schema = paths[path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        assert {own, "seed", "return_rollout", "stream_options"} <= set(schema["properties"])
        assert schema["required"] == [own] and schema["additionalProperties"] is False and "$" not in str(schema)


def test_request_ids(http):
    assert http.get("/health", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    for bad in ("a b", "x" * 129, 'a"b'):
        assert http.get("/health", headers={"x-request-id": bad}).headers["x-request-id"].startswith("req-")


def test_the_log_has_the_id_and_no_word_of_a_prompt(http, caplog):
    caplog.set_level("INFO", "vexact_engine.serve")
    http.post(TEXT, json={"prompt": "a secret"}, headers={"x-request-id": "mine-2"})
    end = time.monotonic() + 120  # the answer is there before the server's last line about it
    while True:
        lines = [record.getMessage() for record in list(caplog.records) if "mine-2" in record.getMessage()]
        if any('"POST' in line for line in lines) or time.monotonic() > end:
            break
        time.sleep(0.01)
    assert any('"POST /v1/completions" 200' in line for line in lines)
    assert any("8 prompt tokens" in line for line in lines) and "secret" not in caplog.text


# Limits in time and number


def step(engine):
    """What the loop calls to have something computed."""
    return "launch" if hasattr(engine._worker, "launch") else "run"


def slow(engine, monkeypatch):
    """A gate in front of every step: nothing is computed until it is set."""
    gate, name = threading.Event(), step(engine)
    honest = getattr(engine._worker, name)

    def gated(*given):
        gate.wait(120)
        return honest(*given)

    monkeypatch.setattr(engine._worker, name, gated)
    return gate


def until(condition):
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come to that"
        time.sleep(0.005)


class Background:
    """A request in a thread."""

    def __init__(self, http, path, body):
        self.answer = None
        self.thread = threading.Thread(target=self._ask, args=(http, path, body))
        self.thread.start()

    def _ask(self, http, path, body):
        self.answer = http.post(path, json=body)

    def result(self):
        self.thread.join(300)
        return self.answer


def test_more_than_fit_are_told_when_to_come_again(engine, monkeypatch):
    with serving.serve(engine, max_requests=2) as server, serving.client(server) as http:
        gate = slow(engine, monkeypatch)
        waiting = [Background(http, TEXT, {"prompt": "a", "seed": 1}) for _ in range(2)]
        until(lambda: serving.metric(http, "vexact_requests_in_progress") == 2)
        answer = http.post(TEXT, json={"prompt": "a"})
        check_error(answer, 429, "no more are taken", code="too_many_requests")
        assert answer.headers["retry-after"] == "1"
        assert http.get("/health").status_code == 200
        gate.set()
        texts = {one.result().json()["choices"][0]["text"] for one in waiting}
        assert len(texts) == 1
        assert http.post(TEXT, json={"prompt": "a"}).status_code == 200
    check_idle(engine)


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_takes_too_long(engine, stream):
    with serving.serve(engine, request_timeout=0.3) as server, serving.client(server) as http:
        engine.pause("keep")
        try:
            check_error(http.post(TEXT, json={"prompt": "a", "stream": stream}), 504, "0.3 s", code="request_timeout")
        finally:
            engine.resume()
        assert serving.metric(http, 'vexact_requests_total{endpoint="completions",outcome="timeout"}') == 1
    check_idle(engine)


def test_a_body_that_does_not_come(engine):
    with serving.serve(engine, body_timeout=0.2) as server:
        host, port = server.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as raw:
            head = ["POST /v1/completions HTTP/1.1", "host: localhost", "content-type: application/json"]
            raw.sendall("\r\n".join([*head, "content-length: 99", "", "{"]).encode())
            assert b" 408 " in raw.makefile("rb").readline()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_is_not_worked_for(engine, stream):
    with serving.serve(engine) as server, serving.client(server) as http, held(engine, 12):

        async def leave():
            async with httpx.AsyncClient(base_url=server.url, timeout=300) as one:
                body = {"prompt": ["a", "b"], "max_tokens": 190, "n": 2, "ignore_eos": True, "stream": stream}
                if stream:
                    async with one.stream("POST", TEXT, json=body) as answer:
                        async for _ in answer.aiter_lines():
                            break
                else:
                    task = asyncio.ensure_future(one.post(TEXT, json=body))
                    while not engine.load().running:
                        await asyncio.sleep(0.002)
                    task.cancel()
                    await asyncio.gather(task, return_exceptions=True)

        asyncio.run(leave())
        until(lambda: serving.metric(http, 'vexact_requests_total{endpoint="completions",outcome="disconnected"}') == 1)
        until(lambda: not (engine.load().running or engine.load().waiting))
    check_idle(engine)


# Faults


def test_a_step_that_fails_is_a_500_and_the_next_one_is_served(engine, http, monkeypatch, caplog):
    name = step(engine)

    def fail(*given):
        raise RuntimeError("a secret of /the/inside.py")

    for stream in (False, True):
        with monkeypatch.context() as patch:
            patch.setattr(engine._worker, name, fail)
            answer = http.post(TEXT, json={"prompt": "a", "stream": stream})
            check_error(answer, 500, "the computation of a step failed", code="step_failed")
            assert "secret" not in answer.text and "secret" in caplog.text
    assert http.post(TEXT, json={"prompt": "a"}).status_code == 200


def test_a_fault_of_the_server_is_a_500(http, monkeypatch):
    def fail(self, *given):
        raise ZeroDivisionError("a secret")

    monkeypatch.setattr(app_module.Service, "check_model", fail)
    answer = http.post(TEXT, json={"prompt": "a"})
    check_error(answer, 500, code="internal_error")
    check_error(http.get("/v1/models/x"), 500, code="internal_error")
    assert "secret" not in answer.text


def test_a_stream_that_breaks_off_says_so_in_its_last_event(engine, http, monkeypatch):
    name = step(engine)
    honest, steps = getattr(engine._worker, name), iter(range(100))

    def fail_later(*given):
        if next(steps) == 5:
            raise RuntimeError("later")
        return honest(*given)

    monkeypatch.setattr(engine._worker, name, fail_later)
    answer = http.post(TEXT, json={"prompt": "a", "stream": True, "logprobs": 0, "ignore_eos": True})
    assert answer.status_code == 200
    *pieces, last = serving.events(answer.text)
    assert last["error"]["code"] == "step_failed" and pieces and all("choices" in piece for piece in pieces)


def test_a_closed_engine_is_a_503():
    engine = serving.engine()
    with serving.serve(engine) as server, serving.client(server) as http:
        assert http.get("/health").json() == {"status": "running"}
        engine.close()
        check_error(http.post(TEXT, json={"prompt": "a"}), 503, "closed")
        assert (http.get("/health").status_code, http.get("/health").json()) == (503, {"status": "closed"})


# What a trainer does with the engine


def test_control_wants_a_key_that_is_set(http):
    for path in ("/pause", "/resume", "/abort", "/reset_prefix_cache", "/sleep", "/wake_up"):
        check_error(http.post(path, json={}), 403, "start the server with an API key")


def test_pause_resume_reset_sleep_and_abort(engine):
    with serving.serve(engine, api_keys=(KEY,)) as server, serving.client(server, KEY) as http:
        assert http.post("/pause", json={"mode": "keep"}).json()["state"] == "paused"
        assert http.get("/health").json() == {"status": "paused"}
        assert serving.metric(http, "vexact_engine_paused") == 1
        body = {"prompt": "a", "seed": 1, "max_tokens": 30, "ignore_eos": True}
        waiting = Background(http, TEXT, body)
        until(lambda: engine.load().waiting == 1)
        assert http.post("/resume", json={}).json()["state"] == "running"
        text = waiting.result().json()["choices"][0]["text"]
        assert http.post("/reset_prefix_cache", json={}).status_code == 200
        given = http.post("/sleep", json={"level": 1}).json()
        assert given["state"] == "asleep" and set(given["bytes"]) >= {"weights", "kv_cache"}
        assert given["backend"] == "storages: it is for GPUs"
        assert http.post("/wake_up", json={}).json()["state"] == "running"
        assert http.post(TEXT, json=body).json()["choices"][0]["text"] == text

        http.post("/pause", json={"mode": "keep"})
        waiting = [Background(http, TEXT, body) for _ in range(2)]
        until(lambda: engine.load().waiting == 2)
        assert http.post("/abort", json={"request_id": "nobody"}).json()["aborted"] == 0
        assert http.post("/abort", json={"all": True}).json()["aborted"] == 2
        for one in waiting:
            (choice,) = one.result().json()["choices"]
            assert choice["finish_reason"] == "abort"
        http.post("/resume", json={})

        check_error(http.post("/pause", json={"mode": "nap"}), 400, "expected one of abort, wait, keep")
        check_error(http.post("/pause", json={"mood": "x"}), 400, "mood: there is no such field")
        check_error(http.post("/pause", json={"mode": 5}), 400, "mode: got a int")
        check_error(http.post("/abort", json={}), 400, "either request_id or all")
        check_error(http.post("/sleep", json={"level": 3}), 400, "expected 1 or 2")
        check_error(http.post("/pause", content=b"[", headers=JSON), 400, "not JSON")
        check_error(http.post("/pause", content=rb'{"\ud800": 1}', headers=JSON), 400, "?: there is no such field")
        check_error(http.post("/pause", content=b""), 415)
        assert http.get("/numerics").json()["numerics"]["class"] == "cpu"
    check_idle(engine)


def test_metrics_add_up(engine):
    with serving.serve(engine) as server, serving.client(server) as http:
        begun = serving.metric(http, "vexact_steps_total")
        body = {"prompt": ["abc", "de"], "n": 2, "max_tokens": 5, "ignore_eos": True}
        assert http.post(TEXT, json=body).status_code == 200
        http.post(TEXT, json={"prompt": "a", "temperature": -1})
        list(http.post(CHAT, json={"messages": USER, "max_tokens": 7, "ignore_eos": True, "stream": True}).iter_lines())
        names = {
            'vexact_requests_total{endpoint="completions",outcome="ok"}': 1,
            'vexact_requests_total{endpoint="completions",outcome="bad_request"}': 1,
            'vexact_requests_total{endpoint="chat",outcome="ok"}': 1,
            "vexact_prompt_tokens_total": 5 + len("[user:hi]>"),
            "vexact_generated_tokens_total": 4 * 5 + 7,
            'vexact_samples_total{finish_reason="length"}': 5,
            "vexact_time_to_first_token_seconds_count": 5,
            "vexact_inter_token_seconds_count": 4 * 4 + 6,
            "vexact_request_seconds_count": 5,
            "vexact_queue_seconds_count": 5,
            "vexact_requests_in_progress": 0,
            "vexact_sequences_running": 0,
            "vexact_sequences_waiting": 0,
            "vexact_kv_cache_used_ratio": 0,
            "vexact_kv_cache_pages": 400,
            "vexact_weight_version": engine.weight_version,
            "vexact_preemptions_total": engine.stats.preemptions,
            "vexact_drafted_tokens_total": 0,
            "vexact_accepted_tokens_total": 0,
        }
        until(lambda: serving.metric(http, "vexact_requests_in_progress") == 0)
        assert {name: serving.metric(http, name) for name in names} == names
        assert serving.metric(http, "vexact_steps_total") >= begun + 7
        assert serving.metric(http, "vexact_time_to_first_token_seconds_sum") > 0


# The end


def test_at_the_end_requests_under_way_are_answered_and_new_ones_are_not(engine, monkeypatch):
    server = serving.serve(engine, drain_seconds=60.0)
    with serving.client(server) as http:
        gate = slow(engine, monkeypatch)
        waiting = Background(http, TEXT, {"prompt": "a", "seed": 1, "stream": True})
        until(lambda: serving.metric(http, "vexact_requests_in_progress") == 1)
        ending = threading.Thread(target=server.stop)
        ending.start()
        until(lambda: http.get("/health").status_code == 503)
        assert http.get("/health").json() == {"status": "draining"}
        answer = http.post(TEXT, json={"prompt": "a"})
        check_error(answer, 503, "about to end", code="shutting_down")
        assert answer.headers["retry-after"]
        gate.set()
        pieces = serving.events(waiting.result().text)
        assert pieces[-1]["choices"][0]["finish_reason"] in ("length", "stop")
        ending.join(300)
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health")
    check_idle(engine)


def test_what_is_not_done_when_it_ends_is_aborted_with_what_it_has(engine):
    server = serving.serve(engine, drain_seconds=0.0)
    with serving.client(server) as http:
        engine.pause("keep")
        try:
            waiting = [Background(http, TEXT, {"prompt": "a", "stream": stream}) for stream in (False, True)]
            until(lambda: engine.load().waiting == 2)
            server.stop(30)
            whole, streamed = (one.result() for one in waiting)
        finally:
            engine.resume()
        assert whole.json()["choices"][0]["finish_reason"] == "abort"
        assert serving.events(streamed.text)[-1]["choices"][0]["finish_reason"] == "abort"
    check_idle(engine)
    assert json.loads(whole.text)["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    "body", [{"prompt": "a"}, {"prompt": ["a", "b"], "stream": True}, {"prompt": "a", "stream": True}]
)
def test_one_that_is_aborted_before_the_engine_has_it(engine, http, monkeypatch, body):
    honest = app_module.Service.check_model

    def stopping(self, name):
        self.stop_all()
        return honest(self, name)

    monkeypatch.setattr(app_module.Service, "check_model", stopping)
    check_error(http.post(TEXT, json=body), 503, "aborted before it began", code="aborted")
