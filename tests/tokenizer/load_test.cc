// Vocabularies that contradict themselves are refused with a message; odd but legal ones load.
#include <gtest/gtest.h>

#include "gguf/gguf.h"
#include "support/paths.h"
#include "support/vocabularies.h"

namespace longkv {
namespace {

using test::MkGguf;
using test::open_tokenizer;
using test::TinyBpe;
using test::TinySentencePiece;

// The load fails with this code and names all of `words`.
void expect_refused(const MkGguf& file, Code code, std::initializer_list<const char*> words) {
  const auto tokenizer = open_tokenizer(file);
  ASSERT_FALSE(tokenizer.ok());
  EXPECT_EQ(tokenizer.status().code(), code) << tokenizer.status().message();
  for (const char* word : words) {
    EXPECT_NE(tokenizer.status().message().find(word), std::string::npos)
        << word << " not in: " << tokenizer.status().message();
  }
}

TEST(TokenizerLoad, UnknownPreTokenizerIsNamedAndCanBeOverridden) {
  const MkGguf file = TinyBpe({}).file("future-x");
  expect_refused(file, Code::kUnsupported, {"future-x", "llama-bpe", "qwen2", "--override-pre"});
  const auto tokenizer = open_tokenizer(file, "qwen2");
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(tokenizer->pre_tokenizer(), "qwen2");
}

TEST(TokenizerLoad, AbsentPreTokenizerMeansDefault) {
  const auto tokenizer = open_tokenizer(TinyBpe({}).file(""));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(tokenizer->pre_tokenizer(), "default");
}

TEST(TokenizerLoad, UnknownModelIsRefused) {
  MkGguf file;
  file.string("tokenizer.ggml.model", "rwkv").strings("tokenizer.ggml.tokens", {"a"});
  expect_refused(file, Code::kUnsupported, {"rwkv"});
}

TEST(TokenizerLoad, ArraysOfUnequalLengthAreRefused) {
  TinyBpe types({});
  types.types.pop_back();
  expect_refused(types.file(), Code::kCorrupt, {"token_type", "257", "258"});
  types.types.clear();
  expect_refused(types.file(), Code::kCorrupt, {"token_type", " 0 "});
  TinySentencePiece scores({"a"});
  scores.scores.pop_back();
  expect_refused(scores.file(false), Code::kCorrupt, {"scores", "259", "260"});
}

TEST(TokenizerLoad, SpecialIdsAreChecked) {
  for (const char* key :
       {"unknown_token_id", "seperator_token_id", "separator_token_id", "padding_token_id", "eot_token_id"}) {
    MkGguf file = TinyBpe({}).file();
    file.u32(std::string("tokenizer.ggml.") + key, 0x80000000U);
    expect_refused(file, Code::kCorrupt, {key, "2147483648", "258"});
  }
  TinyBpe beyond({});
  beyond.eos = 258;
  expect_refused(beyond.file(), Code::kCorrupt, {"eos_token_id", "258"});
}

TEST(TokenizerLoad, DefaultIdsBeyondTheVocabularyMeanNone) {
  MkGguf file;
  file.string("tokenizer.ggml.model", "llama").strings("tokenizer.ggml.tokens", {"a", "b"});
  file.f32s("tokenizer.ggml.scores", {0, 0}).boolean("tokenizer.ggml.add_bos_token", false);
  const auto tokenizer = open_tokenizer(file);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_FALSE(tokenizer->eos().has_value());
  EXPECT_EQ(tokenizer->bos(), 1);  // the default of this kind, and it exists
}

TEST(TokenizerLoad, ABosThatIsAskedForMustExist) {
  MkGguf file;
  file.string("tokenizer.ggml.model", "gpt2").strings("tokenizer.ggml.tokens", {"a", "b"});
  file.strings("tokenizer.ggml.merges", {"a b"}).boolean("tokenizer.ggml.add_bos_token", true);
  expect_refused(file, Code::kCorrupt, {"bos_token_id"});
}

TEST(TokenizerLoad, MergesThatAreNotPairsAreRefused) {
  TinyBpe bpe({"a b"});
  bpe.merges.push_back("ab");
  expect_refused(bpe.file(), Code::kCorrupt, {"merges[1]"});
  bpe.merges.back() = "ab ";
  expect_refused(bpe.file(), Code::kCorrupt, {"merges[1]"});
}

TEST(TokenizerLoad, TextsOfAnyLengthWithNulAreKept) {
  TinyBpe bpe({},
              {{std::string(1 << 20, 'x'), 4}, {std::string("a\0b", 3), 4}, {"", 4}, {std::string(1 << 16, 'y'), 1}});
  const auto tokenizer = open_tokenizer(bpe.file());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  EXPECT_EQ(tokenizer->piece(258).size(), size_t{1} << 20);
  EXPECT_EQ(tokenizer->piece(260), "");
  const auto ids = tokenizer->encode(std::string_view("xa\0b", 4), false, false);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(ids->size(), 2U);
  EXPECT_EQ((*ids)[1], 259);
}

TEST(TokenizerLoad, NeedleModelHasBytesAndNoMerges) {
  auto file = GgufFile::open(test::repo_model("needle-10m-128k-f16.gguf"));
  ASSERT_TRUE(file.ok()) << file.status().message();
  auto tokenizer = Tokenizer::from_metadata(file->metadata());
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  std::string bytes;
  for (int byte = 0; byte < 256; ++byte) bytes.push_back(char(byte));
  const auto ids = tokenizer->encode(bytes, true, false);
  ASSERT_TRUE(ids.ok());
  ASSERT_EQ(ids->size(), 257U);
  EXPECT_EQ(ids->front(), tokenizer->bos());
  EXPECT_EQ(tokenizer->decode(*ids), bytes);
}

TEST(TokenizerLoad, FingerprintFollowsEveryPartOfTheVocabulary) {
  const auto print = [](const MkGguf& file) { return open_tokenizer(file)->fingerprint(); };
  const TinyBpe base({"a b", "b c"});
  const uint64_t same = print(base.file());
  EXPECT_EQ(print(base.file()), same);
  EXPECT_NE(print(base.file("qwen2")), same);
  TinyBpe swapped(base);
  std::swap(swapped.merges[0], swapped.merges[1]);
  EXPECT_NE(print(swapped.file()), same);
  TinyBpe typed(base);
  typed.types[5] = 4;
  EXPECT_NE(print(typed.file()), same);
  MkGguf bos = base.file();
  bos.boolean("tokenizer.ggml.add_bos_token", true);
  EXPECT_NE(print(bos), same);
}

}  // namespace
}  // namespace longkv
