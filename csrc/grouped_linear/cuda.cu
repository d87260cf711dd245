// archs: 90a
// Bindings and launches of grouped_linear on CUDA devices: bf16 alone, rows on 16-byte boundaries. Values of offsets
// and of order that are out of range never lead out of the tensors.
#include <algorithm>
#include <initializer_list>

#include "common/cuda.h"
#include "common/tensor.h"
#include "common/values.h"
#include "grouped_linear/sm90_grouped.cuh"

namespace vx {
namespace {

const int32_t* ints(const Tensor& t, const char* name, int64_t size) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::Int, name, ": expected int32");
  check_1d(t, name, size);
  return static_cast<const int32_t*>(data(t));
}

// (rows, columns) in bf16; rows begin on 16-byte boundaries.
void check_rows(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.scalar_type() == ScalarType::BFloat16, name, ": expected bfloat16");
  check_2d(t, name, rows, columns);
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0 && columns % 8 == 0 &&
                      (rows <= 1 || t.stride(0) % 8 == 0) && rows < (int64_t(1) << 31) - 1024,
                  name, ": rows must start on 16-byte boundaries");
}

void check_devices(const char* name, std::initializer_list<const Tensor*> others, const Tensor& one) {
  for (const Tensor* t : others)
    STD_TORCH_CHECK(t->get_device_index() == one.get_device_index(), name, ": expected one device");
}

int64_t row_stride(const Tensor& t) { return t.size(0) > 1 ? t.stride(0) : t.size(1); }

constexpr int kCopyThreads = 256;

// A row per turn of a warp; rows from offsets[experts] on stay as they are. x, of which each row is read top_k times all
// over the order, stays in the L2 cache; what is written need
// not.
__global__ void __launch_bounds__(kCopyThreads)
    gather_kernel(const uint4* x, const int32_t* offsets, const int32_t* order, uint4* out, int experts, int rows,
                  int tokens, int top_k, int pieces, int64_t x_stride) {
  const int lane = threadIdx.x % 32, last = min(offsets[experts], rows);
  for (int row = (blockIdx.x * kCopyThreads + threadIdx.x) / 32; row < last; row += gridDim.x * (kCopyThreads / 32)) {
    const int token = min(max(order[row] / top_k, 0), tokens - 1);
    const uint4* from = x + token * x_stride;
    uint4* to = out + int64_t(row) * pieces;
    int i = lane;
    for (; i + 224 < pieces; i += 256) {
      uint4 v[8];
#pragma unroll
      for (int j = 0; j < 8; ++j) v[j] = __ldg(from + i + 32 * j);
#pragma unroll
      for (int j = 0; j < 8; ++j) __stcs(to + i + 32 * j, v[j]);
    }
    for (; i < pieces; i += 32) __stcs(to + i, __ldg(from + i));
  }
}

// Zeros from row offsets[experts] on.
__global__ void __launch_bounds__(kCopyThreads)
    tail_kernel(const int32_t* offsets, uint4* out, int experts, int rows, int pieces) {
  const int64_t first = int64_t(min(max(offsets[experts], 0), rows)) * pieces, end = int64_t(rows) * pieces;
  for (int64_t i = first + blockIdx.x * kCopyThreads + threadIdx.x; i < end; i += gridDim.x * kCopyThreads)
    out[i] = make_uint4(0, 0, 0, 0);
}

// to = offsets, bounded by 0 and rows, and ascending. One warp.
__global__ void bound_kernel(const int32_t* offsets, int32_t* to, int count, int rows) {
  const int lane = threadIdx.x;
  int most = 0;
  for (int first = 0; first < count; first += 32) {
    int v = first + lane < count ? min(max(offsets[first + lane], 0), rows) : 0;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const int before = __shfl_up_sync(~0u, v, step);
      if (lane >= step) v = max(v, before);
    }
    v = max(v, most);
    most = __shfl_sync(~0u, v, 31);
    if (first + lane < count) to[first + lane] = v;
  }
}

int processors_of(const Tensor& t) {
  int count = 0;
  VX_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, t.get_device_index()));
  return count;
}

void grouped_gather(Tensor x, Tensor offsets, Tensor order, int64_t top_k, Tensor out) {
  const int64_t tokens = x.size(0), columns = x.size(1), rows = order.size(0), experts = offsets.size(0) - 1;
  check_rows(x, "grouped_gather: x", tokens, columns);
  check_rows(out, "grouped_gather: out", rows, columns);
  const int32_t *ends = ints(offsets, "offsets", experts + 1), *through = ints(order, "order", rows);
  STD_TORCH_CHECK(out.is_contiguous() && experts >= 0 && top_k > 0, "grouped_gather: unexpected arguments");
  check_devices("grouped_gather", {&offsets, &order, &out}, x);
  if (rows == 0 || columns == 0 || tokens == 0) return;
  const DeviceGuard guard = on_device_of(x);
  const int64_t blocks = std::min<int64_t>((rows + 7) / 8, 16 * processors_of(x));
  gather_kernel<<<int(blocks), kCopyThreads, 0, current_stream(x)>>>(
      static_cast<const uint4*>(data(x)), ends, through, static_cast<uint4*>(mutable_data(out)), int(experts),
      int(rows), int(tokens), int(top_k), int(columns / 8), row_stride(x) / 8);
  VX_CUDA_CHECK(cudaGetLastError());
}

void grouped_bound(Tensor offsets, int64_t rows, Tensor out) {
  const int64_t count = offsets.size(0);
  const int32_t* from = ints(offsets, "offsets", count);
  ints(out, "grouped_bound: out", count);
  STD_TORCH_CHECK(rows >= 0 && rows < (int64_t(1) << 31), "grouped_bound: ", rows, " rows are too many");
  check_devices("grouped_bound", {&offsets}, out);
  const DeviceGuard guard = on_device_of(out);
  auto* to = static_cast<int32_t*>(mutable_data(out));
  bound_kernel<<<1, 32, 0, current_stream(out)>>>(from, to, int(count), int(rows));
  VX_CUDA_CHECK(cudaGetLastError());
}

void grouped_tail(Tensor offsets, Tensor out) {
  const int64_t rows = out.size(0), columns = out.size(1), experts = offsets.size(0) - 1;
  check_rows(out, "grouped_tail: out", rows, columns);
  const int32_t* ends = ints(offsets, "offsets", experts + 1);
  STD_TORCH_CHECK(out.is_contiguous() && experts >= 0, "grouped_tail: unexpected arguments");
  check_devices("grouped_tail", {&offsets}, out);
  if (rows == 0 || columns == 0) return;
  const DeviceGuard guard = on_device_of(out);
  const int64_t blocks = std::min<int64_t>((rows * columns / 8 + kCopyThreads - 1) / kCopyThreads, processors_of(out));
  tail_kernel<<<int(blocks), kCopyThreads, 0, current_stream(out)>>>(ends, static_cast<uint4*>(mutable_data(out)),
                                                                    int(experts), int(rows), int(columns / 8));
  VX_CUDA_CHECK(cudaGetLastError());
}

void check_matrices(const Tensor& t, const char* name) {
  STD_TORCH_CHECK(t.dim() == 3 && t.is_contiguous() && t.scalar_type() == ScalarType::BFloat16 &&
                      reinterpret_cast<uintptr_t>(t.const_data_ptr()) % 16 == 0,
                  name, ": expected contiguous (E, N, K) in bfloat16");
  const int64_t experts = t.size(0), n = t.size(1), k = t.size(2);
  STD_TORCH_CHECK(experts > 0 && experts <= sm90::kGroupedExperts && n % 8 == 0 && k % 8 == 0 && n > 0 && k > 0 &&
                      n < (1 << 30) && k < (1 << 30) && experts * n < (int64_t(1) << 31),
                  name, ": unexpected sizes");
}

void check_ring(int64_t units, int64_t stages) {
  STD_TORCH_CHECK(units >= 1 && units <= 16 && stages >= 2 && stages <= sm90::kGroupedMostStages &&
                      sm90::grouped_shared_bytes(int(units), int(stages)) <= 227 * 1024,
                  "grouped_linear: ", stages, " stages of ", units, " units do not fit");
}

// out = rows of every expert times its matrix: x W^T, dy W (mode 1) or the gated product of gate and up (mode 2),
// `kept` before it is gated. Tiles of at most `units` times 16 rows. bases: (rows, ranks * features) at each rank, of which
// this one, whose own is out, writes its features at all of them (mode 2 without `kept`).
void grouped_product(Tensor x, Tensor weight, Tensor offsets, int64_t mode, bool gelu, int64_t units, int64_t stages,
                     Tensor out, std::optional<Tensor> kept, std::optional<Tensor> bases, int64_t rank) {
  using sm90::Grouped;
  STD_TORCH_CHECK(mode >= 0 && mode <= 2, "grouped_product: no mode ", mode);
  const auto what = Grouped(mode);
  const int64_t ranks = bases ? bases->numel() : 1;
  const bool fits = ranks >= 2 && ranks <= kRanks && rank >= 0 && rank < ranks;
  STD_TORCH_CHECK(!bases || (fits && what == Grouped::gate_up && !kept),
                  "grouped_product: bases: expected 2 to 8 ranks, and mode 2");
  check_matrices(weight, "grouped_product: weight");
  const int64_t experts = weight.size(0), n = weight.size(1), k = weight.size(2), rows = x.size(0);
  const bool across = what == Grouped::across, gate_up = what == Grouped::gate_up;
  const int64_t depth = across ? n : k, features = across ? k : gate_up ? n / 2 : n;
  STD_TORCH_CHECK(features % 8 == 0, "grouped_product: weight: ", n, " gates and ups are not multiples of 8");
  check_rows(x, "grouped_product: x", rows, depth);
  check_rows(out, "grouped_product: out", rows, ranks * features);
  STD_TORCH_CHECK(out.is_contiguous() && (!kept || (gate_up && kept->is_contiguous())),
                  "grouped_product: out, kept: unexpected layout");
  if (kept) check_rows(*kept, "grouped_product: kept", rows, n);
  check_ring(units, stages);
  const int32_t* ends = ints(offsets, "offsets", experts + 1);
  check_devices("grouped_product", {&weight, &offsets, &out}, x);
  if (kept) check_devices("grouped_product", {&*kept}, x);
  const int64_t* const where = bases ? values<int64_t>(*bases, "bases", ranks) : nullptr;
  STD_TORCH_CHECK(!where || where[rank] == reinterpret_cast<int64_t>(out.const_data_ptr()),
                  "grouped_product: out: expected this rank's of bases");
  if (rows == 0) return;
  CUtensorMap weight_map, x_map;
  const void* w = data(weight);
  const bool made = (gate_up  ? sm90::gate_up_map(&weight_map, w, experts, features, depth)
                     : across ? sm90::grouped_map(&weight_map, w, features, depth, features, experts, 64)
                              : sm90::grouped_map(&weight_map, w, depth, features, depth, experts, 128)) &&
                    sm90::grouped_map(&x_map, data(x), depth, rows, row_stride(x), 1, sm90::kGroupedBoxRows);
  STD_TORCH_CHECK(made, "grouped_product: this driver makes no tensor map of these operands");
  sm90::GroupedArgs args{ends, static_cast<__nv_bfloat16*>(mutable_data(out)),
                         static_cast<__nv_bfloat16*>(mutable_data(kept)), int(experts), int(rows), int(features),
                         int(depth), int(units), int(stages), gelu, int(ranks), {}};
  for (int64_t i = 0; where && i < ranks; ++i) {
    const int64_t to = (rank + i) % ranks;  // its own first, then the next one's: not all to one rank at once
    args.at_rank[i] = reinterpret_cast<__nv_bfloat16*>(where[to]) + rank * features;
  }
  const DeviceGuard guard = on_device_of(x);
  const auto run = where     ? sm90::grouped<Grouped::gate_up_send>
                   : gate_up ? sm90::grouped<Grouped::gate_up>
                   : across  ? sm90::grouped<Grouped::across>
                             : sm90::grouped<Grouped::forward>;
  VX_CUDA_CHECK(run(weight_map, x_map, args, x.get_device_index(), current_stream(x)));
}

// out[e] = dy^T x over the rows of expert e, ascending.
void grouped_sums(Tensor dy, Tensor x, Tensor offsets, int64_t units, int64_t stages, Tensor out) {
  check_matrices(out, "grouped_sums: out");
  const int64_t experts = out.size(0), n = out.size(1), k = out.size(2), rows = x.size(0);
  check_rows(dy, "grouped_sums: dy", rows, n);
  check_rows(x, "grouped_sums: x", rows, k);
  check_ring(units, stages);
  STD_TORCH_CHECK(units % 4 == 0 && units >= 8, "grouped_sums: no tiles of ", units, " units");
  const int32_t* ends = ints(offsets, "offsets", experts + 1);
  check_devices("grouped_sums", {&x, &offsets, &out}, dy);
  if (rows == 0) {
    const DeviceGuard guard = on_device_of(out);
    VX_CUDA_CHECK(cudaMemsetAsync(mutable_data(out), 0, size_t(out.numel()) * 2, current_stream(out)));
    return;
  }
  CUtensorMap x_map, dy_map;
  STD_TORCH_CHECK(sm90::grouped_map(&x_map, data(x), k, rows, row_stride(x), 1, 64) &&
                      sm90::grouped_map(&dy_map, data(dy), n, rows, row_stride(dy), 1, 64),
                  "grouped_sums: this driver makes no tensor map of these operands");
  const sm90::GroupedArgs args{ends, static_cast<__nv_bfloat16*>(mutable_data(out)), nullptr, int(experts), int(rows),
                               int(k), int(n), int(units), int(stages), 0, 1, {}};
  const DeviceGuard guard = on_device_of(x);
  VX_CUDA_CHECK(sm90::grouped<sm90::Grouped::sums>(x_map, dy_map, args, x.get_device_index(), current_stream(x)));
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("grouped_gather", TORCH_BOX(&vx::grouped_gather));
  m.impl("grouped_bound", TORCH_BOX(&vx::grouped_bound));
  m.impl("grouped_product", TORCH_BOX(&vx::grouped_product));
  m.impl("grouped_sums", TORCH_BOX(&vx::grouped_sums));
  m.impl("grouped_tail", TORCH_BOX(&vx::grouped_tail));
}
