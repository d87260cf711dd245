// Many queries: prefill and training. A tile has 128 rows (positions, and the heads that share keys), 16 to a warp; the
// order of flash.cuh holds for each.
#pragma once
#include "attention/flash.cuh"

namespace vx::flash {

constexpr int kTileRows = 128, kTileThreads = 256;
constexpr int kDepth = 2;  // blocks of keys in flight

template <int D, int DV>
struct TileShared {
  static constexpr int kKeys = keys_of(D);
  alignas(1024) uint8_t k[kDepth][kKeys * D * 2];
  alignas(1024) uint8_t v[kDepth][kKeys * DV * 2];
  alignas(1024) uint8_t q[kTileRows * D * 2];
  int2 places[kDepth][kKeys];
  uint64_t k_full[kDepth], v_full[kDepth];
};

// Tile `tile` of all sequences' tiles, the last of a sequence first: (sequence, its tile), sequence -1 beyond the end.
struct Found {
  int sequence, tile;
};
__device__ __forceinline__ Found find_tile(const Args& a, int tile) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  for (int first = 0; first < a.sequences; first += 32) {
    int tiles = 0;
    if (first + lane < a.sequences) {
      const int length = extent(a.q_at, first + lane, a.tokens).length;
      tiles = a.skip_single && length == 1 ? 0 : int((int64_t(length) * a.group + kTileRows - 1) / kTileRows);
    }
    int until = tiles;
    for (int d = 1; d < 32; d *= 2) {
      const int x = __shfl_up_sync(0xffffffffu, until, d);
      until += lane >= d ? x : 0;
    }
    until += before;
    const unsigned beyond = __ballot_sync(0xffffffffu, until > tile);
    if (beyond) {
      const int at = __ffs(beyond) - 1;
      return {first + at, __shfl_sync(0xffffffffu, until, at) - 1 - tile};
    }
    before = __shfl_sync(0xffffffffu, until, 31);
  }
  return {-1, 0};
}

struct Seen {
  int key0, k_len, causal, window, place[2];
  __device__ __forceinline__ bool operator()(int r, int key) const {
    return key < k_len && (!causal || key <= place[r]) && (!window || key > place[r] - window);
  }
};

// acc + p @ v where v is not finite everywhere: the product without what is not; then that is put in where it is seen:
// times a probability above 0 it is itself, times 0 or NaN it is NaN. COLUMNS in eights; place(kk, j): where this thread's
// rows of 16 keys and two of those lie.
template <class T, int COLUMNS, int KEYS, class Place>
__device__ __noinline__ void careful_product(float (*acc)[4], const uint32_t (*p)[4], Place place, Seen seen) {
  const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll 1
  for (int j = 0; j < COLUMNS; j += 2) {
    float up[2][4] = {}, down[2][4] = {}, bad[2][4] = {};
#pragma unroll 1
    for (int kk = 0; kk < KEYS / 16; ++kk) {  // order: keys of a block ascending
      uint32_t pf[4], some[4], lost[4], b[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        pf[i] = p[kk][i], some[i] = lost[i] = 0;
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const uint32_t x = pf[i] >> (16 * e) & 0xffffu;
          const bool sees = seen(i & 1, seen.key0 + kk * 16 + (i >> 1) * 8 + t * 2 + e);
          const bool weighs = x != 0 && x <= Pair<T>::kInf;
          some[i] |= (sees && weighs ? Pair<T>::kOne : 0u) << (16 * e);
          lost[i] |= (sees && !weighs ? Pair<T>::kOne : 0u) << (16 * e);
        }
      }
      ldmatrix4_trans(b, place(kk, j));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t b0 = b[2 * half], b1 = b[2 * half + 1], inf = Pair<T>::kInf, minus = inf | 0x8000u;
        mma<T>(acc[j + half], pf, Pair<T>::cleaned(b0), Pair<T>::cleaned(b1));
        mma<T>(up[half], some, Pair<T>::equal(b0, inf), Pair<T>::equal(b1, inf));
        mma<T>(down[half], some, Pair<T>::equal(b0, minus), Pair<T>::equal(b1, minus));
        mma<T>(bad[half], some, Pair<T>::nan(b0), Pair<T>::nan(b1));
        mma<T>(bad[half], lost, Pair<T>::not_finite(b0), Pair<T>::not_finite(b1));
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float x = acc[j + half][e];
        if (up[half][e] > 0.f) x += INFINITY;
        if (down[half][e] > 0.f) x -= INFINITY;
        acc[j + half][e] = bad[half][e] > 0.f ? NAN : x;
      }
  }
}

template <class T, int D, int DV, bool SEGMENTS, bool BOXES>
__global__ void __launch_bounds__(kTileThreads, 1)
    tile_kernel(const Args a, const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                int tiles) {
#ifdef VX_FLASH_DEVICE
  using Shared = TileShared<D, DV>;
  constexpr int kKeys = Shared::kKeys, kColumns = DV / 8, kScores = kKeys / 8;
  extern __shared__ __align__(1024) uint8_t raw[];
  if (BOXES && shared_address(raw) % 1024) __trap();  // where the copy engine would exchange other chunks
  auto& s = *reinterpret_cast<Shared*>(raw);
  if (a.wanted && *a.wanted == 0) return;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  if (tid < kDepth) {
    barrier_init(shared_address(&s.k_full[tid]), BOXES ? 1 : kTileThreads);
    barrier_init(shared_address(&s.v_full[tid]), BOXES ? 1 : kTileThreads);
  }
  if (BOXES) asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  uint32_t loaded = 0;  // blocks, by earlier items
  for (int64_t item = blockIdx.x; item < int64_t(tiles) * a.hk; item += gridDim.x) {
    const int head = int(item % a.hk);
    const Found found = find_tile(a, int(item / a.hk));
    if (found.sequence < 0) break;
    const Extent queries = extent(a.q_at, found.sequence, a.tokens);
    int k_begin = 0, k_len;
    if (a.table) {
      k_len = max(min(a.k_at[found.sequence], a.keys), 0);
    } else {
      const Extent keys = extent(a.k_at, found.sequence, a.keys);
      k_begin = keys.begin, k_len = keys.length;
    }
    const T* k = static_cast<const T*>(a.k) + head * a.k_head;
    const T* v = static_cast<const T*>(a.v) + head * a.v_head;
    const int shift = k_len - queries.length;  // a query's place is its position and this
    const int first_row = found.tile * kTileRows;
    const int last_position = min((first_row + kTileRows - 1) / a.group, queries.length - 1);
    int lo = 0, hi = k_len;
    if (a.causal) hi = max(min(k_len, shift + last_position + 1), 0);
    if (a.window) lo = min(max(shift + first_row / a.group + 1 - a.window, 0), hi);
    const int first = lo / kKeys, last = (hi - 1) / kKeys, blocks = hi > lo ? last - first + 1 : 0;

    auto look_up = [&](int n) {  // with BOXES, the page of this lane's box of keys
      const int key0 = (last - n) * kKeys;
      if (!BOXES) return locate(a, found.sequence, k_begin, key0 + tid, lo, hi);
      const int key = key0 + lane * a.box;
      if (lane * a.box >= kKeys || key >= hi || key + a.box <= lo) return int2{-1, 0};
      return a.table ? int2{a.table[found.sequence * a.table_row + key / a.page_size], key % a.page_size}
                     : int2{0, k_begin + key};
    };
    auto issue = [&](int n) {
      const int slot = (loaded + n) % kDepth;
      const uint32_t k_full = shared_address(&s.k_full[slot]), v_full = shared_address(&s.v_full[slot]);
      if (!BOXES) {
        load_block<D, kKeys, kTileThreads>(shared_address(s.k[slot]), k, a.k_page, a.k_row, s.places[slot]);
        arrive_when_copied(k_full);
        load_block<DV, kKeys, kTileThreads>(shared_address(s.v[slot]), v, a.v_page, a.v_row, s.places[slot]);
        arrive_when_copied(v_full);
      } else if (warp == 0) {
        if (lane == 0) barrier_expect(k_full, kKeys * D * 2), barrier_expect(v_full, kKeys * DV * 2);
        __syncwarp();
        if (lane * a.box < kKeys) {
          const int2 at = s.places[slot][lane];
          const int offset = lane * a.box * 128;
          for (int i = 0; i < D / 64; ++i)
            copy_box(shared_address(s.k[slot]) + i * kKeys * 128 + offset, k_map, i * 64, at.y, head, at.x, k_full);
          for (int i = 0; i < DV / 64; ++i)
            copy_box(shared_address(s.v[slot]) + i * kKeys * 128 + offset, v_map, i * 64, at.y, head, at.x, v_full);
        }
      }
    };
    auto prepare = [&](int n) {  // a barrier on either side
      if (tid < (BOXES ? 32 : kKeys) && n < blocks) s.places[(loaded + n) % kDepth][tid] = look_up(n);
    };

    __syncthreads();  // the item before is done with everything shared
    for (int n = 0; n < kDepth; ++n) prepare(n);
    for (int i = tid; i < kTileRows * (D / 8); i += kTileThreads) {
      const int row = i / (D / 8), chunk = i % (D / 8), position = (first_row + row) / a.group;
      const T* from = static_cast<const T*>(a.q) + int64_t(queries.begin + position) * a.q_row +
                      (head * a.group + (first_row + row) % a.group) * a.q_head + chunk * 8;
      *reinterpret_cast<uint4*>(s.q + chunk_at<D, kTileRows>(row, chunk)) =
          position < queries.length ? *reinterpret_cast<const uint4*>(from) : uint4{};
    }
    __syncthreads();
    for (int n = 0; n < kDepth && n < blocks; ++n) issue(n);

    int position[2], place[2], token[2], q_head[2];
    bool live[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const int row = first_row + warp * 16 + g + 8 * r;
      position[r] = row / a.group;
      live[r] = position[r] < queries.length;
      place[r] = shift + position[r];
      token[r] = queries.begin + position[r];
      q_head[r] = head * a.group + row % a.group;
    }
    // what the warp's rows see, for blocks that none or all of them see
    const int warp_row = first_row + warp * 16;
    const int warp_first = shift + warp_row / a.group;
    const int warp_last = shift + min((warp_row + 15) / a.group, queries.length - 1);
    const bool warp_live = warp_row / a.group < queries.length;
    const int warp_hi = !warp_live ? 0 : a.causal ? min(k_len, warp_last + 1) : k_len;
    const int warp_lo = a.window ? max(warp_first + 1 - a.window, 0) : 0;
    const int whole_hi = a.causal ? min(k_len, warp_first + 1) : k_len;
    const int whole_lo = a.window ? max(warp_last + 1 - a.window, 0) : 0;
    float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f}, acc[kColumns][4] = {};
    float high[2] = {-INFINITY, -INFINITY}, all[2] = {0.f, 0.f}, out[kColumns][4] = {};

    for (int n = 0; n < blocks; ++n) {  // order: blocks of keys from the last to the first
      const int key0 = (last - n) * kKeys;
      const uint32_t slot = (loaded + n) % kDepth, parity = ((loaded + n) / kDepth) & 1;
      // a block that some row of the tile sees in part: values there must not reach rows that do not see them
      const bool ragged = a.causal && (key0 + kKeys > shift + first_row / a.group + 1 ||
                                       (a.window && key0 <= shift + last_position - a.window));
      const bool skip = key0 >= warp_hi || key0 + kKeys <= warp_lo;
      float c[kScores][4];
      barrier_wait(shared_address(&s.k_full[slot]), parity);
      if (!skip) {
        const uint32_t base = shared_address(s.k[slot]);
#pragma unroll
        for (int j = 0; j < kScores; ++j) c[j][0] = c[j][1] = c[j][2] = c[j][3] = 0.f;
#pragma unroll
        for (int kk = 0; kk < D / 32; ++kk) {  // order: D ascending
          uint32_t qf[2][4];
          const int row = warp * 16 + lane % 16, chunk = kk * 4 + lane / 16;
          ldmatrix4(qf[0], shared_address(s.q) + chunk_at<D, kTileRows>(row, chunk));
          ldmatrix4(qf[1], shared_address(s.q) + chunk_at<D, kTileRows>(row, chunk + 2));
#pragma unroll
          for (int j = 0; j < kScores; ++j) {
            uint32_t b[4];
            ldmatrix4(b, base + chunk_at<D, kKeys>(j * 8 + lane % 8, kk * 4 + lane / 8));
            mma<T>(c[j], qf[0], b[0], b[1]);
            mma<T>(c[j], qf[1], b[2], b[3]);
          }
        }
      }
      __syncthreads();  // this K is done with
      prepare(n + kDepth);  // whose K and V take the places of these, which have been asked for
      uint32_t p[kKeys / 16][4];
      if (!skip) {
        if (key0 + kKeys > whole_hi || key0 < whole_lo) {
          const Seen sees{key0, k_len, a.causal, a.window, {place[0], place[1]}};
#pragma unroll
          for (int j = 0; j < kScores; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
              if (!sees(e / 2, key0 + j * 8 + t * 2 + e % 2)) c[j][e] = -INFINITY;
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          float x = m[r];
#pragma unroll
          for (int j = 0; j < kScores; ++j) x = fmaxf(x, fmaxf(c[j][2 * r], c[j][2 * r + 1]));
          x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
          x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
          const float base = finite_or_zero(x), offset = __fmul_rn(base, a.scale);
          const float kept = exp2_fast(__fmul_rn(__fsub_rn(m[r], base), a.scale));
          m[r] = x;
#pragma unroll
          for (int j = 0; j < kScores; ++j) {  // order: a partial sum takes its keys ascending
            const float p0 = exp2_fast(__fmaf_rn(c[j][2 * r], a.scale, -offset));
            const float p1 = exp2_fast(__fmaf_rn(c[j][2 * r + 1], a.scale, -offset));
            l[r] = j == 0 ? __fmaf_rn(l[r], kept, p0) : __fadd_rn(l[r], p0);
            l[r] = __fadd_rn(l[r], p1);
            p[j / 2][(j & 1) * 2 + r] = pack<T>(p0, p1);
          }
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            acc[j][2 * r] = __fmul_rn(acc[j][2 * r], kept);
            acc[j][2 * r + 1] = __fmul_rn(acc[j][2 * r + 1], kept);
          }
        }
      }
      barrier_wait(shared_address(&s.v_full[slot]), parity);
      const uint32_t base = shared_address(s.v[slot]);
      bool nonfinite = false;
      const bool edge = BOXES && (key0 < lo || key0 + kKeys > hi);  // boxes bring along what nobody sees
      if (ragged || edge) {
        for (int i = tid; i < kKeys * (DV / 8); i += kTileThreads) {
          const int key = key0 + i / (DV / 8);
          uint4& y = *reinterpret_cast<uint4*>(s.v[slot] + chunk_at<DV, kKeys>(key - key0, i % (DV / 8)));
          if (key < lo || key >= hi)
            y = uint4{};
          else if (ragged)
            nonfinite = nonfinite || Pair<T>::nonfinite(y.x) || Pair<T>::nonfinite(y.y) ||
                        Pair<T>::nonfinite(y.z) || Pair<T>::nonfinite(y.w);
        }
        if (BOXES) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        nonfinite = __syncthreads_or(nonfinite);
      }
      if (!skip && !nonfinite) {
#pragma unroll
        for (int kk = 0; kk < kKeys / 16; ++kk)  // order: keys of a block ascending
#pragma unroll
          for (int j = 0; j < kColumns; j += 2) {
            uint32_t b[4];
            ldmatrix4_trans(b, base + chunk_at<DV, kKeys>(kk * 16 + lane % 16, j + lane / 16));
            mma<T>(acc[j], p[kk], b[0], b[1]);
            mma<T>(acc[j + 1], p[kk], b[2], b[3]);
          }
      }
      if (!skip && nonfinite) {
        float y[kColumns][4];
        uint32_t weights[kKeys / 16][4];
#pragma unroll
        for (int i = 0; i < kColumns * 4; ++i) y[i / 4][i % 4] = acc[i / 4][i % 4];
#pragma unroll
        for (int i = 0; i < kKeys / 4; ++i) weights[i / 4][i % 4] = p[i / 4][i % 4];
        const auto rows_at = [=](int kk, int j) { return base + chunk_at<DV, kKeys>(kk * 16 + lane % 16, j + lane / 16); };
        careful_product<T, kColumns, kKeys>(y, weights, rows_at, {key0, k_len, a.causal, a.window, {place[0], place[1]}});
#pragma unroll
        for (int i = 0; i < kColumns * 4; ++i) acc[i / 4][i % 4] = y[i / 4][i % 4];
      }
      if (SEGMENTS && (n + 1 == blocks || key0 % a.segment == 0)) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Join join(high[r], m[r], a.scale);
          all[r] = join(all[r], quad_sum(l[r]));
#pragma unroll
          for (int j = 0; j < kColumns; ++j) {
            out[j][2 * r] = join(out[j][2 * r], acc[j][2 * r]);
            out[j][2 * r + 1] = join(out[j][2 * r + 1], acc[j][2 * r + 1]);
            acc[j][2 * r] = acc[j][2 * r + 1] = 0.f;
          }
          m[r] = -INFINITY, l[r] = 0.f;
        }
      }
      __syncthreads();  // this V is done with, and the next places are there
      if (n + kDepth < blocks) issue(n + kDepth);
    }
    loaded += blocks;

#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float top = SEGMENTS ? high[r] : m[r], total = SEGMENTS ? all[r] : quad_sum(l[r]);
      if (!live[r]) continue;
      const Final final(top, total, a.scale, a.sinks, q_head[r]);
      T* to = static_cast<T*>(a.out) + (int64_t(token[r]) * a.hk * a.group + q_head[r]) * DV + t * 2;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float x = SEGMENTS ? out[j][2 * r] : acc[j][2 * r];
        const float y = SEGMENTS ? out[j][2 * r + 1] : acc[j][2 * r + 1];
        *reinterpret_cast<uint32_t*>(to + j * 8) = pack<T>(final(x), final(y));
      }
      if (a.lse && t == 0) a.lse[int64_t(q_head[r]) * a.tokens + token[r]] = final.lse;
    }
  }
#endif
}

}  // namespace vx::flash
