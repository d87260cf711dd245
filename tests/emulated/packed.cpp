// A program of test_packed.py: ranks are processes that share memory, and run kernels of csrc/common/packed_kernels.cuh.
//
// packed RANKS TIMES LIMIT_MS PRESENT: so many of them are there, gather and norm so many times, all kinds of rows, and
// compare.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "common/packed_kernels.cuh"

using namespace vx;

template <class Kernel>
void launch(int grid, int threads, const Kernel& kernel) {
  for (int block = 0; block < grid; ++block) {
    blockIdx.x = block, blockDim.x = threads, gridDim.x = grid;
    std::barrier<> all(threads);
    all_threads = &all;
    std::vector<std::thread> started;
    for (int i = 0; i < threads; ++i)
      started.emplace_back([&, i] {
        threadIdx.x = i;
        kernel();
      });
    for (std::thread& thread : started) thread.join();
  }
}

// Alike in all processes; many last bytes are what a flag may be.
std::vector<uint4> columns_of(int rank, int turn, int64_t count) {
  std::mt19937 generator(1000 * turn + rank);
  const auto draw = [&] { return uint32_t(generator()); };
  std::vector<uint4> units(count);
  for (uint4& unit : units) unit = {draw(), draw(), draw(), draw() % 2 ? draw() : (turn / 4u) << 24};
  return units;
}

bool equal(const std::vector<uint4>& found, int ranks, int turn, int rows, int width) {
  for (int rank = 0; rank < ranks; ++rank) {
    const std::vector<uint4> x = columns_of(rank, turn, int64_t(rows) * width);
    for (int row = 0; row < rows; ++row)
      if (memcmp(&found[(int64_t(row) * ranks + rank) * width], &x[int64_t(row) * width], 16 * width)) return false;
  }
  return true;
}

int run(int rank, int ranks, int times, int64_t limit, char* memory) {
  Packing p{{}, rank, ranks};
  for (int i = 0; i < ranks; ++i) p.base[i] = memory + i * packed_bytes(ranks);
  int missing = 0;
  const struct {
    int rows, width, grid;
  } gathers[] = {{1, 1, 1}, {3, 5, 1}, {2, 256, 2}, {1, 481, 2}, {7, 200, 1}, {9, 111, 2}};
  for (int turn = 0; turn < times; ++turn) {
    const auto [rows, width, grid] = gathers[turn < 12 ? turn % 6 : turn % 7 ? 0 : turn % 6];
    const int64_t total = int64_t(rows) * width;
    const std::vector<uint4> x = columns_of(rank, turn, total);
    std::vector<uint4> out(total * ranks);
    launch(grid, kLanes, [&] { gather_packed(x.data(), out.data(), total, width, p, limit, &missing); });
    if (!equal(out, ranks, turn, rows, width)) return printf("gather %d differs\n", turn), 1;
  }
  constexpr int kWidth = 19;  // units: more than share a line with their last bytes
  for (int turn = 0; turn < times; ++turn) {
    const int rows = turn % 9 ? 1 : 3, columns = kWidth * ranks * 8;
    const std::vector<uint4> x = columns_of(rank, turn, rows * kWidth);
    std::vector<uint4> given(rows * kWidth * ranks), y(given), added(given);
    const auto halves = [](auto& units) { return reinterpret_cast<uint16_t*>(units.data()); };
    const Norm<uint16_t> a{reinterpret_cast<const uint16_t*>(x.data()), halves(given), halves(given), halves(y),
                           halves(added), rows, columns, 0, false};
    launch(rows, 64, [&] { norm_packed<uint16_t>(a, p, limit, &missing); });
    if (!equal(added, ranks, turn, rows, kWidth)) return printf("norm %d differs\n", turn), 1;
  }
  return 0;
}

int main(int, char** arguments) {
  const int ranks = atoi(arguments[1]), times = atoi(arguments[2]), limit = atoi(arguments[3]), present = atoi(arguments[4]);
  void* memory = mmap(nullptr, ranks * packed_bytes(ranks), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return 2;
  for (int rank = 0; rank < present; ++rank)
    if (fork() == 0) {
      const int failed = run(rank, ranks, times, limit * 1000000ll, static_cast<char*>(memory));
      fflush(stdout);
      _Exit(failed);
    }
  int worst = 0, status;
  while (wait(&status) > 0) worst |= status;
  if (!worst) puts("equal");
  return WEXITSTATUS(worst);
}
