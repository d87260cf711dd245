#include "common/cuda.h"
#include "fused_moe/binding.h"
#include "fused_moe/plan.cuh"
#include "fused_moe/rows.cuh"

namespace vx {
namespace {

void contiguous(const Tensor& t, const char* name, ScalarType dtype, int64_t rows, int64_t n) {
  check_2d(t, name, rows, n);
  STD_TORCH_CHECK(t.scalar_type() == dtype && t.is_contiguous(), name, ": expected contiguous, of one dtype");
}

template <class F>
cudaError_t by_dtype(ScalarType dtype, F&& run) {
  switch (dtype) {
    case ScalarType::Float: return run(float());
    case ScalarType::Half: return run(__half());
    case ScalarType::BFloat16: return run(__nv_bfloat16());
    default: STD_TORCH_CHECK(false, "expected float32, float16 or bfloat16");
  }
}

bool may_overlap(int device) {
  static std::atomic<uint64_t> known{0}, yes{0};
  const uint64_t bit = 1ull << (device & 63);
  if (!(known.load(std::memory_order_acquire) & bit)) {
    int major = 0;
    VX_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    if (major >= 9) yes.fetch_or(bit);
    known.fetch_or(bit, std::memory_order_release);
  }
  return yes.load() & bit;
}

ChainedStream stream_of(const Tensor& t) { return {current_stream(t), may_overlap(t.get_device_index())}; }

void moe_plan_cuda(Tensor ids, Tensor offsets, Tensor order, Tensor position, std::optional<Tensor> counts) {
  const int64_t slots = ids.numel(), experts = offsets.numel() - 1;
  STD_TORCH_CHECK(experts > 0 && experts <= kPlanExperts, "offsets: expected at most ", kPlanExperts, " experts");
  STD_TORCH_CHECK(slots < (int64_t(1) << 31) - 8 * kPlanThreads, "ids: more slots than int32 counts");
  STD_TORCH_CHECK(counts || slots <= kPlanWhole, "counts: expected where there are more than ", kPlanWhole, " slots");
  const MoePlanCuda a = {int(slots), int(experts), 0, ints(ids, "ids", slots), ints(offsets, "offsets", experts + 1),
                         ints(order, "order", slots), ints(position, "position", slots),
                         counts ? ints(*counts, "counts", moe_plan_chunks(slots) * experts) : nullptr};
  const DeviceGuard guard = on_device_of(ids);
  VX_CUDA_CHECK(moe_plan_launch(a, stream_of(ids)));
}

void moe_combine_cuda(Tensor y, Tensor position, std::optional<Tensor> weights, Tensor out) {
  const int64_t tokens = out.size(0), n = out.size(1), slots = position.numel(), rows = y.size(0);
  contiguous(y, "y", y.scalar_type(), rows, n);
  contiguous(out, "out", y.scalar_type(), tokens, n);
  if (tokens == 0) return;
  STD_TORCH_CHECK(slots % tokens == 0, "position: expected a multiple of out's rows");
  const MoeCombineCuda a = {rows, tokens, slots / tokens, n, data(y), ints(position, "position", slots),
                            weights ? floats(*weights, "weights", slots) : nullptr, mutable_data(out)};
  const DeviceGuard guard = on_device_of(y);
  const ChainedStream stream = stream_of(y);
  VX_CUDA_CHECK(by_dtype(y.scalar_type(), [&](auto t) { return moe_combine_launch<decltype(t)>(a, stream); }));
}

void moe_scatter_cuda(Tensor x, Tensor position, Tensor out) {
  const int64_t tokens = x.size(0), n = x.size(1), slots = position.numel(), rows = out.size(0);
  check_2d(x, "x", tokens, n);
  contiguous(out, "out", x.scalar_type(), rows, n);
  const int64_t size = x.element_size();
  STD_TORCH_CHECK(size == 2 || size == 4, "x: expected float32, float16 or bfloat16");
  if (tokens == 0) return;
  STD_TORCH_CHECK(slots % tokens == 0, "position: expected a multiple of x's rows");
  const int64_t each = 16 / size, stride = tokens > 1 ? x.stride(0) : n;
  STD_TORCH_CHECK(n % each == 0 && stride % each == 0 && aligned_16({data(x), data(out)}),
                  "x: expected rows of whole units of 16 bytes");
  const MoeScatterCuda a = {rows, tokens, slots / tokens, n / each, stride / each, static_cast<const uint4*>(data(x)),
                            ints(position, "position", slots), static_cast<uint4*>(mutable_data(out))};
  const DeviceGuard guard = on_device_of(x);
  VX_CUDA_CHECK(moe_scatter_launch(a, stream_of(x)));
}

void moe_gate_bwd_cuda(Tensor h, Tensor da, Tensor order, Tensor weights, Tensor offsets, bool gelu, Tensor dh,
                       Tensor scaled, Tensor dweights) {
  const int64_t rows = da.size(0), n = da.size(1);
  const ScalarType dtype = h.scalar_type();
  contiguous(h, "h", dtype, rows, 2 * n), contiguous(dh, "dh", dtype, rows, 2 * n);
  contiguous(da, "da", dtype, rows, n), contiguous(scaled, "scaled", dtype, rows, n);
  STD_TORCH_CHECK(rows < int64_t(1) << 31, "order: more slots than int32 counts");
  int block = 16;
  while (block < n && block < 1024) block *= 2;
  const int experts = int(offsets.numel()) - 1;
  const MoeGateBwdCuda a = {rows, n, experts, block, data(h), data(da), ints(order, "order", rows),
                            floats(weights, "weights", rows), ints(offsets, "offsets", experts + 1), mutable_data(dh),
                            mutable_data(scaled), floats(dweights, "dweights", rows)};
  const DeviceGuard guard = on_device_of(h);
  const ChainedStream stream = stream_of(h);
  VX_CUDA_CHECK(by_dtype(dtype, [&](auto t) {
    using T = decltype(t);
    return gelu ? moe_gate_bwd_launch<T, true>(a, stream) : moe_gate_bwd_launch<T, false>(a, stream);
  }));
}

// Rows of the scratch that moe_plan wants; 0 where it wants none.
int64_t moe_plan_scratch(int64_t slots) { return slots <= kPlanWhole ? 0 : moe_plan_chunks(slots); }

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("moe_plan", TORCH_BOX(&vx::moe_plan_cuda));
  m.impl("moe_combine", TORCH_BOX(&vx::moe_combine_cuda));
  m.impl("moe_scatter", TORCH_BOX(&vx::moe_scatter_cuda));
  m.impl("moe_gate_bwd", TORCH_BOX(&vx::moe_gate_bwd_cuda));
}

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CompositeExplicitAutograd, m) {
  m.impl("moe_plan_scratch", TORCH_BOX(&vx::moe_plan_scratch));
}
