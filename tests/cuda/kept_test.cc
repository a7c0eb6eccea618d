// Rows that keep stages leave: biases, and whole models over them against the CPU.
#include <cmath>
#include <limits>

#include "base/cpu.h"
#include "base/threads.h"
#include "cuda/session_pair.h"
#include "cuda/tokens.h"
#include "support/golden.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::normal_floats;
using test::random_ids;

// Merged rows count for more than their keys say, and rows that fill up a head for nothing; all rows, or tiles of a
// list of which one begins and ends in the middle of a block.
TEST(CardAttention, BiasesOfRows) {
  LONGKV_NEED_CARD();
  struct Case {
    int heads, kv_heads, dim;
    int64_t rows;
    double cap;
  };
  const Case cases[] = {{4, 2, 64, 1, 0},    {8, 2, 128, 17, 0},  {6, 6, 96, 333, 30},
                        {4, 1, 256, 700, 0}, {20, 1, 64, 129, 0}, {32, 8, 128, 2049, 0}};
  for (KvType type : kRowTypes) {
    for (const Case& c : cases) {
      for (int splits : {1, 5, 33}) {
        SCOPED_TRACE(testing::Message() << kv_type_name(type) << ' ' << c.heads << '/' << c.kv_heads << " x " << c.dim
                                        << ", " << c.rows << " rows, " << splits << " splits");
        const Shape s{type, c.heads, c.kv_heads, c.dim, (c.rows + 31) / 16 * 16};
        Tokens t = make_tokens(s, c.rows, 11);
        if (!card::attended_in_place(type)) use_stored_rows(t);
        std::vector<float> bias = normal_floats(c.kv_heads * s.capacity, 12, 2.0f);
        for (size_t i = 0; i < bias.size(); ++i) {
          const int64_t row = int64_t(i) % s.capacity;
          // Whole tiles of the last head, and single rows of others; what lies past the rows is never used.
          if (row + 1 < c.rows && (row % 7 == 3 || (int64_t(i) / s.capacity == c.kv_heads - 1 && row / 16 % 2 == 1)))
            bias[i] = -std::numeric_limits<float>::infinity();
          if (row >= c.rows) bias[i] = std::numeric_limits<float>::quiet_NaN();
        }
        const OnCard biases = OnCard::of(bias);
        t.kv.bias = biases.as<float>();
        const OneToken token(c.heads, c.dim, splits);
        const auto scale = float(1 / std::sqrt(double(c.dim)));
        const card::AttendArgs a{
            t.q.as<card::half_t>() + (c.rows - 1) * c.heads * c.dim, c.heads, t.kv, scale, float(c.cap), 0};
        for (const bool listed : {false, true}) {
          // Every other tile, of which each third only in part; the last always, whose end the position says.
          std::vector<int32_t> tiles, count;
          std::vector<float> attended = bias;
          const int64_t all = (c.rows + 15) / 16;
          for (int h = 0; listed && h < c.kv_heads; ++h) {
            std::vector<int32_t> of_head;
            for (int64_t tile = (all - 1) % 2; tile < all; tile += 2) {
              const bool part = tile % 3 == 1 && tile + 1 < all;
              of_head.insert(of_head.end(), {int32_t(tile * 16 + (part ? 3 : 0)), part ? 9 : 16});
            }
            for (int64_t r = 0; r < c.rows; ++r) {
              const int64_t tile = r / 16;
              const bool part = tile % 3 == 1 && tile + 1 < all;
              if (tile % 2 != (all - 1) % 2 || (part && (r % 16 < 3 || r % 16 >= 12)))
                attended[size_t(h * s.capacity + r)] = -std::numeric_limits<float>::infinity();
            }
            count.push_back(int32_t(of_head.size() / 2));
            of_head.resize(size_t(2 * all));
            tiles.insert(tiles.end(), of_head.begin(), of_head.end());
          }
          card::TileList list;
          const OnCard on_tiles = OnCard::of(tiles), on_count = OnCard::of(count);
          if (listed) list = {on_tiles.as<int32_t>(), on_count.as<int32_t>(), all};
          const auto got = token.attend(a, c.rows - 1, list);
          for (int h = 0; h < c.heads; ++h) {
            const std::span<const float> of_head(&attended[size_t(h / (c.heads / c.kv_heads) * s.capacity)],
                                                 size_t(c.rows));
            expect_near(attention_of(t, c.rows - 1, h, scale, c.cap, 0, of_head), &got[size_t(h * c.dim)],
                        tolerance(type));
          }
        }
      }
    }
  }
}

// Merging and evicting, alike heads and unlike ones, while decoding, after a cut, and under a second prompt. The CPU
// reads the prompts of recipes that merge, so that the same rows are held; where the card reads them, a choice may
// differ.
TEST(CardKept, RowsAsOnTheCpu) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(1500, p.model->config().vocab, 22);
  const std::span<const int32_t> all(ids);
  for (const char* text :
       {"keep=normmass(budget=256)", "keep=normmass(budget=256) + store=q8_0", "keep=kvslimmer(budget=256) + store=fp8",
        "keep=asymkv(budget=384) + store=q4_0", "keep=normmass(budget=512,bias=count) + store=bf16",
        "keep=normmass(budget=512) + index=minmax(block=16) + select=topk(budget=256,sink=16,local=64)",
        "keep=kvslimmer(budget=512) + index=bits(block=16) + "
        "select=topk(budget=256,sink=16,local=64,aggregate=softmax)",
        "keep=snapkv(budget=256)", "keep=pyramidkv(budget=256) + store=q8_0", "keep=adakv(budget=256)",
        "keep=kvzip(keep_ratio=0.4,chunk=256) + store=fp8"}) {
    SCOPED_TRACE(text);
    const auto cpu = open_session(p.model, text, nullptr, *p.pool), gpu = open_session(p.model, text, p.card, *p.pool);
    ASSERT_TRUE(cpu && gpu);
    const Recipe& recipe = cpu->kv().recipe();
    const bool same = !gpu->reads_on_card();
    const double limit = same && recipe.select.all ? 2e-3 : 0.02;
    const double later = 0.02;  // rows decoded in between differ as answers do, and so may what is kept of them
    for (Session* s : {cpu.get(), gpu.get()}) {
      ASSERT_DONE(s->prefill(all.first(1100)));
      ASSERT_DONE(decode_all(*s, all.first(60)));
    }
    expect_close(p, gpu->logits(), cpu->logits(), "decoded", limit);
    EXPECT_EQ(gpu->tokens(), 1160);
    // Prompts behind heads of unlike length are the CPU's.
    EXPECT_EQ(gpu->reads_on_card(), !same && recipe.keep.kind != KeepKind::kAdakv);
    for (Session* s : {cpu.get(), gpu.get()}) {
      ASSERT_DONE(s->truncate(1130));
      ASSERT_DONE(decode_all(*s, all.subspan(100, 20)));
    }
    expect_close(p, gpu->logits(), cpu->logits(), "after a cut", limit);
    for (Session* s : {cpu.get(), gpu.get()}) ASSERT_DONE(s->prefill(all.subspan(1100, 300)));
    expect_close(p, gpu->logits(), cpu->logits(), "second prompt", later);
    for (Session* s : {cpu.get(), gpu.get()}) ASSERT_DONE(decode_all(*s, all.subspan(200, 30)));
    expect_close(p, gpu->logits(), cpu->logits(), "decoded after it", later);
    const double rows = double(cpu->kv_stats().rows_attended), on_card = double(gpu->kv_stats().rows_attended);
    std::printf("  %s: %s, rows attended %.0f, on the CPU %.0f\n", text, same ? "read by the CPU" : "read by the card",
                on_card, rows);
    if (recipe.keep.kind != KeepKind::kAdakv && recipe.keep.kind != KeepKind::kKvzip) {
      EXPECT_NEAR(on_card, rows, 0.1 * rows);  // others fill heads up
    }
    for (Session* s : {cpu.get(), gpu.get()}) {
      ASSERT_DONE(s->truncate(0));
      ASSERT_DONE(s->prefill(all.first(40)));
      ASSERT_DONE(s->decode(7));
    }
    expect_close(p, gpu->logits(), cpu->logits(), "a short prompt in an empty sequence", 2e-3);
  }
}

// Whether two sessions keep the rows of the same tokens.
bool same_rows(const Session& a, const Session& b) {
  const KvShape& shape = a.kv().cache().shape();
  for (int l = 0; l < shape.layers; ++l) {
    for (int h = 0; h < shape.kv_heads; ++h)
      if (a.kv().kept_positions(l, h) != b.kv().kept_positions(l, h)) return false;
  }
  return true;
}

// Among them models with sliding windows, whose layers evict nothing and hold other rows than the rest.
TEST(CardKept, TinyModelsOfEveryFamily) {
  LONGKV_NEED_CARD();
  int run = 0, compared = 0;
  for (const std::string& name : test::tiny_goldens()) {
    const auto model = LoadedModel::load(test::tiny_model(name)).value();
    const auto card = CardModel::load(model, {});
    if (!card.ok()) continue;
    const auto ids = random_ids(150, model->config().vocab, 6);
    const std::span<const int32_t> all(ids);
    for (const char* text : {"keep=normmass(budget=40,sink=4,window=16)", "keep=knorm(budget=40)"}) {
      SCOPED_TRACE(name + ", " + text);
      ThreadPool pool(default_threads());
      const auto cpu = open_session(model, text, nullptr, pool, 160), gpu = open_session(model, text, *card, pool, 160);
      ASSERT_TRUE(cpu && gpu);
      for (Session* session : {cpu.get(), gpu.get()}) ASSERT_DONE(session->prefill(all.first(90)));
      // Two keys' norms may be as close as what a card's prompt differs by: then other rows are kept of them.
      const bool same = same_rows(*cpu, *gpu);
      EXPECT_TRUE(same || cpu->kv().recipe().keep.kind == KeepKind::kKnorm);
      for (Session* session : {cpu.get(), gpu.get()}) ASSERT_DONE(decode_all(*session, all.subspan(90, 10)));
      const double first = relative_error(gpu->logits(), cpu->logits());
      for (Session* session : {cpu.get(), gpu.get()}) {
        ASSERT_DONE(session->prefill(all.subspan(100, 40)));
        ASSERT_DONE(decode_all(*session, all.subspan(140, 10)));
      }
      const double second = relative_error(gpu->logits(), cpu->logits());
      std::printf("  %s, %s: %s rows, relative error %.2e, after a second prompt %.2e\n", name.c_str(), text,
                  same ? "the same" : "other", first, second);
      if (!same) continue;
      ++compared;
      EXPECT_LT(first, 0.1);
      EXPECT_LT(second, 0.1);
    }
    ++run;
  }
  EXPECT_GE(2 * compared, 3 * run);  // of two recipes each
  EXPECT_GT(run, 0);
}

// More decoded tokens than there is room for beside the prompt's rows; the same bits from run to run.
TEST(CardKept, ManyDecodedTokensAndTheSameBits) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(2600, p.model->config().vocab, 23);
  const std::span<const int32_t> all(ids);
  const char* const text = "keep=normmass(budget=256)";
  const auto cpu = open_session(p.model, text, nullptr, *p.pool), gpu = open_session(p.model, text, p.card, *p.pool),
             again = open_session(p.model, text, p.card, *p.pool);
  ASSERT_TRUE(cpu && gpu && again);
  for (Session* s : {cpu.get(), gpu.get(), again.get()}) {
    ASSERT_DONE(s->prefill(all.first(400)));
    ASSERT_DONE(decode_all(*s, all.subspan(400)));
  }
  expect_close(p, gpu->logits(), cpu->logits(), "2,200 decoded", 2e-3);
  EXPECT_EQ(relative_error(again->logits(), gpu->logits()), 0.0);
  const auto bytes = double(cpu->kv_bytes_held());
  EXPECT_NEAR(double(gpu->kv_bytes_held()), bytes, 0.02 * bytes);  // rows on the card have no positions
}

TEST(CardKept, WhatIsRefused) {
  const auto model = LoadedModel::load(models().front()).value();
  for (const char* text : {"h2o", "tova", "streaming", "keep=snapkv(budget=256) + store=kivi4",
                           "keep=snapkv(budget=1024) + twilight:refine=exact"}) {
    const auto recipe = parse_recipe(text);
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    EXPECT_EQ(card_supports(*model, *recipe).code(), Code::kUnsupported) << text;
  }
  for (const char* text : {"snapkv", "normmass", "keep=kvslimmer(budget=512)"}) {
    const auto recipe = parse_recipe(text);
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    const Status can = card_supports(*model, *recipe);
    EXPECT_TRUE(can.ok()) << can.message();
    EXPECT_EQ(card_supports_hybrid(*model, *recipe).code(), Code::kUnsupported) << text;
  }
}

}  // namespace
}  // namespace longkv
