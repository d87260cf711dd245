#include "fused_moe/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"
#include "silu_mul/gate.h"

namespace vx::VEXACT_ISA {
namespace {

template <class T>
void combine(const MoeCombine& a) {
  parallel_for(0, a.tokens, 1 + 16384 / (a.n * a.top_k + 1), [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const int32_t* position = a.position + t * a.top_k;
      const float* weights = a.weights ? a.weights + t * a.top_k : nullptr;
      T* out = static_cast<T*>(a.out) + t * a.n;
      for_chunks(a.n, [&](int64_t i, int lanes) {
        F16 acc = zero();
        for (int64_t s = 0; s < a.top_k; ++s) {  // order: slots ascending, one fp32 accumulator
          if (position[s] < 0) continue;
          const F16 y = load_lanes(static_cast<const T*>(a.y) + position[s] * a.n + i, lanes);
          acc = weights ? fma(set1(weights[s]), y, acc) : acc + y;
        }
        store_lanes(out + i, acc, lanes);
      });
    }
  });
}

template <class T>
void gate_bwd(const MoeGateBwd& a) {
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *gate = static_cast<const T*>(a.h) + row * 2 * a.n, *up = gate + a.n;
      const T* da = static_cast<const T*>(a.da) + row * a.n;
      T *dgate = static_cast<T*>(a.dh) + row * 2 * a.n, *dup = dgate + a.n;
      T* scaled = static_cast<T*>(a.scaled) + row * a.n;
      const int32_t slot = a.order[row];
      const F16 w = set1(a.weights[slot]);
      F16 sum = zero();
      for_chunks(a.n, [&](int64_t i, int lanes) {
        const F16 g = load_lanes(gate + i, lanes), u = load_lanes(up + i, lanes), d = load_lanes(da + i, lanes);
        const Gate at = gate_of(gate_argument(g, a.gelu));
        store_lanes(scaled + i, (g * at.s) * u, lanes);  // rounded, as the forward had it
        const F16 value = load_lanes(scaled + i, lanes), dw = w * d;
        sum = fma(d, value, sum);  // order: sixteen lanes over chunks ascending, then a tree of lanes
        store_lanes(scaled + i, w * value, lanes);
        store_lanes(dgate + i, (dw * u) * gate_slope(g, at, a.gelu), lanes);
        store_lanes(dup + i, dw * (g * at.s), lanes);
      });
      a.dweights[slot] = sum_lanes(sum);
    }
  });
}

constexpr float kSwigluAlpha = 1.702f, kSwigluLimit = 7.0f;

struct Pair {
  F16 g, u;        // within the limits
  Mask g_out, u_out;  // what lies beyond them
};

template <class T>
VX_INLINE Pair pair_of(const T* h, const T* bias, int lanes) {
  T both[32], g[16], u[16];
  for (int at = 0; at < 2 * lanes; at += 16) {
    const int count = 2 * lanes - at < 16 ? 2 * lanes - at : 16;
    store_lanes(both + at, load_lanes(h + at, count) + load_lanes(bias + at, count), count);
  }
  for (int i = 0; i < lanes; ++i) g[i] = both[2 * i], u[i] = both[2 * i + 1];
  const F16 gate = load_lanes(g, lanes), up = load_lanes(u, lanes), top = set1(kSwigluLimit), low = set1(-kSwigluLimit);
  const Mask g_out = gate > top, above = up > top, below = low > up;
  return {select(g_out, top, gate), select(above, top, select(below, low, up)), g_out, above | below};
}

VX_INLINE int64_t bias_row(const MoeSwiglu& a, int64_t row) {
  return int64_t(a.ids[a.order[row]]) * 2 * a.n;
}

template <class T>
void add_bias(const MoeAddBias& a) {
  parallel_for(0, a.rows, 1 + 16384 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* y = static_cast<T*>(a.y) + row * a.n;
      const T* bias = static_cast<const T*>(a.bias) + int64_t(a.ids[a.order[row]]) * a.n;
      for_chunks(a.n, [&](int64_t i, int lanes) {  // order: elementwise
        store_lanes(y + i, load_lanes(y + i, lanes) + load_lanes(bias + i, lanes), lanes);
      });
    }
  });
}

template <class T>
void swiglu_fwd(const MoeSwiglu& a) {
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *h = static_cast<const T*>(a.h) + row * 2 * a.n, *bias = static_cast<const T*>(a.bias) + bias_row(a, row);
      T* out = static_cast<T*>(a.a) + row * a.n;
      for_chunks(a.n, [&](int64_t i, int lanes) {  // order: elementwise
        const Pair at = pair_of(h + 2 * i, bias + 2 * i, lanes);
        store_lanes(out + i, (at.g * gate_of(at.g * set1(kSwigluAlpha)).s) * (at.u + set1(1.0f)), lanes);
      });
    }
  });
}

template <class T>
void swiglu_bwd(const MoeSwigluBwd& b) {
  const MoeSwiglu& a = b.of;
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T *h = static_cast<const T*>(a.h) + row * 2 * a.n, *bias = static_cast<const T*>(a.bias) + bias_row(a, row);
      const T* da = static_cast<const T*>(b.da) + row * a.n;
      T *dh = static_cast<T*>(b.dh) + row * 2 * a.n, *scaled = static_cast<T*>(a.a) + row * a.n;
      const int32_t slot = a.order[row];
      const F16 w = set1(b.weights[slot]), alpha = set1(kSwigluAlpha);
      F16 sum = zero();
      for_chunks(a.n, [&](int64_t i, int lanes) {
        const Pair at = pair_of(h + 2 * i, bias + 2 * i, lanes);
        const Gate gate = gate_of(at.g * alpha);
        const F16 d = load_lanes(da + i, lanes), silu = at.g * gate.s, up = at.u + set1(1.0f), dw = w * d;
        store_lanes(scaled + i, silu * up, lanes);  // rounded, as the forward had it
        const F16 value = load_lanes(scaled + i, lanes);
        sum = fma(d, value, sum);  // order: sixteen lanes over chunks ascending, then a tree of lanes
        store_lanes(scaled + i, w * value, lanes);
        const F16 c = max(at.g, set1(-1e4f)), slope = fma(gate.s * gate.rest, c * alpha, gate.s);
        T dg[16], du[16];
        store_lanes(dg, select(at.g_out, zero(), (dw * up) * slope), lanes);
        store_lanes(du, select(at.u_out, zero(), dw * silu), lanes);
        for (int j = 0; j < lanes; ++j) dh[2 * (i + j)] = dg[j], dh[2 * (i + j) + 1] = du[j];
      });
      b.dweights[slot] = sum_lanes(sum) + sum_lanes(load_lanes(static_cast<const T*>(b.of_bias) + row, 1));
    }
  });
}

}  // namespace

void moe_plan(const MoePlan& a) {
  int32_t* next = static_cast<int32_t*>(scratch(0, (a.experts + 1) * 4));
  auto inside = [&](int32_t id) { return id >= 0 && id < a.experts; };
  for (int64_t e = 0; e <= a.experts; ++e) a.offsets[e] = 0;
  for (int64_t i = 0; i < a.slots; ++i)
    if (inside(a.ids[i])) ++a.offsets[a.ids[i] + 1];
  for (int64_t e = 0; e < a.experts; ++e) {
    a.offsets[e + 1] += a.offsets[e];
    next[e] = a.offsets[e];
  }
  for (int64_t i = 0; i < a.slots; ++i) {
    a.position[i] = inside(a.ids[i]) ? next[a.ids[i]]++ : -1;
    if (a.position[i] >= 0) a.order[a.position[i]] = int32_t(i);
  }
  for (int64_t i = a.offsets[a.experts]; i < a.slots; ++i) a.order[i] = 0;
}

void moe_gather(const MoeGather& a) {
  parallel_for(0, a.rows, 1 + 65536 / (a.bytes + 1), [&](int64_t begin, int64_t end) {
    for (int64_t p = begin; p < end; ++p)
      std::memcpy(static_cast<char*>(a.out) + p * a.bytes,
                  static_cast<const char*>(a.x) + a.order[p] / a.top_k * a.x_stride, a.bytes);
  });
}

void moe_combine(const MoeCombine& a) { a.dtype == Dtype::f32 ? combine<float>(a) : combine<bf16>(a); }
void moe_gate_bwd(const MoeGateBwd& a) { a.dtype == Dtype::f32 ? gate_bwd<float>(a) : gate_bwd<bf16>(a); }

void moe_add_bias(const MoeAddBias& a) { a.dtype == Dtype::f32 ? add_bias<float>(a) : add_bias<bf16>(a); }
void moe_swiglu_fwd(const MoeSwiglu& a) { a.dtype == Dtype::f32 ? swiglu_fwd<float>(a) : swiglu_fwd<bf16>(a); }
void moe_swiglu_bwd(const MoeSwigluBwd& a) { a.of.dtype == Dtype::f32 ? swiglu_bwd<float>(a) : swiglu_bwd<bf16>(a); }

}  // namespace vx::VEXACT_ISA
