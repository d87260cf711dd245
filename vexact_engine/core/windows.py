"""Pages of layers with a window: a sequence holds them for the tokens that its queries may still read, and no others.

Such a page stands beside a page of the pool, with the same tokens: layers without a window keep that one, and the
prefix cache knows it. It is *held* by sequences that also hold the page of the pool, *cached* (let go, its content
still there), or *free*. A page of the pool without one is of no use to a sequence whose window reaches back to it.
"""

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as Items

from ..request import Sequence


def least_pages(reach: int, page_size: int) -> int:
    """Pages that let one sequence always go on by a token, where a query may read so many keys before it."""
    return -(-reach // page_size) + 1


class WindowPages:
    """`count` of them, beside the pages of one pool.

    reach   keys before a query that are kept for it; pages of these, `least` at most, let a sequence go on by a token
    """

    def __init__(self, count: int, page_size: int, reach: int, num_pages: int):
        self.count, self._size, self._reach = count, page_size, reach
        self.least = least_pages(reach, page_size)
        self._beside = [-1] * num_pages  # page of the pool -> the one beside it; -1: none
        self._refs = [0] * count
        self._free = list(range(count - 1, -1, -1))  # a stack
        self._cached: OrderedDict[int, int] = OrderedDict()  # -> page of the pool, the one let go longest ago first
        self._taken: dict[int, int] = {}  # page of the pool -> the one beside it, since `told`

    @property
    def num_available(self) -> int:
        return len(self._free) + len(self._cached)

    def first(self, start: int) -> int:
        """The page of a sequence that a query at `start` may reach back to."""
        return max(0, start - self._reach) // self._size

    def has(self, page: int) -> bool:
        return self._beside[page] >= 0

    def usable(self, pages: Items[int]) -> int:
        """Behind how many of these pages a sequence can go on: what its window reaches back to is there."""
        found, whole_from = 0, 0
        for count, page in enumerate(pages, 1):
            if not self.has(page):
                whole_from = count
            elif whole_from <= self.first(count * self._size):
                found = count
        return found

    # What a sequence holds: of its pages those in `windowed`

    def enter(self, sequence: Sequence) -> None:
        """It begins behind pages that `usable` allows."""
        end = len(sequence.pages)
        sequence.windowed = range(self.first(end * self._size), end)
        for page in sequence.pages[sequence.windowed.start :]:
            own = self._beside[page]
            self._cached.pop(own, None)
            self._refs[own] += 1

    def leave(self, sequence: Sequence) -> None:
        """Let go what no query of it reads any more. A draft in flight may be computed anew from its first token; what
        was taken for one that was not drawn is let go too."""
        held, planned = sequence.windowed, sequence.num_planned
        if (first := self.first(min(planned, len(sequence.tokens)))) > held.start:
            self._let_go(sequence.pages[held.start : min(first, held.stop)])
            held = range(first, max(first, held.stop))
        if not sequence.in_flight and (last := -(-planned // self._size)) < held.stop:
            self._let_go(sequence.pages[last : held.stop])
            for page in sequence.pages[last : held.stop]:
                self.forget(page)
            held = range(held.start, last)
        sequence.windowed = held

    def release(self, sequence: Sequence) -> None:
        """Let go all, before its pages are released."""
        self._let_go(sequence.pages[sequence.windowed.start : sequence.windowed.stop])
        sequence.windowed = range(0)

    def room(self, sequence: Sequence) -> int:
        """Where its tokens have to end, for there to be pages."""
        return (sequence.windowed.stop + self.num_available) * self._size

    def cover(self, sequence: Sequence, end: int) -> None:
        """Take pages for its tokens before `end`; there must be `room`."""
        held, last = sequence.windowed, -(-end // self._size)
        for page in sequence.pages[held.stop : last]:
            if self._free:
                own = self._free.pop()
            else:
                own, before = self._cached.popitem(last=False)
                self._beside[before] = -1
            self._beside[page], self._refs[own] = own, 1
            self._taken[page] = own
        sequence.windowed = range(held.start, max(last, held.stop))

    def admits(self, sequences: Iterable[Sequence]) -> bool:
        """Whether all of these can run at once: each gets as far as its last token, page by page if need be."""
        return sum(map(self.needed, sequences)) <= self.count

    def needed(self, sequence: Sequence) -> int:
        """At most, for its next token."""
        return min(self.least, -(-len(sequence.tokens) // self._size))

    def told(self) -> dict[int, int]:
        """What was taken since: page of the pool -> the one beside it. A plan of these tokens tells the runner."""
        taken, self._taken = self._taken, {}
        return taken

    def forget(self, page: int) -> None:
        """Nobody will find what that page of the pool holds."""
        own = self._beside[page]
        if own >= 0 and self._refs[own] == 0:
            del self._cached[own]
            self._free.append(own)
            self._beside[page] = -1

    def clear(self) -> None:
        """Forget all that is not held."""
        for page in list(self._cached.values()):
            self.forget(page)

    def _let_go(self, pages):
        for page in pages:
            own = self._beside[page]
            if own < 0 or self._refs[own] <= 0:
                raise RuntimeError(f"WindowPages: nobody holds the page beside page {page}")
            self._refs[own] -= 1
            if self._refs[own] == 0:
                self._cached[own] = page

    def check(self, refs: Items[int]) -> None:
        """AssertionError where one is lost or in two places, or held by more than hold the page of the pool."""
        held = [own for own, count in enumerate(self._refs) if count > 0]
        assert sorted([*held, *self._cached, *self._free]) == list(range(self.count)), "lost, or in two places"
        beside = {own: page for page, own in enumerate(self._beside) if own >= 0}
        assert sorted(beside) == sorted([*held, *self._cached]), "a page stands beside two, or beside none"
        assert all(beside[own] == page for own, page in self._cached.items()), "cached beside another page"
        assert all(self._refs[own] <= refs[page] for own, page in beside.items()), "held without its page of the pool"
