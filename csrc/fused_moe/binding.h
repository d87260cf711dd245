// What the bindings of this room check, on a CPU and on a GPU.
#pragma once
#include "common/tensor.h"

namespace vx {

inline int32_t* ints(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() && t.numel() == size, name,
                  ": expected contiguous int32 of ", size, " elements");
  return static_cast<int32_t*>(mutable_data(t));
}

inline float* floats(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() == size, name,
                  ": expected contiguous float32 of ", size, " elements");
  return static_cast<float*>(mutable_data(t));
}

}  // namespace vx
