// DuoAttention (arXiv 2410.10819): retrieval heads keep every row, streaming heads the first tokens and a window of the
// newest. Which is which comes from learned gates, one per KV head: those with the lowest gates stream. Rows stay at
// their positions.
#include <algorithm>
#include <cmath>

#include "base/error.h"
#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"
#include "kv/mask/gates.h"

namespace longkv {

namespace {

class DuoKeeper : public Keeper {
 public:
  DuoKeeper(const KeepSpec& spec, const KvShape& shape, const std::vector<double>& gates)
      : spec_(spec), shape_(shape), streams_(streaming_heads(gates, spec.streaming_share)) {}

  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.fields.pos = true;
    needs.step = KeepStep::kBeforeAttention;
    needs.ragged = true;
    return needs;
  }

  Status choose(const KeepInput& input, KeepChoice& choice) override {
    for (size_t h = 0; h < input.heads.size(); ++h) {
      const KvHeadView& head = input.heads[h];
      choice.rows[h] = all_rows(head.rows);
      if (!streams(input.layer, int(h))) continue;
      const std::vector<char> newest = newest_rows(head, spec_.window);
      std::erase_if(choice.rows[h], [&](int64_t r) { return newest[size_t(r)] == 0 && head.pos[r] >= spec_.sink; });
    }
    return {};
  }

  void step(const KeepStepInput& input, std::span<int64_t> evict) override {
    for (int h = 0; h < shape_.kv_heads; ++h) {
      const KvHeadView head = input.cache->view(input.layer, h);
      if (streams(input.layer, h) && head.rows > spec_.sink + spec_.window) {
        evict[size_t(h)] = oldest_row(head, spec_.sink);
      }
    }
  }

  int64_t planned_rows(int layer, int, int64_t tokens) const override {
    int64_t rows = 0;
    for (int h = 0; h < shape_.kv_heads; ++h) {
      rows += streams(layer, h) ? std::min(tokens, spec_.sink + spec_.window) : tokens;
    }
    return (rows + shape_.kv_heads - 1) / shape_.kv_heads;
  }

 private:
  bool streams(int layer, int head) const { return streams_[size_t(layer) * size_t(shape_.kv_heads) + size_t(head)]; }

  KeepSpec spec_;
  KvShape shape_;
  std::vector<bool> streams_;  // [layers][kv_heads]
};

}  // namespace

Result<std::unique_ptr<Keeper>> make_duo(const KeepSpec& spec, const KvShape& shape, const std::string& model) {
  LONGKV_ASSIGN(const DuoGates gates, load_gates(spec.gates, shape, model));
  return std::unique_ptr<Keeper>(std::make_unique<DuoKeeper>(spec, shape, gates.values));
}

}  // namespace longkv
