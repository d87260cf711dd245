// From torch tensors to what the kernels take. Only the bindings (cpu.cpp, cuda.cu) include this.
#pragma once
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>

#include "common/dtype.h"

namespace vx {

using Tensor = torch::stable::Tensor;
using torch::headeronly::ScalarType;

inline Dtype dtype_of(const Tensor& t, const char* name) {
  const ScalarType s = t.scalar_type();
  STD_TORCH_CHECK(s == ScalarType::Float || s == ScalarType::BFloat16, name, ": expected float32 or bfloat16");
  return s == ScalarType::Float ? Dtype::f32 : Dtype::bf16;
}

inline void check_last_dim_contiguous(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.numel() == 0 || t.dim() == 0 || t.size(t.dim() - 1) <= 1 || t.stride(t.dim() - 1) == 1, name,
                  ": the last dimension must be contiguous");
}

// The bindings trust Python's checks for meaning and repeat only what memory safety needs.
inline void check_2d(const Tensor& t, const char* name, int64_t rows, int64_t cols) {
  STD_TORCH_CHECK(t.dim() == 2 && t.size(0) == rows && t.size(1) == cols, name, ": expected (", rows, ", ", cols, ")");
  check_last_dim_contiguous(t, name);
}

inline void check_1d(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.dim() == 1 && t.size(0) == size && (size <= 1 || t.stride(0) == 1), name, ": expected contiguous (",
                  size, ",)");
}

inline const void* data(const Tensor& t) { return t.const_data_ptr(); }
inline void* mutable_data(const Tensor& t) { return t.mutable_data_ptr(); }
inline const void* data(const std::optional<Tensor>& t) { return t ? t->const_data_ptr() : nullptr; }
inline void* mutable_data(const std::optional<Tensor>& t) { return t ? t->mutable_data_ptr() : nullptr; }

}  // namespace vx
