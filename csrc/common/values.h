// From a tensor to a pointer to its values. A pointer is cast nowhere else in a CPU binding, so that a dtype that
// somebody got wrong is an error, never memory that is read or written for what it is not.
#pragma once
#include "common/tensor.h"

namespace vx {

template <class T>
constexpr ScalarType kTypeOf = ScalarType::Undefined;
template <>
inline constexpr ScalarType kTypeOf<float> = ScalarType::Float;
template <>
inline constexpr ScalarType kTypeOf<double> = ScalarType::Double;
template <>
inline constexpr ScalarType kTypeOf<int32_t> = ScalarType::Int;
template <>
inline constexpr ScalarType kTypeOf<int64_t> = ScalarType::Long;

template <class T>
void check_type(const Tensor& t, const char* name) {
  static_assert(kTypeOf<T> != ScalarType::Undefined);
  STD_TORCH_CHECK(t.scalar_type() == kTypeOf<T>, name, ": expected ",
                  kTypeOf<T> == ScalarType::Float    ? "float32"
                  : kTypeOf<T> == ScalarType::Double ? "float64"
                  : kTypeOf<T> == ScalarType::Int    ? "int32"
                                                     : "int64");
}

template <class T>
const T* values(const Tensor& t, const char* name) {
  check_type<T>(t, name);
  return static_cast<const T*>(t.const_data_ptr());
}
template <class T>
T* mutable_values(const Tensor& t, const char* name) {
  check_type<T>(t, name);
  return static_cast<T*>(t.mutable_data_ptr());
}
template <class T>
const T* values(const std::optional<Tensor>& t, const char* name) {
  return t ? values<T>(*t, name) : nullptr;
}
template <class T>
T* mutable_values(const std::optional<Tensor>& t, const char* name) {
  return t ? mutable_values<T>(*t, name) : nullptr;
}

// Contiguous, of at least `size` values.
inline void check_values(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.is_contiguous() && t.numel() >= size, name, ": expected at least ", size, " contiguous values");
}
template <class T>
const T* values(const Tensor& t, const char* name, int64_t size) {
  check_values(t, name, size);
  return values<T>(t, name);
}
template <class T>
T* mutable_values(const Tensor& t, const char* name, int64_t size) {
  check_values(t, name, size);
  return mutable_values<T>(t, name);
}

// What is handed on as void*, with one Dtype for all of them.
inline void check_dtype(const Tensor& t, const char* name, Dtype dtype) {
  STD_TORCH_CHECK(dtype_of(t, name) == dtype, name, ": expected ", dtype == Dtype::f32 ? "float32" : "bfloat16");
}
inline void check_2d(const Tensor& t, const char* name, int64_t rows, int64_t cols, Dtype dtype) {
  check_2d(t, name, rows, cols);
  check_dtype(t, name, dtype);
}
inline void check_1d(const Tensor& t, const char* name, int64_t size, Dtype dtype) {
  check_1d(t, name, size);
  check_dtype(t, name, dtype);
}
inline void check_contiguous(const Tensor& t, const char* name, int64_t rows, int64_t cols, Dtype dtype) {
  check_2d(t, name, rows, cols, dtype);
  STD_TORCH_CHECK(t.is_contiguous(), name, ": expected contiguous");
}
// Of a norm: a residual to be added, and where the sum goes.
inline void check_residual(const std::optional<Tensor>& residual, const std::optional<Tensor>& new_residual, int64_t rows,
                           int64_t cols, Dtype dtype) {
  if (!residual) return;
  check_2d(*residual, "residual", rows, cols, dtype);
  STD_TORCH_CHECK(new_residual, "residual: new_residual is missing");
  check_contiguous(*new_residual, "new_residual", rows, cols, dtype);
}

}  // namespace vx
