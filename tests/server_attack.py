"""Attacks a server: `python tests/server_attack.py [--minutes 5] [--replicas 2]`.

`vexact serve` on a tiny random model, in a process of its own. Strangers send bodies drawn at random (broken JSON,
wrong values, texts far too long, deep nesting), open connections that say nothing or a byte at a time, begin streams
and take nothing, and leave at any moment. Beside them honest clients ask what was asked before: each is answered within
its limit, with the same tokens and log-probabilities. At the end nothing may be held, and memory must not have grown.
The last line is a JSON object; the exit status is 1 where an answer differs, is late or is none of HTTP's, where
anything is held or grows, or where the log has a fault.
"""

import argparse
import contextlib
import json
import random
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "engine"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import serving
from engine_models import build
from serving import httpx
from test_serve_process import Process

LIMIT, SLACK = 10.0, 20.0  # seconds of a request; and what a busy machine may take longer
FILES = 512
OPTIONS = ("--request-timeout", LIMIT, "--body-timeout", 2, "--header-timeout", 2, "--send-timeout", 2)
OPTIONS += ("--max-body-mb", 2, "--num-pages", 600, "--max-model-len", 400, "--log-level", "warning")
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
STATUSES = {200, 400, 404, 405, 408, 413, 415, 421, 429, 503, 504}
FIELDS = [
    "n",
    "seed",
    "stop",
    "stream",
    "top_k",
    "top_p",
    "min_p",
    "echo",
    "logprobs",
    "prompt_logprobs",
    "best_of",
    "max_tokens",
    "temperature",
    "stop_token_ids",
    "tools",
    "stream_options",
    "messages",
    "prompt",
    "tokens",
    "add_special_tokens",
    "skip_special_tokens",
    "chat_template_kwargs",
    "prompt_token_ids",
    "model",
    "zzz",
]
SHOWN = 20
GROWTH_MIB = 24.0  # that the last quarter of the time may hold more than the second


def honest(index: int) -> dict:
    return {
        "prompt": ["hello", f"a longer one, {index}"], "n": 2, "seed": index, "max_tokens": 12, "temperature": 0.8,
        "return_rollout": True, "ignore_eos": bool(index % 2), "logprobs": 2,
    }  # fmt: skip


class Strangers:
    """What they do to one server, and what is seen of it."""

    def __init__(self, server: Process, seed: int):
        self.server, self.seed = server, seed
        host, port = server.url.removeprefix("http://").split(":")
        self.address = host, int(port)
        self.counts: Counter = Counter()
        self.failures: list[str] = []
        self.slowest = 0.0
        self.stop = threading.Event()

    def fail(self, what: str) -> None:
        self.failures.append(what)
        if len(self.failures) <= SHOWN:
            sys.stdout.write(what + "\n")
            sys.stdout.flush()

    # Bodies

    def value(self, rng: random.Random, depth: int = 0):
        kinds = [None, True, False, 0, -1, 1, 2.0, 1e308, -(2**63), 2**64, 10**30, "", "a", "<eos>", [], {}]
        kinds += ["\u00e9" * 50, "x" * rng.choice([1, 1000, 300_000]), [5] * rng.choice([1, 5000, 100_000])]
        if depth < 3 and rng.random() < 0.3:
            return [self.value(rng, depth + 1) for _ in range(rng.randint(0, 4))]
        if depth < 3 and rng.random() < 0.3:
            names = ["role", "content", "type", "text", "tool_calls", "token_ids", "prompt_token_ids", "function", "x"]
            return {rng.choice(names): self.value(rng, depth + 1) for _ in range(rng.randint(0, 4))}
        return rng.choice(kinds)

    def body(self, rng: random.Random) -> bytes:
        draw = rng.random()
        if draw < 0.1:
            return rng.randbytes(rng.randint(0, 2000))
        if draw < 0.15:
            return b'{"prompt": ' + b"[" * 100_000
        if draw < 0.2:
            return b'{"prompt": "a", "stop_token_ids": [' + b",".join([b"1"] * 300_000) + b"]}"
        if draw < 0.25:
            return b"{" * rng.randint(1, 10**6)
        made = {"prompt": "hi"} if rng.random() < 0.5 else {"messages": [{"role": "user", "content": "hi"}]}
        made |= {name: self.value(rng) for name in rng.sample(FIELDS, rng.randint(0, 3))}
        return json.dumps(made).encode()

    def hostile(self, rng: random.Random) -> None:
        kind = rng.choice(["application/json"] * 9 + ["text/plain"])
        body, path = self.body(rng), rng.choice(PATHS)
        begin = time.monotonic()
        with httpx.Client(base_url=self.server.url, timeout=LIMIT + SLACK) as http:
            answer = http.post(path, content=body, headers={"content-type": kind})
        self.note(time.monotonic() - begin, answer.status_code, f"{path} {body[:200]!r}")
        if answer.status_code >= 400 and set(answer.json()) != {"error"}:
            self.fail(f"{path} {body[:200]!r}: {answer.text[:200]}")

    def note(self, seconds: float, status: int, what: str) -> None:
        self.counts[f"status_{status}"] += 1
        self.slowest = max(self.slowest, seconds)
        if status not in STATUSES:
            self.fail(f"{what}: {status}")
        if seconds > LIMIT + SLACK:
            self.fail(f"{what}: after {seconds:.1f} s")

    # Sockets

    def silent(self, rng: random.Random) -> None:
        """Many that say nothing, or a header a byte at a time, or a body that does not come."""
        starts = [b"", b"G", b"POST /v1/completions HTTP/1.1\r\n", b"\x16\x03\x01" + rng.randbytes(40), b"\r\n" * 20]
        head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        starts += [head + b"content-length: 1000\r\n\r\n{", head + b"transfer-encoding: chunked\r\n\r\nfffff\r\n{"]
        many = []
        with contextlib.ExitStack() as stack:
            for _ in range(rng.choice([5, 40])):
                with contextlib.suppress(OSError):
                    raw = stack.enter_context(socket.create_connection(self.address, timeout=5))
                    raw.sendall(rng.choice(starts))
                    many.append(raw)
            end = time.monotonic() + rng.random() * 4
            while time.monotonic() < end and not self.stop.wait(0.2):
                for raw in many:
                    with contextlib.suppress(OSError):
                        raw.send(b"x")
        self.counts["sockets"] += len(many)

    def leave(self, rng: random.Random) -> None:
        """Begin something, and go: at once, or after some of it; or stay and take nothing."""
        body = {"prompt": rng.choice(["hi", "x" * 300, "y" * 400_000]), "max_tokens": 60, "ignore_eos": True}
        body |= {"stream": rng.random() < 0.6, "n": rng.choice([1, 8, 64]), "return_rollout": True, "logprobs": 5}
        raw_body = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        head += f"content-length: {len(raw_body)}\r\n\r\n"
        with contextlib.suppress(OSError), socket.create_connection(self.address, timeout=5) as raw:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            raw.sendall(head.encode() + raw_body)
            if rng.random() < 0.5:
                raw.recv(rng.choice([1, 1000]))
            self.stop.wait(rng.choice([0.0, 0.05, 0.5, 4.0]))
        self.counts["left"] += 1

    # Those who mean it

    def ask(self, http, index: int) -> list:
        """The choices, as often as it takes; what counts as late is each answer."""
        for _ in range(200):
            begin = time.monotonic()
            try:
                answer = http.post("/v1/completions", json=honest(index))
            except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError):  # its place was somebody else's
                self.counts["connected_again"] += 1
                time.sleep(0.05)
                continue
            self.note(time.monotonic() - begin, answer.status_code, f"an honest request {index}")
            if answer.status_code == 200:
                return answer.json()["choices"]
            if answer.status_code not in (429, 503, 504):
                self.fail(f"an honest request {index}: {answer.status_code} {answer.text[:200]}")
                return []
            self.counts["asked_again"] += 1
            time.sleep(0.1)
        self.fail(f"an honest request {index} was never answered")
        return []

    def honest(self, rng: random.Random, expected: list) -> None:
        index = rng.randrange(len(expected))
        with httpx.Client(base_url=self.server.url, timeout=LIMIT + SLACK) as http:
            found = self.ask(http, index)
        self.counts["honest"] += 1
        if found and found != expected[index]:
            self.counts["differ"] += 1
            self.fail(f"an honest request {index} has another answer")

    def run(self, seconds: float) -> dict:
        with httpx.Client(base_url=self.server.url, timeout=300) as http:
            expected = [self.ask(http, index) for index in range(6)]
        works = [self.hostile] * 3 + [self.silent] * 2 + [self.leave] * 2
        works += [lambda rng: self.honest(rng, expected)] * 2
        threads = [
            threading.Thread(target=self._loop, args=(work, random.Random(self.seed * 1000 + number)), daemon=True)
            for number, work in enumerate(works)
        ]
        for thread in threads:
            thread.start()
        memory, end, files = [], time.monotonic() + seconds, 0
        while (left := end - time.monotonic()) > 0 and len(self.failures) < SHOWN:
            time.sleep(min(left, 1.0))
            memory.append(self._resident())
            files = max(files, len(list(Path(f"/proc/{self.server.process.pid}/fd").iterdir())))
        self.stop.set()
        for thread in threads:
            thread.join(LIMIT + 2 * SLACK)
            if thread.is_alive():
                self.fail(f"{thread.name} is not answered")
        self._nothing_is_held()
        quarter = len(memory) // 4
        grown = 0.0
        if quarter >= 20:  # in less time little is met twice
            grown = statistics.median(memory[-quarter:]) - statistics.median(memory[quarter : 2 * quarter])
            if grown > GROWTH_MIB:
                self.fail(f"memory has grown by {grown:.1f} MiB: {memory[:: max(1, len(memory) // 20)]}")
        code, said = self.server.end()
        if code or "Traceback" in said:
            self.fail(f"the server ended with {code}: {said[-1500:]}")
        return {
            "room": "server_attack", "minutes": round(seconds / 60, 2), "seed": self.seed,
            "counts": dict(sorted(self.counts.items())), "slowest_s": round(self.slowest, 2), "files": files,
            "log_bytes": len(said), "memory_mib": [round(m) for m in memory[:: max(1, len(memory) // 12)]],
            "grown_mib": round(grown, 1), "failures": self.failures[:SHOWN],
        }  # fmt: skip

    def _loop(self, work, rng: random.Random) -> None:
        while not self.stop.is_set():
            try:
                work(rng)
            except (httpx.ConnectError, httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError):
                self.counts["turned_away"] += 1  # an older connection that was silent, or there is no place
            except Exception as error:
                self.fail(f"{type(error).__name__}: {error}")

    def _resident(self) -> float:
        status = Path(f"/proc/{self.server.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1]) / 1024

    def _nothing_is_held(self) -> None:
        names = ["vexact_requests_in_progress", "vexact_sequences_running", "vexact_sequences_waiting"]
        names.append("vexact_kv_cache_used_ratio")
        end, held = time.monotonic() + LIMIT + 2 * SLACK, names
        with httpx.Client(base_url=self.server.url, timeout=60) as http:
            while held and time.monotonic() < end:
                time.sleep(0.2)
                held = [name for name in names if serving.metric(http, name)]
        if held:
            self.fail(f"at the end there are {', '.join(held)}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, help="engines in processes of their own behind the server (none)")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        build("Llama", vocab_size=300, max_position_embeddings=512).save_pretrained(folder)
        serving.tokenizer().save_pretrained(folder)
        options = [*OPTIONS, *(("--replicas", args.replicas) if args.replicas else ())]
        with Process(folder, *options, files=FILES) as server:
            found = Strangers(server, args.seed).run(60 * args.minutes)
    sys.stdout.write(json.dumps(found) + "\n")
    return int(bool(found["failures"]))


if __name__ == "__main__":
    raise SystemExit(main())
