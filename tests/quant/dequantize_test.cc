#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <iterator>
#include <set>
#include <vector>

#include "quant/block_formats.h"
#include "quant/tensor_type.h"
#include "support/paths.h"

namespace longkv {
namespace {

constexpr TensorType kAllTypes[] = {TensorType::kF32,  TensorType::kF16,    TensorType::kBF16,  TensorType::kQ4_0,
                                    TensorType::kQ4_1, TensorType::kQ5_0,   TensorType::kQ5_1,  TensorType::kQ8_0,
                                    TensorType::kQ2_K, TensorType::kQ3_K,   TensorType::kQ4_K,  TensorType::kQ5_K,
                                    TensorType::kQ6_K, TensorType::kIQ4_NL, TensorType::kIQ4_XS};

struct Golden {
  TensorType type;
  std::vector<uint8_t> bytes;
  std::vector<float> values;
};

std::vector<Golden> read_goldens() {
  std::ifstream in(test::golden("quant_goldens.bin"), std::ios::binary);
  const std::vector<char> file((std::istreambuf_iterator<char>(in)), {});
  size_t at = 4;
  const auto u32 = [&] {
    uint32_t v = 0;
    std::memcpy(&v, file.data() + at, 4);
    at += 4;
    return v;
  };
  std::vector<Golden> goldens;
  if (file.size() < 8) return goldens;
  for (uint32_t left = u32(); left > 0; --left) {
    Golden g;
    g.type = TensorType(u32());
    g.bytes.resize(u32());
    g.values.resize(u32());
    std::memcpy(g.bytes.data(), file.data() + at, g.bytes.size());
    at += g.bytes.size();
    std::memcpy(g.values.data(), file.data() + at, g.values.size() * 4);
    at += g.values.size() * 4;
    goldens.push_back(std::move(g));
  }
  return goldens;
}

TEST(Dequantize, EqualsTheRecordedValuesOfEveryType) {
  std::set<TensorType> seen;
  for (const Golden& g : read_goldens()) {
    const TensorTypeInfo* info = tensor_type_info(g.type);
    ASSERT_NE(info, nullptr) << uint32_t(g.type);
    seen.insert(g.type);
    ASSERT_EQ(int64_t(g.values.size()) / info->block_values * info->block_bytes, int64_t(g.bytes.size())) << info->name;
    std::vector<float> out(g.values.size(), NAN);
    dequantize(g.type, g.bytes.data(), out.data(), int64_t(out.size()));
    for (size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], g.values[i]) << info->name << " value " << i;
  }
  EXPECT_EQ(seen.size(), std::size(kAllTypes));
}

TEST(Dequantize, ReadsFromAnyAddressAndWritesNothingElse) {
  for (const Golden& g : read_goldens()) {
    const TensorTypeInfo* info = tensor_type_info(g.type);
    std::vector<uint8_t> shifted(g.bytes.size() + 1);
    std::memcpy(shifted.data() + 1, g.bytes.data(), g.bytes.size());
    const size_t n = size_t(info->block_values);  // one block of several
    std::vector<float> out(n + 1, -7.0f);
    dequantize(g.type, shifted.data() + 1, out.data(), int64_t(n));
    for (size_t i = 0; i < n; ++i) ASSERT_EQ(out[i], g.values[i]) << info->name;
    EXPECT_EQ(out[n], -7.0f) << info->name;
    dequantize(g.type, shifted.data() + 1, out.data(), 0);
    EXPECT_EQ(out[0], g.values[0]);
  }
}

// Structured blocks whose values follow from the format's formula alone, independent of the recorded file.
TEST(Dequantize, ScalesReachTheirGroups) {
  BlockQ4_K b{};
  b.d = to_f16(1.0f);
  b.dmin = to_f16(0.5f);
  // Scale g+1 and min 2g for groups 0-3; 40+g and 50+g for groups 4-7.
  for (int g = 0; g < 4; ++g) {
    b.scales[g] = uint8_t((g + 1) | (((40 + g) >> 4) << 6));
    b.scales[4 + g] = uint8_t((2 * g) | (((50 + g) >> 4) << 6));
    b.scales[8 + g] = uint8_t(((40 + g) & 15) | (((50 + g) & 15) << 4));
  }
  std::memset(b.qs, 0x32, sizeof b.qs);  // 2 in even groups, 3 in odd ones
  std::vector<float> out(kSuperBlock);
  dequantize(TensorType::kQ4_K, reinterpret_cast<const uint8_t*>(&b), out.data(), kSuperBlock);
  for (int i = 0; i < kSuperBlock; ++i) {
    const int g = i / 32;
    const int scale = g < 4 ? g + 1 : 36 + g;
    const int min = g < 4 ? 2 * g : 46 + g;
    EXPECT_EQ(out[size_t(i)], float(scale * (g % 2 ? 3 : 2)) - 0.5f * float(min)) << i;
  }
}

TEST(TensorTypeInfo, KnowsEveryTypeAndNoOther) {
  std::set<std::string> names;
  for (TensorType type : kAllTypes) {
    const TensorTypeInfo* info = tensor_type_info(type);
    ASSERT_NE(info, nullptr);
    EXPECT_GT(info->block_bytes, 0);
    EXPECT_TRUE(names.insert(info->name).second) << info->name;
  }
  for (uint32_t id : {4u, 5u, 9u, 15u, 16u, 24u, 31u, 38u, 39u, 43u, 0x80000000u, ~0u}) {
    EXPECT_EQ(tensor_type_info(TensorType(id)), nullptr) << id;
  }
}

TEST(RowBytes, CountsWholeBlocksAndRefusesTheRest) {
  EXPECT_EQ(row_bytes(TensorType::kF32, 3).value(), 12);
  EXPECT_EQ(row_bytes(TensorType::kQ8_0, 64).value(), 68);
  EXPECT_EQ(row_bytes(TensorType::kQ6_K, 512).value(), 420);
  EXPECT_EQ(row_bytes(TensorType::kQ4_K, 0).value(), 0);
  EXPECT_EQ(row_bytes(TensorType::kQ4_K, 128).status().code(), Code::kCorrupt);
  EXPECT_EQ(row_bytes(TensorType::kQ8_0, 33).status().code(), Code::kCorrupt);
  EXPECT_EQ(row_bytes(TensorType::kF32, -1).status().code(), Code::kCorrupt);
  EXPECT_EQ(row_bytes(TensorType::kF32, int64_t(1) << 62).status().code(), Code::kCorrupt);
  EXPECT_EQ(row_bytes(TensorType(4), 32).status().code(), Code::kUnsupported);
}

}  // namespace
}  // namespace longkv
