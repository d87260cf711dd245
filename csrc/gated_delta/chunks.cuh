// Sequences of a gated delta net, chunk by chunk, with the bits of the Triton kernels; no torch headers.
//
// A block goes through one sequence's chunks for COLUMNS columns of a value head. Its eight warps are four pairs: warps
// 0 to 3 make u of 16 rows each, warps 4 to 7 their outputs. The products among keys, and with the state, run in all
// warps; then u is solved 16 rows at a time, each thread of the warp whose turn it is holding a column, while the other
// warps add what the rows before give to theirs. The state's fp32 values stay in registers, 16 rows of them in a warp;
// shared memory holds them as they are multiplied, rounded to tf32.
#pragma once
#include "gated_delta/mma.cuh"

namespace vx {

constexpr int kChunkThreads = 256;

struct GatedDeltaChunks {
  const void *q, *k, *v;  // (tokens, hk, dk) twice, (tokens, hv, dv), dims contiguous
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const float* g;    // (tokens, hv), as beta
  const void* beta;  // fp32, or as q
  bool wide_beta;
  int64_t g_row, beta_row;
  const float* initial;  // (sequences, hv, dk, dv) or null
  float* final_state;    // likewise
  float *states, *us;    // (chunks, hv, dk, dv), of chunk n of sequence b at offsets[b] / 64 + b + n; (tokens, hv, dv); or null
  void* out;             // (tokens, hv, dv), or null
  float* state;          // with slots, as decode.cuh has them; or null
  const void* open_k;
  float *open_w, *open_g;
  int64_t state_slot, k_slot, w_slot, g_slot;
  const int32_t *slots, *context_lens, *offsets;
  int sequences, slot_count, tokens, hk, hv, dk, dv;
  float scale;
  bool l2norm;
  bool within;  // with slots: those sequences alone that go on within a chunk
};

namespace delta {

template <class T, int DK, int COLUMNS>
struct ChunkShared {
  T k[kChunk][DK + 8], q[kChunk][DK + 8];
  T v[kChunk][COLUMNS + 8];
  float s[DK][COLUMNS + 8];  // as multiplied: rounded to tf32
  float w[kChunk][COLUMNS + 8];
  float a[kChunk][kChunk + 4], p[kChunk][kChunk + 4];  // blocks below the diagonal as multiplied, those on it as they are
  float g[kChunk], decay[kChunk], beta[kChunk], r_k[kChunk], r_q[kChunk];
};

template <class T, int DK, int COLUMNS>
__global__ void __launch_bounds__(kChunkThreads, COLUMNS <= 32 ? 2 : 1) chunks_kernel(const GatedDeltaChunks args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  static_assert(DK == 128, "a warp holds 16 rows of the state");
  constexpr int kTiles = COLUMNS / 8, kOwn = COLUMNS / 32;
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<ChunkShared<T, DK, COLUMNS>*>(memory);
  const int splits = args.dv / COLUMNS, h = blockIdx.x / splits, c0 = blockIdx.x % splits * COLUMNS, b = blockIdx.y;
  const int hk = h / (args.hv / args.hk);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, gid = lane / 4, tig = lane % 4;
  const bool of_u = warp < 4;            // this warp's half of the work, and its rows of a chunk
  const int block = warp % 4, first = 16 * block;
  const int row0 = first + gid, row1 = row0 + 8;
  sm90::wait_for_kernel_before();

  const int begin = min(max(args.offsets[b], 0), args.tokens), end = max(min(args.offsets[b + 1], args.tokens), begin);
  int position = 0;
  int64_t slot = -1;
  if (args.slots) {
    if (end - begin <= 1) return;  // single rows are decode.cuh's
    slot = args.slots[b];
    if (slot >= args.slot_count) slot = -1;
    if (slot >= 0) position = max(args.context_lens[b] - (end - begin), 0);
    if (args.within && position % kChunk == 0) return;
  }
  const int64_t plane = int64_t(DK) * args.dv, k_step = int64_t(args.hk) * DK, w_step = int64_t(args.hv) * args.dv;
  const bool kept = slot >= 0;
  const T* const open_k = static_cast<const T*>(args.open_k) + slot * args.k_slot + hk * DK;
  float* const open_w = args.open_w + slot * args.w_slot + int64_t(h) * args.dv + c0;
  const float* const open_g = args.open_g + slot * args.g_slot + h;
  const float* from = nullptr;  // where the state comes from, and where it goes
  float* into = nullptr;
  if (kept) {
    into = args.state + slot * args.state_slot + h * plane + c0;
    if (position >= kChunk) from = into;
  } else if (!args.slots) {
    const int64_t at = (int64_t(b) * args.hv + h) * plane + c0;
    if (args.initial) from = args.initial + at;
    if (args.final_state) into = args.final_state + at;
  }

  // The state: rows 16 warp + gid and + 8, columns 8 n + 2 tig and the next.
  float s[kTiles][4];
#pragma unroll
  for (int n = 0; n < kTiles; ++n)
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const int r = 16 * warp + gid + 8 * m, c = 8 * n + 2 * tig;
      float2 two{0, 0};
      if (from) two = *reinterpret_cast<const float2*>(from + int64_t(r) * args.dv + c);
      s[n][2 * m] = two.x, s[n][2 * m + 1] = two.y;
    }
  auto round_state = [&] {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m)
        *reinterpret_cast<float2*>(&sh.s[16 * warp + gid + 8 * m][8 * n + 2 * tig]) =
            float2{rounded(s[n][2 * m]), rounded(s[n][2 * m + 1])};
  };
  round_state();

  int a = position % kChunk;  // places of the chunk that are there already
  bool ended = !kept;  // a slot's state is written where it has changed
  int64_t chunk = begin / kChunk + b;
  for (int row = begin; row < end; ++chunk) {
    const int last = min(kChunk, a + end - row);  // places from a to here are new
    // What is not there is zeros.
    for (int n = tid; n < kChunk * (DK / 8); n += kChunkThreads) {
      const int i = n / (DK / 8), part = n % (DK / 8) * 8;
      const int64_t t = row + i - a;
      const bool here = i >= a && i < last;
      const T* const key = i < a ? open_k + i * k_step
                                 : static_cast<const T*>(args.k) + (here ? t : row) * args.k_row + hk * args.k_head;
      copy16(&sh.k[i][part], key + part, i < last);
      copy16(&sh.q[i][part], static_cast<const T*>(args.q) + (here ? t : row) * args.q_row + hk * args.q_head + part, here);
    }
    for (int n = tid; n < kChunk * (COLUMNS / 8); n += kChunkThreads) {
      const int i = n / (COLUMNS / 8), part = n % (COLUMNS / 8) * 8;
      const bool here = i >= a && i < last;
      const int64_t t = here ? row + i - a : row;
      copy16(&sh.v[i][part], static_cast<const T*>(args.v) + t * args.v_row + h * args.v_head + c0 + part, here);
    }
    for (int n = tid; n < a * (COLUMNS / 4); n += kChunkThreads) {
      const int i = n / (COLUMNS / 4), part = n % (COLUMNS / 4) * 4;
      copy16(&sh.w[i][part], open_w + i * w_step + part, true);
    }
    copies_end();
    if (warp == 0) {
      // order: a chunk's g ascending, from +0
      float x[2], total = a ? open_g[int64_t(a - 1) * args.hv] : 0.0f;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int i = lane + 32 * m;
        x[m] = i < a ? open_g[int64_t(i) * args.hv] : i < last ? args.g[(row + i - a) * args.g_row + h] : 0.0f;
      }
#pragma unroll 8
      for (int i = 0; i < kChunk; ++i) {
        const float step = __shfl_sync(0xffffffffu, i < 32 ? x[0] : x[1], i % 32);
        if (i >= a) {
          total = total + step;
          if (i % 32 == lane) x[i / 32] = total;
        }
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        sh.g[lane + 32 * m] = x[m];
        sh.decay[lane + 32 * m] = exp_term(x[m]);
      }
    } else if (warp == 1) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int i = lane + 32 * m;
        const int64_t at = (row + i - a) * args.beta_row + h;
        float beta = 0.0f;
        if (i >= a && i < last)
          beta = args.wide_beta ? static_cast<const float*>(args.beta)[at] : widen(static_cast<const T*>(args.beta)[at]);
        sh.beta[i] = beta;
      }
    }
    copies_wait<0>();
    __syncthreads();

    if (args.states) {
      float* const to = args.states + (chunk * args.hv + h) * plane + c0;
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m)
          *reinterpret_cast<float2*>(to + int64_t(16 * warp + gid + 8 * m) * args.dv + 8 * n + 2 * tig) =
              float2{s[n][2 * m], s[n][2 * m + 1]};
    }
    {
      // Norms: warps 0 to 3 those of their rows' keys, the others those of their queries; two threads a row.
      const T* const mine = (of_u ? sh.k : sh.q)[first + lane / 2];
      const float r = args.l2norm ? norm_factor_of<DK>(mine, lane & 1) : 1.0f;
      if (!(lane & 1)) (of_u ? sh.r_k : sh.r_q)[first + lane / 2] = r;
      __syncwarp();
    }
    // Products of the rows' keys, or queries, with the keys up to their own block.
    {
      const float f0 = of_u ? sh.beta[row0] * sh.r_k[row0] : sh.r_q[row0];
      const float f1 = of_u ? sh.beta[row1] * sh.r_k[row1] : sh.r_q[row1];
      const float g0 = sh.g[row0], g1 = sh.g[row1];
      auto& to = of_u ? sh.a : sh.p;
      const T* const rows = &(of_u ? sh.k : sh.q)[first + lane % 16][lane / 16 * 8];
#pragma unroll 1
      for (int n = 0; n <= block; ++n) {
        float d[2][4] = {};
        const T* const others = &sh.k[16 * n + lane % 8 + lane / 16 * 8][lane / 8 % 2 * 8];
#pragma unroll
        for (int x = 0; x < DK / 16; ++x) {
          uint32_t left[4], right[4];
          load_matrix(left, rows + 16 * x);
          load_matrix(right, others + 16 * x);
          product<T>(d[0], left, right[0], right[1]);
          product<T>(d[1], left, right[2], right[3]);
        }
        const bool own = n == block;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int j = 16 * n + 8 * half + 2 * tig;
          const float h0 = sh.g[j], h1 = sh.g[j + 1];
          float2 x{f0 * (exp_term(g0 - h0) * d[half][0]), f0 * (exp_term(g0 - h1) * d[half][1])};
          float2 y{f1 * (exp_term(g1 - h0) * d[half][2]), f1 * (exp_term(g1 - h1) * d[half][3])};
          if (!own) x = float2{rounded(x.x), rounded(x.y)}, y = float2{rounded(y.x), rounded(y.y)};
          *reinterpret_cast<float2*>(&to[row0][j]) = x;
          *reinterpret_cast<float2*>(&to[row1][j]) = y;
        }
      }
    }
    // The same rows times the state.
    float x[kTiles][4] = {};
    {
      const T* const l0 = (of_u ? sh.k : sh.q)[row0];
      const T* const l1 = (of_u ? sh.k : sh.q)[row1];
#pragma unroll 4
      for (int r = tig; r < DK; r += 8) {
        const float left[4] = {widen(l0[r]), widen(l1[r]), widen(l0[r + 4]), widen(l1[r + 4])};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) product(x[n], left, sh.s[r][8 * n + gid], sh.s[r + 4][8 * n + gid]);
      }
    }
    __syncwarp();
    float y[kTiles][4] = {};  // what the rows of earlier blocks give
    {
      const float d0 = sh.decay[row0] * (of_u ? sh.r_k : sh.r_q)[row0], d1 = sh.decay[row1] * (of_u ? sh.r_k : sh.r_q)[row1];
      if (of_u) {
        const float b0 = sh.beta[row0], b1 = sh.beta[row1];
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int c = 8 * n + 2 * tig + m;
            x[n][m] = b0 * fmaf(-d0, x[n][m], widen(sh.v[row0][c])) + 0.0f;
            x[n][2 + m] = b1 * fmaf(-d1, x[n][2 + m], widen(sh.v[row1][c])) + 0.0f;
          }
      }
    }

    // order: blocks of 16 rows, ascending
#pragma unroll 1
    for (int turn = 0; turn < kChunk / 16; ++turn) {
      if (of_u && block == turn) {
        // u before its own block's rows, from where the products left it to a column a thread
#pragma unroll
        for (int n = 0; n < kTiles; ++n)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int c = 8 * n + 2 * tig + m;
            if (row0 >= a) sh.w[row0][c] = x[n][m] - (y[n][m] + 0.0f);
            if (row1 >= a) sh.w[row1][c] = x[n][2 + m] - (y[n][2 + m] + 0.0f);
          }
        __syncwarp();
#pragma unroll
        for (int own = 0; own < kOwn; ++own) {
          const int c = lane + 32 * own;
          float w[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            float u = sh.w[first + i][c];
            if (first + i >= a) {
              // order: the own block's rows, ascending
              float f[16];
#pragma unroll
              for (int j = 0; j < i; j += 4)
                *reinterpret_cast<float4*>(f + j) = *reinterpret_cast<const float4*>(&sh.a[first + i][first + j]);
#pragma unroll
              for (int j = 0; j < i; ++j) u = fmaf(-(f[j] + 0.0f), w[j], u);
              if (args.us && first + i < last)
                args.us[(int64_t(row + first + i - a) * args.hv + h) * args.dv + c0 + c] = u;
              u = sh.r_k[first + i] * u;
              sh.w[first + i][c] = u;
            }
            w[i] = u + 0.0f;
          }
        }
      }
      __syncthreads();
      if (block > turn) {
        const auto& factors = of_u ? sh.a : sh.p;
#pragma unroll
        for (int j = 16 * turn + tig; j < 16 * turn + 16; j += 8) {
          const float left[4] = {factors[row0][j], factors[row1][j], factors[row0][j + 4], factors[row1][j + 4]};
#pragma unroll
          for (int n = 0; n < kTiles; ++n)
            product(y[n], left, rounded(sh.w[j][8 * n + gid]), rounded(sh.w[j + 4][8 * n + gid]));
        }
      }
    }
    if (!of_u && args.out) {
      const float d0 = sh.decay[row0] * sh.r_q[row0], d1 = sh.decay[row1] * sh.r_q[row1];
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          x[n][m] = fmaf(d0, x[n][m] + 0.0f, y[n][m] + 0.0f);
          x[n][2 + m] = fmaf(d1, x[n][2 + m] + 0.0f, y[n][2 + m] + 0.0f);
        }
      // order: the own block's rows, ascending
#pragma unroll 4
      for (int j = 0; j < 16; ++j) {
        const float p0 = sh.p[row0][first + j] + 0.0f, p1 = sh.p[row1][first + j] + 0.0f;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          const float2 w = *reinterpret_cast<const float2*>(&sh.w[first + j][8 * n + 2 * tig]);
          if (j <= gid) x[n][0] = fmaf(p0, w.x + 0.0f, x[n][0]), x[n][1] = fmaf(p0, w.y + 0.0f, x[n][1]);
          if (j <= gid + 8) x[n][2] = fmaf(p1, w.x + 0.0f, x[n][2]), x[n][3] = fmaf(p1, w.y + 0.0f, x[n][3]);
        }
      }
      T* const out = static_cast<T*>(args.out) + (int64_t(row - a) * args.hv + h) * args.dv + c0;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int i = row0 + 8 * m;
        if (i < a || i >= last) continue;
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          T two[2];
          narrow(two[0], args.scale * x[n][2 * m]);
          narrow(two[1], args.scale * x[n][2 * m + 1]);
          *reinterpret_cast<uint32_t*>(out + int64_t(i) * args.hv * args.dv + 8 * n + 2 * tig) = *reinterpret_cast<uint32_t*>(two);
        }
      }
    }
    if (kept && last < kChunk)
      for (int n = tid; n < (last - a) * COLUMNS; n += kChunkThreads) {
        const int i = a + n / COLUMNS, c = n % COLUMNS;
        open_w[i * w_step + c] = sh.w[i][c];
      }
    const bool more = row + last - a < end;
    if (last == kChunk ? more || into : into && !kept) {
      ended = true;
      __syncthreads();  // the outputs are made: w may become what the state is added
      const float total = sh.g[last - 1];
      for (int n = tid; n < kChunk * COLUMNS; n += kChunkThreads) {
        const int i = n / COLUMNS, c = n % COLUMNS;
        sh.w[i][c] = i < last ? rounded(exp_term(total - sh.g[i]) * sh.w[i][c]) : 0.0f;
      }
      __syncthreads();
      float d[kTiles][4] = {};
      const int r = 16 * warp + gid;
#pragma unroll 4
      for (int j = tig; j < kChunk; j += 8) {
        const float left[4] = {widen(sh.k[j][r]), widen(sh.k[j][r + 8]), widen(sh.k[j + 4][r]), widen(sh.k[j + 4][r + 8])};
#pragma unroll
        for (int n = 0; n < kTiles; ++n) product(d[n], left, sh.w[j][8 * n + gid], sh.w[j + 4][8 * n + gid]);
      }
      const float decay = exp_term(total);
#pragma unroll
      for (int n = 0; n < kTiles; ++n)
#pragma unroll
        for (int m = 0; m < 4; ++m) s[n][m] = fmaf(decay, s[n][m], d[n][m]);
      round_state();
    }
    __syncthreads();
    row += last - a;
    a = 0;
  }
  sm90::let_kernel_after_start();
  if (into && ended) {
#pragma unroll
    for (int n = 0; n < kTiles; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m)
        *reinterpret_cast<float2*>(into + int64_t(16 * warp + gid + 8 * m) * args.dv + 8 * n + 2 * tig) =
            float2{s[n][2 * m], s[n][2 * m + 1]};
  }
#endif
}

}  // namespace delta
}  // namespace vx
