// What the bindings of packed sequences check about values, before anything is read by them; no torch headers.
#pragma once
#include <algorithm>
#include <cstdint>
#include <vector>

namespace vx {

// Offsets ascend from 0 to rows, and no step is longer than `longest`.
inline bool offsets_valid(const int32_t* offsets, int64_t count, int64_t rows, int64_t longest = INT32_MAX) {
  if (count < 1 || offsets[0] != 0 || offsets[count - 1] != rows) return false;
  for (int64_t i = 1; i < count; ++i)
    if (offsets[i] < offsets[i - 1] || int64_t(offsets[i]) - offsets[i - 1] > longest) return false;
  return true;
}

// A length counts at least its call's rows; a slot is negative (none) or below `count`, and no two sequences share one.
inline bool slots_valid(const int32_t* slots, const int32_t* lens, const int32_t* offsets, int64_t sequences,
                        int64_t count) {
  std::vector<int32_t> seen;
  for (int64_t i = 0; i < sequences; ++i) {
    if (lens[i] < offsets[i + 1] - offsets[i] || slots[i] >= count || slots[i] < -1) return false;
    if (slots[i] >= 0) seen.push_back(slots[i]);
  }
  std::sort(seen.begin(), seen.end());
  return std::adjacent_find(seen.begin(), seen.end()) == seen.end();
}

}  // namespace vx
