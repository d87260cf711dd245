"""Plans behind drafts: made while these are verified, begun where that turns out, and no byte is another."""

import random
from dataclasses import replace

import pytest
import torch
from engine_models import bits, build, check_idle, make_late, prompts
from hypothesis import given
from hypothesis import strategies as st
from toy import VOCAB, drain, draw, expected, make, request

from vexact_engine import Engine, EngineConfig, SamplingParams, Speculation
from vexact_engine.core.plan import Chunk, StepPlan
from vexact_engine.core.step import Encoder
from vexact_engine.errors import StepFailed
from vexact_engine.request import derive_seed
from vexact_engine.runner import buffers, graphs
from vexact_engine.runner.buffers import Body, Buffers, Head
from vexact_engine.runner.follow import Follow
from vexact_engine.runner.runner import Pending

GIVEN = Speculation(max_draft_tokens=4, always=True, sources=("given",))
CONFIG = EngineConfig(num_pages=160, page_size=4, show_progress=False, max_model_len=160, async_scheduling=True)


def right_answer(prompt, seed, count):
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(draw(tokens, seed, 0))
    return tokens[len(prompt) :]


def spoilt(tokens, source, right=0.7, vocabulary=VOCAB):
    return [t if source.random() < right else (t + 1) % vocabulary for t in tokens]


def scheduled(counts, follows=True, share=0.7, **options):
    """A scheduler with a sequence of each number of new tokens, and its model."""
    options = {"max_num_batched_tokens": 64, "follows": follows, "speculation": GIVEN} | options
    scheduler, model = make(num_pages=200, **options)
    source = random.Random(0)
    asked = []
    for seed, count in enumerate(counts):
        right = right_answer([1 + seed % 5, 2], derive_seed(seed, 0), count)
        asked.append(request([1 + seed % 5, 2], seed=seed, max_new_tokens=count, draft=[spoilt(right, source, share)]))
        scheduler.add(asked[-1])
    return scheduler, model, [one.sequences[0] for one in asked]


def test_while_drafts_are_verified_the_next_plan_is_made():
    counts = 5, 40, 40, 33
    scheduler, model, sequences = scheduled(counts)
    plans = drain(scheduler, model, lookahead=True)
    assert all(sequence.tokens == expected(sequence) for sequence in sequences)
    assert [len(sequence.generated) for sequence in sequences] == [*counts]
    assert sum(plan.follows for plan in plans) > len(plans) - 4
    assert sum(plan.drafted for plan in plans) > 4 * len(plans)
    for how in ({"follows": False}, {"max_num_seqs": 2, "follows": False}):
        scheduler, model, sequences = scheduled(counts, **how)
        assert all(not plan.follows for plan in drain(scheduler, model, lookahead=True))
        assert all(sequence.tokens == expected(sequence) for sequence in sequences)


@pytest.mark.parametrize("share", [0.7, 1.0])
def test_as_much_is_drafted_as_if_it_had_waited(share):
    """To the end of each answer. A sequence's last step may be one more, for it was made before that was known."""
    steps = [len(drain(*scheduled((40, 33, 40), follows, share)[:2], lookahead=True)) for follows in (False, True)]
    assert steps[1] <= steps[0] + 1, steps


def test_who_waits_and_fits_is_let_in_first():
    scheduler, model, sequences = scheduled((9, 20, 30, 30), max_num_seqs=2)
    pending = []
    while scheduler.has_unfinished or pending:
        if plan := scheduler.schedule(lookahead=True):
            assert not plan.follows or not scheduler.waiting or len(scheduler.running) == 2
            pending.append((plan, model.run(plan)))
        if len(pending) == 2 or not plan:
            scheduler.commit(*pending.pop(0))
    assert all(sequence.tokens == expected(sequence) for sequence in sequences)


ACTIONS = ["step", "step", "step", "step", "add", "preempt", "abort", "cancel", "reset"]


@given(st.data(), st.integers(1, 9), st.sampled_from([14, 20, 60]), st.sampled_from([None, True, False]))
def test_whatever_happens_meanwhile_the_same_is_drawn(data, most, pages, texts):
    """At random, on a cache that is too small at times: requests, preemptions, aborts, failed steps, resets. Texts, if
    there are any, are waited for or not."""
    sources = ("given",) if texts is None else ("given", "samples")
    how = replace(GIVEN, max_draft_tokens=most, always=data.draw(st.booleans()), sources=sources)
    scheduler, model = make(
        num_pages=pages, max_num_seqs=4, max_num_batched_tokens=40, speculation=how, eos_token_ids=[6], follows=True
    )
    pending, requests = [], []
    scheduler.drafter._texts_pay = lambda _: texts

    def turn():
        while len(pending) < 2 and (plan := scheduler.schedule(lookahead=True)):
            pending.append((plan, model.run(plan)))
        assert pending or not scheduler.has_unfinished
        if pending:
            scheduler.commit(*pending.pop(0))
        scheduler.pool.check()

    for number in range(data.draw(st.integers(1, 40))):
        action = data.draw(st.sampled_from(ACTIONS))
        if action == "add" or not requests:
            prompt, seed = [1 + number % 5] * data.draw(st.integers(1, 9)), number
            count = data.draw(st.integers(1, 30))
            source = data.draw(st.randoms(use_true_random=False))
            answer = spoilt(right_answer(prompt, derive_seed(seed, 0), count), source, 0.8)
            requests.append(
                request(prompt, seed=seed, max_new_tokens=count, draft=[answer], ignore_eos=data.draw(st.booleans()))
            )
            scheduler.add(requests[-1])
        elif action == "preempt" and scheduler.running:
            scheduler.preempt(data.draw(st.sampled_from(scheduler.running)))
        elif action == "abort":
            scheduler.abort(data.draw(st.sampled_from(requests)))
        elif action == "cancel" and pending:
            scheduler.cancel(pending[0][0])
            pending.clear()
        elif action == "reset":
            scheduler.reset_cache()
        else:
            turn()
    while scheduler.has_unfinished or pending:
        turn()
    assert scheduler.pool.num_available == pages and len(scheduler._slots) == scheduler._max_running
    for one in requests:
        for sequence in one.sequences:
            assert sequence.tokens == expected(sequence) and sequence.in_flight == 0
            assert sequence.accepted <= sequence.drafted
            if sequence.finish_reason == "length":
                assert len(sequence.tokens) == sequence.limit


@pytest.mark.parametrize("apart", [False, True], ids=["", "apart"])
def test_a_step_behind_drafts_is_what_it_would_be_if_it_had_waited(apart):
    """Its columns are those that it has where it is made when all is known, for every outcome."""
    for outcome in range(3**3):
        accepted, counts, moved = [outcome // 3**i % 3 for i in range(3)], (2, 0, 3), []
        answers = [list(range(100 * i, 100 * i + 20)) for i in range(1, 4)]
        for waited in (False, True):
            sequences = [request([1, 2, 3], max_new_tokens=50, seed=i, temperature=0.5).sequences[0] for i in range(3)]
            pages, row = [[9, 4, 7, 1], [2, 8, 3, 6], [11, 10, 5, 0]], 2
            plan = StepPlan([], 0, follows=not waited)
            for i, (sequence, answer, count) in enumerate(zip(sequences, answers, counts)):
                sequence.tokens.append(7)
                chunk = Chunk(sequence, 4, 5 + count, True, pages[i], 0, i, slack=2, behind=(row, tuple(answer[:2])))
                if count:
                    chunk.window = tuple(answer[1 : 3 + count])
                    chunk.draft = chunk.window[:count]
                row += 3
                if waited:
                    sequence.tokens += [*answer[: accepted[i]], 999]
                    chunk.accept(accepted[i])
                plan.chunks.append(chunk)
            kept = Buffers(None, 3, 4, 4, 40, torch.device("cpu"))
            drawn = [t for i, a in zip(accepted, answers) for t in [*a[:i], 999, 998, 997][:3]]
            kept.drawn[2:11] = torch.tensor(drawn)
            body, head = Body(8, 8 if apart else 3, 8, 4, 1, 4, all_drawn=True, apart=apart), Head(8, plain=False)
            step = Encoder().encode(plan)
            kept.work(step)
            kept.send(step, body, head, follow=None if waited else Follow(plan))
            moved.append({**kept.columns(body), **{f"draw's {k}": v for k, v in kept.columns(head).items()}})
            moved[-1].pop("draw's address")
        assert {name for name, column in moved[0].items() if not torch.equal(column, moved[1][name])} == set()
        assert moved[0]["ids"][0] == 999 and moved[0]["draw's positions"].min() == 5 + min(accepted)


@pytest.fixture
def accepted(monkeypatch):
    """Of each step behind drafts how many of those were right."""
    found, accept = [], Chunk.accept
    monkeypatch.setattr(Chunk, "accept", lambda chunk, right: (found.append(right), accept(chunk, right)))
    return found


def asked(kind="Llama"):
    params = [
        SamplingParams(max_new_tokens=60, seed=1, ignore_eos=True),
        SamplingParams(max_new_tokens=60, temperature=0.7, top_k=20, seed=2, num_top_logprobs=2),
        SamplingParams(max_new_tokens=40, seed=3, stop_token_ids=range(3, 6)),
        SamplingParams(max_new_tokens=200, seed=4, ignore_eos=True),  # to the end of the context
    ]
    with Engine.from_pretrained(build(kind), config=CONFIG) as engine:
        asked = prompts(4, longest=40)
        return asked, params, engine.generate(asked, params)


def drafted(params, done, right=0.7):
    source = random.Random(0)
    return [replace(p, draft=[spoilt(c.token_ids, source, right, 160)]) for p, c in zip(params, done)]


def outcome(completion):
    return bits(completion), completion.top_logprobs, completion.stop_reason


@pytest.mark.parametrize("most", [1, 5, 8])
@pytest.mark.parametrize("recorded", [False, True], ids=["call by call", "graphs"])
@pytest.mark.parametrize("kind", ["Llama", "Qwen3Moe"])
def test_no_byte_is_another(kind, recorded, most, accepted, monkeypatch):
    if recorded:  # padded to sizes of their own, those of few rows to be taken one by one
        monkeypatch.setattr(graphs, "recorder", lambda *_: graphs.HostRecorder())
        for name in ("_PADDING", "_PADDING_OF_CHUNKS"):
            monkeypatch.setattr(f"vexact_engine.runner.record.{name}", -2.0)
        monkeypatch.setattr("vexact_engine.runner.record._ONE_BY_ONE", 9)
    given, params, without = asked(kind)
    speculation = replace(GIVEN, max_draft_tokens=most)
    if most == 5:  # drafts of texts are verified too, and not waited for
        speculation = replace(speculation, sources=("given", "samples"))
        monkeypatch.setattr("vexact_engine.core.drafts.Drafter._texts_pay", lambda *_: False)
    config = replace(CONFIG, speculation=speculation, max_num_seqs=6, max_num_batched_tokens=40)
    with Engine.from_pretrained(build(kind), config=config) as engine:
        make_late(engine, 0.0005)
        for right in (0.7, 0.0, 1.0):
            done = engine.generate(given, drafted(params, without, right))
            assert list(map(outcome, done)) == list(map(outcome, without))
        assert len(accepted) > 60 and sum(right > 0 for right in accepted) > 20
        check_idle(engine)


def test_it_is_launched_before_drafts_are_known(monkeypatch):
    """So the device has it when it is through with them: all that is computed of it is begun."""
    given, params, without = asked()
    counts, wait = [], Pending.wait
    with Engine.from_pretrained(build("Llama"), config=replace(CONFIG, speculation=GIVEN)) as engine:
        make_late(engine, 0.0005)
        runner, forwards = engine._worker._runner, []
        forward = runner.forward
        runner.forward = lambda batch: (forwards.append(batch), forward(batch))[1]

        def waited(self):
            pending = engine._loop._pending
            counts.append((len(forwards), len(counts) + 1 + len(pending), [p.follows for p, _ in pending]))
            return wait(self)

        monkeypatch.setattr(Pending, "wait", waited)
        done = engine.generate(given, drafted(params, without))
    assert [bits(one) for one in done] == [bits(other) for other in without]
    assert all(computed == launched for computed, launched, _ in counts), counts
    assert sum(behind == [True] for *_, behind in counts) > 10, counts


def test_what_single_tokens_take_behind_drafts_counts():
    """They are prepared beside these as any are beside others; so is a step of drafts, which is measured at once."""
    scheduler, model, _ = scheduled((40, 40))
    plan, source = scheduler.drafter.plan, iter(range(1 << 20))
    scheduler.drafter.plan = lambda *args, **how: plan(*args, **how) if next(source) % 3 else []
    plans = drain(scheduler, model, lookahead=True)
    behind = {(plan.drafted > 0, plan.ahead) for plan in plans if plan.follows}
    assert behind == {(False, True), (True, False)}


def fail(*_):
    raise RuntimeError("no more")


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_step_that_fails_takes_the_one_behind_it_along(where, accepted, monkeypatch):
    """What could not be launched fails in its turn, and what has followed a failed step is nobody's."""
    given, params, without = asked()
    config = replace(CONFIG, speculation=GIVEN)
    with Engine.from_pretrained(build("Llama"), config=config) as engine:
        runner = engine._worker._runner
        if where == "launch":
            monkeypatch.setattr(buffers, "settle", fail)
        else:  # of a step that one follows
            wait, failed = Pending.wait, []

            def fail_once(self):
                if not failed and any(plan.follows for plan, _ in engine._loop._pending):
                    failed.append(fail)
                    fail()
                return wait(self)

            monkeypatch.setattr(Pending, "wait", fail_once)
        with pytest.raises(StepFailed, match="no more"):
            engine.generate(given, drafted(params, without))
        monkeypatch.undo()
        assert len(runner.buffers._hosts) - len(runner.buffers._free) == (where == "wait")  # its own is lost with it
        assert bool(accepted) == (where == "launch")
        done = engine.generate(given, drafted(params, without))
        assert [bits(one) for one in done] == [bits(other) for other in without]
        check_idle(engine)


def test_logits_that_are_no_numbers_end_a_sequence_behind_drafts_too():
    """What was right before them is given."""
    given, params, without = asked()
    with Engine.from_pretrained(build("Llama"), config=replace(CONFIG, speculation=GIVEN)) as engine:
        head = engine._worker._runner.handle
        sample, count = type(head).sample, [0]

        def sometimes(self, hidden, seeds, positions, **options):
            ids, *values = sample(self, hidden, seeds, positions, **options)
            count[0] += 1
            return torch.where((positions == len(given[0]) + 30) & (seeds == seeds[0]), -1, ids), *values

        type(head).sample = sometimes
        try:
            done = engine.generate(given, drafted(params, without))
        finally:
            type(head).sample = sample
        ended = [c for c in done if c.finish_reason == "error"]
        assert ended and all(c.token_ids == w.token_ids[: len(c.token_ids)] for c, w in zip(done, without))
        check_idle(engine)
