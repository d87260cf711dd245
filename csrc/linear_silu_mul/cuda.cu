// archs: 90a
// Bindings and launches of linear_silu_mul on SM90: bf16 and fp16, few rows, on 16-byte boundaries.
#include <type_traits>

#include "linear_silu_mul/kernels.h"
#include "linear_silu_mul/sm90_gated.cuh"

namespace vx {
namespace {

// A kernel by its sizes: what linear's sm90_skinny.cuh calls them.
struct GatedSizes {
  int rows;    // of the weight in a tile, gates and ups together: a multiple of 16 up to 128
  int tokens;  // rows of x in a tile, of which with `boxes` there is a kernel (skinny_exists)
  int boxes, stages, ahead, lead;
  int per_sm;  // persistent blocks of a multiprocessor; 0: a block for each tile
};

template <class T, int TOKENS, int BOXES, int PARTS>
void launch(const GatedSizes& s, const GatedOperands& o, const Sending& sending) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  auto kernel = sm90::skinny_kernel<T, TOKENS, BOXES, PARTS, sm90::GatedEpilogue<T>, sm90::PairedRows>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kGatedShared, o.device, allowed);
  const int x_rows = std::min(TOKENS, (o.m + 7) / 8 * 8);
  CUtensorMap weight_map, x_map;
  STD_TORCH_CHECK(sm90::paired_map(&weight_map, kIsBf16, o.weight, o.n / 2, o.k, o.weight_ld, s.rows) &&
                      sm90::box_map(&x_map, kIsBf16, o.x, o.m, o.k, o.x_ld, x_rows, sm90::kBoxK),
                  "linear_silu_mul: this driver makes no tensor map of these operands");
  int processors = 0;
  if (s.per_sm) VX_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, o.device));
  const int tiles = (o.n + s.rows - 1) / s.rows;
  const dim3 grid(s.per_sm ? std::min(tiles, s.per_sm * processors) : tiles, (o.m + TOKENS - 1) / TOKENS);
  STD_TORCH_CHECK(grid.y < 65536, "linear_silu_mul: too many rows");
  const sm90::SkinnyArgs args{nullptr, o.out, o.out_ld, o.m, o.n, o.k, s.rows, x_rows, s.stages, s.ahead, s.lead, false};
  const int bytes = sm90::skinny_shared_bytes(s.rows, TOKENS, BOXES, s.stages);
  VX_CUDA_CHECK(sm90::launch_chained(kernel, grid, sm90::kSkinnyThreads, bytes, o.stream, weight_map, x_map, args,
                                     sm90::GatedEpilogue<T>{o.gelu, sending}));
}

// bases: to which ranks' memory columns are sent, instead of to out.
void linear_silu_mul_few(Tensor x, Tensor weight, bool gelu, int64_t rows, int64_t tokens, int64_t boxes, int64_t stages,
                         int64_t ahead, int64_t lead, int64_t per_sm, Tensor out, std::optional<Tensor> bases,
                         int64_t rank) {
  const GatedOperands o = gated_operands(x, weight, gelu, out);
  const GatedSizes s{small(rows), small(tokens), small(boxes), small(stages), small(ahead), small(lead), small(per_sm)};
  STD_TORCH_CHECK(sm90::skinny_exists(s.tokens, s.boxes) && s.rows >= 16 && s.rows <= 128 && s.rows % 16 == 0 &&
                      s.stages >= 2 && s.stages <= sm90::kSkinnyStages && s.per_sm <= 8 &&
                      sm90::skinny_shared_bytes(s.rows, s.tokens, s.boxes, s.stages) <= kGatedShared,
                  "linear_silu_mul: ", stages, " stages of ", rows, "x", tokens, "x", 64 * boxes, " are no kernel or do not fit");
  const Sending sending = Sending::of(bases, rank);
  STD_TORCH_CHECK(!sending.ranks || int64_t(o.m) * (o.n / 8) <= kSent, "linear_silu_mul: (", o.m, ", ", o.n / 2,
                  ") are too many lines");
  const DeviceGuard guard = on_device_of(x);
  sm90::for_skinny(s.tokens, s.boxes, [&](auto t, auto b) {
    if (o.is_bf16)
      s.rows > 64 ? launch<__nv_bfloat16, t(), b(), 2>(s, o, sending) : launch<__nv_bfloat16, t(), b(), 1>(s, o, sending);
    else
      s.rows > 64 ? launch<__half, t(), b(), 2>(s, o, sending) : launch<__half, t(), b(), 1>(s, o, sending);
  });
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) { m.impl("linear_silu_mul_few", TORCH_BOX(&vx::linear_silu_mul_few)); }
