// What kernels that receive share (common/sent.cuh says what is sent, and when it may be).
//
// A kernel that receives what others have sent may look for it while the one that sends here still runs: who sends lets
// the kernel after it start when all its blocks know that those before it have ended. So the round is known, for who sends
// counts none, and a line says itself whether it has come. It waits for the kernel before all the same before it writes
// anything, the count too: who sends may not have asked yet which round it is.
#pragma once
#include "common/sent.cuh"

namespace vx {

struct Receiving {
  const uint4* from;  // lines of turn 0 and rank 0
  uint32_t* numbers;  // the last round that was counted
  int since;          // rounds that were sent since then, before the one that is received
  int rank, ranks;
  int64_t limit;      // nanoseconds, for another rank
  int* missing;       // 1 + the rank that did not come

  static Receiving of(const Tensor& bases, int64_t rank, int64_t since, int64_t limit_ms, const Tensor& missing) {
    STD_TORCH_CHECK(since >= 0 && since < 1024, "since: got ", since);
    char* const base = reinterpret_cast<char*>(values<int64_t>(bases, "bases")[rank]);
    return {reinterpret_cast<const uint4*>(base + kSentNumbers), reinterpret_cast<uint32_t*>(base), int(since), int(rank),
            int(bases.numel()), limit_ms * 1000000, mutable_values<int32_t>(missing, "missing", 1)};
  }
};

// What is received, by block `block` of at most kReceivers.
__device__ __forceinline__ uint32_t round_of(const Receiving& r, int block) {
  return round_after(__ldcg(r.numbers + block), r.since);
}

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

// Counts it, once all threads of the block know it and the kernel before has ended. By all of them: block b of g for
// itself, and for b + g and so on, of which there are none.
__device__ __forceinline__ void count_round(const Receiving& r, uint32_t round) {
  for (uint32_t block = blockIdx.x + threadIdx.x * gridDim.x; block < kReceivers; block += blockDim.x * gridDim.x)
    r.numbers[block] = round;
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
