#include "kv/plan.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

namespace longkv {
namespace {

constexpr int64_t kGiB = int64_t{1} << 30;

// The shape of Llama-3.1-8B.
PlanModel large_model() {
  PlanModel m;
  m.shape = {.layers = 32, .kv_heads = 8, .group_size = 4, .dim_k = 128, .dim_v = 128, .window = {}};
  m.trained_context = 131072;
  m.weight_bytes = 5 * kGiB;
  m.weight_bytes_per_token = 4 * kGiB;
  m.hidden_bytes_per_token = 4096 * 4;
  m.hidden_bytes_limit = kGiB;
  m.scratch_bytes = 64 << 20;
  return m;
}

KvPlan planned(const PlanModel& m, const std::string& recipe, int64_t context,
               PlanMachine machine = {64 * kGiB, 0, 1}) {
  const Result<Recipe> r = parse_recipe(recipe);
  EXPECT_TRUE(r.ok());
  const Result<KvPlan> plan = make_plan(m, *r, machine, context);
  EXPECT_TRUE(plan.ok()) << plan.status().message();
  return plan.ok() ? *plan : KvPlan{};
}

TEST(Plan, FullAttentionByHand) {
  const KvPlan p = planned(large_model(), "full", 131072, {64 * kGiB, 40'000'000'000, 8});
  EXPECT_EQ(p.k_bytes, 131072LL * 32 * 8 * 128 * 2);
  EXPECT_EQ(p.k_bytes + p.v_bytes, 16 * kGiB);
  EXPECT_EQ(p.index_bytes, 0);
  EXPECT_EQ(p.prompt_bytes, kGiB);  // 2 GiB of hidden states, read in spans of 1 GiB
  EXPECT_EQ(p.peak_bytes, 5 * kGiB + 16 * kGiB + kGiB + (64 << 20));
  EXPECT_EQ(p.read_rows_bytes, 16 * kGiB);
  EXPECT_EQ(p.read_bytes, 20 * kGiB);
  EXPECT_NEAR(p.token_seconds, double(20 * kGiB) / 4e10, 1e-9);
  EXPECT_EQ(p.dense_layers, 32);
  EXPECT_TRUE(p.fits());
  EXPECT_TRUE(check_plan(p).ok());
}

TEST(Plan, QuestByHand) {
  const KvPlan p = planned(large_model(), "quest:budget=64K", 131072);
  EXPECT_EQ(p.dense_layers, 2);
  EXPECT_EQ(p.choosing_layers, 30);
  // Boxes: two vectors of bytes and their scales per 16 rows; a flat scan is within the bytes of 64K attended rows.
  const int64_t boxes = int64_t{131072} / 16 * (2 * 128 + 2 * 4) * 8;
  EXPECT_EQ(p.index_bytes, 30 * boxes);
  EXPECT_EQ(p.read_index_bytes, 30 * boxes);
  EXPECT_EQ(p.read_rows_bytes, (2 * 131072LL + 30 * 65536LL) * 8 * 512);
  // Within the budget everything is attended and nothing scored.
  const KvPlan small = planned(large_model(), "quest:budget=64K", 65536);
  EXPECT_EQ(small.read_index_bytes, 0);
  EXPECT_EQ(small.read_rows_bytes, 32 * 65536LL * 8 * 512);
}

TEST(Plan, TwoLevelScanIsBelowTheAttentionItServes) {
  PlanModel m = large_model();
  m.trained_context = 1 << 20;
  const KvPlan p = planned(m, "quest:budget=2K,dense_layers=0", 1 << 20, {1024 * kGiB, 0, 1});
  EXPECT_LE(p.read_index_bytes, p.read_rows_bytes * 11 / 10);
  const int64_t flat = (int64_t{1} << 20) / 16 * (2 * 128 + 2 * 4) * 8 * 32;
  EXPECT_LT(p.read_index_bytes, flat / 4);
  EXPECT_GT(p.index_bytes, flat);
}

TEST(Plan, StepsHeadsPreselectionAndStreaming) {
  const KvPlan every = planned(large_model(), "quest:budget=64K", 131072);
  const KvPlan seldom = planned(large_model(), "quest:budget=64K,token_step=4", 131072);
  EXPECT_EQ(seldom.read_index_bytes, every.read_index_bytes / 4);
  const KvPlan layers = planned(large_model(), "quest:budget=64K,layer_step=3", 131072);
  EXPECT_EQ(layers.choosing_layers, 10);
  EXPECT_EQ(layers.reusing_layers, 20);
  EXPECT_EQ(layers.read_rows_bytes, every.read_rows_bytes);
  EXPECT_EQ(layers.index_bytes, every.index_bytes / 3);
  const KvPlan apart = planned(large_model(), "quest:budget=64K,heads=query,dense_layers=0", 131072);
  EXPECT_EQ(apart.read_rows_bytes, 4 * 32 * 65536LL * 8 * 512);
  const KvPlan voted = planned(large_model(), "quest:budget=64K,preselect=4096", 131072);
  EXPECT_EQ(voted.read_index_bytes, every.read_index_bytes / 2);
  EXPECT_EQ(voted.prompt_bytes - every.prompt_bytes, 131072LL * 32 * 4);  // attention mass of one layer
  const KvPlan stream = planned(large_model(), "streaming", 131072);
  EXPECT_EQ(stream.evicting_layers, 32);
  EXPECT_EQ(stream.read_rows_bytes, 32 * 2048LL * 8 * 512);
}

TEST(Plan, EvictionHoldsTheBudgetAndOneLayerAtThePeak) {
  const int64_t n = 131072, row = 8 * 512;
  const KvPlan full = planned(large_model(), "full", n);
  const KvPlan p = planned(large_model(), "keydiff:budget=2K", n);
  EXPECT_EQ(p.evicting_layers, 32);
  EXPECT_EQ(p.k_bytes + p.v_bytes, 32 * 2048 * row);
  EXPECT_EQ(p.field_bytes, 32 * 2048LL * 8 * 4);  // a position per row
  EXPECT_EQ(p.read_rows_bytes, 32 * 2048 * row);
  EXPECT_EQ(p.prompt_bytes - full.prompt_bytes, (n - 2048) * row);
  const KvPlan voted = planned(large_model(), "snapkv:budget=2K", n);
  EXPECT_EQ(voted.prompt_bytes - p.prompt_bytes, n * 32 * 4);  // attention mass of one layer
  // Rows per layer differ, their sum does not.
  const KvPlan pyramid = planned(large_model(), "pyramidkv:budget=2K", n);
  EXPECT_EQ(pyramid.read_rows_bytes, voted.read_rows_bytes);
  // Merging after every chunk never holds a whole layer.
  const KvPlan merged = planned(large_model(), "normmass:budget=2K", n);
  EXPECT_LT(merged.prompt_bytes - full.prompt_bytes, (p.prompt_bytes - full.prompt_bytes) / 8);
  // KVzip holds everything until its second reading is over.
  const KvPlan zip = planned(large_model(), "kvzip:keep_ratio=0.25", n);
  EXPECT_EQ(zip.k_bytes + zip.v_bytes, 32 * n / 4 * row);
  EXPECT_EQ(zip.prompt_bytes - full.prompt_bytes, 32 * (n - n / 4) * row + 32 * n * 8 * 4);  // rows, and a number each
  // Chunks that are passed twice leave masses of all query heads in all layers, over the rows held and their own.
  const KvPlan once = planned(large_model(), "kvslimmer:budget=2K", n);
  const KvPlan twice = planned(large_model(), "kvslimmer:budget=2K,reread=true", n);
  const int64_t masses = 32 * (2048 + 512) * 32 * 4;
  EXPECT_GE(twice.prompt_bytes - once.prompt_bytes, masses - (2048 + 512) * 32 * 4);
  EXPECT_LE(twice.prompt_bytes - once.prompt_bytes, masses + 512 * row);
  // An index over kept rows only.
  const KvPlan both = planned(large_model(), "snapkv:budget=32K+quest", n);
  EXPECT_LT(both.index_bytes, planned(large_model(), "quest", n).index_bytes / 3);
}

TEST(Plan, SlidingWindows) {
  PlanModel m = large_model();
  m.shape.window.assign(32, 0);
  for (size_t l = 0; l < 32; l += 2) m.shape.window[l] = 1024;
  const KvPlan p = planned(m, "full", 131072);
  EXPECT_EQ(p.k_bytes, (16 * 131072LL + 16 * 1024LL) * 8 * 256);
  EXPECT_EQ(p.read_rows_bytes, (16 * 131072LL + 16 * 1024LL) * 8 * 512);
  EXPECT_EQ(p.prompt_bytes, kGiB + 512LL * 8 * 512);  // a chunk beside the window
  // A window layer with an index keeps its rows until they are summarised.
  const KvPlan indexed = planned(m, "quest:budget=512", 131072);
  EXPECT_EQ(indexed.prompt_bytes, kGiB + (131072LL - 1024) * 8 * 512);
}

TEST(Plan, LargestContextFitsAndOneMoreDoesNot) {
  for (const char* recipe :
       {"full", "quest", "ktransformers:store=q8_0", "index=bits(block=16)+select=topk(budget=2K)"}) {
    for (const int64_t ram : {6 * kGiB, 9 * kGiB, 17 * kGiB}) {
      PlanModel m = large_model();
      m.trained_context = 0;
      const KvPlan p = planned(m, recipe, 0, {ram, 0, 1});
      EXPECT_EQ(p.context, p.largest_context);
      EXPECT_TRUE(p.fits()) << recipe;
      EXPECT_FALSE(planned(m, recipe, p.context + 1, {ram, 0, 1}).fits()) << recipe;
    }
  }
  EXPECT_EQ(planned(large_model(), "full", 0, {1024 * kGiB, 0, 1}).context, 131072);  // never more than trained
}

TEST(Plan, RefusalSaysHowMuchAndWhatFits) {
  const KvPlan p = planned(large_model(), "full", 131072, {16 * kGiB, 0, 1});
  const Status s = check_plan(p);
  EXPECT_EQ(s.code(), Code::kOutOfMemory);
  for (const std::string& part : {std::string("needs 22.06 GiB, 6.06 GiB more than the 16.00 GiB"),
                                  fmt::format("-c {}", p.largest_context), std::string("fits with store=q8_0")}) {
    EXPECT_NE(s.message().find(part), std::string::npos) << s.message() << "\n  lacks: " << part;
  }
  const Status none = check_plan(planned(large_model(), "full", 10, {kGiB, 0, 1}));
  EXPECT_NE(none.message().find("no context fits"), std::string::npos) << none.message();
}

TEST(Plan, BadInputs) {
  PlanModel m = large_model();
  const Recipe q4 = *parse_recipe("full:store=q4_0");
  m.shape.dim_k = 80;
  EXPECT_NE(make_plan(m, q4, {kGiB, 0, 1}, 1).status().message().find("multiples of 32"), std::string::npos);
  m.shape.dim_k = 0;
  EXPECT_FALSE(make_plan(m, q4, {kGiB, 0, 1}, 1).ok());
  m = large_model();
  EXPECT_FALSE(make_plan(m, q4, {kGiB, 0, 1}, -1).ok());
  EXPECT_FALSE(make_plan(m, q4, {kGiB, 0, 1}, int64_t{1} << 60).ok());
  m.shape.layers = 1 << 16;
  m.shape.kv_heads = 1 << 16;
  EXPECT_FALSE(make_plan(m, q4, {kGiB, 0, 1}, 1).ok());
}

TEST(Plan, TextAndJson) {
  const KvPlan p = planned(large_model(), "ktransformers:budget=2K", 131072, {64 * kGiB, 40'000'000'000, 8});
  const std::string text = plan_text(p);
  for (const char* part : {"ktransformers:budget=2K", "index=dynamic(block=128,reps=1)", "note: local=512",
                           "weights (mapped)", "5.00 GiB", "32 choosing", "tokens/s"}) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }
  const nlohmann::json j = plan_json(p);
  EXPECT_EQ(j["memory"]["peak"], p.peak_bytes);
  EXPECT_EQ(j["read_per_token"]["total"], p.read_bytes);
  EXPECT_EQ(j["fits"], true);
  EXPECT_EQ(format_bytes(1023), "1023 B");
  EXPECT_EQ(format_bytes(3 * kGiB / 2), "1.50 GiB");
  EXPECT_GT(available_ram_bytes(), 1 << 20);
}

}  // namespace
}  // namespace longkv
