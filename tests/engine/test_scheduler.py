"""What a step is made of, who is preempted, what is shared, and how a request ends. The model is a toy (toy.py)."""

import dataclasses

import pytest
from toy import VOCAB, drain, expected, make, request, shape, step

from vexact_engine.config import EngineConfig
from vexact_engine.core.plan import PLACEHOLDER, Sampled
from vexact_engine.core.scheduler import Scheduler
from vexact_engine.request import State

# What a step is made of


def test_a_long_prompt_is_cut_and_does_not_hold_up_a_decode():
    scheduler, model = make(max_num_batched_tokens=8)
    scheduler.add(request([1, 2], "short"))
    step(scheduler, model)
    scheduler.add(request(range(5, 25), "long"))
    assert shape(step(scheduler, model)) == [("short", 2, 3, True), ("long", 0, 7, False)]
    assert shape(step(scheduler, model)) == [("short", 3, 4, True), ("long", 7, 14, False)]
    assert shape(step(scheduler, model)) == [("short", 4, 5, True), ("long", 14, 20, True)]
    assert shape(step(scheduler, model)) == [("short", 5, 6, True), ("long", 20, 21, True)]
    assert scheduler.stats.partial_prefills == 2 and scheduler.stats.mixed_steps == 3
    drain(scheduler, model)


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
def test_prefills_share_the_budget_in_the_order_of_arrival(cache):
    scheduler, model = make(max_num_batched_tokens=10, enable_prefix_cache=cache)
    for name in "abc":
        scheduler.add(request([ord(name)] * 8, name, max_new_tokens=1))
    assert shape(step(scheduler, model)) == [("a", 0, 8, True), ("b", 0, 2, False)]
    assert shape(step(scheduler, model)) == [("b", 2, 8, True), ("c", 0, 4, False)]
    assert shape(step(scheduler, model)) == [("c", 4, 8, True)]
    assert not scheduler.has_unfinished


def test_max_num_seqs_and_the_budget_bound_what_runs():
    for bounds in ({"max_num_seqs": 3}, {"max_num_batched_tokens": 3}):
        scheduler, model = make(**bounds)
        for i in range(5):
            scheduler.add(request([i]))
        for _ in range(3):
            plan = step(scheduler, model)
        assert len(scheduler.running) == 3 and len(scheduler.waiting) == 2
        assert [c.length for c in plan.chunks] == [1, 1, 1]
        drain(scheduler, model)


def test_sequences_in_flight_leave_no_room_for_more_than_the_budget_can_decode():
    scheduler, model = make(max_num_batched_tokens=2)
    for i in range(4):
        scheduler.add(request([i]))
    first = scheduler.schedule()
    assert first.num_tokens == 2 and not scheduler.schedule(), "two of them are all that two tokens per step can serve"
    scheduler.commit(first, model.run(first))
    assert [s.request.id for s in scheduler.running] == [c.sequence.request.id for c in step(scheduler, model).chunks]
    drain(scheduler, model)


def test_an_admission_leaves_room_for_the_running_to_grow():
    scheduler, model = make(num_pages=5, page_size=2, max_num_batched_tokens=4, enable_prefix_cache=False)
    scheduler.add(request([1], max_new_tokens=3))
    step(scheduler, model)
    scheduler.add(request([3] * 8, max_new_tokens=1))  # four pages, and four are free; but soon one will not be
    drain(scheduler, model)
    assert scheduler.stats.preemptions == 0 and scheduler.stats.prefill_tokens == 1 + 8


def test_who_does_not_fit_is_not_looked_at_again_before_pages_come_back():
    scheduler, model = make(num_pages=10, page_size=1)
    scheduler.add(request([1], max_new_tokens=9))
    step(scheduler, model)
    scheduler.add(request(range(9), max_new_tokens=1))
    asked, match = [], scheduler.pool.match
    scheduler.pool.match = lambda *args: asked.append(len(plans)) or match(*args)
    plans = []
    while scheduler.has_unfinished:
        plans.append(step(scheduler, model))
    assert asked == [0, 8], "a long prompt's pages are not looked up in every step"


def test_a_running_prefill_advances_though_decodes_fill_the_rest():
    scheduler, model = make(max_num_batched_tokens=3)
    for name in "ab":
        scheduler.add(request([1], name, max_new_tokens=40))
    step(scheduler, model)
    scheduler.add(request([2] * 6, "prefill"))
    for i in range(6):
        assert shape(step(scheduler, model))[2:] == [("prefill", i, i + 1, i == 5)]


def test_nobody_is_let_past_a_request_that_does_not_fit_yet():
    scheduler, model = make(num_pages=8, page_size=1, max_num_batched_tokens=8)
    scheduler.add(request([1], "first", max_new_tokens=4))
    step(scheduler, model)
    scheduler.add(request([2] * 8, "big", max_new_tokens=1))
    order = []
    for i in range(12):
        scheduler.add(request([3], f"small-{i}", max_new_tokens=1))
        order += [name for name, *_, sampled in shape(step(scheduler, model)) if sampled]
    assert order[:4] == ["first", "first", "first", "big"]
    assert order[4:] == [f"small-{i}" for i in range(len(order) - 4)] and len(order) > 4


def test_statistics_add_up():
    scheduler, model = make(num_pages=12, page_size=2, max_num_batched_tokens=7)
    for i in range(6):
        scheduler.add(request([1, 2, 3, 4, 5, i % 2], n=2, seed=i))
    plans = drain(scheduler, model)
    stats = scheduler.stats
    assert stats.steps == len(plans)
    assert stats.prefill_tokens + stats.decode_tokens == sum(plan.num_tokens for plan in plans)
    assert stats.finished == {"stop": 0, "length": 12, "abort": 0, "error": 0}
    assert stats.preemptions > 0 and stats.prefix_tokens == 2 * scheduler.pool.stats.reused > 0
    assert stats.decode_tokens <= 12 * 7
    partial = [chunk for plan in plans for chunk in plan.chunks if not chunk.needs_sample]
    assert stats.partial_prefills == len(partial)
    assert 0 < stats.mixed_steps < stats.steps


@pytest.mark.parametrize("stages", [2, 3, 4])
def test_in_a_pipeline_a_plan_takes_its_share_of_the_decodes(stages):
    """With a plan for each stage and one more in flight, all sequences take turns."""
    scheduler, model = make(max_num_seqs=8, pipeline_parallel_size=stages)
    for i in range(7):
        scheduler.add(request([i], max_new_tokens=30))
    everyone = set(scheduler.waiting)
    flight, seen = [], []
    for _ in range(40):
        if plan := scheduler.schedule(lookahead=True):
            flight.append((plan, model.run(plan)))
        if len(flight) > stages or not plan:
            seen.append(flight[0][0])
            scheduler.commit(*flight.pop(0))
    share = -(-7 // stages)
    steady = seen[stages + 1 :]
    assert all(0 < len(plan.chunks) <= share for plan in steady)
    for i in range(len(steady) - stages + 1):  # whoever was in one is in the next round again
        assert {c.sequence for plan in steady[i : i + stages] for c in plan.chunks} == everyone
    while flight:
        scheduler.commit(*flight.pop(0))
    drain(scheduler, model)


# Preemption


def test_the_latest_arrival_is_preempted_and_takes_its_place_again():
    scheduler, model = make(num_pages=6, page_size=2, enable_prefix_cache=False)
    for name in "abc":
        scheduler.add(request([1, 2], name, max_new_tokens=9))
    preempted = []
    while scheduler.has_unfinished:
        before = list(scheduler.running)
        step(scheduler, model)
        lost = [s.request.id for s in before if s.state is State.WAITING]
        assert lost == [s.request.id for s in before[len(before) - len(lost) :]], "victims are the latest"
        preempted += lost
    assert set(preempted) == {"b", "c"}, "the earliest never is"
    assert scheduler.stats.preemptions == len(preempted)


def test_a_preempted_sequence_keeps_its_tokens_and_is_computed_in_one_prefill():
    scheduler, model = make(enable_prefix_cache=False)
    one = request([1, 2, 3])
    scheduler.add(one)
    for _ in range(3):
        step(scheduler, model)
    (sequence,) = one.sequences
    tokens = list(sequence.tokens)
    scheduler.preempt(sequence)
    assert (sequence.state, sequence.pages, sequence.tokens) == (State.WAITING, [], tokens)
    assert scheduler.pool.num_available == scheduler.pool.num_pages
    assert shape(step(scheduler, model)) == [(one.id, 0, len(tokens), True)]
    drain(scheduler, model)
    assert sequence.tokens == expected(sequence)
    with pytest.raises(ValueError, match="preempt: the sequence is finished, expected a running one"):
        scheduler.preempt(sequence)


def test_a_preempted_sequence_waits_before_later_arrivals():
    scheduler, model = make(max_num_seqs=2)
    requests = [request([1, i], f"r{i}") for i in range(4)]
    for one in requests:
        scheduler.add(one)
    step(scheduler, model)
    scheduler.preempt(requests[0].sequences[0])
    assert [s.request.id for s in scheduler.waiting] == ["r0", "r2", "r3"]
    step(scheduler, model)
    assert [s.request.id for s in scheduler.running] == ["r0", "r1"]
    drain(scheduler, model)


def test_alone_with_a_full_cache_it_ends_with_length_and_says_why():
    scheduler, model = make(num_pages=3, page_size=2)
    one, other = request([1, 2, 3], max_new_tokens=50), request([1, 2], max_new_tokens=2)
    scheduler.add(one)
    scheduler.add(other)
    drain(scheduler, model)
    (sequence,) = one.sequences
    assert len(sequence.tokens) == 3 * 2 + 1, "the last token needs no room: it is never an input"
    done = sequence.completion("text")
    assert (done.finish_reason, done.text) == ("length", "text")
    assert done.error == "the KV cache is full: it has 3 pages of 2 tokens"
    assert other.sequences[0].error is None and len(other.sequences[0].generated) == 2


def test_a_request_that_just_fits_has_nothing_to_explain():
    scheduler, model = make(num_pages=3, page_size=2)
    one = request([1, 2, 3], max_new_tokens=4)
    scheduler.add(one)
    drain(scheduler, model)
    done = one.sequences[0].completion()
    assert (len(done.token_ids), done.finish_reason, done.error) == (4, "length", None)


# The prefix cache


@pytest.mark.parametrize("cut", [0, 1], ids=["full-last-page", "part-of-a-page"])
def test_samples_share_the_prompt_and_compute_it_once(cut):
    scheduler, model = make(page_size=4, max_num_batched_tokens=64)
    prompt = list(range(16 + cut))
    scheduler.add(request(prompt, n=4, max_new_tokens=2))
    assert [c.sequence.index for c in step(scheduler, model).chunks] == [0]
    plan = step(scheduler, model)
    shared = 16 if cut else 12  # the last token of a prompt is always computed
    assert [(c.sequence.index, c.start, c.end) for c in plan.chunks[1:]] == [(i, shared, 16 + cut) for i in (1, 2, 3)]
    assert len({tuple(c.pages[: shared // 4]) for c in plan.chunks}) == 1
    drain(scheduler, model)
    assert scheduler.stats.prefix_tokens == 3 * shared


def test_requests_with_one_beginning_wait_for_it_but_others_do_not():
    scheduler, model = make(page_size=4, max_num_batched_tokens=8)
    system = list(range(12))
    scheduler.add(request([*system, 20], "a"))
    scheduler.add(request([*system, 30], "b"))
    scheduler.add(request([40, 41], "c"))
    assert shape(step(scheduler, model)) == [("a", 0, 8, False)]
    assert shape(step(scheduler, model)) == [("a", 8, 13, True), ("c", 0, 2, True)]
    assert [s.request.id for s in scheduler.waiting] == ["b"]
    assert shape(step(scheduler, model))[2:] == [("b", 12, 13, True)]
    drain(scheduler, model)


def test_they_wait_for_what_lies_behind_a_cached_beginning_too():
    scheduler, model = make(page_size=4, max_num_batched_tokens=64)
    scheduler.add(request(range(9), max_new_tokens=1))
    drain(scheduler, model)
    for name in "ab":
        scheduler.add(request(range(18), name))
    assert shape(step(scheduler, model)) == [("a", 8, 18, True)]
    assert shape(step(scheduler, model))[1:] == [("b", 16, 18, True)]
    drain(scheduler, model)


def test_a_conversation_goes_on_from_its_cached_turn():
    scheduler, model = make(page_size=4, max_num_batched_tokens=64)
    first = request(range(6), max_new_tokens=7)
    scheduler.add(first)
    drain(scheduler, model)
    tokens = first.sequences[0].tokens
    scheduler.add(request([*tokens, 9]))
    assert step(scheduler, model).chunks[0].start == 12  # 13 tokens, of which the last was never computed
    drain(scheduler, model)


def test_new_weights_know_nothing_and_running_sequences_are_computed_anew():
    scheduler, model = make(page_size=2, max_num_batched_tokens=64)
    one = request([1, 2, 3, 4, 5], max_new_tokens=6)
    scheduler.add(one)
    for _ in range(3):
        step(scheduler, model)
    scheduler.reset_cache(weight_version=9)
    plan = step(scheduler, model)
    assert (plan.chunks[0].start, plan.chunks[0].end, plan.weight_version) == (0, 8, 9)
    drain(scheduler, model)
    done = one.sequences[0].completion()
    assert done.weight_versions == [0, 0, 0, 9, 9, 9] and done.weight_version == 9
    assert one.sequences[0].tokens == expected(one.sequences[0])


def test_a_reset_without_a_version_keeps_it():
    scheduler, model = make()
    scheduler.add(request([1, 2, 3, 4, 5]))
    step(scheduler, model)
    scheduler.reset_cache()
    assert scheduler.weight_version == 0 and step(scheduler, model).chunks[0].start == 0


# Ends


def first_tokens(count, **params):
    one = request([1, 2], **{"max_new_tokens": count, **params})
    scheduler, model = make()
    scheduler.add(one)
    drain(scheduler, model)
    return one.sequences[0].generated


def run_one(params, **options):
    scheduler, model = make(**options)
    one = request([1, 2], **{"max_new_tokens": 12, **params})
    scheduler.add(one)
    drain(scheduler, model)
    return one.sequences[0].completion()


def test_stop_ids_and_eos_ids():
    free = first_tokens(12)
    stop = free[3]
    cut = free[: free.index(stop) + 1]
    for params, options in (
        ({"stop_token_ids": [stop]}, {}),
        ({"stop_token_ids": [VOCAB + 1, stop], "ignore_eos": True}, {"eos_token_ids": [stop]}),
        ({}, {"eos_token_ids": [VOCAB + 1, stop]}),
    ):
        done = run_one(params, **options)
        assert (done.token_ids, done.finish_reason, done.stop_reason) == (cut, "stop", stop)
        assert len(done.logprobs) == len(cut), "the stop token's log-probability is part of it"
    done = run_one({"ignore_eos": True}, eos_token_ids=[stop])
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (free, "length", None)


def test_a_stop_on_the_last_token_is_a_stop():
    free = first_tokens(12)
    first = free.index(free[3]) + 1
    done = run_one({"stop_token_ids": [free[3]], "max_new_tokens": first})
    assert (len(done.token_ids), done.finish_reason) == (first, "stop")


@pytest.mark.parametrize("least", [0, 3, 4, 5, 12])
def test_nothing_stops_a_sample_before_it_has_its_least_tokens(least):
    """The stop token is drawn as ever: what is drawn does not depend on where a sample may stop."""
    free = first_tokens(12)
    stop = free[3]
    ends = [at for at, token in enumerate(free, 1) if token == stop and at >= least]
    expected, reason = (free[: ends[0]], "stop") if ends else (free, "length")
    for params, options in (({"stop_token_ids": [stop]}, {}), ({}, {"eos_token_ids": [stop]})):
        done = run_one({**params, "min_new_tokens": least}, **options)
        assert (done.token_ids, done.finish_reason) == (expected, reason)


def test_a_stop_string_before_the_least_tokens_is_passed_over():
    read = []

    def find(sequence):
        read.append(len(sequence.generated))
        return string if f"<{sequence.generated[-1]}>" == string else None

    free = first_tokens(12)
    least = next(at for at, token in enumerate(free, 1) if token in free[: at - 1])  # a token that was drawn before
    string = f"<{free[least - 1]}>"
    done = run_one({"stop": [string], "min_new_tokens": least}, find_stop=find)
    assert (done.token_ids, done.stop_reason) == (free[:least], string)
    assert read == list(range(1, least + 1)), "the text grows with every token all the same"


def test_max_model_len_ends_it():
    done = run_one({}, max_model_len=6)
    assert (len(done.token_ids), done.finish_reason, done.error) == (4, "length", None)


def test_stop_strings_are_looked_for_after_every_token():
    asked = []

    def find(sequence):
        asked.append(len(sequence.generated))
        return string if sequence.generated[-2:] == free[4:6] else None

    free, string = first_tokens(12), "two tokens"
    length = next(at for at in range(2, 13) if free[at - 2 : at] == free[4:6])
    done = run_one({"stop": ["never", string]}, find_stop=find)
    assert (done.token_ids, done.finish_reason, done.stop_reason) == (free[:length], "stop", string)
    assert asked == list(range(1, length + 1))
    asked.clear()
    run_one({}, find_stop=find)
    assert asked == [], "no stop strings, no text"


def test_a_text_that_cannot_be_decoded_ends_its_own_sequence_only():
    def find(sequence):
        if sequence.request.id == "bad" and len(sequence.generated) == 3:
            raise UnicodeError("no such text")

    scheduler, model = make(find_stop=find)
    bad, good = request([1], "bad", stop="x"), request([1], "good", stop="x")
    scheduler.add(bad)
    scheduler.add(good)
    drain(scheduler, model)
    assert bad.sequences[0].finish_reason == "error" and "no such text" in bad.sequences[0].error
    assert good.sequences[0].finish_reason == "length" and good.sequences[0].error is None


def test_top_logprobs_are_kept_for_those_who_asked():
    scheduler, model = make()
    asked, other = request([1], num_top_logprobs=1), request([2])
    scheduler.add(asked)
    scheduler.add(other)
    plan = scheduler.schedule()
    sampled = model.run(plan)
    with pytest.raises(ValueError, match=r"sampled\.top_logprobs is None, expected it"):
        scheduler.commit(plan, dataclasses.replace(sampled, top_logprobs=None))
    scheduler.commit(plan, sampled)
    drain(scheduler, model)
    done = asked.sequences[0].completion()
    assert done.top_logprobs == [{token: -1.0} for token in done.token_ids]
    assert other.sequences[0].completion().top_logprobs is None


# Requests that cannot run


@pytest.mark.parametrize(
    ("prompt", "params", "options", "message"),
    [
        ([1] * 8, {}, {"max_model_len": 8}, r"prompt_ids has 8 tokens, expected at most 7: max_model_len is 8"),
        ([1] * 9, {}, {"max_model_len": 8}, r"prompt_ids has 9 tokens, expected at most 7"),
        ([1] * 13, {}, {"num_pages": 3}, r"prompt_ids has 13 tokens, expected at most 12: .* 3 pages of 4 tokens"),
        ([1, VOCAB], {}, {"vocab_size": VOCAB}, r"prompt_ids has 7, expected ids below 7"),
        ([1], {"stop": "x"}, {}, r"stop has strings, expected none: there is no tokenizer"),
    ],
    ids=["model-len", "over-model-len", "cache", "vocabulary", "no-tokenizer"],
)
def test_a_request_that_can_never_run_is_refused_alone(prompt, params, options, message):
    scheduler, model = make(**options)
    good = request([1, 2], "good")
    scheduler.add(good)
    with pytest.raises(ValueError, match=r"^request 'bad': " + message):
        scheduler.add(request(prompt, "bad", n=2, **params))
    assert len(scheduler.waiting) == 1
    drain(scheduler, model)
    assert good.sequences[0].finish_reason == "length"


def test_the_longest_prompts_that_are_let_in_do_run():
    for length, options in ((7, {"max_model_len": 8}), (12, {"num_pages": 3})):
        scheduler, model = make(**options)
        one = request([1] * length, n=2)
        scheduler.add(one)
        drain(scheduler, model)
        assert [len(s.generated) for s in one.sequences] == [1, 1]


def test_a_request_is_added_once():
    scheduler, model = make()
    one = request([1], "same")
    scheduler.add(one)
    with pytest.raises(ValueError, match="'same': the request was added before"):
        scheduler.add(one)
    other = request([2], "same")
    scheduler.add(other)  # a request is known by the object: its name is for people
    assert scheduler.abort(other) == other.sequences and not one.finished
    drain(scheduler, model)
    with pytest.raises(ValueError, match="was added before"):
        scheduler.add(one)


def test_the_number_of_pages_is_needed():
    with pytest.raises(ValueError, match=r"Scheduler: config\.num_pages is None"):
        Scheduler(EngineConfig())


# Abort, failure, cancelled steps


@pytest.mark.parametrize("moment", ["waiting", "prefill", "decode", "in-flight", "preempted", "finished"])
def test_abort_at_any_moment(moment):
    scheduler, model = make(max_num_batched_tokens=4, max_num_seqs=1)
    one, other = request([1] * 6, "one", n=2), request([2] * 6, "other")
    scheduler.add(one)
    scheduler.add(other)
    plan = None
    for _ in range({"waiting": 0, "prefill": 1, "decode": 3, "in-flight": 2, "preempted": 3, "finished": 99}[moment]):
        if scheduler.has_unfinished:
            step(scheduler, model)
    if moment == "in-flight":
        plan = scheduler.schedule()
        sampled = model.run(plan)
    if moment == "preempted":
        scheduler.preempt(scheduler.running[0])
    ended = scheduler.abort(one)
    assert [s.index for s in ended] == ([] if moment == "finished" else [0, 1])
    assert all(s.finish_reason == "abort" and s.state is State.FINISHED and s.pages == [] for s in ended)
    before = [list(s.tokens) for s in one.sequences]
    if plan:
        assert scheduler.commit(plan, sampled) == []
    assert scheduler.abort(one) == [] == scheduler.abort(request([1], "never heard of"))
    drain(scheduler, model)
    assert [s.tokens for s in one.sequences] == before
    assert other.sequences[0].tokens == expected(other.sequences[0])
    assert other.sequences[0].finish_reason == "length"


def test_fail_gives_the_reason():
    scheduler, model = make()
    one = request([1, 2])
    scheduler.add(one)
    step(scheduler, model)
    scheduler.fail(one, "its logits are NaN")
    done = one.sequences[0].completion()
    assert (done.finish_reason, done.error, len(done.token_ids)) == ("error", "its logits are NaN", 1)
    drain(scheduler, model)


def test_a_cancelled_plan_takes_the_later_ones_with_it_and_changes_no_token():
    scheduler, model = make(max_num_batched_tokens=64)
    requests = [request([1, 2, i], max_new_tokens=5) for i in range(3)]
    for one in requests:
        scheduler.add(one)
    step(scheduler, model)
    first = scheduler.schedule(lookahead=True)
    second = scheduler.schedule(lookahead=True)
    assert first and second
    scheduler.abort(requests[2])
    scheduler.cancel(first)
    for plan in (first, second):
        with pytest.raises(ValueError, match="cancel: plan is not in flight"):
            scheduler.cancel(plan)
        with pytest.raises(ValueError, match="commit: plan is not the oldest in flight"):
            scheduler.commit(plan, Sampled([], [], []))
    assert scheduler.running == [] and scheduler.pool.num_available == scheduler.pool.num_pages
    drain(scheduler, model)
    assert [s.tokens for one in requests for s in one.sequences] == [
        expected(s) for one in requests for s in one.sequences
    ]
    assert [len(one.sequences[0].generated) for one in requests] == [5, 5, 1]


def test_commit_refuses_the_wrong_order_and_the_wrong_number():
    scheduler, model = make(max_num_batched_tokens=4)
    scheduler.add(request([1] * 6))
    first, second = scheduler.schedule(), scheduler.schedule()
    nothing, one = model.run(first), model.run(second)
    with pytest.raises(ValueError, match="commit: plan is not the oldest in flight"):
        scheduler.commit(second, one)
    with pytest.raises(ValueError, match=r"commit: sampled\.token_ids has 1 entries, expected 0"):
        scheduler.commit(first, one)
    scheduler.commit(first, nothing)
    with pytest.raises(ValueError, match=r"commit: sampled\.logprobs has 0 entries, expected 1"):
        scheduler.commit(second, dataclasses.replace(one, logprobs=[]))
    assert [s.request.sequences[0] for s in scheduler.commit(second, one)] == scheduler.running


def test_lookahead_plans_a_placeholder_and_no_token_past_the_limit():
    scheduler, model = make()
    one = request([1, 2, 3], max_new_tokens=2)
    scheduler.add(one)
    first = scheduler.schedule()
    assert not scheduler.schedule(), "without lookahead the token must be known"
    second = scheduler.schedule(lookahead=True)
    assert second.chunks[0].token_ids == [PLACEHOLDER] and second.chunks[0].needs_sample
    assert not scheduler.schedule(lookahead=True), "two tokens are all it may have"
    results = [model.run(first), model.run(second)]
    assert scheduler.commit(first, results[0]) == scheduler.commit(second, results[1]) == one.sequences
    assert one.finished and one.sequences[0].tokens == expected(one.sequences[0])


def test_a_sequence_preempted_in_flight_waits_for_its_tokens():
    scheduler, model = make()
    one = request([1, 2, 3])
    scheduler.add(one)
    plans = [scheduler.schedule(lookahead=True) for _ in range(2)]
    results = [model.run(plan) for plan in plans]
    scheduler.preempt(one.sequences[0])
    assert not scheduler.schedule(lookahead=True)
    scheduler.commit(plans[0], results[0])
    assert not scheduler.schedule(lookahead=True)
    scheduler.commit(plans[1], results[1])
    assert shape(scheduler.schedule(lookahead=True)) == [(one.id, 0, 5, True)]
    assert one.sequences[0].tokens == expected(one.sequences[0])


def test_a_sequence_that_stopped_gets_nothing_from_the_plan_ahead():
    stop = first_tokens(1)[0]
    scheduler, model = make()
    one = request([1, 2], stop_token_ids=[stop])
    scheduler.add(one)
    plans = [scheduler.schedule(), scheduler.schedule(lookahead=True)]
    results = [model.run(plan) for plan in plans]
    assert scheduler.commit(plans[0], results[0]) == one.sequences
    assert scheduler.commit(plans[1], results[1]) == []
    assert one.sequences[0].generated == [stop]
