#include "kv/plan_store.h"

#include <algorithm>

#include "base/checked.h"
#include "base/error.h"
#include "kv/mask/leank.h"
#include "kv/mask/think.h"
#include "kv/region_store.h"

namespace longkv {

namespace {

// Rows that are encoded of `rows`.
int64_t old_rows(const StoreRegions& regions, bool windowed, int64_t rows) {
  if (!regions.on || windowed) return 0;
  const int64_t old = rows - regions.sink - regions.window;
  return old > 0 ? old / RegionStore::kStep * RegionStore::kStep : 0;
}

StoreBytes bytes_of(const KvShape& shape, const StoreRegions& regions, const std::vector<int>& kept, int layer,
                    int64_t raw, int64_t old, int64_t page) {
  StoreBytes bytes;
  for (int h = 0; h < shape.kv_heads; ++h) {
    const int dim = kept.empty() ? shape.dim_k : kept[size_t(layer) * size_t(shape.kv_heads) + size_t(h)];
    bytes.k += round_up(raw * kv_row_bytes(regions.raw.k, shape.dim_k), page);
    bytes.v += round_up(raw * kv_row_bytes(regions.raw.v, shape.dim_v), page);
    if (dim == 0) continue;
    bytes.k += round_up(old * kv_row_bytes(regions.old.k, dim), page);
    bytes.v += round_up(old * kv_row_bytes(regions.old.v, shape.dim_v), page);
  }
  return bytes;
}

}  // namespace

Result<std::vector<int>> kept_channels(const KvShape& shape, const Recipe& recipe) {
  std::vector<int> kept;
  if (recipe.mask.kind == MaskKind::kLeank) {
    LONGKV_ASSIGN(const LeankMask mask, load_leank(recipe.mask.mask, shape));
    for (const HeadMask& head : mask.heads) kept.push_back(int(head.kept(shape.dim_k)));
  } else if (recipe.mask.kind == MaskKind::kThink) {
    kept.assign(size_t(shape.layers) * size_t(shape.kv_heads),
                int(think_kept(shape.dim_k, recipe.mask.ratio, think_step(recipe.store.k, shape.dim_k))));
  }
  return kept;
}

StoreBytes stored_bytes(const KvShape& shape, const Recipe& recipe, const std::vector<int>& kept, int layer,
                        bool windowed, int64_t rows, int64_t page) {
  const StoreRegions regions = store_regions(recipe.store, recipe.mask);
  const int64_t old = old_rows(regions, windowed, rows);
  return bytes_of(shape, regions, kept, layer, rows - old, old, page);
}

int64_t attended_bytes(const KvShape& shape, const Recipe& recipe, const std::vector<int>& kept, int layer,
                       bool windowed, int64_t rows, int64_t attended) {
  const StoreRegions regions = store_regions(recipe.store, recipe.mask);
  const int64_t raw = std::min(attended, rows - old_rows(regions, windowed, rows));
  const StoreBytes bytes = bytes_of(shape, regions, kept, layer, raw, attended - raw, 1);
  return bytes.k + bytes.v;
}

int64_t raw_prompt_bytes(const KvShape& shape, const Recipe& recipe, int64_t rows) {
  const StoreRegions regions = store_regions(recipe.store, recipe.mask);
  const int64_t row = kv_row_bytes(regions.raw.k, shape.dim_k) + kv_row_bytes(regions.raw.v, shape.dim_v);
  return old_rows(regions, false, rows) * row * shape.kv_heads;
}

}  // namespace longkv
