"""How long steps take, by how many sequences and rows they have, and what drafts are worth then.

A step of B sequences gives each a token. With n drafted rows more it takes longer and gives as many more as are
accepted. Drafts are verified where tokens per second are likely to be more.

Steps are measured as they run. What none has taken yet follows from others: a row more takes what it took there, or
what it took when graphs were made; and a step with drafts takes some time however few, where the host waits for it.
Of how many rows nothing is known, twice as many are tried each time.

What is likely may be wrong. So what steps with drafts gave is compared with what single tokens would have taken: drafts
may lose a share of the time of all steps, and what they have gained before, and no more (`allowed`), each source of
them for itself, so that an epoch's answers need not pay for what texts have lost before there were any; and now and
then steps of single tokens are taken anew, for where all have drafts nobody would know that others were faster.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence

LEAST_GAIN = 0.05  # of tokens per second, for times are not that exact
AGAIN = 16, 128  # steps of as many sequences after which a choice against drafts is tried anew: twice as many each time
_DEAREST = 2.0  # ... if it is likely to take no more than so many times that of single tokens
# A step that took longer, or less, than known counts as one of so many; less without drafts, which may be seldom.
_SLOWER, _FASTER, _FASTEST = 8, 3, 2
_MOST = 1.5  # times what is known: something else has taken the rest
_KEPT = 0.95  # of what is known of rows, after each step
_LOST, _AT_ONCE = 0.005, 1.0  # of the time of all steps, and of how many steps of single tokens: what drafts may lose
_DEAR = 4.0  # times a step of single tokens, at most, is what a step with drafts is taken to have lost
_UNSURE = 1.5  # a gain of less: that single tokens take what is known is looked at again ...
_LOOKED = 16, 256  # ... after so many steps with drafts, four times as many each time; of more gain, after the most


def bucket(count: int) -> int:
    """Counts that are taken for one: each up to 8, then to a quarter of a power of two, upwards."""
    low = max(0, (count - 1).bit_length() - 3) if count else 0
    return -(-count >> low) << low


_BUCKETS = sorted({bucket(count) for count in range(1, 1 << 13)})  # more rows than a step verifies


class Pace:
    """Seconds of steps that held single tokens and drafts alone.

    graphs   rows -> seconds that a step of so many takes on the device, as far as it is known from the start
    """

    def __init__(self, graphs: Mapping[int, float] | None = None):
        self._seconds: dict[tuple[int, int], float] = {}  # (sequences, drafted rows), as buckets
        self._met: set[tuple[int, int]] = set()  # the first of a kind may have kernels to compile: it is not counted
        self._early: set[tuple[int, int]] = set()  # of which no more is known than what the first of some took
        self._device, self._sizes = _by_rows(graphs or {}), sorted(graphs or {})
        self._more = _Line()  # what steps with drafts took beside those of single tokens, by their rows
        self._declined: dict[int, tuple[int, int]] = {}  # how often it was, and when it is not
        # Seconds that drafts of a source may lose yet, whatever the sequences, and what they have gained, which they
        # may lose too
        self._lost: dict[str, float] = {}
        self._gained: dict[tuple[str, int], float] = {}
        self._unseen: dict[int, tuple[int, int]] = {}  # steps with drafts since one without, and how many there may be
        self._behind: str | None = None  # where drafts of the step before came from

    def account(self, sequences: int, drafted: int, seconds: float, tokens: int, source: str | None = "text") -> None:
        """A step with all that belongs to it took so long, and gave so many tokens. Before it is noted. source: where
        drafts, or most of them, came from; of a step without any it is not asked for."""
        kind = bucket(sequences)
        plain = self._plain(kind)
        behind, self._behind = self._behind, source if drafted else None
        if plain is None or (drafted and (kind, bucket(drafted)) not in self._met):
            return
        seconds = min(seconds, _MOST * (self.seconds(sequences, drafted) or plain))
        most = _AT_ONCE * plain
        for known, lost in self._lost.items():
            self._lost[known] = min(most, lost + _LOST * min(seconds, _DEAR * plain))
        if not drafted:
            if behind is None:
                return
            source = behind
        gave = plain * tokens / sequences
        gain = gave - (1 + LEAST_GAIN) * min(seconds, _DEAR * max(plain, gave))
        own = self._gained.get((source, kind), 0.0) + (gain if drafted else min(gain, 0.0))
        self._lost[source] = self._lost.get(source, most) + min(own, 0.0)
        self._gained[source, kind] = min(max(own, 0.0), most)

    def allowed(self, sequences: int, source: str = "text") -> bool:
        """Whether drafts of a source have not lost more than they may, for so many sequences."""
        return self._lost.get(source, 1.0) > 0 or self._gained.get((source, bucket(sequences)), 0.0) > 0

    def note(self, sequences: int, drafted: int, seconds: float, ahead: bool | None = None) -> None:
        """ahead: whether the host had prepared the step while another was computed; None: it never does. It can where
        there are no drafts, and where there are some it can with none but the first: what such a one took is too
        little, and what single tokens took that come behind drafts is too much."""
        kind, most = bucket(sequences), bucket(drafted)
        if not drafted and ahead is False:
            return
        if drafted:
            count, limit = self._unseen.get(kind, (0, _LOOKED[0]))
            self._unseen[kind] = count + 1, limit
        elif kind in self._unseen:
            count, limit = self._unseen[kind]
            self._unseen[kind] = 0, min(4 * limit, _LOOKED[1]) if count >= limit else limit
        if (kind, most) not in self._met:
            self._met.add((kind, most))
            return
        known = self._seconds.get((kind, most))
        if drafted and ahead:
            if known is not None:
                return
            self._early.add((kind, most))
        elif (kind, most) in self._early:
            self._early.remove((kind, most))
            known = None
        if known is not None:
            seconds = min(seconds, _MOST * known)
        if drafted and not ahead and (plain := self._plain(kind)) is not None:
            self._more.add(drafted, seconds - plain - self._on_device(sequences, sequences + drafted))
        seconds += self._between(sequences + drafted, sequences + most)  # as if the bucket were full
        if known is not None:
            seconds = known + (seconds - known) / (_SLOWER if seconds > known else _FASTER if drafted else _FASTEST)
        self._seconds[kind, most] = seconds

    def seconds(self, sequences: int, drafted: int) -> float | None:
        """What such a step is likely to take; None where none of single tokens was measured of about as many."""
        kind, most = bucket(sequences), bucket(drafted)
        plain = self._plain(kind)
        if plain is None or not drafted:
            return plain
        known = self._seconds.get((kind, most))
        return max(plain, plain + self._takes_more(sequences, drafted) if known is None else known)

    def _filled(self, rows: int) -> int:
        """Rows of the graph that so many are computed in: those that would be padding cost nothing."""
        at = bisect.bisect_left(self._sizes, rows)
        return self._sizes[at] if at < len(self._sizes) else rows

    def _plain(self, kind: int) -> float | None:
        found = self._seconds.get((kind, 0))
        if found is None:
            # more sequences, however many, where graphs have shown what rows take
            most = len(self._device) - 1
            near = [
                known
                for known, drafted in self._seconds
                if not drafted and (kind <= 2 * known <= 4 * kind or kind < known <= most)
            ]
            if near:
                other = min(near, key=lambda known: abs(known - kind))
                taken = self._seconds[other, 0]  # fewer sequences take at most as many times less, more of them no less
                found = max(taken * min(1.0, kind / other), taken + self._between(other, kind))
        return found

    def _between(self, rows: int, others: int) -> float:
        """What a step of so many rows is likely to take more than one of others do."""
        return self._on_device(rows, others) + self._more.slope * (others - rows)

    def _takes_more(self, sequences: int, drafted: int) -> float:
        return self._on_device(sequences, sequences + drafted) + self._more.begin + self._more.slope * drafted

    def _on_device(self, rows: int, others: int) -> float:
        """The same, as far as it is known from the start."""
        last = len(self._device) - 1
        return self._device[min(others, last)] - self._device[min(rows, last)]

    def furthest(self, sequences: int) -> int:
        """Drafted rows that may be tried: to as many rows in all as steps are known of, from the start or since, or
        twice as many drafted ones as of so many sequences; and a few the first time."""
        kind = bucket(sequences)
        twice = 2 * max((drafted for known, drafted in self._seconds if known == kind), default=0)
        rows = max((known + drafted for known, drafted in self._seconds if drafted), default=0)
        return max(twice or max(2, sequences // 8), max(rows, len(self._device) - 1) - sequences)

    def worth(self, sequences: int, chances: Sequence[float], right: Sequence[float] | None = None) -> int:
        """How many drafted rows a step of so many sequences is to have.

        chances   of each row to be accepted, descending unless `right` is there
        right     what the first, the first two, .. of them are worth in tokens; None: what is accepted
        """
        plain = self.seconds(sequences, 0)
        if not plain or not chances:  # none was measured, or by a clock that stood still
            return 0
        right = list(itertools.accumulate(chances)) if right is None else right
        kind, most = bucket(sequences), len(right)
        single = sequences / plain
        best, chosen = (1 + LEAST_GAIN) * single, 0
        for full in _BUCKETS:  # a bucket's rows are taken to cost the same
            known, at = self._seconds.get((kind, full)), min(self._filled(sequences + full) - sequences, most)
            rate = (sequences + right[at - 1]) / (known or plain + self._takes_more(sequences, at))
            if rate > best:
                best, chosen = rate, at
            if full >= most:
                break
        if chosen:
            self._declined.pop(kind, None)
            if self._unsure(kind, best / single):
                return 0
            return min(chosen, self.furthest(sequences))  # which may be worth nothing by itself, and is to be known
        if right[-1] < LEAST_GAIN * sequences:  # even if drafts took no time
            return 0
        count, wait = self._declined.get(kind, (0, AGAIN[0]))
        if count + 1 < wait:
            self._declined[kind] = count + 1, wait
            return 0
        likely = max(1, min(sum(chance >= 0.5 for chance in chances), self.furthest(sequences)))
        while likely > 1 and self.seconds(sequences, likely) > _DEAREST * plain:
            likely //= 2
        if (kind, bucket(likely)) in self._met:  # else the next step is another, for the first is not counted
            self._declined[kind] = 0, min(2 * wait, AGAIN[1])
        return likely

    def _unsure(self, kind: int, gain: float) -> bool:
        """Whether a step of single tokens is to show again what such take."""
        count, limit = self._unseen.get(kind, (0, _LOOKED[0]))
        return count >= (limit if gain < _UNSURE else _LOOKED[1])


def _by_rows(known: Mapping[int, float]) -> list[float]:
    """Of 0, 1, 2, .. rows: what the next that is known takes, and more rows never take less. [0.0] where none is."""
    rows = sorted(known)
    most = list(itertools.accumulate((known[count] for count in rows), max))  # a time that was disturbed stays long
    found = [most[0] if most else 0.0]
    for (low, high), behind in zip(itertools.pairwise([0, *rows]), most):
        found += [behind] * (high - low)
    return found


class _Line:
    """The line through what was measured, the newest above all, that neither falls nor begins below 0."""

    def __init__(self) -> None:
        self._sums = [0.0] * 5
        self.slope = self.begin = 0.0

    def add(self, x: float, y: float) -> None:
        new = 1.0, x, y, x * x, x * y
        self._sums = [_KEPT * old + value for old, value in zip(self._sums, new)]
        count, xs, ys, squares, products = self._sums
        spread = squares - xs * xs / count
        self.slope = max(0.0, (products - xs * ys / count) / spread) if spread > 1e-3 * squares else 0.0
        self.begin = max(0.0, (ys - self.slope * xs) / count)
