// Sixteen fp32 lanes with the same bits on every instruction set.
//
// A cpu_kernels.cpp is compiled once per instruction set (VEXACT_ISA = scalar | avx2 | avx512) against this one
// interface. Every operation is correctly rounded per lane, or built from such operations in a fixed order, so the
// lanes hold the same bits whether one zmm, two ymm or sixteen scalars carry them. Reductions over lanes use one
// fixed tree. There is no torch header here and none may be included by a kernel.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(VEXACT_ISA_AVX2) || defined(VEXACT_ISA_AVX512)
#include <immintrin.h>
#endif

#ifndef VEXACT_ISA
#error "vec.h belongs to cpu_kernels.cpp, which is compiled once per instruction set"
#endif

#include "common/dtype.h"

namespace vx::VEXACT_ISA {

#define VX_INLINE inline __attribute__((always_inline))

constexpr int kLanes = 16;

#if defined(VEXACT_ISA_AVX512)

struct F16 {
  __m512 v;
};
struct I16 {
  __m512i v;
};
struct Mask {
  __mmask16 v;
};

VX_INLINE __mmask16 first_lanes(int n) { return n >= 16 ? __mmask16(0xffff) : __mmask16((1u << n) - 1); }

VX_INLINE F16 set1(float x) { return {_mm512_set1_ps(x)}; }
VX_INLINE F16 load(const float* p) { return {_mm512_loadu_ps(p)}; }
VX_INLINE F16 load(const float* p, int n) { return {_mm512_maskz_loadu_ps(first_lanes(n), p)}; }
VX_INLINE void store(float* p, F16 a) { _mm512_storeu_ps(p, a.v); }
VX_INLINE void store(float* p, F16 a, int n) { _mm512_mask_storeu_ps(p, first_lanes(n), a.v); }
VX_INLINE F16 widen(__m256i h) { return {_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16))}; }
VX_INLINE F16 load(const bf16* p) { return widen(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))); }
VX_INLINE F16 load(const bf16* p, int n) { return widen(_mm256_maskz_loadu_epi16(first_lanes(n), p)); }
VX_INLINE __m256i narrow(F16 a) {
  __m512i u = _mm512_castps_si512(a.v);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
  __m512i r = _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd), 16);
  __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(r, nan, _mm512_set1_epi32(0x7fc0)));
}
VX_INLINE void store(bf16* p, F16 a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(a)); }
VX_INLINE void store(bf16* p, F16 a, int n) { _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(a)); }

VX_INLINE F16 operator+(F16 a, F16 b) { return {_mm512_add_ps(a.v, b.v)}; }
VX_INLINE F16 operator-(F16 a, F16 b) { return {_mm512_sub_ps(a.v, b.v)}; }
VX_INLINE F16 operator*(F16 a, F16 b) { return {_mm512_mul_ps(a.v, b.v)}; }
VX_INLINE F16 operator/(F16 a, F16 b) { return {_mm512_div_ps(a.v, b.v)}; }
VX_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
VX_INLINE F16 sqrt(F16 a) { return {_mm512_sqrt_ps(a.v)}; }
VX_INLINE Mask operator>(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ)}; }
VX_INLINE Mask operator<(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_LT_OQ)}; }
VX_INLINE Mask is_nan(F16 a) { return {_mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q)}; }
VX_INLINE Mask lanes_below(int n) { return {n <= 0 ? __mmask16(0) : first_lanes(n)}; }
VX_INLINE F16 select(Mask m, F16 yes, F16 no) { return {_mm512_mask_blend_ps(m.v, no.v, yes.v)}; }
VX_INLINE bool any(Mask m) { return m.v != 0; }
VX_INLINE Mask operator==(F16 a, F16 b) { return {_mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ)}; }
VX_INLINE Mask operator&(Mask a, Mask b) { return {__mmask16(a.v & b.v)}; }
VX_INLINE Mask operator|(Mask a, Mask b) { return {__mmask16(a.v | b.v)}; }
VX_INLINE uint32_t mask_bits(Mask m) { return m.v; }
VX_INLINE I16 bits(F16 a) { return {_mm512_castps_si512(a.v)}; }
VX_INLINE F16 from_bits(I16 a) { return {_mm512_castsi512_ps(a.v)}; }
VX_INLINE I16 iset1(int32_t x) { return {_mm512_set1_epi32(x)}; }
VX_INLINE I16 operator+(I16 a, I16 b) { return {_mm512_add_epi32(a.v, b.v)}; }
VX_INLINE I16 operator-(I16 a, I16 b) { return {_mm512_sub_epi32(a.v, b.v)}; }
VX_INLINE I16 operator&(I16 a, I16 b) { return {_mm512_and_si512(a.v, b.v)}; }
VX_INLINE I16 operator|(I16 a, I16 b) { return {_mm512_or_si512(a.v, b.v)}; }
VX_INLINE I16 shift_left(I16 a, int n) { return {_mm512_sll_epi32(a.v, _mm_cvtsi32_si128(n))}; }
VX_INLINE I16 shift_right(I16 a, int n) { return {_mm512_sra_epi32(a.v, _mm_cvtsi32_si128(n))}; }  // arithmetic
VX_INLINE I16 operator^(I16 a, I16 b) { return {_mm512_xor_si512(a.v, b.v)}; }
VX_INLINE I16 shift_right_logical(I16 a, int n) { return {_mm512_srl_epi32(a.v, _mm_cvtsi32_si128(n))}; }
VX_INLINE I16 mul_low(I16 a, I16 b) { return {_mm512_mullo_epi32(a.v, b.v)}; }
VX_INLINE I16 mul_high(I16 a, I16 b) {  // unsigned
  __m512i even = _mm512_srli_epi64(_mm512_mul_epu32(a.v, b.v), 32);
  __m512i odd = _mm512_mul_epu32(_mm512_srli_epi64(a.v, 32), _mm512_srli_epi64(b.v, 32));
  return {_mm512_mask_mov_epi32(even, __mmask16(0xaaaa), odd)};
}
VX_INLINE I16 lane_numbers() { return {_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)}; }
VX_INLINE I16 to_int(F16 a) { return {_mm512_cvttps_epi32(a.v)}; }
VX_INLINE F16 to_float(I16 a) { return {_mm512_cvtepi32_ps(a.v)}; }

#elif defined(VEXACT_ISA_AVX2)

struct F16 {
  __m256 lo, hi;
};
struct I16 {
  __m256i lo, hi;
};
struct Mask {
  __m256 lo, hi;
};

VX_INLINE __m256i ymm_lanes(int n) {  // all ones in the first n of 8 lanes, for any n
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(n), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
VX_INLINE F16 set1(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
VX_INLINE F16 load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
VX_INLINE F16 load(const float* p, int n) {
  return {_mm256_maskload_ps(p, ymm_lanes(n)), _mm256_maskload_ps(p + 8, ymm_lanes(n - 8))};
}
VX_INLINE void store(float* p, F16 a) {
  _mm256_storeu_ps(p, a.lo);
  _mm256_storeu_ps(p + 8, a.hi);
}
VX_INLINE void store(float* p, F16 a, int n) {
  _mm256_maskstore_ps(p, ymm_lanes(n), a.lo);
  _mm256_maskstore_ps(p + 8, ymm_lanes(n - 8), a.hi);
}
VX_INLINE __m256 widen(__m128i h) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16)); }
VX_INLINE F16 load(const bf16* p) {
  const __m128i* q = reinterpret_cast<const __m128i*>(p);
  return {widen(_mm_loadu_si128(q)), widen(_mm_loadu_si128(q + 1))};
}
VX_INLINE F16 load(const bf16* p, int n) {
  alignas(32) bf16 full[16] = {};
  std::memcpy(full, p, (n < 16 ? n : 16) * sizeof(bf16));
  return load(full);
}
VX_INLINE __m128i narrow(__m256 a) {
  __m256i u = _mm256_castps_si256(a);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), _mm256_set1_epi32(1));
  __m256i r = _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(0x7fff)), odd), 16);
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
  r = _mm256_blendv_epi8(r, _mm256_set1_epi32(0x7fc0), nan);
  return _mm_packus_epi32(_mm256_castsi256_si128(r), _mm256_extracti128_si256(r, 1));
}
VX_INLINE void store(bf16* p, F16 a) {
  __m128i* q = reinterpret_cast<__m128i*>(p);
  _mm_storeu_si128(q, narrow(a.lo));
  _mm_storeu_si128(q + 1, narrow(a.hi));
}
VX_INLINE void store(bf16* p, F16 a, int n) {
  alignas(32) bf16 full[16];
  store(full, a);
  std::memcpy(p, full, (n < 16 ? n : 16) * sizeof(bf16));
}

#define VX_LANEWISE(name, op) \
  VX_INLINE F16 name(F16 a, F16 b) { return {op(a.lo, b.lo), op(a.hi, b.hi)}; }
VX_LANEWISE(operator+, _mm256_add_ps)
VX_LANEWISE(operator-, _mm256_sub_ps)
VX_LANEWISE(operator*, _mm256_mul_ps)
VX_LANEWISE(operator/, _mm256_div_ps)
#undef VX_LANEWISE
VX_INLINE F16 fma(F16 a, F16 b, F16 c) { return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)}; }
VX_INLINE F16 sqrt(F16 a) { return {_mm256_sqrt_ps(a.lo), _mm256_sqrt_ps(a.hi)}; }
VX_INLINE Mask operator>(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_GT_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_GT_OQ)};
}
VX_INLINE Mask operator<(F16 a, F16 b) { return b > a; }
VX_INLINE Mask is_nan(F16 a) {
  return {_mm256_cmp_ps(a.lo, a.lo, _CMP_UNORD_Q), _mm256_cmp_ps(a.hi, a.hi, _CMP_UNORD_Q)};
}
VX_INLINE Mask lanes_below(int n) { return {_mm256_castsi256_ps(ymm_lanes(n)), _mm256_castsi256_ps(ymm_lanes(n - 8))}; }
VX_INLINE F16 select(Mask m, F16 yes, F16 no) {
  return {_mm256_blendv_ps(no.lo, yes.lo, m.lo), _mm256_blendv_ps(no.hi, yes.hi, m.hi)};
}
VX_INLINE Mask operator==(F16 a, F16 b) {
  return {_mm256_cmp_ps(a.lo, b.lo, _CMP_EQ_OQ), _mm256_cmp_ps(a.hi, b.hi, _CMP_EQ_OQ)};
}
VX_INLINE Mask operator&(Mask a, Mask b) { return {_mm256_and_ps(a.lo, b.lo), _mm256_and_ps(a.hi, b.hi)}; }
VX_INLINE Mask operator|(Mask a, Mask b) { return {_mm256_or_ps(a.lo, b.lo), _mm256_or_ps(a.hi, b.hi)}; }
VX_INLINE uint32_t mask_bits(Mask m) { return uint32_t(_mm256_movemask_ps(m.lo)) | uint32_t(_mm256_movemask_ps(m.hi)) << 8; }
VX_INLINE bool any(Mask m) { return mask_bits(m) != 0; }
VX_INLINE I16 bits(F16 a) { return {_mm256_castps_si256(a.lo), _mm256_castps_si256(a.hi)}; }
VX_INLINE F16 from_bits(I16 a) { return {_mm256_castsi256_ps(a.lo), _mm256_castsi256_ps(a.hi)}; }
VX_INLINE I16 iset1(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
VX_INLINE I16 operator+(I16 a, I16 b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
VX_INLINE I16 operator-(I16 a, I16 b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
VX_INLINE I16 operator&(I16 a, I16 b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
VX_INLINE I16 operator|(I16 a, I16 b) { return {_mm256_or_si256(a.lo, b.lo), _mm256_or_si256(a.hi, b.hi)}; }
VX_INLINE I16 shift_left(I16 a, int n) {
  return {_mm256_sll_epi32(a.lo, _mm_cvtsi32_si128(n)), _mm256_sll_epi32(a.hi, _mm_cvtsi32_si128(n))};
}
VX_INLINE I16 shift_right(I16 a, int n) {
  return {_mm256_sra_epi32(a.lo, _mm_cvtsi32_si128(n)), _mm256_sra_epi32(a.hi, _mm_cvtsi32_si128(n))};
}
VX_INLINE I16 operator^(I16 a, I16 b) { return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)}; }
VX_INLINE I16 shift_right_logical(I16 a, int n) {
  return {_mm256_srl_epi32(a.lo, _mm_cvtsi32_si128(n)), _mm256_srl_epi32(a.hi, _mm_cvtsi32_si128(n))};
}
VX_INLINE I16 mul_low(I16 a, I16 b) { return {_mm256_mullo_epi32(a.lo, b.lo), _mm256_mullo_epi32(a.hi, b.hi)}; }
VX_INLINE __m256i mul_high(__m256i a, __m256i b) {
  __m256i even = _mm256_srli_epi64(_mm256_mul_epu32(a, b), 32);
  return _mm256_blend_epi32(even, _mm256_mul_epu32(_mm256_srli_epi64(a, 32), _mm256_srli_epi64(b, 32)), 0xaa);
}
VX_INLINE I16 mul_high(I16 a, I16 b) { return {mul_high(a.lo, b.lo), mul_high(a.hi, b.hi)}; }  // unsigned
VX_INLINE I16 lane_numbers() {
  return {_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15)};
}
VX_INLINE I16 to_int(F16 a) { return {_mm256_cvttps_epi32(a.lo), _mm256_cvttps_epi32(a.hi)}; }
VX_INLINE F16 to_float(I16 a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

#else  // scalar: the meaning of the two above, in plain C++

struct F16 {
  float v[16];
};
struct I16 {
  int32_t v[16];
};
struct Mask {
  bool v[16];
};

#define VX_EACH(type, expr)                   \
  {                                           \
    type r;                                   \
    for (int i = 0; i < 16; ++i) r.v[i] = expr; \
    return r;                                 \
  }
VX_INLINE F16 set1(float x) VX_EACH(F16, x)
VX_INLINE F16 load(const float* p) VX_EACH(F16, p[i])
VX_INLINE F16 load(const float* p, int n) VX_EACH(F16, i < n ? p[i] : 0.0f)
VX_INLINE F16 load(const bf16* p) VX_EACH(F16, to_f32(p[i]))
VX_INLINE F16 load(const bf16* p, int n) VX_EACH(F16, i < n ? to_f32(p[i]) : 0.0f)
VX_INLINE void store(float* p, F16 a, int n) {
  for (int i = 0; i < 16 && i < n; ++i) p[i] = a.v[i];
}
VX_INLINE void store(float* p, F16 a) { store(p, a, 16); }
VX_INLINE void store(bf16* p, F16 a, int n) {
  for (int i = 0; i < 16 && i < n; ++i) p[i] = from_f32<bf16>(a.v[i]);
}
VX_INLINE void store(bf16* p, F16 a) { store(p, a, 16); }
VX_INLINE F16 operator+(F16 a, F16 b) VX_EACH(F16, a.v[i] + b.v[i])
VX_INLINE F16 operator-(F16 a, F16 b) VX_EACH(F16, a.v[i] - b.v[i])
VX_INLINE F16 operator*(F16 a, F16 b) VX_EACH(F16, a.v[i] * b.v[i])
VX_INLINE F16 operator/(F16 a, F16 b) VX_EACH(F16, a.v[i] / b.v[i])
VX_INLINE F16 fma(F16 a, F16 b, F16 c) VX_EACH(F16, std::fma(a.v[i], b.v[i], c.v[i]))
VX_INLINE F16 sqrt(F16 a) VX_EACH(F16, std::sqrt(a.v[i]))
VX_INLINE Mask operator>(F16 a, F16 b) VX_EACH(Mask, a.v[i] > b.v[i])
VX_INLINE Mask operator<(F16 a, F16 b) VX_EACH(Mask, a.v[i] < b.v[i])
VX_INLINE Mask is_nan(F16 a) VX_EACH(Mask, a.v[i] != a.v[i])
VX_INLINE Mask lanes_below(int n) VX_EACH(Mask, i < n)
VX_INLINE F16 select(Mask m, F16 yes, F16 no) VX_EACH(F16, m.v[i] ? yes.v[i] : no.v[i])
VX_INLINE Mask operator==(F16 a, F16 b) VX_EACH(Mask, a.v[i] == b.v[i])
VX_INLINE Mask operator&(Mask a, Mask b) VX_EACH(Mask, a.v[i] && b.v[i])
VX_INLINE Mask operator|(Mask a, Mask b) VX_EACH(Mask, a.v[i] || b.v[i])
VX_INLINE uint32_t mask_bits(Mask m) {
  uint32_t r = 0;
  for (int i = 0; i < 16; ++i) r |= uint32_t(m.v[i]) << i;
  return r;
}
VX_INLINE bool any(Mask m) { return mask_bits(m) != 0; }
VX_INLINE I16 bits(F16 a) {
  I16 r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}
VX_INLINE F16 from_bits(I16 a) {
  F16 r;
  std::memcpy(&r, &a, sizeof r);
  return r;
}
VX_INLINE I16 iset1(int32_t x) VX_EACH(I16, x)
VX_INLINE I16 operator+(I16 a, I16 b) VX_EACH(I16, int32_t(uint32_t(a.v[i]) + uint32_t(b.v[i])))
VX_INLINE I16 operator-(I16 a, I16 b) VX_EACH(I16, int32_t(uint32_t(a.v[i]) - uint32_t(b.v[i])))
VX_INLINE I16 operator&(I16 a, I16 b) VX_EACH(I16, a.v[i] & b.v[i])
VX_INLINE I16 operator|(I16 a, I16 b) VX_EACH(I16, a.v[i] | b.v[i])
VX_INLINE I16 shift_left(I16 a, int n) VX_EACH(I16, int32_t(uint32_t(a.v[i]) << n))
VX_INLINE I16 shift_right(I16 a, int n) VX_EACH(I16, a.v[i] >> n)
VX_INLINE I16 operator^(I16 a, I16 b) VX_EACH(I16, a.v[i] ^ b.v[i])
VX_INLINE I16 shift_right_logical(I16 a, int n) VX_EACH(I16, int32_t(uint32_t(a.v[i]) >> n))
VX_INLINE I16 mul_low(I16 a, I16 b) VX_EACH(I16, int32_t(uint32_t(a.v[i]) * uint32_t(b.v[i])))
VX_INLINE I16 mul_high(I16 a, I16 b)  // unsigned
    VX_EACH(I16, int32_t(uint64_t(uint32_t(a.v[i])) * uint32_t(b.v[i]) >> 32))
VX_INLINE I16 lane_numbers() VX_EACH(I16, i)
VX_INLINE I16 to_int(F16 a) {  // out of range and NaN give INT_MIN, as the vector instructions do
  VX_EACH(I16, a.v[i] >= -2147483648.0f && a.v[i] < 2147483648.0f ? int32_t(a.v[i]) : INT32_MIN)
}
VX_INLINE F16 to_float(I16 a) VX_EACH(F16, float(a.v[i]))
#undef VX_EACH

#endif

// All lanes, or the first n where n, from 1, is fewer: whole registers take the unmasked instruction.
template <class T>
VX_INLINE F16 load_lanes(const T* p, int64_t n) {
  return n >= kLanes ? load(p) : load(p, int(n));
}
template <class T>
VX_INLINE void store_lanes(T* p, F16 a, int64_t n) {
  if (n >= kLanes)
    store(p, a);
  else
    store(p, a, int(n));
}
// f(start, lanes) for the 16-wide chunks of n elements, ascending; the last may be short.
template <class F>
VX_INLINE void for_chunks(int64_t n, F f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, int(n - i));
}

VX_INLINE F16 zero() { return set1(0.0f); }
VX_INLINE F16 abs(F16 a) { return from_bits(bits(a) & iset1(0x7fffffff)); }
VX_INLINE F16 neg(F16 a) { return from_bits(bits(a) + iset1(int32_t(0x80000000u))); }
VX_INLINE F16 copysign(F16 magnitude, F16 sign) {
  return from_bits((bits(magnitude) & iset1(0x7fffffff)) | (bits(sign) & iset1(int32_t(0x80000000u))));
}
// a > b ? a : b, so b where either is NaN. Keep a running maximum in b's place to let it survive a NaN on purpose.
VX_INLINE F16 max(F16 a, F16 b) { return select(a > b, a, b); }
VX_INLINE F16 min(F16 a, F16 b) { return select(a < b, a, b); }

// order: lanes are summed as a binary tree, halves first: i + (i + 8), then + 4, + 2, + 1.
// The maximum goes the same way: no rounding, so no order; NaN lanes are the caller's business.
#if defined(VEXACT_ISA_AVX512) || defined(VEXACT_ISA_AVX2)
VX_INLINE __m256 low_half(F16 a) {
#if defined(VEXACT_ISA_AVX512)
  return _mm512_castps512_ps256(a.v);
#else
  return a.lo;
#endif
}
VX_INLINE __m256 high_half(F16 a) {
#if defined(VEXACT_ISA_AVX512)
  return _mm512_extractf32x8_ps(a.v, 1);
#else
  return a.hi;
#endif
}
VX_INLINE float sum_lanes(F16 a) {
  __m256 t8 = _mm256_add_ps(low_half(a), high_half(a));
  __m128 t4 = _mm_add_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
  __m128 t2 = _mm_add_ps(t4, _mm_movehl_ps(t4, t4));
  return _mm_cvtss_f32(_mm_add_ss(t2, _mm_movehdup_ps(t2)));
}
VX_INLINE float max_lanes(F16 a) {
  __m256 t8 = _mm256_max_ps(low_half(a), high_half(a));
  __m128 t4 = _mm_max_ps(_mm256_castps256_ps128(t8), _mm256_extractf128_ps(t8, 1));
  __m128 t2 = _mm_max_ps(t4, _mm_movehl_ps(t4, t4));
  return _mm_cvtss_f32(_mm_max_ss(t2, _mm_movehdup_ps(t2)));
}
#else
VX_INLINE float sum_lanes(F16 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] + a.v[i + half];
  return a.v[0];
}
VX_INLINE float max_lanes(F16 a) {
  for (int half = 8; half; half /= 2)
    for (int i = 0; i < half; ++i) a.v[i] = a.v[i] > a.v[i + half] ? a.v[i] : a.v[i + half];
  return a.v[0];
}
#endif
VX_INLINE float first_lane(F16 a) {
  float t[16];
  store(t, a);
  return t[0];
}

// Sixteen rows of sixteen lanes, transposed in place: lane j of row i becomes lane i of row j.
#if defined(VEXACT_ISA_AVX512)
VX_INLINE void transpose(F16 (&r)[16]) {
  __m512 t[16];
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {  // 4x4 blocks inside each 128-bit lane
    const __m512d a = _mm512_castps_pd(_mm512_unpacklo_ps(r[i].v, r[i + 1].v));
    const __m512d b = _mm512_castps_pd(_mm512_unpackhi_ps(r[i].v, r[i + 1].v));
    const __m512d c = _mm512_castps_pd(_mm512_unpacklo_ps(r[i + 2].v, r[i + 3].v));
    const __m512d d = _mm512_castps_pd(_mm512_unpackhi_ps(r[i + 2].v, r[i + 3].v));
    t[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c)), t[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
    t[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d)), t[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // then the 128-bit lanes
    const __m512 a = _mm512_shuffle_f32x4(t[i], t[i + 4], 0x88), b = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0x88);
    const __m512 c = _mm512_shuffle_f32x4(t[i], t[i + 4], 0xdd), d = _mm512_shuffle_f32x4(t[i + 8], t[i + 12], 0xdd);
    r[i].v = _mm512_shuffle_f32x4(a, b, 0x88), r[i + 8].v = _mm512_shuffle_f32x4(a, b, 0xdd);
    r[i + 4].v = _mm512_shuffle_f32x4(c, d, 0x88), r[i + 12].v = _mm512_shuffle_f32x4(c, d, 0xdd);
  }
}
#elif defined(VEXACT_ISA_AVX2)
VX_INLINE void transpose8(__m256 (&r)[8]) {
  __m256 t[8];
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    const __m256d a = _mm256_castps_pd(_mm256_unpacklo_ps(r[i], r[i + 1]));
    const __m256d b = _mm256_castps_pd(_mm256_unpackhi_ps(r[i], r[i + 1]));
    const __m256d c = _mm256_castps_pd(_mm256_unpacklo_ps(r[i + 2], r[i + 3]));
    const __m256d d = _mm256_castps_pd(_mm256_unpackhi_ps(r[i + 2], r[i + 3]));
    t[i] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, c)), t[i + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, c));
    t[i + 2] = _mm256_castpd_ps(_mm256_unpacklo_pd(b, d)), t[i + 3] = _mm256_castpd_ps(_mm256_unpackhi_pd(b, d));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x20);
    r[i + 4] = _mm256_permute2f128_ps(t[i], t[i + 4], 0x31);
  }
}
VX_INLINE void transpose(F16 (&r)[16]) {
  __m256 a[8], b[8], c[8], d[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) a[i] = r[i].lo, b[i] = r[i].hi, c[i] = r[i + 8].lo, d[i] = r[i + 8].hi;
  transpose8(a), transpose8(b), transpose8(c), transpose8(d);
#pragma GCC unroll 8
  for (int i = 0; i < 8; ++i) r[i].lo = a[i], r[i].hi = c[i], r[i + 8].lo = b[i], r[i + 8].hi = d[i];
}
#else
VX_INLINE void transpose(F16 (&r)[16]) {
  for (int i = 0; i < 16; ++i)
    for (int j = 0; j < i; ++j) {
      const float t = r[i].v[j];
      r[i].v[j] = r[j].v[i], r[j].v[i] = t;
    }
}
#endif

// Round to the nearest integer, ties to even, for |x| < 2^22.
VX_INLINE F16 round_even(F16 x) { return (x + set1(12582912.0f)) - set1(12582912.0f); }

// e^x, within 2 ulp, full range with subnormals; exp(0) = 1, exp(-inf) = 0, exp(inf) = inf, NaN stays.
VX_INLINE F16 exp(F16 x) {
  F16 c = min(max(x, set1(-104.0f)), set1(89.0f));
  F16 n = round_even(c * set1(1.44269504f));
  F16 r = fma(n, set1(-0.693359375f), c);  // ln 2 in two parts; n times the first is exact
  r = fma(n, set1(2.12194440e-4f), r);
  F16 p = set1(1.0f / 5040);  // the Taylor series to r^7: its remainder is below 2^-27 for |r| <= ln(2) / 2
  p = fma(p, r, set1(1.0f / 720));
  p = fma(p, r, set1(1.0f / 120));
  p = fma(p, r, set1(1.0f / 24));
  p = fma(p, r, set1(1.0f / 6));
  p = fma(p, r, set1(0.5f));
  p = fma(p, r, set1(1.0f));
  p = fma(p, r, set1(1.0f));
  I16 i = to_int(n), half = shift_right(i, 1);  // 2^n in two factors, so that the ends of the range round once
  F16 s = from_bits(shift_left(half + iset1(127), 23)), t = from_bits(shift_left(i - half + iset1(127), 23));
  F16 y = (p * s) * t;
  y = select(set1(-103.972f) > x, zero(), y);
  y = select(x > set1(88.7228390f), set1(INFINITY), y);
  return select(is_nan(x), x, y);
}

// Natural logarithm, within 2 ulp; log(1) = 0, log(0) = -inf, log(<0) = NaN, log(inf) = inf.
VX_INLINE F16 log(F16 x) {
  Mask tiny = x < set1(1.17549435e-38f);
  F16 y = select(tiny, x * set1(8388608.0f), x);
  // m in [sqrt(1/2), sqrt(2)): the exponent is cut where the mantissa passes sqrt(1/2)
  I16 shifted = bits(y) - iset1(0x3f3504f3);
  F16 e = to_float(shift_right(shifted, 23)) - select(tiny, set1(23.0f), zero());
  F16 m = from_bits((shifted & iset1(0x007fffff)) + iset1(0x3f3504f3));
  F16 f = m - set1(1.0f);
  F16 s = f / (f + set1(2.0f)), z = s * s;  // log(1 + f) = 2 atanh(s)
  F16 p = set1(2.0f / 11);
  p = fma(p, z, set1(2.0f / 9));
  p = fma(p, z, set1(2.0f / 7));
  p = fma(p, z, set1(2.0f / 5));
  p = fma(p, z, set1(2.0f / 3));
  F16 h = f * f * set1(0.5f);
  F16 low = fma(s, fma(z, p, h), e * set1(-2.12194440e-4f));
  F16 r = fma(e, set1(0.693359375f), f - (h - low));
  r = select(x < zero(), set1(NAN), r);
  r = select(abs(x) > zero(), r, set1(-INFINITY));
  r = select(x > set1(3.40282347e38f), x, r);
  return select(is_nan(x), x, r);
}

// Hyperbolic tangent, within 3 ulp: a Pade quotient near zero, the exponential beyond.
VX_INLINE F16 tanh(F16 x) {
  F16 a = abs(x), z = x * x;
  F16 up = fma(fma(z, set1(1.0f), set1(105.0f)), z, set1(945.0f));
  F16 down = fma(fma(z, set1(15.0f), set1(420.0f)), z, set1(945.0f));
  F16 near = x * (up / down);
  F16 far = copysign(set1(1.0f) - set1(2.0f) / (exp(a + a) + set1(1.0f)), x);
  F16 y = select(set1(0.55f) > a, near, far);
  return select(is_nan(x), x, y);
}

VX_INLINE float exp(float x) { return first_lane(exp(set1(x))); }
VX_INLINE float log(float x) { return first_lane(log(set1(x))); }

}  // namespace vx::VEXACT_ISA
