#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

constexpr int64_t kDeltaChunk = 64;  // rows of a chunk, cut from the start of a sequence
constexpr int64_t kDeltaBlock = 16;  // rows whose own sums go one by one

struct GatedDelta {
  Dtype dtype;                     // of q, k, v, the output and their gradients
  int64_t hk, hv, dk, dv, sequences;
  const void *q, *k, *v;           // (tokens, heads, dim), dims contiguous
  int64_t q_row, q_head, k_row, k_head, v_row, v_head;
  const float *g, *beta;           // (tokens, hv)
  float scale;
  bool l2norm;
  const int32_t* offsets;          // (sequences + 1,)
};

// What sequences have behind their first row, by slot: the state at the last chunk boundary, and the rows of the chunk
// that is open. Null where every sequence starts.
struct DeltaSlots {
  float* state;                    // (slots, hv, dk, dv)
  void* open_k;                    // (slots, chunk, hk, dk): as given, before the norm
  float *open_u, *open_g;          // (slots, chunk, hv, dv), (slots, chunk, hv): u, and the running sum of g
  int64_t state_slot, k_slot, u_slot, g_slot;  // strides
  const int32_t *slots, *context_lens;
};

struct GatedDeltaFwd {
  GatedDelta op;
  DeltaSlots open;
  const float* initial;            // (sequences, hv, dk, dv) or null; without slots
  float* final_state;              // likewise
  void* out;                       // (tokens, hv, dv)
};

struct GatedDeltaBwd {
  GatedDelta op;
  const float *initial, *dfinal;   // (sequences, hv, dk, dv) or null
  const void* dout;                // (tokens, hv, dv)
  float *dq, *dk;                  // (tokens, hv, dk): of each value head, before the norm's own gradient
  void *dq_out, *dk_out, *dv;      // (tokens, hk, dk) twice, (tokens, hv, dv)
  float *dg, *dbeta, *dinitial;    // (tokens, hv) twice, (sequences, hv, dk, dv) or null
};

struct DeltaGates {
  Dtype dtype;                     // of a, b and beta
  int64_t rows, heads, a_stride, b_stride;
  const void *a, *b;               // (rows, heads), rows a_stride and b_stride elements apart
  const float *a_log, *dt_bias;    // (heads,)
};

struct DeltaGatesFwd {
  DeltaGates op;
  float* g;                        // (rows, heads)
  void* beta;                      // (rows, heads)
};

struct DeltaGatesBwd {
  DeltaGates op;
  const float* dg;                 // (rows, heads), contiguous as all below
  const void* dbeta;
  void *da, *db;
  float *da_log, *ddt_bias;        // (heads,)
};

}  // namespace vx

VX_DECLARE_KERNEL(void gated_delta_fwd(const GatedDeltaFwd& a))
VX_DECLARE_KERNEL(void gated_delta_bwd(const GatedDeltaBwd& a))
VX_DECLARE_KERNEL(void delta_gates_fwd(const DeltaGatesFwd& a))
VX_DECLARE_KERNEL(void delta_gates_bwd(const DeltaGatesBwd& a))
