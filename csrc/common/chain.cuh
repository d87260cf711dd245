// Programmatic dependent launch, of GPUs from SM90 on: a chain of kernels, each of which is there when the one before ends.
#pragma once
#include <cuda_runtime.h>

namespace vx {
namespace sm90 {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

// A kernel launched by launch_chained may start while the one before it in the stream still
// runs: before this returns it must neither read what that one writes nor write anything. Every block has to call it, or
// the kernel could end, and release the one after it, before the one before it has.
__device__ __forceinline__ void wait_for_kernel_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
// Once all blocks have said so or ended, a chained kernel after this one may start (and wait for this one's end).
__device__ __forceinline__ void let_kernel_after_start() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

#endif

// Launches a kernel that calls wait_for_kernel_before, so that its start overlaps the end of the kernel before it.
template <class... Parameters, class... Arguments>
cudaError_t launch_chained(void (*kernel)(Parameters...), dim3 grid, int threads, int shared_bytes, cudaStream_t stream,
                           const Arguments&... arguments) {
  cudaLaunchAttribute chained;
  chained.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  chained.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid, config.blockDim = dim3(threads), config.dynamicSmemBytes = shared_bytes, config.stream = stream;
  config.attrs = &chained, config.numAttrs = 1;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace sm90
}  // namespace vx
