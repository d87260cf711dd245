// How kernels between ranks stand in a chain of launches (launch_chained), from SM90 on: they are there when the product
// before them ends, and while they wait for other ranks the product after them asks for its weights. On other GPUs they are
// launched as ever.
#pragma once
#include "common/chain.cuh"
#include "common/cuda.h"

namespace vx {

__device__ __forceinline__ void let_next_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  sm90::let_kernel_after_start();
#endif
}
// Before this returns nothing may be read that the kernel before writes.
__device__ __forceinline__ void await_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  sm90::wait_for_kernel_before();
#endif
}
__device__ __forceinline__ void join_chain() {
  let_next_start();
  await_before();
}

template <class... Parameters, class... Arguments>
void launch_joined(void (*kernel)(Parameters...), unsigned grid, int threads, const Tensor& x,
                   const Arguments&... arguments) {
  int major = 0;
  VX_CUDA_CHECK(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, x.get_device_index()));
  if (major >= 9)
    VX_CUDA_CHECK(sm90::launch_chained(kernel, dim3(grid), threads, 0, current_stream(x), arguments...));
  else
    kernel<<<grid, threads, 0, current_stream(x)>>>(static_cast<Parameters>(arguments)...);
  VX_CUDA_CHECK(cudaGetLastError());
}

}  // namespace vx
