#include "kv/select/coarse.h"

#include <algorithm>

#include "base/checked.h"
#include "kv/index/bits_layout.h"

namespace longkv {

int64_t summary_bytes(const IndexSpec& spec, int dim) {
  const int64_t vector = 2 * int64_t(dim);
  switch (spec.kind) {
    case IndexKind::kNone: return 0;
    case IndexKind::kMean:
    case IndexKind::kMax: return vector;
    case IndexKind::kMinMax: return 2 * vector;
    case IndexKind::kFixed:
    case IndexKind::kDynamic: return spec.reps * vector;
    case IndexKind::kBits: return spec.block * bits_token_bytes(dim);
  }
  return 0;
}

IndexSpec coarse_spec(const IndexSpec& spec, int64_t factor) {
  IndexSpec coarse = spec;
  coarse.block = spec.block * factor;
  coarse.coarse = 1;
  if (spec.kind == IndexKind::kBits) coarse.kind = IndexKind::kMinMax;
  return coarse;
}

int64_t choose_coarse_factor(const IndexSpec& spec, const KvShape& shape, int64_t capacity_rows,
                             int64_t attention_bytes) {
  if (spec.coarse > 0) return spec.coarse;
  const int64_t blocks = ceil_div(capacity_rows, spec.block);
  if (blocks * summary_bytes(spec, shape.dim_k) <= attention_bytes) return 1;
  int64_t factor = 4;
  while (factor < blocks &&
         ceil_div(blocks, factor) * summary_bytes(coarse_spec(spec, factor), shape.dim_k) > attention_bytes / 2) {
    factor *= 2;
  }
  return factor;
}

}  // namespace longkv
