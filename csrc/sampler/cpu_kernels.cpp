#include "sampler/kernels.h"

#include <algorithm>

#include "common/parallel.h"
#include "log_softmax/lse.h"
#include "sampler/draw.h"

namespace vx::VEXACT_ISA {
namespace {

// A token is allowed where it comes no later than (x, id) in the order (logit descending, id ascending) and its z is
// no less than z_min.
struct Cut {
  float x = -INFINITY;
  int64_t id = -1;
  float z_min = -INFINITY;
};

VX_INLINE Mask at_least(F16 a, F16 b) { return (a > b) | (a == b); }

VX_INLINE Mask allowed(const Cut& cut, F16 x, F16 z, int64_t id, int lanes) {
  const int64_t tied = cut.id - id + 1;  // how many of these lanes may equal cut.x
  const Mask equal = (x == set1(cut.x)) & lanes_below(tied < 0 ? 0 : tied > 16 ? 16 : int(tied));
  return ((x > set1(cut.x)) | equal) & at_least(z, set1(cut.z_min)) & lanes_below(lanes);
}

template <class F>
VX_INLINE void for_lanes(Mask m, F f) {
  for (uint32_t left = mask_bits(m); left; left &= left - 1) f(__builtin_ctz(left));
}

// Tokens in ascending id, each with an integer weight: sums of integers have no order, so neither has a selection.
struct Tokens {
  uint32_t *key, *id;  // key is monotone in the logit
  uint64_t* weight;
  int64_t count = 0;
};

VX_INLINE I16 sort_key(F16 x) {
  const I16 b = bits(x + zero());  // -0 sorts as 0
  return b ^ (shift_right(b, 31) | iset1(int32_t(0x80000000u)));
}

// The last token of the shortest prefix, in the order (logit descending, id ascending), whose weights reach `target`.
// Reorders nothing: radix digits of the key narrow the list down, from the top. False where all together fall short.
bool select_prefix(Tokens t, uint64_t target, uint32_t* key, uint32_t* id) {
  constexpr int kShift[3] = {21, 10, 0};
  constexpr uint32_t kMask[3] = {0x7ff, 0x7ff, 0x3ff};
  uint64_t sums[2048];
  for (int level = 0; level < 3; ++level) {
    std::fill_n(sums, kMask[level] + 1, 0);
    for (int64_t i = 0; i < t.count; ++i) sums[t.key[i] >> kShift[level] & kMask[level]] += t.weight[i];
    int64_t digit = kMask[level];
    while (digit >= 0 && sums[digit] < target) target -= sums[digit--];
    if (digit < 0) return false;  // on the first level only: below it, the digit above holds enough
    int64_t kept = 0;
    for (int64_t i = 0; i < t.count; ++i) {
      if ((t.key[i] >> kShift[level] & kMask[level]) != digit) continue;
      t.key[kept] = t.key[i], t.id[kept] = t.id[i], t.weight[kept] = t.weight[i];
      ++kept;
    }
    t.count = kept;
  }
  int64_t i = 0;
  for (; t.weight[i] < target; ++i) target -= t.weight[i];
  *key = t.key[i], *id = t.id[i];
  return true;
}

// Weights in units of 2^-40, truncated, high 2^20 + low: whole numbers, which any order adds alike.
struct Whole {
  I16 high, low;
};

VX_INLINE Whole whole(F16 weight) {
  const F16 scaled = weight * set1(0x1p20f);
  const I16 high = to_int(scaled);
  return {high, to_int((scaled - to_float(high)) * set1(0x1p20f))};
}

VX_INLINE void store(uint64_t* w, Whole a) {
  uint32_t high[16], low[16];
  store(high, a.high);
  store(low, a.low);
  for (int lane = 0; lane < 16; ++lane) w[lane] = (uint64_t(high[lane]) << 20) + low[lane];
}

// The best block so far: top + number as a real number is sum + rest, which is exact.
struct Race {
  double sum = -INFINITY, rest = 0.0;
  int64_t block = -1;

  void enter(double top, double number, int64_t b) {
    const double s = top + number, part = s - top, r = (top - (s - part)) + (number - part);
    if (s > sum || (s == sum && (r > rest || (r == rest && b < block)))) sum = s, rest = r, block = b;
  }
};

template <class Z>
struct Row {
  const float* x;
  int64_t n;
  Z at;
  float max;            // of z
  const float* maxima;  // of x by blocks of kLseBlock
  const float* sums;    // of e^(z - the block's largest)
  Tokens tokens;        // room for n

  // f(start, lanes, x, z, allowed) for the chunks that hold an allowed token.
  template <class F>
  VX_INLINE void for_allowed(const Cut& cut, F f) const {
    for (int64_t b = 0; b < n; b += kLseBlock) {
      if (maxima[b / kLseBlock] < cut.x) continue;
      const float* block = x + b;
      for_chunks(n - b < kLseBlock ? n - b : kLseBlock, [&](int64_t i, int lanes) {
        const F16 v = load_lanes(block + i, lanes), z = at(v);
        const Mask m = allowed(cut, v, z, b + i, lanes);
        if (any(m)) f(b + i, lanes, v, z, m);
      });
    }
  }

  VX_INLINE void append(Mask m, int64_t at_id, F16 v, const uint64_t* weight) {
    alignas(64) float key[16];
    store(key, from_bits(sort_key(v)));
    for_lanes(m, [&](int lane) {
      std::memcpy(&tokens.key[tokens.count], &key[lane], 4);
      tokens.id[tokens.count] = uint32_t(at_id + lane);
      tokens.weight[tokens.count++] = weight[lane];
    });
  }

  void cut_to(Cut& cut, uint64_t target) {
    uint32_t key, id;
    if (!select_prefix(tokens, target, &key, &id)) return;
    cut.x = x[id];
    cut.id = id;
  }

  void keep_top_k(Cut& cut, int64_t k) {
    // The k-th largest of the block maxima: k tokens at least are no smaller, so nothing below it can be among the k.
    const int64_t blocks = (n + kLseBlock - 1) / kLseBlock;
    Cut above = cut;
    if (k <= blocks) {
      float* sorted = reinterpret_cast<float*>(tokens.weight);
      std::copy_n(maxima, blocks, sorted);
      std::nth_element(sorted, sorted + k - 1, sorted + blocks, [](float a, float b) { return a > b; });
      if (sorted[k - 1] > cut.x) above.x = sorted[k - 1], above.id = n;
    }
    static constexpr uint64_t one[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
    tokens.count = 0;
    for_allowed(above, [&](int64_t i, int, F16 v, F16, Mask m) { append(m, i, v, one); });
    cut_to(cut, uint64_t(k));
  }

  // By probabilities relative to the largest one.
  void keep_top_p(Cut& cut, float top_p) {
    constexpr float kNear = 8.0f;  // only tokens this close to the top are listed first; most prefixes end there
    uint64_t total = 0, listed = 0;
    auto list = [&](float z_min) {
      tokens.count = 0;
      total = listed = 0;
      Whole sum = {iset1(0), iset1(0)};
      int pending = 0;
      uint64_t w[16];
      auto flush = [&] {
        store(w, sum);
        for (uint64_t one : w) total += one;
        sum = {iset1(0), iset1(0)};
        pending = 0;
      };
      for_allowed(cut, [&](int64_t i, int, F16 v, F16 z, Mask m) {
        const Whole weight = whole(select(m, exp(z - set1(max)), zero()));
        sum = {sum.high + weight.high, sum.low + weight.low};
        if (++pending == 2048) flush();  // 2048 addends of at most 2^20 fit a lane
        const Mask close = m & at_least(z, set1(z_min));
        if (!any(close)) return;
        store(w, weight);
        for_lanes(close, [&](int lane) { listed += w[lane]; });
        append(close, i, v, w);
      });
      flush();
    };
    list(max - kNear);
    const uint64_t target = uint64_t(std::ceil(double(top_p) * double(total)));
    if (listed < target) list(-INFINITY);
    cut_to(cut, target);
  }

  // The weights e^(z - top) of a block's allowed tokens, 0 of all others; returns top, its largest allowed z, or -inf.
  float weigh_block(const Cut& cut, int64_t block, F16 (&w)[16]) const {
    F16 most = set1(-INFINITY);
    for (int j = 0; j < 8; ++j) {
      const int64_t i = block * kDrawBlock + 16 * j;
      w[j] = set1(-INFINITY);
      if (i >= n) continue;
      const int lanes = n - i < 16 ? int(n - i) : 16;
      const F16 v = load_lanes(x + i, lanes), z = at(v);
      w[j] = select(allowed(cut, v, z, i, lanes), z, w[j]);
      most = select(w[j] > most, w[j], most);
    }
    const float top = max_lanes(most) + 0.0f;
    if (top == -INFINITY) return top;
    for (int j = 0; j < 8; ++j) w[j] = exp(w[j] - set1(top)), w[j + 8] = zero();
    return top;
  }

  // The block with the largest log-sum-exp + Gumbel number, then a token of it by its share: as likely as the token
  // with the largest logit + Gumbel number would be. `floor` is below the best sum, relative to max, by more than fp32
  // arithmetic can be off: blocks that cannot reach it need no exponentials.
  int64_t draw(const Cut& cut, int64_t top_id, uint64_t seed, uint64_t position) const {
    constexpr int64_t kPart = kLseBlock / kDrawBlock;
    const int64_t blocks = (n + kDrawBlock - 1) / kDrawBlock, lse_blocks = (n + kLseBlock - 1) / kLseBlock;
    Race best;
    float floor = -INFINITY;
    float waiting[64], reach[64];  // of 64 blocks: -log(1 - u), and what their sums, relative to max, do not exceed
    auto open = [&](int64_t group) {
      I16 words[4];
      block_words(seed, position, group, words);
      const int64_t first = group * (64 / kPart);
      const int lanes = int(std::min<int64_t>(lse_blocks - first, 64 / kPart));
      const F16 v = load_lanes(maxima + first, lanes), s = load_lanes(sums + first, lanes);
      const Mask m = lanes_below(lanes) & at_least(v, set1(cut.x));
      float lse[16];  // of kPart blocks of the draw together
      store(lse, select(m, (at(v) - set1(max)) + log(s), set1(-INFINITY)));
      for (int j = 0; j < 4; ++j) {
        const F16 e = exponential(uniform(words[j]));
        store(waiting + 16 * j, e);
        store(reach + 16 * j, neg(log(e)));
      }
      for (int i = 0; i < 64; ++i) reach[i] += lse[i / kPart];
    };
    auto enter = [&](int64_t block) {
      F16 w[16];
      const float top = weigh_block(cut, block, w);
      if (top == -INFINITY) return;
      best.enter(top, -log(waiting[block % 64] / tree_sum(w)), block);
      floor = float((best.sum - double(max)) + best.rest) - 0.001f;
    };
    const int64_t top_block = top_id / kDrawBlock;
    open(top_block / 64);
    enter(top_block);  // from now on the floor is close to 0, where reach is precise however large max is
    for (int64_t b = 0; b < blocks; ++b) {
      if (b % 64 == 0) open(b / 64);
      if (reach[b % 64] >= floor) enter(b);
    }
    return draw_from(cut, best.block, row_bits(seed, position));
  }

  // The token of a block whose weights `random` / 2^64 of the way through them all falls upon.
  int64_t draw_from(const Cut& cut, int64_t block, uint64_t random) const {
    F16 w[16];
    weigh_block(cut, block, w);
    uint64_t weight[kDrawBlock], total = 0;
    for (int j = 0; j < 8; ++j) store(weight + 16 * j, whole(w[j]));
    for (uint64_t one : weight) total += one;
    uint64_t target = uint64_t((unsigned __int128)(random)*total >> 64);
    int64_t i = 0;
    for (; weight[i] <= target; ++i) target -= weight[i];
    return block * kDrawBlock + i;
  }

  int64_t choose(const Sample& a, int64_t row, int64_t top_id) {
    Cut cut;
    if (a.min_p[row] > 0.0f) cut.z_min = max + log(a.min_p[row]);
    if (a.top_k[row] > 0 && a.top_k[row] < n) keep_top_k(cut, a.top_k[row]);
    if (a.top_p[row] < 1.0f) keep_top_p(cut, a.top_p[row]);
    return draw(cut, top_id, uint64_t(a.seeds[row]), uint64_t(a.positions[row]));
  }
};

VX_INLINE bool finite(Lse l) { return std::isfinite(l.max) && std::isfinite(l.log_sum); }

void sample_row(const Sample& a, int64_t row) {
  const float* x = a.logits + row * a.stride;
  const float t = a.temperature[row];
  const int64_t blocks = (a.n + kLseBlock - 1) / kLseBlock;
  float* maxima = static_cast<float*>(scratch(0, 2 * blocks * sizeof(float)));
  float* sums = maxima + blocks;
  const bool scaled = t != 0.0f && t != 1.0f;
  LseSum raw_sum, sum;
  int64_t top_block = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    const float* block = x + i * kLseBlock;
    const int64_t size = std::min(a.n - i * kLseBlock, kLseBlock);
    maxima[i] = block_max(block, size);
    if (maxima[i] > maxima[top_block]) top_block = i;
    LseSum part = lse_block(block, size, maxima[i], AtTemperatureOne{});
    merge(raw_sum, part);
    if (scaled) merge(sum, part = lse_block(block, size, maxima[i], AtTemperature{t}));
    sums[i] = part.sum;
  }
  const Lse raw = finish(raw_sum), lse = scaled ? finish(sum) : raw;
  if (!finite(raw) || !finite(lse)) {
    a.ids[row] = -1;
    a.logprobs[row] = a.raw_logprobs[row] = NAN;
    return;
  }
  int64_t id = top_block * kLseBlock;
  while (x[id] != maxima[top_block]) ++id;  // the first of the largest: the greedy choice
  if (t != 0.0f) {
    uint64_t* weight = static_cast<uint64_t*>(scratch(1, a.n * 16));
    uint32_t* key = reinterpret_cast<uint32_t*>(weight + a.n);
    const Tokens tokens = {key, key + a.n, weight};
    if (scaled)
      id = Row<AtTemperature>{x, a.n, {t}, lse.max, maxima, sums, tokens}.choose(a, row, id);
    else
      id = Row<AtTemperatureOne>{x, a.n, {}, lse.max, maxima, sums, tokens}.choose(a, row, id);
  }
  a.ids[row] = id;
  a.logprobs[row] = log_prob(scaled ? x[id] / t : x[id], lse);
  a.raw_logprobs[row] = log_prob(x[id], raw);
}

}  // namespace

void sample(const Sample& a) {
  parallel_tasks(a.rows, [&](int64_t row) { sample_row(a, row); });
}

}  // namespace vx::VEXACT_ISA
