// What the kernels of linear_silu_mul are given, checked.
#pragma once
#include <algorithm>

#include "common/cuda.h"
#include "common/tensor.h"

namespace vx {

constexpr int kGatedShared = 226 * 1024;  // bytes of a multiprocessor's shared memory that a block may have

struct GatedOperands {
  const void *x, *weight;  // (m, k); (n, k), gates above ups
  void* out;               // (m, n / 2)
  int64_t x_ld, weight_ld, out_ld;
  int m, n, k, device;
  bool is_bf16, gelu;
  cudaStream_t stream;
};

inline int small(int64_t size) {
  STD_TORCH_CHECK(size >= 0 && size < (int64_t(1) << 31) - 1024, "linear_silu_mul: a size of ", size, " is out of range");
  return int(size);
}

// How far apart the rows of an operand are, as the copy engine takes them.
inline int64_t rows_apart(const Tensor& t, const char* name, ScalarType type, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.scalar_type() == type, name, ": expected x's dtype");
  check_2d(t, name, rows, columns);
  const int64_t apart = rows > 1 ? t.stride(0) : (columns + 7) / 8 * 8;
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && apart % 8 == 0 && apart >= columns, name,
                  ": rows must start on 16-byte boundaries, and not overlap");
  return apart;
}

inline GatedOperands gated_operands(const Tensor& x, const Tensor& weight, bool gelu, const Tensor& out) {
  const ScalarType type = x.scalar_type();
  const bool is_bf16 = type == ScalarType::BFloat16;
  STD_TORCH_CHECK(is_bf16 || type == ScalarType::Half, "x: expected bfloat16 or float16");
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, "x, weight: expected 2 dimensions");
  const int64_t m = x.size(0), k = x.size(1), n = weight.size(0);
  STD_TORCH_CHECK(m > 0 && k > 0 && n > 0 && n % 16 == 0, "linear_silu_mul: no kernel for (", m, ", ", k, ") by (", n, ", ", k, ")");
  const int64_t x_ld = rows_apart(x, "x", type, m, k), weight_ld = rows_apart(weight, "weight", type, n, k);
  const int64_t out_ld = rows_apart(out, "out", type, m, n / 2);
  STD_TORCH_CHECK(weight.get_device_index() == x.get_device_index() && out.get_device_index() == x.get_device_index(),
                  "linear_silu_mul: x, weight and out: expected one device");
  return {data(x), data(weight), mutable_data(out), x_ld, weight_ld, out_ld, small(m), small(n), small(k),
          x.get_device_index(), is_bf16, gelu, current_stream(x)};
}

}  // namespace vx
