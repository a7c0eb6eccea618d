// Keep stages to which a pass of each chunk through the model says what matters: every family, prompts whole and in
// pieces, turns, memory after a prompt.
#include <gtest/gtest.h>

#include "engine/session.h"
#include "kv_keep/keep_harness.h"
#include "support/golden.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::random_ids;

std::unique_ptr<Session> open(const std::shared_ptr<const LoadedModel>& model, const std::string& kv,
                              ThreadPool& pool) {
  SessionOptions options;
  options.context = 400;
  options.recipe = parse_recipe(kv).value();
  options.chunk = 64;
  auto session = Session::create(model, options, pool);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return session.ok() ? std::move(session).value() : nullptr;
}

std::vector<float> logits(const Session& s) { return {s.logits().begin(), s.logits().end()}; }

constexpr const char* kScored[] = {"asymkv:budget=80,sink=4,window=8",
                                   "asymkv:budget=80,sink=4,window=8+store=fp8(window=32)",
                                   "asymkv-release:budget=80,sink=4", "kvslimmer-release:budget=80,sink=4"};

TEST(Scoring, EveryFamilyReadsPromptsAndTurns) {
  ThreadPool pool(2);
  for (const std::string& name : test::tiny_goldens()) {
    const auto model = LoadedModel::load(test::tiny_model(name)).value();
    const ModelConfig& c = model->config();
    for (const std::string kv : kScored) {
      SCOPED_TRACE(name + " " + kv);
      const auto ids = random_ids(200, c.vocab, 1), more = random_ids(90, c.vocab, 2);
      auto whole = open(model, kv, pool), pieces = open(model, kv, pool);
      ASSERT_TRUE(whole->prefill(ids).ok());
      ASSERT_TRUE(pieces->start_prompt(ids).ok());
      for (bool done = false; !done;) {
        const auto read = pieces->read_piece();
        ASSERT_TRUE(read.ok()) << read.status().message();
        done = *read;
      }
      EXPECT_EQ(logits(*whole), logits(*pieces));
      EXPECT_EQ(whole->tokens(), 200);
      const KvCache& cache = whole->kv().cache();
      const bool after = kv.starts_with("asymkv:");
      for (int layer = 0; layer < c.layers; ++layer) {
        // What is read last comes after the last merge where chunks are read twice: 192 + 8 tokens.
        if (c.kv_shape().window_of(layer) > 0) continue;
        EXPECT_EQ(cache.rows(layer).v, after ? 80 : 88);
      }
      for (Session* s : {whole.get(), pieces.get()}) {
        for (const int32_t id : random_ids(3, c.vocab, 3)) ASSERT_TRUE(s->decode(id).ok());
        ASSERT_TRUE(s->prefill(more).ok());
      }
      EXPECT_EQ(logits(*whole), logits(*pieces));
      // Another sequence in the same session is as in a fresh one.
      ASSERT_TRUE(whole->truncate(0).ok());
      auto fresh = open(model, kv, pool);
      ASSERT_TRUE(whole->prefill(more).ok());
      ASSERT_TRUE(fresh->prefill(more).ok());
      EXPECT_EQ(logits(*whole), logits(*fresh));
    }
  }
}

// Nothing is held yet when the first chunk of a long prompt is scored, whatever is asked of the rows.
TEST(Scoring, TheFirstChunkFindsNoRows) {
  ThreadPool pool(2);
  const auto model = LoadedModel::load(test::tiny_model("llama")).value();
  const auto ids = random_ids(200, model->config().vocab, 7);
  for (const char* kv : {"kvslimmer:budget=80,sink=4,window=8,norms=release,running=true,reread=true,link_score=cost",
                         "kvslimmer:budget=80,sink=4,window=8,norms=release,running=true,reread=true,bias=fit"}) {
    auto session = open(model, kv, pool);
    ASSERT_TRUE(session->prefill(ids).ok()) << kv;
    EXPECT_EQ(session->kv().cache().rows(0).v, 88) << kv;
  }
}

// A prompt that the budget holds is read as by full attention, and nothing is scored for it.
TEST(Scoring, ShortPromptsAreFull) {
  ThreadPool pool(2);
  const auto model = LoadedModel::load(test::tiny_model("llama")).value();
  const auto ids = random_ids(150, model->config().vocab, 4);
  auto full = open(model, "full", pool);
  ASSERT_TRUE(full->prefill(ids).ok());
  for (const char* kv : {"asymkv:budget=150", "asymkv-release:budget=150", "kvslimmer-release:budget=150"}) {
    auto merged = open(model, kv, pool);
    ASSERT_TRUE(merged->prefill(ids).ok());
    EXPECT_EQ(logits(*full), logits(*merged)) << kv;
  }
}

TEST(Scoring, ThreadsGiveTheSameBits) {
  ThreadPool one(1), three(3);
  const auto model = LoadedModel::load(test::tiny_model("llama")).value();
  const auto ids = random_ids(200, model->config().vocab, 5);
  for (const char* kv : kScored) {
    auto a = open(model, kv, one), b = open(model, kv, three);
    ASSERT_TRUE(a->prefill(ids).ok());
    ASSERT_TRUE(b->prefill(ids).ok());
    EXPECT_EQ(logits(*a), logits(*b)) << kv;
  }
}

TEST(Scoring, MemoryOfMergedRowsReturns) {
  ThreadPool pool(2);
  const auto model = LoadedModel::load(test::tiny_model("llama")).value();
  for (const char* kv : {"asymkv:budget=80,sink=4,window=8", "asymkv-release:budget=80,sink=4"}) {
    SessionOptions options;
    options.context = 6000;
    options.recipe = parse_recipe(kv).value();
    auto session = std::move(Session::create(model, options, pool)).value();
    int64_t peak = 0;
    ASSERT_TRUE(session
                    ->prefill(random_ids(5000, model->config().vocab, 6),
                              [&](int64_t, int64_t) { peak = std::max(peak, session->kv().cache().bytes_used()); })
                    .ok());
    const KvCache& cache = session->kv().cache();
    EXPECT_LE(test::resident_bytes(cache), test::allowed_resident(cache)) << kv;
    // 5000 = 9 * 512 + 392; 392 rows of the last chunk stay where merging comes before it.
    const int64_t last = options.recipe.keep.reread ? 392 : 0;
    const int64_t row = cache.bytes_used() / (80 + last);
    EXPECT_LE(peak, row * (80 + 2 * 512)) << kv;
    EXPECT_EQ(cache.rows(0).v, 80 + last) << kv;
  }
}

}  // namespace
}  // namespace longkv
