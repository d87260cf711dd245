// What common/packed_kernels.cuh is called with.
#include "common/packed_kernels.cuh"

namespace vx {
namespace {

Packing packing_of(const Tensor& bases, int64_t rank) {
  const Sending checked = Sending::of(bases, rank);
  Packing p{{}, int(rank), checked.ranks};
  for (int i = 0; i < p.ranks; ++i)
    p.base[i] = reinterpret_cast<char*>(values<int64_t>(bases, "bases")[i]) + sent_bytes(p.ranks);
  return p;
}

// x (T, bytes) uint8, out (T, ranks * bytes), of whole units; bases: where each rank's memory lies, in this process.
void peers_gather_packed(Tensor x, Tensor out, Tensor bases, int64_t rank, int64_t limit_ms, Tensor missing) {
  const Packing p = packing_of(bases, rank);
  const int64_t rows = x.size(0), bytes = x.size(1), unit = sizeof(uint4);
  check_2d(x, "x", rows, bytes);
  check_2d(out, "out", rows, p.ranks * bytes);
  for (const Tensor* t : {&x, &out})
    STD_TORCH_CHECK(t->scalar_type() == ScalarType::Byte && t->is_contiguous() && bytes % unit == 0 &&
                        reinterpret_cast<uintptr_t>(data(*t)) % unit == 0,
                    "x, out: expected contiguous bytes, 16 and 16 of them");
  STD_TORCH_CHECK(bytes / unit < 1ll << 31, "peers_gather_packed: rows of ", bytes, " bytes are too many");
  int* const word = mutable_values<int32_t>(missing, "missing", 1);
  if (!rows || !bytes) return;
  const DeviceGuard guard = on_device_of(x);
  const int64_t total = rows * (bytes / unit), chunks = (total + kChunk - 1) / kChunk, most = chunks_of(p.ranks);
  launch_joined(gather_packed, unsigned(chunks < most ? chunks : most), kLanes, x, static_cast<const uint4*>(data(x)),
                static_cast<uint4*>(mutable_data(out)), total, bytes / unit, p, limit_ms * 1000000, word);
}

// rmsnorm of (T, N) columns of all ranks: this rank's x (T, N / ranks).
void peers_norm_packed(Tensor x, Tensor weight, Tensor residual, Tensor y, Tensor added, double eps, bool gemma,
                       Tensor bases, int64_t rank, int64_t limit_ms, Tensor missing) {
  const Packing p = packing_of(bases, rank);
  const ScalarType type = y.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::BFloat16 || type == ScalarType::Half, "y: expected bfloat16 or float16");
  STD_TORCH_CHECK(y.dim() == 2, "y: expected 2 dimensions");
  const int64_t rows = y.size(0), columns = y.size(1), width = columns / p.ranks, each = sizeof(uint4) / 2;
  STD_TORCH_CHECK(rows > 0 && rows <= rows_of(p.ranks) && width * p.ranks == columns && width % each == 0 && width > 0 &&
                      width <= kRowUnits * each && columns <= 1024 * each,
                  "peers_norm_packed: (", rows, ", ", columns, ") are no units of ", p.ranks, " ranks, or too many");
  const auto check = [&](const Tensor& t, const char* name, int64_t across, uintptr_t boundary) {
    STD_TORCH_CHECK(t.scalar_type() == type && t.is_contiguous() &&
                        reinterpret_cast<uintptr_t>(data(t)) % boundary == 0 && t.get_device_index() == y.get_device_index(),
                    name, ": expected contiguous rows of y's dtype on boundaries of ", int64_t(boundary), " bytes");
    if (across) check_2d(t, name, rows, across);
  };
  check(x, "x", width, 16), check(residual, "residual", columns, 8), check(y, "y", columns, 8);
  check(added, "added", columns, 8), check(weight, "weight", 0, 8), check_1d(weight, "weight", columns);
  int* const word = mutable_values<int32_t>(missing, "missing", 1);
  const DeviceGuard guard = on_device_of(y);
  int threads = 32;
  while (threads * each < columns) threads *= 2;
  const auto launch = [&]<class T>(T) {
    const Norm<T> a{static_cast<const T*>(data(x)),        static_cast<const T*>(data(weight)),
                    static_cast<const T*>(data(residual)), static_cast<T*>(mutable_data(y)),
                    static_cast<T*>(mutable_data(added)),  int(rows), int(columns), float(eps), gemma};
    launch_joined(norm_packed<T>, unsigned(rows), threads, y, a, p, limit_ms * 1000000, word);
  };
  if (type == ScalarType::BFloat16) launch(__nv_bfloat16());
  else launch(__half());
}

}  // namespace
}  // namespace vx

STABLE_TORCH_LIBRARY_IMPL(vexact_native, CUDA, m) {
  m.impl("peers_gather_packed", TORCH_BOX(&vx::peers_gather_packed));
  m.impl("peers_norm_packed", TORCH_BOX(&vx::peers_norm_packed));
}
