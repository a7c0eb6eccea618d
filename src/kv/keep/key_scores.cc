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

// Calls fn(row, key) for every row of a head, decoded.
template <class Fn>
void each_key(const KvHeadView& head, const Fn& fn) {
  std::vector<float> keys(size_t(kRowsAtOnce * head.dim_k));
  for (int64_t begin = 0; begin < head.rows; begin += kRowsAtOnce) {
    const int64_t end = std::min(head.rows, begin + kRowsAtOnce);
    decode_k_rows(head, begin, end, keys.data());
    for (int64_t r = begin; r < end; ++r) fn(r, keys.data() + (r - begin) * head.dim_k);
  }
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
      std::vector<float> unit(size_t(head.rows * head.dim_k));
      each_key(head, [&](int64_t r, const float* key) {
        const double norm = std::max(norm_of(key, head.dim_k), kSmallest);
        for (int64_t c = 0; c < head.dim_k; ++c) unit[size_t(r * head.dim_k + c)] = float(key[c] / norm);
      });
      std::vector<float>& own = scores[size_t(h)];
      const int64_t block = spec_.block > 0 ? spec_.block : head.rows;
      const std::vector<char> forced = forced_rows(spec_, head);
      std::vector<int64_t> left = all_rows(std::min(head.rows, spec_.block > 0 ? budget : 0));
      std::fill(own.begin(), own.end(), -2.0f);  // below every cosine: rows that an earlier block dropped
      for (int64_t begin = int64_t(left.size()); begin < head.rows; begin += block) {
        for (int64_t r = begin; r < std::min(head.rows, begin + block); ++r) left.push_back(r);
        std::vector<float> now = cosines(unit, left, head.dim_k);
        const bool last = begin + block >= head.rows;
        for (size_t i = 0; i < left.size(); ++i) {
          if (last) own[size_t(left[i])] = now[i];
          if (forced[size_t(left[i])] != 0) now[i] = std::numeric_limits<float>::infinity();
        }
        if (last) break;
        std::vector<int64_t> kept;
        for (const int64_t i : best_rows(now, nullptr, budget)) kept.push_back(left[size_t(i)]);
        left = std::move(kept);
      }
    });
  }

 private:
  static constexpr double kSmallest = 1e-12;

  // -cos of each of the rows and the mean of them all.
  static std::vector<float> cosines(const std::vector<float>& unit, const std::vector<int64_t>& rows, int64_t dim) {
    std::vector<double> anchor(size_t(dim), 0.0);
    for (const int64_t r : rows) {
      for (int64_t c = 0; c < dim; ++c) anchor[size_t(c)] += unit[size_t(r * dim + c)];
    }
    double length = 0;
    for (const double a : anchor) length += a * a;
    length = std::max(std::sqrt(length), kSmallest);
    std::vector<float> out;
    for (const int64_t r : rows) {
      double dot = 0;
      for (int64_t c = 0; c < dim; ++c) dot += unit[size_t(r * dim + c)] * anchor[size_t(c)];
      out.push_back(float(-dot / length));
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
