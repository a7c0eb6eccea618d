// Whole models on the card against the CPU's f32 path.
#include "engine/session.h"

#include <algorithm>
#include <fstream>

#include "base/cpu.h"
#include "base/threads.h"
#include "cuda/card.h"
#include "cuda/card_session.h"
#include "cuda/session_pair.h"
#include "engine/likelihood.h"
#include "support/golden.h"
#include "support/paths.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::random_ids;

TEST(CardSession, LogitsOfRealModelsEqualTheCpus) {
  LONGKV_NEED_CARD();
  for (const std::string& path : models()) {
    SCOPED_TRACE(path);
    const Pair p = open_pair(path);
    if (!p.card || !card_supports(*p.model, Recipe{}).ok()) continue;
    const auto ids = random_ids(333, p.model->config().vocab, 5);
    const auto cpu = p.session(false, 512), gpu = p.session(true, 512);
    ASSERT_TRUE(cpu && gpu);
    ASSERT_DONE(cpu->prefill(ids));
    ASSERT_DONE(gpu->prefill(ids));
    EXPECT_EQ(gpu->tokens(), 333);
    expect_close(p, gpu->logits(), cpu->logits(), "prompt", 2e-3);
    for (int i = 0; i < 5; ++i) {
      ASSERT_DONE(cpu->decode(ids[size_t(i)]));
      ASSERT_DONE(gpu->decode(ids[size_t(i)]));
    }
    // Decoding rounds activations to 8 bits, as the CPU's default does.
    expect_close(p, gpu->logits(), cpu->logits(), "decoded", 2e-2);
    EXPECT_EQ(gpu->kv_stats().steps, 5);
  }
}

TEST(CardSession, TinyModelsOfEveryFamily) {
  LONGKV_NEED_CARD();
  int run = 0;
  for (const std::string& name : test::tiny_goldens()) {
    SCOPED_TRACE(name);
    const auto model = LoadedModel::load(test::tiny_model(name)).value();
    const auto card = CardModel::load(model, {});
    if (!card.ok()) {  // heads of a size that the card has no kernel for
      EXPECT_EQ(card.status().code(), Code::kUnsupported) << card.status().message();
      continue;
    }
    const Pair p{std::make_unique<ThreadPool>(default_threads()), model, *card};
    const auto ids = random_ids(90, model->config().vocab, 6);
    const auto cpu = p.session(false, 128), gpu = p.session(true, 128);
    ASSERT_DONE(cpu->prefill(ids));
    ASSERT_DONE(gpu->prefill(ids));
    EXPECT_LT(relative_error(gpu->logits(), cpu->logits()), 0.02);
    ++run;
  }
  std::printf("  %d tiny models on the card\n", run);
}

TEST(CardSession, ChunksOrdersSinksAndCutsAgree) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const int64_t vocab = p.model->config().vocab;
  const auto ids = random_ids(700, vocab, 9);
  const auto whole = p.session(true, 1024), pieces = p.session(true, 1024, KvType::kF16, 96);
  const auto by_chunk = p.session(true, 1024, KvType::kF16, 128, PrefillOrder::kChunkMajor);
  ASSERT_DONE(whole->prefill(ids));
  ASSERT_DONE(pieces->prefill(ids));
  std::vector<float> last;
  int64_t rows = 0;
  ASSERT_DONE(by_chunk->prefill(
      ids, {}, nullptr,
      [&](int64_t first, int64_t n, const float* logits) {
        EXPECT_EQ(first, 650 + rows);
        rows += n;
        last.assign(logits + (n - 1) * vocab, logits + n * vocab);
      },
      650));
  EXPECT_EQ(rows, 50);
  EXPECT_LT(relative_error(pieces->logits(), whole->logits()), 5e-3);
  EXPECT_LT(relative_error(by_chunk->logits(), whole->logits()), 5e-3);
  EXPECT_LT(relative_error(last, whole->logits()), 5e-3);

  // A prompt in two calls, and one that was cut back, continue as the whole does.
  const auto later = p.session(true, 1024);
  const std::span<const int32_t> all(ids);
  ASSERT_DONE(later->prefill(all.first(400)));
  ASSERT_DONE(later->decode(3));
  ASSERT_DONE(later->truncate(400));
  ASSERT_DONE(later->prefill(all.subspan(400)));
  EXPECT_LT(relative_error(later->logits(), whole->logits()), 5e-3);

  // Same input, same bits.
  const auto again = p.session(true, 1024);
  ASSERT_DONE(again->prefill(ids));
  EXPECT_EQ(relative_error(again->logits(), whole->logits()), 0.0);
  for (int i = 0; i < 4; ++i) {
    ASSERT_DONE(again->decode(i));
    ASSERT_DONE(whole->decode(i));
  }
  EXPECT_EQ(relative_error(again->logits(), whole->logits()), 0.0);
}

TEST(CardSession, RowTypes) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(600, p.model->config().vocab, 10);
  const auto f16 = p.session(true, 1024);
  ASSERT_DONE(f16->prefill(ids));
  for (KvType type : {KvType::kBf16, KvType::kQ8_0, KvType::kFp8, KvType::kQ4_0}) {
    const auto other = p.session(true, 1024, type, 128);
    ASSERT_DONE(other->prefill(std::span<const int32_t>(ids).first(300)));
    ASSERT_DONE(other->prefill(std::span<const int32_t>(ids).subspan(300)));
    // The CPU's rows of that type lose as much.
    const auto cpu = p.session(false, 1024, type), exact = p.session(false, 1024);
    ASSERT_DONE(cpu->prefill(ids));
    ASSERT_DONE(exact->prefill(ids));
    const double lost = relative_error(other->logits(), f16->logits());
    EXPECT_LT(lost, 0.02 + 1.5 * relative_error(cpu->logits(), exact->logits())) << kv_type_name(type);
    for (int i = 0; i < 3; ++i) {
      ASSERT_DONE(other->decode(ids[size_t(i)]));
      ASSERT_DONE(cpu->decode(ids[size_t(i)]));
    }
    expect_close(p, other->logits(), cpu->logits(), kv_type_name(type), 0.05);
    EXPECT_GT(lost, 0.0) << kv_type_name(type);
    EXPECT_EQ(other->kv_bytes_held() < f16->kv_bytes_held(), type != KvType::kBf16);
  }
}

// Perplexity of a text that is read as a prompt, and of its last tokens fed one by one.
struct Perplexity {
  double prompt = 0, fed = 0;
};

Perplexity perplexity(Session& s, std::span<const int32_t> ids, int64_t fed) {
  const int64_t vocab = s.model().config().vocab, n = int64_t(ids.size()) - fed;
  double prompt = 0, later = 0;
  const auto loss = [&](const float* logits, int32_t next) {
    const float top = *std::max_element(logits, logits + vocab);
    double sum = 0;
    for (int64_t i = 0; i < vocab; ++i) sum += std::exp(double(logits[i]) - top);
    return std::log(sum) - (double(logits[next]) - top);
  };
  EXPECT_TRUE(s.prefill(ids.first(size_t(n)), {}, nullptr, [&](int64_t first, int64_t rows, const float* logits) {
                 for (int64_t i = 0; i < rows && first + i + 1 < n; ++i)
                   prompt += loss(logits + i * vocab, ids[size_t(first + i + 1)]);
               }).ok());
  for (int64_t i = n; i < n + fed; ++i) {
    later += loss(s.logits().data(), ids[size_t(i)]);
    EXPECT_TRUE(s.decode(ids[size_t(i)]).ok());
  }
  return {std::exp(prompt / double(n - 1)), std::exp(later / double(fed))};
}

TEST(CardSession, PerplexityIsTheCpus) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  std::ifstream file(test::repo_model("../docs/architecture.md"), std::ios::binary);
  std::vector<int32_t> ids = {256};  // the model's first token; every other is a byte
  for (char c; int64_t(ids.size()) < 3000 && file.get(c);) ids.push_back(int32_t(uint8_t(c)));
  ASSERT_EQ(ids.size(), 3000u);
  Perplexity exact;
  for (KvType type : {KvType::kF16, KvType::kQ8_0, KvType::kFp8, KvType::kQ4_0}) {
    const Perplexity cpu = perplexity(*p.session(false, 4096, type), ids, 400),
                     gpu = perplexity(*p.session(true, 4096, type), ids, 400);
    std::printf("  %s: perplexity %.4f and %.4f on the CPU, %.4f and %.4f on the card\n", kv_type_name(type),
                cpu.prompt, cpu.fed, gpu.prompt, gpu.fed);
    if (type == KvType::kF16) exact = cpu;
    // Rows of few bits differ where a value lies between two codes, which moves as much as the rounding itself does.
    EXPECT_NEAR(gpu.prompt / cpu.prompt, 1.0, 1e-3 + std::abs(cpu.prompt / exact.prompt - 1)) << kv_type_name(type);
    EXPECT_NEAR(gpu.fed / cpu.fed, 1.0, 1e-3 + std::abs(cpu.fed / exact.fed - 1)) << kv_type_name(type);
  }
}

// A recipe chooses the same rows on both, so its answers differ as those of full attention do.
TEST(CardSession, ChosenRowsAsOnTheCpu) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(3000, p.model->config().vocab, 12);
  for (const char* text :
       {"quest:budget=256", "quest:budget=4096", "onebit:budget=512", "quest:budget=256 + store=fp8",
        "quest:budget=256 + store=q4_0", "twilight:refine=exact,candidates=1024",
        "twilight:refine=exact,candidates=1024,budget=200", "twilight:refine=exact,p=0.6 + store=q8_0",
        "index=minmax(block=16,summary=q8) + select=topk(budget=512)",
        "index=minmax(block=16,coarse=4) + select=topk(budget=128,sink=20,local=40)",
        "index=minmax(block=16,coarse=8) + select=topk(budget=128,sink=0,local=0,heads=shared)",
        "index=mean(block=32,coarse=1) + "
        "select=topk(budget=512,sink=16,local=64,heads=shared)"}) {
    SCOPED_TRACE(text);
    const auto cpu = open_session(p.model, text, nullptr, *p.pool), gpu = open_session(p.model, text, p.card, *p.pool);
    ASSERT_TRUE(cpu && gpu);
    for (Session* s : {cpu.get(), gpu.get()}) {
      ASSERT_DONE(s->prefill(ids));
      ASSERT_DONE(decode_all(*s, std::span<const int32_t>(ids).first(40)));
    }
    const double kl = kl_divergence(cpu->logits().data(), gpu->logits().data(), p.model->config().vocab);
    std::printf("  %s: KL %.2e\n", text, kl);
    EXPECT_LT(kl, 0.05);
    const auto rows = double(cpu->kv_stats().rows_attended);
    EXPECT_NEAR(double(gpu->kv_stats().rows_attended), rows, 0.1 * rows);
  }
}

// Steps are recorded for what they need: before the budget is full nothing is scored, a summary is written where a
// block ends. Tokens decoded over both borders, and again after a cut, meet the rows that they meet on the CPU.
TEST(CardSession, StepsAtBlockEndsAndOverTheBudget) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(700, p.model->config().vocab, 29);
  const std::span<const int32_t> all(ids);
  for (const char* text : {"index=minmax(block=16) + select=topk(budget=256,sink=16,local=16)",
                           "index=minmax(block=32,summary=q8,coarse=4) + select=topk(budget=256,sink=0,local=0)",
                           "index=bits(block=16,coarse=1) + select=topk(budget=256,sink=16,local=16,aggregate=softmax)",
                           "index=minmax(block=16) + select=topk(budget=256,sink=16,local=16) + store=kivi4"}) {
    SCOPED_TRACE(text);
    const auto cpu = open_session(p.model, text, nullptr, *p.pool), gpu = open_session(p.model, text, p.card, *p.pool);
    ASSERT_TRUE(cpu && gpu);
    for (Session* s : {cpu.get(), gpu.get()}) ASSERT_DONE(s->prefill(all.first(201)));
    const auto go_on = [&](size_t from, size_t n, const char* what) {
      for (Session* s : {cpu.get(), gpu.get()}) ASSERT_DONE(decode_all(*s, all.subspan(from, n)));
      expect_close(p, gpu->logits(), cpu->logits(), what, 0.02);
      const auto rows = double(cpu->kv_stats().rows_attended);
      EXPECT_NEAR(double(gpu->kv_stats().rows_attended), rows, 0.1 * rows);
    };
    go_on(201, 50, "below the budget");
    go_on(251, 10, "over it");
    go_on(261, 139, "far over it");
    for (Session* s : {cpu.get(), gpu.get()}) ASSERT_DONE(s->truncate(210));
    go_on(400, 20, "below it again");
    go_on(420, 230, "far over it again");
  }
}

// Old rows in another form, on both: while decoding, after a cut, and under a second prompt.
TEST(CardSession, EncodedRowsAsOnTheCpu) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(3000, p.model->config().vocab, 21);
  const std::span<const int32_t> all(ids);
  const std::string mask = "leank:mask=" + test::repo_model("needle-10m-128k-leank70.gguf");
  for (const std::string& text :
       {std::string("kivi4"), std::string("kivi2"), std::string("store=kivi4(sink=16,window=40)"), mask,
        mask + "+kivi4", std::string("quest:budget=512 + store=kivi4"),
        std::string("onebit:budget=512 + store=kivi4(sink=32)")}) {
    SCOPED_TRACE(text);
    const auto cpu = open_session(p.model, text, nullptr, *p.pool), gpu = open_session(p.model, text, p.card, *p.pool);
    ASSERT_TRUE(cpu && gpu);
    for (Session* s : {cpu.get(), gpu.get()}) {
      ASSERT_DONE(s->prefill(all.first(2500)));
      ASSERT_DONE(decode_all(*s, all.first(100)));
    }
    const double limit = cpu->kv().recipe().select.all ? 2e-3 : 0.02;  // a choice may differ
    expect_close(p, gpu->logits(), cpu->logits(), "decoded", limit);
    EXPECT_LT(double(gpu->kv_bytes_held()), 1.2 * double(cpu->kv_bytes_held()));  // channels are filled up to 32
    for (Session* s : {cpu.get(), gpu.get()}) {
      ASSERT_DONE(s->truncate(2333));
      ASSERT_DONE(decode_all(*s, all.first(50)));
    }
    expect_close(p, gpu->logits(), cpu->logits(), "after a cut", limit);
    for (Session* s : {cpu.get(), gpu.get()}) {
      ASSERT_DONE(s->prefill(all.subspan(2500)));
      ASSERT_DONE(decode_all(*s, all.first(40)));
    }
    expect_close(p, gpu->logits(), cpu->logits(), "after a second prompt", limit);
  }
}

// A prompt that is interrupted when some layers have encoded its rows leaves what was held before.
TEST(CardSession, InterruptedPromptOverEncodedRows) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(2000, p.model->config().vocab, 22);
  const std::span<const int32_t> all(ids);
  const auto plain = open_session(p.model, "kivi4", p.card, *p.pool),
             stopped = open_session(p.model, "kivi4", p.card, *p.pool);
  ASSERT_TRUE(plain && stopped);
  for (Session* each : {plain.get(), stopped.get()}) ASSERT_DONE(each->prefill(all.first(1000)));
  interrupt_prompt(*stopped, all.subspan(1000));
  EXPECT_EQ(stopped->tokens(), 1000);
  for (Session* each : {plain.get(), stopped.get()}) ASSERT_DONE(decode_all(*each, all.first(60)));
  // Up to a window's rows were encoded sooner.
  expect_close(p, stopped->logits(), plain->logits(), "interrupted", 0.05);
  // Whose prompt does not pass a layer at once cannot attend its rows as they came.
  SessionOptions o;
  o.context = 4096;
  o.recipe = parse_recipe("kivi4").value();
  o.card = p.card;
  o.card_chunk = 256;
  o.order = PrefillOrder::kChunkMajor;
  auto pieces = Session::create(p.model, o, *p.pool);
  ASSERT_TRUE(pieces.ok());
  EXPECT_EQ((*pieces)->prefill(all).code(), Code::kUnsupported);
}

// Weights on the card, cache in memory: any recipe that decodes.
TEST(CardSession, CacheInMemory) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(2500, p.model->config().vocab, 13);
  const std::span<const int32_t> all(ids);
  for (const char* text : {"full", "q8", "onebit:budget=256", "ktransformers:budget=1024,local=256", "kivi4"}) {
    SCOPED_TRACE(text);
    SessionOptions o;
    o.context = 4096;
    o.recipe = parse_recipe(text).value();
    o.products = ProductType::kF32;
    auto cpu = Session::create(p.model, o, *p.pool);
    o.card = p.card;
    o.card_kv = false;
    o.card_chunk = 640;
    auto gpu = Session::create(p.model, o, *p.pool);
    ASSERT_TRUE(cpu.ok());
    ASSERT_TRUE(gpu.ok()) << gpu.status().message();
    ASSERT_DONE((*cpu)->prefill(ids));
    ASSERT_DONE((*gpu)->prefill(ids));
    EXPECT_EQ((*gpu)->tokens(), 2500);
    expect_close(p, (*gpu)->logits(), (*cpu)->logits(), "prompt", 5e-3);
    for (int i = 0; i < 20; ++i) {
      ASSERT_DONE((*cpu)->decode(ids[size_t(i)]));
      ASSERT_DONE((*gpu)->decode(ids[size_t(i)]));
    }
    expect_close(p, (*gpu)->logits(), (*cpu)->logits(), "decoded", 0.1);
    EXPECT_EQ((*gpu)->kv_bytes_held(), (*cpu)->kv_bytes_held());
  }
  // In two prompts: the first one's rows come back to the card.
  SessionOptions o;
  o.context = 4096;
  o.products = ProductType::kF32;
  auto whole = Session::create(p.model, o, *p.pool);
  o.card = p.card;
  o.card_kv = false;
  auto pieces = Session::create(p.model, o, *p.pool);
  ASSERT_TRUE(whole.ok() && pieces.ok());
  ASSERT_DONE((*whole)->prefill(ids));
  ASSERT_DONE((*pieces)->prefill(all.first(1111)));
  ASSERT_DONE((*pieces)->prefill(all.subspan(1111)));
  expect_close(p, (*pieces)->logits(), (*whole)->logits(), "two prompts", 5e-3);
  o.recipe = parse_recipe("snapkv").value();
  EXPECT_EQ(Session::create(p.model, o, *p.pool).status().code(), Code::kUnsupported);
}

// The card reads, the CPU decodes: other KV sides take in the prompt, checks compare with full attention, and a side
// that was exchanged reads on the CPU.
TEST(CardSession, ReadsOnly) {
  LONGKV_NEED_CARD();
  const Pair p = open_pair(models().front());
  ASSERT_TRUE(p.card);
  const auto ids = random_ids(2500, p.model->config().vocab, 15);
  SessionOptions o;
  o.context = 4096;
  o.products = ProductType::kF32;
  auto cpu = Session::create(p.model, o, *p.pool);
  o.card = p.card;
  o.card_kv = false;
  o.card_decodes = false;
  o.card_chunk = 640;
  auto gpu = Session::create(p.model, o, *p.pool);
  ASSERT_TRUE(cpu.ok() && gpu.ok()) << gpu.status().message();
  EXPECT_TRUE((*gpu)->reads_on_card());
  const char* const texts[] = {"quest:budget=256,dense_layers=0", "snapkv:budget=256", "think", "adakv:budget=256"};
  std::vector<std::unique_ptr<KvSession>> ours, theirs;
  for (const char* text : texts) {
    for (Session* s : {cpu->get(), gpu->get()}) {
      auto side = s->make_kv(parse_recipe(text).value());
      ASSERT_TRUE(side.ok());
      s->kv().add_follower(side->get());
      (s == cpu->get() ? theirs : ours).push_back(std::move(side).value());
    }
  }
  ASSERT_DONE((*cpu)->prefill(ids));
  ASSERT_DONE((*gpu)->prefill(ids));
  (*cpu)->kv().clear_followers();
  (*gpu)->kv().clear_followers();
  expect_close(p, (*gpu)->logits(), (*cpu)->logits(), "prompt", 5e-3);
  const auto decode = [&](const char* what) {
    for (int i = 0; i < 20; ++i) {
      ASSERT_DONE((*cpu)->decode(ids[size_t(i)]));
      ASSERT_DONE((*gpu)->decode(ids[size_t(i)]));
    }
    expect_close(p, (*gpu)->logits(), (*cpu)->logits(), what, 0.1);
  };
  decode("full");
  for (size_t i = 0; i < ours.size(); ++i) {
    (*cpu)->exchange_kv(theirs[i]);
    (*gpu)->exchange_kv(ours[i]);
    EXPECT_FALSE((*gpu)->reads_on_card());
    EXPECT_EQ((*gpu)->tokens(), 2500);
    decode(texts[i]);
    (*cpu)->exchange_kv(theirs[i]);
    (*gpu)->exchange_kv(ours[i]);
  }
  ASSERT_DONE((*gpu)->truncate(0));
  ASSERT_DONE((*gpu)->prefill(std::span(ids).first(700)));
  EXPECT_EQ((*gpu)->tokens(), 700);
}

TEST(CardSession, CapsAndRefusals) {
  LONGKV_NEED_CARD();
  const auto model = LoadedModel::load(models().front()).value();
  const auto small = CardModel::load(model, {0, int64_t(1) << 20});
  ASSERT_FALSE(small.ok());
  EXPECT_EQ(small.status().code(), Code::kOutOfMemory);
  constexpr int64_t kCap = int64_t(300) << 20;
  const auto card = CardModel::load(model, {0, kCap}).value();
  ThreadPool pool(2);
  SessionOptions o;
  o.context = int64_t(1) << 20;
  o.card = card;
  const auto large = Session::create(model, o, pool);
  ASSERT_FALSE(large.ok());
  EXPECT_EQ(large.status().code(), Code::kOutOfMemory);
  EXPECT_NE(large.status().message().find("KV cache of 1048576 tokens"), std::string::npos) << large.status().message();
  o.context = 4096;
  const auto fits = Session::create(model, o, pool);
  ASSERT_TRUE(fits.ok()) << fits.status().message();
  EXPECT_LE(card->vram_peak(), kCap);
  for (const char* text :
       {"h2o", "think", "store=kivi4(sink=4)", "store=kivi4(rotate=v)", "store=q8_0(window=64)",
        "twilight:refine=exact + store=kivi4", "index=mean(block=256) + select=topk + store=kivi2"}) {
    o.recipe = parse_recipe(text).value();
    const Status refused = Session::create(model, o, pool).status();
    EXPECT_EQ(refused.code(), Code::kUnsupported) << text;
    // What was encoded names what would do.
    if (o.recipe.store.window > 0 || o.recipe.mask.kind != MaskKind::kNone) {
      EXPECT_NE(refused.message().find("nearest legal"), std::string::npos) << text << ": " << refused.message();
    }
  }
}

}  // namespace
}  // namespace longkv
