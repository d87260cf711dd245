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

// Phi(x), the normal distribution's, to 2^-22 of it, and what its slope needs: e^(-x^2 / 2).
struct Normal {
  F16 below, density;
};

// order: elementwise. Up to 1 an odd polynomial around 1/2; beyond, e^(-x^2 / 2) times a polynomial of 1 / (2 + |x|),
// where the square's rounding error corrects the exponential.
constexpr float kNear[] = {0.3989422917366028f, -0.06649035960435867f, 0.009973322972655296f, -0.001186329871416092f, 0.00011348634143359959f, -7.654195542272646e-06f};
constexpr float kTail[] = {1.6172849655049504e-06f, 0.39884838461875916f, 0.7999822497367859f, 1.1760878562927246f, 0.8333877325057983f,
                           -0.8181650638580322f, -19.038265228271484f, 43.60438919067383f, -29.936016082763672f};

VX_INLINE Normal normal_of(F16 x) {
  const F16 a = min(abs(x), set1(15.0f)), square = a * a, missed = fma(a, a, neg(square));
  const F16 e = exp(square * set1(-0.5f)), density = fma(e, missed * set1(-0.5f), e);
  const F16 t = set1(1.0f) / (a + set1(2.0f));
  F16 near = set1(kNear[5]), tail = set1(kTail[8]);
  for (int i = 4; i >= 0; --i) near = fma(near, square, set1(kNear[i]));
  for (int i = 7; i >= 0; --i) tail = fma(tail, t, set1(kTail[i]));
  const F16 far = density * tail, outer = select(x > zero(), set1(1.0f) - far, far);
  return {select(set1(1.0f) > a, fma(x, near, set1(0.5f)), outer), density};
}

template <class T>
void gelu_forward(const GeluFwd& a) {
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      each_chunk(a.n, [&](int64_t i, int lanes) {
        const F16 x = load_lanes(static_cast<const T*>(a.x) + row * a.x_stride + i, lanes);
        const F16 s = a.tanh ? gate_of(gate_argument(x, true)).s : normal_of(x).below;
        store_lanes(static_cast<T*>(a.y) + row * a.n + i, x * s, lanes);
      });
  });
}

template <class T>
void gelu_backward(const GeluBwd& a) {
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      each_chunk(a.n, [&](int64_t i, int lanes) {
        const F16 x = load_lanes(static_cast<const T*>(a.x) + row * a.x_stride + i, lanes);
        F16 slope;
        if (a.tanh) {
          slope = gate_slope(x, gate_of(gate_argument(x, true)), true);
        } else {  // beyond 15 the density is 0
          const Normal at = normal_of(x);
          slope = fma(max(min(x, set1(15.0f)), set1(-15.0f)), at.density * set1(0.3989422804f), at.below);
        }
        const int64_t place = row * a.n + i;
        store_lanes(static_cast<T*>(a.dx) + place, load_lanes(static_cast<const T*>(a.dy) + place, lanes) * slope, lanes);
      });
  });
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
void gelu_fwd(const GeluFwd& a) { a.dtype == Dtype::f32 ? gelu_forward<float>(a) : gelu_forward<bf16>(a); }
void gelu_bwd(const GeluBwd& a) { a.dtype == Dtype::f32 ? gelu_backward<float>(a) : gelu_backward<bf16>(a); }
void silu_mul_fwd(const SiluMulFwd& a) { a.dtype == Dtype::f32 ? forward<float>(a) : forward<bf16>(a); }
void silu_mul_bwd(const SiluMulBwd& a) { a.dtype == Dtype::f32 ? backward<float>(a) : backward<bf16>(a); }

}  // namespace vx::VEXACT_ISA
