"""What a step is taken to cost, and that drafts which lose are stopped."""

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import make, request

from vexact_engine import Speculation
from vexact_engine.core.pace import Pace, bucket
from vexact_engine.core.plan import Sampled
from vexact_engine.request import derive_seed


def measured(times):
    """A Pace that has measured (sequences, drafted rows) -> seconds."""
    pace = Pace()
    for _ in range(8):
        for (sequences, drafted), seconds in times.items():
            pace.note(sequences, drafted, seconds)
    return pace


def test_drafts_are_verified_where_that_is_faster():
    assert Pace().worth(1, [0.9] * 4) == 0  # nothing is known yet: a step of single tokens first
    free = measured({(1, 0): 1.0, (1, 7): 1.0})
    assert free.worth(1, [0.9, 0.5, 0.1]) == 3
    dear = measured({(1, 0): 1.0, (1, 1): 2.0, (1, 2): 3.0})
    assert dear.worth(1, [0.9, 0.8]) == 0
    some = measured({(1, 0): 1.0, (1, 1): 1.1, (1, 2): 1.2, (1, 3): 9.0})
    assert some.worth(1, [0.9, 0.8, 0.7]) == 2
    assert some.worth(1, [0.05]) == 0
    assert measured({(1, 0): 1.0}).worth(1, [0.3] * 5) == 2  # what was never measured is tried, ...
    assert measured({(1, 0): 1.0, (1, 2): 1.0}).worth(1, [0.3] * 5) == 4  # ... twice as much of it each time
    again = measured({(4, 0): 1.0, (4, 1): 3.0})
    assert sum(again.worth(4, [0.9]) for _ in range(1280)) == 12  # and now and then anew, ever less often ...
    assert sum(again.worth(4, [0.1]) for _ in range(1280)) == 0  # ... unless nothing can be gained
    dear = measured({(4, 0): 1.0, (4, 4): 3.0, (4, 8): 5.0})
    assert set(dear.worth(4, [0.6] * 8) for _ in range(17)) == {0, 2}  # as many as take no more than twice as long


def test_the_first_step_of_a_kind_is_not_counted():
    pace = Pace()
    pace.note(2, 0, 100.0)
    assert pace.seconds(2, 0) is None
    pace.note(2, 0, 1.0)
    assert pace.seconds(2, 0) == pace.seconds(2, 5) == 1.0
    for _ in range(2):
        pace.note(2, 10, 2.0)
    assert pace.seconds(2, 20) == 2.0, "of one number of rows it is not known what each of them takes"
    for _ in range(2):
        pace.note(2, 20, 3.0)
    assert pace.seconds(2, 30) == pytest.approx(4.0) and pace.seconds(2, 5) == pytest.approx(1.5)
    assert pace.seconds(3, 10) == pytest.approx(2.1), "of about as many sequences, and a row more"
    assert pace.seconds(5, 10) is None
    for _ in range(20):
        pace.note(2, 10, 50.0)  # whatever it was
    pace.note(2, 10, 2.0)
    before = pace.seconds(2, 10)
    pace.note(2, 10, 2.0)
    assert pace.seconds(2, 10) < before
    assert [bucket(n) for n in (0, 1, 7, 8, 9, 16, 17, 33, 256, 257)] == [0, 1, 7, 8, 10, 16, 20, 40, 256, 320]


def test_what_graphs_took_is_known_from_the_start():
    graphs = {1: 1.0, 8: 1.0, 16: 5.0, 32: 13.0}
    pace = Pace(graphs)
    assert pace.worth(4, [0.9] * 28) == 0  # how long a step of theirs takes still is not
    for _ in range(2):
        pace.note(4, 0, 1.5)
    assert [pace.seconds(4, drafted) for drafted in (4, 8, 12, 28, 40)] == pytest.approx([1.5, 5.5, 5.5, 13.5, 13.5])
    assert pace.worth(4, [0.9] * 28) == 4 and Pace().furthest(4) == 2
    assert measured({(4, 0): 1.5}).worth(4, [0.9] * 28) == 2


def test_rows_that_would_be_padding_are_drafted():
    pace = Pace({1: 1.0, 64: 1.0, 100: 1.05, 320: 4.0})
    for _ in range(2):
        pace.note(64, 0, 1.0)
    chances = [0.7] * 64 + [0.5] * 64
    assert pace.worth(64, chances) == 36, "a bucket more, and the step would be padded to 320"
    assert pace.worth(64, chances[:30]) == 30


def test_a_step_of_fewer_sequences_still_takes_some_time():
    pace = measured({(8, 0): 1.0, (8, 8): 1.0, (8, 64): 60.0})  # a row takes more than an eighth of the whole step
    assert pace.seconds(4, 0) == 0.5 and pace.worth(4, [0.9, 0.1]) == 0
    disturbed = measured({(4, 0): 1.0})._on_device
    assert disturbed(1, 8) == 0.0 and Pace({1: 5.0, 8: 1.0})._on_device(1, 8) == 0.0


STEPS = st.tuples(st.integers(1, 300), st.integers(0, 600), st.floats(1e-7, 1e3))


@settings(max_examples=200, deadline=None)
@given(
    st.dictionaries(st.integers(1, 64), st.floats(1e-7, 1.0), max_size=4),
    st.lists(STEPS, max_size=40),
    st.integers(1, 300),
    st.lists(st.floats(0.0, 1.0), max_size=40),
)
def test_whatever_steps_took_there_is_an_answer(graphs, steps, sequences, chances):
    pace = Pace(graphs)
    for had, drafted, seconds in steps:
        pace.note(had, drafted, seconds)
        pace.note(had, drafted, seconds)
    known = [pace.seconds(sequences, drafted) for drafted in range(50)]
    assert all(value is None for value in known) or min(known) > 0
    assert 0 <= pace.worth(sequences, sorted(chances, reverse=True)) <= len(chances)


class Told:
    """A model whose tokens follow from seed and position alone."""

    def token(self, seed, position):
        return derive_seed(seed, position) % 997

    def run(self, plan):
        drawn = [
            self.token(chunk.sequence.seed, position)
            for chunk in plan.chunks
            for position in range(chunk.end - chunk.draws + 1, chunk.end + 1)
        ]
        return Sampled(drawn, [0.0] * len(drawn), [0.0] * len(drawn))


@pytest.mark.parametrize(
    "sequences,row,most", [(64, 0.011, (1.05, 1.02)), (64, 0.03, (1.02, 1.02)), (8, 0.01, (0.75, 0.75))]
)
def test_drafts_lose_nothing_where_plans_are_made_ahead(sequences, row, most, monkeypatch):
    """The host's two milliseconds are hidden where a plan is made ahead, and the first step with drafts hides its own:
    what that took, and what single tokens took behind drafts, is no measure of those that follow."""
    now, source, model = [0.0], random.Random(0), Told()
    monkeypatch.setattr("vexact_engine.core.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))

    def asked(scheduler, drafts):
        begin = device = now[0]
        for seed in range(sequences):
            answer = [model.token(derive_seed(seed, 0), 8 + place) for place in range(150)]
            draft = [t if source.random() < 0.7 else t + 1 for t in answer] if drafts else ()
            scheduler.add(request([seed] * 8, max_new_tokens=150, seed=seed, draft=draft))
        pending = []
        while scheduler.has_unfinished or pending:
            while len(pending) < 2 and (plan := scheduler.schedule(lookahead=True)):
                now[0] += 1.3e-3
                device = max(device, now[0]) + 4.1e-3 + row * 1e-3 * (plan.num_tokens - len(plan.chunks))
                pending.append((plan, model.run(plan), device))
            plan, drawn, done = pending.pop(0)
            now[0] = max(now[0], done)
            scheduler.commit(plan, drawn)
            now[0] += 0.7e-3
        return now[0] - begin

    took = []
    for speculation in (None, Speculation(sources=("given",))):
        config = {"num_pages": 9000, "page_size": 16, "max_num_seqs": 64, "max_num_batched_tokens": 1024}
        scheduler, _ = make(**config, speculation=speculation)
        scheduler.vocab_size = None
        took.append([asked(scheduler, speculation is not None) for _ in most])
    ratios = [ours / plain for plain, ours in zip(*took)]
    assert all(ratio <= allowed for ratio, allowed in zip(ratios, most)), ratios


def test_what_the_first_step_with_drafts_hides_is_not_taken_for_its_time():
    pace = Pace()
    for _ in range(3):
        pace.note(4, 0, 4.0, ahead=True)
    for _ in range(2):
        pace.note(4, 4, 5.0, ahead=True)
    assert pace.seconds(4, 4) == 5.0  # as long as no more is known
    pace.note(4, 4, 7.0, ahead=False)
    pace.note(4, 4, 5.0, ahead=True)
    pace.note(4, 0, 6.0, ahead=False)
    assert pace.seconds(4, 4) == 7.0 and pace.seconds(4, 0) == 4.0


def test_drafts_that_lose_are_not_allowed_until_they_are_paid_for():
    """Whatever is known of times: what counts is what steps gave."""
    pace = measured({(4, 0): 1.0, (4, 4): 1.0})
    assert pace.worth(4, [0.9] * 4) == 4
    pace.account(4, 4, 1.0, 8)
    for _ in range(4):
        assert pace.allowed(4), "what was gained may be lost"
        pace.account(4, 4, 1.5, 4)
    assert not pace.allowed(4)
    assert pace.allowed(4, "answer"), "who has lost nothing pays for nobody"
    steps = 0
    while not pace.allowed(4):
        pace.account(4, 0, 1.0, 4)
        steps += 1
    assert 10 < steps < 200


def test_single_tokens_behind_drafts_are_counted_where_these_came_from():
    pace = measured({(4, 0): 1.0, (4, 4): 1.0})
    for _ in range(3):
        pace.account(4, 4, 1.0, 4, "text")
        pace.account(4, 0, 1.4, 4, "answer")
    assert not pace.allowed(4, "text") and pace.allowed(4, "answer")


def test_what_single_tokens_take_is_looked_at_again():
    """Where all steps have drafts nobody would know that what is known of others is too much."""
    pace = measured({(4, 0): 2.0, (4, 4): 3.0})
    asked = [0.7] * 4
    plain = 0
    for _ in range(60):
        drafted = pace.worth(4, asked)
        plain += not drafted
        pace.note(4, drafted, 3.0 if drafted else 1.0)
    assert plain > 30 and pace.seconds(4, 0) < 1.3 and pace.worth(4, asked) == 0
