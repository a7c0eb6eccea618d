// Attention over fp8 rows, which is integer arithmetic at some levels: every code, edges of rows and channels,
// extremes.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/cpu.h"
#include "base/float16.h"
#include "harness.h"
#include "kv/attend.h"
#include "kv/codec/codec.h"
#include "kv/layout.h"

namespace longkv {
namespace {

using test::Attended;
using test::attention_ref;
using test::AttentionRef;
using test::expect_near_ref;
using test::random_floats;
using test::RandomHead;
using test::run_attend;

constexpr KvType kFp8 = KvType::kFp8;

class Fp8Attention : public test::LevelTest {
 protected:
  static bool integers() { return GetParam() >= IsaLevel::kAvx512Vnni && GetParam() < IsaLevel::kNeon; }
};
INSTANTIATE_TEST_SUITE_P(Isa, Fp8Attention, ::testing::ValuesIn(available_isa_levels()),
                         [](const auto& info) { return isa_name(info.param); });

void set_scale(uint8_t* row, int64_t dim, float scale) {
  const bf16_t bits = to_bf16(scale);
  std::memcpy(row + dim, &bits, sizeof(bits));
}

std::vector<float> scores_of(const KvHeadView& kv, const float* q, int n_q, std::span<const RowRange> ranges,
                             const AttendParams& params, ThreadPool& pool) {
  std::vector<float> scores(size_t(n_q * count_rows(ranges)), NAN);
  attend_scores({q, n_q, kv, ranges, nullptr, nullptr}, params, scores.data(), pool);
  return scores;
}

// Rows around those that are turned over together and tiles, channels around vectors; whole and in pieces, with rows
// behind the last that must not count, and every head with the bits that it has alone.
TEST_P(Fp8Attention, RowsChannelsAndHeadsAroundEdges) {
  ThreadPool pool(2);
  for (int dim : {1, 2, 15, 16, 17, 32, 33, 48, 63, 64, 65, 80, 96, 112, 127, 128, 129, 192, 255, 256, 257, 320}) {
    RandomHead head(kFp8, kFp8, dim, dim, 131, uint32_t(90 + dim));
    const auto q = random_floats(6 * dim, 91);
    const AttendParams params{1.0f / std::sqrt(float(dim)), 0.0f};
    for (int64_t rows : {1, 2, 3, 4, 5, 7, 8, 9, 12, 13, 15, 16, 17, 24, 25, 31, 33, 63, 65, 130}) {
      set_scale(head.k.data() + rows * head.view.k_stride, dim, NAN);
      set_scale(head.v.data() + rows * head.view.v_stride, dim, NAN);
      const RowRange pieces[] = {{0, rows / 3}, {rows / 3, rows / 2}, {rows / 2, rows}}, all{0, rows};
      for (int n_q : {1, 2, 3, 4, 6}) {
        const std::string what = std::to_string(dim) + " channels, rows " + std::to_string(rows);
        const auto a = run_attend(head.view, q.data(), n_q, pieces, params, pool);
        if (n_q == 3 || rows < 10) expect_near_ref(a, q.data(), n_q, head.view, pieces, params, what);
        if (HasFatalFailure()) return;
        EXPECT_EQ(run_attend(head.view, q.data(), n_q, {&all, 1}, params, pool), a) << what;
        const auto last = run_attend(head.view, q.data() + (n_q - 1) * dim, 1, {&all, 1}, params, pool);
        EXPECT_TRUE(std::equal(last.out.begin(), last.out.end(), a.out.end() - dim)) << what;
        EXPECT_EQ(last.lse[0], a.lse.back()) << what;
      }
      set_scale(head.k.data() + rows * head.view.k_stride, dim, 0.01f);
      set_scale(head.v.data() + rows * head.view.v_stride, dim, 0.01f);
    }
  }
}

// Every code in every place of 64 channels, alone: what it is worth as a key and as a value. Those that no encoder
// writes count as the next step would.
TEST_P(Fp8Attention, EveryCode) {
  ThreadPool pool(1);
  constexpr int kDim = 256;
  RandomHead head(kFp8, kFp8, kDim, kDim, kDim, 92);
  const RowRange all{0, kDim};
  for (int turn = 0; turn < 64; ++turn) {
    // Keys: row r has one code, r, among zeros; values: row 0 has all.
    std::fill(head.k.begin(), head.k.end(), uint8_t(0));
    std::vector<float> q(kDim, 1.0f);
    for (int64_t r = 0; r < kDim; ++r) {
      uint8_t* k = head.k.data() + r * head.view.k_stride;
      k[(r + turn) % kDim] = uint8_t(r);
      set_scale(k, kDim, 0.5f);
    }
    for (int64_t c = 0; c < kDim; ++c) head.v[size_t(c)] = uint8_t(c + turn);
    set_scale(head.v.data(), kDim, 2.0f);
    const auto scores = scores_of(head.view, q.data(), 1, {&all, 1}, {1.0f, 0.0f}, pool);
    const RowRange first{0, 1};
    const auto one = run_attend(head.view, q.data(), 1, {&first, 1}, {1.0f, 0.0f}, pool);
    const auto expect = [&](uint8_t code, double got, const char* what) {
      const double value = (code & 0x7f) == 0x7f ? (code & 0x80 ? -480.0 : 480.0) : test::e4m3_value(code);
      // A key's step is 2^-8 of the query's, 64 channels of which a lane sums.
      const double rounding = integers() && std::abs(value) < 0.25 ? 0x1p-6 : 0.0;
      const double step = integers() ? std::abs(value) * 0.501 * 64.0 / 139000.0 : 0.0;
      EXPECT_NEAR(got, value, rounding + step + std::abs(value) * 0x1p-22) << what << int(code);
      EXPECT_TRUE(value != 0.0 || got == 0.0) << what << int(code);
    };
    for (int64_t r = 0; r < kDim; ++r) {
      expect(uint8_t(r), 2.0 * scores[size_t(r)], "key ");
      expect(head.v[size_t(r)], 0.5 * one.out[size_t(r)], "value ");
    }
  }
}

// Sums at the ends of int32: all codes the largest that a byte can hold and of one sign, queries and weights equal, or
// some far larger than others.
TEST_P(Fp8Attention, LargestSums) {
  ThreadPool pool(1);
  for (int dim : {64, 128, 256, 512, 1000}) {
    for (uint8_t code : {0x7f, 0xff}) {
      RandomHead head(kFp8, kFp8, dim, dim, 64, 93);
      for (int64_t r = 0; r < 64; ++r) {
        for (auto* row : {head.k.data() + r * head.view.k_stride, head.v.data() + r * head.view.v_stride}) {
          std::fill(row, row + dim, code);
          set_scale(row, dim, 1.0f / 512.0f);
        }
      }
      const float value = (code == 0xff ? -480.0f : 480.0f) / 512.0f;
      const RowRange all{0, 64};
      for (int every : {1, 2, 3, 16, 17}) {
        std::vector<float> q(size_t(dim), 0.0f);
        double sum = 0.0;
        for (int c = 0; c < dim; c += every) sum += q[size_t(c)] = c % 7 == 0 ? 2.0f : 1.0f;
        for (float s : scores_of(head.view, q.data(), 1, {&all, 1}, {1.0f, 0.0f}, pool)) {
          // Steps are at most 1/139000 of a lane's sum, which has up to 64 channels.
          ASSERT_NEAR(s, sum * value, sum * 64 * 2.0 / 139000.0) << dim;
        }
      }
      const std::vector<float> q(size_t(dim), 1.0f);
      for (float o : run_attend(head.view, q.data(), 1, {&all, 1}, {1.0f, 0.0f}, pool).out) {
        ASSERT_NEAR(o, value, 32.0 / 139000.0 + 1e-6) << dim;
      }
    }
  }
}

// Rows and queries of any magnitude; one channel far above the others in rows and queries.
TEST_P(Fp8Attention, MagnitudesAndOutliers) {
  ThreadPool pool(1);
  constexpr int kDim = 96, kHeads = 3;
  const RowRange ranges[] = {{0, 50}, {60, 200}};
  for (float magnitude : {1e-25f, 1e-8f, 1.0f, 1e8f, 1e28f}) {
    if (magnitude > 1e8f && !integers()) continue;  // there scales are multiplied by 2^88
    for (bool outlier : {false, true}) {
      RandomHead head(kFp8, kFp8, kDim, kDim, 200, 94);
      auto x = random_floats(200 * kDim, 95, magnitude);
      for (int64_t r = 0; outlier && r < 200; ++r) x[size_t(r * kDim + 37)] *= 300.0f;
      encode_rows(kFp8, x.data(), kDim, 200, kDim, head.k.data(), head.view.k_stride);
      for (float& v : x) v *= 2.0f;
      encode_rows(kFp8, x.data(), kDim, 200, kDim, head.v.data(), head.view.v_stride);
      auto q = random_floats(kHeads * kDim, 96, std::min(1.0f / magnitude, 1e15f));
      for (int h = 0; outlier && h < kHeads; ++h) q[size_t(h * kDim + 11)] *= 100.0f;
      const AttendParams params{0.01f, outlier ? 30.0f : 0.0f};
      const std::string what = std::to_string(magnitude) + (outlier ? " outliers" : "");
      expect_near_ref(run_attend(head.view, q.data(), kHeads, ranges, params, pool), q.data(), kHeads, head.view,
                      ranges, params, what);
      const auto scores = scores_of(head.view, q.data(), kHeads, ranges, params, pool);
      for (int h = 0; h < kHeads; ++h) {
        const AttentionRef ref = attention_ref(q.data() + h * kDim, head.view, ranges, params);
        for (size_t r = 0; r < ref.scores.size(); ++r) {
          ASSERT_NEAR(scores[size_t(h) * ref.scores.size() + r], ref.scores[r], ref.score_tolerance) << what;
        }
      }
    }
  }
}

// Logits of merged rows have a bias; here some rows have one, and one row's takes it out.
TEST_P(Fp8Attention, Biases) {
  ThreadPool pool(2);
  constexpr int kDim = 64, kHeads = 5;
  RandomHead head(kFp8, kFp8, kDim, kDim, 700, 97);
  auto bias = random_floats(700, 98);
  for (size_t r = 0; r < 700; r += 3) bias[r] = 0.0f;
  bias[333] = -1e4f;
  head.view.bias = bias.data();
  const auto q = random_floats(kHeads * kDim, 99);
  const RowRange ranges[] = {{3, 70}, {71, 72}, {90, 700}};
  const AttendParams params{0.125f, 0.0f};
  expect_near_ref(run_attend(head.view, q.data(), kHeads, ranges, params, pool), q.data(), kHeads, head.view, ranges,
                  params, "bias");
}

// A channel of a query, or a scale, that is not finite, among those that are: a key's reaches the sum of all, a value's
// every channel.
TEST_P(Fp8Attention, NanIsSeen) {
  ThreadPool pool(1);
  const RowRange all{0, 150};
  for (int dim : {20, 64, 128, 320}) {
    for (int c : {3, dim - 1}) {
      const RandomHead head(kFp8, kFp8, dim, dim, 150, 101);
      auto q = random_floats(2 * dim, 100);
      q[size_t(c)] = NAN;
      const auto a = run_attend(head.view, q.data(), 2, {&all, 1}, {0.1f, 0.0f}, pool);
      EXPECT_TRUE(std::isnan(a.lse[0])) << dim << " " << c;
      EXPECT_TRUE(std::isfinite(a.lse[1])) << dim << " " << c;
    }
    for (float bad : {NAN, std::numeric_limits<float>::infinity()}) {
      for (int64_t at : {0, 70, 149}) {
        const auto q = random_floats(2 * dim, 100);
        RandomHead keys(kFp8, kFp8, dim, dim, 150, 101), values = keys;
        values.view.k = values.k.data();
        values.view.v = values.v.data();
        set_scale(keys.k.data() + at * keys.view.k_stride, dim, NAN);  // infinity may be a score of no weight
        EXPECT_TRUE(std::isnan(run_attend(keys.view, q.data(), 2, {&all, 1}, {0.1f, 0.0f}, pool).lse[1])) << at;
        set_scale(values.v.data() + at * values.view.v_stride, dim, bad);
        const auto a = run_attend(values.view, q.data(), 2, {&all, 1}, {0.1f, 0.0f}, pool);
        EXPECT_TRUE(std::isfinite(a.lse[0]));
        for (float o : a.out) EXPECT_FALSE(std::isfinite(o)) << dim << " " << at;
      }
    }
  }
}

TEST_P(Fp8Attention, SameBitsForAnyThreads) {
  constexpr int kDim = 80, kHeads = 5;
  const RandomHead head(kFp8, kFp8, kDim, kDim, 9001, 102);
  const auto q = random_floats(kHeads * kDim, 103);
  const RowRange all{0, 9001};
  ThreadPool one(1);
  const auto expected = run_attend(head.view, q.data(), kHeads, {&all, 1}, {0.125f, 0.0f}, one);
  expect_near_ref(expected, q.data(), kHeads, head.view, {&all, 1}, {0.125f, 0.0f}, "one thread");
  for (int threads = 2; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    EXPECT_EQ(run_attend(head.view, q.data(), kHeads, {&all, 1}, {0.125f, 0.0f}, pool), expected) << threads;
  }
}

}  // namespace
}  // namespace longkv
