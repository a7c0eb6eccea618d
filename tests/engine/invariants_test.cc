// What must not change the result: schedule, chunk size, threads, a cut and a second reading.
#include <gtest/gtest.h>

#include <cmath>

#include "engine/session.h"
#include "support/golden.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::random_ids;

std::shared_ptr<const LoadedModel> tiny(const std::string& name) {
  auto model = LoadedModel::load(test::tiny_model(name));
  EXPECT_TRUE(model.ok()) << model.status().message();
  return *model;
}

struct Settings {
  std::string kv = "full";
  PrefillOrder order = PrefillOrder::kLayerMajor;
  int64_t chunk = 512;
  ProductType products = ProductType::kInt8;
  int64_t context = 512;
};

std::unique_ptr<Session> make(const std::shared_ptr<const LoadedModel>& model, const Settings& settings,
                              ThreadPool& pool) {
  SessionOptions o;
  o.context = settings.context;
  o.recipe = *parse_recipe(settings.kv);
  o.order = settings.order;
  o.chunk = settings.chunk;
  o.products = settings.products;
  auto session = Session::create(model, o, pool);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return std::move(session).value();
}

std::vector<float> logits_of(const Session& session) { return {session.logits().begin(), session.logits().end()}; }

// Logits after the prompt and after each of `more` decoded tokens, one after another.
std::vector<float> read_and_decode(Session& session, std::span<const int32_t> prompt, std::span<const int32_t> more) {
  EXPECT_TRUE(session.prefill(prompt).ok());
  std::vector<float> all = logits_of(session);
  for (int32_t id : more) {
    EXPECT_TRUE(session.decode(id).ok());
    all.insert(all.end(), session.logits().begin(), session.logits().end());
  }
  return all;
}

double distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, norm = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += (double(a[i]) - b[i]) * (double(a[i]) - b[i]);
    norm += double(b[i]) * b[i];
  }
  return std::sqrt(difference / norm);
}

TEST(SessionInvariants, LayerMajorEqualsChunkMajorBitForBit) {
  ThreadPool pool(2);
  for (const char* name : {"llama", "gemma3", "phi3"}) {
    const auto model = tiny(name);
    for (int64_t n : {1, 7, 8, 63, 64, 65, 130}) {
      const auto ids = random_ids(n, model->config().vocab);
      for (int64_t chunk : {8, 64, 512}) {
        Settings s{.chunk = chunk};
        auto a = make(model, s, pool);
        s.order = PrefillOrder::kChunkMajor;
        auto b = make(model, s, pool);
        ASSERT_EQ(read_and_decode(*a, ids, {}), read_and_decode(*b, ids, {})) << name << " " << n << " " << chunk;
      }
    }
  }
}

TEST(SessionInvariants, ChunkSizeDoesNotChangeFp32Logits) {
  ThreadPool pool(2);
  const auto model = tiny("llama");
  for (int64_t n = 1; n <= 70; n += 3) {
    const auto ids = random_ids(n, model->config().vocab);
    auto whole = make(model, {.products = ProductType::kF32}, pool);
    const auto want = read_and_decode(*whole, ids, {});
    for (int64_t chunk : {1, 3, 16, 33, 64}) {
      auto s = make(model, {.chunk = chunk, .products = ProductType::kF32}, pool);
      // Products of few and of many tokens add in different orders; f16 rows may then round to a neighbour.
      EXPECT_LT(distance(read_and_decode(*s, ids, {}), want), 1e-3) << n << " in chunks of " << chunk;
    }
  }
}

TEST(SessionInvariants, ThreadsDoNotChangeABit) {
  const auto model = tiny("llama");
  const auto ids = random_ids(200, model->config().vocab), more = random_ids(20, model->config().vocab, 2);
  for (const char* kv : {"full", "quest:block=16,budget=64,dense_layers=0",
                         "index=bits(block=16) + select=topk(budget=64,sink=4,local=16)",
                         "index=mean(block=16) + select=topk(budget=64,sink=4,local=16,heads=shared)"}) {
    ThreadPool one(1);
    auto reference = make(model, {.kv = kv}, one);
    const auto want = read_and_decode(*reference, ids, more);
    for (int threads : {2, 3}) {
      ThreadPool pool(threads);
      auto s = make(model, {.kv = kv}, pool);
      ASSERT_EQ(read_and_decode(*s, ids, more), want) << kv << " with " << threads << " threads";
    }
  }
}

TEST(SessionInvariants, ABudgetThatCoversEverythingEqualsFullAttention) {
  ThreadPool pool(2);
  const auto model = tiny("llama");
  const auto ids = random_ids(150, model->config().vocab), more = random_ids(40, model->config().vocab, 2);
  auto full = make(model, {}, pool);
  const auto want = read_and_decode(*full, ids, more);
  for (const char* kv : {"quest:budget=512,dense_layers=0", "index=bits(block=16) + select=topk(budget=512)"}) {
    auto s = make(model, {.kv = kv}, pool);
    ASSERT_EQ(read_and_decode(*s, ids, more), want) << kv;
  }
}

TEST(SessionInvariants, ACutSequenceReadAgainEqualsAFreshOne) {
  ThreadPool pool(2);
  const auto model = tiny("llama");
  const auto ids = random_ids(100, model->config().vocab), more = random_ids(12, model->config().vocab, 2);
  for (const char* kv : {"full", "quest:block=16,budget=64,dense_layers=0"}) {
    auto fresh = make(model, {.kv = kv}, pool);
    const auto want = read_and_decode(*fresh, ids, more);
    auto s = make(model, {.kv = kv}, pool);
    read_and_decode(*s, ids, random_ids(30, model->config().vocab, 3));
    ASSERT_TRUE(s->truncate(0).ok());
    ASSERT_EQ(read_and_decode(*s, ids, more), want) << kv;
  }
}

TEST(SessionInvariants, ChecksLeaveNoTrace) {
  ThreadPool pool(2);
  const auto model = tiny("llama");
  const auto ids = random_ids(200, model->config().vocab), more = random_ids(30, model->config().vocab, 2);
  const char* kv = "index=minmax(block=16) + select=topk(budget=64,sink=4,local=16,token_step=3)";
  auto plain = make(model, {.kv = kv}, pool);
  const auto want = read_and_decode(*plain, ids, more);
  auto checked = make(model, {.kv = kv}, pool);
  checked->set_check_every(2);
  EXPECT_EQ(read_and_decode(*checked, ids, more), want);
  EXPECT_EQ(checked->kl_steps(), 15);
  EXPECT_GT(checked->kl_mean(), 0.0);
  auto full = make(model, {}, pool);
  full->set_check_every(1);
  read_and_decode(*full, ids, more);
  EXPECT_EQ(full->kl_mean(), 0.0);
}

TEST(SessionErrors, LeaveTheSequenceAsItWas) {
  ThreadPool pool(2);
  const auto model = tiny("llama");
  auto s = make(model, {.chunk = 8, .context = 64}, pool);
  const auto ids = random_ids(40, model->config().vocab);
  ASSERT_TRUE(s->prefill(ids).ok());
  const auto before = logits_of(*s);
  EXPECT_EQ(s->prefill(random_ids(25, model->config().vocab)).code(), Code::kInvalidArgument);  // 65 of 64
  const std::vector<int32_t> bad = {1, int32_t(model->config().vocab)};
  EXPECT_EQ(s->prefill(bad).code(), Code::kInvalidArgument);
  EXPECT_EQ(s->decode(-1).code(), Code::kInvalidArgument);
  std::atomic<bool> cancel{true};
  EXPECT_EQ(s->prefill(random_ids(20, model->config().vocab), {}, &cancel).code(), Code::kCancelled);
  EXPECT_EQ(s->tokens(), 40);
  EXPECT_EQ(logits_of(*s), before);

  auto fresh = make(model, {.chunk = 8, .context = 64}, pool);
  ASSERT_TRUE(fresh->prefill(ids).ok());
  ASSERT_TRUE(fresh->decode(5).ok());
  ASSERT_TRUE(s->decode(5).ok());
  EXPECT_EQ(logits_of(*s), logits_of(*fresh));
}

}  // namespace
}  // namespace longkv
