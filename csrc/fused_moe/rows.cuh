// What a mixture does to rows besides its products: the weighted sum of a token's rows, and the gate's gradient. Both
// are bound by memory: 16 bytes a load, all of a thread's loads in flight. Bits as in cpu_kernels.cpp and triton.py.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <initializer_list>
#include <type_traits>

#include "fused_moe/chain.cuh"
#include "silu_mul/gate.cuh"

namespace vx {

__device__ __forceinline__ float wide(float x) { return x; }
__device__ __forceinline__ float wide(__half x) { return __half2float(x); }
__device__ __forceinline__ float wide(__nv_bfloat16 x) { return __bfloat162float(x); }

template <class T>
__device__ __forceinline__ T narrow(float x) {
  if constexpr (sizeof(T) == 4) return x;
  else if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
  else return __float2bfloat16_rn(x);
}

// Two neighbours, in one instruction.
__device__ __forceinline__ void narrow_pair(float* to, float a, float b) { to[0] = a, to[1] = b; }
__device__ __forceinline__ void narrow_pair(__half* to, float a, float b) {
  *reinterpret_cast<__half2*>(to) = __floats2half2_rn(a, b);
}
__device__ __forceinline__ void narrow_pair(__nv_bfloat16* to, float a, float b) {
  *reinterpret_cast<__nv_bfloat162*>(to) = __floats2bfloat162_rn(a, b);
}

// N elements that lie together, loaded and stored 16 bytes at a time.
template <class T, int N>
struct alignas(sizeof(T) * N < 16 ? sizeof(T) * N : 16) Pack {
  T v[N];
};

struct MoeCombineCuda {
  int64_t rows, tokens, top_k, n;
  const void* y;  // (rows, n) contiguous
  const int32_t* position;
  const float* weights;  // (tokens, top_k), or null: all 1
  void* out;             // (tokens, n) contiguous
};

constexpr int kCombineThreads = 128;

// A thread makes N columns of a token, kAtOnce of its rows in flight.
template <class T, int N, int kAtOnce, bool Weights>
__global__ void __launch_bounds__(kCombineThreads, kAtOnce > 4 ? 7 : 8) moe_combine_kernel(MoeCombineCuda a) {
  follow_kernel_before();
  const int64_t token = blockIdx.x, column = (int64_t(blockIdx.y) * kCombineThreads + threadIdx.x) * N;
  if (column >= a.n) return;
  const int32_t* position = a.position + token * a.top_k;
  const float* weights = a.weights + (Weights ? token * a.top_k : 0);
  const T* y = static_cast<const T*>(a.y) + column;
  float acc[N] = {};
  for (int64_t first = 0; first < a.top_k; first += kAtOnce) {
    Pack<T, N> held[kAtOnce];
    int at[kAtOnce];
    float w[kAtOnce];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      at[s] = first + s < a.top_k ? position[first + s] : -1;
      w[s] = Weights && first + s < a.top_k ? weights[first + s] : 1.0f;
      if (at[s] >= a.rows) at[s] = -1;
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s)
      if (at[s] >= 0) held[s] = *reinterpret_cast<const Pack<T, N>*>(y + at[s] * a.n);
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {  // order: slots ascending, one fp32 accumulator
      if (at[s] < 0) continue;
#pragma unroll
      for (int i = 0; i < N; ++i)
        acc[i] = Weights ? fmaf(w[s], wide(held[s].v[i]), acc[i]) : acc[i] + wide(held[s].v[i]);
    }
  }
  Pack<T, N> sum;
  if constexpr (N == 1) sum.v[0] = narrow<T>(acc[0]);
#pragma unroll
  for (int i = 0; i + 1 < N; i += 2) narrow_pair(sum.v + i, acc[i], acc[i + 1]);
  *reinterpret_cast<Pack<T, N>*>(static_cast<T*>(a.out) + token * a.n + column) = sum;
}

inline bool aligned_16(std::initializer_list<const void*> pointers) {
  for (const void* p : pointers)
    if (reinterpret_cast<uintptr_t>(p) % 16) return false;
  return true;
}

template <class T, int N, int kAtOnce>
cudaError_t moe_combine_launch_as(const MoeCombineCuda& a, ChainedStream on) {
  const int64_t units = (a.n + N - 1) / N;
  const dim3 grid(unsigned(a.tokens), unsigned((units + kCombineThreads - 1) / kCombineThreads));
  return launch_following(a.weights ? moe_combine_kernel<T, N, kAtOnce, true> : moe_combine_kernel<T, N, kAtOnce, false>,
                          grid, kCombineThreads, on, a);
}

template <class T>
cudaError_t moe_combine_launch(const MoeCombineCuda& a, ChainedStream on) {
  if (a.tokens == 0 || a.n == 0) return cudaSuccess;
  constexpr int kWide = 16 / sizeof(T);
  if (a.n % kWide || !aligned_16({a.y, a.out})) return moe_combine_launch_as<T, 1, 4>(a, on);
  // the same number in every round
  return a.top_k % 6 == 0 ? moe_combine_launch_as<T, kWide, 6>(a, on) : moe_combine_launch_as<T, kWide, 4>(a, on);
}

// Every token's row to the places of its slots: read once, where a gather would read it for each.
struct MoeScatterCuda {
  int64_t rows, tokens, top_k, units, stride;  // units of 16 bytes: in a row, and from a row of x to the next
  const uint4* x;
  const int32_t* position;
  uint4* out;  // (rows, units) contiguous; rows that are nobody's stay as they are
};

__global__ void __launch_bounds__(kCombineThreads) moe_scatter_kernel(MoeScatterCuda a) {
  follow_kernel_before();
  const int64_t token = blockIdx.x, unit = int64_t(blockIdx.y) * kCombineThreads + threadIdx.x;
  if (unit >= a.units) return;
  const uint4 held = a.x[token * a.stride + unit];
  for (int64_t s = 0; s < a.top_k; ++s) {
    const int at = a.position[token * a.top_k + s];
    if (at >= 0 && at < a.rows) a.out[at * a.units + unit] = held;
  }
}

inline cudaError_t moe_scatter_launch(const MoeScatterCuda& a, ChainedStream on) {
  if (a.tokens == 0 || a.units == 0) return cudaSuccess;
  const dim3 grid(unsigned(a.tokens), unsigned((a.units + kCombineThreads - 1) / kCombineThreads));
  return launch_following(moe_scatter_kernel, grid, kCombineThreads, on, a);
}

// Of a = activation(gate) * up, where row p of a was multiplied by its weight behind the down projection.
struct MoeGateBwdCuda {
  int64_t rows, n;
  int experts, block;    // block: the lanes of the sum of dweights, a power of two from 16 to 1024
  const void* h;         // (rows, 2 n): gate, up
  const void* da;        // (rows, n): the gradient of a, not yet times the weight
  const int32_t* order;
  const float* weights;  // (rows,), by slot
  const int32_t* offsets;
  void* dh;              // (rows, 2 n)
  void* scaled;          // (rows, n): weight * a; may be da
  float* dweights;       // (rows,): the slots that have a row
};

constexpr int kGateThreads = 256;

// A warp makes a row. Lane i of the sum is element i of every chunk of `block`; a thread holds eight neighbours of each
// 256.
template <class T, bool Gelu, bool Even>
__global__ void __launch_bounds__(kGateThreads, Even && sizeof(T) == 2 ? 4 : 2) moe_gate_bwd_kernel(MoeGateBwdCuda a) {
  constexpr int N = 8;
  follow_kernel_before();
  const int64_t row = int64_t(blockIdx.x) * (kGateThreads / 32) + (threadIdx.x >> 5), n = a.n;
  if (row >= a.rows || row >= a.offsets[a.experts]) return;
  const int lane = threadIdx.x & 31, slot = a.order[row];
  if (unsigned(slot) >= unsigned(a.rows)) return;
  const float w = a.weights[slot];
  const T *gate = static_cast<const T*>(a.h) + row * 2 * n, *up = gate + n, *from = static_cast<const T*>(a.da) + row * n;
  T *dgate = static_cast<T*>(a.dh) + row * 2 * n, *dup = dgate + n, *scaled = static_cast<T*>(a.scaled) + row * n;
  const int parts = a.block > 256 ? a.block / 256 : 1;
  float sum_of[4] = {};
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    if (p >= parts) break;
    float sum[N] = {};
    for (int64_t start = p * 256; start < n; start += a.block) {
      const int64_t i = start + lane * N;
      const int inside = lane * N < a.block && i < n ? (n - i < N ? int(n - i) : N) : 0;
      if (inside == 0) continue;
      Pack<T, N> g, u, d, to_gate, to_up, to_scaled;
      if constexpr (Even) {
        g = *reinterpret_cast<const Pack<T, N>*>(gate + i);
        u = *reinterpret_cast<const Pack<T, N>*>(up + i);
        d = *reinterpret_cast<const Pack<T, N>*>(from + i);
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j) {
          g.v[j] = j < inside ? gate[i + j] : narrow<T>(0.0f);
          u.v[j] = j < inside ? up[i + j] : narrow<T>(0.0f);
          d.v[j] = j < inside ? from[i + j] : narrow<T>(0.0f);
        }
      }
#pragma unroll
      for (int j = 0; j < N; j += 2) {
        float open[2], value[2], dgate_of[2], dw[2];
        DeviceGate at[2];
        alignas(8) T rounded[2];
#pragma unroll
        for (int l = 0; l < 2; ++l) {
          at[l] = gate_of<Gelu>(wide(g.v[j + l]));
          open[l] = wide(g.v[j + l]) * at[l].s;
          value[l] = open[l] * wide(u.v[j + l]);
        }
        narrow_pair(rounded, value[0], value[1]);  // as the forward had it
#pragma unroll
        for (int l = 0; l < 2; ++l) {
          const float d_of = wide(d.v[j + l]);
          value[l] = wide(rounded[l]);
          if (Even || j + l < inside) sum[j + l] = fmaf(d_of, value[l], sum[j + l]);
          dw[l] = w * d_of;
          dgate_of[l] = (dw[l] * wide(u.v[j + l])) * gate_slope<Gelu>(wide(g.v[j + l]), at[l]);
        }
        narrow_pair(to_scaled.v + j, w * value[0], w * value[1]);
        narrow_pair(to_gate.v + j, dgate_of[0], dgate_of[1]);
        narrow_pair(to_up.v + j, dw[0] * open[0], dw[1] * open[1]);
      }
      if constexpr (Even) {
        *reinterpret_cast<Pack<T, N>*>(scaled + i) = to_scaled;
        *reinterpret_cast<Pack<T, N>*>(dgate + i) = to_gate;
        *reinterpret_cast<Pack<T, N>*>(dup + i) = to_up;
      } else {
#pragma unroll
        for (int j = 0; j < N; ++j)
          if (j < inside) scaled[i + j] = to_scaled.v[j], dgate[i + j] = to_gate.v[j], dup[i + j] = to_up.v[j];
      }
    }
    // order: lanes over chunks ascending (above), then neighbours pairwise
    float t = ((sum[0] + sum[1]) + (sum[2] + sum[3])) + ((sum[4] + sum[5]) + (sum[6] + sum[7]));
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
      const float other = __shfl_xor_sync(~0u, t, d);
      t = d * N < a.block ? t + other : t;
    }
    sum_of[p] = t;
  }
  float total = sum_of[0];
  if (parts > 1) total = total + sum_of[1];
  if (parts > 2) total = total + (sum_of[2] + sum_of[3]);
  if (lane == 0) a.dweights[slot] = total;
}

template <class T, bool Gelu>
cudaError_t moe_gate_bwd_launch(const MoeGateBwdCuda& a, ChainedStream on) {
  if (a.rows == 0 || a.n == 0) return cudaSuccess;
  constexpr int kRows = kGateThreads / 32;
  const dim3 blocks(unsigned((a.rows + kRows - 1) / kRows));
  const bool even = a.n % 8 == 0 && aligned_16({a.h, a.da, a.dh, a.scaled});
  return launch_following(even ? moe_gate_bwd_kernel<T, Gelu, true> : moe_gate_bwd_kernel<T, Gelu, false>, blocks,
                          kGateThreads, on, a);
}

}  // namespace vx
