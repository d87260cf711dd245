"""Prompts to token ids, chats through the tokenizer's own template, and what single tokens look like."""

import json
from collections.abc import Sequence
from typing import Any

from ..text import Text
from .errors import APIError
from .protocol import check_neutral

# Keys of a message beside role and content, and the values that say nothing.
_MESSAGE_KEYS: dict[str, tuple] = {
    "tool_calls": ([],),
    "function_call": (),
    "audio": (),
    "refusal": (),
    "annotations": ([],),
    "reasoning_content": ("",),
    "tool_call_id": (),
}
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEMPLATE_OWN = {"conversation", "messages", "chat_template", "tokenize", "tools", "documents", "return_tensors"}
_TEMPLATE_OWN |= {"add_generation_prompt", "continue_final_message", "return_dict", "padding", "truncation"}


class Tokens:
    """Of a tokenizer of its own, so that one thread may encode here while the engine's decodes. None: ids alone."""

    def __init__(self, tokenizer: Any):
        self.text = None if tokenizer is None else Text(tokenizer)
        self._seen: dict[int, tuple[str, list[int] | None]] = {}
        self._letters = _byte_letters() if _is_byte_level(tokenizer) else None
        self._added = set(getattr(tokenizer, "added_tokens_decoder", None) or ())

    def encode(self, text: str, param: str = "prompt") -> list[int]:
        if self.text is None:
            raise APIError(400, f"{param}: the model has no tokenizer, expected token ids", param=param)
        return self.text.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt that was given as ids, special tokens and all."""
        if self.text is None:
            return ""
        return self.text.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def chat(self, messages: list[dict], generate: bool, go_on: bool, options: dict) -> list[int]:
        """A conversation as token ids."""
        tokenizer = None if self.text is None else self.text.tokenizer
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            what = "no tokenizer" if tokenizer is None else "no chat template"
            message = f"messages: the model has {what}: ask /v1/completions with a prompt instead"
            raise APIError(400, message, param="messages", code="no_chat_template")
        taken = sorted(_TEMPLATE_OWN & options.keys())
        if taken:
            raise APIError(400, f"chat_template_kwargs: {taken[0]} is set here", param="chat_template_kwargs")
        knows_developer = "developer" in (template if isinstance(template, str) else json.dumps(template))
        made = [_message(index, message, knows_developer) for index, message in enumerate(messages)]
        if not made:
            raise APIError(400, "messages: there are none, expected one or more", param="messages")
        if go_on and (generate or made[-1]["role"] != "assistant"):
            message = "continue_final_message: expected add_generation_prompt false and an assistant's message last"
            raise APIError(400, message, param="continue_final_message")
        try:
            text = tokenizer.apply_chat_template(
                made, tokenize=False, add_generation_prompt=generate, continue_final_message=go_on, **options
            )
        except Exception as error:  # a template is a program of the model's author and may raise anything
            message = f"messages: the model's chat template refuses them: {_line(error)}"
            raise APIError(400, message, param="messages", code="chat_template_refused") from None
        return list(tokenizer(text, add_special_tokens=False, truncation=False, padding=False)["input_ids"])

    def token(self, token: int) -> tuple[str, list[int] | None]:
        """A token alone: its text, and its bytes where they are known. One that is no whole character has the text
        "bytes:\\xe2\\x98", as OpenAI writes it."""
        found = self._seen.get(token)
        if found is None:
            found = self._seen[token] = self._look_at(token)
        return found

    def raw(self, token: int) -> bytes:
        """What it adds to a text: nothing, if it is a special one."""
        if self.text is None or token in self.text.silent:
            return b""
        text, raw = self.token(token)
        return text.encode() if raw is None else bytes(raw)

    def _look_at(self, token: int) -> tuple[str, list[int] | None]:
        if self.text is None:
            return f"token_id:{token}", None
        raw = self._bytes(token)
        if raw is None:
            before = [] if self.text.letter is None else [self.text.letter]  # some strip what begins a text
            text = self.decode([*before, token])[len(before) :]
            return text, None if "\ufffd" in text else list(text.encode())
        try:
            return raw.decode(), list(raw)
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), list(raw)

    def _bytes(self, token: int) -> bytes | None:
        if token in self.text.bytes:
            return bytes([self.text.bytes[token]])
        if self._letters is None or token in self._added:
            return None
        letters = self.text.tokenizer.convert_ids_to_tokens(token)
        if not letters or any(letter not in self._letters for letter in letters):
            return None
        return bytes(self._letters[letter] for letter in letters)


def _message(index: int, given: dict, knows_developer: bool) -> dict:
    where = f"messages[{index}]"

    def wrong(what: str) -> APIError:
        return APIError(400, f"{where}{what}", param="messages", code="invalid_value")

    role, content = given.get("role"), given.get("content")
    if role not in _ROLES:
        raise wrong(f".role: got {_short(role)}, expected one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        parts = []
        for number, part in enumerate(content):
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise wrong(f'.content[{number}]: got {_short(kind)}, expected {{"type": "text", "text": "..."}}')
            parts.append(part["text"])
        content = "\n".join(parts)
    if not isinstance(content, str) and not (content is None and role == "assistant"):
        raise wrong(f".content: got {_short(content)}, expected a text or a list of parts")
    message = {"role": "system" if role == "developer" and not knows_developer else role, "content": content or ""}
    for name, value in given.items():
        if name == "name":
            if value is not None and not isinstance(value, str):
                raise wrong(f".name: got {_short(value)}, expected a text")
            message |= {} if value is None else {"name": value}
        elif name in _MESSAGE_KEYS:
            check_neutral(f"{where}.{name}", value, _MESSAGE_KEYS[name])
        elif name not in ("role", "content"):
            raise wrong(f".{name}: there is no such field here")
    return message


def _is_byte_level(tokenizer: Any) -> bool:
    decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
    try:
        state = json.loads(decoder.__getstate__())
    except Exception:  # no fast tokenizer, or none that says: its tokens' texts are all that is known
        return False
    return any(part.get("type") == "ByteLevel" for part in (state, *state.get("decoders", ())))


def _byte_letters() -> dict[str, int]:
    """The letters that byte-level tokenizers (GPT-2's and all since) write bytes with: what can be seen stands for
    itself, the others in order for 256 and on."""
    seen = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    other = [byte for byte in range(256) if byte not in set(seen)]
    return {chr(byte): byte for byte in seen} | {chr(256 + at): byte for at, byte in enumerate(other)}


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
