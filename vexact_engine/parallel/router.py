"""Which replica a request goes to: the one that has computed most of its prompt already, unless it has much more to do
than others. A function of what was asked and has ended until then, and of nothing else."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence

_SHARE = 0.5  # of a prompt: to have less of it already counts for nothing
_SLACK = 8  # samples that a replica may have more than the least of them, and still be asked for what it knows


def chain(token_ids: Sequence[int], page_size: int) -> list[int]:
    """For each full page a number that stands for all tokens until its end.

    Two beginnings may have the same number, once in very many: then a request goes where nothing of it is known. The
    engine's own prefix cache compares the tokens themselves.
    """
    found, last = [], 0
    for end in range(page_size, len(token_ids) + 1, page_size):
        last = hash((last, *token_ids[end - page_size : end]))
        found.append(last)
    return found


class _Replica:
    __slots__ = ("known", "most", "samples")

    def __init__(self, most: int):
        self.known: OrderedDict[int, None] = OrderedDict()  # ends of pages it has been given, the latest last
        self.most, self.samples = most, 0

    def count(self, pages: Sequence[int]) -> int:
        count = 0
        for page in pages:
            if page not in self.known:
                break
            count += 1
        return count


class Router:
    """What the replicas have been given. Not thread-safe.

    pages   how many each one's cache has
    """

    def __init__(self, pages: Sequence[int]):
        self._replicas = [_Replica(most) for most in pages]

    def samples(self, replica: int) -> int:
        """How many of those it has been given have not ended."""
        return self._replicas[replica].samples

    def choose(self, pages: Sequence[int], among: Iterable[int]) -> int:
        """One of some replicas, for a prompt with this `chain`. Ties go to the one with the least to do, then to the
        first."""
        replicas = self._replicas
        among = list(among)
        least = min(replicas[i].samples for i in among)

        def rank(i: int) -> tuple:
            known = replicas[i].count(pages) if replicas[i].samples <= least + _SLACK else 0
            return -known if known >= _SHARE * len(pages) else 0, replicas[i].samples, i

        return min(among, key=rank)

    def begin(self, replica: int, pages: Sequence[int], samples: int) -> None:
        self._replicas[replica].samples += samples
        self.learn(replica, pages)

    def end(self, replica: int, samples: int) -> None:
        self._replicas[replica].samples -= samples

    def learn(self, replica: int, pages: Sequence[int]) -> None:
        """It has these now; what it was given longest ago it has not any more."""
        one = self._replicas[replica]
        for page in reversed(pages):  # a beginning is worth more than what follows it
            one.known[page] = None
            one.known.move_to_end(page)
        while len(one.known) > one.most:
            one.known.popitem(last=False)

    def forget(self, replica: int) -> None:
        """Its cache is empty: of other weights, or gone."""
        self._replicas[replica].known.clear()
