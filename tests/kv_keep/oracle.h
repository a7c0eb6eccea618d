// The methods' choices from their definitions, in double and with sorted sets of positions.
#pragma once

#include <algorithm>
#include <map>
#include <set>

#include "kv_keep/keep_harness.h"

namespace longkv::test {

using Positions = std::vector<int64_t>;

inline double dot(const float* a, const float* b, int n) {
  double sum = 0;
  for (int c = 0; c < n; ++c) sum += double(a[c]) * b[c];
  return sum;
}

// Softmax weights of query head j of a token over the positions that it sees.
inline std::map<int64_t, double> weights_of(const KvShape& s, const Tokens& t, int64_t token, int j,
                                            const Positions& held) {
  const double scale = 1.0 / std::sqrt(double(s.dim_k));
  const float* q = t.q_at(s, token) + int64_t(j) * s.dim_k;
  std::map<int64_t, double> w;
  double peak = -INFINITY, sum = 0;
  for (const int64_t p : held) {
    if (p > token) continue;
    w[p] = scale * dot(q, t.k_at(s, p) + int64_t(j / s.group_size) * s.dim_k, s.dim_k);
    peak = std::max(peak, w[p]);
  }
  for (auto& [p, x] : w) sum += x = std::exp(x - peak);
  for (auto& [p, x] : w) x /= sum;
  return w;
}

// Mass per held position from queries [from, to), per query head.
inline std::vector<std::vector<double>> mass_of(const KvShape& s, const Tokens& t, int64_t from, int64_t to,
                                                int kv_head, const Positions& held) {
  std::vector<std::vector<double>> mass(size_t(s.group_size), std::vector<double>(held.size(), 0.0));
  for (int g = 0; g < s.group_size; ++g) {
    for (int64_t i = from; i < to; ++i) {
      const auto w = weights_of(s, t, i, kv_head * s.group_size + g, held);
      for (size_t r = 0; r < held.size(); ++r) {
        const auto it = w.find(held[r]);
        if (it != w.end()) mass[size_t(g)][r] += it->second;
      }
    }
  }
  return mass;
}

inline Positions first_tokens(int64_t n) {
  Positions p(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) p[size_t(i)] = i;
  return p;
}

// The k best positions with the forced ones; ties to the newer.
inline Positions best_of(const Positions& held, std::vector<double> score, const std::set<int64_t>& forced, int64_t k) {
  for (size_t r = 0; r < held.size(); ++r) {
    if (forced.count(held[r]) != 0) score[r] = INFINITY;
  }
  std::vector<size_t> order(held.size());
  for (size_t r = 0; r < order.size(); ++r) order[r] = r;
  std::sort(order.begin(), order.end(),
            [&](size_t a, size_t b) { return score[a] != score[b] ? score[a] > score[b] : held[a] > held[b]; });
  Positions out;
  for (size_t i = 0; i < std::min(size_t(k), order.size()); ++i) out.push_back(held[order[i]]);
  std::sort(out.begin(), out.end());
  return out;
}

inline std::set<int64_t> ends(const Positions& held, int64_t sink, int64_t newest) {
  std::set<int64_t> forced;
  for (const int64_t p : held) {
    if (p < sink) forced.insert(p);
  }
  for (size_t r = held.size() - size_t(std::min<int64_t>(newest, int64_t(held.size()))); r < held.size(); ++r) {
    forced.insert(held[r]);
  }
  return forced;
}

// SnapKV's selection over the held positions of a KV head; n: tokens seen, from: the prompt's start.
inline std::vector<double> snapkv_scores(const KvShape& s, const Tokens& t, int64_t n, int64_t from, int kv_head,
                                         const Positions& held, const KeepSpec& spec) {
  const auto mass = mass_of(s, t, std::max(from, n - spec.window), n, kv_head, held);
  std::vector<double> group(held.size(), 0.0);
  for (size_t r = 0; r < held.size(); ++r) {
    for (const auto& m : mass) {
      group[r] = spec.reduce == KeepReduce::kMax ? std::max(group[r], m[r]) : group[r] + m[r];
    }
  }
  const int64_t pooled = int64_t(held.size()) - spec.window;
  std::vector<double> out(group);
  for (int64_t r = 0; r < pooled; ++r) {
    double best = -INFINITY, sum = 0;
    for (int64_t i = std::max<int64_t>(0, r - spec.kernel / 2); i <= std::min(pooled - 1, r + spec.kernel / 2); ++i) {
      best = std::max(best, group[size_t(i)]);
      sum += group[size_t(i)];
    }
    out[size_t(r)] = spec.pool == KeepPool::kMax ? best : sum / double(spec.kernel);
  }
  return out;
}

inline Positions sorted_positions(const KvSession& session, int layer, int kv_head) {
  Positions p = session.kept_positions(layer, kv_head);
  std::sort(p.begin(), p.end());
  return p;
}

}  // namespace longkv::test
