"""Which tokens a sequence is likely to draw next: a step verifies them, and so draws several at once.

A draw depends on its seed, its position and its own row, and a row of a chunk has the bits of a row alone. So drafts
are verified by comparing tokens; neither what is drafted nor how much of it changes a bit of a completion.

Drafts come from texts (`Speculation.sources`): answers that a request brings or that were given to its prompt before
(answers.py), and what samples of the prompt have drawn until now, the sequence itself among them. An answer is followed
at its own place, where its noise is the same. In all texts the longest end of what was drawn that stood before is
looked up (suffixes.py): what came after it there is drafted. Sequences that no text helps may ask a model (chains.py).

How much is drafted is decided for the sequences of a step together, by what steps took (pace.py) and by how often such
drafts were right.
"""

import bisect
import functools
import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, NamedTuple

from ..config import MAX_DRAFT_TOKENS, Speculation
from ..request import Request, Sequence
from .answers import Answers
from .chains import Chains, DraftModel, Reach
from .pace import Pace
from .pages import PagePool
from .suffixes import NOTHING, ROOT, Match, Suffixes

if TYPE_CHECKING:
    from .plan import Chunk, StepPlan

_INDEXED = 128  # tokens that are added to automata in one step, at most: a millisecond or two ...
_A_TOKEN = 1e-5  # ... at so many seconds each
_MOST_STATES = 1 << 20  # of all automata together, some 50 bytes each; a token that texts hold counts as one too
_OF_A_PROMPT = 64  # ... and as so many whatever else is kept of a prompt
_LOOKS = 16  # prompts that are looked at for each that begins: how large all are together
_MOST_OF_A_PROMPT = 1 << 17  # states: whoever comes then begins a new one
_MOST_PROMPT = 4096  # tokens of a prompt's end that are looked at
_MOST_ANSWERS = 16  # to a prompt with other seeds that are looked at, the newest ones
_SHORTEST = 2  # tokens that must have stood before
_LIKELY = {"answer": 0.8, "text": 0.5, "model": 0.6}  # how often drafts are right that nothing is known of yet
_FADE, _ALL_FADE = 0.9, 0.98  # how much of what one sequence knows, or all do, is left after a draft
_ALL_WEIGHT, _LIKELY_WEIGHT = 48, 2  # tokens that count as much as what all know, and as what is likely ...
_REST_WEIGHT = 8  # ... the first of these where a sequence is to rest
_LEFT = 0.5  # of the steps that the one furthest from its end has left, what others are taken to have at least
_ANYONE = 0.4  # how likely it is that in the end another one is the last than who is furthest from its end now
_ALL_SAME = 0.6  # of the tokens that rows give, what they are worth even if nothing ends sooner for that one
_LAUNCHED = 1.5  # times what the host takes until a plan is made is what it takes until that is launched, about
_LOOKED = 8, 128  # steps in which texts are passed over as worth too little: twice as many each time
_WEIGHT = 8  # steps, of which one is what a new one counts as
_PARTS = 128  # of 1, that chances are whole numbers of
_SELDOM = 0.1  # where drafts are likely to be right no more often, and the last was not, the sequence rests ...
_LONGEST_REST = 64  # ... for twice as many steps as before, up to so many
_SEQUENCES_A_STEP = 8  # of a step where nothing was worth it: so many times fewer steps are not looked at next
_MODEL = "model", 0  # the kind of its drafts
_TRUSTED = 8  # tokens that an answer is taken to have had right when nothing of it was compared yet


class _Cursor:
    """How far one text of an automaton has been added: `end` tokens, whose state is this."""

    __slots__ = ("end", "match", "number", "state", "tokens")

    def __init__(self, number: int, tokens: Tokens[int], end: int, state: int = ROOT, match: Match = NOTHING):
        self.number, self.tokens, self.end, self.state, self.match = number, tokens, end, state, match


class Texts:
    """What was answered to a prompt and is being answered, as one automaton. Each text has the prompt at its beginning.

    users   sequences that are not finished
    held    tokens of all texts, about
    """

    def __init__(self, prompt: Tokens[int], answers: Tokens[Tokens[int]] = ()):
        self.suffixes, self.users, self.held = Suffixes(), 0, _OF_A_PROMPT + 2 * len(prompt)
        self._texts: list[Tokens[int]] = [prompt]
        self._prompt = _Cursor(0, prompt, max(0, len(prompt) - _MOST_PROMPT))
        self._missing = [self.add([*prompt, *answer]) for answer in answers]

    def add(self, tokens: Tokens[int]) -> _Cursor:
        """A text that may grow."""
        self._texts.append(tokens)
        self.held += len(tokens)
        return _Cursor(len(self._texts) - 1, tokens, 0)

    def leave(self, cursor: _Cursor, drawn: int) -> None:
        """Its text grows no more, with so many tokens. What was not added of it is, as time allows."""
        self.held += drawn
        if cursor.end < len(cursor.tokens):
            self._missing.insert(0, cursor)

    def advance(self, cursor: _Cursor, most: int) -> int:
        """Add what is missing of a text, behind the prompt, and then of others that were there at the beginning, or do
        not grow any more. Returns how many of `most` tokens are left; where there are none, that may not be all."""
        if len(self.suffixes) > _MOST_STATES:
            return most
        most = self._advance(self._prompt, most)
        if most:
            most = self._advance(cursor, most)
        while most and self._missing:
            most = self._advance(self._missing[-1], most)
            if self._missing[-1].end == len(self._missing[-1].tokens):
                self._missing.pop()
        return most

    def _advance(self, cursor: _Cursor, most: int) -> int:
        if not cursor.end:  # and no text begins with anything else
            prompt = self._prompt
            cursor.end, cursor.state, cursor.match = prompt.end, prompt.state, prompt.match
        first, tokens, extend = cursor.end, cursor.tokens, self.suffixes.extend
        for end in range(first + 1, min(len(tokens), first + most) + 1):
            cursor.state, cursor.match = extend(cursor.state, tokens[end - 1], cursor.number, end)
            cursor.end = end
        return most - (cursor.end - first)

    def after(self, match: Match, count: int) -> Tokens[int]:
        """What came after it, the last time if that was not just now."""
        for number, end in ((match.text, match.end), (match.first_text, match.first_end)):
            text = self._texts[number]
            if end < len(text):
                return text[end : end + count]
        return ()


class _Answer:
    """What a sequence may draw, in this place. `run` of its tokens, up to the last one drawn, were right."""

    __slots__ = ("run", "tokens")

    def __init__(self, tokens: Tokens[int]):
        self.tokens, self.run = tuple(tokens), _TRUSTED

    def compare(self, drawn: tuple[int, ...], place: int) -> None:
        """These were drawn, from this place on."""
        own = self.tokens[place : place + len(drawn)]
        if own == drawn:
            self.run += len(drawn)
        else:
            for at, token in enumerate(drawn):
                self.run = self.run + 1 if at < len(own) and own[at] == token else 0


class Draft(NamedTuple):
    """
    chance   that the first token is right, and each that follows a right one
    left     tokens until its sequence ends, as far as that is known
    slack    of the tokens as many as may be passed over: what remains is the draft
    """

    tokens: tuple[int, ...]
    kind: tuple[str, int]
    chance: float
    left: int
    slack: int = 0

    @property
    def length(self) -> int:
        return len(self.tokens) - self.slack


class Follower:
    """What is known of one sequence's next tokens."""

    __slots__ = ("answers", "compared", "cursor", "hits", "reach", "rest", "resting", "texts", "tries")

    def __init__(self, texts: Texts | None, tokens: Tokens[int], answers: list[_Answer], compared: int):
        self.texts, self.answers, self.compared = texts, answers, compared
        self.cursor = None if texts is None else texts.add(tokens)
        self.hits = self.tries = 0.0
        self.rest = self.resting = 0
        self.reach = Reach()


@functools.cache
def _outlook(chance: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Of a chance in _PARTS: that the first row is right, that the first two are, ..; and the tokens of a step with no
    row, with one, .."""
    powers = (*itertools.accumulate(itertools.repeat(chance / _PARTS, MAX_DRAFT_TOKENS), operator.mul),)
    return powers, (*itertools.accumulate(powers, initial=1.0),)


class _Rows:
    """Rows of some drafts in the order in which they are chosen, `most` of them, the first of each draft first.

    ranks    of each draft's rows, ascending: those of a low rank are chosen first
    right    what the first, the first two, .. of these are worth in tokens
    chances  that each is right, with all before it in its draft; in any order
    """

    def __init__(self, drafts: Tokens[Draft], most: int, together: bool):
        """together   fewest steps until all are through, however much each has left: a step of who is left alone at the
        end takes hardly less time than one of all. So each row is for whoever has most steps left. Where that one has
        all that it can use, others' rows make nothing end sooner, by what is known now. But what is right is luck, and
        steps that are left scatter by about the root of their number: one of those ahead may be the last in the end,
        and is if it is given few rows for long. So a part of what rows are worth, _ANYONE, is the tokens that they
        give, whoever has them. Where drafts of the one furthest behind are few, or seldom right, it is most of these
        tokens. Else most tokens of a step"""
        outlooks = [(*_outlook(round(_PARTS * draft.chance)), draft.length) for draft in drafts]
        self.chances = [*itertools.chain.from_iterable(powers[:length] for powers, _, length in outlooks)]
        if not together:
            self.ranks = [[-chance for chance in powers[:n]] for powers, _, n in outlooks]
            self.order = sorted(itertools.chain.from_iterable(self.ranks))
            self.right = [*itertools.accumulate(-rank for rank in self.order[:most])]
            return
        count, total = len(drafts), len(self.chances)
        fewest = [draft.left / reach[n] for draft, (_, reach, n) in zip(drafts, outlooks)]  # steps, with all its rows
        least = max(fewest)
        lowest = _LEFT * least
        left = [d.left if own > lowest else d.left * lowest / own for d, own in zip(drafts, fewest)]
        worth = max(left) * count
        self.ranks = [[-own / tokens for tokens in reach[:n]] for own, (_, reach, n) in zip(left, outlooks)]
        self.order = sorted(itertools.chain.from_iterable(self.ranks))
        # The steps of whoever has most left then: of the next row, until a draft is at its end.
        steps = self.order[1 : min(most + 1, bisect.bisect(self.order, -least))]
        right = [-worth / own - count for own in steps]
        right += [worth / least - count] * (min(most, total) - len(right))
        likeliest = itertools.accumulate(sorted(self.chances, reverse=True)[:most])
        self.right = [
            (1 - _ANYONE) * max(own, _ALL_SAME * tokens) + _ANYONE * tokens for own, tokens in zip(right, likeliest)
        ]

    def first(self, count: int) -> list[int]:
        """How many of each draft are among so many. Of those of one rank there may be more."""
        last = self.order[count - 1]
        return [bisect.bisect_right(own, last) for own in self.ranks]


class Drafter:
    """Of one scheduler, in whose thread it is called.

    answers   what ended sequences have drawn; None unless "answers" is one of the sources
    model     what drafts where texts do not, in pages of the pool's numbers, `tokens` of them in a step
    graphs    rows -> seconds that a step which verifies so many takes on the device, where that is known
    """

    def __init__(
        self,
        speculation: Speculation,
        vocab_size: int | None = None,
        model: DraftModel | None = None,
        pool: PagePool | None = None,
        tokens: int = 0,
        graphs: Mapping[int, float] | None = None,
    ):
        self.speculation, self.pace, self._chains = speculation, Pace(graphs), None
        if model is not None and pool is not None:
            most, always = speculation.max_draft_tokens, speculation.always
            self._chains = Chains(model, pool, self.pace, most, always, tokens)
        self._sources = frozenset(speculation.sources)
        self.answers = Answers(speculation.answer_tokens, vocab_size) if "answers" in self._sources else None
        self._texts: OrderedDict[tuple[int, ...], Texts] = OrderedDict()  # by prompt, the one used longest ago first
        self._counts: dict[tuple[str, int], tuple[float, float]] = {}  # by kind how many were right lately, and in all
        self._rates: dict[tuple[str, int], float] = {}  # what follows from these
        self._full, self._begun = False, 0
        self._skipped = self._fruitless = 0  # steps that are not looked at, for in others nothing was worth it
        self._committed = self._busy = 0.0  # when the last step was; the same, unless requests have come since
        self._host = 0.0  # seconds from there until a plan is made
        self._texts_share: float | None = None  # tokens that texts are likely to give, beside all others of a step
        self._missed = False  # whether a plan is made that texts might have something for, were they looked at
        self._passed, self._looked = 0, _LOOKED[0]  # steps in which they were passed over, and in how many they may be

    # Sequences come and go

    def begin(self, request: Request) -> None:
        self._busy = 0.0  # the host may have had nothing to do until now
        prompt, given = request.prompt_ids, request.params.draft if "given" in self._sources else ()
        kept = {} if self.answers is None else self.answers.of(prompt)
        shared = None
        if "samples" in self._sources:
            shared = self._texts.get(key := tuple(prompt))
            if shared is None or len(shared.suffixes) > _MOST_OF_A_PROMPT:
                newest = [*kept.values()][: -_MOST_ANSWERS - 1 : -1]
                shared = self._texts[key] = Texts(prompt, [*given, *newest])
            self._texts.move_to_end(key)
        for sequence in request.sequences:
            if sequence.finished:
                continue
            answers = [given[sequence.index % len(given)]] if given else []
            answers += [kept[sequence.seed]] if sequence.seed in kept else []
            texts = shared
            if texts is None and "text" in self._sources:
                texts = Texts(prompt, answers)
            if texts is not None:
                texts.users += 1
            sequence.drafts = Follower(texts, sequence.tokens, [_Answer(a) for a in answers], sequence.num_prompt)
        self._trim()

    def end(self, sequence: Sequence, reason: str) -> None:
        follower, sequence.drafts = sequence.drafts, None
        if follower is not None and follower.texts is not None:
            follower.texts.users -= 1
            follower.texts.leave(follower.cursor, len(sequence.tokens) - sequence.num_prompt)
        if self.answers is not None and reason in ("stop", "length"):
            self.answers.put(sequence.request.prompt_ids, sequence.seed, sequence.generated)

    def _trim(self) -> None:
        """Of prompts that nobody asks any more, those of longest ago go: also where no step has come to index them."""
        self._begun += 1
        if _LOOKS * self._begun < len(self._texts):
            return
        self._begun = 0
        states = sum(len(texts.suffixes) for texts in self._texts.values())
        size = states + sum(texts.held for texts in self._texts.values())
        if size > _MOST_STATES // 2:
            for key in [key for key, texts in self._texts.items() if not texts.users]:
                gone = self._texts.pop(key)
                states, size = states - len(gone.suffixes), size - len(gone.suffixes) - gone.held
                if size <= _MOST_STATES // 4:
                    break
        self._full = states >= _MOST_STATES

    # A step

    @property
    def waits(self) -> bool:
        """Whether the next step's drafts need tokens that are still being drawn."""
        return self._chains is not None and bool(self._chains.held[0])

    def may_follow(self, chunks: Tokens["Chunk"]) -> bool:
        """Whether drafts behind those of these chunks are to be found before it is known how much of them is right. Of
        an answer they can, for it is followed at its place; what texts have behind the last token, and what a model
        makes of it, waits for that. So does an answer that is right less often than another text may be, if texts are
        worth the time in which the device waits for the host."""
        if self._chains is not None:
            return False
        self._missed = not all(map(self._is_followed, chunks))
        return not self._missed or not self._texts_pay(len(chunks))

    def _texts_pay(self, sequences: int) -> bool:
        step = self.pace.seconds(sequences, 0)
        if step and self._texts_share is not None and self._texts_share * step < _LAUNCHED * self._host:
            if self._passed < self._looked:
                self._passed += 1
                return False
            self._passed, self._looked = 0, min(2 * self._looked, _LOOKED[1])
        else:
            self._looked = _LOOKED[0]
        return True

    def note_planned(self, now: float) -> None:
        """A plan is made: the host has worked on it since the last commit."""
        if self._busy:
            took = now - self._busy
            self._host = took if not self._host else self._host + (min(took, 2 * self._host) - self._host) / _WEIGHT

    def _note_texts(self, sequences: int, planned: list[tuple]) -> None:
        """What texts are likely to give of a step's tokens."""
        given = {"text": 0.0, "answer": 0.0}
        for chunk, tokens, chance in planned:
            given[chunk.kind[0]] += _outlook(round(_PARTS * chance))[1][len(tokens)] - 1
        share = given["text"] / (sequences + given["answer"])
        before = share if self._texts_share is None else self._texts_share
        self._texts_share = before + (share - before) / _WEIGHT

    def _is_followed(self, chunk: "Chunk") -> bool:
        follower = chunk.sequence.drafts
        if follower is None or follower.texts is None or not chunk.draft:
            return True
        return chunk.kind[0] == "answer" and self._chance(follower, chunk.kind) >= _LIKELY["text"]

    def pass_over(self) -> None:
        """A step has more to do than decodes: nothing is drafted for it."""
        if self._chains is not None:
            self._chains.held = 0, 0

    def plan(
        self,
        chunks: Tokens["Chunk"],
        budget: int,
        room: Callable[["Chunk"], int],
        grow: Callable[["Chunk", int], int] = lambda _, count: count,
        even: bool = True,
    ) -> list[tuple["Chunk", tuple]]:
        """Tokens to verify behind the ends of decodes, of those that are worth it: at most so many in all, and of each
        as many as there is room for, with pages that `grow` sees to. They are to end at about one time if `even` says
        so; while others wait for their places, some had better end early."""
        planned = self._by_texts(chunks, budget, room, even)
        if self._chains is None or self._chains.skips(len(chunks)):
            return [(chunk, tokens) for chunk, tokens, _ in planned]
        taken = {id(chunk.sequence) for chunk, _, _ in planned}
        others = [
            (chunk, self._chance(follower, _MODEL))
            for chunk in chunks
            if (follower := chunk.sequence.drafts) is not None
            and not follower.resting
            and id(chunk.sequence) not in taken
        ]
        rows = sum(len(tokens) for _, tokens, _ in planned)
        right = sum(chance ** (j + 1) for _, tokens, chance in planned for j in range(len(tokens)))
        found = self._chains.plan(others, len(chunks), (rows, right), budget - rows, room, grow)
        for chunk, _ in found:
            chunk.kind = _MODEL
        return [(chunk, tokens) for chunk, tokens, _ in planned] + found

    def _by_texts(
        self, chunks: Tokens["Chunk"], budget: int, room: Callable[["Chunk"], int], even: bool
    ) -> list[tuple]:
        if self._skipped:
            self._skipped -= 1
            return []
        if not self.speculation.always and not self.pace.seconds(len(chunks), 0):
            return []  # nothing is worth it before it is known what single tokens take: soon
        planned = self._worth(self._found(chunks, room), len(chunks), budget, even) if budget else []
        if not any(chunk.slack for chunk in chunks):
            self._note_texts(len(chunks), planned)
        self._fruitless = 0 if planned else min(2 * self._fruitless + 1, len(chunks) // _SEQUENCES_A_STEP)
        self._skipped = self._fruitless
        return planned

    def _found(self, chunks: Tokens["Chunk"], room: Callable[["Chunk"], int]) -> list[tuple["Chunk", Draft]]:
        follows = any(chunk.slack for chunk in chunks)
        most, left = self.speculation.max_draft_tokens, 0 if self._full else _INDEXED
        if follows and not self._missed:
            left = 0
        elif follows and left:  # the host has as long as the device, half of which may go into this
            spare = (self.pace.seconds(len(chunks), 0) or 0.0) / 2 - _LAUNCHED * self._host
            left = max(_INDEXED // 16, min(left, int(spare / _A_TOKEN)))
        found = []
        for chunk in chunks:
            follower = chunk.sequence.drafts
            if follower is None or not (count := min(most, room(chunk))):
                continue
            if follower.resting:
                follower.resting -= 1
                continue
            draft, left = self._draft(chunk, follower, count, left)
            if draft is not None:
                found.append((chunk, draft))
        return found

    def _worth(self, found: list[tuple["Chunk", Draft]], sequences: int, budget: int, even: bool) -> list[tuple]:
        """As much of them as is worth it: tokens of each, with those that may be passed over, and how likely one is
        right."""
        if found and not self.speculation.always:
            allowed = {kind for kind in {d.kind[0] for _, d in found} if self.pace.allowed(sequences, kind)}
            found = [each for each in found if each[1].kind[0] in allowed]
        if not found:
            return []
        drafts = [draft for _, draft in found]
        counts = [draft.length for draft in drafts]
        if not self.speculation.always:
            rows = _Rows(drafts, budget, even)
            if not (budget := self.pace.worth(sequences, rows.chances, rows.right)):
                return []
            counts = rows.first(budget)
        planned = []
        for at in sorted(range(len(found)), key=lambda at: -drafts[at].left):
            if count := min(counts[at], budget):
                budget -= count
                chunk, draft = found[at]
                chunk.kind = draft.kind
                planned.append((chunk, draft.tokens[: draft.slack + count], draft.chance))
        return planned

    def _draft(self, chunk: "Chunk", follower: Follower, count: int, left: int) -> tuple[Draft | None, int]:
        """What may follow behind a chunk's end, some tokens before which may be drawn just now; where a draft is among
        these, behind any end that it may have."""
        sequence, tokens, texts = chunk.sequence, chunk.sequence.tokens, follower.texts
        behind, match, follows = chunk.end - len(tokens), NOTHING, ()
        if texts is not None and left:
            left = texts.advance(follower.cursor, left)
            if not chunk.slack and follower.cursor.end == len(tokens) and follower.cursor.match.length >= _SHORTEST:
                match = follower.cursor.match
                follows = texts.after(match, behind + count)[behind:]
        best, place, before = None, len(tokens) - sequence.num_prompt, follower.compared - sequence.num_prompt
        drawn = tuple(tokens[follower.compared :])
        for answer in follower.answers:
            if drawn:
                answer.compare(drawn, before)
            if place + behind < len(answer.tokens) and (best is None or answer.run > best.run):
                best = answer
        follower.compared, limit = len(tokens), sequence.limit - chunk.end
        kind = "text", min(match.length, 32).bit_length()
        if best is not None:
            other, at = ("answer", min(best.run, 32).bit_length()), place + behind
            if not follows or self._rate(other) >= self._rate(kind):
                follows, left_of_it = best.tokens[at : at + count + chunk.slack], len(best.tokens) - at
                count = min(count, left_of_it - (best.tokens[-1] in sequence.stop_ids))  # behind which nothing is drawn
                if not count:
                    return None, left
                follows = follows[: count + chunk.slack]
                if missing := count + chunk.slack - len(follows):  # behind an answer's end anything may follow
                    follows += (best.tokens[-1],) * missing
                return Draft(follows, other, self._chance(follower, other), min(limit, left_of_it), chunk.slack), left
        if not follows:
            return None, left
        return Draft(tuple(follows), kind, self._chance(follower, kind), limit, chunk.slack), left

    def _rate(self, kind: tuple[str, int]) -> float:
        """How often drafts of that kind were right lately."""
        found = self._rates.get(kind)
        if found is None:
            right, tried = self._counts.get(kind, (0.0, 0.0))
            found = self._rates[kind] = (right + _LIKELY_WEIGHT * _LIKELY[kind[0]]) / (tried + _LIKELY_WEIGHT)
        return found

    def _chance(self, follower: Follower, kind: tuple[str, int], weight: float = _ALL_WEIGHT) -> float:
        """Of a draft of that kind, by what is known of the sequence and of all others."""
        return min(0.99, (follower.hits + weight * self._rate(kind)) / (follower.tries + weight))

    def note(self, chunk: "Chunk", accepted: int) -> None:
        """So many tokens of its draft were right."""
        follower, compared = chunk.sequence.drafts, min(len(chunk.draft), accepted + 1)
        if chunk.kind == _MODEL:
            follower.reach.note(accepted)
        right, tried = self._counts.get(chunk.kind, (0.0, 0.0))
        self._counts[chunk.kind] = right * _ALL_FADE + accepted, tried * _ALL_FADE + compared
        self._rates.pop(chunk.kind, None)
        follower.hits, follower.tries = follower.hits * _FADE + accepted, follower.tries * _FADE + compared
        if accepted:
            follower.rest = 0
        elif self._chance(follower, chunk.kind, _REST_WEIGHT) < _SELDOM:
            follower.resting = follower.rest = min(_LONGEST_REST, 2 * follower.rest + 1)

    def note_time(self, plan: "StepPlan", now: float, tokens: int) -> None:
        """A step is committed, and gave so many tokens. One of decodes is measured: it began when it was planned, or
        with the end of the one before, unless the engine had nothing to do in between."""
        committed, self._committed, self._busy = self._committed, now, now
        if plan.planned is None:
            return
        asking = 0.0 if self._chains is None else self._chains.spent  # which `worth` does not count among steps
        own, between = now - plan.planned, plan.planned - committed - asking
        seconds = own + between if between < own else own
        self.pace.account(len(plan.chunks), plan.drafted, seconds + asking, tokens, _source(plan))
        self.pace.note(len(plan.chunks), plan.drafted, seconds, plan.ahead)


def _source(plan: "StepPlan") -> str | None:
    """Where most of what it verifies comes from; None of single tokens alone."""
    rows: dict[str, int] = {}
    for chunk in plan.chunks if plan.drafted else ():
        if chunk.draft:
            rows[chunk.kind[0]] = rows.get(chunk.kind[0], 0) + len(chunk.draft)
    return max(rows, key=rows.__getitem__, default=None)
