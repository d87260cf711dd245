"""What one of several ranks computes, and its rows of each weight: weights are cut by their output rows.

Rows of a weight are independent, so no sum is cut, and each number has the bits that one rank gives it. Heads are cut
in attention (key-value heads are repeated where ranks are more), the vocabulary in embedding and head. What a token is
normalised or routed by is small, and whole on every rank.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vexact_ops.patch import description as d

_MOST = 64  # ranks that are tried where a size does not fit
_GRANULES = 128, 64, 32, 16, 8, 1  # rows that a vocabulary is cut at multiples of, the first that leaves no rank empty

Range = tuple[int, int]


@dataclass(frozen=True)
class Shard:
    """Rows that a rank holds of a tensor: these ranges of one of its dimensions, ascending."""

    dim: int
    ranges: tuple[Range, ...]

    @property
    def rows(self) -> int:
        return sum(end - begin for begin, end in self.ranges)

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        return (*whole[: self.dim], self.rows, *whole[self.dim + 1 :])

    def take(self, whole: Tensor) -> Tensor:
        """Its rows of a whole tensor; a view where they are one range."""
        parts = [whole.narrow(self.dim, begin, end - begin) for begin, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def runs(self, whole: Sequence[int], start: int, count: int) -> Iterator[tuple[int, int, int]]:
        """Of `count` elements of a whole tensor from `start` on, in the order of its memory, those that it holds: where
        they begin in its own tensor, where among the given ones, and how many, ascending."""
        inner = _product(whole[self.dim + 1 :])
        block, own = whole[self.dim] * inner, self.rows * inner
        end = start + count
        for outer in range(start // block, -(-end // block)) if block else ():
            at = outer * own
            for first, last in self.ranges:
                begin, stop = outer * block + first * inner, outer * block + last * inner
                low, high = max(begin, start), min(stop, end)
                if low < high:
                    yield at + low - begin, low - start, high - low
                at += stop - begin

    def within(self, first: int, rows: int) -> "Shard":
        """Of a view of some rows, of this dimension and those behind it alone."""
        met = ((max(a, first), min(b, first + rows)) for a, b in self.ranges)
        return Shard(0, tuple((a - first, b - first) for a, b in met if a < b))


@dataclass(frozen=True)
class Cut:
    """described: what the rank computes, in a description of its own; shards: its rows of the weights that it does not
    hold whole, by name; vocabulary: tokens of all ranks, and of each but the last."""

    described: d.Decoder
    shards: Mapping[str, Shard]
    vocabulary: tuple[int, int]


def cut(
    described: d.Decoder, shapes: Mapping[str, Sequence[int]], rank: int, size: int, whole_experts: bool = False
) -> Cut:
    """One of `size` ranks of a decoder.

    shapes         of its whole weights, by name
    whole_experts  a rank has some of a mixture's experts, instead of rows of each
    raises         ValueError naming what does not divide, and the sizes that would fit
    """
    made, misfits = _cut(described, shapes, rank, size, whole_experts)
    if misfits:
        fitting = [n for n in range(1, _MOST + 1) if not _cut(described, shapes, 0, n, whole_experts)[1]]
        raise ValueError(
            f"EngineConfig: tensor_parallel_size: got {size}, which does not fit {'; '.join(misfits)}: expected one of "
            f"{', '.join(map(str, fitting))}"
        )
    return made


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    """Of all parameters and buffers, which may be on meta."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def _cut(
    described: d.Decoder, shapes: Mapping[str, Sequence[int]], rank: int, size: int, whole_experts: bool
) -> tuple[Cut, list[str]]:
    cutter = _Cutter(shapes, rank, size, whole_experts)
    cutter.decoder(described)  # where a weight's rows begin here is known once all its parts are
    made = cutter.decoder(described)
    shards = {name: Shard(dim, tuple(sorted(ranges))) for name, (dim, ranges) in cutter.wanted.items()}
    return Cut(made, shards, cutter.vocabulary), list(cutter.misfits)


class _Cutter:
    def __init__(self, shapes: Mapping[str, Sequence[int]], rank: int, size: int, whole_experts: bool):
        self.shapes, self.rank, self.size, self.whole_experts = shapes, rank, size, whole_experts
        self.wanted: dict[str, tuple[int, set[Range]]] = {}
        self.misfits: dict[str, None] = {}
        self.vocabulary = 0, 0

    def decoder(self, whole: d.Decoder) -> d.Decoder:
        if whole.head is None:
            self.misfits["an output layer that is not a weight"] = None
        elif whole.head.bias is not None and self.size > 1:
            self.misfits["an output layer with a bias"] = None
        self.vocabulary_of(*(part.weight for part in (whole.embedding, whole.head) if part is not None))
        return replace(whole, layers=tuple(d.Layer(tuple(map(self.block, layer.blocks))) for layer in whole.layers))

    def block(self, block: d.Block) -> d.Block:
        parts = {
            d.Attention: self.attention,
            d.Latent: self.latent,
            d.GatedDelta: self.delta,
            d.Mlp: self.mlp,
            d.Mixture: self.mixture,
        }
        return replace(block, part=parts[type(block.part)](block.part))

    # Sizes

    def share(self, count: int, what: str) -> int:
        """A rank's of so many."""
        if count % self.size:
            self.misfits[f"{count} {what}"] = None
        return max(1, count // self.size)

    def own(self, count: int, what: str) -> Range:
        share = self.share(count, what)
        return self.rank * share, (self.rank + 1) * share

    def repeated(self, count: int, what: str) -> tuple[Range, int]:
        """Of so many, this rank's, each on several ranks where these are more: and on how many."""
        if count >= self.size:
            return self.own(count, what), 1
        if self.size % count:
            self.misfits[f"{count} {what}"] = None
        first = self.rank * count // self.size
        return (first, first + 1), max(1, self.size // count)

    # Weights

    def keep(self, name: str | None, ranges: Sequence[Range], dim: int = 0) -> None:
        if name is not None:
            self.wanted.setdefault(name, (dim, set()))[1].update(ranges)

    def rows(self, linear: d.Linear, *ranges: Range) -> d.Linear:
        """Of its outputs these."""
        base = linear.rows[0] if linear.rows else 0
        own = [(base + begin, base + end) for begin, end in ranges]
        for name in (linear.weight, linear.bias, *(adapter.up for adapter in linear.adapters)):
            self.keep(name, own)  # of an adapter's two products the first is small, and whole on every rank
        features = sum(end - begin for begin, end in own)
        if linear.rows is None:
            return replace(linear, features=features)
        before = sum(end - begin for begin, end in self.wanted[linear.weight][1] if begin < own[0][0])
        return replace(linear, features=features, rows=(before, before + features))

    def outputs(self, linear: d.Linear) -> d.Linear:
        """Its share of them."""
        return self.rows(linear, self.own(linear.features, f"outputs of {linear.weight}"))

    def vocabulary_of(self, *names: str) -> None:
        tokens = {self.shapes[name][0] for name in names}
        count = max(tokens)
        for granule in _GRANULES:
            share = -(-count // (self.size * granule)) * granule
            if share * (self.size - 1) < min(tokens):
                break
        else:
            self.misfits[f"{count} tokens of the vocabulary"] = None
        for name in names:
            total = self.shapes[name][0]
            self.keep(name, [(min(self.rank * share, total - 1), min((self.rank + 1) * share, total))])
        self.vocabulary = self.shapes[names[-1]][0], share

    # Parts

    def attention(self, part: d.Attention) -> d.Attention:
        heads = self.own(part.heads, "attention heads")
        kv_heads, _ = self.repeated(part.kv_heads, "key-value heads")
        self.keep(part.sinks, [heads])
        return replace(
            part,
            q=self.rows(part.q, _times(heads, part.q.features // part.heads)),
            k=self.rows(part.k, _times(kv_heads, part.dim)),
            v=self.rows(part.v, _times(kv_heads, part.v_dim)),
            o=self.outputs(part.o),
            heads=heads[1] - heads[0],
            kv_heads=kv_heads[1] - kv_heads[0],
        )

    def latent(self, part: d.Latent) -> d.Latent:
        heads = self.own(part.heads, "attention heads")
        self.keep(part.sinks, [heads])
        return replace(
            part,
            q=self.rows(part.q, _times(heads, part.q.features // part.heads)),
            kv_b=self.rows(part.kv_b, _times(heads, part.nope + part.v_dim)),
            o=self.outputs(part.o),
            heads=heads[1] - heads[0],
        )

    def delta(self, part: d.GatedDelta) -> d.GatedDelta:
        keys, _ = self.repeated(part.key_heads, "key heads of a gated delta net")
        values = self.own(part.value_heads, "value heads of a gated delta net")
        width, k_dim, v_dim = part.key_heads * part.k_dim, part.k_dim, part.v_dim
        q, v = _times(keys, k_dim), _times(values, v_dim)
        channels = [q, _moved(q, width), _moved(v, 2 * width)]
        for name in (part.conv, part.conv_bias):
            self.keep(name, channels)
        for name in (part.a_log, part.dt_bias):
            self.keep(name, [values])
        if part.z is None or part.a is None:
            qkvz, ba = self.by_head(part, keys, values)
            read = {"qkv": (self.rows(*part.qkv, *qkvz),), "b": self.rows(part.b, *ba)}
        else:
            own = (channels,) if len(part.qkv) == 1 else ([q], [q], [v])
            read = {"qkv": tuple(self.rows(linear, *rows) for linear, rows in zip(part.qkv, own, strict=True))}
            read |= {"z": self.rows(part.z, v)}
            read |= {"b": self.rows(part.b, values), "a": self.rows(part.a, values)}
        heads = {"key_heads": keys[1] - keys[0], "value_heads": values[1] - values[0]}
        return replace(part, o=self.outputs(part.o), **read, **heads)

    @staticmethod
    def by_head(part: d.GatedDelta, keys: Range, values: Range) -> tuple[list[Range], list[Range]]:
        """Rows of a projection that goes key head by key head: q, k, v, z and b, a of each."""
        shared = part.value_heads // part.key_heads
        sizes = part.k_dim, part.k_dim, shared * part.v_dim, shared * part.v_dim
        qkvz, ba = [], []
        for key in range(*keys):
            own = max(values[0] - key * shared, 0), min(values[1] - key * shared, shared)
            q, k, v, z = itertools.accumulate(sizes[:3], initial=key * sum(sizes))
            qkvz += [(q, k + part.k_dim), _moved(_times(own, part.v_dim), v), _moved(_times(own, part.v_dim), z)]
            ba += [_moved(own, 2 * key * shared), _moved(own, (2 * key + 1) * shared)]
        return qkvz, ba

    def mlp(self, part: d.Mlp) -> d.Mlp:
        gate = None if part.gate is None else self.outputs(part.gate)
        return replace(part, gate=gate, up=self.outputs(part.up), down=self.outputs(part.down))

    def mixture(self, part: d.Mixture) -> d.Mixture:
        experts = part.experts
        gate_up, down, biases = experts.gate_up, experts.down, (experts.gate_up_bias, experts.down_bias)
        if self.whole_experts:
            for name in (gate_up, down, *biases):
                if name is not None:
                    self.keep(name, [self.own(self.shapes[name][0], f"experts of {name}")])
        else:
            (_, hidden, inner), both = self.shapes[down], self.shapes[gate_up][2 if experts.turned else 1]
            hidden, inner = (inner, hidden) if experts.turned else (hidden, inner)
            own = self.own(inner, f"columns of {down}")
            by_turns = experts.activation == "swigluoai"
            of_gate_up = [_times(own, 2)] if by_turns else [own, _moved(own, both // 2)]
            of_down = [self.own(hidden, f"rows of {down}")]
            for name, bias, ranges in zip((gate_up, down), biases, (of_gate_up, of_down)):
                self.keep(name, ranges, dim=2 if experts.turned else 1)
                self.keep(bias, ranges, dim=1)
        return replace(part, shared=None if part.shared is None else self.mlp(part.shared))


def _times(rows: Range, size: int) -> Range:
    return rows[0] * size, rows[1] * size


def _moved(rows: Range, by: int) -> Range:
    return rows[0] + by, rows[1] + by


def _product(sizes: Sequence[int]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
