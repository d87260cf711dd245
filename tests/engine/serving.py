"""A server on a tiny random model, and clients of it."""

import json

import pytest
from engine_models import build, byte_tokenizer

from vexact_engine import Engine, EngineConfig

pytest.importorskip("fastapi", reason="fastapi is not installed (extra serve)")
httpx = pytest.importorskip("httpx", reason="httpx is not installed (extra test)")

from vexact_engine.serve import Settings  # noqa: E402
from vexact_engine.serve.server import Server  # noqa: E402

TEMPLATE = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}{% if add_generation_prompt %}>{% endif %}"
CONFIG = EngineConfig(num_pages=400, page_size=4, max_num_batched_tokens=64, max_model_len=200, show_progress=False)
KEY = "correct horse battery staple"


def tokenizer(template=TEMPLATE):
    made = byte_tokenizer()
    made.chat_template = template
    return made


def engine(config=CONFIG, template=TEMPLATE, **options):
    model = build("Llama", vocab_size=259, **options)
    return Engine.from_pretrained(model, tokenizer=tokenizer(template), config=config)


def serve(engine, **settings):
    """A context manager: the server in a thread. It leaves the engine open."""
    return Server(Settings(**{"port": 0, "model_names": ("tiny",), "drain_seconds": 5.0, **settings})).start(engine)


def client(server, key=None, **options):
    headers = {} if key is None else {"authorization": f"Bearer {key}"}
    return httpx.Client(base_url=server.url, headers=headers, timeout=300, **options)


def events(text):
    """The JSON of a stream's events, without its [DONE], which must be the last."""
    blocks = [block for block in text.split("\n\n") if block]
    assert all(block.startswith("data: ") for block in blocks) and blocks[-1] == "data: [DONE]"
    return [json.loads(block[6:]) for block in blocks[:-1]]


def metric(http, name):
    """The value of one line of /metrics."""
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name + " ")]
    return float(lines[0].split()[-1]) if lines else 0.0
