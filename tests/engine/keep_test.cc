// Keep stages under a whole model: order of the prompt, turns, sequences after each other, memory at the peak.
#include <gtest/gtest.h>

#include "engine/session.h"
#include "support/golden.h"
#include "support/random_ids.h"

namespace longkv {
namespace {

using test::random_ids;

class KeepSession : public ::testing::TestWithParam<const char*> {
 protected:
  std::unique_ptr<Session> open(PrefillOrder order = PrefillOrder::kLayerMajor) {
    SessionOptions options;
    options.context = 900;
    options.recipe = parse_recipe(GetParam()).value();
    options.chunk = 64;
    options.order = order;
    auto session = Session::create(model_, options, pool_);
    EXPECT_TRUE(session.ok()) << session.status().message();
    return std::move(session).value();
  }
  // Reads, decodes, reads again: logits of the end.
  std::vector<float> run(Session& session, uint32_t seed) {
    const int64_t vocab = model_->config().vocab;
    EXPECT_TRUE(session.prefill(random_ids(300, vocab, seed)).ok());
    for (const int32_t id : random_ids(5, vocab, seed + 1)) EXPECT_TRUE(session.decode(id).ok());
    EXPECT_TRUE(session.prefill(random_ids(120, vocab, seed + 2)).ok());
    for (const int32_t id : random_ids(3, vocab, seed + 3)) EXPECT_TRUE(session.decode(id).ok());
    EXPECT_EQ(session.tokens(), 428);
    return {session.logits().begin(), session.logits().end()};
  }
  std::shared_ptr<const LoadedModel> model_ = LoadedModel::load(test::tiny_model("llama")).value();
  ThreadPool pool_{2};
};

TEST_P(KeepSession, BothOrdersOfAPromptGiveTheSameBits) {
  EXPECT_EQ(run(*open(PrefillOrder::kLayerMajor), 1), run(*open(PrefillOrder::kChunkMajor), 1));
}

TEST_P(KeepSession, ASequenceAfterAnotherEqualsAFreshOne) {
  auto used = open();
  run(*used, 1);
  ASSERT_TRUE(used->truncate(0).ok());
  EXPECT_EQ(run(*used, 7), run(*open(), 7));
}

TEST_P(KeepSession, PeakIsTheBudgetAndOneLayer) {
  auto session = open();
  const KvCache& cache = session->kv().cache();
  const ModelConfig& c = model_->config();
  const int64_t row = (c.head_dim_k + c.head_dim_v) * 2 + cache.fields().bytes();
  int64_t peak = 0;
  ASSERT_TRUE(
      session
          ->prefill(random_ids(600, c.vocab, 3), [&](int64_t, int64_t) { peak = std::max(peak, cache.bytes_used()); })
          .ok());
  const bool repeats = session->kv().repeat_chunk() > 0;  // reads the prompt again, so all of it is held
  EXPECT_LE(peak, ((repeats ? c.layers * 600 : c.layers * 100 + 600) + 2 * 100) * c.kv_heads * row);
  EXPECT_LE(cache.bytes_used(), c.layers * 101 * c.kv_heads * row);
  int64_t rows = 0;
  for (int l = 0; l < c.layers; ++l) {
    for (int h = 0; h < c.kv_heads; ++h) rows += int64_t(session->kv().kept_positions(l, h).size());
  }
  EXPECT_EQ(rows * row, cache.bytes_used());
  EXPECT_EQ(session->tokens(), 600);
}

INSTANTIATE_TEST_SUITE_P(Methods, KeepSession,
                         ::testing::Values("streaming:budget=100", "streaming:budget=100,positions=cache",
                                           "snapkv:budget=100", "pyramidkv:budget=100,window=8", "tova:budget=100",
                                           "h2o:budget=100", "expected_attention:budget=100,future=20",
                                           "adakv:budget=100", "adakv:scorer=expected,budget=100,future=20",
                                           "keydiff:budget=100", "keydiff:budget=100,block=32", "normmass:budget=100",
                                           "normmass:budget=100,bias=fit,link_score=cost", "kvslimmer:budget=100",
                                           "asymkv:budget=100", "kvzip:keep_ratio=0.15,chunk=70"));

}  // namespace
}  // namespace longkv
