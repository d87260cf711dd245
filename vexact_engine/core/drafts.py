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

import itertools
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Tokens
from typing import TYPE_CHECKING, NamedTuple

from ..config import Speculation
from ..request import Request, Sequence
from .answers import Answers
from .chains import Chains, DraftModel, Reach
from .pace import Pace
from .pages import PagePool
from .suffixes import NOTHING, ROOT, Match, Suffixes

if TYPE_CHECKING:
    from .plan import Chunk, StepPlan

_INDEXED = 128  # tokens that are added to automata in one step, at most: a millisecond or two
_MOST_STATES = 1 << 20  # of all automata together, some 50 bytes each; a token that texts hold counts as one too
_OF_A_PROMPT = 64  # ... and as so many whatever else is kept of a prompt
_LOOKS = 16  # prompts that are looked at for each that begins: how large all are together
_MOST_OF_A_PROMPT = 1 << 17  # states: whoever comes then begins a new one
_MOST_PROMPT = 4096  # tokens of a prompt's end that are looked at
_MOST_ANSWERS = 16  # to a prompt with other seeds that are looked at, the newest ones
_SHORTEST = 2  # tokens that must have stood before
_LIKELY = {"answer": 0.8, "text": 0.5, "model": 0.6}  # how often drafts are right that nothing is known of yet
_FADE, _ALL_FADE = 0.9, 0.98  # how much of what one sequence knows, or all do, is left after a draft
_ALL_WEIGHT, _LIKELY_WEIGHT = 16, 2  # tokens that count as much as what all know, and as what is likely ...
_REST_WEIGHT = 8  # ... the first of these where a sequence is to rest
_EVEN = 0.3  # share of its chance that a draft may count more, or less, for what its sequence has left ...
_EVEN_TOKENS = 32  # ... which is what that is more, or less, than others have, divided by so many tokens
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

    def advance(self, cursor: _Cursor, most: int) -> int:
        """Add what is missing of a text, behind the prompt and the answers that were there at the beginning. Returns
        how many of `most` tokens are left; where there are none, that may not be all."""
        if len(self.suffixes) > _MOST_STATES:
            return most
        most = self._advance(self._prompt, most)
        while most and self._missing:
            most = self._advance(self._missing[-1], most)
            if self._missing[-1].end == len(self._missing[-1].tokens):
                self._missing.pop()
        return self._advance(cursor, most) if most else 0

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
        self.tokens, self.run = tokens, _TRUSTED


class Draft(NamedTuple):
    """
    chance   that the first token is right, and each that follows a right one
    slack    of the tokens as many as may be passed over: what remains is the draft
    """

    tokens: Tokens[int]
    kind: tuple[str, int]
    chance: float
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


def _left(chunk: "Chunk") -> int:
    """Tokens that its sequence may still get."""
    return chunk.sequence.limit - chunk.end


def _evened(found: list[tuple["Chunk", Draft]]) -> list[float]:
    """Chances of drafts, a little more for who has more left than others: a step of who is left alone at the end takes
    hardly less time than one of all."""
    left = [_left(chunk) for chunk, _ in found]
    mean = sum(left) / len(left)
    shares = (min(_EVEN, max(-_EVEN, (own - mean) / _EVEN_TOKENS)) for own in left)
    return [min(0.99, draft.chance * (1 + share)) for (_, draft), share in zip(found, shares)]


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
        self._rates: dict[tuple[str, int], list[float]] = {}  # by kind how many were right lately, and how many in all
        self._full, self._begun = False, 0
        self._skipped = self._fruitless = 0  # steps that are not looked at, for in others nothing was worth it
        self._committed = 0.0

    # Sequences come and go

    def begin(self, request: Request) -> None:
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
            follower.texts.held += len(sequence.tokens) - sequence.num_prompt
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
        """Whether drafts behind those of these chunks can be found before it is known how much of them is right. Of an
        answer they can, for it is followed at its place; what texts have behind the last token, and what a model makes
        of it, waits for that. So does an answer that is right less often than another text may be."""
        return self._chains is None and all(map(self._is_followed, chunks))

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
        self._fruitless = 0 if planned else min(2 * self._fruitless + 1, len(chunks) // _SEQUENCES_A_STEP)
        self._skipped = self._fruitless
        return planned

    def _found(self, chunks: Tokens["Chunk"], room: Callable[["Chunk"], int]) -> list[tuple["Chunk", Draft]]:
        most, left = self.speculation.max_draft_tokens, 0 if self._full else _INDEXED
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
        """As much of them as makes tokens per second more: tokens of each, with those that may be passed over, and how
        likely one is right."""
        if not found:
            return []
        counts = [draft.length for _, draft in found]
        if not self.speculation.always:
            own = _evened(found) if even else [draft.chance for _, draft in found]
            each = [[chance] * draft.length for (_, draft), chance in zip(found, own)]
            each = [list(itertools.accumulate(row, operator.mul)) for row in each]
            chances = sorted(itertools.chain.from_iterable(each), reverse=True)[:budget]
            chosen = self.pace.worth(sequences, chances)
            if not chosen:
                return []
            least = chances[chosen - 1]
            budget, counts = chosen, [sum(chance >= least for chance in row) for row in each]
        planned = []
        for (chunk, draft), count in sorted(zip(found, counts), key=lambda each: -_left(each[0][0])):
            if count := min(count, budget):
                budget -= count
                chunk.kind = draft.kind
                planned.append((chunk, tuple(draft.tokens[: draft.slack + count]), draft.chance))
        return planned

    def _draft(self, chunk: "Chunk", follower: Follower, count: int, left: int) -> tuple[Draft | None, int]:
        """What may follow behind a chunk's end, some tokens before which may be drawn just now; where a draft is among
        these, behind any end that it may have."""
        sequence, tokens, texts = chunk.sequence, chunk.sequence.tokens, follower.texts
        behind, match, follows = chunk.end - len(tokens), NOTHING, ()
        if texts is not None and left and not chunk.slack:
            left = texts.advance(follower.cursor, left)
            if follower.cursor.end == len(tokens) and follower.cursor.match.length >= _SHORTEST:
                match = follower.cursor.match
                follows = texts.after(match, behind + count)[behind:]
        best, place = None, len(tokens) - sequence.num_prompt
        for answer in follower.answers:
            for at in range(follower.compared - sequence.num_prompt, place):
                right = at < len(answer.tokens) and answer.tokens[at] == tokens[at + sequence.num_prompt]
                answer.run = answer.run + 1 if right else 0
            if place + behind < len(answer.tokens) and (best is None or answer.run > best.run):
                best = answer
        follower.compared = len(tokens)
        kind = "text", min(match.length, 32).bit_length()
        if best is not None:
            other = "answer", min(best.run, 32).bit_length()
            if not follows or self._rate(other) >= self._rate(kind):
                kind, follows = other, best.tokens[place + behind : place + behind + count]
                if chunk.slack:  # behind an answer's end anything may follow
                    more = best.tokens[place + behind + len(follows) :][: chunk.slack]
                    follows = [*follows, *more, *[best.tokens[-1]] * (chunk.slack - len(more))]
        return (Draft(follows, kind, self._chance(follower, kind), chunk.slack) if follows else None), left

    def _rate(self, kind: tuple[str, int]) -> float:
        """How often drafts of that kind were right lately."""
        right, tried = self._rates.get(kind, (0.0, 0.0))
        return (right + _LIKELY_WEIGHT * _LIKELY[kind[0]]) / (tried + _LIKELY_WEIGHT)

    def _chance(self, follower: Follower, kind: tuple[str, int], weight: float = _ALL_WEIGHT) -> float:
        """Of a draft of that kind, by what is known of the sequence and of all others."""
        return min(0.99, (follower.hits + weight * self._rate(kind)) / (follower.tries + weight))

    def note(self, chunk: "Chunk", accepted: int) -> None:
        """So many tokens of its draft were right."""
        follower, compared = chunk.sequence.drafts, min(len(chunk.draft), accepted + 1)
        if chunk.kind == _MODEL:
            follower.reach.note(accepted)
        rate = self._rates.setdefault(chunk.kind, [0.0, 0.0])
        rate[:] = rate[0] * _ALL_FADE + accepted, rate[1] * _ALL_FADE + compared
        follower.hits, follower.tries = follower.hits * _FADE + accepted, follower.tries * _FADE + compared
        if accepted:
            follower.rest = 0
        elif self._chance(follower, chunk.kind, _REST_WEIGHT) < _SELDOM:
            follower.resting = follower.rest = min(_LONGEST_REST, 2 * follower.rest + 1)

    def note_time(self, plan: "StepPlan", now: float, tokens: int) -> None:
        """A step is committed, and gave so many tokens. One of decodes is measured: it began when it was planned, or
        with the end of the one before, unless the engine had nothing to do in between."""
        committed, self._committed = self._committed, now
        if plan.planned is None:
            return
        asking = 0.0 if self._chains is None else self._chains.spent  # which `worth` does not count among steps
        own, between = now - plan.planned, plan.planned - committed - asking
        seconds = own + between if between < own else own
        self.pace.account(len(plan.chunks), plan.drafted, seconds + asking, tokens)
        self.pace.note(len(plan.chunks), plan.drafted, seconds, plan.ahead)
