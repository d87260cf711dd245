#include "common/tensor.h"
#include "sampler/kernels.h"

namespace vx {
namespace {

const Tensor& column(const Tensor& t, const char* name, int64_t rows, ScalarType dtype) {
  check_1d(t, name, rows);
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": unexpected dtype");
  return t;
}

void sample(Tensor logits, Tensor seeds, Tensor positions, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
            Tensor ids, Tensor logprobs, Tensor raw_logprobs) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  check_2d(logits, "logits", rows, n);
  STD_TORCH_CHECK(logits.scalar_type() == ScalarType::Float && n > 0 && n < (int64_t(1) << 31),
                  "logits: expected float32 with 1 to 2^31 - 1 columns");
  auto floats = [&](const Tensor& t, const char* name) {
    return static_cast<const float*>(data(column(t, name, rows, ScalarType::Float)));
  };
  auto longs = [&](const Tensor& t, const char* name) {
    return static_cast<const int64_t*>(data(column(t, name, rows, ScalarType::Long)));
  };
  column(ids, "ids", rows, ScalarType::Long);
  column(logprobs, "logprobs", rows, ScalarType::Float);
  column(raw_logprobs, "raw_logprobs", rows, ScalarType::Float);
  VX_CALL(sample, {rows, n, static_cast<const float*>(data(logits)), logits.stride(0), longs(seeds, "seeds"),
                   longs(positions, "positions"), floats(temperature, "temperature"), longs(top_k, "top_k"),
                   floats(top_p, "top_p"), floats(min_p, "min_p"), static_cast<int64_t*>(mutable_data(ids)),
                   static_cast<float*>(mutable_data(logprobs)), static_cast<float*>(mutable_data(raw_logprobs))});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) { m.impl("sample", TORCH_BOX(&vx::sample)); }
