"""Which tokens are computed in the next step, and what becomes of the ones that were sampled.

A step has a budget of tokens. `schedule` spends it in this order:
  1. running decodes, one token each: nothing that arrives later can delay them (in a pipeline of stages their share of
     them, those that have waited longest: as many plans as stages are under way at once, and where one needs a token
     that another is still to draw, the first stage stands idle until the last is through with that);
  2. running prefills, the earliest arrival first, in chunks;
  3. waiting sequences, the earliest arrival first. One is admitted when all its pages fit, and if it does not fit yet
     nobody behind it is let past. Only one whose next page is being computed for another lets others past meanwhile.
Pages for a whole prompt are taken at admission, so only a decode can run out of them (those of layers with a window,
windows.py, are taken step by step: a prefill goes as far as they do). Then the latest arrival that
runs is preempted: it gives back its pages, keeps its tokens, waits in its old place and is computed again as one
prefill. The earliest can so always go on, and no sequence is allowed more tokens than the cache holds: there is no
deadlock. None of this changes bits, for rows do not depend on their neighbours or on where chunks begin.

`commit` takes the sampled tokens, ends what is to end, and tells the prefix cache which pages are now full.

Several plans may be in flight as long as they run in the order they were made; that is what an overlapped engine and
a pipeline need. A page given up while a plan in flight still touches it can only be written by a later plan; and so it
is with a slot, the row that a running sequence has in the runner's buffers.
"""

import heapq
import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from operator import attrgetter

from ..config import EngineConfig
from ..request import Request, Sequence, State
from .behind import Verifying
from .chains import DraftModel
from .drafts import Drafter
from .images import Encodings
from .pages import PagePool
from .plan import Chunk, Sampled, Stats, StepPlan
from .reserve import Reserve
from .snapshots import Snapshots
from .windows import WindowPages


class Scheduler(Verifying):
    """Continuous batching over one PagePool. Not thread-safe: its owner calls it from one thread at a time.

    config          `num_pages` must be set; `max_model_len` None means no limit but the cache's
    eos_token_ids   the model's end-of-sequence ids
    vocab_size      to refuse ids outside it; None: no check
    find_stop       sequence -> the stop string that its newest token made whole, or None; called after each token of a
                    sequence with stop strings. Without it they are refused
    longest_first   decodes of most keys come first, for attention that begins the next one where one is done: so all of
                    it ends at about one time. Else in the order of arrival
    chunk           tokens of a chunk of the model's states; None: it has none
    reach           keys before a query that layers with a window may read, where those have pages of their own,
                    config.num_window_pages
    draft_model     a model that drafts, where config.speculation says so
    graphs          rows -> seconds of a step that verifies drafts, as far as graphs of such have shown
    follows         whether a plan can be made while drafts are verified that decide where its chunks begin
    drafter         what drafts, there
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        eos_token_ids: Iterable[int] = (),
        vocab_size: int | None = None,
        find_stop: Callable[[Sequence], str | None] | None = None,
        longest_first: bool = False,
        chunk: int | None = None,
        draft_model: DraftModel | None = None,
        reach: int | None = None,
        graphs: Mapping[int, float] | None = None,
        follows: bool = False,
    ):
        if config.num_pages is None:
            raise ValueError("Scheduler: config.num_pages is None, expected the number of pages that the cache has")
        self.config = config
        reuse, self._snapshots = config.enable_prefix_cache, None
        if chunk is not None and (reuse := reuse and bool(config.num_snapshots)):
            self._snapshots = Snapshots(config.num_snapshots, config.page_size, chunk)
        self.windows = None
        if reach is not None and config.num_window_pages is not None:
            self.windows = WindowPages(config.num_window_pages, config.page_size, reach, config.num_pages)
        self.pool = PagePool(config.num_pages, config.page_size, reuse, self._snapshots, self.windows)
        self.eos_token_ids = frozenset(eos_token_ids)
        self.vocab_size = vocab_size
        self.find_stop = find_stop
        self.longest_first = longest_first
        drafts = draft_model, self.pool, config.max_num_batched_tokens, graphs
        self.drafter = None if config.speculation is None else Drafter(config.speculation, vocab_size, *drafts)
        self._chunk, self._follows = chunk, follows
        capacity = config.num_pages * config.page_size
        self._longest = min(capacity, config.max_model_len or capacity)  # tokens that any sequence may have places for
        self.stats = Stats()
        self.weight_version = 0
        self.requests: dict[Request, None] = {}  # the unfinished ones, in the order of arrival
        self.encodings = Encodings(config.image_tokens_per_step, config.image_cache_tokens)
        self.running: list[Sequence] = []  # both in the order of arrival
        self.waiting: deque[Sequence] = deque()
        self._in_flight: deque[StepPlan] = deque()
        self._arrivals = 0
        self._blocked = None  # the waiting sequence that did not fit, until somebody gives back pages
        self._head: tuple[Sequence, int] | None = None  # the first in line when the cache was reset, and its length
        self._reserve = Reserve(config.reserve, config.page_size)
        # Every running decode gets its token in every step, and a running prefill at least one.
        self._max_running = min(config.max_num_seqs, config.max_num_batched_tokens)
        self._stages = config.pipeline_parallel_size
        self._slots = list(range(self._max_running - 1, -1, -1))  # a stack of the free ones

    @property
    def has_unfinished(self) -> bool:
        return bool(self.requests)

    # Requests come and go

    def add(self, request: Request) -> None:
        """Queue all samples of a request. ValueError, and nothing is queued, if it can never run."""
        config, prompt, name = self.config, request.prompt_ids, f"request {request.id!r}"
        if any(sequence.arrival >= 0 for sequence in request.sequences):
            raise ValueError(f"{name}: the request was added before, expected a new one")
        if self.vocab_size is not None and (most := max(prompt)) >= self.vocab_size:
            raise ValueError(f"{name}: prompt_ids has {most}, expected ids below {self.vocab_size}")
        if config.max_model_len is not None and len(prompt) >= config.max_model_len:
            raise ValueError(
                f"{name}: prompt_ids has {len(prompt)} tokens, expected at most {config.max_model_len - 1}: "
                f"max_model_len is {config.max_model_len}, and one token is to be generated"
            )
        capacity = config.num_pages * config.page_size
        if len(prompt) > capacity:
            raise ValueError(
                f"{name}: prompt_ids has {len(prompt)} tokens, expected at most {capacity}: the KV cache has "
                f"{config.num_pages} pages of {config.page_size} tokens"
            )
        if request.params.stop and self.find_stop is None:
            raise ValueError(f"{name}: stop has strings, expected none: there is no tokenizer to find them with")
        params, unfinished = request.params, [sequence for sequence in request.sequences if not sequence.finished]
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.eos_token_ids)
        for sequence in unfinished:
            sequence.stop_ids = stop_ids
            if config.max_model_len is not None:
                sequence.limit = min(sequence.limit, config.max_model_len)
            if capacity + 1 < sequence.limit:  # the last token is never an input
                sequence.limit = capacity + 1
                sequence.limit_note = (
                    f"the KV cache is full: it has {config.num_pages} pages of {config.page_size} tokens"
                )
            self._check_drawn(sequence)
        self.requests[request] = None
        for sequence in unfinished:
            sequence.arrival = self._arrivals
            self._arrivals += 1
            self.waiting.append(sequence)
        if self.drafter is not None:
            self.drafter.begin(request)

    def _check_drawn(self, sequence):
        """Of one that goes on from what it got elsewhere."""
        drawn, room = sequence.generated, sequence.limit - sequence.num_prompt
        where = f"request {sequence.request.id!r}: earlier[{sequence.index}].token_ids has"
        if len(drawn) >= room:
            raise ValueError(f"{where} {len(drawn)} tokens, expected fewer than the {room} that there may be")
        if drawn and self.vocab_size is not None and not 0 <= min(drawn) <= max(drawn) < self.vocab_size:
            wrong = next(token for token in drawn if not 0 <= token < self.vocab_size)
            raise ValueError(f"{where} {wrong}, expected ids below {self.vocab_size}")

    def abort(self, request: Request) -> list[Sequence]:
        """End what is unfinished of a request, at any moment. Returns those sequences; none if it is not known here."""
        return self._end_request(request, "abort", None)

    def fail(self, request: Request, error: str) -> list[Sequence]:
        """The same for a request that went wrong: its finish reason is "error"."""
        return self._end_request(request, "error", error)

    def _end_request(self, request, reason, error):
        if request not in self.requests:
            return []
        ended = [sequence for sequence in request.sequences if not sequence.finished]
        self.waiting = deque(sequence for sequence in self.waiting if sequence.request is not request)
        for sequence in ended:
            if sequence.state is State.RUNNING:
                self._stop_running(sequence)
            self._note_end(sequence, reason, None, error)
        return ended

    def _finish(self, sequence, reason, stop_reason=None, error=None):
        """Of one that has just got a token: it runs, or it was preempted while that was sampled."""
        if sequence.state is State.RUNNING:
            self._stop_running(sequence)
        else:
            self.waiting.remove(sequence)
        if reason in ("stop", "length"):
            self._reserve.note(sequence)
        self._note_end(sequence, reason, stop_reason, error)

    def _note_end(self, sequence, reason, stop_reason, error):
        sequence.finish(reason, stop_reason, error)
        if self.drafter is not None:
            self.drafter.end(sequence, reason)
        self.stats.finished[reason] += 1
        if sequence.request.finished:
            del self.requests[sequence.request]

    def _stop_running(self, sequence):
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        sequence.slot = None
        if self.windows is not None:
            self.windows.release(sequence)
        self.pool.release(sequence.forget_pages())
        self._blocked = None

    def preempt(self, sequence: Sequence) -> None:
        """Take a running sequence's pages and let it wait in its old place. Its tokens stay, and so do its bits.

        `schedule` does this when pages run out; anyone may do it at any time, to make room or to prove the point.
        """
        if sequence.state is not State.RUNNING:
            raise ValueError(f"preempt: the sequence is {sequence.state.value}, expected a running one")
        self._stop_running(sequence)
        sequence.state = State.WAITING
        insort(self.waiting, sequence, key=lambda other: other.arrival)
        sequence.preemptions += 1
        self.stats.preemptions += 1

    def reset_cache(self, weight_version: int | None = None, keep_running: bool = False) -> None:
        """Forget all keys and values: the weights have changed (to this version), or the cache's memory is gone.

        What runs is preempted and goes on from its tokens, computed anew with what the weights are then. With
        `keep_running` it keeps the keys and values that it has; no other sequence will find them.
        """
        if not keep_running:
            for sequence in reversed(list(self.running)):
                self.preempt(sequence)
        self.pool.invalidate()
        self.encodings.forget()
        if weight_version is not None:
            self.weight_version = weight_version
        heads = [line[0] for line in (self.running, self.waiting) if line]
        first = min(heads, key=lambda sequence: sequence.arrival, default=None)
        self._head = None if first is None else (first, len(first.tokens))

    @property
    def has_progressed(self) -> bool:
        """Whether the first in line has got a token since the cache was last reset. Whoever waits for this between two
        resets starves no request."""
        if self._head is None or self._head[0].finished or len(self._head[0].tokens) > self._head[1]:
            self._head = None
        return self._head is None

    # A step

    def schedule(self, lookahead: bool = False) -> StepPlan:
        """The next step's plan. It is in flight until `commit` or `cancel`, unless it is empty.

        A sequence whose newest token is still being sampled is left out; with `lookahead` it is planned with a
        PLACEHOLDER for that token; where drafts are being verified either all are planned behind these (behind.py), or
        none. Empty if nothing can be computed before a commit, or at all.
        """
        waits = self.drafter is not None and self.drafter.waits
        if self._stages == 1:
            if self._in_flight and (self._in_flight[-1].drafted or waits):  # others would have their own step
                return self._behind(lookahead and not waits)
            return self._fill(lookahead, None)
        lookahead = lookahead and not waits
        plan = self._fill(lookahead, self._choose(lookahead))
        while not plan and (chosen := self._choose(lookahead, rested=False)):
            plan = self._fill(lookahead, chosen)
        return plan

    def _fill(self, lookahead, chosen):
        """A plan with no other decodes than those chosen; None: with all."""
        plan = StepPlan([], self.weight_version, self.encodings.begin())
        chunks, size = plan.chunks, self.pool.page_size
        budget = self.config.max_num_batched_tokens
        running, prefills, told = State.RUNNING, [], 0
        snapshots, windows = self._snapshots, self.windows

        step = self.stats.steps
        if windows is not None:  # what one lets go another may take: plans run in the order in which they are made
            for sequence in self.running:
                windows.leave(sequence)
        # This loop and that of `commit` are the host's time for each token of a decode.
        for sequence in self.running[:]:
            in_flight = sequence.in_flight
            start, end = sequence.num_planned, len(sequence.tokens) + in_flight
            if end >= sequence.limit or (in_flight and not lookahead) or sequence.state is not running:
                continue
            if end - start != 1:
                if end > start:
                    prefills.append(sequence)
                continue
            if chosen is not None and sequence not in chosen:
                continue
            grows = start >= len(sequence.pages) * size or (windows and start >= sequence.windowed.stop * size)
            if grows and not self._grow(sequence):
                continue
            sequence.num_planned = end
            sequence.last_step = step
            sequence.in_flight = in_flight + 1
            told += start < sequence.num_prompt
            chunk = Chunk(sequence, start, end, True, sequence.pages, sequence.epoch, sequence.slot)
            if snapshots is not None and not end % snapshots.sparse:
                chunk.save = snapshots.take()
            chunks.append(chunk)
        num_decodes = len(chunks)
        if self.longest_first:
            chunks.sort(key=attrgetter("end"), reverse=True)
        budget -= num_decodes
        # Behind so many chunks less than a state's chunk may wait, if the next step has room for a whole one.
        first = num_decodes if budget >= (self._chunk or 0) else math.inf
        self.stats.chunks += num_decodes
        self.stats.decode_tokens += num_decodes - told
        self.stats.prefill_tokens += told

        for sequence in prefills:
            if budget and sequence.state is running:
                ready = len(sequence.tokens) + sequence.in_flight - sequence.num_planned
                budget -= self._plan(plan, sequence, min(ready, budget), may_wait=len(chunks) > first)

        self._admit(plan, budget, first)

        if self.drafter is not None:
            if 0 < num_decodes == len(chunks):
                self._draft(plan, budget, lookahead)
            elif chunks:
                self.drafter.pass_over()
        if plan:
            if windows is not None:
                plan.windowed = windows.told()
            self._in_flight.append(plan)
            self.stats.steps += 1
            self.stats.mixed_steps += 0 < num_decodes < len(chunks)
        return plan

    def _stamp(self, plan, lookahead):
        """For whoever wants to know what a step took. Of drafts behind drafts that is known at once: the host does its
        part beside the step before, and that of the next one beside this."""
        ahead = bool(self._in_flight) and not (plan.follows and plan.drafted)
        plan.planned, plan.ahead = time.monotonic(), ahead if lookahead else None

    def _choose(self, lookahead, rested=True):
        """In a pipeline: the decodes that are to be in this plan, their share of all: of those that no token is drawn
        for in the last plans, which are with the other stages; so the same ones go together. With `rested` false others
        too, where there are none: where nothing else can be computed, or those were preempted for want of pages."""
        step, stages = self.stats.steps, self._stages
        ready = [
            sequence
            for sequence in self.running
            if (lookahead or not sequence.in_flight)
            and len(sequence.tokens) + sequence.in_flight - sequence.num_planned == 1
            and len(sequence.tokens) + sequence.in_flight < sequence.limit
        ]
        chosen = [sequence for sequence in ready if step - sequence.last_step >= stages]
        if not chosen and not rested:
            chosen = ready
        return set(heapq.nsmallest(-(-len(self.running) // stages), chosen, lambda sequence: sequence.last_step))

    def _plan(self, plan, sequence, length, restore=None, may_wait=False):
        start, save = sequence.num_planned, None
        if self.windows is not None:
            length = min(length, self.windows.room(sequence) - start)
        if length > 0:
            length = self.encodings.end_of(sequence.request, start, start + length) - start
        if length <= 0:
            return 0
        if self._chunk is not None:
            end, worth = self._cut(sequence, start, start + length, may_wait)
            length, save = end - start, self._snapshots.take() if worth else None
            if not length:
                return 0
        end = sequence.num_planned = start + length
        if self.windows is not None:
            self.windows.cover(sequence, end)
        needs_sample = end == len(sequence.tokens) + sequence.in_flight
        place = sequence.pages, sequence.epoch, sequence.slot
        plan.chunks.append(Chunk(sequence, start, end, needs_sample, *place, restore, save))
        if needs_sample:
            sequence.in_flight += 1
            sequence.last_step = self.stats.steps
        self.stats.chunks += 1
        if needs_sample and length == 1 and start >= sequence.num_prompt:
            self.stats.decode_tokens += 1
        else:
            self.stats.prefill_tokens += length
            self.stats.partial_prefills += not needs_sample
        return length

    def _cut(self, sequence, start, end, may_wait):
        """Where tokens start .. end - 1 of a sequence with a state are to end, and whether it is then worth a snapshot:
        behind whole chunks of the state, unless its sequence ends, for kernels are slower where one goes on within a
        chunk. Less than one is left for a later step, if it may: at `start`."""
        length, worth = len(sequence.tokens) + sequence.in_flight, False
        if self._snapshots is not None:
            end, worth = self._snapshots.cut(start, end, length)
        if end < length and end % self._chunk:
            whole = end // self._chunk * self._chunk
            if whole > start or may_wait:
                return max(whole, start), False
        return end, worth

    def _grow(self, sequence):
        """Give a decode the pages its next token needs. False if it had to be preempted itself."""
        pool, windows, start = self.pool, self.windows, sequence.num_planned
        more = start >= len(sequence.pages) * pool.page_size
        while (more and not pool.num_available) or (windows and windows.room(sequence) <= start):
            victim = self.running[-1]
            self.preempt(victim)
            if victim is sequence:
                return False
        if more:
            sequence.pages.append(pool.allocate())
        if windows:
            windows.cover(sequence, start + 1)
        return True

    @property
    def _may_admit(self):
        """Whether somebody waits who has not been found to be too large for what is free."""
        return self.waiting and len(self.running) < self._max_running and self.waiting[0] is not self._blocked

    def _admit(self, plan, budget, first):
        """Let the waiting in, in order, as far as the pages and the budget go."""
        pool, windows = self.pool, self.windows
        if not (budget and self._may_admit):
            return
        computing = {self._next_key(sequence) for sequence in self.running}
        passed, forecast = [], None
        while budget and self.waiting and len(self.running) < self._max_running and len(passed) < self._max_running:
            sequence = self.waiting[0]
            if sequence is self._blocked or sequence.in_flight:  # preempted in flight: its tokens are on their way
                break
            # The last token is always computed, even where its page is known: its logits are wanted.
            # So is all of a prompt whose log-probabilities are wanted.
            most = 0 if sequence.prompt_logprobs is not None else (len(sequence.tokens) - 1) // pool.page_size
            known, node = pool.begins(sequence, most)
            wanted = pool.key(node, sequence.keys, len(known)) if len(known) < most else None
            if wanted is not None and wanted in computing:
                # Its next page is being computed for another sequence just now. It will find it in a later step,
                # so that n samples of a prompt, or n requests with one beginning, compute that only once.
                passed.append(self.waiting.popleft())
                continue
            known, node = pool.behind(known, node)
            if self._chunk is not None and len(plan.chunks) > first:
                start = len(known) * pool.page_size
                if self._cut(sequence, start, min(len(sequence.tokens), start + budget), may_wait=True)[0] == start:
                    break  # the next step has room for more
            if windows is not None and windows.num_available < windows.needed(sequence):
                break
            if self.encodings.must_wait(sequence.request, len(known) * pool.page_size):
                break
            missing = pool.pages_for(len(sequence.tokens)) - len(known)
            room = pool.num_available - missing - pool.num_unheld(known)
            if forecast is None and self._reserve.share:
                forecast = self._reserve.forecast(self.running)
            # One page is left to each running sequence, lest the next step undo this admission, and some of what they
            # are likely to need until they end.
            scarce = room < len(self.running) or (windows and not windows.admits((*self.running, sequence)))
            if scarce or (self.running and forecast is not None and not self._reserve.lasts(forecast, sequence, room)):
                self._blocked = sequence
                break
            self.waiting.popleft()
            restore = self._snapshots.of(known[-1]) if self._snapshots is not None and known else None
            pool.hold(known)
            sequence.pages = known
            if windows is not None:
                windows.enter(sequence)
            sequence.pages = known + [pool.allocate() for _ in range(missing)]
            sequence.num_computed = sequence.num_planned = len(known) * pool.page_size
            sequence.num_known, sequence.node = len(known), node
            sequence.state, sequence.slot = State.RUNNING, self._slots.pop()
            if sequence.started_at is None:
                sequence.started_at = time.monotonic()
                sequence.cached_tokens = min(sequence.num_computed, sequence.num_prompt)
            insort(self.running, sequence, key=lambda other: other.arrival)
            self.stats.prefix_tokens += sequence.num_computed
            computing.add(self._next_key(sequence))
            budget -= self._plan(plan, sequence, min(len(sequence.tokens) - sequence.num_planned, budget), restore)
        self.waiting.extendleft(reversed(passed))

    def _next_key(self, sequence):
        """The prefix cache's key for the page that this running sequence fills next; None if it is not full soon."""
        return self.pool.key(sequence.node, sequence.keys, sequence.num_known)

    def commit(self, plan: StepPlan, sampled: Sampled) -> list[Sequence]:
        """Take what the oldest plan in flight drew. Returns the sequences that got a token, finished ones among them.

        A sequence that has ended meanwhile gets none. One that was preempted does: its token is as good as ever.
        """
        if not self._in_flight or plan is not self._in_flight[0]:
            raise ValueError("commit: plan is not the oldest in flight, expected plans in the order they were made")
        asked = plan.sampled_chunks
        wanted = len(asked) + plan.drafted
        for name in ("token_ids", "logprobs", "raw_logprobs", "top_logprobs"):
            column = getattr(sampled, name)
            if column is not None and len(column) != wanted:
                raise ValueError(f"commit: sampled.{name} has {len(column)} entries, expected {wanted}")
        if sampled.top_logprobs is None and any(c.sequence.top_logprobs is not None for c in asked):
            raise ValueError("commit: sampled.top_logprobs is None, expected it: a request in the plan asked for it")
        self._in_flight.popleft()
        if sampled.prompt_logprobs is not None:
            tops = sampled.prompt_top_logprobs or [None] * len(plan.chunks)
            for chunk, values, top in zip(plan.chunks, sampled.prompt_logprobs, tops, strict=True):
                sequence = chunk.sequence
                # Computed anew, by other weights it may be, they stay what they were when the first token was drawn.
                if values and not sequence.finished and (not sequence.logprobs or sequence.prompt_logprobs[-1] is None):
                    where, nothing = slice(chunk.start + 1, None), [None] * (sequence.num_prompt - chunk.start - 1)
                    sequence.prompt_logprobs[where] = values + nothing[len(values) :]
                    if top is not None:
                        sequence.prompt_top_logprobs[where] = top + nothing[len(values) :]

        grown, row, now = [], 0, time.monotonic()
        size, version, finished = self.pool.page_size, plan.weight_version, State.FINISHED
        token_ids, tops = sampled.token_ids, sampled.top_logprobs
        logprobs, raw_logprobs, accepted = sampled.logprobs, sampled.raw_logprobs, self.stats.accepted_tokens
        for chunk in plan.chunks:
            sequence, draft, end = chunk.sequence, chunk.draft, chunk.end
            alive, ended = sequence.state is not finished, None
            if chunk.needs_sample:
                sequence.in_flight -= 1
                if alive:
                    params, tokens = sequence.params, sequence.tokens
                    grown.append(sequence)
                    at = row
                    while True:
                        token = token_ids[at]
                        if token < 0 and draft:  # its logits are no numbers
                            break
                        tokens.append(token)
                        sequence.logprobs.append(logprobs[at])
                        sequence.raw_logprobs.append(raw_logprobs[at])
                        sequence.weight_versions.append(version)
                        sequence.token_times.append(now)
                        if sequence.top_logprobs is not None:
                            sequence.top_logprobs.append(tops[at])
                        may_stop = len(tokens) - sequence.num_prompt >= params.min_new_tokens
                        if token in sequence.stop_ids and may_stop:
                            ended = "stop", token
                        elif params.stop and (found := self._find_stop(sequence, may_stop)):
                            ended = found
                        elif len(tokens) == sequence.limit:
                            ended = "length", None, sequence.limit_note
                        if not draft or ended or at - row == len(draft) or token != draft[at - row]:
                            break
                        at += 1
                    if draft:
                        end = self._accepted(chunk, at - row)
                row += 1 + len(draft)
            if alive and sequence.epoch == chunk.epoch:
                sequence.num_computed = end
                page = self._know(sequence) if sequence.num_known < end // size else None
                if chunk.save is not None:
                    self._snapshots.put(page, chunk.save)
            elif chunk.save is not None:
                self._snapshots.put(None, chunk.save)
            if ended:
                self._finish(sequence, *ended)
        if self.drafter is not None:
            self.drafter.note_time(plan, now, len(plan.chunks) + self.stats.accepted_tokens - accepted)
        return grown

    def cancel(self, plan: StepPlan) -> None:
        """A plan in flight has failed, and all that were made after it go with it.

        Their sequences are preempted, for their last pages may hold anything, and can be scheduled again.
        """
        if plan not in self._in_flight:
            raise ValueError("cancel: plan is not in flight, expected one that is")
        last = None
        while last is not plan:
            last = self._in_flight.pop()
            for chunk in last.chunks:
                chunk.sequence.in_flight -= chunk.needs_sample
                if chunk.save is not None:
                    self._snapshots.put(None, chunk.save)
                if chunk.sequence.epoch == chunk.epoch and not chunk.sequence.finished:
                    self.preempt(chunk.sequence)

    def _know(self, sequence):
        """Tell the prefix cache of the pages that are full now. Returns the one that it knows for the last of them."""
        full, page = sequence.num_computed // self.pool.page_size, None
        while sequence.num_known < full and (key := self._next_key(sequence)):
            sequence.node = self.pool.register(sequence.pages[sequence.num_known], key)
            sequence.num_known += 1
            page = self.pool.known(key)
        return page

    def _find_stop(self, sequence, may_stop):
        """What a sample has before it may stop is read and passed over."""
        try:
            found = self.find_stop(sequence)
        except Exception as error:  # one text that cannot be decoded must not take the others with it
            return "error", None, f"stop: the text could not be decoded: {error!r}"
        return ("stop", found) if found is not None and may_stop else None
