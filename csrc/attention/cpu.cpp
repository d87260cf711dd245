#include <algorithm>
#include <vector>

#include "attention/kernels.h"
#include "common/box.h"
#include "common/parallel.h"
#include "common/values.h"

namespace vx {
namespace {

constexpr int64_t kTileRows = 192;  // query rows that share one pass over the keys; no effect on bits

const int32_t* ints(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.is_contiguous(), name, ": expected contiguous");
  return values<int32_t>(t, name);
}

const float* sink_values(const std::optional<Tensor>& sinks, int64_t hq) {
  if (!sinks) return nullptr;
  check_1d(*sinks, "sinks", hq);
  return values<float>(*sinks, "sinks");
}

// Offsets ascend from 0 to rows, and no step is longer than longest.
bool offsets_valid(const int32_t* offsets, int64_t count, int64_t rows, int64_t longest) {
  if (count < 1 || offsets[0] != 0 || offsets[count - 1] != rows) return false;
  for (int64_t i = 1; i < count; ++i)
    if (offsets[i] < offsets[i - 1] || int64_t(offsets[i]) - offsets[i - 1] > longest) return false;
  return true;
}

// The tasks of one sequence's queries: tiles of positions, one key-value head each. A sequence with few rows has one
// tile; all its heads then make one task, so that their keys, which lie side by side, are read together, unless that
// would leave threads without work. Any cut will do.
struct Tiling {
  int64_t hk, positions, heads;  // heads: for a sequence that fits one tile

  Tiling(const AttentionShape& shape, int64_t sequences)
      : hk(shape.hk), positions(std::max<int64_t>(1, kTileRows / (shape.hq / shape.hk))) {
    const int64_t shares = (4 * num_threads() + sequences - 1) / std::max<int64_t>(1, sequences);
    heads = std::max<int64_t>(1, hk / shares);
  }

  void add(std::vector<AttentionTask>& tasks, const AttentionTask& sequence) const {
    const int64_t step = sequence.positions * hk <= positions ? heads : 1;
    for (int64_t at = 0; at < sequence.positions; at += positions)
      for (int64_t head = 0; head < hk; head += step) {
        AttentionTask t = sequence;
        t.q_begin += at, t.first += at, t.kv_head = head, t.kv_heads = std::min(step, hk - head);
        t.positions = std::min(positions, sequence.positions - at);
        tasks.push_back(t);
      }
  }
};

void longest_first(std::vector<AttentionTask>& tasks) {
  auto work = [](const AttentionTask& t) { return t.kv_heads * t.positions * (t.first + t.positions); };
  std::stable_sort(tasks.begin(), tasks.end(),
                   [&](const AttentionTask& a, const AttentionTask& b) { return work(a) > work(b); });
}

AttentionShape shape_of(const Tensor& q, const Tensor& k, const Tensor& v, int64_t head_dim) {
  return {dtype_of(q, "q"), q.size(1), k.size(head_dim), q.size(2), v.size(head_dim + 1)};
}

void check_heads(const Tensor& t, const char* name, int64_t rows, int64_t heads, int64_t d, Dtype dtype) {
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == rows && t.size(1) == heads && t.size(2) == d, name, ": expected (", rows,
                  ", ", heads, ", ", d, ")");
  STD_TORCH_CHECK(dtype_of(t, name) == dtype, name, ": another dtype than q");
  check_last_dim_contiguous(t, name);
}

void check_groups(const AttentionShape& s) {
  STD_TORCH_CHECK(s.hk > 0 && s.d > 0 && s.dv > 0 && s.hq % s.hk == 0, "heads: ", s.hq, " and ", s.hk);
}

// Both return false, with nothing written, where offsets, lengths or pages are not what the op documents; Python then
// finds out which, and says so.
bool attention_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens, Tensor cu_seqlens_k, int64_t max_seqlen,
                          std::optional<Tensor> sinks, double scale, double softcap, int64_t window, int64_t segment,
                          bool causal, Tensor out, Tensor lse) {
  const int64_t tokens = q.size(0), keys = k.size(0), count = cu_seqlens.numel();
  const AttentionShape shape = shape_of(q, k, v, 1);
  check_groups(shape);
  check_heads(q, "q", tokens, shape.hq, shape.d, shape.dtype);
  check_heads(k, "k", keys, shape.hk, shape.d, shape.dtype);
  check_heads(v, "v", keys, shape.hk, shape.dv, shape.dtype);
  check_heads(out, "out", tokens, shape.hq, shape.dv, shape.dtype);
  STD_TORCH_CHECK(out.is_contiguous() && lse.is_contiguous() && lse.numel() == tokens * shape.hq, "out, lse");
  STD_TORCH_CHECK(cu_seqlens_k.numel() == count, "cu_seqlens_k: expected as many as cu_seqlens");
  const int32_t *q_at = ints(cu_seqlens, "cu_seqlens"), *k_at = ints(cu_seqlens_k, "cu_seqlens_k");
  if (!offsets_valid(q_at, count, tokens, max_seqlen) || !offsets_valid(k_at, count, keys, keys)) return false;
  std::vector<AttentionTask> tasks;
  const Tiling tiling(shape, count - 1);
  for (int64_t i = 0; i + 1 < count; ++i) {
    const int64_t q_len = q_at[i + 1] - q_at[i], k_len = k_at[i + 1] - k_at[i];
    tiling.add(tasks, {q_at[i], q_len, k_len - q_len, k_at[i], k_len, i, 0, 1, 0});
  }
  longest_first(tasks);
  VX_CALL(attention_fwd,
          {shape,
           {float(scale), float(softcap), window, segment, causal},
           {data(k), data(v), k.stride(0), k.stride(1), v.stride(0), v.stride(1), nullptr, 0, 0, 0, 0},
           data(q),
           q.stride(0),
           q.stride(1),
           sink_values(sinks, shape.hq),
           mutable_data(out),
           mutable_values<float>(lse, "lse"),
           tasks.data(),
           int64_t(tasks.size())});
  return true;
}

bool attention_paged_fwd(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor context_lens,
                         Tensor cu_seqlens_q, int64_t max_seqlen_q, std::optional<Tensor> sinks, double scale,
                         double softcap, int64_t window, int64_t segment, Tensor out) {
  STD_TORCH_CHECK(k_cache.dim() == 4 && v_cache.dim() == 4 && block_table.dim() == 2, "caches: expected 4 dimensions");
  const int64_t tokens = q.size(0), pages = k_cache.size(0), page_size = k_cache.size(1), count = context_lens.numel();
  const AttentionShape shape = shape_of(q, k_cache, v_cache, 2);
  check_groups(shape);
  check_heads(q, "q", tokens, shape.hq, shape.d, shape.dtype);
  check_heads(out, "out", tokens, shape.hq, shape.dv, shape.dtype);
  STD_TORCH_CHECK(out.is_contiguous(), "out");
  STD_TORCH_CHECK(page_size > 0 && v_cache.size(0) == pages && v_cache.size(1) == page_size &&
                      v_cache.size(2) == shape.hk && k_cache.size(3) == shape.d && k_cache.stride(3) == 1 &&
                      v_cache.stride(3) == 1 && dtype_of(k_cache, "k_cache") == shape.dtype &&
                      dtype_of(v_cache, "v_cache") == shape.dtype,
                  "caches: expected (pages, page_size, Hk, D) and (pages, page_size, Hk, Dv) in q's dtype");
  STD_TORCH_CHECK(block_table.size(0) == count && (block_table.size(1) <= 1 || block_table.stride(1) == 1),
                  "block_table: expected rows, one for each context length");
  STD_TORCH_CHECK(cu_seqlens_q.numel() == count + 1, "cu_seqlens_q: expected one more than context_lens");
  const int32_t *q_at = ints(cu_seqlens_q, "cu_seqlens_q"), *lens = ints(context_lens, "context_lens");
  const int32_t* table = values<int32_t>(block_table, "block_table");
  const int64_t table_stride = block_table.stride(0), capacity = block_table.size(1) * page_size;
  if (!offsets_valid(q_at, count + 1, tokens, max_seqlen_q)) return false;
  std::vector<AttentionTask> tasks;
  const Tiling tiling(shape, count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t q_len = q_at[i + 1] - q_at[i], k_len = lens[i];
    if (k_len < q_len || k_len > capacity) return false;
    for (int64_t p = 0; p * page_size < k_len; ++p)
      if (uint64_t(int64_t(table[i * table_stride + p])) >= uint64_t(pages)) return false;
    tiling.add(tasks, {q_at[i], q_len, k_len - q_len, 0, k_len, i, 0, 1, 0});
  }
  longest_first(tasks);
  VX_CALL(attention_fwd,
          {shape,
           {float(scale), float(softcap), window, segment, true},
           {data(k_cache), data(v_cache), k_cache.stride(1), k_cache.stride(2), v_cache.stride(1), v_cache.stride(2),
            table, table_stride, page_size, k_cache.stride(0), v_cache.stride(0)},
           data(q),
           q.stride(0),
           q.stride(1),
           sink_values(sinks, shape.hq),
           mutable_data(out),
           nullptr,
           tasks.data(),
           int64_t(tasks.size())});
  return true;
}

void attention_varlen_bwd(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, Tensor cu_seqlens,
                          Tensor cu_seqlens_k, std::optional<Tensor> sinks, double scale, double softcap,
                          int64_t window, bool causal, Tensor delta, Tensor dq, Tensor dk, Tensor dv,
                          std::optional<Tensor> dsinks) {
  const int64_t tokens = q.size(0), keys = k.size(0), count = cu_seqlens.numel();
  const AttentionShape shape = shape_of(q, k, v, 1);
  check_groups(shape);
  check_heads(q, "q", tokens, shape.hq, shape.d, shape.dtype);
  check_heads(dq, "dq", tokens, shape.hq, shape.d, Dtype::f32);
  for (const Tensor* t : {&k, &dk}) check_heads(*t, "k, dk", keys, shape.hk, shape.d, shape.dtype);
  for (const Tensor* t : {&v, &dv}) check_heads(*t, "v, dv", keys, shape.hk, shape.dv, shape.dtype);
  for (const Tensor* t : {&out, &dout}) check_heads(*t, "out, dout", tokens, shape.hq, shape.dv, shape.dtype);
  for (const Tensor* t : {&out, &dout, &lse, &delta, &dq, &dk, &dv})
    STD_TORCH_CHECK(t->is_contiguous(), "backward: expected contiguous tensors");
  for (const Tensor* t : {&lse, &delta})
    STD_TORCH_CHECK(t->numel() == tokens * shape.hq, "lse, delta: expected one for each row");
  if (dsinks) check_1d(*dsinks, "dsinks", shape.hq);
  const int32_t *q_at = ints(cu_seqlens, "cu_seqlens"), *k_at = ints(cu_seqlens_k, "cu_seqlens_k");
  STD_TORCH_CHECK(cu_seqlens_k.numel() == count && offsets_valid(q_at, count, tokens, tokens) &&
                      offsets_valid(k_at, count, keys, keys),
                  "cu_seqlens: changed since the forward");
  std::vector<AttentionTask> q_tasks, k_tasks;
  int64_t total = 0, most = 0;
  for (int64_t i = 0; i + 1 < count; ++i) {
    const int64_t work = int64_t(q_at[i + 1] - q_at[i]) * (k_at[i + 1] - k_at[i]);
    total += work * shape.hk, most = std::max(most, work);
  }
  // One pass takes five products where two take seven, but a head of a sequence is then one task. No effect on bits.
  const bool fused = most * (num_threads() - 1) * 5 <= total * 2;
  Tiling tiling(shape, count - 1);
  tiling.heads = 1;
  for (int64_t i = 0; i + 1 < count; ++i) {
    const int64_t q_len = q_at[i + 1] - q_at[i], k_len = k_at[i + 1] - k_at[i];
    const AttentionTask sequence{q_at[i], q_len, k_len - q_len, k_at[i], k_len, i, 0, 1, 0};
    if (!fused) tiling.add(q_tasks, sequence);
    const int64_t blocks = fused ? 1 : (k_len + kAttentionBlock - 1) / kAttentionBlock;
    for (int64_t block = 0; block < blocks; ++block)
      for (int64_t head = 0; head < shape.hk; ++head) {
        k_tasks.push_back(sequence);
        k_tasks.back().kv_head = head, k_tasks.back().block = fused ? -1 : block;
      }
  }
  longest_first(q_tasks);
  if (fused) longest_first(k_tasks);  // else in order: the first blocks have the most queries
  VX_CALL(attention_bwd,
          {shape,
           {float(scale), float(softcap), window, 0, causal},
           {data(k), data(v), k.stride(0), k.stride(1), v.stride(0), v.stride(1), nullptr, 0, 0, 0, 0},
           data(q),
           q.stride(0),
           q.stride(1),
           sink_values(sinks, shape.hq),
           data(out),
           data(dout),
           values<float>(lse, "lse"),
           mutable_values<float>(delta, "delta"),
           tokens,
           mutable_values<float>(dq, "dq"),
           mutable_data(dk),
           mutable_data(dv),
           mutable_values<float>(dsinks, "dsinks"),
           q_tasks.data(),
           int64_t(q_tasks.size()),
           k_tasks.data(),
           int64_t(k_tasks.size())});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("attention_varlen_fwd", VX_BOX(&vx::attention_varlen_fwd));
  m.impl("attention_paged_fwd", VX_BOX(&vx::attention_paged_fwd));
  m.impl("attention_varlen_bwd", VX_BOX(&vx::attention_varlen_bwd));
}
