"""Which layers of a model are in which stage."""

import itertools
from collections.abc import Iterable, Sequence

import torch

import vexact_ops as vx
from vexact_ops.patch.description import State

from ..config import EngineConfig

_CONTEXT = 1024  # tokens of a sequence that stages are balanced for


def cut(costs: Sequence[int], head: int, stages: int) -> tuple[range, ...]:
    """Layers in consecutive ranges, such that the most that a stage costs is least; of equal ones, the first.

    costs   of each layer; `head` is the last stage's on top
    raises  ValueError for more stages than layers
    """
    if stages > len(costs):
        raise ValueError(
            f"EngineConfig: pipeline_parallel_size: got {stages}, expected at most {len(costs)}, one a layer"
        )
    sums = [0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # best[i]: the first i layers in so many stages: the most that one costs, and where the last of them begins
    best: list[tuple[int, tuple[int, ...]]] = [(sums[i], (0,)) if i else (0, ()) for i in range(len(sums))]
    for count in range(2, stages + 1):
        last = head if count == stages else 0
        best = [
            min(
                (max(best[j][0], sums[i] - sums[j] + last), (*best[j][1], j))
                for j in range(count - 1, i)
            )
            if i >= count
            else (sums[-1] + head, ())
            for i in range(len(sums))
        ]  # fmt: skip
    begins = (*best[-1][1], len(costs))
    return tuple(range(a, b) for a, b in itertools.pairwise(begins))


def split(model: torch.nn.Module, config: EngineConfig) -> tuple[range, ...]:
    """The layers of each stage, by what a plan of decodes reads there, which is the time that it takes: weights, and
    keys of a context that is usual. The embedding is looked up, a row a token: it takes memory and no time."""
    stages, context = config.pipeline_parallel_size, min(_CONTEXT, config.max_model_len or _CONTEXT)
    with vx.patch.hf(model, **config.patch_options, training=False) as handle:
        described = handle.describe()
        tensors = dict(model.named_parameters(remove_duplicate=False))
        tensors |= dict(model.named_buffers(remove_duplicate=False))

        def size(names: Iterable[str]) -> int:
            return sum(tensors[name].nbytes for name in names)

        every = range(len(described.layers))
        shared = set.intersection(*(described.names(range(i, i + 1)) for i in every)) if len(every) > 1 else set()
        head = {described.head.weight, described.norm.weight} if described.head else {described.norm.weight}
        beside = shared | head | {described.embedding.weight}
        rows, dtype = -(-config.max_num_seqs // stages), next(model.parameters()).dtype
        costs = []
        for i, layer in zip(every, described.layers):
            kept, tokens = layer.memory, min(context, layer.memory.window or context)
            keys = kept.bytes_per_slot(dtype) if isinstance(kept, State) else tokens * kept.bytes_per_token(dtype)
            costs.append(size(described.names(range(i, i + 1)) - beside) + rows * keys)
        return cut(costs, size(head), stages)
