// The gradients of a chunk of a gated delta net, from states, u and their gradients, with the bits of the Triton kernels
// (triton_backward.py declares them); no torch headers.
//
// A block takes a chunk of a key head: the gradients of q and k stay in registers, where all of its value heads' columns,
// 64 at a time, are added to them. Of two warpgroups one has what concerns keys, the other queries; then each has half of
// the dims of both. Products take their right operand from shared memory, in every direction that one is needed in.
#pragma once
#include "gated_delta/rows.cuh"
#include "gated_delta/wgmma.cuh"

namespace vx {
namespace delta {

// Tiles of a warpgroup's 64 x 64, as its threads have them.
using Handed = float4[8][128];

template <class T>
struct GradsShared {
  Panel<kDepth> s[2], ds[2];                      // (dims, columns), as all below as multiplied: rounded to tf32
  Panel<kChunk> s_across[4];                      // (columns, dims); then, (keys, rows), gradients of products among keys
  Panel<kChunk> w[2], w_across[2];                // (rows, columns), (columns, rows); then those gradients, handed over
  Panel<kDepth> k_across[2], q_across[2];         // (dims, rows)
  float between[kChunk * 72];                     // what one warpgroup hands to the other, or a chunk's rows
  Gates gates[8];                                 // of so many heads at a time
  float r_k[kChunk], r_q[kChunk];
  float of_state[kDepth], taken[2][kChunk], rows[kChunk], sums[kChunk], columns[kChunk], dg[kChunk], dbeta[kChunk];

  // Keys and queries as they come, before there are states
  struct Keys {
    T k[kChunk][kDepth + 8], q[kChunk][kDepth + 8];
  };
  __device__ __forceinline__ Keys& keys() { return reinterpret_cast<Keys&>(s); }
  __device__ __forceinline__ Panel<kChunk>* dkk() { return s_across; }
  __device__ __forceinline__ Panel<kChunk>* dqk() { return s_across + 2; }
  __device__ __forceinline__ Handed& dkk_handed() { return reinterpret_cast<Handed&>(w_across); }
  __device__ __forceinline__ Handed& dqk_handed() { return reinterpret_cast<Handed&>(w); }
  __device__ __forceinline__ Handed& handed() { return reinterpret_cast<Handed&>(between); }
  __device__ __forceinline__ float (&chunk())[kChunk][72] { return reinterpret_cast<float (&)[kChunk][72]>(between); }
};
static_assert(sizeof(Handed) == sizeof(Panel<kChunk>[2]));
template <class T>
constexpr int kGradsBytes = sizeof(GradsShared<T>) + 1024;  // from a 1,024-byte boundary on

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Some of a block's warps: THREADS of them meet, or those that arrive let the others go on.
template <int THREADS>
__device__ __forceinline__ void meet(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}
template <int THREADS>
__device__ __forceinline__ void arrive(int barrier) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "n"(THREADS) : "memory");
}


__device__ __forceinline__ int multiprocessors() {
  int count;
  asm("mov.u32 %0, %%nsmid;" : "=r"(count));
  return count;
}

// x, or zero; x is made either way, for that is faster than to branch.
__device__ __forceinline__ float where(bool there, float x) {
  float y;
  asm("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nselp.f32 %0, %1, 0f00000000, p;\n}" : "=f"(y) : "f"(x), "r"(int(there)));
  return y;
}

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

// to(tile, element, row, column) of this thread's places in a warpgroup's 64 x 64
template <class F>
__device__ __forceinline__ void each_place(F to) {
  const int lane = threadIdx.x % 32, first = threadIdx.x / 32 % 4 * 16 + lane / 4;
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) to(n, e, first + e / 2 * 8, 8 * n + lane % 4 * 2 + e % 2);
}
__device__ __forceinline__ void hand(Handed& to, const float (&x)[8][4]) {
#pragma unroll
  for (int n = 0; n < 8; ++n) to[n][threadIdx.x % 128] = float4{x[n][0], x[n][1], x[n][2], x[n][3]};
}
__device__ __forceinline__ void take(float (&x)[8][4], const Handed& from) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    const float4 four = from[n][threadIdx.x % 128];
    x[n][0] = four.x, x[n][1] = four.y, x[n][2] = four.z, x[n][3] = four.w;
  }
}

#endif

template <class T>
__global__ void __launch_bounds__(kBackwardThreads, 1) grads_kernel(const GatedDeltaBackward args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<GradsShared<T>*>(memory + (1024 - sm90::shared_address(memory) % 1024) % 1024);
  enum { kRead = 1, kHanded = 2, kKeysMeet = 3 };  // barriers
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, gid = lane / 4, tig = lane % 4;
  const bool of_k = __shfl_sync(0xffffffffu, warp < 4, 0);
  const int first = 16 * (warp % 4), half = of_k ? 0 : 1, d0 = 64 * half;  // this warp's rows; its half of the keys' dims
  const int index = blockIdx.x, hk = blockIdx.y, group = args.hv / args.hk, splits = args.dv_size / 64;
  const FoundChunk found(args, index);
  const int row = found.begin + found.chunk * kChunk, last = min(kChunk, found.end - row);
  if (found.chunk < 0 || last <= 0) return;

  // What a head's block of columns reads, on its way into the L2 cache while there is other work; behind the last one the
  // states of a block that begins when this one ends.
  const auto expect = [&](int n) {
    const bool more = n < group * splits;
    int64_t number = int64_t(index) * args.hv + hk * group + n / splits;
    if (!more) {
      const int next = index + multiprocessors();
      number = int64_t(next % gridDim.x) * args.hv + (hk + next / gridDim.x) * group, n = 0;
      if (hk + next / gridDim.x >= args.hk) return;
    }
    const int64_t c = n % splits * 64, here = (number * kDepth + tid / 2) * args.dv_size + c + tid % 2 * 32;
    into_l2(args.states + here), into_l2(args.dstates + here);
    const int i = tid / 2 % 64;
    if (!more || i >= last) return;
    const int64_t h = hk * group + n / splits, of_row = (int64_t(row + i) * args.hv + h) * args.dv_size + c;
    if (tid < 128)
      into_l2(args.us + of_row + tid % 2 * 32), into_l2(args.dus + of_row + tid % 2 * 32);
    else if (tid % 2)
      into_l2(static_cast<const T*>(args.dout) + of_row);
    else
      into_l2(static_cast<const T*>(args.v) + (row + i) * args.v_row + h * args.v_head + c);
  };
  expect(0);

  float gram[8][4] = {};  // keys times keys, or queries times keys
  {
    auto& keys = sh.keys();
    load_keys<T>(keys, args, row, last, hk);
    if (warp < group) make_gates(sh.gates[warp], args, row, last, hk * group + warp);
    copies_wait<0>();
    __syncthreads();
    make_norms<T>(keys, sh, args.l2norm);
    products_of<T, 8>(gram, (of_k ? keys.k : keys.q)[first], keys.k);
#pragma unroll
    for (int which = 0; which < 2; ++which)
#pragma unroll
      for (int i = 0; i < kChunk; i += 16) {
        const auto& from = which ? keys.q : keys.k;
        auto& to = (which ? sh.q_across : sh.k_across)[i / 32];
        uint32_t y[4];
        load_transposed(y, &from[i + lane % 16][16 * warp + lane / 16 * 8]);
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          const float2 two = widen_two<T>(y[m]);
          const int d = 16 * warp + m / 2 * 8 + gid, at = i % 32 + m % 2 * 8 + 2 * tig;
          in_panel(to, d, at) = two.x, in_panel(to, d, at + 1) = two.y;
        }
      }
    __syncthreads();
  }
  // This thread's places in what lies across: (8 n + 2 tig + e % 2, first + gid + e / 2 * 8) at 256 n + across[e].
  int across[4];
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int r = 2 * tig + e % 2, chunk = warp % 2 * 4 + e / 2 * 2 + gid % 2;
    across[e] = r * 32 + (chunk ^ r) * 4 + gid / 2;
  }
  const float* const k_here = &sh.k_across[warp % 4 / 2][0][0];
  const float* const q_here = &sh.q_across[warp % 4 / 2][0][0];
  float sum_q[8][4] = {}, sum_k[8][4] = {};  // gradients before those of the norms: this warp's rows and dims

  for (int one = 0; one < group; ++one) {  // order: value heads ascending, of each the columns' blocks ascending
    const int h = hk * group + one;
    if (one && one % 8 == 0) {
      __syncthreads();
      if (one + warp < group) make_gates(sh.gates[warp], args, row, last, h + warp);
      __syncthreads();
    }
    const auto& gates = sh.gates[one % 8];
    const float whole = exp_term(gates.g[last - 1]);
    const auto e = [&](int i, int j) { return exp_term(gates.g[i] - gates.g[j]); };
#pragma unroll 1
    for (int split = 0; split < splits; ++split) {
      const int64_t states_at = (int64_t(index) * args.hv + h) * kDepth * args.dv_size + 64 * split;
      const auto at = [&](int i) { return (int64_t(row + i) * args.hv + h) * args.dv_size + 64 * split; };
      // Two neighbours of this thread's places, and zeros where there are no rows.
      const auto read_rows = [&](float (&x)[8][4], const float* from) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int i = first + gid + 8 * m;
            float2 two{0, 0};
            if (i < last) two = *reinterpret_cast<const float2*>(from + at(i) + 8 * n + 2 * tig);
            x[n][2 * m] = two.x, x[n][2 * m + 1] = two.y;
          }
      };
      const auto read_outputs = [&](float (&x)[8][4]) {
#pragma unroll
        for (int n = 0; n < 8; ++n)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int i = first + gid + 8 * m;
            uint32_t bits = 0;
            if (i < last) bits = *reinterpret_cast<const uint32_t*>(static_cast<const T*>(args.dout) + at(i) + 8 * n + 2 * tig);
            const float2 two = widen_two<T>(bits);
            x[n][2 * m] = args.scale * two.x, x[n][2 * m + 1] = args.scale * two.y;
          }
      };
      {
        const int r = tid / 2, upper = tid % 2;
        // (row, 8 (upper + 2 m)) of the even ones, and, 16 bytes beside, of the odd ones; (8 upper + c, row) across
        const int along = r * 32 + ((2 * upper) ^ r % 8) * 4;
        const int turned = r / 32 * 2048 + upper * 256 + (r % 32 / 8 * 2 + r % 2) * 4 + r % 8 / 2;
        const int64_t from = states_at + r * args.dv_size;
        float f[8];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          float x[2][8], y[2][8];
#pragma unroll
          for (int p = 0; p < 2; ++p)
#pragma unroll
            for (int c = 0; c < 8; c += 4) {
              const int64_t here = from + 8 * (upper + 2 * m + 4 * p) + c;
              *reinterpret_cast<float4*>(x[p] + c) = *reinterpret_cast<const float4*>(args.states + here);
              *reinterpret_cast<float4*>(y[p] + c) = *reinterpret_cast<const float4*>(args.dstates + here);
            }
          // order: the upper half is added to the lower one
#pragma unroll
          for (int c = 0; c < 8; ++c) {
            const float sum = y[0][c] * x[0][c] + y[1][c] * x[1][c];
            f[c] = m ? f[c] + sum : sum;
          }
#pragma unroll
          for (int p = 0; p < 2; ++p) {
#pragma unroll
            for (int c = 0; c < 8; ++c) x[p][c] = as_operand(x[p][c]), y[p][c] = as_operand(y[p][c]);
            put_eight(&sh.s[p][0][0], along ^ 16 * m, x[p]), put_eight(&sh.ds[p][0][0], along ^ 16 * m, y[p]);
#pragma unroll
            for (int c = 0; c < 8; ++c) (&sh.s_across[0][0][0])[(turned ^ 4 * c) + (32 * p + 16 * m + c) * 32] = x[p][c];
          }
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) f[c] = f[c] + __shfl_xor_sync(0xffffffffu, f[c], 1);
        fold<8>(f);
        if (!upper) sh.of_state[r] = f[0];
      }
      {
        const int r = tid / 4, part = tid % 4 * 8;
        const int along = r * 32 + ((part / 4) ^ r % 8) * 4;
        const int turned = r / 32 * 2048 + part * 32 + (r % 32 / 8 * 2 + r % 2) * 4 + r % 8 / 2;
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          float x[8] = {};
          if (r < last)
#pragma unroll
            for (int c = 0; c < 8; c += 4)
              *reinterpret_cast<float4*>(x + c) = *reinterpret_cast<const float4*>(args.us + at(r) + 32 * p + part + c);
#pragma unroll
          for (int c = 0; c < 8; ++c) x[c] = as_operand(sh.r_k[r] * x[c]);
          put_eight(&sh.w[p][0][0], along, x);
#pragma unroll
          for (int c = 0; c < 8; ++c) (&sh.w_across[0][0][0])[(turned ^ 4 * c) + (32 * p + c) * 32] = x[c];
        }
      }
      written_for_products();
      __syncthreads();
      expect(one * splits + split + 1);

      // The rows' keys, or queries, times the state; what beta multiplies.
      float x[8][4] = {}, left[8][4] = {};
      {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          float a[4][4];
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int m = 0; m < 4; ++m) a[n][m] = (of_k ? k_here : q_here)[256 * (4 * p + n) + across[m]];
          wide_products<4, kChunk>(x, a, sh.s_across + p, 0);
          sm90::wgmma_wait<1>();  // whose operands need no registers any more
        }
        if (of_k) {
          float a[8][4];
          each_place([&](int n, int m, int i, int j) {
            const int seen = i < last ? i : 0;  // of these keys on: none
            a[n][m] = where(j < seen, as_operand(sh.r_k[i] * (e(i, j) * gram[n][m])));
          });
          wide_products<8, kChunk>(left, a, sh.w_across, 0);
          sm90::wgmma_wait<0>();
        } else {
          sm90::wgmma_wait<0>();
          read_outputs(left);
          each_place([&](int n, int m, int i, int) {
            left[n][m] = ((gates.decay[i] * sh.r_q[i]) * left[n][m]) * x[n][m];
          });
          hand(sh.handed(), left);
        }
      }
      __syncthreads();
      float mine[8][4];  // gradients of u, or of the outputs
      if (of_k)
        read_rows(mine, args.dus);
      else
        read_outputs(mine);
      if (of_k) {
        const int64_t v_at = h * args.v_head + 64 * split;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const float4 four = sh.handed()[n][tid];
          const float given[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int i = first + gid + 8 * m, c = 8 * n + 2 * tig;
            uint32_t bits = 0;
            if (i < last)
              bits = *reinterpret_cast<const uint32_t*>(static_cast<const T*>(args.v) + (row + i) * args.v_row + v_at + c);
            const float2 two = widen_two<T>(bits);
            const float f = -(gates.decay[i] * sh.r_k[i]), fx = (gates.beta[i] * gates.decay[i]) * sh.r_k[i];
#pragma unroll
            for (int e2 = 0; e2 < 2; ++e2) {
              const float du = mine[n][2 * m + e2], ks = x[n][2 * m + e2];
              left[n][2 * m + e2] = du * (fmaf(f, ks, e2 ? two.y : two.x) - (left[n][2 * m + e2] + 0.0f));
              x[n][2 * m + e2] = (-(fx * du)) * ks + given[2 * m + e2];
            }
          }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int i = first + gid + 8 * m;
          if (i < last)
#pragma unroll
            for (int n = 0; n < 8; ++n) {
              T two[2];
              narrow(two[0], gates.beta[i] * mine[n][2 * m]), narrow(two[1], gates.beta[i] * mine[n][2 * m + 1]);
              *reinterpret_cast<uint32_t*>(static_cast<T*>(args.dv) + at(i) + 8 * n + 2 * tig) = *reinterpret_cast<uint32_t*>(two);
            }
        }
        float low, high;
        fold_rows(left, low, high);
        if (tig == 0) {
          sh.dbeta[first + gid] = (split ? sh.dbeta[first + gid] : 0.0f) + low;
          sh.dbeta[first + gid + 8] = (split ? sh.dbeta[first + gid + 8] : 0.0f) + high;
        }
        fold_rows(x, low, high);
        if (tig == 0) sh.rows[first + gid] = low, sh.rows[first + gid + 8] = high;
      }
      // Gradients of the products among keys: of keys with keys, and of queries with keys.
      float grad[8][4] = {};
      each_place([&](int n, int m, int, int) { mine[n][m] = as_operand(mine[n][m]); });
      wide_products<8, kChunk>(grad, mine, sh.w, 0);
      sm90::wgmma_wait<0>();
      each_place([&](int n, int m, int i, int j) {
        const int seen = i < last ? (of_k ? i : i + 1) : 0;
        const float f = of_k ? -(gates.beta[i] * sh.r_k[i]) : sh.r_q[i];
        grad[n][m] = where(j < seen, f * (e(i, j) * grad[n][m]));
      });
      float m[8][4];
      each_place([&](int n, int e4, int, int) { m[n][e4] = grad[n][e4] * gram[n][e4]; });
      if (of_k) {
        arrive<kBackwardThreads>(kRead);  // what was handed over, and w
        meet<kBackwardThreads>(kHanded);
        float given[8][4], low, high;
        take(given, sh.handed());
        meet<128>(kKeysMeet);  // all have taken what is overwritten
        each_place([&](int n, int e4, int i, int j) {
          m[n][e4] = j < i ? m[n][e4] + given[n][e4] : 0.0f;
          sh.chunk()[i][j] = m[n][e4];
        });
        fold_rows(m, low, high);
        if (tig == 0) sh.sums[first + gid] = low, sh.sums[first + gid + 8] = high;
      } else {
        meet<kBackwardThreads>(kRead);
        hand(sh.handed(), m);
        arrive<kBackwardThreads>(kHanded);
      }
      float* const to = &(of_k ? sh.dkk() : sh.dqk())[warp % 4 / 2][0][0];
      each_place([&](int n, int e4, int, int) {
        grad[n][e4] = as_operand(grad[n][e4]);
        to[256 * n + across[e4]] = grad[n][e4];
      });
      hand(of_k ? sh.dkk_handed() : sh.dqk_handed(), grad);
      written_for_products();
      __syncthreads();

      {
        const float sum = fold_chunk([&](int i) { return sh.chunk()[i][tid / 4]; });
        if (tid % 4 == 0) sh.columns[tid / 4] = sum;
      }
      float grads[8][4] = {}, a[8][4], b[8][4];
      read_outputs(a);
      each_place([&](int n, int m, int i, int) { a[n][m] = as_operand((gates.decay[i] * sh.r_q[i]) * a[n][m]); });
      wide_products<8, kDepth>(grads, a, sh.s, d0);
      take(b, sh.dqk_handed());
      wide_products<8, kDepth>(grads, b, sh.k_across, d0);
      sm90::wgmma_wait<0>();
      each_place([&](int n, int m, int, int) { sum_q[n][m] = sum_q[n][m] + grads[n][m], grads[n][m] = 0.0f; });
      read_rows(a, args.us);
      each_place([&](int n, int m, int i, int) { a[n][m] = as_operand(gates.rest[i] * (sh.r_k[i] * a[n][m])); });
      wide_products<8, kDepth>(grads, a, sh.ds, d0);
      sm90::wgmma_wait<0>();
      {
        float taken[8][4], low, high;
        each_place([&](int n, int m, int, int) { taken[n][m] = k_here[32 * d0 + 256 * n + across[m]] * grads[n][m]; });
        fold_rows(taken, low, high);
        if (tig == 0) sh.taken[half][first + gid] = low, sh.taken[half][first + gid + 8] = high;
      }
      read_rows(a, args.dus);
      each_place([&](int n, int m, int i, int) {
        a[n][m] = as_operand(-(((gates.beta[i] * gates.decay[i]) * sh.r_k[i]) * a[n][m]));
      });
      wide_products<8, kDepth>(grads, a, sh.s, d0);
      take(b, sh.dkk_handed());
      wide_products<8, kDepth>(grads, b, sh.k_across, d0);
#pragma unroll
      for (int n = 0; n < 8; ++n)
        wide_product(grads, operand_of<kChunk>(sh.dkk(), 0, 8 * n), operand_of<kDepth>(sh.k_across, d0, 8 * n));
#pragma unroll
      for (int n = 0; n < 8; ++n)
        wide_product(grads, operand_of<kChunk>(sh.dqk(), 0, 8 * n), operand_of<kDepth>(sh.q_across, d0, 8 * n));
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      each_place([&](int n, int m, int, int) { sum_k[n][m] = sum_k[n][m] + grads[n][m]; });
      __syncthreads();
      if (warp == 0) {
        // What the state behind the chunk takes: of every row, and of what was there before.
        float taken[2], state[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int i = lane + 32 * m;
          taken[m] = (sh.taken[0][i] + 0.0f) + sh.taken[1][i], state[m] = (sh.of_state[i] + 0.0f) + sh.of_state[i + 64];
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
          const float sum = sh.rows[i] + (sh.sums[i] - sh.columns[i]);
          sh.sums[i] = (sum - taken[m]) + (i == last - 1 ? of_rows + whole * of_old : 0.0f);
        }
      }
      __syncthreads();
      {
        // order: the gradient of g_i takes those of the sums from i to the last, in a tree
        const float sum = fold_chunk([&](int j) { return j >= tid / 4 ? sh.sums[j] : 0.0f; });
        if (tid % 4 == 0) sh.dg[tid / 4] = (split ? sh.dg[tid / 4] : 0.0f) + sum;
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
    const float* const r = which ? sh.r_k : sh.r_q;
    const float* const x = (which ? k_here : q_here) + 32 * d0;
    float n_sum[2] = {0.0f, 0.0f};
    if (args.l2norm) {
      float m[8][4];
      each_place([&](int n, int e4, int i, int) { m[n][e4] = (x[256 * n + across[e4]] * r[i]) * sum[n][e4]; });
      __syncthreads();
      if (half) hand(sh.handed(), m);
      __syncthreads();
      if (!half) {
        float other[8][4];
        take(other, sh.handed());
        each_place([&](int n, int e4, int, int) { m[n][e4] = m[n][e4] + other[n][e4]; });
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
        const int i = first + gid + 8 * m, d = d0 + 8 * n + 2 * tig;
        if (i >= last) continue;
        T two[2];
#pragma unroll
        for (int e2 = 0; e2 < 2; ++e2) {
          float value = sum[n][2 * m + e2];
          if (args.l2norm) value = value - (x[256 * n + across[2 * m + e2]] * r[i]) * n_sum[m];
          narrow(two[e2], value);
        }
        *reinterpret_cast<uint32_t*>(out + (int64_t(row + i) * args.hk + hk) * kDepth + d) = *reinterpret_cast<uint32_t*>(two);
      }
  }
#endif
}

}  // namespace delta
}  // namespace vx
