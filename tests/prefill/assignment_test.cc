#include "prefill/assignment.h"

#include <gtest/gtest.h>

#include "base/log.h"

namespace longkv::testing {
namespace {

Result<PatternAssignment> parse(std::string_view text, MissingHeads missing = MissingHeads::kError) {
  PrefillSpec spec;
  spec.missing = missing;
  return parse_assignment(text, 2, 2, spec);
}

constexpr const char* kGood = R"([
  {"0": ["vertical_and_slash", 1000, 6096, 0.33], "1": ["stream_llm", 100, 800, 1]},
  {"1": ["block_sparse", 100, 0, 0.5], "0": ["vertical_and_slash", 30.0, 800, 2e9, "more"]}])";

TEST(AssignmentTest, ReadsPublishedFilesAndItsOwn) {
  const auto read = parse(kGood);
  ASSERT_TRUE(read.ok()) << read.status().message();
  const PatternAssignment expected{{{PrefillKind::kVerticalSlash, 1000, 6096}, {PrefillKind::kAShape, 100, 800}},
                                   {{PrefillKind::kVerticalSlash, 30, 800}, {PrefillKind::kBlockSparse, 100, 0}}};
  EXPECT_EQ(read.value(), expected);
  PatternAssignment all = expected;
  all[1][0] = HeadPattern{};
  const auto again = parse(write_assignment(all, {{1, 2}, {3, 4}}));
  ASSERT_TRUE(again.ok()) << again.status().message();
  EXPECT_EQ(again.value(), all);
}

TEST(AssignmentTest, UnknownPatternsAreDenseAndMoreLayersAreLeftOutWithANotice) {
  const int64_t before = notice_count();
  const auto read = parse(R"([{"0": ["spiral", 1, 2, 3], "1": ["a_shape", 1, 2, 3]},
                              {"0": ["dense", 0, 0, 0], "1": ["dense", 0, 0, 0]}, {"0": ["a_shape", 1, 1, 1]}])");
  ASSERT_TRUE(read.ok()) << read.status().message();
  EXPECT_EQ(read.value()[0][0], HeadPattern{});
  EXPECT_EQ(read.value()[0][1], (HeadPattern{PrefillKind::kAShape, 1, 2}));
  EXPECT_EQ(notice_count(), before + 2);
}

TEST(AssignmentTest, MissingHeadsAndLayersAreErrorsUnlessAskedFor) {
  const char* head = R"([{"0": ["a_shape", 1, 2, 3]}, {"0": ["a_shape", 1, 2, 3], "1": ["a_shape", 1, 2, 3]}])";
  const char* layer = R"([{"0": ["a_shape", 1, 2, 3], "1": ["a_shape", 1, 2, 3]}])";
  for (const char* text : {head, layer}) {
    const auto strict = parse(text);
    ASSERT_FALSE(strict.ok());
    EXPECT_EQ(strict.status().code(), Code::kInvalidArgument);
    EXPECT_NE(strict.status().message().find("missing=vertical_slash"), std::string::npos);
    const auto filled = parse(text, MissingHeads::kVerticalSlash);
    ASSERT_TRUE(filled.ok());
    const HeadPattern fallback{PrefillKind::kVerticalSlash, 1000, 6096};
    EXPECT_EQ(text == head ? filled.value()[0][1] : filled.value()[1][0], fallback);
  }
}

TEST(AssignmentTest, DamagedFilesAreRefused) {
  const char* bad[] = {"",
                       "{",
                       "{}",
                       "[1, 2]",
                       R"([{"0": 5, "1": 5}, {}])",
                       R"([{"0": ["a_shape", 1], "1": ["a_shape", 1, 2]}, {}])",
                       R"([{"0": [3, 1, 2], "1": ["a_shape", 1, 2]}, {}])",
                       R"([{"0": ["a_shape", -1, 2]}, {}])",
                       R"([{"0": ["a_shape", 1.5, 2]}, {}])",
                       R"([{"0": ["a_shape", 1e300, 2]}, {}])",
                       R"([{"0": ["a_shape", "1", 2]}, {}])",
                       R"([{"x": ["a_shape", 1, 2]}, {}])",
                       R"([{"-1": ["a_shape", 1, 2]}, {}])",
                       R"([{"0 ": ["a_shape", 1, 2]}, {}])",
                       R"([{"2": ["a_shape", 1, 2]}, {}])",
                       R"([{"99999999999999999999": ["a_shape", 1, 2]}, {}])"};
  for (const char* text : bad) EXPECT_FALSE(parse(text, MissingHeads::kVerticalSlash).ok()) << text;
  EXPECT_FALSE(parse(std::string(100000, '['), MissingHeads::kVerticalSlash).ok());
}

TEST(AssignmentTest, FileThatIsNotThere) {
  PrefillSpec spec;
  spec.file = "/nonexistent/assignment.json";
  const auto read = load_assignment(spec, 1, 1);
  ASSERT_FALSE(read.ok());
  EXPECT_EQ(read.status().code(), Code::kIo);
}

}  // namespace
}  // namespace longkv::testing
