#include "common/box.h"
#include "common/offsets.h"
#include "common/values.h"
#include "gated_delta/kernels.h"

namespace vx {
namespace {

void check_heads(const Tensor& t, const char* name, int64_t rows, int64_t heads, int64_t d, Dtype dtype) {
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == rows && t.size(1) == heads && t.size(2) == d, name, ": expected (", rows,
                  ", ", heads, ", ", d, ")");
  check_dtype(t, name, dtype);
  check_last_dim_contiguous(t, name);
}

const float* plain(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.numel() == size, name, ": expected ", size, " values");
  return values<float>(t, name, size);
}

GatedDelta delta_args(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                      const Tensor& offsets, double scale, bool l2norm) {
  STD_TORCH_CHECK(q.dim() == 3 && v.dim() == 3, "q: expected (T, Hk, dk); v: (T, Hv, dv)");
  const int64_t tokens = q.size(0), hk = q.size(1), dk = q.size(2), hv = v.size(1), dv = v.size(2);
  const Dtype dtype = dtype_of(q, "q");
  check_heads(q, "q", tokens, hk, dk, dtype);
  check_heads(k, "k", tokens, hk, dk, dtype);
  check_heads(v, "v", tokens, hv, dv, dtype);
  STD_TORCH_CHECK(hk > 0 && hv > 0 && hv % hk == 0 && hv / hk <= 64 && dk > 0 && dv > 0, "heads: ", hv, " and ", hk);
  return {dtype,
          hk,
          hv,
          dk,
          dv,
          offsets.numel() - 1,
          data(q),
          data(k),
          data(v),
          q.stride(0),
          q.stride(1),
          k.stride(0),
          k.stride(1),
          v.stride(0),
          v.stride(1),
          plain(g, "g", tokens * hv),
          plain(beta, "beta", tokens * hv),
          float(scale),
          l2norm,
          values<int32_t>(offsets, "cu_seqlens", 1)};
}

// NaN is no error: it stays in its own sequence.
bool gates_valid(const GatedDelta& op, int64_t count) {
  for (int64_t i = 0; i < count; ++i)
    if (op.g[i] > 0.0f || op.beta[i] < 0.0f || op.beta[i] > 2.0f) return false;
  return true;
}

const float* states(const std::optional<Tensor>& t, const char* name, const GatedDelta& op) {
  return t ? plain(*t, name, op.sequences * op.hv * op.dk * op.dv) : nullptr;
}
float* mutable_states(const std::optional<Tensor>& t, const char* name, const GatedDelta& op) {
  return const_cast<float*>(states(t, name, op));
}

// Slots of `size` contiguous elements each, any distance apart; returns how many there are.
int64_t check_slots(const Tensor& t, const char* name, int64_t size) {
  int64_t expected = 1;
  STD_TORCH_CHECK(t.dim() >= 2, name, ": expected slots");
  for (int64_t d = t.dim() - 1; d > 0; --d) {
    STD_TORCH_CHECK(t.size(d) == 1 || t.stride(d) == expected, name, ": expected contiguous slots");
    expected *= t.size(d);
  }
  STD_TORCH_CHECK(expected == size, name, ": expected ", size, " elements in a slot");
  return t.size(0);
}

bool gated_delta_varlen_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens,
                            std::optional<Tensor> initial_state, double scale, bool l2norm, Tensor out,
                            std::optional<Tensor> final_state) {
  const GatedDelta op = delta_args(q, k, v, g, beta, cu_seqlens, scale, l2norm);
  const int64_t tokens = q.size(0);
  check_heads(out, "out", tokens, op.hv, op.dv, op.dtype);
  STD_TORCH_CHECK(out.is_contiguous(), "out: expected contiguous");
  const float* initial = states(initial_state, "initial_state", op);
  float* last = mutable_states(final_state, "final_state", op);
  if (!offsets_valid(op.offsets, op.sequences + 1, tokens) || !gates_valid(op, tokens * op.hv)) return false;
  VX_CALL(gated_delta_fwd, {op, {}, initial, last, mutable_data(out)});
  return true;
}

bool gated_delta_paged_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor open_k,
                           Tensor open_u, Tensor open_g, Tensor slots, Tensor context_lens, Tensor cu_seqlens_q,
                           int64_t max_seqlen_q, double scale, bool l2norm, Tensor out) {
  const GatedDelta op = delta_args(q, k, v, g, beta, cu_seqlens_q, scale, l2norm);
  const int64_t tokens = q.size(0);
  check_heads(out, "out", tokens, op.hv, op.dv, op.dtype);
  STD_TORCH_CHECK(out.is_contiguous(), "out: expected contiguous");
  const int64_t count = check_slots(state, "state", op.hv * op.dk * op.dv);
  check_dtype(open_k, "open_k", op.dtype);
  STD_TORCH_CHECK(check_slots(open_k, "open_k", kDeltaChunk * op.hk * op.dk) == count &&
                      check_slots(open_u, "open_u", kDeltaChunk * op.hv * op.dv) == count &&
                      check_slots(open_g, "open_g", kDeltaChunk * op.hv) == count,
                  "open_k, open_u, open_g: expected as many slots as state has");
  const int32_t *at = values<int32_t>(slots, "slots", op.sequences),
                *lens = values<int32_t>(context_lens, "context_lens", op.sequences);
  const DeltaSlots open{mutable_values<float>(state, "state"),
                        mutable_data(open_k),
                        mutable_values<float>(open_u, "open_u"),
                        mutable_values<float>(open_g, "open_g"),
                        state.stride(0),
                        open_k.stride(0),
                        open_u.stride(0),
                        open_g.stride(0),
                        at,
                        lens};
  if (!offsets_valid(op.offsets, op.sequences + 1, tokens, max_seqlen_q) ||
      !slots_valid(at, lens, op.offsets, op.sequences, count) || !gates_valid(op, tokens * op.hv))
    return false;
  VX_CALL(gated_delta_fwd, {op, open, nullptr, nullptr, mutable_data(out)});
  return true;
}

void gated_delta_varlen_bwd(Tensor dout, std::optional<Tensor> dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g,
                            Tensor beta, Tensor cu_seqlens, std::optional<Tensor> initial_state, double scale,
                            bool l2norm, Tensor parts_q, Tensor parts_k, Tensor dq, Tensor dk, Tensor dv, Tensor dg,
                            Tensor dbeta, std::optional<Tensor> dinitial_state) {
  const GatedDelta op = delta_args(q, k, v, g, beta, cu_seqlens, scale, l2norm);
  const int64_t tokens = q.size(0);
  STD_TORCH_CHECK(offsets_valid(op.offsets, op.sequences + 1, tokens), "cu_seqlens: changed since the forward");
  for (const Tensor* t : {&dout, &dv}) check_heads(*t, "dout, dv", tokens, op.hv, op.dv, op.dtype);
  for (const Tensor* t : {&dq, &dk}) check_heads(*t, "dq, dk", tokens, op.hk, op.dk, op.dtype);
  for (const Tensor* t : {&parts_q, &parts_k}) check_heads(*t, "parts", tokens, op.hv, op.dk, Dtype::f32);
  for (const Tensor* t : {&dout, &dq, &dk, &dv, &parts_q, &parts_k})
    STD_TORCH_CHECK(t->is_contiguous(), "backward: expected contiguous tensors");
  VX_CALL(gated_delta_bwd,
          {op, states(initial_state, "initial_state", op), states(dfinal_state, "dfinal_state", op), data(dout),
           mutable_values<float>(parts_q, "parts_q"), mutable_values<float>(parts_k, "parts_k"), mutable_data(dq),
           mutable_data(dk), mutable_data(dv), mutable_values<float>(dg, "dg", tokens * op.hv),
           mutable_values<float>(dbeta, "dbeta", tokens * op.hv),
           mutable_states(dinitial_state, "dinitial_state", op)});
}

DeltaGates gates_args(const Tensor& a, const Tensor& b, const Tensor& a_log, const Tensor& dt_bias) {
  STD_TORCH_CHECK(a.dim() == 2, "a: expected (T, Hv)");
  const int64_t rows = a.size(0), heads = a.size(1);
  const Dtype dtype = dtype_of(a, "a");
  check_2d(a, "a", rows, heads);
  check_2d(b, "b", rows, heads, dtype);
  check_1d(a_log, "a_log", heads);
  check_1d(dt_bias, "dt_bias", heads);
  return {dtype,
          rows,
          heads,
          a.stride(0),
          b.stride(0),
          data(a),
          data(b),
          values<float>(a_log, "a_log"),
          values<float>(dt_bias, "dt_bias")};
}

void delta_gates_fwd(Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor g, Tensor beta) {
  const DeltaGates op = gates_args(a, b, a_log, dt_bias);
  check_contiguous(g, "g", op.rows, op.heads, Dtype::f32);
  check_contiguous(beta, "beta", op.rows, op.heads, op.dtype);
  VX_CALL(delta_gates_fwd, {op, mutable_values<float>(g, "g"), mutable_data(beta)});
}

void delta_gates_bwd(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor a_log, Tensor dt_bias, Tensor da, Tensor db,
                     Tensor da_log, Tensor ddt_bias) {
  const DeltaGates op = gates_args(a, b, a_log, dt_bias);
  check_contiguous(dg, "dg", op.rows, op.heads, Dtype::f32);
  for (const Tensor* t : {&dbeta, &da, &db}) check_contiguous(*t, "dbeta, da, db", op.rows, op.heads, op.dtype);
  check_1d(da_log, "da_log", op.heads);
  check_1d(ddt_bias, "ddt_bias", op.heads);
  VX_CALL(delta_gates_bwd, {op, values<float>(dg, "dg"), data(dbeta), mutable_data(da), mutable_data(db),
                            mutable_values<float>(da_log, "da_log"), mutable_values<float>(ddt_bias, "ddt_bias")});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("gated_delta_varlen_fwd", VX_BOX(&vx::gated_delta_varlen_fwd));
  m.impl("gated_delta_paged_fwd", VX_BOX(&vx::gated_delta_paged_fwd));
  m.impl("gated_delta_varlen_bwd", VX_BOX(&vx::gated_delta_varlen_bwd));
  m.impl("delta_gates_fwd", VX_BOX(&vx::delta_gates_fwd));
  m.impl("delta_gates_bwd", VX_BOX(&vx::delta_gates_bwd));
}
