// Launches that overlap the end of the kernel before, where the GPU can do that (SM90 and later): a decode step is a
// chain of kernels of a few microseconds each.
#pragma once
#include <cuda_runtime.h>

namespace vx {

// Before this returns a chained kernel must neither read what the kernel before it writes nor write anything; every
// thread calls it. Then the kernel after it may start, and wait likewise.
__device__ __forceinline__ void follow_kernel_before() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

struct ChainedStream {
  cudaStream_t stream;
  bool overlap;
};

template <class... Parameters, class... Arguments>
cudaError_t launch_following(void (*kernel)(Parameters...), dim3 grid, int threads, ChainedStream on,
                             const Arguments&... arguments) {
  cudaLaunchAttribute chained = {};
  chained.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  chained.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid, config.blockDim = dim3(unsigned(threads)), config.stream = on.stream;
  config.attrs = &chained, config.numAttrs = on.overlap ? 1 : 0;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
}

}  // namespace vx
