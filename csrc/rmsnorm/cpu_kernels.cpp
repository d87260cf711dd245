#include "rmsnorm/kernels.h"

#include "common/norm.h"
#include "silu_mul/gate.h"

namespace vx::VEXACT_ISA {
namespace {

template <class T>
VX_INLINE F16 rounded(F16 v) {  // to T and back
  T t[16];
  store(t, v);
  return load(t);
}
template <>
VX_INLINE F16 rounded<float>(F16 v) {
  return v;
}

template <class T>
void forward(const RmsnormFwd& a) {
  const T* weight = static_cast<const T*>(a.weight);
  parallel_for(0, a.rows, 1 + 16384 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = norm_row<T>(a, row);
      T* y = static_cast<T*>(a.y) + row * a.n;
      const float squares = sum_products(a.n, [&](int64_t i, int lanes) {
        F16 v = load_lanes(x + i, lanes);
        return Pair{v, v};
      });
      const float rstd = reciprocal_root(squares, a.n, a.eps);
      a.rstd[row] = rstd;
      const F16 scale = set1(rstd);
      for_chunks(a.n, [&](int64_t i, int lanes) {
        F16 normed = load_lanes(x + i, lanes) * scale, w = load_lanes(weight + i, lanes);
        F16 out = a.gemma ? normed * (set1(1.0f) + w) : rounded<T>(normed) * w;
        store_lanes(y + i, out, lanes);
      });
    }
  });
}

template <class T>
void backward(const RmsnormBwd& a) {
  const T *weight = static_cast<const T*>(a.weight), *dy = static_cast<const T*>(a.dy), *x = static_cast<const T*>(a.x);
  const T* dres = static_cast<const T*>(a.dnew_residual);
  auto w_at = [&](int64_t i, int lanes) {
    F16 w = load_lanes(weight + i, lanes);
    return a.gemma ? set1(1.0f) + w : w;
  };
  parallel_for(0, a.rows, 1 + 16384 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * a.n;
      const F16 scale = set1(a.rstd[row]);
      const float dot = sum_products(a.n, [&](int64_t i, int lanes) {
        return Pair{load_lanes(dy + at + i, lanes) * w_at(i, lanes), load_lanes(x + at + i, lanes) * scale};
      });
      const F16 mean = set1(dot / float(a.n));
      for_chunks(a.n, [&](int64_t i, int lanes) {
        F16 normed = load_lanes(x + at + i, lanes) * scale;
        F16 g = load_lanes(dy + at + i, lanes) * w_at(i, lanes);
        F16 dx = scale * (g - normed * mean);
        if (dres) dx = dx + load_lanes(dres + at + i, lanes);
        store_lanes(static_cast<T*>(a.dx) + at + i, dx, lanes);
      });
    }
  });
  for_columns(a.rows, a.n, [&](int64_t i, int lanes) {
    F16 acc = zero();
    for (int64_t row = 0; row < a.rows; ++row) {  // order: ascending
      F16 normed = load_lanes(x + row * a.n + i, lanes) * set1(a.rstd[row]);
      acc = fma(load_lanes(dy + row * a.n + i, lanes), a.gemma ? normed : rounded<T>(normed), acc);
    }
    store_lanes(static_cast<T*>(a.dweight) + i, acc, lanes);
  });
}

template <class T>
void gated_forward(const RmsnormGatedFwd& a) {
  const T* weight = static_cast<const T*>(a.weight);
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      const T* gate = static_cast<const T*>(a.gate) + row * a.gate_stride;
      const float squares = sum_products(a.n, [&](int64_t i, int lanes) {
        F16 v = load_lanes(x + i, lanes);
        return Pair{v, v};
      });
      const float rstd = reciprocal_root(squares, a.n, a.eps);
      a.rstd[row] = rstd;
      for_chunks(a.n, [&](int64_t i, int lanes) {
        const F16 normed = rounded<T>(load_lanes(x + i, lanes) * set1(rstd));
        const F16 weighted = rounded<T>(normed * load_lanes(weight + i, lanes)), g = load_lanes(gate + i, lanes);
        store_lanes(static_cast<T*>(a.y) + row * a.n + i, weighted * (g * gate_of(g).s), lanes);
      });
    }
  });
}

template <class T>
void gated_backward(const RmsnormGatedBwd& a) {
  const T *weight = static_cast<const T*>(a.weight), *dy = static_cast<const T*>(a.dy), *x = static_cast<const T*>(a.x);
  const T* gate = static_cast<const T*>(a.gate);
  auto silu = [&](int64_t at, int lanes) {
    const F16 g = load_lanes(gate + at, lanes);
    return g * gate_of(g).s;
  };
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * a.n;
      const F16 scale = set1(a.rstd[row]);
      auto to_normed = [&](int64_t i, int lanes) {  // the gradient of the normalised row
        return (load_lanes(dy + at + i, lanes) * silu(at + i, lanes)) * load_lanes(weight + i, lanes);
      };
      const float dot = sum_products(a.n, [&](int64_t i, int lanes) {
        return Pair{to_normed(i, lanes), load_lanes(x + at + i, lanes) * scale};
      });
      const F16 mean = set1(dot / float(a.n));
      for_chunks(a.n, [&](int64_t i, int lanes) {
        const F16 normed = load_lanes(x + at + i, lanes) * scale, g = load_lanes(gate + at + i, lanes);
        const F16 weighted = rounded<T>(rounded<T>(normed) * load_lanes(weight + i, lanes));
        const F16 slope = gate_slope(g, gate_of(g), false);
        store_lanes(static_cast<T*>(a.dgate) + at + i, (load_lanes(dy + at + i, lanes) * weighted) * slope, lanes);
        store_lanes(static_cast<T*>(a.dx) + at + i, scale * (to_normed(i, lanes) - normed * mean), lanes);
      });
    }
  });
  for_columns(a.rows, a.n, [&](int64_t i, int lanes) {
    F16 acc = zero();
    for (int64_t row = 0; row < a.rows; ++row) {  // order: ascending
      const int64_t at = row * a.n + i;
      const F16 normed = rounded<T>(load_lanes(x + at, lanes) * set1(a.rstd[row]));
      acc = fma(load_lanes(dy + at, lanes) * silu(at, lanes), normed, acc);
    }
    store_lanes(static_cast<T*>(a.dweight) + i, acc, lanes);
  });
}

}  // namespace

void rmsnorm_gated_fwd(const RmsnormGatedFwd& a) {
  a.dtype == Dtype::f32 ? gated_forward<float>(a) : gated_forward<bf16>(a);
}
void rmsnorm_gated_bwd(const RmsnormGatedBwd& a) {
  a.dtype == Dtype::f32 ? gated_backward<float>(a) : gated_backward<bf16>(a);
}
void rmsnorm_fwd(const RmsnormFwd& a) { a.dtype == Dtype::f32 ? forward<float>(a) : forward<bf16>(a); }
void rmsnorm_bwd(const RmsnormBwd& a) { a.dtype == Dtype::f32 ? backward<float>(a) : backward<bf16>(a); }

}  // namespace vx::VEXACT_ISA
