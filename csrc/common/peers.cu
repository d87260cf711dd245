// Columns of ranks side by side, through memory of each other's GPUs. Bytes are moved and nothing is computed.
//
// Each rank has one piece of memory that the others write into: what common/sent.cuh and common/packed.cuh say, behind that
//   arrived  (ranks, kBlocks) numbers: up to which round each block of each rank has written here
//   rounds   (kBlocks) of this rank's own blocks
//   slots    (2, ranks, kBlocks) of kSlot bytes, in turns
//   lines    (2, ranks, kBlocks, kLines) of 16 bytes, in turns: 8 bytes and twice the round that they are of
// A block and the blocks of its number on other ranks know nothing of the rest. In a round it writes its bytes into its
// slot on each rank, says so there, waits for theirs, and puts them in place. Few bytes go as lines: whoever sees the
// round in one has its bytes, so that they take one way and not two. Round n + 2 may overwrite what round n left:
// whoever has sent anything of n + 1 had read it, for lines are of one round a launch.
//
// A landing (peers_land) is other memory of each rank, in which kernels of all ranks write what they compute where it is
// needed; ranks meet, in a round of block 0 that brings no bytes, before they read it.
#include "common/cuda.h"
#include "common/join.cuh"
#include "common/norm_row.cuh"
#include "common/packed.cuh"
#include "common/receive.cuh"
#include "common/values.h"

namespace vx {
namespace {

constexpr int kBlocks = 128, kThreads = 512;
constexpr int64_t kSlot = 64 << 10, kLeast = 4 << 10;  // bytes of a block in a round, at most and at least
constexpr int64_t kNumbers = 4ll * kBlocks * (kRanks + 1);
constexpr int kLines = 4 * kThreads;
constexpr int64_t kUnit = 8, kFew = kUnit * kLines * kBlocks;  // bytes of a line, and of all lines of a rank
// As lines they are twice as many on the links, from so many on slower than bytes with one word behind them.
constexpr int64_t kOnLinks = 1 << 20;

int64_t behind(int ranks) { return sent_bytes(ranks) + packed_bytes(ranks); }

struct Places {
  char* base[kRanks];  // behind what other files keep there
  int rank, ranks;
};

__device__ uint32_t* arrived(char* base, int rank, int block) {
  return reinterpret_cast<uint32_t*>(base) + rank * kBlocks + block;
}
__device__ uint32_t* rounds(char* base, int block) { return arrived(base, kRanks, block); }
__host__ __device__ int64_t places_of(int ranks) { return 2ll * ranks * kBlocks; }  // of blocks, in both turns
__device__ int64_t place(const Places& p, int turn, int rank, int block) {
  return (int64_t(turn) * p.ranks + rank) * kBlocks + block;
}
__device__ char* slot(const Places& p, int at, int turn, int rank, int block) {
  return p.base[at] + kNumbers + place(p, turn, rank, block) * kSlot;
}
__device__ uint4* line(const Places& p, int at, int turn, int rank, int block) {
  char* const lines = p.base[at] + kNumbers + places_of(p.ranks) * kSlot;
  return reinterpret_cast<uint4*>(lines) + place(p, turn, rank, block) * kLines;
}

__device__ void say(uint32_t* where, uint32_t round) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(where), "r"(round) : "memory");
}
__device__ uint32_t heard(const uint32_t* where) {
  uint32_t round;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(round) : "l"(where) : "memory");
  return round;
}
// The same as `gather`, of at most as many units as there are lines; `share` of them for a block.
__global__ void __launch_bounds__(kThreads) gather_few(const uint2* x, uint2* out, uint32_t total, uint32_t width,
                                                       uint32_t share, Places places, int64_t limit, int* missing) {
  join_chain();
  const int block = blockIdx.x, own = places.rank, ranks = places.ranks;
  uint32_t* const rounds_here = rounds(places.base[own], block);
  const uint32_t round = __ldcg(rounds_here) + 1, begin = block * share, count = min(share, total - begin);
  const int turn = round & 1;
  const auto to = [&](uint32_t i, int rank) {
    const uint32_t at = begin + i, row = at / width;
    return out + (int64_t(row) * ranks + rank) * width + (at - row * width);
  };
  for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const uint2 value = x[begin + i];
    for (int rank = 0; rank < ranks; ++rank)
      if (rank != own)
        asm volatile("st.volatile.global.v4.u32 [%0], {%1, %3, %2, %3};" ::"l"(line(places, rank, turn, own, block) + i),
                     "r"(value.x), "r"(value.y), "r"(round)
                     : "memory");
    *to(i, own) = value;
  }
  const int64_t since = now();
  for (int rank = 0; rank < ranks; ++rank) {
    if (rank == own) continue;
    const uint4* from = line(places, own, turn, rank, block);
    for (uint32_t i = threadIdx.x; i < count; i += kThreads) {
      uint32_t a, first, b, second;
      while (true) {
        asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(a), "=r"(first), "=r"(b), "=r"(second)
                     : "l"(from + i)
                     : "memory");
        if (first == round && second == round) break;
        if (now() - since > limit) give_up(rank, missing);
      }
      *to(i, rank) = make_uint2(a, b);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) *rounds_here = round;
}

// One warp. Once it has ended, what each rank's kernels before its `meet` wrote into this rank's landing is there for the
// kernels after this one here. In order: those stores, behind which their threads fence for the system; their kernel's end,
// for which join_chain waits; the release of the round, which holds for all that its thread has seen happen; the acquire of
// it here; this kernel's end; the reads. A kernel that is launched to overlap this one's end waits for it
// (griddepcontrol.wait) before it reads, as after any other. Products read a landing by the copy engine, another proxy than
// the stores', and a kernel's start is not said to stand between what another GPU wrote and that: hence the fence.
__global__ void meet(Places places, int64_t limit, int* missing) {
  join_chain();
  const int other = threadIdx.x, own = places.rank;
  char* const here = places.base[own];
  const uint32_t round = __ldcg(rounds(here, 0)) + 1;
  if (other < places.ranks && other != own) {
    say(arrived(places.base[other], own, 0), round);
    const uint32_t* where = arrived(here, other, 0);
    const int64_t since = now();
    while (int32_t(heard(where) - round) < 0)
      if (now() - since > limit) give_up(other, missing);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("fence.proxy.async.global;" ::: "memory");
#endif
  }
  __syncwarp();
  if (threadIdx.x == 0) *rounds(here, 0) = round;
}

// Copies `count` V from from(i) into to(i, value), by all threads; as many loads in flight as one waits for.
template <class V, class From, class To>
__device__ __forceinline__ void copy_all(uint32_t count, const From& from, const To& to) {
  constexpr int kAtOnce = 4;
  for (uint32_t first = threadIdx.x; first < count; first += kAtOnce * kThreads) {
    V values[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (first + j * kThreads < count) values[j] = from(first + j * kThreads);
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j)
      if (first + j * kThreads < count) to(first + j * kThreads, values[j]);
  }
}

// x: `total` V in rows of `width`; out: rows of ranks * width. `share`: what a block takes in a round.
template <class V>
__global__ void __launch_bounds__(kThreads) gather(const V* x, V* out, uint32_t total, uint32_t width, uint32_t share,
                                                   Places places, int64_t limit, int* missing) {
  join_chain();
  const int block = blockIdx.x, own = places.rank, ranks = places.ranks;
  char* const here = places.base[own];
  const int64_t wide = int64_t(ranks) * width;
  uint32_t round = __ldcg(rounds(here, block));
  for (int64_t begin = int64_t(block) * share; begin < total; begin += int64_t(gridDim.x) * share) {
    const uint32_t count = uint32_t(min(int64_t(share), int64_t(total) - begin));
    const int turn = ++round & 1;
    const auto put = [&](uint32_t i, int rank, V value) {
      const uint32_t at = uint32_t(begin) + i, row = at / width;
      out[int64_t(row) * wide + int64_t(rank) * width + (at - row * width)] = value;
    };
    copy_all<V>(count, [&](uint32_t i) { return x[begin + i]; }, [&](uint32_t i, V value) {
      for (int rank = 0; rank < ranks; ++rank)
        if (rank != own) reinterpret_cast<V*>(slot(places, rank, turn, own, block))[i] = value;
      put(i, own, value);
    });
    // What all threads wrote comes before what is said behind this: a release holds for all that its thread has seen
    // happen, so that a fence of each thread, which waits for the links, is not needed.
    __syncthreads();
    const int other = threadIdx.x;
    if (other < ranks && other != own) {
      say(arrived(places.base[other], own, block), round);
      const uint32_t* where = arrived(here, other, block);
      const int64_t since = now();
      while (int32_t(heard(where) - round) < 0)
        if (now() - since > limit) give_up(other, missing);
    }
    __syncthreads();
    const uint32_t others = uint32_t(ranks - 1) * count;  // of ranks one after another
    const auto rank_of = [&](uint32_t i) {
      const int rank = int(i / count);
      return rank + (rank >= own);
    };
    copy_all<V>(
        others,
        [&](uint32_t i) {  // not what L1 has of it
          return __ldcg(reinterpret_cast<const V*>(slot(places, own, turn, rank_of(i), block)) + i % count);
        },
        [&](uint32_t i, V value) { put(i % count, rank_of(i), value); });
  }
  __syncthreads();
  if (threadIdx.x == 0) *rounds(here, block) = round;
}

// ---- what other kernels have sent (common/sent.cuh)

constexpr int kEarly = 8;  // blocks, at most, that may begin to wait while others still compute: more would be in their way
static_assert(kBlocks <= kReceivers);

// out: `rows` of ranks * width units. x: this rank's, to be sent here; null where they were. early: whether to look for
// lines before the kernel before has ended.
__global__ void __launch_bounds__(kThreads) place_sent(const uint2* x, uint2* out, uint32_t rows, uint32_t width, bool early,
                                                       const __grid_constant__ Sending sending, Receiving r) {
  let_next_start();
  if (!early) await_before();
  const uint32_t round = round_of(r, blockIdx.x);
  if (x)
    for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < rows * width; i += gridDim.x * kThreads)
      send_in_turn(sending, round, i, x[i]);
  const uint32_t wide = r.ranks * width, total = rows * wide;
  for (uint32_t i = blockIdx.x * kThreads + threadIdx.x; i < total; i += gridDim.x * kThreads) {
    const uint32_t row = i / wide, column = i - row * wide, rank = column / width;
    const int ranks[1] = {int(rank)};
    const int64_t at[1] = {int64_t(row) * width + (column - rank * width)};
    const bool live[1] = {true};
    uint2 found[1];
    receive(r, round, ranks, at, live, found);
    await_before();
    out[i] = found[0];
  }
  await_before();
  __syncthreads();
  count_round(r, round);
}

template <class T>
struct Norm {
  const T *x, *weight, *residual;  // x: this rank's columns, to be sent here; null where they were
  T *y, *added;
  int rows, columns;               // of all ranks
  float eps;
  bool gemma;
  bool early;  // look for lines, and read what else is there, before the kernel before has ended
};

// rmsnorm of what all ranks have, added to the residual, with the bits of rmsnorm/triton.py. COLUMNS of a row a thread, a
// block for a row at a time; as many threads as hold the next power of two of columns, 32 at least.
template <class T, int COLUMNS>
__global__ void __launch_bounds__(1024) norm_sent(const Norm<T> a, const __grid_constant__ Sending sending, Receiving r) {
  constexpr int kEach = kSentUnit / sizeof(T), kUnits = COLUMNS / kEach;  // columns of a line; lines of a thread
  __shared__ float parts[2][32];
  let_next_start();
  if (!a.early) await_before();
  const uint32_t round = round_of(r, blockIdx.x);
  const int width = a.columns / r.ranks, lines = width / kEach;
  if (a.x)
    for (int row = blockIdx.x; row < a.rows; row += gridDim.x)
      for (int i = threadIdx.x; i < lines; i += blockDim.x) {
        const int64_t at = int64_t(row) * lines + i;
        send_in_turn(sending, round, at, reinterpret_cast<const uint2*>(a.x)[at]);
      }

  int rank[kUnits], first[kUnits];
  bool live[kUnits];
  uint2 weight[kUnits], given[kUnits], found[kUnits];
  const int begin = threadIdx.x * COLUMNS;
#pragma unroll
  for (int u = 0; u < kUnits; ++u) {
    const int column = begin + u * kEach;
    live[u] = column < a.columns;
    rank[u] = live[u] ? column / width : 0;
    first[u] = live[u] ? (column - rank[u] * width) / kEach : 0;
    weight[u] = found[u] = given[u] = make_uint2(0, 0);
    if (live[u]) weight[u] = *reinterpret_cast<const uint2*>(a.weight + column);
  }
  // Who is early does it all once without a line: what it executes then, it has at hand when they come.
  bool dry = a.early;
  int turn = 0, row = blockIdx.x;
#pragma unroll 1
  for (; row < a.rows; row += dry ? 0 : int(gridDim.x), dry = false, turn ^= 1) {
    const int64_t start = int64_t(row) * a.columns + begin;
    int64_t at[kUnits];
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      at[u] = int64_t(row) * lines + first[u];
      if (live[u]) given[u] = __ldcg(reinterpret_cast<const uint2*>(a.residual + start + u * kEach));  // not what L1 has of it
    }
    if (!dry) receive(r, round, rank, at, live, found);
    float h[COLUMNS];
    const float squares = add_residual<T>(found, given, h);
    // of two rows, so that a warp that is ahead writes where nobody reads
    const float scale = scale_of(sum_of_block(squares, parts[turn]), a.columns, a.eps);
#pragma unroll
    for (int u = 0; u < kUnits; ++u) {
      const uint2 both = normed<T>(h + u * kEach, scale, weight[u], a.gemma);
      if (u == 0 && !dry) await_before();
      if (!live[u] || dry) continue;
      *reinterpret_cast<uint2*>(a.y + start + u * kEach) = both;
      *reinterpret_cast<uint2*>(a.added + start + u * kEach) = given[u];
    }
  }
  await_before();
  __syncthreads();
  count_round(r, round);
}

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), unsigned grid, const Tensor& x, const Arguments&... arguments) {
  launch_joined(kernel, grid, kThreads, x, arguments...);
}

template <class V>
void launch(const Tensor& x, const Tensor& out, int64_t rows, int64_t bytes, const Places& places, int64_t limit,
            int* missing) {
  const int64_t total = rows * bytes, most = (total + kBlocks - 1) / kBlocks;
  int64_t share = (most < kLeast ? kLeast : most > kSlot ? kSlot : most);
  share = (share + sizeof(V) - 1) / sizeof(V);
  if (share * int64_t(sizeof(V)) > kSlot) share = kSlot / sizeof(V);
  STD_TORCH_CHECK(total / int64_t(sizeof(V)) < (1ll << 32) - kSlot, "peers_gather: ", total, " bytes are too many");
  const int64_t units = total / sizeof(V), blocks = (units + share - 1) / share;
  const int grid = int(blocks < kBlocks ? blocks : kBlocks);
  launch_kernel(gather<V>, unsigned(grid), x, static_cast<const V*>(data(x)), static_cast<V*>(mutable_data(out)), units,
                bytes / int64_t(sizeof(V)), share, places, limit, missing);
}

Places places_at(const Tensor& bases, int64_t rank) {
  const int64_t ranks = bases.numel();
  STD_TORCH_CHECK(ranks >= 2 && ranks <= kRanks && rank >= 0 && rank < ranks, "bases: of 2 to 8 ranks");
  const int64_t* const where = values<int64_t>(bases, "bases", ranks);
  Places places{{}, int(rank), int(ranks)};
  for (int i = 0; i < ranks; ++i) places.base[i] = reinterpret_cast<char*>(where[i]) + behind(int(ranks));
  return places;
}

// x (T, bytes) uint8, out (T, ranks * bytes); bases: where each rank's memory lies, in this process.
void peers_gather(Tensor x, Tensor out, Tensor bases, int64_t rank, int64_t limit_ms, Tensor missing) {
  const int64_t rows = x.size(0), bytes = x.size(1), ranks = bases.size(0);
  const Places places = places_at(bases, rank);
  check_2d(x, "x", rows, bytes);
  check_2d(out, "out", rows, ranks * bytes);
  for (const Tensor* t : {&x, &out})
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Byte && t->is_contiguous(), "x, out: expected contiguous bytes");
  int* const word = mutable_values<int32_t>(missing, "missing", 1);
  if (!rows || !bytes) return;
  const DeviceGuard guard = on_device_of(x);
  const uint64_t all = uint64_t(bytes) | uint64_t(data(x)) | uint64_t(data(out));
  const int64_t limit = limit_ms * 1000000;
  if (rows * bytes <= kFew && rows * bytes * (ranks - 1) <= kOnLinks && all % kUnit == 0) {
    const uint32_t units = uint32_t(rows * bytes / kUnit), one = kThreads * kBlocks;
    const uint32_t share = (units + one - 1) / one * kThreads;
    launch_kernel(gather_few, (units + share - 1) / share, x, static_cast<const uint2*>(data(x)),
                  static_cast<uint2*>(mutable_data(out)), units, bytes / kUnit, share, places, limit, word);
    return;
  }
  if (all % 16 == 0) launch<uint4>(x, out, rows, bytes, places, limit, word);
  else if (all % 4 == 0) launch<uint32_t>(x, out, rows, bytes, places, limit, word);
  else if (all % 2 == 0) launch<uint16_t>(x, out, rows, bytes, places, limit, word);
  else launch<uint8_t>(x, out, rows, bytes, places, limit, word);
}

// landing: what was written there before, by any rank, may be read after this.
void peers_meet(Tensor landing, Tensor bases, int64_t rank, int64_t limit_ms, Tensor missing) {
  const Places places = places_at(bases, rank);
  int* const word = mutable_values<int32_t>(missing, "missing", 1);
  const DeviceGuard guard = on_device_of(landing);
  launch_joined(meet, 1, 32, landing, places, limit_ms * 1000000, word);
}

// out (T, ranks * bytes) uint8: what was sent before or, if it is given, here: this rank's x (T, bytes).
void peers_place(std::optional<Tensor> x, Tensor out, int64_t since, Tensor bases, int64_t rank, int64_t limit_ms,
                 Tensor missing) {
  const Sending sending = Sending::of(bases, rank);
  const Receiving r = Receiving::of(bases, rank, since, limit_ms, missing);
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Byte && out.is_contiguous() && out.dim() == 2,
                  "out: expected contiguous bytes");
  const int64_t rows = out.size(0), wide = out.size(1) / kSentUnit, width = wide / sending.ranks;
  STD_TORCH_CHECK(rows > 0 && width > 0 && width * sending.ranks * kSentUnit == out.size(1) && rows * width <= kSent &&
                      reinterpret_cast<uintptr_t>(data(out)) % kSentUnit == 0,
                  "peers_place: (", rows, ", ", out.size(1), ") bytes are no lines of ", sending.ranks, " ranks, or too many");
  if (x) {
    check_2d(*x, "x", rows, width * kSentUnit);
    STD_TORCH_CHECK(x->scalar_type() == ScalarType::Byte && x->is_contiguous() &&
                        reinterpret_cast<uintptr_t>(data(*x)) % kSentUnit == 0,
                    "x: expected contiguous bytes on an 8-byte boundary");
  }
  const DeviceGuard guard = on_device_of(out);
  const int64_t blocks = (rows * wide + kThreads - 1) / kThreads;
  launch_kernel(place_sent, unsigned(blocks < kBlocks ? blocks : kBlocks), out, static_cast<const uint2*>(data(x)),
                static_cast<uint2*>(mutable_data(out)), rows, width, !x && blocks <= kEarly, sending, r);
}

template <class T>
void launch_norm(const Norm<T>& a, const Sending& sending, const Receiving& r, const Tensor& y) {
  int threads = 32;
  while (threads * 8 < a.columns && threads < 1024) threads *= 2;
  const unsigned grid = unsigned(a.rows < kBlocks ? a.rows : kBlocks);
  if (threads * 8 >= a.columns)
    launch_joined(norm_sent<T, 8>, grid, threads, y, a, sending, r);
  else
    launch_joined(norm_sent<T, 16>, grid, threads, y, a, sending, r);
}

// rmsnorm of (T, N) columns of all ranks, sent before or, if they are given, here: this rank's x (T, N / ranks).
// settled: weight and residual were there when the kernel that has sent them began.
void peers_norm(std::optional<Tensor> x, Tensor weight, Tensor residual, Tensor y, Tensor added, double eps, bool gemma,
                bool settled, int64_t since, Tensor bases, int64_t rank, int64_t limit_ms, Tensor missing) {
  const Sending sending = Sending::of(bases, rank);
  const Receiving r = Receiving::of(bases, rank, since, limit_ms, missing);
  const ScalarType type = y.scalar_type();
  const int64_t size = type == ScalarType::Float ? 4 : 2;
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
                  "y: expected float32, bfloat16 or float16");
  STD_TORCH_CHECK(y.dim() == 2, "y: expected 2 dimensions");
  const int64_t rows = y.size(0), columns = y.size(1), width = columns / sending.ranks;
  STD_TORCH_CHECK(rows > 0 && width * sending.ranks == columns && width * size % kSentUnit == 0 && columns > 0 &&
                      columns <= 16384 && rows * width * size <= kSent * kSentUnit,
                  "peers_norm: (", rows, ", ", columns, ") are no lines of ", sending.ranks, " ranks, or too many");
  const auto check = [&](const Tensor& t, const char* name, int64_t count, int64_t across) {
    check_2d(t, name, count, across);
    STD_TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() && reinterpret_cast<uintptr_t>(data(t)) % kSentUnit == 0 &&
                        t.get_device_index() == y.get_device_index(),
                    name, ": expected contiguous rows of y's dtype on 8-byte boundaries");
  };
  if (x) check(*x, "x", rows, width);
  check(residual, "residual", rows, columns), check(y, "y", rows, columns), check(added, "added", rows, columns);
  check_1d(weight, "weight", columns);
  STD_TORCH_CHECK(weight.scalar_type() == type && reinterpret_cast<uintptr_t>(data(weight)) % kSentUnit == 0 &&
                      weight.get_device_index() == y.get_device_index(),
                  "weight: expected y's dtype, on an 8-byte boundary");
  const DeviceGuard guard = on_device_of(y);
  const auto launch = [&]<class T>(T) {
    const Norm<T> a{static_cast<const T*>(data(x)),  static_cast<const T*>(data(weight)),
                    static_cast<const T*>(data(residual)), static_cast<T*>(mutable_data(y)),
                    static_cast<T*>(mutable_data(added)),  int(rows), int(columns), float(eps), gemma,
                    settled && !x && rows <= kEarly};
    launch_norm(a, sending, r, y);
  };
  if (type == ScalarType::Float) launch(float());
  else if (type == ScalarType::BFloat16) launch(__nv_bfloat16());
  else launch(__half());
}

// found (1 + 8) int64: where it lies, and the handle by which other processes open it.
void take(const Tensor& found, size_t size, int64_t device) {
  int64_t* const words = mutable_values<int64_t>(found, "found", 9);
  const DeviceGuard guard(static_cast<int32_t>(device));
  void* base = nullptr;
  VX_CUDA_CHECK(cudaMalloc(&base, size));
  static_assert(sizeof(cudaIpcMemHandle_t) == 64);
  cudaError_t error = cudaMemset(base, 0, size);  // no round is 0
  if (error == cudaSuccess) error = cudaIpcGetMemHandle(reinterpret_cast<cudaIpcMemHandle_t*>(words + 1), base);
  if (error == cudaSuccess) error = cudaDeviceSynchronize();
  if (error != cudaSuccess) cudaFree(base);
  VX_CUDA_CHECK(error);
  words[0] = reinterpret_cast<int64_t>(base);
}

void peers_take(Tensor found, int64_t ranks, int64_t device) {
  STD_TORCH_CHECK(ranks >= 2 && ranks <= kRanks, "peers_take: 2 to 8 ranks");
  take(found, behind(int(ranks)) + kNumbers + places_of(int(ranks)) * (kSlot + 2 * kUnit * kLines), device);
}

void peers_land(Tensor found, int64_t bytes, int64_t device) {
  STD_TORCH_CHECK(bytes > 0, "peers_land: ", bytes, " bytes are none");
  take(found, size_t(bytes), device);
}

// The same in another process: its handle, (8) int64.
int64_t peers_open(Tensor handle, int64_t device) {
  const int64_t* const words = values<int64_t>(handle, "handle", 8);
  const DeviceGuard guard(static_cast<int32_t>(device));
  void* base = nullptr;
  VX_CUDA_CHECK(cudaIpcOpenMemHandle(&base, *reinterpret_cast<const cudaIpcMemHandle_t*>(words),
                                     cudaIpcMemLazyEnablePeerAccess));
  return reinterpret_cast<int64_t>(base);
}

void peers_close(int64_t base, bool own, int64_t device) {
  const DeviceGuard guard(static_cast<int32_t>(device));
  void* const where = reinterpret_cast<void*>(base);
  VX_CUDA_CHECK(own ? cudaFree(where) : cudaIpcCloseMemHandle(where));
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("peers_gather", TORCH_BOX(&vx::peers_gather));
  m.impl("peers_meet", TORCH_BOX(&vx::peers_meet));
  m.impl("peers_place", TORCH_BOX(&vx::peers_place));
  m.impl("peers_norm", TORCH_BOX(&vx::peers_norm));
}
STABLE_TORCH_LIBRARY_IMPL(vexact_native, CompositeExplicitAutograd, m) {
  m.impl("peers_take", TORCH_BOX(&vx::peers_take));
  m.impl("peers_land", TORCH_BOX(&vx::peers_land));
  m.impl("peers_open", TORCH_BOX(&vx::peers_open));
  m.impl("peers_close", TORCH_BOX(&vx::peers_close));
}
