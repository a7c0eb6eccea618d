#include "base/threads.h"

#include <gtest/gtest.h>

#include <chrono>
#include <new>
#include <numeric>
#include <vector>

namespace longkv {
namespace {

TEST(ThreadPool, RunsEveryTaskOnce) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int64_t tasks : {0, 1, 2, 7, 1000}) {
      std::vector<std::atomic<int>> hits(tasks);
      for (int round = 1; round <= 50; ++round) {
        pool.run(tasks, [&](int64_t t, int w) {
          ASSERT_LT(w, threads);
          hits[t].fetch_add(1);
        });
        for (auto& h : hits) ASSERT_EQ(h.load(), round);
      }
    }
  }
}

TEST(ThreadPool, WakesSleepingWorkers) {
  ThreadPool pool(3);
  for (int round = 0; round < 3; ++round) {
    std::this_thread::sleep_for(std::chrono::milliseconds(30));
    std::atomic<int> sum{0};
    pool.run(100, [&](int64_t t, int) { sum += int(t); });
    EXPECT_EQ(sum.load(), 4950);
  }
}

TEST(ThreadPool, WhatATaskThrowsLeavesRunWhenNobodyIsInside) {
  for (int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (int64_t bad : {0, 1, 57, 99}) {
      std::atomic<int> inside{0}, begun{0};
      bool caught = false;
      try {
        pool.run(100, [&](int64_t t, int) {
          inside.fetch_add(1);
          begun.fetch_add(1);
          std::this_thread::sleep_for(std::chrono::microseconds(50));
          inside.fetch_sub(1);
          if (t >= bad) throw std::bad_alloc();
        });
      } catch (const std::bad_alloc&) {
        caught = true;
        EXPECT_EQ(inside.load(), 0) << "a task still uses what the caller is about to leave";
      }
      EXPECT_TRUE(caught) << threads << " threads, task " << bad;
      EXPECT_GT(begun.load(), bad);
      // The next job knows nothing of it.
      std::atomic<int> sum{0};
      pool.run(100, [&](int64_t t, int) { sum += int(t); });
      EXPECT_EQ(sum.load(), 4950);
    }
  }
}

}  // namespace
}  // namespace longkv
