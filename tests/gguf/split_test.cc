// Models split over several files.
#include <gtest/gtest.h>

#include <cstdio>
#include <cstring>

#include "gguf/gguf.h"
#include "support/mkgguf.h"
#include "support/paths.h"

namespace longkv {
namespace {

using test::MkGguf;

std::string shard_name(const std::string& prefix, int number, int count) {
  char suffix[64];
  std::snprintf(suffix, sizeof suffix, "-%05d-of-%05d.gguf", number + 1, count);
  return prefix + suffix;
}

MkGguf shard(int number, int count, int total) {
  MkGguf mk;
  if (number == 0) mk.string("general.architecture", "llama");
  mk.u16("split.no", uint16_t(number)).u16("split.count", uint16_t(count)).i32("split.tensors.count", total);
  mk.f32_tensor("t" + std::to_string(number), {2}, {float(number), float(10 * number)});
  return mk;
}

std::string message_of(const std::string& path, Code code) {
  const auto file = GgufFile::open(path);
  EXPECT_EQ(file.status().code(), code) << file.status().message();
  return file.status().message();
}

TEST(GgufSplit, OpensAllFilesThroughTheFirst) {
  uint64_t bytes = 0;
  for (int i = 0; i < 3; ++i) {
    shard(i, 3, 3).write(shard_name("model", i, 3));
    bytes += shard(i, 3, 3).bytes().size();
  }
  const auto file = GgufFile::open(test::temp_path(shard_name("model", 0, 3)));
  ASSERT_TRUE(file.ok()) << file.status().message();
  EXPECT_EQ(file->tensors().size(), 3u);
  EXPECT_EQ(file->file_bytes(), bytes);
  EXPECT_EQ(file->metadata().string("general.architecture").value(), "llama");
  for (int i = 0; i < 3; ++i) {
    const TensorInfo* t = file->find("t" + std::to_string(i));
    ASSERT_NE(t, nullptr);
    float value = 0;
    std::memcpy(&value, t->data + 4, 4);
    EXPECT_EQ(value, float(10 * i));
  }
}

TEST(GgufSplit, AnotherThanTheFirstNamesTheFirst) {
  for (int i = 0; i < 2; ++i) shard(i, 2, 2).write(shard_name("wrong", i, 2));
  const std::string first = test::temp_path(shard_name("wrong", 0, 2));
  const std::string message = message_of(test::temp_path(shard_name("wrong", 1, 2)), Code::kInvalidArgument);
  EXPECT_NE(message.find("file 2 of"), std::string::npos) << message;
  EXPECT_NE(message.find(first), std::string::npos) << message;
}

TEST(GgufSplit, ARenamedFirstFileIsExplained) {
  const std::string path = shard(0, 2, 2).write("renamed.gguf");
  EXPECT_NE(message_of(path, Code::kInvalidArgument).find("-00001-of-00002.gguf"), std::string::npos);
}

TEST(GgufSplit, AMissingFileIsNamed) {
  const std::string path = shard(0, 2, 2).write(shard_name("missing", 0, 2));
  EXPECT_NE(message_of(path, Code::kIo).find("missing-00002-of-00002.gguf"), std::string::npos);
}

TEST(GgufSplit, FilesThatDoNotBelongTogetherAreRefused) {
  const std::string path = shard(0, 2, 2).write(shard_name("mixed", 0, 2));
  const std::string second = shard_name("mixed", 1, 2);
  shard(0, 2, 2).write(second);
  EXPECT_NE(message_of(path, Code::kCorrupt).find("expected file 2 of 2"), std::string::npos);
  shard(1, 3, 3).write(second);
  EXPECT_NE(message_of(path, Code::kCorrupt).find("expected file 2 of 2"), std::string::npos);
  MkGguf().f32_tensor("t1", {1}, {1.0f}).write(second);  // no split keys at all
  EXPECT_NE(message_of(path, Code::kCorrupt).find("expected file 2 of 2"), std::string::npos);
  MkGguf same;
  same.u16("split.no", 1)
      .u16("split.count", 2)
      .i32("split.tensors.count", 2)
      .f32_tensor("t0", {1}, {1.0f})
      .write(second);
  EXPECT_NE(message_of(path, Code::kCorrupt).find("'t0' appears in two files"), std::string::npos);
  shard(1, 2, 2).f32_tensor("more", {1}, {1.0f}).write(second);
  EXPECT_NE(message_of(path, Code::kCorrupt).find("split.tensors.count is 2, but the 2 files hold 3"),
            std::string::npos);
  const std::string cut = shard(1, 2, 2).bytes();
  test::write_temp(second, std::string_view(cut).substr(0, cut.size() - 1));
  EXPECT_NE(message_of(path, Code::kCorrupt).find("file 2 of 2"), std::string::npos);
}

TEST(GgufSplit, AFurtherFileSaysNothingElse) {
  const std::string path = shard(0, 2, 2).write(shard_name("foreign", 0, 2));
  const std::string second = shard_name("foreign", 1, 2);
  shard(1, 2, 2).string("general.architecture", "llama").string("general.comment", "its own").write(second);
  EXPECT_TRUE(GgufFile::open(path).ok());
  shard(1, 2, 2).string("general.architecture", "qwen2").write(second);
  EXPECT_NE(message_of(path, Code::kCorrupt).find("key 'general.architecture' is not what the first file says"),
            std::string::npos);
}

TEST(GgufSplit, KeysAreChecked) {
  message_of(shard(5, 2, 2).write("number.gguf"), Code::kCorrupt);
  message_of(MkGguf().string("split.count", "2").write("text.gguf"), Code::kCorrupt);
  message_of(MkGguf().u32("split.count", 70000).write("many.gguf"), Code::kCorrupt);
  message_of(MkGguf().u32("split.count", 2).write("no_number.gguf"), Code::kCorrupt);
  // Left behind by a merge: one file.
  EXPECT_TRUE(GgufFile::open(MkGguf().u16("split.no", 0).u16("split.count", 0).write("merged.gguf")).ok());
  EXPECT_TRUE(GgufFile::open(MkGguf().u16("split.no", 0).u16("split.count", 1).write("single.gguf")).ok());
}

}  // namespace
}  // namespace longkv
