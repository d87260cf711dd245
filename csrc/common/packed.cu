// Columns of ranks side by side, by lines that are nearly all columns (common/packed.cuh). Bytes are moved and nothing is
// computed.
//
// A warp is a block. It sends a chunk to each rank before it stores or waits for anything, so that all that a GPU has to
// send is on the links at once; its own columns are put in place while the others' are on their way, and those are waited
// for, five lines of a lane at a time, in the order in which they were sent.
#include "common/join.cuh"
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

// x (T, bytes) uint8, out (T, ranks * bytes), of whole units; bases: where each rank's memory lies, in this process.
void peers_gather_packed(Tensor x, Tensor out, Tensor bases, int64_t rank, int64_t limit_ms, Tensor missing) {
  const Packing p = Packing::of(bases, rank);
  const int64_t rows = x.size(0), bytes = x.size(1), unit = sizeof(uint4);
  check_2d(x, "x", rows, bytes);
  check_2d(out, "out", rows, p.ranks * bytes);
  for (const Tensor* t : {&x, &out})
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Byte && t->is_contiguous() && bytes % unit == 0 &&
                        reinterpret_cast<uintptr_t>(data(*t)) % unit == 0,
                    "x, out: expected contiguous bytes, 16 and 16 of them");
  STD_TORCH_CHECK(bytes / unit < 1ll << 31, "peers_gather_packed: rows of ", bytes, " bytes are too many");
  int* const word = mutable_values<int32_t>(missing, "missing", 1);
  if (!rows || !bytes) return;
  const DeviceGuard guard = on_device_of(x);
  const int64_t total = rows * (bytes / unit), chunks = (total + kChunk - 1) / kChunk, most = chunks_of(p.ranks);
  launch_joined(gather_packed, unsigned(chunks < most ? chunks : most), kLanes, x, static_cast<const uint4*>(data(x)),
                static_cast<uint4*>(mutable_data(out)), total, bytes / unit, p, limit_ms * 1000000, word);
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) { m.impl("peers_gather_packed", TORCH_BOX(&vx::peers_gather_packed)); }
