// Sixteen lanes of a strided operand, k after k: the transposition that lets lanes be outputs and keeps k sequential.
// Included by cpu_kernels.cpp only.
#pragma once
#include "common/vec.h"

namespace vx::VEXACT_ISA {

// Rows are read as 32-bit words (one float, or two bf16), kWords words of sixteen rows at a time.
#if defined(VEXACT_ISA_AVX512)

constexpr int kWords = 8;

// Four rows' words are one 4x4 transposition in each 128-bit lane.
VX_INLINE void transpose_lanes(__m512 r0, __m512 r1, __m512 r2, __m512 r3, __m512* out) {
  const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r0, r1)), b = _mm512_castps_pd(_mm512_unpackhi_ps(r0, r1));
  const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r2, r3)), d = _mm512_castps_pd(_mm512_unpackhi_ps(r2, r3));
  out[0] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
  out[1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
  out[2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
  out[3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
}

// at(i) is the address of row i's words. Loads of half registers do the work of a third of the shuffles.
template <class At>
VX_INLINE void words_of_rows(At at, F16 (&out)[8]) {
  auto pair = [&](int i, int j) {
    const __m256i low = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(i)));
    const __m256i high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(at(j)));
    return _mm512_castsi512_ps(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));
  };
  __m512 half[2][4];  // [rows 0..7 | rows 8..15][word j and j + 4]: 128-bit lanes are (rows 0..3, word j), (.., j + 4)
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h)
    transpose_lanes(pair(8 * h, 8 * h + 4), pair(8 * h + 1, 8 * h + 5), pair(8 * h + 2, 8 * h + 6),
                    pair(8 * h + 3, 8 * h + 7), half[h]);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    out[j] = {_mm512_shuffle_f32x4(half[0][j], half[1][j], 0x88)};
    out[j + 4] = {_mm512_shuffle_f32x4(half[0][j], half[1][j], 0xdd)};
  }
}

// The same for whole lines: more shuffles, but each line is read once. Rows a multiple of 4 KB apart share a cache set,
// which holds eight lines, and every second read of half a line would miss.
template <class At>
VX_INLINE void words_of_rows(At at, F16 (&out)[16]) {
  __m512 part[4][4];  // [rows 4 i .. 4 i + 3][j]: 128-bit lanes are words j, 4 + j, 8 + j, 12 + j
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i)
    transpose_lanes(_mm512_loadu_ps(at(4 * i)), _mm512_loadu_ps(at(4 * i + 1)), _mm512_loadu_ps(at(4 * i + 2)),
                    _mm512_loadu_ps(at(4 * i + 3)), part[i]);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m512 a = _mm512_shuffle_f32x4(part[0][j], part[1][j], 0x88);
    const __m512 b = _mm512_shuffle_f32x4(part[0][j], part[1][j], 0xdd);
    const __m512 c = _mm512_shuffle_f32x4(part[2][j], part[3][j], 0x88);
    const __m512 d = _mm512_shuffle_f32x4(part[2][j], part[3][j], 0xdd);
    out[j] = {_mm512_shuffle_f32x4(a, c, 0x88)};
    out[j + 4] = {_mm512_shuffle_f32x4(b, d, 0x88)};
    out[j + 8] = {_mm512_shuffle_f32x4(a, c, 0xdd)};
    out[j + 12] = {_mm512_shuffle_f32x4(b, d, 0xdd)};
  }
}

VX_INLINE F16 low_bf16(F16 words) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(words.v), 16))}; }

#elif defined(VEXACT_ISA_AVX2)

constexpr int kWords = 4;

template <class At>
VX_INLINE void words_of_rows(At at, F16 (&out)[kWords]) {
  auto pair = [&](int i, int j) {
    const __m128 low = _mm_loadu_ps(reinterpret_cast<const float*>(at(i)));
    return _mm256_insertf128_ps(_mm256_castps128_ps256(low), _mm_loadu_ps(reinterpret_cast<const float*>(at(j))), 1);
  };
  auto eight = [&](int i, __m256(&o)[4]) {
    const __m256 r0 = pair(i, i + 4), r1 = pair(i + 1, i + 5), r2 = pair(i + 2, i + 6), r3 = pair(i + 3, i + 7);
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r0, r1)), b = _mm256_castps_pd(_mm256_unpackhi_ps(r0, r1));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(r2, r3)), d = _mm256_castps_pd(_mm256_unpackhi_ps(r2, r3));
    o[0] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c));
    o[1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    o[2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d));
    o[3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  };
  __m256 low[4], high[4];
  eight(0, low);
  eight(8, high);
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) out[j] = {low[j], high[j]};
}

VX_INLINE F16 low_bf16(F16 words) {
  return {_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words.lo), 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(words.hi), 16))};
}

#else

constexpr int kWords = 1;

template <class At>
VX_INLINE void words_of_rows(At at, F16 (&out)[kWords]) {
  for (int i = 0; i < 16; ++i) std::memcpy(&out[0].v[i], at(i), 4);
}

VX_INLINE F16 low_bf16(F16 words) { return from_bits(shift_left(bits(words), 16)); }

#endif

VX_INLINE F16 high_bf16(F16 words) { return from_bits(bits(words) & iset1(int32_t(0xffff0000u))); }

template <class T, int kW = kWords>
constexpr int kStep = kW * 4 / int(sizeof(T));  // how many k one transposition of kW words gives

// out[s] holds element s of sixteen rows, for s < kStep.
template <class T, int kW = kWords, class At>
VX_INLINE void steps_of_rows(At at, F16 (&out)[kStep<T, kW>]) {
  if constexpr (sizeof(T) == 4) {
    words_of_rows(at, out);
  } else {
    F16 words[kW];
    words_of_rows(at, words);
#pragma GCC unroll 16
    for (int j = 0; j < kW; ++j) {
      out[2 * j] = low_bf16(words[j]);
      out[2 * j + 1] = high_bf16(words[j]);
    }
  }
}

// The last `count` (below kStep) elements of each row, without reading past them.
template <class T, int kW = kWords, class At>
inline void last_steps_of_rows(At at, int count, F16 (&out)[kStep<T, kW>]) {
  alignas(64) char tail[16][kW * 4] = {};
  for (int i = 0; i < 16; ++i) std::memcpy(tail[i], at(i), count * sizeof(T));
  steps_of_rows<T, kW>([&](int i) { return &tail[i][0]; }, out);
}

// Lane l of step p of an operand is data[l * lane_stride + p * k_stride]. Writes k steps of sixteen fp32 lanes, `every`
// floats apart; lanes from `lanes` on hold anything. With every < 16 the steps overlap and 16 - every floats follow.
template <class T>
void pack(const T* data, int64_t lane_stride, int64_t k_stride, int lanes, int64_t k, float* out, int64_t every) {
  if (k_stride == 1 && lanes == 1 && every == 1) {
    for (int64_t p = 0; p < k; p += 16) store(out + p, k - p < 16 ? load(data + p, int(k - p)) : load(data + p));
  } else if (k_stride == 1) {
    const char* rows[16];
    for (int i = 0; i < 16; ++i)
      rows[i] = reinterpret_cast<const char*>(data + (i < lanes ? i : lanes - 1) * lane_stride);
    F16 steps[kStep<T>];
    int64_t p = 0;
    for (; p + kStep<T> <= k; p += kStep<T>) {
      steps_of_rows<T>([&](int i) { return rows[i] + p * int64_t(sizeof(T)); }, steps);
#pragma GCC unroll 16
      for (int s = 0; s < kStep<T>; ++s) store(out + (p + s) * every, steps[s]);
    }
    if (p < k) {
      last_steps_of_rows<T>([&](int i) { return rows[i] + p * int64_t(sizeof(T)); }, int(k - p), steps);
      for (int s = 0; s < k - p; ++s) store(out + (p + s) * every, steps[s]);
    }
  } else if (lane_stride == 1) {
    if (lanes == 16)
      for (int64_t p = 0; p < k; ++p) store(out + p * every, load(data + p * k_stride));
    else
      for (int64_t p = 0; p < k; ++p) store(out + p * every, load(data + p * k_stride, lanes));
  } else {
    for (int64_t p = 0; p < k; ++p)
      for (int l = 0; l < lanes; ++l) out[p * every + l] = to_f32(data[l * lane_stride + p * k_stride]);
  }
}

}  // namespace vx::VEXACT_ISA
