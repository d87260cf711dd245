// What every cuda.cu needs of torch and the runtime: the current stream, the device, checked calls.
#pragma once
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/stable/accelerator.h>

#include <atomic>

#include "common/tensor.h"

#define VX_CUDA_CHECK(call)                                                                                   \
  do {                                                                                                        \
    const cudaError_t vx_error = (call);                                                                      \
    STD_TORCH_CHECK(vx_error == cudaSuccess, "CUDA: ", cudaGetErrorString(vx_error), " in " #call,            \
                    vx::why_no_kernel(vx_error));                                                             \
  } while (0)

namespace vx {

// A kernel is launched only through a check: where none was compiled for this GPU nothing runs, and the error says so.
inline const char* why_no_kernel(cudaError_t error) {
  const bool none = error == cudaErrorNoKernelImageForDevice || error == cudaErrorInvalidDeviceFunction;
  return none ? ": the extension was built without this kernel for this GPU (VEXACT_CUDA_ARCHS, or it is for SM90 alone)" : "";
}

using torch::stable::accelerator::DeviceGuard;

inline DeviceGuard on_device_of(const Tensor& t) { return DeviceGuard(t.get_device_index()); }

// The one symbol that only a CUDA build of torch has is looked up at run time, so that this library, built with its CUDA
// half on any machine, loads under a CPU build too.
inline cudaStream_t current_stream(const Tensor& t) {
  using Get = AOTITorchError (*)(int32_t, void**);
  static const Get get = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    return torch_cuda ? reinterpret_cast<Get>(dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  STD_TORCH_CHECK(get, "this torch has no CUDA half (libtorch_cuda.so is not loaded)");
  void* stream = nullptr;
  STD_TORCH_CHECK(get(t.get_device_index(), &stream) == 0, "torch could not name its current CUDA stream");
  return static_cast<cudaStream_t>(stream);
}

// Raise a kernel's limit of dynamic shared memory, once per kernel and device.
template <class Kernel>
void allow_shared_memory(Kernel* kernel, int bytes, int device, std::atomic<uint64_t>& done) {
  const uint64_t bit = 1ull << (device & 63);
  if (done.load(std::memory_order_relaxed) & bit) return;
  VX_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  done.fetch_or(bit);
}

}  // namespace vx
