"""The Triton backward, in three steps. States at chunk starts and u are made anew by the forward's kernel. A scan from
the last chunk of a sequence to the first gives the gradients of u and of the states behind chunks. From all these a
chunk's gradients follow, each chunk by itself; those that sum over columns of dv (of q, k, g and beta) are made for
each block of 64 columns and added ascending, with the value heads of a key head.

The declared arithmetic, in the words of triton.py: k and q as they came, r, rq, e_ij, E_i, A, P, w as there, and
d_i = scale dout_i, R_j = exp_term(G_last - G_j), S the state before a chunk, S' what is known of the one behind it.
Rows that are not there are zeros. Every sum is one accumulator from +0, ascending, unless something else is said.

1. dw_j = fma(R_j, sum k_j tf(dS'), sum over all i of tf(P_ij) tf(d_i)) + 0, P_ij being 0 for i < j, less the sum over
   rows i of later blocks of 16, from the last block on, of tf(A_ij) tf(du_i), then fma(-A_ij, du_i, dw_j) for rows
   i > j of the own block, descending; du_j = r_j dw_j.
2. dS = fma(exp_term(G_last), dS', sum q_i tf(Y_i), and on it sum k_i tf(X_i)), with X_i = -(((beta_i E_i) r_i) du_i)
   and Y_i = (E_i rq_i) d_i.
3. dv_i = beta_i du_i. left_i = fma(-(E_i r_i), k_i tf(S), v_i) - sum over j < i of tf(r_i (e_ij kk_ij)) tf(w_j); the
   gradient of beta_i is du_i left_i.
4. D_ij = -((beta_i r_i) (e_ij tf(du_i) tf(w_j))) for j < i, F_ij = rq_i (e_ij tf(d_i) tf(w_j)) for j <= i.
5. dq_i = sum tf(Y_i) tf(S), on it sum tf(F_ij) k_j. h_j = sum tf(R_j w_j) tf(dS'); dk_j = h_j, on it sum tf(X_j) tf(S),
   sum tf(D_ji) k_i, sum tf(D_ij) k_i, sum tf(F_ij) q_i. Both are then those of what the norm made: less n (n dk), n
   being k_j r_j or q_i rq_i.
6. The gradient of G_i: X_i (k_i tf(S)) + Y_i (q_i tf(S)), plus the differences of rows and columns of
   D_ij kk_ij + F_ij qk_ij over j < i, less k_i h_i; of G_last also all k_i h_i and exp_term(G_last) (dS' S).
"""

import torch
import triton
import triton.language as tl

from .._core.triton import OPTIONS, cdiv, fold_sum, next_power_of_2, on
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
    norm_factor,
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
def _dot_on(total, a, b, TF: tl.constexpr):
    """total + a @ b of fp32 operands that tf has rounded."""
    # order: K ascending in the accumulator that there is
    return tl.dot(a, b, acc=total, input_precision="tf32" if TF else "ieee")


@triton.jit
def _raw_dot_on(total, a, b):
    # order: as above, of operands as they came
    return tl.dot(a, b, acc=total, input_precision="ieee")


@triton.jit
def _gradient_of_u(a, dw, r, TF: tl.constexpr):
    """du (64, N) from dw before what later rows of A take."""
    place, sub = tl.arange(0, _CHUNK), tl.arange(0, _BLOCK)
    at = tl.trans(a)  # at[j, i] = A_ij
    factors = tl.broadcast_to(r[:, None], dw.shape)
    du, taken = tl.zeros_like(dw), tl.zeros_like(dw)
    for back in range(_BLOCKS):  # order: blocks from the last to the first, in one accumulator; of each, rows ascending
        n = _BLOCKS - 1 - back
        r_block, own = block_of(factors, n), columns_of(block_of(at, n), n)
        part = block_of(dw, n) - block_of(taken, n)
        # order: the own block's rows, descending
        for count in range(_BLOCK):
            i = _BLOCK - 1 - count
            z = tl.broadcast_to(row_of(r_block * part, i)[None, :], part.shape)
            factor = tl.broadcast_to(column_of(own, i)[:, None], part.shape)
            part = tl.where((sub < i)[:, None], tl.fma(factor * -1.0, z, part), part)
        du = in_block(du, r_block * part, n)
        here = place // _BLOCK == n
        known = tf(tl.where(here[:, None], du, 0.0), TF)
        taken = _dot_on(taken, tf(tl.where(here[None, :], at, 0.0), TF), known, TF)
    return du


@triton.jit
def _fold(x):
    """The sum of a vector, as a scalar."""
    return tl.sum(fold_sum(tl.reshape(x, [1, x.shape[0]])), axis=0)


@triton.jit
def _decays(sums, last, TF: tl.constexpr):
    """exp(G_i - G_j) for j <= i; exp(G_i); exp(G_last - G_j); and exp(G_last)."""
    place = tl.arange(0, _CHUNK)
    seen = (place[None, :] <= place[:, None]) & (place < last)[:, None]
    total = tl.sum(tl.where(place == last - 1, sums, 0.0), axis=0)
    e = tl.where(seen, decay(tl.where(seen, sums[:, None] - sums[None, :], 0.0), TF), 0.0)
    rest = tl.where(place < last, decay(tl.where(place < last, total - sums, 0.0), TF), 0.0)
    return e, decay(sums, TF), rest, decay(total, TF)


@triton.jit
def _part(at, live, dims, DK: tl.constexpr):
    """Some columns of a chunk's rows of one head."""
    return tl.load(at + dims[None, :], mask=live[:, None] & (dims < DK)[None, :], other=0.0)


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
        r = norm_factor(_part(k_at, live, tl.arange(0, DKP), DK), L2NORM)
        rq = norm_factor(_part(q_at, live, tl.arange(0, DKP), DK), L2NORM)
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
            x, y = _part(k_at, live, dims, DK), _part(q_at, live, dims, DK)
            held = (dims < DK)[:, None] & wide
            behind = tl.load(here + (dims * DV)[:, None] + c[None, :], mask=held, other=0.0)
            kk = _raw_dot_on(kk, x, tl.trans(x))
            qk = _raw_dot_on(qk, y, tl.trans(x))
            from_state = _dot_on(from_state, x.to(tl.float32), tf(behind, TF), TF)
        exists = live[:, None]
        a = tl.where((place[None, :] < place[:, None]) & exists, (b * r)[:, None] * (e * kk), 0.0)
        p = tl.where((place[None, :] <= place[:, None]) & exists, rq[:, None] * (e * qk), 0.0)
        of_rows = dot(tf(tl.trans(p), TF), tf(do, TF), TF)
        w = _gradient_of_u(a, tl.fma(tl.broadcast_to(rest[:, None], of_rows.shape), from_state, of_rows), r, TF)
        tl.store(ws + rows_at, w, mask=live[:, None] & wide)
        by_k, by_q = tf(((b * first) * r)[:, None] * w * -1.0, TF), tf((first * rq)[:, None] * do, TF)
        for start in range(0, DKP, DB):
            dims = start + tl.arange(0, DB)
            x, y = _part(k_at, live, dims, DK).to(tl.float32), _part(q_at, live, dims, DK).to(tl.float32)
            at_state, held = (dims * DV)[:, None] + c[None, :], (dims < DK)[:, None] & wide
            behind = tl.load(here + at_state, mask=held, other=0.0)
            added = _dot_on(dot(tl.trans(y), by_q, TF), tl.trans(x), by_k, TF)
            before = tl.fma(tl.broadcast_to(whole, behind.shape), behind, added)
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
        k_at = k + at[:, None] * strides.k_row + key_head * strides.k_head
        q_at = q + at[:, None] * strides.q_row + key_head * strides.q_head
        r = norm_factor(_part(k_at, live, tl.arange(0, DKP), DK), L2NORM)
        rq = norm_factor(_part(q_at, live, tl.arange(0, DKP), DK), L2NORM)
        there = live[:, None] & wide
        rows_at = (at * HV + head)[:, None] * DV + c[None, :]
        do = scale * tl.load(dout + rows_at, mask=there, other=0.0).to(tl.float32)
        factor = r[:, None] * tl.load(us + rows_at, mask=there, other=0.0)  # w: what u is multiplied by
        u = tf(factor, TF)
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
            x, y = _part(k_at, live, part, DK), _part(q_at, live, part, DK)
            inside = (part < DK)[:, None] & wide
            s = tl.load(states + here + (part * DV)[:, None] + c[None, :], mask=inside, other=0.0)
            ds = tl.load(dstates + here + (part * DV)[:, None] + c[None, :], mask=inside, other=0.0)
            st = tf(s, TF)
            kk = _raw_dot_on(kk, x, tl.trans(x))
            qk = _raw_dot_on(qk, y, tl.trans(x))
            ks = _dot_on(ks, x.to(tl.float32), st, TF)
            qs = _dot_on(qs, y.to(tl.float32), st, TF)
            of_state += fold_sum(ds * s)
        value = tl.load(v + at[:, None] * strides.v_row + head * strides.v_head + c[None, :], mask=there, other=0.0)
        before, seen = (j < i) & live[:, None], (j <= i) & live[:, None]
        earlier = tf(tl.where(before, r[:, None] * (e * kk), 0.0), TF)
        from_state = tl.broadcast_to(((first * r) * -1.0)[:, None], ks.shape)
        left = tl.fma(from_state, ks, value.to(tl.float32)) - (dot(earlier, u, TF) + 0.0)  # what beta multiplies
        by_k, by_q = ((b * first) * r)[:, None] * w * -1.0, (first * rq)[:, None] * do
        dbeta, dsums = fold_sum(w * left), fold_sum(by_k * ks + by_q * qs)
        ut = tl.trans(u)
        dkk = tl.where(before, (b * r)[:, None] * (e * dot(tf(w, TF), ut, TF)) * -1.0, 0.0)
        dqk = tl.where(seen, rq[:, None] * (e * dot(tf(do, TF), ut, TF)), 0.0)
        m = tl.where(j < i, dkk * kk + dqk * qk, 0.0)
        dsums = dsums + (fold_sum(m) - fold_sum(tl.trans(m)))
        tl.store(dv + rows_at, (b[:, None] * w).to(dv.dtype.element_ty), mask=there)
        by_k, by_q, dkk, dqk = tf(by_k, TF), tf(by_q, TF), tf(dkk, TF), tf(dqk, TF)
        added = tf(rest[:, None] * factor, TF)  # what the state was added
        columns = tl.program_id(2).to(tl.int64) * tokens
        keys_at = ((columns + at) * HV + head)[:, None] * DK
        taken = tl.zeros([_CHUNK], tl.float32)
        for start in range(0, DKP, DB):
            part = start + tl.arange(0, DB)
            some = live[:, None] & (part < DK)[None, :]
            x, y = _part(k_at, live, part, DK).to(tl.float32), _part(q_at, live, part, DK).to(tl.float32)
            inside = (part < DK)[:, None] & wide
            s = tl.load(states + here + (part * DV)[:, None] + c[None, :], mask=inside, other=0.0)
            ds = tl.load(dstates + here + (part * DV)[:, None] + c[None, :], mask=inside, other=0.0)
            st = tl.trans(tf(s, TF))
            dq = _dot_on(dot(by_q, st, TF), dqk, x, TF)
            h = dot(added, tl.trans(tf(ds, TF)), TF)
            dk = _dot_on(_dot_on(h, by_k, st, TF), dkk, x, TF)
            dk = _dot_on(_dot_on(dk, tl.trans(dkk), x, TF), tl.trans(dqk), y, TF)
            tl.store(parts_q + keys_at + part[None, :], dq, mask=some)
            tl.store(parts_k + keys_at + part[None, :], dk, mask=some)
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
        y, _ = normed(value.to(tl.float32), L2NORM)
        sum_ = sum_ - y * fold_sum(y * sum_)[:, None]
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
    columns = min(next_power_of_2(max(dv, 16)), 64)  # of a program that makes gradients
    blocks, deep = cdiv(dv, columns), min(size["DKP"], 64)
    parts_q, parts_k = (torch.empty((blocks, tokens, hv, dk), dtype=torch.float32, **new) for _ in "qk")
    parts_g, parts_beta = (torch.empty((blocks, tokens, hv), dtype=torch.float32, **new) for _ in "gb")
    options, strides = {"num_warps": 8, "num_stages": 1, **OPTIONS}, strides_of(q, k, v)
    with on(q):
        _scan_kernel[cdiv(dv, size["BV"]), hv, batch](
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
                _keys_kernel[cdiv(tokens, 8), hk](
                    x, parts, out, tokens, x.stride(0), x.stride(1), PARTS=blocks, ROWS=8, num_warps=4, **shared,
                    **OPTIONS,
                )  # fmt: skip
            for parts, out in ((parts_g, out_g), (parts_beta, out_beta)):
                count = out.numel()
                _gates_kernel[(cdiv(count, 512),)](parts, out, count, PARTS=blocks, BLOCK=512, **OPTIONS)
    return out_q, out_k, out_v, out_g, out_beta, dinitial
