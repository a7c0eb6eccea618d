// KVzip (arXiv 2505.23416): the prompt is read again as text to be repeated; a row is worth the largest attention
// weight that it gets there, from any query and head of its group. No question is needed. One threshold over all layers
// and heads.
//
// The softmax runs over a part of the rows: sinks, the piece of the context that is repeated, and the repeated input
// itself, so that scores of different pieces are comparable. Not built: KVzip+, which weights by output norms.
#include <algorithm>
#include <limits>

#include "kv/attend_kernel.h"
#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"

namespace longkv {

namespace {

constexpr int64_t kQueriesAtOnce = 16;

struct Entry {
  float score;
  int32_t pos;
  int32_t layer;
  int32_t head;
  int32_t row;
};

class KvzipKeeper : public Keeper {
 public:
  KvzipKeeper(const KeepSpec& spec, const KvShape& shape)
      : spec_(spec), shape_(shape), scores_(size_t(shape.layers) * size_t(shape.kv_heads)) {}

  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.fields.pos = true;
    needs.ragged = true;
    needs.repeat_chunk = spec_.chunk;
    return needs;
  }

  // Nothing is dropped layer by layer.
  Status choose(const KeepInput& input, KeepChoice& choice) override {
    for (size_t h = 0; h < input.heads.size(); ++h) choice.rows[h] = all_rows(input.heads[h].rows);
    return {};
  }

  void repeated(const KeepRepeat& repeat) override {
    const int64_t group = shape_.group_size, d = shape_.dim_k;
    scratch_.resize(repeat.heads.size());
    for (int64_t begin = 0; begin < repeat.tokens; begin += kQueriesAtOnce) {
      const int64_t n = std::min(kQueriesAtOnce, repeat.tokens - begin);
      for (size_t h = 0; h < repeat.heads.size(); ++h) {
        Scratch& s = scratch_[h];
        const KvHeadView& head = repeat.heads[h];
        s.ranges.clear();
        if (repeat.context[h].begin > 0) s.ranges.push_back({0, std::min(spec_.sink, repeat.context[h].begin)});
        s.ranges.push_back(repeat.context[h]);
        // The repeated input up to the block's last query.
        s.ranges.push_back({repeat.input[h].begin, head.rows - repeat.tokens + begin + n});
        s.keys = 0;
        for (const RowRange& r : s.ranges) s.keys += r.end - r.begin;
        s.q.resize(size_t(n * group * d));
        for (int64_t t = 0; t < n; ++t) {
          const float* q = repeat.q + ((begin + t) * int64_t(repeat.heads.size()) + int64_t(h)) * group * d;
          std::copy_n(q, group * d, s.q.data() + t * group * d);
        }
        s.weights.resize(size_t(n * group * s.keys));
        AttendUnit unit;
        unit.q = s.q.data();
        unit.n_q = int(n * group);
        unit.kv = head;
        unit.ranges = s.ranges;
        attend_scores(unit, repeat.params, s.weights.data(), *repeat.pool);
      }
      repeat.pool->run(int64_t(repeat.heads.size()),
                       [&](int64_t h, int) { take(repeat, int(h), n, scratch_[size_t(h)]); });
    }
  }

  Status choose_all(const KvCache& cache, std::vector<KeepChoice>& choices) override {
    std::vector<Entry> entries;
    for (int l = 0; l < shape_.layers; ++l) {
      if (shape_.window_of(l) > 0) continue;
      for (int h = 0; h < shape_.kv_heads; ++h) {
        const KvHeadView head = cache.view(l, h);
        const std::vector<float>& own = scores(l, h);
        const int64_t first = head.rows - int64_t(own.size());
        for (int64_t r = first; r < head.rows; ++r) {
          const bool sink = head.pos[r] < spec_.sink;
          const float score = own[size_t(r - first)];
          entries.push_back({sink             ? std::numeric_limits<float>::infinity()
                             : score == score ? score
                                              : 0.0f,
                             head.pos[r], int32_t(l), int32_t(h), int32_t(r)});
        }
      }
    }
    const auto worse = [](const Entry& a, const Entry& b) {
      if (a.score != b.score) return a.score < b.score;
      if (a.pos != b.pos) return a.pos < b.pos;
      return a.layer != b.layer ? a.layer < b.layer : a.head < b.head;
    };
    std::vector<std::vector<char>> dropped(scores_.size());
    const auto drop = [&](std::vector<Entry>::iterator begin, std::vector<Entry>::iterator end) {
      const auto n = int64_t(double(end - begin) * (1 - spec_.keep_ratio));
      if (n < end - begin) std::nth_element(begin, begin + n, end, worse);
      for (auto e = begin; e != begin + n; ++e) {
        auto& mask = dropped[size_t(e->layer) * size_t(shape_.kv_heads) + size_t(e->head)];
        mask.resize(size_t(cache.rows(e->layer, e->head).v), 0);
        mask[size_t(e->row)] = 1;
      }
    };
    if (spec_.layerwise) {
      for (auto begin = entries.begin(); begin != entries.end();) {
        const auto end = std::find_if(begin, entries.end(), [&](const Entry& e) { return e.layer != begin->layer; });
        drop(begin, end);
        begin = end;
      }
    } else {
      drop(entries.begin(), entries.end());
    }
    for (int l = 0; l < shape_.layers; ++l) {
      choices[size_t(l)].rows.resize(size_t(shape_.kv_heads));
      for (int h = 0; h < shape_.kv_heads; ++h) {
        const size_t slot = size_t(l) * size_t(shape_.kv_heads) + size_t(h);
        auto& rows = choices[size_t(l)].rows[size_t(h)];
        rows = all_rows(cache.rows(l, h).v);
        if (!dropped[slot].empty()) std::erase_if(rows, [&](int64_t r) { return dropped[slot][size_t(r)] != 0; });
        scores_[slot].clear();
      }
    }
    return {};
  }

  void truncated(const KvCache& /*cache*/) override {
    for (auto& s : scores_) s.clear();
  }
  int64_t planned_rows(int, int, int64_t tokens) const override { return int64_t(double(tokens) * spec_.keep_ratio); }

 private:
  struct Scratch {
    std::vector<RowRange> ranges;
    int64_t keys = 0;
    std::vector<float> q, weights;
  };
  std::vector<float>& scores(int layer, int head) {
    return scores_[size_t(layer) * size_t(shape_.kv_heads) + size_t(head)];
  }

  // Softmax of n tokens' query heads over their keys, and the largest weight of each context row.
  void take(const KeepRepeat& repeat, int h, int64_t n, Scratch& s) {
    const int64_t group = shape_.group_size;
    const RowRange context = repeat.context[size_t(h)];
    std::vector<float>& own = scores(repeat.layer, h);
    own.resize(size_t(repeat.input[size_t(h)].begin - repeat.first_row[size_t(h)]), 0.0f);
    const int64_t sinks = s.ranges.size() == 3 ? s.ranges[0].end : 0;
    float* best = own.data() + (context.begin - repeat.first_row[size_t(h)]);
    for (int64_t i = 0; i < n * group; ++i) {
      float* w = s.weights.data() + i * s.keys;
      const int64_t visible = s.keys - (n - 1 - i / group);
      const float top = *std::max_element(w, w + visible);
      for (int64_t k = 0; k < visible; ++k) w[k] -= top;
      exp_nonpositive(w, w, visible);
      double total = 0;
      for (int64_t k = 0; k < visible; ++k) total += w[k];
      const auto inverse = float(1.0 / total);
      for (int64_t r = 0; r < context.end - context.begin; ++r) best[r] = std::max(best[r], w[sinks + r] * inverse);
    }
  }

  KeepSpec spec_;
  KvShape shape_;
  std::vector<std::vector<float>> scores_;  // [layers][kv_heads][rows of the prompt]
  std::vector<Scratch> scratch_;            // [kv_heads]
};

}  // namespace

std::unique_ptr<Keeper> make_kvzip(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<KvzipKeeper>(spec, shape);
}

}  // namespace longkv
