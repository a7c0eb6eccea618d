// A K array of one layer's heads outside of any cache, and indexes over it.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "kv/codec/codec.h"
#include "kv/index/index.h"

namespace longkv::test {

inline KvShape index_shape(int kv_heads, int group, int dim) {
  KvShape shape;
  shape.layers = 1;
  shape.kv_heads = kv_heads;
  shape.group_size = group;
  shape.dim_k = dim;
  shape.dim_v = dim;
  return shape;
}

// Keys as stored in a type, and the values that they decode to.
struct Keys {
  Keys(KvType type, int64_t rows, int dim, uint64_t seed, float mean = 0.0f) : type(type), dim(dim), rows(rows) {
    std::mt19937_64 engine(seed);
    std::normal_distribution<float> d(mean, 1.0f);
    std::vector<float> row(static_cast<size_t>(dim));
    bytes.resize(size_t(rows * kv_row_bytes(type, dim)));
    for (int64_t r = 0; r < rows; ++r) {
      for (float& x : row) x = d(engine);
      set_row(r, row);
    }
  }
  void set_row(int64_t r, const std::vector<float>& row) {
    encode_row(type, row.data(), dim, bytes.data() + r * kv_row_bytes(type, dim));
  }
  KvHeadView view(int64_t n) const {
    KvHeadView v;
    v.k_type = v.v_type = type;
    v.dim_k = v.dim_v = dim;
    v.k = v.v = bytes.data();
    v.k_stride = v.v_stride = kv_row_bytes(type, dim);
    v.rows = n;
    return v;
  }
  std::vector<double> row(int64_t r) const {
    std::vector<float> f(static_cast<size_t>(dim));
    decode_row(type, bytes.data() + r * kv_row_bytes(type, dim), dim, f.data());
    return {f.begin(), f.end()};
  }
  KvType type;
  int dim;
  int64_t rows;
  std::vector<uint8_t> bytes;
};

inline std::vector<float> normal_values(int64_t n, uint64_t seed) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> d(0.0f, 1.0f);
  std::vector<float> v(static_cast<size_t>(n));
  for (float& x : v) x = d(engine);
  return v;
}

inline std::unique_ptr<BlockIndex> build_index(const IndexSpec& spec, const KvShape& shape, int64_t capacity) {
  auto index = make_index(spec, shape, capacity);
  EXPECT_TRUE(index.ok()) << index.status().message();
  return index.ok() ? std::move(index).value() : nullptr;
}

// scores[j * blocks + b] of blocks [begin, end).
inline std::vector<float> scores_of(const BlockIndex& index, int kv_head, const std::vector<float>& q, int n_q,
                                    int64_t begin, int64_t end) {
  std::vector<float> s(size_t(n_q * (end - begin)));
  index.score(kv_head, q.data(), n_q, begin, end, s.data(), end - begin);
  return s;
}

}  // namespace longkv::test
