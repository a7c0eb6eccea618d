#include "eval/statistics.h"

#include <algorithm>
#include <cmath>
#include <vector>

namespace longkv {

namespace {

constexpr double kNormal975 = 1.959963984540054;

struct Moments {
  double mean = 0, deviation = 0;  // of the sample, with n - 1
};

Moments moments(std::span<const double> x) {
  Moments m;
  for (const double v : x) m.mean += v / double(x.size());
  double squares = 0;
  for (const double v : x) squares += (v - m.mean) * (v - m.mean);
  if (x.size() > 1) m.deviation = std::sqrt(squares / double(x.size() - 1));
  return m;
}

// Distribution function of |t| for integer degrees of freedom, by the finite series (Abramowitz and Stegun 26.7.3-4).
double central_t(double t, int64_t degrees) {
  const double theta = std::atan2(t, std::sqrt(double(degrees)));
  const double c = std::cos(theta), s = std::sin(theta);
  if (degrees % 2 == 1) {
    double sum = 0, term = c;
    for (int64_t k = 1; k <= degrees - 2; k += 2) {
      sum += term;
      term *= c * c * double(k + 1) / double(k + 2);
    }
    return 2 / M_PI * (theta + s * sum);
  }
  double sum = 0, term = 1;
  for (int64_t k = 0; k <= degrees - 2; k += 2) {
    sum += term;
    term *= c * c * double(k + 1) / double(k + 2);
  }
  return s * sum;
}

}  // namespace

double student_t(int64_t degrees) {
  if (degrees > 2000) return kNormal975;
  double low = 1.9, high = 13;
  for (int i = 0; i < 60; ++i) {
    const double mid = (low + high) / 2;
    (central_t(mid, degrees) < 0.95 ? low : high) = mid;
  }
  return (low + high) / 2;
}

Interval mean_interval(std::span<const double> scores, bool share) {
  Interval r;
  r.n = int64_t(scores.size());
  if (scores.empty()) return r;
  const Moments m = moments(scores);
  r.mean = m.mean;
  const auto n = double(r.n);
  if (share && std::all_of(scores.begin(), scores.end(), [](double s) { return s == 0 || s == 1; })) {
    const double z2 = kNormal975 * kNormal975;
    const double centre = (r.mean + z2 / (2 * n)) / (1 + z2 / n);
    const double half = kNormal975 / (1 + z2 / n) * std::sqrt(r.mean * (1 - r.mean) / n + z2 / (4 * n * n));
    r.low = r.mean == 0 ? 0 : centre - half;
    r.high = r.mean == 1 ? 1 : centre + half;
    return r;
  }
  const double half = r.n > 1 ? student_t(r.n - 1) * m.deviation / std::sqrt(n) : HUGE_VAL;
  r.low = r.mean - half;
  r.high = r.mean + half;
  if (share) {
    r.low = std::max(0.0, r.low);
    r.high = std::min(1.0, r.high);
  }
  return r;
}

double sign_test(int64_t k, int64_t n) {
  if (n == 0) return 1;
  const int64_t tail = std::min(k, n - k);
  double sum = 0;
  for (int64_t i = 0; i <= tail; ++i) {
    sum += std::exp(std::lgamma(double(n + 1)) - std::lgamma(double(i + 1)) - std::lgamma(double(n - i + 1)) -
                    double(n) * std::log(2.0));
  }
  return std::min(1.0, 2 * sum);
}

Paired paired_difference(std::span<const double> a, std::span<const double> b, bool share) {
  Paired r;
  r.n = int64_t(std::min(a.size(), b.size()));
  if (r.n == 0) return r;
  std::vector<double> differences;
  for (int64_t i = 0; i < r.n; ++i) {
    differences.push_back(a[size_t(i)] - b[size_t(i)]);
    r.better += differences.back() > 0;
    r.worse += differences.back() < 0;
  }
  const Moments m = moments(differences);
  r.difference = m.mean;
  const double half = r.n > 1 ? student_t(r.n - 1) * m.deviation / std::sqrt(double(r.n)) : HUGE_VAL;
  r.low = m.mean - half;
  r.high = m.mean + half;
  if (share) {
    r.low = std::max(-1.0, r.low);
    r.high = std::min(1.0, r.high);
  }
  r.p = sign_test(r.better, r.better + r.worse);
  return r;
}

}  // namespace longkv
