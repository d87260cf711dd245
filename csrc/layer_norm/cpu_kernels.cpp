#include "layer_norm/kernels.h"

#include "common/norm.h"

namespace vx::VEXACT_ISA {
namespace {

template <class T>
VX_INLINE F16 parameter(const T* p, int64_t i, int lanes, float absent) {
  return p ? load_lanes(p + i, lanes) : set1(absent);
}

template <class T>
void forward(const LayerNormFwd& a) {
  const T *weight = static_cast<const T*>(a.weight), *bias = static_cast<const T*>(a.bias);
  parallel_for(0, a.rows, 1 + 16384 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = norm_row<T>(a, row);
      T* y = static_cast<T*>(a.y) + row * a.n;
      const float total = sum_products(a.n, [&](int64_t i, int lanes) {
        return Pair{load_lanes(x + i, lanes), set1(1.0f)};
      });
      const float mean = total / float(a.n);
      const F16 middle = set1(mean);
      const float squares = sum_products(a.n, [&](int64_t i, int lanes) {
        const F16 off = load_lanes(x + i, lanes) - middle;
        const F16 d = lanes < kLanes ? select(lanes_below(lanes), off, zero()) : off;
        return Pair{d, d};
      });
      const float rstd = reciprocal_root(squares, a.n, a.eps);
      a.mean[row] = mean, a.rstd[row] = rstd;
      const F16 scale = set1(rstd);
      for_chunks(a.n, [&](int64_t i, int lanes) {
        F16 out = (load_lanes(x + i, lanes) - middle) * scale;
        if (weight) out = out * load_lanes(weight + i, lanes);
        if (bias) out = out + load_lanes(bias + i, lanes);
        store_lanes(y + i, out, lanes);
      });
    }
  });
}

template <class T>
void backward(const LayerNormBwd& a) {
  const T *weight = static_cast<const T*>(a.weight), *dy = static_cast<const T*>(a.dy), *x = static_cast<const T*>(a.x);
  const T* dres = static_cast<const T*>(a.dnew_residual);
  parallel_for(0, a.rows, 1 + 16384 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const int64_t at = row * a.n;
      const F16 middle = set1(a.mean[row]), scale = set1(a.rstd[row]);
      auto to_normed = [&](int64_t i, int lanes) {  // the gradient of the normalised row; 0 beyond its end
        return load_lanes(dy + at + i, lanes) * parameter(weight, i, lanes, 1.0f);
      };
      auto normed_at = [&](int64_t i, int lanes) { return (load_lanes(x + at + i, lanes) - middle) * scale; };
      const float sum = sum_products(a.n, [&](int64_t i, int lanes) { return Pair{to_normed(i, lanes), set1(1.0f)}; });
      const float dot = sum_products(a.n, [&](int64_t i, int lanes) {
        return Pair{to_normed(i, lanes), normed_at(i, lanes)};
      });
      const F16 mean = set1(sum / float(a.n)), along = set1(dot / float(a.n));
      for_chunks(a.n, [&](int64_t i, int lanes) {
        F16 dx = scale * ((to_normed(i, lanes) - mean) - normed_at(i, lanes) * along);
        if (dres) dx = dx + load_lanes(dres + at + i, lanes);
        store_lanes(static_cast<T*>(a.dx) + at + i, dx, lanes);
      });
    }
  });
  if (!a.dweight && !a.dbias) return;
  for_columns(a.rows, a.n, [&](int64_t i, int lanes) {
    F16 products = zero(), sum = zero();
    for (int64_t row = 0; row < a.rows; ++row) {  // order: ascending
      const F16 d = load_lanes(dy + row * a.n + i, lanes);
      const F16 normed = (load_lanes(x + row * a.n + i, lanes) - set1(a.mean[row])) * set1(a.rstd[row]);
      products = fma(d, normed, products);
      sum = sum + d;
    }
    if (a.dweight) store_lanes(static_cast<T*>(a.dweight) + i, products, lanes);
    if (a.dbias) store_lanes(static_cast<T*>(a.dbias) + i, sum, lanes);
  });
}

}  // namespace

void layer_norm_fwd(const LayerNormFwd& a) { a.dtype == Dtype::f32 ? forward<float>(a) : forward<bf16>(a); }
void layer_norm_bwd(const LayerNormBwd& a) { a.dtype == Dtype::f32 ? backward<float>(a) : backward<bf16>(a); }

}  // namespace vx::VEXACT_ISA
