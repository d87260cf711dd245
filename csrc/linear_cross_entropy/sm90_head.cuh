// What becomes of a tile of logits in the registers that it was made in: the sums of its blocks of the log-sum-exp, or
// its gradients. Operation for operation the Triton kernels of this room. Also the store of a plain product.
//
// A thread holds, of a row, pairs of columns that are eight apart; the four lanes of a quad hold the eight columns of a
// group, and a block of the log-sum-exp is sixteen groups. So the tree of neighbours is: the pair, lane ^ 1, lane ^ 2,
// and then the groups within a thread.
#pragma once
#include "common/divide.cuh"
#include "common/math.cuh"
#include "linear/sm90_gemm.cuh"

namespace vx::sm90 {

constexpr int kHeadBlock = 128;  // LSE_BLOCK

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// A thread's logits of a row by its temperature, rounded to nearest.
template <int H>
__device__ __forceinline__ void at_temperature(float (&d)[128], float t) {
  const Divisor by = divisor_of(t);
  float most = 0.0f, least = 1.0f;  // in magnitude; a NaN is passed over, and is its own quotient
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const float x = fabsf(d[i / 2 * 4 + 2 * H + i % 2]);
    most = fmaxf(most, x), least = fminf(least, x);
  }
  if (by.in_range() && most < 0x1p100f && least > 0x1p-60f) {
#pragma unroll
    for (int first = 0; first < 64; first += 8) {
      float x[8];
#pragma unroll
      for (int i = 0; i < 8; ++i) x[i] = d[(first + i) / 2 * 4 + 2 * H + i % 2];
      quotients(x, by);
#pragma unroll
      for (int i = 0; i < 8; ++i) d[(first + i) / 2 * 4 + 2 * H + i % 2] = x[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      float& x = d[i / 2 * 4 + 2 * H + i % 2];
      x = __fdiv_rn(x, t);
    }
  }
}

// The tree over the 128 columns of a block; s holds the sums of this thread's pairs.
__device__ __forceinline__ float tree_of_neighbours(float (&s)[16]) {
#pragma unroll
  for (int g = 0; g < 16; ++g) {
    s[g] = s[g] + __shfl_xor_sync(~0u, s[g], 1);  // order: a tree of neighbours
    s[g] = s[g] + __shfl_xor_sync(~0u, s[g], 2);
  }
#pragma unroll
  for (int width = 1; width < 16; width *= 2)
#pragma unroll
    for (int g = 0; g < 16; g += 2 * width) s[g] = s[g] + s[g + width];
  return s[0];
}

__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// One row's 256 bf16 of a tile, from the accumulators' layout to `to` (its first column), 64 bytes per quad and store.
template <int H>
__device__ __forceinline__ void store_row(const float (&d)[128], __nv_bfloat16* to, int columns, bool live) {
  const int lane = threadIdx.x % 4;
  const bool odd = lane & 1, high = lane & 2;
#pragma unroll
  for (int c = 0; c < 8; ++c) {  // a 4 by 4 transposition: lane q gets all of group 4 c + q
    uint32_t r[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) r[j] = pack(d[16 * c + 4 * j + 2 * H], d[16 * c + 4 * j + 2 * H + 1]);
#pragma unroll
    for (int j = 0; j < 4; j += 2) {
      const uint32_t other = __shfl_xor_sync(~0u, odd ? r[j] : r[j + 1], 1);
      r[j] = odd ? other : r[j];
      r[j + 1] = odd ? r[j + 1] : other;
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      const uint32_t other = __shfl_xor_sync(~0u, high ? r[j] : r[j + 2], 2);
      r[j] = high ? other : r[j];
      r[j + 2] = high ? r[j + 2] : other;
    }
    const int column = 32 * c + 8 * lane;
    if (live && column < columns) __stcs(reinterpret_cast<uint4*>(to + column), make_uint4(r[0], r[1], r[2], r[3]));
  }
}

#endif

// Where bf16 of the size of the logits are kept: chunks of `chunk` columns of the vocabulary, each (tokens, chunk).
struct Chunks {
  __nv_bfloat16* data;
  int64_t chunk_stride;  // elements from a chunk to the next
  int chunk;             // a multiple of 256
  __device__ __forceinline__ __nv_bfloat16* at(int row, int column) const {
    return data + column / chunk * chunk_stride + int64_t(row) * chunk + column % chunk;
  }
};

struct HeadArgs {
  const int64_t* target;
  const float* temperature;
  float cap;      // 0: none
  int t_stride;   // 0: one temperature for all
  int tokens, columns, first, vocabulary;  // this launch makes `columns` logits from `first` on
};

// parts (tokens, 2 or 3, blocks), target_logit (tokens): as the Triton kernel writes them. KEEP: e^(z - its block's largest), too.
template <bool ENTROPY, bool KEEP>
struct BlocksEpilogue {
  HeadArgs a;
  float *parts, *target_logit;
  Chunks kept;
  int blocks;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ void begin(float (&d)[128], int, int) const {
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0.0f;
  }

  template <int H>
  __device__ __forceinline__ void row_end(float (&d)[128], int row, int column) const {
    const int lane = threadIdx.x % 4;
    const bool live = row < a.tokens;
    if (a.cap != 0.0f) {
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        float& x = d[i / 2 * 4 + 2 * H + i % 2];
        x = a.cap * tanh_in_order(__fdiv_rn(x, a.cap));
      }
    }
    const int64_t wanted = live && target_logit ? a.target[row] : -1;
    if (wanted >= a.first + column - 2 * lane && wanted < min(a.vocabulary, a.first + column - 2 * lane + 256)) {
      const int at = int(wanted) - a.first - column;
#pragma unroll
      for (int i = 0; i < 64; ++i)
        if (at == i / 2 * 8 + i % 2) target_logit[row] = d[i / 2 * 4 + 2 * H + i % 2];
    }
    const float t = live ? a.temperature[int64_t(row) * a.t_stride] : 1.0f;
    if (t != 1.0f) at_temperature<H>(d, t);
    if (column - 2 * lane + 256 > a.columns) {
#pragma unroll
      for (int i = 0; i < 64; ++i)
        if (column + i / 2 * 8 + i % 2 >= a.columns) d[i / 2 * 4 + 2 * H + i % 2] = __int_as_float(0xff800000);
    }
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      float most = __int_as_float(0xff800000);
#pragma unroll
      for (int i = 0; i < 32; ++i) most = fmaxf(most, d[64 * b + i / 2 * 4 + 2 * H + i % 2]);
      most = quad_max(most) + 0.0f;  // -0 is the same number as 0; a NaN is passed over
      const float origin = most == __int_as_float(0xff800000) ? 0.0f : most;
      float s[16], shifted[ENTROPY ? 16 : 1];
#pragma unroll
      for (int g = 0; g < 16; ++g) {
        float &x = d[64 * b + 4 * g + 2 * H], &y = d[64 * b + 4 * g + 2 * H + 1];
        const float u = x - origin, v = y - origin;
        x = exp_term(u);
        y = exp_term(v);
        s[g] = x + y;  // order: a tree of neighbours
        if constexpr (ENTROPY) shifted[g] = (x > 0.0f ? x * u : 0.0f) + (y > 0.0f ? y * v : 0.0f);
      }
      const float total = tree_of_neighbours(s);
      float moved = 0.0f;
      if constexpr (ENTROPY) moved = tree_of_neighbours(shifted);
      const int number = (a.first + column - 2 * lane) / kHeadBlock + b;
      if (live && number < blocks && parts) {
        float* to = parts + int64_t(row) * (ENTROPY ? 3 : 2) * blocks + number;
        if (lane == 0) to[0] = most;
        if (lane == 1) to[blocks] = total;
        if (ENTROPY && lane == 2) to[2 * int64_t(blocks)] = moved;
      }
    }
    if constexpr (KEEP) store_row<H>(d, kept.at(row, column - 2 * lane), kept.chunk - (column - 2 * lane) % kept.chunk, live);
  }

  __device__ __forceinline__ void end(float (&d)[128], int row, int column) const {
    row_end<0>(d, row, column);
    row_end<1>(d, row + 8, column);
  }
#endif
};

// The gradients of logits where the upstream ones are known.
template <bool ENTROPY>
struct GradientEpilogue {
  HeadArgs a;
  const float *lse, *dlogprob, *dentropy, *entropy;
  Chunks d_out;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ void begin(float (&d)[128], int, int) const {
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0.0f;
  }

  template <int H, bool CAP, bool T>
  __device__ __forceinline__ void row_end(float (&d)[128], int row, int column) const {
    const int lane = threadIdx.x % 4;
    const bool live = row < a.tokens;
    const float t = T && live ? a.temperature[int64_t(row) * a.t_stride] : 1.0f;
    const float top = live ? lse[2 * int64_t(row)] : 0.0f, log_sum = live ? lse[2 * int64_t(row) + 1] : 0.0f;
    const float upstream = live ? dlogprob[row] : 0.0f;
    const float scale = ENTROPY && live ? dentropy[row] : 0.0f, row_entropy = ENTROPY && live ? entropy[row] : 0.0f;
    const int64_t wanted = live ? a.target[row] : -1;
    const int at = wanted >= 0 && wanted < a.vocabulary ? int(wanted) - a.first - column : -1;
    if constexpr (T && !CAP) at_temperature<H>(d, t);
#pragma unroll
    for (int i = 0; i < 64; ++i) {
      float& x = d[i / 2 * 4 + 2 * H + i % 2];
      float slope = 1.0f;
      if constexpr (CAP) {
        const float th = tanh_in_order(__fdiv_rn(x, a.cap));
        x = a.cap * th;
        slope = fmaf(-th, th, 1.0f);
      }
      const float z = T && CAP ? __fdiv_rn(x, t) : x;
      const float lp = (z - top) - log_sum, p = exp_term(lp);
      float pull = upstream;
      if constexpr (ENTROPY) pull = p > 0.0f ? fmaf(scale, lp + row_entropy, pull) : pull;
      x = fmaf(-p, pull, at == i / 2 * 8 + i % 2 ? upstream : 0.0f);
      if constexpr (T) x = __fdiv_rn(x, t);
      if constexpr (CAP) x = x * slope;
    }
    if (column - 2 * lane + 256 > a.columns) {  // of the padding, zeros: products over the vocabulary read it
#pragma unroll
      for (int i = 0; i < 64; ++i)
        if (column + i / 2 * 8 + i % 2 >= a.columns) d[i / 2 * 4 + 2 * H + i % 2] = 0.0f;
    }
    store_row<H>(d, d_out.at(row, column - 2 * lane), d_out.chunk - (column - 2 * lane) % d_out.chunk, live);
  }

  __device__ __forceinline__ void end(float (&d)[128], int row, int column) const {
    const bool plain = a.t_stride == 0 && a.temperature[0] == 1.0f;
    if (a.cap != 0.0f) {
      row_end<0, true, true>(d, row, column);
      row_end<1, true, true>(d, row + 8, column);
    } else if (plain) {
      row_end<0, false, false>(d, row, column);
      row_end<1, false, false>(d, row + 8, column);
    } else {
      row_end<0, false, true>(d, row, column);
      row_end<1, false, true>(d, row + 8, column);
    }
  }
#endif
};

// The product itself: RESUME, on top of the fp32 in `start`; times *scale, if any; as fp32 or rounded to bf16, and then
// times *factor, if any, and rounded again.
template <class Out, bool RESUME>
struct ProductEpilogue {
  const float* start;
  Out* out;
  int rows, columns;  // `out` and `start` are contiguous
  const float *scale, *factor;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ void begin(float (&d)[128], int row, int column) const {
#pragma unroll
    for (int i = 0; i < 128; ++i) d[i] = 0.0f;
    if constexpr (RESUME) {
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const bool live = row + 8 * h < rows;
        const float* from = start + (live ? int64_t(row + 8 * h) * columns : 0);
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          const float2 v = *reinterpret_cast<const float2*>(from + (column + 8 * j < columns ? column + 8 * j : 0));
          d[4 * j + 2 * h] = v.x;
          d[4 * j + 2 * h + 1] = v.y;
        }
      }
    }
  }

  __device__ __forceinline__ void end(float (&d)[128], int row, int column) const {
    if (scale) {
      const float by = *scale;
#pragma unroll
      for (int i = 0; i < 128; ++i) d[i] = d[i] * by;
    }
    if constexpr (sizeof(Out) == 4) {
#pragma unroll
      for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < 32; ++j)
          if (row + 8 * h < rows && column + 8 * j < columns)
            *reinterpret_cast<float2*>(out + int64_t(row + 8 * h) * columns + column + 8 * j) =
                make_float2(d[4 * j + 2 * h], d[4 * j + 2 * h + 1]);
    } else {
      const float by = factor ? *factor : 1.0f;
      if (by != 1.0f) {  // times 1 nothing would change
#pragma unroll
        for (int i = 0; i < 128; i += 2) {
          const uint32_t both = pack(d[i], d[i + 1]);
          d[i] = __uint_as_float(both << 16) * by;
          d[i + 1] = __uint_as_float(both & 0xffff0000) * by;
        }
      }
      const int lane = threadIdx.x % 4, first = column - 2 * lane;
      store_row<0>(d, out + int64_t(row) * columns + first, columns - first, row < rows);
      store_row<1>(d, out + int64_t(row + 8) * columns + first, columns - first, row + 8 < rows);
    }
  }
#endif
};

// Kept exponentials to the gradients of the loss of each token, p - [target], in place; p = e^(z - largest of the block)
// as it was kept, times e^(that largest - lse). At the target, where 1 is taken from p, p is that of the log-probability.
// Zeros from row *live on, if that is given.
constexpr int kUnitRows = 4;  // of a thread, so that as many loads are in flight
__global__ void __launch_bounds__(256)
    unit_gradients_kernel(Chunks kept, const float* parts, const float* lse, const float* logprob, const int64_t* target,
                          const int64_t* live, int tokens, int columns, int first, int blocks) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  const int row0 = blockIdx.x * kUnitRows, column = (blockIdx.y * 256 + threadIdx.x) * 8;
  if (column >= columns) return;
  __nv_bfloat16* const place = kept.at(row0, column);
  const int block = (first + column) / kHeadBlock;
  const int64_t counting = live ? *live : tokens;
  uint4 v[kUnitRows];
#pragma unroll
  for (int i = 0; i < kUnitRows; ++i)
    if (row0 + i < tokens) v[i] = __ldcs(reinterpret_cast<const uint4*>(place + i * kept.chunk));
#pragma unroll
  for (int i = 0; i < kUnitRows; ++i) {
    const int64_t row = row0 + i;
    if (row >= tokens) return;
    if (row >= counting) {
      __stcs(reinterpret_cast<uint4*>(place + i * kept.chunk), make_uint4(0, 0, 0, 0));
      continue;
    }
    const float factor = exp_of_negative((parts[row * 2 * blocks + block] - lse[2 * row]) - lse[2 * row + 1]);
    const uint32_t packed[4] = {v[i].x, v[i].y, v[i].z, v[i].w};
    float p[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) p[j] = __uint_as_float(j % 2 ? packed[j / 2] & 0xffff0000 : packed[j / 2] << 16) * factor;
    const int64_t wanted = target[row] - first - column;
    if (wanted >= 0 && wanted < 8 && column + wanted < columns) {
      const float of_target = exp_of_negative(logprob[row]) - 1.0f;
#pragma unroll
      for (int j = 0; j < 8; ++j)
        if (wanted == j) p[j] = of_target;
    }
    __stcs(reinterpret_cast<uint4*>(place + i * kept.chunk),
           make_uint4(pack(p[0], p[1]), pack(p[2], p[3]), pack(p[4], p[5]), pack(p[6], p[7])));
  }
#endif
}

}  // namespace vx::sm90
