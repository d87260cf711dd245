// A block of kernels whose threads work together by warps, without a GPU: its threads take turns on one of the host's,
// and each goes on until it has to wait for others. The first warp, or the last, is always as far as it can be, so that
// what others do too late, or too early, is seen. What a warp computes together each of its threads computes from what
// all have put down.
#pragma once
#include <ucontext.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__
#define __align__(n) __attribute__((aligned(n)))

struct alignas(8) uint2 {
  uint32_t x, y;
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct Index {
  unsigned x, y, z;
};
inline Index blockIdx, gridDim, threadIdx;

// Of threads that wait, in turns.
struct Meeting {
  int arrived = 0;
  unsigned turn = 0;
};
struct Warp {
  Meeting meeting;
  alignas(16) unsigned char put[32][64];
};
struct Thread {
  ucontext_t at;
  std::vector<char> stack = std::vector<char>(64 << 10);
  const Meeting* waits_at;
  unsigned turn;
  bool ended;
  bool can_go_on() const { return !ended && !(waits_at && waits_at->turn == turn); }
};
struct Running {
  std::vector<Thread> threads;
  std::vector<Warp> warps;
  Meeting meetings[16];
  ucontext_t back;
  std::function<void()> kernel;
  int count;
  bool last_warp_first;
};
inline Running running;

inline void arrive(Meeting& at, int threads) {
  if (++at.arrived == threads) at.arrived = 0, ++at.turn;
}
inline void meet(Meeting& at, int threads) {
  Thread& own = running.threads[threadIdx.x];
  own.waits_at = &at, own.turn = at.turn;
  arrive(at, threads);
  if (!own.can_go_on()) swapcontext(&own.at, &running.back);
}
inline Warp& own_warp() { return running.warps[threadIdx.x / 32]; }
inline void __syncthreads() { meet(running.meetings[0], running.count); }
inline void __syncwarp() { meet(own_warp().meeting, 32); }

// What all threads of the warp put down, to look at.
template <class X, class Look>
auto together(const X& mine, Look look) {
  static_assert(sizeof(X) <= 64);
  Warp& warp = own_warp();
  memcpy(warp.put[threadIdx.x % 32], &mine, sizeof(X));
  __syncwarp();
  const auto found = look([&](int lane) -> const X& { return *reinterpret_cast<const X*>(warp.put[lane]); });
  __syncwarp();
  return found;
}
template <class X>
X __shfl_sync(unsigned, X x, int lane) {
  return together(x, [&](auto of) { return of(lane); });
}
template <class X>
X __shfl_xor_sync(unsigned, X x, int mask) {
  return together(x, [&](auto of) { return of(int(threadIdx.x % 32) ^ mask); });
}

inline void begin_thread() {
  running.kernel();
  Thread& own = running.threads[threadIdx.x];
  own.ended = true;
  swapcontext(&own.at, &running.back);
}
inline bool warp_goes_on(int warp) {
  bool any = false;
  for (int i = 32 * warp; i < 32 * warp + 32; ++i)
    if (running.threads[i].can_go_on()) any = true, threadIdx.x = i, swapcontext(&running.back, &running.threads[i].at);
  return any;
}
// One block.
inline void run_block(int count, std::function<void()> kernel) {
  running.threads.resize(count), running.warps.assign(count / 32, {}), running.count = count;
  running.kernel = std::move(kernel);
  for (Meeting& meeting : running.meetings) meeting = {};
  for (Thread& thread : running.threads) {
    getcontext(&thread.at);
    thread.at.uc_stack.ss_sp = thread.stack.data(), thread.at.uc_stack.ss_size = thread.stack.size();
    thread.at.uc_link = nullptr, thread.waits_at = nullptr, thread.ended = false;
    makecontext(&thread.at, begin_thread, 0);
  }
  const int warps = count / 32;
  for (int n = 0; n < warps;) n = warp_goes_on(running.last_warp_first ? warps - 1 - n : n) ? 0 : n + 1;
  for (const Thread& thread : running.threads)
    if (!thread.ended) {
      puts("threads wait for each other");
      fflush(stdout);
      _Exit(5);
    }
}

// The memory that a kernel may touch. What lies elsewhere ends the program.
struct Tensor {
  const char *begin, *end;
};
inline std::vector<Tensor> tensors;
template <class X>
const X* checked(const X* p, int bytes, const char* what) {
  const char* at = reinterpret_cast<const char*>(p);
  for (const Tensor& one : tensors)
    if (at >= one.begin && at + bytes <= one.end) return p;
  printf("%s beyond all tensors\n", what);
  fflush(stdout);
  _Exit(4);
}
