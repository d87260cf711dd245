"""The Triton kernels: one forward for training, prefill chunks and decode (they differ in where a key lies, and in
nothing else), and a backward that recomputes the probabilities from the saved log-sum-exp.

A row is one query head at one position. The rows of a group share their keys, so they are tiled together, position by
position, head by head, from the start of their sequence; no tile reaches a row's bits. 16-bit inputs take the
hardware's exponential to the base two, with scores and log-sum-exp in that base; fp32 inputs take our own.

One file because forward and backward share how a tile finds its rows and what a score is.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core.triton import OPTIONS, Launch, block, cdiv, exp, fold_sum, launch, log, on, sum_rows, tanh

KEY_BLOCK = 64  # where the running maximum may move, and where a segment may end
# That a tile looks through at a time for the one it belongs to; no bit depends on it. One number for all: kernels are
# compiled for it, some seconds each, and an engine's start meets steps of any number of sequences.
SEQUENCES = 256
LOG2_E = 1.4426950408889634
# What kernels are not compiled anew for: numbers that differ from call to call, and where indices begin.
PER_CALL = "tokens", "keys", "sequences", "window"
PER_CACHE = *PER_CALL, "pages", "page_size", "table_row", "segment"
INDICES = "offsets_q", "offsets_k", "table", "sinks"

_KEYS = tl.constexpr(KEY_BLOCK)


@triton.jit
def _exp(x, BASE_2: tl.constexpr):
    if BASE_2:
        y = tl.exp2(x)
    else:
        y = exp(x)
    return y


@triton.jit
def _finite_or_zero(m):
    return tl.where(m == float("-inf"), 0.0, m)  # so that -inf - -inf is never formed


@triton.jit
def _score(s, scale, softcap, CAP: tl.constexpr, BASE_2: tl.constexpr):
    """From a product of query and key to what is exponentiated, and tanh of the capped score."""
    th = s
    if CAP:
        th = tanh(tl.div_rn(s * scale, tl.zeros_like(s) + softcap))
        z = th * (softcap * 1.4426950408889634 if BASE_2 else softcap)
    else:
        z = s * scale  # which holds log2(e) already
    return z, th


@triton.jit
def _find(offsets, limit, sequences, tile, ROWS: tl.constexpr, TILE: tl.constexpr, SEQUENCES: tl.constexpr):
    """The sequence of a tile, its rows, and the tile's number in it, the last one first: (sequence, begin, length, n).

    Sequences have `ROWS` rows for every step of their offsets; a tile never holds rows of two. Offsets beyond `limit`,
    or that descend, are a caller's error; they are kept from reaching memory that is not ours."""
    none = tl.full([], 0, tl.int32)
    sequence, first, rows, last, before = none, none, none, none, none
    for start in range(0, sequences, SEQUENCES):
        b = start + tl.arange(0, SEQUENCES)
        begin = tl.load(offsets + b, mask=b < sequences, other=0)
        end = tl.load(offsets + b + 1, mask=b < sequences, other=0)
        begin = tl.minimum(tl.maximum(begin, 0), limit)
        length = tl.maximum(tl.minimum(end, limit) - begin, 0)
        tiles = (length * ROWS + TILE - 1) // TILE
        until = before + tl.cumsum(tiles, 0)
        sequence += tl.sum(((until <= tile) & (b < sequences)).to(tl.int32), 0)
        here = (until > tile) & (until - tiles <= tile)  # one at most, of all sequences
        first += tl.sum(tl.where(here, begin, 0), 0)
        rows += tl.sum(tl.where(here, length, 0), 0)
        last += tl.sum(tl.where(here, until - 1, 0), 0)
        before += tl.sum(tiles, 0)
    first = tl.minimum(tl.maximum(first, 0), limit)
    rows = tl.minimum(tl.maximum(rows, 0), limit - first)
    number = tl.minimum(tl.maximum(last - tile, 0), (rows * ROWS + TILE - 1) // TILE)  # whatever the offsets are
    return sequence, first, rows, number


@triton.jit
def _extent(offsets, sequence, limit):
    """Where a sequence's keys begin, and how many they are."""
    begin = tl.minimum(tl.maximum(tl.load(offsets + sequence), 0), limit)
    return begin, tl.maximum(tl.minimum(tl.load(offsets + sequence + 1), limit) - begin, 0)


class Strides(NamedTuple):
    """Of a forward's tensors. Without pages k_page and v_page are 0."""

    q_row: int
    q_head: int
    k_page: int
    k_row: int
    k_head: int
    v_page: int
    v_row: int
    v_head: int


class RowStrides(NamedTuple):
    """Of a backward's tensors, which has no pages."""

    q_row: int
    q_head: int
    k_row: int
    k_head: int
    v_row: int
    v_head: int


class Queries(NamedTuple):
    """A tile's rows, or where wide ones begin; which there are; and their places among the keys."""

    x: Any
    live: Any
    place: Any


class Keys(NamedTuple):
    """One head's keys and values of a sequence: rows from `begin` on, or in the pages of a table."""

    k: Any
    v: Any
    begin: Any
    table: Any
    pages: Any
    page_size: Any
    strides: Strides


class Span(NamedTuple):
    """Keys of [lo, hi); every row sees those from whole_from to whole_to; those before `left` have left every row's
    window."""

    lo: Any
    hi: Any
    whole_from: Any
    whole_to: Any
    left: Any


class Scoring(NamedTuple):
    scale: Any
    softcap: Any
    window: Any


@triton.jit
def _locate(j, live, keys, PAGED: tl.constexpr):
    """Offsets of keys and values of these places, and which of them are there."""
    if PAGED:
        page = tl.load(keys.table + j // keys.page_size, mask=live, other=0).to(tl.int64)
        live = live & (page >= 0) & (page < keys.pages)
        inside = (j % keys.page_size).to(tl.int64)
        k_at = page * keys.strides.k_page + inside * keys.strides.k_row
        v_at = page * keys.strides.v_page + inside * keys.strides.v_row
    else:
        row = (keys.begin + j).to(tl.int64)
        k_at = row * keys.strides.k_row
        v_at = row * keys.strides.v_row
    return k_at, v_at, live


@triton.jit
def _unseen_values(p, seen, v, acc):
    """acc + p @ v where some values are not finite: those that a row does not see leave it alone (0 times Inf is NaN),
    those that it sees act as in a plain product."""
    x, weight = v.to(tl.float32), p.to(tl.float32)
    finite = x - x == 0.0
    sane = tl.dot(p, tl.where(finite, x, 0.0).to(v.dtype), acc, input_precision="ieee")
    none = tl.zeros_like(acc)
    some = tl.where(seen & (weight > 0.0), 1.0, 0.0).to(v.dtype)
    lost = tl.where(seen & ((weight == 0.0) | (weight != weight)), 1.0, 0.0).to(v.dtype)
    up = tl.dot(some, tl.where(x == float("inf"), 1.0, 0.0).to(v.dtype), none, input_precision="ieee") > 0.0
    down = tl.dot(some, tl.where(x == float("-inf"), 1.0, 0.0).to(v.dtype), none, input_precision="ieee") > 0.0
    nan = tl.dot(some, tl.where(x != x, 1.0, 0.0).to(v.dtype), none, input_precision="ieee") > 0.0
    nan = nan | (tl.dot(lost, tl.where(finite, 0.0, 1.0).to(v.dtype), none, input_precision="ieee") > 0.0)
    out = tl.where(up, sane + float("inf"), sane)
    out = tl.where(down, out + float("-inf"), out)
    return tl.where(nan, float("nan"), out)


@triton.jit
def _blocks(
    m, norm, acc, nonfinite, queries, keys, span, scoring,
    D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, CAP: tl.constexpr, BASE_2: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and output after the keys of a span, and whether a value was not finite that some row
    may not see. Values of keys before `left` are not read: 0 times NaN is NaN."""
    lo, hi, whole_from, whole_to, left = span
    q, live_q, place = queries
    k, v = keys.k, keys.v
    d, dv = tl.arange(0, DP), tl.arange(0, DVP)
    for k0 in range(lo, hi, _KEYS):  # order: keys ascending in blocks of 64
        j = k0 + tl.arange(0, _KEYS)
        k_at, v_at, live = _locate(j, j < hi, keys, PAGED)
        if DP > 256:
            s = tl.zeros([q.shape[0], _KEYS], tl.float32)
            for d0 in range(0, D, 64):  # order: D ascending, one accumulator
                part = d0 + tl.arange(0, 64)
                x = tl.load(q[:, None] + part[None, :], mask=live_q[:, None] & (part < D)[None, :], other=0.0)
                kt = tl.load(k + k_at[None, :] + part[:, None], mask=live[None, :] & (part < D)[:, None], other=0.0)
                s = tl.dot(x, kt, s, input_precision="ieee")
        else:
            if D == DP:
                kt = tl.load(k + k_at[None, :] + d[:, None], mask=live[None, :], other=0.0)
            else:
                kt = tl.load(k + k_at[None, :] + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0)
            s = tl.dot(q, kt, input_precision="ieee")  # order: D ascending, one accumulator
        z, _ = _score(s, scoring.scale, scoring.softcap, CAP, BASE_2)
        seen = (j < hi)[None, :]
        if CAUSAL:
            seen = seen & (j[None, :] <= place[:, None])
        if WINDOW:
            seen = seen & (j[None, :] > place[:, None] - scoring.window)
        z = tl.where(seen, z, float("-inf"))
        high = tl.maximum(m, tl.max(z, axis=1))
        base = _finite_or_zero(high)
        kept = _exp(m - base, BASE_2)
        p = _exp(z - base[:, None], BASE_2)
        norm = tl.fma(norm, kept, fold_sum(p))  # order: a block's probabilities in a tree of halves
        m = high
        p = p.to(v.dtype.element_ty)
        acc = acc * kept[:, None]
        if WINDOW:
            live = live & (j >= left)
        if DV == DVP:
            values = tl.load(v + v_at[:, None] + dv[None, :], mask=live[:, None], other=0.0)
        else:
            values = tl.load(v + v_at[:, None] + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0)
        if CAREFUL:
            acc = _unseen_values(p, seen, values, acc)
        else:
            acc = tl.dot(p, values, acc, input_precision="ieee")  # order: keys ascending, one accumulator
            if (whole_to < k0 + _KEYS) | (k0 < whole_from):
                size = tl.abs(values.to(tl.float32))
                nonfinite = tl.maximum(nonfinite, tl.max(tl.max(tl.where(size < float("inf"), 0, 1), axis=1), axis=0))
    return m, norm, acc, nonfinite


@triton.jit(do_not_specialize=PER_CACHE, do_not_specialize_on_alignment=INDICES)
def _fwd_kernel(
    q, k, v, out, lse, sinks, nonfinite_tiles, offsets_q, offsets_k, table, tokens, keys, sequences, pages, page_size,
    table_row, strides, scale, softcap, window, segment,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr,
    SEQUENCES: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
    SINKS: tl.constexpr, SEGMENT: tl.constexpr, BASE_2: tl.constexpr, LSE: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """offsets_k: cumulative, as offsets_q; with PAGED, the lengths themselves. A first launch notes the tiles where a
    value that is not finite may have reached a row that does not see it; a CAREFUL one makes those again."""
    sequence, q_begin, q_len, number = _find(offsets_q, tokens, sequences, tl.program_id(0), GROUP, TILE, SEQUENCES)
    nonfinite_tiles += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    wanted = sequence < sequences
    if CAREFUL:
        wanted = wanted & (tl.load(nonfinite_tiles) > 0)
    if wanted:
        if PAGED:
            begin, k_len = 0, tl.minimum(tl.load(offsets_k + sequence), keys)
            table += sequence.to(tl.int64) * table_row
        else:
            begin, k_len = _extent(offsets_k, sequence, keys)
        kv_head = tl.program_id(1).to(tl.int64)
        row = number * TILE + tl.arange(0, TILE)
        position = row // GROUP
        live = position < q_len
        token = (q_begin + position).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        place = k_len - q_len + position
        d, dv = tl.arange(0, DP), tl.arange(0, DVP)
        if DP > 256:  # fetched part by part, with each block of keys
            x = q + token * strides.q_row + head * strides.q_head
        else:
            inside = live[:, None] & (d < D)[None, :]
            at = q + token[:, None] * strides.q_row + head[:, None] * strides.q_head
            x = tl.load(at + d[None, :], mask=inside, other=0.0)
        k += kv_head * strides.k_head
        v += kv_head * strides.v_head

        place_first = k_len - q_len + number * TILE // GROUP
        place_last = k_len - q_len + tl.minimum((number * TILE + TILE - 1) // GROUP, q_len - 1)
        lo, hi, whole_from, whole_to, left = 0, k_len, 0, k_len, 0
        if CAUSAL:
            hi = tl.maximum(tl.minimum(k_len, place_last + 1), 0)
            whole_to = tl.maximum(tl.minimum(k_len, place_first + 1), 0)
        whole_to = whole_to // _KEYS * _KEYS
        if WINDOW:
            left = tl.maximum(place_first + 1 - window, 0)
            lo = left // _KEYS * _KEYS
            whole_from = (tl.maximum(place_last + 1 - window, 0) + _KEYS - 1) // _KEYS * _KEYS

        m = tl.full([TILE], float("-inf"), tl.float32)
        norm = tl.zeros([TILE], tl.float32)
        acc = tl.zeros([TILE, DVP], tl.float32)
        nonfinite = tl.full([], 0, tl.int32)
        queries, scoring = Queries(x, live, place), Scoring(scale, softcap, window)
        seen_keys = Keys(k, v, begin, table, pages, page_size, strides)
        if SEGMENT:
            high, total, sum_acc = m, norm, acc
            for start in range(lo // segment * segment, hi, segment):
                m, norm, acc, nonfinite = _blocks(
                    tl.full([TILE], float("-inf"), tl.float32), tl.zeros([TILE], tl.float32),
                    tl.zeros([TILE, DVP], tl.float32), nonfinite, queries, seen_keys,
                    Span(tl.maximum(lo, start), tl.minimum(hi, start + segment), whole_from, whole_to, left), scoring,
                    D, DV, DP, DVP, PAGED, CAUSAL, WINDOW, CAP, BASE_2, CAREFUL,
                )  # fmt: skip
                top = tl.maximum(high, m)
                before, after = _exp(high - _finite_or_zero(top), BASE_2), _exp(m - _finite_or_zero(top), BASE_2)
                high = top
                total = tl.fma(total, before, norm * after)  # order: segments join those before them, ascending
                sum_acc = tl.fma(sum_acc, tl.broadcast_to(before[:, None], acc.shape), acc * after[:, None])
            m, norm, acc = high, total, sum_acc
        else:
            m, norm, acc, nonfinite = _blocks(
                m, norm, acc, nonfinite, queries, seen_keys, Span(lo, hi, whole_from, whole_to, left), scoring,
                D, DV, DP, DVP, PAGED, CAUSAL, WINDOW, CAP, BASE_2, CAREFUL,
            )  # fmt: skip
        if not CAREFUL:
            tl.store(nonfinite_tiles, nonfinite.to(tl.int8))

        any_key = k_len > 0
        if CAUSAL:
            any_key = any_key & (place >= 0)
        if SINKS:  # order: the sink joins the denominator last
            sink = tl.load(sinks + head, mask=live, other=0.0)
            if BASE_2:
                sink = sink * 1.4426950408889634
            high = tl.maximum(m, sink)
            base = _finite_or_zero(high)
            kept = _exp(m - base, BASE_2)
            norm = tl.fma(norm, kept, _exp(sink - base, BASE_2))
            acc = acc * kept[:, None]
            m = high
        else:
            norm = tl.where(any_key, norm, 1.0)
        # + 0: whether a row met blocks that it does not see, which turn -0 into 0, must not show
        y = tl.div_rn(acc + 0.0, tl.broadcast_to(norm[:, None], acc.shape))
        at = token * tl.num_programs(1) * GROUP + head
        inside = live[:, None] & (dv < DV)[None, :]
        tl.store(out + at[:, None] * DV + dv[None, :], y.to(out.dtype.element_ty), mask=inside)
        if LSE:
            whole = m + (tl.log2(norm) if BASE_2 else log(norm))
            if not SINKS:
                whole = tl.where(any_key, whole, float("-inf"))
            tl.store(lse + at, whole, mask=live)


@triton.jit(do_not_specialize=["rows"])
def _delta_kernel(out, dout, delta, rows, DV: tl.constexpr, DVP: tl.constexpr, ROWS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    dv = tl.arange(0, DVP)[None, :]
    inside = (row < rows)[:, None] & (dv < DV)
    x = tl.load(out + row[:, None] * DV + dv, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(dout + row[:, None] * DV + dv, mask=inside, other=0.0).to(tl.float32)
    tl.store(delta + row, fold_sum(x * y), mask=row < rows)


@triton.jit(do_not_specialize=["rows"])
def _dsinks_kernel(sinks, lse, delta, parts, rows, HEADS: tl.constexpr, BLOCK: tl.constexpr, BASE_2: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    sink = tl.load(sinks + i % HEADS)
    if BASE_2:
        sink = sink * 1.4426950408889634
    p = _exp(sink - tl.load(lse + i, mask=i < rows, other=0.0), BASE_2)
    tl.store(parts + i, p * tl.load(delta + i, mask=i < rows, other=0.0) * -1.0, mask=i < rows)


@triton.jit
def _gradient_of_scores(s, dp, lse, delta, seen, scale, softcap, CAP: tl.constexpr, BASE_2: tl.constexpr):
    """(p, ds) with what a row does not see at 0; ds lacks the factor of the plain scale."""
    z, th = _score(s, scale, softcap, CAP, BASE_2)
    p = tl.where(seen, _exp(z - lse, BASE_2), 0.0)
    ds = p * (dp - delta)
    if CAP:
        ds = ds * (1.0 - th * th)
    return p, tl.where(seen, ds, 0.0)


@triton.jit
def _seen_product(w, seen, x, acc, CAREFUL: tl.constexpr):
    """acc + w @ x, w 0 where x is not seen; CAREFUL keeps what is not finite from those who do not see it."""
    if CAREFUL:
        wide = x.to(tl.float32)
        finite = wide - wide == 0.0
        acc = tl.dot(w, tl.where(finite, wide, 0.0).to(x.dtype), acc, input_precision="ieee")
        lost = tl.where(finite, 0.0, 1.0).to(x.dtype)
        who = tl.where(tl.broadcast_to(seen, w.shape), 1.0, 0.0).to(x.dtype)
        bad = tl.dot(who, lost, tl.zeros_like(acc), input_precision="ieee")
        acc = tl.where(bad > 0.0, float("nan"), acc)
    else:
        acc = tl.dot(w, x, acc, input_precision="ieee")
    return acc


@triton.jit
def _any_nan(x):
    return tl.max(tl.max(tl.where(x == x, 0, 1), axis=1), axis=0).to(tl.int8)


@triton.jit(do_not_specialize=PER_CALL, do_not_specialize_on_alignment=INDICES)
def _dq_kernel(
    q, k, v, dout, lse, delta, dq, nonfinite_tiles, offsets_q, offsets_k, tokens, keys, sequences,
    strides, scale, plain_scale, softcap, window,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr,
    SEQUENCES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, BASE_2: tl.constexpr,
    KEYS: tl.constexpr, DX: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """A first launch notes the tiles that have NaN: a value that is not finite may have spread to what does not see it;
    a CAREFUL one makes those again. Wide heads come in two parts, of DP and DX columns."""
    sequence, q_begin, q_len, number = _find(offsets_q, tokens, sequences, tl.program_id(0), GROUP, TILE, SEQUENCES)
    nonfinite_tiles += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    wanted = sequence < sequences
    if CAREFUL:
        wanted = wanted & (tl.load(nonfinite_tiles) > 0)
    if wanted:
        begin, k_len = _extent(offsets_k, sequence, keys)
        kv_head = tl.program_id(1).to(tl.int64)
        row = number * TILE + tl.arange(0, TILE)
        position = row // GROUP
        live = position < q_len
        token = (q_begin + position).to(tl.int64)
        head = kv_head * GROUP + row % GROUP
        place = k_len - q_len + position
        d, dv = tl.arange(0, DP), tl.arange(0, DVP)
        at = token * tl.num_programs(1) * GROUP + head
        inside_d, inside_dv = live[:, None] & (d < D)[None, :], live[:, None] & (dv < DV)[None, :]
        x = tl.load(
            q + token[:, None] * strides.q_row + head[:, None] * strides.q_head + d[None, :], mask=inside_d, other=0.0
        )
        if DX:
            d2 = DP + tl.arange(0, DX)
            more = live[:, None] & (d2 < D)[None, :]
            x2 = tl.load(
                q + token[:, None] * strides.q_row + head[:, None] * strides.q_head + d2[None, :], mask=more, other=0.0
            )
            acc2 = tl.zeros([TILE, DX], tl.float32)
        do = tl.load(dout + at[:, None] * DV + dv[None, :], mask=inside_dv, other=0.0)
        row_lse = tl.load(lse + at, mask=live, other=float("inf"))[:, None]
        row_delta = tl.load(delta + at, mask=live, other=0.0)[:, None]
        k += kv_head * strides.k_head
        v += kv_head * strides.v_head
        lo, hi = 0, k_len
        if CAUSAL:
            last = k_len - q_len + tl.minimum((number * TILE + TILE - 1) // GROUP, q_len - 1)
            hi = tl.maximum(tl.minimum(k_len, last + 1), 0)
        if WINDOW:
            lo = tl.maximum(k_len - q_len + number * TILE // GROUP + 1 - window, 0) // KEYS * KEYS
        acc = tl.zeros([TILE, DP], tl.float32)
        for k0 in range(lo, hi, KEYS):  # order: keys ascending, one accumulator
            j = k0 + tl.arange(0, KEYS)
            there = j < hi
            at_k = (begin + j).to(tl.int64) * strides.k_row
            at_v = (begin + j).to(tl.int64) * strides.v_row
            rows = tl.load(k + at_k[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
            vt = tl.load(v + at_v[None, :] + dv[:, None], mask=there[None, :] & (dv < DV)[:, None], other=0.0)
            s = tl.dot(x, tl.trans(rows), input_precision="ieee")
            if DX:
                rows2 = tl.load(k + at_k[:, None] + d2[None, :], mask=there[:, None] & (d2 < D)[None, :], other=0.0)
                s = tl.dot(x2, tl.trans(rows2), s, input_precision="ieee")
            dp = tl.dot(do, vt, input_precision="ieee")
            seen = there[None, :]
            if CAUSAL:
                seen = seen & (j[None, :] <= place[:, None])
            if WINDOW:
                seen = seen & (j[None, :] > place[:, None] - window)
            _, ds = _gradient_of_scores(s, dp, row_lse, row_delta, seen, scale, softcap, CAP, BASE_2)
            acc = _seen_product(ds.to(rows.dtype), seen, rows, acc, CAREFUL)
            if DX:
                acc2 = _seen_product(ds.to(rows.dtype), seen, rows2, acc2, CAREFUL)
        nonfinite = _any_nan(acc)
        if DX:
            nonfinite = tl.maximum(nonfinite, _any_nan(acc2))
            tl.store(dq + at[:, None] * D + d2[None, :], (acc2 * plain_scale).to(dq.dtype.element_ty), mask=more)
        if not CAREFUL:
            tl.store(nonfinite_tiles, nonfinite)
        y = (acc * plain_scale).to(dq.dtype.element_ty)
        tl.store(dq + at[:, None] * D + d[None, :], y, mask=inside_d)


@triton.jit(do_not_specialize=PER_CALL, do_not_specialize_on_alignment=INDICES)
def _dkv_kernel(
    q, k, v, dout, lse, delta, dk, dv_out, nonfinite_tiles, offsets_q, offsets_k, tokens, keys, sequences,
    strides, scale, plain_scale, softcap, window,
    GROUP: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, DP: tl.constexpr, DVP: tl.constexpr, TILE: tl.constexpr,
    SEQUENCES: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, BASE_2: tl.constexpr,
    KEYS: tl.constexpr, DX: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """A first launch notes the tiles that have NaN: a value that is not finite may have spread to what does not see it;
    a CAREFUL one makes those again."""
    sequence, begin, k_len, number = _find(offsets_k, keys, sequences, tl.program_id(0), 1, KEYS, SEQUENCES)
    nonfinite_tiles += tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)
    wanted = sequence < sequences
    if CAREFUL:
        wanted = wanted & (tl.load(nonfinite_tiles) > 0)
    if wanted:
        q_begin, q_len = _extent(offsets_q, sequence, tokens)
        kv_head = tl.program_id(1).to(tl.int64)
        j = number * KEYS + tl.arange(0, KEYS)
        there = j < k_len
        key = (begin + j).to(tl.int64)
        d, dv = tl.arange(0, DP), tl.arange(0, DVP)
        inside_d, inside_dv = there[:, None] & (d < D)[None, :], there[:, None] & (dv < DV)[None, :]
        rows = tl.load(
            k + kv_head * strides.k_head + key[:, None] * strides.k_row + d[None, :], mask=inside_d, other=0.0
        )
        values = tl.load(
            v + kv_head * strides.v_head + key[:, None] * strides.v_row + dv[None, :], mask=inside_dv, other=0.0
        )
        if DX:
            d2 = DP + tl.arange(0, DX)
            more = there[:, None] & (d2 < D)[None, :]
            rows2 = tl.load(
                k + kv_head * strides.k_head + key[:, None] * strides.k_row + d2[None, :], mask=more, other=0.0
            )
            dk2_acc = tl.zeros([KEYS, DX], tl.float32)
        before = k_len - q_len  # keys before the first query's own place
        lo, hi = 0, q_len * GROUP
        if CAUSAL:
            lo = tl.maximum(number * KEYS - before, 0) * GROUP // TILE * TILE
        if WINDOW:
            hi = tl.minimum(hi, tl.maximum(number * KEYS + KEYS - 1 + window - before, 0) * GROUP)
        dk_acc = tl.zeros([KEYS, DP], tl.float32)
        dv_acc = tl.zeros([KEYS, DVP], tl.float32)
        for r0 in range(lo, hi, TILE):  # order: queries ascending, a query's heads in turn, one accumulator
            row = r0 + tl.arange(0, TILE)
            position = row // GROUP
            live = position < q_len
            token = (q_begin + position).to(tl.int64)
            head = kv_head * GROUP + row % GROUP
            place = before + position
            at = token * tl.num_programs(1) * GROUP + head
            x = tl.load(
                q + token[:, None] * strides.q_row + head[:, None] * strides.q_head + d[None, :],
                mask=live[:, None] & (d < D)[None, :], other=0.0,
            )  # fmt: skip
            do = tl.load(dout + at[:, None] * DV + dv[None, :], mask=live[:, None] & (dv < DV)[None, :], other=0.0)
            row_lse = tl.load(lse + at, mask=live, other=float("inf"))[None, :]
            row_delta = tl.load(delta + at, mask=live, other=0.0)[None, :]
            s = tl.dot(rows, tl.trans(x), input_precision="ieee")
            if DX:
                x2 = tl.load(
                    q + token[:, None] * strides.q_row + head[:, None] * strides.q_head + d2[None, :],
                    mask=live[:, None] & (d2 < D)[None, :], other=0.0,
                )  # fmt: skip
                s = tl.dot(rows2, tl.trans(x2), s, input_precision="ieee")
            dp = tl.dot(values, tl.trans(do), input_precision="ieee")
            seen = there[:, None] & live[None, :]
            if CAUSAL:
                seen = seen & (j[:, None] <= place[None, :])
            if WINDOW:
                seen = seen & (j[:, None] > place[None, :] - window)
            p, ds = _gradient_of_scores(s, dp, row_lse, row_delta, seen, scale, softcap, CAP, BASE_2)
            dv_acc = _seen_product(p.to(do.dtype), seen, do, dv_acc, CAREFUL)
            dk_acc = _seen_product(ds.to(x.dtype), seen, x, dk_acc, CAREFUL)
            if DX:
                dk2_acc = _seen_product(ds.to(x.dtype), seen, x2, dk2_acc, CAREFUL)
        at = key * tl.num_programs(1) + kv_head
        nonfinite = tl.maximum(_any_nan(dk_acc), _any_nan(dv_acc))
        if DX:
            nonfinite = tl.maximum(nonfinite, _any_nan(dk2_acc))
            tl.store(dk + at[:, None] * D + d2[None, :], (dk2_acc * plain_scale).to(dk.dtype.element_ty), mask=more)
        if not CAREFUL:
            tl.store(nonfinite_tiles, nonfinite)
        y = (dk_acc * plain_scale).to(dk.dtype.element_ty)
        tl.store(dk + at[:, None] * D + d[None, :], y, mask=inside_d)
        tl.store(dv_out + at[:, None] * DV + dv[None, :], dv_acc.to(dv_out.dtype.element_ty), mask=inside_dv)


def _rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _constants(q: Tensor, hk: int, dv: int, softcap, scale: float) -> tuple[dict, float]:
    """What is compiled in, from static sizes alone, and the scale that scores are multiplied with."""
    d, base_2 = q.shape[2], q.element_size() == 2
    dp, dvp = (block(n, "attention: head dim") for n in (d, dv))
    widest = max(dp, dvp)
    # Tiles of 64 rows would take wgmma, and ptxas 12.8 (of Triton 3.6) may then overwrite the uniform register that
    # holds the values' descriptor: for some head dims the matrix unit reads outside of shared memory.
    wide = widest > 256  # queries and gradients of that width leave no room for more
    tile = 16 if wide or not base_2 else 32
    constants = {"GROUP": q.shape[1] // hk, "D": d, "DV": dv, "DP": dp, "DVP": dvp, "TILE": tile}
    warps = 4 if base_2 and widest <= 128 else 8
    constants |= {"CAP": softcap is not None, "BASE_2": base_2, "num_warps": warps, **OPTIONS}
    constants["num_stages"] = 1 if wide else 2
    return constants, scale * LOG2_E if base_2 and softcap is None else scale


def _tiles(steps: int, rows: int, tile: int, sequences: int) -> int:
    """The most tiles that any cut of so many steps, of `rows` rows each, has: a sequence that is not empty may end in a
    tile that is not full."""
    return cdiv(steps * rows, tile) + min(steps, sequences)


def _forward(
    q, k, v, strides, offsets_q, offsets_k, longest, keys, paging, sinks, scale, causal, window, softcap, segment, lse
) -> Tensor:
    (tokens, heads, _), hk, dv = q.shape, k.shape[-2], v.shape[-1]
    out = torch.empty((tokens, heads, dv), dtype=q.dtype, device=q.device)
    table, pages, page_size = paging
    sequences = offsets_q.shape[0] - 1
    constants, scale = _constants(q, hk, dv, softcap, scale)
    if constants["BASE_2"]:
        constants["num_warps"] //= 2  # rows of 16 for each
    if tokens == 0 or sequences == 0:
        return out
    tiles = _tiles(tokens, constants["GROUP"], constants["TILE"], sequences)
    nonfinite_tiles = torch.empty(tiles * hk, dtype=torch.int8, device=q.device)
    args = (
        q, k, v, out, out if lse is None else lse, out if sinks is None else sinks, nonfinite_tiles, offsets_q,
        offsets_k, offsets_q if table is None else table, tokens, keys, sequences, pages, page_size,
        0 if table is None else table.stride(0), Strides(q.stride(0), q.stride(1), *strides),
        scale, softcap or 0.0, window or 0, segment or 0,
    )  # fmt: skip
    constants |= {
        "SEQUENCES": SEQUENCES, "PAGED": table is not None, "CAUSAL": causal, "WINDOW": window is not None,
        "SINKS": sinks is not None, "SEGMENT": segment is not None, "LSE": lse is not None,
    }  # fmt: skip
    ways = (False, True) if causal and longest > 1 else (False,)
    launches = [Launch(_fwd_kernel, (tiles, hk), args, {"CAREFUL": careful, **constants}) for careful in ways]
    with on(q):
        launch(launches, q.device, (_forward, ways, q.dtype, *constants.values()))
    return out


def varlen_fwd(q, k, v, cu_seqlens, cu_seqlens_k, max_seqlen, sinks, scale, causal, window, softcap, kv_segment):
    q, k, v = _rows(q), _rows(k), _rows(v)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    k_offsets = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    strides = 0, k.stride(0), k.stride(1), 0, v.stride(0), v.stride(1)
    options = sinks, scale, causal, window, softcap, kv_segment, lse
    lengths = cu_seqlens, k_offsets, max_seqlen, k.shape[0]
    return _forward(q, k, v, strides, *lengths, (None, 0, 1), *options), lse


def paged_fwd(q, k_cache, v_cache, block_table, context_lens, cu_seqlens_q, max_seqlen_q, sinks, *options):
    scale, window, softcap, kv_segment, _ = options
    pages, page_size, *_ = k_cache.shape
    paging, capacity = (block_table, pages, page_size), block_table.shape[1] * page_size
    strides = (*k_cache.stride()[:3], *v_cache.stride()[:3])
    lengths = cu_seqlens_q, context_lens, max_seqlen_q, capacity
    options = sinks, scale, True, window, softcap, kv_segment, None
    return _forward(_rows(q), k_cache, v_cache, strides, *lengths, paging, *options)


def varlen_bwd(dout, q, k, v, out, lse, cu_seqlens, cu_seqlens_k, sinks, scale, causal, window, softcap):
    (tokens, heads), (keys, hk, dv) = q.shape[:2], v.shape
    q, k, v = _rows(q), _rows(k), _rows(v)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (k, v))
    offsets_k = cu_seqlens if cu_seqlens_k is None else cu_seqlens_k
    sequences, delta = offsets_k.shape[0] - 1, torch.empty_like(lse)
    constants, score_scale = _constants(q, hk, dv, softcap, scale)
    group, tile, base_2, rows = constants["GROUP"], constants["TILE"], constants["BASE_2"], tokens * heads
    common = {"SEQUENCES": SEQUENCES, "CAUSAL": causal, "WINDOW": window is not None, **constants}
    common |= {"KEYS": KEY_BLOCK, "DX": 0}
    widest = max(common["DP"], common["DVP"])
    if widest > 128 and not base_2:
        common["KEYS"] = 32  # 64 miss the shared memory of an H200 by a kilobyte
    if widest > 256:  # small tiles, and heads in two parts, as 576 = 512 + 64
        common["KEYS"] = common["TILE"] = tile = 32 if base_2 else 16
        first = block(q.shape[2] + 1, "attention: head dim") // 2
        if common["DP"] > 256 and first < q.shape[2]:
            common |= {"DP": first, "DX": block(q.shape[2] - first, "attention: head dim")}
    numbers = score_scale, scale, softcap or 0.0, window or 0
    strides = RowStrides(q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1))
    metadata = cu_seqlens, offsets_k, tokens, keys, sequences
    dsinks = None if sinks is None else torch.zeros_like(sinks)
    with on(q):
        if rows:
            _delta(dout, out, delta)
            tiles = _tiles(tokens, group, tile, sequences)
            nonfinite_tiles = torch.empty(tiles * hk, dtype=torch.int8, device=q.device)
            for careful in (False, True):
                _dq_kernel[(tiles, hk)](
                    q, k, v, dout, lse, delta, dq, nonfinite_tiles, *metadata, strides, *numbers, CAREFUL=careful,
                    **common,
                )  # fmt: skip
        if keys:
            tiles = _tiles(keys, 1, common["KEYS"], sequences)
            nonfinite_tiles = torch.empty(tiles * hk, dtype=torch.int8, device=q.device)
            for careful in (False, True):
                _dkv_kernel[(tiles, hk)](
                    q, k, v, dout, lse, delta, dk, dv_out, nonfinite_tiles, *metadata, strides, *numbers,
                    CAREFUL=careful, **common,
                )  # fmt: skip
        if sinks is not None and rows:
            dsinks = _dsinks(sinks, lse, delta, base_2)
    return dq, dk, dv_out, dsinks


def _dsinks(sinks: Tensor, lse: Tensor, delta: Tensor, base_2: bool) -> Tensor:
    """From lse and delta (T, Hq)."""
    rows, parts = lse.numel(), torch.empty_like(lse)
    _dsinks_kernel[(cdiv(rows, 1024),)](
        sinks, lse, delta, parts, rows, HEADS=len(sinks), BLOCK=1024, BASE_2=base_2, num_warps=4, **OPTIONS
    )
    return sum_rows(parts, torch.float32)


def _delta(dout: Tensor, out: Tensor, delta: Tensor) -> None:
    dv = out.shape[2]
    width = block(dv, "attention: head dim")
    height = max(1, 4096 // width)
    _delta_kernel[(cdiv(delta.numel(), height),)](
        out, dout, delta, delta.numel(), DV=dv, DVP=width, ROWS=height, num_warps=4, **OPTIONS
    )


def sinks_bwd(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """(Hq,) float32: what varlen_bwd gives for them; lse (T, Hq), in base 2."""
    if not lse.numel():
        return torch.zeros_like(sinks)
    with on(dout):
        delta = torch.empty_like(lse)
        _delta(dout, out, delta)
        return _dsinks(sinks, lse, delta, base_2=True)
