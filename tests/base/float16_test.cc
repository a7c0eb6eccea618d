#include "base/float16.h"

#include <gtest/gtest.h>

#include <cmath>

#include "support/half.h"

namespace longkv {
namespace {

TEST(Float16, EveryHalfSurvivesARoundTrip) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const f16_t h{uint16_t(bits)};
    const float f = to_float(h);
    if (std::isnan(f)) {
      EXPECT_TRUE(std::isnan(to_float(to_f16(f))));
    } else {
      ASSERT_EQ(to_f16(f).bits, h.bits) << bits;
    }
  }
}

TEST(Float16, MatchesTheDefinition) {
  for (uint64_t bits = 0; bits < (uint64_t(1) << 32); bits += 9973) {
    const float f = std::bit_cast<float>(uint32_t(bits));
    if (std::isnan(f)) continue;
    const auto reference = test::nearest_half(f);
    ASSERT_EQ(to_f16(f).bits, reference) << f;
  }
}

TEST(Bfloat16, RoundsToNearestEven) {
  EXPECT_EQ(to_bf16(1.0f).bits, 0x3f80);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f808000u)).bits, 0x3f80);
  EXPECT_EQ(to_bf16(std::bit_cast<float>(0x3f818000u)).bits, 0x3f82);
  EXPECT_TRUE(std::isnan(to_float(to_bf16(NAN))));
}

}  // namespace
}  // namespace longkv
