// archs: 90a
// Binding and launches of linear_silu_mul on SM90 for more rows than cuda.cu takes: bf16 and fp16, on 16-byte boundaries.
#include <type_traits>

#include "linear_silu_mul/kernels.h"
#include "linear_silu_mul/sm90_wide.cuh"

namespace vx {
namespace {

struct WideSizes {
  int tokens, width;  // rows of x and of the weight in a tile
  int stages;         // of the ring
};

template <class T, int TOKENS, int WIDTH>
void launch(const WideSizes& s, const GatedOperands& o) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  constexpr int kGroups = WIDTH / 64;
  auto kernel = sm90::wide_kernel<T, kGroups, TOKENS>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kGatedShared, o.device, allowed);
  const int token_tiles = (o.m + TOKENS - 1) / TOKENS, weight_tiles = (o.n + WIDTH - 1) / WIDTH;
  const int x_rows = token_tiles == 1 ? (o.m + 7) / 8 * 8 : TOKENS;
  CUtensorMap weight_map, x_map, out_map;
  STD_TORCH_CHECK(sm90::paired_map(&weight_map, kIsBf16, o.weight, o.n / 2, o.k, o.weight_ld, WIDTH) &&
                      sm90::box_map(&x_map, kIsBf16, o.x, o.m, o.k, o.x_ld, x_rows, sm90::kTiledDepth) &&
                      sm90::wide_out_map(&out_map, kIsBf16, o.out, o.m, o.n / 2, o.out_ld),
                  "linear_silu_mul: this driver makes no tensor map of these operands");
  const sm90::WideArgs args{o.k, token_tiles, x_rows, s.stages, o.gelu};
  VX_CUDA_CHECK(sm90::launch_chained(kernel, dim3(unsigned(weight_tiles) * token_tiles), sm90::wide_threads(kGroups),
                                     sm90::wide_shared_bytes(TOKENS, WIDTH, s.stages), o.stream, weight_map, x_map, out_map,
                                     args));
}

template <int TOKENS, int WIDTH>
bool try_launch(const WideSizes& s, const GatedOperands& o) {
  if (s.tokens != TOKENS || s.width != WIDTH) return false;
  o.is_bf16 ? launch<__nv_bfloat16, TOKENS, WIDTH>(s, o) : launch<__half, TOKENS, WIDTH>(s, o);
  return true;
}

void linear_silu_mul_wide(Tensor x, Tensor weight, bool gelu, int64_t tokens, int64_t width, int64_t stages, Tensor out) {
  const GatedOperands o = gated_operands(x, weight, gelu, out);
  const WideSizes s{small(tokens), small(width), small(stages)};
  // what a group has made leaves through its rows of the first two stages
  STD_TORCH_CHECK(s.tokens <= 256 && s.width <= 192 && s.stages >= 2 && s.stages <= sm90::kTiledStages &&
                      sm90::wide_shared_bytes(s.tokens, s.width, s.stages) <= kGatedShared,
                  "linear_silu_mul: ", stages, " stages of ", tokens, "x", width, " are no kernel or do not fit");
  STD_TORCH_CHECK(o.m <= (1 << 16), "linear_silu_mul: too many rows");
  const DeviceGuard guard = on_device_of(x);
  const bool ran = try_launch<64, 128>(s, o) || try_launch<64, 192>(s, o) || try_launch<128, 128>(s, o) ||
                   try_launch<128, 192>(s, o) || try_launch<192, 128>(s, o) || try_launch<192, 192>(s, o) ||
                   try_launch<256, 128>(s, o) || try_launch<256, 192>(s, o);
  STD_TORCH_CHECK(ran, "linear_silu_mul: no kernel of tiles of ", tokens, "x", width);
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) { m.impl("linear_silu_mul_wide", TORCH_BOX(&vx::linear_silu_mul_wide)); }
