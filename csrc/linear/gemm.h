// One matrix product for every room: C = A B, fp32 inside, the same bits whatever the sizes around an element, the
// blocking, the threads and the instruction set.
//
// order: every element of C is one fp32 accumulator, acc = fma(A[i, p], B[p, j], acc) for p = 0, 1, ..., k - 1, from +0
// (or from the fp32 value that C holds, with continue_c), then + bias[j] in fp32, then one rounding to C's dtype.
// So C[i, j] is a function of row i of A, column j of B and bias[j] alone, and a product over k may be cut into
// several calls with continue_c without changing a bit.
#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

// Element (i, j) is data[i * row_stride + j * col_stride], strides in elements. Any strides are right; operands with
// a unit stride in either direction are fast.
struct Operand {
  const void* data;
  Dtype dtype;
  int64_t row_stride, col_stride;
};

struct Gemm {
  int64_t m, n, k;               // any of them may be 0; with k = 0 the result is 0 (or C), plus bias
  Operand a;                     // (m, k)
  Operand b;                     // (k, n): a weight stored (n, k) is {w, dtype, 1, its row stride}
  void* c;                       // (m, n), columns contiguous, overlapping neither operand
  Dtype c_dtype;
  int64_t c_stride;              // between rows of C
  const void* bias = nullptr;    // (n,) contiguous, or null
  Dtype bias_dtype = Dtype::f32;
  bool continue_c = false;       // C is fp32 and holds the accumulators so far
};

}  // namespace vx

// Both use the calling thread's scratch slots 6 and 7 (gemm: those of every worker); callers keep to 0..5.
VX_DECLARE_KERNEL(void gemm(const Gemm& g))         // on torch's threads; inside a parallel region, on the caller alone
VX_DECLARE_KERNEL(void gemm_single(const Gemm& g))  // on the calling thread alone, for use inside parallel regions
