"""Questions whose answers a program can judge.

To add one: a class with `questions` and `reward`, and its name in `make`.
"""

import importlib
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Protocol

from ..extras import pip_line
from ..proof.prompts import Prompt, encode

EVENS = "evens"
DEFAULT, DEFAULT_OPTIONS = "chain_sum", {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}

# Datasets of reasoning-gym whose first questions are others where more are asked for
OF_SIZE = {"acre", "composite"}
# Those that are others in every process: they go through sets of texts, in the order of their hashes
OF_HASHES = {"isomorphic_strings", "knight_swap", "polynomial_multiplication", "ransom_note", "word_ladder"}


@dataclass(frozen=True)
class Question:
    prompt_ids: list[int]
    entry: Any = None  # what its reward needs


class Task(Protocol):
    name: str

    def questions(self, step: int, count: int) -> list[Question]:
        """Those of a step: a function of it and of the seed."""

    def reward(self, question: Question, token_ids: Sequence[int], text: str) -> float:
        """From 0 to 1."""


def make(name: str | None, options: dict, *, tokenizer: Any, vocab_size: int, seed: int, size: int) -> Task:
    """
    name      "evens", or a dataset of reasoning-gym; None: chain_sum, or "evens" where there is no tokenizer
    options   the dataset's own
    size      how many questions will be asked
    raises    ValueError, ModuleNotFoundError with the pip line
    """
    if name is None:
        name, options = (EVENS, options) if tokenizer is None else (DEFAULT, {**DEFAULT_OPTIONS, **options})
    if name != EVENS:
        return ReasoningGym(name, options, tokenizer, seed, size)
    if options:
        raise ValueError(f"recipe: task_options: got {options!r}, but {EVENS} has none")
    return Evens(vocab_size, seed)


def reasoning_gym(task: str) -> ModuleType:
    """The package that `task` is of; ModuleNotFoundError with the pip line where it is not installed. ValueError where
    it is one that no run could repeat here."""
    if task in OF_HASHES and sys.flags.hash_randomization:
        raise ValueError(
            f"recipe: task: got {task!r}, which follows Python's hashes of texts, others in every "
            "process: expected PYTHONHASHSEED=0 in the environment, or another task"
        )
    try:
        return importlib.import_module("reasoning_gym")
    except ModuleNotFoundError as error:
        line = pip_line("recipe")
        raise ModuleNotFoundError(f"recipe: task {task!r}: not installed: {error.name}. Run: {line}") from error


class ReasoningGym:
    """One of reasoning-gym's datasets: questions are made, answers judged by its own rules."""

    def __init__(self, name: str, options: dict, tokenizer: Any, seed: int, size: int):
        gym = reasoning_gym(name)
        if tokenizer is None:
            raise ValueError(f"recipe: task: got {name!r} for a model without a tokenizer, expected {EVENS!r}")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
        if name not in known:
            raise ValueError(f"recipe: task: got {name!r}, expected {EVENS!r} or one of {', '.join(sorted(known))}")
        try:
            self._dataset = gym.create_dataset(name, seed=seed, size=size, **options)
        except (TypeError, AssertionError) as error:  # how it refuses options
            raise ValueError(f"recipe: task_options: {name}: {error}") from error
        self.name, self._tokenizer = name, tokenizer
        self._chat = bool(getattr(tokenizer, "chat_template", None))

    def questions(self, step: int, count: int) -> list[Question]:
        entries = [self._dataset[step * count + i] for i in range(count)]
        prompts = [Prompt(f"{self.name}[{step}.{i}]", text=e["question"]) for i, e in enumerate(entries)]
        ids = encode(prompts, self._tokenizer, chat=self._chat)
        return [Question(i, entry) for i, entry in zip(ids, entries)]

    def reward(self, question: Question, token_ids: Sequence[int], text: str) -> float:
        """What stands in <answer> tags counts; without them the last line, or its last word, whichever is better: small
        models do not know the tags."""
        gym = importlib.import_module("reasoning_gym.utils")
        tagged = gym.extract_answer(text)
        line = (text.strip().splitlines() or [""])[-1]
        word = (line.split() or [""])[-1].strip(".!*`$")
        return max(
            float(self._dataset.score_answer(a, question.entry)) for a in ([line, word] if tagged is None else [tagged])
        )


class Evens:
    """A toy for models without a tokenizer, random weights among them: the share of even token ids. It begins at a half
    and every token counts, so that learning shows after a few steps."""

    name = EVENS

    def __init__(self, vocab_size: int, seed: int):
        self._vocab_size, self._seed = vocab_size, seed

    def questions(self, step: int, count: int) -> list[Question]:
        draw = random.Random(f"{self._seed} {step}")
        return [Question([draw.randrange(self._vocab_size) for _ in range(draw.randint(4, 16))]) for _ in range(count)]

    def reward(self, question: Question, token_ids: Sequence[int], text: str) -> float:
        return sum(token % 2 == 0 for token in token_ids) / len(token_ids)
