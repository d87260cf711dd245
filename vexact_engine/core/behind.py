"""Steps that verify drafts, and plans behind them.

Where a step verifies drafts, the next one's chunks begin where it turns out: behind as many tokens as were right. The
device would stand idle while the host makes a plan of that. So the plan is made while the drafts are verified, for all
outcomes at once: who is in it and how many rows each has, pages for the furthest place that a chunk may begin at, and
of an answer that is followed a window, which the draft is cut from. It is launched at once, and the device finds out
where its chunks begin (runner/follow.py); the host is told with the tokens, a step later.

A sequence that has ended meanwhile is computed once too often, as one that ends in a plan ahead is. Whatever is more
than decodes, or what has drafts that need the tokens, waits for them as it would without this.
"""

from ..request import State
from .plan import MOST_VERIFIED, Chunk, StepPlan


class Verifying:
    """What a Scheduler does with drafts."""

    def _draft(self, plan, budget, lookahead):
        """Let decodes have more rows, where nothing else is computed: whatever waits comes first."""
        most, found = max(0, min(budget, MOST_VERIFIED - len(plan.chunks))), []
        try:
            found = self.drafter.plan(plan.chunks, most, self._room, self._lengthen, even=not self.waiting)
        except Exception as error:  # of a model that drafts: as if the step itself had failed
            plan.failure = error
        for chunk, tokens in found:
            if count := self._lengthen(chunk, len(tokens) - chunk.slack):
                sequence = chunk.sequence
                chunk.draft = tokens[:count]
                if chunk.slack:
                    chunk.window = tokens[: chunk.slack + count]
                sequence.num_planned = chunk.end = chunk.end + count
                if self.windows is not None:
                    self.windows.cover(sequence, chunk.end)
                sequence.drafted += count
                plan.drafted += count
        self.stats.drafted_tokens += plan.drafted
        self._stamp(plan, lookahead)
        self.drafter.note_planned(plan.planned)

    def _lengthen(self, chunk, count):
        """Take pages for so many tokens behind a decode, where that leaves one to each other sequence. Returns for how
        many there are some."""
        pages, size, behind = chunk.pages, self.pool.page_size, chunk.end + chunk.slack
        end = len(pages) * size
        while end < behind + count and self.pool.num_available > len(self.running):
            pages.append(self.pool.allocate())
            end += size
        if self.windows is not None:
            end = min(end, self.windows.room(chunk.sequence))
        return count if behind + count <= end else max(0, end - behind)

    def _room(self, chunk):
        """Tokens that may be drafted behind a decode: a drawn one follows the last. Rows that were appended to a state
        are forgotten unless they end a chunk of it."""
        if chunk.save is not None:
            return 0
        room = chunk.sequence.limit - chunk.end - 1
        if chunk.slack and room > (places := self._longest - chunk.end - chunk.slack):
            room = max(0, places)  # rows behind the last token are nobody's, and have places all the same
        return room if self._chunk is None else min(room, self._chunk - 1 - chunk.end % self._chunk)

    def _behind(self, lookahead):
        """A plan of those whose drafts are being verified, or an empty one."""
        plan, last = StepPlan([], self.weight_version), self._in_flight[-1]
        alone = self._snapshots is None and self.windows is None and self._chunk is None
        if not (lookahead and self._follows and alone and len(self._in_flight) == 1) or self._may_admit:
            return plan
        if not self.drafter.may_follow(last.chunks) or not (decodes := self._decodes_behind(last)):
            return plan
        plan.image_epoch = self.encodings.begin()
        plan.follows, plan.chunks = True, [chunk for _, chunk in decodes]
        for at, chunk in decodes:
            last.chunks[at].later, sequence = chunk, chunk.sequence
            sequence.num_planned, sequence.last_step = chunk.end, self.stats.steps
            sequence.in_flight += 1
        self._draft(plan, self.config.max_num_batched_tokens - len(decodes), lookahead)
        self.stats.chunks += len(decodes)
        self.stats.decode_tokens += len(decodes)
        self._in_flight.append(plan)
        self.stats.steps += 1
        return plan

    def _decodes_behind(self, last):
        """The chunk before each and the chunk: of all that run, but those that end with what they draw there. None
        where somebody has something else to do, or there is no page for somebody."""
        found, running, behind, size = [], 0, 0, self.pool.page_size
        for at, chunk in enumerate(last.chunks):
            sequence, draft, row, behind = chunk.sequence, chunk.draft, behind, behind + chunk.end - chunk.start
            if sequence.state is not State.RUNNING or sequence.epoch != chunk.epoch:
                continue
            running, slack = running + 1, len(draft)
            start = chunk.end - slack
            if start + 1 >= sequence.limit:
                continue
            one = Chunk(sequence, start, start + 1, True, chunk.pages, chunk.epoch, chunk.slot, slack=slack)
            one.behind = row, draft
            if start + 1 + slack > self._longest:
                return []
            if start + 1 + slack > len(chunk.pages) * size:
                self._lengthen(one, 0)
                if start + 1 + slack > len(chunk.pages) * size:
                    return []
            found.append((at, one))
        return found if running == len(self.running) else []

    def _accepted(self, chunk, count):
        """So many tokens of a draft were drawn, and the next is to be. Rows behind them are computed again, in the same
        places. Returns the end of those that are computed."""
        sequence, end = chunk.sequence, chunk.end - len(chunk.draft) + count
        self.drafter.note(chunk, count)
        sequence.accepted += count
        self.stats.accepted_tokens += count
        if chunk.later is not None:
            chunk.later.accept(count)
        if sequence.epoch == chunk.epoch:
            sequence.num_planned = end if chunk.later is None else chunk.later.end
        return end
