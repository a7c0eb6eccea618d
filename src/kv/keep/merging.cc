// Merging while the prompt is read: after each chunk a layer's rows are brought back to the budget, so that no layer
// ever holds more than budget + chunk rows. Mass comes from all queries of the chunk, in the one forward pass that
// there is; distances of values from outputs come from a sample of them.
//
// normmass: keys shared by norm-weighted mass, values by mass, entropy bias, per KV head.
// kvslimmer (arXiv 2603.00907): its closed-form key weights, values summed, ln(count) as bias. Not taken over from its
// release: links that share a row, which lose tokens; counts clipped while values are not; the second forward pass; one
// choice for all heads; keys merged before RoPE.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kv/codec/codec.h"
#include "kv/keep/kinds.h"
#include "kv/keep/merge.h"
#include "kv/keep/rank.h"

namespace longkv {

namespace {

constexpr int64_t kSample = 32;

float dot_of(const float* a, const float* b, int64_t n) {
  float part[8] = {};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8) {
    for (int c = 0; c < 8; ++c) part[c] += a[i + c] * b[i + c];
  }
  for (; i < n; ++i) part[0] += a[i] * b[i];
  return ((part[0] + part[1]) + (part[2] + part[3])) + ((part[4] + part[5]) + (part[6] + part[7]));
}

class MergeKeeper : public Keeper {
 public:
  MergeKeeper(const KeepSpec& spec, const KvShape& shape) : spec_(spec), shape_(shape) {}

  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.fields = {.pos = true, .bias = true, .count = true};
    needs.mass_queries = KeepNeeds::kAll;
    needs.sampled_queries = kSample;
    needs.every_chunk = true;
    return needs;
  }

  Status choose(const KeepInput& input, KeepChoice& choice) override {
    const int64_t budget = keep_budget(spec_, input.tokens);
    choice.merges.resize(input.heads.size());
    const bool fits =
        std::all_of(input.heads.begin(), input.heads.end(), [&](const KvHeadView& h) { return h.rows <= budget; });
    if (fits) {
      for (size_t h = 0; h < input.heads.size(); ++h) choice.rows[h] = all_rows(input.heads[h].rows);
      return {};
    }
    std::vector<MergeRows> rows(input.heads.size());
    for (size_t h = 0; h < rows.size(); ++h) rows[h] = rows_of(input, int(h));
    for (size_t h = 0; h < rows.size(); ++h) weigh(input, int(h), rows[h]);
    input.pool->run(int64_t(rows.size()), [&](int64_t h, int) {
      merge_links(spec_, budget, rows[size_t(h)], choice.rows[size_t(h)], choice.merges[size_t(h)]);
    });
    return {};
  }

  int64_t planned_rows(int, int, int64_t tokens) const override { return std::min(tokens, keep_budget(spec_, tokens)); }

 private:
  MergeRows rows_of(const KeepInput& input, int h) const {
    const KvHeadView& head = input.heads[size_t(h)];
    MergeRows rows;
    rows.fixed = newest_rows(head, spec_.window);
    rows.mass.assign(size_t(head.rows), 0.0);
    for (int64_t r = 0; r < head.rows; ++r) {
      rows.fixed[size_t(r)] |= char(head.pos[r] < spec_.sink);
      rows.bias.push_back(head.bias[r]);
      rows.count.push_back(head.count[r]);
      rows.pos.push_back(head.pos[r]);
    }
    for (int j = 0; j < input.group_size; ++j) {
      const float* mass = input.mass + (int64_t(h) * input.group_size + j) * input.mass_stride;
      for (int64_t r = 0; r < head.rows; ++r) rows.mass[size_t(r)] += mass[r];
    }
    return rows;
  }

  // weight = mass times the sample's mean distance of the row's value from the outputs, by attention.
  void weigh(const KeepInput& input, int h, MergeRows& rows) {
    const KvHeadView& head = input.heads[size_t(h)];
    rows.weight = rows.mass;
    if (spec_.key_weight != KeepKeyWeight::kNorm && spec_.key_weight != KeepKeyWeight::kSlimmer) return;
    const KeepQueries& queries = *input.queries;
    const int64_t dv = head.dim_v, heads = int64_t(input.heads.size()) * input.group_size;
    std::vector<float> values(size_t(head.rows * dv)), norms(size_t(head.rows));
    decode_v_rows(head, 0, head.rows, values.data());
    for (int64_t r = 0; r < head.rows; ++r)
      norms[size_t(r)] = dot_of(&values[size_t(r * dv)], &values[size_t(r * dv)], dv);
    std::vector<double> sum(size_t(head.rows), 0.0), seen(size_t(head.rows), 0.0);
    std::vector<float> scores(size_t(input.group_size * head.rows));
    for (size_t t = 0; t < queries.positions.size(); ++t) {
      // Rows are in the order of positions: those up to the query's are visible.
      const int64_t visible =
          std::upper_bound(head.pos, head.pos + head.rows, int32_t(queries.positions[t])) - head.pos;
      const RowRange range{0, visible};
      AttendUnit unit;
      unit.q = queries.q.data() + (int64_t(t) * heads + int64_t(h) * input.group_size) * head.dim_k;
      unit.n_q = input.group_size;
      unit.kv = head;
      unit.ranges = {&range, 1};
      attend_scores(unit, input.params, scores.data(), *input.pool);
      for (int g = 0; g < input.group_size; ++g) {
        const float* out = queries.out.data() + (int64_t(t) * heads + int64_t(h) * input.group_size + g) * dv;
        const float out_norm = dot_of(out, out, dv);
        float* own = scores.data() + g * visible;
        const float top = *std::max_element(own, own + visible);
        double total = 0;
        for (int64_t r = 0; r < visible; ++r) total += own[r] = std::exp(own[r] - top);
        for (int64_t r = 0; r < visible; ++r) {
          const double a = double(own[r]) / total;
          const float square = norms[size_t(r)] - 2 * dot_of(out, &values[size_t(r * dv)], dv) + out_norm;
          sum[size_t(r)] += a * std::sqrt(std::max(0.0f, square));
          seen[size_t(r)] += a;
        }
      }
    }
    for (int64_t r = 0; r < head.rows; ++r) {
      const double distance = seen[size_t(r)] > 0 ? sum[size_t(r)] / seen[size_t(r)] : 1.0;
      rows.weight[size_t(r)] = rows.mass[size_t(r)] * distance;
    }
  }

  KeepSpec spec_;
  KvShape shape_;
};

}  // namespace

std::unique_ptr<Keeper> make_merging(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<MergeKeeper>(spec, shape);
}

}  // namespace longkv
