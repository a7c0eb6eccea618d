// Sessions whose old rows are encoded or pruned: prompt, decoding, later prompts, cutting, memory.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>

#include "kv/codec/codec.h"
#include "kv/plan.h"
#include "kv_session/harness.h"
#include "support/paths.h"
#include "support/sanitizers.h"

namespace longkv::test {
namespace {

Recipe parsed(const std::string& text) {
  auto recipe = parse_recipe(text);
  EXPECT_TRUE(recipe.ok()) << recipe.status().message();
  return recipe.ok() ? *recipe : Recipe();
}

// The rows of a layer as decoding gives them, in place of those that were fed.
Tokens held_rows(const KvSession& session, int layer, const Tokens& fed) {
  const KvShape& s = session.cache().shape();
  Tokens t = fed;
  for (int h = 0; h < s.kv_heads; ++h) {
    const KvHeadView head = session.cache().view(layer, h);
    std::vector<float> k(size_t(head.rows * s.dim_k)), v(size_t(head.rows * s.dim_v));
    decode_k_rows(head, 0, head.rows, k.data());
    decode_v_rows(head, 0, head.rows, v.data());
    for (int64_t r = 0; r < head.rows; ++r) {
      std::copy_n(k.begin() + r * s.dim_k, s.dim_k, t.k.begin() + (r * s.kv_heads + h) * s.dim_k);
      std::copy_n(v.begin() + r * s.dim_v, s.dim_v, t.v.begin() + (r * s.kv_heads + h) * s.dim_v);
    }
  }
  return t;
}

void expect_attends(const KvShape& s, const Tokens& rows, int64_t token, const float* out, double tolerance,
                    const std::string& what) {
  double worst = 0.0;
  for (int j = 0; j < s.kv_heads * s.group_size; ++j) {
    const Partial p = reference_attend(s, rows, token, j, {{0, token + 1}}, 1.0 / std::sqrt(double(s.dim_k)));
    for (int c = 0; c < s.dim_v; ++c) {
      worst = std::max(worst, std::abs(out[int64_t(j) * s.dim_v + c] - p.out[size_t(c)]));
    }
  }
  EXPECT_LT(worst, tolerance) << what << ", token " << token;
}

struct Case {
  const char* recipe;
  double tolerance;  // fp32 sums; queries rounded to int16 (q8_0) or int8 where the CPU has integer products
};
const Case kCases[] = {{"kivi2:window=64", 0.05},
                       {"kivi4:window=40,sink=4", 0.05},
                       {"q8:window=50,sink=4", 1e-3},
                       {"q4:window=50", 0.05},
                       {"fp8:window=50", 1e-4},
                       {"fp8", 1e-4},
                       {"think:ratio=0.5,window=64", 1e-4},
                       {"think:ratio=0.5+kivi2", 0.05}};

TEST(StoreSession, PromptIsDenseAndDecodingAttendsWhatIsHeld) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 3, 64);
  const Tokens t(s, 400, 11);
  auto plain = make_session(s, parsed("full"), 400, pool);
  const auto dense = feed_prompt(*plain, t, 0, 301, 70);
  for (const Case& c : kCases) {
    const Recipe recipe = parsed(c.recipe);
    auto session = make_session(s, recipe, 400, pool);
    const auto out = feed_prompt(*session, t, 0, 301, 70);
    if (store_regions(recipe.store, recipe.mask).on) {
      EXPECT_EQ(out, dense) << c.recipe;  // nothing is encoded while a prompt is read
      EXPECT_LT(session->cache().bytes_used(), plain->cache().bytes_used()) << c.recipe;
    }
    for (int64_t i = 301; i < 380; ++i) {
      const auto outs = decode_token(*session, t, i);
      if (i % 13 != 0) continue;
      // What the token attended is what is held after it but for a step that it made old.
      const Tokens rows = held_rows(*session, 1, t);
      expect_attends(s, rows, i, outs[1].data(), c.tolerance + 0.15, c.recipe);
    }
    // Nothing becomes old with this one: exact.
    auto probe = session->cache().rows(0).v;
    while ((probe - 4) % 32 != 10) decode_token(*session, t, probe++);
    const auto outs = decode_token(*session, t, probe);
    expect_attends(s, held_rows(*session, 1, t), probe, outs[1].data(), c.tolerance, c.recipe);
  }
}

TEST(StoreSession, FullWindowIsF16BitForBit) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 2, 64);
  const Tokens t(s, 200, 12);
  auto plain = make_session(s, parsed("full"), 200, pool);
  for (const char* text : {"kivi2:window=1K", "kivi4:sink=1K", "q4:window=1K", "think:window=1K"}) {
    auto session = make_session(s, parsed(text), 200, pool);
    ASSERT_TRUE(plain->truncate({0}).ok());
    EXPECT_EQ(feed_prompt(*session, t, 0, 150, 64), feed_prompt(*plain, t, 0, 150, 64)) << text;
    for (int64_t i = 150; i < 200; ++i) ASSERT_EQ(decode_token(*session, t, i), decode_token(*plain, t, i)) << text;
  }
}

// A window has nothing to spare where rows are not encoded: all of them are held as they came.
TEST(StoreSession, RowsThatAreNotEncodedKeepTheirTypeInTheWindow) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 3, 64);
  const Tokens t(s, 130, 14);
  for (const char* kv : {"store=f32(window=40,sink=4)", "store(k=f32,v=q8_0,window=40)", "store=bf16(window=40)"}) {
    const Recipe recipe = parsed(kv);
    auto session = make_session(s, recipe, 200, pool);
    feed_prompt(*session, t, 0, 120, 50);
    const KvTypes raw = session->cache().types();
    EXPECT_EQ(raw.k, recipe.store.k) << kv;
    EXPECT_EQ(raw.v, recipe.store.v == KvType::kQ8_0 ? KvType::kF16 : recipe.store.v) << kv;
    const Tokens held = held_rows(*session, 0, t);
    EXPECT_EQ(held.k == t.k, recipe.store.k == KvType::kF32) << kv;
    EXPECT_EQ(held.v == t.v, recipe.store.v == KvType::kF32) << kv;
    const auto out = decode_token(*session, t, 120);
    expect_attends(s, held_rows(*session, 0, t), 120, out[0].data(), 1e-4, kv);
  }
}

TEST(StoreSession, TokenByTokenEqualsAtOnce) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 2, 64);
  const Tokens t(s, 333, 13);
  for (const char* text : {"kivi2", "kivi4:sink=5,window=33", "q4:window=20", "fp8:window=31,sink=1"}) {
    auto slow = make_session(s, parsed(text), 333, pool), fast = make_session(s, parsed(text), 333, pool);
    feed_prompt(*slow, t, 0, 50, 50);
    for (int64_t i = 50; i < 200; ++i) decode_token(*slow, t, i);
    feed_prompt(*slow, t, 200, 280, 7);
    for (int64_t i = 280; i < 333; ++i) decode_token(*slow, t, i);
    feed_prompt(*fast, t, 0, 333, 333);
    for (int layer = 0; layer < 2; ++layer) {
      const Tokens a = held_rows(*slow, layer, t), b = held_rows(*fast, layer, t);
      EXPECT_EQ(a.k, b.k) << text;
      EXPECT_EQ(a.v, b.v) << text;
    }
    EXPECT_EQ(slow->cache().bytes_used(), fast->cache().bytes_used());
  }
}

TEST(StoreSession, LaterPromptsReadEncodedRows) {
  ThreadPool pool(2);
  const KvShape s = make_shape(1, 2, 2, 64);
  const Tokens t(s, 300, 14);
  for (const char* text : {"kivi2:window=32", "q8:window=32,sink=3", "think:ratio=0.5,window=32", "fp8:window=32"}) {
    auto session = make_session(s, parsed(text), 300, pool);
    feed_prompt(*session, t, 0, 200, 200);
    Tokens rows = held_rows(*session, 0, t);
    const auto out = feed_prompt(*session, t, 200, 260, 60);
    const int64_t width = int64_t(s.kv_heads) * s.group_size * s.dim_v;
    // The new rows themselves are f16.
    for (int64_t i : {0, 31, 59}) expect_attends(s, rows, 200 + i, out.data() + i * width, 3e-3, text);
  }
}

TEST(StoreSession, CutsInsideTheWindowAndIntoTheMiddle) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 2, 64);
  const Tokens t(s, 400, 15);
  for (const char* text : {"kivi2:window=64", "q8:window=64,sink=4", "think:ratio=0.5,window=64"}) {
    auto session = make_session(s, parsed(text), 400, pool);
    feed_prompt(*session, t, 0, 300, 300);
    ASSERT_TRUE(session->truncate({280}).ok());  // only recent rows go
    for (int64_t i = 280; i < 290; ++i) decode_token(*session, t, i);
    const Tokens before = held_rows(*session, 0, t);
    ASSERT_TRUE(session->truncate({150}).ok());
    const Tokens after = held_rows(*session, 0, t);
    const auto end = 150 * s.kv_heads * s.dim_k;
    for (int64_t i = 0; i < end; ++i) {
      // Rows that are recent again: what decoding gave, in f16.
      ASSERT_NEAR(after.k[size_t(i)], before.k[size_t(i)], 1e-3 * std::abs(before.k[size_t(i)]) + 1e-6) << text;
    }
    const KvMiddle* middle = session->cache().view(0, 0).middle;
    ASSERT_NE(middle, nullptr);
    EXPECT_GE(150 - middle->end, 64);
    for (int64_t i = 150; i < 260; ++i) decode_token(*session, t, i);
    EXPECT_EQ(session->tokens().v, 260);
    ASSERT_TRUE(session->truncate({0}).ok());
    EXPECT_EQ(session->cache().bytes_used(), 0);
    auto fresh = make_session(s, parsed(text), 400, pool);
    EXPECT_EQ(feed_prompt(*session, t, 0, 200, 50), feed_prompt(*fresh, t, 0, 200, 50));
    EXPECT_EQ(decode_token(*session, t, 200), decode_token(*fresh, t, 200)) << text;
  }
}

TEST(StoreSession, ProbesLeaveNoTrace) {
  ThreadPool pool(1);
  const KvShape s = make_shape(2, 1, 2, 64);
  const Tokens t(s, 300, 16);
  auto a = make_session(s, parsed("kivi2:window=32"), 300, pool),
       b = make_session(s, parsed("kivi2:window=32"), 300, pool);
  feed_prompt(*a, t, 0, 200, 200);
  feed_prompt(*b, t, 0, 200, 200);
  for (int64_t i = 200; i < 290; ++i) {
    a->begin_probe();
    decode_token(*a, t, 5);
    ASSERT_TRUE(a->end_probe().ok());
    ASSERT_EQ(decode_token(*a, t, i), decode_token(*b, t, i));
  }
}

TEST(StoreSession, RotationIsExactAndSpreadsOutliers) {
  ThreadPool pool(2);
  const KvShape s = make_shape(1, 2, 2, 96, 64);
  Tokens t(s, 300, 17);
  for (size_t i = 0; i < t.k.size(); ++i) t.k[i] *= i % 96 == 7 ? 20.0f : 1.0f;  // one loud channel
  auto plain = make_session(s, parsed("full"), 300, pool);
  const auto dense = feed_prompt(*plain, t, 0, 299, 299);
  const auto expected = decode_token(*plain, t, 299)[0];
  const auto error = [&](const std::string& text) {
    auto session = make_session(s, parsed(text), 300, pool);
    feed_prompt(*session, t, 0, 299, 299);
    const auto out = decode_token(*session, t, 299)[0];
    double sum = 0.0;
    for (size_t i = 0; i < out.size(); ++i) sum += (out[i] - expected[i]) * (out[i] - expected[i]);
    return std::sqrt(sum / double(out.size()));
  };
  EXPECT_LT(error("q8:rotate=true"), 0.02);
  EXPECT_LT(error("fp8:rotate=true"), 0.1);
  EXPECT_LT(error("store(k=q4_0,v=f16,rotate=k)"), 0.7 * error("store(k=q4_0,v=f16)"));
  EXPECT_LT(error("kivi4:rotate=v"), 0.2);
  const KvShape odd = make_shape(1, 1, 1, 40);
  const auto refused = KvSession::create(odd, parsed("fp8:rotate=true"), {10}, plain_params(odd), pool);
  ASSERT_FALSE(refused.ok());
  EXPECT_NE(refused.status().message().find("no Hadamard block"), std::string::npos);
}

TEST(StoreSession, ThinkDropsTheChannelsOfSmallestProduct) {
  ThreadPool pool(2);
  const KvShape s = make_shape(1, 2, 2, 64);
  Tokens t(s, 300, 18);
  Rng rng(19);
  const auto loud = rng.normal(64);
  for (size_t i = 0; i < t.k.size(); ++i) t.k[i] *= std::abs(loud[i % 64]);
  auto session = make_session(s, parsed("think:ratio=0.5,window=32,queries=20"), 300, pool);
  feed_prompt(*session, t, 0, 300, 41);
  for (int h = 0; h < 2; ++h) {
    // Keys as f16 rows hold them decide only to their rounding: scores closer than that may swap.
    std::vector<std::pair<double, int>> scores;
    for (int c = 0; c < 64; ++c) {
      double q2 = 0.0, k2 = 0.0;
      for (int64_t i = 280; i < 300; ++i) {
        for (int g = 0; g < 2; ++g) q2 += std::pow(double(t.q_at(s, i)[(h * 2 + g) * 64 + c]), 2);
      }
      for (int64_t i = 0; i < 300; ++i) k2 += std::pow(double(t.k_at(s, i)[h * 64 + c]), 2);
      scores.push_back({-q2 * k2, c});
    }
    std::sort(scores.begin(), scores.end());
    const double border = 0.5 * (scores[31].first + scores[32].first);
    const KvMiddle* m = session->cache().view(0, h).middle;
    ASSERT_NE(m, nullptr);
    ASSERT_EQ(m->dim_k, 32);
    for (int i = 0; i < 32; ++i) {
      const auto at = std::find_if(scores.begin(), scores.end(), [&](auto& x) { return x.second == m->channels[i]; });
      EXPECT_LT(at->first, border * (border < 0 ? 0.999 : 1.001)) << "channel " << m->channels[i];
    }
  }
}

TEST(StoreSession, JoinsWithSelectionAndRefusesWhatCannotWork) {
  ThreadPool pool(2);
  const KvShape s = make_shape(3, 2, 2, 64);
  const Tokens t(s, 700, 20);
  for (const char* text :
       {"quest:budget=256+q8", "quest:budget=256,dense_layers=1+kivi2", "quest:budget=256+fp8:window=64"}) {
    auto session = make_session(s, parsed(text), 700, pool);
    session->set_check_every(1);
    feed_prompt(*session, t, 0, 600, 100);
    for (int64_t i = 600; i < 660; ++i) {
      for (const auto& out : decode_token(*session, t, i)) {
        for (float x : out) ASSERT_TRUE(std::isfinite(x)) << text;
      }
    }
    EXPECT_GT(session->stats().captured_mass[2] / double(session->stats().checked_steps), 0.2) << text;
  }
  EXPECT_FALSE(parse_recipe("store(k=kivi2,v=q8_0)").ok());
  EXPECT_FALSE(parse_recipe("kivi2:rotate=true").ok());
  EXPECT_FALSE(parse_recipe("think+q4:rotate=true").ok());
  EXPECT_FALSE(parse_recipe("full+store=f16(rotate=true)").ok());
  EXPECT_TRUE(parse_recipe("think+q4:rotate=v").ok());
  const auto leank = KvSession::create(s, parsed("leank"), {10}, plain_params(s), pool);
  ASSERT_FALSE(leank.ok());
  EXPECT_NE(leank.status().message().find("leank:mask=FILE"), std::string::npos);
}

int64_t memory_kib(const char* key) {
  std::ifstream in("/proc/self/status");
  for (std::string line; std::getline(in, line);) {
    if (line.rfind(key, 0) == 0) return std::atoll(line.c_str() + std::string(key).size() + 1);
  }
  return 0;
}

// Resident memory after a prompt within 5% of what is counted, which the plan knows; the peak is one raw layer more.
TEST(StoreSession, MemoryIsReal) {
  if (test::kSanitized) GTEST_SKIP() << "a sanitizer's allocator keeps what is freed";
  ThreadPool pool(2);
  const KvShape s = make_shape(12, 2, 1, 128);
  constexpr int64_t kRows = 16384;
  for (const char* text : {"kivi2", "q4:window=128", "think:ratio=0.5"}) {
    const Recipe recipe = parsed(text);
    auto session = make_session(s, recipe, kRows + 64, pool);
    // The first use of buffers that stay belongs to nobody.
    { ASSERT_TRUE(make_session(s, recipe, kRows + 64, pool)->fill_random(2000, 1).ok()); }
    std::ofstream("/proc/self/clear_refs") << "5";
    const int64_t before = memory_kib("VmRSS:");
    ASSERT_TRUE(session->fill_random(kRows, 1).ok());
    const double held = 1024.0 * double(memory_kib("VmRSS:") - before);
    const double peak = 1024.0 * double(memory_kib("VmHWM:") - before);
    const double counted = double(session->cache().bytes_used());
    EXPECT_NEAR(held, counted, 0.05 * counted + 3e6) << text;
    const double raw_layer = double(kRows * s.kv_heads * 4 * 128);
    EXPECT_LT(peak, 1.05 * counted + 1.25 * raw_layer + 8e6) << text;
    PlanModel model;
    model.shape = s;
    const auto plan = make_plan(model, recipe, {int64_t(1) << 40, 0, 1}, kRows);
    ASSERT_TRUE(plan.ok()) << plan.status().message();
    EXPECT_NEAR(double(plan->k_bytes + plan->v_bytes), counted, 0.02 * counted + 4096.0 * 4 * 2 * 2 * 12) << text;
  }
}

}  // namespace
}  // namespace longkv::test
