"""The Triton backward, in three steps. States at chunk starts and u are made anew by the forward's kernel. A scan from
the last chunk of a sequence to the first gives the gradients of u and of the states behind chunks. From all these a
chunk's gradients follow, each chunk by itself; those that sum over columns of dv (of q, k, g and beta) are stored for
each block of columns and added ascending, with the value heads of a key head.
"""

import torch
import triton
import triton.language as tl

from .._core.triton import OPTIONS, fold_sum, on
from .op import CHUNK
from .triton import (
    PER_CALL,
    block_of,
    chunks,
    column_of,
    columns_of,
    decay,
    dot,
    extent,
    in_block,
    normed,
    row_of,
    running_sums,
    sizes,
    strides_of,
    tf,
)

_CHUNK = tl.constexpr(CHUNK)
_BLOCK = tl.constexpr(16)
_BLOCKS = tl.constexpr(CHUNK // 16)


@triton.jit
def _gradient_of_u(a, w, TF: tl.constexpr):
    """w (64, N) less what later rows of A take: w_j - sum over i > j of A_ij w_i."""
    place, sub = tl.arange(0, _CHUNK), tl.arange(0, _BLOCK)
    at = tl.trans(a)  # at[j, i] = A_ij
    for back in range(_BLOCKS):
        n = _BLOCKS - 1 - back
        rows = block_of(at, n)
        # order: later blocks in one accumulator, ascending; then the own block's rows, descending
        later = place >= (n + 1) * _BLOCK
        known = tf(tl.where(later[:, None], w, 0.0), TF)
        part = block_of(w, n) - dot(tf(tl.where(later[None, :], rows, 0.0), TF), known, TF)
        own = columns_of(rows, n)
        for count in range(_BLOCK):
            i = _BLOCK - 1 - count
            z = tl.broadcast_to(row_of(part, i)[None, :], part.shape)
            factor = tl.broadcast_to(column_of(own, i)[:, None], part.shape)
            part = tl.where((sub < i)[:, None], tl.fma(factor * -1.0, z, part), part)
        w = in_block(w, part, n)
    return w


@triton.jit
def _fold(x):
    """The sum of a vector, as a scalar."""
    return tl.sum(fold_sum(tl.reshape(x, [1, x.shape[0]])), axis=0)


@triton.jit
def _decays(sums, last, TF: tl.constexpr):
    """exp(G_i - G_j) for j <= i; exp(G_i); exp(G_last - G_j); and exp(G_last)."""
    place = tl.arange(0, _CHUNK)
    seen = place[None, :] <= place[:, None]
    total = tl.sum(tl.where(place == last - 1, sums, 0.0), axis=0)
    e = tl.where(seen, decay(tl.where(seen, sums[:, None] - sums[None, :], 0.0), TF), 0.0)
    rest = tl.where(place < last, decay(tl.where(place < last, total - sums, 0.0), TF), 0.0)
    return e, decay(sums, TF), rest, decay(total, TF)


@triton.jit
def _factors(at, live, dims, L2NORM: tl.constexpr, DK: tl.constexpr):
    """1 / norm of a chunk's rows of one head."""
    x = tl.load(at + dims[None, :], mask=live[:, None] & (dims < DK)[None, :], other=0.0)
    _, r = normed(x.to(tl.float32), L2NORM)
    return r


@triton.jit
def _part(at, live, dims, r, DK: tl.constexpr):
    """Some columns of them, times that."""
    x = tl.load(at + dims[None, :], mask=live[:, None] & (dims < DK)[None, :], other=0.0)
    return x.to(tl.float32) * r[:, None]


@triton.jit(do_not_specialize=PER_CALL)
def _scan_kernel(
    dout, dfinal, q, k, g, beta, offsets, dstates, ws, dinitial, tokens, sequences, strides, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, BV: tl.constexpr,
    DB: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, L2NORM: tl.constexpr, TF: tl.constexpr,
):  # fmt: skip
    """From the last chunk of a sequence to the first: the gradients of u, and of the states behind chunks. dk goes by
    in blocks of DB, and a state's gradient from chunk to chunk in memory: all of it would not fit into an SM."""
    sequence, head = tl.program_id(2), tl.program_id(1)
    begin, end = extent(offsets, sequence, tokens)
    c, place = tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, _CHUNK)
    wide, key_head = (c < DV)[None, :], head // (HV // HK)
    whose = (sequence.to(tl.int64) * HV + head) * DK * DV
    chunk = (end - begin + _CHUNK - 1) // _CHUNK - 1
    there = dstates + ((begin // _CHUNK + sequence + chunk).to(tl.int64) * HV + head) * DK * DV
    for start in range(0, DKP, DB):
        part = start + tl.arange(0, DB)
        plane, inside = (part * DV)[:, None] + c[None, :], (part < DK)[:, None] & wide
        ds = tl.zeros([DB, BV], tl.float32)
        if FINAL:
            ds = tl.load(dfinal + whose + plane, mask=inside, other=0.0)
        tl.store(there + plane, ds, mask=inside & (chunk >= 0))
        if INITIAL:
            tl.store(dinitial + whose + plane, ds, mask=inside & (chunk < 0))
    tl.debug_barrier()
    while chunk >= 0:
        row = begin + chunk * _CHUNK
        last = tl.minimum(_CHUNK, end - row)
        live = place < last
        at = (row + place).to(tl.int64)
        k_at = k + at[:, None] * strides.k_row + key_head * strides.k_head
        q_at = q + at[:, None] * strides.q_row + key_head * strides.q_head
        of_k = _factors(k_at, live, tl.arange(0, DKP), L2NORM, DK)
        of_q = _factors(q_at, live, tl.arange(0, DKP), L2NORM, DK)
        rows_at = (at * HV + head)[:, None] * DV + c[None, :]
        do = scale * tl.load(dout + rows_at, mask=live[:, None] & wide, other=0.0).to(tl.float32)
        b = tl.load(beta + at * HV + head, mask=live, other=0.0)
        sums = running_sums(g, row.to(tl.int64), head, 0, last, 0.0, HV)
        e, first, rest, whole = _decays(sums, last, TF)
        here = dstates + ((begin // _CHUNK + sequence + chunk).to(tl.int64) * HV + head) * DK * DV
        kk, qk = tl.zeros([_CHUNK, _CHUNK], tl.float32), tl.zeros([_CHUNK, _CHUNK], tl.float32)
        from_state = tl.zeros([_CHUNK, BV], tl.float32)
        for start in range(0, DKP, DB):  # order: blocks of dk ascending
            dims = start + tl.arange(0, DB)
            kn, qn = tf(_part(k_at, live, dims, of_k, DK), TF), tf(_part(q_at, live, dims, of_q, DK), TF)
            held = (dims < DK)[:, None] & wide
            behind = tl.load(here + (dims * DV)[:, None] + c[None, :], mask=held, other=0.0)
            kk += dot(kn, tl.trans(kn), TF)
            qk += dot(qn, tl.trans(kn), TF)
            from_state += dot(kn, tf(behind, TF), TF)
        a = tl.where(place[None, :] < place[:, None], b[:, None] * (e * kk), 0.0)
        p = e * qk
        w = rest[:, None] * from_state + dot(tf(tl.trans(p), TF), tf(do, TF), TF)
        w = _gradient_of_u(a, w, TF)
        tl.store(ws + rows_at, w, mask=live[:, None] & wide)
        by_k, by_q = tf((b * first)[:, None] * w * -1.0, TF), tf(first[:, None] * do, TF)
        for start in range(0, DKP, DB):
            dims = start + tl.arange(0, DB)
            kn, qn = tf(_part(k_at, live, dims, of_k, DK), TF), tf(_part(q_at, live, dims, of_q, DK), TF)
            at_state, held = (dims * DV)[:, None] + c[None, :], (dims < DK)[:, None] & wide
            behind = tl.load(here + at_state, mask=held, other=0.0)
            before = whole * behind + (dot(tl.trans(kn), by_k, TF) + dot(tl.trans(qn), by_q, TF))
            tl.store(here - HV * DK * DV + at_state, before, mask=held & (chunk > 0))
            if INITIAL:
                tl.store(dinitial + whose + at_state, before, mask=held & (chunk == 0))
        tl.debug_barrier()  # what this wrote, other threads read
        chunk -= 1


@triton.jit
def _find_chunk(offsets, index, tokens, sequences, SEQUENCES: tl.constexpr):
    """The sequence whose chunk has this index among the states, and which of its chunks it is."""
    before = tl.zeros([], tl.int32)
    for start in range(0, sequences, SEQUENCES):
        n = start + tl.arange(0, SEQUENCES)
        begin = tl.load(offsets + n, mask=n < sequences, other=0)
        first = tl.minimum(tl.maximum(begin, 0), tokens) // _CHUNK + n
        before += tl.sum(((first <= index) & (n < sequences)).to(tl.int32), axis=0)
    sequence = tl.maximum(before - 1, 0)
    begin, end = extent(offsets, sequence, tokens)
    return begin, end, index - begin // _CHUNK - sequence


@triton.jit(do_not_specialize=PER_CALL)
def _grads_kernel(
    dout, q, k, v, g, beta, offsets, states, dstates, us, ws, parts_q, parts_k, dv, parts_g, parts_beta,
    tokens, sequences, strides, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, BV: tl.constexpr,
    DB: tl.constexpr, L2NORM: tl.constexpr, TF: tl.constexpr, SEQUENCES: tl.constexpr,
):  # fmt: skip
    """One chunk, one value head, some columns of dv: all gradients, from the states and u and from their gradients.
    dk goes by in blocks of DB, so that what products take fits into shared memory."""
    index, head = tl.program_id(0), tl.program_id(1)
    begin, end, chunk = _find_chunk(offsets, index, tokens, sequences, SEQUENCES)
    row = begin + chunk * _CHUNK
    if (chunk >= 0) & (row < end):
        last = tl.minimum(_CHUNK, end - row)
        c, place = tl.program_id(2) * BV + tl.arange(0, BV), tl.arange(0, _CHUNK)
        key_head, wide, live = head // (HV // HK), (c < DV)[None, :], place < last
        i, j = place[:, None], place[None, :]
        at = (row + place).to(tl.int64)
        d = tl.arange(0, DKP)
        full = live[:, None] & (d < DK)[None, :]
        k_at = k + at[:, None] * strides.k_row + key_head * strides.k_head
        q_at = q + at[:, None] * strides.q_row + key_head * strides.q_head
        _, of_k = normed(tl.load(k_at + d[None, :], mask=full, other=0.0).to(tl.float32), L2NORM)
        _, of_q = normed(tl.load(q_at + d[None, :], mask=full, other=0.0).to(tl.float32), L2NORM)
        there = live[:, None] & wide
        rows_at = (at * HV + head)[:, None] * DV + c[None, :]
        do = scale * tl.load(dout + rows_at, mask=there, other=0.0).to(tl.float32)
        u = tf(tl.load(us + rows_at, mask=there, other=0.0), TF)
        w = tl.load(ws + rows_at, mask=there, other=0.0)
        b = tl.load(beta + at * HV + head, mask=live, other=0.0)
        sums = running_sums(g, row.to(tl.int64), head, 0, last, 0.0, HV)
        e, first, rest, whole = _decays(sums, last, TF)
        here = (index.to(tl.int64) * HV + head) * DK * DV
        kk, qk = tl.zeros([_CHUNK, _CHUNK], tl.float32), tl.zeros([_CHUNK, _CHUNK], tl.float32)
        ks, qs = tl.zeros([_CHUNK, BV], tl.float32), tl.zeros([_CHUNK, BV], tl.float32)
        of_state = tl.zeros([DB], tl.float32)
        for start in range(0, DKP, DB):  # order: blocks of dk ascending
            part = start + tl.arange(0, DB)
            some = live[:, None] & (part < DK)[None, :]
            x = tl.load(k_at + part[None, :], mask=some, other=0.0).to(tl.float32) * of_k[:, None]
            y = tl.load(q_at + part[None, :], mask=some, other=0.0).to(tl.float32) * of_q[:, None]
            inside = (part < DK)[:, None] & wide
            s = tl.load(states + here + (part * DV)[:, None] + c[None, :], mask=inside, other=0.0)
            ds = tl.load(dstates + here + (part * DV)[:, None] + c[None, :], mask=inside, other=0.0)
            kn, qn, st = tf(x, TF), tf(y, TF), tf(s, TF)
            kk += dot(kn, tl.trans(kn), TF)
            qk += dot(qn, tl.trans(kn), TF)
            ks += dot(kn, st, TF)
            qs += dot(qn, st, TF)
            of_state += fold_sum(ds * s)
        value = tl.load(v + at[:, None] * strides.v_row + head * strides.v_head + c[None, :], mask=there, other=0.0)
        earlier = tf(tl.where(j < i, e * kk, 0.0), TF)
        left = (value.to(tl.float32) - first[:, None] * ks) - dot(earlier, u, TF)  # what beta multiplies
        by_k, by_q = (b * first)[:, None] * w * -1.0, first[:, None] * do
        dbeta, dsums = fold_sum(w * left), fold_sum(by_k * ks + by_q * qs)
        ut = tl.trans(u)
        dkk = tl.where(j < i, b[:, None] * e * dot(tf(w, TF), ut, TF) * -1.0, 0.0)
        dqk = tl.where(j <= i, e * dot(tf(do, TF), ut, TF), 0.0)
        m = tl.where(j < i, dkk * kk + dqk * qk, 0.0)
        dsums = dsums + (fold_sum(m) - fold_sum(tl.trans(m)))
        tl.store(dv + rows_at, (b[:, None] * w).to(dv.dtype.element_ty), mask=there)
        by_k, by_q, dkk, dqk = tf(by_k, TF), tf(by_q, TF), tf(dkk, TF), tf(dqk, TF)
        columns = tl.program_id(2).to(tl.int64) * tokens
        keys_at = ((columns + at) * HV + head)[:, None] * DK
        taken = tl.zeros([_CHUNK], tl.float32)
        for start in range(0, DKP, DB):
            part = start + tl.arange(0, DB)
            some = live[:, None] & (part < DK)[None, :]
            x = tl.load(k_at + part[None, :], mask=some, other=0.0).to(tl.float32) * of_k[:, None]
            y = tl.load(q_at + part[None, :], mask=some, other=0.0).to(tl.float32) * of_q[:, None]
            inside = (part < DK)[:, None] & wide
            s = tl.load(states + here + (part * DV)[:, None] + c[None, :], mask=inside, other=0.0)
            ds = tl.load(dstates + here + (part * DV)[:, None] + c[None, :], mask=inside, other=0.0)
            kn, qn, st = tf(x, TF), tf(y, TF), tl.trans(tf(s, TF))
            h = rest[:, None] * dot(u, tl.trans(tf(ds, TF)), TF)
            dq = dot(by_q, st, TF) + dot(dqk, kn, TF)
            dk = dot(by_k, st, TF) + dot(dkk, kn, TF)
            dk = dk + (dot(tl.trans(dkk), kn, TF) + dot(tl.trans(dqk), qn, TF))
            tl.store(parts_q + keys_at + part[None, :], dq, mask=some)
            tl.store(parts_k + keys_at + part[None, :], dk + h, mask=some)
            taken += fold_sum(x * h)
        of_all = _fold(taken) + whole * _fold(of_state)
        dsums = (dsums - taken) + tl.where(place == last - 1, of_all, 0.0)
        # order: the gradient of g_i takes those of the sums from i to the last, in a tree
        dg = fold_sum(tl.where(j >= i, tl.broadcast_to(dsums[None, :], [_CHUNK, _CHUNK]), 0.0))
        tl.store(parts_beta + (columns + at) * HV + head, dbeta, mask=live)
        tl.store(parts_g + (columns + at) * HV + head, dg, mask=live)


@triton.jit(do_not_specialize=["tokens"])
def _keys_kernel(
    x, parts, dx, tokens, row_stride, head_stride,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr, PARTS: tl.constexpr, L2NORM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    key_head, d = tl.program_id(1), tl.arange(0, DKP)
    inside = (row < tokens)[:, None] & (d < DK)[None, :]
    sum_ = tl.zeros([ROWS, DKP], tl.float32)
    for h in range(0, HV // HK):  # order: value heads ascending, of each the blocks of columns ascending
        for part in range(0, PARTS):
            at = (tl.cast(part, tl.int64) * tokens + row) * HV + key_head * (HV // HK) + h
            sum_ += tl.load(parts + at[:, None] * DK + d[None, :], mask=inside, other=0.0)
    if L2NORM:
        value = tl.load(x + row[:, None] * row_stride + key_head * head_stride + d[None, :], mask=inside, other=0.0)
        y, r = normed(value.to(tl.float32), L2NORM)
        sum_ = r[:, None] * (sum_ - y * fold_sum(y * sum_)[:, None])
    tl.store(dx + (row * HK + key_head)[:, None] * DK + d[None, :], sum_.to(dx.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["count"])
def _gates_kernel(parts, out, count, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for part in range(0, PARTS):  # order: blocks of columns ascending
        total += tl.load(parts + tl.cast(part, tl.int64) * count + at, mask=at < count, other=0.0)
    tl.store(out + at, total, mask=at < count)


def backward(dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, kept=None):
    """kept: what `chunks` gives with keep, where somebody has made it."""
    tokens, batch, size = q.shape[0], cu_seqlens.shape[0] - 1, sizes(q, v, l2norm)
    (hk, dk), (hv, dv) = q.shape[1:], v.shape[1:]
    new = {"device": q.device}
    out_q, out_k, out_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    out_g, out_beta = (torch.empty(g.shape, dtype=torch.float32, **new) for _ in "gb")
    dinitial = None if initial_state is None else torch.empty(initial_state.shape, dtype=torch.float32, **new)
    if batch == 0 or (tokens == 0 and dinitial is None):
        return out_q, out_k, out_v, out_g, out_beta, dinitial
    states, us = kept or chunks(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, keep=True)
    dstates, ws = torch.empty_like(states), torch.empty_like(us)
    columns = min(triton.next_power_of_2(max(dv, 16)), 64)  # of a program that makes gradients
    blocks, deep = triton.cdiv(dv, columns), min(size["DKP"], 64)
    parts_q, parts_k = (torch.empty((blocks, tokens, hv, dk), dtype=torch.float32, **new) for _ in "qk")
    parts_g, parts_beta = (torch.empty((blocks, tokens, hv), dtype=torch.float32, **new) for _ in "gb")
    options, strides = {"num_warps": 8, "num_stages": 1, **OPTIONS}, strides_of(q, k, v)
    with on(q):
        _scan_kernel[triton.cdiv(dv, size["BV"]), hv, batch](
            dout, g if dfinal is None else dfinal, q, k, g, beta, cu_seqlens, dstates, ws,
            g if dinitial is None else dinitial, tokens, batch, strides, scale,
            DB=deep, FINAL=dfinal is not None, INITIAL=dinitial is not None, **size, **options,
        )  # fmt: skip
        _grads_kernel[states.shape[0], hv, blocks](
            dout, q, k, v, g, beta, cu_seqlens, states, dstates, us, ws, parts_q, parts_k, out_v, parts_g, parts_beta,
            tokens, batch, strides, scale, DB=deep, SEQUENCES=128, **{**size, "BV": columns}, **options,
        )  # fmt: skip
        if tokens:
            shared = {name: size[name] for name in ("HK", "HV", "DK", "DKP", "L2NORM")}
            for x, parts, out in ((q, parts_q, out_q), (k, parts_k, out_k)):
                _keys_kernel[triton.cdiv(tokens, 8), hk](
                    x, parts, out, tokens, x.stride(0), x.stride(1), PARTS=blocks, ROWS=8, num_warps=4, **shared,
                    **OPTIONS,
                )  # fmt: skip
            for parts, out in ((parts_g, out_g), (parts_beta, out_beta)):
                count = out.numel()
                _gates_kernel[(triton.cdiv(count, 512),)](parts, out, count, PARTS=blocks, BLOCK=512, **OPTIONS)
    return out_q, out_k, out_v, out_g, out_beta, dinitial
