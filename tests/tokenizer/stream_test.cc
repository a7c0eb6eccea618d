// Streaming: characters stay whole, stop strings are found across pieces.
#include <gtest/gtest.h>

#include <random>

#include "tokenizer/stop_matcher.h"
#include "tokenizer/stream_decoder.h"

namespace longkv {
namespace {

const std::string kBad = "\xEF\xBF\xBD";

std::string stream(const std::string& bytes, size_t chunk) {
  StreamDecoder decoder;
  std::string out;
  for (size_t pos = 0; pos < bytes.size(); pos += chunk)
    out += decoder.push(std::string_view(bytes).substr(pos, chunk));
  return out + decoder.flush();
}

TEST(StreamDecoder, CharactersStayWhole) {
  StreamDecoder decoder;
  EXPECT_EQ(decoder.push(" \xF0\x9F"), " ");
  EXPECT_TRUE(decoder.holds_partial());
  EXPECT_EQ(decoder.push("\x98"), "");
  EXPECT_EQ(decoder.push("\x80!"), "\xF0\x9F\x98\x80!");
  EXPECT_FALSE(decoder.holds_partial());
  EXPECT_EQ(decoder.flush(), "");
}

TEST(StreamDecoder, InvalidBytesBecomeReplacementCharacters) {
  EXPECT_EQ(stream("\xC3'", 1), kBad + "'");                            // interrupted sequence
  EXPECT_EQ(stream("\x80\xBF", 1), kBad + kBad);                        // continuation bytes alone
  EXPECT_EQ(stream("\xC0\xAF", 1), kBad + kBad);                        // overlong
  EXPECT_EQ(stream("\xED\xA0\x80", 1), kBad + kBad + kBad);             // surrogate
  EXPECT_EQ(stream("\xF4\x90\x80\x80", 1), kBad + kBad + kBad + kBad);  // above 10FFFF
  EXPECT_EQ(stream("a\xF0\x9F\x98", 1), "a" + kBad);                    // held tail at the end
  EXPECT_EQ(stream(std::string("\0", 1), 1), std::string("\0", 1));
}

TEST(StreamDecoder, PiecesDoNotMatter) {
  std::mt19937 rng(1);
  const std::string units[] = {"a", "\xC3\xA9", "\xE4\xB8\xAD", "\xF0\x9F\x98\x80", "\xF0\x9F", "\xC3", "\x80", "\xFF"};
  for (int round = 0; round < 200; ++round) {
    std::string text;
    for (int i = 0; i < 30; ++i) text += units[rng() % 8];
    text += "end";  // a held tail is resolved by what follows, so only then all cuts agree
    for (size_t chunk : {size_t{1}, size_t{2}, size_t{3}, size_t{5}})
      EXPECT_EQ(stream(text, chunk), stream(text, 1000));
  }
}

std::string run(StopMatcher& matcher, const std::string& text, size_t chunk) {
  std::string out;
  for (size_t pos = 0; pos < text.size(); pos += chunk) out += matcher.push(std::string_view(text).substr(pos, chunk));
  return out;
}

TEST(StopMatcher, FindsTheFirstStopAcrossPieces) {
  for (const size_t chunk : {size_t{1}, size_t{2}, size_t{3}, size_t{100}}) {
    StopMatcher matcher({"", "STOP", "</s>", "TOP"});
    EXPECT_EQ(run(matcher, "say STO, then STOP and more", chunk), "say STO, then ");
    EXPECT_TRUE(matcher.stopped());
    EXPECT_EQ(matcher.stop(), "STOP");
    EXPECT_EQ(matcher.push("x"), "");
    EXPECT_EQ(matcher.flush(), "");
  }
}

TEST(StopMatcher, HoldsBackOnlyWhatMayBecomeAStop) {
  StopMatcher matcher({"abc"});
  EXPECT_EQ(matcher.push("xab"), "x");
  EXPECT_EQ(matcher.push("ab"), "ab");
  EXPECT_EQ(matcher.push("d"), "abd");
  EXPECT_EQ(matcher.push("a"), "");
  EXPECT_EQ(matcher.flush(), "a");
  EXPECT_FALSE(matcher.stopped());
  StopMatcher none({});
  EXPECT_EQ(none.push("anything"), "anything");
}

}  // namespace
}  // namespace longkv
