"""Ranks compared, before they are trusted, with the model's own forward of whole weights, which are put together again
from all ranks' rows, a layer at a time: one of each kind, the first and the last."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

import vexact_ops as vx
from vexact_ops.patch import description as d

from ..weights.cut import Cut, Shard
from .decoder import Decoder
from .forward import Trial, patched_stage
from .projections import Weights
from .ranks import RankedHead, Ranks


@torch.no_grad()
def check_ranks(handle, cuts: Sequence[Cut], layers: range, ranks: Ranks, shapes: Mapping[str, Sequence[int]]) -> None:
    """All ranks call it.

    cuts     of each rank
    shapes   of whole weights, by name
    raises   ValueError where their bits are not those of one rank
    """
    model, described, own = handle.model, handle.describe(), cuts[ranks.rank]
    tokens = min(shapes[described.embedding.weight][0], own.vocabulary[0])
    for i in _of_each_kind(described, layers):
        layer = range(i, i + 1)
        trial, last = Trial(model, described, layer, tokens), layer.stop == len(described.layers)
        decoder = Decoder(Weights(model), own.described, layer, ranks, own.vocabulary[1])
        found = _outs(trial, own.described, decoder)
        if last:
            rows = found[-1]
            weight = model.get_parameter(own.described.head.weight)
            found.append(RankedHead(weight, own.described.head, ranks, own.vocabulary).logits(rows))
        names = described.names(layer) & own.shards.keys()
        with _whole(model, names, [cut.shards for cut in cuts], ranks, shapes):
            expected = _outs(trial, described, patched_stage(handle.stage(layer), len(described.layers)))
            if last:
                expected.append(handle.logits(rows))
        if not all(vx.same_bits(a, b) for a, b in zip(found, expected)):
            raise ValueError(
                f"EngineConfig: tensor_parallel_size: got {ranks.size}, but layer {i} of the {type(model).__name__} "
                "has other bits than in one rank: expected 1"
            )


def _outs(trial: Trial, described: d.Decoder, forward) -> list[Tensor]:
    """From empty caches: prompts, chunks behind them, their last tokens alone, single tokens."""
    limit, far = trial.limit, trial.limit - min(3, trial.limit - 1)
    first = [(0, min(5, far)), (0, far), (0, 1), (0, far)]
    second = [(end, min(end + 3, limit)) if end < limit else (end - 1, end) for _, end in first]
    single = [(end - 1, end) for _, end in second]
    steps = (first, False), (second, False), (second, True), (single, False)
    return trial.run(forward, trial.caches(described, steps), steps)


def _of_each_kind(described: d.Decoder, layers: range) -> list[int]:
    """Layers that differ in more than the names of their weights, and the first and the last."""
    kinds = {_kind(described.layers[i]): i for i in reversed(layers)}
    ends = {0, len(described.layers) - 1} & set(layers)
    return sorted({*kinds.values(), *ends})


def _kind(part) -> object:
    if dataclasses.is_dataclass(part):
        values = ((f.name, getattr(part, f.name)) for f in dataclasses.fields(part))
        return tuple(
            value is not None if name in d.NAMES and isinstance(value, str) else _kind(value) for name, value in values
        )
    return tuple(map(_kind, part)) if isinstance(part, tuple) else part


@contextlib.contextmanager
def _whole(
    model: nn.Module, names: set[str], shards: Sequence, ranks: Ranks, shapes: Mapping[str, Sequence[int]]
) -> Iterator[None]:
    """In a model of a rank's rows, whole tensors of these names."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    held = {id(tensors[name]): name for name in sorted(names)}
    with contextlib.ExitStack() as stack:
        made = {}
        for key, name in held.items():
            together = joined(tensors[name].detach(), [each[name] for each in shards], ranks, shapes[name])
            made[key] = nn.Parameter(together, requires_grad=False)
        for module in model.modules():
            for leaf, tensor in module._parameters.items():
                if tensor is not None and id(tensor) in made:
                    stack.callback(module._parameters.__setitem__, leaf, tensor)
                    module._parameters[leaf] = made[id(tensor)]
        yield


def joined(own: Tensor, shards: Sequence[Shard], ranks: Ranks, shape: Sequence[int]) -> Tensor:
    """The whole tensor of which each rank has a shard."""
    most, dim = max(shard.rows for shard in shards), shards[0].dim
    first = own.movedim(dim, 0)
    padded = first.new_zeros(most, *first.shape[1:])
    padded[: len(first)] = first
    found = ranks.gather(padded.view(1, -1)).view(ranks.size, *padded.shape)
    whole = own.new_empty(shape)
    for shard, rows in zip(shards, found):
        at = 0
        for begin, end in shard.ranges:
            whole.movedim(dim, 0)[begin:end] = rows[at : at + end - begin]
            at += end - begin
    return whole
