// Decode where pages and blocks of keys fit each other, a persistent thread block to a multiprocessor. As flash_decode.cuh,
// in the same order, but nobody waits for what he need not: one warp fetches keys, one values, four warps score the keys
// of a block, a quarter of them each, keep the running maximum and make probabilities of them, four carry the sums and
// the output, each of a quarter of V's columns. Keys and values of the next item come while one is computed with. Who
// scores runs ahead of who carries; the four that carry never wait for each other.
//
// Where all but the queries and a sequence's last key and value is settled, as the caller says, the first item is looked up
// and its earlier blocks are fetched before the kernel before has ended. Sequences of a few queries: flash_few.cuh.
#pragma once
#include "attention/flash_decode.cuh"
#include "common/sm90.cuh"

namespace vx::flash {

constexpr int kStreamThreads = 320;

// A block lies in shared memory as the copy engine puts it: box after box, in each 64 columns after another, rows of
// 128 bytes whose 16-byte chunks are exchanged as in chunk_at. rows: of a box, a power of two from 8 on.
template <int WIDTH>
__device__ __forceinline__ int boxed_at(int row, int chunk, int rows) {
  return (row & -rows) * (WIDTH * 2) + ((chunk >> 3) * rows + (row & (rows - 1))) * 128 + ((chunk ^ row) & 7) * 16;
}

// A sequence, or one of its segments, and one head of its keys, of which a block has KEYS.
template <int KEYS>
struct Item {
  int sequence, split, head, row_tile, token, lo, hi, last, blocks;
  __device__ __forceinline__ Item(const Args& a, const int* until, int item, int heads) {
    const int which = item / heads, rest = item % heads;
    head = rest % a.hk, row_tile = rest / a.hk;
    sequence = which, split = 0;
    if (a.partial) {
      sequence = 0;
      for (int step = a.sequences > 1 ? kMostSplit / 2 : 0; step; step /= 2)
        if (until[sequence + step - 1] <= which) sequence += step;
    }
    const Sight sight(a, sequence);
    token = sight.token, lo = sight.lo, hi = sight.hi;
    if (a.partial) {
      split = which - (sequence ? until[sequence - 1] : 0) + sight.first_segment(a.segment);
      lo = max(lo, split * a.segment), hi = min(hi, (split + 1) * a.segment);
    }
    last = (hi - 1) / KEYS;
    blocks = token >= 0 && hi > lo ? last - lo / KEYS + 1 : 0;
  }
  // The first block without keys that the kernel before may still be writing.
  __device__ __forceinline__ int first_settled() const { return 1; }
  __device__ __forceinline__ int* ready(const Args& a) const {
    return ready_at(a, sequence, split, row_tile, head);
  }
};

template <int D, int DV, int ROWS, int RING = 32 / ROWS, int SPLIT = kMostSplit>
struct StreamShared {
  using Item = flash::Item<keys_of(D)>;
  static constexpr int kKeys = keys_of(D);
  static constexpr int kSlot = kKeys * (D > DV ? D : DV) * 2;
  static constexpr int kSlots = (192 << 10) / kSlot;
  static_assert(kSlots % 2 == 0);  // so that a slot holds keys only, or values only: nobody waits for what another fills
  static constexpr int kRing = RING;  // blocks of probabilities between those who score and who carry
  alignas(1024) uint8_t slots[kSlots][kSlot];
  alignas(16) float probabilities[kRing][ROWS][kKeys + 8];
  alignas(16) float high[kRing][ROWS], kept[kRing][ROWS];  // the maximum so far, and what is left of what was before it
  float tops[2][4][ROWS];  // of a quarter of a block's keys
  uint64_t full[kSlots], empty[kSlots], scored[kRing], taken[kRing];
  static constexpr int kAhead = 8;  // items that who fetches may be ahead of who carries
  int next[kAhead];
  uint64_t named[kAhead], heard[kAhead];
  int until[SPLIT];  // segments of the sequences up to each, where segments are items
};

// How many segments there are; fills until where there are several sequences. All threads call it.
__device__ __forceinline__ int count_segments(const Args& a, int* until) {
  if (a.sequences == 1) return Sight(a, 0).segments(a.segment);
  constexpr int kEach = kMostSplit / 128;
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32;
  int mine[kEach], sum = 0, before = 0;
  if (warp < 4) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const int sequence = tid * kEach + i;
      sum += sequence < a.sequences ? Sight(a, sequence).segments(a.segment) : 0;
      mine[i] = sum;
    }
    before = sum;
    for (int d = 1; d < 32; d *= 2) {
      const int x = __shfl_up_sync(0xffffffffu, before, d);
      before += lane >= d ? x : 0;
    }
    if (lane == 31) until[warp] = before;
  }
  __syncthreads();
  int earlier = 0;
  for (int w = 0; w < warp && w < 4; ++w) earlier += until[w];
  const int count = until[0] + until[1] + until[2] + until[3];
  __syncthreads();
  if (warp < 4) {
#pragma unroll
    for (int i = 0; i < kEach; ++i) until[tid * kEach + i] = earlier + before - sum + mine[i];
  }
  __syncthreads();
  return count;
}

__device__ __forceinline__ void copy_pages(uint32_t to, const CUtensorMap& map, int row, int head, int page, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %2, %4, %5}], [%6];"
      ::"r"(to),
      "l"(&map), "r"(0), "r"(row), "r"(head), "r"(page), "r"(bar)
      : "memory");
}

__device__ __forceinline__ void prefetch(const void* x) { asm volatile("prefetch.global.L2 [%0];" ::"l"(x)); }

// What the first item looks at first, on its way into the L2 cache: 1,024 pages from where they probably begin. Nothing
// has a value yet, so nobody needs to have written it.
__device__ __forceinline__ void prefetch_places(const Args& a, int heads) {
  const int lane = threadIdx.x % 32, which = blockIdx.x / heads;
  const bool split = a.partial && a.sequences == 1;
  const int sequence = split ? 0 : which;
  if (sequence >= a.sequences) return;
  const int slot = (split ? which * (a.segment / a.page_size) : 0) + lane * 32;
  if (slot < a.keys / a.page_size) prefetch(a.table + sequence * a.table_row + slot);
  if (lane == 0) prefetch(a.q_at + sequence), prefetch(a.k_at + sequence);
}

__device__ __forceinline__ void arrive_for_warp(uint32_t bar) {
  __syncwarp();
  if (threadIdx.x % 32 == 0)
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(bar) : "memory");
}

__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  sm90::wait_for_kernel_before();
#endif
}

// The items of a thread block, as one of its warps meets them. The first has the block's own number. Those after it are
// dealt out in turn or, where there is a counter, taken by whoever comes to it: the warp that fetches keys asks for the next
// one before its last loads, and names it to the other nine. Behind each item follows one request, and as many requests as
// there are items turn the counter back to 0.
template <class Shared>
struct Turns {
  const Args& a;
  Shared& s;
  const int items;
  int item = blockIdx.x;
  uint32_t answer = 0, turn = 0;
  __device__ __forceinline__ Turns(const Args& a, Shared& s, int items) : a(a), s(s), items(items) {}
  __device__ __forceinline__ bool more() const { return item < items; }

  __device__ __forceinline__ void next() {
    if (!a.counter) {
      item += gridDim.x;
      return;
    }
    const uint32_t at = turn % Shared::kAhead;
    barrier_wait(shared_address(&s.named[at]), turn++ / Shared::kAhead & 1);
    item = s.next[at];
    arrive_for_warp(shared_address(&s.heard[at]));
  }

  __device__ __forceinline__ void ask() {
    if (a.counter && threadIdx.x % 32 == 0) answer = atomicInc(a.counter, items - 1);
  }
  __device__ __forceinline__ void name_next() {
    if (!a.counter) {
      item += gridDim.x;
      return;
    }
    const uint32_t at = turn % Shared::kAhead, round = turn++ / Shared::kAhead;
    if (round) barrier_wait(shared_address(&s.heard[at]), (round - 1) & 1);
    item = gridDim.x + __shfl_sync(~0u, answer, 0);
    if (threadIdx.x % 32 == 0) s.next[at] = item;
    arrive_for_warp(shared_address(&s.named[at]));
  }
};

// What one warp does: fetch the keys (HALF 0) or the values (HALF 1) of all items. Units of loads are K and V of the
// blocks in turn; unit u lies in slot u % kSlots.
template <int HALF, int WIDTH, class Shared>
__device__ __forceinline__ void fetch(const Args& a, Shared& s, const CUtensorMap& map, int items, int heads) {
  constexpr int kKeys = Shared::kKeys;
  const int lane = threadIdx.x % 32;
  const int boxes = kKeys / a.box, shift = __ffs(boxes) - 1, each = 32 >> shift;  // blocks that one look serves
  uint32_t unit = HALF;
  bool waited = !a.settled;
  Turns<Shared> turns(a, s, items);
  for (; turns.more(); HALF == 0 ? turns.name_next() : turns.next()) {
    const typename Shared::Item it(a, s.until, turns.item, heads);
    const int32_t* table = a.table + it.sequence * a.table_row;
    // The page of this lane's box, of blocks n and on, and the place there; -1 for a box of which no key is seen.
    auto look_up = [&](int n) -> int2 {
      const int key = (it.last - n - (lane >> shift)) * kKeys + (lane & (boxes - 1)) * a.box;
      if (n + (lane >> shift) >= it.blocks || key >= it.hi || key + a.box <= it.lo) return {-1, -1};
      const int slot = key / a.page_size;
      return {table[slot], key - slot * a.page_size};
    };
    const auto bring = [&](int n, int2 from) {  // from: of the look that serves this block
      const uint32_t slot = (unit + 2 * n) % Shared::kSlots, turn = (unit + 2 * n) / Shared::kSlots;
      const uint32_t bar = shared_address(&s.full[slot]);
      if (turn) barrier_wait(shared_address(&s.empty[slot]), (turn - 1) & 1);
      // Boxes that nobody sees are left out: the copy engine takes longer for what is not there than for what is. Scores of
      // what lies in their places are not looked at, and values there are made zeros by those who carry.
      const bool mine = lane >> shift == (n & (each - 1)) && from.y >= 0;
      const int count = __popc(__ballot_sync(~0u, mine));
      if (lane == 0) barrier_expect(bar, count * a.box * WIDTH * 2);
      __syncwarp();
      if (mine)
        copy_pages(shared_address(s.slots[slot]) + (lane & (boxes - 1)) * a.box * WIDTH * 2, map, from.y, it.head, from.x, bar);
    };
    int2 at{-1, -1}, next = look_up(0);
    int early = 1, fresh = 1;
    if (!waited) {
      fresh = it.first_settled();
      early = min(min(each, Shared::kSlots / 2), it.blocks);
      for (int n = fresh; n < early; ++n) bring(n, next);
      wait_for_kernel_before();
      waited = true;
    }
    const int last_but_one = max(it.blocks - 2, 0);
    for (int n = 0; n < it.blocks; ++n) {
      if ((n & (each - 1)) == 0) {
        at = next;
        if (n + each < it.blocks) next = look_up(n + each);
      }
      if (HALF == 0 && n == last_but_one) turns.ask();
      if (n < fresh || n >= early) bring(n, at);
    }
    if (HALF == 0 && it.blocks == 0) turns.ask();
    unit += 2 * it.blocks;
  }
}

// Four warps: scores of a quarter of a block's keys each, -inf where a key is not seen; then, with the maximum of all four,
// their probabilities. A maximum is the same in any order.
template <class T, int D, int ROWS, class Shared>
__device__ __forceinline__ void score(const Args& a, Shared& s, int warp, int items, int heads) {
  constexpr int kKeys = Shared::kKeys, kEach = kKeys / 4;  // of a block, and of a warp
  constexpr int kParts = kEach / (ROWS == 8 ? 16 : 8);     // products of a warp
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  uint32_t unit = 0, done = 0;
  for (Turns<Shared> turns(a, s, items); turns.more(); turns.next()) {
    const typename Shared::Item it(a, s.until, turns.item, heads);
    if (it.blocks == 0) continue;
    // the query's fragments; rows beyond the group are zeros, and nothing of theirs is stored
    uint32_t qf[D / 16][4];
    const int row0 = it.row_tile * kDecodeRows + g;
    const char* q = static_cast<const char*>(a.q) + (int64_t(it.token) * a.q_row + int64_t(it.head * a.group) * a.q_head) * 2;
#pragma unroll
    for (int kk = 0; kk < D / 16; ++kk)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int row = row0 + (i & 1) * 8, d = kk * 16 + (i >> 1) * 8 + t * 2;
        const bool there = row < a.group && (ROWS > 8 || !(i & 1));
        qf[kk][i] = there ? *reinterpret_cast<const uint32_t*>(q + (row * a.q_head + d) * 2) : 0u;
      }
    float m[2] = {-INFINITY, -INFINITY};  // of the two rows that this thread has scores of
    for (int n = 0; n < it.blocks; ++n, unit += 2, ++done) {  // order: blocks of keys from the last to the first
      const int key0 = (it.last - n) * kKeys;
      const uint32_t slot = unit % Shared::kSlots, base = shared_address(s.slots[slot]);
      barrier_wait(shared_address(&s.full[slot]), unit / Shared::kSlots & 1);
      float c[kParts][4] = {};
      if constexpr (ROWS == 8) {  // 16 keys by 8 rows
#pragma unroll
        for (int kk = 0; kk < D / 16; ++kk)  // order: D ascending
#pragma unroll
          for (int j = 0; j < kParts; ++j) {
            uint32_t keys[4];
            ldmatrix4(keys, base + boxed_at<D>(warp * kEach + j * 16 + lane % 16, kk * 2 + lane / 16, a.box));
            mma<T>(c[j], keys, qf[kk][0], qf[kk][2]);
          }
      } else {  // 16 rows by 8 keys
#pragma unroll
        for (int kk = 0; kk < D / 32; ++kk)  // order: D ascending
#pragma unroll
          for (int j = 0; j < kParts; ++j) {
            uint32_t b[4];
            ldmatrix4(b, base + boxed_at<D>(warp * kEach + j * 8 + lane % 8, kk * 4 + lane / 8, a.box));
            mma<T>(c[j], qf[2 * kk], b[0], b[1]);
            mma<T>(c[j], qf[2 * kk + 1], b[2], b[3]);
          }
      }
      // c[j][e] is of this key of the block, and this row
      const auto key_of = [&](int j, int e) {
        return warp * kEach + (ROWS == 8 ? j * 16 + e / 2 * 8 + g : j * 8 + t * 2 + e % 2);
      };
      const auto row_of = [&](int e) { return ROWS == 8 ? t * 2 + e % 2 : e / 2 * 8 + g; };
      if (key0 < it.lo || key0 + kKeys > it.hi) {
#pragma unroll
        for (int j = 0; j < kParts; ++j)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            if (key0 + key_of(j, e) < it.lo || key0 + key_of(j, e) >= it.hi) c[j][e] = -INFINITY;
      }
      const auto which = [](int e) { return ROWS == 8 ? e % 2 : e / 2; };  // of this thread's two rows
      const int rows[2] = {row_of(0), row_of(3)};
      float top[2] = {-INFINITY, -INFINITY}, kept[2], shift[2];
#pragma unroll
      for (int j = 0; j < kParts; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) top[which(e)] = fmaxf(top[which(e)], c[j][e]);
#pragma unroll
      for (int d = ROWS == 8 ? 4 : 1; d < (ROWS == 8 ? 32 : 4); d *= 2)
#pragma unroll
        for (int i = 0; i < 2; ++i) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], d));
      const bool first = ROWS == 8 ? g == 0 : t == 0;  // of those who have the same two rows
      auto& tops = s.tops[done & 1];  // of two, since who is a block ahead writes while others still read
      if (first) tops[warp][rows[0]] = top[0], tops[warp][rows[1]] = top[1];
      asm volatile("bar.sync 2, 128;" ::: "memory");
      // Only now, when nothing of the products is left to do: at once behind them the compiler puts this before the last of
      // them, so that loads of fragments were still under way, and the keys of a later block came over some of them.
      arrive_for_warp(shared_address(&s.empty[slot]));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int row = rows[i];
        const float top_now = fmaxf(fmaxf(tops[0][row], tops[1][row]), fmaxf(tops[2][row], tops[3][row]));
        const float high_now = fmaxf(top_now, m[i]), base = finite_or_zero(high_now);
        shift[i] = __fmul_rn(base, a.scale);
        kept[i] = exp2_fast(__fmul_rn(__fsub_rn(m[i], base), a.scale));
        m[i] = high_now;
      }
      const uint32_t ring = done % Shared::kRing, turn = done / Shared::kRing;
      if (turn) barrier_wait(shared_address(&s.taken[ring]), (turn - 1) & 1);
#pragma unroll
      for (int j = 0; j < kParts; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e)
          s.probabilities[ring][row_of(e)][key_of(j, e)] = exp2_fast(__fmaf_rn(c[j][e], a.scale, -shift[which(e)]));
      if (warp == 0 && first)
#pragma unroll
        for (int i = 0; i < 2; ++i) s.high[ring][rows[i]] = m[i], s.kept[ring][rows[i]] = kept[i];
      arrive_for_warp(shared_address(&s.scored[ring]));
      if (a.segment && !a.partial && key0 % a.segment == 0) m[0] = m[1] = -INFINITY;  // where a segment is joined
    }
  }
}

// Of the rows of a tile a quarter of V's columns, which a warp carries. Eight rows are the columns of the products, or half
// of each product would be nobody's; sixteen are their rows. Either way an element has the same sum.
template <class T, int DV, int ROWS>
struct Columns {
  static constexpr bool kTurned = ROWS == 8;
  static constexpr int kTiles = DV / 32, R = ROWS / 8;  // eights of columns; rows of a thread where they are rows
  float v[kTurned ? kTiles / 2 : kTiles][4];

  // What each thread knows of its rows, as its elements need it: element e of a product's takes f[kTurned ? e % 2 : e / 2].
  static __device__ __forceinline__ void spread(const float (&x)[R], float (&f)[2]) {
#pragma unroll
    for (int i = 0; i < 2; ++i) f[i] = kTurned ? __shfl_sync(~0u, x[0], threadIdx.x % 4 * 8 + i * 4) : x[i % R];
  }
  template <class F>
  __device__ __forceinline__ void each(F f) {  // of element, row
#pragma unroll
    for (auto& part : v)
#pragma unroll
      for (int e = 0; e < 4; ++e) f(part[e], kTurned ? e % 2 : e / 2);
  }
  __device__ __forceinline__ void clear() {
    each([](float& x, int) { x = 0.f; });
  }

  // order: keys of a block ascending
  template <int SIXTEENS, class Place>
  __device__ __forceinline__ void multiply(const uint32_t (&p)[SIXTEENS][4], Place place) {
#pragma unroll
    for (int kk = 0; kk < SIXTEENS; ++kk)
#pragma unroll
      for (int j = 0; j < kTiles; j += 2) {
        uint32_t b[4];
        ldmatrix4_trans(b, place(kk, j));
        if constexpr (kTurned) {
          const uint32_t columns[4] = {b[0], b[2], b[1], b[3]};
          mma<T>(v[j / 2], columns, p[kk][0], p[kk][2]);
        } else {
          mma<T>(v[j], p[kk], b[0], b[1]);
          mma<T>(v[j + 1], p[kk], b[2], b[3]);
        }
      }
  }

  // f(row, column, two neighbours)
  template <class F>
  __device__ __forceinline__ void pairs(F f) const {
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    if constexpr (kTurned) {
      const bool odd = g % 2;  // neighbours in columns exchange what the other's row wants
#pragma unroll
      for (int j = 0; j < kTiles; ++j) {
        const float low = v[j / 2][j % 2 * 2], high = v[j / 2][j % 2 * 2 + 1];
        const float other = __shfl_xor_sync(~0u, odd ? low : high, 4);
        f(t * 2 + odd, j * 8 + (g & ~1), odd ? other : low, odd ? high : other);
      }
    } else {
#pragma unroll
      for (int j = 0; j < kTiles; ++j)
#pragma unroll
        for (int r = 0; r < 2; ++r) f(g + 8 * r, j * 8 + t * 2, v[j][2 * r], v[j][2 * r + 1]);
    }
  }
};

// Four warps: sums and output, each of a quarter of V's columns.
template <class T, int DV, int ROWS, class Shared>
__device__ __forceinline__ void carry(const Args& a, Shared& s, int warp, int items, int heads) {
  constexpr int kKeys = Shared::kKeys;
  constexpr int kTiles = DV / 32;  // columns of a warp, in eights
  constexpr int R = ROWS / 8;      // rows of a thread
  static_assert((kTiles & (kTiles - 1)) == 0);
  const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
  const uint32_t mine = boxed_at<DV>(lane % 16, warp * kTiles + lane / 16, a.box);
  uint32_t unit = 1, done = 0;
  for (Turns<Shared> turns(a, s, items); turns.more(); turns.next()) {
    const typename Shared::Item it(a, s.until, turns.item, heads);
    if (it.token < 0) continue;
    float m[R], l[R], high[R], all[R];  // the latter two, and out, of segments that are done
    Columns<T, DV, ROWS> acc, out;
    acc.clear(), out.clear();
#pragma unroll
    for (int r = 0; r < R; ++r) high[r] = -INFINITY, l[r] = all[r] = 0.f;

    for (int n = 0; n < it.blocks; ++n, unit += 2, ++done) {  // order: blocks of keys from the last to the first
      const int key0 = (it.last - n) * kKeys;
      const uint32_t ring = done % Shared::kRing;
      barrier_wait(shared_address(&s.scored[ring]), done / Shared::kRing & 1);
      float2 x[R][kKeys / 8];
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j)
          x[r][j] = *reinterpret_cast<const float2*>(&s.probabilities[ring][g + 8 * r][j * 8 + t * 2]);
      uint32_t p[kKeys / 16][4] = {};
      float kept[R], factor[2];
#pragma unroll
      for (int r = 0; r < R; ++r) kept[r] = s.kept[ring][g + 8 * r], m[r] = s.high[ring][g + 8 * r];
#pragma unroll
      for (int i = 0; i < 2; ++i) factor[i] = s.kept[ring][acc.kTurned ? t * 2 + i : g + 8 * i];
      arrive_for_warp(shared_address(&s.taken[ring]));
#pragma unroll
      for (int r = 0; r < R; ++r)
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {  // order: a partial sum takes its keys ascending
          l[r] = j == 0 ? __fmaf_rn(l[r], kept[r], x[r][j].x) : __fadd_rn(l[r], x[r][j].x);
          l[r] = __fadd_rn(l[r], x[r][j].y);
          p[j / 2][(j & 1) * 2 + r] = pack<T>(x[r][j].x, x[r][j].y);
        }

      const uint32_t slot = unit % Shared::kSlots, base = shared_address(s.slots[slot]);
      barrier_wait(shared_address(&s.full[slot]), unit / Shared::kSlots & 1);
      if (key0 < it.lo || key0 + kKeys > it.hi) {  // boxes bring what is not seen along, and it may be anything
        constexpr int kChunks = DV / 32;           // of a warp's columns
        for (int i = lane; i < kKeys * kChunks; i += 32) {
          const int key = key0 + i / kChunks;
          if (key < it.lo || key >= it.hi)
            *reinterpret_cast<uint4*>(s.slots[slot] + boxed_at<DV>(i / kChunks, warp * kChunks + i % kChunks, a.box)) =
                uint4{};
        }
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
      }
      acc.each([&](float& x, int row) { x = __fmul_rn(x, factor[row]); });
      // boxed_at(kk * 16 + lane % 16, warp * kTiles + j + lane / 16) in parts: sixteen addresses of its own would be spilled
      acc.multiply(p, [&](int kk, int j) { return base + (mine ^ j * 16) + boxed_at<DV>(kk * 16, 0, a.box); });

      const bool cut = a.segment && !a.partial && n + 1 < it.blocks && key0 % a.segment == 0;
      if (n + 1 == it.blocks || cut) {
        float before[R], after[R], old[2], now[2];
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const float total = quad_sum(l[r]);
          if (a.partial || !a.segment) {
            high[r] = m[r], all[r] = total;
          } else {
            const Join join(high[r], m[r], a.scale);
            all[r] = join(all[r], total);
            before[r] = join.before, after[r] = join.after;
          }
          l[r] = 0.f;
        }
        if (a.partial || !a.segment) {
          out = acc;
        } else {
          out.spread(before, old), out.spread(after, now);
#pragma unroll
          for (int j = 0; j < sizeof(out.v) / sizeof(out.v[0]); ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
              const int row = out.kTurned ? e % 2 : e / 2;
              out.v[j][e] = Join(old[row], now[row])(out.v[j][e], acc.v[j][e]);
            }
        }
        acc.clear();
      }
      arrive_for_warp(shared_address(&s.empty[slot]));  // behind a branch, as score() says why
    }

    const int row0 = it.row_tile * kDecodeRows, column0 = warp * kTiles * 8;
    if (a.partial) {
      float* const to = a.partial + ((int64_t(it.sequence) * a.segments + it.split) * a.hk * a.group + it.head * a.group) * (DV + 2);
      if (warp == 0 && t == 0)
#pragma unroll
        for (int r = 0; r < R; ++r) {
          const int row = row0 + g + 8 * r;
          if (row < a.group) to[row * (DV + 2) + DV] = high[r], to[row * (DV + 2) + DV + 1] = all[r];
        }
      out.pairs([&](int row, int column, float x, float y) {
        if (row0 + row < a.group)
          *reinterpret_cast<float2*>(to + (row0 + row) * (DV + 2) + column0 + column) = make_float2(x, y);
      });
    } else {
      float factors[R], factor[2];
#pragma unroll
      for (int r = 0; r < R; ++r) {
        const int row = min(row0 + g + 8 * r, a.group - 1);
        factors[r] = Final(high[r], all[r], a.scale, a.sinks, it.head * a.group + row).factor;
      }
      out.spread(factors, factor);
      out.each([&](float& x, int row) { x = Final::apply(x, factor[row]); });
      T* const to = static_cast<T*>(a.out) + (int64_t(it.token) * a.hk * a.group + it.head * a.group) * DV;
      out.pairs([&](int row, int column, float x, float y) {
        if (row0 + row < a.group)
          *reinterpret_cast<uint32_t*>(to + (row0 + row) * DV + column0 + column) = pack<T>(x, y);
      });
    }
    if (a.ready) {
      __threadfence();
      __syncwarp();
      if (lane == 0) asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(it.ready(a)) : "memory");
    }
  }
}

template <class Shared>
__device__ __forceinline__ void begin_stream(Shared& s, int tid) {
  if (tid < Shared::kSlots) {
    barrier_init(shared_address(&s.full[tid]), 1);
    barrier_init(shared_address(&s.empty[tid]), 4);
  }
  if (tid < Shared::kRing) {
    barrier_init(shared_address(&s.scored[tid]), 4);
    barrier_init(shared_address(&s.taken[tid]), 4);
  }
  if (tid < Shared::kAhead) {
    barrier_init(shared_address(&s.named[tid]), 1);
    barrier_init(shared_address(&s.heard[tid]), 9);
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

template <class T, int D, int DV, int ROWS>
__global__ void __launch_bounds__(kStreamThreads, 1)
    stream_kernel(const Args a, const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map) {
#ifdef VX_FLASH_DEVICE
  using Shared = StreamShared<D, DV, ROWS>;
  extern __shared__ __align__(1024) uint8_t raw[];
  if (shared_address(raw) % 1024) __trap();  // where the copy engine would exchange other chunks
  auto& s = *reinterpret_cast<Shared*>(raw);
  const int tid = threadIdx.x, warp = tid / 32;
  begin_stream(s, tid);
  const int heads = a.hk * ((a.group + kDecodeRows - 1) / kDecodeRows);
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  if (warp == 8) prefetch_places(a, heads);
  if (tid == 0) sm90::prefetch_map(&k_map), sm90::prefetch_map(&v_map);
#endif
  __syncthreads();
  if (!a.settled) wait_for_kernel_before();
  const int items = (a.partial ? count_segments(a, s.until) : a.sequences) * heads;
  if (a.settled && warp < 8) wait_for_kernel_before();
  if (warp < 4) {
    if (a.ready) {  // nothing is ready yet; only then may who waits for it begin
      if (tid == 0) {
        for (int item = blockIdx.x; item < items; item += gridDim.x) *typename Shared::Item(a, s.until, item, heads).ready(a) = 0;
        __threadfence();
      }
      asm volatile("bar.sync 1, 128;" ::: "memory");
    }
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    sm90::let_kernel_after_start();
#endif
    carry<T, DV, ROWS>(a, s, warp, items, heads);
  } else if (warp < 8) {
    score<T, D, ROWS>(a, s, warp - 4, items, heads);
  } else if (warp == 8) {
    fetch<0, D>(a, s, k_map, items, heads);
  } else {
    fetch<1, DV>(a, s, v_map, items, heads);
  }
#endif
}

}  // namespace vx::flash
