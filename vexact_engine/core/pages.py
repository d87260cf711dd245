"""The pages of the KV cache: who holds which, and which prompts they already know.

A page is a number. It is in exactly one of three places: *held* by one or more sequences (its reference count says
how many), *cached* (held by nobody, its content still known, evicted oldest first), or *free*. Everything below is
O(1) per page.

The prefix cache is a tree of full pages. A page of known content is found by the key (its parent's id, its own token
ids), so a hit means that every token from the start of the sequence is equal: the dictionary compares the ids
themselves, and a hash collision costs time, never bits. Ids are never used twice, so what hangs below an evicted page
is not found again, and a change of weights begins a new root below which nothing is known.
"""

from collections import OrderedDict
from collections.abc import Sequence as Tokens
from dataclasses import dataclass

from ..request import Sequence
from .snapshots import Snapshots
from .windows import WindowPages


@dataclass
class PageStats:
    """Counts since the pool was made."""

    allocated: int = 0
    evicted: int = 0  # cached pages whose content was given up for a new allocation
    reused: int = 0  # references taken by `hold`: pages that did not have to be computed


class Known:
    """What `PagePool.match` has found for a beginning that several sequences share."""

    __slots__ = ("forgotten", "ids", "pages")

    def __init__(self):
        self.pages, self.ids, self.forgotten = [], [], -1


class PagePool:
    """`num_pages` pages of `page_size` tokens, with reference counts and a prefix cache.

    Not thread-safe. Freeing a page that nobody holds raises RuntimeError: it would give one page to two sequences.

    snapshots, windows   what a sequence needs beside pages, to go on behind them; None: nothing
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        enable_prefix_cache: bool = True,
        snapshots: Snapshots | None = None,
        windows: WindowPages | None = None,
    ):
        self.snapshots = snapshots if enable_prefix_cache else None
        self.windows = windows
        self.num_pages = num_pages
        self.page_size = page_size
        self.enable_prefix_cache = enable_prefix_cache
        self.stats = PageStats()
        self._free = list(range(num_pages - 1, -1, -1))  # a stack
        self._cached = OrderedDict()  # page -> None, the one released longest ago first
        self._refs = [0] * num_pages
        self._nodes = [None] * num_pages  # page -> (key, id) where its content is known
        self._tree = {}  # key -> page
        self._next_id = 0
        self.forgotten = 0  # how often a page's content was given up: what `match` has found holds until then
        self.root = self._new_id()

    def _new_id(self):
        self._next_id += 1
        return self._next_id

    @property
    def num_available(self) -> int:
        """Pages that can be allocated now: the free and the cached."""
        return len(self._free) + len(self._cached)

    def pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def allocate(self) -> int:
        """A page of unknown content, held once. RuntimeError when none is available."""
        if self._free:
            page = self._free.pop()
        elif self._cached:
            page, _ = self._cached.popitem(last=False)
            self._forget(page)
            self.stats.evicted += 1
        else:
            raise RuntimeError(f"PagePool: allocate: all {self.num_pages} pages are held")
        self._refs[page] = 1
        self.stats.allocated += 1
        return page

    def hold(self, pages: Tokens[int]) -> None:
        """One more reference to each page, which `match` has just found."""
        for page in pages:
            if self._refs[page] == 0:
                del self._cached[page]
            self._refs[page] += 1
        self.stats.reused += len(pages)

    def release(self, pages: Tokens[int]) -> None:
        """One reference less to each page of a sequence, given from its first page to its last.

        They are let go from the last to the first, so that eviction takes a page's children before the page.
        """
        for page in reversed(pages):
            if self._refs[page] <= 0:
                raise RuntimeError(f"PagePool: release: nobody holds page {page}")
            self._refs[page] -= 1
            if self._refs[page] == 0:
                if self._nodes[page] is None:
                    self._give_up(page)
                else:
                    self._cached[page] = None

    def num_unheld(self, pages: Tokens[int]) -> int:
        """How many of these pages nobody holds: holding them uses up availability."""
        return sum(self._refs[page] == 0 for page in pages)

    # The prefix cache

    def key(self, parent: int, tokens: Tokens[int], index: int):
        """What the page at `index` of a sequence is known by, given its parent's id.

        None if `tokens` do not fill the page, or without a prefix cache: then nothing is known or registered.
        """
        end = (index + 1) * self.page_size
        if end > len(tokens) or not self.enable_prefix_cache:
            return None
        return parent, tuple(tokens[end - self.page_size : end])

    def match(self, tokens: Tokens[int], max_pages: int, known: "Known | None" = None) -> tuple[list[int], int]:
        """The known pages that `tokens` begin with, at most `max_pages`, and the id of the last (or the root's).

        known   what was found before for tokens that begin like these; it is brought up to date
        Takes no reference: `hold` the pages before anything else is allocated.
        """
        known = Known() if known is None else known
        if known.forgotten != self.forgotten:
            known.pages, known.ids, known.forgotten = [], [self.root], self.forgotten
        pages, ids = known.pages, known.ids
        while len(pages) < max_pages and (page := self._tree.get(self.key(ids[-1], tokens, len(pages)))) is not None:
            pages.append(page)
            ids.append(self._nodes[page][1])
        found = pages[:max_pages]
        return found, ids[len(found)]

    def begins(self, sequence: Sequence, most: int) -> tuple[list[int], int]:
        """`match` of what a sequence begins with; its prompt's is looked up once for all its samples."""
        request = sequence.request
        if request.pages is None:
            request.pages = Known()
        whole = min(most, len(request.prompt_ids) // self.page_size)
        found, node = self.match(request.keys, whole, request.pages)
        if len(found) < whole or whole == most:
            return found, node
        own = Known()
        own.pages, own.ids, own.forgotten = list(found), list(request.pages.ids[: whole + 1]), self.forgotten
        return self.match(sequence.keys, most, own)

    def known(self, key) -> int | None:
        """The page that is known by this key."""
        return self._tree.get(key)

    def content(self, page: int) -> int | None:
        """A number that stands for what a page holds, and for nothing else ever; None where nobody may find it."""
        node = self._nodes[page]
        return None if node is None else node[1]

    def behind(self, pages: list[int], node: int) -> tuple[list[int], int]:
        """Of pages that `match` has found, those that a sequence can go on behind, and the id of the last of them: all,
        where there are neither states nor windows."""
        usable = [kept.usable for kept in (self.snapshots, self.windows) if kept is not None]
        if not usable:
            return pages, node
        count = -1
        while count != len(pages):
            count = len(pages)
            for found in usable:
                pages = pages[: found(pages)]
        return pages, self._nodes[pages[-1]][1] if pages else self.root

    def register(self, page: int, key) -> int:
        """Say that all of a held page has been computed and holds what `key` says. Returns the id for its children.

        If another page is known by this key already, that one stays the known one: both hold the same bits. Unless it
        has lost the page beside it, and this one has not.
        """
        if self._refs[page] <= 0:
            raise RuntimeError(f"PagePool: register: nobody holds page {page}")
        known = self._tree.get(key)
        if known is None:
            self._tree[key] = known = page
            self._nodes[page] = (key, self._new_id())
        elif self.windows is not None and self.windows.has(page) and not self.windows.has(known):
            node = self._nodes[known]
            self._forget(known)
            if self._refs[known] == 0:
                del self._cached[known]
                self._free.append(known)
            self._tree[key], self._nodes[page], known = page, node, page
        return self._nodes[known][1]

    def invalidate(self) -> None:
        """Forget the content of every page, because the weights have changed. Held pages stay held."""
        for page in self._cached:
            self._give_up(page)
        self._cached.clear()
        self._tree.clear()
        self._nodes = [None] * self.num_pages
        self.root = self._new_id()
        self.forgotten += 1
        if self.snapshots is not None:
            self.snapshots.clear()
        if self.windows is not None:
            self.windows.clear()

    def _give_up(self, page):
        """Nobody holds it, and nobody will find it."""
        self._free.append(page)
        if self.windows is not None:
            self.windows.forget(page)

    def _forget(self, page):
        self.forgotten += 1
        if self.snapshots is not None:
            self.snapshots.forget(page)
        if self.windows is not None:
            self.windows.forget(page)
        del self._tree[self._nodes[page][0]]
        self._nodes[page] = None

    def check(self) -> None:
        """Prove that no page is lost or in two places; AssertionError otherwise. O(pages), for tests and debugging."""
        held = [page for page, refs in enumerate(self._refs) if refs > 0]
        everywhere = [*held, *self._cached, *self._free]
        assert all(refs >= 0 for refs in self._refs), "a negative reference count"
        assert sorted(everywhere) == list(range(self.num_pages)), "a page is lost, or in two places"
        known = {page: node for page, node in enumerate(self._nodes) if node is not None}
        assert {key: page for page, (key, _) in known.items()} == self._tree, "the tree and its pages disagree"
        assert all(page in known for page in self._cached), "a cached page of unknown content"
        assert not any(page in known for page in self._free), "a free page of known content"
        if self.windows is not None:
            self.windows.check(self._refs)
