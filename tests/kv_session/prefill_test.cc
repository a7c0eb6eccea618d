// The prefill stage inside a session: where it applies, and what it reports.
#include <gtest/gtest.h>

#include "harness.h"
#include "kv/recipe.h"

namespace longkv::test {
namespace {

Recipe recipe_of(const std::string& text) {
  auto recipe = parse_recipe(text);
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return recipe.ok() ? recipe.value() : Recipe{};
}

class PrefillStageTest : public ::testing::Test {
 protected:
  KvShape shape_ = make_shape(2, 2, 2, 16);
  Tokens tokens_{shape_, 1000, 11};
  ThreadPool pool_{2};

  std::vector<float> read(const std::string& recipe, int64_t end, int64_t chunk, double* density = nullptr) {
    const auto session = make_session(shape_, recipe_of(recipe), 1024, pool_);
    if (session == nullptr) return {};
    auto out = feed_prompt(*session, tokens_, 0, end, chunk);
    if (density != nullptr) *density = session->prefill_stats().density();
    return out;
  }
};

TEST_F(PrefillStageTest, ShortPromptsHaveTheBitsOfDense) {
  double density = 0;
  const auto dense = read("store=f32", 700, 128);
  EXPECT_EQ(read("prefill=a_shape(sink=8,window=32,dense_layers=0,threshold=701) + store=f32", 700, 128, &density),
            dense);
  EXPECT_EQ(density, 1.0);
  EXPECT_NE(read("prefill=a_shape(sink=8,window=32,dense_layers=0,threshold=700) + store=f32", 700, 128, &density),
            dense);
  EXPECT_LT(density, 0.75);
  // The first layer attends everything; its output is what read() returns.
  EXPECT_EQ(read("prefill=a_shape(sink=8,window=32,dense_layers=1,threshold=700) + store=f32", 700, 128, &density),
            dense);
  EXPECT_LT(density, 0.9);
  EXPECT_GT(density, 0.5);
}

TEST_F(PrefillStageTest, PatternsThatHoldEverythingHaveTheBitsOfDense) {
  const auto dense = read("store=f16", 900, 256);
  for (const char* recipe : {"prefill=a_shape(sink=0,window=1000,dense_layers=0,threshold=0)",
                             "prefill=vertical_slash(columns=1000,diagonals=30,dense_layers=0,threshold=0)",
                             "prefill=vertical_slash(columns=30,diagonals=1000,dense_layers=0,threshold=0)",
                             "prefill=block_sparse(blocks=100,dense_layers=0,threshold=0)",
                             "prefill=xattention(min_blocks=100,dense_layers=0,threshold=0)",
                             "prefill=xattention(min_blocks=100,heads=kv,dense_layers=0,threshold=0)",
                             "prefill=flex(min_budget=2000,dense_layers=0,threshold=0)"}) {
    double density = 0;
    ASSERT_EQ(read(recipe, 900, 256, &density), dense) << recipe;
    EXPECT_EQ(density, 1.0) << recipe;
  }
}

TEST_F(PrefillStageTest, XAttentionDoesNotDependOnTheChunk) {
  const std::string recipe = "prefill=xattention(tau=0.5,min_blocks=1,last=0,dense_layers=0,threshold=0)";
  const auto whole = read(recipe, 1000, 1000);
  for (int64_t chunk : {128, 256, 512}) EXPECT_EQ(read(recipe, 1000, chunk), whole) << chunk;
}

TEST_F(PrefillStageTest, SecondPromptAfterTheFirstAndAfterACut) {
  const std::string recipe = "prefill=xattention(tau=0.5,min_blocks=1,last=40,dense_layers=0,threshold=0) + store=f32";
  const auto session = make_session(shape_, recipe_of(recipe), 1024, pool_);
  ASSERT_NE(session, nullptr);
  feed_prompt(*session, tokens_, 0, 300, 128);
  const auto second = feed_prompt(*session, tokens_, 300, 777, 128);
  const double density = session->prefill_stats().density();
  ASSERT_TRUE(session->truncate({300}).ok());
  EXPECT_EQ(feed_prompt(*session, tokens_, 300, 777, 128), second);
  EXPECT_EQ(session->prefill_stats().density(), density);
  EXPECT_LT(density, 1.0);
  // The last 40 queries attend everything, whatever the first prompt left out: layer 0's rows are exact.
  for (int j = 0; j < 4; ++j) {
    for (int64_t t = 737; t < 777; t += 13) {
      const Partial p = reference_attend(shape_, tokens_, t, j, {{0, t + 1}}, 0.25);
      for (int c = 0; c < 16; ++c) EXPECT_NEAR(second[size_t(((t - 300) * 4 + j) * 16 + c)], p.out[size_t(c)], 1e-5);
    }
  }
}

TEST_F(PrefillStageTest, SelectionAndPreselectionReadTheDenseLastRows) {
  const auto session =
      make_session(shape_,
                   recipe_of("a_shape:sink=8,window=32,dense_layers=0,threshold=0,last=10 + index=minmax(block=16) + "
                             "select=topk(budget=256,sink=16,local=64,preselect=8,preselect_queries=64)"),
                   1024, pool_);
  ASSERT_NE(session, nullptr);
  const auto out = feed_prompt(*session, tokens_, 0, 800, 256);
  const auto dense = read("store=f16", 800, 256);
  const int64_t width = 4 * 16, exact = 800 - 64;
  EXPECT_TRUE(std::equal(out.begin() + exact * width, out.end(), dense.begin() + exact * width));
}

TEST_F(PrefillStageTest, WindowLayersReturnRowsWhileTheFirstPromptIsRead) {
  KvShape shape = make_shape(1, 2, 2, 16);
  shape.window = {64};
  const auto session = make_session(shape, recipe_of("store=f32"), 1024, pool_);
  ASSERT_NE(session, nullptr);
  std::vector<float> out(size_t(1000 * 4 * 16));
  const auto read = [&](int64_t begin, int64_t end, int64_t prompt_end) {
    for (int64_t i = begin; i < end; i += 100) {
      ASSERT_TRUE(session
                      ->prefill(0, tokens_.q_at(shape, i), tokens_.k_at(shape, i), tokens_.v_at(shape, i), 100,
                                prompt_end, out.data() + i * 4 * 16, nullptr)
                      .ok());
    }
  };
  for (int64_t i = 0; i < 700; i += 100) {
    read(i, i + 100, 700);
    EXPECT_EQ(session->cache().view(0, 1).first_row, i + 100 - 63);
  }
  ASSERT_TRUE(session->finish_prefill(0).ok());
  // An interrupted second prompt leaves the first as it was.
  read(700, 900, 1000);
  EXPECT_EQ(session->cache().view(0, 1).first_row, 700 - 63);
  ASSERT_TRUE(session->truncate({700}).ok());
  read(700, 1000, 1000);
  ASSERT_TRUE(session->finish_prefill(0).ok());
  EXPECT_EQ(session->cache().view(0, 1).first_row, 1000 - 63);
  for (int64_t t = 0; t < 1000; t += 37) {
    for (int j = 0; j < 4; ++j) {
      const Partial p = reference_attend(shape, tokens_, t, j, {{std::max<int64_t>(0, t - 63), t + 1}}, 0.25);
      for (int c = 0; c < 16; ++c) ASSERT_NEAR(out[size_t((t * 4 + j) * 16 + c)], p.out[size_t(c)], 1e-5) << t;
    }
  }
}

TEST_F(PrefillStageTest, ImpossibleSettingsAreRefusedWithTheNearestLegalOne) {
  const auto refused = [&](const std::string& text, const std::string& part) {
    auto recipe = parse_recipe(text);
    Status status = recipe.status();
    if (recipe.ok()) {
      status = KvSession::create(shape_, recipe.value(), {1024}, plain_params(shape_), pool_).status();
    }
    EXPECT_FALSE(status.ok()) << text;
    EXPECT_NE(status.message().find(part), std::string::npos) << status.message();
  };
  refused("xattention", "dense_layers=1");  // two layers, both dense by default
  refused("xattention:stride=12", "nearest legal: stride=16");
  refused("xattention:stride=9", "nearest legal: stride=8");
  refused("flex:chunk=1000", "nearest legal: chunk=1024");
  refused("xattention:tau=1.5", "0 to 1");
  refused("a_shape:columns=5", "columns");
  refused("minference:file=/nonexistent.json,dense_layers=0", "/nonexistent.json");
  refused("minference + xattention", "prefill");
}

}  // namespace
}  // namespace longkv::test
