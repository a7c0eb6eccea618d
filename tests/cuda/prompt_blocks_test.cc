// Block-sparse reading of prompts on the card.
#include "cuda/prompt_blocks.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "cuda/card.h"

namespace longkv {
namespace {

using card::kPromptBlock;
using test::OnCard;

TEST(CardPromptBlocks, BestBlocksAscendingWithTheirOwn) {
  LONGKV_NEED_CARD();
  for (const auto& [first, n, most] :
       {std::tuple<int64_t, int64_t, int64_t>{0, 700, 4}, {6400, 4096, 100}, {1000, 333, 9}, {64 * 9000, 200, 64}}) {
    SCOPED_TRACE(testing::Message() << n << " queries from " << first);
    const int heads = 3;
    const int64_t query_blocks = card::prompt_blocks(first, n), blocks = first / kPromptBlock + query_blocks,
                  stride = blocks + 5;
    auto values = test::normal_floats(heads * query_blocks * stride, 8);
    for (float& v : values) v = std::round(v * 4) / 4 + 0.0f;  // many are equal: the first blocks win
    const OnCard scores = OnCard::of(values), list(heads * query_blocks * most * 4), count(heads * query_blocks * 4);
    ASSERT_DONE(card::choose_prompt_blocks(scores.as<float>(), stride, heads, first,
                                           {list.as<int32_t>(), count.as<int32_t>(), query_blocks, most}, nullptr,
                                           nullptr));
    const auto got = list.read<int32_t>(heads * query_blocks * most);
    const auto counts = count.read<int32_t>(heads * query_blocks);
    for (int64_t l = 0; l < heads * query_blocks; ++l) {
      const int64_t own = first / kPromptBlock + l % query_blocks;
      std::vector<int32_t> want(static_cast<size_t>(own + 1));
      std::iota(want.begin(), want.end(), 0);
      const auto score = [&](int32_t b) { return b == own ? 1e30f : values[size_t(l * stride + b)]; };
      std::stable_sort(want.begin(), want.end(), [&](int32_t a, int32_t b) { return score(a) > score(b); });
      want.resize(size_t(std::min(most, own + 1)));
      std::sort(want.begin(), want.end());
      ASSERT_EQ(counts[size_t(l)], int32_t(want.size()));
      const auto begin = got.begin() + l * most;
      ASSERT_EQ(std::vector<int32_t>(begin, begin + counts[size_t(l)]), want) << "list " << l;
    }
  }
}

TEST(CardPromptBlocks, MeansAndAttentionAsInDouble) {
  LONGKV_NEED_CARD();
  struct Case {
    int heads, kv_heads, dim;
    int64_t rows, first;
  };
  for (const Case& c :
       {Case{4, 2, 64, 700, 0}, Case{8, 2, 128, 900, 333}, Case{3, 3, 96, 400, 256}, Case{4, 1, 256, 500, 130}}) {
    SCOPED_TRACE(testing::Message() << c.heads << "/" << c.kv_heads << " x " << c.dim << " from " << c.first);
    const int64_t capacity = (c.rows + 15) / 16 * 16, n = c.rows - c.first;
    const OnCard memory(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, capacity));
    const card::CardKv kv = card::place_kv(KvType::kF16, c.kv_heads, c.dim, capacity, memory.data());
    ASSERT_DONE(card::fill_rows(kv, c.rows, 31, nullptr));
    const auto queries = test::to_halves(test::normal_floats(n * c.heads * c.dim, 5));
    const OnCard q = OnCard::of(queries);
    const auto rows = memory.read<uint16_t>(2 * c.kv_heads * capacity * c.dim);
    const auto row_of = [&](bool key, int head, int64_t r) {
      return &rows[size_t(((key ? 0 : c.kv_heads) + head) * capacity * c.dim + r * c.dim)];
    };

    // Means, of keys in two pieces.
    const int64_t blocks = (c.rows + kPromptBlock - 1) / kPromptBlock, query_blocks = card::prompt_blocks(c.first, n);
    const OnCard key_means(c.kv_heads * blocks * c.dim * 2), query_means(c.heads * query_blocks * c.dim * 2);
    ASSERT_DONE(card::pool_keys(kv, 0, c.first, blocks, key_means.as<card::half_t>(), nullptr));
    ASSERT_DONE(card::pool_keys(kv, c.first, n, blocks, key_means.as<card::half_t>(), nullptr));
    ASSERT_DONE(
        card::pool_queries(q.as<card::half_t>(), c.heads, c.dim, c.first, n, query_means.as<card::half_t>(), nullptr));
    const auto keys = key_means.read<uint16_t>(c.kv_heads * blocks * c.dim);
    for (int h = 0; h < c.kv_heads; ++h) {
      for (int64_t b = 0; b < blocks; ++b) {
        const int64_t end = std::min(c.rows, (b + 1) * kPromptBlock);
        for (int i = 0; i < c.dim; ++i) {
          double mean = 0;
          for (int64_t r = b * kPromptBlock; r < end; ++r) mean += test::half_float(row_of(true, h, r)[i]);
          mean /= double(end - b * kPromptBlock);
          ASSERT_NEAR(test::half_float(keys[size_t((h * blocks + b) * c.dim + i)]), mean, 0x1p-9) << b;
        }
      }
    }
    const auto means = query_means.read<uint16_t>(c.heads * query_blocks * c.dim);
    for (int h = 0; h < c.heads; ++h) {
      for (int64_t b = 0; b < query_blocks; ++b) {
        const int64_t begin = std::max(c.first, (c.first / kPromptBlock + b) * kPromptBlock);
        const int64_t end = std::min(c.rows, (c.first / kPromptBlock + b + 1) * kPromptBlock);
        double mean = 0;
        for (int64_t r = begin; r < end; ++r)
          mean += test::half_float(queries[size_t(((r - c.first) * c.heads + h) * c.dim + 1)]);
        ASSERT_NEAR(test::half_float(means[size_t((h * query_blocks + b) * c.dim + 1)]), mean / double(end - begin),
                    0x1p-9);
      }
    }

    // Attention over every second block and the own one, of all but the last 70 queries.
    const int64_t most = blocks, sparse = n - 70;
    std::vector<int32_t> lists(size_t(c.heads * query_blocks * most), -1), counts(size_t(c.heads * query_blocks), 0);
    for (int64_t l = 0; l < c.heads * query_blocks; ++l) {
      const int64_t own = c.first / kPromptBlock + l % query_blocks;
      for (int64_t b = 0; b <= own; ++b)
        if (b == own || (b + l / query_blocks) % 2 == 0) lists[size_t(l * most + counts[size_t(l)]++)] = int32_t(b);
    }
    const OnCard list = OnCard::of(lists), count = OnCard::of(counts), out(n * c.heads * c.dim * 2);
    const auto scale = float(1 / std::sqrt(double(c.dim)));
    const card::AttendArgs a{q.as<card::half_t>(), c.heads, kv, scale, 0.0f, 0};
    ASSERT_DONE(card::attend_prompt_listed(a, {list.as<int32_t>(), count.as<int32_t>(), query_blocks, most}, c.first,
                                           sparse, out.as<card::half_t>(), nullptr, nullptr));
    const auto got = out.read<uint16_t>(n * c.heads * c.dim);
    for (int64_t t = 0; t < sparse; t += 13) {
      const int64_t position = c.first + t;
      for (int h = 0; h < c.heads; ++h) {
        const int kv_head = h / (c.heads / c.kv_heads);
        std::vector<double> want(size_t(c.dim), 0.0);
        double sum = 0;
        for (int64_t r = 0; r <= position; ++r) {
          const int64_t block = r / kPromptBlock;
          if (block != position / kPromptBlock && (block + h) % 2 != 0) continue;
          double dot = 0;
          for (int i = 0; i < c.dim; ++i)
            dot += test::half_float(row_of(true, kv_head, r)[i]) *
                   test::half_float(queries[size_t((t * c.heads + h) * c.dim + i)]);
          const double w = std::exp(dot * scale);
          sum += w;
          for (int i = 0; i < c.dim; ++i) want[size_t(i)] += w * test::half_float(row_of(false, kv_head, r)[i]);
        }
        double error = 0, norm = 0;
        for (int i = 0; i < c.dim; ++i) {
          const double x = test::half_float(got[size_t((t * c.heads + h) * c.dim + i)]);
          error += (x - want[size_t(i)] / sum) * (x - want[size_t(i)] / sum);
          norm += want[size_t(i)] * want[size_t(i)] / sum / sum;
        }
        ASSERT_LE(std::sqrt(error), 0.01 * std::sqrt(norm)) << "query " << t << ", head " << h;
      }
    }
    for (int64_t i = sparse * c.heads * c.dim; i < n * c.heads * c.dim; ++i) ASSERT_EQ(got[size_t(i)], 0xffff);
  }
}

}  // namespace
}  // namespace longkv
