// KV caches on a disk: the same bits as in memory, and what happens when the disk is full.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>

#include "base/disk_space.h"
#include "base/virtual_array.h"
#include "kv/session.h"
#include "support/attention_ref.h"
#include "support/small_disk.h"

namespace longkv {
namespace {

using test::random_floats;

struct Folder {
  std::string path = std::string(std::filesystem::temp_directory_path()) + "/longkv-disk-" + std::string(6, 'X');
  Folder() { EXPECT_NE(::mkdtemp(path.data()), nullptr); }
  ~Folder() { std::filesystem::remove_all(path); }
};

std::unique_ptr<KvSession> session(const char* recipe, std::shared_ptr<DiskSpace> disk, ThreadPool& pool,
                                   int64_t capacity = 2000) {
  KvShape shape;
  shape.layers = 3;
  shape.kv_heads = 2;
  shape.group_size = 2;
  shape.dim_k = shape.dim_v = 64;
  shape.window = {0, 0, 128};
  KvSessionExtras extras;
  extras.disk = std::move(disk);
  auto made = KvSession::create(shape, parse_recipe(recipe).value(), RowCapacity{capacity}, AttendParams{0.125f, 0.0f},
                                pool, std::move(extras));
  EXPECT_TRUE(made.ok()) << made.status().message();
  return made.ok() ? std::move(made).value() : nullptr;
}

Status prompt(KvSession& s, int64_t n, uint32_t seed, std::vector<float>& out) {
  const int64_t end = s.tokens().v + n;
  out.resize(size_t(n * 4 * 64));
  for (int layer = 0; layer < 3; ++layer) {
    const auto q = random_floats(n * 4 * 64, seed), k = random_floats(n * 2 * 64, seed + 1),
               v = random_floats(n * 2 * 64, seed + 2);
    if (const Status done = s.prefill(layer, q.data(), k.data(), v.data(), n, end, out.data(), nullptr); !done.ok())
      return done;
    if (const Status done = s.finish_prefill(layer); !done.ok()) return done;
  }
  return {};
}

Status token(KvSession& s, uint32_t seed, std::vector<float>& out) {
  out.resize(4 * 64);
  for (int layer = 0; layer < 3; ++layer) {
    const auto q = random_floats(4 * 64, seed), k = random_floats(2 * 64, seed + 1),
               v = random_floats(2 * 64, seed + 2);
    if (const Status done = s.decode(layer, q.data(), k.data(), v.data(), out.data()); !done.ok()) return done;
  }
  return {};
}

TEST(KvDisk, SameBitsAsInMemory) {
  const Folder folder;
  ThreadPool pool(3);
  for (const char* recipe : {"full", "q8", "quest:budget=64,dense_layers=0", "streaming:budget=128"}) {
    SCOPED_TRACE(recipe);
    const auto disk = DiskSpace::create(folder.path).value();
    const auto here = session(recipe, nullptr, pool), there = session(recipe, disk, pool);
    ASSERT_TRUE(here && there);
    EXPECT_EQ(disk->allocated(), 0u);
    std::vector<float> want, have;
    ASSERT_TRUE(prompt(*here, 500, 1, want).ok());
    ASSERT_TRUE(prompt(*there, 500, 1, have).ok());
    EXPECT_EQ(have, want);
    EXPECT_GE(int64_t(disk->allocated()), there->cache().bytes_used());
    for (uint32_t i = 0; i < 40; ++i) {
      ASSERT_TRUE(token(*here, 10 + i, want).ok());
      ASSERT_TRUE(token(*there, 10 + i, have).ok());
      ASSERT_EQ(have, want) << i;
    }
    if (here->truncate(TokenCount{520}).ok()) {
      ASSERT_TRUE(there->truncate(TokenCount{520}).ok());
      ASSERT_TRUE(token(*here, 99, want).ok());
      ASSERT_TRUE(token(*there, 99, have).ok());
      EXPECT_EQ(have, want);
    }
    const uint64_t held = disk->allocated();
    ASSERT_TRUE(there->truncate(TokenCount{0}).ok());
    EXPECT_LT(disk->allocated(), held / 2);  // a file system may keep some for itself
    ASSERT_TRUE(here->truncate(TokenCount{0}).ok());
    ASSERT_TRUE(prompt(*here, 300, 5, want).ok());
    ASSERT_TRUE(prompt(*there, 300, 5, have).ok());
    EXPECT_EQ(have, want);
  }
  EXPECT_TRUE(std::filesystem::is_empty(folder.path));  // the file has no name
}

TEST(KvDisk, ArraysGrowAndReturnWhatTheyTook) {
  const Folder folder;
  const auto disk = DiskSpace::create(folder.path).value();
  uint64_t held = 0;
  {
    VirtualArray a = VirtualArray::reserve_in(disk, 10 << 20).value(), b = VirtualArray::reserve_in(disk, 1000).value();
    ASSERT_TRUE(a.grow(300000).ok());
    ASSERT_TRUE(b.grow(1000).ok());
    std::memset(a.data(), 7, 300000);
    std::memset(b.data(), 9, 1000);
    held = disk->allocated();
    EXPECT_GE(held, 301000u);
    ASSERT_TRUE(a.grow(300000).ok());
    EXPECT_EQ(disk->allocated(), held);
    a.release(100000, a.size());
    EXPECT_LT(disk->allocated(), held);
    EXPECT_EQ(a.data()[99999], 7);
    EXPECT_EQ(a.data()[200000], 0);
    ASSERT_TRUE(a.grow(300000).ok());
    EXPECT_EQ(a.data()[200000], 0);
    a.data()[200000] = 5;
    VirtualArray moved = std::move(a);
    EXPECT_EQ(moved.data()[200000], 5);
    EXPECT_EQ(b.data()[999], 9);
  }
  EXPECT_LT(disk->allocated(), held / 2);
  EXPECT_EQ(DiskSpace::create(folder.path + "/none").status().code(), Code::kIo);
  EXPECT_GT(DiskSpace::free_bytes(folder.path), 0);
}

TEST(KvDisk, RecipesThatEncodeOldRowsAreRefused) {
  const Folder folder;
  ThreadPool pool(1);
  KvShape shape;
  shape.layers = 1;
  shape.kv_heads = shape.group_size = 1;
  shape.dim_k = shape.dim_v = 64;
  KvSessionExtras extras;
  extras.disk = DiskSpace::create(folder.path).value();
  EXPECT_EQ(KvSession::create(shape, parse_recipe("kivi4").value(), RowCapacity{100}, {}, pool, std::move(extras))
                .status()
                .code(),
            Code::kUnsupported);
}

// Returns 0 as expected, else the number of what went wrong.
int fill_a_small_disk(const std::string& folder) {
  int wrong = 0;
  ThreadPool pool(1);
  const auto disk = DiskSpace::create(folder).value();
  const auto small = session("full", disk, pool, 100000), large = session("full", nullptr, pool, 100000);
  std::vector<float> have, want;
  if (!prompt(*small, 300, 1, have).ok() || !prompt(*large, 300, 1, want).ok() || have != want) wrong = 1;
  const Status full = prompt(*small, 5000, 4, have);
  if (full.ok() || full.code() != Code::kIo || full.message().find("is full") == std::string::npos) wrong = 2;
  // What was held before holds, and the conversation goes on.
  if (!small->truncate(TokenCount{300}).ok() || small->tokens().v != 300) wrong = 3;
  for (uint32_t i = 0; i < 20; ++i) {
    if (!token(*small, 20 + i, have).ok() || !token(*large, 20 + i, want).ok() || have != want) wrong = 4;
  }
  return wrong;
}

TEST(KvDisk, FullDisksAreAnError) {
  const int result = test::on_a_small_disk("1m", fill_a_small_disk);
  if (result == test::kNoSmallDisk) GTEST_SKIP() << "no file system of its own can be mounted here";
  EXPECT_EQ(result, 0);
}

}  // namespace
}  // namespace longkv
