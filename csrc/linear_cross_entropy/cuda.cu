// archs: 90a
// Bindings and launches of linear_cross_entropy on SM90: bf16 alone, rows on 16-byte boundaries.
#include "common/cuda.h"
#include "common/tensor.h"
#include "linear_cross_entropy/sm90_head.cuh"
#include "linear_cross_entropy/sm90_small_m.cuh"

namespace vx {
namespace {

using bf16 = __nv_bfloat16;

// Pairs of tiles of rows that a product takes together; each was the fastest for the head of an 8B model.
constexpr int kHeadGroup = 8, kHiddenGroup = 8, kWeightGroup = 4;
// Tokens that the kernels for few of them take: of the logits; of the gradient of hidden.
constexpr int kSmallHead = 128, kSmallHidden = 1024;

const float* floats(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float && t.is_contiguous() && t.numel() >= size, name,
                  ": expected at least ", size, " contiguous float32 values");
  return static_cast<const float*>(data(t));
}
float* mutable_floats(const Tensor& t, const char* name, int64_t size) {
  floats(t, name, size);
  return static_cast<float*>(mutable_data(t));
}

// One number that the device knows, checked: null where there is none.
const int64_t* count_of(const std::optional<Tensor>& live) {
  if (!live) return nullptr;
  STD_TORCH_CHECK(live->scalar_type() == ScalarType::Long && live->numel() == 1, "live: expected one int64");
  return static_cast<const int64_t*>(data(*live));
}
const float* scale_of(const std::optional<Tensor>& scale) { return scale ? floats(*scale, "scale", 1) : nullptr; }

int small(int64_t size) {
  STD_TORCH_CHECK(size < (int64_t(1) << 31) - 1024, "linear_cross_entropy: a size of ", size, " is too large");
  return int(size);
}

void check_operand(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, name, ": expected bfloat16");
  check_2d(t, name, rows, columns);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && (rows <= 1 || t.stride(0) % 8 == 0), name,
                  ": rows must start on 16-byte boundaries");
}

CUtensorMap map_of(const void* data, int64_t x, int64_t y, int64_t y_stride, int64_t z = 1, int64_t z_stride = 0,
                   int box_y = 64) {
  CUtensorMap map;
  STD_TORCH_CHECK(sm90::gemm_map(&map, true, data, x, y, y_stride, z, z_stride, box_y),
                  "linear_cross_entropy: this driver makes no tensor map of these operands");
  return map;
}
CUtensorMap map_of(const Tensor& t) { return map_of(t.const_data_ptr(), t.size(1), t.size(0), t.stride(0)); }

// (chunks, tokens, chunk) in bf16, tokens adjacent in a chunk; `columns` of the vocabulary lie in it.
sm90::Chunks chunks_of(const Tensor& t, const char* name, int64_t tokens, int64_t columns) {
  STD_TORCH_CHECK(t.dim() == 3 && t.scalar_type() == ScalarType::BFloat16 && t.size(1) == tokens, name,
                  ": expected (chunks, ", tokens, ", chunk) in bfloat16");
  STD_TORCH_CHECK(t.size(2) % 256 == 0 && t.size(0) * t.size(2) >= columns && t.stride(2) == 1 &&
                      (tokens <= 1 || t.stride(1) == t.size(2)) && (t.size(0) <= 1 || t.stride(0) % 8 == 0) &&
                      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0,
                  name, ": unexpected layout");
  return {static_cast<bf16*>(t.mutable_data_ptr()), t.size(0) > 1 ? t.stride(0) : 0, small(t.size(2))};
}
CUtensorMap map_of(const sm90::Chunks& p, int64_t tokens, int64_t columns, int box_y = 64) {
  return map_of(p.data, p.chunk, tokens, p.chunk, (columns + p.chunk - 1) / p.chunk, p.chunk_stride, box_y);
}

struct Head {
  sm90::HeadArgs args;
  sm90::GemmArgs gemm;
  CUtensorMap hidden, weight;
};

// The logits [first, first + columns) of all tokens, or of those of them before *live - live_from.
Head head(const Tensor& hidden, const Tensor& weight, const Tensor& target, const Tensor& temperature, double softcap,
          int64_t first, int64_t columns, const std::optional<Tensor>& live, int64_t live_from) {
  const int64_t tokens = hidden.size(0), vocabulary = weight.size(0), width = hidden.size(1);
  check_operand(hidden, "hidden", tokens, width);
  check_operand(weight, "weight", vocabulary, width);
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long, "target: expected int64");
  check_1d(target, "target", tokens);
  STD_TORCH_CHECK(first >= 0 && first % 256 == 0 && columns > 0 && first + columns <= vocabulary && tokens > 0,
                  "linear_cross_entropy: no columns [", first, ", ", first + columns, ") of ", vocabulary);
  const bool one = temperature.numel() == 1;
  const float* t = floats(temperature, "temperature", one ? 1 : tokens);
  const auto* rows = static_cast<const bf16*>(data(weight)) + first * (vocabulary > 1 ? weight.stride(0) : 0);
  return {{static_cast<const int64_t*>(data(target)), t, float(softcap), one ? 0 : 1, small(tokens), small(columns),
           small(first), small(vocabulary)},
          {small(tokens), small(columns), small(width), kHeadGroup, 0, count_of(live), small(live_from)},
          map_of(hidden),
          map_of(rows, width, columns, vocabulary > 1 ? weight.stride(0) : 0)};
}

template <bool A_ACROSS, bool B_ACROSS, class Epilogue>
void run(const CUtensorMap& a, const CUtensorMap& b, const sm90::GemmArgs& g, const Epilogue& epilogue, const Tensor& on) {
  VX_CUDA_CHECK((sm90::gemm<bf16, A_ACROSS, B_ACROSS>(a, b, g, epilogue, on.get_device_index(), current_stream(on))));
}

template <class Epilogue>
void run(const Head& h, const Epilogue& epilogue, const Tensor& on) {
  if (h.gemm.m > kSmallHead) return run<false, false>(h.hidden, h.weight, h.gemm, epilogue, on);
  VX_CUDA_CHECK(sm90::small_m<bf16>(h.hidden, h.weight, h.gemm, epilogue, on.get_device_index(), current_stream(on)));
}

void head_blocks(Tensor hidden, Tensor weight, Tensor target, Tensor temperature, double softcap, int64_t first,
                 int64_t columns, std::optional<Tensor> live, int64_t live_from, std::optional<Tensor> parts,
                 std::optional<Tensor> target_logit, std::optional<Tensor> kept) {
  const Head h = head(hidden, weight, target, temperature, softcap, first, columns, live, live_from);
  const int64_t tokens = hidden.size(0), blocks = (weight.size(0) + sm90::kHeadBlock - 1) / sm90::kHeadBlock;
  STD_TORCH_CHECK((parts || kept) && bool(parts) == bool(target_logit), "head_blocks: nothing to write");
  float *parts_to = nullptr, *target_logit_to = nullptr;
  bool entropy = false;
  if (parts) {
    STD_TORCH_CHECK(parts->dim() == 3 && parts->size(2) == blocks, "parts: expected (tokens, 2 or 3, ", blocks, ")");
    entropy = parts->size(1) == 3;
    parts_to = mutable_floats(*parts, "parts", tokens * (entropy ? 3 : 2) * blocks);
    target_logit_to = mutable_floats(*target_logit, "target_logit", tokens);
  }
  STD_TORCH_CHECK(!entropy || !kept, "head_blocks: nothing is kept where the entropy is asked for");
  const sm90::Chunks to = kept ? chunks_of(*kept, "kept", tokens, columns) : sm90::Chunks{nullptr, 0, 256};
  const DeviceGuard guard = on_device_of(hidden);
  const int count = small(blocks);
  if (entropy)
    run(h, sm90::BlocksEpilogue<true, false>{h.args, parts_to, target_logit_to, to, count}, hidden);
  else if (kept)
    run(h, sm90::BlocksEpilogue<false, true>{h.args, parts_to, target_logit_to, to, count}, hidden);
  else
    run(h, sm90::BlocksEpilogue<false, false>{h.args, parts_to, target_logit_to, to, count}, hidden);
}

void head_gradients(Tensor hidden, Tensor weight, Tensor target, Tensor temperature, double softcap, int64_t first,
                    int64_t columns, std::optional<Tensor> live, Tensor lse, Tensor dlogprob,
                    std::optional<Tensor> dentropy, std::optional<Tensor> entropy, Tensor d) {
  const Head h = head(hidden, weight, target, temperature, softcap, first, columns, live, 0);
  const int64_t tokens = hidden.size(0);
  STD_TORCH_CHECK(!dentropy || entropy, "entropy: missing");
  const sm90::Chunks to = chunks_of(d, "d", tokens, columns);
  const float* sums = floats(lse, "lse", 2 * tokens);
  const float* up = floats(dlogprob, "dlogprob", tokens);
  const DeviceGuard guard = on_device_of(hidden);
  if (dentropy)
    run(h, sm90::GradientEpilogue<true>{h.args, sums, up, floats(*dentropy, "dentropy", tokens),
                                        floats(*entropy, "entropy", tokens), to}, hidden);
  else
    run(h, sm90::GradientEpilogue<false>{h.args, sums, up, nullptr, nullptr, to}, hidden);
}

void head_unit_gradients(Tensor kept, Tensor parts, Tensor lse, Tensor logprob, Tensor target,
                         std::optional<Tensor> live, int64_t first, int64_t columns) {
  const int64_t tokens = target.size(0);
  STD_TORCH_CHECK(parts.dim() == 3 && parts.size(1) == 2, "parts: expected (tokens, 2, blocks)");
  const int64_t blocks = parts.size(2);
  STD_TORCH_CHECK(target.scalar_type() == ScalarType::Long, "target: expected int64");
  check_1d(target, "target", tokens);
  STD_TORCH_CHECK(first >= 0 && first % 256 == 0 && columns > 0 && first + columns <= blocks * sm90::kHeadBlock &&
                      tokens > 0, "head_unit_gradients: no such columns");
  const sm90::Chunks at = chunks_of(kept, "kept", tokens, columns);
  const float *of_parts = floats(parts, "parts", tokens * 2 * blocks), *of_lse = floats(lse, "lse", 2 * tokens),
              *of_logprob = floats(logprob, "logprob", tokens);
  const DeviceGuard guard = on_device_of(kept);
  const dim3 grid(small((tokens + sm90::kUnitRows - 1) / sm90::kUnitRows), small((columns + 2047) / 2048));
  STD_TORCH_CHECK(grid.y < 65536, "head_unit_gradients: too many columns");
  sm90::unit_gradients_kernel<<<grid, 256, 0, current_stream(kept)>>>(
      at, of_parts, of_lse, of_logprob, static_cast<const int64_t*>(data(target)), count_of(live), small(tokens),
      small(columns), small(first), small(blocks));
  VX_CUDA_CHECK(cudaGetLastError());
}

// The fp32 to start from, checked: null where there is none.
const float* start_of(const std::optional<Tensor>& start, int64_t rows, int64_t columns) {
  if (!start) return nullptr;
  check_2d(*start, "start", rows, columns);
  return floats(*start, "start", rows * columns);
}

template <bool A_ACROSS, bool RESUME>
void product_to(const CUtensorMap& a, const CUtensorMap& b, const sm90::GemmArgs& g, const float* start,
                const Tensor& out, const float* scale, const float* factor = nullptr) {
  STD_TORCH_CHECK(out.is_contiguous() && reinterpret_cast<uintptr_t>(out.const_data_ptr()) % 16 == 0,
                  "out: expected contiguous, on a 16-byte boundary");
  void* to = mutable_data(out);
  if (out.scalar_type() == ScalarType::Float)
    run<A_ACROSS, true>(a, b, g, sm90::ProductEpilogue<float, RESUME>{start, static_cast<float*>(to), g.m, g.n, scale, nullptr}, out);
  else
    run<A_ACROSS, true>(a, b, g, sm90::ProductEpilogue<bf16, RESUME>{start, static_cast<bf16*>(to), g.m, g.n, scale, factor}, out);
}

void small_dhidden(const sm90::Chunks& d, const Tensor& weight, const float* start, const float* scale,
                   const std::optional<Tensor>& live, const Tensor& out, int processors) {
  const int64_t tokens = out.size(0), width = out.size(1), columns = weight.size(0);
  int tile = 8;
  while (tile < 128 && 2 * tile < tokens) tile *= 2;
  const int groups = tokens > 256 || (tile == 128 && 2 * ((width + 63) / 64) > processors) ? 2 : 1;
  const int pairs = int((tokens + 2 * tile - 1) / (2 * tile));
  const sm90::DhiddenArgs a{start, scale, count_of(live), small(tokens), small(width), small(columns), d.chunk, pairs};
  const CUtensorMap d_map = map_of(d, tokens, columns, tile), weight_map = map_of(weight);
  const auto stream = current_stream(out);
  STD_TORCH_CHECK(out.is_contiguous(), "out: expected contiguous");
  void* to = mutable_data(out);
  if (out.scalar_type() == ScalarType::Float)
    VX_CUDA_CHECK(sm90::small_m_dhidden(d_map, weight_map, a, groups, tile, static_cast<float*>(to), stream));
  else
    VX_CUDA_CHECK(sm90::small_m_dhidden(d_map, weight_map, a, groups, tile, static_cast<bf16*>(to), stream));
}

// out (tokens, width) = start + d weight, times scale. Of the rows before *live, where that is given.
void head_dhidden(Tensor d, Tensor weight, std::optional<Tensor> start, std::optional<Tensor> scale,
                  std::optional<Tensor> live, Tensor out) {
  const int64_t tokens = d.size(1), columns = weight.size(0), width = weight.size(1);
  check_operand(weight, "weight", columns, width);
  check_2d(out, "out", tokens, width);
  STD_TORCH_CHECK(out.scalar_type() == ScalarType::Float || out.scalar_type() == ScalarType::BFloat16, "out: float32 or bfloat16");
  STD_TORCH_CHECK(width % 8 == 0 && tokens > 0 && columns > 0, "head_dhidden: unexpected sizes");
  const sm90::Chunks from = chunks_of(d, "d", tokens, columns);
  const float* first = start_of(start, tokens, width);
  const DeviceGuard guard = on_device_of(out);
  const float* by = scale_of(scale);
  int processors = 0;
  VX_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, out.get_device_index()));
  // Tiles of all sizes take as many steps: where large ones leave half of the multiprocessors idle, small ones are faster.
  if (tokens <= kSmallHidden && 2 * ((tokens + 255) / 256) * ((width + 255) / 256) <= processors / 2)
    return small_dhidden(from, weight, first, by, live, out, processors);
  const sm90::GemmArgs g{small(tokens), small(width), small(columns), kHiddenGroup, from.chunk, count_of(live)};
  const CUtensorMap a = map_of(from, tokens, columns), b = map_of(weight);
  first ? product_to<false, true>(a, b, g, first, out, by) : product_to<false, false>(a, b, g, nullptr, out, by);
}

// out (columns, width) = d^T hidden, times scale, rounded; where a factor is given times that and rounded again. Tokens
// from *live on, where that is given, hold zeros in both.
void head_dweight(Tensor d, Tensor hidden, std::optional<Tensor> scale, std::optional<Tensor> factor,
                  std::optional<Tensor> live, Tensor out) {
  const int64_t tokens = d.size(1), columns = out.size(0), width = hidden.size(1);
  check_operand(hidden, "hidden", tokens, width);
  check_operand(out, "out", columns, width);
  STD_TORCH_CHECK(width % 8 == 0 && tokens > 0 && columns > 0, "head_dweight: unexpected sizes");
  const sm90::Chunks from = chunks_of(d, "d", tokens, columns);
  const DeviceGuard guard = on_device_of(out);
  const sm90::GemmArgs g{small(columns), small(width), small(tokens), kWeightGroup, from.chunk, nullptr, 0, count_of(live)};
  product_to<true, false>(map_of(from, tokens, columns), map_of(hidden), g, nullptr, out, scale_of(scale),
                          factor ? floats(*factor, "factor", 1) : nullptr);
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("head_blocks", TORCH_BOX(&vx::head_blocks));
  m.impl("head_gradients", TORCH_BOX(&vx::head_gradients));
  m.impl("head_unit_gradients", TORCH_BOX(&vx::head_unit_gradients));
  m.impl("head_dhidden", TORCH_BOX(&vx::head_dhidden));
  m.impl("head_dweight", TORCH_BOX(&vx::head_dweight));
}
