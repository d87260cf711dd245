#include "common/box.h"
#include "common/values.h"
#include "sampler/kernels.h"

namespace vx {
namespace {

template <class T>
const T* column(const Tensor& t, const char* name, int64_t rows) {
  check_1d(t, name, rows);
  return values<T>(t, name);
}
template <class T>
T* mutable_column(const Tensor& t, const char* name, int64_t rows) {
  check_1d(t, name, rows);
  return mutable_values<T>(t, name);
}

void sample(Tensor logits, Tensor seeds, Tensor positions, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
            Tensor ids, Tensor logprobs, Tensor raw_logprobs) {
  const int64_t rows = logits.size(0), n = logits.size(1);
  check_2d(logits, "logits", rows, n);
  STD_TORCH_CHECK(n > 0 && n < (int64_t(1) << 31), "logits: expected 1 to 2^31 - 1 columns");
  VX_CALL(sample, {rows, n, values<float>(logits, "logits"), logits.stride(0), column<int64_t>(seeds, "seeds", rows),
                   column<int64_t>(positions, "positions", rows), column<float>(temperature, "temperature", rows),
                   column<int64_t>(top_k, "top_k", rows), column<float>(top_p, "top_p", rows),
                   column<float>(min_p, "min_p", rows), mutable_column<int64_t>(ids, "ids", rows),
                   mutable_column<float>(logprobs, "logprobs", rows),
                   mutable_column<float>(raw_logprobs, "raw_logprobs", rows)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) { m.impl("sample", VX_BOX(&vx::sample)); }
