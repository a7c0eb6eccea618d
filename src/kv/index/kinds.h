// The kinds of index; make_index is the only caller. Each one lives in its own file.
#pragma once

#include <memory>

#include "kv/index/index.h"

namespace longkv {

Result<std::unique_ptr<BlockIndex>> make_mean_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_max_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_minmax_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_fixed_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_dynamic_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_bits_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_meandev_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_cuboid_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_repr_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_channels_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_lsh_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);
Result<std::unique_ptr<BlockIndex>> make_cluster_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity);

// Reserves storage for `capacity` rows and hands the index over.
template <class Index>
Result<std::unique_ptr<BlockIndex>> reserved(std::unique_ptr<Index> index, int64_t capacity) {
  LONGKV_TRY(index->reserve(capacity));
  return std::unique_ptr<BlockIndex>(std::move(index));
}

}  // namespace longkv
