// Products of fp32 by the plain arithmetic units: a thread has ROWS x COLUMNS sums of a tile, and adds to each of them one
// product after the other, k ascending. Operands come through a ring of stages in shared memory, `DEPTH` of k at a time.
//
// The bits are those of the canonical kernel, whose steps are kUnit long: a last one that is short is filled up with
// zeros, and +0 * +0 added to a sum that has become -0 makes it +0. So this fills up to kUnit, no more and no less.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/sm90.cuh"

namespace vx::sm90 {

struct FmaArgs {
  const float *a, *b, *bias;
  float* out;
  int64_t a_ld, b_ld, out_ld;
  int m, n, k, row_tiles;
  bool resume;
};

inline constexpr int kUnit = 32;

template <int TILE_ROWS, int TILE_COLUMNS, int ROWS_EACH, int COLUMNS_EACH, int STEP_DEPTH, int STEPS>
struct FmaShape {
  static constexpr int kRows = TILE_ROWS, kColumns = TILE_COLUMNS, kRowsEach = ROWS_EACH, kColumnsEach = COLUMNS_EACH;
  static constexpr int kDepth = STEP_DEPTH, kStages = STEPS;
  static constexpr int kAcross = kColumns / kColumnsEach, kThreads = kRows / kRowsEach * kAcross;
};

// One operand's part of a stage: `EXTENT` rows of it (columns of b) by `DEPTH` of k.
template <int EXTENT, int EACH, int DEPTH, int THREADS, bool K_CONTIGUOUS>
struct FmaSide {
  // rows of 16 bytes more than they hold, so that eight of them begin in eight different groups of banks
  static constexpr int kPitch = K_CONTIGUOUS ? DEPTH + 4 : EXTENT;
  static constexpr int kFloats = (K_CONTIGUOUS ? EXTENT : DEPTH) * kPitch;
  static constexpr int kLanes = EXTENT / EACH;

  // Which row of the tile is the lane's i-th.
  static __device__ int row(int lane, int i) { return K_CONTIGUOUS ? lane + i * kLanes : lane * EACH + i; }

  // What one thread loads of every stage: some pieces of 16 bytes, each a few rows of memory below the one before.
  class Loader {
    static constexpr int kInner = (K_CONTIGUOUS ? DEPTH : EXTENT) / 4;  // pieces of a row of memory
    static constexpr int kBelow = THREADS / kInner, kPieces = (K_CONTIGUOUS ? EXTENT : DEPTH) / kBelow;
    static_assert(THREADS % kInner == 0 && (K_CONTIGUOUS ? EXTENT : DEPTH) % kBelow == 0);

   public:
    __device__ Loader(const float* data, int64_t ld, int first, int extent, int k)
        : data_(data), below_(kBelow * ld), k_(k), outer_(threadIdx.x / kInner), inner_(threadIdx.x % kInner * 4) {
      at_ = data + (K_CONTIGUOUS ? (first + outer_) * ld + inner_ : outer_ * ld + first + inner_);
      left_ = K_CONTIGUOUS ? extent - first - outer_ : extent - first - inner_;
      step_ = K_CONTIGUOUS ? DEPTH : DEPTH * ld;
      place_ = outer_ * kPitch + inner_;
    }
    // Begin to load the next stage, k from `from` on. What there is not is zeros.
    __device__ void load(float* to, int from) {
      const uint32_t target = uint32_t(__cvta_generic_to_shared(to + place_));
      const int deep = k_ - from - (K_CONTIGUOUS ? inner_ : outer_);
      const int whole = K_CONTIGUOUS ? deep : left_;  // floats from this piece on to the end of its row of memory
      const uint32_t most = whole >= 4 ? 16 : whole > 0 ? 4 * whole : 0;
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const bool inside = (K_CONTIGUOUS ? left_ : deep) > i * kBelow && most;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(target + i * kBelow * kPitch * 4),
                     "l"(inside ? at_ + i * below_ : data_), "r"(inside ? most : 0)
                     : "memory");
      }
      at_ += step_;
    }

   private:
    const float *data_, *at_;
    int64_t below_, step_;
    int k_, outer_, inner_, left_, place_;
  };

  // Four of k from `k` on, of the lane's rows.
  static __device__ void read(float (&values)[EACH][4], const float* stage, int lane, int k) {
    if constexpr (K_CONTIGUOUS) {
#pragma unroll
      for (int i = 0; i < EACH; ++i) {
        const float4 four = *reinterpret_cast<const float4*>(stage + row(lane, i) * kPitch + k);
        values[i][0] = four.x, values[i][1] = four.y, values[i][2] = four.z, values[i][3] = four.w;
      }
    } else {
      constexpr int kWide = EACH % 4 == 0 ? 4 : EACH % 2 == 0 ? 2 : 1;
      struct alignas(4 * kWide) Wide {
        float value[kWide];
      };
#pragma unroll
      for (int step = 0; step < 4; ++step)
#pragma unroll
        for (int i = 0; i < EACH; i += kWide) {
          const Wide wide = *reinterpret_cast<const Wide*>(stage + (k + step) * kPitch + row(lane, i));
#pragma unroll
          for (int w = 0; w < kWide; ++w) values[i + w][step] = wide.value[w];
        }
    }
  }
};

template <class S, bool A_K, bool B_K>
struct FmaSides {
  using A = FmaSide<S::kRows, S::kRowsEach, S::kDepth, S::kThreads, A_K>;
  using B = FmaSide<S::kColumns, S::kColumnsEach, S::kDepth, S::kThreads, B_K>;
  static constexpr int kStageFloats = A::kFloats + B::kFloats;
  static constexpr int kBytes = S::kStages * kStageFloats * 4;
};

template <class S, bool A_K, bool B_K>
__global__ void __launch_bounds__(S::kThreads) fma_kernel(const FmaArgs p) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using A = typename FmaSides<S, A_K, B_K>::A;
  using B = typename FmaSides<S, A_K, B_K>::B;
  constexpr int kStages = S::kStages, kStageFloats = FmaSides<S, A_K, B_K>::kStageFloats;
  extern __shared__ __align__(16) float shared[];
  const int m0 = int(blockIdx.x % p.row_tiles) * S::kRows, n0 = int(blockIdx.x / p.row_tiles) * S::kColumns;
  const int lane_m = threadIdx.x / S::kAcross, lane_n = threadIdx.x % S::kAcross;
  const int steps = (p.k + S::kDepth - 1) / S::kDepth;

  typename A::Loader load_a(p.a, p.a_ld, m0, p.m, p.k);
  typename B::Loader load_b(p.b, p.b_ld, n0, p.n, p.k);

  wait_for_kernel_before();
  const auto load = [&](int step) {
    float* const stage = shared + step % kStages * kStageFloats;
    if (step < steps) load_a.load(stage, step * S::kDepth), load_b.load(stage + A::kFloats, step * S::kDepth);
    asm volatile("cp.async.commit_group;" ::: "memory");
  };
  for (int step = 0; step < kStages - 1; ++step) load(step);

  float sums[S::kRowsEach][S::kColumnsEach];
#pragma unroll
  for (int i = 0; i < S::kRowsEach; ++i)
#pragma unroll
    for (int j = 0; j < S::kColumnsEach; ++j) {
      const int m = m0 + A::row(lane_m, i), n = n0 + B::row(lane_n, j);
      sums[i][j] = p.resume && m < p.m && n < p.n ? p.out[m * p.out_ld + n] : 0.f;
    }

  for (int step = 0; step < steps; ++step) {
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();  // all have this stage, and none reads the one before, which is loaded anew
    load(step + kStages - 1);
    const float* const stage = shared + step % kStages * kStageFloats;
    const auto add = [&](int k) {
      float a[S::kRowsEach][4], b[S::kColumnsEach][4];
      A::read(a, stage, lane_m, k);
      B::read(b, stage + A::kFloats, lane_n, k);
#pragma unroll
      for (int one = 0; one < 4; ++one)  // order: k ascending, one accumulator
#pragma unroll
        for (int i = 0; i < S::kRowsEach; ++i)
#pragma unroll
          for (int j = 0; j < S::kColumnsEach; ++j) sums[i][j] = __fmaf_rn(a[i][one], b[j][one], sums[i][j]);
    };
    const int left = p.k - step * S::kDepth;
    if (left > S::kDepth - kUnit) {
#pragma unroll
      for (int k = 0; k < S::kDepth; k += 4) add(k);
    } else {
      const int units = (left + kUnit - 1) / kUnit;
      for (int unit = 0; unit < units; ++unit)
#pragma unroll
        for (int k = 0; k < kUnit; k += 4) add(unit * kUnit + k);
    }
  }
  let_kernel_after_start();

#pragma unroll
  for (int i = 0; i < S::kRowsEach; ++i)
#pragma unroll
    for (int j = 0; j < S::kColumnsEach; ++j) {
      const int m = m0 + A::row(lane_m, i), n = n0 + B::row(lane_n, j);
      if (m < p.m && n < p.n) p.out[m * p.out_ld + n] = p.bias ? __fadd_rn(sums[i][j], p.bias[n]) : sums[i][j];
    }
#endif
}

}  // namespace vx::sm90
