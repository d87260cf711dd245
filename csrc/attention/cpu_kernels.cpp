// Attention on the CPU: one forward for training, prefill chunks and decode (they differ in where a key lies, and in
// nothing else), and a backward that recomputes the probabilities from the saved log-sum-exp.
//
// A row is one query head at one position. Rows of a group share their keys, so they are tiled together, position by
// position, head by head; no tile reaches a row's bits.
#include "attention/kernels.h"
#include "attention/tile.h"
#include "common/parallel.h"

namespace vx::VEXACT_ISA {
namespace {

constexpr int64_t kRowsPerChunk = 96;  // rows of queries that the backward holds against one block of keys

// One aligned piece of the thread's scratch after another.
struct Arena {
  char* next;
  explicit Arena(int64_t bytes) : next(static_cast<char*>(scratch(0, bytes))) {}
  template <class T>
  static int64_t bytes(int64_t n) {
    return (n * int64_t(sizeof(T)) + 63) / 64 * 64;
  }
  template <class T>
  T* take(int64_t n) {
    T* p = reinterpret_cast<T*>(next);
    next += bytes<T>(n);
    return p;
  }
};

// Keys that the query at place p of its sequence sees: [begin, end).
struct Visible {
  int64_t begin, end;
};
VX_INLINE Visible visible(const AttentionRule& rule, int64_t p, int64_t k_len) {
  int64_t end = rule.causal ? p + 1 : k_len, begin = rule.window ? p + 1 - rule.window : 0;
  return {begin > 0 ? begin : 0, end > 0 ? end : 0};
}

VX_INLINE Span clip(Visible keys, int64_t k0, int64_t n) {
  const int64_t b = keys.begin - k0, e = keys.end - k0;
  return {int(b < 0 ? 0 : b > n ? n : b), int(e < 0 ? 0 : e > n ? n : e)};
}

// Where the keys of a block lie: contiguous rows, or the pages of a block table.
template <class T>
void locate(const AttentionKv& kv, const AttentionTask& task, int64_t k0, Span lanes, const T** k, const T** v) {
  const T* k_base = static_cast<const T*>(kv.k) + task.kv_head * kv.k_head_stride;
  const T* v_base = static_cast<const T*>(kv.v) + task.kv_head * kv.v_head_stride;
  if (!kv.table) {
    for (int i = lanes.begin; i < lanes.end; ++i) {
      const int64_t key = task.k_begin + k0 + i;
      k[i] = k_base + key * kv.k_stride;
      v[i] = v_base + key * kv.v_stride;
    }
    return;
  }
  const int32_t* table = kv.table + task.sequence * kv.table_stride;
  int64_t page = (k0 + lanes.begin) / kv.page_size, offset = (k0 + lanes.begin) % kv.page_size;
  for (int i = lanes.begin; i < lanes.end; ++page, offset = 0)
    for (; i < lanes.end && offset < kv.page_size; ++i, ++offset) {
      k[i] = k_base + table[page] * kv.k_page_stride + offset * kv.k_stride;
      v[i] = v_base + table[page] * kv.v_page_stride + offset * kv.v_stride;
    }
}

// Loads a byte of every cache line of these keys' heads, in the order of addresses: pages and heads are scattered, and
// the tiles read them sixteen rows at a time, so the hardware's prefetcher follows only if someone walks ahead of them.
// Decode from memory, 16 sequences of 500 keys on a Zen 4: 1.2 to 1.5 times as fast. Prefetch hints did nothing there.
template <class T>
VX_INLINE void walk(const T* const* rows, Span keys, int64_t heads, int64_t head_stride, int64_t n) {
  const int64_t bytes = n * int64_t(sizeof(T));
  for (int i = keys.begin; i < keys.end; ++i)
    for (int64_t h = 0; h < heads; ++h)
      for (int64_t byte = 0; byte < bytes; byte += 64)
        (void)*(reinterpret_cast<const volatile char*>(rows[i] + h * head_stride) + byte);
}

VX_INLINE F16 scaled(const AttentionRule& rule, F16 score) {
  F16 s = score * set1(rule.scale);
  if (rule.softcap > 0) s = set1(rule.softcap) * tanh(s / set1(rule.softcap));
  return s;
}

VX_INLINE F16 only(Span lanes, int vector, F16 yes, F16 no) {  // yes inside the range, no outside
  F16 r = select(lanes_below(lanes.end - vector * kLanes), yes, no);
  return lanes.begin > vector * kLanes ? select(lanes_below(lanes.begin - vector * kLanes), no, r) : r;
}

VX_INLINE float finite_or_zero(float m) { return m == -INFINITY ? 0.0f : m; }  // so that -inf - -inf is never formed

// The running maximum, sum and output of every row of a task.
struct Running {
  float *m, *l, *o;
  uint8_t* seen;  // whether the row has seen a key
};

// s[mr][kBlock] raw scores -> probabilities against the new maximum; factor[r] is what the old sums are worth.
VX_INLINE void soften(const AttentionRule& rule, int mr, float* s, const Span* span, float* m, float* l, uint8_t* seen,
                      float* factor) {
  alignas(64) float old[kLanes], fresh[kLanes];
  for (int r = 0; r < kLanes; ++r) old[r] = fresh[r] = 0.0f;
  for (int r = 0; r < mr; ++r) {
    old[r] = m[r];
    if (span[r].empty()) {
      fresh[r] = finite_or_zero(m[r]);
      continue;
    }
    F16 top = set1(-INFINITY);
    for (int v = 0; v < kVectors; ++v) {
      F16 x = set1(-INFINITY);
      if (span[r].begin < (v + 1) * kLanes && span[r].end > v * kLanes)
        x = only(span[r], v, scaled(rule, load(s + r * kBlock + v * kLanes)), x);
      top = max(x, top);  // a NaN score leaves the maximum alone and reaches the sums by itself
      store(s + r * kBlock + v * kLanes, x);
    }
    const float high = max_lanes(top);
    m[r] = high > m[r] ? high : m[r];
    fresh[r] = finite_or_zero(m[r]);
  }
  store(factor, exp(load(old) - load(fresh)));
  for (int r = 0; r < mr; ++r) {
    if (span[r].empty()) continue;
    F16 p[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      p[v] = exp(load(s + r * kBlock + v * kLanes) - set1(fresh[r]));
      store(s + r * kBlock + v * kLanes, p[v]);
    }
    // order: a block's probabilities are summed as two pairs of vectors, then over lanes
    l[r] = std::fma(l[r], factor[r], sum_lanes((p[0] + p[1]) + (p[2] + p[3])));
    seen[r] = 1;
  }
}
static_assert(kVectors == 4);

// order: a segment's sums join those of the segments before it, ascending.
void merge(int64_t rows, int64_t width, Running& segment, Running& total) {
  for (int64_t r = 0; r < rows; ++r) {
    if (!segment.seen[r]) continue;
    float *o = segment.o + r * width, *sum = total.o + r * width;
    if (!total.seen[r]) {
      total.m[r] = segment.m[r], total.l[r] = segment.l[r];
      for (int64_t i = 0; i < width; i += kLanes) store(sum + i, load(o + i));
    } else {
      const float m = segment.m[r] > total.m[r] ? segment.m[r] : total.m[r], at = finite_or_zero(m);
      const float x = exp(total.m[r] - at), y = exp(segment.m[r] - at);
      total.m[r] = m;
      total.l[r] = std::fma(total.l[r], x, segment.l[r] * y);
      for (int64_t i = 0; i < width; i += kLanes)
        store(sum + i, fma(load(sum + i), set1(x), load(o + i) * set1(y)));
    }
    total.seen[r] = 1;
    segment.seen[r] = 0;
    segment.m[r] = -INFINITY;
    segment.l[r] = 0.0f;
    for (int64_t i = 0; i < width; i += kLanes) store(o + i, zero());
  }
}

// One task: its rows against all their keys. State and q go by key-value head, then position, then head of the group.
template <class T>
void forward_task(const AttentionFwd& a, const AttentionTask& task) {
  const AttentionShape& shape = a.shape;
  const int64_t group = shape.hq / shape.hk, head_rows = task.positions * group, rows = task.kv_heads * head_rows;
  const int64_t dp = padded(shape.d), vp = padded(shape.dv);
  const bool segmented = a.rule.segment > 0;
  const int64_t states = segmented ? 2 : 1;
  Arena arena(Arena::bytes<float>(rows * dp) + states * (Arena::bytes<float>(rows * vp) + Arena::bytes<uint8_t>(rows)) +
              2 * states * Arena::bytes<float>(rows) + Arena::bytes<float>(shape.d * kBlock) +
              Arena::bytes<float>(kBlock * vp));
  float* q = arena.take<float>(rows * dp);
  Running running[2];
  for (int i = 0; i < states; ++i) {
    Running& s = running[i];
    s = {arena.take<float>(rows), arena.take<float>(rows), arena.take<float>(rows * vp), arena.take<uint8_t>(rows)};
    std::memset(s.l, 0, rows * sizeof(float));
    std::memset(s.o, 0, rows * vp * sizeof(float));
    std::memset(s.seen, 0, rows);
    for (int64_t r = 0; r < rows; ++r) s.m[r] = -INFINITY;
  }
  float* k_packed = arena.take<float>(shape.d * kBlock);
  float* v_packed = arena.take<float>(kBlock * vp);
  // f(row, its token, its head) for every row
  auto each_row = [&](auto f) {
    int64_t r = 0;
    for (int64_t h = task.kv_head; h < task.kv_head + task.kv_heads; ++h)
      for (int64_t p = 0; p < task.positions; ++p)
        for (int64_t g = 0; g < group; ++g) f(r++, task.q_begin + p, h * group + g);
  };
  each_row([&](int64_t r, int64_t token, int64_t head) {
    widen_row(static_cast<const T*>(a.q) + token * a.q_stride + head * a.q_head_stride, shape.d, q + r * dp);
  });

  const Visible first = visible(a.rule, task.first, task.k_len);
  const Visible last = visible(a.rule, task.first + task.positions - 1, task.k_len);
  const int64_t tiles = (head_rows + kTile - 1) / kTile;
  const bool direct = tiles <= 2 && shape.dv == vp;  // few rows: read V where it lies
  for (int64_t k0 = first.begin / kBlock * kBlock; k0 < last.end; k0 += kBlock) {
    if (segmented && k0 % a.rule.segment == 0) merge(rows, vp, running[0], running[1]);
    const Span lanes = clip({first.begin, last.end}, k0, kBlock);
    const T *k[kBlock], *v[kBlock];
    const float* v_rows[kBlock];
    locate(a.kv, task, k0, lanes, k, v);
    if (direct) {
      walk(k, lanes, task.kv_heads, a.kv.k_head_stride, shape.d);
      walk(v, lanes, task.kv_heads, a.kv.v_head_stride, shape.dv);
    }
    for (int64_t base = 0; base < rows; base += head_rows) {  // a key's heads lie side by side: read them together
      pack_transposed(k, lanes, shape.d, k_packed);
      if (!direct)
        for (int i = lanes.begin; i < lanes.end; ++i) {
          widen_row(v[i], shape.dv, v_packed + i * vp);
          v_rows[i] = v_packed + i * vp;
        }
      for (int64_t at = 0, left = tiles; left > 0; --left) {
        const int mr = int((head_rows - at + left - 1) / left);
        const int64_t r0 = base + at;
        Span span[kTile], used{kBlock, 0};
        for (int r = 0; r < mr; ++r) {
          span[r] = clip(visible(a.rule, task.first + (at + r) / group, task.k_len), k0, kBlock);
          if (span[r].empty()) continue;
          used.begin = span[r].begin < used.begin ? span[r].begin : used.begin;
          used.end = span[r].end > used.end ? span[r].end : used.end;
        }
        if (!used.empty()) {
          alignas(64) float s[kTile * kBlock], factor[kLanes];
          const Running& state = running[0];
          scores(mr, q + r0 * dp, dp, k_packed, shape.d, s, used.begin / kLanes, (used.end + kLanes - 1) / kLanes);
          soften(a.rule, mr, s, span, state.m + r0, state.l + r0, state.seen + r0, factor);
          if (direct)
            accumulate<kBlock, 1>(mr, state.o + r0 * vp, vp, factor, s, v, span);
          else
            accumulate<kBlock, 1>(mr, state.o + r0 * vp, vp, factor, s, v_rows, span);
        }
        at += mr;
      }
      for (int i = lanes.begin; i < lanes.end; ++i) k[i] += a.kv.k_head_stride, v[i] += a.kv.v_head_stride;
    }
  }
  if (segmented) merge(rows, vp, running[0], running[1]);

  const Running& total = running[states - 1];
  each_row([&](int64_t r, int64_t token, int64_t head) {
    const int64_t at = token * shape.hq + head;
    T* out = static_cast<T*>(a.out) + at * shape.dv;
    float m = total.m[r], l = total.l[r], kept = 1.0f;
    if (a.sinks) {  // order: the sink joins the denominator last
      const float sink = a.sinks[head];
      m = m > sink ? m : sink;
      const float base = finite_or_zero(m);
      kept = exp(total.m[r] - base);
      l = std::fma(l, kept, exp(sink - base));
    }
    if (!total.seen[r]) kept = 0.0f, l = l > 0.0f ? l : 1.0f;  // no key at all: zeros
    for (int64_t i = 0; i < shape.dv; i += kLanes)
      store_lanes(out + i, (load(total.o + r * vp + i) * set1(kept)) / set1(l), shape.dv - i);
    if (a.lse) a.lse[at] = total.seen[r] || a.sinks ? m + log(l) : -INFINITY;
  });
}

// A chunk of query rows and a block of keys in fp32, as the backward needs them.
struct Chunk {
  int64_t rows, first;  // first: place of the first position
  float *q, *dout;      // [rows][dp], [rows][vp]
  float *lse, *delta;   // [rows]
  const float **q_rows, **dout_rows;
};
struct Block {
  int64_t k0;
  Span lanes;
  float *kt, *vt, *k;  // [d][kBlock], [dv][kBlock], [kBlock][dp]
  const float* k_rows[kBlock];
};

template <class T>
struct Backward {
  const AttentionBwd& a;
  const int64_t group = a.shape.hq / a.shape.hk;
  const int64_t dp = padded(a.shape.d), vp = padded(a.shape.dv);
  const int64_t chunk_rows = (kRowsPerChunk / group > 0 ? kRowsPerChunk / group : 1) * group;

  int64_t chunk_bytes() const {
    return Arena::bytes<float>(chunk_rows * dp) + Arena::bytes<float>(chunk_rows * vp) +
           2 * Arena::bytes<float>(chunk_rows) + 2 * Arena::bytes<float*>(chunk_rows);
  }
  int64_t block_bytes() const {
    return Arena::bytes<float>(a.shape.d * kBlock) + Arena::bytes<float>(a.shape.dv * kBlock) +
           Arena::bytes<float>(kBlock * dp);
  }
  void take(Arena& arena, Chunk& c) const {
    c.q = arena.take<float>(chunk_rows * dp), c.dout = arena.take<float>(chunk_rows * vp);
    c.lse = arena.take<float>(chunk_rows), c.delta = arena.take<float>(chunk_rows);
    c.q_rows = arena.take<const float*>(chunk_rows), c.dout_rows = arena.take<const float*>(chunk_rows);
  }
  void take(Arena& arena, Block& b) const {
    b.kt = arena.take<float>(a.shape.d * kBlock), b.vt = arena.take<float>(a.shape.dv * kBlock);
    b.k = arena.take<float>(kBlock * dp);
  }

  void load_chunk(const AttentionTask& task, int64_t position, int64_t positions, Chunk& c) const {
    c.rows = positions * group;
    c.first = task.first + position;
    for (int64_t r = 0; r < c.rows; ++r) {
      const int64_t token = task.q_begin + position + r / group, head = task.kv_head * group + r % group;
      const int64_t at = token * a.shape.hq + head;
      widen_row(static_cast<const T*>(a.q) + token * a.q_stride + head * a.q_head_stride, a.shape.d, c.q + r * dp);
      widen_row(static_cast<const T*>(a.dout) + at * a.shape.dv, a.shape.dv, c.dout + r * vp);
      c.lse[r] = a.lse[at], c.delta[r] = a.delta[at];
      c.q_rows[r] = c.q + r * dp, c.dout_rows[r] = c.dout + r * vp;
    }
  }

  void load_block(const AttentionTask& task, int64_t k0, Span lanes, bool natural, Block& b) const {
    b.k0 = k0, b.lanes = lanes;
    const T *k[kBlock], *v[kBlock];
    locate(a.kv, task, k0, lanes, k, v);
    pack_transposed(k, lanes, a.shape.d, b.kt);
    pack_transposed(v, lanes, a.shape.dv, b.vt);
    if (natural)
      for (int i = lanes.begin; i < lanes.end; ++i) {
        widen_row(k[i], a.shape.d, b.k + i * dp);
        b.k_rows[i] = b.k + i * dp;
      }
  }

  // p and ds of mr rows of a chunk against a block: [mr][kBlock], zero where a row does not see.
  VX_INLINE void probabilities(const Chunk& c, int64_t r0, int mr, const Block& b, const Span* span, Span used,
                               float* p, float* ds) const {
    const int first = used.begin / kLanes, last = (used.end + kLanes - 1) / kLanes;
    scores(mr, c.q + r0 * dp, dp, b.kt, a.shape.d, p, first, last);
    scores(mr, c.dout + r0 * vp, vp, b.vt, a.shape.dv, ds, first, last);
    for (int r = 0; r < mr; ++r) {
      const F16 lse = set1(c.lse[r0 + r]), delta = set1(c.delta[r0 + r]);
      for (int v = first; v < last; ++v) {
        float *p_at = p + r * kBlock + v * kLanes, *ds_at = ds + r * kBlock + v * kLanes;
        F16 s = load(p_at) * set1(a.rule.scale), slope = set1(1.0f);
        if (a.rule.softcap > 0) {
          const F16 t = tanh(s / set1(a.rule.softcap));
          s = set1(a.rule.softcap) * t;
          slope = slope - t * t;
        }
        const F16 prob = exp(s - lse);
        F16 grad = prob * (load(ds_at) - delta);
        if (a.rule.softcap > 0) grad = grad * slope;
        store(p_at, only(span[r], v, prob, zero()));
        store(ds_at, only(span[r], v, grad, zero()));
      }
    }
  }

  // Calls f(r0, mr, span, used) for the tiles of a chunk that see some of the block.
  template <class F>
  VX_INLINE void each_tile(const AttentionTask& task, const Chunk& c, const Block& b, F f) const {
    for (int64_t r0 = 0, left = (c.rows + kTile - 1) / kTile; left > 0; --left) {
      const int mr = int((c.rows - r0 + left - 1) / left);
      Span span[kTile], used{kBlock, 0};
      for (int r = 0; r < mr; ++r) {
        span[r] = clip(visible(a.rule, c.first + (r0 + r) / group, task.k_len), b.k0, kBlock);
        if (span[r].empty()) continue;
        used.begin = span[r].begin < used.begin ? span[r].begin : used.begin;
        used.end = span[r].end > used.end ? span[r].end : used.end;
      }
      if (!used.empty()) f(r0, mr, span, used);
      r0 += mr;
    }
  }

  // The rows of a chunk that see a key.
  Span seeing(const Chunk& c, int64_t key) const {
    int64_t begin = a.rule.causal ? (key - c.first) * group : 0, end = c.rows;
    const int64_t leaves = (key + a.rule.window - c.first) * group;
    if (a.rule.window && leaves < end) end = leaves;
    return {int(begin < 0 ? 0 : begin > c.rows ? c.rows : begin), int(end < 0 ? 0 : end)};
  }

  float* dq_at(const AttentionTask& task, int64_t position, int64_t r) const {
    const int64_t token = task.q_begin + position + r / group, head = task.kv_head * group + r % group;
    return a.dq + (token * a.shape.hq + head) * a.shape.d;
  }

  void load_dq(const AttentionTask& task, int64_t position, const Chunk& c, float* dq) const {
    for (int64_t r = 0; r < c.rows; ++r) widen_row(dq_at(task, position, r), a.shape.d, dq + r * dp);
  }

  void store_dq(const AttentionTask& task, int64_t position, const Chunk& c, const float* dq, float scale) const {
    for (int64_t r = 0; r < c.rows; ++r) {
      float* to = dq_at(task, position, r);
      for (int64_t i = 0; i < a.shape.d; i += kLanes)
        store_lanes(to + i, load(dq + r * dp + i) * set1(scale), a.shape.d - i);
    }
  }

  // dq of a tile of queries: keys ascending.
  void queries(const AttentionTask& task) const {
    Arena arena(chunk_bytes() + block_bytes() + Arena::bytes<float>(chunk_rows * dp));
    Chunk c;
    Block b;
    take(arena, c), take(arena, b);
    float* dq = arena.take<float>(chunk_rows * dp);
    for (int64_t position = 0; position < task.positions; position += chunk_rows / group) {
      const int64_t left = task.positions - position;
      load_chunk(task, position, left < chunk_rows / group ? left : chunk_rows / group, c);
      std::memset(dq, 0, c.rows * dp * sizeof(float));
      const Visible low = visible(a.rule, c.first, task.k_len);
      const Visible high = visible(a.rule, c.first + c.rows / group - 1, task.k_len);
      for (int64_t k0 = low.begin / kBlock * kBlock; k0 < high.end; k0 += kBlock) {
        load_block(task, k0, clip({low.begin, high.end}, k0, kBlock), true, b);
        each_tile(task, c, b, [&](int64_t r0, int mr, const Span* span, Span used) {
          alignas(64) float p[kTile * kBlock], ds[kTile * kBlock];
          probabilities(c, r0, mr, b, span, used, p, ds);
          float one[kTile] = {1, 1, 1, 1, 1, 1};
          accumulate<kBlock, 1>(mr, dq + r0 * dp, dp, one, ds, b.k_rows, span);
        });
      }
      store_dq(task, position, c, dq, a.rule.scale);
    }
  }

  // dk and dv of a block of keys, or of all blocks of a sequence ascending, with dq beside them: five products where the
  // two passes take seven, in one task that nothing can share. order: for a key, queries ascending by position, then by
  // head within the group; for a query, keys ascending: the same sums in the same order as the two passes.
  void keys(const AttentionTask& task) const {
    const bool fused = task.block < 0;
    Arena arena(chunk_bytes() + block_bytes() + 2 * Arena::bytes<float>(chunk_rows * kBlock) +
                Arena::bytes<float>(kBlock * dp) + Arena::bytes<float>(kBlock * vp) +
                Arena::bytes<float>(chunk_rows * dp));
    Chunk c;
    Block b;
    take(arena, c), take(arena, b);
    float *p = arena.take<float>(chunk_rows * kBlock), *ds = arena.take<float>(chunk_rows * kBlock);
    float *dk = arena.take<float>(kBlock * dp), *dv = arena.take<float>(kBlock * vp);
    float* dq = arena.take<float>(chunk_rows * dp);
    const int64_t first = fused ? 0 : task.block * kBlock, end = fused ? task.k_len : first + 1;
    for (int64_t k0 = first; k0 < end; k0 += kBlock) {
      const int64_t keys = task.k_len - k0 < kBlock ? task.k_len - k0 : kBlock;
      std::memset(dk, 0, kBlock * dp * sizeof(float));
      std::memset(dv, 0, kBlock * vp * sizeof(float));
      load_block(task, k0, {0, int(keys)}, fused, b);
      // the positions that see some key of the block
      int64_t from = a.rule.causal ? k0 - task.first : 0, to = task.positions;
      const int64_t leaves = k0 + keys - 1 + a.rule.window - task.first;  // where the last key leaves the window
      if (a.rule.window && leaves < to) to = leaves;
      const int64_t step = chunk_rows / group;
      for (int64_t position = from > 0 ? from : 0; position < to; position += step) {
        load_chunk(task, position, to - position < step ? to - position : step, c);
        if (fused) load_dq(task, position, c, dq);
        each_tile(task, c, b, [&](int64_t r0, int mr, const Span* span, Span used) {
          probabilities(c, r0, mr, b, span, used, p + r0 * kBlock, ds + r0 * kBlock);
          float one[kTile] = {1, 1, 1, 1, 1, 1};
          if (fused) accumulate<kBlock, 1>(mr, dq + r0 * dp, dp, one, ds + r0 * kBlock, b.k_rows, span);
        });
        if (fused) store_dq(task, position, c, dq, 1.0f);
        for (int64_t j0 = 0, left = (keys + kTile - 1) / kTile; left > 0; --left) {
          const int mr = int((keys - j0 + left - 1) / left);
          Span span[kTile];
          for (int j = 0; j < mr; ++j) span[j] = seeing(c, k0 + j0 + j);
          float one[kTile] = {1, 1, 1, 1, 1, 1};
          accumulate<1, kBlock>(mr, dv + j0 * vp, vp, one, p + j0, c.dout_rows, span);
          for (float& f : one) f = 1.0f;
          accumulate<1, kBlock>(mr, dk + j0 * dp, dp, one, ds + j0, c.q_rows, span);
          j0 += mr;
        }
      }
      for (int64_t j = 0; j < keys; ++j) {
        const int64_t at = (task.k_begin + k0 + j) * a.shape.hk + task.kv_head;
        T *to_k = static_cast<T*>(a.dk) + at * a.shape.d, *to_v = static_cast<T*>(a.dv) + at * a.shape.dv;
        for (int64_t i = 0; i < a.shape.d; i += kLanes)
          store_lanes(to_k + i, load(dk + j * dp + i) * set1(a.rule.scale), a.shape.d - i);
        for (int64_t i = 0; i < a.shape.dv; i += kLanes) store_lanes(to_v + i, load(dv + j * vp + i), a.shape.dv - i);
      }
    }
    for (int64_t position = 0; fused && position < task.positions; position += chunk_rows / group) {
      const int64_t left = task.positions - position;
      c.rows = (left < chunk_rows / group ? left : chunk_rows / group) * group;
      load_dq(task, position, c, dq);
      store_dq(task, position, c, dq, a.rule.scale);
    }
  }

  void run() const {
    const T *out = static_cast<const T*>(a.out), *dout = static_cast<const T*>(a.dout);
    const int64_t dv = a.shape.dv;
    parallel_for(0, a.tokens * a.shape.hq, 1 + 16384 / (dv + 1), [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        F16 sum = zero();  // order: one 16-lane accumulator, chunks ascending, then the lane tree
        for (int64_t i = 0; i < dv; i += kLanes)
          sum = fma(load_lanes(dout + row * dv + i, dv - i), load_lanes(out + row * dv + i, dv - i), sum);
        a.delta[row] = sum_lanes(sum);
      }
    });
    if (a.dsinks) {
      for (int64_t head = 0; head < a.shape.hq; head += kLanes) {
        const int64_t lanes = a.shape.hq - head;
        const F16 sink = load_lanes(a.sinks + head, lanes);
        F16 sum = zero();
        for (int64_t t = 0; t < a.tokens; ++t) {  // order: tokens ascending
          const F16 p = exp(sink - load_lanes(a.lse + t * a.shape.hq + head, lanes));
          sum = sum - p * load_lanes(a.delta + t * a.shape.hq + head, lanes);
        }
        store_lanes(a.dsinks + head, sum, lanes);
      }
    }
    parallel_tasks(a.q_count, [&](int64_t i) { queries(a.q_tasks[i]); });
    parallel_tasks(a.k_count, [&](int64_t i) { keys(a.k_tasks[i]); });
  }
};

}  // namespace

void attention_fwd(const AttentionFwd& a) {
  if (a.shape.dtype == Dtype::f32)
    parallel_tasks(a.count, [&](int64_t i) { forward_task<float>(a, a.tasks[i]); });
  else
    parallel_tasks(a.count, [&](int64_t i) { forward_task<bf16>(a, a.tasks[i]); });
}

void attention_bwd(const AttentionBwd& a) {
  if (a.shape.dtype == Dtype::f32)
    Backward<float>{a}.run();
  else
    Backward<bf16>{a}.run();
}

}  // namespace vx::VEXACT_ISA
