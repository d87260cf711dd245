"""The engine's thread. It owns the scheduler, the weights, the pages and the torch state that they are computed in.

Fronts run in the callers' threads. They hand requests over (`submit`), take them back (`abort`), or have something
done between two steps (`call`); what they wait for comes to them through tickets. Everything is known by the object: a
request's name is looked up in one place, `abort_named`. So nobody needs a lock but for the inbox, nobody's torch state
takes part in another's step, and an interrupt, which Python gives to the main thread, can only meet a front that waits.

One turn of the loop: do what the inbox holds; schedule and launch until `Worker.depth` plans are in flight; wait for
the oldest, commit and deliver it. With a depth of 2 or more all of the host's work for a step (text, stop strings,
delivery, the next plan) is done while the device computes another; at most depth - 1 tokens of a sequence are computed
too many, and thrown away. While the thread waits, requests come and go; whatever touches weights or pages (`call`) is
done when nothing is in flight. What goes to one asyncio loop in a turn goes in one piece.
"""

import atexit
import contextlib
import itertools
import logging
import math
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple, Protocol

from .. import request
from ..errors import EngineClosed, EngineForked, StepFailed, WeightsTorn
from ..outputs import Outgoing, Ticket
from .plan import StepPlan
from .scheduler import Scheduler
from .tickets import Tickets
from .waits import Failed, Pending
from .waits import is_ready as _is_ready
from .waits import size as _size

log = logging.getLogger(__name__)

PAUSES = ("abort", "wait", "keep")
_SHORTEST_PAUSE, _LONGEST_PAUSE = 50e-6, 5e-3  # seconds between two looks at a plan in flight
_LONGEST_WAIT = 0.05  # seconds that a wait is taken to need at most
GRACE_SECONDS = 15.0  # for a step to end after close(), in other processes
_JOIN_SECONDS = 10  # for a thread whose engine is collected; close() and the end of the process wait for the step


def check_pause(method: str, mode: str) -> None:
    if mode not in PAUSES:
        raise ValueError(f"{method}: mode: got {mode!r}, expected one of {', '.join(PAUSES)}")


class Worker(Protocol):
    """What computes. Made, used and closed in the loop's thread.

    depth      how many plans may be in flight; with more than one a plan holds tokens that another is still to draw
    meanwhile  to be called a few times a second while it waits for other processes: requests are aborted
    """

    depth: int
    meanwhile: Callable[[], None]

    def changed(self) -> bool:
        """Before each plan is made: whether somebody else has changed the weights, or what was computed is gone."""

    def renew(self) -> bool:
        """Then, while nothing is in flight: make them the weights; False where they are what they were, and only what
        was computed is gone. Raises where they cannot be used."""

    def launch(self, plan: StepPlan) -> Pending:
        """Begin to compute a plan, behind those launched before."""

    def interrupt(self) -> None:
        """From another thread, at the end: what it waits for in other processes does not come any more."""

    def close(self) -> None: ...


class _Command(NamedTuple):
    """Something to do in the thread.

    refuse    told why, where it is not done any more
    alone     whether nothing may be in flight meanwhile
    tickets   of requests that it hands over
    """

    run: Callable[[], object]
    refuse: Callable[[BaseException], object]
    alone: bool
    tickets: Sequence[Ticket] = ()


class _Abort(NamedTuple):
    """Requests that are to end, also those still in the inbox: what a wait is limited by does not wait itself.

    name    or one that is known by its name
    after   how many commands had been posted before; one of the same name may come later
    """

    tickets: Sequence[Ticket]
    name: str | None
    after: int


class Loop:
    """One thread, from the constructor to `close`.

    make        called in the thread: the scheduler (given a function for its `find_stop`) and the worker. What it
                raises, the constructor raises
    scheduler, worker   theirs; to be read from other threads, and called in `call`
    updating    set while weights are written piece by piece: no step runs
    asleep      set while memory that a step needs has been given back: no step runs
    missing     why there are no weights: no step runs, and requests that come while nothing is asleep end with
                WeightsMissing
    torn        why the weights are in no defined state: requests end with WeightsTorn
    """

    def __init__(self, make: Callable[[Callable[[request.Sequence], str | None]], tuple[Scheduler, Worker]]):
        self._pid = os.getpid()
        self._changed = threading.Condition()
        self._inbox: deque[_Command] = deque()
        self._aborts: deque[_Abort] = deque()
        self._posted = self._taken = 0  # commands, into the inbox and out of it
        self._deferred: list[tuple[Callable[[], bool], _Command]] = []
        self._pending: deque[tuple[StepPlan, Pending]] = deque()  # in flight
        self._alone = threading.RLock()  # held by whoever does what wants nothing in flight
        self._caller: int | None = None  # the thread that is in `call_here`
        self._typical: dict[int, float] = {}  # a plan's size -> seconds that the wait for such a one took lately
        self._closing = False
        self._fault: BaseException | None = None  # of our own: the thread has ended with it
        self._tickets = Tickets()
        self._paused: str | None = None  # as pause() and resume() have it
        self._pause_between: str | None = None  # in between(): goes before that
        self._outgoing = Outgoing()
        self._launched: list[Callable[[], None]] = []  # of those who wait for a launch
        self.updating = self.asleep = False
        self.missing: str | None = None
        self.torn: str | None = None
        self.close_error: BaseException | None = None
        made: Future = Future()
        self._thread = threading.Thread(target=self._main, args=(make, made), name="vexact-engine", daemon=True)
        self._thread.start()
        _LOOPS.add(self)
        try:
            made.result()
        except BaseException:  # Ctrl-C too: then the thread ends once it is made
            self.close(0)
            raise

    # For fronts, in any thread

    @property
    def closed(self) -> bool:
        return self._closing

    def check_open(self) -> None:
        if os.getpid() != self._pid:
            raise EngineForked(f"Engine: process {self._pid} made it, and this is a fork of that: make one here")
        if self._closing:
            raise EngineClosed("Engine: it is closed") from self._fault

    def submit(
        self,
        tickets: Sequence[Ticket],
        ready: Callable[[], None] = lambda: None,
        launched: Callable[[], None] | None = None,
    ) -> None:
        """Hand requests over. EngineClosed: none is taken.

        ready      called in the thread before they are taken in
        launched   called there once a plan that they may be in is launched, or where none is to be; after their end
                   where that launch fails
        """

        def take() -> None:
            if launched is not None:
                self._launched.append(launched)
            ready()
            for ticket in tickets:
                self._take(ticket)

        def refuse(error: BaseException) -> None:
            for ticket in tickets:
                ticket.fail(error)
            if launched is not None:
                launched()

        self._post(_Command(take, refuse, alone=False, tickets=tickets))

    def abort(self, tickets: Sequence[Ticket]) -> None:
        """Nobody waits for these any more. Does nothing once closed."""
        left = [ticket for ticket in tickets if not ticket.done]
        if left:
            self._post_abort(left)

    def abort_named(self, name: str) -> None:
        self._post_abort([], name)

    def _post_abort(self, tickets: Sequence[Ticket], name: str | None = None) -> None:
        if os.getpid() != self._pid:
            return
        with self._changed:
            if not self._closing:
                self._aborts.append(_Abort(tickets, name, self._posted))
                self._changed.notify()

    def call(self, function: Callable[[], object], when: Callable[[], bool] | None = None):
        """What `function` returns or raises, called in the thread while nothing is in flight; once `when()` holds
        there."""
        if threading.current_thread() is self._thread:
            return function()
        answer: Future = Future()

        def run() -> None:
            try:
                answer.set_result(function())
            except BaseException as error:
                answer.set_exception(error)

        command = _Command(run, answer.set_exception, alone=True)
        if when is None:
            self._post(command)
        else:
            self._post(command._replace(run=lambda: self._deferred.append((when, command)), alone=False))
        return answer.result()

    def call_here(self, function: Callable[[], object], when: Callable[[], bool] | None = None):
        """`call` in the caller's thread, while no other `call` is done. Without `when` steps go on beside it; with it
        they must not, and it is done there while weights are written, for no step runs then."""
        self.check_open()  # in a fork nobody lets go of the lock
        with self._alone:
            if when is None or self.updating:
                self.check_open()
                self._caller = threading.get_ident()
                try:
                    return function()
                finally:
                    self._caller = None
        return self.call(function, when)

    def pause(self, mode: str) -> None:
        """Returns once nothing is computed any more; see Engine.pause."""
        self._stop("_paused", mode)

    def resume(self) -> None:
        self._go_on("_paused")

    def between(self, mode: str, function: Callable[[], object]):
        """What `function` returns, called in the thread during a pause of its own: who pauses or resumes meanwhile
        decides what is paused afterwards. One at a time."""
        try:
            self._stop("_pause_between", mode)
            return self.call(function)
        finally:
            self._go_on("_pause_between")

    def _stop(self, which: str, mode: str) -> None:
        def stop() -> None:
            setattr(self, which, mode)
            if mode == "abort":
                for ticket in list(self._tickets.running.values()):
                    self._tickets.abort(ticket)

        self.call(stop)

        def stopped() -> bool:
            if "wait" not in (mode, self._stopped_by):
                return True
            over = getattr(self, which) is None or not self.scheduler.has_unfinished
            return over or self.asleep or self.missing is not None

        self.call(lambda: None, when=stopped)

    def _go_on(self, which: str) -> None:
        def go_on() -> None:
            setattr(self, which, None)
            if self._stopped_by == "wait":
                return
            for ticket in self._tickets.release():
                self._take(ticket)

        self.call(go_on)

    @property
    def _stopped_by(self) -> str | None:
        return self._pause_between or self._paused

    @property
    def paused(self) -> bool:
        return self._paused is not None

    @property
    def state(self) -> str:
        if self.asleep:
            return "asleep"
        return "paused" if self.paused else "running"

    def may_change_weights(self) -> bool:
        """In the thread: whether a change of weights now starves no request."""
        stopped = self.paused or self.asleep or self.missing is not None or self.torn is not None
        return stopped or self.scheduler.has_progressed

    def close(self, timeout: float | None = None) -> None:
        """Abort what runs, end the thread and with it what it owns. Again, or in a fork, it does nothing. In a signal's
        handler that came in the midst of `beside`, the thread ends once that is through: it waits for it."""
        if os.getpid() != self._pid:
            return
        with self._changed:
            self._closing = True
            self._changed.notify()
        if threading.current_thread() is self._thread or threading.get_ident() == self._caller:
            return
        self._thread.join(GRACE_SECONDS if timeout is None else timeout)
        worker = getattr(self, "worker", None)
        if self._thread.is_alive() and worker is not None:
            worker.interrupt()
            self._thread.join(timeout)

    def _post(self, command: _Command) -> None:
        self.check_open()
        with self._changed:
            if self._closing:
                self.check_open()
            self._posted += 1
            self._inbox.append(command)
            self._changed.notify()

    # In the thread

    def _main(self, make: Callable, made: Future) -> None:
        try:
            self.scheduler, self.worker = make(self._tickets.find_stop)
            self._tickets.scheduler = self.scheduler
        except BaseException as error:
            self._closing = True
            made.set_exception(error)
            return
        del make
        self.worker.meanwhile = self._meanwhile
        made.set_result(None)
        del made
        try:
            while self._do_inbox():
                self._advance()
                self._outgoing.flush()
        except BaseException as error:
            log.critical("the engine's thread ends: a fault of its own", exc_info=True)
            self._fault = error
        self._end()

    def _do_inbox(self) -> bool:
        """Wait until there is something to do, do what the inbox holds. False at the end."""
        with self._changed:
            while not (
                self._inbox or self._aborts or self._closing or self._pending or self._launched or self._may_schedule()
            ):
                self._changed.wait()
        for _ in range(len(self._inbox)):  # what comes meanwhile is for the next turn, lest no step is ever run
            if self._inbox and not self._closing:
                self._do(self._next())
        self._do_aborts()
        self._do_deferred()
        self._outgoing.flush()
        return not self._closing

    def _next(self) -> _Command:
        self._do_aborts()
        self._taken += 1
        return self._inbox.popleft()

    def _do_aborts(self) -> None:
        for _ in range(len(self._aborts)):
            abort = self._aborts.popleft()
            known = self._tickets.named
            tickets = abort.tickets if abort.name is None else [known.get(abort.name) or self._posted_as(abort)]
            for ticket in filter(None, tickets):
                self._tickets.abort(ticket)

    def _posted_as(self, abort: _Abort) -> Ticket | None:
        """The request of that name that had been handed over by then, and is not taken yet."""
        with self._changed:
            before = list(itertools.islice(self._inbox, max(0, abort.after - self._taken)))
        tickets = (ticket for command in before for ticket in command.tickets)
        return next((ticket for ticket in tickets if ticket.request.id == abort.name and not ticket.done), None)

    def _meanwhile(self) -> None:
        """Whatever the worker waits for."""
        if threading.current_thread() is self._thread:
            self._do_aborts()
            self._outgoing.flush()

    def _may_schedule(self) -> bool:
        stopped = self.updating or self.asleep or self.missing or self._stopped_by in ("abort", "keep")
        return self.scheduler.has_unfinished and not stopped

    def _do(self, command: _Command) -> None:
        if not command.alone:
            command.run()
            return
        try:
            self._finish_pending()
        except BaseException:  # the thread ends, and refuses what is in the inbox
            with self._changed:
                self._inbox.appendleft(command)
            raise
        with self._alone:
            command.run()

    def _do_deferred(self) -> None:
        waiting, self._deferred = deque(self._deferred), []
        try:
            while waiting:
                when, command = waiting[0]
                now = when()
                waiting.popleft()
                if now:
                    self._do(command)
                else:
                    self._deferred.append((when, command))
        finally:
            self._deferred += waiting

    def _advance(self) -> None:
        """Launch what can be, and take in the oldest plan in flight."""
        if self._may_schedule():
            if self.torn:
                self._tickets.fail_all(WeightsTorn(f"Engine: {self.torn}"))
            elif self._notice_weights():
                self._launch()
        if self._pending:
            self._take_in()
        self._tell_launched()
        self._do_deferred()

    def _notice_weights(self) -> bool:
        """Whether there are weights to compute with. Others than before are new ones."""
        try:
            if self.worker.changed():
                self._finish_pending()
                others = self.worker.renew()
                self.scheduler.reset_cache(self.scheduler.weight_version + others)
        except Exception as error:
            self._tickets.fail_all(error)
            return False
        return True

    def _launch(self) -> None:
        depth = self.worker.depth
        while len(self._pending) < depth:
            plan = self.scheduler.schedule(lookahead=depth > 1)
            if not plan:
                if not self._pending and self.scheduler.has_unfinished:
                    raise RuntimeError("nothing can be scheduled, yet requests are not done")
                return
            try:
                pending = self.worker.launch(plan)
            except Exception as error:
                self._pending.append((plan, Failed(error)))
                return
            self._pending.append((plan, pending))
            self._tell_launched()

    def _tell_launched(self) -> None:
        while self._launched:
            self._launched.pop()()

    def _finish_pending(self) -> None:
        while self._pending:
            self._take_in()

    def _take_in(self) -> None:
        """Wait for the oldest plan in flight, commit and deliver it. A failure of the computation itself ends every
        request, for nobody can say whose fault it is; the engine can be used again."""
        plan, pending = self._pending[0]
        behind = _size(self._pending[1][0].num_tokens) if len(self._pending) > 1 else None
        self._await(pending, _size(plan.num_tokens), behind)
        self._pending.popleft()
        try:
            sampled = pending.wait()
        except Exception as error:
            self._abandon()
            self.scheduler.cancel(plan)
            failure = error
            if not isinstance(error, StepFailed):
                failure = StepFailed(f"a step failed: {type(error).__name__}: {error}")
                failure.__cause__ = error
            self._tickets.fail_all(failure)
            return
        self._tickets.commit(plan, sampled)

    def _await(self, pending: Pending, size: int, behind: int | None = None) -> None:
        """Until it is ready, let requests come and go. The thread sleeps for most of the time that such a wait took
        lately for plans of this size, and looks a few times more, or more often where no other plan is behind this one,
        or one of a size, `behind`, that takes less: the device has nothing else to do until the next one is launched.
        Where a plan is ready at once, the sleep before may have been too long, so that the device was through with
        both: then it is none, and grows again."""
        if _is_ready(pending):
            self._typical[size] = 0.0
            return
        begin, typical = time.perf_counter(), self._typical.get(size, 0.0)
        pause, taken, shorter = 0.75 * typical, 0.0, self._typical.get(behind) or math.inf
        while not _is_ready(pending):
            self._do_aborts()
            with self._changed:
                if self._closing:
                    return
                if not self._inbox or self._inbox[0].alone:  # that is done once nothing is in flight
                    self._changed.wait(pause)
            while self._inbox and not self._inbox[0].alone:
                self._next().run()
            self._outgoing.flush()
            taken = time.perf_counter() - begin
            long = max(typical, taken)
            late = long / 128  # somebody waits, and so does a device
            if len(self._pending) > 1:
                late = max(late, min(long, shorter) / 16)
            pause = min(max(_SHORTEST_PAUSE, late), _LONGEST_PAUSE)
        self._typical[size] = min(taken, typical + (min(taken, _LONGEST_WAIT) - typical) / 4)

    def _abandon(self) -> None:
        """Wait for the plans in flight; what they draw is nobody's."""
        for _, pending in self._pending:
            with contextlib.suppress(Exception):
                pending.wait()
        self._pending.clear()

    def _take(self, ticket: Ticket) -> None:
        missing = None if self.asleep else self.missing
        self._tickets.take(ticket, hold=self._stopped_by == "wait", missing=missing)

    def call_in(self, asyncio_loop, call: Callable, item) -> None:
        """In the thread: `call(item)` in an asyncio loop, once this round of the loop is over."""
        self._outgoing.put(asyncio_loop, call, item)

    def _end(self) -> None:
        with self._changed:
            self._closing = True
            commands, self._inbox = self._inbox, deque()
        self._abandon()
        self._tell_launched()
        error = self._fault or EngineClosed("Engine: it is closed")
        for command in [*commands, *(command for _, command in self._deferred)]:
            command.refuse(error)
        for ticket in [*self._tickets.running.values(), *self._tickets.held]:
            if self._fault is not None:
                ticket.fail(StepFailed(f"the engine's thread has ended: {self._fault!r}"))
            else:
                self._tickets.abort(ticket)
        self._deferred.clear()
        self._outgoing.flush()
        try:
            with self._alone:
                self.worker.close()
        except Exception as failure:
            self.close_error = failure
        self._tickets.running.clear()
        self._tickets.listened.clear()
        self.worker = None


_LOOPS: "weakref.WeakSet[Loop]" = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A daemon thread that still computes when the interpreter ends would take the process with it (SIGABRT)."""
    for loop in list(_LOOPS):
        loop.close()


def drop(loop: Loop) -> None:
    """For weakref.finalize: nobody has the engine any more. Wherever the collector calls this, it must not hang."""
    loop.close(_JOIN_SECONDS)
