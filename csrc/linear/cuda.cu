// Bindings and launches of linear on CUDA devices.
#include <cuda.h>
#include <cuda_runtime.h>

#include <atomic>
#include <type_traits>

#include "common/cuda.h"
#include "common/tensor.h"
#include "linear/sm90_skinny.cuh"

namespace vx {
namespace {

using EncodeTiled = decltype(&cuTensorMapEncodeTiled);

EncodeTiled encode_tiled() {  // from the driver at run time: nothing links against libcuda
  static const EncodeTiled fn = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result;
    VX_CUDA_CHECK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result));
    STD_TORCH_CHECK(found && result == cudaDriverEntryPointSuccess, "linear: this driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return fn;
}

// (rows, k) with K contiguous, read in boxes of box_rows x 64; beyond its edges the copy engine writes zeros.
CUtensorMap tensor_map(const Tensor& t, bool is_bf16, int box_rows) {
  CUtensorMap map;
  const cuuint64_t sizes[2] = {cuuint64_t(t.size(1)), cuuint64_t(t.size(0))};
  const cuuint64_t strides[1] = {cuuint64_t(t.size(0) > 1 ? t.stride(0) : (t.size(1) + 7) / 8 * 8) * 2};
  const cuuint32_t box[2] = {sm90::kBoxK, cuuint32_t(box_rows)}, steps[2] = {1, 1};
  const CUresult done = encode_tiled()(
      &map, is_bf16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 2, t.data_ptr(), sizes, strides,
      box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  STD_TORCH_CHECK(done == CUDA_SUCCESS, "linear: cuTensorMapEncodeTiled failed with ", int(done));
  return map;
}

template <class T, int TOKENS, int BOXES>
void launch(const Tensor& x, const Tensor& weight, const sm90::SkinnyArgs& args, cudaStream_t stream) {
  auto kernel = sm90::skinny_kernel<T, TOKENS, BOXES>;
  const int bytes = sm90::skinny_stage_bytes(TOKENS, BOXES) * args.stages + 1024;
  static std::atomic<uint64_t> allowed{0};
  allow_shared_memory(kernel, 226 * 1024, x.get_device_index(), allowed);
  const bool is_bf16 = std::is_same_v<T, __nv_bfloat16>;
  const CUtensorMap weight_map = tensor_map(weight, is_bf16, sm90::kTileN), x_map = tensor_map(x, is_bf16, TOKENS);
  const dim3 grid((args.n + sm90::kTileN - 1) / sm90::kTileN, (args.m + TOKENS - 1) / TOKENS);
  kernel<<<grid, sm90::kThreads, bytes, stream>>>(weight_map, x_map, args);
  VX_CUDA_CHECK(cudaGetLastError());
}

template <class T>
void dispatch(const Tensor& x, const Tensor& weight, const sm90::SkinnyArgs& args, int tokens, int boxes,
              cudaStream_t stream) {
#define CASE(t, b) \
  if (tokens == t && boxes == b) return launch<T, t, b>(x, weight, args, stream)
  CASE(8, 2);
  CASE(8, 4);
  CASE(16, 2);
  CASE(16, 4);
  CASE(32, 2);
  CASE(32, 4);
  CASE(64, 2);
#undef CASE
  STD_TORCH_CHECK(false, "linear_skinny: no kernel for tokens=", tokens, ", boxes=", boxes);
}

void linear_skinny(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, int64_t tokens, int64_t boxes,
                   int64_t stages) {
  const int64_t m = x.size(0), k = x.size(1), n = weight.size(0);
  const ScalarType type = x.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half, "linear_skinny: x: expected bf16 or fp16");
  STD_TORCH_CHECK(weight.scalar_type() == type && (!bias || bias->scalar_type() == type),
                  "linear_skinny: weight and bias must have x's dtype");
  check_2d(x, "x", m, k);
  check_2d(weight, "weight", n, k);
  check_2d(out, "out", m, n);
  STD_TORCH_CHECK(out.is_contiguous(), "linear_skinny: out: expected contiguous");
  if (bias) check_1d(*bias, "bias", n);
  for (const Tensor& t : {x, weight})
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 && (t.size(0) <= 1 || t.stride(0) % 8 == 0),
                    "linear_skinny: x, weight: rows must start on 16-byte boundaries");
  STD_TORCH_CHECK(m > 0 && n > 0 && k > 0, "linear_skinny: empty operands");
  STD_TORCH_CHECK(stages >= 2 && stages <= 16 &&
                      sm90::skinny_stage_bytes(int(tokens), int(boxes)) * stages + 1024 <= 226 * 1024,
                  "linear_skinny: stages=", stages, " do not fit");
  const DeviceGuard guard = on_device_of(x);
  const sm90::SkinnyArgs args{data(bias), mutable_data(out), int(m), int(n), int(k), int(stages),
                              out.scalar_type() == ScalarType::Float};
  const cudaStream_t stream = current_stream(x);
  type == ScalarType::BFloat16 ? dispatch<__nv_bfloat16>(x, weight, args, int(tokens), int(boxes), stream)
                               : dispatch<__half>(x, weight, args, int(tokens), int(boxes), stream);
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) { m.impl("linear_skinny", TORCH_BOX(&vx::linear_skinny)); }
