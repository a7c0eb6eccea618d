// Causal attention of prompt chunks on tensor cores: running maximum, fp32 sums, scores never leave the registers.
//
// A block takes kBlockQ queries of one head and walks over the keys in tiles of kBlockK, which are copied to shared
// memory while the previous products run. Each of four warps holds kTiles x 16 queries. Scheme of the loop:
// FlashAttention-2 (arXiv 2307.08691). Keys are all before the queries, the blocks of a list, or single rows that
// columns and diagonals name, gathered as they are met.
#include <climits>

#include "cuda/async.cuh"
#include "cuda/kv.h"
#include "cuda/launch.cuh"
#include "cuda/mma.cuh"
#include "cuda/prompt_blocks.h"
#include "cuda/prompt_lines.h"

namespace longkv::card {

namespace {

constexpr int kWarps = 4;

// 16 bytes from memory to shared memory, zeros when `there` is false.
__device__ __forceinline__ void copy16(uint32_t to, const void* from, bool there) {
  const int bytes = there ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
}
__device__ __forceinline__ void load_matrices(uint32_t r[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
__device__ __forceinline__ void load_matrices_turned(uint32_t r[4], uint32_t address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Byte offset of 16-byte chunk `chunk` of row `row` in a tile: chunks are permuted so that eight rows of one chunk lie
// in different banks.
template <int kDim>
__device__ __forceinline__ uint32_t tile_offset(int row, int chunk) {
  const int turn = kDim % 64 == 0 ? row & 7 : (row >> 1) & 3;
  return uint32_t(row * (kDim * 2) + (chunk ^ turn) * 16);
}

// Rows [first, first + kRows) of one head to a tile; rows from `end` on, and with kFront those before 0, are zero.
template <int kDim, int kRows, bool kFront = false>
__device__ __forceinline__ void load_tile(uint32_t tile, const uint8_t* base, int64_t row_stride, int64_t first,
                                          int64_t end) {
  constexpr int kChunks = kDim / 8;
  static_assert(kRows * kChunks % (kWarps * 32) == 0);
#pragma unroll
  for (int i = 0; i < kRows * kChunks / (kWarps * 32); ++i) {
    const int at = i * kWarps * 32 + int(threadIdx.x);
    const int row = at / kChunks, chunk = at % kChunks;
    const bool there = (!kFront || first + row >= 0) && first + row < end;
    copy16(tile + tile_offset<kDim>(row, chunk), base + (there ? first + row : 0) * row_stride + chunk * 16, there);
  }
}

// The same of rows [first, first + kRows) that a thread goes through in even steps: of which it copies every
// kThreadRows-th, one piece of 16 bytes each. `from`: that piece of its first row; valid: rows from `first` on that are
// there.
template <int kDim>
struct TileCopy {
  static constexpr int kChunks = kDim / 8, kThreadRows = kWarps * 32 / kChunks;
  static constexpr bool kEven = kWarps * 32 % kChunks == 0 && kThreadRows % 8 == 0;
  uint32_t place;  // in a tile
  int row;
  __device__ __forceinline__ TileCopy()
      : place(tile_offset<kDim>(int(threadIdx.x) / kChunks, int(threadIdx.x) % kChunks)),
        row(int(threadIdx.x) / kChunks) {}
  __device__ __forceinline__ int64_t offset() const { return row * (kDim * 2) + int(threadIdx.x) % kChunks * 16; }
  template <int kRows>
  __device__ __forceinline__ void load(uint32_t tile, const uint8_t* from, int valid) const {
#pragma unroll
    for (int i = 0; i < kRows / kThreadRows; ++i)
      copy16(tile + place + i * (kThreadRows * kDim * 2), from + i * (kThreadRows * kDim * 2),
             row + i * kThreadRows < valid);
  }
};

// The rows `rows` [at, at + kRows) of those that are held, one after the other; zeros past `held`.
template <int kDim, int kRows>
__device__ __forceinline__ void gather_tile(uint32_t tile, const uint8_t* base, const int* rows, int at, int held) {
  constexpr int kChunks = kDim / 8;
  static_assert(kRows * kChunks % (kWarps * 32) == 0);
#pragma unroll
  for (int i = 0; i < kRows * kChunks / (kWarps * 32); ++i) {
    const int piece = i * kWarps * 32 + int(threadIdx.x);
    const int row = piece / kChunks, chunk = piece % kChunks;
    const bool there = at + row < held;
    copy16(tile + tile_offset<kDim>(row, chunk), base + int64_t(there ? rows[at + row] : 0) * (kDim * 2) + chunk * 16,
           there);
  }
}

// The rows that a block of queries attends, ascending, in shared memory as far as they were found.
struct LineRows {
  static constexpr int kWords = kWarps * 16;  // looked at together: half a word a thread
  static constexpr int kCapacity = kWarps * 32 + kWords * 64;
  int* rows;    // [kCapacity]
  int* totals;  // [kWarps]
  const uint64_t *columns, *spread;
  int64_t block;
  int from, to;  // queries of it
  int held = 0;
  int64_t word = 0;

  __device__ __forceinline__ uint64_t word_at(int64_t w) const {
    if (w > block) return 0;
    const uint64_t listed = columns[w] | spread[block - w];
    return w < block ? listed : own_word(listed, from, to);
  }
  // After this at least `wanted` rows from place `at` on are held, if there are so many; wanted: no more than threads.
  // Returns where the row at `at` is now. Every thread takes part.
  __device__ __forceinline__ int fill(int at, int wanted) {
    const int lane = int(threadIdx.x % 32), warp = int(threadIdx.x / 32);
    while (held - at < wanted && word <= block) {
      if (at > 0) {
        const int left = held - at, mine = int(threadIdx.x) < left ? rows[at + int(threadIdx.x)] : 0;
        __syncthreads();
        if (int(threadIdx.x) < left) rows[threadIdx.x] = mine;
        held = left, at = 0;
      }
      const int64_t w = word + threadIdx.x / 2;
      const auto bits = uint32_t(word_at(w) >> (threadIdx.x % 2 * 32));
      int upto = __popc(bits);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(kAllLanes, upto, step);
        if (lane >= step) upto += other;
      }
      if (lane == 31) totals[warp] = upto;
      __syncthreads();
      int next = held + upto - __popc(bits);
#pragma unroll
      for (int i = 0; i < kWarps; ++i) {
        if (i < warp) next += totals[i];
        held += totals[i];
      }
      const int first = int(w) * 64 + int(threadIdx.x % 2) * 32;
      for (uint32_t left = bits; left != 0; left &= left - 1) rows[next++] = first + __ffs(int(left)) - 1;
      word += kWords;
      __syncthreads();
    }
    return at;
  }
};

struct PromptArgs {
  AttendArgs a;
  int64_t first, n;
  half_t* out;
  PromptLists lists;
  PromptLines lines;
  PromptHeads heads;
  unsigned long long* pairs;
};

enum class PromptKeys { kAll, kBlocks, kLines };

// kKeys: but for kAll, blocks of queries begin at multiples of kBlockQ; kBlocks: the keys are those of p.lists, by blocks
// of kBlock rows; kLines: those of p.lines, by blocks of 64 queries.
template <class Value, int kDim, int kTiles, int kBlockK, PromptKeys kKeys, int kBlock>
__global__ void __launch_bounds__(kWarps * 32) attend_prompt_kernel(PromptArgs p) {
  constexpr int kBlockQ = kWarps * kTiles * 16;
  constexpr bool kListed = kKeys == PromptKeys::kBlocks, kLines = kKeys == PromptKeys::kLines;
  constexpr bool kAligned = kKeys != PromptKeys::kAll;
  constexpr int kKeyTiles = kBlockK / 8, kChannelTiles = kDim / 8;
  const Value* const tag = nullptr;
  extern __shared__ __align__(128) uint8_t shared[];
  const uint32_t q_tile = shared_place(shared);
  const uint32_t k_tile = q_tile + kBlockQ * kDim * 2;
  const uint32_t v_tile = k_tile + kBlockK * kDim * 2;

  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int head = p.heads.ids != nullptr ? p.heads.ids[blockIdx.x] : int(blockIdx.x);
  // Late queries have the most keys: they start first.
  const int64_t q_block = gridDim.y - 1 - blockIdx.y;
  const int64_t q_first = q_block * kBlockQ - (kAligned ? p.first % kBlockQ : 0);
  const CardKv& kv = p.a.kv;
  const int64_t head_row = int64_t(head / (p.a.heads / kv.kv_heads)) * kv.capacity;
  const TileCopy<kDim> copy;
  const int64_t head_bytes = head_row * kDim * 2 + (TileCopy<kDim>::kEven && !kLines ? copy.offset() : 0);
  const uint8_t *keys = kv.k + head_bytes, *values = kv.v + head_bytes;
  // Rows are counted in 31 bits, as lists name them.
  const int key_end = int(min(p.first + p.n, p.first + q_first + kBlockQ));
  const int key_begin =
      p.a.window > 0 ? int(max(int64_t(0), p.first + q_first + 1 - p.a.window) / kBlockK * kBlockK) : 0;
  constexpr int kPerBlock = kBlock / kBlockK;
  // Blocks of queries count from the one that holds the first query of the chunk.
  const int64_t list =
      head * p.lists.query_blocks + (p.first / kBlockQ + q_block) * kBlockQ / kBlock - p.first / kBlock;
  const int32_t* listed = p.lists.blocks + list * p.lists.most;
  const int listed_blocks = kListed ? p.lists.count[list] : 0, key_tiles = listed_blocks * kPerBlock;
  // The tile of keys after the one at `key`; of a list, its number `tile`. key_end: there is none.
  const auto next_key = [&](int key, int tile) {
    if (!kListed) return key + kBlockK;
    return tile < key_tiles ? listed[tile / kPerBlock] * kBlock + tile % kPerBlock * kBlockK : key_end;
  };

  LineRows line{};
  int line_rows = 0;  // taken so far
  if constexpr (kLines) {
    line.rows = reinterpret_cast<int*>(shared + (kBlockQ + 2 * kBlockK) * kDim * 2);
    line.totals = line.rows + LineRows::kCapacity;
    const LineQueries queries{p.first, p.n};
    line.block = p.first / kBlockQ + q_block;
    line.from = queries.from(line.block), line.to = queries.to(line.block);
    line.columns = p.lines.columns + head * p.lines.words;
    line.spread = p.lines.spread + (int64_t(head) * 3 + queries.kind(line.block)) * p.lines.words;
    line.fill(0, 2 * kBlockK);
  }

  const auto load_rows = [&](uint32_t to, const uint8_t* base, int first) {
    if constexpr (kLines) {
      gather_tile<kDim, kBlockK>(to, base, line.rows, first, line.held);
    } else if constexpr (TileCopy<kDim>::kEven) {
      copy.template load<kBlockK>(to, base + int64_t(first) * (kDim * 2), key_end - first);
    } else {
      load_tile<kDim, kBlockK>(to, base, kDim * 2, first, key_end);
    }
  };
  load_tile<kDim, kBlockQ, kAligned>(q_tile, reinterpret_cast<const uint8_t*>(p.a.q + int64_t(head) * kDim),
                                    int64_t(p.a.heads) * kDim * 2, q_first, p.n);
  const int first_key = kListed ? next_key(0, 0) : kLines ? 0 : key_begin;
  load_rows(k_tile, keys, first_key);
  commit_copies();

  float out[kTiles][kChannelTiles][4] = {};
  float top[kTiles][2], sum[kTiles][2];
#pragma unroll
  for (int t = 0; t < kTiles; ++t) top[t][0] = top[t][1] = kMinusInfinity, sum[t][0] = sum[t][1] = 0.0f;
  const float scale = p.a.scale * kLog2E;
  const int q_position = int(p.first + q_first);
  const int my_first = q_position + warp * kTiles * 16 + lane / 4;  // position of row 0 of tile 0
  const int window = int(min(p.a.window, int64_t(1) << 30));

  // kLines: `key` is a place among the rows that are held.
  const auto end = [&] { return kLines ? line.held : key_end; };
  int tile = 0;
  for (int key = first_key; key < end(); key = next_key(key, ++tile)) {
    await_copies<0>();
    __syncthreads();
    if constexpr (kLines) {
      key = line.fill(key, 2 * kBlockK);
      line_rows += min(kBlockK, line.held - key);
    }
    load_rows(v_tile, values, key);
    commit_copies();

    // A fragment is on its way while products take the one before it.
    float s[kTiles][kKeyTiles][4] = {};
    const auto load_query = [&](int step, uint32_t(&a)[kTiles][4]) {
#pragma unroll
      for (int t = 0; t < kTiles; ++t)
        load_matrices(a[t], q_tile + tile_offset<kDim>((warp * kTiles + t) * 16 + lane % 16, 2 * step + lane / 16));
    };
    const auto load_key = [&](int i, uint32_t(&b)[4]) {
      constexpr int kPairs = kKeyTiles / 2;
      load_matrices(b, k_tile + tile_offset<kDim>(i % kPairs * 16 + (lane / 16) * 8 + lane % 8,
                                                  2 * (i / kPairs) + lane / 8 % 2));
    };
    uint32_t a[2][kTiles][4], b[2][4];
    load_query(0, a[0]);
    load_key(0, b[0]);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int n = 0; n < kKeyTiles; n += 2) {
        const int i = (step * kKeyTiles + n) / 2;
        if (n == 0 && step + 1 < kDim / 16) load_query(step + 1, a[(step + 1) % 2]);
        if (i + 1 < kDim / 16 * kKeyTiles / 2) load_key(i + 1, b[(i + 1) % 2]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          mma(s[t][n], a[step % 2][t], b[i % 2][0], b[i % 2][1], tag);
          mma(s[t][n + 1], a[step % 2][t], b[i % 2][2], b[i % 2][3], tag);
        }
      }
    }

    bool mask = key + kBlockK > q_position || (window > 0 && key < key_begin + kBlockQ + kBlockK);
    if constexpr (kLines) mask = key + kBlockK > line.held || line.rows[key + kBlockK - 1] > q_position;
    uint32_t weights[kTiles][kKeyTiles][2];
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
      if (p.a.softcap > 0.0f) {
        const float inverse = p.a.scale / p.a.softcap, cap = p.a.softcap / p.a.scale;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n)
#pragma unroll
          for (int e = 0; e < 4; ++e) s[t][n][e] = cap * tanhf(s[t][n][e] * inverse);
      }
      if (mask) {
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
#pragma unroll
          for (int e = 0; e < 4; ++e) {
            int at = key + n * 8 + lane % 4 * 2 + e % 2;
            const int position = my_first + t * 16 + e / 2 * 8;
            if constexpr (kLines) at = at < line.held ? line.rows[at] : INT_MAX;
            if (at > position || (window > 0 && position - at >= window)) s[t][n][e] = kMinusInfinity;
          }
        }
      }
      float best[2];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        best[r] = kMinusInfinity;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) best[r] = fmaxf(best[r], fmaxf(s[t][n][2 * r], s[t][n][2 * r + 1]));
        best[r] = fmaxf(best[r], __shfl_xor_sync(kAllLanes, best[r], 1));
        best[r] = fmaxf(best[r], __shfl_xor_sync(kAllLanes, best[r], 2));
      }
      // Seldom after the first tiles: sums count from a new maximum.
      if (__any_sync(kAllLanes, best[0] > top[t][0] || best[1] > top[t][1])) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
          const float next = fmaxf(top[t][r], best[r]);
          const float keep = next == kMinusInfinity ? 1.0f : exp2_fast((top[t][r] - next) * scale);
          top[t][r] = next;
          sum[t][r] *= keep;
#pragma unroll
          for (int c = 0; c < kChannelTiles; ++c) out[t][c][2 * r] *= keep, out[t][c][2 * r + 1] *= keep;
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        // Rows without a key so far (windows, rows past the chunk) keep an offset of 0: exp2(-inf) is 0.
        const float offset = top[t][r] == kMinusInfinity ? 0.0f : top[t][r] * scale;
        float total = 0.0f;
#pragma unroll
        for (int n = 0; n < kKeyTiles; ++n) {
          const float x = exp2_fast(s[t][n][2 * r] * scale - offset);
          const float y = exp2_fast(s[t][n][2 * r + 1] * scale - offset);
          total += x + y;
          weights[t][n][r] = pack_pair(x, y, tag);
        }
        sum[t][r] += total;
      }
    }

    await_copies<0>();
    __syncthreads();
    const int next = next_key(key, tile + 1);
    if (next < end()) load_rows(k_tile, keys, next);
    commit_copies();

    const auto load_value = [&](int i, uint32_t(&to)[4]) {
      constexpr int kPairs = kChannelTiles / 2;
      load_matrices_turned(to, v_tile + tile_offset<kDim>(i / kPairs * 16 + lane / 8 % 2 * 8 + lane % 8,
                                                          i % kPairs * 2 + lane / 16));
    };
    load_value(0, b[0]);
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
#pragma unroll
      for (int c = 0; c < kChannelTiles; c += 2) {
        const int i = (step * kChannelTiles + c) / 2;
        if (i + 1 < kBlockK / 16 * kChannelTiles / 2) load_value(i + 1, b[(i + 1) % 2]);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
          const uint32_t w[4] = {weights[t][2 * step][0], weights[t][2 * step][1], weights[t][2 * step + 1][0],
                                 weights[t][2 * step + 1][1]};
          mma(out[t][c], w, b[i % 2][0], b[i % 2][1], tag);
          mma(out[t][c + 1], w, b[i % 2][2], b[i % 2][3], tag);
        }
      }
    }
  }

  if (kAligned && p.pairs != nullptr && threadIdx.x == 0) {
    // Rows before the queries, which all of them see, and among them the earlier ones.
    const int64_t from = max(p.first, p.first + q_first), n = key_end - from;
    const int64_t before = kLines ? line_rows - n : int64_t(listed_blocks - 1) * kBlock + from % kBlock;
    atomicAdd(p.pairs, static_cast<unsigned long long>(before * n + n * (n + 1) / 2));
  }
#pragma unroll
  for (int t = 0; t < kTiles; ++t) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float total = sum[t][r];
      total += __shfl_xor_sync(kAllLanes, total, 1);
      total += __shfl_xor_sync(kAllLanes, total, 2);
      const float inverse = total > 0.0f ? 1.0f / total : 0.0f;
      const int64_t row = my_first - p.first + t * 16 + r * 8;
      if (row < 0 || row >= p.n) continue;
      auto* to = reinterpret_cast<uint32_t*>(p.out + (row * p.a.heads + head) * kDim) + lane % 4;
#pragma unroll
      for (int c = 0; c < kChannelTiles; ++c) {
        to[c * 4] =
            pack_pair(out[t][c][2 * r] * inverse, out[t][c][2 * r + 1] * inverse, static_cast<const __half*>(nullptr));
      }
    }
  }
}

template <class Value, int kDim, int kTiles, int kBlockK, PromptKeys kKeys = PromptKeys::kAll,
          int kBlock = kWarps * kTiles * 16>
Status run(const PromptArgs& p, CardStreamHandle stream) {
  constexpr int kBlockQ = kWarps * kTiles * 16;
  constexpr int kBytes = (kBlockQ + 2 * kBlockK) * kDim * 2 +
                         (kKeys == PromptKeys::kLines ? (LineRows::kCapacity + kWarps) * int(sizeof(int)) : 0);
  const auto kernel = attend_prompt_kernel<Value, kDim, kTiles, kBlockK, kKeys, kBlock>;
  LONGKV_TRY(
      cuda_status(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes), "attend_prompt"));
  static_assert(kKeys == PromptKeys::kAll || (kBlock % kBlockQ == 0 && kBlock % kBlockK == 0));
  static_assert(kKeys != PromptKeys::kLines || (kBlockQ == 64 && 2 * kBlockK <= kWarps * 32));
  const int64_t blocks =
      kKeys == PromptKeys::kAll ? (p.n + kBlockQ - 1) / kBlockQ : prompt_blocks(p.first, p.n, kBlockQ);
  const dim3 grid(unsigned(p.heads.ids != nullptr ? p.heads.count : p.a.heads), unsigned(blocks));
  kernel<<<grid, kWarps * 32, kBytes, stream>>>(p);
  return launched("attend_prompt");
}

template <class Value>
Status run(const PromptArgs& p, CardStreamHandle stream) {
  switch (p.a.kv.dim) {
    case 64: return run<Value, 64, 2, 64>(p, stream);
    case 96: return run<Value, 96, 2, 64>(p, stream);
    case 128: return run<Value, 128, 2, 64>(p, stream);
    case 256: return run<Value, 256, 1, 32>(p, stream);
    default: return Status(Code::kInternal, "attend_prompt: head dimension");
  }
}

// Blocks of queries of 64, or of 128 where the lists' blocks are.
template <PromptKeys kKeys, int kBlock>
Status run_sparse(const PromptArgs& p, CardStreamHandle stream) {
  if (p.a.kv.type != KvType::kF16 || p.a.window > 0)
    return Status(Code::kInternal, "sparse reading of prompts wants f16 rows without a window");
  constexpr int kTiles = kBlock / 64;
  switch (p.a.kv.dim) {
    case 64: return run<__half, 64, kTiles, 64, kKeys, kBlock>(p, stream);
    case 96: return run<__half, 96, kTiles, 64, kKeys, kBlock>(p, stream);
    case 128: return run<__half, 128, kTiles, 64, kKeys, kBlock>(p, stream);
    case 256: return run<__half, 256, 1, 32, kKeys, kBlock>(p, stream);
    default: return Status(Code::kInternal, "attend_prompt_listed: head dimension");
  }
}

}  // namespace

Status attend_prompt(const AttendArgs& a, int64_t first, int64_t n, half_t* out, CardStreamHandle stream) {
  const PromptArgs p{a, first, n, out, {}, {}, {}, nullptr};
  if (a.kv.type == KvType::kF16) return run<__half>(p, stream);
  if (a.kv.type == KvType::kBf16) return run<__nv_bfloat16>(p, stream);
  return Status(Code::kInternal, "attend_prompt reads f16 and bf16 rows only");
}

Status attend_prompt_listed(const AttendArgs& a, const PromptLists& lists, int64_t first, int64_t n, half_t* out,
                            unsigned long long* pairs, CardStreamHandle stream) {
  if (n <= 0 || (lists.heads.ids != nullptr && lists.heads.count == 0)) return {};
  const PromptArgs p{a, first, n, out, lists, {}, lists.heads, pairs};
  if (lists.block == 64) return run_sparse<PromptKeys::kBlocks, 64>(p, stream);
  if (lists.block == 128) return run_sparse<PromptKeys::kBlocks, 128>(p, stream);
  return Status(Code::kInternal, "attend_prompt_listed: blocks");
}

Status attend_prompt_lines(const AttendArgs& a, const PromptHeads& heads, const PromptLines& lines, int64_t first,
                           int64_t n, half_t* out, unsigned long long* pairs, CardStreamHandle stream) {
  if (n <= 0 || heads.count == 0) return {};
  const PromptArgs p{a, first, n, out, {}, lines, heads, pairs};
  return run_sparse<PromptKeys::kLines, 64>(p, stream);
}

}  // namespace longkv::card
