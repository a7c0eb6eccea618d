// Reading prompts by columns and diagonals on the card.
#include "cuda/prompt_lines.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "cuda/card.h"
#include "prefill/choose.h"
#include "prefill/row_lists.h"

namespace longkv {
namespace {

using card::kPromptBlock;
using card::LineKind;
using test::OnCard;

std::vector<uint64_t> words_of(const std::set<int64_t>& items, int64_t words) {
  std::vector<uint64_t> out(size_t(words), 0);
  for (int64_t i : items) out[size_t(i / 64)] |= uint64_t(1) << (i % 64);
  return out;
}
std::vector<RowRange> ranges_of_set(const std::set<int64_t>& items) {
  std::vector<RowRange> out;
  ranges_of(std::vector<int64_t>(items.begin(), items.end()), out);
  return out;
}
std::set<int64_t> some_of(int64_t rows, int n, std::mt19937& random) {
  std::set<int64_t> items;
  while (int64_t(items.size()) < std::min<int64_t>(n, rows)) items.insert(int64_t(random() % uint64_t(rows)));
  return items;
}
std::set<int64_t> rows_of_ranges(const std::vector<RowRange>& ranges) {
  std::set<int64_t> rows;
  for (const RowRange& r : ranges)
    for (int64_t i = r.begin; i < r.end; ++i) rows.insert(i);
  return rows;
}

// Rows of a block of queries by the words that the kernel puts together, here on the host.
std::set<int64_t> rows_by_words(const card::LineQueries& queries, int64_t block, const std::vector<uint64_t>& columns,
                                const std::vector<uint64_t>& distances) {
  std::set<int64_t> rows;
  const int kind = queries.kind(block);
  for (int64_t w = 0; w <= block; ++w) {
    const int64_t k = block - w;
    const uint64_t spread = card::spread_word(k > 0 ? distances[size_t(k - 1)] : 0, distances[size_t(k)],
                                              queries.kind_from(kind), queries.kind_to(kind));
    uint64_t word = columns[size_t(w)] | spread;
    if (w == block) word = card::own_word(word, queries.from(block), queries.to(block));
    for (int i = 0; i < 64; ++i)
      if (word >> i & 1) rows.insert(w * 64 + i);
  }
  return rows;
}

TEST(PromptLines, WordsNameTheRowsOfTheCpu) {
  std::mt19937 random(3);
  int blocks_seen = 0;
  for (const auto& [first, n] : {std::pair<int64_t, int64_t>{0, 1},
                                 {0, 63},
                                 {0, 64},
                                 {0, 65},
                                 {64, 64},
                                 {63, 2},
                                 {130, 30},
                                 {130, 62},
                                 {130, 300},
                                 {127, 129},
                                 {640, 257},
                                 {1000, 24}}) {
    SCOPED_TRACE(testing::Message() << n << " queries from " << first);
    const int64_t rows = first + n + 5, words = (rows + 63) / 64 + 1;
    for (int trial = 0; trial < 12; ++trial) {
      const auto columns = some_of(rows, trial % 4 * 9, random), distances = some_of(rows, trial % 3 * 7, random);
      const auto column_ranges = ranges_of_set(columns), distance_ranges = ranges_of_set(distances);
      const auto column_words = words_of(columns, words), distance_words = words_of(distances, words);
      const card::LineQueries queries{first, n};
      for (int64_t block = queries.first_block(); block <= queries.last_block(); ++block) {
        const RowRange range{std::max(first, block * 64), std::min(first + n, block * 64 + 64)};
        ASSERT_EQ(queries.from(block), range.begin - block * 64);
        ASSERT_EQ(queries.to(block), range.end - block * 64);
        ASSERT_EQ(queries.kind_from(queries.kind(block)), queries.from(block));
        ASSERT_EQ(queries.kind_to(queries.kind(block)), queries.to(block));
        std::vector<RowRange> want;
        vertical_slash_rows(column_ranges, distance_ranges, range, want);
        ASSERT_EQ(rows_by_words(queries, block, column_words, distance_words), rows_of_ranges(want))
            << "block " << block << ", trial " << trial;
        ++blocks_seen;
      }
    }
  }
  EXPECT_GT(blocks_seen, 200);
}

TEST(PromptLines, RangesAreWindowsAndSinks) {
  for (const auto& [sink, window] : {std::pair<int64_t, int64_t>{0, 1}, {1, 64}, {64, 65}, {130, 200}, {4096, 9000}}) {
    for (const auto& [first, n] : {std::pair<int64_t, int64_t>{0, 100}, {200, 300}, {450, 20}}) {
      const int64_t words = (first + n + 63) / 64 + 1;
      std::vector<uint64_t> columns, distances;
      for (int64_t w = 0; w < words; ++w) {
        columns.push_back(card::range_word(w, 0, sink));
        distances.push_back(card::range_word(w, 0, window));
      }
      const card::LineQueries queries{first, n};
      for (int64_t block = queries.first_block(); block <= queries.last_block(); ++block) {
        std::vector<RowRange> want;
        a_shape_rows(sink, window, {std::max(first, block * 64), std::min(first + n, block * 64 + 64)}, want);
        ASSERT_EQ(rows_by_words(queries, block, columns, distances), rows_of_ranges(want))
            << sink << "+" << window << ", block " << block;
      }
    }
  }
}

TEST(CardPromptLines, MassByColumnAndDistanceAsInDouble) {
  LONGKV_NEED_CARD();
  struct Case {
    int heads, queries;
    int64_t row;
    float softcap;
  };
  for (const Case& c :
       {Case{3, 64, 0, 0}, Case{2, 64, 1000, 0}, Case{3, 5, 700, 0}, Case{1, 1, 0, 0}, Case{2, 64, 5003, 3.0f}}) {
    SCOPED_TRACE(testing::Message() << c.queries << " queries from " << c.row);
    const int64_t rows = c.row + c.queries, stride = (rows + 63) / 64 * 64;
    auto products = test::normal_floats(c.heads * c.queries * stride, 7, 20.0f);
    const float scale = 0.125f;
    const OnCard scores = OnCard::of(products), stats(c.heads * c.queries * 8), columns(c.heads * stride * 4),
                 distances(c.heads * stride * 4);
    ASSERT_DONE(card::sample_mass({scores.as<float>(), stride, c.heads, c.queries, c.row, scale, c.softcap},
                                  stats.as<float>(), columns.as<float>(), distances.as<float>(), nullptr));
    const auto got_columns = columns.read<float>(c.heads * stride),
               got_distances = distances.read<float>(c.heads * stride);
    for (int h = 0; h < c.heads; ++h) {
      std::vector<double> column(size_t(rows), 0.0), distance(size_t(rows), 0.0);
      for (int i = 0; i < c.queries; ++i) {
        const float* s = &products[size_t((h * c.queries + i) * stride)];
        const auto logit = [&](int64_t r) {
          const double x = double(s[r]) * scale;
          return c.softcap > 0 ? c.softcap * std::tanh(x / c.softcap) : x;
        };
        double sum = 0;
        for (int64_t r = 0; r <= c.row + i; ++r) sum += std::exp(logit(r));
        for (int64_t r = 0; r <= c.row + i; ++r) {
          column[size_t(r)] += std::exp(logit(r)) / sum;
          distance[size_t(c.row + i - r)] += std::exp(logit(r)) / sum;
        }
      }
      for (int64_t r = 0; r < rows; ++r) {
        ASSERT_NEAR(got_columns[size_t(h * stride + r)], column[size_t(r)], 1e-5 + 2e-5 * column[size_t(r)]) << r;
        ASSERT_NEAR(got_distances[size_t(h * stride + r)], distance[size_t(r)], 1e-5 + 2e-5 * distance[size_t(r)]) << r;
      }
    }
  }
}

// Best lines by plain sorting; sets of other kinds; words of distances as the host computes them.
TEST(CardPromptLines, BestLinesAndTheirWords) {
  LONGKV_NEED_CARD();
  for (const auto& [first, n] : {std::pair<int64_t, int64_t>{0, 20}, {0, 700}, {1000, 333}, {64 * 300, 200}}) {
    SCOPED_TRACE(testing::Message() << n << " queries from " << first);
    const int64_t rows = first + n, stride = (rows + 63) / 64 * 64, words = stride / 64;
    const std::vector<card::HeadLines> patterns = {{LineKind::kLines, 40, 150},  {LineKind::kBlocks, 3, 0},
                                                   {LineKind::kLines, 1, 1},     {LineKind::kAll, 0, 0},
                                                   {LineKind::kAShape, 100, 70}, {LineKind::kLines, 1 << 30, 500}};
    const std::vector<int32_t> ids = {0, 2, 5, 4, 3};
    const int heads = int(patterns.size());
    auto columns = test::normal_floats(heads * stride, 1), distances = test::normal_floats(heads * stride, 2);
    for (auto* all : {&columns, &distances})
      for (float& x : *all) x = std::round(std::fabs(x) * 16) / 16;  // many are equal: the first win
    const OnCard on_columns = OnCard::of(columns), on_distances = OnCard::of(distances),
                 on_patterns = OnCard::of(patterns), on_ids = OnCard::of(ids), bits(heads * words * 5 * 8);
    card::PromptLines lines;
    lines.columns = bits.as<uint64_t>();
    lines.distances = lines.columns + heads * words;
    lines.spread = lines.distances + heads * words;
    lines.words = words;
    const card::PromptHeads all{on_ids.as<int32_t>(), 5}, chosen{on_ids.as<int32_t>(), 3};
    const auto* p = on_patterns.as<card::HeadLines>();
    const card::LineQueries queries{first, std::max<int64_t>(1, n - 10)};
    ASSERT_DONE(card::begin_lines(all, p, lines, nullptr));
    ASSERT_DONE(
        card::choose_lines(on_columns.as<float>(), on_distances.as<float>(), stride, rows, chosen, p, lines, nullptr));
    ASSERT_DONE(card::spread_lines(all, queries, lines, nullptr));
    const auto got = bits.read<uint64_t>(heads * words * 5);
    for (int h : ids) {
      const card::HeadLines& pattern = patterns[size_t(h)];
      for (const bool vertical : {true, false}) {
        std::set<int64_t> want;
        const auto add = [&](int64_t n_rows) {
          for (int64_t r = 0; r < std::min(n_rows, words * 64); ++r) want.insert(r);
        };
        if (pattern.kind == LineKind::kAShape) add(vertical ? pattern.first : pattern.second);
        if (pattern.kind == LineKind::kAll && vertical) add(words * 64);
        if (pattern.kind == LineKind::kLines) {
          const int64_t forced = vertical ? kForcedColumns : kForcedDistances;
          const int64_t size =
              vertical ? std::max(pattern.first, kMinColumns) : std::max(pattern.second, kMinDistances);
          const float* scores = &(vertical ? columns : distances)[size_t(h * stride)];
          std::vector<int64_t> order(static_cast<size_t>(rows));
          std::iota(order.begin(), order.end(), 0);
          const auto score = [&](int64_t r) { return r < forced ? 1e30f : scores[r]; };
          std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return score(a) > score(b); });
          order.resize(size_t(std::min(size, rows)));
          want.insert(order.begin(), order.end());
        }
        const auto begin = got.begin() + (vertical ? 0 : heads * words) + h * words;
        ASSERT_EQ(std::vector<uint64_t>(begin, begin + words), words_of(want, words))
            << "head " << h << (vertical ? " columns" : " distances");
      }
      const auto distance = got.begin() + heads * words + h * words;
      for (int kind = 0; kind < 3; ++kind) {
        for (int64_t k = 0; k <= queries.last_block(); ++k) {
          ASSERT_EQ(got[size_t(2 * heads * words + (h * 3 + kind) * words + k)],
                    card::spread_word(k > 0 ? distance[k - 1] : 0, distance[k], queries.kind_from(kind),
                                      queries.kind_to(kind)))
              << "head " << h << ", kind " << kind << ", word " << k;
        }
      }
    }
  }
}

TEST(CardPromptLines, AttentionAsInDouble) {
  LONGKV_NEED_CARD();
  struct Case {
    int heads, kv_heads, dim;
    int64_t rows, first;
    int columns, distances;
  };
  for (const Case& c : {Case{4, 2, 64, 64, 0, 1, 1}, Case{3, 1, 128, 700, 0, 20, 5}, Case{6, 2, 128, 900, 333, 100, 30},
                        Case{3, 3, 96, 400, 256, 3, 60}, Case{4, 1, 256, 500, 130, 40, 10},
                        Case{2, 1, 64, 700, 690, 5, 5}, Case{2, 2, 128, 9000, 8800, 300, 20},
                        Case{2, 1, 64, 13000, 12900, 13000, 0}, Case{2, 1, 128, 9000, 8900, 0, 1}}) {
    SCOPED_TRACE(testing::Message() << c.heads << "/" << c.kv_heads << " x " << c.dim << ", rows " << c.first << " to "
                                    << c.rows);
    const int64_t capacity = (c.rows + 15) / 16 * 16, n = c.rows - c.first, words = (c.rows + 63) / 64;
    const OnCard memory(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, capacity));
    const card::CardKv kv = card::place_kv(KvType::kF16, c.kv_heads, c.dim, capacity, memory.data());
    ASSERT_DONE(card::fill_rows(kv, c.rows, 31, nullptr));
    const auto queries = test::to_halves(test::normal_floats(n * c.heads * c.dim, 5));
    const OnCard q = OnCard::of(queries), out(n * c.heads * c.dim * 2);
    const auto rows = memory.read<uint16_t>(2 * c.kv_heads * capacity * c.dim);

    std::mt19937 random(9);
    std::vector<std::set<int64_t>> columns, distances;
    std::vector<uint64_t> bits;
    for (int h = 0; h < c.heads; ++h) columns.push_back(some_of(c.rows, c.columns, random));
    for (int h = 0; h < c.heads; ++h) distances.push_back(some_of(c.rows, c.distances, random));
    for (const auto& sets : {columns, distances})
      for (const auto& set : sets)
        for (uint64_t w : words_of(set, words)) bits.push_back(w);
    bits.resize(size_t(c.heads * words * 5), 0xdeadbeefdeadbeefu);
    const OnCard on_bits = OnCard::of(bits);
    card::PromptLines lines;
    lines.columns = on_bits.as<uint64_t>();
    lines.distances = lines.columns + c.heads * words;
    lines.spread = lines.distances + c.heads * words;
    lines.words = words;
    // All heads but the second, the last first.
    std::vector<int32_t> ids;
    for (int h = c.heads - 1; h >= 0; --h)
      if (h != 1) ids.push_back(h);
    const OnCard on_ids = OnCard::of(ids), pairs = OnCard::of(std::vector<uint64_t>{5});
    const card::PromptHeads heads{on_ids.as<int32_t>(), int(ids.size())};
    const int64_t sparse = n > 80 ? n - 70 : n;
    ASSERT_DONE(card::spread_lines(heads, {c.first, sparse}, lines, nullptr));
    const auto scale = float(1 / std::sqrt(double(c.dim)));
    const card::AttendArgs a{q.as<card::half_t>(), c.heads, kv, scale, 0.0f, 0};
    ASSERT_DONE(card::attend_prompt_lines(a, heads, lines, c.first, sparse, out.as<card::half_t>(),
                                          pairs.as<unsigned long long>(), nullptr));
    const auto got = out.read<uint16_t>(n * c.heads * c.dim);
    int64_t want_pairs = 5;
    double worst = 0;
    for (int h = 0; h < c.heads; ++h) {
      const int kv_head = h / (c.heads / c.kv_heads);
      const auto column_ranges = ranges_of_set(columns[size_t(h)]),
                 distance_ranges = ranges_of_set(distances[size_t(h)]);
      std::vector<RowRange> listed;
      int64_t listed_block = -1;
      for (int64_t t = 0; t < n; ++t) {
        const int64_t position = c.first + t, block = position / 64;
        if (t >= sparse || h == 1) {
          for (int i = 0; i < c.dim; ++i) ASSERT_EQ(got[size_t((t * c.heads + h) * c.dim + i)], 0xffff) << t;
          continue;
        }
        if (block != listed_block) {
          const RowRange range{std::max(c.first, block * 64), std::min(c.first + sparse, block * 64 + 64)};
          vertical_slash_rows(column_ranges, distance_ranges, range, listed);
          want_pairs += causal_pairs(listed, range);
          listed_block = block;
        }
        if (t % 13 != 0 && t + 1 != sparse) continue;
        std::vector<double> want(size_t(c.dim), 0.0);
        double sum = 0;
        for (const RowRange& r : listed) {
          for (int64_t row = r.begin; row < std::min(r.end, position + 1); ++row) {
            const uint16_t* key = &rows[size_t((kv_head * capacity + row) * c.dim)];
            const uint16_t* value = &rows[size_t(((c.kv_heads + kv_head) * capacity + row) * c.dim)];
            double dot = 0;
            for (int i = 0; i < c.dim; ++i)
              dot += test::half_float(key[i]) * test::half_float(queries[size_t((t * c.heads + h) * c.dim + i)]);
            const double w = std::exp(dot * scale);
            sum += w;
            for (int i = 0; i < c.dim; ++i) want[size_t(i)] += w * test::half_float(value[i]);
          }
        }
        double error = 0, norm = 0;
        for (int i = 0; i < c.dim; ++i) {
          const double x = test::half_float(got[size_t((t * c.heads + h) * c.dim + i)]), y = want[size_t(i)] / sum;
          error += (x - y) * (x - y);
          norm += y * y;
        }
        ASSERT_LE(std::sqrt(error), 0.01 * std::sqrt(norm)) << "query " << t << ", head " << h;
        worst = std::max(worst, std::sqrt(error / norm));
      }
    }
    EXPECT_EQ(int64_t(pairs.read<uint64_t>(1)[0]), want_pairs);
    std::printf("  %d/%d x %d, %lld rows: worst error %.1e\n", c.heads, c.kv_heads, c.dim,
                static_cast<long long>(c.rows), worst);
  }
}

}  // namespace
}  // namespace longkv
