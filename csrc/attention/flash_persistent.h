// The launch of what takes items of decode one after another (flash_stream.cuh, flash_few.cuh). Included by bindings only.
#pragma once
#include "attention/flash_launch.h"
#include "common/counters.h"

namespace vx {
namespace {

// As many blocks as there are items, or multiprocessors: persistent, so that what comes next is on its way while the item
// before is still computed with.
template <class Kernel>
void launch_persistent(Kernel kernel, int threads, int bytes, const Args& a, const Maps& maps, int64_t items, int device,
                       cudaStream_t stream) {
  const int64_t count = multiprocessors(device);
  Args early = a;  // of many items the first's start is not worth that its last keys come after its earlier ones
  early.settled = a.settled && items <= 8 * count;
  // Not all multiprocessors get the same bandwidth, nor sequences are of a length: who is done takes the next
  if (items > count && items < int64_t(1) << 30) early.counter = reinterpret_cast<unsigned*>(Counters::of(stream, device));
  const dim3 grid(static_cast<unsigned>(items < count ? items : count));
  VX_CUDA_CHECK(sm90::launch_chained(kernel, grid, threads, bytes, stream, early, maps.k, maps.v));
}

}  // namespace
}  // namespace vx
