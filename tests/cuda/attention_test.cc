#include <algorithm>
#include <cmath>
#include <functional>

#include "cuda/tokens.h"

namespace longkv {
namespace {

TEST(CardAttention, StoredRowsAndTheirDecoding) {
  LONGKV_NEED_CARD();
  for (RopePairs pairs : {RopePairs::kHalves, RopePairs::kAdjacent}) {
    for (KvType type : kRowTypes) {
      const Shape s{type, 2, 2, 96, 64};
      const Tokens t = make_tokens(s, 37, 3, pairs, 64);
      const OnCard memory(card::card_kv_bytes(KvType::kF16, s.kv_heads, s.dim, s.capacity));
      const CardKv work = card::place_kv(KvType::kF16, s.kv_heads, s.dim, s.capacity, memory.data());
      ASSERT_DONE(card::decode_rows(t.kv, 0, 37, work, nullptr));
      const auto rows = memory.read<uint16_t>(2 * s.kv_heads * s.capacity * s.dim);
      for (int h = 0; h < 2 * s.kv_heads; ++h) {
        for (int64_t r = 0; r < 37; ++r) {
          const double* want = t.row(r, s.heads + h);
          double top = 0;
          for (int i = 0; i < s.dim; ++i) top = std::max(top, std::abs(want[i]));
          for (int i = 0; i < s.dim; ++i) {
            ASSERT_NEAR(test::half_float(rows[size_t((h * s.capacity + r) * s.dim + i)]), want[i],
                        storing_error(type, want[i], top))
                << kv_type_name(type);
          }
        }
      }
    }
  }
}

TEST(CardAttention, OneTokenOverEveryShapeAndLength) {
  LONGKV_NEED_CARD();
  struct Case {
    int heads, kv_heads, dim;
    int64_t rows, window;
    double cap;
  };
  const Case cases[] = {{4, 2, 64, 1, 0, 0},      {4, 2, 64, 15, 0, 0},      {8, 2, 128, 16, 0, 0},
                        {8, 2, 128, 17, 0, 0},    {32, 8, 128, 1000, 0, 0},  {6, 6, 96, 333, 0, 30},
                        {4, 1, 256, 700, 512, 0}, {14, 2, 64, 2049, 100, 0}, {20, 1, 64, 129, 0, 0},
                        {9, 3, 64, 4097, 0, 0}};
  for (KvType type : kRowTypes) {
    for (const Case& c : cases) {
      for (int splits : {1, 5, 33}) {
        SCOPED_TRACE(testing::Message() << kv_type_name(type) << ' ' << c.heads << '/' << c.kv_heads << " x " << c.dim
                                        << ", " << c.rows << " rows, " << splits << " splits");
        const Shape s{type, c.heads, c.kv_heads, c.dim, (c.rows + 31) / 16 * 16};
        Tokens t = make_tokens(s, c.rows, 11);
        if (!card::attended_in_place(type)) use_stored_rows(t);
        const auto scale = float(1 / std::sqrt(double(c.dim)));
        const card::AttendArgs a{
            t.q.as<card::half_t>() + (c.rows - 1) * c.heads * c.dim, c.heads, t.kv, scale, float(c.cap), c.window};
        const auto got = OneToken(c.heads, c.dim, splits).attend(a, c.rows - 1);
        for (int h = 0; h < c.heads; ++h)
          expect_near(attention_of(t, c.rows - 1, h, scale, c.cap, c.window), &got[size_t(h * c.dim)], tolerance(type));
      }
    }
  }
}

// Rows of K (first) and V of one head, [2][n][dim], as their codes and scales say.
std::vector<double> exact_rows(const Tokens& t, int kv_head) {
  const CardKv& kv = t.kv;
  const int bytes = card::value_bytes(kv.type, kv.dim), scales = card::scale_count(kv.type, kv.dim);
  const auto all = t.kv_memory.read<uint8_t>(card::card_kv_bytes(kv.type, kv.kv_heads, kv.dim, kv.capacity));
  std::vector<double> rows;
  for (const bool key : {true, false}) {
    for (int64_t r = 0; r < t.n; ++r) {
      const int64_t row = kv_head * kv.capacity + r;
      const uint8_t* values = &all[size_t((key ? kv.k : kv.v) - t.kv_memory.data() + row * bytes)];
      const auto* scale = reinterpret_cast<const uint16_t*>(&all[size_t(
          reinterpret_cast<uint8_t*>(key ? kv.k_scale : kv.v_scale) - t.kv_memory.data() + row * scales * 2)]);
      for (int i = 0; i < kv.dim; ++i) {
        int code = int8_t(values[i]);
        if (kv.type == KvType::kQ4_0) {
          uint32_t word = 0;
          std::memcpy(&word, values + i / 8 * 4, 4);
          code = int(word >> (i % 8 / 2 * 4 + i % 2 * 16) & 15) - 8;
        }
        rows.push_back(double(test::half_float(scale[i / 32])) * code);
      }
    }
  }
  return rows;
}

// Values so small that products of weights and scales could leave the normal halves, of many rows that share the mass.
// A weight, and its product with a scale, are off by half a unit of a half's last place, 2^-12 of a value on average,
// each on its own; what rows have in common, by little more than fp32 sums are.
TEST(CardAttention, SmallValuesOfManyRows) {
  LONGKV_NEED_CARD();
  struct Case {
    int heads, kv_heads, dim, splits;
    float of_values, mean;
  };
  const Case cases[] = {{5, 1, 128, 1, 0.02f, 0.0f}, {6, 2, 64, 1, 0.02f, 1.0f},  {7, 1, 256, 1, 0.02f, 0.0f},
                        {9, 1, 128, 1, 1e-4f, 1.0f}, {3, 1, 128, 17, 3e3f, 1.0f}, {3, 1, 64, 1, 0.02f, 3.0f}};
  for (KvType type : {KvType::kQ8_0, KvType::kQ4_0}) {
    double worst = 0;
    for (const Case& c : cases) {
      SCOPED_TRACE(testing::Message() << kv_type_name(type) << ' ' << c.heads << '/' << c.kv_heads << " x " << c.dim
                                      << ", values of " << c.of_values);
      constexpr int64_t kRows = 20000;
      const Shape s{type, c.heads, c.kv_heads, c.dim, kRows + 16};
      // Every 4000th row has values a hundred times larger where they are small enough.
      const Tokens t = make_tokens(s, kRows, 31, RopePairs::kHalves, 0, [&](int64_t r, float v) {
        return (v + c.mean) * c.of_values * (r % 4000 == 3999 && c.of_values < 1.0f ? 100.0f : 1.0f);
      });
      const auto scale = float(1 / std::sqrt(double(c.dim)));
      const card::AttendArgs a{t.q.as<card::half_t>() + (kRows - 1) * c.heads * c.dim, c.heads, t.kv, scale, 0.0f, 0};
      const auto got = OneToken(c.heads, c.dim, c.splits).attend(a, kRows - 1);
      const auto queries = t.q.read<uint16_t>(kRows * c.heads * c.dim);
      for (int h = 0; h < c.heads; ++h) {
        if (h % 2 == 1 && h + 1 < c.heads) continue;
        const std::vector<double> rows = exact_rows(t, h / (c.heads / c.kv_heads));
        std::vector<double> weight, want(size_t(c.dim));
        double top = -1e300, sum = 0, squares = 0, error = 0, norm = 0;
        for (int64_t r = 0; r < kRows; ++r) {
          double dot = 0;
          for (int i = 0; i < c.dim; ++i)
            dot += test::half_float(queries[size_t(((kRows - 1) * c.heads + h) * c.dim + i)]) *
                   rows[size_t(r * c.dim + i)];
          weight.push_back(dot * scale);
          top = std::max(top, weight.back());
        }
        for (double& w : weight) sum += w = std::exp(w - top);
        for (int64_t r = 0; r < kRows; ++r) {
          const double w = weight[size_t(r)] / sum;
          for (int i = 0; i < c.dim; ++i) {
            const double x = w * rows[size_t((kRows + r) * c.dim + i)];
            want[size_t(i)] += x, squares += x * x;
          }
        }
        for (int i = 0; i < c.dim; ++i) {
          const double have = got[size_t(h * c.dim + i)];
          ASSERT_TRUE(std::isfinite(have));
          error += (have - want[size_t(i)]) * (have - want[size_t(i)]), norm += want[size_t(i)] * want[size_t(i)];
        }
        const double part = std::sqrt(error) / (0x1p-10 * std::sqrt(squares) + 0x1p-14 * std::sqrt(norm));
        EXPECT_LE(part, 1.0) << "head " << h;
        worst = std::max(worst, part);
      }
    }
    std::printf("  %s: largest error %.2f of what is allowed\n", kv_type_name(type), worst);
  }
}

// A query that is no number gives an answer that is none, and no other head's.
TEST(CardAttention, NotANumberStaysSo) {
  LONGKV_NEED_CARD();
  for (KvType type : kRowTypes) {
    for (int splits : {1, 5, 70}) {
      SCOPED_TRACE(testing::Message() << kv_type_name(type) << ", " << splits << " splits");
      constexpr int64_t kRows = 100;
      const Shape s{type, 6, 2, 64, 112};
      const Tokens t = make_tokens(s, kRows, 31);
      const int64_t first = (kRows - 1) * s.heads * s.dim;
      auto queries = t.q.read<uint16_t>(kRows * s.heads * s.dim);
      queries[size_t(first + s.dim + 3)] = 0x7fff;  // of head 1, in either type of halves
      const OnCard q = OnCard::of(queries);
      const card::AttendArgs a{q.as<card::half_t>() + first, s.heads, t.kv, 0.125f, 0.0f, 0};
      const auto got = OneToken(s.heads, s.dim, splits).attend(a, kRows - 1);
      for (int i = 0; i < s.heads * s.dim; ++i) ASSERT_EQ(std::isnan(got[size_t(i)]), i / s.dim == 1) << i;
    }
  }
}

// Beyond 2^31 values and, in bytes, beyond 2^32: the last rows of the last head, through a window and through tiles.
TEST(CardAttention, IndicesBeyond32Bits) {
  LONGKV_NEED_CARD();
  constexpr int64_t kRows = 2200000, kWindow = 200;
  const Shape s{KvType::kF16, 16, 8, 128, kRows};
  size_t free = 0, total = 0;
  OnCard::check(cudaMemGetInfo(&free, &total));
  const int64_t bytes = card::card_kv_bytes(s.type, s.kv_heads, s.dim, s.capacity);
  if (int64_t(free) < bytes + (int64_t(1) << 30)) GTEST_SKIP() << "the card has too little free memory";
  ASSERT_GT(s.kv_heads * s.capacity * s.dim, int64_t(1) << 31);
  const OnCard memory(bytes);
  const CardKv kv = card::place_kv(s.type, s.kv_heads, s.dim, s.capacity, memory.data());
  ASSERT_DONE(card::fill_rows(kv, kRows, 77, nullptr));
  OnCard::check(cudaDeviceSynchronize());
  const auto queries = test::to_halves(test::normal_floats(s.heads * s.dim, 4));
  const OnCard q = OnCard::of(queries);
  const OneToken token(s.heads, s.dim, 3);
  std::vector<int32_t> tiles, counts(size_t(s.kv_heads), 0);
  const int64_t first = kRows - kWindow, stride = 32;
  for (int h = 0; h < s.kv_heads; ++h) {
    const size_t begin = tiles.size();
    for (int64_t r = first; r < kRows; r = std::min(kRows, (r / 16 + 1) * 16)) {
      tiles.push_back(int32_t(r));
      tiles.push_back(int32_t(std::min(kRows, (r / 16 + 1) * 16) - r));
    }
    counts[size_t(h)] = int32_t((tiles.size() - begin) / 2);
    tiles.resize(begin + size_t(stride) * 2);
  }
  const OnCard list = OnCard::of(tiles), count = OnCard::of(counts);
  for (const bool listed : {false, true}) {
    const card::AttendArgs a{q.as<card::half_t>(), s.heads, kv, 0.1f, 0.0f, listed ? 0 : kWindow};
    card::TileList chosen;
    if (listed) chosen = {list.as<int32_t>(), count.as<int32_t>(), stride};
    const auto got = token.attend(a, kRows - 1, chosen);
    for (const int head : {0, s.heads - 1}) {
      std::vector<uint16_t> k(size_t(kWindow * s.dim)), v(k.size());
      const int64_t from = (head / 2 * kRows + first) * s.dim * 2;
      OnCard::check(cudaMemcpy(k.data(), kv.k + from, k.size() * 2, cudaMemcpyDeviceToHost));
      OnCard::check(cudaMemcpy(v.data(), kv.v + from, v.size() * 2, cudaMemcpyDeviceToHost));
      std::vector<double> weight, want(size_t(s.dim));
      double top = -1e300, sum = 0;
      for (int64_t r = 0; r < kWindow; ++r) {
        double dot = 0;
        for (int i = 0; i < s.dim; ++i)
          dot += test::half_float(k[size_t(r * s.dim + i)]) * test::half_float(queries[size_t(head * s.dim + i)]);
        weight.push_back(dot * 0.1);
        top = std::max(top, weight.back());
      }
      for (double& w : weight) sum += w = std::exp(w - top);
      for (int64_t r = 0; r < kWindow; ++r)
        for (int i = 0; i < s.dim; ++i)
          want[size_t(i)] += weight[size_t(r)] / sum * test::half_float(v[size_t(r * s.dim + i)]);
      expect_near(want, &got[size_t(head * s.dim)], tolerance(s.type));
    }
  }
}

TEST(CardAttention, PromptsInChunks) {
  LONGKV_NEED_CARD();
  struct Case {
    int heads, kv_heads, dim;
    int64_t rows, first, window;
    double cap;
  };
  const Case cases[] = {{4, 2, 64, 1, 0, 0, 0},       {4, 2, 64, 200, 0, 0, 0},     {8, 2, 128, 129, 0, 0, 0},
                        {8, 2, 128, 300, 171, 0, 0},  {6, 6, 96, 333, 64, 0, 30},   {4, 1, 256, 210, 0, 0, 0},
                        {4, 1, 256, 300, 100, 64, 0}, {4, 2, 128, 500, 250, 70, 0}, {3, 3, 64, 1025, 1000, 0, 0}};
  for (KvType type : {KvType::kF16, KvType::kBf16}) {
    for (const Case& c : cases) {
      SCOPED_TRACE(testing::Message() << kv_type_name(type) << ' ' << c.heads << '/' << c.kv_heads << " x " << c.dim
                                      << ", " << c.rows << " rows from " << c.first << ", window " << c.window);
      const Shape s{type, c.heads, c.kv_heads, c.dim, (c.rows + 31) / 16 * 16};
      const Tokens t = make_tokens(s, c.rows, 17);
      const int64_t n = c.rows - c.first;
      const OnCard out(n * c.heads * c.dim * 2);
      const auto scale = float(1 / std::sqrt(double(c.dim)));
      const card::AttendArgs a{
          t.q.as<card::half_t>() + c.first * c.heads * c.dim, c.heads, t.kv, scale, float(c.cap), c.window};
      ASSERT_DONE(card::attend_prompt(a, c.first, n, out.as<card::half_t>(), nullptr));
      const auto halves = out.read<uint16_t>(n * c.heads * c.dim);
      std::vector<float> got;
      for (uint16_t h : halves) got.push_back(test::half_float(h));
      for (int64_t p = 0; p<n; p += n> 64 ? 7 : 1) {
        for (int h = 0; h < c.heads; ++h)
          expect_near(attention_of(t, c.first + p, h, scale, c.cap, c.window), &got[size_t((p * c.heads + h) * c.dim)],
                      tolerance(type));
      }
    }
  }
}

}  // namespace
}  // namespace longkv
