// A program of test_gated_delta_small.py: the kernel of few single rows beside the one of any number (csrc/gated_delta),
// both without a GPU. Whatever either writes has to be the same.
//
// single_rows decode|step bf16|fp16 plain|cancelling|special; built with STEP_ALONE: of step and bf16
#include <memory>
#include <random>
#include <string>

#include "gated_delta/small_decode.cuh"

namespace vx::delta {
__align__(16) unsigned char memory[228 << 10];  // shared by a block
}

using namespace vx;

constexpr int kHk = 2, kHv = 4, kD = kSmallDepth, kRing = 4, kChannels = 2 * kHk * kD + kHv * kD;
constexpr int kSlots = 13;
std::mt19937 generator(7);

float normal() { return std::normal_distribution<float>()(generator); }

// Values in memory of their own, that kernels may touch.
template <class X>
struct Values {
  std::vector<X> of;
  explicit Values(size_t count) : of(count) {
    tensors.push_back({reinterpret_cast<char*>(of.data()), reinterpret_cast<char*>(of.data() + count)});
  }
  Values(Values&&) = default;
  template <class Draw>
  static Values drawn(size_t count, Draw draw) {
    Values y(count);
    for (X& x : y.of) {
      if constexpr (std::is_same_v<X, float>)
        x = draw();
      else
        sm90::narrow(x, draw());
    }
    return y;
  }
};

// What the kernels write.
template <class T>
struct Written {
  Values<float> state, w, g;
  Values<T> keys, taps, out;
};

template <class X>
bool same(const char* name, const Values<X>& x, const Values<X>& y) {
  for (size_t i = 0; i < x.of.size(); ++i) {
    const X *a = &x.of[i], *b = &y.of[i];
    const auto none = [](const X* p) {
      if constexpr (std::is_same_v<X, float>)
        return *p != *p;
      else
        return sm90::widen(*p) != sm90::widen(*p);
    };
    if (memcmp(a, b, sizeof(X)) && !(none(a) && none(b))) return printf("%s differs at %zu\n", name, i), false;
  }
  return true;
}

template <class T, bool STEP>
int compare(const std::string& kind) {
  // Rows of this call: known are the rows before, slots none, too large, and of sequences of two rows and of none.
  const struct {
    int known, rows, slot;
  } sequences[] = {{0, 1, 3},   {1, 1, 0},    {143, 1, 7},  {144, 1, 2}, {159, 1, 12}, {5, 1, -1},  {190, 1, 9},
                   {140, 2, 5}, {127, 1, 11}, {200, 0, 10}, {63, 1, 6},  {130, 1, kSlots}, {191, 1, 4}};
  constexpr int kCount = sizeof(sequences) / sizeof(*sequences);
  Values<int32_t> offsets(kCount + 1), lens(kCount), slots(kCount);
  for (int i = 0; i < kCount; ++i) {
    const auto [known, rows, slot] = sequences[i];
    offsets.of[i + 1] = offsets.of[i] + rows, lens.of[i] = known + rows, slots.of[i] = slot;
  }
  const int tokens = offsets.of[kCount];
  const bool special = kind == "special", cancelling = kind == "cancelling";
  const auto value = [&] {
    constexpr float kSpecial[] = {NAN, INFINITY, -INFINITY, -0.0f, 1e-39f, 3e38f};
    return special && generator() % 300 == 0 ? kSpecial[generator() % 6] : normal();
  };
  const auto wide = [&] { return value() * exp2f(float(int(generator() % 24)) - 12); };
  // Of both kernels the same; what no sequence has, none may look at.
  const auto written = [&] {
    generator.seed(11);
    Written<T> y{Values<float>::drawn(kSlots * kHv * kD * kD, cancelling ? std::function<float()>(wide) : value),
                 Values<float>::drawn(kSlots * kChunk * kHv * kD, wide),
                 Values<float>::drawn(kSlots * kChunk * kHv, [&] { return -fabsf(normal()) * 0.1f; }),
                 Values<T>::drawn(kSlots * kChunk * kHk * kD, value), Values<T>::drawn(kSlots * kRing * kChannels, value),
                 Values<T>::drawn(tokens * kHv * kD, normal)};
    if (cancelling)  // keys and queries meet both halves of a state with equal values
      for (int n = 0; n < kSlots * kHv; ++n)
        for (int r = 0; r < kD / 2; ++r)
          for (int c = 0; c < kD; ++c) {
            float* const at = &y.state.of[(n * kD + r) * kD + c];
            at[kD / 2 * kD] = -*at;
          }
    return y;
  };
  const size_t before = tensors.size();
  auto x = Values<T>::drawn(tokens * kChannels, value);
  if (cancelling)
    for (int n = 0; n < tokens * 2 * kHk; ++n) {
      T* const row = &x.of[n / (2 * kHk) * kChannels + n % (2 * kHk) * kD];
      memcpy(row + kD / 2, row, kD / 2 * sizeof(T));
    }
  auto weight = Values<T>::drawn(kChannels * kStepTaps, normal), bias = Values<T>::drawn(kChannels, normal);
  if (cancelling)  // a row stays as it is, but for silu
    for (int n = 0; n < kChannels * kStepTaps; ++n) sm90::narrow(weight.of[n], n % kStepTaps == 3);
  auto a = Values<T>::drawn(tokens * kHv, value), b = Values<T>::drawn(tokens * kHv, value);
  auto a_log = Values<float>::drawn(kHv, normal);
  auto dt_bias = Values<T>::drawn(kHv, normal);
  auto g = Values<float>::drawn(tokens * kHv, [] { return -fabsf(normal()); });
  auto beta = Values<T>::drawn(tokens * kHv, [] { return fabsf(normal()); });

  const auto run = [&](Written<T>& y, auto launch) {
    GatedDeltaDecode args{};
    if (!STEP) {
      args.q = x.of.data(), args.k = x.of.data() + kHk * kD, args.v = x.of.data() + 2 * kHk * kD;
      args.q_row = args.k_row = args.v_row = kChannels, args.q_head = args.k_head = args.v_head = kD;
      args.g = g.of.data(), args.beta = beta.of.data(), args.g_row = args.beta_row = kHv;
    }
    args.state = y.state.of.data(), args.state_slot = kHv * kD * kD;
    args.open_k = y.keys.of.data(), args.k_slot = kChunk * kHk * kD;
    args.open_w = y.w.of.data(), args.w_slot = kChunk * kHv * kD;
    args.open_g = y.g.of.data(), args.g_slot = kChunk * kHv;
    args.slots = slots.of.data(), args.context_lens = lens.of.data(), args.offsets = offsets.of.data();
    args.out = y.out.of.data();
    args.sequences = kCount, args.slot_count = kSlots, args.tokens = tokens;
    args.hk = kHk, args.hv = kHv, args.dk = args.dv = kD, args.scale = 0.3f, args.l2norm = kind != "plain";
    DeltaStep step{};
    if (STEP) {
      step.x = x.of.data(), step.x_row = kChannels, step.weight = weight.of.data();
      step.bias = special ? bias.of.data() : nullptr;
      step.taps = y.taps.of.data(), step.taps_slot = kRing * kChannels, step.ring = kRing, step.channels = kChannels;
      step.a = a.of.data(), step.b = b.of.data(), step.a_row = step.b_row = kHv;
      step.a_log = a_log.of.data(), step.dt_bias = dt_bias.of.data();
      step.wide_a_log = true, step.doubled = special;
    }
    launch(args, step);
  };
  const auto block = [&](int threads, auto kernel) {
    memset(delta::memory, 0xff, sizeof(delta::memory));
    run_block(threads, kernel);
  };

  Written<T> expected = written(), untouched = written();
  run(expected, [&](const GatedDeltaDecode& args, const DeltaStep& step) {
    gridDim = {5, 1, 1};  // each of which has several items
    for (blockIdx = {0, 0, 0}; blockIdx.x < gridDim.x; ++blockIdx.x)
      block(kDecodeThreads, [&] { delta::decode_kernel<T, kD, STEP>(args, step); });
  });
  if (!memcmp(expected.out.of.data(), untouched.out.of.data(), expected.out.of.size() * sizeof(T)))
    return puts("nothing is written"), 2;
  const auto small = [&]<bool EARLY>(std::bool_constant<EARLY>, int hints, bool last_warp_first) {
    delta::wrong_hints = hints, running.last_warp_first = last_warp_first;
    Written<T> found = written();
    run(found, [&](const GatedDeltaDecode& args, const DeltaStep& step) {
      gridDim = {kHv / kHk * kD / kDecodeColumns, kHk, kCount};
      for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
          for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x)
            block(delta::kSmallThreads, [&] { delta::small_decode_kernel<T, kD, kD, STEP, EARLY>(args, step); });
    });
    return same("out", found.out, expected.out) && same("state", found.state, expected.state) &&
           same("w", found.w, expected.w) && same("g", found.g, expected.g) && same("keys", found.keys, expected.keys) &&
           same("taps", found.taps, expected.taps);
  };
  if (!small(std::false_type(), 0, false) || !small(std::true_type(), 0, true)) return 1;
  if (!small(std::true_type(), 1, false)) return 1;  // hints are any numbers
  tensors.resize(before);
  return puts("equal"), 0;
}

int main(int, char** arguments) {
  const std::string part = arguments[1], type = arguments[2], kind = arguments[3];
#if STEP_ALONE
  return compare<__nv_bfloat16, true>(kind);
#else
  if (part == "step") return type == "bf16" ? compare<__nv_bfloat16, true>(kind) : compare<__half, true>(kind);
  return type == "bf16" ? compare<__nv_bfloat16, false>(kind) : compare<__half, false>(kind);
#endif
}
