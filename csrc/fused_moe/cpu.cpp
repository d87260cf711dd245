#include "common/box.h"
#include "fused_moe/binding.h"
#include "fused_moe/kernels.h"

namespace vx {
namespace {

void contiguous(const Tensor& t, const char* name, int64_t rows, int64_t n) {
  check_2d(t, name, rows, n);
  STD_TORCH_CHECK(t.is_contiguous(), name, ": expected contiguous");
}

void moe_plan(Tensor ids, Tensor offsets, Tensor order, Tensor position, std::optional<Tensor>) {
  const int64_t slots = ids.numel(), experts = offsets.numel() - 1;
  VX_CALL(moe_plan, {slots, experts, ints(ids, "ids", slots), ints(offsets, "offsets", experts + 1),
                     ints(order, "order", slots), ints(position, "position", slots)});
}

void moe_gather(Tensor x, Tensor order, Tensor out) {
  const int64_t rows = out.size(0), n = x.size(1), tokens = x.size(0);
  check_2d(x, "x", tokens, n);
  contiguous(out, "out", rows, n);
  if (rows == 0) return;
  STD_TORCH_CHECK(tokens > 0 && rows % tokens == 0, "order: expected a multiple of x's rows");
  const int64_t size = dtype_of(x, "x") == Dtype::f32 ? 4 : 2;
  STD_TORCH_CHECK(dtype_of(out, "out") == dtype_of(x, "x"), "out: expected x's dtype");
  const int32_t* p = ints(order, "order", rows);
  for (int64_t i = 0; i < rows; ++i) STD_TORCH_CHECK(p[i] >= 0 && p[i] < rows, "order: expected 0 to ", rows - 1);
  VX_CALL(moe_gather, {rows, rows / tokens, n * size, data(x), x.stride(0) * size, p, mutable_data(out)});
}

void moe_combine(Tensor y, Tensor position, std::optional<Tensor> weights, Tensor out) {
  const int64_t tokens = out.size(0), n = out.size(1), slots = position.numel(), rows = y.size(0);
  contiguous(y, "y", rows, n);
  contiguous(out, "out", tokens, n);
  if (tokens == 0) return;
  STD_TORCH_CHECK(slots % tokens == 0, "position: expected a multiple of out's rows");
  STD_TORCH_CHECK(dtype_of(out, "out") == dtype_of(y, "y"), "out: expected y's dtype");
  const int32_t* p = ints(position, "position", slots);
  for (int64_t i = 0; i < slots; ++i) STD_TORCH_CHECK(p[i] >= -1 && p[i] < rows, "position: expected -1 to ", rows - 1);
  VX_CALL(moe_combine, {dtype_of(y, "y"), tokens, slots / tokens, n, data(y), p,
                        weights ? floats(*weights, "weights", slots) : nullptr, mutable_data(out)});
}

void moe_gate_bwd(Tensor h, Tensor da, Tensor order, Tensor weights, Tensor offsets, bool gelu, Tensor dh,
                  Tensor scaled, Tensor dweights) {
  const int64_t all = da.size(0), n = da.size(1), slots = order.numel(), ends = offsets.numel();
  const int64_t rows = ends ? ints(offsets, "offsets", ends)[ends - 1] : 0;
  STD_TORCH_CHECK(rows >= 0 && rows <= all && all == slots, "offsets: expected an end from 0 to ", all);
  const Dtype dtype = dtype_of(h, "h");
  contiguous(h, "h", all, 2 * n), contiguous(dh, "dh", all, 2 * n);
  contiguous(da, "da", all, n), contiguous(scaled, "scaled", all, n);
  for (const Tensor& t : {da, dh, scaled})
    STD_TORCH_CHECK(dtype_of(t, "da, dh, scaled") == dtype, "da, dh, scaled: expected h's dtype");
  const int32_t* p = ints(order, "order", slots);
  for (int64_t i = 0; i < rows; ++i) STD_TORCH_CHECK(p[i] >= 0 && p[i] < slots, "order: expected 0 to ", slots - 1);
  VX_CALL(moe_gate_bwd, {dtype, rows, n, gelu, data(h), data(da), p, floats(weights, "weights", slots),
                         mutable_data(dh), mutable_data(scaled), floats(dweights, "dweights", slots)});
}

// How many rows have a slot, whose expert is one: looked at, for a bias is read there.
int64_t placed_rows(const Tensor& ids, const Tensor& order, const Tensor& offsets, int64_t all) {
  const int64_t slots = order.numel(), experts = offsets.numel() - 1;
  const int64_t rows = experts < 0 ? 0 : ints(offsets, "offsets", experts + 1)[experts];
  STD_TORCH_CHECK(rows >= 0 && rows <= all && all == slots, "offsets: expected an end from 0 to ", all);
  const int32_t *p = ints(order, "order", slots), *e = ints(ids, "ids", slots);
  for (int64_t i = 0; i < rows; ++i) {
    STD_TORCH_CHECK(p[i] >= 0 && p[i] < slots, "order: expected 0 to ", slots - 1);
    STD_TORCH_CHECK(e[p[i]] >= 0 && e[p[i]] < experts, "ids: expected 0 to ", experts - 1);
  }
  return rows;
}

void moe_add_bias(Tensor y, Tensor bias, Tensor ids, Tensor order, Tensor offsets) {
  const int64_t all = y.size(0), n = y.size(1), slots = order.numel();
  const int64_t rows = placed_rows(ids, order, offsets, all);
  const Dtype dtype = dtype_of(y, "y");
  contiguous(y, "y", all, n), contiguous(bias, "bias", offsets.numel() - 1, n);
  STD_TORCH_CHECK(dtype_of(bias, "bias") == dtype, "bias: expected y's dtype");
  VX_CALL(moe_add_bias, {dtype, rows, n, mutable_data(y), data(bias), ints(ids, "ids", slots),
                         ints(order, "order", slots)});
}

// What moe_swiglu reads of the rows of h that have a slot; a is written.
MoeSwiglu swiglu_of(const Tensor& h, const Tensor& bias, const Tensor& ids, const Tensor& order, const Tensor& offsets,
                    Tensor& a) {
  const int64_t all = a.size(0), n = a.size(1), slots = order.numel();
  const int64_t rows = placed_rows(ids, order, offsets, all);
  const Dtype dtype = dtype_of(h, "h");
  contiguous(h, "h", all, 2 * n), contiguous(a, "a", all, n), contiguous(bias, "bias", offsets.numel() - 1, 2 * n);
  for (const Tensor& t : {bias, a}) STD_TORCH_CHECK(dtype_of(t, "bias, a") == dtype, "bias, a: expected h's dtype");
  return {dtype, rows, n, data(h), data(bias), ints(ids, "ids", slots), ints(order, "order", slots), mutable_data(a)};
}

void moe_swiglu_fwd(Tensor h, Tensor bias, Tensor ids, Tensor order, Tensor offsets, Tensor a) {
  const MoeSwiglu of = swiglu_of(h, bias, ids, order, offsets, a);
  VX_CALL(moe_swiglu_fwd, of);
}

void moe_swiglu_bwd(Tensor h, Tensor bias, Tensor da, Tensor of_bias, Tensor ids, Tensor order, Tensor weights,
                    Tensor offsets, Tensor dh, Tensor scaled, Tensor dweights) {
  const MoeSwiglu of = swiglu_of(h, bias, ids, order, offsets, scaled);
  const int64_t all = scaled.size(0), slots = order.numel();
  contiguous(da, "da", all, of.n), contiguous(of_bias, "of_bias", all, 1), contiguous(dh, "dh", all, 2 * of.n);
  for (const Tensor& t : {da, of_bias, dh})
    STD_TORCH_CHECK(dtype_of(t, "da, of_bias, dh") == of.dtype, "da, of_bias, dh: expected h's dtype");
  VX_CALL(moe_swiglu_bwd, {of, data(da), data(of_bias), floats(weights, "weights", slots), mutable_data(dh),
                           floats(dweights, "dweights", slots)});
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CPU, m) {
  m.impl("moe_plan", VX_BOX(&vx::moe_plan));
  m.impl("moe_gather", VX_BOX(&vx::moe_gather));
  m.impl("moe_combine", VX_BOX(&vx::moe_combine));
  m.impl("moe_gate_bwd", VX_BOX(&vx::moe_gate_bwd));
  m.impl("moe_add_bias", VX_BOX(&vx::moe_add_bias));
  m.impl("moe_swiglu_fwd", VX_BOX(&vx::moe_swiglu_fwd));
  m.impl("moe_swiglu_bwd", VX_BOX(&vx::moe_swiglu_bwd));
}
