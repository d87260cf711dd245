// What launches of the flash order's kernels share: checks, arguments, tensor maps. Included by bindings only.
#pragma once
#include <atomic>

#include "attention/flash.cuh"
#include "common/cuda.h"
#include "common/sm90.cuh"
#include "common/tensor.h"

namespace vx {
namespace {

using flash::Args;

constexpr double kLog2E = 1.4426950408889634;

void check_device(int device) {
  static std::atomic<uint64_t> known{0};
  const uint64_t bit = 1ull << (device & 63);
  if (known.load(std::memory_order_relaxed) & bit) return;
  int major = 0, minor = 0;
  VX_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
  VX_CUDA_CHECK(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
  STD_TORCH_CHECK(major == 9 && minor == 0, "attention: these kernels are for SM90, and this is SM", major, minor);
  known.fetch_or(bit);
}

int multiprocessors(int device) {
  static std::atomic<int> known[64];
  std::atomic<int>& count = known[device & 63];
  if (!count) {
    int found = 0;
    VX_CUDA_CHECK(cudaDeviceGetAttribute(&found, cudaDevAttrMultiProcessorCount, device));
    count = found;
  }
  return count;
}

const int32_t* ints(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int && t.is_contiguous() && t.numel() == size, name,
                  ": expected contiguous int32 (", size, ",)");
  return static_cast<const int32_t*>(data(t));
}

void check_rows(const Tensor& t, const char* name, int64_t heads, int64_t d, ScalarType type) {
  const int64_t n = t.dim();
  STD_TORCH_CHECK(n >= 3 && t.size(n - 2) == heads && t.size(n - 1) == d && t.scalar_type() == type, name,
                  ": expected (..., ", heads, ", ", d, ") in q's dtype");
  check_last_dim_contiguous(t, name);
  bool aligned = reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i + 1 < n; ++i) aligned = aligned && (t.size(i) <= 1 || t.stride(i) % 8 == 0);
  STD_TORCH_CHECK(aligned, name, ": rows must begin on 16-byte boundaries");
}

Args arguments(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& q_at, double scale,
               int64_t window, int64_t segment, bool causal) {
  const ScalarType type = q.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half, "attention: expected bf16 or fp16");
  const int64_t hk = k.size(k.dim() - 2), hq = q.size(1), d = q.size(2), dv = v.size(v.dim() - 1);
  STD_TORCH_CHECK(hk > 0 && hq > 0 && hq % hk == 0, "attention: heads ", hq, " and ", hk);
  check_rows(q, "q", hq, d, type);
  check_rows(k, "k", hk, d, type);
  check_rows(v, "v", hk, dv, type);
  check_rows(out, "out", hq, dv, type);
  STD_TORCH_CHECK(out.is_contiguous() && out.size(0) == q.size(0), "out: expected contiguous (T, Hq, Dv)");
  STD_TORCH_CHECK(window >= 0 && segment >= 0 && segment % 128 == 0, "attention: kv_segment ", segment);
  Args a{};
  a.q = data(q), a.k = data(k), a.v = data(v), a.out = mutable_data(out);
  a.q_at = ints(q_at, "cu_seqlens_q", q_at.numel());
  a.q_row = q.stride(0), a.q_head = q.stride(1);
  a.tokens = int(q.size(0)), a.sequences = int(q_at.numel()) - 1;
  a.hk = int(hk), a.group = int(hq / hk);
  const int64_t most = int64_t(1) << 30;  // a window or segment beyond all places is none
  a.window = int(window < most ? window : 0), a.segment = int(segment < most ? segment : 0);
  a.causal = causal;
  a.scale = float(scale) * float(kLog2E);
  return a;
}

void packed_keys(Args& a, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_seqlens,
                 const Tensor& cu_seqlens_k, const Tensor& lse) {
  STD_TORCH_CHECK(k.dim() == 3 && v.dim() == 3 && v.size(0) == k.size(0), "k, v: expected (Tk, Hk, D)");
  STD_TORCH_CHECK(lse.scalar_type() == ScalarType::Float && lse.is_contiguous() && lse.numel() == q.size(0) * q.size(1),
                  "lse: expected contiguous float32, one for each row");
  a.k_at = ints(cu_seqlens_k, "cu_seqlens_k", cu_seqlens.numel());
  a.keys = int(k.size(0));
  a.k_row = k.stride(0), a.k_head = k.stride(1), a.v_row = v.stride(0), a.v_head = v.stride(1);
  a.lse = static_cast<float*>(mutable_data(lse));
}

void paged_keys(Args& a, const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_table,
                const Tensor& context_lens, const std::optional<Tensor>& partial) {
  STD_TORCH_CHECK(k_cache.dim() == 4 && v_cache.dim() == 4 && k_cache.size(0) == v_cache.size(0) &&
                      k_cache.size(1) == v_cache.size(1) && k_cache.size(1) > 0,
                  "caches: expected (pages, page_size, Hk, D) and (pages, page_size, Hk, Dv)");
  STD_TORCH_CHECK(block_table.dim() == 2 && block_table.scalar_type() == ScalarType::Int &&
                      block_table.size(0) == a.sequences && (block_table.size(1) <= 1 || block_table.stride(1) == 1),
                  "block_table: expected int32 rows, one for each context length");
  a.k_at = ints(context_lens, "context_lens", a.sequences);
  a.table = static_cast<const int32_t*>(data(block_table)), a.table_row = block_table.stride(0);
  const int64_t capacity = block_table.size(1) * k_cache.size(1);
  a.keys = int(capacity < (int64_t(1) << 30) ? capacity : int64_t(1) << 30);
  a.pages = int(k_cache.size(0)), a.page_size = int(k_cache.size(1));
  a.k_page = k_cache.stride(0), a.k_row = k_cache.stride(1), a.k_head = k_cache.stride(2);
  a.v_page = v_cache.stride(0), a.v_row = v_cache.stride(1), a.v_head = v_cache.stride(2);
  if (partial && a.segment) {
    a.segments = (a.keys + a.segment - 1) / a.segment;
    STD_TORCH_CHECK(partial->scalar_type() == ScalarType::Float && partial->is_contiguous() &&
                        a.sequences <= flash::kMostSplit &&
                        partial->numel() >= int64_t(a.sequences) * a.segments * q.size(1) * (v_cache.size(3) + 2),
                    "partial: too small");
    a.partial = static_cast<float*>(mutable_data(*partial));
  }
}

template <int RANK>
CUtensorMap encoded(const Tensor& x, const cuuint64_t (&sizes)[RANK], const cuuint64_t (&strides)[RANK - 1],
                    const cuuint32_t (&boxes)[RANK]) {
  CUtensorMap map;
  STD_TORCH_CHECK(sm90::encode_map<RANK>(&map, x.scalar_type() == ScalarType::BFloat16, x.data_ptr(), sizes, strides, boxes),
                  "attention: this driver makes no tensor map of these operands");
  return map;
}

// A cache (pages, page_size, Hk, D), read in boxes of `box` rows of one head, 64 columns wide; packed rows (T, Hk, D)
// are one page.
CUtensorMap tensor_map(const Tensor& cache, int box) {
  const int64_t last = cache.dim() - 1, pages = last == 3 ? cache.size(0) : 1;
  const cuuint64_t d = cache.size(last);
  auto bytes = [&](int64_t i) { return (cache.size(i) > 1 ? cuuint64_t(cache.stride(i)) : d) * 2; };
  const cuuint64_t sizes[4] = {d, cuuint64_t(cache.size(last - 2)), cuuint64_t(cache.size(last - 1)), cuuint64_t(pages)};
  const cuuint64_t strides[3] = {bytes(last - 2), bytes(last - 1), last == 3 ? bytes(0) : d * 2};
  const cuuint32_t boxes[4] = {64, cuuint32_t(box), 1, 1};
  return encoded(cache, sizes, strides, boxes);
}

// The same, in boxes of `box` rows with all their columns, 64 after another.
[[maybe_unused]] CUtensorMap page_map(const Tensor& cache, int box) {
  const cuuint64_t d = cache.size(3);
  auto bytes = [&](int64_t i) { return (cache.size(i) > 1 ? cuuint64_t(cache.stride(i)) : d) * 2; };
  const cuuint64_t sizes[5] = {64, cuuint64_t(cache.size(1)), d / 64, cuuint64_t(cache.size(2)), cuuint64_t(cache.size(0))};
  const cuuint64_t strides[4] = {bytes(1), 128, bytes(2), bytes(0)};
  const cuuint32_t boxes[5] = {64, cuuint32_t(box), cuuint32_t(d / 64), 1, 1};
  return encoded(cache, sizes, strides, boxes);
}

struct Maps {
  CUtensorMap k, v;
};

[[maybe_unused]] const float* sinks_of(const std::optional<Tensor>& sinks, const Tensor& q) {
  if (!sinks) return nullptr;
  STD_TORCH_CHECK(sinks->scalar_type() == ScalarType::Float && sinks->is_contiguous() && sinks->numel() == q.size(1) &&
                      sinks->is_cuda() && sinks->get_device_index() == q.get_device_index(),
                  "sinks: expected contiguous float32 (", q.size(1), ",) on q's device");
  return static_cast<const float*>(data(*sinks));
}

// Keys that one box of the copy engine brings, where pages and blocks of keys fit each other; else 0.
[[maybe_unused]] int box_of(const Args& a, const Tensor& q, const Tensor& v_cache) {
  const int keys = flash::keys_of(int(q.size(2)));
  const bool fits = a.page_size % keys == 0 || (keys % a.page_size == 0 && a.page_size >= 8);
  if (!fits || a.pages == 0 || q.size(2) % 64 || v_cache.size(3) % 64) return 0;
  return a.page_size < keys ? a.page_size : keys;
}

}  // namespace
}  // namespace vx
