// The gradients of a chunk of a gated delta net, from states, u and their gradients, with the bits of the Triton kernels
// (triton_backward.py declares them); no torch headers.
//
// A block takes a chunk of a key head: the gradients of q and k stay in registers, where all of its value heads' columns,
// 64 at a time, are added to them.
#pragma once
#include "gated_delta/rows.cuh"

namespace vx {
namespace delta {

template <class T>
struct GradsShared {
  T k[kChunk][kDepth + 8], q[kChunk][kDepth + 8];
  float s[kDepth][72], ds[kDepth][72];  // as multiplied: rounded to tf32
  float w[kChunk][72], du[kChunk][72], d[kChunk][72];
  float a[kChunk][72], p[kChunk][72];  // gradients of the products among keys
  Gates gates;
  float r_k[kChunk], r_q[kChunk];
  float of_state[2][kDepth], taken[2][kChunk], sums[kChunk], columns[kChunk], dg[kChunk], dbeta[kChunk];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The sum of a chunk's values by four neighbouring threads.
template <class F>
__device__ __forceinline__ float fold_chunk(F value) {
  float f[16];
#pragma unroll
  for (int m = 0; m < 16; ++m) f[m] = value(4 * m + threadIdx.x % 4);
  // order: the upper half is added to the lower one
  fold<16>(f);
#pragma unroll
  for (int width = 2; width; width /= 2) f[0] = f[0] + __shfl_xor_sync(0xffffffffu, f[0], width);
  return f[0];
}

#endif

template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 1) grads_kernel(const GatedDeltaBackward args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<GradsShared<T>*>(memory);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, gid = lane / 4, tig = lane % 4;
  const bool of_k = warp < 4;
  const int first = 16 * (warp % 4), half = warp / 4;  // this warp's rows, and its 64 of the keys' dims
  const int index = blockIdx.x, hk = blockIdx.y, group = args.hv / args.hk, splits = args.dv_size / 64;
  const FoundChunk found(args, index);
  const int row = found.begin + found.chunk * kChunk, last = min(kChunk, found.end - row);
  if (found.chunk < 0 || last <= 0) return;

  // What a head's block of columns reads, on its way into the L2 cache while there is other work.
  const auto expect = [&](int n) {
    if (n >= group * splits) return;
    const int64_t h = hk * group + n / splits, c = n % splits * 64, stride = int64_t(args.hv) * args.dv_size;
    const int64_t of_state = (int64_t(index) * args.hv + h) * kDepth * args.dv_size + c + tid / 2 * args.dv_size + tid % 2 * 32;
    into_l2(args.states + of_state), into_l2(args.dstates + of_state);
    const int i = tid / 2 % 64;
    const int64_t of_row = (row + i) * stride + h * args.dv_size + c;
    if (i >= last) return;
    if (tid < 128)
      into_l2(args.us + of_row + tid % 2 * 32), into_l2(args.dus + of_row + tid % 2 * 32);
    else if (tid % 2)
      into_l2(static_cast<const T*>(args.dout) + of_row);
    else
      into_l2(static_cast<const T*>(args.v) + (row + i) * args.v_row + h * args.v_head + c);
  };
  expect(0);
  load_keys<T>(sh, args, row, last, hk);
  copies_wait<0>();
  __syncthreads();
  make_norms<T>(sh, args.l2norm);
  float gram[8][4] = {};  // warps 0 to 3: keys times keys, the others: queries times keys
  products_of<T, 8>(gram, (of_k ? sh.k : sh.q)[first], sh.k);
  float sum_q[8][4] = {}, sum_k[8][4] = {};  // gradients before those of the norms: this warp's rows and dims

  for (int one = 0; one < group; ++one) {  // order: value heads ascending, of each the columns' blocks ascending
    const int h = hk * group + one;
    __syncthreads();
    if (warp == 0) make_gates(sh.gates, args, row, last, h);
    if (tid < kChunk) sh.dg[tid] = sh.dbeta[tid] = 0.0f;
    __syncthreads();
    const auto& gates = sh.gates;
    const float whole = exp_term(gates.g[last - 1]);
    const auto e = [&](int i, int j) { return exp_term(gates.g[i] - gates.g[j]); };
#pragma unroll 1
    for (int split = 0; split < splits; ++split) {
      const int64_t states_at = (int64_t(index) * args.hv + h) * kDepth * args.dv_size + 64 * split;
      const auto at = [&](int i) { return (int64_t(row + i) * args.hv + h) * args.dv_size + 64 * split; };
      expect(one * splits + split + 1);
      auto& of_state = sh.of_state[split % 2];
#pragma unroll 1
      for (int part = 0; part < 2; ++part) {
        float4 x[4], y[4];  // all on their way before the first is used
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int n = tid + (4 * part + m) * kBackwardThreads;
          const int64_t from = states_at + n / 16 * args.dv_size + n % 16 * 4;
          x[m] = *reinterpret_cast<const float4*>(args.states + from);
          y[m] = *reinterpret_cast<const float4*>(args.dstates + from);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int n = tid + (4 * part + m) * kBackwardThreads, r = n / 16, c = n % 16 * 4;
          float f[4] = {y[m].x * x[m].x, y[m].y * x[m].y, y[m].z * x[m].z, y[m].w * x[m].w};
          // order: the upper half is added to the lower one
#pragma unroll
          for (int width = 8; width; width /= 2)
#pragma unroll
            for (int e4 = 0; e4 < 4; ++e4) f[e4] = f[e4] + __shfl_xor_sync(0xffffffffu, f[e4], width);
          if (c == 0) of_state[r] = (f[0] + f[2]) + (f[1] + f[3]);
          *reinterpret_cast<float4*>(&sh.s[r][c]) = float4{rounded(x[m].x), rounded(x[m].y), rounded(x[m].z), rounded(x[m].w)};
          *reinterpret_cast<float4*>(&sh.ds[r][c]) = float4{rounded(y[m].x), rounded(y[m].y), rounded(y[m].z), rounded(y[m].w)};
        }
      }
      {
        float4 u[4] = {}, du[4] = {};
        uint2 d[4] = {};
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int n = tid + m * kBackwardThreads, i = n / 16, c = n % 16 * 4;
          if (i >= last) continue;
          u[m] = *reinterpret_cast<const float4*>(args.us + at(i) + c);
          du[m] = *reinterpret_cast<const float4*>(args.dus + at(i) + c);
          d[m] = *reinterpret_cast<const uint2*>(static_cast<const T*>(args.dout) + at(i) + c);
        }
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const int n = tid + m * kBackwardThreads, i = n / 16, c = n % 16 * 4;
          const float r = sh.r_k[i], b = gates.beta[i];
          const float2 low = widen_two<T>(d[m].x), high = widen_two<T>(d[m].y);
          *reinterpret_cast<float4*>(&sh.w[i][c]) = float4{r * u[m].x, r * u[m].y, r * u[m].z, r * u[m].w};
          *reinterpret_cast<float4*>(&sh.du[i][c]) = du[m];
          *reinterpret_cast<float4*>(&sh.d[i][c]) =
              float4{args.scale * low.x, args.scale * low.y, args.scale * high.x, args.scale * high.y};
          if (i >= last) continue;
          T four[4];
          narrow(four[0], b * du[m].x), narrow(four[1], b * du[m].y), narrow(four[2], b * du[m].z), narrow(four[3], b * du[m].w);
          *reinterpret_cast<uint2*>(static_cast<T*>(args.dv) + at(i) + c) = *reinterpret_cast<uint2*>(four);
        }
      }
      if (of_k)
        each_pair(gram, [&](int r, int j, float x, float y) {
          const int i = first + r;
          const int seen = i < last ? i : 0;  // of these keys on: none
          const float f = sh.r_k[i];
          *reinterpret_cast<float2*>(&sh.a[i][j]) =
              float2{j < seen ? rounded(f * (e(i, j) * x)) : 0.0f, j + 1 < seen ? rounded(f * (e(i, j + 1) * y)) : 0.0f};
        });
      __syncthreads();

      // The rows' keys, or queries, times the state; what beta multiplies.
      float x[8][4] = {};
      const auto& rows = of_k ? sh.k : sh.q;
      multiply<kDepth>(x, [&](int r, int k) { return widen(rows[first + r][k]); }, [&](int k, int c) { return sh.s[k][c]; });
      const auto given = [&](int k, int c) { return rounded(sh.w[k][c]); };
      float left[8][4] = {};
      if (of_k) {
        multiply<kChunk>(left, [&](int r, int k) { return sh.a[first + r][k]; }, given);
        each_pair(left, [&](int, int, float& low, float& high) { low = low + 0.0f, high = high + 0.0f; });
      } else {
        each_pair(x, [&](int r, int c, float low, float high) {
          const int i = first + r;
          const float f = gates.decay[i] * sh.r_q[i];
          *reinterpret_cast<float2*>(&sh.p[i][c]) = float2{(f * sh.d[i][c]) * low, (f * sh.d[i][c + 1]) * high};
        });
      }
      __syncthreads();
      float row_low = 0.0f, row_high = 0.0f;  // of the gradient of G, rows first + gid and + 8
      if (of_k) {
        const int64_t v_at = h * args.v_head + 64 * split;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int i = first + gid + 8 * m, c = 8 * n + 2 * tig;
            T two[2];
            uint32_t bits = 0;
            if (i < last)
              bits = *reinterpret_cast<const uint32_t*>(static_cast<const T*>(args.v) + (row + i) * args.v_row + v_at + c);
            *reinterpret_cast<uint32_t*>(two) = bits;
            const float f = -(gates.decay[i] * sh.r_k[i]), fx = (gates.beta[i] * gates.decay[i]) * sh.r_k[i];
#pragma unroll
            for (int e2 = 0; e2 < 2; ++e2) {
              const float du = sh.du[i][c + e2], ks = x[n][2 * m + e2];
              left[n][2 * m + e2] = du * (fmaf(f, ks, widen(two[e2])) - left[n][2 * m + e2]);
              x[n][2 * m + e2] = (-(fx * du)) * ks + sh.p[i][c + e2];
            }
          }
        float low, high;
        fold_rows(left, low, high);
        fold_rows(x, row_low, row_high);
        if (tig == 0) {
          sh.dbeta[first + gid] = sh.dbeta[first + gid] + low;
          sh.dbeta[first + gid + 8] = sh.dbeta[first + gid + 8] + high;
        }
      }
      // Gradients of the products among keys: of keys with keys, and of queries with keys.
      float grad[8][4] = {};
      const auto& theirs = of_k ? sh.du : sh.d;
      multiply<kChunk>(
          grad, [&](int r, int k) { return rounded(theirs[first + r][k]); },
          [&](int k, int c) { return rounded(sh.w[c][k]); });
      each_pair(grad, [&](int r, int j, float& x, float& y) {
        const int i = first + r;
        const int seen = i < last ? (of_k ? i : i + 1) : 0;
        const float f = of_k ? -(gates.beta[i] * sh.r_k[i]) : sh.r_q[i];
        x = j < seen ? f * (e(i, j) * x) : 0.0f, y = j + 1 < seen ? f * (e(i, j + 1) * y) : 0.0f;
      });
      __syncthreads();  // a and p are read
      if (!of_k) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int m = 0; m < 2; ++m)
            *reinterpret_cast<float2*>(&sh.p[first + gid + 8 * m][8 * n + 2 * tig]) =
                float2{grad[n][2 * m] * gram[n][2 * m], grad[n][2 * m + 1] * gram[n][2 * m + 1]};
      }
      __syncthreads();
      if (of_k) {
        float m[8][4];
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e4 = 0; e4 < 4; ++e4) {
            const int i = first + gid + 8 * (e4 / 2), j = 8 * n + 2 * tig + e4 % 2;
            m[n][e4] = j < i ? grad[n][e4] * gram[n][e4] + sh.p[i][j] : 0.0f;
            sh.a[i][j] = m[n][e4];
          }
        float low, high;
        fold_rows(m, low, high);
        if (tig == 0) sh.sums[first + gid] = low, sh.sums[first + gid + 8] = high;
      }
      __syncthreads();
      {
        const float sum = fold_chunk([&](int i) { return sh.a[i][tid / 4]; });
        if (tid % 4 == 0) sh.columns[tid / 4] = sum;
      }
      __syncthreads();
      if (of_k && tig == 0)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int i = first + gid + 8 * m;
          sh.sums[i] = (m ? row_high : row_low) + (sh.sums[i] - sh.columns[i]);
        }
      {
        auto& to = of_k ? sh.a : sh.p;
        each_pair(grad, [&](int r, int j, float x, float y) {
          *reinterpret_cast<float2*>(&to[first + r][j]) = float2{rounded(x), rounded(y)};
        });
      }
      __syncthreads();

      const int d0 = 64 * half;
      {
        float dq[8][4] = {};
        multiply<64>(
            dq, [&](int r, int c) { return rounded((gates.decay[first + r] * sh.r_q[first + r]) * sh.d[first + r][c]); },
            [&](int c, int d) { return sh.s[d0 + d][c]; });
        multiply_keys<kChunk>(
            dq, [&](int r, int j) { return *reinterpret_cast<const float2*>(&sh.p[first + r][j]); }, sh.k, d0);
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e4 = 0; e4 < 4; ++e4) sum_q[n][e4] = sum_q[n][e4] + dq[n][e4];
      }
      float dk[8][4] = {};
      multiply<64>(
          dk, [&](int r, int c) { return rounded(gates.rest[first + r] * sh.w[first + r][c]); },
          [&](int c, int d) { return sh.ds[d0 + d][c]; });
      {
        float m[8][4], low, high;
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int e4 = 0; e4 < 4; ++e4)
            m[n][e4] = widen(sh.k[first + gid + 8 * (e4 / 2)][d0 + 8 * n + 2 * tig + e4 % 2]) * dk[n][e4];
        fold_rows(m, low, high);
        if (tig == 0) sh.taken[half][first + gid] = low, sh.taken[half][first + gid + 8] = high;
      }
      multiply<64>(
          dk,
          [&](int r, int c) {
            return rounded(-(((gates.beta[first + r] * gates.decay[first + r]) * sh.r_k[first + r]) * sh.du[first + r][c]));
          },
          [&](int c, int d) { return sh.s[d0 + d][c]; });
      multiply_keys<kChunk>(
          dk, [&](int r, int j) { return *reinterpret_cast<const float2*>(&sh.a[first + r][j]); }, sh.k, d0);
      multiply_keys<kChunk>(dk, [&](int r, int j) { return float2{sh.a[j][first + r], sh.a[j + 1][first + r]}; }, sh.k, d0);
      multiply_keys<kChunk>(dk, [&](int r, int j) { return float2{sh.p[j][first + r], sh.p[j + 1][first + r]}; }, sh.q, d0);
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e4 = 0; e4 < 4; ++e4) sum_k[n][e4] = sum_k[n][e4] + dk[n][e4];
      __syncthreads();
      if (warp == 0) {
        // What the state behind the chunk takes: of every row, and of what was there before.
        float taken[2], state[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int i = lane + 32 * m;
          taken[m] = (sh.taken[0][i] + 0.0f) + sh.taken[1][i], state[m] = (of_state[i] + 0.0f) + of_state[i + 64];
        }
        float of_rows = taken[0] + taken[1], of_old = state[0] + state[1];
        // order: the upper half is added to the lower one
#pragma unroll
        for (int width = 16; width; width /= 2) {
          of_rows = of_rows + __shfl_xor_sync(0xffffffffu, of_rows, width);
          of_old = of_old + __shfl_xor_sync(0xffffffffu, of_old, width);
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int i = lane + 32 * m;
          sh.sums[i] = (sh.sums[i] - taken[m]) + (i == last - 1 ? of_rows + whole * of_old : 0.0f);
        }
      }
      __syncthreads();
      {
        // order: the gradient of g_i takes those of the sums from i to the last, in a tree
        const float sum = fold_chunk([&](int j) { return j >= tid / 4 ? sh.sums[j] : 0.0f; });
        if (tid % 4 == 0) sh.dg[tid / 4] = sh.dg[tid / 4] + sum;
      }
    }
    __syncthreads();
    if (tid < last) {
      const int64_t to = int64_t(row + tid) * args.hv + h;
      args.dg[to] = sh.dg[tid], args.dbeta[to] = sh.dbeta[tid];
    }
  }

  // What the norms leave of them: of each row, n (n dk) less, over both halves of the dims.
#pragma unroll
  for (int which = 0; which < 2; ++which) {
    auto& sum = which ? sum_k : sum_q;
    const auto& x = which ? sh.k : sh.q;
    const float* const r = which ? sh.r_k : sh.r_q;
    float n_sum[2] = {0.0f, 0.0f};
    if (args.l2norm) {
      float m[8][4];
#pragma unroll
      for (int n = 0; n < 8; ++n)
#pragma unroll
        for (int e4 = 0; e4 < 4; ++e4) {
          const int i = first + gid + 8 * (e4 / 2);
          m[n][e4] = (widen(x[i][64 * half + 8 * n + 2 * tig + e4 % 2]) * r[i]) * sum[n][e4];
        }
      __syncthreads();
      if (half) each_pair(m, [&](int r2, int c, float a, float b) { *reinterpret_cast<float2*>(&sh.w[first + r2][c]) = float2{a, b}; });
      __syncthreads();
      if (!half) {
        each_pair(m, [&](int r2, int c, float& a, float& b) { a = a + sh.w[first + r2][c], b = b + sh.w[first + r2][c + 1]; });
        fold_rows(m, n_sum[0], n_sum[1]);
        if (tig == 0) sh.sums[first + gid] = n_sum[0], sh.sums[first + gid + 8] = n_sum[1];
      }
      __syncthreads();
      n_sum[0] = sh.sums[first + gid], n_sum[1] = sh.sums[first + gid + 8];
    }
    T* const out = static_cast<T*>(which ? args.dk : args.dq);
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int i = first + gid + 8 * m, c = 64 * half + 8 * n + 2 * tig;
        if (i >= last) continue;
        T two[2];
#pragma unroll
        for (int e2 = 0; e2 < 2; ++e2) {
          float value = sum[n][2 * m + e2];
          if (args.l2norm) value = value - (widen(x[i][c + e2]) * r[i]) * n_sum[m];
          narrow(two[e2], value);
        }
        *reinterpret_cast<uint32_t*>(out + (int64_t(row + i) * args.hk + hk) * kDepth + c) = *reinterpret_cast<uint32_t*>(two);
      }
  }
#endif
}

}  // namespace delta
}  // namespace vx
