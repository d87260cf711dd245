"""Requests that are not done, and who waits for them. Used by the engine's thread alone."""

from ..errors import WeightsMissing
from ..outputs import Ticket
from ..request import Request, Sequence, State
from .plan import Sampled, StepPlan
from .scheduler import Scheduler


class Tickets:
    """Between the fronts' tickets and the scheduler.

    scheduler   set once it is made
    running     of requests that the scheduler has
    listened    those of them whose tokens somebody takes one by one
    named       the same as running, and those held, by name
    held        handed over during a pause that lets the others end
    """

    scheduler: Scheduler

    def __init__(self) -> None:
        self.running: dict[Request, Ticket] = {}
        self.listened: set[Request] = set()
        self.named: dict[str, Ticket] = {}
        self.held: list[Ticket] = []

    def take(self, ticket: Ticket, hold: bool, missing: str | None) -> None:
        """missing: why there are no weights for it."""
        request = ticket.request
        if ticket.done:  # aborted before
            return
        if request.id in self.named:
            self._reject(ticket, f"request {request.id!r}: another request of this id is not done yet")
        elif hold:
            self.named[request.id] = ticket
            self.held.append(ticket)
        elif missing:
            ticket.fail(WeightsMissing(f"Engine: {missing}"))
        else:
            try:
                self.scheduler.add(request)
            except ValueError as error:
                self._reject(ticket, str(error))
            else:
                self.running[request] = self.named[request.id] = ticket
                if ticket.listen is not None:
                    self.listened.add(request)

    def release(self) -> list[Ticket]:
        """Those held, which are to be taken again."""
        held, self.held = self.held, []
        for ticket in held:
            self.named.pop(ticket.request.id, None)
        return held

    def abort(self, ticket: Ticket) -> None:
        """Also of one that was not taken yet."""
        if ticket.done:
            return
        if ticket in self.held:
            self.held.remove(ticket)
            del self.named[ticket.request.id]
        if self.running.get(ticket.request) is not ticket:
            self._reject(ticket, None, "abort")
        else:
            for sequence in self.scheduler.abort(ticket.request):
                self._deliver(sequence)

    def commit(self, plan: StepPlan, sampled: Sampled) -> None:
        """What a step has drawn: to the scheduler, and what somebody waits for to them."""
        later = self._fail_nonfinite(plan, sampled) if -1 in sampled.token_ids else ()
        finished, listened = State.FINISHED, self.listened
        grown = self.scheduler.commit(plan, sampled)
        for sequence in later:
            self._fail_sequence(sequence)
        for sequence in grown:
            if sequence.state is finished or sequence.request in listened:
                self._deliver(sequence)

    def fail_all(self, error: BaseException) -> None:
        """Of those running."""
        for ticket in list(self.running.values()):
            self.scheduler.fail(ticket.request, str(error))
            ticket.fail(error)
            self._forget(ticket)

    def find_stop(self, sequence: Sequence) -> str | None:
        return self.running[sequence.request].find_stop(sequence)

    def _reject(self, ticket: Ticket, error: str | None, reason: str = "error") -> None:
        ticket.request.reject(error, reason)
        try:
            for sequence in ticket.request.sequences:
                ticket.deliver(sequence, self.scheduler.weight_version)
        except Exception as failure:
            ticket.fail(failure)

    def _fail_nonfinite(self, plan: StepPlan, sampled: Sampled) -> list[Sequence]:
        """Those whose next token is none end before this step's are taken. Returns those that get some of them first:
        a draft was right so far."""
        row, later = 0, []
        for chunk in plan.sampled_chunks:
            drawn, row = sampled.token_ids[row : row + chunk.draws], row + chunk.draws
            if drawn[0] == -1:
                self._fail_sequence(chunk.sequence)
            elif -1 in drawn and tuple(drawn[: drawn.index(-1)]) == chunk.draft[: drawn.index(-1)]:
                later.append(chunk.sequence)
        return later

    def _fail_sequence(self, sequence: Sequence) -> None:
        if sequence.finished:
            return
        where = f"after {len(sequence.tokens)} tokens"
        message = f"the model's logits {where} are not finite numbers (NaN or infinite weights or activations?)"
        for each in self.scheduler.fail(sequence.request, message):
            self._deliver(each)

    def _deliver(self, sequence: Sequence) -> None:
        ticket = self.running.get(sequence.request)
        if ticket is None:
            return
        try:
            ticket.deliver(sequence, self.scheduler.weight_version)
        except Exception as error:  # of a tokenizer, say: this request's trouble alone
            self.scheduler.fail(sequence.request, repr(error))
            ticket.fail(error)
        if ticket.done:
            self._forget(ticket)

    def _forget(self, ticket: Ticket) -> None:
        del self.running[ticket.request], self.named[ticket.request.id]
        self.listened.discard(ticket.request)
