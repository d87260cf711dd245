"""How long steps take: measured as they run, by how many sequences and rows they have, and what drafts are worth then.

A step of B sequences gives each a token. With n drafted rows more it takes longer and gives as many more as are
accepted. Drafts are verified where tokens per second are likely to be more.
"""

from collections.abc import Sequence

_WEIGHT = 4  # a step's time counts as one of so many
_AGAIN = 64  # steps of as many sequences after which a choice against drafts is tried anew ...
_DEAREST = 2.0  # ... if it is likely to take no more than so many times that of single tokens


def bucket(count: int) -> int:
    """Counts that are taken for one: each up to 8, then to a quarter of a power of two, upwards."""
    low = max(0, (count - 1).bit_length() - 3)
    return -(-count >> low) << low


class Pace:
    """Seconds of steps that held single tokens and drafts alone."""

    def __init__(self):
        self._seconds: dict[tuple[int, int], float] = {}  # (sequences, rows), as buckets
        self._met: set[tuple[int, int]] = set()  # the first of a kind may have kernels to compile: it is not counted
        self._slope = 0.0  # seconds of a row more: what has not been measured is tried
        self._declined: dict[int, int] = {}

    def note(self, sequences: int, rows: int, seconds: float) -> None:
        key = bucket(sequences), bucket(rows)
        if key not in self._met:
            self._met.add(key)
            return
        known = self._seconds.get(key)
        self._seconds[key] = seconds if known is None else known + (min(seconds, 4 * known) - known) / _WEIGHT
        plain = self._seconds.get((key[0], key[0]))
        if plain is not None and key[1] > key[0]:
            slope = max(0.0, self._seconds[key] - plain) / (key[1] - key[0])
            self._slope = slope if not self._slope else self._slope + (slope - self._slope) / _WEIGHT

    def seconds(self, sequences: int, rows: int) -> float | None:
        """What such a step is likely to take; None where one of single tokens was not measured yet."""
        sequences, rows = bucket(sequences), bucket(rows)
        plain = self._seconds.get((sequences, sequences))
        if plain is None or rows == sequences:
            return plain
        known = self._seconds.get((sequences, rows))
        return max(plain, plain + self._slope * (rows - sequences) if known is None else known)

    def worth(self, sequences: int, chances: Sequence[float]) -> int:
        """How many drafted rows a step of so many sequences is to have.

        chances   of each row to be accepted, descending
        """
        plain = self.seconds(sequences, sequences)
        if plain is None or not chances:
            return 0
        best, chosen, expected, at = sequences / plain, 0, float(sequences), 0
        while at < len(chances):
            end = min(len(chances), at + 1)
            rows = bucket(sequences + end)
            end = min(len(chances), rows - sequences)  # a bucket's rows cost the same
            expected += sum(chances[at:end])
            at = end
            rate = expected / self.seconds(sequences, sequences + at)
            if rate > best:
                best, chosen = rate, at
        if chosen:
            return chosen
        declined = self._declined.get(bucket(sequences), 0) + 1
        self._declined[bucket(sequences)] = declined % _AGAIN
        if declined < _AGAIN:
            return 0
        likely = sum(chance >= 0.5 for chance in chances)
        if self.seconds(sequences, sequences + likely) > _DEAREST * plain:
            likely = 0
        return min(len(chances), max(likely, bucket(sequences + 1) - sequences))
