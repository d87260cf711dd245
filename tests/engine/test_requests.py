"""What a request is given that its caller did not ask for."""

import gc
import multiprocessing
from concurrent.futures import ThreadPoolExecutor

import pytest

from vexact_engine.core import garbage
from vexact_engine.request import Request, _Fresh, fresh


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
