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

}  // namespace

void silu_mul_fwd(const SiluMulFwd& a) { a.dtype == Dtype::f32 ? forward<float>(a) : forward<bf16>(a); }
void silu_mul_bwd(const SiluMulBwd& a) { a.dtype == Dtype::f32 ? backward<float>(a) : backward<bf16>(a); }

}  // namespace vx::VEXACT_ISA
