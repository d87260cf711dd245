#pragma once
#include <cstdint>

#include "common/dtype.h"
#include "common/isa.h"

namespace vx {

struct Sample {
  int64_t rows, n;
  const float* logits;                 // (rows, n), row stride stride
  int64_t stride;
  const int64_t *seeds, *positions;    // (rows,) as all below
  const float* temperature;            // 0 is greedy
  const int64_t* top_k;                // 0 is off
  const float *top_p, *min_p;          // 1 and 0 are off
  int64_t* ids;                        // -1 where the row has no finite log-sum-exp
  float *logprobs, *raw_logprobs;
};

}  // namespace vx

VX_DECLARE_KERNEL(void sample(const Sample& a))
