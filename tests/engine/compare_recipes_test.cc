// Recipes compared on one reading of a prompt give what each gives when it reads the prompt itself.
#include "engine/compare_recipes.h"

#include <gtest/gtest.h>

#include <cmath>

#include "engine/likelihood.h"
#include "support/golden.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::random_ids;

constexpr int64_t kSteps = 24;
constexpr int64_t kContext = 512;

std::shared_ptr<const LoadedModel> tiny(const std::string& name) {
  auto model = LoadedModel::load(test::tiny_model(name));
  EXPECT_TRUE(model.ok()) << model.status().message();
  return *model;
}

std::unique_ptr<Session> make(const std::shared_ptr<const LoadedModel>& model, const Recipe& recipe, int64_t chunk,
                              ThreadPool& pool) {
  SessionOptions o;
  o.context = kContext;
  o.recipe = recipe;
  o.chunk = chunk;
  auto session = Session::create(model, o, pool);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return std::move(session).value();
}

std::vector<Recipe> recipes(const std::vector<std::string>& texts) {
  std::vector<Recipe> out;
  for (const std::string& text : texts) {
    const Result<Recipe> r = parse_recipe(text);
    EXPECT_TRUE(r.ok()) << text << ": " << r.status().message();
    out.push_back(*r);
  }
  return out;
}

TEST(CompareRecipes, FullAttentionLosesNothing) {
  ThreadPool pool(2);
  for (const char* name : {"llama", "gemma3"}) {
    const auto model = tiny(name);
    const auto session = make(model, Recipe{}, 64, pool);
    const auto prompt = random_ids(200, model->config().vocab, 1);
    CompareOptions options;
    options.steps = kSteps;
    const auto reports = compare_recipes(*session, recipes({"full", "quest:budget=480"}), prompt, options, {}, nullptr);
    ASSERT_TRUE(reports.ok()) << reports.status().message();
    ASSERT_EQ(reports->size(), 3u);
    for (const RecipeReport& r : *reports) {
      EXPECT_EQ(r.kl_max, 0.0) << r.label;
      EXPECT_EQ(r.same_top, 1.0) << r.label;
      EXPECT_NEAR(r.captured_mass, 1.0, 1e-5) << r.label;
      EXPECT_LT(r.output_error, 1e-6) << r.label;
      EXPECT_GT(r.seconds_per_token, 0.0) << r.label;
    }
    EXPECT_EQ((*reports)[0].kept_bytes, (*reports)[1].kept_bytes);
    EXPECT_GT((*reports)[2].index_bytes_held, 0);
  }
}

TEST(CompareRecipes, EqualsReadingThePromptAlone) {
  ThreadPool pool(2);
  const std::vector<std::string> texts = {"quest:budget=64,dense_layers=0",
                                          "ktransformers:block=16,budget=128",
                                          "ktransformers-preselect:block=16,budget=192,preselect=6",
                                          "streaming:budget=64",
                                          "snapkv:budget=80",
                                          "h2o:budget=64",
                                          "tova:budget=64",
                                          "snapkv:budget=120+quest:budget=64"};
  for (const char* name : {"llama", "gemma3"}) {
    const auto model = tiny(name);
    const int64_t vocab = model->config().vocab;
    const auto prompt = random_ids(230, vocab, 2);
    CompareOptions options;
    options.steps = kSteps;
    options.continuation = random_ids(kSteps, vocab, 3);
    const std::vector<Recipe> list = recipes(texts);
    const auto session = make(model, Recipe{}, 64, pool);
    const auto reports = compare_recipes(*session, list, prompt, options, {}, nullptr);
    ASSERT_TRUE(reports.ok()) << reports.status().message();

    const auto full = make(model, Recipe{}, 64, pool);
    ASSERT_TRUE(full->prefill(prompt).ok());
    std::vector<std::unique_ptr<Session>> own;
    for (const Recipe& r : list) {
      own.push_back(make(model, r, 64, pool));
      ASSERT_TRUE(own.back()->prefill(prompt).ok());
    }
    std::vector<double> kl(list.size(), 0.0), worst(list.size(), 0.0), nll(list.size(), 0.0);
    bool first = true;
    for (int32_t id : options.continuation) {
      for (size_t i = 0; i < own.size() && !first; ++i) {
        nll[i] += negative_log_likelihood(own[i]->logits().data(), vocab, id);
      }
      first = false;
      ASSERT_TRUE(full->decode(id).ok());
      for (size_t i = 0; i < own.size(); ++i) {
        ASSERT_TRUE(own[i]->decode(id).ok());
        const double step = kl_divergence(full->logits().data(), own[i]->logits().data(), vocab);
        kl[i] += step / double(kSteps);
        worst[i] = std::max(worst[i], step);
      }
    }
    for (size_t i = 0; i < list.size(); ++i) {
      const RecipeReport& r = (*reports)[i + 1];
      EXPECT_EQ(r.kl_mean, kl[i]) << name << " " << texts[i];
      EXPECT_EQ(r.kl_max, worst[i]) << name << " " << texts[i];
      EXPECT_GT(r.kl_max, 0.0) << name << " " << texts[i];
      EXPECT_NEAR(r.perplexity, std::exp(nll[i] / double(kSteps - 1)), 1e-9 * r.perplexity) << name << " " << texts[i];
    }
  }
}

TEST(CompareRecipes, RefusesWhatCannotBeCompared) {
  ThreadPool pool(1);
  const auto model = tiny("llama");
  const auto session = make(model, Recipe{}, 64, pool);
  CompareOptions options;
  options.steps = kContext;
  EXPECT_EQ(compare_recipes(*session, {}, random_ids(10, 50, 1), options, {}, nullptr).status().code(),
            Code::kInvalidArgument);
  options.steps = 4;
  EXPECT_EQ(compare_recipes(*session, {}, {}, options, {}, nullptr).status().code(), Code::kInvalidArgument);
  ASSERT_TRUE(session->prefill(random_ids(3, 50, 1)).ok());
  EXPECT_EQ(compare_recipes(*session, {}, random_ids(10, 50, 1), options, {}, nullptr).status().code(),
            Code::kInvalidArgument);
}

}  // namespace
}  // namespace longkv
