"""A step behind drafts: where its chunks begin follows from how many of them are right, which the device finds out.

The step is launched while the drafts are verified. It is laid as if none of them were right, with all that any outcome
may need, `words`; on the device, behind what the step before has drawn and before anything is computed, its rows are
moved to where they belong: by a kernel (`settle` in triton.py), or by `settle` here, which is the same on a CPU.
"""

import itertools

import numpy as np

from ..core.plan import MOST_VERIFIED, StepPlan

# Of each chunk: the first row of the one before it among what was drawn, where the draft begins that was verified there
# and how many tokens that has, its own first row and how many it has, where its window begins, its first token's place
# if no draft is right, its slot.
FACTS = ("before", "draft", "drafted", "first", "length", "window", "start", "slot")


class Follow:
    """What a plan behind drafts depends on.

    chunks  how many there are
    most    how many tokens further on one may begin
    words   (N,) int32: FACTS of each chunk, and behind them drafts and windows, one after another
    """

    def __init__(self, plan: StepPlan):
        chunks = plan.chunks
        self.chunks, self.most = len(chunks), max(chunk.slack for chunk in chunks)
        before, drafts = zip(*(chunk.behind for chunk in chunks))
        windows = [chunk.window or chunk.draft for chunk in chunks]
        begins = [0, *itertools.accumulate(map(len, (*drafts, *windows)))]
        lengths = [chunk.length for chunk in chunks]
        facts = {
            "before": before,
            "draft": begins[: len(chunks)],
            "drafted": [*map(len, drafts)],
            "first": [0, *itertools.accumulate(lengths)][:-1],
            "length": lengths,
            "window": begins[len(chunks) : -1],
            "start": [chunk.start for chunk in chunks],
            "slot": [chunk.slot for chunk in chunks],
        }
        facts = np.array([facts[name] for name in FACTS], np.int32).T
        self.words = np.concatenate([facts.ravel(), np.fromiter(itertools.chain(*drafts, *windows), np.int32)])


def most_words(slots: int) -> int:
    """What any step behind drafts takes: a draft and its window are in steps of so many rows."""
    return len(FACTS) * slots + 3 * MOST_VERIFIED


def settle(
    follow: Follow,
    drawn: np.ndarray,
    body: dict[str, np.ndarray],
    head: dict[str, np.ndarray],
    table: np.ndarray,
    page_size: int,
    apart: bool,
) -> None:
    """The columns of a step become what they are, once it is known what the one before it has drawn.

    drawn   a token for each of its rows
    table   pages of each slot
    apart   as the Body has it
    """
    facts, tokens = np.split(follow.words, [len(FACTS) * follow.chunks])
    for i, chunk in enumerate(facts.reshape(follow.chunks, len(FACTS)).tolist()):
        before, draft, drafted, first, length, window, start, slot = chunk
        wrong = np.flatnonzero(drawn[before : before + drafted] != tokens[draft : draft + drafted])
        right = int(wrong[0]) if len(wrong) else drafted
        rows, positions = slice(first, first + length), np.arange(start + right, start + right + length)
        body["ids"][first] = drawn[before + right]
        body["ids"][first + 1 : first + length] = tokens[window + right : window + right + length - 1]
        pages = table[slot, positions // page_size].astype(np.int64)
        body["places"][rows] = pages * page_size + positions % page_size
        body["positions"][rows] += right
        head["positions"][rows] += right
        body["context"][rows if apart else i] += right
