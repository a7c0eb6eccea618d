// Files that are wrong in one chosen way: each is refused with a message that names what is wrong.
#include <gtest/gtest.h>

#include <filesystem>
#include <random>
#include <set>

#include "gguf/gguf.h"
#include "gguf/parse.h"
#include "support/mkgguf.h"
#include "support/paths.h"

namespace longkv {
namespace {

using test::Bytes;
using test::MkGguf;

constexpr uint32_t kArrayId = uint32_t(GgufType::kArray);
constexpr uint32_t kStringId = uint32_t(GgufType::kString);

// In memory: GgufFile::open adds only the mapping and the path.
Result<GgufShard> parse(const std::string& content) {
  return parse_gguf({reinterpret_cast<const uint8_t*>(content.data()), content.size()});
}

void expect_refused(const std::string& content, Code code, const std::vector<std::string>& parts) {
  const auto file = parse(content);
  ASSERT_FALSE(file.ok()) << parts[0];
  EXPECT_EQ(file.status().code(), code) << file.status().message();
  for (const std::string& part : parts) {
    EXPECT_NE(file.status().message().find(part), std::string::npos)
        << "'" << part << "' in " << file.status().message();
  }
}

void expect_corrupt(const MkGguf& mk, const std::vector<std::string>& parts) {
  expect_refused(mk.bytes(), Code::kCorrupt, parts);
}

MkGguf sound() {
  MkGguf mk;
  mk.string("general.architecture", "llama").u32("llama.block_count", 2).strings("tokenizer.ggml.tokens", {"a", "bc"});
  mk.bools("flags", {1, 0}).f32_tensor("a", {3, 2}, {1, 2, 3, 4, 5, 6}).zeros("b", TensorType::kQ8_0, {64, 2});
  return mk;
}

TEST(GgufHeader, RefusesOtherFilesVersionsAndByteOrders) {
  expect_refused("", Code::kCorrupt, {"truncated"});
  expect_refused("GG", Code::kCorrupt, {"truncated"});
  expect_refused("PK\x03\x04xxxxxxxxxxxxxxxxxxxxxxxx", Code::kCorrupt, {"not a GGUF file", "PK\\x03\\x04"});
  expect_refused("tjggxxxxxxxxxxxxxxxxxxxxxxxx", Code::kUnsupported, {"older than GGUF", "convert"});
  for (const auto& [version, part] :
       std::initializer_list<std::pair<uint32_t, const char*>>{{0, "version 0"},
                                                               {1, "version 1"},
                                                               {4, "version 4"},
                                                               {0x03000000, "big-endian"},
                                                               {0x02000000, "big-endian"}}) {
    MkGguf mk = sound();
    mk.version = version;
    expect_refused(mk.bytes(), Code::kUnsupported, {part});
  }
}

TEST(GgufHeader, CountsAreBoundedByTheBytesLeft) {
  // Sizes of structures that a reader might multiply the count by; the product wraps for each.
  for (uint64_t size = 1; size <= 512; ++size) {
    MkGguf tensors;
    tensors.tensor_count = (uint64_t(1) << 63) / size;
    expect_corrupt(tensors, {"tensors"});
    MkGguf pairs;
    pairs.pair_count = UINT64_MAX / size;
    expect_corrupt(pairs, {"key-value pairs"});
  }
  MkGguf one_more = sound();
  one_more.tensor_count = 3;
  EXPECT_FALSE(parse(one_more.bytes()).ok());
  one_more = sound();
  one_more.pair_count = 5;
  EXPECT_FALSE(parse(one_more.bytes()).ok());
}

TEST(GgufPairs, LengthsAreCheckedBeforeAnythingIsAllocated) {
  const auto with_key_length = [](uint64_t length) {
    return Bytes()
        .raw("GGUF")
        .number(uint32_t(3))
        .number(uint64_t(0))
        .number(uint64_t(1))
        .number(length)
        .raw("abcdefgh")
        .str();
  };
  for (uint64_t length : {uint64_t(1) << 40, UINT64_MAX, UINT64_MAX - 7, uint64_t(1) << 63, uint64_t(70000)}) {
    expect_refused(with_key_length(length), Code::kCorrupt, {"key"});
  }
  for (uint64_t length : {uint64_t(1) << 40, UINT64_MAX, uint64_t(1) << 29, uint64_t(1000)}) {
    expect_corrupt(MkGguf().raw_pair("k", kStringId, Bytes().number(length).str()), {"key 'k'"});
    expect_corrupt(MkGguf().raw_pair("k", kArrayId, Bytes().array(GgufType::kU8, length).str()), {"key 'k'", "array"});
    expect_corrupt(MkGguf().raw_pair("k", kArrayId, Bytes().array(GgufType::kF64, length).str()), {"key 'k'", "array"});
    expect_corrupt(MkGguf().raw_pair("k", kArrayId, Bytes().array(GgufType::kString, length).str()), {"key 'k'"});
    expect_corrupt(MkGguf().raw_pair("k", kArrayId, Bytes().array(GgufType::kString, 1).number(length).raw("x").str()),
                   {"key 'k'"});
  }
}

TEST(GgufPairs, RefusesBadTypesBoolsAndKeys) {
  expect_corrupt(MkGguf().raw_pair("k", 13, "xxxxxxxx"), {"unknown value type 13"});
  expect_corrupt(MkGguf().raw_pair("k", UINT32_MAX, "xxxxxxxx"), {"unknown value type"});
  expect_corrupt(MkGguf().raw_pair("k", kArrayId, Bytes().array(GgufType(77), 0).str()), {"element type 77"});
  expect_corrupt(MkGguf().raw_pair("k", uint32_t(GgufType::kBool), "\x02"), {"key 'k'", "bool", "2"});
  expect_corrupt(MkGguf().bools("k", {1, 0, 255}), {"key 'k'", "bool", "255"});
  expect_corrupt(MkGguf().u8("twice", 1).u32("twice", 1), {"'twice' appears twice"});
  expect_corrupt(MkGguf().u8("", 1), {"empty"});
  expect_corrupt(MkGguf().raw_pair("esc\x1b[2J", 13, "x"),
                 {"esc\\x1b[2J"});  // nothing of the file reaches a terminal raw
}

TEST(GgufPairs, NestingIsBounded) {
  const auto nested = [](int levels) {
    Bytes b;
    for (int i = 0; i < levels; ++i) b.array(GgufType::kArray, 1);
    return b.array(GgufType::kU8, 1).number(uint8_t(1)).str();
  };
  EXPECT_TRUE(parse(MkGguf().raw_pair("k", kArrayId, nested(kGgufMaxNesting - 1)).bytes()).ok());
  expect_corrupt(MkGguf().raw_pair("k", kArrayId, nested(kGgufMaxNesting)), {"nested"});
  expect_corrupt(MkGguf().raw_pair("k", kArrayId, nested(100000)), {"nested"});
}

TEST(GgufTensors, ProductsOfDimensionsAreChecked) {
  const auto f32 = uint32_t(TensorType::kF32);
  const uint64_t big = (uint64_t(1) << 42) + 1;
  MkGguf mk;
  mk.raw_record("wrap", f32, {1152, big}, 0).trailing = std::string(64, 'x');
  expect_corrupt(mk, {"truncated", "wrap"});  // no wrap here: 1152 * (2^42 + 1) fits, the file does not
  for (const std::vector<uint64_t>& dims : std::vector<std::vector<uint64_t>>{{uint64_t(1) << 32, uint64_t(1) << 32},
                                                                              {big, big},
                                                                              {uint64_t(1) << 63},
                                                                              {UINT64_MAX},
                                                                              {1, 1, 1, UINT64_MAX},
                                                                              {0},
                                                                              {4, 0}}) {
    MkGguf bad;
    bad.raw_record("shape", f32, dims, 0).trailing = std::string(64, 'x');
    expect_corrupt(bad, {"tensor 'shape'", "dimension"});
  }
  // Elements fit in 2^63, bytes do not fit in 2^64.
  MkGguf bytes;
  bytes.raw_record("huge", f32, {uint64_t(1) << 31, uint64_t(1) << 31}, 0);
  expect_corrupt(bytes, {"huge"});
  expect_corrupt(MkGguf().raw_record("dims", f32, {1, 1, 1, 1, 1}, 0), {"5 dimensions"});
  expect_corrupt(MkGguf().raw_record("dims", f32, {1}, 0, UINT32_MAX), {"4294967295 dimensions"});
  expect_corrupt(
      MkGguf().zeros("row", TensorType::kF32, {1}).raw_record("part", uint32_t(TensorType::kQ4_K), {128}, 32),
      {"tensor 'part'", "128", "q4_K", "256"});
}

TEST(GgufTensors, SumsBeyond2To64AreChecked) {
  const auto f32 = uint32_t(TensorType::kF32);
  const std::vector<uint64_t> half = {uint64_t(1) << 60, 2};  // 2^63 bytes each
  MkGguf mk;
  mk.raw_record("first", f32, half, 0).raw_record("second", f32, half, uint64_t(1) << 63);
  expect_corrupt(mk, {"second", "2^64"});
  MkGguf end;
  end.raw_record("end", f32, {8}, UINT64_MAX - 31);
  expect_corrupt(end, {"end", "2^64"});
}

TEST(GgufTensors, ExtentsLieInsideTheFile) {
  MkGguf lie;
  lie.tensor("lie", TensorType::kF32, {256, 1024}, std::string(1024, 'x'));  // claims 1 MiB, has 1 KiB
  expect_corrupt(lie, {"file truncated: needs", "has " + std::to_string(lie.bytes().size()), "'lie'"});
  MkGguf exact = sound();
  const std::string whole = exact.bytes();
  EXPECT_TRUE(parse(whole).ok());
  expect_refused(whole.substr(0, whole.size() - 1), Code::kCorrupt,
                 {"needs " + std::to_string(whole.size()) + " bytes, has " + std::to_string(whole.size() - 1)});
  MkGguf overlap;
  overlap.zeros("a", TensorType::kF32, {64}).raw_record("b", uint32_t(TensorType::kF32), {16}, 128);
  expect_corrupt(overlap, {"'a'", "'b'", "overlap"});
  MkGguf odd;
  odd.zeros("a", TensorType::kF32, {64}).raw_record("b", uint32_t(TensorType::kF32), {1}, 33);
  expect_corrupt(odd, {"'b'", "33", "alignment 32"});
}

TEST(GgufTensors, NamesAreShortAndUnique) {
  EXPECT_TRUE(parse(MkGguf().zeros(std::string(63, 'n'), TensorType::kF32, {1}).bytes()).ok());
  expect_corrupt(MkGguf().zeros(std::string(64, 'n'), TensorType::kF32, {1}), {"tensor name", "64", "63"});
  expect_corrupt(MkGguf().zeros("", TensorType::kF32, {1}), {"no name"});
  expect_corrupt(MkGguf().zeros("same", TensorType::kF32, {1}).zeros("same", TensorType::kF32, {1}),
                 {"'same'", "twice"});
}

TEST(GgufTensors, RetiredAndUnknownTypesNameTheTensor) {
  for (uint32_t id : {4u, 5u, 31u, 32u, 33u, 36u, 37u, 38u}) {
    MkGguf mk;
    mk.raw_record("blk.0.old", id, {256}, 0).trailing = std::string(1024, 'x');
    expect_refused(mk.bytes(), Code::kUnsupported, {"'blk.0.old'", "type " + std::to_string(id), "retired"});
  }
  for (uint32_t id : {9u, 16u, 24u, 29u, 34u, 39u, 99u, UINT32_MAX}) {
    MkGguf mk;
    mk.raw_record("blk.0.new", id, {256}, 0).trailing = std::string(1024, 'x');
    expect_refused(mk.bytes(), Code::kUnsupported, {"'blk.0.new'", "type " + std::to_string(id), "not supported"});
  }
}

TEST(GgufAlignment, IsABoundedPowerOfTwo) {
  for (uint32_t bad : {0u, 1u, 4u, 24u, 33u, 1u << 25, 1u << 31, UINT32_MAX}) {
    expect_corrupt(MkGguf().u32("general.alignment", bad), {"general.alignment", std::to_string(bad)});
  }
  expect_corrupt(MkGguf().string("general.alignment", "32"), {"general.alignment", "string"});
  expect_corrupt(MkGguf().u64("general.alignment", UINT64_MAX), {"general.alignment"});
}

TEST(GgufTruncation, EveryCutOfASoundFileIsRefused) {
  const std::string whole = sound().bytes();
  for (size_t length = 0; length < whole.size(); ++length) {
    const auto file = parse(whole.substr(0, length));
    ASSERT_FALSE(file.ok()) << length << " of " << whole.size();
    EXPECT_EQ(file.status().code(), Code::kCorrupt);
  }
}

TEST(GgufTruncation, TheModelOfTheRepositoryCutAt200Lengths) {
  const auto mapped = MappedFile::open(test::repo_model("needle-10m-128k-f16.gguf"));
  ASSERT_TRUE(mapped.ok()) << mapped.status().message();
  const auto bytes = mapped->bytes();
  std::mt19937_64 rng(7);
  for (int i = 0; i < 200; ++i) {
    // Half of the cuts in the first 64 KiB, where the header lies. The file grows by a hole, so each run costs little.
    const uint64_t length = rng() % (i % 2 == 0 ? uint64_t(65536) : bytes.size());
    const uint64_t head = std::min<uint64_t>(length, 65536);
    const std::string path = test::write_temp("cut.gguf", {reinterpret_cast<const char*>(bytes.data()), size_t(head)});
    std::error_code error;
    std::filesystem::resize_file(path, length, error);
    ASSERT_FALSE(error);
    const auto file = GgufFile::open(path);
    ASSERT_FALSE(file.ok()) << length;
    EXPECT_EQ(file.status().code(), Code::kCorrupt);
    EXPECT_NE(file.status().message().find("truncated"), std::string::npos) << file.status().message();
  }
}

TEST(GgufFlips, AnyChangedByteIsReadOrRefusedButNeverCrashes) {
  const std::string whole = sound().bytes();
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int bit = 0; bit < 8; bit += 3) {
      std::string changed = whole;
      changed[at] = char(changed[at] ^ (1 << bit));
      const auto file = parse(changed);
      if (!file.ok()) {
        EXPECT_FALSE(file.status().message().empty());
        continue;
      }
      for (const TensorInfo& t : file->tensors) {
        uint8_t sum = 0;
        for (uint64_t i = 0; i < t.bytes; ++i) sum = uint8_t(sum + t.data[i]);
        EXPECT_LE(t.bytes, whole.size()) << int(sum);
      }
    }
  }
}

// The seeds of the fuzz target and whatever it once found.
TEST(GgufCorpus, EveryFileIsReadOrRefused) {
  const std::set<std::string> sound = {"empty",  "version2", "scalars",      "arrays",
                                       "nested", "tensors",  "super_blocks", "small_blocks"};
  size_t opened = 0;
  for (const auto& entry : std::filesystem::directory_iterator(LONGKV_TEST_DIR "/fuzz/corpus/gguf")) {
    const auto file = GgufFile::open(entry.path().string());
    const std::string name = entry.path().filename().string();
    if (sound.contains(name)) {
      EXPECT_TRUE(file.ok()) << file.status().message();
      ++opened;
    } else if (!file.ok()) {
      EXPECT_FALSE(file.status().message().empty()) << name;
    }
  }
  EXPECT_EQ(opened, sound.size());
}

}  // namespace
}  // namespace longkv
