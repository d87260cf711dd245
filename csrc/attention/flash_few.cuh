// A few queries of each sequence, as where drafts are verified: decode's kernel (flash_stream.cuh), with tiles of sixteen
// rows that are the heads which share keys at one position, then those at the next. An item has up to TILES such tiles:
// keys and values come to a multiprocessor once for all of them, and a fragment of keys or values that has been read from
// shared memory serves all of them. Each row has the order of flash.cuh; what it does not see is left out as
// flash_tile.cuh does it.
#pragma once
#include "attention/flash_stream.cuh"
#include "attention/flash_tile.cuh"

namespace vx::flash {

constexpr int kFewThreads = 384;  // two of twelve warps do nothing, so that those who compute have more registers
constexpr int kMostTiles = 3;  // of four at a time warps hold too much: two are faster

// A sequence and one head of its keys, and up to TILES tiles of rows, `rows` of which are there. Some of them see keys of
// [lo, hi), all of them those of [all_lo, all_hi).
template <int KEYS, int TILES>
struct FewItem {
  int sequence, head, row0, token, rows, shift, lo, hi, all_lo, all_hi, last, blocks, k_len;
  __device__ __forceinline__ FewItem(const Args& a, const int*, int item, int heads) {
    const int rest = item % heads;
    sequence = item / heads, head = rest % a.hk, row0 = rest / a.hk * (TILES * kDecodeRows);
    const Extent queries = extent(a.q_at, sequence, a.tokens);
    rows = min(queries.length * a.group - row0, TILES * kDecodeRows);
    k_len = max(min(a.k_at[sequence], a.keys), 0), shift = k_len - queries.length;
    const int first = shift + row0 / a.group, final = shift + (row0 + max(rows, 1) - 1) / a.group;  // places
    token = rows > 0 ? queries.begin : -1;
    hi = max(final + 1, 0), all_hi = max(first + 1, 0);
    lo = a.window ? min(max(first + 1 - a.window, 0), hi) : 0, all_lo = a.window ? max(final + 1 - a.window, 0) : 0;
    last = (hi - 1) / KEYS;
    blocks = token >= 0 && hi > lo ? last - lo / KEYS + 1 : 0;
  }
  __device__ __forceinline__ int first_settled() const { return last - max(shift, 0) / KEYS + 1; }
  __device__ __forceinline__ int tiles() const { return (rows + kDecodeRows - 1) / kDecodeRows; }
  // Of row `row` of the item: its token, from the sequence's first on, and its head.
  __device__ __forceinline__ int2 place(const Args& a, int row) const {
    const int at = (row0 + row) / a.group;
    return {at, head * a.group + row0 + row - at * a.group};
  }
  __device__ __forceinline__ bool ragged(int key0) const { return key0 < all_lo || key0 + KEYS > all_hi; }
};

// Probabilities lie there twice: for the sums, which one of those who carry adds up for all of them, and rounded, for the
// products.
template <int D, int DV, int TILES>
struct FewShared : StreamShared<D, DV, kDecodeRows, 2, 1> {
  using Stream = StreamShared<D, DV, kDecodeRows, 2, 1>;
  static constexpr int kTiles = TILES;
  using Item = FewItem<keys_of(D), TILES>;
  alignas(16) uint16_t rounded[Stream::kRing][kDecodeRows][keys_of(D) + 8];
  alignas(16) uint8_t queries[kDecodeRows * D * 2];  // of a tile, on the way to registers
  float all_tops[2][4][TILES * kDecodeRows];
  float factors[2][TILES * kDecodeRows];  // of the output, of an item and of the one before it
  static __device__ __forceinline__ int query_at(int row, int chunk) { return row * (D * 2) + (chunk ^ (row & 7)) * 16; }
};

// f.template operator()<COUNT>() for so many tiles, of which there are TILES at most.
template <int TILES, class F>
__device__ __forceinline__ void for_count(int tiles, const F& f) {
  if constexpr (TILES >= 3)
    if (tiles >= 3) f.template operator()<3>();
  if constexpr (TILES >= 2)
    if (tiles == 2 || (tiles > 2 && TILES == 2)) f.template operator()<2>();
  if (tiles == 1) f.template operator()<1>();
}

// One of the four warps that score a quarter of a block's keys each.
template <class T, int D, class Shared>
struct FewScores {
  static constexpr int kKeys = Shared::kKeys, kEach = kKeys / 4, kParts = kEach / 8;
  using Item = typename Shared::Item;
  const Args& a;
  Shared& s;
  const int warp, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t done = 0, blocks = 0;          // tiles of blocks, and blocks, so far
  uint32_t q[Shared::kTiles][D / 16][4];  // the queries' fragments
  float m[Shared::kTiles][2];             // maxima of the two rows that this thread has scores of
  int hi[Shared::kTiles][2];              // and where the keys end that they see
  __device__ __forceinline__ FewScores(const Args& a, Shared& s, int warp) : a(a), s(s), warp(warp) {}

  // All four warps read each query once, 16 bytes at a time, and hand it to each other.
  __device__ __forceinline__ void begin(const Item& it, int tiles) {
    constexpr int kChunks = D / 8, kLoads = kDecodeRows * kChunks / 128;  // of a row; of a thread, for a tile
    const int tid = warp * 32 + lane;
    uint4 x[Shared::kTiles][kLoads] = {};
#pragma unroll
    for (int i = 0; i < Shared::kTiles; ++i)
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int at = n * 128 + tid, row = i * kDecodeRows + at / kChunks;
        if (row >= it.rows) continue;  // others are zeros, and nothing of theirs is stored
        const int2 from = it.place(a, row);
        x[i][n] = *reinterpret_cast<const uint4*>(
            static_cast<const char*>(a.q) +
            (int64_t(it.token + from.x) * a.q_row + int64_t(from.y) * a.q_head + at % kChunks * 8) * 2);
      }
#pragma unroll
    for (int i = 0; i < Shared::kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = i * kDecodeRows + g + 8 * r;
        m[i][r] = -INFINITY;
        hi[i][r] = row < it.rows ? it.shift + it.place(a, row).x + 1 : it.hi;
      }
#pragma unroll
    for (int i = 0; i < Shared::kTiles; ++i) {
      if (i >= tiles) break;
      asm volatile("bar.sync 2, 128;" ::: "memory");  // the tile before has been taken
#pragma unroll
      for (int n = 0; n < kLoads; ++n) {
        const int at = n * 128 + tid;
        *reinterpret_cast<uint4*>(s.queries + Shared::query_at(at / kChunks, at % kChunks)) = x[i][n];
      }
      asm volatile("bar.sync 2, 128;" ::: "memory");
#pragma unroll
      for (int kk = 0; kk < D / 16; ++kk)
        ldmatrix4(q[i][kk], shared_address(s.queries) + Shared::query_at(lane % 16, kk * 2 + lane / 16));
    }
  }

  // All tiles of a block, whose keys are done with then. `all` is true: the branch is of the machine code that a GPU has
  // compared.
  template <int COUNT>
  __device__ __forceinline__ void score(const Item& it, int key0, uint32_t slot, bool all) {
    const uint32_t base = shared_address(s.slots[slot]);
    float c[COUNT][kParts][4] = {};
#pragma unroll
    for (int kk = 0; kk < D / 32; ++kk)  // order: D ascending
#pragma unroll
      for (int j = 0; j < kParts; ++j) {
        uint32_t b[4];
        ldmatrix4(b, base + boxed_at<D>(warp * kEach + j * 8 + lane % 8, kk * 4 + lane / 8, a.box));
#pragma unroll
        for (int i = 0; i < COUNT; ++i) mma<T>(c[i][j], q[i][2 * kk], b[0], b[1]);
#pragma unroll
        for (int i = 0; i < COUNT; ++i) mma<T>(c[i][j], q[i][2 * kk + 1], b[2], b[3]);
      }
    // c[i][j][e] is of row i * 16 + e / 2 * 8 + g and of this key of the block
    const auto key_of = [&](int j, int e) { return warp * kEach + j * 8 + t * 2 + e % 2; };
    if (it.ragged(key0)) {
#pragma unroll
      for (int i = 0; i < COUNT; ++i)
#pragma unroll
        for (int j = 0; j < kParts; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int key = key0 + key_of(j, e), end = hi[i][e / 2];
            if (key >= end || (a.window && key < end - a.window)) c[i][j][e] = -INFINITY;
          }
    }
    auto& tops = s.all_tops[blocks++ & 1];  // of two, since who is a block ahead writes while others still read
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        float top = -INFINITY;
#pragma unroll
        for (int j = 0; j < kParts; ++j) top = fmaxf(top, fmaxf(c[i][j][2 * r], c[i][j][2 * r + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        if (t == 0) tops[warp][i * kDecodeRows + g + 8 * r] = top;
      }
    asm volatile("bar.sync 2, 128;" ::: "memory");
    if (all) arrive_for_warp(shared_address(&s.empty[slot]));  // only now, as flash_stream.cuh says why
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      float kept[2], shift[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = i * kDecodeRows + g + 8 * r;
        float& before = m[i][r];
        const float top = fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row]));
        const float high = fmaxf(top, before), base = finite_or_zero(high);
        shift[r] = __fmul_rn(base, a.scale);
        kept[r] = exp2_fast(__fmul_rn(__fsub_rn(before, base), a.scale));
        before = high;
      }
      const uint32_t ring = done % Shared::kRing, turn = done / Shared::kRing;
      ++done;
      if (turn) barrier_wait(shared_address(&s.taken[ring]), (turn - 1) & 1);
#pragma unroll
      for (int j = 0; j < kParts; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const auto weight = [&](float x) { return exp2_fast(__fmaf_rn(x, a.scale, -shift[r])); };
          const float2 p = make_float2(weight(c[i][j][2 * r]), weight(c[i][j][2 * r + 1]));
          *reinterpret_cast<float2*>(&s.probabilities[ring][g + 8 * r][key_of(j, 0)]) = p;
          *reinterpret_cast<uint32_t*>(&s.rounded[ring][g + 8 * r][key_of(j, 0)]) = pack<T>(p.x, p.y);
        }
      if (warp == 0 && t == 0)
#pragma unroll
        for (int r = 0; r < 2; ++r) s.high[ring][g + 8 * r] = m[i][r], s.kept[ring][g + 8 * r] = kept[r];
      arrive_for_warp(shared_address(&s.scored[ring]));
    }
  }

  __device__ __forceinline__ void run(int items, int heads) {
    uint32_t unit = 0;
    bool waited = !a.settled;
    for (Turns<Shared> turns(a, s, items); turns.more(); turns.next()) {
      const Item it(a, s.until, turns.item, heads);
      const int tiles = it.tiles();
      if (!waited) wait_for_kernel_before(), waited = true;  // only now: what an item is was there before
      if (it.blocks == 0) continue;
      begin(it, tiles);
      for (int n = 0; n < it.blocks; ++n, unit += 2) {  // order: blocks of keys from the last to the first
        const uint32_t slot = unit % Shared::kSlots;
        barrier_wait(shared_address(&s.full[slot]), unit / Shared::kSlots & 1);
        for_count<Shared::kTiles>(tiles, [&]<int COUNT>() __attribute__((always_inline)) {
          score<COUNT>(it, (it.last - n) * kKeys, slot, COUNT >= tiles);
        });
      }
    }
    if (!waited) wait_for_kernel_before();
  }
};

// Where this thread's rows of sixteen keys and two of those lie: boxed_at(kk * 16 + lane % 16, j + lane / 16), from a warp's
// first column on, in parts: sixteen addresses of its own would be spilled.
template <int DV>
struct FewPlace {
  uint32_t base, mine;
  int box;
  __device__ __forceinline__ uint32_t operator()(int kk, int j) const {
    return base + (mine ^ j * 16) + boxed_at<DV>(kk * 16, 0, box);
  }
};

// One of the four warps that carry output, each of a quarter of V's columns, and the sums of a tile, which is its own.
template <class T, int DV, class Shared>
struct FewSums {
  static constexpr int kKeys = Shared::kKeys;
  static constexpr int kColumns = DV / 32;  // of a warp, in eights
  static_assert((kColumns & (kColumns - 1)) == 0);
  using Item = typename Shared::Item;
  const Args& a;
  Shared& s;
  const int warp, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t mine = boxed_at<DV>(lane % 16, warp * kColumns + lane / 16, a.box);
  uint32_t done = 0;       // tiles of blocks so far
  uint32_t stored = 0;     // items so far
  bool nonfinite = false;  // what some rows see of a block must not reach those that do not
  float m[2], l[2];        // of the warp's own tile
  float acc[Shared::kTiles][kColumns][4];
  static_assert(Shared::kTiles <= 4);
  __device__ __forceinline__ FewSums(const Args& a, Shared& s, int warp) : a(a), s(s), warp(warp) {}

  __device__ __forceinline__ void begin() {
    m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.f;
#pragma unroll
    for (int i = 0; i < Shared::kTiles; ++i)
#pragma unroll
      for (int e = 0; e < kColumns * 4; ++e) acc[i][e / 4][e % 4] = 0.f;
  }

  // What boxes bring along of a block and nobody sees may be anything: zeros. Of what some see, whether all is finite.
  __device__ __forceinline__ void clean(const Item& it, int key0, uint32_t slot) {
    nonfinite = false;
    if (!it.ragged(key0)) return;
    const auto chunk = [&](int i) -> uint4& {
      const int at = boxed_at<DV>(i / kColumns, warp * kColumns + i % kColumns, a.box);
      return *reinterpret_cast<uint4*>(s.slots[slot] + at);
    };
    const auto each = [&](int from, int to, auto f) {  // chunks of keys [from, to) of the block
      for (int i = max(from - key0, 0) * kColumns + lane; i < min(to - key0, kKeys) * kColumns; i += 32) f(chunk(i));
    };
    const auto zero = [](uint4& y) { y = uint4{}; };
    const auto look = [&](const uint4& y) {
      nonfinite |= Pair<T>::nonfinite(y.x) | Pair<T>::nonfinite(y.y) | Pair<T>::nonfinite(y.z) | Pair<T>::nonfinite(y.w);
    };
    each(key0, it.lo, zero);
    each(it.lo, min(it.all_lo, it.hi), look);
    each(max(it.all_hi, it.lo), it.hi, look);
    each(it.hi, key0 + kKeys, zero);
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncwarp();
    nonfinite = __any_sync(~0u, nonfinite);
  }

  // All tiles of a block.
  template <int COUNT>
  __device__ __forceinline__ void carry(const Item& it, int key0, uint32_t unit) {
    uint32_t p[COUNT][kKeys / 16][4];
    float kept[COUNT][2];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const uint32_t ring = done % Shared::kRing;
      barrier_wait(shared_address(&s.scored[ring]), done / Shared::kRing & 1);
      ++done;
#pragma unroll
      for (int r = 0; r < 2; ++r) kept[i][r] = s.kept[ring][g + 8 * r];
#pragma unroll
      for (int kk = 0; kk < kKeys / 16; ++kk)
        ldmatrix4(p[i][kk], shared_address(&s.rounded[ring][lane % 16][kk * 16 + lane / 16 * 8]));
      const bool wanted = i + Shared::kRing < COUNT;  // soon: those who score write another of this block there
      if (i == warp) {
        float2 x[2][kKeys / 8];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          m[r] = s.high[ring][g + 8 * r];
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j)
            x[r][j] = *reinterpret_cast<const float2*>(&s.probabilities[ring][g + 8 * r][j * 8 + t * 2]);
        }
        if (wanted) arrive_for_warp(shared_address(&s.taken[ring]));
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
          for (int j = 0; j < kKeys / 8; ++j) {  // order: a partial sum takes its keys ascending
            l[r] = j == 0 ? __fmaf_rn(l[r], kept[i][r], x[r][j].x) : __fadd_rn(l[r], x[r][j].x);
            l[r] = __fadd_rn(l[r], x[r][j].y);
          }
      }
      if (!wanted || i != warp) arrive_for_warp(shared_address(&s.taken[ring]));  // behind a branch, as below
    }
    const uint32_t slot = unit % Shared::kSlots, base = shared_address(s.slots[slot]);
    barrier_wait(shared_address(&s.full[slot]), unit / Shared::kSlots & 1);
    clean(it, key0, slot);
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
#pragma unroll
      for (int e = 0; e < kColumns * 4; ++e)
        acc[i][e / 4][e % 4] = __fmul_rn(acc[i][e / 4][e % 4], kept[i][e % 4 / 2]);
    const FewPlace<DV> place{base, mine, a.box};
    if (!nonfinite) {
#pragma unroll
      for (int kk = 0; kk < kKeys / 16; ++kk)  // order: keys of a block ascending
#pragma unroll
        for (int j = 0; j < kColumns; j += 2) {
          uint32_t b[4];
          ldmatrix4_trans(b, place(kk, j));
#pragma unroll
          for (int i = 0; i < COUNT; ++i) {
            mma<T>(acc[i][j], p[i][kk], b[0], b[1]);
            mma<T>(acc[i][j + 1], p[i][kk], b[2], b[3]);
          }
        }
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) {
        float y[kColumns][4];
        uint32_t weights[kKeys / 16][4];
#pragma unroll
        for (int e = 0; e < kColumns * 4; ++e) y[e / 4][e % 4] = acc[i][e / 4][e % 4];
#pragma unroll
        for (int e = 0; e < kKeys / 4; ++e) weights[e / 4][e % 4] = p[i][e / 4][e % 4];
        const int row = i * kDecodeRows + g;
        const int places[2] = {it.shift + it.place(a, row).x, it.shift + it.place(a, row + 8).x};
        careful_product<T, kColumns, kKeys>(y, weights, place, {key0, it.k_len, true, a.window, {places[0], places[1]}});
#pragma unroll
        for (int e = 0; e < kColumns * 4; ++e) acc[i][e / 4][e % 4] = y[e / 4][e % 4];
      }
    }
  }

  __device__ __forceinline__ void store(const Item& it, int tiles) {
    float* const factors = s.factors[stored++ & 1];  // of two, since who is an item ahead writes while others still read
    if (warp < tiles) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = warp * kDecodeRows + g + 8 * r;
        const float total = quad_sum(l[r]);
        if (t == 0) factors[row] = Final(m[r], total, a.scale, a.sinks, it.place(a, min(row, it.rows - 1)).y).factor;
      }
    }
    asm volatile("bar.sync 1, 128;" ::: "memory");
#pragma unroll
    for (int i = 0; i < Shared::kTiles; ++i)
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = i * kDecodeRows + g + 8 * r;
        if (row >= it.rows) continue;
        const int2 at = it.place(a, row);
        const float factor = factors[row];
        T* const to = static_cast<T*>(a.out) + (int64_t(it.token + at.x) * a.hk * a.group + at.y) * DV;
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          *reinterpret_cast<uint32_t*>(to + (warp * kColumns + j) * 8 + t * 2) =
              pack<T>(Final::apply(acc[i][j][2 * r], factor), Final::apply(acc[i][j][2 * r + 1], factor));
      }
  }

  __device__ __forceinline__ void run(int items, int heads) {
    uint32_t unit = 1;
    bool begun = false;
    for (Turns<Shared> turns(a, s, items); turns.more(); turns.next()) {
      const Item it(a, s.until, turns.item, heads);
      const int tiles = it.tiles();
      if (!begun) {
        if (a.settled) wait_for_kernel_before();
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
        sm90::let_kernel_after_start();
#endif
        begun = true;
      }
      if (it.token < 0) continue;
      begin();
      for (int n = 0; n < it.blocks; ++n, unit += 2) {  // order: blocks of keys from the last to the first
        for_count<Shared::kTiles>(tiles, [&]<int COUNT>() __attribute__((always_inline)) {
          carry<COUNT>(it, (it.last - n) * kKeys, unit);
        });
        arrive_for_warp(shared_address(&s.empty[unit % Shared::kSlots]));  // behind a branch, as in flash_stream.cuh
      }
      store(it, tiles);
    }
  }
};

// Sequences up to the last one with a query: those behind are there where a step is padded, and an item takes a block about
// a microsecond even where there is nothing in it. A warp calls it. Many are looked at together, for a look takes as long
// for one as for all: nothing is fetched before it is known how many there are.
__device__ __forceinline__ int sequences_with_queries(const Args& a) {
  constexpr int kLooks = 4;
  for (int end = a.sequences; end > 0; end -= kLooks * 32) {
    bool some[kLooks];
#pragma unroll
    for (int i = 0; i < kLooks; ++i) {
      const int sequence = end - (i + 1) * 32 + int(threadIdx.x % 32);
      some[i] = extent(a.q_at, max(sequence, 0), a.tokens).length > 0 && sequence >= 0;
    }
#pragma unroll
    for (int i = 0; i < kLooks; ++i)
      if (const unsigned those = __ballot_sync(~0u, some[i])) return end - i * 32 - __clz(those);
  }
  return 0;
}

template <class T, int D, int DV, int TILES>
__global__ void __launch_bounds__(kFewThreads, 1)
    few_kernel(const Args a, const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Shared = FewShared<D, DV, TILES>;
  extern __shared__ __align__(1024) uint8_t raw[];
  if (shared_address(raw) % 1024) __trap();  // where the copy engine would exchange other chunks
  auto& s = *reinterpret_cast<Shared*>(raw);
  const int tid = threadIdx.x, warp = tid / 32;
  begin_stream(s, tid);
  const int rows = TILES * kDecodeRows, heads = a.hk * ((a.queries * a.group + rows - 1) / rows);
  if (warp == 8) prefetch_places(a, heads);
  if (tid == 0) sm90::prefetch_map(&k_map), sm90::prefetch_map(&v_map);
  __syncthreads();
  if (!a.settled) wait_for_kernel_before();
  const int items = sequences_with_queries(a) * heads;
  if (warp < 8) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(TILES > 2 ? 232 : 224));
    if (warp < 4) {
      FewSums<T, DV, Shared>(a, s, warp).run(items, heads);
    } else {
      FewScores<T, D, Shared>(a, s, warp - 4).run(items, heads);
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(TILES > 2 ? 40 : 56));
    if (warp == 8) fetch<0, D>(a, s, k_map, items, heads);
    if (warp == 9) fetch<1, DV>(a, s, v_map, items, heads);
  }
#endif
}

}  // namespace vx::flash
