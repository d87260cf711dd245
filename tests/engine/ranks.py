"""Ranks as threads of one process: what they tell each other goes through a list."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from vexact_engine.runner.decoder import Decoder, Weights
from vexact_engine.runner.ranks import RankedHead
from vexact_engine.weights.cut import cut, shapes


class Room:
    def __init__(self, size, order=None):
        self.size, self.order, self.given = size, order or range(size), [None] * size
        self.barrier = threading.Barrier(size, timeout=120)

    def exchange(self, rank, x):
        self.given[rank] = x
        self.barrier.wait()
        found = [self.given[i] for i in self.order]
        self.barrier.wait()
        return found


class Thread:
    """As runner/ranks.py's Group."""

    def __init__(self, room, rank):
        self.room, self.rank, self.size = room, rank, room.size

    def gather(self, x):
        return torch.cat(self.room.exchange(self.rank, x), 1)

    def only(self, x):
        parts = [part.contiguous().view(torch.uint8) for part in self.room.exchange(self.rank, x)]
        return sum(parts[1:], parts[0]).view(x.dtype)


class Held:
    """A rank's tensors, by name."""

    def __init__(self, model, shards):
        self.tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for name, shard in shards.items():
            if name in self.tensors:
                self.tensors[name] = torch.nn.Parameter(shard.take(self.tensors[name].detach()).clone(), False)

    def named_parameters(self):
        return self.tensors.items()

    def named_buffers(self):
        return ()


def in_ranks(model, described, size, function, spoil=None, order=None, whole_experts=False):
    """function(decoder, cut, head) in a thread of each rank.

    spoil   changes a rank's cut before its weights are taken: (cut, rank) -> cut
    order   in which columns are put together, for twins that must fail
    """
    room = Room(size, order)

    def run(rank):
        try:
            own = cut(described, shapes(model), rank, size, whole_experts)
            held = Held(model, (spoil(own, rank) if spoil else own).shards)
            ranks = Thread(room, rank)
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
