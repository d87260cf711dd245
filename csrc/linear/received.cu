// archs: 90a
// Bindings and launches of linear's products of columns that other ranks send.
#include <algorithm>
#include <atomic>
#include <type_traits>

#include "common/cuda.h"
#include "common/tensor.h"
#include "linear/sm90_received.cuh"

namespace vx {
namespace {

constexpr int kShared = 226 * 1024;

struct Sizes {  // as linear's table of kernels has them, of 8 rows of x
  int rows, boxes, stages, ahead, lead, per_sm;
};

template <class T, int BOXES, int PARTS>
void launch(const Sizes& s, const Tensor& weight, const void* bias, int m, const sm90::Received& received) {
  const int device = weight.get_device_index();
  auto kernel = sm90::received_kernel<T, BOXES, PARTS>;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kShared, device, allowed);
  const int64_t n = weight.size(0), k = weight.size(1);
  CUtensorMap map;
  STD_TORCH_CHECK(sm90::box_map(&map, std::is_same_v<T, __nv_bfloat16>, data(weight), n, k, weight.stride(0), s.rows, sm90::kBoxK),
                  "linear_received: this driver makes no tensor map of the weight");
  int64_t blocks = (n + s.rows - 1) / s.rows;
  if (s.per_sm) {
    int count = 0;
    VX_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    blocks = std::min(blocks, int64_t(s.per_sm) * count);
  }
  const sm90::SkinnyArgs args{bias, nullptr, 0, m, int(n), int(k), s.rows, 8, s.stages, s.ahead, s.lead, false};
  const int bytes = sm90::skinny_shared_bytes(s.rows, 8, BOXES, s.stages);
  VX_CUDA_CHECK(sm90::launch_chained(kernel, dim3(unsigned(blocks)), sm90::kReceivedThreads, bytes, current_stream(weight),
                                     map, args, sm90::SkinnyStore<T>{received.sending}, received));
}

// (rows, K) columns of all ranks, sent before or, if they are given, here: this rank's x (rows, K / ranks); times weight^T,
// the N columns of which are sent to every rank.
void linear_received(std::optional<Tensor> x, Tensor weight, std::optional<Tensor> bias, int64_t m, int64_t rows, int64_t boxes,
                     int64_t ring, int64_t ahead, int64_t lead, int64_t per_sm, int64_t since, Tensor bases,
                     int64_t rank, int64_t limit_ms, Tensor missing) {
  const Sending sending = Sending::of(bases, rank);
  const ScalarType type = weight.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half, "weight: expected bfloat16 or float16");
  STD_TORCH_CHECK(weight.dim() == 2, "weight: expected 2 dimensions");
  const int64_t n = weight.size(0), k = weight.size(1), width = k / sending.ranks;
  constexpr int64_t kMost = 1 << 30;
  STD_TORCH_CHECK(m > 0 && m <= sm90::kReceivedRows && n > 0 && n < kMost && k > 0 && k < kMost && k % 8 == 0 &&
                      width * sending.ranks == k && width % 4 == 0 && m * width <= 4 * kSent &&
                      n % 4 == 0 && m * n <= 4 * kSent,
                  "linear_received: no kernel for (", m, ", ", k, ") by (", n, ", ", k, ") of ", sending.ranks, " ranks");
  STD_TORCH_CHECK(weight.stride(0) % 8 == 0 && weight.stride(0) >= k && reinterpret_cast<uintptr_t>(data(weight)) % 16 == 0,
                  "weight: expected rows on 16-byte boundaries");
  check_last_dim_contiguous(weight, "weight");
  if (bias) {
    check_1d(*bias, "bias", n);
    STD_TORCH_CHECK(bias->scalar_type() == type && bias->get_device_index() == weight.get_device_index(), "bias: expected weight's dtype");
  }
  if (x) {
    check_2d(*x, "x", m, width);
    STD_TORCH_CHECK(x->scalar_type() == type && x->is_contiguous() && reinterpret_cast<uintptr_t>(data(*x)) % kSentUnit == 0 &&
                        x->get_device_index() == weight.get_device_index(),
                    "x: expected contiguous rows of weight's dtype on 8-byte boundaries");
  }
  const auto fits = [](int64_t value, int64_t least, int64_t most) { return value >= least && value <= most; };
  STD_TORCH_CHECK(fits(rows, 8, 128) && rows % 8 == 0 && (boxes == 2 || boxes == 4 || boxes == 8) &&
                      fits(ring, 2, sm90::kSkinnyStages) && fits(ahead, 0, 1 << 20) && fits(lead, 0, 1 << 20) &&
                      fits(per_sm, 0, 8) && sm90::skinny_shared_bytes(int(rows), 8, int(boxes), int(ring)) <= kShared,
                  "linear_received: ", ring, " stages of ", rows, "x8x", 64 * boxes, " are no kernel or do not fit");
  const Sizes s{int(rows), int(boxes), int(ring), int(ahead), int(lead), int(per_sm)};
  const sm90::Received received{Receiving::of(bases, rank, since, limit_ms, missing), sending,
                                static_cast<const uint2*>(data(x)), int(width / 4)};
  const DeviceGuard guard = on_device_of(weight);
  const auto of = [&]<class T>(T) {
    const auto with = [&](auto b) {
      s.rows > 64 ? launch<T, b(), 2>(s, weight, data(bias), int(m), received)
                  : launch<T, b(), 1>(s, weight, data(bias), int(m), received);
    };
    if (s.boxes == 2) with(std::integral_constant<int, 2>{});
    else if (s.boxes == 4) with(std::integral_constant<int, 4>{});
    else with(std::integral_constant<int, 8>{});
  };
  type == ScalarType::BFloat16 ? of(__nv_bfloat16()) : of(__half());
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) { m.impl("linear_received", TORCH_BOX(&vx::linear_received)); }
