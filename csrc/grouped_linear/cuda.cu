// Bindings and launches of grouped_linear on CUDA devices: bf16 alone, rows on 16-byte boundaries. Values of offsets and
// of order that are out of range never lead out of the tensors.
#include <algorithm>

#include "common/cuda.h"
#include "common/tensor.h"

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

int64_t row_stride(const Tensor& t) { return t.size(0) > 1 ? t.stride(0) : t.size(1); }

constexpr int kCopyThreads = 256;

// A row per turn of a warp; rows from offsets[experts] on stay as they are.
__global__ void __launch_bounds__(kCopyThreads)
    gather_kernel(const uint4* x, const int32_t* offsets, const int32_t* order, uint4* out, int experts, int rows,
                  int tokens, int top_k, int pieces, int64_t x_stride) {
  const int lane = threadIdx.x % 32, last = min(offsets[experts], rows);
  for (int row = (blockIdx.x * kCopyThreads + threadIdx.x) / 32; row < last; row += gridDim.x * (kCopyThreads / 32)) {
    const int token = min(max(order[row] / top_k, 0), tokens - 1);
    const uint4* from = x + token * x_stride;
    uint4* to = out + int64_t(row) * pieces;
    int i = lane;
    for (; i + 96 < pieces; i += 128) {
      uint4 v[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) v[j] = __ldg(from + i + 32 * j);
#pragma unroll
      for (int j = 0; j < 4; ++j) to[i + 32 * j] = v[j];
    }
    for (; i < pieces; i += 32) to[i] = __ldg(from + i);
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
  if (rows == 0 || columns == 0 || tokens == 0) return;
  const DeviceGuard guard = on_device_of(x);
  const int64_t blocks = std::min<int64_t>((rows + 7) / 8, 16 * processors_of(x));
  gather_kernel<<<int(blocks), kCopyThreads, 0, current_stream(x)>>>(
      static_cast<const uint4*>(data(x)), ends, through, static_cast<uint4*>(mutable_data(out)), int(experts), int(rows),
      int(tokens), int(top_k), int(columns / 8), row_stride(x) / 8);
  VX_CUDA_CHECK(cudaGetLastError());
}

void grouped_bound(Tensor offsets, int64_t rows, Tensor out) {
  const int64_t count = offsets.size(0);
  const int32_t* from = ints(offsets, "offsets", count);
  ints(out, "grouped_bound: out", count);
  STD_TORCH_CHECK(rows >= 0 && rows < (int64_t(1) << 31), "grouped_bound: ", rows, " rows are too many");
  const DeviceGuard guard = on_device_of(out);
  bound_kernel<<<1, 32, 0, current_stream(out)>>>(from, static_cast<int32_t*>(mutable_data(out)), int(count), int(rows));
  VX_CUDA_CHECK(cudaGetLastError());
}

void grouped_tail(Tensor offsets, Tensor out) {
  const int64_t rows = out.size(0), columns = out.size(1), experts = offsets.size(0) - 1;
  check_rows(out, "grouped_tail: out", rows, columns);
  const int32_t* ends = ints(offsets, "offsets", experts + 1);
  STD_TORCH_CHECK(out.is_contiguous() && experts >= 0, "grouped_tail: unexpected arguments");
  if (rows == 0 || columns == 0) return;
  const DeviceGuard guard = on_device_of(out);
  const int64_t blocks = std::min<int64_t>((rows * columns / 8 + kCopyThreads - 1) / kCopyThreads, processors_of(out));
  tail_kernel<<<int(blocks), kCopyThreads, 0, current_stream(out)>>>(ends, static_cast<uint4*>(mutable_data(out)),
                                                                    int(experts), int(rows), int(columns / 8));
  VX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("grouped_gather", TORCH_BOX(&vx::grouped_gather));
  m.impl("grouped_bound", TORCH_BOX(&vx::grouped_bound));
  m.impl("grouped_tail", TORCH_BOX(&vx::grouped_tail));
}
