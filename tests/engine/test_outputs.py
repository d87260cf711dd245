"""Text from tokens: whole characters as soon as they are certain, and in the end what decoding all ids gives."""

from engine_models import byte_tokenizer
from hypothesis import given
from hypothesis import strategies as st

from vexact_engine.outputs import Detokenizer, decode, held_back

TOKENIZER = byte_tokenizer()


def pieces(ids):
    text = Detokenizer(TOKENIZER)
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
    assert "".join(pieces(ids)) == decode(TOKENIZER, ids)


def test_special_tokens_have_no_text():
    a, b = TOKENIZER("ab").input_ids
    assert pieces([1, a, 2, 2, b, 2]) == ["", "a", "", "", "b", "", ""]


def test_what_could_be_a_stop_string_is_held_back():
    assert held_back("abc", ("cde",)) == 1
    assert held_back("abcd", ("cde", "bcdx")) == 3
    assert held_back("abcde", ("cde",)) == 0
    assert held_back("", ("x",)) == 0
    assert held_back("aaa", ("aaaa",)) == 3
