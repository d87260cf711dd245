"""Text from tokens: whole characters as soon as they are certain, and in the end what decoding all ids gives."""

import pytest
from engine_models import byte_tokenizer, fallback_tokenizer
from hypothesis import example, given
from hypothesis import strategies as st

from vexact_engine.text import Detokenizer, Stops, Text, _Stop

TOKENIZER = byte_tokenizer()
TEXT = Text(TOKENIZER)


def pieces(ids):
    text = Detokenizer(TEXT)
    return [text.update(ids[:end]) for end in range(1, len(ids) + 1)] + [text.update(ids, final=True)]


@given(st.text(max_size=30))
def test_any_text_comes_in_whole_characters(text):
    ids = TOKENIZER(text).input_ids
    parts = pieces(ids)
    assert "".join(parts) == text
    assert all(part == "" or part in text for part in parts)
    if "\ufffd" not in text:  # which is taken for a character that is still incomplete
        ends = [len(text[: n + 1].encode()) for n in range(len(text))]
        assert [i + 1 for i, part in enumerate(parts[:-1]) if part] == ends and parts[-1] == ""


@given(st.lists(st.integers(0, 258), max_size=40))
def test_any_ids_give_what_decoding_all_of_them_gives(ids):
    assert "".join(pieces(ids)) == TEXT.decode(ids)


def test_special_tokens_have_no_text():
    a, b = TOKENIZER("ab").input_ids
    assert pieces([1, a, 2, 2, b, 2]) == ["", "a", "", "", "b", "", ""]


def held_back(text, stops):
    """As it is said, in quadratic time."""
    sizes = [size for stop in stops for size in range(1, len(stop)) if text.endswith(stop[:size])]
    return max(sizes, default=0)


@given(
    st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(st.text("abc", max_size=5), max_size=6),
)
@example(["cde", "bcdx"], ["abcd"])
@example(["cde"], ["abcde"])
@example(["aaaa"], ["a", "aa"])
@example(["b", "ab", "a"], ["..", "ab"])
@example(["a", "bbbbb"], ["a", "bb"])
def test_stop_strings_are_found_where_they_end_and_held_back_before(strings, parts):
    stops, text = Stops(strings), ""
    for part in parts:
        before, text = len(text), text + part
        stops.update(text)
        # What ends in the new part, of each string the first: a string that was whole before is none later.
        ends = (
            (at + len(s), at, i) for i, s in enumerate(strings) for at in range(len(text)) if text.startswith(s, at)
        )
        first = {i: at for end, at, i in sorted(ends, reverse=True) if end > before}
        found = min(((at, i) for i, at in first.items()), default=None)
        assert stops.found == (None if found is None else (strings[found[1]], found[0]))
        assert stops.held == held_back(text, strings)


def test_a_long_stop_string_costs_no_more_than_a_short_one(monkeypatch):
    """Its beginnings used to be compared one by one with each token: a thousandth of this took as long."""
    looked = 0
    grown = _Stop._grown

    def counted(stop, size, letter):
        nonlocal looked
        looked += 1
        return grown(stop, size, letter)

    monkeypatch.setattr(_Stop, "_grown", counted)
    stops, text = Stops(["ab" * 100_000 + "c"]), ""
    for _ in range(2_000):
        text += "abababax"
        stops.update(text)
    assert stops.held == 0 and looked <= 2 * len(text)


# Tokenizers that fall back to bytes: one token a byte, and a run of them is valid as a whole or not at all

FALLBACK = fallback_tokenizer()
WORDS = FALLBACK(" ok done", add_special_tokens=False)["input_ids"]


def bytes_of(text: str) -> list[int]:
    return FALLBACK.convert_tokens_to_ids([f"<0x{byte:02X}>" for byte in text.encode()])


def fallback_pieces(ids):
    text = Detokenizer(Text(FALLBACK))
    return [text.update(ids[:end]) for end in range(1, len(ids) + 1)] + [text.update(ids, final=True)]


@pytest.mark.parametrize("letters", ["\U0001f600", "\u4e2d\u6587", "\u00e9A\u00e9"], ids=ascii)
def test_letters_made_of_byte_tokens_come_whole(letters):
    ok, done = WORDS
    parts = fallback_pieces([ok, *bytes_of(letters), done])
    assert "".join(parts) == f"ok{letters} done"
    assert [part for part in parts if part] == ["ok", *letters, " done"]


def test_a_byte_that_is_missing_spoils_one_letter_alone():
    ok, done = WORDS
    ids = [ok, *bytes_of("\u4e2d"), bytes_of("\u4e2d")[0], done]
    assert "".join(fallback_pieces(ids)) == "ok\u4e2d\ufffd done" == Text(FALLBACK).whole(ids)
    assert "".join(fallback_pieces(ids[:-1])) == "ok\u4e2d\ufffd" == Text(FALLBACK).whole(ids[:-1])


@given(st.lists(st.one_of(st.sampled_from([*WORDS, 1, 2]), st.integers(3, 258)), max_size=30))
@example([35])  # a space as a byte, which the tokenizer strips where it begins a text
@example([1, 35, 35, WORDS[0], 35])
def test_one_text_whether_it_is_read_at_once_or_as_it_comes(ids):
    assert "".join(fallback_pieces(ids)) == Text(FALLBACK).whole(ids)
    plain = Text(FALLBACK).decode(ids)
    assert "\ufffd" in plain or plain == Text(FALLBACK).whole(ids)


@pytest.mark.parametrize(
    "tokenizer, ids",
    [
        (TOKENIZER, [2] * 2000),  # the end of the text, again and again
        (TOKENIZER, TOKENIZER("a").input_ids + TOKENIZER("\u4e2d").input_ids[:1] * 2000),  # letters that never end
        (FALLBACK, bytes_of("\u4e2d")[:1] * 2000),
        (FALLBACK, bytes_of("\U0001f600") * 500),
        (TOKENIZER, TOKENIZER("ab" * 1000).input_ids),
    ],
    ids=["special", "incomplete", "fallback-incomplete", "fallback-run", "text"],
)
def test_no_token_is_decoded_many_times(tokenizer, ids, monkeypatch):
    source, decoded = Text(tokenizer), 0
    real = source.decode

    def counting(token_ids):
        nonlocal decoded
        decoded += len(token_ids)
        return real(token_ids)

    monkeypatch.setattr(source, "decode", counting)
    text, seen = Detokenizer(source), []
    for end in range(1, len(ids) + 1):
        seen.append(text.update(ids[:end]))
    seen.append(text.update(ids, final=True))
    assert decoded <= 20 * len(ids)
    assert "".join(seen) == real(ids)


def test_the_tokenizer_is_the_engine_s_own():
    theirs = byte_tokenizer()
    text = Text(theirs)
    theirs(["a long text of some twenty bytes"], truncation=True, max_length=7, padding="max_length")
    assert text.encode("a long text") == TOKENIZER("a long text").input_ids
    text.tokenizer._tokenizer.enable_truncation(3)  # whatever state it is in
    assert text.encode("a long text") == TOKENIZER("a long text").input_ids


def test_a_templated_text_begins_once():
    text = Text(fallback_tokenizer())
    assert text.encode(" ok") == [1, WORDS[0]] == text.encode("<s> ok")
