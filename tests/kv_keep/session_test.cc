// What every method relies on: ragged rows, compaction, biases, turns, truncation.
#include <gtest/gtest.h>

#include "kv_keep/keep_harness.h"

namespace longkv::test {
namespace {

// Drops rows by position, differently for each head.
void keep_by_remainder(const KeepInput& input, KeepChoice& choice) {
  for (size_t h = 0; h < input.heads.size(); ++h) {
    choice.rows[h].clear();
    for (int64_t r = 0; r < input.heads[h].rows; ++r) {
      if (input.heads[h].pos[r] % int64_t(h + 2) == 0) choice.rows[h].push_back(r);
    }
  }
}

std::vector<std::vector<int64_t>> remainder_positions(int heads, int64_t n) {
  std::vector<std::vector<int64_t>> kept(static_cast<size_t>(heads));
  for (int h = 0; h < heads; ++h) {
    for (int64_t p = 0; p < n; p += h + 2) kept[size_t(h)].push_back(p);
  }
  return kept;
}

TEST(KeptSession, KeepingAllIsBitIdenticalToFull) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 3, 3, 32, 24);
  const Tokens t(s, 120, 1);
  auto full = make_session(s, full_f32(), 128, pool);
  auto kept = make_kept_session(s, full_f32(), 128, pool, std::make_unique<ListKeeper>(keep_everything));
  EXPECT_EQ(feed_prompt(*full, t, 0, 60, 17), feed_prompt(*kept, t, 0, 60, 17));
  for (int64_t i = 60; i < 64; ++i) EXPECT_EQ(decode_token(*full, t, i), decode_token(*kept, t, i));
  EXPECT_EQ(feed_prompt(*full, t, 64, 100, 9), feed_prompt(*kept, t, 64, 100, 9));
  EXPECT_EQ(decode_token(*full, t, 100), decode_token(*kept, t, 100));
  ASSERT_TRUE(kept->truncate({70}).ok()) << "nothing was evicted";
}

TEST(KeptSession, RaggedRowsAreAttendedInPromptAndDecode) {
  ThreadPool pool(2);
  for (const int group : {1, 3}) {
    const KvShape s = make_shape(2, 3, group, 32, 24);
    const Tokens t(s, 700, 2);
    auto session = make_kept_session(s, full_f32(), 700, pool, std::make_unique<ListKeeper>(keep_by_remainder));
    const int64_t width = int64_t(s.kv_heads) * group * s.dim_v;
    const auto all = feed_prompt(*session, t, 0, 300, 64);
    std::vector<std::vector<int64_t>> before(3, std::vector<int64_t>(300));
    for (auto& p : before) std::iota(p.begin(), p.end(), 0);
    expect_attends(s, t, 299, before, all.data() + 299 * width);  // the prompt itself reads every row

    auto rows = remainder_positions(3, 300);
    for (int h = 0; h < 3; ++h) EXPECT_EQ(session->kept_positions(1, h), rows[size_t(h)]);
    for (int64_t i = 300; i < 303; ++i) {
      for (auto& p : rows) p.push_back(i);
      for (const auto& out : decode_token(*session, t, i)) expect_attends(s, t, i, rows, out.data());
    }
    EXPECT_EQ(session->tokens().v, 303);
    // A second prompt: its queries see what was kept and the prompt's own rows.
    const auto more = feed_prompt(*session, t, 303, 620, 50);
    for (int64_t i = 303; i < 620; ++i) {
      for (auto& p : rows) p.push_back(i);
      if (i % 79 == 0 || i == 619) expect_attends(s, t, i, rows, more.data() + (i - 303) * width);
    }
    // ... and old and new rows are chosen from together.
    rows = remainder_positions(3, 620);
    for (int h = 0; h < 3; ++h) EXPECT_EQ(session->kept_positions(0, h), rows[size_t(h)]);
    for (auto& p : rows) p.push_back(620);
    for (const auto& out : decode_token(*session, t, 620)) expect_attends(s, t, 620, rows, out.data());
  }
}

TEST(KeptSession, TruncationReachesDownToTheEviction) {
  ThreadPool pool(1);
  const KvShape s = make_shape(2, 2, 2, 32);
  const Tokens t(s, 100, 3);
  const auto make = [&] {
    return make_kept_session(s, full_f32(), 128, pool, std::make_unique<ListKeeper>(keep_by_remainder));
  };
  auto a = make(), b = make();
  feed_prompt(*a, t, 0, 50, 50);
  feed_prompt(*b, t, 0, 50, 50);
  for (int64_t i = 50; i < 60; ++i) decode_token(*a, t, i);
  ASSERT_TRUE(a->truncate({52}).ok());
  for (int64_t i = 50; i < 52; ++i) decode_token(*b, t, i);
  EXPECT_EQ(decode_token(*a, t, 52), decode_token(*b, t, 52));
  const Status refused = a->truncate({49});
  EXPECT_EQ(refused.code(), Code::kInvalidArgument);
  EXPECT_NE(refused.message().find("evicted rows when it held 50"), std::string::npos) << refused.message();
  EXPECT_EQ(a->tokens().v, 53);
  // From the start again: like a new session.
  ASSERT_TRUE(a->truncate({0}).ok());
  auto fresh = make();
  EXPECT_EQ(feed_prompt(*a, t, 7, 60, 11), feed_prompt(*fresh, t, 7, 60, 11));
  EXPECT_EQ(decode_token(*a, t, 60), decode_token(*fresh, t, 60));
}

TEST(KeptSession, ProbesAndChecksReadTheKeptRows) {
  ThreadPool pool(1);
  const KvShape s = make_shape(1, 2, 2, 32);
  const Tokens t(s, 100, 4);
  auto session = make_kept_session(s, full_f32(), 128, pool, std::make_unique<ListKeeper>(keep_by_remainder));
  session->set_check_every(1);
  feed_prompt(*session, t, 0, 60, 60);
  session->begin_probe();
  const auto probed = decode_token(*session, t, 60);
  ASSERT_TRUE(session->end_probe().ok());
  EXPECT_EQ(session->tokens().v, 60);
  EXPECT_EQ(decode_token(*session, t, 60), probed);
  EXPECT_EQ(session->stats().captured_mass[0], 1.0);
  EXPECT_EQ(session->stats().rows_attended, 31 + 21);
}

TEST(KeptSession, WindowLayersAreLeftAlone) {
  ThreadPool pool(1);
  KvShape s = make_shape(2, 2, 1, 32);
  s.window = {16, 0};
  const Tokens t(s, 80, 5);
  auto session = make_kept_session(s, full_f32(), 128, pool, std::make_unique<ListKeeper>(keep_by_remainder));
  feed_prompt(*session, t, 0, 60, 23);
  EXPECT_EQ(session->kept_positions(1, 1), remainder_positions(2, 60)[1]);
  const auto outs = decode_token(*session, t, 60);
  std::vector<int64_t> window(16);
  std::iota(window.begin(), window.end(), 45);
  expect_attends(s, t, 60, {window, window}, outs[0].data());
}

// Rows that repeat a key are folded: for every query the softmax stays what it was, since a row that stands for n
// tokens has ln n added to its logit and the mean of their values.
TEST(KeptSession, MergedTwinsAreLossless) {
  ThreadPool pool(2);
  for (const KvTypes types : {KvTypes{KvType::kF32, KvType::kF32}, KvTypes{KvType::kQ8_0, KvType::kF32}}) {
    const KvShape s = make_shape(1, 2, 3, 64, 32);
    Tokens t(s, 500, 6);
    for (int64_t i = 1; i < 400; i += 2) {  // odd tokens have their neighbour's key
      std::copy_n(t.k_at(s, i - 1), s.kv_heads * s.dim_k, t.k.data() + i * s.kv_heads * s.dim_k);
    }
    const auto fold = [](const KeepInput& input, KeepChoice& choice) {
      choice.merges.resize(input.heads.size());
      for (size_t h = 0; h < input.heads.size(); ++h) {
        for (int64_t r = 0; r < input.heads[h].rows; ++r) {
          const bool twin = h == 0 && input.heads[h].pos[r] % 2 == 1 && input.heads[h].pos[r] < 400;
          if (!twin || input.heads[h].count[r - 1] > 1) {
            choice.rows[h].push_back(r);
          } else {
            choice.merges[h].push_back({r - 1, r, 0.5f, {}, 0.5f, 0.5f, std::log(2.0f), 2, input.heads[h].pos[r - 1]});
          }
        }
      }
    };
    Recipe recipe = full_f32();
    recipe.store = {types.k, types.v};
    auto full = make_session(s, recipe, 512, pool);
    auto kept =
        make_kept_session(s, recipe, 512, pool, std::make_unique<ListKeeper>(fold, KvRowFields{true, true, true}));
    EXPECT_EQ(feed_prompt(*full, t, 0, 400, 100), feed_prompt(*kept, t, 0, 400, 100));
    EXPECT_EQ(kept->cache().rows(0, 0).v, 200);
    EXPECT_EQ(kept->cache().rows(0, 1).v, 400);
    const auto compare = [&](const std::vector<float>& a, const std::vector<float>& b) {
      ASSERT_EQ(a.size(), b.size());
      for (size_t i = 0; i < a.size(); ++i) ASSERT_NEAR(a[i], b[i], kKeepTolerance);
    };
    compare(decode_token(*full, t, 400)[0], decode_token(*kept, t, 400)[0]);
    compare(feed_prompt(*full, t, 401, 480, 30), feed_prompt(*kept, t, 401, 480, 30));
    int64_t tokens = 0;
    const KvHeadView head = kept->cache().view(0, 0);
    for (int64_t r = 0; r < head.rows; ++r) tokens += head.count[r];
    EXPECT_EQ(tokens, 480) << "no token is lost";
  }
}

TEST(KeptSession, MemoryOfDroppedRowsReturns) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 1, 128);
  const Tokens t(s, 1000, 7);
  const auto keep = [](const KeepInput& input, KeepChoice& choice) {
    for (size_t h = 0; h < input.heads.size(); ++h) {
      for (int64_t r = 0; r < input.heads[h].rows; ++r) {
        if (r < 500 * int64_t(h + 1)) choice.rows[h].push_back(r);
      }
    }
  };
  auto session = make_kept_session(s, full_f32(), int64_t{1} << 20, pool, std::make_unique<ListKeeper>(keep));
  std::vector<float> out(size_t(1000 * s.kv_heads * s.dim_v));
  for (int l = 0; l < s.layers; ++l) {
    for (int64_t i = 0; i < 9; ++i) {
      ASSERT_TRUE(session->prefill(l, t.q.data(), t.k.data(), t.v.data(), 1000, 9000, out.data(), nullptr).ok());
    }
    // The peak of a prompt read layer by layer: what stays of the layers before, and this layer's rows.
    EXPECT_LE(resident_bytes(session->cache()), allowed_resident(session->cache()));
    EXPECT_EQ(session->cache().bytes_used(), (int64_t(l) * 1500 + 2 * 9000) * (2 * 128 * 4 + 4));
    ASSERT_TRUE(session->finish_prefill(l).ok());
    EXPECT_EQ(session->cache().bytes_used(), int64_t(l + 1) * 1500 * (2 * 128 * 4 + 4));
    EXPECT_LE(resident_bytes(session->cache()), allowed_resident(session->cache()));
    EXPECT_GE(resident_bytes(session->cache()), session->cache().bytes_used());
  }
  for (int64_t i = 0; i < 300; ++i) decode_token(*session, t, i);
  EXPECT_LE(resident_bytes(session->cache()), allowed_resident(session->cache())) << "growth after eviction";
}

TEST(KeptSession, RefusesWhatCannotWork) {
  ThreadPool pool(1);
  const KvShape s = make_shape(1, 2, 1, 32);
  const auto create = [&](const char* recipe, KeepNeeds needs) {
    auto keeper = std::make_unique<ListKeeper>(keep_everything);
    keeper->needs_ = needs;
    return KvSession::create(s, parse_recipe(recipe).value(), {64}, plain_params(s), pool,
                             KvSessionExtras{{}, std::move(keeper)});
  };
  const auto message = [&](const char* recipe, KeepNeeds needs) { return create(recipe, needs).status().message(); };
  KeepNeeds rotate, step, ragged, mass;
  rotate.rotate = true;
  step.step = KeepStep::kAfterAttention;
  ragged.ragged = true;
  mass.mass_queries = 32;
  EXPECT_NE(message("full", rotate).find("RoPE"), std::string::npos);
  EXPECT_NE(message("quest", step).find("nearest legal"), std::string::npos);
  EXPECT_NE(message("quest", ragged).find("equal length"), std::string::npos);
  EXPECT_NE(message("infllm", mass).find("preselect_queries"), std::string::npos);
  EXPECT_TRUE(create("quest", mass).ok());
}

// A selector over kept rows chooses what it would choose if nothing else had ever been there.
TEST(KeptSession, IndexIsBuiltOverKeptRows) {
  ThreadPool pool(2);
  const KvShape s = make_shape(2, 2, 2, 32);
  const Tokens t(s, 800, 8);
  const Recipe quest =
      parse_recipe("index=minmax(block=8) + select=topk(budget=64,sink=8,local=16) + store=f32").value();
  const auto keep = [](const KeepInput& input, KeepChoice& choice) {
    for (size_t h = 0; h < input.heads.size(); ++h) {
      for (int64_t r = 0; r < input.heads[h].rows; ++r) {
        if (input.heads[h].pos[r] % 2 == 0 || input.heads[h].pos[r] >= 500) choice.rows[h].push_back(r);
      }
    }
  };
  auto keeper = std::make_unique<ListKeeper>(keep);
  keeper->needs_.ragged = false;
  auto kept = make_kept_session(s, quest, 800, pool, std::move(keeper));
  feed_prompt(*kept, t, 0, 500, 100);
  Tokens half(s, 800, 9);  // every second token, as if it were all there is
  const int64_t q_width = s.kv_heads * s.group_size * s.dim_k, width = s.kv_heads * s.dim_k;
  for (int64_t i = 0; i < 550; ++i) {
    const int64_t from = i < 250 ? 2 * i : 250 + i;
    std::copy_n(t.q_at(s, from), q_width, half.q.data() + i * q_width);
    std::copy_n(t.k_at(s, from), width, half.k.data() + i * width);
    std::copy_n(t.v_at(s, from), width, half.v.data() + i * width);
  }
  auto fresh = make_session(s, quest, 800, pool);
  feed_prompt(*fresh, half, 0, 250, 250);
  for (int64_t i = 0; i < 20; ++i) {
    EXPECT_EQ(decode_token(*kept, t, 500 + i), decode_token(*fresh, half, 250 + i));
    EXPECT_EQ(kept->last_ranges(1, 1), fresh->last_ranges(1, 1));
  }
  feed_prompt(*kept, t, 520, 700, 77);  // the next turn evicts again and rebuilds
  feed_prompt(*fresh, half, 270, 450, 77);
  EXPECT_EQ(decode_token(*kept, t, 700), decode_token(*fresh, half, 450));
}

}  // namespace
}  // namespace longkv::test
