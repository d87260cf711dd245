"""What a completion says of its times and costs."""

import functools
from types import SimpleNamespace

from toy import drain, make, request, step


def test_a_completion_says_when_what_happened_and_what_it_cost(monkeypatch):
    clock = SimpleNamespace(monotonic=functools.partial(next, iter(range(1000))))
    monkeypatch.setattr("vexact_engine.request.time", clock)
    monkeypatch.setattr("vexact_engine.core.scheduler.time", clock)
    scheduler, model = make(num_pages=6, max_num_seqs=4)
    first, second = request(range(1, 6), "a", max_new_tokens=12), request(range(1, 6), "b", max_new_tokens=12)
    scheduler.add(first)
    step(scheduler, model)
    scheduler.add(second)
    drain(scheduler, model)
    a, b = first.sequences[0].completion().metrics, second.sequences[0].completion().metrics
    for found in (a, b):
        assert len(found.token_times) == 12 and found.token_times == sorted(found.token_times)
        assert found.arrived < found.started < found.token_times[0] and found.finished == found.token_times[-1]
        assert found.time_to_first_token == found.token_times[0] - found.arrived
        assert found.time_per_token == (found.token_times[-1] - found.token_times[0]) / 11
    assert (a.cached_tokens, b.cached_tokens) == (0, 4), "one whole page of the prompt was there already"
    assert (a.preemptions, b.preemptions) == (0, scheduler.stats.preemptions) and b.preemptions > 0


def test_times_of_what_never_ran():
    scheduler, _ = make()
    one = request([1, 2])
    scheduler.add(one)
    scheduler.abort(one)
    metrics = one.sequences[0].completion().metrics
    assert (metrics.started, metrics.token_times, metrics.cached_tokens) == (None, [], 0)
    assert metrics.time_to_first_token is metrics.time_per_token is None and metrics.finished >= metrics.arrived
