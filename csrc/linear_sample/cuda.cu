// archs: 90a
// Bindings and launches of linear_sample on SM90: bf16 alone, rows on 16-byte boundaries.
#include "common/cuda.h"
#include "common/tensor.h"
#include "linear_sample/sm90_few.cuh"
#include "linear_sample/sm90_join.cuh"
#include "linear_sample/sm90_overlapped.cuh"

namespace vx {
namespace {

using bf16 = __nv_bfloat16;

constexpr int kFewShared = 224 * 1024;  // bytes of a ring, beside what lies outside of it

int small(int64_t size) {
  STD_TORCH_CHECK(size < (int64_t(1) << 31) - 1024, "linear_sample: a size of ", size, " is too large");
  return int(size);
}

void check_operand(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, name, ": expected bfloat16");
  check_2d(t, name, rows, columns);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && (rows <= 1 || t.stride(0) % 8 == 0), name,
                  ": rows must start on 16-byte boundaries");
}
int64_t apart(const Tensor& t) { return t.size(0) > 1 ? t.stride(0) : (t.size(1) + 7) / 8 * 8; }

template <class T>
const T* column(const Tensor& t, const char* name, ScalarType type, int64_t rows) {
  STD_TORCH_CHECK(t.scalar_type() == type, name, ": unexpected dtype");
  check_1d(t, name, rows);
  return static_cast<const T*>(data(t));
}
template <class T>
T* block_numbers(const Tensor& t, const char* name, ScalarType type, int64_t size) {
  STD_TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() && t.numel() == size, name, ": expected ", size,
                  " contiguous values");
  return static_cast<T*>(mutable_data(t));
}

Draws draws(const Tensor& hidden, const Tensor& weight, const Tensor& seeds, const Tensor& positions,
            const Tensor& temperature, double softcap, const Tensor& parts, const Tensor& entries, const Tensor& tokens,
            const std::optional<Tensor>& known = std::nullopt) {
  const int64_t rows = hidden.size(0), vocabulary = weight.size(0), width = hidden.size(1);
  check_operand(hidden, "hidden", rows, width);
  check_operand(weight, "weight", vocabulary, width);
  STD_TORCH_CHECK(rows > 0 && vocabulary > 0 && width > 0, "linear_sample: nothing to compute");
  const int64_t blocks = (vocabulary + kDrawBlock - 1) / kDrawBlock;
  small(width);
  return {column<int64_t>(seeds, "seeds", ScalarType::Long, rows),
          column<int64_t>(positions, "positions", ScalarType::Long, rows),
          column<float>(temperature, "temperature", ScalarType::Float, rows),
          float(softcap),
          small(rows),
          small(vocabulary),
          small(blocks),
          block_numbers<float>(parts, "parts", ScalarType::Float, rows * 4 * blocks),
          block_numbers<float>(entries, "entries", ScalarType::Float, rows * 2 * blocks),
          block_numbers<int>(tokens, "tokens", ScalarType::Int, rows * blocks),
          known ? block_numbers<unsigned long long>(*known, "known", ScalarType::Long, rows) : nullptr};
}

// Before the first block of logits nothing is known. Behind a memset no kernel would be brought up before its time.
__global__ void forget_kernel(unsigned long long* known, int rows) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  sm90::let_kernel_after_start();
  sm90::wait_for_kernel_before();
  for (int row = threadIdx.x; row < rows; row += blockDim.x) known[row] = 0;
#endif
}
void forget(const Draws& a, cudaStream_t stream) {
  if (a.known) VX_CUDA_CHECK(sm90::launch_chained(forget_kernel, dim3(1), 256, 0, stream, a.known, a.rows));
}

// cluster: blocks that share what they read of the weight; boxes: boxes of up to 64 rows that each of them takes at once.
void draw_overlapped(Tensor hidden, Tensor weight, Tensor seeds, Tensor positions, Tensor temperature, double softcap,
                     int64_t cluster, int64_t boxes, Tensor parts, Tensor entries, Tensor tokens, std::optional<Tensor> known) {
  const Draws a = draws(hidden, weight, seeds, positions, temperature, softcap, parts, entries, tokens, known);
  const int width = int(hidden.size(1)), device = hidden.get_device_index();
  const auto run = cluster == 1 && boxes == 1   ? &sm90::overlapped<1, 1>
                   : cluster == 1 && boxes == 2 ? &sm90::overlapped<1, 2>
                   : cluster == 2 && boxes == 2 ? &sm90::overlapped<2, 2>
                                                 : nullptr;
  STD_TORCH_CHECK(run, "draw_overlapped: no kernel with clusters of ", cluster, " and ", boxes, " boxes of rows");
  // Boxes of equal rows, in eights: rows of a box that are not there take longer than others.
  const int each = int(cluster * boxes), count = (a.rows + 64 * each - 1) / (64 * each) * each;
  const int box_rows = (a.rows + 8 * count - 1) / (8 * count) * 8;
  CUtensorMap rows_map, weight_map;
  STD_TORCH_CHECK(sm90::gemm_map(&rows_map, true, data(hidden), width, a.rows, apart(hidden), 1, 0, box_rows) &&
                      sm90::gemm_map(&weight_map, true, data(weight), width, a.vocabulary, apart(weight), 1, 0),
                  "linear_sample: this driver makes no tensor map of these operands");
  const DeviceGuard guard = on_device_of(hidden);
  forget(a, current_stream(hidden));
  VX_CUDA_CHECK(run(rows_map, weight_map, a.rows, a.vocabulary, width, box_rows, a, device, current_stream(hidden)));
}

struct Few {
  int tokens, boxes, stages, ahead, lead, per_sm;

  template <int TOKENS, int BOXES>
  void launch(const Draws& a, const Tensor& hidden, const Tensor& weight) const {
    auto kernel = sm90::skinny_kernel<bf16, TOKENS, BOXES, 2, sm90::FewEpilogue>;
    const int device = hidden.get_device_index(), bytes = sm90::skinny_shared_bytes(kDrawBlock, TOKENS, BOXES, stages);
    STD_TORCH_CHECK(stages >= 2 && stages <= sm90::kSkinnyStages && bytes <= kFewShared && ahead >= 0 && lead >= 0 && per_sm > 0,
                    "draw_few: no such kernel");
    static std::atomic<uint64_t> allowed{0};
    allow_shared_memory(kernel, kFewShared, device, allowed);
    int processors = 0;
    VX_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
    const int x_rows = std::min(TOKENS, (a.rows + 7) / 8 * 8), width = int(hidden.size(1));
    CUtensorMap weight_map, x_map;
    STD_TORCH_CHECK(sm90::box_map(&weight_map, true, data(weight), a.vocabulary, width, apart(weight), kDrawBlock, sm90::kBoxK) &&
                        sm90::box_map(&x_map, true, data(hidden), a.rows, width, apart(hidden), x_rows, sm90::kBoxK),
                    "linear_sample: this driver makes no tensor map of these operands");
    const dim3 grid(std::min(a.blocks, per_sm * processors), (a.rows + TOKENS - 1) / TOKENS);
    STD_TORCH_CHECK(grid.y < 65536, "draw_few: too many rows");
    const sm90::SkinnyArgs args{nullptr, nullptr, 0, a.rows, a.vocabulary, width, kDrawBlock, x_rows, stages, ahead, lead, true};
    VX_CUDA_CHECK(sm90::launch_chained(kernel, grid, sm90::kSkinnyThreads, bytes, current_stream(hidden), weight_map, x_map,
                                       args, sm90::FewEpilogue{a}));
  }
};

void draw_few(Tensor hidden, Tensor weight, Tensor seeds, Tensor positions, Tensor temperature, double softcap,
              int64_t rows, int64_t boxes, int64_t stages, int64_t ahead, int64_t lead, int64_t per_sm, Tensor parts,
              Tensor entries, Tensor tokens) {
  const Draws a = draws(hidden, weight, seeds, positions, temperature, softcap, parts, entries, tokens);
  const Few few{small(rows), small(boxes), small(stages), small(ahead), small(lead), small(per_sm)};
  const DeviceGuard guard = on_device_of(hidden);
#define CASE(t, b) \
  if (rows == t && boxes == b) return few.launch<t, b>(a, hidden, weight)
  CASE(8, 1);
  CASE(8, 2);
#undef CASE
  STD_TORCH_CHECK(false, "draw_few: no kernel for ", rows, " rows and ", boxes, " boxes");
}

void draw_join(Tensor parts, Tensor entries, Tensor tokens, Tensor temperature, Tensor ids, Tensor logprobs,
               Tensor raw_logprobs) {
  STD_TORCH_CHECK(tokens.dim() == 2 && tokens.size(0) > 0 && tokens.size(1) > 0, "tokens: expected (rows, blocks)");
  Draws a{};
  a.rows = small(tokens.size(0)), a.blocks = small(tokens.size(1));
  const int64_t rows = a.rows, blocks = a.blocks;
  a.temperature = column<float>(temperature, "temperature", ScalarType::Float, rows);
  a.parts = block_numbers<float>(parts, "parts", ScalarType::Float, rows * 4 * blocks);
  a.entries = block_numbers<float>(entries, "entries", ScalarType::Float, rows * 2 * blocks);
  a.tokens = block_numbers<int>(tokens, "tokens", ScalarType::Int, rows * blocks);
  const sm90::Drawn drawn{block_numbers<int64_t>(ids, "ids", ScalarType::Long, rows),
                          block_numbers<float>(logprobs, "logprobs", ScalarType::Float, rows),
                          block_numbers<float>(raw_logprobs, "raw_logprobs", ScalarType::Float, rows)};
  const DeviceGuard guard = on_device_of(parts);
  VX_CUDA_CHECK(sm90::launch_chained(sm90::join_kernel, dim3(unsigned(rows)), sm90::kJoinThreads, 0, current_stream(parts), a,
                                     drawn));
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("draw_overlapped", TORCH_BOX(&vx::draw_overlapped));
  m.impl("draw_few", TORCH_BOX(&vx::draw_few));
  m.impl("draw_join", TORCH_BOX(&vx::draw_join));
}
