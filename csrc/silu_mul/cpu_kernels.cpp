#include "silu_mul/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"
#include "silu_mul/gate.h"

namespace vx::VEXACT_ISA {
namespace {

template <class F>
VX_INLINE void each_chunk(int64_t n, F f) {
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) f(i, 16);
  if (i < n) f(i, int(n - i));
}

template <class T>
void forward(const SiluMulFwd& a) {
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
      const T* up = static_cast<const T*>(a.up) + row * a.up_stride;
      T* y = static_cast<T*>(a.y) + row * a.n;
      each_chunk(a.n, [&](int64_t i, int lanes) {
        const F16 g = load_lanes(gate + i, lanes);
        store_lanes(y + i, (g * gate_of(gate_argument(g, a.gelu)).s) * load_lanes(up + i, lanes), lanes);
      });
    }
  });
}

template <class T>
void backward(const SiluMulBwd& a) {
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
      const T* up = static_cast<const T*>(a.up) + row * a.up_stride;
      const T* dy = static_cast<const T*>(a.dy) + row * a.dy_stride;
      T* dgate = static_cast<T*>(a.dgate) + row * a.dgate_stride;
      T* dup = static_cast<T*>(a.dup) + row * a.dup_stride;
      each_chunk(a.n, [&](int64_t i, int lanes) {
        const F16 g = load_lanes(gate + i, lanes), u = load_lanes(up + i, lanes), d = load_lanes(dy + i, lanes);
        const Gate at = gate_of(gate_argument(g, a.gelu));
        const F16 slope = gate_slope(g, at, a.gelu);
        store_lanes(dgate + i, (d * u) * slope, lanes);
        store_lanes(dup + i, d * (g * at.s), lanes);
      });
    }
  });
}

template <class T>
VX_INLINE F16 rounded(F16 v) {  // to T and back
  T t[16];
  store(t, v);
  return load(t);
}

template <class T>
void sigmoid_forward(const SigmoidMulFwd& a) {
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      const F16 whole = a.each ? zero() : rounded<T>(gate_of(set1(to_f32(gate[0]))).s);
      each_chunk(a.n, [&](int64_t i, int lanes) {
        const F16 s = a.each ? rounded<T>(gate_of(load_lanes(gate + i, lanes)).s) : whole;
        store_lanes(static_cast<T*>(a.y) + row * a.n + i, s * load_lanes(x + i, lanes), lanes);
      });
    }
  });
}

template <class T>
void sigmoid_backward(const SigmoidMulBwd& a) {
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
      const T *x = static_cast<const T*>(a.x) + row * a.x_stride, *dy = static_cast<const T*>(a.dy) + row * a.n;
      const Gate whole = gate_of(set1(to_f32(gate[0])));
      T* dgate = static_cast<T*>(a.dgate) + row * (a.each ? a.n : 1);
      F16 sum = zero();  // order: 16 lanes ascending, then their tree
      each_chunk(a.n, [&](int64_t i, int lanes) {
        const Gate at = a.each ? gate_of(load_lanes(gate + i, lanes)) : whole;
        const F16 d = load_lanes(dy + i, lanes), v = load_lanes(x + i, lanes);
        store_lanes(static_cast<T*>(a.dx) + row * a.n + i, d * rounded<T>(at.s), lanes);
        if (a.each)
          store_lanes(dgate + i, (d * v) * (at.s * at.rest), lanes);
        else
          sum = fma(d, v, sum);
      });
      if (!a.each) dgate[0] = from_f32<T>(sum_lanes(sum) * first_lane(whole.s * whole.rest));
    }
  });
}

}  // namespace

void sigmoid_mul_fwd(const SigmoidMulFwd& a) {
  a.dtype == Dtype::f32 ? sigmoid_forward<float>(a) : sigmoid_forward<bf16>(a);
}
void sigmoid_mul_bwd(const SigmoidMulBwd& a) {
  a.dtype == Dtype::f32 ? sigmoid_backward<float>(a) : sigmoid_backward<bf16>(a);
}
void silu_mul_fwd(const SiluMulFwd& a) { a.dtype == Dtype::f32 ? forward<float>(a) : forward<bf16>(a); }
void silu_mul_bwd(const SiluMulBwd& a) { a.dtype == Dtype::f32 ? backward<float>(a) : backward<bf16>(a); }

}  // namespace vx::VEXACT_ISA
