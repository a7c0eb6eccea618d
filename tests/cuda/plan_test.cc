// How a model is divided between a card and memory; needs no card.
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>

#include "cuda/card_plan.h"
#include "cuda/cards.h"
#include "cuda/kv.h"
#include "cuda/stack.h"
#include "ops/packed_rows.h"
#include "support/paths.h"

namespace longkv {
namespace {

class CardPlans : public testing::Test {
 protected:
  std::shared_ptr<LoadedModel> model_ = LoadedModel::load(test::repo_model("needle-10m-128k-f16.gguf")).value();
  CardPlanRequest request(int64_t budget, int64_t context = 4096) const {
    CardPlanRequest q;
    q.context = context;
    q.budget = budget;
    return q;
  }
  CardPlan plan(const CardPlanRequest& q) const { return plan_card(*model_, q).value(); }
};

TEST_F(CardPlans, AllLayersWhereTheyFitElseAsManyAsDo) {
  const int layers = model_->config().layers;
  const CardPlan all = plan(request(int64_t(8) << 30));
  EXPECT_EQ(all.on_card, layers);
  EXPECT_EQ(all.memory_bytes, 0);
  EXPECT_TRUE(all.fits());
  // A divided model needs other buffers than a whole one: the sizes of its plans grow with the layers.
  int64_t previous = 0, file_bytes = 0;
  for (int n = 0; n < layers; ++n) {
    CardPlanRequest q = request(0);
    q.layers = n;
    const CardPlan p = plan(q);
    EXPECT_EQ(p.on_card, n);
    EXPECT_FALSE(p.fits());
    EXPECT_GT(p.total(), previous);
    previous = p.total();
    // Exactly as much VRAM as it says gives as many layers.
    EXPECT_EQ(plan(request(p.total())).on_card, p.total() >= all.total() ? layers : n);
    if (n == 0) file_bytes = p.memory_bytes;
  }
  int64_t matrices = 0;
  for (const LayerWeights& l : model_->weights().layers) {
    for (const Weight* w : {&l.q, &l.k, &l.v, &l.o, &l.gate, &l.up, &l.down}) matrices += w->rows * w->row_bytes;
  }
  EXPECT_EQ(file_bytes, matrices);
  const CardPlan none = plan(request(1));
  EXPECT_EQ(none.on_card, 0);
  EXPECT_FALSE(none.fits());
}

TEST_F(CardPlans, RowsCountWhereTheyLie) {
  CardPlanRequest q = request(0, 65536);
  q.layers = 2;
  const ModelConfig& c = model_->config();
  EXPECT_EQ(plan(q).row_bytes, 2 * card::card_kv_bytes(KvType::kF16, c.kv_heads, c.head_dim_k, 65536));
  q.recipe = parse_recipe("quest:budget=1024,dense_layers=0").value();
  const int64_t chosen = plan(q).row_bytes;
  q.rows = CardRows::kHybrid;
  EXPECT_LT(plan(q).row_bytes, chosen / 2);
  q.rows = CardRows::kInMemory;
  EXPECT_EQ(plan(q).row_bytes, 0);
  // Encoded rows: 5 or 3 bits a number.
  q.rows = CardRows::kOnCard;
  q.recipe = parse_recipe("full").value();
  const CardPlan whole = plan(q);
  for (const auto& [text, bits] : {std::pair<const char*, double>{"kivi4", 5.0}, {"kivi2", 3.0}}) {
    q.recipe = parse_recipe(text).value();
    const CardPlan encoded = plan(q);
    EXPECT_NEAR(double(encoded.row_bytes) / double(whole.row_bytes), bits / 16, 0.01) << text;
  }
  q.recipe = parse_recipe("leank:mask=" + test::repo_model("needle-10m-128k-leank70.gguf")).value();
  EXPECT_LT(plan(q).row_bytes, whole.row_bytes * 9 / 10);
  q.recipe = {};
  q.rows = CardRows::kInMemory;
  // A longer prompt shares a copy of the weights as far as its states fit; a chunk that was asked for is kept.
  EXPECT_EQ(plan(q).span, 16384);
  q.chunk = 300;
  EXPECT_EQ(plan(q).span % 300, 0);
  q.context = 200;
  EXPECT_GE(plan(q).span, 200);
}

TEST_F(CardPlans, SaysWhatStaysInMemory) {
  CardPlanRequest q = request(int64_t(4) << 30);
  q.layers = 1;
  const CardPlan p = plan(q);
  EXPECT_NE(card_plan_text(p).find("stay in memory"), std::string::npos) << card_plan_text(p);
  EXPECT_EQ(card_plan_json(p)["layers_on_card"], 1);
  q.budget = 1;
  EXPECT_NE(card_plan_text(plan(q)).find("DOES NOT FIT"), std::string::npos);
  EXPECT_EQ(card_plan_text(plan(request(int64_t(8) << 30))).find("memory"), std::string::npos);
}

TEST_F(CardPlans, StacksJoinNeighboursOfOneType) {
  std::vector<uint8_t> bytes(1 << 16);
  const Weight a{TensorType::kQ4_0, 6, 64, 36, bytes.data()}, b{TensorType::kQ4_0, 2, 64, 36, bytes.data()},
      v{TensorType::kQ8_0, 2, 64, 68, bytes.data()}, odd{TensorType::kF16, 2, 40, 80, bytes.data()};
  CardStack s = CardStack::of({&a, &b, &v}, "x").value();
  ASSERT_EQ(s.parts.size(), 2u);
  EXPECT_EQ(s.parts[0].rows, 8);
  EXPECT_EQ(s.rows, 10);
  EXPECT_EQ(s.file_bytes(), 8 * 36 + 2 * 68);
  s.place(bytes.data());
  EXPECT_EQ(s.parts[0].low, bytes.data());
  EXPECT_EQ(s.parts[1].low, bytes.data() + card_matrix_bytes(TensorType::kQ4_0, 8, 64));
  EXPECT_EQ(CardStack::of({&odd}, "odd one").status().code(), Code::kUnsupported);
}

// What goes to a card from packed matrices is what the file has.
TEST(PackedRows, ComeBackAsTheyWere) {
  for (TensorType type : {TensorType::kQ4_0, TensorType::kQ4_1, TensorType::kQ5_0, TensorType::kQ5_1}) {
    if (!reads_packed(type)) continue;
    constexpr int64_t kRows = 21, kCols = 160;
    const int64_t row = row_bytes(type, kCols).value();
    std::mt19937 random(uint32_t(type) + 1);
    std::vector<uint8_t> file(size_t(kRows * row));
    for (uint8_t& b : file) b = uint8_t(random());
    Weight w{type, kRows, kCols, row, file.data()};
    ThreadPool pool(2);
    std::vector<uint8_t> packed(size_t(packed_bytes(w))), back(file.size());
    pack_rows(w, packed.data(), pool);
    w.packed = packed.data();
    unpack_rows(w, 0, 5, back.data());
    unpack_rows(w, 5, kRows - 5, back.data() + 5 * row);
    EXPECT_EQ(back, file) << int(type);
  }
}

TEST(Cards, CodeOfABuildFitsSomeOfThem) {
  EXPECT_TRUE(card_code_fits("90", 9, 0));
  EXPECT_TRUE(card_code_fits("90", 10, 3));  // from PTX
  EXPECT_FALSE(card_code_fits("90", 8, 9));
  EXPECT_TRUE(card_code_fits("80 89 90", 8, 6));
  EXPECT_TRUE(card_code_fits("80;120", 9, 0));
  EXPECT_FALSE(card_code_fits("86 120", 8, 0));
  EXPECT_TRUE(card_code_fits("80-real", 8, 9));
  EXPECT_FALSE(card_code_fits("80-real", 9, 0));
  EXPECT_FALSE(card_code_fits("90-real 120-real", 10, 0));
  EXPECT_TRUE(card_code_fits("80-virtual", 12, 0));
  EXPECT_TRUE(card_code_fits("90a", 9, 0));
  EXPECT_FALSE(card_code_fits("90a", 10, 0));
  EXPECT_TRUE(card_code_fits("100f", 10, 3));
  EXPECT_FALSE(card_code_fits("100f", 12, 0));
  EXPECT_TRUE(card_code_fits("native", 8, 0));
  EXPECT_TRUE(card_code_fits("all-major", 8, 0));
  EXPECT_FALSE(card_code_fits("", 9, 0));
  EXPECT_FALSE(card_code_fits("  ", 9, 0));
}

}  // namespace
}  // namespace longkv
