#include "prefill/attention.h"

#include <gtest/gtest.h>

#include <atomic>

#include "attention_case.h"
#include "base/cpu.h"

namespace longkv::testing {
namespace {

// Compares the queries [from, rows) with the reference.
void expect_near_reference(const AttentionCase& c, const std::vector<float>& out, int64_t from = 0, int64_t step = 1) {
  const int64_t dim = c.spec.dim_v;
  for (int64_t position = from; position < c.spec.rows; position += step) {
    for (int head = 0; head < c.heads(); ++head) {
      double error = 0;
      const std::vector<double> w = c.weights(position, head, &error);
      const std::vector<double>& values = c.v[size_t(head / c.spec.group)].values;
      for (int64_t i = 0; i < dim; ++i) {
        double expected = 0, largest = 0;
        for (int64_t r = 0; r <= position; ++r) {
          expected += w[size_t(r)] * values[size_t(r * dim + i)];
          if (w[size_t(r)] > 0) largest = std::max(largest, std::fabs(values[size_t(r * dim + i)]));
        }
        const float got = out[size_t((position * c.heads() + head) * dim + i)];
        ASSERT_NEAR(got, expected, error * largest)
            << "position " << position << " head " << head << " channel " << i << " of " << c.spec.rows << " rows";
      }
    }
  }
}

class PrefillAttentionTest : public ::testing::TestWithParam<IsaLevel> {
 protected:
  void SetUp() override { ASSERT_TRUE(set_active_isa(GetParam()).ok()); }
  void TearDown() override { ASSERT_TRUE(set_active_isa(available_isa_levels().back()).ok()); }
  ThreadPool pool_{2};
};

INSTANTIATE_TEST_SUITE_P(Levels, PrefillAttentionTest, ::testing::ValuesIn(available_isa_levels()),
                         [](const auto& info) { return std::string(isa_name(info.param)); });

TEST_P(PrefillAttentionTest, LengthsAroundTileEdgesEqualReference) {
  for (int64_t rows : {1, 2, 5, 6, 7, 15, 16, 17, 31, 33, 47, 49, 127, 129, 255, 256, 257, 300, 513}) {
    AttentionCase c({.rows = rows, .kv_heads = 1, .group = 3, .dim_k = 32, .dim_v = 32, .seed = uint32_t(rows)});
    expect_near_reference(c, c.run(pool_, rows), rows > 300 ? rows - 40 : 0);
  }
}

TEST_P(PrefillAttentionTest, HeadSizesAndGroupsEqualReference) {
  const std::pair<int, int> dims[] = {{16, 16}, {24, 40},   {64, 64},   {72, 8},
                                      {80, 96}, {128, 128}, {192, 128}, {256, 256}};
  const int groups[] = {1, 3, 4, 7, 8, 1, 2, 5};
  for (size_t i = 0; i < std::size(dims); ++i) {
    AttentionCase c({.rows = 150, .kv_heads = 2, .group = groups[i], .dim_k = dims[i].first, .dim_v = dims[i].second});
    expect_near_reference(c, c.run(pool_, 100), 0, 7);
  }
}

TEST_P(PrefillAttentionTest, StoredTypesEqualReference) {
  const KvType types[] = {KvType::kF32, KvType::kF16, KvType::kBf16, KvType::kQ8_0, KvType::kQ4_0};
  for (KvType k : types) {
    for (KvType v : types) {
      AttentionCase c({.rows = 70, .kv_heads = 1, .group = 2, .dim_k = 96, .dim_v = 64, .k_type = k, .v_type = v});
      expect_near_reference(c, c.run(pool_, 70), 0, 3);
    }
  }
  // Channels that are no multiple of a vector, which only the plain types allow.
  for (KvType type : {KvType::kF32, KvType::kF16, KvType::kBf16}) {
    AttentionCase c({.rows = 40, .kv_heads = 1, .group = 2, .dim_k = 88, .dim_v = 72, .k_type = type, .v_type = type});
    expect_near_reference(c, c.run(pool_, 40));
  }
}

TEST_P(PrefillAttentionTest, WindowsEqualReference) {
  for (int64_t window : {1, 2, 16, 17, 100, 255, 256, 257, 400, 1000}) {
    AttentionCase c({.rows = 600, .kv_heads = 1, .group = 2, .dim_k = 16, .dim_v = 16, .window = window});
    expect_near_reference(c, c.run(pool_, 130), 0, 13);
  }
}

TEST_P(PrefillAttentionTest, LargeScoresAndSoftCap) {
  // Scores of several hundred overflow a softmax without maximum; all far below zero would divide zero by zero.
  for (float softcap : {0.0f, 20.0f, 50.0f}) {
    AttentionCase c({.rows = 300, .kv_heads = 1, .group = 2, .softcap = softcap, .amplitude = 200});
    expect_near_reference(c, c.run(pool_, 300), 0, 11);
    AttentionCase small({.rows = 100, .kv_heads = 1, .group = 2, .softcap = softcap, .amplitude = 0.01f});
    expect_near_reference(small, small.run(pool_, 100), 0, 11);
  }
}

TEST_P(PrefillAttentionTest, EveryChunkingGivesTheSameBits) {
  for (int64_t rows = 1; rows <= 130; rows += rows < 30 ? 1 : 7) {
    AttentionCase c({.rows = rows, .kv_heads = 1, .group = 3, .dim_k = 16, .dim_v = 16, .k_type = KvType::kF16});
    const std::vector<float> whole = c.run(pool_, rows);
    for (int64_t chunk = 1; chunk < rows; ++chunk) {
      ASSERT_EQ(c.run(pool_, chunk), whole) << rows << " rows in chunks of " << chunk;
    }
  }
  for (int64_t window : {0, 200}) {
    AttentionCase c({.rows = 900, .kv_heads = 2, .group = 4, .dim_k = 32, .dim_v = 48, .window = window});
    const std::vector<float> whole = c.run(pool_, 900);
    for (int64_t chunk : {31, 64, 255, 256, 257, 512}) {
      ASSERT_EQ(c.run(pool_, chunk), whole) << "chunks of " << chunk << ", window " << window;
    }
  }
}

TEST_P(PrefillAttentionTest, EveryThreadCountGivesTheSameBits) {
  AttentionCase c({.rows = 700, .kv_heads = 3, .group = 3, .k_type = KvType::kQ8_0, .v_type = KvType::kQ4_0});
  ThreadPool one(1);
  std::vector<float> mass_one(size_t(c.heads() * 700), 0.0f);
  const std::vector<float> expected = c.run(one, 350, mass_one.data(), 600);
  for (int threads : {2, 3, 5, 16}) {
    ThreadPool pool(threads);
    std::vector<float> mass(mass_one.size(), 0.0f);
    ASSERT_EQ(c.run(pool, 350, mass.data(), 600), expected) << threads << " threads";
    ASSERT_EQ(mass, mass_one) << threads << " threads";
  }
}

TEST_P(PrefillAttentionTest, FutureKeysChangeNoBit) {
  CaseSpec spec{.rows = 300, .kv_heads = 1, .group = 3, .dim_k = 32, .dim_v = 32};
  AttentionCase c(spec);
  const std::vector<float> before = c.run(pool_, 300);
  for (int64_t probe : {1, 7, 128, 255, 256, 299}) {
    AttentionCase changed(spec);
    for (int64_t i = 0; i < 32; ++i) {
      const float k = 1e4f, v = -1e6f;
      std::memcpy(changed.k[0].bytes.data() + probe * changed.k[0].stride + 4 * i, &k, 4);
      std::memcpy(changed.v[0].bytes.data() + probe * changed.v[0].stride + 4 * i, &v, 4);
    }
    const std::vector<float> after = changed.run(pool_, 300);
    const auto split = probe * c.heads() * spec.dim_v;
    EXPECT_TRUE(std::equal(before.begin(), before.begin() + split, after.begin())) << "key " << probe;
    EXPECT_FALSE(std::equal(before.begin() + split, before.end(), after.begin() + split)) << "key " << probe;
  }
}

TEST_P(PrefillAttentionTest, ReleasedRowsAreNeverRead) {
  CaseSpec spec{.rows = 700, .kv_heads = 1, .group = 2, .dim_k = 16, .dim_v = 16, .window = 64};
  AttentionCase c(spec);
  const std::vector<float> whole = c.run(pool_, 700);
  // The rows below become NaN; a query at 600 sees none of them.
  const int64_t released = 600 - 63;
  std::memset(c.k[0].bytes.data(), 0xff, size_t(released * c.k[0].stride));
  std::memset(c.v[0].bytes.data(), 0xff, size_t(released * c.v[0].stride));
  c.views[0].first_row = released;
  std::vector<float> out(whole.size(), 0.0f);
  PrefillAttention attention(pool_);
  attention.run(c.args(600, 100, out.data()));
  const auto split = 600 * c.heads() * spec.dim_v;
  EXPECT_TRUE(std::equal(whole.begin() + split, whole.end(), out.begin() + split));
}

TEST_P(PrefillAttentionTest, MassEqualsReferenceAndSumsToQueries) {
  for (int64_t window : {0, 50}) {
    for (int64_t chunk : {400, 150, 7}) {
      const int64_t rows = 400, from = 290;
      AttentionCase c({.rows = rows, .kv_heads = 2, .group = 3, .dim_k = 32, .dim_v = 24, .window = window});
      std::vector<float> mass(size_t(c.heads() * rows), 1.0f);  // added to what is there
      c.run(pool_, chunk, mass.data(), from);
      for (int head = 0; head < c.heads(); ++head) {
        std::vector<double> expected(size_t(rows), 1.0);
        double error = 0;
        for (int64_t p = from; p < rows; ++p) {
          double e = 0;
          const std::vector<double> w = c.weights(p, head, &e);
          for (int64_t r = 0; r < rows; ++r) expected[size_t(r)] += w[size_t(r)];
          error = std::max(error, e);
        }
        double sum = 0;
        for (int64_t r = 0; r < rows; ++r) {
          const float got = mass[size_t(head * rows + r)];
          ASSERT_NEAR(got, expected[size_t(r)], error * expected[size_t(r)]) << "head " << head << " row " << r;
          sum += got - 1.0;
        }
        EXPECT_NEAR(sum, double(rows - from), 1e-3);
      }
    }
  }
}

TEST_P(PrefillAttentionTest, MassOfChunksHasTheSameBits) {
  AttentionCase c({.rows = 500, .kv_heads = 1, .group = 5, .dim_k = 32, .dim_v = 32});
  std::vector<float> whole(size_t(c.heads() * 500), 0.0f);
  c.run(pool_, 500, whole.data(), 372);
  for (int64_t chunk : {1, 33, 256, 400}) {
    std::vector<float> mass(whole.size(), 0.0f);
    c.run(pool_, chunk, mass.data(), 372);
    ASSERT_EQ(mass, whole) << "chunks of " << chunk;
  }
}

TEST_P(PrefillAttentionTest, NotANumberIsNotHidden) {
  AttentionCase c({.rows = 20, .kv_heads = 1, .group = 1, .dim_k = 16, .dim_v = 16});
  c.q[10 * 16 + 3] = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> out = c.run(pool_, 20);
  EXPECT_TRUE(std::isnan(out[10 * 16]));
  EXPECT_FALSE(std::isnan(out[9 * 16]));
  EXPECT_FALSE(std::isnan(out[11 * 16]));
}

TEST_P(PrefillAttentionTest, CancelStopsBeforeTheFirstTile) {
  AttentionCase c({.rows = 4096, .kv_heads = 1, .group = 1, .dim_k = 16, .dim_v = 16});
  std::vector<float> out(size_t(4096 * 16), 7.0f);
  std::atomic<bool> cancel{true};
  PrefillAttendArgs args = c.args(0, 4096, out.data());
  args.cancel = &cancel;
  PrefillAttention(pool_).run(args);
  EXPECT_EQ(out, std::vector<float>(out.size(), 7.0f));
}

}  // namespace
}  // namespace longkv::testing
