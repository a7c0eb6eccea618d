#include "kv/keep/expected.h"

#include <cmath>
#include <limits>

#include "base/gemm.h"
#include "kv/codec/codec.h"
#include "kv/keep/kinds.h"

namespace longkv {

namespace {

constexpr int64_t kRowsAtOnce = 64;

// Model of one query head's queries, scaled: the exponent of row k is mean.k + k' spread k.
struct QueryModel {
  std::vector<float> mean;    // [d]
  std::vector<float> spread;  // [d][d], or empty
};

// turn: [d][d], row i is the image of unit vector i.
QueryModel model_of(const KeepStatistics& statistics, int64_t head, int64_t d, const std::vector<double>& turn,
                    double scale, bool covariance) {
  QueryModel model;
  const double n = double(std::max<int64_t>(1, statistics.n));
  std::vector<double> mean(size_t(d), 0.0);
  for (int64_t i = 0; i < d; ++i) mean[size_t(i)] = statistics.sum[size_t(head * d + i)] / n;
  model.mean.resize(size_t(d));
  for (int64_t j = 0; j < d; ++j) {
    double sum = 0;
    for (int64_t i = 0; i < d; ++i) sum += mean[size_t(i)] * turn[size_t(i * d + j)];
    model.mean[size_t(j)] = float(scale * sum);
  }
  if (!covariance) return model;
  // turn' C turn, in two products.
  std::vector<double> half(size_t(d * d), 0.0), full(size_t(d * d), 0.0);
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t a = 0; a < d; ++a) {
      const double c = statistics.product[size_t((head * d + i) * d + a)] / n - mean[size_t(i)] * mean[size_t(a)];
      for (int64_t j = 0; j < d; ++j) half[size_t(i * d + j)] += c * turn[size_t(a * d + j)];
    }
  }
  for (int64_t i = 0; i < d; ++i) {
    for (int64_t a = 0; a < d; ++a) {
      const double r = turn[size_t(i * d + a)];
      if (r == 0) continue;
      for (int64_t j = 0; j < d; ++j) full[size_t(a * d + j)] += r * half[size_t(i * d + j)];
    }
  }
  model.spread.resize(size_t(d * d));
  for (size_t i = 0; i < full.size(); ++i) model.spread[i] = float(0.5 * scale * scale * full[i]);
  return model;
}

// Exponents of `rows` keys; turned: [rows][d], room for them times the spread.
void exponents_of(const QueryModel& model, const float* keys, int64_t rows, int64_t d, std::vector<float>& turned,
                  float* out) {
  turned.assign(size_t(rows * d), 0.0f);
  if (!model.spread.empty()) gemm_add(rows, d, d, keys, d, model.spread.data(), d, turned.data(), d);
  for (int64_t r = 0; r < rows; ++r) {
    const float *key = keys + r * d, *y = turned.data() + r * d;
    double sum = 0;
    for (int64_t c = 0; c < d; ++c) sum += (double(model.mean[size_t(c)]) + y[c]) * key[c];
    out[r] = float(sum);
  }
}

}  // namespace

// Mean of the rotations by positions N .. N + future - 1.
std::vector<double> ExpectedKeeper::mean_rotation(const KeepInput& input) const {
  const int64_t d = shape_.dim_k;
  std::vector<double> sum(size_t(d * d), 0.0);
  std::vector<float> unit(size_t(d * d));
  for (int64_t f = 0; f < spec_.future; ++f) {
    std::fill(unit.begin(), unit.end(), 0.0f);
    for (int64_t i = 0; i < d; ++i) unit[size_t(i * d + i)] = 1.0f;
    (*input.rotate)(input.layer, double(input.tokens + f), unit.data(), d, d);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += double(unit[i]);
  }
  for (double& x : sum) x /= double(spec_.future);
  return sum;
}

void ExpectedKeeper::score(const KeepInput& input, RowScores& scores) {
  const int64_t d = shape_.dim_k, dv = shape_.dim_v, group = input.group_size;
  const std::vector<double> turn = mean_rotation(input);
  std::vector<QueryModel> models(size_t(shape_.kv_heads * group));
  input.pool->run(int64_t(models.size()), [&](int64_t j, int) {
    models[size_t(j)] = model_of(*input.statistics, j, d, turn, double(input.params.scale), spec_.covariance);
  });

  // Exponents by query head and row, sinks left out of the softmax.
  int64_t stride = 0;
  for (const KvHeadView& head : input.heads) stride = std::max(stride, head.rows);
  std::vector<float> exponents(models.size() * size_t(stride));
  const int64_t tiles = (stride + kRowsAtOnce - 1) / kRowsAtOnce;
  input.pool->run(tiles * shape_.kv_heads, [&](int64_t task, int) {
    const int64_t h = task % shape_.kv_heads, begin = task / shape_.kv_heads * kRowsAtOnce;
    const KvHeadView& head = input.heads[size_t(h)];
    const int64_t end = std::min(head.rows, begin + kRowsAtOnce);
    if (begin >= end) return;
    std::vector<float> keys(size_t((end - begin) * d)), turned;
    decode_k_rows(head, begin, end, keys.data());
    for (int64_t j = h * group; j < (h + 1) * group; ++j) {
      float* out = exponents.data() + j * stride;
      exponents_of(models[size_t(j)], keys.data(), end - begin, d, turned, out + begin);
      for (int64_t r = begin; r < end; ++r) {
        if (head.pos[r] < spec_.sink) out[r] = -std::numeric_limits<float>::infinity();
      }
    }
  });

  input.pool->run(shape_.kv_heads, [&](int64_t h, int) {
    const KvHeadView& head = input.heads[size_t(h)];
    std::vector<double> mean(size_t(head.rows), 0.0);
    for (int64_t j = h * group; j < (h + 1) * group; ++j) {
      const float* row = exponents.data() + j * stride;
      const double top = double(*std::max_element(row, row + head.rows));
      if (!std::isfinite(top)) continue;  // nothing but sinks
      double total = 0;
      for (int64_t r = 0; r < head.rows; ++r) total += std::exp(double(row[r]) - top);
      for (int64_t r = 0; r < head.rows; ++r) mean[size_t(r)] += std::exp(double(row[r]) - top) / total / double(group);
    }
    std::vector<float> values(size_t(kRowsAtOnce * dv));
    for (int64_t begin = 0; begin < head.rows; begin += kRowsAtOnce) {
      const int64_t end = std::min(head.rows, begin + kRowsAtOnce);
      if (spec_.value_norm) decode_v_rows(head, begin, end, values.data());
      for (int64_t r = begin; r < end; ++r) {
        double norm = 1;
        if (spec_.value_norm) {
          const float* v = values.data() + (r - begin) * dv;
          double sum = 0;
          for (int64_t c = 0; c < dv; ++c) sum += double(v[c]) * v[c];
          norm = std::sqrt(sum);
        }
        const double epsilon = spec_.value_norm ? spec_.epsilon : 0.0;
        scores[size_t(h)][size_t(r)] = float((mean[size_t(r)] + epsilon) * norm);
      }
    }
  });
}

std::unique_ptr<Keeper> make_expected_attention(const KeepSpec& spec, const KvShape& shape) {
  return std::make_unique<ExpectedKeeper>(spec, shape);
}

}  // namespace longkv
