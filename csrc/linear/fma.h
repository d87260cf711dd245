// linear's kernels for fp32, fma.cu.
#pragma once
#include <cuda_runtime.h>

#include "linear/product.h"

namespace vx {

// Tiles of `rows` rows of a by `columns` columns of b.
struct FmaTile {
  int rows, columns;
};

bool fma_tile_exists(const FmaTile& tile);
// False where it does not take this product; nothing is launched then.
bool run_fma(const Product& p, const FmaTile& tile, cudaStream_t stream);

}  // namespace vx
