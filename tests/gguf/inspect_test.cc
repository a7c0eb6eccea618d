#include "gguf/inspect.h"

#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>

#include "gguf/printable.h"
#include "support/mkgguf.h"
#include "support/paths.h"

namespace longkv {
namespace {

using test::MkGguf;

GgufFile open_ok(const std::string& path) {
  auto file = GgufFile::open(path);
  EXPECT_TRUE(file.ok()) << file.status().message();
  return file.ok() ? std::move(file).value() : GgufFile();
}

TEST(Inspect, DescribesTheModelOfTheRepository) {
  const GgufFile file = open_ok(test::repo_model("needle-10m-128k-f16.gguf"));
  const auto json = nlohmann::json::parse(describe_gguf(file, true));
  EXPECT_EQ(json["version"], 3);
  EXPECT_EQ(json["metadata"]["general.architecture"]["value"], "llama");
  EXPECT_EQ(json["metadata"]["llama.context_length"]["value"], 131072);
  EXPECT_EQ(json["metadata"]["tokenizer.ggml.tokens"]["count"], 320);
  EXPECT_LE(json["metadata"]["tokenizer.ggml.tokens"]["first"].size(), 10u);
  EXPECT_EQ(json["tensors"].size(), file.tensors().size());
  EXPECT_EQ(json["file_bytes"], 19395424);
  // Embedding; per layer q and output 384x384, k and v 384x128, three 384x1024, two norms; last norm.
  const int64_t parameters = 320 * 384 + 6 * (2 * 384 * 384 + 2 * 384 * 128 + 3 * 384 * 1024 + 2 * 384) + 384;
  const bool tied = file.find("output.weight") == nullptr;
  EXPECT_EQ(json["totals"]["parameters"], parameters + (tied ? 0 : 320 * 384));
  EXPECT_GT(json["totals"]["bits_per_weight"], 16.0);
  EXPECT_LT(json["totals"]["bits_per_weight"], 16.1);

  const std::string text = describe_gguf(file, false);
  for (const char* part : {"GGUF version 3", "19395424 bytes", "general.architecture", "\"llama\"", "(320 string)",
                           "token_embd.weight", "384 x 320", "f16", "all", "bits per weight"}) {
    EXPECT_NE(text.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(text.back(), '\n');
}

TEST(Inspect, TotalsAreCountedPerType) {
  MkGguf mk;
  mk.zeros("a", TensorType::kQ8_0, {64, 2}).zeros("b", TensorType::kQ8_0, {32}).zeros("c", TensorType::kF32, {8});
  const auto json = nlohmann::json::parse(describe_gguf(open_ok(mk.write("totals.gguf")), true));
  EXPECT_EQ(json["totals"]["by_type"]["q8_0"], (nlohmann::json{{"tensors", 2}, {"parameters", 160}, {"bytes", 170}}));
  EXPECT_EQ(json["totals"]["by_type"]["f32"], (nlohmann::json{{"tensors", 1}, {"parameters", 8}, {"bytes", 32}}));
  EXPECT_DOUBLE_EQ(json["totals"]["bits_per_weight"], 8.0 * 202 / 168);
  EXPECT_EQ(json["tensors"][0]["dims"], (std::vector<int>{64, 2}));
}

TEST(Inspect, HostileTextStaysHarmless) {
  MkGguf mk;
  mk.string("esc\x1b[31m", "\x1b]0;title\x07 bad \xff\xfe utf-8").strings("t", {"\x9b\x80", "ok"}).f32("nan", NAN);
  mk.string("long", std::string(5000, 'x')).f32("eps", 1e-5f).i32s("many", std::vector<int32_t>(1000, 3));
  mk.raw_pair("nest", uint32_t(GgufType::kArray),
              test::Bytes().array(GgufType::kArray, 1).array(GgufType::kU8, 0).str());
  mk.zeros("name\nline", TensorType::kF32, {1});
  const GgufFile file = open_ok(mk.write("hostile.gguf"));
  const std::string text = describe_gguf(file, false);
  for (const char c : text) EXPECT_TRUE(c == '\n' || uint8_t(c) >= 0x20) << int(c);
  EXPECT_NE(text.find("esc\\x1b[31m"), std::string::npos) << text;
  EXPECT_NE(text.find("(5000 bytes)"), std::string::npos);
  EXPECT_NE(text.find("[3, 3, 3, 3, 3, 3, ...] (1000 i32)"), std::string::npos);
  EXPECT_NE(text.find("name\\nline"), std::string::npos);
  EXPECT_NE(text.find("1e-05"), std::string::npos);
  EXPECT_LT(text.size(), 4000u);
  const auto json = nlohmann::json::parse(describe_gguf(file, true));
  EXPECT_TRUE(json["metadata"]["nan"]["value"].is_null());
  EXPECT_EQ(json["metadata"]["long"]["value"].get<std::string>().size(), 5000u);
  EXPECT_EQ(json["metadata"]["t"]["first"][1], "ok");
}

TEST(Printable, KeepsTextAndEscapesTheRest) {
  EXPECT_EQ(printable("plain"), "plain");
  EXPECT_EQ(printable("caf\xc3\xa9 \xf0\x9f\x98\x80"), "caf\xc3\xa9 \xf0\x9f\x98\x80");
  EXPECT_EQ(printable("a\nb\tc\x7f"), "a\\nb\\x09c\\x7f");
  EXPECT_EQ(printable(std::string("\0", 1)), "\\x00");
  EXPECT_EQ(printable("\xc2\x9b"), "\\xc2\\x9b");                    // a control code in two bytes
  EXPECT_EQ(printable("\xc0\xaf"), "\\xc0\\xaf");                    // overlong
  EXPECT_EQ(printable("\xed\xa0\x80"), "\\xed\\xa0\\x80");           // surrogate
  EXPECT_EQ(printable("\xf4\x90\x80\x80"), "\\xf4\\x90\\x80\\x80");  // beyond U+10FFFF
  EXPECT_EQ(printable("\xe2\x82"), "\\xe2\\x82");                    // cut short
  EXPECT_EQ(printable("abcdef", 3), "abc...");
  EXPECT_EQ(printable("abc", 3), "abc");
}

}  // namespace
}  // namespace longkv
