// The backward's way through whole sequences, with the bits of the Triton kernels (triton_backward.py declares them); no
// torch headers.
//
// From a sequence's last chunk to its first, as whole.cuh goes the other way: warps 0 to 3 make the gradients of u and of
// the state, as many more what the outputs' gradients give to both, a chunk ahead, and store what is made.
#pragma once
#include "gated_delta/whole.cuh"

namespace vx {
namespace delta {

template <class T>
struct ScanShared {
  T k[2][kChunk][kDepth + 8], q[2][kChunk][kDepth + 8];
  T d[2][kChunk][kColumns + 8];  // the outputs' gradients
  struct {
    Prepared::Keys k;
    Prepared::Own own;
  } of_k[2];
  Prepared::Queries of_q[2];
  Stored s[kGroups];                              // the state's gradient
  Stored added[2][kGroups];                       // what the outputs give to it, and to the gradients of u
  float4 rows[2][kGroups][kChunk / 8][32];
  float w[2][kGroups][kOwn][kPitch];              // the gradients of u
  Passed k_there[2], k_free[2], q_there[2], q_free[2];
  Passed s_there[kGroups], s_free[kGroups], w_there[kGroups][2], w_free[kGroups][2];
  Passed made[kGroups][2], taken[kGroups][2], solved[kGroups][4];
};
static_assert(offsetof(Prepared, rows) == offsetof(Prepared, k) + sizeof(Prepared::Keys));

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Keys and what is of them, or queries, what is of these and the outputs' gradients (into `d`), a chunk after another:
// a warp's, two chunks ahead of whoever reads them.
template <class T, class Shared, class D, class Row, class Last, class Place>
__device__ __forceinline__ void bring_chunks(Shared& sh, D& d, bool of_k, const GatedDeltaBackward& args,
                                             const Prepared* prepared, int chunks, int hk, int h, int c0,
                                             const Row& row_of, const Last& last_of, const Place& place_of) {
  const int lane = threadIdx.x % 32;
  const int64_t v_step = int64_t(args.hv) * args.dv_size;
  for (int turn = 0; turn < chunks; ++turn) {
    const int n = turn % 2, use = turn / 2, last = last_of(turn);
    const int64_t row = row_of(turn);
    const Prepared& from = prepared[place_of(turn)];
    Passed& there = (of_k ? sh.k_there : sh.q_there)[n];
    if (use) (of_k ? sh.k_free : sh.q_free)[n].wait(use - 1);
    if (of_k) {
      bring_rows<kDepth>(sh.k[n], static_cast<const T*>(args.k) + row * args.k_row + hk * args.k_head, args.k_row, last);
    } else {
      bring_rows<kDepth>(sh.q[n], static_cast<const T*>(args.q) + row * args.q_row + hk * args.q_head, args.q_row, last);
      bring_rows<kColumns>(d[n], static_cast<const T*>(args.dout) + row * v_step + int64_t(h) * args.dv_size + c0, v_step, last);
    }
    there.arrive_behind(of_k ? sizeof(sh.of_k[n]) : sizeof(sh.of_q[n]));
    if (lane == 0) {
      if (of_k)
        copy_bulk(&sh.of_k[n], &from.k, sizeof(sh.of_k[n]), there.address());
      else
        copy_bulk(&sh.of_q[n], &from.q, sizeof(sh.of_q[n]), there.address());
    }
    __syncwarp();
  }
}

#endif

template <class T>
__global__ void __launch_bounds__(kPassThreads, 1) scan_kernel(const GatedDeltaBackward args, const Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<ScanShared<T>*>(memory);
  const int splits = args.dv_size / kColumns, h = blockIdx.x / splits, c0 = blockIdx.x % splits * kColumns, b = blockIdx.y;
  const int hk = h / (args.hv / args.hk);
  const Role role;
  const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
  const int begin = min(max(args.offsets[b], 0), args.tokens), end = max(min(args.offsets[b + 1], args.tokens), begin);
  const int chunks = (end - begin + kChunk - 1) / kChunk;
  const int64_t plane = int64_t(kDepth) * args.dv_size, v_step = int64_t(args.hv) * args.dv_size;
  const int c1 = c0 + kOwn * role.group;
  const int64_t whose = (int64_t(b) * args.hv + h) * plane + c1;
  const auto chunk_of = [&](int turn) { return chunks - 1 - turn; };
  const auto row_of = [&](int turn) { return begin + chunk_of(turn) * kChunk; };
  const auto last_of = [&](int turn) { return min(kChunk, end - row_of(turn)); };
  const auto place_of = [&](int turn) { return (int64_t(begin / kChunk + b + chunk_of(turn))) * args.hv + h; };

  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n) {
      sh.k_there[n].init(kBringing), sh.k_free[n].init(2 * kGroups), sh.q_there[n].init(kBringing), sh.q_free[n].init(2 * kGroups);
      for (int g = 0; g < kGroups; ++g) {
        sh.w_there[g][n].init(1), sh.w_free[g][n].init(2);
        sh.made[g][n].init(2), sh.taken[g][n].init(2);
      }
    }
    for (int g = 0; g < kGroups; ++g) {
      sh.s_there[g].init(2), sh.s_free[g].init(2);
      for (int n = 0; n < 4; ++n) sh.solved[g][n].init(1);
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();

  if (role.brings) {
    bring_chunks<T>(sh, sh.d, role.group == 0, args, prepared, chunks, hk, h, c0, row_of, last_of, place_of);
    return;
  }

  auto& stored = sh.s[role.group];
  auto& s_there = sh.s_there[role.group];
  auto& s_free = sh.s_free[role.group];
  if (role.helps) {
    const auto make = [&](int turn) {
      const int n = turn % 2, use = turn / 2;
      const auto& of = sh.of_q[n];
      sh.q_there[n].wait(use);
      if (use) sh.taken[role.group][n].wait(use - 1);
      Chunk d;
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        float two[2][4];
        take_rows(two, sh.d[n], kBlock * m, kOwn * role.group);
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 4; ++e) d[2 * m + half][e] = args.scale * two[half][e];
      }
      // This part's two blocks of rows: columns of P, whose rows before them are zeros.
      Turned<4> rows = {};
      // order: rows ascending
#pragma unroll
      for (int i = 0; i < kChunk / 8; ++i) {
        float z[1][4];
        round_to(z, reinterpret_cast<const float(&)[1][4]>(d[i]));
        const int m = i / 2;
#pragma unroll
        for (int tile = 0; tile < 4; ++tile) {
          const int block = 2 * role.part + tile / 2;
          float p[2] = {0.0f, 0.0f};
          if (m >= block) {
            const Placed& left = m == block ? of.own[m] : of.p[m * (m - 1) / 2 + block];
#pragma unroll
            for (int e = 0; e < 2; ++e) p[e] = as_operand(left[in_block(i % 2 * 8 + 2 * tig + e, tile % 2 * 8 + gid)]);
          }
          product_of(rows[tile], z[0], p[0], p[1]);
        }
      }
#pragma unroll
      for (int tile = 0; tile < 4; ++tile)
        sh.rows[n][role.group][4 * role.part + tile][lane] = float4{rows[tile][0], rows[tile][1], rows[tile][2], rows[tile][3]};
      HalfState added = {};  // this part's half of the dims
#pragma unroll
      for (int i = 0; i < kChunk / 8; i += 2) {
        float z[2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 decay = two_of(of.decay, i + half);
#pragma unroll
          for (int e = 0; e < 4; ++e) z[half][e] = as_operand((e % 2 ? decay.y : decay.x) * d[i + half][e]);
        }
        multiply_rows<T, kDepth / 16>(added, z[0], z[1], sh.q[n], 8 * i, kDepth / 2 * role.part);
      }
#pragma unroll
      for (int tile = 0; tile < kDepth / 16; ++tile)
        sh.added[n][role.group][kDepth / 16 * role.part + tile][lane] =
            float4{added[tile][0], added[tile][1], added[tile][2], added[tile][3]};
      sh.made[role.group][n].arrive();
      sh.q_free[n].arrive();
    };
    if (chunks) make(0);
    for (int turn = 0; turn < chunks; ++turn) {
      {
        HalfState half;
        s_there.wait(turn);
        load(half, stored + kDepth / 16 * role.part);
        s_free.arrive();
        write_state(half, args.dstates + place_of(turn) * plane + c1 + kDepth / 2 * role.part * args.dv_size, args.dv_size);
      }
      if (turn + 1 < chunks) make(turn + 1);
      const int n = turn % 2;
      sh.w_there[role.group][n].wait(turn / 2);
      write_rows(sh.w[n][role.group], role.part, args.dus + row_of(turn) * v_step + int64_t(h) * args.dv_size + c1, v_step, last_of(turn));
      sh.w_free[role.group][n].arrive();
    }
    return;
  }
  const int dim = kDepth / 2 * role.part;  // from here on this warp's half of them
  HalfState s;
  read_state(s, args.dfinal ? args.dfinal + whose + dim * args.dv_size : nullptr, args.dv_size);
  const auto publish = [&] {
    store(stored + dim / 8, s);
    s_there.arrive();
  };
  publish();
  for (int turn = 0; turn < chunks; ++turn) {
    const int n = turn % 2, use = turn / 2;
    const auto& k = sh.k[n];
    const auto& of = sh.of_k[n].k;
    auto& w = sh.w[n][role.group];
    auto& solved = sh.solved[role.group];
    sh.k_there[n].wait(use);
    s_there.wait(turn);
    Turned<4> x = {};  // this warp's half of the rows
    {
      State operand;
      load(operand, stored);
      round_to(operand, operand);
      multiply_state<T, 4>(x, operand, k, [&](int pair) { return kBlock * (2 * role.part + pair); });
    }
    sh.made[role.group][n].wait(use);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const int tile = 4 * role.part + m;
      const float2 rest = two_of(of.rest, tile);
      const float4 four = sh.rows[n][role.group][tile][lane];
      const float given[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][e] = fmaf(e % 2 ? rest.y : rest.x, x[m][e], given[e]) + 0.0f;
    }
    if (use) sh.w_free[role.group][n].wait(use - 1);
    Chunk rows;  // the gradients of u, solved from the last block on
    const auto take = [&](int block) {
      take_columns(rows[2 * block], w, kBlock * block), take_columns(rows[2 * block + 1], w, kBlock * block + 8);
    };
    const auto solve_block = [&](int block) {
      float y[2][4] = {};
      // order: blocks of 16 rows from the last to the first
#pragma unroll
      for (int m = 3; m > block; --m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const Placed& left = of.a[m * (m - 1) / 2 + block];
          float z[1][4];
          round_to(z, reinterpret_cast<const float(&)[1][4]>(rows[2 * m + half]));
#pragma unroll
          for (int tile = 0; tile < 2; ++tile)
            product_of(y[tile], z[0], left[in_block(8 * half + 2 * tig, 8 * tile + gid)],
                       left[in_block(8 * half + 2 * tig + 1, 8 * tile + gid)]);
        }
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 4; ++e) x[block % 2 * 2 + half][e] = x[block % 2 * 2 + half][e] - (y[half][e] + 0.0f);
      solve<true, kPitch>(w, nullptr, block, x[block % 2 * 2], x[block % 2 * 2 + 1], of.r, sh.of_k[n].own.of[block], [] {});
      solved[block].arrive();
      take(block);
    };
    const auto await = [&](int block) { solved[block].wait(turn), take(block); };
    if (role.part == 1) {
      solve_block(3), solve_block(2);
      await(1), await(0);
    } else {
      await(3), await(2);
      solve_block(1), solve_block(0);
      sh.w_there[role.group][n].arrive();
    }
    HalfState added;
    load(added, sh.added[n][role.group] + dim / 8);
    sh.taken[role.group][n].arrive();
#pragma unroll
    for (int i = 0; i < kChunk / 8; i += 2) {
      float z[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 back = two_of(of.back, i + half);
#pragma unroll
        for (int e = 0; e < 4; ++e) z[half][e] = as_operand(-((e % 2 ? back.y : back.x) * rows[i + half][e]));
      }
      multiply_rows<T, kDepth / 16>(added, z[0], z[1], k, 8 * i, dim);
    }
    const float whole = of.whole[0];
#pragma unroll
    for (int m = 0; m < kDepth / 16; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) s[m][e] = fmaf(whole, s[m][e], added[m][e]);
    sh.k_free[n].arrive();
    if (turn + 1 == chunks) break;
    s_free.wait(turn);
    publish();
  }
  if (args.dinitial) write_state(s, args.dinitial + whose + dim * args.dv_size, args.dv_size);
#endif
}

}  // namespace delta
}  // namespace vx
