#include "cuda/select.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/card.h"

namespace longkv {
namespace {

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

// The rule of kv/select/selector.h in plain words: rows of a step, ascending.
std::vector<int64_t> expected_rows(const std::vector<double>& score, int64_t rows, int block,
                                   const card::ChoiceRules& rules) {
  std::vector<int64_t> out;
  if (rows <= rules.budget) {
    out.resize(size_t(rows));
    std::iota(out.begin(), out.end(), 0);
    return out;
  }
  const int64_t sink = std::min(rules.sink, rows);
  const int64_t tail = std::max(sink, std::min(rows - std::max<int64_t>(rules.local, 1), rows / block * block));
  const int64_t begin = sink / block, end = tail > sink ? (tail + block - 1) / block : begin;
  std::vector<int64_t> order;
  for (int64_t b = begin; b < end; ++b) order.push_back(b);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return score[size_t(a)] > score[size_t(b)]; });
  const int64_t wanted = std::max<int64_t>(1, std::max<int64_t>(1, rules.budget - sink - (rows - tail)) / block);
  if (int64_t(order.size()) > wanted) order.resize(size_t(wanted));
  std::vector<bool> take(size_t(rows), false);
  for (int64_t r = 0; r < sink; ++r) take[size_t(r)] = true;
  for (int64_t r = tail; r < rows; ++r) take[size_t(r)] = true;
  for (int64_t b : order)
    for (int64_t r = b * block; r < std::min((b + 1) * block, rows); ++r) take[size_t(r)] = true;
  for (int64_t r = 0; r < rows; ++r)
    if (take[size_t(r)]) out.push_back(r);
  return out;
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
    const OnCard data(card::summary_bytes(c.kind, c.kv_heads, c.dim, blocks)), scores(c.kv_heads * blocks * 4);
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
    ASSERT_DONE(card::choose_blocks(scores.as<float>(), c.kv_heads, s, c.rules, positions.as<int64_t>() + 1,
                                    tiles.as<int32_t>(), count.as<int32_t>(), stride, nullptr));
    const auto got = scores.read<float>(c.kv_heads * blocks);
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
      std::vector<int64_t> rows;
      ASSERT_LE(counts[size_t(h)], stride);
      for (int64_t t = 0; t < counts[size_t(h)]; ++t) {
        const int32_t* tile = &list[size_t((h * stride + t) * 2)];
        ASSERT_LE(tile[1], 16);
        for (int64_t r = 0; r < tile[1]; ++r) rows.push_back(tile[0] + r);
      }
      ASSERT_TRUE(std::is_sorted(rows.begin(), rows.end()));
      EXPECT_EQ(rows, expected_rows(c.rules.shared ? shared : own, c.rows, c.block, c.rules)) << "head " << h;
    }
  }
}

}  // namespace
}  // namespace longkv
