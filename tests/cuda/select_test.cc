#include "cuda/select.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <random>

#include "cuda/card.h"
#include "cuda/expected_rows.h"

namespace longkv {
namespace {

using test::expected_rows;
using test::OnCard;

struct Keys {
  card::CardKv kv;
  OnCard memory;
  std::vector<float> values;  // [kv_heads][capacity][dim], as they read back
};

Keys make_keys(int kv_heads, int dim, int64_t rows) {
  const int64_t capacity = (rows + 15) / 16 * 16;
  Keys k{{}, OnCard(card::card_kv_bytes(KvType::kF16, kv_heads, dim, capacity)), {}};
  k.kv = card::place_kv(KvType::kF16, kv_heads, dim, capacity, k.memory.data());
  EXPECT_TRUE(card::fill_rows(k.kv, rows, 5, nullptr).ok());
  for (uint16_t h : k.memory.read<uint16_t>(int64_t(kv_heads) * capacity * dim))
    k.values.push_back(test::half_float(h));
  return k;
}

TEST(CardSelect, SummariesScoresAndChoices) {
  LONGKV_NEED_CARD();
  struct Case {
    int heads, kv_heads, dim, block;
    card::SummaryKind kind;
    card::ChoiceRules rules;
    int64_t rows;
  };
  const Case cases[] = {{4, 2, 64, 16, card::SummaryKind::kBox, {256, 0, 0, false, false}, 1000},
                        {8, 2, 128, 16, card::SummaryKind::kBox, {1024, 16, 64, false, false}, 40007},
                        {8, 2, 128, 16, card::SummaryKind::kMean, {512, 20, 70, false, true}, 5000},
                        {14, 2, 64, 32, card::SummaryKind::kMean, {300, 40, 33, true, false}, 4096},
                        {4, 1, 256, 128, card::SummaryKind::kBox, {1024, 128, 256, false, false}, 9001},
                        {4, 2, 64, 16, card::SummaryKind::kBox, {4096, 16, 64, false, false}, 3000},
                        {4, 2, 64, 16, card::SummaryKind::kBox, {16, 0, 0, true, true}, 777},
                        {8, 2, 128, 16, card::SummaryKind::kBox8, {1024, 16, 64, false, false}, 40007},
                        {8, 2, 128, 16, card::SummaryKind::kBox8, {4096, 16, 64, false, false}, 65536},
                        {6, 2, 64, 32, card::SummaryKind::kBox8, {512, 0, 10, false, true}, 9000},
                        {16, 1, 256, 16, card::SummaryKind::kBox8, {256, 0, 0, false, false}, 3000}};
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << c.rows << " rows, blocks of " << c.block << ", budget " << c.rules.budget);
    const Keys k = make_keys(c.kv_heads, c.dim, c.rows);
    const int64_t blocks = (k.kv.capacity + c.block - 1) / c.block, full = c.rows / c.block;
    const OnCard data(card::summary_bytes(c.kind, c.kv_heads, c.dim, blocks)),
        scores(card::score_bytes(c.kv_heads, blocks));
    const card::CardSummaries s = card::place_summaries(c.kind, c.block, c.kv_heads, c.dim, blocks, data.data());
    // All but the last block at once, that one as a decoded token would.
    ASSERT_DONE(card::summarize(k.kv, s, 0, full - 1, nullptr));
    const std::vector<int64_t> ends = {full * c.block - 1, c.rows - 1};
    const OnCard positions = OnCard::of(ends);
    ASSERT_DONE(card::summarize_last(k.kv, s, positions.as<int64_t>(), nullptr));

    const auto qf = test::normal_floats(c.heads * c.dim, 21);
    const auto qh = test::to_halves(qf);
    const OnCard q = OnCard::of(qh);
    const int64_t stride = c.rules.tiles(c.block);
    const OnCard tiles(c.kv_heads * stride * 8), count(c.kv_heads * 4);
    ASSERT_DONE(card::score_blocks(q.as<card::half_t>(), c.heads, k.kv, s, c.rules, positions.as<int64_t>() + 1,
                                   scores.as<float>(), nullptr));
    const auto got = scores.read<float>(c.kv_heads * blocks);
    ASSERT_DONE(card::choose_blocks(scores.as<float>(), card::Tops::kMade, c.kv_heads, s, c.rules,
                                    positions.as<int64_t>() + 1, tiles.as<int32_t>(), count.as<int32_t>(), stride,
                                    nullptr));
    const auto list = tiles.read<int32_t>(c.kv_heads * stride * 2);
    const auto counts = count.read<int32_t>(c.kv_heads);

    std::vector<double> shared(size_t(blocks), c.rules.max ? -1e300 : 0.0);
    const int group = c.heads / c.kv_heads;
    const bool sparse = c.rows > c.rules.budget;
    for (int h = 0; h < c.kv_heads && sparse; ++h) {
      for (int64_t b = c.rules.sink / c.block; b < full; ++b) {
        double total = c.rules.max ? -1e300 : 0.0, size = 0;
        std::vector<double> low(size_t(c.dim), 1e300), high(size_t(c.dim), -1e300), mean(size_t(c.dim));
        for (int64_t r = b * c.block; r < (b + 1) * c.block; ++r) {
          for (int i = 0; i < c.dim; ++i) {
            const double v = k.values[size_t((h * k.kv.capacity + r) * c.dim + i)];
            low[size_t(i)] = std::min(low[size_t(i)], v);
            high[size_t(i)] = std::max(high[size_t(i)], v);
            mean[size_t(i)] += v / c.block;
          }
        }
        for (int j = 0; j < group; ++j) {
          double dot = 0;
          for (int i = 0; i < c.dim; ++i) {
            const double x = test::half_float(qh[size_t((h * group + j) * c.dim + i)]);
            const double part = c.kind == card::SummaryKind::kMean ? x * mean[size_t(i)]
                                                                   : std::max(x * low[size_t(i)], x * high[size_t(i)]);
            dot += part;
            size += std::abs(x) * (std::abs(low[size_t(i)]) + std::abs(high[size_t(i)]));
          }
          total = c.rules.max ? std::max(total, dot) : total + dot;
        }
        if (b * c.block >= c.rows - std::max<int64_t>(c.rules.local, 1)) continue;  // in the tail: not scored
        // Bytes are coarser, and their boxes are grown: never below the true bound but for rounding in fp32.
        const bool bytes = c.kind == card::SummaryKind::kBox8;
        ASSERT_NEAR(got[size_t(h * blocks + b)], total, size * (bytes ? 0x1p-5 : 0x1p-10))
            << "head " << h << " block " << b;
        if (bytes) {
          ASSERT_GE(got[size_t(h * blocks + b)], total - size * 0x1p-18);
        }
        shared[size_t(b)] = c.rules.max ? std::max<double>(shared[size_t(b)], got[size_t(h * blocks + b)])
                                        : double(float(shared[size_t(b)]) + got[size_t(h * blocks + b)]);
      }
    }
    for (int h = 0; h < c.kv_heads; ++h) {
      std::vector<double> own(got.begin() + h * blocks, got.begin() + (h + 1) * blocks);
      ASSERT_LE(counts[size_t(h)], stride);
      const auto rows = test::rows_of(&list[size_t(h * stride * 2)], counts[size_t(h)]);
      EXPECT_EQ(rows, expected_rows(c.rules.shared ? shared : own, c.rows, c.block, c.rules)) << "head " << h;
    }
  }
}

// So many blocks that most of their scores are never looked at, with scores that make it hard to say which.
TEST(CardSelect, ChoicesOfManyBlocks) {
  LONGKV_NEED_CARD();
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const std::vector<std::pair<const char*, std::function<float(int64_t, std::mt19937&)>>> kinds = {
      {"normal", [](int64_t, std::mt19937& random) { return std::normal_distribution<float>()(random); }},
      {"shares", [](int64_t, std::mt19937& random) { return std::exp(-20 * std::abs(float(random() % 1000)) / 999); }},
      {"equal", [](int64_t, std::mt19937&) { return 0.25f; }},
      {"zeros of both signs", [](int64_t b, std::mt19937&) { return b % 3 == 0 ? -0.0f : 0.0f; }},
      {"three values", [](int64_t, std::mt19937& random) { return float(random() % 3) - 1; }},
      {"rising", [](int64_t b, std::mt19937&) { return float(b) * 1e-3f; }},
      {"falling", [](int64_t b, std::mt19937&) { return -float(b); }},
      {"one far above", [](int64_t b, std::mt19937&) { return b == 9000 ? 1e30f : 1e-30f * float(b % 7); }},
      {"infinite and no numbers", [](int64_t b, std::mt19937& random) {
         return b % 5 == 0 ? -kInfinity : b % 11 == 0 ? std::nanf("") : b == 8200 ? kInfinity : float(random() % 50);
       }}};
  struct Case {
    int kv_heads, block;
    int64_t blocks, capacity;
    card::ChoiceRules rules;
  };
  for (const Case& c :
       {Case{2, 16, 65536, 65536, {4096, 16, 64, false, false}}, Case{3, 16, 20011, 20011, {16384, 0, 0, false, false}},
        Case{2, 16, 8209, 8216, {1024, 40, 70, true, false}}, Case{2, 16, 17000, 17000, {2048, 16, 64, true, true}},
        Case{1, 32, 8200, 8200, {32 * 600, 100, 333, false, false}},
        Case{1, 16, 8192, 8192, {16 * 5000, 16, 16, false, false}},
        Case{1, 16, 70001, 70008, {16 * 3, 0, 17, false, false}}}) {
    for (const auto& [name, score] : kinds) {
      SCOPED_TRACE(testing::Message() << name << ", " << c.blocks << " blocks, budget " << c.rules.budget);
      std::mt19937 random(7);
      std::vector<float> scores(size_t(card::score_bytes(c.kv_heads, c.capacity) / 4), std::nanf(""));
      for (int h = 0; h < c.kv_heads; ++h)
        for (int64_t b = 0; b < c.blocks; ++b) scores[size_t(h * c.capacity + b)] = score(b, random);
      for (const card::Tops tops : {card::Tops::kMade, card::Tops::kNone}) {
        const OnCard on_card = OnCard::of(scores), position = OnCard::of(std::vector<int64_t>{c.blocks * c.block - 5});
        card::CardSummaries s;
        s.block = c.block, s.capacity = c.capacity;
        const int64_t stride = c.rules.tiles(c.block);
        const OnCard tiles(c.kv_heads * stride * 8), count(c.kv_heads * 4);
        ASSERT_DONE(card::choose_blocks(on_card.as<float>(), tops, c.kv_heads, s, c.rules, position.as<int64_t>(),
                                        tiles.as<int32_t>(), count.as<int32_t>(), stride, nullptr));
        const auto list = tiles.read<int32_t>(c.kv_heads * stride * 2);
        const auto counts = count.read<int32_t>(c.kv_heads);
        for (int h = 0; h < c.kv_heads; ++h) {
          std::vector<double> own;
          for (int64_t b = 0; b < c.blocks; ++b) {
            float x = scores[size_t(h * c.capacity + b)];
            if (c.rules.shared) {
              x = c.rules.max ? -kInfinity : 0.0f;
              for (int other = 0; other < c.kv_heads; ++other) {
                const float y = scores[size_t(other * c.capacity + b)];
                x = c.rules.max ? std::fmax(x, y) : x + y;
              }
            }
            own.push_back(std::isnan(x) ? -1e301 : std::isinf(x) && x < 0 ? -1e300 : double(x));
          }
          ASSERT_LE(counts[size_t(h)], stride);
          ASSERT_EQ(test::rows_of(&list[size_t(h * stride * 2)], counts[size_t(h)]),
                    expected_rows(own, c.blocks * c.block - 4, c.block, c.rules))
              << "head " << h;
        }
      }
    }
  }
}

}  // namespace
}  // namespace longkv
