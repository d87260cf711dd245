"""Pages that are left free for what runs, when another sequence is let in.

Room for half of what running sequences are likely to generate yet halves what preemption computes twice, and costs a
few steps in a hundred; room for all of it would cost half of them again. What is likely follows what finished ones have
used of what they were allowed, 1/32 of the way each.
"""

from bisect import bisect
from collections.abc import Iterable

from ..request import Sequence

_RESERVED, _FIRST_USED, _USED_WEIGHT = 0.5, 1.0, 32

Forecast = list[tuple[float, float, float]]  # of each sequence that runs what is expected of it, sorted


class Reserve:
    """fraction   of the running sequences' remaining tokens; None: half of what finished ones have used of theirs"""

    def __init__(self, fraction: float | None, page_size: int):
        self._follows, self._size = fraction is None, page_size
        self.share = _RESERVED * _FIRST_USED if fraction is None else fraction

    def note(self, sequence: Sequence) -> None:
        """It has ended by itself."""
        if self._follows:
            used = (len(sequence.tokens) - sequence.num_prompt) / max(1, sequence.limit - sequence.num_prompt)
            self.share += (_RESERVED * used - self.share) / _USED_WEIGHT

    def forecast(self, running: Iterable[Sequence]) -> Forecast:
        return sorted(self._expected(sequence, len(sequence.pages)) for sequence in running)

    def lasts(self, forecast: Forecast, sequence: Sequence, room: int) -> bool:
        """Whether pages are likely to last until all have ended that run, if this one is let in among them.

        forecast   of those that run; gets this one's if so
        """
        own = self._expected(sequence, -(-len(sequence.tokens) // self._size))
        at = bisect(forecast, own)
        missing, count, given_back = sum(one[1] for one in forecast) + own[1], len(forecast) + 1, 0.0
        for steps, now, back in (*forecast[:at], own, *forecast[at:]):
            if missing + count * steps / self._size - given_back > room:
                return False
            missing, count, given_back = missing - now, count - 1, given_back + back
        forecast.insert(at, own)
        return True

    def _expected(self, sequence, held):
        """How many more steps pages are kept for, a sequence's missing pages now (a part of one, and one to begin), and
        how many it then gives back."""
        size, length = self._size, len(sequence.tokens)
        steps = self.share * (sequence.limit - length)
        shared = sequence.num_prompt // size if sequence.params.n > 1 else 0
        return steps, length / size + 1 - held, (length + steps) / size - shared
