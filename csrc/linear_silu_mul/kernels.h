#pragma once

namespace vx {

// A kernel for few rows by its sizes: what linear's sm90_skinny.cuh calls them.
struct GatedSizes {
  int rows;    // of the weight in a tile, gates and ups together: a multiple of 16 up to 128
  int tokens;  // rows of x in a tile: 8, 16, 32 or 64
  int boxes, stages, ahead, lead;
  int per_sm;  // persistent blocks of a multiprocessor; 0: a block for each tile
};

}  // namespace vx
