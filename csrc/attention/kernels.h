#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

// Keys are taken in blocks of this many, cut at absolute multiples from the start of their sequence. Part of the
// contract: it fixes where the running maximum may move, so changing it changes bits.
constexpr int kAttentionBlock = 64;

// Some consecutive query positions of one sequence, all heads of one key-value head's group.
struct AttentionTask {
  int64_t q_begin;    // row of q of the first position
  int64_t positions;  // how many
  int64_t first;      // the first one's place among its sequence's keys; negative where keys are fewer than queries
  int64_t k_begin;    // row of k and v of the sequence's first key; unused with a block table
  int64_t k_len;      // keys of the sequence
  int64_t sequence;   // row of the block table
  int64_t kv_head;    // the first key-value head
  int64_t kv_heads;   // how many; one where many rows share each of them, and in the backward
  int64_t block;      // backward only: which block of keys; -1: all of them, and dq too
};

// What a score is made of, and which keys a query sees.
struct AttentionRule {
  float scale, softcap;  // softcap 0: none
  int64_t window;        // keys seen, the query's own place included; 0: all
  int64_t segment;       // 0: none
  bool causal;
};

struct AttentionShape {
  Dtype dtype;  // of every tensor that has no type of its own below
  int64_t hq, hk, d, dv;
};

struct AttentionKv {
  const void *k, *v;                // last dimension contiguous; strides in elements
  int64_t k_stride, k_head_stride;  // from one key to the next (inside a page), from one head to the next
  int64_t v_stride, v_head_stride;
  const int32_t* table;             // null: keys lie contiguously from k_begin on
  int64_t table_stride, page_size, k_page_stride, v_page_stride;
};

struct AttentionFwd {
  AttentionShape shape;
  AttentionRule rule;
  AttentionKv kv;
  const void* q;       // (T, Hq, D)
  int64_t q_stride, q_head_stride;
  const float* sinks;  // (Hq,) or null
  void* out;           // (T, Hq, Dv) contiguous
  float* lse;          // (T, Hq) contiguous, or null
  const AttentionTask* tasks;
  int64_t count;
};

struct AttentionBwd {
  AttentionShape shape;
  AttentionRule rule;
  AttentionKv kv;                 // contiguous keys only
  const void* q;
  int64_t q_stride, q_head_stride;
  const float* sinks;
  const void *out, *dout;         // (T, Hq, Dv) contiguous
  const float* lse;               // (T, Hq)
  float* delta;                   // (T, Hq) work space
  int64_t tokens;                 // T
  float* dq;                      // (T, Hq, D) contiguous fp32, zero on entry
  void *dk, *dv;                  // (Tk, Hk, D), (Tk, Hk, Dv) contiguous
  float* dsinks;                  // (Hq,) or null
  const AttentionTask* q_tasks;   // tiles of queries: dq; none where the tasks below do that too
  int64_t q_count;
  const AttentionTask* k_tasks;   // blocks of keys: dk and dv; or whole sequences
  int64_t k_count;
};

}  // namespace vx

VX_DECLARE_KERNEL(void attention_fwd(const AttentionFwd& a))
VX_DECLARE_KERNEL(void attention_bwd(const AttentionBwd& a))
