// Random prompts for prefill attention, an encoder of the KV row formats written apart from the library's, and the
// reference in double precision.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "base/float16.h"
#include "base/threads.h"
#include "prefill/attention.h"

namespace longkv::testing {

struct StoredRows {
  std::vector<uint8_t> bytes;
  std::vector<double> values;  // what the stored bytes mean, [rows][dim]
  int64_t stride = 0;
};

inline int64_t stored_bytes(KvType type, int64_t dim) {
  switch (type) {
    case KvType::kF32: return 4 * dim;
    case KvType::kF16:
    case KvType::kBf16: return 2 * dim;
    case KvType::kQ8_0: return dim + dim / 16;
    case KvType::kQ4_0: return dim / 2 + dim / 16;
    default: return 0;  // rows of these types reach the kernels decoded
  }
}

inline StoredRows store_rows(KvType type, const std::vector<float>& src, int64_t rows, int64_t dim) {
  StoredRows out;
  out.stride = stored_bytes(type, dim) + 2;  // odd strides: rows need not be aligned
  out.bytes.assign(size_t(rows * out.stride), 0xff);
  out.values.resize(size_t(rows * dim));
  for (int64_t r = 0; r < rows; ++r) {
    uint8_t* to = out.bytes.data() + r * out.stride;
    const float* x = src.data() + r * dim;
    double* value = out.values.data() + r * dim;
    const auto put16 = [&](int64_t offset, uint16_t bits) { std::memcpy(to + offset, &bits, 2); };
    for (int64_t i = 0; i < dim; ++i) {
      if (type == KvType::kF32) {
        std::memcpy(to + 4 * i, x + i, 4);
        value[i] = x[i];
      } else if (type == KvType::kF16) {
        put16(2 * i, to_f16(x[i]).bits);
        value[i] = to_float(to_f16(x[i]));
      } else if (type == KvType::kBf16) {
        put16(2 * i, to_bf16(x[i]).bits);
        value[i] = to_float(to_bf16(x[i]));
      }
    }
    if (type != KvType::kQ8_0 && type != KvType::kQ4_0) continue;
    const int limit = type == KvType::kQ8_0 ? 127 : 7;
    for (int64_t g = 0; g < dim / 32; ++g) {
      float largest = 0;
      for (int i = 0; i < 32; ++i) largest = std::max(largest, std::fabs(x[32 * g + i]));
      const f16_t scale = to_f16(largest / float(limit));
      const double d = to_float(scale);
      put16((type == KvType::kQ8_0 ? dim : dim / 2) + 2 * g, scale.bits);
      if (type == KvType::kQ4_0) std::memset(to + 16 * g, 0, 16);
      for (int i = 0; i < 32; ++i) {
        const int q = d == 0 ? 0 : int(std::clamp(std::round(x[32 * g + i] / d), double(-limit), double(limit)));
        if (type == KvType::kQ8_0) {
          to[32 * g + i] = uint8_t(int8_t(q));
        } else {
          to[16 * g + i % 16] |= uint8_t((q + 8) << (i < 16 ? 0 : 4));
        }
        value[32 * g + i] = q * d;
      }
    }
  }
  return out;
}

struct CaseSpec {
  int64_t rows = 100;  // prompt length
  int kv_heads = 2;
  int group = 3;
  int dim_k = 64;
  int dim_v = 64;
  KvType k_type = KvType::kF32;
  KvType v_type = KvType::kF32;
  int64_t window = 0;
  float scale = 0;  // 0: 1/sqrt(dim_k)
  float softcap = 0;
  float amplitude = 1;  // of the queries
  uint32_t seed = 1;
};

struct AttentionCase {
  CaseSpec spec;
  std::vector<float> q;  // [rows][heads][dim_k]
  std::vector<StoredRows> k, v;
  std::vector<KvHeadView> views;

  explicit AttentionCase(const CaseSpec& s) : spec(s) {
    if (spec.scale == 0) spec.scale = 1.0f / std::sqrt(float(spec.dim_k));
    std::mt19937 random(spec.seed);
    std::normal_distribution<float> normal;
    const auto fill = [&](int64_t n, float amplitude) {
      std::vector<float> x(static_cast<size_t>(n));
      for (float& f : x) f = amplitude * normal(random);
      return x;
    };
    q = fill(spec.rows * heads() * spec.dim_k, spec.amplitude);
    for (int h = 0; h < spec.kv_heads; ++h) {
      k.push_back(store_rows(spec.k_type, fill(spec.rows * spec.dim_k, 1), spec.rows, spec.dim_k));
      v.push_back(store_rows(spec.v_type, fill(spec.rows * spec.dim_v, 1), spec.rows, spec.dim_v));
    }
    refresh_views();
  }

  void refresh_views() {
    views.clear();
    for (int h = 0; h < spec.kv_heads; ++h) {
      KvHeadView view;
      view.k_type = spec.k_type;
      view.v_type = spec.v_type;
      view.dim_k = spec.dim_k;
      view.dim_v = spec.dim_v;
      view.k = k[size_t(h)].bytes.data();
      view.v = v[size_t(h)].bytes.data();
      view.k_stride = k[size_t(h)].stride;
      view.v_stride = v[size_t(h)].stride;
      view.rows = spec.rows;
      views.push_back(view);
    }
  }

  int heads() const { return spec.kv_heads * spec.group; }

  PrefillAttendArgs args(int64_t first, int64_t tokens, float* out) const {
    PrefillAttendArgs a;
    a.q = q.data() + first * heads() * spec.dim_k;
    a.tokens = tokens;
    a.first_position = first;
    a.window = spec.window;
    a.heads = views;
    a.group_size = spec.group;
    a.params = {spec.scale, spec.softcap};
    a.out = out + first * heads() * spec.dim_v;
    return a;
  }

  // Runs the prompt in chunks; `mass` ([heads][rows]) may be null.
  std::vector<float> run(ThreadPool& pool, int64_t chunk, float* mass = nullptr, int64_t mass_from = 0) const {
    std::vector<float> out(size_t(spec.rows * heads() * spec.dim_v), std::numeric_limits<float>::quiet_NaN());
    PrefillAttention attention(pool);
    for (int64_t first = 0; first < spec.rows; first += chunk) {
      PrefillAttendArgs a = args(first, std::min(chunk, spec.rows - first), out.data());
      a.mass = mass;
      a.mass_stride = spec.rows;
      a.mass_from = mass_from;
      attention.run(a);
    }
    return out;
  }

  // Softmax weights of the query at `position`, zero where it does not see the key; and a bound of the error that
  // fp32 scores cause in the output, as a multiple of max |v|.
  std::vector<double> weights(int64_t position, int head, double* error) const {
    const StoredRows& keys = k[size_t(head / spec.group)];
    const float* query = q.data() + (position * heads() + head) * spec.dim_k;
    std::vector<double> w(size_t(spec.rows), 0.0);
    const int64_t begin = spec.window > 0 ? std::max<int64_t>(0, position - spec.window + 1) : 0;
    double top = -std::numeric_limits<double>::infinity();
    double largest = 0;
    for (int64_t r = begin; r <= position; ++r) {
      double dot = 0, magnitude = 0;
      for (int i = 0; i < spec.dim_k; ++i) {
        const double product = double(query[i]) * keys.values[size_t(r * spec.dim_k + i)];
        dot += product;
        magnitude += std::fabs(product);
      }
      dot *= spec.scale;
      if (spec.softcap > 0) dot = spec.softcap * std::tanh(dot / spec.softcap);
      w[size_t(r)] = dot;
      top = std::max(top, dot);
      largest = std::max(largest, magnitude * std::fabs(spec.scale));
    }
    double sum = 0;
    for (int64_t r = begin; r <= position; ++r) sum += w[size_t(r)] = std::exp(w[size_t(r)] - top);
    for (int64_t r = begin; r <= position; ++r) w[size_t(r)] /= sum;
    // A score's error: rounding of a sum of dim_k products, at worst dim_k but typically sqrt(dim_k) ulps of its
    // magnitude, and of the soft cap; it changes the weight by as much, relatively. Then the sum over the tile.
    const double eps = std::numeric_limits<float>::epsilon();
    *error = 2 * eps * (largest * (2 + std::sqrt(spec.dim_k)) + spec.softcap + std::sqrt(256.0) + 8);
    return w;
  }
};

}  // namespace longkv::testing
