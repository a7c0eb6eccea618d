#include "kv/index/index.h"

#include <numeric>

#include "base/checked.h"
#include "base/error.h"
#include "kv/index/kinds.h"

namespace longkv {

int64_t BlockIndex::paged_tiles(int64_t tiles, int64_t tile_bytes) {
  return round_up(tiles, kStatePage / std::gcd(kStatePage, tile_bytes));
}

Result<std::unique_ptr<BlockIndex>> make_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity_rows) {
  if (spec.block < 1 || spec.coarse < 0 || capacity_rows < 1) {
    return fail(Code::kInvalidArgument,
                "index: block={}, coarse={}, capacity of {} rows; block and capacity must be at "
                "least 1, coarse at least 0",
                spec.block, spec.coarse, capacity_rows);
  }
  const bool has_reps =
      spec.kind == IndexKind::kFixed || spec.kind == IndexKind::kDynamic || spec.kind == IndexKind::kRepr;
  if (has_reps && (spec.reps < 1 || spec.reps > spec.block)) {
    return fail(Code::kInvalidArgument, "index: reps={} with block={}; use 1 to {} representatives", spec.reps,
                spec.block, spec.block);
  }
  switch (spec.kind) {
    case IndexKind::kMean: return make_mean_index(spec, shape, capacity_rows);
    case IndexKind::kMax: return make_max_index(spec, shape, capacity_rows);
    case IndexKind::kMinMax: return make_minmax_index(spec, shape, capacity_rows);
    case IndexKind::kFixed: return make_fixed_index(spec, shape, capacity_rows);
    case IndexKind::kDynamic: return make_dynamic_index(spec, shape, capacity_rows);
    case IndexKind::kBits:
    case IndexKind::kLabels: return make_bits_index(spec, shape, capacity_rows);
    case IndexKind::kMeanDev: return make_meandev_index(spec, shape, capacity_rows);
    case IndexKind::kCuboid: return make_cuboid_index(spec, shape, capacity_rows);
    case IndexKind::kRepr: return make_repr_index(spec, shape, capacity_rows);
    case IndexKind::kChannels: return make_channels_index(spec, shape, capacity_rows);
    case IndexKind::kLsh: return make_lsh_index(spec, shape, capacity_rows);
    case IndexKind::kClusters: return make_cluster_index(spec, shape, capacity_rows);
    case IndexKind::kNone: break;
  }
  return fail(Code::kInvalidArgument,
              "choosing rows needs an index; use index=minmax, bits, mean, max, fixed, dynamic, meandev, cuboid, repr, "
              "channels, labels, lsh or clusters");
}

}  // namespace longkv
