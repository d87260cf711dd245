// A ring of stages in shared memory: one thread fills them with the bulk tensor copy engine, warpgroups multiply what
// lies there. A stage has two barriers: `full` of its bytes, and `empty` of its readers.
#pragma once
#include "common/sm90.cuh"

namespace vx::sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// A thread's place in the ring. Whoever fills it begins in phase 1: the first round waits for no reader.
struct Ring {
  uint32_t base, full, empty;  // addresses in shared memory: of the first stage, of the barriers
  int stages, stage_bytes;
  int slot = 0;
  uint32_t phase = 0;

  // memory: stages * stage_bytes, and 1,024 to align them. barriers: `most` full ones, then as many empty ones.
  __device__ __forceinline__ Ring(const void* memory, const uint64_t* barriers, int stages, int stage_bytes, int most)
      : base((shared_address(memory) + 1023) & ~1023u),
        full(shared_address(barriers)),
        empty(full + 8 * most),
        stages(stages),
        stage_bytes(stage_bytes) {}
  __device__ __forceinline__ Ring(uint32_t base, uint32_t full, uint32_t empty, int stages, int stage_bytes)
      : base(base), full(full), empty(empty), stages(stages), stage_bytes(stage_bytes) {}

  // By one thread, before a fence and a barrier of all. readers: arrivals that free a stage.
  __device__ __forceinline__ void init(int readers) const {
    for (int i = 0; i < stages; ++i) {
      barrier_init(full + 8 * i, 1);
      barrier_init(empty + 8 * i, readers);
    }
  }
  __device__ __forceinline__ uint32_t stage() const { return base + slot * stage_bytes; }
  __device__ __forceinline__ uint32_t ready() const { return full + 8 * slot; }
  __device__ __forceinline__ uint32_t free() const { return empty + 8 * slot; }
  __device__ __forceinline__ void await_free() const { barrier_wait(free(), phase); }
  __device__ __forceinline__ void await_ready() const { barrier_wait(ready(), phase); }
  __device__ __forceinline__ void advance() {
    if (++slot == stages) slot = 0, phase ^= 1;
  }
};

#endif

}  // namespace vx::sm90
