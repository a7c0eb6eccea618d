// The keep stage of a session: rows that leave for ever, at the end of a prompt and while decoding.
#include <algorithm>

#include "base/error.h"
#include "kv/session_impl.h"

namespace longkv {

// Layers with a sliding window already hold little and count rows by position: eviction leaves them alone.
bool KvSession::evicts(int layer) const { return impl_->keeper != nullptr && cache_.shape().window_of(layer) == 0; }

Status KvSession::evict(int layer) {
  Impl& impl = *impl_;
  load_views(layer);
  KeepInput input;
  input.layer = layer;
  input.layers = cache_.shape().layers;
  input.heads = impl.views;
  input.tokens = cache_.tokens(layer).v;
  input.group_size = cache_.shape().group_size;
  input.params = impl.params;
  input.rotate = &impl.rotate;
  input.pool = &impl.pool;
  impl.collector->give(layer, input);

  KeepChoice choice;
  choice.rows.resize(size_t(cache_.shape().kv_heads));
  LONGKV_TRY(impl.keeper->choose(input, choice));
  merge_rows(layer, choice);
  LONGKV_TRY(cache_.compact(layer, choice.rows, impl.pool));
  impl.keeper->moved(input, choice, cache_);
  load_views(layer);
  impl.selector->rebuild(layer, impl.views, choice.rows, input.mass, input.mass_stride, impl.pool);
  impl.collector->drop(layer);
  return {};
}

// Before the rows move: kept rows take up those that are folded into them.
void KvSession::merge_rows(int layer, const KeepChoice& choice) {
  if (choice.merges.empty()) return;
  const KvShape& shape = cache_.shape();
  impl_->pool.run(shape.kv_heads, [&](int64_t h, int) {
    const int head = int(h);
    std::vector<float> k(size_t(shape.dim_k) * 2), v(size_t(shape.dim_v) * 2);
    for (const RowMerge& merge : choice.merges[size_t(h)]) {
      cache_.read_row(layer, head, merge.into, k.data(), v.data());
      cache_.read_row(layer, head, merge.from, k.data() + shape.dim_k, v.data() + shape.dim_v);
      for (int c = 0; c < shape.dim_k; ++c) {
        k[size_t(c)] = merge.k_share * k[size_t(c)] + (1.0f - merge.k_share) * k[size_t(shape.dim_k + c)];
      }
      for (int c = 0; c < shape.dim_v; ++c) {
        v[size_t(c)] = merge.v_share * v[size_t(c)] + (1.0f - merge.v_share) * v[size_t(shape.dim_v + c)];
      }
      cache_.write_row(layer, head, merge.into, k.data(), v.data());
      cache_.write_fields(layer, head, merge.into, merge.pos, merge.bias, merge.count);
    }
  });
}

// Decoding: each head may drop one row.
void KvSession::evict_one(int layer, const float* q, KeepStep when) {
  Impl& impl = *impl_;
  if (impl.keep_needs.step != when || !evicts(layer)) return;
  KeepStepInput input;
  input.layer = layer;
  input.cache = &cache_;
  input.q = q;
  if (when == KeepStep::kAfterAttention) input.lse = impl.lse;
  input.params = impl.params;
  input.rotate = &impl.rotate;
  input.pool = &impl.pool;
  std::fill(impl.evicted.begin(), impl.evicted.end(), -1);
  impl.keeper->step(input, impl.evicted);
  for (int h = 0; h < cache_.shape().kv_heads; ++h) {
    const int64_t row = impl.evicted[size_t(h)];
    if (row >= 0) cache_.replace_with_last(layer, h, row);
  }
}

std::vector<int64_t> KvSession::kept_positions(int layer, int kv_head) const {
  const KvHeadView head = cache_.view(layer, kv_head);
  std::vector<int64_t> positions;
  for (int64_t r = head.first_row; r < head.rows; ++r) positions.push_back(head.pos != nullptr ? head.pos[r] : r);
  return positions;
}

}  // namespace longkv
