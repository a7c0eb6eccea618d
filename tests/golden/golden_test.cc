// The recordings themselves: complete, and consistent with their own summaries.
#include "support/golden.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <set>

#include "support/paths.h"

namespace longkv::test {
namespace {

std::vector<std::string> all_goldens() {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(golden("models"))) {
    if (entry.path().extension() == ".json") names.push_back(entry.path().stem());
  }
  return names;
}

TEST(Golden, EveryFamilyHasATinyModel) {
  std::set<std::string> families;
  for (const std::string& name : tiny_goldens()) families.insert(load_golden(name).family);
  EXPECT_EQ(families, (std::set<std::string>{"gemma3", "internlm2", "llama", "phi3", "qwen2", "qwen3"}));
}

TEST(Golden, RowsMatchTheirSummaries) {
  for (const std::string& name : all_goldens()) {
    const Golden g = load_golden(name);
    for (const GoldenCase& c : g.cases) {
      SCOPED_TRACE(name + " " + c.name);
      ASSERT_FALSE(c.positions.empty());
      for (size_t r = 0; r < c.positions.size(); ++r) {
        EXPECT_LT(c.positions[r], static_cast<int64_t>(c.ids.size()));
        double sum = 0;
        for (float v : c.logits[r]) sum += std::exp(static_cast<double>(v) - c.lse[r]);
        if (g.columns.empty()) {
          EXPECT_NEAR(sum, 1.0, 1e-9);
          const auto best = std::max_element(c.logits[r].begin(), c.logits[r].end());
          EXPECT_EQ(best - c.logits[r].begin(), c.top[r]);
          EXPECT_EQ(relative_error(g, c, r, c.logits[r]), 0.0);
        } else {
          EXPECT_LT(sum, 1.0 + 1e-9);
        }
      }
    }
    for (const GoldenGreedy& text : g.greedy) {
      EXPECT_EQ(text.continuation.size(), text.gap.size());
      EXPECT_GE(*std::min_element(text.gap.begin(), text.gap.end()), 0.0F);
    }
  }
}

TEST(Golden, PartingIsATieOnlyBelowTheLimit) {
  const GoldenGreedy text{{1}, {5, 6, 7}, {2.0F, 5e-4F, 1.0F}};
  EXPECT_EQ(first_parting(text, std::vector<int32_t>{5, 6, 7}).step, 3U);
  const Parting tie = first_parting(text, std::vector<int32_t>{5, 9, 7});
  EXPECT_EQ(tie.step, 1U);
  EXPECT_TRUE(tie.tie);
  EXPECT_FALSE(first_parting(text, std::vector<int32_t>{4, 6, 7}).tie);
}

}  // namespace
}  // namespace longkv::test
