#include "base/log.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

namespace longkv {
namespace {

int64_t lines_of(const std::string& text) { return std::count(text.begin(), text.end(), '\n'); }

TEST(Notice, ARepeatedTextIsPrintedByPowersOfTen) {
  const int64_t before = notice_count();
  testing::internal::CaptureStderr();
  for (int i = 0; i < 250; ++i) EXPECT_TRUE(notice("the test repeats itself").ok());
  EXPECT_TRUE(notice("the test says something else").ok());
  EXPECT_EQ(testing::internal::GetCapturedStderr(),
            "note: the test repeats itself\nnote: the test repeats itself (10 times)\n"
            "note: the test repeats itself (100 times)\nnote: the test says something else\n");
  EXPECT_EQ(notice_count() - before, 251);
}

TEST(Notice, ThreadsShareTheCount) {
  testing::internal::CaptureStderr();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([] {
      for (int i = 0; i < 250; ++i) (void)notice("threads say the same");
    });
  }
  for (std::thread& t : threads) t.join();
  const std::string said = testing::internal::GetCapturedStderr();
  EXPECT_EQ(lines_of(said), 4) << said;
  EXPECT_NE(said.find("(1000 times)"), std::string::npos) << said;
}

TEST(Notice, TextsWithoutNumberAreAllPrinted) {
  testing::internal::CaptureStderr();
  for (int i = 0; i < 3000; ++i) (void)notice("request " + std::to_string(i));
  EXPECT_EQ(lines_of(testing::internal::GetCapturedStderr()), 3000);
}

TEST(Notice, StrictModeMakesAnErrorOfEveryOne) {
  set_strict(true);
  for (int i = 0; i < 3; ++i) {
    const Status status = notice("something is ignored");
    EXPECT_FALSE(status.ok());
    EXPECT_NE(status.message().find("something is ignored"), std::string::npos);
  }
  set_strict(false);
}

}  // namespace
}  // namespace longkv
