#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

// The slots of all tokens, t * top_k + s, sorted by expert; within one expert they keep their order. A slot whose id is
// no expert is left out.
struct MoePlan {
  int64_t slots, experts;
  const int32_t* ids;  // (slots,)
  int32_t* offsets;    // (experts + 1): where each expert's rows begin
  int32_t* order;      // (slots,): sorted place -> slot; 0 behind the last row
  int32_t* position;   // (slots,): slot -> sorted place, or -1
};

struct MoeGather {  // rows of x in sorted order
  int64_t rows, top_k, bytes;
  const void* x;
  int64_t x_stride;      // bytes
  const int32_t* order;  // (rows,)
  void* out;             // (rows, ...) contiguous
};

struct MoeCombine {  // out[t] = sum over slots of weight * y[position]
  Dtype dtype;
  int64_t tokens, top_k, n;
  const void* y;         // (., n) contiguous
  const int32_t* position;
  const float* weights;  // (tokens, top_k), or null: all 1
  void* out;             // (tokens, n) contiguous
};

// Of a = activation(gate) * up, where row p of a was multiplied by its weight behind the down projection.
struct MoeGateBwd {
  Dtype dtype;
  int64_t rows, n;
  bool gelu;
  const void* h;         // (rows, 2 n): gate, up
  const void* da;        // (rows, n): the gradient of a, not yet times the weight
  const int32_t* order;
  const float* weights;  // (slots,)
  void* dh;              // (rows, 2 n)
  void* scaled;          // (rows, n): weight * a
  float* dweights;       // (slots,): the slots that have a row
};

// gpt-oss's gate of rows of h, columns of gates and ups by turns, to which their expert's bias is added and rounded:
// g = min(g, 7), u = u from -7 to 7, a = g sigmoid(1.702 g) (u + 1).
struct MoeSwiglu {
  Dtype dtype;
  int64_t rows, n;
  const void *h, *bias;         // (rows, 2 n), (experts, 2 n)
  const int32_t *ids, *order;   // (slots,): of a slot its expert; of a row its slot
  void* a;                      // (rows, n)
};

struct MoeAddBias {  // y[row] += bias[expert], rounded
  Dtype dtype;
  int64_t rows, n;
  void* y;
  const void* bias;
  const int32_t *ids, *order;
};

struct MoeSwigluBwd {
  MoeSwiglu of;          // of.a: weight * a
  const void* da;        // (rows, n): not yet times the weight
  const void* of_bias;   // (rows, 1): what the second bias adds to the gradient of the weight
  const float* weights;  // (slots,)
  void* dh;              // (rows, 2 n)
  float* dweights;       // (slots,): the slots that have a row
};

}  // namespace vx

VX_DECLARE_KERNEL(void moe_plan(const MoePlan& a))
VX_DECLARE_KERNEL(void moe_gather(const MoeGather& a))
VX_DECLARE_KERNEL(void moe_combine(const MoeCombine& a))
VX_DECLARE_KERNEL(void moe_gate_bwd(const MoeGateBwd& a))
VX_DECLARE_KERNEL(void moe_swiglu_fwd(const MoeSwiglu& a))
VX_DECLARE_KERNEL(void moe_swiglu_bwd(const MoeSwigluBwd& a))
VX_DECLARE_KERNEL(void moe_add_bias(const MoeAddBias& a))
