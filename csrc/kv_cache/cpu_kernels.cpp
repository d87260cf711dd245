#include "kv_cache/kernels.h"

#include <cstring>

#include "common/parallel.h"

namespace vx::VEXACT_ISA {
namespace {

void copy_head(const KvCacheStore& a, const KvHalf& half, int64_t head) {
  const char* from = static_cast<const char*>(half.from) + head * half.head_stride;
  char* cache = static_cast<char*>(half.cache) + head * half.cache_head_stride;
  for (int64_t t = 0; t < a.tokens; ++t) {
    const int64_t slot = a.slots[t];
    if (slot < 0) continue;
    const int64_t page = slot / a.page_size, offset = slot - page * a.page_size;
    std::memcpy(cache + page * half.page_stride + offset * half.slot_stride, from + t * half.stride, half.row);
  }
}

}  // namespace

// Threads share out the heads and each goes through the tokens in order, so a repeated slot keeps its last token.
void kv_cache_store(const KvCacheStore& a) {
  const int64_t grain = 1 + (int64_t(1) << 16) / (a.tokens * (a.k.row + a.v.row) / 2 + 1);
  parallel_for(0, 2 * a.heads, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) copy_head(a, i < a.heads ? a.k : a.v, i % a.heads);
  });
}

}  // namespace vx::VEXACT_ISA
