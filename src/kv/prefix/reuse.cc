#include "kv/prefix/reuse.h"

#include <algorithm>

namespace longkv {

PrefixReuse prefix_reuse(const Recipe& recipe) {
  PrefixReuse reuse;
  reuse.any_length = !recipe.keep.evicts() && recipe.prefill.kind == PrefillKind::kDense &&
                     !store_regions(recipe.store, recipe.mask).on;
  if (!reuse.any_length || recipe.select.all) return reuse;
  const IndexKind kind = recipe.index.kind;
  const bool by_queries = kind == IndexKind::kDynamic || kind == IndexKind::kRepr || kind == IndexKind::kLabels ||
                          recipe.select.preselect > 0;
  reuse.rebuild = by_queries || kind == IndexKind::kLsh || kind == IndexKind::kClusters;
  if (by_queries) reuse.unread = std::max<int64_t>(1, recipe.select.preselect_queries);
  return reuse;
}

}  // namespace longkv
