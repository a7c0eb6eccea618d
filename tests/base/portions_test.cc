#include "base/portions.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "base/seconds.h"

namespace longkv {
namespace {

using Clock = std::chrono::steady_clock;

void spin(double seconds) {
  const auto begin = Clock::now();
  while (seconds_since(begin) < seconds) {
  }
}

TEST(Portions, NothingRunsUntilThereIsTime) {
  std::atomic<int> pieces{0};
  {
    Portions work([&](const Pause& pause) {
      for (int i = 0; i < 5; ++i) {
        ++pieces;
        pause_at(pause);
      }
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_EQ(pieces, 0);
  }
  EXPECT_EQ(pieces, 5) << "the end waits for all of it";
}

TEST(Portions, APortionEndsAtTheNextPause) {
  std::atomic<int> pieces{0};
  Portions work([&](const Pause& pause) {
    for (int i = 0; i < 100; ++i) {
      spin(0.001);
      ++pieces;
      pause_at(pause);
    }
  });
  EXPECT_FALSE(work.run_for(0.005));
  std::this_thread::sleep_for(std::chrono::milliseconds(10));
  const int some = pieces;
  EXPECT_GE(some, 1);
  EXPECT_LE(some, 7);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(pieces, some) << "and waits there";
  EXPECT_TRUE(work.run_for(10));
  EXPECT_EQ(pieces, 100);
  EXPECT_TRUE(work.run_for(0));
}

TEST(Portions, EvenPortionsOfNoTimeLeadToTheEnd) {
  std::atomic<int> pieces{0};
  Portions work([&](const Pause& pause) {
    for (int i = 0; i < 10; ++i) {
      ++pieces;
      pause_at(pause);
    }
  });
  int turns = 1;
  while (!work.run_for(0) && turns < 100000) {
    ++turns;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  EXPECT_EQ(pieces, 10);
  EXPECT_GE(turns, 10) << "a piece for each";
}

TEST(Portions, WorkThatDoesNotPauseHoldsNobody) {
  std::atomic<bool> waits{true};
  Portions work([&](const Pause&) {
    while (waits) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  });
  const auto begin = Clock::now();
  EXPECT_FALSE(work.run_for(0.005));
  EXPECT_LT(seconds_since(begin), 5);
  waits = false;
  EXPECT_TRUE(work.run_for(10));
}

}  // namespace
}  // namespace longkv
