"""What a GPU does around a forward, in few small kernels: a step is read from the host's memory; its ids, what they are
embedded as and its pages are gathered; the rows that are drawn after are taken out; what was drawn is noted, with the
host too. Torch has a kernel or two for each of these, every one of which takes longer than its work does. Bytes are
moved and nothing is computed: they are what torch's would be.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from vexact_ops.patch.batch import sent

_MOST_ROWS = 128  # of a chunk: a token and its draft, of at most MAX_DRAFT_TOKENS


@functools.cache
def _early(device: torch.device) -> dict:
    """Launch options: where the GPU can, a kernel is brought up while the one before it comes to its end."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (9, 0):
        return {"PDL": False}
    return {"PDL": True, "launch_pdl": True}


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


def _on(device: torch.device) -> contextlib.AbstractContextManager:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@triton.jit
def _begin(PDL: tl.constexpr):
    """Before any access to memory: waits until all that came before in the stream is done and can be seen."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit(do_not_specialize=["first", "count", "pages"])
def _receive_kernel(host, words, table, first, count, pages, BLOCK: tl.constexpr, PDL: tl.constexpr):
    _begin(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    host += first
    tl.store(words + first + at, tl.load(host + at, mask=at < count), mask=at < count)
    where = tl.load(host + count + at, mask=at < pages, other=0)
    page = tl.load((host + count + pages).to(tl.pointer_type(tl.int32)) + at, mask=at < pages)
    tl.store(table + where, page, mask=at < pages)


@triton.jit(do_not_specialize=["tokens", "sequences"])
def _inputs_kernel(
    words, sources, ids, embedding, embedded, slots, table, pages, tokens, sequences, width, embedding_stride,
    table_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = part * BLOCK + tl.arange(0, BLOCK)
    if row < tokens:
        token = tl.maximum(tl.load(words + tl.load(sources + row)), 0)
        if part == 0:
            tl.store(ids + row, token)
        if WIDTH > 0:
            x = tl.load(embedding + token * embedding_stride + at, mask=at < WIDTH)
            tl.store(embedded + row * WIDTH + at, x, mask=at < WIDTH)
    if row < sequences:
        page = tl.load(table + tl.load(slots + row) * table_stride + at, mask=at < width)
        tl.store(pages + row * width + at, page, mask=at < width)


@triton.jit(do_not_specialize=["tokens", "entries"])
def _windowed_kernel(
    beside, places, table, own_places, own_table, tokens, entries, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(places + at, mask=at < tokens, other=-1)
    stored = (at < tokens) & (place >= 0)
    page = tl.load(beside + place // PAGE, mask=stored, other=0).to(tl.int64)
    tl.store(own_places + at, tl.where(stored, page * PAGE + place % PAGE, place), mask=at < tokens)
    page = tl.load(table + at, mask=at < entries, other=0)
    tl.store(own_table + at, tl.load(beside + page, mask=at < entries), mask=at < entries)


@triton.jit
def _take_kernel(source, rows, target, WIDTH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    _begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(source + tl.load(rows + row) * WIDTH + at, mask=at < WIDTH)
    tl.store(target + row * WIDTH + at, x, mask=at < WIDTH)


@triton.jit(do_not_specialize=["chunks", "ids", "positions", "places", "context", "draws", "facts", "apart"])
def _settle_kernel(
    words, drawn, table, chunks, ids, positions, places, context, draws, facts, apart, table_stride, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    _begin(PDL)
    chunk, lane = tl.program_id(0), tl.arange(0, BLOCK)
    own = (words + facts).to(tl.pointer_type(tl.int32)) + 8 * chunk  # as follow.py has it: FACTS
    tokens = (words + facts).to(tl.pointer_type(tl.int32)) + 8 * chunks
    drawn += tl.load(own)
    drafted = tl.load(own + 2)
    draft = tl.load(tokens + tl.load(own + 1) + lane, mask=lane < drafted, other=0)
    alike = (lane < drafted) & (tl.load(drawn + lane, mask=lane < drafted, other=-1) == draft)
    right = tl.min(tl.where(alike, BLOCK, lane), 0)
    row, there = tl.load(own + 3) + lane, lane < tl.load(own + 4)
    window = tokens + tl.load(own + 5) + right - 1
    token = tl.load(window + lane, mask=there & (lane > 0), other=0).to(tl.int64)
    tl.store(words + ids + row, tl.where(lane > 0, token, tl.load(drawn + right)), mask=there)
    position = tl.load(own + 6) + right + lane
    page = tl.load(table + tl.load(own + 7).to(tl.int64) * table_stride + position // PAGE, mask=there, other=0)
    tl.store(words + places + row, page.to(tl.int64) * PAGE + position % PAGE, mask=there)
    turned = words + positions + row
    tl.store(turned, tl.load(turned, mask=there, other=0) + right, mask=there)
    counted = words + draws + row
    tl.store(counted, tl.load(counted, mask=there, other=0) + right, mask=there)
    keys = (words + context).to(tl.pointer_type(tl.int32)) + tl.where(apart != 0, row, chunk)
    each = there & ((lane == 0) | (apart != 0))
    tl.store(keys, tl.load(keys, mask=each, other=0) + right, mask=each)


@triton.jit(do_not_specialize=["rows"], do_not_specialize_on_alignment=["ids", "values", "raw_values"])
def _keep_kernel(
    slots, ids, values, raw_values, last, newest, address, rows, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    _begin(PDL)
    drawn = tl.load(address).to(tl.pointer_type(tl.int32))
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = row < rows
    token = tl.load(ids + row, mask=there, other=0)
    tl.store(last + tl.load(slots + row, mask=there, other=0), token, mask=there)
    tl.store(newest + row, token, mask=there)
    tl.store(drawn.to(tl.pointer_type(tl.int64)) + row, token, mask=there)
    value = tl.load(values + row, mask=there, other=0.0)
    raw = tl.load(raw_values + row, mask=there, other=0.0)
    tl.store(drawn + 2 * rows + row, value.to(tl.int32, bitcast=True), mask=there)
    tl.store(drawn + 3 * rows + row, raw.to(tl.int32, bitcast=True), mask=there)


@triton.jit(do_not_specialize=["count", "source", "target"])
def _copy_kernel(
    table, rows, count, source, target, WORD: tl.constexpr, LINE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """LINE: bytes that all begins at a multiple of, so that words are copied as many at a time as are in one."""
    _begin(PDL)
    copy, piece = tl.program_id(0), table + tl.program_id(1) * 5  # as copies_of has it
    old, new = tl.load(rows + source * count + copy), tl.load(rows + target * count + copy)
    old = tl.load(piece + 2 * source) + old * tl.load(piece + 2 * source + 1)
    new = tl.load(piece + 2 * target) + new * tl.load(piece + 2 * target + 1)
    old, new = old.to(tl.pointer_type(WORD)), new.to(tl.pointer_type(WORD))
    words = tl.multiple_of(tl.load(piece + 4), LINE // (WORD.primitive_bitwidth // 8))
    for start in range(0, words, BLOCK):
        at = start + tl.arange(0, BLOCK)
        value = tl.load(tl.multiple_of(old + at, LINE), mask=at < words)
        tl.store(tl.multiple_of(new + at, LINE), value, mask=at < words)


def receive(host: Tensor, words: Tensor, table: Tensor, first: int, end: int, pages: int) -> None:
    """words[first:end] = host[first:end]. Behind these `host` has so many places of `table` as one row, and as int32
    what goes there. It is memory of the host, pinned."""
    with _on(words.device):
        _receive_kernel[(_cdiv(max(end - first, pages), 256),)](
            host, words, table, first, end - first, pages, BLOCK=256, num_warps=4, **_early(words.device)
        )


def inputs(
    words: Tensor, sources: Tensor, table: Tensor, slots: Tensor, width: int, embedding: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """words[sources], 0 where that is less; the first columns of table[slots]; and where there is an embedding, its
    rows of these ids."""
    tokens, sequences = len(sources), len(slots)
    ids, pages = torch.empty_like(sources), table.new_empty(sequences, width)
    size = 0 if embedding is None else embedding.shape[1]
    embedded = embedding.new_empty(tokens, size) if size else None
    with _on(words.device):
        _inputs_kernel[(max(tokens, sequences), _cdiv(max(width, size), 1024))](
            words, sources, ids, embedding, embedded, slots, table, pages, tokens, sequences, width,
            size and embedding.stride(0), table.stride(0), WIDTH=size, BLOCK=1024, num_warps=4,
            **_early(words.device),
        )  # fmt: skip
    return ids, pages, embedded


def windowed(beside: Tensor, places: Tensor, table: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """Places and pages of layers with a window, given what stands beside each page; a place that is none stays so."""
    own_places, own_table = torch.empty_like(places), torch.empty_like(table)
    tokens, entries = places.numel(), table.numel()
    with _on(places.device):
        _windowed_kernel[(_cdiv(max(tokens, entries), 512),)](
            beside, places, table, own_places, own_table, tokens, entries, PAGE=page_size, BLOCK=512, num_warps=4,
            **_early(places.device),
        )  # fmt: skip
    return own_places, own_table


def take(source: Tensor, rows: Tensor, target: Tensor) -> None:
    """target[:] = source[rows]; both contiguous."""
    width = source.shape[1]
    with _on(source.device):
        _take_kernel[(len(rows), _cdiv(width, 1024))](
            source, rows, target, WIDTH=width, BLOCK=1024, num_warps=4, **_early(source.device)
        )


def settle(
    words: Tensor,
    drawn: Tensor,
    table: Tensor,
    chunks: int,
    ids: int,
    positions: int,
    places: int,
    context: int,
    draws: int,
    facts: int,
    apart: bool,
    page_size: int,
) -> None:
    """Of a step behind drafts, what `settle` of follow.py does: `facts` of so many chunks, and the columns, begin where
    these say in `words`, and `draws` are the positions of its draws."""
    with _on(words.device):
        _settle_kernel[(chunks,)](
            words, drawn, table, chunks, ids, positions, places, context, draws, facts, int(apart), table.stride(0),
            PAGE=page_size, BLOCK=_MOST_ROWS, num_warps=4, **_early(words.device),
        )  # fmt: skip


def keep(
    slots: Tensor, ids: Tensor, values: Tensor, raw_values: Tensor, last: Tensor, newest: Tensor, address: Tensor
) -> None:
    """last[slots] = ids and newest[: len(ids)] = ids; where `address` says, the bytes of ids, values and raw values."""
    rows = len(ids)
    with _on(ids.device):
        _keep_kernel[(_cdiv(rows, 128),)](
            slots, ids, values, raw_values, last, newest, address, rows, BLOCK=128, num_warps=4, **_early(ids.device)
        )


_PIECE = 1 << 15  # bytes, at most, that a program copies


class Copies(NamedTuple):
    """Rows of tensors, and those of others of the same shapes, as the copying kernel takes them.

    table   (pieces of a row, 5) int64: address and distance of rows, in bytes, of the ones and of the others; words
    word    what a piece is copied as
    line    bytes that all of them begin at a multiple of
    """

    table: Tensor
    word: tl.dtype
    line: int


def copies_of(pairs: Sequence[tuple[Tensor, Tensor]]) -> Copies:
    """Of tensors as they lie now, all on one device, each row contiguous."""
    sizes = [one[0].nbytes for one, _ in pairs]
    rows = [[(t.data_ptr(), t.stride(0) * t.element_size()) for t in pair] for pair in pairs]
    line = math.gcd(16, *sizes, *(number for pair in rows for row in pair for number in row))
    word = _WORDS[min(line, 8)]
    pieces = [
        (one + begin, one_row, other + begin, other_row, min(size - begin, _PIECE) // min(line, 8))
        for ((one, one_row), (other, other_row)), size in zip(rows, sizes)
        for begin in range(0, size, _PIECE)
    ]
    return Copies(sent(torch.tensor(pieces, dtype=torch.int64), pairs[0][0].device), word, line)


_WORDS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}


def copy(copies: Copies, rows: Tensor, back: bool) -> None:
    """Of each tensor row rows[0] of the ones to row rows[1] of the others, or `back`; for all of `rows` (2, copies)."""
    count, pieces = rows.shape[1], copies.table.shape[0]
    with _on(rows.device):
        _copy_kernel[(count, pieces)](
            copies.table, rows, count, int(back), int(not back), WORD=copies.word, LINE=copies.line, BLOCK=1024,
            num_warps=4, **_early(rows.device),
        )  # fmt: skip
