// wgmma for tiles whose rows come in units of 16: one instruction for each number of units.
#pragma once
#include "linear/sm90_gemm.cuh"

namespace vx::sm90 {

constexpr int kUnit = 16;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// clang-format off
#define VX_D8(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7])
#define VX_D16(i) VX_D8(i), VX_D8(i + 8)
#define VX_D32(i) VX_D16(i), VX_D16(i + 16)
#define VX_D64(i) VX_D32(i), VX_D32(i + 32)
#define VX_N8 "%0,%1,%2,%3,%4,%5,%6,%7"
#define VX_N16 VX_N8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define VX_N24 VX_N16 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define VX_N32 VX_N24 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define VX_N40 VX_N32 ",%32,%33,%34,%35,%36,%37,%38,%39"
#define VX_N48 VX_N40 ",%40,%41,%42,%43,%44,%45,%46,%47"
#define VX_N56 VX_N48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define VX_N64 VX_N56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define VX_N72 VX_N64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define VX_N80 VX_N72 ",%72,%73,%74,%75,%76,%77,%78,%79"
#define VX_N88 VX_N80 ",%80,%81,%82,%83,%84,%85,%86,%87"
#define VX_N96 VX_N88 ",%88,%89,%90,%91,%92,%93,%94,%95"
#define VX_N104 VX_N96 ",%96,%97,%98,%99,%100,%101,%102,%103"
#define VX_N112 VX_N104 ",%104,%105,%106,%107,%108,%109,%110,%111"
#define VX_N120 VX_N112 ",%112,%113,%114,%115,%116,%117,%118,%119"
#define VX_N128 VX_N120 ",%120,%121,%122,%123,%124,%125,%126,%127"
#define VX_PRODUCT(n, names, a_at, b_at, t_at, u_at, ...)                                                                 \
  asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.bf16.bf16 {" names "}, %" #a_at ", %" #b_at          \
               ", 1, 1, 1, %" #t_at ", %" #u_at ";" : __VA_ARGS__ : "l"(a), "l"(b), "n"(int(A_ACROSS)), "n"(int(B_ACROSS)))

// d += 64 features by 16 UNITS rows, 16 of k. A_ACROSS, B_ACROSS: features, rows are contiguous, not their k.
template <int UNITS, bool A_ACROSS, bool B_ACROSS>
__device__ __forceinline__ void multiply_units(float (&d)[8 * UNITS], uint64_t a, uint64_t b) {
  if constexpr (UNITS == 1) VX_PRODUCT(16, VX_N8, 8, 9, 10, 11, VX_D8(0));
  if constexpr (UNITS == 2) VX_PRODUCT(32, VX_N16, 16, 17, 18, 19, VX_D16(0));
  if constexpr (UNITS == 3) VX_PRODUCT(48, VX_N24, 24, 25, 26, 27, VX_D16(0), VX_D8(16));
  if constexpr (UNITS == 4) VX_PRODUCT(64, VX_N32, 32, 33, 34, 35, VX_D32(0));
  if constexpr (UNITS == 5) VX_PRODUCT(80, VX_N40, 40, 41, 42, 43, VX_D32(0), VX_D8(32));
  if constexpr (UNITS == 6) VX_PRODUCT(96, VX_N48, 48, 49, 50, 51, VX_D32(0), VX_D16(32));
  if constexpr (UNITS == 7) VX_PRODUCT(112, VX_N56, 56, 57, 58, 59, VX_D32(0), VX_D16(32), VX_D8(48));
  if constexpr (UNITS == 8) VX_PRODUCT(128, VX_N64, 64, 65, 66, 67, VX_D64(0));
  if constexpr (UNITS == 9) VX_PRODUCT(144, VX_N72, 72, 73, 74, 75, VX_D64(0), VX_D8(64));
  if constexpr (UNITS == 10) VX_PRODUCT(160, VX_N80, 80, 81, 82, 83, VX_D64(0), VX_D16(64));
  if constexpr (UNITS == 11) VX_PRODUCT(176, VX_N88, 88, 89, 90, 91, VX_D64(0), VX_D16(64), VX_D8(80));
  if constexpr (UNITS == 12) VX_PRODUCT(192, VX_N96, 96, 97, 98, 99, VX_D64(0), VX_D32(64));
  if constexpr (UNITS == 13) VX_PRODUCT(208, VX_N104, 104, 105, 106, 107, VX_D64(0), VX_D32(64), VX_D8(96));
  if constexpr (UNITS == 14) VX_PRODUCT(224, VX_N112, 112, 113, 114, 115, VX_D64(0), VX_D32(64), VX_D16(96));
  if constexpr (UNITS == 15) VX_PRODUCT(240, VX_N120, 120, 121, 122, 123, VX_D64(0), VX_D32(64), VX_D16(96), VX_D8(112));
  if constexpr (UNITS == 16) VX_PRODUCT(256, VX_N128, 128, 129, 130, 131, VX_D64(0), VX_D64(64));
}
// clang-format on

#endif

}  // namespace vx::sm90
