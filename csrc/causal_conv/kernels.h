#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

// What a sequence has behind its first row: the ring of its last inputs, by position. Null where every sequence starts.
struct ConvTaps {
  void* values;                 // (slots, ring, channels), slots slot_stride apart
  int64_t ring, slot_stride;    // ring: a power of two of at least the width
  const int32_t *slots;         // a sequence's slot; negative: it has none, reads zeros and stores nothing
  const int32_t *context_lens;
};

struct CausalConv {
  Dtype dtype;                  // of x, y and the ring
  int64_t channels, width, sequences;
  const void* x;                // (tokens, channels), rows x_stride apart
  int64_t x_stride;
  const float *weight, *bias;   // (width, channels), the oldest tap first; (channels,) or null
  const int32_t* offsets;       // (sequences + 1,)
  bool silu;
};

struct CausalConvFwd {
  CausalConv conv;
  ConvTaps taps;
  void* y;                      // (tokens, channels)
};

struct CausalConvBwd {
  CausalConv conv;
  const void* dy;               // (tokens, channels)
  float* dpre;                  // (tokens, channels): scratch, the gradient before the activation
  void* dx;                     // (tokens, channels)
  float *dweight, *dbias;       // (width, channels), (channels,) or null
};

}  // namespace vx

VX_DECLARE_KERNEL(void causal_conv_fwd(const CausalConvFwd& a))
VX_DECLARE_KERNEL(void causal_conv_bwd(const CausalConvBwd& a))
