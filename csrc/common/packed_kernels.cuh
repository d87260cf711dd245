// Kernels that put columns of ranks side by side, or norm them, by packed lines (common/packed.cuh).
//
// Of a gather a warp is a block. It sends a chunk to each rank before it stores or waits for anything, so that all that a
// GPU has to send is on the links at once; its own columns are put in place while the others' are on their way, and those
// are waited for, five lines of a lane at a time, in the order in which they were sent.
#pragma once
#include "common/join.cuh"
#include "common/norm_row.cuh"
#include "common/packed.cuh"
#include "common/receive.cuh"

namespace vx {
namespace {

constexpr int kAtOnce = 5;
static_assert(kPackedUnits % kAtOnce == 0);

// COUNT lines 512 bytes apart, once all of them have come. One alone is asked for meanwhile: what many warps ask L2 for
// stands in the way of what comes.
template <int COUNT>
__device__ __forceinline__ void await_lines(const uint4* from, uint32_t flag, int rank, int64_t limit, int* missing,
                                            uint4 (&line)[COUNT]) {
  int64_t since = 0;
  for (uint32_t tries = 0;;) {
    bool come = true;
#pragma unroll
    for (int i = 0; i < COUNT; ++i) line[i] = load_line(from + i * kLanes);
#pragma unroll
    for (int i = 0; i < COUNT; ++i) come &= has_flag(line[i], flag);
    if (come) return;
    do {
      if (++tries % 64) continue;
      const int64_t time = now();
      if (!since) since = time;
      if (time - since > limit) give_up(rank, missing);
    } while (!has_flag(load_line(from + (COUNT - 1) * kLanes), flag));
  }
}

// Where the units of a lane go: rows of `wide` units, in them `width` of each rank.
struct Place {
  int64_t row;  // where it begins
  uint32_t column;

  __device__ __forceinline__ Place(int64_t at, uint32_t width, int64_t wide)
      : row(at / width * wide), column(uint32_t(at % width)) {}
  __device__ __forceinline__ void next(uint32_t width, int64_t wide) {
    for (column += kLanes; column >= width; column -= width) row += wide;
  }
};

// x: `total` units in rows of `width`; out: rows of ranks * width.
__global__ void __launch_bounds__(kLanes) gather_packed(const uint4* x, uint4* out, int64_t total, uint32_t width,
                                                        const __grid_constant__ Packing p, int64_t limit, int* missing) {
  join_chain();
  const int chunk = blockIdx.x, lane = threadIdx.x, own = p.rank, ranks = p.ranks;
  const int64_t wide = int64_t(ranks) * width;
  uint32_t time = __ldcg(p.times(chunk));
  for (int64_t first = int64_t(chunk) * kChunk + lane; first - lane < total; first += int64_t(gridDim.x) * kChunk) {
    const int turn = ++time & 1;
    const uint32_t flag = flag_of(time);
    {
      uint4 unit[kPackedUnits];
#pragma unroll
      for (int i = 0; i < kPackedUnits; ++i)
        unit[i] = first + i * kLanes < total ? __ldcg(x + first + i * kLanes) : make_uint4(0, 0, 0, 0);
      const uint4 last = with_flag(last_bytes(unit), flag);
      for (int rank = 0; rank < ranks; ++rank) {
        if (rank == own) continue;
        uint4* const to = p.lines(rank, turn, own, chunk, lane);
        store_line(to, last);
#pragma unroll
        for (int i = 0; i < kPackedUnits; ++i) store_line(to + (i + 1) * kLanes, with_flag(unit[i], flag));
      }
      Place place(first, width, wide);
#pragma unroll
      for (int i = 0; i < kPackedUnits; ++i, place.next(width, wide))
        if (first + i * kLanes < total) out[place.row + int64_t(own) * width + place.column] = unit[i];
    }
    for (int rank = 0; rank < ranks; ++rank) {
      if (rank == own) continue;
      const uint4* const from = p.lines(own, turn, rank, chunk, lane);
      uint4 last[1], line[kAtOnce];
      await_lines(from, flag, rank, limit, missing, last);
      Place place(first, width, wide);
#pragma unroll
      for (int some = 0; some < kPackedUnits; some += kAtOnce) {
        await_lines(from + (some + 1) * kLanes, flag, rank, limit, missing, line);
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i, place.next(width, wide))
          if (first + (some + i) * kLanes < total)
            out[place.row + int64_t(rank) * width + place.column] = whole(line[i], last[0], some + i);
      }
    }
  }
  __syncwarp();  // all lanes know it
  if (lane == 0) *p.times(chunk) = time;
}

template <class T>
struct Norm {
  const T *x, *weight, *residual;  // x: this rank's columns
  T *y, *added;
  int rows, columns;               // of all ranks
  float eps;
  bool gemma;
};

// rmsnorm of what all ranks have, added to the residual. A block for a row, a thread for a unit of eight columns; as many
// threads as hold the next power of two of them, 32 at least. Threads with this rank's columns send them; the last bytes
// are sent by all together.
template <class T>
__global__ void __launch_bounds__(1024) norm_packed(const Norm<T> a, const __grid_constant__ Packing p, int64_t limit,
                                                    int* missing) {
  constexpr int kEach = sizeof(uint4) / sizeof(T), kParts = 2;
  __shared__ float parts[32];
  __shared__ uint8_t last[(kRowUnits + kPackedUnits - 1) / kPackedUnits * kPackedUnits];
  join_chain();
  const int row = blockIdx.x, units = a.columns / p.ranks / kEach, column = threadIdx.x * kEach;
  const bool live = column < a.columns;
  const int rank = live ? threadIdx.x / units : p.rank, unit = live ? threadIdx.x - rank * units : 0;
  const uint32_t time = __ldcg(p.times_of_row(row)) + 1, flag = flag_of(time);
  const int turn = time & 1, lines = (units + kPackedUnits - 1) / kPackedUnits;
  const int64_t at = int64_t(row) * a.columns + column;
  uint4 found = make_uint4(0, 0, 0, 0);
  if (live && rank == p.rank) {
    found = __ldcg(reinterpret_cast<const uint4*>(a.x) + int64_t(row) * units + unit);
    last[unit] = found.w >> 24;
    for (int to = 0; to < p.ranks; ++to)
      if (to != p.rank) store_line(p.row(to, turn, p.rank, row) + unit, with_flag(found, flag));
  }
  uint2 weight[kParts] = {}, given[kParts] = {};
  if (live)
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      weight[i] = __ldcg(reinterpret_cast<const uint2*>(a.weight + column) + i);
      given[i] = __ldcg(reinterpret_cast<const uint2*>(a.residual + at) + i);
    }
  __syncthreads();
  for (int line = threadIdx.x; line < lines; line += blockDim.x) {
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < kPackedUnits; ++i) {
      const int which = line * kPackedUnits + i;
      words[i / 4] |= (which < units ? uint32_t(last[which]) : 0u) << i % 4 * 8;
    }
    const uint4 bytes = with_flag(make_uint4(words[0], words[1], words[2], words[3]), flag);
    for (int to = 0; to < p.ranks; ++to)
      if (to != p.rank) store_line(p.row(to, turn, p.rank, row) + kRowUnits + line, bytes);
  }
  if (live && rank != p.rank) {
    const uint4 *const from = p.row(p.rank, turn, rank, row) + unit,
                *const behind = p.row(p.rank, turn, rank, row) + kRowUnits + unit / kPackedUnits;
    uint4 bytes;
    int64_t since = 0;
    for (uint32_t tries = 1;; ++tries) {
      found = load_line(from), bytes = load_line(behind);
      if (has_flag(found, flag) && has_flag(bytes, flag)) break;
      if (tries % 64) continue;
      const int64_t clock = now();
      if (!since) since = clock;
      if (clock - since > limit) give_up(rank, missing);
    }
    found = whole(found, bytes, unit % kPackedUnits);
  }
  const uint2 columns[kParts] = {make_uint2(found.x, found.y), make_uint2(found.z, found.w)};
  float h[kEach];
  const float scale = scale_of(sum_of_block(add_residual<T>(columns, given, h), parts), a.columns, a.eps);
  if (threadIdx.x == 0) *p.times_of_row(row) = time;  // all threads know it since the barrier
  if (!live) return;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    reinterpret_cast<uint2*>(a.y + at)[i] = normed<T>(h + i * kEach / kParts, scale, weight[i], a.gemma);
    reinterpret_cast<uint2*>(a.added + at)[i] = given[i];
  }
}

}  // namespace
}  // namespace vx
