// archs: 90a
// Launches of the kernels in sm90_tiled.cuh.
#include "linear/tiled.h"

#include <atomic>
#include <utility>

#include "common/cuda.h"
#include "linear/sm90_skinny.cuh"
#include "linear/sm90_tiled.cuh"

namespace vx {
namespace {

constexpr int kShared = 226 * 1024;

CUtensorMap tensor_map(const void* data, bool is_bf16, int64_t rows, int64_t columns, int64_t ld, int box_rows) {
  CUtensorMap map;
  STD_TORCH_CHECK(sm90::box_map(&map, is_bf16, data, rows, columns, ld, box_rows, sm90::kTiledDepth),
                  "linear: this driver makes no tensor map of these operands");
  return map;
}

template <class T, int GROUPS, int TOKENS>
void launch(const Product& p, const Tiling& t, cudaStream_t stream) {
  auto kernel = sm90::tiled_kernel<T, GROUPS, TOKENS>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kShared, p.device, allowed);
  const CUtensorMap weight_map = tensor_map(p.b, p.is_bf16, p.n, p.k, p.b_ld, 64 * GROUPS / t.cluster);
  const CUtensorMap x_map = tensor_map(p.a, p.is_bf16, p.m, p.k, p.a_ld, TOKENS);
  const CUtensorMap out_map = tensor_map(p.out, p.is_bf16, p.m, p.n, p.out_ld, TOKENS);
  const int64_t weight_tiles = (p.n + 64 * GROUPS - 1) / (64 * GROUPS);
  const int64_t token_tiles = (p.m + TOKENS * t.cluster - 1) / (TOKENS * t.cluster) * t.cluster;
  const sm90::TiledArgs args{p.bias, int(p.n), int(p.k), int(token_tiles), t.cluster, t.stages};

  cudaLaunchAttribute attributes[2];  // launch_chained's, and a cluster's
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = t.cluster, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(weight_tiles * token_tiles)), config.blockDim = dim3(sm90::tiled_threads(GROUPS));
  config.dynamicSmemBytes = sm90::tiled_shared_bytes(GROUPS, TOKENS, t.stages), config.stream = stream;
  config.attrs = attributes, config.numAttrs = t.cluster > 1 ? 2 : 1;
  VX_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, weight_map, x_map, out_map, args));
}

template <int GROUPS, int TOKENS>
bool try_launch(const Product& p, const Tiling& t, cudaStream_t stream) {
  if (t.groups != GROUPS || t.tokens != TOKENS) return false;
  if constexpr (sm90::tiled_exists(GROUPS, TOKENS))
    p.is_bf16 ? launch<__nv_bfloat16, GROUPS, TOKENS>(p, t, stream) : launch<__half, GROUPS, TOKENS>(p, t, stream);
  return sm90::tiled_exists(GROUPS, TOKENS);
}

template <int... I>
bool launch_any(const Product& p, const Tiling& t, cudaStream_t stream, std::integer_sequence<int, I...>) {
  return ((try_launch<1, 64 + 16 * I>(p, t, stream) || try_launch<3, 64 + 16 * I>(p, t, stream)) || ...);
}

}  // namespace

bool tiling_exists(const Tiling& t) {
  return sm90::tiled_exists(t.groups, t.tokens) && t.stages >= 2 && t.stages <= sm90::kTiledStages &&
         (t.cluster == 1 || t.cluster == 2) && sm90::tiled_shared_bytes(t.groups, t.tokens, t.stages) <= kShared &&
         t.stages * (64 * t.groups + t.tokens) >= t.groups * t.tokens;
}

bool run_tiled(const Product& p, const Tiling& t, cudaStream_t stream) {
  if (!p.a_k_contiguous || !p.b_k_contiguous || p.resume || p.out_f32 || !p.out_aligned) return false;
  if (p.m > (1 << 20) || p.n > (1 << 24)) return false;
  return launch_any(p, t, stream, std::make_integer_sequence<int, 13>());
}

}  // namespace vx
