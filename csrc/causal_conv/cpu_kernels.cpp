#include "causal_conv/kernels.h"

#include <algorithm>

#include "common/parallel.h"
#include "common/vec.h"
#include "silu_mul/gate.h"

namespace vx::VEXACT_ISA {
namespace {

constexpr int64_t kChannels = 256;  // that a task takes of one sequence
constexpr int kWidest = 8;

template <class F>
VX_INLINE void each_chunk(int64_t begin, int64_t end, F f) {
  for (int64_t i = begin; i < end; i += 16) f(i, int(end - i < 16 ? end - i : 16));
}

// The `width` rows that end at row `last` of a sequence which begins at row `begin`, the oldest first; null: zeros.
template <class T>
VX_INLINE void inputs_of(const CausalConv& a, const ConvTaps& taps, int64_t b, int64_t begin, int64_t last,
                         const T* (&row)[kWidest]) {
  const T* x = static_cast<const T*>(a.x);
  const int64_t slot = taps.values ? taps.slots[b] : -1;
  const int64_t before = taps.values ? taps.context_lens[b] - (a.offsets[b + 1] - begin) : 0;  // rows of earlier calls
  for (int w = 0; w < a.width; ++w) {
    const int64_t at = last - (a.width - 1) + w, position = before + (at - begin);
    if (at >= begin)
      row[w] = x + at * a.x_stride;
    else if (slot < 0 || position < 0)
      row[w] = nullptr;
    else
      row[w] = static_cast<const T*>(taps.values) + slot * taps.slot_stride + (position & (taps.ring - 1)) * a.channels;
  }
}

// order: taps from the oldest to the newest in one accumulator from +0, then the bias.
template <class T>
VX_INLINE F16 convolve(const CausalConv& a, const T* const (&row)[kWidest], int64_t i, int lanes) {
  F16 acc = zero();
  for (int w = 0; w < a.width; ++w)
    acc = fma(load_lanes(a.weight + w * a.channels + i, lanes), row[w] ? load_lanes(row[w] + i, lanes) : zero(), acc);
  return a.bias ? acc + load_lanes(a.bias + i, lanes) : acc;
}

template <class F>
void each_task(const CausalConv& a, F f) {
  const int64_t blocks = (a.channels + kChannels - 1) / kChannels;
  parallel_tasks(a.sequences * blocks, [&](int64_t task) {
    const int64_t b = task / blocks, from = task % blocks * kChannels;
    f(b, a.offsets[b], a.offsets[b + 1], from, std::min(from + kChannels, a.channels));
  });
}

template <class T>
void store_taps(const CausalConv& a, const ConvTaps& taps, int64_t b, int64_t begin, int64_t end, int64_t from,
                int64_t until) {
  if (!taps.values || taps.slots[b] < 0) return;
  for (int64_t row = std::max(begin, end - taps.ring); row < end; ++row) {
    const int64_t place = (taps.context_lens[b] - (end - row)) & (taps.ring - 1);
    std::memcpy(static_cast<T*>(taps.values) + taps.slots[b] * taps.slot_stride + place * a.channels + from,
                static_cast<const T*>(a.x) + row * a.x_stride + from, (until - from) * sizeof(T));
  }
}

template <class T>
void forward(const CausalConvFwd& f) {
  const CausalConv& a = f.conv;
  each_task(a, [&](int64_t b, int64_t begin, int64_t end, int64_t from, int64_t until) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in[kWidest];
      inputs_of(a, f.taps, b, begin, row, in);
      each_chunk(from, until, [&](int64_t i, int lanes) {
        F16 y = convolve(a, in, i, lanes);
        if (a.silu) y = y * gate_of(y).s;
        store_lanes(static_cast<T*>(f.y) + row * a.channels + i, y, lanes);
      });
    }
    store_taps<T>(a, f.taps, b, begin, end, from, until);  // all that it overwrites has been read: by this task alone
  });
}

template <class T>
void backward(const CausalConvBwd& g) {
  const CausalConv& a = g.conv;
  const int64_t n = a.channels;
  const T *x = static_cast<const T*>(a.x), *dy = static_cast<const T*>(g.dy);
  each_task(a, [&](int64_t b, int64_t begin, int64_t end, int64_t from, int64_t until) {
    for (int64_t row = begin; row < end; ++row) {
      const T* in[kWidest];
      inputs_of(a, ConvTaps{}, b, begin, row, in);
      each_chunk(from, until, [&](int64_t i, int lanes) {
        F16 d = load_lanes(dy + row * n + i, lanes);
        if (a.silu) {
          const F16 pre = convolve(a, in, i, lanes);
          d = d * gate_slope(pre, gate_of(pre), false);
        }
        store_lanes(g.dpre + row * n + i, d, lanes);
      });
    }
    for (int64_t row = begin; row < end; ++row)
      each_chunk(from, until, [&](int64_t i, int lanes) {
        F16 acc = zero();  // order: dx takes the rows that its input reached, ascending
        for (int64_t later = 0; later < a.width && row + later < end; ++later)
          acc = fma(load_lanes(a.weight + (a.width - 1 - later) * n + i, lanes),
                    load_lanes(g.dpre + (row + later) * n + i, lanes), acc);
        store_lanes(static_cast<T*>(g.dx) + row * n + i, acc, lanes);
      });
  });
  // order: dweight and dbias sum the rows one by one, ascending; threads share out the channels.
  parallel_for(0, (n + 15) / 16, 1, [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      const int64_t i = chunk * 16;
      const int lanes = int(n - i < 16 ? n - i : 16);
      F16 acc[kWidest], bias = zero();
      for (int w = 0; w < kWidest; ++w) acc[w] = zero();
      for (int64_t b = 0; b < a.sequences; ++b)
        for (int64_t row = a.offsets[b]; row < a.offsets[b + 1]; ++row) {
          const F16 d = load_lanes(g.dpre + row * n + i, lanes);
          bias = bias + d;
          for (int w = 0; w < a.width; ++w) {
            const int64_t at = row - (a.width - 1) + w;
            if (at >= a.offsets[b]) acc[w] = fma(d, load_lanes(x + at * a.x_stride + i, lanes), acc[w]);
          }
        }
      for (int w = 0; w < a.width; ++w) store_lanes(g.dweight + w * n + i, acc[w], lanes);
      if (g.dbias) store_lanes(g.dbias + i, bias, lanes);
    }
  });
}

}  // namespace

void causal_conv_fwd(const CausalConvFwd& a) { a.conv.dtype == Dtype::f32 ? forward<float>(a) : forward<bf16>(a); }
void causal_conv_bwd(const CausalConvBwd& a) { a.conv.dtype == Dtype::f32 ? backward<float>(a) : backward<bf16>(a); }

}  // namespace vx::VEXACT_ISA
