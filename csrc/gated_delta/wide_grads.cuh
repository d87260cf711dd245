// The gradients of a chunk, as grads.cuh has them and with its bits, by four warpgroups; no torch headers.
//
// A block takes a chunk of a key head, and of its value heads' columns 64 at a time. First two warpgroups have what
// concerns columns, each every second eight of them, and two what concerns pairs of rows, each every second eight keys.
// Then the former have the gradients of k, the latter those of q, each half of the dims, and keep them in registers.
// What one warpgroup makes and others multiply lies in shared memory as it is multiplied. All loops together have room
// in the cache of instructions.
//
// More than 600 lines in one file because it is one kernel: what a warpgroup makes lies where others multiply it.
#pragma once
#include "gated_delta/grads.cuh"
#include "gated_delta/warpgroup.cuh"

namespace vx {
namespace delta {

constexpr int kWideGradsThreads = 512;

template <class T>
struct WideGradsShared {
  Panel<kDepth> s[2], ds[2];               // (dims, columns), as all below as multiplied: rounded to tf32
  Panel<kChunk> s_across[4];               // (columns, dims); then, (rows, columns), what states are multiplied by
  Panel<kChunk> w[2], w_across[2];         // (rows, columns), (columns, rows); then gradients of products among keys
  Panel<kDepth> k_across[2], q_across[2];  // (dims, rows)
  float between[kChunk * 72];              // what a row takes of earlier ones; then what rows and columns add up
  float4 handed[3][128];
  Gates gates[2];  // of a value head and the next one
  float r_k[kChunk], r_q[kChunk];
  float of_state[2][kDepth], taken[2][kChunk], rows[kChunk], sums[kChunk], columns[kChunk];

  // Keys and queries as they come, before there are states
  struct Keys {
    T k[kChunk][kDepth + 8], q[kChunk][kDepth + 8];
  };
  __device__ __forceinline__ Keys& keys() { return reinterpret_cast<Keys&>(s); }
  __device__ __forceinline__ Panel<kChunk>* earlier() { return reinterpret_cast<Panel<kChunk>*>(between); }
  __device__ __forceinline__ Panel<kChunk>* by_k() { return s_across; }
  __device__ __forceinline__ Panel<kChunk>* by_q() { return s_across + 2; }
  __device__ __forceinline__ Panel<kChunk>* dkk() { return w; }
  __device__ __forceinline__ Panel<kChunk>* dqk() { return w_across; }
};
template <class T>
constexpr int kWideGradsBytes = sizeof(WideGradsShared<T>) + 1024;  // from a 1,024-byte boundary on
static_assert(kWideGradsBytes<uint16_t> <= 227 << 10);

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// d + a b^T of 64 rows of a and 32 of b, and eight of K. order: K ascending in the accumulator, eight at a time
__device__ __forceinline__ void wide_product(float (&d)[4][4], uint64_t a, uint64_t b) {
  asm volatile(
      "wgmma.mma_async.sync.aligned.m64n32k8.f32.tf32.tf32 "
      "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, 1, 1, 1;"
      : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
        "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
        "+f"(d[3][2]), "+f"(d[3][3])
      : "l"(a), "l"(b));
}
// Of 64 rows every second eight.
__device__ __forceinline__ uint64_t operand_of_second(const Panel<kChunk>* panels, int part) {
  return operand_of<kChunk>(panels, 8 * part, 0) + (64ull << 32);
}
// The operand that lies `k` of K behind one at a panel's begin.
template <int ROWS>
__device__ __forceinline__ uint64_t behind(uint64_t first, int k) {
  const uint32_t low = uint32_t(first) + (k / 32 * int(sizeof(Panel<ROWS>)) + k % 32 * 4) / 16;
  return (first & 0xffffffff00000000) | low;
}
// d + a b^T, 64 of K.
template <int ROWS, int TILES>
__device__ __forceinline__ void multiply_there(float (&d)[TILES][4], uint64_t a, uint64_t b) {
#pragma unroll
  for (int n = 0; n < kChunk / 8; ++n) wide_product(d, behind<kChunk>(a, 8 * n), behind<ROWS>(b, 8 * n));
}

// Numbers as they are from here on: addresses that are made of them are not kept in registers, nor in memory, over loops.
__device__ __forceinline__ void anew(int& x) { asm volatile("" : "+r"(x)); }

// x where a < b, else zero. A comparison of its own each time: predicates that are kept take more than they save.
__device__ __forceinline__ float where_less(int a, int b, float x) {
  float y;
  asm("{\n.reg .pred p;\nsetp.lt.s32 p, %2, %3;\nselp.f32 %0, %1, 0f00000000, p;\n}" : "=f"(y) : "f"(x), "r"(a), "r"(b));
  return y;
}

// What is read of rows, or zeros where there are none: no branches, and addresses are made once.
__device__ __forceinline__ float2 load_two(const float* from, bool there) {
  float2 two;
  asm volatile(
      "{\n.reg .pred p;\nsetp.ne.s32 p, %3, 0;\nmov.f32 %0, 0f00000000;\nmov.f32 %1, 0f00000000;\n"
      "@p ld.global.v2.f32 {%0, %1}, [%2];\n}"
      : "=f"(two.x), "=f"(two.y)
      : "l"(from), "r"(int(there)));
  return two;
}
template <class T>
__device__ __forceinline__ uint32_t load_bits(const T* from, bool there) {
  uint32_t two;
  asm volatile("{\n.reg .pred p;\nsetp.ne.s32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.b32 %0, [%1];\n}"
               : "=r"(two)
               : "l"(from), "r"(int(there)));
  return two;
}

// Eight neighbours, those from `halves`, 0 or 4, first; as put_eight has them, `at` two behind where it is 4; and across, at
// places that are turned by it and, of every second two threads, by 2.
__device__ __forceinline__ void load_halves(float (&to)[8], const float* from, int halves) {
  *reinterpret_cast<float4*>(to) = *reinterpret_cast<const float4*>(from + halves);
  *reinterpret_cast<float4*>(to + 4) = *reinterpret_cast<const float4*>(from + (halves ^ 4));
}
__device__ __forceinline__ void put_halves(float* panel, int at, const float (&x)[8]) {
  *reinterpret_cast<float2*>(panel + at) = float2{x[0], x[2]};
  *reinterpret_cast<float2*>(panel + (at ^ 2)) = float2{x[4], x[6]};
  *reinterpret_cast<float2*>(panel + (at ^ 4)) = float2{x[1], x[3]};
  *reinterpret_cast<float2*>(panel + (at ^ 6)) = float2{x[5], x[7]};
}
__device__ __forceinline__ void put_across(float* panel, int turned, const float (&x)[8]) {
  const bool pairs = threadIdx.x / 2 % 2;
#pragma unroll
  for (int c = 0; c < 8; ++c) panel[turned ^ (36 * c)] = pairs ? x[c ^ 2] : x[c];
}

// What fold_rows does among every second eight columns, of one row.
__device__ __forceinline__ float2 fold_second(const float (&d)[4][4]) {
  return {(d[0][0] + d[2][0]) + (d[1][0] + d[3][0]), (d[0][1] + d[2][1]) + (d[1][1] + d[3][1])};
}
// And then, with those of the other ones.
__device__ __forceinline__ void fold_both(float4 one, float4 other, float& low, float& high) {
  float d[4] = {one.x + other.x, one.y + other.y, one.z + other.z, one.w + other.w};
  // order: the upper half is added to the lower one
#pragma unroll
  for (int width = 2; width; width /= 2)
#pragma unroll
    for (int e = 0; e < 4; ++e) d[e] = d[e] + __shfl_xor_sync(0xffffffffu, d[e], width);
  low = d[0] + d[1], high = d[2] + d[3];
}

#endif

template <class T>
__global__ void __launch_bounds__(kWideGradsThreads, 1) wide_grads_kernel(const GatedDeltaBackward args) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(16) unsigned char memory[];
  auto& sh = *reinterpret_cast<WideGradsShared<T>*>(memory + (1024 - sm90::shared_address(memory) % 1024) % 1024);
  enum { kEarlier = 1, kMultiplied = 2 };  // barriers
  const int tid = threadIdx.x, lane = tid % 32, gid = lane / 4, tig = lane % 4;
  // The warp's own, in registers that all of it share
  const int warp = __reduce_max_sync(0xffffffffu, tid / 32), part = warp / 4 % 2;
  const bool of_columns = warp < 8;
  const int first = 16 * (warp % 4), d0 = 64 * part;  // this warp's rows; its half of the keys' dims
  const int index = blockIdx.x, hk = blockIdx.y, group = args.hv / args.hk, splits = args.dv_size / 64;
  int begin, end, chunk;
  {
    int sequence = -1;  // the last whose first chunk is not behind this one
    for (int from = 0; from < args.sequences; from += kWideGradsThreads) {
      const int n = from + tid;
      sequence += __syncthreads_count(n < args.sequences && min(max(args.offsets[n], 0), args.tokens) / kChunk + n <= index);
    }
    sequence = max(sequence, 0);
    begin = min(max(args.offsets[sequence], 0), args.tokens);
    end = max(min(args.offsets[sequence + 1], args.tokens), begin);
    chunk = index - begin / kChunk - sequence;
  }
  const int row = __reduce_max_sync(0xffffffffu, begin + chunk * kChunk);
  const int last = __reduce_max_sync(0xffffffffu, min(kChunk, end - row));
  if (chunk < 0 || last <= 0) return;

  const int v_step = args.hv * args.dv_size, plane = kDepth * args.dv_size;
  // Of the block's columns of the value head: states, rows of u and of outputs, rows of values
  int64_t states_at = (int64_t(index) * args.hv + hk * group) * plane, rows_at = int64_t(row) * v_step + hk * group * args.dv_size;
  int64_t values_at = row * args.v_row + hk * group * args.v_head;
  // What is read next, on its way into the L2 cache while there is other work; behind the last columns the states of a
  // block that begins when this one ends.
  const auto expect_states = [&](int64_t at) {
    into_l2((tid < 256 ? args.states : args.dstates) + at + (tid % 256 / 2 * args.dv_size + tid % 2 * 32));
  };
  const auto expect_rows = [&](int64_t rows, int64_t values) {
    const int i = tid / 2 % 64;
    if (i >= last || tid >= 384) return;
    if (tid < 256)
      into_l2((tid < 128 ? args.us : args.dus) + rows + (i * v_step + tid % 2 * 32));
    else
      into_l2(tid % 2 ? static_cast<const T*>(args.dout) + rows + i * v_step
                      : static_cast<const T*>(args.v) + values + i * args.v_row);
  };
  expect_states(states_at), expect_rows(rows_at, values_at);

  // Of pairs of rows: keys times keys, and queries times keys. In memory of the thread's own: registers have no room.
  float4 of_pairs[8];  // of two rows, keys and then queries, of four eights of keys
  const auto there_in_memory = [&] {
    float4* at = of_pairs;
    asm volatile("" : "+l"(at));
    return at;
  };
  {
    auto& keys = sh.keys();
    {
      const bool of_k = tid < 256;
      const T* const from = of_k ? static_cast<const T*>(args.k) + hk * args.k_head : static_cast<const T*>(args.q) + hk * args.q_head;
      const int64_t step = of_k ? args.k_row : args.q_row;
      auto& to = of_k ? keys.k : keys.q;
      const int at = tid % 16 * 8;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const int i = tid / 16 % 16 + 16 * n;
        copy16(&to[i][at], from + (row + (i < last ? i : 0)) * step + at, i < last);
      }
      copies_end();
    }
    if (warp >= 14 && warp - 14 < group) make_gates(sh.gates[warp - 14], args, row, last, hk * group + warp - 14);
    copies_wait<0>();
    __syncthreads();
    if (of_columns) {
      make_norms<T>(keys, sh, args.l2norm);
#pragma unroll 1
      for (int which = 0; which < 2; ++which) {
        const auto& from = which ? keys.q : keys.k;
#pragma unroll
        for (int i = 0; i < kChunk; i += 16) {
          auto& to = (which ? sh.q_across : sh.k_across)[i / 32];
          uint32_t y[4];
          load_transposed(y, &from[i + lane % 16][16 * warp + lane / 16 * 8]);
#pragma unroll
          for (int m = 0; m < 4; ++m) {
            const float2 two = widen_two<T>(y[m]);
            const int d = 16 * warp + m / 2 * 8 + gid, at = i % 32 + m % 2 * 8 + 2 * tig;
            in_panel(to, d, at) = two.x, in_panel(to, d, at + 1) = two.y;
          }
        }
      }
    } else {
      float kk[4][4] = {}, qk[4][4] = {};
      const T* const of_k = &keys.k[first + lane % 16][lane / 16 * 8];
      const T* const others = &keys.k[8 * part + lane % 8 + lane / 16 * 16][lane / 8 % 2 * 8];
      // order: dims ascending, sixteen at a time
#pragma unroll 2
      for (int d = 0; d < kDepth; d += 16) {
        uint32_t left[2][4];
        load_matrix(left[0], of_k + d), load_matrix(left[1], of_k + d + kChunk * (kDepth + 8));
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          uint32_t right[4];
          load_matrix(right, others + 16 * n * (kDepth + 8) + d);
          product<T>(kk[n], left[0], right[0], right[1]), product<T>(kk[n + 1], left[0], right[2], right[3]);
          product<T>(qk[n], left[1], right[0], right[1]), product<T>(qk[n + 1], left[1], right[2], right[3]);
        }
      }
      float4* const pairs = there_in_memory();
#pragma unroll
      for (int m = 0; m < 4; m += 2)
#pragma unroll
        for (int n = 0; n < 4; n += 2) {
          pairs[2 * m + n / 2] = float4{kk[n][m], kk[n][m + 1], kk[n + 1][m], kk[n + 1][m + 1]};
          pairs[2 * m + 2 + n / 2] = float4{qk[n][m], qk[n][m + 1], qk[n + 1][m], qk[n + 1][m + 1]};
        }
    }
    __syncthreads();
  }
  // This thread's places in what lies across: (8 n + 2 tig + e % 2, first + gid + e / 2 * 8) at 256 n + across[e]. And in what
  // lies along, of tile n, which is the eight at 2 n + part: (first + gid + 8 m, 2 tig + e) at n / 2 * 2048 + 256 m + along[n % 2][e].
  int across[4], along[2][2];
  int across_at = 2 * tig * 32 + ((warp % 2 * 4 + gid % 2) ^ (2 * tig)) * 4 + gid / 2;
  int along_at = (first + gid) * 32 + ((2 * part) ^ gid) * 4 + tig;
  const float* const k_here = &sh.k_across[warp % 4 / 2][0][0];
  const float* const q_here = &sh.q_across[warp % 4 / 2][0][0];
  int i0 = first + gid, c0 = 8 * part + 2 * tig;  // the first row and column, or key, of this thread
  float sum[8][4] = {};                                 // gradients before those of the norms: this warp's rows and dims
  float total[2] = {0.0f, 0.0f};                        // gradients of beta, or one of g, of a value head
  int thread = tid;
  const auto make_across = [&] {
    anew(across_at);
    across[0] = across_at, across[1] = (across_at ^ 4) + 32, across[2] = across[0] ^ 8, across[3] = across[1] ^ 8;
  };
  const auto make_along = [&] {
    anew(along_at);
#pragma unroll
    for (int n = 0; n < 2; ++n)
#pragma unroll
      for (int e = 0; e < 2; ++e) along[n][e] = along_at ^ (16 * n + 4 * e);
  };
  int one = 0, split = 0;                               // order: value heads ascending, of each the columns' blocks ascending

#pragma unroll 1
  for (int turn = 0;; ++turn) {
    anew(thread);
    const bool more = one < group;
    const int h = hk * group + one;
    const Gates& gates = sh.gates[one % 2];
    if (turn && warp == 0) {
      // What the state behind the chunk takes: of every row, and of what was there before.
      const auto& of_old_state = sh.of_state[(turn - 1) % 2];
      const float whole = exp_term(sh.gates[(split ? one : one - 1) % 2].g[last - 1]);
      float taken[2], state[2];
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int i = lane + 32 * m;
        taken[m] = (sh.taken[0][i] + 0.0f) + sh.taken[1][i], state[m] = (of_old_state[i] + 0.0f) + of_old_state[i + 64];
      }
      float of_rows = taken[0] + taken[1], of_old = state[0] + state[1];
      // order: the upper half is added to the lower one
#pragma unroll
      for (int width = 16; width; width /= 2) {
        of_rows = of_rows + __shfl_xor_sync(0xffffffffu, of_rows, width);
        of_old = of_old + __shfl_xor_sync(0xffffffffu, of_old, width);
      }
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        const int i = lane + 32 * m;
        const float of_row = sh.rows[i] + (sh.sums[i] - sh.columns[i]);
        sh.sums[i] = (of_row - taken[m]) + (i == last - 1 ? of_rows + whole * of_old : 0.0f);
      }
    }
    if (more) {
      if (split == 0 && one >= 2 && warp == 15) make_gates(sh.gates[one % 2], args, row, last, h);
      // Threads take eight columns of a row, and neighbouring threads other halves of them first, and then other pairs:
      // so what they put across meets in no bank.
      const int halves = thread % 2 * 4, turned_by = thread % 2 * 4 + thread / 2 % 2 * 2;
      {
        const int r = thread / 4, quarter = thread % 4;
        const int at = r * 32 + ((2 * quarter) ^ (r % 8)) * 4 + halves / 2;
        const int turned = (r / 32 * 2048 + quarter * 256 + (r % 32 / 8 * 2 + r % 2) * 4 + r % 8 / 2) ^ (36 * turned_by);
        const int64_t from = states_at + (r * args.dv_size + 8 * quarter);
        float x[2][8], y[2][8], f[8];
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          load_halves(x[p], args.states + from + 32 * p, halves);
          load_halves(y[p], args.dstates + from + 32 * p, halves);
        }
        // order: the upper half is added to the lower one
#pragma unroll
        for (int c = 0; c < 8; ++c) f[c] = y[0][c] * x[0][c] + y[1][c] * x[1][c];
#pragma unroll
        for (int p = 0; p < 2; ++p) {
#pragma unroll
          for (int c = 0; c < 8; ++c) x[p][c] = as_operand(x[p][c]), y[p][c] = as_operand(y[p][c]);
          put_halves(&sh.s[p][0][0], at, x[p]), put_halves(&sh.ds[p][0][0], at, y[p]);
          put_across(&sh.s_across[0][0][0] + 1024 * p, turned, x[p]);
        }
#pragma unroll
        for (int c = 0; c < 8; ++c) f[c] = f[c] + __shfl_xor_sync(0xffffffffu, f[c], 2);
        float other[8];
#pragma unroll
        for (int c = 0; c < 8; ++c) other[c] = __shfl_xor_sync(0xffffffffu, f[c ^ 4], 1);
#pragma unroll
        for (int c = 0; c < 8; ++c) f[c] = f[c] + other[c];
        fold<8>(f);
        if (quarter == 0) sh.of_state[turn % 2][r] = f[0];
      }
      {
        const int r = thread / 64 * 8 + thread % 32 / 4, eighth = thread / 32 % 2 * 4 + thread % 4;
        const int at = eighth / 4 * 2048 + r * 32 + ((2 * (eighth % 4)) ^ (r % 8)) * 4 + halves / 2;
        const int turned = (r / 32 * 2048 + eighth * 256 + (r % 32 / 8 * 2 + r % 2) * 4 + r % 8 / 2) ^ (36 * turned_by);
        float x[8] = {};
        if (r < last) load_halves(x, args.us + rows_at + (r * v_step + 8 * eighth), halves);
        const float factor = sh.r_k[r];
#pragma unroll
        for (int c = 0; c < 8; ++c) x[c] = as_operand(factor * x[c]);
        put_halves(&sh.w[0][0][0], at, x), put_across(&sh.w_across[0][0][0], turned, x);
      }
      written_for_products();
    }
    __syncthreads();
    if (turn && !of_columns) {
      // order: the gradient of g_i takes those of the sums from i to the last, in a tree
      const int i = thread % 256 / 4, before = split ? split - 1 : splits - 1, from = i - thread % 4;
      const float x = fold_chunk([&](int j) { return where_less(from, j - thread % 4 + 1, sh.sums[j]); });
      total[0] = (before ? total[0] : 0.0f) + x;
      if (split == 0 && thread % 4 == 0 && i < last) args.dg[int64_t(row + i) * args.hv + h - 1] = total[0];
    }
    if (!more) break;
    const bool ends = split + 1 == splits;
    // To the next columns: a head's lie behind those of the one before
    const auto step_of = [&](int64_t head) { return ends ? head - 64 * split : 64; };
    anew(i0), anew(c0);
    // Of this thread's first row, column 0 of the block's
    const int64_t here = rows_at + i0 * v_step;
    const bool there[2] = {i0 < last, i0 + 8 < last};
    int rows = 2;
    anew(rows);  // else the compiler has no loop over two rows
    float4 mine;
    uint32_t dv_bits[2][4];
    float grads[8][4];
    if (of_columns) {
      float ks[4][4] = {}, qs[4][4] = {}, left[4][4] = {};
      const uint64_t of_s = operand_of_second(sh.s_across, part);
      make_across();
      // order: dims ascending
#pragma unroll 1
      for (int p = 0; p < 4; ++p) {
        float a[4][4], b[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e)
            a[n][e] = k_here[1024 * p + 256 * n + across[e]], b[n][e] = q_here[1024 * p + 256 * n + across[e]];
        settle(a), settle(b), settle(ks), settle(qs);
        sm90::wgmma_begin();
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const uint64_t right = behind<kChunk>(of_s + uint32_t(p) * (sizeof(Panel<kChunk>) / 16), 8 * n);
          wide_product(ks, a[n], right), wide_product(qs, b[n], right);
        }
        sm90::wgmma_commit();
        sm90::wgmma_wait<0>();
        settle(ks), settle(qs);
      }
      // One of this thread's two rows, asked for while others work
      float2 du[4];
      uint32_t d_bits[4], v_bits[4];
      const float* of_du = args.dus + here + c0;
      const T* of_d = static_cast<const T*>(args.dout) + here + c0;
      const T* of_v = static_cast<const T*>(args.v) + values_at + (i0 * args.v_row + c0);
      const auto ask = [&](bool there) {
#pragma unroll
        for (int n = 0; n < 4; ++n)
          du[n] = load_two(of_du + 16 * n, there), d_bits[n] = load_bits(of_d + 16 * n, there), v_bits[n] = load_bits(of_v + 16 * n, there);
        of_du += 8 * v_step, of_d += 8 * v_step, of_v += 8 * args.v_row;
      };
      ask(there[0]);
      meet<kWideGradsThreads>(kEarlier);
      settle(left);
      sm90::wgmma_begin();
      multiply_there<kChunk>(left, operand_of<kChunk>(sh.earlier(), 0, 0), operand_of_second(sh.w_across, part));
      sm90::wgmma_commit();
      sm90::wgmma_wait<0>();
      settle(left);
      meet<kWideGradsThreads>(kMultiplied);
      make_along();
      float* to_k = &sh.by_k()[0][0][0];
      float* to_q = &sh.by_q()[0][0][0];
      float2 of_beta[2], of_rows[2];  // of both rows
      // By a loop, for which the second row's take the first one's place: it is to have room in the cache of instructions
#pragma unroll 1
      for (int m = 0; m < rows; ++m) {
        if (m) {
          ask(there[1]);
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e) ks[n][e] = ks[n][2 + e], qs[n][e] = qs[n][2 + e], left[n][e] = left[n][2 + e];
        }
        const int i = i0 + 8 * m;
        const float beta = gates.beta[i], decay = gates.decay[i], r = sh.r_k[i];
        const float f = -(decay * r), fx = (beta * decay) * r, fy = decay * sh.r_q[i];
        of_beta[0] = of_beta[1], of_rows[0] = of_rows[1];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float2 dout = widen_two<T>(d_bits[n]), value = widen_two<T>(v_bits[n]);
          T two[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int at = n / 2 * 2048 + along[n % 2][e];
            const float u = e ? du[n].y : du[n].x, d = args.scale * (e ? dout.y : dout.x);
            const float x = -(fx * u), y = fy * d;
            left[n][e] = u * (fmaf(f, ks[n][e], e ? value.y : value.x) - (left[n][e] + 0.0f));
            ks[n][e] = x * ks[n][e] + y * qs[n][e];
            to_k[at] = as_operand(x), to_q[at] = as_operand(y);
            narrow(two[e], beta * u);
          }
          dv_bits[0][n] = dv_bits[1][n], dv_bits[1][n] = *reinterpret_cast<uint32_t*>(two);
        }
        of_beta[1] = fold_second(left), of_rows[1] = fold_second(ks);
        to_k += 256, to_q += 256;
      }
      // One has the gradients of beta, the other the sums of rows.
      const float4 beta_four{of_beta[0].x, of_beta[0].y, of_beta[1].x, of_beta[1].y};
      const float4 rows_four{of_rows[0].x, of_rows[0].y, of_rows[1].x, of_rows[1].y};
      mine = part ? rows_four : beta_four, sh.handed[1 - part][thread % 128] = part ? beta_four : rows_four;
    } else {
      float of_kk[4][4] = {}, of_qk[4][4] = {};
      // Two eights of columns at a time, asked for while others are multiplied
      const float* of_du = args.dus + here + 2 * tig;
      const T* of_d = static_cast<const T*>(args.dout) + here + 2 * tig;
      float2 du[2][2];
      uint32_t d_bits[2][2];
      const auto ask = [&] {
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            du[n][m] = load_two(of_du + 8 * m * v_step + 8 * n, there[m]);
            d_bits[n][m] = load_bits(of_d + 8 * m * v_step + 8 * n, there[m]);
          }
        of_du += 16, of_d += 16;
      };
      ask();
      {
        make_along();
        const float4* pairs = there_in_memory();
        float* to = &sh.earlier()[0][0][0];
#pragma unroll 1
        for (int m = 0; m < 2; ++m) {
          const float g = gates.g[i0 + 8 * m], r = sh.r_k[i0 + 8 * m];
          const int behind_key = i0 + 8 * m < last ? c0 - i0 - 8 * m : kChunk;  // column 0 of this thread's less its row, if any
          const float4 fours[2] = {pairs[0], pairs[1]};
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            const float2 two = *reinterpret_cast<const float2*>(gates.g + c0 + 16 * n);
            const float4 four = fours[n / 2];
            const float x = as_operand(r * (exp_term(g - two.x) * (n % 2 ? four.z : four.x)));
            const float y = as_operand(r * (exp_term(g - two.y) * (n % 2 ? four.w : four.y)));
            to[n / 2 * 2048 + along[n % 2][0]] = where_less(behind_key, -16 * n, x);
            to[n / 2 * 2048 + along[n % 2][1]] = where_less(behind_key, -16 * n - 1, y);
          }
          pairs += 4, to += 256;
        }
        written_for_products();
        arrive<kWideGradsThreads>(kEarlier);
      }
      uint64_t of_w = operand_of_second(sh.w, part);
      // order: columns ascending
#pragma unroll 1
      for (int p = 0; p < 4; ++p) {
        float a[2][4], b[2][4];
#pragma unroll
        for (int n = 0; n < 2; ++n)
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            const float2 dout = widen_two<T>(d_bits[n][m]);
            a[n][2 * m] = as_operand(du[n][m].x), a[n][2 * m + 1] = as_operand(du[n][m].y);
            b[n][2 * m] = as_operand(args.scale * dout.x), b[n][2 * m + 1] = as_operand(args.scale * dout.y);
          }
        settle(a), settle(b), settle(of_kk), settle(of_qk);
        sm90::wgmma_begin();
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const uint64_t right = behind<kChunk>(of_w, 8 * n);
          wide_product(of_kk, a[n], right), wide_product(of_qk, b[n], right);
        }
        sm90::wgmma_commit();
        of_w += p == 1 ? (sizeof(Panel<kChunk>) - 64) / 16 : 64 / 16;
        if (p < 3) ask();
        sm90::wgmma_wait<0>();
        settle(of_kk), settle(of_qk);
      }
      const float4* pairs = there_in_memory();
      float4 fours[4];
#pragma unroll
      for (int n = 0; n < 4; ++n) fours[n] = pairs[n];
      meet<kWideGradsThreads>(kMultiplied);
      make_along();
      float* to_kk = &sh.dkk()[0][0][0];
      float* to_qk = &sh.dqk()[0][0][0];
      float2 of_sums[2];
#pragma unroll 1
      for (int m = 0; m < rows; ++m) {
        if (m) {
#pragma unroll
          for (int n = 0; n < 4; ++n) {
            fours[n] = pairs[4 + n];
#pragma unroll
            for (int e = 0; e < 2; ++e) of_kk[n][e] = of_kk[n][2 + e], of_qk[n][e] = of_qk[n][2 + e];
          }
        }
        const int i = i0 + 8 * m, less = c0 - i, behind_key = i < last ? less : kChunk;
        const float g = gates.g[i], of_k = -(gates.beta[i] * sh.r_k[i]), of_q = sh.r_q[i];
        of_sums[0] = of_sums[1];
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const int j = c0 + 16 * n;
          const float2 two = *reinterpret_cast<const float2*>(gates.g + j);
          const float4 kk = fours[n / 2], qk = fours[2 + n / 2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int at = n / 2 * 2048 + along[n % 2][e];
            const float decay = exp_term(g - (e ? two.y : two.x));
            const float x = where_less(behind_key, -16 * n - e, of_k * (decay * of_kk[n][e]));
            const float y = where_less(behind_key, 1 - 16 * n - e, of_q * (decay * of_qk[n][e]));
            const float one_kk = e ? (n % 2 ? kk.w : kk.y) : (n % 2 ? kk.z : kk.x);
            const float one_qk = e ? (n % 2 ? qk.w : qk.y) : (n % 2 ? qk.z : qk.x);
            of_kk[n][e] = where_less(less, -16 * n - e, x * one_kk + y * one_qk);
            to_kk[at] = as_operand(x), to_qk[at] = as_operand(y);
          }
          *reinterpret_cast<float2*>(sh.between + i * 72 + j) = float2{of_kk[n][0], of_kk[n][1]};
        }
        of_sums[1] = fold_second(of_kk);
        to_kk += 256, to_qk += 256;
      }
      mine = float4{of_sums[0].x, of_sums[0].y, of_sums[1].x, of_sums[1].y};
      if (part) sh.handed[2][thread % 128] = mine;
    }
    written_for_products();
    __syncthreads();

    // Not before: what is written for products would wait for what was asked for
    if (ends && one + 1 == group) {
      const int next = index + multiprocessors(), key_head = hk + next / gridDim.x;
      if (key_head < args.hk) expect_states((int64_t(next % gridDim.x) * args.hv + key_head * group) * plane);
    } else {
      expect_states(states_at + step_of(plane));
      expect_rows(rows_at + step_of(args.dv_size), values_at + step_of(args.v_head));
    }
    anew(i0), anew(thread);
    float low, high;
    if (of_columns) {
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        T* const to = static_cast<T*>(args.dv) + here + (c0 + 8 * m * v_step);
#pragma unroll
        for (int n = 0; n < 4; ++n)
          if (there[m]) *reinterpret_cast<uint32_t*>(to + 16 * n) = dv_bits[m][n];
      }
      fold_both(mine, sh.handed[part][thread % 128], low, high);
      if (part) {
        if (tig == 0) sh.rows[i0] = low, sh.rows[i0 + 8] = high;
      } else {
        total[0] = (split ? total[0] : 0.0f) + low, total[1] = (split ? total[1] : 0.0f) + high;
        if (ends && tig == 0) {
          float* const to = args.dbeta + int64_t(row + i0) * args.hv + h;
          if (there[0]) *to = total[0];
          if (there[1]) to[8 * args.hv] = total[1];
        }
      }
      each_place([&](int n, int e, int, int) { grads[n][e] = 0.0f; });
      {
        // What the state was added. order: columns ascending
        const float* from = args.us + rows_at + (i0 * v_step + 2 * tig);
        const float rest[2] = {gates.rest[i0], gates.rest[i0 + 8]}, factor[2] = {sh.r_k[i0], sh.r_k[i0 + 8]};
        uint64_t right = operand_of<kDepth>(sh.ds, d0, 0);
        float2 u[4][2];
        const auto ask = [&] {
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int m = 0; m < 2; ++m) u[n][m] = load_two(from + 8 * m * v_step + 8 * n, there[m]);
          from += 32;
        };
        ask();
#pragma unroll 1
        for (int p = 0; p < 2; ++p) {
          float a[4][4];
#pragma unroll
          for (int n = 0; n < 4; ++n)
#pragma unroll
            for (int m = 0; m < 2; ++m) {
              a[n][2 * m] = as_operand(rest[m] * (factor[m] * u[n][m].x));
              a[n][2 * m + 1] = as_operand(rest[m] * (factor[m] * u[n][m].y));
            }
          settle(a), settle(grads);
          sm90::wgmma_begin();
#pragma unroll
          for (int n = 0; n < 4; ++n) wide_product(grads, a[n], behind<kDepth>(right, 8 * n));
          sm90::wgmma_commit();
          right += sizeof(Panel<kDepth>) / 16;
          if (p == 0) ask();
          sm90::wgmma_wait<0>();
          settle(grads);
        }
      }
      make_across();
      {
        float taken[8][4];
        each_place([&](int n, int e, int, int) { taken[n][e] = k_here[32 * d0 + 256 * n + across[e]] * grads[n][e]; });
        fold_rows(taken, low, high);
        if (tig == 0) sh.taken[part][i0] = low, sh.taken[part][i0 + 8] = high;
      }
    } else {
      each_place([&](int n, int e, int, int) { grads[n][e] = 0.0f; });
    }
    settle(grads);
    sm90::wgmma_begin();
    {
      // By the state; then by keys. order: the columns, and then the rows, ascending
      uint64_t left = operand_of<kChunk>(of_columns ? sh.by_k() : sh.by_q(), 0, 0), right = operand_of<kDepth>(sh.s, d0, 0);
#pragma unroll 1
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int k = 0; k < 32; k += 8) wide_product(grads, behind<kChunk>(left, k), behind<kDepth>(right, k));
        left += sizeof(Panel<kChunk>) / 16, right += sizeof(Panel<kDepth>) / 16;
        if (n == 1) left = operand_of<kChunk>(of_columns ? sh.dkk() : sh.dqk(), 0, 0), right = operand_of<kDepth>(sh.k_across, d0, 0);
      }
    }
    sm90::wgmma_commit();
    if (of_columns) {
      // The same across, and those with queries
      const float* from = &sh.dkk()[warp % 4 / 2][0][0];
      uint64_t right = operand_of<kDepth>(sh.k_across, d0, 0);
#pragma unroll 1
      for (int p = 0; p < 4; ++p) {
        float a[4][4];
#pragma unroll
        for (int n = 0; n < 4; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) a[n][e] = from[256 * n + across[e]];
        settle(a);
        sm90::wgmma_begin();
#pragma unroll
        for (int n = 0; n < 4; ++n) wide_product(grads, a[n], behind<kDepth>(right, 8 * n));
        sm90::wgmma_commit();
        from += 1024, right += sizeof(Panel<kDepth>) / 16;
        if (p == 1) from = &sh.dqk()[warp % 4 / 2][0][0], right = operand_of<kDepth>(sh.q_across, d0, 0);
        sm90::wgmma_wait<0>();
        settle(grads);
      }
    } else {
      const float of_column = fold_chunk([&](int i) { return sh.between[i * 72 + thread % 256 / 4]; });
      if (thread % 4 == 0) sh.columns[thread % 256 / 4] = of_column;
      if (part == 0) {
        fold_both(mine, sh.handed[2][thread % 128], low, high);
        if (tig == 0) sh.sums[i0] = low, sh.sums[i0 + 8] = high;
      }
      sm90::wgmma_wait<0>();
      settle(grads);
    }
    each_place([&](int n, int e, int, int) { sum[n][e] = sum[n][e] + grads[n][e]; });
    states_at += step_of(plane), rows_at += step_of(args.dv_size), values_at += step_of(args.v_head);
    one += ends, split = ends ? 0 : split + 1;
    __syncthreads();
  }

  make_across();
  // What the norms leave of them: of each row, n (n dk) less, over both halves of the dims.
  const float* const r = of_columns ? sh.r_k : sh.r_q;
  const float* const x = (of_columns ? k_here : q_here) + 32 * d0;
  float n_sum[2] = {0.0f, 0.0f};
  if (args.l2norm) {
    auto& handed = reinterpret_cast<Handed&>(of_columns ? sh.s : sh.ds);
    float* const sums = sh.taken[of_columns ? 0 : 1];
    float m[8][4];
    each_place([&](int n, int e, int i, int) { m[n][e] = (x[256 * n + across[e]] * r[i]) * sum[n][e]; });
    if (part) hand(handed, m);
    __syncthreads();
    if (!part) {
      float other[8][4];
      take(other, handed);
      each_place([&](int n, int e, int, int) { m[n][e] = m[n][e] + other[n][e]; });
      fold_rows(m, n_sum[0], n_sum[1]);
      if (tig == 0) sums[i0] = n_sum[0], sums[i0 + 8] = n_sum[1];
    }
    __syncthreads();
    n_sum[0] = sums[i0], n_sum[1] = sums[i0 + 8];
  }
  T* const out = static_cast<T*>(of_columns ? args.dk : args.dq);
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    const int i = i0 + 8 * m;
    if (i >= last) continue;
    T* const to = out + (int64_t(row + i) * args.hk + hk) * kDepth + d0 + 2 * tig;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      T two[2];
#pragma unroll
      for (int e2 = 0; e2 < 2; ++e2) {
        float value = sum[n][2 * m + e2];
        if (args.l2norm) value = value - (x[256 * n + across[2 * m + e2]] * r[i]) * n_sum[m];
        narrow(two[e2], value);
      }
      *reinterpret_cast<uint32_t*>(to + 8 * n) = *reinterpret_cast<uint32_t*>(two);
    }
  }
#endif
}

}  // namespace delta
}  // namespace vx
