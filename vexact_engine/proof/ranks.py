"""A model over ranks, as threads of one process and on one device: what each computes of its rows of the weights, and
puts together with the others', is what processes of an engine with tensor_parallel_size would."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

from ..runner.batch import Batch
from ..runner.decoder import Decoder
from ..runner.memory import Memories
from ..runner.projections import Weights
from ..runner.ranks import Alone, RankedHead
from ..weights.cut import Cut, cut, shapes

_PATIENCE = 600.0  # seconds for the slowest rank


class Meeting:
    """Where ranks hand one another a tensor each."""

    def __init__(self, size: int):
        self.size, self._given = size, [torch.empty(0, dtype=torch.uint8)] * size
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        self._given[rank] = x
        self.barrier.wait()
        found = list(self._given)
        self.barrier.wait()
        return found


class Thread(Alone):
    """One of the ranks, as runner/ranks.py's Ranks has them."""

    def __init__(self, meeting: Meeting, rank: int):
        self._meeting, self.rank, self.size = meeting, rank, meeting.size

    def gather(self, x: Tensor) -> Tensor:
        return torch.cat(self._meeting.exchange(self.rank, x), 1)

    def only(self, x: Tensor) -> Tensor:
        first, *others = (part.contiguous().view(torch.uint8) for part in self._meeting.exchange(self.rank, x))
        return sum(others, first).view(x.dtype)


class Held:
    """A rank's tensors, by name."""

    def __init__(self, model: nn.Module, own: Cut):
        self.tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        for name in own.shards.keys() & self.tensors.keys():
            rows = own.shards[name].take(self.tensors[name].detach())
            self.tensors[name] = nn.Parameter(rows.clone(), requires_grad=False)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.tensors.items()

    def named_buffers(self) -> Iterator[tuple[str, Tensor]]:
        yield from ()


class _Seen(nn.Module):
    """Stands for a layer that has been computed: it returns what came of that."""

    out: Tensor

    def forward(self, x: Tensor) -> Tensor:
        return self.out


class Ranked:
    """
    model     modules of the names that the patched model's layers and final norm have, which run as they are asked
    memories  what each rank remembers
    raises    ValueError naming what does not divide; NotDescribed
    """

    def __init__(self, handle, size: int):
        whole, described = handle.model, handle.describe()
        cuts = [cut(described, shapes(whole), rank, size) for rank in range(size)]
        self.memories: list[Memories] = [[layer.memory for layer in own.described.layers] for own in cuts]
        self._meeting, self.model = Meeting(size), nn.Module()
        layers = range(len(described.layers))
        self._layers = [self._place(_path(described.names(range(i, i + 1)), i)) for i in layers]
        self._norm = self._place(described.norm.weight.rpartition(".")[0])
        self._decoders, self._heads = [], []
        for rank, own in enumerate(cuts):
            held, ranks = Held(whole, own), Thread(self._meeting, rank)
            self._decoders.append(Decoder(Weights(held), own.described, layers, ranks, own.vocabulary[1]))
            head = held.tensors[described.head.weight]
            self._heads.append(RankedHead(head, described.head, ranks, own.vocabulary))

    def _place(self, path: str) -> _Seen:
        *parents, name = path.split(".")
        at = self.model
        for parent in parents:
            if parent not in at._modules:
                at.add_module(parent, nn.Module())
            at = at._modules[parent]
        at.add_module(name, made := _Seen())
        return made

    def logits(self, batches: Sequence[Batch]) -> Tensor:
        """(T, V), of a batch that each rank has with its own memory."""
        with ThreadPoolExecutor(len(batches)) as pool:
            done = [future.result() for future in [pool.submit(self._run, *each) for each in enumerate(batches)]]
        x, *layers = done[0][0]
        for module, out in zip([*self._layers, self._norm], [*layers, done[0][1]]):
            module.out = out[None]
            x = module(x if x.dim() == 3 else x[None])
        return done[0][2]

    @torch.no_grad()
    def _run(self, rank: int, batch: Batch) -> tuple[list[Tensor], Tensor, Tensor]:
        """What goes into each layer and comes out of the last, final hidden states, and logits."""
        between: list[Tensor] = []
        try:
            hidden = self._decoders[rank](batch, seen=between.append)
            return between, hidden, self._heads[rank].logits(hidden)
        except BaseException:
            self._meeting.barrier.abort()
            raise


def _path(names: set[str], layer: int) -> str:
    """The module that a layer's weights lie in."""
    at = f".{layer}."
    inside = [name[: name.index(at) + len(at) - 1] for name in names if at in name]
    return max(set(inside), key=inside.count)
