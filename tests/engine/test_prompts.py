"""Prompts from every form of file, what is said about bad ones, and how they become token ids."""

import json

import pytest
from engine_models import fallback_tokenizer

from vexact_engine.proof.prompts import Prompt, PromptError, encode, parse_record, read_prompts, synthetic_prompts
from vexact_engine.text import Text


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_a_text_file_holds_a_prompt_a_line(tmp_path):
    prompts = read_prompts(write(tmp_path, "p.txt", "first\n\n  second line \r\n"))
    assert [(p.source.split(":")[-1], p.text) for p in prompts] == [("1", "first"), ("3", "second line")]


def test_jsonl_takes_texts_messages_and_ids(tmp_path):
    lines = [
        '"bare\u2028text"',
        '{"prompt": "text"}',
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
        '{"prompt": [{"role": "user", "content": "u"}]}',
        '{"prompt_token_ids": [1, 2, 3], "prompt": "the same as text"}',
        "[4, 5]",
    ]
    prompts = read_prompts(write(tmp_path, "p.jsonl", "\n".join(lines)))
    assert [p.text for p in prompts] == ["bare\u2028text", "text", None, None, None, None]
    assert prompts[2].messages == ({"role": "system", "content": "s"}, {"role": "user", "content": "u"})
    assert prompts[3].shown == "u"
    assert [p.token_ids for p in prompts[4:]] == [(1, 2, 3), (4, 5)]


def test_sharegpt_ends_before_the_answer(tmp_path):
    turns = [("human", "q1"), ("gpt", "a1"), ("human", "q2"), ("gpt", "a2")]
    record = {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}
    (prompt,) = read_prompts(write(tmp_path, "p.json", json.dumps([record])))
    assert [(m["role"], m["content"]) for m in prompt.messages] == [("user", "q1"), ("assistant", "a1"), ("user", "q2")]


def test_limit_does_not_look_further(tmp_path):
    path = write(tmp_path, "p.jsonl", '"one"\n"two"\nnot json\n')
    assert [p.text for p in read_prompts(path, 2)] == ["one", "two"]


@pytest.mark.parametrize(
    "name,text,message",
    [
        ("p.jsonl", '"ok"\n{"prompt": \n', r"p\.jsonl:2: not JSON"),
        ("p.jsonl", '"ok"\n\n{"question": "?"}\n', r"p\.jsonl:3: got an object with keys 'question', expected one of"),
        ("p.jsonl", '{"prompt": [1, "two"]}', r"p\.jsonl:1: prompt is a list, expected text"),
        ("p.jsonl", '{"token_ids": "12"}', r"p\.jsonl:1: token_ids is text, expected a list of token ids"),
        ("p.jsonl", '{"prompt": ""}', r"p\.jsonl:1: prompt is empty"),
        ("p.jsonl", "[true, false]", r"p\.jsonl:1: prompt is a list"),
        ("p.jsonl", "17", r"p\.jsonl:1: prompt is a number"),
        ("p.jsonl", '{"messages": [{"role": "user"}]}', r"p\.jsonl:1: messages\[0\] has no text"),
        ("p.json", '[{"conversations": [{"from": "gpt", "value": "a"}]}]', r"p\.json\[0\]: .* answers alone"),
        ("p.json", '{"prompt": "x"}', r"p\.json: got an object, expected a list"),
        ("p.json", "[1,\n2,", r"p\.json:2: not JSON"),
        ("p.txt", "\n  \n", r"p\.txt: no prompt in it"),
        ("p.jsonl", "", r"p\.jsonl: no prompt in it"),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path, name, text, message):
    with pytest.raises(PromptError, match=message):
        read_prompts(write(tmp_path, name, text))


def test_no_such_file_and_no_text(tmp_path):
    with pytest.raises(PromptError, match=r"missing\.txt: No such file"):
        read_prompts(tmp_path / "missing.txt")
    (tmp_path / "bytes.txt").write_bytes(b"abc\xff")
    with pytest.raises(PromptError, match="not UTF-8 text: byte 3 is 0xff"):
        read_prompts(tmp_path / "bytes.txt")


def test_synthetic_prompts_are_a_function_of_the_seed():
    first = synthetic_prompts(5, [3, 8], 100, seed=4)
    assert first == synthetic_prompts(5, [3, 8], 100, seed=4) != synthetic_prompts(5, [3, 8], 100, seed=5)
    assert [len(p.token_ids) for p in first] == [3, 8, 3, 8, 3]
    assert all(0 <= i < 100 for p in first for i in p.token_ids)
    with pytest.raises(PromptError, match="expected 1 or more"):
        synthetic_prompts(2, [0], 100)


class Tokenizer:
    """Characters as ids; a template that refuses systems."""

    chat_template = "yes"

    def __call__(self, text, add_special_tokens=True):
        return {"input_ids": [1] * add_special_tokens + [ord(c) for c in text]}

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        if messages[0]["role"] == "system":
            raise RuntimeError("no system prompts here")
        return "".join(f"<{m['content']}>" for m in messages) + ":"


def test_encoding_applies_the_template_where_it_belongs():
    tokenizer, text = Tokenizer(), Prompt("a:1", text="hi")
    chat = Prompt("a:2", messages=({"role": "user", "content": "hi"},))
    assert encode([text], tokenizer) == [[1, *map(ord, "hi")]]
    assert encode([text, chat], tokenizer, chat=True) == [[*map(ord, "<hi>:")]] * 2
    assert encode([chat, Prompt("a:3", token_ids=(7,))], tokenizer) == [[*map(ord, "<hi>:")], [7]]


def test_a_text_that_begins_with_the_beginning_has_no_second_one():
    """As the engine takes it."""
    tokenizer = fallback_tokenizer()
    for text in ("<s> ok", " ok"):
        assert encode([Prompt("a:1", text=text)], tokenizer) == [Text(tokenizer).encode(text)] == [[1, 266]]


def test_encoding_says_whose_prompt_is_at_fault():
    tokenizer = Tokenizer()
    with pytest.raises(PromptError, match=r"a:1: the chat template refuses it: no system prompts"):
        encode([parse_record("a:1", [{"role": "system", "content": "s"}])], tokenizer)
    with pytest.raises(PromptError, match=r"a:1: the model has no tokenizer"):
        encode([Prompt("a:1", text="x")], None)
    tokenizer.chat_template = None
    with pytest.raises(PromptError, match=r"a:1: the tokenizer has no chat template"):
        encode([Prompt("a:1", text="x")], tokenizer, chat=True)
