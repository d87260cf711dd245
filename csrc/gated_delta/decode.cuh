// One row of a gated delta net from what its slot remembers, with the bits of the Triton kernels; no torch headers.
//
// A block takes 64 columns of a value head of one sequence: it reads the state once, and of the open chunk the keys and
// the columns' w (w = r u: what u is multiplied by wherever it is used, see op.py), and writes the state only behind a
// chunk's last row. 128 x 128 heads of bf16 take 52 KB of shared memory, so that four blocks run on a multiprocessor
// and one's arithmetic hides behind the others' copies. The keys come first, for the products among keys run while the
// state arrives; w take their place once these are done. So that memory rests at neither wait, blocks may ask the L2 cache
// for what a later sequence's read, as long runs of bytes, and the first ones, which come up while the kernel before still
// runs, for what they read themselves: no bit depends on that.
#pragma once
#include "gated_delta/mma.cuh"

namespace vx {

constexpr int kDecodeColumns = 64, kDecodeThreads = 128;

struct GatedDeltaDecode {
  const void *q, *k, *v;  // (tokens, hk, dk) twice, (tokens, hv, dv), dims contiguous
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const float* g;    // (tokens, hv), as beta
  const void* beta;  // fp32, or as q
  bool wide_beta;
  int64_t g_row, beta_row;
  float* state;  // (slots, hv, dk, dv)
  void* open_k;  // (slots, chunk, hk, dk)
  float *open_w, *open_g;  // (slots, chunk, hv, dv), (slots, chunk, hv)
  int64_t state_slot, k_slot, w_slot, g_slot;  // strides
  const int32_t *slots, *context_lens, *offsets;
  void* out;  // (tokens, hv, dv)
  int sequences, slot_count, tokens, hk, hv, dk, dv;
  int ahead;  // how many sequences later the one is for which the L2 cache is asked, twice as many run at once; 0: it is not
  float scale;
  bool l2norm;
};

namespace delta {

template <class T, int DK>
struct DecodeShared {
  float s[DK][kDecodeColumns];
  union {
    T k[kChunk][DK + 8];  // rows 16 bytes more than a multiple of 128 apart: ldmatrix meets all banks
    float w[kChunk][kDecodeColumns];
  };
  float own[2][DK];  // this row's key and query, and as they came
  T narrow[2][DK];
  float r[2];
  float a[kChunk], p[kChunk], g[kChunk];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

__device__ __forceinline__ void into_l2(const void* from, int64_t bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(uint32_t(bytes)) : "memory");
}
// This block's share of what the blocks of sequence b read of its slot: every so many-th open row of all heads, and as much
// of the state as a block reads. The slot and the length may be those of another call, where what writes them still runs:
// from L2, that no such value stays in L1.
template <class T, int DK>
__device__ __forceinline__ void ask_for(const GatedDeltaDecode& args, int b) {
  if (b >= args.sequences) return;
  const int length = __ldcg(args.context_lens + b), slot = __ldcg(args.slots + b);
  if (length < 1 || slot < 0 || slot >= args.slot_count) return;
  const int64_t k_step = int64_t(args.hk) * DK, w_step = int64_t(args.hv) * args.dv;
  for (int j = blockIdx.x; j < (length - 1) % kChunk; j += gridDim.x) {
    into_l2(static_cast<const T*>(args.open_k) + slot * args.k_slot + j * k_step, k_step * sizeof(T));
    into_l2(args.open_w + slot * args.w_slot + j * w_step, w_step * sizeof(float));
  }
  constexpr int kShare = DK * kDecodeColumns;
  if (length > kChunk)
    into_l2(args.state + slot * args.state_slot + int64_t(blockIdx.x) * kShare, kShare * sizeof(float));
}

// Where column c of row r lies: the four rows of eight columns that a warp reads at once meet 32 banks.
__device__ __forceinline__ int placed(int r, int c) { return c ^ ((r & 3) << 3); }

#endif

template <class T, int DK>
__global__ void __launch_bounds__(kDecodeThreads, DK <= 128 ? 4 : 2) decode_kernel(const GatedDeltaDecode args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<DecodeShared<T, DK>*>(memory);
  constexpr int kColumns = kDecodeColumns, kThreads = kDecodeThreads;
  const int b = blockIdx.y, splits = args.dv / kColumns, h = blockIdx.x / splits, c0 = blockIdx.x % splits * kColumns;
  const int group = args.hv / args.hk, hk = h / group;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, gid = lane / 4, tig = lane % 4;
  if (tid == 0 && b < 2 * args.ahead) ask_for<T, DK>(args, b);
  sm90::wait_for_kernel_before();
  sm90::let_kernel_after_start();
  const int t = args.offsets[b], behind = args.offsets[b + 1], length = args.context_lens[b], slot = args.slots[b];
  if (behind - t != 1 || t < 0 || t >= args.tokens || length < 1 || slot >= args.slot_count) return;
  const bool kept = slot >= 0;  // otherwise the row starts a sequence that nobody goes on with
  const int i = kept ? (length - 1) % kChunk : 0, block = i / 16 * 16;
  const bool appends = kept && i != kChunk - 1;  // a chunk's last row ends it
  const bool fresh = !kept || length <= kChunk;
  const int64_t k_step = int64_t(args.hk) * DK, w_step = int64_t(args.hv) * args.dv;
  T* const open_k = static_cast<T*>(args.open_k) + slot * args.k_slot + hk * DK;
  float* const open_w = args.open_w + slot * args.w_slot + int64_t(h) * args.dv + c0;
  float* const open_g = args.open_g + slot * args.g_slot + h;
  float* const state = args.state + slot * args.state_slot + int64_t(h) * DK * args.dv + c0;
  const T* const q = static_cast<const T*>(args.q) + t * args.q_row + hk * args.q_head;
  const T* const k = static_cast<const T*>(args.k) + t * args.k_row + hk * args.k_head;
  const int c = 16 * warp + gid;  // this thread's columns: c and c + 8

  for (int n = tid; n < i * (DK / 8); n += kThreads) {
    const int j = n / (DK / 8), part = n % (DK / 8) * 8;
    copy16(&sh.k[j][part], open_k + j * k_step + part);
  }
  copies_end();
  if (!fresh) {
#pragma unroll
    for (int n = 0; n < DK * (kColumns / 4) / kThreads; ++n) {
      const int r = (tid + n * kThreads) / (kColumns / 4), part = tid % (kColumns / 4) * 4;
      copy16_once(&sh.s[r][placed(r, part)], state + int64_t(r) * args.dv + part);
    }
  } else {
    for (int n = tid; n < DK * (kColumns / 4); n += kThreads) reinterpret_cast<float4*>(sh.s)[n] = float4{0, 0, 0, 0};
  }
  copies_end();
  const int64_t at = t * args.beta_row + h;
  const float beta = args.wide_beta ? static_cast<const float*>(args.beta)[at] : widen(static_cast<const T*>(args.beta)[at]);
  float v[2];
  {
    const T* const from = static_cast<const T*>(args.v) + t * args.v_row + h * args.v_head + c0 + c;
    v[0] = widen(from[0]), v[1] = widen(from[8]);
  }
  if (warp < 2) {
    const T* const from = warp ? q : k;
    T held[DK / 32];
    float x[DK / 32];
#pragma unroll
    for (int m = 0; m < DK / 32; ++m) x[m] = widen(held[m] = from[lane + 32 * m]);
    const float r = args.l2norm ? norm_factor(x) : 1.0f;
    if (lane == 0) sh.r[warp] = r;
#pragma unroll
    for (int m = 0; m < DK / 32; ++m) {
      const int n = lane + 32 * m;
      sh.own[warp][n] = x[m];
      sh.narrow[warp][n] = held[m];
      if (warp == 0) {
        sh.k[i][n] = held[m];
        if (appends && c0 == 0 && h % group == 0) open_k[i * k_step + n] = held[m];
      }
    }
  } else if (warp == 2) {
    for (int j = lane; j < i; j += 32) sh.g[j] = open_g[int64_t(j) * args.hv];
    const float step = args.g[t * args.g_row + h];
    __syncwarp();
    if (lane == 0) {
      const float g = (i ? sh.g[i - 1] : 0.0f) + step;  // order: a chunk's rows ascending, from +0
      sh.g[i] = g;
      if (appends && c0 == 0) open_g[int64_t(i) * args.hv] = g;
    }
  } else if (lane == 0 && args.ahead && b >= args.ahead) {
    ask_for<T, DK>(args, b + args.ahead);
  }
  copies_wait<1>();
  __syncthreads();

  const float here = sh.g[i], decay = exp_term(here), r_k = sh.r[0], r_q = sh.r[1];
  if (16 * warp <= i) {
    // 16 open rows a warp, times this row's key and query: columns 0 and 1, which the others repeat unread.
    const T* const rows = &sh.k[16 * warp + lane % 16][lane / 16 * 8];
    const T* const own = sh.narrow[gid & 1] + 2 * tig;
    float d[4] = {0, 0, 0, 0};
#pragma unroll
    for (int s = 0; s < DK; s += 16) {
      uint32_t a[4];
      load_matrix(a, rows + s);
      product<T>(d, a, *reinterpret_cast<const uint32_t*>(own + s), *reinterpret_cast<const uint32_t*>(own + s + 8));
    }
    if (tig == 0)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int j = 16 * warp + gid + 8 * m;
        if (j > i) continue;
        const float e = exp_term(here - sh.g[j]);
        sh.a[j] = (beta * r_k) * (e * d[2 * m]);
        sh.p[j] = r_q * (e * d[2 * m + 1]);
      }
  }
  __syncthreads();
  for (int n = tid; n < i * (kColumns / 4); n += kThreads) {
    const int j = n / (kColumns / 4), part = n % (kColumns / 4) * 4;
    copy16_once(&sh.w[j][placed(j, part)], open_w + j * w_step + part);
  }
  copies_end();
  copies_wait<1>();
  __syncthreads();

  // The state's columns and the open rows' are rows of the matrix unit, key and query its columns: what multiplies a
  // key comes out in d[0] and d[2], what multiplies a query in d[1] and d[3], of columns c and c + 8.
  float from_state[4] = {0, 0, 0, 0}, from_rows[4] = {0, 0, 0, 0};
  {
    const float* const own = sh.own[gid & 1];
#pragma unroll
    for (int s = 0; s < DK; s += 8) {
      const int r = s + tig;
      const float a[4] = {rounded(sh.s[r][placed(r, c)]), rounded(sh.s[r][placed(r, c + 8)]),
                          rounded(sh.s[r + 4][placed(r, c)]), rounded(sh.s[r + 4][placed(r, c + 8)])};
      product(from_state, a, own[r], own[r + 4]);
    }
  }
  copies_wait<0>();
  __syncthreads();
  {
    const float* const factors = gid & 1 ? sh.p : sh.a;
    for (int j = tig; j < block; j += 8) {
      const float a[4] = {rounded(sh.w[j][placed(j, c)]), rounded(sh.w[j][placed(j, c + 8)]),
                          rounded(sh.w[j + 4][placed(j, c)]), rounded(sh.w[j + 4][placed(j, c + 8)])};
      product(from_rows, a, rounded(factors[j]), rounded(factors[j + 4]));
    }
  }
  if (tig == 0) {
    T* const out = static_cast<T*>(args.out) + (int64_t(t) * args.hv + h) * args.dv + c0 + c;
    float u[2], o[2];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      // + 0: -0 becomes +0, as where a tile's rows are fetched by sums over selections
      u[m] = (beta * fmaf(-(decay * r_k), from_state[2 * m], v[m]) + 0.0f) - (from_rows[2 * m] + 0.0f);
      o[m] = fmaf(decay * r_q, from_state[2 * m + 1] + 0.0f, from_rows[2 * m + 1] + 0.0f);
    }
    // order: the rows of the own block of 16, ascending
#pragma unroll 4
    for (int j = block; j < i; ++j) {
      const float a = -(sh.a[j] + 0.0f), p = sh.p[j] + 0.0f;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float w = sh.w[j][placed(j, c + 8 * m)] + 0.0f;
        u[m] = fmaf(a, w, u[m]);
        o[m] = fmaf(p, w, o[m]);
      }
    }
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      const float w = r_k * u[m];
      narrow(out[8 * m], args.scale * fmaf(sh.p[i] + 0.0f, w + 0.0f, o[m]));
      if (appends) open_w[i * w_step + c + 8 * m] = w;
      sh.w[i][placed(i, c + 8 * m)] = w;
    }
  }
  if (!kept || i != kChunk - 1) return;

  // The chunk's last row: the state at its end. Keys are read again, for w has taken their place: a thread's dims lie side by
  // side, so that a row's are one load, and its w serve all of them. No sum depends on which of the unit's rows it is.
  __syncthreads();
  constexpr int kSteps = DK <= 128 ? 2 : 4;             // of eight rows, whose keys are loaded at once
  constexpr int kTiles = DK / 64, kDims = 2 * kTiles;  // of 16 dims of a warp's; a thread's: rows gid and gid + 8 of each
  struct alignas(2 * kDims) Dims {
    T x[kDims];
  };
  const int r0 = (8 * warp + gid) * kDims;
  float d[kTiles][kColumns / 8][4] = {};
#pragma unroll 1
  for (int j0 = tig; j0 < kChunk; j0 += 8 * kSteps) {
    Dims keys[kSteps][2];
#pragma unroll
    for (int s = 0; s < kSteps; ++s)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int j = j0 + 8 * s + 4 * m;
        if (j != i)
          keys[s][m] = *reinterpret_cast<const Dims*>(open_k + j * k_step + r0);
        else
#pragma unroll
          for (int n = 0; n < kDims; ++n) keys[s][m].x[n] = k[r0 + n];
      }
#pragma unroll
    for (int s = 0; s < kSteps; ++s) {
      const int j = j0 + 8 * s;
      const float e0 = exp_term(here - sh.g[j]), e1 = exp_term(here - sh.g[j + 4]);
      float a[kTiles][4];
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
#pragma unroll
        for (int m = 0; m < 4; ++m) a[t][m] = widen(keys[s][m / 2].x[2 * t + m % 2]);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const int column = placed(j, 8 * n + gid);
        const float b0 = rounded(e0 * sh.w[j][column]), b1 = rounded(e1 * sh.w[j + 4][column]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) product(d[t][n], a[t], b0, b1);
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t)
#pragma unroll
    for (int n = 0; n < kColumns / 8; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int r = r0 + 2 * t + m, column = 8 * n + 2 * tig;
        const float* const old = &sh.s[r][placed(r, column)];
        const float2 two{fmaf(decay, old[0], d[t][n][2 * m]), fmaf(decay, old[1], d[t][n][2 * m + 1])};
        __stcg(reinterpret_cast<float2*>(state + int64_t(r) * args.dv + column), two);
      }
#endif
}

}  // namespace delta
}  // namespace vx
