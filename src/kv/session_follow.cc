// Sessions that take in another one's prompt: several recipes over keys and values that were computed once.
#include <algorithm>

#include "base/error.h"
#include "kv/layout.h"
#include "kv/session_impl.h"

namespace longkv {

void KvSession::add_follower(KvSession* follower) { impl_->followers.push_back(follower); }

void KvSession::clear_followers() { impl_->followers.clear(); }

bool KvSession::changes_prompt() const {
  const KeepNeeds& needs = impl_->keep_needs;
  return needs.every_chunk || needs.repeat_chunk > 0 || needs.token_classes ||
         recipe_.prefill.kind != PrefillKind::kDense;
}

void KvSession::set_reference(const KvSession* full) { impl_->reference = full; }

bool KvSession::wants_queries(int layer) const {
  return evicts(layer) || impl_->think != nullptr || impl_->selector->wants_mass(layer) ||
         recipe_.index.kind == IndexKind::kLabels ||
         std::any_of(impl_->followers.begin(), impl_->followers.end(),
                     [&](const KvSession* follower) { return follower->wants_queries(layer); });
}

// As prefill(), but the attention's output is the leader's: only the mass that this recipe wants is computed here, over
// the queries that give it.
Status KvSession::observe(int layer, const float* q, const float* k, const float* v, int64_t n, int64_t prompt_end,
                          float* out, const std::atomic<bool>* cancel) {
  Impl& impl = *impl_;
  note_queries(layer, q, n, prompt_end);
  const float *own_q = q, *own_k = k, *own_v = v;
  impl.rotation.enter(recipe_.store, cache_.shape(), n, own_q, own_k, own_v);
  PrefillAttendArgs args;
  LONGKV_TRY(begin_chunk(layer, own_q, own_k, own_v, n, prompt_end, args));
  PrefillAttendArgs whole = args;
  whole.out = out;
  if (args.mass != nullptr) {
    const KvShape& shape = cache_.shape();
    const int64_t skip = std::clamp<int64_t>(args.mass_from - args.first_position, 0, n);
    const int64_t heads = int64_t(shape.kv_heads) * shape.group_size;
    args.q += skip * heads * shape.dim_k;
    args.tokens -= skip;
    args.first_position += skip;
    for (int64_t& row : impl.first_rows) row += skip;
    impl.observed_out.resize(size_t(args.tokens * heads * shape.dim_v));
    args.out = impl.observed_out.data();
    args.cancel = cancel;
    if (args.tokens > 0) impl.prefill_attention.run(args);
    for (int64_t& row : impl.first_rows) row -= skip;
  }
  if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) {
    return fail(Code::kCancelled, "interrupted while reading the prompt");
  }
  LONGKV_TRY(end_chunk(layer, prompt_end, whole));
  for (KvSession* follower : impl.followers) {
    LONGKV_TRY(follower->observe(layer, q, k, v, n, prompt_end, out, cancel));
  }
  return {};
}

// The rows of full attention that the newest token may see, for a check against them.
RowRange KvSession::load_reference(int layer, int kv_head) {
  Impl& impl = *impl_;
  const int64_t tokens = cache_.tokens(layer).v;
  impl.reference_views.resize(size_t(cache_.shape().kv_heads));
  KvHeadView& view = impl.reference_views[size_t(kv_head)];
  view = impl.reference->cache_.view(layer, kv_head);
  view.rows = std::min(view.rows, tokens);
  return visible_rows(tokens - 1, impl.plans[size_t(layer)].window);
}

}  // namespace longkv
