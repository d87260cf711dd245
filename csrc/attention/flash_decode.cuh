// Decode: one query of each sequence, its heads that share keys together in the sixteen rows of a tile. Four warps
// share the work of a block: each scores a quarter of the keys, then multiplies all of them with a quarter of the
// columns of V. The order of flash.cuh holds for every row and column, whoever computes it. Where pages and blocks of
// keys fit each other there is flash_stream.cuh.
#pragma once
#include "attention/flash.cuh"
#include "common/sm90.cuh"

namespace vx::flash {

constexpr int kDecodeThreads = 128, kDecodeRows = 16;
constexpr int kMostSplit = 512;  // sequences of a call whose segments are items of their own

// What a sequence's one query sees: keys of [lo, hi).
struct Sight {
  int token, lo, hi;
  __device__ __forceinline__ Sight(const Args& a, int sequence) {
    const Extent queries = extent(a.q_at, sequence, a.tokens);
    token = queries.length == 1 ? queries.begin : -1;
    hi = max(min(a.k_at[sequence], a.keys), 0);
    lo = a.window ? max(hi - a.window, 0) : 0;
  }
  __device__ __forceinline__ int first_segment(int segment) const { return lo / segment; }
  __device__ __forceinline__ int segments(int segment) const {
    return token < 0 || hi == 0 ? 0 : (hi - 1) / segment - first_segment(segment) + 1;
  }
};

__device__ __forceinline__ int32_t* ready_at(const Args& a, int sequence, int split, int row_tile, int head) {
  const int row_tiles = (a.group + kDecodeRows - 1) / kDecodeRows;
  return a.ready + ((int64_t(sequence) * a.segments + split) * row_tiles + row_tile) * a.hk + head;
}

template <int D, int DV, int SLOTS>
struct DecodeShared {
  static constexpr int kKeys = keys_of(D);
  static constexpr int kSlot = kKeys * (D > DV ? D : DV) * 2;
  alignas(1024) uint8_t slots[SLOTS][kSlot];
  alignas(16) uint8_t p[kDecodeRows][kKeys * 2 + 16];  // probabilities as the product with V takes them
  alignas(16) float sums[kDecodeRows][kKeys + 4];      // and as the sums take them
  int2 places[2][kKeys];
  float top[4][kDecodeRows], kept[kDecodeRows], total[kDecodeRows];
  uint64_t full[SLOTS];
  int until[kMostSplit];  // segments of the sequences up to each, where segments are items
};

// Loads alternate between K and V of the blocks of an item, `SLOTS` in flight; counted over the items of a thread block
// so that slots and phases go on.
template <class T, int D, int DV, int SLOTS>
__global__ void __launch_bounds__(kDecodeThreads) decode_kernel(const Args a) {
#ifdef VX_FLASH_DEVICE
  static_assert(SLOTS % 2 == 1);
  constexpr int kAhead = (SLOTS - 1) / 2;  // blocks
  constexpr int kKeys = keys_of(D), kEach = kKeys / 4;  // of a block, and of a warp
  constexpr int kTiles = DV / 32;          // columns of a warp, in eights
  extern __shared__ __align__(1024) uint8_t raw[];
  auto& s = *reinterpret_cast<DecodeShared<D, DV, SLOTS>*>(raw);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  const int row_tiles = (a.group + kDecodeRows - 1) / kDecodeRows;
  if (tid < SLOTS) barrier_init(shared_address(&s.full[tid]), kDecodeThreads);
  __syncthreads();

  int items = a.sequences;
  if (a.partial) {  // every block finds the segments there are for itself
    int mine[kMostSplit / kDecodeThreads], sum = 0;
#pragma unroll
    for (int i = 0; i < kMostSplit / kDecodeThreads; ++i) {
      const int sequence = tid * (kMostSplit / kDecodeThreads) + i;
      sum += sequence < a.sequences ? Sight(a, sequence).segments(a.segment) : 0;
      mine[i] = sum;
    }
    int before = sum;
    for (int d = 1; d < 32; d *= 2) {
      const int x = __shfl_up_sync(0xffffffffu, before, d);
      before += lane >= d ? x : 0;
    }
    if (lane == 31) s.until[warp] = before;
    __syncthreads();
    int warps = 0;
    for (int w = 0; w < warp; ++w) warps += s.until[w];
    items = s.until[0] + s.until[1] + s.until[2] + s.until[3];
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kMostSplit / kDecodeThreads; ++i)
      s.until[tid * (kMostSplit / kDecodeThreads) + i] = warps + before - sum + mine[i];
  }
  __syncthreads();

  uint32_t unit0 = 0;  // units loaded by earlier items
  const int heads = a.hk * row_tiles;
  for (int64_t item = blockIdx.x; item < int64_t(items) * heads; item += gridDim.x) {
    const int which = int(item / heads), head = int(item % heads) % a.hk, row_tile = int(item % heads) / a.hk;
    int sequence = which, split = 0;
    if (a.partial) {
      sequence = 0;
      for (int step = kMostSplit / 2; step; step /= 2)
        if (s.until[sequence + step - 1] <= which) sequence += step;
    }
    const Sight sight(a, sequence);
    if (sight.token < 0) continue;
    int lo = sight.lo, hi = sight.hi;
    if (a.partial) {
      split = which - (sequence ? s.until[sequence - 1] : 0) + sight.first_segment(a.segment);
      lo = max(lo, split * a.segment), hi = min(hi, (split + 1) * a.segment);
    }
    const int first = lo / kKeys, last = (hi - 1) / kKeys, blocks = hi > lo ? last - first + 1 : 0;
    const T* k = static_cast<const T*>(a.k) + head * a.k_head;
    const T* v = static_cast<const T*>(a.v) + head * a.v_head;

    // where this thread's key of block last - n lies
    auto look_up = [&](int n) -> int2 {
      return locate(a, sequence, 0, (last - n) * kKeys + tid, lo, hi);
    };
    auto note = [&](int n, int2 at) {
      if (tid < kKeys) s.places[n & 1][tid] = at;
    };
    auto issue = [&](int n) {  // K and V of block last - n
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t slot = (unit0 + 2 * n + half) % SLOTS, bar = shared_address(&s.full[slot]);
        const uint32_t to = shared_address(s.slots[slot]);
        if (half == 0)
          load_block<D, kKeys, kDecodeThreads>(to, k, a.k_page, a.k_row, s.places[n & 1]);
        else
          load_block<DV, kKeys, kDecodeThreads>(to, v, a.v_page, a.v_row, s.places[n & 1]);
        arrive_when_copied(bar);
      }
    };

    __syncthreads();  // the item before is done with everything shared
    for (int n = 0; n < kAhead; ++n) {
      if (n < blocks) note(n, look_up(n));
      __syncthreads();
      if (n < blocks) issue(n);
    }
    int2 next{-1, 0};
    if (kAhead < blocks) note(kAhead, look_up(kAhead));  // seen after the barrier in the first block
    if (kAhead + 1 < blocks) next = look_up(kAhead + 1);

    // the query's fragments; rows beyond the group are zeros, and nothing of theirs is stored
    uint32_t qf[D / 16][4];
    const int row0 = row_tile * kDecodeRows + g;
    const char* q = static_cast<const char*>(a.q) + (int64_t(sight.token) * a.q_row + int64_t(head * a.group) * a.q_head) * 2;
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row0 + (i & 1) * 8, d = kk * 16 + (i >> 1) * 8 + t * 2;
        qf[kk][i] = row < a.group ? *reinterpret_cast<const uint32_t*>(q + (row * a.q_head + d) * 2) : 0u;
      }

    float m[2] = {-INFINITY, -INFINITY};
    float acc[kTiles][4] = {};
    float l = 0.f;  // the partial sum t of row sum_row; the upper lanes repeat the lower ones
    const int sum_row = (warp + 4 * g) % kDecodeRows;
    float high[2] = {-INFINITY, -INFINITY}, all[2] = {0.f, 0.f}, out[kTiles][4] = {};  // of segments that are done

    for (int n = 0; n < blocks; ++n) {  // order: blocks of keys from the last to the first
      const int key0 = (last - n) * kKeys;
      const uint32_t k_unit = unit0 + 2 * n, v_unit = k_unit + 1;

      barrier_wait(shared_address(&s.full[k_unit % SLOTS]), (k_unit / SLOTS) & 1);
      float c[kEach / 8][4] = {};
      {
        const uint32_t base = shared_address(s.slots[k_unit % SLOTS]);
#pragma unroll
        for (int kk = 0; kk < D / 32; ++kk)  // order: D ascending
#pragma unroll
          for (int j = 0; j < kEach / 8; ++j) {
            uint32_t b[4];
            ldmatrix4(b, base + chunk_at<D, kKeys>(warp * kEach + j * 8 + lane % 8, kk * 4 + lane / 8));
            mma<T>(c[j], qf[2 * kk], b[0], b[1]);
            mma<T>(c[j], qf[2 * kk + 1], b[2], b[3]);
          }
      }
      if (key0 < lo || key0 + kKeys > hi) {
#pragma unroll
        for (int j = 0; j < kEach / 8; ++j)
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int key = key0 + warp * kEach + j * 8 + t * 2 + e;
            if (key < lo || key >= hi) c[j][e] = c[j][2 + e] = -INFINITY;
          }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float x = fmaxf(c[0][2 * r], c[0][2 * r + 1]);
#pragma unroll
        for (int j = 1; j < kEach / 8; ++j) x = fmaxf(x, fmaxf(c[j][2 * r], c[j][2 * r + 1]));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
        x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
        if (t == 0) s.top[warp][g + 8 * r] = x;
      }
      __syncthreads();  // A: everybody is done with this K and with the V before
      if (n + kAhead < blocks) issue(n + kAhead);
      if (n + kAhead + 1 < blocks) note(n + kAhead + 1, next);
      if (n + kAhead + 2 < blocks) next = look_up(n + kAhead + 2);

      float kept[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = g + 8 * r;
        float x = m[r];
#pragma unroll
        for (int w = 0; w < 4; ++w) x = fmaxf(x, s.top[w][row]);
        const float base = finite_or_zero(x), shift = __fmul_rn(base, a.scale);
        kept[r] = exp2_fast(__fmul_rn(__fsub_rn(m[r], base), a.scale));
        m[r] = x;
        if (warp == 0 && t == 0) s.kept[row] = kept[r];
#pragma unroll
        for (int j = 0; j < kEach / 8; ++j) {
          const float p0 = exp2_fast(__fmaf_rn(c[j][2 * r], a.scale, -shift));
          const float p1 = exp2_fast(__fmaf_rn(c[j][2 * r + 1], a.scale, -shift));
          const int key = warp * kEach + j * 8 + t * 2;
          *reinterpret_cast<float2*>(&s.sums[row][key]) = make_float2(p0, p1);
          *reinterpret_cast<uint32_t*>(&s.p[row][key * 2]) = pack<T>(p0, p1);
        }
      }
      __syncthreads();  // B: probabilities are there

      barrier_wait(shared_address(&s.full[v_unit % SLOTS]), (v_unit / SLOTS) & 1);
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        acc[j][0] = __fmul_rn(acc[j][0], kept[0]), acc[j][1] = __fmul_rn(acc[j][1], kept[0]);
        acc[j][2] = __fmul_rn(acc[j][2], kept[1]), acc[j][3] = __fmul_rn(acc[j][3], kept[1]);
      }
      {
        const uint32_t base = shared_address(s.slots[v_unit % SLOTS]), p_base = shared_address(s.p);
#pragma unroll
        for (int kk = 0; kk < kKeys / 16; ++kk) {  // order: keys of a block ascending
          uint32_t pf[4];
          ldmatrix4(pf, p_base + (lane % 16) * (kKeys * 2 + 16) + (kk * 2 + lane / 16) * 16);
#pragma unroll
          for (int j = 0; j < kTiles; j += 2) {
            uint32_t b[4];  // with an odd number of tiles the last read is of a neighbour's columns, and unused
            const int column = min(warp * kTiles + j + lane / 16, DV / 8 - 1);
            ldmatrix4_trans(b, base + chunk_at<DV, kKeys>(kk * 16 + lane % 16, column));
            mma<T>(acc[j], pf, b[0], b[1]);
            if (j + 1 < kTiles) mma<T>(acc[j + 1], pf, b[2], b[3]);
          }
        }
      }
      {  // no branch, so that these additions fill the gaps between the products above
        const float2* x = reinterpret_cast<const float2*>(&s.sums[sum_row][t * 2]);
        l = __fmaf_rn(l, s.kept[sum_row], x[0].x);  // order: a partial sum takes its keys ascending
        l = __fadd_rn(l, x[0].y);
#pragma unroll
        for (int j = 1; j < kKeys / 8; ++j) {
          l = __fadd_rn(l, x[j * 4].x);
          l = __fadd_rn(l, x[j * 4].y);
        }
      }

      const bool cut = a.segment && !a.partial && n + 1 < blocks && key0 % a.segment == 0;
      if (n + 1 == blocks || cut) {
        const float sum = quad_sum(l);
        if (lane < 16 && t == 0) s.total[sum_row] = sum;
        __syncthreads();
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float total = s.total[g + 8 * r];
          if (a.partial || !a.segment) {
            high[r] = m[r], all[r] = total;
#pragma unroll
            for (int j = 0; j < kTiles; ++j) out[j][2 * r] = acc[j][2 * r], out[j][2 * r + 1] = acc[j][2 * r + 1];
          } else {
            const Join join(high[r], m[r], a.scale);
            all[r] = join(all[r], total);
#pragma unroll
            for (int j = 0; j < kTiles; ++j) {
              out[j][2 * r] = join(out[j][2 * r], acc[j][2 * r]);
              out[j][2 * r + 1] = join(out[j][2 * r + 1], acc[j][2 * r + 1]);
            }
          }
          m[r] = -INFINITY;
        }
        l = 0.f;
#pragma unroll
        for (int j = 0; j < kTiles; ++j) acc[j][0] = acc[j][1] = acc[j][2] = acc[j][3] = 0.f;
      }
    }
    unit0 += 2 * blocks;

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = row0 + 8 * r;
      if (row >= a.group) continue;
      const int64_t q_head = head * a.group + row;
      const int column = warp * kTiles * 8 + t * 2;
      if (a.partial) {
        float* to = a.partial + ((int64_t(sequence) * a.segments + split) * a.hk * a.group + q_head) * (DV + 2);
        if (warp == 0 && t == 0) to[DV] = high[r], to[DV + 1] = all[r];
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          *reinterpret_cast<float2*>(to + column + j * 8) = make_float2(out[j][2 * r], out[j][2 * r + 1]);
      } else {
        const Final final(high[r], all[r], a.scale, a.sinks, q_head);
        T* to = static_cast<T*>(a.out) + (int64_t(sight.token) * a.hk * a.group + q_head) * DV + column;
#pragma unroll
        for (int j = 0; j < kTiles; ++j)
          *reinterpret_cast<uint32_t*>(to + j * 8) = pack<T>(final(out[j][2 * r]), final(out[j][2 * r + 1]));
      }
    }
  }
#endif
}

// The segments of a row, joined. Every warp weighs the segments, 32 at a time, and joins the columns of its threads.
template <class T, int DV>
__global__ void __launch_bounds__(DV) join_kernel(const Args a) {
  const int sequence = blockIdx.y, q_head = blockIdx.x, column = threadIdx.x, heads = a.hk * a.group;
  const int lane = threadIdx.x % 32;
  const Sight sight(a, sequence);  // there before the kernel before began
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (!a.ready) sm90::wait_for_kernel_before();
#endif
  const int first = sight.first_segment(a.segment), last = first + sight.segments(a.segment) - 1;
  const int64_t step = int64_t(heads) * (DV + 2);
  const float* x = a.partial + (int64_t(sequence) * a.segments * heads + q_head) * (DV + 2);
  __shared__ float acc[32][DV];
  float high = -INFINITY, all = 0.f, out = 0.f;
  for (int end = last; end >= first; end -= 32) {  // order: segments from the last to the first
    const bool there = end - lane >= first;
    if (a.ready) {
      const int32_t* ready = ready_at(a, sequence, end - lane, q_head % a.group / kDecodeRows, q_head / a.group);
      for (int done = there ? 0 : 4; done < 4;)
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(done) : "l"(ready) : "memory");
      __syncwarp();
    }
    const float m = there ? x[(end - lane) * step + DV] : -INFINITY, l = there ? x[(end - lane) * step + DV + 1] : 0.f;
#pragma unroll 8
    for (int i = 0; i < 32 && end - i >= first; ++i)  // all on their way at once; as loads each would wait for its use
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(shared_address(&acc[i][column])),
                   "l"(x + (end - i) * step + column)
                   : "memory");
    float top = fmaxf(m, high);  // of the segments up to this lane's, which a maximum may take in any order
    for (int d = 1; d < 32; d *= 2) {
      const float y = __shfl_up_sync(0xffffffffu, top, d);
      if (lane >= d) top = fmaxf(top, y);
    }
    float before = __shfl_up_sync(0xffffffffu, top, 1);
    if (lane == 0) before = high;
    const Join join(before, m, a.scale);
    asm volatile("cp.async.wait_all;" ::: "memory");  // of this thread's own column
#pragma unroll 8
    for (int i = 0; i < 32 && end - i >= first; ++i) {
      const Join one{__shfl_sync(0xffffffffu, join.before, i), __shfl_sync(0xffffffffu, join.after, i)};
      all = one(all, __shfl_sync(0xffffffffu, l, i)), out = one(out, acc[i][column]);
    }
    high = __shfl_sync(0xffffffffu, top, 31);
  }
  const Final final(high, all, a.scale, a.sinks, q_head);
  if (sight.token >= 0) static_cast<T*>(a.out)[(int64_t(sight.token) * heads + q_head) * DV + column] = T(final(out));
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (a.ready) sm90::wait_for_kernel_before();  // this kernel's end stands for that one's too
#endif
}

}  // namespace vx::flash
