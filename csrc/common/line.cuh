// A line of common/packed.cuh: 128 bits that are stored, and seen by others, all at once.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>

namespace vx {

__device__ __forceinline__ void store_line(uint4* where, uint4 line) {
  asm volatile(
      "{\n.reg .b64 low, high;\n.reg .b128 line;\nmov.b64 low, {%1, %2};\nmov.b64 high, {%3, %4};\n"
      "mov.b128 line, {low, high};\nst.relaxed.sys.global.b128 [%0], line;\n}" ::"l"(where),
      "r"(line.x), "r"(line.y), "r"(line.z), "r"(line.w)
      : "memory");
}
__device__ __forceinline__ uint4 load_line(const uint4* where) {
  uint4 line;
  asm volatile(
      "{\n.reg .b64 low, high;\n.reg .b128 line;\nld.relaxed.sys.global.b128 line, [%4];\n"
      "mov.b128 {low, high}, line;\nmov.b64 {%0, %1}, low;\nmov.b64 {%2, %3}, high;\n}"
      : "=r"(line.x), "=r"(line.y), "=r"(line.z), "=r"(line.w)
      : "l"(where)
      : "memory");
  return line;
}

}  // namespace vx
