// The rows that our keep stages keep, against NVIDIA's kvpress on the same model and prompt.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <map>

#include "engine/session.h"
#include "kv/keep/keep.h"
#include "support/kvpress_golden.h"
#include "support/kvpress_recipe.h"
#include "support/paths.h"

namespace longkv {
namespace {

using test::KvpressCase;
using test::KvpressCut;
using test::KvpressGolden;
using test::KvpressRecord;
using Lists = std::vector<std::vector<std::vector<int64_t>>>;

// The recording was made without a chat template, in tokens that its prompts name.
SessionOptions with_repeats(SessionOptions options, const KvpressCase& c, const KvpressRecord& record) {
  if (record.repeat_ids.empty()) return options;
  const auto chunk = size_t(options.recipe.keep.chunk);
  options.context *= 3;
  options.repeat_prefix = [&c, &record, chunk](int64_t i, std::span<const int32_t>) {
    std::vector<int32_t> ids = record.repeat_ids.at(size_t(i));
    ids.resize(ids.size() - std::min(chunk, c.ids.size() - size_t(i) * chunk));
    return ids;
  };
  return options;
}

std::shared_ptr<const LoadedModel> load(const KvpressGolden& golden) {
  std::string path = std::string(LONGKV_TEST_DIR) + "/golden/models/" + golden.model;
  if (!std::filesystem::exists(path)) path = test::fetched_model(golden.model);
  if (path.empty()) return nullptr;
  auto model = LoadedModel::load(path);
  EXPECT_TRUE(model.ok()) << model.status().message();
  return model.ok() ? model.value() : nullptr;
}

SessionOptions options_for(const std::string& keep, int64_t n) {
  SessionOptions options;
  options.context = n + 1;
  options.products = ProductType::kF32;
  options.chunk = 100;
  auto recipe = parse_recipe(keep + " + store=f32");
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  options.recipe = recipe.value();
  return options;
}

struct Totals {
  int lists = 0;
  int64_t compared = 0, ties = 0;
  void add(const test::KvpressDifference& difference) {
    EXPECT_EQ(difference.wrong, "");
    ++lists;
    compared += difference.compared;
    ties += difference.ties;
  }
};

TEST(Kvpress, TinyModelsKeepTheSameRows) {
  ThreadPool pool(2);
  for (const char* name : {"llama", "qwen3"}) {
    const KvpressGolden golden = test::load_kvpress(name);
    const auto model = load(golden);
    ASSERT_NE(model, nullptr);
    Totals totals;
    for (const KvpressCase& c : golden.cases) {
      for (const KvpressRecord& record : c.records) {
        for (const KvpressCut& cut : record.cuts) {
          const std::string keep = test::kvpress_keep(record, cut, int64_t(c.ids.size()));
          if (keep.empty()) continue;
          auto session =
              Session::create(model, with_repeats(options_for(keep, int64_t(c.ids.size())), c, record), pool);
          ASSERT_TRUE(session.ok()) << session.status().message();
          ASSERT_TRUE((*session)->prefill(c.ids).ok());
          Lists found;
          for (const int layer : c.layers) {
            auto& heads = found.emplace_back();
            for (int h = 0; h < golden.kv_heads; ++h) heads.push_back((*session)->kv().kept_positions(layer, h));
          }
          totals.add(compare_kept(c, record, cut, found));
        }
      }
    }
    EXPECT_GT(totals.lists, 50) << name;
    EXPECT_LT(double(totals.ties), 1e-3 * double(totals.compared)) << name;
  }
}

// Asks several keepers for their choice and follows none: the prompt's attention reads every row whatever is evicted.
class AskingKeeper : public Keeper {
 public:
  struct Asked {
    const KvpressRecord* record;
    const KvpressCut* cut;
    std::unique_ptr<Keeper> keeper;
    Lists found;
  };
  explicit AskingKeeper(std::vector<Asked>& asked) : asked_(asked) {}
  KeepNeeds needs() const override {
    KeepNeeds needs = asked_[0].keeper->needs();
    needs.step = KeepStep::kNone;
    return needs;
  }
  Status choose(const KeepInput& input, KeepChoice& choice) override {
    for (Asked& a : asked_) {
      KeepChoice own;
      own.rows.resize(input.heads.size());
      const Status s = a.keeper->choose(input, own);
      if (!s.ok()) return s;
      a.found.push_back(own.rows);
    }
    for (size_t h = 0; h < input.heads.size(); ++h) {
      for (int64_t r = 0; r < input.heads[h].rows; ++r) choice.rows[h].push_back(r);
    }
    return {};
  }
  int64_t planned_rows(int, int, int64_t tokens) const override { return tokens; }

 private:
  std::vector<Asked>& asked_;
};

TEST(Kvpress, SmolLM2KeepsTheSameRows) {
  const KvpressGolden golden = test::load_kvpress("smollm2-q4_1");
  const auto model = load(golden);
  if (model == nullptr) GTEST_SKIP() << golden.model << " is not there; scripts/fetch_models brings it";
  ThreadPool pool(2);
  const ModelConfig& config = model->config();
  const KvpressCase& c = golden.cases[0];  // the shorter prompt, every layer
  const auto n = int64_t(c.ids.size());
  std::map<std::string, std::vector<AskingKeeper::Asked>> groups;  // by what they need of the prompt
  for (const KvpressRecord& record : c.records) {
    for (const KvpressCut& cut : record.cuts) {
      const std::string keep = test::kvpress_keep(record, cut, n);
      if (keep.empty() || !record.repeat_ids.empty()) continue;
      auto keeper = make_keeper(options_for(keep, n).recipe.keep, config.kv_shape());
      ASSERT_TRUE(keeper.ok()) << keeper.status().message();
      const KeepNeeds needs = (*keeper)->needs();
      groups[fmt::format("{} {}", needs.mass_queries, needs.statistics_from)].push_back(
          {&record, &cut, std::move(keeper).value(), {}});
    }
  }
  Totals totals;
  for (auto& [needs, asked] : groups) {
    SessionOptions options = options_for("keep=all", n);
    options.keeper = [&asked = asked] { return std::make_unique<AskingKeeper>(asked); };
    auto session = Session::create(model, options, pool);
    ASSERT_TRUE(session.ok()) << session.status().message();
    ASSERT_TRUE((*session)->prefill(c.ids).ok());
    for (const AskingKeeper::Asked& a : asked) totals.add(compare_kept(c, *a.record, *a.cut, a.found));
  }
  // What reads the prompt again needs a session of its own.
  const KvpressRecord& kvzip = c.find("kvzip");
  const KvpressCut& cut = kvzip.cuts.at(1);
  auto session =
      Session::create(model, with_repeats(options_for(test::kvpress_keep(kvzip, cut, n), n), c, kvzip), pool);
  ASSERT_TRUE(session.ok()) << session.status().message();
  ASSERT_TRUE((*session)->prefill(c.ids).ok());
  Lists found;
  for (int layer = 0; layer < golden.layers; ++layer) {
    auto& heads = found.emplace_back();
    for (int h = 0; h < golden.kv_heads; ++h) heads.push_back((*session)->kv().kept_positions(layer, h));
  }
  totals.add(compare_kept(c, kvzip, cut, found));
  EXPECT_GT(totals.lists, 20);
  EXPECT_LT(double(totals.ties), 1e-3 * double(totals.compared));
}

}  // namespace
}  // namespace longkv
