"""Prompts to token ids, chats through the tokenizer's own template, and what single tokens look like.

A message of an agent's conversation has what the template takes: `tool_calls` (whose arguments come as JSON in a text,
and go to the template as the object that they are), `tool_call_id`, `name`, `reasoning_content`.

An assistant's message may bring the token ids that it was drawn as: `prompt_token_ids` and `token_ids`, as answers have
them with return_token_ids. Then all up to its end is exactly these ids; what comes after it alone is text of the
template and tokenized, but for a special token that ends the answer already. So what was drawn is never tokenized
again, and a conversation's log-probabilities are those of one row of tokens.
"""

import copy
import json
import secrets
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from vexact_ops.patch.description import Images

from ..media.videos import by_frames
from ..text import Text, is_unread
from .errors import APIError
from .protocol import check_neutral
from .remote import check_url, is_remote

# Keys of a message beside role and content, and the values that say nothing.
_MESSAGE_KEYS: dict[str, tuple] = {"function_call": (), "audio": (), "refusal": (), "annotations": ([],)}
# Those that the template gets as they are, and what they must be.
_TO_TEMPLATE = {"name": str, "tool_call_id": str, "reasoning_content": str, "reasoning": str, "tool_calls": list}
_IDS = ("prompt_token_ids", "token_ids")
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEMPLATE_OWN = {"conversation", "messages", "chat_template", "tokenize", "tools", "documents", "return_tensors"}
_TEMPLATE_OWN |= {"add_generation_prompt", "continue_final_message", "return_dict", "padding", "truncation"}


@dataclass
class Chat:
    """What the template is to make a prompt of.

    generate, go_on   add what an answer begins with; or go on with the last message
    special           whether the tokenizer adds its own special tokens to the template's text
    media_hosts       that images and videos may be fetched from
    most_images       that the messages may have; None: any number
    images, videos    where those of the messages are collected: of each its place and its URL. None: they take none
    described, stamps what the model takes of videos, and the seconds of each one's parts, where the text has to say so
    """

    messages: list[dict]
    generate: bool = True
    go_on: bool = False
    special: bool = False
    tools: list[dict] | None = None
    effort: str | None = None
    options: dict[str, Any] = field(default_factory=dict)
    images: list[tuple[str, str]] | None = None
    videos: list[tuple[str, str]] | None = None
    media_hosts: Collection[str] = ()
    most_images: int | None = None
    described: Images | None = None
    stamps: Sequence[list[float]] = ()

    @property
    def size(self) -> int:
        """Characters, about."""
        texts = [message.get("content") for message in self.messages]
        return 64 * len(self.messages) + sum(len(text) if isinstance(text, str) else 256 for text in texts)


class Tokens:
    """Of a tokenizer of its own, so that one thread may encode here while the engine's decodes. None: ids alone."""

    def __init__(self, tokenizer: Any):
        self.text = None if tokenizer is None else Text(tokenizer)
        self._seen: dict[int, tuple[str, list[int] | None]] = {}
        self._letters = _byte_letters() if "ByteLevel" in _kinds(tokenizer, "decoder") else None
        self._added = set(getattr(tokenizer, "added_tokens_decoder", None) or ())
        self._longest = None if self.text is None else _longest(self.text.tokenizer, self._letters)

    def another(self) -> "Tokens":
        """For another thread. To be called in the one that uses this."""
        made = copy.copy(self)
        if self.text is not None:
            made.text = Text(self.text.tokenizer)
        made._seen = {}
        return made

    def encode(self, text: str, special: bool = True, most: int | None = None) -> list[int]:
        """special: with the tokenizer's own special tokens. APIError where there are surely more than `most`."""
        if self.text is None:
            raise APIError(400, "prompt: the model has no tokenizer, expected token ids", param="prompt")
        self._check_length(text, most, "prompt")
        return self.text.encode(text) if special else self._plain(text)

    def _plain(self, text: str, special: bool = False) -> list[int]:
        options = {} if special else {"add_special_tokens": False}
        return list(self.text.tokenizer(text, truncation=False, padding=False, **options)["input_ids"])

    def _check_length(self, text: str, most: int | None, param: str) -> None:
        if most is None or self._longest is None or len(text) <= most:
            return
        size = len("".join(text.split()).encode())  # some tokens take the blanks beside them
        least = -(-size // self._longest)
        if least > most:
            message = f"{param}: got a text of {size} bytes, {least} tokens or more, expected at most {most}"
            raise APIError(400, message, param=param, code="context_length_exceeded")

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a prompt that was given as ids, special tokens and all."""
        if self.text is None:
            return ""
        return self.text.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def names(self, ids: Sequence[int]) -> list[str]:
        return [self.token(token)[0] for token in ids]

    def round_trip(self, given: str | list[int]) -> str:
        """The text of ids; of a text, what its tokens have of it."""
        if self.text is None:
            raise APIError(400, "tokens: the model has no tokenizer", param="tokens")
        return self.decode(self._plain(given) if isinstance(given, str) else given)

    def chat(self, chat: Chat, most: int | None = None) -> list[int]:
        """A conversation as token ids. APIError where there are surely more than `most`."""
        tokenizer = None if self.text is None else self.text.tokenizer
        template = getattr(tokenizer, "chat_template", None)
        if not template:
            what = "no tokenizer" if tokenizer is None else "no chat template"
            message = f"messages: the model has {what}: ask /v1/completions with a prompt instead"
            raise APIError(400, message, param="messages", code="no_chat_template")
        taken = sorted(_TEMPLATE_OWN & chat.options.keys())
        if taken:
            raise APIError(400, f"chat_template_kwargs: {taken[0]} is set here", param="chat_template_kwargs")
        source = template if isinstance(template, str) else json.dumps(template)
        options = dict(chat.options)
        if chat.effort is not None and "reasoning_effort" in source:
            options.setdefault("reasoning_effort", chat.effort)
        elif chat.effort is not None:
            check_neutral("reasoning_effort", chat.effort, ("none",))
        _check_read("tools", "tools", chat.tools, source)
        for name, value in chat.options.items():
            _check_read(name, "chat_template_kwargs", value, source)
        made = [_message(index, message, "developer" in source, chat) for index, message in enumerate(chat.messages)]
        if not made:
            raise APIError(400, "messages: there are none, expected one or more", param="messages")
        if chat.go_on and (chat.generate or made[-1]["role"] != "assistant"):
            message = "continue_final_message: expected add_generation_prompt false and an assistant's message last"
            raise APIError(400, message, param="continue_final_message")
        kept = [at for at, message in enumerate(chat.messages) if any(message.get(name) is not None for name in _IDS)]
        for at in range(kept[-1] + 1 if kept else 0, len(made)):
            _check_read(f"messages[{at}].tool_calls", "messages", made[at].get("tool_calls"), source)
        drawn, mark = [], f"vexact{secrets.token_hex(16)}"  # what comes after the mark is what is not drawn yet
        for at in kept:
            drawn = _drawn(at, chat.messages[at])
        if kept:
            made[kept[-1]] = {"role": "assistant", "content": mark}
        try:
            text = tokenizer.apply_chat_template(
                made, tools=chat.tools, tokenize=False, add_generation_prompt=chat.generate,
                continue_final_message=chat.go_on, **options,
            )  # fmt: skip
        except Exception as error:  # a template is a program of the model's author and may raise anything
            message = f"messages: the model's chat template refuses them: {_line(error)}"
            raise APIError(400, message, param="messages", code="chat_template_refused") from None
        if chat.stamps:
            text = by_frames(text, chat.described, chat.stamps, tokenizer)
        if not kept:
            self._check_length(text, most, "messages")
            return self._plain(text, chat.special)
        after = text.split(mark)[1:]
        if len(after) != 1:
            message = f"messages: the model's chat template has the last {_IDS[0]}' message {len(after)} times"
            raise APIError(400, message, param="messages", code="chat_template_refused")
        self._check_length(after[0], most, "messages")
        ids = self._plain(after[0])
        if ids and ids[0] == drawn[-1] and ids[0] in self._added:
            del ids[0]
        return drawn + ids

    def token(self, token: int) -> tuple[str, list[int] | None]:
        """A token alone: its text, and its bytes where they are known. One that is no whole character has the text
        "bytes:\\xe2\\x98", as OpenAI writes it."""
        found = self._seen.get(token)
        if found is None:
            found = self._seen[token] = self._look_at(token)
        return found

    def raw(self, token: int, special: bool = False) -> bytes:
        """What it adds to a text. special: a special token is in it, too."""
        if self.text is None or (token in self.text.silent and not special):
            return b""
        text, raw = self.token(token)
        return text.encode() if raw is None else bytes(raw)

    def is_silent(self, token: int) -> bool:
        """Whether an answer's text leaves it out."""
        return self.text is not None and token in self.text.silent

    def stripped(self, token: int) -> int:
        """Bytes at its begin that are left out where it begins a text: a blank, in some tokenizers."""
        raw = self.raw(token, special=True)
        if self.text is None or not raw.startswith(b" "):
            return 0
        alone = self.text.decode([token]).encode()
        return len(raw) - len(alone) if raw.endswith(alone) else 0

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


def _wrong(where: str, got: Any, expected: str) -> APIError:
    return APIError(400, f"{where}: got {_short(got)}, expected {expected}", param="messages", code="invalid_value")


def _check_read(name: str, param: str, value: Any, source: str) -> None:
    if is_unread(name.rpartition(".")[2], value, source):
        message = f"{name}: the model's chat template has no word of it, expected none"
        raise APIError(400, message, param=param, code="unsupported_parameter")


def _seen(where: str, part: dict, kind: str, chat: Chat) -> dict:
    """Of an image_url or video_url part what a template takes for it."""
    found, name = (chat.images if kind == "image" else chat.videos), f"{kind}_url"
    if found is None:
        raise _wrong(where, name, f"a text: the model takes no {kind}s")
    if kind == "image" and chat.most_images is not None and len(found) >= chat.most_images:
        message = f"{where}: got image {len(found) + 1}, expected at most {chat.most_images} in one prompt"
        raise APIError(400, message, param="messages", code="invalid_value")
    given = part.get(name)
    _check_keys(where, part, ("type", name))
    if isinstance(given, dict):
        _check_keys(f"{where}.{name}", given, ("url", "detail"))
        check_neutral(f"{where}.{name}.detail", given.get("detail"), ("auto", "high"))
    url = given.get("url") if isinstance(given, dict) else given
    if isinstance(url, str) and is_remote(url):
        try:
            check_url(url, chat.media_hosts)
        except ValueError as error:
            raise APIError(400, f"{where}.{name}.url: {error}", param="messages", code="invalid_value") from None
    elif not isinstance(url, str) or not url.startswith("data:"):
        raise _wrong(f"{where}.{name}.url", url, "a data: URI")
    found.append((where, url))
    return {"type": kind}


def _check_keys(where: str, part: dict, known: Collection[str]) -> None:
    """cache_control is read by nobody: no bit of an answer depends on what the cache has."""
    unknown = next((n for n, v in part.items() if v is not None and n not in (*known, "cache_control")), None)
    if unknown is not None:
        message = f"{where}.{unknown}: there is no such field here"
        raise APIError(400, message, param="messages", code="invalid_value")


_SEEN = {"image_url": "image", "video_url": "video"}


def _message(index: int, given: dict, knows_developer: bool, chat: Chat) -> dict:
    where = f"messages[{index}]"
    role, content = given.get("role"), given.get("content")
    if role not in _ROLES:
        raise _wrong(f"{where}.role", role, f"one of {', '.join(_ROLES)}")
    if isinstance(content, list):
        parts: list[Any] = []
        for number, part in enumerate(content):
            if isinstance(part, dict) and part.get("type") in _SEEN:
                parts.append(_seen(f"{where}.content[{number}]", part, _SEEN[part["type"]], chat))
                continue
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise _wrong(f"{where}.content[{number}]", kind, '{"type": "text", "text": "..."}')
            _check_keys(f"{where}.content[{number}]", part, ("type", "text"))
            parts.append({"type": "text", "text": part["text"]})
        content = parts if any(part["type"] != "text" for part in parts) else "\n".join(p["text"] for p in parts)
    if not isinstance(content, str | list) and not (content is None and role == "assistant"):
        raise _wrong(f"{where}.content", content, "a text or a list of parts")
    message = {"role": "system" if role == "developer" and not knows_developer else role, "content": content or ""}
    for name, value in given.items():
        if name in _MESSAGE_KEYS:
            check_neutral(f"{where}.{name}", value, _MESSAGE_KEYS[name])
        elif name in _TO_TEMPLATE:
            if value is None or value == []:
                continue
            if not isinstance(value, _TO_TEMPLATE[name]):
                raise _wrong(f"{where}.{name}", value, "a list" if name == "tool_calls" else "a text")
            message[name] = _calls(f"{where}.{name}", value) if name == "tool_calls" else value
        elif name in _IDS:
            if value is not None and role != "assistant":
                raise _wrong(f"{where}.{name}", value, "them in an assistant's message alone")
        elif name not in ("role", "content"):
            what = f"{where}.{name}: there is no such field here"
            raise APIError(400, what, param="messages", code="invalid_value")
    return message


def _calls(where: str, calls: list) -> list[dict]:
    """Arguments as objects, which templates write as JSON in their own way; what the model drew that is none stays."""
    made = []
    for number, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise _wrong(
                f"{where}[{number}]", call, '{"type": "function", "function": {"name": ..., "arguments": ...}}'
            )
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                read = json.loads(arguments)
            except (ValueError, RecursionError):
                read = None
            arguments = read if isinstance(read, dict) else arguments
        made.append({**call, "function": {**function, "arguments": {} if arguments is None else arguments}})
    return made


def _drawn(index: int, message: dict) -> list[int]:
    """All ids up to the end of an answer that was drawn. Their values are checked with the whole prompt's."""
    found: list[int] = []
    for name in _IDS:
        ids = message.get(name)
        if not isinstance(ids, list) or not ids or not set(map(type, ids)) <= {int}:
            raise _wrong(f"messages[{index}].{name}", ids, f"token ids, beside {' and '.join(_IDS)} of the answer")
        found += ids
    return found


def _part(tokenizer: Any, name: str) -> dict | None:
    """A part of a fast tokenizer as it is described in its file; None where there is none, or none that says."""
    try:
        return json.loads(getattr(tokenizer.backend_tokenizer, name).__getstate__())
    except Exception:
        return None


def _kinds(tokenizer: Any, name: str) -> set[str]:
    """The types of a part and of those that it is made of."""
    return {str(one.get("type")) for one in _flat(_part(tokenizer, name))}


def _flat(part: dict | None) -> list[dict]:
    inner = [one for key in ("normalizers", "pretokenizers", "decoders") for one in (part or {}).get(key, ())]
    return [*([part] if part else []), *(deeper for one in inner for deeper in _flat(one))]


def _longest(tokenizer: Any, letters: dict[str, int] | None) -> int | None:
    """Bytes of a text, without blanks, that one token can stand for at most. None where that is not sure: what drops
    parts of a text, or has one token for anything that it does not know."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = getattr(backend, "model", None)
    if type(model).__name__ != "BPE":
        return None
    for part in _flat(_part(tokenizer, "normalizer")):
        pattern, content = part.get("pattern"), part.get("content", "")
        replaces = part["type"] == "Replace" and isinstance(pattern, dict) and pattern.get("String") == " " and content
        if not (replaces or part["type"] in ("Sequence", "NFC", "Prepend")):
            return None
    for part in _flat(_part(tokenizer, "pre_tokenizer")):
        drops = part.get("behavior") == "Removed"
        if drops or part["type"] not in ("Sequence", "ByteLevel", "Split", "Digits", "Metaspace", "Punctuation"):
            return None
    vocabulary = tokenizer.get_vocab()
    bytewise = [f"<0x{byte:02X}>" for byte in range(256)] if model.byte_fallback else letters
    if bytewise is None or not set(bytewise) <= set(vocabulary):
        return None
    composed = 3 if "NFC" in _kinds(tokenizer, "normalizer") else 1  # three Hangul letters become one
    added = [str(token).encode() for token in getattr(tokenizer, "added_tokens_decoder", {}).values()]
    plain = (name if letters else name.replace("\u2581", " ").encode() for name in vocabulary)
    return composed * max(map(len, [*plain, *added]))


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
