"""The page pool never loses a page, never gives one to two owners, and never finds what is not there."""

from collections import OrderedDict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from vexact_engine.core.pages import PagePool


def fill(pool, tokens):
    """Hold and register the pages of `tokens` as a sequence would; returns them."""
    known, node = pool.match(tokens, len(tokens) // pool.page_size)
    pool.hold(known)
    pages = list(known)
    while len(pages) < pool.pages_for(len(tokens)):
        pages.append(pool.allocate())
        if (key := pool.key(node, tokens, len(pages) - 1)) is not None:
            node = pool.register(pages[-1], key)
    return pages


class Pool(RuleBasedStateMachine):
    """The pool against a model that is too simple to be wrong: whole prefixes as keys, and a list of the idle."""

    @initialize(num_pages=st.integers(1, 6), page_size=st.integers(1, 3))
    def make(self, num_pages, page_size):
        self.pool = PagePool(num_pages, page_size)
        self.owners = []  # (tokens, pages) of each live sequence
        self.content = {}  # page -> the whole prefix that it ends, for the pages of known content
        self.idle = OrderedDict()  # known pages that nobody holds, oldest release first

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=8))
    def begin(self, tokens):
        pool, size = self.pool, self.pool.page_size
        pages, _ = pool.match(tokens, len(tokens) // size)

        found = {prefix: page for page, prefix in self.content.items()}
        expected = []
        while (end := size * (len(expected) + 1)) <= len(tokens) and (
            page := found.get(tuple(tokens[:end]))
        ) is not None:
            expected.append(page)
        assert pages == expected

        if pool.pages_for(len(tokens)) - len(pages) + pool.num_unheld(pages) > pool.num_available:
            return
        held = self.held()
        blind = set(range(pool.num_pages)) - held - set(self.idle)
        got = fill(pool, tokens)
        assert got[: len(pages)] == pages
        for page in pages:
            self.idle.pop(page, None)
        for index, page in enumerate(got[len(pages) :], len(pages)):
            assert page not in held
            if page in blind:
                blind.remove(page)
            else:  # only when no free page is left, and then the one that was idle longest
                assert not blind and page == next(iter(self.idle))
                del self.idle[page], self.content[page]
            if (index + 1) * size <= len(tokens):
                self.content[page] = tuple(tokens[: (index + 1) * size])
        self.owners.append((tokens, got))

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def end(self, data):
        _, pages = self.owners.pop(data.draw(st.integers(0, len(self.owners) - 1)))
        self.pool.release(pages)
        held = self.held()
        self.idle.update((page, None) for page in reversed(pages) if page not in held and page in self.content)

    @rule()
    def invalidate(self):
        self.pool.invalidate()
        self.content.clear()
        self.idle.clear()

    @precondition(lambda self: self.pool.num_available == 0)
    @rule()
    def exhausted(self):
        with pytest.raises(RuntimeError, match=r"allocate: all .* pages are held"):
            self.pool.allocate()

    def held(self):
        return {page for _, pages in self.owners for page in pages}

    @invariant()
    def sound(self):
        self.pool.check()
        assert self.pool.num_available == self.pool.num_pages - len(self.held())
        counts = [sum(page in pages for _, pages in self.owners) for page in range(self.pool.num_pages)]
        assert self.pool.num_unheld(range(self.pool.num_pages)) == counts.count(0)
        assert all(len(set(pages)) == len(pages) for _, pages in self.owners)


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=4 * settings.default.max_examples)


def test_equal_hashes_are_not_equal_tokens():
    """0 and 2**61 - 1 have the same hash in CPython, and so have tuples of them: this is a true collision."""
    a, b = [0, 7], [2**61 - 1, 7]
    assert hash(tuple(a)) == hash(tuple(b))
    pool = PagePool(4, 2)
    pages = fill(pool, a)
    assert pool.match(a, 1)[0] == pages
    assert pool.match(b, 1)[0] == []


def test_the_same_block_after_another_prefix_is_another_page():
    pool = PagePool(8, 2)
    fill(pool, [1, 1, 5, 5])
    known, _ = pool.match([2, 2, 5, 5], 2)
    assert known == []
    assert len(pool.match([1, 1, 5, 5, 9], 2)[0]) == 2
    assert pool.match([5, 5], 1)[0] == []


def test_only_a_full_page_has_a_key():
    pool = PagePool(2, 3)
    assert pool.key(pool.root, [1, 2, 3, 4, 5], 0) == (pool.root, (1, 2, 3))
    assert pool.key(pool.root, [1, 2, 3, 4, 5], 1) is None


def test_eviction_takes_the_oldest_and_leaves_before_roots():
    pool = PagePool(4, 1)
    old, new = fill(pool, [1, 2]), fill(pool, [3, 4])
    pool.release(old)
    pool.release(new)
    assert [pool.allocate() for _ in range(3)] == [old[1], old[0], new[1]]
    assert pool.stats.evicted == 3
    assert pool.match([3, 4], 2)[0] == new[:1]


def test_a_hit_makes_a_page_young_again():
    pool = PagePool(2, 1)
    first, second = fill(pool, [1]), fill(pool, [2])
    pool.release(first)
    pool.release(second)
    pool.release(fill(pool, [1]))
    assert pool.allocate() == second[0]


def test_the_child_of_an_evicted_page_is_not_found_under_its_successor():
    pool = PagePool(3, 1)
    parent, child = fill(pool, [1, 2])
    pool.release([parent])  # a sequence may not do this alone, but the tree must bear it
    pool.allocate(), pool.allocate()
    assert pool.match([1, 2], 2)[0] == []
    pool.release([child])
    assert pool.match([1, 2], 2)[0] == []
    pool.check()


def test_a_second_page_of_the_same_content_is_freed_not_cached():
    pool = PagePool(2, 1)
    first, second = pool.allocate(), pool.allocate()
    node = pool.register(first, (pool.root, (7,)))
    assert pool.register(second, (pool.root, (7,))) == node
    pool.release([second])
    assert pool.match([7], 1) == ([first], node)
    assert pool.allocate() == second
    assert pool.stats.evicted == 0


def test_nothing_is_known_after_invalidate_and_old_parents_lead_nowhere():
    pool = PagePool(4, 1)
    pages = fill(pool, [1, 2])
    root, stale = pool.root, pool.match([1, 2], 2)[1]
    pool.invalidate()
    pool.register(pages[0], (root, (1,)))
    pool.check()
    assert pool.match([1, 2], 2)[0] == []
    extra = pool.allocate()
    pool.register(extra, (stale, (3,)))
    fill(pool, [1])
    assert pool.match([1, 2, 3], 3)[0] != [*pages, extra]
    assert len(pool.match([1, 2, 3], 3)[0]) == 1


def test_without_a_prefix_cache_nothing_is_known():
    pool = PagePool(4, 1, enable_prefix_cache=False)
    pool.release(fill(pool, [1, 2]))
    assert pool.match([1, 2], 2)[0] == []
    assert pool.stats.evicted == 0
    pool.check()


def test_double_free_is_refused():
    pool = PagePool(2, 1)
    page = pool.allocate()
    pool.release([page])
    with pytest.raises(RuntimeError, match=f"release: nobody holds page {page}"):
        pool.release([page])
    with pytest.raises(RuntimeError, match=f"register: nobody holds page {page}"):
        pool.register(page, (pool.root, (1,)))
    pool.check()


@pytest.mark.parametrize("harm", ["lost", "twice", "unknown", "stale"])
def test_check_can_fail(harm):
    pool = PagePool(4, 1)
    pages = fill(pool, [1, 2])
    pool.release(pages[1:])
    pool.check()
    if harm == "lost":
        pool._free.pop()
    elif harm == "twice":
        pool._free.append(pages[0])
    elif harm == "unknown":
        pool._nodes[pages[1]] = None
    else:
        pool._tree.clear()
    with pytest.raises(AssertionError):
        pool.check()
