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

// Rows of tokens that a card decoded behave under the next prompt and after it as if they had been decoded here.
TEST(Followers, RowsDecodedElsewhereAreTokensLikeOthers) {
  const KvShape s = make_shape(2, 2, 3, 32);
  const Tokens t(s, 460, 78);
  ThreadPool pool(2);
  for (const char* text : {"full", "snapkv:budget=96,window=16", "adakv:budget=96,window=16", "normmass:budget=96",
                           "keep=snapkv(budget=96) "
                           "+ index=minmax(block=16) + select=topk(budget=64,sink=16,local=16)"}) {
    SCOPED_TRACE(text);
    const auto recipe = parse_recipe(text);
    ASSERT_TRUE(recipe.ok()) << recipe.status().message();
    auto here = make_session(s, *recipe, 700, pool), elsewhere = make_session(s, *recipe, 700, pool);
    EXPECT_EQ(feed_prompt(*here, t, 0, 300, 64), feed_prompt(*elsewhere, t, 0, 300, 64));
    for (int64_t i = 300; i < 320; ++i) (void)decode_token(*here, t, i);
    for (int l = 0; l < s.layers; ++l) {
      ASSERT_TRUE(elsewhere->append_decoded(l, t.k_at(s, 300), t.v_at(s, 300), 15).ok());
      ASSERT_TRUE(elsewhere->append_decoded(l, t.k_at(s, 315), t.v_at(s, 315), 5).ok());
    }
    EXPECT_EQ(elsewhere->tokens().v, 320);
    EXPECT_EQ(feed_prompt(*here, t, 320, 430, 64), feed_prompt(*elsewhere, t, 320, 430, 64));
    for (int64_t i = 430; i < 450; ++i) EXPECT_EQ(decode_token(*here, t, i), decode_token(*elsewhere, t, i)) << i;
  }
}

}  // namespace
}  // namespace longkv::test
