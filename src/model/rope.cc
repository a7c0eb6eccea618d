#include "model/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "base/checked.h"

namespace longkv {

namespace {

// Channel pair whose frequency makes `rotations` turns over `context` tokens (YaRN, section 3.2).
double yarn_correction_dim(double rotations, int dim, double base, double context) {
  return dim * std::log(context / (rotations * 2.0 * std::numbers::pi)) / (2.0 * std::log(base));
}

}  // namespace

RopeTable::RopeTable(const RopeConfig& c, int64_t max_position) : dim_(c.dim), pairs_(c.pairs) {
  const int half = dim_ / 2;
  double base = c.base;
  if (c.scaling == RopeScaling::kNtk && dim_ > 2) base *= std::pow(c.factor, double(dim_) / (dim_ - 2));

  double low = 0.0, high = 0.0;
  if (c.scaling == RopeScaling::kYarn) {
    const double context = double(c.original_context);
    low = std::max(0.0, std::floor(yarn_correction_dim(c.beta_fast, dim_, base, context)));
    high = std::min(dim_ - 1.0, std::ceil(yarn_correction_dim(c.beta_slow, dim_, base, context)));
  }
  inv_freq_.resize(size_t(half));
  for (int i = 0; i < half; ++i) {
    double f = std::pow(base, -2.0 * i / dim_);
    if (!c.freq_divisors.empty()) f /= c.freq_divisors[size_t(i)];
    if (c.scaling == RopeScaling::kLinear) f /= c.factor;
    if (c.scaling == RopeScaling::kYarn) {
      const double ramp = std::clamp((i - low) / std::max(0.001, high - low), 0.0, 1.0);
      f = f / c.factor * ramp + f * (1.0 - ramp);  // high frequencies (ramp 0) keep their speed
    }
    inv_freq_[size_t(i)] = float(f);
  }
  if (c.attn_factor != 0.0) {
    magnitude_ = c.attn_factor;
  } else if (c.scaling == RopeScaling::kYarn && c.factor > 1.0) {
    magnitude_ = 0.1 * std::log(c.factor) + 1.0;
  }

  auto fill = [&](std::vector<double>& table, int64_t n, int64_t step) {
    table.resize(size_t(n) * size_t(half) * 2);
    for (int64_t p = 0; p < n; ++p) {
      for (int i = 0; i < half; ++i) {
        const double angle = double(p * step) * double(inv_freq_[size_t(i)]);
        table[size_t((p * half + i) * 2)] = std::cos(angle);
        table[size_t((p * half + i) * 2 + 1)] = std::sin(angle);
      }
    }
  };
  fill(fine_, std::min(kFine, std::max<int64_t>(max_position, 1)), 1);
  fill(coarse_, max_position / kFine + 1, kFine);
}

void RopeTable::angles(int64_t position, float* cos, float* sin) const {
  const int half = dim_ / 2;
  const double* a = &coarse_[size_t(position / kFine) * size_t(half) * 2];
  const double* b = &fine_[size_t(position % kFine) * size_t(half) * 2];
  for (int i = 0; i < half; ++i) {
    cos[i] = float((a[2 * i] * b[2 * i] - a[2 * i + 1] * b[2 * i + 1]) * magnitude_);
    sin[i] = float((a[2 * i + 1] * b[2 * i] + a[2 * i] * b[2 * i + 1]) * magnitude_);
  }
}

namespace {

// Rotates the pairs of one row by the given angles.
void turn_row(RopePairs pairs, int half, const float* cos, const float* sin, float* v) {
  const int step = pairs == RopePairs::kAdjacent ? 2 : 1;
  const int other = pairs == RopePairs::kAdjacent ? 1 : half;
  for (int i = 0; i < half; ++i) {
    const float a = v[step * i], b = v[step * i + other];
    v[step * i] = a * cos[i] - b * sin[i];
    v[step * i + other] = a * sin[i] + b * cos[i];
  }
}

}  // namespace

void turn_rows(const RopeTable& table, double delta, float* x, int64_t n, int64_t stride) {
  const int half = table.dim() / 2;
  std::vector<float> angle(size_t(half) * 2);
  for (int i = 0; i < half; ++i) {
    const double a = delta * double(table.inverse_frequencies()[size_t(i)]);
    angle[size_t(i)] = float(std::cos(a));
    angle[size_t(half) + size_t(i)] = float(std::sin(a));
  }
  for (int64_t r = 0; r < n; ++r) turn_row(table.pairs(), half, angle.data(), angle.data() + half, x + r * stride);
}

void apply_rope(const RopeTable& table, float* x, int64_t tokens, int heads, int head_dim, int64_t first_position,
                ThreadPool& pool) {
  const int half = table.dim() / 2;
  const int64_t token_stride = int64_t(heads) * head_dim;
  constexpr int64_t kTokensPerTask = 16;
  pool.run(ceil_div(tokens, kTokensPerTask), [&](int64_t task, int) {
    std::vector<float> angle(size_t(half) * 2);
    float* cos = angle.data();
    float* sin = cos + half;
    const int64_t end = std::min(tokens, (task + 1) * kTokensPerTask);
    for (int64_t t = task * kTokensPerTask; t < end; ++t) {
      table.angles(first_position + t, cos, sin);
      for (int h = 0; h < heads; ++h) {
        float* v = x + t * token_stride + int64_t(h) * head_dim;
        if (table.pairs() == RopePairs::kAdjacent) {
          for (int i = 0; i < half; ++i) {
            const float a = v[2 * i], b = v[2 * i + 1];
            v[2 * i] = a * cos[i] - b * sin[i];
            v[2 * i + 1] = a * sin[i] + b * cos[i];
          }
        } else {
          for (int i = 0; i < half; ++i) {
            const float a = v[i], b = v[i + half];
            v[i] = a * cos[i] - b * sin[i];
            v[i + half] = a * sin[i] + b * cos[i];
          }
        }
      }
    }
  });
}

}  // namespace longkv
