"""What was answered to prompts before, by prompt and seed: kept from one epoch to the next, in a file too.

A draw's noise is a function of (seed, position). So an answer of other weights to the same prompt with the same seed is
mostly what will be drawn again, and an answer with another seed is a text to find pieces in.
"""

import os
import struct
import tempfile
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

_MAGIC, _HEADER, _ANSWER = b"VXANSWER1\n", struct.Struct("<qq"), struct.Struct("<qq")
MOST_OF_A_PROMPT = 64  # answers: the oldest goes


class Answers:
    """At most `tokens` of prompts and answers; the prompt that was used longest ago goes first.

    vocab_size   ids beyond are refused; None: any is taken
    """

    def __init__(self, tokens: int, vocab_size: int | None = None):
        self.most, self.vocab_size, self.tokens = tokens, vocab_size, 0
        self._prompts: OrderedDict[bytes, OrderedDict[int, array]] = OrderedDict()

    def __len__(self) -> int:
        return sum(map(len, self._prompts.values()))

    def put(self, prompt: Sequence[int], seed: int, answer: Sequence[int]) -> None:
        """The newest answer to this prompt with this seed (of one sample: derive_seed). Longer than all that may be
        kept, it is not kept."""
        if len(prompt) + len(answer) > self.most:
            return
        key = _packed(prompt).tobytes()
        kept = self._prompts.get(key)
        if kept is None:
            kept = self._prompts[key] = OrderedDict()
            self.tokens += len(prompt)
        self._prompts.move_to_end(key)
        self._drop(kept, seed)
        while len(kept) >= MOST_OF_A_PROMPT:
            self._drop(kept, next(iter(kept)))
        kept[seed] = _packed(answer)
        self.tokens += len(answer)
        while self.tokens > self.most:
            first = next(iter(self._prompts))
            oldest = self._prompts[first]
            self._drop(oldest, next(iter(oldest)))
            if not oldest:
                del self._prompts[first]
                self.tokens -= len(first) // 4

    def _drop(self, kept: OrderedDict[int, array], seed: int) -> None:
        old = kept.pop(seed, None)
        self.tokens -= 0 if old is None else len(old)

    def of(self, prompt: Sequence[int]) -> dict[int, array]:
        """Answers to this prompt by seed, the oldest first."""
        key = _packed(prompt).tobytes()
        if key not in self._prompts:
            return {}
        self._prompts.move_to_end(key)
        return dict(self._prompts[key])

    def clear(self) -> None:
        self._prompts.clear()
        self.tokens = 0

    def __iter__(self) -> Iterator[tuple[array, int, array]]:
        for key, kept in self._prompts.items():
            for seed, answer in kept.items():
                yield array("i", key), seed, answer

    def save(self, path: str | os.PathLike) -> None:
        """All of them into a file, which is there whole or as it was before."""
        target = Path(path)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=target.name, delete=False) as file:
            try:
                file.writelines(self._written())
                file.flush()
                os.replace(file.name, target)
            except BaseException:
                os.unlink(file.name)
                raise

    def load(self, path: str | os.PathLike) -> None:
        """Those of a file beside what is kept. ValueError, and nothing is taken, where it is no such file or has ids
        that the model has not."""
        self.take(Path(path).read_bytes(), str(path))

    def pack(self) -> bytes:
        """What `save` writes."""
        return b"".join(self._written())

    def take(self, data: bytes, path: str = "what was given") -> None:
        """As `load`, of what `pack` has made."""
        for prompt, seed, answer in list(self._read(data, path)):
            self.put(prompt, seed, answer)

    def _written(self) -> Iterator[bytes]:
        yield _MAGIC
        for key, kept in self._prompts.items():
            yield _HEADER.pack(len(key) // 4, len(kept)) + key
            for seed, answer in kept.items():
                yield _ANSWER.pack(seed, len(answer)) + answer.tobytes()

    def _read(self, data: bytes, path: str) -> Iterator[tuple[array, int, array]]:
        at = len(_MAGIC)
        if not data.startswith(_MAGIC):
            raise ValueError(f"answers: {path} is no file of answers")

        def take(count: int) -> bytes:
            nonlocal at
            if count < 0 or at + count > len(data):
                raise ValueError(f"answers: {path} is damaged: it has {len(data)} bytes, expected {at + count} or more")
            at += count
            return data[at - count : at]

        def ids(count: int) -> array:
            found = array("i", take(4 * count))
            least, most = min(found, default=0), max(found, default=0)
            if least < 0 or (self.vocab_size is not None and most >= self.vocab_size):
                wrong = least if least < 0 else most
                raise ValueError(f"answers: {path} has the token id {wrong}, expected ids from 0 to {self._last}")
            return found

        while at < len(data):
            length, count = _HEADER.unpack(take(_HEADER.size))
            prompt = ids(length)
            if count < 0:
                raise ValueError(f"answers: {path} is damaged: a prompt has {count} answers")
            for _ in range(count):
                seed, size = _ANSWER.unpack(take(_ANSWER.size))
                yield prompt, seed, ids(size)

    @property
    def _last(self) -> int | str:
        return "the last of the vocabulary" if self.vocab_size is None else self.vocab_size - 1


def _packed(ids: Iterable[int]) -> array:
    return ids if isinstance(ids, array) else array("i", ids)
