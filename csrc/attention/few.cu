// archs: 90a
// Binding and launches of attention of a few queries of each sequence.
#include "attention/flash_few.cuh"
#include "attention/flash_persistent.h"

namespace vx {
namespace {

template <class T, int D, int TILES>
void launch_few(const Args& a, const Maps& pages, int device, cudaStream_t stream) {
  auto kernel = flash::few_kernel<T, D, D, TILES>;
  constexpr int bytes = sizeof(flash::FewShared<D, D, TILES>), rows = TILES * flash::kDecodeRows;
  static_assert(bytes <= 227 << 10);
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, bytes, device, allowed);
  const int64_t items = a.sequences * ((int64_t(a.queries) * a.group + rows - 1) / rows) * a.hk;
  STD_TORCH_CHECK(items < int64_t(1) << 31, "attention: ", items, " items of decode in one call");
  launch_persistent(kernel, flash::kFewThreads, bytes, a, pages, items, device, stream);
}

template <class T, int D>
void launch_tiles(const Args& a, const Maps& pages, int64_t tiles, int device, cudaStream_t stream) {
  switch (tiles) {
    case 1: return launch_few<T, D, 1>(a, pages, device, stream);
    case 2: return launch_few<T, D, 2>(a, pages, device, stream);
    default: return launch_few<T, D, 3>(a, pages, device, stream);
  }
}

// Sequences of at most max_seqlen_q queries, those of one among them, whose keys are in boxes and in no segments; tiles: of
// sixteen rows, that a block takes at a time.
void attention_flash_few(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens,
                         Tensor cu_seqlens_q, int64_t max_seqlen_q, std::optional<Tensor> sinks, double scale,
                         int64_t window, bool settled, int64_t tiles, Tensor out) {
  Args a = arguments(q, k_cache, v_cache, out, cu_seqlens_q, scale, window, 0, true);
  a.settled = settled, a.sinks = sinks_of(sinks, q);
  paged_keys(a, q, k_cache, v_cache, block_table, context_lens, std::nullopt);
  if (a.tokens == 0 || a.sequences <= 0) return;
  const DeviceGuard guard = on_device_of(q);
  const cudaStream_t stream = current_stream(q);
  const int device = q.get_device_index();
  check_device(device);
  a.box = box_of(a, q, v_cache), a.queries = int(max_seqlen_q);
  const int64_t d = q.size(2), dv = v_cache.size(3);
  STD_TORCH_CHECK(a.box && max_seqlen_q > 0 && max_seqlen_q <= flash::keys_of(int(d)),
                  "attention: few queries: expected pages and blocks that fit, and not ", max_seqlen_q);
  STD_TORCH_CHECK(tiles > 0 && tiles <= flash::kMostTiles, "attention: ", tiles, " tiles at a time");
  STD_TORCH_CHECK(d == dv && (d == 64 || d == 128), "attention: no kernel for few queries of head dims ", d, " and ", dv);
  const Maps pages{page_map(k_cache, a.box), page_map(v_cache, a.box)};
  const auto typed = [&](auto tag) {
    using T = decltype(tag);
    d == 64 ? launch_tiles<T, 64>(a, pages, tiles, device, stream) : launch_tiles<T, 128>(a, pages, tiles, device, stream);
  };
  q.scalar_type() == ScalarType::BFloat16 ? typed(__nv_bfloat16{}) : typed(__half{});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("attention_flash_few", TORCH_BOX(&vx::attention_flash_few));
}
