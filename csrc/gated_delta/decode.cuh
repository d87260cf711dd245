// One row of a gated delta net from what its slot remembers, with the bits of the Triton kernels; no torch headers.
//
// An item is 64 columns of a value head of one sequence. As many blocks as run at once go through all items: each part of
// an item's memory (the state's columns, the open chunk's keys, the columns' w) is asked for as soon as the item before
// it is done with the room, so that memory never rests, neither for a block's start nor for a wait within an item. w is
// r u: what u is multiplied by wherever it is used, see op.py. The state is written behind a chunk's last row alone.
//
// With STEP a row is read as a layer's projection gives it: a block convolves its own channels of q, k and v, and
// computes its head's gates. The row that it writes into a ring is that of none of the inputs that any block reads.
#pragma once
#include "gated_delta/gates.cuh"

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
  float scale;
  bool l2norm;
};

// What a row of q, k, v and the gates are computed from, where they are no arguments.
struct DeltaStep {
  const void* x;  // (tokens, channels): of q, k and v
  int64_t x_row;
  const void *weight, *bias;  // (channels, 4), (channels,) or null
  void* taps;                 // (slots, ring, channels)
  int64_t taps_slot;
  int ring, channels;
  const void *a, *b;  // (tokens, hv)
  int64_t a_row, b_row;
  const void *a_log, *dt_bias;  // (hv,): fp32, or as x
  bool wide_a_log, wide_dt_bias, doubled;
};

constexpr int kStepTaps = 4;  // of the convolution

namespace delta {

// Channels of a row as a projection gives them, the inputs before them, and the convolution's taps.
template <class T, int N>
struct alignas(16) Window {
  T in[kStepTaps][N];
  uint2 weight[N];
};
template <class T, int DK>
struct StepShared {
  Window<T, DK> k, q;
  Window<T, kDecodeColumns> v;
  uint32_t a, b, a_log, dt_bias;  // fp32, or two heads'
};
struct NoStepShared {};

template <class T, int DK, bool STEP>
struct DecodeShared {
  float s[DK][kDecodeColumns];
  T k[kChunk][DK + 8];  // rows 16 bytes more than a multiple of 128 apart: ldmatrix meets all banks
  float w[kChunk][kDecodeColumns];
  std::conditional_t<STEP, StepShared<T, DK>, NoStepShared> step;
  float own[2][DK];  // this row's key and query, and as they came
  T narrow[2][DK];
  float g[2][kChunk];  // of this item and the next
  float a[kChunk], p[kChunk], v[kDecodeColumns];
  float r[2], beta;
};

// An item's sequence, and which of a sequence's items it is.
struct Place {
  int b, x;
};
// What decides where an item's memory lies, as it is read.
struct RawItem {
  int t, behind, length, slot;
};
struct Item {
  bool there, kept;  // a row of this call; with a slot: otherwise it starts a sequence that nobody goes on with
  bool fresh;        // no state lies before its chunk
  int t, i, slot, position;
  int h, hk, c0;     // value head, key head, first column
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Where column c of row r lies: the four rows of eight columns that a warp reads at once meet 32 banks.
__device__ __forceinline__ int placed(int r, int c) { return c ^ ((r & 3) << 3); }

// A value a head, of either type: the four bytes that it lies in.
template <class T>
__device__ __forceinline__ void copy_head(uint32_t& to, const void* from, int64_t at, bool wide) {
  copy4(&to, static_cast<const char*>(from) + (wide ? at * 4 : at / 2 * 4));
}
template <class T>
__device__ __forceinline__ float of_head(uint32_t two, bool wide, int h) {
  const float2 both = widen_two<T>(two);
  return wide ? __uint_as_float(two) : h % 2 ? both.y : both.x;
}

// By a warp: these channels, as they follow each other.
template <class T, int N>
__device__ __forceinline__ void copy(Window<T, N>& to, const DeltaStep& step, int64_t t, int slot, int position, int channel) {
  constexpr int kEach = 8, kParts = N / kEach;
  const int lane = threadIdx.x % 32;
  const T* const ring = static_cast<const T*>(step.taps) + max(slot, 0) * step.taps_slot + channel;
  const T* const x = static_cast<const T*>(step.x) + t * step.x_row + channel;
#pragma unroll
  for (int n = lane; n < kStepTaps * kParts; n += 32) {
    const int w = n / kParts, part = n % kParts * kEach, at = position - (kStepTaps - 1 - w);
    const T* const from = w == kStepTaps - 1 ? x : ring + int64_t(at & (step.ring - 1)) * step.channels;
    copy16(&to.in[w][part], from + part, w == kStepTaps - 1 || (slot >= 0 && at >= 0));
  }
#pragma unroll
  for (int n = lane; n < N / 2; n += 32) copy16(&to.weight[2 * n], static_cast<const uint2*>(step.weight) + channel + 2 * n);
}

// silu(convolution) of a channel whose inputs are in(0), the oldest, to in(3), rounded; bias(), where there is one.
template <class T, class In, class Bias>
__device__ __forceinline__ T convolved(const uint2& weight, bool biased, const In& in, const Bias& bias) {
  const float2 first = widen_two<T>(weight.x), last = widen_two<T>(weight.y);
  // order: taps from the oldest to the newest, one accumulator
  float acc = fmaf(first.x, widen(in(0)), 0.0f);
  acc = fmaf(first.y, widen(in(1)), acc);
  acc = fmaf(last.x, widen(in(2)), acc);
  acc = fmaf(last.y, widen(in(3)), acc);
  if (biased) acc = acc + widen(bias());
  T y;
  narrow(y, acc * gate_of<false>(acc).s);
  return y;
}

// The same of a lane's channels, 32 from one to the next; keeps the row's inputs where asked to.
template <class T, int N>
__device__ __forceinline__ void convolve(const Window<T, N>& of, const DeltaStep& step, int slot, int position, int channel,
                                         bool keep, T (&y)[N / 32]) {
  const int lane = threadIdx.x % 32;
  T* const ring = static_cast<T*>(step.taps) + max(slot, 0) * step.taps_slot +
                  int64_t(position & (step.ring - 1)) * step.channels + channel;
#pragma unroll
  for (int m = 0; m < N / 32; ++m) {
    const int n = lane + 32 * m;
    y[m] = convolved<T>(
        of.weight[n], step.bias, [&](int w) { return of.in[w][n]; },
        [&] { return static_cast<const T*>(step.bias)[channel + n]; });
    if (keep) ring[n] = of.in[kStepTaps - 1][n];
  }
}

// x / d of an x of which x d is below 2^32.
struct DivideBy {
  uint32_t d, inverse;
  __device__ __forceinline__ explicit DivideBy(uint32_t d) : d(d), inverse(0xffffffffu / d + 1) {}
  __device__ __forceinline__ int operator()(uint32_t x) const { return int(d == 1 ? x : __umulhi(x, inverse)); }
};

__device__ __forceinline__ RawItem read_item(const GatedDeltaDecode& args, const Place& at) {
  if (at.b >= args.sequences) return {0, 0, 0, -1};
  return {args.offsets[at.b], args.offsets[at.b + 1], args.context_lens[at.b], args.slots[at.b]};
}
__device__ __forceinline__ Item settled(const GatedDeltaDecode& args, const RawItem& raw, int x, const DivideBy& splits,
                                        const DivideBy& group) {
  Item to;
  to.there = raw.behind - raw.t == 1 && raw.t >= 0 && raw.t < args.tokens && raw.length >= 1 && raw.slot < args.slot_count;
  to.kept = to.there && raw.slot >= 0;
  to.t = to.there ? raw.t : 0, to.slot = to.kept ? raw.slot : -1;
  to.position = to.there ? raw.length - 1 : 0, to.i = to.kept ? to.position % kChunk : 0;
  to.fresh = !to.kept || raw.length <= kChunk;
  to.h = splits(x), to.hk = group(to.h), to.c0 = (x - to.h * int(splits.d)) * kDecodeColumns;
  return to;
}

#endif

template <class T, int DK>
constexpr int kDecodeBlocks = DK == 64 ? 4 : DK == 128 ? 3 : 1;  // on a multiprocessor

template <class T, int DK, bool STEP>
__global__ void __launch_bounds__(kDecodeThreads, kDecodeBlocks<T, DK>)
    decode_kernel(const GatedDeltaDecode args, const DeltaStep step) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<DecodeShared<T, DK, STEP>*>(memory);
  constexpr int kColumns = kDecodeColumns, kThreads = kDecodeThreads, kOwn = DK / 32;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, gid = lane / 4, tig = lane % 4;
  const DivideBy splits(args.dv / kColumns), group(args.hv / args.hk);
  const int each = args.hv * int(splits.d), step_b = gridDim.x / each, step_x = gridDim.x % each;
  const int64_t k_step = int64_t(args.hk) * DK, w_step = int64_t(args.hv) * args.dv;
  const int c = 16 * warp + 2 * gid;  // this thread's columns: c and c + 1

  // Warp 0 takes the key, 1 the query, 3 the value's columns, and 2 the gates.
  const auto channel_of = [&](const Item& of) {
    return warp == 0 ? int(k_step) + of.hk * DK : warp == 1 ? of.hk * DK : 2 * int(k_step) + of.h * args.dv + of.c0;
  };
  T given[kOwn];
  float gates[2];
  const auto ask_for_row = [&](const Item& of, float* g) {
    if (!of.there) return copies_end();
    if constexpr (STEP) {
      if (warp < 2) {
        copy(warp ? sh.step.q : sh.step.k, step, of.t, of.slot, of.position, channel_of(of));
      } else if (warp == 3) {
        copy(sh.step.v, step, of.t, of.slot, of.position, channel_of(of));
      } else if (lane < 2) {
        copy_head<T>(lane ? sh.step.a : sh.step.b, lane ? step.a : step.b,
                     of.t * (lane ? step.a_row : step.b_row) + of.h, false);
      } else if (lane < 4) {
        const bool log = lane == 2;
        copy_head<T>(log ? sh.step.a_log : sh.step.dt_bias, log ? step.a_log : step.dt_bias, of.h,
                     log ? step.wide_a_log : step.wide_dt_bias);
      }
    } else if (warp == 2) {
      const int64_t at = of.t * args.beta_row + of.h;
      gates[0] = args.g[of.t * args.g_row + of.h];
      gates[1] = args.wide_beta ? static_cast<const float*>(args.beta)[at] : widen(static_cast<const T*>(args.beta)[at]);
    } else {
      const T* const from = warp == 0   ? static_cast<const T*>(args.k) + of.t * args.k_row + of.hk * args.k_head
                            : warp == 1 ? static_cast<const T*>(args.q) + of.t * args.q_row + of.hk * args.q_head
                                        : static_cast<const T*>(args.v) + of.t * args.v_row + of.h * args.v_head + of.c0;
#pragma unroll
      for (int m = 0; m < kOwn; ++m)
        if (warp < 2 || m < kColumns / 32) given[m] = from[lane + 32 * m];
    }
    if (warp == 2) {
      const float* const from = args.open_g + of.slot * args.g_slot + of.h;
      for (int j = lane; j < of.i; j += 32) copy4(&g[j], from + int64_t(j) * args.hv);
    }
    copies_end();
  };
  const auto state_of = [&](const Item& of) {
    return args.state + of.slot * args.state_slot + int64_t(of.h) * DK * args.dv + of.c0;
  };
  const auto ask_for_state = [&](const Item& of) {
    if (of.fresh) {
      for (int n = tid; n < DK * (kColumns / 4); n += kThreads) reinterpret_cast<float4*>(sh.s)[n] = float4{0, 0, 0, 0};
    } else {
      const float* const from = state_of(of) + int64_t(tid / (kColumns / 4)) * args.dv + tid % (kColumns / 4) * 4;
#pragma unroll
      for (int n = 0; n < DK * (kColumns / 4) / kThreads; ++n) {
        const int r = (tid + n * kThreads) / (kColumns / 4), part = tid % (kColumns / 4) * 4;
        copy16_once(&sh.s[r][placed(r, part)], from + int64_t(n) * (kThreads / (kColumns / 4)) * args.dv);
      }
    }
    copies_end();
  };
  const auto ask_for_keys = [&](const Item& of) {
    constexpr int kParts = DK / 8, kRows = 32 / kParts;  // of 16 bytes; rows that a warp copies at once
    static_assert(kRows > 0 && 16 % kRows == 0);
    const int row = 16 * warp + lane / kParts, part = lane % kParts * 8, end = min(of.i, 16 * warp + 16);
    const T* from = static_cast<const T*>(args.open_k) + of.slot * args.k_slot + of.hk * DK + row * k_step + part;
#pragma unroll 4
    for (int j = row; j < end; j += kRows, from += kRows * k_step) copy16(&sh.k[j][part], from);
  };
  const auto ask_for_w = [&](const Item& of) {
    constexpr int kParts = kColumns / 4, kRows = kThreads / kParts;
    static_assert(kRows % 4 == 0);  // so that all of a thread's rows lie alike
    const int part = placed(tid / kParts, tid % kParts * 4);
    const float* from = args.open_w + of.slot * args.w_slot + int64_t(of.h) * args.dv + of.c0 + tid / kParts * w_step +
                        tid % kParts * 4;
#pragma unroll 4
    for (int j = tid / kParts; j < of.i; j += kRows, from += kRows * w_step) copy16_once(&sh.w[j][part], from);
  };

  sm90::wait_for_kernel_before();
  sm90::let_kernel_after_start();
  const auto behind = [&](const Place& at) {
    const Place to{at.b + step_b, at.x + step_x};
    return to.x < each ? to : Place{to.b + 1, to.x - each};
  };
  Place at{int(blockIdx.x) / each, int(blockIdx.x) % each}, later = behind(at);
  Item now = settled(args, read_item(args, at), at.x, splits, group);
  RawItem raw = read_item(args, later);
  // Of copies, which are waited for in the order that they were asked for in, each item has the state's, its row's, the
  // keys' and w's. Between two lines a part of shared memory is read: what follows is asked for behind the second.
  ask_for_state(now);
  ask_for_row(now, sh.g[0]);
  ask_for_keys(now);
  copies_end();
  copies_wait<2>();
  __syncthreads();
  ask_for_w(now);
  copies_end();
  bool late = false;  // the keys were asked for along with w
#pragma unroll 1
  for (int parity = 0; at.b < args.sequences; parity ^= 1) {
    float2 s[DK / 8][2];  // of the state's columns c and c + 1: rows tig and tig + 4 of each eight
    {
      const float* const rows = &sh.s[tig][placed(tig, c)];
#pragma unroll
      for (int n = 0; n < DK / 8; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) s[n][m] = *reinterpret_cast<const float2*>(rows + (8 * n + 4 * m) * kColumns);
    }
    const Item next = settled(args, raw, later.x, splits, group);
    at = later, later = behind(later);
    raw = read_item(args, later);
    __syncthreads();
    ask_for_state(next);
    const int i = now.i, block = i / 16 * 16, h = now.h;
    const bool appends = now.kept && i != kChunk - 1;  // a chunk's last row ends it
    const bool ends = now.kept && !appends;
    const bool first = now.c0 == 0 && h == now.hk * int(group.d);  // of the items that read this key
    float* const g = sh.g[parity];
    copies_wait<3>();
    __syncwarp();
    if (warp < 2) {
      T held[kOwn];
      if constexpr (STEP)
        convolve(warp ? sh.step.q : sh.step.k, step, now.slot, now.position, channel_of(now), now.kept && first, held);
      else
#pragma unroll
        for (int m = 0; m < kOwn; ++m) held[m] = given[m];
      float x[kOwn];
#pragma unroll
      for (int m = 0; m < kOwn; ++m) x[m] = widen(held[m]);
      const float r = args.l2norm ? norm_factor(x) : 1.0f;
      if (lane == 0) sh.r[warp] = r;
      T* const kept_k = static_cast<T*>(args.open_k) + now.slot * args.k_slot + i * k_step + now.hk * DK;
#pragma unroll
      for (int m = 0; m < kOwn; ++m) {
        const int n = lane + 32 * m;
        sh.own[warp][n] = x[m];
        sh.narrow[warp][n] = held[m];
        if (warp == 0) {
          sh.k[i][n] = held[m];
          if (appends && first) kept_k[n] = held[m];
        }
      }
    } else if (warp == 2) {
      float more, beta;
      if constexpr (STEP) {
        more = decay_of(of_head<T>(sh.step.a, false, h), of_head<T>(sh.step.a_log, step.wide_a_log, h),
                        of_head<T>(sh.step.dt_bias, step.wide_dt_bias, h));
        T once;
        narrow(once, gate_of<false>(of_head<T>(sh.step.b, false, h)).s);
        beta = step.doubled ? widen(once) * 2.0f : widen(once);
      } else {
        more = gates[0], beta = gates[1];
      }
      if (lane == 0) {
        const float sum = (i ? g[i - 1] : 0.0f) + more;  // order: a chunk's rows ascending, from +0
        g[i] = sum;
        sh.beta = beta;
        if (appends && now.c0 == 0) args.open_g[now.slot * args.g_slot + int64_t(i) * args.hv + h] = sum;
      }
    } else {
      T v[kColumns / 32];
      if constexpr (STEP)
        convolve(sh.step.v, step, now.slot, now.position, channel_of(now), now.kept, v);
      else
#pragma unroll
        for (int m = 0; m < kColumns / 32; ++m) v[m] = given[m];
#pragma unroll
      for (int m = 0; m < kColumns / 32; ++m) sh.v[lane + 32 * m] = widen(v[m]);
    }
    __syncwarp();
    ask_for_row(next, sh.g[parity ^ 1]);
    __syncthreads();

    const float here = g[i], decay = exp_term(here), r_k = sh.r[0], r_q = sh.r[1], beta = sh.beta;
    // The state's columns and the open rows' are rows of the matrix unit, key and query its columns: what multiplies a
    // key comes out in d[0] and d[2], what multiplies a query in d[1] and d[3], of columns c and c + 1.
    float from_state[4] = {0, 0, 0, 0}, from_rows[4] = {0, 0, 0, 0};
    {
      const float* const own = sh.own[gid & 1] + tig;
#pragma unroll
      for (int n = 0; n < DK / 8; ++n) {
        const float a[4] = {rounded(s[n][0].x), rounded(s[n][0].y), rounded(s[n][1].x), rounded(s[n][1].y)};
        product(from_state, a, own[8 * n], own[8 * n + 4]);
      }
    }
    if (late)
      copies_wait<2>();
    else
      copies_wait<3>();
    __syncwarp();
    if (16 * warp <= i) {
      // 16 open rows a warp, times this row's key and query: columns 0 and 1, which the others repeat unread.
      const T* const rows = &sh.k[16 * warp + lane % 16][lane / 16 * 8];
      const T* const own = sh.narrow[gid & 1] + 2 * tig;
      float d[4] = {0, 0, 0, 0};
#pragma unroll
      for (int n = 0; n < DK; n += 16) {
        uint32_t a[4];
        load_matrix(a, rows + n);
        product<T>(d, a, *reinterpret_cast<const uint32_t*>(own + n), *reinterpret_cast<const uint32_t*>(own + n + 8));
      }
      if (tig == 0)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const int j = 16 * warp + gid + 8 * m;
          if (j > i) continue;
          const float e = exp_term(here - g[j]);
          sh.a[j] = (beta * r_k) * (e * d[2 * m]);
          sh.p[j] = r_q * (e * d[2 * m + 1]);
        }
    }
    __syncwarp();
    if (!ends) ask_for_keys(next);
    copies_end();
    copies_wait<3>();
    __syncthreads();
    {
      const float* const factors = (gid & 1 ? sh.p : sh.a) + tig;
      const float* const rows = &sh.w[tig][placed(tig, c)];
      for (int j = 0; j < block; j += 8) {
        const float2 x = *reinterpret_cast<const float2*>(rows + j * kColumns);
        const float2 y = *reinterpret_cast<const float2*>(rows + (j + 4) * kColumns);
        const float a[4] = {rounded(x.x), rounded(x.y), rounded(y.x), rounded(y.y)};
        product(from_rows, a, rounded(factors[j]), rounded(factors[j + 4]));
      }
    }
    if (tig == 0) {
      float u[2], o[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        // + 0: -0 becomes +0, as where a tile's rows are fetched by sums over selections
        u[m] = (beta * fmaf(-(decay * r_k), from_state[2 * m], sh.v[c + m]) + 0.0f) - (from_rows[2 * m] + 0.0f);
        o[m] = fmaf(decay * r_q, from_state[2 * m + 1] + 0.0f, from_rows[2 * m + 1] + 0.0f);
      }
      // order: the rows of the own block of 16, ascending
#pragma unroll 4
      for (int j = block; j < i; ++j) {
        const float a = -(sh.a[j] + 0.0f), p = sh.p[j] + 0.0f;
        const float2 w = *reinterpret_cast<const float2*>(&sh.w[j][placed(j, c)]);
        u[0] = fmaf(a, w.x + 0.0f, u[0]), u[1] = fmaf(a, w.y + 0.0f, u[1]);
        o[0] = fmaf(p, w.x + 0.0f, o[0]), o[1] = fmaf(p, w.y + 0.0f, o[1]);
      }
      T* const out = static_cast<T*>(args.out) + (int64_t(now.t) * args.hv + h) * args.dv + now.c0 + c;
      float* const kept_w = args.open_w + now.slot * args.w_slot + i * w_step + int64_t(h) * args.dv + now.c0 + c;
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const float w = r_k * u[m];
        if (now.there) narrow(out[m], args.scale * fmaf(sh.p[i] + 0.0f, w + 0.0f, o[m]));
        if (appends) kept_w[m] = w;
        if (ends) sh.w[i][placed(i, c + m)] = w;
      }
    }
    copies_wait<2>();
    __syncthreads();
    late = ends;
    if (ends) {
      // The state at the chunk's end, of 32 rows at a time. The unit's columns are put so that a thread is given those that
      // it holds of the old one; no sum depends on which of the unit's rows or columns it is.
      for (int n = tid; n < kChunk * kColumns / 4; n += kThreads) {
        const float e = exp_term(here - g[n / (kColumns / 4)]);
        float4& w = reinterpret_cast<float4*>(sh.w)[n];
        w = float4{rounded(e * w.x), rounded(e * w.y), rounded(e * w.z), rounded(e * w.w)};
      }
      __syncthreads();
      constexpr int kAtOnce = 4;
      const T* const keys = &sh.k[tig][gid / 2 + 4 * (gid % 2)];
      const float* const rows = &sh.w[tig][placed(tig, c)];
      float* const state = state_of(now) + int64_t(tig) * args.dv + c;
#pragma unroll
      for (int n0 = 0; n0 < DK; n0 += 8 * kAtOnce) {
        float d[kAtOnce][4] = {};
#pragma unroll 2
        for (int j = 0; j < kChunk; j += 8) {
          const float2 x = *reinterpret_cast<const float2*>(rows + j * kColumns);
          const float2 y = *reinterpret_cast<const float2*>(rows + (j + 4) * kColumns);
          const float a[4] = {x.x, x.y, y.x, y.y};
#pragma unroll
          for (int n = 0; n < kAtOnce; ++n) {
            const T* const key = keys + j * (DK + 8) + n0 + 8 * n;
            product(d[n], a, widen(key[0]), widen(key[4 * (DK + 8)]));
          }
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const int r = n0 + 8 * n + 4 * m;
            const float2 old = s[n0 / 8 + n][m];
            const float2 two{fmaf(decay, old.x, d[n][m]), fmaf(decay, old.y, d[n][2 + m])};
            __stcg(reinterpret_cast<float2*>(state + int64_t(r) * args.dv), two);
          }
      }
      __syncthreads();
      ask_for_keys(next);
    }
    ask_for_w(next);
    copies_end();
    now = next;
  }
#endif
}

}  // namespace delta
}  // namespace vx
