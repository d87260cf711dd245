// The inner loops of attention: scores with keys in the lanes, sums over keys (or queries) with head dims in the lanes.
// Each output element has one fp32 accumulator and one order, so the shape of a tile never reaches its bits.
#pragma once
#include "attention/kernels.h"
#include "common/vec.h"

namespace vx::VEXACT_ISA {
namespace {

constexpr int kBlock = kAttentionBlock;
constexpr int kVectors = kBlock / kLanes;
constexpr int kTile = 6;  // rows held in registers together
#if defined(VEXACT_ISA_AVX512)
constexpr int kPanel = 4;  // vectors beside them: 24 accumulators of 32 registers
#else
constexpr int kPanel = 1;  // 12 accumulators of 16 registers
#endif

inline int64_t padded(int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

template <class T>
VX_INLINE void widen_row(const T* from, int64_t n, float* to) {  // to fp32, zeros up to the next multiple of 16
  for (int64_t i = 0; i < n; i += kLanes) store(to + i, load_lanes(from + i, n - i));
}

// The half-open range of one row's visible partners inside a tile.
struct Span {
  int begin, end;
  bool empty() const { return begin >= end; }
};

// x[rows][n] by t[n][kBlock] -> s[rows][kBlock], vectors first..first+NV only.
template <int MR, int NV>
VX_INLINE void scores_panel(const float* x, int64_t stride, const float* t, int64_t n, float* s) {
  F16 acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = zero();
  const float* row[MR];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) row[r] = x + r * stride;
  for (int64_t i = 0; i < n; ++i) {  // order: the head dimension ascending, one fused multiply-add each
    F16 keys[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) keys[v] = load(t + i * kBlock + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const F16 value = set1(row[r][i]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = fma(value, keys[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(s + r * kBlock + v * kLanes, acc[r][v]);
}

template <int MR>
void scores_rows(const float* x, int64_t stride, const float* t, int64_t n, float* s, int first, int last) {
  int v = first;
  if constexpr (kPanel == 4)
    if (v == 0 && last == 4) return scores_panel<MR, 4>(x, stride, t, n, s);
  for (; v < last; ++v) scores_panel<MR, 1>(x, stride, t + v * kLanes, n, s + v * kLanes);
}

#define VX_BY_ROWS(mr, call)   \
  switch (mr) {                \
    case 1: call(1); break;    \
    case 2: call(2); break;    \
    case 3: call(3); break;    \
    case 4: call(4); break;    \
    case 5: call(5); break;    \
    default: call(6); break;   \
  }

// Vectors first..last of the scores of mr rows.
inline void scores(int mr, const float* x, int64_t stride, const float* t, int64_t n, float* s, int first, int last) {
#define VX_SCORES(MR) scores_rows<MR>(x, stride, t, n, s, first, last)
  VX_BY_ROWS(mr, VX_SCORES)
#undef VX_SCORES
}

// c[r] = c[r] * factor[r] + sum over i in [begin, end) of a[r * SR + i * SI] * b[i]
template <int MR, int NV, int SR, int SI, class T>
VX_INLINE void accumulate_panel(float* c, int64_t stride, const float* factor, const float* a, const T* const* b,
                                int64_t column, int begin, int end) {
  F16 acc[MR][NV];
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r) {
    const F16 f = set1(factor[r]);
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) acc[r][v] = load(c + r * stride + column + v * kLanes) * f;
  }
  for (int i = begin; i < end; ++i) {  // order: keys (or queries) ascending, one fused multiply-add each
    const T* row = b[i] + column;
    F16 values[NV];
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) values[v] = load(row + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < MR; ++r) {
      const F16 weight = set1(a[r * SR + i * SI]);
#pragma GCC unroll 4
      for (int v = 0; v < NV; ++v) acc[r][v] = fma(weight, values[v], acc[r][v]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < MR; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < NV; ++v) store(c + r * stride + column + v * kLanes, acc[r][v]);
}

template <int MR, int SR, int SI, class T>
void accumulate_range(float* c, int64_t stride, const float* factor, const float* a, const T* const* b, int begin,
                      int end) {
  int64_t column = 0;
  if constexpr (kPanel == 4) {
    for (; column + 4 * kLanes <= stride; column += 4 * kLanes)
      accumulate_panel<MR, 4, SR, SI>(c, stride, factor, a, b, column, begin, end);
    if (column + 2 * kLanes <= stride) {
      accumulate_panel<MR, 2, SR, SI>(c, stride, factor, a, b, column, begin, end);
      column += 2 * kLanes;
    }
  }
  for (; column < stride; column += kLanes)
    accumulate_panel<MR, 1, SR, SI>(c, stride, factor, a, b, column, begin, end);
}

// The same for mr rows that each have their own range of i; what lies outside a row's range never touches it, whatever
// it holds. stride is c's row length, a multiple of 16, and the length of every b[i]. Resets factor.
template <int SR, int SI, class T>
void accumulate(int mr, float* c, int64_t stride, float* factor, const float* a, const T* const* b, const Span* span) {
  int begin = span[0].begin, end = span[0].end;
  for (int r = 1; r < mr; ++r) {
    begin = span[r].begin > begin ? span[r].begin : begin;
    end = span[r].end < end ? span[r].end : end;
  }
  if (begin >= end) {
    for (int r = 0; r < mr; ++r)
      if (!span[r].empty())
        accumulate_range<1, SR, SI>(c + r * stride, stride, factor + r, a + r * SR, b, span[r].begin, span[r].end);
    return;
  }
  const float one = 1.0f;
  for (int r = 0; r < mr; ++r)
    if (span[r].begin < begin) {
      accumulate_range<1, SR, SI>(c + r * stride, stride, factor + r, a + r * SR, b, span[r].begin, begin);
      factor[r] = 1.0f;
    }
#define VX_ACCUMULATE(MR) accumulate_range<MR, SR, SI>(c, stride, factor, a, b, begin, end)
  VX_BY_ROWS(mr, VX_ACCUMULATE)
#undef VX_ACCUMULATE
  for (int r = 0; r < mr; ++r)
    if (span[r].end > end)
      accumulate_range<1, SR, SI>(c + r * stride, stride, &one, a + r * SR, b, end, span[r].end);
}

// rows[begin..end) of n elements each -> t[n][kBlock], row i in lane i, in fp32; only vectors that hold a row are
// written, zeros in their other lanes.
template <class T>
void pack_transposed(const T* const* rows, Span lanes, int64_t n, float* t) {
  for (int group = lanes.begin / kLanes * kLanes; group < lanes.end; group += kLanes) {
    const bool whole = group >= lanes.begin && group + kLanes <= lanes.end;
    for (int64_t i = 0; i < n; i += kLanes) {
      F16 r[16];
      if (whole && n - i >= kLanes) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) r[j] = load(rows[group + j] + i);
      } else {
        for (int j = 0; j < 16; ++j) {
          const int lane = group + j;
          r[j] = lane < lanes.begin || lane >= lanes.end ? zero() : load_lanes(rows[lane] + i, n - i);
        }
      }
      transpose(r);
      if (n - i >= kLanes) {
#pragma GCC unroll 16
        for (int j = 0; j < 16; ++j) store(t + (i + j) * kBlock + group, r[j]);
      } else {
        for (int j = 0; j < n - i; ++j) store(t + (i + j) * kBlock + group, r[j]);
      }
    }
  }
}

}  // namespace
}  // namespace vx::VEXACT_ISA
