// archs: 90a
// Launches of the kernels in fma.cuh.
#include "linear/fma.cuh"

#include <atomic>

#include "common/cuda.h"
#include "linear/fma.h"

namespace vx {
namespace {

// From many short chains of few tiles to what keeps the arithmetic units busy.
template <class Visit>
bool with_shape(const FmaTile& tile, Visit visit) {
  const auto is = [&](int rows, int columns) { return tile.rows == rows && tile.columns == columns; };
  if (is(8, 8)) return visit(sm90::FmaShape<8, 8, 1, 1, 64, 8>{});
  if (is(16, 16)) return visit(sm90::FmaShape<16, 16, 2, 2, 64, 6>{});
  if (is(32, 32)) return visit(sm90::FmaShape<32, 32, 4, 4, 32, 6>{});
  if (is(64, 64)) return visit(sm90::FmaShape<64, 64, 8, 4, 32, 4>{});
  if (is(128, 128)) return visit(sm90::FmaShape<128, 128, 8, 8, 32, 4>{});
  return false;
}

template <class S, bool A_K, bool B_K>
bool launch(const Product& p, cudaStream_t stream) {
  auto kernel = sm90::fma_kernel<S, A_K, B_K>;
  constexpr int kBytes = sm90::FmaSides<S, A_K, B_K>::kBytes;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kBytes, p.device, allowed);
  const int64_t row_tiles = (p.m + S::kRows - 1) / S::kRows, tiles = row_tiles * ((p.n + S::kColumns - 1) / S::kColumns);
  if (tiles > (1 << 30)) return false;
  const sm90::FmaArgs args{static_cast<const float*>(p.a), static_cast<const float*>(p.b),
                           static_cast<const float*>(p.bias), static_cast<float*>(p.out),
                           p.a_ld, p.b_ld, p.out_ld, int(p.m), int(p.n), int(p.k), int(row_tiles), p.resume};
  VX_CUDA_CHECK(sm90::launch_chained(kernel, dim3(unsigned(tiles)), S::kThreads, kBytes, stream, args));
  return true;
}

}  // namespace

bool fma_tile_exists(const FmaTile& tile) {
  return with_shape(tile, [](auto) { return true; });
}

bool run_fma(const Product& p, const FmaTile& tile, cudaStream_t stream) {
  if (!p.a_k_contiguous && p.b_k_contiguous) return false;  // nobody asks for it
  return with_shape(tile, [&](auto shape) {
    using S = decltype(shape);
    if (!p.a_k_contiguous) return launch<S, false, false>(p, stream);
    return p.b_k_contiguous ? launch<S, true, true>(p, stream) : launch<S, true, false>(p, stream);
  });
}

}  // namespace vx
