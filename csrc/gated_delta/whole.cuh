// Whole sequences of a gated delta net, with the bits of the Triton kernels; no torch headers.
//
// A block goes through a sequence's chunks for kColumns columns of a value head. Warps 0 to 3 do nothing but what the next
// chunk waits for, u and the state, two of them for kOwn columns. As many make the outputs, a chunk behind, or store what
// the backward needs; two more bring what all of them read, two chunks ahead.
#pragma once
#include "gated_delta/chunks.cuh"
#include "gated_delta/columns.cuh"

namespace vx {
namespace delta {

template <class T>
struct WholeShared {
  T k[2][kChunk][kDepth + 8], q[2][kChunk][kDepth + 8];
  T v[2][kChunk][kColumns + 8];
  struct {
    Prepared::Own own;
    Prepared::Keys k;
  } of_k[2];
  Prepared::Queries of_q[2];
  Stored s[kGroups];                        // at a chunk's start: rounded, or, where it is kept, as it is
  float w[2][kGroups][kOwn][kPitch];
  T out[2 * kGroups][2][kBlock][kOwn + 8];  // on its way to device memory
  Passed k_there[2], k_free[2], q_there[2], q_free[2];
  Passed s_there[kGroups], s_free[kGroups], w_there[kGroups][2], w_free[kGroups][2], solved[kGroups][4];
  // u of a group, where it is kept: then there are no queries
  using Us = float[kOwn][kChunk + 4];
  __device__ __forceinline__ Us& u(int chunk, int group) { return reinterpret_cast<Us*>(q[chunk % 2])[group]; }
};
static_assert(offsetof(Prepared, k) == offsetof(Prepared, columns) + sizeof(Prepared::Own));
static_assert(kGroups * sizeof(float[kOwn][kChunk + 4]) <= sizeof(uint16_t[kChunk][kDepth + 8]));

// KEEP: for the backward, states at chunk starts and u in place of outputs.
template <class T, bool KEEP>
__global__ void __launch_bounds__(kPassThreads, 1) whole_kernel(const GatedDeltaChunks args, const Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<WholeShared<T>*>(memory);
  const int splits = args.dv / kColumns, h = blockIdx.x / splits, c0 = blockIdx.x % splits * kColumns, b = blockIdx.y;
  const int hk = h / (args.hv / args.hk);
  const Role role;
  const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
  const int begin = min(max(args.offsets[b], 0), args.tokens), end = max(min(args.offsets[b + 1], args.tokens), begin);
  const int chunks = (end - begin + kChunk - 1) / kChunk;
  const int64_t number = begin / kChunk + b;  // of the first chunk
  const int64_t plane = int64_t(kDepth) * args.dv, v_step = int64_t(args.hv) * args.dv;
  const int c1 = c0 + kOwn * role.group;  // this warp's columns
  const int64_t whose = (int64_t(b) * args.hv + h) * plane + c1;
  const auto row_of = [&](int chunk) { return begin + chunk * kChunk; };
  const auto last_of = [&](int chunk) { return min(kChunk, end - row_of(chunk)); };

  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) {
      sh.k_there[n].init(kBringing), sh.k_free[n].init(2 * kGroups), sh.q_there[n].init(kBringing), sh.q_free[n].init(2 * kGroups);
      for (int g = 0; g < kGroups; ++g) sh.w_there[g][n].init(1), sh.w_free[g][n].init(2);
    }
    for (int g = 0; g < kGroups; ++g) {
      sh.s_there[g].init(2), sh.s_free[g].init(2);
      for (int n = 0; n < 4; ++n) sh.solved[g][n].init(1);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();

  if (role.brings) {
    const bool of_k = role.group == 0;
    if (KEEP && !of_k) return;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int n = chunk % 2, use = chunk / 2, last = last_of(chunk);
      const int64_t row = row_of(chunk);
      const Prepared& from = prepared[(number + chunk) * args.hv + h];
      Passed& there = (of_k ? sh.k_there : sh.q_there)[n];
      if (use) (of_k ? sh.k_free : sh.q_free)[n].wait(use - 1);
      if (of_k) {
        bring_rows<kDepth>(sh.k[n], static_cast<const T*>(args.k) + row * args.k_row + hk * args.k_head, args.k_row, last);
        bring_rows<kColumns>(sh.v[n], static_cast<const T*>(args.v) + row * args.v_row + h * args.v_head + c0, args.v_row, last);
      } else {
        bring_rows<kDepth>(sh.q[n], static_cast<const T*>(args.q) + row * args.q_row + hk * args.q_head, args.q_row, last);
      }
      there.arrive_behind(of_k ? sizeof(sh.of_k[n]) : sizeof(sh.of_q[n]));
      if (lane == 0) {
        if (of_k)
          copy_bulk(&sh.of_k[n], &from.columns, sizeof(sh.of_k[n]), there.address());
        else
          copy_bulk(&sh.of_q[n], &from.q, sizeof(sh.of_q[n]), there.address());
      }
      __syncwarp();
    }
    return;
  }

  auto& stored = sh.s[role.group];
  auto& s_there = sh.s_there[role.group];
  auto& s_free = sh.s_free[role.group];
  if (role.helps) {
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int n = chunk % 2, use = chunk / 2, row = row_of(chunk), last = last_of(chunk);
      const auto& w = sh.w[n][role.group];
      auto& w_there = sh.w_there[role.group][n];
      auto& w_free = sh.w_free[role.group][n];
      if constexpr (KEEP) {
        HalfState half;
        s_there.wait(chunk);
        load(half, stored + kDepth / 16 * role.part);
        s_free.arrive();
        write_state(half, args.states + ((number + chunk) * args.hv + h) * plane + c1 + kDepth / 2 * role.part * args.dv, args.dv);
        w_there.wait(use);
        write_rows(sh.u(chunk, role.group), role.part, args.us + row * v_step + int64_t(h) * args.dv + c1, v_step, last);
        w_free.arrive();
      } else {
        const auto& of = sh.of_q[n];
        const auto block_of = [&](int which) { return role.part ? 1 + which : 3 * which; };
        State s;
        Turned<4> x = {};
        s_there.wait(chunk);
        load(s, stored);
        s_free.arrive();
        sh.q_there[n].wait(use);
        multiply_state<T, 4>(x, s, sh.q[n], [&](int which) { return kBlock * block_of(which); });
        w_there.wait(use);
#pragma unroll
        for (int which = 0; which < 2; ++which) {
          const int block = block_of(which), first = kBlock * block;
          float y[2][4] = {};
          // order: blocks of 16 rows, ascending
#pragma unroll 1
          for (int m = 0; m < block; ++m) {
            const Placed& left = of.p[block * (block - 1) / 2 + m];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              float z[1][4];
              take_columns(z[0], w, kBlock * m + 8 * half);
              round_to(z, z);
              const float4 p = *reinterpret_cast<const float4*>(left + in_block(gid, 8 * half + 2 * tig));
              product_of(y[0], z[0], p.x, p.y), product_of(y[1], z[0], p.z, p.w);
            }
          }
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float2 decay = two_of(of.decay, 2 * block + half);
            auto& o = x[2 * which + half];
#pragma unroll
            for (int e = 0; e < 4; ++e) o[e] = fmaf(e % 2 ? decay.y : decay.x, o[e] + 0.0f, y[half][e] + 0.0f);
          }
          // order: the own block's rows, ascending
#pragma unroll
          for (int j = 0; j < kBlock; j += 4) {
            float z[2][4];  // of this thread's two columns
            *reinterpret_cast<float4*>(z[0]) = *reinterpret_cast<const float4*>(&w[gid][first + j]);
            *reinterpret_cast<float4*>(z[1]) = *reinterpret_cast<const float4*>(&w[gid + 8][first + j]);
#pragma unroll
            for (int two = 0; two < 4; two += 2) {
              float p[2][4];  // of rows 2 tig and the next: those of i and i + 8, of columns j and j + 1
#pragma unroll
              for (int e = 0; e < 2; ++e)
                *reinterpret_cast<float4*>(p[e]) = *reinterpret_cast<const float4*>(of.own[block] + in_block(2 * tig + e, j + two));
#pragma unroll
              for (int one = 0; one < 2; ++one)
#pragma unroll
                for (int half = 0; half < 2; ++half)
#pragma unroll
                  for (int e = 0; e < 4; ++e)
                    if (j + two + one <= 8 * half + 2 * tig + e % 2) {
                      auto& o = x[2 * which + half][e];
                      o = fmaf(p[e % 2][2 * half + one], z[e / 2][two + one] + 0.0f, o);
                    }
            }
          }
          uint32_t out[4];
#pragma unroll
          for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int e = 0; e < 4; e += 2) {
              T two[2];
              narrow(two[0], args.scale * x[2 * which + half][e]);
              narrow(two[1], args.scale * x[2 * which + half][e + 1]);
              out[half * 2 + e / 2] = *reinterpret_cast<uint32_t*>(two);
            }
          auto& rows = sh.out[role.group * 2 + role.part][which];
          store_transposed(&rows[lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8], out);
          __syncwarp();
          const int i = lane / 2, c = lane % 2 * 8;
          T* const to = static_cast<T*>(args.out) + (row + first + i) * v_step + int64_t(h) * args.dv + c1 + c;
          if (first + i < last) *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(&rows[i][c]);
        }
        w_free.arrive();
        sh.q_free[n].arrive();
      }
    }
    return;
  }
  const int d0 = kDepth / 2 * role.part;  // this warp's half of the dims
  HalfState s;
  read_state(s, args.initial ? args.initial + whose + d0 * args.dv : nullptr, args.dv);
  const auto publish = [&] {
    if constexpr (KEEP) {
      store(stored + d0 / 8, s);
    } else {
      HalfState operand;
      round_to(operand, s), store(stored + d0 / 8, operand);
    }
    s_there.arrive();
  };
  publish();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int n = chunk % 2, use = chunk / 2, last = last_of(chunk);
    const auto& k = sh.k[n];
    const auto& of = sh.of_k[n].k;
    auto& w = sh.w[n][role.group];
    auto& solved = sh.solved[role.group];
    sh.k_there[n].wait(use);
    s_there.wait(chunk);
    Turned<4> x = {};  // this warp's half of the rows
    {
      State operand;
      load(operand, stored);
      if (KEEP) round_to(operand, operand);
      multiply_state<T, 4>(x, operand, k, [&](int pair) { return kBlock * (2 * role.part + pair); });
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      float v[2][4];
      take_rows(v, sh.v[n], kBlock * (2 * role.part + m), kOwn * role.group);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int tile = 4 * role.part + 2 * m + half;
        const float2 beta = two_of(of.beta, tile), decay = two_of(of.decay, tile);
        auto& left = x[2 * m + half];
#pragma unroll
        for (int e = 0; e < 4; ++e)
          left[e] = (e % 2 ? beta.y : beta.x) * fmaf(-(e % 2 ? decay.y : decay.x), left[e], v[half][e]) + 0.0f;
      }
    }
    if (use) sh.w_free[role.group][n].wait(use - 1);
    HalfState added = {};
    Turned<6> known;   // rows of blocks that are solved, as multiplied
    float rows[2][4];  // of the last one, as they are added to the state
    const auto take = [&](int block) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int tile = 2 * block + half, i = 8 * tile + 2 * tig;
        const float2 rest = two_of(of.rest, tile);
        float z[4];
        take_columns(z, w, 8 * tile);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          if (block < 3) known[tile][e] = as_operand(z[e]);
          rows[half][e] = i + e % 2 < last ? as_operand((e % 2 ? rest.y : rest.x) * z[e]) : 0.0f;
        }
      }
    };
    const auto add = [&](int block) { multiply_rows<T, kDepth / 16>(added, rows[0], rows[1], k, kBlock * block, d0); };
    const auto solve_block = [&](int block, auto meanwhile) {
      float y[2][4] = {};
      // order: blocks of 16 rows, ascending
#pragma unroll
      for (int m = 0; m < 2 * block; ++m) {
        const Placed& left = of.a[block * (block - 1) / 2 + m / 2];
        const float4 a = *reinterpret_cast<const float4*>(left + in_block(gid, m % 2 * 8 + 2 * tig));
        product_of(y[0], known[m], a.x, a.y), product_of(y[1], known[m], a.z, a.w);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[block % 2 * 2 + half][e] = x[block % 2 * 2 + half][e] - (y[half][e] + 0.0f);
      solve<false>(w, KEEP ? sh.u(chunk, role.group) : nullptr, block, x[block % 2 * 2], x[block % 2 * 2 + 1], of.r,
                   sh.of_k[n].own.of[block], meanwhile);
      solved[block].arrive();
    };
    const auto await = [&](int block) { solved[block].wait(chunk), take(block); };
    if (role.part == 0) {
      solve_block(0, [] {}), take(0);
      solve_block(1, [&] { add(0); }), take(1), add(1);
      await(2), add(2);
      await(3), add(3);
    } else {
      await(0), add(0);
      await(1);
      solve_block(2, [&] { add(1); }), take(2);
      solve_block(3, [&] { add(2); });
      sh.w_there[role.group][n].arrive();
      take(3), add(3);
    }
    const float whole = of.whole[0];
#pragma unroll
    for (int m = 0; m < kDepth / 16; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][e] = fmaf(whole, s[m][e], added[m][e]);
    sh.k_free[n].arrive();
    if (chunk + 1 == chunks) break;
    s_free.wait(chunk);
    publish();
  }
  if (args.final_state) write_state(s, args.final_state + whose + d0 * args.dv, args.dv);
#endif
}

}  // namespace delta
}  // namespace vx
