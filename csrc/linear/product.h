// One matrix product as the GPU kernels of linear see it.
#pragma once
#include <cstdint>

namespace vx {

struct Sending;

// out (m, n) = a (m, k) b (k, n) + bias. a and b are contiguous along k or along their other dimension; the distance of
// their rows (columns) and of out's rows is in elements.
struct Product {
  int64_t m, n, k;
  int64_t a_ld, b_ld, out_ld;
  bool a_k_contiguous, b_k_contiguous;
  bool is_f32;       // a, b and bias: fp32
  bool is_bf16;      // else bf16, else fp16
  bool out_f32;      // else out is of their dtype
  bool resume;       // start from the fp32 values in out
  bool out_aligned;  // out's rows begin on 16-byte boundaries; a's, b's and the bias always do
  const void *a, *b, *bias;
  void* out;
  int device;
  const Sending* sending = nullptr;  // where columns go instead of to out, if the kernel sends
};

}  // namespace vx
