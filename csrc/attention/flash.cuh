// Attention in the order of a flash kernel on tensor cores, equal bit for bit in training, prefill and decode; no torch
// headers.
//
// The order, for one row (a query head at one position), a function of absolute key positions alone:
// - a score is one fp32 accumulator over D, 16 at a time, ascending;
// - blocks of keys_of(D) keys, cut at multiples of it, are taken from the last that is seen to the first (order: descending);
// - the running maximum is that of the unscaled scores; a probability is exp2(fma(score, scale, -maximum * scale)),
//   with the hardware's exp2, rounded to the inputs' dtype for the product with the values;
// - four partial sums, of the keys that are 2t and 2t + 1 modulo 8, take a block's probabilities one by one, ascending;
// - the output is one fp32 accumulator over the keys of a block, 16 at a time, ascending, scaled down when the maximum
//   rises; it and the partial sums begin anew at each segment;
// - segments are joined from the last to the first (Join);
// - a sink, a score of the head that has no value behind it, joins the sum last (Final).
// Warps, tiles, pages, and how segments are dealt out have no part in it. Multiplications and additions are fused
// where the source says so and nowhere else (the build sets --fmad=false).
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

// Bodies are compiled for SM90 alone, whose bits are the ones that were compared; other GPUs take the Triton kernels.
#if !defined(__CUDA_ARCH__) || defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define VX_FLASH_DEVICE
#endif

namespace vx::flash {

// Keys of a block; half as many of wide heads, for shared memory to hold two blocks of keys and of values beside queries.
__host__ __device__ constexpr int keys_of(int d) { return d > 192 ? 64 : 128; }
constexpr float kLn2 = 0.693147182464599609375f;
constexpr float kLog2E = 1.44269502162933349609375f;

struct Args {
  const void *q, *k, *v;
  void* out;             // (tokens, Hq, DV)
  float* lse;            // (Hq, tokens), natural logarithm; null where nobody asks
  const float* sinks;    // (Hq,) natural logits; null where there are none
  const int32_t* q_at;   // (sequences + 1,)
  const int32_t* k_at;   // packed: (sequences + 1,); paged: (sequences,) lengths
  const int32_t* table;  // paged: (sequences, .); null where keys are packed
  float* partial;        // decode in segments: (sequences, segments, Hq, DV + 2)
  int32_t* ready;        // segments, where joining begins before all are done: warps that are done with each
  unsigned* counter;     // decode: 0, and 0 again afterwards, of the items that blocks take as they come; null: in turn
  const int32_t* wanted; // tiles: nothing is done where this is there and 0
  int64_t table_row, q_row, q_head, k_page, k_row, k_head, v_page, v_row, v_head;
  int tokens, keys, sequences, pages, page_size, hk, group, segments;
  int box;               // keys that one box of the copy engine brings
  int window, segment;   // in keys; 0 where there is none
  int causal, skip_single;  // skip_single: sequences with one query are someone else's
  int settled;           // decode: all that is read but queries and last keys was there before the kernel before began
  int queries;           // few rows: of a sequence, at most
  float scale;           // of scores, in base 2
};

__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float reciprocal(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float finite_or_zero(float m) { return m == -INFINITY ? 0.f : m; }

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

__device__ __forceinline__ void ldmatrix4(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void ldmatrix4_trans(uint32_t (&r)[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// order: c + a @ b for 16 of k. The tensor core's own sum of 16, the same in every instruction of this shape.
template <class T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

template <class T>
__device__ __forceinline__ uint32_t pack(float low, float high) {
  uint32_t y;
  if constexpr (std::is_same_v<T, __nv_bfloat16>)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(high), "f"(low));
  return y;
}

// Pairs of 16-bit values as bit patterns.
template <class T>
struct Pair {
  static constexpr uint32_t kInf = std::is_same_v<T, __nv_bfloat16> ? 0x7f80u : 0x7c00u;
  static constexpr uint32_t kOne = std::is_same_v<T, __nv_bfloat16> ? 0x3f80u : 0x3c00u;
  template <class F>
  static __device__ __forceinline__ uint32_t each(uint32_t x, F f) {
    return f(x & 0xffffu) | f(x >> 16) << 16;
  }
  static __device__ __forceinline__ bool nonfinite(uint32_t x) {
    return (x & kInf) == kInf || ((x >> 16) & kInf) == kInf;
  }
  static __device__ __forceinline__ uint32_t cleaned(uint32_t x) {
    return each(x, [](uint32_t h) { return (h & kInf) == kInf ? 0u : h; });
  }
  static __device__ __forceinline__ uint32_t equal(uint32_t x, uint32_t pattern) {
    return each(x, [=](uint32_t h) { return h == pattern ? kOne : 0u; });
  }
  static __device__ __forceinline__ uint32_t nan(uint32_t x) {
    return each(x, [](uint32_t h) { return (h & 0x7fffu) > kInf ? kOne : 0u; });
  }
  static __device__ __forceinline__ uint32_t not_finite(uint32_t x) {
    return each(x, [](uint32_t h) { return (h & kInf) == kInf ? kOne : 0u; });
  }
};

__device__ __forceinline__ void barrier_init(uint32_t bar, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(bar), "r"(count));
}
__device__ __forceinline__ void barrier_wait(uint32_t bar, uint32_t parity) {
  asm volatile(
      "{\n.reg .pred done;\nWAIT_%=:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra WAIT_%=;\n}" ::"r"(
          bar),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void barrier_expect(uint32_t bar, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
}
// A box of rows of one head of one page, 64 columns wide; zeros where the page is not in the cache.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap& map, int column, int row, int head, int page,
                                         uint32_t bar) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], [%6];" ::
          "r"(to),
      "l"(&map), "r"(column), "r"(row), "r"(head), "r"(page), "r"(bar)
      : "memory");
}
__device__ __forceinline__ void arrive_when_copied(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}
// 16 bytes to shared memory; zeros, and nothing read, where it is not wanted.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool wanted) {
  asm volatile("cp.async.cg.shared.global.L2::256B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0)
               : "memory");
}

// A block lies in shared memory as the copy engine puts it: 64 columns after another, rows of 128 bytes, whose 16-byte
// chunks are exchanged so that eight rows at one column are in eight different banks. Other widths: whole rows, likewise.
template <int WIDTH, int ROWS>
__device__ __forceinline__ int chunk_at(int row, int chunk) {
  constexpr int kChunks = WIDTH / 8;
  if constexpr (kChunks % 8 == 0) return ((chunk / 8 * ROWS + row) * 8 + ((chunk ^ row) & 7)) * 16;
  return (row * kChunks + (chunk ^ ((row >> 1) & 3))) * 16;
}

struct Extent {
  int begin, length;
};
__device__ __forceinline__ Extent extent(const int32_t* at, int sequence, int limit) {
  const int begin = min(max(at[sequence], 0), limit);
  return {begin, max(min(at[sequence + 1], limit) - begin, 0)};
}

// Where a key lies: its page and its place there; of packed keys, 0 and the row. -1 for a key that is not to be read.
__device__ __forceinline__ int2 locate(const Args& a, int sequence, int k_begin, int key, int lo, int hi) {
  if (key < lo || key >= hi) return {-1, 0};
  if (!a.table) return {0, k_begin + key};
  const int slot = key / a.page_size, page = a.table[sequence * a.table_row + slot];
  return {page < a.pages ? page : -1, key - slot * a.page_size};
}

// The keys of a block, or their values: rows of one head. A row that is not to be read becomes zeros.
template <int WIDTH, int KEYS, int THREADS>
__device__ __forceinline__ void load_block(uint32_t to, const void* base, int64_t page_step, int64_t row_step,
                                           const int2* places) {
  constexpr int kChunks = WIDTH / 8;
#pragma unroll 4
  for (int i = threadIdx.x; i < KEYS * kChunks; i += THREADS) {
    const int row = i / kChunks, chunk = i - row * kChunks;
    const int2 at = places[row];
    const int64_t from = max(at.x, 0) * page_step + at.y * row_step + chunk * 8;
    copy16(to + chunk_at<WIDTH, KEYS>(row, chunk), static_cast<const char*>(base) + from * 2, at.x >= 0);
  }
}

// order: a segment (m, l, acc) joins what lies behind it (M, L, Acc).
struct Join {
  float before, after;
  __device__ __forceinline__ Join(float before, float after) : before(before), after(after) {}
  __device__ __forceinline__ Join(float& top, float m, float scale) {
    const float high = fmaxf(top, m), base = finite_or_zero(high);
    before = exp2_fast(__fmul_rn(__fsub_rn(top, base), scale));
    after = exp2_fast(__fmul_rn(__fsub_rn(m, base), scale));
    top = high;
  }
  __device__ __forceinline__ float operator()(float total, float x) const {
    return __fmaf_rn(total, before, __fmul_rn(x, after));
  }
};

struct Final {
  float factor, lse;
  __device__ __forceinline__ Final(float m, float l, float scale) {
    const bool some = l != 0.f && l == l;
    factor = reciprocal(some ? l : 1.f);
    lse = some ? __fmul_rn(__fmaf_rn(scale, m, log2_fast(l)), kLn2) : -INFINITY;
  }
  // sinks: those of all heads, or null
  __device__ __forceinline__ Final(float m, float l, float scale, const float* sinks, int64_t head) : Final(m, l, scale) {
    if (!sinks) return;
    const float sink = sinks[head], score = __fmul_rn(sink, kLog2E);
    if (l == 0.f) lse = sink;
    if (l == 0.f || l != l) return;
    const float peak = __fmul_rn(scale, m), high = fmaxf(peak, score);
    const float kept = exp2_fast(__fsub_rn(peak, high));
    const float total = __fmaf_rn(l, kept, exp2_fast(__fsub_rn(score, high)));
    factor = __fmul_rn(kept, reciprocal(total));
    lse = __fmul_rn(__fadd_rn(high, log2_fast(total)), kLn2);
  }
  // + 0: whether a row met blocks that it does not see, which turn -0 into 0, must not show
  static __device__ __forceinline__ float apply(float acc, float factor) { return __fmul_rn(__fadd_rn(acc, 0.f), factor); }
  __device__ __forceinline__ float operator()(float acc) const { return apply(acc, factor); }
};

__device__ __forceinline__ float quad_sum(float l) {
  l = __fadd_rn(l, __shfl_xor_sync(0xffffffffu, l, 1));
  return __fadd_rn(l, __shfl_xor_sync(0xffffffffu, l, 2));
}

}  // namespace vx::flash
