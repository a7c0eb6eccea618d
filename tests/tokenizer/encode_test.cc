// Merging, special tokens and long inputs, against slow references and by properties that hold for every text.
#include <gtest/gtest.h>

#include <cstdio>
#include <ctime>
#include <map>
#include <random>

#include "base/log.h"
#include "gguf/gguf.h"
#include "support/paths.h"
#include "support/vocabularies.h"
#include "tokenizer/merger.h"
#include "tokenizer/pre_tokenizer.h"

namespace longkv {
namespace {

using test::open_tokenizer;
using test::TinyBpe;
using test::TinySentencePiece;

std::vector<int32_t> ids_of(const Tokenizer& tokenizer, std::string_view text, bool special = false,
                            bool parse = false) {
  auto ids = tokenizer.encode(text, special, parse);
  EXPECT_TRUE(ids.ok()) << ids.status().message();
  return ids.ok() ? *ids : std::vector<int32_t>();
}

// Pairs by chance, so that a merge may well make a better pair than itself.
struct RandomPairs {
  std::map<std::pair<int32_t, int32_t>, PairMerge> pairs;

  RandomPairs(std::mt19937& rng, int letters, int count, bool trained) {
    int32_t symbols = letters;
    std::vector<uint32_t> priorities(static_cast<size_t>(count));
    for (uint32_t i = 0; i < priorities.size(); ++i) priorities[i] = i;
    if (!trained) std::shuffle(priorities.begin(), priorities.end(), rng);
    for (const uint32_t priority : priorities) {
      const auto left = static_cast<int32_t>(rng() % static_cast<uint32_t>(symbols));
      const auto right = static_cast<int32_t>(rng() % static_cast<uint32_t>(symbols));
      if (pairs.try_emplace({left, right}, PairMerge{priority, symbols}).second) ++symbols;
    }
  }
  PairMerge merge(int32_t left, int32_t right, std::string_view /*joined*/) const {
    const auto it = pairs.find({left, right});
    return it == pairs.end() ? PairMerge{} : it->second;
  }
  size_t priority_count() const { return 1000; }
};

// The definition: find the best pair, leftmost first, join it, start over.
std::vector<int32_t> slow_merge(const RandomPairs& table, std::vector<int32_t> symbols) {
  for (;;) {
    PairMerge best;
    size_t at = 0;
    for (size_t i = 0; i + 1 < symbols.size(); ++i) {
      const PairMerge pair = table.merge(symbols[i], symbols[i + 1], {});
      if (pair.priority < best.priority) {
        best = pair;
        at = i;
      }
    }
    if (best.priority == kNoPair) return symbols;
    symbols[at] = best.symbol;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(at) + 1);
  }
}

TEST(Merger, EqualsTheDefinitionForShortAndLongWords) {
  std::mt19937 rng(7);
  for (int round = 0; round < 300; ++round) {
    const RandomPairs table(rng, 2 + round % 3, 1 + round % 40, round % 2 == 0);
    Merger<RandomPairs> merger(table);
    for (const size_t n : {size_t{1}, size_t{2}, size_t{7}, size_t{47}, size_t{48}, size_t{49}, size_t{300}}) {
      std::vector<int32_t> symbols(n);
      for (auto& s : symbols) s = static_cast<int32_t>(rng() % static_cast<uint32_t>(2 + round % 3));
      const auto expected = slow_merge(table, symbols);
      std::vector<int32_t> lengths(n, 1);
      merger.run(std::string(n, 'x'), symbols, lengths);
      ASSERT_EQ(symbols, expected) << "round " << round << " n " << n;
      int64_t sum = 0;
      for (const int32_t length : lengths) sum += length;
      ASSERT_EQ(sum, static_cast<int64_t>(n));
    }
  }
}

// Words above 64 KiB take another way than words of 60 KiB. A border that nothing merges across makes them comparable.
TEST(Merger, VeryLongWordsEqualTheirParts) {
  std::mt19937 rng(11);
  for (int round = 0; round < 12; ++round) {
    RandomPairs table(rng, 3, 5 + 3 * round, round % 2 == 0);
    Merger<RandomPairs> merger(table);
    std::vector<int32_t> whole;
    std::vector<int32_t> expected;
    for (int part = 0; part < 400; ++part) {
      std::vector<int32_t> symbols(200 + rng() % 5);
      for (auto& s : symbols) s = static_cast<int32_t>(rng() % 3);
      whole.insert(whole.end(), symbols.begin(), symbols.end());
      whole.push_back(-1);
      const auto merged = slow_merge(table, symbols);
      expected.insert(expected.end(), merged.begin(), merged.end());
      expected.push_back(-1);
    }
    std::vector<int32_t> lengths(whole.size(), 1);
    const std::string word(whole.size(), 'x');
    ASSERT_GT(word.size(), size_t{1} << 16);
    merger.run(word, whole, lengths);
    ASSERT_EQ(whole, expected) << round;
  }
}

TEST(Encode, ControlTokensOnlyWhenAskedUserDefinedAlways) {
  const TinyBpe bpe({}, {{"<tool>", 4}, {"<tool>more", 4}});
  const auto tokenizer = open_tokenizer(bpe.file());
  ASSERT_TRUE(tokenizer.ok());
  const int32_t tool = *tokenizer->find("<tool>");
  EXPECT_EQ(ids_of(*tokenizer, "<|eos|>", false, true), std::vector<int32_t>{bpe.eos});
  EXPECT_EQ(ids_of(*tokenizer, "<|eos|>").size(), 7U);
  EXPECT_EQ(ids_of(*tokenizer, "<tool>"), std::vector<int32_t>{tool});
  EXPECT_EQ(ids_of(*tokenizer, "<tool>more"), std::vector<int32_t>{*tokenizer->find("<tool>more")});
  EXPECT_EQ(ids_of(*tokenizer, "<tool>mor").size(), 4U);
  const TextPart part{"<tool>", false};
  auto blocked = tokenizer->encode_parts(std::span(&part, 1), false, std::span(&tool, 1));
  ASSERT_TRUE(blocked.ok());
  EXPECT_EQ(blocked->size(), 6U);
}

TEST(Encode, BosComesOnceHoweverItIsAskedFor) {
  auto file = TinyBpe({}).file();
  file.boolean("tokenizer.ggml.add_bos_token", true);
  const auto tokenizer = open_tokenizer(file);
  ASSERT_TRUE(tokenizer.ok());
  const int32_t bos = *tokenizer->bos();
  EXPECT_EQ(ids_of(*tokenizer, "a", true), (std::vector<int32_t>{bos, 'a'}));
  EXPECT_EQ(ids_of(*tokenizer, "<|bos|>a", true, true), (std::vector<int32_t>{bos, 'a'}));
  EXPECT_EQ(ids_of(*tokenizer, "", true), std::vector<int32_t>{bos});
  EXPECT_EQ(ids_of(*tokenizer, "", false), std::vector<int32_t>{});
}

TEST(Encode, PartsAreOneText) {
  const auto tokenizer = open_tokenizer(TinyBpe({"a b", "ab c"}).file());
  ASSERT_TRUE(tokenizer.ok());
  const TextPart parts[] = {{"a", true}, {"b", false}, {"", false}, {"c", true}};
  auto ids = tokenizer->encode_parts(parts, false);
  ASSERT_TRUE(ids.ok());
  EXPECT_EQ(*ids, ids_of(*tokenizer, "abc"));
  EXPECT_EQ(ids->size(), 1U);
}

TEST(Encode, SentencePiecePrefixMarksAndByteFallback) {
  const TinySentencePiece sp({"\xE2\x96\x81", "a", "b",
                              "\xE2\x96\x81"
                              "a",
                              "ab"});
  for (const bool prefix : {false, true}) {
    const auto tokenizer = open_tokenizer(sp.file(prefix));
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    const int32_t first = 259;
    const auto body = ids_of(*tokenizer, "a");
    EXPECT_EQ(body, std::vector<int32_t>{prefix ? first + 3 : first + 1});
    EXPECT_EQ(tokenizer->decode(body), "a");
    EXPECT_EQ(ids_of(*tokenizer,
                     "\xE2\x96\x81"
                     "b"),
              ids_of(*tokenizer, " b"));
    const auto bytes = ids_of(*tokenizer, "\xC3\xA9");
    EXPECT_EQ(std::vector<int32_t>(bytes.end() - 2, bytes.end()), (std::vector<int32_t>{3 + 0xC3, 3 + 0xA9}));
    for (const std::string text : {"b", " b", "  a b  ", "\xFF\xC3", "ab\nab", ""}) {
      EXPECT_EQ(tokenizer->decode(ids_of(*tokenizer, text)), text) << prefix;
    }
    // What is spelled like a control or a byte token stays text.
    EXPECT_GT(ids_of(*tokenizer, "</s>").size(), 3U);
    EXPECT_GT(ids_of(*tokenizer, "<0x41>").size(), 5U);
  }
}

TEST(Encode, BytesThatTheVocabularyCannotWriteAreAnError) {
  test::MkGguf file;
  file.string("tokenizer.ggml.model", "gpt2").strings("tokenizer.ggml.tokens", {"a"});
  file.strings("tokenizer.ggml.merges", {"a b"});
  const auto tokenizer = open_tokenizer(file);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const auto ids = tokenizer->encode("ab", false, false);
  ASSERT_FALSE(ids.ok());
  EXPECT_NE(ids.status().message().find("0x62"), std::string::npos) << ids.status().message();
}

std::vector<std::pair<std::string, std::string>> hostile_texts() {
  const auto repeat = [](std::string_view unit, size_t count) {
    std::string out;
    for (size_t i = 0; i < count; ++i) out += unit;
    return out;
  };
  std::mt19937 rng(3);
  std::string noise(200000, 0);
  for (char& c : noise) c = char(rng());
  return {{"dots", repeat(".", 26000)},
          {"spaces", repeat(" ", 1000000)},
          {"han", repeat("\u4E2D", 300000)},
          {"letters", repeat("Z", 131072)},
          {"marks", repeat("a\u0301", 50000)},
          {"us", repeat("us", 100000)},
          {"lines", repeat("\n", 1000000)},
          {"crlf", repeat("\r\n", 200000)},
          {"digits", repeat("7", 300000)},
          {"mixed case", repeat("aB", 100000)},
          {"quotes", repeat("'s", 100000)},
          {"tabs", repeat("\t ", 200000)},
          {"broken", repeat("\xF0\x9F", 100000)},
          {"nul", std::string(100000, '\0')},
          {"noise", noise},
          {"ordinal", repeat("\u00AAA", 50000)},
          {"digits and spaces", repeat("1 ", 100000)}};
}

// Every byte of the text is in exactly one word, in time linear in the text.
TEST(Splitters, CoverHostileTextsInLinearTime) {
  const std::string names = known_pre_tokenizers();
  const auto texts = hostile_texts();
  for (size_t begin = 0; begin < names.size();) {
    const size_t end = std::min(names.find(", ", begin), names.size());
    const PreTokenizer* rules = find_pre_tokenizer(names.substr(begin, end - begin));
    begin = end + 2;
    ASSERT_NE(rules, nullptr);
    if (rules->name == "phi-2" || rules->name == "olmo" || rules->name == "llama3" || rules->name == "codeshell")
      continue;
    for (const auto& [label, text] : texts) {
      const std::clock_t start = std::clock();
      WordSplitter splitter(*rules, text);
      size_t pos = 0;
      for (std::string_view word = splitter.next(); !word.empty(); word = splitter.next()) {
        ASSERT_EQ(word.data(), text.data() + pos) << rules->name << " " << label;
        pos += word.size();
      }
      ASSERT_EQ(pos, text.size()) << rules->name << " " << label;
      EXPECT_LT(double(std::clock() - start) / CLOCKS_PER_SEC, 2.0) << rules->name << " " << label;
    }
  }
}

TEST(Encode, HostileTextsComeBackByteForByte) {
  for (const char* name : {"SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"}) {
    const std::string path = test::fetched_model(name);
    if (path.empty()) GTEST_SKIP() << name << " is absent: run scripts/fetch_models";
    auto file = GgufFile::open(path);
    ASSERT_TRUE(file.ok());
    auto tokenizer = Tokenizer::from_metadata(file->metadata());
    ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
    for (const auto& [label, text] : hostile_texts()) {
      const auto ids = tokenizer->encode(text, false, false);
      if (label == "noise" || label == "broken") {
        // SmolLM2's vocabulary lacks bytes that occur in no well-formed text; its unknown token stands for them.
        ASSERT_TRUE(ids.ok()) << ids.status().message();
        if (std::string(name).starts_with("SmolLM2")) continue;
      }
      ASSERT_TRUE(ids.ok()) << label << ": " << ids.status().message();
      EXPECT_EQ(tokenizer->decode(*ids), text) << name << " " << label;
    }
  }
}

// A vocabulary may lack a byte; what stands for it is often a control token.
TEST(Encode, WhatHasNoTokenIsNotSilent) {
  test::TinyBpe words({});
  words.tokens['q'] = "no byte";
  test::MkGguf file = words.file();
  file.u32("tokenizer.ggml.unknown_token_id", uint32_t(words.eos));
  const auto tokenizer = test::open_tokenizer(file);
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status().message();
  const int64_t before = notice_count();
  EXPECT_EQ(tokenizer->encode("ab<|eos|>c", false, true)->size(), 4u);
  EXPECT_EQ(notice_count(), before) << "a marker that is asked for is no stand-in";
  EXPECT_EQ(*tokenizer->encode("aqb", false, false), (std::vector<int32_t>{'a', words.eos, 'b'}));
  EXPECT_EQ(notice_count(), before + 1);
}

// MB/s of CPU time. The bound is far below what is usual; a quadratic loop would miss it by orders of magnitude.
TEST(Speed, TextAndOneRepeatedCharacter) {
  std::string prose;
  std::mt19937 rng(5);
  std::vector<std::string> words(20000);
  for (auto& word : words) {
    word.resize(1 + rng() % 10);
    for (char& c : word) c = char('a' + rng() % 26);
  }
  while (prose.size() < 4'000'000) prose += words[rng() % (1 + rng() % words.size())] + (rng() % 12 == 0 ? ".\n" : " ");
  for (const char* name : {"SmolLM2-135M-Instruct.Q4_1.gguf", "gemma-3-270m-q4_k_m.gguf"}) {
    const std::string path = test::fetched_model(name);
    if (path.empty()) GTEST_SKIP() << name << " is absent: run scripts/fetch_models";
    auto file = GgufFile::open(path);
    ASSERT_TRUE(file.ok());
    const std::clock_t load = std::clock();
    auto tokenizer = Tokenizer::from_metadata(file->metadata());
    ASSERT_TRUE(tokenizer.ok());
    printf("%s: load %.3f s\n", name, double(std::clock() - load) / CLOCKS_PER_SEC);
    for (const auto& [label, text] : {std::pair<std::string, std::string>{"random words", prose},
                                      {"one character", std::string(4'000'000, 'Z')},
                                      {"blanks", std::string(4'000'000, ' ')}}) {
      const std::clock_t start = std::clock();
      const auto ids = tokenizer->encode(text, false, false);
      const double seconds = double(std::clock() - start) / CLOCKS_PER_SEC;
      ASSERT_TRUE(ids.ok());
      printf("%s: %s: %.1f MB/s, %zu tokens\n", name, label.c_str(), double(text.size()) / 1e6 / seconds, ids->size());
      EXPECT_GT(double(text.size()) / 1e6 / seconds, 0.5) << name << " " << label;
    }
  }
}

}  // namespace
}  // namespace longkv
