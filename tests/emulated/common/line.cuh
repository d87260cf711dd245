#pragma once
#include <emmintrin.h>
#include <sched.h>

#include "cuda_runtime.h"

namespace vx {

// CPUs with AVX store and load sixteen aligned bytes at once.
inline void store_line(uint4* where, uint4 line) {
  __m128i value;
  memcpy(&value, &line, sizeof(value));
  *reinterpret_cast<volatile __m128i*>(where) = value;
}
inline uint4 load_line(const uint4* where) {
  sched_yield();
  const __m128i value = *reinterpret_cast<const volatile __m128i*>(where);
  uint4 line;
  memcpy(&line, &value, sizeof(line));
  return line;
}

}  // namespace vx
