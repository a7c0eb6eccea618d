// Heads whose older rows lie in another form: encoding, attention over the borders, cutting.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "base/cpu.h"
#include "kv/attend.h"
#include "kv/codec/codec.h"
#include "kv/codec/kivi.h"
#include "kv/layout.h"
#include "kv/region_store.h"
#include "support/attention_ref.h"

namespace longkv {
namespace {

using test::attention_ref;
using test::random_floats;

constexpr float kInf = std::numeric_limits<float>::infinity();

KvShape shape_of(int dim_k, int dim_v) {
  KvShape s;
  s.layers = s.kv_heads = 1;
  s.group_size = 1;
  s.dim_k = dim_k;
  s.dim_v = dim_v;
  return s;
}

// One head with raw rows that grow, and its store.
struct Growing {
  Growing(int dim_k, int dim_v, RegionSpec spec, int64_t rows, uint32_t seed)
      : raw(KvType::kF16, KvType::kF16, dim_k, dim_v, rows, seed),
        store(RegionStore::create(shape_of(dim_k, dim_v), std::move(spec), {rows})) {
    raw.view.rows = 0;
  }
  void grow(int64_t rows) {
    raw.view.rows = rows;
    const int64_t from = store->end(0, 0), to = store->wanted_end(rows);
    if (to <= from) return;
    store->encode(0, 0, raw.view, from, to);
    store->commit(0, 0, raw.view, to);
  }
  KvHeadView view() const {
    KvHeadView v = raw.view;
    v.middle = store->middle(0, 0);
    return v;
  }
  // All rows as fp32 by the decoder of the cache.
  test::RandomHead decoded() const {
    const KvHeadView v = view();
    test::RandomHead out(KvType::kF32, KvType::kF32, v.dim_k, v.dim_v, v.rows, 1);
    decode_k_rows(v, 0, v.rows, reinterpret_cast<float*>(out.k.data()));
    decode_v_rows(v, 0, v.rows, reinterpret_cast<float*>(out.v.data()));
    return out;
  }
  test::RandomHead raw;
  Result<RegionStore> store;
};

HeadMask every_other(int dim, bool alpha) {
  HeadMask mask;
  for (int c = 0; c < dim; c += 2) mask.channels.push_back(uint16_t(c));
  if (alpha) mask.alpha = random_floats(dim / 2, 9);
  return mask;
}

struct Attended {
  std::vector<float> out, lse;
  bool operator==(const Attended&) const = default;
};
Attended run(const KvHeadView& kv, const float* q, int n_q, std::span<const RowRange> ranges,
             const AttendParams& params) {
  ThreadPool pool(2);
  Attended a{std::vector<float>(size_t(n_q * kv.dim_v), NAN), std::vector<float>(size_t(n_q), NAN)};
  AttendUnit unit{q, n_q, kv, ranges, a.out.data(), a.lse.data()};
  AttendScratch scratch;
  for (int round = 0; round < 2; ++round) attend({&unit, 1}, params, scratch, pool);  // a used scratch changes nothing
  return a;
}

TEST(Regions, MiddleGrowsInWholeSteps) {
  RegionSpec spec;
  spec.k = spec.v = KvType::kKivi2;
  spec.sink = 5;
  spec.window = 40;
  Growing head(64, 64, spec, 400, 1);
  ASSERT_TRUE(head.store.ok()) << head.store.status().message();
  for (int64_t rows = 0; rows <= 400; ++rows) {
    head.grow(rows);
    const KvMiddle* m = head.store->middle(0, 0);
    if (rows < 5 + 40 + 32) {
      ASSERT_EQ(m, nullptr) << rows;
      continue;
    }
    ASSERT_EQ(m->begin, 5);
    ASSERT_EQ((m->end - m->begin) % 32, 0);
    ASSERT_GE(rows - m->end, 40);
    ASSERT_LT(rows - m->end, 40 + 32);
    ASSERT_EQ(head.store->bytes_used(), (m->end - m->begin) * (24 + 24));
  }
}

TEST(Regions, RowByRowEqualsAtOnce) {
  for (KvType type : {KvType::kKivi2, KvType::kKivi4, KvType::kQ8_0, KvType::kQ4_0, KvType::kFp8, KvType::kF16}) {
    RegionSpec spec;
    spec.k = spec.v = type;
    spec.sink = 3;
    spec.window = 33;
    spec.masks = {every_other(128, false)};
    Growing slow(128, 64, spec, 500, 2), fast(128, 64, spec, 500, 2);
    ASSERT_TRUE(slow.store.ok() && fast.store.ok());
    for (int64_t rows = 1; rows <= 500; ++rows) slow.grow(rows);
    fast.grow(500);
    const auto a = slow.decoded(), b = fast.decoded();
    EXPECT_EQ(a.k, b.k) << kv_type_name(type);
    EXPECT_EQ(a.v, b.v) << kv_type_name(type);
  }
}

class RegionsEachLevel : public ::testing::TestWithParam<IsaLevel> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_active_isa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }
};
INSTANTIATE_TEST_SUITE_P(Isa, RegionsEachLevel, ::testing::ValuesIn(available_isa_levels()),
                         [](const auto& info) { return isa_name(info.param); });

// Nothing encoded: the bits of the plain cache.
TEST_P(RegionsEachLevel, FullWindowIsThePlainCache) {
  RegionSpec spec;
  spec.k = spec.v = KvType::kKivi2;
  spec.window = 1000;
  Growing head(64, 64, spec, 900, 3);
  head.grow(900);
  const auto q = random_floats(3 * 64, 4);
  const RowRange all{0, 900};
  EXPECT_EQ(run(head.view(), q.data(), 3, {&all, 1}, {0.125f, 0.0f}),
            run(head.raw.view, q.data(), 3, {&all, 1}, {0.125f, 0.0f}));
}

// Against attention in double over the decoded rows. f16 middles err by fp32 rounding alone.
TEST_P(RegionsEachLevel, EqualsDecodeThenDense) {
  struct Case {
    KvType k, v;
    bool mask, alpha;
    double slack;  // of scores: rounding of queries to int8 or int16 where the level has integer products
  };
  // fp8 has them with VNNI alone: a query's step is 1/139000 of at most 20, which meets keys of at most 70 and the
  // scale (4.6e-4); a weight's as much of the tile's sum, for 64 rows of values below 5 whose codes err by 2^-6 of 448.
  const bool integers = GetParam() >= IsaLevel::kAvx512Vnni && GetParam() < IsaLevel::kNeon;
  constexpr double kFp8Values = 5.0 * (0.501 * 64.0 / 139000.0 + 0x1p-6 / 448.0);
  const Case cases[] = {
      {KvType::kF16, KvType::kF16, true, true, 0.0},       {KvType::kFp8, KvType::kFp8, true, false, 5e-4},
      {KvType::kF16, KvType::kFp8, false, false, 0.0},     {KvType::kQ8_0, KvType::kQ8_0, true, true, 1e-3},
      {KvType::kQ4_0, KvType::kQ8_0, true, false, 0.1},    {KvType::kKivi4, KvType::kKivi2, true, true, 0.25},
      {KvType::kKivi2, KvType::kKivi2, false, false, 0.25}};
  for (const Case& c : cases) {
    RegionSpec spec;
    spec.k = c.k;
    spec.v = c.v;
    spec.sink = 4;
    spec.window = 50;
    if (c.mask) spec.masks = {every_other(128, c.alpha)};
    Growing head(128, 64, spec, 701, 5);
    ASSERT_TRUE(head.store.ok()) << head.store.status().message();
    head.grow(701);
    const auto dense = head.decoded();
    const auto q = random_floats(5 * 128, 6);
    const std::vector<std::vector<RowRange>> lists = {{{0, 701}},   {{0, 2}, {100, 105}},   {{3, 5}, {640, 700}},
                                                      {{690, 701}}, {{40, 41}, {200, 333}}, {}};
    for (const auto& ranges : lists) {
      for (float softcap : {0.0f, 10.0f}) {
        const AttendParams params{0.09f, softcap};
        const auto a = run(head.view(), q.data(), 5, ranges, params);
        std::vector<float> scores(size_t(5 * count_rows(ranges)), NAN);
        ThreadPool pool(2);
        AttendUnit unit{q.data(), 5, head.view(), ranges, nullptr, nullptr};
        attend_scores(unit, params, scores.data(), pool);
        for (int h = 0; h < 5; ++h) {
          const auto ref = attention_ref(q.data() + h * 128, dense.view, ranges, params);
          if (ranges.empty()) {
            EXPECT_EQ(a.lse[size_t(h)], -kInf);
            continue;
          }
          const double slack = c.k == KvType::kFp8 && !integers ? 0.0 : c.slack;
          const double values = c.v == KvType::kFp8 && integers ? kFp8Values : 0.0;
          const double score = ref.score_tolerance + slack, out = ref.out_tolerance + 1e-5 + 4.0 * slack + values;
          ASSERT_NEAR(a.lse[size_t(h)], ref.lse, score) << kv_type_name(c.k);
          for (int i = 0; i < 64; ++i) ASSERT_NEAR(a.out[size_t(h * 64 + i)], ref.out[size_t(i)], out);
          const size_t rows = ref.scores.size();
          for (size_t r = 0; r < rows; ++r) ASSERT_NEAR(scores[size_t(h) * rows + r], ref.scores[r], score) << r;
        }
      }
    }
  }
}

// A head without channels: the middle counts as rows of key zero, or not at all.
TEST_P(RegionsEachLevel, HeadsWithoutChannels) {
  const auto q = random_floats(2 * 64, 7);
  const AttendParams params{0.125f, 0.0f};
  for (bool mean : {true, false}) {
    RegionSpec spec;
    spec.sink = 4;
    spec.window = 30;
    HeadMask none;
    none.removed = mean ? RemovedAs::kConstant : RemovedAs::kDrop;
    spec.masks = {none};
    Growing head(64, 96, spec, 300, 8);
    ASSERT_TRUE(head.store.ok());
    for (int64_t rows = 1; rows <= 300; ++rows) head.grow(rows);
    EXPECT_EQ(head.store->bytes_used(), 0);
    const int64_t end = head.store->end(0, 0);
    // Keys of zero with the values as they were, in double.
    test::RandomHead zeroed = head.raw;
    zeroed.view.k = zeroed.k.data();
    zeroed.view.v = zeroed.v.data();
    zeroed.view.rows = 300;
    std::fill_n(zeroed.k.begin() + 4 * zeroed.view.k_stride, (end - 4) * zeroed.view.k_stride, uint8_t(0));
    const std::vector<RowRange> all = {{0, 300}}, without = {{0, 4}, {end, 300}};
    const auto a = run(head.view(), q.data(), 2, all, params);
    for (int h = 0; h < 2; ++h) {
      const auto ref = attention_ref(q.data() + h * 64, zeroed.view, mean ? all : without, params);
      ASSERT_NEAR(a.lse[size_t(h)], ref.lse, ref.score_tolerance + 1e-6);
      for (int c = 0; c < 96; ++c) ASSERT_NEAR(a.out[size_t(h * 96 + c)], ref.out[size_t(c)], ref.out_tolerance + 1e-6);
    }
  }
}

TEST(Regions, CutReturnsRowsOfTheMiddle) {
  RegionSpec spec;
  spec.k = spec.v = KvType::kKivi4;
  spec.window = 32;
  Growing head(64, 64, spec, 320, 9), fresh(64, 64, spec, 320, 9);
  head.grow(320);
  head.store->cut(0, 0, 96);
  head.grow(320);
  fresh.grow(320);
  EXPECT_EQ(head.decoded().k, fresh.decoded().k);
  EXPECT_EQ(head.store->end(0, 0), fresh.store->end(0, 0));
}

TEST(Regions, Refusals) {
  const auto refused = [](RegionSpec spec, const char* what) {
    const auto store = RegionStore::create(shape_of(128, 64), std::move(spec), {100});
    ASSERT_FALSE(store.ok());
    EXPECT_NE(store.status().message().find(what), std::string::npos) << store.status().message();
  };
  RegionSpec spec;
  spec.k = KvType::kKivi2;
  spec.v = KvType::kQ8_0;
  refused(spec, "go together");
  spec.v = KvType::kKivi2;
  spec.masks = {HeadMask{{1, 2, 3}, {}}};
  refused(spec, "groups of 8");
  spec.k = spec.v = KvType::kF16;
  spec.masks = {HeadMask{{1, 2, 128}, {}}};
  refused(spec, "ascend below 128");
  spec.masks = {HeadMask{{1, 2, 2}, {}}};
  refused(spec, "ascend below 128");
  spec.masks = {HeadMask{{1, 2, 3}, {1.0f}}};
  refused(spec, "factors");
  spec.masks = {HeadMask{}, HeadMask{}};
  refused(spec, "2 channel masks");
}

}  // namespace
}  // namespace longkv
