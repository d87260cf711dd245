// What the kernels that go through a sequence's chunks share: sixteen columns of a value head's state, or of its
// gradient, that two warps keep in registers; no torch headers.
//
// The columns of a state do not depend on each other, so two warps that have all of sixteen wait for none but each other:
// one solves the first half of a chunk's rows, one the second, and each adds to half of the dims. Everything is kept
// transposed: what a product leaves in registers then is what the next one takes, if of eight of K the even ones go first
// (no bit depends on that order, as admission shows). Only the rows that are solved one by one go through shared memory,
// to a column a thread.
#pragma once
#include "gated_delta/prepared.cuh"

namespace vx {
namespace delta {

constexpr int kColumns = 32;                   // of a value head, in a block
constexpr int kOwn = 16, kGroups = kColumns / kOwn;  // of them, in two warps
constexpr int kPassThreads = 320, kBringing = 33;
constexpr int kPitch = kChunk + 8;  // of a column's rows

// Thread 4 gid + tig has of tile n the columns gid, gid and gid + 8, gid + 8, and the rows (8 n + 2 tig) and the next.
template <int TILES>
using Turned = float[TILES][4];
using State = Turned<kDepth / 8>;    // rows: dims of a key
using HalfState = Turned<kDepth / 16>;
using Chunk = Turned<kChunk / 8>;    // rows: those of a chunk
using Stored = float4[kDepth / 8][32];  // a State, as threads have it

// What a warp is for: `group` of the block's columns, `part` of the rows, or of the dims.
struct Role {
  int warp, group, part;
  bool leads, helps, brings;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ Role()
      : warp(__shfl_sync(0xffffffffu, threadIdx.x / 32, 0)), group(warp % 2), part(warp / 2 % 2), leads(warp < 4),
        helps(warp / 4 == 1), brings(warp >= 8) {}
#endif
};
static_assert(kGroups == 2);

// A barrier of shared memory, of uses that follow each other: 0, 1, ...
struct Passed {
  uint64_t barrier;
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  __device__ __forceinline__ void init(int arrivals) { sm90::barrier_init(address(), arrivals); }
  __device__ __forceinline__ uint32_t address() { return sm90::shared_address(&barrier); }
  __device__ __forceinline__ void wait(int use) { sm90::barrier_wait(address(), use & 1); }
  // By a warp, once its copies have ended, and those of the copy engine, of so many bytes: 33 arrivals.
  __device__ __forceinline__ void arrive_behind(int bytes) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address()) : "memory");
    if (threadIdx.x % 32 == 0) sm90::barrier_expect(address(), bytes);
  }
  // By a warp, once all of it is there.
  __device__ __forceinline__ void arrive() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) sm90::barrier_arrive(address());
  }
#endif
};

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// N bytes to shared memory, by the copy engine; on its barrier.
__device__ __forceinline__ void copy_bulk(void* to, const void* from, int bytes, uint32_t barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   sm90::shared_address(to)),
               "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
// WIDTH values of a head in each of a chunk's rows, `last` of them, and zeros, by a warp.
template <int WIDTH, class T>
__device__ __forceinline__ void bring_rows(T (*to)[WIDTH + 8], const T* from, int64_t stride, int last) {
  constexpr int kParts = WIDTH / 8, kRows = 32 / kParts;
  const int i = threadIdx.x % 32 / kParts, part = threadIdx.x % kParts * 8;
  from += i * stride + part;
#pragma unroll 8
  for (int n = 0; n < kChunk; n += kRows) copy16(&to[n + i][part], from + (n + i < last ? n * stride : 0), n + i < last);
}

template <int TILES>
__device__ __forceinline__ void round_to(Turned<TILES>& to, const Turned<TILES>& from) {
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) to[n][e] = as_operand(from[n][e]);
}

// d^T + x^T y of eight of K, x being a tile that is rounded.
__device__ __forceinline__ void product_of(float (&d)[4], const float (&x)[4], float y0, float y1) {
  const float a[4] = {x[0], x[2], x[1], x[3]};
  product(d, a, y0, y1);
}
template <class T>
__device__ __forceinline__ void product_of(float (&d)[4], const float (&x)[4], uint32_t y) {
  const float2 two = widen_two<T>(y);
  product_of(d, x, two.x, two.y);
}

// d^T + s^T rows^T: 16 rows a pair of tiles, from row `from(pair)` on.
// order: dims ascending in the accumulator
template <class T, int TILES, class From>
__device__ __forceinline__ void multiply_state(Turned<TILES>& d, const State& s, const T (*rows)[kDepth + 8], From from) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kDepth / 16; ++t) {
    uint32_t y[TILES / 2][4];
#pragma unroll
    for (int n = 0; n < TILES / 2; ++n)
      load_matrix(y[n], &rows[from(n) + lane % 8 + lane / 16 * 8][16 * t + lane / 8 % 2 * 8]);
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int n = 0; n < TILES; ++n) product_of<T>(d[n], s[2 * t + half], y[n / 2][n % 2 * 2 + half]);
  }
}

// d^T + x^T rows, of 16 rows from `first` on, which x has two tiles of, and dims from `dim` on.
// order: rows ascending in the accumulator
template <class T, int TILES>
__device__ __forceinline__ void multiply_rows(Turned<TILES>& d, const float (&x0)[4], const float (&x1)[4],
                                              const T (*rows)[kDepth + 8], int first, int dim) {
  const int lane = threadIdx.x % 32;
  constexpr int kSome = TILES < 8 ? TILES : 8;  // tiles at a time, none of which waits for another
#pragma unroll
  for (int from = 0; from < TILES; from += kSome) {
    uint32_t y[kSome / 2][4];
#pragma unroll
    for (int n = 0; n < kSome / 2; ++n)
      load_transposed(y[n], &rows[first + lane % 16][dim + 8 * from + 16 * n + lane / 16 * 8]);
#pragma unroll
    for (int n = 0; n < kSome; ++n) product_of<T>(d[from + n], x0, y[n / 2][n % 2 * 2]);
#pragma unroll
    for (int n = 0; n < kSome; ++n) product_of<T>(d[from + n], x1, y[n / 2][n % 2 * 2 + 1]);
  }
}

// A chunk's rows of 16 columns in shared memory, transposed, as 16 rows of two tiles.
template <class T, int WIDTH>
__device__ __forceinline__ void take_rows(float (&to)[2][4], const T (*rows)[WIDTH], int first, int column) {
  const int lane = threadIdx.x % 32;
  uint32_t y[4];
  load_transposed(y, &rows[first + lane % 8 + lane / 16 * 8][column + lane / 8 % 2 * 8]);
#pragma unroll
  for (int n = 0; n < 2; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 two = widen_two<T>(y[2 * n + half]);
      to[n][2 * half] = two.x, to[n][2 * half + 1] = two.y;
    }
}

// Tiles of rows that lie in columns of kPitch, and back.
__device__ __forceinline__ void take_columns(float (&to)[4], const float (*from)[kPitch], int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float2 two = *reinterpret_cast<const float2*>(&from[lane / 4 + 8 * half][row + lane % 4 * 2]);
    to[2 * half] = two.x, to[2 * half + 1] = two.y;
  }
}
__device__ __forceinline__ void put_columns(float (*to)[kPitch], const float (&from)[4], int row) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    *reinterpret_cast<float2*>(&to[lane / 4 + 8 * half][row + lane % 4 * 2]) = float2{from[2 * half], from[2 * half + 1]};
}
// Two neighbours of numbers that a chunk's rows have.
__device__ __forceinline__ float2 two_of(const float* numbers, int tile) {
  return *reinterpret_cast<const float2*>(numbers + 8 * tile + threadIdx.x % 4 * 2);
}

template <int TILES>
__device__ __forceinline__ void store(float4 (*to)[32], const Turned<TILES>& s) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) to[n][threadIdx.x % 32] = float4{s[n][0], s[n][1], s[n][2], s[n][3]};
}
template <int TILES>
__device__ __forceinline__ void load(Turned<TILES>& s, const float4 (*from)[32]) {
#pragma unroll
  for (int n = 0; n < TILES; ++n) {
    const float4 x = from[n][threadIdx.x % 32];
    s[n][0] = x.x, s[n][1] = x.y, s[n][2] = x.z, s[n][3] = x.w;
  }
}
// To and from device memory: (dims, columns), rows `stride` apart.
template <int TILES>
__device__ __forceinline__ void write_state(const Turned<TILES>& s, float* to, int64_t stride) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e) to[(8 * n + lane % 4 * 2 + e % 2) * stride + lane / 4 + e / 2 * 8] = s[n][e];
}
template <int TILES>
__device__ __forceinline__ void read_state(Turned<TILES>& s, const float* from, int64_t stride) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int e = 0; e < 4; ++e)
      s[n][e] = from ? from[(8 * n + lane % 4 * 2 + e % 2) * stride + lane / 4 + e / 2 * 8] : 0.0f;
}

// Half of a chunk's rows of 16 columns, of which each lies in PITCH values, to device memory; by a warp.
template <int PITCH>
__device__ __forceinline__ void write_rows(const float (*columns)[PITCH], int half, float* to, int64_t stride, int last) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    const int i = 32 * half + 8 * n + lane / 16 * 4;
    const float4 four = *reinterpret_cast<const float4*>(&columns[lane % 16][i]);
    const float x[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e)
      if (i + e < last) to[(i + e) * stride + lane % 16] = x[e];
  }
}

// The rows of a block, solved: x is what the state and other blocks leave of them, w[column][row] becomes r x. A column a
// thread, and twice. meanwhile: what can be done while each row waits for the one before it.
// own: negative, of the row or column that others take it from; kept: x as solved, where that is wanted.
template <bool DESCENDING, int PITCH, class Meanwhile>
__device__ __forceinline__ void solve(float (*w)[kPitch], float (*kept)[PITCH], int block, const float (&x0)[4],
                                      const float (&x1)[4], const float* r, const float (*own)[kBlock],
                                      Meanwhile meanwhile) {
  const int column = threadIdx.x % 16, first = kBlock * block;
  put_columns(w, x0, first), put_columns(w, x1, first + 8);
  __syncwarp();
  float x[kBlock], factors[kBlock];
#pragma unroll
  for (int i = 0; i < kBlock; i += 4) {
    *reinterpret_cast<float4*>(x + i) = *reinterpret_cast<const float4*>(&w[column][first + i]);
    *reinterpret_cast<float4*>(factors + i) = *reinterpret_cast<const float4*>(r + first + i);
  }
  __syncwarp();  // both threads of a column have it before either stores
  meanwhile();
  // order: the own block's rows, one fma each
#pragma unroll
  for (int n = 0; n < kBlock; ++n) {
    const int i = DESCENDING ? kBlock - 1 - n : n;
    float minus[kBlock];
#pragma unroll
    for (int j = 0; j < kBlock; j += 4)
      if (DESCENDING ? j < i : j + 3 > i)
        *reinterpret_cast<float4*>(minus + j) = *reinterpret_cast<const float4*>(&own[i][j]);
    const float z = factors[i] * x[i], multiplied = z + 0.0f;
#pragma unroll
    for (int m = n + 1; m < kBlock; ++m) {
      const int j = DESCENDING ? kBlock - 1 - m : m;
      x[j] = fmaf(minus[j], multiplied, x[j]);
    }
  }
  // Of the two threads of a column, each stores a half.
  const bool upper = threadIdx.x % 32 >= 16;
  const int from = first + (upper ? kBlock / 2 : 0);
#pragma unroll
  for (int i = 0; i < kBlock / 2; i += 4) {
    float solved[4], multiplied[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      solved[e] = upper ? x[i + e + kBlock / 2] : x[i + e];
      multiplied[e] = (upper ? factors[i + e + kBlock / 2] : factors[i + e]) * solved[e];
    }
    *reinterpret_cast<float4*>(&w[column][from + i]) = *reinterpret_cast<float4*>(multiplied);
    if (kept) *reinterpret_cast<float4*>(&kept[column][from + i]) = *reinterpret_cast<float4*>(solved);
  }
  __syncwarp();
}

#endif

}  // namespace delta
}  // namespace vx
