// archs: 90a
// Bindings and launches of linear on CUDA devices, and the table that says which kernel serves which product.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <iterator>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "common/cuda.h"
#include "common/tensor.h"
#include "linear/cublaslt.h"
#include "linear/fma.h"
#include "linear/product.h"
#include "linear/sm90_resume.cuh"
#include "linear/sm90_skinny.cuh"
#include "linear/tiled.h"

namespace vx {
namespace {

// A kernel: what admission verifies, and what the table points to.
class Kernel {
 public:
  virtual ~Kernel() = default;
  // Whether it may be asked for operands of 32 bits, or of 16.
  virtual bool takes(bool is_f32) const { return !is_f32; }
  // False where it does not take this product; nothing is launched then.
  virtual bool run(const Product& p, cudaStream_t stream) = 0;
  // Whether its columns go to other ranks as they are computed.
  virtual bool sends() const { return false; }
};

struct CublasLt : Kernel {
  lt::Kernel kernel;
  explicit CublasLt(const lt::Algorithm& algorithm) : kernel(algorithm) {}
  bool takes(bool) const override { return true; }
  bool run(const Product& p, cudaStream_t stream) override { return p.out_aligned && kernel.run(p, stream); }
};

CUtensorMap tensor_map(const void* data, bool is_bf16, int64_t rows, int64_t columns, int64_t ld, int box_rows,
                       int box_columns) {
  CUtensorMap map;
  STD_TORCH_CHECK(sm90::box_map(&map, is_bf16, data, rows, columns, ld, box_rows, box_columns),
                  "linear: this driver makes no tensor map of these operands");
  return map;
}

int multiprocessors(int device) {
  static std::atomic<int> known[64];
  int count = known[device & 63].load(std::memory_order_relaxed);
  if (!count) {
    VX_CUDA_CHECK(cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device));
    known[device & 63].store(count);
  }
  return count;
}

// A block per tile of the weight's rows, or, where the tiles are more than that, `per_sm` persistent blocks per multiprocessor.
struct Skinny : Kernel {
  int rows, tokens, boxes, stages, ahead, lead, per_sm;
  Skinny(int rows, int tokens, int boxes, int stages, int ahead, int lead, int per_sm)
      : rows(rows), tokens(tokens), boxes(boxes), stages(stages), ahead(ahead), lead(lead), per_sm(per_sm) {
    STD_TORCH_CHECK(sm90::skinny_exists(tokens, boxes) && rows >= 8 && rows <= 128 && rows % 8 == 0 && stages >= 2 &&
                        stages <= sm90::kSkinnyStages && ahead >= 0 && lead >= 0 && per_sm >= 0 && per_sm <= 8 &&
                        sm90::skinny_shared_bytes(rows, tokens, boxes, stages) <= kShared,
                    "linear: ", stages, " stages of ", rows, "x", tokens, "x", 64 * boxes, " are no kernel or do not fit");
  }
  static constexpr int kShared = 226 * 1024;

  template <class T, int TOKENS, int BOXES, int PARTS>
  void launch(const Product& p, cudaStream_t stream) const {
    auto kernel = sm90::skinny_kernel<T, TOKENS, BOXES, PARTS>;
    static std::atomic<uint64_t> allowed{0};
    allow_shared_memory(kernel, kShared, p.device, allowed);
    const CUtensorMap weight_map = tensor_map(p.b, p.is_bf16, p.n, p.k, p.b_ld, rows, sm90::kBoxK);
    const int x_rows = int(std::min<int64_t>(TOKENS, (p.m + 7) / 8 * 8));
    const CUtensorMap x_map = tensor_map(p.a, p.is_bf16, p.m, p.k, p.a_ld, x_rows, sm90::kBoxK);
    int64_t blocks = (p.n + rows - 1) / rows;
    if (per_sm) blocks = std::min(blocks, int64_t(per_sm) * multiprocessors(p.device));
    const dim3 grid(blocks, (p.m + TOKENS - 1) / TOKENS);
    const sm90::SkinnyArgs args{p.bias, p.out,  p.out_ld, int(p.m), int(p.n), int(p.k),
                                rows,   x_rows, stages,   ahead,    lead,     p.out_f32};
    const int bytes = sm90::skinny_shared_bytes(rows, TOKENS, BOXES, stages);
    VX_CUDA_CHECK(sm90::launch_chained(kernel, grid, sm90::kSkinnyThreads, bytes, stream, weight_map, x_map, args,
                                       sm90::SkinnyStore<T>{p.sending ? *p.sending : Sending{}}));
  }
  bool sends() const override { return true; }

  template <class T>
  void dispatch(const Product& p, cudaStream_t stream) const {
    sm90::for_skinny(tokens, boxes, [&](auto t, auto b) {
      rows > 64 ? launch<T, t(), b(), 2>(p, stream) : launch<T, t(), b(), 1>(p, stream);
    });
  }

  bool run(const Product& p, cudaStream_t stream) override {
    if (!p.a_k_contiguous || !p.b_k_contiguous || p.resume || p.m > 65535 * tokens) return false;
    p.is_bf16 ? dispatch<__nv_bfloat16>(p, stream) : dispatch<__half>(p, stream);
    return true;
  }
};

// Tiles of the weight by tiles of x, for more rows.
struct Tiled : Kernel {
  Tiling tiling;
  explicit Tiled(const Tiling& tiling) : tiling(tiling) {
    STD_TORCH_CHECK(tiling_exists(tiling), "linear: no kernel has tiles of ", 64 * tiling.groups, "x", tiling.tokens, ", ",
                    tiling.stages, " stages and clusters of ", tiling.cluster);
  }
  bool run(const Product& p, cudaStream_t stream) override { return run_tiled(p, tiling, stream); }
};

// fp32.
struct Fma : Kernel {
  FmaTile tile;
  explicit Fma(const FmaTile& tile) : tile(tile) {
    STD_TORCH_CHECK(fma_tile_exists(tile), "linear: no kernel has tiles of ", tile.rows, "x", tile.columns);
  }
  bool takes(bool is_f32) const override { return is_f32; }
  bool run(const Product& p, cudaStream_t stream) override { return run_fma(p, tile, stream); }
};

// Sums that go on from the fp32 values in out; `group` pairs of tiles of rows share what lies in the L2 cache.
struct Resumed : Kernel {
  int group;
  explicit Resumed(int group) : group(group) {
    STD_TORCH_CHECK(group > 0, "linear: no kernel with groups of ", group);
  }

  template <class T, bool A_ACROSS, bool B_ACROSS>
  void launch(const Product& p, cudaStream_t stream) const {
    CUtensorMap a, b;
    const bool made = sm90::gemm_map(&a, p.is_bf16, p.a, A_ACROSS ? p.m : p.k, A_ACROSS ? p.k : p.m, p.a_ld, 1, 0) &&
                      sm90::gemm_map(&b, p.is_bf16, p.b, B_ACROSS ? p.n : p.k, B_ACROSS ? p.k : p.n, p.b_ld, 1, 0);
    STD_TORCH_CHECK(made, "linear: this driver makes no tensor map of these operands");
    const sm90::GemmArgs args{int(p.m), int(p.n), int(p.k), group, 0};
    const sm90::ResumeEpilogue<T> epilogue{p.bias, static_cast<float*>(p.out), p.out_ld, int(p.m), int(p.n)};
    VX_CUDA_CHECK((sm90::gemm<T, A_ACROSS, B_ACROSS>(a, b, args, epilogue, p.device, stream)));
  }

  template <class T>
  void dispatch(const Product& p, cudaStream_t stream) const {
    if (!p.a_k_contiguous)
      launch<T, true, true>(p, stream);
    else if (p.b_k_contiguous)
      launch<T, false, false>(p, stream);
    else
      launch<T, false, true>(p, stream);
  }

  bool run(const Product& p, cudaStream_t stream) override {
    const int64_t tiles = (p.m / sm90::kGemmRows + 2) * (p.n / sm90::kGemmColumns + 1);
    const bool pairs = reinterpret_cast<uintptr_t>(p.out) % 8 == 0 && p.out_ld % 2 == 0 && p.n % 2 == 0;
    if (!p.resume || !pairs || (!p.a_k_contiguous && p.b_k_contiguous) || tiles > (1 << 30)) return false;
    p.is_bf16 ? dispatch<__nv_bfloat16>(p, stream) : dispatch<__half>(p, stream);
    return true;
  }
};

constexpr int64_t kAsk = -1, kCanonical = 0;  // instead of a kernel's number, counted from 1

struct Kernels {
  std::shared_mutex lock;
  std::vector<std::unique_ptr<Kernel>> all;

  int64_t add(std::unique_ptr<Kernel> kernel) {
    const std::unique_lock guard(lock);
    all.push_back(std::move(kernel));
    return int64_t(all.size());
  }

  Kernel& at(int64_t number) {
    const std::shared_lock guard(lock);
    STD_TORCH_CHECK(number > 0 && number <= int64_t(all.size()), "linear: no kernel has number ", number);
    return *all[number - 1];
  }
};

Kernels& kernels() {
  static Kernels* const kept = new Kernels;  // never destroyed: descriptors must not outlive their library
  return *kept;
}

// What a choice of kernel may depend on. One size is known by its class alone: the rows of a, or, where a comes
// transposed (the gradient of a weight), the depth.
struct Key {
  int64_t m, n, k;
  uint64_t flags;
  bool operator==(const Key&) const = default;
};

struct HashOfKey {
  size_t operator()(const Key& key) const {
    uint64_t h = key.flags;
    for (int64_t v : {key.m, key.n, key.k}) h = (h ^ uint64_t(v)) * 0x9e3779b97f4a7c15ull, h ^= h >> 29;
    return h;
  }
};

// The largest size of a class. Tiles of libraries come in eights of rows, and how many of them there are, and so how they
// fill the multiprocessors, decides which is fastest. Beyond 1,024 rows a quarter of an octave will do; for depths a whole
// one.
int64_t class_of_rows(int64_t rows) {
  const int64_t step = rows <= 1024 ? 8 : int64_t(std::bit_floor(uint64_t(rows - 1))) / 4;
  return (rows + step - 1) / step * step;
}

int64_t class_of_depth(int64_t depth) { return int64_t(std::bit_ceil(uint64_t(depth < 8 ? 8 : depth))); }

Key key_of(const Product& p) {
  const uint64_t flags = p.is_bf16 | p.out_f32 << 1 | p.a_k_contiguous << 2 | p.b_k_contiguous << 3 |
                         (p.bias != nullptr) << 4 | p.resume << 5 | p.out_aligned << 6 | p.is_f32 << 7 |
                         uint64_t(p.device) << 8;
  return p.a_k_contiguous ? Key{class_of_rows(p.m), p.n, p.k, flags} : Key{p.m, p.n, class_of_depth(p.k), flags};
}

struct Table {
  std::shared_mutex lock;
  std::unordered_map<Key, Kernel*, HashOfKey> chosen;  // null: the canonical one
};

Table& table() {
  static Table kept;
  return kept;
}

// a (m, k), b (k, n) or, with b_t, (n, k). False where the canonical kernel is the only one there is.
bool describe(const Tensor& a, const Tensor& b, bool b_t, const std::optional<Tensor>& bias, const Tensor& out,
              bool resume, Product& p) {
  STD_TORCH_CHECK(a.dim() == 2 && b.dim() == 2 && out.dim() == 2, "linear: a, b, out: expected 2 dimensions");
  p.m = a.size(0), p.k = a.size(1), p.n = b.size(b_t ? 0 : 1);
  STD_TORCH_CHECK(b.size(b_t ? 1 : 0) == p.k, "linear: b: expected ", p.k, " along the reduction, got ", b.size(b_t ? 1 : 0));
  check_2d(out, "linear: out", p.m, p.n);
  const ScalarType type = a.scalar_type(), out_type = out.scalar_type();
  if (bias) {
    check_1d(*bias, "linear: bias", p.n);
    if (bias->scalar_type() != type) return false;
  }
  p.is_bf16 = type == ScalarType::BFloat16, p.is_f32 = type == ScalarType::Float;
  p.out_f32 = out_type == ScalarType::Float;
  p.resume = resume;
  STD_TORCH_CHECK(!resume || p.out_f32, "linear: out: resuming needs the fp32 accumulators");
  if (!(p.is_bf16 || p.is_f32 || type == ScalarType::Half)) return false;
  if (b.scalar_type() != type || !(p.out_f32 || out_type == type)) return false;
  if (p.m == 0 || p.n == 0 || p.k == 0) return false;
  constexpr int64_t kMost = (int64_t(1) << 31) - 1024;
  if (p.m > kMost || p.n > kMost || p.k > kMost) return false;

  // (outer, inner) with the inner dimension contiguous; the distance of one single row means nothing
  const int64_t aligned = p.is_f32 ? 4 : 8;  // elements of 16 bytes
  const auto layout = [aligned](const Tensor& t, int inner, int64_t& ld) {
    const int64_t extent = t.size(inner);
    if (extent > 1 && t.stride(inner) != 1) return false;
    ld = t.size(1 - inner) > 1 ? t.stride(1 - inner) : (extent + 7) / 8 * 8;
    return ld >= extent && ld % aligned == 0 && reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0;
  };
  const int k_of_b = b_t ? 1 : 0;
  p.a_k_contiguous = p.k == 1 || a.stride(1) == 1;
  p.b_k_contiguous = p.k == 1 || b.stride(k_of_b) == 1;
  if (!layout(a, p.a_k_contiguous ? 1 : 0, p.a_ld) || !layout(b, p.b_k_contiguous ? k_of_b : 1 - k_of_b, p.b_ld)) return false;
  p.out_ld = p.m > 1 ? out.stride(0) : (p.n + 7) / 8 * 8;
  if (p.out_ld < p.n) return false;
  p.out_aligned = reinterpret_cast<uintptr_t>(out.data_ptr()) % 16 == 0 && p.out_ld % (p.out_f32 ? 4 : 8) == 0;
  p.a = data(a), p.b = data(b), p.bias = data(bias), p.out = mutable_data(out);
  p.device = a.get_device_index();
  STD_TORCH_CHECK(b.get_device_index() == p.device && out.get_device_index() == p.device &&
                      (!bias || bias->get_device_index() == p.device),
                  "linear: a, b, bias and out: expected one device");
  return true;
}

// Where of `sending`: 3, nothing is written to out, and columns are on their way to every rank.
// 1: done. 0: the canonical kernel has to do it (it has the same bits). -1: no kernel has been chosen yet. 2: a kernel would
// take this product if the bias began on a 16-byte boundary, as libraries expect it to.
int64_t matmul(const Tensor& a, const Tensor& b, bool b_t, const std::optional<Tensor>& bias, const Tensor& out, bool resume,
               int64_t kernel, const Sending* sending) {
  Product p;
  if (!describe(a, b, b_t, bias, out, resume, p)) return 0;
  if (reinterpret_cast<uintptr_t>(p.bias) % 16) return 2;
  Kernel* chosen = nullptr;
  if (kernel == kAsk) {
    const Key key = key_of(p);
    const std::shared_lock guard(table().lock);
    const auto found = table().chosen.find(key);
    if (found == table().chosen.end()) return -1;
    chosen = found->second;
  } else {
    chosen = &kernels().at(kernel);
  }
  if (!chosen || !chosen->takes(p.is_f32)) return 0;
  if (sending && chosen->sends() && !p.out_f32) p.sending = sending;
  const DeviceGuard guard = on_device_of(a);
  const bool done = chosen->run(p, current_stream(a));
  return done && p.sending ? 3 : done;
}

int64_t linear_matmul(Tensor a, Tensor b, bool b_t, std::optional<Tensor> bias, Tensor out, bool resume, int64_t kernel) {
  return matmul(a, b, b_t, bias, out, resume, kernel, nullptr);
}

// The columns of x weight^T + bias, sent to every rank where the kernel of this product can; else to out.
int64_t linear_send(Tensor x, Tensor weight, std::optional<Tensor> bias, Tensor out, int64_t kernel, Tensor bases,
                    int64_t rank) {
  const Sending sending = Sending::of(bases, rank);
  const int64_t columns = weight.size(0);
  STD_TORCH_CHECK(columns % 4 == 0 && x.size(0) * columns / 4 <= kSent, "linear_send: (", x.size(0), ", ", columns,
                  ") is no number of lines, or too many");
  return matmul(x, weight, true, bias, out, false, kernel, &sending);
}

// A size of a kernel: of what does not fit, none is made.
int size_of(int64_t value) {
  STD_TORCH_CHECK(value >= 0 && value <= 1 << 20, "linear: no kernel has a size of ", value);
  return int(value);
}

// Each makes a kernel, and gives the number that linear_matmul takes.
int64_t linear_skinny(int64_t rows, int64_t tokens, int64_t boxes, int64_t ring, int64_t ahead, int64_t lead,
                      int64_t per_sm) {
  return kernels().add(std::make_unique<Skinny>(size_of(rows), size_of(tokens), size_of(boxes), size_of(ring),
                                                size_of(ahead), size_of(lead), size_of(per_sm)));
}

int64_t linear_tiled(int64_t rows, int64_t tokens, int64_t cluster, int64_t ring) {
  const int groups = rows % 64 ? 0 : size_of(rows) / 64;
  return kernels().add(std::make_unique<Tiled>(Tiling{groups, size_of(tokens), size_of(cluster), size_of(ring)}));
}

int64_t linear_fma(int64_t rows, int64_t columns) {
  return kernels().add(std::make_unique<Fma>(FmaTile{size_of(rows), size_of(columns)}));
}

int64_t linear_resumed(int64_t group) { return kernels().add(std::make_unique<Resumed>(size_of(group))); }

int64_t linear_cublaslt(std::vector<int64_t> words) {
  lt::Algorithm algorithm;
  STD_TORCH_CHECK(words.size() == std::size(algorithm.words), "linear: no algorithm has ", words.size(), " words");
  std::copy(words.begin(), words.end(), algorithm.words);
  return kernels().add(std::make_unique<CublasLt>(algorithm));
}

// From now on, products of this kind are this kernel's, or the canonical one's where it is 0. Asked with -1, nothing
// changes. False where the canonical kernel is the only one there is.
bool linear_choose(Tensor a, Tensor b, bool b_t, std::optional<Tensor> bias, Tensor out, bool resume, int64_t kernel) {
  Product p;
  if (!describe(a, b, b_t, bias, out, resume, p)) return false;
  if (kernel == kAsk) return true;
  Kernel* const chosen = kernel == kCanonical ? nullptr : &kernels().at(kernel);
  const std::unique_lock guard(table().lock);
  table().chosen[key_of(p)] = chosen;
  return true;
}

int64_t linear_class(int64_t size, bool rows) { return size < 1 ? 0 : rows ? class_of_rows(size) : class_of_depth(size); }

// cublasLt's version, found through `paths` where torch has not loaded it.
int64_t linear_cublaslt_version(std::string paths) {
  lt::library(paths);
  return int64_t(lt::need_library().version());
}

// Algorithms for products of these sizes, without workspace and reduction, the library's favourite first: of each its
// tile, stages, cluster, swizzle and eight words. Operands lie side by side, on 16-byte boundaries.
std::vector<int64_t> linear_cublaslt_algorithms(int64_t device, bool is_f32, bool is_bf16, bool out_f32, bool bias,
                                                bool a_k, bool b_k, int64_t m, int64_t n, int64_t k, int64_t most) {
  STD_TORCH_CHECK(m > 0 && n > 0 && k > 0 && most > 0 && most <= 1024, "linear: no algorithms of these sizes");
  const auto padded = [](int64_t size) { return (size + 7) / 8 * 8; };
  Product p{};
  p.m = m, p.n = n, p.k = k;
  p.a_ld = padded(a_k ? k : m), p.b_ld = padded(b_k ? k : n), p.out_ld = padded(n);
  p.a_k_contiguous = a_k, p.b_k_contiguous = b_k, p.out_aligned = true;
  p.is_f32 = is_f32, p.is_bf16 = is_bf16, p.out_f32 = out_f32;
  p.bias = bias ? reinterpret_cast<const void*>(uintptr_t(256)) : nullptr;  // asked for its presence alone
  p.device = int(device);
  const DeviceGuard guard{int32_t(device)};
  std::vector<int64_t> numbers;
  for (const lt::Algorithm& algorithm : lt::Descriptors().algorithms(p, int(most))) lt::describe(algorithm, numbers);
  return numbers;
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("linear_matmul", TORCH_BOX(&vx::linear_matmul));
  m.impl("linear_send", TORCH_BOX(&vx::linear_send));
  m.impl("linear_choose", TORCH_BOX(&vx::linear_choose));
}

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CompositeExplicitAutograd, m) {
  m.impl("linear_skinny", TORCH_BOX(&vx::linear_skinny));
  m.impl("linear_tiled", TORCH_BOX(&vx::linear_tiled));
  m.impl("linear_fma", TORCH_BOX(&vx::linear_fma));
  m.impl("linear_resumed", TORCH_BOX(&vx::linear_resumed));
  m.impl("linear_cublaslt", TORCH_BOX(&vx::linear_cublaslt));
  m.impl("linear_class", TORCH_BOX(&vx::linear_class));
  m.impl("linear_cublaslt_version", TORCH_BOX(&vx::linear_cublaslt_version));
  m.impl("linear_cublaslt_algorithms", TORCH_BOX(&vx::linear_cublaslt_algorithms));
}
