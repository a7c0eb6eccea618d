#include "kv/select/coarse.h"

#include <algorithm>

#include "base/checked.h"
#include "kv/index/bits_layout.h"

namespace longkv {

int64_t summary_bytes(const IndexSpec& spec, const KvShape& shape) {
  const int64_t dim = shape.dim_k, vector = 2 * dim;
  switch (spec.kind) {
    case IndexKind::kNone: return 0;
    case IndexKind::kMean:
    case IndexKind::kMax: return vector;
    case IndexKind::kMinMax:
    case IndexKind::kMeanDev:
    case IndexKind::kCuboid: return spec.eight ? 2 * dim + 8 : 2 * vector;
    case IndexKind::kFixed:
    case IndexKind::kDynamic: return spec.reps * vector;
    case IndexKind::kRepr: return shape.group_size * vector;
    case IndexKind::kBits: return spec.block * bits_token_bytes(dim << spec.width);
    case IndexKind::kChannels: return 2 * std::min<int64_t>(spec.channels, dim);
    case IndexKind::kLabels: return bits_token_bytes(std::min<int64_t>(spec.channels, dim) << 2);
    case IndexKind::kLsh: return spec.tables * (4 + (8192 >> spec.hash_bits) * 2) / 8192;  // of one draw
    case IndexKind::kClusters: return 4 * dim;
  }
  return 0;
}

int64_t summary_bytes_held(const IndexSpec& spec, const KvShape& shape, int64_t rows) {
  const int64_t blocks = ceil_div(rows, spec.block);
  switch (spec.kind) {
    case IndexKind::kChannels: return rows * 2 * shape.dim_k;
    case IndexKind::kLsh: {  // codes of the open segment; sorted rows and bucket bounds of the others
      const int64_t segment = 8192, full = rows / segment;
      return spec.tables * 2 * (segment + full * (segment + (int64_t{1} << spec.hash_bits) + 1));
    }
    case IndexKind::kClusters: return rows / spec.cluster * (4 * (shape.dim_k + shape.dim_v) + 8) + rows * 4;
    default: return blocks * summary_bytes(spec, shape);
  }
}

namespace {
bool reads_every_token(IndexKind kind) {
  return kind == IndexKind::kBits || kind == IndexKind::kChannels || kind == IndexKind::kLabels;
}
}  // namespace

IndexSpec four_bit_spec() { return {.kind = IndexKind::kBits, .block = 1, .width = 2, .unbiased = false, .coarse = 1}; }

IndexSpec coarse_spec(const IndexSpec& spec, int64_t factor) {
  IndexSpec coarse = spec;
  coarse.block = spec.block * factor;
  coarse.coarse = 1;
  if (reads_every_token(spec.kind)) coarse.kind = IndexKind::kMinMax;
  return coarse;
}

int64_t index_limit(const IndexSpec& spec, const KvShape& shape, int64_t attention_bytes) {
  if (!spec.eight) return attention_bytes;
  IndexSpec halves = spec;
  halves.eight = false;
  return attention_bytes * summary_bytes(spec, shape) / std::max<int64_t>(1, summary_bytes(halves, shape));
}

int64_t choose_coarse_factor(const IndexSpec& spec, const KvShape& shape, int64_t capacity_rows, int64_t limit) {
  if (spec.kind == IndexKind::kLsh || spec.kind == IndexKind::kClusters) return 1;
  if (spec.coarse > 0) return spec.coarse;
  if (reads_every_token(spec.kind)) return 1;
  const int64_t blocks = ceil_div(capacity_rows, spec.block);
  if (blocks * summary_bytes(spec, shape) <= limit) return 1;
  int64_t factor = 4;
  while (factor < blocks && ceil_div(blocks, factor) * summary_bytes(coarse_spec(spec, factor), shape) > limit / 2) {
    factor *= 2;
  }
  return factor;
}

}  // namespace longkv
