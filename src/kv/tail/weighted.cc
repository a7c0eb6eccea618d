#include "kv/tail/weighted.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "kv/attend_kernel.h"
#include "kv/codec/codec.h"

namespace longkv {

void score_rows(const KvHeadView& kv, const float* q, int n_q, const AttendParams& params,
                std::span<const int64_t> rows, float* logits) {
  thread_local std::vector<float> row;
  row.resize(size_t(kv.dim_k));
  const auto n = int64_t(rows.size());
  for (int64_t i = 0; i < n; ++i) {
    decode_k_rows(kv, rows[size_t(i)], rows[size_t(i)] + 1, row.data());
    for (int j = 0; j < n_q; ++j) {
      const float* own = q + int64_t(j) * kv.dim_k;
      float dot[8] = {};
      int c = 0;
      for (; c + 8 <= kv.dim_k; c += 8) {
        for (int l = 0; l < 8; ++l) dot[l] += own[c + l] * row[size_t(c) + size_t(l)];
      }
      for (; c < kv.dim_k; ++c) dot[0] += own[c] * row[size_t(c)];
      float logit = params.scale * (((dot[0] + dot[4]) + (dot[2] + dot[6])) + ((dot[1] + dot[5]) + (dot[3] + dot[7])));
      if (params.softcap > 0) logit = params.softcap * std::tanh(logit / params.softcap);
      if (kv.bias != nullptr) logit += kv.bias[rows[size_t(i)]];
      logits[j * n + i] = logit;
    }
  }
}

void attend_weighted(const KvHeadView& kv, const float* q, const AttendParams& params, std::span<const int64_t> rows,
                     std::span<const float> log_weight, float* out, float* lse) {
  constexpr float kNone = -std::numeric_limits<float>::infinity();
  thread_local std::vector<float> row, logits;
  row.resize(size_t(std::max(kv.dim_k, kv.dim_v)));
  logits.resize(rows.size());
  score_rows(kv, q, 1, params, rows, logits.data());
  float peak = kNone;
  for (size_t i = 0; i < rows.size(); ++i) {
    logits[i] += log_weight[i];
    peak = std::max(peak, logits[i]);
  }
  std::fill(out, out + kv.dim_v, 0.0f);
  *lse = kNone;
  if (peak == kNone) return;
  for (float& x : logits) x -= peak;
  exp_nonpositive(logits.data(), logits.data(), int64_t(logits.size()));
  float total = 0;
  for (size_t i = 0; i < rows.size(); ++i) {
    decode_v_rows(kv, rows[i], rows[i] + 1, row.data());
    const float w = logits[i];
    total += w;
    for (int c = 0; c < kv.dim_v; ++c) out[c] += w * row[size_t(c)];
  }
  for (int c = 0; c < kv.dim_v; ++c) out[c] /= total;
  *lse = peak + std::log(total);
}

void merge_into(float* out, float lse, const float* other, float other_lse, int64_t dim) {
  thread_local std::vector<float> both;
  both.resize(size_t(2 * dim));
  std::copy(out, out + dim, both.data());
  std::copy(other, other + dim, both.data() + dim);
  const float lses[] = {lse, other_lse};
  float merged = 0;
  merge_partials(both.data(), lses, 2, dim, out, &merged);
}

}  // namespace longkv
