#pragma once
#include "linear/gemm.h"

namespace vx {

// One product per expert: rows offsets[e] .. offsets[e + 1] of A with matrix e of B. Offsets ascend from 0 to at most
// the number of rows; the rows behind the last group become 0.
struct GroupedGemm {
  int64_t rows, n, k, experts;
  const int32_t* offsets;  // (experts + 1)
  Operand a;               // (rows, k)
  Operand b;               // (k, n) of expert 0
  int64_t b_expert;        // elements between experts
  void* c;                 // (rows, n), columns contiguous
  Dtype c_dtype;
  int64_t c_stride;
};

// C[e] = A[:, group e] B[group e, :]: a sum over the rows of a group, ascending; 0 for an empty group.
struct GroupedSums {
  int64_t m, n, experts;
  const int32_t* offsets;
  Operand a;               // (m, rows)
  Operand b;               // (rows, n)
  void* c;                 // (experts, m, n) contiguous
  Dtype c_dtype;
};

}  // namespace vx

VX_DECLARE_KERNEL(void grouped_gemm(const GroupedGemm& g))
VX_DECLARE_KERNEL(void grouped_sums(const GroupedSums& g))
