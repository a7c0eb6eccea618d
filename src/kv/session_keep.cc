// The keep stage of a session: rows that leave for ever, at the end of a prompt and while decoding.
#include <algorithm>
#include <unordered_map>

#include "base/error.h"
#include "kv/session_impl.h"

namespace longkv {

// Layers with a sliding window already hold little and count rows by position: eviction leaves them alone.
bool KvSession::evicts(int layer) const { return impl_->keeper != nullptr && cache_.shape().window_of(layer) == 0; }

// Where the queries end that a keeper looks at, in the chunk just appended.
int64_t KvSession::keep_end(int layer, int64_t prompt_end) const {
  return impl_->keep_needs.every_chunk ? cache_.tokens(layer).v : prompt_end;
}

// last: the prompt is complete.
Status KvSession::evict(int layer, bool last) {
  Impl& impl = *impl_;
  cache_.decode_old(layer, 0, impl.pool);  // of an earlier prompt: encoded rows cannot move
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
  input.last = last;
  if (!impl.scores.empty() && impl.scores[size_t(layer)].rows > 0) input.score = &impl.scores[size_t(layer)];
  impl.collector->give(layer, input);

  KeepChoice choice;
  choice.rows.resize(size_t(cache_.shape().kv_heads));
  LONGKV_TRY(impl.keeper->choose(input, choice));
  merge_rows(layer, choice);
  LONGKV_TRY(cache_.compact(layer, choice.rows, impl.pool));
  place_rows(layer, choice);
  impl.keeper->moved(input, choice, cache_);
  if (last) {
    load_views(layer);
    impl.selector->rebuild(layer, impl.views, choice.rows, input.mass, input.mass_stride, impl.pool);
  }
  impl.collector->drop(layer);
  if (!impl.scores.empty()) impl.scores[size_t(layer)] = KeepScore{};
  return {};
}

KeepScoring KvSession::scoring() const { return impl_->keep_needs.scoring; }

KeepScoring KvSession::scoring(int64_t prompt_end) const {
  return prompt_end > impl_->keep_needs.scored_above ? impl_->keep_needs.scoring : KeepScoring::kNone;
}

// Rows of an earlier prompt come back as the cache's own: they move soon.
void KvSession::prepare_scores() {
  for (int layer = 0; layer < cache_.shape().layers; ++layer) {
    if (evicts(layer)) cache_.decode_old(layer, 0, impl_->pool);
  }
}

Status KvSession::take_scores(std::vector<KeepScore> scores) {
  impl_->scores = std::move(scores);
  if (!impl_->keep_needs.before_chunk) return {};
  for (int layer = 0; layer < cache_.shape().layers; ++layer) {
    if (evicts(layer)) LONGKV_TRY(evict(layer, false));
  }
  impl_->scores.clear();
  return {};
}

// Before the rows move: kept rows take up those that are folded into them. What merges more than once stays in fp32 in
// between, so that every row is rounded once.
void KvSession::merge_rows(int layer, const KeepChoice& choice) {
  if (choice.merges.empty()) return;
  const KvShape& shape = cache_.shape();
  const int64_t dk = shape.dim_k, dv = shape.dim_v;
  impl_->pool.run(shape.kv_heads, [&](int64_t h, int) {
    const int head = int(h);
    const KvHeadView view = impl_->views[size_t(h)];
    std::unordered_map<int64_t, std::vector<float>> open;  // [dim_k + dim_v]; keys turned back where choice says so
    const auto row = [&](int64_t r) -> std::vector<float>& {
      std::vector<float>& values = open[r];
      if (values.empty()) {
        values.resize(size_t(dk + dv));
        cache_.read_row(layer, head, r, values.data(), values.data() + dk);
        if (choice.before_rope) impl_->rotate(layer, -double(view.pos[r]), values.data(), 1, dk);
      }
      return values;
    };
    for (const RowMerge& merge : choice.merges[size_t(h)]) {
      const std::vector<float> from = row(merge.from);
      std::vector<float>& into = row(merge.into);
      for (int64_t c = 0; c < dk; ++c) {
        const float share = merge.k_shares.empty() ? merge.k_share : merge.k_shares[size_t(c)];
        into[size_t(c)] = share * into[size_t(c)] + (1.0f - share) * from[size_t(c)];
      }
      for (int64_t c = dk; c < dk + dv; ++c) {
        into[size_t(c)] = merge.v_into * into[size_t(c)] + merge.v_from * from[size_t(c)];
      }
      open.erase(merge.from);
      cache_.write_fields(layer, head, merge.into, merge.pos, merge.bias, merge.count);
    }
    for (auto& [r, values] : open) {
      if (choice.before_rope) impl_->rotate(layer, double(view.pos[r]), values.data(), 1, dk);
      cache_.write_row(layer, head, r, values.data(), values.data() + dk);
    }
  });
}

// Turns the rows that are left to where the choice puts them.
void KvSession::place_rows(int layer, const KeepChoice& choice) {
  if (choice.positions.empty()) return;
  load_views(layer);
  impl_->pool.run(cache_.shape().kv_heads, [&](int64_t h, int) {
    const KvHeadView& view = impl_->views[size_t(h)];
    std::vector<float> key(size_t(view.dim_k));
    for (int64_t r = 0; r < view.rows; ++r) {
      const int32_t pos = choice.positions[size_t(h)][size_t(r)];
      if (pos == view.pos[r]) continue;
      cache_.read_row(layer, int(h), r, key.data(), nullptr);
      impl_->rotate(layer, double(pos) - view.pos[r], key.data(), 1, view.dim_k);
      cache_.write_row(layer, int(h), r, key.data(), nullptr);
      cache_.write_fields(layer, int(h), r, pos, view.bias[r], view.count[r]);
    }
  });
}

bool KvSession::wants_classes() const { return impl_->keeper != nullptr && impl_->keep_needs.token_classes; }
void KvSession::note_classes(std::span<const TokenClass> classes) { impl_->keeper->note_classes(tokens().v, classes); }

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
