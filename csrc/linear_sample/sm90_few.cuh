// Draws from a tile of logits as sm90_skinny.cuh makes it: 128 rows of the weight, which are a block of the log-sum-exp, by
// 8 to 64 rows of hidden.
//
// A thread holds tokens 64 p + 16 warp + lane / 4 + 8 h of rows 8 j + lane % 4 * 2 + i. Eight rows are taken at a time. The
// work is hidden: the copy engine goes on reading the weight, which is what takes the time.
#pragma once
#include "linear/sm90_skinny.cuh"
#include "linear_sample/draw.cuh"

namespace vx::sm90 {

struct FewEpilogue {
  Draws a;

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  struct Shared {
    float most[4][8];         // by warp and row
    float top[8];             // of all warps: `most` is written again before everybody has read it
    float sums[2][2][4][8];   // raw and at the temperature; p
    uint64_t weights[16][8];  // of eight neighbours, ascending
    int first[4][8];          // of the largest logits
  };

  static __device__ __forceinline__ void together() { asm volatile("bar.sync 1, 128;" ::: "memory"); }

  __device__ __forceinline__ int begin() const { return 0; }

  template <int PARTS, int HALF_TOKENS>
  __device__ __forceinline__ void operator()(const SkinnyArgs&, float (&d)[PARTS][HALF_TOKENS], int tile, int m0, int) const {
    static_assert(PARTS == 2);
    __shared__ Shared shared;
#pragma unroll 1
    for (int j = 0; j < HALF_TOKENS / 4; ++j) {
      if (m0 + 8 * j >= a.rows) break;
      float x[2][2][2];  // p, h, i
#pragma unroll
      for (int k = 0; k < HALF_TOKENS / 4; ++k)
        if (k == j) {
#pragma unroll
          for (int n = 0; n < 8; ++n) x[n / 4][n / 2 % 2][n % 2] = d[n / 4][4 * k + n % 4];
        }
      rows(shared, x, tile, m0 + 8 * j);
    }
  }

  __device__ __forceinline__ void rows(Shared& shared, float (&x)[2][2][2], int tile, int row0) const {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, mine = lane % 4 * 2;
    const int from = tile * kDrawBlock + 16 * warp + lane / 4;
    float t[2], temperature[2];
    Stream stream[2];
    bool live[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = row0 + mine + i;
      live[i] = row < a.rows;
      temperature[i] = live[i] ? a.temperature[row] : 1.0f;
      t[i] = temperature[i] == 0.0f ? 1.0f : temperature[i];
      stream[i] = {halves(a.seeds[live[i] ? row : 0]), halves(a.positions[live[i] ? row : 0])};
      float most = __int_as_float(0x7fffffff);  // a NaN: it is passed over
#pragma unroll
      for (int p = 0; p < 2; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          float& v = x[p][h][i];
          if (a.softcap != 0.0f) v = a.softcap * tanh_in_order(__fdiv_rn(v, a.softcap));
          if (from + 64 * p + 8 * h >= a.vocabulary) v = __int_as_float(0xff800000);
          most = fmaxf(most, v);
        }
#pragma unroll
      for (int across = 4; across < 32; across *= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, across));
      if (lane < 4) shared.most[warp][mine + i] = most;
    }
    together();
    uint64_t weight[2][2][2], up_to[2][2][2];  // i, p, h: of a token, and of the tokens of its eight up to it
    int first[2];                              // of the largest logits
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float raw_most = block_most(shared, mine + i), z_most = __fdiv_rn(raw_most, t[i]) + 0.0f;
      const float origin = raw_most == __int_as_float(0xff800000) ? 0.0f : raw_most;
      const float z_origin = z_most == __int_as_float(0xff800000) ? 0.0f : z_most;
      float raw[2][2], scaled[2][2];
      first[i] = kNoToken;
      if (warp == 0 && lane < 4) shared.top[mine + i] = raw_most;
#pragma unroll
      for (int p = 0; p < 2; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const float v = x[p][h][i], z = __fdiv_rn(v, t[i]);
          raw[p][h] = exp_term(v - origin);
          scaled[p][h] = exp_term(z - z_origin);
          weight[i][p][h] = up_to[i][p][h] = weight_of(scaled[p][h]);
          if (v == raw_most && v > __int_as_float(0xff800000)) first[i] = min(first[i], from + 64 * p + 8 * h);
        }
#pragma unroll
      for (int across = 4; across < 32; across *= 2) {  // order: a tree of neighbours
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          float &r = raw[n / 2][n % 2], &s = scaled[n / 2][n % 2];
          uint64_t& w = up_to[i][n / 2][n % 2];
          r = r + __shfl_xor_sync(~0u, r, across);
          s = s + __shfl_xor_sync(~0u, s, across);
          const uint64_t before = __shfl_up_sync(~0u, w, across);
          if (lane >= across) w += before;
        }
        first[i] = min(first[i], __shfl_xor_sync(~0u, first[i], across));
      }
      if (lane < 4) {
#pragma unroll
        for (int p = 0; p < 2; ++p) {
          shared.sums[0][p][warp][mine + i] = raw[p][0] + raw[p][1];
          shared.sums[1][p][warp][mine + i] = scaled[p][0] + scaled[p][1];
        }
        shared.first[warp][mine + i] = first[i];
      }
      if (lane >= 28) {
#pragma unroll
        for (int n = 0; n < 4; ++n) shared.weights[n / 2 * 8 + warp * 2 + n % 2][mine + i] = up_to[i][n / 2][n % 2];
      }
    }
    together();
    // Who has the token tells it.
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (!live[i]) continue;
      uint64_t before[2][2], total = 0;
#pragma unroll
      for (int eight = 0; eight < 16; ++eight) {
        if (eight / 2 % 4 == warp) before[eight / 8][eight % 2] = total;
        total += shared.weights[eight][mine + i];
      }
      const int row = row0 + mine + i;
      const int greedy = min(min(shared.first[0][mine + i], shared.first[1][mine + i]),
                             min(shared.first[2][mine + i], shared.first[3][mine + i]));
      const uint64_t share = share_of(stream[i], total);
#pragma unroll
      for (int p = 0; p < 2; ++p)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
          const uint64_t up = before[p][h] + up_to[i][p][h];
          const int token = from + 64 * p + 8 * h;
          if (temperature[i] == 0.0f ? token == greedy : up > share && up - weight[i][p][h] <= share) {
            a.entries[int64_t(row) * 2 * a.blocks + tile] = x[p][h][i];
            a.tokens[int64_t(row) * a.blocks + tile] = token;
          }
        }
    }
    const int row = row0 + threadIdx.x;
    if (threadIdx.x < 8 && row < a.rows) {
      const float of = a.temperature[row], most = shared.top[threadIdx.x];
      const float z_most = __fdiv_rn(most, of == 0.0f ? 1.0f : of) + 0.0f, total = block_sum(shared.sums[1]);
      const Stream mine_of{halves(a.seeds[row]), halves(a.positions[row])};
      float* const to = a.parts + int64_t(row) * 4 * a.blocks + tile;
      to[0] = most;
      to[a.blocks] = block_sum(shared.sums[0]);
      to[2 * int64_t(a.blocks)] = z_most;
      to[3 * int64_t(a.blocks)] = total;
      a.entries[(int64_t(row) * 2 + 1) * a.blocks + tile] = of == 0.0f ? 0.0f : number_of(exponential(word_of(mine_of, tile)), total);
      uint64_t weights = 0;
#pragma unroll
      for (int eight = 0; eight < 16; ++eight) weights |= shared.weights[eight][threadIdx.x];
      bool none = weights == 0;
      if (of == 0.0f) none = most == __int_as_float(0xff800000);
      if (none) a.tokens[int64_t(row) * a.blocks + tile] = kNoToken;
    }
  }

  // -0 is the same number as 0; a NaN is passed over
  static __device__ __forceinline__ float block_most(const Shared& s, int row) {
    return fmaxf(fmaxf(s.most[0][row], s.most[1][row]), fmaxf(s.most[2][row], s.most[3][row])) + 0.0f;
  }
  static __device__ __forceinline__ float block_sum(const float (&s)[2][4][8]) {
    const int row = threadIdx.x;
    return ((s[0][0][row] + s[0][1][row]) + (s[0][2][row] + s[0][3][row])) +
           ((s[1][0][row] + s[1][1][row]) + (s[1][2][row] + s[1][3][row]));  // order: a tree of neighbours
  }
#endif
};

}  // namespace vx::sm90
