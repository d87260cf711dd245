// archs: 90a
// Launches of latent attention on CUDA devices.
#include "attention/flash_latent.cuh"
#include "attention/flash_launch.h"

namespace vx {
namespace {

template <class T, bool SHARED, bool BOXES>
void launch_latent(const Args& a, const Maps& maps, float* joined, int64_t blocks, int device, cudaStream_t stream) {
  auto kernel = flash::latent_kernel<T, SHARED, BOXES>;
  constexpr int bytes = sizeof(flash::LatentShared);
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, bytes, device, allowed);
  kernel<<<unsigned(blocks), flash::kLatentThreads, bytes, stream>>>(a, maps.k, maps.v, joined);
  VX_CUDA_CHECK(cudaGetLastError());
  if (a.partial) {
    flash::join_kernel<T, flash::kLatentV><<<dim3(a.hk * a.group, a.sequences), flash::kLatentV, 0, stream>>>(a);
    VX_CUDA_CHECK(cudaGetLastError());
  }
}

template <class T>
void launch_latent_as(const Args& a, const Maps& maps, float* joined, int64_t blocks, int device, cudaStream_t stream) {
  const bool shared = a.v == a.k && a.v_page == a.k_page && a.v_row == a.k_row && a.v_head == a.k_head;
  if (shared)
    a.box ? launch_latent<T, true, true>(a, maps, joined, blocks, device, stream)
          : launch_latent<T, true, false>(a, maps, joined, blocks, device, stream);
  else
    a.box ? launch_latent<T, false, true>(a, maps, joined, blocks, device, stream)
          : launch_latent<T, false, false>(a, maps, joined, blocks, device, stream);
}

void check_latent(const Tensor& q, const Tensor& v) {
  STD_TORCH_CHECK(q.size(2) == flash::kLatentD && v.size(v.dim() - 1) == flash::kLatentV,
                  "attention: latent kernels are for head dims ", flash::kLatentD, " and ", flash::kLatentV);
}

// joined: room for the segments of a block's tile that are done, where tiles go through several.
void launch(const Args& a, const Maps& maps, const Tensor& q, const std::optional<Tensor>& joined, int64_t turns) {
  const DeviceGuard guard = on_device_of(q);
  const int device = q.get_device_index();
  int64_t blocks = multiprocessors(device);
  if (turns < blocks) blocks = turns;
  float* room = nullptr;
  if (joined) {
    STD_TORCH_CHECK(joined->scalar_type() == ScalarType::Float && joined->is_contiguous() &&
                        joined->numel() >= flash::kLatentJoined,
                    "joined: too small");
    const int64_t fits = joined->numel() / flash::kLatentJoined;
    if (fits < blocks) blocks = fits;
    room = static_cast<float*>(mutable_data(*joined));
  }
  q.scalar_type() == ScalarType::BFloat16
      ? launch_latent_as<__nv_bfloat16>(a, maps, room, blocks, device, current_stream(q))
      : launch_latent_as<__half>(a, maps, room, blocks, device, current_stream(q));
}

void attention_latent_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_seqlens_k, double scale,
                             int64_t window, int64_t segment, bool causal, std::optional<Tensor> joined, Tensor out,
                             Tensor lse) {
  check_latent(q, v);
  Args a = arguments(q, k, v, out, cu_seqlens, scale, window, segment, causal);
  packed_keys(a, q, k, v, cu_seqlens, cu_seqlens_k, lse);
  STD_TORCH_CHECK(!a.segment || joined, "joined: expected where there are segments");
  if (a.tokens == 0 || a.sequences <= 0) return;
  const DeviceGuard guard = on_device_of(q);
  check_device(q.get_device_index());
  Maps maps{};
  if (a.keys > 0) {
    a.box = flash::kLatentKeys;
    maps = {tensor_map(k, a.box), tensor_map(v, a.box)};
  }
  const int64_t tiles = (int64_t(a.tokens) * a.group + flash::kLatentRows - 1) / flash::kLatentRows + a.sequences;
  launch(a, maps, q, a.segment ? joined : std::nullopt, tiles * a.hk);
}

void attention_latent_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens,
                            Tensor cu_seqlens_q, double scale, int64_t window, int64_t segment,
                            std::optional<Tensor> joined, std::optional<Tensor> partial, Tensor out) {
  check_latent(q, v_cache);
  Args a = arguments(q, k_cache, v_cache, out, cu_seqlens_q, scale, window, segment, true);
  paged_keys(a, q, k_cache, v_cache, block_table, context_lens, partial);
  STD_TORCH_CHECK(!a.segment || joined, "joined: expected where there are segments");
  if (a.tokens == 0 || a.sequences <= 0) return;
  const DeviceGuard guard = on_device_of(q);
  check_device(q.get_device_index());
  Maps maps{};
  const int64_t page_size = a.page_size;
  const bool fits = page_size % flash::kLatentKeys == 0 || (flash::kLatentKeys % page_size == 0 && page_size >= 8);
  if (fits && a.pages > 0) {
    a.box = int(page_size < flash::kLatentKeys ? page_size : flash::kLatentKeys);
    maps = {tensor_map(k_cache, a.box), tensor_map(v_cache, a.box)};
  }
  const int64_t tiles = (int64_t(a.tokens) * a.group + flash::kLatentRows - 1) / flash::kLatentRows + a.sequences;
  launch(a, maps, q, a.segment ? joined : std::nullopt, tiles * a.hk * (a.partial ? a.segments : 1));
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("attention_latent_varlen", TORCH_BOX(&vx::attention_latent_varlen));
  m.impl("attention_latent_paged", TORCH_BOX(&vx::attention_latent_paged));
}
