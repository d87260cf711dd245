// The kernel of decode.cuh for few rows, which wait for memory alone: a block has one item, and asks for all that it reads
// before it waits for any of it; no torch headers.
//
// A warp has 16 columns of the state in registers, as the matrix unit takes them, and what it multiplies them by lies in
// shared memory by then: the key, the query, the gates, which four more warps make ready before they multiply 16 open rows
// each. Two barriers are all: behind the row's key and query, and behind the open rows' factors. No sum depends on which
// of eight or sixteen of K is whose, or on where an operand was before.
//
// With EARLY a block has what it is likely to read fetched into the L2 cache while the kernel before still runs.
#pragma once
#include "gated_delta/decode.cuh"

namespace vx {

constexpr int kSmallDepth = 128;  // of keys and values

namespace delta {

constexpr int kKeyWarps = kChunk / 16;
constexpr int kSmallThreads = 32 * (kDecodeColumns / 16 + kKeyWarps);

template <class T, int DK>
struct SmallShared {
  T narrow[2][DK + 8];  // this row's key and query, as they came
  float a[kChunk], p[kChunk];
  float r[2], here, beta;
  // at a chunk's end alone
  T k[kChunk][DK + 8];
  float g[kChunk];
  float w[kDecodeColumns / 16][16][16];
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// Inputs of N channels of a lane, 32 from one to the next, and the taps that they are convolved with.
template <class T, int N>
struct LaneWindow {
  T in[kStepTaps][N], bias[N];
  uint2 weight[N];

  __device__ __forceinline__ void ask(const DeltaStep& step, const Item& of, int channel) {
    const T* const ring = static_cast<const T*>(step.taps) + max(of.slot, 0) * step.taps_slot + channel;
    const T* const x = static_cast<const T*>(step.x) + of.t * step.x_row + channel;
#pragma unroll
    for (int w = 0; w < kStepTaps - 1; ++w) {
      const int at = of.position - (kStepTaps - 1 - w);
      const T* const from = ring + int64_t(at & (step.ring - 1)) * step.channels;
#pragma unroll
      for (int m = 0; m < N; ++m) {
        narrow(in[w][m], 0.0f);
        if (of.slot >= 0 && at >= 0) in[w][m] = from[32 * m];
      }
    }
#pragma unroll
    for (int m = 0; m < N; ++m) {
      in[kStepTaps - 1][m] = x[32 * m];
      weight[m] = __ldg(static_cast<const uint2*>(step.weight) + channel + 32 * m);
      if (step.bias) bias[m] = static_cast<const T*>(step.bias)[channel + 32 * m];
    }
  }
  __device__ __forceinline__ void convolve(const DeltaStep& step, T (&y)[N]) const {
#pragma unroll
    for (int m = 0; m < N; ++m)
      y[m] = convolved<T>(weight[m], step.bias, [&](int w) { return in[w][m]; }, [&] { return bias[m]; });
  }
  __device__ __forceinline__ void keep(const DeltaStep& step, const Item& of, int channel) const {
    T* const ring = static_cast<T*>(step.taps) + of.slot * step.taps_slot +
                    int64_t(of.position & (step.ring - 1)) * step.channels + channel;
#pragma unroll
    for (int m = 0; m < N; ++m) ring[32 * m] = in[kStepTaps - 1][m];
  }
};
struct NoWindow {};

#endif

template <class T, int DK, int DV, bool STEP, bool EARLY>
__global__ void __launch_bounds__(kSmallThreads)
    small_decode_kernel(const GatedDeltaDecode args, const DeltaStep step) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<SmallShared<T, DK>*>(memory);
  constexpr int kGroups = kDecodeColumns / 16, kThreads = kSmallThreads, kOwn = DK / 32, kSplits = DV / kDecodeColumns;
  const unsigned tid = threadIdx.x;
  const int warp = __shfl_sync(0xffffffffu, tid / 32, 0), lane = tid % 32, gid = lane >> 2, tig = lane & 3;
  // A block: of a sequence (z) and a key's head (y), columns of one of its value heads.
  const int b = blockIdx.z, hk = blockIdx.y, c0 = blockIdx.x % kSplits * kDecodeColumns;
  const int h = hk * (gridDim.x / kSplits) + blockIdx.x / kSplits;
  const bool first = blockIdx.x == 0;     // of the items that read this key
  const int row = 16 * (warp - kGroups);  // of a warp of keys: the first of its open rows
  const auto known = [&](const RawItem& raw) { return unsigned(raw.slot) < unsigned(args.slot_count) && raw.length >= 1; };
  if constexpr (EARLY) {
    // The kernel before may be writing these two, so that they may be of another call, or of none. Nothing that is read so
    // gets a value here, all of it is read again below; and whatever they are, all addresses are of these tensors: known()
    // leaves slots from 0 to slot_count - 1, j stays below kChunk, and the rest is this block's and this thread's.
    const RawItem raw{0, 1, hint(args.context_lens + b), hint(args.slots + b)};
    if (known(raw)) {
      const int i = (raw.length - 1) % kChunk;
      if (warp < kGroups) {
        if (raw.length > kChunk) {
          const float* const from = args.state + raw.slot * args.state_slot + int64_t(h) * DK * DV + c0 + 16 * warp +
                                    lane / 2 * DV + lane % 2 * 8;
#pragma unroll
          for (int n = 0; n < DK; n += 16) into_l2(from + n * DV);
        }
        const int64_t w_step = int64_t(args.hv) * DV;
        const float* const from =
            args.open_w + raw.slot * args.w_slot + h * DV + c0 + 16 * warp + lane / 2 * w_step + lane % 2 * 8;
#pragma unroll
        for (int j = 0; j < kChunk; j += 16)
          if (j + lane / 2 < i) into_l2(from + j * w_step);
      } else {
        constexpr int kParts = DK / 16;  // of 32 bytes
        const int64_t k_step = int64_t(args.hk) * DK;
        const T* const from =
            static_cast<const T*>(args.open_k) + raw.slot * args.k_slot + hk * DK + row * k_step + lane % kParts * 16;
#pragma unroll
        for (int j = lane / kParts; j < 16; j += 32 / kParts)
          if (row + j < i) into_l2(from + j * k_step);
      }
    }
  }
  sm90::wait_for_kernel_before();
  const RawItem raw{args.offsets[b], args.offsets[b + 1], args.context_lens[b], args.slots[b]};
  sm90::let_kernel_after_start();
  // Where all of it lies in the first slot, and of the call's first row, while that is on its way.
  const int64_t k_step = int64_t(args.hk) * DK, w_step = int64_t(args.hv) * DV;
  const int mine = 2 * gid + (tig & 1);  // of a warp's 16 columns the one that a thread ends with
  const int column = h * DV + c0 + 16 * warp;
  float* const states = args.state + int64_t(h) * DK * DV + c0 + 16 * warp + 2 * tig * DV + 2 * gid;
  const float* const ws = args.open_w + column;
  const T* const all_keys = static_cast<const T*>(args.open_k) + hk * DK + (row + gid) * k_step + 4 * tig;
  const float* const sums = args.open_g + (row + gid) * args.hv + h;
  Item of;
  const bool goes_on = known(raw);
  const int i = goes_on ? unsigned(raw.length - 1) % kChunk : 0, block = i & ~15, slot = raw.slot;
  of.fresh = !goes_on || raw.length <= kChunk;
  of.there = raw.behind - raw.t == 1 && raw.t >= 0 && raw.t < args.tokens && raw.length >= 1 && raw.slot < args.slot_count;
  of.kept = of.there && raw.slot >= 0;
  of.t = of.there ? raw.t : 0, of.slot = of.kept ? raw.slot : -1, of.position = of.there ? raw.length - 1 : 0;
  const bool appends = of.kept && i != kChunk - 1;  // a chunk's last row ends it
  const bool ends = of.kept && !appends;

  if (warp >= kGroups) {
    const int kind = warp - kGroups;  // warp 0 of these takes the key, 1 the query, 2 the gates
    T held[kOwn];
    std::conditional_t<STEP, LaneWindow<T, kOwn>, NoWindow> window;
    const int channel = (kind ? 0 : int(k_step)) + hk * DK + lane;
    float gates[4], sum_before = 0.0f;
    if (kind < 2) {
      if constexpr (STEP) {
        window.ask(step, of, channel);
      } else {
        const T* const from = lane + (kind ? static_cast<const T*>(args.q) + of.t * args.q_row + hk * args.q_head
                                           : static_cast<const T*>(args.k) + of.t * args.k_row + hk * args.k_head);
#pragma unroll
        for (int m = 0; m < kOwn; ++m) held[m] = from[32 * m];
      }
    } else if (kind == 2) {
      const auto value = [&](const void* from, bool wide, int64_t at) {
        return wide ? static_cast<const float*>(from)[at] : widen(static_cast<const T*>(from)[at]);
      };
      if constexpr (STEP) {
        gates[0] = value(step.a, false, of.t * step.a_row + h), gates[1] = value(step.b, false, of.t * step.b_row + h);
        gates[2] = value(step.a_log, step.wide_a_log, h), gates[3] = value(step.dt_bias, step.wide_dt_bias, h);
      } else {
        gates[0] = args.g[of.t * args.g_row + h];
        gates[1] = value(args.beta, args.wide_beta, of.t * args.beta_row + h);
      }
      if (i) sum_before = args.open_g[slot * args.g_slot + int64_t(i - 1) * args.hv + h];
    }
    // Open rows as the matrix unit takes them, but for the order of each sixteen: of row `gid` and of row `gid + 8`.
    uint2 keys[DK / 16][2];
    float g[2];
    {
      const T* const from = as_it_is(all_keys + slot * args.k_slot);
      const float* const from_g = as_it_is(sums + slot * args.g_slot);
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (row + gid + 8 * m < i) {
          const T* const from_row = m ? as_it_is(from + 8 * k_step) : from;
#pragma unroll
          for (int n = 0; n < DK / 16; ++n) keys[n][m] = load_four(from_row + 16 * n);
          g[m] = load_one(from_g + 8 * m * args.hv);
        } else {
#pragma unroll
          for (int n = 0; n < DK / 16; ++n) keys[n][m] = uint2{0, 0};
          g[m] = 0;
        }
      }
    }
    if (kind < 2) {
      if constexpr (STEP) {
        window.convolve(step, held);
        if (of.kept && first) window.keep(step, of, channel);
      }
      float x[kOwn];
#pragma unroll
      for (int m = 0; m < kOwn; ++m) x[m] = widen(held[m]), sh.narrow[kind][lane + 32 * m] = held[m];
      const float r = args.l2norm ? norm_factor(x) : 1.0f;
      if (lane == 0) sh.r[kind] = r;
      if (kind == 0 && appends && first) {
        T* const kept = static_cast<T*>(args.open_k) + of.slot * args.k_slot + i * k_step + hk * DK + lane;
#pragma unroll
        for (int m = 0; m < kOwn; ++m) kept[32 * m] = held[m];
      }
    } else if (kind == 2) {
      float more = gates[0], beta = gates[1];
      if constexpr (STEP) {
        more = decay_of(gates[0], gates[2], gates[3]);
        T once;
        narrow(once, gate_of<false>(gates[1]).s);
        beta = step.doubled ? widen(once) * 2.0f : widen(once);
      }
      if (lane == 0) {
        const float sum = sum_before + more;  // order: a chunk's rows ascending, from +0
        sh.here = sum;
        sh.beta = beta;
        if (appends && c0 == 0) args.open_g[of.slot * args.g_slot + int64_t(i) * args.hv + h] = sum;
      }
    }
    __syncthreads();
    if (row <= i) {
      const float here = sh.here;
      if (row == block && gid == (i & 7))  // this row's own key
#pragma unroll
        for (int n = 0; n < DK / 16; ++n) {
          const uint2 own = *reinterpret_cast<const uint2*>(&sh.narrow[0][16 * n + 4 * tig]);
          if ((i & 8) == 0)
            keys[n][0] = own;
          else
            keys[n][1] = own;
        }
      const T* const own = &sh.narrow[gid & 1][4 * tig];
      float d[4] = {0, 0, 0, 0};
#pragma unroll
      for (int n = 0; n < DK / 16; ++n) {
        const uint32_t a[4] = {keys[n][0].x, keys[n][1].x, keys[n][0].y, keys[n][1].y};
        const uint2 two = *reinterpret_cast<const uint2*>(own + 16 * n);
        product<T>(d, a, two.x, two.y);
      }
      // A thread has what a row's key is multiplied by, of this row's key or of its query.
      const int m = tig & 1, j = row + gid + 8 * m;
      const bool of_query = tig & 2;
      const float x = m ? of_query ? d[3] : d[2] : of_query ? d[1] : d[0], sum = j == i ? here : m ? g[1] : g[0];
      if (j <= i) {
        const float e = exp_term(here - sum), factor = of_query ? sh.r[1] : sh.beta * sh.r[0];
        (of_query ? sh.p : sh.a)[j] = factor * (e * x);
      }
      if (ends) {
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          if (tig == 0) sh.g[row + gid + 8 * m] = row + gid + 8 * m == i ? here : g[m];
#pragma unroll
          for (int n = 0; n < DK / 16; ++n)
            *reinterpret_cast<uint2*>(&sh.k[row + gid + 8 * m][16 * n + 4 * tig]) = keys[n][m];
        }
      }
    }
    arrive_at(1, kThreads);
    return;
  }

  // 16 columns: the unit's rows gid and gid + 8 are columns 2 gid and the next; of eight of K, a thread has 2 tig and the
  // next.
  const bool of_query = tig & 2;  // what a thread ends with: its column of u, or of o
  const int channel = 2 * int(k_step) + column + mine;
  std::conditional_t<STEP, LaneWindow<T, 1>, NoWindow> window;
  T value[1];
  if constexpr (STEP)
    window.ask(step, of, channel);
  else
    value[0] = (static_cast<const T*>(args.v) + of.t * args.v_row + h * args.v_head + c0 + 16 * warp)[mine];
  float2 s[DK / 8][2];
  if (of.fresh) {
#pragma unroll
    for (int n = 0; n < DK / 8; ++n) s[n][0] = s[n][1] = float2{0, 0};
  } else {
    const float* const from = as_it_is(states + slot * args.state_slot);
#pragma unroll
    for (int n = 0; n < DK / 8; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m) s[n][m] = load_two(from + (8 * n + m) * DV);
  }
  float2 before[kChunk / 8 - 2][2];  // w of the blocks before this row's
  float own_w[15];                   // and of its own
  {
    const float* from = ws + slot * args.w_slot + 2 * tig * w_step + 2 * gid;
#pragma unroll
    for (int n = 0; n < kChunk / 8 - 2; n += 2)
      if (8 * n < block) {
#pragma unroll
        for (int m = 0; m < 4; ++m) {
          before[n + m / 2][m % 2] = load_two(from);
          from = as_it_is(from + (m % 2 ? 7 : 1) * w_step);
        }
      }
    from = ws + slot * args.w_slot + block * w_step + mine;
#pragma unroll
    for (int j = 0; j < 15; ++j, from = as_it_is(from + w_step))
      if (j < (i & 15)) own_w[j] = load_one(from);
  }
  if constexpr (STEP) {
    window.convolve(step, value);
    if (of.kept && !of_query) window.keep(step, of, channel);
  }
  const float v = widen(value[0]);
  __syncthreads();
  const float here = sh.here, decay = exp_term(here), r_k = sh.r[0], r_q = sh.r[1], beta = sh.beta;
  // What multiplies the key comes out in d[0] and d[2], what multiplies the query in d[1] and d[3].
  float from_state[4] = {0, 0, 0, 0}, from_rows[4] = {0, 0, 0, 0};
  {
    const T* const own = &sh.narrow[gid & 1][2 * tig];
#pragma unroll
    for (int n = 0; n < DK / 8; ++n) {
      const float a[4] = {rounded_operand(s[n][0].x), rounded_operand(s[n][0].y), rounded_operand(s[n][1].x),
                          rounded_operand(s[n][1].y)};
      const float2 two = widen_two<T>(*reinterpret_cast<const uint32_t*>(own + 8 * n));
      product(from_state, a, two.x, two.y);
    }
  }
  wait_at(1, kThreads);
  {
    const float* const factors = (gid & 1 ? sh.p : sh.a) + 2 * tig;
#pragma unroll
    for (int n = 0; n < kChunk / 8 - 2; ++n)
      if (8 * n < block) {
        const float a[4] = {rounded_operand(before[n][0].x), rounded_operand(before[n][0].y),
                            rounded_operand(before[n][1].x), rounded_operand(before[n][1].y)};
        const float2 two = *reinterpret_cast<const float2*>(factors + 8 * n);
        product(from_rows, a, rounded_operand(two.x), rounded_operand(two.y));
      }
  }
  const bool odd = tig & 1;
  const float state_k = odd ? from_state[2] : from_state[0], state_q = odd ? from_state[3] : from_state[1];
  const float rows_k = odd ? from_rows[2] : from_rows[0], rows_q = odd ? from_rows[3] : from_rows[1];
  // + 0: -0 becomes +0, as where a tile's rows are fetched by sums over selections
  const float u = (beta * fmaf(-(decay * r_k), state_k, v) + 0.0f) - (rows_k + 0.0f);
  const float o = fmaf(decay * r_q, state_q + 0.0f, rows_q + 0.0f);
  float sum = of_query ? o : u;
  {
    float factors[16];
#pragma unroll
    for (int j = 0; j < 16; j += 4)
      *reinterpret_cast<float4*>(factors + j) = *reinterpret_cast<const float4*>((of_query ? sh.p : sh.a) + block + j);
    // order: the rows of the own block of 16, ascending
#pragma unroll
    for (int j = 0; j < 15; ++j)
      if (j < (i & 15)) sum = fmaf(of_query ? factors[j] + 0.0f : -(factors[j] + 0.0f), own_w[j] + 0.0f, sum);
  }
  const float other = __shfl_xor_sync(0xffffffffu, r_k * sum, 2), w = of_query ? other : r_k * sum;
  if (of_query) {
    T* const out = static_cast<T*>(args.out) + int64_t(of.t) * args.hv * DV + column + mine;
    if (of.there) narrow(*out, args.scale * fmaf(sh.p[i] + 0.0f, w + 0.0f, sum));
  } else if (appends) {
    args.open_w[of.slot * args.w_slot + i * w_step + column + mine] = w;
  }
  if (ends) {
    // The state at the chunk's end, of 32 rows at a time; a thread is given those that it holds of the old one.
    if (!of_query) {
#pragma unroll
      for (int j = 0; j < 15; ++j) sh.w[warp][j][mine] = own_w[j];
      sh.w[warp][15][mine] = w;
    }
    __syncwarp();
    float rows[kChunk / 8][4];
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n)
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int j = 8 * n + 2 * tig + m;
        const float e = exp_term(here - sh.g[j]);
        const float2 x = n < kChunk / 8 - 2 ? before[n][m] : *reinterpret_cast<const float2*>(&sh.w[warp][j - 48][2 * gid]);
        rows[n][2 * m] = rounded_operand(e * x.x), rows[n][2 * m + 1] = rounded_operand(e * x.y);
      }
    constexpr int kAtOnce = 4;
    const T* const keys = &sh.k[2 * tig][gid];
    float* const state = states + slot * args.state_slot;
#pragma unroll
    for (int n0 = 0; n0 < DK / 8; n0 += kAtOnce) {
      float d[kAtOnce][4] = {};
#pragma unroll
      for (int j = 0; j < kChunk / 8; ++j)
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const T* const key = keys + 8 * j * (DK + 8) + 8 * (n0 + n);
          product(d[n], rows[j], widen(key[0]), widen(key[DK + 8]));
        }
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
        for (int m = 0; m < 2; ++m) {
          const float2 old = s[n0 + n][m];
          const float2 two{fmaf(decay, old.x, d[n][m]), fmaf(decay, old.y, d[n][2 + m])};
          __stcg(reinterpret_cast<float2*>(state + (8 * (n0 + n) + m) * DV), two);
        }
    }
  }
#endif
}

}  // namespace delta
}  // namespace vx
