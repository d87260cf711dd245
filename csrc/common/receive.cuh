// What kernels that receive share (common/sent.cuh says what is sent, and when it may be).
#pragma once
#include "common/sent.cuh"

namespace vx {

struct Receiving {
  const uint4* from;  // lines of turn 0 and rank 0
  uint32_t* numbers;  // the last round, and how many blocks of this kernel have read it
  int rank, ranks;
  int64_t limit;      // nanoseconds, for another rank
  int* missing;       // 1 + the rank that did not come

  static Receiving of(const Tensor& bases, int64_t rank, int64_t limit_ms, const Tensor& missing) {
    char* const base = reinterpret_cast<char*>(values<int64_t>(bases, "bases")[rank]);
    return {reinterpret_cast<const uint4*>(base + kSentNumbers), reinterpret_cast<uint32_t*>(base), int(rank),
            int(bases.numel()), limit_ms * 1000000, mutable_values<int32_t>(missing, "missing", 1)};
  }
};

__device__ __forceinline__ int64_t now() {
  int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ __forceinline__ void give_up(int rank, int* missing) {
  *missing = 1 + rank;
  __threadfence_system();
  __trap();
}

// By one thread of each block, once all its threads know the round: it is the last one when all blocks have said so, for
// nobody asks again before this kernel has ended.
__device__ __forceinline__ void end_round(uint32_t* numbers, uint32_t round, uint32_t blocks) {
  volatile uint32_t* const words = numbers;
  if (blocks == 1) {
    words[0] = round;
  } else if (atomicAdd(numbers + 1, 1u) == blocks - 1) {
    words[1] = 0;
    words[0] = round;
  }
}

// COUNT lines as soon as all that are live have come; of the others nothing is said.
template <int COUNT>
__device__ __forceinline__ void receive(const Receiving& r, uint32_t round, const int (&rank)[COUNT],
                                        const int64_t (&at)[COUNT], const bool (&live)[COUNT], uint2 (&found)[COUNT]) {
  const uint4* const turn = r.from + (round & 1 ? r.ranks * kSent : 0);
  int64_t since = 0;
  for (uint32_t tries = 0;; ++tries) {
    uint4 line[COUNT];
#pragma unroll
    for (int i = 0; i < COUNT; ++i)
      if (live[i])
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(line[i].x), "=r"(line[i].y), "=r"(line[i].z), "=r"(line[i].w)
                     : "l"(turn + rank[i] * kSent + at[i])
                     : "memory");
    int absent = -1;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      if (!live[i]) continue;
      if (line[i].y != round || line[i].w != round) absent = rank[i];
      found[i] = make_uint2(line[i].x, line[i].z);
    }
    if (absent < 0) return;
    if (tries % 64 == 0) {
      const int64_t time = now();
      if (!since) since = time;
      if (time - since > r.limit) give_up(absent, r.missing);
    }
  }
}

}  // namespace vx
