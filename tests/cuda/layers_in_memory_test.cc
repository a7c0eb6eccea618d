// Models of which a part of the layers lies in memory.
#include <algorithm>

#include "cuda/card.h"
#include "cuda/session_pair.h"
#include "support/golden.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::random_ids;

// Layers in memory: the card takes their weights for prompts, the CPU decodes them. The answers are those of all layers
// on the card, and of the CPU, wherever the rows of the card's layers lie.
TEST(LayersInMemory, AnswersOfAllOnTheCard) {
  LONGKV_NEED_CARD();
  for (const std::string& path : models()) {
    SCOPED_TRACE(path);
    const auto model = LoadedModel::load(path).value();
    const int layers = model->config().layers;
    ThreadPool pool(default_threads());
    ASSERT_DONE(model->pack_weights(pool, layers / 2));
    const auto ids = random_ids(1500, model->config().vocab, 17);
    const std::span<const int32_t> all(ids);
    SessionOptions o;
    o.context = 2048;
    o.products = ProductType::kF32;
    auto cpu = Session::create(model, o, pool);
    ASSERT_TRUE(cpu.ok());
    ASSERT_DONE((*cpu)->prefill(all.first(1400)));
    for (int i = 0; i < 6; ++i) ASSERT_DONE((*cpu)->decode(ids[size_t(1400 + i)]));
    for (int host : {1, layers / 2, layers}) {
      auto card = CardModel::load(model, {0, 0, host});
      if (!card.ok() && card.status().code() == Code::kUnsupported) break;
      ASSERT_TRUE(card.ok()) << card.status().message();
      EXPECT_EQ((*card)->host_layers(), host);
      o.card = *card;
      for (const char* place : {"gpu", "cpu", "hybrid"}) {
        SCOPED_TRACE(testing::Message() << host << " layers in memory, rows " << place);
        o.card_kv = std::string(place) != "cpu";
        o.card_hybrid = std::string(place) == "hybrid";
        // Hybrid needs a recipe that chooses; with this budget it chooses everything.
        o.recipe = parse_recipe(o.card_hybrid ? "quest:budget=4096,dense_layers=0" : "full").value();
        if (o.card_hybrid && !card_supports_hybrid(*model, o.recipe).ok()) continue;
        o.card_chunk = 320;
        const int64_t before = (*card)->streamed_bytes();
        auto gpu = Session::create(model, o, pool);
        ASSERT_TRUE(gpu.ok()) << gpu.status().message();
        ASSERT_DONE((*gpu)->prefill(all.first(1390)));
        EXPECT_GT((*card)->streamed_bytes(), before);
        ASSERT_DONE((*gpu)->prefill(all.subspan(1390, 10)));  // so few pass the layers in memory on the CPU
        EXPECT_EQ((*gpu)->tokens(), 1400);
        for (int i = 0; i < 6; ++i) ASSERT_DONE((*gpu)->decode(ids[size_t(1400 + i)]));
        Pair p;
        p.model = model;
        expect_close(p, (*gpu)->logits(), (*cpu)->logits(), place, 2e-2);
        EXPECT_EQ((*gpu)->kv_stats().steps, 6);
        EXPECT_EQ((*gpu)->kv_stats().rows_attended, (*cpu)->kv_stats().rows_attended);
        // Cut back and read on: rows in memory come to the card again.
        ASSERT_DONE((*gpu)->truncate(900));
        ASSERT_DONE((*gpu)->prefill(all.subspan(900, 500)));
        for (int i = 0; i < 6; ++i) ASSERT_DONE((*gpu)->decode(ids[size_t(1400 + i)]));
        expect_close(p, (*gpu)->logits(), (*cpu)->logits(), "read again", 2e-2);
      }
    }
  }
}

// Recipes choose the same blocks in both parts of a model.
TEST(LayersInMemory, ChosenRowsAsOnTheCpu) {
  LONGKV_NEED_CARD();
  const auto model = LoadedModel::load(models().front()).value();
  ThreadPool pool(default_threads());
  const auto ids = random_ids(3000, model->config().vocab, 12);
  const auto half = CardModel::load(model, {0, 0, model->config().layers / 2}).value();
  for (const char* text : {"quest:budget=256", "onebit:budget=512", "q8"}) {
    SCOPED_TRACE(text);
    SessionOptions o;
    o.context = 4096;
    o.recipe = parse_recipe(text).value();
    o.products = ProductType::kF32;
    auto cpu = Session::create(model, o, pool);
    o.card = half;
    auto gpu = Session::create(model, o, pool);
    ASSERT_TRUE(cpu.ok() && gpu.ok()) << gpu.status().message();
    ASSERT_DONE((*cpu)->prefill(ids));
    ASSERT_DONE((*gpu)->prefill(ids));
    for (int i = 0; i < 40; ++i) {
      ASSERT_DONE((*cpu)->decode(ids[size_t(i)]));
      ASSERT_DONE((*gpu)->decode(ids[size_t(i)]));
    }
    const double kl = kl_divergence((*cpu)->logits().data(), (*gpu)->logits().data(), model->config().vocab);
    std::printf("  %s: KL %.2e\n", text, kl);
    EXPECT_LT(kl, 0.05);
    EXPECT_NEAR(double((*gpu)->kv_stats().rows_attended), double((*cpu)->kv_stats().rows_attended),
                0.1 * double((*cpu)->kv_stats().rows_attended));
  }
}

}  // namespace
}  // namespace longkv
