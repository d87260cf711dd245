"""Which replica gets a request: a function of what was asked before."""

from hypothesis import given
from hypothesis import strategies as st

from vexact_engine.parallel.router import Router, chain

PROMPT = list(range(40))


def test_a_page_s_number_stands_for_all_that_is_before_it():
    pages = chain(PROMPT, 4)
    assert len(pages) == 10 and chain(PROMPT[:39], 4) == pages[:9]
    other = [99, *PROMPT[1:]]
    assert not set(chain(other, 4)) & set(pages)
    assert chain([], 4) == chain([1, 2, 3], 4) == []


def test_load_alone_decides_where_nothing_is_known():
    router, given_to = Router([100] * 3), []
    for i in range(9):
        at = router.choose(chain([i] * 40, 4), range(3))
        router.begin(at, chain([i] * 40, 4), 1)
        given_to.append(at)
    assert given_to == [0, 1, 2] * 3
    router.end(1, 1)
    assert router.choose(chain([50] * 40, 4), range(3)) == 1
    assert router.choose(chain([50] * 40, 4), [0, 2]) == 0


def test_a_beginning_that_is_known_wins_until_its_replica_has_too_much_to_do():
    router, pages = Router([100] * 2), chain(PROMPT, 4)
    router.begin(1, pages, 1)
    given_to = []
    for _ in range(20):
        at = router.choose(chain([*PROMPT, 7, 7, 7, 7], 4), range(2))
        router.begin(at, pages, 1)
        given_to.append(at)
    assert given_to[:8] == [1] * 8  # nine samples: eight more than the other
    assert given_to[8] == 0 and set(given_to[8:]) == {0, 1}
    assert abs(router.samples(0) - router.samples(1)) <= 9


def test_less_than_half_of_a_prompt_counts_for_nothing():
    router = Router([100] * 2)
    router.begin(1, chain(PROMPT[:16], 4), 1)
    assert router.choose(chain(PROMPT, 4), range(2)) == 0
    router.learn(1, chain(PROMPT[:20], 4))
    assert router.choose(chain(PROMPT, 4), range(2)) == 1


def test_what_it_was_given_longest_ago_a_replica_has_not_any_more():
    router = Router([12, 12])
    first, second = chain(PROMPT, 4), chain([9] * 40, 4)
    router.learn(1, first)
    router.learn(1, second)
    assert router.choose(second, range(2)) == 1
    assert router.choose(first, range(2)) == 0  # two of ten pages are left
    router.forget(1)
    assert router.choose(second, range(2)) == 0


ASKED = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40), st.integers(1, 8), st.booleans()), max_size=40)


@given(ASKED, st.integers(1, 4))
def test_the_same_questions_have_the_same_answers(asked, replicas):
    def run():
        router, answers = Router([20] * replicas), []
        for kind, length, samples, ends in asked:
            pages = chain([kind] * 8 + PROMPT[:length], 4)
            answers.append(router.choose(pages, range(replicas)))
            router.begin(answers[-1], pages, samples)
            if ends:
                router.end(answers[-1], samples)
        return answers

    assert run() == run()
