// Tokens by mass against a double-precision reference, and attention over the rows that were marked.
#include "cuda/mass.h"

#include <algorithm>
#include <cmath>
#include <set>

#include "cuda/card.h"
#include "cuda/select.h"

namespace longkv {
namespace {

using test::OnCard;

struct Case {
  KvType type;
  int heads, kv_heads, dim, block;
  int64_t rows, budget, sink, local, candidates;
  double p;
  float sharp;  // larger queries, fewer rows that matter
};

using Rows = std::set<int64_t>;

// One KV head's candidates and what the rule makes of them.
struct Wanted {
  std::vector<std::vector<double>> share;  // [group][candidate]
  std::vector<int64_t> tokens;
  Rows rows;
  bool over = false;
};

Wanted wanted_rows(const Case& c, const std::vector<int64_t>& tokens, const std::vector<std::vector<double>>& logits) {
  Wanted w;
  w.tokens = tokens;
  const int64_t sink = std::min(c.sink, c.rows);
  const int64_t tail = std::max(sink, std::min(c.rows - std::max<int64_t>(c.local, 1), c.rows / c.block * c.block));
  std::vector<double> total(tokens.size());
  std::vector<bool> marked(tokens.size());
  for (const auto& l : logits) {
    double top = -1e300, sum = 0, held = 0;
    for (double x : l) top = std::max(top, x);
    std::vector<double> share;
    for (double x : l) share.push_back(std::exp(x - top)), sum += share.back();
    std::vector<size_t> order;
    for (size_t i = 0; i < share.size(); ++i) {
      share[i] /= sum;
      if (tokens[i] < sink || tokens[i] >= tail) {
        held += share[i];
      } else {
        order.push_back(i);
        total[i] += share[i];
      }
    }
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return share[a] > share[b]; });
    for (size_t i = 0; i < order.size() && held < c.p; ++i) {
      held += share[order[i]];
      marked[order[i]] = true;
    }
    w.share.push_back(share);
  }
  std::vector<size_t> chosen;
  for (size_t i = 0; i < tokens.size(); ++i)
    if (marked[i]) chosen.push_back(i);
  const int64_t limit = std::max<int64_t>(1, c.budget - sink - (c.rows - tail));
  w.over = int64_t(chosen.size()) > limit;
  if (w.over) {
    std::stable_sort(chosen.begin(), chosen.end(), [&](size_t a, size_t b) { return total[a] > total[b]; });
    chosen.resize(size_t(limit));
  }
  for (size_t i : chosen) w.rows.insert(tokens[i]);
  for (int64_t r = 0; r < sink; ++r) w.rows.insert(r);
  for (int64_t r = tail; r < c.rows; ++r) w.rows.insert(r);
  return w;
}

TEST(CardMass, SmallestSetsOfEveryHead) {
  LONGKV_NEED_CARD();
  const Case cases[] = {{KvType::kF16, 8, 2, 128, 16, 5000, 8192, 0, 16, 2048, 0.85, 2.0f},
                        {KvType::kF16, 4, 2, 64, 32, 3001, 8192, 20, 70, 1024, 0.6, 1.0f},
                        {KvType::kQ8_0, 14, 2, 64, 16, 2100, 300, 16, 64, 1024, 0.95, 1.0f},
                        {KvType::kFp8, 4, 4, 96, 16, 40, 8192, 0, 16, 8192, 0.85, 1.0f},
                        {KvType::kQ4_0, 16, 1, 256, 128, 20000, 8192, 128, 256, 8192, 0.9, 3.0f},
                        {KvType::kBf16, 4, 2, 128, 16, 17, 8192, 0, 16, 64, 0.5, 1.0f}};
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << kv_type_name(c.type) << ", " << c.rows << " rows, p " << c.p);
    const int64_t capacity = (c.rows + 15) / 16 * 16, blocks = (c.rows + c.block - 1) / c.block + 8;
    const int group = c.heads / c.kv_heads;
    const OnCard memory(card::card_kv_bytes(c.type, c.kv_heads, c.dim, capacity)),
        halves(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, capacity));
    const card::CardKv kv = card::place_kv(c.type, c.kv_heads, c.dim, capacity, memory.data());
    ASSERT_DONE(card::fill_rows(kv, c.rows, 5, nullptr));
    ASSERT_DONE(card::decode_rows(kv, 0, c.rows,
                                  card::place_kv(KvType::kF16, c.kv_heads, c.dim, capacity, halves.data()), nullptr));
    const auto stored = halves.read<uint16_t>(2 * c.kv_heads * capacity * c.dim);
    const auto value = [&](bool key, int head, int64_t row, int i) {
      return double(test::half_float(stored[size_t((((key ? 0 : c.kv_heads) + head) * capacity + row) * c.dim + i)]));
    };
    const auto qf = test::normal_floats(c.heads * c.dim, 21, c.sharp);
    std::vector<uint16_t> qh;
    for (float x : qf) qh.push_back(c.type == KvType::kBf16 ? to_bf16(x).bits : to_f16(x).bits);
    const auto query = [&](int head, int i) {
      const uint16_t bits = qh[size_t(head * c.dim + i)];
      return double(c.type == KvType::kBf16 ? to_float(bf16_t{bits}) : to_float(f16_t{bits}));
    };
    const OnCard q = OnCard::of(qh), position = OnCard::of(std::vector<int64_t>{c.rows - 1});
    const auto kind = card::SummaryKind::kBox;
    const OnCard boxes(card::summary_bytes(kind, c.kv_heads, c.dim, blocks)),
        scores(card::score_bytes(c.kv_heads, blocks));
    const card::CardSummaries s = card::place_summaries(kind, c.block, c.kv_heads, c.dim, blocks, boxes.data());
    card::ChoiceRules rules;
    rules.budget = c.budget, rules.sink = c.sink, rules.local = c.local;
    rules.blocks = (c.candidates + c.block - 1) / c.block;
    const int64_t stride = rules.tiles(c.block);
    const OnCard tiles(c.kv_heads * stride * 8), count(c.kv_heads * 4),
        scratch(card::MassScratch::bytes(c.heads, c.kv_heads, stride));
    OnCard::check(cudaMemset(scratch.data(), 0, 16));
    const card::MassScratch mass = card::MassScratch::at(scratch.data(), c.heads, c.kv_heads, stride);
    const double scale = 1 / std::sqrt(double(c.dim));
    const card::AttendArgs a{q.as<card::half_t>(), c.heads, kv, float(scale)};
    const auto* at = position.as<int64_t>();
    if (c.dim != 96) {  // boxes have no kernel for it; without scores the first blocks are chosen, here all of them
      ASSERT_DONE(card::summarize(kv, s, 0, c.rows / c.block, nullptr));
      ASSERT_DONE(card::score_blocks(a.q, c.heads, kv, s, rules, at, scores.as<float>(), nullptr));
    }
    ASSERT_DONE(card::choose_blocks(scores.as<float>(), card::Tops::kMade, c.kv_heads, s, rules, at,
                                    tiles.as<int32_t>(), count.as<int32_t>(), stride, nullptr));
    const auto listed = tiles.read<int32_t>(c.kv_heads * stride * 2), counted = count.read<int32_t>(c.kv_heads);
    ASSERT_DONE(
        card::choose_mass(a, rules, c.block, c.p, at, tiles.as<int32_t>(), count.as<int32_t>(), stride, mass, nullptr));
    const auto kept = tiles.read<int32_t>(c.kv_heads * stride * 2), left = count.read<int32_t>(c.kv_heads);
    std::vector<uint32_t> marks(size_t(c.kv_heads * stride));
    OnCard::check(cudaMemcpy(marks.data(), mass.marks, marks.size() * 4, cudaMemcpyDeviceToHost));

    const int splits = 5;
    const OnCard partials(card::DecodeScratch::bytes(c.heads, splits, c.dim)),
        row(card::CardRow::bytes(c.heads * c.dim));
    const card::DecodeScratch d{splits, partials.as<float>(), partials.as<float>() + int64_t(c.heads) * splits * c.dim};
    card::TileList list;
    list.tiles = tiles.as<int32_t>(), list.count = count.as<int32_t>(), list.stride = stride, list.marks = mass.marks;
    ASSERT_DONE(card::attend_token(a, list, at, d, nullptr));
    ASSERT_DONE(card::merge_partials(d, c.heads, c.dim, card::CardRow::at(row.data(), c.heads * c.dim), nullptr));
    const auto out = row.read<float>(c.heads * c.dim);

    int64_t all_rows = 0;
    for (int h = 0; h < c.kv_heads; ++h) {
      std::vector<int64_t> tokens;
      for (int64_t t = 0; t < counted[size_t(h)]; ++t) {
        const int32_t* tile = &listed[size_t((h * stride + t) * 2)];
        for (int64_t r = 0; r < tile[1]; ++r) tokens.push_back(tile[0] + r);
      }
      std::vector<std::vector<double>> logits;
      for (int j = 0; j < group; ++j) {
        logits.emplace_back();
        for (int64_t r : tokens) {
          double dot = 0;
          for (int i = 0; i < c.dim; ++i) dot += query(h * group + j, i) * value(true, h, r, i);
          logits.back().push_back(dot * scale);
        }
      }
      const Wanted want = wanted_rows(c, tokens, logits);
      Rows have;
      for (int64_t t = 0; t < left[size_t(h)]; ++t) {
        const int32_t* tile = &kept[size_t((h * stride + t) * 2)];
        EXPECT_NE(marks[size_t(h * stride + t)], 0u);
        for (int r = 0; r < 16; ++r)
          if (marks[size_t(h * stride + t)] >> r & 1) {
            EXPECT_LT(r, tile[1]);
            have.insert(tile[0] + r);
          }
      }
      all_rows += int64_t(have.size());
      // Rounding decides about rows of all but equal weight alone.
      std::vector<int64_t> different;
      std::set_symmetric_difference(have.begin(), have.end(), want.rows.begin(), want.rows.end(),
                                    std::back_inserter(different));
      EXPECT_LE(double(different.size()), 2 + 0.005 * double(want.rows.size())) << "of " << want.rows.size();
      for (int j = 0; j < group; ++j) {
        double held = 0, sum = 0;
        std::vector<double> expected(size_t(c.dim));
        for (size_t i = 0; i < tokens.size(); ++i) {
          if (!have.contains(tokens[i])) continue;
          const double w = want.share[size_t(j)][i];
          held += w;
          sum += w;
          for (int x = 0; x < c.dim; ++x) expected[size_t(x)] += w * value(false, h, tokens[i], x);
        }
        if (!want.over) {
          EXPECT_GE(held, c.p - 1e-3);
        }
        double error = 0, norm = 0;
        for (int x = 0; x < c.dim; ++x) {
          const double e = expected[size_t(x)] / sum;
          error += std::pow(out[size_t((h * group + j) * c.dim + x)] - e, 2);
          norm += e * e;
        }
        EXPECT_LE(std::sqrt(error), (c.type == KvType::kBf16 ? 0.03 : 0.01) * std::sqrt(norm)) << "head " << j;
      }
    }
    unsigned long long counters[2];
    OnCard::check(cudaMemcpy(counters, mass.counters, 16, cudaMemcpyDeviceToHost));
    EXPECT_EQ(int64_t(counters[0]), all_rows);
  }
}

}  // namespace
}  // namespace longkv
