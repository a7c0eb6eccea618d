// Merging of neighbouring rows, scored by attention mass: links, weights and biases, on plain numbers so that they can
// be checked apart from a cache.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kv/keep/keep.h"

namespace longkv {

// What is known of each row of a head. All: [rows], in the order of positions.
struct MergeRows {
  std::vector<double> mass;    // softmax mass from the observed queries
  std::vector<double> weight;  // the same, weighted by |v_j - o_t|; or the slimmer proxy h_j
  std::vector<double> bias;
  std::vector<int64_t> count;
  std::vector<int64_t> pos;
  std::vector<char> fixed;  // neither merged nor dropped
  size_t size() const { return mass.size(); }
};

// Brings a head to `budget` rows. Links of neighbouring rows are merged in passes, those of least
//   (m_j + m_{j+1}) (n_j + n_{j+1}) exp(-j / gamma)        (gamma 0: without the last factor)
// first, no row in two links of one pass and at most a quarter of the rows in one pass; links above max_count tokens
// are left out (0: no limit). Where links run out, rows of least mass are dropped. The survivor of a link is the older
// row.
//
//   key share    norm: w1 / (w1 + w2)   mass: p = m1 / (m1 + m2)   mean: 1/2
//                slimmer: (h1 - h12) / (h1 + h2 - 2 h12), clamped, h12 = m1 m2 (d1 + d2) on normalised masses
//   entropy      value share p, bias p b1 + (1 - p) b2 + H(p): exact for a query of those masses and keys shared by
//   mass count        value share n1 / (n1 + n2), bias ln(n1 + n2): exact for equal keys
void merge_links(const KeepSpec& spec, int64_t budget, MergeRows& rows, std::vector<int64_t>& kept,
                 std::vector<RowMerge>& merges);

}  // namespace longkv
