"""How long steps take: measured as they run, by how many sequences and rows they have, and what drafts are worth then.

A step of B sequences gives each a token. With n drafted rows more it takes longer and gives as many more as are
accepted. Drafts are verified where tokens per second are likely to be more.
"""

from collections.abc import Sequence

_WEIGHT = 4  # a step's time counts as one of so many
LEAST_GAIN = 0.05  # of tokens per second, for times are not that exact
AGAIN = 128  # steps of as many sequences after which a choice against drafts is tried anew ...
_DEAREST = 2.0  # ... if it is likely to take no more than so many times that of single tokens


def bucket(count: int) -> int:
    """Counts that are taken for one: each up to 8, then to a quarter of a power of two, upwards."""
    low = max(0, (count - 1).bit_length() - 3) if count else 0
    return -(-count >> low) << low


class Pace:
    """Seconds of steps that held single tokens and drafts alone."""

    def __init__(self):
        self._seconds: dict[tuple[int, int], float] = {}  # (sequences, drafted rows), as buckets
        self._met: set[tuple[int, int]] = set()  # the first of a kind may have kernels to compile: it is not counted
        self._slope = 0.0  # seconds of a row more: what has not been measured is tried
        self._declined: dict[int, int] = {}

    def note(self, sequences: int, drafted: int, seconds: float) -> None:
        kind, most = bucket(sequences), bucket(drafted)
        if (kind, most) not in self._met:
            self._met.add((kind, most))
            return
        plain = self._seconds.get((kind, 0))
        if drafted and plain is not None:  # as if the bucket were full
            slope = max(0.0, seconds - plain) / drafted
            seconds = plain + slope * most
            self._slope += (slope - self._slope) / (_WEIGHT if self._slope else 1)
        known = self._seconds.get((kind, most))
        self._seconds[kind, most] = seconds if known is None else known + (min(seconds, 4 * known) - known) / _WEIGHT

    def seconds(self, sequences: int, drafted: int) -> float | None:
        """What such a step is likely to take; None where one of single tokens was not measured yet."""
        kind, drafted = bucket(sequences), bucket(drafted)
        plain, known = self._seconds.get((kind, 0)), self._seconds.get((kind, drafted))
        if plain is None or known is not None:
            return None if plain is None else max(plain, known)
        return plain + self._slope * drafted

    def furthest(self, sequences: int) -> int:
        """Drafted rows that may be tried: twice as many as there have been, and a few the first time."""
        kind = bucket(sequences)
        measured = (drafted for known, drafted in self._seconds if known == kind)
        return 2 * max(measured, default=0) or max(2, sequences // 8)

    def worth(self, sequences: int, chances: Sequence[float]) -> int:
        """How many drafted rows a step of so many sequences is to have.

        chances   of each row to be accepted, descending
        """
        plain = self.seconds(sequences, 0)
        if plain is None or not chances:
            return 0
        chances = chances[: self.furthest(sequences)]
        best, chosen, expected, at = (1 + LEAST_GAIN) * sequences / plain, 0, float(sequences), 0
        while at < len(chances):
            end = min(len(chances), bucket(at + 1))  # a bucket's rows are taken to cost the same
            expected += sum(chances[at:end])
            at = end
            rate = expected / self.seconds(sequences, at)
            if rate > best:
                best, chosen = rate, at
        if chosen:
            return chosen
        if sum(chances) < LEAST_GAIN * sequences:  # even if drafts took no time
            return 0
        declined = self._declined.get(bucket(sequences), 0) + 1
        self._declined[bucket(sequences)] = declined % AGAIN
        if declined < AGAIN:
            return 0
        likely = sum(chance >= 0.5 for chance in chances)
        return max(1, likely if self.seconds(sequences, likely) <= _DEAREST * plain else 1)
