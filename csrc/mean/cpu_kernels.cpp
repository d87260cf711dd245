#include "mean/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"

namespace vx::VEXACT_ISA {
namespace {

constexpr int64_t kBlock = 512;

// order: four accumulators of 16 lanes take a block's 16-wide chunks in turn; (a0 + a1) + (a2 + a3), then the lane tree.
template <class T>
VX_INLINE float sum_block(const T* x, int64_t n) {
  F16 acc[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= n; i += 64)
    for (int j = 0; j < 4; ++j) acc[j] = acc[j] + load(x + i + 16 * j);
  for (int j = 0; i < n; i += 16, ++j) acc[j] = acc[j] + load_lanes(x + i, int(n - i < 16 ? n - i : 16));
  return sum_lanes((acc[0] + acc[1]) + (acc[2] + acc[3]));
}

template <class T>
void forward(const MeanFwd& a) {
  const int64_t blocks = (a.n + kBlock - 1) / kBlock;
  float* sums = static_cast<float*>(scratch(0, a.rows * blocks * sizeof(float)));
  parallel_for(0, a.rows * blocks, 64, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = i / blocks, at = i % blocks * kBlock;
      sums[i] = sum_block(static_cast<const T*>(a.x) + row * a.x_stride + at, a.n - at < kBlock ? a.n - at : kBlock);
    }
  });
  parallel_for(0, a.rows, 1 + 8192 / (blocks + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      float sum = 0.0f;
      for (int64_t b = 0; b < blocks; ++b) sum = sum + sums[row * blocks + b];  // order: blocks ascending
      static_cast<T*>(a.y)[row] = from_f32<T>(sum / a.divisor);
    }
  });
}

template <class T>
void backward(const MeanBwd& a) {
  parallel_for(0, a.rows, 16384, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      static_cast<T*>(a.dx)[row] = from_f32<T>(to_f32(static_cast<const T*>(a.dy)[row]) / a.divisor);
  });
}

}  // namespace

void mean_fwd(const MeanFwd& a) { a.dtype == Dtype::f32 ? forward<float>(a) : forward<bf16>(a); }
void mean_bwd(const MeanBwd& a) { a.dtype == Dtype::f32 ? backward<float>(a) : backward<bf16>(a); }

}  // namespace vx::VEXACT_ISA
