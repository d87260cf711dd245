"""Prompts from files, or made up; as token ids for the engine. An error names the file and the line."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# The keys under which a record of a JSON file may hold its prompt, in the order they are looked for.
_ID_KEYS = ("prompt_token_ids", "token_ids", "input_ids", "prompt_ids")
_TEXT_KEYS = ("messages", "prompt", "conversations", "text")
_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


class PromptError(ValueError):
    """A prompt or a file of prompts that cannot be used; the message names the file, the line and what was expected."""


@dataclass(frozen=True)
class Prompt:
    """One prompt in one of three forms: `text`, chat `messages` ({"role", "content"} each), or `token_ids`.

    source   where it came from, for messages to a person: "prompts.jsonl:3"
    """

    source: str
    text: str | None = None
    messages: tuple[dict[str, str], ...] | None = None
    token_ids: tuple[int, ...] | None = None

    @property
    def shown(self) -> str:
        """What to show of it in one cell of a table."""
        if self.messages is not None:
            return self.messages[-1]["content"]
        return self.text if self.text is not None else f"{len(self.token_ids)} token ids"


def read_prompts(path: str | Path, limit: int | None = None) -> list[Prompt]:
    """The prompts of a file, in order.

    *.jsonl    one JSON value a line: a string, a list of token ids, or an object with "prompt" (text, messages or ids),
               "messages", "text", "conversations", "token_ids" or "prompt_token_ids"
    *.json     a list of such values; ShareGPT's {"conversations": [{"from", "value"}]} among them
    other      text, one prompt a line, blank lines skipped
    limit      no more than this many
    raises     PromptError: no such file, not text, a bad line (named), or no prompt in it
    """
    path = Path(path)
    try:
        content = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise PromptError(f"{path}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}: not UTF-8 text: byte {error.start} is {content_byte(error)}") from None
    if path.suffix == ".json":
        prompts = _from_json(path, content, limit)
    else:
        parse = _parse_json_line if path.suffix == ".jsonl" else Prompt
        # Not splitlines(): a JSON string may hold U+2028 and its like, which are no line ends there.
        lines = ((f"{path}:{number}", line.strip()) for number, line in enumerate(content.split("\n"), 1))
        prompts = [parse(source, line) for source, line in _first((x for x in lines if x[1]), limit)]
    if not prompts:
        raise PromptError(f"{path}: no prompt in it")
    return prompts


def content_byte(error: UnicodeDecodeError) -> str:
    return f"0x{error.object[error.start]:02x}"


def _first(items, limit):
    for count, item in enumerate(items):
        if limit is not None and count >= limit:
            return
        yield item


def _parse_json_line(source: str, line: str) -> Prompt:
    try:
        value = json.loads(line)
    except json.JSONDecodeError as error:
        raise PromptError(f"{source}: not JSON: {error.msg} at column {error.colno}") from None
    return parse_record(source, value)


def _from_json(path: Path, content: str, limit: int | None) -> list[Prompt]:
    try:
        records = json.loads(content)
    except json.JSONDecodeError as error:
        raise PromptError(f"{path}:{error.lineno}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(records, list):
        raise PromptError(f"{path}: got {_kind(records)}, expected a list of prompts")
    return [parse_record(f"{path}[{index}]", record) for index, record in _first(enumerate(records), limit)]


def parse_record(source: str, value) -> Prompt:
    """One value of a JSON file as a Prompt. Raises PromptError that names `source`."""
    if isinstance(value, dict):
        for key in (*_ID_KEYS, *_TEXT_KEYS):
            if key in value:
                return _parse_value(source, key, value[key], ids_only=key in _ID_KEYS)
        keys = ", ".join(map(repr, value)) or "none"
        raise PromptError(
            f"{source}: got an object with keys {keys}, expected one of {', '.join(_TEXT_KEYS)}, token_ids"
        )
    return _parse_value(source, "prompt", value)


def _parse_value(source: str, key: str, value, ids_only: bool = False) -> Prompt:
    if isinstance(value, str) and not ids_only:
        if not value:
            raise PromptError(f"{source}: {key} is empty")
        return Prompt(source, text=value)
    if isinstance(value, list):
        if not value:
            raise PromptError(f"{source}: {key} is empty")
        if all(isinstance(item, int) and not isinstance(item, bool) for item in value):
            return Prompt(source, token_ids=tuple(value))
        if not ids_only and all(isinstance(item, dict) for item in value):
            return Prompt(source, messages=_messages(source, key, value))
    expected = "a list of token ids" if ids_only else "text, a list of messages or a list of token ids"
    raise PromptError(f"{source}: {key} is {_kind(value)}, expected {expected}")


def _messages(source: str, key: str, items: list[dict]) -> tuple[dict[str, str], ...]:
    messages = []
    for index, item in enumerate(items):
        role, content = item.get("role", item.get("from")), item.get("content", item.get("value"))
        if not isinstance(role, str) or not isinstance(content, str):
            raise PromptError(f"{source}: {key}[{index}] has no text under role and content (or from and value)")
        messages.append({"role": _ROLES.get(role, role), "content": content})
    # A recorded conversation ends with the answer that is to be generated here.
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise PromptError(f"{source}: {key} holds answers alone, expected something to answer")
    return tuple(messages)


def _kind(value) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def synthetic_prompts(count: int, lengths: Sequence[int], vocab_size: int, seed: int = 0) -> list[Prompt]:
    """`count` prompts of random token ids, of the given lengths in turn. A function of its arguments alone."""
    if count < 1 or not lengths or min(lengths) < 1:
        raise PromptError(f"synthetic prompts: got {count} of lengths {list(lengths)}, expected 1 or more of each")
    rng = random.Random(seed)
    prompts = []
    for index in range(count):
        ids = tuple(rng.randrange(vocab_size) for _ in range(lengths[index % len(lengths)]))
        prompts.append(Prompt(f"random[{index}]", token_ids=ids))
    return prompts


def encode(prompts: Sequence[Prompt], tokenizer, *, chat: bool = False) -> list[list[int]]:
    """Token ids of each prompt.

    tokenizer   a Hugging Face tokenizer, or None where every prompt holds token ids already
    chat        wrap text into the model's chat template as a user's turn; messages always go through it
    raises      PromptError where a tokenizer or its chat template is missing, or where a prompt comes out empty
    """
    encoded = []
    for prompt in prompts:
        if prompt.token_ids is not None:
            ids = list(prompt.token_ids)
        elif tokenizer is None:
            raise PromptError(f"{prompt.source}: the model has no tokenizer, expected prompts of token ids")
        elif prompt.messages is not None or chat:
            if not getattr(tokenizer, "chat_template", None):
                raise PromptError(f"{prompt.source}: the tokenizer has no chat template, expected plain text")
            messages = list(prompt.messages or ({"role": "user", "content": prompt.text},))
            try:
                text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            except Exception as error:  # a template is a program of the model's author and may raise anything
                raise PromptError(f"{prompt.source}: the chat template refuses it: {error}") from None
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            bos = getattr(tokenizer, "bos_token", None)  # a text that begins with it gets no second one
            ids = tokenizer(prompt.text, add_special_tokens=not (bos and prompt.text.startswith(bos)))["input_ids"]
        if not ids:
            raise PromptError(f"{prompt.source}: no tokens in it")
        encoded.append(list(ids))
    return encoded


def decoder(tokenizer) -> Callable[[Sequence[int]], str]:
    """ids -> text; "" where there is no tokenizer."""
    if tokenizer is None:
        return lambda ids: ""
    return lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
