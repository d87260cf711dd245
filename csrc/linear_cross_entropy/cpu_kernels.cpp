// Log-probabilities of a vocabulary too large to hold: logits are made in tiles by the linear room's gemm, so that each
// is the accumulator of `linear`, and reduced block by block in the order of log_softmax/lse.h.
#include "linear_cross_entropy/kernels.h"

#include <algorithm>

#include "common/parallel.h"
#include "log_softmax/lse.h"

namespace vx::VEXACT_ISA {
namespace {

constexpr int64_t kTileTokens = 256;  // a tile of logits, kTileTokens x kLseBlock floats, stays in the second cache

int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

const void* row_of(const void* data, Dtype dtype, int64_t row, int64_t stride) {
  return static_cast<const char*>(data) + row * stride * size_of(dtype);
}

// c = the fp32 logits of `tokens` tokens from t on and `size` vocabulary entries from v on.
void logits_tile(const Head& h, int64_t t, int64_t tokens, int64_t v, int64_t size, float* c, int64_t stride) {
  const Operand a = {row_of(h.hidden, h.dtype, t, h.hidden_stride), h.dtype, h.hidden_stride, 1};
  const Operand b = {row_of(h.weight, h.dtype, v, h.weight_stride), h.dtype, 1, h.weight_stride};
  gemm_single({tokens, size, h.width, a, b, c, Dtype::f32, stride});
}

VX_INLINE F16 softcap_tanh(F16 x, F16 cap) { return tanh(x / cap); }

void cap_row(float* x, int64_t n, float cap) {
  const F16 c = set1(cap);
  for_chunks(n, [&](int64_t i, int lanes) { store_lanes(x + i, c * softcap_tanh(load_lanes(x + i, lanes), c), lanes); });
}

// Calls f with the row's z, as row_lse takes it.
template <class F>
VX_INLINE auto with_temperature(const Head& h, int64_t token, F f) {
  const float t = h.temperature[h.one_temperature ? 0 : token];
  return t == 1.0f ? f(AtTemperatureOne{}) : f(AtTemperature{t});
}

struct Block {    // of one row
  LseSum lse;
  float shifted;  // the sum of e^(z - max) (z - max), for the entropy
};

template <class Z>
VX_INLINE Block reduce_block(const float* x, int64_t n, bool entropy, Z at) {
  const float x_max = block_max(x, n);
  if (!entropy) return {lse_block(x, n, x_max, at), 0.0f};
  alignas(64) float e[kLseBlock];
  const float m = z_max(x_max, at);
  const F16 origin = set1(lse_origin(m));
  const float sum = sum_block(n, [&](int64_t i, int lanes) {  // order: that of lse_block
    const F16 v = exp(at(load_lanes(x + i, lanes)) - origin);
    store_lanes(e + i, v, lanes);
    return v;
  });
  const float shifted = sum_block(n, [&](int64_t i, int lanes) {
    const F16 v = load_lanes(e + i, lanes), d = at(load_lanes(x + i, lanes)) - origin;
    return select(v > zero(), v * d, zero());  // 0 log 0 is 0
  });
  return {{m, sum}, shifted};
}

// order: as merge(LseSum&, LseSum), blocks ascending; a sum of e^(z - a) (z - a) moves to b as e^(a - b) (it + (a - b) sum).
VX_INLINE void merge(Block& s, const Block& b) {
  const float down = s.lse.max - b.lse.max;
  if (s.lse.max == -INFINITY)
    s.shifted = b.shifted;
  else if (down < 0.0f)
    s.shifted = std::fma(exp(down), std::fma(down, s.lse.sum, s.shifted), b.shifted);
  else if (b.lse.max > -INFINITY)
    s.shifted = std::fma(exp(-down), std::fma(-down, b.lse.sum, b.shifted), s.shifted);
  merge(s.lse, b.lse);
}

int64_t tile_tokens(int64_t tokens) {
  const int64_t tiles = (tokens + kTileTokens - 1) / kTileTokens;
  return ((tokens + tiles - 1) / tiles + 15) / 16 * 16;
}

// d logits of one row, in place of its logits. Columns v .. v + n of the vocabulary.
struct RowGradient {
  Lse lse;
  float dlogprob, dentropy, entropy, softcap;
  bool has_entropy;

  template <class Z>
  VX_INLINE F16 at_logits(F16 x, F16 delta, Z at, float t) const {
    F16 slope = set1(1.0f);
    if (softcap != 0.0f) {
      const F16 th = softcap_tanh(x, set1(softcap));
      x = set1(softcap) * th;
      slope = fma(neg(th), th, slope);
    }
    const F16 lp = log_prob(at(x), lse), p = exp(lp);
    F16 pull = set1(dlogprob);
    if (has_entropy) pull = select(p > zero(), fma(set1(dentropy), lp + set1(entropy), pull), pull);
    F16 d = fma(neg(p), pull, delta);
    if (t != 1.0f) d = d / set1(t);
    return softcap != 0.0f ? d * slope : d;
  }

  template <class Z>
  void run(float* x, int64_t n, int64_t target, Z at, float t) const {
    const float own = target >= 0 && target < n ? x[target] : 0.0f;
    for_chunks(n, [&](int64_t i, int lanes) {
      store_lanes(x + i, at_logits(load_lanes(x + i, lanes), zero(), at, t), lanes);
    });
    if (target >= 0 && target < n) store(x + target, at_logits(set1(own), set1(dlogprob), at, t), 1);
  }
};

}  // namespace

void linear_logprobs_fwd(const LinearLogprobsFwd& a) {
  const Head& h = a.head;
  const int64_t blocks = (h.vocabulary + kLseBlock - 1) / kLseBlock;
  for (int64_t first = 0; first < h.tokens; first += a.piece_tokens) {
    const int64_t tokens = std::min(h.tokens - first, a.piece_tokens), each = tile_tokens(tokens);
    const int64_t tiles = (tokens + each - 1) / each;
    Block* partial = reinterpret_cast<Block*>(a.workspace);
    float* own = a.workspace + tokens * blocks * (sizeof(Block) / 4);
    parallel_tasks(tiles * blocks, [&](int64_t task) {  // tiles of one vocabulary block in turn: its weights stay near
      const int64_t block = task / tiles, v = block * kLseBlock, size = std::min(h.vocabulary - v, kLseBlock);
      const int64_t begin = task % tiles * each, count = std::min(tokens - begin, each);
      float* tile = static_cast<float*>(scratch(0, count * kLseBlock * 4));
      logits_tile(h, first + begin, count, v, size, tile, kLseBlock);
      for (int64_t i = 0; i < count; ++i) {
        float* x = tile + i * kLseBlock;
        const int64_t token = begin + i, target = h.target[first + token] - v;
        if (h.softcap != 0.0f) cap_row(x, size, h.softcap);
        if (target >= 0 && target < size) own[token] = x[target];
        partial[token * blocks + block] =
            with_temperature(h, first + token, [&](auto at) { return reduce_block(x, size, a.entropy, at); });
      }
    });
    parallel_for(0, tokens, 1 + 1024 / blocks, [&](int64_t begin, int64_t end) {
      for (int64_t token = begin; token < end; ++token) {
        Block s = {{}, 0.0f};
        for (int64_t b = 0; b < blocks; ++b)  // order: blocks ascending
          if (a.entropy)
            merge(s, partial[token * blocks + b]);
          else
            merge(s.lse, partial[token * blocks + b].lse);
        const Lse l = finish(s.lse);
        const int64_t at_token = first + token;
        const bool known = h.target[at_token] >= 0 && h.target[at_token] < h.vocabulary;
        const float x = known ? own[token] : NAN;
        a.logprob[at_token] = with_temperature(h, at_token, [&](auto at) { return log_prob(at(x), l); });
        a.lse[2 * at_token] = l.max;
        a.lse[2 * at_token + 1] = l.log_sum;
        if (a.entropy) a.entropy[at_token] = l.log_sum - s.shifted / s.lse.sum;
      }
    });
  }
}

void linear_logprobs_bwd(const LinearLogprobsBwd& a) {
  const Head& h = a.head;
  for (int64_t v = 0; v < h.vocabulary; v += a.piece_vocabulary) {
    const int64_t size = std::min(h.vocabulary - v, a.piece_vocabulary), blocks = (size + kLseBlock - 1) / kLseBlock;
    for (int64_t first = 0; first < h.tokens; first += a.piece_tokens) {
      const int64_t tokens = std::min(h.tokens - first, a.piece_tokens), each = tile_tokens(tokens);
      const int64_t tiles = (tokens + each - 1) / each;
      const bool last = first + tokens == h.tokens;
      parallel_tasks(tiles * blocks, [&](int64_t task) {
        const int64_t from = task / tiles * kLseBlock, n = std::min(size - from, kLseBlock);
        const int64_t begin = task % tiles * each, count = std::min(tokens - begin, each);
        float* tile = a.workspace + begin * size + from;
        logits_tile(h, first + begin, count, v + from, n, tile, size);
        for (int64_t i = 0; i < count; ++i) {
          const int64_t token = first + begin + i;
          const RowGradient row = {{a.lse[2 * token], a.lse[2 * token + 1]},
                                   a.dlogprob[token],
                                   a.dentropy ? a.dentropy[token] : 0.0f,
                                   a.dentropy ? a.entropy[token] : 0.0f,
                                   h.softcap,
                                   a.dentropy != nullptr};
          const float t = h.temperature[h.one_temperature ? 0 : token];
          with_temperature(h, token,
                           [&](auto at) { row.run(tile + i * size, n, h.target[token] - v - from, at, t); });
        }
      });
      const Operand hidden = {row_of(h.hidden, h.dtype, first, h.hidden_stride), h.dtype, h.hidden_stride, 1};
      const Operand weight = {row_of(h.weight, h.dtype, v, h.weight_stride), h.dtype, h.weight_stride, 1};
      if (a.dhidden)  // order: the vocabulary ascending, continued from piece to piece
        gemm({tokens, h.width, size, {a.workspace, Dtype::f32, size, 1}, weight, a.dhidden + first * h.width,
              Dtype::f32, h.width, nullptr, Dtype::f32, v > 0});
      if (a.dweight) {  // order: tokens ascending, continued from piece to piece; rounded once, by the last
        void* out = const_cast<void*>(row_of(a.dweight, h.dtype, v, h.width));
        const bool own_sums = h.dtype != Dtype::f32 && h.tokens > a.piece_tokens;
        gemm({size, h.width, tokens, {a.workspace, Dtype::f32, 1, size}, hidden, own_sums ? a.dweight_sums : out,
              own_sums ? Dtype::f32 : h.dtype, h.width, nullptr, Dtype::f32, first > 0});
        if (own_sums && last)
          parallel_for(0, size, 1 + 16384 / (h.width + 1), [&](int64_t begin, int64_t end) {
            const float* sums = a.dweight_sums + begin * h.width;
            bf16* rounded = static_cast<bf16*>(out) + begin * h.width;
            for_chunks((end - begin) * h.width,
                       [&](int64_t i, int lanes) { store_lanes(rounded + i, load_lanes(sums + i, lanes), lanes); });
          });
      }
    }
  }
}

void softcap(const Softcap& a) {
  const F16 cap = set1(a.cap);
  parallel_for(0, a.rows, 1 + 8192 / (a.n + 1), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for_chunks(a.n, [&](int64_t i, int lanes) {
        const F16 th = softcap_tanh(load_lanes(a.x + row * a.x_stride + i, lanes), cap);
        F16 y = cap * th;
        if (a.dy) y = load_lanes(a.dy + row * a.dy_stride + i, lanes) * fma(neg(th), th, set1(1.0f));
        store_lanes(a.y + row * a.n + i, y, lanes);
      });
  });
}

}  // namespace vx::VEXACT_ISA
