// Counters in a GPU's memory that are 0 before a launch and after it, lent to launches whose blocks take work as they come.
// Included by bindings only; each has counters of its own.
#pragma once
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "common/cuda.h"

namespace vx {
namespace {

constexpr int kCounters = 1 << 16;
__device__ int counters[kCounters];  // all 0 but while a kernel runs

// Counters that no other launch uses at the same time. Launches on one stream follow each other and share one. A captured
// launch, whose replays do, holds one for as long as there is a graph to replay: the graph owns what gives it back.
class Counters {
 public:
  // Null when all are lent: the kernel then does without, with the same bits.
  static int* of(cudaStream_t stream, int device) {
    cudaStreamCaptureStatus status;
    cudaGraph_t graph = nullptr;
#if CUDART_VERSION >= 13000
    VX_CUDA_CHECK(cudaStreamGetCaptureInfo(stream, &status, nullptr, &graph));
#else
    VX_CUDA_CHECK(cudaStreamGetCaptureInfo_v2(stream, &status, nullptr, &graph));
#endif
    if (status != cudaStreamCaptureStatusNone) return on(device).lend(graph);
    unsigned long long id = 0;
    VX_CUDA_CHECK(cudaStreamGetId(stream, &id));
    return on(device).of_stream(id);
  }

  static int64_t lent(int device) {
    Counters& here = on(device);
    const std::lock_guard guard(here.lock_);
    return here.used_ - int64_t(here.returned_.size()) - int64_t(here.of_stream_.size());
  }

 private:
  struct Loan {
    Counters* from;
    int number;
  };

  static Counters& on(int device) {  // the caller has made the device current; never destroyed: graphs may outlive statics
    static std::mutex lock;
    static auto& all = *new std::unordered_map<int, std::unique_ptr<Counters>>;
    const std::lock_guard guard(lock);
    auto& here = all[device];
    if (!here) {
      here = std::make_unique<Counters>();
      VX_CUDA_CHECK(cudaGetSymbolAddress(reinterpret_cast<void**>(&here->first_), counters));
    }
    return *here;
  }

  int* of_stream(unsigned long long id) {
    const std::lock_guard guard(lock_);
    const auto found = of_stream_.find(id);
    if (found != of_stream_.end()) return first_ + found->second;
    const int number = take();
    if (number < 0) return nullptr;
    of_stream_[id] = number;
    return first_ + number;
  }

  int* lend(cudaGraph_t graph) {
    auto loan = std::make_unique<Loan>(Loan{this, -1});
    {
      const std::lock_guard guard(lock_);
      loan->number = take();
    }
    if (loan->number < 0) return nullptr;
    int* const counter = first_ + loan->number;
    cudaUserObject_t owner;
    const cudaError_t made = cudaUserObjectCreate(&owner, loan.get(), give_back, 1, cudaUserObjectNoDestructorSync);
    if (made != cudaSuccess) give_back(loan.release());
    VX_CUDA_CHECK(made);
    loan.release();
    const cudaError_t kept = cudaGraphRetainUserObject(graph, owner, 1, cudaGraphUserObjectMove);
    if (kept != cudaSuccess) cudaUserObjectRelease(owner);
    VX_CUDA_CHECK(kept);
    return counter;
  }

  int take() {
    if (returned_.empty()) return used_ < kCounters ? used_++ : -1;
    const int number = returned_.back();
    returned_.pop_back();
    return number;
  }

  static void CUDART_CB give_back(void* what) {  // no replay runs any more; may be called by a thread of the driver's
    const std::unique_ptr<Loan> loan(static_cast<Loan*>(what));
    const std::lock_guard guard(loan->from->lock_);
    loan->from->returned_.push_back(loan->number);
  }

  std::mutex lock_;
  int* first_ = nullptr;
  int used_ = 0;
  std::vector<int> returned_;
  std::unordered_map<unsigned long long, int> of_stream_;
};

}  // namespace
}  // namespace vx
