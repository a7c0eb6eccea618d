#include "engine/likelihood.h"

#include <gtest/gtest.h>

#include <cmath>
#include <fstream>

#include "engine/logits_file.h"
#include "support/paths.h"

namespace longkv {
namespace {

TEST(Likelihood, PerplexityOfKnownProbabilities) {
  const float logits[] = {std::log(0.5f), std::log(0.25f), std::log(0.25f)};
  PerplexityMeter m;
  m.add(negative_log_likelihood(logits, 3, 0));
  m.add(negative_log_likelihood(logits, 3, 1));
  EXPECT_NEAR(m.perplexity(), std::sqrt(8.0), 1e-6);  // geometric mean of 2 and 4
}

TEST(Likelihood, DivergenceOfKnownDistributions) {
  const float base[] = {std::log(0.5f), std::log(0.5f)};             // probabilities
  const float other[] = {std::log(0.75f) + 3, std::log(0.25f) + 3};  // logits: a shift must not matter
  DivergenceMeter m;
  m.add(base, other, 2, 0);
  EXPECT_NEAR(m.kl().mean, 0.5 * std::log(0.5 / 0.75) + 0.5 * std::log(0.5 / 0.25), 1e-6);
  EXPECT_NEAR(m.rms_probability_difference(), 0.25, 1e-6);
  EXPECT_NEAR(kl_divergence(base, other, 2), m.kl().mean, 1e-6);
}

TEST(LogitsFile, SurvivesARoundTripWithinItsResolution) {
  const std::string path = test::temp_path("round.kld");
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  constexpr size_t vocab = 5;
  const int64_t rows = 2 * scored_positions(4);
  auto writer = LogitsWriter::create(path, 4, int64_t(vocab), tokens);
  ASSERT_TRUE(writer.ok());
  std::vector<std::vector<float>> all;
  for (int64_t r = 0; r < rows; ++r) {
    all.push_back({float(r), 1.0f, -2.0f, 0.5f, -40.0f});
    ASSERT_TRUE(writer->append(all.back().data()).ok());
  }
  EXPECT_FALSE(std::ifstream(path).good()) << "must not appear before it is complete";
  ASSERT_TRUE(writer->commit().ok());
  auto reader = LogitsReader::open(path);
  ASSERT_TRUE(reader.ok()) << reader.status().message();
  std::vector<float> row(vocab);
  for (int64_t r = 0; r < rows; ++r) {
    reader->log_probabilities(r, row.data());
    for (int32_t i = 0; i < 4; ++i) {
      // 16 nats in 65535 steps, and fp32 rounding.
      EXPECT_NEAR(row[size_t(i)], -negative_log_likelihood(all[size_t(r)].data(), int64_t(vocab), i),
                  16.0 / 65535 + 1e-5);
    }
  }
}

TEST(LogitsFile, RefusesDamagedFiles) {
  const std::string path = test::temp_path("damaged.kld");
  auto writer = LogitsWriter::create(path, 4, 5, std::vector<int32_t>{1, 2, 3, 4});
  const float logits[] = {0, 1, 2, 3, 4};
  ASSERT_TRUE(writer->append(logits).ok());
  ASSERT_TRUE(writer->commit().ok());
  std::ifstream in(path, std::ios::binary);
  const std::string whole((std::istreambuf_iterator<char>(in)), {});
  for (size_t size = 0; size < whole.size(); ++size) {
    std::ofstream(path, std::ios::binary) << whole.substr(0, size);
    EXPECT_FALSE(LogitsReader::open(path).ok()) << size;
  }
  std::string huge = whole;
  huge.replace(8, 12, std::string("\xff\xff\xff\x7f\xff\xff\xff\x7f\xff\xff\xff\x7f", 12));
  std::ofstream(path, std::ios::binary) << huge;
  EXPECT_FALSE(LogitsReader::open(path).ok());
}

}  // namespace
}  // namespace longkv
