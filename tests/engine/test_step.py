"""Steps: whoever applies them, in order, always has what the sequences of the plans have."""

import numpy as np
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from vexact_engine.config import EngineConfig, SamplingParams
from vexact_engine.core.plan import PLACEHOLDER, Sampled
from vexact_engine.core.scheduler import Scheduler
from vexact_engine.core.step import OCCUPANT, Encoder, Rows, Step
from vexact_engine.request import Request

REACH = 6  # keys before a query that a layer with a window may read
CONFIG = EngineConfig(
    page_size=4, num_pages=24, max_num_seqs=6, max_num_batched_tokens=13, reserve=0.0, num_window_pages=11
)
PARTS = "occupants", "pages", "page_ids", "chunks", "token_ids", "targets", "restores", "saves", "windowed"


def same(step, other):
    return step.number == other.number and all(
        getattr(step, part).dtype == getattr(other, part).dtype
        and getattr(step, part).tobytes() == getattr(other, part).tobytes()
        for part in PARTS
    )


class Receiver:
    """Knows steps alone. Its model's state is a memory of (position, token), its draw the toy model's."""

    def __init__(self, config):
        self.size = config.page_size
        self.rows = Rows(config.max_num_seqs, config.num_pages)
        self.memory = [None] * (config.num_pages * config.page_size)
        self.last = [None] * config.max_num_seqs
        self.beside = [None] * config.num_pages  # pages of a layer with a window
        self.windowed = [None] * (config.num_window_pages * config.page_size)

    def run(self, step):
        step = Step.from_bytes(step.to_bytes())
        for page, own in step.windowed.tolist():
            self.beside[page] = own
        where = self.rows.apply(step)
        assert (self.rows.table.reshape(-1)[where] == step.page_ids).all()
        drawn, scores, at, told = [], [], 0, 0
        for slot, start, length, *_ in step.chunks.tolist():
            for position, token in enumerate(step.token_ids[at : at + length].tolist(), start):
                if token == PLACEHOLDER:
                    token = self.last[slot]
                self.memory[self.place(slot, position)] = position, token
                self.windowed[self.own(slot, position)] = position, token
            at += length
        for slot, start, length, draws, scored in step.chunks.tolist():
            scores.append([1.0 * t for t in step.targets[told : told + scored].tolist()])
            told += scored
            read = [self.memory[self.place(slot, position)] for position in range(start + length)]
            positions, tokens = zip(*read)
            assert positions == tuple(range(start + length))
            seen = range(max(0, start - REACH), start + length)
            assert [self.windowed[self.own(slot, position)] for position in seen] == read[seen.start :]
            for count in range(start + length - draws + 1, start + length + 1):
                self.last[slot] = toy.draw(tokens[:count], int(self.rows.occupants["seed"][slot]), 0)
                drawn.append(self.last[slot])
        assert at == len(step.token_ids) and told == len(step.targets)
        return Sampled(drawn, [0.0] * len(drawn), [0.0] * len(drawn), [{} for _ in drawn], scores)

    def own(self, slot, position):
        page, offset = divmod(self.place(slot, position), self.size)
        return self.beside[page] * self.size + offset

    def place(self, slot, position):
        return int(self.rows.table[slot, position // self.size]) * self.size + position % self.size

    def check(self, plan):
        for chunk in plan.chunks:
            sequence, row = chunk.sequence, self.rows.occupants[chunk.slot]
            count = -(-chunk.end // self.size)
            assert self.rows.table[chunk.slot, :count].tolist() == chunk.pages[:count]
            params = sequence.params
            assert (row["seed"], row["top_k"], row["top"]) == (sequence.seed, params.top_k, params.num_top_logprobs)
            assert row["temperature"] == np.float32(params.temperature) and row["top_p"] == np.float32(params.top_p)
            assert row["min_p"] == np.float32(params.min_p)


def make_request(i, length):
    params = SamplingParams(
        max_new_tokens=1 + i % 9,
        seed=i,
        n=1 + i % 3,
        temperature=i % 4 / 2,
        top_k=i % 5,
        top_p=0.5 + 0.1 * (i % 5),
        min_p=0.1 * (i % 3),
        num_top_logprobs=i % 3,
        prompt_logprobs=i % 4 == 1,
        num_prompt_top_logprobs=3 * (i % 8 == 1),
    )
    return Request([3 + (i // 3 + t) % 4 for t in range(length)], params)


ACTIONS = ["step", "step", "step", "add", "preempt", "abort", "cancel", "reset", "forget"]


@given(st.data(), st.integers(1, 3))
def test_a_receiver_of_steps_computes_what_the_sequences_are(data, depth):
    """At random: requests, preemptions, aborts, failed steps that are lost, resets, receivers that forget all."""
    scheduler, encoder, receiver = Scheduler(CONFIG, reach=REACH), Encoder(), Receiver(CONFIG)
    pending, requests = [], []

    def launch():
        if plan := scheduler.schedule(lookahead=depth > 1):
            step = encoder.encode(plan)
            pending.append((plan, receiver.run(step)))
            receiver.check(plan)
        return plan

    def finish():
        scheduler.commit(*pending.pop(0))

    for _ in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "add":
            requests.append(make_request(len(requests), data.draw(st.integers(1, 30))))
            scheduler.add(requests[-1])
        elif action == "preempt" and scheduler.running:
            scheduler.preempt(data.draw(st.sampled_from(scheduler.running)))
        elif action == "abort" and requests:
            scheduler.abort(data.draw(st.sampled_from(requests)))
        elif action == "cancel" and (plan := scheduler.schedule(lookahead=depth > 1)):
            encoder.encode(plan)  # the step is lost, with those before it that are not committed
            scheduler.cancel(pending[0][0] if pending else plan)
            pending.clear()
        elif action == "reset":
            scheduler.reset_cache()
        elif action == "forget":
            while pending:
                finish()
            scheduler.reset_cache()
            receiver = Receiver(CONFIG)
        elif action == "step":
            plan = launch()
            if pending and (len(pending) >= depth or not plan):
                finish()
    while scheduler.has_unfinished or pending:
        plan = launch()
        assert pending
        if len(pending) >= depth or not plan:
            finish()
    scheduler.pool.check()
    assert scheduler.pool.num_available == CONFIG.num_pages
    for request in requests:
        for sequence in request.sequences:
            wanted = list(request.prompt_ids)
            for _ in sequence.generated:
                wanted.append(toy.draw(wanted, sequence.seed, 0))
            assert sequence.tokens == wanted
            if sequence.generated and sequence.params.prompt_logprobs:
                assert sequence.prompt_logprobs == [None, *request.prompt_ids[1:]]


def test_differences_alone_are_told():
    """A decode that goes on sends one chunk and one id; a page only when one begins."""
    scheduler, encoder, receiver = Scheduler(CONFIG, reach=REACH), Encoder(), Receiver(CONFIG)
    scheduler.add(Request([3] * 6, SamplingParams(max_new_tokens=12, seed=1)))
    told = []
    while plan := scheduler.schedule():
        step = encoder.encode(plan)
        told.append([len(getattr(step, part)) for part in PARTS])
        scheduler.commit(plan, receiver.run(step))
    assert told[0] == [1, 1, 2, 1, 6, 0, 0, 0, 2]
    assert told[1:] == [[0, begins, begins, 1, 1, 0, 0, 0, begins] for begins in (0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1)]


def test_a_token_that_is_being_drawn_is_a_placeholder():
    scheduler, encoder = Scheduler(CONFIG, reach=REACH), Encoder()
    scheduler.add(Request([3, 4, 5], SamplingParams(max_new_tokens=4, seed=1)))
    first, second = (encoder.encode(scheduler.schedule(lookahead=True)) for _ in range(2))
    assert first.token_ids.tolist() == [3, 4, 5] and second.token_ids.tolist() == [PLACEHOLDER]
    assert second.chunks.tolist() == [(first.chunks["slot"][0], 3, 1, 1, 0)]


def test_parameters_that_fp32_cannot_hold_mean_the_same():
    scheduler, encoder = Scheduler(CONFIG, reach=REACH), Encoder()
    scheduler.add(Request([3], SamplingParams(top_p=1e-60, top_k=2**63 - 1, seed=2**64 - 1)))
    (row,) = encoder.encode(scheduler.schedule()).occupants
    assert row["top_p"] > 0 and row["top_k"] == 2**63 - 1


def test_bytes():
    scheduler, encoder = Scheduler(CONFIG, reach=REACH), Encoder()
    scheduler.add(Request([3, 4, 5], SamplingParams(seed=1)))
    step = encoder.encode(scheduler.schedule())
    data = step.to_bytes()
    assert same(Step.from_bytes(data), step) and same(Step.from_bytes(bytearray(data)), step)
    for wrong in (b"", data[:-1], data + b"\0", b"\0" * len(data), data[:8] + b"\xff" * 48 + data[56:]):
        with pytest.raises(ValueError, match="Step: got"):
            Step.from_bytes(wrong)
    empty = Step(5, np.zeros(0, OCCUPANT), *(getattr(step, part)[:0] for part in PARTS[1:]))
    assert same(Step.from_bytes(empty.to_bytes()), empty)
    assert not same(empty, step)


def test_more_pages_than_a_row_has_are_refused():
    scheduler, encoder = Scheduler(CONFIG, reach=REACH), Encoder()
    scheduler.add(Request([3] * 9, SamplingParams(seed=1)))
    with pytest.raises(ValueError, match="a sequence of 3 pages, expected at most 2"):
        Rows(6, 2).apply(encoder.encode(scheduler.schedule()))
