// Whole models with rows in memory and blocks in use on the card.
#include <algorithm>
#include <charconv>

#include "base/cpu.h"
#include "base/threads.h"
#include "cuda/card.h"
#include "cuda/card_session.h"
#include "engine/likelihood.h"
#include "engine/session.h"
#include "support/paths.h"

namespace longkv {
namespace {

std::string needle_model() { return test::repo_model("needle-10m-128k-f16.gguf"); }

std::vector<int32_t> text_ids(const std::string& text) {
  std::vector<int32_t> ids = {256};  // the model's first token; every other is a byte
  for (unsigned char c : text) ids.push_back(c);
  return ids;
}

// Sentences that the model knows as noise, with a pass key at `depth` of them.
std::string pass_key_text(int64_t bytes, double depth, const std::string& key) {
  const std::string noise =
      "The leaves are green. The snow is white. The night is dark. Off we go. And here we are once more. ";
  std::string text = "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it.\n ";
  const int64_t repeats = (bytes - 400) / int64_t(noise.size());
  const auto at = int64_t(double(repeats) * depth);
  for (int64_t i = 0; i < repeats; ++i) {
    if (i == at) text += "The pass key is " + key + ". Remember it. " + key + " is the pass key. ";
    text += noise;
  }
  return text + "\nWhat is the pass key? The pass key is ";
}

struct Bench {
  ThreadPool pool{default_threads()};
  std::shared_ptr<const LoadedModel> model = LoadedModel::load(needle_model()).value();
  std::shared_ptr<CardModel> card;

  Result<std::unique_ptr<Session>> open(const std::string& recipe, bool hybrid, int64_t context, int64_t cap = 0,
                                        int64_t chunk = 0) {
    card = CardModel::load(model, {0, cap}).value();
    SessionOptions o;
    o.context = context;
    o.recipe = parse_recipe(recipe).value();
    o.products = ProductType::kF32;
    o.card = card;
    o.card_hybrid = hybrid;
    o.card_chunk = chunk;
    return Session::create(model, o, pool);
  }
};

// The least VRAM as the refusal names it, in MiB.
int64_t smallest_cap(const std::string& message) {
  const std::string words = "the smallest --vram";
  const size_t at = message.find(" is ", message.find(words));
  if (message.find(words) == std::string::npos || at == std::string::npos) return -1;
  int64_t mib = -1;
  (void)std::from_chars(message.data() + at + 4, message.data() + message.size(), mib);
  return mib;
}

std::vector<float> copy(std::span<const float> v) { return {v.begin(), v.end()}; }

constexpr int64_t kLoadingCap = int64_t(90) << 20;  // loading the model takes so much, and the session more
constexpr int64_t kLong = 131072;

// Where the rows lie changes no bit: the same rows are chosen and attended in the same order.
TEST(CardHybrid, SameBitsAsOnTheCard) {
  LONGKV_NEED_CARD();
  Bench here, there;
  const auto ids = text_ids(pass_key_text(12000, 0.4, "71432"));
  const std::span<const int32_t> all(ids);
  for (const char* recipe :
       {"quest:budget=512", "quest:budget=512,dense_layers=0", "onebit:budget=512",
        "index=mean(block=32,coarse=1) + select=topk(budget=1024,sink=16,local=64,heads=shared)"}) {
    SCOPED_TRACE(recipe);
    auto want = here.open(recipe, false, 16384), have = there.open(recipe, true, 16384);
    ASSERT_TRUE(want.ok()) << want.status().message();
    ASSERT_TRUE(have.ok()) << have.status().message();
    ASSERT_DONE((*want)->prefill(ids));
    ASSERT_DONE((*have)->prefill(ids));
    EXPECT_EQ(copy((*have)->logits()), copy((*want)->logits()));
    for (int i = 0; i < 150; ++i) {
      ASSERT_DONE((*want)->decode(ids[size_t(i * 7)]));
      ASSERT_DONE((*have)->decode(ids[size_t(i * 7)]));
      ASSERT_EQ(copy((*have)->logits()), copy((*want)->logits())) << "step " << i;
    }
    const KvStats& stats = (*have)->kv_stats();
    EXPECT_GT(stats.blocks_found, stats.blocks_fetched);
    EXPECT_GT(stats.bus_bytes, 0);
    std::printf("  %s: %.1f%% of the blocks found on the card\n", recipe,
                100.0 * double(stats.blocks_found) / double(stats.blocks_found + stats.blocks_fetched));

    // Cut back, read on in two prompts: the first one's rows come back over the bus.
    ASSERT_DONE((*want)->truncate(5003));
    ASSERT_DONE((*have)->truncate(5003));
    ASSERT_DONE((*want)->prefill(all.subspan(5003)));
    ASSERT_DONE((*have)->prefill(all.subspan(5003)));
    for (int i = 0; i < 20; ++i) {
      ASSERT_DONE((*want)->decode(ids[size_t(i * 3)]));
      ASSERT_DONE((*have)->decode(ids[size_t(i * 3)]));
      ASSERT_EQ(copy((*have)->logits()), copy((*want)->logits())) << "after the second prompt, step " << i;
    }
  }
}

// Under the smallest cap the answers are the same, and under a little more, with the same chunks, all bits are, though
// blocks are let go of all the time.
TEST(CardHybrid, SmallestCapIsEnoughAndKept) {
  LONGKV_NEED_CARD();
  Bench here, there;
  const char* recipe = "quest:budget=32768,dense_layers=0";
  auto refused = there.open(recipe, true, kLong, kLoadingCap);
  ASSERT_EQ(refused.status().code(), Code::kOutOfMemory);
  const int64_t cap = smallest_cap(refused.status().message());
  ASSERT_GT(cap, kLoadingCap >> 20) << refused.status().message();
  EXPECT_EQ(there.open(recipe, true, kLong, (cap - 2) << 20).status().code(), Code::kOutOfMemory);
  {
    auto least = there.open(recipe, true, kLong, cap << 20);
    ASSERT_TRUE(least.ok()) << least.status().message();
    EXPECT_LE(there.card->vram_peak(), cap << 20);
  }
  auto have = there.open(recipe, true, kLong, (cap + 12) << 20, 256);
  ASSERT_TRUE(have.ok()) << have.status().message();
  auto want = here.open(recipe, false, kLong, 0, 256);
  const auto ids = text_ids(pass_key_text(60000, 0.5, "90817"));
  ASSERT_DONE((*want)->prefill(ids));
  ASSERT_DONE((*have)->prefill(ids));
  for (int i = 0; i < 60; ++i) {
    ASSERT_DONE((*want)->decode(ids[size_t(i * 901)]));
    ASSERT_DONE((*have)->decode(ids[size_t(i * 901)]));
    ASSERT_EQ(copy((*have)->logits()), copy((*want)->logits())) << "step " << i;
  }
  const KvStats& stats = (*have)->kv_stats();
  std::printf("  cap %lld MiB: %.1f%% of the blocks found on the card\n", static_cast<long long>(cap),
              100.0 * double(stats.blocks_found) / double(stats.blocks_found + stats.blocks_fetched));
  EXPECT_LE(there.card->vram_peak(), (cap + 12) << 20);
}

TEST(CardHybrid, EightBitRowsAndBoxes) {
  LONGKV_NEED_CARD();
  Bench here, there;
  const auto ids = text_ids(pass_key_text(9000, 0.3, "55501"));
  ThreadPool pool(default_threads());
  for (const char* recipe : {"quest:budget=1024 + store=q8_0",
                             "index=minmax(block=16,summary=q8) + select=topk(budget=1024) + store=q8_0"}) {
    SCOPED_TRACE(recipe);
    SessionOptions o;
    o.context = 10240;
    o.recipe = parse_recipe(recipe).value();
    o.products = ProductType::kF32;
    auto cpu = Session::create(here.model, o, pool);
    auto card = here.open(recipe, false, 10240), hybrid = there.open(recipe, true, 10240);
    ASSERT_TRUE(cpu.ok() && card.ok() && hybrid.ok()) << hybrid.status().message();
    for (auto* s : {&cpu, &card, &hybrid}) ASSERT_DONE((**s)->prefill(ids));
    double from_card = 0, from_cpu = 0;
    for (int i = 0; i < 40; ++i) {
      for (auto* s : {&cpu, &card, &hybrid}) ASSERT_DONE((**s)->decode(ids[size_t(i * 5)]));
      const int64_t vocab = here.model->config().vocab;
      from_card = std::max(from_card, kl_divergence((*card)->logits().data(), (*hybrid)->logits().data(), vocab));
      from_cpu = std::max(from_cpu, kl_divergence((*cpu)->logits().data(), (*hybrid)->logits().data(), vocab));
    }
    std::printf("  %s: KL from the card %.1e, from the CPU %.1e\n", recipe, from_card, from_cpu);
    EXPECT_LT(from_card, 0.05);
    EXPECT_LT(from_cpu, 0.1);  // near ties of boxes are decided by rounding
  }
}

// Answers at full length, wherever the cache lies.
TEST(CardHybrid, SameAnswersAt128K) {
  LONGKV_NEED_CARD();
  Bench bench;
  int right = 0;
  for (const double depth : {0.1, 0.5, 0.9}) {
    const std::string key = std::to_string(31000 + int(depth * 5000));
    const auto ids = text_ids(pass_key_text(kLong - 100, depth, key));
    std::vector<std::string> answers;
    struct Place {
      const char* recipe;
      bool card_kv, hybrid;
    };
    for (const Place& place : {Place{"full", true, false}, Place{"quest:budget=4096", true, false},
                               Place{"quest:budget=4096", true, true}, Place{"quest:budget=4096", false, false}}) {
      bench.card = CardModel::load(bench.model, {}).value();
      SessionOptions o;
      o.context = kLong;
      o.recipe = parse_recipe(place.recipe).value();
      o.products = ProductType::kF32;
      o.card = bench.card;
      o.card_kv = place.card_kv;
      o.card_hybrid = place.hybrid;
      auto session = Session::create(bench.model, o, bench.pool);
      ASSERT_TRUE(session.ok()) << session.status().message();
      ASSERT_DONE((*session)->prefill(ids));
      std::string answer;
      for (int i = 0; i < 6; ++i) {
        const auto logits = (*session)->logits();
        const auto id = int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
        if (id < 256) answer += char(id);
        ASSERT_DONE((*session)->decode(id));
      }
      answers.push_back(answer);
    }
    std::printf("  depth %.1f, key %s: '%s' '%s' '%s' '%s'\n", depth, key.c_str(), answers[0].c_str(),
                answers[1].c_str(), answers[2].c_str(), answers[3].c_str());
    right += answers[0].starts_with(key);
    EXPECT_EQ(answers[2], answers[1]);
    EXPECT_EQ(answers[2], answers[3]);
  }
  EXPECT_GE(right, 2);
}

TEST(CardHybrid, RefusesWhatItIsNot) {
  LONGKV_NEED_CARD();
  Bench bench;
  EXPECT_EQ(bench.open("full", true, 1024).status().code(), Code::kUnsupported);
  EXPECT_EQ(bench.open("quest:budget=512 + store=bf16", true, 1024).status().code(), Code::kUnsupported);
  // More memory than any machine has: the refusal names the rows.
  ThreadPool pool(2);
  const auto refused = SharedRows::create(int64_t(1) << 48, "the KV rows of layer 3", pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_EQ(refused.status().code(), Code::kOutOfMemory);
  EXPECT_NE(refused.status().message().find("layer 3"), std::string::npos);
}

}  // namespace
}  // namespace longkv
