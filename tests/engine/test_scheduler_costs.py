"""What the scheduler costs: tokens computed twice, look-ups of one prompt, ends of many samples; and the order of
decodes in which attention costs the least."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import drain, expected, make, request, shape, step

from vexact_engine.core.pages import PagePool
from vexact_engine.core.plan import Sampled


class Nothing:
    """A model whose every token is 1."""

    def run(self, plan):
        count = len(plan.sampled_chunks)
        return Sampled([1] * count, [0.0] * count, [0.0] * count)


def computed_twice(reserve, prompt, new, requests, pages):
    """The share of all tokens that preemption has made the engine compute again."""
    scheduler, _ = make(
        num_pages=pages,
        page_size=16,
        max_num_seqs=256,
        max_num_batched_tokens=512,
        enable_prefix_cache=False,
        reserve=reserve,
    )
    for i in range(requests):
        scheduler.add(request([i % 5] * prompt, max_new_tokens=new))
    drain(scheduler, Nothing(), most=100_000)
    stats = scheduler.stats
    needed = requests * (prompt + new - 1)
    return (stats.prefill_tokens + stats.decode_tokens - needed) / needed, stats.steps


@pytest.mark.parametrize("prompt, new, requests, pages", [(50, 400, 64, 200), (16, 300, 32, 60)])
def test_little_is_computed_twice_in_a_small_cache(prompt, new, requests, pages):
    before, steps_before = computed_twice(0.0, prompt, new, requests, pages)
    after, steps = computed_twice(None, prompt, new, requests, pages)
    assert before > 0.3, "this load is no test"
    assert after < 0.6 * before
    assert steps < 1.12 * steps_before  # and the cache is not left empty for it


def test_everything_reserved_is_never_preempted():
    assert computed_twice(1.0, 50, 100, 32, 100)[0] == 0


@given(st.sampled_from([None, 0.0, 0.3, 1.0]), st.lists(st.integers(1, 30), min_size=1, max_size=12))
def test_no_reserve_is_a_deadlock_or_changes_a_token(reserve, lengths):
    scheduler, model = make(num_pages=12, max_num_seqs=5, reserve=reserve)
    requests = [request([1, 2] * (length // 2) + [3], max_new_tokens=length) for length in lengths]
    for one in requests:
        scheduler.add(one)
    drain(scheduler, model)
    for one in requests:
        assert one.sequences[0].tokens == expected(one.sequences[0])


def test_a_prompt_is_looked_up_once_for_all_its_samples(monkeypatch):
    pages, samples = 256, 32
    scheduler, _ = make(num_pages=2048, page_size=16, max_num_seqs=64, max_num_batched_tokens=512)
    looked, key = 0, PagePool.key

    def counting(self, *args):
        nonlocal looked
        looked += 1
        return key(self, *args)

    monkeypatch.setattr(PagePool, "key", counting)
    one = request(list(range(16)) * pages, n=samples, max_new_tokens=2)
    scheduler.add(one)
    drain(scheduler, Nothing())
    assert all(s.generated == [1, 1] for s in one.sequences)
    # each page a few times, and each sample a few times in each step of the prefill: not each page for each sample
    assert looked < 8 * pages + 8 * samples * scheduler.stats.steps < pages * samples


def test_a_look_up_that_is_shared_is_forgotten_with_the_pages():
    scheduler, model = make(num_pages=16, page_size=4, max_num_seqs=2)
    one = request([1, 2, 3, 4] * 6, n=5, max_new_tokens=3)
    scheduler.add(one)
    other = request([6] * 40, max_new_tokens=2)
    while not one.sequences[0].finished:
        step(scheduler, model)
    assert one.pages.pages
    scheduler.reset_cache(weight_version=1)
    scheduler.add(other)
    drain(scheduler, model)
    assert all(s.tokens == expected(s) for s in (*one.sequences, *other.sequences))


def test_the_end_of_many_samples_is_no_square():
    def seconds(n):
        scheduler, _ = make(num_pages=64, max_num_seqs=8)
        one = request([1] * 5, n=n)
        scheduler.add(one)
        scheduler.schedule()
        begin = time.process_time()
        assert len(scheduler.abort(one)) == n and one.finished
        return time.process_time() - begin

    assert min(seconds(4000) for _ in range(3)) < 60 * min(
        seconds(250) for _ in range(3)
    )  # 16 times as many; a square: 256


def test_progress_is_the_first_in_line_s():
    scheduler, model = make(max_num_batched_tokens=4, max_num_seqs=2)
    assert scheduler.has_progressed
    first, second = request([1] * 11, max_new_tokens=3), request([2] * 2, max_new_tokens=3)
    scheduler.add(first)
    step(scheduler, model)
    scheduler.add(second)
    scheduler.reset_cache()
    for _ in range(2):
        assert not scheduler.has_progressed
        step(scheduler, model)
    step(scheduler, model)
    assert len(first.sequences[0].generated) == 1 and scheduler.has_progressed
    scheduler.reset_cache()
    assert not scheduler.has_progressed
    scheduler.abort(first)
    assert scheduler.has_progressed  # it waits for nothing any more
    drain(scheduler, model)


def test_what_keeps_its_pages_shares_them_with_nobody():
    scheduler, model = make(page_size=4)
    one = request([1, 2, 3, 4] * 3, max_new_tokens=12)
    scheduler.add(one)
    step(scheduler, model)
    step(scheduler, model)
    scheduler.reset_cache(weight_version=1, keep_running=True)
    assert scheduler.running == one.sequences and scheduler.stats.preemptions == 0
    plan = scheduler.schedule()
    scheduler.commit(plan, Sampled([1], [0.0], [0.0]))
    other = request([1, 2, 3, 4] * 3, max_new_tokens=1)
    scheduler.add(other)
    known = scheduler.stats.prefix_tokens
    plan = scheduler.schedule()
    scheduler.commit(plan, Nothing().run(plan))
    assert scheduler.stats.prefix_tokens == known
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        scheduler.commit(plan, Nothing().run(plan))
    scheduler.pool.check()
    assert scheduler.pool.num_available == scheduler.pool.num_pages


def test_decodes_of_most_keys_come_first():
    scheduler, model = make(longest_first=True, max_num_batched_tokens=16, enable_prefix_cache=False)
    for length, name in zip((1, 4, 2, 3, 5), "abcde"):
        scheduler.add(request([length] * length, name))
    assert [name for name, *_ in shape(step(scheduler, model))] == list("abcde"), "prefills, in the order of arrival"
    scheduler.add(request([6, 6], "new"))
    assert [name for name, *_ in shape(step(scheduler, model))] == ["e", "b", "d", "c", "a", "new"]
    assert [s.request.id for s in scheduler.running] == [*"abcde", "new"], "and nothing else is another's turn"
    requests = list(scheduler.requests)
    drain(scheduler, model)
    assert all(sequence.tokens == expected(sequence) for one in requests for sequence in one.sequences)
