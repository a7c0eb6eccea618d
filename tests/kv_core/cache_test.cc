#include "kv/cache.h"

#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kv/codec/codec.h"
#include "support/attention_ref.h"

namespace longkv {
namespace {

using test::random_floats;

KvShape shape_of(int layers, int kv_heads, int dim_k, int dim_v) {
  KvShape shape;
  shape.layers = layers;
  shape.kv_heads = kv_heads;
  shape.group_size = 3;
  shape.dim_k = dim_k;
  shape.dim_v = dim_v;
  return shape;
}

// Bytes of [p, p + size) that lie in memory.
int64_t resident(const uint8_t* p, int64_t size) {
  const int64_t page = ::sysconf(_SC_PAGESIZE);
  std::vector<unsigned char> flags(size_t((size + page - 1) / page));
  EXPECT_EQ(::mincore(const_cast<uint8_t*>(p), size_t(size), flags.data()), 0);
  int64_t pages = 0;
  for (unsigned char f : flags) pages += f & 1;
  return pages * page;
}

int64_t resident_of(const KvCache& cache) {
  int64_t bytes = 0;
  for (int layer = 0; layer < cache.shape().layers; ++layer) {
    for (int h = 0; h < cache.shape().kv_heads; ++h) {
      const KvHeadView v = cache.view(layer, h);
      bytes += resident(v.k, v.k_stride * cache.capacity().v) + resident(v.v, v.v_stride * cache.capacity().v);
    }
  }
  return bytes;
}

int64_t allowed_for(const KvCache& cache) {
  const int64_t arrays = int64_t(cache.shape().layers) * cache.shape().kv_heads * 2;
  return cache.bytes_used() + cache.bytes_used() / 20 + arrays * ::sysconf(_SC_PAGESIZE);
}

TEST(KvCache, HoldsWhatWasAppended) {
  ThreadPool pool(3);
  const KvShape shape = shape_of(2, 3, 64, 96);
  for (KvTypes types : {KvTypes{KvType::kF16, KvType::kQ8_0}, KvTypes{KvType::kQ4_0, KvType::kF32}}) {
    auto cache = KvCache::create(shape, types, {1000});
    ASSERT_TRUE(cache.ok()) << cache.status().message();
    const auto k = random_floats(1000 * 3 * 64, 1), v = random_floats(1000 * 3 * 96, 2);
    int64_t rows = 0;
    for (int64_t n : {1, 0, 200, 1, 1, 63, 64, 65, 500}) {
      for (int layer = 0; layer < 2; ++layer) {
        // Layer 1 gets the rows in another order of calls: counts are per layer.
        ASSERT_TRUE(cache->append(layer, k.data() + rows * 3 * 64, v.data() + rows * 3 * 96, n, pool).ok());
        EXPECT_EQ(cache->rows(layer).v, rows + n);
      }
      rows += n;
    }
    for (int layer = 0; layer < 2; ++layer) {
      for (int h = 0; h < 3; ++h) {
        const KvHeadView view = cache->view(layer, h);
        ASSERT_EQ(view.rows, rows);
        for (int64_t r = 0; r < rows; ++r) {
          std::vector<uint8_t> expected_k(size_t(view.k_stride)), expected_v(size_t(view.v_stride));
          encode_row(types.k, k.data() + (r * 3 + h) * 64, 64, expected_k.data());
          encode_row(types.v, v.data() + (r * 3 + h) * 96, 96, expected_v.data());
          ASSERT_TRUE(std::equal(expected_k.begin(), expected_k.end(), view.k + r * view.k_stride)) << r;
          ASSERT_TRUE(std::equal(expected_v.begin(), expected_v.end(), view.v + r * view.v_stride)) << r;
        }
      }
    }
    EXPECT_EQ(cache->bytes_used(), KvCache::bytes_for(shape, types, rows));
  }
}

TEST(KvCache, RefusesWhatItCannotHold) {
  ThreadPool pool(1);
  auto cache = KvCache::create(shape_of(1, 1, 64, 64), {}, {10});
  ASSERT_TRUE(cache.ok());
  const auto x = random_floats(11 * 64, 3);
  ASSERT_TRUE(cache->append(0, x.data(), x.data(), 8, pool).ok());
  const Status full = cache->append(0, x.data(), x.data(), 3, pool);
  EXPECT_EQ(full.code(), Code::kInvalidArgument);
  EXPECT_NE(full.message().find("8 of 10"), std::string::npos) << full.message();
  EXPECT_EQ(cache->rows(0).v, 8);
  EXPECT_TRUE(cache->append(0, x.data(), x.data(), 2, pool).ok());

  EXPECT_EQ(KvCache::create(shape_of(0, 1, 64, 64), {}, {1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(KvCache::create(shape_of(1, 1, 0, 64), {}, {1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(KvCache::create(shape_of(1, 1, 64, 2000), {}, {1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(KvCache::create(shape_of(1, 1, 64, 64), {}, {-1}).status().code(), Code::kInvalidArgument);
  EXPECT_EQ(KvCache::create(shape_of(1, 1, 64, 64), {}, {int64_t(1) << 60}).status().code(), Code::kOutOfMemory);
  const Status odd = KvCache::create(shape_of(1, 1, 80, 64), {KvType::kQ8_0, KvType::kF16}, {1}).status();
  EXPECT_NE(odd.message().find("q8_0"), std::string::npos) << odd.message();
}

TEST(KvCache, CapacityCostsNothingAndGrowthLittle) {
  ThreadPool pool(2);
  auto cache = KvCache::create(shape_of(2, 2, 64, 64), {KvType::kF16, KvType::kQ8_0}, {int64_t(1) << 22});
  ASSERT_TRUE(cache.ok());
  EXPECT_EQ(resident_of(*cache), 0);
  const auto x = random_floats(1000 * 2 * 64, 4);
  const uint8_t* first = cache->view(0, 0).k;
  for (int chunk = 0; chunk < 40; ++chunk) {
    for (int layer = 0; layer < 2; ++layer) ASSERT_TRUE(cache->append(layer, x.data(), x.data(), 1000, pool).ok());
    ASSERT_LE(resident_of(*cache), allowed_for(*cache)) << "after " << cache->rows(0).v << " rows";
  }
  EXPECT_GE(resident_of(*cache), cache->bytes_used());
  EXPECT_EQ(cache->view(0, 0).k, first) << "growth must not move rows";
  ASSERT_TRUE(cache->truncate({5000}).ok());
  EXPECT_LE(resident_of(*cache), allowed_for(*cache));
  EXPECT_EQ(cache->rows(1).v, 5000);
}

TEST(KvCache, PromisedRowsStayInTheirShare) {
  ThreadPool pool(2);
  auto cache = KvCache::create(shape_of(1, 2, 64, 64), {}, {int64_t(1) << 20});
  ASSERT_TRUE(cache.ok());
  cache->expect_rows(0, {40000});
  EXPECT_EQ(resident_of(*cache), 0);
  const auto x = random_floats(1000 * 2 * 64, 5);
  for (int chunk = 0; chunk < 40; ++chunk) ASSERT_TRUE(cache->append(0, x.data(), x.data(), 1000, pool).ok());
  EXPECT_LE(resident_of(*cache), allowed_for(*cache));
}

TEST(KvCache, SlidingWindowsReturnMemory) {
  ThreadPool pool(2);
  KvShape shape = shape_of(2, 1, 64, 64);
  shape.window = {0, 512};
  auto cache = KvCache::create(shape, {}, {1 << 20});
  ASSERT_TRUE(cache.ok());
  const auto x = random_floats(1000 * 64, 6);
  for (int chunk = 0; chunk < 20; ++chunk) {
    for (int layer = 0; layer < 2; ++layer) {
      ASSERT_TRUE(cache->append(layer, x.data(), x.data(), 1000, pool).ok());
      cache->release_outside_window(layer);
    }
  }
  EXPECT_EQ(cache->view(0, 0).first_row, 0);
  const KvHeadView windowed = cache->view(1, 0);
  EXPECT_EQ(windowed.first_row, 20000 - 511);  // the next query, at position 20000, sees itself and 511 before
  EXPECT_EQ(cache->bytes_used(), (20000 + 511) * (64 + 64) * 2);
  EXPECT_LE(resident_of(*cache), allowed_for(*cache));
  std::vector<uint8_t> row(size_t(windowed.k_stride));
  for (int64_t r = windowed.first_row; r < windowed.rows; ++r) {
    encode_row(KvType::kF16, x.data() + r % 1000 * 64, 64, row.data());
    ASSERT_TRUE(std::equal(row.begin(), row.end(), windowed.k + r * windowed.k_stride));
  }
  const Status gone = cache->truncate({19999});
  EXPECT_EQ(gone.code(), Code::kInvalidArgument);
  EXPECT_EQ(cache->rows(0).v, 20000) << "a refused cut must change nothing";
  EXPECT_TRUE(cache->truncate({20000}).ok());
}

TEST(KvCache, TruncateThenAppend) {
  ThreadPool pool(2);
  auto cache = KvCache::create(shape_of(1, 1, 64, 64), {}, {4096});
  ASSERT_TRUE(cache.ok());
  const auto x = random_floats(3000 * 64, 7), y = random_floats(64, 8);
  ASSERT_TRUE(cache->append(0, x.data(), x.data(), 3000, pool).ok());
  ASSERT_TRUE(cache->truncate({100}).ok());
  ASSERT_TRUE(cache->append(0, y.data(), y.data(), 1, pool).ok());
  const KvHeadView view = cache->view(0, 0);
  std::vector<uint8_t> row(128);
  encode_row(KvType::kF16, x.data() + 99 * 64, 64, row.data());
  EXPECT_TRUE(std::equal(row.begin(), row.end(), view.k + 99 * 128));
  encode_row(KvType::kF16, y.data(), 64, row.data());
  EXPECT_TRUE(std::equal(row.begin(), row.end(), view.v + 100 * 128));
  EXPECT_FALSE(cache->truncate({-1}).ok());
}

}  // namespace
}  // namespace longkv
