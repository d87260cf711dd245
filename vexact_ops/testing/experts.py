"""The promise for mixtures of experts: a row's bits do not follow how rows are spread over experts."""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from .._core.proof.bitwise import assert_bitwise


def spreads(rows: int, experts: int, seed: int = 0) -> Iterator[tuple[str, list[int]]]:
    """Named ways to give every one of `rows` rows an expert (ascending): all to one, one each, most experts empty."""
    g = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> list[int]:
        return sorted(torch.randint(low, high, (rows,), generator=g).tolist())

    hot = int(torch.randint(experts, (1,), generator=g))
    yield "random", draw(0, experts)
    yield "one hot expert", [hot] * rows
    yield "the first expert and the last", [0 if i < rows // 2 else experts - 1 for i in range(rows)]
    yield "a few to each", [i * experts // rows for i in range(rows)]
    cold = [e for e in draw(0, experts) if e != hot]
    yield "all but one to one expert", sorted([*cold[:1], *[hot] * (rows - len(cold[:1]))])


def offsets_of(assigned: list[int], experts: int, device: torch.device | str = "cpu") -> Tensor:
    """(experts + 1,) int32: where each expert's rows begin, for rows sorted by expert."""
    counts = torch.bincount(torch.tensor(assigned, dtype=torch.int64), minlength=experts)
    return torch.cat((counts.new_zeros(1), counts.cumsum(0))).to(device, torch.int32)


def check_grouped(
    grouped: Callable[[Tensor, Tensor, Tensor], object],
    linear: Callable[[Tensor, Tensor], object],
    x: Tensor,
    weight: Tensor,
    *,
    seed: int = 0,
) -> None:
    """grouped(x (R, K), weight (E, N, K), offsets (E + 1,)) has, however rows are spread over experts, the bits that
    linear(x (M, K), weight (N, K)) gives for the rows of each expert. Both return a tensor, or several, of rows.

    Raises AssertionError naming the spread and the expert.
    """
    for name, assigned in spreads(x.shape[0], weight.shape[0], seed):
        offsets = offsets_of(assigned, weight.shape[0], x.device)
        actual = _tuple(grouped(x, weight, offsets))
        ends = offsets.tolist()
        for expert, (begin, end) in enumerate(itertools.pairwise(ends)):
            if begin < end:
                expected = _tuple(linear(x[begin:end], weight[expert]))
                assert_bitwise(tuple(a[begin:end] for a in actual), expected, f"{name}: rows of expert {expert}")


def _tuple(value) -> tuple:
    return tuple(value) if isinstance(value, tuple | list) else (value,)
