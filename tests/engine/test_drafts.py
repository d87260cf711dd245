"""Drafts without a model: what is found in texts, what is kept of answers; and that a
scheduler with drafts of every kind draws what it draws without. The model is a toy (toy.py)."""

import itertools
import random
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from toy import VOCAB, ToyDraft, drain, draw, expected, make, request

from vexact_engine.config import SamplingParams, Speculation
from vexact_engine.core.answers import MOST_OF_A_PROMPT, Answers
from vexact_engine.core.plan import Sampled
from vexact_engine.core.suffixes import ROOT, Suffixes
from vexact_engine.request import Request, derive_seed

ALWAYS = Speculation(max_draft_tokens=4, always=True)

# What stood before


def stood_before(texts, number, end):
    """The most tokens before `end` of a text that stand anywhere else."""
    for length in range(end, 0, -1):
        for other, text in enumerate(texts):
            for at in range(length, len(text) + 1):
                if (other, at) != (number, end) and text[at - length : at] == texts[number][end - length : end]:
                    return length
    return 0


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=30))
def test_the_longest_end_that_stood_before_is_found(added):
    suffixes, texts, states = Suffixes(), [[] for _ in range(4)], [ROOT] * 4
    for number, token in added:
        text = texts[number]
        text.append(token)
        states[number], match = suffixes.extend(states[number], token, number, len(text))
        assert match.length == stood_before(texts, number, len(text))
        for other, end in ((match.text, match.end), (match.first_text, match.first_end)):
            if match.length:
                assert texts[other][end - match.length : end] == text[-match.length :]
                assert (other, end) != (number, len(text))


@pytest.mark.parametrize("vocabulary", [1, 2, 5000])
def test_a_token_is_added_in_constant_time_on_average(vocabulary):
    def seconds(count):
        suffixes, state, source = Suffixes(), ROOT, random.Random(0)
        begin = time.process_time()
        for end in range(1, count + 1):
            state, _ = suffixes.extend(state, source.randrange(vocabulary), 0, end)
        assert len(suffixes) <= 2 * count
        return time.process_time() - begin

    assert min(seconds(16000) for _ in range(2)) < 40 * min(seconds(1000) for _ in range(3))  # a square: 256


# What is kept


def test_answers_are_kept_within_bounds(tmp_path):
    answers = Answers(60, VOCAB)
    answers.put([1, 2], 5, [3, 4])
    answers.put([1, 2], 5, [4])
    answers.put([1, 2], 6, [5, 6])
    assert {seed: list(one) for seed, one in answers.of([1, 2]).items()} == {5: [4], 6: [5, 6]} and answers.tokens == 5
    assert answers.of([2, 1]) == {} and len(answers) == 2
    answers.put([3], -(2**63), [1] * 50)
    answers.of([1, 2])
    answers.put([4], 1, [2] * 9)  # the prompt that was used longest ago goes
    assert not answers.of([3]) and answers.tokens == 5 + 10
    answers.put([4], 1, [2] * 60)  # more than all
    assert list(answers.of([4])[1]) == [2] * 9
    answers.save(tmp_path / "kept")
    again = Answers(60, VOCAB)
    again.load(tmp_path / "kept")
    assert [(list(p), seed, list(a)) for p, seed, a in again] == [(list(p), seed, list(a)) for p, seed, a in answers]
    assert again.tokens == answers.tokens and [path.name for path in tmp_path.iterdir()] == ["kept"]
    for seed in range(MOST_OF_A_PROMPT + 3):
        again.put([6], seed, [])
    assert min(again.of([6])) == 3
    again.clear()
    assert not len(again) and again.tokens == 0


def test_files_that_hold_no_answers_are_refused(tmp_path):
    answers, path = Answers(100), tmp_path / "kept"
    answers.put([1, 2], 5, [3, 40])
    answers.save(path)
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="has the token id 40, expected ids from 0 to 6"):
        Answers(100, VOCAB).load(path)
    for damaged, what in ((b"", "no file of answers"), (whole[:-1], "damaged"), (whole[:30], "damaged")):
        path.write_bytes(damaged)
        fresh = Answers(100)
        with pytest.raises(ValueError, match=what):
            fresh.load(path)
        assert not len(fresh)
    path.write_bytes(whole[:10] + b"\xff" * 16 + whole[26:])
    with pytest.raises(ValueError, match="damaged"):
        Answers(100).load(path)


# What is drawn


def right_answer(prompt, seed, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(draw(tokens, seed, 0))
    return tokens[len(prompt) :]


def drafted(data, number, length):
    """A request with answers at hand: right ones, wrong ones, right ones that go wrong, too long ones, none."""
    prompt, count, n = [3 + (number // 3 + t) % 4 for t in range(length)], 1 + number % 12, 1 + number % 3
    seed = data.draw(st.integers(0, 3))
    answers = []
    for index in range(n):
        right = right_answer(prompt, derive_seed(seed, index), count + 3)
        kind = data.draw(st.sampled_from(["right", "wrong", "mixed", "none"]))
        if kind == "wrong":
            right = [(t + 1) % VOCAB for t in right]
        elif kind == "mixed":
            right = [t if data.draw(st.integers(0, 3)) else (t + 1) % VOCAB for t in right]
        answers.append(right if kind != "none" else [0])
    stops = [data.draw(st.integers(0, VOCAB - 1))] if data.draw(st.booleans()) else []
    return Request(prompt, SamplingParams(max_new_tokens=count, seed=seed, n=n, draft=answers, stop_token_ids=stops))


ACTIONS = ["step", "step", "step", "add", "add", "preempt", "abort", "cancel", "reset"]


@given(st.data(), st.integers(1, 3), st.sampled_from([0, 1, 2, 4]), st.integers(1, 4))
def test_whatever_is_drafted_the_same_is_drawn(data, depth, page, stages):
    """At random: requests, preemptions, aborts, failed steps, resets, on a cache that is too small; with a prefix cache
    of pages of so many tokens, or none."""
    attack(data, depth, page, stages)


@given(st.data(), st.integers(1, 4), st.sampled_from([0, 1, 2, 4]), st.sampled_from([None, None, 8]), st.integers(1, 3))
def test_whatever_a_model_drafts_the_same_is_drawn(data, depth, page, chunk, stages):
    """The same where a model drafts, which finds all there that it is taken to have computed."""
    source, size = data.draw(st.randoms(use_true_random=False)), page or 4
    attack(data, depth, page, stages, ToyDraft(56 // size, size, lambda: source.random() < 0.7, chunk))


def attack(data, depth, page, stages, draft_model=None):
    size, cache = page or 4, page > 0
    pages = 56 // size
    scheduler, model = make(
        num_pages=pages,
        page_size=size,
        max_num_seqs=5,
        max_num_batched_tokens=12,
        enable_prefix_cache=cache,
        pipeline_parallel_size=stages,
        speculation=replace(ALWAYS, sources=("given",)) if draft_model else ALWAYS,
        eos_token_ids=[6],
        draft_model=draft_model,
        follows=data.draw(st.booleans()),
    )
    pending, requests = [], []

    def turn():
        plan = scheduler.schedule(lookahead=depth > 1)
        if plan:
            pending.append((plan, model.run(plan)))
            assert plan.num_tokens <= 12 and all(c.end < c.sequence.limit for c in plan.chunks)
        assert plan or pending or not scheduler.has_unfinished
        if pending and (len(pending) >= depth or not plan):
            scheduler.commit(*pending.pop(0))
        scheduler.pool.check()

    for _ in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "add":
            requests.append(drafted(data, len(requests), data.draw(st.integers(1, 14))))
            scheduler.add(requests[-1])
        elif action == "preempt" and scheduler.running:
            scheduler.preempt(data.draw(st.sampled_from(scheduler.running)))
        elif action == "abort" and requests:
            scheduler.abort(data.draw(st.sampled_from(requests)))
        elif action == "cancel" and (plan := scheduler.schedule(lookahead=depth > 1)):
            scheduler.cancel(pending[0][0] if pending else plan)
            pending.clear()
        elif action == "reset":
            scheduler.reset_cache()
        elif action == "step":
            turn()
    while scheduler.has_unfinished or pending:
        turn()
    assert scheduler.pool.num_available == pages and len(scheduler._slots) == scheduler._max_running
    stats = scheduler.stats
    for one in requests:
        for sequence in one.sequences:
            assert sequence.tokens == expected(sequence)
            assert sequence.accepted <= sequence.drafted and sequence.drafts is None
            assert len(sequence.logprobs) == len(sequence.generated) == len(sequence.token_times)
            if sequence.finish_reason == "length":
                assert len(sequence.tokens) == sequence.limit and not set(sequence.generated[:-1]) & sequence.stop_ids
            elif sequence.finish_reason == "stop":
                assert sequence.stop_reason == sequence.tokens[-1] in sequence.stop_ids
                assert not set(sequence.generated[:-1]) & sequence.stop_ids
    assert stats.accepted_tokens <= stats.drafted_tokens
    assert stats.accepted_tokens == sum(s.accepted for r in requests for s in r.sequences)


def alone(speculation, **params):
    scheduler, model = make(speculation=speculation, max_num_batched_tokens=64)
    one = request([1, 2], max_new_tokens=40, **params)
    scheduler.add(one)
    plans = drain(scheduler, model)
    assert one.sequences[0].tokens == expected(one.sequences[0])
    return len(plans), one.sequences[0]


def test_what_is_right_is_accepted_and_what_is_wrong_is_not():
    right = right_answer([1, 2], derive_seed(5, 0), 40)
    wrong = [(token + 1) % VOCAB for token in right]
    steps, sequence = alone(ALWAYS, draft=right)
    assert steps == 1 + -(-39 // 5) and (sequence.drafted, sequence.accepted) == (31, 31)
    given_alone = Speculation(max_draft_tokens=4, always=True, sources=("given",))
    steps, sequence = alone(given_alone, draft=wrong)
    assert steps == 40 and sequence.accepted == 0 < sequence.drafted < 50  # of 150: it rests
    half = right[:20] + wrong[20:21] + right[21:]
    assert alone(given_alone, draft=half)[0] < 20  # behind a token that was another the answer is followed again
    assert alone(given_alone)[0] == 40 and alone(None)[0] == 40


@pytest.mark.parametrize("most", [1, 4, 12])
@pytest.mark.parametrize("depth", [1, 2])
def test_an_answer_ends_with_the_draw_behind_its_last_token_but_one(most, depth):
    """The token that ended it is drawn there; a row of its own would be nobody's."""
    how = Speculation(max_draft_tokens=most, always=True, sources=("given",))
    scheduler, model = make(speculation=how, max_num_batched_tokens=64, eos_token_ids=[6], follows=True, max_num_seqs=4)
    seed = next(
        seed
        for seed in range(99)
        if 6 in (right := right_answer([1, 2], derive_seed(seed, 0), 30))[9:] and 6 not in right[:9]
    )
    right = right_answer([1, 2], derive_seed(seed, 0), 30)
    answer = right[: right.index(6) + 1]
    one = request([1, 2], max_new_tokens=40, seed=seed, draft=[answer])
    scheduler.add(one)
    drain(scheduler, model, lookahead=depth > 1)
    sequence = one.sequences[0]
    assert sequence.generated == answer and sequence.finish_reason == "stop"
    assert sequence.accepted <= len(answer) - 2 and (depth > 1 or sequence.drafted == sequence.accepted)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_model_drafts_with_no_plan_ahead_and_where_it_cannot_help_hardly_ever(depth, monkeypatch):
    """With plans ahead it waits until the last token is known. Where it is never right it is asked now and then, of a
    few; steps of single tokens go on ahead of each other."""
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])

    def run(right, always=False):
        drafts = ToyDraft(400, 4, lambda: right)
        ask = drafts.draft

        def timed(chains):
            clock[0] += 0.2 * max(chain.count for chain in chains)
            return ask(chains)

        drafts.draft = timed
        speculation = Speculation(max_draft_tokens=4, always=always, sources=(), mtp=True)
        scheduler, model = make(
            400, max_num_seqs=16, max_num_batched_tokens=64, draft_model=drafts, speculation=speculation
        )
        asked = [request([1, 2, i % 7], max_new_tokens=80, seed=i) for i in range(16)]
        for one in asked:
            scheduler.add(one)
        pending, ahead = [], 0
        while scheduler.has_unfinished or pending:
            plan = scheduler.schedule(lookahead=depth > 1)
            if plan:
                pending.append((plan, model.run(plan)))
                assert len(pending) == 1 or not any(plan.drafted for plan, _ in pending)
            if pending and (len(pending) >= depth or not plan):
                ahead += len(pending) > 1
                clock[0] += 1.0
                scheduler.commit(*pending.pop(0))
        assert all(sequence.tokens == expected(sequence) for one in asked for sequence in one.sequences)
        return scheduler.stats, drafts, ahead

    stats, drafts, _ = run(True)
    assert stats.steps < 45 and stats.accepted_tokens > 500
    stats, drafts, ahead = run(False)
    assert stats.accepted_tokens == 0 and stats.drafted_tokens < 80
    assert len(drafts.asked) < 60 and stats.steps < 90 and (depth == 1 or ahead > 60)


def test_what_was_answered_before_is_drafted():
    scheduler, model = make(speculation=ALWAYS, max_num_batched_tokens=64)
    steps = []
    for _ in range(2):
        one = request([1, 2], max_new_tokens=40, n=2)
        scheduler.add(one)
        steps.append(len(drain(scheduler, model)))
        assert all(s.tokens == expected(s) for s in one.sequences)
    assert steps[1] <= 10 < steps[0] and len(scheduler.drafter.answers) == 2


class Loop:
    """A model that says 1, 2, 3, 4, 5 for ever."""

    def run(self, plan):
        drawn = [(chunk.end - back) % 5 + 1 for chunk in plan.chunks for back in range(chunk.draws - 1, -1, -1)]
        return Sampled(drawn, [0.0] * len(drawn), [0.0] * len(drawn))


@pytest.mark.parametrize("sources", [("text",), ("samples",)])
def test_what_a_sequence_repeats_is_drafted(sources):
    scheduler, _ = make(speculation=Speculation(max_draft_tokens=4, always=True, sources=sources))
    scheduler.add(request([7], max_new_tokens=60))
    assert len(drain(scheduler, Loop())) < 24


def test_what_another_sample_has_drawn_is_drafted():
    speculation = Speculation(max_draft_tokens=4, always=True, sources=("samples",))
    scheduler, model = make(speculation=speculation, max_num_batched_tokens=64)
    first, second = (Request([1, 2], SamplingParams(seed=5, max_new_tokens=30)) for _ in range(2))
    scheduler.add(first)
    drain(scheduler, model)
    scheduler.add(second)
    assert len(drain(scheduler, model)) < 12 and second.sequences[0].accepted > 20


def test_what_is_added_to_texts_in_a_step_is_bounded(monkeypatch):
    """A prompt and answers are added over several steps; nothing is drafted from texts before that is done."""
    monkeypatch.setattr("vexact_engine.core.drafts._INDEXED", 10)
    scheduler, model = make(
        speculation=Speculation(max_draft_tokens=4, always=True, sources=("samples",)), num_pages=99
    )
    one = request([1, 2] * 12, max_new_tokens=40, draft=[[3] * 20])
    scheduler.add(one)
    sizes = []
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        scheduler.commit(plan, model.run(plan))
        sizes += [len(texts.suffixes) for texts in scheduler.drafter._texts.values()]
    grown = [after - before for before, after in itertools.pairwise(sizes)]
    assert (
        max(grown) <= 2 * 10
        and sum(size > 0 for size in grown) > 5
        and one.sequences[0].tokens == expected(one.sequences[0])
    )


def test_texts_that_nobody_needs_are_forgotten(monkeypatch):
    monkeypatch.setattr("vexact_engine.core.drafts._MOST_STATES", 200)
    monkeypatch.setattr("vexact_engine.core.drafts._MOST_OF_A_PROMPT", 60)
    scheduler, model = make(speculation=replace(ALWAYS, sources=("samples",)), max_num_batched_tokens=64)
    for number in range(12):
        one = request([number % 7, 1], max_new_tokens=30, seed=number)
        scheduler.add(one)
        drain(scheduler, model)
        assert one.sequences[0].tokens == expected(one.sequences[0])
        assert sum(len(texts.suffixes) for texts in scheduler.drafter._texts.values()) < 200
    assert not any(texts.users for texts in scheduler.drafter._texts.values())


def test_texts_that_no_step_has_indexed_are_forgotten_too(monkeypatch):
    """Steps with prompts draft nothing, and answers of one token have no other."""
    monkeypatch.setattr("vexact_engine.core.drafts._MOST_STATES", 4000)
    scheduler, model = make(speculation=replace(ALWAYS, sources=("samples",)), max_num_batched_tokens=64)
    for number in range(200):
        scheduler.add(request([number // 7, number % 7, 1], max_new_tokens=1))
        drain(scheduler, model)
    assert 1 < len(scheduler.drafter._texts) < 40


def test_a_step_that_computes_prompts_verifies_nothing():
    scheduler, model = make(speculation=ALWAYS, max_num_batched_tokens=8)
    right = right_answer([1], derive_seed(5, 0), 20)
    scheduler.add(request([1], max_new_tokens=20, draft=right))
    scheduler.commit(plan := scheduler.schedule(), model.run(plan))
    scheduler.add(request([2] * 20, max_new_tokens=1))
    for drafted_tokens in (0, 0, 0, 4):
        plan = scheduler.schedule()
        scheduler.commit(plan, model.run(plan))
        assert plan.drafted == drafted_tokens
    drain(scheduler, model)


def test_a_plan_ahead_waits_for_drafts():
    scheduler, model = make(speculation=ALWAYS)
    right = right_answer([1], derive_seed(5, 0), 20)
    scheduler.add(request([1], max_new_tokens=20, draft=right))
    scheduler.add(request([2], max_new_tokens=20, seed=8))  # nothing is drafted for it, and it waits too
    first = scheduler.schedule(lookahead=True)
    second = scheduler.schedule(lookahead=True)  # behind a token that is still to be drawn
    assert not first.drafted and second.chunks[0].token_ids == [-1, *right[1:5]] and second.chunks[1].token_ids == [-1]
    assert not scheduler.schedule(lookahead=True)
    scheduler.commit(first, model.run(first))
    assert not scheduler.schedule(lookahead=True)
    scheduler.commit(second, model.run(second))
    assert len(scheduler.running[0].generated) == 6
    drain(scheduler, model, lookahead=True)


def test_states_forget_what_no_chunk_ended_with():
    """Rows are appended within a chunk of 8 of the model's states alone."""
    scheduler, model = make(speculation=ALWAYS, chunk=8, enable_prefix_cache=False)
    right = right_answer([1], derive_seed(5, 0), 40)
    scheduler.add(request([1], max_new_tokens=40, draft=right))
    for plan in drain(scheduler, model):
        for chunk in plan.chunks:
            assert chunk.end // 8 == (chunk.end - len(chunk.draft)) // 8


def test_pages_of_what_was_not_drawn_are_known_to_nobody():
    scheduler, model = make(page_size=1, speculation=replace(ALWAYS, sources=("given",)))
    right = right_answer([1], derive_seed(5, 0), 20)
    one = request([1], max_new_tokens=9, draft=[*right[:3], (right[3] + 1) % VOCAB, *right[4:]])
    scheduler.add(one)
    for _ in range(2):
        plan = scheduler.schedule()
        scheduler.commit(plan, model.run(plan))
    sequence = one.sequences[0]
    assert plan.drafted == 4 and sequence.generated == right[:4]
    assert sequence.num_known == sequence.num_computed == sequence.num_planned == 4, "the last one is to be computed"
    drain(scheduler, model)
    other = request([1, *right], max_new_tokens=4)
    scheduler.add(other)
    drain(scheduler, model)
    assert sequence.tokens == expected(sequence) and other.sequences[0].tokens == expected(other.sequences[0])
    assert other.sequences[0].cached_tokens == 9


def test_drafts_take_no_page_from_others():
    scheduler, model = make(num_pages=6, page_size=1, speculation=ALWAYS, enable_prefix_cache=False)
    for seed in range(2):
        answer = right_answer([1], derive_seed(seed, 0), 20)
        scheduler.add(request([1], max_new_tokens=5, seed=seed, draft=answer))
    requests = list(scheduler.requests)
    drain(scheduler, model)
    assert scheduler.stats.preemptions <= 1 and all(r.sequences[0].tokens == expected(r.sequences[0]) for r in requests)


@pytest.mark.parametrize(
    "sequences,how,row,most",
    [
        (64, "wrong", 0.0, 1.02),
        (64, "wrong", 0.05, 1.02),
        (64, "right", 1 / 64, 1.03),  # a drafted row takes as much as another: nothing can be gained
        (64, "some", 0.0015, 0.8),
        (16, "some", 0.0015, 0.6),
        (4, "right", 0.001, 0.4),
        (1, "right", 0.02, 0.3),
        (1, "none", 0.5, 1.03),
    ],
)
def test_drafts_take_no_longer_than_none(sequences, how, row, most, monkeypatch):
    """Where a step of B sequences takes 1 and each drafted row so much more; and with drafts 0.15 more, however few,
    for no plan is made ahead of it."""
    now, source = [0.0], random.Random(1)
    monkeypatch.setattr("vexact_engine.core.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))

    def seconds(speculation):
        scheduler, model = make(
            num_pages=8000, max_num_seqs=64, max_num_batched_tokens=1024, speculation=speculation, reserve=1.0
        )
        begin = now[0]
        for seed in range(sequences):
            right = right_answer([seed % 7, 1], derive_seed(seed, 0), 250)
            wrong = [(t + 1) % VOCAB for t in right]
            some = [t if source.random() < 0.7 else w for t, w in zip(right, wrong)]
            draft = {"right": right, "some": some, "wrong": wrong, "none": ()}[how]
            scheduler.add(request([seed % 7, 1], max_new_tokens=250, seed=seed, draft=draft))
        while scheduler.has_unfinished:
            plan = scheduler.schedule()
            now[0] += 1.0 + row * plan.drafted + 0.15 * (plan.drafted > 0)
            scheduler.commit(plan, model.run(plan))
        return now[0] - begin

    sources = ("given",) if how == "wrong" else Speculation.sources
    took = seconds(Speculation(sources=sources)) / seconds(None)
    assert took <= most


@pytest.mark.parametrize("lost,drafts", [("text", True), ("answer", False)])
def test_answers_do_not_pay_for_what_texts_have_lost(lost, drafts, monkeypatch):
    now = [0.0]
    monkeypatch.setattr("vexact_engine.core.scheduler.time", SimpleNamespace(monotonic=lambda: now[0]))
    scheduler, model = make(max_num_batched_tokens=64, speculation=Speculation(sources=("given", "text")))
    pace = scheduler.drafter.pace
    scheduler.add(request([1, 2], max_new_tokens=60, draft=right_answer([1, 2], derive_seed(5, 0), 60)))
    while scheduler.has_unfinished:
        plan = scheduler.schedule()
        now[0] += 1.0
        scheduler.commit(plan, model.run(plan))
        for _ in range(8 if plan.drafted else 0):
            pace.account(1, plan.drafted, 9.0, 1, lost)  # as other sequences' might have
    assert (scheduler.stats.accepted_tokens > 20) == drafts


def test_what_a_model_has_computed_of_a_page_is_not_what_it_holds_after_others():
    """Where layers have windows a content moves from page to page, and may come back to one that held others since."""
    for seed in range(8):
        source, draft = random.Random(seed), ToyDraft(13, 3)
        speculation = replace(ALWAYS, max_draft_tokens=6, sources=("given",), mtp=True)
        windows = {"reach": 6, "num_window_pages": 5, "max_num_seqs": 1}
        scheduler, model = make(13, 3, speculation=speculation, draft_model=draft, **windows)
        for _ in range(12):
            prompt = [0, 1, 2, 3, 4, 5, 6, 0, 1][: source.randint(3, 9)] + [source.randrange(7)] * source.randint(0, 2)
            scheduler.add(request(prompt, max_new_tokens=source.randint(4, 20), seed=source.randrange(99)))
            drain(scheduler, model)
        assert draft.computed > 50
