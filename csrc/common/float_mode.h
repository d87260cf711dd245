// A thread's floating-point mode decides bits: subnormals flushed to zero (torch.set_flush_denormal sets that, for the
// calling thread alone), another direction of rounding. Whatever it is, kernels compute in one: IEEE 754's default, that
// is subnormals kept, rounding to nearest, nothing trapped. On other processors than x86-64 the mode is left as it is.
#pragma once

#if defined(__x86_64__) || defined(_M_X64)
#include <xmmintrin.h>
#define VEXACT_HAS_MXCSR
#endif

namespace vx {

// The default mode for as long as this lives, then the thread's own again. What computes between must be in a function
// that is not inlined here: no compiler knows that arithmetic must not be moved to the other side.
class DefaultFloatMode {
 public:
#ifdef VEXACT_HAS_MXCSR
  DefaultFloatMode() : found_(_mm_getcsr()) {
    if (other()) _mm_setcsr(kDefault);  // 20 ns where it is the default already, 35 where not
  }
  ~DefaultFloatMode() {
    if (other()) _mm_setcsr(found_);
  }

 private:
  static constexpr unsigned kDefault = 0x1f80, kFlags = 0x3f;  // the flags say what happened and change nothing
  bool other() const { return (found_ & ~kFlags) != kDefault; }
  const unsigned found_;
#else
  DefaultFloatMode() {}
#endif
  DefaultFloatMode(const DefaultFloatMode&) = delete;
};

}  // namespace vx
