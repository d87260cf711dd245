"""What ends an answer beside its length: end-of-sequence ids, stop strings, special tokens; and what of it is text."""

import asyncio

import pytest
import torch
from engine_models import build, byte_tokenizer, fallback_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.text import Detokenizer, Text
from vexact_engine.weights.load import load

PAD, BOS, EOS = 0, 1, 2  # of the byte tokenizer; all are special
CONFIG = EngineConfig(num_pages=200, page_size=4, show_progress=False)


def any_token(eos):
    """A model to which all of 259 tokens are equally likely, so that a seed draws each of them soon."""
    model = build("Llama", vocab_size=259, tie_word_embeddings=False)
    with torch.no_grad():
        model.model.norm.weight.zero_()
    model.generation_config.eos_token_id = model.config.eos_token_id = eos
    return model


def answers(engine, **params):
    asked = [SamplingParams(max_new_tokens=100, seed=seed, **params) for seed in range(48)]
    return engine.generate([[65, 66]] * 48, asked)


@pytest.fixture(scope="module")
def engine():
    with Engine.from_pretrained(any_token(EOS), tokenizer=byte_tokenizer(), config=CONFIG) as made:
        yield made


def test_either_of_two_ends_of_a_text_ends_it_and_that_is_said_once(tmp_path, caplog):
    """A base model that was trained to chat: of its two files one still has the other end."""
    any_token(PAD).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    with Engine.from_pretrained(tmp_path, device="cpu", config=CONFIG) as engine:
        ended = {token for c in answers(engine) for token in c.token_ids if token in (PAD, EOS)}
        for c in answers(engine):
            assert not {PAD, EOS} & set(c.token_ids[:-1])
            assert (c.finish_reason == "stop") == (c.token_ids[-1] in (PAD, EOS))
        assert ended == {PAD, EOS}, "both were drawn"
        ignoring = answers(engine, ignore_eos=True)
        assert any({PAD, EOS} <= set(c.token_ids[:-1]) for c in ignoring)
    said = [r.getMessage() for r in caplog.records if "a text ends with" in r.getMessage()]
    assert len(said) == 1 and "with 0, as the configuration says, and with 2, the tokenizer's own" in said[0]


def test_nothing_is_said_where_both_are_the_same(tmp_path, caplog):
    assert load(any_token([EOS, PAD]), tokenizer=byte_tokenizer()).eos_token_ids == (PAD, EOS)
    assert load(any_token(None), tokenizer=byte_tokenizer()).eos_token_ids == (EOS,)
    assert load(any_token(PAD)).eos_token_ids == (PAD,)
    assert not caplog.records


@pytest.mark.parametrize("stop", ["<bos>", ["never this", "<bos>"]])
def test_a_special_token_s_text_stops_at_its_id(engine, stop):
    done = answers(engine, stop=stop, ignore_eos=True)
    assert any(c.token_ids[-1] == BOS for c in done)
    for c in done:
        assert BOS not in c.token_ids[:-1]
        if c.token_ids[-1] == BOS:
            assert (c.finish_reason, c.stop_reason) == ("stop", BOS)
        assert "<bos>" not in c.text


def test_a_stop_string_that_could_never_be_found_is_refused(engine):
    refused, other = engine.generate([[65]] * 2, [SamplingParams(stop="x<bos>"), SamplingParams(max_new_tokens=1)])
    assert refused.finish_reason == "error" and other.finish_reason == "length"
    assert "stop has 'x<bos>', expected '<bos>' alone, or skip_special_tokens=False" in refused.error


def test_a_special_token_that_the_model_has_no_row_for_is_refused_as_a_stop():
    """A tokenizer with more tokens than its model: nothing ever ends there."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    with Engine.from_pretrained(any_token(EOS), tokenizer=tokenizer, config=CONFIG) as engine:
        params = [SamplingParams(stop="<end>"), SamplingParams(stop_token_ids=[3, 259])]
        *refused, other = engine.generate([[65]] * 3, [*params, SamplingParams(max_new_tokens=1, stop="<bos>")])
    assert all("stop_token_ids has 259, expected ids below 259" in c.error for c in refused)
    assert other.finish_reason == "length"


def streamed(engine, asked):
    """What is streamed of each, side by side."""

    async def one(params):
        return [item async for item in engine.stream([65, 66], params)]

    async def main():
        return await asyncio.gather(*map(one, asked))

    return asyncio.run(main())


def test_special_tokens_are_in_the_text_where_that_is_asked_for(engine):
    plain = engine.tokenizer
    met = set()
    for c in answers(engine, skip_special_tokens=False):
        ids = c.token_ids[:-1] if c.finish_reason == "stop" else c.token_ids
        assert c.text == plain.decode(ids, skip_special_tokens=False)
        met |= {"<bos>", "<eos>"} & set(plain.convert_ids_to_tokens(c.token_ids))
    assert met == {"<bos>", "<eos>"}
    for c in answers(engine, skip_special_tokens=False, include_stop_str_in_output=True):
        assert c.text == plain.decode(c.token_ids, skip_special_tokens=False)
    for c in answers(engine):
        assert c.text == plain.decode(c.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_string_stays_where_that_is_asked_for(engine, skip, include):
    options = {"skip_special_tokens": skip, "include_stop_str_in_output": include}
    without = answers(engine, stop=("a", "bc"), skip_special_tokens=skip)
    asked = [SamplingParams(max_new_tokens=100, seed=seed, stop=("a", "bc"), **options) for seed in range(48)]
    stopped, streams = 0, streamed(engine, asked)
    for c, bare, items in zip(answers(engine, stop=("a", "bc"), **options), without, streams, strict=True):
        assert c.token_ids == bare.token_ids
        if isinstance(c.stop_reason, str):
            stopped += 1
            assert c.text == bare.text + c.stop_reason * include
        elif c.stop_reason is not None:
            assert c.text == bare.text + "<eos>" * (include and not skip)
        assert "".join(item.text for item in items) == c.text
    assert stopped > 10


def test_a_string_with_a_special_token_in_it_is_found_where_those_are_in_the_text(engine):
    done = answers(engine, stop="<bos>a", skip_special_tokens=False, ignore_eos=True)
    ids = byte_tokenizer()("a").input_ids
    for c in done:
        at = next((i for i in range(len(c.token_ids) - 1) if c.token_ids[i : i + 2] == [BOS, *ids]), None)
        assert at is None or (at == len(c.token_ids) - 2 and c.stop_reason == "<bos>a")


TEXTS = [Text(byte_tokenizer()).verbatim(), Text(fallback_tokenizer()).verbatim()]


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 258), max_size=40))
def test_verbatim_text_is_the_same_token_by_token(text, ids):
    one_by_one = Detokenizer(text)
    for count in range(len(ids) + 1):
        one_by_one.update(ids[:count])
    one_by_one.update(ids, final=True)
    assert one_by_one.text == text.whole(ids)


class InPython:
    """A tokenizer with letters alone, which knows no id beyond them."""

    letters = "abcdefgh"

    def get_vocab(self):
        return {letter: i for i, letter in enumerate(self.letters)}

    def decode(self, ids, **_):
        return "".join(self.letters[i] for i in ids)


@given(st.lists(st.integers(0, 12), max_size=30), st.integers(1, 5))
def test_ids_that_a_tokenizer_has_no_token_for_have_no_text(ids, step):
    text = Text(InPython())
    streamed = Detokenizer(text)
    for end in range(0, len(ids), step):
        streamed.update(ids[:end])
    streamed.update(ids, final=True)
    assert streamed.text == text.whole(ids) == "".join(InPython.letters[i] for i in ids if i < 8)


def test_what_else_a_tokenizer_raises_is_raised():
    text = Text(InPython())
    text.tokenizer.letters = "ab"
    text._ids = {0, 1, 2}
    with pytest.raises(IndexError):
        text.decode([0, 2])


@pytest.mark.parametrize("name", ["top_k", "max_new_tokens", "min_new_tokens", "num_top_logprobs"])
def test_integers_that_no_message_can_carry_are_refused(name):
    with pytest.raises(ValueError, match=rf"^SamplingParams: {name} is \d+, expected an integer .* below 2\*\*63"):
        SamplingParams(**{name: 2**63})
    with pytest.raises(ValueError, match="expected token ids of 0 or more, below"):
        SamplingParams(stop_token_ids=[2**64])


def test_stop_tokens_have_a_most():
    assert len(SamplingParams(stop_token_ids=range(4096)).stop_token_ids) == 4096
    for many, got in ((range(5_000_000), "5000000 ids"), (iter(range(5_000_000)), "more")):
        with pytest.raises(ValueError, match=f"stop_token_ids has {got}, expected at most 4096"):
            SamplingParams(stop_token_ids=many)


def test_half_a_character_is_no_stop_string():
    with pytest.raises(ValueError, match=r"^SamplingParams: stop is .*, expected Unicode"):
        SamplingParams(stop=["a", "\ud800"])


def test_minus_one_is_no_top_k_as_in_vllm():
    assert SamplingParams(top_k=-1).top_k == 0


INTEGERS = ("max_new_tokens", "min_new_tokens", "top_k", "n", "num_top_logprobs", "seed")
ANY_INTEGER = st.one_of(
    st.integers(-2, 5), st.integers(), st.sampled_from([2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63)])
)


@given(
    st.fixed_dictionaries({}, optional={name: ANY_INTEGER for name in INTEGERS}),
    st.lists(ANY_INTEGER, max_size=3),
    st.lists(st.text(st.characters(), max_size=3), max_size=2),
    st.lists(ANY_INTEGER, max_size=3),
    st.text(st.characters(), max_size=3),
)
def test_what_is_not_refused_reaches_a_replica_as_it_is(integers, stop_token_ids, stop, prompt_ids, name):
    """One message that cannot be made would be a fault of the server for the whole batch."""
    from vexact_engine.parallel import messages as m
    from vexact_engine.request import check_ids, check_name

    try:
        params = SamplingParams(**integers, stop_token_ids=stop_token_ids, stop=stop)
        check_ids(prompt_ids, 1000)
        check_name("generate", name)
    except (TypeError, ValueError):
        return
    sent = m.Add(1, prompt_ids, params, name, False)
    assert m.for_replica(m.encode([sent])) == [sent]
