// Methods that look at keys alone: knorm, keydiff, and random as the baseline of baselines.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kv/codec/codec.h"
#include "kv/keep/kinds.h"
#include "kv/keep/rank.h"
#include "kv/keep/score_keeper.h"

namespace longkv {

namespace {

constexpr int64_t kRowsAtOnce = 256;

// Calls fn(row, key) for rows [first, last) of a head, decoded.
template <class Fn>
void each_key(const KvHeadView& head, int64_t first, int64_t last, const Fn& fn) {
  std::vector<float> keys(size_t(kRowsAtOnce * head.dim_k));
  for (int64_t begin = first; begin < last; begin += kRowsAtOnce) {
    const int64_t end = std::min(last, begin + kRowsAtOnce);
    decode_k_rows(head, begin, end, keys.data());
    for (int64_t r = begin; r < end; ++r) fn(r, keys.data() + (r - begin) * head.dim_k);
  }
}

template <class Fn>
void each_key(const KvHeadView& head, const Fn& fn) {
  each_key(head, 0, head.rows, fn);
}

double norm_of(const float* key, int64_t dim) {
  double sum = 0;
  for (int64_t c = 0; c < dim; ++c) sum += double(key[c]) * key[c];
  return std::sqrt(sum);
}

// Keys of small norm get much attention (arXiv 2406.11430): score = -||k||.
class KnormKeeper : public ScoreKeeper {
 public:
  using ScoreKeeper::ScoreKeeper;
  void score(const KeepInput& input, RowScores& scores) override {
    input.pool->run(int64_t(input.heads.size()), [&](int64_t h, int) {
      const KvHeadView& head = input.heads[size_t(h)];
      each_key(head,
               [&](int64_t r, const float* key) { scores[size_t(h)][size_t(r)] = float(-norm_of(key, head.dim_k)); });
    });
  }
};

// Keys unlike the others are kept (KeyDiff, arXiv 2504.15364): score = -cos(k, mean of the unit keys). With block=B the
// mean is that of the rows left so far and the next B ones, of which as many as the budget stay before the next ones
// come, as the paper does.
class KeydiffKeeper : public ScoreKeeper {
 public:
  using ScoreKeeper::ScoreKeeper;
  void score(const KeepInput& input, RowScores& scores) override {
    const int64_t budget = layer_budget(input.layer, input.layers, input.tokens);
    input.pool->run(int64_t(input.heads.size()), [&](int64_t h, int) {
      const KvHeadView& head = input.heads[size_t(h)];
      spec_.block > 0 ? by_blocks(head, budget, scores[size_t(h)]) : at_once(head, scores[size_t(h)]);
    });
  }

 private:
  static constexpr double kSmallest = 1e-12;

  // Keys are decoded twice rather than held: a head may have a million of them.
  static void at_once(const KvHeadView& head, std::vector<float>& own) {
    std::vector<double> anchor(size_t(head.dim_k), 0.0);
    each_key(head, [&](int64_t, const float* key) {
      const double norm = std::max(norm_of(key, head.dim_k), kSmallest);
      for (int64_t c = 0; c < head.dim_k; ++c) anchor[size_t(c)] += key[c] / norm;
    });
    const double length = length_of(anchor);
    each_key(head, [&](int64_t r, const float* key) {
      double dot = 0;
      for (int64_t c = 0; c < head.dim_k; ++c) dot += key[c] * anchor[size_t(c)];
      own[size_t(r)] = float(-dot / (std::max(norm_of(key, head.dim_k), kSmallest) * length));
    });
  }

  // Holds the unit keys of what is left and of one block.
  void by_blocks(const KvHeadView& head, int64_t budget, std::vector<float>& own) const {
    const int64_t dim = head.dim_k;
    const std::vector<char> forced = forced_rows(spec_, head);
    std::fill(own.begin(), own.end(), -2.0f);  // below every cosine: rows that an earlier block dropped
    std::vector<int64_t> left;
    std::vector<float> unit;  // [left][dim]
    int64_t begin = 0, end = std::min(head.rows, budget + spec_.block);
    while (true) {
      each_key(head, begin, end, [&](int64_t r, const float* key) {
        const double norm = std::max(norm_of(key, dim), kSmallest);
        left.push_back(r);
        for (int64_t c = 0; c < dim; ++c) unit.push_back(float(key[c] / norm));
      });
      std::vector<float> now = cosines(unit, dim);
      if (end == head.rows) {
        for (size_t i = 0; i < left.size(); ++i) own[size_t(left[i])] = now[i];
        return;
      }
      for (size_t i = 0; i < left.size(); ++i) {
        if (forced[size_t(left[i])] != 0) now[i] = std::numeric_limits<float>::infinity();
      }
      size_t kept = 0;
      for (const int64_t i : best_rows(now, nullptr, budget)) {  // ascending, so rows move down
        left[kept] = left[size_t(i)];
        std::copy_n(unit.begin() + i * dim, dim, unit.begin() + int64_t(kept) * dim);
        ++kept;
      }
      left.resize(kept);
      unit.resize(kept * size_t(dim));
      begin = end;
      end = std::min(head.rows, end + spec_.block);
    }
  }

  static double length_of(const std::vector<double>& x) {
    double square = 0;
    for (const double v : x) square += v * v;
    return std::max(std::sqrt(square), kSmallest);
  }

  // -cos of each of the rows and the mean of them all.
  static std::vector<float> cosines(const std::vector<float>& unit, int64_t dim) {
    std::vector<double> anchor(size_t(dim), 0.0);
    for (size_t i = 0; i < unit.size(); ++i) anchor[i % size_t(dim)] += unit[i];
    const double length = length_of(anchor);
    std::vector<float> out(unit.size() / size_t(dim));
    for (size_t r = 0; r < out.size(); ++r) {
      double dot = 0;
      for (size_t c = 0; c < size_t(dim); ++c) dot += unit[r * size_t(dim) + c] * anchor[c];
      out[r] = float(-dot / length);
    }
    return out;
  }
};

// A score from seed, layer, head and position: the same rows for every thread count and every run.
class RandomKeeper : public ScoreKeeper {
 public:
  using ScoreKeeper::ScoreKeeper;
  void score(const KeepInput& input, RowScores& scores) override {
    for (size_t h = 0; h < input.heads.size(); ++h) {
      const uint64_t stream = mix(uint64_t(spec_.seed) + mix(uint64_t(input.layer) * 65536 + h));
      for (int64_t r = 0; r < input.heads[h].rows; ++r) {
        scores[h][size_t(r)] = float(mix(stream ^ uint64_t(input.heads[h].pos[r])) >> 40);
      }
    }
  }

 private:
  // The finaliser of SplitMix64.
  static uint64_t mix(uint64_t x) {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
  }
};

}  // namespace

std::unique_ptr<Keeper> make_knorm(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<KnormKeeper>(spec, shape);
}
std::unique_ptr<Keeper> make_keydiff(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<KeydiffKeeper>(spec, shape);
}
std::unique_ptr<Keeper> make_random(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<RandomKeeper>(spec, shape);
}

}  // namespace longkv
