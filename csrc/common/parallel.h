// Threads for kernels, without a torch header: torch's own pool does the work, so torch.set_num_threads holds here too.
// No kernel's bits may depend on how a range is cut: give every output element to exactly one iteration.
#pragma once
#include <cstdint>

namespace vx {

using RangeFn = void (*)(int64_t begin, int64_t end, void* context);
void parallel_range(int64_t begin, int64_t end, int64_t grain, RangeFn fn, void* context);    // contiguous shares
void parallel_dynamic(int64_t count, int64_t grain, RangeFn fn, void* context);               // shares taken on demand

// f(begin, end) over contiguous shares of at least `grain` iterations: for even work.
template <class F>
void parallel_for(int64_t begin, int64_t end, int64_t grain, F&& f) {
  parallel_range(begin, end, grain, [](int64_t b, int64_t e, void* c) { (*static_cast<F*>(c))(b, e); }, &f);
}

// f(i) for every i below count, taken one by one by whichever thread is free: for uneven work.
template <class F>
void parallel_tasks(int64_t count, F&& f) {
  parallel_dynamic(
      count, 1,
      [](int64_t b, int64_t e, void* c) {
        for (int64_t i = b; i < e; ++i) (*static_cast<F*>(c))(i);
      },
      &f);
}

int num_threads();

// Aligned scratch that belongs to the calling thread and lives until its next call with the same slot (0..7).
void* scratch(int slot, int64_t bytes);

}  // namespace vx
