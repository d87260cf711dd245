// archs: 90a
// Binding and launch of grouped_linear's kernel for few rows per expert.
#include <atomic>

#include "common/counters.h"
#include "common/cuda.h"
#include "common/tensor.h"
#include "grouped_linear/sm90_small_m.cuh"

namespace vx {
namespace {

constexpr int kShared = 226 * 1024;  // of one SM90 multiprocessor

struct SmallM {
  sm90::SmallMArgs args;
  CUtensorMap map;
  int device, blocks;  // blocks on a multiprocessor
  int shared() const { return blocks == 1 ? kShared : (kShared / blocks - 1024) / 1024 * 1024; }
};

template <class T, bool PAIRED, int GROUPS, int BOXES>
bool launch(SmallM& f, cudaStream_t stream) {
  f.args.ring = f.shared() - sm90::small_m_table(f.args.experts) - 1024;
  if (f.args.ring < 2 * sm90::small_m_stage(GROUPS, BOXES)) return false;
  auto kernel = sm90::small_m_kernel<T, PAIRED, GROUPS, BOXES>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kShared, f.device, allowed);
  int processors = 0;
  VX_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, f.device));
  if (f.args.percent < 100) f.args.counter = Counters::of(stream, f.device);
  VX_CUDA_CHECK(sm90::launch_chained(kernel, dim3(processors * f.blocks), sm90::small_m_threads(GROUPS), f.shared(), stream,
                                     f.map, f.args));
  return true;
}

template <class T, bool PAIRED>
bool dispatch(SmallM& f, int64_t groups, int64_t boxes, cudaStream_t stream) {
  if (groups == 1 && boxes == 2) return launch<T, PAIRED, 1, 2>(f, stream);
  if (groups == 1 && boxes == 4) return launch<T, PAIRED, 1, 4>(f, stream);
  if (groups == 2 && boxes == 2) return launch<T, PAIRED, 2, 2>(f, stream);
  if (groups == 4 && boxes == 2) return launch<T, PAIRED, 4, 2>(f, stream);
  STD_TORCH_CHECK(false, "grouped_small_m: no kernel of ", groups, " groups and ", boxes, " boxes");
}

bool aligned(const Tensor& t) { return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0; }

// activation: -1 none; 0 silu, 1 gelu_tanh of the first half of the columns times the second.
// False, with nothing launched, where the kernel does not take these tensors. Any values of offsets and order are safe.
bool grouped_small_m(Tensor x, Tensor weight, Tensor offsets, std::optional<Tensor> order, int64_t top_k, int64_t activation,
                 int64_t groups, int64_t boxes, int64_t blocks, int64_t percent, int64_t piece, Tensor out) {
  STD_TORCH_CHECK(x.dim() == 2 && weight.dim() == 3 && out.dim() == 2, "grouped_small_m: unexpected dimensions");
  const int64_t experts = weight.size(0), features = weight.size(1), k = weight.size(2), rows = out.size(0);
  const bool paired = activation >= 0;
  check_2d(x, "grouped_small_m: x", x.size(0), k);
  check_1d(offsets, "grouped_small_m: offsets", experts + 1);
  if (order) check_1d(*order, "grouped_small_m: order", rows);
  STD_TORCH_CHECK(out.is_contiguous() && out.size(1) * (paired ? 2 : 1) == features && (order || x.size(0) == rows),
                  "grouped_small_m: out: unexpected shape");
  STD_TORCH_CHECK(offsets.scalar_type() == ScalarType::Int && (!order || order->scalar_type() == ScalarType::Int),
                  "grouped_small_m: offsets, order: expected int32");
  STD_TORCH_CHECK(top_k > 0 && top_k < int64_t(1) << 31 && blocks >= 1 && blocks <= 4 && percent >= 0 && percent <= 100 &&
                      (piece == 1 || piece == 2 || piece == 4 || piece == 8) && piece <= 2 * groups,
                  "grouped_small_m: unexpected options");
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(weight.scalar_type() == type && out.scalar_type() == type, "grouped_small_m: expected one dtype");
  const int device = x.get_device_index();
  STD_TORCH_CHECK(weight.get_device_index() == device && offsets.get_device_index() == device &&
                      out.get_device_index() == device && (!order || order->get_device_index() == device),
                  "grouped_small_m: expected one device");

  const int64_t ld = features > 1 ? weight.stride(1) : (k + 7) / 8 * 8, x_ld = x.size(0) > 1 ? x.stride(0) : 0;
  const int64_t expert_ld = experts > 1 ? weight.stride(0) : 8;
  constexpr int64_t kMost = int64_t(1) << 30;
  const bool taken = (type == ScalarType::BFloat16 || type == ScalarType::Half) && rows > 0 && features > 0 && k > 0 &&
                     x.size(0) > 0 && experts > 0 && experts <= 2048 && (k == 1 || weight.stride(2) == 1) && ld >= k &&
                     ld % 8 == 0 && expert_ld > 0 && expert_ld % 8 == 0 && x_ld >= 0 && x_ld % 8 == 0 && aligned(x) &&
                     aligned(weight) && (!paired || features % 16 == 0) && rows < kMost && features < kMost && k < kMost &&
                     x.size(0) < kMost && ld < kMost && expert_ld < int64_t(1) << 38;
  if (!taken) return false;
  const bool is_bf16 = type == ScalarType::BFloat16;
  SmallM f;
  f.args = {data(x), x_ld, int(x.size(0)), order ? static_cast<const int*>(data(*order)) : nullptr, int(top_k),
            static_cast<const int*>(data(offsets)), mutable_data(out), int(rows), int(out.size(1)), int(k), int(experts), 0,
            activation == 1, nullptr, int(percent), int(piece)};
  f.device = device, f.blocks = int(blocks);
  if (!sm90::small_m_map(&f.map, is_bf16, paired, data(weight), experts, features, k, expert_ld, ld)) return false;
  const DeviceGuard guard = on_device_of(x);
  const cudaStream_t stream = current_stream(x);
  if (is_bf16)
    return paired ? dispatch<__nv_bfloat16, true>(f, groups, boxes, stream)
                  : dispatch<__nv_bfloat16, false>(f, groups, boxes, stream);
  return paired ? dispatch<__half, true>(f, groups, boxes, stream) : dispatch<__half, false>(f, groups, boxes, stream);
}

// How many counters the graphs of a device hold now.
int64_t grouped_small_m_lent(Tensor on) {
  const DeviceGuard guard = on_device_of(on);
  return Counters::lent(on.get_device_index());
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("grouped_small_m", TORCH_BOX(&vx::grouped_small_m));
  m.impl("grouped_small_m_lent", TORCH_BOX(&vx::grouped_small_m_lent));
}
