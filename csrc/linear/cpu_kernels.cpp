#include "linear/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"

namespace vx::VEXACT_ISA {
namespace {

template <class T>
VX_INLINE F16 load_some(const T* p, int lanes) {
  return lanes == 16 ? load(p) : load(p, lanes);
}

template <class T>
VX_INLINE void store_some(T* p, F16 v, int lanes) {
  if (lanes == 16)
    store(p, v);
  else
    store(p, v, lanes);
}

F16 load_some(const void* p, Dtype dtype, int64_t at, int lanes) {
  return dtype == Dtype::f32 ? load_some(static_cast<const float*>(p) + at, lanes)
                             : load_some(static_cast<const bf16*>(p) + at, lanes);
}

void store_some(void* p, Dtype dtype, int64_t at, F16 v, int lanes) {
  if (dtype == Dtype::f32)
    store_some(static_cast<float*>(p) + at, v, lanes);
  else
    store_some(static_cast<bf16*>(p) + at, v, lanes);
}

template <class T>
void pack_columns(const Operand& b, int64_t k, int64_t j, int lanes, float* panel) {
  const T* data = static_cast<const T*>(b.data) + j * b.col_stride;
  for (int64_t p = 0; p < k; ++p)
    for (int l = 0; l < 16; ++l)
      panel[p * 16 + l] = l < lanes ? to_f32(data[p * b.row_stride + l * b.col_stride]) : 0.0f;
}

template <class T>
void panel_times_rows(const Gemm& g, int64_t j, int lanes, const float* panel) {
  const T* a = static_cast<const T*>(g.a.data);
  for (int64_t i = 0; i < g.m; i += 4) {
    const int rows = int(g.m - i < 4 ? g.m - i : 4);
    F16 acc[4] = {zero(), zero(), zero(), zero()};
    if (g.continue_c)
      for (int r = 0; r < rows; ++r) acc[r] = load_some(g.c, Dtype::f32, (i + r) * g.c_stride + j, lanes);
    for (int64_t p = 0; p < g.k; ++p)  // order: k ascending into one accumulator per element
      for (int r = 0; r < rows; ++r)
        acc[r] = fma(set1(to_f32(a[(i + r) * g.a.row_stride + p * g.a.col_stride])), load(panel + p * 16), acc[r]);
    for (int r = 0; r < rows; ++r) {
      if (g.bias) acc[r] = acc[r] + load_some(g.bias, g.bias_dtype, j, lanes);
      store_some(g.c, g.c_dtype, (i + r) * g.c_stride + j, acc[r], lanes);
    }
  }
}

void columns(const Gemm& g, int64_t begin, int64_t end) {
  float* panel = static_cast<float*>(scratch(6, g.k * 64 + 64));
  for (int64_t j = begin * 16; j < end * 16 && j < g.n; j += 16) {
    const int lanes = int(g.n - j < 16 ? g.n - j : 16);
    g.b.dtype == Dtype::f32 ? pack_columns<float>(g.b, g.k, j, lanes, panel)
                            : pack_columns<bf16>(g.b, g.k, j, lanes, panel);
    g.a.dtype == Dtype::f32 ? panel_times_rows<float>(g, j, lanes, panel) : panel_times_rows<bf16>(g, j, lanes, panel);
  }
}

}  // namespace

void gemm_single(const Gemm& g) {
  if (g.m > 0) columns(g, 0, (g.n + 15) / 16);
}

void gemm(const Gemm& g) {
  if (g.m > 0) parallel_for(0, (g.n + 15) / 16, 1, [&](int64_t begin, int64_t end) { columns(g, begin, end); });
}

void column_sums(const ColumnSums& a) {
  parallel_for(0, (a.n + 15) / 16, 1 + 4096 / (a.rows + 1), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin * 16; j < end * 16 && j < a.n; j += 16) {
      const int lanes = int(a.n - j < 16 ? a.n - j : 16);
      F16 acc = zero();
      for (int64_t i = 0; i < a.rows; ++i)  // order: rows ascending into one accumulator per column
        acc = acc + load_some(a.x, a.dtype, i * a.x_stride + j, lanes);
      store_some(a.out, a.out_dtype, j, acc, lanes);
    }
  });
}

}  // namespace vx::VEXACT_ISA
