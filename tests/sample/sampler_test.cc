#include "sample/sampler.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <map>

namespace longkv {
namespace {

SamplingParams neutral() {
  SamplingParams p;
  p.temperature = 1.0f;
  p.top_k = 0;
  p.top_p = 1.0f;
  p.min_p = 0.0f;
  return p;
}

std::vector<int32_t> ids_left(Sampler& s, const std::vector<float>& logits) {
  s.sample(logits);
  std::vector<int32_t> ids;
  for (const Candidate& c : s.candidates()) ids.push_back(c.id);
  return ids;
}

TEST(Sampler, GreedyTakesTheBestAndTheLowerIdOnTies) {
  SamplingParams p;
  p.temperature = 0.0f;
  Sampler s(p);
  EXPECT_EQ(s.sample(std::vector<float>{1, 3, 3, 2}), 1);
  // Every size around the vectors' width, the best anywhere, and twice.
  for (size_t n = 1; n < 50; ++n) {
    for (size_t at = 0; at < n; ++at) {
      std::vector<float> logits(n);
      for (size_t i = 0; i < n; ++i) logits[i] = -2.0f - float(i * 7 % 13);
      logits[at] = -1.0f;
      if (at + 3 < n) logits[at + 3] = -1.0f;
      EXPECT_EQ(s.sample(logits), int32_t(at)) << n;
      EXPECT_EQ(s.candidates().front().logit, -1.0f);
      // Biases: on the best, on another, on both, twice on one.
      const auto other = int32_t((at + 1) % n);
      for (const std::vector<std::pair<int32_t, float>>& biases :
           {std::vector<std::pair<int32_t, float>>{{int32_t(at), -5.0f}},
            {{other, 30.0f}},
            {{other, 30.0f}, {other, -60.0f}},
            {{int32_t(at), -INFINITY}, {other, -INFINITY}},
            {{other, 1.5f}, {int32_t(n) + 7, 99.0f}}}) {
        std::vector<float> sums = logits;
        for (const auto& [id, bias] : biases) {
          if (size_t(id) < n) sums[size_t(id)] += bias;
        }
        SamplingParams biased = p;
        biased.logit_bias = biases;
        EXPECT_EQ(Sampler(biased).sample(logits), std::max_element(sums.begin(), sums.end()) - sums.begin())
            << n << " " << at;
      }
    }
  }
}

TEST(Sampler, TheSmallestTemperaturesChooseAsGreedyDoes) {
  for (const float temperature : {1e-6f, 1e-36f, 1e-40f, std::numeric_limits<float>::denorm_min()}) {
    for (uint32_t seed = 1; seed <= 5; ++seed) {
      SamplingParams p = neutral();
      p.temperature = temperature;
      p.seed = seed;
      Sampler s(p);
      EXPECT_EQ(s.sample(std::vector<float>{-7, 30, 29, 2}), 1) << temperature;
    }
  }
}

TEST(Sampler, TopKKeepsTheBestInOrder) {
  for (int64_t k : {1, 2, 3, 5, 9}) {
    SamplingParams p = neutral();
    p.top_k = k;
    Sampler s(p);
    const std::vector<float> logits = {0.5f, 2.0f, -1.0f, 2.0f, 1.0f};
    const std::vector<int32_t> order = {1, 3, 4, 0, 2};
    EXPECT_EQ(ids_left(s, logits), std::vector<int32_t>(order.begin(), order.begin() + std::min<long>(k, 5)));
  }
}

TEST(Sampler, TopPKeepsTheSmallestSetThatReachesTheMass) {
  // Probabilities 0.5, 0.25, 0.125, 0.125.
  const std::vector<float> logits = {std::log(4.0f), std::log(2.0f), 0.0f, 0.0f};
  SamplingParams p = neutral();
  p.top_p = 0.5f;
  EXPECT_EQ(ids_left(*std::make_unique<Sampler>(p), logits).size(), 1u);
  p.top_p = 0.51f;
  EXPECT_EQ(ids_left(*std::make_unique<Sampler>(p), logits).size(), 2u);
  p.top_p = 0.8f;
  EXPECT_EQ(ids_left(*std::make_unique<Sampler>(p), logits).size(), 3u);
}

TEST(Sampler, MinPIsRelativeToTheBest) {
  const std::vector<float> logits = {std::log(8.0f), std::log(4.0f), std::log(2.0f), 0.0f};
  SamplingParams p = neutral();
  p.min_p = 0.3f;
  Sampler s(p);
  EXPECT_EQ(ids_left(s, logits), (std::vector<int32_t>{0, 1}));
}

TEST(Sampler, TypicalPrefersTokensNearTheEntropy) {
  // Entropy of (0.9, 0.05, 0.05) is 0.394 nats; the surprises are 0.105 and 3.0: the likely token is nearest.
  const std::vector<float> logits = {std::log(0.9f), std::log(0.05f), std::log(0.05f)};
  SamplingParams p = neutral();
  p.typical = 0.5f;
  Sampler s(p);
  EXPECT_EQ(ids_left(s, logits), (std::vector<int32_t>{0}));
}

TEST(Sampler, PenaltiesFollowCountsInsideTheWindow) {
  SamplingParams p = neutral();
  p.temperature = 0.0f;
  p.repeat_last_n = 2;
  p.frequency_penalty = 1.0f;
  Sampler s(p);
  s.accept(0);
  s.accept(0);
  EXPECT_EQ(s.sample(std::vector<float>{3.5f, 1.6f}), 1);  // 3.5 - 2 < 1.6
  s.accept(1);                                             // one 0 leaves the window
  EXPECT_EQ(s.sample(std::vector<float>{3.5f, 1.6f}), 0);  // 2.5 against 0.6
}

TEST(Sampler, RepeatPenaltyLowersNegativeLogitsToo) {
  SamplingParams p = neutral();
  p.temperature = 0.0f;
  p.repeat_penalty = 2.0f;
  Sampler s(p);
  s.accept(0);
  EXPECT_EQ(s.sample(std::vector<float>{-1.0f, -1.5f}), 1);
}

TEST(Sampler, SameSeedSameTokensAndFrequenciesFollowProbabilities) {
  const std::vector<float> logits = {std::log(0.5f), std::log(0.3f), std::log(0.2f)};
  SamplingParams p = neutral();
  p.seed = 7;
  Sampler a(p), b(p);
  std::map<int32_t, int> count;
  constexpr int kDraws = 20000;
  for (int i = 0; i < kDraws; ++i) {
    const int32_t id = a.sample(logits);
    ASSERT_EQ(id, b.sample(logits));
    ++count[id];
  }
  // Four standard deviations of a binomial count.
  const double probability[] = {0.5, 0.3, 0.2};
  for (int i = 0; i < 3; ++i) {
    EXPECT_NEAR(count[i], kDraws * probability[i], 4 * std::sqrt(kDraws * probability[i] * (1 - probability[i])));
  }
}

TEST(Sampler, LogitBiasCanForbidAToken) {
  SamplingParams p = neutral();
  p.temperature = 0.0f;
  p.logit_bias.push_back(*parse_logit_bias("1-inf"));
  Sampler s(p);
  EXPECT_EQ(s.sample(std::vector<float>{1, 9, 2}), 2);
}

TEST(SamplingParams, RefusesWhatHasNoMeaning) {
  EXPECT_FALSE(parse_sampler_stages("top_k;temp_typo").ok());
  EXPECT_EQ(parse_sampler_stages("top_k;temperature")->size(), 2u);
  for (const char* text : {"", "1", "x+1", "-1+2", "5*2", "5+", "5+nan", "5+1x"})
    EXPECT_FALSE(parse_logit_bias(text).ok()) << text;
  SamplingParams p;
  EXPECT_TRUE(validate(p).ok());
  p.top_p = 1.5f;
  EXPECT_FALSE(validate(p).ok());
  p = {};
  p.min_p = NAN;
  EXPECT_FALSE(validate(p).ok());
  p = {};
  p.repeat_penalty = 0.0f;
  EXPECT_FALSE(validate(p).ok());
}

}  // namespace
}  // namespace longkv
