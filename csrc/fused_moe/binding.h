// What the bindings of this room check, on a CPU and on a GPU.
#pragma once
#include "common/values.h"

namespace vx {

inline int32_t* ints(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.is_contiguous() && t.numel() == size, name, ": expected contiguous, ", size, " elements");
  return mutable_values<int32_t>(t, name);
}

inline float* floats(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.is_contiguous() && t.numel() == size, name, ": expected contiguous, ", size, " elements");
  return mutable_values<float>(t, name);
}

}  // namespace vx
