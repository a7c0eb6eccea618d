// Seeds, streams and draws: the same numbers for ever, and spaces that never meet.
#include "eval/random.h"

#include <gtest/gtest.h>

#include <set>

#include "eval/sha256.h"

namespace longkv {
namespace {

TEST(EvalRandom, StreamsAreRecorded) {
  // xoshiro256** after SplitMix64 of XXH64("a", seed 1); recorded once, must never change.
  EvalRandom random(1, "a");
  const uint64_t first = random.bits(), second = random.bits();
  EvalRandom again(1, "a"), other(1, "b"), next(2, "a");
  EXPECT_EQ(again.bits(), first);
  EXPECT_EQ(again.bits(), second);
  EXPECT_NE(other.bits(), first);
  EXPECT_NE(next.bits(), first);
}

TEST(EvalRandom, EverythingThatNamesASampleChangesItsSeed) {
  const SampleId id{SeedSpace::kEval, 1, "vt", 1, 4096, 50, 3};
  std::set<uint64_t> seeds = {id.seed()};
  const auto changed = [&](auto change) {
    SampleId other = id;
    change(other);
    return other.seed();
  };
  seeds.insert(changed([](SampleId& s) { s.root = 2; }));
  seeds.insert(changed([](SampleId& s) { s.task = "cwe"; }));
  seeds.insert(changed([](SampleId& s) { s.version = 2; }));
  seeds.insert(changed([](SampleId& s) { s.length = 4097; }));
  seeds.insert(changed([](SampleId& s) { s.depth = 51; }));
  seeds.insert(changed([](SampleId& s) { s.index = 4; }));
  seeds.insert(changed([](SampleId& s) { s.space = SeedSpace::kTrain; }));
  EXPECT_EQ(seeds.size(), 8u);
}

TEST(EvalRandom, TrainingAndEvaluationShareNoSeed) {
  for (int64_t i = 0; i < 1000; ++i) {
    SampleId id;
    id.index = i;
    EXPECT_EQ(id.seed() >> 63, 0u);
    id.space = SeedSpace::kTrain;
    EXPECT_EQ(id.seed() >> 63, 1u);
  }
}

TEST(EvalRandom, DrawsStayInRangeAndReachItsEnds) {
  EvalRandom random(7, "draws");
  std::set<int64_t> seen;
  for (int i = 0; i < 400; ++i) seen.insert(random.range(-2, 3));
  EXPECT_EQ(seen, (std::set<int64_t>{-2, -1, 0, 1, 2, 3}));
  for (int64_t n = 1; n <= 40; ++n) {
    for (int64_t k = 0; k <= n; ++k) {
      const std::vector<int64_t> d = random.distinct(n, k);
      const std::set<int64_t> set(d.begin(), d.end());
      ASSERT_EQ(int64_t(set.size()), k);
      if (k > 0) {
        ASSERT_TRUE(*set.begin() >= 0 && *set.rbegin() < n);
      }
    }
  }
  const std::string uuid = random.uuid();
  EXPECT_EQ(uuid.size(), 36u);
  EXPECT_EQ(uuid[14], '4');
  EXPECT_EQ(random.digits(5).size(), 5u);
  EXPECT_NE(random.digits(3)[0], '0');
}

TEST(EvalRandom, DistinctIsUniform) {
  EvalRandom random(3, "uniform");
  std::vector<int> count(10, 0);
  for (int i = 0; i < 20000; ++i) ++count[size_t(random.distinct(10, 3)[0])];
  // 2000 each with a standard deviation of 42: five of them.
  for (const int c : count) EXPECT_NEAR(c, 2000, 212);
}

TEST(Sha256, PublishedVectors) {
  EXPECT_EQ(sha256(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha256("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha256("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"),
            "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha256(std::string(1000000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

}  // namespace
}  // namespace longkv
