#include "kv/store_spec.h"

#include <algorithm>

namespace longkv {

StoreRegions store_regions(const StoreSpec& store, const MaskSpec& mask) {
  StoreRegions regions;
  regions.old = {store.k, store.v};
  regions.on = store.window > 0 || store.sink > 0 || kv_type_blocked(store.k) || kv_type_blocked(store.v) ||
               mask.kind != MaskKind::kNone;
  // What is not encoded is held alike everywhere.
  const auto raw = [&](KvType type) { return kv_type_scaled(type) || kv_type_blocked(type) ? KvType::kF16 : type; };
  regions.raw = regions.on ? KvTypes{raw(store.k), raw(store.v)} : regions.old;
  regions.sink = std::max(store.sink, mask.sink);
  regions.window = std::max(store.window, mask.window);
  return regions;
}

}  // namespace longkv
