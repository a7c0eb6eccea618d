#include "engine/likelihood.h"

#include <algorithm>
#include <cmath>

namespace longkv {

namespace {

// Files of logits clamp what lies further below the best than this (engine/logits_file.h); such entries are no
// probabilities and are left out, as llama-perplexity does.
constexpr float kRecordedFloor = -16.0f;

// log of the sum of exponentials, in double.
double log_sum_exp(const float* logits, int64_t n) {
  const float best = *std::max_element(logits, logits + n);
  double sum = 0.0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(double(logits[i]) - double(best));
  return double(best) + std::log(sum);
}

}  // namespace

double negative_log_likelihood(const float* logits, int64_t vocab, int32_t token) {
  return log_sum_exp(logits, vocab) - double(logits[token]);
}

double kl_divergence(const float* base_logits, const float* logits, int64_t vocab) {
  const double base = log_sum_exp(base_logits, vocab), other = log_sum_exp(logits, vocab);
  double kl = 0.0;
  for (int64_t i = 0; i < vocab; ++i) {
    const double log_p = double(base_logits[i]) - base;
    const double p = std::exp(log_p);
    if (p > 0.0) kl += p * (log_p - (double(logits[i]) - other));
  }
  return kl;
}

void PerplexityMeter::add(double nll) {
  ++count_;
  sum_ += nll;
  sum_squares_ += nll * nll;
}

double PerplexityMeter::perplexity() const { return count_ == 0 ? NAN : std::exp(sum_ / double(count_)); }

double PerplexityMeter::standard_error() const {
  if (count_ < 2) return NAN;
  const double mean = sum_ / double(count_);
  const double variance = std::max(0.0, sum_squares_ / double(count_) - mean * mean);
  return std::sqrt(variance / double(count_ - 1)) * std::exp(mean);
}

void DivergenceMeter::add(const float* base, const float* logits, int64_t vocab, int32_t token) {
  const double normaliser = log_sum_exp(logits, vocab);
  double kl = 0.0;
  for (int64_t i = 0; i < vocab; ++i) {
    if (base[i] <= kRecordedFloor) continue;
    kl += std::exp(double(base[i])) * (double(base[i]) - (double(logits[i]) - normaliser));
  }
  kl_.push_back(kl);
  const double difference = std::exp(double(logits[token]) - normaliser) - std::exp(double(base[token]));
  sum_squared_difference_ += difference * difference;
  sum_base_nll_ -= double(base[token]);
  same_ += (std::max_element(base, base + vocab) - base) == (std::max_element(logits, logits + vocab) - logits);
}

MeanAndError DivergenceMeter::kl() const {
  MeanAndError r;
  if (kl_.empty()) return {NAN, NAN};
  for (double v : kl_) r.mean += v;
  r.mean /= double(kl_.size());
  double squares = 0.0;
  for (double v : kl_) squares += (v - r.mean) * (v - r.mean);
  r.standard_error = kl_.size() < 2 ? NAN : std::sqrt(squares / double(kl_.size() - 1) / double(kl_.size()));
  return r;
}

double DivergenceMeter::kl_percentile(double fraction) const {
  if (kl_.empty()) return NAN;
  std::vector<double> sorted = kl_;
  std::sort(sorted.begin(), sorted.end());
  const double at = fraction * double(sorted.size() - 1);
  const auto low = size_t(at);
  const size_t high = std::min(low + 1, sorted.size() - 1);
  return sorted[low] + (at - double(low)) * (sorted[high] - sorted[low]);
}

double DivergenceMeter::kl_max() const { return kl_.empty() ? NAN : *std::max_element(kl_.begin(), kl_.end()); }

double DivergenceMeter::rms_probability_difference() const {
  return kl_.empty() ? NAN : std::sqrt(sum_squared_difference_ / double(kl_.size()));
}

double DivergenceMeter::same_top() const { return kl_.empty() ? NAN : double(same_) / double(kl_.size()); }

double DivergenceMeter::base_perplexity() const {
  return kl_.empty() ? NAN : std::exp(sum_base_nll_ / double(kl_.size()));
}

}  // namespace longkv
