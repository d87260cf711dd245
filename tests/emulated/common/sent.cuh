#pragma once
#include <cstdint>

namespace vx {
constexpr int kRanks = 8;
constexpr int64_t kSentNumbers = 512;
}  // namespace vx
