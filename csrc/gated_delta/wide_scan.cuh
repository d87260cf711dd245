// The backward's way through whole sequences, as scan.cuh has it and with its bits, by the warpgroup instruction; no torch
// headers.
//
// A block goes through a sequence's chunks, from the last to the first, for kColumns columns of a value head. Of two
// warpgroups one makes the gradients of u, from the last block of 16 rows on, a column a thread, and of the state, of which
// each warp has a quarter of the dims in registers; the other makes what the outputs' gradients give to both, a chunk
// ahead. The state's gradient as multiplied, rounded to tf32, and the rows that are added to it lie in shared memory as
// right operands. Two more warps bring what all of them read, two chunks ahead. What is made is stored by those that make
// it.
#pragma once
#include "gated_delta/scan.cuh"
#include "gated_delta/warpgroup.cuh"

namespace vx {
namespace delta {

constexpr int kWideThreads = 384;  // of whose last four warps two have nothing to do

template <class T>
struct WideScanShared {
  Panel<kColumns> s[kDepth / 32];                              // (columns, dims): the state's gradient
  Panel<kColumns> added[kChunk / 32];                          // (columns, rows): what is added to it
  Panel<kColumns> d[kChunk / 32], decayed[kChunk / 32];        // (columns, rows): the outputs' gradients, and times decay
  T k[2][kChunk][kDepth + 8], q[2][kChunk][kDepth + 8];
  T dout[2][kChunk][kColumns + 8];
  struct {
    Prepared::Keys k;
    Prepared::Own own;
  } of_k[2];
  Prepared::Queries of_q[2];
  float4 given[4][4][32], of_outputs[4][2][4][32];             // what they give to a chunk's rows and to the state
  float w[kChunk][kColumns + 4];                               // the gradients of u, as multiplied
  float turning[4][kBlock][kColumns + 8];
  KeptDims kept[4];                                            // a warp's of the state's gradient, on their way to memory
  Passed k_there[2], k_free[2], q_there[2], q_free[2], s_there, solved[4], placed[4];
  Passed given_there, given_free, of_outputs_there, of_outputs_free;
};
template <class T>
constexpr int kWideScanBytes = sizeof(WideScanShared<T>) + 1024;  // from a 1,024-byte boundary on
static_assert(kWideScanBytes<uint16_t> <= 227 << 10);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// The warps of the outputs' gradients meet.
__device__ __forceinline__ void meet_outputs() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

#endif

template <class T>
__global__ void __launch_bounds__(kWideThreads, 1) wide_scan_kernel(const GatedDeltaBackward args, const Prepared* prepared) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<WideScanShared<T>*>(memory + (1024 - sm90::shared_address(memory) % 1024) % 1024);
  const int splits = args.dv_size / kColumns, h = blockIdx.x / splits, c0 = blockIdx.x % splits * kColumns, b = blockIdx.y;
  const int hk = h / (args.hv / args.hk);
  const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), part = warp % 4;  // of the rows, or of the dims
  const int lane = threadIdx.x % 32, gid = lane / 4, tig = lane % 4;
  const int begin = min(max(args.offsets[b], 0), args.tokens), end = max(min(args.offsets[b + 1], args.tokens), begin);
  const int chunks = (end - begin + kChunk - 1) / kChunk;
  const int64_t plane = int64_t(kDepth) * args.dv_size, v_step = int64_t(args.hv) * args.dv_size;
  const int64_t whose = (int64_t(b) * args.hv + h) * plane + c0;
  const auto chunk_of = [&](int turn) { return chunks - 1 - turn; };
  const auto row_of = [&](int turn) { return begin + chunk_of(turn) * kChunk; };
  const auto last_of = [&](int turn) { return min(kChunk, end - row_of(turn)); };
  const auto place_of = [&](int turn) { return (int64_t(begin / kChunk + b + chunk_of(turn))) * args.hv + h; };

  if (threadIdx.x == 0) {
    for (int n = 0; n < 2; ++n)
      sh.k_there[n].init(kBringing), sh.k_free[n].init(4), sh.q_there[n].init(kBringing), sh.q_free[n].init(4);
    for (int n = 0; n < 4; ++n) sh.solved[n].init(1), sh.placed[n].init(1);
    sh.s_there.init(4), sh.given_there.init(4), sh.given_free.init(4), sh.of_outputs_there.init(4), sh.of_outputs_free.init(4);
    sm90::barrier_init_fence();
  }
  __syncthreads();

  if (warp >= 8) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    if (warp > 9) return;
    const bool of_k = warp == 8;
    const Source<T> from{
        of_k ? static_cast<const T*>(args.k) + hk * args.k_head : static_cast<const T*>(args.q) + hk * args.q_head,
        of_k ? nullptr : static_cast<const T*>(args.dout) + int64_t(h) * args.dv_size + c0, of_k ? args.k_row : args.q_row, v_step};
    const int bytes = of_k ? sizeof(sh.of_k[0]) : sizeof(sh.of_q[0]);
    const auto numbers_of = [&](int turn) {
      const Prepared& all = prepared[place_of(turn)];
      return of_k ? static_cast<const void*>(&all.k) : &all.q;
    };
#pragma unroll 1
    for (int turn = 0; turn < chunks; ++turn) {
      const int n = turn % 2, use = turn / 2, far = turn + 2;
      if (use) (of_k ? sh.k_free : sh.q_free)[n].wait(use - 1);
      from.bring(of_k ? sh.k[n] : sh.q[n], sh.dout[n], of_k ? static_cast<void*>(&sh.of_k[n]) : &sh.of_q[n], numbers_of(turn),
                 bytes, row_of(turn), last_of(turn), (of_k ? sh.k_there : sh.q_there)[n]);
      if (far < chunks) from.ask(numbers_of(far), bytes, row_of(far), last_of(far));
    }
    return;
  }

  const int first = kBlock * part;
  // Of this warp's dims keys as a left operand: two of eight rows of each block and tile.
  const auto load_dims = [&](uint32_t (&to)[4][2][4], const T (*rows)[kDepth + 8]) {
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int t = 0; t < 2; ++t)
        load_transposed(to[m][t], &rows[kBlock * m + lane % 8 + lane / 16 * 8][64 * t + first + lane / 8 % 2 * 8]);
  };
  // order: rows ascending
  const auto multiply_dims = [&](float (&d)[2][4][4], const uint32_t (&dims)[4][2][4], const Panel<kColumns>* rows, auto wait) {
    const uint64_t from = operand_of<kColumns>(rows, 0, 0);
    float left[4][2][2][4];
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int t = 0; t < 2; ++t)
          widen_four<T>(left[m][half][t], dims[m][t][2 * half], dims[m][t][2 * half + 1]);
    wait();
#pragma unroll
    for (int m = 0; m < 4; ++m) settle(left[m][0]), settle(left[m][1]);
    settle(d[0]), settle(d[1]);
    sm90::wgmma_begin();
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int t = 0; t < 2; ++t) wide_product(d[t], left[m][half][t], operand_behind(from, kBlock * m + 8 * half));
    sm90::wgmma_commit();
  };
  // Eight of this thread's column's rows, from `i` of this warp's on.
  const auto place_eight = [&](Panel<kColumns>* to, int i, const float (&x)[8]) {
    const int at = first % 32 / 8 + i / 8;
    put_eight(&to[part / 2][0][0], lane * 32 + ((2 * at) ^ (lane % 8)) * 4, x);
  };

  if (warp >= 4) {
    const uint64_t of_d = operand_of<kColumns>(sh.d, 0, 0), of_decayed = operand_of<kColumns>(sh.decayed, 0, 0);
    for (int turn = 0; turn < chunks; ++turn) {
      const int n = turn % 2, use = turn / 2;
      const auto& of = sh.of_q[n];
      sh.q_there[n].wait(use);
#pragma unroll
      for (int i = 0; i < kBlock; i += 8) {
        float x[8], y[8];
#pragma unroll
        for (int e = 0; e < 8; ++e) {
          const float d = args.scale * widen(sh.dout[n][first + i + e][lane]);
          x[e] = as_operand(d), y[e] = as_operand(of.decay[first + i + e] * d);
        }
        place_eight(sh.d, i, x), place_eight(sh.decayed, i, y);
      }
      written_for_products();
      meet_outputs();
      float rows[4][4] = {}, added[2][4][4] = {};
      // order: rows ascending
#pragma unroll 1
      for (int m = 0; m < 4; ++m) {
        // This warp's rows: columns of P, whose rows before them are zeros; and its dims of the queries
        const Placed& from = m == part ? of.own[m] : of.p[m > part ? m * (m - 1) / 2 + part : 0];
        float left[2][4], of_dims[2][2][4];
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const float p = as_operand(from[in_block(8 * half + 2 * tig + e % 2, gid + e / 2 * 8)]);
            left[half][e] = m >= part ? p : 0.0f;
          }
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          uint32_t dims[4];
          load_transposed(dims, &sh.q[n][kBlock * m + lane % 8 + lane / 16 * 8][64 * t + first + lane / 8 % 2 * 8]);
#pragma unroll
          for (int half = 0; half < 2; ++half) widen_four<T>(of_dims[half][t], dims[2 * half], dims[2 * half + 1]);
        }
        settle(left), settle(of_dims[0]), settle(of_dims[1]), settle(rows), settle(added[0]), settle(added[1]);
        sm90::wgmma_begin();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          wide_product(rows, left[half], operand_behind(of_d, kBlock * m + 8 * half));
#pragma unroll
          for (int t = 0; t < 2; ++t) wide_product(added[t], of_dims[half][t], operand_behind(of_decayed, kBlock * m + 8 * half));
        }
        sm90::wgmma_commit();
        sm90::wgmma_wait<0>();
        settle(rows), settle(added[0]), settle(added[1]);
      }
      sh.q_free[n].arrive();
      if (turn) sh.given_free.wait(turn - 1);
#pragma unroll
      for (int m = 0; m < 4; ++m) sh.given[part][m][lane] = float4{rows[m][0], rows[m][1], rows[m][2], rows[m][3]};
      sh.given_there.arrive();
      if (turn) sh.of_outputs_free.wait(turn - 1);
#pragma unroll
      for (int t = 0; t < 2; ++t)
#pragma unroll
        for (int m = 0; m < 4; ++m)
          sh.of_outputs[part][t][m][lane] = float4{added[t][m][0], added[t][m][1], added[t][m][2], added[t][m][3]};
      sh.of_outputs_there.arrive();
      meet_outputs();  // all have multiplied what the next turn overwrites
    }
    return;
  }

  // Dims 64 t + first + gid and the one 8 behind, columns 8 n + 2 tig and the next.
  asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
  float s[2][4][4];
  const auto each_pair = [&](auto to) {
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          to(s[t][n][2 * half], s[t][n][2 * half + 1], (64 * t + first + gid + 8 * half) * args.dv_size + 8 * n + 2 * tig);
  };
  each_pair([&](float& x, float& y, int at) {
    float2 two{0, 0};
    if (args.dfinal) two = *reinterpret_cast<const float2*>(args.dfinal + whose + at);
    x = two.x, y = two.y;
  });
  const auto write_to = [&](float* to) {
    each_pair([&](float x, float y, int at) { *reinterpret_cast<float2*>(to + at) = float2{x, y}; });
  };
  int places[4];  // in panels of the state, of elements of tile 0
#pragma unroll
  for (int e = 0; e < 4; ++e) {
    const int c = 2 * tig + e % 2, of_dim = (2 * (part % 2) + e / 2) * 2 + gid % 2;
    places[e] = part / 2 * (kColumns * 32) + c * 32 + (of_dim ^ c) * 4 + gid / 2;
  }
  const auto publish = [&] {
    float* const to = &sh.s[0][0][0];
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) to[2 * t * (kColumns * 32) + 256 * n + places[e]] = as_operand(s[t][n][e]);
    put_dims(sh.kept[part], s);
    written_for_products();
    sh.s_there.arrive();
  };
  auto& turning = sh.turning[part];
  float w[kBlock] = {};  // the gradients of u of this warp's rows, a column a thread
  const auto write_dus = [&](int turn) {
    float* const to = args.dus + int64_t(row_of(turn) + first) * v_step + int64_t(h) * args.dv_size + c0 + lane;
    // By a loop, which needs them in shared memory: what all warps run is to have room in the cache of instructions
#pragma unroll
    for (int i = 0; i < kBlock; ++i) turning[i][lane] = w[i];
    const int last = min(last_of(turn) - first, kBlock);
#pragma unroll 1
    for (int i = 0; i < last; ++i) to[i * v_step] = turning[i][lane];
  };
  WideRows rows;  // of keys: this warp's of the next chunk
  if (chunks) {
    publish();
    sh.k_there[0].wait(0);
    load_rows(rows, sh.k[0], first);
  }
  for (int turn = 0; turn < chunks; ++turn) {
    const int n = turn % 2;
    const auto& k = sh.k[n];
    const auto& of = sh.of_k[n].k;
    float x[4][4] = {};
    sh.s_there.wait(turn);
    multiply_wide(x, rows, sh.s);
    // Behind the barrier that those wait for who read the state: it would wait for stores too
    store_dims(args.dstates + place_of(turn) * plane + c0, args.dv_size, first, sh.kept[part]);
    if (turn) write_dus(turn - 1);
    const float rest[2] = {of.rest[first + gid], of.rest[first + gid + 8]};
    sh.given_there.wait(turn);
    float4 given[4];
#pragma unroll
    for (int m = 0; m < 4; ++m) given[m] = sh.given[part][m][lane];
    sh.given_free.arrive();
    sm90::wgmma_wait<0>();
    settle(x);
#pragma unroll
    for (int m = 0; m < 4; ++m) {
      const float four[4] = {given[m].x, given[m].y, given[m].z, given[m].w};
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][e] = fmaf(rest[e / 2], x[m][e], four[e]) + 0.0f;
    }
    float y[4][4] = {};
    // order: blocks of 16 rows from the last to the first
#pragma unroll 1
    for (int block = 3; block > part; --block) {
      const Placed& left = of.a[block * (block - 1) / 2 + part];
      float a[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int e = 0; e < 4; ++e) a[half][e] = left[in_block(8 * half + 2 * tig + e / 2, gid + e % 2 * 8)];
      sh.solved[block].wait(turn);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float* const here = &sh.w[kBlock * block + 8 * half + 2 * tig][gid];
#pragma unroll
        for (int m = 0; m < 4; ++m) product(y[m], a[half], here[8 * m], here[8 * m + kColumns + 4]);
      }
    }
#pragma unroll
    for (int m = 0; m < 4; ++m)
#pragma unroll
      for (int e = 0; e < 4; ++e) x[m][e] = x[m][e] - (y[m][e] + 0.0f);
    {
      float z[kBlock], factors[kBlock];
      to_columns(z, x, turning);
#pragma unroll
      for (int i = 0; i < kBlock; i += 4)
        *reinterpret_cast<float4*>(factors + i) = *reinterpret_cast<const float4*>(of.r + first + i);
      const auto& own = sh.of_k[n].own.of[part];
      // order: the own block's rows, one fma each, descending
#pragma unroll
      for (int i = kBlock - 1; i >= 0; --i) {
        float minus[kBlock];
#pragma unroll
        for (int j = 0; j < kBlock; j += 4)
          if (j < i) *reinterpret_cast<float4*>(minus + j) = *reinterpret_cast<const float4*>(&own[i][j]);
        const float multiplied = factors[i] * z[i] + 0.0f;
#pragma unroll
        for (int j = i - 1; j >= 0; --j) z[j] = fmaf(minus[j], multiplied, z[j]);
      }
#pragma unroll
      for (int i = 0; i < kBlock; ++i) {
        w[i] = factors[i] * z[i];
        sh.w[first + i][lane] = as_operand(w[i]);
      }
      sh.solved[part].arrive();
#pragma unroll
      for (int i = 0; i < kBlock; i += 8) {
        float back[8], eight[8];
#pragma unroll
        for (int e = 0; e < 8; e += 4)
          *reinterpret_cast<float4*>(back + e) = *reinterpret_cast<const float4*>(of.back + first + i + e);
#pragma unroll
        for (int e = 0; e < 8; ++e) eight[e] = as_operand(-(back[e] * w[i + e]));
        place_eight(sh.added, i, eight);
      }
      written_for_products();
      sh.placed[part].arrive();
    }
    uint32_t dims[4][2][4];
    load_dims(dims, k);
    float added[2][4][4];
    sh.of_outputs_there.wait(turn);
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int m = 0; m < 4; ++m) {
        const float4 four = sh.of_outputs[part][t][m][lane];
        added[t][m][0] = four.x, added[t][m][1] = four.y, added[t][m][2] = four.z, added[t][m][3] = four.w;
      }
    sh.of_outputs_free.arrive();
    multiply_dims(added, dims, sh.added, [&] {
#pragma unroll
      for (int m = 3; m >= 0; --m) sh.placed[m].wait(turn);
    });
    const float whole = of.whole[0];
    if (turn + 1 < chunks) {
      sh.k_there[(turn + 1) % 2].wait((turn + 1) / 2);
      load_rows(rows, sh.k[(turn + 1) % 2], first);
    }
    sm90::wgmma_wait<0>();
    settle(added[0]), settle(added[1]);
#pragma unroll
    for (int t = 0; t < 2; ++t)
#pragma unroll
      for (int m = 0; m < 4; ++m)
#pragma unroll
        for (int e = 0; e < 4; ++e) s[t][m][e] = fmaf(whole, s[t][m][e], added[t][m][e]);
    sh.k_free[n].arrive();
    if (turn + 1 == chunks) break;
    publish();
  }
  if (chunks) write_dus(chunks - 1);
  if (args.dinitial) write_to(args.dinitial + whose);
#endif
}

}  // namespace delta
}  // namespace vx
