#include "gated_delta/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"
#include "gated_delta/chunk.h"
#include "silu_mul/gate.h"

namespace vx::VEXACT_ISA {
namespace {

// A task is one sequence and one key head with all its value heads, which share the rows that are open.
template <class T>
void forward(const GatedDeltaFwd& f) {
  const GatedDelta& op = f.op;
  const DeltaSlots& open = f.open;
  const int64_t group = op.hv / op.hk, dk = op.dk, dv = op.dv, plane = dk * dv;
  parallel_tasks(op.sequences * op.hk, [&](int64_t task) {
    const int64_t b = task / op.hk, key_head = task % op.hk, begin = op.offsets[b], end = op.offsets[b + 1];
    const int64_t slot = open.state ? open.slots[b] : -1;
    const int64_t first = slot >= 0 ? open.context_lens[b] - (end - begin) : 0;  // the first row's position
    const bool kept = first >= C;                                               // a state to go on from
    if (begin == end && !f.final_state) return;
    Arena arena{static_cast<float*>(
        scratch(0, 4 * (Keys::size(dk) + Head::size(dv) + dk * C + (group + 1) * (plane + 16) + 64)))};
    Keys keys(arena, dk);
    Head head(arena, dv);
    float* kd = arena.take(dk * C);
    float* nothing = arena.take(plane);
    float* states = arena.take(group * plane);
    std::fill(nothing, nothing + plane, 0.0f);
    const float* S[64];
    float* to[64];  // where a value head's states are written
    for (int64_t h = 0; h < group; ++h) {
      const int64_t of = (b * op.hv + key_head * group + h) * plane;
      to[h] = slot >= 0 ? open.state + slot * open.state_slot + (key_head * group + h) * plane
              : f.final_state ? f.final_state + of
                              : states + h * plane;
      S[h] = kept ? to[h] : f.initial ? f.initial + of : nothing;
      if (begin == end) std::copy(S[h], S[h] + plane, to[h]);
    }
    int64_t a = first % C, row = begin;
    while (row < end) {
      const int64_t last = std::min(C, a + end - row), rows = last - a;
      const bool ends = row + rows == end, whole = last == C;
      keys.load(op, open, slot, key_head, row, a, last, true);
      for (int64_t h = 0; h < group; ++h) {
        const int64_t v_head = key_head * group + h;
        for (int64_t i = 0; i < a; ++i) {
          head.g[i] = open.open_g[slot * open.g_slot + i * op.hv + v_head];
          std::copy_n(open.open_u + slot * open.u_slot + (i * op.hv + v_head) * dv, dv, head.u + i * dv);
        }
        head.decays(op, v_head, row, a, last);
        head.solve(op, keys, S[h], v_head, row, a, last, static_cast<T*>(f.out), true);
        if (whole || (ends && f.final_state)) {
          head.advance(op, keys, S[h], to[h], last, kd);
          S[h] = to[h];
        }
        if (ends && !whole && slot >= 0)
          for (int64_t i = a; i < last; ++i) {
            open.open_g[slot * open.g_slot + i * op.hv + v_head] = head.g[i];
            std::copy_n(head.u + i * dv, dv, open.open_u + slot * open.u_slot + (i * op.hv + v_head) * dv);
          }
      }
      if (ends && !whole && slot >= 0)
        for (int64_t i = a; i < last; ++i)
          std::copy_n(static_cast<const T*>(op.k) + (row + i - a) * op.k_row + key_head * op.k_head, dk,
                      static_cast<T*>(open.open_k) + slot * open.k_slot + (i * op.hk + key_head) * dk);
      row += rows;
      a = 0;
    }
  });
}

// The gradients of one chunk of b rows, of one value head. dS: (dk, dv), that of the state behind the chunk, and on
// return of the state before it.
template <class T>
void chunk_backward(const GatedDeltaBwd& f, const Keys& keys, Head& head, const float* S, float* dS, int64_t v_head,
                    int64_t row, int64_t b, Arena arena) {
  const GatedDelta& op = f.op;
  const int64_t dk = op.dk, dv = op.dv, hv = op.hv;
  float *dout = arena.take(C * dv), *w = arena.take(C * dv), *e = arena.take(C * dv), *ut = arena.take(C * dv);
  float *by_k = arena.take(C * dv), *by_q = arena.take(C * dv);
  float *x = arena.take(C * C), *y = arena.take(C * C), *xt = arena.take(C * C), *yt = arena.take(C * C);
  float *h = arena.take(C * dk), *qt = arena.take(dk * C), *St = arena.take(dk * dv);
  float *dg = arena.take(C), *rest = arena.take(C), *beta = arena.take(C);
  const float* g = head.g;
  const float last = head.eg[b - 1];
  auto at = [&](int64_t i) { return (row + i) * hv + v_head; };
  for (int64_t i = 0; i < b; ++i) {
    beta[i] = op.beta[at(i)];
    const T* d = static_cast<const T*>(f.dout) + at(i) * dv;
    for_chunks(dv, [&](int64_t n, int lanes) {
      store_lanes(dout + i * dv + n, load_lanes(d + n, lanes) * set1(op.scale), lanes);
    });
  }
  for_chunks(b, [&](int64_t j, int lanes) { store_lanes(rest + j, exp(set1(g[b - 1]) - load_lanes(g + j, lanes)), lanes); });
  // xt[j][i] = exp(G_i - G_j) q_i . k_j for i >= j, which takes dout to u_j; x[i][j] the same of keys, for j < i
  for (int64_t i = 0; i < b; ++i)
    for (int64_t j = 0; j < b; ++j) {
      const float d = j <= i ? head.decay[i * C + j] : 0.0f;
      xt[j * C + i] = j <= i ? keys.qk[i * C + j] * d : 0.0f;
      x[i * C + j] = j < i ? keys.kk[i * C + j] * d : 0.0f;
    }
  product_to(keys.k, dk, b, dS, dv, dk, dv, w, dv);
  for (int64_t j = 0; j < b; ++j)
    for_chunks(dv, [&](int64_t n, int lanes) { store_lanes(w + j * dv + n, load_lanes(w + j * dv + n, lanes) * set1(rest[j]), lanes); });
  product_to(xt, C, b, dout, dv, b, dv, w, dv, true);
  for (int64_t j = b - 1; j >= 0; --j)  // order: the gradient of u_j takes those of later rows, descending
    for_chunks(dv, [&](int64_t n, int lanes) {
      F16 sum = load_lanes(w + j * dv + n, lanes);
      for (int64_t i = b - 1; i > j; --i)
        sum = fma(neg(set1(beta[i] * x[i * C + j])), load_lanes(w + i * dv + n, lanes), sum);
      store_lanes(w + j * dv + n, sum, lanes);
    });
  // e_i = u_i / beta_i without the division
  product(x, C, b, head.u, dv, b, dv, [&](int64_t i, int64_t n, int lanes, F16 sum) {
    const T* v = static_cast<const T*>(op.v) + (row + i) * op.v_row + v_head * op.v_head;
    const F16 left = fma(neg(set1(head.eg[i])), load_lanes(head.sk + i * dv + n, lanes), load_lanes(v + n, lanes));
    store_lanes(e + i * dv + n, left - sum, lanes);
  });
  for (int64_t i = 0; i < b; ++i) {
    const float at_k = beta[i] * head.eg[i], at_q = head.eg[i];
    T* dv_row = static_cast<T*>(f.dv) + at(i) * dv;
    for_chunks(dv, [&](int64_t n, int lanes) {
      const F16 wi = load_lanes(w + i * dv + n, lanes);
      store_lanes(dv_row + n, set1(beta[i]) * wi, lanes);
      store_lanes(by_k + i * dv + n, neg(set1(at_k)) * wi, lanes);
      store_lanes(by_q + i * dv + n, set1(at_q) * load_lanes(dout + i * dv + n, lanes), lanes);
    });
    f.dbeta[at(i)] = dot(w + i * dv, e + i * dv, dv);
    dg[i] = dot(by_k + i * dv, head.sk + i * dv, dv) + dot(by_q + i * dv, head.sq + i * dv, dv);
  }
  transpose_to(head.u, b, dv, ut, C);
  product_to(w, dv, b, ut, C, dv, b, x, C);
  product_to(dout, dv, b, ut, C, dv, b, y, C);
  for (int64_t i = 0; i < b; ++i) {
    float sum = 0.0f;
    for (int64_t j = 0; j < b; ++j) {
      const float d = j <= i ? head.decay[i * C + j] : 0.0f;
      x[i * C + j] = j < i ? -beta[i] * d * x[i * C + j] : 0.0f;  // of k_i . k_j
      y[i * C + j] = j <= i ? d * y[i * C + j] : 0.0f;            // of q_i . k_j
      xt[j * C + i] = x[i * C + j], yt[j * C + i] = y[i * C + j];
      if (j < i) {
        const float m = x[i * C + j] * keys.kk[i * C + j] + y[i * C + j] * keys.qk[i * C + j];
        sum += m, dg[j] -= m;
      }
    }
    dg[i] += sum;
  }
  // dk and dq of this value head
  float *dq = f.dq + at(0) * dk, *dk_ = f.dk + at(0) * dk;
  const int64_t step = hv * dk;
  transpose_to(dS, dk, dv, St, dk);
  product_to(head.u, dv, b, St, dk, dv, dk, h, dk);
  transpose_to(S, dk, dv, St, dk);
  product_to(by_q, dv, b, St, dk, dv, dk, dq, step);
  product_to(y, C, b, keys.k, dk, b, dk, dq, step, true);
  product_to(by_k, dv, b, St, dk, dv, dk, dk_, step);
  product_to(x, C, b, keys.k, dk, b, dk, dk_, step, true);
  product_to(xt, C, b, keys.k, dk, b, dk, dk_, step, true);
  product_to(yt, C, b, keys.q, dk, b, dk, dk_, step, true);
  float at_last = last * dot(dS, S, dk * dv);
  for (int64_t j = 0; j < b; ++j) {
    const float t = rest[j] * dot(keys.k + j * dk, h + j * dk, dk);
    at_last += t, dg[j] -= t;
    for_chunks(dk, [&](int64_t n, int lanes) {
      float* to = dk_ + j * step + n;
      store_lanes(to, fma(set1(rest[j]), load_lanes(h + j * dk + n, lanes), load_lanes(to, lanes)), lanes);
    });
  }
  dg[b - 1] += at_last;
  float sum = 0.0f;
  for (int64_t i = b - 1; i >= 0; --i) f.dg[at(i)] = sum = sum + dg[i];  // order: descending
  // the state before the chunk
  transpose_to(keys.q, b, dk, qt, C);
  for_chunks(dk * dv, [&](int64_t n, int lanes) { store_lanes(dS + n, load_lanes(dS + n, lanes) * set1(last), lanes); });
  product_to(keys.kt, C, dk, by_k, dv, b, dv, dS, dv, true);
  product_to(qt, C, dk, by_q, dv, b, dv, dS, dv, true);
}

template <class T>
void backward(const GatedDeltaBwd& f) {
  const GatedDelta& op = f.op;
  const int64_t group = op.hv / op.hk, dk = op.dk, dv = op.dv, plane = dk * dv;
  parallel_tasks(op.sequences * op.hv, [&](int64_t task) {
    const int64_t b = task / op.hv, v_head = task % op.hv, begin = op.offsets[b], end = op.offsets[b + 1];
    const int64_t chunks = (end - begin + C - 1) / C;
    Arena arena{static_cast<float*>(scratch(0, 4 * (Keys::size(dk) + Head::size(dv) + dk * C + plane + 64 +
                                                    6 * C * (dv + 16) + 4 * C * C + 3 * C * (dk + 16) + plane + 4 * C)))};
    // states at the starts of chunks, made anew
    float* states = static_cast<float*>(scratch(1, 4 * (chunks + 1) * plane));
    Keys keys(arena, dk);
    Head head(arena, dv);
    float *kd = arena.take(dk * C), *dS = arena.take(plane);
    if (f.initial)
      std::copy_n(f.initial + task * plane, plane, states);
    else
      std::fill_n(states, plane, 0.0f);
    for (int64_t c = 0; c + 1 < chunks; ++c) {
      const int64_t row = begin + c * C;
      keys.load(op, {}, -1, v_head / group, row, 0, C, false);
      head.decays(op, v_head, row, 0, C);
      head.solve<T>(op, keys, states + c * plane, v_head, row, 0, C, nullptr, false);
      head.advance(op, keys, states + c * plane, states + (c + 1) * plane, C, kd);
    }
    if (f.dfinal)
      std::copy_n(f.dfinal + task * plane, plane, dS);
    else
      std::fill_n(dS, plane, 0.0f);
    T* unused = static_cast<T*>(f.dv);  // the outputs, made anew with u, go where their gradients' rows will
    for (int64_t c = chunks - 1; c >= 0; --c) {
      const int64_t row = begin + c * C, rows = std::min(C, end - row);
      keys.load(op, {}, -1, v_head / group, row, 0, rows, true);
      head.decays(op, v_head, row, 0, rows);
      head.solve(op, keys, states + c * plane, v_head, row, 0, rows, unused, true);
      chunk_backward<T>(f, keys, head, states + c * plane, dS, v_head, row, rows, arena);
    }
    if (f.dinitial) std::copy_n(dS, plane, f.dinitial + task * plane);
  });
  // order: the value heads of a key head ascending; then the gradient of the norm, and one rounding
  const int64_t tokens = op.offsets[op.sequences];
  parallel_for(0, tokens * op.hk, 1 + 4096 / (dk * group), [&](int64_t from, int64_t until) {
    float* sum = static_cast<float*>(scratch(0, 4 * 2 * (dk + 16)));
    float* normed = sum + (dk + 15) / 16 * 16;
    for (int64_t i = from; i < until; ++i) {
      const int64_t row = i / op.hk, head = i % op.hk;
      auto one = [&](const float* parts, const T* x, T* out) {
        std::copy_n(parts + (row * op.hv + head * group) * dk, dk, sum);
        for (int64_t h = 1; h < group; ++h)
          for (int64_t d = 0; d < dk; ++d) sum[d] = sum[d] + parts[(row * op.hv + head * group + h) * dk + d];
        const float r = load_row(x, dk, op.l2norm, normed);
        const F16 along = set1(op.l2norm ? dot(normed, sum, dk) : 0.0f);
        for_chunks(dk, [&](int64_t d, int lanes) {
          F16 v = load_lanes(sum + d, lanes);
          if (op.l2norm) v = set1(r) * fma(neg(along), load_lanes(normed + d, lanes), v);
          store_lanes(out + d, v, lanes);
        });
      };
      one(f.dq, static_cast<const T*>(op.q) + row * op.q_row + head * op.q_head, static_cast<T*>(f.dq_out) + i * dk);
      one(f.dk, static_cast<const T*>(op.k) + row * op.k_row + head * op.k_head, static_cast<T*>(f.dk_out) + i * dk);
    }
  });
}

// log(1 + e^x), which is x above 20 as torch has it. log(1 + q) loses q's low bits; q / (u - 1) puts them back.
VX_INLINE F16 softplus(F16 x) {
  const F16 q = exp(neg(abs(x))), u = set1(1.0f) + q, up = u - set1(1.0f);
  const F16 low = select(up > zero(), log(u) * (q / up), q);
  const F16 y = select(x > zero(), x, zero()) + low;
  return select(is_nan(x), x, select(x > set1(20.0f), x, y));
}

template <class T>
void gates_forward(const DeltaGatesFwd& f) {
  const DeltaGates& op = f.op;
  parallel_for(0, op.rows, 1 + 1024 / (op.heads + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for_chunks(op.heads, [&](int64_t i, int lanes) {
        const F16 x = load_lanes(static_cast<const T*>(op.a) + row * op.a_stride + i, lanes) +
                      load_lanes(op.dt_bias + i, lanes);
        store_lanes(f.g + row * op.heads + i, neg(exp(load_lanes(op.a_log + i, lanes)) * softplus(x)), lanes);
        const F16 b = load_lanes(static_cast<const T*>(op.b) + row * op.b_stride + i, lanes);
        store_lanes(static_cast<T*>(f.beta) + row * op.heads + i, gate_of(b).s, lanes);
      });
  });
}

template <class T>
void gates_backward(const DeltaGatesBwd& f) {
  const DeltaGates& op = f.op;
  // order: a_log and dt_bias sum the rows one by one, ascending; threads share out the heads.
  parallel_for(0, (op.heads + 15) / 16, 1, [&](int64_t begin, int64_t end) {
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      const int64_t i = chunk * 16;
      const int lanes = int(op.heads - i < 16 ? op.heads - i : 16);
      const F16 rate = exp(load_lanes(op.a_log + i, lanes)), bias = load_lanes(op.dt_bias + i, lanes);
      F16 of_log = zero(), of_bias = zero();
      for (int64_t row = 0; row < op.rows; ++row) {
        const int64_t at = row * op.heads + i;
        const F16 x = load_lanes(static_cast<const T*>(op.a) + row * op.a_stride + i, lanes) + bias;
        const F16 d = neg(load_lanes(f.dg + at, lanes) * rate), slope = select(x > set1(20.0f), set1(1.0f), gate_of(x).s);
        const F16 da = d * slope;
        of_log = fma(d, softplus(x), of_log);
        of_bias = of_bias + da;
        store_lanes(static_cast<T*>(f.da) + at, da, lanes);
        const Gate b = gate_of(load_lanes(static_cast<const T*>(op.b) + row * op.b_stride + i, lanes));
        store_lanes(static_cast<T*>(f.db) + at, load_lanes(static_cast<const T*>(f.dbeta) + at, lanes) * (b.s * b.rest),
                    lanes);
      }
      store_lanes(f.da_log + i, of_log, lanes);
      store_lanes(f.ddt_bias + i, of_bias, lanes);
    }
  });
}

}  // namespace

void delta_gates_fwd(const DeltaGatesFwd& a) { a.op.dtype == Dtype::f32 ? gates_forward<float>(a) : gates_forward<bf16>(a); }
void delta_gates_bwd(const DeltaGatesBwd& a) {
  a.op.dtype == Dtype::f32 ? gates_backward<float>(a) : gates_backward<bf16>(a);
}
void gated_delta_fwd(const GatedDeltaFwd& a) { a.op.dtype == Dtype::f32 ? forward<float>(a) : forward<bf16>(a); }
void gated_delta_bwd(const GatedDeltaBwd& a) { a.op.dtype == Dtype::f32 ? backward<float>(a) : backward<bf16>(a); }

}  // namespace vx::VEXACT_ISA
