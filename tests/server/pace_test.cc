#include "server/pace.h"

#include <gtest/gtest.h>

namespace longkv::server {
namespace {

Pace after_steps(double share, double seconds) {
  Pace pace(share, 4);
  for (int i = 0; i < 200; ++i) pace.step(1, seconds, false);
  return pace;
}

TEST(Pace, NothingIsKnownAtFirst) {
  Pace pace(0.5, 2);
  EXPECT_EQ(pace.ordinary_step(), 0);
  EXPECT_EQ(pace.budget(), 0);
  EXPECT_EQ(pace.token_seconds(), 0);
}

TEST(Pace, StepsBesidePromptsCountOnlyWhereThereAreNoOthers) {
  Pace pace(0.5, 4);
  for (int i = 0; i < 200; ++i) pace.step(2, 0.009, true);
  EXPECT_NEAR(pace.ordinary_step(), 0.009, 0.001);
  for (int i = 0; i < 200; ++i) pace.step(2, 0.005, false);
  EXPECT_NEAR(pace.ordinary_step(), 0.005, 0.0005);
  for (int i = 0; i < 200; ++i) pace.step(2, 0.02, true);
  EXPECT_NEAR(pace.ordinary_step(), 0.005, 0.0005) << "an answer that grows beside a prompt gives it no more time";
  EXPECT_NEAR(pace.budget(), 0.0025, 0.0003);
  pace.step(4, 0.012, false);
  EXPECT_NEAR(pace.ordinary_step(), 0.012, 0.001) << "another number of slots";
}

TEST(Pace, FewStretchedValuesMoveLittle) {
  Pace pace = after_steps(0.5, 0.005);
  for (int i = 0; i < 1000; ++i) pace.step(1, i % 10 == 0 ? 0.1 : 0.005, false);
  EXPECT_LT(pace.ordinary_step(), 0.007);
  for (int i = 0; i < 1000; ++i) pace.piece(32, i % 10 == 0 ? 0.1 : 0.0016);
  EXPECT_NEAR(pace.token_seconds(), 0.00005, 0.00001);
}

TEST(Pace, LongTurnsGetNoOtherWorkButNotForEver) {
  Pace pace = after_steps(0.5, 0.005);
  const double step = pace.ordinary_step();
  EXPECT_FALSE(pace.late(1.2 * step, 0.3 * step));
  EXPECT_FALSE(pace.late(1.6 * step, 0.3 * step));
  EXPECT_TRUE(pace.late(1.8 * step, 0.3 * step));
  EXPECT_FALSE(pace.late(1.2 * step, 0.3 * step)) << "the next is in time";
  int late = 0;
  for (int i = 0; i < 40; ++i) late += pace.late(5 * step, 0.3 * step);
  EXPECT_EQ(late, 30) << "three in a row, then one all the same";
  Pace generous = after_steps(10, 0.005);
  EXPECT_FALSE(generous.late(5 * step, 4 * step)) << "who grants prompts much time does not mind";
}

}  // namespace
}  // namespace longkv::server
