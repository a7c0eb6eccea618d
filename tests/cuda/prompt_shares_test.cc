// XAttention's estimate on the card.
#include "cuda/prompt_shares.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "base/threads.h"
#include "cuda/card.h"
#include "cuda/card_pattern.h"
#include "prefill/antidiagonal.h"

namespace longkv {
namespace {

using test::OnCard;

TEST(PromptShares, SquaresOfAChunk) {
  for (const int stride : {8, 16}) {
    for (int64_t first : {0, 5, 16, 100, 127, 128, 1000, 1024}) {
      for (int64_t n : {1, 2, 15, 16, 17, 127, 128, 129, 300, 1000}) {
        SCOPED_TRACE(testing::Message() << n << " queries from " << first << ", stride " << stride);
        const card::Squares s{stride, first, n};
        // By position, in plain words.
        std::vector<int64_t> queries(static_cast<size_t>(s.count()), 0), block(static_cast<size_t>(s.count()), -1);
        for (int64_t p = first; p < first + n; ++p) {
          const int64_t a = p / stride - first / stride;
          ASSERT_LT(a, s.count());
          ++queries[size_t(a)];
          block[size_t(a)] = p / kShareBlock - first / kShareBlock;
        }
        ASSERT_EQ(s.keys() * stride, (first + n + stride - 1) / stride * stride);
        ASSERT_EQ(s.first_square() + s.count(), s.keys());
        ASSERT_EQ(s.query_blocks(), block.back() + 1);
        for (int64_t a = 0; a < s.count(); ++a) ASSERT_EQ(s.queries(a), queries[size_t(a)]) << a;
        for (int64_t b = 0; b < s.query_blocks(); ++b) {
          ASSERT_LT(s.from(b), s.to(b));
          ASSERT_LE(s.to(b) - s.from(b), s.per_block());
          for (int64_t a = 0; a < s.count(); ++a) ASSERT_EQ(a >= s.from(b) && a < s.to(b), block[size_t(a)] == b);
        }
      }
    }
  }
}

struct Shape {
  int heads, kv_heads, dim;
  int64_t rows, first;
  int stride;
};

TEST(CardPromptShares, SharesAsOnTheCpu) {
  LONGKV_NEED_CARD();
  ThreadPool pool(4);
  CardMemory memory_of_gemm(0);
  const auto gemm = CardGemm::create(memory_of_gemm).value();
  for (const Shape& c : {Shape{3, 1, 64, 128, 0, 16}, Shape{4, 2, 128, 900, 0, 16}, Shape{6, 2, 128, 901, 333, 16},
                         Shape{3, 3, 96, 700, 256, 8}, Shape{4, 1, 256, 523, 130, 16}, Shape{2, 1, 64, 300, 299, 8},
                         Shape{2, 2, 128, 5000, 904, 16}}) {
    SCOPED_TRACE(testing::Message() << c.heads << "/" << c.kv_heads << " x " << c.dim << ", rows " << c.first << " to "
                                    << c.rows << ", stride " << c.stride);
    const int64_t capacity = (c.rows + 15) / 16 * 16, n = c.rows - c.first;
    const int group = c.heads / c.kv_heads;
    const OnCard memory(card::card_kv_bytes(KvType::kF16, c.kv_heads, c.dim, capacity));
    const card::CardKv kv = card::place_kv(KvType::kF16, c.kv_heads, c.dim, capacity, memory.data());
    ASSERT_DONE(card::fill_rows(kv, c.rows, 31, nullptr));
    auto queries = test::to_halves(test::normal_floats(n * c.heads * c.dim, 5, 3.0f));
    const OnCard q = OnCard::of(queries);
    const card::Squares s{c.stride, c.first, n};
    const int64_t depth = int64_t(c.stride) * c.dim, key_stride = (capacity / c.stride + 63) / 64 * 64;
    const int64_t share_stride = key_stride / s.per_block();
    const OnCard folded(c.heads * s.count() * depth * 2), scores(c.heads * s.count() * key_stride * 4),
        shares(c.heads * s.query_blocks() * share_stride * 4);
    ASSERT_DONE(card::clear_square(kv, s, nullptr));
    ASSERT_DONE(card::fold_queries(q.as<card::half_t>(), c.heads, c.dim, s, folded.as<card::half_t>(), nullptr));
    const PatternProduct product{group * s.count(),         s.keys(),         depth,     c.kv_heads,
                                 group * s.count() * depth, capacity * c.dim, key_stride};
    ASSERT_DONE(pattern_product(*gemm, product, folded.as<card::half_t>(), memory.as<card::half_t>(),
                                scores.as<float>(), nullptr));
    const auto scale = float(1 / std::sqrt(double(c.dim)));
    ASSERT_DONE(card::block_shares(scores.as<float>(), key_stride, c.heads, s, scale, shares.as<float>(), share_stride,
                                   nullptr));
    const auto got = shares.read<float>(c.heads * s.query_blocks() * share_stride);
    const auto rows = memory.read<uint16_t>(2 * c.kv_heads * capacity * c.dim);

    std::vector<float> q_floats;
    for (uint16_t x : queries) q_floats.push_back(test::half_float(x));
    double worst = 0;
    for (int h = 0; h < c.kv_heads; ++h) {
      AntidiagonalArgs args;
      args.q = q_floats.data() + h * group * c.dim;
      args.q_stride = c.heads * c.dim;
      args.queries = n;
      args.row = c.first;
      args.group = group;
      args.kv.k_type = args.kv.v_type = KvType::kF16;
      args.kv.dim_k = args.kv.dim_v = c.dim;
      args.kv.k = args.kv.v = reinterpret_cast<const uint8_t*>(&rows[size_t(h * capacity * c.dim)]);
      args.kv.k_stride = args.kv.v_stride = c.dim * 2;
      args.kv.rows = c.rows;
      args.scale = scale;
      args.stride = c.stride;
      args.block = kShareBlock;
      BlockShares want;
      antidiagonal_shares(args, pool, want);
      ASSERT_EQ(want.query_blocks, s.query_blocks());
      for (int j = 0; j < group; ++j) {
        for (int64_t b = 0; b < want.query_blocks; ++b) {
          double sum = 0;
          for (int64_t k = 0; k <= want.first_block + b; ++k) {
            const float x = got[size_t(((h * group + j) * s.query_blocks() + b) * share_stride + k)];
            const float y = want.shares[size_t((j * want.query_blocks + b) * want.key_blocks + k)];
            ASSERT_NEAR(x, y, 2e-6 + 2e-5 * y) << "head " << h * group + j << ", block " << b << " of keys " << k;
            worst = std::max(worst, double(std::fabs(x - y)));
            sum += x;
          }
          ASSERT_NEAR(sum, 1, 1e-5);
        }
      }
    }
    // In double, for one head, square and block.
    const int64_t a = s.count() - 1, b = s.query_blocks() - 1;
    if (s.to(b) - s.from(b) == 1) {
      std::vector<double> logits;
      for (int64_t k = 0; k < s.keys(); ++k) {
        double dot = 0;
        for (int64_t i = 0; i < c.stride; ++i) {
          const int64_t row = k * c.stride + i, position = (s.first_square() + a + 1) * c.stride - 1 - i;
          if (row >= c.rows || position < c.first || position >= c.rows) continue;
          for (int d = 0; d < c.dim; ++d)
            dot += double(test::half_float(rows[size_t(row * c.dim + d)])) *
                   test::half_float(queries[size_t((position - c.first) * c.heads * c.dim + d)]);
        }
        logits.push_back(dot * scale / double(s.queries(a)));
      }
      const double top = *std::max_element(logits.begin(), logits.end());
      double all = 0, first_block = 0;
      for (size_t k = 0; k < logits.size(); ++k) {
        all += std::exp(logits[k] - top);
        if (int64_t(k) < s.per_block()) first_block += std::exp(logits[k] - top);
      }
      EXPECT_NEAR(got[size_t(b * share_stride)], first_block / all, 1e-5);
    }
    std::printf("  %lld rows: worst difference of a share %.1e\n", static_cast<long long>(c.rows), worst);
  }
}

// The rule of prefill/xattention_pattern.cc in plain words.
std::vector<int32_t> chosen(const float* shares, int64_t n, const card::ShareRules& rules) {
  std::vector<int32_t> out;
  double forced = 0, total = 0;
  std::vector<int32_t> order;
  for (int64_t b = 0; b < n; ++b) {
    total += shares[b];
    if (b < rules.sinks || b == n - 1) {
      forced += shares[b];
      out.push_back(int32_t(b));
    } else {
      order.push_back(int32_t(b));
    }
  }
  std::stable_sort(order.begin(), order.end(), [&](int32_t x, int32_t y) { return shares[x] > shares[y]; });
  double held = forced;
  size_t taken = 0;
  while (taken < order.size() && (held < rules.share * total || int64_t(out.size()) < rules.least)) {
    held += shares[order[taken]];
    out.push_back(order[taken++]);
  }
  std::sort(out.begin(), out.end());
  return out;
}

TEST(CardPromptShares, FewestBlocksThatReachTheShare) {
  LONGKV_NEED_CARD();
  for (const auto& [first, n] :
       {std::pair<int64_t, int64_t>{0, 700}, {6400, 4096}, {1000, 333}, {128 * 3000, 200}, {128 * 8000, 128}}) {
    for (const card::ShareRules& rules :
         {card::ShareRules{0.9, 1, 16}, {0.5, 0, 1}, {0.99, 3, 4}, {0.0, 1, 5}, {1.0, 2, 1}, {0.75, 100, 200}}) {
      SCOPED_TRACE(testing::Message() << n << " queries from " << first << ", share " << rules.share);
      const int heads = 3;
      const int64_t query_blocks = card::prompt_blocks(first, n, kShareBlock),
                    blocks = first / kShareBlock + query_blocks, stride = (blocks + 63) / 64 * 64;
      // Multiples of 2^-12 add up exactly in any order, and many are equal: the first blocks win.
      auto values = test::normal_floats(heads * query_blocks * stride, 8);
      for (float& v : values) v = std::round(std::fabs(v * v * v) * 64) / 4096;
      const OnCard shares = OnCard::of(values), list(heads * query_blocks * stride * 4),
                   count(heads * query_blocks * 4);
      card::PromptLists lists{list.as<int32_t>(), count.as<int32_t>(), query_blocks, stride};
      lists.block = kShareBlock;
      ASSERT_DONE(card::choose_shares(shares.as<float>(), stride, heads, first, rules, lists, nullptr));
      const auto got = list.read<int32_t>(heads * query_blocks * stride);
      const auto counts = count.read<int32_t>(heads * query_blocks);
      std::vector<std::vector<int32_t>> want;
      for (int64_t l = 0; l < heads * query_blocks; ++l) {
        const int64_t own = first / kShareBlock + l % query_blocks;
        want.push_back(chosen(&values[size_t(l * stride)], own + 1, rules));
        const auto begin = got.begin() + l * stride;
        ASSERT_EQ(counts[size_t(l)], int32_t(want.back().size())) << "list " << l;
        ASSERT_EQ(std::vector<int32_t>(begin, begin + counts[size_t(l)]), want.back()) << "list " << l;
      }
      ASSERT_DONE(card::unite_lists(1, heads, lists, nullptr));
      const auto united = list.read<int32_t>(heads * query_blocks * stride);
      const auto united_counts = count.read<int32_t>(heads * query_blocks);
      for (int64_t l = 0; l < heads * query_blocks; ++l) {
        std::vector<int32_t> all;
        for (int h = 0; h < heads; ++h) {
          const auto& own = want[size_t(h * query_blocks + l % query_blocks)];
          all.insert(all.end(), own.begin(), own.end());
        }
        std::sort(all.begin(), all.end());
        all.erase(std::unique(all.begin(), all.end()), all.end());
        const auto begin = united.begin() + l * stride;
        ASSERT_EQ(united_counts[size_t(l)], int32_t(all.size())) << "list " << l;
        ASSERT_EQ(std::vector<int32_t>(begin, begin + united_counts[size_t(l)]), all) << "list " << l;
      }
    }
  }
}

TEST(CardPromptShares, SharesThatAreNoNumbersChooseAll) {
  LONGKV_NEED_CARD();
  const int64_t stride = 64;
  std::vector<float> values(size_t(stride), 0.01f);
  values[7] = std::nanf("");
  const OnCard shares = OnCard::of(values), list(stride * 4), count(4);
  card::PromptLists lists{list.as<int32_t>(), count.as<int32_t>(), 1, stride};
  lists.block = kShareBlock;
  ASSERT_DONE(card::choose_shares(shares.as<float>(), stride, 1, 50 * kShareBlock, {0.5, 1, 2}, lists, nullptr));
  ASSERT_EQ(count.read<int32_t>(1)[0], 51);
  const auto got = list.read<int32_t>(51);
  for (int32_t b = 0; b < 51; ++b) ASSERT_EQ(got[size_t(b)], b);
}

}  // namespace
}  // namespace longkv
