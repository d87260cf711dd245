"""What no caller can mean: each is refused by name, and the engine is as it was."""

import re

import numpy as np
import pytest
import serving
import torch
from engine_models import bits, check_idle

from vexact_engine import SamplingParams

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


@pytest.mark.parametrize("messages", [5, None, "hi", b"hi", {"role": "user"}, {1}, np.float64(2), iter([])], ids=repr)
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
