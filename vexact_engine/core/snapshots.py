"""Snapshots of states: what a sequence needs, beside pages of the prefix cache, to go on from the end of one.

A state is known at the end of a chunk alone, and the next chunk writes over it. So it is copied aside now and then:
where a prompt's last whole chunk ends, and every so many tokens. A snapshot belongs to the page that ends where it was
taken; whoever finds that page goes on from there, with the bits of a sequence that has computed everything itself.
"""

import math
from collections import OrderedDict
from collections.abc import Sequence

SPARSE = 1024  # tokens from one snapshot of a sequence to the next, unless its prompt ends


class Snapshots:
    """`count` places, given up in the order in which they were last used. A place is *taken* for a copy that a plan in
    flight makes, and then *put* to a page or given back.

    page_size, chunk   both divide what is between two places where one may be taken
    """

    def __init__(self, count: int, page_size: int, chunk: int):
        self.count, self.stride = count, math.lcm(page_size, chunk)
        self.sparse = -(-SPARSE // self.stride) * self.stride
        self._free = list(range(count - 1, -1, -1))
        self._at: OrderedDict[int, int] = OrderedDict()  # page -> place, the one used longest ago first

    def cut(self, start: int, end: int, length: int) -> tuple[int, bool]:
        """Where a chunk of tokens start .. end - 1 of a sequence of `length` is to end, and whether it is then worth a
        snapshot. At most one step more for each sequence."""
        last = (length - 1) // self.stride * self.stride  # what another sequence of these tokens could begin with
        if start < last <= end:
            return last, True
        whole = end // self.stride * self.stride
        if end < length and whole > start:  # it ends before its sequence anyway
            return whole, whole // self.sparse > start // self.sparse
        return end, end == whole and end // self.sparse > start // self.sparse

    def usable(self, pages: Sequence[int]) -> int:
        """How many of these pages a sequence can go on behind."""
        return next((i for i in range(len(pages), 0, -1) if pages[i - 1] in self._at), 0)

    def of(self, page: int) -> int:
        """The place of a page's snapshot, which is used now."""
        self._at.move_to_end(page)
        return self._at[page]

    def take(self) -> int | None:
        """A place for a copy; None while all are taken."""
        if self._free:
            return self._free.pop()
        return self._at.popitem(last=False)[1] if self._at else None

    def put(self, page: int | None, place: int) -> None:
        """The copy is made, of the state behind this page; None: nobody will find it."""
        if page is None or page in self._at:
            self._free.append(place)
        else:
            self._at[page] = place

    def forget(self, page: int) -> None:
        """Something else will be in that page."""
        if page in self._at:
            self._free.append(self._at.pop(page))

    def clear(self) -> None:
        self._free.extend(self._at.values())
        self._at.clear()

    @property
    def num_known(self) -> int:
        return len(self._at)
