#include "kv/keep/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace longkv {

namespace {

struct Link {
  double score;
  int64_t left, right;
};

class Merger {
 public:
  Merger(const KeepSpec& spec, MergeRows& rows, std::vector<RowMerge>& merges)
      : spec_(spec), rows_(rows), merges_(merges), next_(rows.size()), alive_(rows.size(), 1), left_(rows.size()) {
    for (size_t r = 0; r < rows.size(); ++r) next_[r] = int64_t(r) + 1;
    total_mass_ = 0;
    for (size_t r = 0; r < rows.size(); ++r) total_mass_ += rows.fixed[r] != 0 ? 0.0 : rows.mass[r];
  }

  void reduce_to(int64_t budget) {
    while (int64_t(left_) > budget && pass(int64_t(left_) - budget)) {
    }
    if (int64_t(left_) > budget) drop(int64_t(left_) - budget);
  }

  std::vector<int64_t> survivors() const {
    std::vector<int64_t> out;
    for (size_t r = 0; r < alive_.size(); ++r) {
      if (alive_[r] != 0) out.push_back(int64_t(r));
    }
    return out;
  }

 private:
  // One wave of disjoint links; false when there was none to merge.
  bool pass(int64_t wanted) {
    std::vector<Link> links;
    int64_t place = 0;
    for (int64_t r = 0; r < int64_t(alive_.size()); r = next_[size_t(r)], ++place) {
      const int64_t other = next_[size_t(r)];
      if (other >= int64_t(alive_.size()) || rows_.fixed[size_t(r)] != 0 || rows_.fixed[size_t(other)] != 0) continue;
      const int64_t count = rows_.count[size_t(r)] + rows_.count[size_t(other)];
      if (spec_.max_count > 0 && count > spec_.max_count) continue;
      double score = (rows_.mass[size_t(r)] + rows_.mass[size_t(other)]) * double(count);
      if (spec_.gamma > 0) score *= std::exp(-double(place) / spec_.gamma);
      links.push_back({score, r, other});
    }
    std::sort(links.begin(), links.end(),
              [](const Link& a, const Link& b) { return a.score != b.score ? a.score < b.score : a.left < b.left; });
    int64_t limit = std::min(wanted, std::max<int64_t>(1, int64_t(left_) / 4));
    std::vector<char> used(alive_.size(), 0);
    bool any = false;
    for (const Link& link : links) {
      if (limit == 0) break;
      if (used[size_t(link.left)] != 0 || used[size_t(link.right)] != 0) continue;
      used[size_t(link.left)] = used[size_t(link.right)] = 1;
      merge(size_t(link.left), size_t(link.right));
      --limit;
      any = true;
    }
    return any;
  }

  double key_share(size_t a, size_t b, double p) const {
    const double w1 = rows_.weight[a], w2 = rows_.weight[b];
    switch (spec_.key_weight) {
      case KeepKeyWeight::kMean: return 0.5;
      case KeepKeyWeight::kMass: return p;
      case KeepKeyWeight::kNorm: return w1 + w2 > 0 ? w1 / (w1 + w2) : p;
      case KeepKeyWeight::kSlimmer: break;
    }
    // h_j = alpha_j |1 - 2 alpha_j| d_j with alpha_j the share of the mass that is not fixed, d_j = w_j / m_j.
    if (total_mass_ <= 0) return p;
    const double a1 = rows_.mass[a] / total_mass_, a2 = rows_.mass[b] / total_mass_;
    const double d1 = rows_.mass[a] > 0 ? w1 / rows_.mass[a] : 0, d2 = rows_.mass[b] > 0 ? w2 / rows_.mass[b] : 0;
    const double cross = a1 * a2 * (d1 + d2);
    const double x = a1 * std::abs(1 - 2 * a1) * d1 - cross, y = a2 * std::abs(1 - 2 * a2) * d2 - cross;
    // The denominator can vanish or change its sign once a row has half of the mass.
    return x + y < 1e-12 ? p : std::clamp(x / (x + y), 0.0, 1.0);
  }

  void merge(size_t a, size_t b) {
    const double m = rows_.mass[a] + rows_.mass[b];
    const double p = m > 0 ? rows_.mass[a] / m : 0.5;
    const auto n1 = double(rows_.count[a]), n2 = double(rows_.count[b]);
    RowMerge merge;
    merge.into = int64_t(a);
    merge.from = int64_t(b);
    merge.k_share = float(key_share(a, b, p));
    if (spec_.merge_bias == KeepBias::kCount) {
      merge.v_share = float(n1 / (n1 + n2));
      rows_.bias[a] = std::log(n1 + n2);
    } else {
      const auto part = [](double x) { return x > 0 ? -x * std::log(x) : 0.0; };
      merge.v_share = float(p);
      rows_.bias[a] = p * rows_.bias[a] + (1 - p) * rows_.bias[b] + part(p) + part(1 - p);
    }
    rows_.pos[a] = std::llround((n1 * double(rows_.pos[a]) + n2 * double(rows_.pos[b])) / (n1 + n2));
    rows_.count[a] += rows_.count[b];
    rows_.mass[a] = m;
    rows_.weight[a] += rows_.weight[b];
    merge.bias = float(rows_.bias[a]);
    merge.count = uint16_t(std::min<int64_t>(rows_.count[a], std::numeric_limits<uint16_t>::max()));
    merge.pos = int32_t(rows_.pos[a]);
    merges_.push_back(merge);
    next_[a] = next_[b];
    alive_[b] = 0;
    --left_;
  }

  void drop(int64_t n) {
    std::vector<int64_t> rows;
    for (const int64_t r : survivors()) {
      if (rows_.fixed[size_t(r)] == 0) rows.push_back(r);
    }
    n = std::min(n, int64_t(rows.size()));
    const auto lighter = [&](int64_t a, int64_t b) {
      return rows_.mass[size_t(a)] != rows_.mass[size_t(b)] ? rows_.mass[size_t(a)] < rows_.mass[size_t(b)] : a < b;
    };
    std::nth_element(rows.begin(), rows.begin() + n, rows.end(), lighter);
    for (int64_t i = 0; i < n; ++i) alive_[size_t(rows[size_t(i)])] = 0;
    left_ -= size_t(n);
  }

  const KeepSpec& spec_;
  MergeRows& rows_;
  std::vector<RowMerge>& merges_;
  std::vector<int64_t> next_;  // the next row that is still there
  std::vector<char> alive_;
  size_t left_;
  double total_mass_;
};

}  // namespace

void merge_links(const KeepSpec& spec, int64_t budget, MergeRows& rows, std::vector<int64_t>& kept,
                 std::vector<RowMerge>& merges) {
  Merger merger(spec, rows, merges);
  merger.reduce_to(budget);
  kept = merger.survivors();
}

}  // namespace longkv
