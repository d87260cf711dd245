// archs: 90a
// Bindings and launches of linear_silu_mul on SM90: bf16 and fp16, few rows, on 16-byte boundaries.
#include <type_traits>

#include "common/cuda.h"
#include "common/tensor.h"
#include "linear_silu_mul/kernels.h"
#include "linear_silu_mul/sm90_gated.cuh"

namespace vx {
namespace {

constexpr int kShared = 226 * 1024;

int small(int64_t size) {
  STD_TORCH_CHECK(size >= 0 && size < (int64_t(1) << 31) - 1024, "linear_silu_mul: a size of ", size, " is out of range");
  return int(size);
}

int64_t check_operand(const Tensor& t, const char* name, ScalarType type, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.scalar_type() == type, name, ": expected x's dtype");
  check_2d(t, name, rows, columns);
  const int64_t apart = rows > 1 ? t.stride(0) : (columns + 7) / 8 * 8;
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && apart % 8 == 0 && apart >= columns, name,
                  ": rows must start on 16-byte boundaries, and not overlap");
  return apart;
}

template <class T, int TOKENS, int BOXES, int PARTS>
void launch(const GatedSizes& s, const Tensor& x, const Tensor& weight, bool gelu, const Tensor& out, int64_t x_ld,
            int64_t weight_ld) {
  constexpr bool kIsBf16 = std::is_same_v<T, __nv_bfloat16>;
  auto kernel = sm90::skinny_kernel<T, TOKENS, BOXES, PARTS, sm90::GatedEpilogue<T>, sm90::PairedRows>;
  const int m = int(x.size(0)), k = int(x.size(1)), n = int(weight.size(0)), device = x.get_device_index();
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kShared, device, allowed);
  const int x_rows = std::min(TOKENS, (m + 7) / 8 * 8);
  CUtensorMap weight_map, x_map;
  STD_TORCH_CHECK(sm90::paired_map(&weight_map, kIsBf16, data(weight), n / 2, k, weight_ld, s.rows) &&
                      sm90::box_map(&x_map, kIsBf16, data(x), m, k, x_ld, x_rows, sm90::kBoxK),
                  "linear_silu_mul: this driver makes no tensor map of these operands");
  int processors = 0;
  if (s.per_sm) VX_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  const int tiles = (n + s.rows - 1) / s.rows;
  const dim3 grid(s.per_sm ? std::min(tiles, s.per_sm * processors) : tiles, (m + TOKENS - 1) / TOKENS);
  STD_TORCH_CHECK(grid.y < 65536, "linear_silu_mul: too many rows");
  const int64_t out_ld = m > 1 ? out.stride(0) : n / 2;
  const sm90::SkinnyArgs args{nullptr, mutable_data(out), out_ld, m, n, k, s.rows, x_rows, s.stages, s.ahead, s.lead, false};
  const int bytes = sm90::skinny_shared_bytes(s.rows, TOKENS, BOXES, s.stages);
  VX_CUDA_CHECK(sm90::launch_chained(kernel, grid, sm90::kSkinnyThreads, bytes, current_stream(x), weight_map, x_map, args,
                                     sm90::GatedEpilogue<T>{gelu}));
}

void linear_silu_mul_few(Tensor x, Tensor weight, bool gelu, int64_t rows, int64_t tokens, int64_t boxes, int64_t stages,
                         int64_t ahead, int64_t lead, int64_t per_sm, Tensor out) {
  const ScalarType type = x.scalar_type();
  const bool is_bf16 = type == ScalarType::BFloat16;
  STD_TORCH_CHECK(is_bf16 || type == ScalarType::Half, "x: expected bfloat16 or float16");
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 2, "x, weight: expected 2 dimensions");
  const int64_t m = x.size(0), k = x.size(1), n = weight.size(0);
  small(m), small(k), small(n);
  STD_TORCH_CHECK(m > 0 && k > 0 && n > 0 && n % 16 == 0, "linear_silu_mul: no kernel for (", m, ", ", k, ") by (", n, ", ", k, ")");
  const int64_t x_ld = check_operand(x, "x", type, m, k), weight_ld = check_operand(weight, "weight", type, n, k);
  STD_TORCH_CHECK(out.scalar_type() == type, "out: expected x's dtype");
  check_2d(out, "out", m, n / 2);
  STD_TORCH_CHECK(weight.get_device_index() == x.get_device_index() && out.get_device_index() == x.get_device_index(),
                  "linear_silu_mul: x, weight and out: expected one device");
  const GatedSizes s{small(rows), small(tokens), small(boxes), small(stages), small(ahead), small(lead), small(per_sm)};
  STD_TORCH_CHECK(s.rows >= 16 && s.rows <= 128 && s.rows % 16 == 0 && s.tokens <= 64 && s.boxes <= 8 && s.stages >= 2 &&
                      s.stages <= sm90::kSkinnyStages && s.per_sm <= 8 &&
                      sm90::skinny_shared_bytes(s.rows, s.tokens, s.boxes, s.stages) <= kShared,
                  "linear_silu_mul: ", stages, " stages of ", rows, "x", tokens, "x", 64 * boxes, " are no kernel or do not fit");
  const DeviceGuard guard = on_device_of(x);
#define LAUNCH(T, t, b) \
  return s.rows > 64 ? launch<T, t, b, 2>(s, x, weight, gelu, out, x_ld, weight_ld) \
                     : launch<T, t, b, 1>(s, x, weight, gelu, out, x_ld, weight_ld)
#define CASE(t, b)                      \
  if (tokens == t && boxes == b) {      \
    if (is_bf16) LAUNCH(__nv_bfloat16, t, b); \
    LAUNCH(__half, t, b);               \
  }
  CASE(8, 2)
  CASE(8, 4)
  CASE(8, 8)
  CASE(16, 2)
  CASE(16, 4)
  CASE(16, 8)
  CASE(32, 2)
  CASE(32, 4)
  CASE(64, 2)
#undef CASE
#undef LAUNCH
  STD_TORCH_CHECK(false, "linear_silu_mul: no kernel ", rows, "x", tokens, "x", 64 * boxes);
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) { m.impl("linear_silu_mul_few", TORCH_BOX(&vx::linear_silu_mul_few)); }
