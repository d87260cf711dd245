// Columns on their way to every rank, sent by the kernel that computes them: lines of 16 bytes, 8 of columns and twice the
// round that they are of, so that whoever sees the round in one has its bytes. What common/peers.cu receives them with.
//
// What is sent in a round is received by the next kernel that receives, which counts the round when it ends; one that
// sends what it makes of them (linear/sm90_received.cuh) leaves that to the next. Lines lie in two places in turns. Round
// n + 2 may overwrite what round n left: whoever sends it has received n + 1 from all ranks, and each of them had received
// all of n before it sent the last of n + 1.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

#include "common/values.h"

namespace vx {

constexpr int kRanks = 8;
constexpr int64_t kSentUnit = 8, kSent = 1 << 17;  // bytes of columns in a line; lines of a rank in a turn
// A rank's memory begins with the last round that was counted, by each block of who receives, and goes on with the lines: of
// turn 0 those of each rank, of turn 1 likewise.
constexpr int kReceivers = 128;  // blocks, at most
constexpr int64_t kSentNumbers = 4 * kReceivers;
constexpr int64_t sent_bytes(int ranks) { return kSentNumbers + 2 * ranks * kSent * int64_t(sizeof(uint4)); }

// A round by the last one that was counted and how many have been sent since; no line that was never written is of any.
__device__ __forceinline__ uint32_t round_after(uint32_t counted, int since) {
  const uint32_t next = counted + 1 + since;
  return next > counted ? next : next + 2;  // 0 is passed over, and the turns go on
}

struct Sending {
  uint4* to[kRanks];      // at each rank, this one too: this rank's lines of turn 0
  const uint32_t* round;  // the last one that was counted
  int ranks;              // 0: columns are stored, not sent

  // `bases`: where each rank's memory lies, in this process.
  static Sending of(const std::optional<Tensor>& bases, int64_t rank) {
    Sending s{};
    if (!bases) return s;
    const int64_t ranks = bases->numel();
    STD_TORCH_CHECK(ranks >= 2 && ranks <= kRanks && rank >= 0 && rank < ranks, "bases: of 2 to 8 ranks");
    const int64_t* const where = values<int64_t>(*bases, "bases", ranks);
    s.ranks = int(ranks), s.round = reinterpret_cast<const uint32_t*>(where[rank]);
    for (int i = 0; i < ranks; ++i) s.to[i] = reinterpret_cast<uint4*>(where[i] + kSentNumbers) + rank * kSent;
    return s;
  }

  // The round of what is sent now, where all that was sent before has been received. Once the kernels before have ended.
  __device__ __forceinline__ uint32_t begin() const { return round_after(__ldcg(round), 0); }
  // Line `at` of this rank's: rows one after another.
  __device__ __forceinline__ void send(uint32_t now, int64_t at, uint32_t a, uint32_t b) const {
    const int64_t place = (now & 1 ? ranks * kSent : 0) + at;
#pragma unroll
    for (int rank = 0; rank < kRanks; ++rank)
      if (rank < ranks)
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(to[rank] + place), "r"(a), "r"(b), "r"(now)
                     : "memory");
  }
};

// From accumulators as wgmma leaves them, rounded to 16 bits: a lane has one column, lane / 4, of rows 2 (lane % 4) and the
// one behind it (in the low half and the high one). Two columns of row 2 (lane % 4) + (lane / 4) % 2, from lane / 8 * 2 on.
__device__ __forceinline__ uint32_t two_columns(uint32_t rows) {
  const bool odd = threadIdx.x & 4;
  const uint32_t other = __shfl_xor_sync(~0u, rows, 4);
  return odd ? __byte_perm(other, rows, 0x7632) : __byte_perm(rows, other, 0x5410);
}
// Four columns of it, from lane / 16 * 4 on: of the first eight on lanes where lane / 8 is even, of the second on others.
__device__ __forceinline__ uint2 four_columns(uint32_t first, uint32_t second) {
  const bool upper = threadIdx.x & 8;
  const uint32_t other = __shfl_xor_sync(~0u, upper ? first : second, 8);
  return upper ? make_uint2(other, second) : make_uint2(first, other);
}

}  // namespace vx
