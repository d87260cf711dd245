#include "sampler/kernels.h"

#include <algorithm>

#include "common/parallel.h"
#include "log_softmax/lse.h"
#include "sampler/gumbel.h"

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

// The best token so far: z + number as a real number is sum + rest, which is exact.
struct Race {
  double sum = -INFINITY, rest = 0.0;
  int64_t id = -1;

  void enter(double z, double number, int64_t token) {
    const double s = z + number, part = s - z, r = (z - (s - part)) + (number - part);
    if (s > sum || (s == sum && (r > rest || (r == rest && token < id)))) sum = s, rest = r, id = token;
  }
};

template <class Z>
struct Row {
  const float* x;
  int64_t n;
  Z at;
  float max;            // of z
  const float* maxima;  // of x by blocks of kLseBlock
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

  // Probabilities relative to the largest one, in units of 2^-40, truncated: whole numbers, which any order adds alike.
  void keep_top_p(Cut& cut, float top_p) {
    constexpr float kNear = 8.0f;  // only tokens this close to the top are listed first; most prefixes end there
    uint64_t total = 0, listed = 0;
    auto weigh = [&](F16 z, Mask m, I16& high, I16& low) {
      const F16 scaled = select(m, exp(z - set1(max)), zero()) * set1(0x1p20f);
      high = to_int(scaled);
      low = to_int((scaled - to_float(high)) * set1(0x1p20f));
    };
    auto whole = [](I16 high, I16 low, uint64_t* w) {
      alignas(64) float h[16], l[16];
      store(h, from_bits(high));
      store(l, from_bits(low));
      for (int lane = 0; lane < 16; ++lane) {
        uint32_t a, b;
        std::memcpy(&a, &h[lane], 4);
        std::memcpy(&b, &l[lane], 4);
        w[lane] = (uint64_t(a) << 20) + b;
      }
    };
    auto list = [&](float z_min) {
      tokens.count = 0;
      total = listed = 0;
      I16 high_sum = iset1(0), low_sum = iset1(0);
      int pending = 0;
      uint64_t w[16];
      auto flush = [&] {
        whole(high_sum, low_sum, w);
        for (uint64_t one : w) total += one;
        high_sum = low_sum = iset1(0);
        pending = 0;
      };
      for_allowed(cut, [&](int64_t i, int, F16 v, F16 z, Mask m) {
        I16 high, low;
        weigh(z, m, high, low);
        high_sum = high_sum + high;
        low_sum = low_sum + low;
        if (++pending == 2048) flush();  // 2048 addends of at most 2^20 fit a lane
        const Mask close = m & at_least(z, set1(z_min));
        if (!any(close)) return;
        whole(high, low, w);
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

  // order: a maximum has none. Of two tokens the one whose z + Gumbel number is larger as a real number wins, ties to the
  // lower id; `floor` is below the best such sum, relative to max, by more than fp32 arithmetic can be off.
  int64_t draw(const Cut& cut, int64_t top_id, uint64_t seed, uint64_t position) const {
    Race best;
    float floor = -INFINITY;
    auto group = [&](int64_t g, bool first) {
      F16 z[4], shifted[4];
      Mask m[4];
      bool open = first;
      for (int j = 0; j < 4; ++j) {
        const int64_t i = g + 16 * j, left = n - i;
        const int lanes = left <= 0 ? 0 : left < 16 ? int(left) : 16;
        const F16 v = lanes == 16 ? load(x + i) : lanes ? load(x + i, lanes) : zero();
        z[j] = at(v);
        shifted[j] = z[j] - set1(max);
        m[j] = allowed(cut, v, z[j], i, lanes) & at_least(shifted[j] + set1(kGumbelMax), set1(floor));
        open |= any(m[j]);
      }
      if (!open) return;
      I16 words[4];
      philox(seed, position, int32_t(g / 64), words);
      for (int j = 0; j < 4; ++j) {
        const F16 u = uniform(words[j]);
        m[j] = m[j] & at_least(shifted[j] + gumbel_bound(u), set1(floor));
        if (!any(m[j])) continue;
        float at_z[16], number[16];
        store(at_z, z[j]);
        store(number, gumbel(u));
        for_lanes(m[j], [&](int lane) { best.enter(at_z[lane], number[lane], g + 16 * j + lane); });
      }
      floor = float(best.sum - double(max)) - 0.001f;
    };
    group(top_id / 64 * 64, true);  // a good start lets most groups go without a random number
    for (int64_t g = 0; g < n; g += 64) {
      if (g % kLseBlock == 0) {
        const float top = maxima[g / kLseBlock];
        if (top < cut.x || (at(top) - max) + kGumbelMax < floor) {
          g += kLseBlock - 64;
          continue;
        }
      }
      group(g, false);
    }
    return best.id;
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
  float* maxima = static_cast<float*>(scratch(0, blocks * sizeof(float)));
  const bool scaled = t != 0.0f && t != 1.0f;
  LseSum raw_sum, sum;
  int64_t top_block = 0;
  for (int64_t i = 0; i < blocks; ++i) {
    const float* block = x + i * kLseBlock;
    const int64_t size = std::min(a.n - i * kLseBlock, kLseBlock);
    maxima[i] = block_max(block, size);
    if (maxima[i] > maxima[top_block]) top_block = i;
    merge(raw_sum, lse_block(block, size, maxima[i], AtTemperatureOne{}));
    if (scaled) merge(sum, lse_block(block, size, maxima[i], AtTemperature{t}));
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
      id = Row<AtTemperature>{x, a.n, {t}, lse.max, maxima, tokens}.choose(a, row, id);
    else
      id = Row<AtTemperatureOne>{x, a.n, {}, lse.max, maxima, tokens}.choose(a, row, id);
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
