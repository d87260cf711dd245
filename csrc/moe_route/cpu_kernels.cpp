#include "moe_route/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"

namespace vx::VEXACT_ISA {
namespace {

constexpr float kTiny = 1e-20f;  // keeps a sum of scores that have all vanished from dividing by zero

// Larger numbers have larger keys, -0.0 that of 0.0, a NaN the largest of all: it is chosen, and shows in the result.
int32_t key_of(float x) {
  if (x != x) return INT32_MAX;
  x = x + 0.0f;
  int32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ ((bits >> 31) & 0x7fffffff);
}

// The `count` best of candidates 0 .. n - 1, best first; of equal ones the lower index. Skipped where taken(i).
template <class Key, class Skip>
VX_INLINE void best(int64_t n, int64_t count, Key key, Skip skip, int32_t* index, int32_t* keys) {
  int64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (skip(i)) continue;
    const int32_t k = key(i);
    if (found == count && k <= keys[count - 1]) continue;
    int64_t at = found < count ? found++ : count - 1;
    for (; at > 0 && keys[at - 1] < k; --at) keys[at] = keys[at - 1], index[at] = index[at - 1];
    keys[at] = k, index[at] = int32_t(i);
  }
}

constexpr int64_t power_above(int64_t n) {
  int64_t p = 16;
  while (p < n) p *= 2;
  return p;
}

// Scores of one row: sigmoid(l), or e^(l - max) / sum. `scores` has room for power_above(experts) floats, twice.
template <class T>
void score(const MoeRoute& a, const T* logits, float* scores) {
  const int64_t e = a.experts;
  if (a.sigmoid) {
    for_chunks(e, [&](int64_t i, int lanes) {
      const F16 l = load_lanes(logits + i, lanes), q = exp(neg(abs(l)));
      const F16 large = set1(1.0f) / (set1(1.0f) + q);
      store_lanes(scores + i, select(l > zero(), large, q * large), lanes);
    });
    return;
  }
  F16 top = set1(-INFINITY);
  for_chunks(e, [&](int64_t i, int lanes) {
    const F16 l = load_lanes(logits + i, lanes);
    top = select(lanes_below(lanes), max(l, top), top);
  });
  const F16 highest = set1(max_lanes(top));
  const int64_t width = power_above(e);
  float* sums = scores + width;
  for (int64_t i = e / 16 * 16; i < width; i += 16) store(sums + i, zero());
  for_chunks(e, [&](int64_t i, int lanes) {
    const F16 v = exp(load_lanes(logits + i, lanes) - highest);
    store_lanes(scores + i, v, lanes);
    store_lanes(sums + i, v, lanes);
  });
  for (int64_t w = width; w > 1; w /= 2)  // order: neighbours are added pairwise, over a power of two
    for (int64_t i = 0; i < w / 2; ++i) sums[i] = sums[2 * i] + sums[2 * i + 1];
  const F16 sum = set1(sums[0]);
  for_chunks(e, [&](int64_t i, int lanes) { store_lanes(scores + i, load_lanes(scores + i, lanes) / sum, lanes); });
}

float sum_of(const float* v, int64_t n) {  // order: slots ascending, from +0
  float sum = 0.0f;
  for (int64_t i = 0; i < n; ++i) sum = sum + v[i];
  return sum;
}

template <class T>
void forward(const MoeRoute& a, const MoeRouteOut& out) {
  parallel_for(0, a.rows, 1 + 16384 / (a.experts + 1), [&](int64_t begin, int64_t end) {
    const int64_t width = power_above(a.experts), groups = a.groups ? a.groups : 1, size = a.experts / groups;
    float* scores = static_cast<float*>(scratch(0, 2 * width * 4));
    int32_t* keys = static_cast<int32_t*>(scratch(1, (a.experts + 2 * groups + a.top_k) * 4));
    int32_t *group_index = keys + a.experts, *group_keys = group_index + groups, *top_keys = group_keys + groups;
    bool* closed = static_cast<bool*>(scratch(2, groups));
    for (int64_t row = begin; row < end; ++row) {
      const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
      float* weights = out.weights + row * a.top_k;
      int32_t* ids = out.ids + row * a.top_k;
      score(a, logits, scores);
      const bool by_logits = !a.bias && !a.groups;  // the same order, without the rounding of the scores
      auto choice = [&](int64_t i) {
        return by_logits ? to_f32(logits[i]) : a.bias ? scores[i] + a.bias[i] : scores[i];
      };
      for (int64_t g = 0; g < groups; ++g) closed[g] = a.groups != 0;
      if (a.groups) {
        auto strength = [&](int64_t g) {
          int32_t two[2], two_keys[2];
          best(size, 2, [&](int64_t i) { return key_of(choice(g * size + i)); }, [](int64_t) { return false; }, two,
               two_keys);
          return key_of(choice(g * size + two[0]) + choice(g * size + two[1]));
        };
        best(groups, a.top_groups, strength, [](int64_t) { return false; }, group_index, group_keys);
        for (int64_t g = 0; g < a.top_groups; ++g) closed[group_index[g]] = false;
      }
      best(a.experts, a.top_k, [&](int64_t i) { return key_of(choice(i)); }, [&](int64_t i) { return closed[i / size]; },
           ids, top_keys);
      for (int64_t s = 0; s < a.top_k; ++s) weights[s] = scores[ids[s]];
      const float sum = a.normalize ? sum_of(weights, a.top_k) + kTiny : 1.0f;
      for (int64_t s = 0; s < a.top_k; ++s) weights[s] = (a.normalize ? weights[s] / sum : weights[s]) * a.scale;
    }
  });
}

// With c = sum of dw_s w_s: a normalised softmax is a softmax over the chosen ones alone, dl_s = w_s (dw_s - c / scale);
// a plain one has dl_e = p_e (scale dw_e - c), dw_e = 0 where e was not chosen; a sigmoid dl_s = p_s (1 - p_s) dp_s with
// dp_s = scale dw_s, normalised (scale dw_s - c) / (sum of p + tiny).
template <class T>
void backward(const MoeRoute& a, const MoeRouteGrad& g) {
  parallel_for(0, a.rows, 1 + 16384 / (a.experts + 1), [&](int64_t begin, int64_t end) {
    float* scores = static_cast<float*>(scratch(0, 2 * power_above(a.experts) * 4));
    float* chosen = static_cast<float*>(scratch(1, a.top_k * 4));
    for (int64_t row = begin; row < end; ++row) {
      const T* logits = static_cast<const T*>(a.logits) + row * a.logits_stride;
      const float *dw = g.dweights + row * a.top_k, *w = g.weights + row * a.top_k;
      const int32_t* ids = g.ids + row * a.top_k;
      T* dlogits = static_cast<T*>(g.dlogits) + row * a.experts;
      score(a, logits, scores);
      float c = 0.0f;
      for (int64_t s = 0; s < a.top_k; ++s) c = std::fma(dw[s], w[s], c);  // order: slots ascending
      for (int64_t s = 0; s < a.top_k; ++s) chosen[s] = scores[ids[s]];
      const float sum = sum_of(chosen, a.top_k) + kTiny;
      const bool all = !a.sigmoid && !a.normalize;  // every score moves every weight
      for_chunks(a.experts, [&](int64_t i, int lanes) {
        store_lanes(dlogits + i, all ? load_lanes(scores + i, lanes) * set1(0.0f - c) : zero(), lanes);
      });
      for (int64_t s = 0; s < a.top_k; ++s) {
        const float p = chosen[s], wide = a.scale * dw[s];
        float d;
        if (a.sigmoid)
          d = (a.normalize ? (wide - c) / sum : wide) * (p * (1.0f - p));
        else
          d = a.normalize ? w[s] * (dw[s] - c / a.scale) : p * (wide - c);
        dlogits[ids[s]] = from_f32<T>(d);
      }
    }
  });
}

}  // namespace

void moe_route_fwd(const MoeRoute& a, const MoeRouteOut& out) {
  a.dtype == Dtype::f32 ? forward<float>(a, out) : forward<bf16>(a, out);
}
void moe_route_bwd(const MoeRoute& a, const MoeRouteGrad& g) {
  a.dtype == Dtype::f32 ? backward<float>(a, g) : backward<bf16>(a, g);
}

}  // namespace vx::VEXACT_ISA
