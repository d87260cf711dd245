// One chunk of a gated delta net, for the forward and the backward. Included by cpu_kernels.cpp only.
#pragma once
#include <algorithm>

#include "common/vec.h"
#include "gated_delta/kernels.h"

namespace vx::VEXACT_ISA {

constexpr int64_t C = kDeltaChunk, B = kDeltaBlock;

// f(row, column, lanes, value) for every 16 columns of a (rows, depth) @ b (depth, n).
// order: depth ascending in one accumulator from +0 per element, whatever the number of rows
template <int R, int V, class F>
VX_INLINE void product_tile(const float* a, int64_t lda, int64_t row, const float* b, int64_t ldb, int64_t depth,
                            int64_t column, int lanes, F f) {
  F16 acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = zero();
  for (int64_t d = 0; d < depth; ++d) {
    F16 y[V];
    for (int v = 0; v < V; ++v) y[v] = load_lanes(b + d * ldb + column + 16 * v, lanes);
    for (int r = 0; r < R; ++r) {
      const F16 x = set1(a[(row + r) * lda + d]);
      for (int v = 0; v < V; ++v) acc[r][v] = fma(x, y[v], acc[r][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) f(row + r, column + 16 * v, lanes, acc[r][v]);
}

template <int R, class F>
VX_INLINE void product_rows(const float* a, int64_t lda, int64_t row, const float* b, int64_t ldb, int64_t depth,
                            int64_t n, F f) {
  int64_t c = 0;
  for (; c + 32 <= n; c += 32) product_tile<R, 2>(a, lda, row, b, ldb, depth, c, 16, f);
  for (; c < n; c += 16) product_tile<R, 1>(a, lda, row, b, ldb, depth, c, int(n - c < 16 ? n - c : 16), f);
}

template <class F>
VX_INLINE void product(const float* a, int64_t lda, int64_t rows, const float* b, int64_t ldb, int64_t depth, int64_t n,
                       F f) {
  int64_t row = 0;
  for (; row + 4 <= rows; row += 4) product_rows<4>(a, lda, row, b, ldb, depth, n, f);
  for (; row < rows; ++row) product_rows<1>(a, lda, row, b, ldb, depth, n, f);
}

// out (rows, n) = a @ b, or added to what is there.
inline void product_to(const float* a, int64_t lda, int64_t rows, const float* b, int64_t ldb, int64_t depth, int64_t n,
                       float* out, int64_t ldo, bool add = false) {
  if (add)
    product(a, lda, rows, b, ldb, depth, n, [&](int64_t r, int64_t c, int lanes, F16 v) {
      store_lanes(out + r * ldo + c, load_lanes(out + r * ldo + c, lanes) + v, lanes);
    });
  else
    product(a, lda, rows, b, ldb, depth, n,
            [&](int64_t r, int64_t c, int lanes, F16 v) { store_lanes(out + r * ldo + c, v, lanes); });
}

inline void transpose_to(const float* a, int64_t rows, int64_t columns, float* out, int64_t ldo) {
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c) out[c * ldo + r] = a[r * columns + c];
}

// order: 16 lanes ascending, then their tree
VX_INLINE float dot(const float* a, const float* b, int64_t n) {
  F16 acc = zero();
  for_chunks(n, [&](int64_t i, int lanes) { acc = fma(load_lanes(a + i, lanes), load_lanes(b + i, lanes), acc); });
  return sum_lanes(acc);
}

VX_INLINE float reciprocal_norm(const float* x, int64_t n) { return 1.0f / std::sqrt(dot(x, x, n) + 1e-6f); }

// One head of a row in fp32, divided by its norm where that is asked for; its 1 / norm, or 1.
template <class T>
VX_INLINE float load_row(const T* x, int64_t n, bool l2norm, float* out) {
  for_chunks(n, [&](int64_t i, int lanes) { store_lanes(out + i, load_lanes(x + i, lanes), lanes); });
  if (!l2norm) return 1.0f;
  const float r = reciprocal_norm(out, n);
  for_chunks(n, [&](int64_t i, int lanes) { store_lanes(out + i, load_lanes(out + i, lanes) * set1(r), lanes); });
  return r;
}

// Scratch memory handed out in order.
struct Arena {
  float* at;
  float* take(int64_t n) {
    float* found = at;
    at += (n + 15) / 16 * 16;
    return found;
  }
};

// What the value heads of one key head share: places [0, b) of keys, of which [a, b) are this call's rows.
struct Keys {
  float *k, *kt, *q;  // (C, dk), (dk, C), (C, dk); q has only this call's rows
  float *kk, *qk;     // (C, C): k_i . k_j and q_i . k_j for i in [a, b), j < b

  static int64_t size(int64_t dk) { return 3 * C * (dk + 16) + 2 * C * C; }
  Keys(Arena& arena, int64_t dk)
      : k(arena.take(C * dk)), kt(arena.take(C * dk)), q(arena.take(C * dk)), kk(arena.take(C * C)),
        qk(arena.take(C * C)) {}

  void load(const GatedDelta& op, const DeltaSlots& open, int64_t slot, int64_t head, int64_t row, int64_t a, int64_t b,
            bool queries) {
    if (op.dtype == Dtype::f32)
      load_as<float>(op, open, slot, head, row, a, b, queries);
    else
      load_as<bf16>(op, open, slot, head, row, a, b, queries);
  }

  template <class T>
  void load_as(const GatedDelta& op, const DeltaSlots& open, int64_t slot, int64_t head, int64_t row, int64_t a,
               int64_t b, bool queries) {
    const int64_t dk = op.dk;
    for (int64_t i = 0; i < b; ++i)
      load_row(i < a ? static_cast<const T*>(open.open_k) + slot * open.k_slot + (i * op.hk + head) * dk
                     : static_cast<const T*>(op.k) + (row + i - a) * op.k_row + head * op.k_head,
               dk, op.l2norm, k + i * dk);
    transpose_to(k, b, dk, kt, C);
    product_to(k + a * dk, dk, b - a, kt, C, dk, b, kk + a * C, C);
    if (!queries) return;
    for (int64_t i = a; i < b; ++i)
      load_row(static_cast<const T*>(op.q) + (row + i - a) * op.q_row + head * op.q_head, dk, op.l2norm, q + i * dk);
    product_to(q + a * dk, dk, b - a, kt, C, dk, b, qk + a * C, C);
  }
};

// One value head's share of a chunk.
struct Head {
  float *u, *sk, *sq;  // (C, dv): u of places [0, b), and S^T k_i, S^T q_i of [a, b)
  float *g, *eg;       // (C,): the running sum of g, and its exponential
  float *decay;        // (C, C): exp(G_i - G_j) for i in [a, b), j <= i
  float *ca, *cp;      // (B, C): what u_j is multiplied by in u_i and in o_i

  static int64_t size(int64_t dv) { return 3 * C * (dv + 16) + C * C + 2 * C + 2 * B * C; }
  Head(Arena& arena, int64_t dv)
      : u(arena.take(C * dv)), sk(arena.take(C * dv)), sq(arena.take(C * dv)), g(arena.take(C)), eg(arena.take(C)),
        decay(arena.take(C * C)), ca(arena.take(B * C)), cp(arena.take(B * C)) {}

  // g of places [a, b) from the rows' own, those before a being there; then the decays.
  void decays(const GatedDelta& op, int64_t head, int64_t row, int64_t a, int64_t b) {
    float sum = a ? g[a - 1] : 0.0f;
    for (int64_t i = a; i < b; ++i) g[i] = sum = sum + op.g[(row + i - a) * op.hv + head];  // order: ascending
    for_chunks(b, [&](int64_t i, int lanes) { store_lanes(eg + i, exp(load_lanes(g + i, lanes)), lanes); });
    for (int64_t i = a; i < b; ++i)
      for_chunks(i + 1, [&](int64_t j, int lanes) {
        store_lanes(decay + i * C + j, exp(set1(g[i]) - load_lanes(g + j, lanes)), lanes);
      });
  }

  // u of places [a, b), and the outputs where there are queries; S (dk, dv).
  template <class T>
  void solve(const GatedDelta& op, const Keys& keys, const float* S, int64_t head, int64_t row, int64_t a, int64_t b,
             T* out, bool queries) {
    const int64_t dk = op.dk, dv = op.dv;
    product_to(keys.k + a * dk, dk, b - a, S, dv, dk, dv, sk + a * dv, dv);
    if (queries) product_to(keys.q + a * dk, dk, b - a, S, dv, dk, dv, sq + a * dv, dv);
    for (int64_t first = a; first < b;) {
      const int64_t block = first / B * B, last = std::min(block + B, b), rows = last - first;
      for (int64_t i = first; i < last; ++i) {
        const F16 beta = set1(op.beta[(row + i - a) * op.hv + head]);
        for_chunks(i + 1, [&](int64_t j, int lanes) {
          const F16 d = load_lanes(decay + i * C + j, lanes);
          store_lanes(ca + (i - first) * C + j, (load_lanes(keys.kk + i * C + j, lanes) * d) * beta, lanes);
          if (queries) store_lanes(cp + (i - first) * C + j, load_lanes(keys.qk + i * C + j, lanes) * d, lanes);
        });
      }
      // order: what the state gives, less the sum over earlier blocks (j ascending, one accumulator), then the block's
      // own rows one by one, j ascending
      product(ca, C, rows, u, dv, block, dv, [&](int64_t r, int64_t n, int lanes, F16 sum) {
        const int64_t i = first + r, at = row + i - a;
        const T* v = static_cast<const T*>(op.v) + at * op.v_row + head * op.v_head;
        const F16 left = fma(neg(set1(eg[i])), load_lanes(sk + i * dv + n, lanes), load_lanes(v + n, lanes));
        store_lanes(u + i * dv + n, set1(op.beta[at * op.hv + head]) * left - sum, lanes);
      });
      for (int64_t i = first; i < last; ++i)
        for_chunks(dv, [&](int64_t n, int lanes) {
          F16 x = load_lanes(u + i * dv + n, lanes);
          for (int64_t j = block; j < i; ++j)
            x = fma(neg(set1(ca[(i - first) * C + j])), load_lanes(u + j * dv + n, lanes), x);
          store_lanes(u + i * dv + n, x, lanes);
        });
      if (queries)
        product(cp, C, rows, u, dv, block, dv, [&](int64_t r, int64_t n, int lanes, F16 sum) {
          const int64_t i = first + r;
          F16 o = fma(set1(eg[i]), load_lanes(sq + i * dv + n, lanes), sum);
          for (int64_t j = block; j <= i; ++j)
            o = fma(set1(cp[r * C + j]), load_lanes(u + j * dv + n, lanes), o);
          store_lanes(out + ((row + i - a) * op.hv + head) * dv + n, o * set1(op.scale), lanes);
        });
      first = last;
    }
  }

  // S' of places [0, b) into `to`, which may be S; kd: scratch (dk, C).
  void advance(const GatedDelta& op, const Keys& keys, const float* S, float* to, int64_t b, float* kd) {
    const int64_t dv = op.dv;
    float* rest = ca;  // exp(G_last - G_j)
    for_chunks(b, [&](int64_t j, int lanes) { store_lanes(rest + j, exp(set1(g[b - 1]) - load_lanes(g + j, lanes)), lanes); });
    for (int64_t d = 0; d < op.dk; ++d)
      for_chunks(b, [&](int64_t j, int lanes) {
        store_lanes(kd + d * C + j, load_lanes(keys.kt + d * C + j, lanes) * load_lanes(rest + j, lanes), lanes);
      });
    const F16 all = set1(eg[b - 1]);
    // order: the sum over j ascending in one accumulator, then the decayed state
    product(kd, C, op.dk, u, dv, b, dv, [&](int64_t d, int64_t n, int lanes, F16 sum) {
      store_lanes(to + d * dv + n, fma(all, load_lanes(S + d * dv + n, lanes), sum), lanes);
    });
  }
};

}  // namespace vx::VEXACT_ISA
