// VX_BOX(&vx::op) is TORCH_BOX(&vx::op), computed in the default floating-point mode. Every op on a CPU is registered so.
#pragma once
#include <utility>

#include "common/float_mode.h"
#include "common/tensor.h"

namespace vx {

template <auto F>
struct InDefaultMode;

template <class R, class... Args, R (*F)(Args...)>
struct InDefaultMode<F> {
  [[gnu::noinline]] static R run(Args... args) { return F(std::forward<Args>(args)...); }
  static R call(Args... args) {
    const DefaultFloatMode mode;
    return run(std::forward<Args>(args)...);
  }
};

}  // namespace vx

#define VX_BOX(op) TORCH_BOX((&::vx::InDefaultMode<op>::call))
