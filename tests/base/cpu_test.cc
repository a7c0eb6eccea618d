#include "base/cpu.h"

#include <gtest/gtest.h>
#include <hwy/targets.h>

namespace longkv {
namespace {

// If the first kernel chose, threads beside it could meet targets that are off, and their bits would differ.
TEST(ActiveIsa, TargetsAreChosenBeforeAnyKernelRuns) {
  for (const IsaLevel level : available_isa_levels()) {
    SCOPED_TRACE(isa_name(level));
    ASSERT_TRUE(set_active_isa(level).ok());
    EXPECT_TRUE(hwy::GetChosenTarget().IsInitialized());
    EXPECT_EQ(active_isa(), level);
  }
}

}  // namespace
}  // namespace longkv
