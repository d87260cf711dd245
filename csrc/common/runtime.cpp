// The torch-facing half of common/: thread pool, instruction set, scratch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>

#include "common/float_mode.h"
#include "common/isa.h"
#include "common/parallel.h"

namespace vx {
namespace {

bool cpu_runs(Isa isa) {
#if defined(__x86_64__) || defined(_M_X64)
  __builtin_cpu_init();
  const bool fma = __builtin_cpu_supports("avx") && __builtin_cpu_supports("fma");
  if (isa == Isa::avx512)
    return fma && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (isa == Isa::avx2) return fma && __builtin_cpu_supports("avx2");
  return fma;
#else
  return true;
#endif
}

const char* const kNames[] = {
#define X(name) #name,
    VEXACT_ISAS
#undef X
};
constexpr int kCount = sizeof(kNames) / sizeof(kNames[0]);

int find(const char* name) {
  for (int i = 0; i < kCount; ++i)
    if (!std::strcmp(kNames[i], name) && cpu_runs(Isa(i))) return i;
  return -1;
}

std::atomic<int>& current() {
  static std::atomic<int> value{[] {
    if (const char* asked = std::getenv("VEXACT_CPU_ISA"); asked && *asked) {
      const int found = find(asked);
      STD_TORCH_CHECK(found >= 0, "VEXACT_CPU_ISA=", asked, ": not built, or this CPU cannot run it");
      return found;
    }
    for (int i = kCount - 1; i >= 0; --i)
      if (cpu_runs(Isa(i))) return i;
    STD_TORCH_CHECK(false, "vexact_ops needs a CPU with AVX and FMA");
    return -1;
  }()};
  return value;
}

}  // namespace

Isa isa() { return Isa(current().load(std::memory_order_relaxed)); }
const char* isa_name() { return kNames[int(isa())]; }
bool set_isa(const char* name) {
  const int found = find(name);
  if (found >= 0) current().store(found);
  return found >= 0;
}

// A worker's floating-point mode is its own, often that of the thread which started it: `fn` runs in the default one.
void parallel_range(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* context) {
  if (end - begin <= grain) {
    const DefaultFloatMode mode;
    if (end > begin) fn(begin, end, context);
    return;
  }
  torch::stable::parallel_for(begin, end, grain, [&](int64_t b, int64_t e) {
    const DefaultFloatMode mode;
    fn(b, e, context);
  });
}

void parallel_dynamic(int64_t count, int64_t grain, RangeFn fn, void* context) {
  const int64_t workers = num_threads();
  if (count <= grain || workers == 1) {
    const DefaultFloatMode mode;
    if (count > 0) fn(0, count, context);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, workers, 1, [&](int64_t b, int64_t e) {
    const DefaultFloatMode mode;
    for (int64_t i = b; i < e; ++i)
      for (int64_t at; (at = next.fetch_add(grain)) < count;) fn(at, at + grain < count ? at + grain : count, context);
  });
}

int num_threads() { return int(torch::stable::get_num_threads()); }

#ifdef __SANITIZE_ADDRESS__
constexpr bool kExact = true;  // memory of its own for each call, not a byte more than it asks for: what is beyond is seen
#else
constexpr bool kExact = false;
#endif

void* scratch(int slot, int64_t bytes) {
  struct Buffer {
    void* data = nullptr;
    int64_t size = 0;
    ~Buffer() { std::free(data); }
  };
  thread_local Buffer buffers[8];
  Buffer& buffer = buffers[slot];
  if (kExact || buffer.size < bytes) {
    std::free(buffer.data);
    buffer.data = nullptr;
    buffer.size = kExact ? bytes : (bytes + 4095) / 4096 * 4096;
    if (posix_memalign(&buffer.data, 64, buffer.size)) {
      buffer.data = nullptr;
      buffer.size = 0;
      throw std::bad_alloc();
    }
  }
  return buffer.data;
}

}  // namespace vx
