// linear's kernels for one tile a multiprocessor, tiled.cu.
#pragma once
#include <cuda_runtime.h>

#include "linear/product.h"

namespace vx {

// 64 * groups rows of the weight by `tokens` rows of x a tile; clusters of so many blocks along the rows of x.
struct Tiling {
  int groups, tokens, cluster, stages;
};

bool tiling_exists(const Tiling& t);
// False where it does not take this product; nothing is launched then.
bool run_tiled(const Product& p, const Tiling& t, cudaStream_t stream);

}  // namespace vx
