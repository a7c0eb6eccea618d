// Sizes that belong to the published patterns of sparse reading, the same on the CPU and on a card.
#pragma once

#include <cstdint>

namespace longkv {

// MInference (arXiv 2407.02490), vertical_slash: a chunk's last queries, whose mass chooses; columns and distances that
// are always attended, and the fewest of each. block_sparse: rows of a block.
constexpr int kSlashQueries = 64;
constexpr int64_t kForcedColumns = 30, kForcedDistances = 100, kMinColumns = 30, kMinDistances = 50;
constexpr int kPooledBlock = 64;

// XAttention (arXiv 2503.16428): rows of a block.
constexpr int kShareBlock = 128;

}  // namespace longkv
