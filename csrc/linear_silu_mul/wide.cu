// archs: 90a
// Binding and launches of linear_silu_mul on SM90 for more rows than cuda.cu takes: bf16 and fp16, on 16-byte boundaries.
#include <type_traits>

#include "linear_silu_mul/kernels.h"
#include "linear_silu_mul/sm90_wide.cuh"

namespace vx {
namespace {

struct WideSizes {
  int tokens, width;  // rows of x and of the weight in a tile
  int across, down;   // blocks of a cluster with the same rows of x; with the same rows of the weight
  int stages;         // of the ring
};

template <class T, int GROUPS, int PARTS, int WIDTH>
void launch(const WideSizes& s, const GatedOperands& o) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kTokens = 64 * GROUPS * PARTS;
  auto kernel = sm90::wide_kernel<T, GROUPS, PARTS, WIDTH>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kGatedShared, o.device, allowed);
  CUtensorMap weight_map, x_map, out_map;
  STD_TORCH_CHECK(sm90::paired_map(&weight_map, kIsBf16, o.weight, o.n / 2, o.k, o.weight_ld, WIDTH / s.down) &&
                      sm90::box_map(&x_map, kIsBf16, o.x, o.m, o.k, o.x_ld, kTokens / s.across, sm90::kTiledDepth) &&
                      sm90::wide_out_map(&out_map, kIsBf16, o.out, o.m, o.n / 2, o.out_ld),
                  "linear_silu_mul: this driver makes no tensor map of these operands");
  const auto tiles = [](int size, int tile, int of) { return (size + tile * of - 1) / (tile * of) * of; };
  const int token_tiles = tiles(o.m, kTokens, s.down), weight_tiles = tiles(o.n, WIDTH, s.across);
  const sm90::WideArgs args{o.k, token_tiles, s.across, s.down, s.stages, o.gelu};

  cudaLaunchAttribute attributes[2];  // launch_chained's, and a cluster's
  attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[0].val.programmaticStreamSerializationAllowed = 1;
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim.x = s.across * s.down, attributes[1].val.clusterDim.y = attributes[1].val.clusterDim.z = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(weight_tiles) * token_tiles), config.blockDim = dim3(sm90::wide_threads(GROUPS, PARTS));
  config.dynamicSmemBytes = sm90::wide_shared_bytes(kTokens, WIDTH, s.stages), config.stream = o.stream;
  config.attrs = attributes, config.numAttrs = s.across * s.down > 1 ? 2 : 1;
  VX_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, weight_map, x_map, out_map, args));
}

template <int GROUPS, int PARTS, int WIDTH>
bool try_launch(const WideSizes& s, const GatedOperands& o) {
  if (s.tokens != 64 * GROUPS * PARTS || s.width != WIDTH) return false;
  o.is_bf16 ? launch<__nv_bfloat16, GROUPS, PARTS, WIDTH>(s, o) : launch<__half, GROUPS, PARTS, WIDTH>(s, o);
  return true;
}

void linear_silu_mul_wide(Tensor x, Tensor weight, bool gelu, int64_t tokens, int64_t width, int64_t across, int64_t down,
                          int64_t stages, Tensor out) {
  const GatedOperands o = gated_operands(x, weight, gelu, out);
  const WideSizes s{small(tokens), small(width), small(across), small(down), small(stages)};
  const auto one_or_even = [](int of) { return of == 1 || of == 2 || of == 4; };
  // what leaves the block lies in the ring
  STD_TORCH_CHECK(one_or_even(s.across) && one_or_even(s.down) && s.across * s.down <= 4 && s.tokens <= 256 && s.width <= 256 &&
                      s.stages >= 2 && s.stages <= sm90::kTiledStages &&
                      sm90::wide_shared_bytes(s.tokens, s.width, s.stages) <= kGatedShared &&
                      s.tokens * s.width <= s.stages * (s.tokens + s.width) * 128,
                  "linear_silu_mul: ", stages, " stages of ", tokens, "x", width, " in clusters of ", across, "x", down,
                  " are no kernel or do not fit");
  STD_TORCH_CHECK(o.m <= (1 << 16), "linear_silu_mul: too many rows");
  const DeviceGuard guard = on_device_of(x);
  const bool ran = try_launch<1, 1, 128>(s, o) || try_launch<1, 1, 192>(s, o) || try_launch<1, 1, 256>(s, o) ||
                   try_launch<2, 1, 128>(s, o) || try_launch<2, 1, 192>(s, o) || try_launch<2, 1, 256>(s, o) ||
                   try_launch<3, 1, 128>(s, o) || try_launch<3, 1, 192>(s, o) || try_launch<2, 2, 128>(s, o) ||
                   try_launch<2, 2, 192>(s, o);
  STD_TORCH_CHECK(ran, "linear_silu_mul: no kernel of tiles of ", tokens, "x", width);
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) { m.impl("linear_silu_mul_wide", TORCH_BOX(&vx::linear_silu_mul_wide)); }
