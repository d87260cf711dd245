"""Faults in the processes around an engine: `python tests/faults.py [--minutes 3] [TARGET ...]`.

Targets, so many minutes each: `handover` (a trainer's process sends weights to an engine's), `replicas`, `stages`. In
each round a process is stopped (SIGSTOP) or killed in some phase of what it does, strangers talk at the hand-over's
socket, and clients go on sending requests. Every request must be answered: with the bits that an engine alone gives, or
aborted, no later than its limit; every update must end within its own; once a process goes on all must be as before. At
the end no process, socket or shared memory may be left, and memory must have been flat. All of it on this machine, by
Unix sockets. The last line is a JSON object; the exit status is 1 where anything was late, lost, left or different.
"""

import argparse
import contextlib
import ctypes
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import resource_tracker
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "engine"))
sys.path.insert(0, str(Path(__file__).parent.parent))

import zmq
from engine_models import bits, build, prompts, until
from growth import Growth

import vexact_ops as vx
from benchmarks.harness import environment
from vexact_engine import (
    Engine,
    EngineConfig,
    HandoverFailed,
    PeerLost,
    Replicas,
    SamplingParams,
    StageDied,
    StepFailed,
    UpdateIncomplete,
    WeightReceiver,
    WeightSender,
    WeightsMissing,
    WeightsTorn,
)
from vexact_engine.core import loop as core_loop
from vexact_engine.parallel import limits

CONFIG = EngineConfig(num_pages=128, page_size=4, max_num_batched_tokens=64, show_progress=False, max_model_len=200)
PROMPTS = prompts(4, longest=12)
PARAMS = SamplingParams(max_new_tokens=24, seed=1, ignore_eos=True)
STATES = 2  # of the weights
CLIENTS = 2
REST = 0.05  # seconds between two requests of one: about as long as they take, so that most of the time some are there
LIMIT = 2.0  # seconds of a request, then it is aborted
PATIENCE = 2.0  # of a hand-over, an update, a step, before what stands still is given up
SLACK = 30.0  # seconds that a machine which does other things too may take for what takes one
AT_MOST = 10_000  # rounds
SHOWN = 20  # failures
ONE_ARENA = -8, 1  # for mallopt: else every thread has a heap of its own
FAILED = (StepFailed, WeightsTorn, WeightsMissing)  # what may end a request when a process is lost


def model_of(state: int):
    return build("Llama", seed=state)


def wrong_messages(rng: random.Random) -> list[bytes]:
    nested = b"\x91" * rng.choice([10, 1000, 100_000])
    return [
        b"",
        b"\x80\x04K\x07.",
        b"\x81\xa2\xff\xfe\x01",
        nested,
        rng.randbytes(rng.randrange(200)),
        b"\xc6\xff\xff\xff\xff",
    ]


class Clients:
    """Threads that send requests to an engine, one after the other; each is aborted once its time is over."""

    def __init__(self, engine, expected: list, counts: Counter, fail: Callable[[str], None]):
        self.engine, self.expected, self.counts, self.fail = engine, expected, counts, fail
        self.state_of: dict[int, int] = {0: 0}  # version -> state of the weights
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(n,), daemon=True) for n in range(CLIENTS)]

    def __enter__(self) -> "Clients":
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exception) -> None:
        self._stop.set()
        end = time.monotonic() + LIMIT + SLACK
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        if any(thread.is_alive() for thread in self._threads):
            self.fail("a request is not answered")

    def _run(self, number: int) -> None:
        for count in range(1 << 62):
            if self._stop.is_set():
                return
            name, at = f"{number}-{count}", (number + count) % len(PROMPTS)
            timer = threading.Timer(LIMIT, self.engine.abort, (name,))
            timer.start()
            began = time.monotonic()
            try:
                (done,) = self.engine.generate([PROMPTS[at]], PARAMS, request_ids=[name])
            except FAILED as error:
                self.counts[type(error).__name__] += 1
                self._stop.wait(0.01)
            except Exception as error:
                self.fail(f"a request: {type(error).__name__}: {error}")
                return
            else:
                self.counts[done.finish_reason] += 1
                self._check(at, done)
            finally:
                timer.cancel()
            took = time.monotonic() - began
            self._stop.wait(REST)
            self.counts["late"] += took > LIMIT + SLACK
            if took > LIMIT + SLACK:
                self.fail(f"a request was answered after {took:.1f} s, expected {LIMIT:g} and a moment")

    def _check(self, at: int, done) -> None:
        versions = set(done.weight_versions)
        states = {self.state_of.get(version) for version in versions}
        if done.finish_reason != "length" or len(states) != 1 or None in states:
            return
        self.counts["checked"] += 1
        if bits(done) != self.expected[states.pop()][at]:
            self.counts["differ"] += 1
            self.fail(f"request of prompt {at}: other bits than those of an engine alone")


class Target:
    """Something with processes around it. `round` does one wrong thing, and comes back to where it was."""

    name = ""
    phases: tuple[str, ...] = ()

    def __init__(self, rng: random.Random, counts: Counter, expected: list, fail: Callable[[str], None]):
        self.rng, self.counts, self.expected, self.fail = rng, counts, expected, fail
        self.stack = contextlib.ExitStack()
        self.state = self.number = 0

    def __enter__(self) -> "Target":
        with contextlib.ExitStack() as stack:
            self.open(stack)
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *exception) -> None:
        with self.within("close()", core_loop.GRACE_SECONDS + limits.CLOSE):
            self.stack.close()

    def open(self, stack: contextlib.ExitStack) -> None:
        raise NotImplementedError

    def round(self, phase: str) -> None:
        raise NotImplementedError

    @contextlib.contextmanager
    def within(self, what: str, seconds: float = PATIENCE) -> Iterator[None]:
        began = time.monotonic()
        yield
        took = time.monotonic() - began
        if took > seconds + SLACK:
            self.counts["late"] += 1
            self.fail(f"{self.name}: {what} took {took:.1f} s, expected {seconds:g} and a moment")

    @contextlib.contextmanager
    def stopped(self, pid: int) -> Iterator[None]:
        os.kill(pid, signal.SIGSTOP)
        self.counts["stopped"] += 1
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def kill(self, pid: int) -> None:
        os.kill(pid, signal.SIGKILL)
        self.counts["killed"] += 1

    def weights(self, at: int | None = None, do: Callable[[], None] = lambda: None):
        """Of the next state; `do` before the tensor of that number, or after the last."""
        self.state = (self.state + 1) % STATES
        items = list(model_of(self.state).state_dict().items())
        for number, item in enumerate(items):
            if number == at:
                do()
            yield item
        if at is not None and at >= len(items):
            do()

    def verify(self, engine) -> None:
        done = [bits(c) for c in engine.generate(PROMPTS, PARAMS)]
        self.counts["checked"] += len(done)
        if done != self.expected[self.state]:
            self.counts["differ"] += 1
            self.fail(f"{self.name}: an engine that goes on gives other bits")


AT = {"begin": 0, "middle": 5, "end": 1 << 30}  # of an update, in tensors


class Handover(Target):
    """A trainer's process, which stops or dies in some phase of a set; an engine and its receiver here."""

    name = "handover"
    phases = (*(f"{how} at the {at}" for how in ("stop", "kill", "raise") for at in AT), "receiver", "strangers")

    def open(self, stack) -> None:
        self.modes = {}
        for mode in ("in_place", "staged"):
            engine = stack.enter_context(Engine.from_pretrained(model_of(0), config=CONFIG))
            receiver = stack.enter_context(WeightReceiver(engine, mode=mode, timeout=PATIENCE))
            clients = stack.enter_context(Clients(engine, self.expected, self.counts, self.fail))
            self.modes[mode] = engine, receiver, clients
        self.trainer = None
        stack.callback(self._end_trainer)

    def _end_trainer(self) -> None:
        if self.trainer is not None:
            process, pipe = self.trainer
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
            process.join()
            process.close(), pipe.close()
        self.trainer = None

    def _ask_trainer(self, *order) -> None:
        if self.trainer is None:
            context = multiprocessing.get_context("spawn")
            ours, theirs = context.Pipe()
            process = context.Process(target=trainer, args=(theirs, SLACK), daemon=True)
            process.start()
            theirs.close()
            self.trainer = process, ours
            ours.recv()  # it is there
        self.trainer[1].send(order)

    def _strangers(self, receiver) -> None:
        with zmq.Context.instance().socket(zmq.DEALER) as at:
            at.linger = 0
            at.connect(receiver.address)
            for data in wrong_messages(self.rng):
                at.send(data)
                self.counts["wrong messages"] += 1
            at.poll(20)

    def round(self, phase: str) -> None:
        mode = self.rng.choice(list(self.modes))
        engine, receiver, clients = self.modes[mode]
        if phase == "strangers":
            for _ in range(10):
                self._strangers(receiver)
        elif phase == "receiver":  # which does not listen: as one that stands still
            with (
                WeightSender(receiver.address, numerics=vx.numerics("cpu"), timeout=PATIENCE) as out,
                self.within("a sender whose receiver stands still"),
                contextlib.suppress(PeerLost),
            ):
                out.send(self.weights())
                self.fail("handover: a set was taken by nobody")
        else:
            how, at = phase.split(" at the ")
            self._ask_trainer(receiver.address, (self.state + 1) % STATES, how, AT[at], None)
            self._strangers(receiver)
            try:
                with self.within(f"a set whose sender does {phase}"):
                    receiver.receive(SLACK)
                self.fail(f"handover: a set was taken whose sender does {phase}")
            except HandoverFailed:
                self.counts["sets that failed"] += 1
            if how != "raise":
                self._end_trainer()
            else:
                self.trainer[1].recv()
        self.number += 1
        self.state = (self.state + 1) % STATES
        clients.state_of[self.number] = self.state
        self._ask_trainer(receiver.address, self.state, "", 0, self.number)
        with self.within("a set"):
            version = receiver.receive(SLACK)
        if (version, self.trainer[1].recv()) != (self.number, self.number):
            self.fail(f"handover: weights {self.number} came as {version}")
        self.verify(engine)


def trainer(pipe, timeout: float) -> None:
    """A process that sends sets, until the other end of the pipe is gone. It is there once it has what it sends: what
    a model takes to be imported is no time of a set."""
    for state in range(STATES):
        model_of(state)
    pipe.send(None)
    with contextlib.suppress(EOFError), contextlib.ExitStack() as stack:
        senders: dict[str, WeightSender] = {}
        while True:
            address, state, how, at, version = pipe.recv()
            if address not in senders:
                made = WeightSender(address, numerics=vx.numerics("cpu"), bucket_bytes=8192, timeout=timeout)
                senders[address] = stack.enter_context(made)
            items = list(model_of(state).state_dict().items())

            def give(items=items, how=how, at=at):
                for number, item in enumerate([*items, None]):
                    if how and number == min(at, len(items)):
                        if how == "raise":
                            raise KeyError("a trainer's own fault")
                        os.kill(os.getpid(), signal.SIGSTOP if how == "stop" else signal.SIGKILL)
                    if item is not None:
                        yield item

            try:
                pipe.send(senders[address].send(give(), version=version))
            except (KeyError, HandoverFailed) as error:
                pipe.send(str(error))


class OfReplicas(Target):
    """Two replicas, of which one stops or dies."""

    name = "replicas"
    phases = ("idle", "all", "killed", "paused", *(f"{how} at the {at}" for how in ("stop", "kill") for at in AT))

    def open(self, stack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model_of(0).save_pretrained(folder)
        self.replicas = stack.enter_context(
            Replicas.from_pretrained(folder, replicas=2, config=CONFIG, max_restarts=AT_MOST)
        )
        self.clients = stack.enter_context(Clients(self.replicas, self.expected, self.counts, self.fail))

    def _update(self, at: int | None = None, do: Callable[[], None] = lambda: None) -> None:
        items = self.weights(at, do)
        specs = {name: (tuple(t.shape), t.dtype) for name, t in model_of(0).state_dict().items()}
        self.clients.state_of[self.replicas.weight_version + 1] = (self.state + 1) % STATES
        self.replicas.update_weights(items, specs=specs, numerics=self.replicas.numerics())

    def round(self, phase: str) -> None:
        replicas, front = self.replicas, self.replicas._front
        pids = [one.pid for one in replicas.replicas]
        one, starts = self.rng.randrange(2), sum(one.starts for one in replicas.replicas)
        with contextlib.ExitStack() as stack:
            if phase in ("idle", "all", "paused"):
                for pid in pids if phase == "all" else [pids[one]]:
                    stack.enter_context(self.stopped(pid))
                time.sleep(self.rng.random() * LIMIT)
                with self.within("what replicas have counted"):
                    self.counts["steps"] = max(self.counts["steps"], replicas.stats.steps)
                if phase == "paused":
                    for do in (lambda: replicas.pause("keep"), replicas.resume):
                        with self.within("a pause"), contextlib.suppress(TimeoutError):
                            do()
                time.sleep(LIMIT)
            elif phase == "killed":
                self.kill(pids[one])
            else:
                how, at = phase.split(" at the ")
                stop = lambda: stack.enter_context(self.stopped(pids[one]))  # noqa: E731
                with (
                    self.within(f"an update, {phase}", 4 * PATIENCE),
                    contextlib.suppress(UpdateIncomplete, TimeoutError),
                ):
                    self._update(AT[at], stop if how == "stop" else lambda: self.kill(pids[one]))
        starts += phase.startswith("kill")
        with self.within("that all are there again", LIMIT + SLACK):
            until(lambda: sum(one.starts for one in replicas.replicas) >= starts)
            until(lambda: all(r.alive for r in replicas.replicas) and not any(r.owes for r in front.replicas))
        if phase == "paused":
            replicas.resume()
        with contextlib.suppress(UpdateIncomplete), self.within("an update", 4 * PATIENCE):
            self._update()
        if not all(one.fresh for one in replicas.replicas):
            self._update()  # what was stopped was still at the last one
        self.verify(replicas)


class OfStages(Target):
    """An engine in two stages, of which one stops or dies."""

    name = "stages"
    phases = (
        "a moment", "for good", "killed", "alone", *(f"{how} at the {at}" for how in ("stop", "kill") for at in AT),
    )  # fmt: skip

    def open(self, stack) -> None:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        model_of(0).save_pretrained(folder)
        config = replace(CONFIG, pipeline_parallel_size=2)
        self.engine = stack.enter_context(Engine.from_pretrained(folder, config=config))
        self.clients = stack.enter_context(Clients(self.engine, self.expected, self.counts, self.fail))

    def _update(self, at: int | None = None, do: Callable[[], None] = lambda: None) -> None:
        self.clients.state_of[self.engine.weight_version + 1] = (self.state + 1) % STATES
        specs = {name: (tuple(t.shape), t.dtype) for name, t in model_of(0).state_dict().items()}
        self.engine.update_weights(self.weights(at, do), specs=specs, numerics=self.engine.numerics())

    def round(self, phase: str) -> None:
        engine = self.engine
        pids = [stage.process.pid for stage in engine._worker._stages] or [0]
        pid = self.rng.choice(pids)
        with contextlib.ExitStack() as stack:
            if phase == "killed":
                self.kill(pid)
            elif phase in ("a moment", "for good", "alone"):
                stack.enter_context(self.stopped(pid))
                time.sleep(PATIENCE / 4 if phase == "a moment" else PATIENCE + 0.5)
                if phase == "alone":
                    with self.within("what waits for a step", 4 * PATIENCE), contextlib.suppress(StageDied):
                        engine.reset_prefix_cache()
            else:
                how, at = phase.split(" at the ")
                stop = lambda: stack.enter_context(self.stopped(pid))  # noqa: E731
                with self.within(f"an update, {phase}", 4 * PATIENCE), contextlib.suppress(StageDied):
                    self._update(AT[at], stop if how == "stop" else lambda: self.kill(pid))
        for _ in range(3):
            with contextlib.suppress(StageDied):  # found out only now
                with self.within("an update", 4 * PATIENCE):
                    self._update()
                self.verify(engine)
                return
        self.fail("stages: an update does not come to its end")


TARGETS: dict[str, type[Target]] = {kind.name: kind for kind in (Handover, OfReplicas, OfStages)}


def processes() -> set[int]:
    """Children of this process that run."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            pid, _, rest = stat.read_text().partition(" (")
            state, parent = rest.rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid() and state != "Z":
                found.add(int(pid))
    return found


def buckets() -> int:
    """Mappings and open files of weights' memory."""
    files = 0
    for file in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            files += "vexact-weights" in os.readlink(file)
    return files + Path("/proc/self/maps").read_text().count("vexact-weights")


def attack(name: str, args: argparse.Namespace, expected: list) -> dict:
    """One target, for its time."""
    rng, counts, failures, growth = random.Random(args.seed), Counter(), Counter(), Growth("cpu")
    resource_tracker.ensure_running()  # a child of this process for good, once it has spawned any
    before, began, rounds = processes(), time.monotonic(), 0

    def fail(what: str) -> None:
        failures[what] += 1
        if failures[what] > 1 or len(failures) > SHOWN:
            return
        sys.stdout.write(what + "\n")
        sys.stdout.flush()

    folder = Path(os.environ["XDG_RUNTIME_DIR"])
    with TARGETS[name](rng, counts, expected, fail) as target:
        phases: list[str] = []
        while rounds < args.rounds and (time.monotonic() - began < 60 * args.minutes or not rounds):
            if not phases:  # all of them, again and again
                phases = list(target.phases)
                rng.shuffle(phases)
            phase = phases.pop()
            try:
                target.round(phase)
            except Exception as error:
                fail(f"{name}: {phase}: {type(error).__name__}: {error}")
            rounds += 1
            growth.look(judged=rounds >= len(target.phases))
    with contextlib.suppress(AssertionError):  # then they are counted
        until(lambda: processes() <= before, SLACK)
    left = {"sockets": len(list(folder.rglob("*.sock"))), "buckets": buckets(), "processes": len(processes() - before)}
    for what, number in left.items():
        if number:
            fail(f"{name}: {number} {what} are left")
    for text in growth.failures():
        fail(f"{name}: {text}")
    seconds = round(time.monotonic() - began)
    shown = [f"{what} ({times} times)" if times > 1 else what for what, times in reversed(failures.items())]
    return {
        "target": name, "rounds": rounds, "seconds": seconds, "counts": dict(sorted(counts.items())), "left": left,
        "growth": growth.total(), "failures": shown[:SHOWN],
    }  # fmt: skip


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of: {', '.join(TARGETS)} (all)")
    parser.add_argument("--minutes", type=float, default=3, help="of each target (3)")
    parser.add_argument("--rounds", type=int, default=AT_MOST, help="of each target, at most")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.rounds = min(args.rounds, AT_MOST)
    if unknown := set(args.targets) - set(TARGETS):
        parser.error(f"TARGET: got {', '.join(sorted(unknown))}, expected of {', '.join(TARGETS)}")
    ctypes.CDLL(None).mallopt(*ONE_ARENA)
    expected = []
    for state in range(STATES):
        with Engine.from_pretrained(model_of(state), config=CONFIG) as engine:
            expected.append([bits(c) for c in engine.generate(PROMPTS, PARAMS)])
    kept = {name: getattr(limits, name) for name in ("ANSWER", "STEP", "CLOSE", "END")}, core_loop.GRACE_SECONDS
    folder, environ = tempfile.TemporaryDirectory(prefix="vx"), os.environ.get("XDG_RUNTIME_DIR")
    try:
        limits.ANSWER = limits.STEP = limits.CLOSE = limits.END = core_loop.GRACE_SECONDS = PATIENCE
        os.environ["XDG_RUNTIME_DIR"] = folder.name
        found = [attack(name, args, expected) for name in args.targets or TARGETS]
    finally:
        for name, value in kept[0].items():
            setattr(limits, name, value)
        core_loop.GRACE_SECONDS = kept[1]
        os.environ.pop("XDG_RUNTIME_DIR", None)
        if environ is not None:
            os.environ["XDG_RUNTIME_DIR"] = environ
        folder.cleanup()
    facts = {name: environment("cpu")[name] for name in ("cpu", "torch", "commit", "date")}
    sys.stdout.write(json.dumps({"room": "faults", "seed": args.seed, "targets": found, **facts}) + "\n")
    return int(any(one["failures"] for one in found))


if __name__ == "__main__":
    raise SystemExit(main())
