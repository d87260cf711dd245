"""The front of several replicas: who has which request, what becomes of those whose replica dies, and who hears of it.

One thread reads what the replicas say. All state is behind one lock, which is never held while anybody waits: what goes
out is put into a channel's outbox. A replica is gone once its channel ends; its requests are then begun again at
another one, from their seeds or, where somebody has got tokens of theirs already, from these tokens.

A replica may also stand still: its process is stopped, or its device does not come back. Nobody waits for one without a
limit. An aborted request ends with what is known of it here, once the replica has had a moment to say what it has; an
update goes on without a replica that does not answer; and until it has said all that it owes it gets no requests.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import wait as wait_for
from typing import Any

import vexact_ops as vx

from ..errors import EngineClosed, EngineForked, ReplicaDied, WeightsMissing
from ..outputs import Increment, Outgoing, Submission
from ..request import Completion, refused
from . import limits
from . import messages as m
from .jobs import NO_LOAD, Answer, Channel, Job, Replica, add_counts
from .router import Router, chain

log = logging.getLogger(__name__)

MOST_DEATHS = 3  # replicas that may die with a request before it is thought to be the reason


class Front:
    """
    start        index -> the channel of a new replica
    max_restarts how often a replica that died may be started again, all of them together
    timeout      seconds that a replica may take to make its engine

    Before `wait_until_ready` nothing is for callers but `close`.
    """

    def __init__(self, start: Callable[[int], Channel], count: int, max_restarts: int, timeout: float):
        self._pid, self._start_one, self._restarts, self._timeout = os.getpid(), start, max_restarts, timeout
        self._begin = time.monotonic()
        self._lock = threading.RLock()
        self.replicas = [Replica(index) for index in range(count)]
        self.router: Router | None = None
        self.weight_version = 0
        self.paused, self.asleep = False, False  # what a replica that is started again has to be told
        self._updating = False
        self._names: dict[str, Job] = {}
        self._waiting: dict[int, Job] = {}  # until a replica is there that takes them
        self._ending: dict[int, tuple[Replica, Job, float]] = {}  # by key: whose end is asked for, and due by then
        self._keys = iter(range(1 << 62))
        self._outgoing = Outgoing()
        self._closing = self._closed = False
        self._selector = selectors.DefaultSelector()
        self._wake_out, self._wake_in = socket.socketpair()
        self._wake_in.setblocking(False)
        self._selector.register(self._wake_in, selectors.EVENT_READ, None)
        self._changed = threading.Condition(self._lock)  # a replica has become ready, or has died
        self._reader = threading.Thread(target=self._read, name="vexact-replicas", daemon=True)
        try:
            with self._lock:
                for replica in self.replicas:
                    self._start(replica)
            self._reader.start()
        except BaseException:
            self.close()
            raise

    # The beginning

    def wait_until_ready(self) -> None:
        """Where that is not to be, all is closed."""
        try:
            self._wait_for_all()
        except BaseException:
            self.close()
            raise

    def _start(self, replica: Replica) -> None:
        replica.channel = self._start_one(replica.index)
        replica.ready, replica.fresh, replica.reason, replica.failure = False, False, "", None
        replica.load, replica.facts = NO_LOAD, {}
        replica.starts, replica.pid = replica.starts + 1, replica.channel.pid
        self._selector.register(replica.channel.fileno(), selectors.EVENT_READ, (replica, replica.channel))
        self._wake()

    def _wait_for_all(self) -> None:
        end = self._begin + self._timeout
        with self._changed:
            self.check_open()
            while not all(replica.ready for replica in self.replicas):
                gone = next((r for r in self.replicas if r.reason), None)
                if gone is not None:
                    raise self._start_error(gone)
                left = end - time.monotonic()
                if left <= 0:
                    late = [r.index for r in self.replicas if not r.ready]
                    raise TimeoutError(f"Replicas: replicas {late} are not ready after {self._timeout:.0f} s")
                self._changed.wait(left)
            first = self.replicas[0].facts["numerics"]
            for replica in self.replicas[1:]:
                differ = vx.numerics_difference(replica.facts["numerics"], first, forward=True)
                if differ:
                    found = "; ".join(f"{where}: {got!r} against {own!r}" for where, (got, own) in differ.items())
                    raise ValueError(f"Replicas: {replica} has other numerics than replica 0: {found}")
            # One that is started again has no facts meanwhile.
            self._page_size = self.replicas[0].facts["config"]["page_size"]
            self.router = Router([replica.facts["config"]["num_pages"] for replica in self.replicas])

    @staticmethod
    def _start_error(replica: Replica) -> Exception:
        if replica.failure is None:
            return ReplicaDied(f"Replicas: {replica} {replica.reason} before its engine was made")
        return m.exception(m.Failure(replica.failure.kind, f"{replica}: {replica.failure.text}"))

    # For callers

    @property
    def closed(self) -> bool:
        return self._closing

    def check_open(self) -> None:
        if os.getpid() != self._pid:
            raise EngineForked(f"Replicas: process {self._pid} made them, and this is a fork of that: make some here")
        if self._closing:
            raise EngineClosed("Replicas: they are closed")

    def submit(self, jobs: Iterable[Job]) -> None:
        jobs = list(jobs)
        for job in jobs:
            job.pages = chain(job.keys, self._page_size)
        with self._lock:
            self.check_open()
            for job in jobs:
                job.key = next(self._keys)
                if job.name in self._names:
                    error = ValueError(f"request {job.name!r}: another request of this id is not done yet")
                    self._complete(job, refused([], job.params, job.name, error, self.weight_version))
                    continue
                self._names[job.name] = job
                self._place(job)
            self._outgoing.flush()

    def whole(self, call: Submission) -> None:
        """All of its requests have been handed over."""
        with self._lock:
            call.one_done()
            self._outgoing.flush()

    def withdraw(self, jobs: Iterable[Job]) -> None:
        """Nobody waits for these any more."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            for job in jobs:
                if not job.done and job.key >= 0:
                    if job.replica is not None:
                        self._ask_for_end(job)
                    self._forget(job)
                    job.done = True

    def abort(self, name: str) -> None:
        with self._lock:
            job = self._names.get(name)
            if job is None:
                return
            if job.replica is not None and job.key not in self._ending:
                self._ask_for_end(job)
            if job.replica is None or job.replica.owes:
                self._complete_here(job)
            self._outgoing.flush()

    def call_in(self, asyncio_loop, call: Callable, item) -> None:
        """Behind the lock: `call(item)` in an asyncio loop, with what else there is for it."""
        self._outgoing.put(asyncio_loop, call, item)

    def ask(self, what: str, among: Sequence[Replica] | None = None, **arguments: Any) -> dict[int, Any]:
        """What each replica answers, or the exception that it raises; ReplicaDied for one that dies meanwhile,
        TimeoutError for one that stands still."""
        with self._lock:
            self.check_open()
            among = self.alive() if among is None else among
            answers = {r.index: self.send(r, what, lambda key: m.Do(key, what, arguments)) for r in among}
        return self.gather(answers, limits.of(what, arguments))

    def send(self, replica: Replica, what: str, make: Callable[[int], m.ToReplica]) -> Answer:
        """Something that is answered."""
        with self._lock:
            key = next(self._keys)
            answer = Answer(what, replica, None if replica.channel is None else key)
            if replica.channel is None:
                answer.set_exception(ReplicaDied(f"{replica} {replica.reason}"))
            else:
                replica.answers[key] = answer
                replica.channel.send(make(key))
            return answer

    def gather(self, answers: Mapping[int, Answer], seconds: float | None) -> dict[int, Any]:
        """What they are, or exceptions; TimeoutError for what does not come within so many seconds. Those that a
        replica has stood still for by now are among them."""
        ends = {i: None if seconds is None else self._patience(a, seconds) for i, a in answers.items()}
        return {index: self._answered(answer, ends[index], seconds) for index, answer in answers.items()}

    def _patience(self, answer: Answer, seconds: float) -> float:
        """Until when."""
        with self._lock:
            return time.monotonic() + seconds - answer.replica.still_for

    def _answered(self, answer: Answer, end: float | None, seconds: float | None) -> Any:
        wait_for([answer], None if end is None else max(0.0, end - time.monotonic()))
        with self._lock:
            if answer.done():
                return answer.exception() or answer.result()
            since = seconds or 0.0
            answer.replica.owes[answer.key] = time.monotonic() - since
            text = f"{answer.replica} stands still: no answer to {answer.what} within {since:g} s"
        log.warning("%s", text)
        return TimeoutError(text)

    def note_stats(self) -> None:
        """What all have counted, of those that stand still as last heard of."""
        with self._lock:
            self.check_open()
            for replica in self.alive():  # who has not answered yet is not asked again
                if replica.stats_answer is None or replica.stats_answer.done():
                    replica.stats_answer = self.send(replica, "stats", lambda key: m.Do(key, "stats", {}))
            asked = {r.index: r.stats_answer for r in self.replicas if r.stats_answer is not None}
        wait_for(asked.values(), limits.STATS)
        with self._lock:
            for index, answer in asked.items():
                if not answer.done():
                    answer.replica.owes.setdefault(answer.key, time.monotonic() - limits.STATS)
                elif answer.exception() is None and self.replicas[index].channel is not None:
                    self.replicas[index].stats = dict(answer.result())

    def alive(self) -> list[Replica]:
        return [replica for replica in self.replicas if replica.ready]

    def updating(self, begins: bool) -> None:
        with self._lock:
            self._updating = begins

    def exclude(self, excluded: Iterable[int]) -> None:
        """These have not the weights that the others have or get: their requests go to those."""
        with self._lock:
            excluded = [self.replicas[index] for index in excluded]
            for replica in excluded:
                replica.fresh = False
            for replica in excluded:
                if replica.channel is not None:
                    replica.channel.send(*(m.Abort(key) for key in replica.jobs))
                self._move(replica)
            self._outgoing.flush()

    def updated(self, version: int, done: Iterable[int]) -> None:
        """These have new weights."""
        with self._lock:
            self.weight_version = version
            for index in done:
                self.replicas[index].fresh = self.replicas[index].ready
            for replica in self.replicas:
                self.router.forget(replica.index)
            self._place_waiting()
            self._outgoing.flush()

    def forget_pages(self) -> None:
        with self._lock:
            for replica in self.replicas:
                self.router.forget(replica.index)

    def restart_missing(self) -> None:
        """What waited for the others to wake."""
        with self._lock:
            for replica in self.replicas:
                if replica.channel is None:
                    self._restart(replica)

    # Who computes what. Behind the lock, all of it

    def _place(self, job: Job) -> None:
        if job.earlier and all(partial.done for partial in job.earlier):  # all but that was said of it
            self._end(job)
            return
        usable = [replica.index for replica in self.replicas if replica.fresh]
        if not usable:
            starting = any(r.channel is not None and not r.ready for r in self.replicas)
            if starting and not self.weight_version:
                self._waiting[job.key] = job
            else:
                self._fail(job, self.no_replica())
            return
        usable = [index for index in usable if not self.replicas[index].owes]
        if not usable:  # all stand still: it waits here, where whoever has sent it can take it back
            self._waiting[job.key] = job
            return
        replica = self.replicas[self.router.choose(job.pages, usable)]
        self.router.begin(replica.index, job.pages, job.params.n)
        job.replica = replica
        replica.jobs[job.key] = job
        earlier = job.earlier if any(one.token_ids or one.done for one in job.earlier or ()) else None
        given = None if job.pictures is None else m.pictures(job.pictures.given())
        streams = job.listen is not None
        replica.channel.send(m.Add(job.key, job.prompt_ids, job.params, job.name, streams, earlier, given))

    def no_replica(self) -> Exception:
        if self.alive():
            return WeightsMissing("Replicas: those that are left were started again and have old weights: update them")
        what = "; ".join(f"replica {r.index} {r.reason}" for r in self.replicas)
        return ReplicaDied(f"Replicas: none is left: {what}")

    def _leave(self, job: Job) -> None:
        if job.replica is not None:
            job.replica.jobs.pop(job.key, None)
            self.router.end(job.replica.index, job.params.n)
            job.replica = None

    def _move(self, replica: Replica) -> None:
        """Its requests go to others, in the order they came."""
        for key in sorted(replica.jobs):
            job = replica.jobs[key]
            self._leave(job)
            aborted = self._ending.pop(job.key, None) is not None
            job.key = next(self._keys)  # what the old one still says is about nobody
            if aborted:
                self._complete_here(job)
            else:
                self._place(job)

    def _place_waiting(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for job in waiting.values():
            self._place(job)

    def _forget(self, job: Job) -> None:
        self._leave(job)
        self._waiting.pop(job.key, None)
        if self._names.get(job.name) is job:
            del self._names[job.name]

    def _complete_here(self, job: Job) -> None:
        """Aborted, with what is known of it here."""
        self._complete(job, job.aborted(self.weight_version))

    def _complete(self, job: Job, completions: Iterable[Completion]) -> None:
        """These, and with them the request."""
        for done in completions:
            job.finish(done)
            if job.listen is not None:
                known = len(job.earlier[done.index].token_ids)
                rest = done.token_ids[known:], done.logprobs[known:], done.raw_logprobs[known:]
                job.listen(Increment(job.name, done.index, *rest, "", done))
        self._end(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        job.error = error
        if job.listen is not None:
            job.listen(error)
        self._end(job)

    def _end(self, job: Job) -> None:
        self._forget(job)
        if not job.done:
            job.done = True
            job.call.one_done()

    # What replicas say

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError, OSError):
            self._wake_out.send(b"w")

    def _read(self) -> None:
        try:
            while not self._closed:
                with self._lock:
                    ends = [by for *_, by in self._ending.values()]
                left = max(0.0, min(ends) - time.monotonic()) if ends else None
                come = self._selector.select(left)
                for entry, _ in come:
                    if entry.data is None:
                        with contextlib.suppress(BlockingIOError):
                            self._wake_in.recv(4096)
                        continue
                    replica, channel = entry.data
                    frames = channel.read()
                    if frames is None:
                        self._selector.unregister(entry.fd)
                        reason = channel.ended()
                        with self._lock:
                            self._on_death(replica, reason)
                            self._outgoing.flush()
                        continue
                    said = [message for frame in frames for message in m.for_front(frame)]
                    with self._lock:
                        for message in said:
                            self._on_message(replica, message)
                        self._outgoing.flush()
                with self._lock:  # after what has come, for this process may have stood still
                    self._end_late()
                    self._outgoing.flush()
        except BaseException as error:
            log.critical("the thread that reads from replicas ends: a fault of its own", exc_info=True)
            with self._lock:
                self._closing = True
                for replica in self.replicas:
                    if replica.channel is not None:
                        replica.channel.kill()
                self._end_all(error)
                self._outgoing.flush()

    def _end_late(self) -> None:
        """Requests whose end was asked for, and of which a replica has not said in time what they have."""
        now = time.monotonic()
        for key, (replica, job, by) in [*self._ending.items()]:
            if by <= now:
                if not replica.owes:
                    log.warning("%s stands still: it has not ended request %r", replica, job.name)
                del self._ending[key]
                replica.owes[key] = now - limits.ABORT
                if not job.done:
                    self._complete_here(job)

    def _ask_for_end(self, job: Job) -> None:
        job.replica.channel.send(m.Abort(job.key))
        self._ending[job.key] = job.replica, job, time.monotonic() + limits.ABORT
        self._wake()

    def _no_longer_owes(self, replica: Replica, key: int) -> None:
        if replica.owes.pop(key, None) is not None and not replica.owes:
            log.warning("%s goes on", replica)
            self._place_waiting()

    def _on_message(self, replica: Replica, message: m.ToFront) -> None:
        if isinstance(message, m.Done | m.Answer):
            self._ending.pop(message.key, None)
            self._no_longer_owes(replica, message.key)
        if isinstance(message, m.Increments):
            self._on_increment(replica, message)
        elif isinstance(message, m.Done):
            job = replica.jobs.get(message.key)
            if job is None:
                return
            if message.failure is not None:
                if self._closing and message.failure.kind == EngineClosed.__name__:  # it was not even begun
                    self._complete_here(job)
                else:
                    self._fail(job, m.exception(message.failure))
                return
            if job.params.n == 1 and message.completions and message.completions[0].token_ids:
                keys = [*job.keys, *message.completions[0].token_ids]
                self.router.learn(replica.index, chain(keys, self._page_size))
            self._complete(job, message.completions or ())
        elif isinstance(message, m.Answer):
            answer = replica.answers.pop(message.key)
            if message.failure is not None:
                answer.set_exception(m.exception(message.failure))
            else:
                answer.set_result(message.value)
        elif isinstance(message, m.State):
            replica.load = message.load
        elif isinstance(message, m.Ready):
            replica.facts, replica.pid = message.facts, message.facts["pid"]
            self._on_ready(replica)
        elif isinstance(message, m.Failed):
            replica.failure = message.failure

    def _on_increment(self, replica: Replica, message: m.Increments) -> None:
        job, news = replica.jobs.get(message.key), message.increment
        if job is None:
            return
        partial, done = job.earlier[news.index], news.completion
        partial.token_ids += news.token_ids
        partial.logprobs += news.logprobs
        partial.raw_logprobs += news.raw_logprobs
        partial.weight_versions += message.weight_versions
        partial.sent_text += len(news.text)
        job.texts[news.index] += news.text
        if news.top_logprobs is not None:
            partial.top_logprobs = (partial.top_logprobs or []) + news.top_logprobs
        if news.prompt_logprobs is not None:  # with the first alone
            partial.prompt_logprobs, partial.prompt_top_logprobs = news.prompt_logprobs, news.prompt_top_logprobs
        if done is not None:
            job.finish(done)
            partial.done = True
        job.listen(news)

    def _on_ready(self, replica: Replica) -> None:
        """Its engine is made. One that was started again is what the others are before it gets requests."""

        def ready(*_) -> None:
            with self._lock:
                if replica.channel is None:
                    return
                replica.ready = True
                replica.fresh = not self.weight_version and not self._updating
                self._changed.notify_all()
                if replica.starts > 1:
                    log.warning("%s is there again%s", replica, "" if replica.fresh else ", with its first weights")
                    self._place_waiting()
                self._outgoing.flush()

        if self.paused and replica.starts > 1:
            pause = self.send(replica, "pause", lambda key: m.Do(key, "pause", {"mode": "keep"}))
            pause.add_done_callback(ready)
        else:
            ready()

    def _on_death(self, replica: Replica, reason: str) -> None:
        if replica.failure is not None:
            reason = f"{replica.failure.kind}: {replica.failure.text}"
        was_ready, name = replica.ready, str(replica)
        replica.ready = replica.fresh = False
        replica.reason = reason
        replica.past = add_counts(replica.past, replica.stats)
        replica.stats, replica.load, replica.stats_answer = {}, NO_LOAD, None
        replica.owes.clear()
        replica.channel.close()
        replica.channel = None
        answers, replica.answers = replica.answers, {}
        for answer in answers.values():
            answer.set_exception(ReplicaDied(f"{name} {reason}"))
        self._changed.notify_all()
        if self._closing:
            return
        jobs = len(replica.jobs)
        if was_ready:
            self.router.forget(replica.index)
            log.warning("%s %s; %d requests of its go to others", name, reason, jobs)
        if replica.starts > 1 or was_ready:
            self._restart(replica)
        for job in replica.jobs.values():
            job.deaths += 1
        hopeless = [job for job in replica.jobs.values() if job.deaths >= MOST_DEATHS]
        for job in hopeless:
            self._fail(job, ReplicaDied(f"request {job.name!r}: {job.deaths} replicas died with it; the last, {name}"))
        self._move(replica)
        self._ending = {key: due for key, due in self._ending.items() if due[0] is not replica}
        self._place_waiting()

    def _restart(self, replica: Replica) -> None:
        if self._restarts > 0 and not self.asleep and not self._closing:
            self._restarts -= 1
            reason = replica.reason
            self._start(replica)
            log.warning("%s is started in the place of the one that %s", replica, reason)

    # The end

    def close(self) -> None:
        """Abort what runs, end the processes. Again does nothing; in a fork too."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            if self._closing:
                return
            self._closing = True
            for replica in self.replicas:
                if replica.channel is not None:
                    replica.channel.send(m.Close())
            end = time.monotonic() + limits.CLOSE
            while self._reader.is_alive() and any(r.channel for r in self.replicas):
                late = time.monotonic() >= end
                for replica in self.replicas:  # one that makes its engine hears nothing before it has
                    if replica.channel is not None and (late or not replica.ready):
                        replica.channel.kill()
                self._changed.wait(1.0)
            self._closed = True
            for replica in self.replicas:  # whose end nobody read of
                if replica.channel is not None:
                    replica.channel.kill()
                    replica.channel.ended()
                    replica.channel.close()
                    replica.channel = None
            self._end_all(None)
            self._outgoing.flush()
        self._wake()
        if self._reader.is_alive() and threading.current_thread() is not self._reader:
            self._reader.join()
        self._selector.close()
        self._wake_in.close()
        self._wake_out.close()

    def _end_all(self, error: BaseException | None) -> None:
        for job in [*self._names.values()]:
            if error is None:
                self._complete_here(job)
            else:
                self._fail(job, EngineClosed(f"Replicas: the thread that reads from them has ended: {error!r}"))
