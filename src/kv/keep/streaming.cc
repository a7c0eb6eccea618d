// StreamingLLM (arXiv 2309.17453): the first tokens as attention sinks and a window of the newest ones.
//
// Positions: absolute, or inside the cache as in the paper, where the row of rank r has position r. RoPE's logits
// depend on differences alone, so the window and the query keep their true positions and only the few sinks are turned
// forward by the number of dropped tokens: the same logits without touching the window.
#include <algorithm>

#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"

namespace longkv {

namespace {

class StreamingKeeper : public Keeper {
 public:
  StreamingKeeper(const KeepSpec& spec, const KvShape& shape) : spec_(spec), shape_(shape) {
    if (spec.cache_positions) sinks_.resize(size_t(shape.layers));
  }

  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.fields.pos = true;
    needs.step = KeepStep::kBeforeAttention;
    needs.rotate = spec_.cache_positions;
    return needs;
  }

  Status choose(const KeepInput& input, KeepChoice& choice) override {
    for (size_t h = 0; h < input.heads.size(); ++h) {
      const KvHeadView& head = input.heads[h];
      std::vector<char> mask = newest_rows(head, spec_.window);
      for (int64_t r = 0; r < head.rows; ++r) mask[size_t(r)] |= char(head.pos[r] < spec_.sink);
      choice.rows[h] = rows_of_mask(mask);
    }
    return {};
  }

  void moved(const KeepInput& before, const KeepChoice& choice, KvCache& cache) override {
    turn_sinks(before.layer, before.tokens - int64_t(choice.rows[0].size()), cache, before.rotate);
  }

  void step(const KeepStepInput& input, std::span<int64_t> evict) override {
    KvCache& cache = *input.cache;
    if (cache.rows(input.layer, 0).v <= spec_.sink + spec_.window) return;
    for (int h = 0; h < shape_.kv_heads; ++h) {
      evict[size_t(h)] = oldest_row(cache.view(input.layer, h), spec_.sink);
    }
    turn_sinks(input.layer, cache.tokens(input.layer).v - spec_.sink - spec_.window, cache, input.rotate);
  }

  void truncated(const KvCache& cache) override {
    if (cache.tokens(0).v > 0) return;
    for (auto& layer : sinks_) layer.clear();
  }

  void visit(KvState& state, const KvCache& cache) override {
    for (size_t layer = 0; layer < sinks_.size(); ++layer) {
      const KvState::Level level(state, "l", int64_t(layer));
      const auto n = size_t(spec_.sink * shape_.kv_heads * shape_.dim_k);
      state.list("sinks", sinks_[layer], n);
      const bool held = sinks_[layer].size() == n && cache.rows(int(layer), 0).v >= spec_.sink;
      if (!state.expect(held || sinks_[layer].empty(), "the sinks")) return;
    }
  }

  int64_t planned_rows(int, int, int64_t tokens) const override { return std::min(tokens, spec_.sink + spec_.window); }

 private:
  // Sinks lie in rows [0, sink): they come first and are never evicted. They are turned from their first state each
  // time, so that rounding does not add up.
  void turn_sinks(int layer, int64_t dropped, KvCache& cache, const KvRotate* rotate) {
    if (!spec_.cache_positions || dropped <= 0 || spec_.sink == 0) return;
    const int64_t d = shape_.dim_k, n = spec_.sink * shape_.kv_heads;
    std::vector<float>& first = sinks_[size_t(layer)];
    if (first.empty()) {
      first.resize(size_t(n * d));
      for (int64_t i = 0; i < n; ++i) {
        cache.read_row(layer, int(i / spec_.sink), i % spec_.sink, first.data() + i * d, nullptr);
      }
    }
    turned_ = first;
    (*rotate)(layer, double(dropped), turned_.data(), n, d);
    for (int64_t i = 0; i < n; ++i) {
      cache.write_row(layer, int(i / spec_.sink), i % spec_.sink, turned_.data() + i * d, nullptr);
    }
  }

  KeepSpec spec_;
  KvShape shape_;
  std::vector<std::vector<float>> sinks_;  // [layers][kv_heads * sink * dim_k], at their own positions
  std::vector<float> turned_;
};

}  // namespace

std::unique_ptr<Keeper> make_streaming(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<StreamingKeeper>(spec, shape);
}

}  // namespace longkv
