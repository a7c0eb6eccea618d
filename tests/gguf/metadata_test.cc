// Getters: types and ranges are checked, never assumed.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "gguf/gguf.h"
#include "support/mkgguf.h"

namespace longkv {
namespace {

using test::MkGguf;

class MetadataTest : public testing::Test {
 protected:
  void SetUp() override {
    MkGguf mk;
    mk.u32("blocks", 513)
        .i32("negative", -1)
        .u64("huge", UINT64_MAX)
        .f32("eps", 1e-5f)
        .f32("nan", NAN)
        .f64("inf", INFINITY);
    mk.boolean("flag", true)
        .string("text", "hello")
        .i32s("per_layer", {4, 4, 2})
        .u32s("none", {})
        .strings("words", {"a"});
    mk.f32s("scores", {0.0f, -std::numeric_limits<float>::infinity()}).bools("window", {1, 0}).u8("byte", 7);
    auto file = GgufFile::open(mk.write("metadata.gguf"));
    ASSERT_TRUE(file.ok()) << file.status().message();
    file_ = std::move(file).value();
  }
  const Metadata& m() const { return file_.metadata(); }

 private:
  GgufFile file_;
};

template <class T>
void expect_error(const Result<T>& result, Code code, const char* part) {
  ASSERT_FALSE(result.ok()) << part;
  EXPECT_EQ(result.status().code(), code);
  EXPECT_NE(result.status().message().find(part), std::string::npos) << result.status().message();
}

TEST_F(MetadataTest, IntegersAreRangeChecked) {
  EXPECT_EQ(m().integer("blocks", 1, 513).value(), 513);
  expect_error(m().integer("blocks", 1, 512), Code::kCorrupt, "key 'blocks' is 513; expected 1 to 512");
  expect_error(m().integer("negative", 0, 512), Code::kCorrupt, "is -1");
  expect_error(m().integer("huge", INT64_MIN, INT64_MAX), Code::kCorrupt, "18446744073709551615");
  expect_error(m().integer("eps", 0, 9), Code::kCorrupt, "is f32; expected an integer");
  expect_error(m().integer("flag", 0, 9), Code::kCorrupt, "is bool");
  expect_error(m().integer("per_layer", 0, 9), Code::kCorrupt, "array of 3 i32");
  expect_error(m().integer("absent", 0, 9), Code::kCorrupt, "'absent' is missing");
}

TEST_F(MetadataTest, OtherScalarsAreTypeChecked) {
  EXPECT_EQ(m().real("eps").value(), double(1e-5f));
  expect_error(m().real("nan"), Code::kCorrupt, "finite");
  expect_error(m().real("inf"), Code::kCorrupt, "finite");
  expect_error(m().real("blocks"), Code::kCorrupt, "is u32");
  expect_error(m().boolean("byte"), Code::kCorrupt, "is u8");
  expect_error(m().boolean("absent"), Code::kCorrupt, "missing");
  EXPECT_EQ(m().string("text").value(), "hello");
  expect_error(m().string("words"), Code::kCorrupt, "array of 1 string");
  expect_error(m().strings("text"), Code::kCorrupt, "is string");
  expect_error(m().strings("per_layer"), Code::kCorrupt, "array of 3 i32");
}

TEST_F(MetadataTest, ScalarsAreBroadcastAndArraysMustFit) {
  EXPECT_EQ(m().integers("per_layer", 3, 0, 9).value(), (std::vector<int64_t>{4, 4, 2}));
  EXPECT_EQ(m().integers("byte", 4, 0, 9).value(), (std::vector<int64_t>(4, 7)));
  EXPECT_EQ(m().integers("byte", -1, 0, 9).value(), (std::vector<int64_t>{7}));
  EXPECT_TRUE(m().integers("none", -1, 0, 9).value().empty());
  expect_error(m().integers("per_layer", 2, 0, 9), Code::kCorrupt, "has 3 elements; expected 2");
  expect_error(m().integers("per_layer", 3, 3, 9), Code::kCorrupt, "is 2; expected 3 to 9");
  expect_error(m().integers("scores", 2, 0, 9), Code::kCorrupt, "array of 2 f32");
  EXPECT_TRUE(std::isinf(m().reals("scores", 2).value()[1]));
  EXPECT_EQ(m().reals("eps", 2).value().size(), 2u);
  expect_error(m().reals("scores", 100), Code::kCorrupt, "has 2 elements; expected 100");
  EXPECT_EQ(m().booleans("window", -1).value(), (std::vector<bool>{true, false}));
  EXPECT_EQ(m().booleans("flag", 3).value(), (std::vector<bool>{true, true, true}));
  expect_error(m().booleans("byte", 1), Code::kCorrupt, "is u8");
}

TEST_F(MetadataTest, DefaultsStandInForAbsentKeysOnly) {
  EXPECT_EQ(m().integer_or("absent", 0, 9, -3).value(), -3);
  EXPECT_EQ(m().real_or("absent", 0.5).value(), 0.5);
  EXPECT_TRUE(m().boolean_or("absent", true).value());
  EXPECT_EQ(m().string_or("absent", "x").value(), "x");
  EXPECT_EQ(m().string_or("text", "x").value(), "hello");
  expect_error(m().integer_or("text", 0, 9, 1), Code::kCorrupt, "is string");
  expect_error(m().real_or("text", 1.0), Code::kCorrupt, "is string");
  expect_error(m().boolean_or("text", false), Code::kCorrupt, "is string");
  expect_error(m().string_or("eps", "x"), Code::kCorrupt, "is f32");
}

}  // namespace
}  // namespace longkv
