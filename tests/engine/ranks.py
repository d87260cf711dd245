"""Ranks as threads of one process: what they tell each other goes through a list."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from vexact_engine.proof.ranks import Held, Meeting, Thread
from vexact_engine.runner.decoder import Decoder
from vexact_engine.runner.projections import Weights
from vexact_engine.runner.ranks import Group, RankedHead
from vexact_engine.weights.cut import cut, shapes


class Room(Meeting):
    """order   in which columns are put together, for twins that must fail"""

    def __init__(self, size, order=None):
        super().__init__(size)
        self.order = order or range(size)

    def exchange(self, rank, x):
        found = super().exchange(rank, x)
        return [found[i] for i in self.order]


class OnTheirWay:
    """Peers as the decoder sees them: columns are asked for once, and before others are computed."""

    def __init__(self, meeting, rank):
        self._meeting, self._rank, self.size, self.awaited = meeting, rank, meeting.size, None

    def sends(self, rows, columns, dtype):
        return False

    norms = sends

    def send(self, columns):
        assert self.awaited is None, "columns are computed while others are on their way"
        self.awaited = columns.own
        return columns

    def receive(self, x):
        assert x is self.awaited, "nobody has sent these columns, or they were received"
        self.awaited = None
        return torch.cat(self._meeting.exchange(self._rank, x), 1)


class Later(Thread):
    """What stands beside it as on GPUs that reach each other's memory: gathered where it is needed."""

    def __init__(self, meeting, rank):
        super().__init__(meeting, rank)
        self._peers = OnTheirWay(meeting, rank)

    project = Group.project

    def later(self, own):
        return self._peers.send(Group.later(self, own))

    def linear(self, x, weight, bias):
        return self._peers.send(Group.linear(self, x, weight, bias))

    def linear_silu_mul(self, x, weight, bias, activation):
        return self._peers.send(Group.linear_silu_mul(self, x, weight, bias, activation))


def in_ranks(model, described, size, function, spoil=None, order=None, whole_experts=False):
    """function(decoder, cut, head) in a thread of each rank.

    spoil   changes a rank's cut before its weights are taken: (cut, rank) -> cut
    order   in which columns are put together, for twins that must fail
    """
    room = Room(size, order)

    def run(rank):
        try:
            own = cut(described, shapes(model), rank, size, whole_experts)
            held = Held(model, spoil(own, rank) if spoil else own)
            ranks = Later(room, rank)
            decoder = Decoder(Weights(held), own.described, range(len(described.layers)), ranks, own.vocabulary[1])
            head = RankedHead(held.tensors[described.head.weight], described.head, ranks, own.vocabulary)
            with torch.no_grad():
                return function(decoder, own, head)
        except BaseException:
            room.barrier.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
        errors = [future.exception() for future in futures]
        for error in sorted((e for e in errors if e), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
        return [future.result() for future in futures]
