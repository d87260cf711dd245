"""What a request is given that its caller did not ask for."""

import gc
import itertools
import multiprocessing
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vexact_engine import SamplingParams
from vexact_engine.core import garbage
from vexact_engine.request import Request, _Fresh, as_requests, fresh, start_order

ROOT = Path(__file__).parents[2]


def _draw(pipe):
    pipe.send([fresh() for _ in range(20)])


def test_every_request_has_a_seed_and_a_name_of_its_own():
    requests = [Request([1]) for _ in range(1500)]  # more than one block of what the system gives
    assert len({request.seed for request in requests}) == len({request.id for request in requests}) == 1500
    assert all(0 <= request.seed < 2**64 for request in requests)
    assert max(request.seed for request in requests) > 2**63


def test_threads_share_no_seed():
    words = _Fresh()
    with ThreadPoolExecutor(8) as pool:
        drawn = list(pool.map(lambda _: words(), range(20_000)))
    assert len(set(drawn)) == 20_000


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_fork_draws_others():
    fresh()  # a block is under way
    context = multiprocessing.get_context("fork")
    found = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        process = context.Process(target=_draw, args=(theirs,))
        process.start()
        found += ours.recv()
        process.join()
    assert len({*found, *(fresh() for _ in range(20))}) == 60


def test_garbage_of_a_process_that_is_not_ours_alone_is_left_to_it():
    before = gc.get_freeze_count()
    garbage.freeze(alone=False)
    assert gc.get_freeze_count() == before


def test_what_was_frozen_is_freed_at_the_end():
    """Else Triton's bindings list, behind the last line of `vexact serve`, what of theirs is left."""
    code = (
        "import atexit, gc; atexit.register(lambda: print(gc.get_freeze_count()))\n"
        "from vexact_engine.core import garbage; garbage.freeze(); print(gc.get_freeze_count() > 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.stdout.split() == ["True", "0"], done.stderr


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 5)), max_size=30), st.integers(1, 12))
def test_the_longest_of_the_last_begin_first(asked, at_once):
    params = [SamplingParams(max_new_tokens=most, n=n) for most, n in asked]
    order = start_order(as_requests([[1]] * len(params), params, None), at_once)
    assert sorted(order) == list(range(len(params)))
    given_order = next((place for place, index in enumerate(order) if index != place), len(order))
    last = order[given_order:]
    assert sum(params[index].n for index in last) <= 2 * at_once
    limits = [params[index].max_new_tokens for index in last]
    assert limits == sorted(limits, reverse=True)
    assert all(a < b for a, b in itertools.pairwise(last) if params[a].max_new_tokens == params[b].max_new_tokens)
    if given_order:  # nobody else could have gone with these
        rest = sum(one.n for one in params[given_order:])
        late = [one.max_new_tokens for one in params[given_order - 1 :]]
        assert rest + params[given_order - 1].n > 2 * at_once or late[0] >= max(late)


def test_two_of_one_name_begin_as_they_are_given():
    params = [SamplingParams(max_new_tokens=most) for most in (1, 2, 3)]
    assert start_order(as_requests([[1]] * 3, params, ["a", "b", "c"]), 4) == [2, 1, 0]
    assert start_order(as_requests([[1]] * 3, params, ["a", "b", "a"]), 4) == [0, 1, 2]


def test_what_will_be_refused_has_a_turn():
    each = [([1], params, None) for params in (SamplingParams(max_new_tokens=2), None, {"n": 3}, "x")]
    assert sorted(start_order(each, 4)) == [0, 1, 2, 3]
