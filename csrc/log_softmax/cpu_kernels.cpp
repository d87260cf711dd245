#include "log_softmax/kernels.h"

#include "common/parallel.h"
#include "log_softmax/lse.h"

namespace vx::VEXACT_ISA {
namespace {

template <class T, class O>
void forward(const LogSoftmaxFwd& a) {
  parallel_for(0, a.rows, 1 + 8192 / a.n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      O* y = static_cast<O*>(a.y) + row * a.n;
      const Lse l = row_lse(x, a.n, AtTemperatureOne{});
      a.lse[2 * row] = l.max;
      a.lse[2 * row + 1] = l.log_sum;
      for_chunks(a.n, [&](int64_t i, int lanes) { store_lanes(y + i, log_prob(load_lanes(x + i, lanes), l), lanes); });
    }
  });
}

template <class T, class O>
void backward(const LogSoftmaxBwd& a) {
  parallel_for(0, a.rows, 1 + 8192 / a.n, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = static_cast<const T*>(a.x) + row * a.x_stride;
      const O* dy = static_cast<const O*>(a.dy) + row * a.n;
      T* dx = static_cast<T*>(a.dx) + row * a.n;
      const Lse l = {a.lse[2 * row], a.lse[2 * row + 1]};
      float sum = 0.0f;
      for (int64_t b = 0; b < a.n; b += kLseBlock)  // order: the sums of the blocks are added ascending
        sum = sum + sum_block(a.n - b < kLseBlock ? a.n - b : kLseBlock,
                              [&](int64_t i, int lanes) { return load_lanes(dy + b + i, lanes); });
      const F16 minus_sum = set1(-sum);
      for_chunks(a.n, [&](int64_t i, int lanes) {
        const F16 p = exp(log_prob(load_lanes(x + i, lanes), l));
        store_lanes(dx + i, fma(p, minus_sum, load_lanes(dy + i, lanes)), lanes);
      });
    }
  });
}

}  // namespace

void log_softmax_fwd(const LogSoftmaxFwd& a) {
  const bool out32 = a.out_dtype == Dtype::f32;
  if (a.dtype == Dtype::f32)
    out32 ? forward<float, float>(a) : forward<float, bf16>(a);
  else
    out32 ? forward<bf16, float>(a) : forward<bf16, bf16>(a);
}
void log_softmax_bwd(const LogSoftmaxBwd& a) {
  const bool out32 = a.out_dtype == Dtype::f32;
  if (a.dtype == Dtype::f32)
    out32 ? backward<float, float>(a) : backward<float, bf16>(a);
  else
    out32 ? backward<bf16, float>(a) : backward<bf16, bf16>(a);
}

}  // namespace vx::VEXACT_ISA
