#include "rope/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"

namespace vx::VEXACT_ISA {
namespace {

// The two members of up to 16 pairs, from pair i on: apart by `half`, or side by side.
template <class T>
VX_INLINE void load_pairs(const T* x, int64_t i, int64_t half, int lanes, bool interleaved, F16& first, F16& second) {
  if (!interleaved) {
    first = load(x + i, lanes);
    second = load(x + half + i, lanes);
    return;
  }
  float a[16] = {}, b[16] = {};
  for (int j = 0; j < lanes; ++j) a[j] = to_f32(x[2 * (i + j)]), b[j] = to_f32(x[2 * (i + j) + 1]);
  first = load(a);
  second = load(b);
}

template <class T>
VX_INLINE void store_pairs(T* y, int64_t i, int64_t half, int lanes, bool interleaved, F16 first, F16 second) {
  if (!interleaved) {
    store(y + i, first, lanes);
    store(y + half + i, second, lanes);
    return;
  }
  float a[16], b[16];
  store(a, first);
  store(b, second);
  for (int j = 0; j < lanes; ++j) y[2 * (i + j)] = from_f32<T>(a[j]), y[2 * (i + j) + 1] = from_f32<T>(b[j]);
}

// order: an output is fma(own, cos, other * sin): the second product is rounded to fp32, the sum once more.
template <class T, class Table>
void rotate(const Rope& a, const RopeHeads& heads, int64_t token) {
  const int64_t half = a.rotary / 2;
  const Table* cos = static_cast<const Table*>(a.cos) + token * a.cos_stride;
  const Table* sin = static_cast<const Table*>(a.sin) + token * a.sin_stride;
  for (int64_t head = 0; head < heads.heads; ++head) {
    const T* x = static_cast<const T*>(heads.in) + token * heads.token_stride + head * heads.head_stride;
    T* y = static_cast<T*>(heads.out) + (token * heads.heads + head) * a.dim;
    for (int64_t i = 0; i < half; i += 16) {
      const int lanes = int(half - i < 16 ? half - i : 16);
      F16 x1, x2, y1, y2;
      load_pairs(x, i, half, lanes, a.interleaved, x1, x2);
      const F16 c1 = load(cos + i, lanes), c2 = load(cos + half + i, lanes);
      const F16 s1 = load(sin + i, lanes), s2 = load(sin + half + i, lanes);
      if (a.transpose) {
        y1 = fma(x1, c1, x2 * s2);
        y2 = fma(x2, c2, neg(x1 * s1));
      } else {
        y1 = fma(x1, c1, neg(x2 * s1));
        y2 = fma(x2, c2, x1 * s2);
      }
      store_pairs(y, i, half, lanes, a.interleaved, y1, y2);
    }
    if (a.dim > a.rotary) std::memcpy(y + a.rotary, x + a.rotary, (a.dim - a.rotary) * sizeof(T));
  }
}

template <class T, class Table>
void run(const Rope& a) {
  const int64_t work = (a.q.heads + a.k.heads) * a.dim;
  parallel_for(0, a.tokens, 1 + 32768 / (work + 1), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      rotate<T, Table>(a, a.q, token);
      rotate<T, Table>(a, a.k, token);
    }
  });
}

// sin and cos of an fp32 angle below 2^31 in magnitude, to about 1 ulp of double: every step is one correctly rounded
// operation of double, so the bits are the same everywhere. n * kHalfPi is a multiple of 2^-52 and the difference is
// below 1, so the first step of the reduction is exact.
constexpr double kTwoOverPi = 0x1.45f306dc9c883p-1;
constexpr double kHalfPi = 0x1.921fb54442d18p+0, kHalfPiRest = 0x1.1a62633145c07p-54;

VX_INLINE void sincos(float angle, float& sine, float& cosine) {
  constexpr double magic = 0x1.8p52;  // adding it rounds to an integer, ties to even, and leaves that in the low bits
  const double x = angle, shifted = std::fma(x, kTwoOverPi, magic), n = shifted - magic;
  double r = std::fma(-n, kHalfPi, x);
  r = std::fma(-n, kHalfPiRest, r);
  const double z = r * r;
  // Taylor series: for |r| <= pi / 4 the first terms left out are below 2^-54.
  double s = -1.0 / 1307674368000;
  s = std::fma(s, z, 1.0 / 6227020800);
  s = std::fma(s, z, -1.0 / 39916800);
  s = std::fma(s, z, 1.0 / 362880);
  s = std::fma(s, z, -1.0 / 5040);
  s = std::fma(s, z, 1.0 / 120);
  s = std::fma(s, z, -1.0 / 6);
  s = std::fma(r * z, s, r);
  double c = 1.0 / 20922789888000;
  c = std::fma(c, z, -1.0 / 87178291200);
  c = std::fma(c, z, 1.0 / 479001600);
  c = std::fma(c, z, -1.0 / 3628800);
  c = std::fma(c, z, 1.0 / 40320);
  c = std::fma(c, z, -1.0 / 720);
  c = std::fma(c, z, 1.0 / 24);
  c = std::fma(c, z, -0.5);
  c = std::fma(c, z, 1.0);
  int64_t quadrant;
  std::memcpy(&quadrant, &shifted, 8);
  const bool swap = quadrant & 1;
  const double u = swap ? c : s, v = swap ? s : c;
  sine = float(quadrant & 2 ? -u : u);
  cosine = float((quadrant + 1) & 2 ? -v : v);
}

template <class T>
void cos_sin(const RopeCosSin& a) {
  const int64_t f = a.frequencies;
  if (f == 0) return;  // empty tables have no address to copy from
  parallel_for(0, a.tokens, 1 + 2048 / (f + 1), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      T *cos = static_cast<T*>(a.cos) + token * 2 * f, *sin = static_cast<T*>(a.sin) + token * 2 * f;
      for (int64_t i = 0; i < f; ++i) {
        const float position = float(a.positions[(a.axes ? a.axes[i] : 0) * a.tokens + token]);
        float s, c;
        sincos(position * a.inv_freq[i], s, c);
        cos[i] = from_f32<T>(c * a.scaling);
        sin[i] = from_f32<T>(s * a.scaling);
      }
      std::memcpy(cos + f, cos, f * sizeof(T));
      std::memcpy(sin + f, sin, f * sizeof(T));
    }
  });
}

}  // namespace

void rope(const Rope& a) {
  if (a.dtype == Dtype::f32)
    run<float, float>(a);
  else if (a.table_dtype == Dtype::f32)
    run<bf16, float>(a);
  else
    run<bf16, bf16>(a);
}

void rope_cos_sin(const RopeCosSin& a) { a.dtype == Dtype::f32 ? cos_sin<float>(a) : cos_sin<bf16>(a); }

}  // namespace vx::VEXACT_ISA
