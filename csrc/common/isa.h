// Which compiled instruction set runs. VEXACT_ISAS is X(scalar)X(avx2)X(avx512), or the ones this platform builds.
//
// A room declares its kernels once for all of them and calls the chosen one:
//   VX_DECLARE_KERNEL(void rmsnorm_fwd(const RmsnormFwd& a))     in <room>/kernels.h
//   VX_CALL(rmsnorm_fwd, args)                                   in <room>/cpu.cpp
#pragma once

namespace vx {

enum class Isa : int {
#define X(name) name,
  VEXACT_ISAS
#undef X
};

Isa isa();                      // the fastest one this CPU runs, or what set_isa or VEXACT_CPU_ISA asked for
const char* isa_name();
bool set_isa(const char* name); // for tests: false where it is not built or the CPU lacks it

}  // namespace vx

#define VX_NAMESPACE_scalar(...) namespace vx::scalar { __VA_ARGS__; }
#define VX_NAMESPACE_avx2(...) namespace vx::avx2 { __VA_ARGS__; }
#define VX_NAMESPACE_avx512(...) namespace vx::avx512 { __VA_ARGS__; }

#if defined(__x86_64__) || defined(_M_X64)
#define VX_DECLARE_KERNEL(...)      \
  VX_NAMESPACE_scalar(__VA_ARGS__)  \
  VX_NAMESPACE_avx2(__VA_ARGS__)    \
  VX_NAMESPACE_avx512(__VA_ARGS__)
#define VX_CALL(fn, ...)                                           \
  (::vx::isa() == ::vx::Isa::avx512 ? ::vx::avx512::fn(__VA_ARGS__) \
   : ::vx::isa() == ::vx::Isa::avx2 ? ::vx::avx2::fn(__VA_ARGS__)   \
                                    : ::vx::scalar::fn(__VA_ARGS__))
#else
#define VX_DECLARE_KERNEL(...) VX_NAMESPACE_scalar(__VA_ARGS__)
#define VX_CALL(fn, ...) (::vx::scalar::fn(__VA_ARGS__))
#endif
