// In place of a norm: what was received is given as what was added.
#pragma once
#include "cuda_runtime.h"

namespace vx {

template <class T, int COLUMNS, int UNITS>
float add_residual(const uint2 (&found)[UNITS], uint2 (&given)[UNITS], float (&)[COLUMNS]) {
  for (int i = 0; i < UNITS; ++i) given[i] = found[i];
  return 0;
}
inline float sum_of_block(float sum, float*) {
  __syncthreads();
  return sum;
}
inline float scale_of(float, int, float) { return 0; }
template <class T>
uint2 normed(const float*, float, uint2 weight, bool) {
  return weight;
}

}  // namespace vx
