// The container by itself: pages, bases, sums, sizes that do not fit.
#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

#include "kv/file/reader.h"
#include "kv/file/writer.h"
#include "kv_file/harness.h"

namespace longkv {
namespace {

struct Content {
  std::vector<int64_t> numbers{1, 2, 3};
  std::vector<uint8_t> list{9, 8, 7};
  VirtualArray array = *VirtualArray::reserve(100000);
  std::vector<ByteRange> live;

  void visit(KvState& state) {
    const KvState::Level level(state, "part", 4);
    state.values("numbers", numbers);
    state.list("list", list, 100);
    state.array("rows", array, live);
  }
  void fill(uint8_t seed) {
    for (const ByteRange& r : live) {
      for (uint64_t i = r.begin; i < r.end; ++i) array.data()[i] = uint8_t(i * 31 + i / 4096 + seed);
    }
  }
};

std::shared_ptr<KvFile> file_of(Content& content, const KvWriteOptions& options = {}) {
  const int fd = ::memfd_create("segments", MFD_CLOEXEC);
  KvFileWriter writer(
      [&](std::span<const uint8_t> bytes) {
        EXPECT_EQ(::write(fd, bytes.data(), bytes.size()), ssize_t(bytes.size()));
        return Status();
      },
      options);
  content.visit(writer);
  EXPECT_TRUE(writer.finish().ok());
  auto file = KvFile::adopt(fd, "segments");
  EXPECT_TRUE(file.ok()) << file.status().message();
  if (options.base) {
    EXPECT_TRUE((*file)->set_base(options.base).ok());
  }
  return *file;
}

void expect_same(const Content& a, const Content& b) {
  EXPECT_EQ(a.numbers, b.numbers);
  EXPECT_EQ(a.list, b.list);
  for (const ByteRange& r : a.live) {
    EXPECT_EQ(std::memcmp(a.array.data() + r.begin, b.array.data() + r.begin, r.end - r.begin), 0);
  }
}

TEST(KvSegments, PageSpansCoverRangesOnce) {
  const auto spans = [](std::vector<ByteRange> live) {
    std::vector<uint64_t> flat;
    for (const ByteRange& s : page_spans(live)) flat.insert(flat.end(), {s.begin, s.end});
    return flat;
  };
  using V = std::vector<uint64_t>;
  EXPECT_EQ(spans({}), V{});
  EXPECT_EQ(spans({{5, 5}}), V{});
  EXPECT_EQ(spans({{0, 1}}), (V{0, 4096}));
  EXPECT_EQ(spans({{4095, 4097}}), (V{0, 8192}));
  EXPECT_EQ(spans({{0, 10}, {4000, 4100}}), (V{0, 8192}));
  EXPECT_EQ(spans({{0, 10}, {4096, 4100}}), (V{0, 8192}));
  EXPECT_EQ(spans({{0, 10}, {8192, 8193}}), (V{0, 4096, 8192, 12288}));
}

TEST(KvSegments, RoundTripsWithAndWithoutCompression) {
  ThreadPool pool(2);
  const std::vector<std::vector<ByteRange>> lives = {{},
                                                     {{0, 1}},
                                                     {{0, 4096}},
                                                     {{0, 4097}},
                                                     {{100, 200}, {300, 5000}},
                                                     {{0, 50}, {9000, 99999}},
                                                     {{5000, 5001}},
                                                     {{0, 100000}}};
  for (const auto& live : lives) {
    for (const bool compress : {false, true}) {
      Content saved, restored;
      saved.live = restored.live = live;
      saved.fill(3);
      restored.fill(77);
      KvFileLoader loader(file_of(saved, {.compress = compress}), true);
      restored.numbers.assign(3, 0);
      restored.visit(loader);
      const Status done = loader.finish(pool);
      ASSERT_TRUE(done.ok()) << done.message();
      expect_same(saved, restored);
    }
  }
}

TEST(KvSegments, WhatABaseHoldsIsNotWrittenAgain) {
  ThreadPool pool(2);
  for (const uint64_t base_end : {1UL, 4096UL, 40000UL, 99000UL}) {
    Content first, second, restored;
    first.live = {{0, base_end}};
    second.live = restored.live = {{0, 100000}};
    first.fill(1);
    second.fill(1);
    second.array.data()[70000] ^= 1;  // what differs is found, and what follows is stored
    const auto base = file_of(first, {.id = {1, 1}});
    const auto file = file_of(second, {.id = {2, 2}, .base = base});
    const uint64_t shared = std::min<uint64_t>(base_end, 70000) / 4096 * 4096;
    EXPECT_EQ(file->find("part4.rows")->base_bytes, shared);
    EXPECT_EQ(file->base_id(), (KvFileId{1, 1}));
    KvFileLoader loader(file, true);
    restored.visit(loader);
    ASSERT_TRUE(loader.finish(pool).ok());
    expect_same(second, restored);
    // A third on top of it, and one whose base is missing.
    Content third, again;
    third.live = again.live = {{0, 100000}};
    third.fill(1);
    third.array.data()[70000] ^= 1;
    third.array.data()[90000] ^= 1;
    const auto top = file_of(third, {.id = {3, 3}, .base = file});
    EXPECT_EQ(top->depth(), 3);
    EXPECT_EQ(top->find("part4.rows")->base_bytes, 90000U / 4096 * 4096);
    KvFileLoader through(top, true);
    again.visit(through);
    ASSERT_TRUE(through.finish(pool).ok());
    expect_same(third, again);
    EXPECT_FALSE(top->set_base(base).ok());
  }
}

TEST(KvSegments, SizesThatDoNotFitAreRefused) {
  ThreadPool pool(1);
  Content saved;
  saved.live = {{0, 9000}};
  saved.fill(1);
  const auto file = file_of(saved);
  const auto refuses = [&](auto&& change, const std::string& why) {
    Content other;
    other.live = saved.live;
    change(other);
    KvFileLoader loader(file, true);
    other.visit(loader);
    const Status done = loader.finish(pool);
    EXPECT_EQ(done.code(), Code::kCorrupt);
    EXPECT_NE(done.message().find(why), std::string::npos) << done.message();
  };
  refuses([](Content& c) { c.numbers.resize(4); }, "'part4.numbers' has 24 bytes, 32 were expected");
  refuses([](Content& c) { c.live = {{0, 4096}}; }, "'part4.rows' has 12288 bytes, 4096 were expected");
  KvFileLoader loader(file, true);
  std::vector<uint8_t> list;
  loader.list("part4.list", list, 2);
  EXPECT_NE(loader.status().message().find("at most 2 values"), std::string::npos);
  KvFileLoader absent(file, true);
  absent.list("elsewhere", list, 2);
  EXPECT_NE(absent.status().message().find("no segment 'elsewhere'"), std::string::npos);
}

TEST(KvSegments, ReleasedPagesOfAFileReadAsZero) {
  ThreadPool pool(1);
  Content saved, restored;
  saved.live = restored.live = {{0, 50000}};
  saved.fill(1);
  KvFileLoader loader(file_of(saved), true);
  restored.visit(loader);
  ASSERT_TRUE(loader.finish(pool).ok());
  restored.array.release(8192, 100000);
  EXPECT_EQ(restored.array.data()[8191], saved.array.data()[8191]);
  for (uint64_t i = 8192; i < 98304; ++i) ASSERT_EQ(restored.array.data()[i], 0) << i;
}

}  // namespace
}  // namespace longkv
