// Every element is computed by linear's own product, so a row has the bits of linear with its expert's weight; what is
// decided here is only who computes what. With few rows on many experts a weight is read once, and the threads share
// the columns of all the weights; with many rows they share blocks of rows too.
#include "grouped_linear/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"

namespace vx::VEXACT_ISA {
namespace {

constexpr int64_t kTaskRows = 256;
constexpr double kTaskWork = 1 << 18;  // multiply-adds: a few microseconds

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Tasks of an expert: `down` blocks of rows times `across` blocks of columns, whole vectors each. It may follow the
// number of threads and the other experts, since no element depends on the cut.
struct Cut {
  int64_t down, across;
};

Cut cut(int64_t m, int64_t n, double work, double task) {
  const int64_t panels = ceil_div(m, 16), vectors = ceil_div(n, 16);
  const int64_t down = smaller(ceil_div(m, kTaskRows), panels);
  const int64_t across = larger(1, smaller(vectors, int64_t(work / (task * double(down)))));
  return {down, across};
}

double work_of(int64_t rows, int64_t m, int64_t n) {  // the passage of a weight costs like four rows
  return double(larger(rows, 4)) * double(m) * double(n);
}

// run(e, i, i_end, j, j_end) for every block of every expert's (rows_of(e), n) result.
template <class Rows, class Depth, class Run>
void spread(int64_t experts, int64_t n, Rows rows_of, Depth depth_of, Run run) {
  int64_t* first = static_cast<int64_t*>(scratch(0, (experts + 1) * sizeof(int64_t)));
  double total = 0;
  for (int64_t e = 0; e < experts; ++e)
    if (rows_of(e)) total += work_of(rows_of(e), n, depth_of(e));
  const double share = total / double(4 * num_threads()), task = share > kTaskWork ? share : kTaskWork;
  auto cut_of = [&](int64_t e) { return cut(rows_of(e), n, work_of(rows_of(e), n, depth_of(e)), task); };
  first[0] = 0;
  for (int64_t e = 0; e < experts; ++e) {
    const Cut c = rows_of(e) ? cut_of(e) : Cut{0, 0};
    first[e + 1] = first[e] + c.down * c.across;
  }
  parallel_tasks(first[experts], [&](int64_t index) {
    int64_t e = 0, end = experts;  // the last expert whose first task is not behind this one
    while (end - e > 1) {
      const int64_t middle = (e + end) / 2;
      (first[middle] <= index ? e : end) = middle;
    }
    const Cut c = cut_of(e);
    const int64_t at = index - first[e], d = at % c.down, a = at / c.down, m = rows_of(e);
    const int64_t panels = ceil_div(m, 16), vectors = ceil_div(n, 16);
    run(e, panels * d / c.down * 16, smaller(m, panels * (d + 1) / c.down * 16), vectors * a / c.across * 16,
        smaller(n, vectors * (a + 1) / c.across * 16));
  });
}

int64_t size_of(Dtype dtype) { return dtype == Dtype::f32 ? 4 : 2; }

Operand shifted(Operand o, int64_t rows, int64_t columns, int64_t more = 0) {
  o.data = static_cast<const char*>(o.data) + size_of(o.dtype) * (rows * o.row_stride + columns * o.col_stride + more);
  return o;
}

}  // namespace

void grouped_gemm(const GroupedGemm& g) {
  auto rows_of = [&](int64_t e) { return int64_t(g.offsets[e + 1]) - g.offsets[e]; };
  char* c = static_cast<char*>(g.c);
  if (g.rows > 0 && g.n > 0)
    spread(g.experts, g.n, rows_of, [&](int64_t) { return g.k; },
           [&](int64_t e, int64_t i, int64_t i_end, int64_t j, int64_t j_end) {
             const int64_t row = g.offsets[e] + i;  // order: gemm_single's, the one of linear
             gemm_single({i_end - i, j_end - j, g.k, shifted(g.a, row, 0), shifted(g.b, 0, j, e * g.b_expert),
                          c + size_of(g.c_dtype) * (row * g.c_stride + j), g.c_dtype, g.c_stride});
           });
  const int64_t end = g.offsets[g.experts];
  for (int64_t row = end; row < g.rows; ++row)
    std::memset(c + size_of(g.c_dtype) * row * g.c_stride, 0, size_of(g.c_dtype) * g.n);
}

void grouped_sums(const GroupedSums& g) {
  char* c = static_cast<char*>(g.c);
  if (g.m > 0 && g.n > 0)
    spread(g.experts, g.n, [&](int64_t) { return g.m; },
           [&](int64_t e) { return int64_t(g.offsets[e + 1]) - g.offsets[e]; },
           [&](int64_t e, int64_t i, int64_t i_end, int64_t j, int64_t j_end) {
             const int64_t row = g.offsets[e], depth = g.offsets[e + 1] - row;  // order: rows ascending
             gemm_single({i_end - i, j_end - j, depth, shifted(g.a, i, row), shifted(g.b, row, j),
                          c + size_of(g.c_dtype) * ((e * g.m + i) * g.n + j), g.c_dtype, g.n});
           });
}

}  // namespace vx::VEXACT_ISA
