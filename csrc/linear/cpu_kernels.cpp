// Two ways to the same bits. Up to kStreamRows rows, B streams through registers once (stream): lanes are columns, and a
// weight's rows are transposed on the fly, which costs shuffles but no store. Beyond, both operands are packed into
// panels and a register tile runs over them (block). Neither ever splits or reorders k.
#include "linear/kernels.h"

#include "common/parallel.h"
#include "common/vec.h"
#include "linear/pack.h"

namespace vx::VEXACT_ISA {
namespace {

#if defined(VEXACT_ISA_AVX512)
constexpr int kTiles[] = {1, 2, 4, 8, 12, 16};  // rows that stream() takes at a time
constexpr int kRows = 8, kVectors = 3;          // the register tile of block(): rows, and vectors of 16 columns
#elif defined(VEXACT_ISA_AVX2)
constexpr int kTiles[] = {1, 2, 4};
constexpr int kRows = 4, kVectors = 1;
#else
constexpr int kTiles[] = {1};
constexpr int kRows = 1, kVectors = 1;
#endif
constexpr int kLargestTile = kTiles[sizeof kTiles / sizeof kTiles[0] - 1];
constexpr int64_t kStreamRows = 48;
constexpr int64_t kBlockK = 384, kBlockRows = 512, kBlockPanels = 288 / (16 * kVectors);

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

VX_INLINE F16 load_some(const void* p, Dtype dtype, int64_t at, int lanes) {
  return dtype == Dtype::f32 ? load_some(static_cast<const float*>(p) + at, lanes)
                             : load_some(static_cast<const bf16*>(p) + at, lanes);
}

VX_INLINE void store_some(void* p, Dtype dtype, int64_t at, F16 v, int lanes) {
  if (dtype == Dtype::f32)
    store_some(static_cast<float*>(p) + at, v, lanes);
  else
    store_some(static_cast<bf16*>(p) + at, v, lanes);
}

VX_INLINE void finish(const Gemm& g, int64_t i, int64_t j, F16 acc, int lanes) {
  if (g.bias) acc = acc + load_some(g.bias, g.bias_dtype, j, lanes);
  store_some(g.c, g.c_dtype, i * g.c_stride + j, acc, lanes);
}

void pack_lanes(const Operand& o, int64_t lane_stride, int64_t k_stride, int64_t lane, int lanes, int64_t p, int64_t k,
                float* out, int64_t every) {
  const int64_t at = lane * lane_stride + p * k_stride;
  if (o.dtype == Dtype::f32)
    pack(static_cast<const float*>(o.data) + at, lane_stride, k_stride, lanes, k, out, every);
  else
    pack(static_cast<const bf16*>(o.data) + at, lane_stride, k_stride, lanes, k, out, every);
}

VX_INLINE int lanes_at(int64_t j, int64_t n) { return int(n - j < 16 ? n - j : 16); }

// ---- few rows ---------------------------------------------------------------------------------------------------

// acc[r] += x[., r] * (16 columns), x packed as [k][kR]; at(l) is the address of column l's first element.
template <class T, int kR, class At>
VX_INLINE void stream_transposed(At at, int64_t k, const float* x, int64_t ahead, F16 (&acc)[kR]) {
  F16 b[kStep<T>];
  int64_t p = 0;
  for (; p + kStep<T> <= k; p += kStep<T>, x += kStep<T> * kR) {
    const int64_t byte = p * int64_t(sizeof(T));
    steps_of_rows<T>([&](int l) { return at(l) + byte; }, b);
    if (ahead) {  // each line of the next sixteen rows is asked for once
      const int first = kWords < 16 ? int(byte / (kWords * 4)) % (16 / kWords) * kWords : 0;
      for (int l = 0; l < kWords; ++l) __builtin_prefetch(at(first + l) + ahead + (byte & ~int64_t(63)), 0, 3);
    }
#pragma GCC unroll 16
    for (int s = 0; s < kStep<T>; ++s)  // order: k ascending, one accumulator per element
#pragma GCC unroll 16
      for (int r = 0; r < kR; ++r) acc[r] = fma(b[s], set1(x[s * kR + r]), acc[r]);
  }
  if (p < k) {
    last_steps_of_rows<T>([&](int l) { return at(l) + p * int64_t(sizeof(T)); }, int(k - p), b);
    for (int s = 0; s < k - p; ++s)  // order: the same, to the end of k
      for (int r = 0; r < kR; ++r) acc[r] = fma(b[s], set1(x[s * kR + r]), acc[r]);
  }
}

template <class T, int kR>
VX_INLINE void stream_rows(const T* b, int64_t stride, int lanes, int64_t k, const float* x, F16 (&acc)[kR]) {
  for (int64_t p = 0; p < k; ++p, b += stride, x += kR) {  // order: k ascending, one accumulator per element
    const F16 v = load_some(b, lanes);
#pragma GCC unroll 16
    for (int r = 0; r < kR; ++r) acc[r] = fma(v, set1(x[r]), acc[r]);
  }
}

// Columns j .. j + lanes of rows i .. i + rows (at most kR).
template <class T, int kR>
void stream(const Gemm& g, int64_t i, int rows, int64_t j, int lanes, const float* x) {
  F16 acc[kR];
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r)
    acc[r] = g.continue_c && r < rows ? load_some(g.c, Dtype::f32, (i + r) * g.c_stride + j, lanes) : zero();
  const T* b = static_cast<const T*>(g.b.data) + j * g.b.col_stride;
  if (g.b.row_stride == 1) {
    const int64_t stride = g.b.col_stride * int64_t(sizeof(T));
    const char* base = reinterpret_cast<const char*>(b);
    if (lanes == 16) {
      const int64_t ahead = j + 32 <= g.n && stride % 1024 ? 16 * stride : 0;
      stream_transposed<T, kR>([=](int l) { return base + l * stride; }, g.k, x, ahead, acc);
    } else {
      stream_transposed<T, kR>([=](int l) { return base + (l < lanes ? l : lanes - 1) * stride; }, g.k, x, 0, acc);
    }
  } else if (g.b.col_stride == 1) {
    lanes == 16 ? stream_rows<T, kR>(b, g.b.row_stride, 16, g.k, x, acc)
                : stream_rows<T, kR>(b, g.b.row_stride, lanes, g.k, x, acc);
  } else {
    float* panel = static_cast<float*>(scratch(7, g.k * 64 + 64));
    pack(b, g.b.col_stride, g.b.row_stride, lanes, g.k, panel, 16);
    stream_rows<float, kR>(panel, 16, 16, g.k, x, acc);
  }
#pragma GCC unroll 16
  for (int r = 0; r < kR; ++r)
    if (r < rows) finish(g, i + r, j, acc[r], lanes);
}

template <class T>
void stream_tile(const Gemm& g, int tile, int64_t i, int rows, int64_t j, int lanes, const float* x) {
  switch (tile) {
    case 1: return stream<T, 1>(g, i, rows, j, lanes, x);
#if defined(VEXACT_ISA_AVX512) || defined(VEXACT_ISA_AVX2)
    case 2: return stream<T, 2>(g, i, rows, j, lanes, x);
    case 4: return stream<T, 4>(g, i, rows, j, lanes, x);
#endif
#if defined(VEXACT_ISA_AVX512)
    case 8: return stream<T, 8>(g, i, rows, j, lanes, x);
    case 12: return stream<T, 12>(g, i, rows, j, lanes, x);
    case 16: return stream<T, 16>(g, i, rows, j, lanes, x);
#endif
  }
}

void stream_columns(const Gemm& g, int64_t begin, int64_t end) {  // in vectors of 16 columns
  const int64_t count = (g.m + kLargestTile - 1) / kLargestTile;
  const int64_t each = (g.m + count - 1) / count;
  int tile = 0;
  for (int t : kTiles)
    if (t >= each) {
      tile = t;
      break;
    }
  const float* x = static_cast<const float*>(g.a.data);
  if (g.m > 1 || g.a.dtype != Dtype::f32 || g.a.col_stride != 1) {
    float* packed = static_cast<float*>(scratch(6, (count * g.k * tile + 16) * 4));
    for (int64_t t = 0; t < count; ++t)
      pack_lanes(g.a, g.a.row_stride, g.a.col_stride, t * tile, int(g.m - t * tile < tile ? g.m - t * tile : tile), 0,
                 g.k, packed + t * g.k * tile, tile);
    x = packed;
  }
  for (int64_t j = begin * 16; j < end * 16 && j < g.n; j += 16)
    for (int64_t t = 0; t < count; ++t) {
      const int rows = int(g.m - t * tile < tile ? g.m - t * tile : tile);
      if (g.b.dtype == Dtype::f32)
        stream_tile<float>(g, tile, t * tile, rows, j, lanes_at(j, g.n), x + t * g.k * tile);
      else
        stream_tile<bf16>(g, tile, t * tile, rows, j, lanes_at(j, g.n), x + t * g.k * tile);
    }
}

// ---- many rows --------------------------------------------------------------------------------------------------

struct Tile {          // where accumulators wait between blocks of k
  float* data;
  int64_t stride;
  bool load, last;     // continue from data; finish into C instead of storing to data
};

// a is [k][16], of which kRows rows; b is [k][16 * kV].
template <int kV>
void multiply(const Gemm& g, const float* a, const float* b, int64_t k, Tile tile, int64_t i, int rows, int64_t j) {
  F16 acc[kRows][kV];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v)
      acc[r][v] = tile.load && r < rows
                      ? load_some(tile.data + r * tile.stride + 16 * v, lanes_at(j + 16 * v, g.n)) : zero();
  for (int64_t p = 0; p < k; ++p, a += 16, b += 16 * kV) {  // order: k ascending, one accumulator per element
    F16 bv[kV];
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v) bv[v] = load(b + 16 * v);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const F16 ar = set1(a[r]);
#pragma GCC unroll 4
      for (int v = 0; v < kV; ++v) acc[r][v] = fma(ar, bv[v], acc[r][v]);
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < kV; ++v)
      if (r < rows) {
        const int lanes = lanes_at(j + 16 * v, g.n);
        if (tile.last)
          finish(g, i + r, j + 16 * v, acc[r][v], lanes);
        else
          store_some(tile.data + r * tile.stride + 16 * v, acc[r][v], lanes);
      }
}

void multiply_panel(const Gemm& g, int vectors, const float* a, const float* b, int64_t k, Tile tile, int64_t i,
                    int rows, int64_t j) {
  switch (vectors) {
    case 1: return multiply<1>(g, a, b, k, tile, i, rows, j);
#if defined(VEXACT_ISA_AVX512)
    case 2: return multiply<2>(g, a, b, k, tile, i, rows, j);
    case 3: return multiply<3>(g, a, b, k, tile, i, rows, j);
#endif
  }
}

// Rows i .. i_end, columns j .. j_end of C.
void block(const Gemm& g, int64_t i0, int64_t i_end, int64_t j0, int64_t j_end) {
  const int64_t width = kVectors * 16, panels = (j_end - j0 + width - 1) / width;
  const int64_t blocks = g.k > kBlockK ? (g.k + kBlockK - 1) / kBlockK : 1, each = (g.k + blocks - 1) / blocks;
  const bool own_tile = blocks > 1 && g.c_dtype != Dtype::f32;
  const int64_t tile_stride = panels * width;
  float* a = static_cast<float*>(scratch(6, (each * 16 + (own_tile ? (i_end - i0) * tile_stride : 0)) * 4));
  float* b = static_cast<float*>(scratch(7, each * tile_stride * 4));
  float* own = a + each * 16;
  for (int64_t n = 0; n < blocks; ++n) {
    const int64_t p = n * each, k = p + each < g.k ? each : g.k - p;
    for (int64_t j = j0; j < j_end; j += 16) {
      const int64_t panel = (j - j0) / width, v = (j - j0) % width / 16;
      const int64_t vectors = (j_end - j0 - panel * width + 15) / 16 < kVectors
                                  ? (j_end - j0 - panel * width + 15) / 16 : kVectors;
      pack_lanes(g.b, g.b.col_stride, g.b.row_stride, j, lanes_at(j, g.n), p, k, b + panel * width * each + v * 16,
                 vectors * 16);
    }
    for (int64_t i = i0; i < i_end; i += 16) {
      const int rows = lanes_at(i, i_end);
      pack_lanes(g.a, g.a.row_stride, g.a.col_stride, i, rows, p, k, a, 16);
      for (int64_t j = j0; j < j_end; j += width) {
        const int vectors = int((j_end - j + 15) / 16 < kVectors ? (j_end - j + 15) / 16 : kVectors);
        for (int r = 0; r < rows; r += kRows) {
          Tile tile{nullptr, 0, n > 0 || g.continue_c, n + 1 == blocks};
          if (own_tile)
            tile.data = own + (i + r - i0) * tile_stride + (j - j0), tile.stride = tile_stride;
          else
            tile.data = static_cast<float*>(g.c) + (i + r) * g.c_stride + j, tile.stride = g.c_stride;
          multiply_panel(g, vectors, a + r, b + (j - j0) * each, k, tile, i + r, rows - r < kRows ? rows - r : kRows, j);
        }
      }
    }
  }
}

// C cut into tasks; the cut is free to follow the number of threads, since no element depends on it.
struct Cut {
  int64_t rows, columns;  // of one task
  int64_t down, across;   // how many
};

Cut cut(const Gemm& g, int64_t threads) {
  const int64_t width = kVectors * 16, panels = (g.n + width - 1) / width;
  int64_t across = (panels + kBlockPanels - 1) / kBlockPanels, down = (g.m + kBlockRows - 1) / kBlockRows;
  if (threads > 1) {
    while (down * across < threads && g.m / (down + 1) >= 64) ++down;
    while (down * across < threads && across < panels) ++across;
    while (down * across % threads && down * across < 4 * threads && across < panels) ++across;
  }
  const int64_t columns = (panels + across - 1) / across * width, rows = ((g.m + down - 1) / down + 15) / 16 * 16;
  return {rows, columns, (g.m + rows - 1) / rows, (g.n + columns - 1) / columns};
}

void run_task(const Gemm& g, const Cut& c, int64_t task) {
  const int64_t i = task % c.down * c.rows, j = task / c.down * c.columns;
  block(g, i, i + c.rows < g.m ? i + c.rows : g.m, j, j + c.columns < g.n ? j + c.columns : g.n);
}

}  // namespace

void gemm_single(const Gemm& g) {
  if (g.m <= 0 || g.n <= 0) return;
  if (g.m <= kStreamRows) return stream_columns(g, 0, (g.n + 15) / 16);
  const Cut c = cut(g, 1);
  for (int64_t task = 0; task < c.down * c.across; ++task) run_task(g, c, task);
}

void gemm(const Gemm& g) {
  if (g.m <= 0 || g.n <= 0) return;
  if (g.m <= kStreamRows) {
    const int64_t grain = 1 + 32768 / (g.m * g.k + 1);  // below about 10 us on one core, threads cost more than they save
    parallel_for(0, (g.n + 15) / 16, grain, [&](int64_t begin, int64_t end) { stream_columns(g, begin, end); });
  } else {
    const Cut c = cut(g, num_threads());
    parallel_tasks(c.down * c.across, [&](int64_t task) { run_task(g, c, task); });
  }
}

void column_sums(const ColumnSums& a) {
  parallel_for(0, (a.n + 15) / 16, 1 + 4096 / (a.rows + 1), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin * 16; j < end * 16 && j < a.n; j += 16) {
      const int lanes = lanes_at(j, a.n);
      F16 acc = zero();
      for (int64_t i = 0; i < a.rows; ++i)  // order: rows ascending into one accumulator per column
        acc = acc + load_some(a.x, a.dtype, i * a.x_stride + j, lanes);
      store_some(a.out, a.out_dtype, j, acc, lanes);
    }
  });
}

}  // namespace vx::VEXACT_ISA
