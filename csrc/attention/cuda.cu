// archs: 90a
// Bindings and launches of attention on CUDA devices.
#include <type_traits>

#include "attention/flash_decode.cuh"
#include "attention/flash_persistent.h"
#include "attention/flash_plan.cuh"
#include "attention/flash_stream.cuh"
#include "attention/flash_tile.cuh"

namespace vx {
namespace {

constexpr int64_t kFewQueries = 65;  // of a sequence whose drafts are verified: as many as there may be, and one

// few: most tiles that there may be are none, as where each of many sequences has one query or a few.
template <class T, int D, int DV, bool SEGMENTS, bool BOXES>
void launch_tiles_with(const Args& a, const Maps& maps, bool few, int device, cudaStream_t stream) {
  auto kernel = flash::tile_kernel<T, D, DV, SEGMENTS, BOXES>;
  constexpr int bytes = sizeof(flash::TileShared<D, DV>);
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, bytes, device, allowed);
  const int64_t tiles = (int64_t(a.tokens) * a.group + flash::kTileRows - 1) / flash::kTileRows + a.sequences;
  int64_t blocks = tiles * a.hk;
  if ((a.wanted || few) && blocks > multiprocessors(device)) blocks = multiprocessors(device);
  kernel<<<unsigned(blocks), flash::kTileThreads, bytes, stream>>>(a, maps.k, maps.v, int(tiles));
  VX_CUDA_CHECK(cudaGetLastError());
}

template <class T, int D, int DV>
void launch_tiles(const Args& a, const Maps& maps, bool few, int device, cudaStream_t stream) {
  if constexpr (D % 64 == 0 && DV % 64 == 0)
    if (a.box)
      return a.segment ? launch_tiles_with<T, D, DV, true, true>(a, maps, few, device, stream)
                       : launch_tiles_with<T, D, DV, false, true>(a, maps, few, device, stream);
  a.segment ? launch_tiles_with<T, D, DV, true, false>(a, maps, few, device, stream)
            : launch_tiles_with<T, D, DV, false, false>(a, maps, few, device, stream);
}

template <class T, int D, int DV, int SLOTS>
void launch_decode_with(const Args& a, int64_t blocks, int device, cudaStream_t stream) {
  auto kernel = flash::decode_kernel<T, D, DV, SLOTS>;
  constexpr int bytes = sizeof(flash::DecodeShared<D, DV, SLOTS>);
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, bytes, device, allowed);
  kernel<<<unsigned(blocks), flash::kDecodeThreads, bytes, stream>>>(a);
  VX_CUDA_CHECK(cudaGetLastError());
}

template <class T, int D, int DV, int ROWS>
void launch_stream(const Args& a, const Maps& pages, int64_t items, int device, cudaStream_t stream) {
  auto kernel = flash::stream_kernel<T, D, DV, ROWS>;
  constexpr int bytes = sizeof(flash::StreamShared<D, DV, ROWS>);
  static_assert(bytes <= 227 << 10);
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, bytes, device, allowed);
  launch_persistent(kernel, flash::kStreamThreads, bytes, a, pages, items, device, stream);
}

int64_t decode_items(const Args& a) {
  const int64_t row_tiles = (a.group + flash::kDecodeRows - 1) / flash::kDecodeRows;
  return a.sequences * row_tiles * a.hk * (a.partial ? a.segments : 1);
}

template <class T, int D, int DV>
void launch_decode(const Args& a, const Maps& maps, int device, cudaStream_t stream) {
  const int64_t count = multiprocessors(device), items = decode_items(a);
  STD_TORCH_CHECK(items < int64_t(1) << 31, "attention: ", items, " items of decode in one call");
  // Which kernel has no effect on bits
  bool done = false;
  if constexpr (D % 64 == 0 && DV % 64 == 0)
    if (a.box) {
      a.group <= 8 ? launch_stream<T, D, DV, 8>(a, maps, items, device, stream)
                   : launch_stream<T, D, DV, 16>(a, maps, items, device, stream);
      done = true;
    }
  if (!done) {
    constexpr int kDeep = D > 128 ? 3 : 5;  // one item to a multiprocessor: more loads in flight each
    const int64_t blocks = a.partial && items > 2 * count ? 2 * count : items;
    items <= count ? launch_decode_with<T, D, DV, kDeep>(a, blocks, device, stream)
                   : launch_decode_with<T, D, DV, 3>(a, blocks, device, stream);
  }
  if (a.partial) {
    const dim3 grid(a.hk * a.group, a.sequences);
    VX_CUDA_CHECK(sm90::launch_chained(flash::join_kernel<T, DV>, grid, DV, 0, stream, a));
  }
}

// f(type tag, D, DV) for the sizes there are kernels for.
template <class F>
void for_sizes(const Tensor& q, int64_t dv, F f) {
  using std::integral_constant;
  const int64_t d = q.size(2);
  auto typed = [&](auto tag) {
    if (d == 64 && dv == 64) return f(tag, integral_constant<int, 64>{}, integral_constant<int, 64>{});
    if (d == 96 && dv == 96) return f(tag, integral_constant<int, 96>{}, integral_constant<int, 96>{});
    if (d == 128 && dv == 128) return f(tag, integral_constant<int, 128>{}, integral_constant<int, 128>{});
    if (d == 192 && dv == 128) return f(tag, integral_constant<int, 192>{}, integral_constant<int, 128>{});
    if (d == 256 && dv == 256) return f(tag, integral_constant<int, 256>{}, integral_constant<int, 256>{});
    STD_TORCH_CHECK(false, "attention: no kernel for head dims ", d, " and ", dv);
  };
  q.scalar_type() == ScalarType::BFloat16 ? typed(__nv_bfloat16{}) : typed(__half{});
}

void attention_flash_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_seqlens_k,
                            std::optional<Tensor> sinks, double scale, int64_t window, int64_t segment, bool causal,
                            std::optional<Tensor> wanted, Tensor out, Tensor lse) {
  Args a = arguments(q, k, v, out, cu_seqlens, scale, window, segment, causal);
  a.sinks = sinks_of(sinks, q);
  packed_keys(a, q, k, v, cu_seqlens, cu_seqlens_k, lse);
  if (wanted) a.wanted = ints(*wanted, "wanted", 1);
  if (a.tokens == 0 || a.sequences <= 0) return;
  const DeviceGuard guard = on_device_of(q);
  const cudaStream_t stream = current_stream(q);
  const int device = q.get_device_index();
  check_device(device);
  Maps maps{};
  if (a.keys > 0 && q.size(2) % 64 == 0 && v.size(2) % 64 == 0) {
    a.box = flash::keys_of(int(q.size(2)));
    maps = {tensor_map(k, a.box), tensor_map(v, a.box)};
  }
  for_sizes(q, v.size(2), [&](auto tag, auto d, auto dv) {
    using T = decltype(tag);
    launch_tiles<T, d(), dv()>(a, maps, false, device, stream);
  });
}

void attention_flash_paged(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens,
                           Tensor cu_seqlens_q, int64_t max_seqlen_q, std::optional<Tensor> sinks, double scale,
                           int64_t window, int64_t segment, bool settled, std::optional<Tensor> wanted,
                           std::optional<Tensor> partial, Tensor out) {
  Args a = arguments(q, k_cache, v_cache, out, cu_seqlens_q, scale, window, segment, true);
  a.settled = settled, a.sinks = sinks_of(sinks, q);
  paged_keys(a, q, k_cache, v_cache, block_table, context_lens, partial);
  if (a.tokens == 0 || a.sequences <= 0) return;
  const DeviceGuard guard = on_device_of(q);
  const cudaStream_t stream = current_stream(q);
  const int device = q.get_device_index();
  check_device(device);
  a.box = box_of(a, q, v_cache);
  const int64_t values = int64_t(a.sequences) * a.segments * q.size(1) * (v_cache.size(3) + 2);
  const int64_t flags = int64_t(a.sequences) * a.segments * q.size(1);
  // Few rows may wait for their segments one by one, in multiprocessors that others do not need.
  const bool few = a.box && decode_items(a) <= multiprocessors(device);
  if (few && a.partial && q.size(1) * a.sequences <= multiprocessors(device) && partial->numel() >= values + flags)
    a.ready = reinterpret_cast<int32_t*>(a.partial + values);
  Maps maps{}, pages{};
  if (a.box && max_seqlen_q > 1) maps = {tensor_map(k_cache, a.box), tensor_map(v_cache, a.box)};
  if (a.box) pages = {page_map(k_cache, a.box), page_map(v_cache, a.box)};
  for_sizes(q, v_cache.size(3), [&](auto tag, auto d, auto dv) {
    using T = decltype(tag);
    launch_decode<T, d(), dv()>(a, pages, device, stream);
    if (max_seqlen_q <= 1) return;
    Args many = a;
    many.skip_single = 1;
    if (wanted) many.wanted = ints(*wanted, "wanted", 1);
    launch_tiles<T, d(), dv()>(many, maps, max_seqlen_q <= kFewQueries, device, stream);
  });
}

// plan: 0, three unused values, then cu_seqlens in order and inside their tensors, then cu_seqlens_k likewise.
void attention_packed_plan(Tensor cu_seqlens, std::optional<Tensor> cu_seqlens_k, int64_t tokens, int64_t keys,
                           Tensor plan) {
  const int64_t count = cu_seqlens.numel();
  const int32_t* at = ints(cu_seqlens, "cu_seqlens", count);
  const int32_t* at_k = cu_seqlens_k ? ints(*cu_seqlens_k, "cu_seqlens_k", count) : nullptr;
  ints(plan, "plan", 4 + (at_k ? 2 : 1) * count);
  const DeviceGuard guard = on_device_of(cu_seqlens);
  flash::packed_plan_kernel<<<1, flash::kPlanThreads, 0, current_stream(cu_seqlens)>>>(
      at, at_k, int(count), int(tokens), int(keys), static_cast<int32_t*>(mutable_data(plan)));
  VX_CUDA_CHECK(cudaGetLastError());
}

// plan: 0, three unused values, then the first query, the queries and the keys of each sequence.
void attention_paged_plan(Tensor cu_seqlens_q, Tensor context_lens, int64_t tokens, int64_t keys, Tensor plan) {
  const int64_t count = context_lens.numel();
  const int32_t* at = ints(cu_seqlens_q, "cu_seqlens_q", count + 1);
  const int32_t* lens = ints(context_lens, "context_lens", count);
  ints(plan, "plan", 4 + 3 * count);
  const DeviceGuard guard = on_device_of(cu_seqlens_q);
  flash::paged_plan_kernel<<<1, flash::kPlanThreads, 0, current_stream(cu_seqlens_q)>>>(
      at, lens, int(count), int(tokens), int(keys), static_cast<int32_t*>(mutable_data(plan)));
  VX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("attention_flash_varlen", TORCH_BOX(&vx::attention_flash_varlen));
  m.impl("attention_flash_paged", TORCH_BOX(&vx::attention_flash_paged));
  m.impl("attention_packed_plan", TORCH_BOX(&vx::attention_packed_plan));
  m.impl("attention_paged_plan", TORCH_BOX(&vx::attention_paged_plan));
}
