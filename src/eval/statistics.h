// What a handful of scores can say.
#pragma once

#include <cstdint>
#include <span>

namespace longkv {

struct Interval {
  double mean = 0, low = 0, high = 0;
  int64_t n = 0;
};

// Mean with a 95% interval: Wilson's for scores of 0 and 1, else Student's t, cut to [0, 1] when `share`.
Interval mean_interval(std::span<const double> scores, bool share = true);

// Paired differences a - b of the same samples.
struct Paired {
  int64_t n = 0;
  double difference = 0, low = 0,
         high = 0;                // mean of a - b, with a 95% interval of Student's t, cut to [-1, 1] when `share`
  int64_t better = 0, worse = 0;  // samples with a > b, a < b
  double p = 1;                   // two-sided sign test, exact
};
Paired paired_difference(std::span<const double> a, std::span<const double> b, bool share = true);

// P(X <= min(k, n - k) or X >= max(k, n - k)) for X binomial with chance 1/2.
double sign_test(int64_t k, int64_t n);
// 97.5% quantile of Student's t.
double student_t(int64_t degrees);

}  // namespace longkv
