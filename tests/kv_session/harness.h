// A session fed with seeded rows, and the slow double-precision attention that it is compared with.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "base/threads.h"
#include "kv/session.h"

namespace longkv::test {

struct Rng {
  explicit Rng(uint64_t seed) : engine(seed) {}
  std::vector<float> normal(int64_t n, float scale = 1.0f) {
    std::normal_distribution<float> d(0.0f, scale);
    std::vector<float> v(static_cast<size_t>(n));
    for (float& x : v) x = d(engine);
    return v;
  }
  std::mt19937_64 engine;
};

inline KvShape make_shape(int layers, int kv_heads, int group, int dim_k, int dim_v = 0) {
  KvShape shape;
  shape.layers = layers;
  shape.kv_heads = kv_heads;
  shape.group_size = group;
  shape.dim_k = dim_k;
  shape.dim_v = dim_v > 0 ? dim_v : dim_k;
  return shape;
}

// Queries, keys and values of `n` tokens of one layer.
struct Tokens {
  Tokens(const KvShape& s, int64_t n, uint64_t seed) {
    Rng rng(seed);
    q = rng.normal(n * s.kv_heads * s.group_size * s.dim_k);
    k = rng.normal(n * s.kv_heads * s.dim_k);
    v = rng.normal(n * s.kv_heads * s.dim_v);
  }
  const float* q_at(const KvShape& s, int64_t t) const { return q.data() + t * s.kv_heads * s.group_size * s.dim_k; }
  const float* k_at(const KvShape& s, int64_t t) const { return k.data() + t * s.kv_heads * s.dim_k; }
  const float* v_at(const KvShape& s, int64_t t) const { return v.data() + t * s.kv_heads * s.dim_v; }
  std::vector<float> q, k, v;
};

struct Partial {
  std::vector<double> out;
  double lse = 0;
};

// Softmax attention of query head j of a token over the given rows, in double.
inline Partial reference_attend(const KvShape& s, const Tokens& t, int64_t query_token, int j,
                                const std::vector<RowRange>& ranges, double scale) {
  const int h = j / s.group_size;
  const float* q = t.q_at(s, query_token) + int64_t(j) * s.dim_k;
  std::vector<double> scores;
  std::vector<int64_t> rows;
  double peak = -INFINITY;
  for (const RowRange& r : ranges) {
    for (int64_t row = r.begin; row < r.end; ++row) {
      const float* k = t.k_at(s, row) + int64_t(h) * s.dim_k;
      double dot = 0;
      for (int c = 0; c < s.dim_k; ++c) dot += double(q[c]) * k[c];
      scores.push_back(dot * scale);
      rows.push_back(row);
      peak = std::max(peak, scores.back());
    }
  }
  Partial p;
  p.out.assign(size_t(s.dim_v), 0.0);
  double sum = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    const double w = std::exp(scores[i] - peak);
    sum += w;
    const float* v = t.v_at(s, rows[i]) + int64_t(h) * s.dim_v;
    for (int c = 0; c < s.dim_v; ++c) p.out[size_t(c)] += w * v[c];
  }
  for (double& x : p.out) x /= sum;
  p.lse = peak + std::log(sum);
  return p;
}

inline Recipe full_f32() {
  Recipe r;
  r.name = "full";
  r.store = {KvType::kF32, KvType::kF32};
  return r;
}

inline AttendParams plain_params(const KvShape& s) { return {1.0f / std::sqrt(float(s.dim_k)), 0.0f}; }

inline std::unique_ptr<KvSession> make_session(const KvShape& shape, const Recipe& recipe, int64_t capacity,
                                               ThreadPool& pool) {
  auto session = KvSession::create(shape, recipe, {capacity}, plain_params(shape), pool);
  EXPECT_TRUE(session.ok()) << session.status().message();
  return session.ok() ? std::move(session).value() : nullptr;
}

// Feeds tokens [begin, end) as prompt chunks of `chunk` to every layer (layer-major); outputs of layer 0.
inline std::vector<float> feed_prompt(KvSession& session, const Tokens& t, int64_t begin, int64_t end, int64_t chunk) {
  const KvShape& s = session.cache().shape();
  const int64_t width = int64_t(s.kv_heads) * s.group_size * s.dim_v;
  std::vector<float> first(size_t((end - begin) * width)), other(first.size());
  for (int l = 0; l < s.layers; ++l) {
    std::vector<float>& out = l == 0 ? first : other;
    for (int64_t i = begin; i < end; i += chunk) {
      const int64_t n = std::min(chunk, end - i);
      const Status status = session.prefill(l, t.q_at(s, i), t.k_at(s, i), t.v_at(s, i), n, end,
                                            out.data() + (i - begin) * width, nullptr);
      EXPECT_TRUE(status.ok()) << status.message();
    }
    EXPECT_TRUE(session.finish_prefill(l).ok());
  }
  return first;
}

// Decodes token i in all layers (the same q, k, v in each); out: [layers][query heads * dim_v].
inline std::vector<std::vector<float>> decode_token(KvSession& session, const Tokens& t, int64_t i) {
  const KvShape& s = session.cache().shape();
  std::vector<std::vector<float>> outs;
  for (int l = 0; l < s.layers; ++l) {
    outs.emplace_back(size_t(s.kv_heads) * size_t(s.group_size) * size_t(s.dim_v));
    const Status status = session.decode(l, t.q_at(s, i), t.k_at(s, i), t.v_at(s, i), outs.back().data());
    EXPECT_TRUE(status.ok()) << status.message();
  }
  return outs;
}

}  // namespace longkv::test
