// Columns of ranks side by side, through memory of each other's GPUs. Bytes are moved and nothing is computed.
//
// Each rank has one piece of memory that the others write into:
//   arrived  (ranks, kBlocks) numbers: up to which round each block of each rank has written here
//   rounds   (kBlocks) of this rank's own blocks
//   slots    (2, ranks, kBlocks) of kSlot bytes, in turns
//   lines    (2, ranks, kBlocks, kLines) of 16 bytes, in turns: 8 bytes and twice the round that they are of
// A block and the blocks of its number on other ranks know nothing of the rest. In a round it writes its bytes into its
// slot on each rank, says so there, waits for theirs, and puts them in place. Few bytes go as lines: whoever sees the
// round in one has its bytes, so that they take one way and not two. Round n + 2 may overwrite what round n left:
// whoever has sent anything of n + 1 had read it, for lines are of one round a launch.
#include "common/chain.cuh"
#include "common/cuda.h"
#include "common/values.h"

namespace vx {
namespace {

constexpr int kRanks = 8, kBlocks = 128, kThreads = 512;
constexpr int64_t kSlot = 64 << 10, kLeast = 4 << 10;  // bytes of a block in a round, at most and at least
constexpr int64_t kNumbers = 4ll * kBlocks * (kRanks + 1);
constexpr int kLines = 4 * kThreads;
constexpr int64_t kUnit = 8, kFew = kUnit * kLines * kBlocks;  // bytes of a line, and of all lines of a rank
// As lines they are twice as many on the links: from so many on that costs more than to say that they are there.
constexpr int64_t kSent = 1 << 20;

struct Places {
  char* base[kRanks];
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
__device__ int64_t now() {
  int64_t ns;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(ns));
  return ns;
}

__device__ void give_up(int rank, int* missing) {
  *missing = 1 + rank;
  __threadfence_system();
  __trap();
}

// From SM90 on a gather stands in a chain of launches (launch_chained): it is there when the product before it ends, and
// while it waits for other ranks the product after it asks for its weights. Before this returns it reads nothing.
__device__ __forceinline__ void join_chain() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  sm90::let_kernel_after_start();
  sm90::wait_for_kernel_before();
#endif
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

template <class... Parameters, class... Arguments>
void launch_kernel(void (*kernel)(Parameters...), unsigned grid, const Tensor& x, const Arguments&... arguments) {
  int major = 0;
  VX_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device_index()));
  if (major >= 9)
    VX_CUDA_CHECK(sm90::launch_chained(kernel, dim3(grid), kThreads, 0, current_stream(x), arguments...));
  else
    kernel<<<grid, kThreads, 0, current_stream(x)>>>(static_cast<Parameters>(arguments)...);
  VX_CUDA_CHECK(cudaGetLastError());
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

// x (T, bytes) uint8, out (T, ranks * bytes); bases: where each rank's memory lies, in this process.
void peers_gather(Tensor x, Tensor out, Tensor bases, int64_t rank, int64_t limit_ms, Tensor missing) {
  const int64_t rows = x.size(0), bytes = x.size(1), ranks = bases.size(0);
  STD_TORCH_CHECK(ranks >= 2 && ranks <= kRanks && rank >= 0 && rank < ranks, "peers_gather: 2 to 8 ranks");
  check_2d(x, "x", rows, bytes);
  check_2d(out, "out", rows, ranks * bytes);
  for (const Tensor* t : {&x, &out})
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Byte && t->is_contiguous(), "x, out: expected contiguous bytes");
  const int64_t* const where = values<int64_t>(bases, "bases", ranks);
  int* const word = mutable_values<int32_t>(missing, "missing", 1);
  if (!rows || !bytes) return;
  Places places{{}, int(rank), int(ranks)};
  for (int i = 0; i < ranks; ++i) places.base[i] = reinterpret_cast<char*>(where[i]);
  const DeviceGuard guard = on_device_of(x);
  const uint64_t all = uint64_t(bytes) | uint64_t(data(x)) | uint64_t(data(out));
  const int64_t limit = limit_ms * 1000000;
  if (rows * bytes <= kFew && rows * bytes * (ranks - 1) <= kSent && all % kUnit == 0) {
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

// found (1 + 8) int64: where it lies, and the handle by which other processes open it.
void peers_take(Tensor found, int64_t ranks, int64_t device) {
  int64_t* const words = mutable_values<int64_t>(found, "found", 9);
  STD_TORCH_CHECK(ranks >= 2 && ranks <= kRanks, "peers_take: 2 to 8 ranks");
  const DeviceGuard guard(static_cast<int32_t>(device));
  const size_t size = kNumbers + places_of(int(ranks)) * (kSlot + 2 * kUnit * kLines);
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

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) { m.impl("peers_gather", TORCH_BOX(&vx::peers_gather)); }
STABLE_TORCH_LIBRARY_IMPL(vexact_native, CompositeExplicitAutograd, m) {
  m.impl("peers_take", TORCH_BOX(&vx::peers_take));
  m.impl("peers_open", TORCH_BOX(&vx::peers_open));
  m.impl("peers_close", TORCH_BOX(&vx::peers_close));
}
