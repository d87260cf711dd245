"""What a step behind drafts is, once it is known how many of them were right: NumPy, for all rows at once."""

import itertools

import numpy as np

from ..core.plan import StepPlan
from ..core.step import Step


class Follow:
    """What is still to be known of a plan behind drafts, and of its step.

    most   how many tokens further on a chunk may begin
    """

    def __init__(self, plan: StepPlan, step: Step):
        self._step, self._of = step, np.array(plan.follows)
        self.most = max(chunk.slack for chunk in plan.chunks)
        windows = [chunk.window or chunk.draft for chunk in plan.chunks]
        self._windows = np.fromiter(itertools.chain.from_iterable(windows), np.int32)
        sizes, lengths = np.fromiter(map(len, windows), np.int64), step.chunks["length"].astype(np.int64)
        self._lengths, firsts = lengths, np.cumsum(lengths) - lengths
        drafted = np.ones(len(step.token_ids), bool)
        drafted[firsts] = False
        self._firsts, self._drafted = firsts, np.flatnonzero(drafted)
        begins = np.cumsum(sizes) - sizes - firsts - 1  # of a window, less its draft's first row
        self._places = (np.arange(len(drafted)) + np.repeat(begins, lengths))[self._drafted]

    def start(self, before: Step, drawn: np.ndarray) -> np.ndarray:
        """The step becomes what it is, once it is known what the one before it has drawn, a token for each row. Returns
        how many tokens further on each row is."""
        tokens, lengths = before.token_ids, before.chunks["length"]
        ends = np.cumsum(lengths)
        wrong = np.ones(len(tokens), bool)
        wrong[:-1] = drawn[:-1] != tokens[1:]
        wrong[ends - 1] = True  # what follows is another's
        found, firsts = np.flatnonzero(wrong), ends - lengths
        accepted = found[np.searchsorted(found, firsts)]  # rows: what is drawn there is the next token
        moved = (accepted - firsts)[self._of]
        rows, step = np.repeat(moved, self._lengths), self._step
        step.token_ids[self._firsts] = drawn[accepted[self._of]]
        step.token_ids[self._drafted] = self._windows[self._places + rows[self._drafted]]
        step.chunks["start"] += moved.astype(np.int32)
        return rows
