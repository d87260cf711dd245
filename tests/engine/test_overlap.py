"""The loop with several plans in flight. A toy model (toy.py) computes in a thread of its own, as a device would: what
it draws comes late, in order, and after other plans have been launched."""

import asyncio
import contextlib
import functools
import threading
import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from random import Random

import pytest
from engine_models import until
from toy import VOCAB, ToyModel, expected, make

from vexact_engine.config import SamplingParams
from vexact_engine.core.loop import Loop, _size
from vexact_engine.errors import EngineClosed, StepFailed, WeightsTorn
from vexact_engine.outputs import Outgoing, Submission, Ticket
from vexact_engine.request import Request, State

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


class Pending:
    def __init__(self, answer, waited):
        self.answer, self.waited = answer, waited

    def ready(self):
        return self.answer.done()

    def wait(self):
        self.waited()
        return self.answer.result()


class Device:
    """A worker.

    delay     seconds before each step; None holds the device until `release`
    fail      plan number -> where it fails: "launch" or "wait"
    spoil     called with (plan number, drawn tokens); may put -1 among them
    most      the most plans that were in flight at once
    """

    def __init__(self, config, depth, delay=0.0):
        self.model, self.depth, self.delay = ToyModel(config), depth, delay
        self.fail, self.spoil, self.written = {}, lambda number, ids: None, False
        self.launched = self.computed = self.in_flight = self.most = 0
        self.gate = threading.Semaphore(0)
        self.closed = False
        self.work = SimpleQueue()
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        while (item := self.work.get()) is not None:
            plan, number, answer = item
            if self.delay is None:
                assert self.gate.acquire(timeout=120)
            else:
                time.sleep(self.delay)
            self.computed += 1
            try:
                if self.fail.get(number) == "wait":
                    raise RuntimeError(f"step {number} failed")
                sampled = self.model.run(plan)
                self.spoil(number, sampled.token_ids)
                answer.set_result(sampled)
            except BaseException as error:
                answer.set_exception(error)

    def release(self, steps=1000):
        self.gate.release(steps)

    def changed(self):
        return self.written

    def renew(self):
        assert not self.in_flight, "weights that a plan in flight may read"
        self.written = False
        return True

    def launch(self, plan):
        number, self.launched = self.launched, self.launched + 1
        if self.fail.get(number) == "launch":
            raise RuntimeError(f"step {number} failed")
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        answer = Future()
        self.work.put((plan, number, answer))
        return Pending(answer, self.one_less)

    def one_less(self):
        self.in_flight -= 1

    def close(self):
        assert not self.in_flight, "closed with plans in flight"
        self.work.put(None)
        self.thread.join()
        self.closed = True


class Text:
    """Each token is a letter."""

    silent, bytes, specials = frozenset(), {}, {}

    def decode(self, ids):
        return "".join(chr(97 + i) for i in ids)

    whole = decode


class Bench:
    """A loop over a toy."""

    def __init__(self, depth, delay=0.0, **options):
        def build(find_stop):
            scheduler, _ = make(find_stop=find_stop, **options)
            return scheduler, Device(scheduler.config, depth, delay)

        self.loop = Loop(build)
        self.device, self.scheduler, self.asked = self.loop.worker, self.loop.scheduler, threading.Event()

    def __enter__(self):
        return self

    def __exit__(self, kind, *rest):
        self.asked.set()
        if kind is None and not self.loop.closed:
            self.check()
        self.device.release()
        self.loop.close()
        assert self.device.closed and not self.device.thread.is_alive()
        assert not self.loop._thread.is_alive()

    def check(self):
        """All is given back. Also: what `call` does, it does alone."""

        def idle():
            assert not self.device.in_flight and not self.loop._pending and not self.scheduler._in_flight
            assert (
                not self.scheduler.has_unfinished and not self.loop._tickets.running and not self.loop._tickets.listened
            )
            assert len(self.scheduler._slots) == self.scheduler._max_running
            assert self.scheduler.pool.num_available == self.scheduler.pool.num_pages
            self.scheduler.pool.check()

        self.loop.call(idle)

    def ask(self, *prompts, listen=None, **params):
        done = threading.Event()
        call = Submission(done.set)
        fields = {"seed": 5, "max_new_tokens": 8, **params}
        for prompt in prompts:
            Ticket(Request(prompt, SamplingParams(**fields)), Text(), call, listen)
        self.loop.submit(call.tickets)
        return done, call.tickets

    def hold(self, after):
        """From this plan on none is launched while nobody wants something of the loop's thread, until `asked` is set:
        who asks does so before the last token, however slow."""
        launch = self.device.launch

        def held(plan):
            if self.device.launched >= after:
                until(lambda: self.loop._inbox or self.loop._deferred or self.asked.is_set())
            return launch(plan)

        self.device.launch = held


def wait(*asked):
    for done, tickets in asked:
        assert done.wait(120), tickets


def right(tickets, reasons=("length",)):
    for ticket in tickets:
        for sequence in ticket.request.sequences:
            assert sequence.tokens == expected(sequence)
            assert sequence.finish_reason in reasons
            assert len(sequence.logprobs) == len(sequence.weight_versions) == len(sequence.generated)


@DEPTHS
@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_tokens_are_the_same_at_every_depth(depth, delay):
    with Bench(depth, delay, num_pages=14, max_num_seqs=4) as bench:
        asked = [bench.ask([1, 2, i % 3], [i], n=1 + i % 2, seed=i, max_new_tokens=1 + i) for i in range(12)]
        wait(*asked)
        for _, tickets in asked:
            right(tickets)
        assert bench.device.most == depth
        assert bench.device.launched == bench.scheduler.stats.steps == bench.device.computed


@pytest.mark.parametrize("depth", [2, 3])
def test_the_next_plan_is_launched_before_the_last_is_there(depth):
    with Bench(depth, None) as bench:
        asked = bench.ask([1, 2])
        until(lambda: bench.device.launched == depth)
        time.sleep(0.01)
        assert bench.device.launched == depth and bench.device.computed == 0
        for step in range(1, 6):
            bench.device.release(1)
            until(lambda step=step: bench.device.launched == min(8, depth + step))
            assert len(asked[1][0].request.sequences[0].generated) == step
        bench.device.release()
        wait(asked)
        right(asked[1])


@DEPTHS
def test_text_of_a_step_is_looked_at_behind_the_next_launch(depth):
    with Bench(depth) as bench:
        free = bench.ask([1, 2], max_new_tokens=12)
        wait(free)
        text, launched = Text().decode(free[1][0].request.sequences[0].generated), bench.device.launched
        stop = text[5:7]
        end = text.index(stop) + 2
        asked = bench.ask([1, 2], max_new_tokens=12, stop=stop, listen=lambda item: None)
        wait(asked)
        (done,) = asked[1][0].completions
        assert (done.finish_reason, done.stop_reason, done.text) == ("stop", stop, text[: text.index(stop)])
        assert len(done.token_ids) == end and done.token_ids == free[1][0].completions[0].token_ids[:end]
        bench.check()
        assert end <= bench.device.launched - launched <= end + depth - 1  # what is computed too many is thrown away
        right(asked[1], ("stop",))


@DEPTHS
def test_a_stop_token_frees_pages_and_slots_that_a_plan_in_flight_still_writes_to(depth):
    """Few pages and slots, all reused at once, and the toy model looks at every one."""
    with Bench(depth, 0.0005, num_pages=9, page_size=2, max_num_seqs=3, eos_token_ids=[0, 1]) as bench:
        asked = [bench.ask([2, i % 5, 3], seed=i, max_new_tokens=9) for i in range(60)]
        wait(*asked)
        for _, tickets in asked:
            right(tickets, ("stop", "length"))
        assert bench.scheduler.stats.finished["stop"] > 10 and bench.scheduler.stats.preemptions > 0


@DEPTHS
def test_requests_come_and_go_while_the_device_computes(depth):
    with Bench(depth, None) as bench:
        first = bench.ask([1, 2])
        until(lambda: bench.device.launched == depth)
        second = bench.ask([3, 4])
        until(lambda: len(bench.loop._tickets.running) == 2)  # taken in
        bench.loop.abort(first[1])
        wait(first)  # told at once
        assert first[1][0].completions[0].finish_reason == "abort"
        twice = threading.Event()
        Ticket(Request([5], SamplingParams(), second[1][0].request.id), Text(), call := Submission(twice.set))
        bench.loop.submit(call.tickets)
        assert twice.wait(120) and "another request of this id" in call.tickets[0].completions[0].error
        assert bench.device.computed == 0
        bench.device.release()
        wait(second)
        right(second[1])


@DEPTHS
def test_what_is_called_is_called_alone(depth):
    with Bench(depth, 0.001) as bench:
        prompts = [prompt for i in range(3) for prompt in ([1, 2, i], [4, i])]
        bench.hold(4)
        asked = bench.ask(*prompts, max_new_tokens=40)
        for version in range(1, 6):

            def renew(version=version):
                assert not bench.device.in_flight and not bench.scheduler._in_flight
                bench.scheduler.reset_cache(version)

            bench.loop.call(renew, when=bench.loop.may_change_weights if version % 2 else None)
        bench.asked.set()
        wait(asked)
        right(asked[1])
        assert [ticket.request.sequences[0].weight_versions[-1] for ticket in asked[1]] == [5] * 6


@DEPTHS
def test_weights_that_others_write_wait_for_what_is_in_flight(depth):
    with Bench(depth, 0.001) as bench:
        bench.device.spoil = lambda number, ids: setattr(bench.device, "written", bench.device.written or number == 5)
        asked = bench.ask([1, 2, 3], max_new_tokens=30)
        wait(asked)
        right(asked[1])
        versions = asked[1][0].request.sequences[0].weight_versions
        assert set(versions) == {0, 1} and versions == sorted(versions)


@DEPTHS
def test_weights_that_cannot_be_used(depth):
    def unusable():
        raise WeightsTorn("torn")

    with Bench(depth, 0.001) as bench:
        renew, bench.device.renew = bench.device.renew, unusable
        bench.device.spoil = lambda number, ids: setattr(bench.device, "written", bench.device.written or number == 5)
        asked = bench.ask([1, 2, 3], max_new_tokens=30)
        wait(asked)
        with pytest.raises(WeightsTorn):
            asked[1][0].result()
        bench.device.renew = renew
        again = bench.ask([1, 2])
        wait(again)
        right(again[1])


@DEPTHS
@pytest.mark.parametrize("where", ["launch", "wait"])
@pytest.mark.parametrize("number", [0, 1, 5])
def test_a_step_that_fails_takes_those_behind_it_with_it(depth, where, number):
    with Bench(depth, 0.001, num_pages=12, page_size=2) as bench:
        bench.device.fail[number] = where
        asked = [bench.ask([i], max_new_tokens=10) for i in range(4)]
        wait(*asked)
        failed = [tickets[0] for _, tickets in asked if tickets[0].error]
        assert failed
        for ticket in failed:
            with pytest.raises(StepFailed, match=f"a step failed: RuntimeError: step {number} failed"):
                ticket.result()
        again = bench.ask([1, 2], [3])
        wait(again)
        right(again[1])


@DEPTHS
def test_who_is_done_before_a_failed_step_is_done(depth):
    with Bench(depth, None) as bench:
        bench.device.fail[3] = "launch"
        short, long = bench.ask([1], max_new_tokens=3), bench.ask([2], max_new_tokens=9)
        until(lambda: len(bench.loop._tickets.running) == 2)
        bench.device.release()
        wait(short, long)
        assert short[1][0].error is None or bench.scheduler.stats.finished["error"] == 2
        assert isinstance(long[1][0].error, StepFailed)


@DEPTHS
def test_logits_that_are_not_numbers(depth):
    with Bench(depth, 0.001) as bench:

        def spoil(number, ids):
            if number == 4:
                ids[0] = -1

        bench.device.spoil = spoil
        asked = bench.ask([1, 2], [3, 4], max_new_tokens=9)
        wait(asked)
        first, second = (ticket.completions[0] for ticket in asked[1])
        assert first.finish_reason == "error" and "after 6 tokens are not finite numbers" in first.error
        assert len(first.token_ids) == 4 and second.finish_reason == "length"
        right(asked[1], ("error", "length"))


@pytest.mark.parametrize("depth", [2, 3])
def test_a_token_that_is_thrown_away_may_be_no_number(depth):
    """The samples of one request: one has ended, and what it draws after that is nobody's affair."""
    with Bench(depth, None) as bench:
        short = bench.ask([1, 2], max_new_tokens=9)
        until(lambda: bench.device.launched == depth)
        bench.device.release()
        wait(short)
        stop = short[1][0].completions[0].token_ids[3]
        length = short[1][0].completions[0].token_ids.index(stop) + 1
        begin = bench.device.launched

        def spoil(number, ids):
            if number == begin + length:
                ids[0] = -1

        bench.device.spoil = spoil
        asked = bench.ask([1, 2], n=2, max_new_tokens=9, stop_token_ids=[stop])
        wait(asked)
        assert asked[1][0].completions[0].finish_reason == "stop" and bench.device.launched > begin + length
        right(asked[1], ("stop", "length"))


@DEPTHS
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_begins_when_nothing_is_in_flight(depth, mode):
    with Bench(depth, 0.001) as bench:
        bench.hold(5)
        asked = bench.ask([0], [1], [2], max_new_tokens=20)
        until(lambda: bench.device.computed > 4)
        bench.loop.pause(mode)
        bench.asked.set()
        assert not bench.device.in_flight
        launched = bench.device.launched
        later = bench.ask([6])
        time.sleep(0.01)
        assert bench.device.launched == launched and not later[0].is_set()
        bench.loop.resume()
        wait(later, asked)
        right(asked[1], ("abort",) if mode == "abort" else ("length",))
        right(later[1])


@DEPTHS
def test_close_with_plans_in_flight(depth):
    with Bench(depth, None) as bench:
        asked = bench.ask([1, 2], [3])
        until(lambda: bench.device.launched == depth)
        closing = threading.Thread(target=bench.loop.close)
        closing.start()
        until(lambda: bench.loop.closed)
        bench.device.release()
        closing.join(120)
        assert not closing.is_alive()
        wait(asked)
        assert {t.completions[0].finish_reason for t in asked[1]} == {"abort"}
        with pytest.raises(EngineClosed):
            bench.ask([1])


def test_close_with_a_device_that_fails():
    with Bench(2, None) as bench:
        bench.device.fail = {0: "wait", 1: "wait"}
        asked = bench.ask([1, 2])
        until(lambda: bench.device.launched == 2)
        closing = threading.Thread(target=bench.loop.close)
        closing.start()
        until(lambda: bench.loop.closed)
        bench.device.release()
        closing.join(120)
        assert not closing.is_alive()
        wait(asked)


@DEPTHS
def test_one_wake_up_a_step_for_an_asyncio_loop(depth):
    with Bench(depth, 0.0005, num_pages=64) as bench:
        calls, items = [], []

        async def main():
            here = asyncio.get_running_loop()
            original = here.call_soon_threadsafe
            here.call_soon_threadsafe = lambda *args: calls.append(1) or original(*args)
            listen = functools.partial(bench.loop.call_in, here, items.append)
            done, _ = bench.ask(*[[i] for i in range(6)], listen=listen, max_new_tokens=20)
            end = time.monotonic() + 120
            while not done.is_set() or len(items) < 6 * 20:  # the last are on their way
                assert time.monotonic() < end, len(items)
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)

        asyncio.run(main())
        assert len(items) == 6 * 20
        assert len(calls) <= bench.scheduler.stats.steps + 1


def test_waiting_takes_no_core(monkeypatch):
    """Looks are counted: on a machine that does other things too there are fewer, never more. After 80 ms there is one
    in 5 ms, and 94 come before."""
    looks, ready = [], Pending.ready
    monkeypatch.setattr(Pending, "ready", lambda self: looks.append(self) or ready(self))
    with Bench(2, None) as bench:
        begin = time.monotonic()
        asked = bench.ask([1])
        until(lambda: bench.device.launched == 2)
        time.sleep(0.5)
        assert 0 < len(looks) < 100 + (time.monotonic() - begin) / 0.004
        bench.device.release()
        wait(asked)


@DEPTHS
def test_everything_at_random(depth):
    """Threads that ask, abort, reset, renew the weights, pause and fail steps, over few pages and slots."""
    random = Random(depth)
    with Bench(depth, 0.0002, num_pages=11, page_size=2, max_num_seqs=4, eos_token_ids=[VOCAB - 1]) as bench:
        loop, device, begin = bench.loop, bench.device, time.monotonic()
        tickets, failures = [], []

        def goes_on():
            return time.monotonic() < begin + 2.0 or len(tickets) <= 50

        def ask(seed):
            mine = Random(seed)
            while goes_on():
                prompts = [[mine.randrange(3) for _ in range(mine.randint(1, 9))] for _ in range(mine.randint(1, 3))]
                listen = mine.choice([None, lambda item: None])
                params = {"n": mine.randint(1, 3), "seed": mine.randrange(9), "max_new_tokens": mine.randint(1, 11)}
                stop = mine.choice([(), ("ab", "cc")])
                asked = bench.ask(*prompts, listen=listen, stop=stop, **params)
                if mine.random() < 0.3:
                    time.sleep(mine.random() * 0.01)
                    loop.abort(asked[1][:1])
                wait(asked)
                tickets.extend(asked[1])

        def meddle():
            version = 0
            while goes_on():
                time.sleep(random.random() * 0.02)
                what = random.randrange(5)
                if what == 0:
                    version += 1
                    loop.call(functools.partial(renew, version), when=loop.may_change_weights)
                elif what == 1:
                    loop.pause(random.choice(["wait", "keep", "abort"]))
                    loop.resume()
                elif what == 2:
                    device.fail[device.launched + 2] = random.choice(["launch", "wait"])
                elif what == 3:
                    loop.call(preempt)
                else:
                    device.written = True

        def renew(version):
            bench.scheduler.reset_cache(bench.scheduler.weight_version + 1)

        def preempt():
            for sequence in bench.scheduler.running[:2]:
                bench.scheduler.preempt(sequence)

        with ThreadPoolExecutor(5) as pool:
            futures = [pool.submit(ask, seed) for seed in range(4)] + [pool.submit(meddle)]
            for future in futures:
                future.result(300)
        assert len(tickets) > 50 and not failures
        for ticket in tickets:
            for sequence in ticket.request.sequences:
                assert sequence.state is State.FINISHED and sequence.tokens == expected(sequence)
            if ticket.error is not None:
                assert isinstance(ticket.error, StepFailed) and "step" in str(ticket.error)
                assert isinstance(ticket.error.__cause__, RuntimeError)


def waiting(in_flight):
    """A loop with so many plans in flight, the seconds of its clock, and what makes a plan that takes so long."""
    loop, now = object.__new__(Loop), [0.0]

    class Changed(contextlib.nullcontext):
        def wait(self, seconds):
            now[0] += seconds

    class Step:
        def __init__(self, seconds):
            self.end = now[0] + seconds

        def ready(self):
            return now[0] >= self.end

    loop._changed, loop._closing, loop._inbox, loop._outgoing, loop._typical = Changed(), False, deque(), Outgoing(), {}
    loop._pending, loop._aborts = [None] * in_flight, deque()
    return loop, now, Step


def test_a_sleep_that_was_too_long_is_not_repeated():
    """A step of many tokens takes long, those after it do not: the device must not wait for a thread that sleeps."""
    loop, now, Step = waiting(in_flight=2)
    late = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vexact_engine.core.loop.time.perf_counter", lambda: now[0])
        for seconds in [0.04] * 20 + [0.003, 0.0] * 3 + [0.003] * 20:
            step = Step(seconds)
            loop._await(step, size=64)
            late.append(now[0] - step.end)
        assert late[20] > 0.02 and max(late[21:]) < 0.001, late
        for tokens, seconds in [(2048, 0.04), (64, 0.003)] * 20:  # what takes long for its size is no measure of others
            step = Step(seconds)
            loop._await(step, _size(tokens))
            late.append(now[0] - step.end)
    assert max(late[-30::2]) < 0.004 and max(late[-29::2]) < 0.001, late


@pytest.mark.parametrize("in_flight, latest", [(1, 0.0004), (2, 0.003)])
def test_a_plan_that_none_is_behind_is_looked_at_more_often(in_flight, latest, monkeypatch):
    (loop, now, Step), late = waiting(in_flight), []
    monkeypatch.setattr("vexact_engine.core.loop.time.perf_counter", lambda: now[0])
    for number in range(40):
        step = Step(0.04 + 0.0001 * (number % 25))
        loop._await(step, size=64)
        late.append(now[0] - step.end)
    assert latest / 4 < max(late[10:]) < latest, late


def test_what_is_behind_a_long_plan_is_not_through_before_the_next_is_launched(monkeypatch):
    """As single tokens behind a prompt: they take less than the sixteenth of that."""
    (loop, now, Step), late = waiting(in_flight=2), []
    monkeypatch.setattr("vexact_engine.core.loop.time.perf_counter", lambda: now[0])
    for number in range(40):
        loop._await(Step(0.002), size=16, behind=_size(2048))
        step = Step(0.04 + 0.0001 * (number % 25))
        loop._await(step, _size(2048), behind=16)
        late.append(now[0] - step.end)
    assert max(late[10:]) < 0.0005, late


def test_plans_of_about_one_size():
    sizes = [_size(tokens) for tokens in range(1, 4097)]
    assert sizes == sorted(sizes) and all(size <= n < 1.25 * size or n < 8 for n, size in enumerate(sizes, 1))
    assert len(set(sizes)) < 50
