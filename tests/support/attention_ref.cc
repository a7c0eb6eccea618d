#include "support/attention_ref.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/cpu.h"
#include "kv/codec/codec.h"
#include "support/half.h"

namespace longkv::test {

namespace {

double stored_half(const uint8_t* p) { return half_value(uint16_t(p[0] | p[1] << 8)); }

double fp8_scale(const uint8_t* row, int64_t dim) {
  const uint32_t bits = uint32_t(row[dim] | row[dim + 1] << 8) << 16;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return double(scale);
}

}  // namespace

double e4m3_value(uint8_t byte) {
  const int exponent = byte >> 3 & 15, mantissa = byte & 7;
  double v = exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  if ((byte & 0x7f) == 0x7f) v = std::nan("");
  return byte & 0x80 ? -v : v;
}

std::vector<double> decode_row_ref(KvType type, const uint8_t* row, int64_t dim) {
  std::vector<double> x(static_cast<size_t>(dim));
  for (int64_t i = 0; i < dim; ++i) {
    double& value = x[size_t(i)];
    const int64_t group = i / 32, in_group = i % 32;
    switch (type) {
      case KvType::kF32: {
        float f;
        std::memcpy(&f, row + 4 * i, 4);
        value = f;
        break;
      }
      case KvType::kF16: value = stored_half(row + 2 * i); break;
      case KvType::kBf16: {
        const uint32_t bits = uint32_t(row[2 * i] | row[2 * i + 1] << 8) << 16;
        float f;
        std::memcpy(&f, &bits, 4);
        value = f;
        break;
      }
      case KvType::kQ8_0: value = double(int8_t(row[i])) * stored_half(row + dim + 2 * group); break;
      case KvType::kQ4_0: {
        const uint8_t byte = row[16 * group + in_group % 16];
        const int nibble = in_group < 16 ? byte & 15 : byte >> 4;
        value = (nibble - 8) * stored_half(row + dim / 2 + 2 * group);
        break;
      }
      case KvType::kFp8: value = e4m3_value(row[i]) * fp8_scale(row, dim); break;
      case KvType::kKivi2:
      case KvType::kKivi4: break;  // blocks, not rows
    }
  }
  return x;
}

namespace {

// Where fp8 rows are multiplied as integers: with VNNI.
bool fp8_integers() {
#if defined(__x86_64__)
  return active_isa() >= IsaLevel::kAvx512Vnni;
#else
  return false;
#endif
}

// The largest error of an fp8 value as an integer: half of 2^-5 below a quarter, where such steps are too coarse.
double fp8_error(double value, double scale) {
  return value != 0.0 && std::abs(value) < 0.25 * std::abs(scale) ? 0x1p-6 * std::abs(scale) : 0.0;
}

// Largest error of a score from rounding q to int16 (q8_0, fp8) or to int8 in groups of 32 (q4_0), and keys of fp8.
double query_rounding(const float* q, const std::vector<double>& k, KvType type, double scale) {
  double error = 0.0;
  if (type == KvType::kFp8 && fp8_integers()) {
    double largest = 0.0, most = 0.0, keys = 0.0;
    std::vector<double> sums(4 * (k.size() / 256 + 1));
    for (size_t c = 0; c < k.size(); ++c) {
      const double magnitude = std::abs(double(q[c]));
      largest = std::max(largest, magnitude);
      double& sum = sums[c / 256 * 4 + c / 16 % 4];
      most = std::max(most, sum += magnitude);
      keys += std::abs(k[c]);
      error += magnitude * fp8_error(k[c], scale);
    }
    return error + 0.501 * std::max(largest / 32767.0, most / 139000.0) * keys;
  }
  if (!kv_type_quantized(type)) return 0.0;
  const size_t group = type == KvType::kQ4_0 ? 32 : k.size();
  for (size_t begin = 0; begin < k.size(); begin += group) {
    double largest = 0.0, keys = 0.0;
    for (size_t c = begin; c < begin + group; ++c) {
      largest = std::max(largest, std::abs(double(q[c])));
      keys += std::abs(k[c]);
    }
    error += 0.501 * largest / (type == KvType::kQ4_0 ? 127.0 : 32767.0) * keys;
  }
  return error;
}

// Largest error of sum(p v) from rounding p * scale to int16 against the largest of its tile (fp8: or the tile's sum),
// wherever tiles of at most 64 rows begin. A channel is at most scale * levels, which a group's largest value bounds
// from below (fp8: a row's).
double weight_rounding(const std::vector<double>& p, const std::vector<std::vector<double>>& values, KvType type) {
  const bool fp8 = type == KvType::kFp8 && fp8_integers();
  if (!kv_type_quantized(type) && !fp8) return 0.0;
  constexpr size_t kTile = 64;
  std::vector<double> largest(p.size()), before(p.size() + 1);
  for (size_t i = 0; i < p.size(); ++i) {
    for (double v : values[i]) largest[i] = std::max(largest[i], std::abs(v));
    before[i + 1] = before[i] + p[i] * largest[i];
  }
  double error = 0.0;
  for (size_t begin = 0; begin < p.size(); begin += kTile) {
    const size_t from = begin < kTile ? 0 : begin - kTile, to = std::min(p.size(), begin + 2 * kTile);
    double top = 0.0, most = 0.0;
    for (size_t i = from; i < to; ++i) {
      top = std::max(top, p[i] * largest[i]);
      most = std::max(most, before[std::min(i + kTile, to)] - before[i]);
    }
    const double step = fp8 ? std::max(top / 32767.0, most / 139000.0) : top / 32767.0;
    error += 0.501 * step * double(std::min(kTile, p.size() - begin));
  }
  return error;
}

}  // namespace

AttentionRef attention_ref(const float* q, const KvHeadView& kv, std::span<const RowRange> ranges,
                           const AttendParams& params) {
  constexpr double kEps = std::numeric_limits<float>::epsilon();
  AttentionRef r;
  r.out.assign(size_t(kv.dim_v), 0.0);
  r.lse = -std::numeric_limits<double>::infinity();
  std::vector<std::vector<double>> values;
  std::vector<double> v_scales;
  double largest_terms = 0.0, largest_value = 0.0, rounding = 0.0;
  for (const RowRange& range : ranges) {
    for (int64_t row = range.begin; row < range.end; ++row) {
      const auto k = decode_row_ref(kv.k_type, kv.k + row * kv.k_stride, kv.dim_k);
      double s = 0.0, terms = 0.0;
      for (int c = 0; c < kv.dim_k; ++c) {
        s += double(q[c]) * k[size_t(c)];
        terms += std::abs(double(q[c]) * k[size_t(c)]);
      }
      const double k_scale = kv.k_type == KvType::kFp8 ? fp8_scale(kv.k + row * kv.k_stride, kv.dim_k) : 0.0;
      rounding = std::max(rounding, query_rounding(q, k, kv.k_type, k_scale) * std::abs(double(params.scale)));
      s *= params.scale;
      if (params.softcap > 0.0f) s = params.softcap * std::tanh(s / params.softcap);
      if (kv.bias != nullptr) s += double(kv.bias[row]);
      r.scores.push_back(s);
      if (kv.v_type == KvType::kFp8) v_scales.push_back(fp8_scale(kv.v + row * kv.v_stride, kv.dim_v));
      largest_terms = std::max(largest_terms, terms * std::abs(double(params.scale)));
      values.push_back(decode_row_ref(kv.v_type, kv.v + row * kv.v_stride, kv.dim_v));
    }
  }
  if (r.scores.empty()) return r;
  const double top = *std::max_element(r.scores.begin(), r.scores.end());
  double sum = 0.0;
  std::vector<double> weights, code_errors(r.out.size());
  for (size_t i = 0; i < r.scores.size(); ++i) {
    const double p = std::exp(r.scores[i] - top);
    sum += p;
    weights.push_back(p);
    for (size_t c = 0; c < r.out.size(); ++c) {
      r.out[c] += p * values[i][c];
      if (kv.v_type == KvType::kFp8 && fp8_integers()) code_errors[c] += p * fp8_error(values[i][c], v_scales[i]);
      largest_value = std::max(largest_value, std::abs(values[i][c]));
    }
  }
  for (double& o : r.out) o /= sum;
  r.lse = top + std::log(sum);
  // A score is a sum of dim products, each rounded, in lanes; the cap adds a few roundings of its own magnitude.
  // Weights err by their score's error, in numerator and denominator; sums over rows add one rounding per row and
  // rescaling.
  r.score_tolerance =
      rounding + kEps * (largest_terms * (8.0 + kv.dim_k / 4.0) + 8.0 * params.softcap + std::abs(r.lse));
  r.out_tolerance = (2.0 * r.score_tolerance + kEps * (64.0 + 2.0 * double(r.scores.size()))) * largest_value;
  r.out_tolerance += weight_rounding(weights, values, kv.v_type) / sum;
  r.out_tolerance += *std::max_element(code_errors.begin(), code_errors.end()) / sum;
  r.score_tolerance += kEps * (16.0 + double(r.scores.size()));
  return r;
}

std::vector<float> random_floats(int64_t n, uint32_t seed, float scale) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal(0.0f, scale);
  std::vector<float> x(static_cast<size_t>(n));
  for (float& v : x) v = normal(engine);
  return x;
}

RandomHead::RandomHead(KvType k_type, KvType v_type, int dim_k, int dim_v, int64_t rows, uint32_t seed,
                       float key_scale) {
  view.k_type = k_type;
  view.v_type = v_type;
  view.dim_k = dim_k;
  view.dim_v = dim_v;
  view.k_stride = kv_row_bytes(k_type, dim_k);
  view.v_stride = kv_row_bytes(v_type, dim_v);
  view.rows = rows;
  k.resize(size_t(rows * view.k_stride));
  v.resize(size_t(rows * view.v_stride));
  encode_rows(k_type, random_floats(rows * dim_k, seed, key_scale).data(), dim_k, rows, dim_k, k.data(), view.k_stride);
  encode_rows(v_type, random_floats(rows * dim_v, seed + 1).data(), dim_v, rows, dim_v, v.data(), view.v_stride);
  view.k = k.data();
  view.v = v.data();
}

}  // namespace longkv::test
