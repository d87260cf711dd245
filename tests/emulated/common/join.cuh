#pragma once
namespace vx {
inline void join_chain() {}
}  // namespace vx
