// Merging of neighbouring rows: links, weights and biases, on plain numbers so that they can be checked apart from a
// cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/keep/keep.h"

namespace longkv {

// What a sample of queries says of each row of a head: query heads of the group are queries of their own.
struct MergeSample {
  int64_t queries = 0;
  int64_t dim_v = 0;
  std::vector<float> logit;       // [rows][queries], q.k * scale - lse; -inf: not seen
  std::vector<float> dot;         // [rows][queries], out . v
  std::vector<float> out_square;  // [queries], |out|^2
  std::vector<float> values;      // [rows][dim_v]
  bool empty() const { return queries == 0; }
};

// What is known of each row of a head. All: [rows], in the order of positions.
struct MergeRows {
  std::vector<double> mass;    // softmax mass from the observed queries
  std::vector<double> weight;  // the same, weighted by |v_j - o_t|; under norms=release its h_j
  std::vector<double> bias;
  std::vector<int64_t> count;
  std::vector<int64_t> pos;
  std::vector<char> fixed;      // neither merged nor dropped
  std::vector<float> gradient;  // [rows][dim_k]; empty: keys have one share for all channels
  MergeSample sample;           // for norms=query, link=cost and bias=fit
  size_t size() const { return mass.size(); }
  int64_t dim_k() const { return mass.empty() ? 0 : int64_t(gradient.size() / mass.size()); }
};

// Brings heads of equally many rows to `budget` rows each, by the same links. Links of neighbouring rows are merged in
// passes, those of least
//   mass   (m_j + m_{j+1}) (n_j + n_{j+1}) exp(-j / gamma)      (gamma 0: without the last factor), or
//   cost   sum_t |change of the sampled query's output|^2 / exp(j / gamma)
// first (sums over the heads), no row in two links of one pass and at most a quarter of the rows in one pass; links
// above max_count tokens are left out (0: above 65,535, the most that a row can count). links=chained takes all at once
// and lets them share rows: of a run of links the first pair is merged, and the rows after it are lost. Where links run
// out, rows of least mass are dropped. The survivor of a link is the older row.
//
//   key share    norm: w1 / (w1 + w2)   mass: p = m1 / (m1 + m2)   mean: 1/2
//                slimmer: A / (A + B), clamped; norms=query: A = sum_t a1 |1 - 2 a1| r1 - a1 a2 |v1 + v2 - 2 o|,
//                  r = |v - o|; pooled: the same of sums over queries; release: h1 - h12 and not clamped
//                gradient: per channel g1^2 / (g1^2 + g2^2), and g1 + g2 is the merged row's
//   entropy      value share p, bias p b1 + (1 - p) b2 + H(p): exact for a query of those masses and keys shared by
//   mass fit     value share p, bias ln sum_t (a1 + a2) - ln sum_t exp(q_t.k scale - lse_t) over the sample
//   count        value n1 / n, n2 / n, bias ln n, n = n1 + n2 or `clip`: exact for equal keys without a clip
void merge_links(const KeepSpec& spec, int64_t budget, std::span<MergeRows> heads, std::vector<int64_t>& kept,
                 std::span<std::vector<RowMerge>> merges);

}  // namespace longkv
