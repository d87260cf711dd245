"""Inputs for attention: packed sequences whose outputs cancel, and the pages that hold their keys."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


def offsets(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """(B + 1,) int32: where each sequence begins, and the end."""
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0).to(torch.int32).to(device)


def attention_inputs(
    lengths: Sequence[int],
    hq: int,
    hk: int,
    d: int,
    dv: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> tuple[Tensor, Tensor, Tensor]:
    """q (T, Hq, D), k (T, Hk, D), v (T, Hk, Dv) for packed sequences. Half the keys repeat another one's key with the
    negated value, over 17 binades, so that outputs cancel and a changed order shows even after rounding to bf16."""
    g = torch.Generator().manual_seed(seed)
    shapes = (hq, d), (hk, d), (hk, dv)
    q, k, v = (torch.randn(sum(lengths), *shape, dtype=torch.float32, generator=g) for shape in shapes)
    v = v * torch.exp2(torch.randint(-8, 9, v.shape, generator=g).float())
    begin = 0
    for length in lengths:
        order = begin + torch.randperm(length, generator=g)
        first, second = order[: length // 2], order[length // 2 : length // 2 * 2]
        k[second], v[second] = k[first], -v[first]
        begin += length
    return tuple(x.to(dtype).to(device) for x in (q, k, v))


@dataclass
class Pages:
    """A paged cache for sequences of known lengths in shuffled pages, with NaN wherever no key has been put yet."""

    k_cache: Tensor
    v_cache: Tensor
    block_table: Tensor
    slots: Tensor  # of every token of the packed sequences

    @classmethod
    def of(cls, k: Tensor, v: Tensor, lengths: Sequence[int], page_size: int, seed: int = 0) -> "Pages":
        """Empty pages for keys like k and values like v, and some that no sequence owns."""
        needed = [-(-length // page_size) for length in lengths]
        order = torch.randperm(sum(needed) + 3, generator=torch.Generator().manual_seed(seed)).to(torch.int32)
        table = torch.full((len(lengths), max([*needed, 1]) + 1), -7, dtype=torch.int32)  # not a page
        slots = []
        for row, pages, length in zip(table, order.split([*needed, 3]), lengths):
            row[: len(pages)] = pages
            place = torch.arange(length)
            slots.append(pages[place // page_size].long() * page_size + place % page_size)
        caches = (x.new_full((len(order), page_size, *x.shape[1:]), float("nan")) for x in (k, v))
        return cls(*caches, table.to(k.device), torch.cat([*slots, torch.empty(0, dtype=torch.long)]).to(k.device))

    def put(self, k: Tensor, v: Tensor, tokens: Tensor | None = None) -> "Pages":
        """Store these rows of k and v (by default all of them), packed as the sequences are."""
        tokens = torch.arange(len(k), device=k.device) if tokens is None else tokens
        for cache, x in ((self.k_cache, k), (self.v_cache, v)):
            cache.flatten(0, 1)[self.slots[tokens]] = x[tokens]
        return self
