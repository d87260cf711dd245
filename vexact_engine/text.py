"""From text to token ids and back: one tokenizer that is the engine's own, and text that grows with its tokens."""

import codecs
import copy
import json
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from .config import SamplingParams, is_unicode

_REPLACEMENT = "\ufffd"  # what an incomplete or invalid sequence of bytes decodes to
_SPACE = 0x20
_EXPECTED = 'expected {"role": ..., "content": ...} in a list, or several such lists'
# Options of apply_chat_template that are no template's: it has no effect, or another one, where no ids are asked of it.
_OF_TOKENIZER = {"conversation", "max_length", "padding", "return_dict", "return_tensors", "tokenize", "truncation"}
_OF_TOKENIZER |= {"return_assistant_tokens_mask", "tokenizer_kwargs"}
_OF_RENDERING = {"add_generation_prompt", "continue_final_message", "chat_template"}
_UNSETTLED = 8  # tokens: bytes of a character that is still incomplete are among fewer


class Text:
    """A copy of a tokenizer, so that what others set on theirs (truncation, padding) has no say here.

    tokenizer   a Hugging Face tokenizer, or anything with its __call__ and decode
    silent      ids that have no text, wherever they stand
    specials    special tokens that an answer's text leaves out: what they are called -> id
    raises      TypeError where it cannot be copied
    """

    _skips = True
    _ids: Set[int] | None = None

    def __init__(self, tokenizer: Any):
        try:
            self.tokenizer = copy.deepcopy(tokenizer)
        except Exception as error:
            raise TypeError(f"tokenizer: a {type(tokenizer).__name__} that cannot be copied: {error!r}") from error
        self.bos = getattr(tokenizer, "bos_token", None)
        added = getattr(self.tokenizer, "added_tokens_decoder", None) or {}
        special = {i for i, token in added.items() if getattr(token, "special", False)}
        special |= set(getattr(self.tokenizer, "all_special_ids", None) or ())
        self.silent = frozenset(i for i in special if self.decode([i]) == "")
        named = ((self._name(i, added), i) for i in sorted(self.silent))
        self.specials = {name: i for name, i in named if name}
        self._any_special = re.compile("|".join(map(re.escape, self.specials))) if self.specials else None
        self.bytes = self._byte_tokens()
        self.letter = next((i for i, byte in self.bytes.items() if byte == 65), None)

    def _name(self, token: int, added: Mapping) -> str | None:
        if token in added:
            return str(added[token])
        return self.tokenizer.convert_ids_to_tokens(token) if hasattr(self.tokenizer, "convert_ids_to_tokens") else None

    def verbatim(self) -> "Text":
        """The same with special tokens in the text of generated ids."""
        other = copy.copy(self)
        other._skips, other.silent = False, frozenset()
        return other

    def with_stop_ids(self, params: SamplingParams) -> SamplingParams:
        """Where a stop string is the text of a special token, its id among the stop tokens.

        raises   ValueError for one that contains such a text beside others, where that can never be found
        """
        for string in params.stop if params.skip_special_tokens else ():
            inside = None if string in self.specials else self._special_in(string)
            if inside is not None:
                raise ValueError(
                    f"stop has {string!r}, expected {inside!r} alone, or skip_special_tokens=False: a special token is "
                    "not in the text of an answer"
                )
        ids = [self.specials[string] for string in params.stop if string in self.specials]
        return replace(params, stop_token_ids=(*params.stop_token_ids, *ids)) if ids else params

    def _special_in(self, string: str) -> str | None:
        if self._any_special is None:
            return None
        found = self._any_special.search(string)
        return found and found[0]

    def _byte_tokens(self) -> dict[int, int]:
        """Ids that stand for one byte each, where the tokenizer falls back to bytes (Llama 2, Mistral, Gemma)."""
        vocabulary = self.tokenizer.get_vocab() if hasattr(self.tokenizer, "get_vocab") else {}
        found = {i: int(token[3:5], 16) for token, i in vocabulary.items() if re.fullmatch("<0x[0-9A-F]{2}>", token)}
        letter = next((i for i, byte in found.items() if byte == 65), None)
        return found if letter is not None and self.decode([letter]) == "A" else {}

    def encode(self, text: str) -> list[int]:
        """All of a text's ids. What begins with the beginning-of-sequence token, as a chat template's text does, gets
        no second one. ValueError where it is no Unicode."""
        _check_unicode("prompt", text)
        templated = bool(self.bos) and text.startswith(self.bos)
        options = {"add_special_tokens": False} if templated else {}
        return list(self.tokenizer(text, truncation=False, padding=False, **options)["input_ids"])

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of generated ids at once. Those that the tokenizer has no token for, of a vocabulary that is padded,
        have none, as in tokenizers of transformers that are written in Rust: some in Python raise."""
        options = {"skip_special_tokens": self._skips, "clean_up_tokenization_spaces": False}
        try:
            return self.tokenizer.decode(token_ids, **options)
        except Exception:
            known = self._known()
            if all(token in known for token in token_ids):
                raise
        return self.tokenizer.decode([token for token in token_ids if token in known], **options)

    def _known(self) -> Set[int]:
        """Ids that the tokenizer has a token for; read where it is asked for first, as most never are."""
        if self._ids is None:
            vocabulary = self.tokenizer.get_vocab() if hasattr(self.tokenizer, "get_vocab") else {}
            self._ids = {*vocabulary.values(), *(getattr(self.tokenizer, "added_tokens_decoder", None) or ())}
        return self._ids

    def whole(self, token_ids: Sequence[int]) -> str:
        """The text of generated ids, the same that a Detokenizer gives them one by one."""
        text = self.decode(token_ids)
        if _REPLACEMENT not in text or not self.bytes:
            return text
        return Detokenizer(self).update(token_ids, final=True)


def conversations(messages: Any) -> Sequence:
    """What chat is given, one conversation or several, as several."""
    first = next(iter(_several(messages)), None)
    return [messages] if first is None or isinstance(first, Mapping) else messages


def _several(messages: Any) -> Sequence:
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise TypeError(f"chat: messages: got a {type(messages).__name__}, {_EXPECTED}")
    return messages


def chat_ids(tokenizer: Any, messages: Any, **template: Any) -> list[int]:
    """A conversation as the model's own template puts it, up to where the answer begins, as token ids.

    template  what it takes beside messages; add_generation_prompt and continue_final_message as of
              apply_chat_template, of which one is there: the first, unless the other is asked for
    raises    ValueError where there is no template, no message, where the template refuses them, or has no word of
              what else is given; TypeError on an option of the tokenizer's, which would be no template's
    """
    if taken := sorted(_OF_TOKENIZER & template.keys()):
        raise TypeError(f"chat: {taken[0]}: it is set here: all of the template's text becomes token ids")
    template.setdefault("add_generation_prompt", not template.get("continue_final_message", False))
    if not getattr(tokenizer, "chat_template", None):
        what = "no tokenizer" if tokenizer is None else "no chat template"
        raise ValueError(f"chat: the model has {what}: generate continues a text")
    source = json.dumps([tokenizer.chat_template, template.get("chat_template")])
    for name in template.keys() - _OF_RENDERING:
        if is_unread(name, template[name], source):
            raise ValueError(f"chat: {name}: the model's chat template has no word of it")
    messages = list(_several(messages))
    for message in messages:
        if not isinstance(message, Mapping):
            raise TypeError(f"chat: messages: got a {type(message).__name__} among them, {_EXPECTED}")
    if not messages:
        raise ValueError("chat: messages: got none, expected one or more")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **template)
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise ValueError(f"chat: messages: the model's template refuses them: {error}") from None
    _check_unicode("chat: messages", text)
    return list(tokenizer(text, truncation=False, padding=False, add_special_tokens=False)["input_ids"])


def is_unread(name: str, value: Any, source: str) -> bool:
    """Whether something is asked of a template that has no word of it, and would leave it out in silence."""
    return value not in (None, False, [], {}) and name not in source


def _check_unicode(what: str, text: str) -> None:
    """Tokenizers say of it that it is no text."""
    if not is_unicode(text):
        at, half = next((at, letter) for at, letter in enumerate(text) if not is_unicode(letter))
        raise ValueError(f"{what}: {half!a} at {at} is half a character, expected Unicode")


class Detokenizer:
    """The text of a growing list of ids, each token decoded a few times at most, whatever they are.

    Decoded is a window that begins with tokens that are text already, because a tokenizer may treat the very first
    token of a text differently. What ends in a replacement character is kept back: the next token may complete it.
    Tokens that stand for single bytes are put together here: a tokenizer would turn all of a run into replacement
    characters for one byte that is missing at its end.
    """

    __slots__ = ("_known", "_run", "_seen", "_taken", "_utf8", "_window", "source", "text")

    def __init__(self, source: Text):
        self.source = source
        self.text = ""  # all that is certain
        self._seen = 0  # tokens that have been looked at
        self._window: list[int] = []
        self._known = 0  # of its tokens, from the first on, that are text already
        self._taken = 0  # characters of the window's text that are in `text`
        self._run: int | None = None  # a byte of the run of byte tokens that is open
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def update(self, token_ids: Sequence[int], begin: int = 0, final: bool = False) -> str:
        """New certain text, given all ids so far; with `final`, all that is left.

        begin   ids before this one are not generated, and have no text
        """
        before, source = len(self.text), self.source
        grown = False
        for token in token_ids[begin + self._seen :]:
            if token in source.silent:
                continue
            byte = source.bytes.get(token) if source.bytes else None
            if byte is None:
                if self._run is not None:
                    self._end_run()
                self._window.append(token)
                grown = True
                continue
            if grown:
                self._read(final=True)
                grown = False
            # A space that begins a text is none to some tokenizers, as a byte too.
            begins = self._run is None and not self._window
            self._run = token
            if not (begins and byte == _SPACE and source.decode([token]) == ""):
                self.text += self._utf8.decode(bytes([byte]))
        self._seen = len(token_ids) - begin
        if grown or final:
            self._read(final)
        if final and self._run is not None:
            self._end_run()
        return self.text[before:]

    def _end_run(self) -> None:
        """A run of bytes is over; one of its characters is what the next token follows."""
        self.text += self._utf8.decode(b"", True)
        self._utf8.reset()
        self._window, self._known, self._taken, self._run = [self.source.letter], 1, 1, None

    def _read(self, final: bool) -> None:
        window = self.source.decode(self._window)
        whole = final or not window.endswith(_REPLACEMENT)
        if whole:
            new = window[self._taken :]
        elif len(self._window) - self._known <= _UNSETTLED:
            return
        else:  # only the last character can still change
            new = window[self._taken : -1]
        self.text += new
        if not whole:
            self._window, self._known = self._window[-_UNSETTLED // 2 :], 0
            self._taken = len(self.source.decode(self._window)) - 1
        elif new:
            del self._window[: self._known]
            self._known = len(self._window)
            self._taken = len(self.source.decode(self._window))


class Stops:
    """Stop strings in a growing text. Each character of it is looked at a few times at most, however long they are
    (Knuth, Morris and Pratt), and a string that was whole before is none later.

    found   the one that the newest text made whole, and where in all of the text it begins: of several the one that
            begins first, of those the one named first; None: none
    held    how many characters at the end of the text may be the beginning of one
    """

    __slots__ = ("_seen", "_strings", "found", "held")

    def __init__(self, strings: Sequence[str]):
        self._strings = [_Stop(string) for string in strings]
        self._seen = self.held = 0
        self.found: tuple[str, int] | None = None

    def update(self, text: str) -> None:
        """All of the text so far."""
        new, before = text[self._seen :], self._seen
        self._seen, self.found, self.held = len(text), None, 0
        for stop in self._strings:
            end = stop.advance(new)
            if end is not None:
                begin = before + end - len(stop.string)
                if self.found is None or begin < self.found[1]:
                    self.found = stop.string, begin
            self.held = max(self.held, stop.held)


class _Stop:
    """One of them: `size` is how much of it the text ends with; falls[i], how much it ends with where the string's
    next character after i + 1 of them does not come. They are found as far as a text has got."""

    __slots__ = ("falls", "size", "string")

    def __init__(self, string: str):
        self.string, self.size, self.falls = string, 0, [0]

    @property
    def held(self) -> int:
        return self.size if self.size < len(self.string) else self.falls[-1]

    def advance(self, new: str) -> int | None:
        """Where in `new` the first whole one ends."""
        string, size, falls = self.string, self.size, self.falls
        if not size and string[0] not in new:
            return None
        end = None
        for at, letter in enumerate(new, 1):
            size = self._grown(size, letter)
            if size > len(falls):
                falls.append(self._grown(falls[-1], letter))
            if size == len(string) and end is None:
                end = at
        self.size = size
        return end

    def _grown(self, size: int, letter: str) -> int:
        string, falls = self.string, self.falls
        while size and (size == len(string) or string[size] != letter):
            size = falls[size - 1]
        return size + (string[size] == letter)
