#include "kv/tail/sample.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "kv/layout.h"

namespace longkv {

namespace {

// The finaliser of SplitMix64.
uint64_t mix(uint64_t x) {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
  x = (x ^ x >> 27) * 0x94d049bb133111ebu;
  return x ^ x >> 31;
}

}  // namespace

uint64_t sample_key(int64_t seed, int64_t layer, int64_t list, int64_t step) {
  return mix(mix(mix(mix(uint64_t(seed)) ^ uint64_t(layer)) ^ uint64_t(list)) ^ uint64_t(step));
}

SampleOrder::SampleOrder(uint64_t key, int64_t n)
    : key_(key),
      n_(uint64_t(n)),
      half_bits_(std::max(1, (int(std::bit_width(uint64_t(std::max<int64_t>(n, 2) - 1))) + 1) / 2)) {}

uint64_t SampleOrder::round(uint64_t x) const {
  const uint64_t mask = (uint64_t{1} << half_bits_) - 1;
  uint64_t left = x >> half_bits_, right = x & mask;
  for (uint64_t r = 0; r < 4; ++r) {
    const uint64_t next = left ^ (mix(key_ + r * 0x632be59bd9b4e019u + right) & mask);
    left = right;
    right = next;
  }
  return left << half_bits_ | right;
}

int64_t SampleOrder::at(int64_t i) const {
  uint64_t x = uint64_t(i);
  do x = round(x);
  while (x >= n_);
  return int64_t(x);
}

void sample_ranges(std::span<const RowRange> ranges, const SampleOrder& order, int64_t count,
                   std::vector<int64_t>& scratch, std::vector<RowRange>& out) {
  // A bit per row that may be drawn: no sorting.
  const int64_t n = count_rows(ranges);
  scratch.assign(size_t(n / 64 + 1), 0);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = order.at(i);
    scratch[size_t(place / 64)] |= int64_t(uint64_t{1} << (place % 64));
  }
  out.clear();
  size_t range = 0;
  int64_t passed = 0;
  for (size_t word = 0; word < scratch.size(); ++word) {
    for (auto bits = uint64_t(scratch[word]); bits != 0; bits &= bits - 1) {
      const int64_t place = int64_t(word) * 64 + std::countr_zero(bits);
      while (place - passed >= count_of(ranges[range])) passed += count_of(ranges[range++]);
      const int64_t row = ranges[range].begin + place - passed;
      append_range(out, {row, row + 1});
    }
  }
}

void other_rows(std::span<const RowRange> ranges, RowRange visible, std::vector<RowRange>& out) {
  out.clear();
  int64_t at = visible.begin;
  for (const RowRange& r : ranges) {
    append_range(out, {at, std::min(r.begin, visible.end)});
    at = std::max(at, r.end);
  }
  append_range(out, {at, visible.end});
}

int64_t sample_size(const float* logits, const float* values, int64_t n_base, int64_t dim, int64_t rest,
                    const float* out, float lse, double epsilon, double delta) {
  if (n_base < 2 || epsilon <= 0) return n_base;
  double peak = lse;
  for (int64_t i = 0; i < n_base; ++i) peak = std::max(peak, double(logits[i]));
  if (!std::isfinite(peak)) return n_base;
  const double n = double(n_base), held = std::exp(double(lse) - peak);
  // With weight w of a row and u = (w, w v): mean and summed variance of the numerator's channels, and of w.
  double sum_w = 0, sum_w2 = 0, spread = 0;
  std::vector<double> sum(size_t(dim), 0.0);
  for (int64_t i = 0; i < n_base; ++i) {
    const double w = std::exp(double(logits[i]) - peak);
    sum_w += w;
    sum_w2 += w * w;
    for (int64_t c = 0; c < dim; ++c) {
      const double x = w * double(values[i * dim + c]);
      sum[size_t(c)] += x;
      spread += x * x;
    }
  }
  double numerator2 = 0;
  for (int64_t c = 0; c < dim; ++c) {
    spread -= sum[size_t(c)] * sum[size_t(c)] / n;
    const double x = held * double(out[c]) + double(rest) * sum[size_t(c)] / n;
    numerator2 += x * x;
  }
  const double denominator = held + double(rest) * sum_w / n;
  const double variance = std::max(0.0, (sum_w2 - sum_w * sum_w / n) / (n - 1));
  spread = std::max(0.0, spread / (n - 1));
  // Half of delta for each of the two, both sides.
  const double z = normal_quantile(1.0 - delta / 4.0), all = double(rest) * z / epsilon;
  const double of_denominator = all * all * variance / (denominator * denominator);
  const double of_numerator = numerator2 > 0 ? all * all * spread / numerator2 : 0.0;
  double wanted = std::max(of_denominator, of_numerator);
  wanted = wanted / (1.0 + wanted / double(rest));
  if (!(wanted < double(rest))) return rest;
  return std::clamp(int64_t(std::ceil(wanted)), n_base, rest);
}

double normal_quantile(double p) {
  // Bisection on the error function: exact to the last digits that matter, and never on a hot path.
  double low = -40, high = 40;
  for (int i = 0; i < 80; ++i) {
    const double middle = 0.5 * (low + high);
    (0.5 * std::erfc(-middle * M_SQRT1_2) < p ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

}  // namespace longkv
