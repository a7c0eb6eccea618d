// A prompt whose attention is computed elsewhere, as by a card, hands its keys and values on to followers like one that
// is read here.
#include "kv/recipe.h"
#include "kv_session/harness.h"

namespace longkv::test {
namespace {

// Feeds [0, n) by observe() instead of prefill(); queries are given only where they are asked for.
void observe_prompt(KvSession& session, const Tokens& t, int64_t n, int64_t chunk) {
  const KvShape& s = session.cache().shape();
  const std::vector<float> nothing(size_t(chunk * s.kv_heads * s.group_size * s.dim_k), NAN);
  for (int l = 0; l < s.layers; ++l) {
    for (int64_t i = 0; i < n; i += chunk) {
      const int64_t count = std::min(chunk, n - i);
      const float* q = session.wants_queries(l) ? t.q_at(s, i) : nothing.data();
      ASSERT_TRUE(session.observe(l, q, t.k_at(s, i), t.v_at(s, i), count, n, nullptr, nullptr).ok());
    }
    ASSERT_TRUE(session.finish_prefill(l).ok());
  }
}

TEST(Followers, AnObservedPromptGivesWhatAReadOneDoes) {
  const KvShape s = make_shape(2, 2, 3, 32);
  const Tokens t(s, 460, 77);
  ThreadPool pool(2);
  for (const char* text :
       {"full", "quest:budget=64,dense_layers=0", "onebit:budget=128", "kivi4",
        "double_sparsity:budget=64,local=16,channels=8", "q8:rotate=true", "think:sink=0",
        "ktransformers-preselect:block=16,budget=128,local=32,preselect=8,dense_layers=0", "snapkv:budget=96,window=16",
        "tova:budget=96", "knorm:budget=96", "adakv:budget=96,window=16"}) {
    SCOPED_TRACE(text);
    const auto recipe = parse_recipe(text);
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    auto read = make_session(s, Recipe{}, 700, pool), observed = make_session(s, Recipe{}, 700, pool);
    auto follower = make_session(s, *recipe, 700, pool), other = make_session(s, *recipe, 700, pool);
    read->add_follower(follower.get());
    observed->add_follower(other.get());
    feed_prompt(*read, t, 0, 420, 128);
    observe_prompt(*observed, t, 420, 128);
    read->clear_followers();
    observed->clear_followers();
    ASSERT_EQ(other->tokens().v, 420);
    for (int64_t i = 420; i < 450; ++i) {
      EXPECT_EQ(decode_token(*follower, t, i), decode_token(*other, t, i)) << i;
      EXPECT_EQ(decode_token(*read, t, i), decode_token(*observed, t, i)) << i;
    }
    EXPECT_EQ(follower->cache().bytes_used(), other->cache().bytes_used());
  }
}

}  // namespace
}  // namespace longkv::test
