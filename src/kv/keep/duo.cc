// DuoAttention (arXiv 2410.10819): retrieval heads keep every row, streaming heads the first tokens and a window of the
// newest. Which is which comes from learned gates, one per KV head: those with the lowest gates stream. Rows stay at
// their positions.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <numeric>
#include <sstream>

#include "base/error.h"
#include "base/inputs.h"
#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"

namespace longkv {

namespace {

constexpr int64_t kMaxGateBytes = int64_t{16} << 20;

// The authors' full_attention_heads.tsv: a line per layer, a gate per KV head, [layers][kv_heads].
Result<std::vector<double>> read_gates(const std::string& path, const KvShape& shape) {
  LONGKV_TRY(check_readable(path));
  std::ifstream file(path);
  std::vector<double> gates;
  int64_t bytes = 0;
  int line_number = 0, rows = 0;
  for (std::string line; std::getline(file, line);) {
    ++line_number;
    bytes += int64_t(line.size()) + 1;
    if (bytes > kMaxGateBytes) return fail(Code::kInvalidArgument, "{}: too large for a table of gates", path);
    if (line.find_first_not_of(" \t\r") == std::string::npos || line[0] == '#') continue;
    std::istringstream words(line);
    int columns = 0;
    for (std::string word; words >> word; ++columns) {
      char* end = nullptr;
      const double gate = std::strtod(word.c_str(), &end);
      if (end != word.c_str() + word.size() || !std::isfinite(gate)) {
        return fail(Code::kInvalidArgument, "{}, line {}: '{}' is not a number", path, line_number, word.substr(0, 32));
      }
      gates.push_back(gate);
    }
    if (columns != shape.kv_heads) {
      return fail(Code::kInvalidArgument, "{}, line {}: {} gates, the model has {} KV heads; is it another model's?",
                  path, line_number, columns, shape.kv_heads);
    }
    ++rows;
  }
  if (rows != shape.layers) {
    return fail(Code::kInvalidArgument, "{}: gates of {} layers, the model has {}; is it another model's?", path, rows,
                shape.layers);
  }
  return gates;
}

class DuoKeeper : public Keeper {
 public:
  DuoKeeper(const KeepSpec& spec, const KvShape& shape, const std::vector<double>& gates)
      : spec_(spec), shape_(shape), streams_(gates.size(), 0) {
    // Published: gates at or above the quantile of the share keep all, after noise that parts ties.
    const int64_t n = int64_t(gates.size());
    const auto streaming = int64_t(std::ceil(spec.streaming_share * double(n - 1)));
    std::vector<size_t> order(gates.size());
    std::iota(order.begin(), order.end(), size_t{0});
    std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return gates[a] < gates[b]; });
    for (int64_t i = 0; i < streaming; ++i) streams_[order[size_t(i)]] = 1;
  }

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
  bool streams(int layer, int head) const {
    return streams_[size_t(layer) * size_t(shape_.kv_heads) + size_t(head)] != 0;
  }

  KeepSpec spec_;
  KvShape shape_;
  std::vector<char> streams_;  // [layers][kv_heads]
};

}  // namespace

Result<std::unique_ptr<Keeper>> make_duo(const KeepSpec& spec, const KvShape& shape) {
  LONGKV_ASSIGN(const std::vector<double> gates, read_gates(spec.gates, shape));
  return std::unique_ptr<Keeper>(std::make_unique<DuoKeeper>(spec, shape, gates));
}

}  // namespace longkv
