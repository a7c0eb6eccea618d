// normmass: keys shared by norm-weighted mass, values by mass, a bias per row, links per KV head; ours.
// kvslimmer (arXiv 2603.00907): its closed-form key weights, values summed, ln(count) as bias. What its release does
// otherwise are options: links, clip, norms, running, count_factor, scope, rope, positions, reread (kv/keep/merge.h,
// docs/methods.md).
#include "kv/keep/merge_keeper.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kv/codec/codec.h"
#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"

namespace longkv {

namespace {

constexpr int64_t kSample = 32;       // queries of a chunk that distances are taken from
constexpr int64_t kUsualChunk = 512;  // prompt tokens that pass a layer together, for the plan

float dot_of(const float* a, const float* b, int64_t n) {
  float part[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int c = 0; c < 8; ++c) part[c] += a[i + c] * b[i + c];
  }
  for (; i < n; ++i) part[0] += a[i] * b[i];
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

const KeepQueries& queries_of(const KeepInput& input, bool reread) {
  static const KeepQueries kNone;
  if (!reread) return *input.queries;
  return input.score != nullptr ? input.score->queries : kNone;
}

}  // namespace

RunningRows::RunningRows(const KvShape& shape)
    : heads_(size_t(shape.kv_heads)), state_(size_t(shape.layers) * size_t(shape.kv_heads)) {}

void RunningRows::blend(int layer, int head, std::span<float> now, int64_t width) {
  Head& state = state_[size_t(layer) * heads_ + size_t(head)];
  const auto t = double(++state.chunks);
  const size_t n = std::min(state.values.size(), now.size()) / size_t(width) * size_t(width);
  for (size_t i = 0; i < n; ++i) now[i] = float(double(now[i]) / t + double(state.values[i]) * (t - 1) / t);
}

void RunningRows::keep(int layer, int head, std::span<const int64_t> rows, const float* values, int64_t width) {
  std::vector<float>& to = state_[size_t(layer) * heads_ + size_t(head)].values;
  to.clear();
  for (const int64_t r : rows) to.insert(to.end(), values + r * width, values + (r + 1) * width);
}

void RunningRows::clear(int layer, int head) { state_[size_t(layer) * heads_ + size_t(head)] = Head{}; }

void RunningRows::clear() { std::fill(state_.begin(), state_.end(), Head{}); }

MergeKeeper::MergeKeeper(const KeepSpec& spec, const KvShape& shape) : spec_(spec), shape_(shape), running_(shape) {}

KeepNeeds MergeKeeper::needs() const {
  KeepNeeds needs;
  needs.fields = {.pos = true, .bias = true, .count = true};
  needs.rotate = spec_.before_rope || spec_.count_positions;
  needs.every_chunk = true;
  if (spec_.reread) {
    needs.scoring = KeepScoring::kMass;
    needs.before_chunk = true;
    needs.scored_above = spec_.budget;
  } else {
    needs.mass_queries = KeepNeeds::kAll;
    if (wants_sample()) needs.sampled_queries = kSample;
  }
  return needs;
}

bool MergeKeeper::wants_sample() const {
  const bool norms = spec_.key_weight == KeepKeyWeight::kNorm ||
                     (spec_.key_weight == KeepKeyWeight::kSlimmer && spec_.norms != KeepNorms::kRelease);
  return norms || spec_.link_score == KeepLinkScore::kCost || spec_.merge_bias == KeepBias::kFit;
}

Status MergeKeeper::choose(const KeepInput& input, KeepChoice& choice) {
  const int64_t budget = keep_budget(spec_, input.tokens);
  const bool fits =
      std::all_of(input.heads.begin(), input.heads.end(), [&](const KvHeadView& h) { return h.rows <= budget; });
  // The end of a prompt brings nothing new, save where rows were filled without one: then nothing has any mass.
  const bool filled = input.last && input.prompt_tokens == 0 && !fits;
  const bool seen = spec_.reread ? input.score != nullptr : !input.last;
  if (!filled && (!seen || (fits && !spec_.running))) {
    for (size_t h = 0; h < input.heads.size(); ++h) choice.rows[h] = all_rows(input.heads[h].rows);
    if (input.last) {
      for (size_t h = 0; h < input.heads.size(); ++h) running_.clear(input.layer, int(h));
    }
    return {};
  }
  choice.merges.resize(input.heads.size());
  std::vector<MergeRows> rows(input.heads.size());
  for (size_t h = 0; h < rows.size(); ++h) {
    rows[h] = rows_of(input, int(h));
    weigh(input, int(h), rows[h]);
  }
  if (spec_.scope == KeepScope::kLayer) {
    merge_links(spec_, budget, rows, choice.rows[0], choice.merges);
    std::fill(choice.rows.begin() + 1, choice.rows.end(), choice.rows[0]);
  } else {
    input.pool->run(int64_t(rows.size()), [&](int64_t h, int) {
      merge_links(spec_, budget, {&rows[size_t(h)], 1}, choice.rows[size_t(h)], {&choice.merges[size_t(h)], 1});
    });
  }
  choice.before_rope = spec_.before_rope;
  if (spec_.count_positions) place_by_count(input, rows, choice);
  for (size_t h = 0; h < rows.size(); ++h) remember(input, int(h), choice.rows[h], rows[h]);
  return {};
}

void MergeKeeper::truncated(const KvCache&) { running_.clear(); }

int64_t MergeKeeper::planned_rows(int, int, int64_t tokens) const {
  const int64_t budget = keep_budget(spec_, tokens);
  if (!spec_.reread || tokens <= budget) return std::min(tokens, budget);
  // The last chunk's rows come after the last merge.
  const int64_t before = (tokens - 1) / kUsualChunk * kUsualChunk;
  return std::min(before, budget) + tokens - before;
}

MergeRows MergeKeeper::rows_of(const KeepInput& input, int h) const {
  const KvHeadView& head = input.heads[size_t(h)];
  MergeRows rows;
  rows.fixed = newest_rows(head, spec_.window);
  rows.mass.assign(size_t(head.rows), 0.0);
  for (int64_t r = 0; r < head.rows; ++r) {
    // Sinks never leave and rows keep their order, so the first rows are the first tokens wherever they lie now.
    rows.fixed[size_t(r)] |= char(r < spec_.sink);
    rows.bias.push_back(head.bias[r]);
    rows.count.push_back(head.count[r]);
    rows.pos.push_back(head.pos[r]);
  }
  const float* masses = input.mass;
  int64_t stride = input.mass_stride;
  if (spec_.reread) {
    masses = input.score != nullptr ? input.score->mass.data() : nullptr;
    stride = input.score != nullptr ? input.score->rows : 0;
  }
  for (int j = 0; masses != nullptr && j < input.group_size; ++j) {
    const float* mass = masses + (int64_t(h) * input.group_size + j) * stride;
    for (int64_t r = 0; r < head.rows; ++r) rows.mass[size_t(r)] += mass[r];
  }
  return rows;
}

void MergeKeeper::weigh(const KeepInput& input, int h, MergeRows& rows) {
  rows.weight = rows.mass;
  if (spec_.key_weight == KeepKeyWeight::kSlimmer && spec_.norms == KeepNorms::kRelease) {
    weigh_as_released(input, h, rows);
  }
  if (!wants_sample()) return;
  take_sample(input, h, rows);
  // weight = mass times the sample's mean distance of the row's value from the outputs, by attention.
  const MergeSample& s = rows.sample;
  for (size_t r = 0; r < rows.size(); ++r) {
    const float* value = s.values.data() + int64_t(r) * s.dim_v;
    const double square = dot_of(value, value, s.dim_v);
    double sum = 0, seen = 0;
    for (int64_t t = 0; t < s.queries; ++t) {
      const auto at = r * size_t(s.queries) + size_t(t);
      const double a = std::exp(s.logit[at] + float(rows.bias[r]));
      sum += a * std::sqrt(std::max(0.0, square - 2.0 * s.dot[at] + s.out_square[size_t(t)]));
      seen += a;
    }
    if (spec_.norms != KeepNorms::kRelease || spec_.key_weight != KeepKeyWeight::kSlimmer) {
      rows.weight[r] *= seen > 0 ? sum / seen : 1.0;
    }
  }
}

void MergeKeeper::remember(const KeepInput& input, int h, std::span<const int64_t> kept, const MergeRows& rows) {
  if (!spec_.running) return;
  const std::vector<float> weights(rows.weight.begin(), rows.weight.end());
  running_.keep(input.layer, h, kept, weights.data(), 1);
}

// h_j = alpha_j (1 - 2 alpha_j) |S_j - o|_1 with alpha_j the share of the mass that is not fixed, S_j the sum of a
// row's values and o = sum alpha_j S_j.
void MergeKeeper::weigh_as_released(const KeepInput& input, int h, MergeRows& rows) {
  const KvHeadView& head = input.heads[size_t(h)];
  const int64_t dv = head.dim_v;
  std::vector<float> values(size_t(head.rows * dv));
  decode_v_rows(head, 0, head.rows, values.data());
  double total = 0;
  for (size_t r = 0; r < rows.size(); ++r) total += rows.fixed[r] != 0 ? 0.0 : rows.mass[r];
  std::vector<double> out(size_t(dv), 0.0);
  const auto alpha = [&](size_t r) { return rows.fixed[r] != 0 || total <= 0 ? 0.0 : rows.mass[r] / total; };
  for (size_t r = 0; r < rows.size(); ++r) {
    const double share = alpha(r) * double(rows.count[r]);
    for (int64_t c = 0; c < dv; ++c) out[size_t(c)] += share * values[r * size_t(dv) + size_t(c)];
  }
  std::vector<float> weights(rows.size());
  for (size_t r = 0; r < rows.size(); ++r) {
    double distance = 0;
    for (int64_t c = 0; c < dv; ++c) {
      distance += std::abs(double(rows.count[r]) * values[r * size_t(dv) + size_t(c)] - out[size_t(c)]);
    }
    weights[r] = float(alpha(r) * (1 - 2 * alpha(r)) * distance);
  }
  if (spec_.running) running_.blend(input.layer, h, weights, 1);
  rows.weight.assign(weights.begin(), weights.end());
}

void MergeKeeper::take_sample(const KeepInput& input, int h, MergeRows& rows) const {
  const KvHeadView& head = input.heads[size_t(h)];
  if (head.rows == 0) return;  // before the first chunk of a prompt that is read twice
  const KeepQueries& queries = queries_of(input, spec_.reread);
  const int64_t dv = head.dim_v, heads = int64_t(input.heads.size()) * input.group_size;
  const auto n_rows = size_t(head.rows);
  MergeSample& s = rows.sample;
  s.queries = int64_t(queries.positions.size()) * input.group_size;
  s.dim_v = dv;
  s.logit.assign(n_rows * size_t(s.queries), -std::numeric_limits<float>::infinity());
  s.dot.resize(n_rows * size_t(s.queries));
  s.values.resize(n_rows * size_t(dv));
  decode_v_rows(head, 0, head.rows, s.values.data());
  std::vector<float> scores(size_t(input.group_size) * n_rows);
  for (size_t t = 0; t < queries.positions.size(); ++t) {
    // Rows are in the order of positions: those up to the query's are visible.
    const int64_t visible = std::upper_bound(head.pos, head.pos + head.rows, int32_t(queries.positions[t])) - head.pos;
    const RowRange range{0, visible};
    AttendUnit unit;
    unit.q = queries.q.data() + (int64_t(t) * heads + int64_t(h) * input.group_size) * head.dim_k;
    unit.n_q = input.group_size;
    unit.kv = head;
    unit.ranges = {&range, 1};
    attend_scores(unit, input.params, scores.data(), *input.pool);
    for (int g = 0; g < input.group_size; ++g) {
      const float* out = queries.out.data() + (int64_t(t) * heads + int64_t(h) * input.group_size + g) * dv;
      s.out_square.push_back(dot_of(out, out, dv));
      const float* own = scores.data() + g * visible;
      const float top = *std::max_element(own, own + visible);
      double total = 0;
      for (int64_t r = 0; r < visible; ++r) total += std::exp(own[r] - top);
      // Rows of the chunk itself give mass too where they are not among those held (a chunk that is read twice); what
      // the query gives these rows is then relative to them alone, which no share depends on.
      const float lse = top + float(std::log(total));
      const size_t query = t * size_t(input.group_size) + size_t(g);
      for (int64_t r = 0; r < head.rows; ++r) {
        const size_t at = size_t(r * s.queries) + query;
        if (r < visible) s.logit[at] = own[r] - lse - head.bias[r];
        s.dot[at] = dot_of(out, s.values.data() + r * dv, dv);
      }
    }
  }
}

// Every row lies as far before the newest token as the tokens of the rows after it are many.
void MergeKeeper::place_by_count(const KeepInput& input, const std::vector<MergeRows>& rows, KeepChoice& choice) const {
  choice.positions.resize(rows.size());
  for (size_t h = 0; h < rows.size(); ++h) {
    const std::vector<int64_t>& kept = choice.rows[h];
    std::vector<int32_t>& positions = choice.positions[h];
    positions.resize(kept.size());
    int64_t pos = input.tokens - 1;
    for (size_t i = kept.size(); i-- > 0;) {
      positions[i] = int32_t(pos);
      pos -= rows[h].count[size_t(kept[i])];
    }
  }
}

std::unique_ptr<Keeper> make_merging(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<MergeKeeper>(spec, shape);
}

}  // namespace longkv
