// Lines that say themselves whether they have come, for fifteen bytes of sixteen on the links (those of common/sent.cuh
// carry eight). What kernels of common/packed_kernels.cuh send and receive.
//
// The last byte of each of fifteen units of 16 bytes goes into a sixteenth line, and in its place each line has a flag. A
// line is stored and loaded as one value of 128 bits, so whoever sees the flag has its bytes: they take one way and not
// two, nobody waits for stores to be through, and there is no fence. A chunk is what 32 lanes send: each of them 15 units,
// 512 bytes apart, as 16 lines. Its lines are sent all or none, so a flag counts the times that the chunk was sent: the
// line that lies there has the flag before it, whatever was sent when. Lines lie in two places in turns. Time n + 2 of a
// chunk may overwrite what time n left: whoever sends it has received n + 1 from all ranks, and each of them had received n
// before it sent that.
#pragma once
#include <cstdint>

#include "common/line.cuh"
#include "common/sent.cuh"

namespace vx {

constexpr int kLanes = 32, kPackedUnits = 15, kPackedLines = kPackedUnits + 1;  // of a lane
constexpr int kChunk = kLanes * kPackedUnits, kChunkLines = kLanes * kPackedLines;  // units, lines
constexpr int kAllChunks = 1152;  // of all ranks, in a turn

// Rows that are normed where they come have places of their own: a line for each unit of a row, behind them those with the
// last bytes of fifteen that follow each other. A row is to chunks what it says above, as long as all have one width.
constexpr int kRowUnits = 512, kRowLines = kRowUnits + 40, kAllRows = 1024;  // of a rank; rows of all ranks, in a turn
static_assert(kRowUnits + (kRowUnits + kPackedUnits - 1) / kPackedUnits <= kRowLines && kRowLines % 8 == 0);

// A rank's memory: how often each chunk and each row was sent, and their lines: of turn 0 those of each rank, of turn 1
// likewise.
__host__ __device__ constexpr int chunks_of(int ranks) { return kAllChunks / ranks; }
__host__ __device__ constexpr int rows_of(int ranks) { return kAllRows / ranks; }
constexpr int64_t kPackedNumbers = 4 * (kAllChunks + kAllRows);
__host__ __device__ constexpr int64_t lines_of_chunks(int ranks) { return 2ll * ranks * chunks_of(ranks) * kChunkLines; }
constexpr int64_t packed_bytes(int ranks) {
  return kPackedNumbers + (lines_of_chunks(ranks) + 2ll * ranks * rows_of(ranks) * kRowLines) * int64_t(sizeof(uint4));
}
static_assert(kPackedNumbers % 128 == 0 && kSentNumbers % 128 == 0);

struct Packing {
  char* base[kRanks];  // of each rank, in this process
  int rank, ranks;

  __device__ __forceinline__ uint32_t* times(int chunk) const { return reinterpret_cast<uint32_t*>(base[rank]) + chunk; }
  // Of this lane, at rank `at`: what `from` has sent in a turn; the first has last bytes, the others units.
  __device__ __forceinline__ uint4* lines(int at, int turn, int from, int chunk, int lane) const {
    const int64_t place = (int64_t(turn) * ranks + from) * chunks_of(ranks) + chunk;
    return reinterpret_cast<uint4*>(base[at] + kPackedNumbers) + place * kChunkLines + lane;
  }
  __device__ __forceinline__ uint32_t* times_of_row(int row) const { return times(kAllChunks + row); }
  __device__ __forceinline__ uint4* row(int at, int turn, int from, int row) const {
    const int64_t place = (int64_t(turn) * ranks + from) * rows_of(ranks) + row;
    return reinterpret_cast<uint4*>(base[at] + kPackedNumbers) + lines_of_chunks(ranks) + place * kRowLines;
  }
};

// The flag of a chunk that is sent for the `time`th time, from 1 on, where it stands in a line; nothing has that of 0, and
// two times of a turn that follow each other differ.
__device__ __forceinline__ uint32_t flag_of(uint32_t time) { return ((time + 1) / 2 & 255u) << 24; }
__device__ __forceinline__ bool has_flag(uint4 line, uint32_t flag) { return (line.w & 0xff000000u) == flag; }
__device__ __forceinline__ uint4 with_flag(uint4 unit, uint32_t flag) {
  unit.w = (unit.w & 0xffffffu) | flag;
  return unit;
}

// Byte 15 of each unit, side by side.
__device__ __forceinline__ uint4 last_bytes(const uint4 (&unit)[kPackedUnits]) {
  uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < kPackedUnits; ++i) words[i / 4] |= unit[i].w >> 24 << i % 4 * 8;
  return make_uint4(words[0], words[1], words[2], words[3]);
}
// The unit i of a line, with its last byte back.
__device__ __forceinline__ uint4 whole(uint4 line, const uint4& last, int i) {
  const uint32_t word = i < 4 ? last.x : i < 8 ? last.y : i < 12 ? last.z : last.w;
  line.w = (line.w & 0xffffffu) | (word >> i % 4 * 8) << 24;
  return line;
}

}  // namespace vx
