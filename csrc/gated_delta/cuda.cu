// archs: 90a
// Bindings and launches of gated_delta on SM90: bf16 and fp16, rows and slots on 16-byte boundaries.
#include <algorithm>

#include "common/cuda.h"
#include "common/values.h"
#include "gated_delta/chunks.cuh"
#include "gated_delta/decode.cuh"
#include "gated_delta/grads.cuh"
#include "gated_delta/scan.cuh"
#include "gated_delta/small_decode.cuh"
#include "gated_delta/wide.cuh"
#include "gated_delta/wide_grads.cuh"
#include "gated_delta/wide_scan.cuh"

namespace vx {
namespace {

template <class T, int DK, bool STEP>
void launch(const GatedDeltaDecode& args, const DeltaStep& step, int64_t multiprocessors, int device, cudaStream_t stream) {
  auto kernel = delta::decode_kernel<T, DK, STEP>;
  constexpr int kBytes = sizeof(delta::DecodeShared<T, DK, STEP>), kBlocks = delta::kDecodeBlocks<T, DK>;
  static_assert(kBlocks * (kBytes + 1024) <= 228 << 10);
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kBytes, device, allowed);
  const int64_t items = int64_t(args.hv) * (args.dv / kDecodeColumns) * args.sequences;
  STD_TORCH_CHECK(items < (1ll << 30), "gated_delta: too many sequences");
  const dim3 grid(unsigned(std::min(items, kBlocks * multiprocessors)));
  VX_CUDA_CHECK(sm90::launch_chained(kernel, grid, kDecodeThreads, kBytes, stream, args, step));
}

template <class T, bool STEP, bool EARLY>
void launch_small(const GatedDeltaDecode& args, const DeltaStep& step, cudaStream_t stream) {
  constexpr int kBytes = sizeof(delta::SmallShared<T, kSmallDepth>);
  static_assert(kBytes <= 48 << 10);
  const dim3 grid(unsigned(args.hv / args.hk * (args.dv / kDecodeColumns)), unsigned(args.hk), unsigned(args.sequences));
  auto kernel = delta::small_decode_kernel<T, kSmallDepth, kSmallDepth, STEP, EARLY>;
  VX_CUDA_CHECK(sm90::launch_chained(kernel, grid, delta::kSmallThreads, kBytes, stream, args, step));
}

// Which kernel computes single rows; small: that of few rows, early: it asks for memory before the kernel before has ended.
struct Single {
  int64_t multiprocessors;
  bool small, early;
};

void check_single(const Single& by, const GatedDeltaDecode& args) {
  STD_TORCH_CHECK(by.multiprocessors > 0 && (by.small || !by.early), "gated_delta: early: expected small");
  STD_TORCH_CHECK(!by.small || (args.dk == kSmallDepth && args.dv == kSmallDepth && args.hk < 65536),
                  "gated_delta: small: expected heads of ", kSmallDepth);
}

template <class T, bool STEP>
void launch_decode(const GatedDeltaDecode& args, const DeltaStep& step, const Single& by, int device, cudaStream_t stream) {
  if (by.small)
    return by.early ? launch_small<T, STEP, true>(args, step, stream) : launch_small<T, STEP, false>(args, step, stream);
  switch (args.dk) {
    case 64: return launch<T, 64, STEP>(args, step, by.multiprocessors, device, stream);
    case 128: return launch<T, 128, STEP>(args, step, by.multiprocessors, device, stream);
    default: launch<T, 256, STEP>(args, step, by.multiprocessors, device, stream);
  }
}

template <class T, int COLUMNS>
void launch(const GatedDeltaChunks& args, int device, cudaStream_t stream) {
  auto kernel = delta::chunks_kernel<T, 128, COLUMNS>;
  constexpr int kBytes = sizeof(delta::ChunkShared<T, 128, COLUMNS>);
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, kBytes, device, allowed);
  const dim3 grid(unsigned(args.hv * (args.dv / COLUMNS)), unsigned(args.sequences));
  VX_CUDA_CHECK(sm90::launch_chained(kernel, grid, kChunkThreads, kBytes, stream, args));
}

template <class T>
void prepare(const GatedDeltaBackward& rows, delta::Prepared* prepared, int device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(delta::PrepareShared<T>);
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(delta::prepare_kernel<T>, kBytes, device, allowed);
  if (rows.tokens == 0) return;
  const dim3 grid(unsigned(rows.tokens / kChunk + rows.sequences), unsigned(rows.hk));
  delta::prepare_kernel<T><<<grid, kBackwardThreads, kBytes, stream>>>(rows, prepared);
  VX_CUDA_CHECK(cudaGetLastError());
}

template <class T, bool KEEP>
void pass(const GatedDeltaChunks& args, const delta::Prepared* prepared, bool wide, int device, cudaStream_t stream) {
  constexpr int kBytes = sizeof(delta::WholeShared<T>);
  static_assert(kBytes <= 227 << 10);
  static std::atomic<uint64_t> allowed{0}, wide_allowed{0};
  const dim3 grid(unsigned(args.hv * (args.dv / delta::kColumns)), unsigned(args.sequences));
  if (wide) {
    allow_shared_memory(delta::wide_kernel<T, KEEP>, delta::kWideBytes<T>, device, wide_allowed);
    delta::wide_kernel<T, KEEP><<<grid, delta::kWideWholeThreads, delta::kWideBytes<T>, stream>>>(args, prepared);
    VX_CUDA_CHECK(cudaGetLastError());
  } else {
    allow_shared_memory(delta::whole_kernel<T, KEEP>, kBytes, device, allowed);
    delta::whole_kernel<T, KEEP><<<grid, delta::kPassThreads, kBytes, stream>>>(args, prepared);
    VX_CUDA_CHECK(cudaGetLastError());
  }
}

template <class T>
void launch(const GatedDeltaChunks& args, const GatedDeltaBackward& rows, delta::Prepared* prepared, bool wide,
            int device, cudaStream_t stream) {
  prepare<T>(rows, prepared, device, stream);
  args.out ? pass<T, false>(args, prepared, wide, device, stream) : pass<T, true>(args, prepared, wide, device, stream);
}

template <class T>
void launch(const GatedDeltaBackward& args, delta::Prepared* prepared, bool is_prepared, bool wide, int64_t chunks,
            int device, cudaStream_t stream) {
  if (!is_prepared) prepare<T>(args, prepared, device, stream);
  constexpr int kScan = sizeof(delta::ScanShared<T>), kGrads = delta::kGradsBytes<T>;
  static_assert(kScan <= 227 << 10 && kGrads <= 227 << 10);
  static std::atomic<uint64_t> scan_allowed{0}, wide_allowed{0}, grads_allowed{0}, wide_grads_allowed{0};
  allow_shared_memory(delta::scan_kernel<T>, kScan, device, scan_allowed);
  allow_shared_memory(delta::wide_scan_kernel<T>, delta::kWideScanBytes<T>, device, wide_allowed);
  allow_shared_memory(delta::grads_kernel<T>, kGrads, device, grads_allowed);
  allow_shared_memory(delta::wide_grads_kernel<T>, delta::kWideGradsBytes<T>, device, wide_grads_allowed);
  const dim3 columns(unsigned(args.hv * (args.dv_size / delta::kColumns)), unsigned(args.sequences));
  if (wide) {
    delta::wide_scan_kernel<T><<<columns, delta::kWideThreads, delta::kWideScanBytes<T>, stream>>>(args, prepared);
    VX_CUDA_CHECK(cudaGetLastError());
  } else {
    delta::scan_kernel<T><<<columns, delta::kPassThreads, kScan, stream>>>(args, prepared);
    VX_CUDA_CHECK(cudaGetLastError());
  }
  if (args.tokens == 0) return;
  const dim3 heads(unsigned(chunks), unsigned(args.hk));
  if (wide) {
    delta::wide_grads_kernel<T><<<heads, delta::kWideGradsThreads, delta::kWideGradsBytes<T>, stream>>>(args);
    VX_CUDA_CHECK(cudaGetLastError());
  } else {
    delta::grads_kernel<T><<<heads, kBackwardThreads, kGrads, stream>>>(args);
    VX_CUDA_CHECK(cudaGetLastError());
  }
}

void check_rows(const Tensor& t, const char* name, int64_t rows, int64_t heads, int64_t d, ScalarType dtype) {
  STD_TORCH_CHECK(t.dim() == 3 && t.size(0) == rows && t.size(1) == heads && t.size(2) == d && t.scalar_type() == dtype,
                  "gated_delta: ", name, ": expected (", rows, ", ", heads, ", ", d, ") in the dtype of q");
  check_last_dim_contiguous(t, name);
}

// Slots of contiguous elements, each on a 16-byte boundary; returns the elements from one to the next.
int64_t check_slots(const Tensor& t, const char* name, int64_t slots, std::initializer_list<int64_t> sizes) {
  int64_t size = 1;
  auto expected = sizes.end();
  for (int64_t d = t.dim() - 1; d > 0; --d) {
    --expected;
    STD_TORCH_CHECK(t.size(d) == *expected && (t.size(d) == 1 || t.stride(d) == size), "gated_delta: ", name,
                    ": expected contiguous slots of its sizes");
    size *= *expected;
  }
  const int64_t step = slots > 1 ? t.stride(0) : size, each = 16 / t.element_size();
  STD_TORCH_CHECK(t.size(0) == slots && expected == sizes.begin(), "gated_delta: ", name, ": expected ", slots, " slots");
  STD_TORCH_CHECK(step % each == 0 && reinterpret_cast<uintptr_t>(data(t)) % 16 == 0, "gated_delta: ", name,
                  ": expected slots on 16-byte boundaries");
  return step;
}

// What both kernels take: rows of this call, and where sequences lie.
template <class Args>
void fill_rows(Args& args, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
               const Tensor& offsets, double scale, bool l2norm) {
  STD_TORCH_CHECK(q.dim() == 3 && v.dim() == 3 && offsets.numel() > 0, "gated_delta: expected q (T, Hk, dk), v (T, Hv, dv)");
  const int64_t tokens = q.size(0), hk = q.size(1), dk = q.size(2), hv = v.size(1), dv = v.size(2);
  const ScalarType dtype = q.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, "gated_delta: q: expected bf16 or fp16");
  STD_TORCH_CHECK(dk > 0 && dk <= 256 && dv > 0 && dv <= 256 && hk > 0 && hv > 0 && hv % hk == 0, "gated_delta: heads");
  const int64_t sequences = offsets.numel() - 1;
  STD_TORCH_CHECK(sequences < 65536 && tokens < (1ll << 31), "gated_delta: too many sequences or rows");
  check_rows(q, "q", tokens, hk, dk, dtype);
  check_rows(k, "k", tokens, hk, dk, dtype);
  check_rows(v, "v", tokens, hv, dv, dtype);
  check_2d(g, "g", tokens, hv);
  check_2d(beta, "beta", tokens, hv);
  const bool wide = beta.scalar_type() == ScalarType::Float;
  STD_TORCH_CHECK(g.scalar_type() == ScalarType::Float && (wide || beta.scalar_type() == dtype),
                  "gated_delta: g: expected fp32; beta: fp32, or as q");
  args.q = data(q), args.k = data(k), args.v = data(v);
  args.q_row = q.stride(0), args.q_head = q.stride(1), args.k_row = k.stride(0), args.k_head = k.stride(1);
  args.v_row = v.stride(0), args.v_head = v.stride(1);
  args.g = static_cast<const float*>(data(g)), args.beta = data(beta), args.wide_beta = wide;
  args.g_row = g.stride(0), args.beta_row = beta.stride(0);
  args.offsets = values<int32_t>(offsets, "cu_seqlens", sequences + 1);
  args.sequences = int(sequences), args.tokens = int(tokens);
  args.hk = int(hk), args.hv = int(hv), args.dk = int(dk), args.dv = int(dv);
  args.scale = float(scale), args.l2norm = l2norm;
}

// What sequences go on from, and where they go on.
template <class Args>
void fill_slots(Args& args, const Tensor& q, const Tensor& state, const Tensor& open_k, const Tensor& open_u,
                const Tensor& open_g, const Tensor& slots, const Tensor& context_lens) {
  STD_TORCH_CHECK(open_k.dim() == 4 && open_u.dim() == 4 && open_g.dim() == 3 && state.dim() == 4 &&
                      open_k.scalar_type() == q.scalar_type() && state.scalar_type() == ScalarType::Float &&
                      open_u.scalar_type() == ScalarType::Float && open_g.scalar_type() == ScalarType::Float,
                  "gated_delta: expected slots in fp32, open_k as q");
  const int64_t count = state.size(0), hk = args.hk, hv = args.hv, dk = args.dk, dv = args.dv;
  STD_TORCH_CHECK(count < (1ll << 31), "gated_delta: too many slots");
  args.state_slot = check_slots(state, "state", count, {hv, dk, dv});
  args.k_slot = check_slots(open_k, "open_k", count, {kChunk, hk, dk});
  args.w_slot = check_slots(open_u, "open_u", count, {kChunk, hv, dv});
  args.g_slot = check_slots(open_g, "open_g", count, {kChunk, hv});
  args.state = static_cast<float*>(mutable_data(state));
  args.open_w = static_cast<float*>(mutable_data(open_u));
  args.slots = values<int32_t>(slots, "slots", args.sequences);
  args.context_lens = values<int32_t>(context_lens, "context_lens", args.sequences);
  args.slot_count = int(count);
}

void check_out(const Tensor& out, const Tensor& v) {
  STD_TORCH_CHECK(out.dim() == 3 && out.is_contiguous() && out.numel() == v.numel() && out.scalar_type() == v.scalar_type(),
                  "gated_delta: out: expected contiguous, as v");
}

// One row of each sequence that has one in this call; the others are left to another kernel.
void gated_delta_decode(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor state, Tensor open_k, Tensor open_u,
                        Tensor open_g, Tensor slots, Tensor context_lens, Tensor cu_seqlens_q, double scale, bool l2norm,
                        int64_t multiprocessors, bool small, bool early, Tensor out) {
  GatedDeltaDecode args{};
  fill_rows(args, q, k, v, g, beta, cu_seqlens_q, scale, l2norm);
  fill_slots(args, q, state, open_k, open_u, open_g, slots, context_lens);
  args.open_k = mutable_data(open_k), args.open_g = static_cast<float*>(mutable_data(open_g));
  const Single by{multiprocessors, small, early};
  check_single(by, args);
  STD_TORCH_CHECK((args.dk == 64 || args.dk == 128 || args.dk == 256) && args.dv % kDecodeColumns == 0,
                  "gated_delta: expected heads of 64, 128 or 256, and values of a multiple of ", kDecodeColumns);
  check_out(out, v);
  args.out = mutable_data(out);
  if (args.sequences == 0 || args.tokens == 0) return;
  const DeviceGuard guard = on_device_of(q);
  const cudaStream_t stream = current_stream(q);
  const int device = q.get_device_index();
  if (q.scalar_type() == ScalarType::BFloat16)
    launch_decode<__nv_bfloat16, false>(args, {}, by, device, stream);
  else
    launch_decode<__half, false>(args, {}, by, device, stream);
}

// The same of rows as a layer's projection gives them: with the convolution, which remembers its inputs, and the gates.
void gated_delta_step(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor taps, Tensor a, Tensor b, Tensor a_log,
                      Tensor dt_bias, Tensor state, Tensor open_k, Tensor open_u, Tensor open_g, Tensor slots,
                      Tensor context_lens, Tensor cu_seqlens_q, double scale, bool l2norm, bool doubled,
                      int64_t multiprocessors, bool small, bool early, Tensor out) {
  const ScalarType dtype = x.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::BFloat16 || dtype == ScalarType::Half, "gated_delta: x: expected bf16 or fp16");
  STD_TORCH_CHECK(x.dim() == 2 && out.dim() == 3 && open_k.dim() == 4 && taps.dim() == 3 && cu_seqlens_q.numel() > 0,
                  "gated_delta: expected x (T, channels), taps (slots, ring, channels), open_k (slots, 64, Hk, dk)");
  const int64_t tokens = x.size(0), hk = open_k.size(2), dk = open_k.size(3), hv = out.size(1), dv = out.size(2);
  const int64_t sequences = cu_seqlens_q.numel() - 1, channels = 2 * hk * dk + hv * dv, ring = taps.size(1);
  STD_TORCH_CHECK((dk == 64 || dk == 128 || dk == 256) && dv > 0 && dv <= 256 && dv % kDecodeColumns == 0 &&
                      hk > 0 && hv > 0 && hv % hk == 0 && hv % 2 == 0,
                  "gated_delta: heads");
  STD_TORCH_CHECK(sequences < 65536 && tokens < (1ll << 31) && channels < (1ll << 31), "gated_delta: too many sequences or rows");
  check_2d(x, "x", tokens, channels);
  check_2d(weight, "weight", channels, kStepTaps);
  check_2d(a, "a", tokens, hv);
  check_2d(b, "b", tokens, hv);
  check_1d(a_log, "a_log", hv);
  check_1d(dt_bias, "dt_bias", hv);
  if (bias) check_1d(*bias, "bias", channels);
  STD_TORCH_CHECK(weight.is_contiguous() && weight.scalar_type() == dtype && taps.scalar_type() == dtype && a.scalar_type() == dtype &&
                      b.scalar_type() == dtype && (!bias || bias->scalar_type() == dtype),
                  "gated_delta: weight, bias, taps, a, b: expected the dtype of x");
  for (const Tensor& t : {a_log, dt_bias})
    STD_TORCH_CHECK(t.scalar_type() == ScalarType::Float || t.scalar_type() == dtype, "gated_delta: a_log, dt_bias: dtype");
  const auto on = [](const Tensor& t, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(data(t)) % bytes == 0; };
  STD_TORCH_CHECK(x.stride(0) % 8 == 0 && on(x, 16) && on(weight, 16) && a.stride(0) % 2 == 0 && b.stride(0) % 2 == 0 && on(a, 4) &&
                      on(b, 4) && on(a_log, 4) && on(dt_bias, 4),
                  "gated_delta: expected rows on 16-byte boundaries, of gates on 4-byte boundaries");
  STD_TORCH_CHECK(ring >= kStepTaps && (ring & (ring - 1)) == 0, "gated_delta: taps: expected a ring of a power of two");
  GatedDeltaDecode args{};
  args.offsets = values<int32_t>(cu_seqlens_q, "cu_seqlens_q", sequences + 1);
  args.sequences = int(sequences), args.tokens = int(tokens);
  args.hk = int(hk), args.hv = int(hv), args.dk = int(dk), args.dv = int(dv);
  args.scale = float(scale), args.l2norm = l2norm;
  const Single by{multiprocessors, small, early};
  check_single(by, args);
  fill_slots(args, x, state, open_k, open_u, open_g, slots, context_lens);
  args.open_k = mutable_data(open_k), args.open_g = static_cast<float*>(mutable_data(open_g));
  STD_TORCH_CHECK(out.is_contiguous() && out.size(0) == tokens && out.scalar_type() == dtype, "gated_delta: out");
  args.out = mutable_data(out);
  DeltaStep step{};
  step.x = data(x), step.x_row = x.stride(0);
  step.weight = data(weight), step.bias = data(bias);
  step.taps_slot = check_slots(taps, "taps", args.slot_count, {ring, channels});
  step.taps = mutable_data(taps), step.ring = int(ring), step.channels = int(channels);
  step.a = data(a), step.b = data(b), step.a_row = a.stride(0), step.b_row = b.stride(0);
  step.a_log = data(a_log), step.wide_a_log = a_log.scalar_type() == ScalarType::Float;
  step.dt_bias = data(dt_bias), step.wide_dt_bias = dt_bias.scalar_type() == ScalarType::Float;
  step.doubled = doubled;
  if (sequences == 0 || tokens == 0) return;
  const DeviceGuard guard = on_device_of(x);
  if (dtype == ScalarType::BFloat16)
    launch_decode<__nv_bfloat16, true>(args, step, by, x.get_device_index(), current_stream(x));
  else
    launch_decode<__half, true>(args, step, by, x.get_device_index(), current_stream(x));
}

float* planes(const std::optional<Tensor>& t, const char* name, int64_t size) {
  if (!t) return nullptr;
  STD_TORCH_CHECK(t->is_contiguous() && t->numel() >= size && t->scalar_type() == ScalarType::Float, "gated_delta: ", name,
                  ": expected contiguous fp32 of at least ", size, " values");
  return static_cast<float*>(mutable_data(*t));
}

// What the kernels of whole sequences take of their rows.
GatedDeltaBackward rows_of(const GatedDeltaChunks& from) {
  GatedDeltaBackward args{};
  args.q = from.q, args.k = from.k, args.v = from.v;
  args.q_row = from.q_row, args.q_head = from.q_head, args.k_row = from.k_row, args.k_head = from.k_head;
  args.v_row = from.v_row, args.v_head = from.v_head;
  args.g = from.g, args.beta = static_cast<const float*>(from.beta);
  args.offsets = from.offsets;
  args.sequences = from.sequences, args.tokens = from.tokens, args.hk = from.hk, args.hv = from.hv, args.dv_size = from.dv;
  args.scale = from.scale, args.l2norm = from.l2norm;
  return args;
}

GatedDeltaChunks fill_whole(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& g, const Tensor& beta,
                            const Tensor& cu_seqlens, double scale, bool l2norm) {
  GatedDeltaChunks args{};
  fill_rows(args, q, k, v, g, beta, cu_seqlens, scale, l2norm);
  const auto aligned = [](const Tensor& t) {
    return t.stride(0) % 8 == 0 && t.stride(1) % 8 == 0 && reinterpret_cast<uintptr_t>(data(t)) % 16 == 0;
  };
  STD_TORCH_CHECK(aligned(q) && aligned(k) && aligned(v), "gated_delta: expected rows and heads on 16-byte boundaries");
  STD_TORCH_CHECK(args.dk == 128 && args.dv % 64 == 0 && args.wide_beta &&
                      g.is_contiguous() && beta.is_contiguous(),
                  "gated_delta: expected heads of 128, values of a multiple of 64, contiguous fp32 gates");
  return args;
}

// prepared: fp32, of kPrepared values for each chunk and value head.
constexpr int64_t kPrepared = sizeof(delta::Prepared) / 4;
delta::Prepared* prepared_of(const Tensor& prepared, const GatedDeltaChunks& args) {
  static_assert(kPrepared == 6532);
  const int64_t chunks = args.tokens / kChunk + args.sequences;
  return reinterpret_cast<delta::Prepared*>(planes(prepared, "prepared", chunks * args.hv * kPrepared));
}

// Whole sequences. wide: by the warpgroup instruction.
void gated_delta_whole(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens,
                       std::optional<Tensor> initial_state, std::optional<Tensor> final_state, std::optional<Tensor> states,
                       std::optional<Tensor> us, Tensor prepared, double scale, bool l2norm, bool wide,
                       std::optional<Tensor> out) {
  GatedDeltaChunks args = fill_whole(q, k, v, g, beta, cu_seqlens, scale, l2norm);
  const int64_t plane = int64_t(args.hv) * args.dk * args.dv, chunks = args.tokens / kChunk + args.sequences;
  args.initial = planes(initial_state, "initial_state", args.sequences * plane);
  args.final_state = planes(final_state, "final_state", args.sequences * plane);
  args.states = planes(states, "states", chunks * plane);
  args.us = planes(us, "us", v.numel());
  delta::Prepared* const to = prepared_of(prepared, args);
  STD_TORCH_CHECK(bool(out) != bool(states) && bool(states) == bool(us),
                  "gated_delta: expected out, or else states and us");
  if (out) {
    check_out(*out, v);
    args.out = mutable_data(*out);
  }
  if (args.sequences == 0) return;
  const GatedDeltaBackward rows = rows_of(args);
  const DeviceGuard guard = on_device_of(q);
  const cudaStream_t stream = current_stream(q);
  const int device = q.get_device_index();
  if (q.scalar_type() == ScalarType::BFloat16)
    launch<__nv_bfloat16>(args, rows, to, wide, device, stream);
  else
    launch<__half>(args, rows, to, wide, device, stream);
}

void check_out(const Tensor& out, const Tensor& like, const char* name) {
  STD_TORCH_CHECK(out.is_contiguous() && out.numel() == like.numel() && out.scalar_type() == like.scalar_type(),
                  "gated_delta: ", name, ": expected contiguous, of the size and dtype of what it is the gradient of");
}

// All gradients, from what gated_delta_whole or gated_delta_chunks keeps. prepared: as gated_delta_whole writes it, where
// it has been; else it is written here. wide: the scan by the warpgroup instruction.
void gated_delta_backward(Tensor dout, std::optional<Tensor> dfinal, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
                          Tensor cu_seqlens, Tensor states, Tensor us, Tensor prepared, bool is_prepared, double scale,
                          bool l2norm, bool wide, Tensor dstates, Tensor dus, Tensor dq, Tensor dk, Tensor dv, Tensor dg,
                          Tensor dbeta, std::optional<Tensor> dinitial) {
  const GatedDeltaChunks rows = fill_whole(q, k, v, g, beta, cu_seqlens, scale, l2norm);
  delta::Prepared* const between = prepared_of(prepared, rows);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(data(dout)) % 16 == 0, "gated_delta: dout: expected a 16-byte boundary");
  check_out(dout, v, "dout"), check_out(dq, q, "dq"), check_out(dk, k, "dk"), check_out(dv, v, "dv");
  check_out(dg, g, "dg"), check_out(dbeta, beta, "dbeta");
  const int64_t plane = int64_t(rows.hv) * rows.dk * rows.dv, chunks = rows.tokens / kChunk + rows.sequences;
  GatedDeltaBackward args = rows_of(rows);
  args.dout = data(dout);
  args.dfinal = planes(dfinal, "dfinal_state", rows.sequences * plane);
  args.dinitial = planes(dinitial, "dinitial_state", rows.sequences * plane);
  args.states = planes(states, "states", chunks * plane), args.dstates = planes(dstates, "dstates", chunks * plane);
  args.us = planes(us, "us", v.numel()), args.dus = planes(dus, "dus", v.numel());
  args.dq = mutable_data(dq), args.dk = mutable_data(dk), args.dv = mutable_data(dv);
  args.dg = static_cast<float*>(mutable_data(dg)), args.dbeta = static_cast<float*>(mutable_data(dbeta));
  if (args.sequences == 0) return;
  const DeviceGuard guard = on_device_of(q);
  const cudaStream_t stream = current_stream(q);
  const int device = q.get_device_index();
  if (q.scalar_type() == ScalarType::BFloat16)
    launch<__nv_bfloat16>(args, between, is_prepared, wide, chunks, device, stream);
  else
    launch<__half>(args, between, is_prepared, wide, chunks, device, stream);
}

// Whole sequences, or with slots those of more than one row; a block takes this many columns. prepared: those that go on
// from a chunk's start go as whole sequences do by the warpgroup instruction.
void gated_delta_chunks(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor cu_seqlens,
                        std::optional<Tensor> initial_state, std::optional<Tensor> final_state, std::optional<Tensor> states,
                        std::optional<Tensor> us, std::optional<Tensor> state, std::optional<Tensor> open_k,
                        std::optional<Tensor> open_u, std::optional<Tensor> open_g, std::optional<Tensor> slots,
                        std::optional<Tensor> context_lens, std::optional<Tensor> prepared, double scale, bool l2norm,
                        int64_t columns, std::optional<Tensor> out) {
  GatedDeltaChunks args{};
  fill_rows(args, q, k, v, g, beta, cu_seqlens, scale, l2norm);
  const auto aligned = [](const Tensor& t) {
    return t.stride(0) % 8 == 0 && t.stride(1) % 8 == 0 && reinterpret_cast<uintptr_t>(data(t)) % 16 == 0;
  };
  STD_TORCH_CHECK(aligned(q) && aligned(k) && aligned(v), "gated_delta: expected rows and heads on 16-byte boundaries");
  STD_TORCH_CHECK(args.dk == 128 && (columns == 32 || columns == 64) && args.dv % columns == 0,
                  "gated_delta: expected heads of 128, and values of a multiple of ", columns, ", 32 or 64");
  const int64_t plane = int64_t(args.hv) * args.dk * args.dv;
  args.initial = planes(initial_state, "initial_state", args.sequences * plane);
  args.final_state = planes(final_state, "final_state", args.sequences * plane);
  args.states = planes(states, "states", (args.tokens / kChunk + args.sequences) * plane);
  args.us = planes(us, "us", v.numel());
  if (slots) {
    STD_TORCH_CHECK(state && open_k && open_u && open_g && context_lens && !initial_state && !final_state && !states,
                    "gated_delta: slots: expected all that they hold, and no other states");
    fill_slots(args, q, *state, *open_k, *open_u, *open_g, *slots, *context_lens);
    args.open_k = data(*open_k), args.open_g = static_cast<float*>(mutable_data(*open_g));
  }
  if (out) {
    check_out(*out, v);
    args.out = mutable_data(*out);
  }
  if (args.sequences == 0) return;
  const DeviceGuard guard = on_device_of(q);
  const cudaStream_t stream = current_stream(q);
  const int device = q.get_device_index();
  if (prepared) {
    STD_TORCH_CHECK(slots && out && args.wide_beta && g.is_contiguous() && beta.is_contiguous(),
                    "gated_delta: prepared: expected slots, outputs, and contiguous fp32 gates");
    delta::Prepared* const to = prepared_of(*prepared, args);
    const GatedDeltaBackward rows = rows_of(args);
    args.within = true;
    if (q.scalar_type() == ScalarType::BFloat16)
      launch<__nv_bfloat16>(args, rows, to, true, device, stream);
    else
      launch<__half>(args, rows, to, true, device, stream);
  }
  if (q.scalar_type() == ScalarType::BFloat16)
    columns == 32 ? launch<__nv_bfloat16, 32>(args, device, stream) : launch<__nv_bfloat16, 64>(args, device, stream);
  else
    columns == 32 ? launch<__half, 32>(args, device, stream) : launch<__half, 64>(args, device, stream);
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("gated_delta_decode", TORCH_BOX(&vx::gated_delta_decode));
  m.impl("gated_delta_step", TORCH_BOX(&vx::gated_delta_step));
  m.impl("gated_delta_chunks", TORCH_BOX(&vx::gated_delta_chunks));
  m.impl("gated_delta_whole", TORCH_BOX(&vx::gated_delta_whole));
  m.impl("gated_delta_backward", TORCH_BOX(&vx::gated_delta_backward));
}
