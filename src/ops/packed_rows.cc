#include "ops/packed_rows.h"

#include <algorithm>
#include <cstring>

#include "base/checked.h"
#include "base/cpu.h"
#include "quant/block_formats.h"

namespace longkv {

namespace {

// Bit k of byte c of the result is bit 4 k + c of `bits`.
uint32_t gather_fifth_bits(uint32_t bits) {
  uint32_t out = 0;
  for (int c = 0; c < 4; ++c) {
    uint32_t t = (bits >> c) & 0x11111111u;
    t = (t | t >> 3) & 0x03030303u;
    t = (t | t >> 6) & 0x000f000fu;
    t = (t | t >> 12) & 0xffu;
    out |= t << (8 * c);
  }
  return out;
}

// Row `r` of a group; `out` is the group's first byte.
template <class Block>
void pack_row(const uint8_t* row, int64_t blocks, int r, uint8_t* out) {
  for (int64_t b = 0; b < blocks; ++b, out += kPackedRows * int64_t(sizeof(Block))) {
    Block block;
    std::memcpy(&block, row + b * int64_t(sizeof(Block)), sizeof(Block));
    uint8_t* at = out;
    std::memcpy(at + 2 * r, &block.d, 2);
    at += 2 * kPackedRows;
    if constexpr (requires { block.m; }) {
      std::memcpy(at + 2 * r, &block.m, 2);
      at += 2 * kPackedRows;
    }
    for (int j = 0; j < 4; ++j, at += 4 * kPackedRows) std::memcpy(at + 4 * r, block.qs + 4 * j, 4);
    if constexpr (requires { block.qh; }) {
      uint32_t bits;
      std::memcpy(&bits, block.qh, 4);
      bits = gather_fifth_bits(bits);
      std::memcpy(at + 4 * r, &bits, 4);
    }
  }
}

// The inverse of gather_fifth_bits().
uint32_t scatter_fifth_bits(uint32_t bytes) {
  uint32_t out = 0;
  for (int c = 0; c < 4; ++c) {
    uint32_t t = (bytes >> (8 * c)) & 0xffu;
    t = (t | t << 12) & 0x000f000fu;
    t = (t | t << 6) & 0x03030303u;
    t = (t | t << 3) & 0x11111111u;
    out |= t << c;
  }
  return out;
}

// The inverse of pack_row().
template <class Block>
void unpack_row(const uint8_t* group, int64_t blocks, int r, uint8_t* row) {
  for (int64_t b = 0; b < blocks; ++b, group += kPackedRows * int64_t(sizeof(Block))) {
    Block block;
    const uint8_t* at = group;
    std::memcpy(&block.d, at + 2 * r, 2);
    at += 2 * kPackedRows;
    if constexpr (requires { block.m; }) {
      std::memcpy(&block.m, at + 2 * r, 2);
      at += 2 * kPackedRows;
    }
    for (int j = 0; j < 4; ++j, at += 4 * kPackedRows) std::memcpy(block.qs + 4 * j, at + 4 * r, 4);
    if constexpr (requires { block.qh; }) {
      uint32_t bits;
      std::memcpy(&bits, at + 4 * r, 4);
      bits = scatter_fifth_bits(bits);
      std::memcpy(block.qh, &bits, 4);
    }
    std::memcpy(row + b * int64_t(sizeof(Block)), &block, sizeof(Block));
  }
}

template <class Block>
void unpack_some(const Weight& w, int64_t first, int64_t n, uint8_t* out) {
  for (int64_t row = first; row < first + n; ++row, out += w.row_bytes) {
    const int r = int(row % kPackedRows);
    unpack_row<Block>(w.packed + (row - r) * w.row_bytes, w.cols / kSmallBlock, r, out);
  }
}

template <class Block>
void pack_all(const Weight& w, uint8_t* out, ThreadPool& pool) {
  constexpr int64_t kGroupsPerTask = 8;
  const int64_t groups = ceil_div(w.rows, kPackedRows), blocks = w.cols / kSmallBlock;
  pool.run(ceil_div(groups, kGroupsPerTask), [&](int64_t task, int) {
    const int64_t first = task * kGroupsPerTask * kPackedRows;
    const int64_t last = std::min(w.rows, first + kGroupsPerTask * kPackedRows);
    for (int64_t row = first; row < last; ++row) {
      const int r = int(row % kPackedRows);
      pack_row<Block>(w.row(row), blocks, r, out + (row - r) * w.row_bytes);
    }
  });
}

}  // namespace

bool reads_packed(TensorType type) {
#if defined(__x86_64__)
  if (active_isa() < IsaLevel::kAvx2) return false;
  return type == TensorType::kQ4_0 || type == TensorType::kQ4_1 || type == TensorType::kQ5_0 ||
         type == TensorType::kQ5_1;
#else
  (void)type;
  return false;
#endif
}

int64_t packed_bytes(const Weight& w) { return ceil_div(w.rows, kPackedRows) * kPackedRows * w.row_bytes; }

void pack_rows(const Weight& w, uint8_t* out, ThreadPool& pool) {
  switch (w.type) {
    case TensorType::kQ4_0: return pack_all<BlockQ4_0>(w, out, pool);
    case TensorType::kQ4_1: return pack_all<BlockQ4_1>(w, out, pool);
    case TensorType::kQ5_0: return pack_all<BlockQ5_0>(w, out, pool);
    case TensorType::kQ5_1: return pack_all<BlockQ5_1>(w, out, pool);
    default: return;  // reads_packed() is false for it
  }
}

void unpack_rows(const Weight& w, int64_t first, int64_t n, uint8_t* out) {
  switch (w.type) {
    case TensorType::kQ4_0: return unpack_some<BlockQ4_0>(w, first, n, out);
    case TensorType::kQ4_1: return unpack_some<BlockQ4_1>(w, first, n, out);
    case TensorType::kQ5_0: return unpack_some<BlockQ5_0>(w, first, n, out);
    case TensorType::kQ5_1: return unpack_some<BlockQ5_1>(w, first, n, out);
    default: return;  // never packed
  }
}

}  // namespace longkv
