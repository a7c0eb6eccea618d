#include "gguf/writer.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>

#include "gguf/gguf.h"
#include "support/mkgguf.h"
#include "support/paths.h"

namespace longkv {
namespace {

std::span<const uint8_t> bytes_of(const std::vector<float>& v) {
  return {reinterpret_cast<const uint8_t*>(v.data()), v.size() * sizeof(float)};
}

TEST(GgufWriter, WhatIsWrittenIsRead) {
  std::vector<float> small(3), large(64 * 5);
  std::iota(small.begin(), small.end(), 1.0f);
  std::iota(large.begin(), large.end(), 100.0f);
  const std::vector<uint8_t> quantised(2 * 34, 0x11);
  const std::vector<std::string> words = {"a", "", std::string("b\0c", 3)};
  const std::vector<int32_t> ints = {-1, 2};
  const std::vector<uint32_t> naturals = {7};
  const std::vector<float> reals = {0.5f, 0.25f, 0.125f};

  GgufWriter w;
  EXPECT_TRUE(w.add_string("general.architecture", "llama").ok());
  EXPECT_TRUE(w.add_u32("u32", 4000000000u).ok());
  EXPECT_TRUE(w.add_i32("i32", -5).ok());
  EXPECT_TRUE(w.add_u64("u64", uint64_t(1) << 50).ok());
  EXPECT_TRUE(w.add_i64("i64", -(int64_t(1) << 50)).ok());
  EXPECT_TRUE(w.add_f32("f32", 1.5f).ok());
  EXPECT_TRUE(w.add_f64("f64", 1e200).ok());
  EXPECT_TRUE(w.add_bool("bool", true).ok());
  EXPECT_TRUE(w.add_strings("words", words).ok());
  EXPECT_TRUE(w.add_i32s("ints", ints).ok());
  EXPECT_TRUE(w.add_u32s("naturals", naturals).ok());
  EXPECT_TRUE(w.add_f32s("reals", reals).ok());
  EXPECT_TRUE(w.add_tensor("small", TensorType::kF32, std::vector<int64_t>{3}, bytes_of(small)).ok());
  EXPECT_TRUE(w.add_tensor("large", TensorType::kF32, std::vector<int64_t>{64, 5}, bytes_of(large)).ok());
  EXPECT_TRUE(w.add_tensor("q", TensorType::kQ8_0, std::vector<int64_t>{32, 1, 2}, quantised).ok());
  const std::string path = test::temp_path("written.gguf");
  const Status status = w.write(path);
  ASSERT_TRUE(status.ok()) << status.message();

  const auto file = GgufFile::open(path);
  ASSERT_TRUE(file.ok()) << file.status().message();
  const Metadata& m = file->metadata();
  EXPECT_EQ(m.all().size(), 12u);
  EXPECT_EQ(m.integer("u32", 0, INT64_MAX).value(), 4000000000);
  EXPECT_EQ(m.integer("i32", -9, 0).value(), -5);
  EXPECT_EQ(m.integer("u64", 0, INT64_MAX).value(), int64_t(1) << 50);
  EXPECT_EQ(m.integer("i64", INT64_MIN, 0).value(), -(int64_t(1) << 50));
  EXPECT_EQ(m.real("f32").value(), 1.5);
  EXPECT_EQ(m.real("f64").value(), 1e200);
  EXPECT_TRUE(m.boolean("bool").value());
  EXPECT_EQ(m.strings("words").value()[2], std::string_view("b\0c", 3));
  EXPECT_EQ(m.integers("ints", 2, -9, 9).value()[0], -1);
  EXPECT_EQ(m.integers("naturals", 1, 0, 9).value()[0], 7);
  EXPECT_EQ(m.reals("reals", 3).value()[2], 0.125);
  const TensorInfo* t = file->find("large");
  ASSERT_NE(t, nullptr);
  ASSERT_EQ(t->bytes, large.size() * 4);
  EXPECT_EQ(std::memcmp(t->data, large.data(), t->bytes), 0);
  EXPECT_EQ(std::memcmp(file->find("small")->data, small.data(), 12), 0);
  EXPECT_EQ(file->find("q")->dims, (std::array<int64_t, 4>{32, 1, 2, 1}));
  EXPECT_EQ(std::memcmp(file->find("q")->data, quantised.data(), quantised.size()), 0);
}

TEST(GgufWriter, RefusesWhatTheReaderWouldRefuse) {
  GgufWriter w;
  const std::vector<float> one = {1.0f};
  const auto add = [&](std::string_view name, TensorType type, std::vector<int64_t> dims) {
    return w.add_tensor(name, type, dims, bytes_of(one)).code();
  };
  EXPECT_TRUE(w.add_u32("k", 1).ok());
  EXPECT_EQ(w.add_f32("k", 1).code(), Code::kInvalidArgument);
  EXPECT_EQ(w.add_u32("", 1).code(), Code::kInvalidArgument);
  EXPECT_EQ(w.add_u32(std::string(70000, 'k'), 1).code(), Code::kInvalidArgument);
  EXPECT_EQ(add("", TensorType::kF32, {1}), Code::kInvalidArgument);
  EXPECT_EQ(add(std::string(64, 'n'), TensorType::kF32, {1}), Code::kInvalidArgument);
  EXPECT_EQ(add("t", TensorType::kF32, {2}), Code::kInvalidArgument);
  EXPECT_EQ(add("t", TensorType::kF32, {}), Code::kInvalidArgument);
  EXPECT_EQ(add("t", TensorType::kF32, {1, 1, 1, 1, 1}), Code::kInvalidArgument);
  EXPECT_EQ(add("t", TensorType::kF32, {1, 0}), Code::kInvalidArgument);
  EXPECT_EQ(add("t", TensorType::kF32, {1, -1}), Code::kInvalidArgument);
  EXPECT_EQ(add("t", TensorType::kF32, {1, int64_t(1) << 62, 16}), Code::kInvalidArgument);
  EXPECT_EQ(add("t", TensorType::kQ8_0, {1}), Code::kCorrupt);
  EXPECT_EQ(add("t", TensorType::kF32, {1}), Code::kOk);
  EXPECT_EQ(add("t", TensorType::kF32, {1}), Code::kInvalidArgument);
}

TEST(GgufWriter, AFailedWriteLeavesTheOldFileAndNothingElse) {
  namespace fs = std::filesystem;
  const fs::path dir = test::temp_path("atomic");
  fs::create_directories(dir / "target");  // a directory cannot be replaced by a file
  std::ofstream(dir / "target" / "inside") << "old";
  GgufWriter w;
  EXPECT_TRUE(w.add_u32("k", 1).ok());
  EXPECT_EQ(w.write((dir / "target").string()).code(), Code::kIo);
  EXPECT_TRUE(fs::exists(dir / "target" / "inside"));
  EXPECT_EQ(std::distance(fs::directory_iterator(dir), {}), 1);
  EXPECT_EQ(w.write((dir / "absent" / "x.gguf").string()).code(), Code::kIo);

  const std::string path = (dir / "x.gguf").string();
  std::ofstream(path) << "something older and longer than nothing";
  ASSERT_TRUE(w.write(path).ok());
  EXPECT_EQ(GgufFile::open(path)->metadata().integer("k", 0, 9).value(), 1);
  EXPECT_EQ(std::distance(fs::directory_iterator(dir), {}), 2);
  struct stat st {};
  ASSERT_EQ(::stat(path.c_str(), &st), 0);
  EXPECT_NE(st.st_mode & S_IRUSR, 0u);
}

TEST(MkGguf, AgreesWithTheWriter) {
  const std::vector<float> values = {1, 2, 3};
  GgufWriter w;
  EXPECT_TRUE(w.add_string("s", "text").ok());
  EXPECT_TRUE(w.add_f32("f", 0.5f).ok());
  EXPECT_TRUE(w.add_tensor("t", TensorType::kF32, std::vector<int64_t>{3}, bytes_of(values)).ok());
  EXPECT_TRUE(w.add_tensor("u", TensorType::kF32, std::vector<int64_t>{1, 3}, bytes_of(values)).ok());
  const std::string path = test::temp_path("agree.gguf");
  ASSERT_TRUE(w.write(path).ok());
  std::ifstream in(path, std::ios::binary);
  const std::string written((std::istreambuf_iterator<char>(in)), {});
  test::MkGguf mk;
  mk.string("s", "text").f32("f", 0.5f).f32_tensor("t", {3}, values).f32_tensor("u", {1, 3}, values);
  EXPECT_EQ(written, mk.bytes());
}

}  // namespace
}  // namespace longkv
