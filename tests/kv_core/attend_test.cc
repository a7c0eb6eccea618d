#include "kv/attend.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/cpu.h"
#include "base/virtual_array.h"
#include "harness.h"
#include "kv/attend_kernel.h"
#include "kv/codec/codec.h"
#include "kv/layout.h"

namespace longkv {
namespace {

using test::attention_ref;
using test::AttentionRef;
using test::kAllKvTypes;
using test::random_floats;
using test::RandomHead;

constexpr float kInf = std::numeric_limits<float>::infinity();

using test::Attended;
using test::expect_near_ref;
using test::run_attend;

class EachLevel : public test::LevelTest {};
INSTANTIATE_TEST_SUITE_P(Isa, EachLevel, ::testing::ValuesIn(available_isa_levels()),
                         [](const auto& info) { return isa_name(info.param); });

TEST_P(EachLevel, RowsAroundTileAndChunkEdges) {
  ThreadPool pool(2);
  constexpr int kHeads = 3;
  const RandomHead head(KvType::kF16, KvType::kF16, 64, 64, 300, 1);
  const auto q = random_floats(kHeads * 64, 2);
  const AttendParams params{0.125f, 0.0f};
  for (int64_t rows = 0; rows <= 300; ++rows) {
    const RowRange all{0, rows};
    const auto a = run_attend(head.view, q.data(), kHeads, {&all, 1}, params, pool);
    expect_near_ref(a, q.data(), kHeads, head.view, {&all, 1}, params, "rows " + std::to_string(rows));
    if (HasFatalFailure()) return;
  }
}

TEST_P(EachLevel, EveryPairOfTypes) {
  ThreadPool pool(2);
  for (KvType k : kAllKvTypes) {
    for (KvType v : kAllKvTypes) {
      for (int n_q : {1, 3, 4}) {
        const RandomHead head(k, v, 64, 96, 333, 3);
        const auto q = random_floats(n_q * 64, 4);
        const RowRange ranges[] = {{1, 40}, {41, 43}, {100, 333}};
        const AttendParams params{0.125f, n_q == 3 ? 20.0f : 0.0f};
        const auto a = run_attend(head.view, q.data(), n_q, ranges, params, pool);
        expect_near_ref(a, q.data(), n_q, head.view, ranges, params,
                        std::string(kv_type_name(k)) + "/" + kv_type_name(v) + " heads " + std::to_string(n_q));
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(EachLevel, ChannelsAndHeads) {
  ThreadPool pool(2);
  for (int dim : {1, 7, 16, 20, 32, 40, 64, 80, 96, 112, 128, 192, 256, 576, 1024}) {
    for (int n_q = 1; n_q <= 9; ++n_q) {
      for (KvType type : kAllKvTypes) {
        if (kv_type_quantized(type) && dim % 32 != 0) continue;
        const int64_t rows = 75;
        const RandomHead head(type, type, dim, dim, rows, uint32_t(5 + dim));
        const auto q = random_floats(n_q * dim, 6);
        const RowRange all{0, rows};
        const AttendParams params{1.0f / std::sqrt(float(dim)), 0.0f};
        const auto a = run_attend(head.view, q.data(), n_q, {&all, 1}, params, pool);
        expect_near_ref(a, q.data(), n_q, head.view, {&all, 1}, params,
                        std::string(kv_type_name(type)) + " dim " + std::to_string(dim) + " of " + std::to_string(n_q));
        if (HasFatalFailure()) return;
      }
    }
  }
}

// Keys of few channels, as masks leave them, beside whole values: rows around the sixteen that are turned over together
// and around tiles, whole and in pieces, and every number of heads with the bits of each head alone.
TEST_P(EachLevel, KeysOfFewChannels) {
  ThreadPool pool(2);
  const AttendParams params{0.2f, 0.0f};
  for (int dim : {8, 16, 24, 32, 48}) {
    const RandomHead head(KvType::kF16, KvType::kF16, dim, 64, 700, uint32_t(70 + dim));
    const auto q = random_floats(6 * dim, 71);
    for (int64_t rows : {1, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200, 700}) {
      const RowRange pieces[] = {{0, rows / 3}, {rows / 3, rows / 2}, {rows / 2, rows}};
      for (int n_q : {1, 2, 3, 4, 6}) {
        const std::string what = std::to_string(dim) + " channels, rows " + std::to_string(rows);
        const auto a = run_attend(head.view, q.data(), n_q, pieces, params, pool);
        expect_near_ref(a, q.data(), n_q, head.view, pieces, params, what);
        if (HasFatalFailure()) return;
        const RowRange all{0, rows};
        EXPECT_EQ(run_attend(head.view, q.data(), n_q, {&all, 1}, params, pool), a) << what;
        const auto last = run_attend(head.view, q.data() + (n_q - 1) * dim, 1, {&all, 1}, params, pool);
        EXPECT_TRUE(std::equal(last.out.begin(), last.out.end(), a.out.end() - 64)) << what;
        EXPECT_EQ(last.lse[0], a.lse.back()) << what;
      }
    }
  }
}

// Units of unequal rows share threads by bytes; the bits are those of each unit alone, with empty ranges between too.
TEST_P(EachLevel, UnequalUnitsSameBits) {
  const AttendParams params{0.125f, 0.0f};
  const RandomHead narrow(KvType::kF16, KvType::kF16, 16, 64, 9000, 80),
      wide(KvType::kF16, KvType::kF16, 64, 64, 9000, 81);
  const auto q = random_floats(3 * 64, 82);
  const RowRange ranges[] = {{0, 0}, {0, 100}, {100, 100}, {101, 102}, {500, 8999}, {9000, 9000}};
  ThreadPool one(1);
  const auto a = run_attend(narrow.view, q.data(), 3, ranges, params, one);
  const auto b = run_attend(wide.view, q.data(), 3, ranges, params, one);
  expect_near_ref(a, q.data(), 3, narrow.view, ranges, params, "narrow");
  expect_near_ref(b, q.data(), 3, wide.view, ranges, params, "wide");
  for (int threads = 1; threads <= 5; ++threads) {
    ThreadPool pool(threads);
    Attended x = a, y = b;
    std::fill(x.out.begin(), x.out.end(), NAN);
    std::fill(y.out.begin(), y.out.end(), NAN);
    const AttendUnit units[] = {{q.data(), 3, narrow.view, ranges, x.out.data(), x.lse.data()},
                                {q.data(), 3, wide.view, ranges, y.out.data(), y.lse.data()}};
    AttendScratch scratch;
    attend(units, params, scratch, pool);
    EXPECT_EQ(x, a) << threads;
    EXPECT_EQ(y, b) << threads;
  }
}

// Long enough for several chunks, tasks and threads.
TEST_P(EachLevel, SameBitsForAnyThreadsRangesAndGroups) {
  constexpr int kDim = 64, kHeads = 5;
  constexpr int64_t kRows = 9001;
  const RandomHead head(KvType::kF16, KvType::kQ8_0, kDim, kDim, kRows, 7);
  const auto q = random_floats(kHeads * kDim, 8);
  const AttendParams params{0.125f, 0.0f};
  const RowRange all{0, kRows};
  ThreadPool one(1);
  const auto expected = run_attend(head.view, q.data(), kHeads, {&all, 1}, params, one);
  expect_near_ref(expected, q.data(), kHeads, head.view, {&all, 1}, params, "one thread");
  std::vector<RowRange> blocks, ragged;
  for (int64_t b = 0; b < blocks_for(kRows, 16); ++b) blocks.push_back(rows_of(b, 16, kRows));
  std::mt19937 engine(9);
  for (int64_t row = 0; row < kRows;) {
    const int64_t end = std::min(kRows, row + 1 + int64_t(engine() % 200));
    ragged.push_back({row, end});
    row = end;
  }
  for (int threads = 1; threads <= 4; ++threads) {
    ThreadPool pool(threads);
    EXPECT_EQ(run_attend(head.view, q.data(), kHeads, {&all, 1}, params, pool), expected) << threads << " threads";
    EXPECT_EQ(run_attend(head.view, q.data(), kHeads, blocks, params, pool), expected) << threads << " threads, blocks";
    EXPECT_EQ(run_attend(head.view, q.data(), kHeads, ragged, params, pool), expected) << threads << " threads, ragged";
  }
  for (int h = 0; h < kHeads; ++h) {
    const auto alone = run_attend(head.view, q.data() + h * kDim, 1, {&all, 1}, params, one);
    EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(), expected.out.begin() + h * kDim)) << "head " << h;
    EXPECT_EQ(alone.lse[0], expected.lse[size_t(h)]);
  }
}

// Bits, not tolerances: the integer sums of quantised rows are cut in ranges and heads like those of the others.
TEST_P(EachLevel, QuantizedRowsSameBitsForAnyRangesAndGroups) {
  constexpr int kDim = 96, kHeads = 7;
  constexpr int64_t kRows = 3001;
  ThreadPool pool(2);
  for (KvType type : {KvType::kQ8_0, KvType::kQ4_0, KvType::kFp8}) {
    const RandomHead head(type, type, kDim, kDim, kRows, 60);
    const auto q = random_floats(kHeads * kDim, 61);
    const AttendParams params{0.1f, 0.0f};
    const RowRange all{0, kRows};
    const RowRange cut[] = {{0, 1}, {1, 77}, {77, 1000}, {1000, 2999}, {2999, kRows}};
    const auto expected = run_attend(head.view, q.data(), kHeads, {&all, 1}, params, pool);
    EXPECT_EQ(run_attend(head.view, q.data(), kHeads, cut, params, pool), expected) << kv_type_name(type);
    for (int h = 0; h < kHeads; ++h) {
      const auto alone = run_attend(head.view, q.data() + h * kDim, 1, {&all, 1}, params, pool);
      EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(), expected.out.begin() + h * kDim)) << "head " << h;
      EXPECT_EQ(alone.lse[0], expected.lse[size_t(h)]);
    }
  }
}

// Values and queries that are not finite, or vanish, must not hide behind integers.
TEST_P(EachLevel, QuantizedRowsCarryNanAndZero) {
  ThreadPool pool(2);
  const AttendParams params{0.125f, 0.0f};
  const RowRange all{0, 100};
  for (KvType type : {KvType::kQ8_0, KvType::kQ4_0, KvType::kFp8}) {
    RandomHead head(type, type, 64, 64, 100, 62);
    const auto q = random_floats(64, 63);
    auto bad_q = q;
    bad_q[40] = NAN;
    EXPECT_TRUE(std::isnan(run_attend(head.view, bad_q.data(), 1, {&all, 1}, params, pool).lse[0]));
    const std::vector<float> zero(64, 0.0f);
    const auto flat = run_attend(head.view, zero.data(), 1, {&all, 1}, params, pool);
    expect_near_ref(flat, zero.data(), 1, head.view, {&all, 1}, params, "zero query");
    auto row = random_floats(64, 64);
    row[3] = kInf;
    encode_row(type, row.data(), 64, head.v.data() + 70 * head.view.v_stride);
    const auto poisoned = run_attend(head.view, q.data(), 1, {&all, 1}, params, pool);
    EXPECT_TRUE(std::isfinite(poisoned.lse[0]));
    for (size_t c = 0; c < 64; ++c) {
      EXPECT_EQ(std::isnan(poisoned.out[c]), c < 32 || type == KvType::kFp8) << kv_type_name(type) << c;
    }
    for (int64_t r = 0; r < 100; ++r) encode_row(type, zero.data(), 64, head.v.data() + r * head.view.v_stride);
    for (float o : run_attend(head.view, q.data(), 1, {&all, 1}, params, pool).out) EXPECT_EQ(o, 0.0f);
  }
}

TEST_P(EachLevel, UnitsDoNotTouchEachOther) {
  ThreadPool pool(3);
  const AttendParams params{0.125f, 0.0f};
  std::vector<RandomHead> heads;
  for (uint32_t i = 0; i < 4; ++i) heads.emplace_back(KvType::kF16, KvType::kF16, 64, 64, 2500, 20 + i);
  const auto q = random_floats(4 * 2 * 64, 30);
  const std::vector<RowRange> ranges[] = {{{0, 2500}}, {}, {{5, 6}}, {{0, 16}, {400, 1400}, {2484, 2500}}};
  std::vector<float> out(4 * 2 * 64), lse(4 * 2);
  std::vector<AttendUnit> units;
  for (size_t i = 0; i < 4; ++i) {
    units.push_back({q.data() + i * 128, 2, heads[i].view, ranges[i], out.data() + i * 128, lse.data() + i * 2});
  }
  AttendScratch scratch;
  for (int round = 0; round < 3; ++round) {  // a used scratch must not change anything
    std::fill(out.begin(), out.end(), NAN);
    attend(units, params, scratch, pool);
    for (size_t i = 0; i < 4; ++i) {
      const auto alone = run_attend(heads[i].view, units[i].q, 2, ranges[i], params, pool);
      EXPECT_TRUE(std::equal(alone.out.begin(), alone.out.end(), units[i].out)) << "unit " << i;
      EXPECT_TRUE(std::equal(alone.lse.begin(), alone.lse.end(), units[i].lse)) << "unit " << i;
    }
  }
}

TEST_P(EachLevel, ExpIsAccurate) {
  std::vector<float> x, y;
  for (float v = 0.0f; v > -90.0f; v -= 0.00317f) x.push_back(v);
  x.insert(x.end(), {-1e-30f, -1e4f, -kInf, NAN});
  y.resize(x.size());
  exp_nonpositive(x.data(), y.data(), int64_t(x.size()));
  for (size_t i = 0; i + 1 < x.size(); ++i) {
    const double expected = x[i] < -87.33f ? 0.0 : std::exp(double(x[i]));
    ASSERT_NEAR(y[i], expected, expected * 0x1p-22) << x[i];
  }
  EXPECT_TRUE(std::isnan(y.back()));
}

TEST_P(EachLevel, LargeScoresDoNotOverflow) {
  ThreadPool pool(2);
  for (float scale : {30.0f, 400.0f, 2000.0f}) {
    const RandomHead head(KvType::kF32, KvType::kF32, 64, 64, 700, 40);
    const auto q = random_floats(64, 41);
    const RowRange all{0, 700};
    const AttendParams params{scale, 0.0f};
    const auto a = run_attend(head.view, q.data(), 1, {&all, 1}, params, pool);
    expect_near_ref(a, q.data(), 1, head.view, {&all, 1}, params, "scale " + std::to_string(scale));
  }
}

// All scores far below zero, and a log-sum-exp of exactly zero: neither may be taken for "no rows".
TEST_P(EachLevel, LowScoresAndZeroLseAreNotEmpty) {
  ThreadPool pool(2);
  RandomHead head(KvType::kF32, KvType::kF32, 64, 64, 200, 42);
  std::vector<float> key(64, 0.0f);
  for (float score : {-5000.0f, 0.0f}) {
    key[0] = score;
    for (int64_t r = 0; r < 200; ++r) encode_row(KvType::kF32, key.data(), 64, head.k.data() + r * head.view.k_stride);
    std::vector<float> q(64, 0.0f);
    q[0] = 1.0f;
    const RowRange all{0, 200}, one{3, 4};
    const AttendParams params{1.0f, 0.0f};
    expect_near_ref(run_attend(head.view, q.data(), 1, {&all, 1}, params, pool), q.data(), 1, head.view, {&all, 1},
                    params, "score " + std::to_string(score));
    const auto single = run_attend(head.view, q.data(), 1, {&one, 1}, params, pool);
    EXPECT_EQ(single.lse[0], score);
    const auto v = test::decode_row_ref(KvType::kF32, head.view.v + 3 * head.view.v_stride, 64);
    for (int c = 0; c < 64; ++c) EXPECT_FLOAT_EQ(single.out[size_t(c)], float(v[size_t(c)]));
  }
}

TEST_P(EachLevel, InfiniteAndNanScores) {
  ThreadPool pool(2);
  RandomHead head(KvType::kF32, KvType::kF32, 64, 64, 300, 43);
  const auto q = std::vector<float>(64, 1.0f);
  const RowRange all{0, 300};
  const AttendParams params{1.0f, 0.0f};
  const auto set_key = [&](int64_t row, float value) {
    std::vector<float> key(64, 0.0f);
    key[5] = value;
    encode_row(KvType::kF32, key.data(), 64, head.k.data() + row * head.view.k_stride);
  };
  set_key(130, -kInf);  // no weight
  const RowRange without[] = {{0, 130}, {131, 300}};
  const auto a = run_attend(head.view, q.data(), 1, {&all, 1}, params, pool);
  expect_near_ref(a, q.data(), 1, head.view, without, params, "-inf score");
  for (int64_t r = 0; r < 300; ++r) set_key(r, -kInf);
  const auto none = run_attend(head.view, q.data(), 1, {&all, 1}, params, pool);
  EXPECT_EQ(none.lse[0], -kInf);
  for (float o : none.out) EXPECT_EQ(o, 0.0f);
  for (float bad : {NAN, kInf}) {
    set_key(130, bad);
    const auto b = run_attend(head.view, q.data(), 1, {&all, 1}, params, pool);
    EXPECT_TRUE(std::isnan(b.lse[0])) << bad;
    for (float o : b.out) EXPECT_TRUE(std::isnan(o)) << bad;
  }
}

// Thousands of rows of nearly equal weight: a running output with 11 bits of mantissa (half precision) stops growing or
// loses digits after some hundred rows; the needle's share of the output, about one part in 4000, must survive.
TEST_P(EachLevel, SumsKeepThirtyTwoBits) {
  ThreadPool pool(2);
  constexpr int64_t kRows = 24000;
  constexpr int kDim = 64;
  RandomHead head(KvType::kF16, KvType::kF16, kDim, kDim, kRows, 44, 0.05f);
  std::vector<float> value(kDim);
  for (int64_t r = 0; r < kRows; ++r) {
    for (int c = 0; c < kDim; ++c) value[size_t(c)] = r == 11000 ? (c % 2 == 0 ? 4.0f : -4.0f) : 1.0f;
    encode_row(KvType::kF16, value.data(), kDim, head.v.data() + r * head.view.v_stride);
  }
  const auto q = random_floats(kDim, 45);
  const RowRange all{0, kRows};
  const AttendParams params{0.125f, 0.0f};
  const auto a = run_attend(head.view, q.data(), 1, {&all, 1}, params, pool);
  const AttentionRef ref = attention_ref(q.data(), head.view, {&all, 1}, params);
  double worst = 0.0;
  for (int c = 0; c < kDim; ++c) worst = std::max(worst, std::abs(double(a.out[size_t(c)]) - ref.out[size_t(c)]));
  // A half-precision sum errs by 2^-11 of the output, 1, at best: 5e-4.
  EXPECT_LT(worst, 4e-6);
  EXPECT_GT(a.out[0] - a.out[1], 1.5e-4);  // the needle is there
}

TEST_P(EachLevel, MergedPartialsEqualOneSoftmax) {
  ThreadPool pool(2);
  constexpr int kDim = 80;
  const RandomHead head(KvType::kF16, KvType::kF16, kDim, kDim, 1000, 46);
  const auto q = random_floats(kDim, 47);
  const AttendParams params{0.3f, 0.0f};
  const RowRange parts[] = {{0, 1}, {1, 1}, {1, 500}, {500, 1000}};
  std::vector<float> outs, lses;
  for (const RowRange& part : parts) {
    const auto a = run_attend(head.view, q.data(), 1, {&part, 1}, params, pool);
    outs.insert(outs.end(), a.out.begin(), a.out.end());
    lses.push_back(a.lse[0]);
  }
  EXPECT_EQ(lses[1], -kInf);
  Attended merged;
  merged.out.resize(kDim);
  merged.lse.resize(1);
  merge_partials(outs.data(), lses.data(), 4, kDim, merged.out.data(), merged.lse.data());
  const RowRange all{0, 1000};
  expect_near_ref(merged, q.data(), 1, head.view, {&all, 1}, params, "merged");
  Attended in_place = merged;
  merge_partials(outs.data(), lses.data(), 4, kDim, outs.data(), in_place.lse.data());
  EXPECT_TRUE(std::equal(merged.out.begin(), merged.out.end(), outs.begin()));
}

TEST(MergePartials, EmptyZeroAndLargeLse) {
  const float outs[] = {1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f};
  float out[2], lse;
  const float empty[] = {-kInf, -kInf, -kInf};
  merge_partials(outs, empty, 3, 2, out, &lse);
  EXPECT_EQ(lse, -kInf);
  EXPECT_EQ(out[0], 0.0f);
  merge_partials(outs, empty, 0, 2, out, &lse);
  EXPECT_EQ(lse, -kInf);
  const float zero[] = {-kInf, 0.0f, -kInf};
  merge_partials(outs, zero, 3, 2, out, &lse);
  EXPECT_EQ(lse, 0.0f);
  EXPECT_EQ(out[0], 3.0f);
  const float equal[] = {0.0f, 0.0f, -kInf};
  merge_partials(outs, equal, 3, 2, out, &lse);
  EXPECT_FLOAT_EQ(out[0], 2.0f);
  EXPECT_FLOAT_EQ(lse, std::log(2.0f));
  const float far[] = {-9000.0f, 9000.0f, 0.0f};
  merge_partials(outs, far, 3, 2, out, &lse);
  EXPECT_EQ(lse, 9000.0f);
  EXPECT_EQ(out[1], 4.0f);
  const float nan[] = {0.0f, NAN, 0.0f};
  merge_partials(outs, nan, 3, 2, out, &lse);
  EXPECT_TRUE(std::isnan(lse));
  EXPECT_TRUE(std::isnan(out[0]));
}

TEST_P(EachLevel, ScoresEqualTheReference) {
  ThreadPool pool(2);
  constexpr int kHeads = 6;
  const RowRange ranges[] = {{0, 3}, {10, 150}, {151, 700}};
  for (KvType type : kAllKvTypes) {
    const RandomHead head(type, KvType::kF16, 96, 32, 700, 48);
    const auto q = random_floats(kHeads * 96, 49);
    const AttendParams params{0.1f, 5.0f};
    const int64_t rows = count_rows(ranges);
    std::vector<float> scores(size_t(kHeads * rows), NAN);
    AttendUnit unit{q.data(), kHeads, head.view, ranges, nullptr, nullptr};
    attend_scores(unit, params, scores.data(), pool);
    for (int h = 0; h < kHeads; ++h) {
      const AttentionRef ref = attention_ref(q.data() + h * 96, head.view, ranges, params);
      for (int64_t r = 0; r < rows; ++r) {
        ASSERT_NEAR(scores[size_t(h * rows + r)], ref.scores[size_t(r)], ref.score_tolerance) << h << " " << r;
      }
    }
  }
}

// Channels of a query that are large where keys are zero take nothing from the precision of the others: a query has a
// step for each group of channels where it meets q4_0 keys.
TEST_P(EachLevel, QueriesAreRoundedGroupByGroup) {
  ThreadPool pool(1);
  constexpr int kHeads = 3, kDim = 96, kRows = 40;
  RandomHead head(KvType::kQ4_0, KvType::kF16, kDim, 32, kRows, 50);
  auto keys = random_floats(kRows * kDim, 51);
  for (int64_t i = 0; i < kRows * kDim; ++i) keys[size_t(i)] *= i % kDim < 32 ? 0.0f : 1.0f;
  encode_rows(KvType::kQ4_0, keys.data(), kDim, kRows, kDim, head.k.data(), head.view.k_stride);
  auto q = random_floats(kHeads * kDim, 52);
  for (int64_t i = 0; i < kHeads * kDim; ++i) q[size_t(i)] *= i % kDim < 32 ? 1000.0f : 1.0f;
  const AttendParams params{0.1f, 0.0f};
  const RowRange ranges[] = {{0, kRows}};
  std::vector<float> scores(size_t(kHeads * kRows), NAN);
  attend_scores({q.data(), kHeads, head.view, ranges, nullptr, nullptr}, params, scores.data(), pool);
  for (int h = 0; h < kHeads; ++h) {
    const AttentionRef ref = attention_ref(q.data() + h * kDim, head.view, ranges, params);
    for (int64_t r = 0; r < kRows; ++r) {
      ASSERT_NEAR(scores[size_t(h * kRows + r)], ref.scores[size_t(r)], ref.score_tolerance) << h << " " << r;
    }
  }
}

// Rows whose byte offsets and indexes are beyond 32 bits; only the pages that are read exist.
TEST(Attend, OffsetsAreSixtyFourBit) {
  ThreadPool pool(2);
  const KvType type = KvType::kF16;
  constexpr int kDim = 64;
  constexpr int64_t kFar = (int64_t(1) << 32) + 1234567;  // row index; 128 bytes each: 550 GB of address space
  auto k = VirtualArray::reserve(uint64_t(kFar + 600) * 128);
  auto v = VirtualArray::reserve(uint64_t(kFar + 600) * 128);
  ASSERT_TRUE(k.ok() && v.ok());
  const RandomHead small(type, type, kDim, kDim, 800, 50);
  KvHeadView far = small.view;
  far.k = k->data();
  far.v = v->data();
  far.rows = kFar + 600;
  const RowRange near_ranges[] = {{0, 200}, {200, 800}};
  const RowRange far_ranges[] = {{77, 277}, {kFar, kFar + 600}};
  for (int i = 0; i < 2; ++i) {
    const RowRange from = near_ranges[i], to = far_ranges[i];
    std::copy_n(small.k.data() + from.begin * 128, count_of(from) * 128, k->data() + to.begin * 128);
    std::copy_n(small.v.data() + from.begin * 128, count_of(from) * 128, v->data() + to.begin * 128);
  }
  const auto q = random_floats(3 * kDim, 51);
  const AttendParams params{0.125f, 0.0f};
  EXPECT_EQ(run_attend(far, q.data(), 3, far_ranges, params, pool),
            run_attend(small.view, q.data(), 3, near_ranges, params, pool));
}

}  // namespace
}  // namespace longkv
