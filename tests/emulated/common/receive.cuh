#pragma once
#include <time.h>

#include <cstdio>
#include <cstdlib>

namespace vx {
inline int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}
inline void give_up(int rank, int*) {
  printf("missing: %d\n", rank);
  fflush(stdout);
  _Exit(3);
}
}  // namespace vx
