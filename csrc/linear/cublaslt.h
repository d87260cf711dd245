// cublasLt as linear uses it: declared here and found at run time, so that nothing links against it or needs its headers.
//
// No workspace and no reduction scheme: what is left computes each output element in one accumulator, and whether it does
// so with K ascending is not believed but verified (admit.py). A call costs one lock and the attributes that changed.
// Names and values: NVIDIA's cuBLAS documentation, "Using the cuBLASLt API".
#pragma once
#include <cuda_runtime.h>
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/cuda.h"
#include "linear/product.h"

namespace vx::lt {

struct Algorithm {  // opaque, and valid for the library version that gave it
  uint64_t words[8];
};

enum Type : int { kFp32 = 0, kFp16 = 2, kBf16 = 14 };
enum : int { kCompute32F = 68, kSuccess = 0, kInvalidValue = 7, kNotSupported = 15 };
enum DescAttribute : int { kTransA = 3, kTransB = 4, kEpilogue = 7, kBiasPointer = 8 };
enum LayoutAttribute : int { kType = 0, kRows = 2, kColumns = 3, kLd = 4 };
enum PreferenceAttribute : int { kWorkspace = 1, kReductions = 3, kAlignA = 5, kAlignB, kAlignC, kAlignD };
enum AlgorithmAttribute : int { kTile = 1, kSplitK = 2, kReduction = 3, kSwizzle = 4, kStages = 6, kCluster = 8 };
enum Epilogue : uint32_t { kPlain = 1, kBias = 4 };

struct Library {
  struct Found {
    Algorithm algorithm;
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
  };
  size_t (*version)() = nullptr;
  int (*create)(void** handle) = nullptr;
  int (*desc_create)(void** desc, int compute, int scale) = nullptr;
  int (*desc_set)(void* desc, int attribute, const void* value, size_t bytes) = nullptr;
  int (*desc_destroy)(void* desc) = nullptr;
  int (*layout_create)(void** layout, int type, uint64_t rows, uint64_t columns, int64_t ld) = nullptr;
  int (*layout_set)(void* layout, int attribute, const void* value, size_t bytes) = nullptr;
  int (*layout_destroy)(void* layout) = nullptr;
  int (*preference_create)(void** preference) = nullptr;
  int (*preference_set)(void* preference, int attribute, const void* value, size_t bytes) = nullptr;
  int (*preference_destroy)(void* preference) = nullptr;
  int (*heuristic)(void* handle, void* desc, void* a, void* b, void* c, void* d, void* preference, int wanted,
                   Found* results, int* found) = nullptr;
  int (*algorithm_get)(const Algorithm* algorithm, int attribute, void* value, size_t bytes, size_t* written) = nullptr;
  int (*matmul)(void* handle, void* desc, const void* alpha, const void* a, void* a_layout, const void* b, void* b_layout,
                const void* beta, const void* c, void* c_layout, void* d, void* d_layout, const Algorithm* algorithm,
                void* workspace, size_t workspace_bytes, cudaStream_t stream) = nullptr;
  std::string missing;  // why it cannot be used; empty where it can

  // The one that torch has loaded, else the loader's own, else one of `paths` (separated by colons).
  explicit Library(const std::string& paths) {
    void* library = nullptr;
    for (int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW})
      for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"})
        if (!library) library = dlopen(name, flags);
    for (size_t at = 0; !library && at < paths.size();) {
      const size_t end = std::min(paths.find(':', at), paths.size());
      library = dlopen(paths.substr(at, end - at).c_str(), RTLD_NOW);
      at = end + 1;
    }
    if (!library) {
      missing = "libcublasLt.so.13 and .12 were not found";
      return;
    }
    const auto find = [&](auto& function, const char* name) {
      function = reinterpret_cast<std::decay_t<decltype(function)>>(dlsym(library, name));
      if (!function) missing = std::string("libcublasLt has no ") + name;
    };
    find(version, "cublasLtGetVersion");
    find(create, "cublasLtCreate");
    find(desc_create, "cublasLtMatmulDescCreate");
    find(desc_set, "cublasLtMatmulDescSetAttribute");
    find(desc_destroy, "cublasLtMatmulDescDestroy");
    find(layout_create, "cublasLtMatrixLayoutCreate");
    find(layout_set, "cublasLtMatrixLayoutSetAttribute");
    find(layout_destroy, "cublasLtMatrixLayoutDestroy");
    find(preference_create, "cublasLtMatmulPreferenceCreate");
    find(preference_set, "cublasLtMatmulPreferenceSetAttribute");
    find(preference_destroy, "cublasLtMatmulPreferenceDestroy");
    find(heuristic, "cublasLtMatmulAlgoGetHeuristic");
    find(algorithm_get, "cublasLtMatmulAlgoConfigGetAttribute");
    find(matmul, "cublasLtMatmul");
  }
};

inline const Library& library(const std::string& paths = "") {  // the first call's paths count
  static const Library found(paths);
  return found;
}

inline const Library& need_library() {
  STD_TORCH_CHECK(library().missing.empty(), "linear: ", library().missing);
  return library();
}

inline void check(int status, const char* what) {
  STD_TORCH_CHECK(status == kSuccess, "linear: ", what, " failed with status ", status);
}
#define VX_LT(call, ...) ::vx::lt::check(need_library().call(__VA_ARGS__), "cublasLt " #call)

inline void* handle_of(int device) {  // the caller has made the device current
  static std::mutex lock;
  static std::array<void*, 64> handles{};
  const std::lock_guard guard(lock);
  void*& handle = handles.at(size_t(device));
  if (!handle) VX_LT(create, &handle);
  return handle;
}

// The descriptors of a product, kept from call to call: only what changes is set again. out^T = b^T a^T, column-major.
class Descriptors {
 public:
  Descriptors() {
    VX_LT(desc_create, &desc_, kCompute32F, kFp32);
    VX_LT(layout_create, &b_, kBf16, 8, 8, 8);
    VX_LT(layout_create, &a_, kBf16, 8, 8, 8);
    VX_LT(layout_create, &out_, kBf16, 8, 8, 8);
  }
  Descriptors(const Descriptors&) = delete;
  Descriptors& operator=(const Descriptors&) = delete;
  ~Descriptors() {
    library().desc_destroy(desc_);
    for (void* layout : {a_, b_, out_}) library().layout_destroy(layout);
  }

  void set(const Product& p) {
    const Type type = p.is_f32 ? kFp32 : p.is_bf16 ? kBf16 : kFp16;
    desc(0, kTransA, int32_t(p.b_k_contiguous));
    desc(1, kTransB, int32_t(!p.a_k_contiguous));
    desc(2, kEpilogue, uint32_t(p.bias ? kBias : kPlain));
    desc(3, kBiasPointer, p.bias);
    layout(b_, 4, type, p.b_k_contiguous ? p.k : p.n, p.b_k_contiguous ? p.n : p.k, p.b_ld);
    layout(a_, 8, type, p.a_k_contiguous ? p.k : p.m, p.a_k_contiguous ? p.m : p.k, p.a_ld);
    layout(out_, 12, p.out_f32 ? kFp32 : type, p.n, p.m, p.out_ld);
  }

  // Several algorithms, the one that the library thinks fastest first.
  std::vector<Algorithm> algorithms(const Product& p, int wanted) {
    set(p);
    void* preference = nullptr;
    VX_LT(preference_create, &preference);
    const uint64_t workspace = 0;
    const uint32_t reductions = 0, alignment = 16;
    VX_LT(preference_set, preference, kWorkspace, &workspace, sizeof workspace);
    VX_LT(preference_set, preference, kReductions, &reductions, sizeof reductions);
    for (int attribute : {kAlignA, kAlignB, kAlignC, kAlignD})
      VX_LT(preference_set, preference, attribute, &alignment, sizeof alignment);
    std::vector<Library::Found> results(wanted);
    int found = 0;
    const int status = need_library().heuristic(handle_of(p.device), desc_, b_, a_, out_, out_, preference, wanted,
                                                results.data(), &found);
    need_library().preference_destroy(preference);
    std::vector<Algorithm> algorithms;
    for (int i = 0; status == kSuccess && i < found; ++i)
      if (results[i].status == kSuccess && results[i].workspace == 0) algorithms.push_back(results[i].algorithm);
    return algorithms;
  }

  // False where this algorithm does not take this product.
  bool run(const Product& p, const Algorithm& algorithm, cudaStream_t stream) {
    set(p);
    const float one = 1.0f, beta = p.resume ? 1.0f : 0.0f;
    const int status = need_library().matmul(handle_of(p.device), desc_, &one, p.b, b_, p.a, a_, &beta, p.out, out_, p.out,
                                             out_, &algorithm, nullptr, 0, stream);
    if (status == kNotSupported || status == kInvalidValue) return false;
    check(status, "cublasLtMatmul");
    return true;
  }

 private:
  template <class T>
  bool changed(int slot, T value) {
    const uint64_t bits = uint64_t(value);
    if (known_[slot] && last_[slot] == bits) return false;
    known_[slot] = true;
    last_[slot] = bits;
    return true;
  }
  template <class T>
  void desc(int slot, int attribute, T value) {
    if (changed(slot, (uint64_t)(value))) VX_LT(desc_set, desc_, attribute, &value, sizeof value);
  }
  void layout(void* layout, int slot, Type type, int64_t rows, int64_t columns, int64_t ld) {
    const uint32_t type_value = type;
    const uint64_t rows_value = rows, columns_value = columns;
    if (changed(slot, type)) VX_LT(layout_set, layout, kType, &type_value, sizeof type_value);
    if (changed(slot + 1, rows)) VX_LT(layout_set, layout, kRows, &rows_value, sizeof rows_value);
    if (changed(slot + 2, columns)) VX_LT(layout_set, layout, kColumns, &columns_value, sizeof columns_value);
    if (changed(slot + 3, ld)) VX_LT(layout_set, layout, kLd, &ld, sizeof ld);
  }

  void *desc_ = nullptr, *a_ = nullptr, *b_ = nullptr, *out_ = nullptr;
  std::array<uint64_t, 16> last_{};
  std::array<bool, 16> known_{};
};

// One algorithm, ready to run.
class Kernel {
 public:
  explicit Kernel(const Algorithm& algorithm) : algorithm_(algorithm) {}
  bool run(const Product& p, cudaStream_t stream) {
    const std::lock_guard guard(lock_);
    return descriptors_.run(p, algorithm_, stream);
  }

 private:
  std::mutex lock_;
  Descriptors descriptors_;
  Algorithm algorithm_;
};

// An algorithm's tile, stages, cluster and swizzle, by the library's numbers, and its words.
inline void describe(const Algorithm& algorithm, std::vector<int64_t>& numbers) {
  const auto get = [&](int attribute, auto value) {
    size_t written = 0;
    need_library().algorithm_get(&algorithm, attribute, &value, sizeof value, &written);
    numbers.push_back(value);
  };
  get(kTile, uint32_t(0)), get(kStages, uint32_t(0)), get(kCluster, uint16_t(0)), get(kSwizzle, uint32_t(0));
  for (uint64_t word : algorithm.words) numbers.push_back(int64_t(word));
}

}  // namespace vx::lt
