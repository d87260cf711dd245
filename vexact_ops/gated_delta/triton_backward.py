"""The Triton backward: states at chunk starts and u are made anew by the forward's kernel; then the chunks of a
sequence go by from the last to the first, each program with some columns of dv. What sums over columns (the gradients
of q, k, g and beta) is stored for each block of them and added ascending, with the value heads of a key head.
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
def _gradient_of_u(a, w, last, TF: tl.constexpr):
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
def _rows_sum(x):
    return fold_sum(x)


@triton.jit(do_not_specialize=PER_CALL)
def _bwd_kernel(
    dout, dfinal, q, k, v, g, beta, offsets, states, us, parts_q, parts_k, dv, parts_g, parts_beta, dinitial,
    tokens, sequences, strides, scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, BV: tl.constexpr,
    FINAL: tl.constexpr, INITIAL: tl.constexpr, L2NORM: tl.constexpr, TF: tl.constexpr,
):  # fmt: skip
    sequence, head = tl.program_id(2), tl.program_id(1)
    begin, end = extent(offsets, sequence, tokens)
    d, c = tl.arange(0, DKP), tl.program_id(0) * BV + tl.arange(0, BV)
    wide, deep = (c < DV)[None, :], (d < DK)[None, :]
    key_head, place = head // (HV // HK), tl.arange(0, _CHUNK)
    i, j = place[:, None], place[None, :]
    plane = (d * DV)[:, None] + c[None, :]
    inside = (d < DK)[:, None] & wide
    whose = (sequence.to(tl.int64) * HV + head) * DK * DV
    ds = tl.zeros([DKP, BV], tl.float32)
    if FINAL:
        ds = tl.load(dfinal + whose + plane, mask=inside, other=0.0)
    columns = tl.program_id(0).to(tl.int64) * tokens
    chunk = (end - begin + _CHUNK - 1) // _CHUNK - 1
    while chunk >= 0:
        row = begin + chunk * _CHUNK
        last = tl.minimum(_CHUNK, end - row)
        live = place < last
        at = (row + place).to(tl.int64)
        x = tl.load(k + at[:, None] * strides.k_row + key_head * strides.k_head + d[None, :],
                    mask=live[:, None] & deep, other=0.0).to(tl.float32)  # fmt: skip
        y = tl.load(q + at[:, None] * strides.q_row + key_head * strides.q_head + d[None, :],
                    mask=live[:, None] & deep, other=0.0).to(tl.float32)  # fmt: skip
        there = live[:, None] & wide
        value = tl.load(v + at[:, None] * strides.v_row + head * strides.v_head + c[None, :], mask=there, other=0.0)
        rows_at = (at * HV + head)[:, None] * DV + c[None, :]
        do = scale * tl.load(dout + rows_at, mask=there, other=0.0).to(tl.float32)
        u = tl.load(us + rows_at, mask=there, other=0.0)
        b = tl.load(beta + at * HV + head, mask=live, other=0.0)
        index = (begin // _CHUNK + sequence + chunk).to(tl.int64) * HV + head
        s = tl.load(states + index * DK * DV + plane, mask=inside, other=0.0)
        x, _ = normed(x, L2NORM)
        y, _ = normed(y, L2NORM)
        kn, qn, st, dst = tf(x, TF), tf(y, TF), tf(s, TF), tf(ds, TF)
        sums = running_sums(g, row.to(tl.int64), head, 0, last, 0.0, HV)
        total = tl.sum(tl.where(place == last - 1, sums, 0.0), axis=0)
        rest = tl.where(live, decay(tl.where(live, total - sums, 0.0), TF), 0.0)
        first = decay(sums, TF)
        e = tl.where(j <= i, decay(tl.where(j <= i, sums[:, None] - sums[None, :], 0.0), TF), 0.0)
        kk, qk = dot(kn, tl.trans(kn), TF), dot(qn, tl.trans(kn), TF)
        a = tl.where(j < i, b[:, None] * (e * kk), 0.0)
        p = tl.where(j <= i, e * qk, 0.0)
        dot_, ut = tf(do, TF), tf(u, TF)
        w = rest[:, None] * dot(kn, dst, TF) + dot(tf(tl.trans(p), TF), dot_, TF)
        w = _gradient_of_u(a, w, last, TF)
        wt = tf(w, TF)
        # what beta multiplies: v less what the state and earlier rows give
        ks, qs = dot(kn, st, TF), dot(qn, st, TF)
        bare = tl.where(j < i, e * kk, 0.0)
        left = (value.to(tl.float32) - first[:, None] * ks) - dot(tf(bare, TF), ut, TF)
        by_k, by_q = (b * first)[:, None] * w * -1.0, first[:, None] * do
        dbeta = _rows_sum(w * left)
        dsums = _rows_sum(by_k * ks + by_q * qs)
        dkk = tl.where(j < i, b[:, None] * e * dot(wt, tl.trans(ut), TF) * -1.0, 0.0)
        dqk = tl.where(j <= i, e * dot(dot_, tl.trans(ut), TF), 0.0)
        m = tl.where(j < i, dkk * kk + dqk * qk, 0.0)
        dsums = dsums + (_rows_sum(m) - _rows_sum(tl.trans(m)))
        dkt, dqt, by_kt, by_qt = tf(dkk, TF), tf(dqk, TF), tf(by_k, TF), tf(by_q, TF)
        h = rest[:, None] * dot(ut, tl.trans(dst), TF)
        dq = dot(by_qt, tl.trans(st), TF) + dot(dqt, kn, TF)
        dk = dot(by_kt, tl.trans(st), TF) + dot(dkt, kn, TF)
        dk = dk + (dot(tl.trans(dkt), kn, TF) + dot(tl.trans(dqt), qn, TF))
        dk = dk + h
        taken = _rows_sum(x * h)
        of_all = tl.sum(tl.reshape(_rows_sum(tl.reshape(taken, [1, _CHUNK])), [1]), axis=0)
        of_state = tl.sum(tl.reshape(_rows_sum(tl.reshape(_rows_sum(ds * s), [1, DKP])), [1]), axis=0)
        last_sum = tl.where(place == last - 1, of_all + decay(total, TF) * of_state, 0.0)
        dsums = (dsums - taken) + last_sum
        # order: the gradient of g_i takes those of the sums from the last to i, in a tree
        dg = _rows_sum(tl.where(j >= i, tl.broadcast_to(dsums[None, :], [_CHUNK, _CHUNK]), 0.0))
        tl.store(dv + rows_at, (b[:, None] * w).to(dv.dtype.element_ty), mask=there)
        tl.store(parts_beta + (columns + at) * HV + head, dbeta, mask=live)
        tl.store(parts_g + (columns + at) * HV + head, dg, mask=live)
        keys_at = ((columns + at) * HV + head)[:, None] * DK + d[None, :]
        tl.store(parts_q + keys_at, dq, mask=live[:, None] & deep)
        tl.store(parts_k + keys_at, dk, mask=live[:, None] & deep)
        ds = decay(total, TF) * ds + (dot(tl.trans(kn), by_kt, TF) + dot(tl.trans(qn), by_qt, TF))
        chunk -= 1
    if INITIAL:
        tl.store(dinitial + whose + plane, ds, mask=inside)


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
    device = q.device
    out_q, out_k, out_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    out_g, out_beta = (
        torch.empty(g.shape, dtype=torch.float32, device=device),
        torch.empty(g.shape, dtype=torch.float32, device=device),
    )
    dinitial = None if initial_state is None else torch.empty(initial_state.shape, dtype=torch.float32, device=device)
    if batch == 0 or (tokens == 0 and dinitial is None):
        return out_q, out_k, out_v, out_g, out_beta, dinitial
    states, us = kept or chunks(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, keep=True)
    blocks = triton.cdiv(dv, size["BV"])
    parts_q, parts_k = (torch.empty((blocks, tokens, hv, dk), dtype=torch.float32, device=device) for _ in "qk")
    parts_g, parts_beta = (torch.empty((blocks, tokens, hv), dtype=torch.float32, device=device) for _ in "gb")
    with on(q):
        _bwd_kernel[blocks, hv, batch](
            dout, g if dfinal is None else dfinal, q, k, v, g, beta, cu_seqlens, states, us, parts_q, parts_k, out_v,
            parts_g, parts_beta, g if dinitial is None else dinitial, tokens, batch, strides_of(q, k, v), scale,
            FINAL=dfinal is not None, INITIAL=dinitial is not None, num_warps=8, num_stages=1, **size, **OPTIONS,
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
