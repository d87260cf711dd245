#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

struct RopeHeads {
  int64_t heads;
  const void* in;                     // (tokens, heads, dim), the last dimension contiguous
  int64_t token_stride, head_stride;  // elements
  void* out;                          // (tokens, heads, dim) contiguous
};

struct Rope {
  Dtype dtype;        // of q, k and the outputs
  Dtype table_dtype;  // of cos and sin: dtype, or f32
  int64_t tokens, dim, rotary;
  RopeHeads q, k;
  const void *cos, *sin;  // (tokens, rotary), row strides below
  int64_t cos_stride, sin_stride;
  bool interleaved;  // pairs are (2i, 2i + 1) instead of (i, i + rotary / 2)
  bool transpose;    // the rotation's transpose: its gradient
};

struct RopeCosSin {
  Dtype dtype;  // of the outputs
  int64_t tokens, frequencies;
  const int64_t* positions;  // (axes, tokens)
  const int32_t* axes;       // (frequencies,): the axis of each; null: the first
  const float* inv_freq;     // (frequencies,)
  float scaling;
  void *cos, *sin;  // (tokens, 2 * frequencies) contiguous
};

}  // namespace vx

VX_DECLARE_KERNEL(void rope(const Rope& a))
VX_DECLARE_KERNEL(void rope_cos_sin(const RopeCosSin& a))
