"""However sequences are scheduled they get the same tokens, and no page is lost: proven on a toy model (toy.py)."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from toy import VOCAB, drain, expected, make, request, step

from vexact_engine.core.pages import PagePool
from vexact_engine.core.windows import WindowPages
from vexact_engine.request import State

# The same tokens, however it is scheduled

prompts = st.lists(st.integers(0, 1), min_size=1, max_size=12)
WINDOW = st.none() | st.tuples(st.integers(0, 9), st.integers(0, 6))  # keys before a query, pages that are spare


def windows(window, page_size):
    """Of a model with a layer that sees a window alone, so few pages that sequences have to give theirs back."""
    if window is None:
        return {}
    reach, spare = window
    return {"reach": reach, "num_window_pages": -(-reach // page_size) + 1 + spare}


@given(
    st.lists(st.tuples(prompts, st.integers(1, 12), st.integers(1, 3)), min_size=1, max_size=6),
    st.integers(1, 5),
    st.integers(0, 8),
    st.integers(1, 12),
    st.integers(1, 5),
    st.booleans(),
    st.booleans(),
    st.integers(1, 4),
    st.booleans(),
    WINDOW,
)
@settings(max_examples=2 * settings.default.max_examples)
def test_tokens_do_not_depend_on_the_schedule(
    wanted, page_size, spare, budget, max_num_seqs, cache, lookahead, stages, longest_first, window
):
    longest = max(len(prompt) + new for prompt, new, _ in wanted)
    scheduler, model = make(
        num_pages=-(-longest // page_size) + spare,
        page_size=page_size,
        max_num_batched_tokens=budget,
        max_num_seqs=max_num_seqs,
        enable_prefix_cache=cache,
        pipeline_parallel_size=stages,
        longest_first=longest_first,
        **windows(window, page_size),
    )
    requests = [request(prompt, max_new_tokens=new, n=n, seed=i) for i, (prompt, new, n) in enumerate(wanted)]
    for one in requests:
        scheduler.add(one)
    for plan in drain(scheduler, model, lookahead):
        assert 0 < plan.num_tokens <= budget and len(plan.chunks) <= max_num_seqs
    for one in requests:
        for sequence in one.sequences:
            assert sequence.tokens == expected(sequence)
            assert (sequence.finish_reason, sequence.error) == ("length", None)
            assert len(sequence.generated) == len(sequence.logprobs) == one.params.max_new_tokens
            assert sequence.logprobs == [-float(t) for t in sequence.generated]
            assert sequence.raw_logprobs == [-2.0 * t for t in sequence.generated]


class CarelessKeys(PagePool):
    """Takes pages with equal tokens for equal, whatever comes before them."""

    def key(self, parent, tokens, index):
        key = super().key(parent, tokens, index)
        return key and (0, key[1])


class EagerKeys(PagePool):
    """Knows a page before it is full."""

    def key(self, parent, tokens, index):
        block = tuple(tokens[index * self.page_size : (index + 1) * self.page_size])
        return (parent, block[:1]) if block else None


class Sharer(PagePool):
    """Frees a page while somebody else holds it."""

    def release(self, pages):
        for page in pages:
            self._refs[page] = 1
            if self._nodes[page]:
                self._forget(page)
        super().release(pages)


class Leaker(PagePool):
    def release(self, pages):
        super().release(pages[1:])


class Forgetful(PagePool):
    """Keeps what it knows when the weights change."""

    def invalidate(self):
        pass


@pytest.mark.parametrize(
    ("pool", "symptom"),
    [
        (PagePool, None),
        (CarelessKeys, "a place"),
        (EagerKeys, "a place"),
        (Sharer, "a place"),
        (Leaker, "a deadlock|a page was leaked"),
        (Forgetful, "keys and values of other weights were kept"),
    ],
)
def test_the_toy_model_catches_a_wrong_pool(pool, symptom):
    scheduler, model = make(num_pages=15, page_size=2, max_num_batched_tokens=6, pool=pool)
    scheduler.pool.check = lambda: None  # the symptom alone must give it away
    for i in range(4):
        scheduler.add(request([i // 2, 1, 2, 3, 2, 3, i], n=2, seed=i, max_new_tokens=3 + i))

    def everything():
        for _ in range(6):
            step(scheduler, model)
        scheduler.reset_cache(weight_version=1)
        drain(scheduler, model)

    if symptom is None:
        everything()
    else:
        with pytest.raises(AssertionError, match=symptom):
            everything()


class TooEarly(WindowPages):
    """Gives a page back while its tokens are still seen."""

    def first(self, start):
        return super().first(start + self._size)


class Trusting(WindowPages):
    """Goes on behind pages of which a window has lost its own."""

    def usable(self, pages):
        return len(pages)

    def enter(self, sequence):
        end = len(sequence.pages)
        sequence.windowed = range(end, end)


class Keeping(WindowPages):
    """Gives back nothing before the end."""

    def leave(self, sequence):
        pass


@pytest.mark.parametrize(
    ("kind", "pages", "symptom"),
    [
        (WindowPages, 9, None),
        (WindowPages, 4, None),
        (TooEarly, 4, "a place in the window holds something else"),
        (Trusting, 9, "a place in the window holds something else"),
        (Keeping, 9, "a deadlock|no end in sight"),
    ],
)
def test_the_toy_model_catches_wrong_pages_of_windows(kind, pages, symptom, monkeypatch):
    """Sequences of 40 tokens, far more than the pages of their windows hold."""
    monkeypatch.setattr("vexact_engine.core.scheduler.WindowPages", kind)
    cache = kind is not Keeping  # which would find what a preempted sequence has kept
    options = {"max_num_batched_tokens": 6, "enable_prefix_cache": cache, "num_window_pages": pages, "reach": 5}
    scheduler, model = make(40, 2, **options)
    for i in range(4):
        scheduler.add(request([0, 1] * 6 + [i // 2], seed=i, max_new_tokens=27))

    def everything():
        drain(scheduler, model, most=1000)
        scheduler.add(request([0, 1] * 5 + [2], seed=9, max_new_tokens=20))
        drain(scheduler, model, most=1000)

    if symptom is None:
        everything()
        assert scheduler.stats.prefix_tokens > 0 or pages == 4
    else:
        with pytest.raises(AssertionError, match=symptom):
            everything()


class OneForAll(list):
    """Free slots that are all the same one."""

    def pop(self):
        return super().pop() and 0


@pytest.mark.parametrize("slots", [list, OneForAll])
def test_the_toy_model_catches_a_slot_with_two_holders(slots):
    scheduler, model = make(num_pages=64, max_num_seqs=4, enable_prefix_cache=False)
    scheduler._slots = slots(scheduler._slots)
    requests = [request([i, 1], seed=i, max_new_tokens=6) for i in range(6)]
    for one in requests:
        scheduler.add(one)
    if slots is list:
        drain(scheduler, model, lookahead=True)
        assert all(one.sequences[0].tokens == expected(one.sequences[0]) for one in requests)
    else:
        with pytest.raises(AssertionError, match="a place holds another sequence's token"):
            drain(scheduler, model, lookahead=True)


# Everything at once


class Everything(RuleBasedStateMachine):
    """Requests, steps, aborts, failures, preemptions, new weights and cancelled plans in any order.

    Plans run when they are made, or (`late`) only when they are committed, several plans later: both are the order
    in which they were made, and a page must bear both.
    """

    @initialize(
        num_pages=st.integers(2, 14),
        page_size=st.integers(1, 4),
        budget=st.integers(1, 10),
        max_num_seqs=st.integers(1, 5),
        cache=st.booleans(),
        lookahead=st.booleans(),
        late=st.booleans(),
        stages=st.integers(1, 3),
        window=WINDOW,
    )
    def begin(self, num_pages, page_size, budget, max_num_seqs, cache, lookahead, late, stages, window):
        self.lookahead, self.late = lookahead, late
        self.scheduler, self.model = make(
            num_pages,
            page_size,
            max_num_seqs,
            budget,
            enable_prefix_cache=cache,
            max_model_len=24,
            pipeline_parallel_size=stages,
            eos_token_ids=[VOCAB - 1],
            **windows(window, page_size),
        )
        self.requests, self.flight, self.version = [], [], 0

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_new_tokens=st.integers(1, 12),
        n=st.integers(1, 3),
        ignore_eos=st.booleans(),
    )
    def add(self, prompt, **params):
        one = request(prompt, seed=len(self.requests), **params)
        try:
            self.scheduler.add(one)
        except ValueError:
            assert len(prompt) > self.scheduler.config.num_pages * self.scheduler.config.page_size
        else:
            self.requests.append(one)

    @rule()
    def schedule(self):
        if len(self.flight) == 3:
            self.commit()
        before = {id(s): s.num_planned for s in self.scheduler.running}
        plan = self.scheduler.schedule(lookahead=self.lookahead)
        assert plan or self.flight or not self.scheduler.has_unfinished, "a deadlock"
        if not plan:
            return
        config = self.scheduler.config
        assert plan.num_tokens <= config.max_num_batched_tokens and len(plan.chunks) <= config.max_num_seqs
        assert len({chunk.sequence for chunk in plan.chunks}) == len(plan.chunks)
        for chunk in plan.chunks:
            assert chunk.sequence.state is State.RUNNING and chunk.length > 0
            assert chunk.end <= len(chunk.pages) * config.page_size
            if id(chunk.sequence) in before and chunk.start >= chunk.sequence.num_prompt:
                assert chunk.start == before[id(chunk.sequence)], "a chunk begins where the last one ended"
        if not self.flight and not self.lookahead and config.pipeline_parallel_size == 1:
            # Nothing delays a decode: whoever runs on, and has one token to compute, has it computed now.
            planned = {chunk.sequence for chunk in plan.chunks}
            assert all(s in planned for s in self.scheduler.running if len(s.tokens) - s.num_computed == 1)
        self.flight.append((plan, None if self.late else self.model.run(plan)))

    @precondition(lambda self: self.flight)
    @rule()
    def commit(self):
        plan, sampled = self.flight.pop(0)
        sampled = self.model.run(plan) if sampled is None else sampled
        for sequence in self.scheduler.commit(plan, sampled):
            assert sequence.weight_versions[-1] == plan.weight_version

    @precondition(lambda self: self.flight)
    @rule(data=st.data())
    def cancel(self, data):
        index = data.draw(st.integers(0, len(self.flight) - 1))
        self.scheduler.cancel(self.flight[index][0])
        del self.flight[index:]

    @precondition(lambda self: self.scheduler.running)
    @rule(data=st.data())
    def preempt(self, data):
        self.scheduler.preempt(data.draw(st.sampled_from(self.scheduler.running)))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), error=st.sampled_from([None, "an error"]))
    def end(self, data, error):
        one = data.draw(st.sampled_from(self.requests))
        unfinished = [s for s in one.sequences if not s.finished]
        ended = self.scheduler.fail(one, error) if error else self.scheduler.abort(one)
        assert ended == unfinished and one.finished
        assert all((s.finish_reason, s.error) == ("error" if error else "abort", error) for s in ended)

    @rule()
    def new_weights(self):
        self.version += 1
        self.scheduler.reset_cache(self.version)
        assert self.scheduler.pool.num_available == self.scheduler.pool.num_pages

    @invariant()
    def sound(self):
        scheduler, size = self.scheduler, self.scheduler.config.page_size
        scheduler.pool.check()
        everyone = [s for one in self.requests for s in one.sequences]
        by_state = {state: [s for s in everyone if s.state is state] for state in State}
        assert scheduler.running == by_state[State.RUNNING] and list(scheduler.waiting) == by_state[State.WAITING]
        assert set(scheduler.requests) == {one for one in self.requests if not one.finished}
        assert len(scheduler.running) <= scheduler.config.max_num_seqs
        counts = [0] * scheduler.config.num_pages
        for s in everyone:
            for page in s.pages:
                counts[page] += 1
            assert len(s.pages) == len(set(s.pages))
            assert s.state is State.RUNNING or s.pages == []
            assert s.num_known * size <= s.num_computed <= s.num_planned <= len(s.pages) * size
            assert s.in_flight == sum(
                c.sequence is s and c.needs_sample for plan, _ in self.flight for c in plan.chunks
            )
            assert len(s.tokens) + s.in_flight * (not s.finished) <= s.limit
            assert s.finished == (s.finish_reason is not None)
        assert counts == scheduler.pool._refs
        held = [s.slot for s in scheduler.running]
        assert all(s.slot is None for s in everyone if s.state is not State.RUNNING)
        most = min(scheduler.config.max_num_seqs, scheduler.config.max_num_batched_tokens)
        assert sorted(held + scheduler._slots) == list(range(most)), "a slot is lost, or has two holders"
        for plan, _ in self.flight:
            assert len({c.slot for c in plan.chunks}) == len(plan.chunks)
            assert all(c.slot == c.sequence.slot for c in plan.chunks if c.epoch == c.sequence.epoch)

    def teardown(self):
        if not hasattr(self, "scheduler"):
            return
        while self.flight:
            self.commit()
        drain(self.scheduler, self.model, self.lookahead)
        self.sound()
        assert self.scheduler.pool.num_available == self.scheduler.pool.num_pages
        for one in self.requests:
            for s in one.sequences:
                assert s.tokens == expected(s)
                assert len(s.logprobs) == len(s.raw_logprobs) == len(s.weight_versions) == len(s.generated)
                ended = len(s.tokens) == s.limit or (s.generated[-1:] == [VOCAB - 1] and not one.params.ignore_eos)
                assert (s.finish_reason in ("stop", "length")) == ended or s.finish_reason in ("abort", "error")


TestEverything = Everything.TestCase
TestEverything.settings = settings(max_examples=8 * settings.default.max_examples)  # they take 10 ms each


def test_what_a_prompt_scores_is_of_one_pass():
    """A pass that begins anew, with other weights it may be, leaves nothing of the one before; after the first token
    it changes nothing."""
    scheduler, model = make(max_num_batched_tokens=4, max_num_seqs=1, enable_prefix_cache=False)
    one = request(range(10), max_new_tokens=9, prompt_logprobs=True, num_prompt_top_logprobs=1)
    (sequence,) = one.sequences
    scheduler.add(one)

    def scored(value):
        plan = scheduler.schedule()
        counts = [max(0, min(c.end + 1, 10) - c.start - 1) for c in plan.chunks]
        tops = [[{0: value}] * count for count in counts]
        made = replace(model.run(plan), prompt_logprobs=[[value] * n for n in counts])
        scheduler.commit(plan, replace(made, prompt_top_logprobs=tops))
        assert [top and top[0] for top in sequence.prompt_top_logprobs] == sequence.prompt_logprobs

    scored(-1.0), scored(-1.0)
    assert sequence.prompt_logprobs == [None] + [-1.0] * 8 + [None]
    scheduler.preempt(sequence)
    scored(-2.0)
    assert sequence.prompt_logprobs == [None] + [-2.0] * 4 + [None] * 5
    while not sequence.generated:
        scored(-2.0)
    assert sequence.prompt_logprobs == [None] + [-2.0] * 9
    scheduler.preempt(sequence)
    scored(-3.0)
    assert sequence.prompt_logprobs == [None] + [-2.0] * 9
