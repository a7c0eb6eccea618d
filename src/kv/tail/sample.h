// Uniform random samples of the rows that a step does not read, and how large they have to be (vAttention,
// arXiv 2510.05688).
//
// The sample is without replacement and weighted by one over its rate: numerator and denominator of the softmax over
// the other rows are unbiased. Random numbers come from a counter: the same seed, layer, head and step give the same
// rows on any number of threads.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/types.h"

namespace longkv {

// A key for everything random in one list of one layer in one step.
uint64_t sample_key(int64_t seed, int64_t layer, int64_t list, int64_t step);

// A random order of [0, n), by a four-round Feistel network that walks until it is back inside.
class SampleOrder {
 public:
  SampleOrder(uint64_t key, int64_t n);
  int64_t at(int64_t i) const;

 private:
  uint64_t round(uint64_t x) const;
  uint64_t key_;
  uint64_t n_;
  int half_bits_;
};

// The first `count` rows of the order over the rows of `ranges`, ascending, neighbours joined; `out` is replaced.
void sample_ranges(std::span<const RowRange> ranges, const SampleOrder& order, int64_t count,
                   std::vector<int64_t>& scratch, std::vector<RowRange>& out);

// The part of `visible` outside of `ranges` (ascending, disjoint); `out` is replaced.
void other_rows(std::span<const RowRange> ranges, RowRange visible, std::vector<RowRange>& out);

// Rows to sample so that numerator and denominator of the whole softmax each have a relative error of at most epsilon,
// both with probability 1 - delta, by the central limit theorem with the base sample's variances and the correction
// for a finite population. logits: [n_base], natural; values: [n_base][dim]; `rest` rows are represented by the base
// sample; (out, lse): of the rows that are read.
int64_t sample_size(const float* logits, const float* values, int64_t n_base, int64_t dim, int64_t rest,
                    const float* out, float lse, double epsilon, double delta);

// x with P(Z <= x) = p for a standard normal Z; 0 < p < 1.
double normal_quantile(double p);

}  // namespace longkv
