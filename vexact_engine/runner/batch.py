"""What a forward computes, as tensors: passed on explicitly, kept nowhere."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import vexact_ops as vx

from .memory import Caches


@dataclass(slots=True)
class Batch:
    """T tokens of some sequences.

    input_ids, positions   (T,) int64, the sequences one after another
    paged                  where their keys and values are, and whose tokens they are
    rows                   (R,) int64, the tokens whose final hidden states are wanted; None: all. Behind attention the
                           last layer has nothing to do for others, so of a prompt it computes hardly more than keys and
                           values
    embedded               (T, H) the embedding's rows of input_ids, where they have been gathered with them
    axes                   (3, T) int64 places of a step with tokens of images; None: all tokens have one place on all
    images                 what stands among the tokens, and is added to them behind the first layers
    apart                  tokens of one sequence stand as sequences of one token each
    """

    input_ids: Tensor
    positions: Tensor
    paged: vx.patch.PagedBatch
    rows: Tensor | None = None
    embedded: Tensor | None = None
    axes: Tensor | None = None
    images: vx.patch.Encoded | None = None
    apart: bool = False


def leading_singles(lengths: np.ndarray) -> int:
    """How many sequences have one row before the first that has not."""
    others = np.flatnonzero(lengths != 1)
    return int(others[0]) if len(others) else len(lengths)


def rows_of(x: Tensor, rows: Tensor | None) -> Tensor:
    return x if rows is None else x.index_select(0, rows)


def plain(
    caches: Caches,
    tables: Sequence[Sequence[int]],
    spans: Sequence[tuple[int, int]],
    input_ids=0,
    store: bool = True,
    owners: Sequence[int] | None = None,
) -> Batch:
    """A batch by hand.

    tables      pages of each sequence
    spans       first position and the one behind the last, of each
    input_ids   (T,), or one id for all
    store       whether keys and values are stored
    owners      each sequence's slot, where there are states; None: in their order
    """
    device = next(caches.tensors()).device
    page_size = next((cache.shape[1] for cache in caches.keys if cache is not None), max(end for _, end in spans))
    lengths = np.array([end - start for start, end in spans])
    cu = np.cumsum([0, *lengths])
    positions = np.concatenate([np.arange(*span) for span in spans])
    table = np.zeros((len(tables), max(map(len, tables))), np.int32)
    for row, pages in enumerate(tables):
        table[row, : len(pages)] = pages
    slots = np.full(len(positions), -1)
    if store:
        owner = np.repeat(np.arange(len(spans)), lengths)
        slots = table[owner, positions // page_size].astype(np.int64) * page_size + positions % page_size

    def there(values, dtype=torch.int64) -> Tensor:
        return torch.from_numpy(np.asarray(values)).to(device, dtype)

    ids = torch.full((len(positions),), input_ids, dtype=torch.int64) if isinstance(input_ids, int) else input_ids
    places = slots, table, [end for _, end in spans], cu
    kinds = torch.int64, torch.int32, torch.int32, torch.int32
    paged = vx.patch.PagedBatch(
        caches.keys,
        caches.values,
        *map(there, places, kinds),
        max_seqlen_q=int(lengths.max()),
        states=caches.states,
        state_slots=there(range(len(tables)) if owners is None else owners, torch.int32) if caches.states else None,
        singles=leading_singles(lengths),
    )
    return Batch(ids.to(device), there(positions), paged)
