#pragma once
#include <cstdint>

#include "linear/gemm.h"

namespace vx {

struct Head {                // the last layer and its targets; logits are hidden weight^T, fp32, never stored whole
  Dtype dtype;               // of hidden and weight
  int64_t tokens, vocabulary, width;
  const void *hidden, *weight;
  int64_t hidden_stride, weight_stride;  // between rows; columns are contiguous
  const int64_t* target;     // (tokens,), each in [0, vocabulary)
  const float* temperature;  // (tokens,), or one for all
  bool one_temperature;
  float softcap;             // 0 is off
};

// Logits are made in pieces whose sizes the workspaces give; sizes bound the memory and cannot change a bit.
struct LinearLogprobsFwd {
  Head head;
  int64_t piece_tokens;      // whose block sums are held at once
  float* workspace;          // piece_tokens * (3 per vocabulary block of 512 + 1)
  float *logprob, *entropy;  // (tokens,); entropy may be null
  float* lse;                // (tokens, 2): the maximum, and the log of the sum relative to it
};

struct LinearLogprobsBwd {
  Head head;
  int64_t piece_tokens, piece_vocabulary;
  const float *dlogprob, *dentropy;  // (tokens,); dentropy may be null, and entropy with it
  const float *entropy, *lse;
  float* workspace;                  // (piece_tokens, piece_vocabulary): a piece of dlogits
  float* dhidden;                    // (tokens, width) contiguous, or null
  void* dweight;                     // (vocabulary, width) contiguous in dtype, or null
  float* dweight_sums;               // (piece_vocabulary, width) where tokens > piece_tokens and dtype is not f32
};

struct Softcap {
  int64_t rows, n;
  const float *x, *dy;       // (rows, n), row strides below; dy is null forward
  float* y;                  // (rows, n) contiguous: cap tanh(x / cap), or its gradient
  int64_t x_stride, dy_stride;
  float cap;
};

}  // namespace vx

VX_DECLARE_KERNEL(void linear_logprobs_fwd(const LinearLogprobsFwd& a))
VX_DECLARE_KERNEL(void linear_logprobs_bwd(const LinearLogprobsBwd& a))
VX_DECLARE_KERNEL(void softcap(const Softcap& a))
