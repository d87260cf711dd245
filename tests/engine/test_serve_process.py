"""`vexact serve` as a process: the line it prints when it is ready, signals, exit codes."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import serving
from children import children_of
from engine_models import build
from engine_models import until as until_it_is
from serving import KEY, httpx

from vexact_engine import Engine, EngineConfig, SamplingParams, cli

until = partial(until_it_is, seconds=300)
ROOT = Path(__file__).parents[2]
BODY = {"prompt": "hello", "seed": 4, "max_tokens": 20, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "tiny-model"
    build("Llama", vocab_size=300).save_pretrained(folder)
    serving.tokenizer().save_pretrained(folder)
    return str(folder)


class Process:
    """A server of its own, ready. Ended, however the test ends. files: it may have open."""

    def __init__(self, model, *options, env=(), files=None):
        command = [sys.executable, "-m", "vexact_engine.cli", "serve", model, "--port", "0", "--device", "cpu"]
        command += map(str, options)
        env = {**os.environ, "PYTHONPATH": str(ROOT), **dict(env)}
        # A pipe that nobody reads would be full in the end, and the server stand still.
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        if files is not None:
            command = ["sh", "-c", f'ulimit -n {files}; exec "$0" "$@"', *command]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=self._said, text=True, env=env)
        late = threading.Timer(600, self.process.kill)  # for what never comes
        late.start()
        self.line = self.process.stdout.readline()
        late.cancel()
        found = re.search(r" at (http://\S+)/v1$", self.line.strip())
        if found is None:
            self.process.wait(30)
            pytest.fail(f"not ready: {self.line!r}, {self.said()[-2000:]}")
        self.url = found[1]

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()
        self._said.close()

    def said(self):
        self._said.seek(0)
        return self._said.read()

    def end(self, number=signal.SIGTERM):
        self.process.send_signal(number)
        self.process.communicate(timeout=300)
        return self.process.returncode, self.said()


@pytest.mark.parametrize("stages, ranks", [(1, 1), (2, 1), (1, 2)])
def test_it_serves_what_the_engine_gives_and_ends_with_0_on_sigterm(model, stages, ranks):
    with Engine.from_pretrained(model) as engine:
        done = engine.generate("hello", SamplingParams(max_new_tokens=20, seed=4, ignore_eos=True))[0]
    options = ["--max-model-len", 100, "--num-pages", 50, "--log-level", "info", "--pipeline-parallel-size", stages]
    options += ["--tensor-parallel-size", ranks]
    with Process(model, *options, env={"VEXACT_API_KEY": KEY}) as server:
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.get(server.url + "/v1/models", timeout=300).status_code == 401
        names = [m["id"] for m in httpx.get(server.url + "/v1/models", headers=headers, timeout=300).json()["data"]]
        assert names == ["tiny-model", model]
        answer = httpx.post(
            server.url + "/v1/completions", json=BODY | {"return_rollout": True}, headers=headers, timeout=300
        )
        (choice,) = answer.json()["choices"]
        assert choice["text"] == done.text and choice["rollout"]["logprobs"] == done.logprobs
        code, said = server.end()
    assert code == 0 and '"POST /v1/completions" 200' in said and "Traceback" not in said
    assert KEY not in said and "hello" not in said


def test_sigterm_lets_a_stream_end_and_sigint_exits_130(model):
    with Process(model, "--log-level", "warning") as server:
        body = BODY | {"max_tokens": 100, "stream": True, "stream_options": {"include_usage": True}}
        with httpx.stream("POST", server.url + "/v1/completions", json=body, timeout=300) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            server.process.send_signal(signal.SIGTERM)
            text = "\n\n".join(line for line in (first, *lines) if line)
        *_, last = serving.events(text)
        assert last["usage"]["completion_tokens"] == 100, "all of it came"
        assert server.process.wait(300) == 0
    with Process(model) as server:
        assert server.end(signal.SIGINT)[0] == 130


def test_a_second_sigterm_does_not_wait(model):
    with Process(model, "--drain-seconds", 600, env={"VEXACT_API_KEY": KEY}) as server:
        headers = {"authorization": f"Bearer {KEY}"}
        assert httpx.post(server.url + "/pause", json={"mode": "keep"}, headers=headers, timeout=300).status_code == 200
        answers = []

        def ask():
            answers.append(httpx.post(server.url + "/v1/completions", json=BODY, headers=headers, timeout=300))

        asking = threading.Thread(target=ask)
        asking.start()
        progress = "vexact_requests_in_progress 1.0"
        until(lambda: progress in httpx.get(server.url + "/metrics", headers=headers, timeout=300).text)
        server.process.send_signal(signal.SIGTERM)
        until(lambda: httpx.get(server.url + "/health", timeout=300).status_code == 503)
        code, _ = server.end()
        asking.join(300)
        assert not asking.is_alive()
    assert code == 0 and answers[0].json()["choices"][0]["finish_reason"] == "abort"


def test_replicas_behind_one_server(tmp_path):
    """One of two is killed with a stream under way, which goes on, and what comes later is served. The stream has no
    end within minutes but by /pause: it is under way however slow this process is."""
    model = tmp_path / "tiny-model"
    build("Llama", vocab_size=300, max_position_embeddings=1 << 17).save_pretrained(model)
    serving.tokenizer().save_pretrained(model)
    with Process(str(model), "--replicas", 2, "--num-pages", 9000, env={"VEXACT_API_KEY": KEY}) as server:
        http = httpx.Client(base_url=server.url, headers={"authorization": f"Bearer {KEY}"}, timeout=300)
        metric = partial(serving.metric, http)
        body = BODY | {"max_tokens": 100_000, "stream": True, "return_rollout": True}
        with http, http.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            os.kill(children_of(server.process.pid)[0], signal.SIGKILL)  # the first: it has this request
            until(lambda: metric("vexact_replicas_alive") == 1)
            by_then = metric("vexact_decode_tokens_total")
            until(lambda: metric("vexact_decode_tokens_total") > by_then + 50)
            assert http.post("/pause", json={"mode": "abort"}).status_code == 200
            events = serving.events("\n\n".join(line for line in (first, *lines) if line))
            assert http.post("/resume", json={}).status_code == 200
            choices = [choice for event in events for choice in event["choices"]]
            assert choices[-1]["finish_reason"] == "abort"
            got = {name: [x for c in choices for x in c["rollout"][name]] for name in ("token_ids", "logprobs")}
            later = http.post("/v1/completions", json=BODY).json()
            assert "vexact_kv_cache_pages 9000.0" in http.get("/metrics").text
        code, said = server.end()
    assert code == 0 and "was killed by SIGKILL; 1 requests of its go to others" in said
    with Engine.from_pretrained(model, config=EngineConfig(show_progress=False, num_pages=9000)) as engine:
        params = SamplingParams(max_new_tokens=len(got["token_ids"]), seed=4, ignore_eos=True)
        (done,) = engine.generate("hello", params)
        assert (done.token_ids, done.logprobs) == (got["token_ids"], got["logprobs"]) and len(done.token_ids) > 50
        (done,) = engine.generate("hello", replace(params, max_new_tokens=20))
        assert later["choices"][0]["text"] == done.text


def run(capsys, command, *argv):
    code = cli.main([command, "--quiet", *(str(a) for a in argv)])
    out, err = capsys.readouterr()
    return code, out, err


def test_what_is_wrong_is_known_before_the_model_is_loaded(capsys, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, out, err = run(capsys, "serve", "no-such-model", "--port", port)
    assert (code, out) == (2, "") and f"--port {port}: cannot listen there: Address already in use" in err
    (tmp_path / "keys").write_text("\n")
    for options, message in (
        (["--host", "0.0.0.0"], "there is no API key"),
        (["--host", "no.such.host.invalid", "--allow-no-key"], "--host no.such.host.invalid"),
        (["--api-key-file", tmp_path / "none"], "none"),
        (["--api-key-file", tmp_path / "keys"], "holds no key"),
        (["--request-timeout", "-1"], "--request-timeout: got -1.0"),
        (["--port", "0"], "no-such-model"),
    ):
        code, out, err = run(capsys, "serve", "no-such-model", *options)
        assert (code, out) == (2, "") and message in err and err.count("\n") == 1, err


def test_every_option_has_its_help(capsys):
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    text = capsys.readouterr().out
    from vexact_engine.cli import _parser

    serve = _parser()[1].choices["serve"]
    assert all(action.help for action in serve._actions), "each says what it is"
    assert "--drain-seconds" in text


def test_replicas_are_served_like_one_engine_and_one_that_is_killed_is_not_noticed(model):
    with Engine.from_pretrained(model) as engine:
        params = SamplingParams(max_new_tokens=150, seed=4, ignore_eos=True)
        done = engine.generate(["hello", "there"], params)
    with Process(model, "--replicas", 2, "--max-restarts", 4, "--num-pages", 100) as server:
        body = {"prompt": ["hello", "there"], "seed": 4, "max_tokens": 150, "ignore_eos": True, "return_rollout": True}
        with httpx.stream("POST", server.url + "/v1/completions", json=body | {"stream": True}, timeout=300) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            os.kill(children_of(server.process.pid)[0], signal.SIGKILL)
            pieces = serving.events("\n\n".join(line for line in (first, *lines) if line))
        assert all("choices" in piece for piece in pieces), pieces[-1]
        for index, one in enumerate(done):
            mine = [piece["choices"][0] for piece in pieces if piece["choices"][0]["index"] == index]
            assert "".join(choice["text"] for choice in mine) == one.text
            for name in ("token_ids", "logprobs", "raw_logprobs"):
                assert [x for choice in mine for x in choice["rollout"][name]] == getattr(one, name)
        answer = httpx.post(server.url + "/v1/completions", json=body | {"prompt": "hello"}, timeout=300).json()
        assert "choices" in answer, answer
        assert answer["choices"][0]["rollout"]["logprobs"] == done[0].logprobs
        assert answer["usage"]["completion_tokens"] == 150
        with httpx.Client(base_url=server.url, timeout=300) as http:
            until(lambda: serving.metric(http, "vexact_replicas_alive") == 2)  # it is started again
            assert serving.metric(http, "vexact_decode_tokens_total") > 0
        assert server.end()[0] == 0
