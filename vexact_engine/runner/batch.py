"""What one step computes, as tensors: made from a StepPlan, passed on explicitly, kept nowhere.

Host time counts here: a decode step of a small model takes a few milliseconds. Page tables are kept per sequence and
only ever extended, everything per token is computed by NumPy for all tokens at once, and a GPU gets one copy.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import vexact_ops as vx

from ..config import EngineConfig
from ..core.scheduler import Chunk, StepPlan

_INT64_MAX = 2**63 - 1
_FP32_TINY = float(np.finfo(np.float32).tiny)  # a top_p that fp32 would round to zero keeps the likeliest token too


Caches = tuple[Sequence[Tensor], Sequence[Tensor]]  # of each layer: keys, values


@dataclass(slots=True)
class Sampling:
    """What to draw from: S rows of the step, each with its own parameters.

    rows              (S,) int64: the tokens whose logits are wanted
    seeds, positions  (S,) int64: the sampler's counter: the sample's seed and the place of the drawn token
    temperature, top_p, min_p  (S,) fp32;  top_k (S,) int64
    num_top_logprobs  the most that any of them wants
    """

    rows: Tensor
    seeds: Tensor
    positions: Tensor
    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    num_top_logprobs: int = 0


@dataclass(slots=True)
class Batch:
    """T tokens of some sequences, and what is drawn after them.

    input_ids, positions   (T,) int64, the sequences one after another
    paged                  where their keys and values are, and whose tokens they are
    sampling               of the last tokens of some of them
    """

    input_ids: Tensor
    positions: Tensor
    paged: vx.patch.PagedBatch
    sampling: Sampling


def plain(
    caches: Caches, tables: Sequence[Sequence[int]], spans: Sequence[tuple[int, int]], input_ids=0, store: bool = True
) -> Batch:
    """A batch by hand, with one plain draw after each sequence's last token.

    tables      pages of each sequence
    spans       first position and the one behind the last, of each
    input_ids   (T,), or one id for all
    store       whether keys and values are stored
    """
    device, page_size = caches[0][0].device, caches[0][0].shape[1]
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

    def alike(value, dtype=torch.int64) -> Tensor:
        return torch.full((len(spans),), value, dtype=dtype, device=device)

    ids = torch.full((len(positions),), input_ids, dtype=torch.int64) if isinstance(input_ids, int) else input_ids
    places = slots, table, [end for _, end in spans], cu
    kinds = torch.int64, torch.int32, torch.int32, torch.int32
    return Batch(
        ids.to(device),
        there(positions),
        vx.patch.PagedBatch(*caches, *map(there, places, kinds), max_seqlen_q=int(lengths.max())),
        Sampling(
            there(cu[1:] - 1),
            seeds=alike(0),
            positions=alike(0),
            temperature=alike(1.0, torch.float32),
            top_k=alike(0),
            top_p=alike(1.0, torch.float32),
            min_p=alike(0.0, torch.float32),
        ),
    )


class _Table:
    """A sequence's pages as an array that grows with them, valid for one epoch of the sequence."""

    __slots__ = ("count", "epoch", "pages")

    def __init__(self):
        self.pages, self.count, self.epoch = np.zeros(8, np.int32), 0, -1

    def follow(self, chunk: Chunk) -> np.ndarray:
        pages = chunk.pages
        if self.epoch != chunk.epoch:
            self.epoch, self.count = chunk.epoch, 0
        if self.count < len(pages):
            if len(pages) > len(self.pages):
                grown = np.zeros(2 * len(pages), np.int32)
                grown[: self.count] = self.pages[: self.count]
                self.pages = grown
            self.pages[self.count : len(pages)] = pages[self.count :]
            self.count = len(pages)
        return self.pages


class BatchBuilder:
    """Turns plans into batches on one device. Not thread-safe."""

    def __init__(self, config: EngineConfig, device: torch.device, caches: Caches):
        self.caches = caches
        self.page_size = config.page_size
        self.device = device
        self._tables: dict[
            int, tuple[object, _Table]
        ] = {}  # id -> (the sequence, kept so that the id stays its own, ..)
        self._most_tables = 2 * config.max_num_seqs

    def build(self, plan: StepPlan) -> Batch:
        """The plan's tensors. ValueError for a plan that holds tokens not yet known."""
        chunks = plan.chunks
        starts = np.array([chunk.start for chunk in chunks], np.int64)
        ends = np.array([chunk.end for chunk in chunks], np.int64)
        lengths = ends - starts
        total = int(lengths.sum())
        cu = np.zeros(len(chunks) + 1, np.int64)
        np.cumsum(lengths, out=cu[1:])

        ids: list[int] = []
        for chunk in chunks:
            if chunk.end - chunk.start == 1:
                ids.append(chunk.sequence.tokens[chunk.start])
            else:
                ids += chunk.sequence.tokens[chunk.start : chunk.end]
        if len(ids) != total:
            raise ValueError(f"batch: the plan has {total} tokens, of which {len(ids)} are known")

        pages = (ends + self.page_size - 1) // self.page_size
        table = self._block_table(chunks, int(pages.max()))
        if total == len(chunks):
            owner, positions = np.arange(total), starts
        else:
            owner = np.repeat(np.arange(len(chunks)), lengths)
            positions = np.arange(total) - (cu[:-1] - starts)[owner]
        page, offset = np.divmod(positions, self.page_size)
        slots = table[owner, page].astype(np.int64) * self.page_size + offset

        sampled = [i for i, chunk in enumerate(chunks) if chunk.needs_sample]
        sequences = [chunks[i].sequence for i in sampled]
        params = [sequence.params for sequence in sequences]
        columns = (
            np.array(ids, np.int64),
            positions,
            slots,
            cu[1:][sampled] - 1,
            np.array([sequence.seed for sequence in sequences], np.int64),
            ends[sampled],
            np.array([min(p.top_k, _INT64_MAX) for p in params], np.int64),
            table,
            ends.astype(np.int32),
            cu.astype(np.int32),
            np.array([p.temperature for p in params], np.float32),
            np.array([max(p.top_p, _FP32_TINY) for p in params], np.float32),
            np.array([p.min_p for p in params], np.float32),
        )
        ids, positions, slots, rows, seeds, draws, top_k, table, context, cu, temperature, top_p, min_p = self._send(
            columns
        )
        paged = vx.patch.PagedBatch(*self.caches, slots, table, context, cu, int(lengths.max()))
        most = max((p.num_top_logprobs for p in params), default=0)
        return Batch(
            ids, positions, paged, Sampling(rows, seeds, draws, temperature, top_k, top_p, min_p, num_top_logprobs=most)
        )

    def _block_table(self, chunks: list[Chunk], width: int) -> np.ndarray:
        if len(self._tables) + len(chunks) > self._most_tables:  # some have ended: keep those in use
            used = {id(chunk.sequence) for chunk in chunks}
            self._tables = {key: entry for key, entry in self._tables.items() if key in used}
        table = np.zeros((len(chunks), width), np.int32)
        for row, chunk in enumerate(chunks):
            entry = self._tables.get(id(chunk.sequence))
            if entry is None:
                entry = self._tables[id(chunk.sequence)] = chunk.sequence, _Table()
            pages = entry[1].follow(chunk)[: min(width, len(chunk.pages))]
            table[row, : len(pages)] = pages
        return table

    def _send(self, columns: tuple[np.ndarray, ...]) -> list[Tensor]:
        if self.device.type == "cpu":
            return [torch.from_numpy(column) for column in columns]
        # One pinned buffer and one copy. Columns begin at multiples of 16 bytes, always: Triton compiles a kernel anew
        # for pointers that do not.
        offsets = np.cumsum([0, *(-(-column.nbytes // 16) * 16 for column in columns)])
        buffer = torch.empty(int(offsets[-1]), dtype=torch.uint8, pin_memory=True)
        host = buffer.numpy()
        for column, offset in zip(columns, offsets):
            host[offset : offset + column.nbytes] = np.ascontiguousarray(column).reshape(-1).view(np.uint8)
        there = buffer.to(self.device, non_blocking=True)
        return [
            there[offset : offset + column.nbytes].view(_TORCH[column.dtype]).view(column.shape)
            for column, offset in zip(columns, offsets)
        ]


_TORCH = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}
