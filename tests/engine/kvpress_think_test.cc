// The K channels that ThinK keeps, against NVIDIA's kvpress on the same model and prompt.
//
// kvpress drops int(dim * ratio) channels; our recipes drop whole steps of 16 or 32, so the scores are compared at
// kvpress's own count, through the observer that every recipe uses.
#include <gtest/gtest.h>

#include <algorithm>

#include "engine/session.h"
#include "kv/keep/keep.h"
#include "kv/mask/think.h"
#include "support/kvpress_golden.h"
#include "support/paths.h"

namespace longkv {
namespace {

using Lists = std::vector<std::vector<std::vector<int64_t>>>;  // [layers][kv head], ascending

// Our channel of a recorded one. kvpress counts in the order of transformers, where channels i and i + dim / 2 turn
// together; GGUF files of the llama family put such pairs side by side.
int64_t our_channel(int64_t recorded, int64_t dim, RopePairs pairs) {
  if (pairs == RopePairs::kHalves) return recorded;
  return recorded < dim / 2 ? 2 * recorded : 2 * (recorded - dim / 2) + 1;
}

// Ranks the channels of each head when a layer's prompt is complete; keeps every row.
class ChannelKeeper : public Keeper {
 public:
  ChannelKeeper(const KvShape& shape, int64_t window, Lists& ranks) : shape_(shape), window_(window), ranks_(ranks) {}
  KeepNeeds needs() const override {
    KeepNeeds needs;
    needs.last_queries = window_;
    return needs;
  }
  Status choose(const KeepInput& input, KeepChoice& choice) override {
    ThinkObserver observer(shape_);
    observer.add(input.layer, input.queries->q.data(), int64_t(input.queries->positions.size()));
    for (size_t h = 0; h < input.heads.size(); ++h) {
      const KvHeadView& head = input.heads[h];
      // rank[c]: the smallest number of channels with which c is kept.
      std::vector<int64_t> rank(size_t(shape_.dim_k), 0);
      for (int64_t kept = shape_.dim_k; kept >= 1; --kept) {
        for (const uint16_t c : observer.mask(input.layer, int(h), head, kept).channels) rank[c] = kept;
      }
      ranks_[size_t(input.layer)].push_back(std::move(rank));
      for (int64_t r = 0; r < head.rows; ++r) choice.rows[h].push_back(r);
    }
    return {};
  }
  int64_t planned_rows(int, int, int64_t tokens) const override { return tokens; }

 private:
  KvShape shape_;
  int64_t window_;
  Lists& ranks_;
};

class KvpressThink : public ::testing::TestWithParam<std::string> {};

TEST_P(KvpressThink, KeepsTheSameChannels) {
  const test::KvpressGolden golden = test::load_kvpress(GetParam());
  const bool tiny = golden.layers < 10;
  const std::string path = tiny ? test::golden("models/" + golden.model) : test::fetched_model(golden.model);
  if (path.empty()) GTEST_SKIP() << golden.model << " is not there; scripts/fetch_models brings it";
  auto model = LoadedModel::load(path);
  ASSERT_TRUE(model.ok()) << model.status().message();
  const ModelConfig& config = (*model)->config();
  const KvShape shape = config.kv_shape();
  ThreadPool pool(2);
  const test::KvpressCase& c = golden.cases[0];
  const test::KvpressRecord& record = c.find("think");

  Lists ranks(size_t(config.layers));
  SessionOptions options;
  options.context = int64_t(c.ids.size());
  options.products = ProductType::kF32;
  options.chunk = 100;
  auto recipe = parse_recipe("keep=all + store=f32");
  ASSERT_TRUE(recipe.ok()) << recipe.status().message();
  options.recipe = *recipe;
  options.keeper = [&] {
    return std::make_unique<ChannelKeeper>(shape, record.parameters.at("window_size").get<int64_t>(), ranks);
  };
  auto session = Session::create(*model, options, pool);
  ASSERT_TRUE(session.ok()) << session.status().message();
  ASSERT_TRUE((*session)->prefill(c.ids).ok());

  const RopePairs pairs = (*model)->rope_for(options.context).pairs;
  for (const test::KvpressCut& cut : record.cuts) {
    const int64_t kept = shape.dim_k - int64_t(double(shape.dim_k) * cut.ratio);
    Lists found;
    for (const int layer : c.layers) {
      auto& heads = found.emplace_back();
      for (const std::vector<int64_t>& rank : ranks[size_t(layer)]) {
        auto& channels = heads.emplace_back();
        for (int64_t i = 0; i < shape.dim_k; ++i) {
          if (rank[size_t(our_channel(i, shape.dim_k, pairs))] <= kept) channels.push_back(i);
        }
      }
    }
    EXPECT_EQ(compare_kept(c, record, cut, found).wrong, "");
  }
}

INSTANTIATE_TEST_SUITE_P(All, KvpressThink, ::testing::Values("llama", "qwen3", "smollm2-q4_1"), [](const auto& info) {
  std::string name = info.param;
  std::replace(name.begin(), name.end(), '-', '_');
  return name;
});

}  // namespace
}  // namespace longkv
