"""Strangers: pages of other names, silent connections, texts that are too long, clients that leave, replicas that stand
still. Whoever asks beside them is answered in time."""

import contextlib
import json
import os
import signal
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import serving
from children import children_of
from engine_models import check_idle
from serving import httpx
from test_serve_errors import TEXT, Background, check_error, slow, until
from test_serve_process import BODY, Process, model  # noqa: F401  a fixture

from vexact_engine.serve import Settings, connections
from vexact_engine.serve import app as app_module
from vexact_engine.serve.server import Server
from vexact_engine.serve.tokens import Tokens


@pytest.fixture(scope="module")
def engine():
    with serving.engine() as made:
        yield made
        check_idle(made)


@pytest.fixture(scope="module")
def server(engine):
    with serving.serve(engine) as made:
        yield made


@pytest.fixture
def http(server):
    with serving.client(server) as made:
        yield made


def test_a_page_of_another_name_is_turned_away(http):
    """What a browser is led to by a name that an attacker owns (DNS rebinding), and pages that ask from elsewhere."""
    check_error(http.get("/v1/models", headers={"host": "evil.example"}), 421, "this machine's own name")
    for own in ("localhost:1", "LOCALHOST", "localhost.", "Localhost.:80", "127.0.0.1", "[::1]:8000"):
        assert http.get("/v1/models", headers={"host": own}).status_code == 200, own
    check_error(http.get("/v1/models", headers={"host": "localhost.evil.example"}), 421)
    answer = http.options(TEXT, headers={"origin": "http://evil.example", "access-control-request-method": "POST"})
    assert "access-control-allow-origin" not in answer.headers
    answer = http.get("/v1/models", headers={"origin": "http://evil.example"})
    assert "access-control-allow-origin" not in answer.headers


# Connections


def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def ended(raw):
    """What it is told at its end, also where that is a reset: of bytes that came too late."""
    told = b""
    with contextlib.suppress(ConnectionError):
        while piece := raw.recv(4096):
            told += piece
    return told


def test_a_header_has_a_time_however_often_a_byte_of_it_comes(engine):
    with serving.serve(engine, header_timeout=0.5) as server:
        silent, slow, second = (connect(server) for _ in range(3))
        second.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")  # whole, and then another that is not
        begin, told = time.monotonic(), []
        reader = threading.Thread(target=lambda: told.append(ended(slow)))
        reader.start()
        with contextlib.suppress(OSError):
            while not told and time.monotonic() < begin + 60:
                slow.sendall(b"G")
                second.sendall(b"G")
                time.sleep(0.05)
        reader.join(60)
        assert told and told[0].startswith(b"HTTP/1.1 408 ")
        assert ended(silent).startswith(b"HTTP/1.1 408 ")
        answers = ended(second)
        assert answers.startswith(b"HTTP/1.1 200 OK") and answers.count(b"HTTP/1.1 ") == 1


def test_one_more_takes_the_place_of_the_one_that_was_silent_longest(engine, caplog):
    with serving.serve(engine, max_connections=4, header_timeout=600) as server, serving.client(server) as http:
        raw = [connect(server) for _ in range(4)]
        time.sleep(0.1)
        assert http.get("/health").status_code == 200
        assert ended(raw[0]).startswith(b"HTTP/1.1 408 ")
        many = [connect(server) for _ in range(40)]
        assert httpx.get(server.url + "/health").status_code == 200
        for one in (*raw, *many):
            one.close()
    said = [record for record in caplog.records if "there are 4 connections" in record.getMessage()]
    assert len(said) == 1 and not any(record.exc_info for record in caplog.records)


def test_connections_that_are_answered_keep_their_places(engine):
    with serving.serve(engine, max_connections=2) as server, serving.client(server) as http:
        engine.pause("keep")
        answers = []

        def ask():
            answers.append(httpx.post(server.url + TEXT, json={"prompt": "a", "max_tokens": 2}, timeout=300))

        asking = [threading.Thread(target=ask) for _ in range(2)]
        try:
            for one in asking:
                one.start()
            until(lambda: engine.load().waiting == 2)
            with contextlib.suppress(httpx.HTTPError):
                assert http.get("/health").status_code == 503
        finally:
            engine.resume()
        for one in asking:
            one.join(300)
        assert [answer.status_code for answer in answers] == [200, 200]


def test_a_line_about_the_same_trouble_comes_once_in_a_while(caplog, monkeypatch):
    times = iter((0.0, 1.0, 2.0, 61.0))
    monkeypatch.setattr(connections, "time", SimpleNamespace(monotonic=lambda: next(times)))
    trouble = connections.Trouble("it is full")
    for _ in range(4):
        trouble.note()
    assert [r.getMessage() for r in caplog.records] == ["it is full", "it is full (2 more since the last time)"]


def test_what_is_no_http_has_one_line_in_the_log(engine, caplog):
    with serving.serve(engine) as server:
        for _ in range(20):
            with connect(server) as raw:
                raw.sendall(b"\x16\x03\x01 this is none\r\n\r\n")
                assert ended(raw).startswith(b"HTTP/1.1 400 ")
        assert httpx.get(server.url + "/health").status_code == 200
    assert [r.getMessage() for r in caplog.records if "Invalid HTTP" in r.getMessage()] == [
        "Invalid HTTP request received."
    ]


@pytest.mark.process
def test_silent_connections_shut_nobody_out_and_fill_no_disk(model):  # noqa: F811
    """300 of them at 256 descriptors."""
    with Process(model, "--header-timeout", 5, files=256) as server:
        raw = [connect(server) for _ in range(300)]
        begin = time.monotonic()
        for _ in range(5):
            answer = httpx.post(server.url + "/v1/completions", json=BODY, timeout=120)
            assert answer.status_code == 200
        assert time.monotonic() - begin < 60
        for one in raw:
            one.close()
        code, said = server.end()
    assert code == 0 and "Traceback" not in said and len(said) < 20_000


def test_a_port_is_held_from_the_beginning_by_one_server_alone(engine):
    first = Server(Settings(port=0))  # a model would be loaded now
    with first:
        port = int(first.url.rsplit(":", 1)[1])
        for _ in range(2):
            with pytest.raises(OSError, match=f"--host 127.0.0.1 --port {port}: cannot listen there: Address already"):
                Server(Settings(port=port))
        early = connect(first)
        early.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
        first.start(engine)
        assert ended(early).startswith(b"HTTP/1.1 200 OK")


# Texts


def test_a_text_that_is_surely_too_long_is_not_tokenized(http, monkeypatch):
    text = "x" * 300_000

    def never(*given, **named):
        raise AssertionError("it was tokenized")

    monkeypatch.setattr(Tokens, "_plain", never)
    monkeypatch.setattr("vexact_engine.text.Text.encode", never)
    for path, body in (
        (TEXT, {"prompt": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
    ):
        answer = http.post(path, json=body)
        check_error(answer, 400, "tokens or more, expected at most 199", code="context_length_exceeded")


@pytest.mark.parametrize("kind", ["byte", "fallback"])
def test_the_least_number_of_tokens_is_none_too_many(kind):
    import engine_models

    tokens = Tokens(getattr(engine_models, f"{kind}_tokenizer")())
    for text in ("x" * 50, "  " * 40, "\u2603" * 20, " done ok" * 9, "<bos><eos>" * 7, "\U0001f600" * 5):
        count = len(tokens.encode(text, special=False))
        assert tokens.encode(text, special=False, most=count), "it is not refused"


def test_a_text_s_length_says_nothing_where_a_tokenizer_drops_parts_of_it():
    from tokenizers import normalizers

    made = serving.tokenizer()
    assert Tokens(made)._longest is not None
    made.backend_tokenizer.normalizer = normalizers.Strip()
    assert Tokens(made)._longest is None


@pytest.fixture
def gate(monkeypatch):
    """Long texts are not through before it is set."""
    gate, honest = threading.Event(), Tokens.encode
    gate.begun = 0

    def encode(self, text, *given):
        if len(text) > 40_000:
            gate.begun += 1
            gate.wait(120)
        return honest(self, text, *given)

    monkeypatch.setattr(Tokens, "encode", encode)
    monkeypatch.setattr(Tokens, "_check_length", lambda *given: None)
    yield gate
    gate.set()


LONG = {"prompt": "x" * 50_000, "max_tokens": 2}


def test_tokenizing_counts_as_the_time_of_a_request(engine, gate):
    with serving.serve(engine, request_timeout=0.5) as server, serving.client(server) as http:
        for path, body in ((TEXT, LONG), (TEXT, {**LONG, "stream": True}), ("/tokenize", {"prompt": LONG["prompt"]})):
            check_error(http.post(path, json=body), 504, "0.5 s", code="request_timeout")
        assert serving.metric(http, 'vexact_requests_total{endpoint="completions",outcome="timeout"}') == 2


def test_long_texts_whose_clients_have_left_hold_nobody_up(engine, gate):
    with serving.serve(engine) as server, serving.client(server) as http:
        first = connect(server)
        body = json.dumps(LONG)
        head = [f"POST {TEXT} HTTP/1.1", "host: localhost", "content-type: application/json"]
        first.sendall("\r\n".join([*head, f"content-length: {len(body)}", "", body]).encode())
        until(lambda: gate.begun == 1)
        first.close()
        for _ in range(7):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(server.url + TEXT, json=LONG, timeout=httpx.Timeout(60, read=0.2))
        left = 'vexact_requests_total{endpoint="completions",outcome="disconnected"}'
        until(lambda: serving.metric(http, left) == 8)
        assert http.post(TEXT, json={"prompt": "a", "max_tokens": 2}).status_code == 200
        gate.set()
        check_error(http.post(TEXT, json=LONG), 400, "got 50000 tokens")
        assert gate.begun == 2, "the first, and the last: what nobody waits for is left out"


def test_millions_of_stop_tokens_are_refused_by_their_number(http):
    body = b'{"prompt": "a", "stop_token_ids": [' + b",".join([b"1"] * 1_000_000) + b"]}"
    answer = http.post(TEXT, content=body, headers={"content-type": "application/json"})
    check_error(answer, 400, "got 1000000, expected at most 4096", param="stop_token_ids")


def test_all_bodies_together_have_a_most(engine, monkeypatch):
    monkeypatch.setattr(app_module, "_BODIES", 1.5)
    with serving.serve(engine, max_body_bytes=1000) as server, serving.client(server) as http:
        engine.pause("keep")
        one = Background(http, TEXT, {"prompt": "a" * 150, "user": "x" * 700, "max_tokens": 2})
        try:
            until(lambda: engine.load().waiting == 1)
            body = {"prompt": "a", "user": "x" * 800, "max_tokens": 2}
            check_error(http.post(TEXT, json=body), 503, "too long together", code="too_many_bytes")
        finally:
            engine.resume()
        assert one.result().status_code == 200
        until(lambda: http.post(TEXT, json=body).status_code == 200)


# What stands still


def test_a_step_that_does_not_come_back_holds_no_answer_beyond_its_time(engine, monkeypatch):
    with (
        serving.serve(engine, request_timeout=0.5, api_keys=(serving.KEY,)) as server,
        serving.client(server, serving.KEY) as http,
    ):
        held = slow(engine, monkeypatch)
        for stream in (False, True):
            answer = http.post(TEXT, json={"prompt": "a", "stream": stream})
            check_error(answer, 504, "0.5 s", code="request_timeout")
        check_error(http.post("/pause", json={"mode": "wait"}), 504, "not done after 0.5 s")
        held.set()
        until(lambda: http.post("/resume", json={}).status_code == 200)
        assert http.post(TEXT, json={"prompt": "a", "max_tokens": 1}).status_code == 200
    check_idle(engine)


@pytest.mark.process
def test_a_replica_that_stands_still_holds_no_answer_and_no_end(ctrl_c, model):  # noqa: F811
    with Process(model, "--replicas", 1, "--request-timeout", 3, "--drain-seconds", 1) as server:
        assert httpx.post(server.url + "/v1/completions", json=BODY, timeout=300).status_code == 200
        os.kill(children_of(server.process.pid)[0], signal.SIGSTOP)
        for stream in (False, True):
            begin = time.monotonic()
            answer = httpx.post(server.url + "/v1/completions", json=BODY | {"stream": stream}, timeout=300)
            check_error(answer, 504, "3 s", code="request_timeout")
            assert time.monotonic() - begin < 30
        assert httpx.get(server.url + "/metrics", timeout=60).status_code in (200, 504)
        code, _ = server.end()
    assert code == 0
