#include "kv/keep/merge.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kv/attend_kernel.h"

namespace longkv {

namespace {

constexpr float kNotSeen = -std::numeric_limits<float>::infinity();
constexpr double kFloor = 1e-21;                                     // the release's guard of denominators
constexpr double kLast = std::numeric_limits<double>::max();         // score of a link that nothing may come after
constexpr int64_t kMaxCount = std::numeric_limits<uint16_t>::max();  // of a row, as the cache keeps it

struct Link {
  double score;
  int64_t left, right;
};

// What a link's row would be, but for shares of single channels.
struct Merged {
  double p;        // share of the older row in the mass
  double k_share;  // ... in the key
  double v_into, v_from;
  double bias;
  int64_t count;
};

// One head: rows, and what the sampled queries give them now.
class MergeHead {
 public:
  MergeHead(const KeepSpec& spec, MergeRows& rows, std::vector<RowMerge>& merges)
      : spec_(spec), rows_(rows), merges_(merges) {
    for (size_t r = 0; r < rows.size(); ++r) total_mass_ += rows.fixed[r] != 0 ? 0.0 : rows.mass[r];
    const MergeSample& s = rows.sample;
    seen_.resize(s.logit.size());
    for (size_t r = 0; r < rows.size() && !s.empty(); ++r) refresh(r);
  }

  const MergeRows& rows() const { return rows_; }

  // |change of output|^2 of the sampled queries, summed.
  double cost(size_t a, size_t b) {
    const Merged m = merged(a, b);
    const MergeSample& s = rows_.sample;
    const Pair pair = pair_of(a, b);
    const double top = mix_logits(a, b, m.k_share) + m.bias;
    double sum = 0;
    for (int64_t t = 0; t < s.queries; ++t) {
      const double x = std::exp(top) * mixed_[size_t(t)];
      const double e1 = x * m.v_into - seen(a)[t], e2 = x * m.v_from - seen(b)[t];
      const double cross = pair.values - dot(a)[t] - dot(b)[t] + s.out_square[size_t(t)];
      sum += e1 * e1 * square(pair.a, a, t) + 2 * e1 * e2 * cross + e2 * e2 * square(pair.b, b, t);
    }
    return sum;
  }

  void merge(size_t a, size_t b) {
    const Merged m = merged(a, b);
    RowMerge out;
    out.into = int64_t(a);
    out.from = int64_t(b);
    out.k_share = float(m.k_share);
    out.v_into = float(m.v_into);
    out.v_from = float(m.v_from);
    const auto n1 = double(rows_.count[a]), n2 = double(rows_.count[b]);
    rows_.pos[a] = spec_.before_rope
                       ? rows_.pos[b]
                       : std::llround((n1 * double(rows_.pos[a]) + n2 * double(rows_.pos[b])) / (n1 + n2));
    if (!rows_.gradient.empty()) out.k_shares = channel_shares(a, b);
    if (!rows_.sample.empty()) merge_sample(a, b, m);
    merge_weight(a, b);
    rows_.bias[a] = m.bias;
    rows_.count[a] = m.count;
    rows_.mass[a] += rows_.mass[b];
    if (!rows_.sample.empty()) refresh(a);
    out.bias = float(m.bias);
    out.count = uint16_t(std::min(m.count, kMaxCount));
    out.pos = int32_t(rows_.pos[a]);
    merges_.push_back(std::move(out));
  }

 private:
  struct Pair {
    double a = 0, b = 0, values = 0;  // |v1|^2, |v2|^2, v1 . v2
  };

  const float* logit(size_t r) const { return rows_.sample.logit.data() + int64_t(r) * rows_.sample.queries; }
  const float* dot(size_t r) const { return rows_.sample.dot.data() + int64_t(r) * rows_.sample.queries; }
  const float* seen(size_t r) const { return seen_.data() + int64_t(r) * rows_.sample.queries; }

  Pair pair_of(size_t a, size_t b) const {
    const int64_t dim = rows_.sample.dim_v;
    const float *x = rows_.sample.values.data() + int64_t(a) * dim, *y = rows_.sample.values.data() + int64_t(b) * dim;
    Pair pair;
    for (int64_t c = 0; c < dim; ++c) {
      pair.a += double(x[c]) * x[c];
      pair.b += double(y[c]) * y[c];
      pair.values += double(x[c]) * y[c];
    }
    return pair;
  }

  // |v - o|^2 for query t, from |v|^2.
  double square(double value, size_t r, int64_t t) const {
    return std::max(0.0, value - 2.0 * dot(r)[t] + rows_.sample.out_square[size_t(t)]);
  }

  // Masses of a row for the sampled queries.
  void refresh(size_t r) {
    const int64_t n = rows_.sample.queries;
    float* out = seen_.data() + int64_t(r) * n;
    for (int64_t t = 0; t < n; ++t) out[t] = std::min(0.0f, logit(r)[t] + float(rows_.bias[r]));
    exp_nonpositive(out, out, n);
  }

  // mixed_[t] = exp(logit of the mixed key - top); returns top.
  double mix_logits(size_t a, size_t b, double share) {
    const int64_t n = rows_.sample.queries;
    mixed_.resize(size_t(n));
    float top = kNotSeen;
    for (int64_t t = 0; t < n; ++t) top = std::max(top, mixed_[size_t(t)] = mixed_logit(a, b, float(share), t));
    if (top == kNotSeen) top = 0.0f;
    for (float& x : mixed_) x -= top;
    exp_nonpositive(mixed_.data(), mixed_.data(), n);
    return top;
  }

  // A query that sees one of two rows only knows that one.
  float mixed_logit(size_t a, size_t b, float share, int64_t t) const {
    const float x = logit(a)[t], y = logit(b)[t];
    if (x == kNotSeen || y == kNotSeen) return std::max(x, y);
    return share * x + (1.0f - share) * y;
  }

  Merged merged(size_t a, size_t b) {
    const double mass = rows_.mass[a] + rows_.mass[b];
    Merged m{};
    m.p = mass > 0 ? rows_.mass[a] / mass : 0.5;
    m.k_share = key_share(a, b, m.p);
    m.count = rows_.count[a] + rows_.count[b];
    if (spec_.clip > 0) m.count = std::min(m.count, spec_.clip);
    m.v_into = m.p;
    m.v_from = 1 - m.p;
    const auto part = [](double x) { return x > 0 ? -x * std::log(x) : 0.0; };
    switch (spec_.merge_bias) {
      case KeepBias::kCount:
        m.v_into = double(rows_.count[a]) / double(m.count);
        m.v_from = double(rows_.count[b]) / double(m.count);
        m.bias = std::log(double(m.count));
        break;
      case KeepBias::kEntropy:
        m.bias = m.p * rows_.bias[a] + (1 - m.p) * rows_.bias[b] + part(m.p) + part(1 - m.p);
        break;
      case KeepBias::kFit: m.bias = fit_bias(a, b, m); break;
    }
    return m;
  }

  // The bias with which the sampled queries give the mixed key what they gave both.
  double fit_bias(size_t a, size_t b, const Merged& m) {
    const double top = mix_logits(a, b, m.k_share);
    double wanted = 0, found = 0;
    for (int64_t t = 0; t < rows_.sample.queries; ++t) {
      wanted += double(seen(a)[t]) + seen(b)[t];
      found += mixed_[size_t(t)];
    }
    const double count = std::log(double(m.count));
    if (!(wanted > 0) || !(found > 0)) return count;
    return std::clamp(std::log(wanted) - std::log(found) - top, -2.0, count + 2.0);
  }

  double key_share(size_t a, size_t b, double p) const {
    const double w1 = rows_.weight[a], w2 = rows_.weight[b];
    switch (spec_.key_weight) {
      case KeepKeyWeight::kMean: return 0.5;
      case KeepKeyWeight::kMass: return p;
      case KeepKeyWeight::kNorm: return w1 + w2 > 0 ? w1 / (w1 + w2) : p;
      case KeepKeyWeight::kSlimmer: break;
    }
    double x = 0, y = 0;
    slimmer_terms(a, b, x, y);
    if (spec_.norms == KeepNorms::kRelease) return x / (x + y + kFloor);
    // The denominator can vanish or change its sign once a row has half of the mass.
    return x + y < 1e-12 ? p : std::clamp(x / (x + y), 0.0, 1.0);
  }

  void slimmer_terms(size_t a, size_t b, double& x, double& y) const {
    if (spec_.norms == KeepNorms::kQuery && !rows_.sample.empty()) return query_terms(a, b, x, y);
    if (total_mass_ <= 0) return;
    const double a1 = rows_.mass[a] / total_mass_, a2 = rows_.mass[b] / total_mass_;
    double h1 = rows_.weight[a], h2 = rows_.weight[b], d1, d2;
    if (spec_.norms == KeepNorms::kRelease) {
      d1 = h1 / (a1 * (1 - 2 * a1) + kFloor);
      d2 = h2 / (a2 * (1 - 2 * a2) + kFloor);
    } else {
      d1 = rows_.mass[a] > 0 ? h1 / rows_.mass[a] : 0;
      d2 = rows_.mass[b] > 0 ? h2 / rows_.mass[b] : 0;
      h1 = a1 * std::abs(1 - 2 * a1) * d1;
      h2 = a2 * std::abs(1 - 2 * a2) * d2;
    }
    const double cross = a1 * a2 * (d1 + d2);
    x = h1 - cross;
    y = h2 - cross;
  }

  void query_terms(size_t a, size_t b, double& x, double& y) const {
    const Pair pair = pair_of(a, b);
    for (int64_t t = 0; t < rows_.sample.queries; ++t) {
      const double a1 = seen(a)[t], a2 = seen(b)[t];
      const double s1 = square(pair.a, a, t), s2 = square(pair.b, b, t);
      const double inner = pair.values - dot(a)[t] - dot(b)[t] + rows_.sample.out_square[size_t(t)];
      const double cross = a1 * a2 * std::sqrt(std::max(0.0, s1 + s2 + 2 * inner));
      x += a1 * std::abs(1 - 2 * a1) * std::sqrt(s1) - cross;
      y += a2 * std::abs(1 - 2 * a2) * std::sqrt(s2) - cross;
    }
  }

  std::vector<float> channel_shares(size_t a, size_t b) {
    const int64_t dim = rows_.dim_k();
    float *g1 = rows_.gradient.data() + int64_t(a) * dim, *g2 = rows_.gradient.data() + int64_t(b) * dim;
    std::vector<float> shares(size_t(dim), 0.5f);
    for (int64_t c = 0; c < dim; ++c) {
      const double x = double(g1[c]) * g1[c], y = double(g2[c]) * g2[c];
      if (x + y > 0) shares[size_t(c)] = float(x / (x + y));
      g1[c] += g2[c];
    }
    return shares;
  }

  void merge_sample(size_t a, size_t b, const Merged& m) {
    MergeSample& s = rows_.sample;
    for (int64_t t = 0; t < s.queries; ++t) {
      const float mixed = mixed_logit(a, b, float(m.k_share), t);
      s.logit[a * size_t(s.queries) + size_t(t)] = mixed;
      float& into = s.dot[a * size_t(s.queries) + size_t(t)];
      into = float(m.v_into) * into + float(m.v_from) * dot(b)[t];
    }
    for (int64_t c = 0; c < s.dim_v; ++c) {
      float& into = s.values[a * size_t(s.dim_v) + size_t(c)];
      into = float(m.v_into) * into + float(m.v_from) * s.values[b * size_t(s.dim_v) + size_t(c)];
    }
  }

  void merge_weight(size_t a, size_t b) {
    double& w1 = rows_.weight[a];
    const double w2 = rows_.weight[b];
    if (spec_.key_weight == KeepKeyWeight::kSlimmer && spec_.norms == KeepNorms::kRelease) {
      double x = 0, y = 0;
      slimmer_terms(a, b, x, y);
      const double s1 = x / (x + y + kFloor), s2 = y / (x + y + kFloor);
      w1 = s1 * s1 * w1 + s2 * s2 * w2;
    } else {
      w1 += w2;
    }
  }

  const KeepSpec& spec_;
  MergeRows& rows_;
  std::vector<RowMerge>& merges_;
  double total_mass_ = 0;
  std::vector<float> seen_;   // [rows][queries]
  std::vector<float> mixed_;  // [queries]
};

class Merger {
 public:
  Merger(const KeepSpec& spec, std::span<MergeRows> heads, std::span<std::vector<RowMerge>> merges)
      : spec_(spec), next_(heads[0].size()), alive_(heads[0].size(), 1), left_(heads[0].size()) {
    for (size_t h = 0; h < heads.size(); ++h) heads_.emplace_back(spec, heads[h], merges[h]);
    for (size_t r = 0; r < next_.size(); ++r) next_[r] = int64_t(r) + 1;
    costs_.assign(next_.size(), -1.0);
  }

  void reduce_to(int64_t budget) {
    if (spec_.links == KeepLinks::kChained) {
      if (int64_t(left_) > budget) chain(int64_t(left_) - budget);
    } else {
      while (int64_t(left_) > budget && pass(int64_t(left_) - budget)) {
      }
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
  // All links that may be merged, the least first.
  std::vector<Link> links() {
    std::vector<Link> links;
    int64_t place = 0;
    for (int64_t r = 0; r < int64_t(alive_.size()); r = next_[size_t(r)], ++place) {
      const int64_t other = next_[size_t(r)];
      if (other >= int64_t(alive_.size()) || !may_merge(size_t(r), size_t(other))) continue;
      double score = link_score(size_t(r), size_t(other));
      if (spec_.gamma > 0 && score < kLast) score *= std::exp(-double(place) / spec_.gamma);
      links.push_back({score, r, other});
    }
    std::sort(links.begin(), links.end(),
              [](const Link& a, const Link& b) { return a.score != b.score ? a.score < b.score : a.left < b.left; });
    return links;
  }

  bool may_merge(size_t a, size_t b) const {
    return std::all_of(heads_.begin(), heads_.end(), [&](const MergeHead& head) {
      const MergeRows& rows = head.rows();
      if (rows.fixed[a] != 0 || rows.fixed[b] != 0) return false;
      return rows.count[a] + rows.count[b] <= (spec_.max_count > 0 ? std::min(spec_.max_count, kMaxCount) : kMaxCount);
    });
  }

  double link_score(size_t a, size_t b) {
    if (spec_.link_score == KeepLinkScore::kCost) {
      // A row has one link to the right, so what is known of it stays until one of its ends is merged.
      double& cost = costs_[a];
      if (cost < 0) {
        cost = 0;
        for (MergeHead& head : heads_) cost += head.cost(a, b);
        // The release's shares have a denominator that can vanish; such a link comes last.
        if (!std::isfinite(cost)) cost = kLast;
      }
      return cost;
    }
    double mass = 0, count = 0;
    for (const MergeHead& head : heads_) {
      mass += head.rows().mass[a] + head.rows().mass[b];
      count += double(head.rows().count[a] + head.rows().count[b]);
    }
    return spec_.count_factor ? mass * count : mass;
  }

  // One wave of disjoint links; false when there was none to merge.
  bool pass(int64_t wanted) {
    int64_t limit = std::min(wanted, std::max<int64_t>(1, int64_t(left_) / 4));
    std::vector<char> used(alive_.size(), 0);
    bool any = false;
    for (const Link& link : links()) {
      if (limit == 0) break;
      if (used[size_t(link.left)] != 0 || used[size_t(link.right)] != 0) continue;
      used[size_t(link.left)] = used[size_t(link.right)] = 1;
      merge(size_t(link.left), size_t(link.right));
      --limit;
      any = true;
    }
    return any;
  }

  // The release's choice: links are taken one by one, so a row may be the right one of a link and the left one of the
  // next, and then goes with what it took up.
  void chain(int64_t wanted) {
    std::vector<Link> chosen = links();
    chosen.resize(std::min(chosen.size(), size_t(wanted)));
    std::vector<char> right(alive_.size(), 0);
    for (const Link& link : chosen) right[size_t(link.right)] = 1;
    for (const Link& link : chosen) {
      if (right[size_t(link.left)] != 0) continue;
      for (MergeHead& head : heads_) head.merge(size_t(link.left), size_t(link.right));
    }
    for (size_t r = 0; r < right.size(); ++r) {
      if (right[r] != 0) alive_[r] = 0;
    }
    left_ -= chosen.size();
  }

  void merge(size_t a, size_t b) {
    for (MergeHead& head : heads_) head.merge(a, b);
    costs_[a] = costs_[b] = -1;
    for (size_t r = a; r-- > 0;) {
      if (alive_[r] == 0) continue;
      costs_[r] = -1;  // its link ends at a
      break;
    }
    next_[a] = next_[b];
    alive_[b] = 0;
    --left_;
  }

  void drop(int64_t n) {
    std::vector<int64_t> rows;
    for (const int64_t r : survivors()) {
      if (heads_[0].rows().fixed[size_t(r)] == 0) rows.push_back(r);
    }
    n = std::min(n, int64_t(rows.size()));
    const auto mass = [&](int64_t r) {
      double sum = 0;
      for (const MergeHead& head : heads_) sum += head.rows().mass[size_t(r)];
      return sum;
    };
    const auto lighter = [&](int64_t a, int64_t b) {
      const double x = mass(a), y = mass(b);
      return x != y ? x < y : a < b;
    };
    std::nth_element(rows.begin(), rows.begin() + n, rows.end(), lighter);
    for (int64_t i = 0; i < n; ++i) alive_[size_t(rows[size_t(i)])] = 0;
    left_ -= size_t(n);
  }

  const KeepSpec& spec_;
  std::vector<MergeHead> heads_;
  std::vector<int64_t> next_;  // the next row that is still there
  std::vector<char> alive_;
  std::vector<double> costs_;  // of the link that begins at a row; below 0: not known
  size_t left_;
};

}  // namespace

void merge_links(const KeepSpec& spec, int64_t budget, std::span<MergeRows> heads, std::vector<int64_t>& kept,
                 std::span<std::vector<RowMerge>> merges) {
  Merger merger(spec, heads, merges);
  merger.reduce_to(budget);
  kept = merger.survivors();
}

}  // namespace longkv
