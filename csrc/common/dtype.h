// The element types of the CPU kernels and their conversions; no torch headers.
#pragma once
#include <cstdint>
#include <cstring>

namespace vx {

struct bf16 {
  uint16_t bits;
};

inline float to_f32(float x) { return x; }
inline float to_f32(bf16 x) {
  uint32_t u = uint32_t(x.bits) << 16;
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

template <class T>
T from_f32(float x);
template <>
inline float from_f32<float>(float x) {
  return x;
}
template <>
inline bf16 from_f32<bf16>(float x) {  // nearest, ties to even; every NaN becomes 0x7fc0
  uint32_t u;
  std::memcpy(&u, &x, 4);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fc0};
  return {uint16_t((u + 0x7fffu + ((u >> 16) & 1u)) >> 16)};
}

enum class Dtype : int { f32, bf16 };

}  // namespace vx
