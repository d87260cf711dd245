"""Drafts by a model: which sequences ask it, for how many tokens, and how far it has computed each.

It drafts one token after the other, each in a step of its own, with the seeds of the sequences: the noise is that of
the draw which verifies, so the two are alike wherever the distributions are. Its keys and values lie in pages of the
same numbers as the model's, and it lags: what it lacks of a sequence is computed when the sequence asks next. So it
costs nothing while nobody asks, and what one sequence has computed of a page holds for all that find the page.

How many tokens are drafted follows from what its steps took, what steps that verify take (pace.py), and how often its
drafts were right.
"""

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from .pace import AGAIN, LEAST_GAIN, Pace, bucket
from .pages import PagePool

if TYPE_CHECKING:
    from .plan import Chunk

_TRIED = 8, 2  # sequences, and tokens of each, that are drafted where times or chances are not known lately
_LONGEST_SKIP = 32  # steps that are not looked at where nothing is worth it
_WEIGHT = 4  # a measured time counts as one of so many
_FEW = 8  # tokens that a step of the model computes in the time of one


class Chain(NamedTuple):
    """What is asked of the model for one decode.

    start, end   tokens that it computes first, in the chunk's pages
    count        tokens to draft behind them, one after the other; 0: `end` is not yet the chunk's own
    """

    chunk: "Chunk"
    start: int
    end: int
    count: int


class DraftModel(Protocol):
    """
    chunk   tokens of a chunk of its states; None: it has none
    final   whether drafted tokens that were right need not be computed again
    """

    chunk: int | None
    final: bool

    def draft(self, chains: Sequence[Chain]) -> list[tuple[int, ...]]:
        """Of each chain what was drafted, waited for; fewer where logits are no numbers."""


class Reach:
    """How far the model has computed one sequence: `rows` of its tokens in the pages of `epoch`, and `ahead` drafted
    ones behind them, in order. Of its pages `kept` have been looked at for others."""

    __slots__ = ("ahead", "epoch", "kept", "rows")

    def __init__(self) -> None:
        self.epoch, self.rows, self.ahead, self.kept = -1, 0, 0, 0

    def note(self, accepted: int) -> None:
        """So many of the drafted tokens were right, and what follows them is another token."""
        self.rows += min(self.ahead, accepted)
        self.ahead = 0


class Chains:
    """Of one scheduler.

    most     tokens of a sequence that are drafted at once
    always   as many as that, whether it is worth it or not
    tokens   that the model computes in a step
    held     what was chosen while a token was still being drawn, to be drafted once it is known; 0: nothing
    """

    def __init__(self, model: DraftModel, pool: PagePool, pace: Pace, most: int, always: bool, tokens: int):
        self._model, self._pool, self._pace = model, pool, pace
        self._most, self._always, self._tokens = most, always, tokens
        self._known: dict[int, int] = {}  # page -> the content that the model has computed all of
        self._seconds: dict[int, float] = {}  # of a step of so many sequences, as buckets
        self._met: set[int] = set()
        self._declined = self._skipped = self._skip = self._kind = 0
        self.held = 0, 0
        self.spent = 0.0  # seconds of the last time that it was asked

    def skips(self, sequences: int) -> bool:
        """Whether a step of so many is not looked at: nothing was worth it lately."""
        self.spent = 0.0
        if self._kind != bucket(sequences):
            self._kind, self._skipped, self._skip = bucket(sequences), 0, 0
        if not self._skipped or self.held[0]:
            return False
        self._skipped -= 1
        return True

    def plan(
        self,
        chunks: Sequence[tuple["Chunk", float]],
        sequences: int,
        drafted: tuple[int, float],
        budget: int,
        room: Callable[["Chunk"], int],
        grow: Callable[["Chunk", int], int],
    ) -> list[tuple["Chunk", tuple[int, ...]]]:
        """Drafts for these decodes of a step of so many sequences.

        chunks    and how likely a token is right that is drafted behind one
        drafted   rows that the step verifies already, and how many of those are likely to be right
        grow      see to pages for so many tokens behind a chunk's end; returns for how many there are
        """
        if not chunks or budget <= 0:
            return []
        count, limit = self.held
        if not count:
            count, limit = self._choose([chance for _, chance in chunks], sequences, drafted, budget)
        if not count:
            return []
        if any(chunk.end > len(chunk.sequence.tokens) for chunk, _ in chunks):
            self.held = count, limit
            return []
        self.held = 0, 0
        if len(chunks) > limit:  # the likeliest, or of those that are tried the ones that lack least
            trying = limit <= _TRIED[0] and not self._always
            chunks = sorted(chunks, key=lambda each: self._lag(each[0]) if trying else -each[1])[:limit]
        return self._ask([chunk for chunk, _ in chunks], count, budget, room, grow)

    def _choose(
        self, chances: Sequence[float], sequences: int, drafted: tuple[int, float], budget: int
    ) -> tuple[int, int]:
        """Tokens to draft of each sequence, and of how many sequences."""
        limit = min(len(chances), budget)
        most = min(self._most, max(1, budget // len(chances)))
        if self._always:
            return most, limit
        rows, right = drafted
        before = self._pace.seconds(sequences, rows)
        if before is None:
            return 0, 0
        step = self._step(limit)
        if step is not None:
            chances = sorted(chances, reverse=True)[:limit]
            furthest = max(self._pace.furthest(sequences), limit)
            best, chosen = (1 + LEAST_GAIN) * (sequences + right) / before, 0
            powers, expected = chances, sequences + right
            for count in range(1, most + 1):
                every = rows + count * limit
                if every > furthest:
                    break
                expected += sum(powers)
                powers = [power * chance for power, chance in zip(powers, chances)]
                rate = expected / (self._pace.seconds(sequences, every) + count * step)
                if rate > best:
                    best, chosen = rate, count
            if chosen:
                self._declined = self._skip = 0
                return chosen, limit
            self._skipped = self._skip = min(2 * self._skip + 1, _LONGEST_SKIP)
            self._declined += 1 + self._skipped
            if self._declined < AGAIN[1]:
                return 0, 0
            self._declined = self._skipped = 0
        return min(_TRIED[1], most), min(_TRIED[0], limit)

    def _step(self, sequences: int) -> float | None:
        """Seconds of a step of the model: what was measured of so many sequences, or of the next number to that."""
        kind = bucket(sequences)
        nearest = min(self._seconds, key=lambda known: abs(known - kind), default=None)
        return None if nearest is None else self._seconds[nearest]

    def _ask(
        self,
        chunks: Sequence["Chunk"],
        count: int,
        budget: int,
        room: Callable[["Chunk"], int],
        grow: Callable[["Chunk", int], int],
    ) -> list[tuple["Chunk", tuple[int, ...]]]:
        begin, left, chains = time.monotonic(), self._tokens, []
        for chunk in chunks:
            start = self._start(chunk)
            most = min(count, budget, room(chunk))
            if self._model.chunk is not None:  # what is appended to a state is forgotten unless it ends a chunk
                most = min(most, self._model.chunk - 1 - chunk.end % self._model.chunk)
            most = min(most, grow(chunk, most)) if most > 0 else 0
            if most <= 0 or not left:
                continue
            end = min(chunk.end, start + left)
            left -= end - start
            chains.append(Chain(chunk, start, end, most if end == chunk.end else 0))
            budget -= chains[-1].count
        if not chains:
            return []
        for chain in chains:  # pages that come to hold something else; a content may come back to a page later
            reach, written = chain.chunk.sequence.drafts.reach, chain.end + max(0, chain.count - 1)
            for page in chain.chunk.pages[reach.kept : self._pool.pages_for(written)]:
                self._known.pop(page, None)
        drafted = self._model.draft(chains)
        for chain in chains:
            reach = chain.chunk.sequence.drafts.reach
            reach.rows, reach.ahead = chain.end, max(0, chain.count - 1) if self._model.final else 0
            self._keep(chain)
        self.spent = time.monotonic() - begin
        self._note(chains)
        return [(chain.chunk, tokens) for chain, tokens in zip(chains, drafted) if tokens]

    def _lag(self, chunk: "Chunk") -> int:
        reach = chunk.sequence.drafts.reach
        return chunk.end - (reach.rows if reach.epoch == chunk.epoch else 0)

    def _note(self, chains: Sequence[Chain]) -> None:
        """What it took, where nobody had more than a few tokens to catch up with."""
        steps = max(chain.count for chain in chains)
        if steps and sum(chain.end - chain.start for chain in chains) <= _FEW * len(chains):
            kind, seconds = bucket(len(chains)), self.spent / steps
            if kind not in self._met:  # kernels may have been compiled
                self._met.add(kind)
                return
            known = self._seconds.get(kind)
            self._seconds[kind] = seconds if known is None else known + (min(seconds, 4 * known) - known) / _WEIGHT

    def _start(self, chunk: "Chunk") -> int:
        """How many tokens of a decode's sequence are computed."""
        reach, pages = chunk.sequence.drafts.reach, chunk.pages
        if reach.epoch != chunk.epoch:
            count = 0
            if self._model.chunk is None:  # a state is its sequence's alone
                while count < len(pages) and self._holds(pages[count]):
                    count += 1
            reach.epoch, reach.kept, reach.rows = chunk.epoch, count, count * self._pool.page_size
        reach.ahead = 0
        return min(reach.rows, chunk.end - 1)

    def _holds(self, page: int) -> bool:
        """Whether it has computed all of what is found there, for whoever had it before."""
        content = self._pool.content(page)
        return content is not None and self._known.get(page) == content

    def _keep(self, chain: Chain) -> None:
        """Note full pages whose content others may find."""
        chunk, reach = chain.chunk, chain.chunk.sequence.drafts.reach
        full = min(chain.end // self._pool.page_size, chunk.sequence.num_known)
        for page in chunk.pages[reach.kept : full]:
            content = self._pool.content(page)
            if content is not None:
                self._known[page] = content
        reach.kept = max(reach.kept, full)
