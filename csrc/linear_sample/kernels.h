// What is drawn of each row of logits, and what the kernels that make them leave of every block of 128.
#pragma once
#include <cstdint>

namespace vx {

constexpr int kDrawBlock = 128;           // LSE_BLOCK
constexpr int kNoToken = 2147483647;

struct Draws {
  const int64_t *seeds, *positions;  // (rows,)
  const float* temperature;          // (rows,); 0 is greedy
  float softcap;                     // 0: none
  int rows, vocabulary, blocks;
  float* parts;    // (rows, 4, blocks): the largest logit and the sum of e^(logit - it), raw; both at the temperature
  float* entries;  // (rows, 2, blocks): the logit of the token below, and the block's number (greedy: 0)
  int* tokens;     // (rows, blocks): what is drawn if the block wins; kNoToken where another is known to be better
  unsigned long long* known = nullptr;  // (rows,): the best block's sum so far, in_order; null: nobody tells others
};

}  // namespace vx
