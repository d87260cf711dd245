"""The Triton forward: one kernel for training and for chunks of a paged call, which goes through the chunks of a
sequence one after another, and one for single tokens, which reads the state and the open rows and writes its own.

The declared arithmetic, for every kernel of the class; fp32, fused where it says fma. tf(x): x rounded to tf32, to the
nearest, ties away from zero, for 16-bit inputs; x itself for fp32 inputs, whose products are then plain fp32.

1. r = 1 / sqrt(fold_sum(k k) + 1e-6), rq the same of q; 1 without the norm.
2. G_i = G_(i-1) + g_i from +0 at the chunk's start; e_ij = exp_term(G_i - G_j), E_i = exp_term(G_i); with fp32 inputs
   exp_down in its place.
3. Products, each a chain of K ascending from +0 in one accumulator, k and q as they came: kk_ij = k_i k_j,
   qk_ij = q_i k_j, ks_i = k_i tf(S), qs_i = q_i tf(S). A_ij = (beta_i r_i) (e_ij kk_ij) and P_ij = rq_i (e_ij qk_ij),
   selected by j < i and j <= i. With w_j = r_j u_j, over the rows j of earlier blocks of 16:
   a_i = sum tf(A_ij) tf(w_j) + 0, p_i = sum tf(P_ij) tf(w_j) + 0.
4. u_i = (beta_i fma(-(E_i r_i), ks_i, v_i) + 0) - a_i, then fma(-A_ij, w_j, u_i) for rows j < i of the own block,
   ascending; o_i = fma(E_i rq_i, qs_i, p_i), then fma(P_ij, w_j, o_i) for j <= i; the output is scale o_i, rounded
   once. Here A_ij, P_ij, w_j and qs_i have + 0 added, so that a sum over a selection may fetch them: -0 becomes +0.
5. S' = fma(exp_term(G_last), S, sum over j ascending of k_j tf(exp_term(G_last - G_j) w_j)), rows that are not there
   being zeros.

So old rows are needed as k, w and G alone, products among keys run in 16 bits, and a norm is computed once: open_u
holds w.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._core import gpu
from .._core.triton import OPTIONS, block, cdiv, exp_down, exp_term, fold_sum, on
from .op import CHUNK
from .triton_gates import delta_gates_bwd as delta_gates_bwd
from .triton_gates import delta_gates_fwd as delta_gates_fwd

PER_CALL = ["tokens", "sequences", "slot_count", "singles"]
_CHUNK = tl.constexpr(CHUNK)
_BLOCK = tl.constexpr(16)
_BLOCKS = tl.constexpr(CHUNK // 16)


class Strides(NamedTuple):
    q_row: int
    q_head: int
    k_row: int
    k_head: int
    v_row: int
    v_head: int


class Slots(NamedTuple):
    """What lies behind sequences' first rows, or any tensors where nothing does (SLOTS = 0)."""

    state: Tensor
    open_k: Tensor
    open_u: Tensor
    open_g: Tensor
    slots: Tensor
    context_lens: Tensor
    state_slot: int
    k_slot: int
    u_slot: int
    g_slot: int


@triton.jit
def tf(x, TF: tl.constexpr):
    y = x
    if TF:
        bits = x.to(tl.int32, bitcast=True)
        y = tl.where(tl.abs(x) < float("inf"), ((bits + 0x1000) & -8192).to(tl.float32, bitcast=True), x)
    return y


@triton.jit
def decay(x, TF: tl.constexpr):
    """e^x for x of at most 0: exp_term for 16-bit inputs, to 2^-24 for fp32 ones."""
    if TF:
        y = exp_term(x)
    else:
        y = exp_down(x)
    return y


@triton.jit
def dot(a, b, TF: tl.constexpr):
    """a @ b of fp32 operands that tf has rounded."""
    # order: K ascending in one accumulator
    return tl.dot(a, b, input_precision="tf32" if TF else "ieee")


@triton.jit
def raw_dot(a, b):
    """a @ b of operands as they came."""
    # order: K ascending in one accumulator
    return tl.dot(a, b, input_precision="ieee")


@triton.jit
def norm_factor(x, L2NORM: tl.constexpr):
    """1 / norm of each row, fp32."""
    r = tl.full([x.shape[0]], 1.0, tl.float32)
    if L2NORM:
        x = x.to(tl.float32)
        r = tl.div_rn(r, tl.sqrt_rn(fold_sum(x * x) + 1e-6))
    return r


@triton.jit
def normed(x, L2NORM: tl.constexpr):
    """Rows divided by their norm, in fp32, and 1 / norm."""
    r = norm_factor(x, L2NORM)
    return x * r[:, None], r


@triton.jit
def row_of(x, n):
    """Row n of (R, N), as (N,), with + 0: a sum with zeros alone beside it, which has no order."""
    return tl.sum(tl.where(tl.arange(0, x.shape[0])[:, None] == n, x, 0.0), axis=0)


@triton.jit
def column_of(x, n):
    return tl.sum(tl.where(tl.arange(0, x.shape[1])[None, :] == n, x, 0.0), axis=1)


@triton.jit
def block_of(x, n):
    """Rows 16 n and on of (64, N), as (16, N), with + 0."""
    here = (tl.arange(0, _CHUNK) // _BLOCK)[:, None] == n
    return tl.sum(tl.reshape(tl.where(here, x, 0.0), [_BLOCKS, _BLOCK, x.shape[1]]), axis=0)


@triton.jit
def columns_of(x, n):
    """Columns 16 n and on of (R, 64), as (R, 16), with + 0."""
    here = (tl.arange(0, _CHUNK) // _BLOCK)[None, :] == n
    return tl.sum(tl.reshape(tl.where(here, x, 0.0), [x.shape[0], _BLOCKS, _BLOCK]), axis=1)


@triton.jit
def in_block(x, part, n):
    """x (64, N) with rows 16 n and on replaced by part (16, N)."""
    here = (tl.arange(0, _CHUNK) // _BLOCK)[:, None] == n
    spread = tl.reshape(tl.broadcast_to(part[None, :, :], [_BLOCKS, _BLOCK, x.shape[1]]), [_CHUNK, x.shape[1]])
    return tl.where(here, spread, x)


@triton.jit
def running_sums(g, row, head, a, last, before, HV: tl.constexpr):
    """(64,): G of places [a, last), `before` being that of place a - 1; elsewhere 0."""
    place = tl.arange(0, _CHUNK)
    sums = tl.zeros([_CHUNK], tl.float32)
    total = tl.zeros([], tl.float32) + before
    for i in range(a, last):  # order: ascending
        total = total + tl.load(g + (row + i - a) * HV + head)
        sums = tl.where(place == i, total, sums)
    return sums


@triton.jit
def coefficients(k, q, r, rq, sums, beta, TF: tl.constexpr):
    """A (64, 64), what w_j is multiplied by in u_i, and P, in o_i."""
    place = tl.arange(0, _CHUNK)
    i, j = place[:, None], place[None, :]
    e = decay(sums[:, None] - sums[None, :], TF)
    kt = tl.trans(k)
    a = tl.where(j < i, (beta * r)[:, None] * (e * raw_dot(k, kt)), 0.0)
    p = tl.where(j <= i, rq[:, None] * (e * raw_dot(q, kt)), 0.0)
    return a, p


@triton.jit
def solve(w, s, new, k, q, r, rq, sums, beta, v, TF: tl.constexpr):
    """u, w and o (64, N), each o before the scale; rows that are not `new` keep the w that they have."""
    place = tl.arange(0, _CHUNK)
    sub = tl.arange(0, _BLOCK)
    a, p = coefficients(k, q, r, rq, sums, beta, TF)
    state = tf(s, TF)
    first = decay(sums, TF)
    from_state = tl.broadcast_to(((first * r) * -1.0)[:, None], v.shape)
    left = beta[:, None] * tl.fma(from_state, dot(k.to(tl.float32), state, TF), v)
    right = (first * rq)[:, None] * tl.full(v.shape, 1.0, tl.float32)
    qs = dot(q.to(tl.float32), state, TF)
    u, o = tl.zeros_like(v), tl.zeros_like(v)
    newer = tl.broadcast_to(tl.where(new, 1.0, 0.0)[:, None], v.shape)
    factors = tl.broadcast_to(r[:, None], v.shape)
    for n in range(_BLOCKS):  # no unrolling: it would take minutes to compile
        a_rows, p_rows = block_of(a, n), block_of(p, n)
        fresh, r_block, w_block = block_of(newer, n) > 0.0, block_of(factors, n), block_of(w, n)
        before = (place < n * _BLOCK)[None, :]
        known = tf(tl.where((place < n * _BLOCK)[:, None], w, 0.0), TF)
        u_block = block_of(left, n) - (dot(tf(tl.where(before, a_rows, 0.0), TF), known, TF) + 0.0)
        o_sum = dot(tf(tl.where(before, p_rows, 0.0), TF), known, TF) + 0.0
        o_block = tl.fma(block_of(right, n), block_of(qs, n), o_sum)
        a_own, p_own = columns_of(a_rows, n), columns_of(p_rows, n)
        for j in range(_BLOCK):  # order: the own block's rows ascending, one fma each
            z = row_of(tl.where(fresh, r_block * u_block, w_block), j)
            z = tl.broadcast_to(z[None, :], u_block.shape)
            from_u = tl.broadcast_to(column_of(a_own, j)[:, None], u_block.shape)
            from_o = tl.broadcast_to(column_of(p_own, j)[:, None], u_block.shape)
            u_block = tl.where((sub > j)[:, None], tl.fma(from_u * -1.0, z, u_block), u_block)
            o_block = tl.where((sub >= j)[:, None], tl.fma(from_o, z, o_block), o_block)
        w = in_block(w, tl.where(fresh, r_block * u_block, w_block), n)
        u = in_block(u, u_block, n)
        o = in_block(o, o_block, n)
    return u, w, o


@triton.jit
def advance(s, w, k, sums, last, TF: tl.constexpr):
    """The state behind place last - 1; rows behind it are zeros."""
    place = tl.arange(0, _CHUNK)
    total = tl.sum(tl.where(place == last - 1, sums, 0.0), axis=0)
    there = place < last
    rest = decay(tl.where(there, total - sums, 0.0), TF)
    added = tf(tl.where(there[:, None], rest[:, None] * w, 0.0), TF)
    return tl.fma(tl.broadcast_to(decay(total, TF), s.shape), s, dot(tl.trans(k.to(tl.float32)), added, TF))


@triton.jit
def extent(offsets, sequence, tokens):
    """A sequence's rows, whatever the offsets are."""
    begin = tl.minimum(tl.maximum(tl.load(offsets + sequence), 0), tokens)
    return begin, tl.maximum(tl.minimum(tl.load(offsets + sequence + 1), tokens), begin)


@triton.jit
def origin(slots, sequence, rows, slot_count):
    """A sequence's slot, -1 where it has none, and its first row's position."""
    slot = tl.load(slots.slots + sequence)
    slot = tl.where((slot >= 0) & (slot < slot_count), slot, -1)
    first = tl.where(slot >= 0, tl.maximum(tl.load(slots.context_lens + sequence) - rows, 0), 0)
    return slot.to(tl.int64), first


@triton.jit(do_not_specialize=PER_CALL)
def _chunks_kernel(
    q, k, v, g, beta, out, offsets, initial, final, slots, states, us, tokens, sequences, slot_count, singles, strides,
    scale,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, BV: tl.constexpr,
    SLOTS: tl.constexpr, INITIAL: tl.constexpr, FINAL: tl.constexpr, KEEP: tl.constexpr, L2NORM: tl.constexpr,
    TF: tl.constexpr,
):  # fmt: skip
    """KEEP: the states at chunk starts and u are what is wanted, for the backward."""
    sequence, head = singles + tl.program_id(2), tl.program_id(1)
    begin, end = extent(offsets, sequence, tokens)
    d, c = tl.arange(0, DKP), tl.program_id(0) * BV + tl.arange(0, BV)
    wide, deep = (c < DV)[None, :], (d < DK)[None, :]
    key_head, place = head // (HV // HK), tl.arange(0, _CHUNK)
    plane = (d * DV)[:, None] + c[None, :]
    inside = (d < DK)[:, None] & wide
    s = tl.zeros([DKP, BV], tl.float32)
    a, position = 0, 0
    state = final
    k_open, u_open, g_open = k, v, g
    wanted = (end > begin) | FINAL
    writes = FINAL
    if SLOTS:
        slot, position = origin(slots, sequence, end - begin, slot_count)
        writes = slot >= 0
        held = tl.maximum(slot, 0)
        state = slots.state + held * slots.state_slot + head * DK * DV + plane
        k_open = slots.open_k + held * slots.k_slot + key_head * DK + d[None, :] + place[:, None] * (HK * DK)
        u_open = slots.open_u + held * slots.u_slot + head * DV + c[None, :] + place[:, None] * (HV * DV)
        g_open = slots.open_g + held * slots.g_slot + head
        wanted = end - begin > 1  # single tokens have a kernel of their own
        a = position % _CHUNK
        s = tl.load(state, mask=inside & wanted & (position >= _CHUNK), other=0.0)
    else:
        whose = (sequence.to(tl.int64) * HV + head) * DK * DV
        state = final + whose + plane
        if INITIAL:
            s = tl.load(initial + whose + plane, mask=inside, other=0.0)
    if wanted:
        row = begin
        chunk = begin // _CHUNK + sequence
        while row < end:
            last = tl.minimum(_CHUNK, a + end - row)
            new, old = (place >= a) & (place < last), place < a
            at = (row + place - a).to(tl.int64)
            x = tl.load(k + at[:, None] * strides.k_row + key_head * strides.k_head + d[None, :],
                        mask=new[:, None] & deep, other=0.0)  # fmt: skip
            y = tl.load(q + at[:, None] * strides.q_row + key_head * strides.q_head + d[None, :],
                        mask=new[:, None] & deep, other=0.0)  # fmt: skip
            value = tl.load(v + at[:, None] * strides.v_row + head * strides.v_head + c[None, :],
                            mask=new[:, None] & wide, other=0.0).to(tl.float32)  # fmt: skip
            b = tl.load(beta + at * HV + head, mask=new, other=0.0).to(tl.float32)
            w = tl.zeros([_CHUNK, BV], tl.float32)
            sums = tl.zeros([_CHUNK], tl.float32)
            before = 0.0
            if SLOTS:
                x = tl.where(old[:, None], tl.load(k_open, mask=old[:, None] & deep, other=0.0), x)
                w = tl.load(u_open, mask=old[:, None] & wide, other=0.0)
                sums = tl.load(g_open + place * HV, mask=old, other=0.0)
                before = tl.load(g_open + (a - 1) * HV, mask=a > 0, other=0.0)
            sums = tl.where(old, sums, running_sums(g, row.to(tl.int64), head, a, last, before, HV))
            r, rq = norm_factor(x, L2NORM), norm_factor(y, L2NORM)
            if KEEP:
                tl.store(states + (chunk.to(tl.int64) * HV + head) * DK * DV + plane, s, mask=inside)
            u, w, o = solve(w, s, new, x, y, r, rq, sums, b, value, TF)
            rows_at = (at * HV + head)[:, None] * DV + c[None, :]
            if KEEP:
                tl.store(us + rows_at, u, mask=new[:, None] & wide)
            else:
                tl.store(out + rows_at, (scale * o).to(out.dtype.element_ty), mask=new[:, None] & wide)
            if SLOTS:
                appended = new & writes & (last < _CHUNK)
                tl.store(u_open, w, mask=appended[:, None] & wide)
            if (last == _CHUNK) | FINAL:
                s = advance(s, w, x, sums, last, TF)
                if SLOTS:
                    tl.store(state, s, mask=inside & writes)
            row += last - a
            chunk += 1
            a = 0
        if FINAL:
            tl.store(state, s, mask=inside)


@triton.jit(do_not_specialize=PER_CALL)
def _append_kernel(
    k, g, offsets, slots, tokens, sequences, slot_count, singles, strides,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DKP: tl.constexpr,
):  # fmt: skip
    """k and G of the chunk that chunks leave open, by a launch of its own: the one before reads what this overwrites.
    Programs of value heads; the first of a group stores the group's k."""
    sequence, head = singles + tl.program_id(1), tl.program_id(0)
    begin, end = extent(offsets, sequence, tokens)
    slot, position = origin(slots, sequence, end - begin, slot_count)
    stop = position + end - begin
    chunk = stop // _CHUNK * _CHUNK  # the open chunk's first position
    if (slot >= 0) & (end - begin > 1) & (stop > chunk):
        d, place = tl.arange(0, DKP), tl.arange(0, _CHUNK)
        a = tl.maximum(position - chunk, 0)
        row = begin + chunk + a - position
        g_open = slots.open_g + slot * slots.g_slot + head
        before = tl.load(g_open + (a - 1) * HV, mask=a > 0, other=0.0)
        sums = running_sums(g, row.to(tl.int64), head, a, stop - chunk, before, HV)
        new = (place >= a) & (place < stop - chunk)
        tl.store(g_open + place * HV, sums, mask=new)
        if head % (HV // HK) == 0:
            key_head = head // (HV // HK)
            inside = new[:, None] & (d < DK)[None, :]
            at = (row + place - a).to(tl.int64)[:, None]
            x = tl.load(k + at * strides.k_row + key_head * strides.k_head + d[None, :], mask=inside, other=0.0)
            into = slots.open_k + slot * slots.k_slot + key_head * DK + d[None, :]
            tl.store(into + place[:, None] * (HK * DK), x, mask=inside)


@triton.jit(do_not_specialize=PER_CALL)
def _token_kernel(
    q, k, v, g, beta, out, offsets, slots, tokens, sequences, slot_count, strides, scale, q_wide, k_wide,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, DKP: tl.constexpr, BV: tl.constexpr,
    L2NORM: tl.constexpr, TF: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sequences with one row in the call. Rows 0 and 1 of a product's tile are those of k and of q.

    Of a tile of 16 rows the compiler makes another instruction than of chunks, and with it, where an operand was loaded
    in 16 bits and widened, another order of K (Triton 3.6, SM90: the even ones of 16 first). So on SM90 a tile has as
    many ROWS as a chunk; where that takes too much shared memory, k and q are loaded as WIDE ones, (T, Hk, dk) fp32.
    """
    sequence, head = tl.program_id(2), tl.program_id(1)
    begin, end = extent(offsets, sequence, tokens)
    if end - begin == 1:
        slot, position = origin(slots, sequence, 1, slot_count)
        here, known = tl.maximum(slot, 0), slot >= 0
        i = position % _CHUNK
        d, c = tl.arange(0, DKP), tl.program_id(0) * BV + tl.arange(0, BV)
        wide, deep = c < DV, d < DK
        key_head, place = head // (HV // HK), tl.arange(0, _CHUNK)
        row = begin.to(tl.int64)
        inside = deep[:, None] & wide[None, :]
        state = slots.state + here * slots.state_slot + head * DK * DV + (d * DV)[:, None] + c[None, :]
        s = tl.load(state, mask=inside & (position >= _CHUNK), other=0.0)
        old = place < i
        into_k = slots.open_k + here * slots.k_slot + key_head * DK + d
        into_u = slots.open_u + here * slots.u_slot + head * DV + c
        into_g = slots.open_g + here * slots.g_slot + head
        open_k = tl.load(into_k[None, :] + place[:, None] * (HK * DK), mask=old[:, None] & deep[None, :], other=0.0)
        w = tl.load(into_u[None, :] + place[:, None] * (HV * DV), mask=old[:, None] & wide[None, :], other=0.0)
        sums = tl.load(into_g + place * HV, mask=old, other=0.0)
        before = tl.load(into_g + (i - 1) * HV, mask=i > 0, other=0.0)
        x = tl.load(k + row * strides.k_row + key_head * strides.k_head + d, mask=deep, other=0.0)
        y = tl.load(q + row * strides.q_row + key_head * strides.q_head + d, mask=deep, other=0.0)
        value = tl.load(v + row * strides.v_row + head * strides.v_head + c, mask=wide, other=0.0).to(tl.float32)
        b = tl.load(beta + row * HV + head).to(tl.float32)
        total = before + tl.load(g + row * HV + head)

        mine = (place == i)[:, None]
        keys = tl.where(mine, x[None, :], open_k)
        tile = tl.arange(0, ROWS)
        zeros = tl.zeros([ROWS, DKP], x.dtype)
        both = tl.where((tile == 0)[:, None], x[None, :], tl.where((tile == 1)[:, None], y[None, :], zeros))
        factors = norm_factor(both, L2NORM)
        r, rq = tl.sum(tl.where(tile == 0, factors, 0.0), axis=0), tl.sum(tl.where(tile == 1, factors, 0.0), axis=0)
        widened = both.to(tl.float32)
        if WIDE:
            at_wide = (row * HK + key_head) * DK + d
            x_wide = tl.load(k_wide + at_wide, mask=deep, other=0.0)
            y_wide = tl.load(q_wide + at_wide, mask=deep, other=0.0)
            widened = tl.where((tile == 1)[:, None], y_wide[None, :], 0.0)
            widened = tl.where((tile == 0)[:, None], x_wide[None, :], widened)
        of_state = dot(widened, tf(s, TF), TF)
        grams = raw_dot(both, tl.trans(keys))
        sums = tl.where(place == i, total, sums)
        e = decay(total - sums, TF)
        a = tl.where(place < i, (b * r) * (e * row_of(grams, 0)), 0.0)
        p = tl.where(place <= i, rq * (e * row_of(grams, 1)), 0.0)
        n = i // _BLOCK
        earlier = place < n * _BLOCK
        factors = tl.where((tile == 0)[:, None], tl.where(earlier, a, 0.0)[None, :], 0.0)
        factors = tl.where((tile == 1)[:, None], tl.where(earlier, p, 0.0)[None, :], factors)
        of_rows = dot(tf(factors, TF), tf(tl.where(earlier[:, None], w, 0.0), TF), TF)
        first = tl.zeros([BV], tl.float32) + decay(total, TF)
        u_i = (b * tl.fma((first * r) * -1.0, row_of(of_state, 0), value) + 0.0) - row_of(of_rows, 0)
        o_i = tl.fma(first * rq, row_of(of_state, 1), row_of(of_rows, 1))
        own = block_of(w, n)
        for j in range(_BLOCK):
            at = n * _BLOCK + j
            z = row_of(own, j)
            from_u = tl.zeros([BV], tl.float32) + tl.sum(tl.where(place == at, a, 0.0), axis=0)
            from_o = tl.zeros([BV], tl.float32) + tl.sum(tl.where(place == at, p, 0.0), axis=0)
            u_i = tl.where(at < i, tl.fma(from_u * -1.0, z, u_i), u_i)
            o_i = tl.where(at < i, tl.fma(from_o, z, o_i), o_i)
        last = tl.zeros([BV], tl.float32) + tl.sum(tl.where(place == i, p, 0.0), axis=0)
        w_i = r * u_i
        o_i = tl.fma(last, w_i + 0.0, o_i)
        tl.store(out + (row * HV + head) * DV + c, (scale * o_i).to(out.dtype.element_ty), mask=wide)
        if i == _CHUNK - 1:
            s = advance(s, tl.where(mine, w_i[None, :], w), keys, sums, _CHUNK, TF)
            tl.store(state, s, mask=inside & known)
        else:
            tl.store(into_u + i * (HV * DV), w_i, mask=wide & known)
            if tl.program_id(0) == 0:
                tl.store(into_g + i * HV, total, mask=known)
                if head % (HV // HK) == 0:
                    tl.store(into_k + i * (HK * DK), x, mask=deep & known)


def sizes(q: Tensor, v: Tensor, l2norm: bool) -> dict:
    """What the kernels are compiled for, from static sizes alone. No bit depends on BV, the columns of a program."""
    (_, hk, dk), (_, hv, dv) = q.shape, v.shape
    deep = block(dk, "gated_delta: dk", most=256)
    columns = min(block(dv, "gated_delta: dv", most=256), 32 if deep <= 128 else 16)
    tf32 = q.dtype != torch.float32
    return {"HK": hk, "HV": hv, "DK": dk, "DV": dv, "DKP": deep, "BV": columns, "L2NORM": l2norm, "TF": tf32}


def strides_of(q: Tensor, k: Tensor, v: Tensor) -> Strides:
    return Strides(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])


def _nothing(q: Tensor, offsets: Tensor) -> Slots:
    return Slots(q, q, q, q, offsets, offsets, 0, 0, 0, 0)


def chunks(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, final=False, keep=False):
    """The outputs and the final states of packed sequences; with keep, what the backward needs: states at chunk
    starts (that of chunk n of sequence b at cu_seqlens[b] // 64 + b + n) and u."""
    tokens, batch, size = q.shape[0], cu_seqlens.shape[0] - 1, sizes(q, v, l2norm)
    device = q.device
    out = torch.empty((0,) if keep else v.shape, dtype=v.dtype, device=v.device)
    plane = v.shape[1], q.shape[2], v.shape[2]
    state = torch.empty((batch, *plane), dtype=torch.float32, device=device) if final else None
    states = torch.empty((tokens // CHUNK + batch + 1, *plane), dtype=torch.float32, device=device) if keep else None
    us = torch.empty(v.shape, dtype=torch.float32, device=device) if keep else None
    if batch and (tokens or final):
        grid = cdiv(v.shape[2], size["BV"]), v.shape[1], batch
        with on(q):
            _chunks_kernel[grid](
                q, k, v, g, beta, out, cu_seqlens, g if initial_state is None else initial_state,
                g if state is None else state, _nothing(q, cu_seqlens), g if states is None else states,
                g if us is None else us, tokens, batch, 0, 0, strides_of(q, k, v), scale,
                SLOTS=False, INITIAL=initial_state is not None, FINAL=final, KEEP=keep, num_warps=8, num_stages=1,
                **size, **OPTIONS,
            )  # fmt: skip
    return (states, us) if keep else (out, state)


def varlen_fwd(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, final):
    return chunks(q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm, final)


def varlen_bwd(dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm):
    from .triton_backward import backward

    return backward(dout, dfinal, q, k, v, g, beta, cu_seqlens, initial_state, scale, l2norm)


def paged_chunks(q, k, v, g, beta, slots: Slots, slot_count: int, cu_seqlens_q, scale, l2norm, out, singles=0) -> None:
    """Sequences with more than one row in the call, which the first `singles` have not; others are left alone."""
    tokens, batch, size = q.shape[0], cu_seqlens_q.shape[0] - 1, sizes(q, v, l2norm)
    grid = cdiv(v.shape[2], size["BV"]), v.shape[1], batch - singles
    strides = strides_of(q, k, v)
    with on(q):
        _chunks_kernel[grid](
            q, k, v, g, beta, out, cu_seqlens_q, g, g, slots, g, g, tokens, batch, slot_count, singles, strides, scale,
            SLOTS=True, INITIAL=False, FINAL=False, KEEP=False, num_warps=8, num_stages=1, **size, **OPTIONS,
        )  # fmt: skip
    append(q, k, v, g, cu_seqlens_q, slots, slot_count, singles)


def append(q, k, v, g, cu_seqlens_q, slots: Slots, slot_count: int, singles: int) -> None:
    """Stores k and G of the chunks that such sequences leave open."""
    tokens, batch, size = q.shape[0], cu_seqlens_q.shape[0] - 1, sizes(q, v, True)
    shared = {name: size[name] for name in ("HK", "HV", "DK", "DKP")}
    with on(q):
        _append_kernel[v.shape[1], batch - singles](
            k, g, cu_seqlens_q, slots, tokens, batch, slot_count, singles, strides_of(q, k, v), num_warps=4, **shared,
            **OPTIONS,
        )  # fmt: skip


def paged_tokens(q, k, v, g, beta, slots: Slots, slot_count: int, cu_seqlens_q, scale, l2norm, out) -> None:
    """Sequences with one row in the call; others are left alone."""
    tokens, batch, size = q.shape[0], cu_seqlens_q.shape[0] - 1, sizes(q, v, l2norm)
    chunked = size["TF"] and q.is_cuda and gpu.sm90(q.device)
    wide = chunked and size["DKP"] > 128
    grid = cdiv(v.shape[2], size["BV"]), v.shape[1], batch
    with on(q):
        _token_kernel[grid](
            q, k, v, g, beta, out, cu_seqlens_q, slots, tokens, batch, slot_count, strides_of(q, k, v), scale,
            q.float().contiguous() if wide else g, k.float().contiguous() if wide else g,
            ROWS=CHUNK if chunked and not wide else 16, WIDE=wide, num_warps=4, num_stages=1, **size, **OPTIONS,
        )  # fmt: skip


def slots_of(state, open_k, open_u, open_g, slots, context_lens) -> Slots:
    return Slots(
        state, open_k, open_u, open_g, slots, context_lens, *(t.stride(0) for t in (state, open_k, open_u, open_g))
    )


def paged_fwd(
    q, k, v, g, beta, state, open_k, open_u, open_g, slots, context_lens, cu_seqlens_q, max_seqlen_q, singles, scale,
    l2norm,
):  # fmt: skip
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    g, beta = g.contiguous(), beta.float().contiguous()
    if q.shape[0] and slots.shape[0]:
        where = slots_of(state, open_k, open_u, open_g, slots, context_lens)
        rest = where, state.shape[0], cu_seqlens_q, scale, l2norm, out
        paged_tokens(q, k, v, g, beta, *rest)
        if max_seqlen_q > 1 and singles < slots.shape[0]:
            paged_chunks(q, k, v, g, beta, *rest, singles)
    return out
