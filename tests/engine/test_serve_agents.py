"""What clients of this field send beside a prompt: fields that ask for nothing, tools, conversations of agents, and
token ids that were drawn and come back."""

import functools
import json
import re

import pytest
import serving
import torch
from engine_models import build, byte_tokenizer, check_idle, fallback_tokenizer

import vexact_ops as vx
from vexact_engine import Engine, EngineConfig, SamplingParams
from vexact_engine.serve.answers import _Offsets
from vexact_engine.serve.errors import APIError
from vexact_engine.serve.tokens import Chat, Tokens

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
USER = [{"role": "user", "content": "hi"}]
CONFIG = EngineConfig(num_pages=2000, page_size=4, max_num_batched_tokens=128, max_model_len=4000, show_progress=False)
# As Qwen's: an end token after each message, tools in front, calls and answers of tools.
TEMPLATE = """{%- if tools %}[tools:{{ tools | tojson }}]<eos>{% endif %}
{%- for m in messages %}[{{ m.role }}:{{ m.reasoning_content | default('') }}{{ m.content }}
{%- for call in m.tool_calls or [] %}<call>{{ call.function.name }}{{ call.function.arguments | tojson }}</call>
{%- endfor %}
{%- if m.tool_call_id %}#{{ m.tool_call_id }}{% endif %}<eos>{% endfor %}
{%- if add_generation_prompt %}[assistant:{% endif %}"""


@pytest.fixture(scope="module")
def engine():
    model = build("Llama", vocab_size=259, max_position_embeddings=4096)
    tokenizer = serving.tokenizer(TEMPLATE)
    with Engine.from_pretrained(model, tokenizer=tokenizer, config=CONFIG) as made:
        yield made
        check_idle(made)


@pytest.fixture(scope="module")
def http(engine):
    with serving.serve(engine) as server, serving.client(server) as made:
        yield made


def ids_of(text):
    return byte_tokenizer()(text, add_special_tokens=False).input_ids


@pytest.mark.parametrize(
    "nothing",
    [
        {"best_of": 1}, {"best_of": 1, "n": 1}, {"stop": ""}, {"stop": [""]}, {"stop": []}, {"early_stopping": False},
        {"use_beam_search": False}, {"max_tokens": 16.0}, {"n": 1.0}, {"logprobs": False}, {"add_special_tokens": True},
        {"top_k": -1}, {"request_id": "abc"}, {"cache_salt": "7"}, {"skip_special_tokens": True}, {"priority": 0},
        {"stream_options": {"include_usage": True}}, {"include_stop_str_in_output": False}, {"min_tokens": 0},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "best_of": None, "suffix": None},
        {"user": "ann", "response_format": {"type": "text"}, "store": False, "metadata": {"a": "b"}},
    ],
    ids=lambda nothing: " ".join(nothing),
)  # fmt: skip
def test_values_that_ask_for_nothing_are_accepted(http, nothing):
    plain = http.post(TEXT, json={"prompt": "hi", "seed": 1}).json()["choices"]
    answer = http.post(TEXT, json={"prompt": "hi", "seed": 1, **nothing})
    assert answer.status_code == 200 and answer.json()["choices"] == plain, answer.text


@pytest.mark.parametrize(
    "nothing",
    [
        {"tools": []}, {"tools": None, "tool_choice": "none"}, {"top_logprobs": 0}, {"reasoning_effort": "none"},
        {"logprobs": False, "top_logprobs": 0}, {"add_special_tokens": False}, {"parallel_tool_calls": True},
    ],
    ids=lambda nothing: " ".join(nothing),
)  # fmt: skip
def test_values_that_ask_nothing_of_a_chat_are_accepted(http, nothing):
    plain = http.post(CHAT, json={"messages": USER, "seed": 1, "max_tokens": 5}).json()["choices"]
    answer = http.post(CHAT, json={"messages": USER, "seed": 1, "max_tokens": 5, **nothing})
    assert answer.status_code == 200 and answer.json()["choices"] == plain, answer.text


def test_usage_comes_with_every_piece_where_that_is_asked_for(http):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = {"prompt": "hello", "max_tokens": 9, "ignore_eos": True, "stream": True, "logprobs": 0}
    pieces = serving.events(http.post(TEXT, json=body | {"stream_options": options}).text)
    counts = [piece["usage"]["completion_tokens"] for piece in pieces]
    assert counts == sorted(counts) and counts[-1] == 9 and counts[0] <= 9
    assert all(piece["usage"]["prompt_tokens"] == 5 for piece in pieces)
    said = serving.events(http.post(TEXT, json=body | {"stream_options": {"include_usage": True}}).text)
    assert [piece["usage"] is None for piece in said] == [True] * (len(said) - 1) + [False]


def test_special_tokens_and_stop_strings_are_in_the_text_where_that_is_asked_for(engine, http):
    options = {"seed": 3, "max_tokens": 60, "temperature": 3.0}
    for given in ({"skip_special_tokens": False}, {"stop": ["a"]}, {"include_stop_str_in_output": True, "stop": ["a"]}):
        named = {name: value for name, value in options.items() if name != "max_tokens"}
        (done,) = engine.generate("x", SamplingParams(max_new_tokens=60, **named, **given))
        for stream in (False, True):
            body = {"prompt": "x", **options, **given, "stream": stream, "logprobs": 0}
            answer = http.post(TEXT, json=body)
            if stream:
                text = "".join(choice["text"] for piece in serving.events(answer.text) for choice in piece["choices"])
            else:
                text = answer.json()["choices"][0]["text"]
            assert text == done.text


@pytest.mark.parametrize("options", [{"skip_special_tokens": False}, {}], ids=["specials", "no-specials"])
@pytest.mark.parametrize("prompt", [[*ids_of("ab"), 2, *ids_of("c")], "ab<eos>c"], ids=["ids", "text"])
def test_text_offsets_count_special_tokens_that_are_in_the_text(http, prompt, options):
    """Those of a prompt are in it, whether an answer's are or not."""
    body = {"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 2, **options}
    (choice,) = http.post(TEXT, json=body).json()["choices"]
    assert choice["text"].startswith("ab<eos>c") and choice["logprobs"]["text_offset"][:5] == [0, 1, 2, 7, 8]


def test_text_offsets_are_places_in_texts_of_tokenizers_that_strip_them():
    """Llama 2's: its tokenizer puts <s> before a text, and decodes none of the blank before the first word."""
    tokenizer, tokens = fallback_tokenizer(), Tokens(fallback_tokenizer())
    for text in (" ok done", " done ok ok", "ok"):
        prompt = tokenizer(text).input_ids
        drawn = tokenizer.convert_tokens_to_ids(["\u2581ok", "<0xC3>", "<0xA9>", "\u2581done", "</s>", "ne"])
        for special in (False, True):
            offsets = _Offsets(tokens, special)
            assert offsets.of_prompt(prompt, text)[1] == 0, "of <s> nothing is there"
            places = [place - len(text) for place in offsets.of(drawn)]
            said = tokenizer.decode(drawn, skip_special_tokens=not special)
            assert said == ("ok\u00e9 done</s>ne" if special else "ok\u00e9 donene")
            assert places == [0, 2, 2, 3, 8, 12 if special else 8]
        places = _Offsets(tokens, True).of_prompt(prompt, tokenizer.decode(prompt))
        assert places[:2] == [0, 3]


# Agents

CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


def prompt_of(http, **body):
    body = {"max_tokens": 1, "return_token_ids": True, **body}
    answer = http.post(CHAT, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["prompt_token_ids"]


def test_tools_calls_ids_and_reasoning_go_to_the_template(http):
    messages = [
        *USER,
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL], "refusal": None},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    expected = f"[tools:{json.dumps([TOOL])}]<eos>[user:hi<eos>[assistant:hm<call>add" + '{"a": 1}</call><eos>'
    expected += "[tool:2#call_1<eos>[assistant:"
    assert prompt_of(http, messages=messages, tools=[TOOL], tool_choice="auto") == ids_of(expected)


def test_arguments_that_are_no_object_stay_as_they_were_drawn(http):
    for text, written in (("{oops", '"{oops"'), ("[1]", '"[1]"'), ("{}", "{}")):
        call = {**CALL, "function": {"name": "add", "arguments": text}}
        messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
        assert prompt_of(http, messages=messages) == ids_of(
            f"[user:hi<eos>[assistant:<call>add{written}</call><eos>[assistant:"
        )


def test_an_effort_goes_to_a_template_that_knows_it():
    tokens = Tokens(serving.tokenizer("{{ reasoning_effort }}:{{ messages[0].content }}"))
    assert tokens.chat(Chat(USER, effort="high")) == ids_of("high:hi")


def test_a_whole_chat_may_come_as_ids(engine, http):
    ids = ids_of("[user:hi<eos>[assistant:")
    asked = {"seed": 4, "max_tokens": 6, "return_rollout": True}
    one = http.post(CHAT, json={"messages": USER, **asked}).json()["choices"][0]
    assert http.post(CHAT, json={"messages": [], "prompt_token_ids": ids, **asked}).json()["choices"][0] == one
    (done,) = engine.generate([ids], SamplingParams(seed=4, max_new_tokens=6))
    assert one["rollout"]["logprobs"] == done.logprobs


def conversation(ask, turns):
    """An agent's: each answer comes back with its ids, and what a tool said to it. Returns all ids at the end, and of
    each drawn token its place among them and its log-probability."""
    messages, drawn = [{"role": "system", "content": "use tools"}, {"role": "user", "content": "é?"}], []
    before = []
    for turn in range(turns):
        choice = ask(messages, turn)
        prompt, ids = choice["prompt_token_ids"], choice["token_ids"]
        assert prompt[: len(before)] == before, "what was drawn came back as it was"
        assert prompt[len(before) :] == ids_of(expected_after(before, messages, turn))
        before = prompt + ids
        drawn += zip(range(len(prompt), len(before)), choice["rollout"]["logprobs"])
        name, content = f"call_{turn}", choice["message"]["content"]
        messages.append(
            {"role": "assistant", "content": content, "tool_calls": [CALL | {"id": name}], "token_ids": ids,
             "prompt_token_ids": prompt}
        )  # fmt: skip
        messages.append({"role": "tool", "tool_call_id": name, "content": f"result {turn} \u2603"})
    return before, drawn


def expected_after(before, messages, turn):
    if not before:
        return "[system:use tools<eos>[user:é?<eos>[assistant:"
    end = "" if before[-1] == 2 else "<eos>"  # an answer that ended by itself has one
    return f"{end}[tool:result {turn - 1} \u2603#call_{turn - 1}<eos>[assistant:"


def test_a_long_conversation_of_an_agent_has_the_trainer_s_bits(engine, http):
    """Twenty turns through the server, with answers that no tokenizer would give back; all of it scored once more by
    the trainer, in one row."""
    asked = {"max_tokens": 24, "return_token_ids": True, "return_rollout": True, "temperature": 0.9}

    def ask(messages, turn):
        body = {"messages": messages, "seed": turn, **asked, "stop_token_ids": list(range(10, 20))}
        answer = http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        if turn:
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        return answer.json()["choices"][0]

    row, drawn = conversation(ask, 20)
    texts = byte_tokenizer().decode(row, skip_special_tokens=False)
    assert ids_of(texts) != row, "tokenizing it again gives others"
    model = build("Llama", vocab_size=259, max_position_embeddings=4096)
    with vx.patch.hf(model) as handle, torch.no_grad():
        scored = handle.logprobs(torch.tensor([row]), temperature=0.9)[0].tolist()
    assert len(drawn) > 200 and [scored[place - 1] for place, _ in drawn] == [value for _, value in drawn]


def test_a_conversation_through_the_openai_client(engine):
    openai = pytest.importorskip("openai", reason="openai is not installed (extra test)")
    extra = {"return_token_ids": True, "return_rollout": True}
    with serving.serve(engine) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        create = functools.partial(client.chat.completions.create, model="tiny", max_tokens=12, extra_body=extra)

        def ask(messages, turn):
            return create(messages=messages, seed=turn, tools=None).choices[0].model_dump()

        with client:
            row, drawn = conversation(ask, 4)
    assert len(drawn) == len({place for place, _ in drawn}) and len(row) > 4 * 12


def test_a_template_that_does_not_have_the_answer_as_it_is_refuses():
    tokens = Tokens(serving.tokenizer("{% for m in messages %}{{ m.content | upper }}{% endfor %}"))
    messages = [*USER, {"role": "assistant", "content": "x", "prompt_token_ids": [5], "token_ids": [6]}]
    with pytest.raises(Exception, match="has the last prompt_token_ids' message 0 times"):
        tokens.chat(Chat(messages))


def test_a_kept_answer_may_be_gone_on_with(http):
    message = {"role": "assistant", "content": "x", "prompt_token_ids": ids_of("[user:hi"), "token_ids": [5, 200]}
    body = {"messages": [*USER, message], "continue_final_message": True}
    assert prompt_of(http, **body) == [*ids_of("[user:hi"), 5, 200]


# Tokens


def test_tokenize_and_detokenize(http):
    answer = http.post("/tokenize", json={"prompt": "hé", "return_token_strs": True, "model": "tiny"}).json()
    assert answer["tokens"] == ids_of("hé") and answer["count"] == 3 and answer["max_model_len"] == 4000
    assert answer["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    chat = http.post("/tokenize", json={"messages": USER, "tools": [TOOL]}).json()
    assert chat["tokens"] == ids_of(f"[tools:{json.dumps([TOOL])}]<eos>[user:hi<eos>[assistant:")
    assert http.post("/detokenize", json={"tokens": [1, *answer["tokens"]]}).json() == {"prompt": "<bos>hé"}
    assert http.post("/detokenize", json={"prompt": "hé"}).json() == {"prompt": "hé"}
    for path, body in (
        ("/tokenize", {}), ("/tokenize", {"prompt": "a", "messages": USER}), ("/tokenize", {"prompt": 5}),
        ("/detokenize", {}), ("/detokenize", {"tokens": [2**64]}), ("/detokenize", {"tokens": ["a"]}),
    ):  # fmt: skip
        answer = http.post(path, json=body)
        assert answer.status_code == 400 and answer.json()["error"]["message"], (path, body)
    assert http.post("/tokenize", json={"prompt": "a", "model": "gpt-4"}).status_code == 404


@pytest.mark.parametrize("name", ["tools", "thinks", "messages[1].tool_calls"])
def test_what_a_template_has_no_word_of_is_refused(name):
    """It would be left out in silence: serving.TEMPLATE has nothing but roles and contents."""
    call = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = Chat([*USER, {"role": "assistant", "content": "yes"}, *USER])
    if name == "tools":
        asked.tools = [TOOL]
    elif name == "thinks":
        asked.options = {"thinks": True}
    else:
        asked.messages[1]["tool_calls"] = [call]
    with pytest.raises(APIError, match=re.escape(f"{name}: the model's chat template has no word of it")):
        Tokens(serving.tokenizer()).chat(asked)
    asked.tools, asked.options, asked.messages[1]["tool_calls"] = [], {"thinks": False}, []
    assert Tokens(serving.tokenizer()).chat(asked)


UNTEMPLATED = {
    "tools": [TOOL],
    "chat_template_kwargs": {"thinks": True},
    "add_generation_prompt": False,
    "continue_final_message": True,
    "reasoning_effort": "high",
}


@pytest.mark.parametrize("name", [*UNTEMPLATED, "add_special_tokens"])
def test_beside_ids_nothing_is_left_out_that_a_template_reads(http, name):
    asked = {name: UNTEMPLATED.get(name, True)}
    answer = http.post(CHAT, json={"messages": [], "prompt_token_ids": [5], "max_tokens": 1, **asked})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    assert "expected none with prompt_token_ids" in answer.json()["error"]["message"]
    if name in UNTEMPLATED:
        answer = http.post("/tokenize", json={"prompt": "hi", **asked})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == name
    nothing = dict.fromkeys(UNTEMPLATED) | {"add_generation_prompt": True, "add_special_tokens": False}
    assert http.post(CHAT, json={"messages": [], "prompt_token_ids": [5], "max_tokens": 1, **nothing}).is_success


def test_parts_of_a_message_have_no_field_that_is_left_out():
    def read(*parts):
        return Tokens(serving.tokenizer()).chat(Chat([{"role": "user", "content": [*parts]}], images=[]))

    text, image = {"type": "text", "text": "hi"}, {"type": "image_url", "image_url": {"url": "data:,"}}
    for part, said in (
        ({**text, "size": 5}, "messages[0].content[0].size: there is no such field"),
        ({**image, "max_pixels": 5}, "messages[0].content[0].max_pixels: there is no such field"),
        ({**image, "image_url": {"url": "data:,", "detail": "low"}}, "image_url.detail: this is not served"),
        ({**image, "image_url": {"url": "data:,", "name": "x"}}, "image_url.name: there is no such field"),
    ):
        with pytest.raises(APIError, match=re.escape(said)):
            read(part)
    assert read({**text, "image_url": None, "cache_control": {"type": "ephemeral"}}) == read(text)
    for detail in ("auto", "high", None):
        assert read({**image, "image_url": {"url": "data:,", "detail": detail}}) == read(image)
