// The store and mask stages of a session: rotation of what comes in and out, and old rows that are encoded.
#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "kv/codec/rotate.h"
#include "kv/layout.h"
#include "kv/mask/identity.h"
#include "kv/mask/leank.h"
#include "kv/region_spec.h"
#include "kv/session_impl.h"

namespace longkv {

namespace {

Status check_rotation(const char* what, KvType type, int dim) {
  if (rotation_block(dim) >= kMinRotation) return {};
  return fail(
      Code::kInvalidArgument,
      "{} rows of {} channels ({}) have no Hadamard block: the largest power of two in {} is {}, at least {} is "
      "needed; nearest legal: the same store without rotate",
      what, dim, kv_type_name(type), dim, rotation_block(dim), kMinRotation);
}

// Rotated copies of rows; pointers are exchanged for those of the copies.
void exchange(std::vector<float>& to, const float*& from, int64_t rows, int64_t dim) {
  if (int64_t(to.size()) < rows * dim) to.resize(size_t(rows * dim));
  rotate_rows(from, dim, rows, dim, to.data(), dim);
  from = to.data();
}

}  // namespace

Result<std::optional<RegionSpec>> region_spec(const KvShape& shape, const Recipe& recipe, const std::string& model,
                                              bool capped) {
  if (recipe.store.rotates_k()) LONGKV_TRY(check_rotation("K", recipe.store.k, shape.dim_k));
  if (recipe.store.rotates_v()) LONGKV_TRY(check_rotation("V", recipe.store.v, shape.dim_v));
  const StoreRegions regions = store_regions(recipe.store, recipe.mask);
  if (!regions.on) return std::optional<RegionSpec>();
  RegionSpec spec;
  spec.k = regions.old.k;
  spec.v = regions.old.v;
  spec.sink = regions.sink;
  spec.window = regions.window;
  spec.compensate = recipe.mask.mean == MaskSpec::Mean::kOn;
  if (recipe.mask.kind == MaskKind::kLeank) {
    LONGKV_ASSIGN(LeankMask mask, load_leank(recipe.mask.mask, shape));
    if (const std::string differs = identity_difference(mask.model, model); !differs.empty()) {
      return fail(Code::kInvalidArgument, "{}: the channel mask {}", recipe.mask.mask, differs);
    }
    if (mask.window > regions.window || mask.sink > regions.sink) {
      LONGKV_TRY(
          notice(fmt::format("{}: learned with sink={} and window={}, used with {} and {}: rows inside them lose "
                             "channels that the mask was "
                             "not trained to drop",
                             recipe.mask.mask, mask.sink, mask.window, regions.sink, regions.window)));
    }
    spec.masks = std::move(mask.heads);
    if (recipe.mask.mean == MaskSpec::Mean::kLearned) spec.compensate = mask.compensate;
    if (recipe.mask.removed != MaskSpec::Removed::kLearned) {
      const auto as = RemovedAs(int(recipe.mask.removed) - int(MaskSpec::Removed::kMean));
      for (HeadMask& head : spec.masks) head.removed = as;
    }
  } else if (recipe.mask.kind == MaskKind::kThink) {
    // Which channels is known at the end of the prompt; how many now.
    const int64_t kept = think_kept(shape.dim_k, recipe.mask.ratio, think_step(spec.k, shape.dim_k));
    HeadMask first;
    for (int64_t c = 0; c < kept; ++c) first.channels.push_back(uint16_t(c));
    spec.masks.assign(size_t(shape.layers) * size_t(shape.kv_heads), first);
  }
  if (spec.compensate && capped) {
    return fail(Code::kUnsupported,
                "this model caps attention scores, to which the mean of what keys lost cannot be added; nearest legal: "
                "mean=off");
  }
  return std::optional<RegionSpec>(std::move(spec));
}

Result<std::optional<RegionStore>> make_regions(const KvShape& shape, const Recipe& recipe, RowCapacity capacity,
                                                const std::string& model, bool capped) {
  LONGKV_ASSIGN(std::optional<RegionSpec> spec, region_spec(shape, recipe, model, capped));
  if (!spec) return std::optional<RegionStore>();
  LONGKV_ASSIGN(RegionStore store, RegionStore::create(shape, *std::move(spec), capacity));
  return std::optional<RegionStore>(std::move(store));
}

void KvSession::Impl::Rotation::enter_rows(const StoreSpec& spec, const KvShape& shape, int64_t n, const float*& k,
                                           const float*& v) {
  if (spec.rotates_k()) exchange(k_rows, k, n * shape.kv_heads, shape.dim_k);
  if (spec.rotates_v()) exchange(v_rows, v, n * shape.kv_heads, shape.dim_v);
}

void KvSession::Impl::Rotation::enter(const StoreSpec& spec, const KvShape& shape, int64_t n, const float*& q,
                                      const float*& k, const float*& v) {
  q_came = q;
  if (spec.rotates_k()) exchange(q_rows, q, n * shape.kv_heads * shape.group_size, shape.dim_k);
  enter_rows(spec, shape, n, k, v);
}

void KvSession::Impl::Rotation::leave(const StoreSpec& spec, const KvShape& shape, int64_t n, float* out) {
  if (!spec.rotates_v()) return;
  rotate_rows(out, shape.dim_v, n * shape.kv_heads * shape.group_size, shape.dim_v, out, shape.dim_v);
}

// What think's masks are chosen by: the prompt's last queries, as they came.
void KvSession::note_queries(int layer, const float* q, int64_t n, int64_t prompt_end) {
  if (!impl_->think) return;
  const KvShape& shape = cache_.shape();
  const int64_t first = cache_.tokens(layer).v, from = std::max(first, prompt_end - recipe_.mask.queries);
  const int64_t width = int64_t(shape.kv_heads) * shape.group_size * shape.dim_k;
  if (from < first + n) impl_->think->add(layer, q + (from - first) * width, first + n - from);
}

void KvSession::Impl::Rotation::leave(const StoreSpec& spec, const KvShape& shape, const float* out,
                                      std::vector<float>& copy) {
  copy.clear();
  if (!spec.rotates_v()) return;
  copy.assign(out, out + int64_t(shape.kv_heads) * shape.group_size * shape.dim_v);
  leave(spec, shape, 1, copy.data());
}

Status KvSession::decode(int layer, const float* q, const float* k, const float* v, float* out) {
  Impl& impl = *impl_;
  impl.rotation.enter(recipe_.store, cache_.shape(), 1, q, k, v);
  if (probing_) {
    LONGKV_TRY(decode_probe(layer, q, k, v, out));
  } else {
    LONGKV_TRY(decode_rows(layer, q, k, v, out));
    cache_.encode_old(layer, impl.pool);
  }
  impl.rotation.leave(recipe_.store, cache_.shape(), 1, out);
  return {};
}

// At a prompt's end: think's masks, which stay for later prompts of the sequence, and everything old is encoded.
Status KvSession::store_prompt(int layer) {
  RegionStore* regions = cache_.regions();
  if (regions == nullptr || !regions->active(layer)) return {};
  Impl& impl = *impl_;
  if (impl.think && regions->middle(layer, 0) == nullptr) {
    const int64_t kept = regions->kept_channels(layer, 0);
    std::vector<HeadMask> masks(impl.views.size());
    impl.pool.run(int64_t(masks.size()), [&](int64_t h, int) {
      masks[size_t(h)] = impl.think->mask(layer, int(h), impl.views[size_t(h)], kept);
    });
    for (size_t h = 0; h < masks.size(); ++h) LONGKV_TRY(regions->set_mask(layer, int(h), std::move(masks[h])));
  }
  if (impl.think) impl.think->reset(layer);
  cache_.encode_old(layer, impl.pool);
  return {};
}

// Bytes of a head's rows in ascending ranges.
int64_t KvSession::bytes_of(int layer, int kv_head, std::span<const RowRange> ranges) const {
  const KvShape& shape = cache_.shape();
  const KvTypes types = cache_.types();
  const int64_t row = kv_row_bytes(types.k, shape.dim_k) + kv_row_bytes(types.v, shape.dim_v);
  const KvMiddle* middle = impl_->views[size_t(kv_head)].middle;
  int64_t bytes = 0;
  for (const RowRange& r : ranges) {
    bytes += count_of(r) * row;
    if (middle == nullptr) continue;
    const RowRange inside{std::max(r.begin, middle->begin), std::min(r.end, middle->end)};
    bytes += cache_.regions()->head_bytes(layer, kv_head, count_of(inside)) - count_of(inside) * row;
  }
  return bytes;
}

}  // namespace longkv
