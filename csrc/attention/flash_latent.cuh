// Latent attention: keys of 576 numbers, values of 512 that may be the first of the same (and then are read once), and
// many query heads to a key head. One kernel for training, prefill and decode: a tile has 64 rows (positions, and the
// heads that share keys), one warpgroup scores a block of 64 keys and multiplies with the left half of the values, the
// other with the right half; a warp fetches. The order is that of flash.cuh, but in blocks of 64 keys.
#pragma once
#include "attention/flash.cuh"
#include "attention/flash_decode.cuh"
#include "common/sm90.cuh"

namespace vx::flash {

constexpr int kLatentD = 576, kLatentV = 512, kLatentKeys = 64, kLatentRows = 64;
constexpr int kLatentThreads = 384, kLatentMath = 256;  // of the last 128, a warp fetches
constexpr int kLatentBox = 64 * 128;  // bytes of 64 rows, 64 columns wide
constexpr int kLatentChunks = kLatentD / 64, kLatentJoined = kLatentRows * kLatentV;

struct LatentShared {
  alignas(1024) uint8_t q[kLatentChunks][kLatentBox];
  alignas(1024) uint8_t slots[2][kLatentChunks][kLatentBox];  // two blocks where keys hold their values; else K, V
  alignas(1024) uint8_t p[kLatentBox];
  float kept[kLatentRows], before[kLatentRows], after[kLatentRows], factor[kLatentRows];
  uint64_t full[2], empty[2];
};

// 16 bytes `chunk` of row `row` of 64 rows
__device__ __forceinline__ int latent_at(int row, int chunk) {
  return ((chunk / 8 * 64 + row) * 8 + ((chunk ^ row) & 7)) * 16;
}

// What a thread block does at a time; sequence -1 where nothing is left. Tiles of a sequence go from the last to the
// first; the segments of a sequence with one query are items of their own where there is room to put them aside.
struct LatentWork {
  int sequence, head, tile, split, q_begin, q_len, k_begin, shift, lo, hi;
  __device__ __forceinline__ int first() const { return lo / kLatentKeys; }
  __device__ __forceinline__ int blocks() const { return hi > lo ? (hi - 1) / kLatentKeys - first() + 1 : 0; }
};

__device__ __forceinline__ Extent latent_keys(const Args& a, int sequence) {
  if (a.table) return {0, max(min(a.k_at[sequence], a.keys), 0)};
  return extent(a.k_at, sequence, a.keys);
}

__device__ __forceinline__ LatentWork latent_work(const Args& a, int64_t item) {
  LatentWork work{};
  work.sequence = -1;
  work.head = int(item % a.hk);
  const int64_t which = item / a.hk;
  const int lane = threadIdx.x % 32;
  int64_t before = 0;
  for (int first = 0; first < a.sequences; first += 32) {
    int tiles = 0, segments = 1;
    if (first + lane < a.sequences) {
      const int length = extent(a.q_at, first + lane, a.tokens).length;
      tiles = int((int64_t(length) * a.group + kLatentRows - 1) / kLatentRows);
      if (a.partial && length == 1) segments = Sight(a, first + lane).segments(a.segment);
    }
    int until = tiles * segments;
    for (int d = 1; d < 32; d *= 2) {
      const int x = __shfl_up_sync(0xffffffffu, until, d);
      until += lane >= d ? x : 0;
    }
    const unsigned beyond = __ballot_sync(0xffffffffu, before + until > which);
    if (beyond) {
      const int at = __ffs(beyond) - 1;
      const int back = int(before + __shfl_sync(0xffffffffu, until, at) - 1 - which);
      const int parts = __shfl_sync(0xffffffffu, segments, at);
      work.sequence = first + at, work.tile = back / parts, work.split = back % parts;
      break;
    }
    before += __shfl_sync(0xffffffffu, until, 31);
  }
  if (work.sequence < 0) return work;
  const Extent queries = extent(a.q_at, work.sequence, a.tokens), keys = latent_keys(a, work.sequence);
  work.q_begin = queries.begin, work.q_len = queries.length, work.k_begin = keys.begin;
  work.shift = keys.length - queries.length;
  const int first_row = work.tile * kLatentRows;
  const int last_position = min((first_row + kLatentRows - 1) / a.group, queries.length - 1);
  work.hi = a.causal ? max(min(keys.length, work.shift + last_position + 1), 0) : keys.length;
  work.lo = a.window ? min(max(work.shift + first_row / a.group + 1 - a.window, 0), work.hi) : 0;
  if (a.partial && queries.length == 1) {
    work.split += work.lo / a.segment;
    work.lo = max(work.lo, work.split * a.segment), work.hi = min(work.hi, (work.split + 1) * a.segment);
  }
  return work;
}

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)

#define VX_TEN(t) \
  "%" #t "0,%" #t "1,%" #t "2,%" #t "3,%" #t "4,%" #t "5,%" #t "6,%" #t "7,%" #t "8,%" #t "9,"
#define VX_A4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define VX_A16(i) VX_A4(i), VX_A4(i + 4), VX_A4(i + 8), VX_A4(i + 12)
#define VX_SCORE(type)                                                                                        \
  asm volatile("wgmma.mma_async.sync.aligned.m64n64k16.f32." type "." type " {" VX_TEN() VX_TEN(1) VX_TEN(2)  \
               "%30,%31}, %32, %33, 1, 1, 1, 0, 0;"                                                           \
               : VX_A16(0), VX_A16(16)                                                                        \
               : "l"(a), "l"(b))
#define VX_MIX(type)                                                                                          \
  asm volatile("wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" VX_TEN() VX_TEN(1) VX_TEN(2) \
                   VX_TEN(3) VX_TEN(4) VX_TEN(5) VX_TEN(6) VX_TEN(7) VX_TEN(8) VX_TEN(9) VX_TEN(10) VX_TEN(11) \
               "%120,%121,%122,%123,%124,%125,%126,%127}, %128, %129, 1, 1, 1, 0, 1;"                         \
               : VX_A16(0), VX_A16(16), VX_A16(32), VX_A16(48), VX_A16(64), VX_A16(80), VX_A16(96), VX_A16(112) \
               : "l"(a), "l"(b))

// d += 64 rows of a by 64 rows of b, 16 of k
template <class T>
__device__ __forceinline__ void latent_score(float (&d)[32], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    VX_SCORE("bf16");
  } else {
    VX_SCORE("f16");
  }
}
// d += 64 rows of a by 256 columns of b, 16 of k
template <class T>
__device__ __forceinline__ void latent_mix(float (&d)[128], uint64_t a, uint64_t b) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
    VX_MIX("bf16");
  } else {
    VX_MIX("f16");
  }
}
#undef VX_TEN
#undef VX_A4
#undef VX_A16
#undef VX_SCORE
#undef VX_MIX

template <int ID>
__device__ __forceinline__ void meet() {
  asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(kLatentMath) : "memory");
}
template <int ID>
__device__ __forceinline__ void announce() {
  asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(kLatentMath) : "memory");
}
__device__ __forceinline__ bool meet_or(bool x) {
  int y;
  asm volatile(
      "{\n.reg .pred p, q;\nsetp.ne.u32 p, %1, 0;\nbar.red.or.pred q, 3, %2, p;\nselp.u32 %0, 1, 0, q;\n}"
      : "=r"(y)
      : "r"(int(x)), "n"(kLatentMath)
      : "memory");
  return y;
}

#endif

// SHARED: values are the first columns of their keys. BOXES: pages and blocks fit each other, the copy engine fetches.
template <class T, bool SHARED, bool BOXES>
__global__ void __launch_bounds__(kLatentThreads, 1)
    latent_kernel(const Args a, const __grid_constant__ CUtensorMap k_map, const __grid_constant__ CUtensorMap v_map,
                  float* joined) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) uint8_t raw[];
  if (shared_address(raw) % 1024) __trap();
  auto& s = *reinterpret_cast<LatentShared*>(raw);
  const int tid = threadIdx.x, warp = tid / 32, lane = tid % 32, g = lane / 4, t = lane % 4;
  if (tid == 0) {
    for (int i = 0; i < 2; ++i) {
      barrier_init(shared_address(&s.full[i]), BOXES ? 1 : 32);
      barrier_init(shared_address(&s.empty[i]), SHARED || i == 1 ? 8 : 4);  // warps that read it
    }
    sm90::barrier_init_fence();
  }
  __syncthreads();
  auto k_slot = [](uint32_t u) { return SHARED ? u % 2 : 0u; };
  auto v_slot = [](uint32_t u) { return SHARED ? u % 2 : 1u; };
  auto phase = [](uint32_t u) { return (SHARED ? u / 2 : u) & 1; };
  uint32_t done = 0;  // blocks of earlier work

  if (warp >= kLatentMath / 32) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    for (int64_t item = blockIdx.x; warp == kLatentMath / 32; item += gridDim.x) {
      const LatentWork work = latent_work(a, item);
      if (work.sequence < 0) break;
      const int blocks = work.blocks(), last = work.first() + blocks - 1;
      auto look_up = [&](int n) -> int2 {  // the page of this lane's box of keys
        const int key = (last - n) * kLatentKeys + lane * a.box;
        if (!BOXES || n >= blocks || lane * a.box >= kLatentKeys || key >= work.hi || key + a.box <= work.lo)
          return {-1, 0};
        if (!a.table) return {0, work.k_begin + key};
        return {a.table[work.sequence * a.table_row + key / a.page_size], key % a.page_size};
      };
      auto fetch = [&](bool values, uint32_t slot, int n, int2 at) {
        const uint32_t to = shared_address(s.slots[slot]), bar = shared_address(&s.full[slot]);
        const int chunks = values ? kLatentV / 64 : kLatentChunks;
        if (BOXES) {
          if (lane == 0) barrier_expect(bar, chunks * kLatentBox);
          __syncwarp();
          if (lane * a.box < kLatentKeys)
            for (int i = 0; i < chunks; ++i)
              copy_box(to + i * kLatentBox + lane * a.box * 128, values ? v_map : k_map, i * 64, at.y, work.head, at.x,
                       bar);
        } else {
          const char* base = static_cast<const char*>(values ? a.v : a.k);
          const int64_t page = values ? a.v_page : a.k_page, row = values ? a.v_row : a.k_row;
          const int64_t head = work.head * (values ? a.v_head : a.k_head);
          for (int key = 0; key < kLatentKeys; ++key) {
            const int2 from = locate(a, work.sequence, work.k_begin, (last - n) * kLatentKeys + key, work.lo, work.hi);
            const int64_t place = max(from.x, 0) * page + from.y * row + head;
            for (int chunk = lane; chunk < chunks * 8; chunk += 32)
              copy16(to + latent_at(key, chunk), base + (place + chunk * 8) * 2, from.x >= 0);
          }
          asm volatile("cp.async.wait_all;" ::: "memory");
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          sm90::barrier_arrive(bar);
        }
      };
      int2 next = look_up(0);
      for (int n = 0; n < blocks; ++n) {
        const int2 at = next;
        next = look_up(n + 1);
        const uint32_t u = done + n;
        barrier_wait(shared_address(&s.empty[k_slot(u)]), phase(u) ^ 1);
        fetch(false, k_slot(u), n, at);
        if (!SHARED) {
          barrier_wait(shared_address(&s.empty[1]), phase(u) ^ 1);
          fetch(true, 1, n, at);
        }
      }
      done += blocks;
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int half = warp / 4;  // 0 scores, and multiplies with the left half of the values; 1 with the right one
    const int row0 = warp % 4 * 16 + g;
    float acc[128];
    for (int64_t item = blockIdx.x;; item += gridDim.x) {
      const LatentWork work = latent_work(a, item);
      if (work.sequence < 0) break;
      const int blocks = work.blocks(), last = work.first() + blocks - 1;
      const int first_row = work.tile * kLatentRows, first_position = first_row / a.group;
      const int last_position = min((first_row + kLatentRows - 1) / a.group, work.q_len - 1);
      meet<1>();  // the item before is done with everything shared
      for (int i = tid; i < kLatentRows * (kLatentD / 8); i += kLatentMath) {
        const int row = i / (kLatentD / 8), chunk = i % (kLatentD / 8), position = (first_row + row) / a.group;
        const bool live = position < work.q_len;
        const T* from = static_cast<const T*>(a.q) + int64_t(work.q_begin + (live ? position : 0)) * a.q_row +
                        (work.head * a.group + (first_row + row) % a.group) * a.q_head + chunk * 8;
        copy16(shared_address(s.q) + latent_at(row, chunk), from, live);
      }
      asm volatile("cp.async.wait_all;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
      meet<1>();

      int place[2], token[2], q_head[2];
      bool live[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const int row = first_row + row0 + 8 * r, position = row / a.group;
        live[r] = position < work.q_len;
        place[r] = work.shift + position;
        token[r] = work.q_begin + position;
        q_head[r] = work.head * a.group + row % a.group;
      }
      const int whole_hi = a.causal ? work.shift + first_position + 1 : work.hi;
      const int whole_lo = a.window ? work.shift + last_position + 1 - a.window : 0;
      auto sees = [&](int r, int key) {
        return key >= work.lo && key < work.hi && (!a.causal || key <= place[r]) && (!a.window || key > place[r] - a.window);
      };
      float m[2] = {-INFINITY, -INFINITY}, l[2] = {0.f, 0.f}, high[2] = {-INFINITY, -INFINITY}, all[2] = {0.f, 0.f};
      bool segments_before = false;
#pragma unroll
      for (int i = 0; i < 128; ++i) acc[i] = 0.f;

      for (int n = 0; n < blocks; ++n) {  // order: blocks of keys from the last to the first
        const int key0 = (last - n) * kLatentKeys;
        const uint32_t u = done + n;
        const bool edge = key0 < work.lo || key0 + kLatentKeys > work.hi;
        const bool ragged = first_position != last_position && (key0 + kLatentKeys > whole_hi || key0 < whole_lo);
        float kept[2];
        if (half == 0) {
          barrier_wait(shared_address(&s.full[k_slot(u)]), phase(u));
          float c[32];
#pragma unroll
          for (int i = 0; i < 32; ++i) c[i] = 0.f;
          sm90::wgmma_begin();
#pragma unroll
          for (int chunk = 0; chunk < kLatentChunks; ++chunk)  // order: D ascending
#pragma unroll
            for (int kk = 0; kk < 4; ++kk)
              latent_score<T>(c, sm90::operand(shared_address(s.q[chunk]) + kk * 32),
                              sm90::operand(shared_address(s.slots[k_slot(u)][chunk]) + kk * 32));
          sm90::wgmma_commit();
          sm90::wgmma_wait<0>();
          if (!SHARED && lane == 0) sm90::barrier_arrive(shared_address(&s.empty[0]));
          if (edge || key0 + kLatentKeys > whole_hi || key0 < whole_lo) {
#pragma unroll
            for (int i = 0; i < 32; ++i)
              if (!sees(i / 2 % 2, key0 + i / 4 * 8 + t * 2 + i % 2)) c[i] = -INFINITY;
          }
          meet<2>();  // the other half is done with the probabilities before
#pragma unroll
          for (int r = 0; r < 2; ++r) {
            float x = m[r];
#pragma unroll
            for (int j = 0; j < 8; ++j) x = fmaxf(x, fmaxf(c[4 * j + 2 * r], c[4 * j + 2 * r + 1]));
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
            x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
            const float base = finite_or_zero(x), offset = __fmul_rn(base, a.scale);
            kept[r] = exp2_fast(__fmul_rn(__fsub_rn(m[r], base), a.scale));
            m[r] = x;
            const int row = row0 + 8 * r;
            if (t == 0) s.kept[row] = kept[r];
#pragma unroll
            for (int j = 0; j < 8; ++j) {  // order: a partial sum takes its keys ascending
              const float p0 = exp2_fast(__fmaf_rn(c[4 * j + 2 * r], a.scale, -offset));
              const float p1 = exp2_fast(__fmaf_rn(c[4 * j + 2 * r + 1], a.scale, -offset));
              l[r] = j == 0 ? __fmaf_rn(l[r], kept[r], p0) : __fadd_rn(l[r], p0);
              l[r] = __fadd_rn(l[r], p1);
              *reinterpret_cast<uint32_t*>(s.p + latent_at(row, j) + t * 4) = pack<T>(p0, p1);
            }
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          meet<1>();  // probabilities are there
        } else {
          announce<2>();  // done with the probabilities before
          barrier_wait(shared_address(&s.full[v_slot(u)]), phase(u));
          meet<1>();
          kept[0] = s.kept[row0], kept[1] = s.kept[row0 + 8];
        }
        if (!SHARED && half == 0) barrier_wait(shared_address(&s.full[1]), phase(u));
#pragma unroll
        for (int i = 0; i < 128; ++i) acc[i] = __fmul_rn(acc[i], kept[i / 2 % 2]);

        uint8_t* values = s.slots[v_slot(u)][0];
        if (ragged || (edge && BOXES)) {  // values there must not reach rows that do not see them
          bool nonfinite = false;
          for (int i = tid; i < kLatentKeys * (kLatentV / 8); i += kLatentMath) {
            const int key = key0 + i / (kLatentV / 8);
            uint4& y = *reinterpret_cast<uint4*>(values + latent_at(key - key0, i % (kLatentV / 8)));
            if (key < work.lo || key >= work.hi)
              y = uint4{};
            else if (ragged)
              nonfinite = nonfinite || Pair<T>::nonfinite(y.x) || Pair<T>::nonfinite(y.y) ||
                          Pair<T>::nonfinite(y.z) || Pair<T>::nonfinite(y.w);
          }
          asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
          if (meet_or(nonfinite)) {  // what is not finite acts on those who see it, and leaves before the product
#pragma unroll 1
            for (int key = 0; key < kLatentKeys; ++key) {
              float weight[2];
              bool here[2];
#pragma unroll
              for (int r = 0; r < 2; ++r) {
                const T w = *reinterpret_cast<const T*>(s.p + latent_at(row0 + 8 * r, key / 8) + key % 8 * 2);
                weight[r] = float(w), here[r] = sees(r, key0 + key);
              }
#pragma unroll
              for (int j = 0; j < 32; ++j) {
                const uint32_t pair = *reinterpret_cast<const uint32_t*>(values + latent_at(key, half * 32 + j) + t * 4);
                if (!Pair<T>::nonfinite(pair)) continue;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                  const uint16_t bits = uint16_t(pair >> (16 * e));
                  const float x = float(*reinterpret_cast<const T*>(&bits));
                  if (x - x == 0.f) continue;
#pragma unroll
                  for (int r = 0; r < 2; ++r)
                    if (here[r]) acc[4 * j + 2 * r + e] += weight[r] > 0.f ? x : NAN;
                }
              }
            }
            meet<3>();
            for (int i = tid; i < kLatentKeys * (kLatentV / 8); i += kLatentMath) {
              uint4& y = *reinterpret_cast<uint4*>(values + latent_at(i / (kLatentV / 8), i % (kLatentV / 8)));
              y = {Pair<T>::cleaned(y.x), Pair<T>::cleaned(y.y), Pair<T>::cleaned(y.z), Pair<T>::cleaned(y.w)};
            }
            asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
            meet<3>();
          }
        }
        sm90::wgmma_begin();
#pragma unroll
        for (int kk = 0; kk < kLatentKeys / 16; ++kk)  // order: keys of a block ascending
          latent_mix<T>(acc, sm90::operand(shared_address(s.p) + kk * 32),
                        sm90::operand_across(shared_address(values) + half * 4 * kLatentBox + kk * 2048, kLatentBox));
        sm90::wgmma_commit();
        sm90::wgmma_wait<0>();
        if (lane == 0) sm90::barrier_arrive(shared_address(&s.empty[v_slot(u)]));

        if (a.segment && !(a.partial && work.q_len == 1) && (n + 1 == blocks || key0 % a.segment == 0)) {
          if (half == 0) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
              const Join join(high[r], m[r], a.scale);
              all[r] = join(all[r], quad_sum(l[r]));
              m[r] = -INFINITY, l[r] = 0.f;
              if (t == 0) s.before[row0 + 8 * r] = join.before, s.after[row0 + 8 * r] = join.after;
            }
          }
          meet<3>();
          const float before[2] = {s.before[row0], s.before[row0 + 8]}, after[2] = {s.after[row0], s.after[row0 + 8]};
          float* mine = joined + int64_t(blockIdx.x) * kLatentJoined + tid;  // what segments that are done came to
          if (live[0] || live[1]) {
#pragma unroll
            for (int i = 0; i < 128; ++i) {
              const float old = segments_before ? mine[i * kLatentMath] : 0.f;
              acc[i] = __fmaf_rn(old, before[i / 2 % 2], __fmul_rn(acc[i], after[i / 2 % 2]));
              if (n + 1 < blocks) mine[i * kLatentMath] = acc[i], acc[i] = 0.f;
            }
          }
          segments_before = true;
        }
      }
      done += blocks;

      if (a.partial && work.q_len == 1) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float total = quad_sum(l[r]);
          if (!live[r]) continue;
          const int64_t place_aside = (int64_t(work.sequence) * a.segments + work.split) * a.hk * a.group + q_head[r];
          float* to = a.partial + place_aside * (kLatentV + 2);
          if (half == 0 && t == 0) to[kLatentV] = m[r], to[kLatentV + 1] = total;
#pragma unroll
          for (int j = 0; j < 32; ++j)
            *reinterpret_cast<float2*>(to + half * 256 + j * 8 + t * 2) = make_float2(acc[4 * j + 2 * r], acc[4 * j + 2 * r + 1]);
        }
        continue;
      }
      if (half == 0) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const Final final(a.segment ? high[r] : m[r], a.segment ? all[r] : quad_sum(l[r]), a.scale);
          if (t == 0) s.factor[row0 + 8 * r] = final.factor;
          if (a.lse && t == 0 && live[r]) a.lse[int64_t(q_head[r]) * a.tokens + token[r]] = final.lse;
        }
      }
      meet<3>();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (!live[r]) continue;
        const float factor = s.factor[row0 + 8 * r];
        T* to = static_cast<T*>(a.out) + (int64_t(token[r]) * a.hk * a.group + q_head[r]) * kLatentV + half * 256 + t * 2;
#pragma unroll
        for (int j = 0; j < 32; ++j) {
          const float x = __fmul_rn(__fadd_rn(acc[4 * j + 2 * r], 0.f), factor);
          const float y = __fmul_rn(__fadd_rn(acc[4 * j + 2 * r + 1], 0.f), factor);
          *reinterpret_cast<uint32_t*>(to + j * 8) = pack<T>(x, y);
        }
      }
    }
  }
#endif
}

}  // namespace vx::flash
