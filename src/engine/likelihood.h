// Likelihood of a text, and how far one distribution over tokens is from another.
#pragma once

#include <cstdint>
#include <vector>

namespace longkv {

// Negative log-likelihood of `token` under softmax(logits[vocab]), in nats, accumulated in double.
double negative_log_likelihood(const float* logits, int64_t vocab, int32_t token);

// KL divergence of softmax(logits) from softmax(base_logits), in nats.
double kl_divergence(const float* base_logits, const float* logits, int64_t vocab);

struct MeanAndError {
  double mean = 0.0;
  double standard_error = 0.0;
};

class PerplexityMeter {
 public:
  void add(double nll);
  int64_t count() const { return count_; }
  double perplexity() const;
  double standard_error() const;  // of the perplexity

 private:
  int64_t count_ = 0;
  double sum_ = 0.0, sum_squares_ = 0.0;
};

// Compares distributions with a base, position by position.
class DivergenceMeter {
 public:
  // base: log-probabilities [vocab]; logits: [vocab]; token: the text's next token.
  void add(const float* base, const float* logits, int64_t vocab, int32_t token);

  int64_t count() const { return int64_t(kl_.size()); }
  MeanAndError kl() const;
  double kl_percentile(double fraction) const;  // linear between order statistics
  double kl_max() const;
  double rms_probability_difference() const;  // of the text's token
  double same_top() const;                    // share of positions with the same best token
  double base_perplexity() const;

 private:
  std::vector<double> kl_;
  double sum_squared_difference_ = 0.0;
  double sum_base_nll_ = 0.0;
  int64_t same_ = 0;
};

}  // namespace longkv
