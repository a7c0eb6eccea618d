#include "kv/session.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <utility>

#include "base/error.h"
#include "base/seconds.h"
#include "kv/session_impl.h"

namespace longkv {

namespace {

using Clock = std::chrono::steady_clock;

// Relative distance of two vectors; 0 when both vanish.
double relative_error(const float* a, const float* b, int64_t n) {
  double difference = 0, norm = 0;
  for (int64_t i = 0; i < n; ++i) {
    const double d = double(a[i]) - b[i];
    difference += d * d;
    norm += double(b[i]) * b[i];
  }
  return difference == 0 ? 0.0 : std::sqrt(difference / norm);
}

// Whether the recipe can do what its keeper needs.
Status check_needs(const KeepNeeds& needs, const Recipe& recipe, const AttendParams& params, bool rotates) {
  if (needs.rotate && recipe.store.rotates_k()) {
    return fail(Code::kInvalidArgument,
                "{}: this keep stage turns K rows by RoPE, which a Hadamard rotation of them does not allow; nearest "
                "legal: rotate=v",
                recipe.canonical());
  }
  if (needs.step != KeepStep::kNone && store_regions(recipe.store, recipe.mask).on) {
    return fail(
        Code::kInvalidArgument,
        "{}: rows that are encoded in blocks cannot be evicted one by one while decoding; nearest legal: the same "
        "keep stage with store=q8_0, q4_0 or fp8 without a window",
        recipe.canonical());
  }
  if (needs.rotate && !rotates) {
    return fail(Code::kInvalidArgument,
                "the recipe {} turns rows by the model's RoPE, which was not given to the KV session; pass "
                "KvSessionExtras::rotate or choose a recipe with absolute positions",
                recipe.canonical());
  }
  if (needs.mass_queries == KeepNeeds::kAll && recipe.prefill.kind != PrefillKind::kDense) {
    return fail(
        Code::kInvalidArgument,
        "{}: this keep stage wants the attention mass that every query of the prompt gives, which a sparse prefill "
        "does not compute; nearest legal: the same recipe with prefill=dense",
        recipe.canonical());
  }
  if (needs.scoring != KeepScoring::kNone) {
    if (recipe.prefill.kind != PrefillKind::kDense) {
      return fail(Code::kInvalidArgument,
                  "{}: this keep stage passes every chunk of a prompt through the model with full attention, which a "
                  "sparse prefill is there to avoid; nearest legal: the same recipe with prefill=dense",
                  recipe.canonical());
    }
    if (recipe.store.rotates_k() || recipe.store.rotates_v()) {
      return fail(Code::kInvalidArgument,
                  "{}: this keep stage attends the rows held with the model's own queries, which a Hadamard rotation "
                  "of them does not allow; nearest legal: the same recipe without rotate",
                  recipe.canonical());
    }
    if (params.softcap > 0) {
      return fail(Code::kUnsupported,
                  "{}: no gradient of attention whose scores are capped (this model caps them at {}); nearest legal: "
                  "kvslimmer without reread",
                  recipe.canonical(), params.softcap);
    }
  }
  if (recipe.select.all) return {};
  if (needs.step != KeepStep::kNone) {
    return fail(Code::kInvalidArgument,
                "{}: rows that are evicted while decoding leave an index behind; nearest legal: the same keep stage "
                "with select=all, or one that evicts at the prompt's end only",
                recipe.canonical());
  }
  if (needs.ragged) {
    return fail(Code::kInvalidArgument,
                "{}: an index needs heads of equal length, this keep stage gives each head its own; nearest legal: "
                "the same keep stage with select=all",
                recipe.canonical());
  }
  const bool representatives = recipe.index.kind == IndexKind::kDynamic || recipe.index.kind == IndexKind::kRepr;
  if (needs.every_chunk && (representatives || recipe.select.preselect > 0)) {
    return fail(Code::kInvalidArgument,
                "{}: representatives and votes are chosen by attention over the whole prompt, of which this keep stage "
                "leaves only merged rows; nearest legal: index=minmax without preselect",
                recipe.canonical());
  }
  const bool votes = representatives || recipe.select.preselect > 0;
  if (votes && needs.mass_queries > 0 && needs.mass_queries != recipe.select.preselect_queries) {
    return fail(Code::kInvalidArgument,
                "{}: keep stage and index both read the attention of the prompt's last queries, but of different "
                "numbers; nearest legal: preselect_queries equal to the keep stage's window",
                recipe.canonical());
  }
  return {};
}

}  // namespace

KvSession::Impl::Impl(const KvShape& shape, const Recipe& recipe, const AttendParams& attend_params,
                      ThreadPool& thread_pool)
    : params(attend_params), pool(thread_pool), prefill_attention(thread_pool), plans(plan_layers(shape, recipe)) {
  const bool per_query = !recipe.select.all && recipe.select.heads == SelectHeads::kPerQueryHead;
  const int n_q = per_query ? 1 : shape.group_size;
  const int per_head = shape.group_size / n_q;
  for (int u = 0; u < shape.kv_heads * per_head; ++u) units.push_back({u / per_head, u * n_q, n_q});
  const size_t layers = size_t(shape.layers), query_heads = size_t(shape.kv_heads) * size_t(shape.group_size);
  prompt_start.assign(layers, -1);
  ranges.resize(layers * units.size());
  head_ranges.resize(layers * size_t(shape.kv_heads));
  views.resize(size_t(shape.kv_heads));
  attend_units.resize(units.size());
  check_ranges.resize(size_t(shape.kv_heads));
  first_rows.resize(size_t(shape.kv_heads));
  evicted.resize(size_t(shape.kv_heads));
  lse.resize(query_heads);
  check_lse.resize(query_heads);
  check_out.resize(query_heads * size_t(shape.dim_v));
}

KvSession::KvSession(KvCache cache, const Recipe& recipe, const AttendParams& params, ThreadPool& pool,
                     std::unique_ptr<Keeper> keeper, KvRotate rotate)
    : cache_(std::move(cache)), recipe_(recipe), impl_(std::make_unique<Impl>(cache_.shape(), recipe, params, pool)) {
  impl_->rotate = std::move(rotate);
  if (keeper) {
    impl_->keep_needs = keeper->needs();
    impl_->keeper = std::move(keeper);
    impl_->collector = std::make_unique<KeepCollector>(cache_.shape(), impl_->keep_needs);
  }
  if (recipe_.mask.kind == MaskKind::kThink) impl_->think = std::make_unique<ThinkObserver>(cache_.shape());
  reset_stats();
}

KvSession::~KvSession() = default;

Result<std::unique_ptr<KvSession>> KvSession::create(const KvShape& shape, const Recipe& recipe, RowCapacity capacity,
                                                     const AttendParams& params, ThreadPool& pool,
                                                     KvSessionExtras extras) {
  if (shape.layers < 1 || shape.kv_heads < 1 || shape.group_size < 1 || shape.dim_k < 1 || shape.dim_v < 1) {
    return fail(Code::kInvalidArgument,
                "KV shape: {} layers, {} KV heads, {} query heads each, {} K and {} V channels; all must be positive",
                shape.layers, shape.kv_heads, shape.group_size, shape.dim_k, shape.dim_v);
  }
  LONGKV_TRY(validate_recipe(recipe));
  if (!extras.keeper) {
    LONGKV_ASSIGN(extras.keeper, make_keeper(recipe.keep, shape, extras.model));
  }
  const KeepNeeds needs = extras.keeper ? extras.keeper->needs() : KeepNeeds{};
  LONGKV_TRY(check_needs(needs, recipe, params, bool(extras.rotate)));
  const KvTypes types = store_regions(recipe.store, recipe.mask).raw;
  LONGKV_ASSIGN(KvCache cache, KvCache::create(shape, types, capacity, needs.fields, extras.disk));
  LONGKV_ASSIGN(std::optional<RegionStore> regions,
                make_regions(shape, recipe, capacity, extras.model, params.softcap > 0));
  if (regions && extras.disk) {
    return fail(
        Code::kUnsupported,
        "the recipe {} holds old rows in another form, which lies in memory only; on disk longkv has rows of one "
        "type, as in store=q8_0",
        recipe.canonical());
  }
  if (regions) LONGKV_TRY(cache.add_regions(std::move(*regions)));
  cache.set_window_slack(extras.window_slack);
  auto session = std::unique_ptr<KvSession>(
      new KvSession(std::move(cache), recipe, params, pool, std::move(extras.keeper), std::move(extras.rotate)));
  LONGKV_ASSIGN(session->impl_->sparse_prefill, SparsePrefill::create(recipe.prefill, shape));
  LONGKV_ASSIGN(session->impl_->selector, Selector::create(shape, recipe, session->impl_->plans, capacity, params));
  return session;
}

void KvSession::reset_stats() {
  stats_ = KvStats{};
  stats_.captured_mass.assign(size_t(cache_.shape().layers), 0.0);
  stats_.head_mass.assign(size_t(cache_.shape().layers) * size_t(cache_.shape().kv_heads), 0.0);
  stats_.output_error.assign(size_t(cache_.shape().layers), 0.0);
}

int64_t KvSession::coarse_factor() const { return impl_->selector->coarse_factor(); }

int64_t KvSession::index_bytes_held() const { return impl_->selector->index_bytes_held(); }

TokenCount KvSession::tokens() const { return cache_.tokens(cache_.shape().layers - 1); }

void KvSession::load_views(int layer) {
  for (int h = 0; h < cache_.shape().kv_heads; ++h) impl_->views[size_t(h)] = cache_.view(layer, h);
}

// Rows of a head that the newest token may see.
RowRange KvSession::visible(int layer, int kv_head) const {
  const int64_t window = impl_->plans[size_t(layer)].window;
  if (window > 0) return visible_rows(cache_.tokens(layer).v - 1, window);
  return {0, cache_.rows(layer, kv_head).v};
}

const std::vector<RowRange>& KvSession::last_ranges(int layer, int kv_head) const {
  return impl_->head_ranges[size_t(layer) * size_t(cache_.shape().kv_heads) + size_t(kv_head)];
}

// Takes in a chunk's rows and describes the attention over them.
Status KvSession::begin_chunk(int layer, const float* q, const float* k, const float* v, int64_t n, int64_t prompt_end,
                              PrefillAttendArgs& args) {
  Impl& impl = *impl_;
  const int64_t first = cache_.tokens(layer).v;
  if (first + n > prompt_end) {
    return fail(Code::kInternal, "prompt chunk of layer {} ends at position {}, after the prompt's end {}", layer,
                first + n, prompt_end);
  }
  LONGKV_TRY(cache_.append(layer, k, v, n, impl.pool));
  begin_prompt(layer, first, prompt_end);
  load_views(layer);
  // Where rows are evicted at the prompt's end, the index is built of those that stay.
  if (!evicts(layer)) impl.selector->append(layer, impl.views, first, first + n, impl.pool);
  impl.selector->forget_choice(layer);

  args.q = q;
  args.tokens = n;
  args.first_position = first;
  args.window = impl.plans[size_t(layer)].window;
  args.heads = impl.views;
  for (size_t h = 0; h < impl.views.size(); ++h) impl.first_rows[h] = impl.views[h].rows - n;
  args.first_rows = impl.first_rows;
  args.group_size = cache_.shape().group_size;
  args.params = impl.params;
  ask_attention(layer, prompt_end, args);
  impl.selector->observe_queries(layer, q, n, first, prompt_end);
  return {};
}

// After the attention that begin_chunk() described.
Status KvSession::end_chunk(int layer, int64_t prompt_end, const PrefillAttendArgs& args) {
  Impl& impl = *impl_;
  if (!evicts(layer)) return {};
  if (impl.repeat.prompt_begin >= 0) {
    score_repeat(layer, args.q, args.tokens);
    return {};
  }
  impl.collector->after_chunk(layer, keep_end(layer, prompt_end), args, impl.rotate, impl.pool);
  return impl.keep_needs.every_chunk && !impl.keep_needs.before_chunk ? evict(layer, false) : Status();
}

Status KvSession::prefill(int layer, const float* q, const float* k, const float* v, int64_t n, int64_t prompt_end,
                          float* out, const std::atomic<bool>* cancel) {
  if (n <= 0) return {};
  Impl& impl = *impl_;
  const KvShape& shape = cache_.shape();
  note_queries(layer, q, n, prompt_end);
  const float *own_q = q, *own_k = k, *own_v = v;
  impl.rotation.enter(recipe_.store, shape, n, own_q, own_k, own_v);
  PrefillAttendArgs args;
  LONGKV_TRY(begin_chunk(layer, own_q, own_k, own_v, n, prompt_end, args));
  args.out = out;
  args.cancel = cancel;
  attend_prompt(layer, args, prompt_end);
  if (cancel != nullptr && cancel->load(std::memory_order_relaxed)) {
    return fail(Code::kCancelled, "interrupted while reading the prompt");
  }
  LONGKV_TRY(end_chunk(layer, prompt_end, args));
  impl.rotation.leave(recipe_.store, shape, n, out);
  for (KvSession* follower : impl.followers) {
    LONGKV_TRY(follower->observe(layer, q, k, v, n, prompt_end, out, cancel));
  }
  return {};
}

// Asks the prompt's attention for the mass that keeper or selector want. The observation window may begin in an earlier
// chunk, so mass is collected over chunks until finish_prefill.
void KvSession::ask_attention(int layer, int64_t prompt_end, PrefillAttendArgs& args) {
  Impl& impl = *impl_;
  if (evicts(layer)) impl.collector->before_chunk(layer, cache_.rows(layer).v, keep_end(layer, prompt_end), args);
  const int64_t mass_from = std::max<int64_t>(0, prompt_end - recipe_.select.preselect_queries);
  if (args.mass == nullptr && impl.selector->wants_mass(layer) && args.first_position + args.tokens > mass_from) {
    args.mass = impl.selector->mass(layer, prompt_end);
    args.mass_stride = prompt_end;
    args.mass_from = mass_from;
  }
}

Status KvSession::finish_prefill(int layer) {
  Impl& impl = *impl_;
  if (evicts(layer)) LONGKV_TRY(evict(layer, true));
  load_views(layer);
  impl.selector->finish_prompt(layer, impl.views, impl.pool);
  impl.step = -1;
  impl.prompt_start[size_t(layer)] = -1;
  cache_.release_outside_window(layer);
  LONGKV_TRY(store_prompt(layer));
  for (KvSession* follower : impl.followers) LONGKV_TRY(follower->finish_prefill(layer));
  return {};
}

Status KvSession::decode_rows(int layer, const float* q, const float* k, const float* v, float* out) {
  Impl& impl = *impl_;
  const KvShape& shape = cache_.shape();
  if (layer == 0) {
    ++impl.step;
    ++impl.total_steps;
    ++stats_.steps;
    impl.checking = check_every_ > 0 && impl.total_steps % check_every_ == 0;
    if (impl.checking) ++stats_.checked_steps;
  }
  LONGKV_TRY(cache_.append(layer, k, v, 1, impl.pool));
  evict_one(layer, q, KeepStep::kBeforeAttention);
  load_views(layer);

  const auto select_start = Clock::now();
  const int64_t rows = cache_.rows(layer).v;
  impl.selector->append(layer, impl.views, rows - 1, rows, impl.pool);
  const bool sparse = choose_rows(layer, q);
  if (sparse && cache_.on_disk()) {
    for (size_t u = 0; u < impl.units.size(); ++u)
      cache_.will_read(layer, impl.units[u].kv_head, impl.layer_ranges(layer)[u]);
  }
  const auto attend_start = Clock::now();
  stats_.seconds_select += std::chrono::duration<double>(attend_start - select_start).count();

  const auto ranges = impl.layer_ranges(layer);
  for (size_t u = 0; u < impl.units.size(); ++u) {
    const SelectionUnit& unit = impl.units[u];
    AttendUnit& attended = impl.attend_units[u];
    attended.q = q + int64_t(unit.first_query) * shape.dim_k;
    attended.n_q = unit.n_q;
    attended.kv = impl.views[size_t(unit.kv_head)];
    attended.ranges = ranges[u];
    attended.out = out + int64_t(unit.first_query) * shape.dim_v;
    attended.lse = impl.lse.data() + unit.first_query;
  }
  attend(impl.attend_units, impl.params, impl.attend_scratch, impl.pool);
  if (sparse) {
    impl.selector->merge_tail(layer, q, visible(layer, 0), impl.pool, impl.units, ranges, impl.lse.data(), out, stats_);
  }
  stats_.seconds_attend += seconds_since(attend_start);
  count_rows(layer);
  if (impl.checking) check(layer, sparse, q, out);
  evict_one(layer, q, KeepStep::kAfterAttention);
  return {};
}

Status KvSession::append_decoded(int layer, const float* k, const float* v, int64_t n) {
  Impl& impl = *impl_;
  LONGKV_TRY(cache_.append(layer, k, v, n, impl.pool));
  load_views(layer);
  const int64_t rows = cache_.rows(layer).v;
  impl.selector->append(layer, impl.views, rows - n, rows, impl.pool);
  return {};
}

// Fills the ranges of a layer; false: every visible row is attended.
bool KvSession::choose_rows(int layer, const float* q) {
  Impl& impl = *impl_;
  const auto ranges = impl.layer_ranges(layer);
  // Only heads of equal length have indexes.
  const bool sparse =
      impl.plans[size_t(layer)].role != LayerRole::kDense &&
      impl.selector->choose(layer, q, visible(layer, 0), impl.step, impl.pool, impl.units, ranges, stats_);
  if (!sparse) {
    for (size_t u = 0; u < impl.units.size(); ++u) ranges[u].assign(1, visible(layer, impl.units[u].kv_head));
  }
  return sparse;
}

void KvSession::count_rows(int layer) {
  Impl& impl = *impl_;
  const KvShape& shape = cache_.shape();
  const auto ranges = impl.layer_ranges(layer);
  for (size_t u = 0; u < impl.units.size(); ++u) {
    stats_.rows_attended += longkv::count_rows(ranges[u]);
    stats_.kv_bytes += bytes_of(layer, impl.units[u].kv_head, ranges[u]);
  }

  const size_t per_head = impl.units.size() / size_t(shape.kv_heads);
  for (size_t h = 0; h < size_t(shape.kv_heads); ++h) {
    auto& merged = impl.head_ranges[size_t(layer) * size_t(shape.kv_heads) + h];
    merged = ranges[h * per_head];
    for (size_t u = 1; u < per_head; ++u) {
      unite_ranges(merged, ranges[h * per_head + u], impl.union_scratch);
      merged.swap(impl.union_scratch);
    }
  }
}

// Every KV head over all rows that the newest token may see, its own or those of the reference.
std::vector<AttendUnit>& KvSession::full_attention(int layer, const float* q, float* out, float* lse,
                                                   bool from_reference) {
  Impl& impl = *impl_;
  const KvShape& shape = cache_.shape();
  impl.check_units.resize(size_t(shape.kv_heads));
  for (int h = 0; h < shape.kv_heads; ++h) {
    const int64_t first_query = int64_t(h) * shape.group_size;
    impl.check_ranges[size_t(h)] = from_reference ? load_reference(layer, h) : visible(layer, h);
    impl.check_units[size_t(h)] = {q + first_query * shape.dim_k,
                                   shape.group_size,
                                   from_reference ? impl.reference_views[size_t(h)] : impl.views[size_t(h)],
                                   std::span<const RowRange>(&impl.check_ranges[size_t(h)], 1),
                                   out + first_query * shape.dim_v,
                                   lse + first_query};
  }
  return impl.check_units;
}

Status KvSession::decode_probe(int layer, const float* q, const float* k, const float* v, float* out) {
  Impl& impl = *impl_;
  LONGKV_TRY(cache_.append(layer, k, v, 1, impl.pool));
  impl.probed = true;
  load_views(layer);
  attend(full_attention(layer, q, out, impl.check_lse.data(), false), impl.params, impl.attend_scratch, impl.pool);
  return {};
}

Status KvSession::end_probe() {
  probing_ = false;
  if (!std::exchange(impl_->probed, false)) return {};  // it failed before any layer had its row
  // The selector never saw the row, so only the cache forgets it.
  return cache_.truncate(TokenCount{cache_.tokens(0).v - 1});
}

void KvSession::check(int layer, bool sparse, const float* q, const float* out) {
  Impl& impl = *impl_;
  const auto kv_heads = size_t(cache_.shape().kv_heads), group = size_t(cache_.shape().group_size);
  double* head_mass = stats_.head_mass.data() + size_t(layer) * kv_heads;
  if (!sparse && impl.reference == nullptr) {
    stats_.captured_mass[size_t(layer)] += 1.0;
    for (size_t h = 0; h < kv_heads; ++h) head_mass[h] += 1.0;
    return;
  }
  // The reference holds rows as they came: its queries and outputs are not rotated.
  if (impl.reference != nullptr) {
    q = impl.rotation.came(q);
    impl.rotation.leave(recipe_.store, cache_.shape(), out, impl.check_own);
    out = impl.check_own.empty() ? out : impl.check_own.data();
  }
  attend(full_attention(layer, q, impl.check_out.data(), impl.check_lse.data(), impl.reference != nullptr), impl.params,
         impl.attend_scratch, impl.pool);
  double mass = 0;
  for (size_t j = 0; j < impl.lse.size(); ++j) {
    const double share = std::exp(double(impl.lse[j]) - impl.check_lse[j]);
    mass += share;
    head_mass[j / group] += share / double(group);
  }
  stats_.captured_mass[size_t(layer)] += mass / double(impl.lse.size());
  stats_.output_error[size_t(layer)] += relative_error(out, impl.check_out.data(), int64_t(impl.check_out.size()));
}

Status KvSession::truncate(TokenCount tokens) {
  Impl& impl = *impl_;
  if (tokens.v < 0 || tokens > this->tokens()) {
    return fail(Code::kInvalidArgument, "cannot cut the KV cache to {} tokens: it holds {}", tokens.v,
                this->tokens().v);
  }
  LONGKV_TRY(cache_.truncate(tokens));
  for (int layer = 0; layer < cache_.shape().layers; ++layer) {
    load_views(layer);
    impl.selector->truncate(layer, impl.views, cache_.rows(layer).v);
    if (impl.collector) impl.collector->drop(layer);
  }
  impl.scores.clear();
  if (impl.keeper) impl.keeper->truncated(cache_);
  impl.repeat = {};
  impl.step = -1;
  std::fill(impl.prompt_start.begin(), impl.prompt_start.end(), -1);
  return {};
}

}  // namespace longkv
