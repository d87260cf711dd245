// C is cut into tasks. A task packs its rows of A as [k][16] panels that stay in the second-level cache, then takes B
// sixteen columns at a time: lanes are columns, a register tile is up to sixteen rows of one vector. A weight's rows are
// transposed in registers on the way, for the first tile of rows: that costs shuffles, which run beside the
// multiply-adds, but no pass over memory, so one row and a thousand rows take the same road.
#include "linear/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"
#include "linear/pack.h"

namespace vx::VEXACT_ISA {
namespace {

// Rows of a register tile, given the rows that are left of a panel, and the floats between steps of that panel.
#if defined(VEXACT_ISA_AVX512)
constexpr int kTile = 16;
constexpr int tile_for(int rows) {
  return rows <= 1 ? 1 : rows <= 2 ? 2 : rows <= 4 ? 4 : rows <= 8 ? 8 : rows <= 12 ? 12 : 16;
}
constexpr int panel_for(int rows) { return tile_for(rows); }
#elif defined(VEXACT_ISA_AVX2)
constexpr int kTile = 4;
constexpr int tile_for(int rows) { return rows <= 2 ? 2 : 4; }
constexpr int panel_for(int rows) { return rows == 1 ? 1 : 16; }
#else
constexpr int kTile = 1;
constexpr int tile_for(int) { return 1; }
constexpr int panel_for(int rows) { return rows == 1 ? 1 : 16; }
#endif
constexpr int64_t kTaskRows = 256;
constexpr int64_t kTaskVectors = 32;       // of sixteen columns, for one packing of A
constexpr int64_t kPackedFloats = 163840;  // of A at a time, 640 KB; k is taken in blocks where there is more
constexpr int64_t kWide = 4;               // panels of a row-major B packed together: 256 bytes of each of its rows

constexpr int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
constexpr int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
VX_INLINE int lanes_at(int64_t j, int64_t end) { return int(smaller(end - j, 16)); }

VX_INLINE F16 load_as(const void* p, Dtype dtype, int64_t at, int lanes) {
  return dtype == Dtype::f32 ? load_lanes(static_cast<const float*>(p) + at, lanes)
                             : load_lanes(static_cast<const bf16*>(p) + at, lanes);
}

VX_INLINE void store_as(void* p, Dtype dtype, int64_t at, F16 v, int lanes) {
  if (dtype == Dtype::f32)
    store_lanes(static_cast<float*>(p) + at, v, lanes);
  else
    store_lanes(static_cast<bf16*>(p) + at, v, lanes);
}

// One register tile over one block of k: rows i .. i + rows and columns j .. j + lanes of C, steps p .. p + k.
struct Step {
  int64_t i, j, p, k;
  int rows, lanes;
  const float* x;     // the rows of A, packed
  float* waiting;     // where accumulators wait between blocks of k
  int64_t waiting_stride;
  bool resume, last;  // start from what waits; finish into C

  Step right(int vectors) const {
    Step s = *this;
    s.j += 16 * vectors;
    s.waiting += 16 * vectors;
    return s;
  }
};

template <int kR>
VX_INLINE void begin(const Step& s, F16 (&acc)[kR]) {
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r)
    acc[r] = s.resume && r < s.rows ? load_lanes(s.waiting + r * s.waiting_stride, s.lanes) : zero();
}

template <int kR>
VX_INLINE void end(const Gemm& g, const Step& s, F16 (&acc)[kR]) {
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r) {
    if (r >= s.rows) return;
    if (s.last) {
      if (g.bias) acc[r] = acc[r] + load_as(g.bias, g.bias_dtype, s.j, s.lanes);
      store_as(g.c, g.c_dtype, (s.i + r) * g.c_stride + s.j, acc[r], s.lanes);
    } else {
      store_lanes(s.waiting + r * s.waiting_stride, acc[r], s.lanes);
    }
  }
}

// Over the rows of a weight, 16 * kV columns, kW words of each at a time: at(l) is the address of column l's first
// step. x is [k][kX], of which kR rows. With keep, the transposed columns are left there as [k][16] for the other tiles.
// ahead: bytes from here to the columns that come next.
template <class T, int kR, int kX, int kV, int kW, class At>
VX_INLINE void over_columns(At at, int64_t ahead, int64_t k, const float* x, float* keep, F16 (&acc)[kV][kR]) {
  constexpr int kS = kStep<T, kW>;
  int64_t p = 0;
  for (; p + kS <= k; p += kS, x += kS * kX) {
    const int64_t byte = p * int64_t(sizeof(T));
#pragma GCC unroll 2
    for (int v = 0; v < kV; ++v) {
      F16 b[kS];
      steps_of_rows<T, kW>([&](int l) { return at(16 * v + l) + byte; }, b);
      if (ahead) {  // each line once, into the second-level cache: the first has few places for misses in flight
        const int first = 16 * v + int(byte % 64) / 4;
        for (int l = 0; l < kW; ++l) __builtin_prefetch(at(first + l) + ahead + (byte & ~int64_t(63)), 0, 2);
      }
      if (kR == kTile && keep) {
#pragma GCC unroll 32
        for (int s = 0; s < kS; ++s) store(keep + (p + s) * 16, b[s]);
      }
#pragma GCC unroll 32
      for (int s = 0; s < kS; ++s)  // order: k ascending, one accumulator per element
#pragma GCC unroll 16
        for (int r = 0; r < kR; ++r) acc[v][r] = fma(b[s], set1(x[s * kX + r]), acc[v][r]);
    }
  }
  for (int v = 0; v < kV && p < k; ++v) {
    F16 b[kS];
    last_steps_of_rows<T, kW>([&](int l) { return at(16 * v + l) + p * int64_t(sizeof(T)); }, int(k - p), b);
    for (int s = 0; s < k - p; ++s) {  // order: the same, to the end of k
      if (keep) store(keep + (p + s) * 16, b[s]);
      for (int r = 0; r < kR; ++r) acc[v][r] = fma(b[s], set1(x[s * kX + r]), acc[v][r]);
    }
  }
}

// Over a row-major B, or a packed panel.
template <class T, int kR, int kX>
VX_INLINE void over_rows(const T* b, int64_t stride, int lanes, int64_t k, const float* x, F16 (&acc)[kR]) {
#pragma GCC unroll 2
  for (int64_t p = 0; p < k; ++p) {  // order: k ascending, one accumulator per element
    const F16 v = load_lanes(b + p * stride, lanes);
#pragma GCC unroll 16
    for (int r = 0; r < kR; ++r) acc[r] = fma(v, set1(x[p * kX + r]), acc[r]);
  }
}

// 16 * kV columns of a weight. ahead as above, or 0 where fetching the next columns would evict these.
template <class T, int kR, int kX, int kV, int kW>
void columns_tile(const Gemm& g, const Step& s, bool fetch, float* keep) {
  F16 acc[kV][kR];
  for (int v = 0; v < kV; ++v) begin(s.right(v), acc[v]);
  const int64_t stride = g.b.col_stride * int64_t(sizeof(T));
  const char* base = reinterpret_cast<const char*>(static_cast<const T*>(g.b.data) + s.j * g.b.col_stride + s.p);
  if (s.lanes == 16) {
    const int64_t ahead = fetch && s.j + 32 * kV <= g.n ? 16 * kV * stride : 0;
    over_columns<T, kR, kX, kV, kW>([=](int l) { return base + l * stride; }, ahead, s.k, s.x, keep, acc);
  } else if constexpr (kV == 1) {
    const int last = s.lanes - 1;
    auto at = [=](int l) { return base + (l < last ? l : last) * stride; };
    over_columns<T, kR, kX, kV, kW>(at, 0, s.k, s.x, keep, acc);
  }
  for (int v = 0; v < kV; ++v) end(g, s.right(v), acc[v]);
}

template <class T, int kR, int kX>
void rows_tile(const Gemm& g, const Step& s, const T* b, int64_t stride, int lanes) {
  F16 acc[kR];
  begin(s, acc);
  if (lanes == 16)
    over_rows<T, kR, kX>(b, stride, 16, s.k, s.x, acc);
  else
    over_rows<T, kR, kX>(b, stride, lanes, s.k, s.x, acc);
  end(g, s, acc);
}

template <int kR, int kX>
struct Shape {
  static constexpr int rows = kR, every = kX;
};

template <class F>  // f(Shape) for a tile of this many rows in a panel of that many floats a step
VX_INLINE void with_shape(int tile, int every, F f) {
#if defined(VEXACT_ISA_AVX512)
  switch (tile) {
    case 1: return f(Shape<1, 1>());
    case 2: return f(Shape<2, 2>());
    case 4: return f(Shape<4, 4>());
    case 8: return f(Shape<8, 8>());
    case 12: return f(Shape<12, 12>());
    default: return f(Shape<16, 16>());
  }
#elif defined(VEXACT_ISA_AVX2)
  if (every == 1) return f(Shape<1, 1>());
  return tile == 2 ? f(Shape<2, 16>()) : f(Shape<4, 16>());
#else
  return every == 1 ? f(Shape<1, 1>()) : f(Shape<1, 16>());
#endif
}

void pack_lanes(const Operand& o, int64_t lane_stride, int64_t k_stride, int64_t lane, int lanes, int64_t p, int64_t k,
                float* out, int64_t every) {
  const int64_t at = lane * lane_stride + p * k_stride;
  if (o.dtype == Dtype::f32)
    pack(static_cast<const float*>(o.data) + at, lane_stride, k_stride, lanes, k, out, every);
  else
    pack(static_cast<const bf16*>(o.data) + at, lane_stride, k_stride, lanes, k, out, every);
}

// Up to kWide panels [k][16] of B, `panel` floats apart.
template <class T>
void pack_wide(const Operand& b, int64_t j, int64_t columns, int64_t p, int64_t k, float* out, int64_t panel) {
  if (b.col_stride != 1) {
    for (int64_t c = 0; c < columns; c += 16)
      pack_lanes(b, b.col_stride, b.row_stride, j + c, lanes_at(c, columns), p, k, out + c / 16 * panel, 16);
    return;
  }
  const T* data = static_cast<const T*>(b.data) + p * b.row_stride + j;
  for (int64_t q = 0; q < k; ++q, data += b.row_stride, out += 16)
    for (int64_t c = 0; c < columns; c += 16)
      store(out + c / 16 * panel, load_lanes(data + c, lanes_at(c, columns)));
}

// Rows i0 .. i_end and columns j0 .. j_end of C; T is B's type.
template <class T>
void compute(const Gemm& g, int64_t i0, int64_t i_end, int64_t j0, int64_t j_end) {
  const int64_t rows = i_end - i0, panels = ceil_div(rows, 16);
  const int64_t most = panels > 1 ? smaller(g.k, kPackedFloats / (16 * panels)) : g.k;
  const int64_t blocks = most ? ceil_div(g.k, most) : 1, each = ceil_div(g.k, blocks);
  const bool a_in_place = rows == 1 && g.a.dtype == Dtype::f32 && g.a.col_stride == 1;
  const bool by_columns = g.b.row_stride == 1, by_rows = !by_columns && g.b.col_stride == 1 && rows <= 32;
  // Rows of a weight a multiple of 4 KB apart share the sets of the first-level cache: read whole lines there while
  // registers last, and fetch nothing ahead. A row of bf16 waits for its chain of multiply-adds: take two vectors.
  const int64_t apart = by_columns ? g.b.col_stride * int64_t(sizeof(T)) : 1;
  const bool fetch = apart % 4096, lines = !fetch && rows <= 4, pairs = rows == 1 && apart % 2048;
  const bool own = blocks > 1 && g.c_dtype != Dtype::f32;  // otherwise accumulators wait in C

  const int64_t a_floats = a_in_place ? 0 : 16 * panels * each + 16;
  float* a = static_cast<float*>(scratch(6, (a_floats + (own ? rows * (j_end - j0) : 0)) * 4 + 64));
  float* waiting = own ? a + a_floats : static_cast<float*>(g.c) + i0 * g.c_stride + j0;
  const int64_t waiting_stride = own ? j_end - j0 : g.c_stride;
  float* b = by_rows ? nullptr : static_cast<float*>(scratch(7, (by_columns ? 1 : kWide) * each * 64 + 64));

  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t p = n * each, k = smaller(each, g.k - p);
    for (int64_t i = 0; i < rows && !a_in_place; i += 16) {
      const int count = lanes_at(i, rows);
      pack_lanes(g.a, g.a.row_stride, g.a.col_stride, i0 + i, count, p, k, a + i * each, panel_for(count));
    }
    for (int64_t j = j0; j < j_end; j += 16) {
      const int64_t wide = by_columns ? 0 : (j - j0) / 16 % kWide;
      float* panel = b + (by_rows ? 0 : wide * 16 * each);
      if (!by_columns && !by_rows && wide == 0)
        pack_wide<T>(g.b, j, smaller(j_end - j, 16 * kWide), p, k, b, 16 * each);
      for (int64_t i = 0; i < rows; i += kTile) {
        const int64_t first = i / 16 * 16;  // of the panel
        const int every = panel_for(lanes_at(first, rows)), count = int(smaller(rows - i, kTile));
        const float* x = a_in_place ? static_cast<const float*>(g.a.data) + i0 * g.a.row_stride + p
                                    : a + first * each + (i - first);
        const Step s{i0 + i, j, p, k, count, lanes_at(j, j_end), x, waiting + i * waiting_stride + (j - j0),
                     waiting_stride, n > 0 || g.continue_c, n + 1 == blocks};
        with_shape(tile_for(count), every, [&](auto shape) {
          constexpr int kR = decltype(shape)::rows, kX = decltype(shape)::every;
          if (by_columns && i == 0) {
#if defined(VEXACT_ISA_AVX512)
            if constexpr (kR == 1)
              if (pairs && j + 32 <= j_end) {
                columns_tile<T, kR, kX, 2, kWords>(g, s, fetch, nullptr);
                j += 16;
                return;
              }
            if constexpr (kR <= 4)
              if (lines) return columns_tile<T, kR, kX, 1, 16>(g, s, fetch, nullptr);
#endif
            columns_tile<T, kR, kX, 1, kWords>(g, s, fetch, rows > kTile ? panel : nullptr);
          } else if (by_rows) {
            const T* data = static_cast<const T*>(g.b.data) + p * g.b.row_stride + j;
            rows_tile<T, kR, kX>(g, s, data, g.b.row_stride, s.lanes);
          } else {
            rows_tile<float, kR, kX>(g, s, panel, 16, 16);
          }
        });
      }
    }
  }
}

// The cut of C into down x across tasks. It may follow the number of threads, since no element depends on it.
struct Cut {
  int64_t down, across;
};

Cut cut(const Gemm& g, int64_t threads) {
  const int64_t vectors = ceil_div(g.n, 16), panels = ceil_div(g.m, 16);
  int64_t down = ceil_div(g.m, kTaskRows), across = g.m > 16 ? ceil_div(vectors, kTaskVectors) : 1;
  const double work = double(larger(g.m, 4)) * double(g.n) * double(g.k);  // a weight's passage costs like four rows
  if (threads == 1 || work < 1 << 18) return {down, across};              // a few microseconds: less than a wake-up
  if (work > 1 << 24)  // enough for tasks to even out what else the machine does, but keep them 256 columns wide
    across = larger(across, smaller(ceil_div(4 * threads, down), g.m > 16 ? vectors / 16 : vectors));
  if (down * across < threads) across = smaller(vectors, ceil_div(threads, down));
  if (down * across < threads) down = smaller(panels, ceil_div(threads, across));
  while (down * across % threads && down * across < 4 * threads && across < vectors) ++across;
  return {down, across};
}

void run_task(const Gemm& g, const Cut& c, int64_t task) {
  const int64_t vectors = ceil_div(g.n, 16), panels = ceil_div(g.m, 16), d = task % c.down, a = task / c.down;
  const int64_t i = panels * d / c.down * 16, i_end = smaller(g.m, panels * (d + 1) / c.down * 16);
  const int64_t j = vectors * a / c.across * 16, j_end = smaller(g.n, vectors * (a + 1) / c.across * 16);
  g.b.dtype == Dtype::f32 ? compute<float>(g, i, i_end, j, j_end) : compute<bf16>(g, i, i_end, j, j_end);
}

}  // namespace

void gemm_single(const Gemm& g) {
  if (g.m <= 0 || g.n <= 0) return;
  const Cut c = cut(g, 1);
  for (int64_t task = 0; task < c.down * c.across; ++task) run_task(g, c, task);
}

void gemm(const Gemm& g) {
  if (g.m <= 0 || g.n <= 0) return;
  const Cut c = cut(g, num_threads());
  parallel_tasks(c.down * c.across, [&](int64_t task) { run_task(g, c, task); });
}

void gemm_batch(const GemmBatch& g) {
  auto at = [](const void* p, Dtype dtype, int64_t elements) -> const void* {
    return static_cast<const char*>(p) + elements * (dtype == Dtype::f32 ? 4 : 2);
  };
  auto product = [&](int64_t i) {
    Gemm one = g.first;
    one.a.data = at(one.a.data, one.a.dtype, i * g.a_stride);
    one.b.data = at(one.b.data, one.b.dtype, i * g.b_stride);
    one.c = const_cast<void*>(at(one.c, one.c_dtype, i * g.c_stride));
    return one;
  };
  if (g.batch < num_threads()) {  // too few to give every thread one
    for (int64_t i = 0; i < g.batch; ++i) gemm(product(i));
    return;
  }
  const double work = double(larger(g.first.m, 4)) * double(g.first.n) * double(g.first.k);
  const int64_t grain = 1 + int64_t(double(1 << 18) / (work + 1));
  parallel_dynamic(
      g.batch, grain,
      [](int64_t begin, int64_t end, void* context) {
        for (int64_t i = begin; i < end; ++i) gemm_single((*static_cast<decltype(product)*>(context))(i));
      },
      &product);
}

void column_sums(const ColumnSums& a) {
  parallel_for(0, (a.n + 15) / 16, 1 + 4096 / (a.rows + 1), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin * 16; j < end * 16 && j < a.n; j += 16) {
      const int lanes = lanes_at(j, a.n);
      F16 acc = zero();
      for (int64_t i = 0; i < a.rows; ++i)  // order: rows ascending into one accumulator per column
        acc = acc + load_as(a.x, a.dtype, i * a.x_stride + j, lanes);
      store_as(a.out, a.out_dtype, j, acc, lanes);
    }
  });
}

}  // namespace vx::VEXACT_ISA
