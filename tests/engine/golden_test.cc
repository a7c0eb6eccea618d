// Logits and greedy text of every family and of the real models against Hugging Face transformers, in fp32.
#include "support/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>

#include "engine/session.h"
#include "support/paths.h"

namespace longkv {
namespace {

using test::Golden;

std::string model_path(const Golden& g) {
  const std::string tiny = std::string(LONGKV_TEST_DIR) + "/golden/models/" + g.model;
  if (std::filesystem::exists(tiny)) return tiny;
  if (std::filesystem::exists(test::repo_model(g.model))) return test::repo_model(g.model);
  return test::fetched_model(g.model);
}

// transformers derives the NTK base from the length of the sequence. The file carries the base that this gave; here it
// must come from our own formula.
RopeOverrides overrides_for(const Golden& g) {
  RopeOverrides o;
  if (g.name == "llama-ntk") {
    o.base = 10000.0;
    o.scaling = RopeScaling::kNtk;
    o.factor = 4.0 * 160 / 64 - 3;  // factor * tokens / trained - (factor - 1), as recorded beside the logits
  }
  return o;
}

std::unique_ptr<Session> make(const std::shared_ptr<const LoadedModel>& model, int64_t context, PrefillOrder order,
                              int64_t chunk, ThreadPool& pool) {
  SessionOptions options;
  options.context = context;
  options.products = ProductType::kF32;
  options.recipe.store = {KvType::kF32, KvType::kF32};
  options.order = order;
  options.chunk = chunk;
  auto s = Session::create(model, options, pool);
  EXPECT_TRUE(s.ok()) << s.status().message();
  return std::move(s).value();
}

int32_t best_of(std::span<const float> logits) {
  return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
}

std::vector<int32_t> decode_greedily(Session& session, const test::GoldenGreedy& recorded) {
  std::vector<int32_t> found;
  EXPECT_TRUE(session.prefill(recorded.prompt).ok());
  for (size_t i = 0; i < recorded.continuation.size(); ++i) {
    found.push_back(best_of(session.logits()));
    if (found.back() != recorded.continuation[i] || i + 1 == recorded.continuation.size()) break;
    EXPECT_TRUE(session.decode(found.back()).ok());
  }
  return found;
}

std::vector<int32_t> choose_in_prompt(Session& session, const test::GoldenGreedy& recorded, int64_t vocab) {
  std::vector<int32_t> ids = recorded.prompt, found;
  ids.insert(ids.end(), recorded.continuation.begin(), recorded.continuation.end() - 1);
  const auto sink = [&](int64_t, int64_t n, const float* logits) {
    for (int64_t i = 0; i < n; ++i) found.push_back(best_of({logits + i * vocab, size_t(vocab)}));
  };
  EXPECT_TRUE(session.prefill(ids, {}, nullptr, sink, int64_t(recorded.prompt.size()) - 1).ok());
  return found;
}

class GoldenModel : public ::testing::TestWithParam<std::string> {};

TEST_P(GoldenModel, LogitsMatchTransformers) {
  const Golden g = test::load_golden(GetParam());
  const std::string path = model_path(g);
  if (path.empty()) GTEST_SKIP() << g.model << " is not there; scripts/fetch_models brings it";
  auto model = LoadedModel::load(path, overrides_for(g));
  ASSERT_TRUE(model.ok()) << model.status().message();
  ThreadPool pool(2);
  for (const auto& c : g.cases) {
    // Longrope chooses its factors by the context: exactly what the case needs, as transformers does by length.
    const int64_t context = int64_t(c.ids.size());
    for (auto [order, chunk] :
         {std::pair{PrefillOrder::kChunkMajor, int64_t(512)}, std::pair{PrefillOrder::kChunkMajor, int64_t(37)}}) {
      auto session = make(*model, context, order, chunk, pool);
      std::vector<float> rows(c.ids.size() * size_t(g.vocab));
      const Status s = session->prefill(c.ids, {}, nullptr, [&](int64_t first, int64_t n, const float* logits) {
        std::copy(logits, logits + n * g.vocab, rows.begin() + first * g.vocab);
      });
      ASSERT_TRUE(s.ok()) << s.message();
      for (size_t i = 0; i < c.positions.size(); ++i) {
        const std::span<const float> row(rows.data() + c.positions[i] * g.vocab, size_t(g.vocab));
        EXPECT_LT(test::relative_error(g, c, i, row), 1e-4)
            << c.name << " position " << c.positions[i] << " chunk " << chunk;
      }
    }
  }
}

TEST_P(GoldenModel, GreedyTextMatchesUpToTheFirstTie) {
  const Golden g = test::load_golden(GetParam());
  const std::string path = model_path(g);
  if (path.empty()) GTEST_SKIP() << g.model << " is not there; scripts/fetch_models brings it";
  auto model = LoadedModel::load(path, overrides_for(g));
  ASSERT_TRUE(model.ok()) << model.status().message();
  ThreadPool pool(2);
  size_t same = 0, ties = 0;
  for (size_t text = 0; text < g.greedy.size(); ++text) {
    const auto& recorded = g.greedy[text];
    const auto session = make(*model, int64_t(recorded.prompt.size() + recorded.continuation.size()),
                              PrefillOrder::kLayerMajor, 512, pool);
    // Decoding token by token in fp32 is slow, so the first text is decoded and the others are read as prompts: as long
    // as every choice so far was the recorded one, both ask the same question.
    const std::vector<int32_t> found =
        text == 0 ? decode_greedily(*session, recorded) : choose_in_prompt(*session, recorded, g.vocab);
    const test::Parting parting = test::first_parting(recorded, found);
    if (parting.step == recorded.continuation.size()) {
      ++same;
    } else {
      EXPECT_TRUE(parting.tie) << "parted at step " << parting.step << " with a gap of " << recorded.gap[parting.step];
      ++ties;
    }
  }
  RecordProperty("identical_texts", int(same));
  RecordProperty("texts_parted_at_a_tie", int(ties));
  std::printf("%s: %zu texts identical, %zu parted at a tie below 1e-3\n", g.name.c_str(), same, ties);
}

// Every recording in tests/golden/models.
std::vector<std::string> names() {
  std::vector<std::string> all;
  for (const auto& entry : std::filesystem::directory_iterator(std::string(LONGKV_TEST_DIR) + "/golden/models")) {
    if (entry.path().extension() == ".json") all.push_back(entry.path().stem());
  }
  std::sort(all.begin(), all.end());
  return all;
}

INSTANTIATE_TEST_SUITE_P(All, GoldenModel, ::testing::ValuesIn(names()), [](const auto& info) {
  std::string name = info.param;
  for (char& ch : name) {
    if (!std::isalnum(static_cast<unsigned char>(ch))) ch = '_';
  }
  return name;
});

}  // namespace
}  // namespace longkv
