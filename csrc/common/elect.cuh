// One thread of a warp, such that the compiler knows that it is alone.
#pragma once
#include <cstdint>

namespace vx::sm90 {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

// True for one lane of a warp of which all lanes ask. What a thread found in this way tells the copy engine stays in uniform
// registers; of one found by its number each copy is a loop over the lanes that might take part, some 80 ns long.
__device__ __forceinline__ bool is_elected() {
  uint32_t elected;
  asm volatile("{\n.reg .pred one;\nelect.sync _|one, 0xffffffff;\nselp.u32 %0, 1, 0, one;\n}" : "=r"(elected));
  return elected;
}

#endif

}  // namespace vx::sm90
